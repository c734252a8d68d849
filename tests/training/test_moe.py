"""fp4gemm.training.MoE: its definition, gradients, routing, balancing, and the blocks of transformers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import training
from fp4gemm.training import MoE
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from training_cases import RECIPES

DIM, HIDDEN, G, TOP_K = 64, 96, 5, 2
QUANTIZED = [name for name in training.PRESETS if name != "bf16"]


def block(recipe: str = "bf16", device: torch.device | str = "cpu", **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(DIM, HIDDEN, G, **{"top_k": TOP_K, **options}, recipe=RECIPES[recipe]).to(device)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    x = torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(3))
    return x.to(device, dtype).requires_grad_()


def gradients(moe: MoE, x: Tensor) -> dict[str, Tensor]:
    """y, dx and the gradients of the parameters, with the same random numbers in each call."""
    torch.manual_seed(2)
    moe.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = moe(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype).sin())
    found = {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def definition(moe: MoE, x: Tensor) -> Tensor:
    """The formula of the docstring in float64, one token after the other."""
    state = {name: p.double() for name, p in moe.named_parameters()}
    router, bias, x = moe.router, moe.expert_bias, x.double()
    logits = x @ state["router.gate.weight"].T
    scores = logits.softmax(-1) if router.score_func == "softmax" else logits.sigmoid()
    rows = []
    for i in range(len(x)):
        ids = (scores[i].detach() + (0 if bias is None else bias)).topk(router.top_k).indices
        weights = scores[i, ids] / (scores[i, ids].sum() if router.route_norm else 1) * router.route_scale
        y = torch.zeros(DIM, dtype=torch.float64)
        for weight, e in zip(weights, ids.tolist(), strict=True):
            w1, w2, w3 = (state[f"experts.{name}.weight"][e] for name in ("w1", "w2", "w3"))
            y = y + (weight * torch.nn.functional.silu(x[i] @ w1.T) * (x[i] @ w3.T)) @ w2.T
        if moe.shared_experts is not None:
            w1, w2, w3 = (state[f"shared_experts.{name}.weight"] for name in ("w1", "w2", "w3"))
            y = y + (torch.nn.functional.silu(x[i] @ w1.T) * (x[i] @ w3.T)) @ w2.T
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_func": "sigmoid", "route_scale": 2.5, "num_shared_experts": 2},
        {"route_norm": False, "top_k": 1, "load_balance_coeff": None},
        {"top_k": G},
    ],
    ids=["softmax", "sigmoid-shared", "top1-plain", "all"],
)
def test_definition(options: dict[str, Any]) -> None:
    """y and every gradient, that of the router among them, against float64."""
    moe, x = block(**options), tokens(13)
    if moe.expert_bias is not None:
        moe.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1, -0.3]))
    got = gradients(moe, x)
    want = gradients_of_definition(moe, x)
    assert got.keys() == want.keys()
    assert got["router.gate.weight"].abs().max() > (0 if options.get("top_k") == 1 else 1e-3)
    for name in got:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-5, atol=1e-5, msg=name)


def gradients_of_definition(moe: MoE, x: Tensor) -> dict[str, Tensor]:
    moe.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = definition(moe, x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin().double())
    found = {name: p.grad.double() for name, p in moe.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad.double(), **found}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_recipes(recipe: str, device: torch.device) -> None:
    """NVFP4 stays near bf16, differs from it, and is the same in every run."""
    x = tokens(37, dtype=torch.bfloat16, device=device)
    moe = block(recipe, device, num_shared_experts=1).bfloat16()
    exact = block("bf16", device, num_shared_experts=1).bfloat16()
    got, again, want = gradients(moe, x), gradients(moe, x), gradients(exact, x)
    for name in got:
        assert_bits(got[name], again[name])
        cosine = torch.cosine_similarity(got[name].float().flatten(), want[name].float().flatten(), dim=0)
        assert cosine > 0.9, f"{name}: {cosine}"
    changed = {name for name in got if not torch.equal(got[name], want[name])}
    is_forward_plain = training.PRESETS[recipe].w is None
    assert ("y" in changed) != is_forward_plain
    assert "experts.w1.weight" in changed


@pytest.mark.parametrize("recipe", ["bf16", "nvidia", "te_per_token"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_tokens_and_empty_experts(recipe: str, count: int) -> None:
    moe = block(recipe)
    got = gradients(moe, tokens(count))
    assert got["y"].shape == got["x"].shape == (count, DIM)
    assert all(bool(value.isfinite().all()) for value in got.values())
    empty = moe.tokens_per_expert == 0
    assert moe.tokens_per_expert.sum() == count * TOP_K
    for name in ("w1", "w2", "w3"):
        gradient = got[f"experts.{name}.weight"]
        assert not gradient[empty].any()
        assert gradient[~empty].flatten(1).any(1).all()


def test_one_hot_expert() -> None:
    """Every token goes to expert 3 and, as the bias says, to expert 0."""
    moe = block("te_per_token")
    moe.expert_bias.copy_(torch.tensor([5.0, 0, 0, 9, 0]))
    got = gradients(moe, tokens(40))
    assert moe.tokens_per_expert.tolist() == [40, 0, 0, 40, 0]
    assert got["experts.w1.weight"][[1, 2, 4]].abs().max() == 0
    want = definition(moe, tokens(40)).detach()
    assert (got["y"] - want).norm() < 0.25 * want.norm()


def test_a_token_depends_on_itself_alone() -> None:
    """With an amax for each row no bit of a token's y depends on the other tokens or their order."""
    moe, x = block("row_scaled_dequantized"), tokens(24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    moe.eval()
    with torch.no_grad():
        assert_bits(moe(x[order]), moe(x)[order])
        assert_bits(moe(x[:5]), moe(x)[:5])


def test_leading_dimensions_and_dtype() -> None:
    moe, x = block(), tokens(2, 3, 4)
    y = moe(x)
    assert y.shape == x.shape
    assert_bits(y.flatten(0, 2), moe(x.flatten(0, 2)))
    assert moe.bfloat16()(x.bfloat16()).dtype is torch.bfloat16


def test_autocast_leaves_the_router_in_float32() -> None:
    moe, x = block(), tokens(64)
    with torch.autocast("cpu", torch.bfloat16):
        weights, ids = moe.router(x)
    assert_bits(weights, moe.router(x)[0])
    assert_bits(ids, moe.router(x)[1])
    assert weights.dtype is torch.float32


# ---- balancing


def test_update_of_the_expert_bias() -> None:
    """DeepSeek-V3's rule, by hand."""
    moe = block(load_balance_coeff=0.25)
    moe.tokens_per_expert.copy_(torch.tensor([3, 0, 7, 5, 10]))  # the mean is 5
    training.update_expert_bias(torch.nn.Sequential(moe))
    assert moe.expert_bias.tolist() == [0.25, 0.25, -0.25, 0.0, -0.25]
    assert moe.tokens_per_expert.tolist() == [0] * G


def test_balancing_balances() -> None:
    """Tokens that lean to one expert are spread over all of them, and no weight was trained."""
    moe, x = block(load_balance_coeff=0.02), tokens(256).detach()
    with torch.no_grad():
        moe.router.gate.weight[2] += 0.5 * x.mean(0) / x.mean(0).norm() + 0.05
    spreads = []
    for _ in range(60):
        with torch.no_grad():
            moe(x)
        spreads.append(int(moe.tokens_per_expert.max() - moe.tokens_per_expert.min()))
        training.update_expert_bias(moe)
    assert max(spreads[-5:]) < spreads[0] / 2


def test_tokens_are_counted_in_training_only() -> None:
    moe, x = block(), tokens(20)
    for _ in range(2):
        moe(x)
    assert moe.tokens_per_expert.sum() == 2 * 20 * TOP_K
    ids = moe.router(x)[1]
    assert moe.tokens_per_expert.tolist() == (2 * torch.bincount(ids.flatten(), minlength=G)).tolist()
    moe.eval()(x)
    assert moe.tokens_per_expert.sum() == 2 * 20 * TOP_K


def test_the_bias_stays_float32() -> None:
    moe = block()
    moe.expert_bias.fill_(0.001)
    moe = copy.deepcopy(moe).bfloat16().half().float().double()
    assert moe.expert_bias.dtype is torch.float32
    assert_bits(moe.expert_bias, torch.full((G,), 0.001))
    assert moe.to("meta").expert_bias.dtype is torch.float32
    assert "expert_bias" in block().state_dict()
    assert "expert_bias" not in block(load_balance_coeff=None).state_dict()


def test_memory_of_the_meta_device() -> None:
    """After to_empty the counts are zero, and reset_parameters makes the bias zero too."""
    moe = MoE(DIM, HIDDEN, G, top_k=TOP_K, device="meta")
    assert moe(torch.empty(3, DIM, device="meta")).shape == (3, DIM)
    torch.full((64, G), 7)  # freed at once: what new memory may contain
    moe.to_empty(device="cpu")
    assert not moe.tokens_per_expert.any()
    moe.expert_bias.fill_(3)
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not moe.expert_bias.any()
    moe(tokens(20)).sum().backward()
    assert moe.tokens_per_expert.sum() == 20 * TOP_K
    assigned = MoE(DIM, HIDDEN, G, top_k=TOP_K, device="meta")
    assigned.load_state_dict(moe.state_dict(), assign=True)
    assigned(tokens(20))
    assert_bits(assigned.tokens_per_expert, moe.tokens_per_expert)


def test_the_result_is_no_view() -> None:
    """An operation in place on a view would drop the hooks that FSDP2 has on the result of a module."""
    assert not any(block()(tokens(*shape))._is_view() for shape in ((6,), (2, 3)))


def test_hooks_of_a_product_see_gradients() -> None:
    moe, seen = block("te_per_token"), []
    moe.experts.w1.register_full_backward_hook(lambda module, dx, dy: seen.append((dx[0].shape, dy[0].shape)))
    moe(tokens(20)).sum().backward()
    assert seen == [((20 * TOP_K, DIM), (20 * TOP_K, HIDDEN))]


# ---- state of other libraries


@pytest.mark.parametrize("layout", ["torchtitan", "transformers", "mixtral", "qwen3_moe", "te"])
def test_state_goes_and_comes_back(layout: Any) -> None:
    moe, other = block(num_shared_experts=1), block(num_shared_experts=1)
    for i, tensor in enumerate(itertools.chain(moe.parameters(), moe.buffers())):
        tensor.data.add_(i)
    state = training.moe_state(moe, layout, "a.b.")
    training.load_moe_state(other, {**state, "a.c": torch.ones(1)}, layout, "a.b.")
    assert all(key.startswith("a.b.") for key in state)
    for name, tensor in moe.state_dict().items():
        assert_bits(other.state_dict()[name], tensor)
    elements = sum(tensor.numel() for tensor in state.values())
    assert elements == sum(tensor.numel() for tensor in moe.state_dict().values())


def test_te_joins_gate_and_up() -> None:
    """The names of Megatron's MoELayer on TransformerEngine's GroupedLinear: the gate's rows come first."""
    moe = block(load_balance_coeff=None)
    state = training.moe_state(moe, "te")
    assert sorted(state) == sorted(
        ["router.weight", *(f"experts.linear_fc{i}.weight{e}" for i in (1, 2) for e in range(G))]
    )
    assert_bits(state["experts.linear_fc1.weight3"][:HIDDEN], moe.experts.w1.weight[3].detach())
    assert_bits(state["experts.linear_fc1.weight3"][HIDDEN:], moe.experts.w3.weight[3].detach())


def test_nothing_is_loaded_after_an_error() -> None:
    moe = block()
    state = training.moe_state(block(), "mixtral")
    state = {key: torch.zeros_like(value) for key, value in state.items()}
    last = list(state)[-1]
    with pytest.raises(ValueError, match="shape is"):
        training.load_moe_state(moe, {**state, last: torch.zeros(3)}, "mixtral")
    assert all(bool(p.any()) for p in moe.parameters())


def other_block(kind: str) -> torch.nn.Module:
    """A small random block of transformers, float32, with the sizes of ours."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": DIM, "num_experts_per_tok": TOP_K}
    if kind == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as mixtral

        config = mixtral.MixtralConfig(**sizes, intermediate_size=HIDDEN, num_local_experts=G)
        config._experts_implementation = "eager"
        made = mixtral.MixtralSparseMoeBlock(config)
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

        config = qwen3.Qwen3MoeConfig(**sizes, moe_intermediate_size=HIDDEN, num_experts=G,
                                      norm_topk_prob=kind == "qwen3_moe-norm")  # fmt: skip
        config._experts_implementation = "eager"
        made = qwen3.Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(7)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return made


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen3_moe-norm"])
def test_a_block_of_transformers(kind: str) -> None:
    """y and all gradients up to the order of sums, and the state back."""
    other, x = other_block(kind), tokens(3, 11)
    moe = block(load_balance_coeff=None, route_norm=kind != "qwen3_moe")
    training.load_moe_state(moe, other.state_dict(), "transformers")
    y = moe(x)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).sin()
    (dx,) = torch.autograd.grad((y * dy).sum(), x, retain_graph=True)
    (y * dy).sum().backward()
    x2 = x.detach().clone().requires_grad_()
    y2 = other(x2)
    (y2 * dy).sum().backward()
    torch.testing.assert_close(y, y2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, x2.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(parameter.grad)
    for name, gradient in training.moe_state(moe, "transformers").items():
        torch.testing.assert_close(gradient, other.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name)


# ---- around the module


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_one_graph(backend: str, device: torch.device) -> None:
    moe, x = block("te_per_token", device), tokens(16, device=device)
    want = gradients(moe, x)
    traced = compiled(moe, ready(backend))
    torch.manual_seed(2)
    moe.zero_grad()
    y = traced(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).sin())
    torch.testing.assert_close(y.detach(), want["y"], rtol=1e-5, atol=1e-5)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_second_derivative_is_refused() -> None:
    moe, x = block(), tokens(4)
    (dx,) = torch.autograd.grad(moe(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiat"):
        dx.sum().backward()


def test_exports_and_recipes_of_a_model() -> None:
    assert fp4gemm.nn.MoE is MoE
    assert "MoE" in dir(fp4gemm.nn)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        fp4gemm.nn.Missing  # noqa: B018
    moe = block(num_shared_experts=1)
    training.set_recipe(moe, "nvidia")
    layers = [m for m in moe.modules() if isinstance(m, training.Linear | training.GroupedLinear)]
    assert len(layers) == 6
    assert all(layer.recipe == training.PRESETS["nvidia"] for layer in layers)
    assert type(moe.router.gate) is torch.nn.Linear


@pytest.mark.gpu
def test_nothing_synchronises(cuda: torch.device) -> None:
    moe, x = block("nvidia", cuda).bfloat16(), tokens(256, dtype=torch.bfloat16, device=cuda)
    gradients(moe, x)
    training.update_expert_bias(moe)
    dy = torch.ones_like(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe(x).backward(dy)
        training.update_expert_bias(moe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
