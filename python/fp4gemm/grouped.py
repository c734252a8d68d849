"""grouped_mm and scaled_grouped_mm: the products of all experts, or of all their gradients, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _gemm_checks, _options, ops, support
from ._operands import (
    ALPHA,
    ALPHA_UNQUANTIZED,
    OR_PLAIN,
    OR_PREPACKED,
    Left,
    Right,
    chosen_kernel,
    container,
    parts,
    same_rotation,
)
from .containers.nvfp4 import DecodedTensor, NVFP4Tensor
from .containers.prepacked import PrepackedTensor
from .gemm import Terms

__all__ = ["grouped_mm", "scaled_grouped_mm"]

_NO_GROUPS = (
    "must have groups: quantize(x, offs=offs) for the rows of experts, quantize(x, axis=0, offs=offs) for "
    "the gradients of weights"
)
_SIDES = {0: "rows", 1: "columns"}


def grouped_mm(
    a: Left,
    b: Right,
    offs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """The product of each group: D[g] = :func:`fp4gemm.mm` (a[g], b[g]), all groups in one launch.

    Grouped rows, the experts of a mixture: a (m, k) has the tokens of expert g in its rows offs[g-1] ..
    offs[g]-1, b (g, n, k) the weights, and the same rows of D (m, n) become cast(act(z) + beta * c) with
    z = alpha * (amax_b[g, n] * (amax_a[m] * acc)) + bias[g, n], as in mm. The rows from offs[-1] on belong to
    nobody: those of a given out keep what they hold, and those of a new D are undefined.

    Grouped columns, the gradients of the weights: a (m, cols) and b (n, cols) have the tokens along k, and D
    (g, m, n) has a matrix for each expert. That of an expert without a token is cast(act(bias) + beta * c):
    exactly 0 without them.

    The ends of the groups are read on the device alone: a captured CUDA graph may be replayed with others.
    They must ascend within the rows of a. On a GPU nothing checks them, but no value of theirs leads outside
    of the tensors; on the CPU wrong ones are refused.

    Args:
        a: ``quantize(x, offs=offs)``, k a multiple of 32; or ``quantize(x, axis=0, offs=offs)``; or for
            grouped rows a plain tensor x, bfloat16 or float16, as for mm.
        b: ``quantize(w)`` of w (g, n, k), or for grouped columns like a; n a multiple of 8 (of 4 for float32
            output). Rotations (hadamard) as for mm. For grouped rows it may be prepacked
            (:func:`fp4gemm.prepack`). Either operand may be decoded where the device multiplies float16
            (:func:`fp4gemm.decode`), b not beside bfloat16.
        offs: int32 (g,), the cumulative ends of the groups; None takes those of a, which a plain tensor does
            not have. Any number of groups, of any number of rows, 0 included.
        bias: (n,), or (g, n) with one a group; any of the output types, contiguous.
        activation, beta, out_dtype, kernel: as for :func:`fp4gemm.mm`; "swiglu" for grouped rows alone.
        c: as D, of the output type, laid out as out; it may be out itself, which then accumulates.
        out: as D, to write; unit stride along n, each row starting on 16 bytes, groups one after the other.
        batch_invariant: True selects the kernel by n, k and the number of groups alone, so that the bits of a
            token's row do not depend on the tokens beside it.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise on a GPU.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: operands without groups or with different ones; sizes off their steps; another shape,
            device, stride or alignment; different hadamard_signs; an unknown activation or kernel.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; swiglu with c,
            float32 output or grouped columns; the device has no kernel for the operands or the one that is
            forced.
        RuntimeError: as for :func:`fp4gemm.mm`.
    """
    terms = (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel)
    return checked_grouped_mm("fp4gemm.grouped_mm", ("a", "b"), a, b, offs, terms)


def checked_grouped_mm(
    function: str,
    names: tuple[str, str],
    a: Left,
    b: Right,
    offs: Tensor | None,
    terms: Terms,
) -> Tensor:
    """grouped_mm, of a function whose operands have these names."""
    signs = amax_a = scale_a = scale_b = None
    b_rows = 0
    packed = None
    if _gemm_checks.is_plain(a):
        data_a = _checks.decoded(names[0], a, _gemm_checks.PLAIN, function)
    else:
        packed = container(names[0], a, OR_PLAIN)
        data_a, scale_a = parts(packed)
    if isinstance(b, PrepackedTensor):
        data_b, (*_, b_rows, k_b) = b.data, b.shape
    else:
        data_b, scale_b = parts(container(names[1], b, OR_PREPACKED))
        k_b = _gemm_checks.depth(data_b)
    if packed is None:
        ends = _ends_of_rows(names, data_a, b, offs)
        _gemm_checks.beside(data_a, data_b, names)
        alpha = ALPHA_UNQUANTIZED[b.e4m3_max]
    else:
        ends = _ends(names, packed, b, offs)
        amax_a, signs, alpha = packed.amax, packed.hadamard_signs, ALPHA[packed.e4m3_max, b.e4m3_max]
        _checks.no_grad(names[0], amax_a, function)
    same_rotation(names, signs, b)
    dtype = _gemm_checks.resolved_dtype(terms[4], terms[5])
    if data_a.device != data_b.device:
        _checks.same_device(names[1], data_b, data_a.device, names[0])
    shape = _gemm_checks.grouped_sizes(
        data_a.shape[0],
        _gemm_checks.depth(data_a),
        b_rows or data_b.shape[-2],
        k_b,
        len(b.shape),
        ends.shape[0],
        dtype,
        names,
    )
    _checks.no_grad(names[1], b.amax, function)
    if amax_a is None:
        support.ready_for(data_a, "grouped_mm", ("bf16", "nvfp4"))
    product = (data_a, data_b, scale_a, scale_b, ends, alpha, None, amax_a, b.amax)
    return _run(function, product, b_rows, shape, dtype, terms)


def _ends(
    names: tuple[str, str],
    a: NVFP4Tensor | DecodedTensor,
    b: Right,
    offs: Tensor | None,
) -> Tensor:
    """The ends of the groups, after the checks that a and b have the same, and along the same side."""
    own = a.offs
    if own is None:
        raise ValueError(f"{names[0]}: has no groups (offs), {_NO_GROUPS}")
    num_groups = own.shape[0]
    if a.offs_dim == 0:
        _is_stack(names, b, num_groups)
    elif isinstance(b, PrepackedTensor) or b.offs is None or b.offs_dim != 1 or b.offs.shape != own.shape:
        if isinstance(b, PrepackedTensor):
            got = "no groups (prepacked)"
        else:
            got = "no groups" if b.offs is None else f"{b.offs.shape[0]} groups of {_SIDES[b.offs_dim]}"
        raise ValueError(f"{names[1]}: has {got}, must have {num_groups} groups of columns as {names[0]}")
    return own if offs is None else _gemm_checks.group_ends(offs, own.device, num_groups)


def _ends_of_rows(names: tuple[str, str], a: Tensor, b: Right, offs: Tensor | None) -> Tensor:
    """The ends of the groups of rows of a plain tensor, which has none of its own."""
    if offs is None:
        raise ValueError(f"offs: got None, must be an int32 tensor (g,) beside a plain tensor {names[0]}")
    ends = _options.group_ends(offs, a.device, names[0])
    _is_stack(names, b, ends.shape[0])
    return ends


def _is_stack(names: tuple[str, str], b: Right, num_groups: int) -> None:
    """Raise ValueError unless b is (num_groups, n, k)."""
    groups = "" if isinstance(b, PrepackedTensor) or b.offs is None else " with groups (offs)"
    if groups or len(b.shape) != 3 or b.shape[0] != num_groups:
        raise ValueError(
            f"{names[1]}: shape is {tuple(b.shape)}{groups}, must be ({num_groups}, n, k) without, "
            f"a matrix for each group of rows of {names[0]}"
        )


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D[g] = cast(act(alpha[g] * (alpha_col[g] * (alpha_row[g] * acc[g])) + bias[g]) + beta * c[g]).

    On raw tensors. Which size is ragged, b says by its rank: 3 for grouped rows, where D is (m, n), 2 for
    grouped columns, where D is (g, m, n). See :func:`grouped_mm` for both, and for rows of no group.

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or (m, k) float16 (decoded, or
            never quantized) or, for grouped rows, bfloat16 (never quantized). Contiguous, 16-byte aligned.
            Grouped rows: k a multiple of 32. Grouped columns: k is ``layout.grouped_columns(tokens, g)``,
            each group starting at a multiple of 64 of them and padded with zeros.
        b: codes or decoded float16 (not beside bfloat16) likewise, (g, n, k/2) or (g, n, k) for grouped rows,
            (n, k/2) or (n, k) for grouped columns.
        scale_a: float8_e4m3fn (or uint8), swizzled: for grouped rows (``layout.grouped_scale_rows(m, g)``,
            ceil4(k/16)), each group starting at a multiple of 128 rows; for grouped columns (ceil128(m),
            k/16). None if a is float16 or bfloat16, and only then.
        scale_b: likewise (g, ceil128(n), ceil4(k/16)), the swizzled scales of each matrix; or (ceil128(n),
            k/16).
        offs: int32 (g,), cumulative ends of the groups.
        alpha: a finite Python number, rounded to float32, or float32 (g,) on the device.
        alpha_row: float32 (m,) or (1,); with grouped columns also (g, m) or (g, 1).
        alpha_col: float32 (n,), (1,), (g, n) or (g, 1).
        bias, activation, c, beta, out_dtype, out, batch_invariant, kernel: as for :func:`grouped_mm`.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise on a GPU.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, stride, alignment or value; an unknown activation or kernel.
        NotImplementedError: as for :func:`grouped_mm`. RuntimeError: likewise.
    """
    name = "fp4gemm.scaled_grouped_mm"
    a, b, scale_a, scale_b, offs = _gemm_checks.grouped_operands(a, b, scale_a, scale_b, offs)
    num_groups = offs.shape[0]
    dtype = _gemm_checks.resolved_dtype(out_dtype, out)
    shape = _gemm_checks.grouped_arguments(a, b, num_groups, alpha_row, alpha_col, dtype)
    alpha_groups = None
    if isinstance(alpha, Tensor):
        alpha_groups = _checks.exact_vector("alpha", alpha, num_groups, torch.float32, a.device, "a", name)
        alpha = 1.0
    product = (
        a,
        b,
        scale_a,
        scale_b,
        offs,
        _gemm_checks.number("alpha", alpha),
        alpha_groups,
        alpha_row,
        alpha_col,
    )
    terms = (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel)
    return _run(name, product, 0, shape, dtype, terms)


_Product = tuple[
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor,
    float,
    Tensor | None,
    Tensor | None,
    Tensor | None,
]


def _run(
    function: str, product: _Product, b_rows: int, shape: tuple[int, ...], dtype: torch.dtype, terms: Terms
) -> Tensor:
    """The operator on operands that were checked; checks of all that both functions share besides them."""
    bias, activation, c, beta, out_dtype, out, batch_invariant, kernel = terms
    a, b, scale_a, scale_b, offs = product[:5]
    formats = _gemm_checks.formats(a, scale_a, scale_b, b_rows)
    support.ready_for(a, "grouped_mm", formats)
    ragged = "k" if not b_rows and b.dim() == 2 else "m"
    n = shape[-1]
    if bias is not None:
        bias = _gemm_checks.bias(bias, shape[-1], a.device, function, offs.shape[0])
    act = _gemm_checks.activation(activation)
    if act == _gemm_checks.SWIGLU:
        _gemm_checks.gated(n, dtype, c, ragged=ragged)
        shape = (shape[0], _gemm_checks.width(shape[1], act))
    beta = _gemm_checks.beta(beta, c)
    _checks.is_bool("batch_invariant", batch_invariant)
    kernel = chosen_kernel(kernel, a, n, formats, dtype, "grouped", act, batch_invariant, ragged)
    if out is not None:
        _gemm_checks.out(out, shape, out_dtype, a.device, function)
    if c is not None:
        _gemm_checks.c(c, shape, dtype, a.device, function)
    if out is not None:
        ops.scaled_grouped_mm_out(*product, bias, kernel, act, c, beta, batch_invariant, b_rows, out=out)
        return out
    last = (act, c, beta, batch_invariant, b_rows)
    result: Tensor = ops.scaled_grouped_mm(*product, bias, dtype, kernel, *last)
    return result
