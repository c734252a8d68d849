"""fp4gemm.calibrate: statistics of layers and experts, in one pass and block by block, on small models."""

from __future__ import annotations

import copy
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.calibration import Statistics
from torch import Tensor

PARTS = ("num_tokens", "mean_square", "second_moment", "quantization_error")
EVERYTHING = {"second_moment": True, "quantization_error": True}


class Block(torch.nn.Module):
    """Two layers that read the same tensor, and a third; the hidden states are a keyword if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(32, 64) for _ in range(2))
        self.down = torch.nn.Linear(64, 32)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, shift: Tensor, hidden: Tensor) -> tuple[Tensor, str]:
        return hidden + self.drop(self.down(torch.relu(self.gate(hidden)) * self.up(hidden))) + shift, "more"


class Model(torch.nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(48, 32)
        self.layers = torch.nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        h = self.embed(ids)
        for block in self.layers:
            h = block(torch.tensor(0.5 * scale), hidden=h)[0]
        return h


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


BATCHES: list[Any] = [
    torch.arange(12).view(2, 6),
    (torch.arange(5), 2.0),
    {"ids": torch.arange(40), "scale": 3},
]


def same(a: Statistics, b: Statistics) -> bool:
    pairs = [(getattr(a[n], p), getattr(b[n], p)) for n in a for p in PARTS] if list(a) == list(b) else []
    return bool(pairs) and all(x is y is None or torch.equal(x, y) for x, y in pairs)


def inputs_of(model: torch.nn.Module, name: str, batches: list[Any]) -> Tensor:
    """Every row that a layer reads."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    with torch.no_grad():
        for b in batches:
            model(**b) if isinstance(b, dict) else model(*b) if isinstance(b, tuple) else model(b)
    hook.remove()
    return torch.cat(seen)


def test_moments_of_every_layer(model: Model) -> None:
    model.train()
    made = fp4gemm.calibrate(model, BATCHES, **EVERYTHING)
    assert all(m.training for m in model.modules())
    assert list(made) == [f"layers.{i}.{name}" for i in range(3) for name in ("gate", "up", "down")]
    for name in made:
        x = inputs_of(model.eval(), name, BATCHES).double()
        assert made[name].num_tokens == x.shape[0] == 57
        assert torch.allclose(made[name].mean_square.double(), x.square().mean(0), rtol=1e-5)
        assert torch.allclose(made[name].second_moment.double(), x.T @ x / 57, rtol=1e-4, atol=1e-5)
        error = x - fp4gemm.quantize(x.float()).dequantize(torch.float32)
        assert torch.allclose(made[name].quantization_error.double(), error.square().mean(0), rtol=1e-5)
    plain = fp4gemm.calibrate(model, BATCHES)
    assert not plain.has_moments
    assert all(plain[name].quantization_error is None for name in plain)
    assert all(torch.equal(plain[name].mean_square, made[name].mean_square) for name in made)


def test_block_by_block_gives_the_same_bits(model: Model) -> None:
    steps: list[Any] = []
    made = fp4gemm.calibrate(model, BATCHES, **EVERYTHING)
    walked = fp4gemm.calibrate(
        model, BATCHES, sequential=True, device="cpu", progress=lambda *s: steps.append(s), **EVERYTHING
    )
    assert same(made, walked)
    assert same(made, fp4gemm.calibrate(model, iter(BATCHES), **EVERYTHING))
    assert steps == [(i + 1, 3, f"layers.{i}") for i in range(3)]
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())


def test_wide_moments_are_symmetric(gen: torch.Generator) -> None:
    """Panels of 256 columns are multiplied on one side of the diagonal."""
    wide = torch.nn.Sequential(torch.nn.Linear(608, 32))
    batches = [torch.randn(m, 608, generator=gen) for m in (3, 700, 1)]
    made = fp4gemm.calibrate(wide, batches, second_moment=True)["0"]
    x = torch.cat(batches).double()
    assert torch.allclose(made.second_moment.double(), x.T @ x / 704, rtol=1e-4, atol=1e-5)
    assert torch.equal(made.second_moment, made.second_moment.T)
    assert torch.allclose(made.second_moment.diagonal(), made.mean_square, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_layers_are_multiplied_in_float32(dtype: torch.dtype, gen: torch.Generator) -> None:
    """What the second layer reads is the product in float32, rounded once; the model is as before."""
    narrow = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False)).to(dtype)
    x = torch.randn(40, 64, generator=gen).to(dtype)
    made = fp4gemm.calibrate(narrow, [x], second_moment=True)["1"]
    first = narrow[0]
    h = torch.nn.functional.linear(x.float(), first.weight.float(), first.bias.float()).to(dtype).float()
    assert torch.equal(made.mean_square, h.square().sum(0) / 40)
    walked = fp4gemm.calibrate(torch.nn.Sequential(narrow), [x], second_moment=True)
    assert torch.equal(walked["0.1"].second_moment, made.second_moment)
    assert first.weight.dtype is dtype
    mixed = torch.nn.Linear(64, 32).to(dtype)
    with pytest.raises(ValueError, match=r"^batches: batch 0, .* is not accepted by the model: RuntimeError"):
        fp4gemm.calibrate(mixed, [x.double()])


def test_selected_layers(model: Model) -> None:
    assert list(fp4gemm.calibrate(model, BATCHES, include="down", exclude="0")) == [
        "layers.1.down",
        "layers.2.down",
    ]
    made = fp4gemm.calibrate(model, BATCHES, include="1.down")
    assert list(made) == ["layers.1.down"]


class Between(Model):
    """Something lies between the blocks, or not every block is called."""

    def forward(self, ids: Tensor, which: str = "") -> Tensor:
        h = self.embed(ids)
        for block in (
            self.layers[:2] if which == "few" else reversed(self.layers) if which == "back" else self.layers
        ):
            h = 2 * block(torch.zeros(()), hidden=h)[0]
        return h


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("", "sequential: block layers.1 is not called with what block 0 returned, must be"),
        ("few", "sequential: block layers.1 is not called with"),
        ("back", "sequential: block layers.2 is called as number 0, must be called once and in order"),
    ],
)
def test_models_that_are_no_chain_of_blocks(which: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fp4gemm.calibrate(Between(), [{"ids": torch.arange(4), "which": which}], sequential=True)


def test_layers_outside_of_the_blocks(model: Model) -> None:
    model.head = torch.nn.Linear(32, 48)
    with pytest.raises(
        ValueError, match="sequential: 1 selected layers, such as 'head', are not in the blocks"
    ):
        fp4gemm.calibrate(model, BATCHES, sequential=True)


def test_nan_is_traced_to_its_layer(model: Model) -> None:
    with torch.no_grad():
        model.layers[1].down.weight[0, 0] = 1e38
        model.layers[1].down.bias[0] = torch.inf
    model.layers[1].down = torch.nn.Sequential(model.layers[1].down)
    with pytest.raises(
        ValueError, match=r"^batches: the inputs of 'layers\.2\.gate', 'layers\.2\.up', .* hold NaN"
    ):
        fp4gemm.calibrate(model, BATCHES)


def test_a_list_of_experts_need_not_be_reached() -> None:
    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x[:4]) + self.experts[2](x[4:])

    made = fp4gemm.calibrate(Mixture(), [torch.ones(8, 32)])
    assert {name: int(s.num_tokens) for name, s in made.items()} == {
        "experts.0": 4,
        "experts.1": 0,
        "experts.2": 4,
    }
    assert not made["experts.1"].mean_square.any()


def test_experts_of_transformers(mixtral: Any) -> None:
    """Each expert has the moments of its own tokens, of both products."""
    batches = [torch.arange(24).view(2, 12), torch.arange(30, 40)[None]]
    made = fp4gemm.calibrate(mixtral, batches, second_moment=True)
    assert same(made, fp4gemm.calibrate(mixtral, batches, second_moment=True, sequential=True))
    experts = mixtral.model.layers[1].mlp.experts
    calls: list[tuple[Tensor, Tensor]] = []
    experts.register_forward_pre_hook(lambda _, args: calls.append((args[0], args[1])))
    with torch.no_grad():
        for ids in batches:
            mixtral(ids)
    x, chosen = (torch.cat([call[i].reshape(-1, call[i].shape[-1]) for call in calls]) for i in range(2))
    for e in range(4):
        rows = x[(chosen == e).any(1)].detach()
        gate, up = (rows @ experts.gate_up_proj[e].detach().T).chunk(2, -1)
        for product, seen in (("w13", rows), ("w2", torch.nn.functional.silu(gate) * up)):
            found = made[f"model.layers.1.mlp.experts.{product}"]
            assert found.num_tokens[e] == seen.shape[0]
            want = seen.T @ seen / max(seen.shape[0], 1)
            assert torch.allclose(found.second_moment[e], want, rtol=1e-4, atol=1e-6)


def test_the_cache_of_transformers_is_off_while_blocks_run() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    before = copy.deepcopy(model.state_dict())
    batches = [{"input_ids": torch.arange(24).view(2, 12)}]
    plain = fp4gemm.calibrate(model, batches, second_moment=True)
    assert same(plain, fp4gemm.calibrate(model, batches, second_moment=True, sequential=True))
    assert model.config.use_cache
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_cuda(cuda: torch.device, model: Model) -> None:
    here = fp4gemm.calibrate(model, BATCHES, second_moment=True)
    walked = fp4gemm.calibrate(model, BATCHES, second_moment=True, sequential=True, device=cuda)
    assert all(p.device.type == "cpu" for p in model.parameters())
    model.to(cuda)
    batches = [
        BATCHES[0].to(cuda),
        (BATCHES[1][0].to(cuda), 2.0),
        {"ids": BATCHES[2]["ids"].to(cuda), "scale": 3},
    ]
    there = fp4gemm.calibrate(model, batches, second_moment=True)
    for name in here:
        for made in (walked, there):
            assert made[name].num_tokens == here[name].num_tokens
            assert torch.allclose(made[name].second_moment, here[name].second_moment, rtol=1e-3, atol=1e-4)
