"""Times of calls that all ranks make together, eagerly and in CUDA graphs, of results that were verified."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Row = dict[str, Any]
# Even numbers: a graph of dispatches alone that follows itself uses both slots (fp4gemm.distributed._symm).
# A call of the other kind comes before its first replay.
CALLS_IN_A_GRAPH, LONG_CALLS_IN_A_GRAPH = 10, 2
LONG_US = 1500


class Clock:
    """Times on all ranks of the default group; the slowest rank counts.

    Args:
        rounds: repetitions.
        budget_s: seconds after which no case begins.
    """

    def __init__(self, device: torch.device, rounds: int, budget_s: float) -> None:
        self.device, self.rounds = device, rounds
        self._end = time.monotonic() + budget_s

    def has_time(self) -> bool:
        """Whether another case begins, the same answer on every rank."""
        return self.agree(time.monotonic() < self._end)

    def agree(self, is_true: bool) -> bool:
        """Whether it is true on every rank."""
        found = torch.tensor([int(is_true)], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found.item())

    def row(
        self,
        part: str,
        contender: str,
        call: Callable[[], Tensor],
        is_right: bool | Callable[[Tensor], bool],
        in_graph: bool = True,
        remote_mb: float | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> Row:
        """The times of a call whose result is right, or its refusal.

        Args:
            call: what is timed; it returns what is verified.
            is_right: of that result, or a verdict that was found before.
            in_graph: whether it can be captured too. The captured result must equal that of the call.
            remote_mb: megabytes that come from other ranks, for a rate.
            before: is called before the replays: half an exchange must not follow itself in the same slot.
        """
        names = {"part": part, "contender": contender}
        result = call()
        right = is_right(result) if callable(is_right) else is_right
        if not self.agree(right):
            return {**names, "refused": "its results were wrong"}
        row: Row = {**names, "eager_us": round(self._slowest(self._eager(call)), 1)}
        if in_graph and self.device.type == "cuda":
            calls = CALLS_IN_A_GRAPH if row["eager_us"] < LONG_US else LONG_CALLS_IN_A_GRAPH
            us, captured = self._in_graph(call, calls, before)
            if not self.agree(torch.equal(captured, result)):
                return {**names, "refused": "its results in a CUDA graph were wrong"}
            row["graph_us"] = round(self._slowest(us), 1)
        if remote_mb is not None:
            row["remote_mb"] = round(remote_mb, 6)
            field = "graph_us" if "graph_us" in row else "eager_us"
            row["gb_s"] = round(remote_mb / float(row[field]) * 1000, 1)
        return row

    def _slowest(self, us: list[float]) -> float:
        slowest = torch.tensor(us, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(statistics.median(slowest.tolist()))

    def _eager(self, call: Callable[[], Tensor]) -> list[float]:
        """Microseconds of each call, host included; the ranks begin together."""
        found = []
        for _ in range(self.rounds + 1):
            dist.barrier()
            self._synchronize()
            begin = time.perf_counter()
            call()
            self._synchronize()
            found.append(1e6 * (time.perf_counter() - begin))
        return found[1:]

    def _in_graph(
        self, call: Callable[[], Tensor], calls: int, before: Callable[[], object]
    ) -> tuple[list[float], Tensor]:
        """Microseconds of a call in replays of a graph, after a replay that brings the ranks together."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                result = call()
        before()
        found = []
        for _ in range(self.rounds):
            dist.barrier()
            self._synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            self._synchronize()
            found.append(1e3 * begin.elapsed_time(end) / calls)
        result = result.clone()
        self._synchronize()
        graph.reset()
        return found, result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
