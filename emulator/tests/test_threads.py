"""Warps, CTAs and clusters: exchange between lanes, barriers, atomics, divergence, calls, local memory."""

from __future__ import annotations

import numpy as np
import pytest

_RNG = np.random.default_rng(6)
_LANES = np.arange(32)


def _shuffle(mode: str, amount: int, width: int) -> np.ndarray:
    low = _LANES // width * width
    source = {
        "idx": low + amount % width,
        "up": np.where(_LANES - amount >= low, _LANES - amount, _LANES),
        "down": np.where(_LANES + amount < low + width, _LANES + amount, _LANES),
        "bfly": np.where((_LANES ^ amount) < low + width, _LANES ^ amount, _LANES),
    }
    return source[mode]


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("amount", [1, 5])
@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
def test_shuffle(bench, mode, amount, width):
    values = _RNG.integers(0, 1 << 32, 32).astype(np.uint32)
    control = (32 - width) << 8 | (0 if mode == "up" else 31)
    code = f"shfl.sync.{mode}.b32 %out, %a0, {amount}, {control}, 0xffffffff;"
    np.testing.assert_array_equal(
        bench.lanes(code, [values], np.uint32), values[_shuffle(mode, amount, width)]
    )


def test_vote_and_reductions(bench):
    values = _RNG.integers(0, 1 << 32, 32).astype(np.uint32)
    ballot = sum(int(v & 1) << i for i, v in enumerate(values))
    code = "and.b32 %r1, %a0, 1; setp.eq.u32 %p1, %r1, 1; vote.sync.ballot.b32 %out, %p1, 0xffffffff;"
    assert (bench.lanes(code, [values], np.uint32) == ballot).all()
    assert (bench.lanes("redux.sync.max.u32 %out, %a0, -1;", [values], np.uint32) == values.max()).all()
    assert (
        bench.lanes("redux.sync.min.s32 %out, %a0, -1;", [values], np.int32) == values.view(np.int32).min()
    ).all()
    same = [sum(int(v % 5 == w % 5) << i for i, w in enumerate(values)) for v in values]
    code = "rem.u32 %r1, %a0, 5; match.any.sync.b32 %out, %r1, -1;"
    np.testing.assert_array_equal(bench.lanes(code, [values], np.uint32), np.array(same, np.uint32))
    code = "elect.sync %r1|%p1, -1; selp.b32 %out, %a0, 7, %p1;"
    np.testing.assert_array_equal(bench.lanes(code, [values], np.uint32), np.where(_LANES == 0, values, 7))


def test_divergent_loops_reconverge(bench):
    """Lane i counts to i, then all lanes vote."""
    code = """
    mov.u32 %r1, 0;
    LOOP: setp.ge.u32 %p1, %r1, %a0; @%p1 bra DONE; add.u32 %r1, %r1, 1; bra LOOP;
    DONE: bar.warp.sync -1; activemask.b32 %r2; popc.b32 %r3, %r2; mad.lo.u32 %out, %r3, 1000, %r1;"""
    np.testing.assert_array_equal(bench.lanes(code, [_LANES.astype(np.uint32)], np.uint32), 32000 + _LANES)


@pytest.mark.parametrize("mode", ["eager", "lazy", "random", "pct"])
def test_barrier_orders_shared_memory(bench, mode):
    """Thread t writes slot t and reads slot (t + 37) % 256 after the barrier."""
    bench.emulator.configure(mode=mode, seed=9)
    bench.kernel(
        """
        mov.u32 %r1, %tid.x; mov.u32 %r2, slots; mad.lo.u32 %r3, %r1, 4, %r2; mul.lo.u32 %r4, %r1, 3;
        st.shared.u32 [%r3], %r4;
        bar.sync 0;
        add.u32 %r5, %r1, 37; and.b32 %r5, %r5, 255; mad.lo.u32 %r6, %r5, 4, %r2; ld.shared.u32 %r7, [%r6];
        mad.wide.u32 %d1, %r1, 4, %result; st.global.u32 [%d1], %r7;""",
        "result",
        declarations=".shared .align 4 .b8 slots[1024];",
    )
    result = bench.emulator.empty(256, np.uint32)
    bench.launch(result, block=(256,))
    np.testing.assert_array_equal(bench.emulator.download(result), (np.arange(256) + 37) % 256 * 3)
    assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()


def test_barrier_reduction(bench):
    bench.kernel(
        """
        mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 0;
        bar.red.popc.u32 %r3, 0, %p1; bar.red.or.pred %p2, 0, %p1;
        selp.u32 %r4, 1000, 0, %p2; add.u32 %r3, %r3, %r4;
        mad.wide.u32 %d1, %r1, 4, %result; st.global.u32 [%d1], %r3;""",
        "result",
    )
    result = bench.emulator.empty(96, np.uint32)
    bench.launch(result, block=(96,))
    assert (bench.emulator.download(result) == 1024).all()


def test_atomics(bench):
    bench.kernel(
        """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 64, %r1;
        red.global.add.u32 [%sum], %r3; atom.global.max.u32 %r4, [%sum+4], %r3;
        atom.global.cas.b32 %r5, [%sum+8], 0, 9;
        cvt.rn.f32.u32 %r6, %r3; atom.global.add.f32 %r7, [%sum+12], %r6;""",
        "sum",
    )
    result = bench.emulator.upload(np.zeros(4, np.uint32))
    bench.launch(result, grid=(5,), block=(64,))
    total, largest, swapped, real = bench.emulator.download(result)
    assert (total, largest, swapped) == (320 * 319 // 2, 319, 9)
    assert real == np.float32(320 * 319 / 2).view(np.uint32)


def test_call_and_local_memory(bench):
    """A function with a struct result and a by-value argument; the caller indexes an array of its own."""
    bench.kernel(
        """
        .local .align 4 .b8 table[16];
        mov.u64 %d1, table; cvta.local.u64 %d2, %d1;
        mov.u32 %r1, %tid.x; st.u32 [%d2+4], %r1; st.local.u32 [%d1+8], 5;
        ld.u32 %r2, [%d2+4];
        {
        .param .b32 param0; st.param.b32 [param0], %r2;
        .param .align 4 .b8 retval0[8];
        call.uni (retval0), twice_and_square, (param0);
        ld.param.b32 %r3, [retval0]; ld.param.b32 %r4, [retval0+4];
        }
        ld.u32 %r5, [%d2+8]; mad.lo.u32 %r6, %r3, 100, %r4; add.u32 %r6, %r6, %r5;
        mad.wide.u32 %d3, %r1, 4, %result; st.global.u32 [%d3], %r6;""",
        "result",
        declarations="""
        .func (.param .align 4 .b8 func_retval0[8]) twice_and_square(.param .b32 twice_and_square_param_0)
        {
        .reg .b32 %r<5>; .reg .pred %p<2>;
        ld.param.b32 %r1, [twice_and_square_param_0]; add.u32 %r2, %r1, %r1; mul.lo.u32 %r3, %r1, %r1;
        st.param.b32 [func_retval0], %r2; st.param.b32 [func_retval0+4], %r3;
        setp.gt.u32 %p1, %r1, 9; @%p1 ret;
        st.param.b32 [func_retval0+4], 1;
        ret;
        }""",
    )
    result = bench.emulator.empty(32, np.uint32)
    bench.launch(result)
    expected = 200 * _LANES + np.where(_LANES > 9, _LANES**2, 1) + 5
    np.testing.assert_array_equal(bench.emulator.download(result), expected)


def test_cluster_shares_memory(bench):
    """Each CTA of a cluster of four reads what its right neighbour wrote."""
    bench.kernel(
        """
        mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; mov.u32 %r3, slot;
        mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r2, 0; @%p1 st.shared.u32 [%r3], %r9;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        add.u32 %r4, %r1, 1; and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r3, %r4;
        ld.shared::cluster.u32 %r6, [%r5];
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mad.wide.u32 %d1, %r9, 4, %result; @%p1 st.global.u32 [%d1], %r6;""",
        "result",
        declarations=".shared .align 4 .b8 slot[4];",
    )
    result = bench.emulator.empty(8, np.uint32)
    bench.launch(result, grid=(8,), cluster=(4,))
    np.testing.assert_array_equal(bench.emulator.download(result), [1, 2, 3, 0, 5, 6, 7, 4])


def test_matrix_load_unpacks_4_bit_elements(bench):
    """A row has 16 elements in 8 bytes, and 8 bytes of padding; an element becomes the low half of a byte."""
    tile = np.random.default_rng(3).integers(0, 256, (8, 16)).astype(np.uint8)
    fragments = bench.lanes(
        """
        mov.u32 %r1, %tid.x; mov.u32 %r2, tile; mad.lo.u32 %r3, %r1, 4, %r2; st.shared.u32 [%r3], %a0;
        bar.warp.sync -1; mad.lo.u32 %r4, %r1, 16, %r2; setp.ge.u32 %p1, %r1, 8; @%p1 mov.u32 %r4, %r2;
        ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%out}, [%r4];""",
        [tile.reshape(-1).view(np.uint32)],
        np.uint32,
        declarations=".shared .align 16 .b8 tile[128];",
    )
    packed = tile[:, :8]
    elements = np.stack([packed & 15, packed >> 4], 2).reshape(8, 16)
    np.testing.assert_array_equal(fragments.view(np.uint8).reshape(8, 16), elements)


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_matrix_store_and_load_are_inverse(bench, transposed):
    """stmatrix puts element (row, column) of a fragment at byte 16 * row + 2 * column; ldmatrix reads it."""
    bench.kernel(
        f"""
        mov.u32 %r1, %tid.x; mov.u32 %r2, tile; mad.lo.u32 %r3, %r1, 16, %r2;
        mul.lo.u32 %r4, %r1, 2; add.u32 %r5, %r4, 1; shl.b32 %r5, %r5, 16; or.b32 %r6, %r4, %r5;
        stmatrix.sync.aligned.m8n8.x1{transposed}.shared.b16 [%r3], {{%r6}};
        bar.warp.sync -1;
        mad.lo.u32 %r7, %r1, 4, %r2; ld.shared.u32 %r8, [%r7];
        ldmatrix.sync.aligned.m8n8.x1{transposed}.shared.b16 {{%r9}}, [%r3];
        setp.eq.u32 %p1, %r9, %r6; selp.u32 %r10, 1, 0, %p1;
        mad.wide.u32 %d1, %r1, 8, %result; st.global.v2.u32 [%d1], {{%r8, %r10}};""",
        "result",
        declarations=".shared .align 16 .b8 tile[512];",
    )
    result = bench.emulator.empty((32, 2), np.uint32)
    bench.launch(result)
    words = bench.emulator.download(result)
    tile = words[:, 0].copy().view(np.uint16).reshape(8, 8)
    fragment = np.arange(64).reshape(8, 8)  # lane l holds elements 2l, 2l + 1
    np.testing.assert_array_equal(tile, fragment.T if transposed else fragment)
    assert (words[:, 1] == 1).all()
