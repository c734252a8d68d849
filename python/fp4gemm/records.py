"""Records: quantized tokens as rows of bytes that travel between ranks, and grouped operands of them.

A record of k elements is ``record_bytes(k)`` bytes, a multiple of 16::

    k/2 bytes           the codes, low nibble = even k
    ceil4(k/16) bytes   the block scales in plain order, float8_e4m3fn, zeros from k/16 on
    4 bytes             the amax of the row, float32
    the rest            zeros

that is 1168, 1632 and 4048 bytes for k = 2048, 2880 and 7168, against 2 k bytes of bfloat16. A record needs
nothing of other tokens or ranks: wherever it arrives, it is the same row of an operand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks
from .containers.nvfp4 import NVFP4Tensor
from .layout import record_bytes
from .ops import operators
from .ops import options as option_checks
from .ops import ranks as rank_ops
from .ops.ranks import GatherRecordsCall, MakeRecordsCall, QuantizeRecordsCall
from .quantize import nvfp4
from .support import ready

__all__ = ["gather_records", "make_records", "quantize_records", "record_bytes"]


def quantize_records(
    x: Tensor,
    *,
    four_over_six: str | None = None,
    four_over_six_error: str = "exact",
    e4m3_max: int | None = None,
    rng_state: Tensor | None = None,
    first_row: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = the record of row i of ``fp4gemm.quantize(x, scaling="row", ...)``, in one pass.

    Args:
        x: bfloat16, float16 or float32 (t, k), t >= 0, k a positive multiple of 16. Strides and alignment are
            free; an x whose rows cannot be read in place is copied.
        four_over_six, four_over_six_error: as for :func:`fp4gemm.quantize`.
        e4m3_max: 448 or 256, the bound of the block scales; None is 448, and 256 with four_over_six. It is
            not in the record: :func:`gather_records` must be given the same.
        rng_state: int64 (2,) {seed, offset} on the device of x for stochastic rounding; None rounds to
            nearest.
        first_row: the number of the first row of x among the tokens of all ranks. It selects the random
            numbers: row i has those of row first_row + i of one quantized tensor of all tokens. It changes
            nothing without rng_state.
        out: uint8 (t, record_bytes(k)), contiguous and 16-byte aligned, on the device of x; None makes one.

    Returns:
        out, written on the current stream. Does not synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, size, device or value; e4m3_max=256 or four_over_six_error
            without four_over_six.
        NotImplementedError: four_over_six with rng_state; x requires grad while grad mode is on; the device
            has no kernel.
    """
    x = _checks.readable_rows(x)
    options = {
        "four_over_six": four_over_six,
        "four_over_six_error": four_over_six_error,
        "e4m3_max": e4m3_max,
        "rng_state": rng_state,
    }
    option_checks.check(options)
    x = _checks.quantize_input(x, "fp4gemm.records.quantize_records")
    ready(x, "quantize")
    if out is None:
        out = x.new_empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8)
    call = QuantizeRecordsCall(
        x,
        out,
        option_checks.OPTIONS["four_over_six"].values[four_over_six],
        four_over_six_error == "fast",
        option_checks.default_bound(options) if e4m3_max is None else e4m3_max,
        rng_state,
        first_row,
    )
    rank_ops.check_quantize_records(call)
    operators.quantize_records(*call)
    return out


def make_records(t: NVFP4Tensor, out: Tensor | None = None) -> Tensor:
    """out[i] = the record of row i of t, for activations that were quantized before.

    Args:
        t: NVFP4Tensor (t, k) with one amax for each row, without groups and rotation: the result of
            :func:`fp4gemm.quantize` or of a producer with scaling "row".
        out: as for :func:`quantize_records`.

    Returns:
        out, uint8 (t, record_bytes(k)), written on the current stream. Does not synchronise.

    Raises:
        TypeError: t is no NVFP4Tensor, or out has another dtype.
        ValueError: t has rank 3, groups, a rotation or one amax for all rows; out has another shape, device
            or memory layout.
        NotImplementedError: the device has no kernel.
    """
    nvfp4("t", t)
    _stands_alone(t)
    ready(t.codes, "quantize")
    if out is None:
        out = t.codes.new_empty((t.shape[0], record_bytes(t.shape[1])))
    call = MakeRecordsCall(t.codes, t.scales, t.amax, out)
    rank_ops.check_make_records(call)
    operators.make_records(*call)
    return out


def gather_records(
    records: Tensor | Sequence[Tensor], rows: Tensor, offs: Tensor, k: int, *, e4m3_max: int = 448
) -> NVFP4Tensor:
    """Row i of the result is record rows[i] of all tensors of ``records``, one after the other.

    With x the tokens that the records hold, the result is ``quantize(x, rows=rows, offs=offs)`` bit for bit:
    the scales are swizzled in place for each group, and the rows from offs[-1] on have codes and amax 0.

    Args:
        records: uint8 (t, record_bytes(k)), contiguous and 16-byte aligned, or 1 to 128 of them of one shape,
            one for each rank: then record r of tensor p has the number p * t + r. On a GPU they may lie in
            the memory of other GPUs that this one can read (symmetric memory).
        rows: int32 (m,), the numbers of the records, as token_of_row of :func:`fp4gemm.ranks.route_ranks`. A
            number outside of all records, as -1 is, gives zeros.
        offs: int32 (g,), the cumulative ends of the groups of rows; the values are not checked on a GPU, and
            no value of theirs leads outside of the result.
        k: elements of a record, a positive multiple of 16.
        e4m3_max: 448 or 256, that of the records.

    Returns:
        NVFP4Tensor (m, k) with groups, on the device of rows and its current stream. Does not synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, size, device or value; on the CPU, ends that do not ascend
            within 0..m.
        NotImplementedError: the device has no kernel.
    """
    tensors = [records] if isinstance(records, Tensor) else records
    call = GatherRecordsCall(tensors, rows, offs, k)  # type: ignore[arg-type]
    rank_ops.check_gather_records(call)
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    ready(rows, "quantize")
    codes, scales, amax = operators.gather_records(list(tensors), rows, offs, k)
    return NVFP4Tensor._trusted(codes, scales, amax, e4m3_max, offs)


def _stands_alone(t: NVFP4Tensor) -> None:
    """Raise ValueError unless the rows of t stand alone."""
    if len(t.shape) != 2:
        raise ValueError(f"t: shape is {tuple(t.shape)}, must be of rank 2, (t, k)")
    if t.offs is not None:
        raise ValueError("t: has groups of rows, must have none")
    if t.hadamard_signs is not None:
        raise ValueError("t: was quantized with hadamard, must not be rotated")
    if t.amax.shape[0] != t.shape[0]:
        raise ValueError(
            f"t: amax has shape {tuple(t.amax.shape)}, must be ({t.shape[0]},), one for each row (quantize "
            "with scaling='row')"
        )
