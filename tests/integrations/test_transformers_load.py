"""NVFP4 checkpoints of every format in models of transformers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint import Options, convert
from fp4gemm.checkpoint.formats import FORMATS, FormatName, StoredWeight
from nvfp4_models import (
    IDS,
    MODELS,
    float_model,
    in_place,
    integration,
    load,
    logits,
    save_float,
    transformers,
    write_nvfp4,
)
from torch import Tensor

# transformers says so whenever a quantization_config is passed with a checkpoint that has one of its own.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
FORMAT_NAMES: tuple[FormatName, ...] = tuple(FORMATS)
LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_logits_equal_those_of_the_model_quantized_in_place(
    format: FormatName, name: str, tmp_path: Path
) -> None:
    model = load(write_nvfp4(float_model(name), tmp_path, format))
    assert model.is_quantized
    assert model.quantization_method == "fp4gemm"
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert isinstance(model.lm_head, torch.nn.Linear)
    if name != "llama":
        assert type(model.model.layers[0].mlp.experts) is nn.Experts
    want = in_place(name)
    assert torch.equal(logits(model), logits(want))
    options = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "pad_token_id": 0}
    tokens = [m.generate(IDS, max_new_tokens=2, **options) for m in (model, want)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_w4a16(format: FormatName, tmp_path: Path) -> None:
    model = load(write_nvfp4(float_model("qwen3-moe"), tmp_path, format, "a16"))
    assert model.model.layers[0].self_attn.q_proj.activations == "a16"
    assert model.model.layers[0].mlp.experts.activations == "a16"
    assert torch.equal(logits(model), logits(in_place("qwen3-moe", "a16")))
    other = load(tmp_path, quantization_config=integration.Fp4GemmConfig(activations="per-token"))
    assert torch.equal(logits(other), logits(in_place("qwen3-moe")))


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_unequal_scales_of_fused_layers_are_exact(name: str, format: FormatName, tmp_path: Path) -> None:
    """q, k, v and gate, up of very different magnitudes: each row has the value that the checkpoint says."""
    original = float_model(name)
    with torch.no_grad():
        for key, p in original.named_parameters():
            if "k_proj.weight" in key or "up_proj.weight" in key:
                p.mul_(64)
            if "v_proj.weight" in key:
                p.mul_(1 / 64)
            if "gate_up_proj" in key:
                p[:, p.shape[1] // 2 :].mul_(1 / 64)
    folder = write_nvfp4(original, tmp_path, format, "a16")
    model = load(folder, quantization_config=integration.Fp4GemmConfig(fuse="auto"))
    attention = model.model.layers[0].self_attn
    merged = attention.qkv_proj
    assert merged.weight_amax.unique().numel() == 3
    state = original.model.layers[0].state_dict()
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    want = torch.cat([_values(state[f"self_attn.{c}_proj.weight"], format) for c in "qkv"])
    got = merged(x).to(torch.float64)
    if merged.bias is not None:
        got = got - merged.bias.double()
    exact = x.double() @ want.T
    # One rounding to bfloat16, of a sum with the bias.
    assert bool(((got - exact).abs() <= 2**-8 * (exact.abs() + 8)).all())
    assert torch.equal(merged.dequantize_weight(), want.float())
    if name == "qwen3-moe":
        w13 = model.model.layers[0].mlp.experts.w13.dequantize_weight()
        gate, up = state["mlp.experts.gate_up_proj"].chunk(2, 1)
        for e in range(4):
            assert torch.equal(w13[e, 0::2], _values(gate[e], format).float())
            assert torch.equal(w13[e, 1::2], _values(up[e], format).float())


def _values(weight: Tensor, format: FormatName) -> Tensor:
    """What the checkpoint of a weight decodes to, in float64."""
    stored = StoredWeight.of(fp4gemm.quantize(weight.contiguous(), scaling="tensor"), format)
    return stored.to_nvfp4().dequantize(torch.float32).double()


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_scales_that_are_not_used_are_reported(
    format: FormatName, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_kv_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in FORMATS[format].kv_scales:
            tensors[f"{LAYER}.{name}"] = torch.tensor(0.5)
        config["quantization_config"]["kv_cache_scheme"] = {
            "num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"
        }  # fmt: skip

    folder = write_nvfp4(float_model("llama"), tmp_path, format, change=with_kv_scales)
    with caplog.at_level(logging.WARNING, "fp4gemm"):
        model = load(folder)
    (record,) = [r for r in caplog.records if r.name.startswith("fp4gemm")]
    scale = FORMATS[format].input_scale
    assert record.getMessage().startswith(f"14 {scale}, 1 k_scale, 1 v_scale of the checkpoint are not used")
    assert torch.equal(logits(model), logits(in_place("llama")))


def _without(name: str) -> Any:
    return lambda tensors, config: tensors.pop(name)


def _with(name: str, value: Tensor) -> Any:
    return lambda tensors, config: tensors.update({name: value})


EXPERT = "model.layers.1.mlp.experts.3"
REFUSED: dict[str, tuple[Any, str]] = {
    "block-scales": (
        _without(f"{LAYER}.q_proj.weight_scale"),
        rf"checkpoint: .*{LAYER}\.q_proj\.weight_scale is missing beside weight, weight_scale_2",
    ),
    "outer-scale": (
        _without(f"{EXPERT}.up_proj.weight_scale_2"),
        rf"{EXPERT}\.up_proj\.weight_scale_2 is missing",
    ),
    "codes": (
        _without(f"{EXPERT}.up_proj.weight"),
        rf"{EXPERT}\.up_proj\.weight is missing beside weight_scale, ",
    ),
    "expert": (
        lambda tensors, config: [tensors.pop(k) for k in list(tensors) if f"{EXPERT}.gate_proj" in k],
        r"checkpoint: 1 weights do not fit the model: model\.layers\.1\.mlp\.experts\.3: its gate is missing",
    ),
    "shape": (
        _with(f"{LAYER}.q_proj.weight_scale", torch.ones(128, 3).to(torch.float8_e4m3fn)),
        rf"{LAYER}\.q_proj\.weight_scale has the shape \(128, 3\), must be \(128, 4\)",
    ),
    "size": (
        lambda tensors, config: tensors.update({
            f"{LAYER}.o_proj.weight": torch.zeros(32, 32, dtype=torch.uint8),
            f"{LAYER}.o_proj.weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn),
        }),
        rf"{LAYER}\.o_proj is a weight \(32, 64\), must be \(64, 128\) for {LAYER}\.o_proj",
    ),
    "dtype": (
        _with(f"{LAYER}.q_proj.weight", torch.zeros(128, 32).to(torch.float8_e4m3fn)),
        rf"{LAYER}\.q_proj\.weight has the dtype F8_E4M3, must be U8 of NVFP4",
    ),
    "stacked": (
        _with(f"{LAYER}.q_proj.weight", torch.zeros(4, 128, 32, dtype=torch.uint8)),
        rf"{LAYER}\.q_proj\.weight has the shape \(4, 128, 32\), must be \(n, k/2\), experts one by one",
    ),
    "bias": (
        _with(f"{LAYER}.q_proj.bias", torch.zeros(128, dtype=torch.int64)),
        rf"{LAYER}\.q_proj\.bias has the dtype I64, must be BF16 or F16 or F32 of NVFP4",
    ),
    "options": (
        lambda tensors, config: config.update(quantization_config={"quant_method": "fp4gemm"}),
        r"quantization_config: config\.json has only the options of an Fp4GemmConfig, must describe ",
    ),
    "unknown": (
        _with(f"{LAYER}.q_proj.pre_quant_scale", torch.ones(64)),
        rf"{LAYER}\.q_proj\.pre_quant_scale is not known, must be one of weight, ",
    ),
    "negative": (
        _with(f"{LAYER}.k_proj.weight_scale_2", torch.tensor(-1.0)),
        rf"checkpoint: 1 weights cannot be used: {LAYER}\.k_proj: outer: holds -1\.0",
    ),
    "algorithm": (
        lambda tensors, config: config["quantization_config"].update(quant_algo="FP8"),
        r"quantization_config: quant_algo is 'FP8', must be NVFP4, W4A16_NVFP4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_nvfp4(float_model("qwen3-moe"), tmp_path, "modelopt", change=change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    folder = write_nvfp4(float_model("qwen3-moe"), tmp_path, "modelopt")
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{file.name}: is damaged: '\S+' ends at byte \d+, and the file"):
        load(folder)


@pytest.mark.parametrize("name", MODELS)
def test_the_base_model_alone(name: str, tmp_path: Path) -> None:
    """Its modules have other names than in the checkpoint: layers.0 instead of model.layers.0."""
    folder = write_nvfp4(float_model(name), tmp_path, "modelopt")
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert type(base.layers[1].self_attn.o_proj) is nn.Linear
    with torch.inference_mode():
        assert torch.equal(base(IDS).last_hidden_state, load(folder).model(IDS).last_hidden_state)


@pytest.mark.parametrize("activations", ["a16", "per-token"])
def test_what_convert_writes(activations: Any, tmp_path: Path) -> None:
    """The same model in every format, with gate and up of each expert sharing an amax."""
    results = []
    save_float(float_model("mixtral"), tmp_path / "float")
    for format in FORMAT_NAMES:
        options = Options(format=format, activations=activations, weight_scaling="tensor")
        convert(tmp_path / "float", tmp_path / format, options)
        results.append(load(tmp_path / format))
    experts = results[0].model.layers[0].mlp.experts
    assert experts.activations == activations
    assert torch.equal(experts.w13.weight_amax[:, 0], experts.w13.weight_amax[:, 1])
    for other in results[1:]:
        assert torch.equal(logits(results[0]), logits(other))


def test_other_formats_are_left_to_transformers(tmp_path: Path) -> None:
    """int4 of compressed-tensors goes to the class that transformers has for it."""

    def as_int4(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["format"] = "pack-quantized"

    folder = write_nvfp4(float_model("llama"), tmp_path, "compressed-tensors", change=as_int4)
    with pytest.raises(ImportError, match="compressed-tensors"):  # which is not installed
        load(folder)


def test_options_that_the_checkpoint_has_settled_are_refused(tmp_path: Path) -> None:
    folder = write_nvfp4(float_model("llama"), tmp_path, "modelopt")
    with pytest.raises(ValueError, match=r"^weight_scaling: got 'row', must be absent for a checkpoint"):
        load(folder, quantization_config=integration.Fp4GemmConfig(weight_scaling="row"))


def test_a_float_checkpoint_of_another_method_is_refused_by_name(tmp_path: Path) -> None:
    def as_fp8(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "fp8"}

    folder = write_nvfp4(float_model("llama"), tmp_path, "modelopt", change=as_fp8)
    with pytest.raises(ValueError, match="with FineGrainedFP8Config but you are passing a Fp4GemmConfig"):
        load(folder, quantization_config=integration.Fp4GemmConfig())


def test_register_and_unregister() -> None:
    from transformers.quantizers import auto

    tables = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    integration.register()
    assert "modelopt" in tables[0]
    integration.unregister()
    integration.unregister()
    assert "modelopt" not in tables[0]
    assert "fp4gemm" not in tables[1]
    assert tables[0]["compressed-tensors"] is transformers.CompressedTensorsConfig
    assert tables[0]["mxfp4"] is transformers.Mxfp4Config
    assert auto.AutoHfQuantizer.merge_quantization_configs.__func__.__module__ == auto.__name__
    assert len(auto.LOADING_ATTRIBUTES_CONFIG_TYPES) == len(set(auto.LOADING_ATTRIBUTES_CONFIG_TYPES))
    integration.register()
    assert integration.Fp4GemmConfig in auto.LOADING_ATTRIBUTES_CONFIG_TYPES
