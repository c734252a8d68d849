"""The operators that quantize: quantize, quantize_both, quantize_decoded, quantize_searched, quantize_stack.

cpp/torch/quantize_cpu.cpp quantizes rows with encode te and blocks of one row, with or without four over six,
and quantize_search_cpu.cpp searches for scales; the reference, whose bits are the same, does everything else.
The threads are those of torch (``torch.set_num_threads``). :mod:`.options` has the keywords of the public
functions and the checks of single options.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, _native, layout
from ..layout import padded_scale_shape, unswizzle_scales
from ..reference import nvfp4, scale_search
from ..reference.chunks import gathered
from ..reference.eden import EDEN
from ..reference.grouped import ColumnGroups, Groups
from ..reference.nvfp4 import Quantization, decode
from . import options as option_checks
from ._call import Operator, accepts, narrowed, on_cpu, succeeded

__all__ = [
    "OPERATORS",
    "QuantizeBothCall",
    "QuantizeCall",
    "QuantizeDecodedCall",
    "QuantizeSearchedCall",
    "QuantizeStackCall",
    "check_options",
    "empty_parts",
    "gather_alone",
    "quantize",
    "quantize_both",
    "quantize_compiled",
    "quantize_decoded",
    "quantize_decoded_compiled",
    "quantize_decoded_fake",
    "quantize_fake",
    "quantize_searched",
    "quantize_stack",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # at the numbers of the C functions
# The options that the compiled code has; it serves no call in which another one differs from its default.
_COMPILED = ("four_over_six", "fast_error", "e4m3_max", "offs", "rows", "residual_channels")


class QuantizeCall(NamedTuple):
    """``quantize``. The other quantizers have the same parameters, less those that do not apply to them."""

    x: Tensor
    amax: Tensor | None
    per_row: bool
    axis: int = -1
    block_rows: int = 1
    encode: int = 0
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    hadamard: int = 0
    signs: int = 0
    rng_state: Tensor | None = None
    offs: Tensor | None = None
    rows: Tensor | None = None
    residual_channels: Tensor | None = None


def _derived(name: str, doc: str, without: tuple[str, ...], **inserted: str) -> Any:
    """A named tuple of QuantizeCall's parameters without some of them.

    ``inserted`` maps the name of an added parameter to the one that it follows, whose type it has.
    """
    types = QuantizeCall.__annotations__
    names = [field for field in QuantizeCall._fields if field not in without]
    for added, before in inserted.items():
        names.insert(names.index(before) + 1, added)
    known = QuantizeCall._field_defaults
    defaults = [known[field] for field in names if field in known]
    made: Any = collections.namedtuple(name, names, defaults=defaults, module=__name__)  # type: ignore[misc]
    made.__doc__ = doc
    made.__annotations__ = {field: types[inserted.get(field, field)] for field in names}
    made.__new__.__annotations__ = dict(made.__annotations__)
    return made


# To a type checker, which cannot read derived named tuples, these are Any.
QuantizeDecodedCall = _derived(
    "QuantizeDecodedCall", "``quantize_decoded``: blocks of one row.", without=("block_rows",)
)
QuantizeBothCall = _derived(
    "QuantizeBothCall",
    "``quantize_both``: x and x.T. amax_t is the amax of x.T.",
    without=("axis", "rows", "residual_channels"),
    amax_t="amax",
)


class QuantizeSearchedCall(NamedTuple):
    """``quantize_searched``: quantize with a search for the block scales; blocks along k, without groups."""

    x: Tensor
    amax: Tensor | None
    importance: Tensor | None
    per_row: bool
    block_rows: int = 1
    e4m3_max: int = 448
    fp8_operand: bool = False


class QuantizeStackCall(NamedTuple):
    """``quantize_stack``: the matrices of a stack, or their transposes, or both."""

    x: Tensor
    amax: Tensor | None
    rows: bool
    columns: bool
    per_row: bool = False
    block_rows: int = 16  # 1: columns alone
    encode: int = 0
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    hadamard: int = 0
    signs: int = 0
    rng_state: Tensor | None = None


# ---- checks


def check_options(call: QuantizeCall) -> None:
    """Raise unless each option of the quantizers has a valid type and value and their combination exists."""
    _checks.is_one_of("per_row", call.per_row, (True, False))
    _checks.is_one_of("block_rows", call.block_rows, (1, 16))
    _checks.is_one_of("encode", call.encode, (0, 1, 2))
    _checks.is_one_of("four_over_six", call.four_over_six, (0, 1, 2))
    _checks.is_one_of("fast_error", call.fast_error, (False, True))
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_one_of("hadamard", call.hadamard, (0, 1, 2))
    signs = call.signs
    if isinstance(signs, bool) or not isinstance(signs, int):
        raise TypeError(f"signs: got {_checks.describe(signs)}, must be an int")
    if not 0 <= signs <= 0xFFFF:
        raise ValueError(f"signs: got {signs}, must be 0 to 0xFFFF")
    if signs and not call.hadamard:
        raise ValueError(f"signs: got {signs}, must be 0 without hadamard")
    is_eden = call.encode == EDEN
    if call.e4m3_max != 448 and not call.four_over_six and not is_eden:
        raise ValueError(f"e4m3_max: got {call.e4m3_max}, must be 448 without four_over_six")
    if is_eden:
        for name, wanted in (("hadamard", 2), ("e4m3_max", 256)):
            if getattr(call, name) != wanted:
                raise ValueError(f"{name}: got {getattr(call, name)}, must be {wanted} with encode {EDEN}")
        if call.rng_state is None:
            raise ValueError(f"rng_state: got None, must be a tensor with encode {EDEN}")
    if call.rng_state is not None:
        _checks.exact_vector("rng_state", call.rng_state, 2, torch.int64, call.x.device, "x")
    if call.rows is not None:
        option_checks.gather_rows(call.rows, call.x.device)
        gather_alone(call)
    if call.residual_channels is not None:
        option_checks.residual_channels(call.residual_channels, call.x)
        _refuse_beside_residual(call)
    if call.block_rows == 16:
        because = "block_rows 16"
        if call.per_row:
            _checks.refuse("per_row", True, "False", because)
        _refuse_variants(call, because)
    if call.four_over_six:
        _refuse_variants(call, f"four_over_six {call.four_over_six}")


def _refuse_variants(call: QuantizeCall, because: str) -> None:
    if call.encode:
        _checks.refuse("encode", call.encode, "0 (te)", because)
    if call.hadamard:
        _checks.refuse("hadamard", call.hadamard, "0", because)
    if call.rng_state is not None:
        raise NotImplementedError(f"rng_state: got a tensor, must be None with {because}")


def _refuse_beside_residual(call: QuantizeCall) -> None:
    """Raise NotImplementedError for an option that no kernel combines with residual_channels."""
    because = "residual_channels"
    for name, wanted in (("axis", -1), ("block_rows", 1), ("hadamard", 0)):
        if getattr(call, name) != wanted:
            _checks.refuse(name, getattr(call, name), str(wanted), because)
    for name in ("rng_state", "offs"):
        if getattr(call, name) is not None:
            raise NotImplementedError(f"{name}: got a tensor, must be None with {because}")


def gather_alone(call: QuantizeCall) -> None:
    """Raise NotImplementedError for a call with rows and an option that no kernel combines with them."""
    wanted = QuantizeCall(call.x, None, True, signs=call.signs, offs=call.offs, rows=call.rows)
    for name, value, default in zip(QuantizeCall._fields, call, wanted, strict=True):
        if value is not default and (isinstance(value, Tensor) or value != default):
            raise NotImplementedError(
                f"rows: got a tensor with {name} {_checks.describe(value)}, must be None with it; rows needs "
                "scaling 'row', axis -1, an amax that is computed, and the defaults of the other options"
            )


def _grouped(name: str, call: QuantizeCall) -> tuple[Quantization, Groups | ColumnGroups | None]:
    """Check the shapes of a call, whose amax has this name, and return it with its groups.

    With groups of columns, x of the call that is returned has their padding.
    """
    x, offs = call.x, call.offs
    groups: Groups | ColumnGroups | None = None
    if offs is not None and call.block_rows == 16:
        raise NotImplementedError("offs: got a tensor, must be None with block_rows 16")
    if offs is not None and call.axis == 0:
        groups = ColumnGroups(offs, x.shape[0], x.device)
        call = call._replace(x=groups.pad(x))
    elif offs is not None:
        groups = Groups(offs, x.shape[0], x.device)
    elif call.axis == 0:
        _checks.is_multiple("x", "m", x.shape[0], _checks.BLOCK)
    _check_amax(name, call, groups)
    return narrowed(Quantization, call), groups


def _check_amax(name: str, call: QuantizeCall, groups: Groups | ColumnGroups | None) -> None:
    """Raise unless the amax of a call is None or has the entries that the call needs."""
    if call.amax is None:
        return
    num_groups = 0 if groups is None else groups.num_groups
    rows, _ = nvfp4.result_shape(narrowed(Quantization, call))
    option_checks.given_amax(
        name, call.amax, rows, call.per_row, call.x.device, axis=call.axis, groups=num_groups
    )
    option_checks.amax_values(name, call.amax)


def check_searched(call: QuantizeSearchedCall) -> None:
    """Raise unless the arguments of quantize_searched are valid."""
    x, amax = call.x, call.amax
    _checks.quantize_input(x)
    _checks.is_one_of("per_row", call.per_row, (True, False))
    _checks.is_one_of("block_rows", call.block_rows, (1, 16))
    if call.block_rows == 16 and call.per_row:
        _checks.refuse("per_row", True, "False", "block_rows 16")
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_bool("fp8_operand", call.fp8_operand)
    option_checks.importance(call.importance, x.shape[1], x.device)
    if amax is not None:
        _checks.exact_vector("amax", amax, x.shape[0] if call.per_row else 1, torch.float32, x.device, "x")
        option_checks.amax_values("amax", amax)


def check_stack(call: QuantizeStackCall) -> None:
    """Raise unless the arguments of quantize_stack are valid."""
    x, function = _checks.is_tensor("x", call.x), "fp4gemm.reference.quantize_stack"
    _checks.has_rank("x", x, 3, "(g, n, k)")
    g, n, k = x.shape
    if g < 1 or n < 1:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must hold at least one matrix of at least one row")
    _checks.quantize_input(x[0], function)
    if g > 1 and x.stride(0) != n * x.stride(1) and n > 1:
        raise ValueError(f"x: stride along matrices is {x.stride(0)}, must be {n * x.stride(1)}")
    _checks.is_bool("rows", call.rows)
    _checks.is_bool("columns", call.columns)
    if not call.rows and not call.columns:
        raise ValueError("rows: got False, must be True where columns is False")
    if call.columns:
        _checks.is_multiple("x", "n", n, _checks.BLOCK)
    check_options(narrowed(QuantizeCall, call, rows=None))
    if call.rows and call.block_rows == 1:
        _checks.refuse("rows", True, "False", "block_rows 1")
    if call.amax is not None:
        if call.per_row:
            option_checks.given_amax("amax", call.amax, k, True, x.device, stack=g)
        else:
            _checks.exact_vector("amax", call.amax, g, torch.float32, x.device, "x", function)
        option_checks.amax_values("amax", call.amax)


# ---- the reference


@accepts(QuantizeCall)
def quantize(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of x (m, k) or of its transpose.

    :mod:`fp4gemm.reference.nvfp4` defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 16.
        amax: A, float32; None computes it from x. With per_row it has an entry for each row of the result,
            (m,), or (g, m) with offs and axis 0. Otherwise it is (1,), or (g,) with offs.
        per_row: whether each row has an amax; otherwise the tensor or, with offs, each group has one.
        axis: -1 for blocks along k; 0 for blocks along m, with the result of x.T. Without offs, m must then
            be a positive multiple of 16.
        block_rows: 1, or 16 for 16x16 tiles that share one scale. If the last tile has fewer than 16 rows,
            the missing ones count as zero.
        encode: 0 for te, 1 for te_per_token, 2 for eden (reference/eden.py), which needs rng_state, hadamard
            2 and e4m3_max 256.
        four_over_six: 0 for none, 1 to choose by the mean absolute error, 2 by the mean squared error
            (reference/four_over_six.py). The error of a tile is summed in the orientation of x for either
            axis.
        fast_error: whether four_over_six uses the fast error instead of the exact one.
        e4m3_max: 448, or 256 with four_over_six or encode 2.
        hadamard: 0 for none, 1 to rotate and round to bfloat16, 2 to rotate (reference/hadamard.py).
        signs: element r of each block is negated before the rotation if bit r is set.
        rng_state: int64 (2,), {seed, offset}. If it is given, codes or, with encode 2, scales are rounded
            stochastically (reference/philox.py), with offset + 1 for axis 0.
        offs: int32 (g,), the ends of groups of rows (reference/grouped.py). With axis -1, the rows after the
            last group get codes and amax 0. With axis 0, the result is that of the padded groups, transposed,
            (k, grouped_columns(m, g)), and each group has an amax of its own, 0 if it has no rows.
        rows: int32 (m,). Row i of what is quantized is row rows[i] of x, or zeros if that is outside of x.
            Only with axis -1, an amax for each row that is computed, and the defaults of the other options
            but offs.
        residual_channels: int32 (r,), r a positive multiple of 32 and at most k, distinct numbers of columns
            of x, or None. The quantized errors of these columns follow those of x
            (reference/nvfp4.py), so that the result has k + r columns. The CPU refuses a number that is
            outside of x or repeated; a GPU takes 0 for the error of one outside of x. Only with axis -1,
            block_rows 1, and without hadamard, rng_state, offs and rows.

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (ceil128(m), ceil4(k/16)), or with offs
        (grouped_scale_rows(m, g), ceil4(k/16)), swizzled, with zero padding; amax float32 (m,) with per_row,
        else (1,), or (0,) if the argument amax was given. With residual_channels k is that of x plus r. With
        axis -1 an amax for each group is expanded to (m,), even if it was given. For axis 0, m and k are
        exchanged, and with offs amax is (g, m) or (g,).

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument or combination; the text names it.
    """
    return _quantized(call)


def _quantized(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    _checks.quantize_input(call.x)
    _checks.is_one_of("axis", call.axis, (-1, 0))
    check_options(call)
    if call.rows is not None:
        call = call._replace(x=gathered(call.x, call.rows), rows=None)
    return nvfp4.quantize(*_grouped("amax", call))


@accepts(QuantizeBothCall)
def quantize_both(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of quantize(x, axis=-1) without the rotation, then of quantize(x, axis=0) with it.

    This is the recipe of TransformerEngine.

    Args:
        x: (m, k), m and k positive multiples of 16; m is any number with offs.
        amax: A for axis -1, or None.
        amax_t: A for axis 0; it must be given exactly when amax is.

    The other arguments, the results and the errors are those of :func:`quantize`.
    """
    _checks.quantize_input(call.x, "fp4gemm.quantize_both")
    rows = narrowed(QuantizeCall, call)
    check_options(rows)
    if call.encode == EDEN:
        raise NotImplementedError(f"encode: got {EDEN}, must be 0 or 1 for both directions in one call")
    if (call.amax is None) != (call.amax_t is None):
        raise ValueError(
            f"amax_t: got {'None' if call.amax_t is None else 'a tensor'}, must be given exactly when amax is"
        )
    columns = rows._replace(axis=0, amax=call.amax_t)
    of_rows = _grouped("amax", rows._replace(hadamard=0, signs=0))
    of_columns = _grouped("amax_t", columns)
    return *nvfp4.quantize(*of_rows), *nvfp4.quantize(*of_columns)


@accepts(QuantizeDecodedCall)
def quantize_decoded(call: Any) -> tuple[Tensor, Tensor]:
    """Quantize x and return (q * s as float16 in the shape of the result, amax).

    Rows of no group, and padding of groups, become 0. The arguments, amax and the errors are those of
    :func:`quantize`; blocks have one row.
    """
    codes, scales, made = _quantized(narrowed(QuantizeCall, call))
    m, k = codes.shape[0], 2 * codes.shape[1]
    if k == 0:
        return torch.empty((m, 0), dtype=torch.float16, device=codes.device), made
    has_groups = call.offs is not None and call.axis == -1
    groups = Groups(call.offs, m, call.x.device) if has_groups else None
    blocks = k // _checks.BLOCK
    compact = unswizzle_scales(scales, m, blocks) if groups is None else groups.unswizzle(scales, blocks)
    return decode(codes, compact), made


@accepts(QuantizeSearchedCall)
def quantize_searched(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of x (m, k), as :mod:`fp4gemm.reference.scale_search` defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 16.
        amax: A, float32 (m,) with per_row, else (1,); None computes it from x.
        importance: h, float32 (k,), an entry for each column of x; None is 1 for all. The CPU refuses
            negative and infinite entries and NaN.
        per_row: whether each row has an amax; otherwise the tensor has one.
        block_rows: 1, or 16 for 16x16 tiles that share one scale; per_row must then be False. If the last
            tile has fewer than 16 rows, the missing ones count as zero.
        e4m3_max: 448 or 256. With 256 the standard scales end at 256, which leaves larger candidates to the
            blocks that have the amax of their row or tensor.
        fp8_operand: whether E is the mean of the squared errors of x as NVFP4 values and as the FP8 values
            that FP8 tokens are multiplied by.

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled, with zero padding;
        amax float32 (m,) with per_row, else (1,), or (0,) if the argument amax was given.

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument or combination; the text names it.
    """
    check_searched(call)
    return scale_search.quantize(*call)


@accepts(QuantizeStackCall)
def quantize_stack(call: QuantizeStackCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrices of x, those of their transposes, and the amax of each matrix.

    Each matrix has the bits of :func:`quantize`, along axis -1 and axis 0.

    Args:
        x: (g, n, k) bfloat16, float16 or float32, unit stride along k, the rows of all matrices equally far
            apart; g and n >= 1, k a multiple of 16.
        amax: float32 (g,), with per_row (g, k), or None, which computes it from x.
        rows: whether the matrices are quantized; False with block_rows 1.
        columns: whether their transposes are quantized; n is then a multiple of 16.
        rng_state: int64 (2,), {seed, offset}, or None: matrix e is rounded with {seed, offset + 2e}.
        per_row, block_rows, encode, four_over_six, fast_error, e4m3_max, hadamard, signs: as for
            :func:`quantize`.

    Returns:
        codes uint8 (g, n, k/2), scales float8_e4m3fn (g, ceil128(n), ceil4(k/16)), codes (g, k, n/2) and
        scales (g, ceil128(k), ceil4(n/16)) of the transposes, and amax float32 (g,), with per_row (g, k).
        A direction that is not asked for has no matrix, and amax has no entry if it was given.

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument; the text names it.
    """
    check_stack(call)
    of_rows, of_columns = _side(call, -1, call.rows), _side(call, 0, call.columns)
    return *of_rows[:2], *of_columns[:2], (of_rows if call.rows else of_columns)[2]


def _side(call: QuantizeStackCall, axis: int, is_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and amax of the matrices of one direction; no matrix unless ``is_wanted``."""
    g, n, k = call.x.shape
    shape = (n, k) if axis == -1 else (k, n)
    count = g if is_wanted else 0
    codes = call.x.new_empty((count, shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = codes.new_empty((count, *padded_scale_shape(*shape)))  # bytes: few torch operators know float8
    amaxes = 0 if call.amax is not None else count
    amax = call.x.new_empty((amaxes, k) if call.per_row else (amaxes,), dtype=torch.float32)
    state = call.rng_state
    for e in range(count):
        own = slice(e, e + 1)
        given = None if call.amax is None else call.amax[e] if call.per_row else call.amax[own]
        of_e = None if state is None else torch.stack((state[0], state[1] + 2 * e))
        one = narrowed(QuantizeCall, call, x=call.x[e], amax=given, axis=axis, rng_state=of_e, rows=None)
        codes[e], found, measured = _quantized(one)
        scales[e] = found.view(torch.uint8)
        if call.amax is None:
            amax[own] = measured
    return codes, scales.view(torch.float8_e4m3fn), amax


# ---- compiled code on the CPU


@accepts(QuantizeCall)
def quantize_compiled(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize`, compiled where it applies; the bits are the same."""
    if not _is_compiled(call):
        return quantize(*call)
    x, amax, stored, groups = _prepared(call)
    m, k = x.shape[0], x.shape[1] + _num_residual(call)
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device="cpu")
    shape = padded_scale_shape(m, k) if groups is None else groups.scale_shape(k // _checks.BLOCK)
    scales = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    num_rows = m if groups is None else groups.num_rows
    place = None if groups is None else groups.place.data_ptr()
    _run(call, x, num_rows, amax, codes.data_ptr(), scales.data_ptr(), place, None)
    codes[num_rows:] = 0
    return codes, scales.view(torch.float8_e4m3fn), stored


@accepts(QuantizeDecodedCall)
def quantize_decoded_compiled(call: Any) -> tuple[Tensor, Tensor]:
    """:func:`quantize_decoded`, compiled where it applies; the bits are the same."""
    with_codes = narrowed(QuantizeCall, call)
    if not _is_compiled(with_codes):
        return quantize_decoded(*call)
    x, amax, stored, groups = _prepared(with_codes)
    shape = x.shape[0], x.shape[1] + _num_residual(with_codes)
    data = torch.empty(shape, dtype=torch.float16, device="cpu")
    num_rows = x.shape[0] if groups is None else groups.num_rows
    _run(with_codes, x, num_rows, amax, None, None, None, data.data_ptr())
    data[num_rows:] = 0
    return data, stored


@accepts(QuantizeSearchedCall)
def quantize_searched_compiled(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize_searched`, compiled; the bits are the same."""
    check_searched(call)
    x, amax, h = call.x, call.amax, call.importance
    stored = x.new_empty(0, dtype=torch.float32)
    if amax is None:
        amax = stored = nvfp4.outer_amax(_row_amax(x), call.per_row, None)
    m, k = x.shape
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device="cpu")
    scales = torch.zeros(padded_scale_shape(m, k), dtype=torch.uint8, device="cpu")
    succeeded(
        _native.torch_library().fp4gemm_torch_quantize_searched(
            x.data_ptr(), _DTYPES.index(x.dtype), m, k, x.stride(0),
            amax.data_ptr(), int(call.per_row), None if h is None else h.data_ptr(),
            call.block_rows, call.e4m3_max, int(call.fp8_operand), codes.data_ptr(), scales.data_ptr(),
        )
    )  # fmt: skip
    return codes, scales.view(torch.float8_e4m3fn), stored


def _is_compiled(call: QuantizeCall) -> bool:
    """Return whether there is compiled code for the options and for memory like that of x."""
    x = call.x
    for name, default in QuantizeCall._field_defaults.items():
        value = getattr(call, name)
        if name not in _COMPILED and (type(value) is not type(default) or value != default):
            return False
    return (
        all(
            each is None or on_cpu(each) for each in (call.amax, call.offs, call.rows, call.residual_channels)
        )
        and on_cpu(x)
        and x.dim() == 2
    )


def _prepared(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor, Groups | None]:
    """Check a call as the reference does; return x with its rows gathered, A, the result amax, the groups."""
    _checks.quantize_input(call.x)
    check_options(call)
    if call.rows is not None:
        call = call._replace(x=gathered(call.x, call.rows), rows=None)
    x, amax = call.x, call.amax
    groups = None if call.offs is None else Groups(call.offs, x.shape[0], x.device)
    _check_amax("amax", call, groups)
    if amax is None:
        amax = nvfp4.outer_amax(_row_amax(x), call.per_row, groups)
    elif groups is not None and not call.per_row:
        amax = groups.expand(amax)
    else:
        return x, amax.contiguous(), amax.new_empty(0), groups
    return x, amax, amax, groups


def _num_residual(call: QuantizeCall) -> int:
    """The columns that residual_channels adds to the result."""
    return 0 if call.residual_channels is None else call.residual_channels.shape[0]


def _row_amax(x: Tensor) -> Tensor:
    result = torch.empty(x.shape[0], dtype=torch.float32, device="cpu")
    succeeded(
        _native.torch_library().fp4gemm_torch_row_amax(
            x.data_ptr(), _DTYPES.index(x.dtype), *x.shape, x.stride(0), result.data_ptr()
        )
    )
    return result


def _run(
    call: QuantizeCall,
    x: Tensor,
    num_rows: int,
    amax: Tensor,
    codes: int | None,
    scales: int | None,
    scale_rows: int | None,
    decoded: int | None,
) -> None:
    """Quantize the first rows of x with the options of a call. The results are addresses."""
    stride = 0 if amax.shape[0] == 1 else 1
    channels = call.residual_channels
    succeeded(
        _native.torch_library().fp4gemm_torch_quantize_matrix(
            x.data_ptr(), _DTYPES.index(x.dtype), num_rows, x.shape[1], x.stride(0),
            amax.data_ptr(), stride, codes, scales, scale_rows, decoded,
            call.four_over_six, call.fast_error, call.e4m3_max,
            None if channels is None else channels.data_ptr(), _num_residual(call),
        )
    )  # fmt: skip


# ---- fake


@accepts(QuantizeCall)
def quantize_fake(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    x, offs = call.x, call.offs
    m = x.shape[0] if call.rows is None else call.rows.shape[0]
    rows, columns = (m, x.shape[1] + _num_residual(call)) if call.axis == -1 else (x.shape[1], m)
    made: int | tuple[int, int] = rows if call.per_row else 1
    if call.axis == 0 and offs is not None:
        groups = offs.shape[0]
        columns, offs = layout.grouped_columns(columns, groups), None
        made = (groups, rows) if call.per_row else groups
    expanded = offs is not None and not call.per_row  # one amax a group, repeated for its rows
    made = rows if expanded else made
    return empty_parts(x, rows, columns, made if call.amax is None or expanded else 0, offs)


def empty_parts(
    x: Tensor, rows: int, columns: int, amax: int | tuple[int, int], offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and amax of a quantized (rows, columns) tensor on the device of x."""
    scale_rows, scale_columns = _checks.padded_scale_shape(rows, columns)
    if offs is not None:
        scale_rows = layout.grouped_scale_rows(rows, offs.shape[0])
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty((scale_rows, scale_columns), dtype=torch.float8_e4m3fn),
        x.new_empty((amax,) if isinstance(amax, int) else amax, dtype=torch.float32),
    )


@accepts(QuantizeBothCall)
def quantize_both_fake(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        *quantize_fake(call.x, call.amax, call.per_row, offs=call.offs),
        *quantize_fake(call.x, call.amax_t, call.per_row, axis=0, offs=call.offs),
    )


@accepts(QuantizeDecodedCall)
def quantize_decoded_fake(call: Any) -> tuple[Tensor, Tensor]:
    codes, _, made = quantize_fake(*narrowed(QuantizeCall, call))
    return call.x.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16), made


@accepts(QuantizeSearchedCall)
def quantize_searched_fake(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_fake(call.x, call.amax, call.per_row)


@accepts(QuantizeStackCall)
def quantize_stack_fake(call: QuantizeStackCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = call.x
    g, n, k = x.shape

    def side(is_wanted: bool, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        count = g if is_wanted else 0
        scales = (count, *_checks.padded_scale_shape(rows, columns))
        return (
            x.new_empty((count, rows, columns // 2), dtype=torch.uint8),
            x.new_empty(scales, dtype=torch.float8_e4m3fn),
        )

    amaxes = 0 if call.amax is not None else g
    made = x.new_empty((amaxes, k) if call.per_row else (amaxes,), dtype=torch.float32)
    return *side(call.rows, n, k), *side(call.columns, k, n), made


OPERATORS = {
    "quantize": Operator(QuantizeCall, quantize, quantize_fake, quantize_compiled),
    "quantize_both": Operator(QuantizeBothCall, quantize_both, quantize_both_fake),
    "quantize_decoded": Operator(
        QuantizeDecodedCall, quantize_decoded, quantize_decoded_fake, quantize_decoded_compiled
    ),
    "quantize_searched": Operator(
        QuantizeSearchedCall, quantize_searched, quantize_searched_fake, quantize_searched_compiled
    ),
    "quantize_stack": Operator(QuantizeStackCall, quantize_stack, quantize_stack_fake),
}
