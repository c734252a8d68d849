"""SwiGLU and its gradients: the emulator gives the reference's bits."""

from __future__ import annotations

import capi
import pytest
import torch
from calls import Memory, check
from capi_training import SwigluArgs
from fp4gemm import reference
from helpers import make, short
from session import Session
from torch import Tensor


# A chunk, a row of all threads, and rows of more than one turn whose last is not full.
@pytest.mark.parametrize("f", [8, 1024, 1160])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_swiglu(session: Session, dtype: torch.dtype, is_weighted: bool, f: int) -> None:
    """Both directions, with gate and up in one matrix and dy in another, wider one."""
    m, gen = 5, torch.Generator().manual_seed(f)
    both = 3 * make("heavy", m, 2 * f, dtype, gen)
    wide = make("normal", m, f + 8, dtype, gen)
    gate, up, dy = both[:, :f], both[:, f:], wide[:, :f]
    weights = torch.rand(m, generator=gen) if is_weighted else None

    def args(memory: Memory) -> SwigluArgs:
        address = memory.put(both)
        return SwigluArgs(
            m=m,
            f=f,
            dtype=capi.DTYPES[dtype],
            gate=address,
            gate_row_stride=2 * f,
            up=address + 2 * f,
            up_row_stride=2 * f,
            weights=memory.put(weights),
        )

    def forward(memory: Memory) -> tuple[object]:
        call = args(memory)
        call.y = memory.out("y", reference.swiglu(gate, up, weights))
        return (call,)

    def backward(memory: Memory) -> tuple[object]:
        call = args(memory)
        call.dy, call.dy_row_stride = memory.put(wide), f + 8
        want: tuple[Tensor, ...] = reference.swiglu_backward(dy, gate, up, weights)
        for name, each in zip(("dgate", "dup", "dweights"), want, strict=True):
            if each.numel() > 0:
                setattr(call, name, memory.out(name, each))
        return (call,)

    check(session, "swiglu", forward)
    check(session, "swiglu_backward", backward)
