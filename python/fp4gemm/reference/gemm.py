"""The GEMM with its fused epilogue, dense and grouped: gemm, and gemm_out, which writes a given tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _checks
from .._checks import gemm as gemm_checks
from ..ops.schema import GemmCall, accepts, accepts_out
from . import spans
from .chunks import fp32, row_chunks
from .decoding import decode
from .epilogue import Epilogue
from .prepacking import unprepack

__all__ = ["Operand", "gemm", "gemm_by", "gemm_out", "multiply"]

# Codes and their swizzled scales, or values and None.
Operand = tuple[Tensor, Tensor | None]
# Writes the product of two operands to the first argument, finished by the epilogue.
Product = Callable[[Tensor, Operand, Operand, Epilogue], None]


@accepts(GemmCall)
def gemm(call: GemmCall) -> Tensor:
    """D = cast(fl(act(fl(fl(alpha * fl(alpha_col[n] * fl(alpha_row[m] * acc))) + bias[n])) + fl(beta * C))).

    acc = fl(sum_k a b): the accumulator is the float64 sum, rounded once to float32. Products of decoded
    NVFP4 values are multiples of 2^-20, so the float64 sum is exact in any order while the partial sums stay
    below 2^33. For k <= 1024 they always do.

    With offs, D of each group is the product of its part of the operands. The rank of b decides whether the
    groups divide m or k:

    - Ragged m (b of rank 3): group g multiplies rows offs[g-1] .. offs[g]-1 of a by b[g] and writes these
      rows of D (m, n). The rows from offs[-1] on are not written.
    - Ragged k (b of rank 2): D is (g, m, n), and D[g] is the product over the columns of group g. The columns
      of each group begin at a multiple of 64. For an empty group D[g] is cast(act(bias) + beta * C), which is
      exactly 0 without bias and c.

    Args:
        a: codes uint8 (m, k/2) with scale_a; or float16 or bfloat16 (m, k) with scale_a None.
        b: codes uint8 (n, k/2), or (g, n, k/2) for ragged m, with scale_b; or float16 (n, k) or (g, n, k)
            with scale_b None; or the bytes of prepacked weights, (bytes,) or (g, bytes), with scale_b None
            and b_rows = n.
        scale_a: the swizzled float8_e4m3fn scales of a, (ceil128(m), ceil4(k/16)), or for ragged m
            (grouped_scale_rows(m, g), ceil4(k/16)).
        scale_b: the swizzled float8_e4m3fn scales of b, (ceil128(n), ceil4(k/16)), or for ragged m
            (g, ceil128(n), ceil4(k/16)).
        offs: int32 (g,), the cumulative ends of the groups, read on the host; None for a dense product.
        alpha: one number, rounded to float32; it must be 1 with alpha_groups.
        alpha_groups: float32 (g,), in place of alpha.
        alpha_row: float32 (m,) or (1,), with ragged k also (g, m) or (g, 1); None means 1.
        alpha_col: float32 (n,) or (1,), with groups also (g, n) or (g, 1); None means 1.
        bias: (n,), with groups also (g, n), of any float type, converted to float32; or None.
        activation: a number as in :func:`activate`.
        c: a tensor of the shape and the dtype of D, or None; with gemm_out it may be out itself.
        beta: one number, rounded to float32; it must be 1 without c.
        batch_invariant: a bool, which does not change the bits of the reference.
        b_rows: n if b is prepacked, else 0.
        kernel_name: None or "cpu_reference".
        out_dtype: bfloat16, float16 or float32.

    Returns:
        D, (m, n) or (g, m, n) of out_dtype, contiguous; with a gated activation (m, n/2).
    """
    return gemm_by(call, None, multiply)


@accepts_out
def gemm_out(call: GemmCall, out: Tensor) -> None:
    """Write the result of :func:`gemm` to out, whose dtype is the output type.

    Rows that belong to no group are not written.
    """
    gemm_by(call, out, multiply)


def gemm_by(call: GemmCall, out: Tensor | None, product: Product) -> Tensor:
    """Return :func:`gemm`, or write it to out, with another implementation of :func:`multiply`."""
    if out is not None:
        _checks.has_dtype("out", _checks.is_tensor("out", out), _checks.FLOAT_DTYPES)
    name, dtype = "fp4gemm.scaled_mm" if call.offs is None else "fp4gemm.scaled_grouped_mm", call.out_dtype
    _checks.is_float_dtype("out_dtype", dtype)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    if call.kernel_name not in (None, _checks.CPU_KERNEL):
        raise ValueError(
            f"kernel_name: got {call.kernel_name!r}, must be None or {_checks.CPU_KERNEL!r} on the CPU"
        )
    call = gemm_checks.checked_operands(_unprepacked(call))
    shape = gemm_checks.checked_shape(call, dtype)
    device, offs, bias, c = call.a.device, call.offs, call.bias, call.c
    alpha = gemm_checks.alpha(call, name)
    if bias is not None:
        bias = gemm_checks.bias(bias, shape[-1], device, name, None if offs is None else offs.shape[0])
    activation = gemm_checks.activation_of_number(call.activation)
    if activation.is_gated:
        gemm_checks.gated(activation, shape[-1], dtype, c, gemm_checks.is_ragged_k(call))
        shape = (*shape[:-1], activation.width(shape[-1]))
    beta = gemm_checks.beta(call.beta, c)
    if c is not None:
        gemm_checks.c(c, shape, dtype, device, name)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        gemm_checks.out(out, shape, None, device, name)
        if c is not None:
            _checks.no_overlap(c, out)
    scalar = fp32(alpha, device) if call.alpha_groups is None else call.alpha_groups
    terms = Epilogue(scalar, call.alpha_row, call.alpha_col, bias, activation, c, fp32(beta, device))
    if offs is None:
        product(out, (call.a, call.scale_a), (call.b, call.scale_b), terms)
    elif gemm_checks.is_ragged_k(call):
        _ragged_k_into(out, call, offs, terms, product)
    else:
        _ragged_m_into(out, call, offs, terms, product)
    return out


def _unprepacked(call: GemmCall) -> GemmCall:
    """Return the call with the codes and scales of b in place of a prepacked b."""
    _checks.is_int("b_rows", call.b_rows, 0)
    if not call.b_rows:
        return call
    k = call.a.shape[-1] * (1 if call.scale_a is None else 2)
    gemm_checks.prepacked(call, k)
    codes, scales = unprepack(call.b, call.b_rows, k)
    return call._replace(b=codes, scale_b=scales, b_rows=0)


def _ragged_m_into(out: Tensor, call: GemmCall, offs: Tensor, terms: Epilogue, product: Product) -> None:
    a, b, scale_a, scale_b = call.a, call.b, call.scale_a, call.scale_b
    for g, (begin, end, scale_begin, scale_end) in enumerate(spans.of_rows(offs, a.shape[0])):
        if begin == end:
            continue
        left = a[begin:end], None if scale_a is None else scale_a[scale_begin:scale_end]
        right = b[g], None if scale_b is None else scale_b[g]
        product(out[begin:end], left, right, terms.group(g).rows(begin, end))


def _ragged_k_into(out: Tensor, call: GemmCall, offs: Tensor, terms: Epilogue, product: Product) -> None:
    a, b, scale_a, scale_b = call.a, call.b, call.scale_a, call.scale_b
    for g, (begin, end) in enumerate(spans.of_columns(offs, gemm_checks.k_of(a))):
        own = terms.group(g)
        if own.c is not None:
            own = own._replace(c=own.c[g])
        if begin == end:
            out[g] = own.finished(torch.zeros(out.shape[1:], dtype=torch.float32, device=a.device))
        else:
            left, right = (_columns(x, s, begin, end) for x, s in ((a, scale_a), (b, scale_b)))
            product(out[g], left, right, own)


def _columns(data: Tensor, scales: Tensor | None, begin: int, end: int) -> Operand:
    """Return columns begin .. end-1 of an operand (rows, k); begin and end are multiples of 64."""
    if scales is None:
        return data[:, begin:end], None
    return data[:, begin // 2 : end // 2].contiguous(), spans.scales_of_columns(scales, begin, end)


def multiply(out: Tensor, a: Operand, b: Operand, terms: Epilogue) -> None:
    """Write the product of a (m, k) and b (n, k) to out; terms.c may be out itself."""
    left, right = (data if scales is None else decode(data, scales) for data, scales in (a, b))
    (m, k), n = left.shape, right.shape[0]
    wide_b = right.to(torch.float64).t()
    for i, j in row_chunks(m, max(n, k)):
        acc = torch.mm(left[i:j].to(torch.float64), wide_b).to(torch.float32)
        part = terms.rows(i, j)
        out[i:j] = part.finished(part.scaled(acc))
