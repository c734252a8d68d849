"""fp4gemm.nn.Experts: the experts of a mixture, their weights in NVFP4, as one module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks, _transforms, activations, support
from .._refusals import REFUSALS, explained
from ..activations import Activation, ActivationName
from ..containers.nvfp4 import NVFP4Tensor
from ._experts import (
    LAYOUTS,
    ExpertsScaling,
    Layout,
    activation_of,
    check_experts_options,
    check_shapes,
    check_tokens,
    formats_of,
    multiply,
    stack_bias,
)
from ._inputs import (
    CheckFinite,
    WeightScaling,
    check_float_weight,
    check_quantized_weight,
    refuse_not_finite,
)
from ._methods import DataFree, Quantizer, as_quantizer
from ._parallel import DividedExperts, check_exchange
from ._parallel import forward as parallel_forward
from ._stack import HeldWeight, StackedWeight, interleaved, interleaved_stack, mixed, of_own_storage
from ._weight import _EXCHANGE

if TYPE_CHECKING:
    from ..distributed import ExpertParallel


class Experts(DividedExperts):
    """The experts of a mixture: two NVFP4 products for each expert that a token names, and a weighted sum.

    For token i with the experts e = topk_ids[i, j] and the weights topk_weights[i, j]::

        h[i, j] = act(Q(x[i]) @ Q(W13[e]).T + b13[e])
        y[i]    = sum over j of topk_weights[i, j] * (Q(h[i, j]) @ Q(W2[e]).T + b2[e])

    Q is the NVFP4 cast of :func:`fp4gemm.quantize` with one amax for each row, act the activation. A gated
    activation reads rows 2i and 2i+1 of W13[e] as gate and up. The sum is in float32, in the order of j.
    Routing, both products and the sum are one operator, ``torch.ops.fp4gemm.experts``, which does not
    synchronise: a captured CUDA graph may be replayed with other experts in the same memory. Definition:
    :mod:`fp4gemm.reference.moe`.

    The weights are buffers of the modules ``w13`` and ``w2`` and are prepacked as those of
    :class:`fp4gemm.nn.Linear` are: the first ``forward`` on compute capability 9.0 that is neither traced nor
    captured does it. ``state_dict``, pickles, copies and moves have codes and scales. The module is forward
    only. A new one has no weights; make it with ``from_float``, ``from_quantized`` or ``quantize_model``.

    Args:
        num_experts: g, 1 to 2048.
        hidden: d, elements of a token; a multiple of 32.
        intermediate: elements of h; a multiple of 32. W13 has 2 * intermediate rows for a gated activation.
        activation: the name of an activation of :func:`fp4gemm.mm`, gated ("swiglu", for example) or not.
        bias: whether both products add a bias.
        device: where the buffers are made.
        dtype: the dtype of the float weights before quantization; None is torch's default dtype. No buffer
            has it, and the output has the dtype of each input.
        activation_scaling: "row" quantizes x and h with one amax for each row. "none": neither is quantized
            (W4A16), but x is rounded to bfloat16 if it is float32, and so is the result then.
        weight_scaling: "row" gives each output channel of each expert its own amax, "tensor" one to each
            expert's matrix.
        check_finite: "off", or "raise" for debugging: ``forward`` raises ValueError if x has a NaN or an
            infinity, as :class:`fp4gemm.nn.Linear` does.
        ep: None, or the exchange of tokens between ranks, each of which has num_experts / ranks of the
            experts in its weights: the ones from ``ep.first_expert`` on (docs/distributed.md). num_experts
            and topk_ids are then those of all ranks, and every rank calls ``forward``, also without tokens.
            ``state_dict`` has DTensors of all ranks' experts, for torch.distributed.checkpoint.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

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
        activation_scaling: ExpertsScaling = "row",
        weight_scaling: WeightScaling = "row",
        check_finite: CheckFinite = "off",
        ep: ExpertParallel | None = None,
    ) -> None:
        _checks.is_int("num_experts", num_experts, 1)
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            _checks.is_int(name, size, 1)
            _checks.is_multiple(name, "k", size, _checks.K_STEP_MM)
        chosen = activation_of(activation)
        _checks.is_bool("bias", bias)
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        check_experts_options(activation_scaling, weight_scaling, check_finite)
        check_exchange(ep, None, num_experts, hidden, activation_scaling)
        super().__init__()
        self._set_options(chosen, activation_scaling, check_finite, ep)
        num_experts = num_experts if ep is None else ep.num_local_experts
        n13 = 2 * intermediate if chosen.is_gated else intermediate
        self.w13 = StackedWeight(num_experts, n13, hidden, bias, device, dtype, weight_scaling=weight_scaling)
        self.w2 = StackedWeight(
            num_experts, hidden, intermediate, bias, device, dtype, weight_scaling=weight_scaling
        )

    def _set_options(
        self,
        activation: Activation,
        activation_scaling: ExpertsScaling,
        check_finite: CheckFinite,
        ep: ExpertParallel | None,
    ) -> None:
        self.check_finite, self.ep = check_finite, ep
        self.activation = activation.name
        self.activation_scaling = activation_scaling
        self._activation = activation.number
        self._scaling = 1 if activation_scaling == "row" else 0

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
        activation_scaling: ExpertsScaling = "row",
        weight_scaling: WeightScaling = "row",
        weight_method: DataFree | Quantizer = "round",
        check_finite: CheckFinite = "off",
        ep: ExpertParallel | None = None,
    ) -> Experts:
        """Quantize the float weights of experts, each expert's matrix by itself. They are not changed.

        Args:
            w13: bfloat16, float16 or float32 (g, n13, d); n13 = intermediate, or twice that with a gate.
            w2: (g, d, intermediate), of the dtype and device of w13.
            bias13, bias2: float (g, n13) and (g, d), or None.
            layout: how a gated activation's gate and up lie in n13: "halves" is all rows of the gate and then
                all of up, "interleaved" is gate, up, gate, up, as the module holds them.
            is_transposed: True for w13 (g, d, n13) and w2 (g, intermediate, d), as GPT-OSS has them.
            weight_method: as of :meth:`Linear.from_float`; all others: as in the class. With ep the weights
                are those of this rank's experts.

        Raises:
            TypeError, ValueError: naming the argument; also for weights that are NaN or infinite.

        Synchronises, to look for weights that are not finite.
        """
        chosen = activation_of(activation)
        _checks.is_one_of("layout", layout, LAYOUTS)
        _checks.is_bool("is_transposed", is_transposed)
        check_experts_options(activation_scaling, weight_scaling, check_finite)
        quantizer = as_quantizer(weight_method, weight_scaling)
        stacks = []
        for name, w in (("w13", w13), ("w2", w2)):
            _checks.has_dtype(name, _checks.is_tensor(name, w), _checks.FLOAT_DTYPES)
            _checks.has_rank(name, w, 3, "(g, k, n)" if is_transposed else "(g, n, k)")
            stacks.append(w.detach().transpose(1, 2) if is_transposed else w.detach())
        if w2.dtype is not w13.dtype:
            raise TypeError(f"w2: dtype is {w2.dtype}, must be {w13.dtype} as of w13")
        check_shapes(stacks[0], stacks[1], chosen)
        check_float_weight("w13", stacks[0], tuple(stacks[0].shape))
        check_float_weight("w2", stacks[1], tuple(stacks[1].shape))
        # No inference tensors, which load_state_dict could not write outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if chosen.is_gated and layout == "halves":
                stacks[0] = interleaved(stacks[0])
                bias13 = None if bias13 is None else interleaved(stack_bias("bias13", bias13, stacks[0]))
            packed13 = of_own_storage(quantizer(stacks[0], "w13"))
            packed2 = of_own_storage(quantizer(stacks[1], "w2"))
            return cls.from_quantized(
                packed13,
                packed2,
                bias13,
                bias2,
                layout="interleaved",
                activation=activation,
                activation_scaling=activation_scaling,
                check_finite=check_finite,
                ep=ep,
            )

    @classmethod
    def from_quantized(
        cls,
        w13: NVFP4Tensor,
        w2: NVFP4Tensor,
        bias13: Tensor | None = None,
        bias2: Tensor | None = None,
        *,
        layout: Layout = "halves",
        activation: ActivationName = "swiglu",
        activation_scaling: ExpertsScaling = "row",
        check_finite: CheckFinite = "off",
        ep: ExpertParallel | None = None,
    ) -> Experts:
        """Experts around NVFP4 stacks w13 (g, n13, d) and w2 (g, d, intermediate), whose memory they share.

        w13 is copied if its halves have to be interleaved; biases are always copied.

        Raises:
            TypeError, ValueError: as for :meth:`from_float`; also for a weight with groups or a rotation.
        """
        chosen = activation_of(activation)
        _checks.is_one_of("layout", layout, LAYOUTS)
        check_experts_options(activation_scaling, "row", check_finite)
        w13 = check_quantized_weight(w13, "w13", 3)
        w2 = check_quantized_weight(w2, "w2", 3)
        _checks.same_device("w2", w2.codes, w13.device, "w13")
        check_shapes(w13, w2, chosen)
        check_exchange(ep, w13.shape[0], None, w13.shape[2], activation_scaling)
        if bias13 is not None:
            bias13 = stack_bias("bias13", bias13, w13)
        if bias2 is not None:
            bias2 = stack_bias("bias2", bias2, w2)
        with torch.inference_mode(False), torch.no_grad():
            if chosen.is_gated and layout == "halves":
                w13 = interleaved_stack(w13)
                bias13 = None if bias13 is None else interleaved(bias13)
            made = cls.__new__(cls)
            torch.nn.Module.__init__(made)
            made._set_options(chosen, activation_scaling, check_finite, ep)
            made.w13, made.w2 = StackedWeight.of(w13, bias13), StackedWeight.of(w2, bias2)
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

    def prepack(self) -> Experts:
        """Replace the codes and block scales of both weights by prepacked bytes, and return the module.

        ``forward`` does that by itself where it helps. Synchronises, unless they are prepacked already.

        Raises:
            RuntimeError, NotImplementedError: as :meth:`fp4gemm.nn.Linear.prepack`.
        """
        self.w13.prepack()
        self.w2.prepack()
        return self

    def update_(
        self,
        w13: Tensor | NVFP4Tensor | None = None,
        w2: Tensor | NVFP4Tensor | None = None,
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
        mixes = activations.by_name[self.activation].is_gated and layout == "halves"
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
                    w, bias = mixed(w, bias, layer._shape)
                new.append((layer, layer._new_weight(w, bias, names)))
            for layer, weight in new:
                layer._write(weight)
        return self

    def reset_parameters(self) -> None:
        """Forget the weights: zeros everywhere, and ``forward`` raises until others are loaded."""
        self.w13.reset_parameters()
        self.w2.reset_parameters()

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The weighted sum of the experts that each token names.

        Args:
            x: bfloat16, float16 or float32 (..., d), any leading dimensions.
            topk_ids: int32 or int64 (..., top_k), the leading dimensions those of x. -1, and any other id
                outside of 0..num_experts-1, names no expert. A token must not name an expert twice: the CPU
                refuses that, a GPU does not look.
            topk_weights: float32, bfloat16 or float16 (..., top_k).

        Returns:
            (..., d), dtype of x; zeros for a token that names no expert. Does not synchronise, except when it
            prepacks the weights.

        Raises:
            TypeError, ValueError: naming the argument or the size that is wrong.
            NotImplementedError: x or topk_weights requires grad while grad mode is on.
            RuntimeError: no weights have been loaded yet.
        """
        if self.ep is not None:
            return parallel_forward(self, self.ep, x, topk_ids, topk_weights)
        modules = self._modules
        first: StackedWeight = modules["w13"]  # type: ignore[assignment]
        second: StackedWeight = modules["w2"]  # type: ignore[assignment]
        quantizes = self.activation_scaling != "none"
        w13, w2 = first(quantizes), second(quantizes)
        # The checks take longer than the operator's launch, so they are omitted once they have passed with
        # these weights. A call that the operator refuses goes through them for its message.
        if (
            first.is_checked
            and second.is_checked
            and self.check_finite == "off"
            and _transforms.is_eager()
            and type(x) is Tensor
            and x.dim() == 2
            and (quantizes or x.dtype is not torch.float32)  # x is rounded first
            and not (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
        ):
            try:
                return multiply(self, x, topk_ids, topk_weights, w13, w2)
            except REFUSALS as error:
                # The checks copy an x that no kernel reads, and ids and weights that are not contiguous.
                if _checks.is_readable(x) and all(map(_is_contiguous, (topk_ids, topk_weights))):
                    args = (x, topk_ids, topk_weights, w13, w2)
                    return explained("fp4gemm.nn.Experts", error, self._checked_forward, *args)
        return self._checked_forward(x, topk_ids, topk_weights, w13, w2)

    def _checked_forward(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: HeldWeight, w2: HeldWeight
    ) -> Tensor:
        d = self.w13.in_features
        x, ids, weights = check_tokens(x, topk_ids, topk_weights, d, w13.amax.device)
        if self.check_finite != "off":
            refuse_not_finite(x, self)
        dtype, in_bfloat16 = x.dtype, self.activation_scaling == "none" and x.dtype is torch.float32
        x = x.to(torch.bfloat16) if in_bfloat16 else x  # no kernel multiplies float32 values
        support.ready(x, "quantize")
        support.ready_for(x, "grouped_mm", formats_of(self, x, w13))
        y = multiply(
            self,
            _checks.readable(x.reshape(-1, d)),
            ids.reshape(-1, ids.shape[-1]).contiguous(),
            weights.reshape(-1, ids.shape[-1]).contiguous(),
            w13,
            w2,
        )
        if self.check_finite == "off" and not in_bfloat16 and not torch.compiler.is_compiling():
            self.w13.is_checked = self.w2.is_checked = "_hf_hook" not in self.w13.__dict__
        return y.to(dtype) if x.dim() == 2 else y.to(dtype).view(x.shape)

    def extra_repr(self) -> str:
        finite = "" if self.check_finite == "off" else f", check_finite={self.check_finite!r}"
        return f"activation={self.activation!r}, activation_scaling={self.activation_scaling!r}{finite}"


def _is_contiguous(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_contiguous()
