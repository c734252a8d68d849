"""fp4gemm.nn.Linear: torch.nn.Linear with a quantized weight and an input quantized in each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.function import once_differentiable

from .. import _checks, selection, support
from .._refusals import REFUSALS, explained
from ..activations import by_number
from ..containers.decoded import DecodedTensor
from ..containers.fp8 import FP8Tensor
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import operators
from ..ops.linear import LinearCall
from ..ops.parts import OperandParts
from ..recipe import INPUTS, DataFree, LayerActivations, Quantizer, Recipe, WeightScaling
from ._formats import AMAX, BOUND, CODES, SCALES, Weight, format_of, format_of_parts
from ._inputs import (
    INPUT_GRADIENTS,
    OUT_STEP,
    CheckFinite,
    InputGradient,
    Invariant,
    check_bias,
    check_channels,
    check_linear,
    check_options,
    check_residual_channels,
    check_weight_for,
    k_step,
    refuse_not_finite,
    refuse_quantized_gradient,
    shared_input,
    with_recipe,
)
from ._weight import PREPACKED, RESIDUAL, WeightModule, version

if TYPE_CHECKING:
    from typing_extensions import Self

_RULES = selection.RULES
_LINEAR = operators.below_wrapper(operators.linear)
_is_compiling = torch.compiler.is_compiling
# The arguments of the operator by batch_invariant and use_fast_accum.
_SUMS: dict[tuple[bool, bool], dict[str, bool]] = {
    (False, False): {},
    (False, True): {"use_fast_accum": True},
    (True, False): {"batch_invariant": True},
    (True, True): {"batch_invariant": True, "use_fast_accum": True},
}


class Linear(Invariant, WeightModule):
    """``y = Q(x) @ Q(W).T + bias``, with Q the NVFP4 cast: torch.nn.Linear with a frozen weight.

    The weight is quantized once and kept as buffers; the input is quantized in every call, so no calibration
    is needed. A call is one operator, ``torch.ops.fp4gemm.linear``. The epilogue of the GEMM applies all amax
    factors in fp32, adds the bias in fp32, and rounds once to the dtype of the input. Definition: the NVFP4
    cast and GEMM of TransformerEngine, as :func:`fp4gemm.quantize` and :func:`fp4gemm.mm` document them.

    With ``activations="fp8"`` (W4A8) Q(x) is the e4m3 cast of :func:`fp4gemm.quantize_fp8`, one scale for
    each row, and the values of the weight are rounded to e4m3 in the product; the stored weight is the same
    NVFP4. It runs on the FP8 tensor cores of compute capability 9.0, where it is meant for many tokens, and
    on the CPU. Its sums are the hardware's: :func:`fp4gemm.mm` says what holds.

    With ``activations="mxfp8"`` (W8A8) Q is the cast of :func:`fp4gemm.quantize_mxfp8`, of the weight too:
    e4m3 values with a power of two for 32 elements, and no amax. It runs on the MXFP8 tensor cores of
    Blackwell, on the CPU, and on compute capability 9.0 in fp16, where each call decodes both operands.
    ``weight`` is then an :class:`fp4gemm.MXFP8Tensor`, which takes the place of the NVFP4Tensor in all that
    follows; it is not prepacked, and x is a float tensor. With ``activations="mxfp8-mxfp4"`` Q(x) is the same
    and the weight an :class:`fp4gemm.MXFP4Tensor`, of :func:`fp4gemm.quantize_mxfp4` or with the codes of a
    checkpoint. On Blackwell, a k that is no multiple of 128 costs a conversion of the codes in each call.

    On compute capability 9.0, and with ``activations="a16"`` on 12.0 and 12.1, the first ``forward``
    that is neither traced nor captured prepacks the weight (:func:`fp4gemm.prepack`), which synchronises
    once. From then on the layer holds that form alone, as large as the other. A layer that is traced or
    captured before that is not prepacked by itself: call :meth:`prepack` first. Several threads may run the
    layer, each on a stream of its own. ``state_dict``, ``weight``, pickles, copies and moves to another
    device still have codes and scales, as :func:`fp4gemm.unprepack` gives them. ``weight_codes`` and
    ``weight_scales`` are then copies, so a new weight comes in by :meth:`update_` or ``load_state_dict``,
    which write the prepacked form in place, or by assignment.

    A new layer has no weight: its buffers are zeros, and ``forward`` raises until ``load_state_dict`` or a
    loader of accelerate has brought one. Usually a layer comes from ``Linear.from_float`` or
    ``quantize_model``. ``layer.weight = w`` of an NVFP4Tensor shares its memory; a float tensor (n, k) is
    quantized.

    Layers that read the same x can share its quantization: ``forward`` accepts an NVFP4Tensor or, on devices
    whose kernels read such operands (compute capability 9.0), a DecodedTensor, with the same bits; with
    ``activations="fp8"`` an FP8Tensor::

        x = torch.randn(16, 512, dtype=torch.bfloat16)
        q_proj, k_proj = (
            fp4gemm.nn.Linear.from_float(torch.nn.Linear(512, n, dtype=torch.bfloat16)) for n in (512, 128)
        )
        shared = fp4gemm.quantize(x)  # on compute capability 9.0: decoded=True
        q, k = q_proj(shared), k_proj(shared)

    Neither weight nor bias has a gradient. The input and the addend of ``forward`` do, so that adapters
    (LoRA) train on top of a quantized model; :attr:`input_gradient` and docs/lora.md define it.

    NaN and infinity: a NaN in x has no effect on the amax and is quantized to +6 times its block scale, so
    that it does not show in y. An infinite x makes the amax of its row (or of x) infinite, and those rows of
    y become infinite or NaN. ``check_finite="raise"`` finds both.

    Args:
        in_features: k, elements of an input row; a multiple of 32, or of 64 with activations "fp8".
        out_features: n, elements of an output row; a multiple of 8.
        bias: whether a bias of shape (n,) is added.
        device: where the buffers are made.
        dtype: ``weight.dtype``, the dtype of the float weight before quantization: bfloat16, float16 or
            float32; None is torch's default dtype. Model code reads it. No buffer has it, and the output has
            the dtype of each input, under autocast too.
        activations: "per-token" gives each token (row of x) its own amax, so that an outlier token does not
            cost the others precision; "per-tensor" gives all of them one. Both may have options of the cast,
            "per-token,four_over_six=mae", as :class:`fp4gemm.recipe.Recipe` defines them. "fp8": x becomes
            e4m3, each token with its own scale; devices other than compute capability 9.0 and the CPU refuse
            it. "a16": x is not quantized (W4A16), but rounded to bfloat16 if it is float32; devices with FP4
            tensor cores refuse it. "mxfp8": x and the weight are MXFP8. "mxfp8-mxfp4": x is MXFP8, and the
            weight MXFP4.
        weight_scaling: "row" gives each output channel (row of W) its own amax, "tensor" one to the whole
            weight. "row" is the default, since one fp32 number a channel costs nothing: the epilogue
            multiplies by it anyway. MX formats have no amax, so that "tensor" is refused with them.
        check_finite: "off", or "raise" for debugging: ``forward`` raises ValueError if x has a NaN or an
            infinity. That reads x once more and synchronises in every call. While torch.compile traces with
            ``fullgraph=True`` or a CUDA graph is captured, "raise" is refused; without ``fullgraph`` the
            layer runs outside of the compiled graph.
        use_fast_accum: only with activations "fp8"; as in :func:`fp4gemm.mm`.
        residual_channels: r, the number of residual channels: inputs whose quantization errors are quantized
            and multiplied too (:func:`fp4gemm.quantize`), which makes the product longer by r of k. 0, or a
            multiple of 32 that is at most k. Only with activations "per-token" and "per-tensor".

    Attributes:
        batch_invariant: False; True selects the kernel without regard to the number of rows, as in
            :func:`fp4gemm.mm`. It is set on the layer, and is not part of the state.

    Buffers:
        weight_codes: uint8 (n, k/2), packed e2m1, low nibble = even k. weight_scales: float8_e4m3fn
        (ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero. weight_amax: float32 (n,) or
        (1,). weight_e4m3_max: int32 (1,), the bound of the scales, 448 or 256. A checkpoint without it means
        448. weight_prepacked: uint8 (int8 with "fp8"), in place of codes and scales once they are prepacked.
        bias: float32 (n,), or None. residual_channels: int32 (r,), the inputs, or None. With them k of the
        buffers of the weight is in_features + r (:func:`fp4gemm.repeat_columns`), while ``weight`` is a copy
        without the repeated columns, and a new weight has in_features columns. With "mxfp8" weight_codes is
        float8_e4m3fn (n, k), weight_scales float8_e8m0fnu (ceil128(n), ceil4(k/32)), and there are no others
        but bias; with "mxfp8-mxfp4" the codes are uint8 (n, k/2), and the scales those of "mxfp8".
        A state_dict has codes and scales in place of weight_prepacked. The buffers keep these dtypes under
        ``.half()``, ``.bfloat16()``, ``.to(dtype)``, which change ``weight.dtype`` alone.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    check_finite: CheckFinite = "off"
    use_fast_accum: bool = False
    _input_gradient: InputGradient = "dequantized"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activations: LayerActivations = "per-token",
        weight_scaling: WeightScaling = "row",
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        residual_channels: int = 0,
    ) -> None:
        activations = check_options(activations, weight_scaling, check_finite, use_fast_accum)
        for name, what, size, step in (
            ("in_features", "k", in_features, k_step(activations)),
            ("out_features", "n", out_features, OUT_STEP),
        ):
            _checks.is_int(name, size, 1)
            _checks.is_multiple(name, what, size, step)
        if not isinstance(bias, bool):
            raise TypeError(f"bias: got {_checks.describe(bias)}, must be a bool")
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        _checks.is_int("residual_channels", residual_channels, 0)
        if residual_channels:
            check_residual_channels(residual_channels, in_features, activations)
        super().__init__(
            (out_features, in_features),
            bias,
            device,
            dtype,
            weight_scaling,
            INPUTS[activations].weights,
            residual_channels,
        )
        self.activations = activations
        self.check_finite = check_finite
        self.use_fast_accum = use_fast_accum

    @classmethod
    def from_float(
        cls,
        linear: torch.nn.Linear,
        *,
        activations: LayerActivations = "per-token",
        weight_scaling: WeightScaling = "row",
        method: DataFree | Quantizer | None = None,
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        recipe: Recipe | None = None,
        residual_channels: Tensor | None = None,
    ) -> Linear:
        """Quantize a float layer: W -> Q(W) on its device, bias -> float32. The float layer is not changed.

        Args:
            linear: a torch.nn.Linear whose weight (n, k) is bfloat16, float16 or float32; k a multiple of 32,
                n of 8.
            activations, weight_scaling, check_finite, use_fast_accum: as in the class.
            method: "round", "four-over-six" or "search", as :class:`fp4gemm.recipe.Recipe` defines them; None
                is "four-over-six". "round" gives the weight of ``quantize(weight)``.
            recipe: None, or activations, weight_scaling and method together, as
                :meth:`fp4gemm.training.Recipe.for_inference` makes them. The layer keeps it, and
                :meth:`update_` casts float weights by it.
            residual_channels: None, or int32 (r,) on the device of the weight, distinct numbers from 0 to k -
                1, as for :func:`fp4gemm.repeat_columns`; only with activations "per-token" and "per-tensor".

        Raises:
            TypeError, ValueError: for a layer that does not fit, naming what is wrong; also for weights that
                are NaN or infinite, which NVFP4 cannot hold.

        The weight is detached: no gradient flows to it. Synchronises once, to look for weights that are not
        finite.
        """
        activations, quantizer = with_recipe(recipe, activations, weight_scaling, method)
        activations = check_options(activations, weight_scaling, check_finite, use_fast_accum)
        check_linear(linear, activations)
        if residual_channels is not None:
            check_channels(residual_channels, linear.in_features, activations, linear.weight.device)
        # No inference tensors, which load_state_dict could not write outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            quantized = quantizer(linear.weight.detach())
            layer = cls.from_quantized(
                quantized,
                linear.bias,
                activations=activations,
                check_finite=check_finite,
                use_fast_accum=use_fast_accum,
                residual_channels=residual_channels,
            )
            layer.weight_recipe = recipe
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        activations: LayerActivations = "per-token",
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        residual_channels: Tensor | None = None,
    ) -> Linear:
        """A layer around an NVFP4 weight (n, k), whose memory it shares, and a float bias (n,), copied.

        ``dtype`` of the layer is ``weight.dtype``. With residual_channels, as for :meth:`from_float`, the
        layer has a copy of the weight with more columns: ``fp4gemm.repeat_columns(weight,
        residual_channels)``.

        Raises:
            TypeError, ValueError: as for the class; also for a weight with groups or a rotation, and for a
                bias of another dtype, shape or device.
        """
        weight = format_of(weight).check(weight)
        check_weight_for(weight, format_of(weight), check_options(activations, "row", "off"))
        n, k = weight.shape
        if residual_channels is not None:
            check_channels(residual_channels, k, activations, weight.device)
        if bias is not None:
            bias = check_bias(bias, n, device=weight.device)
        layer = cls(
            k,
            n,
            bias is not None,
            device="meta",
            dtype=weight.dtype,
            activations=activations,
            check_finite=check_finite,
            use_fast_accum=use_fast_accum,
            residual_channels=0 if residual_channels is None else residual_channels.shape[0],
        )
        return layer._adopt(weight, bias, residual_channels)

    def forward(self, x: Tensor | NVFP4Tensor | DecodedTensor | FP8Tensor, c: Tensor | None = None) -> Tensor:
        """``Q(x) @ Q(W).T + bias + c``; with activations "a16" ``x @ Q(W).T + bias + c``.

        Args:
            x: bfloat16, float16 or float32 (..., k), any leading dimensions including none; strides are
                free. Or an NVFP4Tensor or DecodedTensor (m, k), with activations "fp8" an FP8Tensor, which
                was quantized before; of a layer with residual channels it is (m, k + r), quantized with
                these channels. A float32 x that is not quantized is rounded to bfloat16.
            c: None, or an addend (..., n) of the dtype of the result, such as a residual. The epilogue adds
                it in float32, before the result is rounded.

        Returns:
            (..., n), dtype of x; of ``weight.dtype`` if x was quantized before. Does not synchronise, except
            when it prepacks the weight, or with check_finite="raise".

        Raises:
            TypeError, ValueError: naming x, c or the size that is wrong; ValueError for a NaN or an infinity
                in x with check_finite="raise".
            NotImplementedError: x or c requires grad while grad mode is on, and the epilogue has an
                activation. The device does not read decoded operands.
            RuntimeError: no weight has been loaded yet; x or c requires grad, and the weight was made in
                inference mode.
        """
        # The checks take several times as long as the operator's launch. They are omitted while the buffers
        # are those of the last call that made them. A call that the operator refuses goes through them too.
        is_plain = c is None or (type(c) is Tensor and not c.requires_grad)
        if (
            is_plain
            and type(x) is Tensor
            and not x.requires_grad
            and (x.dtype is not torch.float32 or INPUTS[self.activations].tokens != "16-bit")  # rounded first
        ):
            arguments = self._known_arguments()
            if arguments is not None and x.dim() > 0 and x.size(-1) == self.in_features:
                try:
                    more: dict[str, Any] = _SUMS[self._batch_invariant, self.use_fast_accum]
                    if self.num_residual:
                        more = {**more, RESIDUAL: self._buffers[RESIDUAL]}
                    if c is None:
                        result: Tensor = _LINEAR(x, *arguments, **more)
                    else:
                        result = _LINEAR(x, *arguments[:7], self._epilogue(), c, **more)
                except REFUSALS as error:
                    return explained("fp4gemm.nn.Linear", error, self._checked_forward, x, c=c)
                return result
        return self._checked_forward(x, c=c)

    def _known_arguments(self) -> tuple[Any, ...] | None:
        """The operator's arguments after x, if the buffers are those of the last call that was checked."""
        if _is_compiling() or _RULES or _forward_ad._current_level >= 0:
            return None
        fast = self._fast
        if fast is None:
            return None
        name, data, scales, amax, bias, channels, bound, written, arguments = fast
        held = self._buffers
        if (
            held.get(name) is data
            and held.get(SCALES) is scales
            and held.get(AMAX) is amax
            and held.get("bias") is bias
            and held.get(RESIDUAL) is channels
            and held.get(BOUND) is bound
            and (bound is None or bound._version == written)
        ):
            return arguments  # type: ignore[no-any-return]
        return None

    def _checked_forward(self, x: Tensor | NVFP4Tensor | DecodedTensor | FP8Tensor, **terms: Any) -> Tensor:
        """The product after all checks; terms are c and the activation, as the operator has them."""
        self._require_weight()
        if terms.get("c") is not None:
            self._check_addend(x, terms["c"])
        if isinstance(x, (NVFP4Tensor, DecodedTensor, FP8Tensor)):
            parts = shared_input(x, self._held_shape[-1], self._device, self.activations, self.num_residual)
            return self._multiply(parts, **terms, out_dtype=self.dtype)
        x = _checks.is_tensor("x", x)
        k = self.in_features
        if x.dim() == 0 or x.shape[-1] != k:
            raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = in_features")
        _checks.same_device("x", x, self._device, "weight")
        scaling = INPUTS[self.activations].scaling
        _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
        self._check_gradient("x", x)
        if self.check_finite != "off":
            refuse_not_finite(x, self)
        if scaling:
            support.ready(x, "quantize")
        elif x.dtype is torch.float32:
            terms["out_dtype"] = x.dtype
            x = x.to(torch.bfloat16)  # no kernel multiplies float32 values
        return self._multiply(x, scaling=scaling, residual_channels=self.residual_channels, **terms)

    def _check_addend(self, x: Tensor | NVFP4Tensor | DecodedTensor | FP8Tensor, c: object) -> None:
        is_tensor = isinstance(x, Tensor)
        c = _checks.is_tensor("c", c)
        _checks.has_dtype("c", c, (x.dtype if is_tensor else self.dtype,))
        _checks.has_shape("c", c, (*x.shape[:-1], self.out_features))
        _checks.same_device("c", c, self._device, "weight")
        self._check_gradient("c", c)

    def _multiply(self, given: Tensor | OperandParts, **terms: Any) -> Tensor:
        """Call the operator with codes and block scales, or with prepacked bytes, as the weight has them.

        given is x, or the parts of an x that was quantized before; terms are more of its arguments.
        """
        is_traced = _is_compiling()
        tokens = INPUTS[self.activations].tokens
        if not is_traced and not self._is_prepacked_for(tokens):
            self._prepack_where_it_helps(tokens)
        terms.setdefault("activation", self._epilogue())
        terms |= _SUMS[self._batch_invariant, self.use_fast_accum]
        call = LinearCall.of(given, self._operand_parts(), **terms)
        x = call.x
        if is_traced:
            if needs_gradient(call):
                return self._recorded(call)
            traced: Tensor = operators.linear(*call)
            return traced
        quantizes = call.x_amax is None and call.scaling != INPUTS["a16"].scaling
        is_plain = call.x_amax is None and not quantizes
        if is_plain:
            support.ready_for(x, "mm", ("bf16", "nvfp4"))
        if tokens in ("fp8", "mxfp8"):
            format_a = "e4m3" if tokens == "fp8" else "mxfp8"
        elif is_plain and x.dtype is torch.bfloat16:
            format_a = "bf16"
        elif x.dtype is torch.uint8 or (quantizes and not support.streams_prepacked(x.device)):
            format_a = "nvfp4"
        else:
            format_a = "fp16"
        prepacked = "prepacked_fp8" if tokens == "fp8" else "prepacked"
        formats = (format_a, prepacked if call.weight_rows else self.format_name)
        support.ready_for(x, "mm", formats)
        if _RULES and not self._batch_invariant:
            rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
            dtype = terms.get("out_dtype", x.dtype)
            n, k = self._held_shape
            is_gated = by_number[call.activation].is_gated
            kernel = selection.find(
                rows, n, k, dtype, "dense", is_gated, formats, use_fast_accum=self.use_fast_accum
            )
            call = call._replace(kernel_name=kernel)
        if needs_gradient(call):
            return self._recorded(call)
        result: Tensor = _LINEAR(*call)
        self._remember_call(call)
        return result

    def _remember_call(self, call: LinearCall) -> None:
        """Let forward make this call again without checks, if nothing but x can differ."""
        bound = self._buffers.get(BOUND)
        written = version(bound)
        tokens = INPUTS[self.activations].tokens
        is_tested = call.x.get_device() in support.READY["mm"]
        helps = call.weight_rows > 0 or not support.streams_prepacked(call.x.device, tokens)
        is_own = call.scaling == INPUTS[self.activations].scaling and call.activation == self._epilogue()
        # Not of a float32 x that was rounded to bfloat16.
        is_own = is_own and (tokens != "16-bit" or call.out_dtype is None)
        is_plain = is_own and self.check_finite == "off" and type(call.x) is Tensor
        is_known = bound is None or written is not None
        if is_plain and is_tested and helps and is_known and not self._is_offloaded():
            arguments = call[1:9] if call.activation else call[1:8]  # from weight; others have their defaults
            channels = call.residual_channels
            of_weight = (call.weight, call.weight_scales, call.weight_amax, call.bias, channels)
            name = PREPACKED if call.weight_rows else CODES
            self.__dict__["_fast"] = (name, *of_weight, bound, written, arguments)

    def _recorded(self, call: LinearCall) -> Tensor:
        """The product for autograd, with the copy of the weight that its backward multiplies by."""
        how, k, num_residual = self._input_gradient, self.in_features, self.num_residual
        if how == "dequantized" or not call.x.requires_grad or torch.compiler.is_compiling():
            return recorded(call, how, k, None)

        def make(w: OperandParts, k: int) -> OperandParts:
            return transpose(w, k, num_residual)

        return recorded(call, how, k, self._held_transpose(call.weight_parts, make))

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
        refuse_quantized_gradient(value, self.format_name)
        if value == "quantized" and self.out_features % _checks.K_STEP_MM:
            raise ValueError(
                f"input_gradient: got 'quantized' with out_features {self.out_features}, must be "
                f"'dequantized' unless out_features is a multiple of {_checks.K_STEP_MM}"
            )
        self._input_gradient, self._transposed = value, None

    def _check_gradient(self, name: str, x: Tensor) -> None:
        if self._epilogue():
            _checks.no_grad(name, x, "a layer with an activation in its epilogue")

    def prepack(self) -> Self:
        """Replace the codes and block scales by prepacked bytes, and return the layer.

        ``forward`` does that by itself where it helps. On the CPU it only costs time. Synchronises, unless
        the weight is prepacked already. With activations "fp8" the bytes are those for FP8 tokens.

        Raises:
            RuntimeError: no weight has been loaded yet, or a CUDA graph has been captured that reads the
                weight as it is. NotImplementedError: the device does not read prepacked weights; the text
                says which.
        """
        self._prepack(INPUTS[self.activations].tokens)
        return self

    def _epilogue(self) -> int:
        """The number of the activation in the epilogue; layers that have one override this."""
        return 0

    def extra_repr(self) -> str:
        finite = "" if self.check_finite == "off" else f", check_finite={self.check_finite!r}"
        sums = "".join(f", {name}=True" for name in _SUMS[self._batch_invariant, self.use_fast_accum])
        residual = f", residual_channels={self.num_residual}" if self.num_residual else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activations={self.activations!r}"
            f"{self._shown_scaling}{residual}{finite}{sums}"
        )


# ---- the gradient of the input, what adapters train through


def needs_gradient(call: LinearCall) -> bool:
    """Return whether autograd has to record the call."""
    return torch.is_grad_enabled() and (call.x.requires_grad or (call.c is not None and call.c.requires_grad))


def recorded(call: LinearCall, how: InputGradient, k: int, transposed: OperandParts | None) -> Tensor:
    """The operator ``linear``, recorded for autograd: gradients flow to x and to c, and to nothing else.

    With dy (..., n) the gradient of the result, in its dtype, and W the stored weight::

        "dequantized"   dx = dy @ W            W rounded to the dtype of dy, the product by torch.matmul
        "quantized"     dx = Q(dy) @ Q(W^T)^T  one amax for each row of dy and of W^T, as the operator defines
        dc = dy

    The quantization of x in forward is passed straight through: its derivative counts as 1, as if forward
    had multiplied x itself, so that W has none of the columns that residual channels repeat. Nothing but
    references to the weight is saved for backward, which allocates W, or Q(W^T) if ``transposed`` does not
    have it, while it runs. A second derivative is refused.

    Raises:
        NotImplementedError: x or c belongs to torch.func.grad or a relative of it.
        RuntimeError: the weight was made in inference mode. Backward raises it if the weight has been written
            in between, or for a second derivative.
    """
    for name, value in (("x", call.x), ("c", call.c)):
        if value is not None:
            _checks.refuse_transform(name, value)
    if not torch.compiler.is_compiling() and call.weight.is_inference():
        raise RuntimeError(
            "weight: was made in inference mode, must not be where x requires grad; load the model outside "
            "of torch.inference_mode()"
        )
    saved = (None, None, None) if transposed is None else transposed[:3]
    result: Tensor = _Recorded.apply(how, k, *saved, *call)
    return result


def dense_weight(w: OperandParts, k: int, num_residual: int, dtype: torch.dtype) -> Tensor:
    """The first k columns of a weight (n, k + num_residual)."""
    return format_of_parts(w).dense(w, k + num_residual, dtype)[:, :k]


def transpose(w: OperandParts, k: int, num_residual: int = 0) -> OperandParts:
    """Q(W^T), (k, n), of the first k columns of a weight (n, k + num_residual)."""
    dense = dense_weight(w, k, num_residual, torch.float32).contiguous()
    return OperandParts(*operators.quantize(dense, None, True, axis=0))


class _Recorded(torch.autograd.Function):
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
        channels = named.residual_channels
        ctx.num_residual = 0 if channels is None else channels.shape[0]
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
            data, scales, amax = ctx.saved_tensors
            # The dtype of dy is that of the result, under autocast too.
            with torch.autocast(dy.device.type, enabled=False):
                if ctx.is_transposed:
                    dx = operators.linear(*LinearCall.of(dy.contiguous(), OperandParts(data, scales, amax)))
                else:
                    w = OperandParts(data, scales, amax, ctx.e4m3_max, ctx.rows)
                    if ctx.how == "dequantized":
                        dx = dy @ dense_weight(w, ctx.k, ctx.num_residual, dy.dtype)
                    else:
                        of_t = transpose(w, ctx.k, ctx.num_residual)
                        dx = operators.linear(*LinearCall.of(dy.contiguous(), of_t))
            gradients[5] = dx.to(ctx.dtype)
        return tuple(gradients)
