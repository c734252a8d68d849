"""The gradient of the input of fp4gemm.nn.Linear, whose weight is frozen: what adapters train through."""

from __future__ import annotations

import operator
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks
from .._transforms import refuse_transform
from ..ops import operators
from ..ops.linear import LinearCall
from ._weight import WeightModule, version

InputGradient = Literal["dequantized", "quantized"]
INPUT_GRADIENTS = get_args(InputGradient)

# Codes, scales and amax of Q(W^T), (k, n); all None where backward makes them.
Transposed = tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]


def needs_gradient(call: LinearCall) -> bool:
    """Return whether autograd has to record the call."""
    return torch.is_grad_enabled() and (call.x.requires_grad or (call.c is not None and call.c.requires_grad))


def linear(call: LinearCall, how: InputGradient, k: int, transposed: Transposed) -> Tensor:
    """The operator ``linear``, recorded for autograd: gradients flow to x and to c, and to nothing else.

    With dy (..., n) the gradient of the result, in its dtype, and W the stored weight::

        "dequantized"   dx = dy @ W            W rounded to the dtype of dy, the product by torch.matmul
        "quantized"     dx = Q(dy) @ Q(W^T)^T  one amax for each row of dy and of W^T, as the operator defines
        dc = dy

    The quantization of x in forward is passed straight through: its derivative counts as 1, as if forward
    had multiplied x itself. Nothing but references to the weight is saved for backward, which allocates W, or
    Q(W^T) if ``transposed`` does not have it, while it runs. A second derivative is refused.

    Raises:
        NotImplementedError: x or c belongs to torch.func.grad or a relative of it.
        RuntimeError: the weight was made in inference mode. Backward raises it if the weight has been written
            in between, or for a second derivative.
    """
    for name, value in (("x", call.x), ("c", call.c)):
        if value is not None:
            refuse_transform(name, value)
    if not torch.compiler.is_compiling() and call.weight.is_inference():
        raise RuntimeError(
            "weight: was made in inference mode, must not be where x requires grad; load the model outside "
            "of torch.inference_mode()"
        )
    result: Tensor = _Linear.apply(how, k, *transposed, *call)
    return result


def transpose(
    weight: Tensor, scales: Tensor | None, amax: Tensor, e4m3_max: int, rows: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax of Q(W^T), (k, n), of the weight as the operator ``linear`` has it."""
    dense = _dense(weight, scales, amax, e4m3_max, rows, k, torch.float32)
    made: tuple[Tensor, Tensor, Tensor] = operators.quantize(dense, None, True, axis=0)
    return made


def _dense(
    weight: Tensor,
    scales: Tensor | None,
    amax: Tensor,
    e4m3_max: int,
    rows: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """W (n, k), dequantized."""
    codes = weight
    if scales is None:
        codes, scales = operators.unprepack(weight, rows, k)
    dense: Tensor = operators.dequantize(codes, scales, amax, e4m3_max, dtype)
    return dense


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: InputGradient,
        k: int,
        t_codes: Tensor | None,
        t_scales: Tensor | None,
        t_amax: Tensor | None,
        *call: Any,
    ) -> Tensor:
        named = LinearCall(*call)
        weight = (named.weight, named.weight_scales, named.weight_amax)
        ctx.save_for_backward(*(weight if t_codes is None else (t_codes, t_scales, t_amax)))
        ctx.is_transposed = t_codes is not None
        ctx.dtype = named.x.dtype
        ctx.how, ctx.k, ctx.rows, ctx.e4m3_max = how, k, named.weight_rows, named.weight_e4m3_max
        ctx.place_of_c = 5 + LinearCall._fields.index("c")
        y: Tensor = operators.linear(*call)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * (5 + len(LinearCall._fields))
        if ctx.needs_input_grad[ctx.place_of_c]:
            gradients[ctx.place_of_c] = dy
        if ctx.needs_input_grad[5]:
            weight, scales, amax = ctx.saved_tensors
            # The dtype of dy is that of the result, under autocast too.
            with torch.autocast(dy.device.type, enabled=False):
                if ctx.how == "dequantized":
                    w = _dense(weight, scales, amax, ctx.e4m3_max, ctx.rows, ctx.k, dy.dtype)
                    dx = dy @ w
                else:
                    if not ctx.is_transposed:
                        weight, scales, amax = transpose(weight, scales, amax, ctx.e4m3_max, ctx.rows, ctx.k)
                    dx = operators.linear(dy.contiguous(), weight, scales, amax)
            gradients[5] = dx.to(ctx.dtype)
        return tuple(gradients)


class DifferentiableLayer(WeightModule):
    """A WeightModule of one matrix whose product autograd can record."""

    _input_gradient: InputGradient = "dequantized"
    # What the copy for input_gradient "quantized" was made of, and the copy.
    _transposed: tuple[tuple[Any, ...], Transposed] | None = None

    def _recorded(self, call: LinearCall) -> Tensor:
        """The product for autograd, with the copy of the weight that its backward multiplies by."""
        how, k = self._input_gradient, self.in_features
        if how == "dequantized" or not call.x.requires_grad or torch.compiler.is_compiling():
            return linear(call, how, k, (None, None, None))
        parts = (call.weight, call.weight_scales, call.weight_amax)
        written = (*map(version, parts), call.weight_e4m3_max)
        held = self._transposed
        if held is None or held[0][3:] != written or any(map(operator.is_not, held[0][:3], parts)):
            with torch.inference_mode(False), torch.no_grad():
                made = transpose(*parts, call.weight_e4m3_max, call.weight_rows, k)
            held = self._transposed = ((*parts, *written), made)
        return linear(call, how, k, held[1])

    @property
    def input_gradient(self) -> InputGradient:
        """How backward multiplies dy by the stored weight W: an attribute that is set, not part of the state.

        "dequantized": ``dx = dy @ W``, with W dequantized to the dtype of x while backward runs. "quantized":
        ``dx = Q(dy) @ Q(W^T)^T`` on the kernels of NVFP4, for an out_features that is a multiple of 32; the
        first forward that needs it makes Q(W^T), 0.5625 bytes an element, and keeps it until the weight
        changes. Under torch.compile backward makes it each time. Setting raises ValueError.
        """
        return self._input_gradient

    @input_gradient.setter
    def input_gradient(self, value: InputGradient) -> None:
        _checks.is_one_of("input_gradient", value, INPUT_GRADIENTS)
        if value == "quantized" and self.out_features % _checks.K_STEP_MM:
            raise ValueError(
                f"input_gradient: got 'quantized' with out_features {self.out_features}, must be "
                f"'dequantized' unless out_features is a multiple of {_checks.K_STEP_MM}"
            )
        self._input_gradient, self._transposed = value, None

    def _check_gradient(self, name: str, x: Tensor) -> None:
        if self._epilogue():
            _checks.no_grad(name, x, "a layer with an activation in its epilogue")

    def _epilogue(self) -> int:
        """The number of the activation in the epilogue; layers that have one override this."""
        return 0
