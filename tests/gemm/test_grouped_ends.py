"""Which offs of grouped products count as those of an operand, and which values of them are accepted."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, _checks, _operands
from helpers import assert_bits
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_same_ends_are_known_without_their_values(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's values are not compared: the tensor that both operands were quantized with is enough."""
    monkeypatch.setattr(_operands, "_are_equal_on_cpu", lambda x, y: False)
    offs = torch.tensor((9, 11), device=device).cumsum(0).to(dtype)
    x, dy = torch.ones(20, 32, device=device), torch.ones(20, 16, device=device)
    w = fp4gemm.quantize(torch.ones(2, 16, 32, device=device))
    rows = fp4gemm.quantize(x, offs=offs)
    dy_t, x_t = (fp4gemm.quantize(t, axis=0, offs=offs) for t in (dy, x))
    gated = fp4gemm.silu_and_mul_quantize(torch.ones(20, 64, dtype=torch.bfloat16, device=device), offs=offs)
    for a in (rows, gated, fp4gemm.quantize(x, offs=offs, decoded=True), fp4gemm.decode(rows)):
        if device.type == "cpu" or isinstance(a, NVFP4Tensor):
            for given in (offs, offs[:], a.offs):
                fp4gemm.grouped_mm(a, w, given)
    fp4gemm.wgrad(dy_t, x_t, offs=offs)
    fp4gemm.wgrad(dy_t, x_t.with_row_amax())
    with pytest.raises(ValueError, match=r"^offs: is another tensor than a\.offs"):
        fp4gemm.grouped_mm(rows, w, offs.clone())
    with pytest.raises(ValueError, match=r"^x_t: has other groups"):
        fp4gemm.wgrad(dy_t, x_t.clone())
    with torch.inference_mode():
        offs = torch.tensor((9, 20), dtype=dtype, device=device)
        fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs), w, offs)


def test_ends_that_changed_are_not_those_of_the_operand(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operand keeps an int32 copy of int64 ends, which a change in place of theirs does not reach."""
    monkeypatch.setattr(_operands, "_are_equal_on_cpu", lambda x, y: False)
    offs = torch.tensor((9, 20), device=device)
    x, w = torch.ones(20, 32, device=device), fp4gemm.quantize(torch.ones(2, 16, 32, device=device))
    a, before = fp4gemm.quantize(x, offs=offs), fp4gemm.quantize(x, axis=0, offs=offs)
    offs[0] = 10
    with pytest.raises(ValueError, match=r"^offs: is another tensor than a\.offs"):
        fp4gemm.grouped_mm(a, w, offs)
    with pytest.raises(ValueError, match=r"^x_t: has other groups"):
        fp4gemm.wgrad(before, fp4gemm.quantize(x, axis=0, offs=offs))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_graph_refuses_other_ends(dtype: torch.dtype, device: torch.device) -> None:
    """While a graph is traced, only the tensor of the operand is known to be the same."""
    offs = torch.tensor((9, 20), dtype=dtype, device=device)
    x, w = torch.ones(20, 32, device=device), fp4gemm.quantize(torch.ones(2, 16, 32, device=device))

    def product(x: Tensor, own: Tensor, given: Tensor) -> Tensor:
        return fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=own), w, given)

    want = product(x, offs, offs)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert_bits(compiled(x, offs, offs), want, "the same offs")
    with pytest.raises(Exception, match=r"offs: is another tensor than a\.offs"):
        compiled(x, offs, offs.clone())

    class Product(torch.nn.Module):
        def forward(self, x: Tensor, own: Tensor, given: Tensor) -> Tensor:
            return product(x, own, given)

    class Same(torch.nn.Module):
        def forward(self, x: Tensor, own: Tensor) -> Tensor:
            return product(x, own, own)

    for strict in (False, True):
        assert_bits(torch.export.export(Same(), (x, offs), strict=strict).module()(x, offs), want, "export")
        with pytest.raises(Exception, match=r"offs: is another tensor than a\.offs"):
            torch.export.export(Product(), (x, offs, offs.clone()), strict=strict)


def test_ends_outside_of_int32_are_refused() -> None:
    """2^32 + 48 would be 48 in 32 bits."""
    offs, x = torch.tensor((16, 32, 2**32 + 48)), torch.ones(48, 32, dtype=torch.bfloat16)
    says = r"^offs: entry 2 is 4294967344, must be within int32"
    w = fp4gemm.quantize(torch.ones(3, 16, 32))
    for call in (
        lambda: fp4gemm.quantize(x, offs=offs),
        lambda: fp4gemm.silu_and_mul_quantize(x, offs=offs),
        lambda: fp4gemm.grouped_mm(x, w, offs),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_ends_outside_of_int32_are_clamped_without_a_look() -> None:
    """On a GPU and in a graph nothing reads the values."""
    offs = torch.tensor((16, -(2**40), 2**32 + 48))
    got = torch.compile(_checks.as_int32, backend="aot_eager", fullgraph=True)(offs)
    assert got.dtype is torch.int32
    assert got.tolist() == [16, -(2**31), 2**31 - 1]
