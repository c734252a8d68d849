"""Stand-ins for the libraries that the benchmarks compare with on Blackwell, made of fp4gemm's CPU code.

They have the names, the arguments and the shapes of the functions that the benchmarks call, so that the code
for a device that is not there runs. The harness (bench_helpers) marks the rows that they take part in, which
neither files of results nor reports accept.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, layout
from torch import Tensor

from bench.baselines import cublaslt, installed, post_scale

# ---- torch


def scaled_mm(
    mat_a: Any,
    mat_b: Any,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Any = None,
    output_dtype: Any = torch.bfloat16,
    offs: Any = None,
) -> Tensor:
    """torch.nn.functional.scaled_mm, and with offs scaled_grouped_mm, in NVFP4 and MXFP8."""
    scaling, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    if scale_recipe_a == [scaling.BlockWise1x32]:
        assert [scale_recipe_b, swizzle_a, swizzle_b] == [scale_recipe_a, *[[swizzle.SWIZZLE_32_4_4]] * 2]
        return _mxfp8(mat_a, mat_b, scale_a[0], scale_b[0], offs, output_dtype)
    recipe = [scaling.BlockWise1x16, scaling.TensorWise]
    swizzles = [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    assert [scale_recipe_a, scale_recipe_b] == [recipe, recipe]
    assert [swizzle_a, swizzle_b] == [swizzles, swizzles]
    assert mat_a.dtype is mat_b.dtype is torch.float4_e2m1fn_x2
    a, b = mat_a.view(torch.uint8), mat_b.view(torch.uint8)
    if offs is None:
        assert scale_a[1].numel() == scale_b[1].numel() == 1
        return fp4gemm.scaled_mm(
            a, b.t(), scale_a[0], scale_b[0], alpha=float(scale_a[1] * scale_b[1]), out_dtype=output_dtype
        )
    weights = b.transpose(1, 2).contiguous()
    g, n, packed = weights.shape
    # As torch wants them: a matrix's scales in one row, and one multiplier for the tokens.
    padded = -(-n // 128) * 128, -(-packed // 32) * 4
    assert scale_b[0].shape == (g, padded[0] * padded[1])
    assert (scale_a[1].numel(), scale_b[1].numel()) == (1, g)
    tokens = torch.full((a.shape[0],), float(scale_a[1]) * 6 * 448)
    one = NVFP4Tensor(a, scale_a[0], tokens, offs=offs)
    scales = scale_b[0].view(g, *padded)
    stack = NVFP4Tensor(weights, scales, scale_b[1].view(-1, 1) * 6 * 448)
    return fp4gemm.grouped_mm(one, stack, offs)


def _mxfp8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    weights = b.transpose(1, 2)
    g, n, k = weights.shape
    padded = -(-n // 128) * 128, -(-k // 128) * 4
    assert scale_b.shape == (g, padded[0] * padded[1])
    x = fp4gemm.MXFP8Tensor(a, scale_a).dequantize(torch.float32)
    ends = offs.tolist()
    parts = []
    for e, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        assert begin % 128 == 0, "each group has scales of its own, padded to 128 rows"
        w = fp4gemm.MXFP8Tensor(weights[e].contiguous(), scale_b[e].view(padded)).dequantize(torch.float32)
        parts.append(x[begin:end] @ w.t())
    return torch.cat(parts).to(dtype)


# ---- TransformerEngine


class FakeTensor:
    """A quantized tensor of TransformerEngine, with the fields that the benchmarks read."""

    def __init__(self, rows: NVFP4Tensor, columns: NVFP4Tensor | None) -> None:
        self.rows, self.columns = rows, columns
        m, k = rows.shape
        self._rowwise_data = rows.codes
        shape = layout.padded_scale_shape(m, k)
        self._rowwise_scale_inv = torch.full(shape, 0x7F, dtype=torch.uint8)  # its padding is not initialized
        self._rowwise_scale_inv[:m, : k // 16] = rows.compact_scales().view(torch.uint8)
        self._amax_rowwise = rows.amax
        self._with_gemm_swizzled_scales = False


class NVFP4Quantizer:
    def __init__(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        with_rht: bool,
        with_post_rht_amax: bool,
        stochastic_rounding: bool,
        row_scaled_nvfp4: bool,
        with_2d_quantization: bool,
    ) -> None:
        assert rowwise
        assert with_rht == with_post_rht_amax
        self.columnwise = columnwise
        self.options: dict[str, Any] = {"scaling": "row" if row_scaled_nvfp4 else "tensor"}
        if with_2d_quantization:
            self.options["block"] = (16, 16)
        if stochastic_rounding:
            self.options |= {"stochastic": True, "rng_state": torch.tensor([7, 0])}
        self.hadamard = {"hadamard": "bf16"} if with_rht else {}

    def __call__(self, x: Tensor) -> FakeTensor:
        rows = fp4gemm.quantize(x, **self.options)
        columns = fp4gemm.quantize(x, axis=0, **self.options, **self.hadamard) if self.columnwise else None
        return FakeTensor(rows, columns)


def general_gemm(a: Any, b: Any, *, out_dtype: Any, layout: str, grad: bool) -> tuple[Any, ...]:
    assert grad == (layout != "TN")
    first = b.columns if layout[1] == "T" else b.rows
    second = a.rows if layout[0] == "T" else a.columns
    return fp4gemm.mm(first, second, out_dtype=out_dtype), None, None, None


def split_quantize(x: Tensor, splits: list[int], quantizers: list[Any]) -> list[FakeTensor]:
    return [quantizer(part) for quantizer, part in zip(quantizers, x.split(splits), strict=True)]


class GroupedLinear(torch.nn.Module):
    def __init__(self, g: int, k: int, n: int, *, bias: bool, params_dtype: Any, device: Any) -> None:
        super().__init__()
        assert not bias
        self.g = g
        for i in range(g):
            setattr(self, f"weight{i}", torch.nn.Parameter(torch.empty(n, k, dtype=params_dtype)))

    def forward(self, x: Tensor, splits: list[int], is_first_microbatch: bool) -> Tensor:
        if is_first_microbatch:
            self.kept = [fp4gemm.quantize_mxfp8(getattr(self, f"weight{i}").detach()) for i in range(self.g)]
        values = fp4gemm.quantize_mxfp8(x).dequantize(torch.float32)
        parts = zip(values.split(splits), self.kept, strict=True)
        return torch.cat([part @ w.dequantize(torch.float32).t() for part, w in parts]).bfloat16()


# ---- FlashInfer


class SfLayout(enum.Enum):
    layout_128x4 = 0


def nvfp4_quantize(x: Tensor, scale: Any, *, sfLayout: Any, per_token_activation: bool) -> tuple[Tensor, ...]:
    assert sfLayout is SfLayout.layout_128x4
    if per_token_activation:
        assert scale == 1 / 2688
        t = fp4gemm.quantize(x)
        return t.codes, t.scales.view(torch.uint8), t.amax / 2688
    t = fp4gemm.quantize(x, scaling="tensor", amax=2688 / scale)
    return t.codes, t.scales.view(torch.uint8)


def mm_fp4(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    e4m3 = torch.float8_e4m3fn
    first = NVFP4Tensor(a, scale_a.view(e4m3), alpha * 2688)
    second = NVFP4Tensor(b.T, scale_b.T.contiguous().view(e4m3), torch.full((1,), 2688.0))
    return fp4gemm.mm(first, second, out_dtype=dtype)


# ---- cuDNN frontend


class Node:
    """A tensor of a graph: its name and its inputs."""

    def __init__(self, name: str, inputs: tuple[Any, ...] = ()) -> None:
        self.name, self.inputs = name, inputs

    def set_data_type(self, kind: Any) -> Node:
        return self

    def set_output(self, flag: bool) -> Node:
        assert flag
        return self


class Graph:
    """A pygraph that knows one graph: a block-scaled product times a row and a column vector."""

    def __init__(self, **options: Any) -> None:
        self.dims: dict[str, list[int]] = {}

    def tensor(self, *, name: str, dim: list[int], stride: list[int], **options: Any) -> Node:
        assert len(dim) == len(stride) == 3
        self.dims[name] = dim
        return Node(name)

    def block_scale_dequantize(self, x: Node, scale: Node, block_size: list[int], name: str) -> Node:
        assert block_size == ([1, 16] if x.name == "a" else [16, 1])
        return Node(name, (x, scale))

    def matmul(self, a: Node, b: Node, compute_data_type: Any, name: str) -> Node:
        return Node(name, (a, b))

    def mul(self, name: str, a: Node, b: Node, compute_data_type: Any) -> Node:
        return Node(name, (a, b))

    def validate(self) -> None:
        (_, m, k), (_, _, n) = self.dims["a"], self.dims["b"]
        assert self.dims["alpha_row"] == [1, m, 1]
        assert self.dims["alpha_col"] == [1, 1, n]
        assert self.dims["scale_a"] == [1, *layout.padded_scale_shape(m, k)]
        assert self.dims["scale_b"] == [1, *layout.padded_scale_shape(n, k)[::-1]]

    def create_execution_plan(self, engine: int) -> None:
        assert engine == 20400

    def build_plans(self) -> None:
        pass

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Node, Tensor], workspace: Tensor, handle: Any) -> None:
        found = {node.name: value for node, value in pack.items()}
        a, b = (found[name].view(torch.uint8) for name in "ab")
        scales = [found[name].view(torch.float8_e4m3fn) for name in ("scale_a", "scale_b")]
        first = NVFP4Tensor(a, scales[0], found["alpha_row"] * 2688)
        second = NVFP4Tensor(b, scales[1], found["alpha_col"] * 2688)
        found["d"].copy_(fp4gemm.mm(first, second))


# ---- all of them


def module(name: str, **contents: Any) -> Any:
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins in the places of torch's products and of the packages."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_mm)
    monkeypatch.setattr(cublaslt, "absent", lambda name="": None)
    monkeypatch.setattr(post_scale, "compiled", lambda: post_scale.post_scale)
    te = "transformer_engine.pytorch"
    autocast = lambda enabled, recipe: contextlib.nullcontext()  # noqa: E731
    kinds = types.SimpleNamespace(**dict.fromkeys(("FLOAT", "FP4_E2M1", "FP8_E4M3", "BFLOAT16"), 0))
    for made in (
        module(te, NVFP4Quantizer=NVFP4Quantizer, GroupedLinear=GroupedLinear),
        module(f"{te}.cpp_extensions", general_gemm=general_gemm),
        module(f"{te}.quantization", autocast=autocast),
        module("transformer_engine", __path__=[]),
        module("transformer_engine.common.recipe", MXFP8BlockScaling=object),
        module("transformer_engine_torch", split_quantize=split_quantize),
        module("flashinfer", SfLayout=SfLayout, nvfp4_quantize=nvfp4_quantize, mm_fp4=mm_fp4),
        module(
            "cudnn",
            create_handle=object,
            set_stream=lambda handle, stream: None,
            pygraph=Graph,
            data_type=kinds,
            tensor_reordering=types.SimpleNamespace(F8_128x4=0),
        ),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)


@contextlib.contextmanager
def installed_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins, in a block behind which they are forgotten."""
    installed.forget()
    install(monkeypatch)
    try:
        yield
    finally:
        installed.forget()
