"""The rules by which mutants are equivalent: each accepts what it is for, and refuses what looks like it."""

from __future__ import annotations

import numpy as np
import pytest
from ptxemu.equivalent import find_rule, with_premises
from ptxemu.mutate import Mutant, in_emulator, mutants

_KERNEL = """\
.version 9.0
.target sm_100a
.address_size 64
.shared .align 8 .b8 memory[64];
.visible .entry k(.param .u64 k_x, .param .u32 k_n)
{
.reg .pred %p<9>;
.reg .b32 %r<20>;
.reg .b64 %d<9>;
ld.param.u64 %d1, [k_x];
ld.param.u32 %r1, [k_n];
mov.u32 %r2, %tid.x;
BODY
mul.wide.u32 %d2, %r2, 4;
add.s64 %d3, %d1, %d2;
st.global.u32 [%d3], %r9;
ret;
}
"""


def of(body: str, what: str) -> tuple[str, Mutant]:
    """The text of a kernel, and its mutant of this description."""
    text = _KERNEL.replace("BODY", body.strip())
    (found,) = [mutant for mutant in mutants(text, "alu") if mutant.what == what]
    return text, found


DIVISION = "shr.s32 %r3, %r1, 31;\nshr.u32 %r4, %r3, 29;\nadd.s32 %r5, %r1, %r4;\nshr.s32 %r9, %r5, 3;"
COLUMN = (
    "shl.b32 %r3, %r2, 3;\nadd.s32 %r4, %r3, NUMBER;\nsetp.ge.s32 %p1, %r4, %r1;\nselp.b32 %r9, 1, 0, %p1;"
)

# Columns at multiples of 2, as the fragments of mma.sync have them.
PAIRS = COLUMN.replace("%r2, 3;", "%r2, 1;")
BARRIER = (
    "mov.b32 %r9, 0;\nmov.u32 %r4, memory;\nmov.b32 %r3, 5;\nmbarrier.init.shared::cta.b64 [%r4], %r3;\n"
)


@pytest.mark.parametrize(
    ("body", "what", "reason"),
    [
        ("mov.b32 %r9, 0;\nmov.b32 %r3, 1;", "mov.b32 with 2 for 1", "nothing reads the result"),
        ("mov.b32 %r9, 7;\nmov.b32 %r3, 1;", "mov.b32 with 8 for 7", None),
        (
            "mov.b32 %r3, 1;\nsetp.ne.s32 %p1, %r3, 0;\nselp.b32 %r9, %r1, %r2, %p1;",
            "mov.b32 with 2 for 1",
            "a truth value",
        ),
        (
            "mov.b32 %r3, 1;\nsetp.ne.s32 %p1, %r3, 1;\nselp.b32 %r9, %r1, %r2, %p1;",
            "mov.b32 with 2 for 1",
            None,
        ),
        (DIVISION, "shr.u32 with 30 for 29", "the rounding of a negative quotient"),
        (DIVISION, "add.s32 -> sub.s32", "the rounding of a negative quotient"),
        (DIVISION, "shr.s32 with 4 for 3", None),
        (DIVISION.replace("%r3, %r1, 31", "%r3, %r1, 30"), "add.s32 -> sub.s32", None),
        (COLUMN.replace("NUMBER", "3"), "setp.ge.s32 -> setp.gt.s32", "columns begin and end"),
        (COLUMN.replace("NUMBER", "3"), "add.s32 with 4 for 3", "columns begin and end"),
        (COLUMN.replace("NUMBER", "7"), "add.s32 with 8 for 7", None),
        (COLUMN.replace("NUMBER", "8"), "setp.ge.s32 -> setp.gt.s32", None),
        (COLUMN.replace("NUMBER", "3"), "add.s32 -> sub.s32", None),
        (BARRIER, "mov.b32 with 6 for 5", "the number of arrivals of an mbarrier"),
        (BARRIER + "add.u32 %r9, %r3, %r2;", "mov.b32 with 6 for 5", None),
    ],
)
def test_rules(body: str, what: str, reason: str | None) -> None:
    text, mutant = of(body, what)
    rule = find_rule(text, mutant, 8)
    assert (rule is None) == (reason is None), rule
    assert rule is None or rule.reason.startswith(reason or "")


def test_time_limits_and_prefetches() -> None:
    wait = "mov.b32 %r9, 0;\nmov.b32 %r3, 100;\nmov.u32 %r4, memory;\n"
    wait += "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0, USE;"
    text, mutant = of(wait.replace("USE", "%r3"), "mov.b32 with 101 for 100")
    assert find_rule(text, mutant, 8).reason.startswith("the time limit")
    prefetch = "mov.b32 %r9, 0;\nsetp.eq.s32 %p1, %r2, 0;\n@%p1 bra BEHIND;\n"
    prefetch += "prefetch.tensormap [%d1];\nMORE\nBEHIND:"
    what = "setp.eq.s32 -> setp.ne.s32"
    text, mutant = of(prefetch.replace("MORE", ""), what)
    assert find_rule(text, mutant, 8).reason == "decides whether a tensor map is prefetched"
    for more in ("st.global.u32 [%d1], %r2;", "mov.b32 %r9, 3;"):
        text, mutant = of(prefetch.replace("MORE", more), what)
        assert find_rule(text, mutant, 8) is None


@pytest.mark.parametrize(
    ("body", "what", "n", "holds"),
    [
        (DIVISION, "add.s32 -> sub.s32", 24, True),
        (DIVISION, "add.s32 -> sub.s32", 2**32 - 24, False),
        (COLUMN.replace("NUMBER", "3"), "setp.ge.s32 -> setp.gt.s32", 16, True),
        (COLUMN.replace("NUMBER", "3"), "setp.ge.s32 -> setp.gt.s32", 19, False),
        (PAIRS.replace("NUMBER", "3"), "setp.ge.s32 -> setp.gt.s32", 16, True),
        (PAIRS.replace("NUMBER", "4"), "setp.ge.s32 -> setp.gt.s32", 16, False),
        (BARRIER, "mov.b32 with 6 for 5", 0, True),
        (BARRIER + "mbarrier.arrive.shared::cta.b64 _, [%r4];", "mov.b32 with 6 for 5", 0, False),
    ],
)
def test_premises_are_executed(bench, body: str, what: str, n: int, holds: bool) -> None:
    text, mutant = of(body, what)
    rule = find_rule(text, mutant, 8)
    x = bench.emulator.empty(32, np.uint32)

    def execute() -> bool:
        bench.emulator.launch("k", x.pointer.to_bytes(8, "little") + n.to_bytes(4, "little"))
        return True

    run = in_emulator(bench.emulator, bench._folder, execute)
    assert run(text, {"mode": "lazy"}) is None
    assert run(with_premises(text, [rule]), {"mode": "lazy"}) == (None if holds else "fatal")
