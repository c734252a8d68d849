"""bench ep: two processes on a CPU, every contender verified."""

from __future__ import annotations

import json

import bench_exchange
import pytest
from processes import in_processes

from bench.__main__ import main


def test_bench_ep(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ep", "--quick", "--tokens", "5", "--ranks", "2", "--json"]) == 0
    rows = [json.loads(text) for text in capfd.readouterr().out.splitlines() if text.startswith("{")]
    assert {(row["tokens"], row["ranks"], row["model"]) for row in rows} == {(5, 2, "tiny")}
    own = [("dispatch", "fp4gemm gather")]
    for name in ("slots", "tree"):
        own += [("combine", f"fp4gemm gather {name}"), ("layer", f"fp4gemm gather {name}")]
    rival = [("dispatch", "bf16 all_to_all"), ("layer", "bf16 all_to_all")]
    rival += [(part, "bf16 all_to_all, planned") for part in ("dispatch", "combine", "layer")]
    assert [(row["part"], row["contender"]) for row in rows] == own + rival
    assert all(row["eager_us"] > 0 for row in rows)


def test_contenders_of_symm() -> None:
    """Their results are verified on mapped files in the place of symmetric memory."""
    for rows in in_processes(bench_exchange.run, 2):
        assert [row for row in rows if "refused" in row] == []
        found = [(row["part"], row["contender"]) for row in rows if "symm" in row["contender"]]
        assert found == [
            ("dispatch", "fp4gemm symm"),
            ("dispatch", "symm of bf16 rows"),
            ("dispatch", "symm without a copy"),
            ("pull", "fp4gemm symm"),
            ("pull", "symm of bf16 rows"),
            *((part, f"fp4gemm symm {name}") for name in ("slots", "tree") for part in ("combine", "layer")),
        ]
        fp4, _, bf16 = (row["remote_mb"] for row in rows if row["part"] == "pull")
        assert bf16 / fp4 == pytest.approx(256 / 80), "bytes of a row of 128 elements"
