"""vLLM's whole engine on a GPU with the plug-in: the bits of every call, in CUDA graphs and outside of them.

vLLM has to be installed, or unpacked from the archive of ``make engine-pack``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make engine-pack")

import vllm_checkpoints

from bench.engine.checkpoints import make
from bench.models.shapes import SHAPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROGRAM = Path(__file__).parents[1] / "support" / "vllm_bits.py"
LAYERS = 2  # of the decoder
BATCHES = [1, 5, 16]  # the second is padded to a captured size
CAPTURED = [1, 8, 16]
NEW_TOKENS = 5
VOCAB = 1024


@pytest.mark.parametrize("activations", ["a16", "per-token", "fp8"])
@pytest.mark.parametrize(("model", "layers"), [("llama-3.1-8b", 4), ("qwen3-30b-a3b", 3)])
def test_every_call_has_the_bits_of_the_layer_outside(
    tmp_path: Path, model: str, layers: int, activations: str
) -> None:
    """Prefills run eagerly and decodes by CUDA graphs, with the sizes of a Llama and of a Qwen3-MoE."""
    if activations == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device does not multiply FP8 tokens")
    folder = _checkpoint(tmp_path, model)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
    found = _found(tmp_path, folder, activations, BATCHES, compilation_config=graphs)
    assert found["different"] == []
    assert found["layers"] == layers * LAYERS
    assert found["tokens"] == sum(BATCHES) * NEW_TOKENS
    assert found["eager"] >= layers * LAYERS * len(BATCHES)
    assert found["graph"] >= layers * LAYERS * len(BATCHES) * (NEW_TOKENS - 2)


@pytest.mark.parametrize("activations", ["a16", "fp8"])
@pytest.mark.parametrize(
    ("model", "layers", "backend"),
    [("gpt_oss", 2, "TRITON_ATTN"), ("deepseek_v3", 3 * 4 + 2 + 2 * 3 - 3, "TRITON_MLA")],
)
def test_models_with_other_experts_and_attention(
    tmp_path: Path, model: str, layers: int, backend: str, activations: str
) -> None:
    """GPT-OSS with MXFP4 experts and biases, and DeepSeek-V3 with latent attention, both in small.

    Of DeepSeek-V3's layers, kv_b_proj is called in prefills alone: decodes read its weight, which vLLM
    multiplies into others, so that ``layers`` counts without it.
    """
    if activations == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device does not multiply FP8 tokens")
    folder = getattr(vllm_checkpoints, model)(tmp_path / "checkpoint")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
    found = _found(
        tmp_path,
        folder,
        activations,
        BATCHES,
        compilation_config=graphs,
        attention_config={"backend": backend},
    )
    assert found["different"] == []
    assert found["layers"] == layers + (3 if model == "deepseek_v3" else 0)
    assert found["tokens"] == sum(BATCHES) * NEW_TOKENS
    assert found["eager"] >= found["layers"] * len(BATCHES)
    assert found["graph"] >= layers * len(BATCHES) * (NEW_TOKENS - 2)


@pytest.mark.parametrize("activations", ["per-token", "fp8"])
def test_an_fp8_cache_changes_no_bit_of_a_layer(tmp_path: Path, activations: str) -> None:
    """With kv_cache_dtype="fp8" attention reads other keys and values, and the layers are as without."""
    if activations == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device does not multiply FP8 tokens")
    folder = _checkpoint(tmp_path, "llama-3.1-8b")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
    found = _found(tmp_path, folder, activations, BATCHES, compilation_config=graphs, kv_cache_dtype="fp8")
    assert found["different"] == []
    assert found["tokens"] == sum(BATCHES) * NEW_TOKENS
    assert found["graph"] > 0


def _checkpoint(tmp_path: Path, model: str) -> Path:
    """Random weights in layers of the model's sizes, with few words."""
    folder = tmp_path / "checkpoint"
    make(folder, dataclasses.replace(SHAPES[model], vocab=VOCAB), LAYERS, True, torch.device("cuda"))
    torch.cuda.empty_cache()  # for the engine, which is another process
    return folder


def _found(
    tmp_path: Path, folder: Path, activations: str, batches: list[int], **engine: Any
) -> dict[str, Any]:
    """What the program found; it runs in a process of its own."""
    out = tmp_path / "found.json"
    engine = {
        "max_num_seqs": 16,
        "async_scheduling": False,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.05,
        **engine,
    }
    given = {"out": str(out), "model": str(folder), "batches": batches, "activations": activations}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps({**given, "engine": engine})],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "FP4GEMM_SERVING_ACTIVATIONS": activations, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(out.read_text())
    return json.loads(out.read_text())  # type: ignore[no-any-return]
