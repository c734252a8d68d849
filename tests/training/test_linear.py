"""training.Linear: torch.nn.Linear's interface, micro-batches, checkpointing, autocast, torch.compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import training
from fp4gemm.training import Cast, cache
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training_cases import RECIPES, explicit

BF16 = torch.bfloat16


def layer(recipe: str, device: torch.device, bias: bool = True, dtype: torch.dtype = BF16) -> training.Linear:
    torch.manual_seed(1)
    return training.Linear(64, 96, bias, device, dtype, recipe=RECIPES[recipe])


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, module: torch.nn.Module) -> list[Tensor]:
    """y, dx and the gradients of the parameters for a fixed dy, with the same random numbers in each call."""
    torch.manual_seed(2)
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = run(x)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype).sin()
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits(a, b, f"result {i}")


def test_a_recipe_of_none_is_torch(device: torch.device) -> None:
    ours = layer("bf16", device)
    theirs = torch.nn.Linear(64, 96, device=device, dtype=BF16)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(33, 64, device=device, dtype=BF16)
    assert_same(gradients(ours, x, ours), gradients(theirs, x, theirs))


@pytest.mark.parametrize("name", ["te_per_token", "nvidia"])
def test_the_state_dict_interchanges(name: str, device: torch.device) -> None:
    ours, theirs = layer(name, device), torch.nn.Linear(64, 96, device=device, dtype=BF16)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    other = layer(name, device)
    torch.nn.init.zeros_(other.weight)
    other.load_state_dict(theirs.state_dict())
    assert_bits(other.weight, ours.weight)
    twin = copy.deepcopy(ours)
    assert twin.recipe == ours.recipe
    assert twin.weight is not ours.weight
    x = torch.randn(33, 64, device=device, dtype=BF16)
    assert_same(gradients(twin, x, twin), gradients(ours, x, ours))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 11, 64), (2, 0, 64)], ids=str)
def test_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A weight in float32 is quantized from float32; y and dx have the dtype of x."""
    linear = layer("te_per_token", device, dtype=torch.float32)
    x = torch.randn(shape, device=device).to(dtype)
    y, dx, dw, db = gradients(linear, x, linear)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, torch.float32, torch.float32)
    assert y.shape == (*shape[:-1], 96)
    flat = gradients(linear, x.reshape(-1, 64), linear)
    assert_same([y.reshape(-1, 96), dx.reshape(-1, 64), dw, db], flat)
    if x.numel() == 0:
        assert not dw.any()
        assert not db.any()


def test_bias(device: torch.device) -> None:
    """The bias enters before y is rounded, and its gradient is the float32 sum of dy."""
    linear = layer("te_per_token", device)
    with torch.no_grad():
        linear.bias.normal_()
    x = torch.randn(33, 64, device=device, dtype=BF16)
    y = linear(x)
    x_q, w_q = (fp4gemm.quantize(t, encode="te_per_token") for t in (x, linear.weight.detach()))
    assert_bits(y, training.fprop(x_q, w_q, bias=linear.bias.detach()))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_bits(linear.bias.grad, dy.sum(0, dtype=torch.float32).to(BF16))


@pytest.mark.parametrize("name", ["te_per_token", "nvidia", "row_scaled_dequantized"])
def test_only_wanted_gradients(name: str, device: torch.device) -> None:
    linear = layer(name, device)
    x = torch.randn(33, 64, device=device, dtype=BF16)
    want = gradients(linear, x, linear)
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(False)
    with_grad = x.clone().requires_grad_()
    torch.manual_seed(2)
    y = linear(with_grad)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(BF16).sin())
    assert_same([y.detach(), with_grad.grad], want[:2])
    linear.weight.requires_grad_(True)
    torch.manual_seed(2)
    linear.weight.grad = None
    y = linear(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(BF16).sin())
    assert_same([y.detach(), linear.weight.grad], [want[0], want[2]])
    with torch.no_grad():
        assert_bits(linear(x), want[0])


@pytest.mark.parametrize("m", [64, 33])
@pytest.mark.parametrize("name", ["te_per_token", "all stochastic", "row_scaled_dequantized"])
def test_main_grad_adds_micro_batches(name: str, m: int, device: torch.device, gen: torch.Generator) -> None:
    """Micro-batches into weight.main_grad equal sequential additions of their float32 gradients."""
    recipe = RECIPES[name]
    weight = torch.nn.Parameter(torch.randn(96, 64, generator=gen).to(device, BF16))
    weight.main_grad = torch.randn(96, 64, generator=gen).to(device)
    want = weight.main_grad.clone()
    for step in range(3):
        x, dy = (torch.randn(m, n, generator=gen).to(device, BF16) for n in (64, 96))
        state = torch.tensor([step, 5], device=device)
        if name == "row_scaled_dequantized":  # a product of torch, rounded to bf16
            want += explicit(x, weight.detach(), dy, recipe, state).dw
        else:
            want += explicit(x, weight.detach().float(), dy, recipe, state).dw
        training.functional.linear(x, weight, None, recipe, state=state).backward(dy)
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()
    assert_bits(weight.main_grad, want)


@pytest.mark.parametrize("name", ["te_per_token", "bf16"])
def test_main_grad_that_is_not_used(name: str, device: torch.device, gen: torch.Generator) -> None:
    linear = layer(name, device, bias=False)
    x, dy = (torch.randn(64, n, generator=gen).to(device, BF16) for n in (64, 96))
    linear(x).backward(dy)
    want, linear.weight.grad = linear.weight.grad, None
    linear.weight.main_grad = torch.zeros(96, 64, device=device)
    training.functional.linear(x, linear.weight, None, name, use_main_grad=False).backward(dy)
    assert_bits(linear.weight.grad, want)
    assert not linear.weight.main_grad.any()
    assert not hasattr(linear.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("m", [64, 33, 0])
def test_main_grad_may_lie_anywhere(m: int, device: torch.device, gen: torch.Generator) -> None:
    """In a buffer of all parameters at an address that is not aligned, or transposed: the same bits."""
    linear = layer("te_per_token", device, bias=False)
    x, dy = (torch.randn(m, n, generator=gen).to(device, BF16) for n in (64, 96))
    start = torch.randn(96, 64, generator=gen).to(device)
    places = [start.clone(), start.new_empty(96 * 64 + 1)[1:].view(96, 64), start.new_empty(64, 96).t()]
    for main_grad in places:
        linear.weight.main_grad = main_grad.copy_(start)
        linear(x).backward(dy)
        assert_bits(main_grad.contiguous(), places[0])
    assert torch.equal(places[0], start) == (m == 0)


@pytest.mark.parametrize("name", ["te_per_token", "nvidia"])
def test_addresses_and_strides_do_not_matter(name: str, device: torch.device) -> None:
    """x and dy that no kernel reads in place: not aligned, or expanded and empty."""
    linear = layer(name, device)
    x = torch.randn(32 * 64 + 1, device=device, dtype=BF16)[1:].view(32, 64)
    assert_same(gradients(linear, x, linear), gradients(linear, x.clone(), linear))
    weights = torch.randn(32 * 96 + 1, device=device, dtype=BF16)
    found = []
    for view in (weights[1:].view(32, 96), weights[1:].clone().view(32, 96)):
        torch.manual_seed(2)
        found.append(torch.autograd.grad((linear(x) * view).sum(), linear.weight)[0])
    # dy is a view of the buffer that concatenation makes
    torch.manual_seed(2)
    joined = torch.cat((weights[:1], linear(x).flatten()))
    found.append(torch.autograd.grad((joined * weights).sum(), linear.weight)[0])
    assert_same(found[1:], found[:1] * 2)
    nothing = torch.ones(1, 64, device=device, dtype=BF16).expand(0, 64).requires_grad_()
    linear.zero_grad()
    linear(nothing).sum().backward()  # the gradient of a sum is expanded from one number
    assert nothing.grad.shape == (0, 64)
    assert not linear.weight.grad.any()


class Block(torch.nn.Module):
    """Two layers, and random numbers of torch between them."""

    def __init__(self, recipe: str, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        chosen = RECIPES[recipe]
        self.up = training.Linear(64, 96, device=device, dtype=BF16, recipe=chosen)
        self.down = training.Linear(96, 64, device=device, dtype=BF16, recipe=chosen)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.dropout(self.up(x).relu(), 0.1))
        return y


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["nvidia", "all stochastic", "te_per_token"])
def test_checkpointed_equals_plain(name: str, use_reentrant: bool, device: torch.device) -> None:
    block = Block(name, device)
    x = torch.randn(33, 64, device=device, dtype=BF16)

    def twice(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: run(t) + run(t)

    plain = gradients(twice(block), x, block)
    saved = gradients(twice(lambda t: checkpoint(block, t, use_reentrant=use_reentrant)), x, block)
    assert_same(saved, plain)


@pytest.mark.parametrize("name", ["nvidia", "te_per_token"])
def test_selective_checkpointing_saves_the_products_that_it_names(name: str, device: torch.device) -> None:
    """The policy sees the quantizers and the products one by one, and may choose between them."""
    block = Block(name, device)
    x = torch.randn(33, 64, device=device, dtype=BF16)
    calls: list[str] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute:  # some versions of torch ask again there
            calls.append(op.name())
        is_product = op is torch.ops.fp4gemm.gemm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def run(t: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, t, use_reentrant=False, context_fn=contexts)

    assert_same(gradients(run, x, block), gradients(block, x, block))
    assert calls.count("fp4gemm::gemm") == 2
    assert any("quantize" in call for call in calls)


def test_resumed_equals_uninterrupted(device: torch.device, tmp_path: Path) -> None:
    """The states of the parameters, the optimizer and torch's generator are all that a run continues from."""
    data = torch.randn(4, 33, 64, device=device, dtype=BF16)

    def train(block: Block, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            block(data[step]).square().sum().backward()
            optimizer.step()

    whole = Block("all stochastic", device)
    torch.manual_seed(4)
    train(whole, torch.optim.SGD(whole.parameters(), 1e-3, 0.9), range(4))
    block = Block("all stochastic", device)
    torch.manual_seed(4)
    optimizer = torch.optim.SGD(block.parameters(), 1e-3, 0.9)
    train(block, optimizer, range(2))
    on_gpu = device.type == "cuda"
    rng = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
    torch.save([block.state_dict(), optimizer.state_dict(), rng], tmp_path / "run.pt")
    resumed = Block("all stochastic", device)
    optimizer = torch.optim.SGD(resumed.parameters(), 1e-3, 0.9)
    weights, momenta, rng = torch.load(tmp_path / "run.pt")
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(rng.cpu())
    train(resumed, optimizer, range(2, 4))
    assert_same(list(resumed.parameters()), list(whole.parameters()))


def test_seeds_and_calls_round_differently(device: torch.device) -> None:
    linear = layer("nvidia", device, bias=False)
    x = torch.randn(64, 64, device=device, dtype=BF16)
    first = gradients(linear, x, linear)
    assert_same(gradients(linear, x, linear), first)
    linear.recipe = linear.recipe.replace(seed=1)
    assert not torch.equal(gradients(linear, x, linear)[2], first[2])
    torch.manual_seed(2)
    linear(x)  # another call between takes random numbers
    linear.recipe = RECIPES["nvidia"]
    y = linear(x.requires_grad_())
    y.sum().backward()
    assert not torch.equal(linear.weight.grad, first[2])


def test_autocast(device: torch.device) -> None:
    """Under autocast x is converted to its dtype, and the weight is quantized from float32."""
    linear = layer("te_per_token", device, dtype=torch.float32)
    x = torch.randn(33, 64, device=device)
    want = gradients(linear, x.to(BF16), linear)

    def run(t: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=BF16):
            y: Tensor = linear(t)
        return y

    got = gradients(run, x, linear)
    want[1] = want[1].float()
    assert_same(got, want)


@pytest.mark.parametrize("name", ["row_scaled_dequantized", "bf16_forward", "bf16_backward"])
def test_autocast_of_products_in_bf16(name: str, device: torch.device) -> None:
    """Products of torch inside of a recipe have the dtype of x, and autocast does not convert them again."""
    linear = layer(name, device, dtype=torch.float32)
    x = torch.randn(33, 64, device=device, dtype=torch.float16)
    want = gradients(linear, x.to(BF16), linear)
    with torch.autocast(device.type, dtype=BF16):
        got = gradients(linear, x, linear)
    want[1] = want[1].half()
    assert_same(got, want)


def test_double_backward_is_refused(device: torch.device) -> None:
    linear = layer("te_per_token", device)
    x = torch.randn(32, 64, device=device, dtype=BF16, requires_grad=True)
    (dx,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="is differentiated again; only first derivatives"):
        dx.sum().backward()


def test_a_gradient_penalty_is_refused(device: torch.device) -> None:
    """The derivative of dx by W exists where dy is a constant too; it must not be missing without a word."""
    linear = layer("te_per_token", device)
    x = torch.randn(32, 64, device=device, dtype=BF16, requires_grad=True)
    y = linear(x).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="is differentiated again; only first derivatives"):
        (y + dx.square().sum()).backward()
    linear.requires_grad_(False)
    assert not torch.autograd.grad(linear(x).sum(), x, create_graph=True)[0].requires_grad


@pytest.mark.parametrize(
    ("name", "backend"),
    [("nvidia", "aot_eager"), ("row_scaled_dequantized", "aot_eager"), ("te_per_token", "inductor")],
)
def test_compiles_into_one_graph(name: str, backend: str, device: torch.device) -> None:
    block = torch.nn.Sequential(layer(name, device), torch.nn.Linear(96, 64, device=device, dtype=BF16))
    x = torch.randn(33, 64, device=device, dtype=BF16)
    run = compiled(block, ready(backend))
    y, _, *rest = gradients(run, x, block)
    assert y.isfinite().all()
    if backend == "aot_eager":  # inductor has its own random numbers and order of sums
        assert_same([y, *rest], [t for i, t in enumerate(gradients(block, x, block)) if i != 1])
    else:
        want = gradients(block, x, block)
        assert_bits(y, want[0])


def test_compiles_for_any_number_of_tokens(device: torch.device) -> None:
    linear = layer("nvidia", device)
    linear.recipe = linear.recipe.replace(seed=1234)
    run = compiled(linear, ready("aot_eager"), dynamic=True)
    for m in (44, 64, 33):
        x = torch.randn(m, 64, device=device, dtype=BF16)
        assert_same(gradients(run, x, linear), gradients(linear, x, linear))


def test_compiled_main_grad(device: torch.device) -> None:
    linear = layer("te_per_token", device)
    linear.weight.main_grad = torch.zeros(96, 64, device=device)
    x = torch.randn(33, 64, device=device, dtype=BF16)
    gradients(linear, x, linear)
    want = linear.weight.main_grad.clone()
    linear.weight.main_grad.zero_()
    del linear.weight.grad_added_to_main_grad
    gradients(compiled(linear, ready("aot_eager")), x, linear)
    assert linear.weight.grad_added_to_main_grad
    assert_bits(linear.weight.main_grad, want)


def test_switching_the_recipe(device: torch.device) -> None:
    linear = layer("bf16", device)
    x = torch.randn(32, 64, device=device, dtype=BF16)
    plain = linear(x)
    linear.recipe = "te_per_token"
    assert linear.recipe is training.PRESETS["te_per_token"]
    assert not torch.equal(linear(x), plain)
    assert "recipe='te_per_token'" in repr(linear)
    linear.recipe = "bf16"
    assert_bits(linear(x), plain)


@pytest.mark.parametrize("name", RECIPES)
def test_cached_copies_give_the_same_bits(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an optimizer that marks steps; without one the cache keeps nothing."""
    linear = layer(name, device)
    x = torch.randn(33, 64, device=device, dtype=BF16)
    want = gradients(linear, x, linear)
    assert linear.cache.nbytes == 0
    monkeypatch.setattr(cache, "_STEPS", cache._Steps(are_marked=True))
    for _ in range(2):
        assert_same(gradients(linear, x, linear), want)
    casts = [cast for cast in (linear.recipe.w, linear.recipe.w_t) if isinstance(cast, Cast)]
    is_kept = bool(casts) and casts[-1].encode != "eden"  # whose signs are those of one call
    assert (linear.cache.nbytes > 0) == is_kept
    assert copy.deepcopy(linear).cache.nbytes == 0
    linear.recipe = linear.recipe.replace(cache_weight=False)
    assert_same(gradients(linear, x, linear), want)
    assert linear.cache.nbytes == 0


def test_an_x_of_float32_beside_a_quantized_weight_alone() -> None:
    """No kernel multiplies it; under autocast it is converted first."""
    x, weight = torch.randn(32, 32), torch.randn(32, 32)
    recipe = training.Recipe(w=training.Cast())
    with pytest.raises(TypeError, match=r"x: dtype is torch\.float32, must be .*float16$"):
        training.functional.linear(x, weight, None, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        assert training.functional.linear(x, weight, None, recipe).dtype is torch.bfloat16
