"""The casts that linear and experts make of their inputs: every option, in every form of the weight."""

from __future__ import annotations

import itertools
from typing import Any

import fp4gemm
import pytest
import torch
from experts_cases import block_of, by_public_functions, random_ids
from fp4gemm import recipe, reference, support
from fp4gemm.ops.inputs import InputCast, checked_input
from helpers import FLOATS, assert_bits, make, short
from op_checks import opcheck

# The activations that are quantized to NVFP4 by these operators.
CASTS = [name for name, kind in recipe.INPUTS.items() if kind.is_nvfp4 and kind.scaling is not None]
N, K = 48, 64
OPS = torch.ops.fp4gemm


def keywords(activations: str) -> dict[str, Any]:
    """The keywords of quantize for activations."""
    kind = recipe.INPUTS[activations]
    return {"scaling": "row" if kind.kind == "per-token" else "tensor", **dict(kind.options)}


def number(activations: str) -> int:
    found = recipe.INPUTS[activations].scaling
    assert found is not None
    return found


def forms(w: fp4gemm.NVFP4Tensor, device: torch.device) -> list[dict[str, Any]]:
    """The weight as codes, and prepacked where the device reads that."""
    made: list[dict[str, Any]] = [{"weight": w.codes, "weight_scales": w.scales}]
    if device.type == "cpu" or support.streams_prepacked(device):
        made.append({"weight": fp4gemm.prepack(w).data, "weight_scales": None, "weight_rows": w.shape[0]})
    return [{**each, "weight_amax": w.amax, "weight_e4m3_max": w.e4m3_max} for each in made]


def test_the_names_are_those_of_every_set_of_options() -> None:
    assert len(CASTS) == 2 * (1 + 1 + 2 * 2 * 2)
    for name in CASTS:
        assert recipe.checked_activations(name) == name
        assert checked_input(number(name)).number == number(name)
    assert len({recipe.INPUTS[name].scaling for name in CASTS}) == len(CASTS)


def test_the_number_of_a_cast() -> None:
    for scaling, six, fast, bound in itertools.product((1, 2), (1, 2), (False, True), (448, 256)):
        cast = InputCast(scaling, six, fast, bound)
        assert cast.number == scaling + 4 * six + 16 * fast + 32 * (bound == 256)
        assert checked_input(cast.number) == cast
    assert InputCast(1, encode=1).number == 65
    for scaling in range(4):
        assert checked_input(scaling) == InputCast(scaling)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("activations", CASTS)
def test_linear_has_the_bits_of_quantize_and_mm(
    activations: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    w = fp4gemm.quantize(make("normal", N, K, torch.bfloat16, gen).to(device), four_over_six="mse")
    bias = torch.randn(N, generator=gen).to(device)
    for m in (1, 33, 200):
        x = make("row_ranges", m, K, dtype, gen).to(device)
        want = fp4gemm.mm(fp4gemm.quantize(x, **keywords(activations)), w, bias=bias, out_dtype=dtype)
        for form in forms(w, device):
            got = OPS.linear(x, **form, bias=bias, scaling=number(activations))
            assert_bits(got, want, f"m {m}, prepacked {'weight_rows' in form}")
            if device.type == "cpu":
                assert_bits(reference.linear(x, **form, bias=bias, scaling=number(activations)), got)


@pytest.mark.parametrize("activations", CASTS)
def test_experts_have_the_bits_of_the_functions(
    activations: str, device: torch.device, gen: torch.Generator
) -> None:
    ids = random_ids(23, 3, 6, gen)
    ids[3], ids[7, 1] = -1, -1
    for dtype, six in ((torch.bfloat16, None), (torch.float32, "mae")):
        block = block_of(23, 3, 6, 64, 32, device, gen, dtype=dtype, bias=True, ids=ids, four_over_six=six)
        want = by_public_functions(block, **keywords(activations))
        for prepacked in (False, True):
            if prepacked and device.type != "cpu" and not support.streams_prepacked(device):
                continue
            got = block.run(prepacked, scaling=number(activations))
            assert_bits(got, want, f"{dtype}, prepacked {prepacked}")
        if device.type == "cpu":
            assert_bits(reference.experts(**block.arguments(scaling=number(activations))), want)


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    w = fp4gemm.quantize(make("normal", N, K, torch.bfloat16, gen).to(device))
    x = make("normal", 5, K, torch.bfloat16, gen).to(device)
    opcheck("linear", x, **forms(w, device)[0], scaling=number("per-token,four_over_six=mae"))
    block = block_of(5, 2, 4, 64, 32, device, gen)
    opcheck("experts", **block.arguments(scaling=number("per-tensor,encode=te_per_token")))
