"""Checks of the arguments of fp4gemm.training's layers and functions."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .._transforms import refuse_transform

STEP = _checks.K_STEP_MM  # features are multiples: fprop sums over k, dgrad over n


def arguments(
    x: object,
    weight: object,
    bias: object,
    rank: int,
    is_plain: bool,
    state: object = None,
    cache: object = None,
) -> None:
    """Check the arguments of a layer whose weight has this rank.

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
        refuse_transform("bias", bias)
        _checks.has_dtype("bias", bias, _checks.FLOAT_DTYPES)
        _checks.has_shape("bias", bias, (*weight.shape[:-1],))
        _checks.same_device("bias", bias, x.device, "x")
    if cache is not None:
        is_cache(cache)
    if state is not None:
        random_state(state, x.device)


def random_state(value: object, device: torch.device) -> Tensor | None:
    """Check and return the random state that a caller passes, or None."""
    return None if value is None else _checks.exact_vector("state", value, 2, torch.int64, device, "x")


def is_cache(value: object) -> None:
    """Raise TypeError unless value has the methods of a WeightCache."""
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
