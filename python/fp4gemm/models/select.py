"""The linear layers and experts that quantize_model can swap, with the action for each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch.nn.parameter import is_lazy

from .. import _checks, _names, patterns
from ..nn._hooks import hooks_of, materialized
from ..nn._inputs import OUT_STEP, check_linear
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..patterns import Filter, Pattern
from ..recipe import LayerActivations
from . import moe
from .report import Action, ExpertsReport, FloatKind, FloatWeight, LayerReport

# Modules that pass the weights of their linear layers to functions instead of calling the layers.
READS_WEIGHTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


@dataclass
class Candidate:
    """One float layer, or one module of experts, with every name that it has, and what is to become of it."""

    module: torch.nn.Module
    names: list[str]
    action: Action = "quantized"
    reason: str = ""
    plan: moe.ExpertsPlan | None = None
    swapped: Linear | Experts | None = None
    method: str = ""
    output_error: float | None = None
    activations: str = ""
    residual_channels: int = 0

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, torch.nn.Linear)


def find(model: torch.nn.Module) -> list[Candidate]:
    """Every torch.nn.Linear and every module of experts, in model order."""
    found: dict[int, Candidate] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear) or moe.is_experts(module):
            found.setdefault(id(module), Candidate(module, [])).names.append(name)
    return list(found.values())


def chosen(
    model: torch.nn.Module,
    include: Filter | None,
    exclude: Filter | None,
    types: Iterable[type[torch.nn.Linear]],
) -> list[Candidate]:
    """The candidates of a model after the checks of these arguments, as :func:`select` marks them."""
    candidates = find(model)
    given = patterns.checked("include", include), patterns.checked("exclude", exclude)
    select(model, candidates, *given, exact_types(types))
    return candidates


def select(
    model: torch.nn.Module,
    candidates: list[Candidate],
    include: list[Pattern] | None,
    exclude: list[Pattern] | None,
    types: tuple[type[torch.nn.Linear], ...],
) -> None:
    """Set action and reason of the candidates that the arguments or the defaults keep in float."""
    kept = kept_by_default(model)
    names = [name for c in candidates for name in c.names]
    used: dict[str, set[int]] = {"include": set(), "exclude": set()}  # the patterns that match some candidate
    for c in candidates:
        included, excluded = _matching(include, c), _matching(exclude, c)
        used["include"] |= included
        used["exclude"] |= excluded
        if include is not None and not included:
            c.action, c.reason = "excluded", "not matched by include"
        elif excluded:
            c.action, c.reason = "excluded", "matched by exclude"
        elif include is None and id(c.module) in kept:
            c.action, c.reason = "excluded", f"{kept[id(c.module)]}, in float unless include matches it"
        elif c.is_linear and _type_of(c.module) not in types:
            c.action = "skipped"
            c.reason = f"its type is {type(c.module).__name__}, which types does not name"
    if not names:
        return
    what = "linear layers" if all(c.is_linear for c in candidates) else "linear layers and modules of experts"
    where = f"none of the {len(names)} {what}, such as {names[0]!r}"
    for option, given in (("include", include or []), ("exclude", exclude or [])):
        unused = [pattern for index, pattern in enumerate(given) if index not in used[option]]
        shown = patterns.shown(unused)
        if unused and not used[option]:
            raise ValueError(f"{option}: {shown} matches {where}")
        if unused:
            warnings.warn(f"quantize_model: {option}: {shown} matches {where}", stacklevel=_stacklevel())


def _stacklevel() -> int:
    """The stacklevel with which a warning of the calling function names the line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame):
        level, frame = level + 1, frame.f_back
    return level


def _is_own(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == __name__.partition(".")[0]


def _type_of(linear: torch.nn.Module) -> type:
    """The type of a linear layer; of a fp4gemm.training.Linear torch's, whose parameters it has."""
    kind = type(linear)
    return torch.nn.Linear if moe.TRAINED in vars(kind) else kind


def refuse_unsupported(
    model: torch.nn.Module,
    candidates: list[Candidate],
    activations: LayerActivations,
    *,
    raises: bool,
) -> None:
    """Set action and reason of candidates that cannot be swapped; raise ValueError for them if ``raises``."""
    owners = dict(model.named_modules(remove_duplicate=False))
    users: dict[int, list[str]] = {}
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(parameter_name)
    refused = []
    for c in candidates:
        if c.action != "quantized":
            continue
        places = [name.rpartition(".") for name in c.names if name]
        reason = _why_not(c, [(owners[owner], child) for owner, _, child in places], activations)
        if reason:
            c.action, c.reason = "skipped", reason
            refused.append(f"{c.names[0]!r}: {reason}")
            continue
        weights = {name: p for name, p in c.module.named_parameters(recurse=False) if p.dim() > 1}
        own = {f"{name}.{weight}".lstrip(".") for name in c.names for weight in weights}
        tied = [user for p in weights.values() for user in users.get(id(p), []) if user not in own]
        if tied:
            c.reason = f"its weight was tied to {tied[0]}, which keeps the float one"
    if refused and raises:
        raise ValueError(
            f"model: {len(refused)} selected layers cannot be NVFP4, must all fit: " + "; ".join(refused)
        )


def _why_not(c: Candidate, places: list[tuple[torch.nn.Module, str]], activations: LayerActivations) -> str:
    """Why the module, a child of these owners under these names, cannot be swapped; "" if it can."""
    for owner, child in places:
        if reads_weight(owner, child):
            return f"its owner {type(owner).__name__} reads the float weight directly"
    hooks = hooks_of(c.module)
    if hooks:
        return f"it has hooks that a swap would drop ({', '.join(hooks)})"
    try:
        if c.is_linear:
            with materialized(c.module):
                check_linear(c.module, activations)
        else:
            c.plan = moe.read(c.module, activations)
    except (TypeError, ValueError) as error:
        return str(error).removeprefix("linear: ").removeprefix("linear.")
    return ""


def reads_weight(owner: torch.nn.Module, child: str) -> bool:
    """Whether a module passes the weight of its child of this name to a function instead of calling it."""
    return isinstance(owner, READS_WEIGHTS) or child in _names.READS_WEIGHTS_OF.get(type(owner).__name__, ())


# ---- reports


def reports(candidates: list[Candidate]) -> tuple[tuple[LayerReport, ...], tuple[ExpertsReport, ...]]:
    """One report for each name of each candidate; the bytes of a module count for its first name."""
    layers: list[LayerReport] = []
    experts: list[ExpertsReport] = []
    for c in candidates:
        before = _num_bytes(c.module)
        after = before if c.swapped is None else _num_bytes(c.swapped)
        for i, name in enumerate(c.names):
            action, reason = c.action, c.reason
            how = (c.method, c.output_error, c.activations)
            if i > 0:
                action = "shared" if c.action == "quantized" else c.action
                reason, before, after = f"same module as {c.names[0]}", 0, 0
            if isinstance(c.module, torch.nn.Linear):
                shape = (c.module.out_features, c.module.in_features)
                layers.append(
                    LayerReport(name, shape, action, reason, before, after, *how, c.residual_channels)
                )
            else:
                size, activation = _experts_size(c)
                experts.append(ExpertsReport(name, size, activation, action, reason, before, after, *how))
    return tuple(layers), tuple(experts)


def _experts_size(c: Candidate) -> tuple[str, str]:
    if c.plan is None:
        return moe.shapes_of(c.module), ""
    plan = c.plan
    size = f"{plan.num_experts} x ({plan.hidden} -> {plan.intermediate} {plan.activation})"
    return size, plan.activation


def _num_bytes(module: torch.nn.Module) -> int:
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.nbytes for t in tensors.values() if not is_lazy(t))


# ---- arguments


def exact_types(types: object) -> tuple[type[torch.nn.Linear], ...]:
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


def _matching(given: list[Pattern] | None, c: Candidate) -> set[int]:
    """Indices of the patterns that match a name of the candidate."""
    return {
        index
        for index, pattern in enumerate(given or [])
        if any(patterns.matches(pattern, name, c.module) for name in c.names)
    }


ROUTER_REASON = "router"
OUTPUT_REASON = "output embedding"


def kept_by_default(model: torch.nn.Module) -> dict[int, str]:
    """id(module) -> reason, of the linear layers that stay in float unless ``include`` matches them."""
    reasons = {id(linear): OUTPUT_REASON for linear in _output_embeddings(model)}
    return reasons | {id(linear): ROUTER_REASON for linear in _routers(model)}


def _output_embeddings(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Linear layers that get_output_embeddings() or their names say, or that share an embedding's weight."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            if _names.is_output(name) or id(module.weight) in tables:
                yield module
        elif callable(getattr(type(module), "get_output_embeddings", None)):
            try:
                found = module.get_output_embeddings()
            except (AttributeError, NotImplementedError):  # transformers raises them where a model has none
                continue
            if isinstance(found, torch.nn.Linear):
                yield found


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Linear layers that a router's class holds or a name says, and those beside experts that score them.

    The latter have as many outputs as there are experts, or one output, the gate of a shared expert.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear) and _names.is_named_router(name):
            yield module
    for owner in model.modules():
        is_router = _names.is_router_class(type(owner).__name__)
        outputs = _num_experts(owner)
        outputs |= {1} if outputs else set()
        for child in owner.modules() if is_router else owner.children():
            if isinstance(child, torch.nn.Linear) and (is_router or child.out_features in outputs):
                yield child


def _num_experts(owner: torch.nn.Module) -> set[int]:
    """The number of experts in the children of a module: in lists of modules, or by their own attribute."""
    counts = set()
    for name, child in owner.named_children():
        if isinstance(child, torch.nn.Linear) or not _names.is_experts(name):
            continue
        is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        count = len(child) if is_list else getattr(child, "num_experts", None)  # type: ignore[arg-type]
        if isinstance(count, int) and count > 1:
            counts.add(count)
    return counts


def float_weights(
    model: torch.nn.Module, swapped: Iterable[torch.nn.Module], kept: Iterable[torch.nn.Module]
) -> tuple[FloatWeight, ...]:
    """Every parameter that is in none of these modules, once, with why it is not quantized.

    A parameter that a swapped module shares with another one is listed, since it stays for that other one.
    """
    done, skipped = {id(p) for module in kept for p in module.parameters(recurse=False)}, set(swapped)
    found = []
    for path, owner in model.named_modules():
        if owner in skipped:
            continue
        for name, p in owner.named_parameters(recurse=False):
            if id(p) in done:
                continue
            done.add(id(p))
            full_name, is_uninitialised = f"{path}.{name}".lstrip("."), bool(is_lazy(p))
            if is_uninitialised:
                found.append(
                    FloatWeight(full_name, (), "other", "not initialised yet; run the model once", 0)
                )
                continue
            kind, reason = _kind(owner, p)
            found.append(FloatWeight(full_name, tuple(p.shape), kind, reason, p.nbytes))
    return tuple(found)


def _kind(owner: torch.nn.Module, p: torch.nn.Parameter) -> tuple[FloatKind, str]:
    name = type(owner).__name__
    if _names.is_router_class(name):
        return "router", ROUTER_REASON
    if isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) or "Embed" in name:
        return "embedding", "embedding"
    if "Norm" in name:
        return "norm", "norm"
    if isinstance(owner, torch.nn.modules.conv._ConvNd):
        return "convolution", "convolution"
    if p.dim() < 2 or p.numel() == max(p.shape):
        return "vector", "vector"
    if p.dtype not in _checks.FLOAT_DTYPES:
        return "other", f"dtype is {p.dtype}, must be {_checks.listing(_checks.FLOAT_DTYPES)}"
    if p.dim() > 3 or p.shape[-2] % OUT_STEP or p.shape[-1] % _checks.K_STEP_MM:
        return "other", f"a parameter of {name} of sizes that NVFP4 does not have"
    return "other", f"a parameter of {name}, whose use is not known"
