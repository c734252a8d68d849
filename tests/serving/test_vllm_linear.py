"""The linear method of the plug-in of vLLM: weights loaded shard by shard, and the bits of their products."""

from __future__ import annotations

import types

import fp4gemm
import pytest
import serving
import torch
import vllm_stub

M = (1, 7)  # tokens: decode and prefill


def _x(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.mark.parametrize("activations", serving.ACTIVATIONS)
@pytest.mark.parametrize("bound", [448, 256])
@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_a_layer_has_the_bits_of_nn_linear(
    vllm: types.SimpleNamespace, format: str, bound: int, activations: str
) -> None:
    w = serving.weight(48, 64, 0, bound=bound)
    config = serving.config_of(vllm.table, format, activations, e4m3_max=bound)
    layer = vllm.layers.ColumnParallelLinear(64, 48, quant_config=config, prefix="m.up_proj")
    tensors = serving.stored(w, format)
    if activations in ("a16", "fp8"):
        tensors = serving.without_input_scale(tensors)
    serving.load(layer, tensors)
    layer.bias.data = torch.randn(48).bfloat16()
    layer.quant_method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters()} == {
        "weight",
        "weight_scale",
        "weight_amax",
        "weight_bias",
        "bias",
    }
    for m in M:
        x = _x(m, 64)
        assert torch.equal(layer(x), serving.product(x, w, layer.bias.data, activations))
    assert torch.equal(layer.quant_method.apply(layer, x), serving.product(x, w, None, activations))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("format", serving.FORMATS_OF_OTHERS)
def test_fused_layers_with_unequal_outer_scales_are_exact(
    vllm: types.SimpleNamespace, format: str, rank: int
) -> None:
    """q, k and v on two ranks: each row has the bits of its own layer, though vLLM has one scale for all."""
    vllm_stub._RANK.update(rank=rank, size=2)
    parts = {
        "q": serving.weight(64, 64, 1),
        "k": serving.weight(32, 64, 2, 3.7),
        "v": serving.weight(32, 64, 3, 0.1),
    }
    assert len({float(w.amax) for w in parts.values()}) == 3
    config = serving.config_of(vllm.table, format)
    layer = vllm.layers.QKVParallelLinear(64, 16, 4, 2, False, quant_config=config, prefix="m.qkv_proj")
    for shard, w in parts.items():
        serving.load(layer, serving.stored(w, format), shard)
    layer.quant_method.process_weights_after_loading(layer)
    for m in M:
        x = _x(m, 64)
        whole = [serving.product(x, w).chunk(2, -1)[rank] for w in parts.values()]
        assert torch.equal(layer(x), torch.cat(whole, -1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_parallel_layer_holds_columns(vllm: types.SimpleNamespace, rank: int) -> None:
    vllm_stub._RANK.update(rank=rank, size=2)
    w = serving.weight(48, 128, 4)
    config = serving.config_of(vllm.table, "modelopt")
    layer = vllm.layers.RowParallelLinear(128, 48, False, quant_config=config, prefix="m.down_proj")
    serving.load(layer, serving.stored(w, "modelopt"))
    layer.quant_method.process_weights_after_loading(layer)
    x = _x(7, 64)
    assert torch.equal(layer(x), serving.product(x, serving.shard(w, 1, rank)))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_amax_for_each_row_is_sharded_with_the_rows(vllm: types.SimpleNamespace, rank: int) -> None:
    """The fp4gemm format with scaling "row", gate and up on two ranks."""
    vllm_stub._RANK.update(rank=rank, size=2)
    halves = [fp4gemm.quantize(torch.randn(32, 64).bfloat16()) for _ in range(2)]
    config = serving.config_of(vllm.table, "fp4gemm", scaling="row")
    layer = vllm.layers.MergedColumnParallelLinear(
        64, [32, 32], False, quant_config=config, prefix="m.gate_up_proj"
    )
    for i, w in enumerate(halves):
        serving.load(layer, serving.stored(w, "fp4gemm"), i)
    layer.quant_method.process_weights_after_loading(layer)
    x = _x(7, 64)
    wanted = torch.cat([serving.product(x, w).chunk(2, -1)[rank] for w in halves], -1)
    assert torch.equal(layer(x), wanted)


def test_a_static_scale_is_kept_on_request(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of those of the fused layers; without the option the checkpoint's number has no effect."""
    parts = [serving.weight(32, 64, 5), serving.weight(32, 64, 6)]
    x = _x(7, 64)
    made = {}
    for activations in ("checkpoint", "static"):
        monkeypatch.setenv("FP4GEMM_SERVING_ACTIVATIONS", activations)
        config = serving.config_of(vllm.table, "modelopt", "static")
        layer = vllm.layers.MergedColumnParallelLinear(
            64, [32, 32], False, quant_config=config, prefix="m.gate_up_proj"
        )
        for i, w in enumerate(parts):
            serving.load(layer, serving.stored(w, "modelopt", 2.0 + i), i)
        layer.quant_method.process_weights_after_loading(layer)
        made[activations] = layer(x)
    q = fp4gemm.quantize(x, scaling="tensor", amax=torch.tensor([3.0]))
    wanted = [fp4gemm.mm(q, w, out_dtype=torch.bfloat16) for w in parts]
    assert torch.equal(made["static"], torch.cat(wanted, -1))
    assert torch.equal(made["checkpoint"], torch.cat([serving.product(x, w) for w in parts], -1))


def test_weights_are_updated_in_place(vllm: types.SimpleNamespace) -> None:
    """What vLLM's reload does: the parameters of the checkpoint again, then copies into the old memory."""
    config = serving.config_of(vllm.table, "modelopt")

    def loaded(seed: int) -> torch.nn.Module:
        layer = vllm.layers.ColumnParallelLinear(64, 48, quant_config=config, prefix="m.up_proj")
        serving.load(layer, serving.stored(serving.weight(48, 64, seed, 1 + seed), "modelopt"))
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    layer, other = loaded(0), loaded(1)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(other, name))
    x = _x(7, 64)
    assert torch.equal(layer(x), serving.product(x, serving.weight(48, 64, 1, 2)))


def test_bf16_weights_are_quantized_when_the_last_shard_is_loaded(vllm: types.SimpleNamespace) -> None:
    """--quantization fp4gemm: no memory before; afterwards the bits of nn.Linear.from_float."""
    config = vllm.table["fp4gemm"]()
    layer = vllm.layers.MergedColumnParallelLinear(
        64, [32, 16], False, quant_config=config, prefix="m.gate_up_proj"
    )
    assert layer.weight.is_meta
    floats = [torch.randn(n, 64).bfloat16() for n in (32, 16)]
    for i, w in enumerate(floats):
        layer.weight.weight_loader(layer.weight, w, i)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.dtype is torch.uint8
    x, float_layer = _x(7, 64), torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    float_layer.weight.data = torch.cat(floats)
    wanted = fp4gemm.nn.Linear.from_float(float_layer, method="four-over-six")
    assert torch.equal(layer(x), wanted(x))


def test_a_layer_compiles_to_one_operator(vllm: types.SimpleNamespace) -> None:
    """torch.compile with fullgraph, for any number of tokens, has the same bits."""
    w = serving.weight(48, 64, 0)
    layer = vllm.layers.ColumnParallelLinear(
        64, 48, quant_config=serving.config_of(vllm.table, "modelopt"), prefix="m.up_proj"
    )
    serving.load(layer, serving.stored(w, "modelopt"))
    layer.quant_method.process_weights_after_loading(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 7):
        assert torch.equal(compiled(_x(m, 64)), layer(_x(m, 64)))


@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_scales_of_activations_in_a_w4a16_checkpoint_have_no_effect(
    vllm: types.SimpleNamespace, format: str
) -> None:
    """ModelOpt wrote such checkpoints; vLLM's own method drops the scale with a warning."""
    config = serving.config_of(vllm.table, format, "a16")
    layer = vllm.layers.MergedColumnParallelLinear(
        64, [32, 32], False, quant_config=config, prefix="m.gate_up_proj"
    )
    experts = vllm.layers.RoutedExperts(1, 64, 32, config, "m.experts")
    w, down = serving.weight(32, 64, 0), serving.weight(64, 32, 1)
    gate_up, second = serving.stored(w, format, 3.0), serving.stored(down, format, 5.0)
    assert any(name.startswith("input") for name in gate_up)
    for i in range(2):
        serving.load(layer, gate_up, i)
    serving.load_expert(experts, 0, {"w1": gate_up, "w3": gate_up, "w2": second}, return_success=True)
    for each in (layer, experts):
        each.quant_method.process_weights_after_loading(each)
        assert not any("input" in name for name, _ in each.named_parameters())
    x = _x(7, 64)
    assert torch.equal(layer(x), serving.product(x, fp4gemm.concat([w, w]), None, "a16"))
    found = experts.quant_method.apply(experts, x, torch.ones(7, 1), torch.zeros(7, 1, dtype=torch.int32))
    stacks = fp4gemm.stack([fp4gemm.concat([w, w])]), fp4gemm.stack([down])
    wanted = fp4gemm.nn.Experts.from_quantized(*stacks, activations="a16")
    assert torch.equal(found, wanted(x, torch.zeros(7, 1, dtype=torch.int32), torch.ones(7, 1)))


@pytest.mark.parametrize("activations", [*serving.ACTIVATIONS, "static"])
@pytest.mark.parametrize("format", [*serving.FORMATS_OF_OTHERS, "fp4gemm"])
def test_a_layer_has_as_many_elements_as_the_checkpoint(
    vllm: types.SimpleNamespace, format: str, activations: str
) -> None:
    """vLLM's reload keeps all tensors of a layer until as many elements have come as its parameters have."""
    config = serving.config_of(vllm.table, format, activations)
    linear = vllm.layers.ColumnParallelLinear(64, 48, False, quant_config=config, prefix="m.up_proj")
    experts = vllm.layers.RoutedExperts(2, 64, 64, config, "m.experts")

    def stored(n: int, k: int) -> dict[str, torch.Tensor]:
        tensors = serving.stored(serving.weight(n, k, 0), format, 1.0 if activations == "static" else None)
        return serving.without_input_scale(tensors) if activations in ("a16", "fp8") else tensors

    def elements(*weights: dict[str, torch.Tensor]) -> int:
        return sum(tensor.numel() for tensors in weights for tensor in tensors.values())

    gate, down = stored(64, 64), stored(64, 64)
    assert sum(p.numel() for p in linear.parameters()) == elements(stored(48, 64))
    assert sum(p.numel() for p in experts.parameters()) == elements(gate, gate, down) * 2
