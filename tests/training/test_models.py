"""A converted Llama of transformers: every recipe trains it, and runs resume to the bit."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from fp4gemm import training
from fp4gemm.training import cache as cache_module
from training_cases import RECIPES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.arange(64).view(2, 32) * 7 % 61


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def converted(recipe: Any) -> Any:
    model = llama()
    report = training.convert_model(model, recipe)
    assert len(report.names("converted")) == 14
    assert report.names("excluded") == ["lm_head"]
    return model


def loss(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, labels=ids).loss


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        now = loss(model)
        now.backward()
        optimizer.step()
        losses.append(now.item())
    return losses


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("recipe", [name for name in training.PRESETS if name in RECIPES])
def test_the_loss_falls(recipe: str) -> None:
    model = converted(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    training.attach(optimizer)
    torch.manual_seed(1)
    losses = train(model, optimizer, 4)
    assert losses[-1] < losses[0] - 0.3


def test_cached_weights_change_no_bit() -> None:
    results = []
    for is_attached in (False, True):
        model = converted("te_per_token")
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        cache_module._STEPS.are_marked = False
        if is_attached:
            training.attach(optimizer)
        train(model, optimizer, 2)
        kept = sum(module.cache.nbytes for _, module in training.conversion.layers_of(model))
        assert (kept > 0) == is_attached
        results.append(model.state_dict())
    assert_equal(*results)


def test_checkpoints_interchange_with_the_float_model() -> None:
    model, plain = converted("nvidia"), llama()
    train(model, torch.optim.AdamW(model.parameters(), 5e-3), 1)
    plain.load_state_dict(model.state_dict())
    training.set_recipe(model, "bf16")
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    other = converted("bf16")
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(IDS).logits, plain(IDS).logits)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Any) -> None:
    model = converted("nvidia")
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    training.attach(optimizer)
    torch.manual_seed(3)
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "checkpoint.pt")
    straight = train(model, optimizer, 2)

    state = torch.load(tmp_path / "checkpoint.pt")
    again = converted("nvidia")
    again.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(again.parameters(), 5e-3)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    assert train(again, optimizer, 2) == straight
    assert_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_recomputed_activations_change_no_bit(use_reentrant: bool) -> None:
    results = []
    for is_checkpointed in (False, True):
        model = converted("nvidia")
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(4)
        loss(model).backward()
        results.append(gradients(model))
    assert_equal(*results)


def test_accumulated_gradients_are_the_sum() -> None:
    model = converted("te_per_token")
    sums: dict[str, torch.Tensor] = {}
    for ids in IDS.split(1):
        model.zero_grad()
        loss(model, ids).backward()
        parts = gradients(model)
        sums = {name: sums[name] + g if sums else g for name, g in parts.items()}
    model.zero_grad()
    for ids in IDS.split(1):
        loss(model, ids).backward()
    assert_equal(gradients(model), sums)


def test_main_grads_are_added_to_in_float32() -> None:
    """In float32 both ways round once for each micro-batch; main_grad is added to in the product itself."""
    model = converted("te_per_token")
    layer = model.model.layers[0].mlp.up_proj
    for ids in IDS.split(1):
        loss(model, ids).backward()
    want = layer.weight.grad.clone()
    model.zero_grad()
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    for ids in IDS.split(1):
        loss(model, ids).backward()
    assert layer.weight.grad_added_to_main_grad
    assert not layer.weight.grad.any()
    assert torch.equal(layer.weight.main_grad, want)


def test_runs_repeat_in_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            model = converted("nvidia")
            torch.manual_seed(6)
            loss(model).backward()
            results.append(gradients(model))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(*results)


def test_autocast() -> None:
    """Float32 master weights under autocast: x is bfloat16, gradients are float32, and every layer runs."""
    model = converted("te_per_token")
    seen: dict[str, torch.dtype] = {}
    for name, module in training.conversion.layers_of(model):
        module.register_forward_hook(lambda m, args, y, name=name: seen.update({name: y.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        now = loss(model)
    now.backward()
    assert set(seen.values()) == {torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = llama()
    loss(exact).backward()
    for name, p in exact.named_parameters():
        got, want = model.get_parameter(name).grad.flatten(), p.grad.flatten()
        assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.9, name


def test_a_copy_of_a_model_trains_by_itself() -> None:
    model = converted("te_per_token")
    training.mark_step()
    before = loss(model)
    other = copy.deepcopy(model)
    train(other, torch.optim.SGD(other.parameters(), 0.5), 1)
    assert torch.equal(loss(model), before)
    assert not torch.equal(loss(other), before)


def test_a_block_compiles_to_one_graph() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU())
    training.convert_model(block, "te_per_token")
    training.mark_step()
    x = torch.randn(2, 16, 64, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for run in (block, compiled):
        block.zero_grad()
        x.grad = None
        y = run(x)
        y.square().sum().backward()
        results.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in block.named_parameters()}})
    assert_equal(*results)
