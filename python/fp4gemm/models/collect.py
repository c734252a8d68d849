"""Statistics of the inputs of linear layers and experts, added up by hooks while a model runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, _names
from ..calibration.statistics import InputStatistics
from ..quantize import quantize
from . import moe
from .select import Candidate

_CHUNK = 1 << 26  # elements of the largest float32 copy of an input
_PANEL = 256  # columns of x x^T that one product makes


class Wanted(NamedTuple):
    """What is summed over the rows beside their squares.

    Attributes:
        moment: the matrices x x^T.
        error: the squared errors of the cast to NVFP4, of linear layers that are no experts.
    """

    moment: bool = False
    error: bool = False


class Made(NamedTuple):
    """Sums over the rows of an input: of x^2 (k,), and, where they are wanted, of x x^T (k, k) and of the
    squared errors (k,).
    """

    square: Tensor
    moment: Tensor | None
    error: Tensor | None


class Sums:
    """Sums over the rows of the inputs of one layer, or of the experts of one product."""

    def __init__(self, k: int, num_experts: int, device: torch.device, wanted: Wanted) -> None:
        lead = (num_experts,) if num_experts else ()
        self.count = torch.zeros(lead, dtype=torch.int64, device="cpu")
        self.square = torch.zeros((*lead, k), dtype=torch.float32, device=device)
        self.moment = self.square.new_zeros((*lead, k, k)) if wanted.moment else None
        self.error = self.square.new_zeros(k) if wanted.error else None

    def add(self, x: Tensor, products: Products, expert: int | None = None) -> None:
        """Add the rows of x (m, k)."""
        at = () if expert is None else (expert,)
        made = products.of(x, Wanted(self.moment is not None, self.error is not None))
        self.count[at] += x.shape[0]
        self.square[at] += made.square
        if self.moment is not None and made.moment is not None:
            self.moment[at] += made.moment
        if self.error is not None and made.error is not None:
            self.error += made.error

    def means(self) -> InputStatistics:
        """The statistics, on the CPU."""
        count = self.count.clamp(min=1).to(self.square.device)
        square = (self.square / count[..., None]).cpu()
        moment = None if self.moment is None else _mirrored(self.moment / count[..., None, None]).cpu()
        error = None if self.error is None else (self.error / count).cpu()
        return InputStatistics(self.count, square, moment, error)


class Products:
    """Computes the sums over an input tensor once for all layers that read it, as q, k and v do."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Wanted] | None = None
        self._made: Made | None = None

    def of(self, x: Tensor, wanted: Wanted) -> Made:
        """The sums over the rows of x (m, k), float32.

        The matrix is made in panels of 256 rows, each from its first column on the diagonal to the right;
        what is left of that column is zero. The sums run over chunks of rows, then over batches, in their
        order; within a chunk their order is that of torch's product.
        """
        if self._made is not None and self._is_last(x, wanted):
            return self._made
        k = x.shape[1]
        square, moment = torch.zeros(k, dtype=torch.float32, device=x.device), None
        error = torch.zeros_like(square) if wanted.error else None
        for rows in x.detach().split(max(1, _CHUNK // k)):
            wide = rows.float()
            square += wide.square().sum(0)
            if error is not None:
                error += (wide - quantize(rows).dequantize(torch.float32)).square().sum(0)
            if wanted.moment:
                if moment is None:
                    moment = square.new_zeros(k, k)
                for i in range(0, k, _PANEL):
                    moment[i : i + _PANEL, i:].addmm_(wide[:, i : i + _PANEL].T, wide[:, i:])
        if not x.is_inference():  # an inference tensor does not count writes
            # The reference to x keeps its address from being given to another tensor.
            self._last, self._made = (x, x._version, wanted), Made(square, moment, error)
        return Made(square, moment, error)

    def _is_last(self, x: Tensor, wanted: Wanted) -> bool:
        if self._last is None or x.is_inference():
            return False
        y, written, had = self._last
        is_view = y.data_ptr() == x.data_ptr() and y.shape == x.shape and y.stride() == x.stride()
        return is_view and y.dtype is x.dtype and written == x._version and had == wanted

    def forget(self) -> None:
        """Release the last input and its sums."""
        self._last = self._made = None


def _mirrored(upper: Tensor) -> Tensor:
    """The symmetric matrices (..., k, k) of which ``upper`` has the part above the diagonal; in place."""
    for i in range(0, upper.shape[-1], _PANEL):
        j = i + _PANEL
        square = upper[..., i:j, i:j]
        square.copy_(square.triu() + square.triu(1).transpose(-1, -2))
        upper[..., j:, i:j] = upper[..., i:j, j:].transpose(-1, -2)
    return upper


class Collector:
    """Hooks on the modules of candidates, and the sums that they make.

    Args:
        candidates: linear layers, and modules of experts that were read (they have a plan).
        wanted: what is computed beside mean squares.
    """

    def __init__(self, candidates: Sequence[Candidate], wanted: Wanted) -> None:
        self._candidates = candidates
        self._wanted = wanted
        self._products = Products()
        self._sums: dict[str, Sums] = {}

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Add up what the modules read while this is open."""
        handles = []
        for c in self._candidates:
            hook = self._linear_hook if c.is_linear else self._experts_hook
            handles.append(c.module.register_forward_pre_hook(hook(c), with_kwargs=True))
        try:
            with torch.no_grad():
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._products.forget()

    def statistics(self) -> dict[str, InputStatistics]:
        """The statistics by name, in the order of the candidates. Frees the sums.

        Raises:
            ValueError: the inputs of a layer held NaN or infinity, or no token reached a layer that is not an
                expert; the text names it.
        """
        made: dict[str, InputStatistics] = {}
        unreached, not_finite = [], []
        for c in self._candidates:
            for name, k, num_experts in products_of(c):
                sums = self._sums.pop(name, None)
                if sums is None and not is_expert(name) and not num_experts:
                    unreached.append(name)
                    continue
                sums = sums or Sums(k, num_experts, torch.device("cpu"), self._wanted_of(name, num_experts))
                if not bool(torch.isfinite(sums.square).all()):
                    not_finite.append(name)
                made[name] = sums.means()
        if not_finite:
            raise ValueError(
                f"batches: the inputs of {_listed(not_finite)} hold NaN or infinity, must be finite; the "
                "first of them is where to look"
            )
        if unreached:
            raise ValueError(
                f"batches: no token reached {_listed(unreached)}, must reach every layer (exclude= leaves a "
                "layer out)"
            )
        return made

    def _of(self, name: str, k: int, num_experts: int, device: torch.device) -> Sums:
        if name not in self._sums:
            self._sums[name] = Sums(k, num_experts, device, self._wanted_of(name, num_experts))
        return self._sums[name]

    def _wanted_of(self, name: str, num_experts: int) -> Wanted:
        return self._wanted._replace(error=self._wanted.error and not num_experts and not is_expert(name))

    def _linear_hook(self, c: Candidate) -> Any:
        def add(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if x.numel():
                k = x.shape[-1]
                self._of(c.names[0], k, 0, x.device).add(x.reshape(-1, k), self._products)

        return add

    def _experts_hook(self, c: Candidate) -> Any:
        names = ("hidden_states", "top_k_index")

        def add(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
            x, ids = given[0].reshape(-1, given[0].shape[-1]), given[1].reshape(-1, given[1].shape[-1])
            (first, k, g), (second, k2, _) = products_of(c)
            w13, w2 = self._of(first, k, g, x.device), self._of(second, k2, g, x.device)
            for e in ids.unique().tolist():
                if 0 <= e < g:
                    rows = x[(ids == e).any(1)]
                    w13.add(rows, self._products, e)
                    w2.add(moe.between(module, rows, e), self._products, e)

        return add


def products_of(c: Candidate) -> list[tuple[str, int, int]]:
    """(name, k, number of experts or 0) of each product that a candidate makes."""
    name = c.names[0]
    if isinstance(c.module, torch.nn.Linear):
        return [(name, c.module.in_features, 0)]
    if c.plan is None:
        raise TypeError(f"{name}: got experts that were not read, must have a plan")
    plan = c.plan
    prefix = f"{name}." if name else ""
    return [
        (f"{prefix}w13", plan.hidden, plan.num_experts),
        (f"{prefix}w2", plan.intermediate, plan.num_experts),
    ]


def is_expert(name: str) -> bool:
    """Whether a layer is one of a list of experts, which a text need not reach."""
    parts = name.split(".")
    return any(_names.is_experts(part) and after.isdigit() for part, after in itertools.pairwise(parts))


def run(model: torch.nn.Module, batch: object, index: int) -> None:
    """Call the model with a batch: a mapping as keywords, a tuple or list as arguments, else one argument.

    Raises:
        ValueError: the model does not accept the batch; the text has its index and the model's error.
    """
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    except torch.OutOfMemoryError:
        raise
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
        AssertionError,
    ) as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(
            f"batches: batch {index}, {_checks.describe(batch)}, is not accepted by the model: "
            f"{type(error).__name__}: {text}"
        ) from error


def _listed(names: Sequence[str]) -> str:
    more = "" if len(names) <= 4 else f" and {len(names) - 4} more"
    return ", ".join(repr(name) for name in names[:4]) + more
