"""quantize_model(activations="fp8") on a small Llama and Qwen3-MoE, against a model in plain torch."""

from __future__ import annotations

import copy
import os
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nn_helpers import convert
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
IDS = torch.arange(4, 20).view(2, 8)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().bfloat16()


class PlainLinear(torch.nn.Module):
    """A float layer that multiplies as W4A8 is defined: fake-quantized tokens, weights rounded to e4m3."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        w = layer.weight
        values = (fp4gemm.decode(w).data.float() / 8).to(torch.float8_e4m3fn).double()
        self.w = 8 * values * w.amax.double().unsqueeze(-1) / (6 * w.e4m3_max)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        amax = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        tokens = (x.float() * torch.div(torch.tensor(448.0), amax)).to(torch.float8_e4m3fn)
        y = (tokens.double() * amax / 448) @ self.w.T
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def plain(model: torch.nn.Module) -> torch.nn.Module:
    made = copy.deepcopy(model)
    for owner in made.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.Linear):
                setattr(owner, name, PlainLinear(child))
    return made


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_llama() -> None:
    """Layer by layer: the logits are those of the plain model, up to roundings of bfloat16."""
    model, report = convert(llama(), activations="fp8")
    assert report.names("skipped") == []
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 14
    assert {layer.activations for layer in layers} == {"fp8"}
    got, want = model(IDS).logits, plain(model)(IDS).logits
    assert distance(got, want) < 2e-3
    of_float = llama()(IDS).logits
    nvfp4, _ = convert(llama())
    assert distance(got, of_float) < distance(nvfp4(IDS).logits, of_float)


def test_calibrated_and_fused() -> None:
    """GPTQ, joined layers, norms that make FP8 tokens: a run from start to end, close to the plain model."""
    batches = [torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    options: dict[str, Any] = {"activations": "fp8", "calibration": batches, "method": "gptq"}
    layerwise, _ = convert(llama(), **options)
    model, report = convert(llama(), **options, fuse="auto")
    kinds = {block.action for block in report.blocks}
    assert {"norm", "merged", "gated"} <= kinds, kinds
    norms = [m for m in model.modules() if type(m).__name__ == "RMSNormQuantize"]
    assert len(norms) == 4
    assert distance(model(IDS).logits, plain(layerwise)(IDS).logits) < 0.02


def test_layers_that_do_not_fit_are_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 64))
    swapped, report = convert(model, activations="fp8")
    assert isinstance(swapped[1], nn.Linear)
    assert isinstance(swapped[0], torch.nn.Linear)
    (skipped,) = [layer for layer in report.layers if layer.action == "skipped"]
    assert skipped.reason == "in_features is 96, must be a positive multiple of 64"


def test_experts_of_transformers(gen: torch.Generator) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    torch.manual_seed(0)
    made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **config)).eval().bfloat16()
    model, report = convert(made, activations="fp8")
    assert [e.action for e in report.experts] == ["quantized"] * 2
    experts = [m for m in model.modules() if isinstance(m, nn.Experts)]
    assert {e.activations for e in experts} == {"fp8"}
    nvfp4, _ = convert(made)
    of_float = made(IDS).logits
    near = distance(model(IDS).logits, of_float)
    assert 0 < near < distance(nvfp4(IDS).logits, of_float)
