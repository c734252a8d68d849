"""Tests that run in a process of their own: one that crashes or never ends does not hold up the others.

The parent gives a child the names of tests, and the child writes a line of JSON when it begins a test and one
when it has finished it. If the child ends or is silent for too long within a test, that test has failed, and
another child runs those that follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

__all__ = ["Outcome", "run", "serve"]

_STDERR_CHARS = 600  # of a child that failed, from its end
_NEVER_BEGAN = "no test could begin: "


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a test."""

    name: str
    passed: bool
    reason: str = ""  # if it failed: what was found
    seconds: float = 0.0
    values: dict[str, float] = dataclasses.field(default_factory=dict)  # what it measured


def serve(names: Sequence[str], test: Callable[[str], Outcome], output: IO[str]) -> None:
    """The child: run the tests, and write what is found to ``output``, which nothing else may write to.

    It ends after an exception, since CUDA refuses all calls of a process after some errors.
    """
    for name in names:
        print(json.dumps({"begun": name}), file=output, flush=True)
        start = time.perf_counter()
        try:
            found = test(name)
        except Exception as error:
            found = Outcome(name, False, f"{type(error).__name__}: {error}")
            failed = True
        else:
            failed = False
        found = dataclasses.replace(found, seconds=time.perf_counter() - start)
        print(json.dumps(dataclasses.asdict(found)), file=output, flush=True)
        if failed:
            return


def run(
    command: Sequence[str],
    names: Sequence[str],
    *,
    timeout_s: float,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcome of each test, in the order of the names.

    Args:
        command: starts a child, which reads a JSON list of names from its standard input and calls
            :func:`serve` with its standard output.
        names: the tests.
        timeout_s: seconds within which a child must begin its first test, or finish one.
        progress: is called with each outcome.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(names):
        left = names[len(outcomes) :]
        for outcome in _child(command, left, timeout_s):
            outcomes.append(outcome)
            if progress is not None:
                progress(outcome)
        if outcomes[-1].reason.startswith(_NEVER_BEGAN):  # another child would not begin either
            outcomes += [dataclasses.replace(outcomes[-1], name=name) for name in left[1:]]
    return outcomes


def _child(command: Sequence[str], names: Sequence[str], timeout_s: float) -> Iterator[Outcome]:
    """The outcomes of one child: at least one, and all those of the tests that it has run."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as wanted:
        json.dump(list(names), wanted)
        wanted.seek(0)
        process = subprocess.Popen(
            command, stdin=wanted, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        begun = None
        count = 0
        try:
            for line in _lines(process, timeout_s):
                message = json.loads(line)
                if "begun" in message:
                    begun = message["begun"]
                    continue
                begun = None
                count += 1
                yield Outcome(**message)
            ended = f"its process ended with status {process.wait()}"
        except TimeoutError:
            ended = f"it did not end within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if count and begun is None:
            return  # all are done, or the child ended after an exception that it has reported
        errors.seek(0)
        text = " ".join(errors.read()[-_STDERR_CHARS:].split())
        reason = f"{ended}{f': {text}' if text else ''}"
        yield Outcome(begun or names[0], False, reason if begun else f"{_NEVER_BEGAN}{reason}")


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[str]:
    """The lines that a process writes; raises TimeoutError if it writes nothing for too long."""
    if process.stdout is None:
        raise ValueError("process: its standard output must be a pipe")
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(timeout_s):
            read = os.read(process.stdout.fileno(), 65536)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                yield line.decode()
        raise TimeoutError
