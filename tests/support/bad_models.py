"""Wrong arguments of what quantizes models and checkpoints; a part of bad_cases.py."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import checkpoints
import fp4gemm
import torch
from bad_base import FUNCTIONS, TYPE, VALUE, Cases, ones
from fp4gemm import checkpoint

CASES = Cases()
add, add_together = CASES.add, CASES.add_together
FALSE_VALUES: tuple[object, ...] = ({}, [], 0, False, "")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))


# ---- quantize_model

FUNCTIONS |= {
    "fp4gemm.models.quantize_model": (
        fp4gemm.models.quantize_model,
        lambda: {"model": model(), "report": lambda report: None},
    )
}
Q = "fp4gemm.models.quantize_model"
for value in ("gpt2", None, True):
    add(Q, "model", f"{value}", lambda value=value: value, TYPE, "must be a torch.nn.Module")
for name in ("include", "exclude"):
    add(Q, name, "type", lambda: 3, TYPE, "got 3 (int), must be a name, with wildcards or without")
    add(Q, name, "bool", lambda: True, TYPE, "got True (bool), must be a name, with wildcards or without")
    add(Q, name, "empty", list, VALUE, "got [] (list), must have at least one pattern, or be None")
    add(Q, name, "pattern", lambda: "(", VALUE, "got '(', must be a name, with wildcards")
    add(Q, name, "nothing", lambda: "attention", VALUE, "'attention' matches none of the 2 linear layers")
add(Q, "types", "none", lambda: None, TYPE, "got None (NoneType), must be an iterable of torch.nn.Linear")
add(Q, "types", "module", lambda: [torch.nn.ReLU], TYPE, "got the class ReLU, must be torch.nn.Linear or")
for name, wanted in (
    ("activations", "'per-token', 'per-tensor', 'fp8', 'a16', 'mxfp8', 'mxfp8-mxfp4' or 'auto'"),
    ("weight_scaling", "'row' or 'tensor'"),
    ("check_finite", "'off' or 'raise'"),
    ("on_unsupported", "'skip' or 'raise'"),
    ("fuse", "'auto' or 'none'"),
):
    add(Q, name, "value", lambda: "all", VALUE, f"got 'all', must be {wanted}")
    add(Q, name, "none", lambda: None, TYPE, f"got None (NoneType), must be {wanted}")
    add(Q, name, "bool", lambda: False, TYPE, f"got False (bool), must be {wanted}")
add(Q, "method", "value", lambda: "awq", VALUE, "got 'awq', must be")
add(Q, "method", "bool", lambda: True, TYPE, "got True (bool), must be")
add(
    Q, "calibration", "path", lambda: "calibration.safetensors", TYPE, "must be Statistics or a list of batch"
)
add(Q, "calibration", "bool", lambda: True, TYPE, "got True (bool), must be Statistics or a list of batches")
for name in ("sequential", "inplace", "use_fast_accum", "batch_invariant"):
    for value in ("no", None, 0):
        add(Q, name, f"{value}", lambda value=value: value, TYPE, "must be True or False")
add(Q, "residual_channels", "type", lambda: "32", TYPE, "got '32' (str), must be an int")
add(Q, "residual_channels", "bool", lambda: True, TYPE, "got True (bool), must be an int")
add(Q, "residual_channels", "step", lambda: 33, VALUE, "got 33, must be a multiple of 32")
add(Q, "residual_channels", "negative", lambda: -32, VALUE, "got -32, must be at least 0")
add(Q, "residual_channels", "no data", lambda: 32, VALUE, "calibration")
add(Q, "recipe", "name", lambda: "nvidia", TYPE, "got 'nvidia' (str), must be an fp4gemm.recipe.Recipe")
add(Q, "recipe", "bool", lambda: True, TYPE, "got True (bool), must be an fp4gemm.recipe.Recipe; for_infer")
for name in ("report", "progress"):
    add(Q, name, "bool", lambda: True, TYPE, "got True (bool), must be callable")

# ---- weights of a checkpoint

W = {"gate": ones(8, 32), "up": ones(8, 32)}
FUNCTIONS |= {
    "checkpoint.numerics.quantize_set": (
        checkpoint.numerics.quantize_set,
        lambda: {"weights": dict(W), "format": "modelopt"},
    )
}
S = "checkpoint.numerics.quantize_set"
for value in ([ones(8, 32)], None, ones(8, 32)):
    kind = type(value).__name__
    add(S, "weights", kind, lambda value=value: value, TYPE, "must be a mapping of names to tensors")
add(S, "weights", "names", lambda: {0: ones(8, 32)}, TYPE, "must be a mapping of names to tensors")
add_together(S, "weights-value", lambda: {"weights": {"a": 3}}, TYPE, "got 3 (int), must be a torch.Ten", "a")
for value in FALSE_VALUES:
    add(S, "recipe", repr(value), lambda value=value: value, TYPE, "must be a fp4gemm.recipe.Recipe")
add(S, "format", "value", lambda: "gguf", VALUE, "got 'gguf', must be 'modelopt'")
add(S, "format", "none", lambda: None, TYPE, "got None (NoneType), must be 'modelopt'")
add(S, "shared_amax", "type", lambda: "no", TYPE, "got 'no' (str), must be True or False")

# ---- checkpoints on disk

ROOT = Path(tempfile.mkdtemp(prefix="fp4gemm-bad-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)


def source() -> str:
    folder = ROOT / "source"
    if not folder.exists():
        checkpoints.save(folder, checkpoints.llama(1))
    return str(folder)


def destination() -> str:
    return tempfile.mkdtemp(dir=ROOT)


def of_shapes() -> dict[str, Any]:
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in checkpoints.llama(1).items()}
    return {"tensors": shapes, "config": checkpoints.LLAMA}


FUNCTIONS |= {
    "checkpoint.plan_conversion": (checkpoint.plan_conversion, lambda: {"src": source()}),
    "checkpoint.convert": (checkpoint.convert, lambda: {"src": source(), "dst": destination()}),
    "checkpoint.Plan.of_shapes": (checkpoint.Plan.of_shapes, of_shapes),
    "checkpoint.Plan.of_model": (checkpoint.Plan.of_model, lambda: {"model": model()}),
}
C, P = "checkpoint.convert", "checkpoint.plan_conversion"
PLANS = "checkpoint.Plan.of_shapes checkpoint.Plan.of_model"
for value in (None, 3, True):
    add(f"{C} {P}", "src", f"{value}", lambda value=value: value, TYPE, "must be the path of a folder")
    add(C, "dst", f"{value}", lambda value=value: value, TYPE, "must be the path of a folder")
for value in (*FALSE_VALUES, "modelopt", checkpoint.Options):
    kind = repr(value)
    add(
        f"{C} {P} {PLANS}", "options", kind, lambda value=value: value, TYPE, "must be fp4gemm.checkpoint.Opt"
    )
add(C, "device", "none", lambda: None, TYPE, "got None (NoneType), must be auto, cpu, cuda or cuda:0,1")
add(C, "device", "index", lambda: 0, TYPE, "got 0 (int), must be auto, cpu, cuda or cuda:0,1")
add(C, "device", "name", lambda: "mps", VALUE, "got 'mps', must be auto, cpu, cuda or cuda:0,1")
for name in ("jobs", "max_memory"):
    add(C, name, "zero", lambda: 0, VALUE, "got 0, must be at least 1")
    add(C, name, "bool", lambda: True, TYPE, "got True (bool), must be an int")
    add(C, name, "text", lambda: "8G", TYPE, "got '8G' (str), must be an int")
for name in ("resume", "measured", "verify"):
    for value in ("no", None, 0):
        add(C, name, f"{value}", lambda value=value: value, TYPE, "must be True or False")
for name in ("progress", "calibrating"):
    add(C, name, "bool", lambda: True, TYPE, "got True (bool), must be callable")
SHAPES = "checkpoint.Plan.of_shapes"
add(
    SHAPES,
    "tensors",
    "list",
    lambda: [((8, 32), torch.bfloat16)],
    TYPE,
    "must be a mapping of names to (shape, ",
)
add(SHAPES, "config", "none", lambda: None, TYPE, "got None (NoneType), must be a mapping of keys to values")
add("checkpoint.Plan.of_model", "model", "type", lambda: "gpt2", TYPE, "must be a torch.nn.Module")
