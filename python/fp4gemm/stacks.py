"""Stacks of matrices, one for each expert: stack, and the quantization of each matrix of x (g, n, k)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks, ops
from ._options import Options
from .containers.nvfp4 import NVFP4Tensor
from .layout import TILE_ROWS, padded_scale_shape

__all__ = [
    "quantize_stack",
    "quantize_stack_both",
    "quantize_stack_decoded",
    "stack",
    "stack_amax",
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
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors: got {_checks.describe(tensors)}, must be a list or tuple")
    if not tensors:
        raise ValueError("tensors: is empty, must have at least one entry")
    for i, t in enumerate(tensors):
        if not isinstance(t, NVFP4Tensor):
            raise TypeError(f"tensors[{i}]: got {_checks.describe(t)}, must be an fp4gemm.NVFP4Tensor")
        if t.offs is not None:
            raise ValueError(f"tensors[{i}]: has {t.offs.shape[0]} groups (offs), must have none")
        if len(t.shape) != 2:
            raise ValueError(f"tensors[{i}]: shape is {tuple(t.shape)}, must be (n, k)")
        for name in ("shape", "device", "dtype", "e4m3_max", "hadamard_signs"):
            value, wanted = getattr(t, name), getattr(tensors[0], name)
            if value != wanted:
                if name == "shape":
                    value, wanted = tuple(value), tuple(wanted)
                raise ValueError(f"tensors[{i}]: {name} is {value}, must be {wanted} as of tensors[0]")
    if len({t.amax.shape for t in tensors}) > 1:
        tensors = [t.with_row_amax() for t in tensors]
    parts = _stacked([(t.codes, t.scales, t.amax) for t in tensors])
    made = NVFP4Tensor._trusted(*parts, tensors[0].e4m3_max, None, tensors[0].hadamard_signs)
    return made._stamped(tensors[0].dtype)


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


def stack_amax(name: str, value: object, g: int, entries: int, device: torch.device) -> Tensor:
    """A given amax; raises unless it is float32 (g, entries)."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    _checks.has_shape(name, x, (g, entries))
    _checks.same_device(name, x, device, "x")
    _checks.is_contiguous(name, x)
    _checks.no_grad(name, x, "fp4gemm.quantize")
    return x


def quantize_stack(
    x: Tensor, g: int, amax: Tensor | None, axis: int, options: Options, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax of the g matrices of x (g * n, k), each by itself; amax (g, n) or (g, 1)."""
    per_row, *others = options
    if axis == -1 and options.block_rows == 1 and state is None:
        codes, scales, measured = _in_one_call(x, g, amax, options)
        return codes, scales, measured if amax is None else amax
    results = []
    for e, part, draws in _matrices(x, g, state):
        given = None if amax is None else amax[e]
        results.append(ops.quantize(part, given, per_row, axis, *others, draws, None))
    codes, scales, measured = _stacked(results)
    return codes, scales, measured if amax is None else amax


def quantize_stack_decoded(
    x: Tensor, g: int, amax: Tensor | None, options: Options, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The decoded values, float16 (g, n, k), and amax; blocks are along k and of one row each."""
    per_row, _, *others = options
    n = x.shape[0] // g
    if state is None:
        # Values have no padding between matrices, so only one amax for each matrix needs groups.
        offs = None if per_row else torch.arange(1, g + 1, dtype=torch.int32, device=x.device) * n
        flat = None if amax is None else amax.view(-1)
        data, measured = ops.quantize_decoded(x, flat, per_row, *others, None, offs)
        data = data.view(g, n, -1)
        if amax is None:
            measured = measured.view(g, n) if per_row else measured.view(g, n)[:, :1].contiguous()
    else:
        results = []
        for e, part, draws in _matrices(x, g, state):
            given = None if amax is None else amax[e]
            results.append(ops.quantize_decoded(part, given, per_row, *others, draws, None))
        data, measured = (torch.stack(parts) for parts in zip(*results, strict=True))
    return data, measured if amax is None else amax


def quantize_stack_both(
    x: Tensor,
    g: int,
    amax: Tensor | None,
    amax_t: Tensor | None,
    options: Options,
    state: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Codes, scales and amax of the matrices of x, and of their transposes."""
    results = []
    for e, part, draws in _matrices(x, g, state):
        given = (None, None) if amax is None or amax_t is None else (amax[e], amax_t[e])
        results.append(ops.quantize_both(part, *given, *options, draws))
    rows, columns = _stacked([r[:3] for r in results]), _stacked([r[3:] for r in results])
    if amax is not None and amax_t is not None:
        return (*rows[:2], amax), (*columns[:2], amax_t)
    return rows, columns


def _in_one_call(x: Tensor, g: int, amax: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks along k: the matrices are groups of rows, or one matrix where no padding separates scales."""
    per_row, *others = options
    n = x.shape[0] // g
    offs = None
    if not per_row or n % TILE_ROWS:
        offs = torch.arange(1, g + 1, dtype=torch.int32, device=x.device) * n
    flat = None if amax is None else amax.view(-1)
    codes, scales, measured = ops.quantize(x, flat, per_row, -1, *others, None, offs)
    rows = padded_scale_shape(n, x.shape[1])[0]
    scales = scales[: g * rows].view(g, rows, scales.shape[1])
    if amax is None:
        measured = measured.view(g, n) if per_row else measured.view(g, n)[:, :1].contiguous()
    return codes.view(g, n, -1), scales, measured


def _matrices(x: Tensor, g: int, state: Tensor | None) -> list[tuple[int, Tensor, Tensor | None]]:
    """Each matrix of x (g * n, k) with its own random state, whose offset is 2 larger than the one before."""
    parts = x.view(g, -1, x.shape[1])
    if state is None:
        return [(e, parts[e], None) for e in range(g)]
    step = torch.arange(g, dtype=torch.int64, device=x.device) * 2
    states = torch.stack((state[0].expand(g), state[1] + step), dim=1)
    return [(e, parts[e], states[e]) for e in range(g)]


def _stacked(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, amax = zip(*results, strict=True)
    # Bytes, because few torch operators know float8.
    plain = torch.stack([s.view(torch.uint8) for s in scales])
    return torch.stack(codes), plain.view(torch.float8_e4m3fn), torch.stack(amax)
