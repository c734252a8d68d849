"""The choice of residual channels: input channels whose errors of the cast to NVFP4 are multiplied too.

ARCQuant (arXiv 2601.07475) appends the errors of some channels to the input of a product, as more columns
along k, and the same columns of the weight to the weight. The paper takes the channels with the largest
amax; here they are those that cost the output most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .. import _checks
from ..ops.options import check_num_residual

__all__ = ["residual_channels"]


def residual_channels(weights: Sequence[Tensor], quantization_errors: Sequence[Tensor], count: int) -> Tensor:
    """The channels of an input whose errors cost the outputs of its layers most, the costliest first.

    The cost of channel j is the squared error that its cast to NVFP4 causes in the outputs, with errors of
    channels that are independent: the sum over the layers of ``quantization_error[j] * sum_n w[n, j]^2``.
    Channels of equal cost are in ascending order.

    Args:
        weights: the float weight (n, k) of each layer that reads the input, as q, k and v do.
        quantization_errors: for each of them float32 (k,), the mean squared error of each channel of its
            input, as :class:`fp4gemm.calibration.InputStatistics` has it.
        count: how many channels are chosen, a multiple of 32, at most k.

    Returns:
        int32 (count,), on the device of the first weight.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    if len(weights) != len(quantization_errors) or not weights:
        raise ValueError(
            f"quantization_errors: got {len(quantization_errors)} of {len(weights)} weights, must be one for "
            "each of one or more weights"
        )
    _checks.is_int("count", count, 1)
    total = None
    for w, error in zip(weights, quantization_errors, strict=True):
        _checks.has_dtype("weights", _checks.is_tensor("weights", w), _checks.FLOAT_DTYPES)
        _checks.has_rank("weights", w, 2, "(n, k)")
        k = weights[0].shape[1]
        _checks.has_shape("weights", w, (w.shape[0], k), " as of the first weight")
        error = _checks.is_tensor("quantization_errors", error)
        _checks.has_dtype("quantization_errors", error, (torch.float32,))
        _checks.has_shape("quantization_errors", error, (k,))
        check_num_residual("count", count, k)
        cost = error.to(w.device) * w.detach().float().square().sum(0)
        total = cost if total is None else total + cost.to(total.device)
    chosen = cast(Tensor, total).argsort(descending=True, stable=True)[:count]
    return chosen.to(torch.int32)


def why_none(k: int, count: int, is_expert: bool) -> str:
    """Why a layer whose inputs become NVFP4 has no residual channels where others have ``count``, in words.

    It is "" for a layer that has them.
    """
    if is_expert:
        return "no residual channels: experts have none"
    return f"no residual channels: k is {k}, must be at least {count}" if k < count else ""


def check_count(name: str, count: object) -> None:
    """Raise unless this can be a number of residual channels: a positive multiple of 32."""
    _checks.is_int(name, count, 1)
    if count % _checks.K_STEP_MM:  # type: ignore[operator]
        raise ValueError(f"{name}: got {count}, must be a multiple of {_checks.K_STEP_MM}")
