"""The values of the options of a quantized Linear, and the checks of the weights and biases it is given."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import _checks
from ..containers.decoded import DecodedTensor
from ..containers.fp8 import FP8Tensor
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import options as option_checks
from ..ops.parts import OperandParts
from ..recipe import (
    INPUTS,
    LAYER_ACTIVATIONS,
    USES_DATA,
    WEIGHT_SCALINGS,
    DataFree,
    LayerActivations,
    Quantizer,
    WeightScaling,
    as_quantizer,
    checked_activations,
    checked_recipe,
)
from ._formats import FORMATS, WeightFormat

CheckFinite = Literal["off", "raise"]
CHECKS_OF_FINITE = get_args(CheckFinite)
InputGradient = Literal["dequantized", "quantized"]  # of an attribute of Linear and Experts
INPUT_GRADIENTS = get_args(InputGradient)
OUT_STEP = 8  # n: an output row of bf16 or fp16 is then a multiple of 16 bytes


class Invariant:
    """The attribute ``batch_invariant`` of layers that multiply."""

    _batch_invariant = False

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a token do not depend on the other tokens of a call, as of :func:`fp4gemm.mm`.

        An attribute that is set, not part of the state. Setting raises TypeError for anything but a bool.
        """
        return self._batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, value: bool) -> None:
        _checks.is_bool("batch_invariant", value)
        self._batch_invariant = value


def check_options(
    activations: object, weight_scaling: object, check_finite: object, use_fast_accum: object = False
) -> Any:
    """Return the name by which INPUTS has the activations; TypeError or ValueError for a wrong value."""
    known = checked_activations(activations, LAYER_ACTIVATIONS)
    _checks.is_one_of("weight_scaling", weight_scaling, WEIGHT_SCALINGS)
    if weight_scaling != "row" and INPUTS[known].weights != "nvfp4":
        raise ValueError(
            f"weight_scaling: got {weight_scaling!r}, must be 'row', the default, with activations "
            f"{known!r}, whose weights have no amax"
        )
    _checks.is_one_of("check_finite", check_finite, CHECKS_OF_FINITE)
    check_fast_accum(use_fast_accum, known)
    return known


def with_recipe(
    recipe: object,
    activations: LayerActivations,
    weight_scaling: WeightScaling,
    method: DataFree | Quantizer | None,
) -> tuple[Any, Quantizer]:
    """The activations and the quantizer of a recipe, or of the options that stand for one where it is None.

    A recipe whose method needs statistics is passed as a Quantizer, with them; it then is in ``method`` too.
    """
    if recipe is None:
        return activations, as_quantizer(method, weight_scaling, activations)
    known = checked_recipe(recipe)
    if isinstance(method, Quantizer):
        return known.activations, method
    known.check_absent(
        activations=(activations, "per-token"), weight_scaling=(weight_scaling, "row"), method=(method, None)
    )
    if known.method in USES_DATA:
        raise ValueError(f"recipe: its method is {known.method!r}, must be one that needs no statistics")
    return known.activations, Quantizer(known)


def check_fast_accum(use_fast_accum: object, activations: str) -> None:
    """Raise unless use_fast_accum is a bool, and False with activations whose sums are always in float32."""
    _checks.is_bool("use_fast_accum", use_fast_accum)
    if use_fast_accum and INPUTS[activations].tokens != "fp8":
        raise ValueError(
            f"use_fast_accum: got True with activations {activations!r}, must be False unless they are 'fp8'"
        )


def k_step(activations: str) -> int:
    """What k of a product with this kind of tokens is a multiple of."""
    return _checks.FP8_STEP if INPUTS[activations].tokens == "fp8" else _checks.K_STEP_MM


def check_linear(linear: object, activations: str) -> None:
    """Raise TypeError or ValueError, with the reason, for a layer that from_float cannot turn into NVFP4."""
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"linear: got {_checks.describe(linear)}, must be a torch.nn.Linear")
    if is_lazy(linear.weight):
        raise ValueError("linear: weight is not initialised yet, must be; run the model once")
    _checks.is_multiple("linear", "in_features", linear.in_features, k_step(activations))
    _checks.is_multiple("linear", "out_features", linear.out_features, OUT_STEP)
    check_float_weight("linear.weight", linear.weight, (linear.out_features, linear.in_features))
    if linear.bias is not None:
        _checks.has_dtype("linear.bias", linear.bias, _checks.FLOAT_DTYPES)
        num_nan = 0 if linear.bias.is_meta else int(linear.bias.detach().isnan().sum())
        if num_nan:  # -inf masks an output and is kept
            raise ValueError(f"linear.bias: {num_nan} values are NaN, must all be numbers")


def check_residual_channels(number: int, k: int, activations: str) -> None:
    """Raise ValueError unless a layer with these activations may have so many residual channels."""
    if INPUTS[activations].tokens != "nvfp4":
        raise ValueError(
            f"residual_channels: got {number} channels with activations {activations!r}, must be none unless "
            "they are 'per-token' or 'per-tensor'"
        )
    option_checks.check_num_residual("residual_channels", number, k)


def check_channels(value: object, k: int, activations: str, device: torch.device) -> None:
    """Raise TypeError or ValueError unless these are residual channels of such a layer. Synchronises."""
    channels = _checks.exact_vector("residual_channels", value, None, torch.int32, device, "weight")
    check_residual_channels(channels.shape[0], k, activations)
    if _checks.has_memory(channels):
        option_checks.residual_values("residual_channels", channels, k)


def check_float_weight(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless a weight can be quantized. Synchronises."""
    _checks.is_tensor(name, weight)
    _checks.has_dtype(name, weight, _checks.FLOAT_DTYPES)
    _checks.has_shape(name, weight, shape)
    if not weight.is_meta:
        num_bad = num_not_finite(weight.detach())
        if num_bad:
            raise ValueError(f"{name}: {num_bad} values are NaN or infinite, must all be finite")


def check_bias(bias: object, *shape: int, device: torch.device, name: str = "bias") -> Tensor:
    """Return the bias; raise TypeError or ValueError unless it is a float tensor of the given shape."""
    x = _checks.is_tensor(name, bias)
    _checks.has_dtype(name, x, _checks.FLOAT_DTYPES)
    _checks.has_shape(name, x, shape)
    _checks.same_device(name, x, device, "weight")
    return x


def refuse_quantized_gradient(value: str, format: str) -> None:
    """Raise ValueError for input_gradient "quantized" of a weight that is not NVFP4."""
    if value == "quantized" and format != "nvfp4":
        raise ValueError(
            f"input_gradient: got 'quantized', must be 'dequantized' of a weight in {FORMATS[format].title}"  # type: ignore[index]
        )


def check_weight_for(weight: object, format: WeightFormat, activations: str, name: str = "weight") -> None:
    """Raise ValueError unless a weight of this format is multiplied under these activations."""
    wanted = FORMATS[INPUTS[activations].weights]
    if format is not wanted:
        raise ValueError(
            f"{name}: got {_checks.describe(weight)}, must be an {wanted.container.__name__} with "
            f"activations {activations!r}"
        )


def num_not_finite(x: Tensor) -> int:
    """How many elements are NaN or infinite. Synchronises."""
    return int((~torch.isfinite(x)).sum())


def refuse_not_finite(x: Tensor, layer: torch.nn.Module) -> None:
    """Raise ValueError if the input of a layer with check_finite="raise" has a NaN or an infinity.

    Synchronises, so it raises NotImplementedError while a graph is traced or captured.
    """
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise NotImplementedError(
            "check_finite: is 'raise', must be 'off' while a graph is traced or captured, since looking "
            "at the values of x synchronises"
        )
    num_bad = 0 if x.is_meta else num_not_finite(x)
    if num_bad:
        raise ValueError(
            f"x: {num_bad} of {x.numel()} values are NaN or infinite, must all be finite "
            f"(check_finite='raise' of {layer})"
        )


def shared_input(
    x: NVFP4Tensor | DecodedTensor | FP8Tensor,
    k: int,
    device: torch.device,
    activations: str,
    num_residual: int = 0,
) -> OperandParts:
    """The parts of an x that was quantized before; its k has the columns of residual channels.

    Raises:
        TypeError, ValueError: unless x is a plain matrix (m, k) on the device of a layer that quantizes.
    """
    tokens = INPUTS[activations].tokens
    if (tokens == "fp8") is not isinstance(x, FP8Tensor) or tokens in ("16-bit", "mxfp8"):
        wanted = {
            "16-bit": "a bfloat16 or float16 tensor",
            "fp8": "a float tensor or an fp4gemm.FP8Tensor",
            "mxfp8": "a float tensor",
            "nvfp4": "a float tensor, an fp4gemm.NVFP4Tensor or an fp4gemm.DecodedTensor",
        }[tokens]
        raise TypeError(f"x: got {_checks.describe(x)}, must be {wanted} with activations {activations!r}")
    if x.offs is not None:
        raise ValueError(f"x: has {x.offs.shape[0]} groups (offs), must have none")
    if x.ndim != 2 or x.shape[1] != k:
        more = f" + {num_residual} residual channels" if num_residual else ""
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (m, {k}), {k} = in_features{more}")
    if not isinstance(x, FP8Tensor) and x.hadamard_signs is not None:
        raise ValueError(f"x: was rotated (hadamard_signs {x.hadamard_signs:#06x}), must not be")
    _checks.same_device("x", x.amax, device, "weight")
    return x._operand_parts()
