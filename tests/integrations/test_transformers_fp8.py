"""FP8 tokens in models of transformers: use_fast_accum in checkpoints, "auto", and what convert wrote."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint import Options, convert
from fp4gemm.checkpoint.formats import FORMATS, FormatName
from fp4gemm.models import automatic, quantize_model
from nvfp4_models import float_model, integration, load, logits, read, save_float
from saved_models import saved_and_loaded

FORMAT_NAMES: tuple[FormatName, ...] = tuple(FORMATS)
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_fast_sums_are_kept(format: FormatName, tmp_path: Path) -> None:
    """use_fast_accum of the layers is in the producer; other activations that are asked for do without it."""
    first, second = tmp_path / "float", tmp_path / "nvfp4"
    save_float(float_model("llama", intermediate_size=128), first)
    config = integration.Fp4GemmConfig(activations="fp8", use_fast_accum=True, format=format)
    model = load(first, quantization_config=config)
    model.save_pretrained(second)
    assert read(second)[1]["quantization_config"]["producer"]["use_fast_accum"] is True

    def options(**given: Any) -> set[tuple[str, bool]]:
        asked = {"quantization_config": integration.Fp4GemmConfig(**given)} if given else {}
        found = load(second, **asked)
        return {(m.activations, m.use_fast_accum) for m in found.modules() if isinstance(m, nn.Linear)}

    assert options() == {("fp8", True)}
    assert options(use_fast_accum=False) == {("fp8", False)}
    assert options(activations="a16") == {("a16", False)}
    with pytest.raises(ValueError, match=r"^use_fast_accum: got True with activations 'a16', must be False"):
        integration.Fp4GemmConfig(activations="a16", use_fast_accum=True)
    with pytest.raises(ValueError, match=r"^use_fast_accum: got True with activations 'per-token'"):
        load(first, quantization_config=integration.Fp4GemmConfig(use_fast_accum=True))
    given = {"quant_method": "fp4gemm", "activations": "auto", "use_fast_accum": True}
    assert integration.Fp4GemmConfig.from_dict(given).to_dict() == given


@pytest.mark.parametrize("source", ["float", "nvfp4", "calibrated"])
def test_auto_is_settled_where_the_layers_lie(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on compute capability 9.0: FP8 tokens but for down_proj, whose k is 96. On the CPU the default."""
    first, second = tmp_path / "float", tmp_path / "nvfp4"
    save_float(float_model("llama"), first)
    if source == "nvfp4":
        load(first, quantization_config=integration.Fp4GemmConfig(activations="a16")).save_pretrained(second)
    options: Any = {"activations": "auto", "use_fast_accum": True}
    if source == "calibrated":
        options["calibration"] = [torch.arange(16).view(1, 16)]

    def kinds() -> dict[str, tuple[str, bool]]:
        config = integration.Fp4GemmConfig(**options)
        found = load(second if source == "nvfp4" else first, quantization_config=config)
        logits(found)
        return {
            name.rpartition(".")[2]: (m.activations, m.use_fast_accum)
            for name, m in found.named_modules()
            if isinstance(m, nn.Linear)
        }

    assert set(kinds().values()) == {("per-token", False)}
    fake = types.SimpleNamespace(streams_prepacked=lambda device, tokens: True)
    monkeypatch.setattr(automatic, "support", fake)
    with caplog.at_level(logging.INFO, "fp4gemm.integrations.transformers"):
        found = kinds()
    assert found.pop("down_proj") == ("a16", False)
    assert set(found.values()) == {("fp8", True)}
    text = " ".join(caplog.messages)
    assert "down_proj: " in text
    assert "activations 'a16' by 'auto', since k is no multiple of 64" in text
    assert "activations 'fp8' of 12 layers" in text
    assert "activations 'a16' of 2 layers" in text


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_what_convert_wrote_is_honoured(format: FormatName, tmp_path: Path) -> None:
    """Its layers have FP8 tokens unless another value is asked for; a weight with k = 96 stays in float."""
    first, second = tmp_path / "float", tmp_path / "nvfp4"
    save_float(float_model("llama"), first)
    convert(first, second, Options(format=format, activations="fp8"))
    found = load(second)
    layers = dict(found.named_modules())
    assert {m.activations for m in layers.values() if isinstance(m, nn.Linear)} == {"fp8"}
    assert isinstance(layers["model.layers.0.self_attn.q_proj"], nn.Linear)
    assert isinstance(layers["model.layers.0.mlp.down_proj"], torch.nn.Linear)
    other = load(second, quantization_config=integration.Fp4GemmConfig(activations="a16"))
    assert {m.activations for m in other.modules() if isinstance(m, nn.Linear)} == {"a16"}
    assert not torch.equal(logits(found), logits(other))


@pytest.mark.parametrize("activations", ["fp8", "auto"])
def test_what_auto_chose_is_saved(activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on compute capability 9.0, where every k is a multiple of 64: the checkpoint says "fp8"."""
    fake = types.SimpleNamespace(streams_prepacked=lambda device, tokens: True)
    monkeypatch.setattr(automatic, "support", fake)
    model = float_model("llama", intermediate_size=128)
    options: Any = {"activations": activations, "use_fast_accum": True, "fuse": "auto"}
    quantize_model(model, **options, report=lambda report: None)
    again = saved_and_loaded(model, tmp_path)
    kinds = {(m.activations, m.use_fast_accum) for m in again.modules() if isinstance(m, nn.Linear)}
    assert kinds == {("fp8", True)}
    assert torch.equal(logits(again), logits(model))


def test_what_auto_mixed_is_refused_with_the_way_to_save_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on compute capability 9.0, where down_proj has a k of 96: the way of the message gives its bits."""
    fake = types.SimpleNamespace(streams_prepacked=lambda device, tokens: True)
    monkeypatch.setattr(automatic, "support", fake)
    made = {
        kind: quantize_model(float_model("llama"), activations=kind, report=lambda report: None)
        for kind in ("auto", "a16")
    }
    with pytest.raises(
        ValueError,
        match=r"^model: its layers differ in activations \('fp8' of .*_proj, 'a16' of .*down_proj\), must "
        r"agree in a checkpoint; quantize with activations='a16', and load .* with activations='auto'$",
    ):
        made["auto"].save_pretrained(tmp_path)
    config = integration.Fp4GemmConfig(activations="auto")
    again = saved_and_loaded(made["a16"], tmp_path, quantization_config=config)
    assert torch.equal(logits(again), logits(made["auto"]))
    assert not torch.equal(logits(again), logits(made["a16"]))
