"""The log of vLLM's process, its device, and its options."""

from __future__ import annotations

import logging

from ..serving.choice import Device
from ..serving.options import Options

__all__ = ["current_device", "current_options", "log"]

# A child of vLLM's logger, which has handlers, so that the lines are seen.
log = logging.getLogger("vllm.fp4gemm")


def current_device() -> Device:
    """The device of vLLM's platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Device("cpu")
    if not current_platform.is_cuda():
        return Device(current_platform.device_type)
    found = current_platform.get_device_capability()
    return Device("cuda", None if found is None else (found.major, found.minor))


def current_options() -> Options:
    """The options of the environment and of ``--additional-config`` of the engine that is being built."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    given = getattr(config, "additional_config", None)
    return Options.read(given.get("fp4gemm") if isinstance(given, dict) else None)
