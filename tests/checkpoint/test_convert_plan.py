"""The plan of a conversion: which tensors stay and why, and which share an amax."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, MOE, llama, moe, save
from fp4gemm.checkpoint import CheckpointError, Options, Plan, plan_conversion
from safetensors.torch import save_file


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("lm_head.weight", (64, 64), "output embedding"),
        ("transformer.wte.weight", (64, 64), "embedding"),
        ("model.shared.weight", (160, 64), "embedding, by its rows"),
        ("model.layers.0.mlp.gate.weight", (8, 64), "router"),
        ("model.layers.0.ff.router.layer.weight", (8, 64), "router"),
        ("model.layers.0.q_norm.weight", (64,), "norm"),
        ("encoder.block.0.relative_attention_bias.weight", (32, 64), "embedding"),
        ("model.layers.0.x.bias", (64,), "vector"),
        ("model.layers.0.conv1d.weight", (64, 1, 4), "it has 3 dimensions, as the weight of no linear layer"),
        ("model.layers.0.mixer.dt_proj.weight", (64, 64), "its model reads the float weight directly"),
        ("model.layers.0.x.A_log", (64, 64), "its use is not known, since its name does not end in .weight"),
        ("model.layers.0.x.weight", (64, 48), "k is 48, must be a positive multiple of 32"),
        ("model.layers.0.x.weight", (12, 64), "n is 12, must be a positive multiple of 8"),
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            (4, 64),
            "it has 2 dimensions, must be 3 for stacked experts",
        ),
    ],
)
def test_what_stays(name: str, shape: tuple[int, ...], reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    extra = {"model.layers.0.mlp.experts.down_proj": torch.ones(4, 64, 32)} if "experts" in name else {}
    tensors = {name: torch.ones(shape), "model.layers.0.o.weight": torch.ones(64, 64), **extra}
    save_file(tensors, folder / "model.safetensors")
    entry = next(entry for entry in plan_conversion(folder).tensors if entry.name == name)
    assert (entry.action, entry.reason) == ("float", reason)


def test_the_output_of_a_multihead_attention_stays(tmp_path: Path) -> None:
    """As in the pooling of SigLIP: the module reads the float weights of its out_proj directly."""
    names = ["head.attention.in_proj_weight", "head.attention.out_proj.weight", "layers.0.out_proj.weight"]
    tensors = {name: torch.ones(64, 64) for name in names}
    entries = {entry.name: entry.reason for entry in plan_conversion(save(tmp_path / "src", tensors)).tensors}
    assert entries[names[1]] == "its model reads the float weight directly"
    assert entries[names[2]] == ""


def test_conv1d_stays(tmp_path: Path) -> None:
    tensors = {"h.0.attn.c_attn.weight": torch.ones(64, 192), "h.0.other.weight": torch.ones(64, 64)}
    source = save(tmp_path / "src", tensors, config={"model_type": "gpt2"})
    assert plan_conversion(source).tensors[0].reason == "it is stored (k, n), as Conv1D does"


def test_sets_of_other_architectures(tmp_path: Path) -> None:
    """Some layers have no partner in their architecture; a layer of an odd size keeps its set."""
    one = "model.layers.0.self_attn"
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.ones(64, 64),
        f"{one}.q_proj.weight": torch.ones(64, 64),
        f"{one}.kv_a_proj_with_mqa.weight": torch.ones(64, 64),
        "model.layers.0.x.w1.weight": torch.ones(64, 64),
        "model.layers.0.x.w3.weight": torch.ones(12, 64),
    }
    entries = plan_conversion(save(tmp_path / "src", tensors)).tensors
    reasons = {entry.name: (entry.action, entry.reason) for entry in entries}
    assert all(reasons[name] == ("quantized", "") for name in list(tensors)[:3])
    odd = "n is 12, must be a positive multiple of 8"
    assert reasons["model.layers.0.x.w3.weight"] == ("float", odd)
    assert reasons["model.layers.0.x.w1.weight"] == (
        "float", f"its partner model.layers.0.x.w3.weight stays: {odd}"
    )  # fmt: skip


def test_include_wins_over_the_rules(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(2))
    entries = plan_conversion(source, Options(include=["lm_head", "model.layers.1.mlp"])).tensors
    assert {entry.name for entry in entries if entry.action == "quantized"} == {
        "lm_head.weight", *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    }  # fmt: skip


def test_stacked_experts_that_are_refused_or_stay(tmp_path: Path) -> None:
    tensors = moe(stacked=True)
    name = "model.layers.1.mlp.experts"
    biased = {**tensors, f"{name}.gate_up_proj_bias": torch.ones(4, 192)}
    entries = plan_conversion(save(tmp_path / "biased", biased, config=MOE)).tensors
    assert {e.reason for e in entries if e.name == f"{name}.down_proj"} == {
        f"experts with biases ({name}.gate_up_proj_bias) cannot be split; they can be kept as one tensor"
    }
    del tensors[f"{name}.down_proj"]
    with pytest.raises(
        CheckpointError, match=re.escape(f"{name}.down_proj: is missing beside {name}.gate_up")
    ):
        plan_conversion(save(tmp_path / "half", tensors, config=MOE))


def of_shapes(shapes: dict[str, tuple[int, ...]], config: dict[str, object], options: Options) -> Plan:
    return Plan.of_shapes({name: (shape, torch.bfloat16) for name, shape in shapes.items()}, config, options)


def quantized(plan: Plan) -> list[str]:
    return [matrix.source for one in plan.sets for matrix in one.matrices]


GPT = {
    "h.0.attn.c_attn.weight": (64, 192),
    "h.0.attn.c_attn.bias": (192,),
    "h.0.attn.c_proj.weight": (64, 64),
    "h.0.attn.c_proj.bias": (64,),
    "h.0.mixer.dt_proj.weight": (64, 64),
    "h.0.wte.weight": (512, 64),
    "h.0.mlp.gate.weight": (8, 64),
    "score.weight": (8, 64),
}


def test_weights_that_are_no_linear_layers_cannot_be_included() -> None:
    plan = of_shapes(GPT, {"model_type": "gpt2"}, Options(include=["h.*"]))
    assert quantized(plan) == ["h.0.mlp.gate.weight"]


def test_biases_show_that_weights_are_transposed() -> None:
    plan = of_shapes(GPT, {"architectures": ["OwnModel"]}, Options())
    assert quantized(plan) == ["score.weight"]
    for name in ("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"):
        assert plan.kept[name] == "it is stored (k, n), as Conv1D does"


def test_layers_are_those_of_the_language_model() -> None:
    text = {f"model.layers.{i}.o_proj.weight": (64, 64) for i in range(2)}
    vision = {f"visual.blocks.{i}.qkv.weight": (96, 64) for i in range(4)}
    config = {"vision_config": {"num_hidden_layers": 4}, "text_config": {"num_hidden_layers": 2}}
    plan = of_shapes(vision | text, config, Options(bf16_first=1))
    assert {name for name, reason in plan.kept.items() if "first" in reason} == {
        "model.layers.0.o_proj.weight"
    }


def test_unequal_dtypes_are_found_before_the_run(tmp_path: Path) -> None:
    tensors = llama(1)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].half()
    with pytest.raises(CheckpointError, match=r"up_proj.weight F16: have unequal dtypes, must have one"):
        plan_conversion(save(tmp_path / "src", tensors))
