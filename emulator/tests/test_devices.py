"""Compute capabilities 10.x and 12.x: properties and limits of the devices, and the PTX that runs on each."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from ptxemu.emulator import EmulatorError
from ptxemu.ptx_files import extract_ptx

# cudaDeviceAttr: major, minor, shared memory of a block (opt-in) and of an SM, threads of an SM.
_ATTRIBUTES = (75, 76, 97, 81, 39)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (100, (10, 0, 232448, 233472, 2048)),
        (103, (10, 3, 232448, 233472, 2048)),
        (120, (12, 0, 101376, 102400, 1536)),
        (121, (12, 1, 101376, 102400, 1536)),
    ],
)
def test_attributes(bench, capability, expected):
    bench.emulator.configure(compute_capability=capability)
    value = ctypes.c_int()
    got = []
    for attribute in _ATTRIBUTES:
        assert bench.emulator._library.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        got.append(value.value)
    assert tuple(got) == expected


def _on_sm120(bench, target: str = "sm_120f") -> None:
    bench.target = target
    bench.emulator.configure(compute_capability=120)


def _failure(bench, body: str, **options) -> str:
    bench.kernel(body, "x", declarations=".shared .align 128 .b8 memory[1024];")
    x = bench.emulator.upload(np.zeros(4, np.uint32))
    with pytest.raises(EmulatorError) as failure:
        bench.launch(x, **options)
    return str(failure.value)


def test_shared_memory_limit(bench):
    _on_sm120(bench)
    bench.kernel("st.global.u32 [%x], 1;", "x")
    x = bench.emulator.empty(4)
    bench.launch(x, shared_bytes=101376)
    with pytest.raises(EmulatorError, match="101377 bytes of shared memory, at most 101376"):
        bench.launch(x, shared_bytes=101377)


def test_clusters_of_several_ctas_are_refused(bench):
    _on_sm120(bench)
    message = "a cluster of 2 CTAs, at most 1 are modelled for compute capability 12.0"
    assert message in _failure(bench, "st.global.u32 [%x], 1;", grid=(2,), cluster=(2,))


_TENSOR_LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{}"
    " [%r1], [%x, {{%r2, %r3}}], [%r1], %h1;"
)


@pytest.mark.parametrize(
    "statement",
    [
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
        "tcgen05.wait::ld.sync.aligned;",
        _TENSOR_LOAD.format(".multicast::cluster"),
        _TENSOR_LOAD.format(".multicast::cluster.cta_group::2"),
    ],
)
def test_what_sm120_does_not_have_is_fatal(bench, statement):
    _on_sm120(bench)
    assert f"sm_120f does not have: {statement.split()[0]}" in _failure(bench, statement)
    bench.kernel(f"bra END; {statement} END: st.global.u32 [%x], 1;", "x")  # not reached
    bench.launch(bench.emulator.empty(4))


def test_sm100_has_no_block_scaled_mma_sync(bench):
    opcode = (
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"
    )
    registers = "{%r6, %r7, %r8, %r9}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9}"
    statement = f"{opcode} {registers}, {{%r10}}, {{0, 0}}, {{%r11}}, {{0, 0}};"
    assert "sm_100a does not have: mma.sync" in _failure(bench, statement)


def _store(number: int) -> str:
    return (
        ".visible .entry k(.param .u64 k_x) { .reg .b64 %x; ld.param.u64 %x, [k_x];"
        f" st.global.u32 [%x], {number}; ret; }}"
    )


@pytest.mark.parametrize(
    ("capability", "expected"), [(100, 1), (103, 2), (120, 3), (121, 4), (110, None)], ids=str
)
def test_the_kernel_of_the_device_is_launched(bench, capability, expected):
    """One name in five files. The first that runs on the device wins; none runs on 11.0."""
    bench.emulator.unload()
    for number, target in ((1, "sm_100a"), (2, "sm_100f"), (3, "sm_120a"), (4, "sm_120f"), (5, "sm_90a")):
        bench.target = target
        bench.load(_store(number), keep=True)
    bench.emulator.configure(compute_capability=capability)
    x = bench.emulator.empty(1, np.uint32)
    arguments = struct.pack("<Q", x.pointer)
    if expected is None:
        with pytest.raises(EmulatorError, match=r"no loaded PTX file has the kernel k for .*11\.0"):
            bench.emulator.launch("k", arguments)
        return
    bench.emulator.launch("k", arguments)
    assert bench.emulator.download(x)[0] == expected


def test_the_alignment_of_a_pointer_parameter_is_its_own(bench):
    """`.ptr .align 1` describes what the pointer points at: the pointer lies at a multiple of 8 bytes."""
    bench.load(
        """
        .visible .entry k(.param .u32 k_value, .param .u64 .ptr .align 1 k_result)
        {
        .reg .b32 %r1; .reg .b64 %d1;
        ld.param.u32 %r1, [k_value];
        ld.param.u64 %d1, [k_result];
        st.global.u32 [%d1], %r1;
        ret;
        }"""
    )
    x = bench.emulator.empty(1, np.uint32)
    bench.emulator.launch("k", struct.pack("<IxxxxQ", 77, x.pointer))
    assert bench.emulator.download(x)[0] == 77


def test_extraction_keeps_the_modelled_targets(tmp_path):
    """A cuobjdump that writes files of five targets."""
    tool = tmp_path / "cuobjdump"
    targets = ("sm_80", "sm_90a", "sm_100f", "sm_120f", "sm_121a")
    lines = [f"printf '.version 9.0\\n.target {name}\\n' > {name}.ptx" for name in targets]
    tool.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    tool.chmod(0o755)
    kept = extract_ptx(tmp_path / "library.so", tmp_path / "ptx", tool)
    assert [path.stem for path in kept] == ["sm_100f", "sm_120f", "sm_121a"]
