"""SGLang's whole engine on a CPU, with the plug-in: its log-probabilities, its log, weights updated in place.

SGLang has to be installed. Its package of kernels, which is made for CUDA, loads where the library of
NVIDIA's driver is found; docs/serving.md says how that was done on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
pytest.importorskip(
    "sgl_kernel", reason="SGLang's kernels do not load: is there a libcuda.so.1?", exc_type=ImportError
)
nvfp4_models = pytest.importorskip("nvfp4_models")

from fp4gemm.commands import main  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's engine is started on its CPU device"),
]
PROGRAM = Path(__file__).parents[1] / "support" / "sglang_engine.py"


def _engine(tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    out = tmp_path / "found.json"
    given = json.dumps({"out": str(out), **arguments})
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), given], capture_output=True, text=True, timeout=600, env=environment
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    log = [line for line in (done.stdout + done.stderr).splitlines() if "fp4gemm: W4A" in line]
    assert len(log) == 1, log
    return {**json.loads(out.read_text()), "log": log[0]}


@pytest.mark.parametrize(
    ("name", "activations", "what", "bound"),
    [
        ("llama", "a16", "W4A16: ", 0.02),
        ("llama", "per-token", "W4A4, an amax for each token: ", 0.3),
        ("llama", "fp8", "W4A8, FP8 tokens with a scale for each: ", 0.05),
        ("qwen3-moe", "a16", "W4A16: ", 0.02),
    ],
)
def test_an_nvfp4_checkpoint_is_served_and_updated(
    tmp_path: Path, name: str, activations: str, what: str, bound: float
) -> None:
    """The bounds are those of vLLM's engine; the second checkpoint has other weights."""
    sizes = {"intermediate_size": 128} if activations == "fp8" else {}  # k of FP8 tokens: multiples of 64
    folders = []
    for i in range(2):
        folders.append(tmp_path / f"nvfp4-{i}")
        source = nvfp4_models.save_seeded(name, tmp_path / f"float{i}", i, **sizes)
        assert main(["convert", "--activations", activations, str(source), str(folders[i])]) == 0
    found = _engine(tmp_path, model=str(folders[0]), update=str(folders[1]))
    for step in ("first", "updated"):
        assert found[step]["mean_difference"] < bound
        assert len(found[step]["tokens"]) == 4
    assert found["first"]["tokens"] != found["updated"]["tokens"]
    assert what in found["log"]


def test_a_16_bit_checkpoint_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    folder = nvfp4_models.save_seeded("llama", tmp_path / "float", 0)
    found = _engine(tmp_path, model=str(folder), engine={"quantization": "fp4gemm"})
    assert found["first"]["mean_difference"] < 0.3
