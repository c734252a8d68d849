"""The layers of peft on NVFP4 weights, and how a merged weight is rounded; importing it imports peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor

from ... import activations
from ..._names import STACKED
from ...calibration.statistics import InputStatistics
from ...models.qat import random_codes
from ...nn._adapted import LowRank
from ...nn._formats import Weight, interleaved
from ...nn._inputs import check_float_weight
from ...nn._weight import WeightModule
from ...nn.experts import Experts, StackedWeight
from ...recipe import Quantizer, Recipe

UNMERGE = (
    "unmerge: the merged weight was rounded to NVFP4, so that the base weight cannot be had back from it; "
    "load the base model and the adapter again"
)


# ---- the names by which peft finds experts


class Names:
    """``named_parameters`` of experts: their stacks under the names of the float model, without memory."""

    def __init__(self, module: Experts) -> None:
        self.module = module

    def __call__(self, prefix: str = "", **_: Any) -> Iterator[tuple[str, Any]]:
        for name in stacks_of(self.module):
            yield f"{prefix}.{name}" if prefix else name, _stand_in(self.module, name)


def stacks_of(module: Experts) -> dict[str, StackedWeight]:
    """Both weights of experts by the names of the parameters of the float model."""
    has_gate = activations.by_name[cast(Any, module.activation)].is_gated
    return {STACKED.first(has_gate): module.w13, STACKED.down: module.w2}


def _stand_in(module: Experts, name: str) -> Tensor:
    """A tensor (g, n, k) with the dtype and device of a float stack, over the memory of one element."""
    weight = stacks_of(module)[name]
    return torch.empty((), dtype=weight.dtype, device=weight._device).expand(weight._shape)


# ---- layers


class Linear(lora.Linear):
    """LoRA of peft on :class:`fp4gemm.nn.Linear`: ``merge`` rounds the sum to NVFP4."""

    rounding: Rounding | None = None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """W = Q(W + the adapters' matrices), by ``rounding``, or as ``update_`` of the layer rounds.

        Raises:
            ValueError: an adapter is a variant of LoRA, such as DoRA, or has a bias; the sum has NaN or
                infinity.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        for name in names:
            if name in self.lora_variant or self.lora_bias[name]:
                raise ValueError(
                    f"adapter_names: {name!r} is a variant of LoRA or has a bias, must be plain to be merged"
                )
        a, b, scale = self.lora_A, self.lora_B, self.scaling
        deltas = [scale[n] * (b[n].weight.float() @ a[n].weight.float()) for n in names]
        _merge(self, self.get_base_layer(), "", deltas, names)

    def unmerge(self) -> None:
        """Raises RuntimeError: the base weight is gone."""
        raise RuntimeError(UNMERGE)


class ParamWrapper(lora.ParamWrapper):  # peft looks for this name
    """LoRA of peft on a stack of :class:`fp4gemm.nn.Experts`, which ``parameter_name`` names.

    Two of them are nested, as peft nests them for the float model, and the outer one calls the experts with
    the adapters of both. The matrices of peft, (g * r, k) and (n, r * g), are views of a (g, r, k) and
    b (g, n, r) of :class:`fp4gemm.nn.LowRank`; rows of gate and up have the order of the float model.
    """

    rounding: Rounding | None = None

    def __init__(self, base_layer: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("parameter_name") is None:
            name = kwargs.get("target_name", "experts")
            raise ValueError(
                f"target_modules: matches {name!r}, a module of experts, must not; name its stacks in "
                f"target_parameters, {STACKED.gate_up!r} and {STACKED.down!r} for example"
            )
        init = getattr(kwargs.get("config"), "init_lora_weights", True)
        if not isinstance(init, bool) and init != "gaussian":
            raise ValueError(
                f"init_lora_weights: got {init!r}, must be True, False or 'gaussian' for experts"
            )
        super().__init__(base_layer, adapter_name, *args, **kwargs)

    def get_param(self) -> Tensor:
        """A stand-in (g, n, k) of the float stack, whose values nothing reads."""
        return _stand_in(self.get_base_layer(), self.parameter_name)

    def low_rank(self, name: str) -> LowRank:
        """The adapter as :class:`fp4gemm.nn.Experts` takes it."""
        a = self.lora_A[name].weight.unflatten(0, (self.num_experts, -1))
        b = self.lora_B[name].weight.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        experts = self.get_base_layer()
        if self.role == "w13" and _has_halves(experts):
            b = interleaved(b)
        return LowRank(a, b, float(self.scaling[name]))

    @property
    def role(self) -> str:
        """ "w13" or "w2", the weight of the experts that is adapted."""
        return "w2" if self.parameter_name == STACKED.down else "w13"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts with the active adapters of this stack, and of the other one if it has some."""
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)  # the check refuses another value than None
        found: dict[str, list[LowRank]] = {"adapters13": [], "adapters2": []}
        layer: Any = self
        while isinstance(layer, ParamWrapper):
            if layer.disable_adapters and layer.merged:
                layer.unmerge()
            if not layer.disable_adapters and not layer.merged:
                active = [n for n in layer.active_adapters if n in layer.lora_A]
                found[f"adapters{layer.role[1:]}"] += map(layer.low_rank, active)
            layer = layer.base_layer
        result: Tensor = layer(x, *args, **found, **kwargs)
        return result

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """W[e] = Q(W[e] + the adapters' matrices), by ``rounding``, or as ``update_`` of the experts rounds.

        Raises:
            ValueError: the sum has NaN or infinity.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        experts: Experts = self.get_base_layer()
        weight: StackedWeight = getattr(experts, self.role)
        deltas = [s * torch.bmm(b.float(), a.float()) for a, b, s in map(self.low_rank, names)]
        _merge(self, weight, self.role, deltas, names, experts)

    def unmerge(self) -> None:
        """Raises RuntimeError: the base weight is gone."""
        raise RuntimeError(UNMERGE)


def _has_halves(experts: Experts) -> bool:
    is_gated = activations.by_name[cast(Any, experts.activation)].is_gated
    return is_gated and experts.float_layout == "halves"


# ---- merging


class Rounding:
    """How the sum of a weight and its adapters is quantized as the layer is, for :func:`merge_and_unload`.

    Args:
        method: None as ``update_`` of the layer rounds, unless there are statistics.
        statistics: of the layer's input, by "" of a linear layer, or "w13" and "w2".
        generator: of "stochastic".
    """

    def __init__(
        self,
        method: str | None = None,
        statistics: Mapping[str, InputStatistics] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.method, self.statistics, self.generator = method, statistics or {}, generator

    def __call__(self, w: Tensor, layer: WeightModule, name: str, kind: str) -> Weight:
        """w (n, k) or (g, n, k) in the format of the layer; kind are the activations of the layer."""
        if self.method == "stochastic":
            like = layer._nvfp4_weight
            codes = random_codes(w, like, self.generator)
            return like._with(codes, like.scales, like.amax, None)
        known = self.statistics.get(name)
        if self.method is None and known is None:
            return layer._requantized(w)
        data: Any = "none"
        if known is not None:
            data = "mean square" if known.second_moment is None else "second moment"
        recipe = Recipe(
            activations=cast(Any, kind),
            weight_scaling=layer.weight_scaling,
            method=cast(Any, self.method),
            data=data,
        )
        return Quantizer(recipe, {} if known is None else {name: known})(w, name)


def _merge(
    layer: Linear | ParamWrapper,
    weight: WeightModule,
    name: str,
    deltas: list[Tensor],
    names: list[str],
    experts: Experts | None = None,
) -> None:
    """Write Q(W + the deltas) to the weight of a layer of peft, and note the adapters as merged."""
    if not names:
        return
    with torch.inference_mode(False), torch.no_grad():
        w = weight.dequantize_weight()
        for delta in deltas:
            w += delta.detach()
        check_float_weight(f"{layer.__class__.__name__}.merge", w, tuple(w.shape))
        rounding = Rounding() if layer.rounding is None else layer.rounding
        kind = cast(Any, weight if experts is None else experts).activations
        # Gate and up are apart while the weight is quantized, as in Experts.from_float.
        is_drawn = rounding.method == "stochastic"  # element by element, so that no order matters
        is_mixed = experts is not None and name == "w13" and _has_halves(experts) and not is_drawn
        w = torch.cat((w[:, 0::2], w[:, 1::2]), 1) if is_mixed else w
        made = rounding(w, weight, name, kind)
        weight.weight = weight._format.interleaved(made) if is_mixed else made  # type: ignore[misc]
    layer.merged_adapters.extend(names)
