"""The harness: the device, how its contenders are timed, its roofline and its state meanwhile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from fp4gemm.device.products import error_line
from torch import Tensor

from . import machine, roofline
from .timing import (
    Call,
    Timing,
    calls_for,
    capture,
    rotations,
    time_cpu,
    time_cupti,
    time_eager,
    time_interleaved,
)
from .verify import replayed

T = TypeVar("T")
# Of the same work ahead of each sample. In bursts of a millisecond a card draws a fifth of its power and runs
# at clocks that no model sees; after 60 ms of a compute-bound kernel it is at its power limit.
SETTLE_MS = 60.0


class Measured(NamedTuple):
    """What was found of one contender."""

    timing: Timing
    eager_us: float | None = None  # called from Python one after the other, where that is another way
    cupti_us: float | None = None  # by CUPTI, where asked for


class Harness:
    """What everything of a run is measured with."""

    def __init__(
        self,
        device: torch.device,
        rounds: int = 20,
        eager: bool = True,
        cupti: bool = False,
        settle_ms: float = SETTLE_MS,
        bounds: roofline.Roofline | None = None,
    ) -> None:
        self.device = device
        self.rounds = rounds
        self.eager = eager
        self.cupti = cupti
        self.settle_us = 1e3 * settle_ms
        self.monitor = machine.Monitor(device)
        self._bounds = bounds
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def major(self) -> int | None:
        """Of the compute capability; None for a CPU."""
        return torch.cuda.get_device_capability(self.device)[0] if self.is_cuda else None

    @functools.cached_property
    def l2_bytes(self) -> int:
        return machine.l2_bytes(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of plain operands: what a model has on such a device."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def unit(self) -> str:
        """roofline.Work.unit of torch's own product of such operands."""
        return "16 bit" if self.is_cuda else "fp32"

    @property
    def our_unit(self) -> str:
        """That of a product of ours: NVFP4 tensor cores, elsewhere what the operands are decoded for."""
        return "nvfp4" if self.major is not None and self.major >= 10 else self.unit

    @property
    def roofline(self) -> roofline.Roofline:
        """Measured when it is first asked for."""
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
        self, contenders: Mapping[str, Sequence[Call]], flop: float, exact: Collection[str] = ()
    ) -> tuple[dict[str, Measured], dict[str, str]]:
        """Times contenders, interleaved; and why some could not be timed.

        ``flop`` of a call says how many of them a sample needs. A contender that cannot be captured in a
        graph, or whose replays leave something else than a call, has no time; of ``exact`` ones bits count.
        """
        if not contenders:
            return {}, {}
        if not self.is_cuda:
            return {name: Measured(t) for name, t in time_cpu(contenders, self.rounds).items()}, {}
        failed = {}
        for name, calls in contenders.items():
            try:
                capture(calls[:1])
            except RuntimeError as error:
                failed[name] = f"cannot be captured in a CUDA graph: {error_line(error)}"
        timed = {name: calls for name, calls in contenders.items() if name not in failed}
        results: dict[str, object] = {}
        timings = time_interleaved(timed, self.rounds, calls_for(flop), results, self.settle_us)
        made = {}
        for name, calls in timed.items():
            result = results.pop(name)
            reason = None if result is None else replayed(result, calls[-1], name in exact)
            if reason is not None:
                failed[name] = reason
                continue
            eager = time_eager(calls, timings[name].median_us) if self.eager else None
            made[name] = Measured(timings[name], eager, time_cupti(calls) if self.cupti else None)
        return made, failed

    def conditions(self, began: float) -> machine.Facts:
        """Clocks and power since that time.monotonic()."""
        return self.monitor.since(began)

    def now(self) -> float:
        return time.monotonic()

    def keep(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` made for that key last; the one of another key is given up first."""
        found = self._kept.get(what)
        if found is None or found[0] != key:
            self._kept.pop(what, None)
            del found
            self.free()
            self._kept[what] = (key, make())
        made: T = self._kept[what][1]
        return made

    def free(self) -> None:
        """Hands back memory that nothing refers to."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.monitor.close()
        self._kept.clear()
