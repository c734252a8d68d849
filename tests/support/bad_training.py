"""Wrong recipes, and wrong arguments of the layers of fp4gemm.training, with the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fp4gemm import training
from fp4gemm.training import Cast, Recipe, functional

ROW, TENSOR, PRESETS = Cast(), Cast(scaling="tensor"), training.PRESETS
BF16 = torch.bfloat16
TYPE, VALUE, NOT = TypeError, ValueError, NotImplementedError


class Case(NamedTuple):
    """A call that must raise exactly this class, with a text that begins with the name and contains says."""

    id: str
    call: Callable[[], Any]
    error: type[Exception]
    name: str
    says: str


def complaint(case: Case) -> str | None:
    """What is wrong with the error of a case, or None."""
    try:
        case.call()
    except Exception as error:
        text = str(error)
        if type(error) is not case.error:
            return f"raised {type(error).__name__}: {text}"
        if not text.startswith(f"{case.name}:") or case.says not in text:
            return f"says {text!r}, must begin with {case.name!r} and contain {case.says!r}"
        return None
    return "raised nothing"


def _fields() -> list[Case]:
    """Wrong fields of a Cast."""
    rows = [
        ("scaling", {"scaling": "column"}, VALUE, "got 'column', must be 'row' or 'tensor'"),
        ("scaling", {"scaling": 1}, TYPE, "got 1 (int), must be 'row' or 'tensor'"),
        ("block", {"block": (32, 32)}, VALUE, "got (32, 32), must be (1, 16) or (16, 16)"),
        ("block", {"block": 16}, TYPE, "got 16 (int), must be (1, 16) or (16, 16)"),
        ("hadamard", {"hadamard": "fp16"}, VALUE, "got 'fp16', must be None, 'bf16' or 'fp32'"),
        ("hadamard", {"hadamard": True}, TYPE, "got True (bool), must be None, 'bf16' or 'fp32'"),
        ("stochastic", {"stochastic": 1}, TYPE, "got 1 (int), must be True or False"),
        ("headroom", {"headroom": "17/16"}, TYPE, "got '17/16' (str), must be 1.0 or 17/16"),
        ("headroom", {"headroom": True}, TYPE, "got True (bool), must be 1.0 or 17/16"),
        ("headroom", {"headroom": 1.5}, VALUE, "got 1.5, must be 1.0 or 17/16"),
        ("four_over_six", {"four_over_six": "max"}, VALUE, "got 'max', must be None, 'mae' or 'mse'"),
        ("four_over_six", {"four_over_six": True}, TYPE, "got True (bool), must be None, 'mae' or 'mse'"),
        ("e4m3_max", {"e4m3_max": 240}, VALUE, "got 240, must be None, 448 or 256"),
        ("e4m3_max", {"e4m3_max": 256}, VALUE, "got 256, must be 448 without four_over_six"),
        ("encode", {"encode": "nv"}, VALUE, "got 'nv', must be 'te' or 'te_per_token'"),
        ("source", {"source": "columnwise"}, VALUE, "got 'columnwise', must be 'original' or 'rowwise'"),
        ("source", {"source": None}, TYPE, "got None (NoneType), must be 'original' or 'rowwise'"),
        ("block", {"block": (16, 16)}, NOT, "with scaling 'row', must be (1, 16) with it"),
        ("block", {"block": (16, 16), "scaling": "tensor", "hadamard": "bf16"}, NOT, "with hadamard 'bf16'"),
        ("block", {"block": (16, 16), "scaling": "tensor", "stochastic": True}, NOT, "with stochastic True"),
        (
            "block",
            {"block": (16, 16), "scaling": "tensor", "encode": "te_per_token"},
            NOT,
            "with encode 'te_per_token'",
        ),
        ("four_over_six", {"four_over_six": "mae", "hadamard": "bf16"}, NOT, "with hadamard 'bf16'"),
        ("four_over_six", {"four_over_six": "mse", "stochastic": True}, NOT, "with stochastic True"),
        (
            "four_over_six",
            {"four_over_six": "mae", "encode": "te_per_token"},
            NOT,
            "with encode 'te_per_token'",
        ),
        ("headroom", {"four_over_six": "mae", "headroom": 17 / 16}, NOT, "with four_over_six 'mae'"),
    ]
    return [
        Case(f"Cast-{'-'.join(map(str, fields))}-{i}", lambda f=fields: Cast(**f), error, name, says)
        for i, (name, fields, error, says) in enumerate(rows)
    ]


def _recipes() -> list[Case]:
    """Wrong fields of a Recipe, alone and together."""
    rotated, stochastic = Cast(hadamard="fp32"), Cast(stochastic=True)
    both: dict[str, Any] = {"x": ROW, "w": ROW}
    rows = [
        ("x", {"x": "row", "w": ROW}, VALUE, "got 'row', must be a Cast or None"),
        ("x", {"x": 4, "w": ROW}, TYPE, "got 4 (int), must be a Cast or None"),
        ("w", {"x": ROW, "w": {"scaling": "row"}}, TYPE, "(dict), must be a Cast or None"),
        ("w_t", {"dy": ROW, "w_t": True}, TYPE, "got True (bool), must be a Cast, 'dequantized' or None"),
        ("x_t", {**both, "x_t": "rowwise"}, VALUE, "got 'rowwise', must be a Cast, 'dequantized' or None"),
        ("dy", {**both, "dy": "dequantized"}, VALUE, "got 'dequantized', must be a Cast or None"),
        ("w", {"x": ROW}, VALUE, "got None, must be a Cast, as x is"),
        ("w_t", {"dy": ROW}, VALUE, "got None, must be a Cast, as dy is"),
        ("w_t", {"w_t": ROW}, VALUE, "got a Cast, must be None or 'dequantized', since dy is None"),
        ("x_t", {"dy_t": ROW}, VALUE, "got None, must be a Cast, as dy_t is"),
        ("x_t", {"x_t": ROW}, VALUE, "got a Cast, must be None or 'dequantized', since dy_t is None"),
        ("w_t", {**both, "dy": ROW, "w_t": "dequantized"}, VALUE, "got 'dequantized', must be a Cast"),
        ("x_t", {**both, "dy_t": ROW, "x_t": "dequantized"}, VALUE, "got 'dequantized', must be a Cast"),
        ("w_t", {"w_t": "dequantized"}, VALUE, "needs a Cast as w, the forward copy; it is None"),
        ("x_t", {"w": ROW, "x_t": "dequantized"}, VALUE, "needs a Cast as x, the forward copy; it is None"),
        ("w_t", {"dy": ROW, "w_t": Cast(source="rowwise")}, VALUE, "needs a Cast as w, the forward copy"),
        ("x_t", {"dy_t": ROW, "x_t": Cast(source="rowwise")}, VALUE, "needs a Cast as x, the forward copy"),
        ("dy_t", {"dy_t": Cast(source="rowwise"), "x_t": ROW}, VALUE, "source is 'rowwise', must be"),
        ("x", {"x": Cast(source="rowwise"), "w": ROW}, VALUE, "source is 'rowwise', must be 'original'"),
        ("x", {"x": rotated, "w": rotated}, VALUE, "hadamard is 'fp32', must be None"),
        ("dy", {"dy": rotated, "w_t": rotated}, VALUE, "hadamard is 'fp32', must be None"),
        ("x_t", {"dy_t": rotated, "x_t": ROW}, VALUE, "hadamard is None, must not be None"),
        ("x_t", {"dy_t": stochastic, "x_t": rotated}, VALUE, "hadamard is 'fp32', must be None"),
        ("x", {"x": PRESETS["nvidia"].w, "w": TENSOR}, VALUE, "block is (16, 16), must be (1, 16)"),
        ("x_t", {"dy_t": ROW, "x_t": PRESETS["nvidia"].w}, VALUE, "block is (16, 16), must be (1, 16)"),
        ("hadamard_signs", {"hadamard_signs": 0x10000}, VALUE, "got 65536, must be at most 0xFFFF"),
        ("hadamard_signs", {"hadamard_signs": None}, TYPE, "got None (NoneType), must be an int"),
        ("seed", {"seed": -1}, VALUE, "got -1, must be at least 0"),
        ("seed", {"seed": 2**63}, VALUE, "must be below 2**63"),
        ("seed", {"seed": 1.0}, TYPE, "got 1.0 (float), must be an int"),
        ("save_input", {"save_input": "bf16"}, VALUE, "got 'bf16', must be 'quantized' or 'original'"),
        (
            "save_input",
            {**both, "x_t": "dequantized", "save_input": "original"},
            VALUE,
            "got 'original', must be 'quantized' with x_t 'dequantized'",
        ),
        ("cache_weight", {"cache_weight": None}, TYPE, "got None (NoneType), must be True or False"),
    ]
    made = [
        Case(f"Recipe-{'-'.join(map(str, fields))}-{i}", lambda f=fields: Recipe(**f), error, name, says)
        for i, (name, fields, error, says) in enumerate(rows)
    ]
    return [
        *made,
        Case("resolve-name", lambda: training.resolve("fp8"), VALUE, "recipe", "got 'fp8', must be bf16, "),
        Case("resolve-type", lambda: training.resolve(None), TYPE, "recipe", "got None (NoneType), must be"),
        Case(
            "replace",
            lambda: PRESETS["nvidia"].replace(x_t=TENSOR),
            VALUE,
            "x_t",
            "hadamard is None, must not",
        ),
    ]


def _ones(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _with_main_grad(value: Any) -> torch.Tensor:
    weight = torch.nn.Parameter(_ones(96, 64))
    weight.main_grad = value
    return weight


def _arguments() -> list[Case]:
    """Wrong arguments of the functions: what is changed in a call that is right."""
    right: dict[str, Any] = {
        "x": _ones(4, 64),
        "weight": _ones(96, 64),
        "bias": _ones(96),
        "recipe": "te_per_token",
        "state": torch.zeros(2, dtype=torch.int64),
    }
    grouped = {**right, "weight": _ones(2, 96, 64), "bias": _ones(2, 96), "offs": _ends(2, 4)}
    of_linear = [
        ("x", [1.0], TYPE, "must be a torch.Tensor", "x"),
        ("x", _ones(4, 96), VALUE, "shape is (4, 96), must be (..., 64)", "x"),
        ("x", torch.tensor(1.0), VALUE, "shape is (), must be (..., 64)", "x"),
        ("x", _ones(4, 64, dtype=torch.float64), TYPE, "dtype is torch.float64", "x"),
        ("x", _ones(4, 64, device="meta"), VALUE, "device is cpu, must be meta", "weight"),
        ("x", torch.ones(4, 64).to_sparse(), TYPE, "layout is torch.sparse_coo", "x"),
        ("weight", "W", TYPE, "got 'W' (str), must be a torch.Tensor", "weight"),
        ("weight", _ones(2, 96, 64), VALUE, "shape is (2, 96, 64), must have rank 2, (n, k)", "weight"),
        ("weight", _ones(96, 64, dtype=torch.int8), TYPE, "dtype is torch.int8", "weight"),
        ("weight", _ones(100, 64), VALUE, "n (out_features) is 100, must be a positive multiple", "weight"),
        ("bias", 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor", "bias"),
        ("bias", _ones(64), VALUE, "shape is (64,), must be (96,)", "bias"),
        ("bias", _ones(96, dtype=torch.float64), TYPE, "dtype is torch.float64", "bias"),
        ("recipe", "nvfp4", VALUE, "got 'nvfp4', must be", "recipe"),
        ("recipe", ROW, TYPE, "must be an fp4gemm.training.Recipe or a name of PRESETS", "recipe"),
        ("state", 7, TYPE, "got 7 (int), must be a torch.Tensor", "state"),
        ("state", torch.zeros(3, dtype=torch.int64), VALUE, "shape is (3,), must be (2,)", "state"),
        ("state", torch.zeros(2), TYPE, "dtype is torch.float32, must be torch.int64", "state"),
        ("weight", _with_main_grad(1), TYPE, "got 1 (int), must be a torch.Tensor", "weight.main_grad"),
        ("weight", _with_main_grad(_ones(96, 64)), TYPE, "dtype is torch.bfloat16", "weight.main_grad"),
        (
            "weight",
            _with_main_grad(_ones(64, 96, dtype=torch.float32)),
            VALUE,
            "shape is (64, 96), must be (96, 64), the shape of weight",
            "weight.main_grad",
        ),
    ]
    of_grouped = [
        ("x", _ones(2, 2, 64), VALUE, "shape is (2, 2, 64), must have rank 2, (m, k)", "x"),
        ("weight", _ones(96, 64), VALUE, "shape is (96, 64), must have rank 3, (g, n, k)", "weight"),
        ("bias", _ones(96), VALUE, "shape is (96,), must be (2, 96)", "bias"),
        ("offs", [2, 4], TYPE, "must be a torch.Tensor", "offs"),
        ("offs", _ends(4), VALUE, "shape is (1,), must be (2,), an end for each matrix", "offs"),
        ("offs", _ends(3, 2), VALUE, "entry 1 is 2, must be at least 3", "offs"),
        ("offs", _ends(2, 5), VALUE, "the last entry is 5, must be at most 4", "offs"),
        ("offs", _ends(2, 4).float(), TYPE, "dtype is torch.float32, must be torch.int32", "offs"),
    ]
    made = []
    for function, base, rows in (
        (functional.linear, right, of_linear),
        (functional.grouped_linear, grouped, of_grouped),
    ):
        for i, (argument, value, error, says, name) in enumerate(rows):
            call = lambda f=function, b=base, a=argument, v=value: f(**{**b, a: v})  # noqa: E731
            made.append(Case(f"{function.__name__}-{argument}-{i}", call, error, name, says))
    for recipe in ("bf16", "nvidia"):
        call = lambda r=recipe: functional.grouped_linear(**{**grouped, "offs": _ends(-1, 4), "recipe": r})  # noqa: E731
        made.append(Case(f"grouped_linear-{recipe}-negative", call, VALUE, "offs", "entry 0 is -1, must be"))
    return made


def _ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _layers() -> list[Case]:
    """Wrong arguments of the layers' constructors, and a recipe that does not fit."""
    free = training.Linear(8, 96, recipe="bf16")
    rows = [
        ("in_features", (80, 96), {}, VALUE, "k is 80, must be a positive multiple of 32"),
        ("out_features", (64, 8), {}, VALUE, "n is 8, must be a positive multiple of 32"),
        ("in_features", (64.0, 96), {}, TYPE, "got 64.0 (float), must be an int"),
        ("out_features", (64, 0), {}, VALUE, "got 0, must be at least 1"),
        ("bias", (64, 96), {"bias": None}, TYPE, "got None (NoneType), must be True or False"),
        ("dtype", (64, 96), {"dtype": torch.float64}, TYPE, "dtype is torch.float64"),
        ("dtype", (64, 96), {"dtype": "bf16"}, TYPE, "got 'bf16' (str)"),
        ("recipe", (64, 96), {"recipe": "mxfp8"}, VALUE, "got 'mxfp8', must be"),
    ]
    made = []
    for name, sizes, options, error, says in rows:
        kind = f"{name}-{sizes}-{options}"
        linear = lambda s=sizes, o=options: training.Linear(*s, **o)  # noqa: E731
        grouped = lambda s=sizes, o=options: training.GroupedLinear(2, *s, **o)  # noqa: E731
        made += [
            Case(f"Linear-{kind}", linear, error, name, says),
            Case(f"GroupedLinear-{kind}", grouped, error, name, says),
        ]
    return [
        *made,
        Case(
            "Linear-switch",
            lambda: setattr(free, "recipe", "nvidia"),
            VALUE,
            "in_features",
            "k is 8, must be a positive multiple of 32",
        ),
        Case(
            "GroupedLinear-num_groups",
            lambda: training.GroupedLinear(0, 64, 96),
            VALUE,
            "num_groups",
            "got 0, must be at least 1",
        ),
    ]


CASES = [*_fields(), *_recipes(), *_arguments(), *_layers()]
