"""The residual channels of the layers of a model, chosen by the calibration."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from ..calibration.residual import residual_channels, why_none
from ..calibration.statistics import InputStatistics, StatisticsFile
from ..nn._hooks import materialized
from . import collect
from .select import Candidate

__all__ = ["choose"]


def choose(
    candidates: Sequence[Candidate], statistics: Mapping[str, InputStatistics], count: int
) -> dict[str, Tensor]:
    """The residual channels, int32 (count,), of the layers that have some, by their first names.

    Layers that read the same tensor, as q, k and v do, have equal statistics, bit for bit. They share their
    channels, which are the costliest of all of them together. The reason of a candidate without channels says
    why.

    Raises:
        ValueError: the statistics of a layer that has channels lack the quantization error.
    """
    groups: dict[bytes, list[tuple[Candidate, Tensor]]] = {}
    for c in candidates:
        name, k, num_experts = collect.products_of(c)[0]
        why = why_none(k, count, bool(num_experts) or collect.is_expert(name))
        if why:
            c.reason = "; ".join(filter(None, (c.reason, why)))
            continue
        error = _error_of(name, k, statistics)
        groups.setdefault(error.cpu().numpy().tobytes(), []).append((c, error))
    chosen = {}
    for members in groups.values():
        with contextlib.ExitStack() as stack:
            for c, _ in members:
                stack.enter_context(materialized(c.module))
            weights = [cast(Tensor, c.module.weight) for c, _ in members]
            channels = residual_channels(weights, [error for _, error in members], count)
        for c, _ in members:
            c.residual_channels = count
            chosen[c.names[0]] = channels
    return chosen


def _error_of(name: str, k: int, statistics: Mapping[str, InputStatistics]) -> Tensor:
    if name not in statistics:
        raise ValueError(f"calibration: has no statistics of {name!r}, must have those of every layer")
    if isinstance(statistics, StatisticsFile):
        known = statistics.read(name, has_moment=False)
    else:
        known = statistics[name]
    if tuple(known.mean_square.shape) != (k,):
        shape = tuple(known.mean_square.shape)
        raise ValueError(f"calibration: mean_square of {name!r} has shape {shape}, must be {(k,)}")
    if known.quantization_error is None:
        raise ValueError(
            f"calibration: has no quantization_error of {name!r}, must have it for residual_channels; "
            "calibrate(..., quantization_error=True) measures it, after smooth(), which changes it"
        )
    return known.quantization_error
