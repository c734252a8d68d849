"""The differences between a quantized weight and the float weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import StoredWeight

__all__ = ["LayerError", "layer_error"]

ROWS = 2**22  # elements that are dequantized at a time
ALLOWED = 0.18  # share of the amax of a block: half of the largest step, 1/6, and the rounding of the scale
ROUNDED = 17 / 16  # an e4m3 scale may be smaller by this factor than the number before rounding


@dataclass(frozen=True)
class LayerError:
    """The error of one quantized weight w, whose values are v.

    Attributes:
        module: its name.
        shape: (n, k).
        relative_error: ||v - w|| / ||w||, of Frobenius norms; 0 for a weight of zeros.
        cosine: <v, w> / (||v|| ||w||); 1 for a weight of zeros.
        blocks: how many blocks of 16 it has.
        saturated_blocks: blocks with an element beyond the largest value that the block can hold, by more
            than the rounding of its scale explains (a factor of 17/16).
        zero_blocks: blocks all of whose values are 0.
        amax_ratio: the largest amax in its fused set over its own; 1 where it shares with no layer.
        worst_element: the largest |v - w| of an element over what rounding explains: 0.18 of the amax of its
            block, plus 2^-10 A / B, which is what a block scale of 0 loses. At most 1, but for the methods
            "search" and "gptq", which move elements further where that helps the output.
        output_error: |X (V - W)^T| / |X W^T| on the inputs X of the calibration; None without, or where no
            token reached it.
    """

    module: str
    shape: tuple[int, int]
    relative_error: float
    cosine: float
    blocks: int
    saturated_blocks: int
    zero_blocks: int
    amax_ratio: float
    worst_element: float
    output_error: float | None = None


def layer_error(module: str, weight: Tensor, stored: StoredWeight, amax_ratio: float) -> LayerError:
    """The error of a weight (n, k), a stretch of rows at a time, with sums in float64."""
    n, k = weight.shape
    operand = stored.to_nvfp4()
    scales = operand.compact_scales()
    errors = squares = values_squared = products = 0.0
    saturated = zero = 0
    worst = 0.0
    step = max(16, ROWS // k)
    for begin in range(0, n, step):
        end = min(n, begin + step)
        rows = StoredWeight(
            stored.codes[begin:end],
            stored.block_scales[begin:end],
            stored.outer[begin:end] if stored.outer.shape[0] > 1 else stored.outer,
            stored.format,
            stored.e4m3_max,
        )
        x, v = weight[begin:end].float(), rows.to_nvfp4().dequantize(torch.float32)
        errors += float((v - x).double().square().sum())
        squares += float(x.double().square().sum())
        values_squared += float(v.double().square().sum())
        products += float((v.double() * x).sum())
        amax = rows.amax.view(-1, 1)
        largest = scales[begin:end].float() * amax * (ROUNDED / stored.e4m3_max)
        block_amax = x.abs().view(end - begin, k // 16, 16).amax(-1)
        allowed = ALLOWED * block_amax + amax * (2.0**-10 * ROUNDED / stored.e4m3_max)
        excess = (v - x).abs().view(end - begin, k // 16, 16).amax(-1) / allowed
        worst = max(worst, float(excess.nan_to_num(0.0).max()))  # 0 / 0 in a weight of zeros
        is_zero = (v.view(end - begin, k // 16, 16) == 0).all(-1)
        saturated += int(((block_amax > largest) & ~is_zero).sum())
        zero += int(is_zero.sum())
    norm = math.sqrt(squares * values_squared)
    return LayerError(
        module,
        (n, k),
        math.sqrt(errors / squares) if squares else 0.0,
        products / norm if norm else 1.0,
        n * k // 16,
        saturated,
        zero,
        amax_ratio,
        worst,
    )


def amax_ratios(amaxes: list[float]) -> list[float]:
    """The largest of the amaxes over each of them; 1 where it is 0."""
    largest = max(amaxes)
    return [largest / amax if amax else 1.0 for amax in amaxes]
