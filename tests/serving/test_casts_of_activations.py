"""Options of the cast of activations in the plug-in of vLLM: what the checkpoint says, and what the user."""

from __future__ import annotations

import types
from typing import Any

import fp4gemm
import pytest
import serving
import torch
from fp4gemm.checkpoint.formats import Scheme, quantization_config
from fp4gemm.integrations.serving.choice import Device, activations_of, per_token
from fp4gemm.integrations.serving.options import Options

SIX = "per-token,four_over_six=mse,e4m3_max=448"


def _linear(vllm: types.SimpleNamespace, stored: str) -> tuple[Any, Any]:
    config = serving.config_of(vllm.table, "modelopt", stored)
    layer = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
    tensors = serving.stored(serving.weight(48, 64, 0), "modelopt")
    serving.load(layer, serving.without_input_scale(tensors) if stored == "a16" else tensors)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, config


@pytest.mark.parametrize(
    ("stored", "option", "wanted", "text"),
    [
        (SIX, None, SIX, "W4A4, an amax for each token, four_over_six mse, e4m3_max 448"),
        ("per-token", SIX, SIX, "W4A4, an amax for each token, four_over_six mse, e4m3_max 448"),
        ("a16", SIX, SIX, "W4A4, an amax for each token, four_over_six mse, e4m3_max 448"),
        (SIX, "per-token", "per-token", "W4A4, an amax for each token"),
        (SIX, "a16", "a16", "W4A16"),
        ("per-tensor", None, "per-token", "W4A4, an amax for each token"),
        (
            "per-tensor,encode=te_per_token",
            None,
            "per-token,encode=te_per_token",
            "W4A4, an amax for each token, encode te_per_token",
        ),
    ],
)
def test_the_activations_of_a_layer(
    vllm: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    option: str | None,
    wanted: str,
    text: str,
) -> None:
    """The option wins over the checkpoint, and the log names the options of the cast."""
    if option is not None:
        monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", option)
    layer, config = _linear(vllm, stored)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(layer(x), serving.product(x, serving.weight(48, 64, 0), None, wanted))
    assert config.report.text() == f"fp4gemm: {text}: m.up_proj"


def test_auto_keeps_the_options_of_the_checkpoint_where_it_chooses_nvfp4() -> None:
    device, options = Device("cpu"), Options(activations="auto")
    assert activations_of(options, SIX, "m", False, device) == SIX  # type: ignore[arg-type]
    assert activations_of(options, "a16", "m", False, device) == "per-token"
    device._is_cuda = True  # with kernels for FP8 tokens
    assert activations_of(options, SIX, "m", False, device) == "fp8"  # type: ignore[arg-type]


def test_per_token() -> None:
    assert per_token("static") == "per-token"
    assert per_token("fp8") == "fp8"
    assert per_token("per-tensor,four_over_six=mae") == "per-token,four_over_six=mae"


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
def test_what_other_loaders_read(format: Any) -> None:
    """Of a checkpoint with options they read what they read of "per-token"."""
    plain = quantization_config(Scheme(format, "per-token"))
    made = quantization_config(Scheme(format, SIX))  # type: ignore[arg-type]
    assert made["producer"].pop("activation_scaling") == SIX
    assert made == plain


def test_a_producer_with_wrong_options_is_refused(vllm: types.SimpleNamespace) -> None:
    config = quantization_config(Scheme("modelopt", "per-token"))
    config["producer"]["activation_scaling"] = "per-token,four_over_six=max"
    made = vllm.table["modelopt_fp4"].from_config(config)
    with pytest.raises(ValueError, match=r"of producer: got 'per-token,four_over_six=max'"):
        vllm.layers.LinearBase(64, 48, made, "m.up_proj")


def test_16_bit_weights(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", SIX)
    layer = vllm.layers.ColumnParallelLinear(
        64, 48, False, quant_config=vllm.table["fp4gemm"](), prefix="m.up_proj"
    )
    weight = torch.randn(48, 64).bfloat16()
    layer.weight.weight_loader(layer.weight, weight)
    layer.quant_method.process_weights_after_loading(layer)
    float_layer = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    float_layer.weight.data = weight
    x = torch.randn(7, 64).bfloat16()
    assert torch.equal(layer(x), fp4gemm.nn.Linear.from_float(float_layer, activations=SIX)(x))  # type: ignore[arg-type]
