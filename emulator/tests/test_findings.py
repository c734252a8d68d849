"""Each kernel here has one fault, and the emulator reports it."""

from __future__ import annotations

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError

_SHARED = ".shared .align 128 .b8 memory[4096];"


def _failure(bench, *arrays, **options) -> str:
    with pytest.raises(EmulatorError) as failure:
        bench.launch(*arrays, **options)
    return str(failure.value)


def test_out_of_bounds(bench):
    bench.kernel("st.global.u32 [%x+400], 1;", "x")
    assert "byte 400 of an allocation of 400 bytes" in _failure(bench, bench.emulator.empty(400))
    bench.kernel("ld.global.u32 %r1, [%x+-4];", "x")
    assert "4 bytes before an allocation" in _failure(bench, bench.emulator.empty(400))


def test_a_launch_after_a_failure_works(bench):
    bench.kernel("st.global.u32 [%x+400], 1;", "x")
    x = bench.emulator.empty(100, np.uint32)
    _failure(bench, x)
    bench.kernel("st.global.u32 [%x], 3;", "x")
    bench.launch(x)
    assert bench.emulator.download(x)[0] == 3


def test_misaligned(bench):
    bench.kernel("ld.global.u32 %r1, [%x+2];", "x")
    assert "misaligned read of 4 bytes" in _failure(bench, bench.emulator.empty(400))


def test_shared_memory_bounds(bench):
    bench.kernel("mov.u32 %r1, memory; st.shared.u32 [%r1+4096], 1;", "x", declarations=_SHARED)
    assert "outside of" in _failure(bench, bench.emulator.empty(4))


def test_uninitialised_shared_memory(bench):
    bench.kernel("mov.u32 %r1, memory; ld.shared.u32 %r2, [%r1+8];", "x", declarations=_SHARED)
    bench.launch(bench.emulator.empty(4))
    assert "read of uninitialised shared memory" in bench.emulator.hazards()
    bench.emulator.configure(hazards_are_fatal=1)
    assert "read of uninitialised shared memory" in _failure(bench, bench.emulator.empty(4))


def test_unwritten_global_memory(bench):
    bench.kernel("ld.global.u32 %r1, [%x];", "x")
    bench.emulator.configure(report_unwritten_global=1)
    bench.launch(bench.emulator.upload(np.zeros(1, np.uint32)))
    assert bench.emulator.num_hazards() == 0
    bench.launch(bench.emulator.empty(4))
    assert "never written" in bench.emulator.hazards()


def test_unknown_instruction(bench):
    bench.kernel("wgmma.fence.sync.aligned;", "x")
    assert "not modelled: wgmma.fence.sync.aligned;" in _failure(bench, bench.emulator.empty(4))


def test_unknown_instruction_that_is_not_reached(bench):
    bench.kernel("bra END; wgmma.fence.sync.aligned; END:", "x")
    bench.launch(bench.emulator.empty(4))


@pytest.mark.parametrize("mode", ["eager", "lazy", "random", "pct"])
def test_deadlock(bench, mode):
    """The mbarrier expects two arrivals and gets one."""
    bench.emulator.configure(mode=mode)
    bench.kernel(
        """
        mov.u32 %r1, memory; mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra END;
        mbarrier.init.shared::cta.b64 [%r1], 2;
        mbarrier.arrive.shared::cta.b64 _, [%r1];
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
        END:""",
        "x",
        declarations=_SHARED,
    )
    report = _failure(bench, bench.emulator.empty(4))
    assert "deadlock" in report
    assert "1 of 2 arrivals pending" in report


def test_arrivals_beyond_the_count(bench):
    bench.kernel(
        "mov.u32 %r1, memory; elect.sync _|%p1, -1;"
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 2; bar.warp.sync -1;"
        "mbarrier.arrive.shared::cta.b64 _, [%r1], 3;",
        "x",
        declarations=_SHARED,
    )
    assert "3 arrivals, but only 2 are pending" in _failure(bench, bench.emulator.empty(4))


def test_barrier_without_init(bench):
    bench.kernel("mov.u32 %r1, memory; mbarrier.arrive.shared::cta.b64 _, [%r1];", "x", declarations=_SHARED)
    assert "no mbarrier was initialised" in _failure(bench, bench.emulator.empty(4))


def test_store_over_a_barrier(bench):
    bench.kernel(
        "mov.u32 %r1, memory; mbarrier.init.shared::cta.b64 [%r1], 1; st.shared.u32 [%r1+4], 0;",
        "x",
        declarations=_SHARED,
    )
    assert "overwrites the mbarrier" in _failure(bench, bench.emulator.empty(4))


def test_tmem_is_not_deallocated(bench):
    bench.kernel(
        "mov.u32 %r1, memory; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
        "x",
        declarations=_SHARED,
    )
    bench.launch(bench.emulator.empty(4))
    assert "exits without deallocating TMEM" in bench.emulator.hazards()


def test_launch_arguments(bench):
    bench.kernel("st.global.u32 [%x], 1;", "x")
    x = bench.emulator.empty(4)
    with pytest.raises(EmulatorError, match="expects 8 bytes of arguments, got 4"):
        bench.emulator.launch("k", b"1234")
    with pytest.raises(EmulatorError, match="no loaded PTX file has the kernel nothing"):
        bench.emulator.launch("nothing", b"")
    assert "2048 threads a CTA" in _failure(bench, x, block=(2048,))
    assert "must be a multiple of the cluster's" in _failure(bench, x, grid=(3,), cluster=(2,))


def _chain(bench) -> None:
    """`first` writes 1 to x. `second` waits for it and copies x to y; `hasty` reads before it waits."""
    bench.load(
        """
        .visible .entry first(.param .u64 first_x, .param .u64 first_y) {
        .reg .b64 %d<3>; ld.param.u64 %d1, [first_x]; st.global.u32 [%d1], 1; ret; }
        .visible .entry second(.param .u64 second_x, .param .u64 second_y) {
        .reg .b64 %d<3>; .reg .b32 %r<2>; ld.param.u64 %d1, [second_x]; ld.param.u64 %d2, [second_y];
        griddepcontrol.wait; ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1; ret; }
        .visible .entry hasty(.param .u64 hasty_x, .param .u64 hasty_y) {
        .reg .b64 %d<3>; .reg .b32 %r<2>; ld.param.u64 %d1, [hasty_x]; ld.param.u64 %d2, [hasty_y];
        ld.global.u32 %r1, [%d1]; griddepcontrol.wait; st.global.u32 [%d2], %r1; ret; }"""
    )


@pytest.mark.parametrize(("kernel", "pdl", "expected"), [("second", 1, 1), ("hasty", 1, 7), ("hasty", 0, 1)])
def test_programmatic_dependent_launch(bench, kernel, pdl, expected):
    """A read ahead of griddepcontrol.wait sees the memory as it was before the predecessor executed."""
    bench.emulator.configure(pdl=pdl)
    _chain(bench)
    x, y = bench.emulator.upload(np.array([7], np.uint32)), bench.emulator.upload(np.array([0], np.uint32))
    arguments = np.array([x.pointer, y.pointer], np.uint64).tobytes()
    bench.emulator.launch("first", arguments)
    bench.emulator.launch(kernel, arguments, programmatic=True)
    assert bench.emulator.download(y)[0] == expected
    assert bench.emulator.download(x)[0] == 1


def test_statistics(bench):
    bench.kernel("st.global.u32 [%x], 1; st.global.u32 [%x], 2;", "x")
    bench.launch(bench.emulator.empty(4), block=(64,))
    statistics = bench.emulator.statistics()
    assert statistics["launches"] == 1
    assert statistics["opcode"]["st.global.u32"] == 4
    assert sum(statistics["lines"]["k"].values()) == statistics["warp_instructions"]
    bench.emulator.reset_statistics()
    assert "opcode" not in bench.emulator.statistics()


_EXCHANGE = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, memory; mad.lo.u32 %r3, %r1, 4, %r2; st.shared.u32 [%r3], %r1;
    {barrier}
    xor.b32 %r4, %r1, 32; mad.lo.u32 %r5, %r4, 4, %r2; ld.shared.u32 %r6, [%r5];
    mad.wide.u32 %d1, %r1, 4, %x; st.global.u32 [%d1], %r6;"""


def _exchange(bench, barrier: str, block: int = 64) -> tuple[np.ndarray, str]:
    bench.kernel(_EXCHANGE.format(barrier=barrier), "x", declarations=_SHARED)
    x = bench.emulator.empty(block, np.uint32)
    bench.launch(x, block=(block,))
    return bench.emulator.download(x), bench.emulator.hazards()


@pytest.mark.parametrize("mode", ["eager", "lazy", "random", "pct"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_race_between_threads(bench, mode, seed):
    """Two warps exchange words; without the barrier that is a race under every schedule."""
    bench.emulator.configure(mode=mode, seed=seed)
    result, hazards = _exchange(bench, "bar.sync 0;")
    assert not hazards
    np.testing.assert_array_equal(result, np.arange(64) ^ 32)
    assert "races with a" in _exchange(bench, "")[1] or "uninitialised" in bench.emulator.hazards()


def test_race_of_a_write_after_a_read(bench):
    """The second write of a word is not ordered after the other warp's read of it."""
    again = "bar.sync 0; xor.b32 %r4, %r1, 32; mad.lo.u32 %r5, %r4, 4, %r2; ld.shared.u32 %r6, [%r5]; {}"
    second = "st.shared.u32 [%r3], %r1; bar.sync 0;"
    assert not _exchange(bench, again.format("bar.sync 0;") + second)[1]
    assert "races with a" in _exchange(bench, again.format("") + second)[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [0, 1])
def test_mbarrier_orders_accesses(bench, seed, late):
    """Warps write, arrive at an mbarrier, wait for it and read; a write after the arrival is a race."""
    bench.emulator.configure(mode="random", seed=seed)
    store = "st.shared.u32 [%r3], %r1;"
    bench.kernel(
        f"""
        mov.u32 %r1, %tid.x; mov.u32 %r2, memory; mad.lo.u32 %r3, %r1, 4, %r2; add.u32 %r8, %r2, 1024;
        setp.eq.u32 %p3, %r1, 0; @%p3 mbarrier.init.shared::cta.b64 [%r8], 64; bar.sync 0;
        {"" if late else store}
        mbarrier.arrive.shared::cta.b64 _, [%r8];
        {store if late else ""}
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], 0; @!%p2 bra WAIT;
        xor.b32 %r4, %r1, 32; mad.lo.u32 %r5, %r4, 4, %r2; ld.shared.u32 %r6, [%r5];
        mad.wide.u32 %d1, %r1, 4, %x; st.global.u32 [%d1], %r6;""",
        "x",
        declarations=_SHARED,
    )
    x = bench.emulator.empty(64, np.uint32)
    bench.launch(x, block=(64,))
    if late:
        assert "races with a" in bench.emulator.hazards()
    else:
        assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()
        np.testing.assert_array_equal(bench.emulator.download(x), np.arange(64) ^ 32)
