"""Wrong arguments of route, combine and experts; a part of bad_cases.py."""

from __future__ import annotations

import fp4gemm
import torch
from bad_base import FUNCTIONS, NOT, TYPE, VALUE, Cases, ends, every_other, grad, misaligned, ones
from fp4gemm import reference
from torch import Tensor

T, TOP_K, G, D, I = 20, 4, 6, 64, 32  # noqa: E741
IDS = torch.arange(T * TOP_K).view(T, TOP_K) % G
ROWS = torch.arange(T * TOP_K, dtype=torch.int32).view(T, TOP_K)
W13, W2 = fp4gemm.quantize(ones(G, 2 * I, D)), fp4gemm.quantize(ones(G, D, I))
P13 = fp4gemm.prepack(W13)

FUNCTIONS |= {
    "route": (fp4gemm.route, lambda: {"topk_ids": IDS, "num_experts": G}),
    "reference.route": (reference.route, lambda: {"topk_ids": IDS, "num_experts": G}),
    "combine": (
        fp4gemm.combine,
        lambda: {"y": ones(T * TOP_K, D), "row_of_pair": ROWS, "topk_weights": ones(T, TOP_K)},
    ),
    "reference.combine": (
        reference.combine,
        lambda: {"y": ones(T * TOP_K, D), "row_of_pair": ROWS, "topk_weights": ones(T, TOP_K)},
    ),
    "reference.experts": (
        reference.experts,
        lambda: {
            "x": ones(T, D),
            "topk_ids": IDS,
            "topk_weights": ones(T, TOP_K),
            "w13": W13.codes,
            "w13_scales": W13.scales,
            "w13_amax": W13.amax,
            "w13_bias": None,
            "w2": W2.codes,
            "w2_scales": W2.scales,
            "w2_amax": W2.amax,
            "w2_bias": None,
        },
    ),
}


def _zeroed(x: Tensor, offs: Tensor) -> Tensor:
    reference.zero_outside_groups(x, offs)
    return x


FUNCTIONS |= {
    "reference.zero_outside_groups": (_zeroed, lambda: {"x": ones(T, D), "offs": ends(3, 7)}),
}

CASES = Cases()
add, add_together = CASES.add, CASES.add_together

R = "route reference.route"
add(f"{R} reference.experts", "topk_ids", "type", lambda: [[0]], TYPE, "must be a torch.Tensor")
add(f"{R} reference.experts", "topk_ids", "dtype", lambda: IDS.float(), TYPE, "dtype is torch.float32, must")
add(R, "topk_ids", "rank", lambda: IDS.flatten(), VALUE, "shape is (80,), must have rank 2, (t, top_k)")
add(R, "topk_ids", "no-slot", lambda: IDS[:, :0], VALUE, "must have at least one expert for each token")
add(R, "topk_ids", "sparse", lambda: IDS.to_sparse(), TYPE, "layout is torch.sparse_coo")
add(R, "topk_ids", "twice", lambda: IDS // 2, VALUE, "token 0 names expert 0 twice, must name an expert once")
add("reference.route", "topk_ids", "strides", lambda: every_other(IDS), VALUE, "must be contiguous")
add(R, "num_experts", "type", lambda: 6.0, TYPE, "got 6.0 (float), must be an int")
add(R, "num_experts", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
add(R, "num_experts", "large", lambda: 2049, VALUE, "got 2049, must be at most 2048")

C = "combine reference.combine"
add(C, "y", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add(C, "y", "dtype", lambda: ones(80, D).double(), TYPE, "dtype is torch.float64, must be torch.bfloat16")
add(C, "y", "rank", lambda: ones(80, 1, D), VALUE, "must have rank 2, (rows, d)")
add(C, "y", "d", lambda: ones(80, 12), VALUE, "d is 12, must be a positive multiple of 8")
add(C, "y", "grad", lambda: grad(ones(80, D)), NOT, "requires grad")
add("reference.combine", "y", "strides", lambda: every_other(ones(80, D)), VALUE, "must be contiguous")
add("reference.combine", "y", "aligned", lambda: misaligned(ones(80, D)), VALUE, "must be 16-byte aligned")
add(C, "row_of_pair", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(C, "row_of_pair", "dtype", lambda: ROWS.long(), TYPE, "dtype is torch.int64, must be torch.int32")
add(C, "row_of_pair", "rank", lambda: ROWS.flatten(), VALUE, "must have rank 2, (t, top_k)")
add(C, "row_of_pair", "device", lambda: ROWS.to("meta"), VALUE, "device is meta, must be cpu")
for name in (*C.split(), "reference.experts"):
    add(name, "topk_weights", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
    add(name, "topk_weights", "dtype", lambda: ones(T, 4).double(), TYPE, "dtype is torch.float64, must be")
    add(name, "topk_weights", "shape", lambda: ones(T, 3), VALUE, "shape is (20, 3), must be (20, 4)")
    add(name, "topk_weights", "device", lambda: ones(T, 4, device="meta"), VALUE, "device is meta, must be")
    add(name, "topk_weights", "grad", lambda: grad(ones(T, 4)), NOT, "requires grad")
add(C, "out_dtype", "type", lambda: "bfloat16", TYPE, "got 'bfloat16' (str), must be torch.bfloat16")
add(C, "out_dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be")

Q = "quantize reference.quantize"
PICK = torch.tensor([3, -1], dtype=torch.int32)
add(
    f"{Q} reference.quantize_decoded",
    "rows",
    "type",
    lambda: [3, -1],
    TYPE,
    "got [3, -1] (list), must be a torch.Tensor",
)
add(
    f"{Q} reference.quantize_decoded",
    "rows",
    "dtype",
    lambda: PICK.long(),
    TYPE,
    "dtype is torch.int64, must be torch.int32",
)
add(
    f"{Q} reference.quantize_decoded",
    "rows",
    "rank",
    lambda: PICK.view(1, 2),
    VALUE,
    "shape is (1, 2), must have rank 1",
)
add(
    f"{Q} reference.quantize_decoded",
    "rows",
    "device",
    lambda: PICK.to("meta"),
    VALUE,
    "device is meta, must be cpu",
)
add(
    f"{Q} reference.quantize_decoded",
    "rows",
    "strides",
    lambda: every_other(PICK),
    VALUE,
    "must be contiguous",
)
ALONE = "must be None with it; rows needs scaling 'row'"
for kind, facade, operator in (
    ("tensor", {"scaling": "tensor"}, {"per_row": False}),
    ("encode", {"encode": "te_per_token"}, {"encode": 1}),
    ("four_over_six", {"four_over_six": "mae"}, {"four_over_six": 1}),
    ("hadamard", {"hadamard": "bf16"}, {"hadamard": 1}),
    ("random", {"stochastic": True}, {"rng_state": torch.tensor([1, 2])}),
):
    add_together("quantize", f"rows-{kind}", lambda f=facade: {"rows": PICK, **f}, NOT, ALONE, "rows")
    add_together(
        "reference.quantize", f"rows-{kind}", lambda o=operator: {"rows": PICK, **o}, NOT, ALONE, "rows"
    )
add_together(Q, "rows-amax", lambda: {"rows": PICK, "amax": ones(33)}, NOT, ALONE, "rows")
add_together(Q, "rows-axis", lambda: {"rows": PICK, "x": ones(48, D), "axis": 0}, NOT, ALONE, "rows")
add_together(
    "quantize", "rows-stack", lambda: {"rows": PICK, "x": ones(2, 48, D)}, VALUE, "for x of rank 3", "rows"
)

X = "reference.experts"
add(X, "x", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(X, "x", "dtype", lambda: ones(T, D).double(), TYPE, "dtype is torch.float64, must be")
add(X, "x", "rank", lambda: ones(1, T, D), VALUE, "must have rank 2, (m, d)")
add(X, "x", "d", lambda: ones(T, 48), VALUE, "d is 48, must be a positive multiple of 32")
add(X, "x", "other-d", lambda: ones(T, 96), VALUE, "shape is (6, 64, 32), must be (g, n, 48)", "w13")
add(X, "x", "grad", lambda: grad(ones(T, D)), NOT, "requires grad")
add_together(X, "x-fp32", lambda: {"scaling": 0}, TYPE, "dtype is torch.float32, must be torch.bfloat16", "x")
add(X, "topk_ids", "tokens", lambda: IDS[1:], VALUE, "shape is (19, 4), must have 20 rows as x")
for w, good, k in (("w13", W13, D), ("w2", W2, I)):
    n, codes, scales, amax = good.shape[1], good.codes, good.scales, good.amax
    add(X, w, "type", lambda good=good: good, TYPE, "must be a torch.Tensor")
    add(X, w, "dtype", lambda codes=codes: codes.float(), TYPE, "dtype is torch.float32, must be torch.uint8")
    add(X, w, "rank", lambda codes=codes: codes[0], VALUE, "must have rank 3, (g, n, k/2), or (g, bytes)")
    add(X, w, "k", lambda codes=codes: codes[..., :8].contiguous(), VALUE, f"must be (g, n, {k // 2})")
    add(X, w, "strides", lambda codes=codes: every_other(codes), VALUE, "must be contiguous")
    add(X, w, "aligned", lambda codes=codes: misaligned(codes), VALUE, "must be 16-byte aligned")
    add(X, w, "device", lambda codes=codes: codes.to("meta"), VALUE, "device is meta, must be cpu")
    s = f"{w}_scales"
    add(X, s, "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
    add(X, s, "dtype", lambda scales=scales: scales.float(), TYPE, "dtype is torch.float32, must be")
    add(X, s, "shape", lambda scales=scales: scales[1:], VALUE, "shape is (5, 128, 4), must be (6, 128, 4)")
    add(X, s, "strides", lambda scales=scales: every_other(scales), VALUE, "must be contiguous")
    a, b = f"{w}_amax", f"{w}_bias"
    add(X, a, "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
    add(X, a, "dtype", lambda amax=amax: amax.half(), TYPE, "dtype is torch.float16, must be torch.float32")
    add(X, a, "shape", lambda: ones(G), VALUE, "shape is (6,), must be (6, 64) or (6, 1)")
    add(X, a, "strides", lambda amax=amax: every_other(amax), VALUE, "must be contiguous")
    add(X, a, "grad", lambda amax=amax: grad(amax), NOT, "requires grad")
    add(X, b, "type", lambda: 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor")
    add(X, b, "dtype", lambda n=n: ones(G, n).half(), TYPE, "dtype is torch.float16, must be torch.float32")
    add(X, b, "shape", lambda n=n: ones(n), VALUE, "shape is (64,), must be (6, 64)")
    add(X, b, "device", lambda n=n: ones(G, n, device="meta"), VALUE, "device is meta, must be cpu")
    add(X, f"{w}_rows", "type", lambda: 64.0, TYPE, "got 64.0 (float), must be an int")
    add(X, f"{w}_rows", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
    add(X, f"{w}_rows", "codes", lambda: 64, VALUE, "must have rank 2, (g, bytes)", w)
    add(X, f"{w}_e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")
add(X, "w2", "experts", lambda: W2.codes[1:], VALUE, "has 5 experts, must have 6 as w13")
add_together(
    X,
    "w13-prepacked-bytes",
    lambda: {"w13": P13.data, "w13_scales": None, "w13_rows": 128},
    VALUE,
    "must be (6, 4608), prepacked (128, 64)",
    "w13",
)
add_together(
    X,
    "w13_scales-prepacked",
    lambda: {"w13": P13.data, "w13_rows": 2 * I},
    VALUE,
    "must be None for prepacked w13",
    "w13_scales",
)
add_together(
    X,
    "w2-rows",
    lambda: {"w2": W2.codes[:, 1:].contiguous(), "w2_amax": ones(G, 1)},
    VALUE,
    "has 63 rows, must have 64, the d of x",
    "w2",
)
add(X, "scaling", "value", lambda: 129, VALUE, "got 129, must be 0, 1, 2 or 3, with options of the cast")
add(X, "scaling", "type", lambda: "row", TYPE, "got 'row' (str), must be an int")
add(X, "use_fast_accum", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(X, "use_fast_accum", "value", lambda: True, VALUE, "got True, must be False unless the tokens are FP8")
add(X, "activation", "value", lambda: 99, VALUE, "got 99, must be 0, 1")
add(X, "activation", "not-gated", lambda: 1, VALUE, "shape is (6, 64, 16), must be (g, n, 32)", "w2")
add(X, "batch_invariant", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")

Z = "reference.zero_outside_groups"
add(Z, "x", "type", lambda: [[1.0]], TYPE, "must be a torch.Tensor")
add(Z, "x", "rank", lambda: ones(T), VALUE, "must have rank 2, (m, n)")
add(Z, "x", "dtype", lambda: ones(T, D).int(), TYPE, "dtype is torch.int32, must be torch.bfloat16")
add(Z, "x", "grad", lambda: grad(ones(T, D)), NOT, "requires grad")
add(Z, "x", "strides", lambda: every_other(ones(T, D)), VALUE, "must be contiguous")
add(Z, "x", "aligned", lambda: misaligned(ones(T, D)), VALUE, "must be 16-byte aligned")
add(Z, "offs", "type", lambda: [3, 7], TYPE, "must be a torch.Tensor")
add(Z, "offs", "dtype", lambda: ends(3, 7).long(), TYPE, "dtype is torch.int64, must be torch.int32")
add(Z, "offs", "empty", lambda: ends(), VALUE, "must have at least one entry")
add(Z, "offs", "device", lambda: ends(3, 7, device="meta"), VALUE, "device is meta, must be cpu")
add(Z, "offs", "descend", lambda: ends(7, 3), VALUE, "entry 1 is 3, must be at least 7")
add(
    Z,
    "offs",
    "large",
    lambda: ends(3, T + 1),
    VALUE,
    "the last entry is 21, must be at most 20, the rows of x",
)
