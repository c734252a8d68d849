"""Fp4GemmConfig(method=, calibration=): statistics of a file, batches and texts, while models are loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.calibration import Statistics
from nvfp4_models import IDS, MODELS, float_model, integration, load, logits, same_tensors, save_float
from tokenizers_of_words import TEXT, save_tokenizer

BATCHES = [(IDS * 3 + i) % 128 for i in range(4)]


def quiet(report: object) -> None:
    pass


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["search", "gptq"])
def test_statistics_of_a_file(name: str, method: Any, tmp_path: Path) -> None:
    """The bits of quantize_model, layer by layer as the weights are read."""
    source = save_float(float_model(name), tmp_path / "src")
    known = fp4gemm.calibrate(float_model(name), BATCHES, second_moment=True)
    known.save(tmp_path / "statistics")
    config = integration.Fp4GemmConfig(method=method, calibration=tmp_path / "statistics")
    model = load(source, quantization_config=config)
    options: dict[str, Any] = {"weight_scaling": "tensor", "report": quiet}
    want = fp4gemm.models.quantize_model(float_model(name), method=method, calibration=known, **options)
    assert same_tensors(model.state_dict(), want.state_dict())
    assert torch.equal(logits(model), logits(want))


@pytest.mark.parametrize("is_text", [False, True], ids=["batches", "texts"])
def test_batches_and_texts(is_text: bool, tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    save_tokenizer(source)
    ids = [torch.tensor([int(word) for word in TEXT.split()])[None], IDS[:1]]
    items: Any = [TEXT, " ".join(str(i) for i in IDS[0].tolist())] if is_text else ids
    config = integration.Fp4GemmConfig(calibration=items, fuse="auto", exclude="o_proj")
    model = load(source, quantization_config=config)
    options: dict[str, Any] = {"weight_scaling": "tensor", "report": quiet, "exclude": "o_proj"}
    want = fp4gemm.models.quantize_model(float_model("llama"), calibration=ids, fuse="auto", **options)
    assert same_tensors(model.state_dict(), want.state_dict())
    assert torch.equal(logits(model), logits(want))
    integration.save_pretrained(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "modelopt"
    assert "calibration" not in saved
    assert "method" not in saved
    again = load(tmp_path / "saved", quantization_config=integration.Fp4GemmConfig(fuse="auto"))
    assert torch.equal(logits(again), logits(want))


def test_options_as_a_dict(tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    known = fp4gemm.calibrate(float_model("llama"), BATCHES)
    known.save(tmp_path / "statistics")
    config = integration.Fp4GemmConfig(calibration=tmp_path / "statistics")
    assert config.method == "search"
    options = json.loads(json.dumps(config.to_dict()))
    assert options == {"quant_method": "fp4gemm", "calibration": str(tmp_path / "statistics")}
    a, b = (load(source, quantization_config=each) for each in (config, options))
    assert same_tensors(a.state_dict(), b.state_dict())
    assert integration.Fp4GemmConfig(calibration=BATCHES).to_dict() == {"quant_method": "fp4gemm"}
    assert integration.Fp4GemmConfig(method="round").to_dict() == {
        "quant_method": "fp4gemm",
        "method": "round",
    }


def test_what_was_done_otherwise_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save_float(float_model("qwen3-moe"), tmp_path / "src")
    fp4gemm.calibrate(float_model("qwen3-moe"), BATCHES, second_moment=True).save(tmp_path / "statistics")
    config = integration.Fp4GemmConfig(calibration=tmp_path / "statistics")
    with caplog.at_level(logging.WARNING, "fp4gemm"):
        load(source, quantization_config=config)
    assert "model.layers.0.mlp.experts: " in caplog.text
    assert "experts saw fewer than 64 tokens: all added" in caplog.text


def test_refusals(tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    known = dict(fp4gemm.calibrate(float_model("llama"), BATCHES))
    del known["model.layers.1.mlp.up_proj"]
    Statistics(known).save(tmp_path / "statistics")
    with pytest.raises(ValueError, match=r"^method: got 'gptq', must be another for statistics without s"):
        integration.Fp4GemmConfig(method="gptq", calibration=tmp_path / "statistics")
    for items in (BATCHES, tmp_path / "statistics"):
        with pytest.raises(ValueError, match=r"^calibration: got a \w+ with the method 'round', must be abs"):
            integration.Fp4GemmConfig(method="round", calibration=items)
    config = integration.Fp4GemmConfig(calibration=tmp_path / "statistics")
    with pytest.raises(ValueError, match=r"^calibration: has no statistics of 'model\.layers\.1\.mlp"):
        load(source, quantization_config=config)
    with pytest.raises(ValueError, match=r"^calibration: .*src has no tokenizer, which texts need; pass b"):
        load(source, quantization_config=integration.Fp4GemmConfig(calibration=[TEXT]))
    fp4gemm.checkpoint.convert(source, tmp_path / "nvfp4")
    for options in ({"calibration": BATCHES}, {"method": "round"}):
        with pytest.raises(ValueError, match=r"must be absent for a checkpoint that is quantized already"):
            load(tmp_path / "nvfp4", quantization_config=integration.Fp4GemmConfig(**options))


@pytest.mark.gpu
def test_on_a_gpu(cuda: torch.device, tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    save_tokenizer(source)
    config = integration.Fp4GemmConfig(calibration=[TEXT])
    model = load(source, quantization_config=config, device_map="cuda")
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.isfinite(logits(model)).all()
