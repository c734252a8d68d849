"""The Python code about transformers in docs/checkpoints.md, with small models on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fp4gemm import nn
from nvfp4_models import float_model, integration, load, save_float, write_nvfp4

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
MARK = "<!-- not run: tests/integrations runs it with small models -->"


def test_the_snippets_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(rf"{re.escape(MARK)}\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
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
    assert saved.self_attn.q_proj.activation_scaling == "none"
