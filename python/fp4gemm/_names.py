"""What the names of layers, tensors and classes mean in models, for checkpoints, live models and engines.

A family whose experts have names of their own is one line of :data:`EXPERTS`. Names are dotted and have no
".weight"; the last part of a name is that of the layer. Tables are read when a function is called.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "BESIDE",
    "EXPERTS",
    "LM_HEAD",
    "READS_WEIGHTS_OF",
    "READ_DIRECTLY",
    "STACKED",
    "Orientation",
    "Projections",
    "expert_of",
    "fused_sets",
    "is_expert_layer",
    "is_experts",
    "is_named_router",
    "is_output",
    "is_router",
    "is_router_class",
    "missing_partners",
    "orientation",
    "product_of",
    "role_of",
    "stack_of",
]

Role = Literal["gate", "up", "down"]

# ---- output embeddings

LM_HEAD = "lm_head"
OUTPUTS = (LM_HEAD, "embed_out")
OUTPUT_OF_MODEL = "output"  # in models of Meta and torchtitan; below a module it means other things


def is_output(name: str) -> bool:
    """Whether the layer is an output embedding by its name."""
    return name == OUTPUT_OF_MODEL or name.rpartition(".")[2] in OUTPUTS


# ---- routers

# The end of the class names of routers: MixtralTopKRouter, DbrxRouter, JetMoeTopKGating, MoEGate, ...
ROUTER_CLASSES = re.compile(r"(Router|RouterMLP|TopKGating|TopKGate|MoEGate|MoEV1Gate)$")
ROUTERS = re.compile(r"router|gating")
# Names of routers, and of gates of shared experts, that layers of other kinds may have in a live model, where
# the layers beside them tell a router (models/select.py).
GATES = re.compile(r"^gate$|^wg$|_gate$")


def is_router_class(name: str) -> bool:
    """Whether modules of the class with this name are routers."""
    return ROUTER_CLASSES.search(name) is not None


def is_named_router(name: str) -> bool:
    """Whether the name says that the layer is a router or a part of one."""
    parts = name.split(".")
    return ROUTERS.search(parts[-1]) is not None or any("router" in part for part in parts)


def is_router(name: str) -> bool:
    """Whether the layer is a router or the gate of a shared expert, where nothing but its name is known."""
    return is_named_router(name) or GATES.search(name.rpartition(".")[2]) is not None


# ---- layers whose owners read the weight themselves, so that it must stay in float

# By the class of the owner (transformers 5.20).
READS_WEIGHTS_OF = {
    "FalconMambaMixer": {"dt_proj"},
    "JambaMambaMixer": {"dt_proj"},
    "MambaMixer": {"dt_proj"},
    "WavLMAttention": {"q_proj", "k_proj", "v_proj", "out_proj"},
}
READ_DIRECTLY = {"dt_proj"}  # by the name of the layer, where the class of its owner is not known


# ---- MLPs and experts


class Projections(NamedTuple):
    """The names of the layers of an MLP or of an expert, ``down(act(gate(x)) * up(x))``.

    Attributes:
        gate, up, down: the names.
        without_gate: which of gate and up is the first layer of an MLP of this family that has no gate.
    """

    gate: str
    up: str
    down: str
    without_gate: Literal["gate", "up"] = "up"


# The first one is what experts are called that were stored as one tensor and are split.
EXPERTS = (
    Projections("gate_proj", "up_proj", "down_proj"),
    Projections("w1", "w3", "w2", without_gate="gate"),
)


class Stacked(NamedTuple):
    """The names of experts that are stored as one tensor (g, .., ..) for each product, in a module "experts".

    Attributes:
        gate_up: gate and up, joined along the rows, which are the dimension 1, or 2 if it is transposed.
        up: the first one without a gate.
        down: the second one.
    """

    gate_up: str
    up: str
    down: str

    def first(self, has_gate: bool) -> str:
        """The name of the first one of a module with a gate or without."""
        return self.gate_up if has_gate else self.up


STACKED = Stacked("gate_up_proj", "up_proj", "down_proj")


def is_experts(part: str) -> bool:
    """Whether a module of this name, one part of a dotted one, holds experts, routed or shared."""
    return "expert" in part.lower()


def role_of(child: str) -> Role | None:
    """What a layer of this name does in an MLP or an expert; None for other names."""
    for names in EXPERTS:
        if child in names[:3]:
            return "gate" if child == names.gate else "up" if child == names.up else "down"
    return None


def product_of(child: str) -> Literal["w13", "w2"] | None:
    """The product of an expert that a layer of this name is a part of: gate and up are "w13", down "w2"."""
    role = role_of(child)
    if role is None:
        return "w13" if child == STACKED.gate_up else None
    return "w2" if role == "down" else "w13"


def expert_of(name: str) -> tuple[str, int, str] | None:
    """(module of the experts, number, child) of a layer of one expert of a list; None for other layers."""
    parts = name.rsplit(".", 2)
    if len(parts) == 3 and parts[0] and parts[1].isdecimal() and product_of(parts[2]) is not None:
        return parts[0], int(parts[1]), parts[2]
    return None


def stack_of(name: str) -> tuple[str, str] | None:
    """(module "experts", child) of a tensor that holds all experts; None for other tensors."""
    owner, _, child = name.rpartition(".")
    is_stack = owner.rpartition(".")[2] == "experts" and child in (STACKED.gate_up, STACKED.down)
    return (owner, child) if is_stack else None


def is_expert_layer(name: str) -> bool:
    """Whether it is a projection of experts, routed or shared, one by one or stacked."""
    *owners, child = name.split(".")
    return product_of(child) is not None and any(is_experts(part) for part in owners)


@dataclass(frozen=True)
class Orientation:
    """Stacked experts: gate_up (g, 2i, h) and down (g, h, i), or the last two sizes exchanged.

    Attributes:
        experts: g. hidden: h. intermediate: i.
        transposed: whether the last two sizes are exchanged: the tensors hold (k, n).
    """

    experts: int
    hidden: int
    intermediate: int
    transposed: bool


def orientation(gate_up: Sequence[int], down: Sequence[int]) -> Orientation | str:
    """The sizes that the shapes of gate_up and down determine; or why they are no experts.

    No two shapes allow both readings: 2i = h and h = 2i of the other tensor exclude each other.
    """
    g, a, b = gate_up
    same_experts = down[0] == g
    if same_experts and b == down[1] and a == 2 * down[2]:
        return Orientation(g, b, down[2], False)
    if same_experts and a == down[2] and b == 2 * down[1]:
        return Orientation(g, a, down[1], True)
    return (
        f"{STACKED.gate_up} {tuple(gate_up)} and {STACKED.down} {tuple(down)} are not the shapes of gated "
        "experts"
    )


# ---- fused sets: layers that serving engines join along n, so that they share one amax

# Names of children of one module.
FUSED_ATTENTION = (("q_proj", "k_proj", "v_proj"),)
FUSED_OTHERS = (
    ("to_q", "to_k", "to_v"),
    ("wq_a", "wkv_a_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# A layer of a fused set that stands without its partners beside another layer that takes their place
# (attention with latents).
BESIDE = {"q_proj": ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa": ("q_proj",), "wkv_a_with_mqa": ("wq",)}


def fused_sets() -> tuple[tuple[str, ...], ...]:
    """The fused sets: attention, gate and up of each family, and others."""
    return (*FUSED_ATTENTION, *((names.gate, names.up) for names in EXPERTS), *FUSED_OTHERS)


def missing_partners() -> dict[str, str]:
    """The partner that the first layer of an MLP without a gate lacks, by the name of that layer.

    The partner is missing in the whole checkpoint then.
    """
    return {
        getattr(names, names.without_gate): names.up if names.without_gate == "gate" else names.gate
        for names in EXPERTS
    }
