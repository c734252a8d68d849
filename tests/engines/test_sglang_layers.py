"""The plug-in in SGLang's own layers, without an engine: their configs, loaders, shards and updates.

SGLang's Python sources suffice, with what they import: its kernels are a stub here, and none is called.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import fp4gemm
import pytest
import serving
import torch
from fp4gemm.checkpoint.formats import Scheme, quantization_config
from torch import Tensor, nn

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


_NEEDED = ("sglang", "torchvision", "IPython", "gguf", "orjson")  # ahead of its layers, SGLang imports these
_missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    pytest.skip(f"needs {', '.join(_missing)} (docs/serving.md)", allow_module_level=True)


def _kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return refuse


_stub = types.ModuleType("sgl_kernel")
_stub.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
_stub.__dict__.update(__path__=[], __getattr__=_kernel)
sys.modules["sgl_kernel"] = _stub

from fp4gemm.integrations.sglang import register  # noqa: E402
from sglang.srt.layers import linear  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

pytestmark = pytest.mark.slow
FORMATS = (*serving.FORMATS_OF_OTHERS, "fp4gemm")
K, E, H = 256, 8, 128  # H: intermediate size of the experts
M = (1, 16)


@pytest.fixture(scope="module", autouse=True)
def _plug_in() -> None:
    register()
    HookRegistry.apply_hooks()


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of two ranks of tensor parallelism, without a process group."""
    chosen: int = request.param
    reset_context()
    args = ServerArgs(model_path="dummy", device="cpu", tp_size=2)
    publish(args, role="test", ranks=SpawnRanks(world_rank=chosen))
    yield chosen
    reset_context()


def _config(format: str, activations: str, **more: Any) -> Any:
    scheme = Scheme(format=format, activations=activations, **more)  # type: ignore[arg-type]
    given = {**quantization_config(scheme), "packed_modules_mapping": {}, "hf_config": None}
    return get_quantization_config(serving.METHODS[format]).from_config(given)


def _tensors(w: fp4gemm.NVFP4Tensor, format: str, activations: str) -> dict[str, Tensor]:
    stored = serving.stored(w, format)
    return serving.without_input_scale(stored) if activations in ("a16", "fp8") else stored


def _x(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.mark.parametrize("format", FORMATS)
def test_residual_channels_of_fused_layers(rank: int, format: str) -> None:
    """The rows are sharded, and the channels are not; also after an update."""
    layer = linear.QKVParallelLinear(
        K, 64, 4, 2, bias=False, params_dtype=torch.bfloat16,
        quant_config=_config(format, "per-token", residual_channels=32), prefix="m.qkv_proj",
    )  # fmt: skip
    for seed in (0, 100):
        layer.quant_method.restore_weights_before_loading(layer)
        channels = torch.randperm(K, generator=torch.Generator().manual_seed(seed))[:32].int()
        parts = {
            name: serving.weight(n, K, seed + i)
            for i, (name, n) in enumerate((("q", 256), ("k", 128), ("v", 128)))
        }
        for shard, w in parts.items():
            tensors = _tensors(w, format, "per-token") | {"residual_channels": channels}
            serving.load(layer, tensors, shard)
        layer.quant_method.process_weights_after_loading(layer)
        for m in M:
            q = fp4gemm.quantize(_x(m, K), residual_channels=channels)
            again = [fp4gemm.repeat_columns(w, channels) for w in parts.values()]
            whole = [fp4gemm.mm(q, w, out_dtype=torch.bfloat16).chunk(2, -1)[rank] for w in again]
            assert torch.equal(layer(_x(m, K))[0], torch.cat(whole, -1))


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
@pytest.mark.parametrize("format", FORMATS)
def test_shards_of_fused_layers(rank: int, format: str, activations: str) -> None:
    """q, k and v with unequal outer scales: each row has the bits of its own layer, after updates too."""
    layer = linear.QKVParallelLinear(
        K, 64, 4, 2, bias=False, params_dtype=torch.bfloat16, quant_config=_config(format, activations),
        prefix="m.qkv_proj",
    )  # fmt: skip
    where: list[int] = []
    for seed in (0, 100):
        layer.quant_method.restore_weights_before_loading(layer)
        parts = {
            name: serving.weight(n, K, seed + i, factor)
            for i, (name, n, factor) in enumerate((("q", 256, 1.0), ("k", 128, 3.7), ("v", 128, 0.1)))
        }
        for shard, w in parts.items():
            serving.load(layer, _tensors(w, format, activations), shard)
        layer.quant_method.process_weights_after_loading(layer)
        for m in M:
            x = _x(m, K)
            whole = [serving.product(x, w, None, activations).chunk(2, -1)[rank] for w in parts.values()]
            assert torch.equal(layer(x)[0], torch.cat(whole, -1))
        now = [parameter.data_ptr() for parameter in layer.parameters()]
        assert now == (where or now)
        where = now


@pytest.mark.parametrize("activations", ["per-token", "a16", "fp8"])
@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_a_rank(rank: int, format: str, activations: str) -> None:
    """Half of every expert, as SGLang's loader gives it, from the dispatcher's output to the weighted sum."""
    layer = FusedMoE(
        E, K, H, layer_id=0, top_k=2, params_dtype=torch.bfloat16,
        quant_config=_config(format, activations), prefix="m.experts",
    )  # fmt: skip
    shapes = (("w1", H, K, 1.0), ("w2", K, H, 2.0), ("w3", H, K, 3.7))
    experts = [
        {name: serving.weight(n, k, 3 * e + i, f * (1 + e)) for i, (name, n, k, f) in enumerate(shapes)}
        for e in range(E)
    ]
    for e, parts in enumerate(experts):
        stored = {name: _tensors(w, format, activations) for name, w in parts.items()}
        serving.load_expert(layer, e, stored)
    layer.quant_method.process_weights_after_loading(layer)
    dims = {"w1": 0, "w2": 1, "w3": 0}
    halves = [{name: serving.shard(w, dims[name], rank) for name, w in each.items()} for each in experts]
    wanted = fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack([fp4gemm.concat([each["w1"], each["w3"]]) for each in halves]),
        fp4gemm.stack([each["w2"] for each in halves]),
        activations=serving.served(activations),
    )
    for m in M:
        x = _x(m, K)
        scores, ids = torch.rand(m, E, generator=torch.Generator().manual_seed(m)).softmax(-1).topk(2)
        dispatched = layer.dispatcher.dispatch(x, StandardTopKOutput(scores, ids.int(), torch.empty(m, E)))
        found = layer.quant_method.apply(layer, dispatched).hidden_states
        assert torch.equal(found, wanted(x, ids, scores))


def test_16_bit_weights_become_nvfp4_after_loading(rank: int) -> None:
    """--quantization fp4gemm has the bits of nn.Linear.from_float on each rank."""
    layer = linear.MergedColumnParallelLinear(
        K, [256, 256], bias=False, params_dtype=torch.bfloat16, prefix="m.gate_up_proj",
        quant_config=get_quantization_config("fp4gemm")(),
    )  # fmt: skip
    floats = [_x(256, K) * (1 + i) for i in range(2)]
    for i, w in enumerate(floats):
        layer.weight.weight_loader(layer.weight, w, i)
    layer.quant_method.process_weights_after_loading(layer)
    plain = nn.Linear(K, 256, bias=False, dtype=torch.bfloat16)
    plain.weight.data = torch.cat([w.chunk(2)[rank] for w in floats])
    wanted = fp4gemm.nn.Linear.from_float(plain, method="four-over-six")
    assert torch.equal(layer(_x(16, K))[0], wanted(_x(16, K)))
