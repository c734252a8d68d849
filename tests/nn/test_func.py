"""torch.func and forward mode: what no operator defines is refused in our words, never dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn, training
from nn_helpers import float_linear
from torch import Tensor
from torch.autograd import forward_ad

K = 64
X = torch.randn(3, 4, K, generator=torch.Generator().manual_seed(0)).bfloat16()
IDS, SCORES = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
TRANSFORM = (
    r"^(x|a|bias): is inside of a transform of torch\.func \(vmap, grad, vjp, \.\.\.\), must not be; call"
)
TANGENT = r"^(x|a|gate|bias): has a tangent of forward mode \(torch\.func\.jvp\), must have none; call"
FORWARD_ONLY = r"^x: requires grad, but .* is forward only; use torch\.no_grad\(\) or detach x"


def linear(n: int = K) -> nn.Linear:
    return nn.Linear.from_float(float_linear(K, n, dtype=torch.bfloat16))


def experts() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    made = nn.Experts.from_float(torch.randn(4, 2 * K, K).bfloat16(), torch.randn(4, K, K).bfloat16())
    return lambda x: made(x, IDS, SCORES)


WEIGHT = linear().weight
CALLS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": linear,
    "experts": experts,
    "gated-mlp": lambda: nn.GatedMLP(linear(), linear(), linear()),
    "training-linear": lambda: training.Linear(K, K, dtype=torch.bfloat16),
    "training-bias": lambda: lambda x: training.functional.linear(X[0], torch.zeros(K, K), x[0]),
    "training-swiglu": lambda: lambda x: training.functional.swiglu(x, x),
    "quantize": lambda: lambda x: fp4gemm.quantize(x).amax,
    "mm": lambda: lambda x: fp4gemm.mm(x, WEIGHT),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "again"])
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(name: str, is_first: bool) -> None:
    """Without the refusal the tangent of the result was 0 or missing."""
    call = CALLS[name]()
    if not is_first:  # calls after the first one go without checks
        with torch.no_grad():
            call(X[0])
    with pytest.raises(NotImplementedError, match=f"{TANGENT}|{TRANSFORM}"):
        torch.func.jvp(call, (X[0],), (X[0],))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=TANGENT):
            call(forward_ad.make_dual(X[0], X[0]))
        with torch.no_grad():
            assert call(X[0]) is not None  # no tangent


def total(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x).float().sum()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linear", TRANSFORM),
        ("experts", TRANSFORM),
        ("gated-mlp", FORWARD_ONLY),
        ("training-linear", TRANSFORM),
        ("training-bias", TRANSFORM),
        ("training-swiglu", TRANSFORM),
        ("mm", TRANSFORM),
    ],
)
def test_grad_is_refused(name: str, message: str) -> None:
    call = CALLS[name]()
    for function in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match=message):
            function(total(call))(X[0])
    with pytest.raises(NotImplementedError, match=message):
        torch.func.vjp(call, X[0])


@pytest.mark.parametrize("name", ["experts", "training-linear", "training-bias", "quantize", "mm"])
def test_vmap_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=TRANSFORM):
        torch.func.vmap(CALLS[name]())(X)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["linear", "gated-mlp"])
def test_vmap_of_a_linear_layer_is_a_loop(name: str) -> None:
    layer: Any = CALLS[name]()
    for _ in range(2):
        assert torch.equal(torch.func.vmap(layer)(X), layer(X))


def test_functional_call() -> None:
    layer = linear()
    assert torch.equal(torch.func.functional_call(layer, {}, (X,)), layer(X))
