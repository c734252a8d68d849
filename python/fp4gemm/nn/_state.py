"""The state of an NVFP4 Linear: what a checkpoint must hold, and how the buffers move without a cast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks

# What NVFP4Tensor is made of; they load together.
WEIGHT_BUFFERS = ("weight_codes", "weight_scales", "weight_amax")
EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns
# A buffer travels through Module.half() and friends as integers of its size, so that no cast sees it.
BITS = {torch.uint8: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}


def keep_dtype(fn: Callable[[Tensor], Tensor], buffer: Tensor) -> Tensor:
    """``fn(buffer)`` as far as place goes (device, shared memory), in the dtype and bits of the buffer."""
    bits = buffer.view(BITS[buffer.dtype])
    moved = fn(bits)
    if moved is bits:
        return buffer  # the same tensor object, so that tied buffers stay tied
    # Module.type() casts integers as well; then only the new place is taken from it.
    return moved.view(buffer.dtype) if moved.dtype is bits.dtype else buffer.to(moved.device)


def extra_state_problem(state: Any) -> str | None:
    """Why ``state`` is not an e4m3 bound as get_extra_state wrote it; None if it is."""
    if not isinstance(state, Tensor) or state.dtype is not torch.int32 or tuple(state.shape) != (1,):
        return f"got {_checks.describe(state)}, must be an int32 tensor of shape (1,)"
    if state.is_meta or int(state.item()) not in _checks.E4M3_BOUNDS:
        value = "without a value (meta)" if state.is_meta else str(int(state.item()))
        return f"e4m3 bound is {value}, must be {_checks.listing(_checks.E4M3_BOUNDS)}"
    return None


def checkpoint_problems(own: Mapping[str, Tensor], state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """Why the entries under ``prefix`` cannot be the state of a layer with the buffers ``own``, a text each.

    torch itself looks at shapes only and would cast another dtype: uint8 bytes that hold e4m3 scales, for
    instance, would become numbers from 0 to 255.
    """
    if prefix + "weight" in state_dict:
        return [
            f"{prefix}weight: is the weight of a float layer, must be {', '.join(WEIGHT_BUFFERS)}; "
            "load it into a torch.nn.Linear and convert that with Linear.from_float"
        ]
    together = [prefix + name for name in (*WEIGHT_BUFFERS, EXTRA_STATE)]
    missing = [key for key in together if key not in state_dict]
    if len(missing) == len(together):
        return []  # torch reports missing keys, if strict
    problems = [f"{key}: is missing, must come with the other parts of the weight" for key in missing]
    for name, buffer in own.items():
        key = prefix + name
        if key in state_dict:
            problem = _buffer_problem(buffer, state_dict[key])
            problems += [] if problem is None else [f"{key}: {problem}"]
    extra_key = together[-1]
    extra = extra_state_problem(state_dict[extra_key]) if extra_key in state_dict else None
    return problems if extra is None else [*problems, f"{extra_key}: {extra}"]


def _buffer_problem(buffer: Tensor, value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return f"got {_checks.describe(value)}, must be a torch.Tensor"
    if value.dtype is not buffer.dtype:
        return f"dtype is {value.dtype}, must be {buffer.dtype}"
    if value.shape != buffer.shape:
        rescaled = value.dim() == 1 and buffer.dtype is torch.float32 and 1 in (value.numel(), buffer.numel())
        hint = " (weight_scaling differs)" if rescaled else ""
        return f"shape is {tuple(value.shape)}, must be {tuple(buffer.shape)}{hint}"
    if not value.is_contiguous():
        return f"strides are {value.stride()}, must be contiguous"
    return None
