"""Residual channels of a conversion: which they are, that the rest keeps its bits, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from checkpoints import HIDDEN, INTERMEDIATE, LLAMA, MOE, llama, load, moe, save
from fp4gemm.__main__ import main
from fp4gemm.calibration import InputStatistics, Statistics, residual_channels
from fp4gemm.checkpoint import (
    CheckpointError,
    Options,
    Plan,
    Text,
    Translation,
    choose,
    convert,
    plan_conversion,
    quantize_named,
)
from fp4gemm.checkpoint.formats import FORMATS, read_scheme
from nvfp4_models import float_model, save_float, transformers
from tokenizers_of_words import TEXT, save_tokenizer

SETS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
COUNT = 32


def of_layer(gen: torch.Generator, k: int, *, has_error: bool = True) -> InputStatistics:
    x = torch.randn(2 * k, k, generator=gen) * torch.linspace(0.1, 3, k)
    error = (x - fp4gemm.quantize(x).dequantize(torch.float32)).square().mean(0) if has_error else None
    return InputStatistics(torch.tensor(2 * k), x.square().mean(0), x.T @ x / (2 * k), error)


def known(names: Any, *, has_error: bool = True) -> Statistics:
    """The channels of each layer with such a name; the layers of a fused set share them."""
    gen, made = torch.Generator().manual_seed(3), {}
    modules = [name.removesuffix(".weight") for name in names if name.endswith("_proj.weight")]
    for end, k in (("q k v", HIDDEN), ("o", HIDDEN), ("gate up", HIDDEN), ("down", INTERMEDIATE)):
        of_end = of_layer(gen, k, has_error=has_error)
        for module in modules:
            if module.rpartition(".")[2].removesuffix("_proj") in end.split():
                made[module] = of_end
    return Statistics(made)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)) for name in a
    )


def options(**more: Any) -> Options:
    given = {"activations": "per-token", "residual_channels": COUNT, "calibration": known(llama(1))}
    return Options(**{**given, **more})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "src", llama(1), shards=2)


@pytest.mark.parametrize("method", ["gptq", "round"])
@pytest.mark.parametrize("format", FORMATS)
def test_sets_share_the_costliest_channels(format: Any, method: Any, source: Path, tmp_path: Path) -> None:
    """All other tensors are those of a conversion without; the config says how many channels there are."""
    made = options(format=format, method=method)
    report = convert(source, tmp_path / "dst", made, verify=True)
    assert str(report.method).endswith(f", {COUNT} residual channels")
    old, new = load(source), load(tmp_path / "dst")
    for names in SETS:
        modules = [f"model.layers.0.{name}" for name in names]
        errors = [made.calibration[module].quantization_error for module in modules]  # type: ignore[index]
        want = residual_channels([old[f"{module}.weight"] for module in modules], errors, COUNT)
        assert all(torch.equal(new.pop(f"{module}.residual_channels"), want) for module in modules)
    without = {"calibration": None} if method == "round" else {}
    plain = options(format=format, method=method, residual_channels=0, **without)
    convert(source, tmp_path / "plain", plain)
    assert same(load(tmp_path / "plain"), new)
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("dst", "plain")]
    assert configs[0]["quantization_config"]["producer"].pop("residual_channels") == COUNT
    assert configs[0] == configs[1]
    scheme = read_scheme(json.loads((tmp_path / "dst" / "config.json").read_text()), tmp_path / "dst")
    assert scheme is not None
    assert scheme.residual_channels == COUNT


def test_tensor_by_tensor_gives_the_same_bits(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", options())
    old, new = load(source), load(tmp_path / "dst")
    plan = Plan.of_shapes({n: (t.shape, t.dtype) for n, t in old.items()}, LLAMA, options())
    assert same(dict(quantize_named(old.items(), plan)), new)


def test_layers_without_are_named_in_the_report(tmp_path: Path) -> None:
    """Experts, layers in FP8, and those with fewer channels."""
    source, names = save(tmp_path / "src", moe(), config=MOE), moe()
    layers: Any = {"model.layers.0.self_attn.o_proj": "fp8-channel"}
    wide = options(calibration=known(names), residual_channels=96, layers=layers)
    report = convert(source, tmp_path / "dst", wide, verify=True)
    reasons = {entry.name: entry.reason for entry in report.tensors if entry.action == "quantized"}
    new = load(tmp_path / "dst")
    for name, reason in reasons.items():
        if ".experts." in name:
            text = "no residual channels: experts have none"
        elif "o_proj" in name:
            text = "no residual channels: FP8 per channel has none"
        elif "down_proj" in name:
            text = ""
        else:
            text = "no residual channels: k is 64, must be at least 96"
        assert reason.endswith(text), name
        assert ("residual" in reason) == bool(text), name
        assert (f"{name.removesuffix('weight')}residual_channels" in new) == (not text)
    assert len({*reasons.values()}) > 4


def test_a_text_gives_the_channels_of_its_statistics(tmp_path: Path) -> None:
    source = save_float(float_model("llama"), tmp_path / "src")
    save_tokenizer(source)
    arguments = ["--calibration", TEXT, "--residual-channels", "32", "--format", "fp4gemm", "--device", "cpu"]
    assert main(["convert", str(source), str(tmp_path / "text"), *arguments]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    batch = torch.tensor([int(word) for word in TEXT.split()])[None]
    made = fp4gemm.calibrate(model, [batch], second_moment=True, quantization_error=True)
    convert(source, tmp_path / "known", options(format="fp4gemm", calibration=made), device="cpu")
    want = load(tmp_path / "known")
    assert sum(name.endswith(".residual_channels") for name in want) == 14
    assert same(load(tmp_path / "text"), want)


def test_formats_are_chosen_by_the_losses_without(tmp_path: Path) -> None:
    """--auto measures the rounding of weights and activations alone; the bytes of the channels count."""
    source = save_float(float_model("llama"), tmp_path / "src")
    save_tokenizer(source)
    given: dict[str, Any] = {"bits": 5.5, "calibration": TEXT, "formats": ("nvfp4", "fp8-channel")}
    chosen = choose(source, options(calibration=Text(TEXT)), device="cpu", **given)
    plain = choose(source, Options(activations="per-token"), device="cpu", **given)
    assert [each.losses for each in chosen.choices] == [each.losses for each in plain.choices]
    for one, other in zip(chosen.choices, plain.choices, strict=True):
        more = 32 * COUNT * len(one.modules) / one.elements
        assert one.bits_of["nvfp4"] == pytest.approx(other.bits_of["nvfp4"] + more)
    convert(source, tmp_path / "dst", chosen.options, device="cpu")
    fp8 = [name for name, choice in chosen.options.layers.items() if choice == "fp8-channel"]
    new = load(tmp_path / "dst")
    assert fp8
    assert not any(f"{name}.residual_channels" in new for name in fp8)
    assert sum(name.endswith(".residual_channels") for name in new) == 14 - len(fp8)


def test_a_translation_keeps_them(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", options())
    convert(tmp_path / "a", tmp_path / "b", Translation("modelopt", "compressed-tensors"), verify=True)
    convert(tmp_path / "b", tmp_path / "c", Translation("compressed-tensors", "modelopt"), verify=True)
    old, between, new = (load(tmp_path / each) for each in "abc")
    assert same(old, new)
    channels = {name: tensor for name, tensor in old.items() if name.endswith(".residual_channels")}
    assert len(channels) == 7
    assert same(channels, {name: between[name] for name in channels})
    for folder in "bc":
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"]["producer"]["residual_channels"] == COUNT


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"residual_channels": "32"}, TypeError, "residual_channels: got '32' (str), must be an int"),
    "negative": ({"residual_channels": -32}, ValueError, "residual_channels: got -32, must be at least 0"),
    "step": ({"residual_channels": 48}, ValueError, "residual_channels: got 48, must be a multiple of 32"),
    "a16": (
        {"activations": "a16"}, ValueError,
        "residual_channels: got 32 with activations 'a16', must be 0, or have activations 'per-token' or "
        "'per-tensor'",
    ),
    "fp8": ({"activations": "fp8"}, ValueError, "residual_channels: got 32 with activations 'fp8', must"),
    "default": ({"activations": None}, ValueError, "residual_channels: got 32 with activations 'a16', must"),
    "no-data": (
        {"calibration": None}, ValueError,
        "residual_channels: got 32 without calibration, must be 0, or have the calibration that chooses them",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "text"), BAD.values(), ids=BAD)
def test_bad_options(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        options(**changed)


def test_statistics_without_errors_are_refused(source: Path) -> None:
    made = options(calibration=known(llama(1), has_error=False))
    text = "o_proj has no quantization_error, must have for residual_channels (calibrate(..., quantization_e"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        plan_conversion(source, made)
    assert plan_conversion(source, options(calibration=Text("a b"))).method.endswith("32 residual channels")


def test_configs_of_wrong_numbers_are_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", options())
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    config["quantization_config"]["producer"]["residual_channels"] = 20
    with pytest.raises(ValueError, match="producer: residual_channels: got 20, must be a multiple of 32"):
        read_scheme(config)
    config["quantization_config"]["producer"] |= {"residual_channels": 32, "activation_scaling": "fp8"}
    with pytest.raises(ValueError, match="activation_scaling of producer is 'fp8'"):
        read_scheme(config)
