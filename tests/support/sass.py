"""A control-flow walk over SASS: which instructions can run before an instruction that waits.

Two things are known of a kernel's code: its branches, and the comparisons of one 64-bit kernel parameter with
zero. The walk follows every branch whose predicate it does not know. It assumes the parameter to be zero or
not, one after the other, so that a wait under `if (p == nullptr)` and one under `if (p != nullptr)` together
count as a wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

WAIT = "ACQBULK"  # griddepcontrol.wait
# Everything that reads or writes global memory, and generic accesses, which may.
GLOBAL_ACCESS = re.compile(
    r"(U?LDG|LD|STG|ST|ATOM|ATOMG|RED|REDG|LDGSTS|UBLK\w*|UTMA(?!CCTL|CMDFLUSH)\w*|TEX|TLD\w*|SU(LD|ST|ATOM|RED))(\.|$)"
)
# Loads that may return what memory held before the kernel began (ld.global.nc), and reads of textures, which
# take the same path.
NONCOHERENT_LOAD = re.compile(r"(U?LDG?\.(\w+\.)*CONSTANT|TEX|TLD\w*)(\.|$)")
NONZERO = "nonzero"  # a value of which only that is known

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
REGISTER = re.compile(r"U?R(\d+|Z)")
PREDICATE = re.compile(r"!?(U?P(?:\d|T))")
CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")

# What may change any register or predicate: calls, and instructions with many destinations.
FORGETS = {"CALL", "WARPSYNC", "R2P", "HGMMA", "QGMMA", "IGMMA", "LDTM"}

CONSTANT_LOADS = {"LDC", "ULDC", "LDCU"}
INDIRECT = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}  # branches through a table, as a switch has them

Value = int | str | bool
State = dict[str, Value]
Words = dict[int, Value]  # what is assumed of 32-bit words of constant bank 0, by offset


class Instruction(NamedTuple):
    address: int
    guard: str | None
    name: str  # with its modifiers: "LDG.E.128"
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that the last operand holds."""
        match = re.match(r"`?\(?(0x[0-9a-f]+)", self.operands[-1]) if self.operands else None
        return int(match[1], 16) if match else None


def function_lines(lines: Iterable[str]) -> dict[str, list[str]]:
    """The lines that may be instructions, by mangled name, from the output of `cuobjdump --dump-sass`."""
    found: dict[str, list[str]] = {}
    body: list[str] = []
    for line in lines:
        if ";" in line:
            body.append(line.split(";", 1)[0] + ";")
        elif "Function : " in line:
            body = found.setdefault(line.split("Function : ")[1].strip(), [])
    return found


def parse(lines: Iterable[str]) -> list[Instruction]:
    found = []
    for line in lines:
        if match := INSTRUCTION.match(line):
            operands = (part.strip().removesuffix(".reuse") for part in match[4].split(","))
            found.append(Instruction(int(match[1], 16), match[2], match[3], tuple(filter(None, operands))))
    return found


def predicate(state: State, text: str) -> bool | None:
    """The value of a predicate operand such as "!P0", None if it is not known."""
    value = True if text.lstrip("!") in ("PT", "UPT") else state.get(text.lstrip("!"))
    return None if value is None else bool(value) != text.startswith("!")


def operand(state: State, text: str, words: Words) -> Value | None:
    if text in ("RZ", "URZ", "SRZ"):
        return 0
    if match := CONSTANT.fullmatch(text):
        return words.get(int(match[1], 16))
    if re.fullmatch(r"0x[0-9a-f]+", text):
        return int(text, 16)
    return state.get(text)


def operand64(state: State, text: str, words: Words) -> Value | None:
    """A 64-bit operand: 0 if both of its words are, NONZERO if one of them is not."""
    match = REGISTER.fullmatch(text)
    if match is None or match[1] == "Z":
        return operand(state, text, words)
    upper = f"{text[: -len(match[1])]}{int(match[1]) + 1}"
    halves = [operand(state, text, words), operand(state, upper, words)]
    if any(half is not None and half != 0 for half in halves):
        return NONZERO
    return None if None in halves else 0


def compare(name: str, a: Value | None, b: Value | None) -> bool | None:
    """The comparison of an ISETP with zero."""
    kind = name.split(".")[1]
    if kind not in ("NE", "EQ") or None in (a, b) or 0 not in (a, b):
        return None
    other = b if a == 0 else a
    return (other != 0) == (kind == "NE")


def combine(name: str, a: bool | None, b: bool | None) -> bool | None:
    if ".AND" in name:
        return False if a is False or b is False else None if a is None or b is None else True
    if ".OR" in name:
        return True if a is True or b is True else None if a is None or b is None else False
    return None


def set_predicate(state: State, instruction: Instruction, words: Words) -> bool | None:
    """The first destination of (U)ISETP and (U)PLOP3."""
    name, operands = instruction.name, instruction.operands
    if instruction.base.endswith("PLOP3"):
        inputs = [predicate(state, text) for text in operands[2:5]]
        results = {
            bool(int(operands[5], 16) >> (4 * a + 2 * b + c) & 1)
            for a in (0, 1)
            for b in (0, 1)
            for c in (0, 1)
            if all(known is None or known == value for known, value in zip(inputs, (a, b, c), strict=True))
        }
        return results.pop() if len(results) == 1 else None
    read = operand64 if re.search(r"\.[SU]64", name) else operand
    result = compare(name, read(state, operands[2], words), read(state, operands[3], words))
    if ".EX" in name:  # the upper halves of a comparison whose lower halves were compared before
        lower = predicate(state, operands[-1])
        join = {"NE": ".OR", "EQ": ".AND"}.get(name.split(".")[1], "")
        result = combine(join, result, lower)
    return combine(name, result, predicate(state, operands[4]))


def step(state: State, instruction: Instruction, words: Words) -> State:
    """What is known after an instruction. Destinations of instructions without a model become unknown."""
    name, operands = instruction.name, instruction.operands
    base = instruction.base
    after = dict(state)
    written: State = {}
    if base in FORGETS:
        return {}
    for text in operands[:3]:  # destinations come first; some instructions set predicates beside a register
        if match := PREDICATE.fullmatch(text):
            after.pop(match[1], None)
    match = REGISTER.fullmatch(operands[0]) if operands else None
    if match is None and len(operands) > 1:
        match = REGISTER.fullmatch(operands[1])
    if match is not None and match[1] != "Z":
        prefix = match[0][: -len(match[1])]
        is_load = base in CONSTANT_LOADS
        # The widest destinations are four registers.
        for i in range({base: 1, f"{base}.64": 2}.get(name, 4) if is_load else 4):
            after.pop(f"{prefix}{int(match[1]) + i}", None)
        first, second = f"{prefix}{match[1]}", f"{prefix}{int(match[1]) + 1}"
        value: Value | None = None
        if is_load and (constant := CONSTANT.fullmatch(operands[1])):
            offset = int(constant[1], 16)
            value = words.get(offset) if name in (base, f"{base}.64") else None
            if name.endswith(".64") and offset + 4 in words:
                written[second] = words[offset + 4]
        elif base in ("MOV", "UMOV", "R2UR") or name in ("IMAD.MOV.U32", "IMAD.MOV", "IMAD.U32"):
            is_move = not base.startswith("IMAD") or operands[1] == operands[2] == "RZ"
            value = operand(state, operands[-1], words) if is_move else None
        elif base == "CS2R" and operands[1] == "SRZ":
            value = written[second] = 0
        if value is not None:
            written[first] = value
    if base in ("ISETP", "UISETP", "PLOP3", "UPLOP3"):
        result = set_predicate(state, instruction, words)
        if result is not None and operands[0] not in ("PT", "UPT"):
            written[operands[0]] = result
    taken = True if instruction.guard is None else predicate(state, instruction.guard)
    if taken is False:
        return state
    if taken is True:
        after.update(written)
    return after


def successors(instruction: Instruction, following: int | None, state: State) -> list[int]:
    """The addresses that may be executed next."""
    base, operands = instruction.base, instruction.operands
    taken = True if instruction.guard is None else predicate(state, instruction.guard)
    after = [] if following is None else [following]
    if taken is False:
        return after
    stays = [] if taken is True else after
    if base == "BRA":
        assert instruction.target is not None, instruction
        conditions = operands[:-1]
        if ".DIV" in instruction.name or ".ANY" in instruction.name:
            return [instruction.target, *after]
        if conditions:
            known = predicate(state, conditions[0])
            if known is not True:
                stays = after
            if known is False:
                return stays
        return [instruction.target, *stays]
    if base == "CALL" or (base == "WARPSYNC" and operands):
        assert instruction.target is not None, f"{instruction}: an indirect call"
        return [instruction.target, *after]  # the body, and what follows its return
    if base in ("EXIT", "RET", "KILL"):
        return after if operands and base == "EXIT" else stays
    return after


def reached_before_wait(instructions: list[Instruction], words: Words | None = None) -> list[Instruction]:
    """The instructions that may run ahead of any WAIT, in the order of their addresses.

    words: what is assumed of the kernel's parameters.
    """
    words = words or {}
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    check_reconvergence(instructions, index)
    known: dict[int, State] = {0: {}}
    work = [0]
    while work:
        i = work.pop()
        if instructions[i].base == WAIT and instructions[i].guard is None:
            continue
        following = instructions[i + 1].address if i + 1 < len(instructions) else None
        after = step(known[i], instructions[i], words)
        targets: Iterable[int] = successors(instructions[i], following, known[i])
        if instructions[i].base in INDIRECT:  # its table is not read: it may go anywhere
            after, targets = {}, index
        for address in targets:
            j = index[address]
            if j not in known:
                joined = after
            else:
                joined = {key: value for key, value in known[j].items() if after.get(key) == value}
                if joined == known[j]:
                    continue
            known[j] = joined
            work.append(j)
    return [instructions[i] for i in sorted(known)]


def check_reconvergence(instructions: list[Instruction], index: dict[int, int]) -> None:
    """BSYNC goes to the target of its BSSY. The walk continues behind BSYNC: the target must be there."""
    for instruction in instructions:
        if instruction.base == "BSSY":
            assert instruction.target is not None, instruction
            before = instructions[index[instruction.target] - 1]
            assert (before.base, before.operands) == ("BSYNC", instruction.operands[:1]), instruction


def parameters_before_waits(instructions: list[Instruction]) -> set[int]:
    """Offsets in constant bank 0 of the 64-bit words that are loaded shortly before a wait."""
    found = set()
    for i, instruction in enumerate(instructions):
        if instruction.base == WAIT:
            for before in instructions[max(0, i - 8) : i]:
                is_load = before.base in CONSTANT_LOADS and before.name == f"{before.base}.64"
                if is_load and (match := CONSTANT.fullmatch(before.operands[1])):
                    found.add(int(match[1], 16))
    return found


def accesses_before_wait(instructions: list[Instruction]) -> list[Instruction]:
    """The accesses to global memory that may run ahead of the wait, whatever the parameters of the kernel.

    If there are some, the walk is repeated for the cases of one parameter, null or not. The parameter that
    leaves the fewest accesses is used; each case is walked, so that the result holds for all values.
    """

    def accesses(words: Words) -> set[Instruction]:
        return {
            found for found in reached_before_wait(instructions, words) if GLOBAL_ACCESS.match(found.name)
        }

    best = accesses({})
    for offset in parameters_before_waits(instructions) if best else ():
        null: list[Words] = [{offset: 0, offset + 4: 0}]
        not_null: list[Words] = [{offset: NONZERO}, {offset: 0, offset + 4: NONZERO}]
        best = min(best, set().union(*map(accesses, null + not_null)), key=len)
    return sorted(best)


def noncoherent_loads(instructions: list[Instruction]) -> list[Instruction]:
    """The loads that may miss what the kernel before wrote, even behind a wait for that kernel."""
    return [found for found in instructions if NONCOHERENT_LOAD.match(found.name)]
