"""The weight of an NVFP4 Linear: buffers of codes and scales, or prepacked bytes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack, unprepack
from ._state import BITS, WEIGHT_BUFFERS, checkpoint_problems, keep_dtype

PREPACKED = "weight_prepacked"
ORDER = (*WEIGHT_BUFFERS, PREPACKED, "bias")  # of the buffers


class WeightModule(torch.nn.Module):
    """A module with an NVFP4 weight (n, k), which is held once: as codes and scales, or prepacked.

    What leaves the module (state_dict, pickles, copies, other devices) is always codes and scales. Prepacked
    bytes keep their place in memory until the module moves, since a captured CUDA graph may read them. What
    is not held is no buffer, rather than a buffer that is None, which torch.export (2.13) counts wrongly.
    """

    in_features: int
    out_features: int
    e4m3_max: int
    weight_amax: Tensor
    bias: Tensor | None
    _has_weight: bool
    _is_captured = False  # a CUDA graph may read codes and scales, which then stay

    def _register_weight(self, num_amax: int, device: torch.device | None) -> None:
        n, k = self.out_features, self.in_features
        self.register_buffer("weight_codes", torch.empty(n, k // 2, dtype=torch.uint8, device=device))
        scale_shape = _checks.padded_scale_shape(n, k)
        self.register_buffer(
            "weight_scales", torch.empty(scale_shape, dtype=torch.float8_e4m3fn, device=device)
        )
        self.register_buffer("weight_amax", torch.empty(num_amax, dtype=torch.float32, device=device))
        self._non_persistent_buffers_set.add(PREPACKED)

    @property
    def weight_prepacked(self) -> Tensor | None:
        """uint8, while the weight is prepacked; else None."""
        return self._buffers.get(PREPACKED)

    @property
    def weight_codes(self) -> Tensor:
        """uint8 (n, k/2); while the weight is prepacked a copy of them, made in every access."""
        held = self._buffers.get("weight_codes")
        return self._unprepacked("weight_codes").codes if held is None else held

    @weight_codes.setter
    def weight_codes(self, value: Tensor) -> None:
        self._hold(weight_codes=value)

    @property
    def weight_scales(self) -> Tensor:
        """float8_e4m3fn, swizzled; while the weight is prepacked a copy of them, made in every access."""
        held = self._buffers.get("weight_scales")
        return self._unprepacked("weight_scales").scales if held is None else held

    @weight_scales.setter
    def weight_scales(self, value: Tensor) -> None:
        self._hold(weight_scales=value)

    def _unprepacked(self, name: str) -> NVFP4Tensor:
        if self.weight_prepacked is None:
            raise AttributeError(name)  # not registered yet
        return unprepack(self._prepacked())

    def _hold(self, **changed: Tensor | None) -> None:
        """Set buffers, or take away those that are None; the others stay."""
        gone = {name for name, value in changed.items() if value is None}
        held = {name: t for name, t in {**self._buffers, **changed}.items() if name not in gone}
        self._buffers = _ordered(held)  # at once, since other threads may be running the layer

    def _prepacked(self) -> PrepackedTensor:
        """The container of weight_prepacked, which is there."""
        shape = (self.out_features, self.in_features)
        data: Tensor = self.weight_prepacked  # type: ignore[assignment]
        return PrepackedTensor._trusted(data, self.weight_amax, shape, self.e4m3_max)

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight (n, k) as the library's own container, over the buffers (a copy while prepacked)."""
        if self.weight_prepacked is None:
            codes, scales = self.weight_codes, self.weight_scales
            return NVFP4Tensor._trusted(codes, scales, self.weight_amax, self.e4m3_max)
        unprepacked = unprepack(self._prepacked())
        # One that was assigned since counts.
        held = (self._buffers.get("weight_codes"), self._buffers.get("weight_scales"))
        codes, scales = (
            part if own is None else own
            for part, own in zip((unprepacked.codes, unprepacked.scales), held, strict=True)
        )
        # All copies, so that a weight loaded later does not mix with them.
        return NVFP4Tensor._trusted(codes, scales, self.weight_amax.clone(), self.e4m3_max)

    def _is_prepacked(self) -> bool:
        """Whether weight_prepacked is the weight, nothing having been assigned over it."""
        held = self._buffers
        return PREPACKED in held and "weight_codes" not in held and "weight_scales" not in held

    def _hold_prepacked(self, place: Tensor | None = None) -> None:
        """Prepack the weight, into ``place`` if that is given, and let go of codes and scales."""
        # Not an inference tensor, so that load_state_dict may write it later.
        with torch.inference_mode(False), torch.no_grad():
            weight = self.weight  # kept until the device has read it, whatever another thread does
            data = prepack(weight).data
            if place is not None:
                data = place.copy_(data)
        if type(data) is not Tensor:
            return  # a fake one, of a tracer that torch.compiler does not know of
        if data.is_cuda:
            # Other streams may read the new memory at once, and may still be reading what is let go of.
            torch.cuda.synchronize(data.device)
        self._hold(weight_prepacked=data, weight_codes=None, weight_scales=None)

    def _hold_canonical(self) -> None:
        """Bring codes and scales back in place of the prepacked bytes."""
        if self.weight_prepacked is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            weight = self.weight
        self._hold(weight_prepacked=None, weight_codes=weight.codes, weight_scales=weight.scales)

    def _prepack_where_it_helps(self) -> bool:
        """Prepack where the device streams prepacked weights, but not into a graph; whether it did."""
        if not support.streams_prepacked(self.weight_amax.device):
            return False
        if torch.cuda.is_current_stream_capturing():
            self._is_captured = True
        if self._is_captured:
            return False
        self._hold_prepacked()
        return self._is_prepacked()

    def _own_buffers(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in WEIGHT_BUFFERS}
        return own if self.bias is None else {**own, "bias": self.bias}

    def reset_parameters(self) -> None:
        """Forget the weight: zeros everywhere, and ``forward`` raises until one is loaded."""
        if self._is_prepacked():  # which keep their place: zero bytes are codes and scales of zero
            held = [t for t in (self.weight_prepacked, self.weight_amax, self.bias) if t is not None]
        else:
            self._hold_canonical()
            held = list(self._own_buffers().values())
        for buffer in held:
            buffer.view(BITS[buffer.dtype]).zero_()
        self._has_weight = False

    def __getstate__(self) -> dict[str, Any]:
        weight = self.weight
        # torch (2.13) writes float8 storages with plain pickle but cannot read them back; bytes it can.
        held = {name: buffer for name, buffer in self._buffers.items() if name != PREPACKED}
        held |= {"weight_codes": weight.codes, "weight_scales": weight.scales.view(torch.uint8)}
        return {**self.__dict__, "_buffers": _ordered(held), "_is_captured": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers["weight_scales"] = state["_buffers"]["weight_scales"].view(torch.float8_e4m3fn)
        self._non_persistent_buffers_set.add(PREPACKED)  # for those of version 0.1.0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.weight_prepacked is not None:
            weight = self.weight
            destination[prefix + "weight_codes"] = weight.codes
            destination[prefix + "weight_scales"] = weight.scales
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_prepacked is not None:  # copies as well: a weight loaded later must not mix with them
            for name in ("weight_amax", "bias"):
                if self._buffers.get(name) is not None:
                    destination[prefix + name] = destination[prefix + name].clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Module.to, .half, .cuda, .to_empty and the like: places change, the NVFP4 dtypes do not."""
        own = {id(buffer) for buffer in self._buffers.values() if buffer is not None}
        before = self.weight_amax.device
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in own else fn(t), recurse)
        if before.type == "meta" and not self.weight_amax.is_meta:
            self._has_weight = False  # to_empty: memory without contents
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
        place = self.weight_prepacked if self._is_prepacked() else None
        self._hold_canonical()
        problems = checkpoint_problems(self._own_buffers(), state_dict, prefix)
        if problems:  # all or nothing: codes never meet the scales of another weight
            error_msgs.extend(problems)
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        if not problems and prefix + WEIGHT_BUFFERS[0] in state_dict:
            for name, buffer in self._own_buffers().items():
                # load_state_dict(assign=True) takes tensors as they lie in a mapped file.
                if type(buffer) is Tensor and not buffer.is_meta and buffer.data_ptr() % _checks.ALIGN_BYTES:
                    setattr(self, name, buffer.clone())
            self._has_weight = not self.weight_codes.is_meta or is_assigned
        if place is not None and not (is_assigned and not problems):
            self._hold_prepacked(place)


def _ordered(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The same in the order in which a new layer has them."""
    return {name: buffers[name] for name in (*ORDER, *buffers) if name in buffers}
