"""How many bytes autograd saves for the backward pass of linear layers, and the table of docs/training.md."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from fp4gemm import training
from fp4gemm.training import _copies
from torch import Tensor

M, K, N = 512, 256, 384
BEGIN, END = "<!-- training memory: begin -->", "<!-- training memory: end -->"


def saved_bytes(function: Callable[[], object], *own: Tensor) -> int:
    """Bytes of the storages that autograd saves while the function runs, each once, without ``own``."""
    known = {t.untyped_storage().data_ptr() for t in own}
    found: dict[int, torch.UntypedStorage] = {}  # which keeps them alive, so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known and t.numel() > 2:  # not {seed, offset}
            found[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    del result
    return sum(storage.nbytes() for storage in found.values())


def layers(recipe: str, count: int) -> list[torch.nn.Linear]:
    if recipe == "torch":
        return [torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    return [training.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe) for _ in range(count)]


def of_input(recipe: str, count: int) -> float:
    """Bytes saved for an element of an x (m, k) that ``count`` layers read."""
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    made = layers(recipe, count)
    return saved_bytes(lambda: [layer(x) for layer in made], *(layer.weight for layer in made)) / x.numel()


def of_shared_input(recipe: str, count: int) -> float:
    """The same with one training.quantize_input for all layers."""
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    made = layers(recipe, count)

    def run() -> list[Tensor]:
        xq = training.quantize_input(x, recipe)
        return [layer(xq) for layer in made]

    return saved_bytes(run, *(layer.weight for layer in made)) / x.numel()


def of_weight(recipe: str) -> float:
    """Bytes for an element of W (n, k) of the quantized copies that a cache keeps from step to step."""
    (layer,) = layers(recipe, 1)
    if recipe == "torch":
        return 0.0
    own, keeps_all = training.resolve(recipe), SimpleNamespace(keeps=lambda _: True)
    if not _copies.is_kept(layer.weight, own, keeps_all):  # type: ignore[arg-type]
        return 0.0
    copies = _copies.weight_copies(layer.weight, own, None, True, True)
    return sum(t.nbytes for parts in copies for t in parts if t is not None) / layer.weight.numel()


def table() -> list[str]:
    """The lines of the table."""
    lines = [
        "| recipe | x of one layer | x that q, k and v read | with `quantize_input` | cached copies of W |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in ("torch", *training.PRESETS):
        shown = "torch.nn.Linear, bf16" if name == "torch" else f"`{name}`"
        shared = "-" if name == "torch" else f"{of_shared_input(name, 3):.3f}"
        numbers = [f"{number:.3f}" for number in (of_input(name, 1), of_input(name, 3), of_weight(name))]
        lines.append(f"| {shown} | " + " | ".join([*numbers[:2], shared, numbers[2]]) + " |")
    return lines
