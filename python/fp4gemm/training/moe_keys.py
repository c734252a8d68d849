"""The state of a MoE under the names and shapes of other libraries' blocks.

"torchtitan"
    Its module MoE: stacks w1, w2, w3.
"transformers"
    Modules of transformers 5 (Mixtral, Qwen3-MoE, DeepSeek-V3): stacks gate_up_proj and down_proj.
"mixtral"
    Checkpoints of Mixtral: w1, w2 and w3 of each expert.
"qwen3_moe"
    Checkpoints of Qwen3-MoE and DeepSeek-V3: gate_proj, up_proj and down_proj of each expert.
"te"
    TransformerEngine's GroupedLinear in Megatron's MoELayer: linear_fc1.weightE (the gate's rows, then those
    of up) and linear_fc2.weightE of each expert E.

Keys are those inside of the block; ``prefix`` is what comes before them, such as "model.layers.3.mlp.". Only
weights and the expert bias are exchanged; the state of stochastic rounding has no counterpart elsewhere.

A MoE with an exchange (``ep``) has the experts of its rank. Where every expert has tensors of its own, E is
the number of the expert among those of all ranks. A stack of plain tensors has the rank's experts, and one of
DTensors (:class:`fp4gemm.distributed.ParallelExperts`) stays a DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _checks
from .._names import EXPERTS, STACKED, Projections
from .moe import MoE

__all__ = ["LAYOUTS", "MoELayout", "load_moe_state", "moe_state"]

MoELayout = Literal["torchtitan", "transformers", "mixtral", "qwen3_moe", "te"]


class _Names(NamedTuple):
    """The keys of a block. Two names of ``up`` are w1 and w3, one is both, joined along the rows.

    ``{e}`` in a name means that every expert has a tensor of its own.
    """

    gate: str
    bias: str
    up: tuple[str, ...]
    down: str
    shared_up: tuple[str, ...]
    shared_down: str


def _of(names: Projections, up: tuple[str, ...] | None = None, down: str | None = None) -> _Names:
    """The keys of a block of transformers whose experts, or shared expert alone, have these names.

    Args:
        names: of the layers of an expert.
        up, down: the keys of the experts; None: every expert has tensors of its own.
    """
    return _Names(
        "gate.weight",
        "gate.e_score_correction_bias",
        up or tuple(f"experts.{{e}}.{name}.weight" for name in (names.gate, names.up)),
        down or f"experts.{{e}}.{names.down}.weight",
        tuple(f"shared_experts.{name}.weight" for name in (names.gate, names.up)),
        f"shared_experts.{names.down}.weight",
    )


_PROJ, _W = EXPERTS[:2]  # gate_proj and so on, and w1 and so on
LAYOUTS: dict[str, _Names] = {
    "torchtitan": _of(_W, (f"experts.{_W.gate}", f"experts.{_W.up}"), f"experts.{_W.down}")._replace(
        gate="router.gate.weight", bias="expert_bias"
    ),
    "transformers": _of(_PROJ, (f"experts.{STACKED.gate_up}",), f"experts.{STACKED.down}"),
    "mixtral": _of(_W),
    "qwen3_moe": _of(_PROJ),
    "te": _Names(
        "router.weight",
        "router.expert_bias",
        ("experts.linear_fc1.weight{e}",),
        "experts.linear_fc2.weight{e}",
        ("shared_experts.linear_fc1.weight",),
        "shared_experts.linear_fc2.weight",
    ),
}


class _Entry(NamedTuple):
    """One tensor of the other library and the parts of ours that it consists of, joined along the rows."""

    key: str
    parts: tuple[Tensor, ...]
    is_stack: bool = False  # whether the tensor is a stack of experts


def _own(moe: MoE, weight: Tensor) -> Tensor:
    """A weight, or of the DTensors of a block with an exchange the experts of this rank."""
    if moe.ep is None or not isinstance(weight, DTensor) or weight.dim() != 3:
        return weight
    local: Tensor = weight.to_local()
    if local.shape[0] != moe.ep.num_local_experts:
        raise ValueError(
            f"moe: this rank has {local.shape[0]} matrices of a stack of experts, must have "
            f"{moe.ep.num_local_experts}, as ParallelExperts divides them"
        )
    return local


def _entries(moe: MoE, names: _Names) -> list[_Entry]:
    """Every tensor of the block, with views of the memory of ours."""
    entries = [_Entry(names.gate, (moe.router.gate.weight,))]
    if moe.expert_bias is not None:
        entries.append(_Entry(names.bias, (moe.expert_bias,)))

    def add(keys: tuple[str, ...], weights: tuple[Tensor, ...]) -> None:
        joined = [weights] if len(keys) == 1 else [(weight,) for weight in weights]
        for key, parts in zip(keys, joined, strict=True):
            if "{e}" in key:
                each = zip(*(_own(moe, part).unbind(0) for part in parts), strict=True)
                numbered = enumerate(each, 0 if moe.ep is None else moe.ep.first_expert)
                entries.extend(_Entry(key.format(e=e), part) for e, part in numbered)
            else:
                entries.append(_Entry(key, parts, parts[0].dim() == 3))

    experts, shared = moe.experts, moe.shared_experts
    add(names.up, (experts.w1.weight, experts.w3.weight))
    add((names.down,), (experts.w2.weight,))
    if shared is not None:
        add(names.shared_up, (shared.w1.weight, shared.w3.weight))
        add((names.shared_down,), (shared.w2.weight,))
    return entries


def _names(moe: object, layout: object, prefix: object) -> _Names:
    if not isinstance(moe, MoE):
        raise TypeError(f"moe: got {_checks.describe(moe)}, must be a fp4gemm.training.MoE")
    _checks.is_one_of("layout", layout, tuple(LAYOUTS))
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {_checks.describe(prefix)}, must be a str")
    return LAYOUTS[str(layout)]


@torch.no_grad()
def moe_state(moe: MoE, layout: MoELayout, prefix: str = "") -> dict[str, Tensor]:
    """The weights of a MoE, and its expert bias if it has one, as another library's block has them.

    Args:
        moe: the block.
        layout: one of those above.
        prefix: put before every key.

    Returns:
        Detached tensors in the dtype of the parameters. They share memory with the parameters, except for
        those that join w1 and w3.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    return {
        prefix + key: (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)).detach()
        for key, parts, _ in _entries(moe, _names(moe, layout, prefix))
    }


@torch.no_grad()
def load_moe_state(moe: MoE, state: Mapping[str, Tensor], layout: MoELayout, prefix: str = "") -> None:
    """Copy the state of another library's block into the parameters of a MoE, cast to their dtype.

    Args:
        moe: the block, whose sizes must fit. One with an exchange (``ep``) reads its own experts of the state
            of a whole block, and accepts its own alone, as :func:`moe_state` returns them.
        state: tensors by key, in memory; keys that do not begin with ``prefix`` are other modules' and are
            left alone.
        layout: one of those above.
        prefix: what the keys of this block begin with.

    Raises:
        TypeError: an argument has another Python type.
        ValueError: a key is missing, a key with the prefix is not one of the block, or a tensor has another
            shape. Nothing has been copied then.
    """
    entries = _entries(moe, _names(moe, layout, prefix))
    if not isinstance(state, Mapping):
        raise TypeError(f"state: got {_checks.describe(state)}, must be a mapping of tensors")
    wanted = {prefix + entry.key for entry in entries}
    found = {key for key in state if key.startswith(prefix)}
    missing = sorted(wanted - found)
    unexpected = sorted(found - wanted - _of_all_experts(moe, layout, prefix))
    if missing or unexpected:
        what = [f"{_some(keys)} {text}" for keys, text in ((missing, "missing"), (unexpected, "unexpected"))
                if keys]  # fmt: skip
        raise ValueError(f"state: {' and '.join(what)}, must have the keys of layout {layout!r}")
    read: list[tuple[_Entry, Tensor]] = []
    for entry in entries:
        key, name = prefix + entry.key, f"state[{prefix + entry.key!r}]"
        given = _checks.is_tensor(name, state[key])
        if entry.is_stack:
            given = _own_experts(moe, given)
        parts = [_own(moe, part) for part in entry.parts]
        rows = sum(part.shape[-2] for part in parts) if len(parts) > 1 else 0
        shape = (*parts[0].shape[:-2], rows, parts[0].shape[-1]) if rows else tuple(parts[0].shape)
        _checks.has_shape(name, given, shape)
        read.append((entry, given))
    for entry, tensor in read:
        pieces = tensor.chunk(len(entry.parts), dim=-2) if len(entry.parts) > 1 else (tensor,)
        for part, piece in zip(entry.parts, pieces, strict=True):
            _own(moe, part).copy_(piece)


def _of_all_experts(moe: MoE, layout: str, prefix: str) -> set[str]:
    """The keys of the experts of all ranks, for a block that exchanges tokens between ranks."""
    if moe.ep is None:
        return set()
    names = LAYOUTS[layout]
    keys = (prefix + key for key in (*names.up, names.down))
    return {key.format(e=e) for key in keys for e in range(moe.num_experts)}


def _own_experts(moe: MoE, stack: Tensor) -> Tensor:
    """The part of a stack that has this rank's experts; the whole stack if it has no other experts."""
    if isinstance(stack, DTensor):
        return _own(moe, stack)
    if moe.ep is None or stack.dim() != 3 or stack.shape[0] != moe.num_experts:
        return stack
    return stack.narrow(0, moe.ep.first_expert, moe.ep.num_local_experts)


def _some(keys: list[str]) -> str:
    """The first three keys."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(map(repr, keys[:3])) + more + (" is" if len(keys) == 1 else " are")
