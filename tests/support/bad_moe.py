"""Wrong arguments of fp4gemm.training.MoE and its functions; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import FUNCTIONS, TYPE, VALUE, Cases, ones
from fp4gemm import training
from fp4gemm.training import MoE

DIM, HIDDEN, G = 64, 32, 4
BLOCK = MoE(DIM, HIDDEN, G, top_k=2, num_shared_experts=1, recipe="nvidia")
STATE = training.moe_state(BLOCK, "mixtral", "mlp.")
GATE = "mlp.gate.weight"


def _made(
    dim: Any,
    hidden_dim: Any,
    num_experts: Any,
    top_k: Any,
    num_shared_experts: Any,
    score_func: Any,
    route_norm: Any,
    route_scale: Any,
    load_balance_coeff: Any,
    recipe: Any,
    device: Any,
    dtype: Any,
) -> MoE:
    return MoE(
        dim,
        hidden_dim,
        num_experts,
        top_k=top_k,
        num_shared_experts=num_shared_experts,
        score_func=score_func,
        route_norm=route_norm,
        route_scale=route_scale,
        load_balance_coeff=load_balance_coeff,
        recipe=recipe,
        device=device,
        dtype=dtype,
    )


def _updated(model: Any, group: Any) -> torch.nn.Module:
    training.update_expert_bias(model, group=group)
    return model


def _loaded(moe: Any, state: Any, layout: Any, prefix: Any) -> MoE:
    training.load_moe_state(moe, state, layout, prefix)
    return moe


FUNCTIONS |= {
    "training.MoE": (
        _made,
        lambda: {
            "dim": DIM,
            "hidden_dim": HIDDEN,
            "num_experts": G,
            "top_k": 2,
            "num_shared_experts": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 2.5,
            "load_balance_coeff": 1e-3,
            "recipe": "nvidia",
            "device": None,
            "dtype": None,
        },
    ),
    "training.MoE.forward": (lambda x: BLOCK(x), lambda: {"x": ones(3, 5, DIM)}),
    "training.update_expert_bias": (_updated, lambda: {"model": BLOCK, "group": None}),
    "training.moe_state": (
        training.moe_state,
        lambda: {"moe": BLOCK, "layout": "te", "prefix": "mlp."},
    ),
    "training.load_moe_state": (
        _loaded,
        lambda: {"moe": BLOCK, "state": STATE, "layout": "mixtral", "prefix": "mlp."},
    ),
}
CASES = Cases()
add = CASES.add

M = "training.MoE"
for size in ("dim", "hidden_dim"):
    add(M, size, "type", lambda: 64.0, TYPE, "got 64.0 (float), must be an int")
    add(M, size, "step", lambda: 40, VALUE, "the size is 40, must be a positive multiple of 32")
for count in ("num_experts", "top_k"):
    add(M, count, "zero", lambda: 0, VALUE, "got 0, must be at least 1")
    add(M, count, "type", lambda: True, TYPE, "got True (bool), must be an int")
add(M, "num_experts", "large", lambda: 2049, VALUE, "got 2049, must be at most 2048")
add(M, "top_k", "large", lambda: 5, VALUE, "got 5, must be at most num_experts, which is 4")
add(M, "num_shared_experts", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(M, "num_shared_experts", "type", lambda: None, TYPE, "got None (NoneType), must be an int")
add(M, "score_func", "value", lambda: "tanh", VALUE, "got 'tanh', must be 'softmax' or 'sigmoid'")
add(M, "route_norm", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
for factor in ("route_scale", "load_balance_coeff"):
    add(M, factor, "type", lambda: "1", TYPE, "got '1' (str), must be a number")
    add(M, factor, "zero", lambda: 0, VALUE, "got 0, must be positive and finite")
    add(M, factor, "nan", lambda: float("nan"), VALUE, "got nan, must be positive and finite")
    add(M, factor, "inf", lambda: float("inf"), VALUE, "got inf, must be positive and finite")
add(M, "route_scale", "none", lambda: None, TYPE, "got None (NoneType), must be a number")
add(M, "recipe", "name", lambda: "fp8", VALUE, "got 'fp8', must be bf16, nvidia, ")
add(M, "recipe", "type", lambda: None, TYPE, "got None (NoneType), must be")
add(M, "device", "type", list, TYPE, "got [] (list), must be a torch.device, a string or an index")
add(M, "device", "name", lambda: "gpu", VALUE, "got 'gpu', must name a torch device")
add(M, "dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be torch.bfloat16")

X = "training.MoE.forward"
add(X, "x", "type", lambda: [1.0], TYPE, "must be a torch.Tensor")
add(X, "x", "dtype", lambda: ones(3, DIM).double(), TYPE, "dtype is torch.float64, must be torch.bfloat16")
add(X, "x", "features", lambda: ones(3, 32), VALUE, "shape is (3, 32), must be (..., 64)")
add(X, "x", "scalar", lambda: torch.ones(()), VALUE, "shape is (), must be (..., 64)")
add(X, "x", "device", lambda: ones(3, DIM, device="meta"), VALUE, "device is meta, must be cpu, the")

U = "training.update_expert_bias"
add(U, "model", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.nn.Module")
add(U, "model", "none", lambda: torch.nn.Linear(2, 2), VALUE, "has no MoE with an expert_bias, must have one")
add(
    U, "group", "type", lambda: "tp", TYPE, "got 'tp' (str), must be a torch.distributed.ProcessGroup or None"
)
add(U, "group", "others", lambda: torch.distributed.GroupMember.NON_GROUP_MEMBER, VALUE, "is not a member")

S = "training.moe_state training.load_moe_state"
add(S, "moe", "type", lambda: torch.nn.Linear(2, 2), TYPE, "must be a fp4gemm.training.MoE")
add(S, "layout", "value", lambda: "jax", VALUE, "got 'jax', must be 'torchtitan', 'transformers', 'mixtral',")
add(S, "layout", "type", lambda: None, TYPE, "got None (NoneType), must be 'torchtitan'")
add(S, "prefix", "type", lambda: None, TYPE, "got None (NoneType), must be a str")
L = "training.load_moe_state"
add(L, "state", "type", lambda: [GATE], TYPE, "(list), must be a mapping of tensors")
add(L, "state", "empty", dict, VALUE, "'mlp.experts.0.w1.weight', 'mlp.experts.0.w2.weight', 'mlp.experts.")
add(L, "state", "missing", lambda: {k: v for k, v in STATE.items() if k != GATE}, VALUE, f"'{GATE}' is miss")
add(L, "state", "more", lambda: STATE | {"mlp.bias": ones(2)}, VALUE, "'mlp.bias' is unexpected, must have")
add(L, "state", "shape", lambda: STATE | {GATE: ones(G, 32)}, VALUE, "shape is (4, 32), must be (4, 64)",
    f"state[{GATE!r}]")  # fmt: skip
add(L, "state", "tensor", lambda: STATE | {GATE: None}, TYPE, "got None (NoneType), must be a torch.Tensor",
    f"state[{GATE!r}]")  # fmt: skip
