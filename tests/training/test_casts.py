"""Every field of Cast reaches the quantizers and the operators of a step: none is dropped on the way."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import records
from fp4gemm.ops import options as option_checks
from fp4gemm.ops.quantize import QuantizeCall
from fp4gemm.training import Cast, Recipe, _copies
from torch import Tensor

STATE = torch.tensor([7, 8])
SIGNS = 0x0F0F
# Another value of each field than its default, with what it needs in other fields.
SAMPLES: dict[str, dict[str, Any]] = {
    "scaling": {"scaling": "tensor"},
    "block": {"block": (16, 16), "scaling": "tensor"},
    "hadamard": {"hadamard": "fp32"},
    "stochastic": {"stochastic": True},
    "four_over_six": {"four_over_six": "mse"},
    "four_over_six_error": {"four_over_six_error": "fast", "four_over_six": "mse"},
    "e4m3_max": {"e4m3_max": 448, "four_over_six": "mse"},
    "encode": {"encode": "te_per_token"},
}
# The other format has none of these options, and excludes them.
FIELDS = [each.name for each in dataclasses.fields(Cast) if each.name != "format"]
# Options of the quantizers that are no fields of Cast: signs and random numbers belong to a recipe and to a
# call.
NO_FIELDS = {"hadamard_signs", "generator", "rng_state"}


def test_the_fields_are_the_options_of_the_quantizers_and_the_source() -> None:
    assert set(FIELDS) == {*SAMPLES, "source"}
    assert set(FIELDS) - {"source"} == set(option_checks.OPTIONS) - NO_FIELDS


def test_the_other_format_has_no_option() -> None:
    cast = Cast(format="mxfp8")
    assert not cast.is_one_pass_with(cast)
    assert not Cast().is_one_pass_with(cast)
    assert cast != Cast()
    assert pickle.loads(pickle.dumps(cast)) == cast
    for name, fields in {**SAMPLES, "source": {"source": "rowwise"}}.items():
        with pytest.raises(
            ValueError, match=rf"^({'|'.join(fields)}): got .*, the default, with format 'mxfp8'$"
        ):
            Cast(format="mxfp8", **fields)
        assert name in fields
    with pytest.raises(ValueError, match=r"^format: got 'mxfp4', must be 'nvfp4' or 'mxfp8'$"):
        Cast(format="mxfp4")  # type: ignore[arg-type]


def test_formats_of_a_product_are_equal() -> None:
    with pytest.raises(ValueError, match=r"^w: format is 'nvfp4', must be 'mxfp8', that of x, its other"):
        Recipe(x=Cast(format="mxfp8"), w=Cast())
    with pytest.raises(ValueError, match=r"^x: got None, must be a Cast with format 'mxfp8', as w is$"):
        Recipe(w=Cast(format="mxfp8"))


def test_headroom_was_removed() -> None:
    """A keyword is refused by its name, and a pickle of an older version unless it has the default."""
    with pytest.raises(TypeError, match="'headroom'"):
        Cast(headroom=17 / 16)  # type: ignore[call-arg]
    for function in (fp4gemm.quantize, fp4gemm.quantize_both, records.quantize_records):
        with pytest.raises(TypeError, match="'headroom'"):
            function(torch.ones(32, 32), headroom=1.0)  # type: ignore[operator]
    recipe = Recipe(x=Cast(four_over_six="mse"), w=Cast())
    for cast in (recipe.x, recipe.w):
        vars(cast).update(headroom=1.0, has_headroom=False)
    restored = pickle.loads(pickle.dumps(recipe))
    assert restored == recipe
    assert vars(restored.x) == vars(Cast(four_over_six="mse"))
    vars(recipe.w).update(headroom=17 / 16, has_headroom=True)
    with pytest.raises(ValueError, match=r"^headroom: got 1\.0625 in a pickled Cast, .* was removed"):
        pickle.loads(pickle.dumps(recipe))


@pytest.fixture
def x(gen: torch.Generator) -> Tensor:
    return torch.randn(32, 64, generator=gen) * torch.logspace(-1, 1, 64)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_copy_is_that_of_the_option(name: str, x: Tensor) -> None:
    fields = SAMPLES[name]
    cast = Cast(**fields)
    options = dict(fields)
    if name == "hadamard":
        options["hadamard_signs"] = SIGNS
    if name == "stochastic":
        options["rng_state"] = STATE
    rotated = Cast(hadamard="fp32")
    recipe = Recipe(dy_t=rotated, x_t=rotated, hadamard_signs=SIGNS)
    for axis in (-1, 0):
        got = _copies.rebuilt(_copies.along(x, axis, cast, SIGNS, STATE), cast, recipe)
        want = fp4gemm.quantize(x, axis=axis, **options)
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales.view(torch.uint8), want.scales.view(torch.uint8))
        assert torch.equal(got.amax, want.amax)
        assert (got.e4m3_max, got.hadamard_signs) == (want.e4m3_max, want.hadamard_signs)


def test_the_arguments_of_a_cast_are_all_options_of_the_operator() -> None:
    """But for the tensors, the axis and the signs, in the order of the operator."""
    fields = QuantizeCall._fields
    per_row, block_rows, before, hadamard, after = Cast(hadamard="fp32").arguments
    given = QuantizeCall(STATE, None, per_row, -1, block_rows, *before, hadamard, SIGNS, STATE, *after)
    assert fields.index("offs") == 4 + len((block_rows, *before, hadamard, SIGNS, STATE, *after))
    assert (given.hadamard, given.signs, given.rng_state is STATE) == (2, SIGNS, True)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_keywords_of_a_cast_have_each_field(name: str) -> None:
    made = _copies.keywords(Cast(**SAMPLES[name]), SAMPLES[name].get("hadamard"), SIGNS, STATE)
    assert made[name] == SAMPLES[name][name]


@pytest.mark.parametrize("name", [name for name in (*SAMPLES, "source") if name != "block"])
def test_the_operators_of_a_step_have_each_field_or_are_not_called(name: str) -> None:
    """The numbers of a cast differ by each field, or the recipe has none; block is for weights alone."""
    fields = SAMPLES.get(name, {"source": "rowwise"})
    before = {key: value for key, value in fields.items() if key != name}
    plain = Recipe(x=Cast(**before), w=Cast(), dy=Cast(), w_t=Cast(), dy_t=Cast(), x_t=Cast(**before))
    changed = {"x_t": Cast(**fields)}
    if name == "hadamard":
        changed["dy_t"] = Cast(**fields)
    recipe = plain.replace(**changed)
    assert plain.forward_casts is not None
    assert recipe.forward_casts != plain.forward_casts


@pytest.mark.parametrize("name", FIELDS)
def test_casts_of_one_pass_differ_in_hadamard_alone(name: str) -> None:
    fields = SAMPLES.get(name, {"source": "rowwise"})
    before = {key: value for key, value in fields.items() if key != name}
    assert Cast(**before).is_one_pass_with(Cast(**fields)) is (name == "hadamard")
