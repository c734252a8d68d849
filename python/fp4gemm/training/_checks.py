"""Checks of the arguments of fp4gemm.training's layers and functions."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .._transforms import refuse_transform

STEP = _checks.K_STEP_MM  # of features: fprop sums over k and dgrad over n


def operands(x: object, weight: object, bias: object, rank: int, is_plain: bool) -> Tensor:
    """Check the operands of a layer whose weight has this rank; return x, converted to autocast's dtype.

    Features are free where is_plain: the recipe quantizes nothing.
    """
    x, weight = _checks.is_tensor("x", x), _checks.is_tensor("weight", weight)
    refuse_transform("x", x)
    refuse_transform("weight", weight)
    form = "(n, k)" if rank == 2 else "(g, n, k)"
    _checks.has_rank("weight", weight, rank, form)
    *_, n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = k of weight {form}")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    _checks.has_dtype("weight", weight, _checks.FLOAT_DTYPES)
    _checks.same_device("weight", weight, x.device, "x")
    if not is_plain:
        for what, size in (("n (out_features)", n), ("k (in_features)", k)):
            _checks.is_multiple("weight", what, size, STEP)
    if bias is not None:
        bias = _checks.is_tensor("bias", bias)
        _checks.has_dtype("bias", bias, _checks.FLOAT_DTYPES)
        _checks.has_shape("bias", bias, (*weight.shape[:-1],))
        _checks.same_device("bias", bias, x.device, "x")
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants on the device of x, or None where it is off."""
    return torch.get_autocast_dtype(x.device.type) if is_under_autocast(x) else None


def is_under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    # torch.compile of torch 2.11 cannot trace torch.amp.is_autocast_available.
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def cache(value: object) -> None:
    """Raise TypeError unless value is None or has the methods of a WeightCache."""
    if value is None:
        return
    has_methods = callable(getattr(value, "keeps", None)) and callable(getattr(value, "get", None))
    if isinstance(value, type) or not has_methods:
        raise TypeError(
            f"cache: got {_checks.describe(value)}, must be an fp4gemm.training.WeightCache or None"
        )


def main_grad(weight: Tensor) -> Tensor | None:
    """weight.main_grad after checks, or None where the weight has none."""
    value = getattr(weight, "main_grad", None)
    if value is None:
        return None
    name = "weight.main_grad"
    checked = _checks.is_tensor(name, value)
    _checks.has_dtype(name, checked, (torch.float32,))
    _checks.has_shape(name, checked, tuple(weight.shape), ", the shape of weight")
    _checks.same_device(name, checked, weight.device, "weight")
    return checked
