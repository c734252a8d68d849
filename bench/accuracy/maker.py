"""The quantized models of the contenders, and what making each of them costs."""

from __future__ import annotations

import copy
import sys
from typing import Any

import fp4gemm
import torch
from fp4gemm.calibration import Statistics

from ..report.results import Row
from .contenders import Contender
from .emulation import Operands, emulated
from .measure import watched
from .subjects import Subject


class Maker:
    """Makes the contenders of one float model; statistics and the smoothed model are made once.

    The cost of a contender is that of everything it needs, also of what was made for another one before:
    seconds of calibration, smoothing and rounding, and by how much memory grows above that of the float
    model, the statistics included where they lie in the same memory.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._device = next(subject.model.parameters()).device
        self._statistics: dict[bool, tuple[Statistics, Row]] = {}
        # The smoothed model of the last contender that had one: whether it has second moments comes first.
        self._smoothed: tuple[bool, torch.nn.Module, Statistics, Row] | None = None

    def statistics(self, second_moment: bool = False) -> tuple[Statistics, Row]:
        """Return the statistics of the float model, and what they cost."""
        if second_moment not in self._statistics:
            with watched(self._device) as cost:
                made = fp4gemm.calibrate(
                    self._subject.model, self._subject.batches, second_moment=second_moment
                )
            print(f"calibrated in {cost['seconds']:.0f} s", file=sys.stderr, flush=True)
            self._statistics[second_moment] = made, cost
        return self._statistics[second_moment]

    def smoothed(self, second_moment: bool = False) -> tuple[torch.nn.Module, Statistics, Row]:
        """The smoothed model, its statistics, and the cost of calibration and smoothing."""
        if self._smoothed is None or self._smoothed[0] != second_moment:
            self._smoothed = None
            known, before = self.statistics(second_moment)
            model = copy.deepcopy(self._subject.model)
            with watched(self._device) as cost:
                made = fp4gemm.models.smooth(model, known, self._subject.batches[0])
            self._smoothed = second_moment, model, made, self._after(before, known, cost)
        return self._smoothed[1:]

    @property
    def is_smoothed(self) -> bool:
        """Whether smoothing changes anything: the norms of some models may not be divided."""
        known, changed = self.statistics()[0], self.smoothed()[1]
        return any(known[name] is not changed[name] for name in known)

    def make(self, contender: Contender) -> tuple[torch.nn.Module, torch.nn.Module, Row]:
        """The float model that is rounded, the quantized one, and the cost."""
        model, cost, known = self._subject.model, {"seconds": 0.0, "peak_bytes": 0}, None
        needs_moments = contender.method == "gptq" and not contender.is_sequential
        if contender.is_smoothed:
            model, known, cost = self.smoothed(needs_moments)
        elif contender.has_data and not contender.is_sequential:
            known, cost = self.statistics(needs_moments)
        options: dict[str, Any] = {"method": contender.method, "activations": contender.made_for}
        if contender.is_sequential:
            options |= {"calibration": self._subject.batches, "sequential": True}
        elif contender.has_data:
            options["calibration"] = known
        quantized = copy.deepcopy(model)
        with watched(self._device) as rounding:
            quantized = fp4gemm.models.quantize_model(quantized, **options)
        return model, quantized, self._after(cost, known, rounding)

    def _after(self, before: Row, kept: Statistics | None, then: Row) -> Row:
        """The cost of two steps, the second of them with statistics of the first one in memory."""
        kept_bytes = 0
        if kept is not None and self._device.type == "cpu":  # statistics lie in the memory of the CPU
            parts = [t for s in kept.values() for t in (s.mean_square, s.second_moment) if t is not None]
            kept_bytes = sum(t.numel() * t.element_size() for t in parts)
        return {
            "seconds": before["seconds"] + then["seconds"],
            "peak_bytes": max(before["peak_bytes"], kept_bytes + then["peak_bytes"]),
        }


def difference(quantized: torch.nn.Module, ids: torch.Tensor, operands: Operands) -> float:
    """The largest |y' - y| / |y| over the layers, y of a quantized layer and y' of its emulation.

    Layer by layer, since a value near a tie that rounds the other way changes all that comes behind it.
    """
    largest = 0.0

    def compare(layer: torch.nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        nonlocal largest
        found = emulated(layer, operands)(args[0])
        largest = max(largest, float((found - y).norm() / y.norm()))

    layers = [m for m in quantized.modules() if isinstance(m, fp4gemm.nn.Linear)]
    handles = [layer.register_forward_hook(compare) for layer in layers]
    try:
        with torch.inference_mode():
            quantized(ids)
    finally:
        for handle in handles:
            handle.remove()
    return largest
