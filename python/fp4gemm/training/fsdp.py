"""FSDP2's all-gather of quantized weights: each rank casts its own rows, and 0.5625 bytes an element travel.

:class:`ShardedWeight` is the parameter that FSDP2 shards. torch calls its ``fsdp_pre_all_gather``, which
quantizes the local rows, and ``fsdp_post_all_gather``, which makes of all ranks' codes, block scales and
amaxes a :class:`GatheredWeight`: the parameter that the layer sees, without values of its own in bf16.

With row scaling a row is self-contained, so that the gathered codes equal those of the whole weight bit for
bit and no amax is reduced. With tensor scaling one MAX all-reduce of the amax precedes the cast.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _checks
from . import _copies
from ._gathered import GatheredWeight, Made
from .conversion import layers_of
from .recipe import Cast, Recipe

__all__ = ["ShardedWeight", "quantize_all_gather"]

aten = torch.ops.aten
# What FSDP2, nn.Parameter and Module.to do to a parameter whose result must still be one. All other
# functions, such as zeros_like for the state of an optimizer, give plain tensors.
_PRESERVING = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
}


class ShardedWeight(Tensor):
    """A weight (n, k) or (g, n, k) that FSDP2 shards along its first size, and gathers in NVFP4.

    It holds the same memory as the tensor that it is made of. Optimizers, checkpoints and all functions of
    torch see an ordinary tensor; a pickled one is a plain tensor.
    """

    @staticmethod
    def __new__(cls, values: Tensor) -> ShardedWeight:
        return torch.Tensor._make_subclass(cls, values)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            result = function(*args, **(kwargs or {}))
            if function in _PRESERVING:
                return [cls(x) for x in result] if isinstance(result, list) else cls(result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = ShardedWeight(_plain(self).clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """(codes, block scales, amax) of the local rows, each with the rows first, and how they were made."""
        return _local_parts(_plain(self), mesh, outer_size, module, mp_policy.param_dtype)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], made: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Build the whole weight from the gathered codes, block scales and amaxes.

        The first call returns a new weight; later calls set the tensors of ``out``, which is that weight.
        """
        codes, scales, amax = gathered if len(gathered) == 3 else _unpacked(gathered[0], made.shape)
        if out is not None:
            out._take(codes, scales, amax, made)
            return None
        return GatheredWeight(codes, scales, amax, made, param_dtype), ()


def _plain(weight: Tensor) -> Tensor:
    """A plain tensor without a gradient that shares the memory of the weight."""
    with torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(Tensor, weight.detach())


def quantize_all_gather(model: torch.nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of a converted model in NVFP4: 0.5625 bytes an element and the amaxes.

    Call it after :func:`convert_model` and before ``fully_shard`` and the optimizer, since the weights become
    parameters of another class (:class:`ShardedWeight`) that share the memory of the old ones. Training has
    the bits of plain FSDP2, whose all-gather moves the weights in their own dtype.

    What the backward pass multiplies must follow from the gathered codes: w_t is "dequantized", a Cast with
    source "rowwise", or the 16x16 blocks of w. The first size of each weight must be a multiple of the number
    of ranks, or of 16 times that with blocks of 16x16. With tensor scaling each all-gather of a weight (n, k)
    is preceded by one MAX all-reduce of a number.

    Args:
        model: its :class:`Linear` and :class:`GroupedLinear` layers with a quantized forward pass are
            changed; a layer whose recipe quantizes nothing stays.

    Returns:
        The names of the changed layers.

    Raises:
        TypeError: model is no module. NotImplementedError: naming the layers whose recipe needs more of the
            weight than its codes, and why. ValueError: no layer qualifies, a weight is a DTensor already, or
            another module needs its values, such as a tied embedding. The model is then unchanged.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    layers = [(n, m) for n, m in layers_of(model) if not m.recipe.is_plain]
    if not layers:
        raise ValueError("model: has no layer with a recipe that quantizes; use convert_model first")
    for name, layer in layers:
        reason = _why_not(layer.recipe)
        if reason:
            raise NotImplementedError(f"recipe of {name!r}: {reason}")
        if isinstance(layer.weight, DTensor):
            raise ValueError(f"{name}.weight: is a DTensor, must be made before fully_shard")
    own = {id(layer) for _, layer in layers}
    readers = [(name, m) for name, m in model.named_modules() if id(m) not in own]
    reader_of = {id(p): name for name, m in readers for p in m.parameters(recurse=False)}
    for name, layer in layers:
        reader = reader_of.get(id(layer.weight))
        if reader is not None:
            raise ValueError(
                f"{name}.weight: is also a parameter of {reader!r}, which reads its values, must belong to "
                "quantized layers alone; a layer whose recipe quantizes nothing may share it"
            )
    made: dict[int, torch.nn.Parameter] = {}
    for _, layer in layers:
        weight = layer.weight
        if id(weight) not in made:
            made[id(weight)] = torch.nn.Parameter(ShardedWeight(weight.detach()), weight.requires_grad)
        layer.weight = made[id(weight)]
    return [name for name, _ in layers]


def _why_not(recipe: Recipe) -> str:
    """Why the products need more of the weight than the codes of its forward copy; "" if they do not."""
    w, w_t = recipe.w, recipe.w_t
    if w is None:
        return "w is None, must be a Cast; the forward pass needs the values of the weight"
    if w.format != "nvfp4":
        return f"w has the format {w.format!r}, must have 'nvfp4', in which weights are gathered"
    if w.stochastic:
        return "w is rounded stochastically, must not be; the random numbers belong to the whole weight"
    if w_t is None:
        return 'w_t is None, must be a Cast or "dequantized"; dgrad needs the values of the weight'
    if isinstance(w_t, Cast) and w_t.source == "original" and not (w_t == w and w.block == (16, 16)):
        return (
            "w_t is cast from the original weight, which the gathered codes do not hold; must be "
            '"dequantized", have source "rowwise", or be the same Cast as w with blocks of (16, 16)'
        )
    return ""


def _local_parts(
    shard: Tensor, mesh: Any, outer_size: torch.Size, module: Any, param_dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Made]:
    """The codes, block scales and amax that one rank gives to the all-gather, which concatenates them."""
    recipe: Recipe = module.recipe
    reason = _why_not(recipe)
    if reason:
        raise NotImplementedError(f"recipe: {reason}")
    how = cast(Cast, recipe.w)
    is_stack, is_whole = len(outer_size) == 3, shard.shape == outer_size
    ranks = 1 if is_whole else mesh.size()
    step = ranks * (1 if is_stack else how.block[0])
    if outer_size[0] % step:
        what = "experts" if is_stack else "rows"
        raise ValueError(
            f"weight: has {outer_size[0]} {what}, must be a multiple of {step}, to be gathered in "
            f"NVFP4 by {ranks} ranks"
        )
    shard = shard.detach() if param_dtype is None else shard.detach().to(param_dtype)
    is_per_tensor = how.scaling == "tensor" and not is_stack
    amax = None
    if is_per_tensor:
        amax = shard.abs().amax().float().view(1)
        if not is_whole:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    t = _copies.weight_rows(shard, recipe, amax)
    scales = t.compact_scales().view(torch.uint8)
    parts: tuple[Tensor, ...] = (t.codes, scales, t.amax)
    if is_whole:  # a group of one rank, of which torch (2.13) copies the first part alone
        parts = (torch.cat([part.view(torch.uint8).flatten() for part in parts]),)
    return parts, Made(t.e4m3_max, is_per_tensor, outer_size)


def _unpacked(packed: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and amax of the uint8 bytes in which they lie one after the other."""
    *rows, k = shape
    sizes = [math.prod(shape) // 2, math.prod(shape) // 16]
    codes, scales, amax = packed.split([*sizes, packed.numel() - sum(sizes)])
    amax = amax.view(torch.float32).view(*rows[:-1], -1)
    return codes.view(*rows, k // 2), scales.view(*rows, k // 16), amax
