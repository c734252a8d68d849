"""Wrong arguments of the quantizers and the producers; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import (
    NOT,
    SPARSE,
    STATE,
    TYPE,
    VALUE,
    Cases,
    K,
    M,
    ends,
    every_other,
    grad,
    half,
    misaligned,
    ones,
)

CASES = Cases()
add, add_together = CASES.add, CASES.add_together

HALF = "silu_and_mul_quantize rms_norm_quantize rms_norm_quantize_fp8"
HALF_REFERENCE = (
    "reference.silu_and_mul reference.silu_and_mul_quantize reference.rms_norm reference.rms_norm_quantize "
    "reference.silu_and_mul_quantize_decoded reference.rms_norm_quantize_decoded "
    "reference.rms_norm_quantize_fp8"
)
FLOAT = (
    "quantize quantize_both quantize_mxfp8 quantize_mxfp4 quantize_fp8 reference.quantize "
    "reference.quantize_both reference.mxfp8_quantize reference.mxfp4_quantize "
    "reference.quantize_decoded reference.quantize_fp8"
)
X = f"{FLOAT} {HALF} {HALF_REFERENCE}"


# x
add(X, "x", "type", lambda: [[1.0] * 16], TYPE, "must be a torch.Tensor")
add(X, "x", "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(X, "x", "sparse", lambda: SPARSE, TYPE, "layout is torch.sparse_coo, must be torch.strided")
add(X, "x", "float64", lambda: ones(M, K, dtype=torch.float64), TYPE, "dtype is torch.float64, must be")
add(X, "x", "int32", lambda: ones(M, K, dtype=torch.int32), TYPE, "dtype is torch.int32, must be")
add(f"{HALF} {HALF_REFERENCE}", "x", "float32", lambda: ones(M, K), TYPE, "dtype is torch.float32, must be")
add(X, "x", "rank1", lambda: half(K), VALUE, "shape is (64,), must have rank 2")
NO_STACKS = " ".join(
    name
    for name in X.split()
    if name not in ("quantize", "quantize_both", "quantize_mxfp8", "quantize_mxfp4")
)
add(NO_STACKS, "x", "rank3", lambda: half(2, M, K), VALUE, "shape is (2, 33, 64), must have rank 2")
add(
    "quantize_mxfp8 quantize_mxfp4",
    "x",
    "rank4",
    lambda: half(1, 2, M, K),
    VALUE,
    "shape is (1, 2, 33, 64), must have rank 2",
)
add(X, "x", "k-ragged", lambda: half(48, 40), VALUE, "k is 40, must be a positive multiple of")
add(X, "x", "k-zero", lambda: half(48, 0), VALUE, "k is 0, must be a positive multiple of")
R_X = " ".join(name for name in X.split() if name.startswith("reference."))  # the others copy such tensors
add(R_X, "x", "transposed", lambda: half(K, 48)[:, :32].t(), VALUE, "stride along a row is 48, must be 1")
add(R_X, "x", "broadcast", lambda: half(1, K).expand(48, K), VALUE, "row stride is 0, must be at least 64")
add(R_X, "x", "row-stride", lambda: half(48, K + 1)[:, :K], VALUE, "row stride is 65 elements (130 bytes)")
add(R_X, "x", "aligned", lambda: misaligned(half(48, K)), VALUE, "must be 16-byte aligned")
add(X, "x", "grad", lambda: grad(half(48, K)), NOT, "requires grad")
add(
    "quantize_both reference.quantize_both",
    "x",
    "m",
    lambda: ones(M, K),
    VALUE,
    "m is 33, must be a positive",
)
add(
    "quantize_both reference.quantize_both", "x", "m-zero", lambda: ones(0, K), VALUE, "m is 0, must be a pos"
)
MX = "quantize_mxfp8 quantize_mxfp4 reference.mxfp8_quantize reference.mxfp4_quantize"
add(
    f"{MX} silu_and_mul_quantize",
    "x",
    "k-step-32",
    lambda: half(M, 48),
    VALUE,
    "k is 48, must be a positive multiple of 32",
)

# axis
AXIS = f"quantize {MX} reference.quantize reference.quantize_decoded"
add(AXIS, "axis", "type", lambda: "0", TYPE, "got '0' (str), must be")
add(AXIS, "axis", "bool", lambda: False, TYPE, "got False (bool), must be")
add(AXIS, "axis", "value", lambda: 1, VALUE, "got 1, must be")
add(AXIS, "axis", "m", lambda: 0, VALUE, "m is 33, must be a positive multiple of", "x")
add("quantize quantize_mxfp8 quantize_mxfp4", "axis", "low", lambda: -2, VALUE, "got -2, must be at least -1")

# Options by name.
Q = "quantize quantize_both"
for argument, wanted in (
    ("scaling", "'row' or 'tensor'"),
    ("encode", "'te', 'te_per_token' or 'eden'"),
    ("four_over_six_error", "'exact' or 'fast'"),
):
    add(Q, argument, "value", lambda: "block", VALUE, f"got 'block', must be {wanted}")
    add(Q, argument, "none", lambda: None, TYPE, f"got None (NoneType), must be {wanted}")
    add(Q, argument, "type", lambda: True, TYPE, f"got True (bool), must be {wanted}")
for argument, wanted in (("four_over_six", "None, 'mae' or 'mse'"), ("hadamard", "None, 'bf16' or 'fp32'")):
    add(Q, argument, "value", lambda: "fast", VALUE, f"got 'fast', must be {wanted}")
    add(Q, argument, "type", lambda: True, TYPE, f"got True (bool), must be {wanted}")
add(Q, "block", "value", lambda: (1, 32), VALUE, "got (1, 32), must be (1, 16) or (16, 16)")
add(Q, "block", "type", lambda: 16, TYPE, "got 16 (int), must be (1, 16) or (16, 16)")
add(Q, "block", "list", lambda: [1, 16], TYPE, "got [1, 16] (list), must be (1, 16) or (16, 16)")
add(Q, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be None, 448 or 256")
add(Q, "e4m3_max", "float", lambda: 448.0, TYPE, "got 448.0 (float), must be None, 448 or 256")
add(Q, "e4m3_max", "alone", lambda: 256, VALUE, "got 256, must be 448 without four_over_six")
add(Q, "four_over_six_error", "alone", lambda: "fast", VALUE, "must be omitted without four_over_six")
add(Q, "hadamard_signs", "alone", lambda: 3, VALUE, "got 3, must be omitted without hadamard")
add(Q, "hadamard_signs", "type", lambda: None, TYPE, "got None (NoneType), must be an int")
add(Q, "hadamard_signs", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(Q, "hadamard_signs", "large", lambda: 0x10000, VALUE, "got 65536, must be at most 0xFFFF")
add(Q, "stochastic", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(Q, "stochastic", "none", lambda: None, TYPE, "got None (NoneType), must be True or False")

EDEN = {"encode": "eden", "hadamard": "fp32", "stochastic": True}
for kind, changed in (
    ("hadamard None", {"hadamard": None}),
    ("hadamard 'bf16'", {"hadamard": "bf16"}),
    ("stochastic False", {"stochastic": False}),
    ("e4m3_max 448", {"e4m3_max": 448}),
):
    add_together(
        "quantize",
        f"eden-{kind}",
        lambda changed=changed: {**EDEN, **changed},
        VALUE,
        f"got 'eden' with {kind}; 'eden' needs hadamard 'fp32', stochastic True, e4m3_max 256",
        "encode",
    )
for kind, more in (("none", {}), ("generator", {"generator": torch.Generator()})):
    add_together(
        "quantize",
        f"eden-rng_state-{kind}",
        lambda more=more: {**EDEN, **more},
        VALUE,
        "got None, must be a tensor {seed, offset} with encode 'eden'",
        "rng_state",
    )
add_together(
    "quantize_both",
    "eden",
    lambda: EDEN,
    NOT,
    "got 'eden', must be 'te' or 'te_per_token'",
    "encode",
)

# Options by number.
R = "reference.quantize reference.quantize_both"
add(R, "per_row", "type", lambda: "row", TYPE, "got 'row' (str), must be True or False")
for argument, wanted in (
    ("block_rows", "1 or 16"),
    ("encode", "0, 1 or 2"),
    ("four_over_six", "0, 1 or 2"),
    ("hadamard", "0, 1 or 2"),
    ("e4m3_max", "448 or 256"),
):
    add(R, argument, "value", lambda: 7, VALUE, f"got 7, must be {wanted}")
    add(R, argument, "type", lambda: "te", TYPE, f"got 'te' (str), must be {wanted}")
add(R, "fast_error", "type", lambda: 1, TYPE, "got 1 (int), must be False or True")
add(R, "signs", "type", lambda: None, TYPE, "got None (NoneType), must be an int")
add(R, "signs", "range", lambda: 65536, VALUE, "got 65536, must be 0 to 0xFFFF")
add(R, "signs", "alone", lambda: 3, VALUE, "got 3, must be 0 without hadamard")
add(R, "e4m3_max", "alone", lambda: 256, VALUE, "got 256, must be 448 without four_over_six")
EDEN_NUMBERS = {"encode": 2, "hadamard": 2, "e4m3_max": 256, "rng_state": STATE}
for kind, changed, name, says in (
    ("eden-hadamard", {"hadamard": 1}, "hadamard", "got 1, must be 2 with encode 2"),
    ("eden-e4m3_max", {"e4m3_max": 448}, "e4m3_max", "got 448, must be 256 with encode 2"),
    ("eden-rng_state", {"rng_state": None}, "rng_state", "got None, must be a tensor with encode 2"),
):
    add_together(R, kind, lambda changed=changed: {**EDEN_NUMBERS, **changed}, VALUE, says, name)
add_together(
    "reference.quantize_both", "eden", lambda: EDEN_NUMBERS, NOT, "got 2, must be 0 or 1 for both", "encode"
)
for kind, changed, name in (
    ("per_row-tiles", {"block_rows": 16}, "per_row"),
    ("encode-tiles", {"block_rows": 16, "per_row": False, "encode": 1}, "encode"),
    ("hadamard-tiles", {"block_rows": 16, "per_row": False, "hadamard": 1}, "hadamard"),
    ("rng_state-tiles", {"block_rows": 16, "per_row": False, "rng_state": STATE}, "rng_state"),
    ("encode-four_over_six", {"four_over_six": 1, "encode": 1}, "encode"),
    ("hadamard-four_over_six", {"four_over_six": 2, "hadamard": 2}, "hadamard"),
    ("rng_state-four_over_six", {"four_over_six": 2, "rng_state": STATE}, "rng_state"),
    ("encode-eden-four_over_six", {**EDEN_NUMBERS, "four_over_six": 1}, "encode"),
):
    add_together(R, kind, lambda changed=changed: changed, NOT, "must be", name)
add_together(
    "reference.quantize reference.quantize_both",
    "offs-tiles",
    lambda: {"block_rows": 16, "per_row": False, "offs": ends(M)},
    NOT,
    "None",
    "offs",
)

# Combinations that no kernel has.
TILES = {"block": (16, 16), "scaling": "tensor"}
for kind, changed, says in (
    ("block-row", {"block": (16, 16)}, "with scaling 'row'"),
    ("block-encode", {**TILES, "encode": "te_per_token"}, "with encode 'te_per_token'"),
    ("block-hadamard", {**TILES, "hadamard": "fp32"}, "with hadamard 'fp32'"),
    ("block-stochastic", {**TILES, "stochastic": True}, "with stochastic True"),
):
    add_together(
        Q, kind, lambda changed=changed: changed, NOT, f"got (16, 16) {says}, must be (1, 16)", "block"
    )
add_together(
    Q,
    "block-offs",
    lambda: {**TILES, "offs": ends(M)},
    NOT,
    "with offs a torch.int32 tensor of shape (1,), must be",
    "block",
)
for kind, changed, says in (
    ("encode", {"encode": "te_per_token"}, "with encode 'te_per_token'"),
    ("hadamard", {"hadamard": "bf16"}, "with hadamard 'bf16'"),
    ("stochastic", {"stochastic": True}, "with stochastic True"),
):
    for rule in ("mae", "mse"):
        add_together(
            Q,
            f"four_over_six-{rule}-{kind}",
            lambda changed=changed, rule=rule: {**changed, "four_over_six": rule},
            NOT,
            f"got '{rule}' {says}, must be None with it",
            "four_over_six",
        )

# amax
for functions, argument, rows in (
    ("quantize reference.quantize", "amax", M),
    ("quantize_both reference.quantize_both", "amax", 48),
    ("quantize_both reference.quantize_both", "amax_t", K),
):

    def given(value: object, argument: str = argument) -> dict[str, object]:
        other = {"amax": ("amax_t", K), "amax_t": ("amax", 48)}[argument]
        return {argument: value, other[0]: ones(other[1])}

    def pair(value: object, both: bool = "both" in functions, argument: str = argument) -> dict[str, object]:
        return given(value, argument) if both else {argument: value}

    for kind, value, error, says in (
        ("type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor"),
        ("dtype", lambda rows=rows: half(rows), TYPE, "dtype is torch.float16, must be torch.float32"),
        ("one", lambda: ones(1), VALUE, f"shape is (1,), must be ({rows},)"),
        ("rank", lambda rows=rows: ones(rows, 1), VALUE, f"must be ({rows},)"),
        ("device", lambda rows=rows: ones(rows, device="meta"), VALUE, "device is meta, must be cpu"),
        ("strides", lambda rows=rows: every_other(ones(rows)), VALUE, "must be contiguous"),
        ("grad", lambda rows=rows: grad(ones(rows)), NOT, "requires grad"),
    ):
        make = lambda value=value, pair=pair: pair(value())  # noqa: E731
        add_together(functions, f"{argument}-{kind}", make, error, says, argument)
    scaling = ["reference" in name for name in functions.split()]
    for name, numbers in zip(functions.split(), scaling, strict=True):
        option = {"per_row": False} if numbers else {"scaling": "tensor"}
        make = lambda option=option, pair=pair, rows=rows: {**pair(ones(rows)), **option}  # noqa: E731
        if argument == "amax":
            add_together(name, "amax-tensor", make, VALUE, f"shape is ({rows},), must be (1,)", argument)
for kind, value, text in (("negative", -1.0, "-1.0"), ("nan", float("nan"), "nan")):
    bad = lambda rows, value=value: torch.cat((ones(3), ones(rows - 3) * value))  # noqa: E731
    says = f"entry 3 is {text}, must be at least 0 and not NaN"
    add("quantize", "amax", kind, lambda bad=bad: bad(M), VALUE, says)
    for argument, rows in (("amax", 48), ("amax_t", K)):
        both = {"amax": ones(48), "amax_t": ones(K), argument: bad(rows)}
        add_together(
            "quantize_both",
            f"{argument}-{kind}",
            lambda both=both: both,
            VALUE,
            says,
            argument,
        )
add("quantize_both reference.quantize_both", "amax", "alone", lambda: ones(48), VALUE, "got None", "amax_t")
add("quantize_both", "amax_t", "alone", lambda: ones(K), VALUE, "got None, must be given", "amax")
add("reference.quantize_both", "amax_t", "alone", lambda: ones(K), VALUE, "got a tensor, must be given")
add_together(
    "quantize",
    "amax-groups",
    lambda: {"amax": ones(1), "scaling": "tensor", "offs": ends(3, M)},
    VALUE,
    "shape is (1,), must be (2,)",
    "amax",
)
# Each group of columns has its own amax.
for functions, option in (("quantize", {"scaling": "tensor"}), ("reference.quantize", {"per_row": False})):
    add_together(
        functions,
        "amax-columns-tensor",
        lambda option=option: {"amax": ones(1), "axis": 0, "offs": ends(3, M), **option},
        VALUE,
        "shape is (1,), must be (2,)",
        "amax",
    )
add_together(
    "quantize reference.quantize reference.quantize_decoded",
    "amax-columns-row",
    lambda: {"amax": ones(K), "axis": 0, "offs": ends(3, M)},
    VALUE,
    "shape is (64,), must be (2, 64)",
    "amax",
)
for kind, changed, says, name in (
    ("amax_t-columns", {"amax": ones(48), "amax_t": ones(K)}, "shape is (64,), must be (2, 64)", "amax_t"),
    ("amax-groups", {"amax": ones(2), "amax_t": ones(2, K)}, "shape is (2,), must be (48,)", "amax"),
):
    make = lambda changed=changed: {"offs": ends(3, 48), **changed}  # noqa: E731
    add_together("quantize_both reference.quantize_both", kind, make, VALUE, says, name)

# Random numbers.
for function in Q.split():
    add(function, "generator", "alone", torch.Generator, VALUE, "must be omitted without stochastic")
    add(
        function, "generator", "alone-type", lambda: "x", VALUE, "got 'x', must be omitted without stochastic"
    )
    add(function, "rng_state", "alone", lambda: STATE, VALUE, "must be omitted without stochastic")
    for kind, changed, error, says, name in (
        (
            "generator-both",
            {"generator": torch.Generator(), "rng_state": STATE},
            VALUE,
            "with rng_state",
            "generator",
        ),
        ("generator-type", {"generator": 3}, TYPE, "got 3 (int), must be a torch.Generator", "generator"),
        (
            "rng_state-type",
            {"rng_state": [1, 2]},
            TYPE,
            "got [1, 2] (list), must be a torch.Tensor",
            "rng_state",
        ),
        ("rng_state-dtype", {"rng_state": STATE.int()}, TYPE, "dtype is torch.int32, must be", "rng_state"),
        ("rng_state-shape", {"rng_state": STATE[:1]}, VALUE, "shape is (1,), must be (2,)", "rng_state"),
        (
            "rng_state-device",
            {"rng_state": STATE.to("meta")},
            VALUE,
            "device is meta, must be cpu",
            "rng_state",
        ),
        ("rng_state-strides", {"rng_state": every_other(STATE)}, VALUE, "must be contiguous", "rng_state"),
    ):
        make = lambda changed=changed: {"stochastic": True, **changed}  # noqa: E731
        add_together(function, kind, make, error, says, name)
add(R, "rng_state", "dtype", STATE.int, TYPE, "dtype is torch.int32, must be torch.int64")
add(R, "rng_state", "shape", lambda: STATE.view(2, 1), VALUE, "shape is (2, 1), must be (2,)")
add_together(
    "quantize",
    "generator-device",
    lambda: {"x": ones(M, K, device="meta"), "stochastic": True, "generator": torch.Generator()},
    VALUE,
    "device is cpu, must be meta, the device of x",
    "generator",
)

# Groups.
O = (  # noqa: E741
    "quantize silu_and_mul_quantize reference.quantize reference.silu_and_mul_quantize "
    "reference.quantize_decoded reference.silu_and_mul_quantize_decoded quantize_fp8 reference.quantize_fp8 "
    "silu_and_mul_quantize_fp8 reference.silu_and_mul_quantize_fp8"
)
add(O, "offs", "type", lambda: [5, 33], TYPE, "got [5, 33] (list), must be a torch.Tensor")
add(
    O,
    "offs",
    "int16",
    lambda: ends(5, M, dtype=torch.int16),
    TYPE,
    "dtype is torch.int16, must be torch.int32",
)
add(O, "offs", "rank", lambda: ends(5, M).view(1, 2), VALUE, "shape is (1, 2), must have rank 1, (g,)")
add(O, "offs", "scalar", lambda: torch.tensor(33, dtype=torch.int32), VALUE, "shape is (), must have rank 1")
add(O, "offs", "empty", ends, VALUE, "shape is (0,), must have at least one entry")
add(O, "offs", "device", lambda: ends(M, device="meta"), VALUE, "device is meta, must be cpu")
add(O, "offs", "strides", lambda: every_other(ends(M, M)), VALUE, "must be contiguous")
add_together(
    "quantize reference.quantize",
    "offs-columns",
    lambda: {"axis": 0, "offs": ends(3, M + 1)},
    VALUE,
    "the last entry is 34, must be at most 33",
    "offs",
)
BOTH = "quantize_both reference.quantize_both"
add(BOTH, "offs", "type", lambda: [5, 48], TYPE, "got [5, 48] (list), must be a torch.Tensor")
add(BOTH, "offs", "empty", ends, VALUE, "shape is (0,), must have at least one entry")
add(BOTH, "offs", "device", lambda: ends(48, device="meta"), VALUE, "device is meta, must be cpu")
add(BOTH, "offs", "decreasing", lambda: ends(9, 8), VALUE, "entry 1 is 8, must be at least 9")
add(BOTH, "offs", "beyond", lambda: ends(3, 49), VALUE, "the last entry is 49, must be at most 48")
# On the CPU the reference reads the ends.
add(O, "offs", "decreasing", lambda: ends(9, 8), VALUE, "entry 1 is 8, must be at least 9")
add(O, "offs", "negative", lambda: ends(-1, 8), VALUE, "entry 0 is -1, must be at least 0")
add(O, "offs", "beyond", lambda: ends(3, M + 1), VALUE, "the last entry is 34, must be at most 33")

# The producers.
N = (
    "rms_norm_quantize reference.rms_norm reference.rms_norm_quantize reference.rms_norm_quantize_decoded "
    "rms_norm_quantize_fp8 reference.rms_norm_quantize_fp8"
)
add(N, "weight", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add(N, "weight", "dtype", lambda: ones(K), TYPE, "dtype is torch.float32, must be torch.float16")
add(N, "weight", "sparse", lambda: half(K).to_sparse(), TYPE, "layout is torch.sparse_coo, must be torch.str")
add(
    N,
    "x",
    "nested",
    lambda: torch.nested.nested_tensor([half(3, K)]),
    TYPE,
    "is a nested tensor, must be tor",
)
add_together(
    "rms_norm_quantize rms_norm_quantize_fp8",
    "weight-memory",
    lambda: {"x": half(M, K).to("meta"), "weight": half(K)},
    VALUE,
    "device is cpu, must be meta",
    "weight",
)
add(N, "weight", "shape", lambda: half(M), VALUE, "shape is (33,), must be (64,)")
add(N, "weight", "device", lambda: half(K).to("meta"), VALUE, "device is meta, must be cpu")
add(N, "weight", "strides", lambda: every_other(half(K)), VALUE, "must be contiguous")
add(N, "weight", "grad", lambda: grad(half(K)), NOT, "requires grad")
add(N, "residual", "type", lambda: 0, TYPE, "got 0 (int), must be a torch.Tensor")
add(N, "residual", "dtype", lambda: ones(M, K), TYPE, "dtype is torch.float32, must be torch.float16")
add(N, "residual", "shape", lambda: half(1, K), VALUE, "shape is (1, 64), must be (33, 64), the shape of x")
add(N, "residual", "device", lambda: half(M, K).to("meta"), VALUE, "device is meta, must be cpu")
R_N = " ".join(name for name in N.split() if name.startswith("reference."))  # the others copy such tensors
add(R_N, "residual", "strides", lambda: half(M, K + 1)[:, :K], VALUE, "row stride is 65 elements (130 bytes)")
add(R_N, "residual", "aligned", lambda: misaligned(half(M, K)), VALUE, "must be 16-byte aligned")
add(N, "residual", "grad", lambda: grad(half(M, K)), NOT, "requires grad")
add(N, "eps", "type", lambda: "1e-6", TYPE, "got '1e-6' (str), must be a Python number")
add(N, "eps", "tensor", lambda: ones(1), TYPE, "must be a Python number")
add(N, "eps", "negative", lambda: -1e-6, VALUE, "got -1e-06, must be at least 0 and finite")
add(N, "eps", "nan", lambda: float("nan"), VALUE, "got nan, must be at least 0 and finite")
add(N, "eps", "large", lambda: 1e39, VALUE, "got 1e+39, must be at least 0 and finite")

# Arguments of dequantize_parts that the containers do not have.
Y = "dequantize_parts reference.dequantize"
add("dequantize_parts", "swizzled", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(Y, "swizzled", "false", lambda: False, VALUE, "shape is (128, 4), must be (33, 4), the compact", "scales")
