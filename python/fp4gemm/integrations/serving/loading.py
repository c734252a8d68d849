"""Checks of the tensors that an engine loads, with names that its own messages lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _checks
from ...nn._inputs import OUT_STEP

__all__ = ["check_sizes", "checked_loader"]

_MX = "; scales of uint8, one for 32 elements, are mxfp4's, which fp4gemm does not read"


def check_sizes(name: str, n: int, k: int) -> None:
    """Raise ValueError unless the kernels read a weight (n, k) of one rank."""
    for what, size, step in (("k", k, _checks.K_STEP_MM), ("n", n, OUT_STEP)):
        if size % step:
            raise ValueError(
                f"{name}: {what} is {size} on this rank, must be a multiple of {step}; use another tensor "
                "parallel size, or name the layer in the option ignore (FP4GEMM_SERVING_IGNORE)"
            )


def checked_loader(
    loader: Callable[..., Any], name: str, dtypes: Sequence[torch.dtype], columns: Sequence[int] | None
) -> Callable[..., Any]:
    """The engine's loader of a parameter, after a check of the tensor of the checkpoint.

    Args:
        loader: called with (parameter, tensor, ...), as every loader of vLLM and SGLang is.
        name: the name of the parameter, for messages.
        dtypes: those that the tensor may have. A copy between others would convert, silently.
        columns: the sizes that its last dimension may have; None: the tensor holds one number.

    Returns:
        A function with the signature and the attributes of ``loader``. It raises TypeError or ValueError,
        which name the tensor, its dtype or shape, and what it must be.
    """

    @functools.wraps(loader)
    def load(param: Any, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if loaded_weight.dtype not in dtypes:
            hint = _MX if torch.float8_e4m3fn in dtypes and loaded_weight.dtype in _MX_SCALES else ""
            raise TypeError(f"{name}: dtype is {loaded_weight.dtype}, must be {_listing(dtypes)}{hint}")
        shape = tuple(loaded_weight.shape)
        if columns is not None and (not shape or shape[-1] not in columns):
            wanted = " or ".join(map(str, dict.fromkeys(columns)))
            raise ValueError(f"{name}: shape is {shape}, must have {wanted} columns")
        try:
            return loader(param, loaded_weight, *args, **kwargs)
        except (AssertionError, IndexError, RuntimeError) as error:
            about = f": {error}" if str(error) else ""
            raise ValueError(
                f"{name}: shape is {shape}, must fit the parameter {tuple(param.shape)} of this rank{about}"
            ) from error

    return load


_MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)


def _listing(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(str, dtypes))
