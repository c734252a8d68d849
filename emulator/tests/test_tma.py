"""TMA: boxes, swizzles, bounds, tensor maps, and conflicts of asynchronous operations with threads."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError

_DECLARATIONS = ".extern .shared .align 1024 .b8 memory[];"
_PARAMETERS = ".param .align 64 .b8 k_map[128], .param .u64 k_out, .param .u32 k_x, .param .u32 k_y"
_HEAD = """
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %d<9>;
    mov.u64 %d1, k_map; ld.param.u64 %d2, [k_out]; ld.param.u32 %r1, [k_x]; ld.param.u32 %r2, [k_y];
    mov.u32 %r3, memory; add.u32 %r4, %r3, 8192; mov.u32 %r5, %tid.x; setp.eq.u32 %p1, %r5, 0;"""
_INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;"
_LOAD = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 2048;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r3], [%d1, {%r1, %r2}], [%r4];
    """
_WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0; @!%p2 bra WAIT;"
_COPY_OUT = """
    mov.u32 %r6, %r5;
    COPY: mad.lo.u32 %r7, %r6, 4, %r3; ld.shared.u32 %r8, [%r7];
    mad.wide.u32 %d3, %r6, 4, %d2; st.global.u32 [%d3], %r8;
    add.u32 %r6, %r6, 32; setp.lt.u32 %p3, %r6, 512; @%p3 bra COPY;"""
_FILL = """
    mov.u32 %r6, %r5;
    FILL: mad.lo.u32 %r7, %r6, 4, %r3; st.shared.u32 [%r7], %r6;
    add.u32 %r6, %r6, 32; setp.lt.u32 %p3, %r6, 512; @%p3 bra FILL;"""
_STORE = """
    bar.warp.sync -1;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r1, %r2}], [%r3];
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 0;"""


def _with_bit_85(tensor_map: bytes, value: int) -> bytes:
    """The map with bit 85, bit 21 of its second 64-bit word, set to the value."""
    bits = int.from_bytes(tensor_map, "little") & ~(1 << 85)
    return (bits | value << 85).to_bytes(len(tensor_map), "little")


def _launch(bench, body: str, tensor_map: bytes, out, x: int = 0, y: int = 0) -> None:
    bench.load(f"{_DECLARATIONS}\n.visible .entry k({_PARAMETERS})\n{{\n{_HEAD}\n{body}\nret;\n}}\n")
    arguments = tensor_map + struct.pack("<Qii", out.pointer, x, y)
    bench.emulator.launch("k", arguments, shared_bytes=8192 + 64)
    bench.emulator.synchronize()


def _swizzled(box: np.ndarray, swizzle: str) -> np.ndarray:
    """The box as it lies in shared memory: the 16-byte units of a row are permuted by the row's index."""
    units = box.view(np.uint8).reshape(-1, 16)
    index = np.arange(len(units))
    moved = {
        "none": index,
        "32B": index ^ (index >> 3 & 1),
        "64B": index ^ (index >> 3 & 3),
        "128B": index ^ (index >> 3 & 7),
    }[swizzle]
    result = np.empty_like(units)
    result[moved] = units
    return result.reshape(-1).view(np.uint32)


@pytest.mark.parametrize("mode", ["eager", "lazy", "pct"])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (24, 3), (-8, -2), (88, 30)])
@pytest.mark.parametrize(("swizzle", "columns"), [("none", 64), ("32B", 16), ("64B", 32), ("128B", 64)])
def test_load(bench, swizzle, columns, x, y, mode):
    """A box of 2048 bytes of a (36, 104) matrix; elements outside of the matrix become zero."""
    bench.emulator.configure(mode=mode, seed=4)
    matrix = np.random.default_rng(7).integers(1, 1 << 16, (36, 104)).astype(np.uint16)
    rows = 1024 // columns
    padded = np.zeros((200, 300), np.uint16)
    padded[64:100, 64:168] = matrix
    expected = np.ascontiguousarray(padded[64 + y : 64 + y + rows, 64 + x : 64 + x + columns])
    array, out = bench.emulator.upload(matrix), bench.emulator.empty(512, np.uint32)
    tensor_map = bench.tensor_map(array, 36, 104, (rows, columns), swizzle)
    _launch(bench, _INIT + _LOAD + _WAIT + _COPY_OUT, tensor_map, out, x, y)
    np.testing.assert_array_equal(bench.emulator.download(out), _swizzled(expected, swizzle))
    assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()


_PADDED = 14  # 16U4_ALIGN16B
_COPY_OUT_PADDED = """
    mov.u32 %r6, %r5;
    COPY: mad.lo.u32 %r7, %r6, 4, %r3; mad.wide.u32 %d3, %r6, 4, %d2;
    and.b32 %r9, %r6, 2; setp.eq.u32 %p4, %r9, 0;
    @%p4 ld.shared.u32 %r8, [%r7]; @%p4 st.global.u32 [%d3], %r8;
    add.u32 %r6, %r6, 32; setp.lt.u32 %p3, %r6, 512; @%p3 bra COPY;"""


@pytest.mark.parametrize(("x", "y"), [(0, 0), (128, 3), (-128, -2), (128, 30)])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_load_of_padded_4_bit_elements(bench, swizzle, x, y):
    """16 elements lie in the first 8 of 16 bytes, which the mbarrier counts; the others stay unwritten."""
    codes = np.random.default_rng(7).integers(1, 256, (36, 128)).astype(np.uint8)  # (36, 256) elements
    wide = np.zeros((200, 384), np.uint8)
    wide[64:100, 128:256] = codes
    box = wide[64 + y : 64 + y + 16, 128 + x // 2 : 128 + x // 2 + 64]
    expected = np.zeros((16, 8, 16), np.uint8)
    expected[:, :, :8] = box.reshape(16, 8, 8)
    array, out = bench.emulator.upload(codes), bench.emulator.upload(np.zeros(512, np.uint32))
    tensor_map = bench.tensor_map(array, 36, 256, (16, 128), swizzle, row_bytes=128, data_type=_PADDED)
    load = _LOAD.replace("2048", "1024")
    _launch(bench, _INIT + load + _WAIT + _COPY_OUT_PADDED, tensor_map, out, x, y)
    np.testing.assert_array_equal(bench.emulator.download(out), _swizzled(expected, swizzle))
    assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()
    _launch(bench, _INIT + load + _WAIT + _COPY_OUT, tensor_map, out, x, y)
    assert bench.emulator.num_hazards() > 0  # it reads the padding
    bench.emulator.clear()
    with pytest.raises(EmulatorError, match="the first coordinate is 64, must be a multiple of 128"):
        _launch(bench, _INIT + load + _WAIT, tensor_map, out, 64, y)


@pytest.mark.parametrize(("x", "y"), [(0, 0), (88, 30)])
def test_store(bench, x, y):
    """A store writes no element outside of the matrix."""
    array = bench.emulator.upload(np.zeros((36, 104), np.uint16))
    tensor_map = bench.tensor_map(array, 36, 104, (16, 64), "128B")
    _launch(bench, _FILL + "fence.proxy.async.shared::cta;" + _STORE, tensor_map, array, x, y)
    units = np.arange(512, dtype=np.uint32).view(np.uint8).reshape(-1, 16)
    index = np.arange(128)
    box = units[index ^ (index >> 3 & 7)].reshape(-1).view(np.uint16).reshape(16, 64)
    expected = np.zeros((36, 104), np.uint16)
    expected[y : y + 16, x : x + 64] = box[: 36 - y, : 104 - x]
    np.testing.assert_array_equal(bench.emulator.download(array), expected)
    assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()


def _hazards(bench, body: str, mode: str = "lazy") -> str:
    bench.emulator.configure(mode=mode)
    array = bench.emulator.upload(np.ones((16, 64), np.uint16))
    tensor_map = bench.tensor_map(array, 16, 64, (16, 64), "128B")
    _launch(bench, body, tensor_map, bench.emulator.empty(2048))
    return bench.emulator.hazards()


def test_read_before_the_load_is_complete(bench):
    assert "while a TMA load that writes" in _hazards(bench, _INIT + _LOAD + _COPY_OUT + _WAIT)


def test_write_under_a_load(bench):
    assert "while a TMA load that writes" in _hazards(bench, _INIT + _LOAD + _FILL + _WAIT)


def test_overwritten_before_the_store_has_read(bench):
    store = _STORE.replace("@%p1 cp.async.bulk.wait_group.read 0;", "")
    again = _FILL.replace("FILL", "AGAIN")
    assert "while a TMA store that reads" in _hazards(bench, _FILL + "fence.proxy.async;" + store + again)


def test_store_without_a_proxy_fence(bench):
    assert "without a fence.proxy.async" in _hazards(bench, _FILL + _STORE)


def test_exit_with_a_load_outstanding(bench):
    assert "exits while a TMA load is outstanding" in _hazards(bench, _INIT + _LOAD)


def test_wrong_byte_count(bench):
    with pytest.raises(EmulatorError, match="deadlock"):
        _hazards(bench, _INIT + _LOAD.replace("2048", "2064") + _WAIT)


def test_not_a_tensor_map(bench):
    with pytest.raises(EmulatorError, match="there is no tensor map"):
        _launch(bench, _INIT + _LOAD + _WAIT, bytes(128), bench.emulator.empty(4))


@pytest.mark.parametrize(
    ("rows", "row_bytes", "is_exposed"),
    [
        pytest.param(16, 256, True, id="gaps"),
        pytest.param(16, 128, False, id="dense"),
        pytest.param(1024, 128, False, id="dense-128-KB"),
        pytest.param(1024, 256, False, id="gaps-256-KB"),
        pytest.param(512, 256, True, id="gaps-just-under-128-KB"),
        pytest.param(513, 256, False, id="gaps-just-over-128-KB"),
    ],
)
def test_faulty_driver(bench, rows, row_bytes, is_exposed):
    """Drivers up to CUDA 13.2 set bit 85; a TMA access through such a map fails unless the bit was cleared.

    The tensors that fail span less than 128 KB and have gaps between their rows.
    """
    matrix = np.random.default_rng(3).integers(1, 1 << 16, (rows, row_bytes // 2)).astype(np.uint16)
    array, out = bench.emulator.upload(matrix), bench.emulator.empty(512, np.uint32)
    body = _INIT + _LOAD + _WAIT + _COPY_OUT

    def encode() -> bytes:
        return bench.tensor_map(array, rows, 64, (16, 64), "none", row_bytes)

    def check(tensor_map: bytes) -> None:
        out.poison()
        _launch(bench, body, tensor_map, out)
        expected = np.ascontiguousarray(matrix[:16, :64]).view(np.uint32).reshape(-1)
        np.testing.assert_array_equal(bench.emulator.download(out), expected)

    fixed = encode()
    assert fixed == _with_bit_85(fixed, 0)
    bench.emulator.configure(faulty_tensor_maps=1)
    faulty = encode()
    assert faulty == _with_bit_85(fixed, 1)
    check(_with_bit_85(faulty, 0))
    if is_exposed:
        with pytest.raises(EmulatorError, match="bit 85"):
            check(faulty)
    else:
        check(faulty)


def test_driver_version(bench):
    version = ctypes.c_int()
    assert bench.emulator._library.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value >= 12000
    bench.emulator.configure(driver_version=13020)
    for ask in ("cuDriverGetVersion", "cudaDriverGetVersion"):
        assert getattr(bench.emulator._library, ask)(ctypes.byref(version)) == 0
        assert version.value == 13020
