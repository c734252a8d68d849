"""The linear method of the plug-in of vLLM with residual channels of a checkpoint, and what is refused."""

from __future__ import annotations

import re
import types
from typing import Any

import fp4gemm
import pytest
import serving
import torch
import vllm_stub
from fp4gemm import NVFP4Tensor
from torch import Tensor

K, R = 96, 32
CHANNELS = torch.arange(94, 30, -2, dtype=torch.int32)
OTHERS = torch.arange(32, dtype=torch.int32)


def _x(m: int, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


def _product(x: Tensor, w: NVFP4Tensor, channels: Tensor = CHANNELS, bias: Tensor | None = None) -> Tensor:
    """By the public functions."""
    q, again = fp4gemm.quantize(x, residual_channels=channels), fp4gemm.repeat_columns(w, channels)
    return fp4gemm.mm(q, again, bias=None if bias is None else bias.float(), out_dtype=x.dtype)


def _stored(w: NVFP4Tensor, format: str, channels: Tensor | None = CHANNELS) -> dict[str, Tensor]:
    more = {} if channels is None else {"residual_channels": channels}
    return serving.stored(w, format) | more


def _column(vllm: types.SimpleNamespace, format: str = "modelopt", **more: Any) -> Any:
    config = serving.config_of(vllm.table, format, residual_channels=R, **more)
    return vllm.layers.ColumnParallelLinear(K, 48, quant_config=config, prefix="m.up_proj")


def _fused(vllm: types.SimpleNamespace, *channels: Tensor | None) -> tuple[Any, list[NVFP4Tensor]]:
    """Gate and up with these channels."""
    config = serving.config_of(vllm.table, "modelopt", residual_channels=R)
    layer = vllm.layers.MergedColumnParallelLinear(
        K, [32, 32], False, quant_config=config, prefix="m.gate_up_proj"
    )
    parts = [serving.weight(32, K, i, 1.0 + i) for i in range(2)]
    for i, (w, each) in enumerate(zip(parts, channels, strict=True)):
        serving.load(layer, _stored(w, "modelopt", each), i)
    return layer, parts


@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_a_layer_multiplies_their_errors(vllm: types.SimpleNamespace, format: str) -> None:
    w, layer = serving.weight(48, K, 0), _column(vllm, format)
    serving.load(layer, _stored(w, format))
    layer.bias.data = torch.randn(48).bfloat16()
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.shape == (48, (K + R) // 2)
    assert torch.equal(layer.residual_channels, CHANNELS)
    for m in (1, 7):
        y = layer(_x(m))
        assert torch.equal(y, _product(_x(m), w, bias=layer.bias.data))
        assert not torch.equal(y, serving.product(_x(m), w, layer.bias.data))
    text = layer.quant_method.of.report.text()
    assert text == "fp4gemm: W4A4, an amax for each token, 32 residual channels: m.up_proj"


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_layers_share_them(vllm: types.SimpleNamespace, rank: int) -> None:
    """Rows are sharded, channels are not."""
    vllm_stub._RANK.update(rank=rank, size=2)
    layer, parts = _fused(vllm, CHANNELS, CHANNELS)
    layer.quant_method.process_weights_after_loading(layer)
    wanted = [_product(_x(7), w).chunk(2, -1)[rank] for w in parts]
    assert torch.equal(layer(_x(7)), torch.cat(wanted, -1))


def test_qkv_is_loaded_by_its_names(vllm: types.SimpleNamespace) -> None:
    config = serving.config_of(vllm.table, "compressed-tensors", residual_channels=R)
    layer = vllm.layers.QKVParallelLinear(K, 16, 4, 2, False, quant_config=config, prefix="m.qkv_proj")
    parts = {"q": serving.weight(64, K, 1), "k": serving.weight(32, K, 2), "v": serving.weight(32, K, 3)}
    for shard, w in parts.items():
        serving.load(layer, _stored(w, "compressed-tensors"), shard)
    layer.quant_method.process_weights_after_loading(layer)
    wanted = [_product(_x(7), w) for w in parts.values()]
    assert torch.equal(layer(_x(7)), torch.cat(wanted, -1))


@pytest.mark.parametrize(
    ("option", "what"), [("a16", "W4A16"), ("fp8", "W4A8, FP8 tokens with a scale for each")]
)
def test_other_activations_have_no_use_for_them(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, option: str, what: str
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", option)
    config = serving.config_of(vllm.table, "modelopt", residual_channels=R)
    layer = vllm.layers.ColumnParallelLinear(128, 48, False, quant_config=config, prefix="m.up_proj")
    w = serving.weight(48, 128, 0)
    serving.load(layer, _stored(w, "modelopt"))
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(_x(7, 128)), serving.product(_x(7, 128), w, None, option))
    assert not hasattr(layer, "residual_channels")
    assert (
        config.report.text() == f"fp4gemm: {what}, without the residual channels of the checkpoint: m.up_proj"
    )


def test_layers_with_fewer_channels_have_none(vllm: types.SimpleNamespace) -> None:
    config = serving.config_of(vllm.table, "modelopt", residual_channels=64)
    layer = vllm.layers.ColumnParallelLinear(32, 48, False, quant_config=config, prefix="m.up_proj")
    w = serving.weight(48, 32, 0)
    serving.load(layer, serving.stored(w, "modelopt"))
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(_x(7, 32)), serving.product(_x(7, 32), w))
    assert config.report.text() == "fp4gemm: W4A4, an amax for each token: m.up_proj"


def _refusal(text: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(text))


def test_refusals_by_name(vllm: types.SimpleNamespace) -> None:
    layer = _column(vllm)
    serving.load(layer, _stored(serving.weight(48, K, 0), "modelopt", None))
    with _refusal(
        "m.up_proj.residual_channels: is missing in the checkpoint, whose config.json says that it"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    for wrong in (CHANNELS.long(), CHANNELS[:16]):
        with _refusal(
            f"m.up_proj.residual_channels: is {wrong.dtype} of shape ({len(wrong)},), must be torch.i"
        ):
            serving.load(layer, {"residual_channels": wrong})
    for wrong, text in (
        (OTHERS + 80, "111, must have values from 0 to 95"),
        (OTHERS * 0, "0 more than once"),
    ):
        layer = _column(vllm)
        serving.load(layer, _stored(serving.weight(48, K, 0), "modelopt", wrong))
        with _refusal(f"m.up_proj.residual_channels: channels: has the value {text}"):
            layer.quant_method.process_weights_after_loading(layer)
    layer, _ = _fused(vllm, CHANNELS, None)
    with _refusal(
        "m.gate_up_proj.residual_channels: is missing in the checkpoint for the fused layers 1 of 2"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    layer, _ = _fused(vllm, CHANNELS, OTHERS)
    with _refusal(
        "m.gate_up_proj.residual_channels: of the fused layers 1 of 2 are other channels than of the"
    ):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_sharded_k_is_refused(vllm: types.SimpleNamespace) -> None:
    vllm_stub._RANK.update(rank=0, size=2)
    config = serving.config_of(vllm.table, "modelopt", residual_channels=R)
    with _refusal(
        "m.down_proj.residual_channels: k is 64 of 128 on this rank, must be all of it for a checkpoi"
    ):
        vllm.layers.RowParallelLinear(128, 48, False, quant_config=config, prefix="m.down_proj")


def test_a_layer_that_is_left_to_the_engine_is_refused(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "*.up_proj")
    text = "m.up_proj: is left to vLLM, since the option ignore names it, and has 32 residual channels"
    with _refusal(text):
        _column(vllm)
