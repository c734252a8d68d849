"""The layout of Nemotron 3 in vLLM's own layers: experts on fp4gemm, layers in FP8 and 16 bits on vLLM.

The config is read from the config.json of a checkpoint with the real names, by way of vLLM's table of
quantization methods; the tensors are those of its files.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.checkpoint.formats import StoredWeight

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
mixed_models = pytest.importorskip("mixed_models")

from checkpoints import load  # noqa: E402
from fp4gemm.integrations.vllm import register  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.layers.fused_moe import FusedMoEFactory  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as moe_config  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

pytestmark = pytest.mark.slow
METHODS = {"modelopt": "modelopt_mixed", "compressed-tensors": "compressed-tensors"}
EXPERTS = "backbone.layers.1.mixer.experts"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's config, with the plug-in registered, and one rank without a process group."""
    single = types.SimpleNamespace(rank_in_group=0, world_size=1)
    for name in ("_TP", "_DP", "_EP", "_PCP", "_PP"):
        monkeypatch.setattr(parallel_state, name, single, raising=False)
    register()
    config = VllmConfig()
    config.model_config = types.SimpleNamespace(dtype=torch.bfloat16)  # what its FP8 layers read of it
    with set_current_vllm_config(config):
        yield config


def quant_config(folder: Path, format: str) -> Any:
    """vLLM's object for the config of the checkpoint, as its model loader makes it."""
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    method = get_quantization_config(METHODS[format])
    assert format != "modelopt" or method.override_quantization_method(found, None) == METHODS[format]
    return method.from_config(found)


def made_experts(config: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The routed experts of a mixture of Nemotron 3."""
    with monkeypatch.context() as patch:  # vLLM makes experts without a gate on GPUs alone
        platform = types.SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
        patch.setattr(moe_config, "current_platform", platform)
        return FusedMoEFactory(
            *(4, 2, 64, 32), params_dtype=torch.bfloat16, quant_config=config, prefix=name,
            activation="relu2_no_mul", ckpt_names=("up_proj", "down_proj", None),
        ).routed_experts  # fmt: skip


@pytest.mark.parametrize(("kind", "algorithm"), [("tensor", "FP8"), ("block", "FP8_PB_WO")])
def test_experts_in_fp8_are_left_to_vllm_by_name(
    tmp_path: Path, kind: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of layer 1 are NVFP4, and those of layer 3 have vLLM's method for FP8."""
    folder, _ = mixed_models.write_nemotron(tmp_path, kind=kind, fp8_experts=True)
    config = quant_config(folder, "modelopt")
    others = EXPERTS.replace(".1.", ".3.")
    made = [made_experts(config, name, monkeypatch).quant_method for name in (EXPERTS, others)]
    assert [type(method).__module__.partition(".")[0] for method in made] == ["fp4gemm", "vllm"]
    assert "Fp8" in type(made[1]).__name__
    assert config.report.text() == (
        f"fp4gemm: W4A4, an amax for each token: {EXPERTS}; "
        f"left to vLLM, its weights are {algorithm}: {others}"
    )


@pytest.mark.parametrize("format", METHODS)
def test_each_layer_has_the_method_of_its_format(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routed experts are fp4gemm's and have the bits of its module; every other layer is vLLM's."""
    folder, _ = mixed_models.write_nemotron(tmp_path, format)
    config = quant_config(folder, format)
    experts = made_experts(config, EXPERTS, monkeypatch)
    assert type(experts.quant_method).__module__.startswith("fp4gemm.")
    made = {
        name: linear.ReplicatedLinear(
            k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix=name
        )
        for name, n, k in (
            ("backbone.layers.0.mixer.in_proj", 324, 64),
            ("backbone.layers.1.mixer.shared_experts.up_proj", 96, 64),
            ("backbone.layers.2.mixer.o_proj", 64, 64),
        )
    }
    kinds = {name: type(layer.quant_method).__module__ for name, layer in made.items()}
    assert all(kind.startswith("vllm.") for kind in kinds.values()), kinds
    unquantized = linear.UnquantizedLinearMethod
    assert [isinstance(layer.quant_method, unquantized) for layer in made.values()] == [False, False, True]
    assert made["backbone.layers.0.mixer.in_proj"].weight.dtype == torch.float8_e4m3fn
    text = config.report.text()
    fp8 = "its weights are FP8" if format == "modelopt" else "its weights are not NVFP4"
    for part in (
        f"W4A4, an amax for each token: {EXPERTS.replace('.1.', '.*.')}",
        f"left to vLLM, {fp8}: backbone.layers.*.mixer.in_proj, "
        "backbone.layers.*.mixer.shared_experts.up_proj",
        "left to vLLM, the checkpoint excludes it: backbone.layers.*.mixer.o_proj",
    ):
        assert part in text

    tensors = load(folder)
    for e in range(4):
        for shard, child in (("w1", "up_proj"), ("w2", "down_proj")):
            module = f"{EXPERTS}.{e}.{child}"
            for key in [key for key in tensors if key.startswith(f"{module}.")]:
                suffix = key.removeprefix(f"{module}.")
                name = ("w2_" if shard == "w2" else "w13_") + suffix
                param = getattr(experts, name)
                param.weight_loader(param, tensors[key], f"{EXPERTS}.{e}.{name}", shard_id=shard, expert_id=e)
    experts.quant_method.process_weights_after_loading(experts)
    w13, w2 = (
        fp4gemm.stack(
            [StoredWeight.read(tensors, f"{EXPERTS}.{e}.{child}", format).to_nvfp4() for e in range(4)]  # type: ignore[arg-type]
        )
        for child in ("up_proj", "down_proj")
    )
    wanted = fp4gemm.nn.Experts.from_quantized(w13, w2, activation="relu2", activations="per-token")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores, ids = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).softmax(-1).topk(2)
    y = experts.quant_method.apply(experts, x, scores, ids.int(), None, None)
    assert torch.equal(y, wanted(x, ids, scores))


def test_a_mix_that_is_malformed_is_refused(tmp_path: Path) -> None:
    """vLLM asks for the layers by name; a fused layer of two formats is an error that names both."""

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config["quantization_config"]["quantized_layers"] |= {
            "m.q_proj": {"quant_algo": "NVFP4"},
            "m.k_proj": {"quant_algo": "FP8"},
            "m.v_proj": {"quant_algo": "FP8"},
        }

    folder, _ = mixed_models.write_nemotron(tmp_path, change=change)
    config = quant_config(folder, "modelopt")
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match=r"Mixed quant_algo within fused layer m\.qkv_proj"):
        linear.QKVParallelLinear(
            64, 16, 4, 2, params_dtype=torch.bfloat16, quant_config=config, prefix="m.qkv_proj"
        )
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(ValueError, match=r"requires a non-empty 'quantized_layers' mapping"):
        get_quantization_config("modelopt_mixed").from_config({**found, "quantized_layers": {}})
