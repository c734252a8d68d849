"""Prepacked weights and 16-bit activations: containers, products, operators."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, PrepackedTensor, reference, support
from helpers import FLOATS, assert_bits, make, make_codes, make_scales, short
from moe import ROUTINGS, rows_of
from op_checks import assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

# (n, k): whole chunks of 64 x 64, a part of one, and slightly more than several.
SIZES = [(64, 64), (8, 32), (72, 96), (136, 2880), (264, 160)]
PLAIN = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def weight(n: int, k: int, gen: torch.Generator, g: int = 0, e4m3_max: int = 448) -> NVFP4Tensor:
    """A weight with every code and scale and an amax for each row; a stack of g if g is not 0."""
    rows = max(g, 1) * n
    codes, scales = make_codes(rows, k, gen), make_scales(rows, k, gen)
    amax = torch.rand(rows, generator=gen) + 0.5
    if g == 0:
        return NVFP4Tensor.from_compact(codes, scales, amax, e4m3_max)
    parts = codes.view(g, n, -1), scales.view(g, n, -1), amax.view(g, n)
    return NVFP4Tensor.from_compact(*parts, e4m3_max)


def assert_same(actual: NVFP4Tensor, expected: NVFP4Tensor) -> None:
    for name in ("codes", "scales", "amax"):
        assert_bits(getattr(actual, name), getattr(expected, name), name)
    about = [(t.shape, t.e4m3_max, t.offs, t.hadamard_signs) for t in (actual, expected)]
    assert about[0] == about[1]


# ---- containers


@pytest.mark.parametrize("g", [0, 1, 3], ids=["matrix", "stack1", "stack3"])
@pytest.mark.parametrize(("n", "k"), [*SIZES, (3, 16)], ids=str)
def test_unprepack_restores_every_byte(
    n: int, k: int, g: int, device: torch.device, gen: torch.Generator
) -> None:
    w = weight(n, k, gen, g).to(device)
    p = fp4gemm.prepack(w)
    size = -(-n // 64) * -(-k // 64) * 2304
    assert p.shape == w.shape
    assert (p.data.shape, p.data.dtype) == ((g, size) if g else (size,), torch.uint8)
    assert p.nbytes == max(g, 1) * (size + 4 * n)
    assert p.device == w.device
    assert p.amax is w.amax
    assert_same(fp4gemm.unprepack(p), w)
    for dtype in FLOATS:
        assert_bits(p.dequantize(dtype), w.dequantize(dtype), short(dtype))
    again = PrepackedTensor(p.data, p.amax, p.shape, p.e4m3_max, p.hadamard_signs)
    assert_same(fp4gemm.unprepack(again), w)


def test_numbers_are_carried_along(gen: torch.Generator) -> None:
    rotated = fp4gemm.quantize(torch.randn(8, 32, generator=gen), hadamard="bf16", hadamard_signs=7)
    assert_same(fp4gemm.unprepack(fp4gemm.prepack(rotated)), rotated)
    assert fp4gemm.prepack(weight(8, 32, gen, e4m3_max=256)).e4m3_max == 256


def test_matrices_of_a_stack(gen: torch.Generator) -> None:
    w = weight(40, 96, gen, 3)
    p = fp4gemm.prepack(w)
    for e in (0, 2, -1):
        assert_same(fp4gemm.unprepack(p[e]), w[e])
        assert p[e].data.data_ptr() == p.data[e].data_ptr()
    with pytest.raises(IndexError, match=r"^e: got 3, must be below 3"):
        p[3]
    with pytest.raises(TypeError, match=r"^e: got '0' \(str\), must be an int"):
        p["0"]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"^t\[e\]: shape is \(40, 96\), must be \(g, n, k\)"):
        p[0][0]


def test_copies_and_moves(gen: torch.Generator) -> None:
    w = weight(40, 96, gen)
    p = fp4gemm.prepack(w)
    assert p.to("cpu") is p
    away = p.to("meta")
    assert (away.device.type, away.shape, away.data.shape) == ("meta", p.shape, p.data.shape)
    for copied in (p.clone(), copy.deepcopy(p)):
        assert_same(fp4gemm.unprepack(copied), w)
        assert copied.data.data_ptr() != p.data.data_ptr()
        assert copied.amax.data_ptr() != p.amax.data_ptr()


def test_what_is_saved_is_the_ordinary_form(gen: torch.Generator) -> None:
    """Files have no prepacked bytes, whose order may change with the version."""
    w = weight(72, 96, gen, 2)
    p = fp4gemm.prepack(w)
    restored = pickle.loads(pickle.dumps(p))
    assert isinstance(restored, PrepackedTensor)
    assert_same(fp4gemm.unprepack(restored), w)
    buffer = io.BytesIO()
    torch.save({"w": p}, buffer)
    assert p.data.numpy().tobytes()[:512] not in buffer.getvalue()
    assert w.codes.numpy().tobytes()[:512] in buffer.getvalue()
    buffer.seek(0)
    assert_same(fp4gemm.unprepack(torch.load(buffer, weights_only=False)["w"]), w)


def test_repr_and_pytree(gen: torch.Generator) -> None:
    from torch.utils import _pytree as pytree

    p = fp4gemm.prepack(weight(40, 96, gen, 2))
    assert repr(p) == "PrepackedTensor(shape=(2, 40, 96), amax=(2, 40), e4m3_max=448, device='cpu')"
    w = fp4gemm.prepack(weight(40, 64, gen), fp8=True)
    assert repr(w) == "PrepackedTensor(shape=(40, 64), amax=(40,), e4m3_max=448, fp8=True, device='cpu')"
    leaves, spec = pytree.tree_flatten(p)
    assert leaves == [p.data, p.amax] or all(x is y for x, y in zip(leaves, (p.data, p.amax), strict=True))
    back = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert (back.shape, back.e4m3_max, back.hadamard_signs) == (p.shape, 448, None)


# ---- products


@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_mm_equals_that_of_the_ordinary_weight(n: int, k: int, m: int, gen: torch.Generator) -> None:
    w = fp4gemm.quantize(make("normal", n, k, torch.bfloat16, gen))
    a = fp4gemm.quantize(make("normal", m, k, torch.bfloat16, gen))
    p = fp4gemm.prepack(w)
    bias = torch.randn(n, generator=gen)
    for left in (a, fp4gemm.decode(a)):
        for dtype in FLOATS:
            assert_bits(fp4gemm.mm(left, p, out_dtype=dtype), fp4gemm.mm(a, w, out_dtype=dtype), short(dtype))
        c = torch.randn(m, n, generator=gen).bfloat16()
        terms: dict[str, Any] = {"bias": bias, "activation": "silu", "c": c, "beta": -0.5}
        want = fp4gemm.mm(a, w, **terms)
        assert_bits(fp4gemm.mm(left, p, **terms), want, "every term")
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        assert fp4gemm.fprop(left, p, out=out, **terms) is out
        assert_bits(out, want, "out")
        if n % 16 == 0:
            gated = fp4gemm.mm(left, p, bias=bias, activation="swiglu", batch_invariant=True)
            assert_bits(gated, fp4gemm.mm(a, w, bias=bias, activation="swiglu"), "gated")


def unquantized(x: Tensor, w: NVFP4Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """cast(fl(alpha * fl(amax_b * fl(acc))) + bias); acc in float64 is exact for bf16 by 6 bits."""
    acc = x.double() @ reference.decode(w.codes, w.scales).double().T
    alpha = torch.tensor(1.0) / torch.tensor(6.0 * w.e4m3_max)
    z = alpha * (w.amax * acc.float())
    return (z if bias is None else z + bias).to(dtype)


@pytest.mark.parametrize("bound", [448, 256])
@pytest.mark.parametrize("dtype", PLAIN, ids=short)
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_activations_that_are_not_quantized(
    n: int, k: int, dtype: torch.dtype, bound: int, gen: torch.Generator
) -> None:
    w = weight(n, k, gen, e4m3_max=bound)
    x = make("normal", 33, k, dtype, gen)
    bias = torch.randn(n, generator=gen)
    for right in (fp4gemm.prepack(w), w):
        for out_dtype in FLOATS:
            got = fp4gemm.mm(x, right, bias=bias, out_dtype=out_dtype)
            assert_bits(got, unquantized(x, w, out_dtype, bias), short(out_dtype))
    raw = fp4gemm.scaled_mm(
        x, w.codes, None, w.scales, alpha=1 / (6 * bound), alpha_col=w.amax, out_dtype=torch.float32
    )
    assert_bits(raw, unquantized(x, w, torch.float32), "raw")
    if dtype is torch.float16:
        assert_bits(fp4gemm.mm(x, fp4gemm.decode(w)), fp4gemm.mm(x, w), "decoded")


def test_values_and_activations_are_close_to_float(gen: torch.Generator) -> None:
    """W4A16 has the quantization error of the weight alone."""
    x, w = torch.randn(64, 512, generator=gen).bfloat16(), torch.randn(48, 512, generator=gen)
    p = fp4gemm.prepack(fp4gemm.quantize(w))
    exact = x.double() @ w.double().T
    plain, both = fp4gemm.mm(x, p), fp4gemm.mm(fp4gemm.quantize(x), p)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (plain, both)]
    assert 0.05 < errors[0] < 0.11 < errors[1] < 0.16


@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_mm(routing: str, gen: torch.Generator) -> None:
    case = rows_of(ROUTINGS[routing], 40, 96, CPU, gen, loose=3)
    p, rows = fp4gemm.prepack(case.b), sum(ROUTINGS[routing])
    bias = torch.randn(p.shape[0], 40, generator=gen)
    want = fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation="relu2")
    for left in (case.a, fp4gemm.decode(case.a)):
        got = fp4gemm.grouped_mm(left, p, bias=bias, activation="relu2")
        assert_bits(got[:rows], want[:rows], "D")
    for dtype in PLAIN:
        x = case.x.to(dtype)
        out = torch.full((rows + 3, 40), torch.nan)
        for right in (p, case.b):
            out.fill_(torch.nan)
            fp4gemm.grouped_mm(x, right, case.offs, bias=bias, out=out)
            assert out[rows:].isnan().all()
            begin = 0
            for e, end in enumerate(case.ends):
                part = unquantized(x[begin:end], case.b[e], torch.float32, bias[e])
                assert_bits(out[begin:end], part, f"group {e}")
                begin = end
        raw = fp4gemm.scaled_grouped_mm(
            x,
            case.b.codes,
            None,
            case.b.scales,
            case.offs,
            alpha=1 / 2688,
            alpha_col=case.b.amax,
            bias=bias,
            out_dtype=torch.float32,
        )
        assert_bits(raw[:rows], out[:rows], "raw")
    decoded = fp4gemm.decode(case.b)
    assert_bits(
        fp4gemm.fprop(case.x.half(), decoded, offs=case.offs)[:rows],
        fp4gemm.fprop(case.x.half(), p, offs=case.offs)[:rows],
        "decoded",
    )


def test_one_group_is_dense(gen: torch.Generator) -> None:
    p = fp4gemm.prepack(weight(40, 96, gen, 1))
    x = make("normal", 17, 96, torch.bfloat16, gen)
    ends = torch.tensor([17], dtype=torch.int32)
    assert_bits(fp4gemm.grouped_mm(x, p, ends), fp4gemm.mm(x, p[0]), "D")


def test_scaling_a_row_by_a_power_of_two_changes_only_it(gen: torch.Generator) -> None:
    p = fp4gemm.prepack(weight(40, 96, gen))
    x = make("normal", 5, 96, torch.bfloat16, gen)
    want = fp4gemm.mm(x, p)
    x[2] *= 8
    want[2] *= 8
    assert_bits(fp4gemm.mm(x, p), want, "D")


# ---- operators


def operator_arguments(device: torch.device, gen: torch.Generator) -> dict[str, tuple[Any, ...]]:
    """The first arguments of gemm on prepacked weights, up to offs."""
    w, stack = weight(24, 96, gen).to(device), weight(24, 96, gen, 2).to(device)
    x = make("normal", 9, 96, torch.bfloat16, gen).to(device)
    a = fp4gemm.quantize(x)
    offs = torch.tensor([4, 9], dtype=torch.int32, device=device)
    data = fp4gemm.prepack(w).data
    return {
        "packed": (a.codes, data, a.scales, None),
        "decoded": (x.half(), data, None, None),
        "bf16": (x, data, None, None),
        "groups": (x, fp4gemm.prepack(stack).data, None, None, offs),
    }


@pytest.mark.parametrize("form", ["packed", "decoded", "bf16", "groups"])
def test_operators_pass_opcheck(form: str, device: torch.device, gen: torch.Generator) -> None:
    if device.type == "cuda" and not support.streams_prepacked(
        torch.device("cuda", torch.cuda.current_device()), tokens="16-bit"
    ):
        pytest.skip("the device does not read prepacked weights")
    operands = operator_arguments(device, gen)[form]
    terms = {"alpha": 0.5, "b_rows": 24}
    assert_fake_is_real("gemm", *operands, **terms)
    opcheck("gemm", *operands, **terms)
    out = torch.empty(9, 24, dtype=torch.float16, device=device)
    opcheck("gemm_out", *operands, **terms, out=out)


def test_operators_refuse_what_does_not_fit(gen: torch.Generator) -> None:
    made = operator_arguments(CPU, gen)
    a, b, scale_a, _ = made["packed"]

    def call(b: Tensor, scale_b: Tensor | None, b_rows: int) -> Tensor:
        return torch.ops.fp4gemm.gemm(a, b, scale_a, scale_b, b_rows=b_rows)

    for device in ("cpu", "meta"):
        if device == "meta":
            a, scale_a = a.to("meta"), scale_a.to("meta")
        good = b.to(device)
        assert call(good, None, 24).shape == (9, 24)
        with pytest.raises(
            ValueError, match=r"^b: shape is \(4608,\), must have 9216 bytes a matrix, prepac"
        ):
            call(good, None, 72)
        with pytest.raises(ValueError, match=r"^b_rows: got -8, must be at least 0"):
            call(good, None, -8)
        with pytest.raises(ValueError, match=r"^scale_b: got .* must be None because b is prepacked"):
            call(good, scale_a, 24)
        with pytest.raises(ValueError, match=r"^b: shape is \(1, 4608\), must have rank 1, \(bytes,\)"):
            call(good.view(1, -1), None, 24)
        with pytest.raises(TypeError, match=r"^b: dtype is torch.int8, must be torch.uint8"):
            call(good.view(torch.int8), None, 24)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, gen: torch.Generator) -> None:
    """Graphs accept and return prepacked weights, also with 16-bit activations."""
    w = fp4gemm.quantize(make("normal", 24, 96, torch.bfloat16, gen))
    p = fp4gemm.prepack(w)
    x = make("normal", 9, 96, torch.bfloat16, gen)

    def layer(x: Tensor, w: NVFP4Tensor, p: PrepackedTensor) -> tuple[Tensor, Tensor, PrepackedTensor]:
        made = fp4gemm.prepack(w)
        return fp4gemm.mm(x * 2, p), fp4gemm.mm(fp4gemm.quantize(x), made, activation="silu"), made

    got = compiled(layer, ready(backend))(x, w, p)
    want = layer(x, w, p)
    for i in (0, 1):
        assert_bits(got[i], want[i], f"result {i}")
    assert isinstance(got[2], PrepackedTensor)
    assert_same(fp4gemm.unprepack(got[2]), w)
