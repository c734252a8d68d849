"""The operators train_forward and train_backward, and the layers that call them: bits, and when they do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import training
from fp4gemm.ops import operators
from fp4gemm.training import Recipe, _copies, _step, functional
from helpers import assert_bits
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from training_cases import RECIPES, Step
from training_operands import apart

M, N, K = 64, 96, 32
ALL_STOCHASTIC = RECIPES["all stochastic"].replace(save_input="quantized")
WGRAD_ALONE = RECIPES["per_token"].replace(dy=None, w_t=None)
# Every recipe, and whether each of its passes is an operator.
PASSES: dict[str, tuple[Recipe, bool, bool]] = {
    "nvidia": (RECIPES["nvidia"], True, True),
    "te_per_token": (RECIPES["te_per_token"], True, True),
    "row_scaled": (RECIPES["row_scaled"], True, True),
    "four_over_six": (RECIPES["four_over_six"], True, True),
    "per_token": (RECIPES["per_token"], True, True),
    "stochastic": (ALL_STOCHASTIC, True, True),
    "wgrad alone": (WGRAD_ALONE, True, False),
    "original": (RECIPES["original"], False, False),
    "rowwise": (RECIPES["rowwise"], False, True),
    "balanced": (RECIPES["balanced"], False, False),
    "balanced rowwise": (RECIPES["balanced rowwise"], False, False),
    "row_scaled_dequantized": (RECIPES["row_scaled_dequantized"], False, False),
    "w4a16": (RECIPES["w4a16"], False, False),
    "bf16_backward": (RECIPES["bf16_backward"], False, False),
    "bf16_forward": (RECIPES["bf16_forward"], False, True),
}


def tensors(device: torch.device, dtype: torch.dtype = torch.bfloat16, m: int = M) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(5)
    shapes = ((m, K), (N, K), (m, N), (N,))
    return tuple(torch.randn(shape, generator=gen).to(device, dtype) for shape in shapes)


def step(
    recipe: Recipe,
    device: torch.device,
    has_bias: bool = False,
    cache: Any = None,
    weight_dtype: torch.dtype = torch.bfloat16,
    m: int = M,
) -> Step:
    x, weight, dy, bias = tensors(device, m=m)
    x, weight = x.unflatten(0, (2, -1)).requires_grad_(), weight.to(weight_dtype).requires_grad_()
    state = torch.tensor([3, 4], device=device)
    y = functional.linear(x, weight, bias if has_bias else None, recipe, state=state, cache=cache)
    y.backward(dy.view(y.shape))
    assert x.grad is not None
    assert weight.grad is not None
    return Step(y.detach(), x.grad, weight.grad)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators of a step that were called."""
    names: list[str] = []

    def recorded(name: str) -> Any:
        operator = getattr(_step, name)

        def call(*args: Any) -> Any:
            result = operator(*args)  # a call that is refused is not counted
            names.append(name)
            return result

        return call

    for name in ("TRAIN_FORWARD", "TRAIN_BACKWARD"):
        monkeypatch.setattr(_step, name, recorded(name))
    return names


@pytest.mark.parametrize("is_converted", [False, True], ids=["packed", "decoded"])
@pytest.mark.parametrize("name", PASSES)
def test_a_step_has_the_bits_of_single_calls(
    name: str, is_converted: bool, device: torch.device, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, *are_operators = PASSES[name]
    step(recipe, device)  # the first quantization and product on a device are not made by these operators
    called.clear()
    monkeypatch.setattr(_copies, "are_converted", lambda x: is_converted)
    training.mark_step()
    caches = (training.WeightCache(), training.WeightCache()) if is_converted else (None, None)
    got = step(recipe, device, is_converted, caches[0], torch.float32)
    names = ("TRAIN_FORWARD", "TRAIN_BACKWARD")
    assert called == [name for name, is_one in zip(names, are_operators, strict=True) if is_one]
    apart(monkeypatch)
    for one, want in zip(got, step(recipe, device, is_converted, caches[1], torch.float32), strict=True):
        assert_bits(one, want)
    assert len(called) == sum(are_operators)


def test_steps_that_call_one_by_one(called: list[str]) -> None:
    """A number of tokens that is no multiple of 32, one gradient alone, main_grad, and a traced graph."""
    recipe, device = RECIPES["per_token"], torch.device("cpu")
    step(recipe, device, m=M + 2)
    x, weight, dy, _ = tensors(device)
    functional.linear(x, weight.requires_grad_(), None, recipe).backward(dy)
    assert called == ["TRAIN_FORWARD"]
    functional.linear(x.requires_grad_(), weight.detach(), None, recipe).backward(dy)
    assert called == ["TRAIN_FORWARD"]
    weight.main_grad = torch.zeros(N, K)  # type: ignore[attr-defined]
    functional.linear(x, weight, None, recipe).backward(dy)
    assert called == ["TRAIN_FORWARD"] * 2
    del weight.main_grad  # type: ignore[attr-defined]
    traced = torch.compile(functional.linear, backend="eager", fullgraph=True)
    traced(x, weight, None, recipe).sum().backward()
    assert called == ["TRAIN_FORWARD"] * 2


def test_a_call_that_is_refused_is_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, unexplained: Counter[str]
) -> None:
    want = step(RECIPES["nvidia"], torch.device("cpu"))

    def refused(*args: Any) -> Any:
        raise RuntimeError("refused")

    def too_large(*args: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    for name in ("TRAIN_FORWARD", "TRAIN_BACKWARD"):
        monkeypatch.setattr(_step, name, refused)
    with pytest.warns(RuntimeWarning, match="the operator refused a call that the checks accept"):
        made = step(RECIPES["nvidia"], torch.device("cpu"))
    for got, wanted in zip(made, want, strict=True):
        assert_bits(got, wanted)
    assert unexplained == {"fp4gemm.training: forward": 1, "fp4gemm.training: backward": 1}
    monkeypatch.setattr(_step, "TRAIN_FORWARD", too_large)
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        step(RECIPES["nvidia"], torch.device("cpu"))


@pytest.mark.parametrize("m", [64, 33])
@pytest.mark.parametrize("name", RECIPES)
def test_tensors_that_no_kernel_reads_in_place(name: str, m: int, device: torch.device) -> None:
    """Transposed ones, and ones at an address that is not aligned, give the bits of contiguous ones."""
    results = []
    for at in (lambda t: t, lambda t: t.t().contiguous().t(), misaligned):
        x, weight, dy, bias = tensors(device, m=m)
        x, weight, dy = (at(t).detach().requires_grad_(t is not dy) for t in (x, weight, dy))
        state = torch.tensor([3, 4], device=device)
        y = functional.linear(x, weight, bias, RECIPES[name], state=state)
        y.backward(dy)
        results.append((y.detach(), x.grad, weight.grad))
    for got in results[1:]:
        for one, want in zip(got, results[0], strict=True):
            assert_bits(one.contiguous(), want)  # type: ignore[union-attr]


def misaligned(t: Tensor) -> Tensor:
    whole = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return whole[1:].view(t.shape).copy_(t)


# The operators that a step has no other way for, and a step of the recipe that calls them.
ALONE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "quantize": (_copies, "_QUANTIZE", {"save_input": "original"}),
    "quantize_both": (_copies, "_QUANTIZE_BOTH", {}),
    "gemm": (_step, "_GEMM", {}),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_broken_call_of_an_operator_is_not_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, changed = ALONE[name]
    right = getattr(module, attribute)
    apart(monkeypatch)
    monkeypatch.setattr(module, attribute, lambda *args: right(*args, None, None, None))
    with pytest.raises((RuntimeError, TypeError)):
        step(RECIPES["te_per_token"].replace(**changed), torch.device("cpu"))


def test_flops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            step(RECIPES["per_token"], torch.device("cpu"))
        assert counter.get_total_flops() == 3 * 2 * M * N * K
        apart(monkeypatch)


def arguments(recipe: Recipe, decoded: bool, device: torch.device) -> tuple[list[Any], list[Any]]:
    """Arguments of both operators: W packed, or prepacked where decoded."""
    x, weight, dy, bias = tensors(device)
    assert recipe.forward_casts is not None
    assert recipe.backward_casts is not None
    state = torch.tensor([3, 4], device=device)
    w, w_t = fp4gemm.quantize(weight), fp4gemm.quantize(weight, axis=0)
    copies = [(w.codes, w.scales, w.amax, 0), (w_t.codes, w_t.scales, w_t.amax, 0)]
    if decoded:
        packed = [fp4gemm.prepack(copy) for copy in (w, w_t)]
        copies = [(copy.data, None, copy.amax, copy.shape[0]) for copy in packed]
    forward = [x, *map(list, recipe.forward_casts), decoded, state, *copies[0], 448]
    x_t = [*operators.train_forward(*forward)[1:], recipe.forward_casts[1][3]]
    backward = [dy, *map(list, recipe.backward_casts), decoded, state, *copies[1], 448, *x_t, torch.float32]
    return [*forward, bias.float()], backward


@pytest.mark.parametrize("decoded", [False, True], ids=["packed", "decoded"])
def test_opcheck(decoded: bool, device: torch.device) -> None:
    forward, backward = arguments(RECIPES["per_token"], decoded, device)
    opcheck("train_forward", *forward)
    opcheck("train_backward", *backward)
    for recipe in (RECIPES["nvidia"], RECIPES["row_scaled"]):
        forward, backward = arguments(recipe, decoded, device)
        assert_fake_is_real("train_forward", *forward)
        assert_fake_is_real("train_backward", *backward)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, [1, 0, 0, 448], "cast: has 4 numbers, must have 7"),
        (1, [1, 0, 0, 448, 2, 3, 0], "cast: hadamard is 2, must be 0; it is for cast_t"),
        (4, None, "rng_state: .* None, must be given for stochastic rounding"),
        (8, -8, "w(_t)?_rows: .* -8, must be "),
        (8, 0, "w(_t)?_scales: .* None, must be given unless .* is prepacked"),
        (9, 100, "w(_t)?_e4m3_max: .* 100, must be "),
    ],
)
def test_bad_arguments(place: int, value: Any, message: str, device: torch.device) -> None:
    forward, backward = arguments(ALL_STOCHASTIC, True, device)
    forward[place] = backward[place] = value
    for operator, given in ((operators.train_forward, forward), (operators.train_backward, backward)):
        with pytest.raises((RuntimeError, ValueError), match=message):
            operator(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("decoded", [False, True], ids=["packed", "decoded"])
@pytest.mark.parametrize("name", [name for name, (_, *are_operators) in PASSES.items() if all(are_operators)])
def test_gpu_operators_equal_cpu(name: str, decoded: bool, cuda: torch.device) -> None:
    if decoded and not _copies.are_converted(torch.zeros(1, device=cuda)):
        pytest.skip("this GPU reads packed operands alone")
    recipe = PASSES[name][0]
    want, got = (arguments(recipe, decoded, device) for device in (torch.device("cpu"), cuda))
    for operator, on_cpu, on_gpu in zip(
        (operators.train_forward, operators.train_backward), want, got, strict=True
    ):
        for result, wanted in zip(operator(*on_gpu), operator(*on_cpu), strict=True):
            assert_bits(result.cpu(), wanted)
