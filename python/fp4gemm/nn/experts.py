"""fp4gemm.nn.Experts: the experts of a mixture, their weights in NVFP4, MXFP8 or MXFP4, as one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from .. import _checks, support
from .._refusals import REFUSALS, explained
from ..activations import Activation, ActivationName, by_name, names
from ..ops import operators
from ..ops.moe import ExpertsCall
from ..ops.parts import OperandParts
from ..recipe import (
    INPUTS,
    DataFree,
    LayerActivations,
    Quantizer,
    Recipe,
    WeightScaling,
)
from ..support import TokenForm
from ._adapted import Block, Frozen, LowRank, adapted_experts, check_adapter, transpose
from ._by_parts import composed_experts, swiglu_experts
from ._formats import (
    AMAX,
    BOUND,
    CODES,
    SCALES,
    FormatName,
    Weight,
    format_of,
    interleaved,
)
from ._inputs import (
    INPUT_GRADIENTS,
    CheckFinite,
    InputGradient,
    Invariant,
    check_bias,
    check_float_weight,
    check_options,
    check_weight_for,
    k_step,
    refuse_not_finite,
    refuse_quantized_gradient,
    with_recipe,
)
from ._parallel import check_exchange, exchanged
from ._weight import _EXCHANGE, PREPACKED, WeightModule, version

if TYPE_CHECKING:
    from ..distributed import ExpertParallel

Layout = Literal["halves", "interleaved"]
LAYOUTS = get_args(Layout)
SWIGLU: ActivationName = "swiglu"


class Experts(Invariant, torch.nn.Module):
    """The experts of a mixture: two NVFP4 products for each expert that a token names, and a weighted sum.

    For token i with the experts e = topk_ids[i, j] and the weights topk_weights[i, j]::

        h[i, j] = act(Q(x[i]) @ Q(W13[e]).T + b13[e])
        y[i]    = sum over j of topk_weights[i, j] * (Q(h[i, j]) @ Q(W2[e]).T + b2[e])

    Q is the NVFP4 cast of :func:`fp4gemm.quantize` with one amax for each row, or of x and h the e4m3 cast of
    :func:`fp4gemm.quantize_fp8` with activations "fp8", and act the activation. A gated
    activation reads rows 2i and 2i+1 of W13[e] as gate and up. The sum is in float32, in the order of j.
    Routing, both products and the sum are one operator, ``torch.ops.fp4gemm.experts``, which does not
    synchronise: a captured CUDA graph may be replayed with other experts in the same memory. Definition:
    :mod:`fp4gemm.reference.moe`.

    The weights are buffers of the modules ``w13`` and ``w2`` and are prepacked as those of
    :class:`fp4gemm.nn.Linear` are: the first ``forward`` on compute capability 9.0 that is neither traced nor
    captured does it. ``state_dict``, pickles, copies and moves have codes and scales. A new module has no
    weights; make it with ``from_float``, ``from_quantized`` or ``quantize_model``.

    The weights are frozen. x, topk_weights and the adapters of ``forward`` (LoRA) have gradients, without
    ``ep``; a call that autograd records, or that has adapters, is a sequence of operators with the same bits,
    which takes longer. :attr:`input_gradient` and docs/lora.md define the gradients.

    Args:
        num_experts: g, 1 to 2048.
        hidden: d, elements of a token; a multiple of 32, or of 64 with activations "fp8".
        intermediate: elements of h; a multiple of 32 or 64 likewise. W13 has 2 * intermediate rows for a
            gated activation.
        activation: the name of an activation of :func:`fp4gemm.mm`, gated ("swiglu", for example) or not.
        bias: whether both products add a bias.
        device: where the buffers are made.
        dtype: the dtype of the float weights before quantization; None is torch's default dtype. No buffer
            has it, and the output has the dtype of each input.
        activations: "per-token" quantizes x and h with one amax for each row, "per-tensor" with one for the
            rows of each expert; both may have options of the cast, as in :class:`fp4gemm.nn.Linear`. "fp8"
            makes both e4m3, one scale for each row (W4A8), as there. "a16": neither is quantized (W4A16), but
            x is rounded to bfloat16 if it is float32, and so is the result then. "mxfp8": x, h and both
            weights are MXFP8, as in :class:`fp4gemm.nn.Linear`, and with "mxfp8-mxfp4" both weights are
            MXFP4; the block is then a sequence of operators, without ep.
        weight_scaling: "row" gives each output channel of each expert its own amax, "tensor" one to each
            expert's matrix.
        check_finite: "off", or "raise" for debugging: ``forward`` raises ValueError if x has a NaN or an
            infinity, as :class:`fp4gemm.nn.Linear` does.
        use_fast_accum: only with activations "fp8"; as in :func:`fp4gemm.mm`.
        rounded_gate: whether gate and up are rounded to the dtype of x before SwiGLU, as in training, whose
            first product is a function of its own (:class:`fp4gemm.training.StackedExperts`). The block is
            then a sequence of operators, which takes longer; only with activation "swiglu", without ep.
        ep: None, or the exchange of tokens between ranks, each of which has num_experts / ranks of the
            experts in its weights: the ones from ``ep.first_expert`` on (docs/distributed.md). num_experts
            and topk_ids are then those of all ranks, and every rank calls ``forward``, also without tokens.
            ``state_dict`` has DTensors of all ranks' experts, for torch.distributed.checkpoint.

    Attributes:
        batch_invariant: of both products, as of :class:`fp4gemm.nn.Linear`; refused with ep.
        float_layout: the layout of gate and up in the float weights that the module was made of, which
            adapters of the float model have too; "halves" for a module whose weights were loaded.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    ep: ExpertParallel | None = None
    use_fast_accum: bool = False
    rounded_gate: bool = False
    float_layout: Layout = "halves"
    _input_gradient: InputGradient = "dequantized"

    w13: StackedWeight
    w2: StackedWeight

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        activation: ActivationName = "swiglu",
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        activations: LayerActivations = "per-token",
        weight_scaling: WeightScaling = "row",
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        rounded_gate: bool = False,
        ep: ExpertParallel | None = None,
    ) -> None:
        activations = check_options(activations, weight_scaling, check_finite, use_fast_accum)
        _checks.is_int("num_experts", num_experts, 1)
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            _checks.is_int(name, size, 1)
            _checks.is_multiple(name, "k", size, k_step(activations))
        chosen = activation_of(activation)
        _checks.is_bool("bias", bias)
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        check_exchange(ep, None, num_experts, hidden, activations)
        super().__init__()
        self._set_options(chosen, activations, check_finite, use_fast_accum, rounded_gate, ep)
        num_experts = num_experts if ep is None else ep.num_local_experts
        n13 = 2 * intermediate if chosen.is_gated else intermediate
        how: dict[str, Any] = {"weight_scaling": weight_scaling, "format": INPUTS[activations].weights}
        self.w13 = StackedWeight(num_experts, n13, hidden, bias, device, dtype, **how)
        self.w2 = StackedWeight(num_experts, hidden, intermediate, bias, device, dtype, **how)

    def _set_options(
        self,
        activation: Activation,
        activations: str,
        check_finite: CheckFinite,
        use_fast_accum: bool,
        rounded_gate: bool,
        ep: ExpertParallel | None,
    ) -> None:
        _check_rounded_gate(rounded_gate, activation, ep)
        self.rounded_gate = rounded_gate
        self.check_finite, self.use_fast_accum, self.ep = check_finite, use_fast_accum, ep
        self.activation = activation.name
        self.activations = activations
        self._activation = activation.number

    @classmethod
    def from_float(
        cls,
        w13: Tensor,
        w2: Tensor,
        bias13: Tensor | None = None,
        bias2: Tensor | None = None,
        *,
        layout: Layout = "halves",
        is_transposed: bool = False,
        activation: ActivationName = "swiglu",
        activations: LayerActivations = "per-token",
        weight_scaling: WeightScaling = "row",
        method: DataFree | Quantizer | None = None,
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        rounded_gate: bool = False,
        ep: ExpertParallel | None = None,
        recipe: Recipe | None = None,
    ) -> Experts:
        """Quantize the float weights of experts, each expert's matrix by itself. They are not changed.

        Args:
            w13: bfloat16, float16 or float32 (g, n13, d); n13 = intermediate, or twice that with a gate.
            w2: (g, d, intermediate), of the dtype and device of w13.
            bias13, bias2: float (g, n13) and (g, d), or None.
            layout: how a gated activation's gate and up lie in n13: "halves" is all rows of the gate and then
                all of up, "interleaved" is gate, up, gate, up, as the module holds them.
            is_transposed: True for w13 (g, d, n13) and w2 (g, intermediate, d), as GPT-OSS has them.
            method, recipe: as of :meth:`Linear.from_float`. With a recipe, rounded_gate is True for
                activation "swiglu" without ep, so that the bits are those of training. All others: as in the
                class. With ep the weights are those of this rank's experts.

        Raises:
            TypeError, ValueError: naming the argument; also for weights that are NaN or infinite.

        Synchronises, to look for weights that are not finite.
        """
        chosen = activation_of(activation)
        _checks.is_one_of("layout", layout, LAYOUTS)
        _checks.is_bool("is_transposed", is_transposed)
        activations, quantizer = with_recipe(recipe, activations, weight_scaling, method)
        rounded_gate = rounded_gate or (recipe is not None and chosen.name == SWIGLU and ep is None)
        activations = check_options(activations, weight_scaling, check_finite, use_fast_accum)
        stacks = []
        for name, w in (("w13", w13), ("w2", w2)):
            _checks.has_dtype(name, _checks.is_tensor(name, w), _checks.FLOAT_DTYPES)
            _checks.has_rank(name, w, 3, "(g, k, n)" if is_transposed else "(g, n, k)")
            stacks.append(w.detach().transpose(1, 2) if is_transposed else w.detach())
        if w2.dtype is not w13.dtype:
            raise TypeError(f"w2: dtype is {w2.dtype}, must be {w13.dtype} as of w13")
        check_shapes(stacks[0], stacks[1], chosen, k_step(activations))
        check_float_weight("w13", stacks[0], tuple(stacks[0].shape))
        check_float_weight("w2", stacks[1], tuple(stacks[1].shape))
        # No inference tensors, which load_state_dict could not write outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            # Quantized before gate and up are interleaved, since a block of 16x16 has rows of one of them.
            packed13, packed2 = quantizer(stacks[0], "w13"), quantizer(stacks[1], "w2")
            format = format_of(packed13)
            packed13, packed2 = format.of_own_storage(packed13), format.of_own_storage(packed2)
            made = cls.from_quantized(
                packed13,
                packed2,
                bias13,
                bias2,
                layout=layout,
                activation=activation,
                activations=activations,
                check_finite=check_finite,
                use_fast_accum=use_fast_accum,
                rounded_gate=rounded_gate,
                ep=ep,
            )
            made.w13.weight_recipe = made.w2.weight_recipe = recipe
            return made

    @classmethod
    def from_quantized(
        cls,
        w13: Weight,
        w2: Weight,
        bias13: Tensor | None = None,
        bias2: Tensor | None = None,
        *,
        layout: Layout = "halves",
        activation: ActivationName = "swiglu",
        activations: LayerActivations = "per-token",
        check_finite: CheckFinite = "off",
        use_fast_accum: bool = False,
        rounded_gate: bool = False,
        ep: ExpertParallel | None = None,
    ) -> Experts:
        """Experts around NVFP4 stacks w13 (g, n13, d) and w2 (g, d, intermediate), whose memory they share.

        w13 is copied if its halves have to be interleaved; biases are always copied.

        Raises:
            TypeError, ValueError: as for :meth:`from_float`; also for a weight with groups or a rotation.
        """
        chosen = activation_of(activation)
        _checks.is_one_of("layout", layout, LAYOUTS)
        activations = check_options(activations, "row", check_finite, use_fast_accum)
        format = format_of(w13, "w13")
        check_weight_for(w13, format, activations, "w13")
        w13 = format.check(w13, "w13", 3)
        w2 = format.check(w2, "w2", 3)
        _checks.same_device("w2", w2._elements, w13.device, "w13")
        check_shapes(w13, w2, chosen, k_step(activations))
        check_exchange(ep, w13.shape[0], None, w13.shape[2], activations)
        if bias13 is not None:
            bias13 = stack_bias("bias13", bias13, w13)
        if bias2 is not None:
            bias2 = stack_bias("bias2", bias2, w2)
        with torch.inference_mode(False), torch.no_grad():
            if chosen.is_gated and layout == "halves":
                w13 = format.interleaved(w13)
                bias13 = None if bias13 is None else interleaved(bias13)
            made = cls.__new__(cls)
            torch.nn.Module.__init__(made)
            made._set_options(chosen, activations, check_finite, use_fast_accum, rounded_gate, ep)
            made.w13, made.w2 = StackedWeight.of(w13, bias13), StackedWeight.of(w2, bias2)
            made.float_layout = layout
        return made

    @property
    def num_experts(self) -> int:
        """g, the number of experts on all ranks together."""
        return self.w13.num_matrices if self.ep is None else self.ep.num_experts

    @property
    def hidden(self) -> int:
        """d: elements of a token."""
        return self.w13.in_features

    @property
    def intermediate(self) -> int:
        return self.w2.in_features

    @property
    def weight_scaling(self) -> WeightScaling:
        return self.w13.weight_scaling

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the float weights before quantization."""
        return self.w13.dtype

    @property
    def input_gradient(self) -> InputGradient:
        """How backward multiplies by the stored weights: an attribute that is set, not part of the state.

        "dequantized": each weight is dequantized to the dtype of x while its part of backward runs.
        "quantized": ``Q(dy) @ Q(W^T)^T`` on the kernels of NVFP4, with a copy of both weights, 0.5625 bytes
        an element, as of :attr:`fp4gemm.nn.Linear.input_gradient`. Setting raises ValueError.
        """
        return self._input_gradient

    @input_gradient.setter
    def input_gradient(self, value: InputGradient) -> None:
        _checks.is_one_of("input_gradient", value, INPUT_GRADIENTS)
        refuse_quantized_gradient(value, self.w13.format_name)
        self._input_gradient = value
        self.w13._transposed = self.w2._transposed = None

    def prepack(self) -> Experts:
        """Replace the codes and block scales of both weights by prepacked bytes, and return the module.

        ``forward`` does that by itself where it helps. Synchronises, unless they are prepacked already.

        Raises:
            RuntimeError, NotImplementedError: as :meth:`fp4gemm.nn.Linear.prepack`.
        """
        for weight in (self.w13, self.w2):
            weight._prepack(INPUTS[self.activations].tokens)
        return self

    def update_(
        self,
        w13: Tensor | Weight | None = None,
        w2: Tensor | Weight | None = None,
        bias13: Tensor | None = None,
        bias2: Tensor | None = None,
        *,
        layout: Layout = "halves",
        is_transposed: bool = False,
    ) -> Experts:
        """Write other weights of the same shapes into the memory of these, and return the module.

        The rules of :meth:`fp4gemm.nn.Linear.update_` hold: addresses stay, a captured CUDA graph sees the
        new weights, and after an error neither weight has changed.

        Args:
            w13, w2: float (g, n13, d) and (g, d, intermediate), or NVFP4Tensor; None keeps that weight.
            bias13, bias2: float (g, n13) and (g, d), for modules with biases, each only beside its weight;
                None keeps the bias.
            layout, is_transposed: as for :meth:`from_float`; an NVFP4Tensor is never transposed.

        Raises:
            TypeError, ValueError: as for :meth:`fp4gemm.nn.Linear.update_`; also if both weights are None.
        """
        _checks.is_one_of("layout", layout, LAYOUTS)
        _checks.is_bool("is_transposed", is_transposed)
        if w13 is None and w2 is None:
            raise ValueError("w13 and w2: got None for both, must be one of them at least")
        mixes = by_name[self.activation].is_gated and layout == "halves"
        with _EXCHANGE, torch.inference_mode(False), torch.no_grad():
            new = []
            for layer, name, w, bias in ((self.w13, "w13", w13, bias13), (self.w2, "w2", w2, bias2)):
                names = (name, "bias" + name[1:])
                if w is None:
                    if bias is not None:
                        raise ValueError(f"{names[1]}: must be None where {name} is None")
                    continue
                if is_transposed and isinstance(w, Tensor) and w.dim() == 3:
                    w = w.detach().transpose(1, 2)
                if mixes and layer is self.w13:
                    if isinstance(w, Tensor) and tuple(w.shape) == layer._shape:
                        w = layer._quantized(names[0], w, layer._shape)
                    w, bias = mixed(w, bias, layer._shape)
                new.append((layer, layer._new_weight(w, bias, names)))
            for layer, weight in new:
                layer._write(weight)
        return self

    def reset_parameters(self) -> None:
        """Forget the weights: zeros everywhere, and ``forward`` raises until others are loaded."""
        self.w13.reset_parameters()
        self.w2.reset_parameters()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict; with ``ep`` the stacks are DTensors (num_experts, ...), Shard(0).

        They lie over the memory of the weights. As plain tensors they would have one name and other contents
        on each rank, of which torch.distributed.checkpoint would silently save one rank's. The bounds of the
        scales stay plain.
        """
        state = super().state_dict(*args, **kwargs)
        if self.ep is None:
            return state
        from torch.distributed.tensor import DTensor, Shard

        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        inside = tuple(f"{prefix}{name}." for name, _ in self.named_children())
        for key, value in state.items():
            is_stack = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
            if is_stack and key.startswith(inside) and not key.endswith(f".{BOUND}"):
                mesh = self.ep._mesh(value.device.type)
                state[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Give the children, whose turn is next, this rank's part of each DTensor."""
        if self.ep is not None:
            from torch.distributed.tensor import DTensor

            for key, value in state_dict.items():
                if key.startswith(prefix) and isinstance(value, DTensor):
                    state_dict[key] = value.to_local()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        adapters13: Sequence[LowRank] = (),
        adapters2: Sequence[LowRank] = (),
    ) -> Tensor:
        """The weighted sum of the experts that each token names.

        Args:
            x: bfloat16, float16 or float32 (..., d), any leading dimensions.
            topk_ids: int32 or int64 (..., top_k), the leading dimensions those of x. -1, and any other id
                outside of 0..num_experts-1, names no expert. A token must not name an expert twice: the CPU
                refuses that, a GPU does not look.
            topk_weights: float32, bfloat16 or float16 (..., top_k).
            adapters13: what is added to W13, ahead of the activation: :class:`LowRank` matrices a (g, r, d)
                and b (g, n13, r), the rows of b in the order of W13, gate and up in turn. They multiply x
                itself, not Q(x), in the dtype of x.
            adapters2: what is added to W2: a (g, r, intermediate) and b (g, d, r), which multiply h.

        Returns:
            (..., d), dtype of x; zeros for a token that names no expert. Does not synchronise, except when it
            prepacks the weights, and for adapters with an x that is not bfloat16.

        Raises:
            TypeError, ValueError: naming the argument or the size that is wrong.
            NotImplementedError: a gradient or an adapter is wanted of experts with ``ep``.
            RuntimeError: no weights have been loaded yet.
        """
        modules = self._modules
        first: StackedWeight = modules["w13"]  # type: ignore[assignment]
        second: StackedWeight = modules["w2"]  # type: ignore[assignment]
        tokens = INPUTS[self.activations].tokens
        w13, w2 = first(tokens), second(tokens)
        # The checks take longer than the operator's launch, so they are omitted once they have passed with
        # these weights. A call that the operator refuses goes through them for its message.
        if (
            first.is_checked
            and second.is_checked
            and self.ep is None
            and self.check_finite == "off"
            and _checks.is_eager()
            and type(x) is Tensor
            and x.dim() == 2
            and (tokens != "16-bit" or x.dtype is not torch.float32)  # x is rounded first
            and not adapters13
            and not adapters2
            and type(topk_weights) is Tensor
            and not (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
        ):
            try:
                return multiply(self, x, topk_ids, topk_weights, w13, w2)
            except REFUSALS as error:
                # The checks copy an x that no kernel reads, and ids and weights that are not contiguous.
                if _checks.is_readable(x) and all(map(_is_contiguous, (topk_ids, topk_weights))):
                    args = (x, topk_ids, topk_weights, w13, w2)
                    return explained("fp4gemm.nn.Experts", error, self._checked_forward, *args)
        return self._checked_forward(x, topk_ids, topk_weights, w13, w2, adapters13, adapters2)

    def _checked_forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w13: OperandParts,
        w2: OperandParts,
        adapters13: Sequence[LowRank] = (),
        adapters2: Sequence[LowRank] = (),
    ) -> Tensor:
        d = self.w13.in_features
        x, ids, weights = check_tokens(x, topk_ids, topk_weights, d, w13.data.device)
        if self.check_finite != "off":
            refuse_not_finite(x, self)
        shape, dtype = x.shape, x.dtype
        in_bfloat16 = INPUTS[self.activations].tokens == "16-bit" and dtype is torch.float32
        x = x.to(torch.bfloat16) if in_bfloat16 else x  # no kernel multiplies float32 values
        formats = formats_of(self, x, w13)
        support.ready(x, "quantize")
        support.ready_for(x, "grouped_mm", formats)
        x = _checks.readable(x.reshape(-1, d))
        top_k = ids.shape[-1]
        ids, weights = ids.reshape(-1, top_k).contiguous(), weights.reshape(-1, top_k).contiguous()
        is_recorded = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        if is_recorded or adapters13 or adapters2:
            if self.ep is not None:
                raise NotImplementedError("ep: is set, must be None for gradients and for adapters")
            frozen = (self._frozen("w13", w13, adapters13), self._frozen("w2", w2, adapters2))
            with torch.autocast(x.device.type, enabled=False):
                y = adapted_experts(x, ids, weights, *frozen, self._block())
            return y.to(dtype).view(shape)
        if self.ep is not None:
            if self.batch_invariant:
                raise NotImplementedError("batch_invariant: is True with ep, must be False with it")
            y = exchanged(self.ep, x, ids, weights, w13, w2, self.activation, formats)
        else:
            y = multiply(self, x, ids, weights, w13, w2)
        if self.check_finite == "off" and not in_bfloat16 and not torch.compiler.is_compiling():
            self.w13.is_checked = self.w2.is_checked = "_hf_hook" not in self.w13.__dict__
        return y.to(dtype).view(shape)

    def _frozen(self, name: str, parts: OperandParts, adapters: Sequence[LowRank]) -> Frozen:
        """A weight for a call that autograd may record, with its adapters, which are checked."""
        weight: StackedWeight = getattr(self, name)
        if not torch.compiler.is_compiling() and parts.data.is_inference():
            raise RuntimeError(
                f"{name}: was made in inference mode, must not be where gradients are wanted; load the model "
                "outside of torch.inference_mode()"
            )
        for i, adapter in enumerate(adapters):
            check_adapter(f"adapters{name[1:]}[{i}]", adapter, weight._shape, parts.data.device)
        transposed = None
        if self._input_gradient == "quantized" and torch.is_grad_enabled():
            transposed = weight._held_transpose(parts, transpose)
        return Frozen(parts, weight.in_features, tuple(adapters), transposed)

    def _block(self) -> Block:
        options = {"batch_invariant": self.batch_invariant, "use_fast_accum": self.use_fast_accum}
        scaling = cast(int, INPUTS[self.activations].scaling)
        return Block(scaling, by_name[self.activation], self.rounded_gate, options)

    def extra_repr(self) -> str:
        finite = "" if self.check_finite == "off" else f", check_finite={self.check_finite!r}"
        names = ("batch_invariant", "use_fast_accum", "rounded_gate")
        fast = "".join(f", {name}=True" for name in names if getattr(self, name))
        return f"activation={self.activation!r}, activations={self.activations!r}{finite}{fast}"


# ---- the weights


class StackedWeight(WeightModule):
    """W (g, n, k) in NVFP4 and a bias (g, n): one of the two weights of :class:`fp4gemm.nn.Experts`.

    ``weight`` is the NVFP4Tensor, and ``dequantize_weight()`` its values. It is called without arguments and
    returns a :class:`OperandParts`; a call brings weights that accelerate has offloaded to the device.

    Buffers:
        weight_codes: uint8 (g, n, k/2), packed e2m1, low nibble = even k.
        weight_scales: float8_e4m3fn (g, ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero.
        weight_amax: float32 (g, n), or (g, 1) with weight_scaling="tensor".
        weight_e4m3_max: int32 (1,), the e4m3_max of the block scales, 448 or 256.
        weight_prepacked: uint8 (g, bytes), or int8 for FP8 tokens, in place of codes and scales once they are
            prepacked; not in a state_dict.
        bias: float32 (g, n), or None.
    """

    _public = "Experts"
    # What the last call returned. The names of WeightModule that begin so are not copied or pickled.
    _known_held: OperandParts | None = None
    _known_tokens: TokenForm = "nvfp4"
    is_checked = False  # a forward of Experts with this weight passed its checks; reset with the buffers

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_scaling: WeightScaling = "row",
        format: FormatName = "nvfp4",
    ) -> None:
        super().__init__(
            (num_experts, out_features, in_features), bias, device, dtype, weight_scaling, format
        )

    @classmethod
    def of(cls, weight: Weight, bias: Tensor | None) -> StackedWeight:
        """The module around a stack (g, n, k), whose memory it shares, and a float bias (g, n), copied."""
        g, n, k = weight.shape
        format = format_of(weight).name
        made = cls(g, n, k, bias is not None, device="meta", dtype=weight.dtype, format=format)
        return made._adopt(weight, bias)

    def forward(self, tokens: TokenForm = "nvfp4") -> OperandParts:
        """The tensors of the weight, prepacked first where the kernels of the device read prepacked weights.

        Args:
            tokens: what the tokens of the product are.

        Raises:
            RuntimeError: no weight has been loaded yet.
        """
        is_traced = torch.compiler.is_compiling()
        known = self._known_held
        if known is not None and not is_traced and self._known_tokens == tokens and self._is_as_known():
            return known
        self._require_weight()
        if not is_traced and not self._is_prepacked_for(tokens):
            self._prepack_where_it_helps(tokens)
        held = self._operand_parts()
        # Not weights that accelerate brings to the device for one forward, nor those still to be prepacked.
        is_final = held.scales is None or self._is_captured
        is_final = is_final or not support.streams_prepacked(held.data.device, tokens)
        if is_final and not is_traced and "_hf_hook" not in self.__dict__:
            self._known_held, self._known_tokens = held, tokens
        return held

    def _is_as_known(self) -> bool:
        """Whether no buffer was replaced since the last call, and e4m3_max was not written."""
        buffers, known = self._buffers, self._known_held
        bound = buffers.get(BOUND)
        return (
            known is not None
            and buffers.get(CODES if known.scales is not None else PREPACKED) is known.data
            and buffers.get(SCALES) is known.scales
            and buffers.get(AMAX) is known.amax
            and buffers.get("bias") is known.bias
            and bound is self._known[-1]
            and version(bound) == self._known_version
        )

    def _remember_buffers(self, is_bound_read: bool = True) -> None:
        super()._remember_buffers(is_bound_read)
        self._known_held, self.is_checked = None, False

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_matrices}, out_features={self.out_features}, "
            f"in_features={self.in_features}, bias={self.bias is not None}{self._shown_scaling}"
        )


def mixed(
    w: Tensor | Weight, bias: Tensor | None, shape: tuple[int, ...]
) -> tuple[Tensor | Weight, Tensor | None]:
    """A weight and a bias whose halves are interleaved.

    A tensor of another shape is returned unchanged, so that the checks that follow name it.
    """
    is_plain = isinstance(w, Tensor) or (isinstance(w, Weight) and w.offs is None)
    if is_plain and tuple(w.shape) == shape:
        w = interleaved(w.detach()) if isinstance(w, Tensor) else format_of(w).interleaved(w)
    if isinstance(bias, Tensor) and tuple(bias.shape) == shape[:2]:
        bias = interleaved(bias.detach())
    return w, bias


# ---- the checks of the arguments


def activation_of(name: object) -> Activation:
    """The row of the table of activations; ValueError if the name is not in it."""
    _checks.is_one_of("activation", name, [*names(is_gated=True), *names(is_gated=False)])
    return by_name[name]  # type: ignore[index]


def _check_rounded_gate(value: object, activation: Activation, ep: object) -> None:
    """Raise unless rounded_gate is a bool, and True for SwiGLU of the experts of one process alone."""
    _checks.is_bool("rounded_gate", value)
    if value and activation.name != SWIGLU:
        raise ValueError(
            f"rounded_gate: got True with activation {activation.name!r}, must be False unless that is "
            f"{SWIGLU!r}"
        )
    if value and ep is not None:
        raise NotImplementedError("rounded_gate: got True with ep, must be False with it")


def check_shapes(w13: Tensor | Weight, w2: Tensor | Weight, activation: Activation, step: int) -> None:
    """Raise ValueError unless w13 (g, n13, d) and w2 (g, d, intermediate) belong together.

    step: what d and intermediate are multiples of.
    """
    g, n13, d = w13.shape
    _checks.is_multiple("w13", "d", d, step)
    if activation.is_gated:
        _checks.is_multiple("w13", "n13, gate and up together,", n13, 2 * step)
    else:
        _checks.is_multiple("w13", "n13", n13, step)
    wanted = (g, d, activation.width(n13))
    if tuple(w2.shape) != wanted:
        raise ValueError(
            f"w2: shape is {tuple(w2.shape)}, must be (g, d, intermediate), which is {wanted} beside w13 "
            f"(g, n13, d) of shape {tuple(w13.shape)} with activation {activation.name!r}"
        )


def check_tokens(
    x: object, topk_ids: object, topk_weights: object, d: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a forward themselves; raises unless they belong together."""
    x = _checks.is_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != d:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {d}), {d} = hidden")
    _checks.same_device("x", x, device, "w13")
    lead = x.shape[:-1]
    ids, weights = _checks.is_tensor("topk_ids", topk_ids), _checks.is_tensor("topk_weights", topk_weights)
    if ids.dim() == 0 or ids.shape[:-1] != lead:
        wanted = ", ".join(map(str, (*lead, "top_k")))
        raise ValueError(f"topk_ids: shape is {tuple(ids.shape)}, must be ({wanted})")
    _checks.has_shape("topk_weights", weights, tuple(ids.shape), " as of topk_ids")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    return x, ids, weights


def stack_bias(name: str, bias: object, weight: Tensor | Weight) -> Tensor:
    """The bias itself; raises unless it is a float tensor (g, n) beside the weight (g, n, k)."""
    return check_bias(bias, *weight.shape[:2], device=weight.device, name=name)


# ---- the operator


def formats_of(layer: Experts, x: Tensor, w13: OperandParts) -> tuple[str, str]:
    """The formats of the operands of both products, as :func:`support.ready_for` names them."""
    tokens = INPUTS[layer.activations].tokens
    if tokens == "mxfp8":
        return tokens, layer.w13.format_name
    if tokens == "fp8":
        return "e4m3", "nvfp4" if w13.scales is not None else "prepacked_fp8"
    if tokens == "16-bit":
        a = "bf16" if x.dtype is torch.bfloat16 else "fp16"
    else:
        a = "fp16" if support.streams_prepacked(x.device) else "nvfp4"
    return a, "nvfp4" if w13.scales is not None else "prepacked"


def multiply(
    layer: Experts, x: Tensor, ids: Tensor, scores: Tensor, w13: OperandParts, w2: OperandParts
) -> Tensor:
    """The operator ``experts`` with the weights and options of a layer."""
    more = (layer.batch_invariant, layer.use_fast_accum)
    scaling = INPUTS[layer.activations].scaling
    if layer.rounded_gate:
        return swiglu_experts(x, ids, scores, w13, w2, cast(int, scaling), *more)
    if w13.amax is None:  # an MX format, which the operator does not read
        return composed_experts(x, ids, scores, w13, w2, cast(int, scaling), layer._activation, *more)
    arguments = ExpertsCall.arguments(x, ids, scores, w13, w2, scaling, layer._activation, *more)
    y: Tensor = operators.experts(*arguments)
    return y


def _is_contiguous(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_contiguous()
