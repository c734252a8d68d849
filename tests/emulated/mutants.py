"""Mutants of the library's kernels with one fault each, in the PTX or in the arguments of the call.

python tests/emulated/mutants.py [--limit 60] [--kernel REGEX]      prints the table of docs/blackwell.md
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (Path(__file__).parent, _ROOT / "tests" / "support", _ROOT / "emulator"):
    sys.path.insert(0, str(_folder))

import capi  # noqa: E402
import torch  # noqa: E402
from fp4gemm import reference  # noqa: E402
from problems import (  # noqa: E402
    FULL,
    TOKEN_TYPES,
    Problem,
    dense,
    grouped_ragged_m,
    with_prepacked,
)
from ptxemu.mutate import Table, in_emulator, mutants, score  # noqa: E402
from session import (  # noqa: E402
    KERNELS,
    SCHEDULES,
    Call,
    Finding,
    Session,
    Sessions,
    same_bits,
)

OPTIONS = {"hazards_are_fatal": 0, "report_unwritten_global": 1}


def problem_of(info: capi.KernelInfo) -> Problem:
    """A problem with several tiles for each SM, every term of the epilogue, and ragged sizes."""
    dtype = {number: dtype for dtype, number in capi.DTYPES.items()}[info.out_dtype]
    if tokens := TOKEN_TYPES.get(info.operand.decode()):
        few = (
            dense(20, 136, 1184, dtype)
            if info.mode == b"dense"
            else grouped_ragged_m((5, 0, 20), 136, 160, dtype)
        )
        return with_prepacked(few, tokens)
    if info.mode == b"dense":
        return dense(264, 136, 1088, dtype, FULL, "silu", info.operand.decode())
    return grouped_ragged_m((5, 0, 130, 17), 136, 544, dtype, FULL, "silu", info.operand.decode())


def text_of(session: Session, kernel: str, problem: Problem) -> tuple[str, list[int]]:
    """The text of the PTX file that has the kernel, and the lines that the problem executes."""
    session.emulator.reset_statistics()
    session.run(problem, kernel, mode="lazy")
    lines = session.emulator.statistics()["lines"]
    # Several files have the kernel that prepares the groups; one of them has the GEMM too.
    texts = [text for path in session.ptx_files if f".target sm_{session.arch}" in (text := path.read_text())]
    found = {text: [name for name in lines if f"{name}(" in text] for text in texts}
    text = max(found, key=lambda text: len(found[text]))
    if not found[text]:
        raise LookupError(kernel)
    return text, [int(line) for name in found[text] for line in lines[name]]


def ptx_score(session: Session, kernel: str, kind: str, limit: int | None, folder: Path) -> Table:
    """The score of mutants of the kernel's PTX, each of which is executed until a schedule kills it.

    limit: the size of a random sample; None takes every mutant.
    """
    problem = problem_of(session.kernels[kernel])
    text, lines = text_of(session, kernel, problem)

    def execute() -> bool:
        call = Call(session, problem, kernel)
        if call.launch() != capi.SUCCESS:
            return False
        return same_bits(call.result(), problem.want)

    run = in_emulator(session.emulator, folder, execute)
    # Kernels with n = 256 use registers of a load without a wait, as some of CUTLASS's do; others must wait.
    strict = {**session.device, **OPTIONS, "loads_need_wait": 1}
    options = strict if run(text, {**strict, **SCHEDULES[0]}) is None else {**strict, "loads_need_wait": 0}
    schedules = [{**options, **schedule} for schedule in SCHEDULES]
    try:
        return score(mutants(text, kind, lines, limit), run, schedules)
    finally:
        session.emulator.unload()
        for path in session.ptx_files:
            session.emulator.load(path)


def accumulate_twice(session: Session, kernel: str) -> bool:
    """Whether two overlapping launches of D = alpha A B^T + beta D give the D of consecutive launches."""
    problem = dense(130, 136, 96, torch.bfloat16, FULL)
    session.configure(**OPTIONS, mode="lazy")
    session.emulator.clear()
    call = Call(session, problem, kernel)
    call.args.c, call.args.c_row_stride = call.args.d, call.args.d_row_stride
    d = problem.vectors["c"]
    call.d.torch()[:, : problem.n] = d
    call.d.mark_written()
    for alpha in (0.25, 0.5):
        call.args.alpha = alpha
        if call.launch() != capi.SUCCESS:
            return False
        d = reference.gemm(
            problem.a,
            problem.b,
            problem.scale_a,
            problem.scale_b,
            alpha=alpha,
            out_dtype=problem.dtype,
            beta=problem.beta,
            **{**problem.vectors, "c": d},
        )
    return same_bits(call.result()[:, : problem.n].contiguous(), d)


def argument_faults(args: capi.GemmArgs) -> Iterator[tuple[str, Callable[[], None]]]:
    """Pairs (description, function that spoils the arguments) of mistakes that a caller could make."""

    def put(field: str, value: object) -> Callable[[], None]:
        return lambda: setattr(args, field, value)

    if args.b.format == capi.FORMAT_PREPACKED:
        yield "b 16 bytes on", lambda: setattr(args.b, "data", args.b.data + 16)
    else:
        yield "the scales of a for those of b", lambda: setattr(args.a, "scales", args.b.scales)
        yield "the scales of b 16 bytes on", lambda: setattr(args.b, "scales", args.b.scales + 16)
    yield "a 16 bytes on", lambda: setattr(args.a, "data", args.a.data + 16)
    yield "k 32 less", put("k", args.k - 32)
    yield "m one less", put("m", args.m - 1)
    yield "n 8 less", put("n", args.n - 8)
    yield "beta halved", put("beta", args.beta / 2)
    yield "no bias", put("bias", capi.Vector())
    yield "no c", put("c", None)
    yield "another activation", put("activation", 3)
    yield "c 16 bytes on", put("c", args.c + 16)
    yield "d 16 bytes on", put("d", args.d + 16)
    yield "rows of d 8 elements closer", put("d_row_stride", args.d_row_stride - 8)
    yield "row vector one on", lambda: setattr(args.alpha_row, "data", args.alpha_row.data + 4)
    yield "column vector one on", lambda: setattr(args.alpha_col, "data", args.alpha_col.data + 4)
    yield "row vector a number", lambda: setattr(args.alpha_row, "numel", 1)
    if args.num_groups > 0:
        yield "group ends one on", put("offs", args.offs + 4)
        yield "one group less", put("num_groups", args.num_groups - 1)
        yield "columns' vector not by group", lambda: setattr(args.alpha_col, "group_stride", 0)
        yield "alpha not by group", put("alpha_groups", None)
    else:
        yield "alpha doubled", put("alpha", args.alpha * 2)


def argument_survivors(session: Session, kernel: str) -> tuple[int, list[str]]:
    """The number of faults in the arguments, and those that neither the result nor the emulator reveals."""
    problem = problem_of(session.kernels[kernel])
    names = [what for what, _ in argument_faults(Call(session, problem, kernel).args)]
    survivors = []
    for index, what in enumerate(names):
        session.configure(**{**OPTIONS, "hazards_are_fatal": 1}, mode="lazy")
        session.emulator.clear()
        call = Call(session, problem, kernel)
        list(argument_faults(call.args))[index][1]()
        try:
            session.check(call.launch())
        except Finding:
            continue
        if same_bits(call.result(), problem.want):
            survivors.append(what)
    return len(names), survivors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=60, help="PTX mutants of each kind and kernel")
    parser.add_argument("--kernel", default="sm100_(dense_256x128|grouped_128x128)x256.*rowcol_(bf16|fp32)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sessions = Sessions(folder / "ptx")
        for info in KERNELS:
            if not re.search(options.kernel, info.name):
                continue
            kernel, session = info.name, sessions.of(info)
            total, survivors = argument_survivors(session, kernel)
            print(f"{kernel}, arguments: {total - len(survivors)} of {total} noticed; survived: {survivors}")
            for kind in ("fence", "sync", "alu"):
                table = ptx_score(session, kernel, kind, options.limit, folder)
                print(f"{kernel}, {kind}: {table.summary()}", flush=True)


if __name__ == "__main__":
    main()
