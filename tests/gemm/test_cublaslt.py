"""The fused epilogue against cuBLASLt's product with a post-scale pass: the same but for a rounding to bf16.

On Blackwell the product is cuBLASLt's, by torch.nn.functional.scaled_mm. Everywhere it is torch's emulation.
"""

from __future__ import annotations

from collections.abc import Callable

import fp4gemm
import pytest
import torch
import torch_emulation
from fp4gemm import NVFP4Tensor, layout
from helpers import make
from torch import Tensor

from bench.baselines import cublaslt, post_scale
from bench.measure.library import has_nvfp4_cores, operands_read
from bench.measure.operands import unit

SHAPES = [(128, 128, 128), (130, 72, 192), (33, 256, 512)]
Gemm = Callable[[cublaslt.Operand, cublaslt.Operand], Tensor]


@pytest.fixture(params=["torch's emulation", pytest.param("cuBLASLt", marks=pytest.mark.gpu)])
def product(request: pytest.FixtureRequest) -> tuple[Gemm, torch.device]:
    """A product of operands with one scalar each, and the device of its operands."""
    if request.param != "cuBLASLt":
        return torch_emulation.scaled_mm, torch.device("cpu")
    device = request.getfixturevalue("cuda")
    if not has_nvfp4_cores(operands_read(device)):
        pytest.skip(f"{torch.cuda.get_device_name(device)} has no tensor cores that multiply NVFP4")
    reason = cublaslt.absent()
    if reason is not None:
        pytest.skip(reason)
    return cublaslt.dense, device


def operands(
    kind: str, shape: tuple[int, int, int], gen: torch.Generator, device: torch.device, scaling: str = "row"
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    m, n, k = shape
    a = make(kind, m, k, torch.bfloat16, gen).to(device)
    b = make("normal", n, k, torch.bfloat16, gen).to(device)
    return fp4gemm.quantize(a, scaling=scaling), fp4gemm.quantize(b, scaling=scaling)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("kind", ["normal", "row_ranges", "outliers"])
def test_vectors(
    product: tuple[Gemm, torch.device], kind: str, shape: tuple[int, int, int], gen: torch.Generator
) -> None:
    """Row and column vectors: D is rounded twice behind cuBLASLt, and once in the fused epilogue."""
    gemm, device = product
    a, b = operands(kind, shape, gen, device)
    made = cublaslt.operand(unit(a)), cublaslt.operand(unit(b))
    unfused = post_scale.dense(a, b, gemm=gemm, made=made)()
    assert post_scale.steps(unfused, fp4gemm.mm(a, b)) <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_unity_vectors(
    product: tuple[Gemm, torch.device], shape: tuple[int, int, int], gen: torch.Generator
) -> None:
    """Vectors of ones change no bit: the fused epilogue is then cuBLASLt's product with one scalar."""
    gemm, device = product
    a, b = (
        NVFP4Tensor(t.codes, t.scales, torch.ones_like(t.amax))
        for t in operands("normal", shape, gen, device)
    )
    want = gemm(cublaslt.operand(unit(a)), cublaslt.operand(unit(b)))
    assert torch.equal(fp4gemm.mm(a, b), want)


def test_one_amax(product: tuple[Gemm, torch.device], gen: torch.Generator) -> None:
    """One amax for each tensor, which cuBLASLt multiplies as one number and we as three."""
    gemm, device = product
    a, b = operands("normal", SHAPES[1], gen, device, "tensor")
    want = gemm(cublaslt.operand(a), cublaslt.operand(b))
    assert post_scale.steps(fp4gemm.mm(a, b), want) <= 1


@pytest.mark.parametrize("fault", ["codes", "scales"])
def test_the_emulation_reads_both_operands(fault: str, gen: torch.Generator) -> None:
    """A code or a scale that differs changes the result, in its row alone."""
    a, b = map(unit, operands("normal", SHAPES[0], gen, torch.device("cpu")))
    right = torch_emulation.scaled_mm(cublaslt.operand(a), cublaslt.operand(b))
    row = 77
    if fault == "codes":
        a.codes[row, 5] ^= 0x33
    else:
        at = layout.scale_offset(row, 3, SHAPES[0][2] // 16)
        a.scales.view(torch.uint8).flatten()[at] += 8
    differ = (torch_emulation.scaled_mm(cublaslt.operand(a), cublaslt.operand(b)) != right).any(1)
    assert differ.nonzero().flatten().tolist() == [row]
