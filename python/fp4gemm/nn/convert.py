"""fp4gemm.nn.quantize_model: swap the linear layers of a model for NVFP4 ones, and report what was done."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch.nn.parameter import is_lazy

from .. import _checks
from ._hooks import accelerate_hook, carry_over, materialized
from ._inputs import OUT_STEP, ActivationScaling, CheckFinite, WeightScaling, check_linear, check_options
from .fuse import fuse_blocks
from .linear import Linear
from .report import Action, LayerReport, QuantizeReport

Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, torch.nn.Linear], bool]
Filter: TypeAlias = Pattern | Sequence[Pattern]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OnUnsupported = Literal["skip", "raise"]
Fuse = Literal["auto", "none"]
Model = TypeVar("Model", bound=torch.nn.Module)
# Modules that pass the weights of their linear layers to functions instead of calling the layers.
READS_WEIGHTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
# The same in transformers (5.20), by name of the class, with the children whose weights are read.
READS_WEIGHTS_OF = {
    "FalconMambaMixer": {"dt_proj"},
    "JambaMambaMixer": {"dt_proj"},
    "MambaMixer": {"dt_proj"},
    "WavLMAttention": {"q_proj", "k_proj", "v_proj", "out_proj"},
}
MANY_OTHERS = 0.1  # a larger part of the model outside of linear layers is warned about


@dataclass
class _Layer:
    """One float layer with every name it has in the model, and what is to become of it."""

    linear: torch.nn.Linear
    names: list[str]
    action: Action = "quantized"
    reason: str = ""
    swapped: Linear | None = None


def quantize_model(
    model: Model,
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    types: Iterable[type[torch.nn.Linear]] = (torch.nn.Linear,),
    activation_scaling: ActivationScaling = "row",
    weight_scaling: WeightScaling = "row",
    check_finite: CheckFinite = "off",
    inplace: bool = True,
    report: Callable[[QuantizeReport], object] | None = None,
    progress: Callable[[int, int, str], object] | None = None,
    on_unsupported: OnUnsupported = "skip",
    fuse: Fuse = "none",
) -> Model:
    """``y = x @ W.T + b`` becomes ``y = Q(x) @ Q(W).T + b`` in every selected linear layer of a model.

    The layers are forward only: run the model under torch.inference_mode() or torch.no_grad().

    Args:
        model: any module. One that is itself a linear layer cannot be changed in place; the new layer is
            returned.
        include: swap only the layers it matches; None is all layers. A regular expression searched in the
            qualified name (``re.search``), a callable ``(name, linear) -> bool``, or a sequence of these, any
            of which may match.
        exclude: keep the layers it matches as they are; it wins over include. Exclude the output layer
            ("lm_head") of a model whose vocabulary is going to be resized: transformers resizes float layers
            only.
        types: the exact types to swap. A subclass of torch.nn.Linear may compute something else, so it is
            swapped only where it is listed here.
        activation_scaling, weight_scaling, check_finite: as in :class:`fp4gemm.nn.Linear`.
        inplace: swap inside ``model`` and return it; otherwise the model stays as it is and a copy is
            returned. The float weights of swapped layers are not copied.
        report: called with a QuantizeReport of what was done; ``report=print`` shows it as a table. It lists
            every torch.nn.Linear, whatever became of it. Without it, warnings name the layers that do not
            fit, and say when much of the model is not in linear layers at all.
        progress: called as ``progress(done, total, name)`` after each layer.
        on_unsupported: what to do about a selected layer that cannot be swapped (k not a multiple of 32, n
            not of 8, another dtype, weights that are not finite, hooks on the layer, an owner that bypasses
            its forward): "skip" leaves it and reports it, "raise" raises before anything is changed.
        fuse: "auto" joins the quantized layers of a block where the source of the model shows that the result
            is the same: layers that read the same tensor become one product, ``down(act(gate(x)) * up(x))``
            an :class:`fp4gemm.nn.GatedMLP`, and a norm quantizes its result. docs/models.md says which
            rounding disappears; the names in ``state_dict`` change. "none" swaps layer by layer.

    Returns:
        The model with its layers swapped. A module that occurs under several names is quantized once, and
        only if no name of it is excluded. A weight that is tied to another parameter (of an embedding, say)
        is quantized for this layer alone; the report says so. A later ``model.tie_weights()`` quantizes the
        embedding's weight again. Hooks of accelerate (``dispatch_model``, ``cpu_offload``) are carried over;
        an offloaded layer stays offloaded, its codes in CPU memory.

    Raises:
        TypeError, ValueError: naming the argument; also if ``include`` or ``exclude`` matches no linear layer
            of a model that has some (a pattern that matches none beside others that match is only warned
            about), and with ``on_unsupported="raise"`` a ValueError that lists every layer that does not fit.
            The model is then unchanged.

    Synchronises (once a layer, to look for weights that are not finite).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    check_options(activation_scaling, weight_scaling, check_finite)
    _checks.is_one_of("on_unsupported", on_unsupported, get_args(OnUnsupported))
    _checks.is_one_of("fuse", fuse, get_args(Fuse))
    for name, callback in (("progress", progress), ("report", report)):
        if callback is not None and not callable(callback):
            raise TypeError(f"{name}: got {_checks.describe(callback)}, must be callable")
    layers, others = _find(model), _others(model)
    _select(layers, _patterns("include", include), _patterns("exclude", exclude), _exact_types(types))
    _refuse_unsupported(model, layers, raises=on_unsupported == "raise")

    chosen = [layer for layer in layers if layer.action == "quantized"]
    for done, layer in enumerate(chosen, start=1):
        with materialized(layer.linear):
            layer.swapped = Linear.from_float(
                layer.linear,
                activation_scaling=activation_scaling,
                weight_scaling=weight_scaling,
                check_finite=check_finite,
            )
        carry_over(layer.linear, layer.swapped)
        if progress is not None:
            progress(done, len(chosen), layer.names[0])
    # Only now, with every layer quantized, is anything changed: an error above leaves the model whole.
    if inplace and not isinstance(model, torch.nn.Linear):
        _replace(model, chosen)
    else:
        # deepcopy returns what its memo holds for an object instead of copying the object.
        swapped = {id(layer.linear): layer.swapped for layer in chosen}
        model = copy.deepcopy(model, cast(dict[int, Any], swapped))
    blocks = fuse_blocks(model) if fuse == "auto" else ()
    done_report = QuantizeReport(_reports(layers), *others, blocks=blocks)
    if report is not None:
        report(done_report)
        return model
    if done_report.names("skipped"):
        warnings.warn(f"quantize_model: {done_report.about_skipped()}", stacklevel=2)
    if include is None and done_report.bytes_of_others > MANY_OTHERS * done_report.model_bytes:
        warnings.warn(f"quantize_model: {done_report.about_others()}", stacklevel=2)
    return model


def _others(model: torch.nn.Module) -> tuple[tuple[str, ...], int, int]:
    """The fields of QuantizeReport from ``others`` on."""
    found: dict[str, torch.nn.Parameter] = {}
    for owner, module in model.named_modules():
        # The other modules of torch.nn are embeddings, convolutions and the like.
        if isinstance(module, torch.nn.Linear) or type(module).__module__.startswith("torch.nn."):
            continue
        for name, p in module.named_parameters(recurse=False):
            is_matrix = p.dim() in (2, 3) and p.dtype in _checks.FLOAT_DTYPES and not is_lazy(p)
            if is_matrix and p.shape[-2] % OUT_STEP == 0 and p.shape[-1] % _checks.K_STEP_MM == 0:
                found[f"{owner}.{name}".lstrip(".")] = p
    total = sum(p.nbytes for p in model.parameters() if not is_lazy(p))
    return tuple(found), sum(p.nbytes for p in found.values()), total


def _find(model: torch.nn.Module) -> list[_Layer]:
    found: dict[int, _Layer] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            found.setdefault(id(module), _Layer(module, [])).names.append(name)
    return list(found.values())


def _select(
    layers: list[_Layer],
    include: list[Pattern] | None,
    exclude: list[Pattern] | None,
    types: tuple[type[torch.nn.Linear], ...],
) -> None:
    used: dict[str, set[int]] = {"include": set(), "exclude": set()}  # the patterns that match some layer
    for layer in layers:
        included, excluded = _matching(include, layer), _matching(exclude, layer)
        used["include"] |= included
        used["exclude"] |= excluded
        if include is not None and not included:
            layer.action, layer.reason = "excluded", "not matched by include"
        elif excluded:
            layer.action, layer.reason = "excluded", "matched by exclude"
        elif type(layer.linear) not in types:
            layer.action = "skipped"
            layer.reason = f"its type is {type(layer.linear).__name__}, which types does not name"
    names = [name for layer in layers for name in layer.names]
    if not names:
        return
    where = f"none of the {len(names)} linear layers, such as {names[0]!r}"
    for option, patterns in (("include", include or []), ("exclude", exclude or [])):
        unused = [pattern for index, pattern in enumerate(patterns) if index not in used[option]]
        if unused and not used[option]:
            raise ValueError(f"{option}: matches {where}")
        if unused:
            shown = ", ".join(repr(p.pattern if isinstance(p, re.Pattern) else p) for p in unused)
            warnings.warn(f"quantize_model: {option}: {shown} matches {where}", stacklevel=3)


def _refuse_unsupported(model: torch.nn.Module, layers: list[_Layer], *, raises: bool) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    users: dict[int, list[str]] = {}
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(parameter_name)
    refused = []
    for layer in layers:
        if layer.action != "quantized":
            continue
        places = [name.rpartition(".") for name in layer.names if name]
        reason = _why_not(layer, [(owners[owner], child) for owner, _, child in places])
        if reason:
            layer.action, layer.reason = "skipped", reason
            refused.append(f"{layer.names[0]!r}: {reason}")
            continue
        own = {f"{name}.weight".lstrip(".") for name in layer.names}
        tied = [user for user in users.get(id(layer.linear.weight), []) if user not in own]
        if tied:
            layer.reason = f"its weight was tied to {tied[0]}, which keeps the float one"
    if refused and raises:
        raise ValueError(
            f"model: {len(refused)} selected layers cannot be NVFP4, must all fit: " + "; ".join(refused)
        )


def _why_not(layer: _Layer, places: list[tuple[torch.nn.Module, str]]) -> str:
    """Why the layer, a child of these owners under these names, cannot be swapped; "" if it can."""
    for owner, child in places:
        name = type(owner).__name__
        if isinstance(owner, READS_WEIGHTS) or child in READS_WEIGHTS_OF.get(name, ()):
            return f"its owner {name} reads the float weight directly"
    hooks = [name for name in HOOKS if getattr(layer.linear, name, None)]
    if "forward" in vars(layer.linear) and accelerate_hook(layer.linear) is None:
        hooks.append("forward")
    if hooks:
        return f"it has hooks that a swap would drop ({', '.join(name.lstrip('_') for name in hooks)})"
    try:
        with materialized(layer.linear):
            check_linear(layer.linear)
    except (TypeError, ValueError) as error:
        return str(error).removeprefix("linear: ").removeprefix("linear.")
    return ""


def _replace(model: torch.nn.Module, layers: list[_Layer]) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    for layer in layers:
        for name in layer.names:
            owner, _, child = name.rpartition(".")
            setattr(owners[owner], child, layer.swapped)


def _reports(layers: list[_Layer]) -> tuple[LayerReport, ...]:
    entries = []
    for layer in layers:
        shape = (layer.linear.out_features, layer.linear.in_features)
        before = _num_bytes(layer.linear)
        after = before if layer.swapped is None else _num_bytes(layer.swapped)
        entries.append(LayerReport(layer.names[0], shape, layer.action, layer.reason, before, after))
        for name in layer.names[1:]:
            action: Action = "shared" if layer.action == "quantized" else layer.action
            entries.append(LayerReport(name, shape, action, f"same module as {layer.names[0]}", 0, 0))
    return tuple(entries)


def _num_bytes(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors if not is_lazy(tensor))


def _exact_types(types: object) -> tuple[type[torch.nn.Linear], ...]:
    if not isinstance(types, Iterable):
        raise TypeError(
            f"types: got {_checks.describe(types)}, must be an iterable of torch.nn.Linear classes"
        )
    listed = tuple(types)
    for item in listed:
        if not isinstance(item, type) or not issubclass(item, torch.nn.Linear):
            raise TypeError(
                f"types: got {_checks.describe(item)}, must be torch.nn.Linear or a subclass of it"
            )
    return listed


def _patterns(name: str, value: object) -> list[Pattern] | None:
    if value is None:
        return None
    many = [value] if isinstance(value, (str, re.Pattern)) or not isinstance(value, Iterable) else list(value)
    checked: list[Pattern] = []
    for item in many:
        if isinstance(item, str):
            try:
                checked.append(re.compile(item))
            except re.error as error:
                raise ValueError(f"{name}: got {item!r}, must be a regular expression: {error}") from error
        elif isinstance(item, re.Pattern) or callable(item):
            checked.append(item)
        else:
            wanted = "a regular expression, a callable (name, linear) -> bool, or a sequence of these"
            raise TypeError(f"{name}: got {_checks.describe(item)}, must be {wanted}")
    return checked


def _matching(patterns: list[Pattern] | None, layer: _Layer) -> set[int]:
    """Indices of the patterns that match a name of the layer."""
    return {
        index
        for index, pattern in enumerate(patterns or [])
        if any(_matches(pattern, name, layer.linear) for name in layer.names)
    }


def _matches(pattern: Pattern, name: str, linear: torch.nn.Linear) -> bool:
    if isinstance(pattern, (str, re.Pattern)):
        return bool(re.search(pattern, name))
    return bool(pattern(name, linear))
