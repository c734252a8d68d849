"""The random numbers of stochastic rounding: int64 (2,) states {seed, offset}, one for each call of a layer.

A state is drawn in the forward pass, on the device, from torch's default generator, and saved for the
backward pass. So it follows the rules that torch has for dropout: torch.utils.checkpoint draws the same
state again, a captured CUDA graph draws a new one in each replay, and a run that restores the state of the
generator (``torch.get_rng_state``) continues as if it had not been interrupted. A layer has no random state
of its own, which a recomputation would advance twice and DistributedDataParallel would broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .recipe import Cast, Operand, Recipe

__all__ = ["OF_DY", "OF_W", "OF_X", "draw", "stream"]

# What each tensor adds to the offset. Copies along axis 0 add 1 more, and matrix e of a stack 2e.
OF_DY, OF_X, OF_W = 0, 2, 4
_MULTIPLIER = 6364136223846793005  # Knuth's MMIX: spreads seeds and ranks over 64 bits


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def _mixed(seed: int) -> int:
    """An int64 of seed and rank, 0 for seed 0 on rank 0."""
    bits = (seed * _MULTIPLIER + _rank()) * _MULTIPLIER % 2**64
    return bits - 2**64 if bits >= 2**63 else bits


def draw(recipe: Recipe, device: torch.device) -> Tensor | None:
    """Draw int64 (2,), {seed, offset}, or return None if the recipe rounds nothing stochastically.

    The seed of the recipe and the rank of the process are added, so that the ranks of a data-parallel run
    round differently even if all of them call torch.manual_seed with the same number.
    """
    if not recipe.draws:
        return None
    state = torch.randint(-(2**63), 2**63 - 1, (2,), device=device, dtype=torch.int64)
    mixed = _mixed(recipe.seed)
    return state + mixed if mixed else state


def given(state: object, device: torch.device) -> Tensor | None:
    """Check and return a state that a caller passes, or None."""
    return None if state is None else _checks.exact_vector("state", state, 2, torch.int64, device, "x")


def stream(state: Tensor | None, shift: int, *casts: Operand) -> Tensor | None:
    """{seed, offset + shift}, the state of one of the tensors of a call; None if none of its casts draws.

    A state that nothing reads would cost four launches.
    """
    if state is None:
        return None
    for cast in casts:
        if isinstance(cast, Cast) and cast.stochastic:
            return state if shift == 0 else torch.stack((state[0], state[1] + shift))
    return None
