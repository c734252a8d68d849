"""fp4gemm.nn.Linear with a prepacked weight, and with 16-bit activations.

On the CPU ``Linear.prepack`` does what the first forward does on compute capability 9.0.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.nn import _weight
from nn_helpers import BUFFER_DTYPES, float_linear, same_bits, same_state
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def both(**options: object) -> tuple[nn.Linear, nn.Linear]:
    """A layer, and another one whose equal weight is prepacked."""
    layer = nn.Linear.from_float(float_linear(96, 72), **options)
    prepacked = copy.deepcopy(layer)
    assert prepacked.prepack() is prepacked
    return layer, prepacked


def held(layer: nn.Linear) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in layer.named_buffers()}


PREPACKED = {
    "weight_amax": torch.float32,
    "weight_e4m3_max": torch.int32,
    "bias": torch.float32,
    "weight_prepacked": torch.uint8,
}


@pytest.mark.parametrize("weights", ["row", "tensor"], ids=["wrow", "wtensor"])
@pytest.mark.parametrize("activations", ["per-token", "per-tensor", "a16"], ids=["arow", "atensor", "anone"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_forward_gives_the_same_bits(dtype: torch.dtype, activations: str, weights: str) -> None:
    layer, prepacked = both(activations=activations, weight_scaling=weights)
    x = torch.randn(2, 3, 96).to(dtype)
    assert same_bits(prepacked(x), layer(x))
    assert held(prepacked) == PREPACKED
    assert held(layer) == BUFFER_DTYPES


def test_memory_is_that_of_the_codes_and_scales() -> None:
    layer = nn.Linear.from_float(torch.nn.Linear(256, 128, bias=False))
    before = sum(buffer.nbytes for buffer in layer.buffers())
    layer.prepack()
    assert sum(buffer.nbytes for buffer in layer.buffers()) == before
    assert layer.weight_prepacked.nbytes == 0.5625 * 256 * 128


def test_activations_that_are_not_quantized() -> None:
    layer = nn.Linear.from_float(float_linear(96, 72), activations="a16")
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(4, 96).to(dtype)
        want = fp4gemm.mm(x, layer.weight, bias=layer.bias, out_dtype=dtype)
        assert same_bits(layer(x), want)
        for strided in (x.T.contiguous().T, torch.cat((x, x), 1)[:, 96:], torch.cat((x, x), 1)[:, :96]):
            assert same_bits(layer(strided), want)
        buffer = torch.empty(4 * 96 + 1, dtype=dtype)
        buffer[1:] = x.flatten()
        assert same_bits(layer(buffer[1:].view(4, 96)), want)  # not aligned to 16 bytes
        assert layer(x[0]).shape == (72,)
    assert "activations='a16'" in repr(layer)
    model = fp4gemm.models.quantize_model(
        torch.nn.Sequential(float_linear()), activations="a16", inplace=False
    )
    assert model[0].activations == "a16"
    with pytest.raises(ValueError, match=r"^weight_scaling: got 'none', must be 'row' or 'tensor'"):
        nn.Linear(32, 8, weight_scaling="none")


# ---- what leaves the layer is codes and scales


def test_state_dict_is_that_of_codes_and_scales() -> None:
    layer, prepacked = both()
    assert same_state(prepacked, layer)
    assert set(prepacked.state_dict()) == set(BUFFER_DTYPES)
    for name in ("weight_codes", "weight_scales"):
        assert same_bits(getattr(prepacked, name), getattr(layer, name))
    assert same_bits(prepacked.weight.scales, layer.weight.scales)
    assert same_bits(prepacked.dequantize_weight(), layer.dequantize_weight())
    assert prepacked.weight_scaling == "row"
    assert held(prepacked) == PREPACKED  # reading them changed nothing
    model = torch.nn.ModuleDict({"fc": prepacked})
    assert {"fc.weight_codes", "fc.weight_scales"} <= set(model.state_dict(keep_vars=True))


COPIES: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": lambda layer: _saved(layer),
}


def _saved(layer: nn.Linear) -> nn.Linear:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_copies_hold_codes_and_scales(copier: Callable[[nn.Linear], nn.Linear]) -> None:
    layer, prepacked = both()
    copied, x = copier(prepacked), torch.randn(4, 96)
    assert held(copied) == BUFFER_DTYPES
    assert same_state(copied, layer)
    assert same_bits(copied(x), layer(x))
    copied.reset_parameters()  # nothing is shared
    assert same_bits(prepacked(x), layer(x))


def test_a_pickle_of_before_prepacking_loads() -> None:
    layer = nn.Linear.from_float(float_linear(96, 72))
    state = layer.__getstate__()
    state["_non_persistent_buffers_set"] = set()
    del state["_is_captured"]
    old = nn.Linear.__new__(nn.Linear)
    old.__setstate__(state)
    x = torch.randn(4, 96)
    assert same_bits(old.prepack()(x), layer(x))


# ---- what comes in


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict(assign: bool) -> None:
    """Loads in place, so that a captured CUDA graph sees the new weight; with assign, as codes and scales."""
    _, prepacked = both()
    other = nn.Linear.from_float(float_linear(96, 72))
    place, x = prepacked.weight_prepacked, torch.randn(4, 96)
    with torch.inference_mode():
        prepacked.load_state_dict(other.state_dict(), assign=assign)
    assert same_state(prepacked, other)
    assert same_bits(prepacked(x), other(x))
    assert held(prepacked) == (BUFFER_DTYPES if assign else PREPACKED)
    if not assign:
        assert prepacked.weight_prepacked is place


def test_a_bad_state_leaves_the_weight_as_it_is() -> None:
    layer, prepacked = both()
    place, state = prepacked.weight_prepacked, dict(nn.Linear.from_float(float_linear(96, 72)).state_dict())
    state["weight_scales"] = state["weight_scales"].view(torch.uint8)
    with pytest.raises(RuntimeError, match=r"weight_scales: dtype is torch\.uint8"):
        prepacked.load_state_dict(state)
    prepacked.load_state_dict({}, strict=False)
    assert prepacked.weight_prepacked is place
    assert held(prepacked) == PREPACKED
    assert same_state(prepacked, layer)


def test_loading_into_a_new_layer_then_prepacking() -> None:
    layer, _ = both()
    fresh = nn.Linear(96, 72)
    with pytest.raises(RuntimeError, match=r"^weight: not loaded yet"):
        fresh.prepack()
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(4, 96)
    assert same_bits(fresh.prepack().prepack()(x), layer(x))
    place = fresh.weight_prepacked
    fresh.reset_parameters()
    assert held(fresh) == PREPACKED
    assert fresh.weight_prepacked is place  # which a captured graph may read
    assert not any(b.view(torch.uint8).any() for n, b in fresh.named_buffers() if n != "weight_e4m3_max")
    assert not fresh.weight_codes.any()
    fresh.load_state_dict(layer.state_dict())
    assert fresh.weight_prepacked is place
    assert same_bits(fresh(x), layer(x))


def test_what_left_the_layer_stays_whole() -> None:
    """A later load does not write to a state or weight that was read while prepacked."""
    layer, prepacked = both()
    state, weight = prepacked.state_dict(), prepacked.weight
    want = {name: tensor.clone() for name, tensor in state.items()}
    prepacked.load_state_dict(nn.Linear.from_float(float_linear(96, 72)).prepack().state_dict())
    assert all(same_bits(tensor, want[name]) for name, tensor in state.items())
    assert same_bits(weight.amax, want["weight_amax"])
    prepacked.load_state_dict(state)
    x = torch.randn(4, 96)
    assert same_bits(prepacked(x), layer(x))


def test_a_fake_run_keeps_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward on fake tensors outside of torch.compile prepacks nothing."""
    layer, _ = both()
    monkeypatch.setattr(fp4gemm.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.empty(4, 96))
    assert held(layer) == BUFFER_DTYPES
    assert all(type(buffer) is torch.Tensor for buffer in layer.buffers())


def test_prepack_after_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = both()
    monkeypatch.setattr(fp4gemm.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer(torch.randn(4, 96))
    with pytest.raises(
        RuntimeError, match=r"^weight: its codes and scales are read by a captured CUDA graph"
    ):
        layer.prepack()
    assert held(layer) == BUFFER_DTYPES


def test_assigned_codes_count() -> None:
    layer, prepacked = both()
    x, codes = torch.randn(4, 96), torch.randint(0, 256, (72, 48), dtype=torch.uint8)
    layer.weight_codes = codes
    prepacked.weight_codes = codes
    assert same_state(prepacked, layer)
    assert same_bits(prepacked(x), layer(x))
    assert same_bits(prepacked.prepack()(x), layer(x))
    assert held(prepacked) == PREPACKED


# ---- moves, compilation, inference mode


def test_moves() -> None:
    layer, prepacked = both()
    place, x = prepacked.weight_prepacked, torch.randn(4, 96)
    for move in (
        prepacked.half,
        prepacked.bfloat16,
        prepacked.double,
        lambda: prepacked.to("cpu", torch.float16),
    ):
        move()
        assert prepacked.weight_prepacked is place
        assert held(prepacked) == PREPACKED
    assert same_bits(prepacked(x), layer(x))
    prepacked.to("meta")
    assert {name: (b.dtype, b.is_meta) for name, b in prepacked.named_buffers()} == {
        name: (dtype, True) for name, dtype in BUFFER_DTYPES.items()
    }
    prepacked.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="not loaded yet"):
        prepacked(x)
    prepacked.load_state_dict(layer.state_dict())
    assert same_bits(prepacked(x), layer(x))


@pytest.mark.parametrize("activations", ["per-token", "a16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_and_after(backend: str, activations: str) -> None:
    """A traced forward uses the weight as it is; prepacking afterwards recompiles."""
    torch._dynamo.reset()
    layer = nn.Linear.from_float(float_linear(96, 72), activations=activations)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(3, 96).bfloat16()
    want = layer(x)
    assert same_bits(compiled(x), want)
    layer.prepack()
    assert same_bits(compiled(x), want)
    assert same_bits(compiled(x[:2]), want[:2])


def test_prepacked_in_inference_mode() -> None:
    """The bytes are not an inference tensor, so load_state_dict may write them outside of the mode."""
    layer = nn.Linear.from_float(float_linear(96, 72))
    x = torch.randn(4, 96)
    want = layer(x)
    with torch.inference_mode():
        layer.prepack()
        assert same_bits(layer(x), want)
    assert not layer.weight_prepacked.is_inference()
    layer.load_state_dict(copy.deepcopy(layer).state_dict())
    assert same_bits(layer(x), want)


def test_export() -> None:
    x = torch.randn(4, 96)
    for layer in both():
        assert same_bits(torch.export.export(layer, (x,)).module()(x), layer(x))


# ---- the first forward on a device that streams prepacked weights, on the CPU in its place


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Sets whether the layer believes that a graph is being captured."""
    capturing = [False]
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    return capturing


def test_the_first_forward_prepacks(streams: list[bool]) -> None:
    layer = nn.Linear.from_float(float_linear(96, 72))
    x = torch.randn(4, 96)
    want = fp4gemm.mm(fp4gemm.quantize(x), layer.weight, bias=layer.bias, out_dtype=torch.float32)
    assert held(layer) == BUFFER_DTYPES
    assert same_bits(layer(x), want)
    assert held(layer) == PREPACKED
    place = layer.weight_prepacked
    assert same_bits(layer(x), want)
    assert layer.weight_prepacked is place


def test_a_traced_first_forward_does_not(streams: list[bool]) -> None:
    torch._dynamo.reset()
    layer = nn.Linear.from_float(float_linear(96, 72))
    x = torch.randn(4, 96)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    first = compiled(x)
    assert held(layer) == BUFFER_DTYPES
    assert same_bits(layer(x), first)
    assert held(layer) == PREPACKED
    assert same_bits(compiled(x), first)


def test_a_captured_first_forward_keeps_codes_and_scales(streams: list[bool]) -> None:
    """The graph reads them, so they stay until the layer moves."""
    layer = nn.Linear.from_float(float_linear(96, 72))
    x, codes = torch.randn(4, 96), layer.weight_codes
    want = fp4gemm.mm(fp4gemm.quantize(x), layer.weight, bias=layer.bias, out_dtype=torch.float32)
    streams[0] = True
    assert same_bits(layer(x), want)
    streams[0] = False
    assert same_bits(layer(x), want)
    assert layer.weight_codes is codes
    assert held(copy.deepcopy(layer)) == BUFFER_DTYPES
    again = copy.deepcopy(layer)
    assert same_bits(again(x), want)
    assert held(again) == PREPACKED


def test_tied_weights_are_prepacked_each(streams: list[bool]) -> None:
    weight = fp4gemm.quantize(torch.randn(16, 64))
    model = torch.nn.Sequential(*(nn.Linear.from_quantized(weight) for _ in range(2)))
    x = torch.randn(3, 64)
    want: Tensor = fp4gemm.mm(fp4gemm.quantize(x), weight, out_dtype=torch.float32)
    for layer in model:
        assert same_bits(layer(x), want)
        assert same_bits(layer.weight_codes, weight.codes)
