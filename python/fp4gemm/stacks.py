"""stack and concat, and the quantization of each matrix of x (g, n, k), one for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks
from .containers.nvfp4 import NVFP4Tensor
from .layout import TILE_ROWS, padded_scale_shape
from .ops import operators
from .ops._call import narrowed
from .ops.quantize import QuantizeCall, QuantizeDecodedCall, QuantizeSearchedCall, QuantizeStackCall

__all__ = [
    "concat",
    "join_rows",
    "joined",
    "quantize_stack",
    "quantize_stack_both",
    "quantize_stack_decoded",
    "quantize_stack_searched",
    "stack",
    "stack_input",
]


def stack(tensors: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """w[e] = tensors[e]: matrices of one shape (n, k) as a stack (g, n, k), a copy. Inverse of ``w[e]``.

    Args:
        tensors: a list or tuple of at least one NVFP4Tensor (n, k) without groups; all have the same shape,
            device, dtype, e4m3_max and hadamard_signs. If some have an amax for each row and others a scalar,
            the scalars are repeated for their rows.

    Returns:
        NVFP4Tensor, amax (g, n) or (g, 1), on the current stream. Does not synchronise.

    Raises:
        TypeError: tensors is not a list or tuple, or an entry is not an NVFP4Tensor. ValueError: tensors is
            empty, or the entries differ.
    """
    _check_list(tensors)
    for i, t in enumerate(tensors):
        _check_entry(tensors, i)
        if len(t.shape) != 2:
            raise ValueError(f"tensors[{i}]: shape is {tuple(t.shape)}, must be (n, k)")
        _same_as_first(tensors, i, "shape")
    if len({t.amax.shape for t in tensors}) > 1:
        tensors = [t.with_row_amax() for t in tensors]
    parts = _stacked([(t.codes, t.scales, t.amax) for t in tensors])
    made = NVFP4Tensor._trusted(*parts, tensors[0].e4m3_max, None, tensors[0].hadamard_signs)
    return made._stamped(tensors[0].dtype)


def concat(tensors: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """The rows of all tensors, such as q, k and v, in one operand: (n0, k), (n1, k) as (n0 + n1, k).

    No code or block scale changes, and each row keeps its amax, so that tensors with unequal amaxes are
    exact: each row of the result, and of its products, has the bits that it has in its own tensor.

    Args:
        tensors: a list or tuple of at least one NVFP4Tensor (n, k), or of stacks (g, n, k), without groups; n
            may differ and need not be a multiple of 128. All have the same g, k, device, dtype, e4m3_max and
            hadamard_signs.

    Returns:
        NVFP4Tensor, a copy, amax (n,) or (g, n), on the current stream. Does not synchronise.

    Raises:
        TypeError: tensors is not a list or tuple, or an entry is not an NVFP4Tensor. ValueError: tensors is
            empty, or the entries differ.
    """
    _check_list(tensors)
    for i, t in enumerate(tensors):
        _check_entry(tensors, i)
        *lead, _, k = tensors[0].shape
        if (*t.shape[:-2], t.shape[-1]) != (*lead, k):
            wanted = ", ".join(map(str, (*lead, "n", k)))
            raise ValueError(f"tensors[{i}]: shape is {tuple(t.shape)}, must be ({wanted}) as of tensors[0]")
        _same_as_first(tensors, i)
    return joined(tensors)


def joined(tensors: Sequence[NVFP4Tensor], *, is_interleaved: bool = False) -> NVFP4Tensor:
    """:func:`concat` without its checks; interleaved: row i of each tensor, then row i + 1."""
    tensors = [t.with_row_amax() for t in tensors]
    codes = join_rows([t.codes for t in tensors], -2, is_interleaved)
    scales = join_rows([t.compact_scales().view(torch.uint8) for t in tensors], -2, is_interleaved)
    amax = join_rows([t.amax for t in tensors], -1, is_interleaved)
    made = NVFP4Tensor._of_compact(codes, scales, amax, tensors[0].e4m3_max)
    return tensors[0]._with(made.codes, made.scales, made.amax, None)


def join_rows(parts: list[Tensor], dim: int, is_interleaved: bool) -> Tensor:
    """The parts one after another along a negative dim, or entry i of each, then entry i + 1."""
    return torch.stack(parts, dim).flatten(dim - 1, dim) if is_interleaved else torch.cat(parts, dim)


def _check_list(tensors: object) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors: got {_checks.describe(tensors)}, must be a list or tuple")
    if not tensors:
        raise ValueError("tensors: is empty, must have at least one entry")


def _check_entry(tensors: Sequence[object], i: int) -> None:
    t = tensors[i]
    if not isinstance(t, NVFP4Tensor):
        raise TypeError(f"tensors[{i}]: got {_checks.describe(t)}, must be an fp4gemm.NVFP4Tensor")
    if t.offs is not None:
        raise ValueError(f"tensors[{i}]: has {t.offs.shape[0]} groups (offs), must have none")


def _same_as_first(tensors: Sequence[NVFP4Tensor], i: int, *more: str) -> None:
    for name in (*more, "device", "dtype", "e4m3_max", "hadamard_signs"):
        value, wanted = getattr(tensors[i], name), getattr(tensors[0], name)
        if value != wanted:
            if name == "shape":
                value, wanted = tuple(value), tuple(wanted)
            raise ValueError(f"tensors[{i}]: {name} is {value}, must be {wanted} as of tensors[0]")


def stack_input(x: object, function: str) -> tuple[int, Tensor]:
    """(g, rows): x (g, n, k) as rows (g * n, k), a copy where x is not contiguous; (0, x) of a matrix.

    Raises for an x that the quantizers refuse.
    """
    if not isinstance(x, Tensor) or x.dim() != 3:
        return 0, _checks.quantize_input(x, function)
    _checks.is_tensor("x", x)
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    if x.shape[0] < 1 or x.shape[1] < 1:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must hold at least one matrix of at least one row")
    _checks.is_multiple("x", "k", x.shape[2], _checks.BLOCK)
    _checks.rows_are_aligned("x", x)
    return x.shape[0], _checks.quantize_input(x.reshape(-1, x.shape[2]), function)


def quantize_stack(call: QuantizeCall, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax of the g matrices of x (g * n, k), each by itself; amax (g, n) or (g, 1)."""
    if call.axis == -1 and call.block_rows == 1 and call.rng_state is None:
        codes, scales, measured = _in_one_call(call, g)
    elif call.axis == 0 or call.block_rows != 1:
        rows, columns = _by_matrix(call, g, call.axis == -1, call.axis == 0)
        codes, scales, measured = rows if call.axis == -1 else columns
    else:
        calls = [call._replace(**part) for part in _matrices(call, g)]
        codes, scales, measured = _stacked([operators.quantize(*each) for each in calls])
    return codes, scales, measured if call.amax is None else call.amax


def quantize_stack_decoded(call: QuantizeCall, g: int) -> tuple[Tensor, Tensor]:
    """The decoded values float16 (g, n, k), or (g, k, n) with axis 0, and amax; a block has one row."""
    if call.axis == -1 and call.rng_state is None:
        # Values have no padding between the matrices, so that only one amax a matrix makes them groups.
        offs = None if call.per_row else _ends(call.x, g)
        flat = None if call.amax is None else call.amax.view(-1)
        whole = narrowed(QuantizeDecodedCall, call, amax=flat, offs=offs)
        data, measured = operators.quantize_decoded(*whole)
        data, measured = data.view(g, -1, call.x.shape[1]), _amax_of_matrices(call, g, measured)
    else:
        calls = [narrowed(QuantizeDecodedCall, call, **part) for part in _matrices(call, g)]
        results = [operators.quantize_decoded(*each) for each in calls]
        data, measured = (torch.stack(parts) for parts in zip(*results, strict=True))
    return data, measured if call.amax is None else call.amax


def quantize_stack_both(
    call: Any, g: int
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Codes, scales and amax of the matrices of x, and of their transposes; a QuantizeBothCall."""
    if call.block_rows != 1 and call.amax is None:
        return _by_matrix(call, g, True, True)
    along_k = narrowed(QuantizeCall, call, hadamard=0, signs=0)
    along_n = narrowed(QuantizeCall, call, amax=call.amax_t, axis=0)
    return quantize_stack(along_k, g), quantize_stack(along_n, g)


def quantize_stack_searched(call: QuantizeSearchedCall, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax by a search for scales; importance is (g, k), or (k,) for every matrix."""
    h, amax, parts = call.importance, call.amax, call.x.view(g, -1, call.x.shape[1])
    calls = [
        call._replace(
            x=parts[e],
            amax=None if amax is None else amax[e],
            importance=h if h is None or h.dim() == 1 else h[e],
        )
        for e in range(g)
    ]
    codes, scales, measured = _stacked([operators.quantize_searched(*each) for each in calls])
    return codes, scales, measured if amax is None else amax


def _by_matrix(
    call: Any, g: int, wants_rows: bool, wants_columns: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Codes, scales and amax of the matrices and of their transposes in one call; amax (g, k) or (g, 1).

    It serves blocks of 16x16, and transposes alone.
    """
    x = call.x.view(g, -1, call.x.shape[1])
    amax = call.amax if call.amax is None or call.per_row else call.amax.view(-1)
    whole = narrowed(QuantizeStackCall, call, x=x, amax=amax, rows=wants_rows, columns=wants_columns)
    codes, scales, codes_t, scales_t, measured = operators.quantize_stack(*whole)
    measured = measured if call.per_row else measured.view(-1, 1)
    return (codes, scales, measured), (codes_t, scales_t, measured)


def _ends(x: Tensor, g: int) -> Tensor:
    """int32 (g,): the ends of the g matrices in the rows of x."""
    return torch.arange(1, g + 1, dtype=torch.int32, device=x.device) * (x.shape[0] // g)


def _amax_of_matrices(call: QuantizeCall, g: int, measured: Tensor) -> Tensor:
    """The amax (g, n) or (g, 1), from the amax of each row; ``measured`` itself if the call gives an amax."""
    if call.amax is not None:
        return measured
    rows = measured.view(g, -1)
    return rows if call.per_row else rows[:, :1].contiguous()


def _in_one_call(call: QuantizeCall, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax with blocks along k.

    The matrices are groups of rows, or one matrix where no padding separates their scales.
    """
    x, n = call.x, call.x.shape[0] // g
    offs = _ends(x, g) if not call.per_row or n % TILE_ROWS else None
    flat = None if call.amax is None else call.amax.view(-1)
    codes, scales, measured = operators.quantize(*call._replace(amax=flat, offs=offs))
    rows = padded_scale_shape(n, x.shape[1])[0]
    scales = scales[: g * rows].view(g, rows, scales.shape[1])
    return codes.view(g, n, -1), scales, _amax_of_matrices(call, g, measured)


def _matrices(call: Any, g: int) -> list[dict[str, Any]]:
    """The arguments that differ from call to call when each matrix of x (g * n, k) is quantized by itself.

    The random state of each has its own offset, two further than that of the one before.
    """
    x, state = call.x, call.rng_state
    parts = x.view(g, -1, x.shape[1])
    states: Any = [None] * g
    if state is not None:
        step = torch.arange(g, dtype=torch.int64, device=x.device) * 2
        states = torch.stack((state[0].expand(g), state[1] + step), dim=1)
    given: Any = [None] * g if call.amax is None else call.amax
    return [{"x": parts[e], "amax": given[e], "rng_state": states[e]} for e in range(g)]


def _stacked(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, amax = zip(*results, strict=True)
    # Bytes, because few torch operators know float8.
    plain = torch.stack([s.view(torch.uint8) for s in scales])
    return torch.stack(codes), plain.view(torch.float8_e4m3fn), torch.stack(amax)
