"""training.GroupedLinear: each expert is a Linear of its own, whatever the number of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from fp4gemm import training
from fp4gemm.training import Recipe
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from training_cases import RECIPES, explicit

BF16 = torch.bfloat16
ENDS = (16, 16, 19, 52)  # sizes 16, 0, 3, 33; the rows after 52 are in no group
M, N, K, G = 56, 96, 64, len(ENDS)


@pytest.fixture(autouse=True)
def memory_is_nan() -> Iterator[None]:
    """New tensors are filled with NaN, so that a row that was not written shows."""
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def ends(device: torch.device, values: tuple[int, ...] = ENDS) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tensors(gen: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy and a weight; the rows that are in no group are NaN."""
    x, dy = (torch.randn(M, size, generator=gen).to(device, BF16) for size in (K, N))
    x[ENDS[-1] :] = dy[ENDS[-1] :] = torch.nan
    return x, dy, torch.randn(G, N, K, generator=gen).to(device, BF16)


def run(
    x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe, state: Tensor, values: tuple[int, ...] = ENDS
) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = training.functional.grouped_linear(x, weight, ends(x.device, values), None, recipe, state=state)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def is_local(recipe: Recipe) -> bool:
    """Whether the numbers of an expert do not depend on the others: no random numbers by position."""
    return not recipe.draws


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if is_local(recipe)])
def test_each_expert_is_a_layer(name: str, device: torch.device, gen: torch.Generator) -> None:
    """y, dx and dW of each expert have the bits of a dense step of its rows."""
    recipe = RECIPES[name]
    x, dy, weight = tensors(gen, device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    y, dx, dw = run(x, weight, dy, recipe, state)
    start = 0
    for e, end in enumerate(ENDS):
        rows = slice(start, end)
        want = explicit(x[rows], weight[e], dy[rows], recipe, state)
        assert_bits(y[rows], want.y, f"y of {e}")
        assert_bits(dx[rows], want.dx, f"dx of {e}")
        if start == end:
            assert not dw[e].any()
        else:
            assert_bits(dw[e], want.dw, f"dW of {e}")
        start = end
    assert not y[start:].any()
    assert not dx[start:].any()


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.draws])
def test_stochastic_recipes(name: str, device: torch.device, gen: torch.Generator) -> None:
    """The same state gives the same bits; an expert without tokens has a zero gradient."""
    x, dy, weight = tensors(gen, device)
    state = torch.tensor([3, 4], device=device)
    first = run(x, weight, dy, RECIPES[name], state)
    for a, b in zip(run(x, weight, dy, RECIPES[name], state), first, strict=True):
        assert_bits(a, b)
    y, dx, dw = first
    of_wgrad = RECIPES[name].dy_t is not None
    others = run(x, weight, dy, RECIPES[name], state + 8)
    assert not torch.equal(others[1], dx)
    assert torch.equal(others[2], dw) != of_wgrad
    assert not dw[1].any()
    assert not y[ENDS[-1] :].any()
    assert not dx[ENDS[-1] :].any()
    rows = slice(0, ENDS[0])
    for got, exact in (
        (y[rows], x[rows].float() @ weight[0].float().T),
        (dx[rows], dy[rows].float() @ weight[0].float()),
        (dw[0], dy[rows].float().T @ x[rows].float()),
    ):
        assert (got.float() - exact).norm() / exact.norm() < 0.3


@pytest.mark.parametrize("name", ["te_per_token", "nvidia", "row_scaled_dequantized"])
@pytest.mark.parametrize("values", [(0, 0, 0, 0), (0, 7, 7, 7), (1, 2, 3, M - 1), (0, 9, M, M)], ids=str)
def test_rows_of_no_group_are_zero(
    values: tuple[int, ...], name: str, device: torch.device, gen: torch.Generator
) -> None:
    """y and dx have zeros behind the last group, and numbers in every row before that."""
    x, dy, weight = tensors(gen, device)
    x, dy = x.nan_to_num(0.5), dy.nan_to_num(0.5)
    x[values[-1] :] = dy[values[-1] :] = torch.nan
    state = torch.zeros(2, dtype=torch.int64, device=device)
    y, dx, _ = run(x, weight, dy, RECIPES[name], state, values)
    for got in (y, dx):
        assert not got[values[-1] :].any()
        assert got[: values[-1]].isfinite().all()


def test_permuted_tokens_permute_dx(device: torch.device, gen: torch.Generator) -> None:
    """With an amax for each row, a token's results do not depend on its place among those of its expert."""
    recipe = RECIPES["te_per_token"]
    x, dy, weight = tensors(gen, device)
    order = torch.arange(M)
    order[19:52] = 19 + torch.randperm(33, generator=gen)
    order = order.to(device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    y, dx, _ = run(x, weight, dy, recipe, state)
    y_permuted, dx_permuted, _ = run(x[order], weight, dy[order], recipe, state)
    assert_bits(y_permuted, y[order])
    assert_bits(dx_permuted, dx[order])


@pytest.mark.parametrize("name", ["te_per_token", "nvidia", "bf16", "row_scaled_dequantized"])
@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 5, 0), (1, 1, 1)], ids=str)
def test_few_tokens(name: str, sizes: tuple[int, ...], device: torch.device, gen: torch.Generator) -> None:
    layer = training.GroupedLinear(3, K, N, True, recipe=name, device=device, dtype=BF16)
    offs = torch.tensor(sizes, device=device).cumsum(0)  # int64, as cumsum returns it
    m = sum(sizes)
    x = torch.randn(m, K, generator=gen).to(device, BF16).requires_grad_()
    y = layer(x, offs)
    assert y.shape == (m, N)
    y.backward(torch.ones_like(y))
    assert x.grad.shape == x.shape
    counts = torch.tensor(sizes, dtype=BF16, device=device)
    assert_bits(layer.bias.grad, counts.unsqueeze(1).expand(3, N).contiguous())
    for e, size in enumerate(sizes):
        assert bool(layer.weight.grad[e].any()) == (size > 0)


@pytest.mark.parametrize("name", ["te_per_token", "bf16"])
def test_main_grad(name: str, device: torch.device, gen: torch.Generator) -> None:
    """Micro-batches into main_grad equal sequential additions."""
    layer = training.GroupedLinear(G, K, N, recipe=name, device=device, dtype=BF16)
    wide = training.GroupedLinear(G, K, N, recipe=name, device=device, dtype=torch.float32)
    wide.load_state_dict(layer.state_dict())
    layer.weight.main_grad = torch.zeros(G, N, K, device=device)
    want = torch.zeros(G, N, K, device=device)
    for _ in range(2):
        x, dy, _ = tensors(gen, device)
        layer(x, ends(device)).backward(dy)
        wide.weight.grad = None
        wide(x, ends(device)).backward(dy)
        want += wide.weight.grad
    assert layer.weight.grad_added_to_main_grad
    assert_bits(layer.weight.main_grad, want)


# ---- each matrix of the weight is a parameter of its own


def split(weight: Tensor) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(matrix.clone()) for matrix in weight]


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_list_of_weights_is_a_stack(
    name: str, has_main_grad: bool, device: torch.device, gen: torch.Generator
) -> None:
    x, dy, weight = tensors(gen, device)
    state, recipe = torch.tensor([7, 11], device=device), RECIPES[name]
    stack, matrices = torch.nn.Parameter(weight.clone()), split(weight)
    if has_main_grad:
        stack.main_grad = torch.randn(G, N, K, generator=gen).to(device)
        for matrix, start in zip(matrices, stack.main_grad, strict=True):
            matrix.main_grad = start.clone()
    found = []
    for each in (stack, matrices):
        own = x.clone().requires_grad_()
        y = training.functional.grouped_linear(own, each, ends(device), None, recipe, state=state)
        y.backward(dy)
        found.append((y.detach(), own.grad))
    for got, want in zip(found[1], found[0], strict=True):
        assert_bits(got, want)
    if has_main_grad:
        assert_bits(torch.stack([matrix.main_grad for matrix in matrices]), stack.main_grad)
        assert all(matrix.grad_added_to_main_grad and not matrix.grad.any() for matrix in matrices)
    else:
        assert_bits(torch.stack([matrix.grad for matrix in matrices]), stack.grad)


@pytest.mark.parametrize("name", ["te_per_token", "bf16_backward", "bf16"])
def test_a_list_is_saved_as_its_parameters(name: str, device: torch.device, gen: torch.Generator) -> None:
    x, dy, weight = tensors(gen, device)
    matrices, saved = split(weight), []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = training.functional.grouped_linear(x.requires_grad_(), matrices, ends(device), None, name)
    assert all(any(t.data_ptr() == matrix.data_ptr() for t in saved) for matrix in matrices)
    assert not any(t.is_floating_point() and t.shape[-2:] == (N, K) and t.dim() == 3 for t in saved)
    y.backward(dy)
    assert all(matrix.grad.any() == (e != 1) for e, matrix in enumerate(matrices))


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["grad", "main_grad"])
def test_frozen_matrices_have_no_gradient(
    has_main_grad: bool, device: torch.device, gen: torch.Generator
) -> None:
    x, dy, weight = tensors(gen, device)
    matrices = split(weight)
    for e, matrix in enumerate(matrices):
        matrix.requires_grad_(e != 2)
        if has_main_grad and e != 2:
            matrix.main_grad = torch.zeros(N, K, device=device)
    training.functional.grouped_linear(x, matrices, ends(device), None, "te_per_token").backward(dy)
    assert matrices[2].grad is None
    for e in (0, 3):
        assert (matrices[e].main_grad if has_main_grad else matrices[e].grad).any()


@pytest.mark.parametrize("changed", range(G))
def test_cached_copies_follow_each_matrix(changed: int, device: torch.device, gen: torch.Generator) -> None:
    x, _, weight = tensors(gen, device)
    matrices, cache = split(weight), training.WeightCache()

    def result() -> Tensor:
        made: Tensor = training.functional.grouped_linear(
            x, matrices, ends(device), None, "te_per_token", cache=cache
        )
        return made

    training.mark_step()
    before = result()
    assert cache.nbytes > 0
    assert_bits(result(), before)
    with torch.no_grad():
        matrices[changed].mul_(-1)
    after = result()
    stack = torch.stack([matrix.detach() for matrix in matrices])
    assert_bits(after, training.functional.grouped_linear(x, stack, ends(device), None, "te_per_token"))


def test_a_compiled_list_of_weights(device: torch.device, gen: torch.Generator) -> None:
    x, dy, weight = tensors(gen, device)

    def forward(x: Tensor, *matrices: Tensor) -> Tensor:
        made: Tensor = training.functional.grouped_linear(
            x, list(matrices), ends(device), None, "te_per_token"
        )
        return made

    found = []
    for call in (forward, compiled(forward, ready("aot_eager"))):
        matrices, own = split(weight), x.clone().requires_grad_()
        call(own, *matrices).backward(dy)
        found.append([own.grad, *(matrix.grad for matrix in matrices)])
    for got, want in zip(found[1], found[0], strict=True):
        assert_bits(got, want)


def test_one_main_grad_that_is_missing_is_named(device: torch.device, gen: torch.Generator) -> None:
    x, _, weight = tensors(gen, device)
    matrices = split(weight)
    matrices[0].main_grad = torch.zeros(N, K, device=device)
    with pytest.raises(ValueError, match=r"weight\[1\]\.main_grad: is missing, must exist as that of"):
        training.functional.grouped_linear(x, matrices, ends(device))
    matrices[1].main_grad = torch.zeros(N, device=device)
    with pytest.raises(ValueError, match=r"weight\[1\]\.main_grad: shape is \(96,\), must be \(96, 64\)"):
        training.functional.grouped_linear(x, matrices, ends(device))


def test_is_torch_for_each_expert(device: torch.device, gen: torch.Generator) -> None:
    """A recipe of None is torch's Linear for each expert."""
    layer = training.GroupedLinear(G, K, N, True, recipe="bf16", device=device, dtype=BF16)
    x, dy, _ = tensors(gen, device)
    x.requires_grad_()
    y = layer(x, ends(device))
    y.backward(dy)
    start = 0
    for e, end in enumerate(ENDS):
        linear = torch.nn.Linear(K, N, device=device, dtype=BF16)
        with torch.no_grad():
            linear.weight.copy_(layer.weight[e])
            linear.bias.copy_(layer.bias[e])
        part = x[start:end].detach().requires_grad_()
        out = linear(part)
        out.backward(dy[start:end])
        for got, want in (
            (y[start:end], out),
            (x.grad[start:end], part.grad),
            (layer.weight.grad[e], linear.weight.grad),
            (layer.bias.grad[e], linear.bias.grad),
        ):
            # The order of torch's sums is its own.
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
        start = end


@pytest.mark.parametrize("name", ["bf16", "nvidia", "per_token"])
def test_nan_stays_in_its_expert(name: str, device: torch.device, gen: torch.Generator) -> None:
    """A NaN in dy of the first expert changes no gradient of the others."""
    layer = training.GroupedLinear(G, K, N, True, recipe=name, device=device, dtype=BF16)
    x, dy, _ = tensors(gen, device)
    results = []
    for value in (dy[0, 0].item(), torch.nan):
        layer.zero_grad()
        torch.manual_seed(0)
        dy[0, 0] = value
        rows = x.clone().requires_grad_()
        layer(rows, ends(device)).backward(dy)
        results.append((rows.grad[ENDS[0] :], layer.weight.grad[1:].clone(), layer.bias.grad[1:].clone()))
        assert bool(layer.bias.grad[0, 0].isnan()) == (math.isnan(value))
    for got, want in zip(*results, strict=True):
        assert_bits(got, want)


def test_compiles_into_one_graph(device: torch.device, gen: torch.Generator) -> None:
    layer = training.GroupedLinear(G, K, N, recipe="te_per_token", device=device, dtype=BF16)
    x, dy, _ = tensors(gen, device)
    results = []
    for call in (layer, compiled(layer, ready("aot_eager"))):
        layer.zero_grad()
        part = x.clone().requires_grad_()
        y = call(part, ends(device))
        y.backward(dy)
        results.append((y.detach(), part.grad, layer.weight.grad.clone()))
    for got, want in zip(*results, strict=True):
        assert_bits(got, want)
