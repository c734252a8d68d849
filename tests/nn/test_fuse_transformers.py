"""quantize_model(fuse="auto") on models of transformers."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import model_zoo
import pytest
import torch
from fp4gemm import activations, nn
from fp4gemm.models.fuse.capture import Capture
from nn_helpers import convert, same_bits

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
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(4, 12)[None]


def make(name: str, dtype: torch.dtype = torch.bfloat16, config: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, (config or name) + "Config")(**SIZES | options)
    return getattr(transformers, name + "ForCausalLM")(made).eval().to(dtype)


# The model, and what is fused in its two layers.
MODELS: dict[str, tuple[Callable[..., Any], Counter[str]]] = {
    "llama": (lambda **o: make("Llama", **o), Counter(merged=2, gated=2, norm=4, residual=2)),
    "llama-bias": (
        lambda **o: make("Llama", attention_bias=True, mlp_bias=True, **o),
        Counter(merged=2, gated=2, norm=4, residual=2),
    ),
    "qwen2": (lambda **o: make("Qwen2", **o), Counter(merged=2, gated=2, norm=4, residual=2)),
    "qwen3": (lambda **o: make("Qwen3", head_dim=16, **o), Counter(merged=2, gated=2, norm=4, residual=2)),
    "mistral": (lambda **o: make("Mistral", **o), Counter(merged=2, gated=2, norm=4, residual=2)),
    "phi3": (lambda **o: make("Phi3", **o), Counter(gated=2, norm=4, residual=2)),
    "glm": (lambda **o: make("Glm", head_dim=16, **o), Counter(merged=2, gated=2, norm=4, residual=2)),
    "olmo2": (lambda **o: make("Olmo2", **o), Counter(merged=2, gated=2)),
    "mixtral": (lambda **o: make("Mixtral", num_local_experts=4, **o), Counter(merged=2, norm=2)),
    "gemma3": (
        lambda **o: make("Gemma3", config="Gemma3Text", head_dim=16, **o),
        Counter(merged=2, gated=2) if "geglu_tanh" in activations.by_name else Counter(merged=4),
    ),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.norm(a.float() - b.float()) / torch.linalg.norm(b.float()))


@pytest.mark.parametrize("name", MODELS)
def test_fused_equals_unfused(name: str) -> None:
    make_one, wanted = MODELS[name]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.15)):
        model = make_one(dtype=dtype)
        fused, report = convert(model, fuse="auto", exclude="lm_head")
        plain, _ = convert(model, exclude="lm_head")
        done = Counter(block.action for block in report.blocks)
        left = done.pop("left", 0)
        assert done == wanted, str(report)
        assert all(block.reason for block in report.blocks if block.action == "left")
        assert left == len(report.blocks) - sum(done.values())
        # float32: the epilogue's exp is not torch's. bfloat16: roundings disappear, and a value near the
        # middle of two codes gets the other one.
        assert distance(fused(IDS).logits, plain(IDS).logits) <= tolerance
        assert distance(fused(IDS).logits, model(IDS).logits) <= 1.2 * distance(
            plain(IDS).logits, model(IDS).logits
        )


@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_other_architectures(name: str) -> None:
    """Experts, latent attention, encoders: whatever is fused leaves the result as it is."""
    model = model_zoo.ZOO[name]()
    fused, report = convert(model, fuse="auto")
    plain, _ = convert(model)
    assert distance(model_zoo.logits(fused), model_zoo.logits(plain)) <= 1e-5
    assert any(block.action == "merged" or block.reason for block in report.blocks)


def test_every_linear_layer_is_accounted_for() -> None:
    model = MODELS["llama"][0]()
    fused, report = convert(model, fuse="auto", exclude="lm_head")
    names = {name for block in report.blocks if block.action in ("merged", "gated") for name in block.names}
    quantized = set(report.names("quantized"))
    assert names < quantized
    alone = {name for name, m in fused.named_modules() if type(m) is nn.Linear and ".mlp" not in name}
    assert quantized - names == alone == {f"model.layers.{i}.self_attn.o_proj" for i in range(2)}
    for block in report.blocks:
        if block.into:
            fused.get_submodule(block.into)
    text = str(report)
    assert "model.layers.*.self_attn: q_proj, k_proj, v_proj merged into qkv_proj (2 times)" in text


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_generate(name: str) -> None:
    """A KV cache: a prompt, then one token at a time."""
    fused, _ = convert(MODELS[name][0](dtype=torch.float32), fuse="auto", exclude="lm_head")
    plain, _ = convert(MODELS[name][0](dtype=torch.float32), exclude="lm_head")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = IDS.expand(2, -1).contiguous()
    assert torch.equal(fused.generate(ids, **options), plain.generate(ids, **options))
    half, _ = convert(MODELS[name][0](), fuse="auto", exclude="lm_head")
    cached = half.generate(ids, **options)
    assert torch.equal(cached, half.generate(ids, use_cache=False, **options))


def test_copies_and_checkpoints() -> None:
    fused, _ = convert(MODELS["qwen2"][0](), fuse="auto", exclude="lm_head")
    y = fused(IDS).logits
    assert same_bits(copy.deepcopy(fused)(IDS).logits, y)
    other = MODELS["qwen2"][0]()
    for p in other.parameters():
        p.zero_()
    other, _ = convert(other, fuse="auto", exclude="lm_head")
    assert not same_bits(other(IDS).logits, y)
    other.load_state_dict(fused.state_dict())
    assert same_bits(other(IDS).logits, y)


def test_compile() -> None:
    fused, _ = convert(MODELS["qwen3"][0](), fuse="auto", exclude="lm_head")
    y = fused(IDS).logits
    targets: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Any:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    assert same_bits(torch.compile(fused, fullgraph=True, backend=backend)(IDS).logits, y)
    assert targets["fp4gemm.gemm.default"] + targets["fp4gemm.linear.default"] == 8
    assert targets["fp4gemm.rms_norm_quantize.default"] == 4


def test_accelerate_hooks() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = MODELS["llama"][0]()
    y = convert(model, fuse="auto")[0](IDS).logits
    dispatched = accelerate.dispatch_model(
        copy.deepcopy(model), {"": "cpu"}, main_device="cpu", force_hooks=True
    )
    fused, report = convert(dispatched, fuse="auto")
    done = Counter(block.action for block in report.blocks)
    assert (done["merged"], done["gated"]) == (2, 2)
    assert torch.isfinite(fused(IDS).logits).all()
    assert distance(fused(IDS).logits, y) <= 0.15
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    fused, report = convert(offloaded, fuse="auto", inplace=True)
    reasons = {block.reason for block in report.blocks}
    assert "their weights are offloaded" in reasons
    assert distance(fused(IDS).logits, y) <= 0.15


def test_layers_of_one_kind_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model costs no more tracing than a shallow one, and its layers share a class and a code."""
    seen: list[type] = []
    init = Capture.__init__

    def counted(self: Capture, module: torch.nn.Module) -> None:
        seen.append(type(module))
        init(self, module)

    monkeypatch.setattr(Capture, "__init__", counted)
    fused, _ = convert(make("Llama", num_hidden_layers=4), fuse="auto", exclude="lm_head")
    kinds = Counter(cls.__name__ for cls in seen)
    assert kinds["LlamaDecoderLayer"] <= 2, kinds  # once, and once for its children after they were fused
    assert len({type(layer) for layer in fused.model.layers}) == 1
