"""Parts of a merged layer that two threads update."""

from __future__ import annotations

import threading
from typing import Any

import torch
from fp4gemm.nn.merged import MergedLinear
from nn_helpers import convert, same_bits


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(64, n) for n in (64, 24, 24))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def test_parts_are_updated_by_two_threads() -> None:
    """Each thread writes its own part: neither may write back old rows of the other."""
    torch.manual_seed(5)
    fused, other = convert(Attention(), fuse="auto")[0], convert(Attention(), fuse="auto")[0]
    merged = fused.qkv_proj
    assert isinstance(merged, MergedLinear)
    has_read, joined = threading.Event(), merged._joined

    def slow(*arguments: Any) -> Any:
        whole = joined(*arguments)
        if not has_read.is_set():
            has_read.set()
            second.join(0.2)  # time enough to write, if nothing keeps the second thread from it
        return whole

    merged._joined = slow
    first = threading.Thread(target=fused.q_proj.update_, args=(other.q_proj.weight,))
    second = threading.Thread(
        target=lambda: has_read.wait() and fused.k_proj.update_(other.k_proj.weight, other.k_proj.bias)
    )
    second.start()
    first.start()
    first.join()
    second.join()
    assert same_bits(fused.q_proj.weight.codes, other.q_proj.weight.codes)
    assert same_bits(fused.k_proj.weight.codes, other.k_proj.weight.codes)
