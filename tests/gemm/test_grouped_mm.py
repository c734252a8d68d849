"""Groups of rows, the tokens of experts times their weights: against the second model, exact properties."""

from __future__ import annotations

import fp4gemm
import model
import model_epilogue
import pytest
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.activations import names
from helpers import FLOATS, assert_bits, assert_poison_intact, dirty, make, poisoned, short
from moe import ALPHA, ROUTINGS, Rows, ends_of, expected_rows, row_products, rows_of

SHAPES = [(8, 32), (40, 96), (136, 160)]


def by_size(shape: tuple[int, int]) -> str:
    return f"n{shape[0]}-k{shape[1]}"


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=by_size)
@pytest.mark.parametrize("name", ROUTINGS)
def test_against_the_model(
    name: str, shape: tuple[int, int], out_dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    case = rows_of(ROUTINGS[name], *shape, device, gen)
    dirty(device, case.x.shape[0] * shape[0] * out_dtype.itemsize)
    got = fp4gemm.grouped_mm(case.a, case.b, out_dtype=out_dtype)
    assert_bits(got, expected_rows(case, out_dtype=out_dtype), "D")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_each_group_is_the_dense_product(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of(ROUTINGS["ragged"], 72, 128, device, gen, scaling=scaling)
    assert case.b.amax.shape == ((6, 72) if scaling == "row" else (6, 1))
    got = fp4gemm.grouped_mm(case.a, case.b, case.offs)
    begin = 0
    for e, end in enumerate(case.ends):
        alone = fp4gemm.mm(fp4gemm.quantize(case.x[begin:end]), fp4gemm.quantize(case.w[e], scaling=scaling))
        assert_bits(got[begin:end], alone, f"expert {e}")
        begin = end


def test_one_group_is_the_dense_product(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((257,), 136, 288, device, gen)
    bias = torch.randn(136, generator=gen).to(device)
    a, b = fp4gemm.quantize(case.x), fp4gemm.quantize(case.w[0])
    for options in ({}, {"bias": bias}, {"activation": "silu", "out_dtype": torch.float32}):
        assert_bits(fp4gemm.grouped_mm(case.a, case.b, **options), fp4gemm.mm(a, b, **options), str(options))


def test_permuted_experts_permute_the_rows(device: torch.device, gen: torch.Generator) -> None:
    sizes = (7, 130, 0, 64, 33)
    case = rows_of(sizes, 64, 96, device, gen)
    before = fp4gemm.grouped_mm(case.a, case.b).split(sizes)
    order = [3, 0, 4, 2, 1]
    x = torch.cat([case.x.split(sizes)[e] for e in order])
    offs = ends_of([sizes[e] for e in order], device)
    b = fp4gemm.quantize(case.w[order].contiguous())
    after = fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs), b)
    assert_bits(after, torch.cat([before[e] for e in order]), "D")


def test_power_of_two_on_one_row_changes_only_that_row(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((20, 0, 30), 64, 128, device, gen)
    scaled = case.x.clone()
    scaled[23] *= 2.0**-20
    before = fp4gemm.grouped_mm(case.a, case.b, out_dtype=torch.float32)
    a = fp4gemm.quantize(scaled, offs=case.offs)
    after = fp4gemm.grouped_mm(a, case.b, out_dtype=torch.float32)
    before[23] *= 2.0**-20
    assert_bits(after, before, "D")


@pytest.mark.parametrize("bias", ["none", "shared", "own"])
@pytest.mark.parametrize("activation", [None, *names(is_gated=False)])
@pytest.mark.parametrize("with_c", [False, True], ids=["alone", "c"])
def test_every_term(
    with_c: bool, activation: str | None, bias: str, device: torch.device, gen: torch.Generator
) -> None:
    sizes = ROUTINGS["ragged"]
    case = rows_of(sizes, 40, 96, device, gen)
    shapes = {"none": None, "shared": (40,), "own": (len(sizes), 40)}
    shape = shapes[bias]
    vector = None if shape is None else torch.randn(shape, generator=gen).to(device)
    for out_dtype in FLOATS:
        c, beta = None, 1.0
        if with_c:
            c, beta = torch.randn(sum(sizes), 40, generator=gen).to(out_dtype).to(device), -1.3
        options = {"bias": vector, "activation": activation, "c": c, "beta": beta, "out_dtype": out_dtype}
        assert_bits(
            fp4gemm.grouped_mm(case.a, case.b, **options), expected_rows(case, **options), short(out_dtype)
        )


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("activation", names(is_gated=True))
def test_gated(
    activation: str, name: str, out_dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """D is (m, n/2); rows that are in no group and memory around D stay as they are."""
    loose, n, sizes = 7, 48, ROUTINGS[name]
    case = rows_of(sizes, n, 64, device, gen, loose=loose)
    bias = torch.randn(len(sizes), n, generator=gen).to(device)
    rows = sum(sizes)
    want = expected_rows(case, bias=bias, activation=activation, out_dtype=out_dtype)
    got = fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation=activation, out_dtype=out_dtype)
    assert got.shape == (rows + loose, n // 2)
    assert_bits(got[:rows], want, "D")
    view, buffer = poisoned(rows + loose, n // 2, out_dtype, device, pad=8)
    fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation=activation, out=view)
    assert_bits(view[:rows], want, "out")
    assert_poison_intact(buffer, rows, n // 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_bias_is_widened(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((9, 20), 16, 64, device, gen)
    bias = torch.randn(2, 16, generator=gen).to(dtype).to(device)
    assert_bits(fp4gemm.grouped_mm(case.a, case.b, bias=bias), expected_rows(case, bias=bias), "D")


@pytest.mark.parametrize("pad", [0, 16], ids=["dense", "strided"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("name", ROUTINGS)
def test_out_and_the_rows_of_nobody(
    name: str, out_dtype: torch.dtype, pad: int, device: torch.device, gen: torch.Generator
) -> None:
    """Every element of a group is written, and no byte behind the last group or around D."""
    loose, n = 11, 24
    case = rows_of(ROUTINGS[name], n, 64, device, gen, loose=loose)
    rows = case.x.shape[0] - loose
    view, buffer = poisoned(rows + loose, n, out_dtype, device, pad)
    assert fp4gemm.grouped_mm(case.a, case.b, out=view) is view
    assert_bits(view[:rows], expected_rows(case, out_dtype=out_dtype), "D")
    assert_poison_intact(buffer, rows, n)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_accumulates_in_place(out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((33, 0, 64), 24, 64, device, gen, loose=5)
    view, buffer = poisoned(102, 24, out_dtype, device, pad=8)
    total = torch.randn(97, 24, generator=gen).to(out_dtype)
    view[:97].copy_(total)
    for beta in (1.0, 0.5):
        fp4gemm.grouped_mm(case.a, case.b, c=view, beta=beta, out=view)
        total = expected_rows(case, c=total, beta=beta, out_dtype=out_dtype)
        assert_bits(view[:97], total, f"beta {beta}")
    assert_poison_intact(buffer, 97, 24)


@pytest.mark.parametrize("col", ["none", "one", "vector", "own_one", "own"])
@pytest.mark.parametrize("row", ["none", "one", "vector"])
@pytest.mark.parametrize("alpha", ["number", "groups"])
def test_every_form_of_the_alphas(
    alpha: str, row: str, col: str, device: torch.device, gen: torch.Generator
) -> None:
    sizes, n = (21, 0, 40), 24
    case = rows_of(sizes, n, 96, device, gen)
    m, g = sum(sizes), len(sizes)

    def drawn(shape: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if shape is None else torch.randn(shape, generator=gen)

    rows = drawn({"none": None, "one": (1,), "vector": (m,)}[row])
    cols = drawn({"none": None, "one": (1,), "vector": (n,), "own_one": (g, 1), "own": (g, n)}[col])
    factors = drawn((g,))
    got = fp4gemm.scaled_grouped_mm(
        *case.raw,
        alpha=0.3 if alpha == "number" else factors.to(device),
        alpha_row=None if rows is None else rows.to(device),
        alpha_col=None if cols is None else cols.to(device),
        out_dtype=torch.float32,
    )
    begin = 0
    for e, (end, acc) in enumerate(zip(case.ends, row_products(case), strict=True)):
        want = model.epilogue(
            acc,
            0.3 if alpha == "number" else factors[e].item(),
            rows[begin:end] if row == "vector" else rows,
            cols if cols is None or cols.dim() == 1 else cols[e],
        )
        assert_bits(got[begin:end], want, f"group {e}")
        begin = end


def test_unit_alphas_equal_none(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((21, 0, 40), 24, 64, device, gen)
    plain = fp4gemm.scaled_grouped_mm(*case.raw, out_dtype=torch.float32)
    ones = {shape: torch.ones(shape, device=device) for shape in ((1,), (61,), (24,), (3, 24), (3, 1), (3,))}
    for alpha in (1, ones[3,]):
        for alpha_row in (None, ones[1,], ones[61,]):
            for alpha_col in (None, ones[1,], ones[24,], ones[3, 24], ones[3, 1]):
                got = fp4gemm.scaled_grouped_mm(
                    *case.raw, alpha=alpha, alpha_row=alpha_row, alpha_col=alpha_col, out_dtype=torch.float32
                )
                assert_bits(got, plain, "D")


def test_many_groups(device: torch.device, gen: torch.Generator) -> None:
    """1,500 experts, of which two thirds have no token, and more experts than tokens."""
    sizes = tuple(torch.randint(-4, 3, (1500,), generator=gen).clamp(min=0).tolist())
    case = rows_of(sizes, 8, 32, device, gen, loose=3)
    got = fp4gemm.grouped_mm(case.a, case.b)
    assert_bits(got[: sum(sizes)], expected_rows(case), "D")
    few = (0,) * 700 + (1,) + (0,) * 799
    case = rows_of(few, 8, 32, device, gen)
    assert_bits(fp4gemm.grouped_mm(case.a, case.b), expected_rows(case), "one token")


def test_nothing_to_do(device: torch.device, gen: torch.Generator) -> None:
    for sizes in ((0,), (0, 0, 0)):
        case = rows_of(sizes, 16, 64, device, gen)
        assert_bits(fp4gemm.grouped_mm(case.a, case.b), torch.empty(0, 16, dtype=torch.bfloat16), "no rows")
    case = rows_of((5, 6), 16, 64, device, gen)
    empty = torch.empty(2, 0, 32, dtype=torch.uint8, device=device)
    no_scales = torch.empty(2, 0, 4, dtype=torch.uint8, device=device)
    got = fp4gemm.scaled_grouped_mm(case.a.codes, empty, case.a.scales, no_scales, case.offs)
    assert_bits(got, torch.empty(11, 0, dtype=torch.bfloat16), "no columns")


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_decoded_operands_give_the_same_bits(which: str, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of(ROUTINGS["ragged"], 40, 96, device, gen, loose=7)
    a = fp4gemm.decode(case.a) if which != "b" else case.a
    b = fp4gemm.decode(case.b) if which != "a" else case.b
    rows = sum(ROUTINGS["ragged"])
    want = fp4gemm.grouped_mm(case.a, case.b, out_dtype=torch.float32)[:rows]
    assert_bits(fp4gemm.grouped_mm(a, b, out_dtype=torch.float32)[:rows], want, "D")
    raw = [t.codes if isinstance(t, NVFP4Tensor) else t.data for t in (a, b)]
    scales = [t.scales if isinstance(t, NVFP4Tensor) else None for t in (a, b)]
    got = fp4gemm.scaled_grouped_mm(
        *raw,
        *scales,
        case.offs,
        alpha=ALPHA,
        alpha_row=case.a.amax,
        alpha_col=case.b.amax,
        out_dtype=torch.float32,
    )
    assert_bits(got[:rows], want, "scaled_grouped_mm")


def test_other_dtypes_are_taken_by_view(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((9, 20), 16, 64, device, gen)
    got = fp4gemm.scaled_grouped_mm(
        case.a.codes.view(torch.float4_e2m1fn_x2),
        case.b.codes.view(torch.float4_e2m1fn_x2),
        case.a.scales.view(torch.uint8),
        case.b.scales.view(torch.uint8),
        case.offs,
    )
    assert_bits(got, fp4gemm.scaled_grouped_mm(*case.raw), "D")


@pytest.mark.parametrize("bound", [448, 256])
def test_bounds(bound: int, device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((9, 20), 16, 64, device, gen)
    b = NVFP4Tensor(case.b.codes, case.b.scales, case.b.amax, bound)
    got = fp4gemm.grouped_mm(case.a, b, out_dtype=torch.float32)
    want = torch.cat(
        [x @ w.T for x, w in zip(case.a.dequantize().split((9, 20)), b.dequantize(), strict=True)]
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_stacked_weights(device: torch.device, gen: torch.Generator) -> None:
    """fp4gemm.stack of weights that were quantized separately."""
    case = rows_of((9, 0, 20), 16, 64, device, gen)
    b = fp4gemm.stack([fp4gemm.quantize(w) for w in case.w])
    assert_bits(fp4gemm.grouped_mm(case.a, b), fp4gemm.grouped_mm(case.a, case.b), "D")


def test_rotated_operands(device: torch.device, gen: torch.Generator) -> None:
    """A rotation of both operands cancels in the product."""
    x = make("normal", 40, 64, torch.bfloat16, gen).to(device)
    w = make("normal", 48, 64, torch.bfloat16, gen).view(2, 24, 64).to(device)
    offs = ends_of((15, 25), device)
    a = fp4gemm.quantize(x, offs=offs, hadamard="bf16")
    b = fp4gemm.quantize(w, hadamard="bf16")
    got = fp4gemm.grouped_mm(a, b, out_dtype=torch.float32)
    want = torch.cat([part.float() @ w[e].float().T for e, part in enumerate(x.split((15, 25)))])
    assert (got - want).norm() < 0.2 * want.norm()


def test_groups_of_producers(device: torch.device, gen: torch.Generator) -> None:
    """silu_and_mul_quantize writes groups that grouped_mm multiplies."""
    x = make("normal", 40, 128, torch.bfloat16, gen).to(device)
    w = make("normal", 48, 64, torch.bfloat16, gen).view(2, 24, 64).to(device)
    offs = ends_of((15, 25), device)
    a, b = fp4gemm.silu_and_mul_quantize(x, offs=offs), fp4gemm.quantize(w)
    case = Rows(x, w, offs, a, b)
    assert_bits(fp4gemm.grouped_mm(a, b), expected_rows(case), "D")


def test_training_names(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of((33, 0, 31), 64, 96, device, gen)
    y = fp4gemm.fprop(case.a, case.b, activation="silu")
    assert_bits(y, fp4gemm.grouped_mm(case.a, case.b, activation="silu"), "y")
    w, w_t = fp4gemm.quantize_both(case.w)
    assert_bits(fp4gemm.fprop(case.a, w, offs=case.offs), fp4gemm.grouped_mm(case.a, case.b), "y")
    dy = fp4gemm.quantize(make("normal", 64, 64, torch.bfloat16, gen).to(device), offs=case.offs)
    dx = fp4gemm.dgrad(dy, w_t)
    assert dx.shape == case.x.shape
    assert_bits(dx, fp4gemm.grouped_mm(dy, w_t), "dx")


def test_batch_invariant(device: torch.device, gen: torch.Generator) -> None:
    """A token has the same bits in any batch, although sums are not exact in float32."""
    n, k, sizes = 128, 1024, (150, 0, 70)
    codes = torch.randint(0, 256, (sum(sizes), k // 2), generator=gen, dtype=torch.uint8).to(device)
    scales = torch.randint(0, 0x7F, (sum(sizes), k // 16), generator=gen, dtype=torch.uint8).to(device)
    one = torch.ones(1, device=device)
    weight = NVFP4Tensor.from_compact(codes[:n].flip(1).contiguous(), scales[:n].contiguous(), one)
    b = fp4gemm.stack([weight] * 3)

    def product(rows: list[int]) -> torch.Tensor:
        parts = [
            fp4gemm.swizzle_scales(part.contiguous()).view(torch.uint8)
            for part in (scales[: rows[0]], scales[150 : 150 + rows[1]])
        ]
        m = sum(rows)
        grouped = torch.zeros(
            fp4gemm.layout.grouped_scale_rows(m, 3), k // 16, dtype=torch.uint8, device=device
        )
        used = torch.cat(parts)
        grouped[: used.shape[0]] = used
        left = torch.cat((codes[: rows[0]], codes[150 : 150 + rows[1]]))
        offs = ends_of([rows[0], 0, rows[1]], device)
        return fp4gemm.scaled_grouped_mm(
            left, b.codes, grouped, b.scales, offs, out_dtype=torch.float32, batch_invariant=True
        )

    whole = product([150, 70])
    for rows in ([1, 70], [150, 3], [40, 0], [0, 70]):
        got = product(rows)
        assert_bits(got[: rows[0]], whole[: rows[0]], f"first of {rows}")
        assert_bits(got[rows[0] :], whole[150 : 150 + rows[1]], f"last of {rows}")


def test_the_cpu_refuses_wrong_ends(gen: torch.Generator) -> None:
    case = rows_of((9, 20), 16, 64, torch.device("cpu"), gen)
    for ends, says in (
        ((9, 30), "offs: the last entry is 30, must be at most 29, the rows of a"),
        ((20, 9), "offs: entry 1 is 9, must be at least 20"),
        ((-1, 9), "offs: entry 0 is -1, must be at least 0"),
    ):
        case.offs.copy_(torch.tensor(ends))
        with pytest.raises(ValueError, match=says):
            fp4gemm.grouped_mm(case.a, case.b)


def test_the_groups_are_those_of_the_operand(device: torch.device, gen: torch.Generator) -> None:
    """offs may be given again, but not others, with which the result would be wrong."""
    case = rows_of((9, 20), 16, 64, device, gen)
    want = fp4gemm.grouped_mm(case.a, case.b)
    for same in (None, case.offs, case.a.offs, case.offs[:]):
        assert_bits(fp4gemm.grouped_mm(case.a, case.b, same), want, "D")
    with pytest.raises(ValueError, match=r"^offs: is another tensor than a\.offs, must be that or omitted"):
        fp4gemm.grouped_mm(case.a, case.b, ends_of((10, 19), device))
    if device.type == "cpu":
        assert_bits(fp4gemm.grouped_mm(case.a, case.b, case.offs.clone()), want, "equal values")
    else:
        with pytest.raises(ValueError, match=r"^offs: is another tensor than a\.offs"):
            fp4gemm.grouped_mm(case.a, case.b, case.offs.clone())


def test_operands_with_other_groups_are_refused(device: torch.device, gen: torch.Generator) -> None:
    dy, x = (torch.randn(29, size, generator=gen).to(device) for size in (16, 32))
    offs, other = ends_of((9, 20), device), ends_of((10, 19), device)
    a, b = fp4gemm.quantize(dy, axis=0, offs=offs), fp4gemm.quantize(x, axis=0, offs=offs)
    want = fp4gemm.wgrad(a, b)
    assert_bits(fp4gemm.wgrad(a, b, offs=offs), want, "D")
    with pytest.raises(ValueError, match=r"^x_t: has other groups \(offs\) than dy_t, must have the same"):
        fp4gemm.wgrad(a, fp4gemm.quantize(x, axis=0, offs=other))
    with pytest.raises(ValueError, match=r"^offs: is another tensor than dy_t\.offs"):
        fp4gemm.wgrad(a, b, offs=other)


def test_kernel_by_name(gen: torch.Generator) -> None:
    case = rows_of((9, 20), 16, 64, torch.device("cpu"), gen)
    got = fp4gemm.grouped_mm(case.a, case.b, kernel="cpu_reference")
    assert_bits(got, fp4gemm.grouped_mm(case.a, case.b), "D")


def test_the_model_finds_a_swapped_group(gen: torch.Generator) -> None:
    """The second model's result depends on which weights a group has and on where its scales are stored."""
    case = rows_of((9, 140, 20), 16, 64, torch.device("cpu"), gen)
    got = fp4gemm.grouped_mm(case.a, case.b)
    other = case._replace(b=fp4gemm.stack([case.b[1], case.b[0], case.b[2]]))
    assert not torch.equal(got, expected_rows(other))
    compact = model_epilogue.grouped_scales(case.a.scales.view(torch.uint8).numpy(), case.ends, 4)
    assert_bits(torch.from_numpy(compact), case.a.compact_scales().view(torch.uint8), "scales")
