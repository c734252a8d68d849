"""The baseline of a scalar GEMM and a post-scale kernel: the fused result or its bfloat16 neighbour."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from helpers import make
from moe import ROUTINGS, rows_of

from bench.baselines import post_scale


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["normal", "row_ranges", "outliers"])
def test_dense_is_within_one_rounding(
    kind: str, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    a = fp4gemm.quantize(make(kind, 130, 128, torch.bfloat16, gen).to(device), scaling=scaling)
    b = fp4gemm.quantize(make("normal", 72, 128, torch.bfloat16, gen).to(device), scaling=scaling)
    fused, unfused = fp4gemm.mm(a, b), post_scale.dense(a, b)()
    assert post_scale.steps(unfused, fused) == 1, "two roundings differ somewhere, and by no more"


@pytest.mark.parametrize("name", ROUTINGS)
def test_grouped_is_within_one_rounding(name: str, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of(ROUTINGS[name], 72, 128, device, gen)
    fused, unfused = fp4gemm.grouped_mm(case.a, case.b), post_scale.grouped(case.a, case.b, case.ends)()
    assert post_scale.steps(unfused, fused) <= 1


@pytest.mark.gpu
def test_compiled_is_the_same(cuda: torch.device, gen: torch.Generator) -> None:
    case = rows_of(ROUTINGS["ragged"], 72, 128, cuda, gen)
    fused = fp4gemm.grouped_mm(case.a, case.b)
    unfused = post_scale.grouped(case.a, case.b, case.ends, post_scale.compiled())
    assert post_scale.steps(unfused(), fused) <= 1


def test_steps() -> None:
    one = torch.tensor([1.0, 0.0, -2.0]).bfloat16()
    assert post_scale.steps(one, one) == 0
    assert post_scale.steps(torch.tensor([-0.0]).bfloat16(), torch.tensor([0.0]).bfloat16()) == 0
    assert post_scale.steps(one, torch.tensor([1.0078125, 0.0, -2.0]).bfloat16()) == 1
    assert post_scale.steps(one, torch.tensor([1.0, 0.0, -1.9921875]).bfloat16()) == 1
    tiny = torch.tensor([1, -32767], dtype=torch.int16).view(torch.bfloat16)  # the least numbers, by sign
    assert post_scale.steps(tiny[:1], tiny[1:]) == 2
    assert post_scale.steps(one[:0], one[:0]) == 0
    with pytest.raises(ValueError, match=r"must be torch\.bfloat16"):
        post_scale.steps(one.float(), one)
    with pytest.raises(ValueError, match="must be finite"):
        post_scale.steps(torch.tensor([torch.inf]).bfloat16(), one[:1])
