"""Single layers in FP8, and translations of checkpoints that have them beside NVFP4."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from checkpoints import load, moe, save
from fp4gemm import nn
from fp4gemm.checkpoint import (
    CheckpointError,
    Options,
    Plan,
    Translation,
    convert,
    plan_conversion,
    quantize_named,
)
from fp4gemm.checkpoint.formats import LAYERS, LayerFormat, LayerName, StoredLayer, read_scheme
from fp4gemm.checkpoint.report import error_of_layer
from fp4gemm.commands import main
from helpers import assert_bits
from mixed_models import Kind, fp8, name_of, write_nemotron
from nvfp4_models import float_model, integration, read, save_float
from nvfp4_models import load as load_model
from torch import Tensor

KINDS: tuple[Kind, ...] = tuple(name.removeprefix("fp8-") for name in LAYERS)  # type: ignore[misc]
BOTH = ("modelopt", "compressed-tensors")


def test_every_format_is_entered() -> None:
    assert set(get_args(LayerName)) == set(LAYERS)
    assert all(layer.name == name for name, layer in LAYERS.items())
    algorithms = [each for layer in LAYERS.values() for each in layer.algorithms]
    assert len(set(algorithms)) == len(algorithms)
    assert len({layer.title for layer in LAYERS.values()}) == len(LAYERS)


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(LayerFormat)])
def test_no_part_has_a_default(part: str) -> None:
    whole = LAYERS["fp8-channel"]
    parts = {field.name: getattr(whole, field.name) for field in dataclasses.fields(LayerFormat)}
    del parts[part]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        LayerFormat(**parts)


@pytest.mark.parametrize("format", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(256, 128), (200, 160), (8, 32)], ids=str)
def test_the_values_of_a_layer(shape: tuple[int, int], kind: Kind, format: Any) -> None:
    """code * scale in float32, and one rounding more to 16 bits; both shapes of the scale are read."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scale, values = fp8(w, kind, format)
    name: LayerName = name_of(kind)
    layer = StoredLayer.read({"a.b.weight": codes, "a.b.weight_scale": scale}, "a.b", name)
    assert_bits(layer.dequantize(torch.float32), values, "values")
    assert_bits(layer.dequantize(), values.bfloat16(), "bf16")
    assert_bits(layer.dequantize(torch.float16), values.half(), "fp16")
    for other in BOTH:
        tensors = layer.tensors("a.b", other)  # type: ignore[arg-type]
        assert tensors["a.b.weight_scale"].shape == fp8(w, kind, other)[1].shape
        assert_bits(StoredLayer.read(tensors, "a.b", name).dequantize(), values.bfloat16(), other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_errors_of_a_layer(kind: Kind) -> None:
    """The worst element is compared with what the scale of its own block explains."""
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) * 2.0**-6
    codes, scale, values = fp8(w, kind, "modelopt")
    found = error_of_layer("a", w, StoredLayer(codes, scale, name_of(kind)))
    assert found.relative_error == pytest.approx(float((values - w).norm() / w.norm()), rel=1e-5)
    cosine = torch.cosine_similarity(values.flatten(), w.flatten(), 0)
    assert found.cosine == pytest.approx(float(cosine), rel=1e-5)
    assert 0.75 < found.worst_element <= 1.001  # w / each is rounded before the code
    zeros = StoredLayer(torch.zeros_like(codes), torch.zeros_like(scale), name_of(kind))
    assert error_of_layer("a", torch.zeros_like(w), zeros).worst_element == 0


def test_a_channel_is_quantized_as_in_its_definition() -> None:
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    w[3] = 0
    w[5] *= 2.0**-120
    made = StoredLayer.of(w, "fp8-channel")
    codes, scale, _ = fp8(torch.where(w == 0, 1.0, w.float()), "channel", "modelopt")
    rows = [i for i in range(24) if i not in (3, 5)]
    assert_bits(made.codes[rows].view(torch.uint8), codes[rows].view(torch.uint8), "codes")
    assert_bits(made.scale.flatten()[rows], scale[rows], "scales")
    assert float(made.scale[3]) == 1
    assert not made.dequantize()[3].any()
    assert_bits(StoredLayer.of(w * 0, "fp8-channel").dequantize(), w * 0, "zeros")
    error = (made.dequantize(torch.float32) - w.float()).abs()
    assert bool((error <= w.float().abs() / 16 + made.scale * 2.0**-10).all())
    with pytest.raises(ValueError, match=r"^weight: holds NaN or infinity, must be finite"):
        StoredLayer.of(w / 0, "fp8-channel")
    with pytest.raises(ValueError, match=r"^layer: got 'fp8-tensor', which is only read"):
        StoredLayer.of(w, "fp8-tensor")


def test_the_name_of_deepseek() -> None:
    codes, scale, values = fp8(torch.randn(256, 128), "block", "compressed-tensors")
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
    assert_bits(StoredLayer.read(tensors, "a", "fp8-block").dequantize(), values.bfloat16(), "values")
    with pytest.raises(KeyError, match=r"a\.weight_scale: is missing beside a, a weight in FP8 in blocks"):
        StoredLayer.read({"a.weight": codes}, "a", "fp8-block")
    with pytest.raises(ValueError, match=r"^a: scale: shape is \(2, 1\), must be \(\) or \(1,\)"):
        StoredLayer.read({"a.weight": codes, "a.weight_scale": scale}, "a", "fp8-tensor")


def test_scales_of_mxfp8() -> None:
    """Bytes of e8m0 under either name and dtype; the operand has their bits, and NaN is refused."""
    codes, scale, values = fp8(torch.randn(48, 96), "mxfp8", "modelopt")
    for suffix in ("weight_scale", "weight_scale_inv"):
        for given in (scale, scale.view(torch.float8_e8m0fnu)):
            layer = StoredLayer.read({"a.weight": codes, f"a.{suffix}": given}, "a", "mxfp8")
            operand = layer.operand()
            assert_bits(operand.dequantize(), values, suffix)
            assert_bits(operand.compact_scales().view(torch.uint8), scale, suffix)
    scale[3, 1] = 255
    with pytest.raises(ValueError, match=r"^a: scale: holds nan, must be finite"):
        StoredLayer.read({"a.weight": codes, "a.weight_scale": scale}, "a", "mxfp8")
    codes, scale, _ = fp8(values, "tensor", "modelopt")
    other = StoredLayer(codes, scale, "fp8-tensor")
    with pytest.raises(ValueError, match=r"^layer: got 'fp8-tensor', which no layer of this library holds"):
        other.operand()


# ---- translations


@pytest.mark.parametrize("fp8_experts", [False, True], ids=["layers", "experts"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", BOTH)
def test_a_mix_is_translated_and_comes_back(
    tmp_path: Path, format: Any, kind: Kind, fp8_experts: bool
) -> None:
    """Layers in FP8, experts among them, keep their bytes between the formats that have mixes."""
    folder, values = write_nemotron(tmp_path / "a", format, kind=kind, fp8_experts=fp8_experts)
    other = BOTH[1 - BOTH.index(format)]
    report = convert(folder, tmp_path / "b", Translation(format, other), device="cpu", verify=True)  # type: ignore[arg-type]
    kept = {entry.name: entry.reason for entry in report.tensors if entry.action == "kept"}
    title = LAYERS[name_of(kind)].title
    assert {kept[f"{module}.weight"] for module in values} == {title}
    scheme = read_scheme(json.loads((tmp_path / "b" / "config.json").read_text()), tmp_path / "b")
    assert scheme is not None
    find = scheme.lookup()
    assert {find(module) for module in values} == {name_of(kind)}
    assert find("backbone.layers.1.mixer.experts.0.up_proj") == "static"
    assert find("backbone.layers.2.mixer.q_proj") is None
    assert scheme.kv_cache == "fp8"
    first, there = load(folder), load(tmp_path / "b")
    for module in values:
        assert_bits(
            there[f"{module}.weight"].view(torch.uint8), first[f"{module}.weight"].view(torch.uint8), module
        )
    convert(tmp_path / "b", tmp_path / "c", Translation(other, format), device="cpu", verify=True)  # type: ignore[arg-type]
    again = load(tmp_path / "c")
    assert set(again) == set(first)
    for name, tensor in first.items():
        assert again[name].shape == tensor.shape
        bits = [each.flatten().view(torch.uint8) for each in (again[name], tensor)]
        assert_bits(*bits, name)


@pytest.mark.parametrize("fp8_experts", [False, True], ids=["layers", "experts"])
def test_to_a_format_without_mixes(
    tmp_path: Path, fp8_experts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers in FP8 become bfloat16, and the report names each."""
    folder, values = write_nemotron(tmp_path / "a", fp8_experts=fp8_experts)
    command = [
        "convert",
        str(folder),
        str(tmp_path / "b"),
        "--from",
        "modelopt",
        "--to",
        "fp4gemm",
        "--verify",
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    there = load(tmp_path / "b")
    for module, value in values.items():
        assert_bits(there[f"{module}.weight"], value.bfloat16(), module)
        assert f"{module}.weight_scale" not in there
    assert shown.count("FP8 per tensor -> bf16") >= 4
    plan = plan_conversion(folder, Translation("modelopt", "fp4gemm"))
    named = {entry.name: entry.reason for entry in plan.tensors if entry.action == "dequantized"}
    assert {named[f"{module}.weight"] for module in values} == {"FP8 per tensor -> bf16"}
    assert len(named) == 3 * len(values)
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert {re.sub(r"(\.experts)\..*", r"\1", module) for module in values} <= set(config["ignore"])
    assert config["activations"] == "static"


def no_input(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["backbone.layers.0.mixer.in_proj.input_scale"]


def no_scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["backbone.layers.0.mixer.in_proj.weight_scale"]


def not_named(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["quantization_config"]["config_groups"]
    del config["quantization_config"]["quantized_layers"]["backbone.layers.0.mixer.in_proj"]


def weights_alone(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["quantization_config"]["config_groups"]
    layers = config["quantization_config"]["quantized_layers"]
    for name in layers:
        if ".3.mixer.experts." in name:
            layers[name] = {"quant_algo": "W4A16_NVFP4"}
            tensors.pop(f"{name}.input_scale")


REFUSED = {
    "no scale of inputs": (
        no_input,
        r"in_proj\.input_scale is missing, must be there for FP8 per tensor in",
        BOTH[1],
    ),
    "no scale": (
        no_scale,
        r"in_proj\.weight_scale is missing beside weight, which is FP8 per tensor",
        BOTH[1],
    ),
    "not named": (
        not_named,
        r"in_proj\.weight has the dtype F8_E4M3, and config\.json does not say",
        "fp4gemm",
    ),
    "two kinds": (
        weights_alone,
        r"has layers with the activations static \(.*\) and a16 \(.*\), which the fp4gemm format cannot hold",
        "fp4gemm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_translated(tmp_path: Path, case: str) -> None:
    change, message, target = REFUSED[case]
    folder, _ = write_nemotron(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=message):
        plan_conversion(folder, Translation("modelopt", target))  # type: ignore[arg-type]


def test_weights_alone_beside_static_activations(tmp_path: Path) -> None:
    """W4A16 beside W4A4 is translated too: a layer of W4A16 has no scale of its inputs."""
    folder, _ = write_nemotron(tmp_path / "a", change=weights_alone)
    convert(folder, tmp_path / "b", Translation("modelopt", "compressed-tensors"), device="cpu", verify=True)
    scheme = read_scheme(json.loads((tmp_path / "b" / "config.json").read_text()))
    assert scheme is not None
    find = scheme.lookup()
    assert find("backbone.layers.1.mixer.experts.0.up_proj") == "static"
    assert find("backbone.layers.3.mixer.experts.0.up_proj") == "a16"
    there = load(tmp_path / "b")
    assert "backbone.layers.1.mixer.experts.0.up_proj.input_global_scale" in there
    assert "backbone.layers.3.mixer.experts.0.up_proj.input_global_scale" not in there


def test_a_float_checkpoint_is_asked_for(tmp_path: Path) -> None:
    folder, _ = write_nemotron(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"is quantized already, in the modelopt format; must be a float"
    ):
        plan_conversion(folder)


# ---- mixes that are written


@pytest.mark.parametrize("activations", ["a16", "per-token", "fp8"])
@pytest.mark.parametrize("format", BOTH)
def test_a_mix_is_written(tmp_path: Path, format: Any, activations: Any) -> None:
    """FP8 per channel and bf16 by name; NVFP4 has the bytes of a conversion without the option."""
    source = save(tmp_path / "src", moe())
    layers: dict[str, Any] = {
        "model.layers.0.mlp.down_proj": "fp8-channel",
        **{f"model.layers.0.self_attn.{child}_proj": "fp8-channel" for child in "qkv"},
        "model.layers.0.mlp.gate_proj": "bf16",
        "model.layers.0.mlp.up_proj": "bf16",
    }
    if activations == "fp8":  # its k of 96 is no multiple of 64, so that it stays
        del layers["model.layers.0.mlp.down_proj"]
    common: dict[str, Any] = {"format": format, "activations": activations}
    options = Options(layers=layers, **common)
    report = convert(source, tmp_path / "a", options, device="cpu", measured=True, verify=True)
    convert(source, tmp_path / "b", Options(**common), device="cpu")
    first, mixed, plain = load(source), load(tmp_path / "a"), load(tmp_path / "b")
    for module, choice in layers.items():
        weight = first[f"{module}.weight"]
        if choice == "bf16":
            assert_bits(mixed[f"{module}.weight"], weight, module)
        else:
            made = StoredLayer.of(weight, "fp8-channel").tensors(module, format)
            assert {name for name in mixed if name.startswith(f"{module}.")} == set(made)
            for name, tensor in made.items():
                assert_bits(mixed[name].view(torch.uint8), tensor.view(torch.uint8), name)
    for name, tensor in plain.items():
        if name.rpartition(".")[0] not in layers:
            assert_bits(mixed[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8), name)
    scheme = read_scheme(json.loads((tmp_path / "a" / "config.json").read_text()), tmp_path / "a")
    assert scheme is not None
    assert scheme.activations == activations
    find = scheme.lookup()
    for module, choice in layers.items():
        assert find(module) == (None if choice == "bf16" else choice)
    assert find("model.layers.1.mlp.experts.0.up_proj") == activations
    assert find("model.layers.1.mlp.gate") is None
    reasons = {entry.name: entry.reason for entry in report.tensors}
    assert reasons["model.layers.0.self_attn.q_proj.weight"] == "FP8 per channel"
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "bf16 by layers"
    errors = {layer.module: layer.relative_error for layer in report.layers}
    assert 0.02 < errors["model.layers.0.self_attn.q_proj"] < 0.03 < errors["model.layers.0.self_attn.o_proj"]
    tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()}
    config = json.loads((source / "config.json").read_text())
    again = dict(quantize_named(first.items(), Plan.of_shapes(tensors, config, options)))
    assert set(again) == set(mixed)
    for name, tensor in again.items():
        assert_bits(mixed[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8), name)


def test_a_mix_by_the_command_is_loaded(tmp_path: Path) -> None:
    source = save_float(float_model("qwen3-moe"), tmp_path / "src")
    layers = {"model.layers.0.self_attn.o_proj": "fp8-channel", "model.layers.1.mlp.experts": "bf16"}
    (tmp_path / "layers.json").write_text(json.dumps(layers))
    command = ["convert", str(source), str(tmp_path / "a"), "--layers", str(tmp_path / "layers.json")]
    assert main(command) == 0
    integration.register()
    try:
        model = load_model(tmp_path / "a")
    finally:
        integration.unregister()
    first, _ = read(source)
    name = "model.layers.0.self_attn.o_proj.weight"
    values = StoredLayer.of(first[name], "fp8-channel").dequantize()
    assert_bits(model.get_parameter(name).detach(), values, name)
    kinds = [isinstance(layer.mlp.experts, nn.Experts) for layer in model.model.layers]
    assert kinds == [True, False]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"model.layers.7": "bf16"}, r"layers: got 'bf16' for model\.layers\.7, which is no module"),
    "stays": ({"model.layers.1.mlp.gate": "fp8-channel"}, r"mlp\.gate, which stays in float: router"),
    "partners": (
        {"model.layers.0.self_attn.q_proj": "fp8-channel"},
        r"layers: model\.layers\.0\.self_attn\.q_proj fp8-channel, .*k_proj nvfp4|layers: .* share an amax",
    ),
    "partner in bf16": (
        {"model.layers.0.mlp.up_proj": "bf16"},
        r"up_proj\.weight: stays \(bf16 by layers\), but its partner",
    ),
    "experts": ({"model.layers.1.mlp.experts": "fp8-channel"}, r"experts in FP8 are not written"),
    "nothing": ({"model": "bf16"}, r"no weight would be NVFP4"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stacked", [False, True])
def test_layers_that_cannot_be(tmp_path: Path, case: str, stacked: bool) -> None:
    layers, message = WRONG[case]
    source = save(tmp_path / "src", moe(stacked=stacked))
    with pytest.raises(CheckpointError, match=message):
        plan_conversion(source, Options(layers=layers))


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^layers: a\.b: got 'int8', must be 'bf16' or 'fp8-channel'"):
        Options(layers={"a.b": "int8"})  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match=r"^layers: got 'fp8-channel' with the format 'fp4gemm', which has no"
    ):
        Options(layers={"a.b": "fp8-channel"}, format="fp4gemm")
    (tmp_path / "layers.json").write_text("[]")
    command = ["convert", "a", "b", "--layers", str(tmp_path / "layers.json")]
    with pytest.raises(SystemExit, match="2"):
        main(command)
