"""The host code of the kernels' activations (cutlass_evt) and the reference give the same bits."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from fp4gemm import reference
from helpers import assert_same_value

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FP4GEMM_TEST_BUILD", ROOT / "build" / "test"))
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 5.5, -5.5, 87.0, -87.0, 1e-45, -1e-45, 3e38, -3e38]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = sorted(BUILD.glob("**/libfp4gemm_test_activations.so"))
    if not found:
        pytest.skip(f"no libfp4gemm_test_activations.so in {BUILD}: build with FP4GEMM_BUILD_TESTS and CUDA")
    loaded = ctypes.CDLL(str(found[0]))
    loaded.fp4gemm_test_activate.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return loaded


def samples(gen: torch.Generator) -> torch.Tensor:
    """Random bits, every fp16 and bf16 number, and a dense range around 0; an even number of values."""
    random_bits = torch.randint(-(2**31), 2**31 - 1, (400_000,), generator=gen, dtype=torch.int64)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    parts = (
        random_bits.to(torch.int32).view(torch.float32),
        halves.view(torch.float16).float(),
        halves.view(torch.bfloat16).float(),
        torch.linspace(-100, 100, 200_000),
        torch.linspace(-8, 8, 200_001),
        torch.tensor(SPECIAL),
    )
    z = torch.cat(parts)
    return z[: z.numel() // 2 * 2]


def test_bits_of_the_reference(library: ctypes.CDLL, gen: torch.Generator) -> None:
    z = samples(gen)
    for kind in range(library.fp4gemm_test_num_activations()):
        want = reference.activate(z, kind)
        got = torch.empty_like(want)
        library.fp4gemm_test_activate(kind, z.numel(), z.data_ptr(), got.data_ptr())
        assert_same_value(got, want, f"activation {kind}")
