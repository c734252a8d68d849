"""Outer scales of other libraries as amaxes: of a matrix, of experts, of partitions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from .. import _checks, _values
from ..layout import unswizzle_scales
from . import _fields

Direction = Literal["decodes", "encodes"]

__all__ = [
    "amax_of",
    "codes",
    "converted",
    "encode_scale",
    "foreign",
    "outer_amax",
    "six_times",
    "swizzled",
    "zeroed",
]


def six_times(e4m3_max: object, like: Tensor) -> Tensor:
    """6B as a tensor, since torch turns a division by a Python number into a multiplication on CUDA."""
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    return torch.full_like(like, 6.0 * cast(int, e4m3_max))


def encode_scale(amax: Tensor, e4m3_max: int) -> Tensor:
    """S = min(fl(6B / amax), FMAX), 1 where that is 0, of float32 amaxes in any shape."""
    scale = torch.div(six_times(e4m3_max, amax), amax).clamp(max=_checks.FLOAT32_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def amax_of(outer: Tensor, e4m3_max: int, direction: Direction) -> Tensor:
    """The amax of outer scales: the 11-bit A of which they were made if there is one, else rounded.

    A bfloat16 or float16 amax A comes back exactly from fl(A / 6B) and from fl(6B / A): among the float32
    numbers that give an outer scale there is at most one with 11 significant bits. Otherwise the result is
    fl(outer * 6B) of an outer scale that decodes, and fl(6B / outer) of one that encodes.
    """
    bound = six_times(e4m3_max, outer)
    amax = outer * bound if direction == "decodes" else torch.div(bound, outer)
    short = _eleven_bits(amax)
    again = torch.div(short, bound) if direction == "decodes" else torch.div(bound, short)
    return torch.where(again == outer, short, amax)


def converted(outer: Tensor, e4m3_max: int, direction: Direction) -> Tensor:
    """Convert outer scales of the given direction to the opposite direction.

    The first of these rules that applies gives the result, in float32 and rounded once::

        0 <-> FMAX
        through A       where an A of 11 significant bits gives ``outer``: fl(6B / A) or fl(A / 6B)
        G               for one that decodes, where a G of 11 significant bits gives it: outer = fl(1 / G)
        fl(1 / outer)

    There and back gives the same bits for the first three, if no number is subnormal: of every outer scale
    that was computed from a bfloat16 or float16 amax, and of every encode scale that was itself rounded to
    one of these dtypes. For others the two directions have not the same number of values, and 83 % of them
    come back; the rest come back within 1 ulp.
    """
    encodes, fmax = direction == "encodes", torch.full_like(outer, _checks.FLOAT32_MAX)
    bound, one = six_times(e4m3_max, outer), torch.ones_like(outer)
    plain = torch.div(one, outer)
    if not encodes:
        short = _eleven_bits(plain)
        plain = torch.where(torch.div(one, short) == outer, short, plain)
    amax = _eleven_bits(torch.div(bound, outer) if encodes else outer * bound)
    multiplier, scale = torch.div(amax, bound), torch.div(bound, amax)
    given, made = (scale, multiplier) if encodes else (multiplier, scale)
    result = torch.where(given == outer, made, plain)
    if encodes:
        return torch.where(outer == fmax, torch.zeros_like(outer), result)
    return torch.where(outer == 0, fmax, result.clamp(max=_checks.FLOAT32_MAX))


def _eleven_bits(x: Tensor) -> Tensor:
    """Positive finite float32 rounded to 11 significant bits, ties to even."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def codes(name: str, value: object) -> Tensor:
    """Codes (n, k/2) or (g, n, k/2); a copy where they are not 16-byte aligned, as in a mapped file."""
    if isinstance(value, Tensor) and _checks.is_misaligned(value):
        value = value.clone()
    if isinstance(value, Tensor) and value.dim() == 3:
        x = _checks.is_tensor(name, value)
        _checks.has_dtype(name, x, _checks.CODE_DTYPES)
        return _fields.stack(name, x)
    return _checks.codes(name, value)


def swizzled(name: str, value: object, packed: Tensor) -> Tensor:
    """Compact scales (.., n, k/16) of swizzled ones; their padding is dropped, whatever it holds."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, _checks.SCALE_DTYPES)
    _checks.same_device(name, x, packed.device, "the codes")
    _checks.is_contiguous(name, x)
    *lead, n, half_k = packed.shape
    g = lead[0] if lead else 1
    rows, columns = _checks.padded_scale_shape(n, 2 * half_k)
    if x.numel() != g * rows * columns:
        sizes = " * ".join(map(str, (*lead, rows, columns)))
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must have the {sizes} elements of 128x4")
    plain = unswizzle_scales(x.view(g * rows, columns), g * rows, half_k // 8).view(torch.uint8)
    plain = plain.view(g, rows, half_k // 8)[:, :n].reshape(*lead, n, half_k // 8)
    return plain.view(torch.float8_e4m3fn)


def outer_amax(
    name: str,
    value: object,
    packed: Tensor,
    e4m3_max: int,
    direction: Direction,
    partition_rows: object,
) -> Tensor:
    """The amaxes of outer scales: float32 (1,) or (n,) of a matrix, (g, 1) or (g, n) of a stack.

    :func:`amax_of` has the formula. One outer scale for each partition of the rows becomes the amax of each
    of its rows. Their values are checked where they can be read, which synchronises on a GPU.
    """
    *lead, n, _ = packed.shape
    sizes = None if partition_rows is None else _sizes(partition_rows, n)
    given = _shaped(name, value, packed, (*lead, 1 if sizes is None else len(sizes)), sizes is not None)
    amax = amax_of(given, e4m3_max, direction)
    if _values.are_readable(given):
        wrong = given.signbit() | ~amax.isfinite()
        if wrong.any():
            limit = 6.0 * e4m3_max / _checks.FLOAT32_MAX
            wanted = f"from 0 to {1 / limit:.4g}" if direction == "decodes" else f"at least {limit:.4g}"
            raise ValueError(f"{name}: holds {given[wrong][0].item():.4g}, must be {wanted}")
    if sizes is None or len(sizes) == 1:
        return amax
    return torch.cat([amax[..., i : i + 1].expand(*lead, rows) for i, rows in enumerate(sizes)], -1)


def zeroed(compact: Tensor, amax: Tensor) -> Tensor:
    """The block scales, 0 where the amax is 0.

    All values are 0 there, whatever the block scales are; ModelOpt writes NaN ones for an all-zero weight.
    """
    kept = torch.where((amax != 0).unsqueeze(-1), compact.view(torch.uint8), 0)
    return kept.view(torch.float8_e4m3fn)


def foreign(name: str, compact: Tensor, amax: Tensor) -> Tensor:
    """:func:`zeroed` of the block scales of another program; raises ValueError unless they are allowed."""
    kept = zeroed(compact, amax)
    _values.check_block_scales(name, kept)
    return kept


def _sizes(value: object, n: int) -> Sequence[int]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"partition_rows: got {_checks.describe(value)}, must be a list or tuple of ints")
    for rows in value:
        _checks.is_int("partition_rows", rows, 1)
    if sum(value) != n:
        raise ValueError(f"partition_rows: the sum of {tuple(value)} is {sum(value)}, must be {n}, the rows")
    return value


def _shaped(name: str, value: object, packed: Tensor, shape: tuple[int, ...], has_partitions: bool) -> Tensor:
    """The outer scales in this shape; axes of size 1 may be added or absent."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    _checks.same_device(name, x, packed.device, "the codes")
    _checks.no_grad(name, x, "fp4gemm.mm")
    if x.numel() == 1 and not has_partitions:
        return x.reshape(1).expand(shape).contiguous()
    if [size for size in x.shape if size != 1] == [size for size in shape if size != 1]:
        return x.reshape(shape)
    one = "one for each of partition_rows" if has_partitions else "one for each matrix of the stack"
    if len(shape) == 1 and not has_partitions:
        wanted = "must have one element; several of one weight need partition_rows"
    else:
        wanted = f"must be {shape}, {one}"
    raise ValueError(f"{name}: shape is {tuple(x.shape)}, {wanted}")
