"""The rules of the documentation of cuTensorMapEncodeTiled, on the host and in kernels that change maps."""

from __future__ import annotations

import contextlib
import ctypes
import struct

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError

_UINT16, _PACKED, _PADDED, _U6 = 1, 13, 14, 15  # 16U4_ALIGN8B, 16U4_ALIGN16B and 16U6_ALIGN16B are packed
_NONE, _SWIZZLE_32, _SWIZZLE_128 = 0, 1, 3


def _encode(bench, **changed) -> str:
    """The report of an encoding of a matrix of 256 x 512 elements with these arguments, "" if it succeeds."""
    given = {
        "type": _PACKED,
        "address": 0x10000,
        "dims": (512, 256),
        "stride": 256,
        "box": (128, 64),
        "steps": (1, 1),
        "swizzle": _NONE,
        "fill": 0,
        "rank": 2,
    } | changed
    memory = (ctypes.c_uint8 * 256)()
    out = ctypes.c_void_p((ctypes.addressof(memory) + 63) // 64 * 64)
    bench.emulator.clear()
    status = bench.emulator._library.cuTensorMapEncodeTiled(
        out,
        given["type"],
        given["rank"],
        ctypes.c_void_p(given["address"]),
        (ctypes.c_uint64 * 2)(*given["dims"]),
        (ctypes.c_uint64 * 1)(given["stride"]),
        (ctypes.c_uint32 * 2)(*given["box"]),
        (ctypes.c_uint32 * 2)(*given["steps"]),
        0,
        given["swizzle"],
        0,
        given["fill"],
    )
    report = bench.emulator.last_error()
    assert (status == 0) == (report == "")
    return report


@pytest.mark.parametrize("kind", [_PACKED, _PADDED])
def test_a_map_that_breaks_no_rule(bench, kind):
    assert _encode(bench, type=kind) == ""
    assert _encode(bench, type=kind, swizzle=_SWIZZLE_128) == ""


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"rank": 6}, "tensorRank is 6, must be 1 to 5"),
        ({"address": 0x10008}, "globalAddress 0x10008 must be a multiple of 16 bytes"),
        ({"address": 0x10010, "type": _PADDED}, "must be a multiple of 32 bytes with 16U4_ALIGN16B"),
        ({"dims": (0, 256)}, "globalDim[0] is 0"),
        ({"dims": (511, 256)}, "globalDim[0] is 511, must be a multiple of 2 with 16U4_ALIGN8B"),
        ({"dims": (448, 256), "type": _PADDED}, "globalDim[0] is 448, must be a multiple of 128"),
        ({"stride": 264}, "globalStrides[0] is 264, must be a multiple of 16 bytes"),
        ({"stride": 1 << 40}, "below 2^40"),
        ({"stride": 272, "type": _PADDED}, "globalStrides[0] is 272, must be a multiple of 32 bytes"),
        ({"box": (128, 257)}, "boxDim[1] is 257, must be 1 to 256"),
        ({"box": (48, 64)}, "a row of the box has 192 bits, must be a multiple of 16 bytes"),
        ({"box": (64, 64), "type": _PADDED}, "boxDim[0] is 64, must be 128 with 16U4_ALIGN16B"),
        ({"steps": (1, 9)}, "elementStrides[1] is 9, must be 1 to 8"),
        ({"swizzle": _SWIZZLE_32}, "a row of the box has 64 bytes, must be at most the 32 of the swizzle"),
        ({"swizzle": _SWIZZLE_32, "type": _PADDED}, "must be none, 128B or 128B_ATOM_32B"),
        ({"fill": 1}, "oobFill must be none with a packed data type"),
        ({"type": _U6}, "are not modelled"),
    ],
)
def test_a_rule_that_a_map_breaks_is_named(bench, changed, rule):
    assert rule in _encode(bench, **changed)


_CHANGE = """
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %d<9>; .shared .align 128 .b8 map[128];
    mov.u64 %d1, k_map; ld.param.u64 %d2, [k_global]; mov.u32 %r5, %tid.x; setp.eq.u32 %p1, %r5, 0;
    mov.u32 %r3, memory; add.u32 %r4, %r3, 8192; mov.u32 %r6, map; cvt.u64.u32 %d3, %r6; mov.u32 %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; fence.mbarrier_init.release.cluster;
    mad.wide.u32 %d4, %r5, 4, %d1; ld.param.u32 %r7, [%d4]; mad.lo.u32 %r8, %r5, 4, %r6;
    setp.lt.u32 %p3, %r5, {words}; @%p3 st.shared.u32 [%r8], %r7; bar.warp.sync -1;
    @%p1 tensormap.replace.tile.{field}; bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d2], [%r6], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 2048;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r3], [%d2, {{%r1, %r1}}], [%r4];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0; @!%p2 bra WAIT; ret; """


def _launch_change(bench, field: str, words: int = 32) -> tuple[object, ...]:
    """The kernel copies these words of a map to shared memory, changes a field, and loads through the map.

    Returns its arrays, which must live until it ends.
    """
    bench.load(
        ".extern .shared .align 1024 .b8 memory[];\n"
        ".visible .entry k(.param .align 64 .b8 k_map[128], .param .u64 k_global)\n"
        f"{{\n{_CHANGE.format(field=field, words=words)}\n}}\n"
    )
    matrix = bench.emulator.upload(np.ones((16, 64), np.uint16))
    tensor_map, at = bench.tensor_map(matrix, 16, 64, (16, 64), "none"), bench.emulator.empty(128)
    bench.emulator.launch("k", tensor_map + struct.pack("<Q", at.pointer), shared_bytes=8192 + 64)
    return matrix, at


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("global_dim.shared::cta.b1024.b32 [%d3], 1, 8", None),
        ("global_dim.shared::cta.b1024.b32 [%d3], 0, 0", r"globalDim\[0\] is 0"),
        (
            "global_stride.shared::cta.b1024.b64 [%d3], 0, 136",
            r"globalStrides\[0\] is 136, must be",
        ),
        ("global_address.shared::cta.b1024.b64 [%d3], 4104", "globalAddress 0x1008 must be a multiple of 16"),
    ],
)
def test_a_map_that_a_kernel_has_changed(bench, field, rule):
    """The rules are checked where the map is used: between two changes it may break one."""
    _arrays = _launch_change(bench, field)
    if rule is None:
        bench.emulator.synchronize()
        assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()
    else:
        with pytest.raises(EmulatorError, match=rule):
            bench.emulator.synchronize()


@pytest.mark.parametrize(("words", "reads"), [(16, None), (15, "read of uninitialised shared memory")])
def test_half_of_the_bytes_of_a_map_have_contents(bench, words, reads):
    """Kernels of the CUTLASS DSL copy no more than 64 bytes to shared memory."""
    _arrays = _launch_change(bench, "global_dim.shared::cta.b1024.b32 [%d3], 1, 8", words)
    if reads is None:
        bench.emulator.synchronize()
        assert bench.emulator.num_hazards() == 0, bench.emulator.hazards()
    else:
        with contextlib.suppress(EmulatorError):  # the rest of the map is garbage
            bench.emulator.synchronize()
        assert reads in bench.emulator.hazards()
