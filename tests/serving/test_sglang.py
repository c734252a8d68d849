"""The plug-in of SGLang, on a stub of its interfaces: choice of layers, exact products, updates in place."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import fp4gemm
import pytest
import serving
import sglang_stub
import torch
import vllm_stub
from fp4gemm import _names
from fp4gemm.checkpoint.formats import Scheme, quantization_config
from fp4gemm.integrations.serving import weights
from fp4gemm.ops.parts import OperandParts

NAMES = {"modelopt": "ModelOptFp4Config", "compressed-tensors": "CompressedTensorsConfig"}


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The stub with the hooks applied: its configs by name."""
    modules = sglang_stub.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from fp4gemm.integrations.sglang import register

    register()
    yield types.SimpleNamespace(
        configs=sglang_stub.HookRegistry.apply_hooks(sglang_stub.CLASSES), modules=modules, register=register
    )
    vllm_stub._RANK.update(rank=0, size=1)
    for name in list(sys.modules):
        if name.startswith("fp4gemm.integrations.sglang."):
            del sys.modules[name]


def _config(sglang: types.SimpleNamespace, format: str, activations: str = "per-token", **more: Any) -> Any:
    scheme = Scheme(format=format, activations=activations, **more)  # type: ignore[arg-type]
    given = quantization_config(scheme)
    if format == "fp4gemm":
        fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        return _method(sglang).from_config({**given, "packed_modules_mapping": fused, "hf_config": None})
    return sglang.configs[NAMES[format]].from_config(given)


def _method(sglang: types.SimpleNamespace) -> Any:
    """The config class that SGLang finds under the name "fp4gemm"."""
    return sglang.modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS["fp4gemm"]


def _x(m: int) -> torch.Tensor:
    return torch.randn(m, 64, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
@pytest.mark.parametrize("format", [*NAMES, "fp4gemm"])
def test_fused_layers_with_unequal_outer_scales_are_exact(
    sglang: types.SimpleNamespace, format: str, activations: str, rank: int
) -> None:
    """Each row of q, k and v has the bits of its own layer; SGLang keeps the largest scale for all."""
    vllm_stub._RANK.update(rank=rank, size=2)
    config = _config(sglang, format, activations, e4m3_max=256)
    layer = vllm_stub.QKVParallelLinear(64, 16, 4, 2, False, quant_config=config, prefix="m.qkv_proj")
    parts = {
        name: serving.weight(n, 64, i, factor, 256)
        for i, (name, n, factor) in enumerate((("q", 64, 1.0), ("k", 32, 3.7), ("v", 32, 0.1)))
    }
    for shard, w in parts.items():
        serving.load(layer, serving.stored(w, format), shard)
    layer.quant_method.process_weights_after_loading(layer)
    for m in (1, 7):
        x = _x(m)
        whole = [serving.product(x, w, None, activations).chunk(2, -1)[rank] for w in parts.values()]
        assert torch.equal(layer(x), torch.cat(whole, -1))


def _experts(seed: int) -> list[dict[str, fp4gemm.NVFP4Tensor]]:
    return [
        {
            "w1": serving.weight(128, 64, seed + 3 * e),
            "w2": serving.weight(64, 128, seed + 3 * e + 1, 0.3),
            "w3": serving.weight(128, 64, seed + 3 * e + 2, 2.0),
        }
        for e in range(4)
    ]


def _reference(experts: list[dict[str, fp4gemm.NVFP4Tensor]], activations: str) -> fp4gemm.nn.Experts:
    return fp4gemm.nn.Experts.from_quantized(
        fp4gemm.stack([fp4gemm.concat([each["w1"], each["w3"]]) for each in experts]),
        fp4gemm.stack([each["w2"] for each in experts]),
        activations=serving.served(activations),
    )


@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
@pytest.mark.parametrize("format", [*NAMES, "fp4gemm"])
def test_experts_have_the_bits_of_nn_experts_and_are_updated_in_place(
    sglang: types.SimpleNamespace, format: str, activations: str
) -> None:
    layer = sglang_stub.FusedMoE(4, 64, 128, _config(sglang, format, activations), "m.experts")
    x = _x(9)
    scores, ids = torch.rand(9, 4).softmax(-1).topk(2)
    ids = ids.to(torch.int32)
    ids[2, 0] = -1  # an expert of another rank
    where: dict[str, int] = {}
    for seed in (0, 100):
        experts = _experts(seed)
        layer.quant_method.restore_weights_before_loading(layer)
        for e, shards in enumerate(experts):
            parts = {name: serving.stored(w, format) for name, w in shards.items()}
            serving.load_expert(layer, e, parts)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer(x, scores, ids), _reference(experts, activations)(x, ids, scores))
        now = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        assert now == (where or now)
        where = now
    layer.quant_method.restore_weights_before_loading(layer)  # an update without tensors of this layer
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(x, scores, ids), _reference(experts, activations)(x, ids, scores))
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == where


@pytest.fixture
def prepacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers hold prepacked weights, as on compute capability 9.0."""

    def hold(w: fp4gemm.NVFP4Tensor, tokens: str) -> OperandParts:
        return fp4gemm.prepack(w)._operand_parts()

    monkeypatch.setattr(weights, "hold", hold)


@pytest.mark.usefixtures("prepacks")
def test_prepacked_weights_are_updated_in_place(sglang: types.SimpleNamespace) -> None:
    """The names of the checkpoint's scales are free again, though the layer holds no scales."""
    linear = vllm_stub.ColumnParallelLinear(
        64, 48, False, quant_config=_config(sglang, "modelopt"), prefix="m.up_proj"
    )
    experts = sglang_stub.FusedMoE(4, 64, 128, _config(sglang, "modelopt"), "m.experts")
    x = _x(9)
    scores, ids = torch.rand(9, 4).softmax(-1).topk(2)
    where: list[int] = []
    for seed in (0, 100):
        w, wanted = serving.weight(48, 64, seed), _experts(seed)
        for layer in (linear, experts):
            layer.quant_method.restore_weights_before_loading(layer)
        serving.load(linear, serving.stored(w, "modelopt"))
        for e, shards in enumerate(wanted):
            parts = {name: serving.stored(each, "modelopt") for name, each in shards.items()}
            serving.load_expert(experts, e, parts)
        for layer in (linear, experts):
            layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(linear(x), serving.product(x, w))
        assert torch.equal(experts(x, scores, ids), _reference(wanted, "per-token")(x, ids, scores))
        assert linear.weight.dim() == 1
        assert not hasattr(experts, "w13_weight_scale")
        now = [p.data_ptr() for layer in (linear, experts) for p in layer.parameters()]
        assert now == (where or now)
        where = now


def test_a_linear_layer_is_updated_in_place(sglang: types.SimpleNamespace) -> None:
    """SGLang's order of calls; a part of a layer alone is refused by name."""
    layer = vllm_stub.ColumnParallelLinear(
        64, 48, quant_config=_config(sglang, "modelopt"), prefix="m.up_proj"
    )
    where: dict[str, int] = {}
    for seed in (0, 1):
        w = serving.weight(48, 64, seed, 1 + seed)
        layer.quant_method.restore_weights_before_loading(layer)
        serving.load(layer, serving.stored(w, "modelopt"))
        layer.bias.data = torch.full((48,), 1.0 + seed).bfloat16()
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer(_x(7)), serving.product(_x(7), w, layer.bias.data))
        now = {name: p.data_ptr() for name, p in layer.named_parameters() if name != "bias"}
        assert now == (where or now)
        where = now
    layer.quant_method.restore_weights_before_loading(layer)  # an update of the bias alone
    layer.bias.data.copy_(torch.full((48,), 3.0))
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(_x(7)), serving.product(_x(7), w, layer.bias.data))
    layer.quant_method.restore_weights_before_loading(layer)
    tensors = serving.stored(serving.weight(48, 64, 2), "modelopt")
    serving.load(layer, {name: tensors[name] for name in ("weight", "weight_scale")})
    with pytest.raises(ValueError, match=r"m\.up_proj\.weight_scale_2: is missing in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


def test_residual_channels_are_updated_in_place(sglang: types.SimpleNamespace) -> None:
    layer = vllm_stub.ColumnParallelLinear(
        64, 48, False, quant_config=_config(sglang, "modelopt", residual_channels=32), prefix="m.up_proj"
    )
    where: dict[str, int] = {}
    for seed in (0, 1):
        w, channels = serving.weight(48, 64, seed), torch.arange(seed, 32 + seed, dtype=torch.int32)
        layer.quant_method.restore_weights_before_loading(layer)
        serving.load(layer, serving.stored(w, "modelopt") | {"residual_channels": channels})
        layer.quant_method.process_weights_after_loading(layer)
        q = fp4gemm.quantize(_x(7), residual_channels=channels)
        wanted = fp4gemm.mm(q, fp4gemm.repeat_columns(w, channels), out_dtype=torch.bfloat16)
        assert torch.equal(layer(_x(7)), wanted)
        now = {name: p.data_ptr() for name, p in layer.named_parameters()}
        assert now == (where or now)
        where = now
    layer.quant_method.restore_weights_before_loading(layer)  # an update without tensors of this layer
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(_x(7)), wanted)


def test_a_layer_with_residual_channels_is_not_left_to_sglang(
    sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's models may skip tensors that they do not know."""
    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "*.up_proj")
    config = _config(sglang, "modelopt", residual_channels=32)
    text = r"m\.up_proj: is left to SGLang, since the option ignore names it, and has 32 residual channels"
    with pytest.raises(ValueError, match=text):
        vllm_stub.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")


@pytest.mark.parametrize(
    ("parts", "missing"),
    [(("weight",), "weight_scale_2"), (("weight_scale", "weight_scale_2", "input_scale"), "weight")],
    ids=["codes", "scales"],
)
def test_an_update_of_codes_or_scales_alone_is_refused(
    sglang: types.SimpleNamespace, parts: tuple[str, ...], missing: str
) -> None:
    layer = vllm_stub.ColumnParallelLinear(
        64, 48, False, quant_config=_config(sglang, "modelopt"), prefix="m.up_proj"
    )
    serving.load(layer, serving.stored(serving.weight(48, 64, 0), "modelopt"))
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.restore_weights_before_loading(layer)
    tensors = serving.stored(serving.weight(48, 64, 1), "modelopt")
    serving.load(layer, {name: tensors[name] for name in parts})
    with pytest.raises(ValueError, match=rf"m\.up_proj\.{missing}: is missing in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ({"activation": "situ"}, "its activation is situ"),
        ({"swiglu_limit": 7.0}, "its SwiGLU has alpha 1.0, beta 0.0 and the limit 7.0"),
        ({"gemm1_clamp_limit": 10.0}, "its activation is silu with a limit, an alpha or a beta"),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            "gate and up lie in another order than in checkpoints of this format",
        ),
        ({"with_bias": True}, "its experts have biases"),
        ({"no_combine": True}, "its router's weights are not those of a sum"),
    ],
)
def test_experts_that_no_operator_runs_are_left_to_sglang(
    sglang: types.SimpleNamespace, runs: dict[str, Any], reason: str
) -> None:
    config = _config(sglang, "modelopt")
    layer = sglang_stub.FusedMoE(4, 64, 128, config, "m.experts", **runs)
    assert layer.quant_method == "SGLang's method"
    assert config.fp4gemm_report.text() == f"fp4gemm: left to SGLang, {reason}: m.experts"


def test_experts_of_the_runner_triton_kernel_are_left_to_sglang(sglang: types.SimpleNamespace) -> None:
    """Its tokens are routed in another format; other backends leave the operator the ids of this rank."""
    sglang_stub.BACKEND.value = "triton_kernel"
    config = _config(sglang, "modelopt")
    assert sglang_stub.FusedMoE(4, 64, 128, config, "m.experts").quant_method == "SGLang's method"
    assert config.fp4gemm_report.text() == (
        "fp4gemm: left to SGLang, --moe-runner-backend triton_kernel routes its tokens in another format: "
        "m.experts"
    )


def test_the_method_fp4gemm_is_a_choice_of_the_command_line(sglang: types.SimpleNamespace) -> None:
    choices = sglang.modules["sglang.srt.arg_groups.choices"].QUANTIZATION_CHOICES
    sglang.register()
    assert choices == ["modelopt_fp4", "fp4gemm"]
    assert _method(sglang)().get_name() == "fp4gemm"
    tables = sglang.modules["sglang.srt.layers.quantization"]
    assert tables.CPU_QUANTIZATION_METHODS["fp4gemm"] is _method(sglang)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("activations", serving.ACTIVATIONS[:-1])
def test_16_bit_weights_become_nvfp4_after_loading(
    sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, activations: str, rank: int
) -> None:
    """--quantization fp4gemm has the bits of nn.Linear.from_float on each rank, after updates too."""
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", activations)
    vllm_stub._RANK.update(rank=rank, size=2)
    layer = vllm_stub.MergedColumnParallelLinear(
        64, [32, 32], False, quant_config=_method(sglang)(), prefix="m.gate_up_proj"
    )
    x, where = _x(7), {}
    scaling = serving.served(activations)
    for factor in (1.0, 3.0):
        layer.quant_method.restore_weights_before_loading(layer)
        floats = [_x(32 + i)[:32] * factor for i in range(2)]
        for i, w in enumerate(floats):
            layer.weight.weight_loader(layer.weight, w, i)
        layer.quant_method.process_weights_after_loading(layer)
        plain = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        plain.weight.data = torch.cat([w.chunk(2)[rank] for w in floats])
        wanted = fp4gemm.nn.Linear.from_float(plain, method="four-over-six", activations=scaling)
        assert torch.equal(layer(x), wanted(x))
        now = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        assert now == (where or now)
        where = now
    layer.quant_method.restore_weights_before_loading(layer)  # an update without tensors of this layer
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(x), wanted(x))
    layer.quant_method.restore_weights_before_loading(layer)
    layer.weight.weight_loader(layer.weight, floats[0], 0)
    with pytest.raises(ValueError, match=r"m\.gate_up_proj\.weight: 1024 values are NaN or infinite"):
        layer.quant_method.process_weights_after_loading(layer)


def test_16_bit_experts_become_nvfp4_after_loading(sglang: types.SimpleNamespace) -> None:
    layer = sglang_stub.FusedMoE(4, 64, 128, _method(sglang)(), "m.experts")
    generator = torch.Generator().manual_seed(0)
    floats = {
        name: torch.randn(4, *shape, generator=generator).bfloat16()
        for name, shape in (("w1", (128, 64)), ("w2", (64, 128)), ("w3", (128, 64)))
    }
    for e in range(4):
        for name, stack in floats.items():
            param = layer.w2_weight if name == "w2" else layer.w13_weight
            param.weight_loader(param, stack[e], "weight", shard_id=name, expert_id=e)
    layer.quant_method.process_weights_after_loading(layer)
    gate_up = torch.cat([floats["w1"], floats["w3"]], 1)
    wanted = fp4gemm.nn.Experts.from_float(gate_up, floats["w2"], activation="swiglu", method="four-over-six")
    x = _x(9)
    scores, ids = torch.rand(9, 4).softmax(-1).topk(2)
    assert torch.equal(layer(x, scores, ids.int()), wanted(x, ids, scores))


def test_routers_heads_and_partly_quantized_layers(sglang: types.SimpleNamespace) -> None:
    config = _method(sglang)()
    head = sglang.modules["sglang.srt.layers.vocab_parallel_embedding"].ParallelLMHead()
    assert config.get_quant_method(head, "lm_head") is None
    for name in ("m.mlp.gate", "m.mlp.router.proj"):
        router = vllm_stub.LinearBase(64, 48, config, name)
        assert isinstance(router.quant_method, vllm_stub.UnquantizedLinearMethod)
    assert config.fp4gemm_report.text() == (
        "fp4gemm: left to SGLang, it is the output embedding: lm_head; left to SGLang, it is a router: "
        "m.mlp.gate, m.mlp.router.proj"
    )
    assert config.is_linear_unquantized("m.mlp.gate")
    assert not config.is_linear_unquantized("m.mlp.up_proj")
    partly = _config(sglang, "fp4gemm", ignore=("m.k_proj",))
    with pytest.raises(
        ValueError, match=r"m\.qkv_proj: the checkpoint quantizes some of m\.q_proj, m\.k_proj"
    ):
        vllm_stub.LinearBase(64, 48, partly, "m.qkv_proj")


@pytest.mark.parametrize("child", ["down_proj", "w2"])
@pytest.mark.parametrize("format", ["fp4gemm", "compressed-tensors"])
def test_experts_that_the_checkpoint_excludes_by_name(
    sglang: types.SimpleNamespace, format: str, child: str
) -> None:
    """SGLang does not say what the checkpoint calls the projections: those of Mixtral are w1, w3 and w2."""
    names = next(names for names in _names.EXPERTS if child in names)
    excluded = tuple(f"m.experts.0.{each}" for each in names[:3])
    config = _config(sglang, format, ignore=excluded)
    experts = sglang.modules["sglang.srt.layers.moe.fused_moe_triton"].FusedMoE
    layer = experts.__new__(experts)
    torch.nn.Module.__init__(layer)
    config.get_quant_method(layer, "m.experts")
    assert config.fp4gemm_report.text() == ("fp4gemm: left to SGLang, the checkpoint excludes it: m.experts")


def test_other_layers_and_schemes_keep_sglangs_methods(
    sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(sglang, "modelopt", ignore=("lm_head",))
    assert vllm_stub.LinearBase(64, 48, config, "lm_head").quant_method == "SGLang's method"
    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "*.o_proj")
    mixed = sglang.configs["ModelOptMixedPrecisionConfig"].from_config(
        {"quantized_layers": {"m.a": {"quant_algo": "FP8"}, "m.o_proj": {"quant_algo": "NVFP4"}}}
    )
    for name in ("m.a", "m.b", "m.o_proj"):
        assert vllm_stub.LinearBase(64, 48, mixed, name).quant_method == "SGLang's method"
    assert mixed.fp4gemm_report.text() == (
        "fp4gemm: left to SGLang, its weights are FP8: m.a; left to SGLang, it is in 16 bits: m.b; "
        "left to SGLang, the option ignore names it: m.o_proj"
    )


def test_the_log_has_its_line_where_every_layer_is_left(
    sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "m.*")
    config = _config(sglang, "modelopt")
    layers = [vllm_stub.LinearBase(64, 48, config, name) for name in ("m.0.up", "m.1.up")]
    with caplog.at_level(logging.INFO, "sglang.srt.fp4gemm"):
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
    assert caplog.messages == ["fp4gemm: left to SGLang, the option ignore names it: 2 x m.*.up"]


def test_an_sglang_without_a_name_that_is_used_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = sglang_stub.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delattr(modules["sglang.srt.layers.moe"], "get_moe_a2a_backend")
    modules["sglang"].__version__ = "9.9.0"
    for name in ("_choice", "_fp4gemm"):
        monkeypatch.delitem(sys.modules, f"fp4gemm.integrations.sglang.{name}", raising=False)
    from fp4gemm.integrations.sglang import register

    with caplog.at_level(logging.INFO, "sglang.srt.fp4gemm"):
        register()
    assert not sglang_stub.HookRegistry.hooks
    assert not modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS
    (message,) = caplog.messages
    assert message.startswith(
        "fp4gemm: serves no layer: SGLang 9.9.0 is not supported: cannot import name 'get_moe_a2a_backend'"
    )


def test_a_bad_checkpoint_is_refused_by_name(sglang: types.SimpleNamespace) -> None:
    layer = sglang_stub.FusedMoE(4, 64, 128, _config(sglang, "modelopt"), "m.experts")
    with pytest.raises(TypeError, match=r"m\.experts\.w13_weight_scale: dtype is torch.uint8, .* mxfp4"):
        serving.load_expert(layer, 0, {"w1": {"weight_scale": torch.zeros(128, 2, dtype=torch.uint8)}})


def test_without_a_kernel_no_hook_is_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, module in sglang_stub.modules("cuda", (7, 0)).items():
        monkeypatch.setitem(sys.modules, name, module)
    from fp4gemm.integrations.sglang import register

    with caplog.at_level(logging.INFO, "sglang.srt.fp4gemm"):
        register()
        monkeypatch.setenv("FP4GEMM_SERVING_ENABLED", "0")
        register()
    assert not sglang_stub.HookRegistry.hooks
    assert "fp4gemm: serves no layer: no " in caplog.messages[0]
    assert caplog.messages[1] == "fp4gemm: is disabled by FP4GEMM_SERVING_ENABLED=0"
