"""torch's FP8 products with one scale for each token and one for each channel: the baseline of FP8 layers.

``torch._scaled_mm`` multiplies e4m3 tokens (m, k) with scales (m, 1) by an e4m3 weight (n, k) with scales
(1, n), and ``torch._scaled_grouped_mm`` the tokens of experts by their weights. The tokens are quantized in
the call: on a GPU by a Triton kernel, one program for a token, on the CPU in plain torch. With
``use_fast_accum`` the sums stay in the tensor cores' accumulators, as engines that serve FP8 have it; without
it they are added to fp32 sums on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MOST = 448.0  # the largest number of e4m3
LEAST = 2.0**-100  # the least amax of a row, so that 448 / amax is finite; zeros keep their value
MOST_APART = 1e-3  # the part of the codes that may be a neighbour of the formula's
WARPS = (4, 16)  # the least and the most of a program
ELEMS_OF_WARP = 512  # 16 of each thread

if triton is not None:

    @triton.jit
    def _quantize(x, codes, scales, k, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < k
        values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST)
        multiplier = tl.div_rn(MOST, amax)
        tl.store(codes + row * k + columns, (values * multiplier).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, tl.div_rn(amax, MOST))


class Operand(NamedTuple):
    """A tensor in FP8; its values are codes * scales."""

    codes: Tensor  # (m, k), or (g, n, k) of a stack, float8_e4m3fn
    scales: Tensor  # float32 (m, 1), or (g, n, 1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """float32, of the shape of the codes."""
        return self.codes.float() * self.scales

    def part(self, which: int | slice) -> Operand:
        """One matrix of a stack, or some rows of a matrix."""
        return Operand(self.codes[which], self.scales[which])


def formula(x: Tensor) -> Operand:
    """x (.., k) with one scale, amax / 448, for each row: the definition, in plain torch."""
    amax = x.float().abs().amax(-1, keepdim=True).clamp_min(LEAST)
    most = torch.full_like(amax, MOST)  # a division of tensors rounds once
    codes = (x.float() * (most / amax)).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return Operand(codes, amax / most)


def formula_of_stack(x: Tensor) -> Operand:
    """:func:`formula` of a stack (g, n, k), one matrix after another to keep the peak of memory low."""
    parts = [formula(one) for one in x]
    return Operand(torch.stack([codes for codes, _ in parts]), torch.stack([scales for _, scales in parts]))


def quantize(x: Tensor) -> Operand:
    """:func:`formula` of tokens (m, k), in one kernel on a GPU.

    Under torch.compile it is the formula itself, which inductor fuses with the norm or gate ahead of it.

    Raises:
        NotImplementedError: the tokens are on a GPU, and Triton is missing.
    """
    if not x.is_cuda or torch.compiler.is_compiling():
        return formula(x)
    if triton is None:
        raise NotImplementedError("triton is not installed, which the quantizer of FP8 tokens needs")
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    num_warps = min(max(block // ELEMS_OF_WARP, WARPS[0]), WARPS[1])
    _quantize[(m,)](x.contiguous(), codes, scales, k, LEAST, MOST, block, num_warps=num_warps)
    return Operand(codes, scales)


def wrong(x: Tensor) -> str | None:
    """None if :func:`quantize` makes of x what :func:`formula` makes, else the difference.

    A division that is rounded in another way may change a code to its neighbour.
    """
    got, want = quantize(x), formula(x)
    off = float(((got.scales - want.scales).abs() / want.scales).max())
    if not off <= 1e-6:
        return f"its tokens: a scale is off by {off:.1e} of the formula's"
    steps = (got.codes.view(torch.int8).short() - want.codes.view(torch.int8).short()).abs()
    differ = float((steps != 0).float().mean())
    if int(steps.max()) > 1 or differ > MOST_APART:
        return f"its tokens: {differ:.1e} of the codes differ from the formula's, by up to {int(steps.max())}"
    return None


def multiply(a: Operand, w: Operand, use_fast_accum: bool = True, bias: Tensor | None = None) -> Tensor:
    """bfloat16 a @ w.T + bias; the bias (n,) is of bfloat16."""
    product: Tensor = torch._scaled_mm(
        a.codes,
        w.codes.t(),
        scale_a=a.scales,
        scale_b=w.scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    return product


def multiply_groups(a: Operand, w: Operand, offs: Tensor, use_fast_accum: bool = True) -> Tensor:
    """bfloat16 products of groups of rows of a with the matrices of a stack; offs are the ends of groups.

    On the CPU, where torch has no such product, it is a loop over the groups.

    Raises:
        NotImplementedError: this torch has no grouped product in FP8.
    """
    if not a.codes.is_cuda:
        ends = offs.tolist()
        rows = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = [
            multiply(a.part(one), w.part(e), use_fast_accum)
            for e, one in enumerate(rows)
            if one.stop > one.start
        ]
        return torch.cat(parts)
    if not hasattr(torch, "_scaled_grouped_mm"):
        raise NotImplementedError(f"torch {torch.__version__} has no torch._scaled_grouped_mm")
    product: Tensor = torch._scaled_grouped_mm(
        a.codes,
        w.codes.transpose(1, 2),
        a.scales.view(-1),
        w.scales.view(w.scales.shape[:2]),
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    return product


def linear(x: Tensor, w: Operand, use_fast_accum: bool = True, bias: Tensor | None = None) -> Tensor:
    """:func:`multiply` of tokens x (m, k) that are quantized here."""
    return multiply(quantize(x), w, use_fast_accum, bias)


def grouped(x: Tensor, w: Operand, offs: Tensor, use_fast_accum: bool = True) -> Tensor:
    """:func:`multiply_groups` of tokens that are quantized here."""
    return multiply_groups(quantize(x), w, offs, use_fast_accum)
