"""FP8 tokens (W4A8) in the plug-in of vLLM: who asks for them, what "auto" chooses, and what is refused."""

from __future__ import annotations

import types
from typing import Any

import fp4gemm
import pytest
import serving
import torch
import vllm_stub
from fp4gemm.checkpoint.formats import Scheme, quantization_config
from fp4gemm.ops import operators

FP8_GAP = "the GEMM kernels for cuda of compute capability 10.0 do not read FP8 tokens"


def _x(k: int = 64) -> torch.Tensor:
    return torch.randn(7, k, generator=torch.Generator().manual_seed(1)).bfloat16()


def _config(vllm: types.SimpleNamespace, activations: str = "a16", **gaps: str) -> Any:
    """The config of a checkpoint, as if the engine ran on a GPU whose kernels have these gaps.

    The layers themselves run on the CPU: what is chosen depends on the device's name and gaps alone.
    """
    from fp4gemm.integrations.serving.choice import Device

    config = serving.config_of(vllm.table, "modelopt", activations)
    config.start()
    config.device = Device("cpu")
    config.device._is_cuda = True
    config.device._gaps = {name.replace("_of_FP8", " of FP8 tokens"): gap for name, gap in gaps.items()}
    return config


def _loaded(layer: torch.nn.Module, w: fp4gemm.NVFP4Tensor) -> torch.nn.Module:
    serving.load(layer, serving.without_input_scale(serving.stored(w, "modelopt")))
    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]
    return layer


def _option(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", value)


def test_a_plain_checkpoint_is_served_with_fp8_tokens_on_request(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option wins over what the checkpoint says; the log names it."""
    w = serving.weight(48, 64, 0)
    for stored, option, wanted in (("a16", "fp8", "fp8"), ("per-token", "fp8", "fp8"), ("fp8", "a16", "a16")):
        _option(monkeypatch, option)
        config = serving.config_of(vllm.table, "modelopt", stored)
        layer = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
        tensors = serving.stored(w, "modelopt")
        serving.load(layer, tensors if stored == "per-token" else serving.without_input_scale(tensors))
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer(_x()), serving.product(_x(), w, None, wanted))
        text = "W4A8, FP8 tokens with a scale for each" if wanted == "fp8" else "W4A16"
        assert config.report.text() == f"fp4gemm: {text}: m.up_proj"


def test_16_bit_weights_with_fp8_tokens(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    _option(monkeypatch, "fp8")
    layer = vllm.layers.ColumnParallelLinear(
        64, 48, False, quant_config=vllm.table["fp4gemm"](), prefix="m.up_proj"
    )
    weight = torch.randn(48, 64).bfloat16()
    layer.weight.weight_loader(layer.weight, weight)
    layer.quant_method.process_weights_after_loading(layer)
    float_layer = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    float_layer.weight.data = weight
    wanted = fp4gemm.nn.Linear.from_float(float_layer, method="four-over-six", activations="fp8")
    assert torch.equal(layer(_x()), wanted(_x()))


@pytest.mark.parametrize("option", ["fp8", "checkpoint"])
def test_k_that_is_no_multiple_of_64_is_refused_by_name(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """A rank checks k of its shard if the option or the checkpoint asks for FP8 tokens."""
    _option(monkeypatch, option)
    config = serving.config_of(vllm.table, "modelopt", "fp8" if option == "checkpoint" else "a16")
    text = (
        r"is 96 on this rank, must be a multiple of 64 with activations 'fp8'; use another tensor parallel "
        r"size, activations 'a16', 'per-token' or 'auto', or name the layer in the option ignore"
    )
    vllm_stub._RANK.update(rank=0, size=2)
    with pytest.raises(ValueError, match=rf"^m\.down_proj: k {text}"):
        vllm.layers.RowParallelLinear(192, 48, False, quant_config=config, prefix="m.down_proj")
    vllm_stub._RANK.update(rank=0, size=1)
    with pytest.raises(ValueError, match=rf"^m\.experts\.w2: k {text}"):
        vllm.layers.RoutedExperts(2, 64, 96, config, "m.experts")
    vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")


@pytest.mark.parametrize("option", ["fp8", "checkpoint"])
def test_a_device_without_fp8_tokens_is_refused(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The engine's own kernels would compute with other numbers than were asked for."""
    _option(monkeypatch, option)
    gaps = {"mm_of_FP8": FP8_GAP, "grouped_mm_of_FP8": FP8_GAP}
    config = _config(vllm, "fp8" if option == "checkpoint" else "a16", **gaps)
    text = r"activations is 'fp8', must be 'per-token', 'a16' or 'auto' on this device"
    with pytest.raises(ValueError, match=rf"^m\.up_proj: {text} .*ignore: {FP8_GAP}"):
        vllm.layers.LinearBase(64, 48, config, "m.up_proj")
    with pytest.raises(ValueError, match=rf"^m\.experts: {text}"):
        vllm.layers.RoutedExperts(2, 64, 64, config, "m.experts")


def test_auto_chooses_by_the_device(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 tokens where the kernels multiply them, but for layers whose k does not fit; else W4A4."""
    _option(monkeypatch, "auto")
    w, narrow = serving.weight(48, 64, 0), serving.weight(48, 96, 1)
    config = _config(vllm)
    fits = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.0.up_proj")
    not_fits = vllm.layers.ColumnParallelLinear(96, 48, False, quant_config=config, prefix="m.0.down_proj")
    experts = vllm.layers.RoutedExperts(2, 64, 96, config, "m.0.experts")
    assert experts.quant_method.of.activations == "a16"
    assert torch.equal(_loaded(fits, w)(_x()), serving.product(_x(), w, None, "fp8"))
    assert torch.equal(_loaded(not_fits, narrow)(_x(96)), serving.product(_x(96), narrow, None, "a16"))
    assert config.report.text() == (
        "fp4gemm: W4A8, FP8 tokens with a scale for each: m.*.up_proj; W4A16, since k is no multiple of 64 "
        "and activations is 'auto': m.*.down_proj, m.*.experts"
    )
    blackwell = _config(vllm, mm_of_FP8=FP8_GAP, grouped_mm_of_FP8=FP8_GAP)
    on_cpu = serving.config_of(vllm.table, "modelopt", "a16")
    for config in (blackwell, on_cpu):
        layer = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
        assert torch.equal(_loaded(layer, w)(_x()), serving.product(_x(), w, None, "per-token"))
        assert config.report.text() == "fp4gemm: W4A4, an amax for each token: m.up_proj"


def test_fast_sums_are_for_fp8_tokens_alone(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option reaches the operators of FP8 layers, and no others."""
    from fp4gemm.integrations.serving import products
    from fp4gemm.integrations.serving.options import Options

    seen: list[tuple[int, bool]] = []

    def linear(*call: Any) -> torch.Tensor:
        seen.append((call[7], call[15]))  # scaling and use_fast_accum
        return operators.linear(*call)  # type: ignore[no-any-return]

    def experts(*call: Any) -> torch.Tensor:
        seen.append((call[15], call[18]))
        return operators.experts(*call)  # type: ignore[no-any-return]

    monkeypatch.setattr(products, "operators", types.SimpleNamespace(linear=linear, experts=experts))
    monkeypatch.setenv("FP4GEMM_SERVING_USE_FAST_ACCUM", "1")
    for stored, scaling in (("fp8", 3), ("a16", 0)):
        config = serving.config_of(vllm.table, "modelopt", stored)
        layer = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
        _loaded(layer, serving.weight(48, 64, 0))(_x())
        mixture = vllm.layers.RoutedExperts(1, 64, 64, config, "m.experts")
        parts = {
            shard: serving.without_input_scale(serving.stored(serving.weight(64, 64, i), "modelopt"))
            for i, shard in enumerate(("w1", "w2", "w3"))
        }
        serving.load_expert(mixture, 0, parts)
        mixture.quant_method.process_weights_after_loading(mixture)
        mixture.quant_method.apply(mixture, _x(), torch.ones(7, 1), torch.zeros(7, 1, dtype=torch.int32))
        assert seen[-2:] == [(scaling, scaling == 3)] * 2
    with pytest.raises(ValueError, match=r"^use_fast_accum: got True with activations 'a16', must be False"):
        Options(activations="a16", use_fast_accum=True)
    assert Options(activations="auto", use_fast_accum=True).use_fast_accum


def test_a_key_that_no_version_writes_is_refused(vllm: types.SimpleNamespace) -> None:
    config = quantization_config(Scheme("modelopt", "fp8"))
    config["producer"]["activation_scaling"] = "int8"
    made = vllm.table["modelopt_fp4"].from_config(config)
    with pytest.raises(ValueError, match="activation_scaling of producer: got 'int8', must be 'per-token', "):
        vllm.layers.LinearBase(64, 48, made, "m.up_proj")
