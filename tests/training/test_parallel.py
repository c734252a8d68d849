"""Tensor and sequence parallelism in two processes, connected by gloo on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensor_parallel
import torch
from fp4gemm import training
from processes import assert_equal, in_two_processes
from tensor_parallel import BATCH, DRAWN_SIGNS, IN, OUT, TOKENS

ROWS = BATCH * TOKENS // 2  # tokens of a rank
PACKED = ROWS * (IN // 2 + IN // 16)


CASES = [
    *tensor_parallel.RECIPES,
    "tensor",
    "tensor, x_t too",
    "batch",
    *(f"original, {shape}" for shape in ("batch", "first", "parts of blocks", "parts in a batch")),
]


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of both processes."""
    return in_two_processes(tensor_parallel.run)


@pytest.mark.parametrize("case", CASES)
def test_gathered_tokens_have_the_bits_of_one_process(ranks: list[dict[Any, Any]], case: str) -> None:
    """y, dW and the gradient of the bias are those of one process; dx is the sum of two gradients."""
    for results in ranks:
        assert_equal(*results["colwise", case])


@pytest.mark.parametrize("case", [*tensor_parallel.RECIPES, "batch"])
def test_scattered_tokens_are_sums_of_the_ranks_products(ranks: list[dict[Any, Any]], case: str) -> None:
    for results in ranks:
        assert_equal(*results["rowwise", case])


@pytest.mark.parametrize("form", ["tensor", "DTensor"])
@pytest.mark.parametrize("style", ["Colwise", "Rowwise"])
@pytest.mark.parametrize("recipe", ["te_per_token", "original", "bf16"])
def test_main_grad_takes_the_gradients_of_a_shard(
    ranks: list[dict[Any, Any]], recipe: str, style: str, form: str
) -> None:
    """Of float32 weights the sums have the bits of weight.grad."""
    for results in ranks:
        main, grad = (results["accumulated", recipe, style, which] for which in (form, "grad"))
        assert_equal(main, grad)
        assert main[0].any()


def test_codes_scales_and_amaxes_travel(ranks: list[dict[Any, Any]]) -> None:
    gather, scatter = "all_gather", ("reduce_scatter", 2 * 2 * ROWS * IN)
    original = (gather, ROWS * IN * 2)
    for results in ranks:
        assert results["bytes", "rowwise"] == [(gather, PACKED + 4 * ROWS), scatter]
        amaxes, x, x_t = ("all_reduce", 4 * IN), (gather, PACKED + 4 * ROWS), (gather, PACKED)
        assert results["bytes", "original"] == [x, amaxes, scatter, x_t]
        assert results["bytes", "original x"] == [x, scatter, amaxes, x_t]
        assert results["bytes", "tensor"] == [("all_reduce", 4), x_t, amaxes, scatter, x_t]
        assert results["bytes", "parts of blocks"] == [
            (gather, 24 * (IN // 2 + IN // 16 + 4)),
            ("reduce_scatter", 2 * 2 * 24 * IN),
            (gather, 24 * IN * 2),
        ]
        assert results["bytes", "bf16"] == [original, scatter]


def test_a_sharded_dtensor_is_an_input(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert_equal(results["of a DTensor"], results["local"])


def test_no_tokens(ranks: list[dict[Any, Any]]) -> None:
    assert [results["none"] for results in ranks] == [[0, OUT // 2]] * 2


def test_stochastic_gradients_are_finite(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        y, dx, dw, db = results["stochastic"]
        assert [tuple(t.shape) for t in (y, dx, dw, db)] == [
            (1, 32, OUT // 2),
            (1, 16, IN),
            (OUT, IN),
            (OUT,),
        ]
        assert all(t.isfinite().all() and t.any() for t in (y, dx, dw, db))


@pytest.mark.parametrize("name", DRAWN_SIGNS)
def test_operands_have_the_signs_of_their_rank(ranks: list[dict[Any, Any]], name: str) -> None:
    """Gradients differ from those of one process by their rounding; other signs would spoil them."""
    for results in ranks:
        for got, want in results["drawn signs", name]:
            for a, b in zip(got, want, strict=True):
                assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.3


def test_cached_weights_follow_the_optimizer(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert_equal(results["mlp", True], ranks[0]["mlp", False])


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (
            "penalty",
            "NotImplementedError: a gradient of fp4gemm.training is differentiated again; only first",
        ),
        ("main_grad of the whole", "ValueError: weight.main_grad: shape is (128, 64), must be (64, 64)"),
        ("main_grad elsewhere", "ValueError: weight.main_grad: placements are (Shard(dim=1),), must be"),
        (
            "flat",
            "ValueError: x: shape is (64, 64), must have more than 2 dimensions, since sequence_dim is 1",
        ),
        ("odd", "ValueError: x: has 5 tokens in dimension 0, must be a multiple of 2, the ranks"),
        ("narrow", "ValueError: module: out_features is 96, must be a positive multiple of 64"),
        ("again", "ValueError: module: weight is a DTensor, must be a plain parameter"),
    ],
)
def test_what_does_not_fit_is_named(ranks: list[dict[Any, Any]], case: str, wanted: str) -> None:
    for results in ranks:
        assert results[case].startswith(wanted)


# ---- what needs no second process

STYLES = [training.SequenceColwiseParallel, training.SequenceRowwiseParallel]


@pytest.mark.parametrize("style", STYLES)
def test_bad_arguments_of_a_style_are_named(style: Any) -> None:
    with pytest.raises(TypeError, match=r"sequence_dim: got 1\.5.*, must be an int"):
        style(sequence_dim=1.5)
    with pytest.raises(ValueError, match="sequence_dim: got -1, must be at least 0"):
        style(sequence_dim=-1)
    assert repr(style()) == f"{style.__name__}(sequence_dim=1)"
    mesh = SimpleNamespace(ndim=2, size=lambda: 4)
    with pytest.raises(TypeError, match=r"module: got .*, must be an fp4gemm.training.Linear"):
        style()._apply(torch.nn.Linear(64, 64), mesh)
    with pytest.raises(ValueError, match="device_mesh: has 2 dimensions, must have 1"):
        style()._apply(training.Linear(64, 64), mesh)
