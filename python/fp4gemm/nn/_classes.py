"""Modules that change their class in place, so that whatever holds a module or its parameters stays valid.

The new class is one that can be imported, or :func:`subclass` makes it when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

__all__ = ["become", "subclass"]


def become(module: torch.nn.Module, kind: type[torch.nn.Module], **attributes: Any) -> None:
    """Set the class of a module to ``kind``, and set the given attributes on the module.

    The module stays the same object with the same parameters, buffers, children, hooks and state_dict. An
    attribute is set beside these, not through setattr: a module that is a child already gets no second name.
    """
    vars(module).update(attributes)
    module.__class__ = kind


def subclass(
    original: Any, bases: tuple[Any, ...], members: dict[str, Any], again: Callable[..., Any], *args: Any
) -> Any:
    """A class that cannot be imported, whose modules pickle and copy as those of ``original`` do.

    It has the name of ``original``, since libraries look for names.

    Args:
        bases: the base classes. members: the attributes and methods.
        again, args: ``again(*args)`` returns this class, in another process too; ``again`` is a function that
            can be imported, and cached, so that two modules have one class.
    """

    def reduced(self: Any, protocol: Any) -> Any:
        _, _, *state = cast(Any, super(made, self)).__reduce_ex__(protocol)
        return _empty, (again, *args), *state

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    made: Any = type(original.__name__, bases, {**names, **members, "__reduce_ex__": reduced})
    return made


def _empty(again: Callable[..., Any], *args: Any) -> Any:
    """A module without its attributes, which pickle and copy assign."""
    kind = again(*args)
    return kind.__new__(kind)
