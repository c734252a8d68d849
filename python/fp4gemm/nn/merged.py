"""Linear layers that read the same tensor, as one weight and one product.

The code of the model stays as it is: it calls a :class:`Part` where it called a layer. The first part makes
the product of all of them, and hands each other part its columns if it is called with the same tensor. A part
that is called with another tensor makes the product itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import _checks
from .._refusals import REFUSALS, explained
from ..activations import ActivationName, by_name
from ..containers.decoded import DecodedTensor
from ..containers.fp8 import FP8Tensor
from ..containers.nvfp4 import NVFP4Tensor
from ..stacks import join_rows
from ._formats import Weight, format_of
from ._hooks import carry_over
from ._inputs import check_bias, shared_input
from ._weight import _EXCHANGE, bound_of, version
from .linear import _LINEAR as LINEAR
from .linear import Linear
from .norm import Tokens

Columns = dict[int, Tensor]


class MergedLinear(Linear):
    """A Linear whose output features are those of several layers.

    Attributes:
        sizes: the output features of each layer.
        activation: None, or the gated activation of the epilogue; gate and up are then interleaved rows.
    """

    sizes: tuple[int, ...] = ()
    activation: ActivationName | None = None
    # While Dynamo traces: the input of the last product, and the columns that were not asked for yet. The
    # last part resets it, so that the compiled function neither reads nor keeps anything.
    _traced: tuple[Tensor | Tokens, Columns] | None = None

    def forward(
        self, x: Tensor | NVFP4Tensor | DecodedTensor | FP8Tensor | Tokens, c: Tensor | None = None
    ) -> Tensor:
        """The product as in :class:`fp4gemm.nn.Linear`, and the activation; a fused norm may quantize x."""
        if type(x) is Tokens:
            return self._of_tokens(x, c)
        if self.activation is not None and isinstance(x, Tensor) and x.dtype is torch.float32:
            # The epilogue of a gated activation does not write float32.
            if c is not None:
                raise NotImplementedError(
                    f"activation: got {self.activation} with c, must be another one, or c None"
                )
            return by_name[self.activation](self._checked_forward(x, activation=0))
        return super().forward(x, c)  # type: ignore[arg-type]

    def _of_tokens(self, x: Tokens, c: Tensor | None) -> Tensor:
        data, scales, amax, e4m3_max = x.quantized._operand_parts()[:4]
        data = data.view(*x.shape[:-1], data.shape[-1])
        arguments = self._known_arguments()
        if arguments is not None and x.shape[-1] == self.in_features:
            of_x = (scales, amax, e4m3_max, self._batch_invariant, self.use_fast_accum, None, x.dtype)
            try:
                result: Tensor = LINEAR(data, *arguments[:7], self._epilogue(), c, 1.0, *of_x)
            except REFUSALS as error:
                return explained("fp4gemm.nn: merged layers", error, self._checked_of_tokens, x, data, c)
            return result
        return self._checked_of_tokens(x, data, c)

    def _checked_of_tokens(self, x: Tokens, data: Tensor, c: Tensor | None) -> Tensor:
        self._require_weight()
        device, activations = self._device, self.activations
        k, num_residual = self._held_shape[-1], self.num_residual
        parts = shared_input(x.quantized, k, device, activations, num_residual)._replace(data=data)
        return self._multiply(parts, c=c, out_dtype=x.dtype)

    def _epilogue(self) -> int:
        return by_name[self.activation].number

    def update_(
        self,
        weight: Tensor | Weight | Sequence[Tensor | Weight | None],
        bias: Tensor | None = None,
    ) -> MergedLinear:
        """Write another weight, as :meth:`fp4gemm.nn.Linear.update_` does: all rows, or those of some layers.

        Args:
            weight: the whole weight (n, k), whose rows are in the order of this layer; or a sequence of the
                weights of the parts, (sizes[i], k) each, None for one that stays. Float parts are quantized
                as ``weight_scaling`` of this layer says, with an amax for each row, or each by the recipe of
                its layer.
            bias: (n,), of all parts; None keeps it.

        Raises:
            TypeError, ValueError: as for Linear, also for a sequence that does not fit ``sizes``.
        """
        with _EXCHANGE:  # no other thread may write between the read of the parts that stay and the write
            if isinstance(weight, (list, tuple)):
                weight = self._joined(weight)
            elif isinstance(weight, Tensor) and self.weight_recipe is not None and len(self.sizes) > 1:
                raise ValueError(
                    f"weight: got {_checks.describe(weight)}, must be a sequence of the weights of the "
                    f"{len(self.sizes)} parts, each of which the recipe of this layer casts by itself"
                )
            return super().update_(weight, bias)  # type: ignore[arg-type]

    def _joined(self, weights: Sequence[Tensor | Weight | None], names: Sequence[str] = ()) -> Weight:
        """The whole weight, in which those that are given replace the ones at hand; a copy.

        ``names`` are those of the arguments in errors, by default weight[0], weight[1] and so on.
        """
        if len(weights) != len(self.sizes):
            raise ValueError(f"weight: got {len(weights)} weights, must be {len(self.sizes)} or one tensor")
        self._require_weight()
        parts = []
        with torch.inference_mode(False), torch.no_grad():
            held = self.weight
            for index, w in enumerate(weights):
                label = names[index] if names else f"weight[{index}]"
                shape = (self.sizes[index], self.in_features)
                if w is None:
                    parts.append(rows_of(held, self._rows(index)))
                    continue
                new = self._quantized(label, w, shape)
                if bound_of(new) != self.e4m3_max:
                    raise ValueError(f"{label}: e4m3_max is {bound_of(new)}, must be {self.e4m3_max}")
                parts.append(new)
            whole: Weight = self._format.joined(parts, is_interleaved=self.activation is not None)
            return whole

    def _rows(self, index: int) -> range:
        """The rows of a part."""
        if self.activation is not None:
            return range(index, self.out_features, len(self.sizes))
        start = sum(self.sizes[:index])
        return range(start, start + self.sizes[index])

    def _write(self, parts: dict[str, Tensor]) -> None:
        super()._write(parts)
        last: _Product | None = getattr(_LAST, "product", None)
        if last is not None and last.merged() is self:
            _LAST.product = None  # columns of the old weight

    def _take_traced(self, x: Tensor | Tokens, index: int) -> Tensor | None:
        """The columns of a part from the last product of the traced graph, if it was made of this x."""
        if self._traced is None or self._traced[0] is not x or index not in self._traced[1]:
            return None
        columns = self._traced[1]
        kept = columns.pop(index)
        if not columns:
            self._traced = None
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_traced": None}


class _Product:
    """The product that was made last in a thread, with the columns of the parts that were not called yet.

    It lives until the last part has been called, the next product is made or x is gone. It keeps neither x
    nor the merged layer alive.
    """

    __slots__ = ("columns", "merged", "version", "x")

    def __init__(self, merged: MergedLinear, x: Tensor | Tokens, columns: Columns) -> None:
        self.merged = weakref.ref(merged)
        self.version = _version(x)
        self.columns = columns
        self.x = weakref.ref(x, lambda _: columns.clear())


_LAST = threading.local()


def _version(x: Tensor | Tokens) -> tuple[int | None, bool]:
    """A value that changes if x is written, or if autograd begins or ceases to record."""
    return version(x) if isinstance(x, Tensor) else None, torch.is_grad_enabled()


class Part(torch.nn.Module):
    """One of the layers of a MergedLinear, under its old name in the model.

    It has no tensors of its own; ``weight`` and ``bias`` are made from those of the merged layer.
    """

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        # In a tuple, so that the merged layer is not registered as a child a second time.
        self._merged = (merged,)
        self.index = index
        self.start = sum(merged.sizes[:index])
        self.in_features, self.out_features = merged.in_features, merged.sizes[index]
        self.training = merged.training

    @property
    def merged(self) -> MergedLinear:
        return self._merged[0]

    @property
    def weight(self) -> Weight:
        """The rows of this layer (n, k), in a container with a copy of its scales."""
        return rows_of(self.merged.weight, range(self.start, self.start + self.out_features))

    @property
    def bias(self) -> Tensor | None:
        bias = self.merged.bias
        return None if bias is None else bias[self.start : self.start + self.out_features]

    def update_(self, weight: Tensor | Weight, bias: Tensor | None = None) -> Part:
        """Write another weight (n, k) into the rows of this layer: :meth:`MergedLinear.update_`.

        The merged layer writes all its rows again. To replace several parts call its ``update_`` once.
        """
        weights: list[Tensor | Weight | None] = [None] * len(self.merged.sizes)
        weights[self.index] = weight
        whole = None
        with _EXCHANGE:
            if bias is not None:
                held = self.merged.bias
                if held is None:
                    raise ValueError("bias: got a tensor, must be None: there is no bias")
                new = check_bias(bias, self.out_features, device=held.device).detach().to(torch.float32)
                whole = held.clone()
                whole[self.start : self.start + self.out_features] = new
            self.merged.update_(weights, whole)
        return self

    def forward(self, x: Tensor | Tokens) -> Tensor:
        """Columns of ``merged(x)``: (..., n), a slice, whose rows are not contiguous."""
        merged = self._merged[0]
        # Dynamo compares tensors by identity while it traces, but knows no weak references to them.
        is_traced = torch.compiler.is_dynamo_compiling()
        if self.index > 0:
            kept = merged._take_traced(x, self.index) if is_traced else _take(merged, x, self.index)
            if kept is not None:
                return kept
        columns: Columns = dict(enumerate(merged(x).split_with_sizes(merged.sizes, -1)))
        own = columns.pop(self.index)
        if self.index == 0:
            if is_traced:
                merged._traced = (x, columns)
            else:
                _LAST.product = _Product(merged, x, columns)
        return own

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, start={self.start}"


def _take(merged: MergedLinear, x: Tensor | Tokens, index: int) -> Tensor | None:
    """The columns of a part from the last product, if that was made of this x."""
    last: _Product | None = getattr(_LAST, "product", None)
    if last is None or last.merged() is not merged or last.x() is not x or last.version != _version(x):
        return None
    kept = last.columns.pop(index, None)
    if not last.columns:
        _LAST.product = None
    return kept


def rows_of(weight: Weight, rows: range) -> Weight:
    """Rows of a matrix (n, k), every ``rows.step``-th of them, as a matrix of its own; copies."""
    picked: Weight = format_of(weight).rows(weight, slice(rows.start, rows.stop, rows.step))
    return picked


def why_not_one_weight(layers: Sequence[Linear]) -> str:
    """Why the layers cannot have one weight; "" if they can."""
    first = layers[0]
    options = ("activations", "check_finite", "use_fast_accum", "batch_invariant", "weight_recipe")
    for name in ("in_features", "format_name", *options, "e4m3_max", "dtype", "training"):
        if any(getattr(layer, name) != getattr(first, name) for layer in layers):
            return f"their {name} differs"
    if any(not _is_equal(layer.residual_channels, first.residual_channels) for layer in layers):
        return "their residual_channels differ"
    if len({(layer._device, _execution_device(layer)) for layer in layers}) > 1:
        return "they are on several devices"
    if any(layer._is_offloaded() for layer in layers):
        return "their weights are offloaded"
    return ""


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.device == b.device and torch.equal(a, b)


def _execution_device(layer: Linear) -> str:
    return str(getattr(vars(layer).get("_hf_hook"), "execution_device", None))


def layer_like(layer: Linear, weight: Weight, bias: Tensor | None) -> MergedLinear:
    """A layer of one part with this weight and bias, and with the options and the hook of another layer."""
    made = cast(
        MergedLinear,
        MergedLinear.from_quantized(
            weight,
            bias,
            activations=layer.activations,
            check_finite=layer.check_finite,
            use_fast_accum=layer.use_fast_accum,
            residual_channels=layer.residual_channels,
        ),
    )
    made.batch_invariant = layer.batch_invariant
    made.sizes = (made.out_features,)
    made.weight_recipe = layer.weight_recipe
    carry_over(layer, made)
    return made.train(layer.training)


def one_weight(layers: Sequence[Linear], *, is_interleaved: bool = False) -> MergedLinear:
    """A layer with the rows of all layers: one layer after another, or row i of each, then row i + 1.

    No code, block scale or amax changes, so every row of the product keeps its value. A weight with one amax
    gets it for each row. A layer without a bias gets -0.0 beside others that have one, since z + -0.0 is z
    for every z.
    """

    first = layers[0]
    with torch.inference_mode(False), torch.no_grad():
        weights = [layer.weight for layer in layers]
        weight = first._format.joined(weights, is_interleaved=is_interleaved)
        bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [
                layer.bias
                if layer.bias is not None
                else torch.full((layer.out_features,), -0.0, dtype=torch.float32, device=w.device)
                for layer, w in zip(layers, weights, strict=True)
            ]
            bias = join_rows(biases, -1, is_interleaved)
        merged = layer_like(first, weight, bias)
    merged.sizes = tuple(layer.out_features for layer in layers)
    return merged


def merged_name(names: Sequence[str]) -> str:
    """A name for layers that were merged: q_proj, k_proj, v_proj -> qkv_proj; gate, up -> gate_up."""
    suffix = names[0][names[0].rfind("_") :] if "_" in names[0] else ""
    if not all(name.endswith(suffix) and name != suffix for name in names):
        suffix = ""
    stems = [name.removesuffix(suffix) for name in names]
    head = stems[0].rpartition("_")[0] + "_" if "_" in stems[0] else ""
    if not all(stem.startswith(head) and stem != head for stem in stems):
        head = ""
    stems = [stem.removeprefix(head) for stem in stems]
    return head + ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + suffix
