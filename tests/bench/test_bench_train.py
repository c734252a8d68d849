"""bench train on the CPU: the contenders of a training step, their parts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_helpers import named, run
from fp4gemm.training import PRESETS, functional

from bench.__main__ import main
from bench.commands import train
from bench.measure import training
from bench.measure.models import Routed

PARTS = {
    "quantize W and its transpose",
    "quantize x and its transpose",
    "quantize x",
    "quantize the transpose of x",
    "quantize dy and its transpose",
    "quantize dy",
    "quantize the transpose of dy",
    "fprop",
    "dgrad",
    "wgrad",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SMALL_SHAPES", ((32, 64, 32),))
    monkeypatch.setattr(train, "SMALL_EXPERTS", (Routed("", "", 3, 1, 32, 64),))
    monkeypatch.setattr(train, "SMALL_PER_EXPERT", (5,))


def test_every_contender() -> None:
    rows = run("train", "--quick")
    assert list(dict.fromkeys(row["case"] for row in rows)) == [
        "train 32x64x32",
        "train 5 tokens an expert 3x32x64",
    ]
    assert not any("refused" in row or "absent" in row for row in rows)
    for case in ({row["contender"]: row for row in rows if row["m"] == m} for m in (32, 15)):
        assert {name: row["checked"] for name, row in case.items()} == {
            "torch bf16": "but for rounding",
            "QDQ nvidia": "but for rounding",
            "fp4gemm nvidia": "bit for bit",
            "fp4gemm nvidia, W kept": "bit for bit",
            "QDQ per_token": "but for rounding",
            "fp4gemm per_token": "bit for bit",
            "fp4gemm per_token, W kept": "bit for bit",
        }
        assert case["fp4gemm nvidia"]["ratio"].keys() == {"torch bf16", "QDQ nvidia", "QDQ per_token"}
        for preset in ("nvidia", "per_token"):
            assert {name for name, _ in case[f"fp4gemm {preset}"]["parts"]} == PARTS
            assert "parts" not in case[f"fp4gemm {preset}, W kept"]
    dense = named([row for row in rows if row["m"] == 32])["torch bf16"]
    assert dense["tflop_s"] * dense["us"] * 1e6 == pytest.approx(6 * 32 * 64 * 32, rel=0.01)
    num_bytes = 4 * (32 * 64 + 32 * 32 + 64 * 32)
    assert dense["gb_s"] * dense["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)


def test_presets_and_profile() -> None:
    rows = run("train", "--m", "32", "--presets", "te_per_token,row_scaled,four_over_six", "--profile")
    assert not any("refused" in row or "absent" in row for row in rows)
    assert {row["contender"] for row in rows} == {
        "torch bf16",
        *(f"QDQ {name}" for name in ("te_per_token", "row_scaled", "four_over_six")),
        *(f"fp4gemm {name}" for name in ("te_per_token", "row_scaled", "four_over_six")),
        *(f"fp4gemm {name}, W kept" for name in ("te_per_token", "row_scaled", "four_over_six")),
    }
    for row in rows:
        assert row["launches"] >= len(row["kernels"]) > 0
        assert all(count > 0 for _, count, _ in row["kernels"])


def test_sizes_of_the_options() -> None:
    assert {row["case"] for row in run("train", "--shapes", "32x64", "--m", "64", "--presets", "nvidia")} == {
        "train 64x32x64"
    }
    rows = run("train", "--per-expert", "2", "--presets", "nvidia")
    assert {(row["case"], row["m"]) for row in rows} == {("train 2 tokens an expert 3x32x64", 6)}


def test_kept_copies_of_weights_are_made_once(gen: torch.Generator) -> None:
    x, weight, dy = (torch.randn(32, 32, generator=gen).bfloat16() for _ in range(3))
    operands, state = training.Operands(x, weight, dy, None), torch.tensor([1, 2])
    counts = []
    for cache in (training.Kept(), training.Anew()):
        made: list[object] = []
        get = cache.get

        def counted(w: Any, make: Any, variant: Any, get: Any = get, made: Any = made) -> Any:
            return get(w, lambda: made.append(1) or make(), variant)

        cache.get = counted  # type: ignore[method-assign]
        results = [operands.by_recipe(PRESETS["nvidia"], state, cache) for _ in range(3)]
        assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))
        counts.append(len(made))
    assert counts == [1, 3]


@pytest.mark.parametrize("which", ["y", "dx", "dw"])
@pytest.mark.parametrize("per_expert", [False, True], ids=["dense", "experts"])
def test_a_wrong_step_is_refused(which: str, per_expert: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function = training.Operands.differentiated

    def wrong(self: Any, y: Any) -> Any:
        results = function(self, y)
        changed = getattr(results, which).clone()
        changed.view(-1)[0] += 30
        return results._replace(**{which: changed})

    monkeypatch.setattr(training.Operands, "differentiated", wrong)
    sizes = ("--per-expert", "9") if per_expert else ("--m", "32")
    rows = run("train", *sizes, "--presets", "per_token")
    refused = {row["contender"]: row["refused"] for row in rows if "refused" in row}
    assert set(refused) == {"torch bf16", "fp4gemm per_token", "fp4gemm per_token, W kept"}
    name = {"dw": "dW"}.get(which, which)
    assert all(text.startswith(name) for text in refused.values()), refused


def test_wrong_copies_and_wrong_qdq_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, products = training.Copies._made, training.qdq_products

    def changed(self: Any, t: Any, name: str, *args: Any) -> Any:
        copy = made(self, t, name, *args)
        if name == "x":
            copy.codes[3, 0] ^= 7
        return copy

    def wrong(*args: Any) -> Any:
        results = products(*args)
        return results._replace(dw=results.dw * 1.1)

    monkeypatch.setattr(training.Copies, "_made", changed)
    monkeypatch.setattr(training, "qdq_products", wrong)
    rows = run("train", "--m", "32", "--presets", "nvidia")
    refused = {row["contender"]: row["refused"] for row in rows if "refused" in row}
    assert set(refused) == {"QDQ nvidia", "fp4gemm nvidia", "fp4gemm nvidia, W kept"}
    assert refused["fp4gemm nvidia"].startswith("x: codes: 1 of ")
    assert refused["fp4gemm nvidia, W kept"].startswith("y: ")
    assert refused["QDQ nvidia"].startswith(("y ", "dW "))


def test_steps_are_those_of_a_layer(gen: torch.Generator) -> None:
    """The step of the bench is functional.linear, whose products of autograd other tests verify."""
    x, weight, dy = (torch.randn(64, 64, generator=gen).bfloat16() for _ in range(3))
    state = torch.tensor([5, 6])
    got = training.Operands(x, weight, dy, None).by_recipe(PRESETS["per_token"], state, None)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = functional.linear(x, weight, None, "per_token", state=state)
    y.backward(dy)
    for one, want in zip(got, (y, x.grad, weight.grad), strict=True):
        assert torch.equal(one, want)


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for line, text in (
        (["--presets", "bf16"], "'bf16' is not one of nvidia, "),
        (["--m", "33"], "m is 33, must be a multiple of 32"),
        (["--shapes", "40x64"], "n is 40, must be a multiple of 32"),
        (["--model", "kimi-k2", "--m", "32"], "lists experts alone"),
        (["--model", "square", "--per-expert", "4"], "has no experts"),
        (["--m", "32", "--per-expert", "4"], "--m and --per-expert exclude each other"),
        (["--shapes", "32x32x32", "--per-expert", "4"], "--shapes and --per-expert exclude each other"),
    ):
        with pytest.raises(SystemExit):
            main(["train", "--device", "cpu", *line])
        assert text in capsys.readouterr().err
