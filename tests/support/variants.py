"""The variants of quantization in which the tests compare the reference with the second model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from model_quantize import Mode

MODES = {
    "row": Mode("row"),
    "tensor": Mode("tensor"),
    "tiles": Mode("tensor", tiles=True),
    "per_token-row": Mode("row", per_token=True),
    "per_token-tensor": Mode("tensor", per_token=True),
    "fp32-row": Mode("row", rotation="fp32", signs=0xD7E8),
    "fp32-per_token": Mode("row", rotation="fp32", signs=0xACE1, per_token=True),
    "bf16-tensor": Mode("tensor", rotation="bf16", signs=0xD7E8),
    "bf16-no_signs": Mode("row", rotation="bf16"),
    "stochastic-row": Mode("row", seed=1234, offset=7),
    "stochastic-per_token": Mode("tensor", seed=-1, offset=2**63 - 1, per_token=True),
    "stochastic-bf16": Mode("row", seed=2**40, offset=-5, rotation="bf16", signs=0xD7E8),
    "eden-row": Mode("row", seed=99, offset=3, rotation="fp32", signs=0xD7E8, bound=256, eden=True),
    "eden-tensor": Mode("tensor", seed=-(2**62), offset=-1, rotation="fp32", bound=256, eden=True),
} | {
    f"{norm}-{bound}-{'fast' if fast else 'exact'}-{name}": replace(
        mode, adaptive=norm, bound=bound, fast_error=fast
    )
    for norm, bound, fast in itertools.product(("mae", "mse"), (448, 256), (False, True))
    for name, mode in {
        "row": Mode("row"),
        "tensor": Mode("tensor"),
        "tiles": Mode("tensor", tiles=True),
    }.items()
}


def arguments(mode: Mode) -> dict[str, Any]:
    """The arguments of reference.quantize for a mode, besides x, amax and axis."""
    return {
        "per_row": mode.scaling == "row",
        "block_rows": 16 if mode.tiles else 1,
        "encode": 2 if mode.eden else int(mode.per_token),
        "four_over_six": {None: 0, "mae": 1, "mse": 2}[mode.adaptive],
        "fast_error": mode.fast_error,
        "e4m3_max": mode.bound,
        "hadamard": {None: 0, "bf16": 1, "fp32": 2}[mode.rotation],
        "signs": mode.signs,
        "rng_state": None if mode.seed is None else torch.tensor([mode.seed, mode.offset]),
    }
