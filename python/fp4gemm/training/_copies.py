"""The quantized copies of x, W and dy that the products of a step multiply: how a recipe makes them.

A recipe has two casts for each of these tensors: one of its rows, with blocks along k, and one of its
columns, the rows of the transposed tensor, with blocks along m. :func:`both` makes the two copies of a
matrix, in one pass where the casts allow it, :func:`weight_copies` those of a weight or of a stack of
weights, and :func:`kept_copies` takes those of a weight from a cache.

A copy is the tuple of its tensors (:class:`Parts`), since torch saves tensors for the backward pass, not
containers. Its e4m3_max, its Hadamard signs and its groups follow from the cast and from the call, and
:func:`rebuilt` makes a container with them.

:func:`along` and :func:`both` call the operators of the quantizers, with the options of a cast, which were
checked when it was made, and with tensors that the layer has checked. Stacks are quantized by the public
functions.

The random numbers of stochastic rounding come from int64 (2,) states {seed, offset}, one for each call of a
layer. A state is drawn in the forward pass, on the device, from torch's default generator, and saved for the
backward pass. So it follows the rules that torch has for dropout: torch.utils.checkpoint draws the same
state again, a captured CUDA graph draws a new one in each replay, and a run that restores the state of the
generator (``torch.get_rng_state``) continues as if it had not been interrupted. A layer has no random state
of its own, which a recomputation would advance twice and DistributedDataParallel would broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.decoded import DecodedTensor
from ..containers.mxfp8 import MXFP8Tensor, quantize_mxfp8
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack
from ..ops import operators
from ..ops import options as option_checks
from ..quantize import quantize, quantize_both
from ._gathered import GatheredWeight, transposed
from .recipe import DEQUANTIZED, Cast, Operand, Recipe

__all__ = [
    "NO_PARTS",
    "OF_DY",
    "OF_W",
    "OF_X",
    "Cache",
    "Copy",
    "Parts",
    "Weight",
    "along",
    "are_converted",
    "both",
    "dense_ends",
    "draw",
    "is_kept",
    "kept_copies",
    "keywords",
    "not_cast",
    "parameters_of",
    "parts_of",
    "quantized",
    "rebuilt",
    "stream",
    "weight_copies",
    "weight_rows",
    "whole",
]

Copy = NVFP4Tensor | MXFP8Tensor | DecodedTensor | PrepackedTensor


class Parts(NamedTuple):
    """The tensors of a quantized copy; each is None where there is no copy.

    A decoded or prepacked copy (:func:`are_converted`) has its values or bytes in place of the codes, and no
    scales; one in MXFP8 has its values there, and no amax. A tensor that is saved in place of a copy is
    ``codes`` alone. It is not an :class:`fp4gemm.ops.parts.OperandParts`, since torch saves all of it for the
    backward pass, and saves tensors alone: e4m3_max follows from the cast, which the step keeps.
    """

    codes: Tensor | None = None
    scales: Tensor | None = None
    amax: Tensor | None = None


NO_PARTS = Parts()


# ---- random numbers

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


# ---- the quantizers by a cast

_QUANTIZE = operators.below_wrapper(operators.quantize)
_QUANTIZE_DECODED = operators.below_wrapper(operators.quantize_decoded)
_QUANTIZE_MXFP8 = operators.below_wrapper(operators.mxfp8_quantize)
_QUANTIZE_BOTH = operators.below_wrapper(operators.quantize_both)
# The fields of Cast that are keywords of the quantizers as they are: all but those that keywords() adds, and
# format and source, which are no keywords.
_PLAIN_FIELDS = tuple(
    each.name
    for each in dataclasses.fields(Cast)
    if each.name not in ("format", "hadamard", "stochastic", "source")
)
_is_compiling = torch.compiler.is_compiling


def keywords(cast: Cast, hadamard: str | None, signs: int, state: Tensor | None) -> dict[str, Any]:
    """The keywords of fp4gemm.quantize for a cast to NVFP4; ``hadamard`` is that of the copy."""
    options: dict[str, Any] = {name: getattr(cast, name) for name in _PLAIN_FIELDS}
    if hadamard is not None:
        options |= {"hadamard": hadamard, "hadamard_signs": signs}
    if cast.stochastic:
        options |= {"stochastic": True, "rng_state": state}
    return options


def along(
    x: Tensor,
    axis: int,
    cast: Cast,
    signs: int,
    state: Tensor | None,
    offs: Tensor | None = None,
    decoded: bool = False,
    amax: Tensor | None = None,
) -> Parts:
    """The copy (m, k) with blocks along axis -1, or (k, m) with blocks along axis 0.

    Args:
        x: (m, k), on a device that has a kernel, with rows that it reads in place.
        signs: hadamard_signs of the recipe. state: {seed, offset} of x, which a stochastic cast needs.
        offs: the groups, of rows along axis -1 and of columns along axis 0.
        decoded: whether a copy in NVFP4 has float16 values in place of codes and scales.
        amax: that of the whole tensor, if it was measured before.
    """
    if cast.format == "mxfp8":
        mxfp8 = operators.mxfp8_quantize if _is_compiling() else _QUANTIZE_MXFP8
        return Parts(*mxfp8(x, axis, torch.float8_e4m3fn, True, offs))  # True: the scales are swizzled
    per_row, block_rows, before, hadamard, after = cast.arguments
    rest = (*before, hadamard, signs if hadamard else 0, state if cast.stochastic else None, *after, offs)
    scales = None
    if decoded:
        call = operators.quantize_decoded if _is_compiling() else _QUANTIZE_DECODED
        codes, measured = call(x, amax, per_row, axis, *rest)
    else:
        call = operators.quantize if _is_compiling() else _QUANTIZE
        codes, scales, measured = call(x, amax, per_row, axis, block_rows, *rest)
    return Parts(codes, scales, measured if amax is None else amax)


def quantized(
    x: Tensor, axis: int, cast: Cast, recipe: Recipe, state: Tensor | None, offs: Tensor | None = None
) -> NVFP4Tensor | MXFP8Tensor:
    """The container of a matrix, or of a stack (g, m, k), by a cast; x is as for fp4gemm.quantize."""
    if cast.format == "mxfp8":
        return quantize_mxfp8(x, axis=axis, offs=offs)
    options = keywords(cast, cast.hadamard, recipe.hadamard_signs, state)
    options |= {"axis": axis, "offs": offs}
    made: NVFP4Tensor = quantize(x, **options)
    return made


def _in_one_pass(
    x: Tensor, cast: Cast, of_columns: Cast, signs: int, state: Tensor | None, offs: Tensor | None
) -> tuple[Parts, Parts]:
    """Both copies that :func:`along` makes; the casts differ in hadamard at most, and ``cast`` has none."""
    per_row, block_rows, before, _, after = cast.arguments
    hadamard = of_columns.arguments[3]
    rest = (*before, hadamard, signs if hadamard else 0, state if cast.stochastic else None, *after, offs)
    call = operators.quantize_both if _is_compiling() else _QUANTIZE_BOTH
    made = call(x, None, None, per_row, block_rows, *rest)
    return Parts(*made[:3]), Parts(*made[3:])


# ---- both directions

ROWS = 32  # wgrad of a dense layer sums over tokens; other numbers of them become one group of columns


def dense_ends(m: int, device: torch.device) -> Tensor | None:
    """int32 (1,), the one group of the columns of (m, k), where m is no size that wgrad sums over."""
    return torch.full((1,), m, dtype=torch.int32, device=device) if m % ROWS or m == 0 else None


def both(
    x: Tensor,
    of_rows: Operand,
    of_columns: Operand,
    recipe: Recipe,
    state: Tensor | None,
    offs: Tensor | None = None,
    ends: Tensor | None = None,
    decoded: tuple[bool, bool] = (False, False),
) -> tuple[Parts, Parts]:
    """The copies along axis -1 and along axis 0, each by its cast, in one pass where the casts allow it.

    Args:
        x: (m, k), as for :func:`along`.
        of_rows, of_columns: a cast, or something else for a copy that is not needed.
        offs: the groups of the rows. ends: the groups of the columns, the same or one group of all rows.
        decoded: whether the first and the second are decoded. The first is not if the second is cast from
            its values. One pass makes packed copies alone; where it is given up, x is read as often, and the
            product decodes no operand.

    Returns:
        The tensors of each; NO_PARTS for one that is not needed.
    """
    signs = recipe.hadamard_signs
    if isinstance(of_rows, Cast) and isinstance(of_columns, Cast):
        is_packed = offs is ends and not (decoded[0] or decoded[1])
        has_groups = offs is not None or ends is not None
        has_one_amax = of_rows.scaling == "tensor" and of_columns.hadamard is None and not has_groups
        if (is_packed or has_one_amax) and of_rows.is_one_pass_with(of_columns):
            if is_packed:
                return _in_one_pass(x, of_rows, of_columns, signs, state, offs)
            made = along(x, -1, of_rows, signs, state, None, decoded[0])
            return made, along(x, 0, of_columns, signs, state, None, decoded[1], made.amax)
    follows = isinstance(of_columns, Cast) and of_columns.source == "rowwise"
    made = NO_PARTS
    if isinstance(of_rows, Cast):
        made = along(x, -1, of_rows, signs, state, offs, decoded[0] and not follows)
    if not isinstance(of_columns, Cast):
        return made, NO_PARTS
    if follows and isinstance(of_rows, Cast) and x.shape[0] > 0:
        x = operators.dequantize(*made, of_rows.bound, x.dtype, True, offs)  # True: the scales are swizzled
    return made, along(x, 0, of_columns, signs, state, ends, decoded[1])


# ---- parts


def are_converted(x: Tensor) -> bool:
    """Whether products on the device of x decode their left operand, and prepack or decode the right one.

    Where tensor cores read no NVFP4 (Hopper), a product of two NVFP4Tensors converts both in every call.
    There the left operand is quantized to decoded values, in the pass that quantizes it anyway, and the
    copies of a weight that a cache keeps are prepacked once. The values of the operands are the same in every
    form. False while a graph is traced: which kernels a device has is no part of a graph.
    """
    return x.is_cuda and not torch.compiler.is_compiling() and support.streams_prepacked(x.device)


def parts_of(t: Copy | None) -> Parts:
    """The tensors of a quantized copy; NO_PARTS for None."""
    if isinstance(t, MXFP8Tensor):
        return Parts(t.values, t.scales)
    return NO_PARTS if t is None else Parts(*t._operand_parts()[:3])


def rebuilt(
    parts: Parts,
    cast: Operand,
    recipe: Recipe,
    offs: Tensor | None = None,
    offs_dim: int = 0,
    shape: torch.Size | None = None,
) -> Any:
    """The container of the tensors of a copy that a cast made; ``shape`` is that of a prepacked weight."""
    codes, scales, amax = parts
    if codes is None or not isinstance(cast, Cast):
        raise RuntimeError("a copy that the backward pass needs was not saved")
    bound, signs = cast.bound, None if cast.hadamard is None else recipe.hadamard_signs
    if signs is not None and cast.encode == "eden":
        signs |= option_checks.DRAWN_SIGNS
    dim = 0 if offs is None else offs_dim
    if cast.format == "mxfp8" and scales is not None:
        return MXFP8Tensor._trusted(codes, scales, True, offs, dim)
    if amax is None:
        raise RuntimeError("the amax of a copy that the backward pass needs was not saved")
    if scales is not None:
        return NVFP4Tensor._trusted(codes, scales, amax, bound, offs, signs, dim)
    if codes.dtype is torch.float16:
        return DecodedTensor._trusted(codes, amax, bound, signs, offs, dim)
    if shape is None:
        raise RuntimeError("the shape of a prepacked copy is not known")
    return PrepackedTensor._trusted(codes, amax, shape, bound, signs)


def not_cast(parts: Parts) -> Tensor:
    """The tensor that was saved unquantized in place of a copy."""
    if parts.codes is None:
        raise RuntimeError("a tensor that the backward pass needs was not saved")
    return parts.codes


# ---- weights


# A weight (n, k), a stack (g, n, k), or the g matrices (n, k) of a stack, each a parameter of its own. Such
# matrices are copied into a stack wherever its values are read, and not saved as one.
Weight = Tensor | tuple[Tensor, ...]


def whole(weight: Weight) -> Tensor:
    """The weight as one tensor: itself, or a stack that is made of its matrices."""
    return torch.stack(weight) if isinstance(weight, tuple) else weight


def parameters_of(weight: Weight) -> tuple[Tensor, ...]:
    """Every parameter of the weight."""
    return weight if isinstance(weight, tuple) else (weight,)


class Cache(Protocol):
    """An object that keeps the copies of a weight from one call to the next, such as :class:`WeightCache`."""

    def keeps(self, weight: Any) -> bool:
        """Whether copies of this weight would be kept now; if not, each pass makes those that it needs."""
        ...

    def get(
        self, weight: Any, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        """Return the result of ``make()`` for this weight and variant, of an earlier call or of one now."""
        ...


def weight_rows(weight: Tensor, recipe: Recipe, amax: Tensor | None) -> NVFP4Tensor:
    """The forward copy of rows of a weight; amax float32 (1,) is that of the whole weight, if given."""
    if not isinstance(recipe.w, Cast):
        raise RuntimeError("the recipe quantizes no weight")
    options = keywords(recipe.w, None, recipe.hadamard_signs, None)
    if amax is not None:
        options["amax"] = amax
    made: NVFP4Tensor = quantize(weight, **options)
    return made


def weight_copies(
    weight: Weight, recipe: Recipe, state: Tensor | None, needs_w: bool, needs_w_t: bool
) -> tuple[Parts, Parts]:
    """The tensors of the copies w (n, k) and w_t (k, n), or of stacks; NO_PARTS for one that is not needed.

    w is made too where w_t is cast from it.
    """
    if isinstance(weight, GatheredWeight):
        return _gathered_copies(weight.quantized(), recipe, state, needs_w_t)
    needs_w = needs_w or not isinstance(recipe.w_t, Cast) or recipe.w_t.source == "rowwise"
    of_rows, of_columns = recipe.w if needs_w else None, recipe.w_t if needs_w_t else None
    if not isinstance(of_rows, Cast) and not isinstance(of_columns, Cast):
        return NO_PARTS, NO_PARTS
    with torch.no_grad():
        values = torch.stack(weight) if isinstance(weight, tuple) else weight.detach()
        return _of_values(values, of_rows, of_columns, recipe, state)


def _of_values(
    weight: Tensor, of_rows: Operand, of_columns: Operand, recipe: Recipe, state: Tensor | None
) -> tuple[Parts, Parts]:
    """The copies that :func:`both` makes of a weight (n, k), or of each matrix of a stack (g, n, k)."""
    if weight.dim() == 2:
        return both(_checks.readable_rows(weight), of_rows, of_columns, recipe, state)
    signs, made = recipe.hadamard_signs, None
    if isinstance(of_rows, Cast):
        if isinstance(of_columns, Cast) and of_rows.is_one_pass_with(of_columns):
            pair = quantize_both(weight, **keywords(of_rows, of_columns.hadamard, signs, state))
            return parts_of(pair[0]), parts_of(pair[1])
        made = quantized(weight, -1, of_rows, recipe, state)
    if not isinstance(of_columns, Cast):
        return parts_of(made), NO_PARTS
    if made is not None and of_columns.source == "rowwise":
        weight = made.dequantize(weight.dtype)
    return parts_of(made), parts_of(quantized(weight, 0, of_columns, recipe, state))


def _gathered_copies(
    w: NVFP4Tensor, recipe: Recipe, state: Tensor | None, needs_w_t: bool
) -> tuple[Parts, Parts]:
    """The copies that :func:`weight_copies` returns, from the forward copy that FSDP2 gathered (fsdp.py)."""
    w_t = NO_PARTS
    if needs_w_t and isinstance(recipe.w_t, Cast):
        if recipe.w_t.source == "rowwise":
            _, w_t = _of_values(w.dequantize(), None, recipe.w_t, recipe, state)
        else:
            w_t = parts_of(transposed(w))
    return parts_of(w), w_t


def is_kept(weight: Weight, recipe: Recipe, cache: Cache) -> bool:
    """Whether the copies of a weight come from the cache: the recipe has some, and the cache keeps them.

    A copy whose rotation has signs of the call's random state is of no use to another call.
    """
    if isinstance(recipe.w_t, Cast) and recipe.w_t.encode == "eden":
        return False
    has_copies = isinstance(recipe.w, Cast) or isinstance(recipe.w_t, Cast)
    return recipe.cache_weight and has_copies and cache.keeps(weight)


def kept_copies(weight: Weight, recipe: Recipe, state: Tensor | None, cache: Cache) -> tuple[Parts, Parts]:
    """Both copies of a weight, from the cache: those that the recipe has, prepacked if kernels read that."""
    is_converted = are_converted(weight[0] if isinstance(weight, tuple) else weight)
    # The values of a copy that the backward pass dequantizes come from its codes.
    of_w = _to_prepack(recipe.w) if is_converted and recipe.w_t != DEQUANTIZED else None
    of_w_t = _to_prepack(recipe.w_t) if is_converted else None

    def make() -> tuple[Tensor, ...]:
        w, w_t = weight_copies(weight, recipe, state, True, True)
        parts = (*_prepacked(w, of_w, recipe), *_prepacked(w_t, of_w_t, recipe))
        return tuple(part for part in parts if part is not None)

    kept = cache.get(weight, make, (recipe.w, recipe.w_t))
    fields = _kept_fields(recipe.w, of_w is not None)
    fields_t = _kept_fields(recipe.w_t, of_w_t is not None)
    w = Parts(**dict(zip(fields, kept, strict=False)))
    return w, Parts(**dict(zip(fields_t, kept[len(fields) :], strict=True)))


def _to_prepack(cast: Operand) -> Cast | None:
    """The cast of a copy that prepacking changes, which are those in NVFP4; None for others."""
    return cast if isinstance(cast, Cast) and cast.format == "nvfp4" else None


def _kept_fields(cast: Operand, is_prepacked: bool) -> tuple[str, ...]:
    """The fields of Parts that a copy of a weight in a cache has."""
    if not isinstance(cast, Cast):
        return ()
    if cast.format == "mxfp8":
        return ("codes", "scales")
    return ("codes", "amax") if is_prepacked else Parts._fields


def _prepacked(parts: Parts, cast: Operand, recipe: Recipe) -> Parts:
    """The tensors of a copy after prepacking; the given tensors if ``cast`` is no Cast."""
    return parts_of(prepack(rebuilt(parts, cast, recipe))) if isinstance(cast, Cast) else parts
