"""swiglu of fp4gemm.training: its bits, its gradients, its C interface, compilation and graphs."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import pytest
import torch
from capi_training import SwigluArgs
from capi_training import training as c_interface
from fp4gemm import reference
from fp4gemm.training.functional import swiglu
from helpers import assert_bits, assert_same_value, captured, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

FORWARD, BACKWARD = torch.ops.fp4gemm.swiglu, torch.ops.fp4gemm.swiglu_backward
HALVES = (torch.bfloat16, torch.float16)
NAMES = ("dgate", "dup", "dweights")


def problem(
    m: int, f: int, dtype: torch.dtype, device: torch.device | str, kind: str = "heavy", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate, up, weights and dy."""
    gen = torch.Generator().manual_seed(seed)
    gate, up, dy = (make(each, m, f, dtype, gen) for each in (kind, "heavy", "normal"))
    weights = torch.rand(m, generator=gen) * 2 - 0.5
    return 3 * gate.to(device), up.to(device), weights.to(device), dy.to(device)


def eager(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    h = torch.nn.functional.silu(gate) * up
    return h if weights is None else (h * weights.unsqueeze(-1)).to(h.dtype)


def gradients(function: Any, gate: Tensor, up: Tensor, weights: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y and the gradients of gate, up and weights."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (gate, up, weights)]
    y = function(*leaves)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "f"), [(1, 8), (7, 96), (33, 768), (5, 1024), (3, 4104), (300, 2048)], ids=str)
def test_a_gpu_has_the_bits_of_the_reference(m: int, f: int, dtype: torch.dtype, cuda: torch.device) -> None:
    for kind in ("heavy", "denormal", "huge", "zero_rows"):
        gate, up, weights, dy = problem(m, f, dtype, "cpu", kind, seed=f)
        for w in (None, weights):
            on_gpu = [None if t is None else t.to(cuda) for t in (gate, up, w)]
            assert_same_value(FORWARD(*on_gpu).cpu(), reference.swiglu(gate, up, w), f"{kind} y")
            got = BACKWARD(dy.to(cuda), *on_gpu)
            want = reference.swiglu_backward(dy, gate, up, w)
            for name, a, b in zip(NAMES, got, want, strict=True):
                assert_same_value(a.cpu(), b, f"{kind} {name}")


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_every_gate(dtype: torch.dtype, device: torch.device) -> None:
    """Every number of the dtype as a gate: silu is that of float64, and so is its derivative, rounded."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gate = bits.view(dtype)
    gate = gate[gate.isfinite()].view(-1, 8)
    ones = torch.ones_like(gate)
    exact = gate.double().requires_grad_()
    y = torch.nn.functional.silu(exact)
    y.backward(torch.ones_like(exact))
    got = FORWARD(gate.to(device), ones.to(device)).cpu()
    assert_bits(got, reference.swiglu(gate, ones))
    # One rounding to the dtype; exp overflows float32 below -88.75, where silu is below 1e-36.
    step = torch.finfo(dtype).eps
    error = (got.double() - y.detach()).abs()
    assert (
        error <= step / 2 * y.detach().abs() + max(torch.finfo(dtype).smallest_normal * step, 1e-36)
    ).all()
    dgate = BACKWARD(ones.to(device), gate.to(device), ones.to(device))[0].cpu()
    assert_bits(dgate, reference.swiglu_backward(ones, gate, ones)[0])
    # Near its zero at -1.278 the derivative is a difference: its error is that of float32 operations near 1.
    slope = exact.grad
    assert ((dgate.double() - slope).abs() <= step / 2 * slope.abs() + 1e-6).all()


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_gradients_are_those_of_eager_torch(
    dtype: torch.dtype, is_weighted: bool, device: torch.device
) -> None:
    """As exact as autograd of the eager expression, measured against float64."""
    gate, up, weights, dy = problem(65, 520, dtype, device, "normal")
    w = weights if is_weighted else None
    got, rounded = gradients(swiglu, gate, up, w, dy), gradients(eager, gate, up, w, dy)
    exact = gradients(eager, gate.double(), up.double(), None if w is None else w.double(), dy.double())
    for name, a, b, c in zip(("y", *NAMES), got, rounded, exact, strict=False):
        assert a.dtype == b.dtype, name
        error, allowed = ((t.double() - c).norm() / c.norm() for t in (a, b))
        assert error <= 1.01 * allowed, f"{name}: {error} against {allowed}"


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_halves_of_one_product(dtype: torch.dtype, device: torch.device) -> None:
    """Strided rows give the bits of contiguous ones, and any leading dimensions those of a matrix."""
    gate, up, weights, dy = problem(24, 96, dtype, device)
    both = torch.cat((gate, up), -1)
    want = gradients(swiglu, gate, up, weights, dy)
    leaf, w = both.clone().requires_grad_(), weights.clone().requires_grad_()
    y = swiglu(*leaf.view(2, 12, 192).chunk(2, -1), w.view(2, 12))
    y.backward(dy.view(2, 12, 96))
    assert_bits(y.detach().view(24, 96), want[0])
    assert_bits(leaf.grad, torch.cat(want[1:3], -1))
    assert_bits(w.grad, want[3])


def test_float32_is_that_of_torch(device: torch.device) -> None:
    gate, up, weights, dy = problem(9, 33, torch.float32, device)
    for w in (None, weights):
        for a, b in zip(gradients(swiglu, gate, up, w, dy), gradients(eager, gate, up, w, dy), strict=True):
            assert_bits(a, b)


@pytest.mark.parametrize("m", [0, 1])
def test_no_rows(m: int, device: torch.device) -> None:
    gate, up, weights, dy = problem(m, 64, torch.bfloat16, device)
    y, *grads = gradients(swiglu, gate, up, weights, dy)
    assert [t.shape for t in (y, *grads)] == [(m, 64), (m, 64), (m, 64), (m,)]


def test_what_is_kept_for_the_backward_pass(device: torch.device) -> None:
    """gate, up and the weights, and no result of a step in between."""
    gate, up, weights, _ = (t.requires_grad_() for t in problem(16, 64, torch.bfloat16, device))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up, weights)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate, up, weights)}


def test_a_gradient_is_not_differentiated(device: torch.device) -> None:
    gate, up, weights, _ = (t.requires_grad_() for t in problem(4, 32, torch.bfloat16, device))
    (dgate,) = torch.autograd.grad(swiglu(gate, up, weights).sum(), gate, create_graph=True)
    with pytest.raises(NotImplementedError, match="only first derivatives"):
        dgate.sum().backward()


def test_opcheck(device: torch.device) -> None:
    gate, up, weights, dy = problem(6, 40, torch.float16, device)
    for w in (None, weights):
        opcheck("swiglu", gate, up, w)
        opcheck("swiglu_backward", dy, gate, up, w)
        assert_fake_is_real("swiglu", gate, up, w)
        assert_fake_is_real("swiglu_backward", dy, gate, up, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device) -> None:
    gate, up, weights, dy = problem(12, 64, torch.bfloat16, device)
    want = gradients(swiglu, gate, up, weights, dy)
    for a, b in zip(gradients(compiled(swiglu, ready(backend)), gate, up, weights, dy), want, strict=True):
        assert_bits(a, b)


@pytest.mark.gpu
def test_a_graph_reads_its_inputs_again(cuda: torch.device) -> None:
    gate, up, weights, dy = problem(40, 768, torch.bfloat16, cuda)
    graph, results = captured(lambda: (FORWARD(gate, up, weights), *BACKWARD(dy, gate, up, weights)), cuda)
    for seed in (1, 2):
        for into, new in zip(
            (gate, up, weights, dy), problem(40, 768, torch.bfloat16, cuda, seed=seed), strict=True
        ):
            into.copy_(new)
        want = (FORWARD(gate, up, weights), *BACKWARD(dy, gate, up, weights))
        graph.replay()
        for a, b in zip(results, want, strict=True):
            assert_bits(a, b)


P = 0x1000
CALL = {"m": 4, "f": 16, "gate": P, "gate_row_stride": 16, "up": P, "up_row_stride": 16, "weights": P, "y": P}
CALL |= {"dy": P, "dy_row_stride": 16, "dgate": P, "dup": P, "dweights": P}


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        ("swiglu", {"m": -1}, "m: is -1, must be between 0 and 2147483647"),
        ("swiglu", {"f": 0}, "f: is 0, must be between 8 and 1073741824"),
        ("swiglu", {"f": 12}, "f: is 12, must be a multiple of 8"),
        ("swiglu", {"dtype": 2}, "dtype: is 2, must be FP4GEMM_BF16 or FP4GEMM_FP16"),
        ("swiglu", {"gate": 0}, "gate: is null, must point at 64 elements"),
        ("swiglu", {"gate_row_stride": 15}, "gate_row_stride: is 15, must be at least the 16 columns"),
        ("swiglu", {"up": P + 8}, "up: is 0x1008, must be 16-byte aligned"),
        (
            "swiglu",
            {"up_row_stride": 20},
            "up_row_stride: is 20 elements of 2 bytes, must be a",
        ),
        ("swiglu", {"weights": P + 2}, "weights: is 0x1002, must be 4-byte aligned"),
        ("swiglu", {"y": 0}, "y: is null, must point at 64 elements"),
        ("swiglu_backward", {"f": 12}, "f: is 12, must be a multiple of 8"),
        ("swiglu_backward", {"dy": 0}, "dy: is null, must point at 64 elements"),
        ("swiglu_backward", {"dy_row_stride": 8}, "dy_row_stride: is 8, must be at least the 16 columns"),
        ("swiglu_backward", {"dgate": 0}, "dgate: is null, must point at 64 elements"),
        ("swiglu_backward", {"dup": P + 8}, "dup: is 0x1008, must be 16-byte aligned"),
        ("swiglu_backward", {"dweights": 0}, "dweights: is null, must point at 4 elements"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_c_interface_refuses(function: str, changed: dict[str, Any], message: str) -> None:
    library = c_interface()
    args = SwigluArgs(**{**CALL, **changed})
    assert getattr(library, f"fp4gemm_{function}")(ctypes.byref(args), 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()
