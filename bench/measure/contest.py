"""A contest: the contenders on one case, each verified or refused, timed side by side, and its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from fp4gemm.device.products import error_line
from torch import Tensor

from . import read_floor
from .harness import Harness, Measured
from .roofline import Work, digits
from .timing import Call
from .verify import ERRORS

Row = dict[str, object]

OURS, BASELINE, FLOOR = "ours", "baseline", "floor"
READ_FLOOR = "read floor"
BITS, ROUNDING, UNCHECKED = "bit for bit", "but for rounding", "not checked"


class Job(NamedTuple):
    """A case that can be measured by itself."""

    key: str  # names the case among all of a results file
    bench: str
    rows: Callable[[], Iterator[Row]]


Check = Callable[[], "str | None"]  # None, or what is wrong


@dataclasses.dataclass
class Contender:
    calls: Sequence[Call]  # the same call on as many inputs as keep the caches cold
    work: Work
    role: str = OURS
    kernel: str | None = None
    checked: str = BITS  # how its result was compared before it was timed
    note: str | None = None


def stop_if_lost(error: Exception) -> None:
    """Raises an error of the device's again: nothing that runs on it afterwards means anything."""
    lost = getattr(torch, "AcceleratorError", None)
    if lost is not None and isinstance(error, lost):
        raise error


class Contest:
    """The contenders on one case; ``start``: what its rows begin with."""

    def __init__(self, start: Row) -> None:
        self.start = start
        self.contenders: dict[str, Contender] = {}
        self.refused: dict[str, str] = {}  # their results are wrong, or they failed
        self.absent: dict[str, str] = {}  # not installed, or not for this device

    def enter(self, name: str, contender: Contender, reason: str | None = None) -> None:
        """``reason``: None, or why it is not timed."""
        if reason is None:
            self.contenders[name] = contender
        else:
            self.refused[name] = reason

    def attempt(self, name: str, make: Callable[[], tuple[Contender, Check]], ours: bool = True) -> None:
        """Enters what ``make`` made if its check finds nothing wrong.

        What has no kernel here is absent; so is a rival that fails. Of ours, a failure is a refusal.
        """
        try:
            contender, check = make()
            reason = check()
        except NotImplementedError as error:
            self.absent[name] = error_line(error)
        except ERRORS as error:
            stop_if_lost(error)
            (self.refused if ours else self.absent)[name] = error_line(error)
        else:
            self.enter(name, contender, reason)

    def enter_floor(self, harness: Harness, buffers: Sequence[Tensor], num_bytes: int) -> None:
        """Enters a kernel that reads num_bytes of a buffer and does nothing else."""
        reason = read_floor.absent()
        if reason is not None:
            self.absent[READ_FLOOR] = reason
            return
        variant = harness.keep("floor", num_bytes, lambda: read_floor.best_variant(buffers, num_bytes))
        floor = read_floor.calls(buffers, num_bytes, variant)
        self.enter(READ_FLOOR, Contender(floor, Work(0.0, num_bytes), FLOOR, None, UNCHECKED))

    def rows(self, harness: Harness) -> Iterator[Row]:
        """Times everyone; a row each, those that are not timed last."""
        flop = max((c.work.flop for c in self.contenders.values()), default=0.0)
        began = harness.now()
        exact = [name for name, c in self.contenders.items() if c.role == OURS]
        measured, failed = harness.measure(
            {name: c.calls for name, c in self.contenders.items()}, flop, exact
        )
        conditions = harness.conditions(began)
        for name, reason in failed.items():
            role = self.contenders.pop(name).role
            (self.refused if role == OURS else self.absent)[name] = reason
        for name in self.contenders:
            yield self._row(name, measured, harness) | conditions
        for name, reason in self.refused.items():
            yield self.start | {"contender": name, "refused": reason}
        for name, reason in self.absent.items():
            yield self.start | {"contender": name, "absent": reason}

    def _row(self, name: str, measured: dict[str, Measured], harness: Harness) -> Row:
        contender, found = self.contenders[name], measured[name]
        us = found.timing.median_us
        row: Row = self.start | {"contender": name, "role": contender.role}
        if contender.kernel is not None:
            row["kernel"] = contender.kernel
        row |= {"checked": contender.checked} | found.timing.row()
        for key, value in (("eager_us", found.eager_us), ("cupti_us", found.cupti_us)):
            if value is not None:
                row[key] = round(value, 2)
        row |= rates(contender.work, us, harness)
        ratios = {
            rival: round(measured[rival].timing.median_us / us, 3)
            for rival, other in self.contenders.items()
            if rival != name and other.role != OURS and contender.role != FLOOR
        }
        if ratios:
            row["ratio"] = ratios
        if contender.note is not None:
            row["note"] = contender.note
        return row


def rates(work: Work, us: float, harness: Harness) -> Row:
    """TFLOP/s and GB/s of what has to be done at least, and how close that is to the measured roofline."""
    row: Row = {}
    if work.flop:
        row["tflop_s"] = digits(work.flop / us / 1e6)
    bounds = harness.roofline
    return row | {
        "gb_s": digits(work.num_bytes / us / 1e3),
        "of_roofline": round(bounds.least_us(work) / us, 3),
        "bound": bounds.bound(work),
    }
