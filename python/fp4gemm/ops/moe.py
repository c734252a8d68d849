"""The operators of mixtures of experts: route, combine, experts and zero_outside_groups.

Which experts the tokens name is on the device and is not read, except by the CPU implementation of route,
which refuses a token that names an expert twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, activations, support
from ..activations import Activation
from ..reference import moe as formulas
from ..reference.chunks import gathered
from ._call import Operator, accepts, narrowed
from .fp8 import quantize_fp8
from .gemm import GemmCall, gemm, gemm_compiled
from .inputs import FP8_ROW, MXFP8, NOT_QUANTIZED, checked_input
from .parts import OperandParts, checked_stack
from .quantize import QuantizeDecodedCall, quantize_decoded, quantize_decoded_compiled

__all__ = [
    "MAX_EXPERTS",
    "OPERATORS",
    "CombineCall",
    "ExpertsCall",
    "RouteCall",
    "ZeroOutsideGroupsCall",
    "combine",
    "experts",
    "route",
    "zero_outside_groups",
]

MAX_EXPERTS = 2048  # kMaxExperts of cpp/src/moe/moe.hpp
ID_DTYPES = (torch.int32, torch.int64)
_MAX_PAIRS = torch.iinfo(torch.int32).max


# ---- route


class RouteCall(NamedTuple):
    """``route``."""

    topk_ids: Tensor
    num_experts: int


def topk_ids(value: object) -> Tensor:
    """Check and return topk_ids, int32 or int64 (t, top_k), contiguous."""
    x = _checks.is_tensor("topk_ids", value)
    _checks.has_dtype("topk_ids", x, ID_DTYPES)
    _checks.has_rank("topk_ids", x, 2, "(t, top_k)")
    if x.shape[1] < 1:
        raise ValueError(f"topk_ids: shape is {tuple(x.shape)}, must have at least one expert for each token")
    if x.shape[0] * x.shape[1] > _MAX_PAIRS:
        raise ValueError(
            f"topk_ids: shape is {tuple(x.shape)}, must have at most {_MAX_PAIRS} entries altogether"
        )
    _checks.is_contiguous("topk_ids", x)
    return x


def num_experts(value: object) -> int:
    """Check and return a number of experts, 1 to MAX_EXPERTS."""
    _checks.is_int("num_experts", value, 1)
    if value > MAX_EXPERTS:  # type: ignore[operator]
        raise ValueError(f"num_experts: got {value}, must be at most {MAX_EXPERTS}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def refuse_duplicates(ids: Tensor, experts: int) -> None:
    """Raise ValueError if a token names an expert of 0..experts-1 twice. Reads the ids."""
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < experts)
    if twice.any():
        token, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids: token {token} names expert {int(ordered[token, slot])} twice, must name an expert "
            "once"
        )


@accepts(RouteCall)
def route(call: RouteCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (offs, token_of_row, row_of_pair), as :mod:`fp4gemm.reference.moe` defines them.

    Args:
        topk_ids: int32 or int64 (t, top_k), contiguous; t >= 0, top_k >= 1.
        num_experts: 1 to 2048.

    Returns:
        offs int32 (num_experts,); token_of_row int32 (t * top_k,); row_of_pair int32 (t, top_k).

    Raises:
        ValueError: a token names an expert twice. The kernels cannot raise: there both slots have a row, in
            the order of the slots, and both count.
    """
    ids = topk_ids(call.topk_ids)
    experts = num_experts(call.num_experts)
    refuse_duplicates(ids, experts)
    return formulas.route(ids, experts)


@accepts(RouteCall)
def route_fake(call: RouteCall) -> tuple[Tensor, Tensor, Tensor]:
    ids = topk_ids(call.topk_ids)
    experts = num_experts(call.num_experts)
    t, top_k = ids.shape
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in ((experts,), (t * top_k,), (t, top_k)))  # type: ignore[return-value]


# ---- combine


class CombineCall(NamedTuple):
    """``combine``."""

    y: Tensor
    row_of_pair: Tensor
    topk_weights: Tensor
    out_dtype: torch.dtype | None = None  # None: that of y


def topk_weights(
    value: object, shape: tuple[int, ...], device: torch.device, other: str, function: str
) -> Tensor:
    """Check and return the weights of the pairs of tokens and experts, (t, top_k), contiguous."""
    x = _checks.is_tensor("topk_weights", value)
    _checks.has_dtype("topk_weights", x, _checks.FLOAT_DTYPES)
    _checks.has_shape("topk_weights", x, shape)
    _checks.same_device("topk_weights", x, device, other)
    _checks.is_contiguous("topk_weights", x)
    _checks.no_grad("topk_weights", x, function)
    return x


def check_combine(
    y: object, row_of_pair: object, weights: object, out_dtype: object, function: str
) -> torch.dtype:
    """Check the arguments of combine and return the dtype of the result."""
    values = _checks.is_tensor("y", y)
    _checks.has_dtype("y", values, _checks.FLOAT_DTYPES)
    _checks.has_rank("y", values, 2, "(rows, d)")
    _checks.is_multiple("y", "d", values.shape[1], 8)
    _checks.is_contiguous("y", values)
    _checks.is_aligned("y", values)
    _checks.no_grad("y", values, function)
    rows = _checks.is_tensor("row_of_pair", row_of_pair)
    _checks.has_dtype("row_of_pair", rows, (torch.int32,))
    _checks.has_rank("row_of_pair", rows, 2, "(t, top_k)")
    _checks.same_device("row_of_pair", rows, values.device, "y")
    _checks.is_contiguous("row_of_pair", rows)
    topk_weights(weights, tuple(rows.shape), values.device, "y", function)
    if out_dtype is None:
        return values.dtype
    _checks.is_float_dtype("out_dtype", out_dtype)
    return out_dtype  # type: ignore[return-value]


@accepts(CombineCall)
def combine(call: CombineCall) -> Tensor:
    """Return the weighted sum of the rows of each token, as :mod:`fp4gemm.reference.moe` defines it.

    Args:
        y: (rows, d) bfloat16, float16 or float32, contiguous; d a positive multiple of 8.
        row_of_pair: int32 (t, top_k), the row of each slot; one outside of 0..rows-1 contributes nothing.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        out_dtype: None is the dtype of y.

    Returns:
        (t, d) of out_dtype, contiguous.
    """
    y, rows = call.y, call.row_of_pair
    dtype = check_combine(y, rows, call.topk_weights, call.out_dtype, "fp4gemm.combine")
    return formulas.combine(y, rows, call.topk_weights, dtype)


@accepts(CombineCall)
def combine_fake(call: CombineCall) -> Tensor:
    y, rows = call.y, call.row_of_pair
    dtype = check_combine(y, rows, call.topk_weights, call.out_dtype, "fp4gemm.combine")
    return y.new_empty((rows.shape[0], y.shape[1]), dtype=dtype)


# ---- experts


class ExpertsCall(NamedTuple):
    """``experts``."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scales: Tensor | None
    w13_amax: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scales: Tensor | None
    w2_amax: Tensor
    w2_bias: Tensor | None
    w13_rows: int = 0  # the rows of prepacked weights; 0: codes and scales
    w2_rows: int = 0
    w13_e4m3_max: int = 448
    w2_e4m3_max: int = 448
    scaling: int = 1  # the number of an InputCast: what becomes of the rows of x and of h
    activation: int = 4
    batch_invariant: bool = False
    use_fast_accum: bool = False

    @staticmethod
    def arguments(
        x: Tensor, ids: Tensor, weights: Tensor, w13: OperandParts, w2: OperandParts, *more: Any
    ) -> tuple[Any, ...]:
        """The arguments of the operator with these stacks and their biases; ``more`` begin with scaling.

        A tuple, since every call of a layer makes one, and a NamedTuple takes half a microsecond longer.
        """
        data13, scales13, amax13, bound13, rows13, bias13 = w13
        data2, scales2, amax2, bound2, rows2, bias2 = w2
        return (
            x, ids, weights, data13, scales13, amax13, bias13, data2, scales2, amax2, bias2,
            rows13, rows2, bound13, bound2, *more,
        )  # fmt: skip

    @property
    def w13_parts(self) -> OperandParts:
        """The first weights and their bias."""
        return OperandParts(
            self.w13, self.w13_scales, self.w13_amax, self.w13_e4m3_max, self.w13_rows, self.w13_bias
        )

    @property
    def w2_parts(self) -> OperandParts:
        """The second weights and their bias."""
        return OperandParts(
            self.w2, self.w2_scales, self.w2_amax, self.w2_e4m3_max, self.w2_rows, self.w2_bias
        )


def check_experts(call: ExpertsCall) -> Activation:
    """Check the arguments of experts, except for the routing, and return the activation."""
    function = "fp4gemm.experts"
    cast = checked_input(call.scaling)
    if cast.scaling == MXFP8:
        raise ValueError(f"scaling: got {call.scaling}, must be another one for experts")
    quantizes = cast.scaling != NOT_QUANTIZED
    fp8 = call.scaling == FP8_ROW
    k_step = _checks.FP8_STEP if fp8 else _checks.K_STEP_MM
    x = _checks.quantize_input(
        call.x,
        function,
        dtypes=_checks.FLOAT_DTYPES if quantizes else _checks.HALF_DTYPES,
        step=k_step,
        what="d",
    )
    _checks.is_contiguous("x", x)
    ids = topk_ids(call.topk_ids)
    if ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids: shape is {tuple(ids.shape)}, must have {x.shape[0]} rows as x")
    _checks.same_device("topk_ids", ids, x.device, "x")
    topk_weights(call.topk_weights, tuple(ids.shape), x.device, "x", function)
    activation = activations.of_number(call.activation)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    _checks.fast_accum(call.use_fast_accum, fp8)
    d = x.shape[1]
    groups, n13 = checked_stack("w13", call.w13_parts, d, x.device, fp8=fp8)
    num_experts(groups)
    step = 2 * k_step if activation.is_gated else k_step
    _checks.is_multiple("w13", "number of rows", n13, step)
    _, n2 = checked_stack("w2", call.w2_parts, activation.width(n13), x.device, groups, fp8)
    if n2 != d:
        raise ValueError(f"w2: has {n2} rows, must have {d}, the d of x")
    return activation


@accepts(ExpertsCall)
def experts(call: ExpertsCall) -> Tensor:
    """Return the output of a block of experts, as :mod:`fp4gemm.reference.moe` defines it.

    Args:
        x: (t, d) bfloat16 or float16, or float32 unless scaling is 0; contiguous; d a multiple of 32,
            or of 64 for FP8 tokens.
        topk_ids: int32 or int64 (t, top_k), as for :func:`route`.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        w13: the first weights, codes (g, n13, d/2), or prepacked bytes (g, bytes) with w13_rows = n13, int8
            for FP8 tokens, uint8 for all others. For a gated activation the rows of gate and up alternate,
            the gate first.
        w13_scales: swizzled float8_e4m3fn (g, ceil128(n13), ceil4(d/16)); None if w13 is prepacked.
        w13_amax: float32 (g, n13) or (g, 1).
        w13_bias: float32 (g, n13), in the order of the rows of w13; or None.
        w2: the second weights, of (d, n) for each expert, n = n13/2 if the activation is gated, else n13.
        w2_scales, w2_amax, w2_bias: as for w13.
        w13_rows, w2_rows: the rows of prepacked weights, else 0.
        w13_e4m3_max, w2_e4m3_max: the bounds of the block scales, 448 or 256.
        scaling: 1: tokens and h are quantized with one amax a row. 2: with one for the rows of each expert.
            0: they are not (W4A16). 3: they become FP8 tokens, with one amax a row (W4A8). 1 and 2 with
            options of the cast are the number of an :class:`.inputs.InputCast`.
        activation: a number as in :func:`activate`.
        batch_invariant, use_fast_accum: bools, which do not change the bits of the reference; the second must
            be False unless scaling is 3.

    Returns:
        (t, d) of the dtype of x.
    """
    return _experts_by(call, quantize_decoded, gemm)


def _experts_by(
    call: ExpertsCall, quantize_decoded: Callable[..., Any], gemm: Callable[..., Tensor]
) -> Tensor:
    """Return :func:`experts` with other implementations of quantize_decoded and gemm, of the same bits."""
    activation = check_experts(call)
    cast = checked_input(call.scaling)

    def product(rows: Tensor, weight: OperandParts, activation: int, out_dtype: torch.dtype) -> Tensor:
        """The grouped product of rows, quantized first unless scaling is 0, and a weight."""
        a: Tensor | OperandParts = rows
        if cast.scaling == FP8_ROW:
            data, amax = quantize_fp8(rows, offs)
            a = OperandParts(data, None, amax)
        elif cast.scaling != NOT_QUANTIZED:
            data, amax = quantize_decoded(*narrowed(QuantizeDecodedCall, cast.quantize_call(rows, offs)))
            a = OperandParts(data, None, amax, cast.e4m3_max)
        return gemm(*GemmCall.of(a, weight, offs, activation=activation, out_dtype=out_dtype))

    x = call.x
    hidden_dtype = x.dtype if x.dtype in _checks.HALF_DTYPES else torch.bfloat16
    offs, token_of_row, row_of_pair = route(call.topk_ids, call.w13.shape[0])
    h = product(gathered(x, token_of_row), call.w13_parts, activation.number, hidden_dtype)
    y = product(h, call.w2_parts, 0, x.dtype)
    return combine(y, row_of_pair, call.topk_weights)


@accepts(ExpertsCall)
def experts_compiled(call: ExpertsCall) -> Tensor:
    """:func:`experts`, computed by compiled functions."""
    return _experts_by(call, quantize_decoded_compiled, gemm_compiled)


@accepts(ExpertsCall)
def experts_fake(call: ExpertsCall) -> Tensor:
    check_experts(call)
    support.warn_untested(call.x)
    return call.x.new_empty(call.x.shape)


def experts_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """The 2 m n k of both products of experts, where m counts a row for every slot of every token.

    How many slots name an expert is known on the device alone.
    """
    call = ExpertsCall(*args, **kwargs)
    d: int = call.x.shape[-1]
    rows: int = call.topk_ids.shape[0] * call.topk_ids.shape[1]
    n13: int = call.w13_rows or call.w13.shape[-2]
    return 2 * rows * d * (n13 + activations.by_number[call.activation].width(n13))


# ---- zero_outside_groups


class ZeroOutsideGroupsCall(NamedTuple):
    """``zero_outside_groups``, which writes x and returns nothing."""

    x: Tensor
    offs: Tensor


def check_zero_outside_groups(call: ZeroOutsideGroupsCall) -> Tensor:
    """Check the arguments of zero_outside_groups and return x."""
    x = _checks.is_tensor("x", call.x)
    _checks.has_rank("x", x, 2, "(m, n)")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    _checks.no_grad("x", x, "torch.ops.fp4gemm.zero_outside_groups")
    _checks.is_contiguous("x", x)
    _checks.is_aligned("x", x)
    _checks.group_ends(call.offs, x.device, "x")
    return x


@accepts(ZeroOutsideGroupsCall)
def zero_outside_groups(call: ZeroOutsideGroupsCall) -> None:
    """Write zeros to the rows of x that are in no group, those from offs[-1] on.

    Args:
        x: bfloat16, float16 or float32 (m, n), contiguous, 16-byte aligned.
        offs: int32 (g,), g >= 1, the cumulative ends of the groups. On a GPU only the last one is read, and
            one outside of 0..m counts as clipped to it.
    """
    x = check_zero_outside_groups(call)
    ends = _checks.ascending(call.offs, x.shape[0], "the rows of x")
    x[ends[-1] :] = 0


@accepts(ZeroOutsideGroupsCall)
def zero_outside_groups_fake(call: ZeroOutsideGroupsCall) -> None:
    check_zero_outside_groups(call)


OPERATORS = {
    "route": Operator(RouteCall, route, route_fake),
    "combine": Operator(CombineCall, combine, combine_fake),
    "zero_outside_groups": Operator(ZeroOutsideGroupsCall, zero_outside_groups, zero_outside_groups_fake),
    "experts": Operator(ExpertsCall, experts, experts_fake, experts_compiled, experts_flops),
}
