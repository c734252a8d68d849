"""GEMM problems whose result does not depend on the order of summation, and the CPU reference's results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import capi
import torch
from fp4gemm import layout, reference
from fp4gemm._formats import MX_BLOCK, MXFP4, MXFP8, NVFP4, BlockFormat
from fp4gemm.activations import by_name
from fp4gemm.ops import operators
from torch import Tensor

# The type of the tokens, by KernelInfo.operand of kernels on prepacked weights.
TOKEN_TYPES = {"prepacked": torch.float16, "prepacked_bf16": torch.bfloat16}

# The formats of a and b where both have block scales, by KernelInfo.operand.
FORMATS = {form.name: (form, form) for form in (NVFP4, MXFP8, MXFP4)}
FORMATS["mxfp8_mxfp4"] = (MXFP8, MXFP4)
EXPANDED = "mxfp8, and mxfp4 that is expanded"  # no operand of a kernel: that of MXFP8 computes it
FORMATS[EXPANDED] = (MXFP8, MXFP4)

# The terms of the epilogue in a problem: none, or all.
PLAIN, FULL = "plain", "full"


@dataclass
class Problem:
    """The host tensors of a call, and the expected D, which is poisoned where nothing may be written."""

    name: str
    m: int
    n: int
    k: int
    a: Tensor
    scale_a: Tensor | None  # None: a is fp16 or bf16
    b: Tensor
    scale_b: Tensor | None  # None: b is the bytes of prepacked weights
    want: Tensor  # (.., rows, row stride): D with the pad behind each row
    offs: Tensor | None = None
    is_ragged_k: bool = False
    alpha: float = 1.0
    activation: int = 0
    beta: float = 1.0
    vectors: dict[str, Tensor] = field(default_factory=dict)  # alpha_row, alpha_col, bias, c, alpha_groups

    @property
    def dtype(self) -> torch.dtype:
        return self.want.dtype


def codes_and_scales(
    rows: int, k: int, gen: torch.Generator, form: BlockFormat = NVFP4
) -> tuple[Tensor, Tensor]:
    """Random values, and scales of few significant bits, so that partial sums are exact in fp32.

    Values of MXFP8 have any sign and mantissa, and exponents of -1 or 0; scales of MX formats are 1/2, 1 or
    2.
    """
    if form is MXFP8:
        bits = torch.randint(0, 16, (rows, k), generator=gen)
        exponent = torch.randint(6, 8, (rows, k), generator=gen)
        values = ((bits & 8) << 4 | exponent << 3 | bits & 7).to(torch.uint8).view(torch.float8_e4m3fn)
        return values, _powers(rows, k, gen)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=gen)
    if form is MXFP4:
        return codes, _powers(rows, k, gen)
    mantissa = torch.randint(8, 16, (rows, k // 16), generator=gen) / 8
    exponent = torch.randint(-1, 2, (rows, k // 16), generator=gen)
    return codes, (mantissa * 2.0**exponent).to(torch.float8_e4m3fn)


def size_of_k(k: int, operand: str) -> int:
    """k, or for MXFP8 beside MXFP4 the next multiple of 128, as their kernels require."""
    return (k + 127) // 128 * 128 if operand == "mxfp8_mxfp4" else k


def _powers(rows: int, k: int, gen: torch.Generator) -> Tensor:
    powers = torch.randint(126, 129, (rows, k // MX_BLOCK), generator=gen).to(torch.uint8)
    return powers.view(torch.float8_e8m0fnu)


def numbers(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=gen) + 0.5


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose bytes are 0xFF."""
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def row_stride(n: int, terms: str) -> int:
    """The row stride of D in elements; problems with all terms have a pad behind each row."""
    return n if terms == PLAIN else n + 16


def dense(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    terms: str = FULL,
    activation: str | None = None,
    operand: str = "nvfp4",
) -> Problem:
    """A dense problem. n is that of the product; with a gated activation D has n / 2 columns."""
    k = size_of_k(k, operand)
    gen, (form_a, form_b) = torch.Generator().manual_seed(m * 1000003 + n * 1009 + k), FORMATS[operand]
    a, scales_a = codes_and_scales(m, k, gen, form_a)
    b, scales_b = codes_and_scales(n, k, gen, form_b)
    columns = columns_of_d(n, activation)
    want = poisoned((m, row_stride(columns, terms)), dtype)
    swizzled = [layout.swizzle_scales(scales) for scales in (scales_a, scales_b)]
    name = f"m{m}-n{n}-k{k}-{terms}-{activation}"
    problem = Problem(name, m, n, k, a, swizzled[0], b, swizzled[1], want)
    problem.activation = capi.ACTIVATIONS[activation]
    if terms == FULL:
        problem.alpha = 0.25
        problem.vectors = {
            "alpha_row": numbers((m,), gen),
            "alpha_col": numbers((n,), gen),
            "bias": numbers((n,), gen) - 1,
        }
        if not by_name[activation].is_gated:
            problem.vectors["c"], problem.beta = (numbers((m, n), gen) * 8).to(dtype), 0.5
    want[:, :columns] = computed(problem, dtype)
    return problem


def ends_of_tiles(dtype: torch.dtype, operand: str) -> list[Problem]:
    """Dense problems of one tile whose last row or column is in each fragment of a tile of 128x128.

    A warp of SM120 computes rows r, r + 8, r + 64 and r + 72, and fragments of 8 columns, each with code and
    comparisons of its own. No number of rows is even.
    """
    sizes = [*((rows, 128) for rows in (5, 13, 69, 77)), *((125, columns) for columns in range(8, 129, 8))]
    return [dense(m, n, 32, dtype, FULL, operand=operand) for m, n in sizes]


def columns_of_d(n: int, activation: str | None) -> int:
    return by_name[activation].width(n)


def group_rows(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The ends of the groups, and for each row of a group its row in the buffer of scales."""
    rows, begin = [], 0
    for size in sizes:
        rows.append(begin + torch.arange(size))
        begin += (size + 127) // 128 * 128
    return torch.tensor(sizes).cumsum(0).to(torch.int32), torch.cat(rows)


def grouped_ragged_m(
    sizes: tuple[int, ...],
    n: int,
    k: int,
    dtype: torch.dtype,
    terms: str = FULL,
    activation: str | None = None,
    operand: str = "nvfp4",
) -> Problem:
    """A problem with ragged m. The three rows behind the last group must stay as they are."""
    k = size_of_k(k, operand)
    gen = torch.Generator().manual_seed(sum(sizes) * 1009 + n + k + len(sizes))
    groups, m, (form_a, form_b) = len(sizes), sum(sizes) + 3, FORMATS[operand]
    offs, at = group_rows(sizes)
    a, scales_a = codes_and_scales(m, k, gen, form_a)
    spread = torch.zeros(layout.grouped_scale_rows(m, groups), k // form_a.block, dtype=torch.uint8)
    spread[at] = scales_a.view(torch.uint8)[: len(at)]
    spread = spread.view(scales_a.dtype)
    experts = [codes_and_scales(n, k, gen, form_b) for _ in sizes]
    b = torch.stack([codes for codes, _ in experts])
    scale_b = torch.stack([layout.swizzle_scales(scales) for _, scales in experts])
    columns = columns_of_d(n, activation)
    want = poisoned((m, row_stride(columns, terms)), dtype)
    name = f"{'.'.join(map(str, sizes))}-n{n}-k{k}-{terms}-{activation}"
    problem = Problem(name, m, n, k, a, layout.swizzle_scales(spread), b, scale_b, want, offs)
    problem.activation = capi.ACTIVATIONS[activation]
    if terms == FULL:
        problem.vectors = {
            "alpha_groups": numbers((groups,), gen),
            "alpha_row": numbers((m,), gen),
            "alpha_col": numbers((groups, n), gen),
            "bias": numbers((groups, n), gen) - 1,
        }
        if not by_name[activation].is_gated:
            problem.vectors["c"], problem.beta = (numbers((m, n), gen) * 8).to(dtype), 0.5
    want[:, :columns] = computed(problem, dtype)
    return problem


def grouped_ragged_k(
    sizes: tuple[int, ...],
    m: int,
    n: int,
    dtype: torch.dtype,
    terms: str = FULL,
    operand: str = "nvfp4",
) -> Problem:
    """A problem with ragged k. Columns that hold no token are zero."""
    gen = torch.Generator().manual_seed(sum(sizes) * 1009 + n + m + len(sizes))
    forms, groups = FORMATS[operand], len(sizes)
    step = forms[0].group_columns
    columns = (sum(sizes) + (step - 1) * min(groups, sum(sizes))) // step * step
    taken, begin = torch.zeros(columns, dtype=torch.bool), 0
    for size in sizes:
        taken[begin : begin + size] = True
        begin += (size + step - 1) // step * step
    operands = []
    for form, rows in zip(forms, (m, n), strict=True):
        if form is MXFP8:
            mask = taken.to(torch.uint8) * 0xFF
        else:
            mask = torch.where(taken.view(-1, 2), torch.tensor([0x0F, 0xF0]), 0).sum(1).to(torch.uint8)
        data, scales = codes_and_scales(rows, columns, gen, form)
        none = scales.new_empty(((rows + 127) // 128 * 128, 0))
        masked = (data.view(torch.uint8) & mask).view(data.dtype)
        operands += [masked, layout.swizzle_scales(scales) if columns else none]
    want = poisoned((groups, m, row_stride(n, terms)), dtype)
    a, scale_a, b, scale_b = operands
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    name = f"{'.'.join(map(str, sizes))}-m{m}-n{n}-{terms}"
    problem = Problem(name, m, n, columns, a, scale_a, b, scale_b, want, offs, True)
    if terms == FULL:
        problem.alpha, problem.beta = 0.125, 1.0
        problem.vectors = {
            "alpha_row": numbers((groups, m), gen),
            "alpha_col": numbers((n,), gen),
            "c": (numbers((groups, m, n), gen) * 8).to(dtype),
        }
    want[:, :, :n] = computed(problem, dtype)
    return problem


def computed(problem: Problem, dtype: torch.dtype) -> Tensor:
    """The CPU reference's D of a problem, in this type; rows of no group are poisoned."""
    activation = next(name for name, number in capi.ACTIVATIONS.items() if number == problem.activation)
    rows = (*problem.want.shape[:-1], columns_of_d(problem.n, activation))
    vectors = dict(problem.vectors)
    if "c" in vectors:
        vectors["c"] = vectors["c"].to(dtype)
    out = poisoned(rows, dtype)
    reference.gemm_out(
        problem.a,
        problem.b,
        problem.scale_a,
        problem.scale_b,
        problem.offs,
        alpha=problem.alpha,
        activation=problem.activation,
        beta=problem.beta,
        out=out,
        **vectors,
    )
    return out


def with_prepacked(problem: Problem, tokens: torch.dtype) -> Problem:
    """The problem with prepacked weights and with tokens of this type, which hold the values of its a.

    Rows of no group are NaN.
    """
    codes, rows = problem.a, torch.arange(problem.m)
    if problem.offs is not None:  # the scales of a group begin at a multiple of 128 rows
        _, rows = group_rows(tuple(problem.offs.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()))
        codes = codes.new_zeros(problem.scale_a.shape[0], codes.shape[1])
        codes[rows] = problem.a[: len(rows)]
    a = torch.full((problem.m, problem.k), torch.nan, dtype=tokens)
    scales = problem.scale_a[: (len(codes) + 127) // 128 * 128]
    a[: len(rows)] = reference.decode(codes, scales)[rows].to(tokens)
    b = operators.prepack(problem.b, problem.scale_b)
    return replace(problem, a=a, scale_a=None, b=b, scale_b=None)
