"""fp4gemm.nn.Linear: torch.nn.Linear with its weight held in NVFP4 and its input quantized on the fly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import _checks, support
from .._operands import Left
from ..containers.nvfp4 import NVFP4Tensor
from ..gemm import mm
from ..quantize import quantize
from ._state import EXTRA_STATE, extra_state_problem
from ._weight import WeightModule

OUT_STEP = 8  # n: an output row of bf16 or fp16 is then a multiple of 16 bytes
SCALINGS = ("row", "tensor")
ACTIVATION_SCALINGS = (*SCALINGS, "none")


class Linear(WeightModule):
    """``y = Q(x) @ Q(W).T + bias``, with Q the NVFP4 cast: a drop-in for torch.nn.Linear, forward only.

    The weight is quantized once and kept as buffers; the input is quantized in every call, so no calibration
    is needed. All amax factors are applied by the GEMM's epilogue in fp32, then the bias is added in fp32,
    then the result is rounded once to the dtype of the input. Definition: the NVFP4 cast and GEMM of
    TransformerEngine, as ``fp4gemm.quantize`` and ``fp4gemm.mm`` document them.

    On compute capability 9.0 the first ``forward`` that is neither traced nor captured prepacks the weight
    (``fp4gemm.prepack``), which synchronises once, and from then on the layer holds that form alone, as
    large as the other. A layer that is traced or captured before is not prepacked by itself: call
    :meth:`prepack` ahead of that. ``state_dict``, ``weight``, pickles, copies and moves to another device
    still have codes and scales, as ``fp4gemm.unprepack`` gives them; ``weight_codes`` and ``weight_scales``
    are then copies, so a new weight comes in by ``load_state_dict``, which writes the prepacked form in
    place.

    A new layer has no weight: its buffers are zeros, and ``forward`` raises until ``load_state_dict`` has
    brought one. Usually a layer comes from ``Linear.from_float`` or ``quantize_model`` instead.

    Args:
        in_features: k, elements of an input row; a multiple of 32.
        out_features: n, elements of an output row; a multiple of 8.
        bias: whether a bias of shape (n,) is added.
        device: where the buffers are made.
        dtype: the dtype the input is going to have (bfloat16, float16 or float32). Checked, for
            torch.nn.Linear's signature; nothing is stored in it, because the output takes the dtype of each
            input, under autocast too.
        activation_scaling: "row" gives each token (row of x) its own amax, so that an outlier token costs the
            others nothing; "tensor" gives all of them one. "none": x is not quantized (W4A16), must be
            bfloat16 or float16, and devices with FP4 tensor cores refuse it.
        weight_scaling: "row" gives each output channel (row of W) its own amax, "tensor" one to the whole
            weight. "row" is the default since it is free: one fp32 number a channel, which the epilogue
            multiplies anyway.

    Buffers:
        weight_codes: uint8 (n, k/2), packed e2m1, low nibble = even k.
        weight_scales: float8_e4m3fn (ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero.
        weight_amax: float32 (n,) or (1,).
        weight_prepacked: uint8, in place of codes and scales once they are prepacked; not in a state_dict.
        bias: float32 (n,), or None.
        They keep these dtypes under ``.half()``, ``.bfloat16()``, ``.to(dtype)``: they are NVFP4 whatever the
        model is. ``state_dict`` also holds ``_extra_state``, int32 (1,): the e4m3 bound (448 or 256) of the
        scales.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation_scaling: str = "row",
        weight_scaling: str = "row",
    ) -> None:
        for name, what, size, step in (
            ("in_features", "k", in_features, _checks.K_STEP_MM),
            ("out_features", "n", out_features, OUT_STEP),
        ):
            _checks.is_int(name, size, 1)
            _checks.is_multiple(name, what, size, step)
        if not isinstance(bias, bool):
            raise TypeError(f"bias: got {_checks.describe(bias)}, must be a bool")
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        _checks.is_one_of("activation_scaling", activation_scaling, ACTIVATION_SCALINGS)
        _checks.is_one_of("weight_scaling", weight_scaling, SCALINGS)
        super().__init__()
        where = None if device is None else _checks.as_device("device", device)
        n, k = out_features, in_features
        self.in_features, self.out_features = k, n
        self.activation_scaling = activation_scaling
        self.e4m3_max = max(_checks.E4M3_BOUNDS)
        self._register_weight(n if weight_scaling == "row" else 1, where)
        self.register_buffer("bias", torch.empty(n, dtype=torch.float32, device=where) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_float(
        cls, linear: torch.nn.Linear, *, activation_scaling: str = "row", weight_scaling: str = "row"
    ) -> Linear:
        """Quantize a float layer: W -> Q(W) on its device, bias -> float32. The float layer is not changed.

        Args:
            linear: a torch.nn.Linear whose weight (n, k) is bfloat16, float16 or float32; k a multiple of 32,
                n of 8.
            activation_scaling, weight_scaling: as in the class.

        Raises:
            TypeError, ValueError: for a layer that does not fit, naming what is wrong; also for weights that
                are NaN or infinite, which NVFP4 would turn into finite nonsense.

        The weight is detached: this layer learns nothing. Synchronises once, to look for weights that are not
        finite.
        """
        check_linear(linear)
        weight = linear.weight.detach()
        quantized = quantize(_dense_rows(weight), scaling=weight_scaling)
        layer = cls.from_quantized(quantized, linear.bias, activation_scaling=activation_scaling)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls, weight: NVFP4Tensor, bias: Tensor | None = None, *, activation_scaling: str = "row"
    ) -> Linear:
        """A layer around an NVFP4 weight (n, k), which it shares, and a float bias (n,), which it copies.

        Raises as the class does; TypeError or ValueError for a bias of another dtype, shape or device.
        """
        if not isinstance(weight, NVFP4Tensor):
            raise TypeError(f"weight: got {_checks.describe(weight)}, must be an NVFP4Tensor")
        if weight.offs is not None:
            raise ValueError(f"weight: has {weight.offs.shape[0]} groups (offs), must have none")
        if weight.hadamard_signs is not None:
            raise ValueError(
                f"weight: was rotated (hadamard_signs {weight.hadamard_signs:#06x}), must not be: "
                "the layer does not rotate its input"
            )
        n, k = weight.shape
        if bias is not None:
            bias = _checks.is_tensor("bias", bias)
            _checks.has_dtype("bias", bias, _checks.FLOAT_DTYPES)
            _checks.has_shape("bias", bias, (n,))
            _checks.same_device("bias", bias, weight.device, "weight")
        layer = cls(k, n, bias is not None, device="meta", activation_scaling=activation_scaling)
        layer.weight_codes, layer.weight_scales, layer.weight_amax = weight.codes, weight.scales, weight.amax
        layer.e4m3_max = weight.e4m3_max
        layer.bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        layer._has_weight = True
        return layer

    @property
    def weight_scaling(self) -> str:
        """ "row" or "tensor": what weight_amax holds one number for."""
        return "tensor" if self.weight_amax.numel() == 1 else "row"

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``W[n,k] = code * block scale * amax / (6 * e4m3_max)`` as a dense (n, k) tensor of ``dtype``."""
        self._require_weight()
        return self.weight.dequantize(dtype)

    def prepack(self) -> Linear:
        """Hold the weight prepacked alone from now on, and return the layer; it is so already, or becomes so.

        ``forward`` does that by itself where it helps. On the CPU it only costs time. Synchronises.

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
        if not self._is_prepacked():
            self._hold_prepacked()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """``Q(x) @ Q(W).T + bias``; with activation_scaling "none" ``x @ Q(W).T + bias``.

        Args:
            x: bfloat16, float16 or (unless it is not quantized) float32 (..., k), any leading dimensions
                including none; strides are free.

        Returns:
            (..., n), dtype of x. Does not synchronise, except when it prepacks the weight.

        Raises:
            TypeError, ValueError: naming x or the size that is wrong.
            NotImplementedError: x requires grad while grad mode is on; this layer is forward only.
            RuntimeError: no weight has been loaded yet.
        """
        self._require_weight()
        x = _checks.is_tensor("x", x)
        k = self.in_features
        if x.dim() == 0 or x.shape[-1] != k:
            raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = in_features")
        device = self.weight_amax.device
        _checks.same_device("x", x, device, "weight")
        is_prepacked, is_traced = self._is_prepacked(), torch.compiler.is_compiling()
        if not is_prepacked and not is_traced:
            is_prepacked = self._prepack_where_it_helps()
        rows = _dense_rows(x.reshape(-1, k))
        a: Left
        if self.activation_scaling == "none":
            _checks.has_dtype("x", x, _checks.HALF_DTYPES)
            _checks.no_grad("x", x, "fp4gemm.nn.Linear")
            a = rows.contiguous()
        else:
            # What the kernels there would decode to in every call.
            decoded = is_prepacked or (not is_traced and support.streams_prepacked(device))
            a = quantize(rows, scaling=self.activation_scaling, decoded=decoded)
        weight = self._prepacked() if is_prepacked else self.weight
        y = mm(a, weight, bias=self.bias, out_dtype=x.dtype)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation_scaling={self.activation_scaling!r}, "
            f"weight_scaling={self.weight_scaling!r}"
        )

    # A tensor, because torch.load(weights_only=True) and safetensors take tensors only.
    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.e4m3_max], dtype=torch.int32)

    def set_extra_state(self, state: Any) -> None:
        problem = extra_state_problem(state)
        if problem is not None:
            raise ValueError(f"{EXTRA_STATE}: {problem}")
        self.e4m3_max = int(state.item())

    def _require_weight(self) -> None:
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an fp4gemm.nn.Linear, "
                "or make the layer with Linear.from_float or Linear.from_quantized"
            )


def check_linear(linear: object) -> None:
    """Raise TypeError or ValueError, with the reason, for a layer that from_float cannot turn into NVFP4."""
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"linear: got {_checks.describe(linear)}, must be a torch.nn.Linear")
    if is_lazy(linear.weight):
        raise ValueError("linear: weight is not initialised yet, must be; run the model once")
    _checks.is_multiple("linear", "in_features", linear.in_features, _checks.K_STEP_MM)
    _checks.is_multiple("linear", "out_features", linear.out_features, OUT_STEP)
    _checks.has_dtype("linear.weight", linear.weight, _checks.FLOAT_DTYPES)
    _checks.has_shape("linear.weight", linear.weight, (linear.out_features, linear.in_features))
    if linear.bias is not None:
        _checks.has_dtype("linear.bias", linear.bias, _checks.FLOAT_DTYPES)
    if not linear.weight.is_meta:
        num_bad = int((~torch.isfinite(linear.weight.detach())).sum())
        if num_bad:
            raise ValueError(f"linear.weight: {num_bad} values are NaN or infinite, must all be finite")


def _dense_rows(x: Tensor) -> Tensor:
    """x (m, k) itself, or a copy where the quantizer could not read it in place: any strides are welcome."""
    # A tracer sees no addresses: what may start off the 16-byte steps is copied.
    if torch.compiler.is_compiling() and not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    try:
        _checks.rows_are_aligned("x", x)
    except ValueError:
        return x.clone(memory_format=torch.contiguous_format)
    return x
