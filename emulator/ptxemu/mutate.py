"""Mutation testing of PTX: makes mutants with one fault each and counts those that a test kills.

    all_mutants = mutants(text, kind="sync", lines=executed_lines, limit=100, seed=1)
    table = score(all_mutants, in_emulator(emulator, folder, execute), schedules)
    print(table.summary())

`execute()` launches the kernel and returns whether its result is right; in_emulator() makes a verdict of that
and of the emulator's reports. The mutants depend on the text and the seed alone.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptxemu.emulator import Emulator, EmulatorError

# Instructions without a result register that synchronize or start an asynchronous operation.
_DELETABLE = re.compile(
    r"(mbarrier\.(init|arrive|expect_tx)|bar\.(sync|arrive|warp\.sync)|barrier\.(sync|arrive|cluster)|fence\.|"
    r"cp\.async|tcgen05\.(alloc|dealloc|relinquish|cp|mma|commit|wait)|clusterlaunchcontrol\.try_cancel|tensormap\.|"
    r"griddepcontrol\.wait)"
)
# Instructions that order accesses or complete them for the thread that executes them, without a result.
_FENCE = re.compile(r"(fence\.|membar\.|tcgen05\.(fence|wait)|cp\.async\.(bulk\.wait_group|wait))")
# A fence of this kind covers all earlier initialisations of its thread, so that the next one makes up for it.
_CUMULATIVE = re.compile(r"fence\.mbarrier_init")
_WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\S*\s+([%\w]+)\s*,")
_STATEMENT = re.compile(r"^(\s*)((?:@!?%?\w+\s+)?)([a-z][\w.:]*)\s*(.*?);\s*$")

_COMPARISONS = {
    "eq": "ne",
    "ne": "eq",
    "lt": "le",
    "le": "lt",
    "gt": "ge",
    "ge": "gt",
    "lo": "ls",
    "ls": "lo",
    "hi": "hs",
    "hs": "hi",
    "ltu": "leu",
    "leu": "ltu",
    "gtu": "geu",
    "geu": "gtu",
    "equ": "neu",
    "neu": "equ",
}
_OPERATORS = {
    "add": "sub",
    "sub": "add",
    "and": "or",
    "or": "and",
    "xor": "or",
    "shl": "shr",
    "shr": "shl",
    "min": "max",
    "max": "min",
}

VERDICTS = ("wrong result", "fatal", "deadlock", "hazard")


@dataclass(frozen=True)
class Mutant:
    """A PTX file with one fault."""

    line: int  # of the original text, from 1
    what: str  # "delete bar.sync 0", "setp.lt -> setp.le", ...
    text: str  # the whole PTX file


def _swap(opcode: str, table: dict[str, str], index: int) -> str | None:
    parts = opcode.split(".")
    if len(parts) <= index or parts[index] not in table:
        return None
    parts[index] = table[parts[index]]
    # shl exists for .b types only; shr for .u and .s types too.
    if parts[0] == "shl":
        parts[-1] = "b" + parts[-1][1:]
    return ".".join(parts)


def _sync_faults(opcode: str, operands: str) -> list[tuple[str, str]]:
    """Pairs (description, replacement without predicate and semicolon)."""
    if wait := _WAIT.match(f"{opcode} {operands}"):
        return [(f"{opcode} passes at once", f"setp.eq.u32 {wait[1]}, 0, 0")]
    if _DELETABLE.match(opcode):
        return [(f"delete {opcode}", "")]
    return []


def _fence_faults(opcode: str, operands: str) -> list[tuple[str, str]]:
    return [(f"delete {opcode}", "")] if _FENCE.match(opcode) else []


def _alu_faults(opcode: str, operands: str) -> list[tuple[str, str]]:
    faults = []
    head = opcode.split(".")[0]
    if head == "setp" and (swapped := _swap(opcode, _COMPARISONS, 1)):
        faults.append((f"{opcode} -> {swapped}", f"{swapped} {operands}"))
    elif head == "selp":
        fields = [x.strip() for x in operands.split(",")]
        if len(fields) == 4 and fields[1] != fields[2]:
            fields[1], fields[2] = fields[2], fields[1]
            faults.append((f"{opcode} with its inputs swapped", f"{opcode} {', '.join(fields)}"))
    elif head in ("mul", "fma") and opcode.endswith("f32"):
        fields = [x.strip() for x in operands.split(",")]
        replaced = ["add.f32", *fields[:3]] if head == "mul" else ["mul.f32", *fields[:3]]
        faults.append((f"{opcode} -> {replaced[0]}", f"{replaced[0]} {', '.join(replaced[1:])}"))
    elif swapped := _swap(opcode, _OPERATORS, 0):
        faults.append((f"{opcode} -> {swapped}", f"{swapped} {operands}"))
    if head in ("add", "mad", "shl", "shr", "mul", "and", "mov", "bfe") and "{" not in operands:
        number = re.search(r"(?<=, )(-?\d+)$", operands)
        if number and "f" not in opcode.split(".")[-1]:
            changed = str(int(number[1]) + 1)
            faults.append(
                (
                    f"{opcode} with {changed} for {number[1]}",
                    f"{opcode} {operands[: number.start()]}{changed}",
                )
            )
    return faults


def mutants(
    text: str, kind: str, lines: Iterable[int] | None = None, limit: int | None = None, seed: int = 1
) -> list[Mutant]:
    """One Mutant for each fault of a kind, "fence", "sync" or "alu".

    fence: a fence is missing, or a wait for the thread's own asynchronous operations. All
        fence.mbarrier_init of the kernel are one fault.
    sync: an instruction that synchronizes or starts an asynchronous operation is missing, or a wait passes at
        once. Fences are among them, one by one.
    alu: another operator, comparison, selection or constant.
    lines: restricts the faults to these lines, e.g. those that Emulator.statistics() names as executed.
    limit: the size of a random sample of the faults.
    """
    faults_of = {"fence": _fence_faults, "sync": _sync_faults, "alu": _alu_faults}
    if kind not in faults_of:
        raise ValueError(f"kind is {kind!r}, must be 'fence', 'sync' or 'alu'")
    wanted = None if lines is None else {int(n) for n in lines}
    original = text.split("\n")
    found: list[tuple[int, str, dict[int, str]]] = []  # line, description, lines that replace others
    cumulative: dict[str, dict[int, str]] = {}
    for index, line in enumerate(original):
        if wanted is not None and index + 1 not in wanted:
            continue
        if match := _STATEMENT.match(line):
            indent, predicate, opcode, operands = match.groups()
            for what, statement in faults_of[kind](opcode, operands):
                replaced = f"{indent}{predicate}{statement};" if statement else f"{indent}// {what}"
                if kind == "fence" and _CUMULATIVE.match(opcode):
                    if opcode not in cumulative:
                        cumulative[opcode] = {}
                        found.append((index, f"delete every {opcode}", cumulative[opcode]))
                    cumulative[opcode][index] = replaced
                else:
                    found.append((index, what, {index: replaced}))
    if limit is not None and len(found) > limit:
        found = sorted(random.Random(seed).sample(found, limit), key=lambda fault: fault[:2])
    return [
        Mutant(index + 1, what, "\n".join(replaced.get(i, line) for i, line in enumerate(original)))
        for index, what, replaced in found
    ]


def together(text: str, singles: Sequence[Mutant]) -> Mutant:
    """The faults of several mutants of the text in one."""
    changed = text.split("\n")
    for index, line in enumerate(text.split("\n")):
        changed[index] = next(
            (other for single in singles if (other := single.text.split("\n")[index]) != line), line
        )
    what = " and ".join(f"line {single.line}: {single.what}" for single in singles)
    return Mutant(singles[0].line, what, "\n".join(changed))


@dataclass
class Table:
    """The result of score()."""

    killed: Counter[str] = field(default_factory=Counter)  # by verdict
    survivors: list[Mutant] = field(default_factory=list)
    equivalent: list[tuple[Mutant, str]] = field(default_factory=list)  # with the reason; they do not count
    joined: list[tuple[Mutant, str]] = field(default_factory=list)  # survivors that count as one, by verdict

    @property
    def total(self) -> int:
        """The mutants that can be killed."""
        return sum(self.killed.values()) + len(self.survivors)

    def summary(self) -> str:
        by = ", ".join(f"{self.killed[verdict]} {verdict}" for verdict in VERDICTS)
        killed = sum(self.killed.values())
        lines = [
            f"{killed} of {self.total} mutants killed ({100 * killed / max(self.total, 1):.0f} %): {by}; "
            f"{len(self.equivalent)} more are equivalent"
        ]
        lines += [f"  survived: line {m.line}: {m.what}" for m in self.survivors]
        lines += [f"  {verdict} as one fault: {m.what}" for m, verdict in self.joined]
        lines += [f"  equivalent: line {m.line}: {m.what}: {reason}" for m, reason in self.equivalent]
        return "\n".join(lines)

    def exclude(self, reason_of: Callable[[Mutant], str | None]) -> None:
        """Takes those survivors for which there is a reason for equivalent."""
        reasons = [(mutant, reason_of(mutant)) for mutant in self.survivors]
        self.survivors = [mutant for mutant, reason in reasons if reason is None]
        self.equivalent += [(mutant, reason) for mutant, reason in reasons if reason is not None]

    def join(self, text: str, singles: Sequence[Mutant], verdict_of: Callable[[str], str | None]) -> None:
        """Counts survivors of the text as one fault, if together they are noticed."""
        if len(singles) < 2:
            return
        joint = together(text, singles)
        if verdict := verdict_of(joint.text):
            self.survivors = [mutant for mutant in self.survivors if mutant not in singles]
            self.killed[verdict] += 1
            self.joined.append((joint, verdict))


def score(
    all_mutants: Iterable[Mutant], run: Callable[[str, Any], str | None], schedules: Sequence[Any]
) -> Table:
    """Executes each mutant under the schedules in turn until one kills it.

    run(text, schedule) returns a verdict, or None if nothing was wrong.
    """
    table = Table()
    for mutant in all_mutants:
        if verdict := first_verdict(mutant.text, run, schedules):
            table.killed[verdict] += 1
        else:
            table.survivors.append(mutant)
    return table


def first_verdict(text: str, run: Callable[[str, Any], str | None], schedules: Sequence[Any]) -> str | None:
    """The verdict of the first schedule that kills the text, or None."""
    return next((verdict for schedule in schedules if (verdict := run(text, schedule))), None)


def in_emulator(
    emulator: Emulator, folder: Path, execute: Callable[[], bool]
) -> Callable[[str, dict[str, Any]], str | None]:
    """A `run` for score(). A schedule holds arguments of Emulator.configure(). Unloads other PTX files."""

    def run(text: str, schedule: dict[str, Any]) -> str | None:
        path = folder / "mutant.ptx"
        path.write_text(text)
        emulator.unload()
        emulator.configure(**{"instruction_budget": 20_000_000, **schedule})
        emulator.clear()
        try:
            emulator.load(path)
            right = execute()
            emulator.synchronize()
        except EmulatorError as error:
            return "deadlock" if re.search("deadlock|livelock", str(error)) else "fatal"
        if not right:
            return "wrong result"
        return "hazard" if emulator.num_hazards() else None

    return run
