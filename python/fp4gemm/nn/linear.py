"""fp4gemm.nn.Linear: torch.nn.Linear with its weight held in NVFP4 and its input quantized on the fly."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, support
from .._operands import Left
from ..containers.nvfp4 import NVFP4Tensor
from ..gemm import mm
from ..quantize import quantize
from ._inputs import (
    OUT_STEP,
    ActivationScaling,
    CheckFinite,
    WeightScaling,
    check_bias,
    check_linear,
    check_options,
    check_quantized_weight,
    refuse_not_finite,
)
from ._weight import _EXCHANGE, WeightModule


class Linear(WeightModule):
    """``y = Q(x) @ Q(W).T + bias``, with Q the NVFP4 cast: a drop-in for torch.nn.Linear, forward only.

    The weight is quantized once and kept as buffers; the input is quantized in every call, so no calibration
    is needed. The epilogue of the GEMM applies all amax factors in fp32, adds the bias in fp32, and rounds
    once to the dtype of the input. Definition: the NVFP4 cast and GEMM of TransformerEngine, as
    :func:`fp4gemm.quantize` and :func:`fp4gemm.mm` document them.

    On compute capability 9.0 the first ``forward`` that is neither traced nor captured prepacks the weight
    (:func:`fp4gemm.prepack`), which synchronises once. From then on the layer holds that form alone, as large
    as the other. A layer that is traced or captured before that is not prepacked by itself: call
    :meth:`prepack` first. Several threads may run the layer, each on a stream of its own. ``state_dict``,
    ``weight``, pickles, copies and moves to another device still have codes and scales, as
    :func:`fp4gemm.unprepack` gives them. ``weight_codes`` and ``weight_scales`` are then copies, so a new
    weight comes in by ``load_state_dict``, which writes the prepacked form in place, or by assignment.

    A new layer has no weight: its buffers are zeros, and ``forward`` raises until ``load_state_dict`` or a
    loader of accelerate has brought one. Usually a layer comes from ``Linear.from_float`` or
    ``quantize_model``. ``layer.weight = w`` of an NVFP4Tensor shares its memory; a float tensor (n, k) is
    quantized.

    NaN and infinity: a NaN in x has no effect on the amax and is quantized to +6 times its block scale, so
    that it does not show in y. An infinite x makes the amax of its row (or of x) infinite, and those rows of
    y become infinite or NaN. ``check_finite="raise"`` finds both.

    Args:
        in_features: k, elements of an input row; a multiple of 32.
        out_features: n, elements of an output row; a multiple of 8.
        bias: whether a bias of shape (n,) is added.
        device: where the buffers are made.
        dtype: ``weight.dtype``, the dtype of the float weight that this one stands for: bfloat16, float16 or
            float32; None is torch's default dtype. Model code reads it. No buffer has it, and the output has
            the dtype of each input, under autocast too.
        activation_scaling: "row" gives each token (row of x) its own amax, so that an outlier token does not
            cost the others precision; "tensor" gives all of them one. "none": x is not quantized (W4A16) and
            must be bfloat16 or float16; devices with FP4 tensor cores refuse it.
        weight_scaling: "row" gives each output channel (row of W) its own amax, "tensor" one to the whole
            weight. "row" is the default, since one fp32 number a channel costs nothing: the epilogue
            multiplies by it anyway.
        check_finite: "off", or "raise" for debugging: ``forward`` raises ValueError if x has a NaN or an
            infinity. That reads x once more and synchronises in every call. While torch.compile traces with
            ``fullgraph=True`` or a CUDA graph is captured, "raise" is refused; without ``fullgraph`` the
            layer runs outside of the compiled graph.

    Buffers:
        weight_codes: uint8 (n, k/2), packed e2m1, low nibble = even k.
        weight_scales: float8_e4m3fn (ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero.
        weight_amax: float32 (n,) or (1,).
        weight_e4m3_max: int32 (1,), the bound of the scales, 448 or 256. A checkpoint without it means 448.
        weight_prepacked: uint8, in place of codes and scales once they are prepacked; not in a state_dict.
        bias: float32 (n,), or None.
        They keep these dtypes under ``.half()``, ``.bfloat16()``, ``.to(dtype)``, which change
        ``weight.dtype`` alone.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    check_finite: CheckFinite = "off"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation_scaling: ActivationScaling = "row",
        weight_scaling: WeightScaling = "row",
        check_finite: CheckFinite = "off",
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
        check_options(activation_scaling, weight_scaling, check_finite)
        super().__init__()
        default = torch.get_default_dtype() if dtype is None else dtype
        self.dtype = default if default in _checks.FLOAT_DTYPES else torch.float32
        where = None if device is None else _checks.as_device("device", device)
        n, k = out_features, in_features
        self.in_features, self.out_features = k, n
        self.activation_scaling = activation_scaling
        self.check_finite = check_finite
        self._has_weight = False
        self._register_weight(n if weight_scaling == "row" else 1, where)
        self.register_buffer("bias", torch.empty(n, dtype=torch.float32, device=where) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_float(
        cls,
        linear: torch.nn.Linear,
        *,
        activation_scaling: ActivationScaling = "row",
        weight_scaling: WeightScaling = "row",
        check_finite: CheckFinite = "off",
    ) -> Linear:
        """Quantize a float layer: W -> Q(W) on its device, bias -> float32. The float layer is not changed.

        Args:
            linear: a torch.nn.Linear whose weight (n, k) is bfloat16, float16 or float32; k a multiple of 32,
                n of 8.
            activation_scaling, weight_scaling, check_finite: as in the class.

        Raises:
            TypeError, ValueError: for a layer that does not fit, naming what is wrong; also for weights that
                are NaN or infinite, which NVFP4 cannot hold.

        The weight is detached: no gradient flows to it. Synchronises once, to look for weights that are not
        finite.
        """
        check_options(activation_scaling, weight_scaling, check_finite)
        check_linear(linear)
        # No inference tensors, which load_state_dict could not write outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            weight = linear.weight.detach()
            quantized = quantize(weight, scaling=weight_scaling).to(weight.dtype)
            layer = cls.from_quantized(
                quantized, linear.bias, activation_scaling=activation_scaling, check_finite=check_finite
            )
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        weight: NVFP4Tensor,
        bias: Tensor | None = None,
        *,
        activation_scaling: ActivationScaling = "row",
        check_finite: CheckFinite = "off",
    ) -> Linear:
        """A layer around an NVFP4 weight (n, k), whose memory it shares, and a float bias (n,), copied.

        ``dtype`` of the layer is ``weight.dtype``.

        Raises:
            TypeError, ValueError: as for the class; also for a weight with groups or a rotation, and for a
                bias of another dtype, shape or device.
        """
        weight = check_quantized_weight(weight)
        n, k = weight.shape
        if bias is not None:
            bias = check_bias(bias, n, device=weight.device)
        layer = cls(
            k,
            n,
            bias is not None,
            device="meta",
            dtype=weight.dtype,
            activation_scaling=activation_scaling,
            check_finite=check_finite,
        )
        layer._hold(
            weight_codes=weight.codes,
            weight_scales=weight.scales,
            weight_amax=weight.amax,
            bias=None if bias is None else bias.detach().to(torch.float32, copy=True),
        )
        layer._buffers.setdefault("bias", None)
        layer.e4m3_max = weight.e4m3_max
        layer._has_weight = True
        return layer

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``W[n,k] = code * block scale * amax / (6 * e4m3_max)`` as a dense (n, k) tensor of ``dtype``."""
        self._require_weight()
        if torch.compiler.is_compiling():  # which cannot trace a lock
            return self.weight.dequantize(dtype)
        with _EXCHANGE:
            return self.weight.dequantize(dtype)

    def prepack(self) -> Linear:
        """Hold the weight in prepacked form alone from now on, and return the layer.

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

    def forward(self, x: Tensor) -> Tensor:
        """``Q(x) @ Q(W).T + bias``; with activation_scaling "none" ``x @ Q(W).T + bias``.

        Args:
            x: bfloat16, float16 or (unless it is not quantized) float32 (..., k), any leading dimensions
                including none; strides are free.

        Returns:
            (..., n), dtype of x. Does not synchronise, except when it prepacks the weight, or with
            check_finite="raise".

        Raises:
            TypeError, ValueError: naming x or the size that is wrong; ValueError for a NaN or an infinity
                in x with check_finite="raise".
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
        if self.check_finite != "off":
            self._refuse_not_finite(x)
        is_prepacked, is_traced = self._is_prepacked(), torch.compiler.is_compiling()
        if not is_prepacked and not is_traced:
            is_prepacked = self._prepack_where_it_helps()
        rows = x.reshape(-1, k)
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
        finite = "" if self.check_finite == "off" else f", check_finite={self.check_finite!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation_scaling={self.activation_scaling!r}, "
            f"weight_scaling={self.weight_scaling!r}{finite}"
        )

    def _require_weight(self) -> None:
        if not torch.compiler.is_compiling():
            self._notice()
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an fp4gemm.nn.Linear, "
                "or make the layer with Linear.from_float or Linear.from_quantized"
            )

    def _refuse_not_finite(self, x: Tensor) -> None:
        refuse_not_finite(x, self)
