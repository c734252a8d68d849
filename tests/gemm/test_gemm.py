"""Products against float64 products that the second model rounds, and exact properties."""

from __future__ import annotations

import fp4gemm
import model
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor
from helpers import FLOATS, assert_bits, assert_poison_intact, dirty, make, make_codes, poisoned, short

ROWS = [0, 1, 7, 16, 33, 128, 257]
COLUMNS_AND_K = [(8, 32), (24, 96), (136, 160), (64, 288)]
ALPHA = 1 / (36 * 448 * 448)


def operands(
    m: int,
    n: int,
    k: int,
    device: torch.device,
    gen: torch.Generator,
    scaling: str = "row",
    kind: str = "normal",
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    a = fp4gemm.quantize(make(kind, m, k, torch.bfloat16, gen).to(device), scaling=scaling)
    return a, fp4gemm.quantize(make("normal", n, k, torch.bfloat16, gen).to(device), scaling=scaling)


def accumulator(a: NVFP4Tensor, b: NVFP4Tensor) -> object:
    return model.values(a.codes, a.scales) @ model.values(b.codes, b.scales).T


def expected(
    a: NVFP4Tensor, b: NVFP4Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    alpha = 1 / (36 * a.e4m3_max * b.e4m3_max)
    return model.epilogue(accumulator(a, b), alpha, a.amax, b.amax, bias, out_dtype)


def raw(a: NVFP4Tensor, b: NVFP4Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return a.codes, b.codes, a.scales, b.scales


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("n", "k"), COLUMNS_AND_K, ids=lambda size: str(size))
@pytest.mark.parametrize("m", ROWS)
def test_mm_shapes(
    m: int, n: int, k: int, out_dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    a, b = operands(m, n, k, device, gen)
    dirty(device, m * n * out_dtype.itemsize)
    assert_bits(fp4gemm.mm(a, b, out_dtype=out_dtype), expected(a, b, None, out_dtype), "D")


def test_no_columns(device: torch.device, gen: torch.Generator) -> None:
    for m in (0, 5):
        a, b = operands(m, 0, 64, device, gen)
        assert_bits(fp4gemm.mm(a, b), torch.empty(m, 0, dtype=torch.bfloat16), "D")


@pytest.mark.parametrize("n", [4, 12, 20])
def test_float32_output_takes_n_in_steps_of_4(n: int, device: torch.device, gen: torch.Generator) -> None:
    a, b = operands(19, n, 64, device, gen)
    assert_bits(fp4gemm.mm(a, b, out_dtype=torch.float32), expected(a, b, None, torch.float32), "D")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["heavy", "row_ranges", "zero_rows", "outliers"])
def test_mm_kinds(kind: str, scaling: str, device: torch.device, gen: torch.Generator) -> None:
    a, b = operands(40, 48, 128, device, gen, scaling, kind)
    assert a.amax.shape == ((40,) if scaling == "row" else (1,))
    for out_dtype in FLOATS:
        assert_bits(fp4gemm.mm(a, b, out_dtype=out_dtype), expected(a, b, None, out_dtype), short(out_dtype))


@pytest.mark.parametrize("k", [32, 96, 512, 2048])
def test_small_integers_are_exact(k: int, device: torch.device, gen: torch.Generator) -> None:
    """With integer codes and unit scales, D is the integer product."""
    # 0, 1, 2, 3, 4, 6 and their negatives
    integer_codes = torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15])
    ones = torch.ones(1, device=device)

    def integers(rows: int) -> tuple[NVFP4Tensor, torch.Tensor]:
        nibbles = integer_codes[torch.randint(0, 11, (rows, k), generator=gen)].to(torch.uint8)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        unit = torch.ones(rows, k // 16).to(torch.float8_e4m3fn)
        t = NVFP4Tensor.from_compact(codes.to(device), unit.to(device), ones)
        return t, torch.from_numpy(model.decode_codes(codes.numpy())).double()

    (a, values_a), (b, values_b) = integers(33), integers(40)
    want = values_a @ values_b.T
    assert want.abs().max() > 30
    got = fp4gemm.scaled_mm(*raw(a, b), out_dtype=torch.float32)
    assert_bits(got.double(), want, "D")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_bias(dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """The bias is added in float32, after the alphas and before the one rounding to the output type."""
    a, b = operands(33, 24, 64, device, gen)
    bias = (torch.randn(24, generator=gen) * 3).to(dtype).to(device)
    assert_bits(fp4gemm.mm(a, b, bias=bias, out_dtype=out_dtype), expected(a, b, bias, out_dtype), "D")
    assert not torch.equal(fp4gemm.mm(a, b, bias=bias), fp4gemm.mm(a, b))


@pytest.mark.parametrize("col", ["none", "one", "vector"])
@pytest.mark.parametrize("row", ["none", "one", "vector"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_every_form_of_the_alphas(
    row: str, col: str, bias: bool, device: torch.device, gen: torch.Generator
) -> None:
    m, n = 21, 40
    a, b = operands(m, n, 96, device, gen)

    def alphas(form: str, length: int) -> torch.Tensor | None:
        if form == "none":
            return None
        size = length if form == "vector" else 1
        return torch.randn(size, generator=gen).to(device)

    alpha_row, alpha_col = alphas(row, m), alphas(col, n)
    vector = torch.randn(n, generator=gen).to(device) if bias else None
    got = fp4gemm.scaled_mm(
        *raw(a, b), alpha=0.3, alpha_row=alpha_row, alpha_col=alpha_col, bias=vector, out_dtype=torch.float32
    )
    want = model.epilogue(accumulator(a, b), 0.3, alpha_row, alpha_col, vector)
    assert_bits(got, want, "D")


def test_unit_alphas_equal_none(device: torch.device, gen: torch.Generator) -> None:
    m, n = 35, 48
    a, b = operands(m, n, 64, device, gen)
    plain = fp4gemm.scaled_mm(*raw(a, b), out_dtype=torch.float32)
    ones = {size: torch.ones(size, device=device) for size in (1, m, n)}
    for alpha_row in (None, ones[1], ones[m]):
        for alpha_col in (None, ones[1], ones[n]):
            got = fp4gemm.scaled_mm(
                *raw(a, b), alpha=1, alpha_row=alpha_row, alpha_col=alpha_col, out_dtype=torch.float32
            )
            assert_bits(got, plain, "D")
    assert_bits(
        fp4gemm.scaled_mm(*raw(a, b), bias=torch.zeros(n, device=device) * -1.0), plain.bfloat16(), "bias -0"
    )


def test_one_number_equals_a_constant_vector(device: torch.device, gen: torch.Generator) -> None:
    m, n = 18, 32
    a, b = operands(m, n, 64, device, gen)
    one, other = torch.tensor([0.37], device=device), torch.tensor([-5.1], device=device)
    got = fp4gemm.scaled_mm(*raw(a, b), alpha_row=one, alpha_col=other, out_dtype=torch.float32)
    want = fp4gemm.scaled_mm(
        *raw(a, b), alpha_row=one.repeat(m), alpha_col=other.repeat(n), out_dtype=torch.float32
    )
    assert_bits(got, want, "D")


def test_order_of_the_multiplies_is_fixed(device: torch.device, gen: torch.Generator) -> None:
    """Row, then column, then scalar; another order gives other bits with this data."""
    a, b = operands(64, 64, 64, device, gen)
    row, col = torch.rand(64, generator=gen) + 0.5, torch.rand(64, generator=gen) + 0.5
    got = fp4gemm.scaled_mm(
        *raw(a, b), alpha=1 / 3, alpha_row=row.to(device), alpha_col=col.to(device), out_dtype=torch.float32
    ).cpu()
    acc = accumulator(a, b)
    assert_bits(got, model.epilogue(acc, 1 / 3, row, col), "D")
    folded = model.epilogue(acc, 1.0, row * torch.tensor(1 / 3), col)
    assert not torch.equal(got, folded)


def test_power_of_two_on_one_row_changes_only_that_row(device: torch.device, gen: torch.Generator) -> None:
    m, n, k = 50, 64, 128
    x, w = make("normal", m, k, torch.float32, gen), make("normal", n, k, torch.float32, gen)
    scaled = x.clone()
    scaled[17] *= 2.0**-20
    b = fp4gemm.quantize(w.to(device))
    before = fp4gemm.mm(fp4gemm.quantize(x.to(device)), b, out_dtype=torch.float32).cpu()
    after = fp4gemm.mm(fp4gemm.quantize(scaled.to(device)), b, out_dtype=torch.float32).cpu()
    before[17] *= 2.0**-20
    assert_bits(after, before, "D")


def test_permuted_rows_and_columns(device: torch.device, gen: torch.Generator) -> None:
    x, w = make("heavy", 70, 96, torch.bfloat16, gen), make("heavy", 40, 96, torch.bfloat16, gen)
    rows, columns = torch.randperm(70, generator=gen), torch.randperm(40, generator=gen)
    plain = fp4gemm.mm(fp4gemm.quantize(x.to(device)), fp4gemm.quantize(w.to(device)))
    moved = fp4gemm.mm(fp4gemm.quantize(x[rows].to(device)), fp4gemm.quantize(w[columns].to(device)))
    assert_bits(moved.cpu(), plain.cpu()[rows][:, columns], "D")


@pytest.mark.parametrize("bound_a", [448, 256])
@pytest.mark.parametrize("bound_b", [448, 256])
def test_bounds(bound_a: int, bound_b: int, device: torch.device, gen: torch.Generator) -> None:
    a, b = operands(20, 16, 64, device, gen)
    a = NVFP4Tensor(a.codes, a.scales, a.amax, bound_a)
    b = NVFP4Tensor(b.codes, b.scales, b.amax, bound_b)
    got = fp4gemm.mm(a, b, out_dtype=torch.float32)
    assert_bits(got, expected(a, b, None, torch.float32), "D")
    torch.testing.assert_close(got, a.dequantize() @ b.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_decoded_operands_give_the_same_bits(which: str, device: torch.device, gen: torch.Generator) -> None:
    a, b = operands(33, 40, 160, device, gen)
    left: NVFP4Tensor | DecodedTensor = fp4gemm.decode(a) if which != "b" else a
    right: NVFP4Tensor | DecodedTensor = fp4gemm.decode(b) if which != "a" else b
    for out_dtype in FLOATS:
        want = fp4gemm.mm(a, b, out_dtype=out_dtype)
        assert_bits(fp4gemm.mm(left, right, out_dtype=out_dtype), want, short(out_dtype))
    data_a = left.data if isinstance(left, DecodedTensor) else a.codes
    data_b = right.data if isinstance(right, DecodedTensor) else b.codes
    scale_a = None if isinstance(left, DecodedTensor) else a.scales
    scale_b = None if isinstance(right, DecodedTensor) else b.scales
    got = fp4gemm.scaled_mm(
        data_a,
        data_b,
        scale_a,
        scale_b,
        alpha=ALPHA,
        alpha_row=a.amax,
        alpha_col=b.amax,
        out_dtype=torch.float32,
    )
    assert_bits(got, fp4gemm.mm(a, b, out_dtype=torch.float32), "scaled_mm")


def test_other_dtypes_are_taken_by_view(device: torch.device, gen: torch.Generator) -> None:
    a, b = operands(9, 16, 64, device, gen)
    got = fp4gemm.scaled_mm(
        a.codes.view(torch.float4_e2m1fn_x2),
        b.codes.view(torch.float4_e2m1fn_x2),
        a.scales.view(torch.uint8),
        b.scales.view(torch.uint8),
    )
    assert_bits(got, fp4gemm.scaled_mm(*raw(a, b)), "D")


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("pad", [0, 16], ids=["dense", "strided"])
@pytest.mark.parametrize("m", [0, 1, 33, 128])
def test_out(m: int, pad: int, out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """Every element of out and no byte around it is written; the buffer was full of NaN."""
    n = 40
    a, b = operands(m, n, 96, device, gen)
    bias = torch.randn(n, generator=gen).to(device)
    view, buffer = poisoned(m, n, out_dtype, device, pad)
    assert fp4gemm.mm(a, b, bias=bias, out=view) is view
    assert_bits(view, expected(a, b, bias, out_dtype), "D")
    assert_poison_intact(buffer, m, n)
    view, buffer = poisoned(m, n, out_dtype, device, pad)
    assert fp4gemm.scaled_mm(*raw(a, b), out=view, out_dtype=out_dtype) is view
    assert_bits(view, model.epilogue(accumulator(a, b), out_dtype=out_dtype), "D")
    assert_poison_intact(buffer, m, n)


def test_nan_in_operand_pads_does_not_matter(device: torch.device, gen: torch.Generator) -> None:
    """NaN in the rows of scales beyond m, which only rows outside of D use, changes nothing."""
    a, b = operands(33, 40, 128, device, gen)
    want = fp4gemm.mm(a, b, out_dtype=torch.float32)

    def with_nan_rows(t: NVFP4Tensor) -> NVFP4Tensor:
        m, k = t.shape
        padded = fp4gemm.unswizzle_scales(t.scales, 128, k // 16).view(torch.uint8)
        padded[m:] = 0x7F
        return NVFP4Tensor(t.codes, fp4gemm.swizzle_scales(padded), t.amax)

    assert_bits(fp4gemm.mm(with_nan_rows(a), with_nan_rows(b), out_dtype=torch.float32), want, "D")


def test_non_finite_values_stay_in_their_row(device: torch.device, gen: torch.Generator) -> None:
    x, w = make("normal", 20, 64, torch.float32, gen), make("normal", 16, 64, torch.float32, gen)
    b = fp4gemm.quantize(w.to(device))
    before = fp4gemm.mm(fp4gemm.quantize(x.to(device)), b, out_dtype=torch.float32).cpu()
    x[5, 3] = torch.inf
    after = fp4gemm.mm(fp4gemm.quantize(x.to(device)), b, out_dtype=torch.float32).cpu()
    assert not after[5].isfinite().any()
    keep = torch.arange(20) != 5
    assert_bits(after[keep], before[keep], "other rows")


def test_cpu_kernel_by_name(gen: torch.Generator) -> None:
    a, b = operands(5, 8, 32, torch.device("cpu"), gen)
    assert_bits(fp4gemm.mm(a, b, kernel="cpu_reference"), fp4gemm.mm(a, b), "D")


def test_accuracy_against_the_unquantized_product(device: torch.device, gen: torch.Generator) -> None:
    """The result is close to x @ w.T, and rows with outliers do not affect other rows."""
    x, w = make("outliers", 256, 512, torch.float32, gen), make("normal", 128, 512, torch.float32, gen)
    want = x @ w.T

    def error_of_tame_rows(scaling: str) -> float:
        a, b = fp4gemm.quantize(x.to(device), scaling=scaling), fp4gemm.quantize(w.to(device))
        tame = x.abs().amax(1) < 100
        got = fp4gemm.mm(a, b, out_dtype=torch.float32).cpu()
        return ((got - want)[tame].norm() / want[tame].norm()).item()

    assert error_of_tame_rows("row") < 0.15
    assert error_of_tame_rows("tensor") > 1.2 * error_of_tame_rows("row")


def test_random_codes_and_scales(device: torch.device, gen: torch.Generator) -> None:
    """Every code with scales over the whole range; sums are not exact in float32, so bits may differ."""
    m, n, k = 64, 64, 256
    codes = make_codes(m, k, gen).to(device), make_codes(n, k, gen).to(device)
    scales = [
        torch.randint(0, 0x7F, (128, k // 16), generator=gen, dtype=torch.uint8).to(device) for _ in codes
    ]
    got = fp4gemm.scaled_mm(*codes, *(fp4gemm.swizzle_scales(s) for s in scales), out_dtype=torch.float32)
    values = [
        torch.from_numpy(model.values(c, fp4gemm.swizzle_scales(s)))
        for c, s in zip(codes, scales, strict=True)
    ]
    bound = 1e-5 * (values[0].abs() @ values[1].abs().T)
    assert ((got.cpu().double() - values[0] @ values[1].T).abs() <= bound).all()


def test_mm_on_meta_tensors_is_checked_too() -> None:
    """Meta tensors reach the fake kernel, which refuses the same arguments as the other kernels."""

    def meta(m: int, k: int) -> NVFP4Tensor:
        return fp4gemm.quantize(torch.ones(m, k)).to("meta")

    assert fp4gemm.mm(meta(5, 64), meta(8, 64)).shape == (5, 8)
    with pytest.raises(ValueError, match=r"^b: k is 96, must be 64"):
        fp4gemm.mm(meta(5, 64), meta(8, 96))
    with pytest.raises(ValueError, match=r"^b: n is 12"):
        fp4gemm.mm(meta(5, 64), meta(12, 64))
    with pytest.raises(TypeError, match=r"^out_dtype: "):
        fp4gemm.mm(meta(5, 64), meta(8, 64), out_dtype=torch.float64)


def test_mm_refuses_an_amax_that_requires_grad() -> None:
    with torch.no_grad():
        t = fp4gemm.quantize(torch.ones(8, 64))
        tracked = NVFP4Tensor(t.codes, t.scales, t.amax.clone().requires_grad_())
        assert fp4gemm.mm(tracked, t).shape == (8, 8)
    with pytest.raises(NotImplementedError, match=r"^b: requires grad"):
        fp4gemm.mm(t, tracked)


def test_no_columns_with_out() -> None:
    a, none = fp4gemm.quantize(torch.ones(33, 64)), fp4gemm.quantize(torch.ones(0, 64))
    out = torch.empty(33, 0, dtype=torch.bfloat16)
    assert fp4gemm.mm(a, none, out=out) is out
