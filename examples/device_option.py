"""The option --device of the examples."""

from __future__ import annotations

import fp4gemm
import torch


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; for "auto" the CUDA device if fp4gemm runs there, else the CPU.

    Raises:
        ValueError: fp4gemm does not run on the device, with the reason.
    """
    if name == "auto":
        return torch.device("cuda" if fp4gemm.is_supported("cuda") else "cpu")
    support = fp4gemm.is_supported(name)
    if not support:
        raise ValueError(f"--device: got {name}, must be a device that fp4gemm runs on: {support.reason}")
    return torch.device(name)
