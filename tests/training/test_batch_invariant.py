"""batch_invariant of recipes and of layers for inference: where it reaches a product, and bits on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import models, nn, training
from fp4gemm.nn import linear as linear_module
from fp4gemm.nn import merged as merged_module
from fp4gemm.ops import operators
from fp4gemm.ops.gemm import GemmCall
from fp4gemm.ops.linear import LinearCall
from fp4gemm.ops.moe import ExpertsCall
from fp4gemm.training import Cast, Recipe, _step
from helpers import assert_bits
from torch import Tensor

K, N = 64, 96
RECIPES = {
    "per_token": training.PRESETS["per_token"],
    "nvidia": training.PRESETS["nvidia"],
    "w4a16": Recipe(w=Cast()),
}


def spied(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, schema: Any) -> list[bool]:
    """batch_invariant of each call of an operator."""
    seen: list[bool] = []
    original = getattr(module, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(schema(*args, **{k: v for k, v in kwargs.items() if k != "out"}).batch_invariant)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return seen


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize("name", RECIPES)
def test_it_reaches_the_product_of_the_forward_pass_alone(
    name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And changes no bit on a CPU, of y or of a gradient."""
    recipe = RECIPES[name]
    torch.manual_seed(1)
    offs = (torch.tensor([40, 64], dtype=torch.int32),) if grouped else ()
    layer: Any = (
        training.GroupedLinear(2, K, N, recipe=recipe, dtype=torch.bfloat16)
        if grouped
        else training.Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    )
    x = torch.randn(64, K, dtype=torch.bfloat16, requires_grad=True)
    seen = spied(monkeypatch, _step, "_GEMM", GemmCall)
    results = []
    for wanted in (False, True):
        layer.recipe = recipe.replace(batch_invariant=wanted)
        torch.manual_seed(2)
        y = layer(x, *offs)
        if wanted:
            assert seen == [True]
            seen.clear()
        gradients = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
        assert not any(seen)
        seen.clear()
        results.append((y.detach(), *gradients))
    for got, want in zip(*results, strict=True):
        assert_bits(got, want)


def test_rules_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is loaded chooses by the number of rows."""

    def find(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(fp4gemm.selection, "find", find)
    x = torch.randn(33, K, dtype=torch.bfloat16)
    recipe = RECIPES["per_token"].replace(batch_invariant=True)
    layer = training.Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    served = nn.Linear.from_float(layer, recipe=recipe.for_inference())
    served.batch_invariant = True
    for module in (_step, linear_module):
        monkeypatch.setattr(module, "_RULES", [object()])
    with torch.no_grad():
        assert_bits(served(x), layer(x))


# ---- layers for inference


def served(**options: Any) -> nn.Linear:
    torch.manual_seed(3)
    layer = nn.Linear.from_float(torch.nn.Linear(K, N, dtype=torch.bfloat16), **options)
    layer.batch_invariant = True
    return layer


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8", "per-token,four_over_six=mae"])
def test_a_layer_calls_the_operator_with_it(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call, which makes the checks, and in the others; with an addend too."""
    seen = spied(monkeypatch, linear_module, "_LINEAR", LinearCall)
    layer = served(activations=activations)
    x, c = torch.randn(3, K, dtype=torch.bfloat16), torch.randn(3, N, dtype=torch.bfloat16)
    results = [layer(x), layer(x)]
    layer(x, c)
    assert seen == [True] * 3
    seen.clear()
    layer.batch_invariant = False
    results.append(layer(x))
    assert seen == [False]
    for got in results[1:]:
        assert_bits(got, results[0])
    assert "batch_invariant" not in repr(layer)


def test_copies_and_merged_layers_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = served()
    assert copy.deepcopy(layer).batch_invariant
    merged = merged_module.one_weight([layer, served()])
    assert "batch_invariant=True" in repr(merged)
    other = served()
    other.batch_invariant = False
    assert merged_module.why_not_one_weight([layer, other]) == "their batch_invariant differs"
    x = torch.randn(3, K, dtype=torch.bfloat16)
    merged(x)
    seen = spied(monkeypatch, merged_module, "LINEAR", LinearCall)
    tokens = merged_module.Tokens(fp4gemm.quantize(x), x.shape, x.dtype)
    assert_bits(merged(tokens), merged(x))
    assert seen == [True]


@pytest.mark.parametrize("rounded", [False, True], ids=["one operator", "rounded gate"])
def test_experts_call_both_products_with_it(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    w13, w2 = torch.randn(2, 2 * 32, K), torch.randn(2, K, 32)
    experts = nn.Experts.from_float(w13.bfloat16(), w2.bfloat16(), rounded_gate=rounded)
    experts.batch_invariant = True
    name, schema = ("gemm", GemmCall) if rounded else ("experts", ExpertsCall)
    seen = spied(monkeypatch, operators, name, schema)
    x, ids = torch.randn(3, K, dtype=torch.bfloat16), torch.tensor([[0], [1], [0]])
    y = experts(x, ids, torch.ones(3, 1))
    assert seen == [True] * (2 if rounded else 1)
    assert "batch_invariant=True" in repr(experts)
    experts.batch_invariant = False
    assert_bits(experts(x, ids, torch.ones(3, 1)), y)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(K, N), torch.nn.Linear(K, N)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x), self.k(x)


@pytest.mark.parametrize("fuse", ["none", "auto"])
def test_quantize_model_sets_it(fuse: Any) -> None:
    model = Model().bfloat16()
    models.quantize_model(model, batch_invariant=True, fuse=fuse)
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert found
    assert all(layer.batch_invariant for layer in found)
    assert not any("invariant" in name for name in model.state_dict())


def test_refusals() -> None:
    layer = served()
    with pytest.raises(TypeError, match=r"^batch_invariant: got 1 \(int\), must be True or False"):
        layer.batch_invariant = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"^batch_invariant: got 'yes' \(str\), must be True or False"):
        models.quantize_model(Model(), batch_invariant="yes")  # type: ignore[arg-type]
    experts = nn.Experts.from_float(torch.randn(2, 64, K), torch.randn(2, K, 32))
    experts.batch_invariant = True
    experts.ep = object()  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match=r"^batch_invariant: is True with ep, must be False with"):
        experts(torch.randn(3, K), torch.tensor([[0], [1], [0]]), torch.ones(3, 1))


# ---- bits on a GPU


def steep(gen: torch.Generator, m: int, k: int) -> Tensor:
    """Tokens whose elements differ so much in magnitude that float32 does not hold the sums exactly."""
    x = torch.randn(m, k, generator=gen)
    return (x * torch.exp(3 * torch.randn(k, generator=gen))).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["per_token", "te_per_token", "row_scaled"])
@pytest.mark.parametrize(("k", "n"), [(576, 1536), (4096, 4096), (14336, 512)])
def test_few_tokens_have_the_bits_of_many(
    name: str, k: int, n: int, cuda: torch.device, gen: torch.Generator
) -> None:
    """Of served layers with m rows, and of a layer that trains with 512, whose copies a cache keeps."""
    recipe = training.PRESETS[name].replace(batch_invariant=True)
    torch.manual_seed(1)
    layer = training.Linear(k, n, bias=False, recipe=recipe, device=cuda, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(steep(gen, n, k))
    training.mark_step()
    x = steep(gen, 512, k).to(cuda)
    layer(x)
    want = layer(x).detach()
    made = nn.Linear.from_float(layer, recipe=recipe.for_inference())
    made.batch_invariant = True
    for m in (1, 2, 3, 8, 17, 64, 300, 512):
        for _ in range(2):  # the checked call, and the one without checks
            assert_bits(made(x[:m]), want[:m], f"{m} rows")


@pytest.mark.gpu
def test_experts_with_few_tokens_have_the_bits_of_many(cuda: torch.device, gen: torch.Generator) -> None:
    torch.manual_seed(1)
    g, d, f = 8, 1024, 512
    w13 = steep(gen, g * 2 * f, d).view(g, 2 * f, d).to(cuda)
    w2 = steep(gen, g * d, f).view(g, d, f).to(cuda)
    recipe = training.PRESETS["per_token"].for_inference()
    for rounded in (False, True):
        experts = nn.Experts.from_float(w13, w2, recipe=recipe)
        experts.rounded_gate, experts.batch_invariant = rounded, True
        x = steep(gen, 256, d).to(cuda)
        ids = torch.rand(256, g, generator=gen).topk(2).indices.to(cuda)
        weights = torch.rand(256, 2, generator=gen).to(cuda)
        want = experts(x, ids, weights)
        for m in (1, 5, 64):
            assert_bits(experts(x[:m], ids[:m], weights[:m]), want[:m], f"{m} tokens")
