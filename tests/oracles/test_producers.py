"""Our numerics, configs and formats against ModelOpt and llm-compressor themselves: make test-oracles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4gemm.checkpoint.formats import (
    Scheme,
    StoredWeight,
    hf_quant_config,
    quantization_config,
    read_quantization_config,
)
from fp4gemm.checkpoint.numerics import quantize_set
from fp4gemm.recipe import Recipe
from helpers import assert_bits
from model_checkpoint import KINDS, weight
from torch import Tensor

pytest.importorskip("modelopt", reason="needs requirements/oracles.txt: make test-oracles")
pytest.importorskip("compressed_tensors", reason="needs requirements/oracles.txt: make test-oracles")

from oracles import (
    DTYPES,
    HASHES,
    model_free_ptq,
    modelopt_parts,
    producers_hashes,
    without_unused_imports,
)

FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
NAMES = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]


def random_weight(kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Larger than those of the suite, and Gaussian."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(256, 512, generator=gen) * 0.03
    if kind == "heavy":
        w = w * torch.exp(2 * torch.randn(256, 512, generator=gen))
    if kind == "zeros":
        w[5], w[7, :32], w[8] = 0.0, 0.0, -0.0
    return (w * {"small": 2.0**-12, "large": 2.0**9}.get(kind, 1.0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_modelopt(kind: str, dtype: str) -> None:
    for w in (weight(kind, DTYPES[dtype], 21), random_weight(kind, DTYPES[dtype], 22)):
        codes, scales, outer = modelopt_parts(w)
        got = quantize_set({"w": w}, Recipe(numerics="modelopt"), format="modelopt")["w"]
        assert_bits(got.outer, outer.reshape(1), "weight_scale_2")
        assert_bits(got.block_scales, scales, "weight_scale")
        assert_bits(got.codes, codes, "weight")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_output_of_model_free_ptq(dtype: str, tmp_path: Path) -> None:
    weights = {
        f"model.layers.{i}.{name}": random_weight(kind, DTYPES[dtype], 100 * i + j)
        for i, kind in enumerate(KINDS)
        for j, name in enumerate(NAMES)
    }
    weights["model.layers.9.mlp.down_proj"] = torch.zeros(64, 128, dtype=DTYPES[dtype])
    given = {f"{name}.weight": w for name, w in weights.items()}
    given["lm_head.weight"] = random_weight("normal", DTYPES[dtype], 1)
    given["model.layers.0.input_layernorm.weight"] = torch.ones(512, dtype=DTYPES[dtype])
    made, config = model_free_ptq(given, tmp_path)
    sets: dict[str, dict[str, Tensor]] = {}
    for name, w in weights.items():
        owner, _, last = name.rpartition(".")
        sets.setdefault(f"{owner}.{FUSED.get(last, last)}", {})[name] = w
    mine = {name: given[name] for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight")}
    for one in sets.values():
        stored = quantize_set(one, Recipe(numerics="llmcompressor"), format="compressed-tensors")
        for name, each in stored.items():
            mine |= each.tensors(name)
    assert set(mine) == set(made)
    for name, tensor in mine.items():
        assert_bits(tensor, made[name], name)
    read = read_quantization_config(config)
    assert (read.format, read.activations, read.ignore) == ("compressed-tensors", "a16", ("lm_head",))


def test_the_hashes_of_the_suite(tmp_path: Path) -> None:
    """tests/checkpoint/producers.json; FP4GEMM_WRITE_HASHES=1 writes it."""
    made = producers_hashes(tmp_path)
    if os.environ.get("FP4GEMM_WRITE_HASHES"):
        HASHES.write_text(json.dumps(made, indent=1) + "\n")
    assert json.loads(HASHES.read_text()) == made


SCHEMES = [("a16", None), ("static", None), ("static", "fp8"), ("per-token", None)]


@pytest.mark.parametrize(("activations", "cache"), SCHEMES)
def test_the_configs_are_those_of_modelopt(activations: Any, cache: Any) -> None:
    """config.json is what ModelOpt makes of our hf_quant_config.json."""
    without_unused_imports()
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    scheme = Scheme("modelopt", activations, ("lm_head", "*.mlp.gate"), cache)
    assert convert_hf_quant_config_format(hf_quant_config(scheme)) == quantization_config(scheme)


@pytest.mark.parametrize(("activations", "cache"), SCHEMES)
def test_compressed_tensors_reads_our_config(activations: Any, cache: Any) -> None:
    without_unused_imports()
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16

    ignore = ("lm_head", "re:.*mlp.gate$")
    ours = quantization_config(Scheme("compressed-tensors", activations, ignore, cache, 256))
    read = QuantizationConfig.model_validate(json.loads(json.dumps(ours)))
    group = read.config_groups["group_0"]
    wanted = NVFP4A16 if activations == "a16" else NVFP4
    keys = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "scale_dtype", "zp_dtype")
    for name in ("weights", "input_activations"):
        got, want = getattr(group, name), wanted.get(name)
        assert (got is None) == (want is None)
        for key in keys if want is not None else ():
            assert getattr(got, key) == getattr(want, key), (name, key)
    assert (read.format, read.quantization_status.value) == ("nvfp4-pack-quantized", "compressed")
    assert (read.kv_cache_scheme is None) == (cache is None)
    assert tuple(read.ignore) == ignore


def test_the_values_that_the_producers_decode() -> None:
    """Also of four over six with the bound 256, stored in both formats."""
    without_unused_imports()
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    w = random_weight("normal", torch.bfloat16, 5)
    for method in ("round", "four-over-six"):
        recipe = Recipe(method=method, weight_scaling="tensor")
        stored = quantize_set({"w": w}, recipe, format="modelopt")["w"]
        want = stored.to_nvfp4().dequantize(torch.float32)
        read = NVFP4QTensor(w.shape, torch.float32, stored.codes)
        got = read.dequantize(
            torch.float32, scale=stored.block_scales, double_scale=stored.outer, block_sizes={-1: 16}
        )
        assert torch.allclose(got, want, rtol=2.0**-22, atol=0)
        other: StoredWeight = stored.as_format("compressed-tensors")
        names = {name.rpartition(".")[2]: tensor for name, tensor in other.tensors("w").items()}
        scheme = QuantizationScheme(**NVFP4A16, targets=["Linear"])
        decompressed = NVFP4PackedCompressor.decompress(names, scheme)["weight"]
        assert torch.allclose(decompressed.float(), want, rtol=2.0**-7, atol=0)  # it is bfloat16
