"""Keywords that have another name now: the old ones go on to work for one release, with a warning."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
REMOVED_IN = "0.2"  # the release that removes the old names


class Renamed(NamedTuple):
    """The new name of a keyword, and the new names of those of its values that changed."""

    name: str
    values: Mapping[object, object] = {}


ACTIVATION_SCALING = Renamed("activations", {"row": "per-token", "tensor": "per-tensor", "none": "a16"})
OLD: Mapping[str, Renamed] = {
    "activation_scaling": ACTIVATION_SCALING,
    "weight_method": Renamed("method"),
    "scaling": Renamed("weight_scaling"),
    "options": Renamed("recipe"),
    "weights": Renamed("recipe"),
}


def stacklevel() -> int:
    """The stacklevel with which a warning of the calling function names the line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (_is_own(frame) or frame.f_code.co_name == "__setattr__"):
        level, frame = level + 1, frame.f_back
    return level


def _is_own(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == __package__


def new_keywords(function: str, given: Mapping[str, Any], old: tuple[str, ...]) -> dict[str, Any]:
    """The keywords ``given``, those of ``old`` under their new names, with a FutureWarning for each.

    Args:
        function: the name of what was called, for messages.
        given: the keywords of the call.
        old: the names of OLD that it also takes.

    Raises:
        TypeError: both names of a keyword are given.
    """
    found = dict(given)
    for name in old:
        if name not in found:
            continue
        new = OLD[name]
        value = found.pop(name)
        if new.name in found:
            raise TypeError(
                f"{function}: got {name} and {new.name}, must be one of them: {name} is its old name"
            )
        changed = value if not isinstance(value, str) else new.values.get(value, value)
        warnings.warn(
            f"{function}: {name}={value!r} is {new.name}={changed!r} now; {REMOVED_IN} removes the old name",
            FutureWarning,
            stacklevel=stacklevel(),
        )
        found[new.name] = changed
    return found


def renamed(*old: str) -> Callable[[_Function], _Function]:
    """Decorate a function that also takes the old names ``old`` of its keywords."""

    def decorate(function: _Function) -> _Function:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if not keywords.keys().isdisjoint(old):
                keywords = new_keywords(name, keywords, old)
            return function(*args, **keywords)

        return cast(_Function, call)

    return decorate


def old_attribute(old: str) -> property:
    """A property of an attribute under its old name, with its old values and a FutureWarning."""
    new = OLD[old]
    before = {value: key for key, value in new.values.items()}

    def warn(self: object) -> None:
        if torch.compiler.is_compiling():  # it cannot trace a warning
            return
        warnings.warn(
            f"{type(self).__name__}.{old} is {new.name} now; {REMOVED_IN} removes the old name",
            FutureWarning,
            stacklevel=stacklevel(),
        )

    def read(self: object) -> Any:
        warn(self)
        value = getattr(self, new.name)
        return before.get(value, value)

    def write(self: object, value: Any) -> None:
        warn(self)
        setattr(self, new.name, new.values.get(value, value))

    return property(read, write)


def new_attributes(state: Mapping[str, Any], old: str) -> dict[str, Any]:
    """The attributes of a pickle, ``old`` under its new name and with its new value if the pickle has it."""
    found = dict(state)
    if old in found:
        new, value = OLD[old], found.pop(old)
        found[new.name] = new.values.get(value, value)
    return found
