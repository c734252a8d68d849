"""The statistics of each matrix of a plan, also where an expert saw few tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..calibration.statistics import InputStatistics, Statistics, StatisticsFile
from ..nn._methods import completed
from .errors import CheckpointError
from .plan import FusedSet, Matrix, Plan
from .source import TensorInfo

__all__ = ["Inputs", "Place", "inputs_of", "place_of"]

# The projections of an expert, and the product of a stack of experts whose input is theirs.
PRODUCTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "w13"),
    **dict.fromkeys(("down_proj", "w2"), "w2"),
}
EXPERT = re.compile(rf"(.+)\.(\d+)\.({'|'.join(PRODUCTS)})")
STACK = re.compile(r"(.+)\.(gate_up_proj|down_proj)")


class Place(NamedTuple):
    """The place of the statistics of a matrix: the name of a layer, and which expert of it."""

    name: str
    expert: int | None = None


def place_of(matrix: Matrix) -> tuple[Place, Place | None]:
    """The place of a matrix under its own name, and its place in a stack of experts if it can have one."""
    match = EXPERT.fullmatch(matrix.module)
    if match is not None:
        return Place(matrix.module), Place(f"{match[1]}.{PRODUCTS[match[3]]}", int(match[2]))
    match = STACK.fullmatch(matrix.module)
    if match is not None and matrix.expert is not None:
        return Place(matrix.module), Place(f"{match[1]}.{PRODUCTS[match[2]]}", matrix.expert)
    return Place(matrix.module), None


class Inputs:
    """The statistics of the inputs of matrices.

    Args:
        known: of layers under the names of modules in the checkpoint; of stacked experts ``NAME.w13`` and
            ``NAME.w2``, or of each expert's projections.
        has_moment: whether second moments are needed.
    """

    def __init__(self, known: Statistics | StatisticsFile, has_moment: bool) -> None:
        self._known, self._has_moment = known, has_moment
        self._means: dict[str, InputStatistics] = {}
        self._lock = threading.Lock()

    def check(self, sets: Iterable[FusedSet], tensors: Mapping[str, TensorInfo]) -> None:
        """Compare the names and shapes with those of a plan.

        Raises:
            CheckpointError: a matrix has no statistics, or those of another k or number of experts, or none
                of the second moment that is needed; or statistics belong to no module of the checkpoint. The
                text names the module.
        """
        experts: dict[str, int] = {}
        for matrix in _matrices(sets):
            place = self._place(matrix)
            about = self._about(place.name)
            if place.expert is not None:
                experts[place.name] = max(experts.get(place.name, 0), place.expert + 1)
            k, shape = matrix.shape[1], tuple(about.mean_square.shape)
            if shape[-1] != k or len(shape) != 1 + (place.expert is not None):
                wanted = f"({k},)" if place.expert is None else f"(experts, {k})"
                raise CheckpointError(
                    f"calibration: mean_square of {place.name} has shape {shape}, must be {wanted} for "
                    f"{matrix.module}"
                )
            if self._has_moment and about.second_moment is None:
                raise CheckpointError(f"calibration: {place.name} has no second moment, must have for 'gptq'")
        for name, number in experts.items():
            found = self._about(name).mean_square.shape[0]
            if found != number:
                raise CheckpointError(f"calibration: {name} is of {found} experts, must be of {number}")
        modules = _modules(tensors)
        for name in self._known:
            if name not in modules:
                raise CheckpointError(
                    f"calibration: has statistics of {name!r}, which is no module of the checkpoint, such as "
                    f"{_first(sets)}"
                )

    def of(self, matrix: Matrix, device: torch.device) -> tuple[InputStatistics, str]:
        """The statistics of a matrix on a device, and a note if those of other experts were added to them."""
        place = self._place(matrix)
        own, note = self._read(place), ""
        if place.expert is not None and 0 < int(own.num_tokens) < own.k:
            own = completed(own, self._mean(place.name))
            note = f"{int(own.num_tokens)} tokens, fewer than {own.k}: those of all experts added"
        return own.to(device), note

    def _place(self, matrix: Matrix) -> Place:
        alone, stacked = place_of(matrix)
        if alone.name in self._known:
            return alone
        if stacked is not None and stacked.name in self._known:
            return stacked
        also = f" (or {stacked.name})" if stacked is not None else ""
        some = next(iter(self._known), None)
        raise CheckpointError(
            f"calibration: has no statistics of {alone.name}{also}, must have those of every module that is "
            f"quantized; it has {len(self._known)}" + (f", such as {some}" if some is not None else "")
        )

    def _about(self, name: str) -> InputStatistics:
        known = self._known
        return known.about(name) if isinstance(known, StatisticsFile) else known[name]

    def _read(self, place: Place) -> InputStatistics:
        if isinstance(self._known, StatisticsFile):
            return self._known.read(place.name, place.expert, has_moment=self._has_moment)
        own = self._known[place.name]
        moment = own.second_moment if self._has_moment else None
        if place.expert is None:
            return InputStatistics(own.num_tokens, own.mean_square, moment)
        e = place.expert
        return InputStatistics(own.num_tokens[e], own.mean_square[e], None if moment is None else moment[e])

    def _mean(self, name: str) -> InputStatistics:
        """The means over the tokens of all experts of a stack, read one by one; the last result is cached."""
        with self._lock:
            if name not in self._means:
                count = self._about(name).num_tokens.shape[0]
                total, square, moment = 0, None, None
                for e in range(count):
                    one = self._read(Place(name, e))
                    tokens = int(one.num_tokens)
                    total += tokens
                    square = _plus(square, one.mean_square, tokens)
                    moment = None if one.second_moment is None else _plus(moment, one.second_moment, tokens)
                if square is None:
                    raise CheckpointError(f"calibration: {name} is of 0 experts, must have one")
                self._means.clear()
                self._means[name] = InputStatistics(
                    torch.tensor(total), square / total, None if moment is None else moment / total
                )
            return self._means[name]


def inputs_of(plan: Plan) -> Inputs | None:
    """The statistics of a plan's calibration, compared with the plan; None for a method that needs none.

    Raises:
        CheckpointError: they do not fit the plan; the text names the module. ValueError: the calibration is a
            text.
    """
    known = plan.options.calibration
    if known is None:
        return None
    if not isinstance(known, Statistics | StatisticsFile):
        raise ValueError("calibration: got a text, must be statistics here, as fp4gemm.calibrate makes them")
    made = Inputs(known, plan.options.method == "gptq")
    made.check(plan.sets, plan.tensors)
    return made


def _plus(total: torch.Tensor | None, x: torch.Tensor, weight: int) -> torch.Tensor:
    return x * float(weight) if total is None else total.add_(x, alpha=weight)


def _matrices(sets: Iterable[FusedSet]) -> Iterator[Matrix]:
    for one in sets:
        yield from one.matrices


def _modules(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The names that statistics may have: of modules, and of the products of stacked experts."""
    found = {name.removesuffix(".weight") for name in tensors}
    for name in list(found):
        match = EXPERT.fullmatch(name) or STACK.fullmatch(name)
        if match is not None:
            found |= {f"{match[1]}.w13", f"{match[1]}.w2"}
    return found


def _first(sets: Iterable[FusedSet]) -> str:
    return next(iter(sets)).matrices[0].module
