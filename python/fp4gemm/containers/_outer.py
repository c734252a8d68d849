"""Outer scales of other libraries as amaxes: of a matrix, of experts, of partitions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from .. import _checks
from ..layout import unswizzle_scales
from . import _fields

__all__ = ["codes", "outer_amax", "six_times", "swizzled", "zeroed"]

_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
_SCALES = (torch.float8_e4m3fn, torch.uint8)


def six_times(e4m3_max: object, like: Tensor) -> Tensor:
    """6B as a tensor, since torch turns a division by a Python number into a multiplication on CUDA."""
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    return torch.full_like(like, 6.0 * cast(int, e4m3_max))


def codes(name: str, value: object) -> Tensor:
    """Codes (n, k/2) or (g, n, k/2); a copy where they are not 16-byte aligned, as in a mapped file."""
    if isinstance(value, Tensor) and _checks.is_misaligned(value):
        value = value.clone()
    if isinstance(value, Tensor) and value.dim() == 3:
        x = _checks.is_tensor(name, value)
        _checks.has_dtype(name, x, _CODES)
        return _fields.stack(name, x)
    return _checks.codes(name, value)


def swizzled(name: str, value: object, packed: Tensor) -> Tensor:
    """Compact scales (.., n, k/16) of swizzled ones; their padding is dropped, whatever it holds."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, _SCALES)
    _checks.same_device(name, x, packed.device, "the codes")
    _checks.is_contiguous(name, x)
    *lead, n, half_k = packed.shape
    g = lead[0] if lead else 1
    rows, columns = _checks.padded_scale_shape(n, 2 * half_k)
    if x.numel() != g * rows * columns:
        sizes = " * ".join(map(str, (*lead, rows, columns)))
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must have the {sizes} elements of 128x4")
    plain = unswizzle_scales(x.view(g * rows, columns), g * rows, half_k // 8).view(torch.uint8)
    plain = plain.view(g, rows, -1)[:, :n].reshape(*lead, n, -1)
    return plain.view(torch.float8_e4m3fn)


def outer_amax(
    name: str,
    value: object,
    packed: Tensor,
    e4m3_max: int,
    direction: Literal["decodes", "encodes"],
    partition_rows: object,
) -> Tensor:
    """The amaxes of outer scales: float32 (1,) or (n,) of a matrix, (g, 1) or (g, n) of a stack.

    fl(scale * 6B) of a scale that decodes, fl(6B / scale) of one that encodes. One outer scale for each
    partition of the rows becomes the amax of each of its rows. Their values are checked on the CPU alone,
    since reading them from a GPU would synchronise.
    """
    *lead, n, _ = packed.shape
    sizes = None if partition_rows is None else _sizes(partition_rows, n)
    given = _shaped(name, value, packed, (*lead, 1 if sizes is None else len(sizes)), sizes is not None)
    bound = six_times(e4m3_max, given)
    amax = given * bound if direction == "decodes" else torch.div(bound, given)
    if given.device.type == "cpu" and _checks.has_memory(given):
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
