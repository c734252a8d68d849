"""The method of experts of the plug-in of vLLM: loaded expert by expert, sharded two ways, and exact."""

from __future__ import annotations

import types
from typing import Any

import fp4gemm
import pytest
import serving
import torch
import vllm_stub
from fp4gemm.checkpoint.formats import FORMATS
from fp4gemm.integrations.serving.options import Options
from torch import Tensor

SIX = "per-token,four_over_six=mae"
E, D, H = 4, 64, 128  # experts, hidden, intermediate


def _experts(seed: int = 0, is_gated: bool = True) -> list[dict[str, fp4gemm.NVFP4Tensor]]:
    """Each expert's weights by shard; gate and up have unequal outer scales."""
    shapes = {"w1": (H, D, 1.0), "w2": (D, H, 2.0)} | ({"w3": (H, D, 3.7)} if is_gated else {})
    return [
        {
            shard: serving.weight(n, k, seed + 10 * e + i, factor * (1 + e))
            for i, (shard, (n, k, factor)) in enumerate(shapes.items())
        }
        for e in range(E)
    ]


def _layer(vllm: types.SimpleNamespace, config: Any, **more: Any) -> torch.nn.Module:
    return vllm.layers.RoutedExperts(E, D, H, config, "m.experts", **more)  # type: ignore[no-any-return]


def _load(layer: torch.nn.Module, experts: list[dict[str, fp4gemm.NVFP4Tensor]], format: str) -> None:
    for e, shards in enumerate(experts):
        parts = {shard: serving.stored(w, format) for shard, w in shards.items()}
        if layer.quant_method.of.activations in ("a16", "fp8"):
            parts = {shard: serving.without_input_scale(each) for shard, each in parts.items()}
        serving.load_expert(layer, e, parts)
    layer.quant_method.process_weights_after_loading(layer)


def _routing(m: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, D, generator=generator).bfloat16()
    scores, ids = torch.rand(m, E, generator=generator).softmax(-1).topk(2)
    return x, scores, ids.to(torch.int32)


def _wanted(
    experts: list[dict[str, fp4gemm.NVFP4Tensor]], activations: str, activation: str = "swiglu"
) -> fp4gemm.nn.Experts:
    """The module of this library around the same weights."""
    first = [
        fp4gemm.concat([shards["w1"], shards["w3"]]) if "w3" in shards else shards["w1"] for shards in experts
    ]
    return fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack(first),
        fp4gemm.stack([shards["w2"] for shards in experts]),
        activation=activation,  # type: ignore[arg-type]
        activations=serving.served(activations),
    )


@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_experts_have_the_bits_of_nn_experts(
    vllm: types.SimpleNamespace, format: str, activations: str
) -> None:
    experts = _experts()
    layer = _layer(vllm, serving.config_of(vllm.table, format, activations))
    _load(layer, experts, format)
    for m in (1, 9):
        x, scores, ids = _routing(m)
        y = layer.quant_method.apply(layer, x, scores, ids, None, None)
        assert torch.equal(y, _wanted(experts, activations)(x, ids, scores))


@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_static_scales_of_gate_and_up_may_differ(vllm: types.SimpleNamespace, format: str) -> None:
    """They are loaded, each to its place, and have no effect: a token has an amax of its own."""
    experts = _experts()
    layer = _layer(vllm, serving.config_of(vllm.table, format, "static"))
    for e, shards in enumerate(experts):
        parts = {shard: serving.stored(w, format, 2.0 + i + e) for i, (shard, w) in enumerate(shards.items())}
        serving.load_expert(layer, e, parts)
    suffix = FORMATS[format].input_scale  # type: ignore[index]
    assert torch.equal(
        getattr(layer, f"w13_{suffix}")[1],
        torch.cat(
            [
                serving.stored(w, format, amax)[suffix].view(1)
                for w, amax in ((experts[1]["w1"], 3.0), (experts[1]["w3"], 5.0))
            ]
        ),
    )
    layer.quant_method.process_weights_after_loading(layer)
    x, scores, ids = _routing(9)
    y = layer.quant_method.apply(layer, x, scores, ids)
    assert torch.equal(y, _wanted(experts, "per-token")(x, ids, scores))


def test_experts_without_a_gate(vllm: types.SimpleNamespace) -> None:
    experts = _experts(is_gated=False)
    layer = _layer(vllm, serving.config_of(vllm.table, "modelopt"), activation="relu2_no_mul")
    _load(layer, experts, "modelopt")
    x, scores, ids = _routing(5)
    y = layer.quant_method.apply(layer, x, scores, ids)
    assert torch.equal(y, _wanted(experts, "per-token", "relu2")(x, ids, scores))


def test_expert_parallel_ranks_add_up(vllm: types.SimpleNamespace) -> None:
    """Each rank has two experts; a token without an expert there, or with the id -1, gets nothing."""
    experts, config = _experts(), serving.config_of(vllm.table, "modelopt")
    x, scores, ids = _routing(9)
    ids[3, 1] = -1
    for rank in range(2):
        vllm_stub._RANK.update(rank=rank, size=2)
        layer = _layer(vllm, config, use_ep=True)
        assert layer.w13_weight.shape[0] == 2
        _load(layer, experts, "modelopt")
        y = layer.quant_method.apply(layer, x, scores, ids)
        here = ids // 2 == rank
        wanted = _wanted(experts, "per-token")(x, torch.where(here, ids, -1), scores)
        assert torch.equal(y, wanted)
        assert not y[~here.any(1)].any()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_tensor_parallel_ranks_hold_rows_and_columns(
    vllm: types.SimpleNamespace, format: str, rank: int
) -> None:
    """Half of the rows of gate and up, with their outer scales, and half of the columns of down."""
    vllm_stub._RANK.update(rank=rank, size=2)
    wide = [
        {
            "w1": serving.weight(2 * H, D, 3 * e),
            "w2": serving.weight(D, 2 * H, 3 * e + 1, 0.3),
            "w3": serving.weight(2 * H, D, 3 * e + 2, 2.0),
        }
        for e in range(E)
    ]
    layer = vllm.layers.RoutedExperts(E, D, 2 * H, serving.config_of(vllm.table, format), "m.experts")
    assert layer.quant_method.of.activations == "per-token"
    _load(layer, wide, format)
    x, scores, ids = _routing(9)
    shards = [{name: serving.shard(w, int(name == "w2"), rank) for name, w in each.items()} for each in wide]
    y = layer.quant_method.apply(layer, x, scores, ids)
    assert torch.equal(y, _wanted(shards, "per-token")(x, ids, scores))


def test_bf16_experts_are_quantized_while_they_are_loaded(vllm: types.SimpleNamespace) -> None:
    layer = _layer(vllm, vllm.table["fp4gemm"]())
    assert layer.w13_weight.is_meta
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * H, D, generator=generator).bfloat16()
    w2 = torch.randn(E, D, H, generator=generator).bfloat16()
    for e in range(E):
        shards = {"w1": w13[e, :H], "w3": w13[e, H:], "w2": w2[e]}
        serving.load_expert(layer, e, {shard: {"weight": w} for shard, w in shards.items()})
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.w13_weight.dtype is torch.uint8
    x, scores, ids = _routing(9)
    wanted = fp4gemm.nn.Experts.from_float(w13, w2, method="four-over-six")
    assert torch.equal(layer.quant_method.apply(layer, x, scores, ids), wanted(x, ids, scores))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"activation": "swiglustep"}, "its activation is swiglustep"),
        ({"swiglu_limit": 7.0}, "its SwiGLU has alpha 1.0, beta 0.0 and the limit 7.0"),
        ({"swiglu_alpha": 1.702}, "its SwiGLU has alpha 1.702, beta 0.0 and the limit None"),
        (
            {"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            "its SwiGLU has alpha 1.702, beta 0.0 and the limit 7.0",
        ),
        (
            {"activation": "relu2_no_mul", "swiglu_limit": 10.0},
            "its activation is relu2_no_mul with a limit, an alpha or a beta",
        ),
        ({"apply_router_weight_on_input": True}, "its router's weights multiply the input"),
        (
            {"all2all_backend": "deepep_low_latency"},
            "tokens travel by the all-to-all backend deepep_low_latency",
        ),
    ],
)
def test_experts_that_no_operator_runs_are_left_to_vllm(
    vllm: types.SimpleNamespace, attributes: dict[str, Any], reason: str
) -> None:
    config = serving.config_of(vllm.table, "modelopt")
    layer = _layer(vllm, config, **attributes)
    assert layer.quant_method is None
    assert config.report.text() == f"fp4gemm: left to vLLM, {reason}: m.experts"


def test_experts_whose_tokens_are_gathered_run_on_fp4gemm(vllm: types.SimpleNamespace) -> None:
    config = serving.config_of(vllm.table, "modelopt")
    layer = _layer(vllm, config, all2all_backend="allgather_reducescatter")
    assert layer.quant_method.of.activations == "per-token"


@pytest.mark.parametrize("activations", ["per-token", SIX, "fp8", "a16"])
def test_a_rounded_gate(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    """The option has the bits of nn.Experts with it; experts without SwiGLU have no such choice."""
    monkeypatch.setenv("FP4GEMM_SERVING_ROUNDED_GATE", "1")
    experts = _experts()
    layer = _layer(vllm, serving.config_of(vllm.table, "modelopt", activations))
    _load(layer, experts, "modelopt")
    wanted = _wanted(experts, activations)
    wanted.rounded_gate = True
    for m in (1, 9):
        x, scores, ids = _routing(m)
        y = layer.quant_method.apply(layer, x, scores, ids, None, None)
        assert torch.equal(y, wanted(x, ids, scores))
    assert not torch.equal(y, _wanted(experts, activations)(x, ids, scores))
    experts = _experts(is_gated=False)
    layer = _layer(vllm, serving.config_of(vllm.table, "modelopt"), activation="relu2_no_mul")
    _load(layer, experts, "modelopt")
    y = layer.quant_method.apply(layer, x, scores, ids)
    assert torch.equal(y, _wanted(experts, "per-token", "relu2")(x, ids, scores))


def test_a_rounded_gate_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^rounded_gate: got 1"):
        Options(rounded_gate=1)  # type: ignore[arg-type]
