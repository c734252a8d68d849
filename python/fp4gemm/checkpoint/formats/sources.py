"""SourceFormat: a format whose weights are not NVFP4. Stack: the experts of a layer in such a checkpoint.

The weights of these formats become NVFP4 weights when they are read, or stay as they are for layers that hold
such weights. They are experts that are stored as one tensor for each product of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ... import _names
from ...containers.interop import MXFP4Report
from ...containers.mxfp4 import MXFP4Tensor
from ...containers.nvfp4 import NVFP4Tensor
from ...recipe import WeightFormatName, WeightScaling
from .base import FormatName, Json, Scheme, format_of

__all__ = ["SOURCES", "SourceFormat", "SourceName", "Stack"]

SourceName = Literal["mxfp4"]
BIASES = ("BF16", "F16", "F32")
MAX_NAMED = 5  # problems that one error lists


class Described(Protocol):
    """Dtype, as safetensors names it, and shape of a tensor of a checkpoint."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Stack(NamedTuple):
    """The weight (g, n, k) of one product of all experts of a layer.

    Attributes:
        name: the name of the weight, which its tensors extend: ``model.layers.0.mlp.experts.down_proj``.
        experts, n, k: its sizes. The n rows of gate and up alternate, beginning with gate.
        codes, scales: the names of its tensors.
        bias: that of its bias (g, n); "" without.
    """

    name: str
    experts: int
    n: int
    k: int
    codes: str
    scales: str
    bias: str

    @property
    def owner(self) -> str:
        """The module "experts"."""
        return self.name.rpartition(".")[0]

    @property
    def is_first(self) -> bool:
        """Whether it holds gate and up; otherwise it holds down."""
        return self.name.rpartition(".")[2] == _names.STACKED.gate_up

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors: codes, scales and, if there is one, the bias."""
        return (self.codes, self.scales, self.bias) if self.bias else (self.codes, self.scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFormat:
    """Everything about a format that is read, and becomes NVFP4 or stays as it is.

    A suffix follows the name of a weight in the name of a tensor.

    Args:
        name: the name of the format, which also is ``quant_method`` in config.json.
        codes: the suffix of the codes, (g, n, k/block, codes of a block).
        scales: the suffix of the scales, (g, n, k/block).
        bias: the suffix of a bias, (g, n).
        block: elements of k that share a scale.
        scale_dtypes: the dtypes of scales, as safetensors names them; those of codes are U8.
        e4m3_max: B of the NVFP4 weights.
        read: called with the value of ``quantization_config`` and its name for messages; returns the patterns
            of modules that stay in float. It raises ValueError for a key or value that is not known.
        check_model: called with config.json; raises ValueError for a model whose experts this library does
            not compute.
        operand: called with codes and scales of a matrix or of all experts, "row" or "tensor", and a function
            for a report; returns the operand, with a rounded value where NVFP4 has no equal one.
        weights: the format of the weights as they are, a value of ``InputKind.weights``.
        as_is: called with codes and scales of all experts; returns the operand with the same codes. It
            raises ValueError, naming the argument, for a scale that is NaN.
        stored: the inverse of ``as_is``.
        config: ``quantization_config`` of a checkpoint whose other modules are in float.
    """

    name: SourceName
    codes: str
    scales: str
    bias: str
    block: int
    scale_dtypes: tuple[str, ...]
    e4m3_max: int
    read: Callable[[Json, str], tuple[str, ...]]
    check_model: Callable[[Json], None]
    operand: Callable[[Tensor, Tensor, WeightScaling, Callable[[MXFP4Report], object]], NVFP4Tensor]
    weights: WeightFormatName
    as_is: Callable[[Tensor, Tensor], MXFP4Tensor]
    stored: Callable[[MXFP4Tensor], tuple[Tensor, Tensor]]
    config: Callable[[], Json]

    def scheme(self, config: Json, format: FormatName = "fp4gemm") -> Scheme:
        """The scheme of the NVFP4 weights in the given format; activations stay in 16 bits.

        Raises:
            ValueError: as ``read`` does.
        """
        ignore = self.read(config, "quantization_config")
        scaling: WeightScaling = "row" if format_of(format).has_row_scales else "tensor"
        return Scheme(format, "a16", ignore, e4m3_max=self.e4m3_max, scaling=scaling)

    def stacks(self, tensors: Mapping[str, Described]) -> list[Stack]:
        """The experts among the tensors of a checkpoint.

        Raises:
            ValueError: there are none, or a tensor is missing or has another dtype or shape; the text names
                the first of them.
        """
        ends = (self.codes, self.scales)
        names = {name.removesuffix(end): None for name in tensors for end in ends if name.endswith(end)}
        problems: list[str] = []
        found: dict[str, Stack] = {}
        for name in names:
            made = self._stack(name, tensors)
            if isinstance(made, str):
                problems.append(made)
            else:
                found[name] = made
        if not problems:
            for owner in dict.fromkeys(stack.owner for stack in found.values()):
                problems += _pair(owner, found)
        if problems:
            more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
            raise ValueError(
                f"{len(problems)} weights do not fit the {self.name} format: "
                f"{'; '.join(problems[:MAX_NAMED])}{more}"
            )
        if not found:
            raise ValueError(
                f"has no tensor that ends in {self.codes}, must have one in the {self.name} format"
            )
        return list(found.values())

    def _stack(self, name: str, tensors: Mapping[str, Described]) -> Stack | str:
        """The stack of this name, or what is wrong."""
        codes, scales, bias = f"{name}{self.codes}", f"{name}{self.scales}", f"{name}{self.bias}"
        if _names.stack_of(name) is None:
            wanted = " or ".join(
                f"experts.{child}" for child in (_names.STACKED.gate_up, _names.STACKED.down)
            )
            return f"{codes if codes in tensors else scales} is not known, its weight must be {wanted}"
        for one, other in ((codes, scales), (scales, codes)):
            if one not in tensors:
                return f"{one} is missing beside {other}"
        shape = tensors[codes].shape
        if len(shape) != 4 or shape[3] != self.block // 2 or 0 in shape:
            return f"{codes} has the shape {shape}, must be (g, n, k/{self.block}, {self.block // 2})"
        g, n, blocks, _ = shape
        parts = [(codes, ("U8",), shape), (scales, self.scale_dtypes, (g, n, blocks))]
        parts += [(bias, BIASES, (g, n))] if bias in tensors else []
        for key, dtypes, wanted_shape in parts:
            if tensors[key].dtype not in dtypes:
                return f"{key} has the dtype {tensors[key].dtype}, must be {' or '.join(dtypes)}"
            if tensors[key].shape != wanted_shape:
                return f"{key} has the shape {tensors[key].shape}, must be {wanted_shape}"
        return Stack(name, g, n, blocks * self.block, codes, scales, bias if bias in tensors else "")


def _pair(owner: str, found: Mapping[str, Stack]) -> list[str]:
    """What is wrong with the two products of a module of experts."""
    names = [f"{owner}.{child}" for child in (_names.STACKED.gate_up, _names.STACKED.down)]
    missing = [name for name in names if name not in found]
    if missing:
        return [f"{missing[0]} is missing beside {next(name for name in names if name in found)}"]
    first, second = (found[name] for name in names)
    if first.experts != second.experts or first.n != 2 * second.k or first.k != second.n:
        shapes = " and ".join(f"{each.name} {(each.experts, each.n, each.k)}" for each in (first, second))
        return [f"{shapes} are not the shapes of gated experts, (g, 2i, h) and (g, h, i)"]
    if bool(first.bias) != bool(second.bias):
        has, lacks = (first, second) if first.bias else (second, first)
        return [f"{lacks.name} has no bias, and {has.name} has one"]
    return []


SOURCES: dict[SourceName, SourceFormat] = {}  # the package enters every format
