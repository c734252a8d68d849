"""cp.async.bulk without tensor maps and cp.async: what they copy, what waits for them, and misuse."""

from __future__ import annotations

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError

_DECLARATIONS = ".extern .shared .align 1024 .b8 memory[];"
_HEAD = """
    mov.u32 %r3, memory; add.u32 %r4, %r3, 4096; mov.u32 %r5, %tid.x; setp.eq.u32 %p1, %r5, 0;
    mad.lo.u32 %r6, %r5, 4, %r3; mad.wide.u32 %d1, %r5, 4, %in; mad.wide.u32 %d2, %r5, 4, %out;"""
_INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;"
_BULK = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%in], 128, [%r4];"""
_WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0; @!%p2 bra WAIT;"
_COPY = "cp.async.ca.shared.global [%r6], [%d1], 4;"
_OUT = "ld.shared.u32 %r8, [%r6]; st.global.u32 [%d2], %r8;"
_MODES = ("eager", "lazy", "random", "pct")


def _run(bench, body: str, offset: int = 0) -> np.ndarray:
    """What `out` holds after one warp has executed the body; `in` is 0, 1, 2, ..."""
    bench.kernel(_HEAD + body, "in", "out", declarations=_DECLARATIONS)
    given = bench.emulator.upload(np.arange(64, dtype=np.uint32))
    out = bench.emulator.empty(32, np.uint32)
    bench.launch(_At(given, offset), out, shared_bytes=8192)
    return bench.emulator.download(out)


class _At:
    """A pointer into an array."""

    def __init__(self, array, offset: int) -> None:
        self.array, self.pointer = array, array.pointer + offset


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    "body", [_INIT + _BULK + _WAIT, _COPY + "cp.async.wait_all;"], ids=["bulk", "cp.async"]
)
def test_copies(bench, body: str, mode: str) -> None:
    bench.emulator.configure(mode, hazards_are_fatal=1)
    assert np.array_equal(_run(bench, body + _OUT, offset=16), np.arange(4, 36))


@pytest.mark.parametrize("body", [_INIT + _BULK, _COPY], ids=["bulk", "cp.async"])
def test_a_missing_wait_is_a_hazard(bench, body: str) -> None:
    bench.emulator.configure("lazy", hazards_are_fatal=1)
    with pytest.raises(EmulatorError, match=r"thread reads shared memory .* is pending"):
        _run(bench, body + _OUT)


def test_another_warp_needs_a_barrier(bench) -> None:
    """cp.async.wait_all makes the copies visible to the thread that waits, and to no other warp."""
    body = "xor.b32 %r9, %r5, 32; mad.lo.u32 %r7, %r9, 4, %r3;" + _COPY + "cp.async.wait_all;{}"
    read = "ld.shared.u32 %r8, [%r7]; st.global.u32 [%d2], %r8;"
    bench.emulator.configure("eager", hazards_are_fatal=1)
    for barrier in ("bar.sync 0;", ""):
        bench.kernel(_HEAD + body.format(barrier) + read, "in", "out", declarations=_DECLARATIONS)
        given = bench.emulator.upload(np.arange(64, dtype=np.uint32))
        out = bench.emulator.empty(64, np.uint32)
        if barrier:
            bench.launch(given, out, shared_bytes=8192, block=(64, 1, 1))
            assert np.array_equal(bench.emulator.download(out), np.arange(64) ^ 32)
        else:
            with pytest.raises(EmulatorError, match=r"races|uninitialised"):
                bench.launch(given, out, shared_bytes=8192, block=(64, 1, 1))


@pytest.mark.parametrize("body", [_INIT + _BULK + _WAIT, _COPY + "cp.async.wait_all;"])
def test_misaligned_copies_are_fatal(bench, body: str) -> None:
    with pytest.raises(EmulatorError, match=r"multiples of 16|aligned to their size"):
        _run(bench, body + _OUT, offset=2)


@pytest.mark.parametrize("body", [_INIT + _BULK + _WAIT, _COPY + "cp.async.wait_all;"])
def test_copies_out_of_bounds_are_fatal(bench, body: str) -> None:
    with pytest.raises(EmulatorError, match=r"cp\.async\.bulk|read"):
        _run(bench, body + _OUT, offset=192)
