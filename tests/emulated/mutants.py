"""Mutants of the library's kernels with one fault each, in the PTX or in the arguments of the call.

python tests/emulated/mutants.py [--limit 60] [--kernel REGEX] [--kinds fence sync alu]

prints the survivors, and the table of docs/blackwell.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (Path(__file__).parent, _ROOT / "tests" / "support", _ROOT / "emulator"):
    sys.path.insert(0, str(_folder))

import capi  # noqa: E402
import torch  # noqa: E402
from fp4gemm import reference  # noqa: E402
from problems import (  # noqa: E402
    FORMATS,
    FULL,
    PLAIN,
    TOKEN_TYPES,
    Problem,
    computed,
    dense,
    ends_of_tiles,
    grouped_ragged_m,
    with_prepacked,
)
from ptxemu.equivalent import find_rule, with_premises  # noqa: E402
from ptxemu.mutate import Mutant, Table, first_verdict, in_emulator, mutants, score  # noqa: E402
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


# Every number of columns is a multiple of this, as the library demands. No number of rows below is one, so
# that the rule of ptxemu.equivalent for columns does not take rows for columns.
COLUMNS_MULTIPLE = 8


def sharpened(problem: Problem) -> Problem:
    """The problem with arguments of the activation around 1, and with a C that nearly cancels the result.

    The activations differ most from a straight line there. What remains of D shows an error of a unit in the
    last place of fp32, which rounding to 16 bits would hide otherwise.
    """
    if not problem.vectors:
        return problem
    vectors = {name: vector for name, vector in problem.vectors.items() if name != "c"}
    beta = -1.25
    plain = replace(problem, alpha=1.0, activation=0, beta=1.0, vectors={})
    rms = float(computed(plain, torch.float32).nan_to_num().square().mean().sqrt())
    alpha = 1.7 / rms
    if "alpha_groups" in vectors:
        vectors["alpha_groups"], alpha = vectors["alpha_groups"] * alpha, 1.0
    sharp = replace(problem, alpha=alpha, beta=1.0, vectors=vectors)
    if "c" in problem.vectors:
        result = computed(sharp, torch.float32).nan_to_num()
        c = (result / -beta).to(torch.bfloat16).to(problem.dtype)
        sharp = replace(sharp, beta=beta, vectors={**vectors, "c": c})
    want = problem.want.clone()
    result = computed(sharp, problem.dtype)
    want[..., : result.shape[-1]] = result
    return replace(sharp, want=want)


def problems_of(info: capi.KernelInfo) -> list[Problem]:
    """The problem of problem_of, and others with another activation, more tiles of less work, and groups."""
    dtype = {number: dtype for dtype, number in capi.DTYPES.items()}[info.out_dtype]
    operand, is_gated = info.operand.decode(), info.epilogue == b"gated"
    found = [problem_of(info)]
    if operand in TOKEN_TYPES:
        return found
    second = "geglu_tanh" if is_gated else "gelu_tanh"
    if info.mode == b"dense":
        return [*found, sharpened(dense(397, 448, 96, dtype, FULL, second, operand))]
    many = tuple(i * 7 % 5 % 3 for i in range(290))
    return [
        *found,
        sharpened(grouped_ragged_m((261, 0, 131), 448, 96, dtype, FULL, second, operand)),
        grouped_ragged_m(many, 16, 32, dtype, PLAIN, "swiglu" if is_gated else None, operand),
    ]


def ends_of(info: capi.KernelInfo) -> list[Problem]:
    """Problems that end at other places of a tile; a kernel of another kind has none."""
    if info.mode != b"dense" or info.epilogue != b"rowcol" or info.operand.decode() not in FORMATS:
        return []
    dtype = {number: dtype for dtype, number in capi.DTYPES.items()}[info.out_dtype]
    return ends_of_tiles(dtype, info.operand.decode())


def problem_of(info: capi.KernelInfo) -> Problem:
    """A problem with several tiles for each SM, every term of the epilogue, and ragged sizes."""
    dtype = {number: dtype for dtype, number in capi.DTYPES.items()}[info.out_dtype]
    n, activation = (144, "swiglu") if info.epilogue == b"gated" else (136, "silu")
    if tokens := TOKEN_TYPES.get(info.operand.decode()):
        few = (
            dense(20, 136, 1184, dtype)
            if info.mode == b"dense"
            else grouped_ragged_m((5, 0, 20), 136, 160, dtype)
        )
        return with_prepacked(few, tokens)
    if info.mode == b"dense":
        return sharpened(dense(269, n, 1088, dtype, FULL, activation, info.operand.decode()))
    sizes = (5, 0, 130, 17)
    return sharpened(grouped_ragged_m(sizes, n, 544, dtype, FULL, activation, info.operand.decode()))


def text_of(session: Session, kernel: str, *problems: Problem) -> tuple[str, list[int]]:
    """The text of the PTX file that has the kernel, and the lines that the problems execute."""
    session.emulator.reset_statistics()
    for problem in problems:
        session.run(problem, kernel, mode="lazy")
    lines = session.emulator.statistics()["lines"]
    # Several files have the kernel that prepares the groups; one of them has the GEMM too.
    texts = [text for path in session.ptx_files if f".target sm_{session.arch}" in (text := path.read_text())]
    found = {text: [name for name in lines if f"{name}(" in text] for text in texts}
    text = max(found, key=lambda text: len(found[text]))
    if not found[text]:
        raise LookupError(kernel)
    return text, [int(line) for name in found[text] for line in lines[name]]


# An execution of a mutant: a problem and options of the emulator, the schedule among them.
Trial = tuple[Problem, dict[str, object]]


def trials_of(problems: list[Problem], options: dict[str, object]) -> list[Trial]:
    """The first problem under every schedule, and each other one under two, the quickest to kill first."""
    first, *others = problems
    eager, lazy, *more = [{**options, **schedule} for schedule in SCHEDULES]
    mixed = [(other, schedule) for schedule in (lazy, more[0]) for other in others]
    return [(first, eager), *mixed, *((first, schedule) for schedule in (lazy, *more))]


def ptx_score(session: Session, kernel: str, kind: str, limit: int | None, folder: Path) -> Table:
    """The score of mutants of the kernel's PTX, each of which is executed until a trial kills it.

    limit: the size of a random sample; None takes every mutant.
    """
    info = session.kernels[kernel]
    problems, ends = problems_of(info), [sharpened(problem) for problem in ends_of(info)]
    text, lines = text_of(session, kernel, *problems, *ends)

    def run(mutant: str, trial: Trial) -> str | None:
        problem, options = trial

        def execute() -> bool:
            call = Call(session, problem, kernel)
            return call.launch() == capi.SUCCESS and same_bits(call.result(), problem.want)

        return in_emulator(session.emulator, folder, execute)(mutant, options)

    # Kernels with n = 256 use registers of a load without a wait, as some of CUTLASS's do; others must wait.
    strict = {**session.device, **OPTIONS, "loads_need_wait": 1}
    waits = all(run(text, (problem, {**strict, **SCHEDULES[0]})) is None for problem in problems)
    options = {**strict, "loads_need_wait": int(waits)}
    trials = [*trials_of(problems, options), *((end, {**options, **SCHEDULES[1]}) for end in ends)]
    try:
        table = score(mutants(text, kind, lines, limit), run, trials)
        if kind == "fence":
            useful = useful_lines(session, text, run, trials)
            table.exclude(lambda mutant: without_object(mutant, useful))
            # A fence.proxy.async covers what is ordered before it, so that another warp's makes up for it.
            proxies = [mutant for mutant in table.survivors if "fence.proxy.async" in mutant.what]
            table.join(text, proxies, lambda joint: first_verdict(joint, run, trials))
        if kind == "alu":
            exclude_by_rules(
                table, text, lambda checked: all(run(checked, trial) is None for trial in trials)
            )
        return table
    finally:
        session.emulator.unload()
        for path in session.ptx_files:
            session.emulator.load(path)


def useful_lines(
    session: Session, text: str, run: Callable[[str, Trial], str | None], trials: list[Trial]
) -> set[int]:
    """The lines of the fences and waits that order an access in one of the trials."""
    session.emulator.reset_statistics()
    for problem, options in trials:
        if (verdict := run(text, (problem, {**options, "trace_fences": 1}))) is not None:
            raise ValueError(f"text: the kernel itself gives: {verdict}")
    return {int(line) for lines in session.emulator.statistics()["useful"].values() for line in lines}


def without_object(mutant: Mutant, useful: set[int]) -> str | None:
    """Why a fence or wait that no access depends on can be deleted, or None."""
    if mutant.line in useful:
        return None
    if "fence.proxy.async" in mutant.what:
        return "no operation of the async proxy accesses what the fence orders"
    if "bulk.wait_group" in mutant.what:
        return "an earlier wait completed all groups, or what they read is not written behind the wait"
    return None


def exclude_by_rules(table: Table, text: str, passes: Callable[[str], bool]) -> None:
    """Calls survivors equivalent for which a rule holds. passes(text): whether all trials of it are right."""
    rules = {m: rule for m in table.survivors if (rule := find_rule(text, m, COLUMNS_MULTIPLE))}
    premises = [rule for rule in rules.values() if rule.has_premise]
    every = passes(with_premises(text, premises)) if premises else True
    held = {
        mutant: rule.reason
        for mutant, rule in rules.items()
        if every or not rule.has_premise or passes(with_premises(text, [rule]))
    }
    table.exclude(held.get)


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
    yield "no bias", put("bias", capi.Vector())
    yield "another activation", put("activation", 3)
    if args.c is not None:
        yield "beta halved", put("beta", args.beta / 2)
        yield "no c", put("c", None)
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


_KERNELS = (
    "sm100_(dense_256x128x256_c2x1_rowcol|grouped_128x128x256_c1x1_rowcol)_(bf16|fp32)|"
    "sm100_dense_(128x128x256_c1x1_gated_bf16|64x128x256_c1x1_swapped_rowcol_fp32)|"
    "sm100_dense_128x128x128_c1x1_mxfp8_rowcol_bf16|sm120_dense_128x128x128_c1x1_rowcol_(bf16|fp32)|"
    "sm120_grouped_128x128x128_c1x1_rowcol_bf16"
)
KINDS = ("fence", "sync", "alu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=60, help="mutants of a kind and kernel; all fences are")
    parser.add_argument("--kernel", default=_KERNELS, help="kernels, by a regular expression")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["fence", "alu"], help="of the PTX")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [f"| kernel | arguments | {' | '.join(options.kinds)} |", "|---" * (2 + len(options.kinds)) + "|"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sessions = Sessions(folder / "ptx")
        for info in KERNELS:
            if not re.search(f"^({options.kernel})", info.name):
                continue
            kernel, session = info.name, sessions.of(info)
            total, survivors = argument_survivors(session, kernel)
            print(f"{kernel}, arguments: {total - len(survivors)} of {total} noticed; survived: {survivors}")
            cells = [f"{total - len(survivors)} of {total}"]
            for kind in options.kinds:
                limit = None if kind == "fence" else options.limit
                table = ptx_score(session, kernel, kind, limit, folder)
                print(f"{kernel}, {kind}: {table.summary()}", flush=True)
                killed = table.total - len(table.survivors)
                cells.append(f"{killed} of {table.total}, {len(table.equivalent)} equivalent")
            rows.append(f"| {kernel} | {' | '.join(cells)} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
