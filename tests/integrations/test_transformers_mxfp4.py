"""Checkpoints of GPT-OSS with MXFP4 experts in models of transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint import Packing, Translation, convert
from helpers import assert_bits
from mxfp4_models import dequantized, float_of, write_mxfp4
from nvfp4_models import float_model, integration, load, logits, read, save_float, transformers
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
LAYER = "model.layers.0.mlp.experts"


def experts_of(model: Any) -> dict[str, Tensor]:
    """The dequantized weights of the experts by the names of GPT-OSS, (g, k, n) in bfloat16."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Experts):
            for child, weight in (("gate_up_proj", module.w13), ("down_proj", module.w2)):
                found[f"{name}.{child}"] = weight.weight.dequantize(torch.bfloat16).mT.contiguous()
    return found


def same_values(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert len(got) == 4
    for name, values in want.items():
        assert_bits(got[name], values, name)


@pytest.mark.parametrize(
    ("low", "high"), [(119, 123), (106, 123), (1, 18), (227, 244)], ids=["usual", "span", "least", "largest"]
)
def test_weights_have_the_bits_of_transformers_own(
    low: int, high: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(write_mxfp4(tmp_path, low, high))
    assert "rounded" not in caplog.text
    experts = model.model.layers[0].mlp.experts
    assert type(experts) is nn.Experts
    assert experts.activations == "a16"
    assert experts.activation == "swiglu_oai"
    assert isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    same_values(experts_of(model), dequantized(tmp_path))
    tensors, _ = read(tmp_path)
    assert_bits(experts.w13.bias, tensors[f"{LAYER}.gate_up_proj_bias"].float(), "bias")


def test_logits_are_those_of_the_float_model(tmp_path: Path) -> None:
    """W4A16 rounds the tokens of both products to bfloat16, by 2^-9, and nothing else in a float32 model.

    In a bfloat16 model the error is that of transformers' own experts in bfloat16.
    """
    want = logits(float_of(write_mxfp4(tmp_path)))
    scale = want.norm()
    got = logits(load(tmp_path, dtype=torch.float32))
    assert ((got - want).norm() / scale).item() < 2**-8
    config = transformers.Mxfp4Config(dequantize=True)
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    error, own_error = (((logits(m).float() - want).norm() / scale).item() for m in (load(tmp_path), own))
    assert error < 1.25 * own_error


@pytest.mark.parametrize("target", ["fp4gemm", "modelopt", "compressed-tensors"])
def test_converted_checkpoints_have_the_same_model(target: Any, tmp_path: Path) -> None:
    """Each of the formats, within the span; the logits have the bits of the checkpoint that was converted."""
    source = write_mxfp4(tmp_path / "mxfp4", 108, 123)
    report = convert(source, tmp_path / target, Translation("mxfp4", target), verify=True)
    assert not report.notes
    model, own = load(tmp_path / target), load(source)
    same_values(experts_of(model), dequantized(source))
    assert model.model.layers[0].mlp.experts.activations == "a16"
    if target == "fp4gemm":
        assert torch.equal(logits(model), logits(own))


@pytest.mark.parametrize("scale", ["floor", "ceil"])
def test_a_float_model_is_packed_and_loaded(scale: str, tmp_path: Path) -> None:
    """transformers' own code and this library read the same values of what convert writes."""
    save_float(float_model("gpt-oss"), tmp_path / "float")
    report = convert(tmp_path / "float", tmp_path / "mxfp4", Packing(scale=scale), verify=True)
    assert report.is_verified
    same_values(experts_of(load(tmp_path / "mxfp4")), dequantized(tmp_path / "mxfp4"))
    tensors, _ = read(tmp_path / "float")
    for name, values in dequantized(tmp_path / "mxfp4", torch.float32).items():
        error = (values - tensors[name].float()).norm() / tensors[name].float().norm()
        assert error < 0.16


def test_values_far_below_are_rounded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp4gemm.integrations.transformers"):
        model = load(write_mxfp4(tmp_path, 90, 123))
    pattern = [
        f"{LAYER}.gate_up_proj: ",
        " of 49152 values were rounded, since their scales are more than 17",
    ]
    assert all(text in caplog.text for text in pattern)
    got, want = experts_of(model), dequantized(tmp_path, torch.float32)
    for name, values in want.items():
        exact = values.bfloat16()
        assert not torch.equal(got[name], exact)
        near = (got[name].float() - exact.float()).abs()
        assert bool((near <= 2.0 ** (123 - 127 - 19)).all())


@pytest.mark.parametrize("format", ["fp4gemm", None])
def test_a_loaded_model_is_saved_and_loaded_again(format: Any, tmp_path: Path) -> None:
    model = load(write_mxfp4(tmp_path / "a"))
    integration.save_pretrained(model, tmp_path / "b", format=format)
    assert read(tmp_path / "b")[1]["quantization_config"]["quant_method"] == "fp4gemm"
    again = load(tmp_path / "b")
    same_values(experts_of(again), dequantized(tmp_path / "a"))
    assert torch.equal(logits(again), logits(model))


KEPT = "mxfp8-mxfp4"


def load_as_is(folder: Path, **options: Any) -> Any:
    return load(folder, quantization_config=integration.Fp4GemmConfig(activations=KEPT), **options)


@pytest.mark.parametrize(("low", "high"), [(119, 123), (1, 250)], ids=["usual", "span"])
def test_weights_stay_as_they_are(low: int, high: int, tmp_path: Path) -> None:
    """Codes and scales of every expert, whatever their exponents; saved and loaded again, too."""
    model = load_as_is(write_mxfp4(tmp_path / "a", low, high))
    want, config = read(tmp_path / "a")
    assert [module.activations for module in model.modules() if isinstance(module, nn.Experts)] == [KEPT] * 2
    integration.save_pretrained(model, tmp_path / "b")
    saved, saved_config = read(tmp_path / "b")
    assert saved.keys() == want.keys()
    for name, tensor in want.items():
        assert_bits(saved[name], tensor, name)
    assert saved_config["quantization_config"] == config["quantization_config"]
    for each in (model, load_as_is(tmp_path / "b")):
        for name, module in each.named_modules():
            if isinstance(module, nn.Experts):
                for child, weight in (("gate_up_proj", module.w13), ("down_proj", module.w2)):
                    assert isinstance(weight.weight, fp4gemm.MXFP4Tensor)
                    codes, scales = weight.weight.to_weight()
                    assert_bits(codes, want[f"{name}.{child}_blocks"], child)
                    assert_bits(scales, want[f"{name}.{child}_scales"], child)
                    assert_bits(weight.bias, want[f"{name}.{child}_bias"].float(), child)


def test_logits_with_weights_as_they_are(tmp_path: Path) -> None:
    """The weights are exact, and tokens are MXFP8; each product has the bits of quantize_mxfp8 and mm."""
    want = logits(float_of(write_mxfp4(tmp_path)))
    model = load_as_is(tmp_path, dtype=torch.float32)
    assert ((logits(model) - want).norm() / want.norm()).item() < 0.15
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(5, experts.hidden)
    ids, weights = torch.arange(5).view(5, 1) % experts.num_experts, torch.ones(5, 1)
    got = experts(x, ids, weights)
    for i, e in enumerate(ids[:, 0].tolist()):
        h = fp4gemm.mm(
            fp4gemm.quantize_mxfp8(x[i : i + 1]),
            experts.w13.weight[e],
            bias=experts.w13.bias[e],
            activation="swiglu_oai",
        )
        down = {"bias": experts.w2.bias[e], "out_dtype": torch.float32}
        y = fp4gemm.mm(fp4gemm.quantize_mxfp8(h), experts.w2.weight[e], **down)
        assert_bits(got[i : i + 1], y, f"token {i}")


def test_a_float_model_is_quantized_and_saved_like_gpt_oss(tmp_path: Path) -> None:
    """Experts that quantize_model made MXFP4 have the bytes of convert --format mxfp4."""
    save_float(float_model("gpt-oss"), tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "mxfp4", Packing(), device="cpu")
    model = load(tmp_path / "float")
    fp4gemm.models.quantize_model(model, activations=KEPT, include="*.experts")
    integration.save_pretrained(model, tmp_path / "own")
    want, got = read(tmp_path / "mxfp4")[0], read(tmp_path / "own")[0]
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_bits(got[name], tensor, name)


def test_what_is_refused_of_weights_as_they_are(tmp_path: Path) -> None:
    model = load_as_is(write_mxfp4(tmp_path / "a"))
    with pytest.raises(ValueError, match="format: got 'modelopt', must be absent, since the model has MXFP4"):
        integration.save_pretrained(model, tmp_path / "b", format="modelopt")
    config = integration.Fp4GemmConfig(activations="mxfp8")
    with pytest.raises(
        ValueError, match="activations: got 'mxfp8', must be a value with weights in NVFP4 or MX"
    ):
        load(tmp_path / "a", quantization_config=config)
    convert(tmp_path / "a", tmp_path / "nvfp4", Translation("mxfp4", "fp4gemm"))
    with pytest.raises(
        ValueError, match="activations: got 'mxfp8-mxfp4', must be a value with weights in NVFP4,"
    ):
        load_as_is(tmp_path / "nvfp4")
    write_mxfp4(tmp_path / "nan", change=nan_scale)
    with pytest.raises(ValueError, match=r"experts\.down_proj: scales: 1 of \d+ values are NaN"):
        load_as_is(tmp_path / "nan")


def test_options_of_loading_are_open(tmp_path: Path) -> None:
    write_mxfp4(tmp_path, intermediate_size=128)
    for activations, error in (("per-token", 0.2), ("fp8", 0.06)):  # W4A4, W4A8
        config = integration.Fp4GemmConfig(activations=activations)  # type: ignore[arg-type]
        model = load(tmp_path, quantization_config=config)
        assert model.model.layers[0].mlp.experts.activations == activations
        want = logits(load(tmp_path)).float()
        assert ((logits(model).float() - want).norm() / want.norm()).item() < error
    with pytest.raises(ValueError, match=r"^weight_scaling: got 'tensor', must be absent for a checkpoint"):
        load(tmp_path, quantization_config=integration.Fp4GemmConfig(weight_scaling="tensor"))


def test_the_config_of_transformers_loads_as_before(tmp_path: Path) -> None:
    """Dequantized experts in its own classes, if its own config is passed."""
    write_mxfp4(tmp_path)
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "GptOssExperts"
    assert_bits(experts.gate_up_proj.data, dequantized(tmp_path)[f"{LAYER}.gate_up_proj"], "gate_up_proj")


def test_a_float_checkpoint_is_as_before(tmp_path: Path) -> None:
    model = load(save_float(float_model("gpt-oss"), tmp_path))
    assert type(model.model.layers[0].mlp.experts).__name__ == "GptOssExperts"


def wrong_limit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["swiglu_limit"] = 6.5


def wrong_alpha(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["swiglu_alpha"] = 1.7


def no_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors[f"{LAYER}.down_proj_scales"]


def no_down(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors[f"{LAYER}.down_proj_scales"], tensors[f"{LAYER}.down_proj_blocks"]


def nan_scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[f"{LAYER}.down_proj_scales"][1, 2, 0] = 255


def float_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    name = f"{LAYER}.down_proj_scales"
    tensors[name] = tensors[name].float()


def flat_codes(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    name = f"{LAYER}.down_proj_blocks"
    tensors[name] = tensors[name].flatten(-2)


def fewer_experts(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if f"{LAYER}." in name]:
        tensors[name] = tensors[name][:3].clone()


def no_bias(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for child in ("gate_up_proj", "down_proj"):
        del tensors[f"{LAYER}.{child}_bias"]


def more_keys(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["group_size"] = 16


WRONG = {
    "limit": (wrong_limit, r"^config\.json: swiglu_limit is 6\.5, must be 7\.0"),
    "alpha": (wrong_alpha, r"^config\.json: swiglu_alpha is 1\.7, must be 1\.702"),
    "scales": (no_scales, r"down_proj_scales is missing beside model\.layers\.0\.mlp\.experts\.down_proj_bl"),
    "down": (no_down, r"experts\.down_proj is missing beside model\.layers\.0\.mlp\.experts\.gate_up_proj"),
    "nan": (nan_scale, r"experts\.down_proj.*: scales: 1 of \d+ are 255, the NaN of e8m0"),
    "dtype": (float_scales, r"down_proj_scales has the dtype F32, must be U8 or F8_E8M0"),
    "shape": (flat_codes, r"down_proj_blocks has the shape \(4, 64, 48\), must be \(g, n, k/32, 16\)"),
    "keys": (more_keys, r"quantization_config: group_size is 16 \(int\), must be absent"),
}
OF_THE_MODEL = {
    "experts": (fewer_experts, r"down_proj is a weight \(3, 64, 96\), must be \(4, 64, 96\)"),
    "bias": (no_bias, r"down_proj_bias is missing for model\.layers\.0\.mlp\.experts"),
}


@pytest.mark.parametrize("case", [*WRONG, *OF_THE_MODEL])
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, text = (WRONG | OF_THE_MODEL)[case]
    write_mxfp4(tmp_path, change=change)
    with pytest.raises(ValueError, match=text.removeprefix("^")):
        load(tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_not_converted(case: str, tmp_path: Path) -> None:
    change, text = WRONG[case]
    write_mxfp4(tmp_path / "a", change=change)
    with pytest.raises(ValueError, match=text.removeprefix("^")):
        convert(tmp_path / "a", tmp_path / "b", Translation("mxfp4", "fp4gemm"))
