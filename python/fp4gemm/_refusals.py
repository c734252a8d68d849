"""Operators that are called before the checks in Python, and what follows where one refuses the call.

The checks in Python take longer than the launch of a kernel. Common calls therefore go to the operator first,
which checks what its kernels rely on. Where it refuses a call, the same call is made again with all checks,
whose error names the argument: :func:`explained`. If the checks accept the call, the place where it was made
gave the operator wrong arguments, and each such call takes twice as long. These calls are counted in
``UNEXPLAINED``, which the tests require to be empty, and each place warns once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["REFUSALS", "REFUSED", "UNEXPLAINED", "explained"]

# What a refusal is: a RuntimeError of an operator on a GPU or of torch's dispatcher; the CPU implementations
# raise the others, too. Any other exception is not caught.
REFUSALS = (RuntimeError, TypeError, ValueError)
REFUSED: Counter[str] = Counter()  # the refused calls of each place
UNEXPLAINED: Counter[str] = Counter()  # the refused calls that the checks accepted

_P = ParamSpec("_P")
_R = TypeVar("_R")


def explained(
    place: str, refusal: Exception, checked: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R:
    """Make a call that an operator refused again with all checks, ``checked(*args, **kwargs)``.

    It is called where the refusal is caught, for a call that the operator should have accepted.

    Args:
        place: the public function or method, for the counters.
        refusal: what the operator raised.
        checked: raises the error that names the argument.

    Returns:
        The result of ``checked``, if that accepts the call.

    Raises:
        Exception: that of ``checked``. The refusal itself, if the device ran out of memory or failed, and if
            it is a TypeError and ``checked`` accepts the call.
    """
    if isinstance(refusal, (torch.OutOfMemoryError, torch.AcceleratorError)):
        raise refusal
    REFUSED[place] += 1
    try:
        result = checked(*args, **kwargs)
    except Exception as error:
        _forget(error, refusal)
        raise
    UNEXPLAINED[place] += 1
    if isinstance(refusal, TypeError):
        raise refusal
    if UNEXPLAINED[place] == 1:
        warnings.warn(
            f"{place}: the operator refused a call that the checks accept, which therefore takes longer; "
            f"please report this: {str(refusal).splitlines()[0] if str(refusal) else type(refusal).__name__}",
            RuntimeWarning,
            stacklevel=3,
        )
    return result


def _forget(error: BaseException, refusal: BaseException) -> None:
    """Take the refusal out of what is shown as the context of an error that explains it."""
    while error.__context__ is not None and error.__context__ is not refusal:
        error = error.__context__
    error.__context__ = None
