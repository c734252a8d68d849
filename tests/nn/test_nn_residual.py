"""fp4gemm.nn.Linear with residual channels: numbers, state, updates, gradients, graphs, merged layers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.models.fuse import fuse_blocks
from fp4gemm.nn.merged import MergedLinear, one_weight, why_not_one_weight
from fuse_models import RMSNorm
from helpers import captured
from nn_helpers import Names, float_linear, same_bits, same_state
from op_checks import BACKENDS, compiled, ready
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

K, R, N = 96, 32, 40
ACTIVATIONS = ["per-token", "per-tensor", "per-token,four_over_six=mae"]
CAST: dict[str, dict[str, Any]] = {
    "per-token": {},
    "per-tensor": {"scaling": "tensor"},
    "per-token,four_over_six=mae": {"four_over_six": "mae"},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def channels(device: torch.device | str = "cpu", first: int = 5) -> Tensor:
    return torch.randperm(K)[:R].add(first).remainder(K).to(torch.int32).to(device)


def made(
    activations: Any = "per-token", device: torch.device | str = "cpu", bias: bool = True, **options: Any
) -> nn.Linear:
    linear = float_linear(K, N, bias).to(device)
    return nn.Linear.from_float(
        linear, activations=activations, residual_channels=channels(device), **options
    )


def by_parts(layer: nn.Linear, weight: fp4gemm.NVFP4Tensor, x: Tensor) -> Tensor:
    """The product of x, quantized with the errors of the channels, and the weight with its columns again."""
    c = layer.residual_channels
    assert c is not None
    a = fp4gemm.quantize(x.reshape(-1, K), residual_channels=c, **CAST[layer.activations])
    b = fp4gemm.repeat_columns(weight, c)
    y = fp4gemm.mm(a, b, bias=layer.bias, out_dtype=x.dtype)
    return y.view(*x.shape[:-1], N)


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_forward(activations: str, scaling: str, dtype: torch.dtype, device: torch.device) -> None:
    linear = float_linear(K, N).to(device)
    plain = nn.Linear.from_float(linear, weight_scaling=scaling)  # type: ignore[arg-type]
    layer = nn.Linear.from_float(
        linear,
        activations=activations,  # type: ignore[arg-type]
        weight_scaling=scaling,  # type: ignore[arg-type]
        residual_channels=channels(device),
    )
    x = torch.randn(2, 3, K, device=device).to(dtype)
    weight = plain._nvfp4_weight
    want = by_parts(layer, weight, x)
    for _ in range(3):  # with all checks, and by the fast path
        assert same_bits(layer(x), want)
    assert layer._fast is not None
    c = torch.randn(2, 3, N, device=device).to(dtype)
    assert same_bits(layer(x, c), layer(x, c))
    assert torch.allclose(layer(x, c), want + c, rtol=2e-2, atol=2e-2)
    assert layer.weight.shape == (N, K)
    for name, a, b in zip(("codes", "scales", "amax"), parts(layer.weight), parts(weight), strict=True):
        assert same_bits(a, b), name


def parts(w: Any) -> tuple[Tensor, Tensor, Tensor]:
    return w.codes, w.compact_scales(), w.amax


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_error_is_smaller(activations: str, device: torch.device) -> None:
    """Inputs with two large blocks, which the channels name."""
    linear = float_linear(K, N).to(device)
    x = torch.randn(64, K, device=device)
    x[:, 32:64] *= 20
    c = torch.arange(32, 64, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"activations": activations}
    plain = nn.Linear.from_float(linear, **options)
    layer = nn.Linear.from_float(linear, residual_channels=c, **options)
    want = x @ plain.dequantize_weight().T + linear.bias
    error = [(y - want).square().mean() for y in (plain(x), layer(x))]
    assert error[1] < error[0] / 20


@pytest.mark.parametrize("decoded", [False, True])
def test_an_input_that_was_quantized_before(decoded: bool) -> None:
    layer, x = made(), torch.randn(7, K)
    c = layer.residual_channels
    shared = fp4gemm.quantize(x, residual_channels=c, decoded=decoded)
    assert same_bits(layer(shared).to(torch.float32), layer(x).to(layer.dtype).to(torch.float32))
    with pytest.raises(
        ValueError, match=r"x: shape is \(7, 96\), must be \(m, 128\), 128 = in_features \+ 32"
    ):
        layer(fp4gemm.quantize(x))


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["fp8", "a16", "mxfp8"])
def test_other_activations_are_refused(activations: Any) -> None:
    says = f"residual_channels: got 32 channels with activations '{activations}', must be none unless"
    with pytest.raises(ValueError, match=says):
        nn.Linear(128, N, activations=activations, residual_channels=32)
    with pytest.raises(ValueError, match=says):
        nn.Linear.from_float(float_linear(128, N), activations=activations, residual_channels=channels())


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (True, TypeError, "got True"),
        (-32, ValueError, "got -32"),
        (16, ValueError, "got 16 channels, must be a positive multiple of 32 and at most k, 96"),
        (128, ValueError, "got 128 channels, must be a positive multiple of 32 and at most k, 96"),
        (channels(), TypeError, "got a torch.int32 tensor"),
    ],
    ids=["bool", "negative", "step", "k", "tensor"],
)
def test_wrong_numbers_of_channels(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^residual_channels: {says}"):
        nn.Linear(K, N, residual_channels=value)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (32, TypeError, "got 32 (int), must be a torch.Tensor"),
        (channels().long(), TypeError, "dtype is torch.int64, must be torch.int32"),
        (channels()[:16], ValueError, "got 16 channels, must be a positive multiple of 32"),
        (torch.arange(70, 102, dtype=torch.int32), ValueError, "has the value 101, must have values from 0"),
        (torch.zeros(32, dtype=torch.int32), ValueError, "has the value 0 more than once"),
        (channels().to("meta"), ValueError, "device is meta, must be cpu"),
    ],
    ids=["int", "dtype", "step", "beyond", "repeated", "device"],
)
def test_wrong_channels(value: Any, error: type[Exception], says: str) -> None:
    weight = fp4gemm.quantize(torch.randn(N, K))
    for make in (
        lambda: nn.Linear.from_float(float_linear(K, N), residual_channels=value),
        lambda: nn.Linear.from_quantized(weight, residual_channels=value),
    ):
        with pytest.raises(error) as caught:
            make()
        assert str(caught.value).startswith(f"residual_channels: {says}")


def test_experts_have_no_such_option() -> None:
    with pytest.raises(TypeError, match="residual_channels"):
        nn.Experts(2, 64, 64, residual_channels=32)  # type: ignore[call-arg]


# ---- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepacked", [False, True])
def test_state(prepacked: bool, device: torch.device) -> None:
    layer, x = made(device=device), torch.randn(5, K, device=device)
    if prepacked:
        layer.prepack()
    want = layer(x)
    state = layer.state_dict()
    assert state["weight_codes"].shape == (N, (K + R) // 2)
    assert state["residual_channels"].dtype is torch.int32
    assert same_bits(state["residual_channels"], layer.residual_channels)
    new = nn.Linear(K, N, residual_channels=R, device=device)
    assert [*new.state_dict()] == [*state]
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        new(x)
    if prepacked:
        new.load_state_dict(made(device=device).state_dict())
        new.prepack()
    new.load_state_dict(state)
    assert same_bits(new(x), want)
    assert same_state(new, layer)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    empty = nn.Linear(K, N, residual_channels=R, device="meta")
    empty.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    assert same_bits(empty(x), want)


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies(copied: Callable[[nn.Linear], nn.Linear], prepacked: bool) -> None:
    layer, x = made(), torch.randn(5, K)
    want = layer(x)
    if prepacked:
        layer.prepack()
    new = copied(layer)
    assert same_bits(new(x), want)
    assert same_bits(layer(x), want)
    assert new.residual_channels is not layer.residual_channels


def test_moves_and_casts() -> None:
    layer, x = made(), torch.randn(5, K)
    want = layer(x)
    layer.half()
    layer.to(torch.bfloat16)
    assert layer.residual_channels is not None
    assert layer.residual_channels.dtype is torch.int32
    assert same_bits(layer(x), want)
    empty = layer.to("meta").to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        empty(x)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda s: s.pop("residual_channels"),
            "residual_channels: is missing, must come with the other parts",
        ),
        (lambda s: s.update(residual_channels=channels()[:16]), r"shape is \(16,\), must be \(32,\)"),
        (
            lambda s: s.update(residual_channels=channels().long()),
            "dtype is torch.int64, must be torch.int32",
        ),
        (lambda s: s["residual_channels"].fill_(3), "has the value 3 more than once, must have distinct"),
        (lambda s: s["residual_channels"].add_(K), "must have values from 0 to 95"),
    ],
    ids=["missing", "shape", "dtype", "repeated", "beyond"],
)
def test_wrong_states(change: Callable[[dict[str, Tensor]], Any], says: str) -> None:
    state = {name: t.clone() for name, t in made().state_dict().items()}
    change(state)
    layer, x = made(), torch.randn(3, K)
    want = layer(x)
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(state)
    assert same_bits(layer(x), want)


def test_states_of_layers_without_channels_do_not_fit() -> None:
    plain = nn.Linear.from_float(float_linear(K, N))
    with pytest.raises(RuntimeError, match="residual_channels: is missing"):
        made().load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"weight_codes: shape is \(40, 64\), must be \(40, 48\)"):
        plain.load_state_dict(made().state_dict())
    assert plain.residual_channels is None
    assert "residual_channels" not in plain.state_dict()


def test_buffers_that_a_loader_sets() -> None:
    """accelerate sets one buffer after the other; the layer has a weight when all are set."""
    layer, x = nn.Linear(K, N, residual_channels=R), torch.randn(3, K)
    source = made()
    state = source.state_dict()
    layer._buffers["bias"] = state.pop("bias").clone()
    for name, value in state.items():
        with pytest.raises(RuntimeError, match="weight: not loaded yet"):
            layer(x)
        layer._buffers[name] = value.clone()
    assert same_bits(layer(x), source(x))
    layer._buffers["residual_channels"] = torch.zeros(R, dtype=torch.int32)
    with pytest.raises(ValueError, match="residual_channels: has the value 0 more than once"):
        layer(x)


# ---- updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
def test_update(is_float: bool, prepacked: bool, device: torch.device) -> None:
    layer, x = made(device=device), torch.randn(5, K, device=device)
    if prepacked:
        layer.prepack()
    layer(x)
    held = {name: t.data_ptr() for name, t in layer._buffers.items() if t is not None}
    weight = torch.randn(N, K, device=device)
    new = fp4gemm.recipe.as_quantizer(None, "row")(weight)
    layer.update_(weight if is_float else new)
    assert {name: t.data_ptr() for name, t in layer._buffers.items() if t is not None} == held
    assert same_bits(layer(x), by_parts(layer, new, x))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight: shape is \(40, 128\), must be \(40, 96\)"):
        layer.update_(torch.randn(N, K + R, device=device))


def test_assigned_weights() -> None:
    layer, x = made(), torch.randn(5, K)
    new = fp4gemm.quantize(torch.randn(N, K))
    layer.weight = new
    assert same_bits(layer(x), by_parts(layer, new, x))
    layer.other = True  # type: ignore[assignment]  # any attribute makes the next call go through the checks
    assert same_bits(layer(x), by_parts(layer, new, x))


def test_a_weight_needs_channels() -> None:
    layer, new = nn.Linear(K, N, residual_channels=R), fp4gemm.quantize(torch.randn(N, K))
    for set_weight in (layer.update_, lambda w: setattr(layer, "weight", w)):
        with pytest.raises(
            ValueError, match=r"^residual_channels: has the value 0 more than once, .*; load a"
        ):
            set_weight(new)
    layer.residual_channels = channels()  # type: ignore[misc]
    layer.weight = new
    x = torch.randn(3, K)
    assert same_bits(layer(x), by_parts(layer, new, x))


# ---- autograd, graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("how", ["dequantized", "quantized"])
def test_gradients(how: Any, prepacked: bool, device: torch.device) -> None:
    """dx is dy @ W with the columns of in_features, as of a layer without residual channels."""
    linear = float_linear(K, 64).to(device)
    plain = nn.Linear.from_float(linear)
    layer = nn.Linear.from_float(linear, residual_channels=channels(device))
    if prepacked:
        layer.prepack()
    grads = []
    for each in (plain, layer):
        each.input_gradient = how
        x = torch.randn(4, K, device=device, generator=torch.Generator(device).manual_seed(3))
        x, c = x.requires_grad_(), torch.ones(4, 64, device=device, requires_grad=True)
        y = each(x, c)
        assert same_bits(y.detach(), each(x.detach(), c.detach()))
        (y * torch.linspace(-1, 1, 64, device=device)).sum().backward()
        assert x.grad is not None
        assert c.grad is not None
        grads.append((x.grad, c.grad))
    for a, b in zip(*grads, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile(backend: str, device: torch.device) -> None:
    layer, x = made(device=device), torch.randn(5, K, device=device)
    want = layer(x)
    assert same_bits(compiled(layer, ready(backend))(x), want)
    x.requires_grad_()
    (compiled(layer, ready(backend))(x).sum()).backward()
    grad, x.grad = x.grad, None
    layer(x).sum().backward()
    assert grad is not None
    assert x.grad is not None
    assert torch.allclose(grad, x.grad)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    layer, x = made(device=device), torch.randn(5, K, device=device)
    layer.prepack() if fp4gemm.support.streams_prepacked(device) else None
    layer(x)
    graph, y = captured(lambda: layer(x), device)
    x.copy_(torch.randn(5, K, device=device))
    graph.replay()
    assert same_bits(y, layer(x))
    layer.update_(torch.randn(N, K, device=device))
    graph.replay()
    assert same_bits(y, layer(x))


def test_a_call_is_one_operator() -> None:
    layer, x = made(), torch.randn(5, K)
    for _ in range(2):
        with Names() as names:
            layer(x)
        assert names.seen == ["fp4gemm.linear.default"]


def test_flops() -> None:
    layer, x = made(), torch.randn(2, 5, K)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 10 * N * (K + R)


# ---- merged and fused layers ------------------------------------------------------------------------------


def pair(same: bool) -> list[nn.Linear]:
    c = channels()
    d = c if same else c.flip(0).contiguous()
    return [nn.Linear.from_float(float_linear(K, n), residual_channels=each) for n, each in ((N, c), (24, d))]


def test_layers_with_equal_channels_are_merged() -> None:
    layers, x = pair(True), torch.randn(6, K)
    assert why_not_one_weight(layers) == ""
    merged = one_weight(layers)
    assert same_bits(merged(x), torch.cat([layer(x) for layer in layers], -1))
    assert isinstance(merged, MergedLinear)
    assert same_bits(merged.residual_channels, layers[0].residual_channels)
    new = torch.randn(24, K)
    merged.update_([None, new])
    layers[1].update_(new)
    assert same_bits(merged(x), torch.cat([layer(x) for layer in layers], -1))


def test_layers_with_other_channels_are_not_merged() -> None:
    layers = pair(False)
    assert why_not_one_weight(layers) == "their residual_channels differ"
    plain = nn.Linear.from_float(float_linear(K, 24))
    assert why_not_one_weight([layers[0], plain]) == "their residual_channels differ"
    with pytest.raises(ValueError, match="gate and up: their residual_channels differ, must not"):
        nn.GatedMLP(layers[0], plain, plain)


class Block(torch.nn.Module):
    """An RMS norm, a gated MLP and a projection behind it."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(K)
        self.q_proj, self.k_proj = pair(same)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        return self.q_proj(x), self.k_proj(x)


@pytest.mark.parametrize("same", [True, False])
def test_fused_blocks_keep_the_numbers(same: bool) -> None:
    model, x = Block(same).bfloat16(), torch.randn(3, K, dtype=torch.bfloat16)
    want = model(x)
    reports = fuse_blocks(torch.nn.Sequential(model))
    got = model(x)
    assert [report.action for report in reports] == ["merged" if same else "left", "left"]
    assert reports[-1].reason.startswith("a layer that reads it has residual channels")
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_repr() -> None:
    assert "weight_scaling='row', residual_channels=32" in repr(made())
    assert "residual_channels" not in repr(nn.Linear(K, N))
