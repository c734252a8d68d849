"""Expert parallelism through NCCL on one GPU, and on two where they are: the bits of one process, replays."""

from __future__ import annotations

import expert_parallel_cuda
import pytest
import torch
from expert_parallel import CASES
from processes import in_processes


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_bits_of_one_process(cuda: torch.device, number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, there is {torch.cuda.device_count()}")
    for results in in_processes(expert_parallel_cuda.run, number):
        for name, (got, want) in results.items():
            if name in CASES and CASES[name].combine == "tree":
                torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()))
            else:
                assert torch.equal(got, want), name
