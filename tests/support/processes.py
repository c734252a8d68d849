"""Runs a function in processes that are connected by gloo, and returns what it returned in each."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

_PRELOADED = ["torch.distributed.checkpoint", "fp4gemm.distributed", "fp4gemm.training"]


def in_two_processes(function: Callable[[int], Any]) -> list[Any]:
    """:func:`in_processes` of two."""
    return in_processes(function, 2)


def in_processes(function: Callable[[int], Any], number: int) -> list[Any]:
    """[function(0), function(1), ..], each called in a process of its own; the results are saved tensors.

    The function lies in a module that a new process can import. Where torch finds no GPU, the processes are
    forks of a server that has imported it once, since the imports take longer than most functions.
    """
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _process, (function, number, folder), nprocs=number, start_method=method
        )
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(number)]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    """Requires equal lists of finite results, of the same dtypes."""
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert a.isfinite().all()
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _process(rank: int, function: Callable[[int], Any], number: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
    try:
        torch.save(function(rank), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        gc.collect()  # what holds a group in a circle would let its threads live on
        dist.destroy_process_group()
