"""Recipe.for_inference: layers for inference have the bits of the forward pass that trained."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import compiler, models, nn, training
from fp4gemm.recipe import Recipe as InferenceRecipe
from fp4gemm.training import Cast, Recipe
from helpers import assert_bits
from torch import Tensor

SIX: list[dict[str, Any]] = [
    {"four_over_six": rule, "e4m3_max": bound, "four_over_six_error": error}
    for rule, bound, error in itertools.product(("mae", "mse"), (448, 256), ("exact", "fast"))
]
# Every preset whose forward pass has NVFP4 weights, and every option of the casts of x and w.
RECIPES: dict[str, Recipe] = {
    **{name: recipe for name, recipe in training.PRESETS.items() if recipe.w and recipe.w.format == "nvfp4"},
    **{"-".join(("row", *map(str, six.values()))): Recipe(x=Cast(**six), w=Cast(**six)) for six in SIX},
    **{
        "-".join(("2d", *map(str, six.values()))): Recipe(
            x=Cast(scaling="tensor", **six), w=Cast(scaling="tensor", block=(16, 16), **six)
        )
        for six in SIX
    },
    "tensor-te_per_token": Recipe(
        x=Cast(scaling="tensor", encode="te_per_token"), w=Cast(scaling="tensor", encode="te_per_token")
    ),
    "six-of-x": Recipe(x=Cast(four_over_six="mse"), w=Cast(encode="te_per_token")),
    "w4a16": Recipe(w=Cast()),
}
SOME = ("per_token", "four_over_six", "te_per_token", "row-mse-448-fast", "2d-mae-256-fast")
K, N = 64, 96  # the sums of one k fit into float32, so that no kernel has another order of them


def tokens(gen: torch.Generator, *shape: int) -> Tensor:
    """bfloat16 tokens of magnitudes that differ, so that an amax for each differs from one for all."""
    x = torch.randn(*shape, generator=gen)
    return (x * 10.0 ** torch.linspace(-2, 2, shape[-2]).unsqueeze(-1)).bfloat16()


def trained(recipe: Recipe, device: torch.device, k: int = K, n: int = N) -> training.Linear:
    torch.manual_seed(3)
    return training.Linear(k, n, recipe=recipe, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_linear_has_the_bits_of_training(name: str, device: torch.device, gen: torch.Generator) -> None:
    recipe = RECIPES[name]
    if name == "w4a16" and device.type == "cuda":
        pytest.skip("sums of 16-bit tokens do not fit into float32")
    layer = trained(recipe, device)
    served = nn.Linear.from_float(layer, recipe=recipe.for_inference())
    x = tokens(gen, 2, 33, K).to(device)
    want = layer(x).detach()
    assert_bits(served(x), want)
    assert_bits(served(x[0, :1]), layer(x[0, :1]).detach(), "one token")
    assert_bits(served(x[:, :0]), want[:, :0], "no token")
    if device.type == "cpu":
        assert_bits(served.prepack()(x), want, "prepacked")
    if name != "w4a16":
        with torch.no_grad():
            copies = copy.deepcopy(served), pickle.loads(pickle.dumps(served))
        for other in copies:
            assert_bits(other(x), want, "a copy")
            assert other.weight_recipe == recipe.for_inference()


@pytest.mark.parametrize("name", SOME)
def test_a_quantized_x_is_that_of_the_layer(name: str, device: torch.device, gen: torch.Generator) -> None:
    """Layers that share the quantization of x, and the addend of the epilogue."""
    recipe = RECIPES[name]
    served = nn.Linear.from_float(trained(recipe, device), recipe=recipe.for_inference())
    x = tokens(gen, 33, K).to(device)
    kind = fp4gemm.recipe.INPUTS[served.activations]
    scaling: Any = "row" if kind.kind == "per-token" else "tensor"
    quantized = fp4gemm.quantize(x, scaling=scaling, **dict(kind.options))
    assert_bits(served(quantized), served(x))
    c = torch.randn(33, N, generator=gen).bfloat16().to(device)
    assert_bits(served(quantized, c), served(x, c))


@pytest.mark.parametrize("name", SOME)
def test_updates_are_cast_by_the_recipe(name: str, device: torch.device, gen: torch.Generator) -> None:
    recipe = RECIPES[name]
    layer = trained(recipe, device)
    served = nn.Linear.from_float(layer, recipe=recipe.for_inference())
    x = tokens(gen, 33, K).to(device)
    served(x)  # which prepacks on a device that does
    with torch.no_grad():
        layer.weight.copy_(torch.randn(N, K, generator=gen))
    served.update_(layer.weight, layer.bias)
    assert_bits(served(x), layer(x).detach())


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers(name: str, backend: str, device: torch.device, gen: torch.Generator) -> None:
    recipe = RECIPES[name]
    served = nn.Linear.from_float(trained(recipe, device), recipe=recipe.for_inference())
    x = tokens(gen, 33, K).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(served, backend=backend, fullgraph=True)
    assert_bits(compiled(x), served(x))


class Block(torch.nn.Module):
    """Two layers that read one x behind a norm, and one that reads their SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(K, eps=1e-5)
        self.gate, self.up = (torch.nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("name", SOME)
def test_exact_fusions_of_torch_compile_keep_the_bits(name: str, gen: torch.Generator) -> None:
    torch.manual_seed(1)
    block = Block().bfloat16().requires_grad_(False)
    recipe = RECIPES[name]
    training.convert_model(block, recipe)
    served = models.quantize_model(block, recipe=recipe.for_inference(), inplace=False)
    x = tokens(gen, 5, K)
    want = block(x)
    assert_bits(served(x), want)
    torch._dynamo.reset()
    reports: list[Any] = []
    compiled = compiler.compile(served, backend="aot_eager", exact=True, report=reports.append)
    assert_bits(compiled(x), want)
    names = {fusion.rewrite for report in reports for fusion in report.fusions}
    assert "shared" in names or "rms_norm" in names
    if served.gate.activations != "per-token":
        assert not names & {"rms_norm", "silu_and_mul"}, names


@pytest.mark.parametrize("name", SOME)
def test_fused_blocks(name: str, gen: torch.Generator) -> None:
    """quantize_model(fuse="auto") fuses no norm with layers that have options of the cast."""
    torch.manual_seed(1)
    block, recipe = Block().bfloat16().requires_grad_(False), RECIPES[name].for_inference()
    reports: list[Any] = []
    fused = models.quantize_model(copy.deepcopy(block), recipe=recipe, fuse="auto", report=reports.append)
    plain = models.quantize_model(block, recipe=recipe)
    x = tokens(gen, 5, K)
    torch.testing.assert_close(fused(x), plain(x), rtol=0.1, atol=0.1 * float(plain(x).abs().max()))
    kinds = {each.action for each in reports[0].blocks}
    if recipe.activations != "per-token":
        assert "norm" not in kinds, reports[0].blocks


def test_parts_of_a_merged_layer_are_cast_one_by_one(gen: torch.Generator) -> None:
    torch.manual_seed(1)
    recipe = RECIPES["four_over_six"].for_inference()
    layers = [trained(RECIPES["four_over_six"], torch.device("cpu")) for _ in range(2)]
    with torch.no_grad():
        layers[1].weight.mul_(64)
    served = [nn.Linear.from_float(layer, recipe=recipe) for layer in layers]
    merged = nn.merged.one_weight(served)
    x = tokens(gen, 5, K)
    want = torch.cat([layer(x).detach() for layer in layers], -1)
    assert_bits(merged(x), want)
    merged.update_([layer.weight.detach() for layer in layers])
    assert_bits(merged(x), want)
    with pytest.raises(ValueError, match=r"^weight: .*, must be a sequence of the weights of the 2"):
        merged.update_(torch.cat([layer.weight.detach() for layer in layers]))


# ---- experts


def moe(dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3MoeConfig") or int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 5 has experts as 3-D parameters")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(5)
    return transformers.Qwen3MoeForCausalLM(config).to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_mixture_of_experts_has_the_bits_of_training(name: str, dtype: torch.dtype) -> None:
    if name == "w4a16" and dtype is torch.float32:
        pytest.skip("layers for inference round float32 tokens to bfloat16 with a16")
    recipe, model = RECIPES[name], moe(dtype)
    ids = torch.arange(42).view(2, 21) % 64
    training.convert_model(model, recipe)
    served = models.quantize_model(model, recipe=recipe.for_inference(), inplace=False)
    experts = served.model.layers[0].mlp.experts
    assert isinstance(experts, nn.Experts)
    assert experts.rounded_gate
    assert_bits(served(ids).logits, model(ids).logits)
    experts.prepack()
    assert_bits(served(ids).logits, model(ids).logits, "prepacked")


def stacks(gen: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    w13, w2 = (torch.randn(4, *shape, generator=gen) for shape in ((2 * 32, 64), (64, 32)))
    return w13.bfloat16().to(device), w2.bfloat16().to(device)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_have_the_bits_of_the_products_of_training(
    name: str, weights: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """Also with tokens that name fewer experts, and after an update."""
    recipe = RECIPES[name]
    served: nn.Experts | None = None
    x = tokens(gen, 9, 64).to(device)
    ids = torch.rand(9, 4, generator=gen).argsort(1)[:, :2].to(device)
    ids[2], ids[4, 1] = -1, -1
    scores = torch.rand(9, 2, generator=gen).to(weights).to(device)
    for _ in range(2):
        w13, w2 = stacks(gen, device)
        routing = fp4gemm.route(ids, 4)
        rows = torch.where(routing.token_of_row[:, None] >= 0, x[routing.token_of_row.clamp(min=0).long()], 0)
        z = training.functional.grouped_linear(rows, w13, routing.offs, None, recipe)
        h = training.functional.swiglu(*z.chunk(2, -1))
        y = training.functional.grouped_linear(h, w2, routing.offs, None, recipe)
        want = torch.zeros(9, 64, device=device)
        for token, slot in itertools.product(range(9), range(2)):
            row = int(routing.row_of_pair[token, slot])
            if row >= 0:
                want[token] += (y[row] * scores[token, slot : slot + 1]).float()
        if served is None:
            served = nn.Experts.from_float(w13, w2, recipe=recipe.for_inference())
        else:
            served.update_(w13, w2)
        assert_bits(served(x, ids, scores), want.bfloat16())
        assert_bits(served(x[:0], ids[:0], scores[:0]), want[:0].bfloat16())


def test_compiled_experts(gen: torch.Generator) -> None:
    served = nn.Experts.from_float(
        *stacks(gen, torch.device("cpu")), recipe=RECIPES["four_over_six"].for_inference()
    )
    ids = torch.rand(9, 4, generator=gen).argsort(1)[:, :2]
    call = tokens(gen, 9, 64), ids, torch.rand(9, 2, generator=gen)
    torch._dynamo.reset()
    compiled = torch.compile(served, backend="aot_eager", fullgraph=True)
    assert_bits(compiled(*call), served(*call))


def test_other_activations_are_named_in_the_report(gen: torch.Generator) -> None:
    w13, w2 = stacks(gen, torch.device("cpu"))
    made = nn.Experts.from_float(
        w13, w2, activation="geglu_tanh", recipe=RECIPES["per_token"].for_inference()
    )
    assert not made.rounded_gate
    with pytest.raises(
        ValueError, match=r"^rounded_gate: got True with activation 'geglu_tanh', must be False"
    ):
        nn.Experts.from_float(w13, w2, activation="geglu_tanh", rounded_gate=True)
    with pytest.raises(TypeError, match=r"^rounded_gate: got 1"):
        nn.Experts(4, 64, 32, rounded_gate=1)  # type: ignore[arg-type]


# ---- what is refused


def test_recipes_without_a_forward_pass_in_nvfp4() -> None:
    for name in ("bf16", "bf16_forward"):
        with pytest.raises(ValueError, match=r"^w: is None, must be a Cast"):
            training.PRESETS[name].for_inference()
    for field, recipe in (
        ("x", Recipe(x=Cast(stochastic=True), w=Cast())),
        ("w", Recipe(x=Cast(), w=Cast(stochastic=True))),
    ):
        with pytest.raises(ValueError, match=f"^{field}: stochastic is True, must be False for inference"):
            recipe.for_inference()


def test_a_recipe_takes_the_place_of_options() -> None:
    recipe = training.PRESETS["nvidia"].for_inference()
    assert recipe == InferenceRecipe(
        activations="per-tensor", weight_scaling="tensor", method="round", block=(16, 16)
    )
    layer = torch.nn.Linear(64, 24)
    for function in (
        lambda **options: nn.Linear.from_float(layer, **options),
        lambda **options: models.quantize_model(layer, **options),
    ):
        for option, value in (("activations", "a16"), ("weight_scaling", "tensor"), ("method", "round")):
            with pytest.raises(ValueError, match=f"^{option}: got '{value}' beside a recipe, must be absent"):
                function(recipe=recipe, **{option: value})
        with pytest.raises(TypeError, match=r"^recipe: got .*, must be an fp4gemm\.recipe\.Recipe; for_inf"):
            function(recipe=training.PRESETS["nvidia"])
        with pytest.raises(TypeError, match=r"^recipe: got 'nvidia'"):
            function(recipe="nvidia")
        with pytest.raises(ValueError, match=r"^recipe: its numerics are 'modelopt', must be 'te'"):
            function(recipe=InferenceRecipe(numerics="modelopt"))
