"""The line of the log that says which layers run on fp4gemm, and why others do not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

__all__ = ["Report"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Report:
    """What happened to each layer of a model; ``log`` gets one line when the last weight is ready.

    Args:
        log: called with the text.
        engine: whose kernels run the layers that were left, for the text.
    """

    def __init__(self, log: Callable[[str], object], engine: str) -> None:
        self._log = log
        self._engine = engine
        self._runs: dict[str, str] = {}  # how each layer of fp4gemm runs
        self._left: dict[str, str] = {}  # why a layer is not fp4gemm's
        self._pending: set[str] = set()

    def runs(self, name: str, how: str) -> None:
        """The layer of this name is fp4gemm's; :meth:`ready` will follow."""
        self._runs[name] = how
        self._pending.add(name)

    def left(self, name: str, why: str) -> None:
        """The layer of this name remains the engine's."""
        self._left[name] = why

    def ready(self, name: str) -> None:
        """The weights of the layer are loaded; of the last layer: log the line."""
        if name in self._pending:
            self._pending.remove(name)
            if not self._pending:
                self._log(self.text())

    def text(self) -> str:
        """The line: layers that differ in numbers alone are counted together."""
        parts = [f"{how}: {names}" for how, names in _grouped(self._runs).items()]
        parts += [f"left to {self._engine}, {why}: {names}" for why, names in _grouped(self._left).items()]
        return "fp4gemm: " + "; ".join(parts)


def _grouped(layers: dict[str, str]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for name, what in layers.items():
        counts.setdefault(what, Counter())[_NUMBER.sub("*", name)] += 1
    return {
        what: ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        for what, names in counts.items()
    }
