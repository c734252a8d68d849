"""Mixed checkpoints in a translation: layers in FP8 keep their bytes or become bfloat16, and are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from ..recipe import StoredActivations
from .formats import FORMATS, LAYERS, FormatName, LayerName, Scheme, StoredLayer, base
from .formats.layers import Stored
from .output import Slot, slots_of_layer
from .plan import Part, ignored_modules
from .runner import Made
from .source import CheckpointError, Source, TensorInfo

__all__ = ["of_module", "others_of", "scheme_of_mix", "slots_of_other", "translated_other"]


def others_of(
    source: Source, scheme: Scheme, weights: Mapping[str, object]
) -> dict[str, tuple[list[str], LayerName]]:
    """The tensors and the format of each module in a format of LAYERS.

    Raises:
        CheckpointError: a tensor is missing, or is not what the config says; the text names it.
    """
    find, found, problems = scheme.lookup(), {}, list[str]()
    owners: dict[str, dict[str, TensorInfo]] = {}
    for name, info in source.tensors.items():
        module, _, suffix = name.rpartition(".")
        owners.setdefault(module, {})[suffix] = info
    for module, members in owners.items():
        kind = find(module)
        if kind in LAYERS:
            problems += LAYERS[kind].problems(module, members)
            parts = ("weight", LAYERS[kind].scale_of(members), "input_scale")
            found[module] = [f"{module}.{part}" for part in parts if part in members], kind
        elif "weight" in members and members["weight"].dtype == "F8_E4M3" and module not in weights:
            problems.append(
                f"{module}.weight has the dtype F8_E4M3, and config.json does not say that it is FP8"
            )
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"{source.folder}: {problems[0]}{more}")
    return found


def scheme_of_mix(
    source: Source,
    given: Scheme,
    target: FormatName,
    weights: Iterable[str],
    others: Mapping[str, tuple[list[str], LayerName]],
    reasons: Mapping[str, str],
    kept: set[str],
) -> Scheme:
    """The scheme of a translated checkpoint, in which each module that is quantized is named if it is a mix.

    Raises:
        CheckpointError: the target holds no W4A16 beside W4A4, or no layer without a static scale.
    """
    find = given.lookup()
    kinds: dict[Stored, list[str]] = {}
    for module in weights:
        kind = find(module)
        kinds.setdefault(given.activations if kind is None or kind in LAYERS else kind, []).append(module)
    for module in kept:
        names, layer = others[module]
        if LAYERS[layer].has_input_scale and f"{module}.input_scale" not in names:
            raise CheckpointError(
                f"{source.folder}: {module}.input_scale is missing, must be there for {LAYERS[layer].title} "
                f"in the {target} format; --to fp4gemm makes such layers bf16"
            )
        kinds.setdefault(layer, []).append(module)
    if len(kinds) > 1 and not FORMATS[target].has_mixes:
        both = " and ".join(f"{kind} ({names[0]})" for kind, names in kinds.items())
        raise CheckpointError(
            f"{source.folder}: has layers with the activations {both}, which the {target} format cannot hold"
        )
    quantized = {*weights, *kept}
    ignore = tuple(ignored_modules(source.tensors, reasons, quantized, target))
    plain = replace(given, format=target, ignore=ignore, targets=("Linear",), groups=(), producer=None)
    if len(kinds) < 2:
        return replace(plain, activations=cast(StoredActivations, next(iter(kinds))))
    activations, groups = base.in_order(kinds, str(source.folder))
    first = tuple(sorted(kinds[activations]))
    return replace(plain, activations=activations, targets=first, groups=groups)


def of_module(scheme: Scheme, kind: Stored | None) -> Scheme:
    """The scheme with the activations of one NVFP4 module of a mix."""
    if kind is None or kind in LAYERS or not scheme.groups:
        return scheme
    return replace(scheme, activations=cast(StoredActivations, kind), targets=("Linear",), groups=())


def slots_of_other(
    infos: Sequence[TensorInfo], module: str, layer: LayerName, target: FormatName | None
) -> list[Slot]:
    """The tensors that a module in a format of LAYERS becomes; in bfloat16 where target is None."""
    n, k = infos[0].shape
    if target is None:
        return [Slot.of(f"{module}.weight", "BF16", (n, k))]
    made = slots_of_layer(module, (n, k), layer, target, infos[1].dtype)
    for info in infos[2:]:
        made.append(Slot.of(f"{module}.input_scale", info.dtype, () if target == "modelopt" else (1,)))
    return made


def translated_other(
    module: str, layer: LayerName, target: FormatName | None, parts: dict[Part, Tensor], measured: bool
) -> Made:
    tensors = {name: tensor.cpu() for (name, _), tensor in parts.items()}
    try:
        stored = StoredLayer.read(tensors, module, layer)
        if target is None:
            return Made({f"{module}.weight": stored.dequantize()})
        made = stored.tensors(module, target)
        given = f"{module}.input_scale"
        if given in tensors:
            made[given] = tensors[given].reshape(() if target == "modelopt" else (1,))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error
    return Made({name: tensor.contiguous() for name, tensor in made.items()})
