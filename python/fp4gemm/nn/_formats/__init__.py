"""The formats of weights of layers for inference, one file each; FORMATS has them by their names."""

from __future__ import annotations

from ... import _checks, _formats
from ...containers.mxfp4 import MXFP4Tensor
from ...containers.mxfp8 import MXFP8Tensor
from ...containers.nvfp4 import NVFP4Tensor
from ...ops.parts import OperandParts
from .base import AMAX, BOUND, CODES, FORMATS, SCALES, FormatName, WeightFormat, interleaved
from .mxfp4 import MXFP4
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4

__all__ = [
    "AMAX",
    "BOUND",
    "CODES",
    "FORMATS",
    "SCALES",
    "FormatName",
    "Weight",
    "WeightFormat",
    "format_of",
    "format_of_parts",
    "interleaved",
]

FORMATS |= {each.name: each for each in (NVFP4, MXFP8, MXFP4)}
Weight = NVFP4Tensor | MXFP8Tensor | MXFP4Tensor  # the containers that are weights of layers


def format_of(weight: object, name: str = "weight") -> WeightFormat:
    """The format of a container; TypeError, naming the argument, for something else."""
    for each in FORMATS.values():
        if isinstance(weight, each.container):
            return each
    wanted = _checks.listing([each.container.__name__ for each in FORMATS.values()])
    raise TypeError(f"{name}: got {_checks.describe(weight)}, must be an {wanted}")


def format_of_parts(w: OperandParts) -> WeightFormat:
    """The format of the parts of a weight; prepacked bytes are NVFP4."""
    return FORMATS["nvfp4" if w.rows else _formats.format_of(w.data, w.scales).name]
