"""The mutation tool on a kernel for which the effect of every fault is known."""

from __future__ import annotations

import numpy as np
import pytest
from ptxemu.mutate import Table, in_emulator, mutants, score

_KERNEL = """\
.version 9.0
.target sm_100a
.address_size 64
.shared .align 8 .b8 memory[64];
.visible .entry k(.param .u64 k_x)
{
.reg .pred %p<9>;
.reg .b32 %r<9>;
.reg .b64 %d<9>;
ld.param.u64 %d1, [k_x];
mov.u32 %r1, %tid.x;
mov.u32 %r2, memory;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra SKIP;
mbarrier.init.shared::cta.b64 [%r2], 32;
SKIP:
bar.sync 0;
mbarrier.arrive.shared::cta.b64 _, [%r2];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra WAIT;
add.u32 %r3, %r1, 5;
mul.wide.u32 %d2, %r1, 4;
add.s64 %d3, %d1, %d2;
st.global.u32 [%d3], %r3;
ret;
}
"""


def test_mutants_are_single_faults():
    found = mutants(_KERNEL, "sync")
    assert [m.what.split()[0] for m in found] == [
        "delete",
        "delete",
        "delete",
        "mbarrier.try_wait.parity.shared::cta.b64",
    ]
    for m in found:
        different = [
            i for i, (a, b) in enumerate(zip(_KERNEL.split("\n"), m.text.split("\n"), strict=False)) if a != b
        ]
        assert different == [m.line - 1]
    assert mutants(_KERNEL, "alu", limit=3, seed=4) == mutants(_KERNEL, "alu", limit=3, seed=4)
    with pytest.raises(ValueError, match="'fence', 'sync' or 'alu'"):
        mutants(_KERNEL, "other")


def test_score(bench):
    x = bench.emulator.empty(32, np.uint32)

    def execute() -> bool:
        x.poison()
        bench.emulator.launch("k", x.pointer.to_bytes(8, "little"))
        return bool((bench.emulator.download(x) == np.arange(32) + 5).all())

    run = in_emulator(bench.emulator, bench._folder, execute)
    assert run(_KERNEL, {"mode": "lazy"}) is None
    table = score(mutants(_KERNEL, "alu"), run, [{"mode": "lazy"}])
    assert table.total == 5
    assert [m.what for m in table.survivors] == [
        "setp.ne.u32 -> setp.eq.u32"
    ]  # the other lanes initialise the mbarrier then
    table = score(mutants(_KERNEL, "sync"), run, [{"mode": "lazy"}, {"mode": "pct", "seed": 2}])
    assert table.killed == {"fatal": 1, "deadlock": 1}  # in one warp neither bar.sync nor the wait matters
    assert len(table.survivors) == 2


def test_survivors_that_are_noticed_together_are_one_fault():
    first, second, third = mutants(_KERNEL, "sync")[:3]
    seen = []

    def verdict(text: str) -> str:
        seen.append(text)
        return "hazard"

    table = Table(survivors=[first, second, third])
    table.join(_KERNEL, [first], verdict)
    table.join(_KERNEL, [first, third], lambda text: None)
    assert (len(table.survivors), seen) == (3, [])
    table.join(_KERNEL, [first, third], verdict)
    assert (table.survivors, table.killed, table.total) == ([second], {"hazard": 1}, 2)
    pairs = zip(_KERNEL.split("\n"), seen[0].split("\n"), strict=True)
    assert [i + 1 for i, (a, b) in enumerate(pairs) if a != b] == [first.line, third.line]
    assert "hazard as one fault: line" in table.summary()
