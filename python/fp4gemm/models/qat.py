"""Quantization-aware training and distillation: prepare_qat, convert_qat, and the layers between the two.

A student layer has a float32 master weight and the NVFP4 layer that it will become. Each forward rounds the
master weight to the codes of that layer and calls its operator, so that what is trained is what is exported.
With W the master weight, s the block scales and A the outer scale (amax) of the layer, and B its e4m3_max::

    f = fl(fl(s * A) * fl(1 / (6 * B)))        the step of a block, as dequantize has it
    q = e2m1(fl(W / f))                        nearest, ties to the even code, saturating at 6; 0 where f = 0
    y = operator of the layer with the codes q, s and A

s and A stay what the method of the first quantization made them; the master weights and the biases train. The
gradient is that of the product of dequantized operands, passed straight through both roundings::

    dx = dy @ W'        W' = q * f; beside FP8 tokens its block values are rounded to e4m3, as in the product
    dW = dy.T @ x'      x' = x as it was quantized; 0 where |W| > 6 f and the step would make |W| larger
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _changed, _checks, activations, support
from ..containers.nvfp4 import NVFP4Tensor
from ..nn import experts as nn_experts
from ..nn._hooks import accelerate_hook
from ..nn._weight import WeightModule
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..ops import operators
from ..ops.inputs import FP8_ROW, NOT_QUANTIZED, checked_input
from ..ops.linear import LinearCall
from ..ops.parts import OperandParts
from ..quantize import decode, quantize_fp8
from ..recipe import INPUTS
from ..reference.formats import E2M1_MAX, E2M1_VALUES, encode_e2m1, pack, unpack
from ..reference.nvfp4 import folded
from . import moe
from .quantize import quantize_model

__all__ = ["QATExperts", "QATLinear", "convert_qat", "prepare_qat"]

Master = Literal["float", "quantized"]
Model = TypeVar("Model", bound=torch.nn.Module)
MAX_ELEMS = 1 << 26  # elements that are rounded at a time, which bounds the temporary memory
# Of each magnitude of e2m1, the ends between which a number is rounded to it.
LOWEST = (0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
HIGHEST = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
MARGIN = 1 / 32  # the part of the way to such an end that master weights keep away from it at first


def prepare_qat(model: Model, *, master: Master = "float", **options: Any) -> Model:
    """A student of the model: a copy whose linear layers and experts multiply in NVFP4 and can be trained.

    ::

        model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8)).to(x)
        student = fp4gemm.models.prepare_qat(model, activations="per-token")
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
        for _ in range(3):
            loss = (student(x) - model(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        quantized = fp4gemm.models.convert_qat(student)

    The model is quantized first, as :func:`quantize_model` does it with these options; then each layer that
    became NVFP4 gets a float32 master weight. The first forward has the codes, block scales and outer scales
    of that quantization. Scales are fixed from there on; master weights and biases train, and so does every
    other parameter of the copy (embeddings, norms, routers), unless the caller freezes it.
    :mod:`fp4gemm.models.qat` defines forward and backward.

    Args:
        model: a float model, which stays as it is and can be the teacher.
        master: what the master weights are at first. "float": the float weights, each moved into
            the interval that is rounded to the code which the method chose. "quantized": the dequantized
            weights.
        options: keywords of :func:`quantize_model`: method, calibration, activations, include and so on;
            not inplace and fuse.

    Returns:
        The student, with the names of modules and float parameters of the model. Its layers are
        :class:`QATLinear` and :class:`QATExperts`. It is in training mode.

    Raises:
        TypeError, ValueError: naming the argument; also as :func:`quantize_model`. ValueError where no layer
            was quantized, or one is offloaded by accelerate. NotImplementedError with activations "mxfp8".

    Synchronises.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    _checks.is_one_of("master", master, get_args(Master))
    for name in ("inplace", "fuse"):
        if name in options:
            raise ValueError(f"{name}: got {options[name]!r}, must be absent: the student is a plain copy")
    floats = dict(model.named_modules(remove_duplicate=False))
    student = quantize_model(model, inplace=False, **options)
    made: dict[int, torch.nn.Module] = {}
    for name, layer in list(student.named_modules(remove_duplicate=False)):
        if not isinstance(layer, (Linear, Experts)) or isinstance(floats[name], (Linear, Experts)):
            continue  # no layer, or one that was NVFP4 before
        if INPUTS[layer.activations].weights != "nvfp4":
            raise NotImplementedError(
                f"activations: got {layer.activations!r}, must be a value with weights in NVFP4 to be trained"
            )
        if id(layer) not in made:
            if accelerate_hook(layer) is not None:
                raise ValueError(f"model: {name!r} has a hook of accelerate, must have none to be trained")
            made[id(layer)] = _trained(layer, floats[name], master)
        student = _placed(student, name, made[id(layer)])
    if not made:
        raise ValueError("model: no layer was quantized, must be at least one; report=print says why")
    return student.train()


def convert_qat(student: Model) -> Model:
    """Replace every student layer by the NVFP4 layer that it trained, in place, and return the model.

    The codes are those of the master weights as they are now, and block scales, outer scales and options are
    those of :func:`prepare_qat`, so that the layers compute what the student's forward computes; on a CPU
    bit for bit. The model is in evaluation mode afterwards.

    Args:
        student: a model with :class:`QATLinear` or :class:`QATExperts`; one that is such a layer itself is
            returned converted.

    Raises:
        TypeError: student is no module. ValueError: it has no such layer, or master weights or biases are not
            finite; the text names the layer, and nothing is changed. Synchronises.
    """
    if not isinstance(student, torch.nn.Module):
        raise TypeError(f"student: got {_checks.describe(student)}, must be a torch.nn.Module")
    layers = [
        (name, m)
        for name, m in student.named_modules(remove_duplicate=False)
        if isinstance(m, (QATLinear, QATExperts))
    ]
    if not layers:
        raise ValueError("student: has no layer of prepare_qat, must have one")
    for name, layer in layers:
        for parameter_name, parameter in layer.named_parameters():
            num_bad = int((~torch.isfinite(parameter.detach())).sum())
            if num_bad:
                raise ValueError(
                    f"student: {num_bad} values of {f'{name}.{parameter_name}'.lstrip('.')} are NaN or "
                    "infinite, must all be finite"
                )
    made: dict[int, torch.nn.Module] = {}
    for name, layer in layers:
        if id(layer) not in made:
            made[id(layer)] = layer.converted()
        student = cast(Model, _placed(student, name, made[id(layer)]))
    _changed.tell(student)
    return student.eval()


def _placed(model: Any, name: str, module: torch.nn.Module) -> Any:
    """The model with this module under this name; the module itself for the name of the model."""
    if not name:
        return module
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, module)
    return model


def _trained(layer: Linear | Experts, given: torch.nn.Module, master: Master) -> torch.nn.Module:
    """The student layer of a float layer and of what quantize_model made of it."""
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(layer, Linear):
            float_layer = cast(torch.nn.Linear, given)
            return QATLinear(layer, float_layer.weight.detach(), master)
        w13, w2 = moe.as_layers_hold(given)
        return QATExperts(layer, w13, w2, master)


# ---- the layers


class QATLinear(torch.nn.Module):
    """``y = Q(x) @ Q(W).T + bias`` of a float32 master weight W that trains, for :func:`prepare_qat`.

    Forward has the operator, the quantization of x and so the bits of ``layer``, with the codes to which W is
    rounded. :mod:`fp4gemm.models.qat` defines codes and gradients. Backward needs x as it was given and the
    codes, half a byte an element of W.

    Attributes:
        weight: float32 (n, k), a parameter. bias: float32 (n,), a parameter, or None.
        layer: the :class:`fp4gemm.nn.Linear` that :func:`convert_qat` leaves in its place. Forward reads its
            block scales, outer scales and options, and neither its codes nor its bias.
    """

    def __init__(self, layer: Linear, weight: Tensor, master: Master) -> None:
        super().__init__()
        self.layer = layer
        self.weight = torch.nn.Parameter(first_master(weight, layer._nvfp4_weight, master))
        self.bias = _trained_bias(layer)

    @property
    def in_features(self) -> int:
        """k, elements of an input row."""
        return self.layer.in_features

    @property
    def out_features(self) -> int:
        """n, elements of an output row."""
        return self.layer.out_features

    def quantized_weight(self) -> NVFP4Tensor:
        """The weight by which the next forward multiplies. Does not synchronise."""
        return _rounded(self.weight, self.layer)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) of the dtype of x, bfloat16, float16 or float32 (..., k). Does not synchronise.

        Raises:
            TypeError, ValueError: naming x. NotImplementedError: the device has no kernel.
        """
        k = self.layer.in_features
        x = _checks.is_tensor("x", x)
        _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
        if x.dim() == 0 or x.shape[-1] != k:
            raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = in_features")
        _checks.same_device("x", x, self.weight.device, "weight")
        _ready(x, "mm", self.layer.activations)
        result: Tensor = _Product.apply(x, self.weight, self.bias, self.quantized_weight(), self.layer)
        return result

    def converted(self) -> Linear:
        """The NVFP4 layer, with the codes of the present master weight."""
        _write(self.layer, self.weight, self.bias)
        return self.layer

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QATExperts(torch.nn.Module):
    """The experts of a mixture with float32 master weights that train, for :func:`prepare_qat`.

    Forward has the operator and the bits of ``layer``, with the codes to which the master weights are
    rounded. Backward computes the block once more from dequantized operands, expert by expert, in plain
    torch, which synchronises; x, the routing and the codes are all that is saved.

    Attributes:
        w13: float32 (g, n13, d), a parameter; rows of gate and up alternate, as in
            :class:`fp4gemm.nn.Experts`. w2: float32 (g, d, intermediate).
        bias13, bias2: float32 (g, n13) and (g, d), parameters, or None.
        layer: the :class:`fp4gemm.nn.Experts` that :func:`convert_qat` leaves in its place.
    """

    def __init__(self, layer: Experts, w13: Tensor, w2: Tensor, master: Master) -> None:
        super().__init__()
        self.layer = layer
        self.w13 = torch.nn.Parameter(first_master(w13, layer.w13._nvfp4_weight, master))
        self.w2 = torch.nn.Parameter(first_master(w2, layer.w2._nvfp4_weight, master))
        self.bias13, self.bias2 = _trained_bias(layer.w13), _trained_bias(layer.w2)

    def quantized_weights(self) -> tuple[NVFP4Tensor, NVFP4Tensor]:
        """The weights w13 and w2 by which the next forward multiplies. Does not synchronise."""
        return _rounded(self.w13, self.layer.w13), _rounded(self.w2, self.layer.w2)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The weighted sum of the experts that each token names, as of :class:`fp4gemm.nn.Experts`."""
        d, device = self.layer.hidden, self.w13.device
        nn_experts.check_tokens(x, topk_ids, topk_weights, d, device)
        _ready(x, "grouped_mm", self.layer.activations)
        trained = (self.w13, self.bias13, self.w2, self.bias2)
        result: Tensor = _Block.apply(
            x, topk_weights, *trained, topk_ids, *self.quantized_weights(), self.layer
        )
        return result

    def converted(self) -> Experts:
        """The NVFP4 experts, with the codes of the present master weights."""
        _write(self.layer.w13, self.w13, self.bias13)
        _write(self.layer.w2, self.w2, self.bias2)
        return self.layer


def _trained_bias(layer: WeightModule) -> torch.nn.Parameter | None:
    return None if layer.bias is None else torch.nn.Parameter(layer.bias.detach().clone())


def _rounded(weight: Tensor, layer: WeightModule) -> NVFP4Tensor:
    """A master weight, rounded with the scales of a layer."""
    like = layer._nvfp4_weight
    with torch.no_grad():
        codes = nearest_codes(weight.detach(), like)
    return NVFP4Tensor._trusted(codes, like.scales, like.amax, like.e4m3_max)._stamped(like.dtype)


def _write(layer: WeightModule, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer the codes of a master weight, and the bias."""
    with torch.inference_mode(False), torch.no_grad():
        layer.weight = _rounded(weight, layer)  # type: ignore[misc]
        if bias is not None:
            layer._hold(bias=bias.detach().float().clone())


def _ready(x: Tensor, mode: str, kind: str) -> None:
    """Raise NotImplementedError where the device lacks a kernel for products with such activations."""
    tokens = INPUTS[kind].tokens
    if tokens != "16-bit":
        support.ready(x, "quantize")
    of_16_bits = "fp16" if x.dtype is torch.float16 else "bf16"
    format_a = {"nvfp4": "nvfp4", "fp8": "e4m3", "16-bit": of_16_bits}[tokens]
    support.ready_for(x, mode, (format_a, "nvfp4"))


# ---- the master weights and their codes


def nearest_codes(w: Tensor, like: NVFP4Tensor) -> Tensor:
    """The codes (.., n, k/2) to which a master weight is rounded with the scales of an NVFP4 weight."""
    rows, steps = w.reshape(-1, w.shape[-1]), _steps(like)
    codes = torch.empty(like.codes.shape, dtype=torch.uint8, device=w.device)
    flat = codes.view(rows.shape[0], -1)
    for i, j in _chunks(rows):
        step = steps[i:j].unsqueeze(-1)
        ratio = rows[i:j].float().unflatten(-1, (-1, _checks.BLOCK)) / step
        flat[i:j] = pack(encode_e2m1(ratio.masked_fill_(step == 0, 0.0)).flatten(1))
    return codes


def random_codes(w: Tensor, like: NVFP4Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Codes (.., n, k/2) of a float weight with the scales of an NVFP4 weight, rounded up or down at random.

    The mean of the values is the weight, but for elements beyond 6 steps, which become 6 steps, and for those
    within a millionth of a value, which become this value. The generator is one of the device of w.
    """
    rows, steps = w.reshape(-1, w.shape[-1]), _steps(like)
    codes = torch.empty(like.codes.shape, dtype=torch.uint8, device=w.device)
    flat = codes.view(rows.shape[0], -1)
    values = torch.tensor(E2M1_VALUES[:8], device=w.device)
    for i, j in _chunks(rows):
        step = steps[i:j].unsqueeze(-1)
        ratio = (rows[i:j].float().unflatten(-1, (-1, _checks.BLOCK)) / step).masked_fill_(step == 0, 0.0)
        size = ratio.abs().clamp_(max=E2M1_MAX)
        below = torch.bucketize(size * (1 + 1e-6), values, right=True).sub_(1)
        above = (below + 1).clamp_(max=7)
        distance = (values[above] - values[below]).masked_fill_(above == below, 1.0)
        draws = torch.rand(size.shape, generator=generator, device=w.device).clamp_(min=1e-6)
        code = torch.where((size - values[below]) / distance > draws, above, below)
        code += 8 * torch.signbit(ratio)
        flat[i:j] = pack(code.to(torch.uint8).flatten(1))
    return codes


def first_master(w: Tensor, made: NVFP4Tensor, master: Master) -> Tensor:
    """float32 numbers that :func:`nearest_codes` rounds to the codes of ``made``.

    A block whose scale is 0 has zeros, and the code 0.
    """
    if master == "quantized":
        return made.dequantize(torch.float32)
    rows, steps = w.reshape(-1, w.shape[-1]), _steps(made)
    codes = made.codes.view(rows.shape[0], -1)
    result = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    flat = result.view(rows.shape)
    values = torch.tensor(E2M1_VALUES[:8], device=w.device)
    lowest, highest = (torch.tensor(ends, device=w.device) for ends in (LOWEST, HIGHEST))
    lowest, highest = lowest + (values - lowest) * MARGIN, highest - (highest - values) * MARGIN
    for i, j in _chunks(rows):
        step = steps[i:j].repeat_interleave(_checks.BLOCK, 1)
        code = unpack(codes[i:j]).to(torch.int32)
        sign = torch.where(code < 8, 1.0, -1.0)
        size = (rows[i:j].float() * sign).clamp(lowest[code % 8] * step, highest[code % 8] * step)
        flat[i:j] = size * sign
    return result


def _steps(w: NVFP4Tensor) -> Tensor:
    """f (rows, k/16), the distance that a step of 1 in q has in each block, of all matrices together."""
    steps: Tensor = w.compact_scales().float() * w.amax.unsqueeze(-1) * _unit(w.e4m3_max)
    return steps.flatten(0, -2)


@functools.cache
def _unit(e4m3_max: int) -> float:
    """fl(1 / (6 * e4m3_max)). A tensor of it on a GPU would synchronise."""
    return float(torch.tensor(1.0) / torch.tensor(float(E2M1_MAX * e4m3_max)))


def _chunks(rows: Tensor) -> Iterator[tuple[int, int]]:
    size = max(MAX_ELEMS // rows.shape[1], 1)
    return ((i, min(i + size, rows.shape[0])) for i in range(0, rows.shape[0], size))


def _without_outward(gradient: Tensor, w: Tensor, made: NVFP4Tensor) -> Tensor:
    """The gradient of a master weight, and 0 where a step against it would move a saturated one outward."""
    limit = (_steps(made) * E2M1_MAX).unsqueeze(-1)
    blocks = w.detach().reshape(*limit.shape[:2], -1)
    g = gradient.float().view(blocks.shape)
    is_outward = (blocks.abs() > limit) & (g * blocks < 0)
    return g.masked_fill(is_outward, 0.0).view(w.shape).to(w.dtype)


# ---- the operands of backward


def _values_of_input(x: Tensor, scaling: int) -> Tensor:
    """The values of rows (m, k) as the product read them, in their dtype."""
    if scaling == NOT_QUANTIZED:
        return x.to(torch.bfloat16).to(x.dtype) if x.dtype is torch.float32 else x
    if scaling == FP8_ROW:
        return quantize_fp8(x).dequantize(x.dtype)
    call = checked_input(scaling).quantize_call(x)
    codes, scales, amax = operators.quantize(*call)
    return NVFP4Tensor._trusted(codes, scales, amax, call.e4m3_max).dequantize(x.dtype)


def _values_of_weight(w: NVFP4Tensor, is_fp8: bool, dtype: torch.dtype) -> Tensor:
    """The values (.., n, k) of a weight as the product read them."""
    if not is_fp8:
        return w.dequantize(dtype)
    products = folded(decode(w).data).float()
    return (products * (w.amax * _unit(w.e4m3_max)).unsqueeze(-1)).to(dtype)


class _Product(torch.autograd.Function):
    """The operator ``linear`` with a gradient for x, the master weight and the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w: NVFP4Tensor, layer: Linear
    ) -> Tensor:
        ctx.save_for_backward(x, weight, w.codes, w.scales, w.amax)
        ctx.e4m3_max, ctx.scaling = w.e4m3_max, INPUTS[layer.activations].scaling
        ctx.has_bias = bias is not None
        more: dict[str, Any] = {"scaling": ctx.scaling}
        if ctx.scaling == NOT_QUANTIZED and x.dtype is torch.float32:
            x, more["out_dtype"] = x.to(torch.bfloat16), x.dtype  # no kernel multiplies float32 values
        held = None if bias is None else bias.detach().float()
        parts = OperandParts(w.codes, w.scales, w.amax, w.e4m3_max, 0, held)
        more |= {"batch_invariant": layer.batch_invariant, "use_fast_accum": layer.use_fast_accum}
        y: Tensor = operators.linear(*LinearCall.of(x.detach(), parts, **more))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, codes, scales, amax = ctx.saved_tensors
        w = NVFP4Tensor._trusted(codes, scales, amax, ctx.e4m3_max)
        gradients: list[Tensor | None] = [None] * 5
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                gradients[0] = (dy @ _values_of_weight(w, ctx.scaling == FP8_ROW, dy.dtype)).to(x.dtype)
            rows = dy.flatten(0, -2) if dy.dim() > 1 else dy.unsqueeze(0)
            if ctx.needs_input_grad[1]:
                values = _values_of_input(_checks.readable(x.reshape(-1, x.shape[-1])), ctx.scaling)
                gradients[1] = _without_outward(rows.t() @ values.to(dy.dtype), weight, w)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                gradients[2] = rows.sum(0, dtype=torch.float32)
        return tuple(gradients)


class _Block(torch.autograd.Function):
    """The operator ``experts`` with gradients for x, the weights of tokens, master weights and biases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        weight13: Tensor,
        bias13: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        ids: Tensor,
        w13: NVFP4Tensor,
        w2: NVFP4Tensor,
        layer: Experts,
    ) -> Tensor:
        ctx.save_for_backward(x, scores, weight13, bias13, weight2, bias2, ids)
        ctx.made, ctx.layer = (w13, w2), layer
        rows = _checks.readable(x.detach().reshape(-1, x.shape[-1]))
        if INPUTS[layer.activations].tokens == "16-bit" and rows.dtype is torch.float32:
            rows = rows.to(torch.bfloat16)
        parts = [
            OperandParts(w.codes, w.scales, w.amax, w.e4m3_max, 0, None if b is None else b.detach().float())
            for w, b in ((w13, bias13), (w2, bias2))
        ]
        top_k = ids.shape[-1]
        ids, scores = ids.reshape(-1, top_k).contiguous(), scores.detach().reshape(-1, top_k).contiguous()
        y = nn_experts.multiply(layer, rows, ids, scores, *parts)
        return y.to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scores, weight13, bias13, weight2, bias2, ids = ctx.saved_tensors
        layer: Experts = ctx.layer
        made = ctx.made
        is_fp8 = INPUTS[layer.activations].scaling == FP8_ROW
        values = [_values_of_weight(w, is_fp8, x.dtype) for w in made]
        given = (x, scores, values[0], bias13, values[1], bias2)
        with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
            leaves = [None if t is None else t.detach().requires_grad_() for t in given]
            y = _block_of_values(leaves, ids, layer)
            needed = {i: t for i, t in enumerate(leaves) if t is not None and ctx.needs_input_grad[i]}
            found = torch.autograd.grad(y, list(needed.values()), dy, allow_unused=True)
        gradients: list[Tensor | None] = [None] * 10
        for i, gradient in zip(needed, found, strict=True):
            of_weight = {2: (weight13, made[0]), 4: (weight2, made[1])}.get(i)
            gradients[i] = gradient
            if of_weight is not None and gradient is not None:
                gradients[i] = _without_outward(gradient, *of_weight)
        return tuple(gradients)


def _block_of_values(leaves: Sequence[Any], ids: Tensor, layer: Experts) -> Tensor:
    """The block of experts in torch, of dequantized weights; rows are quantized straight through."""
    x, scores, w13, bias13, w2, bias2 = leaves
    scaling = cast(int, INPUTS[layer.activations].scaling)
    act = activations.by_name[cast(Any, layer.activation)]

    def through(rows: Tensor) -> Tensor:
        with torch.no_grad():
            change = _values_of_input(rows.contiguous(), scaling) - rows
        return rows + change

    tokens, top_k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
    names, factors = ids.reshape(-1), scores.reshape(-1)
    order = names.argsort(stable=True)
    ends = torch.bincount(names.clamp(min=-1) + 1, minlength=w13.shape[0] + 1)[: w13.shape[0] + 1].cumsum(0)
    y = torch.zeros(tokens.shape, dtype=torch.float32, device=x.device, requires_grad=True)
    begin, *rest = ends.tolist()
    for e, end in enumerate(rest):
        if end > begin:
            pairs = order[begin:end]
            token = pairs // top_k
            z = torch.nn.functional.linear(through(tokens[token]), w13[e]).float()
            h = act(z if bias13 is None else z + bias13[e]).to(x.dtype)
            out = torch.nn.functional.linear(through(h), w2[e]).float()
            out = out if bias2 is None else out + bias2[e]
            y = y.index_add(0, token, out * factors[pairs].float().unsqueeze(-1))
        begin = end
    return y.to(x.dtype).view(x.shape)
