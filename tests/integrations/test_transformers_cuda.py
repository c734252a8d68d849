"""NVFP4 checkpoints in models of transformers on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nvfp4_models import (
    IDS,
    MODELS,
    float_model,
    in_place,
    integration,
    load,
    read,
    same_tensors,
    save_float,
    write_nvfp4,
)

pytest.importorskip("accelerate", reason="accelerate is not installed")


def logits(model: Any, device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS.to(device)).logits
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("activations", ["a16", "per-token"])
def test_loaded_onto_a_gpu(name: str, activations: Any, cuda: torch.device, tmp_path: Path) -> None:
    """Logits equal those of the model quantized in place, also after the weights were prepacked and saved."""
    if activations == "a16" and torch.cuda.get_device_capability(cuda)[0] >= 10:
        pytest.skip("devices with FP4 tensor cores refuse W4A16")
    folder = write_nvfp4(float_model(name), tmp_path / "checkpoint", "modelopt", activations)
    model = load(folder, device_map=cuda)
    want = in_place(name, "a16" if activations == "a16" else "per-token").to(cuda)
    for _ in range(2):
        assert torch.equal(logits(model, cuda), logits(want, cuda))
    integration.save_pretrained(model, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again")[0], read(folder)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_quantized_on_a_gpu_while_loaded(name: str, cuda: torch.device, tmp_path: Path) -> None:
    save_float(float_model(name), tmp_path)
    on_gpu, on_cpu = (
        load(tmp_path, device_map=device, quantization_config=integration.Fp4GemmConfig())
        for device in (cuda, "cpu")
    )
    state = {key: tensor.cpu() for key, tensor in on_gpu.state_dict().items()}
    assert same_tensors(state, on_cpu.state_dict())


@pytest.mark.gpu
def test_offloaded_to_the_cpu(cuda: torch.device, tmp_path: Path) -> None:
    folder = write_nvfp4(float_model("mixtral"), tmp_path, "modelopt")
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = dict.fromkeys(names, cuda.index) | {"model.layers.1": "cpu"}
    model = load(folder, device_map=device_map, offload_buffers=True)
    assert model.model.layers[1].mlp.experts.w13.weight_codes.is_meta
    for _ in range(2):
        assert torch.equal(logits(model, cuda), logits(load(folder, device_map=cuda), cuda))
