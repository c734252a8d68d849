"""Layers with activations="fp8" (W4A8): products, forms of the weight, fused blocks and refusals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from experts_cases import random_ids
from fp4gemm import nn
from fp4gemm.activations import by_name
from fp4gemm.nn import _weight
from fp4gemm.nn.merged import MergedLinear, one_weight
from fp4gemm.nn.norm import RMSNormQuantize, Tokens
from nn_helpers import same_bits, same_state
from torch import Tensor

F = torch.nn.functional
CODES = {"weight_codes", "weight_scales"}


def rounded(w: fp4gemm.NVFP4Tensor) -> Tensor:
    """The weight as FP8 tokens are multiplied by it: its values rounded to e4m3, in float64."""
    values = (fp4gemm.decode(w).data.float() / 8).to(torch.float8_e4m3fn).double()
    return 8 * values * w.amax.double().unsqueeze(-1) / (6 * w.e4m3_max)


def plain(x: Tensor) -> Tensor:
    """FP8 tokens, dequantized by plain torch, in float64."""
    rows = x.float()
    amax = rows.abs().amax(-1, keepdim=True)
    return (rows * torch.div(torch.tensor(448.0), amax)).to(torch.float8_e4m3fn).double() * amax / 448


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want).norm() < (torch.finfo(got.dtype).eps + 1e-6) * want.norm())


def linear(n: int = 72, k: int = 128, **options: Any) -> nn.Linear:
    torch.manual_seed(n + k)
    return nn.Linear.from_float(torch.nn.Linear(k, n, dtype=torch.bfloat16), activations="fp8", **options)


def tokens(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers prepack themselves, as on compute capability 9.0."""
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


# ---- products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_product(prepacked: bool, fast: bool, dtype: torch.dtype) -> None:
    """The first call makes the checks, the second one does not; leading sizes, an addend, given tokens."""
    layer = linear(use_fast_accum=fast)
    if prepacked:
        layer.prepack()
    x, c = tokens(3, 5, 128, dtype=dtype), tokens(3, 5, 72, dtype=dtype)
    want = plain(x) @ rounded(layer.weight).T + layer.bias.double()
    first = layer(x)
    assert first.dtype is dtype
    assert close(first, want)
    assert same_bits(layer(x), first)
    for _ in range(2):
        assert close(layer(x, c), want + c.double())
    given = layer(fp4gemm.quantize_fp8(x.view(15, 128)))
    assert given.dtype is torch.bfloat16
    assert close(given, want.view(15, 72))
    assert same_bits(layer(x[:0]), first[:0])


def test_the_operator_is_called_as_the_layer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """use_fast_accum reaches the operator from both ways, and only where it is set."""
    from fp4gemm.nn import linear as module

    seen: list[tuple[int, bool]] = []
    schema = fp4gemm.ops.linear.LinearCall

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        call = schema(*args, **kwargs)
        seen.append((call.scaling, call.use_fast_accum))
        result: Tensor = torch.ops.fp4gemm.linear(*args, **kwargs)
        return result

    monkeypatch.setattr(module, "_LINEAR", spy)
    for fast in (False, True):
        layer, x = linear(use_fast_accum=fast), tokens(2, 128)
        layer(x), layer(x), layer(x, tokens(2, 72))
        assert seen == [(3, fast)] * 3
        seen.clear()


def test_rules_are_asked_for_fp8_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that keep the sums in the tensor cores fit a layer with use_fast_accum alone."""
    from fp4gemm import selection
    from fp4gemm.nn import linear as module

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        selection, "find", lambda a, *args, use_fast_accum: asked.append((*args, use_fast_accum))
    )
    monkeypatch.setattr(module, "_RULES", [object()])
    for fast in (False, True):
        for prepacked in (False, True):
            layer = linear(use_fast_accum=fast)
            (layer.prepack() if prepacked else layer)(tokens(4, 128))
            formats = ("e4m3", "prepacked_fp8" if prepacked else "nvfp4")
            assert asked.pop() == (72, 128, torch.bfloat16, "dense", False, formats, fast)


def test_gradient_of_the_input() -> None:
    """Straight through the quantization, with the stored weight, which is not rounded to e4m3."""
    layer, x = linear().prepack(), tokens(4, 128).requires_grad_()
    with torch.enable_grad():
        y = layer(x)
        y.backward(dy := tokens(4, 72))
    assert close(x.grad, dy.double() @ layer.dequantize_weight(torch.bfloat16).double())


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_compiled(prepacked: bool) -> None:
    layer, x = linear(use_fast_accum=True), tokens(4, 128)
    if prepacked:
        layer.prepack()
    assert same_bits(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


# ---- the weight


def test_the_weight_is_that_of_other_layers() -> None:
    """The same checkpoint serves every kind of activations, prepacked or not."""
    torch.manual_seed(0)
    float_layer = torch.nn.Linear(128, 72)
    fp8, nvfp4 = (
        nn.Linear.from_float(float_layer, activations=kind)  # type: ignore[arg-type]
        for kind in ("fp8", "per-token")
    )
    assert same_state(fp8, nvfp4)
    assert same_state(fp8.prepack(), nvfp4)
    assert not CODES & {name for name, _ in fp8.named_buffers()}
    fp8.load_state_dict(linear().state_dict())
    assert same_state(fp8, linear())
    assert fp8.weight_prepacked is not None
    assert fp8.weight_prepacked.dtype is torch.int8


def saved(layer: nn.Linear) -> nn.Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    made: nn.Linear = torch.load(file, weights_only=False)
    return made


COPIES: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
    "half": lambda layer: copy.deepcopy(layer).half(),
    "to": lambda layer: copy.deepcopy(layer).to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str) -> None:
    layer, x = linear(use_fast_accum=True).prepack(), tokens(4, 128)
    twin = COPIES[how](layer)
    if how == "to":
        twin.load_state_dict(layer.state_dict())
    assert (twin.activations, twin.use_fast_accum) == ("fp8", True)
    assert same_state(twin, layer)
    assert same_bits(twin(x), layer(x))


def test_prepacked_bytes_are_written_in_place(streams: None) -> None:
    layer, other, x = linear(), linear(), tokens(4, 128)
    layer(x)
    place = layer.weight_prepacked
    assert place is not None
    assert (place.dtype, place.shape) == (torch.int8, (2 * 4608,))
    other.weight = torch.randn(72, 128)
    layer.update_(other.weight)
    assert layer.weight_prepacked is place
    assert same_bits(layer(x), other(x))
    layer.load_state_dict(linear().state_dict())
    assert layer.weight_prepacked is place
    assert same_state(layer, linear())
    layer.reset_parameters()
    assert not place.any()


def test_other_activations_get_their_own_order(streams: None) -> None:
    """The attribute may be changed before a graph is captured."""
    layer, x = linear(), tokens(4, 128)
    want = {kind: nn.Linear.from_quantized(layer.weight, layer.bias, activations=kind)(x) for kind in KINDS}  # type: ignore[arg-type]
    for kind in ("fp8", "per-token", "fp8", "a16", "per-tensor", "fp8"):
        layer.activations = kind  # type: ignore[assignment]
        assert same_bits(layer(x), want[kind]), kind
        assert layer.weight_prepacked is not None
        assert layer.weight_prepacked.dtype is (torch.int8 if kind == "fp8" else torch.uint8)
        assert same_bits(layer(x), want[kind]), kind


KINDS = ("fp8", "per-token", "per-tensor", "a16")


def test_other_activations_on_the_cpu() -> None:
    layer, x = linear().prepack(), tokens(4, 128)
    want = nn.Linear.from_quantized(layer.weight, layer.bias)(x)
    layer.activations = "per-token"
    assert same_bits(layer(x), want)
    assert layer.weight_prepacked is None


# ---- experts


def experts(activation: str = "swiglu", **options: Any) -> nn.Experts:
    torch.manual_seed(3)
    n13 = 256 if by_name[activation].is_gated else 128  # type: ignore[index]
    w13, w2 = torch.randn(4, n13, 192) / 14, torch.randn(4, 192, 128) / 11
    bias13, bias2 = torch.randn(4, n13), torch.randn(4, 192)
    return nn.Experts.from_float(
        *(w13, w2, bias13, bias2), activation=activation, activations="fp8", layout="interleaved", **options
    )


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_experts(prepacked: bool, activation: str, gen: torch.Generator) -> None:
    layer, x = experts(activation, use_fast_accum=True), tokens(6, 192)
    ids, weights = random_ids(6, 2, 4, gen), torch.rand(6, 2, generator=gen)
    want = torch.zeros(6, 192, dtype=torch.float64)
    for i in range(6):
        for j in range(2):
            e = int(ids[i, j])
            w13, w2 = rounded(layer.w13.weight[e]), rounded(layer.w2.weight[e])
            z = plain(x[i : i + 1]) @ w13.T + layer.w13.bias[e]
            h = by_name[activation](z.float()).bfloat16()  # type: ignore[index]
            want[i] += weights[i, j] * (plain(h) @ w2.T + layer.w2.bias[e])[0]
    if prepacked:
        layer.prepack()
    assert all(w._is_prepacked() is prepacked for w in (layer.w13, layer.w2))
    first = layer(x, ids, weights)
    assert (first.double() - want).norm() < 5e-3 * want.norm()  # y and the sum are rounded to bfloat16
    assert same_bits(layer(x, ids, weights), first)


def test_experts_prepack_themselves(streams: None, gen: torch.Generator) -> None:
    layer, x = experts(), tokens(6, 192)
    ids, weights = random_ids(6, 2, 4, gen), torch.rand(6, 2, generator=gen)
    want = copy.deepcopy(layer)
    layer(x, ids, weights)
    for name in ("w13", "w2"):
        packed = getattr(layer, name).weight_prepacked
        assert packed.dtype is torch.int8
        assert packed.shape[0] == 4
    assert {k: v.dtype for k, v in layer.state_dict().items()} == {
        k: v.dtype for k, v in want.state_dict().items()
    }
    place = layer.w13.weight_prepacked
    layer.update_(w13=torch.randn(4, 256, 192), layout="interleaved")
    assert layer.w13.weight_prepacked is place
    layer.activations = "per-token"
    layer(x, ids, weights)
    assert layer.w13.weight_prepacked.dtype is torch.uint8


# ---- fused blocks


@pytest.mark.parametrize("residual", [False, True], ids=["norm", "norm of a sum"])
def test_a_norm_makes_fp8_tokens(residual: bool) -> None:
    merged = one_weight([linear(72), linear(40)])
    weight = torch.nn.Parameter(torch.rand(128).bfloat16())
    norm, x = RMSNormQuantize(weight, 1e-6, merged), tokens(2, 3, 128)
    added = tokens(2, 3, 128) * 2
    made = norm(x, added) if residual else norm(x)
    found = made[0] if residual else made
    assert isinstance(found, Tokens)
    assert isinstance(found.quantized, fp4gemm.FP8Tensor)
    h = x + added if residual else x
    y = fp4gemm.reference.rms_norm(h.view(6, 128), weight, None, 1e-6)[0]
    want = plain(y) @ rounded(merged.weight).T + merged.bias.double()
    first = merged(found)
    assert close(first.view(6, -1), want)
    assert same_bits(merged(found), first)
    if residual:
        assert same_bits(made[1], h)


def test_gated_mlp() -> None:
    gate, up, down = linear(128), linear(128), linear(72)
    up.weight = torch.randn(128, 128)
    mlp, x, c = nn.GatedMLP(gate, up, down), tokens(5, 128), tokens(5, 72)
    z = [plain(x) @ rounded(layer.weight).T + layer.bias.double() for layer in (gate, up)]
    h = (F.silu(z[0].float()) * z[1].float()).bfloat16()
    want = plain(h) @ rounded(down.weight).T + down.bias.double()
    for _ in range(2):
        assert (mlp(x).double() - want).norm() < 5e-3 * want.norm()
        assert (mlp(x, c).double() - (want + c.double())).norm() < 5e-3 * want.norm()


def test_merged_layers_keep_the_options() -> None:
    merged = one_weight([linear(72, use_fast_accum=True), linear(40, use_fast_accum=True)])
    assert isinstance(merged, MergedLinear)
    assert (merged.activations, merged.use_fast_accum) == ("fp8", True)
    with pytest.raises(ValueError, match="gate and up: their use_fast_accum differs, must not"):
        nn.GatedMLP(linear(128), linear(128, use_fast_accum=True), linear(72))


# ---- refusals

NOT_FP8 = "use_fast_accum: got True with activations '{}', must be False unless they are 'fp8'"


@pytest.mark.parametrize("kind", ["per-token", "per-tensor", "a16"])
def test_use_fast_accum_needs_fp8(kind: Any) -> None:
    made = torch.nn.Linear(128, 72)
    with pytest.raises(ValueError, match=NOT_FP8.format(kind)):
        nn.Linear(128, 72, activations=kind, use_fast_accum=True)
    with pytest.raises(ValueError, match=NOT_FP8.format(kind)):
        nn.Linear.from_float(made, activations=kind, use_fast_accum=True)
    with pytest.raises(TypeError, match=r"use_fast_accum: got 1 \(int\), must be True or False"):
        nn.Linear(128, 72, activations="fp8", use_fast_accum=1)  # type: ignore[arg-type]
    if kind != "per-tensor":
        with pytest.raises(ValueError, match=NOT_FP8.format(kind)):
            nn.Experts(4, 128, 128, activations=kind, use_fast_accum=True)


def test_sizes() -> None:
    wanted = "must be a positive multiple of 64"
    with pytest.raises(ValueError, match=f"in_features: k is 96, {wanted}"):
        nn.Linear(96, 64, activations="fp8")
    with pytest.raises(ValueError, match=f"linear: in_features is 96, {wanted}"):
        nn.Linear.from_float(torch.nn.Linear(96, 64), activations="fp8")
    with pytest.raises(ValueError, match=f"hidden: k is 96, {wanted}"):
        nn.Experts(4, 96, 64, activations="fp8")
    with pytest.raises(
        ValueError, match="w13: n13, gate and up together, is 192, must be a positive multiple of"
    ):
        nn.Experts.from_float(torch.randn(2, 192, 64), torch.randn(2, 64, 96), activations="fp8")


def test_tokens_of_another_kind() -> None:
    x = tokens(4, 128)
    for kind, given, wanted in (
        ("fp8", fp4gemm.quantize(x), "a float tensor or an fp4gemm.FP8Tensor"),
        ("per-token", fp4gemm.quantize_fp8(x), "a float tensor, an fp4gemm.NVFP4Tensor or an fp4gemm.Dec"),
        ("a16", fp4gemm.quantize_fp8(x), "a bfloat16 or float16 tensor with activations 'a16'"),
    ):
        layer = linear()
        layer.activations = kind  # type: ignore[assignment]
        with pytest.raises(TypeError, match=f"x: got .*must be {wanted}"):
            layer(given)
    with pytest.raises(ValueError, match=r"x: has 1 groups \(offs\), must have none"):
        linear()(fp4gemm.quantize_fp8(x, offs=torch.tensor([4], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"x: shape is \(4, 64\), must be \(m, 128\)"):
        linear()(fp4gemm.quantize_fp8(tokens(4, 64)))


def test_experts_on_many_ranks_refuse_fp8() -> None:
    class Exchange:
        num_local_experts = num_experts = 4
        hidden = 128

        def dispatch(self) -> None: ...

        def combine(self) -> None: ...

    with pytest.raises(NotImplementedError, match="activations: got 'fp8', must be 'per-token' with ep"):
        nn.Experts(4, 128, 128, activations="fp8", ep=Exchange())  # type: ignore[arg-type]
