"""Tensor and sequence parallelism: styles for torch's parallelize_module whose all-gather of x is in NVFP4.

:class:`SequenceColwiseParallel` shards the rows of a weight and gathers the tokens of x: each rank quantizes
its own tokens, and codes, block scales and amaxes travel, since the amax of a token needs no other token.
:class:`SequenceRowwiseParallel` shards the columns of a weight and reduce-scatters y. The collectives are
torch.distributed's, in the forward pass and in the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from .. import _checks
from ..containers.nvfp4 import NVFP4Tensor
from ..nn._classes import become
from ..quantize import quantize
from . import _copies, _step, functional
from ._copies import NO_PARTS, OF_X, Parts
from ._step import QuantizedInput, Step
from .functional import STEP, autocast, check_arguments, first_only, without_autocast
from .linear import Linear
from .recipe import DEQUANTIZED, Cast, Recipe

__all__ = ["SequenceColwiseParallel", "SequenceRowwiseParallel"]

_AMAX_BYTES = 4
# torch 2.13 renamed the first two and warns of the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_reduce = dist.all_reduce


class Sharding(NamedTuple):
    """The ranks among which activations are sharded, and the dimension along which they are."""

    group: dist.ProcessGroup
    dim: int

    @property
    def ranks(self) -> int:
        return self.group.size()

    def gather(self, x: Tensor) -> Tensor:
        """The shards of all ranks, one after the other along dim; contiguous, a copy."""
        ranks = self.ranks
        gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        all_gather(gathered, x.contiguous(), group=self.group)
        if self.dim == 0:
            return gathered
        return gathered.view(ranks, *x.shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's shard along dim of the sum of all ranks' x, added in the dtype of x."""
        ranks = self.ranks
        shape = list(x.shape)
        shape[self.dim] //= ranks
        parts = x.view(*shape[: self.dim], ranks, *shape[self.dim :]).movedim(self.dim, 0).contiguous()
        own = x.new_empty(shape)
        reduce_scatter(own, parts.flatten(0, 1), group=self.group)
        return own


# ---- the styles


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


def local_shard(weight: DTensor) -> Tensor:
    """This rank's shard of a weight, with the main_grad of the weight if it has one.

    A main_grad is a tensor of the shape of the shard, or a DTensor with the placements of the weight.
    """
    local: Tensor = weight.to_local()
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not local.requires_grad:
        return local
    if isinstance(main_grad, DTensor):
        if main_grad.placements != weight.placements:
            raise ValueError(
                f"weight.main_grad: placements are {main_grad.placements}, must be {weight.placements}, as "
                "those of the weight"
            )
        main_grad = main_grad.to_local()
    local.main_grad = main_grad  # type: ignore[attr-defined]
    local.register_hook(functools.partial(_mark_added, weight))
    return local


def _mark_added(weight: Tensor, _: Tensor) -> None:
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class _ShardedLinear(Linear):
    """A training.Linear whose parameters are DTensors; the class of a layer that a style was applied to."""

    _mesh: DeviceMesh
    _sequence_dim: int
    _shares_input = False
    _is_sharded = True

    @property
    def _sharding(self) -> Sharding:
        return Sharding(self._mesh.get_group(), self._sequence_dim)

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else cast(DTensor, self.bias).to_local()

    def _input(self, x: object, dim: int) -> Tensor:
        """This rank's x; a DTensor is brought to Shard(dim) first."""
        x = _checks.is_tensor("x", x)
        sequence_dim = self._sequence_dim
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
        return local_shard(weight), None if self.cache is None else ShardCache(self.cache, weight)


class _ColwiseLinear(_ShardedLinear):
    """y (..., n / ranks) of the tokens of all ranks."""

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """This rank's features of y for all tokens, of this rank's tokens of x (..., k)."""
        x = self._input(input, self._sequence_dim)
        weight, cache = self._shard()
        return gathered_linear(x, weight, self._bias(), self._recipe, cache, self._sharding)


class _RowwiseLinear(_ShardedLinear):
    """y (..., n) of this rank's tokens."""

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """This rank's tokens of y, of this rank's features of x (..., k / ranks) for all tokens."""
        x = self._input(input, -1)
        dim, ranks = self._sharding.dim, self._sharding.ranks
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
    step = mesh.size() * (1 if module.recipe.is_plain else STEP)
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

    A recipe whose forward pass does not quantize x to NVFP4 gathers x in its own dtype. With row scaling y
    and dW are those of one process bit for bit, unless a cast is stochastic; with tensor scaling the amaxes
    of W_r and dy_r are those of the shards, and balanced tokens (``balance_tokens``) have factors by the amax
    of dy_r, so that each rank casts x^T itself. ``weight`` and ``bias`` become DTensors with the placement
    Shard(0), and ``weight.main_grad`` may be a DTensor like the weight, or this rank's shard of one.

    Args:
        sequence_dim: the dimension of x along which its tokens are sharded, in equal parts.

    Raises:
        TypeError: sequence_dim is no int; the module is no :class:`Linear`. ValueError: sequence_dim is
            negative, the mesh has more than one dimension, the weight is a DTensor already, or out_features
            is no multiple of 32 for each rank. In a forward pass TypeError or ValueError for an x of too few
            dimensions, and for a weight.main_grad that is not float32 of the shape of the rank's shard.
    """

    def __init__(self, *, sequence_dim: int = 1) -> None:
        _checks.is_int("sequence_dim", sequence_dim, 0)
        super().__init__(input_layouts=Shard(sequence_dim))
        self.sequence_dim = sequence_dim

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer = _check(module, device_mesh, "out_features")
        self._partition_linear_fn("", layer, device_mesh)
        become(layer, _ColwiseLinear, _mesh=device_mesh, _sequence_dim=self.sequence_dim)
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
        become(layer, _RowwiseLinear, _mesh=device_mesh, _sequence_dim=self.sequence_dim)
        return layer

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


# ---- collectives with gradients


class _Gather(torch.autograd.Function):
    """The tokens of all ranks in the dtype of x; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.sharding.scatter_sum(dy.contiguous()), None


class ScatterSum(torch.autograd.Function):
    """This rank's tokens of the sum of all ranks' x; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.scatter_sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.sharding.gather(dy), None


class OnEveryRank(torch.autograd.Function):
    """A tensor that every rank has; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        total = dy.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=ctx.sharding.group)
        return total, None


# ---- the product of all ranks' tokens


def _gathered_rows(
    x: Tensor, cast: Cast, recipe: Recipe, state: Tensor | None, sharding: Sharding
) -> NVFP4Tensor:
    """The forward copy (m, k) of the tokens of all ranks, of this rank's x (..., k): each casts its own.

    Equal to the cast of the gathered x bit for bit, unless it rounds stochastically. One all-gather moves the
    codes, the block scales and, with row scaling, the amaxes. With tensor scaling one MAX all-reduce of the
    amax precedes the cast.
    """
    rows = x.reshape(-1, x.shape[-1])
    m, k = rows.shape
    is_per_row = cast.scaling == "row"
    options = _copies.keywords(cast, None, recipe.hadamard_signs, state)
    if not is_per_row:
        amax = rows.abs().amax().float().view(1) if rows.numel() else rows.new_zeros(1, dtype=torch.float32)
        all_reduce(amax, op=dist.ReduceOp.MAX, group=sharding.group)
        options["amax"] = amax
    t: NVFP4Tensor = quantize(rows, **options)
    parts = [t.codes, t.compact_scales().view(torch.uint8)]
    if is_per_row:
        parts.append(t.amax.view(torch.uint8).view(m, _AMAX_BYTES))
    packed = torch.cat(parts, 1)
    packed = sharding.gather(packed.view(*x.shape[:-1], packed.shape[1])).flatten(0, -2)
    codes, scales, *amaxes = (
        # clone, since a part of one token is contiguous already, at an address that is not aligned
        part.clone(memory_format=torch.contiguous_format)
        for part in packed.split([k // 2, k // 16] + [_AMAX_BYTES] * is_per_row, 1)
    )
    amax = amaxes[0].view(torch.float32).flatten() if is_per_row else t.amax
    made = NVFP4Tensor._of_compact(codes, scales.view(torch.float8_e4m3fn), amax, t.e4m3_max)
    return made._stamped(x.dtype)


def _has_whole_blocks(shape: torch.Size, sharding: Sharding) -> bool:
    """Whether the blocks along the tokens of all ranks' x each lie in the tokens of one rank.

    shape: that of a rank's x. Other numbers of tokens are gathered in the dtype of x.
    """
    inner = math.prod(shape[sharding.dim : -1])
    total = sharding.ranks * math.prod(shape[:-1])
    return total > 0 and inner % _checks.BLOCK == 0 and total % _copies.ROWS == 0


def _is_cast_by_ranks(recipe: Recipe, shape: torch.Size, sharding: Sharding) -> bool:
    """Whether each rank casts its own blocks of x_t, from x itself, and these are gathered.

    Balanced tokens have other blocks on each rank, which has dy of its own features, and the encode "eden"
    has other signs, since the random state of each rank differs.
    """
    cast = recipe.x_t
    is_of_x = isinstance(cast, Cast) and cast.source == "original" and cast.encode != "eden"
    return is_of_x and not recipe.balance_tokens and _has_whole_blocks(shape, sharding)


def _own_columns(x: Tensor, cast: Cast, recipe: Recipe, state: Tensor | None, sharding: Sharding) -> Parts:
    """The rank's blocks of the copy (k, m) of all ranks' tokens for wgrad, of this rank's x (..., k).

    A first cast measures the amax of each feature, or of the tensor, rotated as the cast rotates; a MAX
    all-reduce of these k numbers, or of one, precedes the cast that is kept.
    """
    rows = _checks.readable_rows(x.reshape(-1, x.shape[-1]))
    signs = recipe.hadamard_signs
    measured = _copies.along(rows, 0, dataclasses.replace(cast, stochastic=False), signs, None)
    if measured.amax is None:
        raise RuntimeError("the amax of x was not measured")
    amax = measured.amax.clone()
    all_reduce(amax, op=dist.ReduceOp.MAX, group=sharding.group)
    options = _copies.keywords(cast, cast.hadamard, signs, state)
    own: NVFP4Tensor = quantize(rows, axis=0, amax=amax, **options)
    return Parts(own.codes, own.compact_scales(), amax)


def _gathered_columns(own: Parts, shape: torch.Size, e4m3_max: int, sharding: Sharding) -> Parts:
    """The tensors of the copy (k, m) of all ranks' tokens, from each rank's blocks; shape: a rank's x.

    One all-gather moves 9 bytes for each block: its codes and its scale.
    """
    codes, scales, amax = own
    if codes is None or scales is None or amax is None:
        raise RuntimeError("the blocks of this rank were not saved")
    k, half = codes.shape[0], _checks.BLOCK // 2
    blocks = torch.cat((codes.view(k, -1, half), scales.view(torch.uint8).unsqueeze(2)), 2)
    inner = math.prod(shape[sharding.dim : -1]) // _checks.BLOCK
    packed = blocks.transpose(0, 1).reshape(-1, inner, k * (half + 1))  # in the order of the tokens
    packed = Sharding(sharding.group, 1).gather(packed).reshape(-1, k, half + 1).transpose(0, 1)
    made = NVFP4Tensor._of_compact(
        packed[..., :half].flatten(1).contiguous(), packed[..., half].contiguous(), amax, e4m3_max
    )
    return _copies.parts_of(made)


class _GatheredProduct(torch.autograd.Function):
    """y = x W^T + bias of all ranks' tokens with this rank's rows of W, and the gradients of a recipe."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, sharding: Sharding, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        recipe, needs_dw = step.plan.recipe, step.plan.needs[1]
        if not isinstance(recipe.x, Cast):
            raise RuntimeError("the recipe quantizes no x")
        of_x = _copies.stream(step.state, OF_X, recipe.x, recipe.x_t)
        x_q = _gathered_rows(x, recipe.x, recipe, of_x, sharding)
        y = step.product(_copies.parts_of(x_q), bias, x.dtype)
        saved = NO_PARTS
        if needs_dw and recipe.saved_input == "x":
            saved = _copies.parts_of(x_q)
        elif needs_dw and recipe.saved_input == "original":
            saved = Parts(x)
        elif needs_dw and isinstance(recipe.x_t, Cast) and recipe.x_t.source == "original":
            saved = _own_columns(x, recipe.x_t, recipe, of_x, sharding)
        elif needs_dw and isinstance(recipe.x_t, Cast):
            values = x_q.dequantize(x.dtype)
            saved = _copies.along(values, 0, recipe.x_t, recipe.hadamard_signs, of_x, step.ends)
        step.save(ctx, weight, saved)
        ctx.sharding, ctx.own_shape = sharding, x.shape
        tokens = sharding.ranks * x.shape[sharding.dim]
        ctx.shape = (*x.shape[: sharding.dim], tokens, *x.shape[sharding.dim + 1 :])
        return y.view(*ctx.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sharding: Sharding = ctx.sharding
        saved, given, is_recording = ctx.saved_tensors, dy, torch.is_grad_enabled()
        dx = dw = None
        with torch.no_grad(), without_autocast(dy):
            step, weight = _step.restored(ctx, saved)
            dy = dy.reshape(-1, dy.shape[-1]).contiguous()
            dy_q, dy_t = step.copies_of_gradient(dy)
            if step.plan.needs[0]:
                dx = step.input_gradient(dy, dy_q, weight)
                dx = sharding.scatter_sum(dx.view(ctx.shape))
            if step.plan.needs[1]:
                operands = _gathered_operands(step, dy, dy_q, dy_t, ctx.own_shape, sharding)
                dw = step.weight_gradient(dy, *operands)
                if dw is None:
                    dw = functional.added(ctx.weight)
            db = step.bias_gradient(dy)
        if is_recording:
            dx, dw, db = first_only((dx, dw, db), given, ctx.weight)
        return None, None, dx, dw, db


def _gathered_operands(
    step: Step, dy: Tensor, dy_q: Parts, dy_t: Parts, shape: torch.Size, sharding: Sharding
) -> tuple[Parts, Parts]:
    """Step.operands_of_wgrad() with the tensors that each rank saved of its x of this shape."""
    recipe, saved = step.plan.recipe, step.x_t
    if isinstance(recipe.x_t, Cast) and _is_cast_by_ranks(recipe, shape, sharding):
        if recipe.save_input == "original":
            of_x = _copies.stream(step.state, OF_X, recipe.x, recipe.x_t)
            saved = _own_columns(_copies.not_cast(saved), recipe.x_t, recipe, of_x, sharding)
        return dy_t, _gathered_columns(saved, shape, recipe.x_t.bound, sharding)
    if recipe.saved_input == "original":
        saved = Parts(sharding.gather(_copies.not_cast(saved)).flatten(0, -2))
    return step.operands_of_wgrad(dy, dy_q, dy_t, saved)


def gathered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    cache: _copies.Cache | None,
    sharding: Sharding,
    use_main_grad: bool = True,
) -> Tensor:
    """linear(gathered x, weight, bias) with x gathered in NVFP4 if the recipe quantizes it to that."""
    check_arguments(x, weight, bias, 2, recipe.is_plain)
    x = autocast(x)
    if recipe.x is None or recipe.x.format != "nvfp4":
        gathered = _Gather.apply(x, sharding)
        return functional.linear(gathered, weight, bias, recipe, cache=cache, use_main_grad=use_main_grad)
    main_grad = functional.main_grad_of(weight, use_main_grad)
    follows = recipe.x_t == DEQUANTIZED or (isinstance(recipe.x_t, Cast) and recipe.x_t.source == "rowwise")
    if not follows and not _is_cast_by_ranks(recipe, x.shape, sharding):
        recipe = recipe.replace(save_input="original")
    with without_autocast(x):
        step = _step.begun(recipe, x, weight, bias, None, cache, main_grad, ranks=sharding.ranks)
        y: Tensor = _GatheredProduct.apply(step, sharding, x, weight, bias)
    return y
