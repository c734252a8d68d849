"""Fusing the blocks of a model whose linear layers are NVFP4: what was merged, what was left and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from ...nn._hooks import carry_over, hooks_of
from ...nn.gated import GatedMLP
from ...nn.linear import Linear
from ...nn.merged import Part, layer_like, merged_name, one_weight, rows_of, why_not_one_weight
from ...nn.norm import RMSNormQuantize
from ..report import BlockReport
from .flow import Captures, called_together, readers
from .forms import LINEARS, GatedForward, gated_forward, norm_epsilon
from .residual import ADDS, add_residuals


def fuse_blocks(model: torch.nn.Module) -> tuple[BlockReport, ...]:
    """Fuse what can be fused, block by block, in place."""
    users = _users(model)
    captures = Captures()
    found: list[BlockReport] = []
    # The list keeps no linear layer, so that each is freed as soon as a merged one has taken its place.
    pending = [pair for pair in model.named_modules() if type(pair[1]) is not Linear]
    while pending:
        name, owner = pending.pop(0)
        made = _gated(captures, model, name, owner, users)
        if made is None or made.action == "left":
            found += [] if made is None else [made]
            found += _merged(captures, name, owner, users)
        else:
            found.append(made)
    for name, owner in [*model.named_modules()]:
        found += _norms(captures, model, name, owner)
    for name, owner in [*model.named_modules()]:
        found += _residuals(captures, name, owner)
    return tuple(found)


def fused(model: torch.nn.Module) -> dict[str, int]:
    """How many blocks of each kind are fused, by the actions of a BlockReport; a kind without any is absent.

    A GatedMLP whose layers had no names in a model is not counted.
    """
    found: dict[str, set[int]] = {}
    for module in model.modules():
        for action, part in (
            ("merged", module.merged if isinstance(module, Part) else None),
            ("gated", module if isinstance(module, GatedMLP) and module.layer_names is not None else None),
            ("norm", module if isinstance(module, RMSNormQuantize) else None),
            ("residual", module if hasattr(type(module), ADDS) else None),
        ):
            if part is not None:
                found.setdefault(action, set()).add(id(part))
    return {action: len(parts) for action, parts in found.items()}


def _users(model: torch.nn.Module) -> dict[int, int]:
    """How many times each module is registered in the model."""
    counts: dict[int, int] = {}
    for owner in model.modules():
        for child in owner._modules.values():
            if child is not None:
                counts[id(child)] = counts.get(id(child), 0) + 1
    return counts


def _linears(owner: torch.nn.Module) -> dict[str, Linear]:
    return {name: child for name, child in owner._modules.items() if type(child) is Linear}


def _full(owner: str, child: str) -> str:
    return f"{owner}.{child}".lstrip(".")


def _merged(
    captures: Captures, name: str, owner: torch.nn.Module, users: dict[int, int]
) -> Iterator[BlockReport]:
    layers = _linears(owner)
    # The containers of torch.nn call their children one after another.
    if len(layers) < 2 or type(owner).__module__.startswith("torch.nn."):
        return
    capture = captures.of(owner)
    left = dict(layers)
    linears = {child for child, module in owner._modules.items() if isinstance(module, LINEARS)}
    # What could not be traced changes nothing: a part that gets another tensor makes the product itself.
    for group in called_together(capture.graphs, linears):
        names = [child for child in group if child in layers]
        if len(names) < 2:
            continue
        for child in names:
            left.pop(child)
        members = [layers[child] for child in names]
        target = merged_name(names)
        full = tuple(_full(name, child) for child in names)
        reason = why_not_one_weight(members)
        if any(users[id(layer)] > 1 for layer in members):
            reason = "one of them is used in several places of the model"
        elif any(map(hooks_of, members)):
            reason = "one of them has hooks that a merged one would drop"
        elif not reason and hasattr(owner, target):
            reason = f"their owner has an attribute {target!r} already"
        if reason:
            yield BlockReport("left", full, "", reason)
            continue
        merged = one_weight(members)
        for index, child in enumerate(names):
            setattr(owner, child, Part(merged, index))
            del layers[child]
        members.clear()
        owner.add_module(target, merged)
        yield BlockReport("merged", full, _full(name, target))
    same_k = sorted(left, key=lambda child: left[child].in_features)
    for _, names_of_k in itertools.groupby(same_k, key=lambda child: left[child].in_features):
        names = list(names_of_k)
        if len(names) > 1:
            forward = f"the forward of {type(owner).__name__}"
            reason = f"{forward} does not call them with the same tensor"
            if capture.unknown:
                reason = f"{forward} cannot be traced: {capture.unknown}"
            yield BlockReport("left", tuple(_full(name, child) for child in names), "", reason)


def _gated(
    captures: Captures, model: torch.nn.Module, name: str, owner: torch.nn.Module, users: dict[int, int]
) -> BlockReport | None:
    layers = _linears(owner)
    if not layers or type(owner).__module__.startswith("torch.nn."):
        return None
    forward = captures.once(gated_forward, owner)
    if forward is None:
        return None
    if isinstance(forward, str):
        return BlockReport("left", (name,), "", forward)
    names = [child for child in (forward.gate, forward.up, forward.down) if child is not None]
    if not any(child in layers for child in names):
        return None
    reason = ""
    if not all(child in layers for child in names):
        reason = "not all of its layers are NVFP4"
    elif any(map(hooks_of, (owner, *(layers[child] for child in names)))):
        reason = "it has hooks that a fused one would drop"
    elif any(users[id(layers[child])] > 1 for child in names) or name == "":
        reason = "it is the model itself" if name == "" else "its layers are used in several places"
    else:
        reason = _why_no_gated_mlp(layers, forward)
    if reason:
        return BlockReport("left", (name,), "", reason)
    gate, up = _gate_and_up(layers, forward)
    made = GatedMLP(gate, up, layers[forward.down], activation=forward.activation)
    del gate, up, layers
    made.input_name = forward.input
    made.layer_names = forward.gate, forward.up, forward.down
    made.train(owner.training)
    carry_over(owner, made)
    _replace(model, owner, made)
    full = tuple(_full(name, child) for child in names)
    return BlockReport("gated", full, name)


def _why_no_gated_mlp(layers: dict[str, Linear], forward: GatedForward) -> str:
    gate, down = layers[forward.gate], layers[forward.down]
    if forward.up is not None:
        up = layers[forward.up]
        if gate.out_features != up.out_features:
            return "gate and up differ in out_features"
        return why_not_one_weight([gate, up])
    if gate.out_features != 2 * down.in_features:
        return "gate and up together do not have twice the in_features of down"
    return why_not_one_weight([gate])


def _gate_and_up(layers: dict[str, Linear], forward: GatedForward) -> tuple[Linear, Linear]:
    gate = layers[forward.gate]
    if forward.up is not None:
        return gate, layers[forward.up]
    half = gate.out_features // 2
    made = []
    with torch.inference_mode(False), torch.no_grad():
        for rows in (range(half), range(half, 2 * half)):
            bias = None if gate.bias is None else gate.bias[rows.start : rows.stop]
            made.append(layer_like(gate, rows_of(gate.weight, rows), bias))
    return made[0], made[1]


def _norms(
    captures: Captures, model: torch.nn.Module, name: str, owner: torch.nn.Module
) -> Iterator[BlockReport]:
    if type(owner).__module__.startswith("torch.nn."):
        return
    for child, norm in list(owner.named_children()):
        epsilon = captures.once(norm_epsilon, norm)
        if epsilon is None and not type(norm).__name__.lower().endswith("norm"):
            continue
        found = readers(captures, owner, child)
        reason = found if isinstance(found, str) else ""
        if epsilon is None:
            if reason:
                continue  # a norm that no quantized layer reads
            reason = f"{type(norm).__name__} is not the norm of fp4gemm.rms_norm_quantize"
        elif not isinstance(found, str):
            reason = _why_not_tokens(norm, found)
        full = (_full(name, child),)
        if reason or isinstance(found, str) or epsilon is None:
            yield BlockReport("left", full, "", reason)
            continue
        setattr(owner, child, _fused_norm(model, norm, epsilon, found))
        yield BlockReport("norm", full, full[0])


def _why_not_tokens(norm: torch.nn.Module, found: Sequence[Linear]) -> str:
    if any(map(hooks_of, (norm, *found))) or "forward" in vars(norm):
        return "it or a layer that reads it has hooks that a fused one would drop"
    if {layer.activations for layer in found} not in ({"per-token"}, {"fp8"}):
        return (
            'the layers that read it do not have activations="per-token", without options of the cast, or '
            '"fp8", all of them the same'
        )
    if any(layer.num_residual for layer in found):
        return "a layer that reads it has residual channels, which no fused norm appends"
    if any(layer.check_finite != "off" for layer in found):
        return 'the layers that read it have check_finite="raise"'
    return ""


def _fused_norm(
    model: torch.nn.Module, norm: torch.nn.Module, epsilon: float, found: Sequence[Linear]
) -> RMSNormQuantize:
    first = found[0]
    for layer in found:
        if type(layer) is Linear:
            made = layer_like(layer, layer.weight, layer.bias)  # Linear accepts no Tokens
            _replace(model, layer, made)
            first = made if layer is first else first
    return RMSNormQuantize(cast(torch.nn.Parameter, norm.weight), epsilon, first).train(norm.training)


def _residuals(captures: Captures, name: str, owner: torch.nn.Module) -> Iterator[BlockReport]:
    children = owner._modules.items()
    norms = frozenset(child for child, module in children if isinstance(module, RMSNormQuantize))
    mlps = frozenset(child for child, module in children if isinstance(module, GatedMLP))
    if (not norms and not mlps) or hasattr(owner, ADDS):
        return
    adding = add_residuals(captures, owner, norms, mlps)
    if isinstance(adding, str) and mlps:
        yield BlockReport("left", (name,), "", adding)
    elif not isinstance(adding, str):
        yield BlockReport("residual", tuple(_full(name, child) for child in adding), name)


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Replace a module by another one wherever it is registered in the model."""
    for owner in [*model.modules()]:
        for child, module in list(owner._modules.items()):
            if module is old:
                setattr(owner, child, new)
