"""The numbers of a conversion: from the matrices of a fused set to the tensors of the new checkpoint.

Files, plans of models and streams of tensors all come here, so that they give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .. import _checks
from ..calibration.residual import residual_channels
from ..calibration.statistics import InputStatistics
from .calibration import Inputs, inputs_of
from .formats import FORMATS, LayerName, Scheme, StoredLayer, StoredWeight
from .formats.base import RESIDUAL
from .numerics import quantize_calibrated
from .options import Options
from .plan import FusedSet, Matrix, Part, Plan
from .source import DTYPES, CheckpointError

__all__ = ["Converted", "convert_set", "label", "quantize_named", "tensors_of"]


@dataclass(frozen=True)
class Converted:
    """The quantized weights of a fused set.

    Attributes:
        floats: the float matrices, views of the tensors of the checkpoint.
        stored: the quantized weight of each matrix, on the device where it was quantized; of StoredLayer for
            a set in a format of LAYERS.
        notes: for each matrix, in words, what was done otherwise than asked for.
        inputs: the statistics of the input of each matrix, empty without calibration.
        channels: the residual channels of all of them, int32; None: they have none.
    """

    floats: list[Tensor]
    stored: Sequence[StoredWeight | StoredLayer]
    notes: list[str]
    inputs: list[InputStatistics]
    channels: Tensor | None = None


def convert_set(
    one: FusedSet,
    tensors: Mapping[Part, Tensor],
    options: Options,
    inputs: Inputs | None = None,
) -> Converted:
    """Quantize a set together.

    Args:
        one: the set.
        tensors: the tensors of the set by name and expert (:attr:`FusedSet.parts`), on one device.
        options: the options of the conversion.
        inputs: the statistics that the method needs, which were compared with the plan.

    Raises:
        CheckpointError: a tensor has NaN or inf, or the tensors of the set have unequal dtypes; the text
            names the tensor.
    """
    floats = [matrix.of(tensors[matrix.source, matrix.expert]) for matrix in one.matrices]
    names = [label(matrix) for matrix in one.matrices]
    device = floats[0].device
    if one.layer is not None:
        return Converted(
            floats, _in_layer(dict(zip(names, floats, strict=True)), one.layer), [""] * len(names), []
        )
    found = [] if inputs is None else [inputs.of(matrix, device) for matrix in one.matrices]
    try:
        made = quantize_calibrated(
            dict(zip(names, floats, strict=True)),
            {name: known for name, (known, _) in zip(names, found, strict=False)},
            options.recipe,
            format=options.format,
            shared_amax=not one.is_stack,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    added = [note for _, note in found] or [""] * len(names)
    notes = [
        "; ".join(filter(None, (note, *made[name].notes))) for name, note in zip(names, added, strict=True)
    ]
    stored, known = [made[name].weight for name in names], [known for known, _ in found]
    return Converted(floats, stored, notes, known, _channels(one, floats, known, options))


def _channels(
    one: FusedSet, floats: Sequence[Tensor], inputs: Sequence[InputStatistics], options: Options
) -> Tensor | None:
    """The residual channels that the layers of a set share, since they read the same input."""
    count = one.residual_channels(options.residual_channels)
    if not count:
        return None
    errors = [known.quantization_error for known in inputs]  # which Inputs.check has found
    return residual_channels(floats, cast(list[Tensor], errors), count)


def _in_layer(floats: Mapping[str, Tensor], layer: LayerName) -> list[StoredLayer]:
    made = []
    for name, weight in floats.items():
        try:
            made.append(StoredLayer.of(weight, layer))
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return made


def tensors_of(one: FusedSet, converted: Converted, scheme: Scheme, options: Options) -> dict[str, Tensor]:
    """The tensors of the new checkpoint for a set, by name, on the device where the set was quantized."""
    stored = converted.stored
    about = FORMATS[scheme.format]
    made = [
        weight.tensors(matrix.module, scheme.format)
        if isinstance(weight, StoredLayer)
        else weight.tensors(matrix.module)
        for matrix, weight in zip(one.matrices, stored, strict=True)
    ]
    found = {name: tensor for tensors in made for name, tensor in tensors.items()}
    if one.is_stack:
        for name in found:
            parts = [tensors[name] for tensors in made]
            found[name] = torch.stack([x.view(()) if x.numel() == 1 else x for x in parts])
    if scheme.has_input_scales and one.layer is None:
        is_static = options.activations == "static"
        for module in dict.fromkeys(matrix.module for matrix in one.matrices):
            amax = torch.tensor([options.activation_amax[module]], dtype=torch.float32) if is_static else None
            found |= about.input_tensors(module, amax)
    if converted.channels is not None:
        found |= {f"{matrix.module}.{RESIDUAL}": converted.channels for matrix in one.matrices}
    device = stored[0].codes.device
    return {name: tensor.to(device).contiguous() for name, tensor in found.items()}


def label(matrix: Matrix) -> str:
    """The name of a matrix in errors and reports: its tensor, and which part of the tensor it is."""
    if matrix.expert is None:
        return matrix.source
    half = {"all": "", "first": ", gate", "second": ", up"}[matrix.half]
    return f"{matrix.source} (expert {matrix.expert}{half})"


def quantize_named(tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the NVFP4 checkpoint from those of the float model, one by one, in the order of arrival.

    The bytes are those of :func:`convert` with the same options; of the method "gptq" only with one thread of
    torch, which convert uses. A tensor that stays is passed on as it is. A fused set is passed on as soon as
    its last tensor has come, and until then its tensors are kept, so that memory holds the incomplete sets.
    Tensors may come in any order, and an update may leave sets out altogether.

    Args:
        tensors: (name, tensor) pairs, with the names, shapes and dtypes of the plan, on any device; a set is
            quantized on the device of its first tensor.
        plan: :meth:`Plan.of_model`, :meth:`Plan.of_shapes` or :meth:`Plan.of_checkpoint`.

    Yields:
        (name, tensor): names, dtypes and shapes of the format of the plan, on the device of the set. The
        scales of a KV cache come last, on the CPU.

    Raises:
        CheckpointError: a name is not in the plan or comes twice, a tensor has another shape or dtype or has
            NaN or inf, or the pairs end within a set: the text names the partners that are missing.
        TypeError: plan is no Plan, or a value is no tensor. ValueError: the calibration of the plan is a
            text.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {_checks.describe(plan)}, must be a fp4gemm.checkpoint.Plan")
    return _quantized(tensors, plan)


def _quantized(tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    scheme, inputs = plan.scheme(), inputs_of(plan)
    sets_of = plan.sources
    waiting: dict[str, Tensor] = {}
    left = {name: len(sets) for name, sets in sets_of.items()}
    seen: set[str] = set()
    for name, tensor in tensors:
        _check(name, tensor, plan, seen)
        seen.add(name)
        if name in plan.kept:
            yield name, tensor
            continue
        waiting[name] = tensor.detach()
        for one in sets_of[name]:
            sources = {matrix.source for matrix in one.matrices}
            if not sources <= waiting.keys():
                continue
            with torch.inference_mode():
                made = convert_set(one, _parts(one, waiting), plan.options, inputs)
                found = tensors_of(one, made, scheme, plan.options)
            yield from found.items()
            for source in sources:
                left[source] -= 1
                if left[source] == 0:
                    del waiting[source]
    if waiting:
        name = next(iter(waiting))
        missing = [m.source for one in sets_of[name] for m in one.matrices if m.source not in seen]
        raise CheckpointError(
            f"{name}: came without {', '.join(dict.fromkeys(missing))}, with which it shares an amax; "
            "must come together"
        )
    for name, number in plan.kv_scales().items():
        yield name, torch.tensor(number, dtype=torch.float32)


def _check(name: str, tensor: object, plan: Plan, seen: set[str]) -> None:
    if name not in plan.tensors:
        raise CheckpointError(f"{name}: is not in the plan, must be one of its {len(plan.tensors)} tensors")
    if name in seen:
        raise CheckpointError(f"{name}: comes twice, must come once")
    info, x = plan.tensors[name], _checks.is_tensor(name, tensor)
    if tuple(x.shape) != info.shape or x.dtype != DTYPES[info.dtype]:
        raise CheckpointError(
            f"{name}: is {x.dtype} of shape {tuple(x.shape)}, must be {DTYPES[info.dtype]} of shape "
            f"{info.shape}"
        )


def _parts(one: FusedSet, waiting: dict[str, Tensor]) -> dict[Part, Tensor]:
    device = waiting[one.matrices[0].source].device
    return {
        (name, expert): (waiting[name] if expert is None else waiting[name][expert]).to(device)
        for name, expert in one.parts
    }
