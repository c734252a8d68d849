"""The float layers and experts that quantize_model chose, made NVFP4 one by one, or block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..calibration.gptq import Factorization
from ..calibration.statistics import InputStatistics
from . import _collect, _transformers
from ._candidates import Candidate
from ._hooks import carry_over, materialized
from ._inputs import ActivationScaling, CheckFinite, WeightScaling
from ._methods import Method, Quantizer
from ._walk import Walk
from .calibration import evaluated
from .experts import Experts
from .linear import Linear

Progress = Callable[[int, int, str], object]


class Swapper:
    """Sets ``swapped``, ``method`` and ``output_error`` of candidates; the model does not change."""

    def __init__(
        self,
        method: Method,
        weight_scaling: WeightScaling,
        activation_scaling: ActivationScaling,
        check_finite: CheckFinite,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._method, self._weight_scaling = method, weight_scaling
        self._options: dict[str, Any] = {
            "activation_scaling": activation_scaling,
            "check_finite": check_finite,
        }
        self._factorization = Factorization()
        self._progress, self._done, self._total = progress, 0, total

    def all(self, chosen: Sequence[Candidate], statistics: Mapping[str, InputStatistics] | None) -> None:
        """Quantize every candidate.

        Raises:
            ValueError: the statistics lack a layer, or have another k or number of experts for it.
        """
        for c in chosen:
            self._swap(c, {} if statistics is None else statistics_of(c, statistics))

    def walk(self, model: torch.nn.Module, chosen: Sequence[Candidate], batches: Any) -> None:
        """Quantize block by block, each with statistics behind the weights that were quantized before.

        Raises:
            ValueError: as of :func:`fp4gemm.calibrate` with sequential=True.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("calibration: is empty, must have at least one batch")
        with evaluated(model):
            walk = Walk(model, batches, chosen, None)
            walk.refuse_outside(chosen)
            for number in range(len(walk.blocks)):
                own = walk.inside(number, chosen)
                collector = _collect.Collector(own, self._method == "gptq")
                with collector.hooked():
                    walk.run(number, keep=False)
                statistics = collector.statistics()
                for c in own:
                    self._swap(c, statistics_of(c, statistics))
                with _rounded(own):
                    walk.run(number, keep=True)

    def _swap(self, c: Candidate, statistics: Mapping[str, InputStatistics]) -> None:
        quantizer = Quantizer(self._method, self._weight_scaling, statistics, self._factorization)
        with materialized(c.module):
            c.swapped = quantized(c, {**self._options, "weight_method": quantizer})
        carry_over(c.module, c.swapped)
        c.method = self._method
        if quantizer.errors:
            squares = [error * error for error in quantizer.errors]
            c.output_error = (sum(squares) / len(squares)) ** 0.5
        c.reason = "; ".join(filter(None, (c.reason, *dict.fromkeys(quantizer.notes))))
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, c.names[0])


def quantized(c: Candidate, options: dict[str, Any]) -> Linear | Experts:
    """The NVFP4 layer or experts of a candidate; options are those of ``from_float``."""
    if isinstance(c.module, torch.nn.Linear):
        return Linear.from_float(c.module, **options)
    return _transformers.convert(c.module, cast(_transformers.ExpertsPlan, c.plan), **options)


def statistics_of(c: Candidate, statistics: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """The statistics of a candidate's products, by "" or "w13" and "w2"."""
    found = {}
    for name, k, num_experts in _collect.products_of(c):
        if name not in statistics:
            raise ValueError(f"calibration: has no statistics of {name!r}, must have those of every layer")
        known = statistics[name]
        shape, wanted = tuple(known.mean_square.shape), (num_experts, k) if num_experts else (k,)
        if shape != wanted:
            raise ValueError(f"calibration: mean_square of {name!r} has shape {shape}, must be {wanted}")
        found["" if not num_experts else name.rpartition(".")[2]] = known
    return found


@contextlib.contextmanager
def _rounded(candidates: Sequence[Candidate]) -> Iterator[None]:
    """Give the float modules the values of their NVFP4 weights until the context ends."""
    held: list[tuple[Tensor, Tensor]] = []
    try:
        for c in candidates:
            for parameter, values in _values(c):
                held.append((parameter, parameter.data))
                parameter.data = values.to(parameter.dtype)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def _values(c: Candidate) -> Iterator[tuple[Tensor, Tensor]]:
    """The float parameters of a module, and the values of the NVFP4 weights that were made from them."""
    if isinstance(c.module, torch.nn.Linear) and isinstance(c.swapped, Linear):
        yield c.module.weight, c.swapped.dequantize_weight()
    elif c.plan is not None and isinstance(c.swapped, Experts):
        yield from _transformers.rounded(c.module, c.plan, c.swapped)
