"""Which parts of a model have other bits when one token of each sequence is computed alone.

Each part gets what it got in the trainer's forward pass of whole sequences, but of one token in the middle
alone, as in a step of an engine with a KV cache; attention gets each token in turn, with the keys and values
up to it. The result should be the trainer's for this token.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from fp4gemm import models, nn, training
from rollout_models import config_of, loaded
from torch import Tensor

PARTS = ("linear layers", "experts", "routers", "norms", "attention", "output layer")
# By the heading of the column: batch_invariant, and whether the trainer keeps prepacked weights.
COLUMNS = {"batch_invariant": (True, True), "without": (False, True), "nor kept weights": (False, False)}


def kind_of(name: str, module: torch.nn.Module) -> str | None:
    """The part that a module is, or None."""
    if isinstance(module, nn.Experts):
        return "experts"
    if name == "lm_head":
        return "output layer"
    if isinstance(module, nn.Linear):
        return "linear layers"
    for ending, kind in (("Router", "routers"), ("RMSNorm", "norms")):
        if type(module).__name__.endswith(ending):
            return kind
    return None


@contextlib.contextmanager
def seen(model: torch.nn.Module) -> Iterator[tuple[dict[str, tuple[Any, Any]], list[tuple[Any, ...]]]]:
    """The arguments and results of all modules, and those of attention, while the block runs."""
    calls: dict[str, tuple[Any, Any]] = {}
    attention: list[tuple[Any, ...]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spied(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        attention.append((args, kwargs, result))
        return result

    hooks = [
        module.register_forward_hook(lambda _, args, result, name=name: calls.update({name: (args, result)}))
        for name, module in model.named_modules()
    ]
    torch.nn.functional.scaled_dot_product_attention = spied
    try:
        yield calls, attention
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
        for hook in hooks:
            hook.remove()


def one_token(value: Any, batch: int, length: int) -> Any:
    """The part of a tensor, or of each in a tuple, that belongs to the token in the middle."""
    if isinstance(value, tuple):
        return tuple(one_token(each, batch, length) for each in value)
    place = length // 2
    if value.shape[:2] == (batch, length):
        return value[:, place : place + 1].contiguous()
    return value.view(batch, length, *value.shape[1:])[:, place].contiguous()


def is_equal(a: Any, b: Any) -> bool:
    """Whether the tensors have the same values."""
    if isinstance(a, tuple):
        return all(map(is_equal, a, b))
    return torch.equal(a, b)


@torch.no_grad()
def counted(args: argparse.Namespace, recipe: training.Recipe, invariant: bool) -> dict[str, list[int]]:
    """How many calls of each part differ, and how many there are."""
    device = torch.device(args.device)
    model = loaded(args.model, config_of(args.model, args.folder), args.folder, device)
    training.convert_model(model, recipe)
    served = models.quantize_model(
        model,
        recipe=recipe.for_inference(),
        batch_invariant=invariant,
        inplace=False,
        report=lambda _: None,
    )
    training.mark_step()
    shape = (args.batch, args.length)
    ids = torch.randint(1, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    with seen(model) as (calls, attention):
        model(ids.to(device), use_cache=False)
    found: dict[str, list[int]] = {kind: [0, 0] for kind in PARTS}
    for name, module in served.named_modules():
        kind = kind_of(name, module)
        if kind is not None:
            inputs, result = calls[name]
            is_other = not is_equal(module(*one_token(inputs, *shape)), one_token(result, *shape))
            found[kind] = [found[kind][0] + is_other, found[kind][1] + 1]
    for (q, k, v, *rest), options, result in attention:
        options["is_causal"] = False
        alone = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], *rest, **options
            )
            for end in range(1, args.length + 1)
        ]
        is_other = not torch.equal(torch.cat(alone, 2), result)
        found["attention"] = [found["attention"][0] + is_other, found["attention"][1] + 1]
    return found


def report(args: argparse.Namespace, name: str) -> str:
    """The table of a recipe."""
    recipe = training.PRESETS[name]
    if recipe.w is None:
        return ""
    results = [
        counted(args, recipe.replace(batch_invariant=invariant, cache_weight=keeps), invariant)
        for invariant, keeps in COLUMNS.values()
    ]
    lines = [
        f"\n`{name}`, {args.model}: calls of each part with other bits for one token alone, of all calls:\n",
        f"| part | {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
    ]
    for part in PARTS:
        if results[0][part][1]:
            cells = [f"{found[part][0]} of {found[part][1]}" for found in results]
            lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)
