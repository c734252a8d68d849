"""``python -m bench engine`` with vLLM's engine and server on a CPU, which ``make test-serving`` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")

from bench.engine.inside import PARTS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHARED = [sys.executable, "-m", "bench", "engine", "--device", "cpu", "--model", "tiny-llama"]


def _run(tmp_path: Path, *options: str, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    """(what was printed, the rows)."""
    command = [*SHARED, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "rows"), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]


def test_the_steps_of_an_engine_are_measured(tmp_path: Path) -> None:
    """Each step has a row with the time of the host, and a second run measures nothing again.

    Without processes of its own the engine's core is where the worker is, as it is on one GPU.
    """
    options = ["--arms", "w4a8", "--batches", "1,4", "--prompts", "1"]
    _, rows = _run(tmp_path, *options, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    steps = {(row["step"], row.get("batch") or row["prompts"]): row for row in rows}
    assert set(steps) == {("decode", 1), ("decode", 4), ("prefill", 1)}
    for row in rows:
        assert row["contender"] == "fp4gemm W4A8"
        assert row["methods"]["fp4gemm:Fp4GemmLinearMethod"] == 8
        assert row["us"] > 0
    for batch in (1, 4):
        parts = steps["decode", batch]["host_parts_us"]
        assert set(parts) == {*PARTS, "wait", "between", "host", "whole", "client", "client_wait"}
        assert all(parts[name] > 0 for name in PARTS)
        assert 0 < steps["decode", batch]["host_us"] <= parts["whole"]
    (tmp_path / "work" / "runs").rename(tmp_path / "runs")  # a start would make it again
    printed, again = _run(tmp_path, *options)
    assert not (tmp_path / "work" / "runs").exists()
    assert again == rows
    assert "| fp4gemm W4A8 |" in printed


@pytest.mark.parametrize(("model", "off"), [("tiny-qwen", 0.02), ("tiny-gpt-oss", 0.02)])
def test_experts_are_near_the_product_with_their_weights(tmp_path: Path, model: str, off: float) -> None:
    """NVFP4 experts without biases, and MXFP4 experts with biases and a clamped SwiGLU."""
    _, rows = _run(tmp_path, "--model", model, "--arms", "w4a16", "--batches", "1", "--prompts", "1")
    for row in rows:
        found = row["off_by"]
        assert found["model.layers.0.mlp.experts"] < off
        others = {"qkv_proj", "o_proj"} if model == "tiny-qwen" else set()
        assert {name.rpartition(".")[2] for name in found} == {"experts", *others}


def test_the_requests_of_a_server_are_measured(tmp_path: Path) -> None:
    _, rows = _run(tmp_path, "--no-steps", "--requests", "w4a8")
    assert [row["rate"] > 0 for row in rows] == [True, False]
    for row in rows:
        assert row["contender"] == "fp4gemm W4A8"
        assert 0 < row["ttft_ms"] <= row["ttft_p99_ms"]
        assert row["tokens_per_s"] > 0
