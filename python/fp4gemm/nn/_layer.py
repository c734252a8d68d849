"""The methods of an NVFP4 weight, one matrix or a stack: prepack, dequantize and update it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import prepack
from ._inputs import check_bias, check_float_weight, check_quantized_weight
from ._saved import SavedWeight
from ._state import BITS, PREPACKED
from ._weight import _EXCHANGE

if TYPE_CHECKING:
    from typing_extensions import Self


class WeightLayer(SavedWeight):
    """A module with the methods that :class:`fp4gemm.nn.Linear` and the weights of Experts share."""

    _public = "Linear"  # the class of fp4gemm.nn that a message names

    def _adopt(self, weight: NVFP4Tensor, bias: Tensor | None) -> Self:
        """Share the memory of ``weight``, copy the bias, and return the layer, which is a new one."""
        self._hold(
            weight_codes=weight.codes,
            weight_scales=weight.scales,
            weight_amax=weight.amax,
            bias=None if bias is None else bias.detach().to(torch.float32, copy=True),
        )
        self._buffers.setdefault("bias", None)
        self.e4m3_max = weight.e4m3_max
        self._has_weight = True
        return self

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``W = code * block scale * amax / (6 * e4m3_max)``, dense (n, k) or (g, n, k) of ``dtype``."""
        self._require_weight()
        if torch.compiler.is_compiling():  # torch.compile cannot trace a lock
            return self.weight.dequantize(dtype)
        with _EXCHANGE:
            return self.weight.dequantize(dtype)

    def prepack(self) -> Self:
        """Replace the codes and block scales by prepacked bytes, and return the layer.

        ``forward`` does that by itself where it helps. On the CPU it only costs time. Synchronises, unless
        the weight is prepacked already.

        Raises:
            RuntimeError: no weight has been loaded yet, or a CUDA graph has been captured that reads the
                weight as it is. NotImplementedError: the device does not read prepacked weights; the text
                says which.
        """
        self._require_weight()
        if self._is_captured:
            raise RuntimeError(
                "weight: its codes and scales are read by a captured CUDA graph; prepack() must come before"
            )
        support.ready_for(self.weight_amax, "mm", ("nvfp4", "prepacked"))
        with _EXCHANGE:
            if not self._is_prepacked():
                self._hold_prepacked()
        return self

    def update_(self, weight: Tensor | NVFP4Tensor, bias: Tensor | None = None) -> Self:
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
                over six for 256.
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
        name, shape, device = names[0], self._shape, self.weight_amax.device
        if device.type == "meta" or self._is_offloaded():
            where = "offloaded" if self._is_offloaded() else "on the meta device"
            raise ValueError(f"{name}: the layer is {where}, must be in memory to be updated")
        parts: dict[str, Tensor] = {}
        if bias is not None:
            if self.bias is None:
                raise ValueError(f"{names[1]}: got {_checks.describe(bias)}, must be None: there is no bias")
            checked = check_bias(bias, *shape[:-1], device=device, name=names[1])
            parts["bias"] = checked.detach().to(torch.float32)
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(weight, Tensor):
                check_float_weight(name, weight, shape)
                _checks.same_device(name, weight, device, "the layer")
                weight = self._requantized(weight)
            if not isinstance(weight, NVFP4Tensor):
                raise TypeError(
                    f"{name}: got {_checks.describe(weight)}, must be an NVFP4Tensor or a float tensor"
                )
            new = check_quantized_weight(weight, name, len(shape))
            if tuple(new.shape) != shape:
                raise ValueError(f"{name}: shape is {tuple(new.shape)}, must be {shape}")
            _checks.same_device(name, new.codes, device, "the layer")
            if new.e4m3_max != self._e4m3_max:
                raise ValueError(
                    f"{name}: e4m3_max is {new.e4m3_max}, must be {self._e4m3_max} as of the layer; assign "
                    "the attribute `weight`, before a CUDA graph is captured, to change it"
                )
            amax = new.amax
            if amax.shape != self.weight_amax.shape:
                if amax.shape[-1] != 1:
                    raise ValueError(
                        f"{name}: amax has shape {tuple(amax.shape)}, must have "
                        f"{tuple(self.weight_amax.shape)}, since weight_scaling of the layer is 'tensor'"
                    )
                amax = amax.expand(self.weight_amax.shape)
            parts["weight_amax"] = amax
            if not self._is_prepacked():
                return {**parts, "weight_codes": new.codes, "weight_scales": new.scales}
            return {**parts, PREPACKED: prepack(new).data}

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

    def _require_weight(self) -> None:
        if not torch.compiler.is_compiling():
            self._notice()
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an "
                f"fp4gemm.nn.{self._public}, or make it with {self._public}.from_float or "
                f"{self._public}.from_quantized"
            )
