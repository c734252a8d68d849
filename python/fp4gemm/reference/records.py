"""Records, as :mod:`fp4gemm.records` defines them: made of tokens, and gathered into grouped operands."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import BLOCK
from .._checks import ranks as rank_checks
from ..layout import unswizzle_scales
from ..ops.rank_schema import GatherRecordsCall, MakeRecordsCall, QuantizeRecordsCall
from ..ops.schema import QuantizeCall, accepts
from .grouped import Groups
from .nvfp4 import cast_rows

__all__ = ["gather_records", "make_records", "quantize_records"]


@accepts(QuantizeRecordsCall)
def quantize_records(call: QuantizeRecordsCall) -> None:
    """Write the records of x, quantized with one amax for each row, to out.

    Args:
        x: (t, k) bfloat16, float16 or float32, unit stride along k.
        out: uint8 (t, record_bytes(k)), contiguous.
        four_over_six, fast_error, e4m3_max, rng_state, headroom: as for :func:`.nvfp4.quantize`.
        first_row: added to the numbers of the rows, which select the random numbers.
    """
    rank_checks.quantize_records(call)
    of_rows = QuantizeCall(
        call.x,
        None,
        True,
        four_over_six=call.four_over_six,
        fast_error=call.fast_error,
        e4m3_max=call.e4m3_max,
        rng_state=call.rng_state,
        headroom=call.headroom,
    )
    _write(call.out, *cast_rows(of_rows, call.first_row))


@accepts(MakeRecordsCall)
def make_records(call: MakeRecordsCall) -> None:
    """Write the records of a quantized tensor to out.

    Args:
        codes: uint8 (t, k/2). scales: swizzled float8_e4m3fn (ceil128(t), ceil4(k/16)).
        amax: float32 (t,).
        out: uint8 (t, record_bytes(k)), contiguous.
    """
    rank_checks.make_records(call)
    m, half_k = call.codes.shape
    _write(call.out, call.codes, unswizzle_scales(call.scales, m, 2 * half_k // BLOCK), call.amax)


def _write(out: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
    """Write records of codes (t, k/2), scales (t, k/16) in plain order, and amax (t,)."""
    half_k, blocks = codes.shape[1], scales.shape[1]
    at = half_k + (blocks + 3) // 4 * 4
    out.zero_()
    out[:, :half_k] = codes
    out[:, half_k : half_k + blocks] = scales.view(torch.uint8)
    out[:, at : at + 4] = amax.contiguous().view(-1, 1).view(torch.uint8)


@accepts(GatherRecordsCall)
def gather_records(call: GatherRecordsCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of the rows that are gathered, in groups as of :func:`.nvfp4.quantize`.

    Args:
        records: one or more uint8 (t, record_bytes(k)); record r of tensor p has the number p * t + r.
        rows: int32 (m,), the number of the record of each row; one outside of them gives zeros.
        offs: int32 (g,), the ends of the groups of rows.
        k: elements of a row.

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (grouped_scale_rows(m, g), ceil4(k/16)), swizzled with zero
        padding; amax float32 (m,). Rows from offs[-1] on have codes and amax 0.
    """
    records = rank_checks.gather_records(call)
    rows, k, t = call.rows, call.k, records[0].shape[0]
    m, half_k, blocks = rows.shape[0], k // 2, k // BLOCK
    groups = Groups(call.offs, m, rows.device)
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
