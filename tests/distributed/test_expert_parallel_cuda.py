"""Expert parallelism on one GPU, and on two where they are: the bits of one process, replays, gradients."""

from __future__ import annotations

from typing import Any

import expert_parallel_cuda
import expert_parallel_protocol
import expert_parallel_stress
import pytest
import torch
from processes import in_processes


def _needs(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, there is {torch.cuda.device_count()}")


def _assert_equal(got: Any, want: Any, name: str, is_exact: bool = True) -> None:
    assert got.isfinite().all(), name
    if is_exact:
        assert torch.equal(got, want), f"{name}: {int((got != want).sum())} of {got.numel()} differ"
    else:
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()), msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "processes", "gpus"),
    [("gather", 1, 1), ("symm_on_one_gpu", 2, 1), ("gather", 2, 2), ("symm", 2, 2)],
)
def test_bits_of_one_process(cuda: torch.device, function: str, processes: int, gpus: int) -> None:
    _needs(gpus)
    all_results = in_processes(getattr(expert_parallel_cuda, function), processes)
    for results in all_results:
        name, reason = results.pop("engine")
        assert name == function.partition("_")[0], reason
        for case, found in results.items():
            if case.startswith("training"):
                for tensor, (got, want) in found.items():
                    _assert_equal(got, want, f"{case}: {tensor}")
            else:  # a replay is compared with the calls that it captured, a tree with the sum of slots
                _assert_equal(*found, case, is_exact="replay" in case or "tree" not in case)


@pytest.mark.gpu
def test_graphs_and_layers_of_both_engines(cuda: torch.device) -> None:
    """1,000 alternating layers and 2,000 replays of graphs of both engines in mixed order."""
    _needs(2)
    for wrong, replays in in_processes(expert_parallel_stress.short, 2):
        assert (wrong, replays) == (0, 2000)


@pytest.mark.gpu
def test_protocol_of_symm_on_one_gpu(cuda: torch.device) -> None:
    """Memory that grows while a rank has work, captures that fail on a rank, and what breaks the protocol."""
    differ = "RuntimeError: ExpertParallel: the exchanges of rank 1 of the group differ from those of rank 0"
    is_open = "RuntimeError: ExpertParallel: a CUDA graph was replayed while an exchange was open"
    for results in in_processes(expert_parallel_protocol.on_one_gpu, 2):
        for backend in expert_parallel_protocol.GROUPS:
            got, want = results[f"growing, {backend}"]
            assert got == want
        want, *found = results["graphs"]
        assert len(found) == 6
        for i, got in enumerate(found):
            _assert_equal(got, want, f"layer {i}")
        for text in results["dtype of y"]:
            assert text.startswith(differ)
        assert results["max_tokens"].startswith(differ)
        assert results["open"].startswith(is_open)
        assert results["raised"].startswith(is_open)
