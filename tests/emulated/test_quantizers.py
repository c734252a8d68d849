"""The quantizers of SM100 and SM120 give the bits of the reference on the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import capi
import pytest
import torch
from calls import FEW_SCHEDULES, Memory, check, parts_out, rows_in
from fp4gemm import layout, reference
from fp4gemm.reference import nvfp4
from helpers import KINDS, make, short
from modes import EDEN, FEW, GROUPED_MODES, MODES, Mode, by_name, expected
from session import ARCHS, SCHEDULES, Session, Sessions
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SAME_NAMES = ("block_rows", "encode", "four_over_six", "fast_error", "e4m3_max")
K = 112  # seven blocks: the last word of scales has padding
TE = next(m for m in MODES if m.name == "row-te-plain")


def rows_of_every_kind(dtype: torch.dtype, m: int = 48, k: int = K) -> Tensor:
    """Rows with outliers, ties, zeros, subnormal, huge and infinite elements, and NaN."""
    gen = torch.Generator().manual_seed(m + k)
    each = m // len(KINDS) + 1
    x = torch.cat([make(kind, each, k, dtype, gen) for kind in KINDS])[:m]
    x[0, 3], x[m // 2, :17] = torch.nan, torch.nan
    return x


def check_quantize(
    session: Session,
    x: Tensor,
    mode: Mode,
    schedules: Sequence[dict[str, object]] = FEW_SCHEDULES,
    row: Sequence[Tensor] | None = None,
    column: Sequence[Tensor] | None = None,
    given: Tensor | None = None,
    offs: Tensor | None = None,
    rows: Tensor | None = None,
    channels: Tensor | None = None,
) -> None:
    """Compares the sides of fp4gemm_quantize with what is wanted.

    Args:
        row, column: codes, scales and amax, or decoded values and amax; None: that side is not computed.
        given: the amax of the side, which then is not written.
        offs, rows: the ends of groups, and the rows of x that are gathered.
        channels: residual channels.
    """
    options = mode.operator()

    def build(memory: Memory) -> tuple[capi.QuantizeArgs]:
        args = capi.QuantizeArgs(
            m=x.shape[0] if rows is None else rows.numel(),
            k=x.shape[1],
            scaling=capi.SCALING_ROW if options["per_row"] else capi.SCALING_TENSOR,
            hadamard_signs=options["signs"],
            rng_state=memory.put(options.get("rng_state")),
            offs=memory.put(offs),
            num_groups=0 if offs is None else offs.numel(),
            x_rows=memory.put(rows),
            x_num_rows=0 if rows is None else x.shape[0],
            residual_channels=memory.put(channels),
            num_residual_channels=0 if channels is None else channels.numel(),
            **{name: options[name] for name in SAME_NAMES},
            **rows_in(memory, x),
        )
        # With both sides, the columns alone are rotated.
        rotations = (options["hadamard"] if column is None else 0, options["hadamard"])
        for side, want, rotation in zip((args.row, args.column), (row, column), rotations, strict=True):
            if want is not None:
                side.hadamard = rotation
                side.amax_given = memory.put(given)
                parts_out(memory, side, want if given is None else (*want[:2], None))
        return (args,)

    check(session, "quantize", build, schedules)


@pytest.mark.parametrize("mode", MODES, ids=by_name)
def test_modes(session: Session, mode: Mode) -> None:
    """Every mode along rows, along columns and along both."""
    x = rows_of_every_kind(torch.bfloat16)
    check_quantize(session, x, mode, row=expected(x, mode))
    check_quantize(session, x, mode, column=expected(x, mode, 0))
    both = reference.quantize_both(x, None, None, **mode.operator())
    check_quantize(session, x, mode, row=both[:3], column=both[3:])


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", EDEN, ids=by_name)
def test_eden(session: Session, mode: Mode, dtype: torch.dtype) -> None:
    """Corrected scales, along rows, along columns and in groups of either."""
    x = rows_of_every_kind(dtype)
    check_quantize(session, x, mode, row=expected(x, mode))
    check_quantize(session, x, mode, column=expected(x, mode, 0))
    offs = torch.tensor([0, 30, 30, x.shape[0] - 3], dtype=torch.int32)
    check_quantize(session, x, mode, offs=offs, row=expected(x, mode, offs=offs))
    check_quantize(session, x, mode, offs=offs, column=expected(x, mode, 0, offs=offs))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=short)
@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_types(session: Session, mode: Mode, dtype: torch.dtype) -> None:
    x = rows_of_every_kind(dtype)
    check_quantize(session, x, mode, row=expected(x, mode))
    check_quantize(session, x, mode, column=expected(x, mode, 0))


# Shapes at which the division of rows among threads changes, for few rows (m < 48, with 6 SMs) and for many.
ROW_SHAPES = [(1, 32), (5, 528), (2, 2064), (1, 8208), (130, 96), (48, 2064), (48, 4112), (48, 8208)]


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), ROW_SHAPES)
def test_row_shapes(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    """The most common cast, TransformerEngine's, has kernels of its own for many shapes."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    schedules = SCHEDULES[2:5] if m * k < 5000 else SCHEDULES[2:3]
    check_quantize(session, x, TE, schedules, row=reference.quantize(x, None, True))


@pytest.mark.parametrize("k", [528, 2064, 4112, 8208])
@pytest.mark.parametrize("mode", FEW[:7], ids=by_name)
def test_long_rows(session: Session, mode: Mode, k: int) -> None:
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
    check_quantize(session, x, mode, SCHEDULES[2:3], row=expected(x, mode))


# The modes of residual channels.
RESIDUAL = [
    m
    for m in MODES
    if m.name in ("row-te-plain", "tensor-te-plain", "row-te_per_token-plain", "tensor-1x16-mse-fast-448")
    or m.name == "row-1x16-mae-exact-256"
]


def check_residual(
    session: Session, x: Tensor, mode: Mode, r: int, schedules: Sequence[dict[str, object]] = FEW_SCHEDULES
) -> None:
    """Codes and scales, then decoded values, of x with residual channels."""
    c = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(r))[:r].to(torch.int32)
    options = {name: value for name, value in mode.operator().items() if name != "block_rows"}
    row = reference.quantize(x, None, residual_channels=c, **options)
    check_quantize(session, x, mode, schedules, row=row, channels=c)
    decoded = reference.quantize_decoded(x, None, residual_channels=c, **options)
    check_quantize(session, x, mode, schedules, row=decoded, channels=c)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", RESIDUAL, ids=by_name)
def test_residual_channels(session: Session, mode: Mode, dtype: torch.dtype) -> None:
    check_residual(session, rows_of_every_kind(dtype), mode, 32)
    check_residual(session, rows_of_every_kind(dtype, 5, 64), mode, 64, SCHEDULES[2:3])


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(
    ("m", "k"), [(1, 32), (5, 528), (2, 2064), (1, 8208), (130, 96), (48, 2064), (48, 8208)]
)
def test_shapes_with_residual_channels(session: Session, m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    check_residual(session, x, TE, 32, SCHEDULES[2:3])


@pytest.mark.parametrize("k", [528, 2064, 4112, 8208])
@pytest.mark.parametrize("mode", RESIDUAL[1:], ids=by_name)
def test_long_rows_with_residual_channels(session: Session, mode: Mode, k: int) -> None:
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
    check_residual(session, x, mode, 96, SCHEDULES[2:3])


def test_residual_channels_outside_of_x(session: Session) -> None:
    """The error of a number outside of x is 0, and no memory outside of x is read."""
    x, c = rows_of_every_kind(torch.bfloat16), torch.arange(7, 39, dtype=torch.int32)
    c[1], c[5], c[20], c[31] = -1, K, 2**31 - 1, -(2**31)
    given = nvfp4.Quantization(x, None, True, residual_channels=c)
    check_quantize(session, x, TE, row=nvfp4.quantize(given), channels=c)


@pytest.mark.parametrize("mode", [m for m in GROUPED_MODES if m in FEW], ids=by_name)
def test_groups(session: Session, mode: Mode) -> None:
    """Groups of rows and of columns, with an empty group and rows behind the last one.

    Columns of groups that have more than 128 rows on average are quantized by other kernels.
    """
    x = rows_of_every_kind(torch.bfloat16, 150)
    offs = torch.tensor([5, 5, 135, 145], dtype=torch.int32)
    check_quantize(session, x, mode, row=expected(x, mode, offs=offs), offs=offs)
    check_quantize(session, x, mode, column=expected(x, mode, 0, offs=offs), offs=offs)
    x = rows_of_every_kind(torch.bfloat16, 272)
    offs = torch.tensor([3, 265], dtype=torch.int32)
    check_quantize(session, x, mode, column=expected(x, mode, 0, offs=offs), offs=offs)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("m", [150, 530])
def test_columns_of_groups(session: Session, m: int, dtype: torch.dtype) -> None:
    """Codes and scales, or fp16 values, of groups of few and of many rows, of each type of x."""
    x = rows_of_every_kind(dtype, m)
    offs = torch.tensor([5, 5, m - 15, m - 5], dtype=torch.int32)
    for mode in [m for m in FEW if m in GROUPED_MODES and m.arguments["per_row"]]:
        options = {name: value for name, value in mode.operator().items() if name != "block_rows"}
        check_quantize(session, x, mode, SCHEDULES[2:3], column=expected(x, mode, 0, offs=offs), offs=offs)
        decoded = reference.quantize_decoded(x, None, axis=0, offs=offs, **options)
        check_quantize(session, x, mode, SCHEDULES[2:3], column=decoded, offs=offs)


@pytest.mark.parametrize("values", [[-5, 300], [200, 100, 200], [2**31 - 1, -(2**31)]], ids=str)
@pytest.mark.parametrize("m", [200, 640])
def test_wrong_ends_of_columns(session: Session, m: int, values: list[int]) -> None:
    """With any ends, nothing outside of x is read and nothing outside of the results is written.

    The emulator ends a kernel that does. The results are those of no definition.
    """
    library, emulator = session.library, session.emulator
    x, offs = torch.randn(m, K).to(torch.bfloat16), torch.tensor(values, dtype=torch.int32)
    columns = layout.grouped_columns(m, len(values))
    for scaling in (capi.SCALING_ROW, capi.SCALING_TENSOR):
        for is_decoded in (False, True):
            session.configure(**{**FEW_SCHEDULES[0], "hazards_are_fatal": 0, "report_unwritten_global": 0})
            emulator.clear()
            memory = Memory(session)
            args = capi.QuantizeArgs(
                m=m, k=K, scaling=scaling, offs=memory.put(offs), num_groups=len(values), **rows_in(memory, x)
            )
            side = args.column
            arrays = [emulator.empty((len(values) * K,), torch.float32)]
            side.amax = arrays[0].pointer
            if is_decoded:
                arrays.append(emulator.empty((K, columns), torch.float16))
                side.decoded = arrays[1].pointer
            else:
                arrays.append(emulator.empty((K, columns // 2), torch.uint8))
                arrays.append(emulator.empty((-(-K // 128) * 128, columns // 16), torch.uint8))
                side.codes, side.scales = arrays[1].pointer, arrays[2].pointer
            session.check(library.fp4gemm_quantize(args, 0, None))


@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_given_amax(session: Session, mode: Mode) -> None:
    x = rows_of_every_kind(torch.bfloat16)
    of_rows, of_columns = ((torch.arange(n) + 1.0) / 4 for n in (48, K))
    if not mode.arguments["per_row"]:
        of_rows = of_columns = torch.tensor([3.0])
    check_quantize(session, x, mode, row=expected(x, mode, -1, of_rows), given=of_rows)
    check_quantize(session, x, mode, column=expected(x, mode, 0, of_columns), given=of_columns)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_decoded(session: Session, dtype: torch.dtype) -> None:
    """fp16 values in place of codes and scales, along rows and along columns."""
    x = make("normal", 48, K, dtype, torch.Generator().manual_seed(1))
    for mode in [m for m in FEW if m.arguments["block_rows"] == 1]:
        options = {name: value for name, value in mode.operator().items() if name != "block_rows"}
        check_quantize(session, x, mode, row=reference.quantize_decoded(x, None, axis=-1, **options))
        check_quantize(session, x, mode, column=reference.quantize_decoded(x, None, axis=0, **options))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "groups"])
def test_gathered_rows(session: Session, grouped: bool, dtype: torch.dtype) -> None:
    x = rows_of_every_kind(dtype)
    rows = torch.tensor([3, 3, 47, -1, 0, 17, 48, 2] * 7, dtype=torch.int32)
    more = {"rows": rows, "offs": torch.tensor([0, 20, 50], dtype=torch.int32) if grouped else None}
    check_quantize(session, x, TE, row=reference.quantize(x, None, True, **more), **more)
    check_quantize(session, x, TE, row=reference.quantize_decoded(x, None, True, **more), **more)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "importance"])
def test_scale_search(session: Session, weighted: bool, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(2)
    x = make("heavy", 48, K, dtype, gen)
    importance = torch.rand(K, generator=gen) if weighted else None

    def build(memory: Memory, per_row: bool, block_rows: int, fp8_operand: bool) -> tuple[object]:
        args = capi.QuantizeSearchedArgs(m=48, k=K, block_rows=block_rows, **rows_in(memory, x))
        args.scaling = capi.SCALING_ROW if per_row else capi.SCALING_TENSOR
        args.fp8_operand = int(fp8_operand)
        args.importance = memory.put(importance)
        want = reference.quantize_searched(x, None, importance, per_row, block_rows, 256, fp8_operand)
        parts_out(memory, args, want)
        return (args,)

    for per_row, block_rows in ((True, 1), (False, 1), (False, 16)):
        for fp8_operand in (False, True):
            options = {"per_row": per_row, "block_rows": block_rows, "fp8_operand": fp8_operand}
            check(session, "quantize_searched", partial(build, **options))


def test_no_elements(session: Session) -> None:
    """The amax of an empty tensor is zero."""
    x = torch.empty(0, K, dtype=torch.bfloat16)
    mode = next(m for m in MODES if m.name == "tensor-te-plain")
    check_quantize(session, x, mode, row=(*expected(x, mode)[:2], torch.zeros(1)))


@pytest.mark.parametrize("capability", [103, 121])
def test_the_family_shares_its_quantizers(sessions: Sessions, capability: int) -> None:
    """A device of the family whose compute capability is not that of the kernels' code."""
    if capability // 10 * 10 not in ARCHS:
        pytest.skip("built without kernels of the family")
    x = rows_of_every_kind(torch.bfloat16)
    for mode in FEW:
        check_quantize(sessions[capability], x, mode, SCHEDULES[2:3], row=expected(x, mode))
        check_quantize(sessions[capability], x, mode, SCHEDULES[2:3], column=expected(x, mode, 0))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("four_over_six", [0, 1], ids=["plain", "mae"])
@pytest.mark.parametrize("given", [False, True], ids=["measured", "given"])
def test_stacks(session: Session, given: bool, four_over_six: int, dtype: torch.dtype) -> None:
    """Blocks of 16x16 of three matrices in one call: rows, columns and both."""
    x = torch.stack([rows_of_every_kind(dtype) * scale for scale in (1, 0.5, 0)])
    amax = torch.tensor([3.0, 0.25, 1.0]) if given else None
    bound = 256 if four_over_six else 448

    def build(memory: Memory, rows: bool, columns: bool) -> tuple[object, ...]:
        args = capi.QuantizeArgs(m=x.shape[1], k=K, scaling=capi.SCALING_TENSOR, block_rows=16)
        args.four_over_six, args.e4m3_max = four_over_six, bound
        args.x, args.x_row_stride, args.x_dtype = memory.put(x), K, capi.DTYPES[dtype]
        given_at = memory.put(amax)  # a square has one scale, so both sides have the same amax
        *parts, measured = reference.quantize_stack(
            x, amax, rows, columns, four_over_six=four_over_six, e4m3_max=bound
        )
        for side, want, wanted in ((args.row, parts[:2], rows), (args.column, parts[2:], columns)):
            if wanted:
                side.amax_given = given_at
                parts_out(memory, side, (*want, None if given else measured))
        return args, len(x)

    for rows, columns in ((True, False), (False, True), (True, True)):
        check(session, "quantize_stack", partial(build, rows=rows, columns=columns))


@pytest.mark.parametrize("mode", [m for m in FEW if m.arguments["block_rows"] == 1], ids=by_name)
def test_columns_of_stacks(session: Session, mode: Mode) -> None:
    """Three matrices in one call, each with random numbers of its own; packed, decoded, with a given amax."""
    parts = [rows_of_every_kind(torch.bfloat16) * scale for scale in (1, 0.5, 0)]
    x = torch.stack(parts)
    options = mode.operator()
    offset = options.get("rng_state")
    shape = (3, K) if options["per_row"] else (3, 1)
    given = torch.arange(3 * shape[1]).view(shape) / 4 + 0.25
    decoded = {name: value for name, value in options.items() if name != "block_rows"}

    def wanted(amax: Tensor | None, is_decoded: bool) -> tuple[Tensor, ...]:
        made = []
        for e, part in enumerate(parts):
            own = {} if offset is None else {"rng_state": offset + torch.tensor([0, 2 * e])}
            of_e = None if amax is None else amax[e]
            if is_decoded:
                made.append(reference.quantize_decoded(part, of_e, axis=0, **{**decoded, **own}))
            else:
                codes, scales, found = reference.quantize(part, of_e, axis=0, **{**options, **own})
                made.append((codes, scales.view(torch.uint8), found))
        return tuple(torch.stack(each) for each in zip(*made, strict=True))

    def build(memory: Memory, amax: Tensor | None, is_decoded: bool) -> tuple[object, ...]:
        args = capi.QuantizeArgs(m=x.shape[1], k=K, hadamard_signs=options["signs"])
        args.scaling = capi.SCALING_ROW if options["per_row"] else capi.SCALING_TENSOR
        for name in SAME_NAMES:
            setattr(args, name, options[name])
        args.x, args.x_row_stride, args.x_dtype = memory.put(x), K, capi.DTYPES[x.dtype]
        args.rng_state = memory.put(offset)
        args.column.hadamard = options["hadamard"]
        args.column.amax_given = memory.put(amax)
        *data, found = wanted(amax, is_decoded)
        parts_out(memory, args.column, (*data, None if amax is not None else found))
        return args, len(x)

    for amax, is_decoded in ((None, False), (given, False), (None, True)):
        check(session, "quantize_stack", partial(build, amax=amax, is_decoded=is_decoded))


# Columns and distances of rows that allow loads of 16, of 4 and of single bytes, and one to three CTAs a row.
@pytest.mark.parametrize(("columns", "stride"), [(48, 64), (80, 80), (12, 12), (36, 52), (7, 7), (33, 40)])
@pytest.mark.parametrize(("matrices", "rows"), [(1, 1), (1, 300), (3, 130)])
def test_swizzle_scales(session: Session, matrices: int, rows: int, columns: int, stride: int) -> None:
    """The definition of layout.swizzle_scales for each matrix; bytes between the rows are not read."""
    gen = torch.Generator().manual_seed(columns)
    compact = torch.randint(0, 256, (matrices, rows, stride), dtype=torch.uint8, generator=gen)
    want = torch.stack([layout.swizzle_scales(one[:, :columns]) for one in compact])

    def build(memory: Memory) -> tuple[object, ...]:
        # Without what follows the last row: the emulator ends a kernel that reads behind an allocation.
        flat = compact.flatten()[: compact.numel() - stride + columns]
        return matrices, rows, columns, memory.put(flat), stride, memory.out("swizzled", want)

    check(session, "swizzle_scales", build)
