"""Rules by which a mutant of a PTX kernel computes what the original computes, and so cannot be killed.

    rule = find_rule(text, mutant)
    if rule is not None and holds(rule): ...

A rule reads the text alone. Where it needs a fact about values, for example that a register is never
negative, it names a premise: instructions that trap where an execution contradicts the fact, or instructions
that the kernel can do without. The caller executes the kernel with the former, and without the latter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptxemu.mutate import Mutant

_STATEMENT = re.compile(r"^\s*((?:@!?%?\w+\s+)?)([a-z][\w.:]*)\s*(.*?);\s*$")
_LABEL = re.compile(r"^\s*([\w$]+):")
_WITHOUT_EFFECT = re.compile(r"(mov|add|sub|and|or|xor|shl|shr|selp|setp|cvt|cvta|mul|mad|min|max|not|neg)\.")
_IN_PREFETCH = re.compile(r"(prefetch\.tensormap|cvta|mov|add)\b")


@dataclass(frozen=True)
class Rule:
    """Why a mutant is equivalent, if its premise holds."""

    reason: str
    line: int = 0  # the premise's instructions are inserted behind this line, from 1
    premise: tuple[str, ...] = field(default=())  # they trap where the premise is wrong
    deleted: tuple[int, ...] = field(default=())  # lines; an execution without them shows the premise

    @property
    def has_premise(self) -> bool:
        return bool(self.premise or self.deleted)


@dataclass(frozen=True)
class _Line:
    """An instruction of the original."""

    number: int  # from 1
    predicate: str
    opcode: str
    fields: tuple[str, ...]

    def reads(self, register: str) -> bool:
        """Whether it reads the register; stores and instructions with several results read all fields."""
        sources = self.fields[1:] if _WITHOUT_EFFECT.match(self.opcode) else self.fields
        return any(_names(source, register) for source in (self.predicate, *sources))


def _names(text: str, register: str) -> bool:
    return re.search(rf"(?<![\w%$]){re.escape(register)}(?!\w)", text) is not None


class _Function:
    """The function that has a line."""

    def __init__(self, text: str, line: int) -> None:
        lines = text.split("\n")
        begin = next(
            i for i in range(line - 1, -1, -1) if re.match(r"(\.visible |\.weak )?\.(entry|func)", lines[i])
        )
        end = next(i for i in range(line - 1, len(lines)) if lines[i].startswith("}"))
        self.labels = {found[1]: i + 1 for i in range(begin, end) if (found := _LABEL.match(lines[i]))}
        self.lines: dict[int, _Line] = {}
        for i in range(begin, end):
            if found := _STATEMENT.match(lines[i]):
                predicate, opcode, operands = found.groups()
                fields = tuple(part.strip() for part in operands.split(","))
                self.lines[i + 1] = _Line(i + 1, predicate.strip(), opcode, fields)

    def readers(self, register: str) -> list[_Line]:
        return [line for line in self.lines.values() if line.reads(register)]

    def definition(self, register: str) -> _Line | None:
        """The only instruction that writes a register, or None if there are several."""
        found = [
            line for line in self.lines.values() if line.fields[0] == register and not line.reads(register)
        ]
        others = [
            line for line in self.lines.values() if "{" in ",".join(line.fields) or "|" in line.fields[0]
        ]
        written = any(_names(",".join(line.fields), register) for line in others)
        return found[0] if len(found) == 1 and not written else None

    def is_dead(self, register: str, depth: int = 4) -> bool:
        """Whether no instruction with an effect depends on the register."""
        if depth == 0 or not re.fullmatch(r"%\w+", register):
            return False
        return all(
            _WITHOUT_EFFECT.match(line.opcode) and self.is_dead(line.fields[0], depth - 1)
            for line in self.readers(register)
        )


def _hint(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    readers = function.readers(line.fields[0])
    waits = [r for r in readers if "mbarrier.try_wait" in r.opcode and r.fields[3:] == (line.fields[0],)]
    if line.opcode.startswith("mov") and readers and len(waits) == len(readers):
        return Rule("the time limit of a wait that is repeated")
    return None


def _dead(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    if _WITHOUT_EFFECT.match(line.opcode) and function.is_dead(line.fields[0]):
        return Rule("nothing reads the result")
    return None


def _unused_barrier(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    """The number of arrivals of mbarriers that nobody uses: without the init, a use would be an error."""
    readers = function.readers(line.fields[0])
    if not line.opcode.startswith("mov") or not readers:
        return None
    if any(not r.opcode.startswith("mbarrier.init") or r.fields[1:] != (line.fields[0],) for r in readers):
        return None
    inits = tuple(reader.number for reader in readers)
    return Rule("the number of arrivals of an mbarrier that no instruction uses", deleted=inits)


def _boolean(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    """mov r, 1 -> mov r, 2, where r is compared with 0 alone."""
    readers = function.readers(line.fields[0])
    if not line.opcode.startswith("mov") or line.fields[1] in ("-1", "0") or not readers:
        return None
    compares = [
        r for r in readers if re.match(r"setp\.(eq|ne)\.", r.opcode) and r.fields[1:] == (line.fields[0], "0")
    ]
    return Rule("a truth value, of which any number but 0 is one") if len(compares) == len(readers) else None


def _prefetch(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    """A comparison that decides whether tensor maps are prefetched, alone or with others."""
    if not line.opcode.startswith("setp"):
        return None
    decided = [line.fields[0]]
    branches: list[_Line] = []
    while decided:
        register = decided.pop()
        for reader in function.readers(register):
            if reader.opcode in ("or.pred", "and.pred"):
                decided.append(reader.fields[0])
            elif reader.opcode.startswith("bra"):
                branches.append(reader)
            else:
                return None
    for branch in branches:
        end = function.labels.get(branch.fields[0], 0)
        skipped = [one for number, one in function.lines.items() if branch.number < number < end]
        if not skipped or any(branch.number < at < end for at in function.labels.values()):
            return None
        for one in skipped:
            if not _IN_PREFETCH.match(one.opcode):
                return None
            readers = [] if one.opcode.startswith("prefetch") else function.readers(one.fields[0])
            if any(not branch.number < reader.number < end for reader in readers):
                return None
    return Rule("decides whether a tensor map is prefetched") if branches else None


def _trap(compare: str) -> tuple[str, ...]:
    return ("{", ".reg .pred wrong;", ".reg .b32 rest;", *compare.split("|"), "@wrong trap;", "}")


def _columns(function: _Function, line: _Line, mutant: Mutant, multiple: int) -> Rule | None:
    """x + j >= n, where x and n are multiples and j is not, so that x + j is never equal to n."""
    compare = line
    if line.opcode == "add.s32":
        readers = function.readers(line.fields[0])
        if len(readers) != 1 or "with" not in mutant.what:
            return None
        compare = readers[0]
    if not re.match(r"setp\.(lt|le|gt|ge)\.s32$", compare.opcode):
        return None
    add = function.definition(compare.fields[1])
    if add is None or add.opcode != "add.s32" or not re.fullmatch(r"\d+", add.fields[2]):
        return None
    # The two comparisons differ where x + j is n; those of x + j and of x + j + 1 where that is n, for lt and
    # ge, and where x + j is, for le and gt.
    number = int(add.fields[2])
    if compare is not line and compare.opcode.split(".")[1] in ("lt", "ge"):
        number += 1
    if number % multiple == 0:
        return None
    # The least power of two that does not divide the number: x may be a multiple of less than `multiple`.
    multiple = 2 * (number & -number)
    tests = "|".join(
        f"and.b32 rest, {register}, {multiple - 1};|setp.ne.u32 wrong, rest, 0;|@wrong trap;"
        for register in (add.fields[1], compare.fields[2])
    )
    reason = (
        f"columns begin and end at multiples of {multiple}, so that no column between is compared as equal"
    )
    return Rule(reason, compare.number, _trap(tests))


def _sign(function: _Function, line: _Line, mutant: Mutant) -> Rule | None:
    """The correction of a division of a signed number by a power of two, which is 0 unless it is negative."""
    add = line
    if line.opcode.startswith("shr."):
        readers = function.readers(line.fields[0])
        if line.opcode.startswith("shr.s32") and len(readers) == 1:
            readers = function.readers(readers[0].fields[0])
        if len(readers) != 1 or ("-> shl" in mutant.what and line.fields[2] == "31"):
            return None
        add = readers[0]
    if add.opcode != "add.s32" or len(add.fields) != 3:
        return None
    x, correction = add.fields[1:]
    shift = function.definition(correction)
    if shift is None or shift.opcode != "shr.u32":
        return None
    if shift.fields[1:] != (x, "31"):
        sign = function.definition(shift.fields[1])
        if sign is None or (sign.opcode, *sign.fields[1:]) != ("shr.s32", x, "31"):
            return None
    reason = "the rounding of a negative quotient; the number is a size or a coordinate, and never negative"
    return Rule(reason, add.number, _trap(f"setp.lt.s32 wrong, {x}, 0;"))


def find_rule(text: str, mutant: Mutant, multiple: int) -> Rule | None:
    """The rule by which an "alu" mutant of the text is equivalent to it, or None.

    multiple: a power of two that divides every number of columns.
    """
    function = _Function(text, mutant.line)
    line = function.lines[mutant.line]
    for rule in (_hint, _dead, _unused_barrier, _boolean, _prefetch, _sign):
        if found := rule(function, line, mutant):
            return found
    return _columns(function, line, mutant, multiple)


def with_premises(text: str, rules: list[Rule]) -> str:
    """The text that fails where a premise of the rules is wrong."""
    lines = text.split("\n")
    for rule in rules:
        for number in rule.deleted:
            lines[number - 1] = ""
    for rule in sorted(rules, key=lambda rule: rule.line, reverse=True):
        lines[rule.line : rule.line] = rule.premise
    return "\n".join(lines)
