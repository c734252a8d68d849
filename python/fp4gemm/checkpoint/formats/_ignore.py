"""The rules by which the patterns of a config match modules."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from ._format import FormatName, format_of

__all__ = ["is_ignored", "is_targeted"]


def is_ignored(name: str, patterns: Iterable[str], format: FormatName, class_name: str = "Linear") -> bool:
    """Whether a module stays in float by the patterns of a config in this format.

    * modelopt and fp4gemm: a pattern with the wildcards of fnmatch (``*``, ``?``, ``[...]``) that matches
      the whole name of the module or of one that contains it: ``model.layers.0*``, ``*.mlp.gate``,
      ``lm_head``, ``model.vision_tower``. Case counts.
    * compressed-tensors: the whole name of the module; the name of its class; or ``re:`` and a regular
      expression that matches from the beginning of the name.

    Args:
        name: the name of the module, as in the model: ``model.layers.0.mlp.gate``, without ``.weight``.
        patterns: what the config calls "ignore" or "exclude_modules".
        format: whose rules hold.
        class_name: the name of the class of the module.

    Raises:
        ValueError: the format does not exist, or a regular expression is none; the text has the pattern.
    """
    if format_of(format).has_targets:
        return is_targeted(name, patterns, class_name)
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns for each in names)


def is_targeted(name: str, targets: Iterable[str], class_name: str = "Linear") -> bool:
    """Whether a target matches: the name, the class, or ``re:`` and a regular expression for the name.

    Raises:
        ValueError: a regular expression is none; the text has the pattern.
    """
    return any(_matches(name, target, class_name) for target in targets)


def _matches(name: str, target: str, class_name: str) -> bool:
    if not target.startswith("re:"):
        return target in (name, class_name)
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise ValueError(f"ignore: {target!r} is no regular expression: {error}") from error
