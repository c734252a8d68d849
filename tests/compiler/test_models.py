"""Models of transformers: how many operators the pass leaves of each kind, and the bits."""

from __future__ import annotations

import os
from typing import Any

import fp4gemm
import pytest
import torch
from compile_helpers import fused
from helpers import assert_bits

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LAYERS = 2
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
IDS = torch.arange(4, 12)[None]


def quantized(
    name: str, num_layers: int = 1, dtype: torch.dtype = torch.bfloat16, fuse: Any = "none", **sizes: int
) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, num_hidden_layers=num_layers, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    return fp4gemm.models.quantize_model(model, exclude="lm_head", fuse=fuse, report=lambda report: None)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_decoder(name: str) -> None:
    """Two norms and two residuals a block; gate and up are two layers, so their product stays."""
    model = quantized(name, LAYERS)

    def logits(ids: torch.Tensor) -> Any:
        return model(ids, use_cache=False).logits

    with torch.no_grad():
        eager = logits(IDS)
    exact = fused(logits, IDS, exact=True)
    assert_bits(exact.value, eager)
    assert exact.report.counts == {"shared": 2 * LAYERS}
    assert exact.counts == {"quantize": 2 * LAYERS, "linear": 7 * LAYERS}

    result = fused(logits, IDS)
    assert result.counts == {"rms_norm_quantize": 2 * LAYERS, "linear": 7 * LAYERS}
    assert result.report.counts == {"addend": 2 * LAYERS, "rms_norm": 2 * LAYERS}
    block = "model.layers.1"
    assert (f"{block}.self_attn.q_proj", f"{block}.self_attn.k_proj", f"{block}.self_attn.v_proj") in [
        fusion.layers for fusion in result.report.fusions
    ]
    assert [left.layer for left in result.report.left] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)
    ]
    distance = (result.value.float() - eager.float()).norm() / eager.float().norm()
    assert distance < 0.15


def test_float32_model_is_exact_to_the_addend() -> None:
    """Nothing is rounded between a layer and its residual; the norms of float32 stay as they are."""
    model = quantized("Llama", dtype=torch.float32)

    def logits(ids: torch.Tensor) -> Any:
        return model(ids, use_cache=False).logits

    result = fused(logits, IDS)
    assert result.report.counts == {"addend": 2, "shared": 2}
    with torch.no_grad():
        assert_bits(result.value, logits(IDS))


def test_generation_with_a_static_cache() -> None:
    """The compiled forward of transformers' generation, whose cache is written in the graph."""
    model = quantized("Llama")
    reports: list[fp4gemm.compiler.FusionReport] = []
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(IDS, disable_compile=True, **options)
    torch._dynamo.reset()
    model.forward = fp4gemm.compiler.compile(  # type: ignore[method-assign]
        model.forward, backend="aot_eager", exact=True, report=reports.append
    )
    got = model.generate(IDS, disable_compile=True, **options)
    assert torch.equal(got, want)
    assert reports
    assert all(report.counts == {"shared": 2} for report in reports)


def test_what_fused_modules_leave() -> None:
    """quantize_model(fuse="auto") has done it all in a Llama, and left a residual in a Qwen3-MoE."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    for model, counts in (
        (quantized("Llama", fuse="auto"), {}),
        (quantized("Qwen3Moe", fuse="auto", **experts), {"addend": 1}),
    ):
        result = fused(lambda ids, m=model: m(ids, use_cache=False).logits, IDS)
        assert result.report.counts == counts
        with torch.no_grad():
            eager = model(IDS, use_cache=False).logits
        if counts:
            assert (result.value.float() - eager.float()).norm() < 0.15 * eager.float().norm()
        else:
            assert_bits(result.value, eager)
