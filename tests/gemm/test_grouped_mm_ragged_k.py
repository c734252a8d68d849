"""Products of groups of columns, the gradients of experts' weights: against the second model."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from helpers import FLOATS, assert_bits, dirty, short
from moe import ROUTINGS, columns_of, expected_columns

SHAPES = [(16, 16), (48, 80), (144, 96)]


def by_size(shape: tuple[int, int]) -> str:
    return f"m{shape[0]}-n{shape[1]}"


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=by_size)
@pytest.mark.parametrize("name", ROUTINGS)
def test_against_the_model(
    name: str, shape: tuple[int, int], out_dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """D of an expert without tokens is zero."""
    case = columns_of(ROUTINGS[name], *shape, device, gen, loose=5)
    dirty(device, len(case.ends) * shape[0] * shape[1] * out_dtype.itemsize)
    got = fp4gemm.grouped_mm(case.a, case.b, out_dtype=out_dtype)
    assert_bits(got, expected_columns(case, out_dtype=out_dtype), "D")


@pytest.mark.parametrize("bias", ["none", "shared", "own"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("with_c", [False, True], ids=["alone", "c"])
def test_every_term(
    with_c: bool, activation: str | None, bias: str, device: torch.device, gen: torch.Generator
) -> None:
    sizes = ROUTINGS["ragged"]
    case = columns_of(sizes, 32, 48, device, gen)
    shape = {"none": None, "shared": (48,), "own": (len(sizes), 48)}[bias]
    vector = None if shape is None else torch.randn(shape, generator=gen).to(device)
    for out_dtype in FLOATS:
        c, beta = None, 1.0
        if with_c:
            c, beta = torch.randn(len(sizes), 32, 48, generator=gen).to(out_dtype).to(device), -1.3
        options = {"bias": vector, "activation": activation, "c": c, "beta": beta, "out_dtype": out_dtype}
        got = fp4gemm.grouped_mm(case.a, case.b, **options)
        assert_bits(got, expected_columns(case, **options), short(out_dtype))


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["alpha", "alpha_row", "alpha_col"])
def test_factors_of_an_empty_group_are_left_out(
    which: str, factor: float, device: torch.device, gen: torch.Generator
) -> None:
    """D of a group without tokens is +0.0, or the bias, whatever the factors of that group are."""
    sizes, m, n = (70, 0, 64, 0), 48, 80
    case = columns_of(sizes, m, n, device, gen)
    is_empty = torch.tensor([size == 0 for size in sizes], device=device)
    lengths = {"alpha": (len(sizes),), "alpha_row": (len(sizes), m), "alpha_col": (len(sizes), n)}
    factors = torch.ones(lengths[which], device=device)
    factors[is_empty] = factor
    bias = torch.randn(n, generator=gen).to(device)
    operands = (case.a.codes, case.b.codes, case.a.scales, case.b.scales, case.offs)
    for out_dtype in FLOATS:
        for terms, want in (({}, torch.zeros(n, device=device)), ({"bias": bias}, bias)):
            options = {**terms, "out_dtype": out_dtype}
            got = fp4gemm.scaled_grouped_mm(*operands, **{which: factors}, **options)
            assert_bits(
                got[is_empty], want.to(out_dtype).expand(2, m, n), f"{short(out_dtype)} of empty groups"
            )
            plain = fp4gemm.scaled_grouped_mm(*operands, **options)
            assert_bits(got[~is_empty], plain[~is_empty], f"{short(out_dtype)} of the others")


def test_the_model_finds_a_swapped_group(gen: torch.Generator) -> None:
    """The second model's result depends on which tokens a group has."""
    case = columns_of((70, 64), 32, 48, torch.device("cpu"), gen)
    other = case._replace(offs=torch.tensor([64, 134], dtype=torch.int32))
    assert not torch.equal(expected_columns(case), expected_columns(other))
