"""DDP, FSDP2 and its all-gather of quantized weights in two processes, connected by gloo on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data_parallel
import fp4gemm
import pytest
import torch
import torch.distributed as dist
from fp4gemm import training
from fp4gemm.training import _copies, cache, fsdp
from fp4gemm.training._gathered import transposed
from processes import assert_equal, in_two_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """The results of both processes."""
    return in_two_processes(data_parallel.run)


@pytest.mark.parametrize("recipe", data_parallel.REPLICATED)
def test_ddp_has_the_mean_of_the_gradients(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        assert_equal(results["ddp", recipe], ranks[0]["mean", recipe])


@pytest.mark.parametrize("recipe", data_parallel.REPLICATED)
def test_fsdp2_has_the_bits_of_replicas(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        assert_equal(results["fsdp", recipe], ranks[0]["by hand", recipe])


@pytest.mark.parametrize("recipe", data_parallel.GATHERED)
def test_a_quantized_gather_has_the_bits_of_fsdp2(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        assert_equal(results["gathered", recipe], ranks[0]["fsdp", recipe])


@pytest.mark.parametrize("recipe", data_parallel.MIXED)
def test_a_quantized_gather_in_mixed_precision(ranks: list[dict[Any, Any]], recipe: str) -> None:
    for results in ranks:
        assert_equal(results["mixed gathered", recipe], ranks[0]["mixed", recipe])


def test_a_quantized_gather_of_experts(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert_equal(results["experts gathered"], ranks[0]["experts"])


def test_the_gather_moves_half_a_byte_a_sixteenth_and_the_amaxes(ranks: list[dict[Any, Any]]) -> None:
    rows = data_parallel.HIDDEN // 2
    elems = rows * data_parallel.WIDTH
    for results in ranks:
        assert results["bytes"] == [elems // 2, elems // 16, 4 * rows]


def test_a_saved_shard_is_a_plain_tensor(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert_equal(results["saved"], results["shards"])
        assert {type(x) for x in results["saved"]} <= {Tensor, torch.nn.Parameter}


def test_another_recipe_that_the_codes_do_not_serve_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for results in ranks:
        assert results["refused"].startswith("NotImplementedError: recipe: w_t is cast from the original")


@pytest.mark.parametrize("reshard", [True, False])
def test_cached_weights_follow_the_optimizer(ranks: list[dict[Any, Any]], reshard: bool) -> None:
    for results in ranks:
        assert_equal(results["cached", reshard], ranks[0]["fsdp", "te_per_token"])


def test_ranks_round_differently(ranks: list[dict[Any, Any]]) -> None:
    """With the same batch and the same torch.manual_seed: only stochastic rounding tells the ranks apart."""
    assert torch.equal(ranks[0]["y"], ranks[1]["y"])
    assert not torch.equal(ranks[0]["dx"], ranks[1]["dx"])


# ---- what needs no second process


@pytest.mark.parametrize("recipe", ["per_token", "nvidia", "experts"])
def test_a_group_of_one_process(device: torch.device, recipe: str, tmp_path: Path) -> None:
    """FSDP2 on any device: its streams, and storages that it frees and allocates again, change no bit."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        x, results = data_parallel.batches(0)[0].to(device), []
        for is_gathered in (False, True):
            model = data_parallel.Experts() if recipe == "experts" else data_parallel.mlp(recipe)
            model = model.to(device)
            if is_gathered:
                training.quantize_all_gather(model)
            mesh = init_device_mesh(device.type, (1,))
            for module in [*model.children(), model]:
                fully_shard(module, mesh=mesh)
            torch.manual_seed(5)
            for _ in range(2):
                data_parallel.loss(model, x).backward()
            results.append([p.grad.full_tensor().cpu() for p in model.parameters()])
    finally:
        dist.destroy_process_group()
    assert_equal(*results)


@pytest.mark.parametrize("reshard", [False, True])
def test_loaded_weights_are_cast_anew(tmp_path: Path, monkeypatch: Any, reshard: bool) -> None:
    """FSDP2 loads the shards and gathers them into the old memory, with the old version counter."""
    monkeypatch.setattr(cache._STEPS, "are_marked", True)
    x, model = data_parallel.batches(0)[0], data_parallel.mlp("te_per_token")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for module in [*model.children(), model]:
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshard)
        found = []
        for _ in range(4):
            with torch.no_grad():
                found.append(model(x).clone())
            model.load_state_dict({name: -2 * p for name, p in model.state_dict().items()})
    finally:
        dist.destroy_process_group()
    want = data_parallel.mlp("te_per_token")
    for y in found:
        assert_equal([want(x).detach()], [y])
        want.load_state_dict({name: -2 * p for name, p in want.state_dict().items()})


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("te_per_token", "w_t is cast from the original weight, which the gathered codes do not hold"),
        ("bf16_backward", 'w_t is None, must be a Cast or "dequantized"'),
        ("bf16_forward", "w is None, must be a Cast"),
    ],
)
def test_recipes_that_need_the_weight_itself_are_refused(recipe: str, reason: str) -> None:
    model = data_parallel.mlp(recipe)
    with pytest.raises(NotImplementedError, match=f"recipe of '0': {reason}"):
        training.quantize_all_gather(model)
    assert type(model[0].weight) is torch.nn.Parameter


def test_a_stochastic_forward_copy_is_refused() -> None:
    model, cast = data_parallel.mlp("bf16"), training.Cast(stochastic=True)
    training.set_recipe(model, training.Recipe(x=training.Cast(), w=cast, w_t="dequantized"))
    with pytest.raises(NotImplementedError, match="w is rounded stochastically, must not be"):
        training.quantize_all_gather(model)


def test_models_without_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="model: has no layer with a recipe that quantizes"):
        training.quantize_all_gather(data_parallel.mlp("bf16"))
    with pytest.raises(TypeError, match=r"model: got 3 .*, must be a torch.nn.Module"):
        training.quantize_all_gather(3)  # type: ignore[arg-type]


def test_a_weight_that_another_module_reads_is_refused() -> None:
    """A new parameter would end the tie without a word."""
    model = data_parallel.mlp("nvidia")
    model.append(torch.nn.Embedding(96, 64))
    model[3].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight: is also a parameter of '3', which reads its values"):
        training.quantize_all_gather(model)
    assert model[3].weight is model[0].weight
    assert type(model[2].weight) is torch.nn.Parameter


@pytest.mark.parametrize(("recipe", "step"), [("per_token", 5), ("nvidia", 80)])
def test_shards_of_other_sizes_are_refused(recipe: str, step: int) -> None:
    model, mesh = data_parallel.mlp(recipe), SimpleNamespace(size=lambda: 5)
    with pytest.raises(ValueError, match=f"weight: has 96 rows, must be a multiple of {step}, .* by 5 ranks"):
        fsdp._local_parts(model[0].weight[:20].detach(), mesh, torch.Size((96, 64)), model[0], None)


def test_the_parameter_keeps_its_memory_and_trains_unsharded() -> None:
    plain, model = data_parallel.mlp("te_per_token"), data_parallel.mlp("row_scaled_dequantized")
    address = model[0].weight.data_ptr()
    assert training.quantize_all_gather(model) == ["0", "2"]
    assert model[0].weight.data_ptr() == address
    assert isinstance(model[0].weight, torch.nn.Parameter)
    training.set_recipe(model, "te_per_token")
    x = data_parallel.batches(0)[0]
    for each in (plain, model):
        data_parallel.loss(each, x).backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    copied = copy.deepcopy(model)
    assert type(copied[0].weight) is type(model[0].weight) is fsdp.ShardedWeight
    assert torch.equal(copied[0].weight, plain[0].weight)
    assert copied[0].weight.data_ptr() != address
    assert type(torch.zeros_like(model[0].weight)) is Tensor  # as the state of an optimizer is


@pytest.mark.parametrize("four_over_six", [None, "mae"])
@pytest.mark.parametrize("shape", [(96, 64), (2, 48, 64)], ids=["matrix", "stack"])
def test_blocks_of_16x16_are_transposed_from_the_codes(shape: tuple[int, ...], four_over_six: Any) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    cast = {"block": (16, 16), "scaling": "tensor", "four_over_six": four_over_six}
    got, want = transposed(fp4gemm.quantize(weight, **cast)), fp4gemm.quantize(weight, axis=0, **cast)
    assert got.e4m3_max == want.e4m3_max
    for a, b in ((got.codes, want.codes), (got.scales, want.scales), (got.amax, want.amax)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gathered(t: fp4gemm.NVFP4Tensor, dtype: torch.dtype) -> fsdp.GatheredWeight:
    scales = t.compact_scales().view(torch.uint8)
    made = fsdp.Made(t.e4m3_max, False, torch.Size(t.shape))
    return fsdp.GatheredWeight(t.codes, scales, t.amax, made, dtype)


def test_an_amax_over_all_ranks_has_the_bits_of_a_measured_one() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    cast = training.Cast(scaling="tensor")
    recipe = training.Recipe(x=training.Cast(), w=cast, w_t="dequantized")
    got, want = (_copies.weight_rows(weight, recipe, a) for a in (weight.abs().amax().view(1), None))
    assert_equal([got.codes, got.compact_scales().float(), got.amax],
                 [want.codes, want.compact_scales().float(), want.amax])  # fmt: skip


def test_a_gathered_weight_is_rounded_by_the_state_of_the_layer() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    w_t = training.Cast(source="rowwise", stochastic=True)
    recipe = training.Recipe(x=training.Cast(), w=training.Cast(), dy=training.Cast(), w_t=w_t)
    state = torch.tensor([7, 123])
    want = _copies.weight_copies(weight, recipe, state, True, True)
    got = _copies.weight_copies(gathered(fp4gemm.quantize(weight), weight.dtype), recipe, state, True, True)
    for parts, wanted in zip(got, want, strict=True):
        assert_equal([t.float() for t in parts], [t.float() for t in wanted])


def test_a_gathered_weight_refuses_other_functions() -> None:
    t = fp4gemm.quantize(torch.randn(32, 64))
    weight = gathered(t, torch.bfloat16)
    assert torch.equal(weight.quantized().dequantize(), t.dequantize(torch.bfloat16))
    assert repr(weight) == "GatheredWeight(shape=(32, 64), dtype=torch.bfloat16, device='cpu')"
    with pytest.raises(NotImplementedError, match=r"mm.*: got a weight that FSDP2 gathered in NVFP4"):
        torch.mm(weight, torch.zeros(64, 1, dtype=torch.bfloat16))
