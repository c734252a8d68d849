"""The C interface of the quantizer has the options of Python's table, their defaults and their exclusions."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
from capi import SCALING_ROW, SCALING_TENSOR, SUCCESS, QuantizeArgs, Quantized
from fp4gemm import _native
from fp4gemm.ops import options as option_checks
from fp4gemm.ops.quantize import QuantizeCall

# An address that every alignment allows. Nothing is at it: the arguments are checked first, and then the
# device is refused.
ADDRESS = 1 << 20
NO_DEVICE = 99
M, K = 32, 64
SIDE = {"codes": ADDRESS, "scales": ADDRESS, "amax": ADDRESS}
# What each keyword sets in the arguments, for a value other than its default.
FIELDS: dict[str, dict[str, Any]] = {
    "scaling": {"scaling": SCALING_TENSOR},
    "block": {"block_rows": 16},
    "encode": {"encode": 1},
    "four_over_six": {"four_over_six": 1},
    "hadamard": {"hadamard": 1},
    "stochastic": {"rng_state": ADDRESS},
    "offs": {"offs": ADDRESS, "num_groups": 2},
    "amax": {"amax_given": ADDRESS},
    "axis": {"axis": 0},
    "rows": {"x_rows": ADDRESS, "x_num_rows": M},
    "residual_channels": {"residual_channels": ADDRESS, "num_residual_channels": 32},
    "decoded": {"decoded": ADDRESS},
}
# Keywords that do nothing alone, and those of fp4gemm_quantize_searched, which has no other options.
OTHERS = {"four_over_six_error", "e4m3_max", "hadamard_signs", "generator", "rng_state", "amax_t"}
SEARCH = {"scale_search", "importance", "fp8_operand"}
# Members of the struct that are no options.
NO_OPTIONS = {"struct_size", "m", "k", "x", "x_row_stride", "x_dtype", "row", "column"}
NO_OPTIONS |= {"num_groups", "x_num_rows", "num_residual_channels"}
# Parameters of the operator whose members have other names, or are in `row` and `column`.
MEMBERS = {"per_row": "scaling", "signs": "hadamard_signs", "rows": "x_rows"}
OF_A_SIDE = {"x", "amax", "axis", "hadamard"}


def answer(**fields: Any) -> str:
    """The text of the error of a call with these fields, of which some are those of its direction."""
    side = dict(SIDE)
    for name in ("decoded", "fp8"):
        if name in fields:
            side = {key: value for key, value in side.items() if key not in ("codes", "scales")}
            side[name] = fields.pop(name)
    if "amax_given" in fields:
        side = {**side, "amax_given": fields.pop("amax_given"), "amax": None}
    side["hadamard"] = fields.pop("hadamard", 0)
    name = "column" if fields.pop("axis", -1) == 0 else "row"
    sides = {name: Quantized(**side)}
    args = QuantizeArgs(m=M, k=K, x=ADDRESS, x_row_stride=K, **sides, **fields)
    library = _native.core()
    assert library.fp4gemm_quantize(ctypes.byref(args), NO_DEVICE, None) != SUCCESS
    return _native.text(library.fp4gemm_last_error())


def is_excluded(name: str, other: str) -> bool:
    """Whether the table refuses both together; another value of scaling than the default is "tensor"."""
    for a, b in ((name, other), (other, name)):
        needs_rows = option_checks.KEYWORDS[a].requires.get(b) == "row"
        if b in option_checks.EXCLUDED[a] or needs_rows:
            return True
    return False


def test_every_keyword_is_known() -> None:
    assert {*FIELDS, *OTHERS, *SEARCH} == set(option_checks.KEYWORDS)


def test_every_option_is_a_member() -> None:
    """Each parameter of the operator has a member, and each member is a parameter or no option."""
    members = {name for name, _ in QuantizeArgs._fields_} - NO_OPTIONS
    wanted = {MEMBERS.get(name, name) for name in QuantizeCall._fields if name not in OF_A_SIDE}
    assert members == wanted


def test_defaults() -> None:
    """capi.py has what the _INIT macro sets, which tests/package/test_capi.py compares."""
    args = QuantizeArgs()
    defaults = QuantizeCall._field_defaults
    for name in ("block_rows", "encode", "four_over_six", "fast_error", "e4m3_max"):
        assert getattr(args, name) == defaults[name], name
    assert (args.scaling == SCALING_ROW) == (option_checks.KEYWORDS["scaling"].default == "row")
    assert args.rng_state is defaults["rng_state"] is None


@pytest.mark.parametrize("name", FIELDS)
def test_one_option_is_accepted(name: str) -> None:
    fields = dict(FIELDS[name])
    wanted = option_checks.KEYWORDS[name].requires.get("scaling", "row")
    if wanted == "tensor":
        fields |= FIELDS["scaling"]
    assert answer(**fields) == answer()


EDEN = {"encode": 2, "hadamard": 2, "e4m3_max": 256, "rng_state": ADDRESS}


def test_eden_needs_what_the_table_says() -> None:
    """test_one_option_is_accepted has another encode."""
    assert set(option_checks.EDEN_NEEDS) == {"hadamard", "stochastic", "e4m3_max"}
    for more in ({}, {"axis": 0}, {"scaling": SCALING_TENSOR}, {"decoded": ADDRESS}, FIELDS["offs"]):
        assert answer(**EDEN, **more) == answer()
    assert "hadamard: is 1, must be FP4GEMM_HADAMARD_FP32" in answer(**{**EDEN, "hadamard": 1})
    assert "rng_state: is null, must be given" in answer(**{**EDEN, "rng_state": None})
    assert "e4m3_max: is 448, must be 256" in answer(**{**EDEN, "e4m3_max": 448})
    assert "four_over_six: requires FP4GEMM_ENCODE_TE" in answer(**EDEN, four_over_six=1)
    assert "block_rows: is 16" in answer(**EDEN, **FIELDS["block"], **FIELDS["scaling"])
    assert "x_rows: requires" in answer(**EDEN, **FIELDS["rows"])
    assert "encode: is 3, must be a fp4gemm_encode_t" in answer(**{**EDEN, "encode": 3})


@pytest.mark.parametrize("name", FIELDS)
def test_fp8_is_alone_but_for_groups_and_rows(name: str) -> None:
    """quantize_fp8 has no keyword but offs; C has x_rows too, for the tokens of experts."""
    text = answer(fp8=ADDRESS, **FIELDS[name])
    assert (text == answer()) == (name in ("offs", "rows")), text


@pytest.mark.parametrize(("name", "other"), list(itertools.combinations(FIELDS, 2)))
def test_two_options_are_accepted_as_in_the_table(name: str, other: str) -> None:
    fields = FIELDS[name] | FIELDS[other]
    if any(option_checks.KEYWORDS[key].requires.get("scaling") == "tensor" for key in (name, other)):
        fields |= FIELDS["scaling"]
    text = answer(**fields)
    if is_excluded(name, other):
        assert text != answer(), f"accepts {name} with {other}"
    else:
        assert text == answer(), f"refuses {name} with {other}"
