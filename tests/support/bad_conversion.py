"""Wrong arguments of convert_model and set_recipe; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import FUNCTIONS, TYPE, VALUE, Cases
from fp4gemm import training


def model(features: int = 64) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(features, 32), torch.nn.ReLU())


def converted() -> torch.nn.Sequential:
    made = model()
    training.convert_model(made, "nvidia")
    return made


FUNCTIONS |= {
    "training.convert_model": (
        training.convert_model,
        lambda: {"model": model(), "recipe": "nvidia", "filter": None, "keep_last": 0.0},
    ),
    "training.set_recipe": (training.set_recipe, lambda: {"model": converted(), "recipe": "bf16"}),
}
CASES = Cases()
add = CASES.add

BOTH = "training.convert_model training.set_recipe"
add(BOTH, "model", "type", lambda: [1], TYPE, "must be a torch.nn.Module")
add(BOTH, "model", "none", lambda: None, TYPE, "got None (NoneType), must be a torch.nn.Module")
add(BOTH, "recipe", "name", lambda: "fp8", VALUE, "got 'fp8', must be bf16, nvidia")
add(BOTH, "recipe", "type", lambda: 4, TYPE, "got 4 (int), must be an fp4gemm.training.Recipe")
add(BOTH, "recipe", "cast", lambda: [training.Cast()], TYPE, "must be an fp4gemm.training.Recipe")
for name in BOTH.split():
    CASES.add_together(
        name,
        "recipe-result",
        lambda: {"recipe": lambda _: 3},
        TYPE,
        "returned 3 (int), must be",
        "recipe('0')",
    )
    CASES.add_together(
        name, "recipe-result name", lambda: {"recipe": lambda _: "no"}, VALUE, "got 'no', must be", "recipe"
    )
C = "training.convert_model"
add(C, "model", "without layers", torch.nn.ReLU, VALUE, "has no torch.nn.Linear and no experts")
add(C, "filter", "type", lambda: 3, TYPE, "got 3 (int)")
add(C, "filter", "pattern", lambda: "(", VALUE, "got '(', must be a name, with wildcards")
add(
    C,
    "filter",
    "nothing",
    lambda: "attention",
    VALUE,
    "'attention' matches none of the 1 layers, such as '0'",
)
add(C, "keep_last", "type", lambda: "15 %", TYPE, "got '15 %' (str), must be a number from 0 to 1")
add(C, "keep_last", "bool", lambda: True, TYPE, "got True (bool), must be a number from 0 to 1")
add(C, "keep_last", "percent", lambda: 15, VALUE, "got 15, must be from 0 to 1")
add(C, "keep_last", "sign", lambda: -0.1, VALUE, "got -0.1, must be from 0 to 1")
add(C, "keep_last", "blocks", lambda: 0.15, VALUE, "must be 0 for a model without a torch.nn.ModuleList")
add("training.set_recipe", "model", "float", model, VALUE, "has no fp4gemm.training layer, must have one")
