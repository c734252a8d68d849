"""What quantize_model leaves in float by default, and the table that its report prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import checkpoint, nn
from fp4gemm.recipe import Recipe
from nn_helpers import convert
from torch import Tensor


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64)


class Mixture(torch.nn.Module):
    """Experts in a list, with a linear router, as in Mixtral before transformers 5."""

    def __init__(self, num_experts: int = 8, name: str = "experts") -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, num_experts, bias=False)
        self.shared = torch.nn.Linear(64, 64)
        setattr(self, name, torch.nn.ModuleList(MLP() for _ in range(8)))


class TokenRouter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = torch.nn.Sequential(torch.nn.Linear(64, 16))
        self.weight = torch.nn.Parameter(torch.randn(16, 64))


class JetGating(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 16)


JetGating.__name__ = "JetMoeTopKGating"


class Language(torch.nn.Module):
    """A model with get_output_embeddings, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)
        self.decoder = torch.nn.Linear(64, 128)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.decoder


class WithoutOutput(Language):
    def get_output_embeddings(self) -> torch.nn.Linear:
        raise NotImplementedError


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(128, 64)
        self.fc = torch.nn.Linear(64, 64)
        self.out = torch.nn.Linear(64, 128, bias=False)
        self.out.weight = self.embed.weight


ROUTER = "router, in float unless include matches it"
OUTPUT = "output embedding, in float unless include matches it"
DEFAULTS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, str]]] = {
    "list-of-experts": (Mixture, {"gate": ROUTER}),
    "other-number": (lambda: Mixture(num_experts=16), {}),
    "blocks-that-are-no-experts": (lambda: Mixture(name="layers"), {}),
    "router-class": (lambda: torch.nn.ModuleDict({"r": TokenRouter()}), {"r.classifier.0": ROUTER}),
    "gating-class": (lambda: torch.nn.ModuleDict({"r": JetGating()}), {"r.layer": ROUTER}),
    "get_output_embeddings": (Language, {"decoder": OUTPUT}),
    "inside": (lambda: torch.nn.ModuleDict({"text": Language()}), {"text.decoder": OUTPUT}),
    "without-output": (WithoutOutput, {}),
    "lm_head": (lambda: torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 128)}), {"lm_head": OUTPUT}),
    "tied": (Tied, {"out": OUTPUT}),
}


@pytest.mark.parametrize(("make", "reasons"), DEFAULTS.values(), ids=DEFAULTS)
def test_routers_and_output_embeddings_stay_in_float(
    make: Callable[[], torch.nn.Module], reasons: dict[str, str]
) -> None:
    model, report = convert(make(), on_unsupported="raise")
    assert {e.name: e.reason for e in report.layers if e.action != "quantized"} == reasons
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, nn.Linear)):
            assert isinstance(module, torch.nn.Linear) == (name in reasons)


@pytest.mark.parametrize(("make", "reasons"), DEFAULTS.values(), ids=DEFAULTS)
def test_an_include_that_matches_them_wins(
    make: Callable[[], torch.nn.Module], reasons: dict[str, str]
) -> None:
    report = convert(make(), include="*")[1]
    assert not report.names("excluded")
    for name in reasons:
        assert convert(make(), include=name)[1].names("quantized") == [name]


def test_the_gate_of_a_shared_expert_is_a_router() -> None:
    model = Mixture()
    model.shared_gate = torch.nn.Linear(64, 1)
    report = convert(model, on_unsupported="raise")[1]
    assert {e.name: e.reason for e in report.layers if e.action == "excluded"} == {
        "gate": ROUTER,
        "shared_gate": ROUTER,
    }
    model = Mixture(name="layers")  # no experts: a layer whose size does not fit
    model.shared_gate = torch.nn.Linear(64, 1)
    assert convert(model)[1].names("skipped") == ["shared_gate"]


def test_experts_in_a_list_are_swapped_layer_by_layer() -> None:
    model, report = convert(Mixture())
    assert len(report.names("quantized")) == 17
    assert report.experts == ()
    assert all(isinstance(m.up, nn.Linear) and isinstance(m.down, nn.Linear) for m in model.experts)


def test_a_tied_weight_that_is_quantized_keeps_its_float_twin() -> None:
    model, report = convert(Tied(), include="*")
    (entry,) = [e for e in report.layers if e.name == "out"]
    assert entry.reason == "its weight was tied to embed.weight, which keeps the float one"
    assert [(w.name, w.kind) for w in report.weights] == [("embed.weight", "embedding")]
    assert report.parameters_before == 128 * 64 + 65 * 64
    assert report.parameters_after == report.parameters_before + 128 * 64
    assert report.parameters_quantized == (128 + 64) * 64
    assert isinstance(model.out, nn.Linear)


class Assorted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 4)
        self.position_embedding = torch.nn.Embedding(16, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.router = TokenRouter()
        self.scale = torch.nn.Parameter(torch.ones(64))
        self.table = torch.nn.Parameter(torch.ones(2, 2, 2, 2))
        self.lazy = torch.nn.LazyConv1d(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_every_other_weight_has_a_kind_and_a_reason() -> None:
    report = convert(Assorted())[1]
    assert {w.name: (w.kind, w.reason) for w in report.weights} == {
        "scale": ("vector", "vector"),
        "table": ("other", "a parameter of Assorted of sizes that NVFP4 does not have"),
        "patches.weight": ("convolution", "convolution"),
        "patches.bias": ("convolution", "convolution"),
        "position_embedding.weight": ("embedding", "embedding"),
        "norm.weight": ("norm", "norm"),
        "norm.bias": ("norm", "norm"),
        "router.weight": ("router", "router"),
        "lazy.weight": ("other", "not initialised yet; run the model once"),
        "lazy.bias": ("other", "not initialised yet; run the model once"),
    }
    assert sum(w.num_bytes for w in report.weights) + report.bytes_before == report.model_bytes_before
    assert (
        "10 other weights in float: convolution 12.5 kB, embedding 4.1 kB, router 4.1 kB, norm 512 B, "
        "vector 256 B, other 64 B"
    ) in str(report).splitlines()


def test_the_table_has_a_line_for_layers_that_differ_in_numbers() -> None:
    report = convert(torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Mixture() for _ in range(3))}))[1]
    assert str(report).splitlines() == [
        "layers.0-2.gate              3 times   8 x 64   excluded   6.14 kB             "
        "router, in float unless include matches it",
        "layers.0-2.shared            3 times   64 x 64  quantized  49.9 kB -> 9.23 kB  four-over-six",
        "layers.0-2.experts.0-7.up    24 times  96 x 64  quantized  599 kB -> 105 kB    four-over-six",
        "layers.0-2.experts.0-7.down  24 times  64 x 96  quantized  596 kB -> 111 kB    four-over-six",
        "54 linear layers (3 excluded, 51 quantized): 1.25 MB -> 231 kB",
        "activations: per-token of 51",
        "parameters: 312768 -> 312768, 98.2 % of them quantized",
        "bytes: 1.25 MB -> 231 kB",
    ]
    gaps = [fp4gemm.models.LayerReport(f"a.{i}", (8, 32), "quantized", "", 1, 1) for i in (0, 2)]
    assert "a.*  2 times" in str(fp4gemm.models.QuantizeReport(tuple(gaps)))
    assert str(fp4gemm.models.QuantizeReport()).splitlines()[0] == "0 linear layers (none): 0 B -> 0 B"


# ---- the defaults of entry points, which docs/accuracy.md compares


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_the_default_methods_of_entry_points(scaling: Any) -> None:
    """Every entry point chooses four over six; "round" is the weight of quantize(weight)."""
    linear = torch.nn.Linear(64, 96)
    plain = fp4gemm.quantize(linear.weight.detach(), scaling=scaling)
    adaptive = fp4gemm.quantize(linear.weight.detach(), scaling=scaling, four_over_six="mse")
    rounded = nn.Linear.from_float(linear, weight_scaling=scaling, method="round")
    made = nn.Linear.from_float(linear, weight_scaling=scaling)
    of_model = fp4gemm.models.quantize_model(torch.nn.Sequential(linear), weight_scaling=scaling)[0]
    for layer, wanted in ((rounded, plain), (made, adaptive), (of_model, adaptive)):
        assert torch.equal(layer.weight.codes, wanted.codes)
        assert (layer.weight_scaling, layer.e4m3_max) == (scaling, wanted.e4m3_max)


def test_the_default_scalings_of_entry_points() -> None:
    for function in (nn.Linear.from_float, nn.Experts.from_float, fp4gemm.models.quantize_model):
        assert inspect.signature(function).parameters["weight_scaling"].default == "row"
    for format, scaling, activations in (
        ("modelopt", "tensor", "a16"),
        ("compressed-tensors", "tensor", "a16"),
        ("fp4gemm", "row", "per-token"),
    ):
        recipe = checkpoint.Options(format=format).recipe
        assert recipe == Recipe(weight_scaling=scaling, activations=activations)
    assert Recipe().method == "four-over-six"
