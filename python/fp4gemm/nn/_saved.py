"""Moves, copies, pickles and checkpoints of a module with an NVFP4 weight: always as codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ._state import (
    BITS,
    BOUND,
    PREPACKED,
    WEIGHT_BUFFERS,
    checkpoint_problems,
    keep_dtype,
    moved_dtype,
    ordered,
    with_bound,
)
from ._weight import _EXCHANGE, WeightModule


class SavedWeight(WeightModule):
    """A WeightModule that is moved, copied, pickled and saved as codes and block scales in every form."""

    def reset_parameters(self) -> None:
        """Forget the weight: zeros everywhere, and ``forward`` raises until one is loaded."""
        if self._is_prepacked():  # the buffer keeps its address; zero bytes decode to 0
            held = [t for t in (self.weight_prepacked, self.weight_amax, self.bias) if t is not None]
        else:
            held = [t for name, t in self._own_buffers().items() if name != BOUND]
        for buffer in held:
            buffer.view(BITS[buffer.dtype]).zero_()
        self.e4m3_max = max(_checks.E4M3_BOUNDS)
        self._has_weight = False

    def __getstate__(self) -> dict[str, Any]:
        weight = self.weight
        # torch (2.13) writes float8 storages with plain pickle but cannot read them back; bytes it can.
        held = {name: buffer for name, buffer in self._buffers.items() if name != PREPACKED}
        held |= {"weight_codes": weight.codes, "weight_scales": weight.scales.view(torch.uint8)}
        without = ("_known", "_fast", "_transposed")
        state = {name: v for name, v in self.__dict__.items() if not name.startswith(without)}
        return {**state, "_buffers": ordered(held), "_is_captured": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers["weight_scales"] = state["_buffers"]["weight_scales"].view(torch.float8_e4m3fn)
        self._remember_buffers()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with _EXCHANGE:
            if self.weight_prepacked is not None:
                weight = self.weight
                destination[prefix + "weight_codes"] = weight.codes
                destination[prefix + "weight_scales"] = weight.scales
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if self.weight_prepacked is not None:  # copies too: a weight loaded later must not mix with them
                for name in ("weight_amax", BOUND, "bias"):
                    if self._buffers.get(name) is not None:
                        destination[prefix + name] = destination[prefix + name].clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Module.to, .half, .cuda, .to_empty and the like: devices change, dtypes of buffers do not."""
        self._notice()
        own = {id(buffer) for buffer in self._buffers.values() if buffer is not None}
        before = self.weight_amax.device
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in own else fn(t), recurse)
        self.dtype = moved_dtype(fn, self.dtype)
        self._remember_buffers()
        if before.type == "meta" and not self.weight_amax.is_meta:
            self._has_weight = False  # to_empty: memory without contents
            self.e4m3_max = self._e4m3_max
        if self.weight_amax.device != before:
            self._is_captured = False
            self._hold_canonical()
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        is_assigned = bool(local_metadata.get("assign_to_params_buffers"))
        with _EXCHANGE:
            place = self.weight_prepacked
            self._hold_canonical()
            state_dict = with_bound(state_dict, prefix)
            problems = checkpoint_problems(self._own_buffers(), state_dict, prefix)
            if problems:  # all or nothing: codes never meet the scales of another weight
                error_msgs.extend(problems)
            else:
                super()._load_from_state_dict(
                    state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
                )
            is_loaded = not problems and prefix + WEIGHT_BUFFERS[0] in state_dict
            if is_loaded:
                self._align_buffers()
                bound = state_dict[prefix + BOUND]
                if not bound.is_meta:
                    self._e4m3_max = int(bound.item())
                self._has_weight = not self.weight_codes.is_meta or is_assigned
            self._remember_buffers(is_loaded)
            if place is not None and not (is_assigned and not problems):
                self._hold_prepacked(place)
