"""Checkpoints of ``convert --format mxfp8`` in models of transformers, which loads them by its own code.

Without a GPU transformers dequantizes the layers; ``FineGrainedFP8Config(dequantize=True)`` asks for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp4gemm.checkpoint import Packing, convert
from helpers import assert_bits
from nvfp4_models import float_model, integration, load, read, save_float, transformers

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


def _with(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The folder of a float checkpoint with other tensors."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
