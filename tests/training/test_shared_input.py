"""training.quantize_input: layers that share a quantized x compute the bits that they compute from x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp4gemm import training
from fp4gemm.training import functional
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training_cases import RECIPES
from training_memory import of_input, of_shared_input, saved_bytes

BF16, K = torch.bfloat16, 64
ENDS = (5, 5, 33)
# A shared x that is rounded stochastically has a state of its own.
FORWARD_ONLY_OF_X = [
    name
    for name, r in RECIPES.items()
    if not any(getattr(cast, "stochastic", False) for cast in (r.x, r.x_t))
]


def layers(recipe: str, device: torch.device, is_grouped: bool = False) -> torch.nn.ModuleList:
    """Three layers of different widths that read one x."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"bias": True, "device": device, "dtype": BF16, "recipe": RECIPES[recipe]}
    if is_grouped:
        return torch.nn.ModuleList(training.GroupedLinear(len(ENDS), K, n, **options) for n in (96, 32, 32))
    return torch.nn.ModuleList(training.Linear(K, n, **options) for n in (96, 32, 32))


def values(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)


def gradients(run: Callable[[Tensor], list[Tensor]], x: Tensor, module: torch.nn.Module) -> list[Tensor]:
    """Each y, dx, and the gradients of the parameters, with the same random numbers in each call."""
    torch.manual_seed(2)
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    ys = run(x)
    sum(
        (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum() for y in ys
    ).backward()
    return [*(y.detach() for y in ys), x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits(a, b, f"result {i}")


def separate(of: torch.nn.ModuleList, *offs: Tensor) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [layer(x, *offs) for layer in of]


def together(of: torch.nn.ModuleList, *offs: Tensor) -> Callable[[Tensor], list[Tensor]]:
    def run(x: Tensor) -> list[Tensor]:
        xq = training.quantize_input(x, of[0], *offs)
        return [layer(xq) for layer in of]

    return run


@pytest.mark.parametrize("shape", [(3, 11, K), (64, K), (0, K)], ids=str)
@pytest.mark.parametrize("name", FORWARD_ONLY_OF_X)
def test_the_bits_of_layers_that_quantize_x_themselves(
    name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    """The gradients of all layers together; dy and W are rounded with the same random numbers too."""
    of, x = layers(name, device), values(*shape, device=device)
    assert_same(gradients(together(of), x, of), gradients(separate(of), x, of))


@pytest.mark.parametrize("name", FORWARD_ONLY_OF_X)
def test_grouped_layers(name: str, device: torch.device) -> None:
    """With an expert that has no token, and rows of no group."""
    of, x = layers(name, device, True), values(40, K, device=device)
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device)
    want = gradients(separate(of, offs), x, of)
    assert_same(gradients(together(of, offs), x, of), want)
    xq = training.quantize_input(x, of[0], offs)
    assert_bits(of[1](xq, offs), want[1])
    assert_bits(of[1](training.quantize_input(x, of[0], offs.long())), want[1])


@pytest.mark.parametrize("saved", ["original", "quantized", "quartet2"])
def test_a_stochastic_x_with_a_given_state(saved: str, device: torch.device) -> None:
    """Equal to layers of the same state; without one, one state is drawn for x and others for each layer."""
    is_preset = saved in RECIPES
    recipe = RECIPES[saved] if is_preset else RECIPES["all stochastic"].replace(save_input=saved)
    x, state = values(33, K, device=device), torch.tensor([7, 11], device=device)
    dy = values(33, 96, device=device)
    results = []
    for is_shared in (False, True):
        leaf = x.clone().requires_grad_()
        weights = [values(96, K, device=device).mul_(s).requires_grad_() for s in (1, 2)]
        read = training.quantize_input(leaf, recipe, state=state) if is_shared else leaf
        ys = [functional.linear(read, weight, None, recipe, state=state) for weight in weights]
        torch.autograd.backward(ys, [dy, dy])
        results.append([*ys, leaf.grad, *(weight.grad for weight in weights)])
    assert_same(results[1], results[0])
    torch.manual_seed(1)
    read = training.quantize_input(x, recipe)
    ys = [functional.linear(read, torch.ones(32, K, device=device, dtype=BF16), None, recipe) for _ in "ab"]
    assert_bits(ys[0], ys[1])  # ones are on the grid, so that x alone is rounded


@pytest.mark.parametrize("name", ["te_per_token", "original", "row_scaled_dequantized", "bf16"])
def test_autocast(name: str, device: torch.device) -> None:
    """Gradients add up in the dtype of x, float32, as those of separate layers do."""
    of, x = layers(name, device), values(33, K, device=device, dtype=torch.float32)

    def under(run: Callable[[Tensor], list[Tensor]]) -> Callable[[Tensor], list[Tensor]]:
        def inner(t: Tensor) -> list[Tensor]:
            with torch.autocast(device.type, dtype=BF16):
                return run(t)

        return inner

    assert_same(gradients(under(together(of)), x, of), gradients(under(separate(of)), x, of))
    if name == "te_per_token":
        xq = training.quantize_input(x, name)
        with (
            torch.autocast(device.type, dtype=BF16),
            pytest.raises(ValueError, match="x: was quantized as tor"),
        ):
            of[0](xq)
        with torch.autocast(device.type, dtype=BF16):
            xq = training.quantize_input(x, name)
        with pytest.raises(ValueError, match=r"x: was quantized as torch.bfloat16, must be .* torch.float32"):
            of[0](xq)


@pytest.mark.parametrize("name", ["bf16_backward", "bf16_forward", "original", "nvidia", "bf16"])
def test_an_x_that_was_written_after_it_was_quantized(name: str, device: torch.device) -> None:
    """A layer that reads x itself beside the copy refuses it; one that reads only one of them does not."""
    layer, x = layers(name, device)[0], values(33, K, device=device)
    xq = training.quantize_input(x, layer)
    want = layer(xq)
    x.mul_(2)
    if name in ("nvidia", "bf16"):
        assert torch.equal(layer(xq), want if name == "nvidia" else layer(x))
        return
    with pytest.raises(ValueError, match="x: was written in place after it was quantized, must be quantized"):
        layer(xq)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["nvidia", "all stochastic"])
def test_checkpointed_equals_plain(name: str, use_reentrant: bool, device: torch.device) -> None:
    of, x = layers(name, device), values(33, K, device=device)

    def run(t: Tensor) -> list[Tensor]:
        return list(checkpoint(lambda u: tuple(together(of)(u)), t, use_reentrant=use_reentrant))

    assert_same(gradients(run, x, of), gradients(together(of), x, of))


def test_compiles_into_one_graph(device: torch.device) -> None:
    """A recipe without random numbers, which a graph of several layers may draw in another order."""
    of, x = layers("te_per_token", device)[:2], values(33, K, device=device)
    run = compiled(together(of), ready("aot_eager"))
    assert_same(gradients(run, x, of), gradients(together(of), x, of))


def test_a_compiled_layer_takes_a_quantized_input(device: torch.device) -> None:
    of, x = layers("te_per_token", device), values(33, K, device=device)
    first = compiled(of[0], ready("aot_eager"))

    def run(t: Tensor) -> list[Tensor]:
        xq = training.quantize_input(t, of[0])
        return [first(xq), of[1](xq), of[2](xq)]

    assert_same(gradients(run, x, of), gradients(separate(of), x, of))


@pytest.mark.parametrize("name", ["nvidia", "per_token", "row_scaled_dequantized", "bf16_backward"])
def test_x_is_saved_once(name: str) -> None:
    assert of_shared_input(name, 3) == of_input(name, 1)


def test_save_input_original_saves_x_once(device: torch.device) -> None:
    of, x = layers("original", device), values(32, K, device=device).requires_grad_()
    own = list(of.parameters())
    assert saved_bytes(lambda: together(of)(x), *own) == x.nbytes
    assert saved_bytes(lambda: together(of)(x), x, *own) == 0


def test_without_gradients_there_is_no_copy_for_the_weight(device: torch.device) -> None:
    of, x = layers("nvidia", device), values(32, K, device=device)
    want = of[0](x)
    with torch.no_grad():
        xq = training.quantize_input(x, of[0])
        assert_bits(of[0](xq), want)
    with pytest.raises(ValueError, match="x: was quantized without grad mode, must be quantized where gradi"):
        of[0](xq)
    of[0].weight.requires_grad_(False)
    assert_bits(of[0](xq), want)


def test_layers_may_differ_in_their_other_casts(device: torch.device) -> None:
    """The casts of W and dy, and other seeds."""
    recipe = RECIPES["nvidia"]
    of, x = layers("nvidia", device), values(33, K, device=device)
    of[1].recipe = recipe.replace(w=training.Cast(), dy=None, w_t=None)
    of[2].recipe = recipe.replace(seed=5, cache_weight=False)
    assert_same(gradients(together(of), x, of), gradients(separate(of), x, of))


def test_main_grad(device: torch.device) -> None:
    of, x = layers("te_per_token", device), values(33, K, device=device)
    want = []
    for run in (separate(of), together(of)):
        for layer in of:
            layer.weight.main_grad = torch.ones(layer.weight.shape, device=device)
        gradients(run, x, of)
        want.append([layer.weight.main_grad for layer in of])
    assert_same(want[1], want[0])


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    of, x = layers("te_per_token", device), values(33, K, device=device).requires_grad_()
    loss = sum(y.square().sum() for y in together(of)(x))
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="is differentiated again; only first derivatives"):
        dx.sum().backward()


def test_an_x_that_was_written_is_refused(device: torch.device) -> None:
    of = layers("original", device)
    x = values(33, K, device=device).requires_grad_() * 1
    loss = together(of)(x)[0].sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"x": training.Cast()},
            r"x: was quantized by a recipe whose x is Cast\(scaling='tensor'\), must be C",
        ),
        (
            {"x_t": None, "dy_t": None},
            r"whose x_t is Cast\(scaling='tensor', hadamard='bf16'\), must be None",
        ),
        ({"hadamard_signs": 1}, "whose hadamard_signs is 55272, must be 1, as in the recipe of the layer"),
        ({"save_input": "original"}, "whose save_input is 'quantized', must be 'original'"),
    ],
    ids=["x", "x_t", "signs", "save_input"],
)
def test_a_layer_with_other_casts_of_x_is_refused(changes: dict[str, Any], says: str) -> None:
    device = torch.device("cpu")
    of = layers("nvidia", device)
    xq = training.quantize_input(values(33, K, device=device), "nvidia")
    of[1].recipe = RECIPES["nvidia"].replace(**changes)
    with pytest.raises(ValueError, match=says):
        of[1](xq)
    of[1].recipe = "bf16"
    with pytest.raises(ValueError, match=r"whose x is Cast\(scaling='tensor'\), must be None"):
        of[1](xq)


def test_other_sizes_and_groups_are_refused() -> None:
    device = torch.device("cpu")
    dense, grouped, x = (
        layers("nvidia", device)[0],
        layers("nvidia", device, True)[0],
        values(33, K, device=device),
    )
    offs = torch.tensor(ENDS, dtype=torch.int32)
    plain, in_groups = training.quantize_input(x, dense), training.quantize_input(x, dense, offs)
    with pytest.raises(ValueError, match=r"x: shape is \(33, 96\), must be \(\.\.\., 64\)"):
        dense(training.quantize_input(values(33, 96, device=device), "nvidia"))
    with pytest.raises(ValueError, match="x: was quantized with offs, must be quantized without groups"):
        dense(in_groups)
    with pytest.raises(ValueError, match="x: was quantized without groups, must be quantized with offs"):
        grouped(plain, offs)
    with pytest.raises(
        ValueError, match="offs: got another tensor than x was quantized with, must be the same"
    ):
        grouped(in_groups, offs.clone())
    with pytest.raises(ValueError, match=r"offs: shape is \(2,\), must be \(3,\)"):
        grouped(training.quantize_input(x, "nvidia", torch.tensor([5, 33])))
    with pytest.raises(TypeError, match=r"offs: got None, must be a torch.Tensor"):
        grouped(x)
    assert repr(plain) == "QuantizedInput(shape=(33, 64), dtype=torch.bfloat16, device='cpu', offs=False)"


@pytest.mark.parametrize("name", ["nvidia", "per_token", "bf16"])
def test_the_experts_of_moe_share_their_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of separate layers; a layer with a hook, or with another recipe, gets x itself."""
    torch.manual_seed(1)
    moe = training.MoE(K, 96, 4, top_k=2, num_shared_experts=1, recipe=name, dtype=BF16)
    x, seen = values(19, K, device=torch.device("cpu")), []
    got = gradients(lambda t: [moe(t)], x, moe)
    for module in (moe.experts, moe.shared_experts):
        module.w3.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    assert_same(got, gradients(lambda t: [moe(t)], x, moe))
    assert seen == [Tensor, Tensor]
    moe.shared_experts.w3._forward_pre_hooks.clear()
    moe.shared_experts.w3._shares_input = False  # as of a layer that is sharded
    assert_same(got, gradients(lambda t: [moe(t)], x, moe))
    moe.experts.w1.recipe = "te_per_token"
    assert moe(x).isfinite().all()
