"""From save_pretrained through convert to from_pretrained: every tensor finds its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp4gemm.checkpoint import Options, convert

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_converted_checkpoints_load(name: str, tmp_path: Path) -> None:
    """No key is missing or unexpected, and both formats give the same logits, close to those of bf16."""
    from fp4gemm.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "src")
    ids = torch.arange(12)[None]
    found = []
    for format in ("modelopt", "compressed-tensors"):
        convert(tmp_path / "src", tmp_path / format, Options(format=format))  # type: ignore[arg-type]
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / format, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.inference_mode():
            found.append(loaded(ids).logits)
    assert torch.equal(found[0], found[1])
    with torch.inference_mode():
        wanted = model(ids).logits
    assert 0.01 < float((found[0] - wanted).norm() / wanted.norm()) < 0.25
