"""The log of SGLang's process, and its device."""

from __future__ import annotations

import logging

from ..serving.choice import Device

__all__ = ["current_device", "log"]

log = logging.getLogger("sglang.srt.fp4gemm")


def current_device() -> Device:
    """The device of SGLang's process, without initialising it."""
    from sglang.srt.utils import get_device_capability, is_cpu, is_cuda

    if is_cuda():
        major, minor = get_device_capability()
        return Device("cuda", None if major is None else (major, minor))
    return Device("cpu" if is_cpu() else "another device")
