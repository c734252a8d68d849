"""Tensor and sequence parallelism: styles for torch's parallelize_module whose all-gather of x is in NVFP4.

:class:`SequenceColwiseParallel` shards the rows of a weight and gathers the tokens of x: each rank quantizes
its own tokens, and codes, block scales and amaxes travel, since the amax of a token needs no other token.
:class:`SequenceRowwiseParallel` shards the columns of a weight and reduce-scatters y. The collectives are
torch.distributed's, in the forward pass and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from .. import _checks
from ..nn._classes import become
from . import _checks as checks
from . import _copies, functional
from ._sequence import OnEveryRank, ScatterSum, Sharding, gathered_linear
from .linear import Linear
from .shared_input import QuantizedInput

__all__ = ["SequenceColwiseParallel", "SequenceRowwiseParallel"]


class ShardCache:
    """A cache of the copies of a DTensor's local shard; to_local() returns a new view in every pass."""

    def __init__(self, cache: _copies.Cache, weight: DTensor) -> None:
        self._cache, self._shard = cache, weight._local_tensor

    def keeps(self, weight: Tensor) -> bool:
        return self._cache.keeps(self._shard)

    def get(
        self, weight: Tensor, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        return self._cache.get(self._shard, make, variant)


class _ShardedLinear(Linear):
    """A training.Linear whose parameters are DTensors; the class of a layer that a style was applied to."""

    _sharding: Sharding
    _shares_input = False

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else cast(DTensor, self.bias).to_local()

    def _input(self, x: object, dim: int) -> Tensor:
        """This rank's x; a DTensor is brought to Shard(dim) first."""
        x = _checks.is_tensor("x", x)
        sequence_dim = self._sharding.dim
        if x.dim() < sequence_dim + 2:
            raise ValueError(
                f"x: shape is {tuple(x.shape)}, must have more than {sequence_dim + 1} dimensions, since "
                f"sequence_dim is {sequence_dim} and features are the last one"
            )
        if isinstance(x, DTensor):
            local: Tensor = x.redistribute(placements=[Shard(dim % x.dim())]).to_local()
            return local
        return x

    def _shard(self) -> tuple[Tensor, _copies.Cache | None]:
        """The local weight, and the cache of its copies."""
        weight = cast(DTensor, self.weight)
        if getattr(weight, "main_grad", None) is not None:
            raise NotImplementedError("weight.main_grad: is set, must not be with tensor parallelism")
        local: Tensor = weight.to_local()
        return local, None if self.cache is None else ShardCache(self.cache, weight)


class _ColwiseLinear(_ShardedLinear):
    """y (..., n / ranks) of the tokens of all ranks."""

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """This rank's features of y for all tokens, of this rank's tokens of x (..., k)."""
        x = self._input(input, self._sharding.dim)
        weight, cache = self._shard()
        return gathered_linear(x, weight, self._bias(), self._recipe, cache, self._sharding)


class _RowwiseLinear(_ShardedLinear):
    """y (..., n) of this rank's tokens."""

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """This rank's tokens of y, of this rank's features of x (..., k / ranks) for all tokens."""
        x = self._input(input, -1)
        dim, ranks = self._sharding.dim, self._sharding.mesh.size()
        if x.shape[dim] % ranks:
            raise ValueError(
                f"x: has {x.shape[dim]} tokens in dimension {dim}, must be a multiple of {ranks}, the ranks "
                "that y is scattered to"
            )
        weight, cache = self._shard()
        partial = functional.linear(x, weight, None, self._recipe, cache=cache)
        y: Tensor = ScatterSum.apply(partial, self._sharding)
        bias = self._bias()
        return y if bias is None else y + OnEveryRank.apply(bias, self._sharding).to(y.dtype)


def _check(module: object, mesh: DeviceMesh, what: str) -> Linear:
    """The layer that a style shards along ``what``, in_features or out_features."""
    if not isinstance(module, Linear):
        raise TypeError(
            f"module: got {_checks.describe(module)}, must be an fp4gemm.training.Linear, "
            "which convert_model makes"
        )
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh: has {mesh.ndim} dimensions, must have 1; pass mesh['tp'], say")
    if isinstance(module.weight, DTensor):
        raise ValueError("module: weight is a DTensor, must be a plain parameter; it is sharded once")
    if type(module) is not Linear:
        raise TypeError(f"module: is a {type(module).__name__}, must be an fp4gemm.training.Linear itself")
    step = mesh.size() * (1 if module.recipe.is_plain else checks.STEP)
    _checks.is_multiple("module", what, getattr(module, what), step)
    return module


class SequenceColwiseParallel(ColwiseParallel):
    """Shards the rows of W of a :class:`Linear`, and gathers the tokens of x in NVFP4.

    A style for ``torch.distributed.tensor.parallel.parallelize_module``. With R ranks, of which rank r has
    the tokens x_r and the rows W_r of W, rank r returns y_r = fprop(x, W_r) + bias_r for all tokens:

    * forward: x_r is quantized, and its codes, block scales and amaxes are gathered, 0.5625 bytes an element
      and 4 bytes a token. They equal the cast of the gathered x bit for bit. With tensor scaling a MAX
      all-reduce of one number precedes the cast.
    * dx_r: the sum over ranks of dgrad(dy_r, W_r^T), reduce-scattered in the dtype of dx. The addends are in
      that dtype already, and the backend determines the order of the sum.
    * dW_r = wgrad(dy_r^T, x^T). If x_t has source "rowwise" or is "dequantized", it follows from the gathered
      codes. Otherwise it is cast from x, which the backward pass gathers in its own dtype; the layer saves
      x_r alone.

    A recipe whose forward pass does not quantize x gathers x in its own dtype. With row scaling y and dW are
    those of one process bit for bit, unless a cast is stochastic; with tensor scaling the amaxes of W_r and
    dy_r are those of the shards. ``weight`` and ``bias`` become DTensors with the placement Shard(0).

    Args:
        sequence_dim: the dimension of x along which its tokens are sharded, in equal parts.

    Raises:
        TypeError: sequence_dim is no int; the module is no :class:`Linear`. ValueError: sequence_dim is
            negative, the mesh has more than one dimension, the weight is a DTensor already, or out_features
            is no multiple of 32 for each rank. In a forward pass ValueError for an x of too few dimensions,
            and NotImplementedError for a weight with main_grad.
    """

    def __init__(self, *, sequence_dim: int = 1) -> None:
        _checks.is_int("sequence_dim", sequence_dim, 0)
        super().__init__(input_layouts=Shard(sequence_dim))
        self.sequence_dim = sequence_dim

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer = _check(module, device_mesh, "out_features")
        self._partition_linear_fn("", layer, device_mesh)
        become(layer, _ColwiseLinear, _sharding=Sharding(device_mesh, self.sequence_dim))
        return layer

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class SequenceRowwiseParallel(RowwiseParallel):
    """Shards the columns of W of a :class:`Linear`, and reduce-scatters the tokens of y.

    A style for ``torch.distributed.tensor.parallel.parallelize_module``, the counterpart of
    :class:`SequenceColwiseParallel`. Rank r has the features x_r of all tokens and the columns W_r of W, and
    returns its tokens of the sum over ranks of fprop(x_r, W_r), plus the bias. The addends and the sum have
    the dtype of x, and the backend determines the order of the sum. The backward pass gathers dy in its own
    dtype. Every amax is that of a shard: a token of x_r has one, not one for all ranks. ``weight`` becomes a
    DTensor with the placement Shard(1), and ``bias`` one with Replicate(), whose gradient is summed over the
    ranks.

    Args:
        sequence_dim: the dimension of y along which its tokens are scattered, in equal parts.

    Raises:
        The errors of :class:`SequenceColwiseParallel`, with in_features for out_features; ValueError in a
        forward pass if the number of tokens is no multiple of the ranks.
    """

    def __init__(self, *, sequence_dim: int = 1) -> None:
        _checks.is_int("sequence_dim", sequence_dim, 0)
        super().__init__(output_layouts=Shard(sequence_dim))
        self.sequence_dim = sequence_dim

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer = _check(module, device_mesh, "in_features")
        self._partition_linear_fn("", layer, device_mesh)
        become(layer, _RowwiseLinear, _sharding=Sharding(device_mesh, self.sequence_dim))
        return layer

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"
