"""Fixtures of the GPU tests."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import support
from helpers import dirty


@pytest.fixture
def hopper(cuda: torch.device) -> torch.device:
    """The current device; the test is skipped if its kernels do not read prepacked weights."""
    if not support.streams_prepacked(cuda):
        pytest.skip(f"{torch.cuda.get_device_name(cuda)} does not read prepacked weights")
    dirty(cuda, 4096, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
    return cuda
