"""Producers, decoders, MXFP8 and prepacking on the emulator give the bits of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import capi
import pytest
import torch
from calls import Memory, check, parts_out, rows_in
from capi_conversions import DequantizeArgs, MXFP4Args, MXFP8Args, RmsNormQuantizeArgs, SiluAndMulQuantizeArgs
from fp4gemm import layout, reference
from helpers import make, make_codes, make_scales, short
from session import SCHEDULES, Session
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HALVES = FLOATS[:2]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OFFS = torch.tensor([4, 4, 33], dtype=torch.int32)
# m and k: one block; a row that is no multiple of a word of scales; rows of several turns of a kernel's loop.
SHAPES = [(1, 16), (37, 112), (48, 528), (2, 8208)]
# A thread of dequantize and decode converts four rows that are 32 apart. The last two shapes have more rows
# than a tile of scales, 128, and the last one has so few columns that a warp has several rows.
DEQUANTIZED_SHAPES = [*SHAPES[:3], (165, 80), (166, 32)]


def schedules_of(m: int, k: int) -> Sequence[dict[str, object]]:
    return SCHEDULES[2:5] if m * k < 10000 else SCHEDULES[2:3]


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_silu_and_mul(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    x = make("heavy", m, 2 * k, dtype, torch.Generator().manual_seed(k)) * 4
    x[0, 1] = torch.nan

    def build(memory: Memory, offs: Tensor | None, decoded: bool) -> tuple[object]:
        args = SiluAndMulQuantizeArgs(m=m, k=k, **rows_in(memory, x))
        args.offs, args.num_groups = memory.put(offs), 0 if offs is None else offs.numel()
        if decoded:
            parts_out(memory, args, reference.silu_and_mul_quantize_decoded(x, offs))
        else:
            parts_out(memory, args, reference.silu_and_mul_quantize(x, offs))
        return (args,)

    for offs in (None, OFFS) if m == 37 else (None,):
        for decoded in (False, True):
            call = partial(build, offs=offs, decoded=decoded)
            check(session, "silu_and_mul_quantize", call, schedules_of(m, k))


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_rms_norm(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(k)
    x, residual = (make("heavy", m, k, dtype, gen) for _ in range(2))
    weight = torch.randn(k, generator=gen).to(dtype)

    def build(memory: Memory, is_full: bool, decoded: bool) -> tuple[object]:
        added, factors = (residual, weight) if is_full else (None, None)
        args = RmsNormQuantizeArgs(m=m, k=k, epsilon=1e-5, **rows_in(memory, x))
        args.weight, args.residual = memory.put(factors), memory.put(added)
        function = reference.rms_norm_quantize_decoded if decoded else reference.rms_norm_quantize
        *parts, total = function(x, factors, added, 1e-5)
        parts_out(memory, args, parts)
        args.sum = memory.out("sum", total) if is_full else None
        return (args,)

    for is_full, decoded in ((False, False), (True, False), (True, True)):
        call = partial(build, is_full=is_full, decoded=decoded)
        check(session, "rms_norm_quantize", call, schedules_of(m, k))


def signed_scales(m: int, k: int, gen: torch.Generator) -> Tensor:
    """Compact scales of which about half are negative."""
    signs = torch.randint(0, 2, (m, k // 16), generator=gen, dtype=torch.uint8) * 0x80
    return (make_scales(m, k, gen).view(torch.uint8) | signs).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), DEQUANTIZED_SHAPES)
def test_dequantize(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    """One amax and one for each row, from subnormal values to some beyond fp16; swizzled and compact scales;
    groups.
    """
    gen = torch.Generator().manual_seed(k)
    codes, compact = make_codes(m, k, gen), signed_scales(m, k, gen)
    amax = torch.rand(m, generator=gen).ldexp(torch.randint(-130, 24, (m,), generator=gen))

    def build(
        memory: Memory, scales: Tensor, factors: Tensor, swizzled: bool = True, offs: Tensor | None = None
    ) -> tuple[object]:
        args = DequantizeArgs(m=m, k=k, scales_are_compact=int(not swizzled), y_dtype=capi.DTYPES[dtype])
        args.codes, args.scales, args.amax = map(memory.put, (codes, scales, factors))
        args.scaling = capi.SCALING_ROW if factors.numel() == m else capi.SCALING_TENSOR
        args.offs, args.num_groups = memory.put(offs), 0 if offs is None else offs.numel()
        want = reference.dequantize(codes, scales, factors, 448, dtype, swizzled, offs)
        args.y = memory.out("y", want)
        return (args,)

    cases = [(layout.swizzle_scales(compact), amax), (compact, amax[:1], False)]
    if m in (37, 165, 166):
        offs = OFFS if m == 37 else torch.tensor([3, 140, 140, 150], dtype=torch.int32)
        in_groups = reference.quantize(torch.randn(m, k, generator=gen), None, True, offs=offs)[1]
        cases.append((in_groups, amax, True, offs))
    for case in cases:
        check(session, "dequantize", lambda memory, case=case: build(memory, *case), schedules_of(m, k))


@pytest.mark.parametrize(("m", "k"), DEQUANTIZED_SHAPES)
def test_decode(session: Session, m: int, k: int) -> None:
    gen = torch.Generator().manual_seed(k)
    codes, scales = make_codes(m, k, gen), layout.swizzle_scales(signed_scales(m, k, gen))
    want = reference.decode(codes, scales)

    def build(memory: Memory) -> tuple[object, ...]:
        return m, k, memory.put(codes), memory.put(scales), memory.out("y", want)

    check(session, "decode", build, schedules_of(m, k))


@pytest.mark.parametrize(("n", "k"), [(8, 16), (72, 112), (130, 528)])
def test_prepack(session: Session, n: int, k: int) -> None:
    """Two matrices, there and back."""
    gen = torch.Generator().manual_seed(n)
    codes = torch.stack([make_codes(n, k, gen) for _ in range(2)])
    scales = torch.stack([layout.swizzle_scales(make_scales(n, k, gen)) for _ in range(2)])
    packed = reference.prepack(codes, scales)

    def prepack(memory: Memory) -> tuple[object, ...]:
        return 2, n, k, memory.put(codes), memory.put(scales), memory.out("packed", packed)

    def unprepack(memory: Memory) -> tuple[object, ...]:
        return 2, n, k, memory.put(packed), memory.out("codes", codes), memory.out("scales", scales)

    check(session, "prepack", prepack)
    check(session, "unprepack", unprepack)
    # The sign of a scale moves to its codes, and each scale is stored, subnormal ones and NaN too.
    scales = torch.randint(0, 256, scales.shape, generator=gen, dtype=torch.uint8)
    packed = reference.prepack(codes, scales.view(torch.float8_e4m3fn))
    check(session, "prepack", prepack)


@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_mxfp8(session: Session, dtype: torch.dtype, fp8: torch.dtype) -> None:
    """Along rows and along columns, with swizzled and compact scales; and back."""
    m, k = 64, 160
    gen = torch.Generator().manual_seed(k)
    x = torch.cat([make(kind, 16, k, dtype, gen) for kind in ("heavy", "denormal", "huge", "inf")])
    x[3, 7] = torch.nan

    def quantize(memory: Memory, axis: int, swizzled: bool) -> tuple[object]:
        args = MXFP8Args(m=m, k=k, x=memory.put(x), x_row_stride=k, dtype=capi.DTYPES[dtype])
        args.fp8, args.scales_are_compact, args.is_transposed = FP8.index(fp8), not swizzled, axis == 0
        values, scales = reference.mxfp8_quantize(x, axis, fp8, swizzled)
        args.values, args.scales = memory.out("values", values), memory.out("scales", scales)
        return (args,)

    def dequantize(memory: Memory, swizzled: bool) -> tuple[object]:
        values, scales = reference.mxfp8_quantize(x.nan_to_num(), -1, fp8, swizzled)
        args = MXFP8Args(m=m, k=k, values=memory.put(values), scales=memory.put(scales))
        args.dtype, args.fp8, args.scales_are_compact = capi.DTYPES[dtype], FP8.index(fp8), not swizzled
        args.y = memory.out("y", reference.mxfp8_dequantize(values, scales, dtype, swizzled))
        return (args,)

    for axis, swizzled in ((-1, True), (-1, False), (0, True)):
        check(session, "mxfp8_quantize", partial(quantize, axis=axis, swizzled=swizzled))
    for swizzled in (True, False):
        check(session, "mxfp8_dequantize", partial(dequantize, swizzled=swizzled))


@pytest.mark.parametrize("sizes", [(5, 0, 130, 17), (0, 0), (128, 32)], ids=str)
def test_mxfp8_groups(session: Session, sizes: tuple[int, ...]) -> None:
    """Groups of rows and of columns, with rows behind the last group; and back."""
    m, k = sum(sizes) + 3, 96
    gen = torch.Generator().manual_seed(k)
    x = torch.randn(m, k, generator=gen).to(torch.bfloat16)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)

    def args_of(memory: Memory) -> MXFP8Args:
        args = MXFP8Args(m=m, k=k, dtype=capi.DTYPES[x.dtype], fp8=FP8.index(torch.float8_e4m3fn))
        args.offs, args.num_groups = memory.put(offs), len(sizes)
        return args

    def quantize(memory: Memory, axis: int) -> tuple[object]:
        args = args_of(memory)
        args.x, args.x_row_stride, args.is_transposed = memory.put(x), k, axis == 0
        values, scales = reference.mxfp8_quantize(x, axis, torch.float8_e4m3fn, True, offs)
        args.values, args.scales = memory.out("values", values), memory.out("scales", scales)
        return (args,)

    def dequantize(memory: Memory) -> tuple[object]:
        args = args_of(memory)
        values, scales = reference.mxfp8_quantize(x, -1, torch.float8_e4m3fn, True, offs)
        args.values, args.scales = memory.put(values), memory.put(scales)
        args.y = memory.out("y", reference.mxfp8_dequantize(values, scales, x.dtype, True, offs))
        return (args,)

    for axis in (-1, 0):
        check(session, "mxfp8_quantize", partial(quantize, axis=axis))
    check(session, "mxfp8_dequantize", dequantize)


@pytest.mark.parametrize("ceil", [False, True], ids=["floor", "ceil"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_mxfp4(session: Session, dtype: torch.dtype, ceil: bool) -> None:
    """Along rows and along columns, with swizzled and compact scales, and in groups of both; and back."""
    m, k = 64, 160
    gen = torch.Generator().manual_seed(k)
    x = torch.cat([make(kind, 16, k, dtype, gen) for kind in ("heavy", "denormal", "huge", "inf")])
    x[3, 7] = torch.nan
    offs = torch.tensor((5, 0, 40)).cumsum(0).to(torch.int32)

    def args_of(memory: Memory, swizzled: bool, ends: Tensor | None) -> MXFP4Args:
        args = MXFP4Args(m=m, k=k, dtype=capi.DTYPES[dtype], scale=int(ceil), scales_are_compact=not swizzled)
        if ends is not None:
            args.offs, args.num_groups = memory.put(ends), len(ends)
        return args

    def quantize(memory: Memory, axis: int, swizzled: bool, ends: Tensor | None) -> tuple[object]:
        args = args_of(memory, swizzled, ends)
        args.x, args.x_row_stride, args.is_transposed = memory.put(x), k, axis == 0
        codes, scales = reference.mxfp4_quantize(x, axis, ceil, swizzled, ends)
        args.codes, args.scales = memory.out("codes", codes), memory.out("scales", scales)
        return (args,)

    def dequantize(memory: Memory, swizzled: bool, ends: Tensor | None) -> tuple[object]:
        args = args_of(memory, swizzled, ends)
        finite = x.masked_fill(~x.isfinite(), 3)
        codes, scales = reference.mxfp4_quantize(finite, -1, ceil, swizzled, ends)
        args.codes, args.scales = memory.put(codes), memory.put(scales)
        args.y = memory.out("y", reference.mxfp4_dequantize(codes, scales, dtype, swizzled, ends))
        return (args,)

    for axis, swizzled, ends in (
        (-1, True, None),
        (-1, False, None),
        (0, True, None),
        (-1, True, offs),
        (0, True, offs),
    ):
        check(session, "mxfp4_quantize", partial(quantize, axis=axis, swizzled=swizzled, ends=ends))
    for swizzled, ends in ((True, None), (False, None), (True, offs)):
        check(session, "mxfp4_dequantize", partial(dequantize, swizzled=swizzled, ends=ends))
