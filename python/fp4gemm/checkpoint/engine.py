"""The numbers of a conversion: from the matrices of a fused set to the tensors of the new checkpoint.

Files, plans of models and streams of tensors all come here, so that they give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError
from .formats import FORMATS, Scheme, StoredWeight
from .numerics import quantize_set
from .options import Options
from .plan import FusedSet, Matrix

__all__ = ["Converted", "convert_set", "label", "tensors_of"]


@dataclass(frozen=True)
class Converted:
    """What a fused set became.

    Attributes:
        floats: its matrices, views of the tensors that they are parts of.
        stored: what each became, on the device where it was quantized.
    """

    floats: list[Tensor]
    stored: list[StoredWeight]


def convert_set(
    one: FusedSet, tensors: Mapping[tuple[str, int | None], Tensor], options: Options
) -> Converted:
    """Quantize a set together.

    Args:
        one: the set.
        tensors: what it is made of, by name and expert (:attr:`FusedSet.parts`), on one device.
        options: of the conversion.

    Raises:
        CheckpointError: a tensor has NaN or inf, or the tensors of the set have unequal dtypes; the text
            names the tensor.
    """
    floats = [matrix.of(tensors[matrix.source, matrix.expert]) for matrix in one.matrices]
    names = [label(matrix) for matrix in one.matrices]
    try:
        made = quantize_set(
            dict(zip(names, floats, strict=True)),
            options.weights,
            format=options.format,
            shared_amax=not one.is_stack,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return Converted(floats, [made[name] for name in names])


def tensors_of(
    one: FusedSet, stored: list[StoredWeight], scheme: Scheme, options: Options
) -> dict[str, Tensor]:
    """The tensors of the new checkpoint for a set, by name, on the device where it was quantized."""
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
    """What errors and reports call a matrix: its tensor, and which part of it."""
    if matrix.expert is None:
        return matrix.source
    half = {"all": "", "first": ", gate", "second": ", up"}[matrix.half]
    return f"{matrix.source} (expert {matrix.expert}{half})"


def _static(module: str, options: Options) -> Tensor | None:
    if options.activations != "static":
        return None
    return torch.tensor([options.activation_amax[module]], dtype=torch.float32)
