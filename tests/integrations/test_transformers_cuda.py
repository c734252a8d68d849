"""NVFP4 checkpoints in models of transformers on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_models import dequantized, write_mxfp4
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
@pytest.mark.parametrize("activations", ["a16", "fp8", "per-token"])
def test_experts_of_mxfp4(activations: Any, cuda: torch.device, tmp_path: Path) -> None:
    """The values of the checkpoint after the weights were prepacked, and logits near those of the CPU."""
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("its kernels of W4A16 and W4A8 are those of compute capability 9.0")
    config = integration.Fp4GemmConfig(activations=activations)
    write_mxfp4(tmp_path, intermediate_size=128)
    model, here = (load(tmp_path, device_map=d, quantization_config=config) for d in (cuda, "cpu"))
    want = logits(here, torch.device("cpu")).float()
    for _ in range(2):
        assert ((logits(model, cuda).cpu().float() - want).norm() / want.norm()).item() < 2**-6
    experts = model.model.layers[0].mlp.experts
    assert experts.w13.weight_prepacked is not None
    for child, weight in (("gate_up_proj", experts.w13), ("down_proj", experts.w2)):
        values = dequantized(tmp_path)[f"model.layers.0.mlp.experts.{child}"]
        assert torch.equal(weight.weight.dequantize(torch.bfloat16).cpu().mT, values)


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
