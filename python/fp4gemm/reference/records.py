"""Records, as :mod:`fp4gemm.records` defines them: made of tokens, and gathered into grouped operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import BLOCK
from .grouped import Groups

__all__ = ["gather", "write"]


def write(out: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
    """Write records of codes (t, k/2), scales (t, k/16) in plain order, and amax (t,)."""
    half_k, blocks = codes.shape[1], scales.shape[1]
    at = half_k + (blocks + 3) // 4 * 4
    out.zero_()
    out[:, :half_k] = codes
    out[:, half_k : half_k + blocks] = scales.view(torch.uint8)
    out[:, at : at + 4] = amax.contiguous().view(-1, 1).view(torch.uint8)


def gather(records: Sequence[Tensor], rows: Tensor, offs: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of the rows that are gathered, in groups as of :func:`.nvfp4.quantize`.

    Record r of tensor p of the records (t, record_bytes(k)) has the number p * t + r.
    """
    t = records[0].shape[0]
    m, half_k, blocks = rows.shape[0], k // 2, k // BLOCK
    groups = Groups(offs, m, rows.device)
    found = records[0].new_zeros((m, records[0].shape[1]))
    numbers = rows.to(torch.int64)
    numbers[groups.num_rows :] = -1
    for p, part in enumerate(records):
        has = (numbers >= p * t) & (numbers < (p + 1) * t)
        found[has] = part[numbers[has] - p * t]
    at = half_k + (blocks + 3) // 4 * 4
    scales = groups.swizzle(found[:, half_k : half_k + blocks].contiguous().view(torch.float8_e4m3fn))
    amax = found[:, at : at + 4].contiguous().view(torch.float32).view(m)
    return found[:, :half_k].contiguous(), scales, amax
