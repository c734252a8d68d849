"""examples/rollout.py with vLLM's engine on a CPU: it samples with the weights that a trainer sends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rollout.py"


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_the_engine_has_the_weights_of_each_step(model: str) -> None:
    """Attention and norms are vLLM's own, so that the difference is not 0, but less than of other weights."""
    sizes = ["--batch", "2", "--prompt", "8", "--length", "24", "--steps", "2", "--device", "cpu"]
    given = [sys.executable, str(EXAMPLE), "--engine", "vllm", "--model", model, *sizes]
    done = subprocess.run(given, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = re.search(
        r"per_token, vLLM: at most ([\d.e+-]+), on average ([\d.e+-]+), of 64 tokens", done.stdout
    )
    assert found is not None, done.stdout
    largest, mean = map(float, found.groups())
    assert 0 < mean < largest
    assert mean < 0.5  # of weights of another model it is above 1
    assert "fp4gemm: W4A4, an amax for each token: " in done.stdout + done.stderr
