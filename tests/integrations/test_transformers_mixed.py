"""Checkpoints with layers in NVFP4, FP8 and bfloat16, in the layout of Nemotron 3 among others."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint import Options, Translation, convert
from fp4gemm.checkpoint.formats import FORMATS, StoredLayer, StoredWeight
from fp4gemm.integrations import transformers as integration
from helpers import assert_bits
from mixed_models import Kind, in_model, nemotron, read, write_deepseek, write_nemotron
from nvfp4_models import float_model, load, logits, safetensors, same_tensors, save_float
from torch import Tensor

BOTH = ("modelopt", "compressed-tensors")
KINDS: tuple[Kind, ...] = ("tensor", "channel", "block")
TITLES = {"tensor": "FP8 per tensor", "channel": "FP8 per channel", "block": "FP8 in blocks of 128 x 128"}


def reference(folder: Path, format: str, values: dict[str, Tensor]) -> Any:
    """The model of the float layers, the values of those in FP8, and experts of the stored codes."""
    model = nemotron()
    for module, value in values.items():
        model.get_submodule(in_model(module)).weight.data = value.bfloat16()
    tensors, _ = read(folder)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "NemotronHExperts":
            owner = name.replace("model.", "backbone.", 1)
            w13, w2 = (
                fp4gemm.stack(
                    [
                        StoredWeight.read(tensors, f"{owner}.{e}.{child}_proj", format).to_nvfp4()  # type: ignore[arg-type]
                        for e in range(4)
                    ]
                )
                for child in ("up", "down")
            )
            made = nn.Experts.from_quantized(w13, w2, activation="relu2", activations="per-token")
            model.get_submodule(name.rpartition(".")[0]).experts = made.eval()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", BOTH)
def test_the_layout_of_nemotron_3(
    tmp_path: Path, format: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Every weight has its bits, and so has the result; the log names what became bfloat16."""
    folder, values = write_nemotron(tmp_path, format, kind=kind)
    with caplog.at_level(logging.WARNING, "fp4gemm"):
        model = load(folder)
    lines = [message for message in caplog.messages if "->" in message]
    assert lines == [
        f"{TITLES[kind]} -> bf16: model.layers.*.mixer.in_proj, model.layers.*.mixer.out_proj, "
        "2 x model.layers.*.mixer.shared_experts.down_proj, 2 x model.layers.*.mixer.shared_experts.up_proj"
    ]
    assert "1 k_scale, 1 v_scale of the checkpoint are not used" in caplog.text
    assert len(values) == 6
    for module, value in values.items():
        layer = model.get_submodule(in_model(module))
        assert type(layer) is torch.nn.Linear
        assert_bits(layer.weight.detach(), value.bfloat16(), module)
    experts = [module for module in model.modules() if isinstance(module, nn.Experts)]
    assert [each.activations for each in experts] == ["per-token"] * 2
    assert_bits(logits(model), logits(reference(folder, format, values)), "logits")


@pytest.mark.parametrize("format", BOTH)
def test_layers_in_mxfp8_stay_so(tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture) -> None:
    """But for in_proj, whose 324 rows no kernel writes: it has its values in bfloat16."""
    folder, values = write_nemotron(tmp_path, format, kind="mxfp8")
    with caplog.at_level(logging.WARNING, "fp4gemm"):
        model = load(folder)
    assert [m for m in caplog.messages if "->" in m] == ["MXFP8 -> bf16: model.layers.*.mixer.in_proj"]
    want = reference(folder, format, values)
    for module, value in values.items():
        layer = model.get_submodule(in_model(module))
        if module.endswith("in_proj"):
            assert type(layer) is torch.nn.Linear
            assert_bits(layer.weight.detach(), value.bfloat16(), module)
            continue
        assert isinstance(layer, nn.Linear)
        assert layer.activations == "mxfp8"
        assert_bits(layer.dequantize_weight(), value, module)
        owner, _, child = in_model(module).rpartition(".")
        made = nn.Linear.from_float(want.get_submodule(in_model(module)), activations="mxfp8")
        setattr(want.get_submodule(owner), child, made)
    experts = [module for module in model.modules() if isinstance(module, nn.Experts)]
    assert [each.activations for each in experts] == ["per-token"] * 2
    assert_bits(logits(model), logits(want), "logits")


def test_other_dtypes_and_activations(tmp_path: Path) -> None:
    folder, values = write_nemotron(tmp_path)
    model = load(folder, dtype=torch.float32)
    for module, value in values.items():
        assert_bits(model.get_submodule(in_model(module)).weight.detach(), value, module)
    config = integration.Fp4GemmConfig(activations="a16")
    model = load(folder, quantization_config=config)
    experts = [module for module in model.modules() if isinstance(module, nn.Experts)]
    assert [each.activations for each in experts] == ["a16"] * 2


def test_a_mix_is_saved_with_its_fp8_layers_in_float(tmp_path: Path) -> None:
    """What was FP8 is bfloat16 then, as the model has it; NVFP4 keeps its bytes."""
    folder, values = write_nemotron(tmp_path / "a")
    model = load(folder)
    for format in BOTH:
        integration.save_pretrained(model, tmp_path / format, format=format)
        tensors, config = read(tmp_path / format)
        assert config["quantization_config"].get("quant_algo", "NVFP4") == "NVFP4"
        for module, value in values.items():
            assert_bits(tensors[f"{module}.weight"], value.bfloat16(), module)
            assert f"{module}.weight_scale" not in tensors
        assert_bits(logits(load(tmp_path / format)), logits(model), format)


@pytest.mark.parametrize("format", BOTH)
def test_the_layout_is_made_of_a_float_checkpoint(tmp_path: Path, format: Any) -> None:
    """convert --layers writes the layout of Nemotron 3, but for FP8 with a scale for each channel."""
    source = save_float(nemotron(), tmp_path / "float")
    tensors, _ = read(source)
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    # in_proj has 324 rows here, no multiple of 8, so that it stays.
    fp8 = [name for name in modules if ".shared_experts." in name or name.endswith("out_proj")]
    attention = [name for name in modules if name[-6:] in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layers = {**dict.fromkeys(fp8, "fp8-channel"), **dict.fromkeys(attention, "bf16")}
    options = Options(
        format=format,
        activations="per-token",
        layers=layers,  # type: ignore[arg-type]
        kv_scales={"backbone.layers.2.mixer": (0.5, 0.25)},
    )
    convert(source, tmp_path / "mix", options, device="cpu", verify=True)
    model = load(tmp_path / "mix")
    for module in fp8:
        values = StoredLayer.of(tensors[f"{module}.weight"], "fp8-channel").dequantize()
        assert_bits(model.get_submodule(in_model(module)).weight.detach(), values, module)
    assert len([module for module in model.modules() if isinstance(module, nn.Experts)]) == 2
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert torch.isfinite(logits(model)).all()


# ---- W4A4 beside W4A16


def write_llama(folder: Path, format: str) -> Path:
    """W4A4, but W4A16 of down_proj; the producer is another program."""
    tensors, config = read(save_float(float_model("llama"), folder))
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        weight = fp4gemm.quantize(tensors.pop(name).clone(), scaling="tensor")
        tensors |= StoredWeight.of(weight, format).tensors(module)  # type: ignore[arg-type]
        is_a16 = module.endswith("down_proj")
        kinds[is_a16].append(module)
        if not is_a16:
            tensors |= FORMATS[format].input_tensors(module, torch.ones(1))  # type: ignore[index]
    if format == "modelopt":
        made: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        made["quantized_layers"] = {
            name: {"quant_algo": "W4A16_NVFP4" if kind else "NVFP4"}
            for kind, names in kinds.items()
            for name in names
        }
    else:
        args = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
        inputs = {**args, "dynamic": "local"}
        made = {"quant_method": format, "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
        made["config_groups"] = {
            "group_0": {"targets": ["Linear"], "weights": args, "input_activations": inputs},
            "group_1": {"targets": ["re:.*down_proj$"], "weights": args, "input_activations": None},
        }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": made}))
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("format", BOTH)
def test_each_layer_has_its_activations(tmp_path: Path, format: str) -> None:
    folder = write_llama(tmp_path / "a", format)
    model = load(folder)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.activations == ("a16" if name.endswith("down_proj") else "per-token"), name
    uniform = load(folder, quantization_config=integration.Fp4GemmConfig(activations="a16"))
    assert {m.activations for m in uniform.modules() if isinstance(m, nn.Linear)} == {"a16"}
    assert not torch.equal(logits(uniform), logits(model))
    for other in BOTH:  # the mix is saved and comes back, in its own format with the same tensors
        integration.save_pretrained(model, tmp_path / other, format=other)
        again = load(tmp_path / other)
        assert_bits(logits(again), logits(model), other)
    if format == "modelopt":
        tensors, config = read(tmp_path / format)
        assert config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
        assert len(config["quantization_config"]["quantized_layers"]) == 14
        before = read(folder)[0]
        for each in (before, tensors):  # activations are scaled per token, of which other loaders read 1.0
            for name in [name for name in each if name.endswith("input_scale")]:
                each[name] = torch.ones(())
        assert same_tensors(tensors, before)


# ---- what is malformed


def without(suffix: str) -> Any:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[f"backbone.layers.0.mixer.in_proj.{suffix}"]

    return change


def replaced(name: str, value: Tensor) -> Any:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"backbone.layers.{name}"] = value

    return change


def said(name: str, algorithm: str | None) -> Any:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        layers = config["quantization_config"]["quantized_layers"]
        layers.pop(name, None)
        if algorithm is not None:
            layers[name] = {"quant_algo": algorithm}
        del config["quantization_config"]["config_groups"]

    return change


IN, UP = "backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.experts.0.up_proj"
SHARED = "backbone.layers.1.mixer.shared_experts.up_proj"
MALFORMED: dict[str, tuple[Any, str]] = {
    "no scale": (without("weight_scale"), rf"{IN}\.weight_scale is missing beside weight, which is FP8 per"),
    "no weight": (without("weight"), rf"{IN}\.weight is missing, which config\.json calls FP8 per tensor"),
    "scale of rows": (
        replaced("0.mixer.in_proj.weight_scale", torch.ones(324)),
        rf"{IN}\.weight_scale has the shape \(324,\), must be \(\) or \(1,\)",
    ),
    "scale in int": (
        replaced("0.mixer.in_proj.weight_scale", torch.ones((), dtype=torch.int32)),
        rf"{IN}\.weight_scale has the dtype I32, must be F32 or BF16 or F16",
    ),
    "negative scale": (
        replaced("0.mixer.in_proj.weight_scale", torch.tensor(-1.0)),
        rf"{IN}: scale: holds -1\.0, must be finite and not negative",
    ),
    "NaN": (
        replaced("0.mixer.in_proj.weight", torch.full((324, 64), 0x7F).byte().view(torch.float8_e4m3fn)),
        rf"{IN}: codes: holds NaN, must be numbers",
    ),
    "in 16 bits": (
        replaced("0.mixer.in_proj.weight", torch.ones(324, 64).bfloat16()),
        rf"{IN}\.weight has the dtype BF16, must be F8_E4M3, since config\.json calls it FP8 per tensor",
    ),
    "another shape": (
        replaced("0.mixer.in_proj.weight", torch.ones(32, 64).to(torch.float8_e4m3fn)),
        rf"{IN} is a weight \(32, 64\), must be \(324, 64\)",
    ),
    "not known": (
        replaced("0.mixer.in_proj.zeros", torch.ones(1)),
        rf"{IN}\.zeros is not known, must be one of bias, input_scale, ",
    ),
    "FP8 that is not named": (
        said(IN, None),
        rf"{IN}\.weight has the dtype F8_E4M3, and config\.json does not say that it is FP8",
    ),
    "FP8 called NVFP4": (
        said(IN, "NVFP4"),
        rf"{IN}\.weight has the dtype F8_E4M3, and config\.json does not say that it is FP8",
    ),
    "NVFP4 called FP8": (said(UP, "FP8"), rf"{UP}\.weight has the dtype U8, must be F8_E4M3"),
    "float called NVFP4": (
        said("backbone.layers.2.mixer.k_proj", "NVFP4"),
        r"k_proj\.weight has the dtype BF16, and config\.json says that it is NVFP4",
    ),
    "absent": (said("backbone.layers.9.mixer.in_proj", "FP8"), r"layers\.9\.mixer\.in_proj has no tensor"),
    "other algorithm": (said(IN, "INT8_SQ"), rf"quant_algo of {IN} is 'INT8_SQ', must be NVFP4, "),
    "two kinds of experts": (
        said(UP, "W4A16_NVFP4"),
        rf"its experts have the activations .*'a16' of {UP}.*, must have one kind",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_named(tmp_path: Path, case: str) -> None:
    change, message = MALFORMED[case]
    folder, _ = write_nemotron(tmp_path, change=change)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("kind", ["tensor", "block"])
@pytest.mark.parametrize("model", ["nemotron", "deepseek"])
def test_experts_in_fp8(tmp_path: Path, model: str, kind: Kind) -> None:
    """They are refused by name, and what the message advises is loaded, with their values in bfloat16."""
    if model == "nemotron":
        folder, values = write_nemotron(tmp_path / "a", kind=kind, fp8_experts=True)
    else:
        folder, values = write_deepseek(tmp_path / "a", kind)
    experts = [module for module in values if ".experts." in module]
    owner = re.sub(r"\d+", "*", experts[0].rpartition(".")[0])
    count, parts = (4, ("down", "up")) if model == "nemotron" else (8, ("down", "gate", "up"))
    assert len(experts) == count * len(parts)
    named = ", ".join(f"{count} x {owner}.{part}_proj" for part in parts)
    message = (
        f"checkpoint: {len(experts)} weights do not fit the model: {named}: {TITLES[kind]}, which experts of "
        "transformers cannot be loaded from; convert --from modelopt --to fp4gemm makes them bf16"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(folder)
    convert(folder, tmp_path / "b", Translation("modelopt", "fp4gemm"), device="cpu", verify=True)
    made = load(tmp_path / "b")
    for module in experts:
        owner, e, child = in_model(module).rsplit(".", 2)
        weights = made.get_submodule(owner)
        name = child if hasattr(weights, child) else "gate_up_proj"
        found = getattr(weights, name)[int(e)]
        if name == "gate_up_proj":
            found = found.chunk(2)[child == "up_proj"]
        assert_bits(found.detach(), values[module].bfloat16(), module)
    assert bool(logits(made).isfinite().all())
