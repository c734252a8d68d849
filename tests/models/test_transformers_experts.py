"""Which modules of experts of transformers are understood, and why the others stay in float."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.models import moe as transformers_experts
from nn_helpers import convert, same_bits
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is older than 5")

G, D, INTER, TOP_K = 4, 64, 96, 2


class Config:
    """What the constructors of experts read of a configuration."""

    hidden_size, intermediate_size, moe_intermediate_size = D, INTER, INTER
    num_local_experts = num_experts = n_routed_experts = moe_num_experts = G
    hidden_act, hidden_activation, mlp_hidden_act = "silu", "gelu_pytorch_tanh", "relu2"
    swiglu_alpha, swiglu_limit = 1.702, 7.0
    moe_latent_size = None
    num_experts_per_tok = TOP_K
    _experts_implementation = "eager"


def module(model: str, name: str, **changes: Any) -> torch.nn.Module:
    """A module of experts with random weights and biases."""
    config = Config()
    vars(config).update(changes)
    torch.manual_seed(0)
    made = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(config)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return made.eval()


UNDERSTOOD: dict[str, tuple[Callable[[], torch.nn.Module], str, str]] = {
    "gate-and-up": (lambda: module("qwen3_moe", "Qwen3MoeExperts"), "swiglu", "halves"),
    "transposed": (lambda: module("aria", "AriaExperts"), "swiglu", "halves"),
    "gate-in-float32": (lambda: module("beam", "BeamExperts"), "swiglu", "halves"),
    "swish": (lambda: module("mixtral", "MixtralExperts", hidden_act="swish"), "swiglu", "halves"),
    "no-gate": (lambda: module("nemotron_h", "NemotronHExperts"), "relu2", "halves"),
    "no-gate-gelu": (
        lambda: module("nemotron_h", "NemotronHExperts", mlp_hidden_act="gelu"),
        "gelu",
        "halves",
    ),
    "gpt-oss": (lambda: module("gpt_oss", "GptOssExperts"), "swiglu_oai", "interleaved"),
    "gpt-oss-halves": (
        lambda: module("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
        "swiglu_oai",
        "halves",
    ),
    "limit": (
        lambda: module("deepseek_v4", "DeepseekV4Experts", swiglu_limit=10.0),
        "swiglu_limit10",
        "halves",
    ),
    "limit-silu": (lambda: module("hy_v4", "HYV4Experts", swiglu_limit=10.0), "swiglu_limit10", "halves"),
    "gelu-tanh": (lambda: module("gemma4", "Gemma4TextExperts"), "geglu_tanh", "halves"),
}


@pytest.mark.parametrize(("make", "activation", "layout"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_is_understood(make: Callable[[], torch.nn.Module], activation: str, layout: str) -> None:
    """The experts that are read give the results of transformers' own implementations of the contract."""
    original = make()
    assert transformers_experts.read(original)[:2] == (activation, layout)
    experts, report = convert(torch.nn.ModuleDict({"experts": original}))
    assert [(e.name, e.action, e.activation) for e in report.experts] == [
        ("experts", "quantized", activation)
    ]
    assert report.percent_quantized > (90 if original.has_bias else 99.9)
    x, ids = torch.randn(6, D), torch.rand(6, G).argsort(1)[:, :TOP_K]
    scores = torch.rand(6, TOP_K)
    with torch.no_grad():
        want = moe.batched_mm_experts_forward(original, x, ids, scores)
        y = experts["experts"](x, ids, scores)
        # The weights that NVFP4 holds, in the float module: only the activations are quantized then.
        _fill(original, experts["experts"])
        near = moe.batched_mm_experts_forward(original, x, ids, scores)
    assert torch.cosine_similarity(y.flatten(), want.flatten(), 0) > 0.96
    assert torch.cosine_similarity(y.flatten(), near.flatten(), 0) > 0.98
    assert torch.cosine_similarity(y.flatten(), near.flatten(), 0) > torch.cosine_similarity(
        y.flatten(), want.flatten(), 0
    )


def _fill(original: torch.nn.Module, experts: nn.Experts) -> None:
    """Write the quantized weights into the float module, in its own layout."""
    w13, w2 = experts.w13.dequantize_weight(), experts.w2.dequantize_weight()
    if original.has_gate and original.is_concatenated:
        w13 = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1)
    if original.is_transposed:
        w13, w2 = w13.mT, w2.mT
    (original.gate_up_proj if original.has_gate else original.up_proj).copy_(w13)
    original.down_proj.copy_(w2)


def _changed(**attributes: Any) -> torch.nn.Module:
    made = module("qwen3_moe", "Qwen3MoeExperts")
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _subclass() -> torch.nn.Module:
    made = module("qwen3_moe", "Qwen3MoeExperts")
    made.__class__ = type("MyExperts", (type(made),), {"forward": lambda self, *args: args[0]})
    return made


class Broken(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such activation")


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "limit-7": (
        lambda: module("deepseek_v4", "DeepseekV4Experts"),
        r"^its gate \(DeepseekV4Experts\._apply_gate, SiLUActivation\) is none of swiglu",
    ),
    "limit-7-silu": (lambda: module("hy_v4", "HYV4Experts"), r"^its gate \(HYV4Experts\._apply_gate, "),
    "other-limit": (
        lambda: module("gpt_oss", "GptOssExperts", swiglu_limit=6.9),
        r"^its gate \(GptOssExperts",
    ),
    "other-alpha": (
        lambda: module("gpt_oss", "GptOssExperts", swiglu_alpha=1.7),
        r"^its gate \(GptOssExperts",
    ),
    "gelu": (
        lambda: module("qwen3_moe", "Qwen3MoeExperts", hidden_act="gelu"),
        r"^its gate \(Qwen3MoeExperts\._apply_gate, GELUActivation\) is none of",
    ),
    "relu": (
        lambda: module("nemotron_h", "NemotronHExperts", mlp_hidden_act="relu"),
        r"^its activation \(ReLU\) is none of silu, ",
    ),
    "broken": (
        lambda: _changed(act_fn=Broken()),
        r"^its activation cannot be evaluated \(RuntimeError: no such activation\)",
    ),
    "norm": (
        lambda: module("muse_spark", "MuseSparkExperts", moe_hidden_size=D, post_norm_eps=1e-5),
        r"^each expert ends in a norm \(has_post_expert_norm\)",
    ),
    "expert-parallel": (
        lambda: _changed(_is_expert_parallel=True),
        r"^its experts are distributed over devices \(expert parallelism\)",
    ),
    "subclass": (_subclass, r"^the forward of MyExperts is not transformers' dispatch of experts"),
    "layout": (lambda: _changed(is_concatenated=False), r"^its gate .* is none of"),
    "number": (lambda: _changed(num_experts=5), r"^its parameters have 4 matrices and num_experts is 5"),
    "more-parameters": (
        lambda: _changed(scale=torch.nn.Parameter(torch.ones(G))),
        r"^its parameters are down_proj, gate_up_proj, scale, must be down_proj, gate_up_proj",
    ),
    "transposed": (lambda: _changed(is_transposed=True), r"^w2: shape is \(4, 96, 64\), must be \(g, d, int"),
    "sizes": (
        lambda: module("qwen3_moe", "Qwen3MoeExperts", moe_intermediate_size=40),
        r"^w13: n13, gate and up together, is 80, must be a positive multiple of 64",
    ),
    "fp64": (lambda: module("qwen3_moe", "Qwen3MoeExperts").double(), r"dtype is torch\.float64"),
    "nan": (
        lambda: _changed(down_proj=torch.nn.Parameter(torch.full((G, D, INTER), torch.nan))),
        r"^its weights: 24576 values are NaN or infinite",
    ),
    "hook": (lambda: _hooked(), r"^it has hooks that a swap would drop \(forward_hooks\)"),
}


def _hooked() -> torch.nn.Module:
    made = module("qwen3_moe", "Qwen3MoeExperts")
    made.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_stays_in_float(make: Callable[[], torch.nn.Module], reason: str) -> None:
    original = make()
    model, report = convert(torch.nn.ModuleDict({"experts": original}))
    (entry,) = report.experts
    assert entry.action == "skipped"
    assert re.search(reason, entry.reason), entry.reason
    assert entry.bytes_before == entry.bytes_after == sum(p.nbytes for p in original.parameters())
    assert type(model["experts"]) is type(original)
    assert report.percent_quantized == 0
    with pytest.warns(UserWarning, match=r"1 module stays as it is: 'experts' \("):
        fp4gemm.models.quantize_model(torch.nn.ModuleDict({"experts": original}))
    with pytest.raises(ValueError, match=r"^model: 1 selected layers cannot be NVFP4.*'experts': "):
        fp4gemm.models.quantize_model(torch.nn.ModuleDict({"experts": original}), on_unsupported="raise")


def test_options_reach_the_experts() -> None:
    original = torch.nn.ModuleDict({"experts": module("qwen3_moe", "Qwen3MoeExperts")})
    made, _ = convert(original, activations="a16", weight_scaling="tensor", check_finite="raise")
    experts = made["experts"]
    assert (experts.activations, experts.weight_scaling) == ("a16", "tensor")
    assert experts.check_finite == "raise"
    made, _ = convert(original, activations="per-tensor,four_over_six=mae")
    assert made["experts"].activations == "per-tensor,four_over_six=mae"


def test_patterns_select_experts() -> None:
    original = torch.nn.ModuleDict(
        {"experts": module("qwen3_moe", "Qwen3MoeExperts"), "fc": torch.nn.Linear(64, 64)}
    )
    assert convert(original, include="experts")[1].names("quantized") == ["experts"]
    assert convert(original, exclude="experts")[1].names("quantized") == ["fc"]
    by_type = convert(original, include=lambda name, m: not isinstance(m, torch.nn.Linear))[1]
    assert by_type.names("quantized") == ["experts"]
    with pytest.raises(ValueError, match="matches none of the 2 linear layers and modules of experts"):
        convert(original, include="expert_")


def test_shared_experts_and_experts_alone() -> None:
    original = module("qwen3_moe", "Qwen3MoeExperts")
    model, report = convert(torch.nn.ModuleDict({"a": original, "b": original}))
    assert model["a"] is model["b"]
    assert [(e.name, e.action) for e in report.experts] == [("a", "quantized"), ("b", "shared")]
    assert report.experts[1].bytes_after == 0
    alone = fp4gemm.models.quantize_model(copy.deepcopy(original))
    assert isinstance(alone, nn.Experts)
    inputs = torch.randn(3, D), torch.rand(3, G).argsort(1)[:, :TOP_K], torch.rand(3, TOP_K)
    assert same_bits(alone(*inputs), model["a"](*inputs))


@pytest.mark.parametrize("kind", ["cpu-offload", "dispatch"])
def test_hooks_of_accelerate_are_carried_over(kind: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain = torch.nn.ModuleDict({"experts": module("qwen3_moe", "Qwen3MoeExperts")})
    inputs = torch.randn(3, D), torch.rand(3, G).argsort(1)[:, :TOP_K], torch.rand(3, TOP_K)
    want = convert(plain)[0]["experts"](*inputs)
    if kind == "dispatch":
        hooked = accelerate.dispatch_model(plain, {"": "cpu"}, force_hooks=True)
    else:
        hooked = accelerate.cpu_offload(plain, execution_device="cpu")
        assert hooked["experts"].gate_up_proj.is_meta
    fp4gemm.models.quantize_model(hooked, on_unsupported="raise")
    assert hooked["experts"].w13.weight_codes.is_meta == (kind == "cpu-offload")
    for _ in range(2):
        assert same_bits(hooked["experts"](*inputs), want)
