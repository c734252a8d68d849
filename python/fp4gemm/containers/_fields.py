"""Checks of the fields of containers: of a matrix, a stack of matrices, groups of rows or of k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _checks
from .._formats import BlockFormat
from ..layout import TILE_ROWS, grouped_scale_rows, swizzle_scales
from ..ops import options as option_checks

__all__ = [
    "compact_scales",
    "decoded",
    "fp8",
    "mx",
    "nvfp4",
    "options",
    "prepacked",
    "row_span",
    "split_sizes",
    "stack",
    "stack_index",
    "view_shape",
]


def nvfp4(codes: object, scales: object, amax: object, offs: object, offs_dim: int) -> tuple[Tensor, Tensor]:
    """Return codes as uint8 and swizzled scales as float8_e4m3fn, as views; raise unless all fields fit."""
    x = _checks.is_tensor("codes", codes)
    _checks.has_dtype("codes", x, _checks.CODE_DTYPES)
    if x.dim() == 3:
        checked = stack("codes", x, offs)
        g, n, k = checked.shape[0], checked.shape[1], 2 * checked.shape[2]
        _amax_of_stack(amax, g, n, x.device, "codes")
        return checked, _checks.stack_scales("scales", scales, g, n, k, x.device, "codes")
    if offs is not None and offs_dim == 1:
        checked = _checks.as_codes(_checks.ragged_columns("codes", x, 2))
        group_rows = None
        _amax_of_columns(amax, offs, "codes", checked)
    else:
        checked = _checks.codes("codes", x)
        group_rows = _groups_of_rows(amax, offs, "codes", checked)
        _checks.vector("amax", amax, checked.shape[0], x.device, "codes")
    m, k = checked.shape[0], 2 * checked.shape[1]
    return checked, _checks.scales("scales", scales, m, k, x.device, "codes", group_rows)


def decoded(data: object, amax: object, offs: object, offs_dim: int) -> None:
    """Raise unless the values are float16, contiguous and 16-byte aligned, and the amax fits them."""
    x = _checks.is_tensor("data", data)
    _checks.has_dtype("data", x, (torch.float16,))
    if x.dim() == 3:
        stack("data", x, offs)
        _amax_of_stack(amax, x.shape[0], x.shape[1], x.device, "data")
        return
    if offs is not None and offs_dim == 1:
        _amax_of_columns(amax, offs, "data", _checks.ragged_columns("data", x, 1))
    else:
        _checks.decoded("data", x)
        _groups_of_rows(amax, offs, "data", x)
        _checks.vector("amax", amax, x.shape[0], x.device, "data")


def fp8(data: object, amax: object, offs: object) -> None:
    """Raise unless the codes are e4m3, contiguous and 16-byte aligned, and there is an amax for each row."""
    x = _checks.is_tensor("data", data)
    _checks.has_dtype("data", x, (torch.float8_e4m3fn,))
    _checks.has_rank("data", x, 2, "(m, k)")
    _checks.is_multiple("data", "k", x.shape[1], _checks.FP8_STEP)
    _checks.operand_memory("data", x)
    _checks.exact_vector("amax", amax, x.shape[0], torch.float32, x.device, "data", "fp4gemm.mm")
    if offs is not None:
        _checks.group_ends(offs, x.device, "data")


def mx(
    form: BlockFormat,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    data: object,
    scales: object,
    swizzled: object,
    offs: object,
    offs_dim: object,
) -> tuple[Tensor, Tensor]:
    """Return the data, codes as uint8, and the scales as float8_e8m0fnu; raise unless all fields fit.

    name and dtypes are those of the field of the data.
    """
    x = _checks.is_tensor(name, data)
    _checks.has_dtype(name, x, dtypes)
    is_stack, group_rows = x.dim() == 3, None
    _checks.is_bool("swizzled", swizzled)
    _checks.is_one_of("offs_dim", offs_dim, (0, 1))
    if offs is None and offs_dim != 0:
        raise ValueError(f"offs_dim: got {offs_dim}, must be 0 without offs")
    if swizzled is False and (is_stack or offs is not None):
        raise ValueError("swizzled: got False, must be True of a stack and with offs")
    if is_stack:
        no_groups(f"{name} of rank 3", offs)
    else:
        stack = form.data_text.replace("m,", "g, n,")
        _checks.has_rank(name, x, 2, f"{form.data_text}, or {stack} of a stack")
    if offs is not None and offs_dim == 1:
        _checks.ragged_columns(name, x, form.per_entry, form.group_columns)
    else:
        _checks.is_multiple(name, "k", form.k_of(x), form.block)
    _checks.is_contiguous(name, x)
    _checks.is_aligned(name, x)
    m, k = x.shape[-2], form.k_of(x)
    if offs is not None:
        ends = _checks.group_ends(offs, x.device, name)
        if offs_dim == 0:
            group_rows = grouped_scale_rows(m, ends.shape[0])
    s = _checks.is_tensor("scales", scales)
    _checks.has_dtype("scales", s, form.scale_dtypes)
    wanted = _checks.mx_scale_shape(m if group_rows is None else group_rows, k, bool(swizzled))
    kind = "swizzled" if swizzled else "compact"
    lead = (x.shape[0],) if is_stack else ()
    _checks.has_shape("scales", s, (*lead, *wanted), f", the {kind} shape for {name} of {tuple(x.shape)}")
    _checks.same_device("scales", s, x.device, name)
    _checks.is_contiguous("scales", s)
    if swizzled:
        _checks.is_aligned("scales", s)
    return _checks.as_codes(x), _checks.as_scales(s, form)


def prepacked(data: object, amax: object, shape: object) -> None:
    """Raise unless the bytes are those of a prepacked (n, k) or (g, n, k), and the amax fits."""
    if not isinstance(shape, tuple):
        raise TypeError(f"shape: got {_checks.describe(shape)}, must be a tuple (n, k) or (g, n, k)")
    for size in shape:
        _checks.is_int("shape", size, 1)
    if len(shape) not in (2, 3) or shape[-1] % _checks.BLOCK:
        raise ValueError(f"shape: got {shape}, must be (n, k) or (g, n, k), k a multiple of {_checks.BLOCK}")
    x = _checks.is_tensor("data", data)
    _checks.has_dtype("data", x, _checks.PREPACKED_DTYPES)
    fp8 = _checks.is_for_fp8(x)
    *lead, n, k = shape
    if fp8 and k % _checks.FP8_STEP:
        raise ValueError(f"shape: got {shape}, must have k a multiple of {_checks.FP8_STEP} with int8 data")
    wanted = _checks.prepacked_bytes(n, k, fp8)
    _checks.has_shape("data", x, (*lead, wanted), f", prepacked {shape}{' for FP8 tokens' if fp8 else ''}")
    _checks.operand_memory("data", x)
    if lead:
        _amax_of_stack(amax, lead[0], n, x.device, "data")
    else:
        _checks.vector("amax", amax, n, x.device, "data")


def stack_index(e: object, shape: tuple[int, ...]) -> None:
    """Raise unless t[e] is a matrix of a stack t of this shape."""
    if len(shape) != 3:
        raise TypeError(f"t[e]: shape is {tuple(shape)}, must be (g, n, k), a stack of matrices")
    if isinstance(e, bool) or not isinstance(e, (int, torch.SymInt)):
        raise TypeError(f"e: got {_checks.describe(e)}, must be an int")
    if not -shape[0] <= e < shape[0]:
        raise IndexError(f"e: got {e}, must be below {shape[0]}, the matrices of the stack")


def row_span(index: slice, rows: int, offs: object) -> tuple[int, int]:
    """The first index and the end of t[start:stop] of an operand with ``rows`` rows or matrices."""
    no_groups("t[start:stop]", offs)
    start, stop, step = index.indices(rows)
    if step != 1:
        raise ValueError(
            f"t[start:stop:step]: step is {step}, must be 1, since the scales lie in tiles of rows"
        )
    return start, max(start, stop)


def split_sizes(value: object, dim: object, rows: int, offs: object) -> list[int]:
    """The numbers of rows of the parts of t.split(value, dim), as those of torch.split."""
    no_groups("t.split", offs)
    _checks.is_int("dim", dim, -3)
    if dim != 0:
        raise ValueError(f"dim: got {dim}, must be 0: only rows, or the matrices of a stack, have an amax")
    if not isinstance(value, (list, tuple)):
        _checks.is_int("split_size", value, 1)
        size: int = value  # type: ignore[assignment]
        return [min(size, rows - start) for start in range(0, rows, size)] or [0]
    for i, size in enumerate(value):
        _checks.is_int(f"split_size[{i}]", size, 0)
    if sum(value) != rows:
        raise ValueError(f"split_size: got {list(value)}, a sum of {sum(value)}, must be {rows} together")
    return list(value)


def view_shape(value: tuple[object, ...], shape: tuple[int, ...], offs: object) -> tuple[int, ...]:
    """The shape that t.reshape(*value) gives an operand of ``shape``, (m, k) or (g, n, k)."""
    no_groups("t.reshape", offs)
    if len(value) == 1 and isinstance(value[0], (list, tuple)):
        value = tuple(value[0])
    for size in value:
        _checks.is_int("shape", size, -1)
    sizes: list[int] = list(value)  # type: ignore[arg-type]
    k, rows = shape[-1], math.prod(shape[:-1])
    if sizes.count(-1) == 1:
        i, others = sizes.index(-1), math.prod(size for size in sizes if size != -1)
        sizes[i] = rows * k // others if others else 0
    if len(sizes) not in (2, 3) or sizes[-1] != k or math.prod(sizes[:-1]) != rows:
        raise ValueError(
            f"shape: got {tuple(value)} for an operand {tuple(shape)}, must be (m, {k}) or (g, n, {k}) with "
            f"{rows} rows, since a block of 16 lies within a row and each row has {k} elements"
        )
    return tuple(sizes)


def no_groups(what: str, offs: object) -> None:
    """Raise ValueError for an operand with groups, whose scales are laid out by the ends of the groups."""
    if offs is not None:
        raise ValueError(
            f"{what}: the operand has groups (offs), must have none, since the ends of its groups say where "
            "its scales lie"
        )


def options(e4m3_max: object, hadamard_signs: object, offs: object, offs_dim: object) -> None:
    """Raise unless e4m3_max, hadamard_signs, and offs with offs_dim have valid values."""
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    if hadamard_signs is not None:
        option_checks.check_signs(hadamard_signs, 0xFFFF | option_checks.DRAWN_SIGNS)
    _checks.is_one_of("offs_dim", offs_dim, (0, 1))
    if offs is None and offs_dim != 0:
        raise ValueError(f"offs_dim: got {offs_dim}, must be 0 without offs")


def compact_scales(name: str, value: object, codes: Tensor, contiguous: bool = False) -> Tensor:
    """Block scales in plain order, (.., m, k/16) of codes (.., m, k/2), as float8_e4m3fn."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, _checks.SCALE_DTYPES)
    shape = (*codes.shape[:-1], codes.shape[-1] // 8)
    _checks.has_shape(
        name, x, shape, f", the compact shape {'(g, n, k/16)' if codes.dim() == 3 else '(m, k/16)'}"
    )
    _checks.same_device(name, x, codes.device, "the codes")
    if contiguous:
        _checks.is_contiguous(name, x)
    return _checks.as_scales(x)


def stack(name: str, x: Tensor, offs: object = None) -> Tensor:
    """The codes (g, n, k/2) or values (g, n, k) of a stack whose matrices have at least one row."""
    _checks.has_dtype(name, x, (*_checks.CODE_DTYPES, torch.float16))
    if offs is not None:
        raise ValueError(f"offs: got {_checks.describe(offs)}, must be None for {name} of rank 3")
    if x.shape[0] < 1 or x.shape[1] < 1:
        raise ValueError(
            f"{name}: shape is {tuple(x.shape)}, must hold at least one matrix of at least one row"
        )
    _checks.is_multiple(name, "k", x.shape[2] * (1 if x.dtype is torch.float16 else 2), _checks.BLOCK)
    _checks.operand_memory(name, x)
    return _checks.as_codes(x)


def _groups_of_rows(amax: object, offs: object, other: str, x: Tensor) -> int | None:
    """Rows of the scales of groups of rows, which need an amax for each row; None without groups."""
    if offs is None:
        return None
    ends = _checks.group_ends(offs, x.device, other)
    _checks.exact_vector("amax", amax, x.shape[0], torch.float32, x.device, other, "fp4gemm.mm")
    return grouped_scale_rows(x.shape[0], ends.shape[0])


def _amax_of_columns(value: object, offs: object, other: str, x: Tensor) -> None:
    """The amax of ragged k: (g, m) or (g,)."""
    g = _checks.group_ends(offs, x.device, other).shape[0]
    _amax_of_matrices(value, ((g, x.shape[0]), (g,)), x.device, other)


def _amax_of_stack(value: object, g: int, n: int, device: torch.device, of: str) -> None:
    _amax_of_matrices(value, ((g, n), (g, 1)), device, of)


def _amax_of_matrices(
    value: object, shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device, of: str
) -> None:
    x = _checks.is_tensor("amax", value)
    _checks.has_dtype("amax", x, (torch.float32,))
    if tuple(x.shape) not in shapes:
        raise ValueError(f"amax: shape is {tuple(x.shape)}, must be {shapes[0]} or {shapes[1]}")
    _checks.same_device("amax", x, device, of)
    _checks.is_contiguous("amax", x)
    _checks.no_grad("amax", x, "fp4gemm.mm")


def swizzled_stack(compact: Tensor) -> Tensor:
    """The scales of a stack (g, r, c) in plain order, swizzled for each matrix: (g, ceil128(r), ceil4(c))."""
    # Once the rows of each matrix are padded, the stack is one matrix.
    padding = (0, 0, 0, -compact.shape[1] % TILE_ROWS)
    scales = swizzle_scales(torch.nn.functional.pad(compact.view(torch.uint8), padding).flatten(0, 1))
    stack: Tensor = scales.view(compact.shape[0], -1, scales.shape[1])
    return stack
