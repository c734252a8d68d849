"""What the plug-in of vLLM refuses, by name; what it leaves to vLLM; and when it does nothing at all."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import types
from typing import Any

import pytest
import serving
import torch


def _linear(vllm: types.SimpleNamespace, format: str = "modelopt", **more: Any) -> Any:
    config = serving.config_of(vllm.table, format)
    sizes = {"n": 48, "k": 64} | more
    return vllm.layers.ColumnParallelLinear(
        sizes["k"], sizes["n"], False, quant_config=config, prefix="m.up_proj"
    )


@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_a_missing_scale_is_named(vllm: types.SimpleNamespace, format: str) -> None:
    tensors = serving.stored(serving.weight(48, 64, 0), format)
    outer = "weight_scale_2" if format == "modelopt" else "weight_global_scale"
    for name, text in (
        (outer, f"m.up_proj.{outer}: is missing in the checkpoint"),
        ("weight_scale", "m.up_proj.weight_scale: holds NaN, must be numbers; the checkpoint has no block"),
    ):
        layer = _linear(vllm, format)
        serving.load(layer, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(ValueError, match=text.replace(".", r"\.")):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_a_block_scale_with_a_sign_is_named(vllm: types.SimpleNamespace, format: str) -> None:
    tensors = serving.stored(serving.weight(48, 64, 0), format)
    tensors["weight_scale"].view(torch.uint8)[7, 2] |= 0x80
    layer = _linear(vllm, format)
    serving.load(layer, tensors)
    text = r"^m\.up_proj\.weight_scale: 1 of 192 block scales .* the sign bit set, .* at \[7, 2\]"
    with pytest.raises(ValueError, match=text):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("value", [torch.inf, -1.0, 0.0])
def test_an_input_scale_that_is_no_amax_is_named(
    vllm: types.SimpleNamespace, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", "static")
    tensors = serving.stored(serving.weight(48, 64, 0), "modelopt", 3.0)
    tensors["input_scale"] = torch.tensor(value)
    config = serving.config_of(vllm.table, "modelopt", "static")
    layer = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
    serving.load(layer, tensors)
    with pytest.raises(
        ValueError, match=rf"^m\.up_proj\.input_scale: holds {value}, must be positive and fi"
    ):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_missing_codes_are_named(vllm: types.SimpleNamespace, format: str) -> None:
    """With all scales there, the product would be one of uninitialised memory."""
    codes = "weight" if format == "modelopt" else "weight_packed"
    config = serving.config_of(vllm.table, format)
    layer = vllm.layers.MergedColumnParallelLinear(
        64, [32, 32], False, quant_config=config, prefix="m.gate_up_proj"
    )
    tensors = serving.stored(serving.weight(32, 64, 0), format)
    serving.load(layer, tensors, 0)
    del tensors[codes]
    serving.load(layer, tensors, 1)
    with pytest.raises(
        ValueError, match=rf"m\.gate_up_proj\.{codes}: is missing .* for the fused layers 1 of 2"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    experts = vllm.layers.RoutedExperts(2, 64, 32, config, "m.experts")
    for e, (shard, n, k) in itertools.product(range(2), (("w1", 32, 64), ("w2", 64, 32), ("w3", 32, 64))):
        tensors = serving.stored(serving.weight(n, k, e), format)
        if e == 1 and shard == "w3":
            del tensors[codes]
        serving.load_expert(experts, e, {shard: tensors})
    with pytest.raises(
        ValueError,
        match=rf"m\.experts\.w13\.{codes}: is missing .* for the experts 1 of this rank for the fused",
    ):
        experts.quant_method.process_weights_after_loading(experts)


def test_a_fused_layer_without_one_scale_names_the_shard(vllm: types.SimpleNamespace) -> None:
    layer = vllm.layers.MergedColumnParallelLinear(
        64, [32, 32], False, quant_config=serving.config_of(vllm.table, "modelopt"), prefix="m.gate_up_proj"
    )
    serving.load(layer, serving.stored(serving.weight(32, 64, 0), "modelopt"), 0)
    with pytest.raises(
        ValueError, match=r"gate_up_proj\.weight_scale_2: is missing .* for the fused layers 1 of 2"
    ):
        layer.quant_method.process_weights_after_loading(layer)


def test_an_expert_without_scales_is_named(vllm: types.SimpleNamespace) -> None:
    layer = vllm.layers.RoutedExperts(3, 64, 32, serving.config_of(vllm.table, "modelopt"), "m.experts")
    for e in (0, 2):
        parts = {
            shard: serving.stored(serving.weight(n, k, e), "modelopt")
            for shard, n, k in (("w1", 32, 64), ("w2", 64, 32), ("w3", 32, 64))
        }
        serving.load_expert(layer, e, parts)
    with pytest.raises(ValueError, match=r"experts\.w13\.weight_scale_2: is missing .* for the experts 1 of"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("name", "tensor", "error", "text"),
    [
        (
            "weight_scale",
            torch.zeros(48, 2, dtype=torch.uint8),
            TypeError,
            r"weight_scale: dtype is torch.uint8, must be torch.float8_e4m3fn; scales of uint8, one for 32",
        ),
        (
            "weight_scale",
            torch.zeros(48, 2, dtype=torch.float8_e4m3fn),
            ValueError,
            r"weight_scale: shape is \(48, 2\), must have 4 columns",
        ),
        (
            "weight",
            torch.zeros(48, 64, dtype=torch.bfloat16),
            TypeError,
            r"weight: dtype is torch.bfloat16, must be torch.uint8",
        ),
        (
            "weight",
            torch.zeros(40, 32, dtype=torch.uint8),
            ValueError,
            r"weight: shape is \(40, 32\), must fit the parameter \(48, 32\) of this rank",
        ),
        (
            "weight_scale_2",
            torch.ones((), dtype=torch.bfloat16),
            TypeError,
            r"weight_scale_2: dtype is torch.bfloat16, must be torch.float32",
        ),
    ],
    ids=["mxfp4", "columns", "bf16", "rows", "outer"],
)
def test_a_tensor_that_does_not_fit_is_named(
    vllm: types.SimpleNamespace, name: str, tensor: torch.Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=rf"m\.up_proj\.{text}"):
        serving.load(_linear(vllm), {name: tensor})


def test_scales_that_are_no_numbers_are_refused(vllm: types.SimpleNamespace) -> None:
    tensors = serving.stored(serving.weight(48, 64, 0), "modelopt")
    layer = _linear(vllm)
    serving.load(layer, {**tensors, "weight_scale_2": torch.tensor(-1.0)})
    with pytest.raises(ValueError, match=r"weight_scale_2: holds -1.0, must be finite and positive"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(("n", "k", "what"), [(48, 80, "k is 80"), (44, 64, "n is 44")])
def test_a_shard_that_no_kernel_reads_is_refused(
    vllm: types.SimpleNamespace, n: int, k: int, what: str
) -> None:
    with pytest.raises(ValueError, match=rf"m\.up_proj: {what} on this rank, must be a multiple of"):
        _linear(vllm, n=n, k=k)


def test_not_finite_weights_are_refused_while_they_are_quantized(vllm: types.SimpleNamespace) -> None:
    layer = vllm.layers.ColumnParallelLinear(
        64, 48, False, quant_config=vllm.table["fp4gemm"](), prefix="m.up_proj"
    )
    weight = torch.full((48, 64), float("nan"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"m\.up_proj\.weight: 3072 values are NaN or infinite"):
        layer.weight.weight_loader(layer.weight, weight)


def test_static_activations_are_refused_where_there_are_none(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", "static")
    with pytest.raises(ValueError, match=r"m\.q: activations is 'static', must be another for .* W4A16"):
        vllm.layers.ColumnParallelLinear(
            64, 48, quant_config=serving.config_of(vllm.table, "modelopt", "a16"), prefix="m.q"
        )
    with pytest.raises(ValueError, match=r"m\.experts: activations is 'static', must be another for experts"):
        vllm.layers.RoutedExperts(2, 64, 32, serving.config_of(vllm.table, "modelopt"), "m.experts")
    tensors = serving.stored(serving.weight(48, 64, 0), "modelopt")
    del tensors["input_scale"]
    layer = _linear(vllm)
    serving.load(layer, tensors)
    with pytest.raises(ValueError, match=r"m\.up_proj\.input_scale: is missing in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


def test_options_come_from_the_environment_and_from_vllm(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4gemm.integrations.serving.options import Options

    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "*.gate, lm_head")
    monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", "a16")
    assert Options.read() == Options(ignore=("*.gate", "lm_head"), activations="a16")
    vllm.config.additional_config["fp4gemm"] = {"activations": "per-token", "ignore": ["m.up*"]}
    config = serving.config_of(vllm.table, "modelopt")
    assert vllm.layers.LinearBase(64, 48, config, "m.up_proj").quant_method == "vLLM's method"
    assert config.report.text() == "fp4gemm: left to vLLM, the option ignore names it: m.up_proj"
    vllm.config.additional_config["fp4gemm"] = {"activation": "a16"}
    with pytest.raises(ValueError, match="got the option 'activation', must be enabled, activations,"):
        _linear(vllm)
    for name, value, text in (
        ("ACTIVATIONS", "fp6", "activations: got 'fp6', must be"),
        ("USE_FAST_ACCUM", "maybe", "FP4GEMM_SERVING_USE_FAST_ACCUM: is 'maybe', must be 1 or 0"),
        ("BATCH_INVARIANT", "maybe", "FP4GEMM_SERVING_BATCH_INVARIANT: is 'maybe', must be 1 or 0"),
    ):
        monkeypatch.setenv(f"FP4GEMM_SERVING_{name}", value)
        with pytest.raises(ValueError, match=text):
            Options.read()
        monkeypatch.delenv(f"FP4GEMM_SERVING_{name}")


def test_the_log_has_one_line_when_the_first_weights_are_processed(
    vllm: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """All layers exist then; layers that are made later, such as those of a draft model, have another."""
    config = serving.config_of(vllm.table, "modelopt", ignore=("lm_head",))
    layers = [
        vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix=f"m.{i}.up")
        for i in range(2)
    ]
    vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="lm_head")
    line = (
        "fp4gemm: W4A4, an amax for each token: 2 x m.*.up; left to vLLM, the checkpoint excludes it: lm_head"
    )
    with caplog.at_level(logging.INFO, "vllm.fp4gemm"):
        for layer in layers:
            serving.load(layer, serving.stored(serving.weight(48, 64, 0), "modelopt"))
        assert not caplog.messages
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
            assert caplog.messages == [line]
        draft = vllm.layers.LinearBase(64, 48, config, "lm_head")
        draft.quant_method.process_weights_after_loading(draft)
    assert caplog.messages == [line, line]


@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_the_log_has_its_line_where_every_layer_is_left(
    vllm: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    format: str,
) -> None:
    monkeypatch.setenv("FP4GEMM_SERVING_IGNORE", "m.*")
    config = serving.config_of(vllm.table, format, ignore=("lm_head",))
    names = ("m.0.up", "m.1.up", "lm_head")
    layers = [vllm.layers.LinearBase(64, 48, config, name) for name in names]
    with caplog.at_level(logging.INFO, "vllm.fp4gemm"):
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
    assert caplog.messages == [
        "fp4gemm: left to vLLM, the option ignore names it: 2 x m.*.up; "
        "left to vLLM, the checkpoint excludes it: lm_head"
    ]


def test_mixed_checkpoints_and_other_schemes_keep_vllms_methods(vllm: types.SimpleNamespace) -> None:
    mixed = vllm.table["modelopt_mixed"].from_config(
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m.a": {"quant_algo": "FP8"}}}
    )
    layer = vllm.layers.LinearBase(64, 48, mixed, "m.a")
    assert layer.quant_method == "vLLM's method"
    assert mixed.report.text() == "fp4gemm: left to vLLM, its weights are FP8: m.a"
    other = vllm.table["compressed-tensors"].from_config(
        {"config_groups": {"g": {"weights": {"strategy": "channel"}}}, "ignore": []}
    )
    assert vllm.layers.LinearBase(64, 48, other, "m.a").quant_method == "vLLM's method"
    assert other.report.text() == "fp4gemm: left to vLLM, its weights are not NVFP4: m.a"


def test_an_unquantized_checkpoint_keeps_routers_and_heads(vllm: types.SimpleNamespace) -> None:
    config = vllm.table["fp4gemm"]()
    for name in ("m.mlp.gate", "m.mlp.shared_expert_gate"):
        layer = vllm.layers.LinearBase(64, 48, config, name)
        assert isinstance(layer.quant_method, vllm.layers.UnquantizedLinearMethod)
    assert config.report.text() == (
        "fp4gemm: left to vLLM, it is a router: m.mlp.gate, m.mlp.shared_expert_gate"
    )


@pytest.mark.parametrize(
    ("kind", "capability", "text"),
    [
        ("rocm", None, "serves no layer: fp4gemm runs on cuda and cpu devices only, and this is rocm"),
        ("cuda", (7, 5), "kernel for cuda of compute capability 7.5"),
    ],
)
def test_without_a_kernel_the_plug_in_does_nothing_and_says_why(
    vllm: types.SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    capability: tuple[int, int] | None,
    text: str,
) -> None:
    vllm.table.clear()
    vllm.platform.device_type, vllm.platform.capability = kind, capability
    with caplog.at_level(logging.INFO, "vllm.fp4gemm"):
        vllm.register()
    assert not vllm.table
    assert text in caplog.messages[0]


def test_old_engines_and_a_disabled_plug_in_are_left_alone(
    vllm: types.SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.table.clear()
    vllm.module.__version__ = "0.31.2"
    with caplog.at_level(logging.INFO, "vllm.fp4gemm"):
        vllm.register()
        monkeypatch.setenv("FP4GEMM_SERVING_ENABLED", "0")
        vllm.register()
    assert not vllm.table
    assert caplog.messages == [
        "fp4gemm: vLLM 0.31.2 is installed, must be 0.32 or newer to be served",
        "fp4gemm: is disabled by FP4GEMM_SERVING_ENABLED=0",
    ]


def test_a_vllm_without_a_name_that_is_used_is_left_alone(
    vllm: types.SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends with the exceptions of its plug-ins, so that a newer one must not raise any."""
    vllm.table.clear()
    for name in list(sys.modules):
        if name.startswith("fp4gemm.integrations.vllm._") and not name.endswith(("_registry", "_process")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["vllm.model_executor.layers.fused_moe"], "RoutedExperts")
    vllm.module.__version__ = "9.9.0"
    with caplog.at_level(logging.INFO, "vllm.fp4gemm"):
        vllm.register()
    assert not vllm.table
    assert caplog.messages[0].startswith(
        "fp4gemm: serves no layer: vLLM 9.9.0 is not supported: cannot import name 'RoutedExperts'"
    )


def test_engines_cost_nothing_at_import() -> None:
    """import fp4gemm loads no engine, and of the integrations what quantize_model tells of models alone."""
    code = (
        "import sys, fp4gemm; print([n for n in sys.modules if n.startswith(('fp4gemm.integrations.', "
        "'vllm', 'sglang', 'transformers')) and not n.startswith('fp4gemm.integrations.transformers')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
