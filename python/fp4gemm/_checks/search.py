"""The checks of scale_search and importance, the options with which quantize searches for block scales.

The errors follow :mod:`fp4gemm._checks`. Only the CPU reads the entries of importance, since reading those on
a GPU would synchronise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from . import options as option_checks

__all__ = ["arguments", "importance", "importance_values", "is_searched"]

DEFAULT_BOUND = 256  # e4m3_max where it is None


def is_searched(options: Mapping[str, Any]) -> bool:
    """Check scale_search and return whether it is given."""
    value = options["scale_search"]
    option_checks.is_choice("scale_search", value, (None, "mse"))
    if value is None and options["importance"] is not None:
        raise ValueError(
            f"importance: got {_checks.describe(options['importance'])}, must be None without scale_search"
        )
    return value is not None


def arguments(options: Mapping[str, Any], axis: int, decoded: object) -> dict[str, Any]:
    """Return per_row, block_rows and e4m3_max of a call with scale_search.

    Args:
        options: a value for each keyword of fp4gemm.quantize.
        axis: -1 or 0.

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid value or combination; the text names it.
    """
    bound = options["e4m3_max"]
    option_checks.is_choice("e4m3_max", bound, (None, *_checks.E4M3_BOUNDS))
    made = option_checks.operator_arguments({**options, "e4m3_max": None}, options["offs"])
    _checks.is_bool("decoded", decoded)
    for name, value, default, instead in (
        ("encode", options["encode"], "te", ""),
        ("four_over_six", options["four_over_six"], None, ""),
        ("hadamard", options["hadamard"], None, " (rotate x first)"),
        ("stochastic", options["stochastic"], False, ""),
        ("headroom", options["headroom"], 1.0, ""),
        ("axis", axis, -1, " (quantize a copy of x.T)"),
        ("offs", options["offs"], None, ""),
        ("rows", options["rows"], None, ""),
        ("decoded", decoded, False, " (use fp4gemm.decode on the result)"),
    ):
        if value is not default and (isinstance(value, Tensor) or value != default):
            got = _checks.describe(value) if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"scale_search: got {options['scale_search']!r} with {name} {got}, must be None with "
                f"it{instead}"
            )
    return {
        "per_row": made["per_row"],
        "block_rows": made["block_rows"],
        "e4m3_max": DEFAULT_BOUND if bound is None else bound,
    }


def importance(value: object, k: int, device: torch.device, num_matrices: int = 0) -> Tensor | None:
    """Check importance, None or float32 (k,), or (g, k) for a stack of g matrices, and return it."""
    if value is None:
        return None
    x = _checks.is_tensor("importance", value)
    if num_matrices and x.dim() != 1:
        _checks.has_dtype("importance", x, (torch.float32,))
        _checks.has_shape("importance", x, (num_matrices, k), f" or ({k},)")
        _checks.same_device("importance", x, device, "x")
        _checks.is_contiguous("importance", x)
        _checks.no_grad("importance", x, "fp4gemm.quantize")
    else:
        _checks.exact_vector("importance", x, k, torch.float32, device, "x")
    importance_values(x)
    return x


def importance_values(x: Tensor) -> None:
    """Raise ValueError for entries on the CPU that are negative, infinite or NaN."""
    if x.device.type != "cpu" or not _checks.has_memory(x):
        return
    wrong = (~((x >= 0) & (x < torch.inf))).flatten()  # true for NaN, too
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"importance: entry {i} is {x.flatten()[i].item()}, must be at least 0 and finite")
