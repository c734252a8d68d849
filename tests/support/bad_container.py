"""Wrong arguments for what all containers have in common."""

from __future__ import annotations

import types

import fp4gemm
import torch
from bad_base import E4, FUNCTIONS, NOT, TYPE, VALUE, A, B, Cases, E, K, M

CASES = Cases()
CONTAINERS = {
    "NVFP4Tensor": A,
    "DecodedTensor": fp4gemm.decode(A),
    "PrepackedTensor": fp4gemm.prepack(B),
    "MXFP8Tensor": E,
    "MXFP4Tensor": E4,
    "FP8Tensor": fp4gemm.quantize_fp8(A.dequantize()),
}
for owner, t in CONTAINERS.items():
    FUNCTIONS |= {
        f"{owner}.size": (t.size, lambda: {"dim": 0}),
        f"{owner}.requires_grad_": (t.requires_grad_, lambda: {"requires_grad": False}),
    }


def each(method: str) -> str:
    return " ".join(owner + method for owner in CONTAINERS)


CASES.add(each(""), "dtype", "type", lambda: "half", TYPE, "got 'half' (str), must be torch.bfloat16")
CASES.add(each(""), "dtype", "wide", lambda: torch.float64, TYPE, "dtype is torch.float64, must be")
CASES.add(each(".to"), "dtype", "wide", lambda: torch.float64, TYPE, "dtype is torch.float64, must be")
CASES.add(each(".to"), "device", "dtype", lambda: torch.int8, TYPE, "dtype is torch.int8, must be", "dtype")
CASES.add(each(".to"), "non_blocking", "int", lambda: 1, TYPE, "got 1 (int), must be True or False")
CASES.add(each(".to"), "copy", "none", lambda: None, TYPE, "got None (NoneType), must be True or False")
CASES.add(each(".size"), "dim", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be an int or None")
CASES.add(each(".size"), "dim", "range", lambda: 2, IndexError, "got 2, must be at least -2 and below 2")
CASES.add(each(".requires_grad_"), "requires_grad", "true", lambda: True, NOT, "got True, must be False")
CASES.add(
    each(".requires_grad_"), "requires_grad", "int", lambda: 1, TYPE, "got 1 (int), must be True or False"
)

T = "NVFP4Tensor."
TE = types.SimpleNamespace(
    get_metadata=lambda: {
        "rowwise_data": A.codes,
        "rowwise_scale_inv": A.to_transformer_engine()["rowwise_scale_inv"],
        "amax_rowwise": A.amax,
    }
)
FUNCTIONS |= {
    f"{T}split": (A.split, lambda: {"split_size": 16, "dim": 0}),
    f"{T}reshape": (lambda shape: A.reshape(*shape), lambda: {"shape": (M, K)}),
    f"{T}from_transformer_engine": (
        fp4gemm.NVFP4Tensor.from_transformer_engine,
        lambda: {"tensor": TE, "columnwise": False},
    ),
    f"{T}to_transformer_engine": (A.to_transformer_engine, lambda: {"columnwise": None}),
}
CASES.add(f"{T}split", "split_size", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
CASES.add(f"{T}split", "split_size", "sum", lambda: [1, 2], VALUE, "a sum of 3, must be 33 together")
CASES.add(f"{T}split", "dim", "columns", lambda: 1, VALUE, "got 1, must be 0: only rows")
CASES.add(f"{T}split", "dim", "type", lambda: 0.0, TYPE, "got 0.0 (float), must be an int")
CASES.add(f"{T}reshape", "shape", "k", lambda: (2 * M, K // 2), VALUE, "must be (m, 64) or (g, n, 64)")
CASES.add(f"{T}reshape", "shape", "type", lambda: (M, 64.0), TYPE, "got 64.0 (float), must be an int")
CASES.add(f"{T}from_transformer_engine", "tensor", "ours", lambda: A, TYPE, "must be an NVFP4Tensor of Trans")
CASES.add(f"{T}from_transformer_engine", "columnwise", "int", lambda: 1, TYPE, "got 1 (int), must be True or")
CASES.add(
    f"{T}to_transformer_engine", "columnwise", "shape", lambda: A, VALUE, "must be (64, 33), of the tran"
)
CASES.add(
    f"{T}to_transformer_engine", "columnwise", "type", lambda: 1, TYPE, "must be an fp4gemm.NVFP4Tensor"
)
