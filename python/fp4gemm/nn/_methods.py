"""The methods by which quantize_model quantizes a float weight, with notes about each weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from .. import _checks
from ..calibration.gptq import DAMPING, Factorization, rounded
from ..calibration.statistics import InputStatistics, Statistics, StatisticsFile
from ..containers.nvfp4 import NVFP4Tensor
from ..quantize import quantize
from ._inputs import WeightScaling

DataFree = Literal["round", "four-over-six", "search"]
Method = Literal["round", "four-over-six", "search", "gptq"]
DATA_FREE, METHODS = get_args(DataFree), get_args(Method)


def chosen_method(method: object, calibration: object, sequential: object) -> Method:
    """The method of quantize_model; None selects the best method that the calibration allows.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    _checks.is_bool("sequential", sequential)
    if method is not None:
        _checks.is_one_of("method", method, METHODS)
    if calibration is None:
        if sequential:
            raise ValueError("sequential: got True, must be False without batches as calibration")
        if method == "gptq":
            raise ValueError("method: got 'gptq', must be another without calibration")
        return "four-over-six" if method is None else cast(Method, method)
    if isinstance(calibration, (Statistics, StatisticsFile)):
        if sequential:
            raise ValueError("sequential: got True, must be False with Statistics (pass the batches instead)")
        if method == "gptq" and not calibration.has_moments:
            raise ValueError(
                "method: got 'gptq', must be another for statistics without second moments (calibrate(..., "
                "second_moment=True) makes them)"
            )
        default: Method = "gptq" if calibration.has_moments else "search"
        return default if method is None else cast(Method, method)
    if isinstance(calibration, (str, bytes, Mapping, Tensor)) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"calibration: got {_checks.describe(calibration)}, must be Statistics or a list of batches"
        )
    return "gptq" if method is None else cast(Method, method)


class Quantizer:
    """Makes the NVFP4 weight of a layer, or the two of experts, by one method.

    Args:
        method: "round": the standard scales. "four-over-six": ``quantize(w, four_over_six="mse")``. "search":
            ``quantize(w, scale_search="mse", importance=mean_square)``, importance None without statistics.
            "gptq": :func:`fp4gemm.calibration.gptq`, and "search" where that fails.
        scaling: the scaling of the weight.
        statistics: those of the layer's input under "", or those of experts under "w13" and "w2"; may be
            empty, except for "gptq".
        factorization: of "gptq", shared by the quantizers of a model.

    Attributes:
        notes: what was done otherwise than asked for, in words.
        errors: |X (W - Q)^T| / |X W^T| of each weight, where its statistics are known; with mean squares
            alone as if the elements of x were independent.
    """

    def __init__(
        self,
        method: Method,
        scaling: WeightScaling,
        statistics: Mapping[str, InputStatistics] | None = None,
        factorization: Factorization | None = None,
    ) -> None:
        self.method, self._scaling = method, scaling
        self._statistics = statistics or {}
        self._factorization = factorization
        self.notes: list[str] = []
        self.errors: list[float] = []

    def __call__(self, w: Tensor, name: str = "") -> NVFP4Tensor:
        """Quantize w (n, k) or (g, n, k)."""
        known = self._statistics.get(name)
        if known is not None:
            known = self._complete(known.to(w.device))
        made = self.made(w, known)
        if known is not None and bool(known.num_tokens.any()):
            self.errors.append(output_error(w, made, known))
        return made.to(w.dtype)

    def made(self, w: Tensor, known: InputStatistics | None, amax: Tensor | None = None) -> NVFP4Tensor:
        """Quantize w by the method with the statistics ``known``; amax is given, or measured from w."""
        if self.method == "round":
            return quantize(w, scaling=self._scaling, amax=amax)
        if self.method == "four-over-six":
            return quantize(w, scaling=self._scaling, amax=amax, four_over_six="mse")
        if known is not None and not bool(known.num_tokens.any()):
            self.notes.append("no token reached it: scales searched without statistics")
            known = None
        if self.method == "gptq" and known is not None and known.second_moment is not None:
            try:
                found = rounded(
                    w,
                    known.second_moment,
                    scaling=self._scaling,
                    amax=amax,
                    factorization=self._factorization,
                )
            except ValueError as error:
                self.notes.append(f"scales searched instead: {error}")
            else:
                most = max(found.damping)
                if most > DAMPING:
                    self.notes.append(f"not positive definite: damping {most:g}")
                return found.weight
        importance = None if known is None else known.mean_square.contiguous()
        return quantize(w, scaling=self._scaling, amax=amax, scale_search="mse", importance=importance)

    def _complete(self, known: InputStatistics) -> InputStatistics:
        """Complete the statistics of experts with fewer than k tokens by the means over all experts.

        With N_e tokens, H_e becomes ``(N_e H_e + (k - N_e) H) / k``, H the mean over all tokens of the layer.
        """
        count = known.num_tokens
        if count.dim() == 0 or bool((count >= known.k).all()) or not bool(count.any()):
            return known
        few = int((count < known.k).sum())
        self.notes.append(f"{few} of {len(count)} experts saw fewer than {known.k} tokens: all added")
        share = count.float() / count.sum()
        square = torch.tensordot(share, known.mean_square, 1)
        moment = None if known.second_moment is None else torch.tensordot(share, known.second_moment, 1)
        return completed(known, InputStatistics(count.sum(), square, moment))


def completed(own: InputStatistics, of_all: InputStatistics) -> InputStatistics:
    """Statistics of an expert, or of each expert of a stack, completed to k tokens.

    The means ``of_all`` over the tokens of all experts take the place of the missing tokens.
    """
    part = (own.num_tokens / own.k).clamp(max=1).float()

    def mixed(x: Tensor, others: Tensor) -> Tensor:
        share = part.view(*part.shape, *(1,) * (x.dim() - part.dim()))
        return x * share + others * (1 - share)

    moment = None
    if own.second_moment is not None and of_all.second_moment is not None:
        moment = mixed(own.second_moment, of_all.second_moment)
    return InputStatistics(own.num_tokens, mixed(own.mean_square, of_all.mean_square), moment)


def output_error(w: Tensor, made: NVFP4Tensor, known: InputStatistics) -> float:
    """|X (W - Q)^T| / |X W^T| over the inputs of the statistics. Synchronises."""
    total, wrong = 0.0, 0.0
    num_experts = w.shape[0] if w.dim() == 3 else 0
    for e in range(max(num_experts, 1)):
        values, q = (w[e], made[e]) if num_experts else (w, made)
        weight = float(known.num_tokens[e] if num_experts else 1)
        square = known.mean_square[e] if num_experts else known.mean_square
        moment = known.second_moment
        moment = None if moment is None else moment[e] if num_experts else moment
        wide = values.float()
        for x, is_error in ((wide, False), (wide - q.dequantize(torch.float32), True)):
            product = x * square if moment is None else x @ moment
            energy = weight * max(float((product.double() * x).sum()), 0.0)
            total, wrong = (total, wrong + energy) if is_error else (total + energy, wrong)
    return float((wrong / total) ** 0.5) if total else 0.0


def as_quantizer(method: DataFree | Quantizer, scaling: WeightScaling) -> Quantizer:
    """The Quantizer of a method that needs no data; TypeError or ValueError for another name."""
    if isinstance(method, Quantizer):
        return method
    _checks.is_one_of("weight_method", method, DATA_FREE)
    return Quantizer(method, scaling)
