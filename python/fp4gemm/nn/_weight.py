"""An NVFP4 weight, one matrix or a stack: buffers of codes and scales, or prepacked bytes in their place."""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack, unprepack
from ..quantize import quantize
from ._inputs import WeightScaling, check_bias, check_float_weight, check_quantized_weight
from ._state import BOUND, ORDER, PREPACKED, WEIGHT_BUFFERS, check_buffers, new_buffers, ordered, version

# Held by a thread that replaces codes and scales by prepacked bytes or back, and by every forward that might
# read codes and scales on a device that streams prepacked weights. A layer is thus prepacked once, and no
# thread begins to read what another one is about to free. A device is synchronised before the lock is given
# up, so that no stream still reads memory that the allocator may hand out again.
_EXCHANGE = threading.RLock()


class WeightModule(torch.nn.Module):
    """A module that stores an NVFP4 weight (n, k) or (g, n, k): as codes and block scales, or prepacked.

    Prepacked bytes keep their address until the module moves, since a captured CUDA graph may read them. The
    buffers of the form that is not stored are absent, rather than None, which torch.export (2.13) counts
    wrongly.

    A buffer may be replaced by one of its dtype and shape, or written in place, unless e4m3_max changes in
    an inference tensor, through ``.data``, by a CUDA graph or for a function that was compiled before.
    """

    in_features: int
    out_features: int
    num_matrices: int = 0  # g of a stack; 0: one matrix
    weight_amax: Tensor
    bias: Tensor | None
    # The dtype of the float weight before quantization, which module.weight.dtype returns. No buffer has it.
    dtype: torch.dtype = torch.float32
    _e4m3_max: int  # the value of the buffer BOUND, which forward must not read: that would synchronise
    _has_weight: bool
    # The buffers of WEIGHT_BUFFERS and BOUND that were looked at; see _notice.
    _known: tuple[Tensor | None, ...]
    _known_version: int | None  # the version of the buffer of e4m3_max
    _fast: tuple[Any, ...] | None = None  # what forward may call without a check; any assignment removes it
    _is_captured = False  # a CUDA graph may read codes and scales, which then stay

    def _register_weight(self, num_amax: int, device: torch.device | None) -> None:
        for name, buffer in new_buffers(self._shape, num_amax, device).items():
            self.register_buffer(name, buffer)
        self.e4m3_max = max(_checks.E4M3_BOUNDS)

    @property
    def _shape(self) -> tuple[int, ...]:
        """(n, k) or (g, n, k)."""
        lead = (self.num_matrices,) if self.num_matrices else ()
        return (*lead, self.out_features, self.in_features)

    # ---- the buffers

    @property
    def e4m3_max(self) -> int:
        """448 or 256, the e4m3_max with which the block scales were made."""
        if not torch.compiler.is_compiling():
            self._notice()
        return self._e4m3_max

    @e4m3_max.setter
    def e4m3_max(self, value: int) -> None:
        _checks.is_one_of("e4m3_max", value, _checks.E4M3_BOUNDS)
        self._e4m3_max = value
        with torch.inference_mode(False):  # load_state_dict may write it later
            self._hold(**{BOUND: self.weight_amax.new_full((1,), value, dtype=torch.int32)})

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
        self._hold_part("weight_codes", value)

    @property
    def weight_scales(self) -> Tensor:
        """float8_e4m3fn, swizzled; while the weight is prepacked a copy of them, made in every access."""
        held = self._buffers.get("weight_scales")
        return self._unprepacked("weight_scales").scales if held is None else held

    @weight_scales.setter
    def weight_scales(self, value: Tensor) -> None:
        self._hold_part("weight_scales", value)

    def _unprepacked(self, name: str) -> NVFP4Tensor:
        if self.weight_prepacked is None:
            raise AttributeError(name)  # not registered yet
        return unprepack(self._prepacked())

    def _hold_part(self, name: str, value: Tensor) -> None:
        """Set the codes alone or the block scales alone; prepacked bytes are converted back first."""
        self._hold_canonical()
        self._hold(**{name: value})

    def _hold(self, **changed: Tensor | None) -> None:
        """Set the given buffers, and remove those that are given as None; all other buffers stay."""
        gone = {name for name, value in changed.items() if value is None}
        held = {name: t for name, t in {**self._buffers, **changed}.items() if name not in gone}
        if PREPACKED in held:
            self._non_persistent_buffers_set.add(PREPACKED)
        self._buffers = ordered(held)  # at once, since other threads may be running the layer
        if PREPACKED not in held:  # accelerate expects every name of this set among the buffers
            self._non_persistent_buffers_set.discard(PREPACKED)
        self._remember_buffers(BOUND in changed)

    def _remember_buffers(self, is_bound_read: bool = True) -> None:
        """Accept the present buffers; unless e4m3_max was read, ``_notice`` still compares its buffer."""
        *parts, bound = self._weight_buffers()
        if is_bound_read:
            self._known_version = version(bound)
        self._known = (*parts, bound if is_bound_read else self._known[-1])

    def _weight_buffers(self) -> tuple[Tensor | None, ...]:
        return tuple(map(self._buffers.get, (*WEIGHT_BUFFERS, BOUND)))

    def _notice(self) -> None:
        """Look at buffers that other code has replaced, as accelerate's loaders do, and at the e4m3_max.

        Raises:
            ValueError: one of them does not fit the layer. Synchronises where e4m3_max is on a GPU.
        """
        held, known = self._buffers, self._known
        if (
            held.get("weight_codes") is known[0]
            and held.get("weight_scales") is known[1]
            and held["weight_amax"] is known[2]
            and held[BOUND] is known[3]
            and version(known[3]) == self._known_version
        ):
            return
        found = self._weight_buffers()
        if not self._has_weight and any(new is old for new, old in zip(found[:3], known[:3], strict=True)):
            return  # some buffers of the weight are not set yet
        if any(t is not None and t.is_meta for t in found):
            self._remember_buffers()  # offloaded
            return
        check_buffers(held, self._shape, 1 if self.weight_scaling == "tensor" else self.out_features)
        self._e4m3_max = int(held[BOUND].item())  # type: ignore[union-attr]
        self._align_buffers()
        self._has_weight = True
        self._remember_buffers()

    def _align_buffers(self) -> None:
        """Copy what lies off the 16-byte steps, as the tensors of a memory-mapped file may."""
        for name, buffer in self._own_buffers().items():
            if _checks.is_misaligned(buffer):
                self._buffers[name] = buffer.clone()

    # ---- the weight

    def _prepacked(self) -> PrepackedTensor:
        """The container of the buffer weight_prepacked, which exists."""
        data: Tensor = self.weight_prepacked  # type: ignore[assignment]
        return PrepackedTensor._trusted(data, self.weight_amax, self._shape, self._e4m3_max)

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight as an NVFP4Tensor over the buffers; a copy while it is prepacked.

        Assign an NVFP4Tensor, or a float tensor, which is quantized: transformers ties weights so.
        """
        if not torch.compiler.is_compiling():
            self._notice()
        if self.weight_prepacked is None:
            codes, scales = self.weight_codes, self.weight_scales
            held = NVFP4Tensor._trusted(codes, scales, self.weight_amax, self._e4m3_max)
            return held._stamped(self.dtype)
        copied = unprepack(self._prepacked())
        # All tensors are copies, so that a weight loaded later does not mix with them.
        amax = self.weight_amax.clone()
        return NVFP4Tensor._trusted(copied.codes, copied.scales, amax, self._e4m3_max)._stamped(self.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_fast"] = None
        # transformers ties weights by setattr(layer, "weight", embedding.weight). Its patterns of names match
        # the buffers of the weight too, so that it may do the same for each of them.
        if name == "weight" or (name in (*ORDER[:-1], "bias") and isinstance(value, torch.nn.Parameter)):
            if name == "bias":
                self._set_bias(value)
            else:
                self._set_weight(value)
        else:
            super().__setattr__(name, value)

    def _set_bias(self, value: Tensor) -> None:
        check_bias(value, *self._shape[:-1], device=self.weight_amax.device)
        with torch.inference_mode(False), torch.no_grad():
            self._buffers["bias"] = value.detach().to(torch.float32)

    def _set_weight(self, value: object) -> None:
        device, shape = self.weight_amax.device, self._shape
        if isinstance(value, Tensor):  # also a Parameter
            check_float_weight("weight", value, shape)
            _checks.same_device("weight", value, device, "the layer")
            with torch.inference_mode(False), torch.no_grad():
                value = self._requantized(value)
        value = check_quantized_weight(value, rank=len(shape))
        if tuple(value.shape) != shape:
            raise ValueError(f"weight: shape is {tuple(value.shape)}, must be {shape}")
        _checks.same_device("weight", value.codes, device, "the layer")
        with _EXCHANGE:
            self._hold(
                weight_codes=value.codes,
                weight_scales=value.scales,
                weight_amax=value.amax,
                weight_prepacked=None,
            )
            self.e4m3_max = value.e4m3_max
            self._has_weight = True

    def _requantized(self, weight: Tensor) -> NVFP4Tensor:
        """A float weight, or some rows of one, as NVFP4 with the scaling and the e4m3_max of this layer.

        A layer whose e4m3_max is 448 has the standard block scales, and so has the new weight. All other
        methods have the e4m3_max 256; the new weight then gets four over six, which needs no calibration.
        """
        adaptive: Literal["mse"] | None = "mse" if self.e4m3_max == min(_checks.E4M3_BOUNDS) else None
        return quantize(weight.detach(), scaling=self.weight_scaling, four_over_six=adaptive)

    @property
    def weight_scaling(self) -> WeightScaling:
        """ "row" or "tensor": whether weight_amax has a number for each row or one for the whole matrix."""
        return "tensor" if self.weight_amax.shape[-1] == 1 else "row"

    def _is_prepacked(self) -> bool:
        return PREPACKED in self._buffers

    def _hold_prepacked(self, place: Tensor | None = None) -> None:
        """Prepack the weight, into the tensor ``place`` if that is given, and free codes and block scales."""
        with _EXCHANGE:
            # Not an inference tensor, so that load_state_dict may write it later.
            with torch.inference_mode(False), torch.no_grad():
                data = prepack(self.weight).data
                if type(data) is not Tensor:
                    return  # a fake one, of a tracer that torch.compiler does not know of
                if place is not None:
                    data = place.copy_(data)
            if data.is_cuda:
                # Other streams may read the new memory at once, and may still be reading the old.
                torch.cuda.synchronize(data.device)
            self._hold(weight_prepacked=data, weight_codes=None, weight_scales=None)

    def _hold_canonical(self) -> None:
        """Restore codes and block scales from the prepacked bytes, which are then freed."""
        with _EXCHANGE:
            if self.weight_prepacked is None:
                return
            with torch.inference_mode(False), torch.no_grad():
                weight = unprepack(self._prepacked())
            if weight.codes.is_cuda:  # other streams may still be reading the prepacked bytes
                torch.cuda.synchronize(weight.device)
            self._hold(weight_prepacked=None, weight_codes=weight.codes, weight_scales=weight.scales)

    def _prepack_where_it_helps(self, quantizes: bool = True) -> bool:
        """Prepack the weight where layers on its device should, and return whether it is prepacked.

        The weight stays as it is while a CUDA graph is captured, and after one has been captured.

        quantizes: whether the products quantize their tokens.
        """
        if not support.streams_prepacked(self.weight_amax.device, quantizes) or self._is_offloaded():
            return False
        with _EXCHANGE:
            if self._is_prepacked():  # another thread has prepacked it
                return True
            if torch.cuda.is_current_stream_capturing():
                self._is_captured = True
            if self._is_captured:
                return False
            self._hold_prepacked()
            return self._is_prepacked()

    def _is_offloaded(self) -> bool:
        """Whether accelerate brings codes and scales to the device for each forward."""
        hook = self.__dict__.get("_hf_hook")
        return hook is not None and any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))

    def _own_buffers(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in (*WEIGHT_BUFFERS, BOUND)}
        return own if self.bias is None else {**own, "bias": self.bias}
