"""The language of patterns by which a user selects layers, one for every function and command.

A pattern is a dotted name, with the wildcards of :mod:`fnmatch` or without: ``*`` for any characters, dots
too, ``?`` for one, ``[0-3]`` and ``[!0-3]`` for one of some. It matches a module if it matches the whole name
of the module, or a run of whole parts of that name at any place; so it matches everything below a module as
well. ``re:`` and a regular expression matches where the expression is found in the name. docs/models.md has a
table of examples.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from . import _checks
from ._renamed import stacklevel

__all__ = ["Filter", "Pattern", "matches"]

Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, torch.nn.Module], bool]
Filter: TypeAlias = Pattern | Sequence[Pattern]

PREFIX = "re:"
_WILDCARDS = frozenset("*?[")
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
            _check(argument, item, is_strict=False)
        elif not isinstance(item, re.Pattern) and not callable(item):
            raise TypeError(
                f"{argument}: got {_checks.describe(item)}, must be {_WANTED}, a compiled one, a callable "
                "(name, module) -> bool, or a sequence of these"
            )
    return many


def texts(argument: str, value: object, *, is_strict: bool = True) -> tuple[str, ...]:
    """The patterns of an argument that is stored as text: one str, or a sequence of them, which may be empty.

    Args:
        argument: its name, for messages.
        value: what the user gave.
        is_strict: whether a regular expression without ``re:`` is refused, as it always was there; False:
            :func:`settled` reads it.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, Sequence) or not all(isinstance(item, str) for item in many):
        raise TypeError(f"{argument}: got {_checks.describe(value)}, must be a str or a sequence of str")
    for item in many:
        _check(argument, item, is_strict=is_strict)
    return tuple(many)


def _check(argument: str, pattern: str, *, is_strict: bool) -> None:
    """Raise ValueError unless a text is a pattern, or, without is_strict, a regular expression alone."""
    expression = pattern.removeprefix(PREFIX)
    is_marked = pattern.startswith(PREFIX)
    if not expression and (is_marked or is_strict):
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}")
    if not is_marked and not _OF_EXPRESSIONS & set(pattern):
        return
    if not is_marked and is_strict:
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}: {PREFIX + pattern!r}")
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{argument}: got {pattern!r}, must be {_WANTED}: {error}") from error


# ---- what patterns meant in older versions


def settled(argument: str, patterns: Sequence[Pattern], names: Collection[str]) -> list[Pattern]:
    """The patterns of an argument whose texts were regular expressions in older versions.

    A text without ``re:`` is still one, compiled here, if it has a character that only regular expressions
    have, or if it matches no name but some as a regular expression. A FutureWarning says so, and which names
    a plain name does not match any more.

    Args:
        argument: its name, for messages.
        patterns: as :func:`checked` or :func:`texts` returns them.
        names: of all layers of the model.
    """
    return [_settled(argument, p, names) if isinstance(p, str) else p for p in patterns]


def _settled(argument: str, pattern: str, names: Collection[str]) -> Pattern:
    if pattern.startswith(PREFIX):
        return pattern
    try:
        expression = re.compile(pattern)
    except re.error:
        return pattern
    found = {name for name in names if matches(pattern, name)}
    before = {name for name in names if expression.search(name)}
    if _OF_EXPRESSIONS & set(pattern) or (before and not found):
        warnings.warn(
            f"{argument}: {pattern!r} is read as a regular expression; write {PREFIX + pattern!r}, since a "
            f"pattern without {PREFIX!r} is a name with wildcards, and nothing else from 0.2 on",
            FutureWarning,
            stacklevel=stacklevel(),
        )
        return expression
    more = before - found
    if more and not _WILDCARDS & set(pattern):
        warnings.warn(
            f"{argument}: {pattern!r} matches whole parts of {len(found)} names, and not {min(more)!r}; as "
            f"the regular expression that it was in older versions it matched {len(before)}: write "
            f"{PREFIX + pattern!r} for these",
            FutureWarning,
            stacklevel=stacklevel(),
        )
    return pattern


def warn_of_more(argument: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Give a FutureWarning for patterns that older versions matched with the start of a name only.

    Args:
        argument: its name, for messages.
        patterns: as :func:`texts` returns them.
        names: of all modules of the checkpoint.
    """
    for pattern in patterns:
        if pattern.startswith(PREFIX):
            continue
        found = [name for name in names if matches(pattern, name)]
        more = [name for name in found if not fnmatchcase(f"{name}.", f"{pattern}.*")]
        if more and len(more) < len(found):
            warnings.warn(
                f"{argument}: {pattern!r} matches {len(found)} names, at any place, such as {more[0]!r}; "
                f"in older versions it matched {len(found) - len(more)}, at the start: write 're:^' and a "
                "regular expression for these",
                FutureWarning,
                stacklevel=stacklevel(),
            )
