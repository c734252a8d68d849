"""Models that several tests of calibration share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def mixtral() -> torch.nn.Module:
    """A Mixtral of transformers with two decoder layers, random, whose experts are 3-D parameters."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("transformers.integrations.moe", reason="transformers is older than 5")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model: torch.nn.Module = transformers.MixtralForCausalLM(config).eval()
    return model
