"""The contenders of `python -m bench accuracy`: methods for weights, and what becomes of activations."""

from __future__ import annotations

from typing import Any, NamedTuple

FOUR = {"four_over_six": "mse"}
ACTIVATIONS: dict[str, dict[str, Any] | None] = {"W4A16": None, "W4A4": {}, "W4A4, 4/6": FOUR}


class Contender(NamedTuple):
    """A way to quantize the weights of a model."""

    name: str
    method: str = ""  # of quantize_model; "": the weights stay in float
    has_data: bool = False  # whether the method gets the statistics
    is_smoothed: bool = False
    is_sequential: bool = False
    activations: tuple[str, ...] = ("W4A16", "W4A4")


CONTENDERS = (
    Contender("float weights", activations=("W4A4", "W4A4, 4/6")),
    Contender("round", "round"),
    Contender("four over six", "four-over-six"),
    Contender("search", "search"),
    Contender("search, weighted", "search", True),
    Contender("GPTQ", "gptq", True),
    Contender("GPTQ, sequential", "gptq", True, is_sequential=True),
    Contender("smooth + search, weighted", "search", True, True),
    Contender("smooth + GPTQ, sequential", "gptq", True, True, True, activations=tuple(ACTIVATIONS)),
    Contender("smooth + GPTQ", "gptq", True, True, activations=tuple(ACTIVATIONS)),
)
