"""One vocabulary for all entry points: names, values, defaults, and the old names with a warning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn, recipe
from fp4gemm.calibration import InputStatistics
from fp4gemm.checkpoint import Options
from fp4gemm.integrations.serving.options import Options as ServingOptions
from fp4gemm.recipe import Recipe
from nn_helpers import float_linear

ROOT = Path(__file__).resolve().parents[2]
ENTRIES: dict[str, Callable[..., Any]] = {
    "quantize_model": fp4gemm.models.quantize_model,
    "Linear": nn.Linear,
    "Linear.from_float": nn.Linear.from_float,
    "Linear.from_quantized": nn.Linear.from_quantized,
    "Experts": nn.Experts,
    "Experts.from_float": nn.Experts.from_float,
    "Experts.from_quantized": nn.Experts.from_quantized,
    "Options": Options,
    "serving": ServingOptions,
}
OPTIONS = {field.name: field.default for field in dataclasses.fields(Recipe)}
# Where None stands for a default that depends on another option, or the engine's checkpoint decides.
OPEN = {
    "weight_scaling": ("row", None),
    "activations": ("per-token", None, "checkpoint"),
    "numerics": ("te",),
}
# Values of entry points that become one of the others, by the device or by the checkpoint of an engine.
BY_CIRCUMSTANCE = {"auto", "checkpoint"}


def values(annotation: Any) -> set[str]:
    """The words in a Literal type, or in a union that has one."""
    if typing.get_origin(annotation) is typing.Literal:
        return {value for value in typing.get_args(annotation) if isinstance(value, str)}
    return {value for part in typing.get_args(annotation) for value in values(part)}


@pytest.mark.parametrize("name", ENTRIES)
def test_keywords_have_the_values_and_defaults_of_the_recipe(name: str) -> None:
    entry = ENTRIES[name]
    parameters = inspect.signature(entry).parameters
    function = entry.__init__ if inspect.isclass(entry) else entry  # type: ignore[misc]
    unknown = {"ExpertParallel": object}  # a type that is imported for type checkers alone
    annotated = entry if dataclasses.is_dataclass(entry) else inspect.unwrap(function)
    hints = typing.get_type_hints(annotated, localns=unknown)
    wanted = typing.get_type_hints(Recipe)
    shared = set(parameters) & set(OPTIONS)
    assert shared >= {"activations"}
    for option in shared:
        assert values(hints[option]) - BY_CIRCUMSTANCE <= values(wanted[option]), option
        default = parameters[option].default
        if option == "method":  # None of the others is the best method that data allow
            assert default in (None, "four-over-six")
        else:
            assert default in OPEN.get(option, (OPTIONS[option],)), option


def test_the_transformers_config_has_the_same_options() -> None:
    integration = pytest.importorskip("fp4gemm.integrations.transformers")
    for format, scaling in (("modelopt", "tensor"), ("compressed-tensors", "tensor"), ("fp4gemm", "row")):
        config = integration.Fp4GemmConfig(format=format)
        assert config.recipe == Recipe(weight_scaling=scaling)
    assert integration.Fp4GemmConfig().recipe == Recipe(weight_scaling="tensor")


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for option in OPTIONS:
        assert option == "data" or f"| `{option}`" in text, option


@pytest.mark.parametrize(
    ("given", "method", "four_over_six", "scaling"),
    [
        ({}, "four-over-six", "mse", "row"),
        ({"four_over_six": "mae"}, "four-over-six", "mae", "row"),
        ({"four_over_six": "none"}, "round", "none", "row"),
        ({"method": "round"}, "round", "none", "row"),
        ({"data": "mean square"}, "search", "none", "row"),
        ({"data": "second moment"}, "gptq", "none", "row"),
        ({"data": "second moment", "four_over_six": "mse"}, "four-over-six", "mse", "row"),
        ({"numerics": "modelopt"}, "round", "none", "tensor"),
        ({"numerics": "llmcompressor", "data": "none"}, "round", "none", "tensor"),
    ],
    ids=str,
)
def test_what_none_becomes(given: dict[str, Any], method: str, four_over_six: str, scaling: str) -> None:
    made = Recipe(**given)
    assert (made.method, made.four_over_six, made.weight_scaling) == (method, four_over_six, scaling)
    assert made.e4m3_max == (448 if method == "round" else 256)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"activations": "row"},
            "activations: got 'row', must be 'per-token', 'per-tensor', ",
        ),
        ({"weight_scaling": "block"}, "weight_scaling: got 'block', must be 'row' or 'tensor'"),
        ({"method": "awq"}, "method: got 'awq', must be 'round', 'four-over-six', 'search' or 'gptq'"),
        ({"numerics": "quark"}, "numerics: got 'quark', must be 'te', 'modelopt' or 'llmcompressor'"),
        ({"four_over_six": "max"}, "four_over_six: got 'max', must be 'none', 'mae' or 'mse'"),
        ({"method": "gptq"}, "method: got 'gptq' without calibration, must be another"),
        ({"method": "gptq", "data": "mean square"}, "method: got 'gptq', must be another for statistics"),
        ({"method": "round", "four_over_six": "mse"}, "four_over_six: got 'mse', must be absent"),
        ({"method": "four-over-six", "four_over_six": "none"}, "four_over_six: got 'none', must be 'mae'"),
        (
            {"numerics": "modelopt", "weight_scaling": "row"},
            "weight_scaling: got 'row', must be 'tensor' with",
        ),
        ({"numerics": "modelopt", "method": "search"}, "method: got 'search', must be 'round' with numerics"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^" + message.replace("(", r"\(")):
        Recipe(**given)


def test_an_empty_value_is_no_default() -> None:
    with pytest.raises(ValueError, match=r"^weight_scaling: got '', must be 'row' or 'tensor'"):
        Options(weight_scaling="")


def test_the_values_of_layers_are_values_of_the_recipe() -> None:
    for kind in (recipe.LayerActivations, recipe.StoredActivations):
        assert values(kind) <= values(recipe.Activations)
    assert values(recipe.LayerActivations) < values(recipe.Activations)


def test_every_kind_of_activations_says_what_the_input_becomes() -> None:
    assert set(recipe.INPUTS) == values(recipe.Activations)
    assert all(kind.kind == name.split(",")[0] for name, kind in recipe.INPUTS.items())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("per-token", "per-token"),
        ("per-token,encode=te", "per-token"),
        ("per-tensor, e4m3_max=448 ,four_over_six=mae", "per-tensor,four_over_six=mae,e4m3_max=448"),
        ("per-token,four_over_six=mse,e4m3_max=256", "per-token,four_over_six=mse"),
        ("per-token,four_over_six_error=exact,four_over_six=mse", "per-token,four_over_six=mse"),
        (
            "per-token,e4m3_max=448,four_over_six_error=fast,four_over_six=mse",
            "per-token,four_over_six=mse,four_over_six_error=fast,e4m3_max=448",
        ),
        ("per-tensor,encode=te_per_token", "per-tensor,encode=te_per_token"),
    ],
)
def test_options_of_the_cast_of_activations(given: str, name: str) -> None:
    assert Recipe(activations=given).activations == name
    assert nn.Linear(64, 24, activations=given).activations == name
    assert nn.Experts(4, 64, 32, activations=given).activations == name
    assert Options(format="fp4gemm", activations=given).activations == name
    made = fp4gemm.models.quantize_model(float_linear(), activations=given)
    assert made.activations == name
    if name.startswith("per-token"):
        assert ServingOptions(activations=given).activations == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "fp8,encode=te_per_token",
            "got 'fp8,encode=te_per_token', must be 'fp8'; only per-token or per-ten",
        ),
        ("a16,four_over_six=mae", "got 'a16,four_over_six=mae', must be 'a16'; only per-token or per-tensor"),
        ("row,four_over_six=mae", "got 'row,four_over_six=mae', must begin with "),
        ("per-token,block=16", "got 'per-token,block=16', 'block=16' of it must be encode=VALUE, "),
        ("per-token,four_over_six", "'four_over_six' of it must be encode=VALUE, four_over_six=VALUE, "),
        ("per-token,", "got 'per-token,', '' of it must be encode=VALUE"),
        ("per-token,four_over_six=max", "four_over_six: got 'max', must be None, 'mae' or 'mse'"),
        ("per-token,four_over_six=mae,four_over_six=mse", "must have four_over_six once"),
        ("per-token,e4m3_max=256", "e4m3_max: got 256, must be 448 without four_over_six"),
        ("per-token,four_over_six=mae,e4m3_max=300", "e4m3_max: got 300, must be None, 448 or 256"),
        ("per-token,four_over_six_error=fast", "four_over_six_error: got 'fast', must be omitted without"),
        (
            "per-token,encode=te_per_token,four_over_six=mae",
            "four_over_six: got 'mae' with encode 'te_per_to",
        ),
    ],
)
def test_options_of_activations_that_are_refused(given: str, message: str) -> None:
    entries: list[Callable[[], object]] = [
        lambda: Recipe(activations=given),
        lambda: nn.Linear(64, 24, activations=given),
        lambda: nn.Linear.from_float(float_linear(), activations=given),
        lambda: nn.Experts(4, 64, 32, activations=given),
        lambda: fp4gemm.models.quantize_model(float_linear(), activations=given),
        lambda: Options(format="fp4gemm", activations=given),
    ]
    for entry in entries:
        with pytest.raises(ValueError, match=r"^activations: got ") as raised:
            entry()
        assert message in str(raised.value)
    with pytest.raises(ValueError, match=r"^activations: got "):
        ServingOptions(activations=given)


def test_engines_have_no_amax_of_all_tokens() -> None:
    with pytest.raises(ValueError, match=r"^activations: got 'per-tensor,encode=te_per_token', must begin"):
        ServingOptions(activations="per-tensor,encode=te_per_token")


@pytest.mark.parametrize(
    ("given", "keywords", "bound"),
    [
        ({"method": "round"}, {}, 448),
        ({"method": "round", "weight_scaling": "tensor", "block": (16, 16)}, None, 448),
        ({"method": "round", "encode": "te_per_token"}, {"encode": "te_per_token"}, 448),
        ({}, {"four_over_six": "mse", "e4m3_max": 256}, 256),
        ({"four_over_six": "mae", "e4m3_max": 448}, {"four_over_six": "mae", "e4m3_max": 448}, 448),
        (
            {"four_over_six_error": "fast"},
            {"four_over_six": "mse", "e4m3_max": 256, "four_over_six_error": "fast"},
            256,
        ),
    ],
    ids=str,
)
def test_the_cast_of_weights(given: dict[str, Any], keywords: dict[str, Any] | None, bound: int) -> None:
    if keywords is None:
        keywords = {"scaling": "tensor", "block": (16, 16)}
    made = Recipe(**given)
    assert made.weight_keywords == keywords
    assert made.e4m3_max == bound
    assert Recipe(**made.options()) == made
    w = torch.randn(48, 64)
    got, want = recipe.Quantizer(made)(w), fp4gemm.quantize(w, **keywords)
    assert torch.equal(got.codes, want.codes)
    assert got.e4m3_max == want.e4m3_max == bound
    assert torch.equal(got.amax, want.amax)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"method": "round", "block": (16, 16)},
            NotImplementedError,
            "block: got (16, 16) with scaling 'row'",
        ),
        (
            {"encode": "te_per_token"},
            NotImplementedError,
            "four_over_six: got 'mse' with encode 'te_per_token'",
        ),
        ({"method": "round", "four_over_six_error": "fast"}, ValueError, "four_over_six_error: got 'fast'"),
        (
            {"method": "round", "e4m3_max": 256},
            ValueError,
            "e4m3_max: got 256, must be 448 without four_over",
        ),
        ({"method": "search", "e4m3_max": 448}, ValueError, "e4m3_max: got 448, must be 256 with the method"),
        (
            {"method": "search", "weight_scaling": "tensor", "block": (16, 16)},
            ValueError,
            "block: got (16, 16), must be (1, 16) with the method 'search'",
        ),
        (
            {"numerics": "modelopt", "encode": "te_per_token"},
            ValueError,
            "encode: got 'te_per_token', must be 'te' with numerics 'modelopt'",
        ),
    ],
    ids=str,
)
def test_casts_of_weights_that_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        Recipe(**given)
    assert message in str(raised.value)


def test_what_an_input_becomes_is_asked_of_the_table() -> None:
    """A comparison with "a16" would take a new kind of activations for one of the others."""
    found = []
    for path in sorted((ROOT / "python" / "fp4gemm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
                found += [f"{path.name}:{node.lineno}" for part in parts if ast.unparse(part) == "'a16'"]
    assert found == []


@pytest.mark.parametrize("method", ["round", "four-over-six", "search", "gptq"])
def test_the_bound_of_block_scales(method: Any) -> None:
    w, x = torch.randn(32, 64), torch.randn(128, 64)
    known = InputStatistics(torch.tensor(128), x.square().mean(0), x.T @ x / 128)
    made = Recipe(method=method, data="second moment")
    assert recipe.Quantizer(made, {"": known})(w).e4m3_max == made.e4m3_max
