"""Wrong arguments of fp4gemm.training: recipes, functions and layers; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import FUNCTIONS, NOT, STATE, TYPE, VALUE, Cases, ends, ones
from fp4gemm import training
from fp4gemm.training import Cast, Recipe, functional
from torch import Tensor

TOKENS, IN, OUT, G = 33, 64, 32, 3
ROW, TENSOR, TILES = Cast(), Cast(scaling="tensor"), Cast(scaling="tensor", block=(16, 16))
ROTATED = Cast(hadamard="bf16")
UNCORRECTED = Cast(hadamard="fp32", stochastic=True)
EDEN = Cast(encode="eden", hadamard="fp32", stochastic=True)


def _with_main_grad(main_grad: Any) -> Tensor:
    weight = ones(OUT, IN)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    return functional.linear(ones(TOKENS, IN), weight)


def _assigned(recipe: Any) -> training.Linear:
    layer = training.Linear(IN, OUT)
    layer.recipe = recipe
    return layer


OPERANDS: dict[str, Any] = dict.fromkeys(("x", "w", "dy", "w_t", "dy_t", "x_t"))
DENSE: dict[str, Any] = {"x": ones(TOKENS, IN), "weight": ones(OUT, IN), "bias": None, "recipe": "nvidia"}
LAYER: dict[str, Any] = {"in_features": IN, "out_features": OUT, "bias": True, "device": None, "dtype": None}

FUNCTIONS |= {
    "training.Cast": (
        Cast,
        lambda: {name: field.default for name, field in Cast.__dataclass_fields__.items()},
    ),
    "training.Recipe": (
        Recipe,
        lambda: {name: field.default for name, field in Recipe.__dataclass_fields__.items()},
    ),
    "training.resolve": (training.resolve, lambda: {"recipe": "nvidia"}),
    "training.linear": (
        lambda x, weight, bias, recipe, state, cache, use_main_grad: functional.linear(
            x, weight, bias, recipe, state=state, cache=cache, use_main_grad=use_main_grad
        ),
        lambda: {**DENSE, "state": STATE, "cache": None, "use_main_grad": True},
    ),
    "training.grouped_linear": (
        lambda x, weight, offs, bias, recipe, state, cache, use_main_grad: functional.grouped_linear(
            x, weight, offs, bias, recipe, state=state, cache=cache, use_main_grad=use_main_grad
        ),
        lambda: {
            **DENSE,
            "weight": ones(G, OUT, IN),
            "offs": ends(5, 5, TOKENS),
            "state": STATE,
            "cache": training.WeightCache(),
            "use_main_grad": True,
        },
    ),
    "training.Linear": (
        lambda in_features, out_features, bias, device, dtype, recipe: training.Linear(
            in_features, out_features, bias, device, dtype, recipe=recipe
        ),
        lambda: {**LAYER, "recipe": "nvidia"},
    ),
    "training.GroupedLinear": (
        lambda num_groups, in_features, out_features, bias, device, dtype, recipe: training.GroupedLinear(
            num_groups, in_features, out_features, bias, device=device, dtype=dtype, recipe=recipe
        ),
        lambda: {**LAYER, "num_groups": G, "recipe": "nvidia"},
    ),
    "training.Linear.recipe": (_assigned, lambda: {"recipe": "bf16"}),
    "training.quantize_input": (
        lambda x, recipe, offs, state: training.quantize_input(x, recipe, offs, state=state),
        lambda: {"x": ones(TOKENS, IN), "recipe": "nvidia", "offs": None, "state": None},
    ),
    "training.main_grad": (_with_main_grad, lambda: {"main_grad": torch.zeros(OUT, IN)}),
}
CASES = Cases()
add = CASES.add

# ---- Cast: one field by itself
C = "training.Cast"
add(C, "format", "value", lambda: "mxfp4", VALUE, "got 'mxfp4', must be 'nvfp4' or 'mxfp8'")
add(C, "format", "type", lambda: None, TYPE, "got None (NoneType), must be 'nvfp4' or 'mxfp8'")
add(C, "scaling", "value", lambda: "column", VALUE, "got 'column', must be 'row' or 'tensor'")
add(C, "scaling", "type", lambda: 1, TYPE, "got 1 (int), must be 'row' or 'tensor'")
add(C, "block", "value", lambda: (1, 32), VALUE, "got (1, 32), must be (1, 16) or (16, 16)")
add(C, "block", "type", lambda: 16, TYPE, "got 16 (int), must be (1, 16) or (16, 16)")
add(C, "hadamard", "value", lambda: "fp16", VALUE, "got 'fp16', must be None, 'bf16' or 'fp32'")
add(C, "hadamard", "bool", lambda: True, TYPE, "got True (bool), must be None, 'bf16' or 'fp32'")
add(C, "stochastic", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(C, "four_over_six_error", "value", lambda: "slow", VALUE, "got 'slow', must be 'exact' or 'fast'")
add(C, "four_over_six_error", "alone", lambda: "fast", VALUE, "must be omitted without four_over_six")
add(C, "four_over_six", "value", lambda: "max", VALUE, "got 'max', must be None, 'mae' or 'mse'")
add(C, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be None, 448 or 256")
add(C, "encode", "value", lambda: "torchao", VALUE, "got 'torchao', must be 'te', 'te_per_token' or 'eden'")
add(C, "source", "value", lambda: "columnwise", VALUE, "got 'columnwise', must be 'original' or 'rowwise'")
add(C, "source", "type", lambda: None, TYPE, "got None (NoneType), must be 'original' or 'rowwise'")


def together(kind: str, error: type[Exception], says: str, name: str, **fields: Any) -> None:
    CASES.add_together(C, kind, lambda: fields, error, says, name)


T = {"scaling": "tensor"}
SIX = {"four_over_six": "mae"}
together("block-row", NOT, "(16, 16)", "block", block=(16, 16))
together(
    "hadamard-block", NOT, "got (16, 16) with hadamard 'bf16'", "block", **T, block=(16, 16), hadamard="bf16"
)
together(
    "stochastic-block",
    NOT,
    "got (16, 16) with stochastic True",
    "block",
    **T,
    block=(16, 16),
    stochastic=True,
)
together(
    "encode-block",
    NOT,
    "got (16, 16) with encode 'te_per_token'",
    "block",
    **T,
    block=(16, 16),
    encode="te_per_token",
)
together(
    "four_over_six-hadamard", NOT, "got 'mae' with hadamard 'bf16'", "four_over_six", **SIX, hadamard="bf16"
)
together(
    "four_over_six-stochastic", NOT, "got 'mae' with stochastic True", "four_over_six", **SIX, stochastic=True
)
together(
    "four_over_six-encode",
    NOT,
    "got 'mae' with encode 'te_per_token'",
    "four_over_six",
    **SIX,
    encode="te_per_token",
)
together("e4m3_max-alone", VALUE, "got 256, must be 448", "e4m3_max", e4m3_max=256)

# ---- Recipe: a field by itself, and beside others
R = "training.Recipe"
for operand in OPERANDS:
    says = ", 'dequantized' or None" if operand in ("w_t", "x_t") else " or None"
    add(R, operand, "type", lambda: True, TYPE, f"got True (bool), must be a Cast{says}")
    add(R, operand, "name", lambda: "nvidia", VALUE, f"got 'nvidia', must be a Cast{says}")
add(R, "hadamard_signs", "range", lambda: 0x10000, VALUE, "got 65536")
add(R, "hadamard_signs", "alone", lambda: 3, VALUE, "got 0x3, must be omitted without a Cast with hadamard")
add(R, "hadamard_signs", "type", lambda: "0xD7E8", TYPE, "got '0xD7E8' (str)")
add(R, "seed", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be an int")
add(R, "seed", "sign", lambda: -1, VALUE, "got -1, must be at least 0")
add(R, "seed", "range", lambda: 2**63, VALUE, "must be below 2**63")
add(R, "save_input", "value", lambda: "both", VALUE, "got 'both', must be 'quantized' or 'original'")
add(R, "batch_invariant", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(R, "batch_invariant", "w", lambda: True, VALUE, "got True, must be False where w is None")
add(R, "balance_tokens", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(R, "balance_tokens", "dy_t", lambda: True, VALUE, "got True, must be False where dy_t is None")
add(R, "cache_weight", "type", lambda: None, TYPE, "got None (NoneType), must be True or False")


def pair(kind: str, says: str, name: str = "", **operands: Any) -> None:
    CASES.add_together(R, kind, lambda: operands, VALUE, says, name or kind.split("-")[0])


FORWARD = {"x": ROW, "w": ROW}
pair("w-missing", "got None, must be a Cast, as x is", x=ROW)
pair("w_t-missing", "got None, must be a Cast, as dy is", dy=ROW)
pair("x_t-missing", "got None, must be a Cast, as dy_t is", dy_t=ROW)
pair("w_t-alone", "got a Cast, must be None or 'dequantized', since dy is None", w_t=ROW)
pair("x_t-alone", "got a Cast, must be None or 'dequantized', since dy_t is None", x_t=ROW)
pair("x_t-rotated", "hadamard is None, must not be None", dy_t=ROTATED, x_t=ROW)
pair("x_t-rotated alone", "hadamard is 'bf16', must be None", dy_t=ROW, x_t=ROTATED)
pair("x-rotated", "hadamard is 'bf16', must be None; it is for dy, w_t, dy_t", x=ROTATED, w=ROTATED)
pair("w_t-rotated", "hadamard is None, must not be None", dy=ROTATED, w_t=ROW)
pair("w_t-eden", "encode is 'te', must be 'eden', since that of dy is 'eden'", dy=EDEN, w_t=UNCORRECTED)
pair("x_t-eden", "encode is 'eden', must not be 'eden', since that of dy_t", dy_t=UNCORRECTED, x_t=EDEN)
pair("x-tiles", "block is (16, 16), must be (1, 16); it is for w and w_t", x=TILES, w=TILES)
pair("dy_t-tiles", "block is (16, 16), must be (1, 16)", dy_t=TILES, x_t=TENSOR)
pair("x-rowwise", "source is 'rowwise', must be 'original'", x=Cast(source="rowwise"), w=ROW)
pair("dy_t-rowwise", "source is 'rowwise', must be 'original'", dy_t=Cast(source="rowwise"), x_t=ROW)
pair("w_t-rowwise", "needs a Cast as w, the forward copy", dy=ROW, w_t=Cast(source="rowwise"))
pair("w_t-dequantized", "needs a Cast as w, the forward copy; it is None", w_t="dequantized")
pair("x_t-dequantized", "needs a Cast as x, the forward copy; it is None", w=ROW, x_t="dequantized")
pair("w_t-dequantized beside dy", "got 'dequantized', must be a Cast", **FORWARD, dy=ROW, w_t="dequantized")
pair("save_input-dequantized", "must be 'quantized'", **FORWARD, x_t="dequantized", save_input="original")
pair(
    "save_input-rowwise",
    "must be 'quantized'",
    **FORWARD,
    dy_t=ROW,
    x_t=Cast(source="rowwise"),
    save_input="original",
)
pair(
    "balance_tokens-quantized",
    "got True, needs save_input 'original' or source 'rowwise' of x_t",
    **FORWARD,
    dy_t=ROW,
    x_t=ROW,
    balance_tokens=True,
)
pair(
    "balance_tokens-tensor",
    "got True, needs scaling 'row' of x, got 'tensor', where x_t has source 'rowwise'",
    x=TENSOR,
    w=ROW,
    dy_t=ROW,
    x_t=Cast(source="rowwise"),
    balance_tokens=True,
)

# ---- a recipe by name
BY_NAME = "training.resolve training.linear training.grouped_linear training.Linear training.GroupedLinear"
for function in (*BY_NAME.split(), "training.Linear.recipe"):
    add(function, "recipe", "name", lambda: "fp8", VALUE, "got 'fp8', must be bf16, nvidia, ")
    add(function, "recipe", "type", lambda: ROW, TYPE, "must be an fp4gemm.training.Recipe or a name of")
    add(function, "recipe", "none", lambda: None, TYPE, "got None (NoneType), must be")

# ---- the functions
F = "training.linear training.grouped_linear"
add(F, "x", "type", lambda: [1.0], TYPE, "must be a torch.Tensor")
add(
    F, "x", "dtype", lambda: ones(TOKENS, IN).double(), TYPE, "dtype is torch.float64, must be torch.bfloat16"
)
add(F, "x", "features", lambda: ones(TOKENS, IN + 32), VALUE, "shape is (33, 96), must be (..., 64)")
add(F, "x", "scalar", lambda: torch.ones(()), VALUE, "shape is (), must be (..., 64)")
add(F, "weight", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(F, "weight", "rank", lambda: ones(IN), VALUE, "must have rank")
add("training.linear", "weight", "dtype", lambda: ones(OUT, IN).int(), TYPE, "dtype is torch.int32, must be")
add("training.linear", "weight", "device", lambda: ones(OUT, IN, device="meta"), VALUE, "device is meta")
add(
    "training.linear",
    "weight",
    "n",
    lambda: ones(24, IN),
    VALUE,
    "n (out_features) is 24, must be a positive",
)
add(
    "training.grouped_linear",
    "weight",
    "n",
    lambda: ones(G, 24, IN),
    VALUE,
    "n (out_features) is 24, must be",
)
CASES.add_together(
    "training.linear",
    "weight-k",
    lambda: {"x": ones(TOKENS, 48), "weight": ones(OUT, 48)},
    VALUE,
    "k (in_features) is 48, must be a positive multiple of 32",
    "weight",
)
add(F, "bias", "type", lambda: 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor")
add(F, "bias", "dtype", lambda: ones(OUT).long(), TYPE, "dtype is torch.int64, must be")
add(F, "bias", "shape", lambda: ones(OUT + 1), VALUE, "shape is (33,), must be")
add("training.linear", "bias", "device", lambda: ones(OUT, device="meta"), VALUE, "device is meta, must be")
for name in F.split():
    CASES.add_together(
        name,
        "state-bf16",
        lambda: {"state": "x", "recipe": "bf16"},
        TYPE,
        "got 'x' (str), must be a torch.Tensor",
        "state",
    )
add(F, "state", "type", lambda: 7, TYPE, "got 7 (int), must be a torch.Tensor")
add(F, "state", "dtype", lambda: STATE.int(), TYPE, "dtype is torch.int32, must be torch.int64")
add(F, "state", "shape", lambda: torch.zeros(3, dtype=torch.int64), VALUE, "shape is (3,), must be (2,)")
add(F, "state", "device", lambda: STATE.to("meta"), VALUE, "device is meta, must be cpu")
add(F, "cache", "type", dict, TYPE, "got {} (dict), must be an fp4gemm.training.WeightCache or None")
add(
    F, "cache", "class", lambda: training.WeightCache, TYPE, "must be an fp4gemm.training.WeightCache or None"
)
add(F, "use_main_grad", "type", lambda: None, TYPE, "got None (NoneType), must be True or False")
E = "training.grouped_linear"
add(E, "weight", "list-empty", list, TYPE, "got [] (list), must be a torch.Tensor (g, n, k) or a list of g")
add(E, "weight", "list-type", lambda: [None] * G, TYPE, "got None (NoneType), must be", "weight[0]")
add(E, "weight", "list-rank", lambda: [ones(IN)] * G, VALUE, "must have rank 2, (n, k)", "weight[0]")
add(
    E,
    "weight",
    "list-shape",
    lambda: [ones(OUT, IN), ones(OUT, 32), ones(OUT, IN)],
    VALUE,
    "shape is (32, 32), must be (32, 64), the shape of weight[0]",
    "weight[1]",
)
add(
    E,
    "weight",
    "list-dtype",
    lambda: [ones(OUT, IN), ones(OUT, IN).half(), ones(OUT, IN)],
    TYPE,
    "dtype is torch.float16, must be",
    "weight[1]",
)
add(E, "weight", "list-n", lambda: [ones(24, IN)] * G, VALUE, "n (out_features) is 24, must be a positive")
add(E, "x", "rank", lambda: ones(3, 11, IN), VALUE, "must have rank 2, (m, k)")
add(E, "offs", "type", lambda: [5, 5, TOKENS], TYPE, "must be a torch.Tensor")
add(E, "offs", "dtype", lambda: ends(5, 5, TOKENS).float(), TYPE, "dtype is torch.float32")
add(E, "offs", "count", lambda: ends(5, TOKENS), VALUE, "shape is (2,), must be (3,)")
add(E, "offs", "descending", lambda: ends(9, 5, TOKENS), VALUE, "entry 1 is 5, must be at least 9")
add(E, "offs", "range", lambda: ends(5, 9, TOKENS + 1), VALUE, "the last entry is 34, must be at")

Q = "training.quantize_input"
add(Q, "x", "type", lambda: [1.0], TYPE, "must be a torch.Tensor")
add(Q, "x", "twice", lambda: training.quantize_input(ones(TOKENS, IN), "nvidia"), TYPE, "must be a torch.Ten")
add(Q, "x", "dtype", lambda: ones(TOKENS, IN).double(), TYPE, "dtype is torch.float64, must be")
add(Q, "x", "scalar", lambda: torch.ones(()), VALUE, "shape is (), must be (..., k)")
add(Q, "x", "k", lambda: ones(TOKENS, 48), VALUE, "k is 48, must be a positive multiple of 32")
add(Q, "recipe", "name", lambda: "fp8", VALUE, "got 'fp8', must be bf16, nvidia, ")
add(Q, "recipe", "layer", lambda: torch.nn.Linear(IN, OUT), TYPE, "must be an fp4gemm.training.Recipe")
add(Q, "offs", "type", lambda: [5, 5, TOKENS], TYPE, "must be a torch.Tensor")
add(Q, "offs", "descending", lambda: ends(9, 5, TOKENS), VALUE, "entry 1 is 5, must be at least 9")
add(Q, "offs", "range", lambda: ends(5, 9, TOKENS + 1), VALUE, "the last entry is 34, must be at")
add(Q, "state", "shape", lambda: torch.zeros(3, dtype=torch.int64), VALUE, "shape is (3,), must be (2,)")

# ---- the layers
L = "training.Linear training.GroupedLinear"
for features, other in (("in_features", "k"), ("out_features", "n")):
    add(L, features, "type", lambda: 64.0, TYPE, "got 64.0 (float), must be an int")
    add(L, features, "zero", lambda: 0, VALUE, "got 0, must be at least 1")
    add(L, features, "step", lambda: 40, VALUE, f"{other} is 40, must be a positive multiple of 32")
add(L, "bias", "type", lambda: None, TYPE, "got None (NoneType), must be True or False")
add(L, "device", "type", lambda: 1.5, TYPE, "got 1.5 (float), must be a torch.device, a string or an index")
add(L, "device", "name", lambda: "gpu", VALUE, "got 'gpu', must name a torch device")
add(L, "dtype", "type", lambda: "bf16", TYPE, "got 'bf16' (str), must be torch.bfloat16")
add(L, "dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be torch.bfloat16")
add("training.GroupedLinear", "num_groups", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
add("training.GroupedLinear", "num_groups", "type", lambda: True, TYPE, "got True (bool), must be an int")

# ---- main_grad
G_ = ("training.main_grad", "main_grad")
add(*G_, "type", lambda: 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor", "weight.main_grad")
add(*G_, "dtype", lambda: ones(OUT, IN).half(), TYPE, "dtype is torch.float16, must be", "weight.main_grad")
add(*G_, "shape", lambda: ones(IN, OUT), VALUE, "shape is (64, 32), must be (32, 64)", "weight.main_grad")
add(*G_, "device", lambda: ones(OUT, IN, device="meta"), VALUE, "device is meta", "weight.main_grad")
