"""record_statistics: how well the operands of a model's layers are quantized while it trains.

The layers do not change: while statistics are recorded, functional.py shows each call to the recorder, which
quantizes x, W and dy once more by the casts of the recipe and adds numbers to tensors of the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _checks
from .._formats import MXFP8, NVFP4
from ..containers.mxfp8 import MXFP8Tensor
from ..containers.nvfp4 import NVFP4Tensor
from ..reference.hadamard import rotate
from . import _balance, _copies, functional
from ._gathered import GatheredWeight
from .linear import RecipeLayer
from .recipe import OPERANDS, Cast, Recipe

__all__ = ["OperandStatistics", "StatisticsRecorder", "record_statistics"]

_SUMS = 6  # elements, underflows, saturated, sum of squares, sum of squared errors; and the amax


class OperandStatistics(NamedTuple):
    """One operand of a layer, over the calls that were recorded.

    Attributes:
        elements: how many; 0 where no call had this operand. The others are then NaN, and amax 0.
        amax: the largest magnitude, after the rotation if the operand is rotated.
        underflow: the share of elements that are not 0 and became 0.
        saturation: the share of elements beyond the largest magnitude that their block can hold, which is
            theirs then.
        sqnr: the ratio of the sum of squares to the sum of squared errors, in dB; inf without any error.
    """

    elements: int
    amax: float
    underflow: float
    saturation: float
    sqnr: float


class StatisticsRecorder:
    """What :func:`record_statistics` returns: it records between ``__enter__`` and ``__exit__``."""

    def __init__(self, model: torch.nn.Module, operands: Sequence[str]) -> None:
        self._model, self._operands = model, tuple(operands)
        self._sums: dict[tuple[str, str], Tensor] = {}
        for name, parameter in self._weights():
            for operand in self._operands:
                self._sums[name, operand] = torch.zeros(_SUMS, dtype=torch.float64, device=parameter.device)
        if not self._sums:
            raise ValueError("model: has no layer of fp4gemm.training, must have one")

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the layers by name: that of the layer, and of stacked experts the parameter's."""
        for name, module in self._model.named_modules():
            if not isinstance(module, RecipeLayer) or not isinstance(module, torch.nn.Module):
                continue
            if module._is_sharded:
                raise NotImplementedError(
                    f"model: layer {name!r} is sharded by tensor parallelism, must have a whole weight"
                )
            for of, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1 and not re.search(r"bias\d*$", of):  # a norm inside has one dimension
                    is_layers = re.fullmatch(r"weight\d*", of)  # weight0 and on: each expert has its own
                    yield name if is_layers else f"{name}.{of}".lstrip("."), parameter

    def __enter__(self) -> StatisticsRecorder:
        if self._observe in functional.OBSERVERS:
            raise RuntimeError("statistics: are being recorded already, must be left before they are entered")
        functional.OBSERVERS.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        functional.OBSERVERS.remove(self._observe)

    def reset(self) -> None:
        """Forget what was recorded. Does not synchronise."""
        for sums in self._sums.values():
            sums.zero_()

    def read(self) -> dict[str, dict[str, OperandStatistics]]:
        """The statistics by layer and operand. Waits for the device."""
        made: dict[str, dict[str, OperandStatistics]] = {}
        for (name, operand), sums in self._sums.items():
            elements, underflows, saturated, squares, errors, amax = sums.tolist()
            made.setdefault(name, {})[operand] = OperandStatistics(
                int(elements),
                amax,
                underflows / elements if elements else math.nan,
                saturated / elements if elements else math.nan,
                math.nan if not squares else math.inf if not errors else 10 * math.log10(squares / errors),
            )
        return made

    def _name_of(self, weight: Tensor) -> str | None:
        for name, parameter in self._weights():
            own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if weight is parameter or weight is own or weight._base is own:
                return name
        return None

    def _observe(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: _copies.Weight,
        offs: Tensor | None,
        y: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> None:
        """Record x and W of a call now, and dy when y gets its gradient."""
        if torch.compiler.is_compiling():
            raise RuntimeError("statistics are recorded outside of torch.compile only")
        name = self._name_of(_copies.parameters_of(weight)[0])
        if name is None:
            return
        needs_dx, needs_dw, _ = needs
        if isinstance(weight, GatheredWeight) and {"w", "w_t"} & set(self._operands):
            raise NotImplementedError(
                f"operands: got {list(self._operands)}, must be without 'w' and 'w_t' for {name!r}, whose "
                "weight FSDP2 gathers in NVFP4: its values are on no rank"
            )
        rows = x.detach().reshape(-1, x.shape[-1])
        with torch.no_grad():
            self._record(name, "x", recipe.x, rows, -1, recipe, offs)
            if not isinstance(weight, GatheredWeight):
                matrices = _copies.whole(weight).detach()
                self._record(name, "w", recipe.w, matrices, -1, recipe)
                if needs_dx:
                    self._record(name, "w_t", recipe.w_t, matrices, 0, recipe)
            if needs_dw and not recipe.balance_tokens:
                self._record(name, "x_t", recipe.x_t, rows, 0, recipe, offs)

        def of_gradient(dy: Tensor) -> None:
            dy = dy.detach().reshape(-1, dy.shape[-1])
            with torch.no_grad():
                if needs_dx:
                    self._record(name, "dy", recipe.dy, dy, -1, recipe, offs)
                c = None
                if needs_dw and recipe.balance_tokens:
                    c, inverse = _balance.token_scales(_balance.row_amax(rows), _balance.row_amax(dy))
                    self._record(name, "x_t", recipe.x_t, rows, 0, recipe, offs, inverse)
                if needs_dw:
                    self._record(name, "dy_t", recipe.dy_t, dy, 0, recipe, offs, c)

        if y.requires_grad:
            y.register_hook(of_gradient)

    def _record(
        self,
        name: str,
        operand: str,
        cast: object,
        values: Tensor,
        axis: int,
        recipe: Recipe,
        offs: Tensor | None = None,
        token_scales: Tensor | None = None,
    ) -> None:
        """Record one operand; token_scales float32 (m, 1), by which the rows are multiplied before it."""
        if operand not in self._operands or not isinstance(cast, Cast) or values.numel() == 0:
            return
        ends = offs
        if offs is None and axis == 0 and values.dim() == 2:
            ends = _copies.dense_ends(values.shape[0], values.device)
        state = torch.zeros(2, dtype=torch.int64, device=values.device)
        source = values
        if cast.source == "rowwise":
            forward = recipe.w if operand == "w_t" else recipe.x
            if not isinstance(forward, Cast):
                raise RuntimeError(f"{operand}: the recipe has no forward copy")
            source = _copies.quantized(values, -1, forward, recipe, state, offs).dequantize(values.dtype)
        if token_scales is not None:
            source, values = (_balance.scaled(t, token_scales) for t in (source, values))
        copy = _copies.quantized(source, axis, cast, recipe, state, ends)
        wanted = values.float() if axis == -1 else values.float().mT
        count: Tensor | int = wanted.numel()
        if offs is not None:
            inside = torch.arange(values.shape[0], device=values.device) < offs[-1]
            wanted = torch.where(inside.unsqueeze(1) if axis == -1 else inside, wanted, 0)
            count = offs[-1] * values.shape[1]
        if axis == 0 and ends is not None:
            about = NVFP4 if cast.format == "nvfp4" else MXFP8
            wanted = _in_columns(wanted, ends, copy.shape[1], about.group_columns)
        if cast.hadamard is not None:
            blocks = wanted.reshape(-1, _checks.BLOCK)
            wanted = rotate(blocks, recipe.hadamard_signs, cast.hadamard == "bf16").view(wanted.shape)
        _add(self._sums[name, operand], wanted, copy, count)


def _is_largest(copy: NVFP4Tensor | MXFP8Tensor) -> Tensor:
    """Whether each element has the largest magnitude of its format, 6 or 448."""
    if isinstance(copy, MXFP8Tensor):
        return copy.values.view(torch.uint8) & 0x7F == 0x7E
    low, high = (codes & 7 == 7 for codes in (copy.codes, copy.codes >> 4))
    return torch.stack((low, high), -1).flatten(-2)


def _add(sums: Tensor, wanted: Tensor, copy: NVFP4Tensor | MXFP8Tensor, count: Tensor | int) -> None:
    """Add the numbers of one operand; nothing is read from the device."""
    got = copy.dequantize(torch.float32)
    magnitudes = wanted.abs()
    # A value at the end of its block's range may exceed what dequantize returns by a rounding or two.
    is_saturated = _is_largest(copy) & (magnitudes > got.abs() * (1 + 2**-20))
    numbers = (
        ((got == 0) & (wanted != 0)).sum(dtype=torch.float64),
        is_saturated.sum(dtype=torch.float64),
        wanted.square().sum(dtype=torch.float64),
        (got - wanted).square().sum(dtype=torch.float64),
    )
    sums[0] += count
    sums[1:5] += torch.stack(numbers)
    sums[5] = torch.maximum(sums[5], magnitudes.amax().double())


def _in_columns(rows: Tensor, offs: Tensor, width: int, step: int) -> Tensor:
    """The columns (k, m) of groups in the places where the quantizers put them, (k, width).

    Each group begins at a multiple of step.
    """
    ends = offs.to(torch.int64)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + step - 1) // step * step
    shift = (padded.cumsum(0) - padded) - (ends - sizes)
    column = torch.arange(rows.shape[1], device=rows.device)
    group = torch.searchsorted(ends, column, right=True)
    place = torch.where(group < ends.shape[0], column + shift[group.clamp(max=ends.shape[0] - 1)], width)
    made = rows.new_zeros(rows.shape[0], width + 1)
    return made.index_copy_(1, place, rows)[:, :width]


def record_statistics(model: torch.nn.Module, operands: Sequence[str] = OPERANDS) -> StatisticsRecorder:
    """Record how well the operands of a model's layers are quantized, for the calls within a with statement::

        statistics = training.record_statistics(model)
        for step, (x, target) in enumerate(batches):
            with statistics if step % 100 == 0 else contextlib.nullcontext():
                loss(model(x), target).backward()
        print(statistics.read()["layers.0.up"]["dy"].sqnr)

    The layers compute the bits that they compute without it, and draw the same random numbers. Each operand
    that a call multiplies is quantized once more, so that such a step is several times as slow. Nothing
    synchronises until :meth:`StatisticsRecorder.read`. An operand that is rounded stochastically is measured
    with other random numbers than the call has. Calls that activation checkpointing repeats count twice.

    Args:
        model: a model with layers of fp4gemm.training: Linear, GroupedLinear, those of MoE, StackedExperts.
            Layers that are called as functions are not seen. Each rank has statistics of its own.
        operands: which of "x", "w", "dy", "w_t", "dy_t" and "x_t" (:class:`Recipe`). One that a layer's
            recipe does not quantize has 0 elements, as one of a product that is not computed has.

    Returns:
        A StatisticsRecorder, which may be entered any number of times. It has statistics by the names of
        layers, and of StackedExperts by those of their weights.

    Raises:
        TypeError, ValueError: naming the argument; the model has no such layer.
        NotImplementedError: a layer is sharded by tensor parallelism. A call raises it if "w" or "w_t" is of
            a weight that FSDP2 gathers in NVFP4, and RuntimeError while torch.compile traces it.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    if not isinstance(operands, (list, tuple)) or not operands:
        raise TypeError(f"operands: got {_checks.describe(operands)}, must be a list or tuple of names")
    for i, operand in enumerate(operands):
        _checks.is_one_of(f"operands[{i}]", operand, OPERANDS)
    return StatisticsRecorder(model, operands)
