"""Conversions by a text: transformers loads the float model, which reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from checkpoints import contents
from fp4gemm.__main__ import main
from fp4gemm.calibration import Statistics
from fp4gemm.checkpoint import CheckpointError, Options, Text, convert, plan_conversion
from nvfp4_models import MODELS, float_model, load, save_float, transformers
from tokenizers_of_words import TEXT, save_tokenizer


def checkpoint(folder: Path, name: str = "llama") -> Path:
    save_tokenizer(save_float(float_model(name), folder))
    return folder


def batches() -> list[torch.Tensor]:
    return [torch.tensor([int(word) for word in TEXT.split()])[None]]


@pytest.mark.parametrize("name", MODELS)
def test_a_text_gives_the_statistics_of_the_model(name: str, tmp_path: Path) -> None:
    """Also under the names that a checkpoint has for what the model calls otherwise (Mixtral)."""
    source = checkpoint(tmp_path / "src", name)
    report = convert(source, tmp_path / "text", Options(calibration=TEXT), device="cpu", measured=True)
    assert report.method.startswith("gptq, calibrated by the 300 tokens of a text")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    known = fp4gemm.calibrate(model, batches(), second_moment=True)
    owner = "block_sparse_moe" if name == "mixtral" else "mlp"
    renamed = {key.replace(".mlp.", f".{owner}."): value for key, value in known.items()}
    convert(source, tmp_path / "statistics", Options(calibration=Statistics(renamed)), device="cpu")
    old, new = contents(tmp_path / "text"), contents(tmp_path / "statistics")
    assert {file for file in old if old[file] != new[file]} == {"fp4gemm_convert.json"}
    with torch.inference_mode():
        assert torch.isfinite(loaded_logits(tmp_path / "text")).all()
    if name == "qwen3-moe":  # 300 tokens are routed to two of four experts each
        assert len(report.layers) == 2 * (4 + 3 * 4)


def loaded_logits(folder: Path) -> torch.Tensor:
    fp4gemm.integrations.transformers.register()
    try:
        logits: torch.Tensor = load(folder)(batches()[0]).logits
    finally:
        fp4gemm.integrations.transformers.unregister()
    return logits


def test_resume_verify_and_the_number_of_tokens(tmp_path: Path) -> None:
    source, steps = checkpoint(tmp_path / "src"), []
    options = Options(method="search", calibration=Text(TEXT, 64, "words"))
    assert plan_conversion(source, options).method == "search, calibrated by words"
    report = convert(source, tmp_path / "a", options, calibrating=lambda *step: steps.append(step))
    assert steps == [(1, 1, "batch 1")]
    assert "calibrated by the first 64 of the 300 tokens of words" in str(report)
    before = contents(tmp_path / "a")
    assert convert(source, tmp_path / "a", options, resume=True).already_done
    assert len(steps) == 1  # nothing was read again
    (tmp_path / "a" / "model.safetensors").unlink()
    convert(source, tmp_path / "a", options, resume=True, verify=True)
    assert contents(tmp_path / "a") == before
    with pytest.raises(CheckpointError, match=r"a: was begun with calibration \{.*64.*\}, got \{"):
        convert(source, tmp_path / "a", Options(method="search", calibration=TEXT), resume=True)
    state = tmp_path / "a" / "fp4gemm_convert.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps({**content, "calibration": "0"}))
    with pytest.raises(
        CheckpointError, match="was begun with other statistics of words than the model gives now"
    ):
        convert(source, tmp_path / "a", options, verify=True)


def test_gptq_with_few_tokens_says_so(tmp_path: Path) -> None:
    report = convert(checkpoint(tmp_path / "src"), tmp_path / "a", Options(calibration=Text(TEXT, 32)))
    assert "fewer than the 128 inputs of a layer; a longer text is better" in report.method


def test_what_is_excluded_is_not_calibrated(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "src")
    options: dict[str, Any] = {"calibration": TEXT, "include": ["lm_head", "*.o_proj"]}
    report = convert(source, tmp_path / "a", Options(**options), measured=True)
    assert [layer.module for layer in report.layers if "lm_head" in layer.module] == ["lm_head"]
    assert len(report.layers) == 3


def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    options = Options(calibration=TEXT)
    with pytest.raises(
        CheckpointError, match="src: has no tokenizer that transformers can load, which calibrat"
    ):
        convert(source, tmp_path / "a", options)
    assert main(["convert", str(source), str(tmp_path / "a"), "--calibration", TEXT, "--resume"]) == 1
    assert "has no tokenizer" in capsys.readouterr().err
    save_tokenizer(source)
    (tmp_path / "text").write_text(TEXT)
    arguments = ["--calibration", str(tmp_path / "text"), "--calibration-tokens", "64", "--method", "search"]
    assert main(["convert", str(source), str(tmp_path / "b"), *arguments]) == 0
    shown = capsys.readouterr()
    assert "the model reads the text: batch 1 (1 of 1)" in shown.err
    assert f"calibrated by the first 64 of the 300 tokens of {tmp_path / 'text'}" in shown.out
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError, match="transformers is not installed, which calibration by a text"
    ):
        convert(source, tmp_path / "c", options)
    assert main(["convert", str(source), str(tmp_path / "d"), "--calibration", TEXT]) == 1
    assert "transformers is not installed" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(cuda: torch.device, name: str, tmp_path: Path) -> None:
    """The statistics are those of bfloat16 there; the output errors are about those of the CPU."""
    source = checkpoint(tmp_path / "src", name)
    options, found = Options(calibration=TEXT), []
    for device in ("cpu", "cuda"):
        report = convert(source, tmp_path / device, options, device=device, measured=True)
        found.append(sum(layer.output_error or 0 for layer in report.layers))
    assert found[1] == pytest.approx(found[0], rel=0.1)
    convert(source, tmp_path / "cuda", options, device="cuda", verify=True)
    with pytest.raises(CheckpointError, match=r"was begun with device 'cpu', got "):
        convert(source, tmp_path / "cpu", options, device="cuda", resume=True)
