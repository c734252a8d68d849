"""Calls of C functions on the emulator: inputs in device memory, and outputs that must have given bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import capi
import capi_conversions
import capi_ranks
import capi_training
import torch
from helpers import assert_bits
from ptxemu.emulator import DeviceArray
from session import Session
from torch import Tensor

# Schedules for kernels that have no asynchronous operations.
FEW_SCHEDULES: tuple[dict[str, object], ...] = (
    {"mode": "lazy", "seed": 1, "resident_clusters": 1},
    {"mode": "random", "seed": 2, "resident_clusters": 3},
)


class Memory:
    """The device memory of one call."""

    def __init__(self, session: Session) -> None:
        self._emulator = session.emulator
        self._inputs: list[DeviceArray] = []
        self._outputs: list[tuple[str, DeviceArray, Tensor]] = []

    def put(self, tensor: Tensor | None) -> int | None:
        """The address of a copy of a tensor, or None."""
        if tensor is None:
            return None
        self._inputs.append(self._emulator.upload(tensor.contiguous()))
        return self._inputs[-1].pointer

    def out(self, name: str, want: Tensor) -> int:
        """The address of an output of 0xFF bytes, which the call must make equal to a tensor."""
        self._outputs.append((name, self._emulator.empty(tuple(want.shape), want.dtype), want))
        return self._outputs[-1][1].pointer

    def workspace(self, num_bytes: int) -> tuple[int, int]:
        """The address of a workspace of 0xFF bytes, a multiple of 256, and its size."""
        self._inputs.append(self._emulator.empty(num_bytes + 256))
        return (self._inputs[-1].pointer + 255) // 256 * 256, num_bytes

    def compare(self, where: str) -> None:
        """Requires the bits that are wanted of every output."""
        for name, array, want in self._outputs:
            assert_bits(self._emulator.download(array), want, f"{where} {name}")


def check(
    session: Session,
    function: str,
    build: Callable[[Memory], Sequence[object]],
    schedules: Sequence[dict[str, object]] = FEW_SCHEDULES,
) -> None:
    """Calls fp4gemm_<function> under each schedule and compares its outputs.

    Args:
        build: allocates the memory of a call and returns its arguments, up to those for the device and the
            stream.
    """
    library = capi_training.declare(capi_conversions.declare(capi_ranks.declare(session.library)))
    for schedule in schedules:
        session.configure(**{"hazards_are_fatal": 1, "report_unwritten_global": 1, **schedule})
        session.emulator.clear()
        memory = Memory(session)
        session.check(getattr(library, f"fp4gemm_{function}")(*build(memory), 0, None))
        memory.compare(f"{function}, {schedule}:")


def parts_out(memory: Memory, side: object, want: Sequence[Tensor | None]) -> None:
    """Sets codes, scales and amax, or decoded values or FP8 codes and amax, to outputs, except for None."""
    alone = "fp8" if want[0] is not None and want[0].dtype is torch.float8_e4m3fn else "decoded"
    names = ("codes", "scales", "amax") if len(want) == 3 else (alone, "amax")
    for name, tensor in zip(names, want, strict=True):
        if tensor is not None:
            setattr(side, name, memory.out(name, tensor))


def rows_in(memory: Memory, x: Tensor) -> dict[str, object]:
    """The fields of arguments that describe x (m, k)."""
    return {"x": memory.put(x), "x_row_stride": x.shape[1], "x_dtype": capi.DTYPES[x.dtype]}
