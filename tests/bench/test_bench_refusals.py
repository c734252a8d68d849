"""Contenders whose results are wrong are refused, those that cannot run are absent, others are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import CPU, FP8_PRODUCT, cpu_harness, named, run
from fp4gemm.device import products

from bench.__main__ import parser
from bench.commands import dense, grouped, runner
from bench.measure import verify
from bench.measure.contest import Job


def one_bit_off(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        out = right(*args, **options)
        out.view(torch.int16)[0, 5] ^= 1
        return out

    return wrong


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4gemm, "mm", one_bit_off(fp4gemm.mm))
    found = named(run("dense", "--shapes", "3x64x96"))
    assert "1 of 192 elements differ, the first, at row 0, column 5" in found["fp4gemm"]["refused"]
    assert "us" not in found["fp4gemm"]
    assert all("fp4gemm" not in row.get("ratio", {}) for row in found.values())


def test_a_wrong_grouped_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4gemm, "grouped_mm", one_bit_off(fp4gemm.grouped_mm))
    found = named(run("grouped", "--shapes", "4x32x64", "--m", "6"))
    assert "1 of" in found["fp4gemm"]["refused"]


@pytest.mark.parametrize("command", ["dense", "layer"])
def test_a_wrong_quantizer_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the wrong codes is right, but the codes are not those of the input."""
    right = fp4gemm.quantize

    def wrong(x: torch.Tensor, **options: Any) -> fp4gemm.NVFP4Tensor:
        t = right(x, **options)
        return fp4gemm.NVFP4Tensor(t.codes ^ 0x88, t.scales, t.amax, t.e4m3_max, t.offs)

    monkeypatch.setattr(fp4gemm, "quantize", wrong)
    found = named(run(command, "--shapes", "3x64x96"))
    refused = "differ from the reference" if command == "dense" else "differ"
    assert refused in found["fp4gemm"]["refused"]


def test_the_public_function_is_what_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function is wrong though everything below it is right."""
    right = fp4gemm.mm
    monkeypatch.setattr(fp4gemm, "mm", lambda *args, **options: torch.zeros_like(right(*args, **options)))
    found = named(run("dense", "--shapes", "3x64x96"))
    for name in ("fp4gemm", "fp4gemm W4A4", "scalar alpha", "unfused: post-scale"):
        assert "refused" in found[name]
    timed = [name for name, row in found.items() if "us" in row]
    assert all(name.startswith("torch ") for name in timed)


@pytest.mark.parametrize("rows", [slice(6, 7), slice(20, 30)])
def test_a_baseline_wrong_in_the_middle_is_refused(rows: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = right(a, b)
        if a.dtype is torch.float32:
            out[rows] = 0
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    found = named(run("dense", "--shapes", "40x64x96"))
    assert "is off by" in found["torch fp32"]["refused"]


def test_a_baseline_wrong_for_one_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = grouped.Contenders._loop_of_mm

    def wrong(self: Any, stack: torch.Tensor) -> torch.Tensor:
        out = right(self, stack)
        _, begin, end = self.occupied[1]
        out[begin:end] = 0
        return out

    monkeypatch.setattr(grouped.Contenders, "_loop_of_mm", wrong)
    found = named(run("grouped", "--shapes", "8x32x64", "--m", "40"))
    assert found["torch fp32"]["refused"].startswith("rows ")
    assert "torch fp32" not in found["fp4gemm"]["ratio"]


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_a_wrong_baseline_is_refused_and_no_ratio_printed(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.mm
    # The reference multiplies in float64.
    monkeypatch.setattr(torch, "mm", lambda a, b: right(a, b) * (factor if a.dtype is torch.float32 else 1))
    found = named(run("dense", "--shapes", "16x64x96"))
    reason = found["torch fp32"]["refused"]
    assert ("is off by" in reason) if factor == factor else ("not finite" in reason)
    assert "torch fp32" not in found["fp4gemm"]["ratio"]
    assert "unfused: post-scale" in found["fp4gemm"]["ratio"]


def test_a_wrong_post_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline that drops the column vector, as a scalar GEMM would."""
    monkeypatch.setattr(
        dense.post_scale, "post_scale", lambda d, row, col: d.copy_(d.float() * row.unsqueeze(1))
    )
    found = named(run("dense", "--shapes", "16x64x96"))
    assert "off by" in found["unfused: post-scale"]["refused"]


def test_a_kernel_that_is_missing_is_absent_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **options: object) -> torch.Tensor:
        raise NotImplementedError("a: no kernel for this device")

    monkeypatch.setattr(fp4gemm, "mm", absent)
    found = named(run("dense", "--shapes", "16x64x96"))
    assert "no kernel for this device" in found["fp4gemm"]["absent"]
    assert "us" in found["torch fp32"]


def test_a_case_that_does_not_fit_says_so() -> None:
    def rows() -> Iterator[dict[str, object]]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")
        yield {}

    (row,), whole = runner.measured(Job("hopper dense 1x2x3", "hopper dense", rows), cpu_harness())
    assert (row["bench"], row["case"], row["contender"]) == ("hopper dense", "hopper dense 1x2x3", "all")
    assert row["refused"] == "OutOfMemoryError: CUDA out of memory."
    assert not whole  # so that a later run tries again


def test_unquantized_activations_are_checked_but_for_rounding() -> None:
    gen = torch.Generator().manual_seed(0)
    w = products.gaussian_weights(32, 64, CPU, gen)
    x = torch.randn(5, 64, generator=gen).bfloat16()

    def far(call: Callable[[], object], values: torch.Tensor) -> str | None:
        return verify.far(call, (5, 32), [(slice(0, 5), x, lambda: values)], torch.bfloat16)

    call = lambda: fp4gemm.mm(x, w)  # noqa: E731
    assert far(call, w.dequantize()) is None
    assert "is off by" in str(far(call, 1.02 * w.dequantize()))
    assert far(lambda: call() * torch.nan, w.dequantize()) == "holds numbers that are not finite"
    assert (
        far(lambda: call().T, w.dequantize()) == "returned shape (32, 5), must be a tensor of shape (5, 32)"
    )
    assert "returned a int" in str(far(lambda: 1, w.dequantize()))


def test_one_wrong_number_is_seen_and_roundings_are_not() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(200, 64, generator=gen), torch.randn(300, 64, generator=gen)
    once = (a.double() @ b.double().T).bfloat16()
    assert verify.off_by(once, a, b) is None
    assert verify.off_by((once.float() * 1.001).bfloat16(), a, b) is None  # rounded once more
    for i, j in ((0, 0), (100, 150), (199, 299)):
        bad = once.clone()
        bad[i, j] += 8 * bad.float().std().bfloat16()
        assert "is off by" in str(verify.off_by(bad, a, b))
    swapped = once.clone()
    swapped[[3, 4]] = once[[4, 3]]
    assert "is off by" in str(verify.off_by(swapped, a, b))


def test_a_replay_must_leave_what_a_call_returns() -> None:
    x = torch.randn(4, 16)
    assert verify.replayed(x, x.clone, exact=True) is None
    assert verify.replayed(fp4gemm.quantize(x), lambda: fp4gemm.quantize(x), exact=True) is None
    reason = verify.replayed(1.001 * x, x.clone, exact=True)
    assert reason == "result: a replay of its graph gives other bits than a call"
    assert verify.replayed(1.001 * x, x.clone, exact=False) is None  # a baseline may sum in any order
    assert "differs by" in str(verify.replayed(torch.zeros_like(x), x.clone, exact=False))
    assert "differs by" in str(verify.replayed(x * torch.nan, x.clone, exact=False))


def test_a_failure_during_timing_refuses_that_contender_alone() -> None:
    class Failing(type(cpu_harness())):  # type: ignore[misc]
        def measure(self, contenders: Any, flop: float, exact: Any, ahead: Any) -> Any:
            assert set(exact) == {"fp4gemm", "fp4gemm W4A4"}
            timings, _ = super().measure({k: v for k, v in contenders.items() if k != "fp4gemm"}, flop)
            timings.pop("torch fp32")
            return timings, {"fp4gemm": "other bits", "torch fp32": "cannot be captured"}

    harness = cpu_harness()
    harness.__class__ = Failing
    args = parser().parse_args(["dense", "--shapes", "3x64x96"])
    (job,) = dense.jobs(args, harness)
    found = named(runner.measured(job, harness)[0])
    assert found["fp4gemm"]["refused"] == "other bits"
    assert found["torch fp32"]["absent"] == "cannot be captured"
    assert found["unfused: post-scale"]["ratio"].keys() == {"scalar alpha", FP8_PRODUCT}


def test_a_baseline_that_raises_is_absent_and_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(torch, "mm", lambda a, b: broken())
    monkeypatch.setattr(fp4gemm, "mm", broken)
    found = named(run("dense", "--shapes", "3x64x96"))
    assert found["torch fp32"]["absent"] == "RuntimeError: no such thing"
    assert found["fp4gemm"]["refused"] == "RuntimeError: no such thing"
    assert "refused" in found["scalar alpha"]
