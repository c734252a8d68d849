"""peft's LoRA layers on top of a quantized model: make test-oracles."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import nn

peft = pytest.importorskip("peft", reason="needs requirements/oracles.txt: make test-oracles")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
def test_adapters_of_peft_train(scaling: str) -> None:
    """The loss falls, with gradient checkpointing too; no weight of the model changes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model = fp4gemm.models.quantize_model(model, activations=scaling)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    lora._register_custom_module({nn.Linear: peft.tuners.lora.Linear})
    adapted = peft.get_peft_model(model, lora)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 3
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.randint(128, (2, 16))
    losses = []
    for step in range(8):
        if step == 4:
            adapted.gradient_checkpointing_enable()
            adapted.enable_input_require_grads()
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[3] < losses[0] - 0.1
    assert losses[7] < losses[3] - 0.05
    after = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items()}
    for name, t in before.items():
        assert torch.equal(after[name].view(torch.uint8), t.view(torch.uint8)), name
