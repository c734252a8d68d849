"""Inputs that a kernel cannot read in place are copied, and give the bits of their contiguous copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.ops import operators
from helpers import assert_bits
from torch import Tensor

M, K = 48, 64


def mapped(x: Tensor, folder: Path) -> Tensor:
    """x from a memory-mapped file, 8 bytes past a multiple of 16, as safetensors may place it."""
    path = folder / "tensor"
    path.write_bytes(bytes(8) + x.view(torch.uint8).numpy().tobytes())
    whole = torch.from_file(str(path), size=8 + x.nbytes, dtype=torch.uint8)
    return whole[8:].view(x.dtype).view(x.shape)


FORMS: dict[str, Callable[[Tensor, Path], Tensor]] = {
    "mapped": mapped,
    "misaligned": lambda x, folder: x.new_empty(x.numel() + 4)[4:].view(x.shape).copy_(x),
    "odd row stride": lambda x, folder: torch.nn.functional.pad(x, (0, 1))[:, : x.shape[1]],
    "every other column": lambda x, folder: x.repeat_interleave(2, dim=1)[:, ::2],
    "transposed": lambda x, folder: x.T.contiguous().T,
    "expanded": lambda x, folder: x[:1].expand(x.shape),
    "empty, zero strides": lambda x, folder: x.new_empty(0).as_strided((0, x.shape[1]), (0, 0)),
}
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "quantize": fp4gemm.quantize,
    "quantize decoded": lambda x: fp4gemm.quantize(x, scaling="tensor", decoded=True),
    "quantize axis 0": lambda x: fp4gemm.quantize(x, axis=0),
    "quantize_both": lambda x: fp4gemm.quantize_both(x)[1],
    "quantize_mxfp8": fp4gemm.quantize_mxfp8,
    "silu_and_mul_quantize": fp4gemm.silu_and_mul_quantize,
    "rms_norm_quantize": fp4gemm.rms_norm_quantize,
    "rms_norm_quantize, residual": lambda x: fp4gemm.rms_norm_quantize(torch.ones_like(x), residual=x)[0],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_of_a_contiguous_copy(
    name: str, form: str, device: torch.device, gen: torch.Generator, tmp_path: Path
) -> None:
    if form == "mapped" and device.type != "cpu":
        pytest.skip("files are mapped into the memory of the CPU")
    x = FORMS[form](torch.randn(M, K, generator=gen).half().to(device), tmp_path)
    if x.shape[0] == 0 and name in ("quantize axis 0", "quantize_both"):
        with pytest.raises(ValueError, match="m is 0, must be a positive multiple of 16"):
            FUNCTIONS[name](x)
        return
    before = x.clone()
    got, want = FUNCTIONS[name](x), FUNCTIONS[name](x.clone(memory_format=torch.contiguous_format))
    assert_bits(got.dequantize() if hasattr(got, "dequantize") else got.data, parts(want), name)
    assert torch.equal(x, before)


def parts(t: Any) -> Tensor:
    return t.dequantize() if hasattr(t, "dequantize") else t.data


def test_stacks(device: torch.device, gen: torch.Generator) -> None:
    x = torch.randn(3, K, 32, generator=gen).half().to(device)
    for value in (x.mT, x[:1].expand(3, K, 32), x[..., ::2]):
        want = fp4gemm.quantize(value.contiguous())
        assert_bits(fp4gemm.quantize(value).dequantize(), want.dequantize(), str(value.stride()))


def test_plain_tokens_of_a_product(device: torch.device, gen: torch.Generator, tmp_path: Path) -> None:
    x, w = (torch.randn(rows, K, generator=gen).half().to(device) for rows in (M, 32))
    b = fp4gemm.prepack(fp4gemm.quantize(w))
    for form in ("odd row stride", "transposed", "expanded"):
        value = FORMS[form](x, tmp_path)
        assert_bits(fp4gemm.mm(value, b), fp4gemm.mm(value.contiguous(), b), form)


def test_int64_ends(device: torch.device, gen: torch.Generator) -> None:
    """cumsum makes int64, which is converted where it lies."""
    x = torch.randn(M, K, generator=gen).half().to(device)
    w = fp4gemm.quantize(torch.randn(3, 32, K, generator=gen).half().to(device))
    ends = torch.tensor([5, 0, 40], device=device).cumsum(0)
    assert ends.dtype is torch.int64
    short = ends.to(torch.int32)
    a, want = fp4gemm.quantize(x, offs=ends), fp4gemm.quantize(x, offs=short)
    assert a.offs is not None
    assert a.offs.dtype is torch.int32
    assert_bits(a.dequantize(), want.dequantize(), "quantize")
    silu = fp4gemm.silu_and_mul_quantize(x, offs=ends)
    assert_bits(silu.dequantize(), fp4gemm.silu_and_mul_quantize(x, offs=short).dequantize(), "silu")
    rows = slice(0, 45)
    assert_bits(fp4gemm.grouped_mm(x, w, ends)[rows], fp4gemm.grouped_mm(x, w, short)[rows], "grouped_mm")
    raw = (a.codes, w.codes, a.scales, w.scales)
    got = fp4gemm.scaled_grouped_mm(*raw, ends)[rows]
    assert_bits(got, fp4gemm.scaled_grouped_mm(*raw, short)[rows], "scaled_grouped_mm")


def test_a_misaligned_weight_of_a_norm(
    device: torch.device, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads 16 bytes at a time, so that the operator gets a copy."""
    addresses: list[int] = []
    run = operators.rms_norm_quantize

    def recorded(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Any:
        addresses.append(weight.data_ptr())
        return run(x, weight, residual, eps)

    monkeypatch.setattr(operators, "rms_norm_quantize", recorded)
    x, whole = (torch.randn(rows, K, generator=gen).half().to(device) for rows in (M, 2))
    weight = whole.flatten()[4 : 4 + K]
    assert weight.data_ptr() % 16 == 8
    got, want = (fp4gemm.rms_norm_quantize(x, w) for w in (weight, weight.clone()))
    assert_bits(got.dequantize(), want.dequantize(), "weight")
    # A call that the operator takes as it is does not come by here: on a CPU both, on a GPU the aligned one.
    assert bool(addresses) == (device.type == "cuda")
    assert not any(address % 16 for address in addresses)


@pytest.mark.parametrize("wrong", [-1.0, torch.nan], ids=str)
def test_a_wrong_amax_is_refused_by_every_entry(wrong: float) -> None:
    """The reference checks the values, so the operators and compiled graphs on the CPU do."""
    x, amax = torch.ones(M, K), torch.ones(M)
    amax[3] = wrong
    says = rf"amax: entry 3 is {wrong}, must be at least 0 and not NaN"
    for call in (
        lambda: fp4gemm.quantize(x, amax=amax),
        lambda: fp4gemm.quantize(x, amax=amax, decoded=True),
        lambda: reference.quantize(x, amax, True),
        lambda: reference.quantize_decoded(x, amax, True),
        lambda: operators.quantize(x, amax, True),
        lambda: operators.quantize_decoded(x, amax, True),
        lambda: operators.quantize_both(x, amax, torch.ones(K), True),
        lambda: fp4gemm.quantize_both(x, amax=amax, amax_t=torch.ones(K)),
        lambda: torch.compile(fp4gemm.quantize, backend="aot_eager")(x, amax=amax),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    stack, amax = torch.ones(2, M, K), torch.ones(2, M)
    amax[1, 3] = wrong
    for call in (
        lambda: fp4gemm.quantize(stack, amax=amax),
        lambda: fp4gemm.quantize_both(stack, amax=amax, amax_t=torch.ones(2, K)),
        lambda: torch.compile(fp4gemm.quantize, backend="aot_eager")(stack, amax=amax),
    ):
        with pytest.raises(ValueError, match=rf"amax: entry {M + 3} is {wrong}, must be at least 0"):
            call()
