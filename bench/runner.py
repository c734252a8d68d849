"""Runs jobs one after the other: progress, what was measured before, cases that do not fit in memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from fp4gemm._products import error_line

from .contest import Job, Row
from .results import Journal
from .rig import Rig

Advance = Callable[[str], None]


def run(jobs: Sequence[Job], rig: Rig, journal: Journal) -> Iterator[list[Row]]:
    """The rows of each job, as they come; those that the journal has are not measured again."""
    with progress(len(jobs)) as advance:
        for job in jobs:
            advance(job.key)
            found = journal.found(job.key)
            if found is None:
                found = journal.add(job.key, measured(job, rig))
            yield found


def measured(job: Job, rig: Rig) -> list[Row]:
    """The rows of a job; one that says so where it needs more memory than there is."""
    try:
        return list(job.rows())
    except torch.OutOfMemoryError as error:
        reason = error_line(error)
    finally:
        rig.free()
    return [{"bench": job.key.split()[0], "case": job.key, "contender": "all", "refused": reason}]


@contextlib.contextmanager
def progress(count: int) -> Iterator[Advance]:
    """Shows on stderr which job is under way: a bar on a terminal, else a line each."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        Console = None
    if Console is None or not Console(stderr=True).is_terminal:
        done = 0

        def line(name: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{count}] {name}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)
        started = False

        def advance(name: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=name)
            started = True

        yield advance
