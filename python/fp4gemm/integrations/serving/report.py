"""The line of the log that says which layers run on fp4gemm, and why others do not."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["Report"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Report:
    """Records which layers run on fp4gemm and why others do not; ``log`` gets one line for all layers.

    An engine makes every layer before it processes the weights of the first. The line is therefore written
    when the weights of a layer are processed for the first time, whether fp4gemm runs that layer or not.

    Args:
        log: called with the text.
        engine: whose kernels run the layers that were left, for the text.
    """

    def __init__(self, log: Callable[[str], object], engine: str) -> None:
        self._log = log
        self._engine = engine
        self._runs: dict[str, str] = {}  # how each layer of fp4gemm runs
        self._left: dict[str, str] = {}  # why a layer is not fp4gemm's
        self._is_written = True

    def runs(self, name: str, how: str) -> None:
        """The layer of this name is fp4gemm's; its method calls :meth:`ready`."""
        self._runs[name] = how
        self._is_written = False

    def left(self, name: str, why: str, method: Any) -> Any:
        """The layer of this name remains the engine's, whose ``method`` for it is returned.

        The method calls :meth:`ready` from now on. It may be None, as it is for layers that the engine never
        quantizes; every linear layer has one.
        """
        self._left[name] = why
        self._is_written = False
        process = getattr(method, "process_weights_after_loading", None)
        if process is None:
            return method

        @functools.wraps(process)
        def process_weights_after_loading(*args: Any, **kwargs: Any) -> Any:
            self.ready()
            return process(*args, **kwargs)

        method.process_weights_after_loading = process_weights_after_loading
        return method

    def note(self, text: str) -> None:
        """Log a line about the values of a layer."""
        self._log(f"fp4gemm: {text}")

    def ready(self) -> None:
        """The weights of a layer are processed: log the line, unless it has been since the last layer."""
        if not self._is_written:
            self._is_written = True
            self._log(self.text())

    def text(self) -> str:
        """The line: layers that differ in numbers alone are counted together.

        Where they are not all treated alike, the numbers say which are.
        """
        left = [(name, f"left to {self._engine}, {why}") for name, why in self._left.items()]
        found: dict[str, dict[str, list[str]]] = {}  # what is done with layers, their name, their full names
        for name, what in [*self._runs.items(), *left]:
            found.setdefault(what, {}).setdefault(_NUMBER.sub("*", name), []).append(name)
        uses = Counter(each for names in found.values() for each in names)
        parts = [
            f"{what}: {', '.join(_shown(each, names, uses[each] > 1) for each, names in names_of.items())}"
            for what, names_of in found.items()
        ]
        return "fp4gemm: " + "; ".join(parts)


def _shown(short: str, names: list[str], has_numbers: bool) -> str:
    if has_numbers:
        numbers = sorted({int(number[0]) for name in names if (number := _NUMBER.search(name))})
        short = short.replace("*", _ranges(numbers), 1)
    return f"{len(names)} x {short}" if len(names) > 1 else short


def _ranges(numbers: list[int]) -> str:
    """0-2,5 of 0, 1, 2 and 5."""
    made: list[list[int]] = []
    for number in numbers:
        if made and made[-1][-1] == number - 1:
            made[-1].append(number)
        else:
            made.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in made)
