"""The experts of transformers (5.x): modules whose weights are 3-D parameters, read without importing it.

transformers decorates such a class with ``use_experts_implementation``. The flags that the decorator sets
(has_gate, has_bias, is_transposed, ...), the names of the parameters and the method ``_apply_gate`` are a
contract: transformers' own implementations ("grouped_mm", "batched_mm") compute the block from them alone,
whatever the class. So a module is replaced if it follows the contract, and if its activation, evaluated on a
few thousand values, is one of :data:`fp4gemm.activations.ACTIVATIONS`. Everything else stays in float.

The module is replaced, rather than a function registered in ``ALL_EXPERTS_FUNCTIONS``: such a function would
get float parameters, so the float weights would have to stay. The replaced module has its weights in its
state_dict, needs nothing of the configuration, and works with torch.compile and deepcopy as it is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, activations
from .._names import STACKED
from ..activations import Activation, ActivationName
from ..nn._formats import interleaved
from ..nn._hooks import materialized
from ..nn._inputs import check_float_weight, k_step
from ..nn.experts import Experts, Layout, check_shapes
from ..recipe import LayerActivations

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # has_post_expert_norm is younger
TRAINED = "_trains_by_recipe"  # in the classes of fp4gemm.training whose parameters are a float module's
# Modules of transformers (5.20) that compute F.silu(x), by class name.
ACTIVATIONS_MODULE = "transformers.activations"
SILU_NAMES = ("SiLUActivation",)
NUM_PROBES = 64  # values of the gate, and of up, with which an activation is evaluated
RELATIVE, ABSOLUTE = 1e-5, 2e-5  # the differences to the table's formulas that are accepted


class ExpertsPlan(NamedTuple):
    """The plan by which the parameters of a module become :class:`fp4gemm.nn.Experts`."""

    activation: ActivationName
    layout: Layout
    num_experts: int
    hidden: int
    intermediate: int


def is_experts(module: torch.nn.Module) -> bool:
    """Whether the decorator of transformers has set its flags in this module."""
    return all(isinstance(vars(module).get(flag), bool) for flag in FLAGS)


def shapes_of(module: torch.nn.Module) -> str:
    """The shapes of the 3-D parameters, for a report."""
    return ", ".join(" x ".join(map(str, p.shape)) for p in module.parameters(recurse=False) if p.dim() == 3)


def read(module: torch.nn.Module, activations: LayerActivations = "per-token") -> ExpertsPlan:
    """Return how the module becomes Experts with these activations.

    Raises:
        ValueError, TypeError: with the reason why it cannot. Synchronises, to look for weights that are not
            finite.
    """
    m: Any = module
    w13, w2, _, _ = checked_parameters(m)
    for key, p in m.named_parameters():
        if type(p) is not torch.nn.Parameter or type(p.data) is not Tensor:
            raise TypeError(f"its {key} is a {type(p.data).__name__}, must be a plain tensor")
    if m.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    activation, layout = _activation(m)
    check_shapes(w13, w2, activation, k_step(activations))
    g, _, d = w13.shape
    if g != getattr(m, "num_experts", g):
        raise ValueError(f"its parameters have {g} matrices and num_experts is {m.num_experts}")
    with materialized(module):
        for p in module.parameters(recurse=False):
            check_float_weight("its weights", p, tuple(p.shape))
    name: ActivationName = activation.name  # type: ignore[assignment]
    return ExpertsPlan(name, layout, g, d, w2.shape[2])


def convert(
    module: torch.nn.Module,
    plan: ExpertsPlan,
    **options: Any,
) -> Experts:
    """Quantize the weights of a module that was read; its parameters are on their device.

    options are keywords of :meth:`Experts.from_float`.
    """
    w13, w2, bias13, bias2 = parameters_of(module)
    made = Experts.from_float(
        w13,
        w2,
        bias13,
        bias2,
        layout=plan.layout,
        is_transposed=bool(module.is_transposed),
        activation=plan.activation,
        **options,
    )
    return made.train(module.training)


def checked_parameters(m: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parameters of a module that follows the contract: both stacks, and their biases or None.

    Raises:
        ValueError, TypeError: with the reason why the contract alone does not say what the module computes.
    """
    dispatch = sys.modules.get("transformers.integrations.moe")
    # What fp4gemm.training made of a module has the forward of transformers behind its own.
    with_forward = (vars(c) for c in type(m).__mro__ if "forward" in vars(c) and TRAINED not in vars(c))
    forward = next(with_forward)["forward"]
    if dispatch is None or getattr(forward, "__globals__", None) is not vars(dispatch):
        raise ValueError(f"the forward of {type(m).__name__} is not transformers' dispatch of experts")
    if getattr(m, "has_post_expert_norm", False):
        raise ValueError("each expert ends in a norm (has_post_expert_norm)")
    if getattr(m, "_is_expert_parallel", False):
        raise ValueError("its experts are distributed over devices (expert parallelism)")
    wanted = {STACKED.first(m.has_gate), STACKED.down}
    if m.has_bias:
        wanted |= {f"{name}_bias" for name in wanted}
    found = {name for name, _ in m.named_parameters()}
    if found != wanted:
        raise ValueError(f"its parameters are {_names(found)}, must be {_names(wanted)}")
    for name, p in m.named_parameters():
        rank = 2 if name.endswith("_bias") else 3
        _checks.has_dtype(f"its {name}", p, _checks.FLOAT_DTYPES)
        if p.dim() != rank:
            raise ValueError(f"its {name} has rank {p.dim()}, must have {rank}")
    return parameters_of(m)


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def parameters_of(m: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    names = STACKED.first(m.has_gate), STACKED.down
    w13, w2 = (getattr(m, name) for name in names)
    biases = (getattr(m, f"{name}_bias") for name in names) if m.has_bias else (None, None)
    return w13, w2, *biases


def as_layers_hold(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """The float weights of a module in the order of :class:`Experts`: (g, n, k), gate and up alternating."""
    m: Any = module
    w13, w2, _, _ = parameters_of(m)
    w13, w2 = w13.detach(), w2.detach()
    if m.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return (interleaved(w13) if m.has_gate and m.is_concatenated else w13), w2


def rounded(module: torch.nn.Module, plan: ExpertsPlan, made: Experts) -> Iterator[tuple[Tensor, Tensor]]:
    """The float weights of a module, and the values of the Experts made of it, in its layout."""
    m: Any = module
    w13, w2, _, _ = parameters_of(m)
    first, second = made.w13.dequantize_weight(), made.w2.dequantize_weight()
    if m.has_gate and plan.layout == "halves":
        first = torch.cat((first[:, 0::2], first[:, 1::2]), 1)
    for p, values in ((w13, first), (w2, second)):
        yield p, values.transpose(1, 2) if m.is_transposed else values


def between(module: torch.nn.Module, x: Tensor, expert: int) -> Tensor:
    """The float rows that the second product of an expert reads, for rows x (m, d) of its first."""
    m: Any = module
    w13, _, bias13, _ = parameters_of(m)
    z = x @ (w13[expert] if m.is_transposed else w13[expert].T)
    if bias13 is not None:
        z = z + bias13[expert]
    h: Tensor = m._apply_gate(z) if m.has_gate else m.act_fn(z)
    return h


# ---- which activation it is


def with_plain_attention(config: Any) -> Any:
    """A copy of a configuration that chooses the attention which each model writes in functions of torch.

    An object that is not a configuration of transformers is returned unchanged.
    """
    if getattr(config, "_attn_implementation", None) is None:
        return config
    copied = copy.copy(config)
    copied._attn_implementation_internal = "eager"
    return copied


def is_silu(act: object) -> bool:
    """Whether act is a module or function of torch or transformers that computes F.silu."""
    is_named = type(act).__module__ == ACTIVATIONS_MODULE and type(act).__name__ in SILU_NAMES
    return type(act) is torch.nn.SiLU or is_named or act is torch.nn.functional.silu


def has_swiglu(module: torch.nn.Module) -> bool:
    """Whether the gate of a module is that of transformers' decorator, act_fn(gate) * up, and act_fn SiLU.

    gate and up are the halves of its rows.
    """
    m: Any = module
    default = getattr(sys.modules.get("transformers.integrations.moe"), "_default_apply_gate", None)
    is_default = default is not None and getattr(type(m), "_apply_gate", None) is default
    return bool(m.has_gate and is_default and "_apply_gate" not in vars(m) and is_silu(m.act_fn))


def _activation(m: Any) -> tuple[Activation, Layout]:
    """The activation of the table that equals the function of the module, and where its gate lies."""
    function = m._apply_gate if m.has_gate else m.act_fn
    given: Layout = "halves" if m.is_concatenated or not m.has_gate else "interleaved"
    gate, up = _probes()
    z = torch.stack((gate, up), -1).flatten(1) if given == "interleaved" else torch.cat((gate, up), 1)
    z = z if m.has_gate else gate
    try:
        with torch.no_grad():
            y = function(z).to("cpu", torch.float32)
    except Exception as error:  # any code may be behind it
        raise ValueError(f"its activation cannot be evaluated ({type(error).__name__}: {error})") from error
    for activation in activations.ACTIVATIONS:
        if activation.name is None or activation.is_gated != m.has_gate:
            continue
        want = activation(torch.stack((gate, up), -1).flatten(1) if m.has_gate else gate)
        scale = 1 + up.abs() if m.has_gate else up.new_ones(())
        if y.shape == want.shape and bool(
            ((y - want).abs() <= RELATIVE * want.abs() + ABSOLUTE * scale).all()
        ):
            return activation, given
    act = type(getattr(m, "act_fn", None)).__name__
    shown = f"its gate ({type(m).__name__}._apply_gate, {act})" if m.has_gate else f"its activation ({act})"
    raise ValueError(f"{shown} is none of {', '.join(activations.names(is_gated=m.has_gate))}")


def _probes() -> tuple[Tensor, Tensor]:
    """Every pair of values of gate and up that tells activations and limits apart, (m, 16) each."""
    far = torch.tensor([30.0, 100.0, 1000.0, 1e4], dtype=torch.float32)  # the default dtype may be another
    near = torch.linspace(-12, 12, NUM_PROBES - 2 * far.numel(), dtype=torch.float32)
    values = torch.cat((-far, near, far))
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.reshape(-1, 16), up.reshape(-1, 16)
