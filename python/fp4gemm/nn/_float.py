"""The layers that quantize_model leaves in float by default, and the list of other weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch.nn.parameter import is_lazy

from .. import _checks
from ._inputs import OUT_STEP
from .report import FloatKind, FloatWeight

# The end of the class names of routers: MixtralTopKRouter, DbrxRouter, JetMoeTopKGating, MoEGate, ...
ROUTER = re.compile(r"(Router|RouterMLP|TopKGating|TopKGate|MoEGate|MoEV1Gate)$")
OUTPUT_NAME = "lm_head"
ROUTER_REASON = "router"
OUTPUT_REASON = "output embedding"


def kept_by_default(model: torch.nn.Module) -> dict[int, str]:
    """id(module) -> reason, of the linear layers that stay in float unless ``include`` matches them."""
    reasons = {id(linear): OUTPUT_REASON for linear in _output_embeddings(model)}
    return reasons | {id(linear): ROUTER_REASON for linear in _routers(model)}


def _output_embeddings(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Linear layers that get_output_embeddings() names, or lm_head, or that share an embedding's weight."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            if name.rpartition(".")[2] == OUTPUT_NAME or id(module.weight) in tables:
                yield module
        elif callable(getattr(type(module), "get_output_embeddings", None)):
            try:
                found = module.get_output_embeddings()
            except (AttributeError, NotImplementedError):  # transformers raises them where a model has none
                continue
            if isinstance(found, torch.nn.Linear):
                yield found


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Linear layers inside of a module with a router's name, and those beside experts that score them.

    The latter have as many outputs as there are experts, or one output, the gate of a shared expert.
    """
    for owner in model.modules():
        is_router = ROUTER.search(type(owner).__name__) is not None
        outputs = _num_experts(owner)
        outputs |= {1} if outputs else set()
        for child in owner.modules() if is_router else owner.children():
            if isinstance(child, torch.nn.Linear) and (is_router or child.out_features in outputs):
                yield child


def _num_experts(owner: torch.nn.Module) -> set[int]:
    """The number of experts in the children of a module: in lists of modules, or by their own attribute."""
    counts = set()
    for name, child in owner.named_children():
        if isinstance(child, torch.nn.Linear) or "expert" not in name.lower():
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
    if ROUTER.search(name):
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
