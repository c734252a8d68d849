"""Checkpoints of ``convert --format mxfp8`` in models of transformers: in our layers, and by its own code.

Without a GPU transformers dequantizes the layers; ``FineGrainedFP8Config(dequantize=True)`` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint import Packing, convert
from helpers import assert_bits
from nvfp4_models import float_model, integration, load, logits, read, save_float, transformers

if "mxfp8" not in transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
    pytest.skip("this transformers does not know mxfp8", allow_module_level=True)


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_transformers_loads_the_values(name: str, is_registered: bool, tmp_path: Path) -> None:
    """e4m3 times a power of two is exact in bfloat16, so that both readers have the same bits."""
    save_float(float_model(name), tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "mxfp8", Packing("mxfp8"), verify=True, device="cpu")
    tensors, _ = read(tmp_path / "mxfp8")
    want = dict(read(tmp_path / "float")[0])
    packed = [key for key, t in tensors.items() if t.dtype is torch.float8_e4m3fn]
    assert len(packed) > 10
    for key in packed:
        scale = torch.exp2(tensors[f"{key}_scale_inv"].float() - 127)
        values = tensors[key].float().unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)
        error = (values.flatten(-2) - want[key].float()).norm() / want[key].float().norm()
        assert 0.01 < error < 0.04
        want[key] = values.flatten(-2).bfloat16()
        assert torch.equal(want[key].float(), values.flatten(-2))
    if is_registered:
        integration.register()
    try:
        model = load(
            tmp_path / "mxfp8", quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
        )
    finally:
        integration.unregister()
    own = float_model(name)
    save_float(own, tmp_path / "own")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        _with(tmp_path / "own", want), dtype=torch.bfloat16
    )
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert_bits(tensor, state[key], key)


# ---- in layers of this library


def packed(name: str, folder: Path, change: Any = None) -> Path:
    """The checkpoint in MXFP8 of a float model."""
    save_float(float_model(name), folder / "float")
    convert(folder / "float", folder / "mxfp8", Packing("mxfp8"), device="cpu")
    if change is not None:
        tensors, config = read(folder / "mxfp8")
        change(tensors, config)
        (folder / "mxfp8" / "config.json").write_text(json.dumps(config))
        _with(folder / "mxfp8", tensors)
    return folder / "mxfp8"


@pytest.fixture
def _registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_model_is_that_of_quantize_model(name: str, tmp_path: Path) -> None:
    """Every layer, and the experts, in MXFP8, with the same bits."""
    model = load(packed(name, tmp_path))
    want = fp4gemm.models.quantize_model(float_model(name), activations="mxfp8")
    kinds = [type(m).__name__ for m in model.modules() if isinstance(m, (nn.Linear, nn.Experts))]
    assert kinds == [type(m).__name__ for m in want.modules() if isinstance(m, (nn.Linear, nn.Experts))]
    assert len(kinds) >= 10
    state = want.state_dict()
    for key, tensor in model.state_dict().items():
        assert_bits(tensor, state[key], key)
    assert_bits(logits(model), logits(want), name)
    ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert ids.shape == (1, 7)


@pytest.mark.usefixtures("_registered")
def test_layers_that_stay_in_float(tmp_path: Path) -> None:
    save_float(float_model("llama"), tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "mxfp8", Packing("mxfp8", bf16_last=1), device="cpu")
    model = load(tmp_path / "mxfp8")
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear


def _renamed(key: str) -> Any:
    def change(tensors: dict[str, torch.Tensor], config: Any) -> None:
        tensors[f"{key}.weight_scale_inv.x"] = tensors.pop(f"{key}.weight_scale_inv")

    return change


def _nan(tensors: dict[str, torch.Tensor], config: Any) -> None:
    tensors[f"{UP}.weight_scale_inv"][0, 0] = 255


def _block(tensors: dict[str, torch.Tensor], config: Any) -> None:
    config["quantization_config"]["weight_block_size"] = [128, 128]


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_renamed(UP), r"up_proj\.weight_scale is missing beside weight, which is MXFP8"),
        (_nan, r"up_proj: scale: holds nan, must be finite"),
        (_block, r"weight_block_size is .*, must be \[1, 32\] of mxfp8"),
    ],
    ids=["missing", "nan", "block"],
)
def test_refused_checkpoints(change: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        load(packed("llama", tmp_path, change))


@pytest.mark.usefixtures("_registered")
def test_refused_options_and_saving(tmp_path: Path) -> None:
    folder = packed("llama", tmp_path)
    with pytest.raises(ValueError, match=r"^activations: got 'a16', must be absent for a checkpoint"):
        load(folder, quantization_config=integration.Fp4GemmConfig(activations="a16"))
    with pytest.raises(ValueError, match=r"q_proj is MXFP8, must be NVFP4 to be saved; .*mxfp8` writes"):
        load(folder).save_pretrained(tmp_path / "again")


@pytest.mark.usefixtures("_registered")
def test_a_float_checkpoint_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    save_float(float_model("llama"), tmp_path)
    model = load(tmp_path, quantization_config=integration.Fp4GemmConfig(activations="mxfp8"))
    want = fp4gemm.models.quantize_model(float_model("llama"), activations="mxfp8")
    assert_bits(logits(model), logits(want), "logits")


def _with(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The folder of a float checkpoint with other tensors."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
