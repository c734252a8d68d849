"""Expert parallelism in groups of 1, 2 and 4 processes, connected by gloo on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import expert_parallel
import fp4gemm
import pytest
import torch
from expert_parallel import CASES, MAX_TOKENS, RANKS, SIZES, D
from fp4gemm.distributed import ExpertParallel, _arrival
from fp4gemm.kernel_table import select_kernel as selected
from fp4gemm.layout import record_bytes
from fp4gemm.nn import _parallel
from processes import in_processes
from torch import Tensor


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of all four processes."""
    return in_processes(expert_parallel.run, RANKS)


def assert_equal(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    left, right = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (left, right))
    assert torch.equal(left, right)


def of_group(ranks: list[dict[Any, Any]], name: str, size: int) -> list[Any]:
    return [results[name, size] for results in ranks[:size]]


# ---- bits


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.combine == "slots"])
def test_slots_has_the_bits_of_one_process(ranks: list[dict[Any, Any]], case: str, size: int) -> None:
    pairs = of_group(ranks, case, size)
    for got, want in pairs:
        assert_equal(got, want)
        assert got.isfinite().all()
    tokens = sum(len(got) for got, _ in pairs)
    assert tokens == sum(CASES[case].tokens)
    assert tokens == 0 or sum(got.abs().sum() for got, _ in pairs) > 0


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.combine == "tree"])
def test_tree_has_the_same_bits_for_any_number_of_ranks(ranks: list[dict[Any, Any]], case: str) -> None:
    (alone, want), *_ = of_group(ranks, case, 1)
    for size in SIZES[1:]:
        assert_equal(torch.cat([got for got, _ in of_group(ranks, case, size)]), alone)
    error = (alone.float() - want.float()).norm() / want.float().norm()
    assert 0 < error < 0.01, "another rounding than that of slots, of the same sum"


def test_the_operand_is_that_of_one_process(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        for got, want, of_rows in results["operands"].values():
            assert_equal(got, want)
            assert_equal(of_rows, want)


# ---- what travels


def test_bytes(ranks: list[dict[Any, Any]]) -> None:
    """One block of packed rows and ids, and the rows of all slots back."""
    row = record_bytes(D)
    block = MAX_TOKENS * row + -(-MAX_TOKENS * 4 * 4 // row) * row
    for size in SIZES[1:]:
        back = size * MAX_TOKENS * 4 * D * 2
        for calls in of_group(ranks, "sent", size):
            assert calls == [("all_gather", block), ("all_to_all", back)]
    assert of_group(ranks, "sent", 1) == [[]]


def test_a_message_holds_rows_and_matrices() -> None:
    message = _arrival.Message(3, 48, 2, 2)
    blocks = [torch.zeros(message.rows, message.row_bytes, dtype=torch.uint8) for _ in range(2)]
    assert message.rows == 4
    for i, block in enumerate(blocks):
        message.matrix(block, 0, torch.int32).copy_(6 * i + torch.arange(6).view(3, 2))
        message.matrix(block, 1, torch.float32).fill_(0.5)
    assert [rows.shape for rows in message.tokens(blocks)] == [(3, 48)] * 2
    assert not torch.cat(message.tokens(blocks)).any()
    assert message.matrices(blocks, 0, torch.int32).tolist() == torch.arange(12).view(6, 2).tolist()
    assert message.matrices(blocks, 1, torch.float32).unique().tolist() == [0.5]


# ---- checkpoints


def test_checkpoints_of_other_numbers_of_ranks(ranks: list[dict[Any, Any]]) -> None:
    """Equal names with other contents on each rank are DTensors, of which nothing is lost."""
    for results in ranks:
        found = results["checkpoints"]
        *outs, want = found["outputs"]
        for got in outs:
            assert_equal(got, want)
        whole, loaded = found["wholes"]
        assert whole.keys() == loaded.keys() == found["shapes"].keys()
        for name, value in whole.items():
            assert_equal(loaded[name], value)
            kind = "Tensor" if name.endswith("weight_e4m3_max") else "DTensor"
            assert found["shapes"][name] == [tuple(value.shape), kind]


# ---- capacity, mesh, errors


def test_rows_beyond_a_capacity_contribute_nothing(ranks: list[dict[Any, Any]]) -> None:
    texts = set()
    for results in ranks:
        found = results["capacity", RANKS]
        assert found["rows"][0] == 16
        assert found["rows"][1] <= 16
        assert_equal(*found["out"])
        assert (found["again"], found["enough"]) == ("nothing was raised",) * 2
        texts.add(found["check"])
    assert max(results["capacity", RANKS]["rows"][1] for results in ranks) == 16
    (text,) = texts
    assert text.startswith("RuntimeError: capacity: is 16, must be at least ")
    assert "the rows of the experts of a rank in a dispatch since the last check" in text


def test_a_mesh_of_one_dimension_is_a_group(ranks: list[dict[Any, Any]]) -> None:
    assert [results["mesh"] for results in ranks] == [[0, 2, 0], [1, 2, 8]] * 2
    for results in ranks:
        assert results["mesh of two"].startswith("ValueError: group: the mesh has 2 dimensions, must have 1")


ERRORS = {
    "differs: top_k": "ValueError: top_k: is 4 on rank 0 and 2 on rank 2 of the group, must be the same",
    "differs: capacity": "ValueError: capacity: is None on rank 0 and 64 on rank 2 of the group",
    "differs: combine": "ValueError: combine: is 'slots' on rank 0 and 'tree' on rank 2 of the group",
    "wrong: top_k": "ValueError: top_k: got 17, must be at most num_experts, which is 16",
    "wrong: hidden": ("TypeError: hidden: got 64.0", "ValueError: hidden: got 64.0"),
    "ranks": "ValueError: num_experts: got 18, must be a multiple of 4, the ranks",
    "tree": "ValueError: combine: 'tree' is for 1, 2, 4 or 8 ranks and a multiple of 8 experts",
    "id": "ValueError: topk_ids: an id of token 2 of rank 1 (slot 1) is not in 0..15, must be, or -1",
    "twice": "ValueError: topk_ids: token 1 names expert",
    "tokens": "ValueError: x: has 9 tokens, must have at most 8, max_tokens",
    "bound": "ValueError: max_tokens: got 9, must be at most 8, the constructor's",
    "tokens of the call": "ValueError: x: has ",
    "rows": "ValueError: y: has 127 rows, must have 128, those of the dispatch",
    "other": "ValueError: handle: is of another ExpertParallel, must be of a dispatch of this one",
    "combined": "ValueError: handle: is stale, it was combined already, must be combined once",
    "fresh": "nothing was raised",
    "stale": "ValueError: handle: is stale, 2 dispatches followed, must be combined before the second",
    "pickle": "TypeError: ExpertParallel: is bound to a process group, must not be pickled; save the",
    "copy": "nothing was raised",
    "ep": "TypeError: ep: got 4 (int), must be an fp4gemm.distributed.ExpertParallel or None",
    "local": "ValueError: w13: the number of experts: is 16, must be 4, num_local_experts of ep",
    "w4a16": "NotImplementedError: activations: got 'a16', must be 'per-token' with ep, whose tokens",
    "global": "ValueError: num_experts: is 4, must be 16, num_experts of ep",
    "hidden": "ValueError: hidden: is 128, must be 64, hidden of ep",
    "new": "(16, (4, 192, 32))",
    "disagree: max_tokens": "ValueError: max_tokens: is 8 on rank 0 and 7 on rank 2 of the group, must be",
    "disagree: layer": "ValueError: y, its dtype: is 'torch.bfloat16' on rank 0 and 'torch.float32' on rank",
    "disagree: dtype": "ValueError: y, its dtype: is 'torch.bfloat16' on rank 0 and 'torch.float16' on rank",
    "disagree: d": "ValueError: y, its row size: is 64 on rank 0 and 72 on rank 2 of the group, must be the",
    "disagree: weights": "ValueError: topk_weights, its dtype: is 'torch.float32' on rank 0 and 'torch.float",
    "disagree: call": "ValueError: call: is 'dispatch' on rank 0 and 'train_dispatch' on rank 2 of the group",
    "disagree: on a GPU": "ValueError: max_tokens: is 2 on rank 0 and 3 on rank 2 of the group, must be the",
    "new in a capture": "RuntimeError: ExpertParallel: these sizes are new (call dispatch, max_tokens 4, x, ",
}
ERRORS |= dict.fromkeys(
    (
        *("closed", "closed: combine", "closed: train_dispatch", "closed: train_combine"),
        *("closed: check", "closed: with", "closed: layer", "closed: state_dict"),
    ),
    "RuntimeError: ExpertParallel: was closed, must not be used afterwards",
)


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_named_on_every_rank(ranks: list[dict[Any, Any]], name: str) -> None:
    for results in ranks:
        assert results["errors"][name].startswith(ERRORS[name])


def test_a_rank_that_does_not_take_part_ends_the_wait(ranks: list[dict[Any, Any]]) -> None:
    text = ranks[0]["alone"]
    assert text.startswith("RuntimeError: ExpertParallel: the all_gather of 2 ranks failed; a rank has ended")


# ---- without a second process


def test_the_kernel_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected by the pairs and the experts of all ranks, so that ranks do not change the bits."""
    if not fp4gemm.kernels():
        pytest.skip("built without CUDA kernels")
    device = SimpleNamespace(major=10, minor=0, multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    sizes: Any = {"n": 1536, "k": 2048, "out_dtype": torch.bfloat16, "activation": "swiglu"}
    formats = ("nvfp4", "nvfp4")
    ep: Any = SimpleNamespace(num_experts=128)
    for pairs in (1024, 8192, 65536):
        handle: Any = SimpleNamespace(global_pairs=pairs)
        found = _parallel.kernel_of(ep, handle, torch.device("cuda"), formats=formats, **sizes)
        one = selected(100, 148, pairs, num_groups=128, **sizes)
        assert one is not None
        assert found == one.name


SIZES_OF_ONE = {"num_experts": 8, "top_k": 2, "hidden": D, "max_tokens": 4}


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        ExpertParallel(**SIZES_OF_ONE)


@pytest.mark.parametrize(
    ("change", "error", "wanted"),
    [
        ({"num_experts": 0}, ValueError, "num_experts: got 0, must be at least 1"),
        ({"num_experts": 4096}, ValueError, "num_experts: got 4096, must be at most 2048"),
        ({"top_k": 9}, ValueError, "top_k: got 9, must be at most num_experts, which is 8"),
        ({"top_k": 1.0}, TypeError, "top_k: got 1.0"),
        ({"hidden": 48}, ValueError, "hidden: the size is 48, must be a positive multiple of 32"),
        ({"max_tokens": 0}, ValueError, "max_tokens: got 0, must be at least 1"),
        ({"engine": "nvshmem"}, ValueError, "engine: got 'nvshmem', must be"),
        ({"combine": "sum"}, ValueError, "combine: got 'sum', must be 'slots' or 'tree'"),
        ({"capacity": 0}, ValueError, "capacity: got 0, must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], wanted: str) -> None:
    with pytest.raises(error, match=wanted):
        ExpertParallel(**{**SIZES_OF_ONE, **change})
