"""The loss that a change of single modules costs a language model, estimated for each by itself.

The estimate is the second-order term of a Taylor expansion, with the diagonal of the empirical Fisher matrix
in the place of the Hessian, as the method "gradient" of ModelOpt's ``mtq.auto_quantize`` has it:

    loss(l, f) = 1/2 sum over tokens t and channels c of (dL/dy[t, c])^2 (y'[t, c] - y[t, c])^2 / tokens

y is the output of module l, y' is what its variant f makes of the same input, and L is the sum of the
cross-entropies of all next tokens, in nats. Losses of several modules are added as if they did not interact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .calibration import Progress, evaluated

__all__ = ["Variant", "sensitivity"]

Variant = Callable[..., Tensor]  # called with the arguments of a module; returns what takes the place of y


def sensitivity(
    model: torch.nn.Module,
    batches: Sequence[Tensor],
    variants: Mapping[str, Mapping[str, Variant]],
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """The estimated loss in nats a token of each variant of each module, by the names of both.

    The model runs in eval mode, forward and backward; its parameters get no gradients and do not change. The
    same batches on the same device, with the same number of threads, give the same bits.

    Args:
        model: a causal language model that returns ``logits``.
        batches: token ids, int64 (1, tokens).
        variants: for each name of a module, its variants by name.
        progress: called as ``progress(done, total, name)`` after each batch.

    Raises:
        ValueError: a module is not reached, or a batch has one token, after which nothing is predicted.
    """
    sums = {name: dict.fromkeys(mine, 0.0) for name, mine in variants.items()}
    reached: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    needed = [(p, p.requires_grad) for p in model.parameters()]
    handles = []

    def hook(name: str) -> Any:
        def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            if not y.requires_grad:
                y.requires_grad_()  # nothing ahead of the first modules needs a gradient
            reached.add(name)

            @torch.no_grad()
            def add(gradient: Tensor) -> None:
                for variant, make in variants[name].items():
                    change = make(*args, **kwargs).float() - y.detach().float()
                    sums[name][variant] += 0.5 * float((gradient.float() * change).square().sum())

            y.register_hook(add)

        return watch

    tokens = 0
    try:
        for p, _ in needed:
            p.requires_grad_(False)
        for name in variants:
            handles.append(modules[name].register_forward_hook(hook(name), with_kwargs=True))
        with evaluated(model), torch.enable_grad():
            for index, ids in enumerate(batches):
                if ids.shape[-1] < 2:
                    raise ValueError(
                        f"batches: batch {index} has {ids.shape[-1]} tokens, must have 2 or more"
                    )
                logits = model(ids).logits[:, :-1].flatten(0, 1).float()
                loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
                loss.backward()
                tokens += logits.shape[0]
                if progress is not None:
                    progress(index + 1, len(batches), f"batch {index + 1}")
    finally:
        for handle in handles:
            handle.remove()
        for p, was in needed:
            p.requires_grad_(was)
    missing = [name for name in variants if name not in reached]
    if missing:
        raise ValueError(f"batches: no token reached {missing[0]!r}, must reach every module")
    return {name: {variant: total / tokens for variant, total in mine.items()} for name, mine in sums.items()}
