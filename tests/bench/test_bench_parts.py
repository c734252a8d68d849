"""bench: roofline, ratios, rotation, models, routings, humming, facts of the machine."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import BLACKWELL, CPU, GEFORCE, HOPPER, cpu_harness, named

from bench.baselines import humming
from bench.measure import harness, library, machine, models, operands, routing
from bench.measure.contest import Contender, Contest, times
from bench.measure.harness import Measured
from bench.measure.library import MIN_CALLS, Timing, calls_for, sets
from bench.measure.roofline import Roofline, Work

# ---- arithmetic -------------------------------------------------------------------------------------------


def test_roofline() -> None:
    bounds = Roofline(4000.0, 4400.0, {"16 bit": 800.0})
    weights = Work(2.0 * 8192 * 8192, 75_497_472)
    assert bounds.bound(weights) == "memory"
    assert bounds.least_us(weights) == pytest.approx(75_497_472 / 4400e3)
    square = Work(2.0 * 8192**3, 400_000_000)
    assert bounds.bound(square) == "compute"
    assert bounds.least_us(square) == pytest.approx(2 * 8192**3 / 800e6)
    assert bounds.least_us(square._replace(unit="nvfp4")) == bounds.memory_us(square)  # no such peak known


def test_the_calls_ahead_are_in_the_graphs_and_not_in_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def call(name: str) -> Any:
        return lambda: done.append(name)

    def timed(contenders: Any, rounds: int, calls: int, results: Any, settle: float) -> dict[str, Timing]:
        results |= dict.fromkeys(contenders)
        for name, each in contenders.items():
            done.append(f"{name}:")
            for one in each:
                one()
        us = {"mine": 10.0, "other": 15.0, harness.AHEAD: 1.5}
        return {name: Timing(us[name], us[name] - 0.25, us[name] + 0.25) for name in contenders}

    monkeypatch.setattr(harness, "time_interleaved", timed)
    monkeypatch.setattr(harness.launches, "count", lambda call: 1)
    on_gpu = cpu_harness()
    on_gpu.is_cuda, on_gpu.eager = True, False
    contenders = {"mine": [call("a0"), call("a1"), call("a2")], "other": [call("b0")]}
    made, failed = on_gpu.measure(contenders, 1.0, (), [call("x0"), call("x1")])
    want = ["mine:", "x0", "a0", "x1", "a1", "x0", "a2", "other:", "x0", "b0", "ahead:", "x0", "x1"]
    assert (done, failed) == (want, {})
    assert made["mine"].timing == Timing(8.5, 8.25, 8.75)
    assert (made["other"].timing.median_us, made["other"].ahead_us) == (13.5, 1.5)
    assert times(made["mine"]) == {"us": 8.5, "p10_us": 8.25, "p90_us": 8.75, "ahead_us": 1.5, "launches": 1}
    done.clear()
    made, _ = on_gpu.measure(contenders, 1.0)
    assert done == ["mine:", "a0", "a1", "a2", "other:", "b0"]
    assert made["mine"] == Measured(Timing(10.0, 9.75, 10.25), launches=1)


def test_tokens_are_written_as_a_norm_writes_them() -> None:
    tokens = operands.Tokens(operands.Weights(cpu_harness(), 16, 64), 3)
    assert tokens.count > 1
    first = tokens.plain[0].clone()
    for x, write in zip(tokens.plain, tokens.writers(), strict=True):
        x.fill_(torch.nan)
        assert write() is x
        assert torch.equal(x, first)


def test_ratios_are_of_the_same_run() -> None:
    class Timed(type(cpu_harness())):  # type: ignore[misc]
        def measure(self, contenders: Any, flop: float, exact: Any, ahead: Any) -> Any:
            us = {"mine": 10.0, "other": 15.0, "baseline": 30.0, "floor": 5.0}
            return {name: Measured(Timing(value, 1, 2)) for name, value in us.items()}, {}

    harness = cpu_harness()
    harness.__class__ = Timed
    made = Contest({"case": "c"})
    work = Work(2e9, 36_000_000, "fp32")
    for name, role in (("mine", "ours"), ("other", "ours"), ("baseline", "baseline"), ("floor", "floor")):
        made.enter(name, Contender([int], work, role))
    made.enter("bad", Contender([int], work), "wrong")
    made.absent["gone"] = "not installed"
    found = named(list(made.rows(harness)))
    assert found["mine"]["ratio"] == {"baseline": 3.0, "floor": 0.5}
    assert found["baseline"]["ratio"] == {"floor": 0.1667}
    assert "ratio" not in found["floor"]
    assert (found["mine"]["tflop_s"], found["mine"]["gb_s"]) == (200.0, 3600.0)
    assert (found["mine"]["of_roofline"], found["mine"]["bound"]) == (2000.0, "compute")
    assert (found["bad"]["refused"], found["gone"]["absent"]) == ("wrong", "not installed")


def test_a_graph_has_calls_enough_but_no_more() -> None:
    assert calls_for(1.0) == MIN_CALLS
    assert calls_for(2.0 * 8192**3) == 2
    assert calls_for(600e6 * 500) == 4
    assert [sets(size, 50) for size in (10, 149, 150, 1000)] == [15, 2, 1, 1]


def test_operands_rotate() -> None:
    harness = cpu_harness()
    harness.l2_bytes = 10_000
    weights = operands.Weights(harness, 64, 128)
    assert len(weights.packed) == 7  # of 4608 bytes each
    assert len(weights.plain) == 2
    tokens = operands.Tokens(weights, 3)
    assert len(tokens.plain) == 6  # with what a call writes
    assert len(operands.Tokens(weights, 512).plain) == 2
    seen: list[tuple[Any, Any]] = []
    for call in operands.calls(lambda a, b: seen.append((a, b)), [1], [2, 3]):
        call()
    assert seen == [(1, 2), (1, 3)]


def test_the_harness_keeps_one_object_of_a_kind() -> None:
    harness, made = cpu_harness(), []
    for key in ("a", "a", "b", "a"):
        harness.keep("weights", key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made == ["a", "b", "a"]


# ---- models and routings ----------------------------------------------------------------------------------


def test_models() -> None:
    assert [layer.n for layer in models.dense_layers(["llama-3.1-8b"])] == [6144, 4096, 28672, 4096]
    first, second = models.expert_layers(["deepseek-v3"], 8)
    assert first == models.Routed("deepseek-v3", "gate_up", 32, 8, 4096, 7168)
    assert second == models.Routed("deepseek-v3", "down", 32, 8, 7168, 2048)
    (up, _) = models.expert_layers(["nemotron-3-nano"])
    assert (up.layer, up.n, up.k) == ("up", 1856, 2688)  # not gated
    for name in models.NAMES:
        for _, n, k in next(m for m in models.MODELS if m.name == name).layers:
            assert (n % 8, k % 32) == (0, 0)
    with pytest.raises(ValueError, match="lists experts alone"):
        models.dense_layers(["kimi-k2"])
    with pytest.raises(ValueError, match="has no experts"):
        models.expert_layers(["square"])
    with pytest.raises(ValueError, match="7 does not divide the 128 experts"):
        models.expert_layers(["qwen3-30b"], 7)


@pytest.mark.parametrize("name", list(routing.ROUTINGS))
def test_routings(name: str) -> None:
    ends = routing.routed_ends(64, 16, 4, name)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert (ends.dtype, int(ends[-1]), len(ends)) == (torch.int32, 256, 16)
    assert int(sizes.max()) <= 64  # no token chooses an expert twice
    assert torch.equal(ends, routing.routed_ends(64, 16, 4, name))
    busiest = int(sizes.max())
    assert {"uniform": 8 < busiest < 30, "zipf": busiest > 30, "onehot": busiest == 64, "empty": True}[name]
    if name == "empty":
        assert sizes[3::4].sum() == 0
        assert (sizes.view(4, 4)[:, :3] > 0).all()


def test_routing_over_devices() -> None:
    every = routing.routed_ends(64, 16, 4)
    here = routing.routed_ends(64, 4, 4, ways=4)
    assert torch.equal(here, every[:4])
    with pytest.raises(ValueError, match="must be at most 12"):
        routing.routed_ends(1, 16, 13, "empty")
    with pytest.raises(ValueError, match="must be one of uniform"):
        routing.routed_ends(1, 16, 1, "even")


# ---- baselines --------------------------------------------------------------------------------------------


def test_humming_that_is_absent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    calls, reason = humming.Humming([(64, 64, 1)]).calls(64, 64, [torch.ones(1, 64)])
    assert calls == []
    assert "humming" in str(reason)


def test_humming_is_called_with_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the same interface: each layer random, each m with its own configuration."""
    seen: list[Any] = []

    class Layer(torch.nn.Module):
        def __init__(self, n: int, k: int, **options: Any) -> None:
            super().__init__()
            assert options["weight_config"]["scale_dtype"] == "float8e4m3"
            self.weight = torch.nn.Parameter(torch.zeros(n, k // 8, dtype=torch.int32), requires_grad=False)
            self.weight_scale = torch.nn.Parameter(
                torch.zeros(n, k // 16).to(torch.float8_e4m3fn), requires_grad=False
            )
            self.humming_config = SimpleNamespace(to_str=lambda: f"{n}x{k}")

        def cuda(self) -> Layer:  # type: ignore[override]
            return self

        def transform(self) -> None:
            assert self.weight.unique().numel() > 100
            scales = self.weight_scale.float()
            assert 0 < float(scales.min()) <= float(scales.max()) < 1

        def forward(self, x: torch.Tensor, tuning_config: object) -> torch.Tensor:
            seen.append((id(self), tuning_config))
            return x

    compiled: list[tuple[str, str]] = []

    class Kernel:
        @staticmethod
        def prepare_kernels(layer: str, compute: None, tuning: str, device: int) -> None:
            compiled.append((layer, tuning))

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("humming", "humming.kernel"):
        module(name, __path__=[])
    module("humming.layer", HummingLayer=Layer)
    module("humming.kernel.humming", HummingKernel=Kernel)
    module("humming.tune", get_heuristics_config=lambda config, shape_m, gemm_type, device: {"m": shape_m})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    peer = humming.Humming([(64, 128, 1), (64, 128, 16), (64, 256, 1)])
    calls, reason = peer.calls(64, 128, [torch.ones(16, 128)] * 3)
    assert set(compiled) == {("64x128", '{"m": 1}'), ("64x128", '{"m": 16}'), ("64x256", '{"m": 1}')}
    assert reason is None
    seen.clear()
    for call in calls:
        call()
    assert len({layer for layer, _ in seen}) == 3
    assert [tuning for _, tuning in seen] == [{"m": 16}] * 3
    peer.calls(64, 256, [torch.ones(1, 256)])
    assert len(compiled) == 3  # once for all


# ---- the kernels of a device ------------------------------------------------------------------------------


def kernel(name: str, arch: int, operand: str, mode: str = "dense") -> library.KernelInfo:
    return library.KernelInfo(
        name, mode, "rowcol", arch, (64, 64, 64), (1, 1), torch.bfloat16, operand, False
    )


@pytest.mark.parametrize(
    ("arch", "read", "forms", "names"),
    [
        (90, HOPPER, ("fp16", "prepacked"), ["a", "d", "e8"]),
        (100, BLACKWELL, ("nvfp4", "nvfp4"), ["f"]),
        (120, GEFORCE, ("nvfp4", "nvfp4"), ["g", "h", "i"]),
        (None, frozenset(), ("nvfp4", "nvfp4"), []),
    ],
)
def test_what_is_timed_follows_from_the_kernels_of_the_device(
    arch: int | None,
    read: frozenset[str],
    forms: tuple[str, str],
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [
        kernel("a", 90, "prepacked"),
        kernel("b", 90, "prepacked_bf16", "grouped"),
        kernel("c", 90, "fp16", "grouped"),
        kernel("d", 90, "nvfp4"),
        kernel("e", 90, "nvfp4", "grouped"),
        kernel("e8", 90, "prepacked_fp8"),
        kernel("f", 100, "nvfp4"),
        kernel("g", 120, "nvfp4"),
        kernel("h", 120, "prepacked"),
        kernel("i", 120, "prepacked_bf16"),
    ]
    monkeypatch.setattr(fp4gemm, "kernels", lambda: kernels)
    monkeypatch.setattr(library.kernel_table, "kernel_arch", lambda index: arch)
    device = torch.device("cuda", 7)
    library.kernels_of.cache_clear()
    assert library.operands_read(device) == read
    harness = cpu_harness(read)
    harness.device = device
    assert operands.fastest_forms(harness) == forms
    assert harness.has_nvfp4_cores == (arch in (100, 120))
    assert dict(operands.our_forms(harness))["fp4gemm"] == forms
    cores = "nvfp4" if arch in (100, 120) else harness.unit
    assert operands.unit_of(harness, ("nvfp4", "nvfp4")) == cores
    assert operands.unit_of(harness, ("bf16", "prepacked")) == harness.unit
    assert [name for name, _ in operands.forced(harness, "dense", re.compile(""))] == names
    library.kernels_of.cache_clear()


# ---- the machine ------------------------------------------------------------------------------------------


def test_a_line_of_nvidia_smi() -> None:
    fields = {"sm_mhz": "clocks.sm", "power_w": "power.draw", "driver": "driver_version", "x": "x", "y": "y"}
    found = machine._parsed("1980, 512.34, 580.159.04, [N/A], [Not Supported]", fields)
    assert found == {"sm_mhz": 1980, "power_w": 512.34, "driver": "580.159.04"}


def test_conditions_are_medians_since_then() -> None:
    seen = machine.Monitor(CPU)
    seen._samples = [(1.0, {"sm_mhz": 100}), (2.0, {"sm_mhz": 1500}), (3.0, {"sm_mhz": 1980}), (4.0, {})]
    assert seen.since(1.5) == {"sm_mhz": 1740.0}
    assert seen.since(5.0) == {}


def test_facts_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.describe(CPU)
    assert {"date", "fp4gemm", "torch", "device", "threads", "revision"} <= set(facts)
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    monkeypatch.setenv("FP4GEMM_REVISION", "0123abc")
    assert machine.revision() == "0123abc"


def test_devices() -> None:
    assert machine.device("cpu") == CPU
    with pytest.raises(ValueError, match="must be cpu or cuda"):
        machine.device("mps")
    if not torch.cuda.is_available():
        assert machine.device() == CPU
        with pytest.raises(ValueError, match="sees no CUDA device"):
            machine.device("cuda")
