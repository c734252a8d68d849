"""The state of an NVFP4 Linear: what a checkpoint must hold, and how the buffers move without a cast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks, _values

# The buffers that form an NVFP4Tensor. They load together.
WEIGHT_BUFFERS = ("weight_codes", "weight_scales", "weight_amax")
BOUND = "weight_e4m3_max"  # int32 (1,): 448 or 256; 448 where a checkpoint does not have it
PREPACKED = "weight_prepacked"
ORDER = (*WEIGHT_BUFFERS, BOUND, PREPACKED, "bias")  # the order of the buffers
EXTRA_STATE = "_extra_state"  # the key under which older checkpoints have e4m3_max
# A buffer passes through Module.half() and the like as integers of its size, so that no cast changes it.
BITS = {
    torch.uint8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float32: torch.int32,
    torch.int32: torch.int32,
}


def new_buffers(shape: tuple[int, ...], num_amax: int, device: torch.device | None) -> dict[str, Tensor]:
    """The uninitialised buffers of a weight (n, k) or (g, n, k): codes, swizzled scales, amax and e4m3_max.

    ``num_amax`` is 1 or n: the numbers that amax has for each matrix.
    """
    *lead, n, k = shape
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
        ((*lead, n, k // 2), torch.uint8),
        ((*lead, *_checks.padded_scale_shape(n, k)), torch.float8_e4m3fn),
        ((*lead, num_amax), torch.float32),
        ((1,), torch.int32),
    )
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in zip((*WEIGHT_BUFFERS, BOUND), shapes, strict=True)
    }


def ordered(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The buffers of a weight in the order in which a new layer has them."""
    return {name: buffers[name] for name in (*ORDER, *buffers) if name in buffers}


def version(buffer: Tensor | None) -> int | None:
    """A number that changes with every write in place; None of an inference tensor, which has none."""
    return None if buffer is None or buffer.is_inference() else buffer._version


def keep_dtype(fn: Callable[[Tensor], Tensor], buffer: Tensor) -> Tensor:
    """The device and the memory of ``fn(buffer)``, with the dtype and the bits of the buffer."""
    bits = buffer.view(BITS[buffer.dtype])
    moved = fn(bits)
    if moved is bits:
        return buffer  # the same tensor object, so that tied buffers stay tied
    # Module.type() casts integers as well; then only the device of the result counts.
    return moved.view(buffer.dtype) if moved.dtype is bits.dtype else buffer.to(moved.device)


def moved_dtype(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """The dtype of the float layer after ``fn`` of Module.half() and the like; ``dtype`` if it sets none."""
    moved = fn(torch.empty(0, dtype=dtype)).dtype
    return moved if moved in _checks.FLOAT_DTYPES else dtype


def bound_problem(value: Any) -> str | None:
    """Why ``value`` is not a stored e4m3_max; None if it is one. Synchronises where it lies on a GPU."""
    if not isinstance(value, Tensor) or value.dtype is not torch.int32 or tuple(value.shape) != (1,):
        return f"got {_checks.describe(value)}, must be an int32 tensor of shape (1,)"
    if not value.is_meta and int(value.item()) not in _checks.E4M3_BOUNDS:
        return f"e4m3 bound is {int(value.item())}, must be {_checks.listing(_checks.E4M3_BOUNDS)}"
    return None


def with_bound(state_dict: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The state_dict with e4m3_max under the key of its buffer: from the extra state, or 448 by default."""
    extra, bound = prefix + EXTRA_STATE, prefix + BOUND
    if prefix + WEIGHT_BUFFERS[0] not in state_dict or (extra not in state_dict and bound in state_dict):
        return state_dict
    state = dict(state_dict)
    default = torch.tensor([max(_checks.E4M3_BOUNDS)], dtype=torch.int32)
    state.setdefault(bound, state.pop(extra, default))
    return state


def checkpoint_problems(own: Mapping[str, Tensor], state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """Why the entries under ``prefix`` cannot be the state of a layer with the buffers ``own``, a text each.

    torch itself compares shapes only and would cast another dtype: uint8 bytes that hold e4m3 scales, for
    instance, would become numbers from 0 to 255.
    """
    if prefix + "weight" in state_dict:
        return [
            f"{prefix}weight: is the weight of a float layer, must be {', '.join(WEIGHT_BUFFERS)}; "
            "load it into a torch.nn.Linear and convert that with Linear.from_float"
        ]
    together = [prefix + name for name in WEIGHT_BUFFERS]
    missing = [key for key in together if key not in state_dict]
    if len(missing) == len(together):
        return []  # torch reports missing keys, if strict
    problems = [f"{key}: is missing, must come with the other parts of the weight" for key in missing]
    for name, buffer in own.items():
        if prefix + name in state_dict:
            problem = buffer_problem(name, buffer, state_dict[prefix + name])
            problems += [] if problem is None else [f"{prefix}{name}: {problem}"]
    return problems


def check_buffers(held: Mapping[str, Tensor | None], shape: tuple[int, ...], num_amax: int) -> None:
    """Raise ValueError unless the buffers that other code has set fit a weight of this shape."""
    wanted = new_buffers(shape, num_amax, torch.device("meta"))
    wanted["bias"] = torch.empty(shape[:-1], dtype=torch.float32, device="meta")
    for name, expected in wanted.items():
        value = held.get(name)
        problem = None if value is None else buffer_problem(name, expected, value)
        if problem is not None:
            raise ValueError(
                f"{name}: {problem}; the buffers of an NVFP4 weight keep their dtypes, so load them "
                "without dtype="
            )


def buffer_problem(name: str, buffer: Tensor, value: Any) -> str | None:
    """Why ``value`` cannot take the place of the buffer of this name; None if it can.

    Synchronises where the value is on a GPU.
    """
    if name == BOUND:
        return bound_problem(value)
    if not isinstance(value, Tensor):
        return f"got {_checks.describe(value)}, must be a torch.Tensor"
    if value.dtype is not buffer.dtype:
        return f"dtype is {value.dtype}, must be {buffer.dtype}"
    if value.shape != buffer.shape:
        rescaled = (
            buffer.dtype is torch.float32
            and value.shape[:-1] == buffer.shape[:-1]
            and 1 in (*value.shape[-1:], *buffer.shape[-1:])
        )
        hint = " (weight_scaling differs)" if rescaled else ""
        return f"shape is {tuple(value.shape)}, must be {tuple(buffer.shape)}{hint}"
    if not value.is_contiguous():
        return f"strides are {value.stride()}, must be contiguous"
    if name == "weight_scales":
        return _values.scales_problem(value)
    return _values.amax_problem(value) if name == "weight_amax" else None
