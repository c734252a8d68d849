"""Experts of transformers that convert_model lets train: bits, gradients, state, and what is refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn, training
from fp4gemm.training import cache as cache_module
from fp4gemm.training import functional, stacked_experts
from torch import Tensor
from training_cases import RECIPES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.integrations.moe", reason="transformers is older than 5")

D, INTER, G, TOP_K = 64, 32, 4, 2
IDS = torch.arange(64).view(2, 32) * 7 % 61
SIZES = {
    "vocab_size": 64,
    "hidden_size": D,
    "intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "use_cache": False,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  {"moe_intermediate_size": INTER, "num_experts": G, "head_dim": 16}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": G, "sliding_window": None}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": G, "head_dim": 16}),
}  # fmt: skip


def model(kind: str) -> Any:
    """A model of transformers with random weights and biases."""
    config_name, name, more = MODELS[kind]
    config = getattr(transformers, config_name)(**SIZES, **more)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    made = getattr(transformers, name)(config)
    for key, p in made.named_parameters():
        if "experts." in key:
            torch.nn.init.normal_(p, std=0.15)
    return made.train()


def experts_of(made: Any) -> Any:
    return made.model.layers[0].mlp.experts


def experts(kind: str, recipe: Any = None) -> Any:
    """The experts of the first block, converted unless recipe is None."""
    made = torch.nn.ModuleList([experts_of(model(kind))])
    if recipe is not None:
        assert training.convert_model(made, recipe).names("converted") == ["0"]
    return made[0]


def tokens(t: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights; the last expert has no token."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(t, D, generator=generator)
    ids = torch.rand(t, G - 1, generator=generator).argsort(1)[:, :TOP_K]
    return x, ids, torch.rand(t, TOP_K, generator=generator)


def gradients(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    y = module(x, ids, weights)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin().to(y.device))
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        **{name: p.grad.clone() for name, p in module.named_parameters()},
    }


def loss(made: Any) -> Tensor:
    return made(IDS, labels=IDS).loss


@pytest.mark.parametrize("kind", MODELS)
def test_two_steps_of_a_model(kind: str) -> None:
    """Recipe "bf16" has the gradients of the model itself; quantized ones point in their direction."""
    plain, made = model(kind), model(kind)
    parameters = dict(made.named_parameters())
    optimizer = torch.optim.SGD(made.parameters(), 0.05)
    report = training.convert_model(made, "bf16")
    found = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert [layer.name for layer in report.layers if len(layer.shape) == 3] == found
    assert set(found) < set(report.names("converted"))
    assert "2 modules of experts (2 converted)" in str(report)
    assert all(parameters[name] is p for name, p in made.named_parameters())
    assert list(made.state_dict()) == list(plain.state_dict())
    assert isinstance(experts_of(made), type(experts_of(plain)))
    loss(plain).backward()
    loss(made).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(parameters[name].grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert training.set_recipe(made, lambda name: "per_token" if "experts" in name else None) == found
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        torch.manual_seed(1)
        losses.append(loss(made))
        losses[-1].backward()
        if len(losses) == 1:
            for name, p in plain.named_parameters():
                cosine = torch.cosine_similarity(parameters[name].grad.flatten(), p.grad.flatten(), 0)
                assert cosine > (0.7 if "experts" in name and "bias" not in name else 0.5), name
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "w4a16"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_bits_of_grouped_linear(kind: str, recipe: str) -> None:
    """The definition with functional.grouped_linear, on the stacks in the order (g, n, k)."""
    module, (x, ids, weights) = experts(kind, RECIPES[recipe]), tokens()
    got = gradients(module, x, ids, weights)
    order = ids.flatten().argsort(stable=True)
    offs = torch.bincount(ids.flatten(), minlength=G).cumsum(0).to(torch.int32)
    stacks = {name: p.detach() for name, p in module.named_parameters()}
    if module.is_transposed:
        stacks = {n: p.mT.contiguous() if p.dim() == 3 else p for n, p in stacks.items()}
    leaves = {name: p.clone().requires_grad_() for name, p in stacks.items()}
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    torch.manual_seed(5)
    rows = x[order // TOP_K]
    for name in ("gate_up_proj", "down_proj"):
        bias = leaves.get(f"{name}_bias")
        rows = functional.grouped_linear(rows, leaves[name], offs, bias, RECIPES[recipe])
        rows = module._apply_gate(rows) if name == "gate_up_proj" else rows
    back = (rows * weights.flatten()[order].unsqueeze(1))[order.argsort()].view(-1, TOP_K, D)
    y = back[:, 0] + back[:, 1]
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin().to(y.device))
    want = {"y": y.detach(), "weights": weights.grad}
    want |= {
        name: p.grad.mT if module.is_transposed and p.dim() == 3 else p.grad for name, p in leaves.items()
    }
    assert [name for name, t in want.items() if not torch.equal(got[name], t)] == []
    torch.testing.assert_close(got["x"], x.grad)  # the sum over slots has another order in torch
    assert not got["down_proj"][-1].any()


def called(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the gates of calls of swiglu from now on."""
    shapes: list[torch.Size] = []

    def counting(gate: Tensor, up: Tensor) -> Tensor:
        shapes.append(gate.shape)
        return functional.swiglu(gate, up)

    monkeypatch.setattr(stacked_experts, "swiglu", counting)
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_swiglu_is_one_operator(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the module's own gate; gpt_oss has another activation."""
    shapes = called(monkeypatch)
    module, (x, ids, weights) = experts("qwen3_moe", "bf16").to(dtype), tokens()
    got = gradients(module, x.to(dtype), ids, weights.to(dtype))
    assert shapes == [(24 * TOP_K, INTER)]
    for name in ("copied", "pickled"):
        other = copy.deepcopy(module) if name == "copied" else pickle.loads(pickle.dumps(module))
        assert torch.equal(other(x.to(dtype), ids, weights.to(dtype)), got["y"]), name
    assert len(shapes) == 3
    vars(module)["_silu"] = None  # the module's own gate
    want = gradients(module, x.to(dtype), ids, weights.to(dtype))
    assert len(shapes) == 3
    assert torch.equal(got["y"], want["y"])
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, msg=name)
    experts("gpt_oss", "bf16")(*tokens())
    assert len(shapes) == 3


def test_another_activation_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was set after the conversion, and one with a hook."""
    shapes = called(monkeypatch)
    module, batch = experts("qwen3_moe", "bf16"), tokens()
    y = module(*batch)
    seen = []
    handle = module.act_fn.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(module(*batch), y)
    assert seen == [1]
    handle.remove()
    module.act_fn = torch.nn.ReLU()
    assert not torch.equal(module(*batch), y)
    assert len(shapes) == 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_copies_of_weights_are_kept_for_a_step(kind: str) -> None:
    module, batch = experts(kind, "te_per_token"), tokens()
    want = gradients(module, *batch)
    assert module.cache.nbytes == 0
    training.attach(torch.optim.SGD(module.parameters(), 0.1))
    try:
        for _ in range(2):
            got = gradients(module, *batch)
            assert [name for name in want if not torch.equal(got[name], want[name])] == []
        nbytes = module.cache.nbytes
        assert nbytes > module.down_proj.numel() + module.gate_up_proj.numel()
        with torch.no_grad():
            module.down_proj.mul_(2)
        assert not torch.equal(module(*batch), want["y"])
        assert module.cache.nbytes == nbytes
    finally:
        cache_module._STEPS.are_marked = False


def test_copies_pickles_and_state_dicts() -> None:
    made, batch = model("gpt_oss"), tokens()
    training.convert_model(made, "nvidia")
    module = experts_of(made)
    want = module(*batch)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)),
                  torch.load(stored, weights_only=False)):  # fmt: skip
        assert type(other) is type(module)
        assert other.recipe == module.recipe
        assert torch.equal(other(*batch), want)
        assert other.down_proj is not module.down_proj
    plain = model("gpt_oss")
    plain.load_state_dict(made.state_dict())
    training.set_recipe(made, "bf16")
    torch.testing.assert_close(loss(made), loss(plain))


def test_saved_models_are_those_of_transformers(tmp_path: Any) -> None:
    made, plain = model("qwen3_moe"), model("qwen3_moe")
    training.convert_model(made, "nvidia")
    for name, saved in (("ours", made), ("theirs", plain)):
        saved.save_pretrained(tmp_path / name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(experts_of(loaded)) is type(experts_of(plain))
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in loaded.named_parameters())
    first, second = (sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("ours", "theirs"))
    assert first == second


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_trained_model_is_quantized_as_the_float_one(kind: str) -> None:
    """quantize_model takes converted layers for those that they were; a subclass it leaves."""
    plain = model(kind).eval()
    trained = copy.deepcopy(plain)
    training.convert_model(trained, "nvidia")
    for each in (plain, trained):
        fp4gemm.models.quantize_model(each)
    assert isinstance(experts_of(trained), nn.Experts)
    with torch.no_grad():
        assert torch.equal(trained(IDS).logits, plain(IDS).logits)
    other = type("Linear", (training.Linear,), {})(D, D)
    with pytest.warns(UserWarning, match=r"layer stays as it is: '0' \(its type is Linear, which types"):
        fp4gemm.models.quantize_model(torch.nn.Sequential(other))


def test_main_grad() -> None:
    module, batch = experts("qwen3_moe", "nvidia"), tokens()
    want = gradients(module, *batch)["down_proj"]
    module.down_proj.main_grad = torch.ones_like(module.down_proj)
    gradients(module, *batch)
    torch.testing.assert_close(module.down_proj.main_grad, want + 1)
    module = experts("gpt_oss", "nvidia")
    module.down_proj.main_grad = torch.ones_like(module.down_proj)
    with pytest.raises(ValueError, match=r"down_proj\.main_grad: got a tensor, must be None for"):
        module(*batch)


def test_compiled_as_one_graph() -> None:
    module, batch = experts("qwen3_moe", "te_per_token"), tokens()
    want = module(*batch)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(*batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def _normed(module: Any) -> None:
    module.has_post_expert_norm = True


def _replaced(module: Any) -> None:
    module.forward = lambda *args: args[0]


def _narrow(module: Any) -> None:
    module.gate_up_proj = torch.nn.Parameter(torch.zeros(G, 96, D))
    module.down_proj = torch.nn.Parameter(torch.zeros(G, D, 48))


def _unlike(module: Any) -> None:
    module.down_proj = torch.nn.Parameter(torch.zeros(G, D, 64))


def _other(module: Any) -> None:
    module.scale = torch.nn.Parameter(torch.ones(1))


def _double(module: Any) -> None:
    module.double()


REFUSED = {
    "norm": (_normed, "each expert ends in a norm (has_post_expert_norm)"),
    "replaced": (_replaced, "its forward was replaced on the module"),
    "size": (_narrow, "intermediate is 48, must be a multiple of 32"),
    "stacks": (_unlike, "its first stack has 64 rows of each expert, must have 128 for down_proj"),
    "parameter": (_other, "its parameters are down_proj, gate_up_proj, scale, must be down_proj, gate_up_p"),
    "dtype": (_double, "its gate_up_proj: dtype is torch.float64, must be "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_skipped(case: str) -> None:
    change, text = REFUSED[case]
    made = torch.nn.ModuleDict({"experts": experts("qwen3_moe"), "linear": torch.nn.Linear(D, D)})
    change(made["experts"])
    with pytest.warns(UserWarning, match="convert_model: skipped 'experts'"):
        report = training.convert_model(made, "nvidia")
    assert report.layers[0].action == "skipped"
    assert text in report.layers[0].reason
    assert report.names("converted") == ["linear"]
    assert not isinstance(made["experts"], training.StackedExperts)


def test_selection() -> None:
    made = model("mixtral")
    report = training.convert_model(made, "nvidia", filter="experts", keep_last=0.5)
    assert report.names("converted") == ["model.layers.0.mlp.experts"]
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["model.layers.1.mlp.experts"].reason == "in the last blocks (keep_last)"
    assert by_name["model.layers.0.mlp.experts"].shape == (G, 2 * INTER, D)
    assert by_name["model.layers.0.self_attn.q_proj"].reason == "not matched by filter"
    assert training.convert_model(made, "te_per_token", filter="0.mlp").names("converted") == [
        "model.layers.0.mlp.experts"
    ]
    assert experts_of(made).recipe == training.PRESETS["te_per_token"]
    assert "te_per_token" in repr(experts_of(made))
    with pytest.raises(ValueError, match=r"has no torch\.nn\.Linear and no experts"):
        training.convert_model(torch.nn.ReLU(), "nvidia")


def test_arguments() -> None:
    module, (x, ids, weights) = experts("mixtral", "nvidia"), tokens()
    with pytest.raises(TypeError, match="hidden_states: got 3"):
        module(3, ids, weights)
    with pytest.raises(ValueError, match=r"hidden_states: .* must have rank 2"):
        module(x[None], ids, weights)
    with pytest.raises(ValueError, match=r"top_k_index: .*\(20, 2\), must be \(24, 2\), as hidden_states"):
        module(x, ids[:20], weights[:20])
    with pytest.raises(ValueError, match=r"top_k_index: .* must have rank 2"):
        module(x, ids.flatten(), weights)
    for wrong in (-1, G):
        named = ids.clone()
        named[3, 1] = wrong
        with pytest.raises(ValueError, match=f"top_k_index: has {wrong}, must have 0 to {G - 1}"):
            module(x, named, weights)
    with pytest.raises(ValueError, match=r"top_k_weights: .*\(25, 2\), must be \(24, 2\), as top_k_index"):
        module(x, ids, torch.cat((weights, weights[:1])))
    with pytest.raises(TypeError, match=r"top_k_weights: dtype is torch\.int64"):
        module(x, ids, weights.long())
    # The versions before 5.20 do not have the attribute.
    vars(module).pop("_is_expert_parallel", None)
    module(x, ids, weights)
    module._is_expert_parallel = True
    with pytest.raises(RuntimeError, match="distributed over devices after convert_model"):
        module(x, ids, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_gpu(kind: str, cuda: torch.device) -> None:
    """The gradients of a GPU are those of the CPU: few codes differ where an activation rounds otherwise."""
    results = []
    for device in (torch.device("cpu"), cuda):
        module = experts(kind, "te_per_token").to(device)
        found = gradients(module, *(t.to(device) for t in tokens()))
        results.append({name: t.cpu() for name, t in found.items()})
    for name, want in results[0].items():
        got = results[1][name]
        assert got.dtype is want.dtype
        assert (got - want).norm() <= 0.03 * want.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvidia", "per_token"])
def test_gpu_beside_bf16(recipe: str, cuda: torch.device) -> None:
    """Recipes that draw at random: their gradients point in the direction of those without quantization."""
    given = [t.to(cuda) for t in tokens()]
    want, got = (gradients(experts("qwen3_moe", name).to(cuda), *given) for name in ("bf16", recipe))
    for name, t in want.items():
        cosine = torch.nn.functional.cosine_similarity(got[name].flatten(), t.flatten(), dim=0)
        assert cosine > 0.95, name
