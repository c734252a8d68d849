"""The sizes of upstream's tables, and the recipes that they compare: one place for all seven tables.

The sizes are those of TransformerEngine's pull requests #3045 (an amax for each token) and #2865 (MXFP8
grouped linear). Upstream compares its per-token recipe with its production path, which has one amax for each
tensor, rotates the operands of wgrad (RHT) and rounds gradients stochastically (SR).
"""

from __future__ import annotations

from typing import NamedTuple

from fp4gemm.training import PRESETS, Cast, Recipe

# #3045: tokens, and k, which is n of the weights too.
M = (1024, 2048, 4096, 8192, 16384, 32768)
K = (2048, 4096, 8192)
QUICK_M, QUICK_K = (1024, 8192), (4096,)
# On a CPU, where the reference multiplies in float64.
SMALL_M, SMALL_K = (128, 256), (128,)
QUICK_SMALL_M, QUICK_SMALL_K = (128,), (128,)
GROUPS = 8  # tensors of a grouped quantize, parts of the m rows


class Grouped(NamedTuple):
    """A grouped linear layer: m tokens, which ``gemms`` weights (n, k) share evenly."""

    m: int
    n: int
    k: int
    gemms: int


# #2865.
GROUPED = tuple(Grouped(m, 2048, 7168, gemms) for gemms in (4, 8) for m in (16384, 32768, 65536, 98304))
QUICK_GROUPED = (GROUPED[0], GROUPED[4])
SMALL_GROUPED = (Grouped(512, 64, 128, 4),)

PER_TOKEN, PER_TOKEN_RHT, PER_TENSOR = "per token", "per token, RHT", "per tensor, RHT and SR"
_ROTATED = Cast(encode="te_per_token", hadamard="fp32")
RECIPES: dict[str, Recipe] = {
    PER_TOKEN: PRESETS["te_per_token"],
    PER_TOKEN_RHT: PRESETS["te_per_token"].replace(dy_t=_ROTATED, x_t=_ROTATED),
    PER_TENSOR: PRESETS["nvidia"],
}
SEED = 20260
