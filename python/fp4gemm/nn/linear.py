"""fp4gemm.nn.Linear: torch.nn.Linear with its weight held in NVFP4 and its input quantized on the fly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import _checks
from ..gemm import mm
from ..quantize import quantize
from ..tensor import NVFP4Tensor
from ._state import BITS, EXTRA_STATE, WEIGHT_BUFFERS, checkpoint_problems, extra_state_problem, keep_dtype

OUT_STEP = 8  # n: an output row of bf16 or fp16 is then a multiple of 16 bytes
SCALINGS = ("row", "tensor")


class Linear(torch.nn.Module):
    """``y = Q(x) @ Q(W).T + bias``, with Q the NVFP4 cast: a drop-in for torch.nn.Linear, forward only.

    The weight is quantized once and kept as buffers; the input is quantized in every call, so no calibration
    is needed. All amax factors are applied by the GEMM's epilogue in fp32, then the bias is added in fp32,
    then the result is rounded once to the dtype of the input. Does not synchronise. Definition: the NVFP4
    cast and GEMM of TransformerEngine, as ``fp4gemm.quantize`` and ``fp4gemm.mm`` document them.

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
            others nothing; "tensor" gives all of them one.
        weight_scaling: "row" gives each output channel (row of W) its own amax, "tensor" one to the whole
            weight. "row" is the default since it is free: one fp32 number a channel, which the epilogue
            multiplies anyway.

    Buffers:
        weight_codes: uint8 (n, k/2), packed e2m1, low nibble = even k.
        weight_scales: float8_e4m3fn (ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero.
        weight_amax: float32 (n,) or (1,).
        bias: float32 (n,), or None.
        They keep these dtypes under ``.half()``, ``.bfloat16()``, ``.to(dtype)``: they are NVFP4 whatever the
        model is. ``state_dict`` also holds ``_extra_state``, int32 (1,): the e4m3 bound (448 or 256) of the
        scales.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    in_features: int
    out_features: int
    e4m3_max: int
    weight_codes: Tensor
    weight_scales: Tensor
    weight_amax: Tensor
    bias: Tensor | None

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
        _checks.is_one_of("activation_scaling", activation_scaling, SCALINGS)
        _checks.is_one_of("weight_scaling", weight_scaling, SCALINGS)
        super().__init__()
        where = None if device is None else _checks.as_device("device", device)
        n, k = out_features, in_features
        self.in_features, self.out_features = k, n
        self.activation_scaling = activation_scaling
        self.e4m3_max = max(_checks.E4M3_BOUNDS)
        self.register_buffer("weight_codes", torch.empty(n, k // 2, dtype=torch.uint8, device=where))
        scale_shape = _checks.padded_scale_shape(n, k)
        self.register_buffer(
            "weight_scales", torch.empty(scale_shape, dtype=torch.float8_e4m3fn, device=where)
        )
        num_amax = n if weight_scaling == "row" else 1
        self.register_buffer("weight_amax", torch.empty(num_amax, dtype=torch.float32, device=where))
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

    def reset_parameters(self) -> None:
        """Forget the weight: zeros everywhere, and ``forward`` raises until one is loaded."""
        for buffer in self._own_buffers().values():
            buffer.view(BITS[buffer.dtype]).zero_()
        self._has_weight = False

    @property
    def weight_scaling(self) -> str:
        """ "row" or "tensor": what weight_amax holds one number for."""
        return "tensor" if self.weight_amax.numel() == 1 else "row"

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight (n, k) as the library's own container, over this layer's buffers (no copy)."""
        return NVFP4Tensor._trusted(self.weight_codes, self.weight_scales, self.weight_amax, self.e4m3_max)

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``W[n,k] = code * block scale * amax / (6 * e4m3_max)`` as a dense (n, k) tensor of ``dtype``."""
        self._require_weight()
        return self.weight.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``Q(x) @ Q(W).T + bias``.

        Args:
            x: bfloat16, float16 or float32 (..., k), any leading dimensions including none; strides are free.

        Returns:
            (..., n), dtype of x. Does not synchronise.

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
        _checks.same_device("x", x, self.weight_codes.device, "weight")
        rows = quantize(_dense_rows(x.reshape(-1, k)), scaling=self.activation_scaling)
        y = mm(rows, self.weight, bias=self.bias, out_dtype=x.dtype)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation_scaling={self.activation_scaling!r}, "
            f"weight_scaling={self.weight_scaling!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # torch (2.13) writes float8 storages with plain pickle but cannot read them back; bytes it can.
        scales = self.weight_scales.view(torch.uint8)
        return {**self.__dict__, "_buffers": {**self._buffers, "weight_scales": scales}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers["weight_scales"] = state["_buffers"]["weight_scales"].view(torch.float8_e4m3fn)

    # A tensor, because torch.load(weights_only=True) and safetensors take tensors only.
    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.e4m3_max], dtype=torch.int32)

    def set_extra_state(self, state: Any) -> None:
        problem = extra_state_problem(state)
        if problem is not None:
            raise ValueError(f"{EXTRA_STATE}: {problem}")
        self.e4m3_max = int(state.item())

    def _own_buffers(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in WEIGHT_BUFFERS}
        return own if self.bias is None else {**own, "bias": self.bias}

    def _require_weight(self) -> None:
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an fp4gemm.nn.Linear, "
                "or make the layer with Linear.from_float or Linear.from_quantized"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """Module.to, .half, .cuda, .to_empty and the like: places change, the NVFP4 dtypes do not."""
        own = {id(buffer) for buffer in self._own_buffers().values()}
        was_meta = self.weight_codes.is_meta
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in own else fn(t), recurse)
        if was_meta and not self.weight_codes.is_meta:
            self._has_weight = False  # to_empty: memory without contents
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
        problems = checkpoint_problems(self._own_buffers(), state_dict, prefix)
        if problems:  # all or nothing: codes never meet the scales of another weight
            error_msgs.extend(problems)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + WEIGHT_BUFFERS[0] not in state_dict:
            return
        for name, buffer in self._own_buffers().items():
            # load_state_dict(assign=True) takes tensors as they lie in a mapped file.
            if type(buffer) is Tensor and not buffer.is_meta and buffer.data_ptr() % _checks.ALIGN_BYTES:
                setattr(self, name, buffer.clone())
        self._has_weight = not self.weight_codes.is_meta or bool(
            local_metadata.get("assign_to_params_buffers")
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
