"""quantize_model on models of transformers, whose code then uses the layers."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from saved_models import saved_and_loaded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}
IDS = torch.arange(4, 12)[None]


def make(name: str, config: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: make("LlamaForCausalLM", "LlamaConfig", **SIZES, **HEADS, num_key_value_heads=2),
    "llama-tied": lambda: make(
        "LlamaForCausalLM", "LlamaConfig", **SIZES, **HEADS, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "gpt2": lambda: make(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=128, n_embd=64, n_layer=1, n_head=4, n_positions=64
    ),
    "opt": lambda: make(
        "OPTForCausalLM",
        "OPTConfig",
        **SIZES,
        num_attention_heads=4,
        max_position_embeddings=64,
        ffn_dim=128,
        word_embed_proj_dim=64,
    ),
    "mamba": lambda: make("MambaForCausalLM", "MambaConfig", **SIZES, time_step_rank=32),
    "mamba2": lambda: make(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        **SIZES,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=16,
    ),
    "bert": lambda: make("BertForMaskedLM", "BertConfig", **SIZES, **HEADS),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A quantized model, lm_head too."""
    return fp4gemm.models.quantize_model(MODELS[request.param](), include="*", types=(torch.nn.Linear,))


def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS).logits


def test_it_generates(model: torch.nn.Module) -> None:
    assert any(isinstance(module, nn.Linear) for module in model.modules())
    assert logits(model).isfinite().all()
    if model.can_generate():
        assert model.generate(IDS, max_new_tokens=3, do_sample=False, min_new_tokens=3).shape == (1, 11)


def test_tie_weights_changes_nothing(model: torch.nn.Module) -> None:
    before = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), before)
    model.init_weights()  # it initialises float layers alone, and ties weights


def test_copies_and_states(model: torch.nn.Module) -> None:
    before = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), before)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    for layer in other.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(logits(other), before)
    assert model.get_memory_footprint() > model.num_parameters()
    assert "activations='per-token'" in str(model)
    assert logits(copy.deepcopy(model).bfloat16()).dtype in (torch.bfloat16, torch.float32)


def test_save_pretrained_is_loaded_with_the_same_bits(model: torch.nn.Module, tmp_path: Path) -> None:
    assert torch.equal(logits(saved_and_loaded(model, tmp_path)), logits(model))


def test_mamba_keeps_the_layer_whose_weight_it_reads() -> None:
    reports: list[fp4gemm.models.QuantizeReport] = []
    fp4gemm.models.quantize_model(MODELS["mamba"](), report=reports.append)
    skipped = [layer for layer in reports[0].layers if layer.action == "skipped"]
    assert [(layer.name, layer.reason) for layer in skipped] == [
        ("backbone.layers.0.mixer.dt_proj", "its owner MambaMixer reads the float weight directly")
    ]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_resize_token_embeddings(name: str) -> None:
    """Works with a float output layer, the default; transformers refuses to resize any other."""
    model = fp4gemm.models.quantize_model(MODELS[name]())
    model.resize_token_embeddings(136)
    assert logits(model).shape[-1] == 136
    same = fp4gemm.models.quantize_model(MODELS[name](), include="*")
    same.resize_token_embeddings(128)
    assert logits(same).shape[-1] == 128
    with pytest.raises(TypeError, match=r"fp4gemm\.nn\.linear\.Linear.*not an instance of"):
        same.resize_token_embeddings(136)
