"""Layers and models of Megatron-Core by a recipe, in two processes that are connected by gloo on the CPU.

megatron-core is in requirements/test.txt: its wheel has 2.6 MB and needs numpy, packaging and torch alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest.mock
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp4gemm import training
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import megatron_training
from fp4gemm.integrations import megatron
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron_training import LAYOUTS
from processes import assert_equal, in_two_processes

ROW_SCALED = ("te_per_token", "original", "rowwise", "dequantized", "forward alone", "bf16")
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["all tokens", "sequence"])


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of both processes."""
    return in_two_processes(megatron_training.run)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.any(), name
        assert torch.equal(value, right[name]), name


# ---- layers


@SEQUENCE
@pytest.mark.parametrize("recipe", ROW_SCALED)
def test_column_parallel_layers_have_the_bits_of_one_process(
    ranks: list[dict[Any, Any]], recipe: str, sequence: bool
) -> None:
    """y, dW and the gradient of the bias are those of one process; dx is the sum of two gradients."""
    for results in ranks:
        assert_equal(*results["column", recipe, sequence])


@SEQUENCE
@pytest.mark.parametrize("recipe", ROW_SCALED)
def test_row_parallel_layers_are_sums_of_the_ranks_products(
    ranks: list[dict[Any, Any]], recipe: str, sequence: bool
) -> None:
    for results in ranks:
        assert_equal(*results["row", recipe, sequence])


def test_frozen_weights_change_no_gradient_of_the_input(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        for trained, frozen in results["frozen"]:
            assert_equal([trained], [frozen])


# ---- models


def test_a_recipe_that_quantizes_nothing_is_megatron(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        own, theirs = (results["trained", "tp 1", name] for name in ("bf16", "megatron"))
        assert_equal([own["losses"]], [theirs["losses"]])
        assert_same(own["first"], theirs["first"])
        assert_same(own["last"], theirs["last"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_layer_norms_are_those_of_megatron(ranks: list[dict[Any, Any]], layout: str) -> None:
    """Megatron-Core's own norms refuse sequence parallelism, and add up gradients in another order there."""
    for results in ranks:
        own = results["biases", layout, "bf16"]
        theirs = results["biases", layout.removesuffix(", sequence"), "megatron"]
        assert torch.equal(own["losses"], theirs["losses"])
        assert any(name.endswith("linear_proj.bias") for name in own["first"])
        for name, gradient in theirs["first"].items():
            got = own["first"][name]
            if "sequence" in layout and ("layernorm" in name or name.endswith("bias")):
                torch.testing.assert_close(got, gradient, rtol=0.02, atol=0.01 * gradient.abs().max())
            else:
                assert torch.equal(got, gradient), name


@pytest.mark.parametrize("recipe", ["te_per_token", "nvidia", "per_token"])
def test_layouts_train_alike(ranks: list[dict[Any, Any]], recipe: str) -> None:
    """Losses fall. A row-parallel layer has amaxes of the rank's features, and rounds no worse for it."""
    plain, alone = (ranks[0]["trained", "tp 1", name] for name in ("bf16", recipe))
    for results in ranks:
        for layout in LAYOUTS:
            found = results["trained", layout, recipe]
            assert found["losses"].diff().max() < -0.3
            torch.testing.assert_close(found["losses"], alone["losses"], rtol=0.01, atol=0)
            for name, exact in plain["first"].items():
                errors = [(run["first"][name] - exact).norm() / exact.norm() for run in (found, alone)]
                assert errors[0] < 1.6 * errors[1] < 0.6, name


@pytest.mark.parametrize("recipe", ["te_per_token", "nvidia", "per_token"])
def test_sequence_parallelism_changes_no_bit_of_a_linear_layer(
    ranks: list[dict[Any, Any]], recipe: str
) -> None:
    """Sums over two ranks have one order. The gradient of a norm is a sum over tokens, in another order."""
    for results in ranks:
        tokens, all_tokens = (results["trained", f"tp 2{which}", recipe] for which in (", sequence", ""))
        assert torch.equal(tokens["losses"][0], all_tokens["losses"][0])
        for name, gradient in all_tokens["first"].items():
            got = tokens["first"][name]
            if "layernorm" in name:
                assert (got - gradient).abs().max() < 0.01 * gradient.abs().max(), name
            else:
                assert torch.equal(got, gradient), name


# ---- main_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grad_has_the_sum_of_float32_gradients(ranks: list[dict[Any, Any]], layout: str) -> None:
    """Of float32 weights and two micro-batches the sums by the layers and by Megatron-Core are the same."""
    for results in ranks:
        own, megatrons = (results["accumulated", layout, "float32", fused] for fused in (True, False))
        assert all(own["added"].values())
        assert not any(megatrons["added"].values())
        assert len(own["added"]) == 8
        assert_same(own["grads"], megatrons["grads"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grad_is_not_rounded_to_bfloat16(ranks: list[dict[Any, Any]], layout: str) -> None:
    """The layers' sums, rounded, are the gradients that Megatron-Core adds without the fusion."""
    for results in ranks:
        own, megatrons = (results["accumulated", layout, "bfloat16", fused] for fused in (True, False))
        for name in own["added"]:
            got, want = (found["grads"][f"{name}.weight"] for found in (own, megatrons))
            assert not torch.equal(got, got.bfloat16().float())
            assert torch.equal(got.bfloat16().float(), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions_that_overlap_see_main_grad(ranks: list[dict[Any, Any]], layout: str) -> None:
    """The hooks of Megatron-Core run, although autograd sees a gradient of zero."""
    for results in ranks:
        overlapped = results["accumulated", layout, "overlap"]
        assert_same(overlapped["grads"], results["accumulated", layout, "float32", True]["grads"])


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
def test_copies_that_are_kept_for_a_step_change_no_bit(ranks: list[dict[Any, Any]], is_grouped: bool) -> None:
    """Parameters are written behind the step of the optimizer, through .data."""
    for results in ranks:
        assert_same(*(results["cached", is_grouped, is_attached] for is_attached in (True, False)))


# ---- experts


@pytest.mark.parametrize("prefix", ["", "sharded, "], ids=["divided", "sharded"])
def test_grouped_experts_have_the_bits_of_single_ones(ranks: list[dict[Any, Any]], prefix: str) -> None:
    """With half of the experts on each rank, or half of each expert."""
    for results in ranks:
        grouped, sequential = (results["experts", f"{prefix}{name}"] for name in ("grouped", "sequential"))
        assert torch.equal(grouped["loss"], sequential["loss"])
        assert_same(grouped["grads"], sequential["grads"])
        assert grouped["shards"] == sequential["shards"]


def test_grouped_experts_in_bf16_are_those_of_megatron(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        own, megatrons = (results["experts", name] for name in ("bf16", "megatron"))
        torch.testing.assert_close(own["loss"], megatrons["loss"])
        for name, gradient in megatrons["grads"].items():
            torch.testing.assert_close(own["grads"][name], gradient)


def test_main_grad_of_grouped_experts(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        fused, plain = (results["experts", name]["grads"] for name in ("fused", "grouped"))
        found = [name for name in plain if "local_experts" in name]
        assert len(found) == 2 * 2 * 2
        for name in found:
            assert torch.equal(fused[name].bfloat16().float(), plain[name]), name


def test_names_and_shards_of_experts(ranks: list[dict[Any, Any]]) -> None:
    """The names are those of TEGroupedMLP, and a distributed checkpoint sees Megatron-Core's own experts."""
    for results in ranks:
        names = results["experts", "grouped"]["names"]
        assert [n for n in names if n.startswith("decoder.layers.1.mlp.experts.")] == [
            f"decoder.layers.1.mlp.experts.linear_{which}.weight{e}"
            for which in ("fc1", "fc2")
            for e in (0, 1)
        ]
        shards = results["experts", "megatron"]["shards"]
        assert any("experts.linear_fc1._extra_state" in key for key in shards)
        assert results["experts", "grouped"]["shards"] == shards
        assert results["experts", "sequential"]["shards"] == shards


# ---- checkpoints and weight updates


def test_names_and_shards_are_those_of_megatron(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        theirs, own, inside = results["checkpoint", "names"]
        assert own == theirs
        assert sorted(inside) == sorted(map(megatron_training.normed, theirs))
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in inside
        theirs, own = results["checkpoint", "state"]
        assert own == theirs
        theirs, own, inside = results["checkpoint", "shards"]
        assert own == theirs
        assert inside == theirs


@pytest.mark.parametrize("way", ["loaded", "loaded back"])
def test_a_state_dict_loads_both_ways(ranks: list[dict[Any, Any]], way: str) -> None:
    for results in ranks:
        assert_same(*results["checkpoint", way])


@pytest.mark.parametrize("into", ["theirs", "own", "norms inside"])
def test_a_distributed_checkpoint_loads_into_every_spec(ranks: list[dict[Any, Any]], into: str) -> None:
    for results in ranks:
        assert_same(results["checkpoint", ("saved", into)], results["checkpoint", "loaded back"][0])


def test_a_norm_inside_of_a_layer_changes_no_bit(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        inside, outside = results["checkpoint", "norms inside"]
        assert torch.equal(inside, outside)


def test_a_served_layer_gets_the_trained_weight(ranks: list[dict[Any, Any]]) -> None:
    """With method="round" and a recipe of rows its product has the bits of the training's."""
    for results in ranks:
        trained, served = results["served"]
        assert torch.equal(trained, served)


def test_an_engine_gets_the_forward_copies_of_trained_layers(ranks: list[dict[Any, Any]]) -> None:
    """quantize_named with method="round" makes what ranks of column-parallel layers make of their rows."""
    for results in ranks:
        assert len(results["exported"]) == 2 * 5
        for name, tensors in results["exported"].items():
            assert len(tensors) == 6, name
            assert_equal(tensors[:3], tensors[3:])


# ---- examples/megatron_gpt.py


@pytest.mark.parametrize("recipe", ["bf16", "nvidia", "per_token"])
def test_the_example_takes_a_step(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        found = results["example", recipe]
        torch.testing.assert_close(found["loss"], results["example", "bf16"]["loss"], rtol=0.01, atol=0)
        layers_of_a_block = ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]
        added = sorted(name.split(".")[-2] for name in found["added"])
        assert added == ([] if recipe == "bf16" else layers_of_a_block)


def test_the_example_with_experts_takes_a_step(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        found = results["example", "experts"]
        assert 3 < found["loss"] < 7
        assert sum("mlp.experts.linear_fc" in name for name in found["added"]) >= 2


# ---- specs and refusals, in this process


@pytest.fixture
def here() -> Iterator[Any]:
    """A config for layers that are made in this process, without process groups."""
    with megatron_training.on_cpu():
        yield megatron_training.config()


def layer(config: Any, kind: Any = None, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": False,
        "gather_output": False,
        "skip_bias_add": False,
        "is_expert": False,
    }
    return (kind or megatron.ColumnParallelLinear)(64, 128, **{**options, **changes})


def modules(spec: Any, found: dict[str, Any] | None = None, path: str = "") -> dict[str, Any]:
    """Every class in a spec by its path, and its parameters."""
    found = {} if found is None else found
    if hasattr(spec, "module"):
        found[path] = (spec.module, spec.params)
        modules(spec.submodules, found, path)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            modules(getattr(spec, field.name), found, f"{path}.{field.name}".lstrip("."))
    elif isinstance(spec, list):
        for index, each in enumerate(spec):
            modules(each, found, f"{path}.{index}")
    elif isinstance(spec, functools.partial):
        found[path] = (spec.func, {})
        modules(spec.keywords.get("submodules"), found, path)
    elif isinstance(spec, (type, unittest.mock.Mock)):
        found[path] = (spec, {})
    return found


def test_the_layers_of_transformer_engine_are_replaced(here: Any) -> None:
    given = megatron_training.te_spec(here)
    before = modules(given)
    after = modules(megatron.convert_spec(given, "nvidia"))
    assert modules(given) == before
    assert before.keys() == after.keys()
    qkv, proj, fc1, fc2 = (
        f"layer_specs.1.{name}"
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    )
    for path in (qkv, fc1):
        assert after[path][0] is megatron.LayerNormColumnParallelLinear
    for path in (proj, fc2):
        assert after[path][0] is megatron.RowParallelLinear
    assert all(after[path][1]["recipe"] is training.PRESETS["nvidia"] for path in (qkv, proj, fc1, fc2))
    assert after["layer_norm"][0] is megatron.Norm
    others = {path for path in before if before[path] == after[path]}
    assert {"layer_specs.0", "layer_specs.0.self_attention", "layer_specs.0.mlp"} <= others


def test_a_recipe_for_each_path(here: Any) -> None:
    def chosen(path: str) -> str | None:
        if "layer_specs.1" in path:
            return None
        return "nvidia" if path.endswith("linear_qkv") else "per_token"

    after = modules(megatron.convert_spec(megatron_training.local_spec(here), chosen))
    recipes = {path: params.get("recipe") for path, (_, params) in after.items()}
    assert recipes["layer_specs.0.self_attention.linear_qkv"] is training.PRESETS["nvidia"]
    assert recipes["layer_specs.0.mlp.linear_fc2"] is training.PRESETS["per_token"]
    assert after["layer_specs.1.mlp.linear_fc2"][0] is layers.RowParallelLinear


def test_layers_of_fixed_classes_are_named(here: Any) -> None:
    """Megatron-Core accepts its own classes alone for the down projections of latent attention."""
    given = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    with pytest.warns(UserWarning, match=r"convert_spec: left .*linear_q_down_proj.*linear_kv_down_proj"):
        after = modules(megatron.convert_spec(given))
    assert after["self_attention.linear_kv_down_proj"][0] is layers.ColumnParallelLinear
    assert after["self_attention.linear_kv_up_proj"][0] is megatron.ColumnParallelLinear


def test_grouped_layers_of_transformer_engine_are_replaced(
    here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their classes exist with TransformerEngine alone."""
    column, row = type("Column", (), {}), type("Row", (), {})
    monkeypatch.setattr(te, "TEColumnParallelGroupedLinear", column)
    monkeypatch.setattr(te, "TERowParallelGroupedLinear", row)
    kind = getattr(experts, "GroupedMLPSubmodules", experts.MLPSubmodules)
    given = ModuleSpec(module=experts.TEGroupedMLP, submodules=kind(linear_fc1=column, linear_fc2=row))
    after = modules(megatron.convert_spec(given, fuse_main_grad=True))
    assert after["linear_fc1"][0] is megatron.ColumnParallelGroupedLinear
    assert after["linear_fc2"][0] is megatron.RowParallelGroupedLinear
    assert after["linear_fc2"][1] == {"recipe": training.PRESETS["per_token"], "fuse_main_grad": True}


def test_specs_that_cannot_be_converted_are_refused(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="spec: has no linear layer of Megatron-Core or TransformerEngine"):
        megatron.convert_spec(ModuleSpec(module=torch.nn.Linear))
    with pytest.raises(ValueError, match="recipe: got 'fp4', must be "):
        megatron.convert_spec(megatron_training.local_spec(here), "fp4")
    for name in ("grouped_experts", "fuse_main_grad"):
        with pytest.raises(TypeError, match=rf"{name}: got 1 \(int\), must be True or False"):
            megatron.convert_spec(megatron_training.local_spec(here), **{name: 1})
    fused = type("TEFusedMLP", (), {})
    monkeypatch.setattr(te, "TEFusedMLP", fused, raising=False)
    submodules = experts.MLPSubmodules(linear_fc1=layers.ColumnParallelLinear, linear_fc2=None)
    with pytest.raises(NotImplementedError, match="spec: mlp is a TEFusedMLP, must be a module that calls"):
        megatron.convert_spec(TransformerLayerSubmodules(mlp=ModuleSpec(module=fused, submodules=submodules)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("delay_wgrad_compute", True),
        ("tp_comm_overlap", True),
        ("symmetric_ar_type", "one_shot"),
        ("cpu_offloading", True),
        ("defer_embedding_wgrad_compute", True),
        ("use_transformer_engine_op_fuser", True),
        ("use_kitchen", True),
    ],
)
def test_options_that_are_not_followed_are_refused(here: Any, name: str, value: Any) -> None:
    setattr(here, name, value)
    wanted = rf"config\.{name}: got {value!r}, must be (None|False); "
    with pytest.raises(NotImplementedError, match=wanted):
        layer(here)
    with pytest.raises(NotImplementedError, match=wanted):
        layer(here, megatron.RowParallelLinear, input_is_parallel=True)
    with pytest.raises(NotImplementedError, match=wanted):
        grouped(here)


def grouped(config: Any, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": True,
        "skip_bias_add": True,
        "is_expert": True,
        "pg_collection": SimpleNamespace(expt_tp=None, ep=None, expt_dp=None),
    }
    return megatron.RowParallelGroupedLinear(2, 64, 128, **{**options, **changes})


def narrow(input_size: int, output_size: int, *_: int, **options: Any) -> Any:
    return megatron.ColumnParallelLinear(input_size, output_size, **options)


def test_wrong_arguments_of_layers_are_named(here: Any) -> None:
    with pytest.raises(ValueError, match="output_size: the size on each rank is 24, must be a positive"):
        layer(here, functools.partial(narrow, 64, 24))
    with pytest.raises(ValueError, match="input_size: the size on each rank is 48, must be a positive"):
        layer(here, functools.partial(narrow, 48, 32))
    with pytest.raises(ValueError, match="recipe: got 'fp4', must be "):
        layer(here, recipe="fp4")
    with pytest.raises(TypeError, match=r"fuse_main_grad: got 'yes' \(str\), must be True or False"):
        layer(here, fuse_main_grad="yes")
    here.normalization = "L2Norm"
    with pytest.raises(NotImplementedError, match=r"config\.normalization: got 'L2Norm', must be 'LayerN"):
        layer(here, megatron.LayerNormColumnParallelLinear)
    with pytest.raises(ValueError, match="is_expert: got False, must be True"):
        grouped(here, is_expert=False)
    with pytest.raises(ValueError, match=r"m_splits: got 2 numbers with the sum 5, must be 2 with the sum 7"):
        grouped(here)(torch.ones(7, 64, dtype=torch.bfloat16), [2, 3])


def test_weights_of_megatron_fsdp_are_refused_with_the_fusion(here: Any) -> None:
    """Their main_grad exists in the backward pass alone."""
    x, wanted = (
        torch.ones(3, 1, 64, dtype=torch.bfloat16),
        "gradient_accumulation_fusion: is True with a weight",
    )
    for is_fused in (False, True):
        dense, of_experts = layer(here, fuse_main_grad=is_fused), grouped(here, fuse_main_grad=is_fused)
        for weight in (dense.weight, of_experts.weight0):
            weight.__fsdp_param__ = True
        for call in (lambda dense=dense: dense(x), lambda e=of_experts: e(x.flatten(0, 1), [1, 2])):
            with pytest.raises(NotImplementedError, match=wanted) if is_fused else contextlib.nullcontext():
                call()


def test_biases_of_grouped_layers(here: Any) -> None:
    """They are added to the product, or returned to the caller."""
    returned, added = grouped(here), grouped(here, skip_bias_add=False)
    with torch.no_grad():
        for bias in (returned.bias0, returned.bias1):
            bias.normal_()
    added.load_state_dict(returned.state_dict())
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    y, biases = returned(x, [3, 4])
    assert [b is own for b, own in zip(biases, (returned.bias0, returned.bias1), strict=True)] == [True] * 2
    z, none = added(x, torch.tensor([3, 4]))
    assert none is None
    rows = torch.repeat_interleave(torch.stack(biases), torch.tensor([3, 4]), 0)
    torch.testing.assert_close(z, y + rows, rtol=0.01, atol=0.01)
    assert not torch.equal(z, y)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("is_centered", [False, True], ids=["around one", "around zero"])
def test_norms(here: Any, norm: str, is_centered: bool) -> None:
    here.normalization, here.layernorm_zero_centered_gamma = norm, is_centered
    module = megatron.Norm(here, 64)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    function = getattr(torch.nn.functional, {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[norm])
    torch.testing.assert_close(module(x), function(x, (64,), eps=1e-5), rtol=0.01, atol=0.01)
    assert module(x).dtype == torch.bfloat16
    assert (module.bias is not None) == (norm == "LayerNorm")
    assert all(not p.sequence_parallel for p in module.parameters())


def test_a_config_without_a_cache(here: Any) -> None:
    assert layer(here).cache is not None
    here.disable_parameter_transpose_cache = True
    assert layer(here).cache is None
    assert grouped(here).cache is None


@pytest.mark.parametrize("is_initialized", [True, False], ids=["initialized", "left"])
def test_parameters_are_initialized_by_the_config(here: Any, is_initialized: bool) -> None:
    here.perform_initialization, here.params_dtype = is_initialized, torch.float16
    calls: list[tuple[int, ...]] = []

    def init(weight: Tensor) -> None:
        calls.append(tuple(weight.shape))
        torch.nn.init.constant_(weight, 0.25)

    dense = layer(here, init_method=init, bias=True, skip_bias_add=True)
    of_experts = grouped(here, init_method=init)
    assert calls == ([(128, 64)] * 3 if is_initialized else [])
    for weight in (dense.weight, of_experts.weight0, of_experts.weight1):
        assert weight.dtype == torch.float16
        assert weight.allreduce
        assert not is_initialized or (weight == 0.25).all()
    _, bias = dense(torch.zeros(2, 1, 64, dtype=torch.float16))
    assert bias is dense.bias


def test_statistics_of_layers(here: Any) -> None:
    """Of layers that no rank shares."""
    normed = layer(here, megatron.LayerNormColumnParallelLinear)
    assert list(training.record_statistics(normed).read()) == [""]  # none of the norm's weight
    model = torch.nn.ModuleDict({"dense": layer(here), "experts": grouped(here)})
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with training.record_statistics(model, ["x", "w", "dy_t"]) as recorder:
        y, _ = model["dense"](x.unsqueeze(1))
        z, _ = model["experts"](x, [8, 24])
        (y.float().square().sum() + z.float().square().sum()).backward()
    found = recorder.read()
    assert found["dense"]["x"].elements == found["experts"]["x"].elements == 32 * 64
    assert found["experts"]["w"].elements == 2 * 128 * 64
    assert found.keys() == {"dense", "experts"}
    assert all(10 < of.sqnr < 40 for name in ("dense", "experts") for of in found[name].values())


def test_recipes_are_assigned_to_layers_of_a_model(here: Any) -> None:
    model = torch.nn.ModuleDict({"a": layer(here), "b": grouped(here)})
    assert training.set_recipe(model, lambda name: "bf16" if name == "a" else "nvidia") == ["a", "b"]
    assert model["a"].recipe.is_plain
    assert "recipe='nvidia'" in repr(model["b"])
