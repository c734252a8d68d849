"""The engine "symm" of 2 and 4 processes on the CPU, on mapped files: its indices, slots and order."""

from __future__ import annotations

from typing import Any

import expert_parallel_symm
import pytest
import torch
from expert_parallel import CASES, RANKS
from expert_parallel_symm import NAMES, RECIPES, SIZES
from fp4gemm.distributed._agreement import Transfer
from fp4gemm.distributed._symm import Sequence
from processes import in_processes
from torch import Tensor


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of all four processes."""
    return in_processes(expert_parallel_symm.run, RANKS)


def assert_equal(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.isfinite().all()
    assert torch.equal(left, right)


@pytest.mark.parametrize("case", [name for name in NAMES if CASES[name].combine == "slots"])
def test_slots_has_the_bits_of_one_process(ranks: list[dict[Any, Any]], case: str) -> None:
    for results in ranks:
        assert_equal(*results[case, RANKS])


@pytest.mark.parametrize("case", [name for name in NAMES if CASES[name].combine == "tree"])
def test_tree_has_the_same_bits_for_any_number_of_ranks(ranks: list[dict[Any, Any]], case: str) -> None:
    of_two, of_four = (torch.cat([r[case, size][0] for r in ranks[:size]]) for size in SIZES)
    assert_equal(of_two, of_four)
    want = torch.cat([r[case, RANKS][1] for r in ranks])
    assert 0 < (of_two.float() - want.float()).norm() / want.float().norm() < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_have_the_bits_of_one_process(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        found = dict(results["training", recipe, RANKS])
        torch.testing.assert_close(*found.pop("router.gate.weight"), rtol=0.02, atol=0.02)
        assert len(found) == 6
        for got, want in found.values():
            assert_equal(got, want)


def test_quantized_gradients_do_not_depend_on_the_ranks(ranks: list[dict[Any, Any]]) -> None:
    alone = ranks[0]["nvfp4", 1]
    for size in SIZES:
        found = [results["nvfp4", size] for results in ranks[:size]]
        for name in ("x", "experts.w1.weight", "experts.w2.weight", "experts.w3.weight"):
            assert_equal(torch.cat([each[name] for each in found]), alone[name])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_other_speeds(ranks: list[dict[Any, Any]], size: int) -> None:
    for results in ranks[:size]:
        for got, want in results["alternating", size]:
            assert_equal(got, want)
        first, second, *together = results["in flight", size]
        assert_equal(together[0], first)
        assert_equal(together[1], second)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("size", SIZES)
def test_two_slots_are_enough_and_one_is_not(ranks: list[dict[Any, Any]], size: int) -> None:
    assert all(all(results["phases", size]["2 slots"]) for results in ranks[:size])
    assert not all(ranks[0]["phases", size]["1 slots"]), "the slow rank must notice what one slot does"


@pytest.mark.parametrize("size", SIZES)
def test_slots_are_equal_on_all_ranks(ranks: list[dict[Any, Any]], size: int) -> None:
    """Although rank 0 has captures that failed."""
    for results in ranks[:size]:
        assert results["slots", size] == [[0, 1, 0, 0, 1, 0], [0], [0, 1, 0], [0, 1, 0], [0, 0]]


OF_RANK = (
    "RuntimeError: ExpertParallel: the exchanges of rank {} of the group differ from those of rank 0, must "
    "be the same on every rank"
)
OPEN = "RuntimeError: ExpertParallel: a CUDA graph was replayed while an exchange was open, or one without"


VIOLATIONS = {
    "dtype of y": OF_RANK,
    "d of y": OF_RANK,
    "max_tokens": OF_RANK,
    "slot": OF_RANK,
    "open": OPEN,
    "two open": OPEN,
    "raised": OPEN,
    "halves": OPEN,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_breaks_the_protocol_is_an_error(ranks: list[dict[Any, Any]], size: int, name: str) -> None:
    """On every rank, though the memory is large enough for all ranks."""
    texts = [results["violations", size][name] for results in ranks[:size]]
    if name == "slot":  # the last rank used it twice in succession
        assert texts.pop().startswith(OPEN)
    for text in texts:
        assert text.startswith(VIOLATIONS[name].format(size - 1))


@pytest.mark.parametrize("size", SIZES)
def test_the_text_says_what_this_rank_sent(ranks: list[dict[Any, Any]], size: int) -> None:
    texts = [results["violations", size]["dtype of y"] for results in ranks[:size]]
    dtypes = ["torch.bfloat16"] * (size - 1) + ["torch.float16"]
    for text, dtype in zip(texts, dtypes, strict=True):
        assert text.endswith(f"call combine, max_tokens 32, y, its row size 64, y, its dtype {dtype}")


@pytest.mark.parametrize("size", SIZES)
def test_a_capture_that_fails_on_a_rank_leaves_nothing_behind(ranks: list[dict[Any, Any]], size: int) -> None:
    for results in ranks[:size]:
        want, *found = results["violations", size]["a capture that failed"]
        for got in found:
            assert_equal(got, want)


@pytest.mark.parametrize("size", SIZES)
def test_buffers_grow(ranks: list[dict[Any, Any]], size: int) -> None:
    for rank, results in enumerate(ranks[:size]):
        values, counts, exchanged = results["growing", size]
        assert values == [9.0, 4096.0, 16.0, 8.0]
        assert counts == [2.0, 5.0]
        assert exchanged == [100 * r + 3 * rank + j for r in range(size) for j in range(3)]
        assert results["barriers", size] == 2, "one for each half of an exchange"


def test_rows_beyond_a_capacity_contribute_nothing(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert_equal(*results["capacity"]["out"])
        assert results["capacity"]["check"].startswith("RuntimeError: capacity: is 16, must be at least ")


ERRORS = {
    "chosen": "symm: every rank reads the memory of the others",
    "asked": "it was asked for",
    "differs": "ValueError: y, its dtype: is 'torch.bfloat16' on rank 0 and 'torch.float32' on rank 2 of",
    "captured": "ValueError: handle: is of a dispatch in a capture, must be combined in it; with engine",
    "capture": "RuntimeError: ExpertParallel: 1536 bytes of symmetric memory must be allocated, which a",
    "trained": "ValueError: handle: is of a dispatch in a capture, must be combined in it; with engine",
    "no memory": "RuntimeError: ExpertParallel: 64 bytes of symmetric memory cannot be allocated: CUDA "
    "driver error: out of memory (rank 2)",
    "closed": "RuntimeError: ExpertParallel: was closed, must not be used afterwards",
    "cpu": "RuntimeError: engine: got 'symm', must be 'gather' or 'auto', since ranks cannot read each "
    "other's memory: the group communicates between CPUs (rank 0)",
    "default": "gather: engine 'symm' must be asked for: it has not been measured on two GPUs yet",
    "fallback": "gather: the group communicates between CPUs (rank 0)",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_named_on_every_rank(ranks: list[dict[Any, Any]], name: str) -> None:
    assert ranks[0]["engine of one"] == "gather"
    for results in ranks:
        assert results["errors"][name].startswith(ERRORS[name])


# ---- without a second process


def test_calls_on_a_gpu_raise_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device noticed is copied by one call, and read by the first one after the copy is there."""
    is_copied = False

    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return is_copied

    monkeypatch.setattr(torch.cuda, "Event", Event)
    sequence = Sequence(0, 2, torch.device("cpu"))
    sequence._copy = torch.empty_like(sequence._state)  # as on a GPU
    sent = Transfer("there", "dispatch", "x", 8, 64, None)
    own, peer = torch.zeros(2, 1, dtype=torch.int64).unbind(0)
    sequence.begin(own, sent, 0, is_captured=False, is_first=True)
    sequence.end([own, peer])  # the peer wrote nothing
    for is_copied in (False, False, True):
        if is_copied:
            with pytest.raises(RuntimeError, match="the exchanges of rank 1 of the group differ from those"):
                sequence.poll()
        else:
            sequence.poll()
