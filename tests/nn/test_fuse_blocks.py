"""quantize_model(fuse="auto"): gated MLPs, and norms that quantize their result."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import fp4gemm
import fuse_models
import pytest
import torch
import torch.nn.functional as F
from fp4gemm import activations, nn, reference
from fp4gemm.nn.norm import RMSNormQuantize, Tokens
from nn_helpers import Names, convert, same_bits
from torch import Tensor
from torch.nn import Linear


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def fuse(model: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, list[tuple[str, ...]], list[str]]:
    """The fused copy inside a Sequential, what was done, and the reasons why nothing was."""
    swapped, report = convert(torch.nn.Sequential(model), fuse="auto", **options)
    done = [(block.action, *block.names) for block in report.blocks if block.action != "left"]
    return swapped[0], done, [block.reason for block in report.blocks if block.action == "left"]


def by_hand(layers: list[nn.Linear], down: nn.Linear, x: Tensor) -> Tensor:
    """down(act(gate) * up) with gate and up in float32, rounded once."""
    gate, up = (
        fp4gemm.mm(
            fp4gemm.quantize(x.flatten(0, -2), scaling="row"),
            layer.weight,
            bias=layer.bias,
            out_dtype=torch.float32,
        )
        for layer in layers
    )
    h = (activations.silu(gate) * up).to(x.dtype)
    return down(h.view(*x.shape[:-1], -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_gated_mlp_rounds_once(dtype: torch.dtype, bias: bool) -> None:
    model = fuse_models.MLP(bias=bias).to(dtype)
    fused, done, _ = fuse(model)
    plain, _ = convert(model)
    assert done == [("gated", "0.w1", "0.w3", "0.w2")]
    assert isinstance(fused, nn.GatedMLP)
    for shape in ((2, 5, 64), (64,), (1, 64)):
        x = torch.randn(shape, dtype=dtype)
        if x.dim() > 1:
            assert same_bits(fused(x), by_hand([plain.w1, plain.w3], plain.w2, x))
        y, wanted = fused(x).float(), plain(x).float()
        # gate, up and silu(gate) are not rounded to the dtype, which may move h to the next e2m1 value.
        assert torch.linalg.norm(y - wanted) <= 0.1 * torch.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gate_and_up_in_halves(dtype: torch.dtype) -> None:
    """Phi-3 has gate and up in one layer, one after the other."""
    model = fuse_models.Halves().to(dtype)
    fused, done, _ = fuse(model)
    assert done == [("gated", "0.gate_up_proj", "0.down_proj")]
    layer = convert(model.gate_up_proj)[0]
    x = torch.randn(2, 5, 64, dtype=dtype)
    both = fp4gemm.mm(
        fp4gemm.quantize(x.flatten(0, 1), scaling="row"),
        layer.weight,
        bias=layer.bias,
        out_dtype=torch.float32,
    )
    h = (activations.silu(both[:, :96]) * both[:, 96:]).to(dtype)
    assert same_bits(fused(x), fused.down(h.view(2, 5, 96)))


def test_w4a16() -> None:
    model = fuse_models.MLP().to(torch.bfloat16)
    fused, done, _ = fuse(model, activations="a16")
    assert [action for action, *_ in done] == ["gated"]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    plain, _ = convert(model, activations="a16")
    y, wanted = fused(x).float(), plain(x).float()
    assert torch.linalg.norm(y - wanted) <= 0.01 * torch.linalg.norm(wanted)


def test_gated_mlp_constructor() -> None:
    gate, up, down = (nn.Linear.from_float(Linear(*shape)) for shape in ((64, 96), (64, 96), (96, 64)))
    mlp = nn.GatedMLP(gate, up, down)
    assert mlp.activation == "swiglu"
    assert sorted({key.rpartition(".")[0] for key in mlp.state_dict()}) == ["down", "gate_up"]
    x = torch.randn(3, 64)
    assert same_bits(mlp(x), by_hand([gate, up], down, x))
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert same_bits(other(x), mlp(x))
    with pytest.raises(TypeError, match=r"up: got .*Linear.*, must be an fp4gemm\.nn\.Linear"):
        nn.GatedMLP(gate, Linear(64, 96), down)
    with pytest.raises(ValueError, match="down: in_features is 64, must be 96, the out_features of gate"):
        nn.GatedMLP(gate, up, gate)
    with pytest.raises(ValueError, match="gate and up: their in_features differs"):
        nn.GatedMLP(gate, down, down)
    with pytest.raises(ValueError, match="activation: got 'silu', must be 'swiglu'"):
        nn.GatedMLP(gate, up, down, activation="silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gated_product_has_no_addend(dtype: torch.dtype) -> None:
    fused, _, _ = fuse(fuse_models.MLP().to(dtype))
    x = torch.randn(3, 64, dtype=dtype)
    with pytest.raises(NotImplementedError, match="activation: got swiglu with c, must be"):
        fused.gate_up(x, torch.zeros(3, 192, dtype=dtype))


def test_gated_state_dict() -> None:
    first, second = (fuse(fuse_models.MLP(bias=True))[0] for _ in range(2))
    x = torch.randn(3, 64)
    assert not same_bits(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert same_bits(first(x), second(x))
    plain, _ = convert(fuse_models.MLP(bias=True))
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up\.weight_codes"):
        second.load_state_dict(plain.state_dict())


class Erf(fuse_models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Sum(fuse_models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) + self.w3(x))


class OtherInput(fuse_models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = x * x
        return self.w2(F.silu(self.w1(x)) * self.w3(y))


class Dropout(fuse_models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.1, self.training)
        return self.w2(h)


class DropoutModule(fuse_models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))


class Options(fuse_models.MLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * scale


@pytest.mark.parametrize("cls", [Erf, Sum, OtherInput, Dropout, DropoutModule, Options])
def test_other_mlps_are_not_gated(cls: Callable[[], torch.nn.Module]) -> None:
    model = cls().eval()
    fused, done, reasons = fuse(model)
    assert type(fused) is type(model)
    assert not [entry for entry in done if entry[0] == "gated"]
    if cls is Erf:
        assert reasons[0].startswith("its activation, gelu, is not one of the gated ones")
    x = torch.randn(3, 64)
    # torch's own functions may differ in the last bit for a slice and a contiguous tensor.
    torch.testing.assert_close(fused(x), convert(model)[0](x))


def test_hooks_and_shared_layers_are_left_alone() -> None:
    model = fuse_models.MLP()
    model.register_forward_hook(lambda *_: None)
    _, done, reasons = fuse(model)
    assert done == [("merged", "0.w1", "0.w3")]
    assert reasons == ["it has hooks that a fused one would drop"]
    pair = torch.nn.ModuleList([fuse_models.MLP(), fuse_models.MLP()])
    pair[1].w1 = pair[0].w1
    assert "its layers are used in several places" in fuse(pair)[2]


def test_a_model_that_is_an_mlp_keeps_its_class() -> None:
    swapped, report = convert(fuse_models.MLP(), fuse="auto")
    assert type(swapped) is fuse_models.MLP
    reasons = [(block.action, block.reason) for block in report.blocks]
    assert reasons == [("left", "it is the model itself"), ("merged", "")]


# ---- norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_quantizes(dtype: torch.dtype) -> None:
    model = fuse_models.Layer().to(dtype)
    fused, done, reasons = fuse(model)
    assert done == [
        ("merged", "0.attention.q_proj", "0.attention.k_proj", "0.attention.v_proj"),
        ("gated", "0.mlp.w1", "0.mlp.w3", "0.mlp.w2"),
        ("norm", "0.norm1"),
        ("norm", "0.norm2"),
        ("residual", "0.norm2", "0.mlp"),
    ]
    assert reasons == []
    x = torch.randn(2, 5, 64, dtype=dtype)
    tokens = fused.norm1(x)
    assert isinstance(tokens, Tokens)
    assert (tokens.shape, tokens.dtype, tokens.device) == (x.shape, dtype, x.device)
    y, _ = reference.rms_norm(x.flatten(0, 1), model.norm1.weight, None, 1e-5)
    wanted = fp4gemm.quantize(y, scaling="row")
    assert same_bits(tokens.quantized.codes, wanted.codes)
    assert same_bits(tokens.quantized.amax, wanted.amax)
    # torch adds the squares in another order, which moves a rounding now and then.
    assert (y.view_as(x) != model.norm1(x)).float().mean() < 0.01
    assert same_bits(fused.attention(tokens), fused.attention(y.view_as(x)))
    assert same_bits(fused.mlp(tokens), fused.mlp(y.view_as(x)))
    plain, _ = convert(model)
    out, wanted_out = fused(x).float(), plain(x).float()
    assert torch.linalg.norm(out - wanted_out) <= 0.05 * torch.linalg.norm(wanted_out)
    assert list(fused.state_dict())[:2] == ["norm1.weight", "norm2.weight"]


def test_norm_of_float32_stays_a_tensor() -> None:
    model = fuse_models.Layer()
    fused, _, _ = fuse(model)
    x = torch.randn(2, 5, 64)
    assert isinstance(fused.norm1, RMSNormQuantize)
    assert same_bits(fused.norm1(x), model.norm1(x))


class AddsResidual(fuse_models.Layer):
    """The result of norm1 is read by the addition too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = h + self.attention(h)
        return x + self.mlp(self.norm2(x))


class Bound(fuse_models.Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states * 1
        return self.o_proj(self.q_proj(hidden_states) + self.k_proj(hidden_states).repeat(1, 1, 2))


class Reads(fuse_models.Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.mean()
        return self.o_proj(self.q_proj(hidden_states)) * mean


class Method(fuse_models.Layer):
    """A method reads the result of norm1 too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.norm1(x)) + x

    def work(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.mean()


class Unknown(fuse_models.Attention):
    """What it does with its input after its layers cannot be traced."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        q = self.q_proj(hidden_states)
        return self.o_proj(q[: len(hidden_states)])


class LayerNorm(fuse_models.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(64)


class GemmaNorm(fuse_models.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


def changed(**children: torch.nn.Module) -> torch.nn.Module:
    layer = fuse_models.Layer()
    for name, child in children.items():
        setattr(layer, name, child)
    return layer


def hooked(name: str) -> torch.nn.Module:
    layer = fuse_models.Layer()
    getattr(layer, name).register_forward_hook(lambda *_: None)
    return layer


NORMS_LEFT: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "residual": (AddsResidual, "does not pass its result to quantized layers alone"),
    "bound": (lambda: changed(attention=Bound()), "Bound, which reads its result, does more with it"),
    "reads": (lambda: changed(attention=Reads()), "Reads, which reads its result, does more with it"),
    "method": (Method, "the forward of Method does not pass its result to quantized layers alone"),
    "unknown": (lambda: changed(attention=Unknown()), "the forward of Unknown cannot be traced: "),
    "layer-norm": (LayerNorm, "LayerNorm is not the norm of fp4gemm.rms_norm_quantize"),
    "gemma": (lambda: changed(norm1=GemmaNorm()), "GemmaNorm is not the norm of fp4gemm.rms_norm_quantize"),
    "hook": (lambda: hooked("norm1"), "it has hooks that a fused one would drop"),
    "reader-hook": (lambda: hooked("attention"), "Attention, which reads its result, has hooks"),
}


@pytest.mark.parametrize("case", NORMS_LEFT)
def test_norms_that_are_left_alone(case: str) -> None:
    make, reason = NORMS_LEFT[case]
    model = make().to(torch.bfloat16)
    fused, _, reasons = fuse(model)
    assert type(fused.norm1) is type(model.norm1)
    assert [text for text in reasons if reason in text], reasons
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    assert fused(x).isfinite().all()


@pytest.mark.parametrize("activations", ["per-tensor", "a16", "per-token,four_over_six=mae"])
def test_norms_need_an_amax_for_each_token(activations: str) -> None:
    fused, done, reasons = fuse(fuse_models.Layer().to(torch.bfloat16), activations=activations)
    assert [action for action, *_ in done] == ["merged", "gated", "residual"]
    assert set(reasons) == {
        'the layers that read it do not have activations="per-token", without options of the cast, or "fp8", '
        "all of them the same"
    }
    assert fused(torch.randn(2, 5, 64, dtype=torch.bfloat16)).isfinite().all()


# ---- residuals

LAYERS = [fuse_models.Layer, fuse_models.LlamaLayer, fuse_models.NestedCalls, fuse_models.SumReturned]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cls", LAYERS)
def test_residuals_are_added_in_the_kernels(cls: type[torch.nn.Module], dtype: torch.dtype) -> None:
    model = cls().to(dtype)
    fused, done, reasons = fuse(model)
    assert done[-1] == ("residual", "0.norm2", "0.mlp")
    assert reasons == []
    assert isinstance(fused, cls)
    x = torch.randn(2, 5, 64, dtype=dtype)
    # The forward of the model with the fused children, up to the product of down.
    total = x + fused.attention(fused.norm1(x))
    h = fused.mlp.gate_up(fused.norm2(total))
    wanted = fp4gemm.mm(
        fp4gemm.quantize(h.flatten(0, 1), scaling="row"),
        fused.mlp.down.weight,
        c=total.flatten(0, 1),
        out_dtype=dtype,
    )
    assert same_bits(fused(x), wanted.view_as(x))
    # down(h) alone is not rounded.
    y = cls.forward(fused, x).float()
    assert torch.linalg.norm(fused(x).float() - y) <= 0.01 * torch.linalg.norm(y)


def test_operators_of_a_layer() -> None:
    """Two norms that quantize, and four products, from the first call on."""
    fused, _, _ = fuse(fuse_models.LlamaLayer().to(torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    y = fused(x)
    for _ in range(2):
        with Names() as names:
            assert same_bits(fused(x), y)
        assert [name for name in names.seen if name.startswith("fp4gemm.")] == [
            "fp4gemm.rms_norm_quantize.default",
            "fp4gemm.linear.default",
            "fp4gemm.linear.default",
            "fp4gemm.rms_norm_quantize.default",
            "fp4gemm.linear.default",
            "fp4gemm.linear.default",
        ]
        assert not [name for name in names.seen if name.startswith("aten.add")]


def test_a_fused_model_is_not_fused_again() -> None:
    fused, _, _ = fuse(fuse_models.Layer().to(torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    again, report = convert(fused, fuse="auto")
    assert report.blocks == ()
    assert same_bits(again(x), fused(x))


def test_addition_before_a_norm_rounds_as_before() -> None:
    model = changed(mlp=Erf()).to(torch.bfloat16)
    fused, done, _ = fuse(model)
    assert done[-1] == ("residual", "0.norm2")
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    assert same_bits(fused(x), fuse_models.Layer.forward(fused, x))


def test_arguments_stay() -> None:
    model = fuse_models.LlamaLayer().to(torch.bfloat16)
    fused, _, _ = fuse(model)
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    assert same_bits(fused(x), fused(hidden_states=x, scale=1.0, flag=True))
    assert not same_bits(fused(x), fused(x, 2.0))
    source = inspect.getsource(fused.forward)
    assert "def forward(self, hidden_states, scale=None, *, flag=None):" in source
    assert "self.norm2(residual = hidden_states, x = mul)" in source


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("cls", LAYERS)
def test_copies_of_a_layer(cls: type[torch.nn.Module], copied: Callable[..., Any]) -> None:
    fused, _, _ = fuse(cls().to(torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    other = copied(fused)
    assert type(other) is type(fused)
    assert same_bits(other(x), fused(x))
    assert other.mlp is not fused.mlp


def test_other_shapes_and_types_of_a_residual() -> None:
    fused, _, _ = fuse(fuse_models.Layer().to(torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    for residual in (torch.randn(64, dtype=torch.bfloat16), torch.randn(2, 5, 64), 1.0):
        tokens, total = fused.norm2(x, residual)
        assert same_bits(total, residual + x)
        alone = fused.norm2(total)
        if isinstance(alone, Tokens):
            assert same_bits(tokens.quantized.codes, alone.quantized.codes)
        else:
            assert same_bits(tokens, alone)
    for residual in (torch.randn(64, dtype=torch.bfloat16), torch.randn(2, 5, 64)):
        assert same_bits(fused.mlp(x, residual), residual + fused.mlp(x))


def test_the_input_of_a_gated_mlp_keeps_its_name() -> None:
    fused, _, _ = fuse(fuse_models.Halves())
    x = torch.randn(3, 64)
    assert fused.input_name == "x"
    with pytest.raises(TypeError, match=r"x: got the arguments \['hidden'\], must be one, x"):
        fused(hidden=x)
    with pytest.raises(TypeError, match=r"x: got the arguments \[\], must be one"):
        fused()
    fused.input_name = "hidden"
    assert same_bits(fused(hidden=x), fused(x))


def test_on_the_device(device: torch.device) -> None:
    """Eager, in later calls without checks, and replayed in a CUDA graph; near to the CPU's result."""
    model = fuse_models.LlamaLayer().to(torch.bfloat16)
    on_cpu, _, _ = fuse(model)
    fused, _, _ = fuse(model.to(device))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    place = x.to(device)
    y = fused(place)
    for _ in range(2):
        assert same_bits(fused(place), y)
    wanted = on_cpu(x).float()
    assert torch.linalg.norm(y.cpu().float() - wanted) <= 0.05 * torch.linalg.norm(wanted)
    if device.type != "cuda":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(place)
    place.copy_(-2 * x)
    graph.replay()
    assert same_bits(captured.clone(), fused(place))


class Straight(fuse_models.Layer):
    """The forward of all cases below, which adds a residual after the MLP."""

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


class Branching(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Optional(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return super().forward(x if mask is None else x * mask)


class Keyword(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return super().forward(x * more["factor"] if "factor" in more else x)


class Autocast(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().forward(x)


class Stores(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class Collects(Straight):
    """It keeps values in its own list and in one of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Any]] = {"inputs": []}
        self.attention.kept = []  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        self.kept["inputs"].append(x)
        self.attention.kept.append(x)  # type: ignore[operator, union-attr]
        return super().forward(x)


class Single(Straight):
    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        sizes = (*x.shape,)
        return super().forward(x * sizes[0])


class AfterNorm(fuse_models.Layer):
    """A norm after the MLP, as in OLMo 2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attention(x))
        return x + self.norm2(self.mlp(x))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Branching, "the forward of Branching cannot be replaced: it branches on a value"),
        (Optional, "the forward of Optional cannot be replaced: it depends on whether mask is given"),
        (Keyword, "the forward of Keyword cannot be replaced: it depends on whether factor is given"),
        (Autocast, "the forward of Autocast cannot be replaced: it enters a context of torch"),
        (Stores, "the forward of Stores cannot be replaced: it sets attributes of the module"),
        (Collects, "the forward of Collects cannot be replaced: it changes a list of the module"),
        (Single, "the forward of Single cannot be replaced: it takes single values out of a sequence"),
        (AfterNorm, "the forward of AfterNorm does not add their results to a residual"),
    ],
)
def test_layers_that_keep_their_forward(cls: type[torch.nn.Module], reason: str) -> None:
    fused, _, reasons = fuse(cls().to(torch.bfloat16))
    assert [text for text in reasons if text.startswith(reason)], reasons
    assert type(fused) is cls


def test_lists_of_a_model_hold_no_proxies() -> None:
    layer = Collects().to(torch.bfloat16)
    fp4gemm.models.quantize_model(layer, fuse="auto")
    assert layer.kept == {"inputs": []}
    assert layer.attention.kept == []


def test_norms_and_activations_that_keep_values() -> None:
    """They are not replaced, and hold nothing of the traces."""

    class Norm(fuse_models.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            self.kept.append(x)
            return super().forward(x)

    class Act(torch.nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            self.kept.append(x)
            return super().forward(x)

    layer = Straight()
    layer.norm2, layer.mlp = Norm(), fuse_models.Halves()  # type: ignore[assignment]
    layer.mlp.act = Act()
    layer.norm2.kept, layer.mlp.act.kept = [], []  # type: ignore[assignment]
    layer.to(torch.bfloat16)
    fp4gemm.models.quantize_model(layer, fuse="auto")
    assert (type(layer.norm2), type(layer.mlp)) == (Norm, fuse_models.Halves)
    assert (layer.norm2.kept, layer.mlp.act.kept) == ([], [])


def test_a_forward_that_is_written_by_torch_fx() -> None:
    """Stars of values and keywords; training and floats of the module are read when it runs."""

    class Layer(fuse_models.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.after = After()

        def forward(self, x: Tensor, *, times: float = 1.0, **more: Any) -> Tensor:
            x = x.view(*x.shape[:-1], -1) * self.scale
            x = x + self.mlp(x)
            return self.after(F.dropout(x, 0.5, self.training), times, **more)

    class After(torch.nn.Module):
        def forward(self, x: Tensor, times: float, plus: float = 0.0) -> Tensor:
            return x * times + plus

    model = Layer().to(torch.bfloat16).eval()
    fused, done, _ = fuse(model)
    assert done[-1] == ("residual", "0.mlp")
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    y = fused(x)
    assert same_bits(y, fused.mlp(2 * x, 2 * x))
    assert same_bits(fused(x, times=3.0, plus=1.0), y * 3 + 1)
    fused.scale = 1.0
    assert same_bits(fused(x), fused.mlp(x, x))
    fused.train()
    torch.manual_seed(1)
    assert (fused(x) == 0).float().mean() > 0.3
    with pytest.raises(TypeError, match="positional argument"):
        fused(x, 3.0)


@pytest.mark.parametrize("cls", LAYERS)
def test_compiled_layer(cls: type[torch.nn.Module]) -> None:
    fused, _, _ = fuse(cls().to(torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    y = fused(x)
    targets: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if "fp4gemm." in str(node.target))
        return graph

    assert same_bits(torch.compile(fused, fullgraph=True, backend=backend)(x), y)
    assert targets.count("fp4gemm.rms_norm_quantize.default") == 2
    products = [t for t in targets if t in ("fp4gemm.gemm.default", "fp4gemm.linear.default")]
    assert len(products) == 4, "qkv, o, gate and up, down"
    program = torch.export.export(fused, (x,))
    assert same_bits(program.module()(x), y)
