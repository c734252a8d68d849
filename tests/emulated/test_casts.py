"""A product that quantizes its activations by a cast: the emulator gives the bits of both calls."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import pytest
import torch
from calls import Memory, check
from fp4gemm import recipe
from fp4gemm.ops.inputs import checked_input
from helpers import FLOATS, make, short
from session import SCHEDULES, Session

FORMATS = {
    torch.bfloat16: capi.FORMAT_BF16,
    torch.float16: capi.FORMAT_FP16,
    torch.float32: capi.FORMAT_FP32,
}
CASTS = (
    "per-token",
    "per-token,encode=te_per_token",
    "per-tensor,four_over_six=mae",
    "per-token,four_over_six=mse,four_over_six_error=fast,e4m3_max=448",
)


@pytest.mark.parametrize("residual", [0, 32], ids=["plain", "residual"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("activations", CASTS)
def test_a_dense_product(session: Session, activations: str, dtype: torch.dtype, residual: int) -> None:
    gen = torch.Generator().manual_seed(1)
    m, n, k = 37, 64, 96
    x = make("row_ranges", m, k, dtype, gen)
    w = fp4gemm.quantize(torch.randn(n, k, generator=gen), four_over_six="mse")
    bias = torch.randn(n, generator=gen)
    kind = recipe.INPUTS[activations]
    assert kind.scaling is not None
    cast = checked_input(kind.scaling)
    scaling: Any = "row" if kind.kind == "per-token" else "tensor"
    options: dict[str, Any] = {"scaling": scaling, **dict(kind.options)}
    channels = None
    if residual:
        channels = options["residual_channels"] = torch.randperm(k, generator=gen)[:residual].to(torch.int32)
        w = fp4gemm.repeat_columns(w, channels)
    want = fp4gemm.mm(fp4gemm.quantize(x, **options), w, bias=bias)

    def build(memory: Memory) -> tuple[object, ...]:
        args = capi.GemmArgs(
            m=m,
            n=n,
            k=k + residual,
            a=capi.Operand(memory.put(x), None, FORMATS[dtype]),
            b=capi.Operand(memory.put(w.codes), memory.put(w.scales), capi.FORMAT_NVFP4),
            alpha_col=capi.Vector(memory.put(w.amax), n),
            alpha=1 / (36 * cast.e4m3_max * w.e4m3_max),
            bias=capi.Vector(memory.put(bias), n),
            d=memory.out("d", want),
            d_row_stride=n,
            quantize_a=cast.scaling,
        )
        made = capi.Cast(
            cast.encode,
            cast.four_over_six,
            int(cast.fast_error),
            cast.e4m3_max,
            memory.put(channels),
            residual,
        )
        num_bytes, library = ctypes.c_size_t(), session.library
        assert library.fp4gemm_gemm_with_cast_workspace_bytes(args, made, 0, num_bytes) == capi.SUCCESS
        return args, made, *memory.workspace(num_bytes.value)

    check(session, "gemm_with_cast", build, SCHEDULES[2:4])
