"""The checks of the arguments of route, combine and experts, which the functions and the reference share.

They follow the rules of :mod:`fp4gemm._checks`. Which experts the tokens name is on the device and is not
read, except by the CPU implementation of route, which refuses a token that names an expert twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from ..activations import Activation
from ..ops.schema import ExpertsCall, ZeroOutsideGroupsCall
from . import gemm as gemm_checks
from . import options as option_checks

__all__ = [
    "MAX_EXPERTS",
    "combine",
    "experts",
    "num_experts",
    "quantizes_tokens",
    "refuse_duplicates",
    "topk_ids",
    "topk_weights",
    "zero_outside_groups",
]

MAX_EXPERTS = 2048  # kMaxExperts of cpp/src/moe/moe.hpp
ID_DTYPES = (torch.int32, torch.int64)
_MAX_PAIRS = torch.iinfo(torch.int32).max


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


def combine(y: object, row_of_pair: object, weights: object, out_dtype: object, function: str) -> torch.dtype:
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


# ---- experts


def quantizes_tokens(scaling: object) -> bool:
    """Check scaling, 0 or 1, and return whether the tokens are quantized, each with its own amax."""
    _checks.is_one_of("scaling", scaling, (0, 1))
    return scaling == 1


def experts(call: ExpertsCall) -> Activation:
    """Check the arguments of experts, except for the routing, and return the activation."""
    function = "fp4gemm.experts"
    quantizes = quantizes_tokens(call.scaling)
    x = _checks.quantize_input(
        call.x,
        function,
        dtypes=_checks.FLOAT_DTYPES if quantizes else _checks.HALF_DTYPES,
        step=_checks.K_STEP_MM,
        what="d",
    )
    _checks.is_contiguous("x", x)
    ids = topk_ids(call.topk_ids)
    if ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids: shape is {tuple(ids.shape)}, must have {x.shape[0]} rows as x")
    _checks.same_device("topk_ids", ids, x.device, "x")
    topk_weights(call.topk_weights, tuple(ids.shape), x.device, "x", function)
    activation = gemm_checks.activation_of_number(call.activation)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    d = x.shape[1]
    groups, n13 = _weight(
        "w13", call.w13, call.w13_scales, call.w13_amax, call.w13_bias, call.w13_rows, d, x.device
    )
    num_experts(groups)
    step = 2 * _checks.K_STEP_MM if activation.is_gated else _checks.K_STEP_MM
    _checks.is_multiple("w13", "number of rows", n13, step)
    _, n2 = _weight(
        "w2",
        call.w2,
        call.w2_scales,
        call.w2_amax,
        call.w2_bias,
        call.w2_rows,
        activation.width(n13),
        x.device,
        groups,
    )
    if n2 != d:
        raise ValueError(f"w2: has {n2} rows, must have {d}, the d of x")
    for name, bound in (("w13_e4m3_max", call.w13_e4m3_max), ("w2_e4m3_max", call.w2_e4m3_max)):
        _checks.is_one_of(name, bound, _checks.E4M3_BOUNDS)
    return activation


def _weight(
    name: str,
    weight: object,
    scales: object,
    amax: object,
    bias: object,
    rows: object,
    k: int,
    device: torch.device,
    groups: int | None = None,
) -> tuple[int, int]:
    """Check the weights of all experts, their amax and bias, and return (experts, rows)."""
    _checks.is_int(f"{name}_rows", rows, 0)
    w = _checks.is_tensor(name, weight)
    _checks.has_dtype(name, w, (torch.uint8,))
    n = rows or None
    if n is None:
        _checks.has_rank(name, w, 3, "(g, n, k/2), or (g, bytes) with a number of rows if it is prepacked")
        n = w.shape[1]
        if 2 * w.shape[2] != k:
            raise ValueError(f"{name}: shape is {tuple(w.shape)}, must be (g, n, {k // 2}), k/2 codes a row")
    else:
        _checks.has_rank(name, w, 2, "(g, bytes)")
        _checks.has_shape(name, w, (w.shape[0], _checks.prepacked_bytes(n, k)), f", prepacked ({n}, {k})")  # type: ignore[arg-type]
        if scales is not None:
            raise ValueError(
                f"{name}_scales: got {_checks.describe(scales)}, must be None for prepacked {name}"
            )
    _checks.is_contiguous(name, w)
    _checks.is_aligned(name, w)
    _checks.same_device(name, w, device, "x")
    g = w.shape[0]
    if groups is not None and g != groups:
        raise ValueError(f"{name}: has {g} experts, must have {groups} as w13")
    if not rows:
        s = _checks.is_tensor(f"{name}_scales", scales)
        _checks.has_dtype(f"{name}_scales", s, (torch.float8_e4m3fn,))
        _checks.has_shape(f"{name}_scales", s, (g, *_checks.padded_scale_shape(n, k)), ", swizzled")  # type: ignore[arg-type]
        _checks.same_device(f"{name}_scales", s, device, "x")
        _checks.is_contiguous(f"{name}_scales", s)
        _checks.is_aligned(f"{name}_scales", s)
    a = _checks.is_tensor(f"{name}_amax", amax)
    _checks.has_dtype(f"{name}_amax", a, (torch.float32,))
    if tuple(a.shape) not in ((g, n), (g, 1)):
        raise ValueError(f"{name}_amax: shape is {tuple(a.shape)}, must be ({g}, {n}) or ({g}, 1)")
    for what, t in ((f"{name}_amax", a), (f"{name}_bias", bias)):
        if t is None:
            continue
        v = _checks.is_tensor(what, t)
        _checks.has_dtype(what, v, (torch.float32,))
        _checks.same_device(what, v, device, "x")
        _checks.is_contiguous(what, v)
        _checks.no_grad(what, v, "fp4gemm.experts")
    if bias is not None:
        _checks.has_shape(f"{name}_bias", bias, (g, n))  # type: ignore[arg-type]
    return g, n  # type: ignore[return-value]


def zero_outside_groups(call: ZeroOutsideGroupsCall) -> Tensor:
    """Check the arguments of zero_outside_groups and return x."""
    x = _checks.is_tensor("x", call.x)
    _checks.has_rank("x", x, 2, "(m, n)")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    _checks.no_grad("x", x, "torch.ops.fp4gemm.zero_outside_groups")
    _checks.is_contiguous("x", x)
    _checks.is_aligned("x", x)
    option_checks.group_ends(call.offs, x.device, "x")
    return x
