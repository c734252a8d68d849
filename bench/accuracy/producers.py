"""The other packages' methods that are installed."""

from __future__ import annotations

import importlib.metadata

from ..baselines import llmcompressor, modelopt
from ..baselines.producers import Producer


def producers() -> tuple[Producer, ...]:
    """Those whose package is installed.

    Raises:
        ModuleNotFoundError: none is.
    """
    found = []
    for each in (*llmcompressor.METHODS, *modelopt.METHODS):
        try:
            importlib.metadata.version(each.package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(each)
    if not found:
        raise ModuleNotFoundError(
            "--producers: neither llmcompressor nor nvidia-modelopt is installed, must be "
            "(pip install --no-deps -r requirements/oracles.txt)"
        )
    return tuple(found)
