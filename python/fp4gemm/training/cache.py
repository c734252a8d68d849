"""WeightCache: the quantized copies of a weight, made once for an optimizer step and not in every forward.

A copy is used again only if the weight is the same tensor object, at the same address, with the same version
counter, and if no step was marked since the copy was made. The version counter alone is not enough: FSDP2
writes gathered parameters without changing it, and writes through ``weight.data`` have a counter of their
own. Steps are marked by an optimizer (:func:`attach`) or by hand (:func:`mark_step`). As long as neither has
happened in this process, nothing says when weights change, and every :meth:`WeightCache.get` casts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _checks

__all__ = ["WeightCache", "after_load", "attach", "mark_step"]

Parts = tuple[Tensor, ...]


@dataclass
class _Steps:
    """The number of steps that were marked in this process, and whether anything marks steps."""

    count: int = 0
    are_marked: bool = False
    sees_optimizers: bool = False


_STEPS = _Steps()


@torch.compiler.disable
def mark_step() -> None:
    """Declare that weights may have changed: every cached copy is made anew before it is used next.

    Call it after each update of the weights that no torch.optim.Optimizer makes and that torch's version
    counter does not show: a write through ``weight.data``, a write to a parameter that FSDP2 has sharded, or
    the replay of a CUDA graph that contains a step. ``weight.mul_()`` under torch.no_grad changes the version
    counter, and ``load_state_dict`` marks a step by itself: they need no mark.

    The first call in a process turns caching on: from then on the caller answers for the marks. Does not
    synchronise.
    """
    _STEPS.count += 1
    _STEPS.are_marked = True


def attach(optimizer: Optimizer | None = None) -> None:
    """Let each ``optimizer.step()`` mark a step, and turn the caching of quantized weights on.

    The steps of every other torch.optim.Optimizer of this process mark a step too, so that a second optimizer
    that was not attached leaves no copy stale.

    Args:
        optimizer: a torch.optim.Optimizer; of FSDP2 the one that was given the sharded parameters. None: all
            of the process, where another library has the optimizer inside of its own, as Megatron-Core does.

    Raises:
        TypeError: optimizer is no torch.optim.Optimizer.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: got {_checks.describe(optimizer)}, must be a torch.optim.Optimizer or None; after "
            "the steps of another optimizer call fp4gemm.training.mark_step()"
        )
    if not _STEPS.sees_optimizers:
        register_optimizer_step_post_hook(_after_step)
        _STEPS.sees_optimizers = True
    _STEPS.are_marked = True


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _STEPS.count += 1


def after_load() -> None:
    """Let no copy from before be used again: FSDP2 loads the shards, and gathers them without a trace."""
    _STEPS.count += 1


class _State(NamedTuple):
    """The values that must be unchanged for a copy to be used again."""

    storage: StorageWeakRef  # equal to that of the same storage only, even where an address is used again
    address: int
    version: int
    step: int
    shape: torch.Size
    dtype: torch.dtype


class _Entry(NamedTuple):
    states: tuple[_State, ...]  # one for each parameter
    parts: Parts


class WeightCache:
    """Quantized copies of weights; :meth:`get` returns them, made anew where the weight may have changed.

    A copy that is made anew is written into the memory of the old one, so that its address stays the same
    over all steps. A backward pass that still needs the old copy then fails with torch's error about a saved
    tensor that was modified in place, as it does for a weight that was modified.

    Nothing is cached, and every call casts: before the first :func:`attach` or :func:`mark_step` of the
    process; while torch.compile traces; while a CUDA graph is captured, so that each replay casts the weights
    as they are then; and for a weight that is not a plain tensor, such as a DTensor. A copy of the cache, and
    a pickled one, is empty. The copies are written and read on one CUDA stream.
    """

    def __init__(self) -> None:
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> {variant: _Entry}

    def get(
        self, weight: Tensor | tuple[Tensor, ...], make: Callable[[], Parts], variant: Hashable = None
    ) -> Parts:
        """The result of an earlier ``make()`` for this weight if nothing has changed since, else of one now.

        Args:
            weight: the parameter itself, not a view, a cast or a copy of it, since its identity, address and
                version counter are compared. Or the parameters of a weight that consists of several.
            make: casts the weight as it is now; a tuple of tensors of any dtypes. It is called without grad
                mode.
            variant: copies of different variants of one weight are kept beside each other, such as those of
                two recipes.

        Returns:
            The tensors of the cache, not copies; they must not be written to. Does not synchronise.
        """
        if not self.keeps(weight):
            with torch.no_grad():
                return make()
        parameters = weight if isinstance(weight, tuple) else (weight,)
        states = tuple(map(_state_of, parameters))
        entries: dict[Hashable, _Entry] = self._entries.setdefault(parameters[0], {})
        entry = entries.get(variant)
        if entry is not None and entry.states == states:
            return entry.parts
        # Tensors that are made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            parts = make()
            if entry is not None and _are_alike(entry.parts, parts):
                for old, new in zip(entry.parts, parts, strict=True):
                    old.copy_(new)
                parts = entry.parts
        entries[variant] = _Entry(states, parts)
        return parts

    def keeps(self, weight: Tensor | tuple[Tensor, ...]) -> bool:
        """Whether :meth:`get` keeps the copies of this weight now, or casts in every call."""
        if not _STEPS.are_marked or torch.compiler.is_compiling():
            return False
        if isinstance(weight, tuple):
            return all(map(self.keeps, weight))
        if type(weight) not in (Tensor, torch.nn.Parameter) or weight.is_meta or weight.is_inference():
            return False
        return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())

    def clear(self) -> None:
        """Release every copy."""
        self._entries.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        entries = [entry for variants in self._entries.values() for entry in variants.values()]
        return sum(part.nbytes for entry in entries for part in entry.parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def _state_of(weight: Tensor) -> _State:
    storage = StorageWeakRef(weight.untyped_storage())
    return _State(storage, weight.data_ptr(), weight._version, _STEPS.count, weight.shape, weight.dtype)


def _are_alike(old: Parts, new: Parts) -> bool:
    """Whether the new tensors can be written into the old ones."""
    return len(old) == len(new) and all(
        (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        for a, b in zip(old, new, strict=True)
    )
