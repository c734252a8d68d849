"""bench dense, grouped, layer, sweep, overhead and hopper: who takes part, who is refused, what rows hold.

Everything runs on the CPU; the code of Hopper and Blackwell is run there too, with stand-ins for rivals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import CPU, cpu_harness, named, run
from fp4gemm.device import products

from bench.__main__ import parser
from bench.baselines import cublaslt
from bench.commands import dense, grouped, overhead, runner, sweep
from bench.measure import models, routing, verify
from bench.measure.contest import Job

# ---- on the CPU -------------------------------------------------------------------------------------------


def test_dense() -> None:
    rows = run("dense", "--shapes", "48x128", "3x64x96", "--m", "1,5")
    assert list(dict.fromkeys(row["case"] for row in rows)) == [
        "dense 1x48x128",
        "dense 5x48x128",
        "dense 3x64x96",
    ]
    found = named([row for row in rows if row["m"] == 5])
    assert set(found) == {"fp4gemm", "scalar alpha", "unfused: post-scale", "torch fp32"}
    ours = found["fp4gemm"]
    assert (ours["kernel"], ours["checked"], ours["role"]) == ("reference", "bit for bit", "ours")
    assert set(ours["ratio"]) == {"scalar alpha", "unfused: post-scale", "torch fp32"}
    assert ours["ratio"]["torch fp32"] == pytest.approx(found["torch fp32"]["us"] / ours["us"], rel=0.1)
    num_bytes = (5 * 64 + 128 * 8 + 4 * 5) + (48 * 64 + 128 * 8 + 4 * 48) + 2 * 5 * 48
    assert ours["gb_s"] == pytest.approx(num_bytes / ours["us"] / 1e3, rel=0.01)
    assert ours["tflop_s"] == pytest.approx(2 * 5 * 48 * 128 / ours["us"] / 1e6, rel=0.01)


@pytest.mark.parametrize("name", list(routing.ROUTINGS))
def test_grouped(name: str) -> None:
    rows = run("grouped", "--shapes", "8x32x64", "--top-k", "2", "--m", "6", "--routing", name)
    found = named(rows)
    assert set(found) == {"fp4gemm", "unfused: expert by expert", "torch fp32"}
    assert not any("refused" in row for row in rows)
    assert {row["m"] for row in rows} == {12}
    ends = routing.routed_ends(6, 8, 2, name)
    active = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    assert found["fp4gemm"]["active"] == active
    one = 32 * 32 + 128 * 4 + 4 * 32

    assert found["fp4gemm"]["gb_s"] * found["fp4gemm"]["us"] * 1e3 > active * one


def test_experts_that_are_shared_out_may_get_no_token() -> None:
    rows = run("grouped", "--model", "llama-4-scout", "--ep", "16", "--m", "1")
    assert [row["absent"] for row in rows] == ["no token came to these experts: nothing to measure"] * 2


def test_layer() -> None:
    rows = run("layer", "--shapes", "48x128", "--m", "5")
    found = named(rows)
    assert set(found) == {"fp4gemm", "scalar alpha", "unfused: post-scale", "torch fp32"}
    assert not any("refused" in row for row in rows)
    num_bytes = 4 * 5 * 128 + (48 * 64 + 128 * 8 + 4 * 48) + 2 * 5 * 48
    assert found["fp4gemm"]["gb_s"] * found["fp4gemm"]["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)
    num_bytes = 4 * (5 * 128 + 48 * 128 + 5 * 48)
    assert found["torch fp32"]["gb_s"] * found["torch fp32"]["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)


def test_overhead() -> None:
    found = named(run("overhead"))
    assert {"mm", "grouped_mm", "quantize", "nn.Linear", "torch.mm"} <= set(found)
    assert all(row["us"] > 0 for row in found.values())


@pytest.mark.parametrize("preset", list(sweep.PRESETS))
def test_sweeps(preset: str) -> None:
    rows = run("sweep", preset, "--m", "32", "--k", "64")
    assert not any("refused" in row or "absent" in row for row in rows)
    assert len(rows) >= 2
    assert {row["bench"] for row in rows} == {f"sweep {preset}"}


def test_sweeps_have_the_published_sizes() -> None:
    args = parser().parse_args(["sweep", "gemm"])
    harness = cpu_harness()
    harness.is_cuda = True
    keys = [job.key for job in sweep.jobs(args, harness)]
    assert len(keys) == 18
    assert (keys[0], keys[-1]) == ("sweep gemm 1024x2048x2048", "sweep gemm 32768x8192x8192")


# ---- who is wrong is refused ------------------------------------------------------------------------------


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
    """Its product is right for what it made of the input, which is not what it had to make."""
    right = fp4gemm.quantize

    def wrong(x: torch.Tensor, **options: Any) -> fp4gemm.NVFP4Tensor:
        t = right(x, **options)
        return fp4gemm.NVFP4Tensor(t.codes ^ 0x88, t.scales, t.amax, t.e4m3_max, t.offs)

    monkeypatch.setattr(fp4gemm, "quantize", wrong)
    found = named(run(command, "--shapes", "3x64x96"))
    refused = "differ from the reference" if command == "dense" else "differ"
    assert refused in found["fp4gemm"]["refused"]


def test_what_is_timed_is_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function is wrong though everything below it is right."""
    right = fp4gemm.mm
    monkeypatch.setattr(fp4gemm, "mm", lambda *args, **options: torch.zeros_like(right(*args, **options)))
    found = named(run("dense", "--shapes", "3x64x96"))
    for name in ("fp4gemm", "scalar alpha", "unfused: post-scale"):
        assert "refused" in found[name]
    assert [name for name, row in found.items() if "us" in row] == ["torch fp32"]


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
    right = grouped.Field._loop_of_mm

    def wrong(self: Any, stack: torch.Tensor) -> torch.Tensor:
        out = right(self, stack)
        _, begin, end = self.occupied[1]
        out[begin:end] = 0
        return out

    monkeypatch.setattr(grouped.Field, "_loop_of_mm", wrong)
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
    """A rival that drops the column vector, as a scalar GEMM would."""
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
    assert verify.replayed(1.001 * x, x.clone, exact=False) is None  # a rival that adds up in any order
    assert "is off by" in str(verify.replayed(torch.zeros_like(x), x.clone, exact=False))
    assert "is off by" in str(verify.replayed(x * torch.nan, x.clone, exact=False))


def test_who_fails_while_timed_is_refused_and_the_others_are_not() -> None:
    class Failing(type(cpu_harness())):  # type: ignore[misc]
        def measure(self, contenders: Any, flop: float, exact: Any) -> Any:
            assert set(exact) == {"fp4gemm"}
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
    assert found["unfused: post-scale"]["ratio"].keys() == {"scalar alpha"}


def test_a_rival_that_raises_is_absent_and_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(torch, "mm", lambda a, b: broken())
    monkeypatch.setattr(fp4gemm, "mm", broken)
    found = named(run("dense", "--shapes", "3x64x96"))
    assert found["torch fp32"]["absent"] == "RuntimeError: no such thing"
    assert found["fp4gemm"]["refused"] == "RuntimeError: no such thing"
    assert "refused" in found["scalar alpha"]


# ---- the code of other devices ----------------------------------------------------------------------------


def test_dense_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    found = named(run("dense", "--shapes", "5x64x128", major=9))
    timed = {name for name, row in found.items() if "us" in row}
    assert timed == {
        "fp4gemm",
        "fp4gemm, packed tokens",
        "fp4gemm, both packed",
        "fp4gemm, both decoded",
        "fp4gemm W4A16",
        "scalar alpha",
        "unfused: post-scale",
        "torch bf16",
    }
    assert "humming" in found["humming"]["absent"]
    assert found["fp4gemm W4A16"]["checked"] == "but for rounding"
    assert not any("refused" in row for row in found.values())


@pytest.mark.parametrize("command", ["dense", "layer"])
def test_decoded_tokens_are_compared_too(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    right = fp4gemm.quantize

    def wrong(x: torch.Tensor, **options: Any) -> Any:
        made = right(x, **options)
        if options.get("decoded"):
            made.data[0, 0] += 1
        return made

    monkeypatch.setattr(fp4gemm, "quantize", wrong)
    found = named(run(command, "--shapes", "5x64x128", major=9))
    assert found["fp4gemm"]["refused"].startswith("its tokens: data: ")
    assert "us" in found["fp4gemm, packed tokens"]


def test_grouped_and_layer_on_hopper() -> None:
    found = named(run("grouped", "--shapes", "4x64x128", "--m", "9", major=9))
    assert {"fp4gemm", "fp4gemm, packed tokens", "fp4gemm W4A16"} <= set(found)
    assert not any("refused" in row for row in found.values())
    found = named(run("layer", "--shapes", "5x64x128", major=9))
    assert {"fp4gemm", "fp4gemm, packed tokens", "unfused: post-scale"} <= set(found)
    assert not any("refused" in row for row in found.values())


@pytest.fixture
def with_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions for Blackwell with their own signatures, made of the reference."""
    scaling, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    recipe = [scaling.BlockWise1x16, scaling.TensorWise]
    swizzles = [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]

    def scaled_mm(
        mat_a: Any,
        mat_b: Any,
        scale_a: Any,
        scale_recipe_a: Any,
        scale_b: Any,
        scale_recipe_b: Any,
        swizzle_a: Any = None,
        swizzle_b: Any = None,
        bias: Any = None,
        output_dtype: Any = torch.bfloat16,
        offs: Any = None,
    ) -> torch.Tensor:
        assert [scale_recipe_a, scale_recipe_b] == [recipe, recipe]
        assert [swizzle_a, swizzle_b] == [swizzles, swizzles]
        assert mat_a.dtype is mat_b.dtype is torch.float4_e2m1fn_x2
        a, b = mat_a.view(torch.uint8), mat_b.view(torch.uint8)
        if offs is None:
            assert scale_a[1].numel() == scale_b[1].numel() == 1
            return fp4gemm.scaled_mm(
                a, b.t(), scale_a[0], scale_b[0], alpha=float(scale_a[1] * scale_b[1]), out_dtype=output_dtype
            )
        weights = b.transpose(1, 2).contiguous()
        g, n, packed = weights.shape
        # As torch wants them: a matrix's scales in one row, and one multiplier for the tokens.
        padded = -(-n // 128) * 128, -(-packed // 32) * 4
        assert scale_b[0].shape == (g, padded[0] * padded[1])
        assert (scale_a[1].numel(), scale_b[1].numel()) == (1, g)
        tokens = torch.full((a.shape[0],), float(scale_a[1]) * 6 * 448)
        one = fp4gemm.NVFP4Tensor(a, scale_a[0], tokens, offs=offs)
        scales = scale_b[0].view(g, *padded)
        stack = fp4gemm.NVFP4Tensor(weights, scales, scale_b[1].view(-1, 1) * 6 * 448)
        return fp4gemm.grouped_mm(one, stack, offs)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_mm)
    monkeypatch.setattr(cublaslt, "absent", lambda device, name="": None)
    monkeypatch.setattr(dense.post_scale, "compiled", lambda: dense.post_scale.post_scale)


@pytest.mark.usefixtures("with_cublaslt")
def test_dense_on_blackwell() -> None:
    found = named(run("dense", "--shapes", "5x64x128", major=10))
    assert not any("refused" in row or "absent" in row for row in found.values())
    assert {"cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"} <= set(found["fp4gemm"]["ratio"])


@pytest.mark.usefixtures("with_cublaslt")
def test_grouped_and_layer_on_blackwell() -> None:
    found = named(run("grouped", "--shapes", "4x64x128", "--m", "9", major=10))
    assert "us" in found["torch nvfp4 scaled_grouped_mm, scalar alpha"], found
    found = named(run("layer", "--shapes", "5x64x128", major=10))
    assert "cuBLASLt nvfp4 + post-scale" in found["fp4gemm"]["ratio"]


@pytest.mark.usefixtures("with_cublaslt")
def test_a_cublaslt_that_drops_the_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one of CUDA 13.2 Update 1 may: its figures must not be anyone's yardstick."""
    right = torch.nn.functional.scaled_mm

    def wrong(a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, *rest: Any, **options: Any) -> Any:
        ones = [torch.ones_like(scale_a[1]), torch.ones_like(scale_b[1])]
        return right(a, b, [scale_a[0], ones[0]], recipe_a, [scale_b[0], ones[1]], *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", wrong)
    found = named(run("dense", "--shapes", "5x64x128", major=10))
    for name in ("cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"):
        assert "refused" in found[name]
        assert name not in found["fp4gemm"]["ratio"]


def test_cublaslt_is_absent_here() -> None:
    assert cublaslt.absent(CPU) == "NVFP4 products of torch are for NVIDIA GPUs"


def test_overhead_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(overhead, "_calls", lambda harness: {"mm": absent})
    assert [row["absent"] for row in run("overhead")] == ["NotImplementedError: no kernel"]


def test_jobs_have_names_of_their_own() -> None:
    harness = cpu_harness()
    harness.is_cuda, args = True, argparse.Namespace(m=None, shapes=None, model=None, kernels=None)
    harness.major = 10
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
