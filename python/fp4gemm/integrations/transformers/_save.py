"""A model with NVFP4 layers as a checkpoint holds it: the stored tensors, and their scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from ... import _names, nn
from ...calibration.residual import why_none
from ...checkpoint.formats import (
    FORMATS,
    SOURCES,
    FormatName,
    Group,
    Scheme,
    SourceFormat,
    StoredWeight,
)
from ...checkpoint.formats.base import RESIDUAL
from ...containers.mxfp4 import MXFP4Tensor
from ...containers.nvfp4 import NVFP4Tensor
from ...models import moe
from ...models.collect import is_expert
from ...models.fuse import fused
from ...models.select import float_weights
from ...nn import _formats as weights
from ...nn._hooks import materialized
from ...nn._weight import WeightModule
from ...nn.gated import GatedMLP
from ...nn.merged import MergedLinear, Part, rows_of
from ...recipe import INPUTS, RESIDUAL_KINDS, LayerActivations, StoredActivations
from ._config import Fp4GemmConfig

__all__ = ["source_of", "state_dict"]

# What to do about layers that differ. On compute capability 9.0 "auto" makes such layers where the k of some
# is no multiple of 64; their weights are those of "a16".
_REMEDIES = {
    "activations": "; quantize with activations='a16', and load the checkpoint with activations='auto'",
    "e4m3_max": "; quantize all layers by one method",
    "use_fast_accum": "; set use_fast_accum of all layers to one value",
    "rounded_gate": "; set rounded_gate of all experts to one value",
}


class Weight(NamedTuple):
    """A quantized weight under the name of its module.

    Attributes:
        name: of the module.
        weight, bias: those of the module.
        kind: the activations of the layer.
        channels: its residual channels, or None.
    """

    name: str
    weight: weights.Weight
    bias: Tensor | None
    kind: LayerActivations
    channels: Tensor | None = None


def state_dict(model: Any, config: Fp4GemmConfig) -> dict[str, Tensor]:
    """The tensors of the checkpoint, quantized weights in CPU memory; the config then describes them.

    A model whose quantized weights are MXFP4 experts is in the format of GPT-OSS, all others in an NVFP4 one.

    Names are those of the model; for experts, one by one, ``experts.3.gate_proj`` and so on.
    ``model.save_pretrained`` turns them into those of the checkpoint.

    Raises:
        ValueError: naming the layer that the format cannot hold, and what to do.
    """
    source = source_of(model)
    config.written = source
    if source is not None:
        return _in_source(model, source)
    format: FormatName = config.format or "modelopt"
    activations, e4m3_max, use_fast_accum, rounded_gate = _agreed(model, format)
    kinds: dict[str, LayerActivations] = {}
    state = _of_others(model)
    about, scaling = FORMATS[format], "tensor"
    residual = _agreed_residual(model)
    for name, weight, bias, kind, channels in _weights(model):
        kinds[name] = kind
        if channels is not None:
            state[f"{name}.{RESIDUAL}"] = channels.to("cpu", copy=True)
        stored = _stored(name, cast(NVFP4Tensor, weight), format)  # the only ones, by _agreed
        scaling = "row" if stored.outer.numel() > 1 else scaling
        state |= {key: tensor.to("cpu", copy=True) for key, tensor in stored.tensors(name).items()}
        if INPUTS[kind].is_nvfp4:
            state |= about.input_tensors(name, None)
        if bias is not None:
            state[f"{name}.bias"] = _bias(bias, weight.dtype)
    config.scheme = Scheme(
        format,
        cast(StoredActivations, activations),
        tuple(_ignored(model, format)),
        e4m3_max=e4m3_max,
        scaling=scaling,  # type: ignore[arg-type]
        **_targets(model, activations, kinds),
        residual_channels=residual,
    )
    config.describe(activations, fused(model), use_fast_accum, rounded_gate)
    return state


def _of_others(model: Any) -> dict[str, Tensor]:
    """The tensors of all modules but those that are stored as quantized weights."""
    state: dict[str, Tensor] = {}
    inner = _inner(model)
    for path, module in model.named_modules():
        if path not in inner:
            own: dict[str, Tensor] = {}
            is_offloaded = any(t.is_meta for t in module.parameters(recurse=False))
            with materialized(module):
                module._save_to_state_dict(own, f"{path}." if path else "", False)
                state |= {name: t.to("cpu", copy=True) for name, t in own.items()} if is_offloaded else own
    return state


def source_of(model: Any) -> SourceFormat | None:
    """The format of SOURCES that holds the quantized weights of the model, which are experts in it alone."""
    held = [module for module in model.modules() if isinstance(module, WeightModule)]
    found = (
        source
        for source in SOURCES.values()
        if held and all(each.format_name == source.weights and each.num_matrices for each in held)
    )
    return next(found, None)


def _in_source(model: Any, source: SourceFormat) -> dict[str, Tensor]:
    """The tensors of a checkpoint in a format of SOURCES, with the codes and scales of the layers.

    Raises:
        ValueError: the format does not hold such a model. RuntimeError: a layer has no weight yet.
    """
    source.check_model(model.config.to_dict())
    state = _of_others(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Experts):
            continue
        if module.float_layout != "interleaved":
            raise ValueError(
                f"{name}: gate and up were {module.float_layout} in the float model, must alternate in the "
                f"{source.name} format"
            )
        for child, stack in ((_names.STACKED.gate_up, module.w13), (_names.STACKED.down, module.w2)):
            with materialized(stack):
                stack._require_weight()
                codes, scales = source.stored(cast(MXFP4Tensor, stack.weight))
                parts = {source.codes: codes, source.scales: scales}
                if stack.bias is not None:
                    parts[source.bias] = _bias(stack.bias, stack.dtype)
                state |= {f"{name}.{child}{end}": t.to("cpu", copy=True) for end, t in parts.items()}
    return state


def _targets(
    model: Any, activations: LayerActivations, kinds: Mapping[str, LayerActivations]
) -> dict[str, Any]:
    """The targets and groups of a scheme whose layers have these activations; none if all have the first."""
    if set(kinds.values()) <= {activations}:
        return {}
    names = _in_checkpoint(model, kinds)
    first, rest = (
        tuple(names[name] for name, kind in kinds.items() if (kind == activations) is mine)
        for mine in (True, False)
    )
    return {"targets": first, "groups": (Group(rest, "a16"),)}


def _in_checkpoint(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name of each module in a checkpoint."""
    return {
        name: next(iter(revert_weight_conversion(model, {f"{name}.weight": torch.empty(0)}))).removesuffix(
            ".weight"
        )
        for name in names
    }


def _agreed(model: Any, format: FormatName) -> tuple[LayerActivations, int, bool, bool]:
    """The values on which all layers agree: activations, e4m3_max, use_fast_accum, rounded_gate of experts.

    W4A4 with an amax for each token and W4A16 agree in a format that has mixes; the first is returned then.

    Raises:
        ValueError: they do not agree. RuntimeError: a layer has no weight yet.
    """
    scalings: dict[LayerActivations, str] = {}
    bounds: dict[int, str] = {}
    sums: dict[bool, str] = {}
    gates: dict[bool, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Experts)):
            scalings[cast(LayerActivations, module.activations)] = name
            sums[module.use_fast_accum] = name
        if isinstance(module, nn.Experts):
            gates[module.rounded_gate] = name
        if isinstance(module, WeightModule):
            if module.format_name != "nvfp4":
                raise ValueError(
                    f"model: {name} is {module._format.title}, must be NVFP4 to be saved; `python -m fp4gemm "
                    f"convert --format {module.format_name}` writes the checkpoint of the float model, and "
                    "model.state_dict() holds the layers"
                )
            with materialized(module):
                module._require_weight()
                bounds[module.e4m3_max] = name
    if FORMATS[format].has_mixes and scalings.keys() == {"per-token", "a16"}:
        del scalings["a16"]
    for what, found in (
        ("activations", scalings),
        ("e4m3_max", bounds),
        ("use_fast_accum", sums),
        ("rounded_gate", gates),
    ):
        if len(found) > 1:
            listed = ", ".join(f"{value!r} of {name}" for value, name in found.items())
            raise ValueError(
                f"model: its layers differ in {what} ({listed}), must agree in a checkpoint{_REMEDIES[what]}"
            )
    return next(iter(scalings)), next(iter(bounds)), next(iter(sums)), next(iter(gates), False)


def _agreed_residual(model: Any) -> int:
    """The number of residual channels of the linear layers, of which those with fewer channels have none.

    Raises:
        ValueError: they do not agree.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    count = max((layer.num_residual for layer in layers.values()), default=0)
    for name, layer in layers.items():
        is_able = INPUTS[layer.activations].kind in RESIDUAL_KINDS
        is_able = is_able and not why_none(layer.in_features, count, is_expert(name))
        wanted = count if is_able else 0
        if layer.num_residual != wanted:
            raise ValueError(
                f"model: {name} has {layer.num_residual} residual channels, must have {wanted} in a "
                f"checkpoint whose layers have {count}; quantize all layers by one call"
            )
    return count


def _stored(name: str, weight: NVFP4Tensor, format: FormatName) -> StoredWeight:
    amax = weight.amax
    if amax.numel() > 1 and bool((amax == amax[0]).all()):
        weight = dataclasses.replace(weight, amax=amax[:1].clone())
    elif amax.numel() > 1 and not FORMATS[format].has_row_scales:
        raise ValueError(
            f"{name}: its weight has an amax for each row, must have one for the format {format!r}; save "
            "with format='fp4gemm', or quantize with weight_scaling='tensor'"
        )
    return StoredWeight.of(weight, format)


def _bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the float layer, unless that would change it."""
    cast = bias.to(dtype)
    return (cast if torch.equal(cast.to(bias.dtype), bias) else bias).to("cpu", copy=True)


def _inner(model: Any) -> set[str]:
    """The names of the modules whose tensors are stored as NVFP4 weights."""
    return {name for name, module in model.named_modules() if isinstance(module, (WeightModule, Part))}


def _weights(model: Any) -> Iterator[Weight]:
    """Every NVFP4 weight under the names that it had before layers were fused, one expert after another."""
    modules = dict(model.named_modules())
    merged = {id(module.merged) for module in modules.values() if isinstance(module, Part)}
    gated = {id(module.gate_up) for module in modules.values() if isinstance(module, GatedMLP)}
    gated |= {id(module.down) for module in modules.values() if isinstance(module, GatedMLP)}
    has_experts = any(isinstance(module, nn.Experts) for module in modules.values())
    names = _expert_names(model) if has_experts else _names.EXPERTS[0]
    for name, module in modules.items():
        if isinstance(module, Part):
            with materialized(module.merged):
                whole = module.merged
                yield Weight(name, module.weight, module.bias, _kind(whole), whole.residual_channels)
        elif isinstance(module, GatedMLP):
            yield from _of_gated(name, module)
        elif isinstance(module, nn.Experts):
            yield from _of_experts(name, module, names)
        elif isinstance(module, nn.Linear) and id(module) not in merged | gated:
            if isinstance(module, MergedLinear) and len(module.sizes) > 1:
                raise ValueError(f"{name}: is a merged layer whose parts are unknown, must not be")
            with materialized(module):
                yield Weight(name, module.weight, module.bias, _kind(module), module.residual_channels)


def _kind(module: Any) -> LayerActivations:
    return cast(LayerActivations, module.activations)


def _of_gated(name: str, mlp: GatedMLP) -> Iterator[Weight]:
    if mlp.layer_names is None:
        raise ValueError(f"{name}: a GatedMLP of your own has no names for gate, up and down, must have")
    gate_name, up_name, down_name = mlp.layer_names
    with materialized(mlp.gate_up):
        weight, bias = mlp.gate_up.weight, mlp.gate_up.bias
        how = _kind(mlp.gate_up), mlp.gate_up.residual_channels
        rows = weight.shape[0]
        halves = [rows_of(weight, range(i, rows, 2)) for i in (0, 1)]
        biases = [None if bias is None else bias[i::2] for i in (0, 1)]
        if up_name is None:
            bias = None if bias is None else torch.cat((bias[0::2], bias[1::2]))
            joined = weights.format_of(halves[0]).joined(halves)
            yield Weight(f"{name}.{gate_name}", joined, bias, *how)
        else:
            yield Weight(f"{name}.{gate_name}", halves[0], biases[0], *how)
            yield Weight(f"{name}.{up_name}", halves[1], biases[1], *how)
    with materialized(mlp.down):
        down = mlp.down
        yield Weight(f"{name}.{down_name}", down.weight, down.bias, _kind(down), down.residual_channels)


def _of_experts(name: str, experts: nn.Experts, names: _names.Projections) -> Iterator[Weight]:
    is_gated = experts.w13.out_features == 2 * experts.intermediate
    with materialized(experts.w13), materialized(experts.w2):
        w13, w2 = experts.w13.weight, experts.w2.weight
        for e in range(experts.num_experts):
            first, bias = w13[e], None if experts.w13.bias is None else experts.w13.bias[e]
            steps = (("gate", 0, 2), ("up", 1, 2)) if is_gated else (("up", 0, 1),)
            for role, start, step in steps:
                rows = rows_of(first, range(start, first.shape[0], step))
                own = None if bias is None else bias[start::step]
                yield Weight(f"{name}.{e}.{getattr(names, role)}", rows, own, _kind(experts))
            bias = None if experts.w2.bias is None else experts.w2.bias[e]
            yield Weight(f"{name}.{e}.{names.down}", w2[e], bias, _kind(experts))


def _expert_names(model: Any) -> _names.Projections:
    """The names of the layers of an expert in the checkpoints of this model: w1, or gate_proj, ..."""
    patterns = " ".join(
        pattern.replace("\\", "")
        for entry in get_model_conversion_mapping(model)
        for pattern in entry.source_patterns
    )
    others = (names for names in _names.EXPERTS[1:] if f".{names.gate}.weight" in patterns)
    return next(others, _names.EXPERTS[0])


def _ignored(model: Any, format: FormatName) -> Iterator[str]:
    """The modules that stay in float, by their names in a checkpoint: linear layers, routers and experts."""
    modules = dict(model.named_modules())
    names = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    names |= {f"{name}.*" for name, module in modules.items() if moe.is_experts(module)}
    quantized = [module for module in modules.values() if isinstance(module, WeightModule)]
    names |= {
        weight.name.rpartition(".")[0]
        for weight in float_weights(model, quantized, [])
        if weight.kind == "router"
    }
    renamed = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0) for name in names})
    for name in sorted(name.removesuffix(".weight") for name in renamed):
        experts = name.removesuffix(".*")
        yield name if name == experts else f"{FORMATS[format].below(experts)}.*"
