"""Experts with biases, with a clamped SwiGLU, and in MXFP4, in the plug-ins of both engines."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import fp4gemm
import pytest
import serving
import sglang_stub
import torch
import vllm_stub
from fp4gemm import NVFP4Tensor
from fp4gemm.activations import ActivationName
from torch import Tensor

E, D, H = 4, 64, 128  # experts, hidden, intermediate
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}  # as SGLang's model has it


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The stub of SGLang, registered with fp4gemm."""
    modules = sglang_stub.modules()
    with vllm_stub.installed(modules):
        from fp4gemm.integrations.sglang import register

        register()
        yield types.SimpleNamespace(configs=sglang_stub.HookRegistry.apply_hooks(sglang_stub.CLASSES))


def _mxfp4(seed: int, low: int = 119, high: int = 123, i: int = H) -> dict[str, Tensor]:
    """The tensors of the experts of a layer, by the engines' names; gate and up alternate."""
    gen = torch.Generator().manual_seed(seed)
    made = {}
    for which, n, k in (("w13", 2 * i, D), ("w2", D, i)):
        made[f"{which}_weight"] = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, generator=gen)
        scales = torch.randint(low, high + 1, (E, n, k // 32), generator=gen)
        made[f"{which}_weight_scale"] = scales.to(torch.uint8)
        made[f"{which}_bias"] = torch.randn(E, n, generator=gen).bfloat16()
    return made


def _load(layer: Any, tensors: dict[str, Tensor], bias: str = "bias") -> None:
    """As the models of both engines load GPT-OSS: all experts at once."""
    for name, tensor in tensors.items():
        name = name.replace("bias", bias)
        param = getattr(layer, name)
        param.weight_loader(param, tensor, weight_name=f"m.experts.{name}", shard_id=None, expert_id=None)
    layer.quant_method.process_weights_after_loading(layer)


def _wanted(tensors: dict[str, Tensor], activations: str = "a16") -> fp4gemm.nn.Experts:
    """The module of this library around the exact NVFP4 weights."""
    first, second = (
        NVFP4Tensor.from_mxfp4(
            tensors[f"{which}_weight"].unflatten(-1, (-1, 16)), tensors[f"{which}_weight_scale"]
        )
        for which in ("w13", "w2")
    )
    return fp4gemm.nn.Experts.from_quantized(
        first,
        second,
        tensors["w13_bias"].float(),
        tensors["w2_bias"].float(),
        layout="interleaved",
        activation="swiglu_oai",
        activations=activations,  # type: ignore[arg-type]
    )


def _routing(m: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, D, generator=generator).bfloat16()
    scores, ids = torch.rand(m, E, generator=generator).softmax(-1).topk(2)
    return x, scores, ids.to(torch.int32)


def _vllm_layer(vllm: types.SimpleNamespace, i: int = H, **more: Any) -> Any:
    config = vllm.table["gpt_oss_mxfp4"].from_config(dict(CONFIG))
    return vllm.layers.RoutedExperts(
        E, D, i, config, "m.experts", activation="swigluoai", has_bias=True, **more
    )


def _sglang_layer(sglang: types.SimpleNamespace) -> Any:
    config = sglang.configs["Mxfp4Config"].from_config(dict(CONFIG))
    return sglang_stub.FusedMoE(E, D, H, config, "m.experts", with_bias=True, **GPT_OSS)


@pytest.mark.parametrize("activations", ["a16", "fp8", "per-token"])
def test_vllm_has_the_bits_of_nn_experts(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    if activations != "a16":  # which the checkpoint means
        monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", activations)
    layer, tensors = _vllm_layer(vllm), _mxfp4(0)
    _load(layer, tensors)
    assert layer.w13_bias.dtype is torch.float32
    wanted = _wanted(tensors, activations)
    for m in (1, 9):
        x, scores, ids = _routing(m)
        assert torch.equal(layer.quant_method.apply(layer, x, scores, ids), wanted(x, ids, scores))


def test_other_layers_of_gpt_oss_remain_vllms(vllm: types.SimpleNamespace) -> None:
    config = vllm.table["gpt_oss_mxfp4"].from_config(dict(CONFIG))
    linear = vllm.layers.QKVParallelLinear(D, 16, 4, 2, quant_config=config, prefix="m.qkv_proj")
    assert type(linear.quant_method) is vllm.layers.UnquantizedLinearMethod
    assert config.report.text() == "fp4gemm: left to vLLM, it is in 16 bits: m.qkv_proj"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_vllm_add_the_bias_of_down_once(vllm: types.SimpleNamespace, rank: int) -> None:
    """Each rank has half of the pairs of gate and up, and half of the columns of down."""
    vllm_stub._RANK.update(rank=rank, size=2)
    layer, tensors = _vllm_layer(vllm, 2 * H), _mxfp4(1, i=2 * H)
    for name in tensors:
        if name != "w2_bias":
            dim = 1 if name.startswith("w13") else 2
            tensors[name] = tensors[name].chunk(2, dim)[rank].contiguous()
    _load(layer, tensors)
    wanted = _wanted(tensors | ({} if rank == 0 else {"w2_bias": torch.zeros(E, D)}))
    x, scores, ids = _routing(9)
    assert torch.equal(layer.quant_method.apply(layer, x, scores, ids), wanted(x, ids, scores))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w13_weight", r"^m\.experts\.w13_weight: is missing .* for the experts 0, 1, 2, 3 of this rank$"),
        ("w2_weight_scale", r"^m\.experts\.w2_weight_scale: is missing"),
        ("w13_bias", r"^m\.experts\.w13_bias: is missing"),
        ("w2_bias", r"^m\.experts\.w2_bias: is missing"),
    ],
)
def test_a_tensor_that_is_missing_is_named(vllm: types.SimpleNamespace, name: str, message: str) -> None:
    tensors = _mxfp4(2)
    del tensors[name]
    with pytest.raises(ValueError, match=message):
        _load(_vllm_layer(vllm), tensors)


def test_scales_that_are_nan_or_of_another_dtype_are_refused(vllm: types.SimpleNamespace) -> None:
    tensors = _mxfp4(3)
    tensors["w2_weight_scale"][1, 5, 0] = 255
    with pytest.raises(
        ValueError, match=r"^m\.experts\.w2_weight_scale: .* holds NaN for the experts 1 of this rank$"
    ):
        _load(_vllm_layer(vllm), tensors)
    tensors = _mxfp4(3)
    tensors["w2_weight_scale"] = tensors["w2_weight_scale"].float()
    with pytest.raises(TypeError, match=r"^m\.experts\.w2_weight_scale: dtype is torch\.float32, must be"):
        _load(_vllm_layer(vllm), tensors)


def test_values_that_were_rounded_are_counted_in_the_log(
    vllm: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    layer, tensors = _vllm_layer(vllm), _mxfp4(4, 90, 123)
    with caplog.at_level("INFO", "vllm.fp4gemm"):
        _load(layer, tensors)
    lines = [record.message for record in caplog.records]
    assert any(
        line.startswith("fp4gemm: m.experts.w13_weight: ") and " of 65536 values were rounded" in line
        for line in lines
    )


def test_sglang_has_the_bits_of_nn_experts_after_an_update_too(sglang: types.SimpleNamespace) -> None:
    layer = _sglang_layer(sglang)
    memory = []
    for seed in (5, 6):
        tensors = _mxfp4(seed)
        layer.quant_method.restore_weights_before_loading(layer)
        _load(layer, tensors, "weight_bias")
        memory.append({name: p.data_ptr() for name, p in layer.named_parameters()})
        x, scores, ids = _routing(9)
        assert torch.equal(layer(x, scores, ids), _wanted(tensors)(x, ids, scores))
    assert memory[0] == memory[1]


def test_other_experts_in_mxfp4_remain_sglangs(sglang: types.SimpleNamespace) -> None:
    config = sglang.configs["Mxfp4Config"].from_config(dict(CONFIG))
    layer = sglang_stub.FusedMoE(E, D, H, config, "m.experts", swiglu_limit=10.0)
    assert layer.quant_method == "SGLang's method"
    assert "its experts are MXFP4, and not those of GPT-OSS" in config.fp4gemm_report.text()


def _nvfp4() -> tuple[list[dict[str, NVFP4Tensor]], list[dict[str, Tensor]]]:
    """Weights and biases of each expert by shard."""
    sizes = {"w1": (H, D), "w2": (D, H), "w3": (H, D)}
    weights = [
        {shard: serving.weight(n, k, 10 * e + j) for j, (shard, (n, k)) in enumerate(sizes.items())}
        for e in range(E)
    ]
    gen = torch.Generator().manual_seed(0)
    biases = [
        {shard: torch.randn(n, generator=gen).bfloat16() for shard, (n, _) in sizes.items()} for _ in range(E)
    ]
    return weights, biases


CLAMPED: list[tuple[dict[str, Any], ActivationName]] = [
    ({"activation": "swigluoai"}, "swiglu_oai"),
    (
        {
            "activation": "swigluoai_uninterleave",
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
        },
        "swiglu_oai",
    ),
    ({"swiglu_limit": 10.0}, "swiglu_limit10"),
    ({}, "swiglu"),
]


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
@pytest.mark.parametrize(("attributes", "activation"), CLAMPED, ids=["oai", "minimax", "limit10", "plain"])
def test_nvfp4_experts_one_by_one(
    vllm: types.SimpleNamespace,
    attributes: dict[str, Any],
    activation: ActivationName,
    format: str,
    has_bias: bool,
) -> None:
    """gate and up are halves, whatever the order is in which vLLM's own kernels read them."""
    config = serving.config_of(vllm.table, format)
    layer = vllm.layers.RoutedExperts(E, D, H, config, "m.experts", has_bias=has_bias, **attributes)
    weights, biases = _nvfp4()
    for e, shards in enumerate(weights):
        parts = {
            shard: serving.stored(w, format) | ({"bias": biases[e][shard]} if has_bias else {})
            for shard, w in shards.items()
        }
        serving.load_expert(layer, e, parts)
    layer.quant_method.process_weights_after_loading(layer)
    given = [torch.stack([torch.cat([each["w1"], each["w3"]]) for each in biases]).float()]
    given.append(torch.stack([each["w2"] for each in biases]).float())
    wanted = fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack([fp4gemm.concat([each["w1"], each["w3"]]) for each in weights]),
        fp4gemm.stack([each["w2"] for each in weights]),
        *(given if has_bias else ()),
        activation=activation,
    )
    for m in (1, 9):
        x, scores, ids = _routing(m)
        x = 8 * x  # beyond the limits
        assert torch.equal(layer.quant_method.apply(layer, x, scores, ids), wanted(x, ids, scores))


def test_sglang_serves_the_limit_of_deepseek_v4(sglang: types.SimpleNamespace) -> None:
    config = serving.config_of({"modelopt_fp4": sglang.configs["ModelOptFp4Config"]}, "modelopt")
    layer = sglang_stub.FusedMoE(E, D, H, config, "m.experts", swiglu_limit=10.0)
    assert layer.quant_method.activation == "swiglu_limit10"


def test_16_bit_experts_with_biases_are_left_to_vllm(vllm: types.SimpleNamespace) -> None:
    """The model of GPT-OSS copies them without a loader, which could tell when they are complete."""
    config = vllm.table["fp4gemm"]()
    vllm.layers.RoutedExperts(E, D, H, config, "m.experts", activation="swigluoai", has_bias=True)
    assert config.report.text() == (
        "fp4gemm: left to vLLM, its experts have biases and are in 16 bits: m.experts"
    )
