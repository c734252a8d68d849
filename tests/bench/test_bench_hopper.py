"""bench hopper: its targets, and all its parts on the CPU with small sizes."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from bench_helpers import HOPPER, run

from bench.commands import hopper
from bench.measure import models, targets
from bench.measure.targets import Target

# ---- Hopper's targets -------------------------------------------------------------------------------------


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
def test_dense_targets(m: int, n: int, k: int, wanted: str) -> None:
    assert ", ".join(str(target).removeprefix(">= ") for target in targets.dense(m, n, k)) == wanted


def test_grouped_targets() -> None:
    assert [str(target) for target in targets.grouped(1)] == [
        ">= 0.65 of read floor",
        ">= 2.50 of torch bf16",
    ]
    assert targets.grouped(16) == targets.grouped(1)
    assert targets.grouped(64) == ()
    assert targets.grouped(256) == (Target(0.95, targets.BF16),)


@pytest.mark.parametrize(
    ("row", "text", "met"),
    [
        (
            {"ratio": {"torch bf16": 2.6, "humming": 1.5}},
            ">= 2.60 of torch bf16 (2.60); >= 1.40 of humming (1.50)",
            True,
        ),
        (
            {"ratio": {"torch bf16": 2.5, "humming": 1.5}},
            ">= 2.60 of torch bf16 (2.50 MISSED); >= 1.40 of humming (1.50)",
            False,
        ),
        (
            {"ratio": {"torch bf16": 2.7}},
            ">= 2.60 of torch bf16 (2.70); >= 1.40 of humming (not measured)",
            True,
        ),
        ({}, ">= 2.60 of torch bf16 (not measured); >= 1.40 of humming (not measured)", None),
        ({"refused": "wrong"}, ">= 2.60 of torch bf16; >= 1.40 of humming", False),
    ],
)
def test_verdicts(row: dict[str, Any], text: str, met: bool | None) -> None:
    assert targets.judged(row, targets.dense(1, 8192, 8192)) == {"target": text, "met": met}


def test_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    monkeypatch.setattr(hopper, "SHAPES", dict.fromkeys(hopper.SHAPES, ((64, 128),)))
    monkeypatch.setattr(hopper, "ROWS", dict.fromkeys(hopper.ROWS, ((1, 3), (2,))))
    experts = models.Routed("small", "down", 4, 2, 64, 96)
    monkeypatch.setattr(hopper, "expert_layers", lambda names: [experts])
    rows = run("hopper", "--only", "dense", "e2e", "grouped", "--quick", "--m", "1", "128", operands=HOPPER)
    assert not any("refused" in row for row in rows)
    held = {row["case"]: re.sub(r"\([0-9].*?\)", "(found)", row["target"]) for row in rows if "target" in row}
    assert held == {
        "hopper dense 1x64x128": ">= 1.40 of humming (not measured)",
        "hopper dense 128x64x128": ">= 1.00 of humming (not measured)",
        "hopper e2e 1x64x128": ">= 0.88 of torch bf16 (found)",
        "hopper e2e 128x64x128": ">= 0.88 of torch bf16 (found)",
        "hopper grouped small down 2 tokens uniform 4x64x96": (
            ">= 0.65 of read floor (not measured); >= 2.50 of torch bf16 (found)"
        ),
        "hopper grouped small down 256 tokens uniform 4x64x96": ">= 0.95 of torch bf16 (found)",
    }


def test_hopper_needs_a_hopper() -> None:
    with pytest.raises(ValueError, match="the layers on cpu hold no prepacked weights"):
        run("hopper")
