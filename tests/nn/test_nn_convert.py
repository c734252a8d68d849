"""fp4gemm.models.quantize_model: the layers that it replaces, those that it skips, and its report."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nn_helpers import convert, float_linear, nan_bias_linear, nan_linear, same_bits, same_state
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Block(torch.nn.Module):
    """A model with every case: plain, unsupported sizes, a subclass, a shared module, a tied weight.

    head has the weight of the embedding, so that it stays in float unless include matches it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(48, 64)
        self.up = torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)
        self.again = self.up
        self.odd = torch.nn.Linear(64, 10)
        self.special = torch.nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
        self.head = torch.nn.Linear(64, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(ids)
        h = h + self.down(torch.relu(self.up(h)) + self.again(h))
        return self.head(self.special(h)), self.odd(h)


def by_default(linear: torch.nn.Linear) -> nn.Linear:
    """The layer that quantize_model makes without calibration."""
    return nn.Linear.from_float(linear, method="four-over-six")


def test_quantize_model_swaps_and_reports() -> None:
    model, seen = Block(), []
    before = copy.deepcopy(model.state_dict())
    swapped, report = convert(model, include="*", progress=lambda *step: seen.append(step))
    assert [type(m) for m in (swapped.up, swapped.down, swapped.head)] == [nn.Linear] * 3
    assert swapped.again is swapped.up
    assert type(swapped.odd) is torch.nn.Linear
    assert swapped.odd is not model.odd
    assert isinstance(model.up, torch.nn.Linear)  # the original is unchanged
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert same_state(swapped.up, by_default(model.up))
    assert seen == [(1, 3, "up"), (2, 3, "down"), (3, 3, "head")]

    found = {layer.name: layer for layer in report.layers}
    assert {name: layer.action for name, layer in found.items()} == {
        "up": "quantized",
        "again": "shared",
        "down": "quantized",
        "odd": "skipped",
        "special": "skipped",
        "head": "quantized",
    }
    assert found["up"].shape == (128, 64)
    assert found["up"].bytes_before == (128 * 64 + 128) * 4
    assert (
        found["up"].bytes_after == 128 * 32 + 128 * 4 + 128 * 4 + 128 * 4 + 4
    )  # codes, scales, amax, bias, e4m3_max
    assert (found["again"].bytes_before, found["again"].reason) == (0, "same module as up")
    assert found["odd"].reason == "out_features is 10, must be a positive multiple of 8"
    assert found["odd"].bytes_before == found["odd"].bytes_after > 0
    assert "NonDynamicallyQuantizableLinear" in found["special"].reason
    assert found["head"].reason == "its weight was tied to embed.weight, which keeps the float one"
    assert report.names("quantized") == ["up", "down", "head"]
    assert report.bytes_before == sum(layer.bytes_before for layer in report.layers)
    assert "6 linear layers (3 quantized, 1 shared, 2 skipped): " in str(report)


def test_quantized_model_computes_its_layers() -> None:
    model = Block().eval()
    swapped, ids = convert(model, include="*")[0], torch.arange(12).reshape(3, 4)
    with torch.no_grad():
        h = model.embed(ids)
        up = by_default(model.up)
        h = h + by_default(model.down)(torch.relu(up(h)) + up(h))
        head, odd = swapped(ids)
        assert same_bits(odd, model.odd(h))
        assert same_bits(head, by_default(model.head)(model.special(h)))


def test_inplace_keeps_the_model_object() -> None:
    model = Block()
    kept = model.odd
    swapped, _ = convert(model, inplace=True)
    assert swapped is model
    assert type(model.up) is nn.Linear
    assert model.again is model.up
    assert model.odd is kept


def test_the_default_is_inplace_and_warns_of_what_it_skips() -> None:
    model = Block()
    with pytest.warns(UserWarning, match="report=print"):
        assert fp4gemm.models.quantize_model(model) is model
    assert type(model.up) is nn.Linear
    linear = float_linear()
    assert same_state(fp4gemm.models.quantize_model(linear), by_default(linear))


def test_the_warning_names_every_layer_with_its_reason() -> None:
    with pytest.warns(UserWarning, match="quantize_model: 2 linear layers stay as they are") as caught:
        fp4gemm.models.quantize_model(Block())
    text = str(caught[0].message)
    assert "'odd' (out_features is 10, must be a positive multiple of 8)" in text
    assert "'special' (its type is NonDynamicallyQuantizableLinear, which types does not name)" in text
    many = torch.nn.Sequential(float_linear(), *(torch.nn.Linear(64, 10) for _ in range(40)))
    with pytest.warns(UserWarning, match="40 linear layers") as caught:
        fp4gemm.models.quantize_model(many)
    assert "40 linear layers stay as they are: '1', '2', '3', '4' and 36 more (out_features is 10" in str(
        caught[0].message
    )
    assert len(str(caught[0].message)) < 300


class Experts(torch.nn.Module):
    """A stack of weights that no linear layer holds, as in the mixtures of experts of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 128, 64))
        self.scores = torch.nn.Parameter(torch.randn(4, 64))  # of sizes that NVFP4 does not have


def test_weights_outside_of_linear_layers_are_reported() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.ModuleDict(
            {"fc": float_linear(), "experts": Experts(), "e": torch.nn.Embedding(8, 64)}
        )

    with pytest.warns(
        UserWarning,
        match=r"2 weights stay as they are outside of linear layers, such as 'experts.gate_up_proj' "
        r"\(a parameter of Experts, whose use is not known\): 132096 of",
    ):
        fp4gemm.models.quantize_model(model())
    swapped, report = convert(model())
    assert [(w.name, w.shape, w.kind, w.reason, w.num_bytes) for w in report.weights] == [
        (
            "experts.gate_up_proj",
            (4, 128, 64),
            "other",
            "a parameter of Experts, whose use is not known",
            4 * 128 * 64 * 4,
        ),
        (
            "experts.scores",
            (4, 64),
            "other",
            "a parameter of Experts of sizes that NVFP4 does not have",
            4 * 64 * 4,
        ),
        ("e.weight", (8, 64), "embedding", "embedding", 8 * 64 * 4),
    ]
    assert report.others == report.weights[:2]
    assert report.bytes_of_others == 4 * 129 * 64 * 4
    assert report.model_bytes_before == sum(p.nbytes for p in model().parameters())
    assert report.about_others() in str(report).splitlines()
    assert torch.is_tensor(swapped["experts"].gate_up_proj)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4gemm.models.quantize_model(model(), include="fc")  # as asked for
        fp4gemm.models.quantize_model(torch.nn.Sequential(float_linear(), torch.nn.Embedding(8, 64)))


def test_a_linear_model_and_a_second_pass() -> None:
    linear = float_linear()
    swapped, report = convert(linear)
    assert same_state(swapped, by_default(linear))
    assert report.layers[0].name == ""
    again, report = convert(swapped)
    assert same_state(again, swapped)
    assert report.layers == ()


FILTERS: dict[str, tuple[dict[str, object], list[str]]] = {
    "regex": ({"include": "re:^(up|down)$"}, ["up", "down"]),
    "compiled": ({"include": re.compile("DOWN", re.IGNORECASE)}, ["down"]),
    "callable": ({"include": lambda name, linear: linear.in_features == 128}, ["down"]),
    "several": ({"include": ["down", lambda name, linear: name == "head"]}, ["down", "head"]),
    "exclude": ({"exclude": "head"}, ["up", "down"]),
    "exclude-wins": ({"include": ["up", "down"], "exclude": "down"}, ["up"]),
    "exclude-by-second-name": ({"exclude": "again"}, ["down"]),
    "default": ({}, ["up", "down"]),
    "all": ({"include": "*"}, ["up", "down", "head"]),
    "include-by-second-name": ({"include": "again"}, ["up"]),
    "types": ({"types": (torch.nn.modules.linear.NonDynamicallyQuantizableLinear,)}, ["special"]),
}


@pytest.mark.parametrize(("options", "expected"), FILTERS.values(), ids=FILTERS)
def test_filters(options: dict, expected: list[str]) -> None:
    model, report = convert(Block(), **options)
    assert report.names("quantized") == expected
    for name, module in model.named_modules():
        assert isinstance(module, nn.Linear) == (name in expected)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_named(option: str) -> None:
    model = torch.nn.Sequential(float_linear(64, 96), float_linear(96, 24))
    text = rf"^quantize_model: {option}: 'lm_haed' matches none of the 2 linear layers, such as '0'$"
    with pytest.warns(UserWarning, match=text):
        fp4gemm.models.quantize_model(model, **{option: ["lm_haed", "0"]})


def test_a_model_without_layers_is_named() -> None:
    """Also one that was quantized before."""
    model = fp4gemm.models.quantize_model(torch.nn.Sequential(float_linear(64, 96)))
    for nothing in (model, torch.nn.ReLU()):
        with pytest.warns(
            UserWarning, match="^quantize_model: model: has no linear layer in float and no known"
        ):
            fp4gemm.models.quantize_model(nothing, include="0")


def test_raise_on_unsupported_changes_nothing() -> None:
    model = Block()
    with pytest.raises(ValueError, match=r"^model: 1 selected layers .*'odd': out_features is 10"):
        fp4gemm.models.quantize_model(model, inplace=True, on_unsupported="raise")
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    fp4gemm.models.quantize_model(model, exclude="odd", inplace=True, on_unsupported="raise")
    assert type(model.up) is nn.Linear


def _hooked() -> torch.nn.Module:
    model = torch.nn.Sequential(float_linear())
    model[0].register_forward_hook(lambda *_: None)
    return model


def _patched() -> torch.nn.Module:
    model = torch.nn.Sequential(float_linear())
    model[0].forward = lambda x: x
    return model


UNSUPPORTED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "hook": (_hooked, r"hooks that a swap would drop \(forward_hooks\)"),
    "patched-forward": (_patched, r"hooks that a swap would drop \(forward\)"),
    "fast-path": (
        lambda: torch.nn.TransformerEncoderLayer(64, 4, 128),
        "its owner TransformerEncoderLayer reads",
    ),
    "nan-bias": (
        lambda: torch.nn.Sequential(nan_bias_linear()),
        "bias: 1 values are NaN, must all be numbers",
    ),
    "nan": (lambda: torch.nn.Sequential(nan_linear()), "weight: 2 values are NaN or infinite"),
    "fp64": (lambda: torch.nn.Sequential(float_linear().double()), "weight: dtype is torch.float64"),
    "weight-norm": (
        lambda: torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(float_linear())),
        "its type is ParametrizedLinear",
    ),
}


@pytest.mark.parametrize(("make", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_layers_are_left_and_reported(make: Callable[[], torch.nn.Module], reason: str) -> None:
    model = make().eval()
    swapped, report = convert(model, inplace=True)
    assert not report.names("quantized")
    assert any(re.search(reason, layer.reason) for layer in report.layers)
    assert not any(isinstance(module, nn.Linear) for module in swapped.modules())


def test_gradients_reach_what_is_still_a_parameter() -> None:
    swapped = convert(Block())[0]
    sum(y.sum() for y in swapped(torch.arange(4))).backward()
    assert all(p.grad is not None for p in swapped.parameters() if p.requires_grad)


def test_a_bias_of_minus_infinity_is_kept() -> None:
    """It masks an output."""
    linear = float_linear()
    with torch.no_grad():
        linear.bias[3] = -torch.inf
    made, _ = convert(torch.nn.Sequential(linear))
    assert made[0].bias[3] == -torch.inf  # type: ignore[index]
    assert (made(torch.ones(2, linear.in_features))[:, 3] == -torch.inf).all()
