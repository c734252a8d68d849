"""Wrong arguments of fp4gemm.calibrate."""

from __future__ import annotations

from typing import Any

import fp4gemm
import torch
from bad_base import FUNCTIONS, TYPE, VALUE, Cases, ones

CASES = Cases()
MODEL = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))


class Branch(torch.nn.Module):
    """A model with a layer that no token reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def base() -> dict[str, Any]:
    return {"model": MODEL, "batches": [ones(3, 64)]}


FUNCTIONS |= {"calibrate": (fp4gemm.calibrate, base)}


def add(kind: str, error: type[Exception], says: str, name: str = "", **changed: Any) -> None:
    """Adds a case; the message names the argument that ``kind`` starts with, unless ``name`` says another."""
    CASES.add_together("calibrate", kind, lambda: changed, error, says, name or kind.split("-")[0])


add("model-type", TYPE, "got 'gpt2' (str), must be a torch.nn.Module", model="gpt2")
add("model-empty", VALUE, "has no layer that quantize_model would swap", model=torch.nn.ReLU())
add("model-branch", VALUE, "no token reached 'idle', must reach every layer", "batches", model=Branch())
add("batches-type", TYPE, "got 3 (int), must be a list of batches", batches=3)
add(
    "batches-tensor", TYPE, "got a torch.float32 tensor of shape (3, 64), must be a list", batches=ones(3, 64)
)
add("batches-empty", VALUE, "is empty, must have at least one batch", batches=[])
add(
    "batches-width",
    VALUE,
    "batch 1, a torch.float32 tensor of shape (3, 63), is not accepted by the model: RuntimeError: ",
    batches=[ones(3, 64), ones(3, 63)],
)
add(
    "batches-keyword",
    VALUE,
    "is not accepted by the model: TypeError: ",
    batches=[{"ids": ones(3, 64)}],
)
add(
    "batches-nan",
    VALUE,
    "the inputs of '0', '1' hold NaN or infinity, must be finite",
    batches=[ones(3, 64) * torch.nan],
)
add("second_moment", TYPE, "got 1 (int), must be True or False", second_moment=1)
add("quantization_error", TYPE, "got 1 (int), must be True or False", quantization_error=1)
add("sequential", TYPE, "got 'auto' (str), must be True or False", sequential="auto")
add("sequential-model", VALUE, "has no torch.nn.ModuleList of two or more blocks", sequential=True)
add("device", VALUE, "got 'cpu', must be None without sequential=True", device="cpu")
add("device-name", VALUE, "got 'gpu0', must name a torch device", device="gpu0", sequential=True)
add("progress", TYPE, "got True (bool), must be callable", progress=True)
add("include", TYPE, "got 1 (int), must be a name, with wildcards", include=1)
add("include-none", VALUE, "matches none of the 2 linear layers", include="lm_head")
add("exclude", VALUE, "got '(', must be a name, with wildcards", exclude="(")
add("types", TYPE, "got 1 (int), must be an iterable", types=1)
