"""fp4gemm.nn: errors name the wrong argument or entry of a checkpoint, and nothing is loaded in part."""

from __future__ import annotations

from collections.abc import Callable

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nn_helpers import float_linear, nan_linear, state_bits
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _scaled(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name] = (
            state[name].view(torch.uint8).to(dtype) if dtype.itemsize == 1 else state[name].to(dtype)
        )

    return change


BAD_STATES: dict[str, tuple[Callable[[dict], object], str]] = {
    "codes-shape": (
        lambda s: s.update(weight_codes=s["weight_codes"][:8]),
        r"weight_codes: shape is \(8, 32\), must be",
    ),
    "codes-dtype": (
        _scaled("weight_codes", torch.float32),
        "weight_codes: dtype is torch.float32, must be torch.uint8",
    ),
    "scales-shape": (
        lambda s: s.update(weight_scales=s["weight_scales"][:24]),
        r"weight_scales: shape is \(24, 4\)",
    ),
    "scales-uint8": (
        _scaled("weight_scales", torch.uint8),
        "weight_scales: dtype is torch.uint8, must be torch.float8",
    ),
    "amax-one": (lambda s: s.update(weight_amax=torch.ones(1)), r"weight_amax: .*weight_scaling differs"),
    "amax-half": (_scaled("weight_amax", torch.float16), "weight_amax: dtype is torch.float16"),
    "bias-half": (_scaled("bias", torch.bfloat16), "bias: dtype is torch.bfloat16"),
    "bias-shape": (lambda s: s.update(bias=torch.ones(8)), r"bias: shape is \(8,\), must be \(24,\)"),
    "no-scales": (lambda s: s.pop("weight_scales"), "weight_scales: is missing"),
    "bad-bound": (
        lambda s: s.update(weight_e4m3_max=torch.tensor([300], dtype=torch.int32)),
        "weight_e4m3_max: e4m3 bound is 300, must be 448",
    ),
    "int-bound": (
        lambda s: s.update(weight_e4m3_max=448),
        r"weight_e4m3_max: got 448 \(int\), must be an int32 tensor",
    ),
    "bad-extra-state": (
        lambda s: (s.pop("weight_e4m3_max"), s.update(_extra_state=torch.tensor([2], dtype=torch.int32))),
        "weight_e4m3_max: e4m3 bound is 2, must be 448",
    ),
    "not-tensor": (
        lambda s: s.update(weight_amax=3.0),
        r"weight_amax: got 3.0 \(float\), must be a torch.Tensor",
    ),
    "strided": (
        lambda s: s.update(weight_codes=s["weight_codes"].T.contiguous().T),
        "weight_codes: strides are",
    ),
    "scales-sign": (
        lambda s: s["weight_scales"].view(torch.uint8)[0, 1].fill_(0xB8),
        r"0\.weight_scales: 1 of 512 block scales .* the sign bit set, the first is 0xB8 at \[0, 1\]",
    ),
    "scales-nan": (
        lambda s: s["weight_scales"].view(torch.uint8).fill_(0x7F),
        r"0\.weight_scales: 512 of 512 block scales .* the first is 0x7F at \[0, 0\]",
    ),
    "amax-nan": (
        lambda s: s["weight_amax"][3:5].fill_(torch.nan),
        r"0\.weight_amax: 2 of 24 values are NaN, infinite or negative, the first is nan at \[3\]",
    ),
    "amax-inf": (lambda s: s["weight_amax"][0].fill_(torch.inf), r"0\.weight_amax: .* the first is inf at"),
    "amax-negative": (
        lambda s: s["weight_amax"].neg_(),
        r"0\.weight_amax: 24 of 24 values .* must be finite and not negative",
    ),
    "float-weight": (lambda s: s.update(weight=torch.ones(24, 64)), "weight: is the weight of a float layer"),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lax"])
@pytest.mark.parametrize(("change", "text"), BAD_STATES.values(), ids=BAD_STATES)
def test_bad_state_is_refused_whole(change: Callable[[dict], object], text: str, strict: bool) -> None:
    state = dict(nn.Linear.from_float(float_linear()).state_dict())
    change(state)
    fresh = torch.nn.Sequential(nn.Linear(64, 24))
    before = state_bits(fresh[0])
    with pytest.raises(RuntimeError, match=text):
        fresh.load_state_dict({f"0.{name}": value for name, value in state.items()}, strict=strict)
    assert all(torch.equal(before[name], value) for name, value in state_bits(fresh[0]).items())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_scales", lambda x: x.view(torch.uint8).add(0x80).view(torch.float8_e4m3fn)),
        ("weight_amax", lambda x: -x),
        ("weight_amax", lambda x: x * torch.nan),
    ],
    ids=["sign", "negative", "nan"],
)
def test_bad_values_in_a_buffer_that_a_loader_sets_are_refused(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """As accelerate's loaders set them, which do not call load_state_dict."""
    layer = _layer()
    layer._buffers[name] = change(layer._buffers[name])
    with pytest.raises(ValueError, match=rf"^{name}: .*(sign bit set|must be finite and not negative)"):
        layer(torch.randn(2, 64))


def _layer() -> nn.Linear:
    return nn.Linear.from_float(float_linear())


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(float_linear(), torch.nn.Linear(24, 10))


BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "k-odd": (
        lambda: nn.Linear(33, 8),
        ValueError,
        "in_features: k is 33, must be a positive multiple of 32",
    ),
    "k-16": (lambda: nn.Linear(48, 8), ValueError, "in_features: k is 48"),
    "k-zero": (lambda: nn.Linear(0, 8), ValueError, "in_features: got 0"),
    "k-float": (lambda: nn.Linear(32.0, 8), TypeError, "in_features: got 32.0"),
    "k-bool": (lambda: nn.Linear(True, 8), TypeError, "in_features: got True"),
    "n-odd": (
        lambda: nn.Linear(32, 12),
        ValueError,
        "out_features: n is 12, must be a positive multiple of 8",
    ),
    "n-negative": (lambda: nn.Linear(32, -8), ValueError, "out_features: got -8"),
    "bias-int": (lambda: nn.Linear(32, 8, 1), TypeError, "bias: got 1"),
    "dtype-fp64": (lambda: nn.Linear(32, 8, dtype=torch.float64), TypeError, "dtype: dtype is torch.float64"),
    "dtype-str": (lambda: nn.Linear(32, 8, dtype="half"), TypeError, "dtype: got 'half'"),
    "device": (lambda: nn.Linear(32, 8, device="nowhere"), ValueError, "device: got 'nowhere'"),
    "activations": (
        lambda: nn.Linear(32, 8, activations="col"),
        ValueError,
        "activations: got 'col'",
    ),
    "weights": (lambda: nn.Linear(32, 8, weight_scaling=None), TypeError, "weight_scaling: got None"),
    "from-conv": (lambda: nn.Linear.from_float(torch.nn.Conv1d(1, 1, 1)), TypeError, "linear: got Conv1d"),
    "from-k": (
        lambda: nn.Linear.from_float(torch.nn.Linear(30, 8)),
        ValueError,
        "linear: in_features is 30, must",
    ),
    "from-n": (
        lambda: nn.Linear.from_float(torch.nn.Linear(32, 9)),
        ValueError,
        "linear: out_features is 9, must",
    ),
    "from-fp64": (
        lambda: nn.Linear.from_float(float_linear().double()),
        TypeError,
        "linear.weight: dtype is",
    ),
    "from-nan": (
        lambda: nn.Linear.from_float(nan_linear()),
        ValueError,
        "linear.weight: 2 values are NaN or inf",
    ),
    "from-lazy": (
        lambda: nn.Linear.from_float(torch.nn.LazyLinear(8)),
        ValueError,
        "linear: weight is not init",
    ),
    "from-scaling": (
        lambda: nn.Linear.from_float(float_linear(), weight_scaling="x"),
        ValueError,
        "scaling: got 'x'",
    ),
    "quantized-tensor": (
        lambda: nn.Linear.from_quantized(torch.ones(8, 32)),
        TypeError,
        "weight: got a torch.float32",
    ),
    "quantized-rotated": (
        lambda: nn.Linear.from_quantized(fp4gemm.quantize(torch.ones(8, 32), hadamard="bf16")),
        ValueError,
        r"weight: was rotated \(hadamard_signs 0xd7e8\), must not be",
    ),
    "quantized-groups": (
        lambda: nn.Linear.from_quantized(
            fp4gemm.quantize(torch.ones(8, 32), offs=torch.tensor([8], dtype=torch.int32))
        ),
        ValueError,
        r"weight: has 1 groups \(offs\), must have none",
    ),
    "quantized-k": (
        lambda: nn.Linear.from_quantized(fp4gemm.quantize(torch.ones(8, 48))),
        ValueError,
        "k is 48",
    ),
    "quantized-bias": (
        lambda: nn.Linear.from_quantized(_layer().weight, torch.ones(8)),
        ValueError,
        "bias: shape is",
    ),
    "quantized-bias-int": (
        lambda: nn.Linear.from_quantized(_layer().weight, torch.ones(24, dtype=torch.int32)),
        TypeError,
        "bias: dtype is torch.int32",
    ),
    "x-list": (lambda: _layer()([1.0]), TypeError, r"x: got \[1.0\]"),
    "x-scalar": (lambda: _layer()(torch.tensor(1.0)), ValueError, r"x: shape is \(\)"),
    "x-k": (
        lambda: _layer()(torch.randn(2, 32)),
        ValueError,
        r"x: shape is \(2, 32\), must be \(\.\.\., 64\)",
    ),
    "x-fp64": (lambda: _layer()(torch.randn(2, 64).double()), TypeError, "x: dtype is torch.float64"),
    "x-int": (lambda: _layer()(torch.ones(2, 64, dtype=torch.int64)), TypeError, "x: dtype is torch.int64"),
    "x-device": (
        lambda: _layer()(torch.empty(2, 64, device="meta")),
        ValueError,
        "x: device is meta, must be cpu",
    ),
    "dequantize-dtype": (
        lambda: _layer().dequantize_weight(torch.int8),
        TypeError,
        "dtype: dtype is torch.int8",
    ),
    "model": (lambda: fp4gemm.models.quantize_model("model"), TypeError, "model: got 'model'"),
    "model-report": (lambda: fp4gemm.models.quantize_model(_model(), report=3), TypeError, "report: got 3"),
    "model-include-empty": (
        lambda: fp4gemm.models.quantize_model(_model(), include=[]),
        ValueError,
        r"include: got \[\] \(list\), must have at least one pattern, or be None",
    ),
    "model-include": (
        lambda: fp4gemm.models.quantize_model(_model(), include=3),
        TypeError,
        "include: got 3",
    ),
    "model-regex": (
        lambda: fp4gemm.models.quantize_model(_model(), exclude="("),
        ValueError,
        r"exclude: got '\(', must be a name, ",
    ),
    "model-nothing": (
        lambda: fp4gemm.models.quantize_model(_model(), include="mlp"),
        ValueError,
        "include: 'mlp' matches none of the 2",
    ),
    "model-exclude-nothing": (
        lambda: fp4gemm.models.quantize_model(_model(), exclude=["lm_head"]),
        ValueError,
        "exclude: 'lm_head' matches none of the 2 linear layers, such as '0'",
    ),
    "finite": (lambda: nn.Linear(32, 8, check_finite=True), TypeError, "check_finite: got True"),
    "model-finite": (
        lambda: fp4gemm.models.quantize_model(_model(), check_finite="warn"),
        ValueError,
        "check_finite: got 'warn', must be 'off' or 'raise'",
    ),
    "assign-shape": (
        lambda: setattr(_layer(), "weight", torch.ones(16, 64)),
        ValueError,
        r"weight: shape is \(16, 64\), must be \(24, 64\)",
    ),
    "assign-dtype": (
        lambda: setattr(_layer(), "weight", torch.ones(24, 64, dtype=torch.int8)),
        TypeError,
        "weight: dtype is torch.int8",
    ),
    "assign-nan": (
        lambda: setattr(_layer(), "weight", nan_linear().weight),
        ValueError,
        "weight: 2 values are NaN or infinite",
    ),
    "assign-none": (lambda: setattr(_layer(), "weight", None), TypeError, "weight: got None"),
    "assign-device": (
        lambda: setattr(_layer(), "weight", torch.ones(24, 64, device="meta")),
        ValueError,
        "weight: device is meta, must be cpu, the device of the layer",
    ),
    "assign-bias": (
        lambda: setattr(_layer(), "bias", torch.nn.Parameter(torch.ones(8))),
        ValueError,
        r"bias: shape is \(8,\), must be \(24,\)",
    ),
    "model-types": (
        lambda: fp4gemm.models.quantize_model(_model(), types=(torch.nn.Conv1d,)),
        TypeError,
        "types: got the class Conv1d",
    ),
    "model-type": (
        lambda: fp4gemm.models.quantize_model(_model(), types=torch.nn.Linear),
        TypeError,
        "types: got the class Linear",
    ),
    "model-policy": (
        lambda: fp4gemm.models.quantize_model(_model(), on_unsupported="warn"),
        ValueError,
        "on_unsupported: got 'warn'",
    ),
    "model-scaling": (
        lambda: fp4gemm.models.quantize_model(_model(), activations=1),
        TypeError,
        "activations: got 1",
    ),
    "model-progress": (
        lambda: fp4gemm.models.quantize_model(_model(), progress=True),
        TypeError,
        "progress: got True",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_named(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
