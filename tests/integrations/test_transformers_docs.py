"""The Python code about transformers in docs/checkpoints.md and models.md, with small models on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4gemm import nn
from nvfp4_models import float_model, integration, load, logits, save_float, write_nvfp4

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
MARK = "<!-- not run: tests/integrations runs it with small models -->"


def snippets(name: str) -> list[str]:
    text = (DOCUMENTS / name).read_text()
    return re.findall(rf"{re.escape(MARK)}\n```python\n(.*?)```", text, re.DOTALL)


def test_the_snippets_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = snippets("checkpoints.md")
    assert len(blocks) == 3
    write_nvfp4(float_model("llama"), tmp_path / "Qwen3-8B-NVFP4", "modelopt")
    save_float(float_model("qwen3-moe"), tmp_path / "Qwen" / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    integration.unregister()
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace('device_map="cuda"', 'device_map="cpu"'), names)
    saved = load(tmp_path / "Qwen3-30B-NVFP4").model.layers[0]
    assert type(saved.mlp.experts) is nn.Experts
    assert saved.self_attn.q_proj.activations == "a16"


def test_the_snippet_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = snippets("models.md")
    save_float(float_model("qwen3-moe"), tmp_path / "Qwen" / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    integration.unregister()
    names: dict[str, Any] = {}
    exec(block, names)
    assert torch.equal(logits(names["again"]), logits(names["model"]))
