"""Fixtures of the emulator's own tests, which execute small PTX kernels on the library of PTXEMU_LIBRARY."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from ptxemu.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parent))  # for fused_sum.py

_U16, _SWIZZLES = 1, {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # CUtensorMapDataType, CUtensorMapSwizzle


class Bench:
    """Loads hand-written kernels for one target and launches them on the emulator."""

    def __init__(self, emulator: Emulator, folder: Path):
        self.emulator = emulator
        self.target = "sm_100a"
        self._folder = folder
        self._count = 0

    def load(self, text: str, keep: bool = False) -> None:
        """Loads PTX for the target; `keep` keeps what was loaded before."""
        self._count += 1
        path = self._folder / f"kernel{self._count}.ptx"
        path.write_text(f".version 9.0\n.target {self.target}\n.address_size 64\n{text}")
        if not keep:
            self.emulator.unload()
        self.emulator.load(path)

    def kernel(self, body: str, *pointers: str, declarations: str = "", tensor_map: bool = False) -> None:
        """Loads a kernel `k` whose parameters are pointers, in 64-bit registers of these names.

        tensor_map: the first parameter is a tensor map, `k_map`.
        """
        before = [".param .align 64 .b8 k_map[128]"] if tensor_map else []
        parameters = ", ".join(before + [f".param .u64 k_{name}" for name in pointers])
        loads = "\n".join(f"ld.param.u64 %{name}, [k_{name}];" for name in pointers)
        registers = "".join(f".reg .b64 %{name};\n" for name in pointers)
        self.load(
            f"{declarations}\n.visible .entry k({parameters})\n{{\n"
            f".reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>;\n"
            f"{registers}{loads}\n{body}\nret;\n}}\n"
        )

    def launch(self, *arrays, tensor_map: bytes = b"", **options) -> None:
        """Launches `k` with its tensor map and the pointers of the arrays, and waits for it."""
        pointers = struct.pack(f"<{len(arrays)}Q", *(a.pointer for a in arrays))
        self.emulator.launch("k", tensor_map + pointers, **options)
        self.emulator.synchronize()

    def tensor_map(
        self,
        array,
        rows: int,
        columns: int,
        box: tuple[int, int],
        swizzle: str,
        row_bytes: int | None = None,
        data_type: int = _U16,
    ) -> bytes:
        """The tensor map of a (rows, columns) matrix of 16-bit elements, or of another CUtensorMapDataType.

        box: (rows, columns); row_bytes: the stride of the rows, by default that of 16-bit ones without gaps.
        """
        memory = (ctypes.c_uint8 * 256)()
        address = (ctypes.addressof(memory) + 63) // 64 * 64
        encode = self.emulator._library.cuTensorMapEncodeTiled
        sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_bytes or 2 * columns)
        boxes, steps = (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1)
        where, data = ctypes.c_void_p(address), ctypes.c_void_p(array.pointer)
        status = encode(where, data_type, 2, data, sizes, strides, boxes, steps, 0, _SWIZZLES[swizzle], 0, 0)
        assert status == 0, self.emulator.last_error()
        return ctypes.string_at(address, 128)

    def lanes(self, code: str, inputs: list[np.ndarray], output, declarations: str = "") -> np.ndarray:
        """Executes `code` in one warp: %a0, %a1, ... are elements of the inputs, %out that of the result."""
        width = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
        register = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
        body = "mov.u32 %r60, %tid.x;\n"
        for i, x in enumerate(inputs):
            size = x.dtype.itemsize
            body += f".reg .{register[size]} %a{i};\nmad.wide.u32 %d{i}, %r60, {size}, %in{i};\n"
            body += f"ld.global.{width[size]} %a{i}, [%d{i}];\n"
        size = np.dtype(output).itemsize
        body += f".reg .{register[size]} %out;\n{code}\n"
        body += f"mad.wide.u32 %d31, %r60, {size}, %result;\nst.global.{width[size]} [%d31], %out;"
        self.kernel(body, *(f"in{i}" for i in range(len(inputs))), "result", declarations=declarations)
        result = self.emulator.empty(32, output)
        self.launch(*(self.emulator.upload(x) for x in inputs), result)
        return self.emulator.download(result)


@pytest.fixture(scope="session")
def _emulator() -> Emulator:
    path = os.environ.get("PTXEMU_LIBRARY")
    if not path:
        pytest.skip("PTXEMU_LIBRARY does not name libptxemu.so")
    return Emulator(path)


@pytest.fixture
def bench(_emulator: Emulator, tmp_path: Path) -> Bench:
    _emulator.configure()
    _emulator.clear()
    _emulator.reset_statistics()
    return Bench(_emulator, tmp_path)
