"""convert --format mxfp8: linear layers in MXFP8, as miles' tools/convert_hf_to_mxfp8.py writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA, contents, llama, load, random, save
from fp4gemm.__main__ import main
from fp4gemm.checkpoint import CheckpointError, Packing, convert, plan_conversion
from helpers import assert_bits
from mxfp8_numbers import packed
from torch import Tensor

STAYS = {  # names of weights (32, 64) that miles keeps, and whether the config names them
    "model.layers.0.input_layernorm.weight": True,
    "model.layers.0.mlp.gate.weight": True,
    "model.layers.0.ffn.gate.weight": True,
    "model.layers.0.self_attn.indexer.weights_proj.weight": True,
    "model.layers.0.self_attn.wo_a.weight": True,
    "model.layers.0.self_attn.compressor.wkv.weight": True,
    "model.layers.1.eh_proj.weight": True,
    "model.layers.10.mlp.router.weight": True,
    "model.layers.2.mlp.experts.3.norm.weight": False,
    "head.weight": True,
    "lm_head.weight": True,
    "model.layers.0.mlp.experts.gate_up_proj": False,
}
PACKED = ("model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.mlp.experts.1.down_proj.weight")


def tensors_of() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(3)
    tensors = llama(2)
    for name in (*STAYS, *PACKED):
        tensors[name] = random(gen, 2, 64, 32) if name.endswith("gate_up_proj") else random(gen, 32, 64)
    tensors["model.layers.0.conv.weight"] = random(gen, 8, 3, 64)  # more than two dimensions
    tensors["model.layers.0.odd.weight"] = random(gen, 8, 48)  # k is no multiple of 32
    tensors["model.layers.0.half.weight"] = random(gen, 8, 64, dtype=torch.float16)
    wide = random(gen, 40, 96, dtype=torch.float32)
    wide[::3] *= 2.0 ** torch.randint(-120, 120, (14, 96), generator=gen)
    wide[1, :32], wide[1, 32], wide[2, 5] = 0.0, 448.0, -0.0
    wide[4, 0:64:2] = 2.0**-140
    wide[5] = torch.finfo(torch.float32).max
    tensors["model.layers.0.wide.weight"] = wide
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_the_tensors_and_the_config_are_those_of_miles(shards: int, tmp_path: Path) -> None:
    tensors = tensors_of()
    source = save(tmp_path / "a", tensors, shards=shards)
    report = convert(source, tmp_path / "b", Packing("mxfp8"), verify=True, device="cpu")
    assert report.is_verified
    made, config = load(tmp_path / "b"), json.loads((tmp_path / "b" / "config.json").read_text())
    parts = ("norm", "embed", "lm_head", "head.", "router", ".gate.", "eh_proj", "weights_proj", "wo_a")
    kept = {
        name
        for name, t in tensors.items()
        if not name.endswith(".weight")
        or t.dim() < 2
        or t.shape[-1] % 32
        or any(part in name for part in (*parts, "compressor."))
    }
    assert set(STAYS) <= kept
    assert not kept & set(PACKED)
    for name, tensor in tensors.items():
        if name in kept:
            assert_bits(made.pop(name), tensor, name)
            continue
        values, scales = packed(tensor)
        assert_bits(made.pop(name), values, name)
        assert_bits(made.pop(f"{name}_scale_inv"), scales, name)
    assert not made
    quantization = config.pop("quantization_config")
    assert config == LLAMA
    modules = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
    }
    named = {name.removesuffix(".weight") for name in kept if STAYS.get(name, name.endswith(".weight"))}
    assert set(modules) == named
    assert len(modules) == len(named)
    at = [modules.index(f"model.layers.{end}") for end in ("0.mlp.gate", "1.eh_proj", "10.mlp.router")]
    assert at == sorted(at)
    reasons = {entry.name: entry.reason for entry in report.tensors}
    assert reasons["model.layers.0.odd.weight"] == "k is 48, must be a multiple of 32"
    assert reasons["model.layers.0.self_attn.wo_a.weight"] == "its name has 'wo_a'"
    assert reasons["model.layers.0.mlp.gate.weight"] == "router"


def test_a_checkpoint_without_exceptions_has_no_list(tmp_path: Path) -> None:
    """miles writes ``modules_to_not_convert`` only if there are some."""
    source = save(tmp_path / "a", {"q_proj.weight": torch.ones(8, 32)})
    convert(source, tmp_path / "b", Packing("mxfp8"), device="cpu")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "modules_to_not_convert" not in config["quantization_config"]


def test_layers_at_both_ends_stay(tmp_path: Path) -> None:
    """The config has their prefixes too, as that of miles."""
    config = {**LLAMA, "num_hidden_layers": 4}
    tensors = llama(4)
    tensors["model.layers.4.mlp.down_proj.weight"] = torch.ones(32, 64).bfloat16()  # no layer of the model
    source = save(tmp_path / "a", tensors, config=config)
    given = ["convert", str(source), str(tmp_path / "b"), "--format", "mxfp8", "--device", "cpu"]
    assert main([*given, "--bf16-first", "2", "--bf16-last", "1"]) == 0
    made = load(tmp_path / "b")
    packed_in = {name.split(".")[2] for name, t in made.items() if t.dtype is torch.float8_e4m3fn}
    assert packed_in == {"2", "4"}
    quantization = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    modules = quantization["modules_to_not_convert"]
    kept = {n.removesuffix(".weight") for n, t in made.items() if n.endswith(".weight") and t.itemsize > 1}
    assert set(modules) == kept | {f"model.layers.{i}." for i in (0, 1, 3)}
    report = plan_conversion(source, Packing("mxfp8", bf16_first=2, bf16_last=1))
    reasons = {entry.name: entry.reason for entry in report.tensors}
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "one of the first 2 or last 1 layers"
    with pytest.raises(CheckpointError, match=r"^bf16_first, bf16_last: got 5 and 0, must be at most 4"):
        plan_conversion(source, Packing("mxfp8", bf16_first=5))
    del tensors["model.layers.4.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"has no weight outside of the layers that stay"):
        plan_conversion(save(tmp_path / "c", tensors, config=config), Packing("mxfp8", bf16_first=4))


def test_options_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^bf16_last: got 1, must be 0 with format 'mxfp4'$"):
        Packing(bf16_last=1)
    with pytest.raises((TypeError, ValueError), match=r"^bf16_first: got -1"):
        Packing("mxfp8", bf16_first=-1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "a", tensors_of())
    convert(source, tmp_path / "b", Packing("mxfp8"), device="cpu")
    given = ["convert", str(source), str(tmp_path / "c"), "--format", "mxfp8", "--device", "cpu"]
    assert main([*given, "--verify"]) == 0
    assert "method: mxfp8, scale ceil" in capsys.readouterr().out
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    with pytest.raises((SystemExit, ValueError)):
        main([*given[:2], str(tmp_path / "d"), "--format", "mxfp8", "--scale", "floor"])
    assert not (tmp_path / "d").exists()


def test_the_plan_says_the_bytes(tmp_path: Path) -> None:
    source = save(tmp_path / "a", {"q_proj.weight": torch.ones(8, 64)})
    plan = plan_conversion(source, Packing("mxfp8"))
    assert (plan.bytes_before, plan.bytes_after) == (8 * 64 * 4, 8 * 64 + 8 * 2)


BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "quantized": (llama(1), {"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
    "none": ({"norm.weight": torch.ones(32)}, {}, r"has no weight \(n, k\) with k a multiple of 32"),
    "nan": (
        {"q_proj.weight": torch.full((8, 32), torch.nan)},
        {},
        r"q_proj\.weight: holds NaN or infinity, must be finite",
    ),
    "name": (
        {"q_proj.weight": torch.ones(8, 32), "q_proj.weight_scale_inv": torch.ones(1)},
        {},
        r"q_proj\.weight_scale_inv is there already, must be a new name",
    ),
}


@pytest.mark.parametrize(("tensors", "change", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(
    tensors: dict[str, Tensor], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "a", tensors, config={**LLAMA, **change})
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "b", Packing("mxfp8"), device="cpu")


def test_scales_of_the_other_format_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^scale: got 'floor', must be 'ceil'"):
        Packing("mxfp8", "floor")
