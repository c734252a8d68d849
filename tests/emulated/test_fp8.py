"""The FP8 casts of tokens on the emulator give the bits of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import capi
import pytest
import torch
from calls import Memory, check, parts_out, rows_in
from capi_conversions import RmsNormQuantizeArgs, SiluAndMulQuantizeArgs
from fp4gemm import reference
from fp4gemm.reference.chunks import gathered
from helpers import KINDS, make, short
from session import SCHEDULES, Session
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HALVES = FLOATS[:2]
# Shapes at which the division of rows among threads changes, for few rows (m < 48, with 6 SMs) and for many.
FEW = [(1, 64), (5, 576), (2, 2112), (2, 4160), (1, 8256), (1, 16448), (1, 32832)]
MANY = [(130, 64), (50, 576), (48, 2112), (48, 4160)]
OFFS = torch.tensor([4, 4, 33], dtype=torch.int32)


def schedules_of(m: int, k: int) -> Sequence[dict[str, object]]:
    return SCHEDULES[2:5] if m * k < 10000 else SCHEDULES[2:3]


def rows_of_every_kind(dtype: torch.dtype, m: int, k: int) -> Tensor:
    """Rows with outliers, zeros, subnormal, huge and infinite elements, and NaN."""
    gen = torch.Generator().manual_seed(m + k)
    each = m // len(KINDS) + 1
    x = torch.cat([make(kind, each, k, dtype, gen) for kind in KINDS])[:m]
    x[0, 3], x[m // 2, :17], x[m - 1, -1] = torch.nan, -torch.nan, torch.nan
    return x


def check_rows(session: Session, x: Tensor, offs: Tensor | None = None, rows: Tensor | None = None) -> None:
    source = x if rows is None else gathered(x, rows)
    want = reference.quantize_fp8(source, offs)

    def build(memory: Memory) -> tuple[capi.QuantizeArgs]:
        args = capi.QuantizeArgs(m=source.shape[0], k=x.shape[1], **rows_in(memory, x))
        args.offs, args.num_groups = memory.put(offs), 0 if offs is None else offs.numel()
        args.x_rows, args.x_num_rows = memory.put(rows), 0 if rows is None else x.shape[0]
        parts_out(memory, args.row, want)
        return (args,)

    check(session, "quantize", build, schedules_of(*source.shape))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), FEW + MANY)
def test_rows(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    check_rows(session, rows_of_every_kind(dtype, m, k))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_groups(session: Session, dtype: torch.dtype) -> None:
    """Rows from the last end on are zero."""
    for m, k in ((37, 192), (150, 64), (40, 576)):
        check_rows(session, rows_of_every_kind(dtype, m, k), OFFS)
    check_rows(session, rows_of_every_kind(dtype, 5, 64), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_rows_by_index(session: Session, dtype: torch.dtype) -> None:
    """Rows of x in another order, some several times, some outside of x; alone and in groups."""
    for m, k in ((7, 192), (60, 576)):
        x = rows_of_every_kind(dtype, m, k)
        rows = torch.tensor([*range(m - 1, -1, -1), 0, 0, -1, m, 2**31 - 1, -(2**31), 3], dtype=torch.int32)
        check_rows(session, x, rows=rows)
        check_rows(session, x, OFFS.clamp(max=9), rows)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), [(1, 64), (37, 192), (48, 576), (2, 8256), (1, 32832)])
def test_silu_and_mul(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    x = make("heavy", m, 2 * k, dtype, torch.Generator().manual_seed(k)) * 4
    x[0, 1] = torch.nan
    for offs in (None, OFFS) if m == 37 else (None,):
        want = reference.silu_and_mul_quantize_fp8(x, offs)

        def build(memory: Memory, offs: Tensor | None = offs, want: Sequence[Tensor] = want) -> tuple[object]:
            args = SiluAndMulQuantizeArgs(m=m, k=k, **rows_in(memory, x))
            args.offs, args.num_groups = memory.put(offs), 0 if offs is None else offs.numel()
            parts_out(memory, args, want)
            return (args,)

        check(session, "silu_and_mul_quantize", build, schedules_of(m, k))


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), [(1, 64), (37, 192), (48, 576), (2, 8256), (1, 32832)])
def test_rms_norm(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(k)
    x, residual = (make("heavy", m, k, dtype, gen) for _ in range(2))
    weight = torch.randn(k, generator=gen).to(dtype)
    for factors, added in ((weight, residual), (weight, None), (None, None)):
        if added is None:  # the bits of a NaN in the sum are not defined
            x[0, 5] = torch.nan
        *parts, total = reference.rms_norm_quantize_fp8(x, factors, added, 1e-5)

        def build(
            memory: Memory,
            factors: Tensor | None = factors,
            added: Tensor | None = added,
            parts: Sequence[Tensor] = parts,
            total: Tensor = total,
        ) -> tuple[object]:
            args = RmsNormQuantizeArgs(m=m, k=k, epsilon=1e-5, **rows_in(memory, x))
            args.weight, args.residual = memory.put(factors), memory.put(added)
            parts_out(memory, args, parts)
            args.sum = None if added is None else memory.out("sum", total)
            return (args,)

        check(session, "rms_norm_quantize", build, schedules_of(m, k))
