"""The language of patterns by which a user selects layers, one for every function and command.

A pattern is a dotted name, with the wildcards of :mod:`fnmatch` or without: ``*`` for any characters, dots
too, ``?`` for one, ``[0-3]`` and ``[!0-3]`` for one of some. It matches a module if it matches the whole name
of the module, or a run of whole parts of that name at any place; so it matches everything below a module as
well. ``re:`` and a regular expression matches where the expression is found in the name. docs/models.md has a
table of examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from . import _checks

__all__ = ["Filter", "Pattern", "matches"]

Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, torch.nn.Module], bool]
Filter: TypeAlias = Pattern | Sequence[Pattern]

PREFIX = "re:"
_OF_EXPRESSIONS = frozenset("\\^$|(){}+")  # characters that regular expressions have, and names have not
_WANTED = f"a name, with wildcards or without, or {PREFIX!r} and a regular expression"


def matches(pattern: Pattern, name: str, module: torch.nn.Module | None = None) -> bool:
    r"""Whether a pattern matches a module::

        from fp4gemm import patterns

        name = "model.layers.0.mlp.gate_proj"
        assert patterns.matches("layers.0", name) and patterns.matches("mlp.*_proj", name)
        assert patterns.matches(r"re:^model\.layers\.[02]\.", name)
        assert not patterns.matches("gate", name)

    Args:
        pattern: a str in the language above; a compiled regular expression, which is searched in the name; or
            a callable ``(name, module) -> bool``.
        name: the dotted name of the module.
        module: the module itself, for callables.
    """
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    if not isinstance(pattern, str):
        return bool(pattern(name, module))  # type: ignore[arg-type]  # functions on models pass the module
    if pattern.startswith(PREFIX):
        return re.search(pattern.removeprefix(PREFIX), name) is not None
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def shown(patterns: Sequence[Pattern]) -> str:
    """Patterns as an error names them."""
    return ", ".join(repr(p.pattern if isinstance(p, re.Pattern) else p) for p in patterns)


def checked(argument: str, value: object) -> list[Pattern] | None:
    """The patterns of an argument that also accepts compiled expressions and callables; None for None.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    if value is None:
        return None
    is_one = isinstance(value, (str, re.Pattern)) or not isinstance(value, Iterable)
    many: list[Any] = [value] if is_one else list(value)  # type: ignore[call-overload]
    if not many:
        raise ValueError(
            f"{argument}: got {_checks.describe(value)}, must have at least one pattern, or be None"
        )
    for item in many:
        if isinstance(item, str):
            _check(argument, item)
        elif not isinstance(item, re.Pattern) and not callable(item):
            raise TypeError(
                f"{argument}: got {_checks.describe(item)}, must be {_WANTED}, a compiled one, a callable "
                "(name, module) -> bool, or a sequence of these"
            )
    return many


def texts(argument: str, value: object) -> tuple[str, ...]:
    """The patterns of an argument that is stored as text: one str, or a sequence of them, which may be empty.

    Args:
        argument: its name, for messages.
        value: what the user gave.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, Sequence) or not all(isinstance(item, str) for item in many):
        raise TypeError(f"{argument}: got {_checks.describe(value)}, must be a str or a sequence of str")
    for item in many:
        _check(argument, item)
    return tuple(many)


def _check(argument: str, pattern: str) -> None:
    """Raise ValueError unless a text is a pattern."""
    expression = pattern.removeprefix(PREFIX)
    is_marked = pattern.startswith(PREFIX)
    if not expression:
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}")
    if not is_marked and not _OF_EXPRESSIONS & set(pattern):
        return
    if not is_marked:
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}: {PREFIX + pattern!r}")
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}: {error}") from error
