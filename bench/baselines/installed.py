"""Packages of other libraries that a machine may have: whether they can be imported, and their versions."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any


@functools.cache
def _imported(name: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(name), None
    except Exception as error:  # a package may fail in its own way where its libraries are missing
        text = (str(error).splitlines() or [""])[0]
        return None, f"{name} cannot be imported: {type(error).__name__}: {text}"


def module(name: str) -> Any:
    """The module of this name.

    Raises:
        ImportError: it cannot be imported.
    """
    found, reason = _imported(name)
    if reason is not None:
        raise ImportError(reason)
    return found


def absent(name: str) -> str | None:
    """Why a module cannot be imported, or None."""
    return _imported(name)[1]


def version(packages: Sequence[str]) -> str:
    """The first of these packages that is installed, and its version."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{packages[0]} of an unknown version"


def forget() -> None:
    """Forgets which modules were imported; for tests, which replace them."""
    _imported.cache_clear()
