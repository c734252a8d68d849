"""The layers of real models, as data: weights (n, k) of their linear layers and of their experts.

The sizes follow from the models' published config.json: from hidden_size, the number and size of heads, and
intermediate_size (gate and up are one weight with twice the rows). ``square`` is not a model; it names square
weights for comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["MODELS", "Experts", "Layer", "Model", "Routed", "dense_layers", "expert_layers", "named"]


class Experts(NamedTuple):
    """The experts of one layer of a model."""

    num_experts: int
    top_k: int  # experts that a token chooses
    hidden: int
    intermediate: int
    gated: bool = True  # whether the first product computes both gate and up

    @property
    def shapes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, n, k) of the two products."""
        first = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        return (*first, self.hidden), ("down", self.hidden, self.intermediate)


class Model(NamedTuple):
    name: str  # as --model has it
    layers: tuple[tuple[str, int, int], ...] = ()  # (name, n, k) of the weights outside of experts
    experts: Experts | None = None


class Layer(NamedTuple):
    """A weight (n, k) and the model and layer that it belongs to; both are "" for a size from --shapes."""

    model: str
    layer: str
    n: int
    k: int


class Routed(NamedTuple):
    """The weights (num_experts, n, k) of experts, of which a token chooses top_k."""

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


def named(names: Iterable[str]) -> list[Model]:
    """The models of these names.

    Raises:
        ValueError: a name is not in MODELS.
    """
    by_name = {model.name: model for model in MODELS}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(f"--model: {missing[0]!r} is not one of {', '.join(NAMES)}")
    return [by_name[name] for name in names]


def dense_layers(names: Sequence[str]) -> list[Layer]:
    """The weights of these models outside of experts.

    Raises:
        ValueError: a name is not in MODELS, or none of these models lists such a weight.
    """
    made = [Layer(model.name, *layer) for model in named(names) for layer in model.layers]
    if not made:
        raise ValueError(f"--model: {', '.join(names)} lists experts alone; see `python -m bench grouped`")
    return made


def expert_layers(names: Sequence[str], ways: int = 1) -> list[Routed]:
    """The experts of these models that each of ``ways`` devices holds.

    Raises:
        ValueError: a name is not in MODELS, none of these models has experts, or ``ways`` does not divide
            them.
    """
    made = []
    for model in named(names):
        if model.experts is None:
            continue
        e = model.experts
        if e.num_experts % ways:
            raise ValueError(f"--ep: {ways} does not divide the {e.num_experts} experts of {model.name}")
        made += [Routed(model.name, name, e.num_experts // ways, e.top_k, n, k) for name, n, k in e.shapes]
    if not made:
        raise ValueError(f"--model: {', '.join(names)} has no experts; see `python -m bench dense`")
    return made


def parse_shape(text: str) -> tuple[int, ...]:
    """The sizes of "8192x4096".

    Raises:
        ValueError: the text is not positive numbers with an x between them.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        raise ValueError(f"{text!r} must be sizes like 8192x4096")
    return tuple(int(part) for part in text.split("x"))
