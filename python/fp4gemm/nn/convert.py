"""fp4gemm.nn.quantize_model: swap the linear layers of a model for NVFP4 ones, and report what was done."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from .. import _checks
from .linear import ACTIVATION_SCALINGS, SCALINGS, Linear, check_linear

Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, torch.nn.Linear], bool]
Filter: TypeAlias = Pattern | Sequence[Pattern]
Action = Literal["quantized", "shared", "excluded", "skipped"]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# These run their linear layers' weights through fused functions of their own and never call the layers.
READS_WEIGHTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear layer.

    Attributes:
        name: qualified name in the model ("" is the model itself).
        shape: (out_features, in_features).
        action: "quantized"; "shared": the same module as one listed before, swapped with it; "excluded": by
            include or exclude; "skipped": it could not be swapped.
        reason: why, in words; "" for an ordinary "quantized".
        bytes_before, bytes_after: weight and bias of this layer. 0 for a name whose module was listed before.
    """

    name: str
    shape: tuple[int, int]
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizeReport:
    """One LayerReport per name of a torch.nn.Linear, subclasses too, in model order. ``str()`` is a table."""

    layers: tuple[LayerReport, ...]

    def names(self, action: Action) -> list[str]:
        """The names of the layers with this action."""
        return [layer.name for layer in self.layers if layer.action == action]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.shape[0]:>6} x {layer.shape[1]:<6} {layer.action:<9}"
            f" {layer.bytes_before:>11} -> {layer.bytes_after:>11} bytes  {layer.reason}".rstrip()
            for layer in self.layers
        ]
        actions = [layer.action for layer in self.layers]
        counts = ", ".join(f"{actions.count(action)} {action}" for action in sorted(set(actions)))
        lines.append(
            f"{len(actions)} linear layers ({counts}): {self.bytes_before} -> {self.bytes_after} bytes"
        )
        return "\n".join(lines)


@dataclass
class _Layer:
    """One float layer with every name it has in the model, and what is to become of it."""

    linear: torch.nn.Linear
    names: list[str]
    action: Action = "quantized"
    reason: str = ""
    swapped: Linear | None = None


def quantize_model(
    model: torch.nn.Module,
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    types: Iterable[type[torch.nn.Linear]] = (torch.nn.Linear,),
    activation_scaling: str = "row",
    weight_scaling: str = "row",
    inplace: bool = True,
    report: Callable[[QuantizeReport], object] | None = None,
    progress: Callable[[int, int, str], object] | None = None,
    on_unsupported: Literal["skip", "raise"] = "skip",
) -> torch.nn.Module:
    """``y = x @ W.T + b`` becomes ``y = Q(x) @ Q(W).T + b`` in every selected linear layer of a model.

    The layers are forward only: run the model under torch.inference_mode() or torch.no_grad().

    Args:
        model: any module. One that is itself a linear layer cannot be swapped in place; the new layer is
            returned.
        include: swap only the layers it matches; None takes all. A regular expression searched in the
            qualified name (``re.search``), a callable ``(name, linear) -> bool``, or a sequence of these, any
            of which may match.
        exclude: leave the layers it matches; wins over include.
        types: the exact types to swap. Subclasses of torch.nn.Linear may compute something else, so each must
            be named.
        activation_scaling, weight_scaling: as in fp4gemm.nn.Linear.
        inplace: swap inside ``model`` and return it; otherwise it stays as it is and a copy is returned, of
            everything but the swapped layers, so that their float weights never exist twice.
        report: called with a QuantizeReport of what was done; ``report=print`` shows it as a table. It lists
            every torch.nn.Linear, whatever became of it. Without it, layers that do not fit are warned about.
        progress: called as ``progress(done, total, name)`` after each layer.
        on_unsupported: what to do about a selected layer that cannot be swapped (k not a multiple of 32, n
            not of 8, another dtype, weights that are not finite, hooks on the layer, an owner that bypasses
            its forward): "skip" leaves it and reports it, "raise" raises before anything is changed.

    Returns:
        The model with its layers swapped. A module that occurs under several names is quantized once, and
        only if no name of it is excluded. A weight that is tied to another parameter owner (an embedding,
        say) is quantized for this layer alone; the report says so.

    Raises:
        TypeError, ValueError: naming the argument; also if ``include`` matches no linear layer of a model
            that has some, and with ``on_unsupported="raise"`` a ValueError that lists every layer that does
            not fit. The model is then unchanged.

    Synchronises (once a layer, to look for weights that are not finite).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    _checks.is_one_of("activation_scaling", activation_scaling, ACTIVATION_SCALINGS)
    _checks.is_one_of("weight_scaling", weight_scaling, SCALINGS)
    _checks.is_one_of("on_unsupported", on_unsupported, ("skip", "raise"))
    for name, callback in (("progress", progress), ("report", report)):
        if callback is not None and not callable(callback):
            raise TypeError(f"{name}: got {_checks.describe(callback)}, must be callable")
    layers = _find(model)
    _select(layers, _patterns("include", include), _patterns("exclude", exclude), _exact_types(types))
    _refuse_unsupported(model, layers, raises=on_unsupported == "raise")

    chosen = [layer for layer in layers if layer.action == "quantized"]
    for done, layer in enumerate(chosen, start=1):
        layer.swapped = Linear.from_float(
            layer.linear, activation_scaling=activation_scaling, weight_scaling=weight_scaling
        )
        if progress is not None:
            progress(done, len(chosen), layer.names[0])
    # Only now, with every layer quantized, is anything changed: an error above leaves the model whole.
    if inplace and not isinstance(model, torch.nn.Linear):
        _replace(model, chosen)
    else:
        # deepcopy takes what its memo holds for an object instead of copying the object.
        model = copy.deepcopy(model, {id(layer.linear): layer.swapped for layer in chosen})
    done_report = _report(layers)
    if report is not None:
        report(done_report)
    elif skipped := done_report.names("skipped"):
        warnings.warn(
            f"quantize_model: {len(skipped)} linear layers stay as they are, such as {skipped[0]!r}; "
            "report=print lists them with the reasons",
            stacklevel=2,
        )
    return model


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
    num_included = 0
    for layer in layers:
        included = include is None or any(_matches(include, name, layer.linear) for name in layer.names)
        num_included += included
        if not included:
            layer.action, layer.reason = "excluded", "not matched by include"
        elif exclude is not None and any(_matches(exclude, name, layer.linear) for name in layer.names):
            layer.action, layer.reason = "excluded", "matched by exclude"
        elif type(layer.linear) not in types:
            layer.action = "skipped"
            layer.reason = f"its type is {type(layer.linear).__name__}, which types does not name"
    if layers and not num_included:
        names = [name for layer in layers for name in layer.names]
        raise ValueError(f"include: matches none of the {len(names)} linear layers, such as {names[0]!r}")


def _refuse_unsupported(model: torch.nn.Module, layers: list[_Layer], *, raises: bool) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    users: dict[int, list[str]] = {}
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(parameter_name)
    refused = []
    for layer in layers:
        if layer.action != "quantized":
            continue
        reason = _why_not(layer, [owners[name.rpartition(".")[0]] for name in layer.names if name])
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


def _why_not(layer: _Layer, owners: list[torch.nn.Module]) -> str:
    for owner in owners:
        if isinstance(owner, READS_WEIGHTS):
            return f"its owner {type(owner).__name__} reads the float weight directly"
    hooks = [name for name in HOOKS if getattr(layer.linear, name, None)]
    if "forward" in vars(layer.linear):
        hooks.append("forward")
    if hooks:
        return f"it has hooks that a swap would drop ({', '.join(name.lstrip('_') for name in hooks)})"
    try:
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


def _report(layers: list[_Layer]) -> QuantizeReport:
    entries = []
    for layer in layers:
        shape = (layer.linear.out_features, layer.linear.in_features)
        before = _num_bytes(layer.linear)
        after = before if layer.swapped is None else _num_bytes(layer.swapped)
        entries.append(LayerReport(layer.names[0], shape, layer.action, layer.reason, before, after))
        for name in layer.names[1:]:
            action: Action = "shared" if layer.action == "quantized" else layer.action
            entries.append(LayerReport(name, shape, action, f"same module as {layer.names[0]}", 0, 0))
    return QuantizeReport(tuple(entries))


def _num_bytes(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors if not torch.nn.parameter.is_lazy(tensor))


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


def _matches(patterns: list[Pattern], name: str, linear: torch.nn.Linear) -> bool:
    for pattern in patterns:
        if isinstance(pattern, (str, re.Pattern)):
            if re.search(pattern, name):
                return True
        elif pattern(name, linear):
            return True
    return False
