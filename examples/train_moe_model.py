"""The language model of train_moe.py: a decoder whose products are in the precision of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fp4gemm.training import PRESETS, GroupedLinear, Linear, MoE, Recipe
from fp4gemm.training.moe import FeedForward
from torch import Tensor, nn
from torch.nn import functional

from bench.baselines import fp8


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its batches; dim and expert_dim are multiples of 32.

    Without experts each block has one SwiGLU of expert_dim.
    """

    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_dim: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step
    steps: int
    learning_rate: float
    corpus_bytes: int


SIZES = {
    "tiny": Size(64, 2, 2, 4, 2, 64, 64, 8, 20, 4e-3, 4 << 20),  # for tests
    "small": Size(128, 3, 4, 8, 2, 128, 128, 2, 200, 4e-3, 16 << 20),
    "full": Size(512, 6, 8, 16, 2, 512, 512, 64, 1500, 1e-3, 256 << 20),
    # Without experts: for MXFP8, which has no wgrad of experts on Hopper, and for FP8.
    "small-dense": Size(128, 3, 4, 0, 0, 384, 128, 2, 200, 4e-3, 16 << 20),
    "dense": Size(512, 6, 8, 0, 0, 1536, 512, 64, 800, 1e-3, 128 << 20),
}


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of x (b, heads, length, head_dim), base 10000."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention. One product makes q, k and v, so that their input is quantized once."""

    def __init__(self, dim: int, heads: int, recipe: Recipe | str) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(dim, 3 * dim, bias=False, recipe=recipe)
        self.out = Linear(dim, dim, bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        b, length, dim = x.shape
        q, k, v = self.qkv(x).view(b, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, length, dim))


class Block(nn.Module):
    def __init__(self, size: Size, recipe: Recipe | str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size.dim, size.heads, recipe)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp: MoE | FeedForward
        if size.experts:
            self.mlp = MoE(size.dim, size.expert_dim, size.experts, top_k=size.top_k, recipe=recipe)
        else:
            self.mlp = FeedForward(size.dim, size.expert_dim, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and the embedding again as the last product; that and the routers stay float.

    Args:
        recipes: of each block.
    """

    def __init__(self, size: Size, vocab: int, recipes: list[Recipe]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size, recipe) for recipe in recipes)
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats a token, float32 ()."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class FP8Linear(Linear):
    """A layer whose three products are in FP8: e4m3, with a scale for each row of the six operands.

    This is the recipe "rowwise" of torchao. ``is_fp8`` is False for products in bf16.
    """

    is_fp8 = True

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor
        if not self.is_fp8:
            y = super().forward(input)
            return y
        rows = input.reshape(-1, input.shape[-1])
        y = _FP8Product.apply(rows, self.weight)
        return y.view(*input.shape[:-1], -1)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _fp8_product(x, weight, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # As TransformerEngine does, gradients are summed in float32, and only y in the tensor cores.
        dx = _fp8_product(dy, weight.t(), use_fast_accum=False)
        return dx, _fp8_product(dy.t(), x.t(), use_fast_accum=False)


def _fp8_product(a: Tensor, b: Tensor, use_fast_accum: bool) -> Tensor:
    """a (m, k) times the transpose of b (n, k), of the dtype of a."""
    a_q, b_q = (fp8.quantize(t.contiguous()) for t in (a, b))
    return fp8.multiply(a_q, b_q, use_fast_accum).to(a.dtype)


def use_fp8(model: nn.Module) -> None:
    """Compute the products of every layer that has a recipe in FP8. ValueError for a model with experts."""
    for name, layer in quantized_layers(model):
        if not isinstance(layer, Linear):
            raise ValueError(f"--arms: fp8 needs a size without experts, as dense, but {name} has experts")
        layer.__class__ = FP8Linear


def check_fp8(device: torch.device) -> None:
    """Raise ValueError if the device has no such products; a small one shows it."""
    x = torch.ones(16, 32, device=device, dtype=torch.bfloat16)
    try:
        _fp8_product(x, x, use_fast_accum=True)
    except (RuntimeError, NotImplementedError) as error:  # of torch; without Triton
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--arms: fp8 needs a device with products in FP8, but on {device}: {reason}"
        ) from error


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Compute the products of every layer that has a recipe in bf16, for as long as the context lasts."""
    layers = [layer for _, layer in quantized_layers(model)]
    recipes = [layer.recipe for layer in layers]
    for layer in layers:
        layer.recipe = PRESETS["bf16"]
        if isinstance(layer, FP8Linear):
            layer.is_fp8 = False
    try:
        yield
    finally:
        for layer, recipe in zip(layers, recipes, strict=True):
            layer.recipe = recipe
            if isinstance(layer, FP8Linear):
                layer.is_fp8 = True


@torch.no_grad()
def initialize(model: LanguageModel, seed: int) -> None:
    """The same parameters for a seed in every arm: drawn on the CPU, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * len(model.blocks)) ** -0.5
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = 0.02 if name.startswith("embedding") else 0.5 * parameter.shape[-1] ** -0.5
        if name.endswith(("out.weight", "w2.weight")):
            std *= residual
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def quantized_layers(model: nn.Module) -> list[tuple[str, Linear | GroupedLinear]]:
    """The layers that have a recipe, by name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, Linear | GroupedLinear)]


def add_outliers(model: nn.Module, factor: float = 64.0, every: int = 32) -> None:
    """Multiply some rows of the input of every quantized layer by ``factor``, and divide the output by it.

    With a power of two the function and its gradients keep their bits in bf16. In NVFP4 they keep them if
    every row has its own amax; with one amax for the tensor all other rows lose precision.
    """

    def factors(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[:-1].numel(), device=x.device) % every == 0
        return torch.where(rows, factor, 1.0).to(x.dtype).view(*x.shape[:-1], 1)

    for _, layer in quantized_layers(model):
        layer.register_forward_pre_hook(lambda _, args: (args[0] * factors(args[0]), *args[1:]))
        layer.register_forward_hook(lambda _, args, y: y / factors(args[0]))
