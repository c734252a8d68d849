"""The numbers of a conversion: from the matrices of a fused set to the tensors of the new checkpoint.

Files, plans of models and streams of tensors all come here, so that they give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import InputStatistics
from .errors import CheckpointError
from .formats import FORMATS, Scheme, StoredWeight
from .inputs import Inputs
from .numerics import quantize_calibrated
from .options import Options
from .plan import FusedSet, Matrix

__all__ = ["Converted", "convert_set", "label", "tensors_of"]


@dataclass(frozen=True)
class Converted:
    """The quantized weights of a fused set.

    Attributes:
        floats: the float matrices, views of the tensors of the checkpoint.
        stored: the quantized weight of each matrix, on the device where it was quantized.
        notes: for each matrix, in words, what was done otherwise than asked for.
        inputs: the statistics of the input of each matrix, empty without calibration.
    """

    floats: list[Tensor]
    stored: list[StoredWeight]
    notes: list[str]
    inputs: list[InputStatistics]


def convert_set(
    one: FusedSet,
    tensors: Mapping[tuple[str, int | None], Tensor],
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
    found = [] if inputs is None else [inputs.of(matrix, device) for matrix in one.matrices]
    try:
        made = quantize_calibrated(
            dict(zip(names, floats, strict=True)),
            {name: known for name, (known, _) in zip(names, found, strict=False)},
            options.weights,
            format=options.format,
            shared_amax=not one.is_stack,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    added = [note for _, note in found] or [""] * len(names)
    notes = [
        "; ".join(filter(None, (note, *made[name].notes))) for name, note in zip(names, added, strict=True)
    ]
    return Converted(floats, [made[name].weight for name in names], notes, [known for known, _ in found])


def tensors_of(
    one: FusedSet, stored: list[StoredWeight], scheme: Scheme, options: Options
) -> dict[str, Tensor]:
    """The tensors of the new checkpoint for a set, by name, on the device where the set was quantized."""
    about = FORMATS[scheme.format]
    made = [weight.tensors(matrix.module) for matrix, weight in zip(one.matrices, stored, strict=True)]
    found: dict[str, Tensor] = {}
    if one.is_stack:
        for name in made[0]:
            parts = [tensors[name] for tensors in made]
            found[name] = (
                torch.stack(parts) if parts[0].numel() > 1 else torch.cat([x.view(1) for x in parts])
            )
    for tensors in made if not one.is_stack else []:
        found |= tensors
    if scheme.has_input_scales:
        for module in dict.fromkeys(matrix.module for matrix in one.matrices):
            found |= about.input_tensors(module, _static(module, options))
    device = stored[0].codes.device
    return {name: tensor.to(device).contiguous() for name, tensor in found.items()}


def label(matrix: Matrix) -> str:
    """The name of a matrix in errors and reports: its tensor, and which part of the tensor it is."""
    if matrix.expert is None:
        return matrix.source
    half = {"all": "", "first": ", gate", "second": ", up"}[matrix.half]
    return f"{matrix.source} (expert {matrix.expert}{half})"


def _static(module: str, options: Options) -> Tensor | None:
    if options.activations != "static":
        return None
    return torch.tensor([options.activation_amax[module]], dtype=torch.float32)
