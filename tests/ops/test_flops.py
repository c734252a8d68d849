"""torch's FlopCounterMode counts our products as it counts torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

M, N, K, G = 48, 32, 64, 3
X, W, STACK = torch.ones(M, K).bfloat16(), torch.ones(N, K), torch.ones(G, N, K)
OFFS = torch.tensor([5, 5, 40], dtype=torch.int32)
A, B = fp4gemm.quantize(X), fp4gemm.quantize(W)
ROWS, EXPERTS = fp4gemm.quantize(X, offs=OFFS), fp4gemm.quantize(STACK)
T = fp4gemm.quantize(X, axis=0, offs=OFFS)


def count(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (lambda: fp4gemm.mm(A, B), 2 * M * N * K),
        (lambda: fp4gemm.mm(fp4gemm.decode(A), B, activation="swiglu"), 2 * M * N * K),
        (lambda: fp4gemm.mm(X, fp4gemm.prepack(B), out=torch.empty(M, N)), 2 * M * N * K),
        (lambda: fp4gemm.mm(A.to("meta"), B.to("meta")), 2 * M * N * K),
        (lambda: fp4gemm.grouped_mm(ROWS, EXPERTS), 2 * M * N * K),
        (lambda: fp4gemm.wgrad(T, T), 2 * K * K * T.shape[1]),
    ],
    ids=["dense", "gated", "prepacked", "meta", "ragged m", "ragged k"],
)
def test_products(call: Callable[[], Any], want: int) -> None:
    assert count(call) == want


def test_as_torch_counts() -> None:
    layer = torch.nn.Linear(K, N)
    ours = fp4gemm.nn.Linear.from_float(layer)
    assert count(lambda: ours(X.float())) == count(lambda: layer(X.float()))
