"""Residual channels of checkpoints in transformers: saved, loaded with the same bits, and what is refused."""

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
from fp4gemm.checkpoint import Options, convert
from fp4gemm.checkpoint.formats import FORMATS
from nvfp4_models import (
    IDS,
    float_model,
    integration,
    load,
    logits,
    read,
    safetensors,
    same_tensors,
    save_float,
    transformers,
)
from tokenizers_of_words import TEXT, save_tokenizer

COUNT = 32
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


def quantized(name: str = "llama", **options: Any) -> Any:
    given = {"residual_channels": COUNT, "calibration": [IDS], "report": lambda report: None} | options
    return fp4gemm.models.quantize_model(float_model(name), **given)


def layers_of(model: torch.nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("fuse", ["none", "auto"])
@pytest.mark.parametrize("format", FORMATS)
def test_round_trip(format: Any, fuse: Any, tmp_path: Path) -> None:
    """The weights are those without the option, and the model that is loaded has the bits of the first."""
    scaling = "row" if format == "fp4gemm" else "tensor"
    model = quantized(weight_scaling=scaling, fuse=fuse)
    integration.save_pretrained(model, tmp_path / "a", format=format)
    tensors, config = read(tmp_path / "a")
    assert config["quantization_config"]["producer"]["residual_channels"] == COUNT
    names = [name for name in tensors if name.endswith(".residual_channels")]
    assert len(names) == 14
    plain = quantized(weight_scaling=scaling, fuse=fuse, residual_channels=0)
    integration.save_pretrained(plain, tmp_path / "plain", format=format)
    assert same_tensors({n: t for n, t in tensors.items() if n not in names}, read(tmp_path / "plain")[0])
    again = load(tmp_path / "a")
    assert same_tensors(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(plain))
    again.save_pretrained(tmp_path / "b")
    assert same_tensors(read(tmp_path / "b")[0], tensors)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mixtral"])
def test_a_converted_checkpoint_is_the_quantized_model(name: str, tmp_path: Path) -> None:
    """Experts have none."""
    source = save_float(float_model(name, torch.float32), tmp_path / "src")
    save_tokenizer(source)
    options = Options(
        format="fp4gemm", residual_channels=COUNT, calibration=TEXT, weight_scaling="row", fuse=()
    )
    convert(source, tmp_path / "dst", options, device="cpu")
    model = load(tmp_path / "dst")
    batch = torch.tensor([int(word) for word in TEXT.split()])[None]
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    fp4gemm.models.quantize_model(
        wanted, residual_channels=COUNT, calibration=[batch], report=lambda report: None
    )
    for of_name, layer in layers_of(wanted).items():
        if name == "llama" and of_name.rpartition(".")[2] in ("o_proj", "down_proj"):  # sets of one layer
            assert torch.equal(layers_of(model)[of_name].residual_channels, layer.residual_channels)
        assert layers_of(model)[of_name].num_residual == COUNT
    experts = [m for m in model.modules() if isinstance(m, nn.Experts)]
    assert bool(experts) == (name != "llama")


def test_sets_of_a_converted_checkpoint_can_be_merged(tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    save_tokenizer(source)
    options = Options(activations="per-token", residual_channels=COUNT, calibration=TEXT)
    convert(source, tmp_path / "dst", options, device="cpu")
    plain = load(tmp_path / "dst")
    fused = load(tmp_path / "dst", quantization_config=integration.Fp4GemmConfig(fuse="auto"))
    merged = fused.model.layers[0].self_attn.q_proj.merged
    assert torch.equal(merged.residual_channels, plain.model.layers[0].self_attn.v_proj.residual_channels)
    assert isinstance(fused.model.layers[0].mlp, nn.GatedMLP)
    assert (logits(fused) - logits(plain)).norm() < 0.05 * logits(plain).norm()


def test_other_activations_have_no_use_for_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    integration.save_pretrained(quantized(), tmp_path, format="fp4gemm")
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, quantization_config=integration.Fp4GemmConfig(activations="a16"))
    assert "residual_channels of 14 layers of the checkpoint are not used, since activations are 'a16'" in (
        caplog.text
    )
    assert {layer.num_residual for layer in layers_of(model).values()} == {0}
    six = load(
        tmp_path, quantization_config=integration.Fp4GemmConfig(activations="per-token,four_over_six=mse")
    )
    assert {layer.num_residual for layer in layers_of(six).values()} == {COUNT}
    text = "activations: got 'auto' for a checkpoint with 32 residual channels, must be absent or another"
    with pytest.raises(ValueError, match=re.escape(text)):
        load(tmp_path, quantization_config=integration.Fp4GemmConfig(activations="auto"))


def _changed(folder: Path, tensors: dict[str, Any], count: Any = COUNT) -> None:
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["producer"]["residual_channels"] = count
    (folder / "config.json").write_text(json.dumps(config))


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    integration.save_pretrained(quantized(), tmp_path, format="fp4gemm")
    tensors, _ = read(tmp_path)
    name = "model.layers.1.mlp.up_proj.residual_channels"
    good = tensors[name]
    for wrong, text in (
        (good.long(), f"{name} is I64 of the shape (32,), must be I32 of the shape (32,)"),
        (good[:16].clone(), f"{name} is I32 of the shape (16,), must be I32 of the shape (32,)"),
        (good + 64, f"{name}: channels: has the value"),
        (good * 0, f"{name}: channels: has the value 0 more than once"),
        (None, f"{name} is missing, and config.json says that layers have 32 residual channels"),
    ):
        changed = {n: t for n, t in tensors.items() if n != name}
        _changed(tmp_path, changed if wrong is None else {**changed, name: wrong})
        with pytest.raises(ValueError, match=re.escape(text)):
            load(tmp_path)
    _changed(tmp_path, tensors, 0)
    with pytest.raises(
        ValueError, match=r"residual_channels must be absent: config\.json says that no layer"
    ):
        load(tmp_path)
    _changed(tmp_path, {**tensors, "model.layers.1.mlp.up_proj.more": good.clone()})
    with pytest.raises(ValueError, match=r"up_proj\.more is not known, must be one of .*residual_channels"):
        load(tmp_path)


def test_layers_that_do_not_agree_are_not_saved(tmp_path: Path) -> None:
    model = quantized()
    held = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = nn.Linear.from_quantized(held.weight, held.bias)
    text = "model: model.layers.0.mlp.up_proj has 0 residual channels, must have 32 in a checkpoint whose lay"
    with pytest.raises(ValueError, match=re.escape(text)):
        integration.save_pretrained(model, tmp_path, format="fp4gemm")
