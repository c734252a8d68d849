"""The methods of the plug-in of vLLM on a GPU: prepacked at load, in graphs, updated at fixed addresses."""

from __future__ import annotations

import types
from typing import Any

import fp4gemm
import pytest
import serving
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
if torch.cuda.is_available() and not fp4gemm.is_supported("cuda"):
    pytest.skip(fp4gemm.is_supported("cuda").reason, allow_module_level=True)

N, K, E = 256, 256, 8


def _linear(vllm: types.SimpleNamespace, seed: int, activations: str) -> torch.nn.Module:
    config = serving.config_of(vllm.table, "modelopt", activations)
    layer = vllm.layers.MergedColumnParallelLinear(
        K, [N, N], False, quant_config=config, prefix="m.gate_up_proj"
    ).to("cuda")
    for i in range(2):
        tensors = serving.stored(serving.weight(N, K, seed + i, 1 + i), "modelopt")
        serving.load(layer, _of_checkpoint(tensors, activations), i)
    layer.quant_method.process_weights_after_loading(layer)
    return layer  # type: ignore[no-any-return]


def _of_checkpoint(tensors: dict[str, torch.Tensor], activations: str) -> dict[str, torch.Tensor]:
    return serving.without_input_scale(tensors) if activations in ("a16", "fp8") else tensors


def _activations() -> list[str]:
    from fp4gemm.integrations.serving.choice import Device

    device = Device("cuda", torch.cuda.get_device_capability())
    return [each for each in ("per-token", "a16", "fp8") if device.reason_against(each, False) is None]


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, activations: str, atol: float = 0) -> None:
    """Within a rounding; sums of FP8 tokens, in the order of another tile, within a part of the largest."""
    if activations == "fp8":
        atol = 1e-3 * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=atol, rtol=2**-7)


def _replayed(layer: Any, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A captured call of a layer and its result, after a replay with the bits of an eager call."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))
    return graph, y


def test_a_layer_with_fp8_tokens_holds_the_bytes_for_them(vllm: types.SimpleNamespace) -> None:
    """int8 bytes in place of codes and scales, and the same choice by "auto"."""
    from fp4gemm.integrations.serving.choice import Device

    if "fp8" not in _activations():
        pytest.skip("this device does not multiply FP8 tokens")
    layer = _linear(vllm, 0, "fp8")
    assert layer.weight.dtype is torch.int8
    assert not hasattr(layer, "weight_scale")
    assert Device("cuda", torch.cuda.get_device_capability()).automatic(False) == "fp8"


@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
def test_a_linear_layer(vllm: types.SimpleNamespace, activations: str, m: int) -> None:
    """Decode and prefill, eagerly and in a graph that sees an update of the weights."""
    if activations not in _activations():
        pytest.skip("this device does not multiply such activations")
    layer, other = _linear(vllm, 0, activations), _linear(vllm, 5, activations)
    x = torch.randn(m, K, device="cuda").bfloat16()
    wanted = {}
    for seed in (0, 5):
        parts = [serving.weight(N, K, seed + i, 1 + i).to("cuda") for i in range(2)]
        wanted[seed] = torch.cat([serving.product(x, w, None, activations) for w in parts], -1)
    _assert_close(layer(x), wanted[0], activations)
    graph, y = _replayed(layer, x)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    _assert_close(y, wanted[5], activations)


@pytest.mark.parametrize("m", [1, 16, 300])
def test_residual_channels(vllm: types.SimpleNamespace, m: int) -> None:
    """Those of fused layers, eagerly and in a graph; the product has k + 32 columns."""
    config = serving.config_of(vllm.table, "modelopt", residual_channels=32)
    layer = vllm.layers.MergedColumnParallelLinear(
        K, [N, N], False, quant_config=config, prefix="m.gate_up_proj"
    ).to("cuda")
    parts = [serving.weight(N, K, i, 1 + i) for i in range(2)]
    channels = torch.randperm(K, generator=torch.Generator().manual_seed(0))[:32].int()
    for i, w in enumerate(parts):
        serving.load(layer, serving.stored(w, "modelopt") | {"residual_channels": channels}, i)
    layer.quant_method.process_weights_after_loading(layer)
    x, on_gpu = torch.randn(m, K, device="cuda").bfloat16(), channels.cuda()
    q = fp4gemm.quantize(x.cpu(), residual_channels=channels)
    wanted = [fp4gemm.mm(q, fp4gemm.repeat_columns(w, channels), out_dtype=torch.bfloat16) for w in parts]
    _assert_close(layer(x), torch.cat(wanted, -1).cuda(), "per-token", atol=1e-3)
    assert torch.equal(layer.residual_channels, on_gpu)
    _replayed(layer, x)


@pytest.mark.parametrize("use_ep", [False, True], ids=["tensor", "expert"])
@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
def test_experts(vllm: types.SimpleNamespace, activations: str, use_ep: bool) -> None:
    """The operator with an expert map, replayed with another routing in the same memory."""
    if activations not in _activations():
        pytest.skip("this device does not multiply such activations")
    config = serving.config_of(vllm.table, "modelopt", activations)
    layer = vllm.layers.RoutedExperts(E, K, N, config, "m.experts", use_ep=use_ep).to("cuda")
    if use_ep:
        layer.expert_map = torch.arange(E, dtype=torch.int32, device="cuda").where(
            torch.arange(E, device="cuda") % 2 == 0, -1
        )
    experts = [
        {
            "w1": serving.weight(N, K, 3 * e),
            "w2": serving.weight(K, N, 3 * e + 1),
            "w3": serving.weight(N, K, 3 * e + 2, 3.0),
        }
        for e in range(E)
    ]
    expert_map, layer.expert_map = layer.expert_map, None  # every expert is loaded; the map only routes
    for e, shards in enumerate(experts):
        stored = {name: serving.stored(w, "modelopt") for name, w in shards.items()}
        parts = {name: _of_checkpoint(tensors, activations) for name, tensors in stored.items()}
        serving.load_expert(layer, e, parts)
    layer.expert_map = expert_map
    layer.quant_method.process_weights_after_loading(layer)
    reference = fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack([fp4gemm.concat([each["w1"], each["w3"]]) for each in experts]),
        fp4gemm.stack([each["w2"] for each in experts]),
        activations=serving.served(activations),
    ).to("cuda")
    x = torch.randn(33, K, device="cuda").bfloat16()
    scores, ids = torch.rand(33, E, device="cuda").softmax(-1).topk(2)
    ids = ids.to(torch.int32)

    def wanted() -> torch.Tensor:
        here = ids if expert_map is None else torch.where(ids % 2 == 0, ids, -1)
        return reference(x, here, scores)

    def run() -> torch.Tensor:
        return layer.quant_method.apply(layer, x, scores, ids)  # type: ignore[no-any-return]

    _assert_close(run(), wanted(), activations, 1e-5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            y = run()
    other = torch.rand(33, E, device="cuda").softmax(-1).topk(2)
    scores.copy_(other[0])
    ids.copy_(other[1])
    graph.replay()
    torch.cuda.synchronize()
    _assert_close(y, wanted(), activations, 1e-5)
