"""Products of operands in MX formats, dense and of groups, against numpy; and refusals."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import layout, reference
from fp4gemm.ops import operators
from torch import Tensor

SIZES = (5, 0, 130, 17)


def numbers(*shape: int, seed: int = 0, spread: bool = False) -> Tensor:
    """Normal numbers, with a magnitude of its own for each block of 32 if they are spread."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen)
    if spread:
        powers = torch.randint(-9, 10, (*shape[:-1], shape[-1] // 32), generator=gen)
        x = x * torch.exp2(powers.float()).repeat_interleave(32, dim=-1)
    return x.to(torch.bfloat16)


def values_of(t: Any) -> np.ndarray:
    """The values of an operand in float64, decoded from the bits by the definition of the formats."""
    scales = t.compact_scales().view(torch.uint8).numpy().astype(np.float64)
    if isinstance(t, fp4gemm.MXFP4Tensor):
        packed = t.codes.numpy().astype(np.int64)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
        signed = np.where(codes & 8, -magnitude, magnitude)
    else:
        codes = t.values.view(torch.uint8).numpy().astype(np.int64)
        exponent, mantissa = codes >> 3 & 15, codes & 7
        subnormal = mantissa / 8 * 2.0**-6
        magnitude = np.where(exponent == 0, subnormal, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        signed = np.where(codes & 0x80, -magnitude, magnitude)
    values: np.ndarray = signed * np.repeat(2.0 ** (scales - 127), 32, axis=-1)
    return values


def data_of(t: Any) -> Tensor:
    """The tensor of the elements."""
    return t.codes if isinstance(t, fp4gemm.MXFP4Tensor) else t.values


Quantize = Callable[..., Any]
FORMATS: dict[str, Quantize] = {"mxfp8": fp4gemm.quantize_mxfp8, "mxfp4": fp4gemm.quantize_mxfp4}


def mxfp4_ceil(x: Tensor, **options: Any) -> Any:
    return fp4gemm.quantize_mxfp4(x, scale="ceil", **options)


class Casts(NamedTuple):
    """The casts of the operands of a product."""

    a: Quantize
    b: Quantize


PAIRS = {
    "mxfp8": Casts(fp4gemm.quantize_mxfp8, fp4gemm.quantize_mxfp8),
    "mxfp4": Casts(fp4gemm.quantize_mxfp4, fp4gemm.quantize_mxfp4),
    "mxfp4-ceil": Casts(mxfp4_ceil, mxfp4_ceil),
    "mxfp8-mxfp4": Casts(fp4gemm.quantize_mxfp8, fp4gemm.quantize_mxfp4),
}


@pytest.fixture(params=PAIRS)
def casts(request: pytest.FixtureRequest) -> Casts:
    """The casts to formats that are multiplied."""
    return PAIRS[request.param]


@pytest.fixture(params=[*FORMATS, "mxfp4-ceil"])
def quantize(request: pytest.FixtureRequest) -> Quantize:
    """The cast to a format."""
    chosen: Quantize = FORMATS.get(request.param, mxfp4_ceil)
    return chosen


def offs_of(*sizes: int) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("spread", [False, True], ids=["even", "spread"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (3, 136, 96), (130, 264, 544)])
def test_dense(casts: Casts, m: int, n: int, k: int, spread: bool) -> None:
    a = casts.a(numbers(m, k, seed=1, spread=spread))
    b = casts.b(numbers(n, k, seed=2, spread=spread))
    got = fp4gemm.mm(a, b, out_dtype=torch.float32)
    want = (values_of(a) @ values_of(b).T).astype(np.float32)
    assert np.array_equal(got.numpy(), want)
    assert torch.equal(fp4gemm.mm(a, b), got.to(torch.bfloat16))


def test_the_epilogue(casts: Casts) -> None:
    """Bias, activation, addend and output as of other operands: each operation rounds once."""
    a, b = casts.a(numbers(40, 96)), casts.b(numbers(64, 96, seed=1))
    acc = torch.from_numpy((values_of(a) @ values_of(b).T).astype(np.float32))
    bias, c = torch.randn(64), torch.randn(40, 64)
    out = torch.empty(40, 64)
    assert fp4gemm.mm(a, b, bias=bias, c=c, beta=0.5, activation="relu2", out=out) is out
    z = torch.relu(acc + bias)
    assert torch.equal(out, z * z + c * 0.5)
    gate, up = acc[:, ::2], acc[:, 1::2]
    got = fp4gemm.mm(a, b, activation="swiglu", out_dtype=torch.float16)
    torch.testing.assert_close(got.float(), torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-3)


def test_scaled_mm_has_row_and_column_vectors(casts: Casts) -> None:
    a, b = casts.a(numbers(40, 96)), casts.b(numbers(64, 96, seed=1))
    acc = torch.from_numpy((values_of(a) @ values_of(b).T).astype(np.float32))
    row, col = torch.rand(40) + 0.5, torch.rand(64) + 0.5
    got = fp4gemm.scaled_mm(
        data_of(a),
        data_of(b),
        scale_a=a.scales,
        scale_b=b.scales,
        alpha_row=row,
        alpha_col=col,
        alpha=0.3,
        out_dtype=torch.float32,
    )
    alpha = torch.tensor(0.3)
    assert torch.equal(got, acc * row[:, None] * col * alpha)


def test_ragged_m(casts: Casts) -> None:
    """Each group has the bits of a dense product; rows behind the last group are not written."""
    m, offs = sum(SIZES) + 3, offs_of(*SIZES)
    x, w = numbers(m, 96, seed=1), numbers(len(SIZES), 136, 96, seed=2)
    a, b = casts.a(x, offs=offs), casts.b(w)
    out = torch.full((m, 136), torch.nan)
    fp4gemm.grouped_mm(a, b, out=out)
    begin = 0
    for g, end in enumerate(offs.tolist()):
        want = fp4gemm.mm(casts.a(x[begin:end]), b[g], out_dtype=torch.float32)
        assert torch.equal(out[begin:end], want)
        begin = end
    assert out[begin:].isnan().all()


@pytest.mark.parametrize("sizes", [SIZES, (128, 32), (0, 0)])
def test_ragged_k(casts: Casts, sizes: tuple[int, ...]) -> None:
    """The gradient of each expert's weight is the product of its rows alone."""
    m, offs = sum(sizes) + 3, offs_of(*sizes)
    x, dy = numbers(m, 96, seed=1), numbers(m, 64, seed=2)
    x_t = casts.b(x, axis=0, offs=offs)
    dy_t = casts.a(dy, axis=0, offs=offs)
    got = fp4gemm.wgrad(dy_t, x_t, out_dtype=torch.float32)
    assert got.shape == (len(sizes), 64, 96)
    begin = 0
    for g, end in enumerate(offs.tolist()):
        rows = (end - begin + 127) // 128 * 128
        padded = [torch.zeros(rows, t.shape[1], dtype=t.dtype) for t in (dy, x)]
        want = torch.zeros(64, 96)
        if rows:
            for to, of in zip(padded, (dy, x), strict=True):
                to[: end - begin] = of[begin:end]
            want = fp4gemm.mm(casts.a(padded[0], axis=0), casts.b(padded[1], axis=0), out_dtype=torch.float32)
        assert torch.equal(got[g], want)
        begin = end


def test_the_three_products_of_training(casts: Casts) -> None:
    x, w, dy = numbers(64, 96, seed=1), numbers(160, 96, seed=2), numbers(64, 160, seed=3)
    p, q = casts
    for got, want in (
        (fp4gemm.fprop(p(x), q(w)), x.float() @ w.float().T),
        (fp4gemm.dgrad(p(dy), q(w, axis=0)), dy.float() @ w.float()),
        (fp4gemm.wgrad(p(dy, axis=0), q(x, axis=0)), dy.float().T @ x.float()),
    ):
        error = (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < (0.05 if casts.b is fp4gemm.quantize_mxfp8 else 0.25)


# ---- casts


def test_groups_of_rows_have_the_bits_of_separate_casts(quantize: Quantize) -> None:
    m, offs = sum(SIZES) + 3, offs_of(*SIZES)
    x = numbers(m, 160, seed=4)
    t = quantize(x, offs=offs)
    assert t.scales.shape == (layout.grouped_scale_rows(m, len(SIZES)), 8)
    begin = place = 0
    for end in offs.tolist():
        own = quantize(x[begin:end])
        assert torch.equal(data_of(t)[begin:end].view(torch.uint8), data_of(own).view(torch.uint8))
        rows = own.scales.shape[0]
        assert torch.equal(t.scales[place : place + rows].view(torch.uint8), own.scales.view(torch.uint8))
        begin, place = end, place + rows
    assert not t.scales[place:].view(torch.uint8).any()
    assert not data_of(t)[begin:].view(torch.uint8).any()
    assert torch.equal(t.dequantize()[:begin], quantize(x).dequantize()[:begin])
    assert not t.dequantize()[begin:].any()


def test_groups_of_columns_begin_at_tiles_of_scales(quantize: Quantize) -> None:
    m, offs = sum(SIZES) + 3, offs_of(*SIZES)
    x = numbers(m, 96, seed=4)
    t = quantize(x, axis=0, offs=offs)
    assert t.shape == (96, layout.grouped_scale_rows(m, len(SIZES)))
    values = t.dequantize()
    begin = place = 0
    for end in offs.tolist():
        size = end - begin
        columns = (size + 127) // 128 * 128
        padded = torch.zeros(columns, 96, dtype=x.dtype)
        padded[:size] = x[begin:end]
        if columns:
            assert torch.equal(values[:, place : place + columns], quantize(padded, axis=0).dequantize())
        begin, place = end, place + columns
    assert not values[:, place:].any()


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_stack_has_the_bits_of_its_matrices(quantize: Quantize, axis: int) -> None:
    w = numbers(3, 160, 96, seed=5)
    stack = quantize(w, axis=axis)
    for e in range(3):
        own = quantize(w[e], axis=axis)
        assert torch.equal(data_of(stack[e]).view(torch.uint8), data_of(own).view(torch.uint8))
        assert torch.equal(stack[e].scales.view(torch.uint8), own.scales.view(torch.uint8))
        assert torch.equal(stack.dequantize()[e], own.dequantize())
        assert torch.equal(
            stack.compact_scales()[e].view(torch.uint8), own.compact_scales().view(torch.uint8)
        )


def test_stacks_and_groups_are_copied_and_saved(quantize: Quantize) -> None:
    offs = offs_of(*SIZES)
    for t in (
        quantize(numbers(2, 64, 32)),
        quantize(numbers(160, 32), offs=offs),
        quantize(numbers(160, 32), axis=0, offs=offs),
    ):
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        for made in (torch.load(file), copy.deepcopy(t), t.clone()):
            assert repr(made) == repr(t)
            assert torch.equal(made.dequantize(), t.dequantize())
            assert (made.offs is None) == (t.offs is None)
            assert made.offs_dim == t.offs_dim


# ---- refusals

A = fp4gemm.quantize_mxfp8(numbers(64, 96))
B = fp4gemm.quantize_mxfp8(numbers(32, 96, seed=1))
NV = fp4gemm.quantize(numbers(64, 96))
STACK = fp4gemm.quantize_mxfp8(numbers(2, 32, 96))
ROWS = fp4gemm.quantize_mxfp8(numbers(64, 96), offs=offs_of(30, 34))
COLUMNS = fp4gemm.quantize_mxfp8(numbers(64, 96), axis=0, offs=offs_of(30, 34))
A4 = fp4gemm.quantize_mxfp4(numbers(64, 96))
ROWS4 = fp4gemm.quantize_mxfp4(numbers(64, 96), offs=offs_of(30, 34))
STACK4 = fp4gemm.quantize_mxfp4(numbers(2, 32, 96))
COLUMNS4 = fp4gemm.quantize_mxfp4(numbers(64, 96), axis=0, offs=offs_of(30, 34))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fp4gemm.mm(A, NV),
            TypeError,
            r"b: got .*NVFP4Tensor.*, must be an fp4gemm.MXFP8Tensor \(fp4gemm.quantize_mxfp8\) or an "
            r"fp4gemm.MXFP4Tensor \(fp4gemm.quantize_mxfp4\) beside the MXFP8Tensor a",
        ),
        (lambda: fp4gemm.mm(NV, A), TypeError, r"a: got .*NVFP4Tensor.*, must be an fp4gemm.MXFP8Tensor"),
        (lambda: fp4gemm.mm(numbers(64, 96), B), TypeError, r"a: got .*, must be an fp4gemm.MXFP8Tensor"),
        (
            lambda: fp4gemm.mm(A, fp4gemm.quantize_mxfp8(numbers(32, 96), dtype=torch.float8_e5m2)),
            TypeError,
            r"b: values are torch.float8_e5m2, must be torch.float8_e4m3fn",
        ),
        (
            lambda: fp4gemm.mm(fp4gemm.quantize_mxfp8(numbers(64, 96), swizzled=False), B),
            ValueError,
            r"a: scales are compact, must be swizzled",
        ),
        (
            lambda: fp4gemm.mm(A, fp4gemm.quantize_mxfp8(numbers(32, 64))),
            ValueError,
            r"b: k is 64, must be 96, the k of a",
        ),
        (lambda: fp4gemm.mm(ROWS, B), ValueError, r"a: has 2 groups \(offs\), must have none"),
        (lambda: fp4gemm.mm(A, STACK), ValueError, r"b: shape is \(2, 32, 96\), must have rank 2"),
        (lambda: fp4gemm.grouped_mm(A, STACK), ValueError, r"a: has no groups \(offs\), must have groups"),
        (lambda: fp4gemm.grouped_mm(ROWS, B), ValueError, r"b: shape is \(32, 96\), must be \(2, n, k\)"),
        (lambda: fp4gemm.grouped_mm(COLUMNS, STACK), ValueError, r"b: has no groups, must have 2 groups"),
        (
            lambda: fp4gemm.mm(A, B, use_fast_accum=True),
            ValueError,
            r"use_fast_accum: got True, must be False",
        ),
        (
            lambda: fp4gemm.scaled_mm(A.values, NV.codes, scale_a=A.scales, scale_b=NV.scales),
            TypeError,
            r"b: dtype is torch.uint8 \(NVFP4\), must be torch.float8_e4m3fn with float8_e8m0fnu scales "
            r"\(MXFP8\), or codes, torch.uint8, with float8_e8m0fnu scales \(MXFP4\) beside MXFP8 a",
        ),
        (
            lambda: fp4gemm.scaled_mm(A.values, numbers(32, 96).half(), scale_a=A.scales, scale_b=None),
            TypeError,
            r"scale_b: got None, must be float8_e8m0fnu scales: b must be MXFP8 or MXFP4 beside MXFP8 a",
        ),
        (
            lambda: fp4gemm.quantize_mxfp8(numbers(2, 32, 32), swizzled=False),
            ValueError,
            r"swizzled: got False .*, must be True for x of rank 3",
        ),
        (
            lambda: fp4gemm.quantize_mxfp8(numbers(2, 32, 32), offs=offs_of(1)),
            ValueError,
            r"offs: got .*, must be None for x of rank 3",
        ),
        (
            lambda: fp4gemm.quantize_mxfp8(numbers(32, 32), swizzled=False, offs=offs_of(1)),
            ValueError,
            r"swizzled: got False, must be True with offs",
        ),
        (
            lambda: fp4gemm.MXFP8Tensor(A.values, A.scales, offs_dim=1),
            ValueError,
            r"offs_dim: got 1, must be 0 without offs",
        ),
        (
            lambda: fp4gemm.MXFP8Tensor(A.values, A.compact_scales(), swizzled=False, offs=offs_of(3)),
            ValueError,
            r"swizzled: got False, must be True of a stack and with offs",
        ),
        (lambda: ROWS.compact_scales(), ValueError, r"compact_scales: the rows are in groups"),
        (lambda: A[0], TypeError, r"must be \(g, n, k\), a stack of matrices"),
        # MXFP4, where it differs
        (lambda: fp4gemm.mm(A4, NV), TypeError, r"b: got .*NVFP4Tensor.*, must be an fp4gemm.MXFP4Tensor"),
        (
            lambda: fp4gemm.mm(NV, A4),
            TypeError,
            r"a: got .*NVFP4Tensor.*, must be an fp4gemm.MXFP8Tensor .* or an fp4gemm.MXFP4Tensor .* beside "
            r"the MXFP4Tensor b",
        ),
        (
            lambda: fp4gemm.mm(A4, B),
            TypeError,
            r"b: got MXFP8Tensor.*, must be an fp4gemm.MXFP4Tensor \(fp4gemm.quantize_mxfp4\) beside the "
            r"MXFP4Tensor a",
        ),
        (
            lambda: fp4gemm.grouped_mm(ROWS4, STACK),
            TypeError,
            r"b: got MXFP8Tensor.*, must be an fp4gemm.MXFP4Tensor .* beside the MXFP4Tensor a",
        ),
        (
            lambda: fp4gemm.mm(A, fp4gemm.quantize_mxfp4(numbers(32, 64))),
            ValueError,
            r"b: k is 64, must be 96, the k of a",
        ),
        (
            lambda: fp4gemm.mm(A, fp4gemm.quantize_mxfp4(numbers(32, 96), swizzled=False)),
            ValueError,
            r"b: scales are compact, must be swizzled: quantize_mxfp4 with swizzled=True",
        ),
        (
            lambda: fp4gemm.mm(A4, fp4gemm.quantize_mxfp4(numbers(32, 96), swizzled=False)),
            ValueError,
            r"b: scales are compact, must be swizzled: quantize_mxfp4 with swizzled=True",
        ),
        (
            lambda: fp4gemm.scaled_mm(A4.codes, NV.codes, scale_a=A4.scales, scale_b=NV.scales),
            TypeError,
            r"b: dtype is torch.uint8 \(NVFP4\), must be codes, torch.uint8, with float8_e8m0fnu scales "
            r"\(MXFP4\) beside MXFP4 a",
        ),
        (
            lambda: fp4gemm.scaled_mm(A4.codes, A.values, scale_a=A4.scales, scale_b=A.scales),
            TypeError,
            r"b: dtype is torch.float8_e4m3fn \(MXFP8\), must be codes, torch.uint8, .*\(MXFP4\) beside "
            r"MXFP4 a",
        ),
        (
            lambda: fp4gemm.scaled_mm(A4.codes, numbers(32, 96).half(), scale_a=A4.scales, scale_b=None),
            TypeError,
            r"scale_b: got None, must be float8_e8m0fnu scales: b must be MXFP4 beside MXFP4 a",
        ),
        (lambda: ROWS4.to_weight(), ValueError, r"to_weight: has 2 groups \(offs\), must have none"),
        (
            lambda: fp4gemm.MXFP4Tensor.from_weight(A4.codes, A4.scales),
            ValueError,
            r"codes: shape is \(64, 48\), must be \(n, k/32, 16\) or \(g, n, k/32, 16\)",
        ),
    ],
)
def test_refusals(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


def test_prepacked_weights_are_refused() -> None:
    w = fp4gemm.prepack(fp4gemm.quantize(numbers(64, 96)))
    with pytest.raises(TypeError, match=r"b: got .*PrepackedTensor.*must be an fp4gemm.MXFP8Tensor"):
        fp4gemm.mm(A, w)
    with pytest.raises(
        TypeError, match=r"b_rows: b is prepacked, must be torch.float8_e4m3fn .*\(MXFP4\) beside a"
    ):
        reference.gemm(A.values, w.data, scale_a=A.scales, b_rows=64)


# ---- the layout of checkpoints


@pytest.mark.parametrize("shape", [(40, 96), (2, 24, 64)], ids=["matrix", "stack"])
def test_weights_of_checkpoints(shape: tuple[int, ...]) -> None:
    """MXFP4: to_weight and from_weight are inverse, and the values are those of the NVFP4 operand."""
    t = fp4gemm.quantize_mxfp4(numbers(*shape))
    weight = t.to_weight()
    assert weight.codes.shape == (*shape[:-1], shape[-1] // 32, 16)
    assert (
        repr(weight) == f"MXFP4Weight(codes={tuple(weight.codes.shape)}, scales={tuple(weight.scales.shape)})"
    )
    for scales in (weight.scales, weight.scales.view(torch.float8_e8m0fnu)):
        back = fp4gemm.MXFP4Tensor.from_weight(weight.codes, scales)
        assert back.shape == torch.Size(shape)
        assert torch.equal(back.codes, t.codes)
        assert torch.equal(back.scales.view(torch.uint8), t.scales.view(torch.uint8))
    assert torch.equal(fp4gemm.NVFP4Tensor.from_mxfp4(*weight).dequantize(), t.dequantize())


# ---- graphs


def test_the_operators_have_fake_implementations() -> None:
    offs = offs_of(*SIZES)
    x = numbers(160, 96)
    calls: list[Any] = [
        (operators.mxfp8_quantize, (x, axis, torch.float8_e4m3fn, True, ends))
        for axis in (-1, 0)
        for ends in (None, offs)
    ]
    calls += [
        (operators.mxfp8_dequantize, (ROWS.values, ROWS.scales, torch.float32, True, ROWS.offs)),
        (operators.gemm, (A.values, B.values, A.scales, B.scales)),
        (operators.gemm, (ROWS.values, STACK.values, ROWS.scales, STACK.scales, ROWS.offs)),
        (operators.gemm, (COLUMNS.values, COLUMNS.values, COLUMNS.scales, COLUMNS.scales, COLUMNS.offs)),
    ]
    calls += [
        (operators.mxfp4_quantize, (x, axis, ceil, True, ends))
        for axis in (-1, 0)
        for ceil, ends in ((False, None), (True, offs))
    ]
    calls += [
        (operators.mxfp4_dequantize, (ROWS4.codes, ROWS4.scales, torch.float32, True, ROWS4.offs)),
        (operators.gemm, (A4.codes, A4.codes, A4.scales, A4.scales)),
        (operators.gemm, (A.values, A4.codes, A.scales, A4.scales)),
        (operators.gemm, (ROWS.values, STACK4.codes, ROWS.scales, STACK4.scales, ROWS.offs)),
        (operators.gemm, (COLUMNS.values, COLUMNS4.codes, COLUMNS.scales, COLUMNS4.scales, COLUMNS.offs)),
        (operators.gemm, (ROWS4.codes, STACK4.codes, ROWS4.scales, STACK4.scales, ROWS4.offs)),
        (operators.gemm, (COLUMNS4.codes, COLUMNS4.codes, COLUMNS4.scales, COLUMNS4.scales, COLUMNS4.offs)),
    ]
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils="test_faketensor")


def test_compiled(casts: Casts) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return fp4gemm.mm(casts.a(x), casts.b(w), activation="silu")

    x, w = numbers(40, 96), numbers(64, 96, seed=1)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), step(x, w))
