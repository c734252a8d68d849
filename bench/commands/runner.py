"""Runs the jobs of a command: shows progress, skips cases of the results file, reports cases that fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..measure.contest import Job, Row, stop_if_lost
from ..measure.harness import Harness
from ..measure.library import error_line
from ..report.results import FAKE, Journal

Advance = Callable[[str], None]


def run(
    jobs: Sequence[Job], harness: Harness, journal: Journal, show: Callable[[list[Row], Any], None]
) -> list[Row]:
    """Runs every job that the journal lacks, shows the rows of each, and returns the rows of all.

    ``show(rows, console)`` prints the rows of a job; console is that of rich's progress bar, or None without
    one.
    """
    rows: list[Row] = []
    with progress(len(jobs)) as (advance, console):
        for job in jobs:
            advance(job.key)
            found = journal.found(job.key)
            if found is None:
                made, whole = measured(job, harness)
                found = journal.add(job.key, made, kept=whole)
            show(found, console)
            rows += found
    return rows


def measured(job: Job, harness: Harness) -> tuple[list[Row], bool]:
    """(the rows of a job, True), or (a row with the reason, False) if the job as a whole fails."""
    try:
        return [_marked(row, harness) for row in job.rows()], True
    except (RuntimeError, MemoryError) as error:
        stop_if_lost(error)
        reason = error_line(error)
    finally:
        harness.free()
    row: Row = {"bench": job.bench, "case": job.key, "contender": "all", "refused": reason}
    return [_marked(row, harness)], False


def _marked(row: Row, harness: Harness) -> Row:
    """The row, which says what is not real about the device where the harness is that of a test."""
    return row if harness.fake is None else row | {FAKE: harness.fake}


@contextlib.contextmanager
def progress(count: int) -> Iterator[tuple[Advance, Any]]:
    """Shows the current job: by a progress bar on a terminal, else by a line on stderr for each job."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not console.is_terminal:
        done = 0

        def line(name: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{count}] {name}", file=sys.stderr, flush=True)

        yield line, None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=count)
        started = False

        def advance(name: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=name)
            started = True

        yield advance, console
