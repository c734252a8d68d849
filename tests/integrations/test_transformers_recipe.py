"""A model that was trained by a recipe, as a checkpoint: the bits of the trainer's forward pass come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4gemm import checkpoint, models, nn, training
from fp4gemm.recipe import Recipe
from nvfp4_models import float_model, integration, load, logits, read, save_float

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")

NAMES = ("per_token", "te_per_token", "row_scaled", "four_over_six")
# What config.json says beside what "per-token" says.
OWN = {
    "te_per_token": "per-token,encode=te_per_token",
    "four_over_six": "per-tensor,four_over_six=mae",
}


def trainer(name: str, recipe: training.Recipe) -> Any:
    """The float model in bfloat16, converted for training."""
    model = float_model(name)
    training.convert_model(model, recipe)
    return model


def activations(model: torch.nn.Module) -> set[str]:
    return {m.activations for m in model.modules() if isinstance(m, (nn.Linear, nn.Experts))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_name", ["llama", "qwen3-moe"])
def test_a_model_that_is_saved_and_loaded(model_name: str, name: str, tmp_path: Path) -> None:
    recipe = training.PRESETS[name]
    model = trainer(model_name, recipe)
    want = logits(model)
    served = models.quantize_model(model, recipe=recipe.for_inference())
    assert torch.equal(logits(served), want)
    integration.save_pretrained(served, tmp_path, format="fp4gemm")
    config = read(tmp_path)[1]["quantization_config"]
    assert config["activations"] == "per-token"
    assert config["producer"].get("activation_scaling") == OWN.get(name)
    again = load(tmp_path, dtype="auto")
    assert activations(again) == {recipe.for_inference().activations}
    assert torch.equal(logits(again), want)
    again.save_pretrained(tmp_path / "again")
    assert read(tmp_path / "again")[1]["quantization_config"] == config


@pytest.mark.parametrize("name", NAMES)
def test_a_float_checkpoint_that_is_converted(name: str, tmp_path: Path) -> None:
    recipe = training.PRESETS[name]
    model = float_model("llama")
    save_float(model, tmp_path / "float")
    options = checkpoint.Options(format="fp4gemm", fuse=(), **recipe.for_inference().options())
    checkpoint.convert(tmp_path / "float", tmp_path / "nvfp4", options)
    served = load(tmp_path / "nvfp4", dtype="auto")
    assert activations(served) == {recipe.for_inference().activations}
    training.convert_model(model, recipe)
    assert torch.equal(logits(served), logits(model))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_name", ["llama", "qwen3-moe"])
def test_a_float_checkpoint_that_is_quantized_as_it_is_read(
    model_name: str, name: str, tmp_path: Path
) -> None:
    recipe = training.PRESETS[name]
    model = float_model(model_name)
    save_float(model, tmp_path)
    config = integration.Fp4GemmConfig(recipe=recipe.for_inference())
    stored = json.loads(json.dumps(config.to_dict()))
    for given in (config, integration.Fp4GemmConfig.from_dict(stored), stored):
        served = load(tmp_path, quantization_config=given, dtype="auto")
        assert activations(served) == {recipe.for_inference().activations}
    layers = [m for m in served.modules() if isinstance(m, nn.Linear)]
    assert all(layer.weight_recipe == recipe.for_inference() for layer in layers)
    training.convert_model(model, recipe)
    assert torch.equal(logits(served), logits(model))


@pytest.mark.parametrize("name", ["per_token", "four_over_six"])
def test_weights_that_come_one_by_one(name: str) -> None:
    """quantize_named has the bits of training too, for an engine or for update_."""
    recipe = training.PRESETS[name]
    model = float_model("llama")
    options = checkpoint.Options(format="fp4gemm", fuse=(), **recipe.for_inference().options())
    plan = checkpoint.Plan.of_model(model, options)
    made = dict(checkpoint.quantize_named(model.state_dict().items(), plan))
    key = "model.layers.0.mlp.up_proj"
    layer = nn.Linear.from_float(model.get_submodule(key), recipe=recipe.for_inference())
    assert torch.equal(made[f"{key}.weight"], layer.weight.codes)
    assert torch.equal(made[f"{key}.weight_amax"], layer.weight.amax)
    assert (
        made[f"{key}.weight_scale"].view(torch.uint8).equal(layer.weight.compact_scales().view(torch.uint8))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nvidia"}, r"^recipe: got 'nvidia' \(str\), must be an fp4gemm\.recipe\.Recipe"),
        ({"recipe": {"scaling": "row"}}, "^recipe: got the option 'scaling', must be "),
        ({"recipe": {"method": "awq"}}, "^recipe: method: got 'awq', must be 'round'"),
        (
            {"recipe": {"numerics": "modelopt"}},
            "^recipe: .*its numerics are 'modelopt'",
        ),
        (
            {"recipe": Recipe(), "activations": "a16"},
            "^activations: got 'a16' beside a recipe, must be absent",
        ),
        ({"recipe": Recipe(), "method": "round"}, "^method: got 'round' beside a recipe, must be absent"),
    ],
    ids=str,
)
def test_recipes_of_a_config_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        integration.Fp4GemmConfig(**options)
