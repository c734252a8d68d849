"""The operator zero_outside_groups: zeros behind the last group, and every other row as it was."""

from __future__ import annotations

import pytest
import torch
from groups import ends
from helpers import FLOATS, assert_bits, captured, short
from op_checks import BACKENDS, compiled, opcheck, ready
from torch import Tensor

ZERO = torch.ops.fp4gemm.zero_outside_groups
# Ends of groups of 37 rows: ragged, empty groups, all rows, none, one group.
ENDS = [[5, 9, 30], [0, 0, 8, 8], [20, 37], [0, 0], [36]]
# Sizes of a row: of whole words of 16 bytes, of less than a word, and of words and a part of one.
COLUMNS = [8, 1, 3, 77, 1032]


def poisoned(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((m, n), torch.nan, dtype=dtype, device=device)


def wanted(x: Tensor, end: int) -> Tensor:
    return torch.cat((x[:end], torch.zeros_like(x[end:])))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("n", COLUMNS)
def test_rows_of_no_group_are_zero(n: int, dtype: torch.dtype, device: torch.device) -> None:
    for each in ENDS:
        x = poisoned(37, n, dtype, device)
        want = wanted(x, each[-1])
        ZERO(x, ends(each, device))
        assert_bits(x, want, str(each))


@pytest.mark.parametrize(("m", "n"), [(0, 64), (5, 0), (1, 1)], ids=str)
def test_small(m: int, n: int, device: torch.device) -> None:
    x = poisoned(m, n, torch.bfloat16, device)
    ZERO(x, ends([0, 0], device))
    assert_bits(x, torch.zeros_like(x))


def test_more_words_than_a_grid_has_threads(device: torch.device) -> None:
    x = poisoned(4099, 1001, torch.float32, device)
    want = wanted(x, 3)
    ZERO(x, ends([1, 3], device))
    assert_bits(x, want)


def test_nothing_outside_is_written(device: torch.device) -> None:
    """The memory before and behind x keeps its bits."""
    memory = poisoned(40, 8, torch.float16, device)
    want = memory.clone()
    want[12:39] = 0
    ZERO(memory[2:39], ends([3, 10], device))
    assert_bits(memory, want)


@pytest.mark.parametrize("end", [38, 2**31 - 1, -1, -(2**31)])
def test_wrong_ends_are_clipped_on_a_gpu(end: int, cuda: torch.device) -> None:
    memory = poisoned(41, 9, torch.float32, cuda)
    x = memory[4:].flatten()[: 37 * 9 - 9].view(36, 9)  # 4 rows of 36 bytes begin at a multiple of 16
    want = memory.clone()
    if end < 0:
        want.flatten()[36 : 36 + 36 * 9] = 0
    ZERO(x, ends([7, end], cuda))
    assert_bits(memory, want)


@pytest.mark.parametrize("each", [[5, 38], [-1], [9, 8]], ids=str)
def test_the_cpu_refuses_wrong_ends(each: list[int]) -> None:
    x = poisoned(37, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^offs: "):
        ZERO(x, ends(each))
    assert x.isnan().all()


def test_a_graph_reads_the_ends_again(cuda: torch.device) -> None:
    x, offs = poisoned(37, 24, torch.bfloat16, cuda), ends([3, 9], cuda)
    graph, _ = captured(lambda: ZERO(x, offs), cuda)
    for end in (9, 36, 0):
        x.fill_(torch.nan)
        want = wanted(x, end)
        offs.fill_(end)
        graph.replay()
        assert_bits(x, want, str(end))


def test_opcheck(device: torch.device) -> None:
    opcheck("zero_outside_groups", torch.ones(5, 8, device=device), ends([2, 3], device))
    meta = torch.ones(5, 8, device="meta")
    assert ZERO(meta, ends([2, 9], "meta")) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device) -> None:
    def step(x: Tensor, offs: Tensor) -> Tensor:
        y = x * 2
        ZERO(y, offs)
        return y + 1

    x, offs = torch.randn(9, 8, device=device), ends([2, 5], device)
    assert_bits(compiled(step, ready(backend))(x, offs), wanted(x * 2, 5) + 1)
