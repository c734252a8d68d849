"""What tests/bench/test_bench_ep.py runs in each of two processes: the contenders of the engine "symm"."""

from __future__ import annotations

import torch
from shared_memory import use_shared_memory

from bench.commands.ep import MODELS
from bench.measure.exchange import Exchange
from bench.measure.ranks import Clock, Row


def run(rank: int) -> list[Row]:
    use_shared_memory()
    device = torch.device("cpu")
    return Exchange(MODELS["tiny"], ["symm", "gather"], device).rows(5, Clock(device, 1, 60))
