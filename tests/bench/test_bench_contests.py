"""dense, grouped, layer and overhead on the CPU: the contenders, and the fields of their rows."""

from __future__ import annotations

import argparse

import pytest
from bench_helpers import BLACKWELL, FP8, FP8_PRODUCT, W4A8, cpu_harness, named, run

from bench.commands import dense, grouped, overhead
from bench.measure import models, routing


def test_dense() -> None:
    rows = run("dense", "--shapes", "48x128", "3x64x96", "--m", "1,5")
    assert list(dict.fromkeys(row["case"] for row in rows)) == [
        "dense 1x48x128",
        "dense 5x48x128",
        "dense 3x64x96",
    ]
    found = named([row for row in rows if row["m"] == 5])
    products = {"fp4gemm", "scalar alpha", "unfused: post-scale", "torch fp32", FP8_PRODUCT}
    assert set(found) == {*products, "fp4gemm W4A4", *FP8, *W4A8}
    assert not any("refused" in row for row in rows)
    ours = found["fp4gemm"]
    assert (ours["kernel"], ours["checked"], ours["role"]) == ("reference", "bit for bit", "ours")
    # A ratio to a baseline that alone quantizes its tokens would say nothing.
    assert set(ours["ratio"]) == products - {"fp4gemm"}
    assert set(found["fp4gemm W4A4"]["ratio"]) == {"torch fp32", *FP8}
    assert set(found["torch fp32"]["ratio"]) == {*products, *FP8} - {"fp4gemm", "torch fp32"}
    assert ours["ratio"]["torch fp32"] == pytest.approx(found["torch fp32"]["us"] / ours["us"], rel=0.01)
    num_bytes = (5 * 64 + 128 * 8 + 4 * 5) + (48 * 64 + 128 * 8 + 4 * 48) + 2 * 5 * 48
    assert ours["gb_s"] == pytest.approx(num_bytes / ours["us"] / 1e3, rel=0.01)
    assert ours["tflop_s"] == pytest.approx(2 * 5 * 48 * 128 / ours["us"] / 1e6, rel=0.01)


@pytest.mark.parametrize("name", list(routing.ROUTINGS))
def test_grouped(name: str) -> None:
    rows = run("grouped", "--shapes", "8x32x64", "--top-k", "2", "--m", "6", "--routing", name)
    found = named(rows)
    products = {"fp4gemm", "unfused: expert by expert", "torch fp32", FP8_PRODUCT}
    assert set(found) == {*products, "fp4gemm W4A4", *FP8, *W4A8}
    assert set(found["fp4gemm"]["ratio"]) == products - {"fp4gemm"}
    assert set(found["fp4gemm W4A4"]["ratio"]) == {"torch fp32", *FP8}
    assert not any("refused" in row for row in rows)
    assert {row["m"] for row in rows} == {12}
    ends = routing.routed_ends(6, 8, 2, name)
    active = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    assert found["fp4gemm"]["active"] == active
    one = 32 * 32 + 128 * 4 + 4 * 32

    assert found["fp4gemm"]["gb_s"] * found["fp4gemm"]["us"] * 1e3 > active * one


def test_experts_of_one_device_may_get_no_token() -> None:
    rows = run("grouped", "--model", "llama-4-scout", "--ep", "16", "--m", "1")
    assert [row["absent"] for row in rows] == ["no token chose these experts: nothing to measure"] * 2


def test_layer() -> None:
    rows = run("layer", "--shapes", "48x128", "--m", "5")
    found = named(rows)
    assert set(found) == {"fp4gemm", "scalar alpha", "unfused: post-scale", "torch fp32", *FP8, *W4A8}
    assert not any("refused" in row for row in rows)
    num_bytes = 4 * 5 * 128 + (48 * 64 + 128 * 8 + 4 * 48) + 2 * 5 * 48
    assert found["fp4gemm"]["gb_s"] * found["fp4gemm"]["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)
    num_bytes = 4 * (5 * 128 + 48 * 128 + 5 * 48)
    assert found["torch fp32"]["gb_s"] * found["torch fp32"]["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)


def test_overhead() -> None:
    found = named(run("overhead"))
    assert {"mm", "grouped_mm", "quantize", "nn.Linear", "torch.mm"} <= set(found)
    assert all(row["us"] > 0 for row in found.values())


def test_overhead_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(overhead, "_calls", lambda harness: {"mm": absent})
    assert [row["absent"] for row in run("overhead")] == ["NotImplementedError: no kernel"]


def test_jobs_have_names_of_their_own() -> None:
    harness = cpu_harness()
    harness.is_cuda, args = True, argparse.Namespace(m=None, shapes=None, model=None, kernels=None)
    harness.operands = BLACKWELL
    keys = [job.key for job in dense.jobs(args, harness)]
    assert len(set(keys)) == len(keys)
    line = ["grouped", "--shapes", "8x64x128", "--m", "4", "--top-k"]
    names = {run(*line, top)[0]["case"] for top in ("2", "4")}
    assert names == {f"grouped 4 tokens uniform 8x64x128 top {top}" for top in (2, 4)}


def test_grouped_shapes_are_three_sizes() -> None:
    with pytest.raises(ValueError, match="64x128 must be experts x n x k"):
        run("grouped", "--shapes", "64x128")
    with pytest.raises(ValueError, match="is 5, must be at most 4"):
        run("grouped", "--shapes", "4x64x128", "--top-k", "5")
    rows = run("grouped", "--shapes", "4x64x128", "--top-k", "2", "--per-expert", "3")
    assert {row["tokens"] for row in rows} == {6}
    assert grouped.tokens_for(models.Routed("", "", 32, 8, 1, 1), 16, 8) == 512
