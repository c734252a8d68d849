"""Megatron-Core trains by a recipe of fp4gemm: a layer spec whose linear layers are those of fp4gemm.

:func:`convert_spec` takes a spec that Megatron-Core made, for its own layers or for TransformerEngine's, and
returns one that builds the layers below in their place. Parameters, their names, their initialisation, the
state_dict and the sharded_state_dict are those of the layers that are replaced, so that checkpoints,
optimizers and programs that read parameters by name need no change. docs/megatron.md has examples.

megatron-core 0.16 or newer is needed; importing this module imports it.
"""

from __future__ import annotations

from ._grouped import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from ._linear import ColumnParallelLinear, LayerNormColumnParallelLinear, RowParallelLinear
from ._norm import Norm
from ._spec import convert_spec

__all__ = [
    "ColumnParallelGroupedLinear",
    "ColumnParallelLinear",
    "LayerNormColumnParallelLinear",
    "Norm",
    "RowParallelGroupedLinear",
    "RowParallelLinear",
    "convert_spec",
]
