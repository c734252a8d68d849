"""Models of transformers that are quantized while they are loaded, and NVFP4 checkpoints that are written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint.formats import FORMATS, FormatName
from nvfp4_models import (
    MODELS,
    MORE_MODELS,
    SIZES,
    float_model,
    in_place,
    integration,
    load,
    logits,
    read,
    same_tensors,
    save_float,
    transformers,
    write_nvfp4,
)

FORMAT_NAMES: tuple[FormatName, ...] = tuple(FORMATS)
ON_DISK = dict.fromkeys(
    ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
) | {"model.layers.1": "disk"}
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


def quiet(report: object) -> None:
    """Instead of warnings about what stays in float."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight_scaling", ["tensor", "row"])
def test_quantized_while_loaded(name: str, weight_scaling: Any, tmp_path: Path) -> None:
    save_float(float_model(name), tmp_path)
    config = integration.Fp4GemmConfig(weight_scaling=weight_scaling)
    model = load(tmp_path, quantization_config=config)
    want = fp4gemm.models.quantize_model(float_model(name), weight_scaling=weight_scaling, report=quiet)
    assert same_tensors(model.state_dict(), want.state_dict())
    assert model.is_quantized
    assert model.config.quantization_config.weight_scaling == weight_scaling
    assert torch.equal(logits(model), logits(want))


def test_options_of_quantization(tmp_path: Path) -> None:
    save_float(float_model("llama", torch.float32), tmp_path)
    config = integration.Fp4GemmConfig(
        include=["self_attn", "mlp"], exclude="layers.1.mlp", activations="a16", fuse="auto"
    )
    model = load(tmp_path, quantization_config=config)
    first, second = model.model.layers
    assert isinstance(first.mlp, nn.GatedMLP)
    assert isinstance(second.mlp.gate_proj, torch.nn.Linear)
    assert first.self_attn.qkv_proj.activations == "a16"
    assert second.mlp.gate_proj.weight.dtype is torch.bfloat16  # as the model was asked for, in bfloat16


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_fp8_tokens_are_an_option_of_this_library(format: FormatName, tmp_path: Path) -> None:
    """Other loaders find NVFP4 weights and no activations ("a16"); this one reads what the model had."""
    first, second = tmp_path / "float", tmp_path / "nvfp4"
    save_float(float_model("llama"), first)
    config = integration.Fp4GemmConfig(activations="fp8", format=format)
    model = load(first, quantization_config=config)
    model.save_pretrained(second)
    stored = read(second)[1]["quantization_config"]
    assert stored["producer"]["activation_scaling"] == "fp8"
    again = load(second)
    assert {m.activations for m in again.modules() if isinstance(m, nn.Linear)} == {"fp8"}
    assert torch.equal(logits(again), logits(model))
    other = load(second, quantization_config=integration.Fp4GemmConfig(activations="a16"))
    assert {m.activations for m in other.modules() if isinstance(m, nn.Linear)} == {"a16"}
    del stored["producer"]["activation_scaling"]
    assert integration.Fp4GemmConfig.from_dict(stored).scheme.activations == "a16"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_round_trip(name: str, format: FormatName, tmp_path: Path) -> None:
    """A checkpoint that was loaded is written again with the same bits, also by model.save_pretrained."""
    first, again, plain = tmp_path / "first", tmp_path / "again", tmp_path / "plain"
    activations: Any = "per-token" if name == "llama" else "a16"
    model = load(write_nvfp4(float_model(name), first, format, activations))
    integration.save_pretrained(model, again)
    model.save_pretrained(plain)
    tensors, config = read(first)
    if name == "llama" and format != "fp4gemm":  # ones, which stand for activations per token
        assert float(tensors["model.layers.0.mlp.up_proj." + FORMATS[format].input_scale]) == 1.0
    for folder in (again, plain):
        assert same_tensors(read(folder)[0], tensors)
        got = read(folder)[1]["quantization_config"]
        assert got["quant_method"] == format
        routers = [name for name in got["ignore"] if name.endswith(".gate")]
        assert len(routers) == (0 if name == "llama" else 2)
        assert "lm_head" in got["ignore"]
        other = {**config["quantization_config"], "ignore": got["ignore"]}
        assert got == other
    hf = again / "hf_quant_config.json"
    assert hf.exists() == (format == "modelopt")
    if hf.exists():
        quantization = json.loads(hf.read_text())["quantization"]
        assert quantization["quant_algo"] == ("NVFP4" if name == "llama" else "W4A16_NVFP4")
        assert quantization["kv_cache_quant_algo"] is None
    assert torch.equal(logits(load(again)), logits(model))


@pytest.mark.parametrize("fuse", ["none", "auto"])
@pytest.mark.parametrize("name", MORE_MODELS)
def test_more_models(name: str, fuse: Any, tmp_path: Path) -> None:
    """Quantized while loaded, saved in each format and loaded again."""
    folder = save_float(float_model(name), tmp_path / "float")
    model = load(folder, quantization_config=integration.Fp4GemmConfig(fuse=fuse))
    want = fp4gemm.models.quantize_model(float_model(name), weight_scaling="tensor", fuse=fuse, report=quiet)
    assert torch.equal(logits(model), logits(want))
    for format in FORMAT_NAMES if fuse == "none" else ("modelopt",):
        integration.save_pretrained(model, tmp_path / format, format=format)
        again = load(tmp_path / format, quantization_config=integration.Fp4GemmConfig(fuse=fuse))
        assert torch.equal(logits(again), logits(model))


def test_names_of_mixtral(tmp_path: Path) -> None:
    integration.save_pretrained(in_place("mixtral"), tmp_path, format="modelopt")
    names = [name for name in read(tmp_path)[0] if "layers.0.block_sparse_moe.experts.1." in name]
    ends = {name.partition("experts.1.")[2] for name in names}
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    assert ends == {f"{w}.{suffix}" for w in ("w1", "w2", "w3") for suffix in suffixes}


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_fused_models_are_saved_under_the_original_names(
    name: str, format: FormatName, tmp_path: Path
) -> None:
    fused, plain = tmp_path / "fused", tmp_path / "plain"
    integration.save_pretrained(in_place(name, fuse="auto"), fused, format=format)
    integration.save_pretrained(in_place(name), plain, format=format)
    assert same_tensors(read(fused)[0], read(plain)[0])
    config, other = read(fused)[1], read(plain)[1]
    assert config["quantization_config"]["producer"].pop("fused")
    assert config == other
    assert torch.equal(logits(load(fused)), logits(in_place(name, fuse="auto")))
    model = load(plain, quantization_config=integration.Fp4GemmConfig(fuse="auto"))
    assert torch.equal(logits(model), logits(in_place(name, fuse="auto")))


def test_an_amax_for_each_row_needs_our_format(tmp_path: Path) -> None:
    model = fp4gemm.models.quantize_model(float_model("qwen3-moe"), report=quiet)
    for format in ("modelopt", "compressed-tensors"):
        with pytest.raises(
            ValueError,
            match=r"^model\.layers\.0\.self_attn\.q_proj: its weight has an amax for each row, must have one "
            rf"for the format '{format}'; save with format='fp4gemm', or quantize with weight_scaling='tens",
        ):
            integration.save_pretrained(model, tmp_path, format=format)
        assert not list(tmp_path.iterdir())
        assert not hasattr(model.config, "quantization_config")
    integration.save_pretrained(model, tmp_path, format="fp4gemm")
    config = read(tmp_path)[1]["quantization_config"]
    assert (config["quant_method"], config["scaling"]) == ("fp4gemm", "row")
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_four_over_six_with_the_bound_256(tmp_path: Path) -> None:
    """The bound is in the config, and comes back into the layers."""
    import fp4gemm

    model = in_place("llama")
    options: Any = {"scaling": "tensor", "four_over_six": "mae", "e4m3_max": 256}
    original = dict(float_model("llama").named_modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight = fp4gemm.quantize(original[name].weight.detach(), **options)
    for format in FORMAT_NAMES:
        integration.save_pretrained(model, tmp_path / format, format=format)
        loaded = load(tmp_path / format)
        assert loaded.model.layers[0].self_attn.q_proj.e4m3_max == 256
        assert torch.equal(logits(loaded), logits(model))


def test_what_stays_in_float_is_saved_and_listed(tmp_path: Path) -> None:
    """Experts in float, and layers that were excluded."""
    save_float(float_model("mixtral"), tmp_path / "float")
    config = integration.Fp4GemmConfig(exclude=["0.mlp.experts", "1.self_attn.o_proj"])
    model = load(tmp_path / "float", quantization_config=config)
    layers = "model.layers.0.block_sparse_moe.experts"
    for format, pattern in (
        ("modelopt", f"{layers}.*"),
        ("compressed-tensors", r"re:model\.layers\.0\.block_sparse_moe\.experts\..*"),
    ):
        folder = tmp_path / format
        integration.save_pretrained(model, folder, format=format)
        tensors, written = read(folder)
        assert tensors[f"{layers}.2.w1.weight"].dtype is torch.bfloat16
        assert {pattern, "model.layers.1.self_attn.o_proj"} <= set(written["quantization_config"]["ignore"])
        assert torch.equal(logits(load(folder)), logits(model))


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_offloaded_to_disk(format: FormatName, tmp_path: Path) -> None:
    """Layers on disk come back for each forward, and into a new checkpoint."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = write_nvfp4(float_model("mixtral"), tmp_path / "checkpoint", format, "a16")
    options = {"device_map": ON_DISK, "offload_folder": tmp_path / "offload", "offload_buffers": True}
    model = load(folder, **options)
    first, second = (layer.mlp.experts.w13.weight_codes.is_meta for layer in model.model.layers)
    assert (first, second) == (False, True)
    want = logits(load(folder))
    for _ in range(2):
        assert torch.equal(logits(model), want)
    with pytest.warns(UserWarning, match="offloaded modules"):
        integration.save_pretrained(model, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again")[0], read(folder)[0])


def test_offloaded_without_buffers_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = write_nvfp4(float_model("llama"), tmp_path / "checkpoint", "modelopt", "a16")
    model = load(folder, device_map=ON_DISK, offload_folder=tmp_path / "offload")
    assert "pass offload_buffers=True" in caplog.text
    assert torch.equal(logits(model), logits(load(folder)))


@pytest.mark.parametrize("is_float", [True, False], ids=["float", "nvfp4"])
def test_device_map_auto(is_float: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    if is_float:
        save_float(float_model("qwen3-moe"), tmp_path)
        model = load(tmp_path, device_map="auto", quantization_config=integration.Fp4GemmConfig())
        want = fp4gemm.models.quantize_model(float_model("qwen3-moe"), weight_scaling="tensor", report=quiet)
    else:
        model = load(write_nvfp4(float_model("qwen3-moe"), tmp_path, "modelopt"), device_map="auto")
        want = in_place("qwen3-moe")
    assert torch.equal(logits(model).cpu(), logits(want))


def test_quantizing_onto_disk_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    save_float(float_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"^device_map: has a module on 'disk', must not where a float"):
        load(
            tmp_path,
            device_map=ON_DISK,
            offload_folder=tmp_path / "offload",
            quantization_config=integration.Fp4GemmConfig(),
        )


def test_compiled(tmp_path: Path) -> None:
    """The first call of a loaded model may be a compiled one."""
    model = load(write_nvfp4(float_model("llama"), tmp_path, "modelopt"))
    compiled = torch.compile(model.model.layers[0].mlp, backend="eager", fullgraph=True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(compiled(x), in_place("llama").model.layers[0].mlp(x))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "format": ({"format": "gguf"}, ValueError, r"^format: got 'gguf', must be 'modelopt', "),
    "weight_scaling": ({"weight_scaling": "block"}, ValueError, r"^weight_scaling: got 'block', must be"),
    "activations": ({"activations": 3}, TypeError, r"^activations: got 3 \(int\)"),
    "include": ({"include": 3}, TypeError, r"^include: got 3 \(int\), must be a str or a sequence of str"),
    "exclude": ({"exclude": [len]}, TypeError, r"^exclude: got .*, must be a str or a sequence of str"),
    "include-empty": (
        {"include": []},
        ValueError,
        r"^include: got \[\] \(list\), must have at least one pat",
    ),
    "exclude-empty": (
        {"exclude": ()},
        ValueError,
        r"^exclude: got \(\) \(tuple\), must have at least one pa",
    ),
    "fuse": ({"fuse": "all"}, ValueError, r"^fuse: got 'all', must be 'auto' or 'none'"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        integration.Fp4GemmConfig(**options)


def test_bad_models(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^model: got .*Linear.*, must be a transformers\.PreTrainedModel"):
        integration.save_pretrained(nn.Linear(64, 64), tmp_path)
    with pytest.raises(ValueError, match=r"^model: has no NVFP4 layer, must have one"):
        integration.save_pretrained(float_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"^format: got 'gguf', must be "):
        integration.save_pretrained(in_place("llama"), tmp_path, format="gguf")
    mixed = in_place("llama")
    mixed.model.layers[1].mlp.up_proj.activations = "a16"
    with pytest.raises(
        ValueError, match=r"^model: its layers differ in activations \('per-token' of .*, 'a16' of "
    ):
        integration.save_pretrained(mixed, tmp_path, format="fp4gemm")
    with pytest.raises(TypeError, match=r"^state_dict: must be absent, since"):
        integration.save_pretrained(in_place("llama"), tmp_path, state_dict={})
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"^save_directory: .*file is a file, must be a folder"):
        integration.save_pretrained(in_place("llama"), file)


def test_only_the_main_process_writes_configs(tmp_path: Path) -> None:
    integration.save_pretrained(in_place("llama"), tmp_path, is_main_process=False)
    assert not list(tmp_path.glob("*.json"))  # transformers 5.8 writes the weights


def test_options_as_a_dict(tmp_path: Path) -> None:
    """As transformers accepts for its own methods, and as Fp4GemmConfig.to_dict writes them."""
    folder = save_float(float_model("llama"), tmp_path)
    config = integration.Fp4GemmConfig(activations="a16", exclude="o_proj")
    for options in (config.to_dict(), {"quant_method": "fp4gemm", **config._given}):
        attention = load(folder, quantization_config=options).model.layers[0].self_attn
        assert attention.q_proj.activations == "a16"
        assert type(attention.o_proj) is torch.nn.Linear
    with pytest.raises(ValueError, match=r"^fuse: got 'all', must be"):
        load(folder, quantization_config={"quant_method": "fp4gemm", "fuse": "all"})


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_an_output_layer_in_nvfp4_is_not_tied(format: FormatName, tmp_path: Path) -> None:
    """The embeddings stay in float, so the two are different tensors of the checkpoint."""
    model = float_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    options: dict[str, Any] = {"weight_scaling": "tensor", "report": quiet}
    fp4gemm.models.quantize_model(model, include=["lm_head", "*_proj"], **options)
    integration.save_pretrained(model, tmp_path, format=format)
    again = load(tmp_path)
    assert type(again.lm_head) is nn.Linear
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("is_float", [True, False], ids=["float", "nvfp4"])
def test_a_model_with_images(is_float: bool, tmp_path: Path) -> None:
    """SigLIP initialises the weights and the biases of its layers by their names, whatever was loaded."""
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes)).bfloat16().eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    save_float(model, tmp_path / "float")
    options: dict[str, Any] = {"weight_scaling": "tensor", "report": quiet}
    fp4gemm.models.quantize_model(model, **options)
    if is_float:
        loaded = type(model).from_pretrained(
            tmp_path / "float", dtype=torch.bfloat16, quantization_config=integration.Fp4GemmConfig()
        )
    else:
        integration.save_pretrained(model, tmp_path / "nvfp4")
        loaded = type(model).from_pretrained(tmp_path / "nvfp4", dtype=torch.bfloat16)
    images = torch.randn(1, 3, 28, 28, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(loaded(images).pooler_output, model(images).pooler_output)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.unregister()
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (
        integration.register,
        lambda: integration.Fp4GemmConfig,
        lambda: integration.save_pretrained(0, ""),
    ):
        with pytest.raises(
            ModuleNotFoundError, match=r"^transformers: is not installed, must be installed, 5\.8"
        ):
            call()
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.7.0")
    with pytest.raises(
        ImportError, match=r"^transformers: 5\.7\.0 is installed, must be installed, 5\.8 or newer"
    ):
        integration.register()
