"""No option of the quantizers is ignored: each changes the result, or the call is refused by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import records, reference
from fp4gemm.ops import options as option_checks
from fp4gemm.ops.quantize import QuantizeDecodedCall, QuantizeSearchedCall
from torch import Tensor

M, K = 32, 64
X = torch.randn(M, K, generator=torch.Generator().manual_seed(11)) * torch.logspace(-1, 1, M).unsqueeze(1)
STATE = torch.tensor([7, 8])


def ends() -> Tensor:
    return torch.tensor([16, 32], dtype=torch.int32)


# A value of each keyword that is not its default, by name; the keywords without which it has no effect.
SAMPLES: dict[str, Callable[[], Any]] = {
    "scaling": lambda: "tensor",
    "axis": lambda: 0,
    "block": lambda: (16, 16),
    "amax": lambda: torch.full((M,), 50.0),
    "amax_t": lambda: torch.full((K,), 50.0),
    "encode": lambda: "te_per_token",
    "four_over_six": lambda: "mse",
    "four_over_six_error": lambda: "fast",
    "e4m3_max": lambda: 448,
    "hadamard": lambda: "fp32",
    "hadamard_signs": lambda: 0x0F0F,
    "stochastic": lambda: True,
    "generator": lambda: torch.Generator().manual_seed(3),
    "rng_state": lambda: STATE,
    "offs": ends,
    "rows": lambda: torch.arange(M - 1, -1, -1, dtype=torch.int32),
    "residual_channels": lambda: torch.arange(7, 39, dtype=torch.int32),
    "scale_search": lambda: "mse",
    "importance": lambda: torch.logspace(-2, 2, K),
    "fp8_operand": lambda: True,
    "decoded": lambda: True,
}
BESIDE: dict[str, dict[str, Any]] = {
    "block": {"scaling": "tensor"},
    "four_over_six_error": {"four_over_six": "mse"},
    "e4m3_max": {"four_over_six": "mse"},
    "hadamard_signs": {"hadamard": "fp32"},
    "stochastic": {"rng_state": STATE + 1},
    "generator": {"stochastic": True},
    "rng_state": {"stochastic": True},
    "importance": {"scale_search": "mse"},
    "fp8_operand": {"scale_search": "mse"},
}
# These change few elements, and none of X; tests/quantize/test_quantize_modes.py compares what they do. Here
# they are only looked for where an option is missing without which they do nothing.
RARE = ("encode", "four_over_six_error")
BOTH = {"amax": {"amax_t": torch.full((K,), 40.0)}, "amax_t": {"amax": torch.full((M,), 40.0)}}


def keywords(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name not in ("x", "out", "first_row")]


def state_of(made: Any) -> list[Any]:
    """All that a result consists of: the tensors of containers, and what else they hold."""
    if isinstance(made, tuple):
        return [value for part in made for value in state_of(part)]
    if isinstance(made, Tensor):
        return [made]
    parts = [made.codes, made.scales] if isinstance(made, fp4gemm.NVFP4Tensor) else [made.data, None]
    return [type(made), *parts, made.amax, made.e4m3_max, made.hadamard_signs, made.offs]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        plain = [t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t for t in (a, b)]
        return plain[0].shape == plain[1].shape and torch.equal(*plain)
    return type(a) is type(b) and bool(a == b)


def assert_used(function: Callable[..., Any], name: str, base: dict[str, Any], given: dict[str, Any]) -> None:
    """Adding ``given``, whose subject is ``name``, changes the result or raises an error that names it."""
    torch.manual_seed(0)
    without = state_of(function(X, **base))
    torch.manual_seed(0)
    refusal = ""
    try:
        made = state_of(function(X, **{**base, **given}))
    except (TypeError, ValueError, NotImplementedError) as error:
        refusal = str(error)
    if refusal:
        names = "|".join((name, *base, *BOTH.get(name, {})))
        assert re.search(rf"^({names}):", refusal), f"{name} beside {sorted(base)}: {refusal}"
        return
    if name in RARE and BESIDE.get(name, {}).keys() <= base.keys():
        return
    pairs = zip(without, made, strict=True)
    assert not all(same(a, b) for a, b in pairs), f"{name} is ignored beside {sorted(base)}"


FUNCTIONS = {
    "quantize": fp4gemm.quantize,
    "quantize_both": fp4gemm.quantize_both,
    "quantize_records": records.quantize_records,
}
PAIRS = [
    pytest.param(function, name, beside, id=f"{label}-{name}-beside-{beside or 'nothing'}")
    for label, function in FUNCTIONS.items()
    for name in keywords(function)
    for beside in ("", *keywords(function))
    if name != beside
]


@pytest.mark.parametrize(("function", "name", "beside"), PAIRS)
def test_no_option_is_ignored(function: Any, name: str, beside: str) -> None:
    known = keywords(function)
    needs = {**BESIDE, **(BOTH if "amax_t" in known else {})}
    base: dict[str, Any] = {}
    if beside:
        base = {**needs.get(beside, {}), beside: SAMPLES[beside]()}
        base = {key: value for key, value in base.items() if key in known}
    if name in base:
        pytest.skip(f"{beside} does nothing without {name}")
    if name == "e4m3_max" and "scale_search" not in base and "four_over_six" not in base:
        given: dict[str, Any] = {name: 256}  # 448 is the default here
    else:
        given = {name: SAMPLES[name]()}
    assert_used(function, name, base, given)


def test_every_keyword_has_a_sample() -> None:
    assert set(SAMPLES) == {name for function in FUNCTIONS.values() for name in keywords(function)}


@pytest.mark.parametrize("name", ["generator", "rng_state", "four_over_six_error"])
def test_search_refuses_what_it_does_not_use(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got .*, must be omitted without "):
        fp4gemm.quantize(X, scale_search="mse", **{name: "fast"})  # type: ignore[arg-type]


def test_e4m3_max_has_one_default() -> None:
    for options in ({}, {"four_over_six": "mse"}, {"scale_search": "mse"}):
        bound = fp4gemm.quantize(X, **options).e4m3_max  # type: ignore[arg-type]
        assert bound == option_checks.default_bound(options) == (256 if options else 448)


# Keywords as the operators have them, where they have another name or another type.
OPERATOR: dict[str, tuple[str, Any]] = {
    "axis": ("axis", 0),
    "amax": ("amax", torch.ones(M)),
    "stochastic": ("rng_state", STATE),
    "offs": ("offs", ends()),
    "rows": ("rows", SAMPLES["rows"]()),
    "residual_channels": ("residual_channels", SAMPLES["residual_channels"]()),
}
for _name, _option in option_checks.OPTIONS.items():
    if _option.values and _name != "scaling":
        OPERATOR[_name] = (_option.parameter, _option.values[SAMPLES[_name]()])
EXCLUDED = [
    pytest.param(name, other, id=f"{name}-{other}")
    for name, others in option_checks.EXCLUDED.items()
    for other in others
    if name in OPERATOR and other in OPERATOR
]


@pytest.mark.parametrize(("name", "other"), EXCLUDED)
def test_the_operator_refuses_what_the_table_excludes(name: str, other: str) -> None:
    wanted = option_checks.KEYWORDS[name].requires.get("scaling", "tensor")
    arguments = dict(OPERATOR[key] for key in (name, other))
    per_row = {"per_row": wanted == "row"}
    arguments = {"amax": None, **per_row, **arguments}
    if name == "rows":
        pattern = "^rows: got a tensor with |^residual_channels: got "
    else:
        pattern = f"^({'|'.join(OPERATOR[key][0] for key in (name, other))}): got "
    with pytest.raises(NotImplementedError, match=pattern):
        reference.quantize(X, **arguments)


@pytest.mark.parametrize(
    ("name", "schema"), [("scale_search", QuantizeSearchedCall), ("decoded", QuantizeDecodedCall)]
)
def test_the_other_operators_have_no_parameter_of_what_is_excluded(name: str, schema: Any) -> None:
    table = option_checks.EXCLUDED
    excludes = set(table[name]) | {other for other, its in table.items() if name in its}
    excluded = {OPERATOR[other][0] for other in excludes if other in OPERATOR}
    assert excluded
    assert not excluded & set(schema._fields)
