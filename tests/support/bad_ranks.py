"""Wrong arguments of fp4gemm.records, fp4gemm.ranks and their reference; a part of bad_cases.py."""

from __future__ import annotations

import inspect
from typing import Any

import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    GROUPED,
    NOT,
    ROTATED,
    SCALAR,
    STATE,
    TYPE,
    VALUE,
    A,
    Cases,
    K,
    M,
    ends,
    every_other,
    grad,
    misaligned,
    ones,
)
from fp4gemm import ranks, records, reference
from torch import Tensor

BYTES = records.record_bytes(K)
T, TOP_K, G, D = 20, 4, 16, 64
IDS = torch.arange(T * TOP_K).view(T, TOP_K) % G
ROWS = torch.arange(T * TOP_K, dtype=torch.int32).view(T, TOP_K)
RECORDS = records.quantize_records(ones(M, K))


def out_of(name: str) -> Any:
    """A function of the reference that returns its out."""

    def call(**arguments: Any) -> Tensor:
        getattr(reference, name)(**arguments)
        return arguments["out"]  # type: ignore[no-any-return]

    call.__signature__ = inspect.signature(getattr(reference, name))  # type: ignore[attr-defined]
    return call


def new(columns: int = BYTES) -> Tensor:
    return ones(M, columns, dtype=torch.uint8)


PART: dict[str, Any] = {"num_experts": G, "num_ranks": 2, "rank": 1}
FUNCTIONS |= {
    "records.quantize_records": (
        records.quantize_records,
        lambda: {
            "x": ones(M, K),
            "four_over_six": None,
            "four_over_six_error": "exact",
            "e4m3_max": None,
            "rng_state": None,
            "first_row": 0,
            "out": None,
        },
    ),
    "reference.quantize_records": (
        out_of("quantize_records"),
        lambda: {
            "x": ones(M, K),
            "out": new(),
            "four_over_six": 0,
            "fast_error": False,
            "e4m3_max": 448,
            "rng_state": None,
            "first_row": 0,
        },
    ),
    "records.make_records": (records.make_records, lambda: {"t": A, "out": None}),
    "reference.make_records": (
        out_of("make_records"),
        lambda: {"codes": A.codes, "scales": A.scales, "amax": A.amax, "out": new()},
    ),
    "records.gather_records": (
        records.gather_records,
        lambda: {"records": RECORDS, "rows": ends(3, 1), "offs": ends(1, 2), "k": K, "e4m3_max": 448},
    ),
    "reference.gather_records": (
        reference.gather_records,
        lambda: {"records": [RECORDS], "rows": ends(3, 1), "offs": ends(1, 2), "k": K},
    ),
    "ranks.route_ranks": (
        ranks.route_ranks,
        lambda: {"topk_ids": IDS, "num_experts": G, "num_ranks": 2, "rank": 0, "capacity": 80},
    ),
    "reference.route_ranks": (
        reference.route_ranks,
        lambda: {"topk_ids": IDS, "num_experts": G, "num_ranks": 2, "rank": 0, "capacity": 80},
    ),
    "ranks.combine_ranks": (
        ranks.combine_ranks,
        lambda: {"y": ones(80, D), "row_of_pair": ROWS, "topk_weights": ones(T, TOP_K), "out_dtype": None},
    ),
    "reference.combine_ranks": (
        reference.combine_ranks,
        lambda: {"y": [ones(80, D)], "row_of_pair": ROWS, "topk_weights": ones(T, TOP_K), "out_dtype": None},
    ),
    "ranks.combine_part": (
        ranks.combine_part,
        lambda: {
            "y": ones(80, D),
            "topk_ids": IDS,
            "row_of_pair": ROWS,
            "topk_weights": ones(T, TOP_K),
            "dtype": torch.float32,
            "out": None,
            **PART,
        },
    ),
    "reference.combine_part": (
        out_of("combine_part"),
        lambda: {
            "y": ones(80, D),
            "topk_ids": IDS,
            "row_of_pair": ROWS,
            "topk_weights": ones(T, TOP_K),
            "out": ones(T, D),
            **PART,
        },
    ),
    "ranks.combine_tree": (
        ranks.combine_tree,
        lambda: {
            "parts": [ones(T, D), ones(T, D)],
            "topk_ids": IDS,
            "num_experts": G,
            "first_token": 0,
            "out_dtype": torch.bfloat16,
        },
    ),
    "reference.combine_tree": (
        reference.combine_tree,
        lambda: {
            "parts": [ones(T, D), ones(T, D)],
            "topk_ids": IDS,
            "num_experts": G,
            "first_token": 0,
            "out_dtype": torch.bfloat16,
        },
    ),
}
CASES = Cases()
add, add_together = CASES.add, CASES.add_together

# records
Q, RQ = "records.quantize_records", "reference.quantize_records"
QS = f"{Q} {RQ}"
add(QS, "x", "type", lambda: [1.0], TYPE, "must be a torch.Tensor")
add(QS, "x", "dtype", lambda: ones(M, K).double(), TYPE, "dtype is torch.float64, must be torch.bfloat16")
add(QS, "x", "rank", lambda: ones(1, M, K), VALUE, "must have rank 2, (m, k)")
add(QS, "x", "k", lambda: ones(M, 40), VALUE, "k is 40, must be a positive multiple of 16")
add(QS, "x", "grad", lambda: grad(ones(M, K)), NOT, "requires grad, but fp4gemm.records.quantize_records is")
add(RQ, "x", "strides", lambda: every_other(ones(M, K)), VALUE, "stride along a row is 2, must be 1")
add(Q, "four_over_six", "value", lambda: "rms", VALUE, "got 'rms', must be None, 'mae' or 'mse'")
add(RQ, "four_over_six", "value", lambda: 3, VALUE, "got 3, must be 0, 1 or 2")
add(Q, "four_over_six_error", "value", lambda: "slow", VALUE, "got 'slow', must be 'exact' or 'fast'")
add(Q, "four_over_six_error", "alone", lambda: "fast", VALUE, "must be omitted without four_over_six")
add(RQ, "fast_error", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(QS, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be")
add(QS, "e4m3_max", "alone", lambda: 256, VALUE, "got 256, must be 448 without four_over_six")
add(QS, "rng_state", "type", lambda: (1, 2), TYPE, "must be a torch.Tensor")
add(QS, "rng_state", "shape", lambda: torch.tensor([1, 2, 3]), VALUE, "shape is (3,), must be (2,)")
add(QS, "rng_state", "dtype", lambda: STATE.int(), TYPE, "dtype is torch.int32, must be torch.int64")
add(QS, "first_row", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(QS, "first_row", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be an int")
for name, six in ((Q, "mae"), (RQ, 1)):
    add_together(
        name,
        "four_over_six-random",
        lambda six=six: {"four_over_six": six, "rng_state": STATE},
        NOT,
        "must be None with it; four_over_six needs rng_state None",
        "four_over_six",
    )
O = f"{QS} records.make_records reference.make_records"  # noqa: E741
add(O, "out", "type", lambda: 1, TYPE, "got 1 (int), must be a torch.Tensor")
add(O, "out", "dtype", lambda: new().char(), TYPE, "dtype is torch.int8, must be torch.uint8")
add(O, "out", "shape", lambda: new(BYTES + 16), VALUE, f"must be ({M}, {BYTES})")
add(O, "out", "device", lambda: new().to("meta"), VALUE, "device is meta, must be cpu")
add(O, "out", "strides", lambda: every_other(new()), VALUE, "must be contiguous")
add(O, "out", "aligned", lambda: misaligned(new()), VALUE, "must be 16-byte aligned")

F = "records.make_records"
add(F, "t", "type", lambda: A.codes, TYPE, "must be an fp4gemm.NVFP4Tensor")
add(F, "t", "stack", lambda: fp4gemm.stack([A, A]), VALUE, "must be of rank 2, (t, k)")
add(F, "t", "groups", lambda: GROUPED, VALUE, "has groups of rows, must have none")
add(F, "t", "rotated", lambda: ROTATED, VALUE, "was quantized with hadamard, must not be rotated")
add(F, "t", "scalar", lambda: SCALAR, VALUE, "amax has shape (1,), must be (33,), one for each row")
F = "reference.make_records"
add(F, "codes", "dtype", lambda: A.codes.char(), TYPE, "dtype is torch.int8, must be torch.uint8")
add(F, "scales", "shape", lambda: A.scales[:1], VALUE, "shape is (1, 4), must be (128, 4)")
add(F, "amax", "shape", lambda: ones(1), VALUE, "shape is (1,), must be (33,)")

F = "records.gather_records reference.gather_records"
add(F, "records", "type", lambda: "records", TYPE, "must be a torch.Tensor or a list of them")
add(F, "records", "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor or a list of")
add(F, "records", "empty", list, VALUE, "has 0 tensors, must have between 1 and 128")
add(F, "records", "many", lambda: [RECORDS] * 129, VALUE, "has 129 tensors, must have between 1 and 128")
add(F, "records", "dtype", lambda: [RECORDS.char()], TYPE, "dtype is torch.int8, must be torch.uint8")
add(
    F,
    "records",
    "bytes",
    lambda: [new(BYTES + 16)],
    VALUE,
    f"must be (33, {BYTES}), that of records of k = 64",
)
add(F, "records", "strides", lambda: [every_other(RECORDS)], VALUE, "must be contiguous")
add(F, "records", "other", lambda: [RECORDS, RECORDS[1:]], VALUE, "must be (33, 48)", "records[1]")
add(F, "records", "mixed", lambda: [RECORDS, 1], TYPE, "got 1 (int), must be a torch.Tensor", "records[1]")
add(F, "rows", "dtype", lambda: torch.tensor([1, 2]), TYPE, "dtype is torch.int64, must be torch.int32")
add(F, "rows", "rank", lambda: ends(1, 2).view(1, 2), VALUE, "must have rank 1")
add(F, "rows", "device", lambda: ends(1, 2, device="meta"), VALUE, "device is meta, must be cpu")
add(F, "offs", "type", lambda: [1, 2], TYPE, "got [1, 2] (list), must be a torch.Tensor")
add(F, "offs", "descend", lambda: ends(2, 1), VALUE, "must")
add(F, "k", "type", lambda: 64.0, TYPE, "got 64.0 (float), must be an int")
add(F, "k", "step", lambda: 40, VALUE, "k is 40, must be a positive multiple of 16", "records")
add("records.gather_records", "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")

# ranks
F = "ranks.route_ranks reference.route_ranks"
add(F, "topk_ids", "type", lambda: [[0]], TYPE, "must be a torch.Tensor")
add(F, "topk_ids", "dtype", lambda: IDS.float(), TYPE, "dtype is torch.float32, must be")
add(F, "topk_ids", "twice", lambda: IDS // 2, VALUE, "token 0 names expert 0 twice, must name an expert once")
add("reference.route_ranks", "topk_ids", "strides", lambda: every_other(IDS), VALUE, "must be contiguous")
add(F, "num_experts", "odd", lambda: 15, VALUE, "got 15, must be a multiple of num_ranks, which is 2")
add(F, "num_experts", "large", lambda: 2049, VALUE, "got 2049, must be at most 2048")
add(F, "num_ranks", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
add(F, "num_ranks", "large", lambda: 129, VALUE, "got 129, must be at most 128")
add(F, "num_ranks", "type", lambda: "2", TYPE, "got '2' (str), must be an int")
add(F, "rank", "large", lambda: 2, VALUE, "got 2, must be below num_ranks, which is 2")
add(F, "rank", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(F, "capacity", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
add(F, "capacity", "large", lambda: 2**30, VALUE, "with num_ranks 2 must be at most 1073741823")

C = "ranks.combine_ranks reference.combine_ranks"
P = "ranks.combine_part reference.combine_part"
add(C, "y", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor or a list of them")
add(C, "y", "dtype", lambda: [ones(80, D).double()], TYPE, "dtype is torch.float64, must be torch.bfloat16")
add(C, "y", "mixed", lambda: [ones(80, D), ones(80, D).half()], TYPE, "must be torch.float32", "y[1]")
add(C, "y", "d", lambda: [ones(80, 12)], VALUE, "d is 12, must be a positive multiple of 8")
add(C, "y", "grad", lambda: [grad(ones(80, D))], NOT, "requires grad")
add(P, "y", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add(P, "y", "d", lambda: ones(80, 12), VALUE, "d is 12, must be a positive multiple of 8")
for name in (*C.split(), *P.split()):
    add(name, "row_of_pair", "dtype", lambda: ROWS.long(), TYPE, "dtype is torch.int64, must be torch.int32")
    add(name, "row_of_pair", "rank", lambda: ROWS.flatten(), VALUE, "must have rank 2, (t, top_k)")
    add(name, "topk_weights", "shape", lambda: ones(T, 3), VALUE, "shape is (20, 3), must be (20, 4)")
    add(name, "topk_weights", "dtype", lambda: ones(T, 4).double(), TYPE, "dtype is torch.float64, must be")
add(C, "out_dtype", "type", lambda: "bfloat16", TYPE, "got 'bfloat16' (str), must be torch.bfloat16")
add(P, "topk_ids", "shape", lambda: IDS[1:], VALUE, "shape is (20, 4), must be (19, 4)", "row_of_pair")
add(P, "topk_ids", "dtype", lambda: IDS.float(), TYPE, "dtype is torch.float32, must be")
add("ranks.combine_part", "dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be")
add(P, "out", "shape", lambda: ones(T, 8), VALUE, "shape is (20, 8), must be (20, 64)")
add(P, "out", "dtype", lambda: ones(T, D).double(), TYPE, "dtype is torch.float64, must be torch.bfloat16")
R = "ranks.combine_tree reference.combine_tree"
for name in (*P.split(), *R.split()):
    add(name, "num_experts", "blocks", lambda: 20, VALUE, "got 20, must be a multiple of 8 for a tree")
add(P, "rank", "large", lambda: 2, VALUE, "got 2, must be below num_ranks, which is 2")
add_together(
    P,
    "num_ranks-16",
    lambda: {"num_ranks": 16},
    VALUE,
    "got 16, must be 1, 2, 4 or 8 for a tree",
    "num_ranks",
)
add(R, "parts", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor or a list of them")
add(R, "parts", "three", lambda: [ones(T, D)] * 3, VALUE, "got 3, must be 1, 2, 4 or 8", "num_ranks")
add(R, "parts", "nine", lambda: [ones(T, D)] * 9, VALUE, "has 9 tensors, must have between 1 and 8")
add(R, "parts", "shape", lambda: [ones(T, D), ones(T, 8)], VALUE, "must be (20, 64)", "parts[1]")
add(R, "parts", "d", lambda: [ones(T, 12)], VALUE, "d is 12, must be a positive multiple of 8")
add(R, "topk_ids", "dtype", lambda: IDS.float(), TYPE, "dtype is torch.float32, must be")
add(R, "topk_ids", "device", lambda: IDS.to("meta"), VALUE, "device is meta, must be cpu")
add(R, "first_token", "large", lambda: 1, VALUE, "with the 20 tokens of topk_ids must be at most 20")
add(R, "first_token", "type", lambda: None, TYPE, "got None (NoneType), must be an int")
add(R, "out_dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be")
