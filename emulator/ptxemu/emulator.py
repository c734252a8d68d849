"""Python interface of the PTX emulator: device memory, kernels, schedules and findings.

    emulator = Emulator(libptxemu, [ptx_folder])
    emulator.configure(mode="pct", seed=3)
    a = emulator.upload(numpy_array)            # a copy in device memory, at a.pointer
    d = emulator.empty((m, n), torch.bfloat16)  # filled with 0xFF and marked as never written
    library.call(a.pointer, d.pointer)          # of a library from emulator.load_library(path)
    emulator.synchronize()                      # raises EmulatorError with the report
    d.numpy(), d.torch()

The library under test must be linked with the same libptxemu.so in place of the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ptxemu.ptx_files import extract_ptx

__all__ = ["ARITHMETICS", "MODES", "DeviceArray", "Emulator", "EmulatorError", "extract_ptx"]

# How products of matrices add up: include/ptxemu.h says what the names mean.
ARITHMETICS = {"rounded": 0, "truncated": 1}
MODES = {"eager": 0, "lazy": 1, "random": 2, "pct": 3}


class EmulatorError(RuntimeError):
    """A launch failed. The text is the emulator's report."""


class _Options(ctypes.Structure):
    _fields_ = [
        ("mode", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("resident_clusters", ctypes.c_int),
        ("num_sms", ctypes.c_int),
        ("compute_capability", ctypes.c_int),
        ("pdl", ctypes.c_int),
        ("report_unwritten_global", ctypes.c_int),
        ("hazards_are_fatal", ctypes.c_int),
        ("detect_races", ctypes.c_int),
        ("loads_need_wait", ctypes.c_int),
        ("faulty_tensor_maps", ctypes.c_int),
        ("arithmetic", ctypes.c_int),
        ("trace_fences", ctypes.c_int),
        ("driver_version", ctypes.c_int),
        ("instruction_budget", ctypes.c_uint64),
    ]


def _is_torch_dtype(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def _item_bytes(dtype: Any) -> int:
    return dtype.itemsize if _is_torch_dtype(dtype) else np.dtype(dtype).itemsize


class DeviceArray:
    """Memory of the emulated device. Its views are host memory: call synchronize() before reading one."""

    def __init__(self, emulator: Emulator, shape: Sequence[int], dtype: Any):
        self.shape = tuple(int(n) for n in shape)
        self.dtype = dtype
        self.num_bytes = int(np.prod(self.shape, dtype=np.int64)) * _item_bytes(dtype)
        self._emulator = emulator
        self.pointer: int = emulator._library.ptxemu_malloc(max(self.num_bytes, 1))
        if not self.pointer:
            raise MemoryError(f"the emulator has no {self.num_bytes} bytes")

    def _buffer(self) -> ctypes.Array:
        buffer = (ctypes.c_char * max(self.num_bytes, 1)).from_address(self.pointer)
        buffer._keep = self  # views keep the allocation alive
        return buffer

    def numpy(self) -> np.ndarray:
        """A view of the memory. A torch dtype gives a view of bytes, whose last dimension is in bytes."""
        if _is_torch_dtype(self.dtype):
            shape = (
                (*self.shape[:-1], self.shape[-1] * _item_bytes(self.dtype))
                if self.shape
                else (self.num_bytes,)
            )
            return np.frombuffer(self._buffer(), np.uint8, self.num_bytes).reshape(shape)
        count = self.num_bytes // _item_bytes(self.dtype)
        return np.frombuffer(self._buffer(), self.dtype, count).reshape(self.shape)

    def torch(self) -> Any:
        """A view of the memory as a CPU tensor."""
        import torch

        dtype = self.dtype if _is_torch_dtype(self.dtype) else torch.from_numpy(np.empty(0, self.dtype)).dtype
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self._buffer(), dtype=torch.uint8).view(dtype).reshape(self.shape)

    def mark_written(self, begin: int = 0, count: int | None = None) -> None:
        """Marks `count` elements from `begin` on as written, or all; needed after writing through a view."""
        item = _item_bytes(self.dtype)
        num_bytes = self.num_bytes - begin * item if count is None else count * item
        self._emulator._library.ptxemu_mark_written(self.pointer + begin * item, num_bytes)

    def poison(self) -> None:
        """Fills the memory with 0xFF and marks it as never written."""
        self._emulator._library.ptxemu_poison(self.pointer, self.num_bytes)

    def free(self) -> None:
        if self.pointer:
            self._emulator._library.ptxemu_free(self.pointer)
            self.pointer = 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            self.free()


class Emulator:
    """The emulator of a libptxemu.so. Its state belongs to the process, so a process makes one Emulator."""

    def __init__(self, library_path: Path | str, ptx: Iterable[Path | str] = ()):
        self._library = ctypes.CDLL(str(library_path))
        signatures = {
            "ptxemu_default_options": (None, [ctypes.POINTER(_Options)]),
            "ptxemu_configure": (None, [ctypes.POINTER(_Options)]),
            "ptxemu_load": (ctypes.c_int, [ctypes.c_char_p]),
            "ptxemu_unload": (None, []),
            "ptxemu_malloc": (ctypes.c_void_p, [ctypes.c_size_t]),
            "ptxemu_free": (ctypes.c_int, [ctypes.c_void_p]),
            "ptxemu_poison": (None, [ctypes.c_void_p, ctypes.c_size_t]),
            "ptxemu_mark_written": (None, [ctypes.c_void_p, ctypes.c_size_t]),
            "ptxemu_synchronize": (ctypes.c_int, []),
            "ptxemu_last_error": (ctypes.c_char_p, []),
            "ptxemu_num_hazards": (ctypes.c_uint64, []),
            "ptxemu_hazards": (ctypes.c_char_p, []),
            "ptxemu_clear": (None, []),
            "ptxemu_statistics": (ctypes.c_char_p, []),
            "ptxemu_reset_statistics": (None, []),
            "ptxemu_launch": (
                ctypes.c_int,
                [
                    ctypes.c_char_p,
                    *([ctypes.POINTER(ctypes.c_uint32)] * 3),
                    ctypes.c_uint32,
                    ctypes.c_void_p,
                    ctypes.c_size_t,
                    ctypes.c_int,
                ],
            ),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._options = _Options()
        self.configure()
        for path in ptx:
            self.load(path)

    def load(self, path: Path | str) -> None:
        """Loads a .ptx file or a folder of them; skips targets other than sm_10* and sm_12*."""
        if self._library.ptxemu_load(str(path).encode()) != 0:
            raise EmulatorError(self.last_error())

    def load_library(self, path: Path | str) -> ctypes.CDLL:
        """Loads a library that is linked with the emulator, even if torch has loaded a CUDA runtime."""
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)

    def unload(self) -> None:
        self._library.ptxemu_unload()

    def configure(self, mode: str = "lazy", arithmetic: str = "rounded", **options: int) -> None:
        """Sets all options; those that are not given get their default. ptxemu.h documents them.

        mode: "eager", "lazy", "random" or "pct"; options: seed, resident_clusters, num_sms,
        compute_capability, pdl, report_unwritten_global, hazards_are_fatal, detect_races, loads_need_wait,
        faulty_tensor_maps, trace_fences, arithmetic ("rounded" or "truncated"), driver_version,
        instruction_budget.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, must be one of {', '.join(MODES)}")
        if arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic is {arithmetic!r}, must be one of {', '.join(ARITHMETICS)}")
        self._library.ptxemu_default_options(ctypes.byref(self._options))
        self._options.mode = MODES[mode]
        self._options.arithmetic = ARITHMETICS[arithmetic]
        known = {name for name, _ in _Options._fields_}
        for name, value in options.items():
            if name not in known:
                raise ValueError(f"unknown option {name}, must be one of {', '.join(sorted(known))}")
            setattr(self._options, name, int(value))
        self._library.ptxemu_configure(ctypes.byref(self._options))

    def empty(self, shape: Sequence[int] | int, dtype: Any = np.uint8) -> DeviceArray:
        """Device memory that is filled with 0xFF and marked as never written."""
        return DeviceArray(self, (shape,) if isinstance(shape, int) else shape, dtype)

    def upload(self, array: Any) -> DeviceArray:
        """Copies a numpy array or CPU tensor to the device, in row-major order."""
        if _is_torch_dtype(getattr(array, "dtype", None)):
            result = self.empty(tuple(array.shape), array.dtype)
            result.torch().copy_(array)
        else:
            array = np.asarray(array)
            result = self.empty(array.shape, array.dtype)
            if result.num_bytes:
                result.numpy()[...] = array
        result.mark_written()
        return result

    def download(self, array: DeviceArray) -> Any:
        """Executes queued launches and returns a copy: a tensor if the dtype is torch's, else an array."""
        self.synchronize()
        return array.torch().clone() if _is_torch_dtype(array.dtype) else array.numpy().copy()

    def synchronize(self) -> None:
        """Executes queued launches; raises EmulatorError if a launch has failed since the last call."""
        if self._library.ptxemu_synchronize() != 0:
            raise EmulatorError(self.last_error())

    def launch(
        self,
        kernel: str,
        arguments: bytes,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        cluster: Sequence[int] = (1, 1, 1),
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Launches a kernel of the loaded PTX. `arguments` is its parameter block, laid out as a C struct."""

        def triple(values: Sequence[int]) -> ctypes.Array:
            return (ctypes.c_uint32 * 3)(*([*list(values), 1, 1, 1])[:3])

        error = self._library.ptxemu_launch(
            kernel.encode(),
            triple(grid),
            triple(block),
            triple(cluster),
            shared_bytes,
            arguments,
            len(arguments),
            int(programmatic),
        )
        if error != 0:
            raise EmulatorError(self.last_error())

    def last_error(self) -> str:
        return self._library.ptxemu_last_error().decode(errors="replace")

    def num_hazards(self) -> int:
        return self._library.ptxemu_num_hazards()

    def hazards(self) -> str:
        """The reports of hazards, one for each kind and line of PTX."""
        return self._library.ptxemu_hazards().decode(errors="replace")

    def clear(self) -> None:
        """Forgets errors and hazards."""
        self._library.ptxemu_clear()

    def statistics(self) -> dict[str, Any]:
        """Counts of what was executed since reset_statistics(): {category: {name: count}} and totals."""
        return json.loads(self._library.ptxemu_statistics().decode())

    def reset_statistics(self) -> None:
        self._library.ptxemu_reset_statistics()
