"""WeightModule, the base class of modules with a quantized weight: buffers, updates, moves, checkpoints."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack, unprepack
from ..ops.options import residual_values
from ..ops.parts import OperandParts
from ..quantize import repeated_columns
from ..recipe import Quantizer, Recipe, WeightScaling
from ..support import TokenForm
from ._formats import AMAX, BOUND, CODES, FORMATS, SCALES, FormatName, Weight, WeightFormat
from ._inputs import check_bias, check_float_weight

if TYPE_CHECKING:
    from typing_extensions import Self

PREPACKED = "weight_prepacked"
RESIDUAL = "residual_channels"
PARTS = (CODES, SCALES, AMAX, RESIDUAL)  # the buffers that form a weight and load together, but for BOUND
ORDER = (CODES, SCALES, AMAX, BOUND, RESIDUAL, PREPACKED, "bias")  # the order of the buffers
EXTRA_STATE = "_extra_state"  # the key under which older checkpoints have e4m3_max
# A buffer passes through Module.half() and the like as integers of its size, so that no cast changes it.
BITS = {
    torch.uint8: torch.uint8,
    torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float32: torch.int32,
    torch.int32: torch.int32,
}

# Held by a thread that replaces codes and scales by prepacked bytes or back, and by every forward that might
# read codes and scales on a device that streams prepacked weights. A layer is thus prepacked once, and no
# thread begins to read what another one is about to free. A device is synchronised before the lock is given
# up, so that no stream still reads memory that the allocator may hand out again.
_EXCHANGE = threading.RLock()


def _no_exchange() -> AbstractContextManager[object]:
    """Keeps other threads from an exchange; nothing where a graph is traced, which has no lock."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _EXCHANGE


class WeightModule(torch.nn.Module):
    """A module that stores a quantized weight (n, k) or (g, n, k): as codes and block scales, or prepacked.

    What the buffers are, and which container they form, is of the weight's format (:mod:`._formats`).
    Prepacked bytes keep their address until the module moves, since a captured CUDA graph may read them. The
    buffers of the form that is not stored are absent, rather than None, which torch.export (2.13) counts
    wrongly.

    A buffer may be replaced by one of its dtype and shape, or written in place, unless e4m3_max changes in
    an inference tensor, through ``.data``, by a CUDA graph or for a function that was compiled before.
    """

    in_features: int
    out_features: int
    num_matrices: int = 0  # g of a stack; 0: one matrix
    num_residual: int = 0  # the columns that the weight has beyond in_features: r residual channels
    weight_amax: Tensor
    bias: Tensor | None
    format_name: FormatName = "nvfp4"
    # The dtype of the float weight before quantization, which module.weight.dtype returns. No buffer has it.
    dtype: torch.dtype = torch.float32
    _public = "Linear"  # the class of fp4gemm.nn that a message names
    weight_recipe: Recipe | None = (
        None  # by which float weights of an update are cast; None: see _requantized
    )
    # The value of the buffer BOUND, which forward must not read, since that would synchronise; 448 without.
    _e4m3_max: int = max(_checks.E4M3_BOUNDS)
    _has_weight: bool
    # The buffers of the weight that were looked at, in ORDER, None for those that are absent; see _notice.
    _known: tuple[Tensor | None, ...]
    _known_version: int | None  # the version of the buffer of e4m3_max
    _fast: tuple[Any, ...] | None = None  # what forward may call without a check; any assignment removes it
    # What the copy of the transpose was made of, and the copy; see _held_transpose.
    _transposed: tuple[tuple[Any, ...], OperandParts] | None = None
    _is_captured = False  # a CUDA graph may read codes and scales, which then stay

    def __init__(
        self,
        shape: tuple[int, ...],
        bias: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        weight_scaling: WeightScaling,
        format: FormatName = "nvfp4",
        num_residual: int = 0,
    ) -> None:
        """A module that has no weight yet; shape is (n, k) or (g, n, k), dtype None torch's default dtype."""
        super().__init__()
        self.format_name = format
        default = torch.get_default_dtype() if dtype is None else dtype
        self.dtype = default if default in _checks.FLOAT_DTYPES else torch.float32
        where = None if device is None else _checks.as_device("device", device)
        *lead, n, k = shape
        if lead:
            self.num_matrices = lead[0]
        self.in_features, self.out_features = k, n
        num_amax = n if weight_scaling == "row" else 1
        self.num_residual = num_residual
        held: dict[str, Tensor | None] = {**self._format.new_buffers(self._held_shape, num_amax, where)}
        if num_residual:
            held[RESIDUAL] = torch.empty(num_residual, dtype=torch.int32, device=where)
        held["bias"] = torch.empty(shape[:-1], dtype=torch.float32, device=where) if bias else None
        self._buffers = held
        self.reset_parameters()

    @property
    def _shape(self) -> tuple[int, ...]:
        """(n, k) or (g, n, k)."""
        lead = (self.num_matrices,) if self.num_matrices else ()
        return (*lead, self.out_features, self.in_features)

    @property
    def _held_shape(self) -> tuple[int, ...]:
        """The shape of the weight in memory: that of the weight, with the columns of residual channels."""
        *lead, k = self._shape
        return (*lead, k + self.num_residual)

    @property
    def _format(self) -> WeightFormat:
        return FORMATS[self.format_name]

    @property
    def _device(self) -> torch.device:
        """Where the weight is."""
        held = self._buffers  # once, since another thread may replace it
        place: Tensor = held[CODES if CODES in held else PREPACKED]  # type: ignore[assignment]
        return place.device

    # ---- the buffers

    @property
    def e4m3_max(self) -> int:
        """448 or 256, the e4m3_max with which the block scales of NVFP4 were made; 448 in other formats."""
        if not torch.compiler.is_compiling():
            self._notice()
        return self._e4m3_max

    @e4m3_max.setter
    def e4m3_max(self, value: int) -> None:
        _checks.is_one_of("e4m3_max", value, _checks.E4M3_BOUNDS)
        if not self._format.has_bound:
            raise ValueError(f"e4m3_max: got {value}, must not be set of a weight in {self._format.title}")
        self._set_bound(value)

    def _set_bound(self, value: int) -> None:
        """Set the e4m3_max of a weight in a format that has one."""
        if not self._format.has_bound:
            return
        self._e4m3_max = value
        with torch.inference_mode(False):  # load_state_dict may write it later
            self._hold(**{BOUND: self.weight_amax.new_full((1,), value, dtype=torch.int32)})

    @property
    def weight_prepacked(self) -> Tensor | None:
        """uint8, or int8 for FP8 tokens, while the weight is prepacked; else None."""
        return self._buffers.get(PREPACKED)

    @property
    def residual_channels(self) -> Tensor | None:
        """int32 (r,), the inputs whose errors are multiplied too, or None; see :class:`fp4gemm.nn.Linear`."""
        return self._buffers.get(RESIDUAL)

    @property
    def weight_codes(self) -> Tensor:
        """uint8 (n, k/2), of MXFP8 e4m3 (n, k); of a prepacked weight a copy, made in every access."""
        with _no_exchange():
            held = self._buffers.get(CODES)
            return self._unprepacked().codes if held is None else held

    @weight_codes.setter
    def weight_codes(self, value: Tensor) -> None:
        self._hold_part("weight_codes", value)

    @property
    def weight_scales(self) -> Tensor:
        """float8_e4m3fn, of MX formats float8_e8m0fnu, swizzled; of a prepacked weight a copy, as codes."""
        with _no_exchange():
            held = self._buffers.get(SCALES)
            return self._unprepacked().scales if held is None else held

    @weight_scales.setter
    def weight_scales(self, value: Tensor) -> None:
        self._hold_part("weight_scales", value)

    def _hold_part(self, name: str, value: Tensor) -> None:
        """Set the codes alone or the block scales alone; prepacked bytes are converted back first."""
        with _EXCHANGE:
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
        return tuple(map(self._buffers.get, (*PARTS, BOUND)))

    def _notice(self) -> None:
        """Look at buffers that other code has replaced, as accelerate's loaders do, and at the e4m3_max.

        Raises:
            ValueError: one of them does not fit the layer. Synchronises where e4m3_max is on a GPU.
        """
        held, known = self._buffers, self._known
        if (
            held.get(CODES) is known[0]
            and held.get(SCALES) is known[1]
            and held.get(AMAX) is known[2]
            and held.get(RESIDUAL) is known[3]
            and held.get(BOUND) is known[4]
            and version(known[4]) == self._known_version
        ):
            return
        found = self._weight_buffers()
        parts = self._own_parts()
        same = [held.get(name) is old for name, old in zip(PARTS, known, strict=False) if name in parts]
        if not self._has_weight and any(same):
            return  # some buffers of the weight are not set yet
        if any(t is not None and t.is_meta for t in found):
            self._remember_buffers()  # offloaded
            return
        num_amax = 1 if self.weight_scaling == "tensor" else self.out_features
        check_buffers(self._format, held, self._held_shape, num_amax, self.num_residual)
        bound = held.get(BOUND)
        if bound is not None:
            self._e4m3_max = int(bound.item())
        self._align_buffers()
        self._has_weight = True
        self._remember_buffers()

    def _align_buffers(self) -> None:
        """Copy what lies off the 16-byte steps, as the tensors of a memory-mapped file may."""
        for name, buffer in self._own_buffers().items():
            if _checks.is_misaligned(buffer):
                self._buffers[name] = buffer.clone()

    def _own_parts(self) -> tuple[str, ...]:
        """The names of the buffers that form the weight and load together."""
        return (*self._format.buffers, RESIDUAL) if self.num_residual else self._format.buffers

    def _own_buffers(self) -> dict[str, Tensor]:
        names = (*self._format.all_buffers, RESIDUAL) if self.num_residual else self._format.all_buffers
        own = {name: getattr(self, name) for name in names}
        return own if self.bias is None else {**own, "bias": self.bias}

    # ---- the weight

    @property
    def weight(self) -> Weight:
        """The weight as a container over the buffers, such as an NVFP4Tensor; a copy while it is prepacked.

        With residual channels it is a copy of the columns without those that are repeated for them. Assign
        such a container, or a float tensor, which is quantized: transformers ties weights so.
        """
        held = self._held_weight()
        return self._format.columns(held, self.in_features) if self.num_residual else held

    def _held_weight(self) -> Weight:
        """The weight with all columns of the buffers."""
        if not torch.compiler.is_compiling():
            self._notice()
        with _no_exchange():
            held = self._buffers
            codes, scales, amax = held.get(CODES), held.get(SCALES), held.get(AMAX)
            if codes is None or scales is None:
                # All tensors are copies, so that a weight loaded later does not mix with them.
                copied = self._unprepacked()
                codes, scales, amax = copied.codes, copied.scales, copied.amax.clone()
            made: Weight = self._format.of(codes, scales, amax, self._e4m3_max)._stamped(self.dtype)
        return made

    @property
    def _nvfp4_weight(self) -> NVFP4Tensor:
        """The weight with all columns, where it has to be NVFP4; NotImplementedError for another format."""
        weight = self._held_weight()
        if not isinstance(weight, NVFP4Tensor):
            raise NotImplementedError(f"weight: is {self._format.title}, must be NVFP4 for this")
        return weight

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
        check_bias(value, *self._shape[:-1], device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            self._buffers["bias"] = value.detach().to(torch.float32)

    def _set_weight(self, value: object) -> None:
        new = self._with_repeated_columns(self._quantized("weight", value, self._shape))
        with _EXCHANGE:
            self._hold(**self._format.parts(new), weight_prepacked=None)
            self._set_bound(bound_of(new))
            self._has_weight = True

    def _quantized(self, name: str, weight: object, shape: tuple[int, ...]) -> Weight:
        """A new weight, or rows of one, quantized; raises unless it has this shape and the layer's device."""
        device = self._device
        if isinstance(weight, Tensor):  # also a Parameter
            check_float_weight(name, weight, shape)
            _checks.same_device(name, weight, device, "the layer")
            with torch.inference_mode(False), torch.no_grad():
                weight = self._requantized(weight)
        kind = self._format.container
        if not isinstance(weight, kind):
            raise TypeError(
                f"{name}: got {_checks.describe(weight)}, must be an {kind.__name__} or a float tensor"
            )
        new: Weight = self._format.check(weight, name, len(shape))
        if tuple(new.shape) != shape:
            raise ValueError(f"{name}: shape is {tuple(new.shape)}, must be {shape}")
        _checks.same_device(name, new._elements, device, "the layer")
        return new

    def _with_repeated_columns(self, weight: Weight) -> Weight:
        """A weight (n, k) as it is in memory: with the columns of residual channels again.

        Raises ValueError if the layer has residual channels that were not set yet.
        """
        channels = self.residual_channels
        if channels is None:
            return weight
        if not self._has_weight:  # else they were checked with the weight
            problem = residual_problem(channels, self.in_features)
            if problem is not None:
                raise ValueError(f"{RESIDUAL}: {problem}; load a checkpoint, or make the layer with them")
        with torch.inference_mode(False), torch.no_grad():
            return repeated_columns(cast(NVFP4Tensor, weight), channels)

    def _requantized(self, weight: Tensor) -> Weight:
        """A float weight, or some rows of one, quantized; NVFP4 with the scaling and e4m3_max of this layer.

        A weight whose e4m3_max is 448 was made by the method "round", and so is the new one. All other
        methods have the e4m3_max 256; the new weight then gets the default method without data, as the first
        weight of a layer does. A layer that was made by a recipe casts by it.
        """
        if self.weight_recipe is not None:
            return Quantizer(self.weight_recipe)(weight.detach())
        is_rounded = self._has_weight and self.e4m3_max == max(_checks.E4M3_BOUNDS)
        return self._format.default_quantizer(is_rounded, self.weight_scaling)(weight.detach())

    @property
    def weight_scaling(self) -> WeightScaling:
        """ "row" or "tensor": whether weight_amax has a number for each row or one for the whole matrix.

        "row" of a format without an amax.
        """
        amax = self._buffers.get(AMAX)
        return "tensor" if amax is not None and amax.shape[-1] == 1 else "row"

    @property
    def _shown_scaling(self) -> str:
        """weight_scaling for extra_repr; "" of a format without an amax."""
        return f", weight_scaling={self.weight_scaling!r}" if AMAX in self._format.buffers else ""

    def reset_parameters(self) -> None:
        """Forget the weight: zeros everywhere, and ``forward`` raises until one is loaded."""
        if self._is_prepacked():  # the buffer keeps its address; zero bytes decode to 0
            names = (PREPACKED, AMAX, RESIDUAL, "bias")
            held = [t for t in map(self._buffers.get, names) if t is not None]
        else:
            held = [t for name, t in self._own_buffers().items() if name != BOUND]
        for buffer in held:
            buffer.view(BITS[buffer.dtype]).zero_()
        self._set_bound(max(_checks.E4M3_BOUNDS))
        self._has_weight = False
        self._remember_buffers()

    def _require_weight(self) -> None:
        if not torch.compiler.is_compiling():
            self._notice()
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an "
                f"fp4gemm.nn.{self._public}, or make it with {self._public}.from_float or "
                f"{self._public}.from_quantized"
            )

    def _adopt(self, weight: Weight, bias: Tensor | None, channels: Tensor | None = None) -> Self:
        """Share the memory of ``weight``, copy the bias and the residual channels, and return the new layer.

        With residual channels the layer has a weight of its own, which has more columns.
        """
        if channels is not None:
            self._hold(**{RESIDUAL: channels.clone()})
            weight = self._with_repeated_columns(weight)
        self._hold(
            **self._format.parts(weight),
            bias=None if bias is None else bias.detach().to(torch.float32, copy=True),
        )
        self._buffers.setdefault("bias", None)
        self._set_bound(bound_of(weight))
        self._has_weight = True
        return self

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values W of the weight, dense (n, k) or (g, n, k) of ``dtype``.

        Of NVFP4 ``W = code * block scale * amax / (6 * e4m3_max)``, of MX formats ``W = code * block scale``.
        """
        self._require_weight()
        return self.weight.dequantize(dtype)

    # ---- the forms: codes and block scales, or prepacked bytes

    def _held_transpose(
        self, w: OperandParts, make: Callable[[OperandParts, int], OperandParts]
    ) -> OperandParts:
        """make(w, k), the quantized transpose of this layer's weight w, kept until the weight changes."""
        parts = (w.data, w.scales, w.amax)
        written = (*map(version, parts), w.e4m3_max)
        held = self._transposed
        if held is None or held[0][3:] != written or any(map(operator.is_not, held[0][:3], parts)):
            with torch.inference_mode(False), torch.no_grad():
                made = make(w, self.in_features)
            held = self._transposed = ((*parts, *written), made)
        return held[1]

    def _operand_parts(self) -> OperandParts:
        """The buffers as the operators take them; the weight must be there."""
        held = self._buffers  # once, since another thread may replace it
        is_prepacked = PREPACKED in held
        return OperandParts(
            held[PREPACKED if is_prepacked else CODES],  # type: ignore[arg-type]
            held.get(SCALES),
            held.get(AMAX),
            self._e4m3_max,
            self.out_features if is_prepacked else 0,
            held["bias"],
        )

    def _prepack(self, tokens: TokenForm) -> None:
        """Prepack the weight for products with such tokens, unless it is.

        Raises:
            RuntimeError: no weight has been loaded yet, or a CUDA graph has been captured that reads the
                weight as it is. NotImplementedError: the device does not read prepacked weights; the text
                says which.
        """
        self._require_weight()
        if not self._format.is_prepacked:
            raise NotImplementedError(
                f"weight: is {self._format.title}, must be NVFP4 to be prepacked; no kernel reads others so"
            )
        if self._is_captured:
            raise RuntimeError(
                "weight: its codes and scales are read by a captured CUDA graph; prepack() must come before"
            )
        formats = ("e4m3", "prepacked_fp8") if tokens == "fp8" else ("nvfp4", "prepacked")
        support.ready_for(self._buffers[AMAX], "mm", formats)  # type: ignore[arg-type]
        with _EXCHANGE:
            if not self._is_prepacked_for(tokens):
                self._hold_prepacked(tokens == "fp8")

    def _is_prepacked(self) -> bool:
        return PREPACKED in self._buffers

    def _is_prepacked_for(self, tokens: TokenForm) -> bool:
        """Whether the weight is prepacked in the order that products with such tokens read."""
        held = self._buffers.get(PREPACKED)
        return held is not None and _checks.is_for_fp8(held) is (tokens == "fp8")

    def _unprepacked(self) -> NVFP4Tensor:
        """Codes and block scales of the prepacked bytes, in new memory; with the amax of the layer."""
        data: Tensor = self._buffers[PREPACKED]  # type: ignore[assignment]
        shape = self._held_shape
        return unprepack(PrepackedTensor._trusted(data, self.weight_amax, shape, self._e4m3_max))

    def _hold_prepacked(self, fp8: bool, place: Tensor | None = None) -> None:
        """Prepack the weight, into the tensor ``place`` if that is given, and free codes and block scales.

        fp8: whether for FP8 tokens. A weight that is prepacked for others is prepacked anew.
        """
        with _EXCHANGE:
            # Not an inference tensor, so that load_state_dict may write it later.
            with torch.inference_mode(False), torch.no_grad():
                data = prepack(self._nvfp4_weight, fp8).data
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
                weight = self._unprepacked()
            if weight.codes.is_cuda:  # other streams may still be reading the prepacked bytes
                torch.cuda.synchronize(weight.device)
            self._hold(weight_prepacked=None, weight_codes=weight.codes, weight_scales=weight.scales)

    def _prepack_where_it_helps(self, tokens: TokenForm = "nvfp4") -> bool:
        """Prepack the weight where layers on its device should, and return whether it is prepacked.

        The caller has found that it is not prepacked for such tokens; if it is for others, it gets codes and
        scales back where layers should have these. It stays as it is while a CUDA graph is captured, and
        after one has been captured.

        tokens: what the tokens of the products are.
        """
        if not support.streams_prepacked(self._device, tokens) or self._is_offloaded():
            self._hold_canonical()
            return False
        with _EXCHANGE:
            if self._is_prepacked_for(tokens):  # another thread has prepacked it
                return True
            if torch.cuda.is_current_stream_capturing():
                self._is_captured = True
            if self._is_captured:
                return False
            self._hold_prepacked(tokens == "fp8")
            return self._is_prepacked()

    def _is_offloaded(self) -> bool:
        """Whether accelerate brings codes and scales to the device for each forward."""
        hook = self.__dict__.get("_hf_hook")
        return hook is not None and any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))

    # ---- updates

    def update_(self, weight: Tensor | Weight, bias: Tensor | None = None) -> Self:
        """Write another weight of the same shape into the memory of this one, and return the layer.

        Every buffer keeps its address, prepacked or not, so that a captured CUDA graph multiplies by the new
        weight when it is replayed next. All checks come first: after an error nothing has changed.

        The writes are on the current stream, as the next ``forward`` on it is. Where graphs are replayed on
        another stream, that one has to wait for the update (and the update for the last replay).

        Args:
            weight: NVFP4Tensor (n, k), or (g, n, k) of a stack, with the e4m3_max of the layer, which is an
                argument of the kernels and so part of a captured graph. Its amax is that of the layer in
                shape; one number for a matrix is also accepted where the layer has one for each row. Or a
                bfloat16, float16 or float32 tensor, which :func:`fp4gemm.quantize` makes NVFP4 with
                ``weight_scaling`` and ``e4m3_max`` of the layer: the standard block scales for 448, and four
                over six for 256. A layer with an MXFP8 or MXFP4 weight takes an MXFP8Tensor or MXFP4Tensor
                in place of the first, and makes one of a float tensor.
            bias: bfloat16, float16 or float32 (n,) or (g, n); None keeps the bias.

        Raises:
            TypeError, ValueError: weight or bias has another type, dtype, shape, device or e4m3_max, a
                float weight has NaN or infinity, or the layer has no bias or no memory (it is on the meta
                device or offloaded). The text names the argument.

        Synchronises for a float weight on a GPU, to look for NaN and infinity, and not for an NVFP4Tensor.
        """
        with _EXCHANGE:
            self._write(self._new_weight(weight, bias))
        return self

    def _new_weight(
        self, weight: object, bias: object = None, names: tuple[str, str] = ("weight", "bias")
    ) -> dict[str, Tensor]:
        """Check the arguments of an update, and return the tensors that it writes, by the name of the buffer.

        The tensors are codes and block scales, or prepacked bytes, as the layer stores them; ``names`` are
        the names of the arguments in errors.
        """
        self._notice()
        name, shape, device = names[0], self._shape, self._device
        if device.type == "meta" or self._is_offloaded():
            where = "offloaded" if self._is_offloaded() else "on the meta device"
            raise ValueError(f"{name}: the layer is {where}, must be in memory to be updated")
        parts: dict[str, Tensor] = {}
        if bias is not None:
            if self.bias is None:
                raise ValueError(f"{names[1]}: got {_checks.describe(bias)}, must be None: there is no bias")
            checked = check_bias(bias, *shape[:-1], device=device, name=names[1])
            parts["bias"] = checked.detach().to(torch.float32)
        new = self._with_repeated_columns(self._quantized(name, weight, shape))
        bound, made = bound_of(new), self._format.parts(new)
        if self._has_weight and bound != self._e4m3_max:
            raise ValueError(
                f"{name}: e4m3_max is {bound}, must be {self._e4m3_max} as of the layer; assign "
                "the attribute `weight`, before a CUDA graph is captured, to change it"
            )
        amax = made.get(AMAX)
        if amax is not None and amax.shape != self.weight_amax.shape:
            if amax.shape[-1] != 1:
                raise ValueError(
                    f"{name}: amax has shape {tuple(amax.shape)}, must have "
                    f"{tuple(self.weight_amax.shape)}, since weight_scaling of the layer is 'tensor'"
                )
            made[AMAX] = amax.expand(self.weight_amax.shape)
        if not self._has_weight:
            self._set_bound(bound)  # nothing has read it yet
        place = self.weight_prepacked
        if place is None:
            return {**parts, **made}
        with torch.inference_mode(False), torch.no_grad():
            packed = prepack(cast(NVFP4Tensor, new), _checks.is_for_fp8(place))
            return {**parts, AMAX: made[AMAX], PREPACKED: packed.data}

    def _write(self, parts: dict[str, Tensor]) -> None:
        """Copy the tensors of an update into the buffers, after all checks, so that nothing can fail."""
        held = self._buffers
        is_inference = any(held[name].is_inference() for name in parts)  # type: ignore[union-attr]
        with torch.inference_mode(is_inference), torch.no_grad():
            for name, part in parts.items():
                buffer: Tensor = held[name]  # type: ignore[assignment]
                # As bytes: a copy between equal dtypes is no kernel, which the prepacked ones rely on.
                buffer.view(BITS[buffer.dtype]).copy_(part.contiguous().view(BITS[buffer.dtype]))
        self._has_weight = True

    # ---- moves, copies, pickles and checkpoints: always as codes and block scales

    def __getstate__(self) -> dict[str, Any]:
        with _EXCHANGE:
            weight, buffers = self._held_weight(), self._buffers
        # torch (2.13) writes float8 storages with plain pickle but cannot read them back; bytes it can.
        held = {name: buffer for name, buffer in buffers.items() if name != PREPACKED}
        held |= {
            name: t.view(BITS[t.dtype]) for name, t in self._format.parts(weight).items() if name != AMAX
        }
        without = ("_known", "_fast", "_transposed")
        state = {name: v for name, v in self.__dict__.items() if not name.startswith(without)}
        return {**state, "_buffers": ordered(held), "_is_captured": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in (CODES, SCALES):
            self._buffers[name] = state["_buffers"][name].view(self._format.dtypes[name])
        self._remember_buffers()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with _EXCHANGE:
            if self.weight_prepacked is not None:
                for name, part in self._format.parts(self._held_weight()).items():
                    destination[prefix + name] = part
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if self.weight_prepacked is not None:  # copies too: a weight loaded later must not mix with them
                for name in (AMAX, BOUND, RESIDUAL, "bias"):
                    if self._buffers.get(name) is not None:
                        destination[prefix + name] = destination[prefix + name].clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Module.to, .half, .cuda, .to_empty and the like: devices change, dtypes of buffers do not."""
        self._notice()
        own = {id(buffer) for buffer in self._buffers.values() if buffer is not None}
        before = self._device
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in own else fn(t), recurse)
        self.dtype = moved_dtype(fn, self.dtype)
        self._remember_buffers()
        if before.type == "meta" and self._device.type != "meta":
            self._has_weight = False  # to_empty: memory without contents
            self._set_bound(self._e4m3_max)
        if self._device != before:
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
            if self._format.has_bound:
                state_dict = with_bound(state_dict, prefix)
            problems = checkpoint_problems(
                self._format, self._own_parts(), self._own_buffers(), state_dict, prefix
            )
            if problems:  # all or nothing: codes never meet the scales of another weight
                error_msgs.extend(problems)
            else:
                super()._load_from_state_dict(
                    state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
                )
            is_loaded = not problems and prefix + CODES in state_dict
            if is_loaded:
                self._align_buffers()
                bound = state_dict[prefix + BOUND] if self._format.has_bound else None
                if bound is not None and not bound.is_meta:
                    self._e4m3_max = int(bound.item())
                self._has_weight = not self.weight_codes.is_meta or is_assigned
            self._remember_buffers(is_loaded)
            if place is not None and not (is_assigned and not problems):
                self._hold_prepacked(_checks.is_for_fp8(place), place)


# ---- the buffers by themselves


def bound_of(weight: Weight) -> int:
    """The e4m3_max of a container; 448 in a format without one."""
    return getattr(weight, "e4m3_max", max(_checks.E4M3_BOUNDS))


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


def residual_problem(value: Tensor, k: int) -> str | None:
    """Why these values are not residual channels of k inputs; None if they are. Synchronises on a GPU."""
    if value.is_meta:
        return None
    try:
        residual_values(RESIDUAL, value, k)
    except ValueError as error:
        return str(error).removeprefix(f"{RESIDUAL}: ")
    return None


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
    if prefix + CODES not in state_dict or (extra not in state_dict and bound in state_dict):
        return state_dict
    state = dict(state_dict)
    default = torch.tensor([max(_checks.E4M3_BOUNDS)], dtype=torch.int32)
    state.setdefault(bound, state.pop(extra, default))
    return state


def checkpoint_problems(
    format: WeightFormat,
    parts: Sequence[str],
    own: Mapping[str, Tensor],
    state_dict: Mapping[str, Any],
    prefix: str,
) -> list[str]:
    """Why the entries under ``prefix`` cannot be the state of a layer with the buffers ``own``, a text each.

    The buffers ``parts`` load together.

    torch itself compares shapes only and would cast another dtype: uint8 bytes that hold e4m3 scales, for
    instance, would become numbers from 0 to 255.
    """
    if prefix + "weight" in state_dict:
        return [
            f"{prefix}weight: is the weight of a float layer, must be {', '.join(format.buffers)}; "
            "load it into a torch.nn.Linear and convert that with Linear.from_float"
        ]
    together = [prefix + name for name in parts]
    missing = [key for key in together if key not in state_dict]
    if len(missing) == len(together):
        return []  # torch reports missing keys, if strict
    problems = [f"{key}: is missing, must come with the other parts of the weight" for key in missing]
    for name, buffer in own.items():
        if prefix + name in state_dict:
            value = state_dict[prefix + name]
            problem = buffer_problem(format, name, buffer, value)
            if problem is None and name == RESIDUAL:
                problem = residual_problem(value, 2 * own[CODES].shape[-1] - buffer.shape[0])
            problems += [] if problem is None else [f"{prefix}{name}: {problem}"]
    return problems


def check_buffers(
    format: WeightFormat,
    held: Mapping[str, Tensor | None],
    shape: tuple[int, ...],
    num_amax: int,
    num_residual: int = 0,
) -> None:
    """Raise ValueError unless the buffers that other code has set fit a weight of this shape in memory."""
    wanted = format.new_buffers(shape, num_amax, torch.device("meta"))
    wanted["bias"] = torch.empty(shape[:-1], dtype=torch.float32, device="meta")
    wanted[RESIDUAL] = torch.empty(num_residual, dtype=torch.int32, device="meta")
    for name, expected in wanted.items():
        value = held.get(name)
        problem = None if value is None else buffer_problem(format, name, expected, value)
        if problem is None and value is not None and name == RESIDUAL:
            problem = residual_problem(value, shape[-1] - num_residual)
        if problem is not None:
            raise ValueError(
                f"{name}: {problem}; the buffers of an {format.title} weight keep their dtypes, so load them "
                "without dtype="
            )


def buffer_problem(format: WeightFormat, name: str, buffer: Tensor, value: Any) -> str | None:
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
    return format.problem(name, value)
