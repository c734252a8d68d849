"""OperandParts: a quantized operand as every operator takes it, and its checks as a weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._formats import NVFP4, BlockFormat

__all__ = ["OperandParts", "checked_stack", "checked_weight"]


class OperandParts(NamedTuple):
    """The tensors of a quantized matrix or stack, the numbers that say what they mean, and a bias.

    The values are ``q * s * amax / (6 * e4m3_max)``, those of FP8 tokens ``data * amax / 448``, and those of
    MXFP8 ``v * s``. The operators take these one by one, each in the order of its schema, which
    ``GemmCall.of``, ``LinearCall.of`` and ``ExpertsCall.arguments`` know. Nothing is checked here; the
    operators do that.
    """

    # Codes (.., n, k/2); the bytes of a prepacked weight, (bytes,) or (g, bytes); values q * s; or FP8 tokens
    # (m, k). Of MXFP8 the e4m3 values (.., n, k).
    data: Tensor
    # Swizzled block scales, (.., ceil128(n), ceil4(k/16)), of MXFP8 with k/32; only beside codes and MXFP8.
    scales: Tensor | None
    amax: Tensor | None  # float32 (1,) or (n,); (g, 1) or (g, n); None of MXFP8
    e4m3_max: int = 448
    rows: int = 0  # n of a prepacked weight, else 0
    bias: Tensor | None = None  # what the product of a weight adds, float32 (n,) or (g, n)


def checked_weight(
    name: str,
    w: OperandParts,
    k: int,
    x: Tensor,
    of_x: str = "x",
    fp8: bool = False,
    form: BlockFormat = NVFP4,
) -> int:
    """Check a weight (n, k) beside x, but not its bias, and return n.

    Args:
        name: the names of its tensors begin with this. of_x: the name of x. fp8: whether the product is with
            FP8 tokens, which need prepacked bytes in their own order. form: the format of the weight; only
            one in NVFP4 has an amax and may be prepacked.
    """
    _checks.same_device(name, _checks.is_tensor(name, w.data), x.device, of_x)
    _checks.is_int(f"{name}_rows", w.rows, 0)
    if form is not NVFP4 and (w.rows or w.amax is not None):
        what, unset = ("rows", "0") if w.rows else ("amax", "None")
        raise ValueError(
            f"{name}_{what}: got {_checks.describe(getattr(w, what))}, must be {unset} of a weight in "
            f"{form.name.upper()}"
        )
    if w.rows:
        _no_scales(name, w.scales, "a prepacked weight")
        _checks.prepacked_order(name, w.data, fp8)
        wanted = (_checks.prepacked_bytes(w.rows, k, fp8),)
        _checks.has_shape(name, w.data, wanted, f", the bytes of prepacked (n, k) = ({w.rows}, {k})")
        _checks.is_contiguous(name, w.data)
        _checks.is_aligned(name, w.data)
        n = w.rows
    else:
        if w.scales is None:
            raise ValueError(f"{name}_scales: got None, must be given unless the weight is prepacked")
        codes, _ = _checks.packed_operand(name, w.data, f"{name}_scales", w.scales, form)
        n = codes.shape[0]
        if form.k_of(codes) != k:
            raise ValueError(f"{name}: k is {form.k_of(codes)}, must be {k}, the k of {of_x}")
    if form is NVFP4:
        _checks.vector(f"{name}_amax", w.amax, n, x.device, of_x)
    _checks.is_one_of(f"{name}_e4m3_max", w.e4m3_max, _checks.E4M3_BOUNDS)
    return n


def checked_stack(
    name: str, w: OperandParts, k: int, device: torch.device, groups: int | None = None, fp8: bool = False
) -> tuple[int, int]:
    """Check the weights (g, n, k) of all experts, their amax and bias, and return (g, n).

    Args:
        name: the names of its tensors begin with this. groups: what g must be, if it is known. fp8: as for
            :func:`checked_weight`.
    """
    _checks.is_int(f"{name}_rows", w.rows, 0)
    data = _checks.is_tensor(name, w.data)
    if w.rows:
        _checks.prepacked_order(name, data, fp8)
        n = w.rows
        _checks.has_rank(name, data, 2, "(g, bytes)")
        _checks.has_shape(
            name, data, (data.shape[0], _checks.prepacked_bytes(n, k, fp8)), f", prepacked ({n}, {k})"
        )
        _no_scales(name, w.scales, f"prepacked {name}")
    else:
        _checks.has_dtype(name, data, (torch.uint8,))
        _checks.has_rank(name, data, 3, "(g, n, k/2), or (g, bytes) with a number of rows if it is prepacked")
        n = data.shape[1]
        if 2 * data.shape[2] != k:
            raise ValueError(
                f"{name}: shape is {tuple(data.shape)}, must be (g, n, {k // 2}), k/2 codes a row"
            )
    _checks.is_contiguous(name, data)
    _checks.is_aligned(name, data)
    _checks.same_device(name, data, device, "x")
    g = data.shape[0]
    if groups is not None and g != groups:
        raise ValueError(f"{name}: has {g} experts, must have {groups} as w13")
    if not w.rows:
        s = _checks.is_tensor(f"{name}_scales", w.scales)
        _checks.has_dtype(f"{name}_scales", s, (torch.float8_e4m3fn,))
        _checks.has_shape(f"{name}_scales", s, (g, *_checks.padded_scale_shape(n, k)), ", swizzled")
        _checks.same_device(f"{name}_scales", s, device, "x")
        _checks.is_contiguous(f"{name}_scales", s)
        _checks.is_aligned(f"{name}_scales", s)
    a = _checks.is_tensor(f"{name}_amax", w.amax)
    _checks.has_dtype(f"{name}_amax", a, (torch.float32,))
    if tuple(a.shape) not in ((g, n), (g, 1)):
        raise ValueError(f"{name}_amax: shape is {tuple(a.shape)}, must be ({g}, {n}) or ({g}, 1)")
    for what, t in ((f"{name}_amax", a), (f"{name}_bias", w.bias)):
        if t is None:
            continue
        v = _checks.is_tensor(what, t)
        _checks.has_dtype(what, v, (torch.float32,))
        _checks.same_device(what, v, device, "x")
        _checks.is_contiguous(what, v)
        _checks.no_grad(what, v, "fp4gemm.experts")
    if w.bias is not None:
        _checks.has_shape(f"{name}_bias", w.bias, (g, n))
    _checks.is_one_of(f"{name}_e4m3_max", w.e4m3_max, _checks.E4M3_BOUNDS)
    return g, n


def _no_scales(name: str, scales: object, beside: str) -> None:
    if scales is not None:
        raise ValueError(f"{name}_scales: got {_checks.describe(scales)}, must be None for {beside}")
