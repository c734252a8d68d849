"""The harness of a run: the device, how contenders are timed on it, its roofline and its state meanwhile."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import launches, library, machine, roofline
from .library import (
    Call,
    Timing,
    calls_for,
    error_line,
    operands_read,
    rotations,
    time_interleaved,
)
from .timing import time_cpu, time_cupti, time_eager
from .verify import replayed

T = TypeVar("T")
# Milliseconds of untimed work of a contender ahead of each of its samples. In bursts of a millisecond a GPU
# draws a fifth of its power limit and runs at clocks that no model sees; after 60 ms of a compute-bound
# kernel it is at the limit.
SETTLE_MS = 60.0
AHEAD = "ahead"  # beside the names of contenders: the calls ahead of theirs, alone


class Measured(NamedTuple):
    """The times of one contender."""

    timing: Timing
    eager_us: float | None = None  # of calls without a graph, where a graph was timed
    cupti_us: float | None = None  # as CUPTI sees the kernels, where asked for
    launches: int | None = None  # kernels, copies and fills of a call, where a graph was captured
    ahead_us: float | None = None  # of the call ahead, which is subtracted from ``timing``


class Harness:
    """Times everything of a run, and holds what the cases of a run share.

    Attributes:
        fake: None; or, where a test runs the code of a device that is not there, what stands in for it. Each
            row of such a run says so, and files of results and reports refuse it.
    """

    fake: str | None = None

    def __init__(
        self,
        device: torch.device,
        rounds: int = 20,
        eager: bool = True,
        cupti: bool = False,
        settle_ms: float = SETTLE_MS,
        bounds: roofline.Roofline | None = None,
        only: re.Pattern[str] | None = None,
    ) -> None:
        """Makes a harness.

        Args:
            device: where everything runs.
            rounds: samples of each contender.
            eager, cupti: whether calls are also timed without a graph, and by CUPTI.
            settle_ms: milliseconds of a contender's work ahead of each of its samples.
            bounds: the roofline, if it is known already; otherwise it is measured at first use.
            only: contenders of products in whose name it is not found are left out.
        """
        self.device = device
        self.rounds = rounds
        self.eager = eager
        self.cupti = cupti
        self.settle_us = 1e3 * settle_ms
        self.only = only
        self.monitor = machine.Monitor(device)
        self._bounds = bounds
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def operands(self) -> frozenset[str]:
        """The forms of operands that the library's kernels read on this device; none on the CPU."""
        return operands_read(self.device)

    @property
    def has_nvfp4_cores(self) -> bool:
        """Whether the device multiplies NVFP4 in its tensor cores."""
        return library.has_nvfp4_cores(self.operands)

    @functools.cached_property
    def streams_prepacked(self) -> bool:
        """Whether the library's layers hold prepacked weights on this device, for quantized tokens."""
        return library.streams_prepacked(self.device)

    @functools.cached_property
    def l2_bytes(self) -> int:
        return machine.l2_bytes(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of unquantized operands: that of the models which run on such a device."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def unit(self) -> str:
        """``roofline.Work.unit`` of torch's product of unquantized operands."""
        return "16 bit" if self.is_cuda else "fp32"

    @property
    def fp8_unit(self) -> str:
        """``roofline.Work.unit`` of products of FP8 operands; a CPU converts them first."""
        return "fp8" if self.is_cuda else self.unit

    @property
    def our_unit(self) -> str:
        """``roofline.Work.unit`` of our products of NVFP4: NVFP4, or the type to which they are decoded."""
        return "nvfp4" if self.has_nvfp4_cores else self.unit

    @property
    def roofline(self) -> roofline.Roofline:
        """The roofline of the device, measured at first use."""
        if self._bounds is None:
            self._bounds = roofline.measure(self.device, self.rounds)
            self.free()
        return self._bounds

    def rotations(self, bytes_per_call: int) -> int:
        """How many sets of operands keep the caches cold."""
        return rotations(bytes_per_call, self.l2_bytes)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)

    def gaussian(self, gen: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=gen, dtype=self.dtype)

    def measure(
        self,
        contenders: Mapping[str, Sequence[Call]],
        flop: float,
        exact: Collection[str] = (),
        ahead: Sequence[Call] = (),
    ) -> tuple[dict[str, Measured], dict[str, str]]:
        """Times contenders, interleaved.

        A contender that cannot be captured in a graph, or whose replays leave another result than a call, is
        not timed.

        Args:
            contenders: the calls of each, on as many inputs as keep the caches cold.
            flop: the operations of one call, by which the number of calls in a graph is chosen.
            exact: those whose replays must leave the bits of a call; of the others a rounding may differ.
            ahead: calls whose kernels let no kernel behind them start early. In the graphs one of them is
                ahead of each call of a contender, and the time that they take alone is subtracted. Without
                them a kernel of programmatic dependent launch overlaps with the previous call of itself: it
                loads weights on the SMs that this one leaves idle. On a CPU nothing overlaps, and they are
                not called.

        Returns:
            The times by name, and by name the reason of each that was not timed.
        """
        if not contenders:
            return {}, {}
        if not self.is_cuda:
            return {name: Measured(t) for name, t in time_cpu(contenders, self.rounds).items()}, {}
        failed, counts = {}, {}
        for name, calls in contenders.items():
            try:
                counts[name] = launches.count(calls[0])
            except RuntimeError as error:
                failed[name] = f"cannot be captured in a CUDA graph: {error_line(error)}"
        timed = {name: calls for name, calls in contenders.items() if name not in failed}
        results: dict[str, object] = {}
        graphs = {name: behind(ahead, calls) for name, calls in timed.items()}
        if ahead and graphs:
            graphs[AHEAD] = list(ahead)
        timings = time_interleaved(graphs, self.rounds, calls_for(flop), results, self.settle_us)
        ahead_us = timings.pop(AHEAD).median_us if AHEAD in timings else None
        if ahead_us is not None:
            timings = {name: less(timing, ahead_us) for name, timing in timings.items()}
        made = {}
        for name, calls in timed.items():
            result = results.pop(name)
            reason = None if result is None else replayed(result, calls[-1], name in exact)
            if reason is not None:
                failed[name] = reason
                continue
            eager = time_eager(calls, timings[name].median_us) if self.eager else None
            cupti = time_cupti(calls) if self.cupti else None
            made[name] = Measured(timings[name], eager, cupti, counts[name], ahead_us)
        return made, failed

    def conditions(self, began: float) -> machine.Facts:
        """The medians of clocks, power and temperature since ``began``, a value of ``now()``."""
        return self.monitor.since(began)

    def now(self) -> float:
        return time.monotonic()

    def keep(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """The object of this key, made if the last call for ``what`` had another key.

        The object of the other key is freed first: weights of two cases need not fit into memory together.
        """
        found = self._kept.get(what)
        if found is None or found[0] != key:
            self._kept.pop(what, None)
            del found
            self.free()
            self._kept[what] = (key, make())
        made: T = self._kept[what][1]
        return made

    def free(self) -> None:
        """Returns to the device what torch's allocator caches."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Ends the monitor and drops what was kept."""
        self.monitor.close()
        self._kept.clear()


def behind(ahead: Sequence[Call], calls: Sequence[Call]) -> list[Call]:
    """Each of ``calls`` with the call of the same index ahead of it; ``ahead`` is repeated, or empty."""
    if not ahead:
        return list(calls)

    def both(first: Call, call: Call) -> object:
        first()
        return call()

    return [functools.partial(both, ahead[i % len(ahead)], call) for i, call in enumerate(calls)]


def less(timing: Timing, us: float) -> Timing:
    """The timing with ``us`` subtracted from each of its numbers."""
    return Timing(timing.median_us - us, timing.p10_us - us, timing.p90_us - us)
