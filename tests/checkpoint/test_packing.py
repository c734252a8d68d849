"""convert --format mxfp4: the experts of a float GPT-OSS in MXFP4, as OpenAI's checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from checkpoints import contents, llama, load, random, save
from fp4gemm.__main__ import main
from fp4gemm.checkpoint import CheckpointError, Packing, Translation, convert, plan_conversion
from fp4gemm.checkpoint.formats import SOURCES
from helpers import assert_bits
from torch import Tensor

G, HIDDEN, INTERMEDIATE = 3, 64, 32
EXPERTS = "model.layers.0.mlp.experts"
CONFIG = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "swiglu_limit": 7.0, "num_hidden_layers": 1}
SIZES = {"gate_up_proj": (HIDDEN, 2 * INTERMEDIATE), "down_proj": (INTERMEDIATE, HIDDEN)}


def tensors_of() -> dict[str, Tensor]:
    """A layer with float experts, (g, k, n), and the other tensors of a small model."""
    gen = torch.Generator().manual_seed(5)
    tensors = {name: t for name, t in llama(1).items() if ".mlp." not in name}
    tensors["model.layers.0.mlp.router.weight"] = random(gen, G, HIDDEN)
    for child, (k, n) in SIZES.items():
        tensors[f"{EXPERTS}.{child}"] = random(gen, G, k, n)
        tensors[f"{EXPERTS}.{child}_bias"] = random(gen, G, n)
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scale", ["floor", "ceil"])
def test_the_bits_of_quantize_mxfp4(scale: str, shards: int, tmp_path: Path) -> None:
    tensors = tensors_of()
    source = save(tmp_path / "a", tensors, shards=shards, config=CONFIG)
    report = convert(source, tmp_path / "b", Packing(scale=scale), verify=True, device="cpu")
    made, config = load(tmp_path / "b"), json.loads((tmp_path / "b" / "config.json").read_text())
    assert config == {
        **CONFIG,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    }
    for child in SIZES:
        made_here = fp4gemm.quantize_mxfp4(tensors.pop(f"{EXPERTS}.{child}").mT, scale=scale)  # type: ignore[arg-type]
        codes, scales = made_here.to_weight()
        assert_bits(made.pop(f"{EXPERTS}.{child}_blocks"), codes, child)
        assert_bits(made.pop(f"{EXPERTS}.{child}_scales"), scales, child)
    assert made.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_bits(made[name], tensor, name)
    assert report.is_verified
    actions = {entry.name: entry.action for entry in report.tensors}
    assert actions[f"{EXPERTS}.down_proj"] == "quantized"
    assert actions[f"{EXPERTS}.down_proj_bias"] == "float"


def test_it_is_what_the_format_reads(tmp_path: Path) -> None:
    """The tensors are those of the format, and each of the NVFP4 formats can be made of them."""
    source = save(tmp_path / "a", tensors_of(), config=CONFIG)
    convert(source, tmp_path / "b", Packing(), device="cpu")
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert SOURCES["mxfp4"].read(config, "config") == tuple(config["modules_to_not_convert"])
    report = convert(tmp_path / "b", tmp_path / "c", Translation("mxfp4", "modelopt"), device="cpu")
    assert sum(entry.action == "translated" for entry in report.tensors) == 6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "a", tensors_of(), config=CONFIG)
    convert(source, tmp_path / "b", Packing(scale="ceil"), device="cpu")
    given = ["convert", str(source), str(tmp_path / "c"), "--format", "mxfp4", "--device", "cpu"]
    assert main([*given, "--scale", "ceil", "--verify"]) == 0
    assert "method: mxfp4, scale ceil" in capsys.readouterr().out
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    assert "quantized" in str(plan_conversion(source, Packing()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "mxfp4", "--method", "round"], "--method: got with --format mxfp4, must be absent"),
        (["--scale", "ceil"], "--scale: got ceil, must be absent without --format mxfp4"),
    ],
)
def test_options_of_others(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["convert", str(tmp_path), str(tmp_path / "b"), *arguments])
    except (SystemExit, ValueError) as error:
        code, text = 2, str(error)
    else:
        text = ""
    assert code
    assert message in text + capsys.readouterr().err


def _without(name: str) -> dict[str, Tensor]:
    tensors = tensors_of()
    del tensors[name]
    return tensors


def _with(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {**tensors_of(), name: tensor}


NAN = torch.full((G, INTERMEDIATE, HIDDEN), float("nan")).bfloat16()
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model": (tensors_of, {"model_type": "llama"}, r"model_type is 'llama', must be 'gpt_oss'"),
    "limit": (tensors_of, {"swiglu_limit": 6.0}, r"swiglu_limit is 6\.0, must be 7\.0"),
    "quantized": (
        tensors_of,
        {"quantization_config": {"quant_method": "fp8"}},
        r"is quantized already, must be a float checkpoint",
    ),
    "none": (lambda: llama(1), {}, r"has no tensor experts\.gate_up_proj"),
    "partner": (lambda: _without(f"{EXPERTS}.down_proj"), {}, r"down_proj is missing beside .*gate_up_proj$"),
    "dtype": (
        lambda: _with(f"{EXPERTS}.down_proj", torch.ones(G, INTERMEDIATE, HIDDEN, dtype=torch.int8)),
        {},
        r"down_proj has the dtype I8, must be BF16, F16 or F32",
    ),
    "shape": (
        lambda: _with(f"{EXPERTS}.gate_up_proj", torch.ones(G, 2 * INTERMEDIATE + 2, HIDDEN)),
        {},
        r"gate_up_proj has the shape \(3, 66, 64\), must be \(3, 64, 64\)",
    ),
    "nan": (lambda: _with(f"{EXPERTS}.down_proj", NAN), {}, r"down_proj \(expert 0\): holds NaN or infinity"),
}


@pytest.mark.parametrize(("make", "change", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(make: Any, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = save(tmp_path / "a", make(), config={**CONFIG, **change})
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "b", Packing(), device="cpu")


@pytest.mark.parametrize(("name", "value"), [("format", "modelopt"), ("scale", "even")])
def test_bad_options(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got '{value}', must be"):
        Packing(**{name: value})  # type: ignore[arg-type]
