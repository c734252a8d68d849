"""bench hopper: its bars and rows; the whole of it on the CPU with small sizes and made-up times."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import _products

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import bars, hopper, hopper_grouped, machine, peers, read_floor, verify
from bench.__main__ import parser
from bench.timing import MIN_CALLS, Call, Timing, calls_for, sets
from bench.traffic import Bar

CPU = torch.device("cpu")


# ---- bars -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "wanted"),
    [
        (1, 8192, 8192, "2.60 of torch bf16, 1.40 of humming"),
        (16, 8192, 8192, "2.60 of torch bf16, 1.40 of humming"),
        (17, 8192, 8192, "2.10 of torch bf16, 1.00 of humming"),
        (64, 8192, 8192, "2.00 of torch bf16, 1.00 of humming"),
        (128, 8192, 8192, "1.40 of torch bf16, 1.00 of humming"),
        (256, 8192, 8192, "1.00 of torch bf16, 1.00 of humming"),
        (512, 8192, 8192, "0.97 of torch bf16, 1.00 of humming"),
        (8192, 8192, 8192, "0.97 of torch bf16, 1.00 of humming"),
        (16, 16384, 16384, "3.00 of torch bf16, 1.40 of humming"),
        (4, 28672, 16384, "3.00 of torch bf16, 1.40 of humming"),
        (64, 16384, 16384, "1.00 of humming"),
        (8, 4096, 4096, "1.80 of torch bf16, 1.40 of humming"),
        (32, 4096, 4096, "1.00 of humming"),
    ],
)
def test_dense_bars(m: int, n: int, k: int, wanted: str) -> None:
    assert ", ".join(str(bar).removeprefix(">= ") for bar in bars.dense(m, n, k)) == wanted


def test_grouped_bars() -> None:
    assert [str(bar) for bar in bars.grouped(1)] == [">= 0.65 of read floor", ">= 2.50 of torch bf16"]
    assert bars.grouped(16) == bars.grouped(1)
    assert bars.grouped(64) == ()
    assert bars.grouped(256) == (Bar(0.95, bars.BF16),)


def timing(us: float) -> Timing:
    return Timing(us, us, us)


@pytest.mark.parametrize(
    ("us", "text", "met"),
    [
        (
            {"mm": 10, "torch bf16": 26, "humming": 15},
            ">= 2.60 of torch bf16 (2.60); >= 1.40 of humming (1.50)",
            True,
        ),
        (
            {"mm": 10, "torch bf16": 25, "humming": 15},
            ">= 2.60 of torch bf16 (2.50 MISSED); >= 1.40 of humming (1.50)",
            False,
        ),
        (
            {"mm": 10, "torch bf16": 27},
            ">= 2.60 of torch bf16 (2.70); >= 1.40 of humming (not measured)",
            True,
        ),
        ({"mm": 10}, ">= 2.60 of torch bf16 (not measured); >= 1.40 of humming (not measured)", None),
    ],
)
def test_verdicts(us: Mapping[str, float], text: str, met: bool | None) -> None:
    found = bars.judged("mm", bars.dense(1, 8192, 8192), {name: timing(x) for name, x in us.items()})
    assert found == {"bar": text, "met": met}


def test_rows_have_rates_and_ratios() -> None:
    timings = {
        "mm": timing(10.0),
        "torch bf16": timing(30.0),
        "humming": timing(20.0),
        "read floor": timing(8.0),
    }
    work = {"flop": 2e9, "bytes": 36e6}
    refused = {"torch fp16": "off by 1", "mm, a nvfp4": "wrong"}
    rows = list(bars.table({"m": 1}, timings, refused, bars.dense(1, 8192, 8192), "mm", work))
    by_name = {row["contender"]: row for row in rows}
    ours, torch_row, floor = by_name["mm"], by_name["torch bf16"], by_name["read floor"]
    assert (ours["tflop_s"], ours["weight_gb_s"], ours["of_floor"]) == (200.0, 3600, 0.8)
    assert (ours["of_torch_bf16"], ours["of_humming"], ours["met"]) == (3.0, 2.0, True)
    assert torch_row["weight_gb_s"] == round(36e6 * 32 / 9 / 30.0 / 1e3)
    assert (floor["weight_gb_s"], "tflop_s" in floor, "of_torch_bf16" in floor) == (4500, False, False)
    assert by_name["mm, a nvfp4"]["refused"] == "wrong"
    assert "not checked" in str(by_name["humming"]["note"])
    gone = list(bars.table({}, {}, {"mm": "wrong", "humming": "none"}, bars.END_TO_END, "mm", work))
    assert gone == [
        {"contender": "mm", "refused": "wrong", "met": False},
        {"contender": "humming", "absent": "none"},
    ]


def test_a_graph_has_calls_enough_but_no_more() -> None:
    assert calls_for(1.0) == MIN_CALLS
    assert calls_for(2.0 * 8192**3) == 2
    assert calls_for(600e6 * 500) == 4
    assert [sets(size, 50) for size in (10, 149, 150, 1000)] == [15, 2, 1, 1]


# ---- verification -----------------------------------------------------------------------------------------


def test_unquantized_activations_are_checked_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = torch.Generator().manual_seed(0)
    w = _products.gaussian_weights(32, 64, CPU, gen)
    x = torch.randn(5, 64, generator=gen).bfloat16()
    product = _products.Product(x, w, w)
    assert verify.far(product, w.dequantize()) is None
    assert "off by" in str(verify.far(product, 1.02 * w.dequantize()))
    monkeypatch.setattr(_products.Product, "run", lambda self, out: out)
    assert verify.far(product, w.dequantize()) == "holds numbers that are not finite"


# ---- the whole bench --------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes on the CPU; a contender's time is the number of its calls, each of which is made."""

    def timed(contenders: Mapping[str, Sequence[Call]], rounds: int, min_calls: int) -> dict[str, Timing]:
        for calls in contenders.values():
            for call in calls:
                call()
        return {name: timing(float(len(calls))) for name, calls in contenders.items()}

    for module in (hopper, hopper_grouped):
        monkeypatch.setattr(module, "time_interleaved", timed)
    monkeypatch.setattr(machine, "device", lambda: CPU)
    monkeypatch.setattr(machine, "l2_bytes", lambda: 2000)
    monkeypatch.setattr(read_floor, "absent", lambda: "no such thing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(hopper, "SHAPES", dict.fromkeys(hopper.SHAPES, ((64, 128),)))
    monkeypatch.setattr(hopper, "ROWS", dict.fromkeys(hopper.ROWS, ((1, 3), (2,))))
    model = hopper_grouped.Model("small", 4, 2, ((64, 96),))
    monkeypatch.setattr(hopper_grouped, "MODELS", (model,))
    monkeypatch.setitem(sys.modules, "humming", None)  # type: ignore[arg-type]


def run(*line: str) -> list[dict[str, Any]]:
    args = parser().parse_args(["hopper", *line])
    return list(hopper.run(args))


@pytest.mark.usefixtures("on_cpu")
def test_dense_parts() -> None:
    rows = run("--only", "dense", "e2e")
    assert rows[-1] == {"bench": "hopper", "bars_met": 2, "bars_missed": 0}  # those of e2e: 2 inputs each
    dense = [row for row in rows if row.get("part") == "dense" and row["m"] == 3]
    assert {row["contender"]: "us" in row for row in dense} == {
        "mm": True,
        "mm, a nvfp4": True,
        "mm, a bf16 (W4A16)": True,
        "mm, a fp16 (W4A16)": True,
        "torch fp16": True,
        "torch bf16": True,
        "humming": False,
        "read floor": False,
    }
    assert not any("refused" in row for row in rows)
    end = [row["contender"] for row in rows if row.get("part") == "e2e" and row["m"] == 1]
    assert end == ["quantize + mm", "quantize packed + mm", "torch bf16"]


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp4gemm.gemm.mm

    def wrong(a: Any, b: Any, **options: Any) -> torch.Tensor:
        out = right(a, b, **options)
        out.view(torch.int16)[0, 5] ^= 1
        return out

    monkeypatch.setattr(fp4gemm.gemm, "mm", wrong)
    rows = run("--only", "small", "--quick")
    refused = {row["contender"]: row["refused"] for row in rows if "refused" in row}
    assert set(refused) == {"mm", "mm, a nvfp4"}  # one bit is no error of a sum that rounds
    assert "1 of 128 elements differ, the first, at row 0, column 5" in refused["mm"]
    assert rows[-1]["bars_missed"] == 1


@pytest.mark.usefixtures("on_cpu")
def test_grouped_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda x, w, offs: torch.cat(
            [part @ w[e] for e, part in enumerate(x.tensor_split(offs.tolist()[:-1]))]
        ),
        raising=False,
    )
    rows = run("--only", "grouped", "--m", "1", "128")
    assert not any("refused" in row for row in rows)
    assert {row["contender"] for row in rows[:-1]} == {
        "grouped_mm",
        "grouped_mm, a nvfp4",
        "torch bf16",
        "read floor",
    }
    loads = {row["rows_an_expert"]: row for row in rows[:-1] if row["contender"] == "grouped_mm"}
    assert (loads[128]["active"], loads[128]["bar"][:7]) == (4, ">= 0.95")
    assert 2 <= loads[1]["active"] <= 4


def test_routed_ends() -> None:
    gen = torch.Generator().manual_seed(0)
    ends = hopper_grouped.routed_ends(64, 16, 4, gen)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert (ends.dtype, int(ends[-1]), len(ends)) == (torch.int32, 256, 16)
    assert int(sizes.max()) <= 64  # no token takes an expert twice
    assert _products.occupied_groups(torch.tensor([0, 2, 2, 5])) == [(1, 0, 2), (3, 2, 5)]


# ---- rivals -----------------------------------------------------------------------------------------------


def test_humming_that_is_absent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)  # type: ignore[arg-type]
    peer = peers.Humming()
    peer.prepare({(64, 64): (1,)})
    calls, reason = peer.calls(64, 64, [torch.ones(1, 64)])
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
    peer = peers.Humming()
    peer.prepare({(64, 128): (1, 16)})
    assert peer.absent is None
    assert set(compiled) == {("64x128", '{"m": 1}'), ("64x128", '{"m": 16}')}
    calls, reason = peer.calls(64, 128, [torch.ones(16, 128)] * 3)
    assert reason is None
    seen.clear()
    for call in calls:
        call()
    assert len({layer for layer, _ in seen}) == 3
    assert [tuning for _, tuning in seen] == [{"m": 16}] * 3
