"""The operator linear: the bits of quantize and mm, for every form of x and of the weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from bad_linear import CALL, CASES, Case
from fp4gemm import DecodedTensor, NVFP4Tensor
from helpers import FLOATS, assert_bits, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

N, K = 48, 64
SCALINGS = {"none": 0, "row": 1, "tensor": 2}
LEADS = [(), (1,), (33,), (2, 3), (4, 1, 5), (0,), (3, 0)]
linear = torch.ops.fp4gemm.linear


def streams_prepacked(device: torch.device) -> bool:
    return device.type == "cpu" or fp4gemm.support.streams_prepacked(device)


@pytest.fixture(params=["codes", "prepacked"])
def form(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "prepacked" and not streams_prepacked(device):
        pytest.skip(f"{device} does not read prepacked weights")
    return str(request.param)


@pytest.fixture
def weight(device: torch.device, gen: torch.Generator) -> NVFP4Tensor:
    return fp4gemm.quantize(make("normal", N, K, torch.bfloat16, gen).to(device))


def given(w: NVFP4Tensor, form: str = "codes") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a weight: those with a place from ``weight`` on, and those with a name."""
    if form == "codes":
        return (w.codes, w.scales, w.amax), {"weight_e4m3_max": w.e4m3_max}
    data = fp4gemm.prepack(w).data
    return (data, None, w.amax), {"weight_rows": w.shape[0], "weight_e4m3_max": w.e4m3_max}


def expected(x: Tensor, w: NVFP4Tensor, scaling: str = "row", **terms: Any) -> Tensor:
    """What quantize and mm make of the rows of x."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    left: Any = rows.contiguous() if scaling == "none" else fp4gemm.quantize(rows, scaling=scaling)
    if terms.get("c") is not None:
        terms["c"] = terms["c"].reshape(len(rows), -1).clone()
    terms.setdefault("out_dtype", x.dtype)
    y = fp4gemm.mm(left, w, **terms)
    return y.view(*x.shape[:-1], y.shape[1])


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_equals_quantize_and_mm(
    scaling: str,
    dtype: torch.dtype,
    form: str,
    weight: NVFP4Tensor,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    if scaling == "none" and (dtype is torch.float32 or not streams_prepacked(device)):
        pytest.skip("tokens that are not quantized are bf16 or fp16, for kernels that read prepacked weights")
    positional, named = given(weight, form)
    bias = torch.randn(N, generator=gen).to(device)
    for lead in LEADS:
        x = torch.randn(*lead, K, generator=gen).to(dtype).to(device)
        got = linear(x, *positional, bias, scaling=SCALINGS[scaling], **named)
        assert_bits(got, expected(x, weight, scaling, bias=bias), f"x {tuple(x.shape)}")
        assert got.is_contiguous()


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("activation", fp4gemm.activations.ACTIVATIONS, ids=lambda a: str(a.name))
def test_terms(
    activation: Any,
    out_dtype: torch.dtype,
    form: str,
    weight: NVFP4Tensor,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    """Activation, addend and output type as of mm; an addend may have any strides."""
    if activation.is_gated and out_dtype is torch.float32:
        pytest.skip("gated activations write bf16 or fp16")
    positional, named = given(weight, form)
    x = torch.randn(2, 5, K, generator=gen).bfloat16().to(device)
    terms: dict[str, Any] = {"out_dtype": out_dtype}
    if not activation.is_gated:
        wide = torch.randn(2, 5, 2 * N, generator=gen).to(out_dtype).to(device)
        addends = [wide[..., :N], wide[..., 1 : N + 1], wide[:, :, :N].transpose(0, 1).contiguous()]
        for c in (*addends[:2], addends[2].transpose(0, 1)):
            got = linear(x, *positional, c=c, beta=0.5, activation=activation.number, **named, **terms)
            want = expected(x, weight, c=c, beta=0.5, activation=activation.name, **terms)
            assert_bits(got, want, f"c with strides {c.stride()}")
    got = linear(x, *positional, activation=activation.number, **named, **terms)
    assert_bits(got, expected(x, weight, activation=activation.name, **terms), "without c")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_strides_of_x(
    dtype: torch.dtype, form: str, weight: NVFP4Tensor, device: torch.device, gen: torch.Generator
) -> None:
    """x may be a slice, transposed, expanded or not aligned."""
    positional, named = given(weight, form)
    wide = torch.randn(4, 6, 2 * K, generator=gen).to(dtype).to(device)
    flat = torch.randn(6 * K + 1, generator=gen).to(dtype).to(device)
    for x in (
        wide[..., :K],
        wide[..., 3 : K + 3],
        wide[..., ::2],
        wide[:, ::2, :K],
        wide[..., :K].transpose(0, 1),
        wide[:1, :1, :K].expand(3, 5, K),
        flat[1:].view(6, K),
        flat[: 6 * K].view(K, 6).t(),
    ):
        assert_bits(linear(x, *positional, **named), expected(x, weight), f"{x.shape}, {x.stride()}")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("decoded", [False, True], ids=["codes", "decoded"])
def test_x_that_was_quantized(
    decoded: bool,
    scaling: Any,
    form: str,
    weight: NVFP4Tensor,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    """One quantized x serves several layers; the dimensions before the last one are still free."""
    if decoded and not streams_prepacked(device):
        pytest.skip(f"{device} does not read decoded operands")
    positional, named = given(weight, form)
    x = make("normal", 12, K, torch.bfloat16, gen).to(device)
    a = fp4gemm.quantize(x, scaling=scaling, decoded=decoded)
    data, scales = (a.data, None) if isinstance(a, DecodedTensor) else (a.codes, a.scales)
    for lead in ((12,), (3, 4), (2, 1, 6)):
        got = linear(data.view(*lead, -1), *positional, x_scales=scales, x_amax=a.amax, **named)
        assert_bits(got, fp4gemm.mm(a, weight).view(*lead, N), str(lead))
    got = linear(
        data, *positional, x_scales=scales, x_amax=a.amax, x_e4m3_max=448, out_dtype=x.dtype, **named
    )
    assert_bits(got, expected(x, weight, scaling), "as x itself")


def test_bounds(form: str, device: torch.device, gen: torch.Generator) -> None:
    """An operand whose scales were made with the bound 256."""
    options: Any = {"scaling": "row", "four_over_six": "mse", "e4m3_max": 256}
    w = fp4gemm.quantize(make("normal", N, K, torch.bfloat16, gen).to(device), **options)
    x = make("normal", 7, K, torch.bfloat16, gen).to(device)
    positional, named = given(w, form)
    assert named["weight_e4m3_max"] == 256
    assert_bits(linear(x, *positional, **named), expected(x, w), "weight")
    a = fp4gemm.quantize(x, **options)
    got = linear(a.codes, *positional, x_scales=a.scales, x_amax=a.amax, x_e4m3_max=256, **named)
    assert_bits(got, fp4gemm.mm(a, w), "both")
    if streams_prepacked(device):
        assert_bits(linear(x, *positional, scaling=0, **named), expected(x, w, "none"), "W4A16")


def test_batch_invariant(form: str, weight: NVFP4Tensor, device: torch.device, gen: torch.Generator) -> None:
    positional, named = given(weight, form)
    x = make("normal", 130, K, torch.bfloat16, gen).to(device)
    every = linear(x, *positional, batch_invariant=True, **named)
    for m in (1, 5, 64):
        assert_bits(linear(x[:m], *positional, batch_invariant=True, **named), every[:m], f"m = {m}")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_opcheck(
    dtype: torch.dtype, form: str, weight: NVFP4Tensor, device: torch.device, gen: torch.Generator
) -> None:
    positional, named = given(weight, form)
    bias = torch.randn(N, generator=gen).to(device)
    x = torch.randn(2, 3, K, generator=gen).to(dtype).to(device)
    opcheck("linear", x, *positional, bias, **named)
    opcheck("linear", x[:, :0], *positional, scaling=2, activation=1, **named)
    a = fp4gemm.quantize(x.view(6, K))
    opcheck("linear", a.codes, *positional, x_scales=a.scales, x_amax=a.amax, out_dtype=dtype, **named)
    if dtype is not torch.float32:
        opcheck("linear", x, *positional, activation=4, **named)
        assert_fake_is_real("linear", x, *positional, activation=4, **named)
    assert_fake_is_real("linear", x.transpose(0, 1), *positional, **named)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(
    backend: str,
    dynamic: bool,
    form: str,
    weight: NVFP4Tensor,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    positional, named = given(weight, form)

    def layer(x: Tensor) -> Tensor:
        y: Tensor = linear(x * 2, *positional, **named)
        return torch.relu(y)

    run: Callable[[Tensor], Tensor] = compiled(layer, ready(backend), dynamic)
    for lead in ((2, 3), (2, 5), (1, 1)):
        x = torch.randn(*lead, K, generator=gen).bfloat16().to(device)
        assert_bits(run(x), layer(x), str(lead))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_of_any_number_of_tokens(
    strict: bool, form: str, weight: NVFP4Tensor, device: torch.device, gen: torch.Generator
) -> None:
    torch._dynamo.reset()
    positional, named = given(weight, form)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = linear(x, *positional, **named)
            return y

    x = torch.randn(3, 4, K, generator=gen).bfloat16().to(device)
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Layer(), (x,), dynamic_shapes=shapes, strict=strict)
    assert "fp4gemm.linear.default" in {str(node.target) for node in program.graph.nodes}
    run = program.module()
    for lead in ((3, 4), (1, 9), (7, 1)):
        x = torch.randn(*lead, K, generator=gen).bfloat16().to(device)
        assert_bits(run(x), Layer()(x), str(lead))


def test_flops(form: str, weight: NVFP4Tensor, device: torch.device) -> None:
    positional, named = given(weight, form)
    x = torch.ones(2, 5, K, device=device)
    a = fp4gemm.quantize(x.view(10, K))
    for call in (
        lambda: linear(x, *positional, **named),
        lambda: linear(a.codes, *positional, x_scales=a.scales, x_amax=a.amax, **named),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * 10 * N * K


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_bad_arguments_of_a_traced_call(case: Case) -> None:
    """The fake implementation refuses with the words of the CPU; tests/bad_input has the CPU."""
    name = case.kind.split("-")[0]
    if name == "kernel_name" or case.kind == "x-grad":
        pytest.skip("a kernel is looked up, and a gradient refused, when the graph runs")
    if case.error is TypeError and (case.kind.endswith("type") or name == "batch_invariant"):
        pytest.skip("torch itself refuses an argument that is not of the type of the schema")
    call = {**CALL, **case.change()}
    call = {key: v.to("meta") if isinstance(v, Tensor) else v for key, v in call.items()}
    with pytest.raises(case.error, match=re.escape(f"{case.name}: ")) as raised:
        linear(**call)
    assert case.says in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_e4m3_max": 300}, "weight_e4m3_max: .* 300, must be 448 or 256"),
        ({"weight_rows": -8}, "weight_rows: .* -8, must be "),
        ({"weight_rows": N}, "weight_scales: .*must be None for a prepacked"),
        ({"weight_scales": None}, "weight_scales: .* None, must be given unless .* is prepacked"),
        ({"x": torch.ones(3, 32)}, f"weight: k is {K}, must be 32"),
    ],
    ids=["bound", "rows", "scales", "no scales", "k"],
)
def test_bad_weights(
    changed: dict[str, Any], message: str, weight: NVFP4Tensor, device: torch.device
) -> None:
    """A GPU has checks of its own in C++."""
    names = ("weight", "weight_scales", "weight_amax")
    call = {
        "x": torch.ones(3, K),
        **dict(zip(names, given(weight)[0], strict=True)),
        **changed,
    }
    call["x"] = call["x"].to(device)
    with pytest.raises((RuntimeError, ValueError), match=message):
        linear(**call)


def test_devices_differ() -> None:
    w = fp4gemm.quantize(torch.ones(N, K))
    with pytest.raises(ValueError, match="weight: device is meta, must be cpu, the device of x"):
        fp4gemm.ops.operators.linear(torch.ones(3, K).bfloat16(), w.codes.to("meta"), w.scales, w.amax)
