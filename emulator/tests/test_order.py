"""The order of accesses: each kernel is reported without one of its fences, or with a relaxed operation.

The rules are those of the PTX ISA's "Memory Consistency Model" and "tcgen05 Memory Consistency Model".
"""

from __future__ import annotations

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError

_SHARED = """.shared .align 1024 .b8 data[2048];
.shared .align 128 .b8 map[128];
.shared .align 8 .b8 bars[64];
.shared .align 4 .b32 tmem;"""

# Warp 0 (%p0) and warp 4 (%p4) of five warps communicate. Both are converged.
_HEAD = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31;
    setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p4, %r2, 4; setp.eq.u32 %p1, %r1, 0;
    mov.u32 %r10, data; mov.u32 %r11, bars; add.u32 %r12, %r11, 8; mov.u32 %r13, tmem; mov.u32 %r14, map;
    @%p1 mbarrier.init.shared::cta.b64 [%r11], 32; @%p1 mbarrier.init.shared::cta.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mad.lo.u32 %r15, %r3, 4, %r10; mov.u32 %r16, 0; mov.u32 %r17, 7;
    """


def _arrive(order: str = "") -> str:
    order = f".{order}.cluster" if order else ""
    return f"mbarrier.arrive{order}.shared::cta.b64 _, [%r11];"


def _wait(bar: str = "%r11", label: str = "WAIT", order: str = "") -> str:
    order = f".{order}.cluster" if order else ""
    return f"{label}: mbarrier.try_wait.parity{order}.shared::cta.b64 %p5, [{bar}], 0; @!%p5 bra {label};"


def _hazards(bench, first: str, second: str, head: str = "", tail: str = "", mode: str = "eager") -> str:
    """The hazards of a kernel in which warp 0 executes `first` and warp 4 `second`, which waits for it."""
    body = f"{_HEAD}{head} @!%p0 bra NOT0; {first} NOT0: @!%p4 bra NOT4; {second} NOT4: {tail}"
    bench.emulator.configure(mode)
    bench.emulator.clear()
    bench.kernel(body, "x", declarations=_SHARED, tensor_map=True)
    x = bench.emulator.upload(np.ones((16, 64), np.uint16))
    tensor_map = bench.tensor_map(x, 16, 64, (16, 64), "128B")
    bench.launch(x, tensor_map=tensor_map, block=(160, 1, 1))
    return bench.emulator.hazards()


@pytest.mark.parametrize(
    ("arrive", "wait", "is_ordered"),
    [
        (_arrive(), _wait(), True),
        (_arrive("relaxed"), _wait(), False),
        (_arrive(), _wait(order="relaxed"), False),
        ("fence.acq_rel.cta;" + _arrive("relaxed"), _wait(order="relaxed") + "fence.acq_rel.cta;", True),
        ("fence.acq_rel.cta;" + _arrive("relaxed"), _wait(order="relaxed"), False),
    ],
)
def test_relaxed_arrivals_and_waits_order_nothing(bench, arrive, wait, is_ordered):
    hazards = _hazards(bench, "st.shared.u32 [%r15], %r1;" + arrive, wait + "ld.shared.u32 %r20, [%r15];")
    assert ("races with a write of another warp" in hazards) != is_ordered, hazards


_TMA_STORE = """
    elect.sync _|%p6, -1; mov.u64 %d1, k_map;
    @%p6 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r16, %r16}], [%r10];
    @%p6 cp.async.bulk.commit_group; @%p6 cp.async.bulk.wait_group 0;"""
_FILL = """mov.u32 %r21, %r15; mov.u32 %r22, 0; FILL: st.shared.u32 [%r21], %r1; add.u32 %r21, %r21, 128;
    add.u32 %r22, %r22, 1; setp.lt.u32 %p7, %r22, 16; @%p7 bra FILL;"""
_PROXY = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("before", "after", "is_ordered"),
    [
        pytest.param(_PROXY, "", True, id="writer"),
        pytest.param("", _PROXY, True, id="issuer"),
        pytest.param("", "", False, id="none"),
        pytest.param("fence.proxy.async.global;", "", False, id="of-global-memory"),
        pytest.param("fence.acq_rel.cta;", "", False, id="no-proxy-fence"),
    ],
)
def test_a_proxy_fence_between_a_write_and_a_store(bench, before, after, is_ordered):
    """The fence may be anywhere on the path from the write to the operation."""
    hazards = _hazards(bench, _FILL + before + _arrive(), _wait() + after + _TMA_STORE)
    assert ("without a fence.proxy.async" in hazards) != is_ordered, hazards


_TMA_LOAD = """
    elect.sync _|%p6, -1; @%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 2048;
    @%p6 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r10], [MAP, {%r16, %r16}], [%r12];"""


@pytest.mark.parametrize(("order", "is_ordered"), [("", True), ("relaxed", False)])
def test_a_load_overwrites_what_threads_have_read(bench, order, is_ordered):
    """The release of a stage to the producer: a read, an arrival, a wait, and the next TMA load."""
    load = "mov.u64 %d1, k_map;" + _TMA_LOAD.replace("MAP", "%d1") + _wait("%r12", "LOADED")
    head = "@%p0 st.shared.u32 [%r15], %r1; fence.proxy.async.shared::cta; bar.sync 0;"
    hazards = _hazards(bench, "ld.shared.u32 %r20, [%r15];" + _arrive(order), _wait() + load, head)
    assert ("read by threads that no synchronization orders" in hazards) != is_ordered, hazards


@pytest.mark.parametrize(("order", "is_ordered"), [("", True), ("relaxed", False)])
def test_a_relaxed_wait_acquires_no_load(bench, order, is_ordered):
    load = "mov.u64 %d1, k_map;" + _TMA_LOAD.replace("MAP", "%d1")
    hazards = _hazards(bench, "", load + _wait("%r12", "LOADED", order) + "ld.shared.u32 %r20, [%r15];")
    assert ("whose completion the warp has not acquired" in hazards) != is_ordered, hazards


_ALLOC = """@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r13], 32; bar.sync 0;
    ld.shared.u32 %r30, [%r13];"""
_DEALLOC = "bar.sync 0; @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;"
_BEFORE, _AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
_STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r1};"
_LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r31}, [%r30];"
_WAIT_ST, _WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize(
    ("before", "after", "order", "is_ordered"),
    [
        (_BEFORE, _AFTER, "relaxed", True),
        ("", _AFTER, "relaxed", False),
        (_BEFORE, "", "relaxed", False),
        ("", "", "", True),  # "The standard memory consistency model synchronization mechanisms also apply"
    ],
)
def test_tcgen05_fences_around_a_relaxed_synchronization(bench, before, after, order, is_ordered):
    first = _STORE + _WAIT_ST + before + _arrive(order)
    second = _wait(order=order) + after + _LOAD + _WAIT_LD
    hazards = _hazards(bench, first, second, _ALLOC, _DEALLOC)
    assert ("which no synchronization and tcgen05.fence order" in hazards) != is_ordered, hazards


@pytest.mark.parametrize(("wait", "is_ordered"), [(_WAIT_LD, True), ("", False)])
def test_a_load_that_is_not_waited_for(bench, wait, is_ordered):
    """The other warp overwrites the columns. A use of the register behind the arrival comes too late."""
    first = _STORE + _WAIT_ST + _LOAD + wait + _arrive() + "add.u32 %r32, %r31, 1;"
    hazards = _hazards(bench, first, _wait() + _STORE + _WAIT_ST, _ALLOC, _DEALLOC)
    assert ("tcgen05" in hazards) != is_ordered, hazards


def test_a_store_that_is_not_waited_for(bench):
    hazards = _hazards(bench, _STORE + _LOAD + _WAIT_LD + _WAIT_ST, "", _ALLOC, _DEALLOC)
    assert "tcgen05.ld of TMEM columns [0, 1) while a tcgen05.st" in hazards


@pytest.mark.parametrize(("order", "is_ordered"), [("", True), ("relaxed", False)])
def test_deallocation_is_ordered_after_the_loads_of_others(bench, order, is_ordered):
    store = "@%p4 " + _STORE + _WAIT_ST.replace("tcgen05", "@%p4 tcgen05")
    dealloc = _wait(order=order) + _DEALLOC.replace("bar.sync 0; @%p0", "")
    hazards = _hazards(bench, dealloc, _LOAD + _WAIT_LD + _arrive(order), _ALLOC + store)
    assert ("tcgen05.dealloc of TMEM columns [0, 32), which no" in hazards) != is_ordered, hazards


@pytest.mark.parametrize(
    ("acquire", "is_ordered"),
    [("fence.proxy.tensormap::generic.acquire.gpu [%x], 128;", True), ("fence.acq_rel.gpu;", False)],
)
def test_a_changed_tensor_map_is_acquired(bench, acquire, is_ordered):
    """A warp copies the map to shared memory, changes it, writes it to global memory and uses it."""
    change = """
        mov.u64 %d1, k_map; mad.wide.u32 %d2, %r3, 4, %d1; ld.param.u32 %r20, [%d2];
        mad.lo.u32 %r21, %r3, 4, %r14; st.shared.u32 [%r21], %r20; bar.warp.sync -1;
        cvt.u64.u32 %d3, %r14; elect.sync _|%p6, -1;
        @%p6 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%d3], 1, %r17; bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%x], [%r14], 128;"""
    load = _TMA_LOAD.replace("MAP", "%x") + _wait("%r12", "LOADED")
    hazards = _hazards(bench, "", change + acquire + load)
    assert ("without a fence.proxy.tensormap" in hazards) != is_ordered, hazards


_CANCEL = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [%r10], [%r12];"""
_QUERY = """{ .reg .b128 %answer; ld.shared.b128 %answer, [%r10];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p8, %answer; }"""
_AGAIN = _wait("%r12", "AGAIN").replace(", 0;", ", 1;", 1)


@pytest.mark.parametrize(("fence", "is_ordered"), [(_PROXY, True), ("", False)])
def test_a_fence_between_the_read_of_a_response_and_the_next_request(bench, fence, is_ordered):
    """CUDA Programming Guide, "Cluster Launch Control": "Release read of result to the async proxy"."""
    first = f"{_HEAD} {_CANCEL} {_wait('%r12', 'FIRST')} {_QUERY}"
    body = f"{first} {fence} @%p8 bra MORE; ret; MORE: {_CANCEL} {_AGAIN}"
    bench.emulator.configure("eager", resident_clusters=1)
    bench.kernel(body, "x", declarations=_SHARED)
    bench.launch(bench.emulator.empty(4), grid=(4, 1, 1))
    hazards = bench.emulator.hazards()
    assert ("read by threads without a fence.proxy.async" in hazards) != is_ordered, hazards


def test_no_request_after_one_that_failed(bench):
    body = f"{_HEAD} {_CANCEL} {_wait('%r12', 'FIRST')} {_QUERY} {_PROXY} {_CANCEL} {_AGAIN}"
    bench.kernel(body, "x", declarations=_SHARED)
    with pytest.raises(EmulatorError, match=r"has seen an earlier one fail"):
        bench.launch(bench.emulator.empty(4))


def test_requests_may_fail_while_clusters_wait(bench):
    """For a kernel of higher priority, for example. The clusters that are left are launched later."""
    body = (
        f"{_HEAD} @%p1 red.global.add.u32 [%x], 1; LOOP: {_CANCEL} {_wait('%r12', 'FIRST')} {_QUERY} {_PROXY}"
    )
    bench.kernel(body, "x", declarations=_SHARED)
    started = set()
    for seed in range(20):
        x = bench.emulator.upload(np.zeros(1, np.uint32))
        bench.emulator.configure("random", seed=seed, resident_clusters=1)
        bench.launch(x, grid=(2, 1, 1))
        started.add(int(bench.emulator.download(x)[0]))
    assert started == {1, 2}


_GRIDS = """
.visible .entry first(.param .u64 first_x) {{ .reg .b32 %r<4>; .shared .align 4 .b32 a;
    mov.u32 %r1, a; {first} ld.shared.u32 %r2, [%r1];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512; ret; }}
.visible .entry second(.param .u64 second_x) {{ .reg .b32 %r<4>; .shared .align 4 .b32 b;
    mov.u32 %r1, b; {second} ld.shared.u32 %r2, [%r1];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64; ret; }}"""
_GRID_ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {};"
_LAUNCH, _GRID_WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"


@pytest.mark.parametrize(
    ("launch_first", "wait_first", "is_deadlock"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_dependents_that_hold_tensor_memory(bench, launch_first, wait_first, is_deadlock):
    """The first grid lets the second start, which holds columns while it waits for the first."""
    allocs = [_GRID_ALLOC.format(columns) for columns in (512, 64)]
    first = _LAUNCH + allocs[0] if launch_first else allocs[0] + _LAUNCH
    second = _GRID_WAIT + allocs[1] if wait_first else allocs[1] + _GRID_WAIT
    bench.load(_GRIDS.format(first=first, second=second))
    bench.emulator.launch("first", bytes(8))
    bench.emulator.launch("second", bytes(8), programmatic=True)
    if is_deadlock:
        with pytest.raises(
            EmulatorError, match=r"after griddepcontrol.launch_dependents would wait for ever"
        ):
            bench.emulator.synchronize()
    else:
        bench.emulator.synchronize()


def test_useful_fences_and_waits(bench):
    """With trace_fences, a fence counts that is the first to order an access to what TMA reads.

    A wait_group.read counts that is the first for a group, if what TMA reads is written behind it.
    """
    fence, wait = f"\n{_PROXY} // {{}}\n", "\n@%p6 cp.async.bulk.wait_group.read 0; // {}\n"
    elsewhere = "@%p0 st.shared.u32 [%r11+32], %r1;" + fence.format("of what TMA does not access")
    store = _TMA_STORE.replace("@%p6 cp.async.bulk.wait_group 0;", "")
    first = _FILL + fence.format("useful") + fence.format("again") + _arrive()
    waits = wait.format("useful") + wait.format("again")
    fill = "@%p6 st.shared.u32 [%r10], %r1;" + fence.format("useful")
    last = fill + store + wait.format("without a write behind it")
    bench.emulator.configure("eager", trace_fences=1)
    second = f"{_wait()} {store} {waits} {last}"
    body = f"{_HEAD}{elsewhere} @!%p0 bra NOT0; {first} NOT0: @!%p4 bra NOT4; {second} NOT4:"
    bench.kernel(body, "x", declarations=_SHARED, tensor_map=True)
    x = bench.emulator.upload(np.ones((16, 64), np.uint16))
    bench.launch(x, tensor_map=bench.tensor_map(x, 16, 64, (16, 64), "128B"), block=(160, 1, 1))
    assert not bench.emulator.hazards()
    (text,) = (path.read_text().split("\n") for path in bench._folder.glob("*.ptx"))
    found = [text[int(line) - 1] for line in bench.emulator.statistics()["useful"]["k"]]
    assert [line.split("// ")[1] for line in found] == ["useful"] * 3
    assert [line.split(".")[0] for line in found] == ["fence", "@%p6 cp", "fence"]
