"""What Blackwell kernels cannot address is refused through the C interface, before any launch."""

from __future__ import annotations

import ctypes

import capi
from session import Session


def test_a_row_of_tiles_with_too_many_scales_is_refused(session: Session) -> None:
    """One row of 128-row tiles has 2^31 bytes of scales; strides between them have 32 bits."""
    args = capi.GemmArgs(
        m=1,
        n=8,
        k=2**28,
        a=capi.Operand(None, None, capi.FORMAT_NVFP4),
        b=capi.Operand(None, None, capi.FORMAT_NVFP4),
        out_dtype=capi.BF16,
    )
    num_bytes = ctypes.c_size_t()
    assert session.library.fp4gemm_gemm_workspace_bytes(args, 0, num_bytes) == capi.NOT_SUPPORTED
    error = session.library.fp4gemm_last_error().decode()
    assert "a: (1, 268435456) has 2147483648 bytes of block scales, must have at most 2147483647" in error
