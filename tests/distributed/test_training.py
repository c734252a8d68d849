"""training.MoE in groups of 1, 2 and 4 processes: gradients, DTensors, checkpoints, FSDP2 beside it."""

from __future__ import annotations

from typing import Any

import expert_parallel_training
import pytest
import torch
from expert_parallel_training import (
    EXPERTS,
    LAYOUTS,
    MAX_TOKENS,
    RANKS,
    RECIPES,
    TOP_K,
    TRAVELS_QUANTIZED,
    D,
)
from processes import in_processes
from torch import Tensor


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of all four processes."""
    return in_processes(expert_parallel_training.run, RANKS)


def assert_equal(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.isfinite().all()
    assert torch.equal(left, right)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_have_the_bits_of_one_process(ranks: list[dict[Any, Any]], recipe: str, size: int) -> None:
    for results in ranks[:size]:
        found = results[recipe, size]
        router = found.pop("router.gate.weight")
        assert len(found) == 6
        for got, want in found.values():
            assert_equal(got, want)
        # A sum over the tokens of all ranks, whose partial sums are rounded.
        torch.testing.assert_close(*router, rtol=0.02, atol=0.02)


def test_quantized_gradients_do_not_depend_on_the_ranks(ranks: list[dict[Any, Any]]) -> None:
    """The random numbers of a token are those of its place among the tokens of all ranks."""
    alone = ranks[0]["nvfp4", 1]
    whole = torch.cat([results["bf16", 4]["y"][0] for results in ranks])
    assert len(whole) < len(alone["y"])
    for size in (2, 4):
        found = [results["nvfp4", size] for results in ranks[:size]]
        for name in ("y", "x", "experts.w1.weight", "experts.w2.weight", "experts.w3.weight"):
            assert_equal(torch.cat([each[name] for each in found]), alone[name])


def test_the_random_state_continues(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        second, resumed, first, again, state, later = results["resumed"]
        assert_equal(resumed, second)
        assert_equal(again, second)
        assert not torch.equal(first, second)
        assert (state.tolist(), later.tolist()) == ([3, 1], [3, 2])


@pytest.mark.parametrize("gradient", ["original", "nvfp4"])
def test_a_sum_after_inference(ranks: list[dict[Any, Any]], gradient: str) -> None:
    """On a rank without tokens too, and with memory of the exchange that was made in inference mode."""
    assert ranks[1]["after inference", gradient][0].shape == (0, D)
    for results in ranks:
        assert_equal(*results["after inference", gradient])


@pytest.mark.parametrize("gradient", ["original", "nvfp4"])
@pytest.mark.parametrize("recipe", ["te_per_token", "rowwise"])
def test_bytes(ranks: list[dict[Any, Any]], recipe: str, gradient: str) -> None:
    """Rows, ids and weights; results; gradients of results; gradients of rows, and of the weights."""
    quantized, plain = 48, 2 * D  # bytes of a row
    row = quantized if recipe in TRAVELS_QUANTIZED else plain
    of_pairs = 2 * MAX_TOKENS * TOP_K * 4
    block = MAX_TOKENS * row + -(-of_pairs // row) * row
    slots = RANKS * MAX_TOKENS * min(TOP_K, EXPERTS // RANKS)
    back = ("all_to_all", slots * 2 * D)
    of_dy = MAX_TOKENS * (quantized if gradient == "nvfp4" else plain)
    wanted = [("all_gather", block), back, ("all_gather", of_dy), back, ("all_to_all", slots * 4)]
    for results in ranks:
        assert results["sent", recipe, gradient] == wanted


def test_the_style_divides_the_experts(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert results["placements"] == ["(Shard(dim=0),)"] * 3
        assert results["styled"].keys() == results["by hand"].keys()
        for name, got in results["styled"].items():
            assert_equal(got, results["by hand"][name])


@pytest.mark.parametrize("is_dtensor", [False, True], ids=["tensor", "DTensor"])
def test_main_grad_of_divided_experts(ranks: list[dict[Any, Any]], is_dtensor: bool) -> None:
    """It has the float32 gradients that are rounded where weights have none."""
    for results in ranks:
        main, grads = results["accumulated", is_dtensor]
        for got, want in zip(main, grads, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got.bfloat16(), want)
    assert any(got.any() for results in ranks for got in results["accumulated", is_dtensor][0])


def test_checkpoints_of_other_numbers_of_ranks(ranks: list[dict[Any, Any]]) -> None:
    assert ranks[0]["checkpoints"] == [True] * 4


@pytest.mark.parametrize("kind", ["plain", "styled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_have_their_numbers_in_other_layouts(
    ranks: list[dict[Any, Any]], layout: str, kind: str
) -> None:
    """moe_state names the experts of all ranks, and load_moe_state reads its own of a whole block."""
    of_experts = {"mixtral": "experts.{}.w2.weight", "te": "experts.linear_fc2.weight{}"}
    local = EXPERTS // RANKS
    for rank, results in enumerate(ranks):
        keys, is_equal = results["layout", layout, kind]
        assert is_equal
        if layout in of_experts:
            wanted = [of_experts[layout].format(e) for e in range(rank * local, (rank + 1) * local)]
            assert [key for key in keys if key in wanted] == wanted
            assert len(keys) == local * (3 if layout == "mixtral" else 2)


def test_fsdp_shards_the_rest(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        with_fsdp, without = results["fsdp"]
        for got, want in zip(with_fsdp, without, strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.002)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ep", "TypeError: ep: got 1 (int), must be an fp4gemm.distributed.ExpertParallel or None"),
        ("size", "ValueError: ep: its num_experts is 8, must be 16, as of the module"),
        ("top_k", "ValueError: ep: its top_k is 3, must be 2, as of the module"),
        ("module", "TypeError: module: is a Linear, must be an fp4gemm.training.MoE"),
        ("twice", "ValueError: module: has an exchange (ep) already, must have none"),
        ("square", "ValueError: device_mesh: has 2 dimensions, must have 1; pass mesh['ep'], say"),
        ("rank", "ValueError: x: shape is (), must have rank 2, (t, hidden)"),
        ("rank of y", "ValueError: y: shape is (), must have rank 2, (handle.num_rows, d)"),
        ("tokens", "ValueError: x: has 9 tokens, must have at most 7, max_tokens"),
        ("dtype", "ValueError: x: dtype is torch.float16, must be torch.float32, as in the first train_"),
        (
            "dtypes",
            "ValueError: x, its dtype: is 'torch.bfloat16' on rank 0 and 'torch.float16' on rank 2 of",
        ),
        ("handle", "ValueError: handle: must be what train_dispatch of this ExpertParallel returned"),
        ("rows", "ValueError: y: shape is (3, 64), must be ("),
        ("state", "ValueError: state: shape is (3,), must be (2,)"),
    ],
)
def test_what_is_wrong_is_named(ranks: list[dict[Any, Any]], name: str, wanted: str) -> None:
    for results in ranks:
        assert results["errors"][name].startswith(wanted)
