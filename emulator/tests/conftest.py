"""Fixtures of the emulator's own tests, which execute small PTX kernels on the library of PTXEMU_LIBRARY."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from ptxemu.emulator import Emulator


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

    def kernel(self, body: str, *pointers: str, declarations: str = "") -> None:
        """Loads a kernel `k` whose parameters are pointers, in 64-bit registers of these names."""
        parameters = ", ".join(f".param .u64 k_{name}" for name in pointers)
        loads = "\n".join(f"ld.param.u64 %{name}, [k_{name}];" for name in pointers)
        registers = "".join(f".reg .b64 %{name};\n" for name in pointers)
        self.load(
            f"{declarations}\n.visible .entry k({parameters})\n{{\n"
            f".reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>;\n"
            f"{registers}{loads}\n{body}\nret;\n}}\n"
        )

    def launch(self, *arrays, **options) -> None:
        """Launches `k` with the pointers of the arrays and waits for it."""
        self.emulator.launch("k", struct.pack(f"<{len(arrays)}Q", *(a.pointer for a in arrays)), **options)
        self.emulator.synchronize()

    def lanes(self, code: str, inputs: list[np.ndarray], output) -> np.ndarray:
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
        self.kernel(body, *(f"in{i}" for i in range(len(inputs))), "result")
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
