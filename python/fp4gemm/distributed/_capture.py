"""Tests of whether calls are captured in a CUDA graph, and in which capture."""

from __future__ import annotations

import ctypes
import functools

import torch

__all__ = ["capture_of", "is_capturing"]


def is_capturing(device: torch.device) -> bool:
    """Whether calls on the current stream are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_of(device: torch.device) -> int | None:
    """The number of the capture that the current stream is in, unique in the process; None outside of one.

    torch does not tell it, so that the driver is asked, and only inside of a capture.
    """
    if not is_capturing(device):
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    found = ctypes.byref(status), ctypes.byref(number)
    error = _driver().cuStreamGetCaptureInfo_v2(stream, *found, None, None, None)
    if error:
        raise RuntimeError(
            f"ExpertParallel: cuStreamGetCaptureInfo_v2 failed with error {error} of the driver"
        )
    return number.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
