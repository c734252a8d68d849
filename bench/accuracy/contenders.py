"""The contenders of `python -m bench accuracy`: methods for weights, and what becomes of activations."""

from __future__ import annotations

from typing import NamedTuple

from .emulation import Operands

ACTIVATIONS = {
    "W4A16": Operands(),
    "W4A8": Operands("fp8"),
    "W4A4": Operands("nvfp4"),
    "W4A4, 4/6": Operands("nvfp4", {"four_over_six": "mse"}),
    "W4A4, residual": Operands("nvfp4", residual=32),
    "W4A4, residual 64": Operands("nvfp4", residual=64),
    "MXFP8": Operands("mxfp8"),  # of weights in MXFP8 alone, W8A8
}
# The kinds of --fp8-sums, for which the layers themselves run in place of an emulation: their use_fast_accum.
FP8_SUMS = {"W4A8, promoted": False, "W4A8, fast sums": True}

WITH_FP8 = ("W4A16", "W4A8", "W4A4")
EVERY = (*WITH_FP8, "W4A4, 4/6")  # of weights in NVFP4
RESIDUAL = ("W4A4, residual", "W4A4, residual 64")


class Contender(NamedTuple):
    """A way to quantize the weights of a model."""

    name: str
    method: str = ""  # of quantize_model; "": the weights stay in float
    has_data: bool = False  # whether the method gets the statistics
    is_smoothed: bool = False
    is_sequential: bool = False
    activations: tuple[str, ...] = ("W4A16", "W4A4")
    is_fp8: bool = False  # the weights become e4m3, with a scale for each row; without a method
    made_for: str = "per-token"  # the activations of quantize_model

    @property
    def layers(self) -> str:
        """What the layers of the quantized model compute, one of ACTIVATIONS."""
        return {"fp8": "W4A8", "mxfp8": "MXFP8"}.get(self.made_for, "W4A4")


CONTENDERS = (
    Contender("float weights", activations=("W4A8", "W4A4", "W4A4, 4/6", *RESIDUAL)),
    Contender(
        "smooth + float weights", is_smoothed=True, activations=("W4A8", "W4A4", "W4A4, 4/6", *RESIDUAL)
    ),
    Contender("FP8 weights", activations=("W4A8",), is_fp8=True),
    Contender("MXFP8 weights", "round", activations=("MXFP8",), made_for="mxfp8"),
    Contender("round", "round"),
    Contender("four over six", "four-over-six"),
    Contender("search", "search"),
    Contender("search, weighted", "search", True, activations=WITH_FP8),
    Contender("GPTQ", "gptq", True, activations=WITH_FP8),
    Contender("GPTQ, sequential", "gptq", True, is_sequential=True),
    Contender("smooth + search, weighted", "search", True, True, activations=WITH_FP8),
    Contender("smooth + GPTQ, sequential", "gptq", True, True, True, activations=EVERY),
    Contender("smooth + GPTQ", "gptq", True, True, activations=(*EVERY, *RESIDUAL)),
    Contender("search, weighted, for FP8", "search", True, activations=WITH_FP8, made_for="fp8"),
    Contender("GPTQ, for FP8", "gptq", True, activations=WITH_FP8, made_for="fp8"),
    Contender(
        "smooth + search, weighted, for FP8", "search", True, True, activations=WITH_FP8, made_for="fp8"
    ),
    Contender("smooth + GPTQ, for FP8", "gptq", True, True, activations=WITH_FP8, made_for="fp8"),
)
