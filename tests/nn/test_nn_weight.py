"""fp4gemm.nn.Linear: assigned weights, checkpoints of other versions, threads, values that are not finite."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.nn import _weight
from nn_helpers import float_linear, same_bits, same_state
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- reads and assignments of model code


def test_the_weight_has_the_dtype_of_the_float_layer() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer = nn.Linear.from_float(float_linear().to(dtype))
        assert layer.weight.dtype is dtype
        assert layer.dequantize_weight().dtype is torch.float32
        for copied in (
            copy.deepcopy(layer),
            pickle.loads(pickle.dumps(layer)),
            copy.deepcopy(layer).prepack(),
        ):
            assert copied.weight.dtype is dtype
        assert layer.to("meta").weight.dtype is dtype
    assert layer.half().weight.dtype is torch.float16
    assert layer.bfloat16().weight.dtype is torch.bfloat16
    assert layer.double().weight.dtype is torch.bfloat16  # a class of another package
    assert nn.Linear(32, 8).weight.dtype is torch.float32
    assert nn.Linear(32, 8, dtype=torch.float16).weight.dtype is torch.float16


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_an_assigned_float_weight_is_quantized(scaling: str, prepacked: bool) -> None:
    first, second, x = float_linear(bias=False), float_linear(bias=False), torch.randn(3, 64)
    want = nn.Linear.from_float(second, weight_scaling=scaling)
    for weight in (second.weight, second.weight.detach(), want.weight):
        layer = nn.Linear.from_float(first, weight_scaling=scaling)
        if prepacked:
            layer.prepack()
        layer.weight = weight
        assert same_state(layer, want)
        assert same_bits(layer(x), want(x))
        assert not list(layer.parameters())
    fresh = nn.Linear(64, 24, bias=False, weight_scaling=scaling)
    fresh.weight = second.weight
    assert same_bits(fresh(x), want(x))


def test_an_assigned_bias_becomes_a_float32_buffer() -> None:
    layer = nn.Linear.from_float(float_linear())
    layer.bias = torch.nn.Parameter(torch.arange(24).half())
    assert layer.bias.dtype is torch.float32
    assert not list(layer.parameters())
    assert torch.equal(layer(torch.zeros(1, 64))[0], torch.arange(24.0))


def test_buffers_put_into_place_by_others_are_checked() -> None:
    layer, other = nn.Linear.from_float(float_linear()), nn.Linear.from_float(float_linear())
    x = torch.randn(3, 64)
    buffer = torch.empty(24 * 32 + 8, dtype=torch.uint8)[8:].view(24, 32)  # not aligned to 16 bytes
    for name, value in other.state_dict().items():
        layer._buffers[name] = buffer.copy_(value) if name == "weight_codes" else value
    assert same_bits(layer(x), other(x))
    assert layer.weight_codes.data_ptr() % 16 == 0
    layer._buffers["weight_scales"] = other.weight_scales.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"^weight_scales: dtype is torch\.bfloat16, must be torch\.float8_e4m3fn"
    ):
        layer(x)


# ---- checkpoints


@pytest.mark.parametrize("made_in_it", [True, False])
def test_a_model_quantized_in_inference_mode_loads_a_state(made_in_it: bool) -> None:
    with torch.inference_mode(made_in_it):
        linear = float_linear()
    with torch.inference_mode():
        model = fp4gemm.models.quantize_model(torch.nn.Sequential(linear))
        tied = fp4gemm.models.quantize_model(torch.nn.Sequential(float_linear()))
        tied[0].weight = linear.weight
    want = fp4gemm.models.quantize_model(torch.nn.Sequential(float_linear()))
    for loaded in (model, tied):
        assert not any(buffer.is_inference() for buffer in loaded.buffers())
        loaded.load_state_dict(want.state_dict())
        assert same_state(loaded[0], want[0])


@pytest.mark.parametrize("bound", [448, 256])
def test_a_checkpoint_with_extra_state_loads(bound: int) -> None:
    """Older checkpoints have the e4m3 bound there."""
    made = fp4gemm.quantize(torch.randn(24, 64))
    layer = nn.Linear.from_quantized(fp4gemm.NVFP4Tensor(made.codes, made.scales, made.amax, bound))
    state = layer.state_dict()
    assert int(state.pop("weight_e4m3_max")) == bound
    state["_extra_state"] = torch.tensor([bound], dtype=torch.int32)
    fresh = nn.Linear(64, 24, bias=False)
    fresh.load_state_dict(state)
    assert fresh.e4m3_max == bound
    assert same_state(fresh, layer)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_a_bound_means_448(strict: bool) -> None:
    layer = nn.Linear.from_float(float_linear(), method="round")
    state = layer.state_dict()
    del state["weight_e4m3_max"]
    fresh = nn.Linear(64, 24)
    fresh.e4m3_max = 256
    fresh.load_state_dict(state, strict=strict)
    assert fresh.e4m3_max == 448
    assert same_state(fresh, layer)


def of_bound(bound: int) -> nn.Linear:
    made = fp4gemm.quantize(torch.randn(24, 64))
    return nn.Linear.from_quantized(fp4gemm.NVFP4Tensor(made.codes, made.scales, made.amax, bound))


@pytest.mark.parametrize("is_prepacked", [False, True])
def test_a_bound_that_is_written_in_place_is_read(is_prepacked: bool) -> None:
    layer, other, x = of_bound(448), of_bound(256), torch.randn(2, 64)
    if is_prepacked:
        layer, other = layer.prepack(), other.prepack()
    layer(x)
    for mine, theirs in zip(layer.buffers(), other.buffers(), strict=True):
        mine.copy_(theirs)
    assert torch.equal(layer(x), other(x))
    assert layer.e4m3_max == 256


def test_a_bound_in_place_is_read_after_other_changes() -> None:
    layer = of_bound(448)
    layer.weight_e4m3_max.fill_(256)
    layer.weight_codes = layer.weight_codes.clone()
    assert layer.e4m3_max == 256
    layer.load_state_dict({"weight_e4m3_max": torch.tensor([448], dtype=torch.int32)}, strict=False)
    assert layer.e4m3_max == 448
    layer.weight_e4m3_max.fill_(2)
    with pytest.raises(ValueError, match="weight_e4m3_max: e4m3 bound is 2, must be 448"):
        layer(torch.randn(2, 64))


def test_a_bound_that_is_replaced_is_read_before_the_first_forward() -> None:
    """accelerate's set_module_tensor_to_device puts a new tensor among the buffers."""
    layer = of_bound(448)
    layer._buffers["weight_e4m3_max"] = torch.tensor([256], dtype=torch.int32)
    assert layer.e4m3_max == 256


# ---- the first forward from several threads


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_threads_prepack_once(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread prepacks while the others wait; none reads memory that another one frees."""
    calls: list[Tensor] = []
    at_once = threading.Barrier(4)

    def slow(weight: fp4gemm.NVFP4Tensor, fp8: bool) -> fp4gemm.PrepackedTensor:
        made = fp4gemm.prepack(weight, fp8)
        calls.append(made.data)
        threading.Event().wait(0.2)  # gives the others time to begin
        return made

    monkeypatch.setattr(_weight, "prepack", slow)
    layer = nn.Linear.from_float(float_linear(96, 72))
    x, found = torch.randn(4, 96), []
    want = copy.deepcopy(layer)
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: False)
    want = want(x)
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)

    def run() -> None:
        at_once.wait()
        found.append(layer(x))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert layer.weight_prepacked.data_ptr() == calls[0].data_ptr()
    assert len(found) == 4
    assert all(same_bits(y, want) for y in found)


def test_the_device_is_known_while_another_thread_exchanges_the_buffers() -> None:
    """Each read of the buffers may find the other form of the weight."""

    class Exchanged:
        def __init__(self, *forms: str) -> None:
            self.forms = iter(forms)

        @property
        def _buffers(self) -> dict[str, Tensor]:
            return {next(self.forms): torch.empty(1)}

    forms = _weight.CODES, _weight.PREPACKED
    for first, then in (forms, forms[::-1]):
        assert nn.Linear._device.fget(Exchanged(first, then)) == torch.device("cpu")


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "weight": lambda layer: layer.weight.codes,
    "weight_codes": lambda layer: layer.weight_codes,
    "weight_scales": lambda layer: layer.weight_scales,
    "dequantize_weight": lambda layer: layer.dequantize_weight(),
    "pickle": lambda layer: layer.__getstate__()["_buffers"]["weight_codes"],
    "state_dict": lambda layer: layer.state_dict()["weight_codes"],
}


@pytest.mark.parametrize("read", READS)
def test_a_weight_is_read_while_another_thread_exchanges_the_buffers(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread waits until the prepacked bytes were read."""
    layer = nn.Linear.from_float(float_linear(96, 72))
    want = READS[read](layer)
    layer._hold_prepacked(fp8=False)
    other = threading.Thread(target=layer._hold_canonical)
    unprepacked = nn.Linear._unprepacked

    def slow(self: nn.Linear) -> fp4gemm.NVFP4Tensor:
        if other.ident is None:
            other.start()
            other.join(0.2)
        return unprepacked(self)

    monkeypatch.setattr(nn.Linear, "_unprepacked", slow)
    got = READS[read](layer)
    other.join()
    assert layer.weight_prepacked is None
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
def test_threads_on_streams_of_their_own(cuda: torch.device) -> None:
    """Every first forward gives the right bits while other threads allocate memory full of 0xFF."""
    linear, x = float_linear(2048, 2048, bias=False, device=cuda), torch.randn(64, 2048, device=cuda)
    reference = nn.Linear.from_float(linear)
    want = fp4gemm.mm(fp4gemm.quantize(x), reference.weight, out_dtype=torch.float32)
    layers = [nn.Linear.from_float(linear) for _ in range(16)]
    torch.cuda.synchronize()
    found: list[Tensor] = []
    at_once = threading.Barrier(4)

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            for layer in layers:
                at_once.wait()
                found.append(layer(x))
                torch.full((2048 * 1024,), 0xFF, dtype=torch.uint8, device=cuda)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 64
    assert all(same_bits(y, want) for y in found)


# ---- values that are not finite


def bad_inputs() -> Iterator[Tensor]:
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(2, 3, 64)
        x[1, 2, 5] = value
        yield x


def test_check_finite() -> None:
    layer = nn.Linear.from_float(float_linear(), check_finite="raise")
    quiet = nn.Linear.from_float(float_linear())
    x = torch.randn(2, 3, 64)
    torch.manual_seed(0)
    assert same_bits(layer(x), nn.Linear.from_quantized(layer.weight, layer.bias)(x))
    for bad in bad_inputs():
        with pytest.raises(
            ValueError, match=r"^x: 1 of 384 values are NaN or infinite, .* of Linear\(in_features=64"
        ):
            layer(bad)
        assert quiet(bad).shape == (2, 3, 24)
    assert "check_finite='raise'" in repr(layer)
    assert "check_finite" not in repr(quiet)
    model = fp4gemm.models.quantize_model(torch.nn.Sequential(float_linear()), check_finite="raise")
    with pytest.raises(ValueError, match=r"^x: 1 of 384 values are NaN"):
        model(next(bad_inputs()))
    assert copy.deepcopy(layer).check_finite == "raise"


def test_what_the_default_does_with_nan_and_infinity() -> None:
    """NaN becomes a finite number, and an infinity makes its row infinite or NaN, as documented."""
    layer = nn.Linear.from_float(float_linear(bias=False))
    nan, inf, _ = bad_inputs()
    assert layer(nan).isfinite().all()
    y = layer(inf)
    assert not y[1, 2].isfinite().any()
    y[1, 2] = 0
    assert y.isfinite().all()


def test_check_finite_while_a_graph_is_traced() -> None:
    torch._dynamo.reset()
    layer = nn.Linear.from_float(float_linear(), check_finite="raise")
    x = torch.randn(3, 64)
    with pytest.raises(Exception, match="check_finite"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    assert same_bits(compiled(x), layer(x))
    with pytest.raises(ValueError, match=r"^x: 1 of 384 values are NaN"):
        compiled(next(bad_inputs()))


def test_a_weight_that_is_not_strided_is_refused() -> None:
    layer = nn.Linear.from_float(float_linear())
    before = copy.deepcopy(layer)
    with pytest.raises(TypeError, match=r"^weight: layout is torch.sparse_coo, must be torch.strided"):
        layer.update_(torch.ones(layer.out_features, layer.in_features).to_sparse())
    assert same_state(layer, before)
