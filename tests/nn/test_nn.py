"""fp4gemm.nn.Linear: numbers against the reference, state, copies and moves between devices."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable

import fp4gemm
import pytest
import torch
from fp4gemm import nn, reference
from nn_helpers import BUFFER_DTYPES, bits, float_linear, same_bits, same_state, state_bits
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_reference(x: Tensor, linear: torch.nn.Linear, activations: str, weights: str) -> Tensor:
    """Q(x) @ Q(W).T + bias from the parts of the reference, on the CPU."""
    a_codes, a_scales, a_amax = reference.quantize(
        x.reshape(-1, x.shape[-1]).contiguous(), None, activations == "per-token"
    )
    b_codes, b_scales, b_amax = reference.quantize(linear.weight.detach(), None, weights == "row")
    bias = None if linear.bias is None else linear.bias.detach().float()
    alpha = torch.tensor(1 / 7225344, dtype=torch.float32).item()
    factors = {"alpha": alpha, "alpha_row": a_amax, "alpha_col": b_amax}
    y = reference.gemm(a_codes, b_codes, a_scales, b_scales, **factors, bias=bias, out_dtype=x.dtype)
    return y.reshape(*x.shape[:-1], linear.out_features)


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("weights", ["row", "tensor"], ids=["wrow", "wtensor"])
@pytest.mark.parametrize("activations", ["per-token", "per-tensor"], ids=["arow", "atensor"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_forward_equals_reference(dtype: torch.dtype, activations: str, weights: str, bias: bool) -> None:
    linear = float_linear(96, 40, bias).to(dtype)
    layer = nn.Linear.from_float(linear, activations=activations, weight_scaling=weights, method="round")
    x = torch.randn(2, 3, 96).to(dtype)
    assert same_bits(layer(x), by_reference(x, linear, activations, weights))


@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (5, 64), (2, 3, 64), (2, 1, 3, 4, 64), (0, 64), (3, 0, 64)], ids=str
)
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    linear = float_linear()
    layer, x = nn.Linear.from_float(linear), torch.randn(shape)
    y = layer(x)
    assert y.shape == linear(x).shape
    assert same_bits(y, layer(x.reshape(-1, 64)).reshape(y.shape))


@pytest.mark.parametrize("scaling", ["per-token", "per-tensor"])
def test_close_to_float(scaling: str, device: torch.device) -> None:
    linear = float_linear(256, 64, device=device)
    x = torch.randn(128, 256, device=device)
    with torch.no_grad():
        exact = linear(x)
    y = nn.Linear.from_float(linear, activations=scaling)(x)
    # Each channel by itself: two independent 4-bit casts of Gaussian data cost about 9.5 % each (20.4 dB).
    error = (y - exact).norm(dim=0) / exact.norm(dim=0)
    assert 0.05 < error.mean() < 0.2
    assert error.max() < 0.3


def test_dequantized_weight_is_what_the_gemm_multiplies() -> None:
    layer = nn.Linear.from_float(float_linear(64, 24, bias=False), activations="per-tensor")
    unit = torch.eye(64)  # exact in NVFP4: code 6, scale 448, amax 1
    torch.testing.assert_close(layer(unit).T, layer.dequantize_weight(), rtol=1e-6, atol=0)
    assert layer.dequantize_weight(torch.bfloat16).dtype is torch.bfloat16
    assert isinstance(layer.weight, fp4gemm.NVFP4Tensor)
    assert layer.weight.codes.data_ptr() == layer.weight_codes.data_ptr()


def test_row_weight_scaling_keeps_small_channels() -> None:
    linear = torch.nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        linear.weight[3] *= 1e-6  # too small for an e4m3 scale next to the others
    errors = {}
    for scaling in ("row", "tensor"):
        restored = nn.Linear.from_float(linear, weight_scaling=scaling).dequantize_weight()
        wanted = linear.weight.detach()[3]
        errors[scaling] = float((restored[3] - wanted).norm() / wanted.norm())
    assert errors["row"] < 0.2
    assert errors["tensor"] > 0.5
    assert nn.Linear.from_float(linear).weight_scaling == "row"


def test_scaling_a_token_by_a_power_of_two_changes_only_it() -> None:
    layer = nn.Linear.from_float(float_linear(bias=False))
    x = torch.randn(6, 64)
    grown = x.clone()
    grown[2] *= 2.0**20
    y, found = layer(x), layer(grown)
    assert same_bits(found[[0, 1, 3, 4, 5]], y[[0, 1, 3, 4, 5]])
    assert same_bits(found[2], y[2] * 2.0**20)


STRIDED = {
    "transposed": lambda: torch.randn(64, 5).T,
    "every-other": lambda: torch.randn(5, 128)[:, ::2],
    "expanded": lambda: torch.randn(1, 64).expand(5, 64),
    "row-slice": lambda: torch.randn(5, 128)[:, :64],
    "off-by-one": lambda: torch.randn(5, 65)[:, 1:],
    "misaligned-base": lambda: torch.randn(5 * 64 + 1)[1:].reshape(5, 64),
    "permuted-3d": lambda: torch.randn(4, 64, 3).permute(2, 0, 1),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_strides_are_free(make: Callable[[], Tensor]) -> None:
    layer, x = nn.Linear.from_float(float_linear()), make()
    assert same_bits(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


def test_from_quantized_uses_the_e4m3_bound() -> None:
    made = fp4gemm.quantize(torch.randn(16, 64))
    weight = fp4gemm.NVFP4Tensor(made.codes, made.scales, made.amax, 256)
    layer, x = nn.Linear.from_quantized(weight), torch.randn(3, 64)
    assert same_bits(layer(x), fp4gemm.mm(fp4gemm.quantize(x), weight, out_dtype=torch.float32))
    fresh = nn.Linear(64, 16, bias=False)
    fresh.load_state_dict(layer.state_dict())
    assert fresh.e4m3_max == 256
    assert same_bits(fresh(x), layer(x))


# ---- names and types


def test_nn_is_listed_before_its_first_use() -> None:
    code = "import fp4gemm, sys; assert 'fp4gemm.nn' not in sys.modules; print(*dir(fp4gemm))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"nn", "__version__", "quantize"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "function",
    [nn.Linear.__init__, nn.Linear.from_float, nn.Linear.from_quantized, fp4gemm.models.quantize_model],
)
def test_keywords_of_strings_have_literal_types(function: Callable[..., object]) -> None:
    """So that mypy refuses scaling="rows"; the values are those that the checks accept."""
    names = {"activations", "weight_scaling", "check_finite", "on_unsupported"}
    hints = {name: hint for name, hint in typing.get_type_hints(function).items() if name in names}
    assert set(hints) == names & set(inspect.signature(function).parameters)
    assert hints
    for name, hint in hints.items():
        literals = [hint] if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
        assert all(typing.get_origin(one) is typing.Literal for one in literals)
        if name in ("activations", "weight_scaling", "check_finite"):
            for value in {value for one in literals for value in typing.get_args(one)} - {"auto"}:
                assert getattr(nn.Linear(64, 8, **{name: value}), name) == value


def test_quantize_model_has_the_type_of_the_model() -> None:
    hints = typing.get_type_hints(fp4gemm.models.quantize_model)
    assert hints["return"] is hints["model"]
    assert isinstance(hints["model"], typing.TypeVar)


# ---- gradients and compilation ----------------------------------------------------------------------------


def test_no_gradient_flows_to_the_weight() -> None:
    layer, x = nn.Linear.from_float(float_linear()), torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert not list(layer.parameters())


def test_compile_fullgraph(device: torch.device) -> None:
    model = torch.nn.Sequential(float_linear(), torch.nn.ReLU()).to(device)
    swapped = fp4gemm.models.quantize_model(model, inplace=False)
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(2, rows, 64, device=device)
        assert same_bits(compiled(x), swapped(x))


def test_compile_dequantize_weight() -> None:
    layer = nn.Linear.from_float(float_linear())
    compiled = torch.compile(lambda: layer.dequantize_weight(), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(), layer.dequantize_weight())


# ---- state ------------------------------------------------------------------------------------------------


def test_a_new_layer_has_zeros_and_refuses_to_run() -> None:
    layer = nn.Linear(64, 24)
    assert not any(bits(value).any() for name, value in layer.named_buffers() if name != "weight_e4m3_max")
    for call in (lambda: layer(torch.randn(2, 64)), layer.dequantize_weight):
        with pytest.raises(RuntimeError, match=r"^weight: not loaded yet"):
            call()


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_state_dict_round_trip(bias: bool, scaling: str, assign: bool) -> None:
    layer, x = nn.Linear.from_float(float_linear(bias=bias), weight_scaling=scaling), torch.randn(4, 64)
    buffer = io.BytesIO()
    torch.save(torch.nn.ModuleDict({"fc": layer}).state_dict(), buffer)
    buffer.seek(0)
    fresh = nn.Linear(64, 24, bias=bias, weight_scaling=scaling, device="meta" if assign else None)
    torch.nn.ModuleDict({"fc": fresh}).load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert same_state(fresh, layer)
    assert same_bits(fresh(x), layer(x))


def test_safetensors_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model, path = torch.nn.Sequential(nn.Linear.from_float(float_linear())), tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), path)
    # Tensors of a mapped file are aligned to 8 bytes only; assign must accept them.
    for assign in (False, True):
        fresh = torch.nn.Sequential(nn.Linear(64, 24, device="meta" if assign else None))
        fresh.load_state_dict(safetensors.load_file(path), assign=assign)
        assert same_state(fresh[0], model[0])
        assert fresh[0].weight_codes.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"]
)
def test_copies(copier: Callable[[nn.Linear], nn.Linear]) -> None:
    layer, x = nn.Linear.from_float(float_linear(), activations="per-tensor"), torch.randn(4, 64)
    copied = copier(layer)
    assert same_state(copied, layer)
    assert copied.activations == "per-tensor"
    assert same_bits(copied(x), layer(x))
    expected = layer(x).clone()
    copied.reset_parameters()  # nothing is shared
    assert same_bits(layer(x), expected)


def test_torch_save_of_the_module() -> None:
    layer, buffer = nn.Linear.from_float(float_linear()), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert same_state(torch.load(buffer, weights_only=False), layer)


def test_missing_layer_is_an_error_only_if_strict() -> None:
    layer = nn.Linear(64, 24)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    assert set(layer.load_state_dict({}, strict=False).missing_keys) == set(BUFFER_DTYPES)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        layer(torch.randn(1, 64))


# ---- moves ------------------------------------------------------------------------------------------------

MOVES: dict[str, Callable[[torch.nn.Module], object]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to-fp16": lambda m: m.to(torch.float16),
    "to-cpu-bf16": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "round-trip": lambda m: m.half().float(),
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_dtype_moves_do_not_touch_the_weight(move: Callable[[torch.nn.Module], object]) -> None:
    layer = nn.Linear.from_float(float_linear())
    before, x = state_bits(layer), torch.randn(3, 64)
    expected = layer(x)
    move(torch.nn.Sequential(layer))
    assert {name: value.dtype for name, value in layer.named_buffers()} == BUFFER_DTYPES
    assert all(torch.equal(before[name], value) for name, value in state_bits(layer).items())
    assert same_bits(layer(x), expected)
    assert layer(x.half()).dtype is torch.float16


def test_tied_buffers_stay_tied() -> None:
    weight = fp4gemm.quantize(torch.randn(16, 64))
    model = torch.nn.ModuleList(nn.Linear.from_quantized(weight) for _ in range(2)).half()
    assert model[0].weight_codes is model[1].weight_codes


def test_meta_shapes_and_materialising() -> None:
    layer = nn.Linear.from_float(float_linear()).to("meta")
    assert layer(torch.empty(2, 3, 64, device="meta")).shape == (2, 3, 24)
    layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="not loaded yet"):  # its memory is not initialized
        layer(torch.randn(1, 64))
    layer.load_state_dict(nn.Linear.from_float(float_linear()).state_dict())
    assert layer(torch.randn(1, 64)).isfinite().all()


@pytest.mark.gpu
def test_state_dict_across_devices(cuda: torch.device) -> None:
    layer, x = nn.Linear.from_float(float_linear()), torch.randn(4, 64)
    moved = copy.deepcopy(layer).to(cuda, torch.bfloat16)
    assert same_bits(moved(x.to(cuda)).cpu(), layer(x))
    fresh = nn.Linear(64, 24)
    fresh.load_state_dict(moved.state_dict())
    assert same_state(fresh, layer)


def test_repr_names_the_scalings() -> None:
    layer = nn.Linear(64, 24, weight_scaling="tensor")
    assert repr(layer) == (
        "Linear(in_features=64, out_features=24, bias=True, activations='per-token', weight_scaling='tensor')"
    )
    assert nn.Linear(64, 24, True, None, torch.bfloat16).bias.dtype is torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layer_takes_views_that_start_anywhere(device: torch.device, backend: str) -> None:
    """A slice whose rows are not aligned to 16 bytes is accepted, as in eager mode."""
    layer = nn.Linear.from_float(float_linear(64, 24)).to(device)
    x = torch.randn(4, 68, device=device)[:, 1:65]
    want = layer(x.contiguous())
    assert torch.equal(layer(x), want)
    assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x), want)
