"""The plug-in in vLLM's own layers, without an engine: their loaders, shards, reload and forward.

The device is the GPU if there is one, and vLLM's Python sources suffice there: none of its kernels is called.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import fp4gemm
import pytest
import serving
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")

from fp4gemm.integrations.serving.choice import Device
from fp4gemm.integrations.vllm import register
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

pytestmark = pytest.mark.slow
IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
M = (1, 16, 300) if IS_GPU else (1, 16)  # decode and prefill
N, K, E, H = 256, 256, 8, 128  # H: intermediate size of the experts


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One of two ranks, without a process group: vLLM's layers ask for no more than numbers."""
    chosen: int = request.param
    _ranks(monkeypatch, chosen, 2)
    return chosen


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _ranks(monkeypatch, 0, 1)


def _ranks(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    tensor = types.SimpleNamespace(rank_in_group=rank, world_size=size)
    single = types.SimpleNamespace(rank_in_group=0, world_size=1)
    for name in ("_TP", "_DP", "_EP", "_PCP", "_PP"):
        monkeypatch.setattr(parallel_state, name, tensor if name in ("_TP", "_EP") else single, raising=False)


@pytest.fixture(autouse=True)
def engine() -> Iterator[Any]:
    """vLLM's config, with the plug-in registered."""
    register()
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def _made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What vLLM makes while the device is the default one, as in its model loader."""
    with torch.device(DEVICE):
        return make(*args, **kwargs)


class _Table:
    """vLLM's quantization methods by name, as :func:`serving.config_of` reads them."""

    def __getitem__(self, name: str) -> Any:
        return get_quantization_config(name)


def _quant_config(format: str, activations: str) -> Any:
    served = serving.served(activations)
    if IS_GPU and Device("cuda", torch.cuda.get_device_capability()).reason_against(served, False):  # type: ignore[arg-type]
        pytest.skip("this device does not multiply such activations")
    return serving.config_of(_Table(), format, activations)  # type: ignore[arg-type]


def _tensors(w: fp4gemm.NVFP4Tensor, format: str, activations: str) -> dict[str, Tensor]:
    stored = {name: tensor.cpu() for name, tensor in serving.stored(w, format).items()}
    return serving.without_input_scale(stored) if activations in ("a16", "fp8") else stored


def _x(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(DEVICE)


def _same(y: Tensor, wanted: Tensor, atol: float = 0) -> None:
    """Equal bits on a CPU; kernels of a GPU may add in another order."""
    torch.testing.assert_close(y, wanted, atol=atol if IS_GPU else 0, rtol=2**-7 if IS_GPU else 0)


def _replayed(run: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            y = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, y


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_shards_of_fused_layers(rank: int, format: str, activations: str) -> None:
    """q, k and v with unequal outer scales on two ranks: each row has the bits of its own layer."""
    config = _quant_config(format, activations)
    layer = _made(
        linear.QKVParallelLinear,
        K,
        64,
        4,
        2,
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="m.qkv_proj",
    )
    parts = {
        "q": serving.weight(256, K, 1),
        "k": serving.weight(128, K, 2, 3.7),
        "v": serving.weight(128, K, 3, 0.1),
    }
    for shard, w in parts.items():
        serving.load(layer, _tensors(w, format, activations), shard)
    layer.quant_method.process_weights_after_loading(layer)
    for m in M:
        x = _x(m, K)
        whole = [
            serving.product(x, w.to(DEVICE), None, activations).chunk(2, -1)[rank] for w in parts.values()
        ]
        _same(layer(x)[0], torch.cat(whole, -1))


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
def test_columns_of_a_rank(rank: int, activations: str) -> None:
    config = _quant_config("modelopt", activations)
    layer = _made(
        linear.RowParallelLinear, 2 * K, N, bias=False, params_dtype=torch.bfloat16, quant_config=config,
        prefix="m.o_proj", reduce_results=False,
    )  # fmt: skip
    w = serving.weight(N, 2 * K, 4)
    serving.load(layer, _tensors(w, "modelopt", activations))
    layer.quant_method.process_weights_after_loading(layer)
    for m in M:
        x = _x(m, K)
        _same(layer(x)[0], serving.product(x, serving.shard(w, 1, rank).to(DEVICE), None, activations))


def _residual_layer() -> Any:
    config = serving.config_of(_Table(), "modelopt", "per-token", residual_channels=32)  # type: ignore[arg-type]
    return _made(
        linear.MergedColumnParallelLinear, K, [N, N], bias=False, params_dtype=torch.bfloat16,
        quant_config=config, prefix="m.gate_up_proj",
    )  # fmt: skip


def test_residual_channels_of_fused_layers(rank: int) -> None:
    """By vLLM's loader of fused layers, which shards the rows alone; also after a reload."""
    layer = _residual_layer()
    record_metadata_for_reloading(layer)
    for seed in (0, 5):
        parts = [serving.weight(N, K, seed + i, 1 + i) for i in range(2)]
        channels = torch.randperm(K, generator=torch.Generator().manual_seed(seed))[:32].int()
        if seed:
            initialize_layerwise_reload(layer)
        for i, w in enumerate(parts):
            for name, tensor in {
                **_tensors(w, "modelopt", "per-token"),
                "residual_channels": channels,
            }.items():
                tensor.shard_id = i  # as vLLM's mapper of names sets it
                list(layer.load_weights([(name, tensor)]))
        if seed:
            finalize_layerwise_reload(layer, None)
        else:
            layer.quant_method.process_weights_after_loading(layer)
        channels = channels.to(DEVICE)
        for m in M:
            q = fp4gemm.quantize(_x(m, K), residual_channels=channels)
            repeated = [fp4gemm.repeat_columns(w.to(DEVICE), channels) for w in parts]
            whole = [fp4gemm.mm(q, w, out_dtype=torch.bfloat16).chunk(2, -1)[rank] for w in repeated]
            _same(layer(_x(m, K))[0], torch.cat(whole, -1))


def _experts_of(seed: int) -> list[dict[str, fp4gemm.NVFP4Tensor]]:
    """Each expert's weights by shard; gate and up have unequal outer scales."""
    shapes = (("w1", H, K, 1.0), ("w2", K, H, 2.0), ("w3", H, K, 3.7))
    return [
        {
            name: serving.weight(n, k, seed + 3 * e + i, f * (1 + e))
            for i, (name, n, k, f) in enumerate(shapes)
        }
        for e in range(E)
    ]


def _load_experts(
    layer: nn.Module, experts: list[dict[str, fp4gemm.NVFP4Tensor]], format: str, activations: str
) -> None:
    for e, shards in enumerate(experts):
        parts = {name: _tensors(w, format, activations) for name, w in shards.items()}
        serving.load_expert(layer, e, parts)


def _module(experts: list[dict[str, fp4gemm.NVFP4Tensor]], activations: str) -> fp4gemm.nn.Experts:
    """The module of this library around the same weights."""
    return fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack([fp4gemm.concat([each["w1"], each["w3"]]) for each in experts]),
        fp4gemm.stack([each["w2"] for each in experts]),
        activations=serving.served(activations),
    ).to(DEVICE)


def _routing(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    scores, ids = torch.rand(m, E, generator=generator).softmax(-1).topk(2)
    return scores.to(DEVICE), ids.to(DEVICE, torch.int32)


def _moe(config: Any) -> nn.Module:
    runner = FusedMoEFactory(E, 2, K, H, params_dtype=torch.bfloat16, quant_config=config, prefix="m.experts")
    return runner.routed_experts  # type: ignore[no-any-return]


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
@pytest.mark.parametrize("use_ep", [False, True], ids=["tensor", "expert"])
def test_experts_of_a_rank(engine: Any, rank: int, format: str, activations: str, use_ep: bool) -> None:
    """Half of every expert, or half of the experts, as vLLM's loader and its map say."""
    engine.parallel_config.enable_expert_parallel = use_ep
    layer = _made(_moe, _quant_config(format, activations))
    experts = _experts_of(0)
    _load_experts(layer, experts, format, activations)
    layer.quant_method.process_weights_after_loading(layer)
    if not use_ep:
        dims = {"w1": 0, "w2": 1, "w3": 0}
        experts = [{s: serving.shard(w, dims[s], rank) for s, w in each.items()} for each in experts]
    wanted = _module(experts, activations)
    for m in M:
        x = _x(m, K)
        scores, ids = _routing(m)
        here = torch.where(ids // (E // 2) == rank, ids, -1) if use_ep else ids
        _same(layer.quant_method.apply(layer, x, scores, ids, None, None), wanted(x, here, scores), 1e-4)


class _Block(nn.Module):
    """What vLLM's reload walks through: a linear layer and experts of a model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = linear.MergedColumnParallelLinear(
            K, [N, N], bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="m.gate_up_proj"
        )
        self.experts = _moe(config)

    def load(self, seed: int, format: str, activations: str) -> None:
        for i in range(2):
            tensors = _tensors(serving.weight(N, K, seed + i, 1 + i), format, activations)
            serving.load(self.gate_up_proj, tensors, i)
        _load_experts(self.experts, _experts_of(seed), format, activations)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = self.experts.quant_method.apply(self.experts, x, scores, ids, None, None)
        return self.gate_up_proj(x)[0], y


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_a_reload_writes_into_the_same_memory(alone: None, format: str, activations: str) -> None:
    """vLLM's own reload: prepacked or not, and seen by a graph that was captured before."""
    model = _made(_Block, _quant_config(format, activations))
    _made(record_metadata_for_reloading, model)
    model.load(0, format, activations)
    for layer in (model.gate_up_proj, model.experts):
        layer.quant_method.process_weights_after_loading(layer)
    where = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    x, (scores, ids) = _x(16, K), _routing(16)

    def check(seed: int, found: tuple[Tensor, Tensor]) -> None:
        parts = [serving.weight(N, K, seed + i, 1 + i).to(DEVICE) for i in range(2)]
        _same(found[0], torch.cat([serving.product(x, w, None, activations) for w in parts], -1))
        _same(found[1], _module(_experts_of(seed), activations)(x, ids, scores), 1e-4)

    graph, y = _replayed(lambda: model(x, scores, ids)) if IS_GPU else (None, model(x, scores, ids))
    check(0, y)
    _made(initialize_layerwise_reload, model)
    model.load(500, format, activations)
    finalize_layerwise_reload(model, None)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == where
    if graph is None:
        y = model(x, scores, ids)
    else:
        graph.replay()
        torch.cuda.synchronize()
    check(500, y)


@pytest.mark.parametrize("seed", [0, 500])
def test_16_bit_weights_become_nvfp4_while_they_are_loaded(alone: None, seed: int) -> None:
    """--quantization fp4gemm: no memory before, and the bits of quantize with an amax for each row after."""
    config = get_quantization_config("fp4gemm")()
    layer = _made(
        linear.MergedColumnParallelLinear, K, [N, N], bias=False, params_dtype=torch.bfloat16,
        quant_config=config, prefix="m.gate_up_proj",
    )  # fmt: skip
    assert layer.weight.is_meta
    floats = [_x(N, K) * (1 + i + seed) for i in range(2)]
    for i, w in enumerate(floats):
        layer.weight.weight_loader(layer.weight, w, i)
    assert layer.weight.dtype is torch.uint8
    float_layer = nn.Linear(K, 2 * N, bias=False, dtype=torch.bfloat16, device=DEVICE)
    float_layer.weight.data = torch.cat(floats)
    wanted = fp4gemm.nn.Linear.from_float(float_layer, method="four-over-six")
    for m in M:
        _same(layer(_x(m, K))[0], wanted(_x(m, K)))
