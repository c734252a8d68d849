"""Random models in bf16, FP8 and NVFP4 that share their weights' values, and the cache and tokens of a step.

Weights are drawn one layer at a time, from a seed of their own, and quantized by
``fp4gemm.models.quantize_model``, as a user would do it; a model in NVFP4 never exists in bf16 as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import fp4gemm
import torch
from fp4gemm.activations import ActivationName
from fp4gemm.models import QuantizeReport
from fp4gemm.recipe import LayerActivations
from torch import Tensor, nn

from ..measure.library import error_line
from . import emulation
from .decoder import CausalLM, DecoderLayer, StaticLayer
from .emulation import emulated
from .experts import Experts, OssExperts
from .fp8 import in_fp8
from .shapes import Shape

DTYPE = torch.bfloat16
FLOAT, MERGED, FP8 = "bf16", "bf16 merged", "fp8 merged"


class Kind(NamedTuple):
    """How a model in NVFP4 is made, and what its products do."""

    activations: LayerActivations  # of quantize_model
    through: emulation.Through
    is_fusable: bool  # whether norms are those of transformers, which quantize_model fuses
    use_fast_accum: bool = False


# The models in NVFP4 by name.
QUANTIZED = {
    "fp4gemm W4A4": Kind("per-token", emulation.W4A4, True),
    "fp4gemm W4A16": Kind("a16", emulation.W4A16, False),
    "fp4gemm W4A8": Kind("fp8", emulation.W4A8, True),
    "fp4gemm W4A8 fast": Kind("fp8", emulation.W4A8, True, True),
}
VARIANTS = (FLOAT, MERGED, FP8, *QUANTIZED)


def gaussian(gen: torch.Generator, *sizes: int, scale: float = 1.0) -> Tensor:
    made = torch.randn(*sizes, device=gen.device, generator=gen, dtype=DTYPE)
    return made.mul_(scale) if scale != 1.0 else made


def layer_weights(shape: Shape, index: int, device: torch.device) -> dict[str, Tensor]:
    """The weights of one layer by name, those of q, k, v and of gate, up merged.

    They are scaled by 1 / sqrt(k). Those whose product is added to the residual are also scaled by the number
    of such additions, as GPT-2 initialises them, so that an error does not grow from layer to layer.
    """
    gen = torch.Generator(device).manual_seed(index + 1)
    branch = (2 * shape.num_layers) ** -0.5
    d, f, heads = shape.hidden, shape.intermediate, shape.num_heads * shape.head_dim
    norms = ("input_norm", "post_norm", *(("q_norm", "k_norm") if shape.qk_norm else ()))
    made = {name: gaussian(gen, shape.head_dim if name[1] == "_" else d, scale=0.1).add_(1) for name in norms}
    made["qkv"] = gaussian(gen, shape.qkv_rows, d, scale=d**-0.5)
    made["o"] = gaussian(gen, d, heads, scale=branch * heads**-0.5)
    e = shape.num_experts
    first, second = ((d, 2 * f), (f, d)) if shape.is_oss else ((2 * f, d), (d, f))
    stack = (e,) if e else ()
    made["gate_up"] = gaussian(gen, *stack, *first, scale=d**-0.5)
    made["down"] = gaussian(gen, *stack, *second, scale=branch * f**-0.5)
    if e:
        made["router"] = gaussian(gen, e, d, scale=d**-0.5)
    if shape.bias:
        sizes = {"qkv": (shape.qkv_rows,), "o": (d,), "router": (e,), "gate_up": (e, 2 * f), "down": (e, d)}
        made |= {f"{name}_bias": gaussian(gen, *size, scale=0.1) for name, size in sizes.items()}
    return made


def end_weights(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """The weights outside of layers."""
    gen = torch.Generator(device).manual_seed(0)
    return {
        "embed": gaussian(gen, shape.vocab, shape.hidden),
        "norm": gaussian(gen, shape.hidden, scale=0.1).add_(1),
        "lm_head": gaussian(gen, shape.vocab, shape.hidden, scale=shape.hidden**-0.5),
    }


@dataclasses.dataclass
class Variants:
    """Models of one shape with the same weights, in bf16, in FP8 and in NVFP4."""

    shape: Shape
    ends: dict[str, Tensor]
    models: dict[str, CausalLM]
    plain: nn.Module  # the first layer in bf16, not merged
    # By name of a model in FP8 or NVFP4, its first layer emulated; of one in NVFP4, quantize_model's report.
    emulated: dict[str, nn.Module]
    reports: dict[str, QuantizeReport]
    absent: dict[str, str]  # by name the reason why there is no such model
    _step: tuple[tuple[int, int, int], Step] | None = None

    @property
    def num_layers(self) -> int:
        return len(self.models[MERGED].layers)

    def step(self, batch: int, context: int, tokens: int) -> Step:
        """The input of a step, as :func:`make_step` makes it; the one before is freed first."""
        sizes = (batch, context, tokens)
        if self._step is None or self._step[0] != sizes:
            self._step = None
            device = self.ends["embed"].device
            self._step = (sizes, make_step(self.shape, self.num_layers, *sizes, device))
        return self._step[1]

    def compiled(self, name: str, whole: bool) -> CausalLM:
        """The model of this name under torch.compile: each layer by itself, or the whole model.

        Those in NVFP4 are compiled by ``fp4gemm.compiler.compile``.
        """
        model = self.models[name]
        compiler: Any = fp4gemm.compiler.compile if name in QUANTIZED else torch.compile
        if whole:
            return cast(CausalLM, compiler(model, dynamic=False))
        layers = [compiler(layer, dynamic=False) for layer in model.layers]
        return CausalLM(self.shape, self.ends, layers)


def build(shape: Shape, num_layers: int, wanted: Sequence[str], device: torch.device) -> Variants:
    """The models of these names, of VARIANTS; the merged one in bf16 is always among them."""
    layers: dict[str, list[nn.Module]] = {name: [] for name in VARIANTS if name in wanted or name == MERGED}
    ends, emulations, reported = end_weights(shape, device), {}, {}
    absent: dict[str, str] = {}
    for index in range(num_layers):
        weights = layer_weights(shape, index, device)
        if index == 0:
            plain = DecoderLayer(shape, weights)
        for name, found in layers.items():
            if name in absent:
                continue
            if name not in QUANTIZED:
                layer = DecoderLayer(shape, weights, is_merged=name != FLOAT)
                found.append(in_fp8(layer) if name == FP8 else layer)
                if name == FP8 and index == 0:
                    emulations[name] = emulated(shape, weights, emulation.FP8, layer, False)
                continue
            kind = QUANTIZED[name]
            try:
                made, report = _quantized(DecoderLayer(shape, weights, is_fusable=kind.is_fusable), kind)
            except NotImplementedError as error:
                absent[name] = error_line(error)
                continue
            found.append(made)
            if index == 0:
                reported[name] = report
                emulations[name] = emulated(shape, weights, kind.through, made, kind.is_fusable)
    models = {name: CausalLM(shape, ends, found) for name, found in layers.items() if name not in absent}
    return Variants(shape, ends, models, plain, emulations, reported, absent)


def _quantized(layer: DecoderLayer, kind: Kind) -> tuple[nn.Module, QuantizeReport]:
    """The layer as quantize_model makes it, and what it reports.

    Raises:
        NotImplementedError: the device has no kernels for it.
    """
    reports: list[QuantizeReport] = []
    _quantize_experts(layer, kind)
    made = fp4gemm.models.quantize_model(
        layer,
        activations=kind.activations,
        use_fast_accum=kind.use_fast_accum,
        method="round",  # as the emulation; the speed does not depend on it
        fuse="auto",
        report=reports.append,
    )
    return made, reports[0]


def _quantize_experts(layer: DecoderLayer, kind: Kind) -> None:
    """Replaces the experts of a layer, as quantize_model does it where transformers defines them."""
    experts = getattr(layer.mlp, "experts", None)
    activation: ActivationName = "swiglu_oai" if isinstance(experts, OssExperts) else "swiglu"
    if isinstance(experts, Experts):
        layer.mlp.experts = fp4gemm.nn.Experts.from_float(
            experts.gate_up_proj,
            experts.down_proj,
            experts.gate_up_proj_bias if experts.has_bias else None,
            experts.down_proj_bias if experts.has_bias else None,
            layout="halves" if experts.is_concatenated else "interleaved",
            is_transposed=experts.is_transposed,
            activation=activation,
            activations=kind.activations,
            use_fast_accum=kind.use_fast_accum,
            method="round",
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of a model reads beside the weights: token ids (batch, tokens), and the cache."""

    input_ids: Tensor
    cache: list[StaticLayer]


def make_step(
    shape: Shape, num_layers: int, batch: int, context: int, tokens: int, device: torch.device
) -> Step:
    """The last ``tokens`` of ``context`` tokens of each sequence; earlier keys and values are random."""
    gen = torch.Generator(device).manual_seed(batch * context)
    positions = torch.arange(context - tokens, context, device=device)
    sizes = (batch, shape.num_kv_heads, context, shape.head_dim)
    cache = [StaticLayer(gaussian(gen, *sizes), gaussian(gen, *sizes), positions) for _ in range(num_layers)]
    return Step(torch.randint(shape.vocab, (batch, tokens), device=device, generator=gen), cache)
