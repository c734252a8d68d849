"""The layers of real models, as data: weights (n, k) of their linear layers and of their experts.

The sizes are those of the models' published config.json: n and k follow from hidden_size, the sizes of heads
and of the MLP (gate and up are one weight of twice the rows). ``square`` is no model: sizes to compare with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["MODELS", "Experts", "Layer", "Model", "Routed", "dense_layers", "expert_layers"]


class Experts(NamedTuple):
    """The experts of one layer of a model."""

    num_experts: int
    top_k: int  # that a token takes
    hidden: int
    intermediate: int
    gated: bool = True  # the first product makes gate and up

    @property
    def shapes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, n, k) of the two products."""
        first = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        return (*first, self.hidden), ("down", self.hidden, self.intermediate)


class Model(NamedTuple):
    name: str  # of --model
    layers: tuple[tuple[str, int, int], ...] = ()  # (name, n, k), those that are not experts
    experts: Experts | None = None


class Layer(NamedTuple):
    """A weight (n, k), and whose it is; "" where a size was named instead."""

    model: str
    layer: str
    n: int
    k: int


class Routed(NamedTuple):
    """The weights (num_experts, n, k) of experts; a token takes top_k of them."""

    model: str
    layer: str
    num_experts: int
    top_k: int
    n: int
    k: int


MODELS = (
    Model("square", (("4096", 4096, 4096), ("8192", 8192, 8192), ("16384", 16384, 16384))),
    Model(
        "llama-3.1-8b",
        (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)),
    ),
    Model(
        "llama-3.1-70b",
        (("qkv", 10240, 8192), ("o", 8192, 8192), ("gate_up", 57344, 8192), ("down", 8192, 28672)),
    ),
    Model(
        "deepseek-v3",
        (("qkv_a", 2112, 7168), ("q_b", 24576, 1536), ("o", 7168, 16384), ("shared_gate_up", 4096, 7168)),
        Experts(256, 8, 7168, 2048),
    ),
    Model("kimi-k2", experts=Experts(384, 8, 7168, 2048)),
    Model("qwen3-235b", experts=Experts(128, 8, 4096, 1536)),
    Model("qwen3-30b", (("qkv", 5120, 2048), ("o", 2048, 4096)), Experts(128, 8, 2048, 768)),
    Model("qwen3-next-80b", experts=Experts(512, 10, 2048, 512)),
    Model("gpt-oss-120b", (("qkv", 5120, 2880), ("o", 2880, 4096)), Experts(128, 4, 2880, 2880)),
    Model("gpt-oss-20b", (("qkv", 5120, 2880), ("o", 2880, 4096)), Experts(32, 4, 2880, 2880)),
    Model("glm-4.6", experts=Experts(160, 8, 5120, 1536)),
    Model("minimax-m2", experts=Experts(256, 8, 3072, 1536)),
    Model("llama-4-maverick", experts=Experts(128, 1, 5120, 8192)),
    Model("llama-4-scout", experts=Experts(16, 1, 5120, 8192)),
    Model("nemotron-3-nano", experts=Experts(128, 6, 2688, 1856, gated=False)),
)
NAMES = tuple(model.name for model in MODELS)


def _named(names: Iterable[str]) -> list[Model]:
    by_name = {model.name: model for model in MODELS}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(f"--model: {missing[0]!r} is none of {', '.join(NAMES)}")
    return [by_name[name] for name in names]


def dense_layers(names: Sequence[str]) -> list[Layer]:
    """The weights of these models that are not experts.

    Raises:
        ValueError: a name is no model's, or none of the models has such a weight.
    """
    made = [Layer(model.name, *layer) for model in _named(names) for layer in model.layers]
    if not made:
        raise ValueError(f"--model: of {', '.join(names)} only the experts are known; see `bench grouped`")
    return made


def expert_layers(names: Sequence[str], ways: int = 1) -> list[Routed]:
    """The experts of these models that one of ``ways`` devices holds.

    Raises:
        ValueError: a name is no model's, none of the models has experts, or ``ways`` does not divide them.
    """
    made = []
    for model in _named(names):
        if model.experts is None:
            continue
        e = model.experts
        if e.num_experts % ways:
            raise ValueError(f"--ep: {ways} does not divide the {e.num_experts} experts of {model.name}")
        made += [Routed(model.name, name, e.num_experts // ways, e.top_k, n, k) for name, n, k in e.shapes]
    if not made:
        raise ValueError(f"--model: {', '.join(names)} has no experts; see `bench dense`")
    return made


def parse_shape(text: str) -> tuple[int, ...]:
    """The sizes of "8192x4096".

    Raises:
        ValueError: it is not made of positive numbers.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        raise ValueError(f"{text!r} is not sizes like 8192x4096")
    return tuple(int(part) for part in text.split("x"))
