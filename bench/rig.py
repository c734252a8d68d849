"""The rig: the device, how its contenders are timed, its roofline and its state meanwhile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import machine, roofline
from .timing import Call, Timing, calls_for, rotations, time_cpu, time_cupti, time_eager, time_interleaved

T = TypeVar("T")


class Measured(NamedTuple):
    """What was found of one contender."""

    timing: Timing
    eager_us: float | None = None  # called from Python one after the other, where that is another way
    cupti_us: float | None = None  # by CUPTI, where asked for


class Rig:
    """What everything of a run is measured with."""

    def __init__(
        self,
        device: torch.device,
        rounds: int = 20,
        eager: bool = True,
        cupti: bool = False,
        bounds: roofline.Roofline | None = None,
    ) -> None:
        self.device = device
        self.rounds = rounds
        self.eager = eager
        self.cupti = cupti
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

    def measure(self, contenders: Mapping[str, Sequence[Call]], flop: float) -> dict[str, Measured]:
        """Times contenders, interleaved; ``flop`` of a call says how many of them a sample needs."""
        if not contenders:
            return {}
        if not self.is_cuda:
            return {name: Measured(t) for name, t in time_cpu(contenders, self.rounds).items()}
        timings = time_interleaved(contenders, self.rounds, calls_for(flop))
        made = {}
        for name, calls in contenders.items():
            eager = time_eager(calls, timings[name].median_us) if self.eager else None
            made[name] = Measured(timings[name], eager, time_cupti(calls) if self.cupti else None)
        return made

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
