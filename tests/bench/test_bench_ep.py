"""bench ep: two processes on a CPU, every contender verified."""

from __future__ import annotations

import json

import pytest

from bench.__main__ import main


def test_bench_ep(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ep", "--quick", "--tokens", "5", "--ranks", "2", "--json"]) == 0
    rows = [json.loads(text) for text in capfd.readouterr().out.splitlines() if text.startswith("{")]
    assert {(row["tokens"], row["ranks"], row["model"]) for row in rows} == {(5, 2, "tiny")}
    rival = [(part, "bf16 all_to_all") for part in ("dispatch", "combine", "layer")]
    own = [("dispatch", "fp4gemm gather")]
    for name in ("slots", "tree"):
        own += [("dispatch and combine", f"fp4gemm {name}"), ("layer", f"fp4gemm {name}")]
    assert [(row["part"], row["contender"]) for row in rows] == rival + own
    assert all(row["us"] > 0 for row in rows)
