"""Wrong arguments of every public function: each case changes one argument of a call that is right.

The cases are plain data, so that they also run under ``python -O``, where ``assert`` does nothing.
"""

from __future__ import annotations

import bad_calibration
import bad_container
import bad_conversion
import bad_decoded
import bad_epilogue
import bad_experts
import bad_fp8
import bad_gemm
import bad_grouped
import bad_interop
import bad_linear
import bad_models
import bad_moe
import bad_mx
import bad_prepacked
import bad_quantize
import bad_ranks
import bad_residual
import bad_search
import bad_stacks
import bad_step
import bad_swiglu
import bad_training
import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    GROUPED,
    NOT,
    ROTATED,
    TYPE,
    VALUE,
    A,
    B,
    Case,
    Cases,
    K,
    M,
    N,
    complaint,
    ends,
    every_other,
    grad,
    misaligned,
    ones,
    quantized,
    with_byte,
)

__all__ = ["CASES", "FUNCTIONS", "Case", "complaint"]

CASES = Cases(
    [
        *bad_mx.CASES,
        *bad_quantize.CASES,
        *bad_ranks.CASES,
        *bad_residual.CASES,
        *bad_search.CASES,
        *bad_step.CASES,
        *bad_swiglu.CASES,
        *bad_calibration.CASES,
        *bad_models.CASES,
        *bad_container.CASES,
        *bad_decoded.CASES,
        *bad_epilogue.CASES,
        *bad_experts.CASES,
        *bad_fp8.CASES,
        *bad_stacks.CASES,
        *bad_interop.CASES,
        *bad_linear.CASES,
        *bad_gemm.CASES,
        *bad_grouped.CASES,
        *bad_prepacked.CASES,
        *bad_training.CASES,
        *bad_conversion.CASES,
        *bad_moe.CASES,
    ]
)
add, add_together = CASES.add, CASES.add_together

# dequantize, decode
T = "dequantize decode"
add(T, "t", "type", lambda: A.codes, TYPE, "must be an fp4gemm.NVFP4Tensor")
add(T, "t", "decoded", lambda: fp4gemm.decode(A), TYPE, "must be an fp4gemm.NVFP4Tensor")
add(T, "t", "none", lambda: None, TYPE, "got None (NoneType), must be an fp4gemm.NVFP4Tensor")
D = (
    "dequantize dequantize_parts NVFP4Tensor.dequantize MXFP8Tensor.dequantize MXFP4Tensor.dequantize "
    "reference.dequantize reference.mxfp8_dequantize reference.mxfp4_dequantize"
)
add(D, "dtype", "type", lambda: "float32", TYPE, "got 'float32' (str), must be torch.bfloat16")
add(D, "dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be torch.bfloat16")

# The parts of the containers.
C = "NVFP4Tensor NVFP4Tensor.from_compact dequantize_parts reference.dequantize reference.decode"
add(C, "codes", "type", lambda: b"codes", TYPE, "must be a torch.Tensor")
add(C, "codes", "int8", lambda: ones(M, K // 2, dtype=torch.int8), TYPE, "dtype is torch.int8, must be")
add(C, "codes", "rank", lambda: A.codes.view(-1), VALUE, "must have rank 2, (m, k/2)")
add(C, "codes", "k", lambda: ones(M, 12, dtype=torch.uint8), VALUE, "k is 24, must be a positive multiple")
add(C, "codes", "strides", lambda: every_other(A.codes), VALUE, "must be contiguous")
add(C, "codes", "aligned", lambda: misaligned(A.codes), VALUE, "must be 16-byte aligned")
P = "NVFP4Tensor dequantize_parts reference.dequantize reference.decode"
add(P, "scales", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(P, "scales", "dtype", lambda: ones(128, 4), TYPE, "dtype is torch.float32, must be torch.float8_e4m3fn")
add(P, "scales", "e5m2", lambda: ones(128, 4).to(torch.float8_e5m2), TYPE, "dtype is torch.float8_e5m2, must")
add(P, "scales", "compact", A.compact_scales, VALUE, "shape is (33, 4), must be (128, 4)")
add(P, "scales", "rank", lambda: A.scales.view(-1), VALUE, "shape is (512,), must be (128, 4)")
add(P, "scales", "device", lambda: A.scales.to("meta"), VALUE, "device is meta, must be cpu")
add(P, "scales", "strides", lambda: every_other(A.scales), VALUE, "must be contiguous")
add(P, "scales", "aligned", lambda: misaligned(A.scales), VALUE, "must be 16-byte aligned")
V = "NVFP4Tensor NVFP4Tensor.from_compact DecodedTensor dequantize_parts reference.dequantize"
add(V, "amax", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add(V, "amax", "dtype", lambda: ones(M, dtype=torch.bfloat16), TYPE, "dtype is torch.bfloat16, must be")
add(V, "amax", "shape", lambda: ones(M - 1), VALUE, "shape is (32,), must be (33,) or (1,)")
add(V, "amax", "rank", lambda: ones(M, 1), VALUE, "shape is (33, 1), must be (33,) or (1,)")
add(V, "amax", "scalar", lambda: torch.tensor(1.0), VALUE, "shape is (), must be (33,) or (1,)")
add(V, "amax", "device", lambda: ones(M, device="meta"), VALUE, "device is meta, must be cpu")
add(V, "amax", "strides", lambda: every_other(ones(M)), VALUE, "must be contiguous")
add(V, "amax", "grad", lambda: grad(ones(M)), NOT, "requires grad")
add(V, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")
add(V, "e4m3_max", "float", lambda: 448.0, TYPE, "got 448.0 (float), must be 448 or 256")
add(V, "e4m3_max", "none", lambda: None, TYPE, "got None (NoneType), must be 448 or 256")
H = "NVFP4Tensor DecodedTensor"
add(H, "hadamard_signs", "type", lambda: "0xD7E8", TYPE, "got '0xD7E8' (str), must be an int")
add(H, "hadamard_signs", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(H, "hadamard_signs", "large", lambda: 0x20000, VALUE, "got 131072, must be at most 0x1FFFF")
G = "NVFP4Tensor reference.dequantize"
add(f"{G} DecodedTensor", "offs", "type", lambda: [5, 33], TYPE, "got [5, 33] (list), must be a torch.Tensor")
add(G, "offs", "int64", lambda: ends(5, M, dtype=torch.int64), TYPE, "dtype is torch.int64, must be")
add(G, "offs", "rank", lambda: ends(5, M).view(1, 2), VALUE, "shape is (1, 2), must have rank 1, (g,)")
add(G, "offs", "empty", lambda: ends(), VALUE, "shape is (0,), must have at least one entry")
add(G, "offs", "device", lambda: ends(M, device="meta"), VALUE, "device is meta, must be cpu")
add(G, "offs", "strides", lambda: every_other(ends(M, M)), VALUE, "must be contiguous")
add(G, "offs", "scales", lambda: ends(5, 7, M), VALUE, "shape is (128, 4), must be (384, 4)", "scales")
add_together(
    "NVFP4Tensor",
    "offs-amax",
    lambda: {"offs": GROUPED.offs, "scales": GROUPED.scales, "amax": ones(1)},
    VALUE,
    "shape is (1,), must be (33,)",
    "amax",
)
F = "NVFP4Tensor.from_compact"
add(F, "compact_scales", "type", lambda: 1, TYPE, "got 1 (int), must be a torch.Tensor")
add(F, "compact_scales", "dtype", lambda: ones(M, 4), TYPE, "dtype is torch.float32, must be")
add(F, "compact_scales", "padded", lambda: A.scales, VALUE, "shape is (128, 4), must be (33, 4)")
add(
    F, "compact_scales", "device", lambda: A.compact_scales().to("meta"), VALUE, "device is meta, must be cpu"
)
for byte in (0x7F, 0x80, 0xB8, 0xFF):
    kind, says = f"byte {byte:02X}", f"have the sign bit set, the first is 0x{byte:02X} at"
    # In the 128x4 layout byte 2 of row 1 is column 2 of row 32.
    add("NVFP4Tensor", "scales", kind, lambda b=byte: with_byte(A.scales, b), VALUE, f"{says} [32, 2]; a")
    add(
        F, "compact_scales", kind, lambda b=byte: with_byte(A.compact_scales(), b), VALUE, f"{says} [1, 2]; a"
    )
add("DecodedTensor", "data", "type", lambda: A, TYPE, "must be a torch.Tensor")
add(
    "DecodedTensor",
    "data",
    "dtype",
    lambda: ones(M, K),
    TYPE,
    "dtype is torch.float32, must be torch.float16",
)
add("DecodedTensor", "data", "rank", lambda: ones(K, dtype=torch.half), VALUE, "must have rank 2, (m, k)")
add("DecodedTensor", "data", "k", lambda: ones(M, 40, dtype=torch.half), VALUE, "k is 40, must be a positive")
add(
    "DecodedTensor",
    "data",
    "strides",
    lambda: ones(M, 2 * K, dtype=torch.half)[:, :K],
    VALUE,
    "must be contiguous",
)
add(
    "DecodedTensor",
    "data",
    "aligned",
    lambda: misaligned(ones(M, K).half()),
    VALUE,
    "must be 16-byte aligned",
)
add("DecodedTensor", "data", "grad", lambda: grad(ones(M, K).half()), NOT, "requires grad")
W = "NVFP4Tensor.to DecodedTensor.to MXFP8Tensor.to is_supported"
add(W, "device", "type", lambda: 1.5, TYPE, "got 1.5 (float), must be a torch.device")
add(
    "is_supported",
    "device",
    "dtype",
    lambda: torch.float16,
    TYPE,
    "got torch.float16 (dtype), must be a torch.device",
)
add(W, "device", "bool", lambda: True, TYPE, "got True (bool), must be a torch.device")
add(W, "device", "name", lambda: "gpu", VALUE, "got 'gpu', must name a torch device")

# mm
ANY = "must be an fp4gemm.NVFP4Tensor, fp4gemm.DecodedTensor"
for side in ("a", "b"):
    add("mm", side, "groups", lambda: GROUPED, VALUE, "has 2 groups (offs), must have none")
    add("mm", side, "type", lambda: A.codes, TYPE, ANY)
    add("mm", side, "none", lambda: None, TYPE, ANY)
add("mm", "b", "rotated", lambda: quantized(N, rotated=True), VALUE, "hadamard_signs is 0xd7e8, must be None")
add("mm", "a", "rotated", lambda: ROTATED, VALUE, "hadamard_signs is None (not rotated), must be 0xd7e8", "b")
add("mm", "a", "k", lambda: quantized(M, 48), VALUE, "k is 48, must be a positive multiple of 32")
add("mm", "a", "k-differs", lambda: quantized(M, 96), VALUE, "k is 64, must be 96, the k of a", "b")
add("mm", "b", "k-differs", lambda: quantized(N, 96), VALUE, "k is 96, must be 64, the k of a")
add("mm", "b", "n", lambda: quantized(12), VALUE, "n is 12, must be a multiple of 8")
add("mm", "b", "device", lambda: quantized(N, device="meta"), VALUE, "device is meta, must be cpu")
add("mm", "out_dtype", "number", lambda: 6, TYPE, "got 6")
add("mm", "b", "n-zero-step", lambda: quantized(4), VALUE, "n is 4, must be a multiple of 8")
add("mm", "a", "device", lambda: quantized(device="meta"), VALUE, "device is cpu, must be meta", "b")

# scaled_mm
S = "scaled_mm reference.gemm"
for side, rows in (("a", M), ("b", N)):
    good = A if side == "a" else B
    add(S, side, "type", lambda good=good: good, TYPE, "must be a torch.Tensor")
    add(
        S, side, "dtype", lambda rows=rows: ones(rows, K), TYPE, "dtype is torch.float32, must be torch.uint8"
    )
    add(S, side, "rank", lambda good=good: good.codes.view(-1), VALUE, "must have rank 2")
    add(S, side, "strides", lambda good=good: every_other(good.codes), VALUE, "must be contiguous")
    text = f"must be contiguous with k along the last dimension, ({'m' if side == 'a' else 'n'}, k) or codes"
    add(S, side, "transposed", lambda good=good: good.codes.T, VALUE, text)
    add(S, side, "aligned", lambda good=good: misaligned(good.codes), VALUE, "must be 16-byte aligned")
    half = fp4gemm.decode(good).data
    add(S, side, "decoded", lambda half=half: half, VALUE, f"must be None because {side}", f"scale_{side}")
    scale = f"scale_{side}"
    add(S, scale, "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
    add(S, scale, "dtype", lambda: ones(128, 4), TYPE, "dtype is torch.float32, must be torch.float8_e4m3fn")
    add(S, scale, "compact", good.compact_scales, VALUE, "must be (128, 4)")
    add(S, scale, "device", lambda good=good: good.scales.to("meta"), VALUE, "device is meta, must be cpu")
    add(S, scale, "strides", lambda good=good: every_other(good.scales), VALUE, "must be contiguous")
    add(S, scale, "aligned", lambda good=good: misaligned(good.scales), VALUE, "must be 16-byte aligned")
for vector, length in (("alpha_row", M), ("alpha_col", N)):
    wanted = f"must be ({length},) or (1,)"
    add(S, vector, "type", lambda: 2.0, TYPE, "got 2.0 (float), must be a torch.Tensor")
    add(
        S, vector, "dtype", lambda length=length: ones(length).half(), TYPE, "dtype is torch.float16, must be"
    )
    add(S, vector, "shape", lambda length=length: ones(length + 1), VALUE, wanted)
    add(S, vector, "rank", lambda length=length: ones(length, 1), VALUE, wanted)
    add(S, vector, "scalar", lambda: torch.tensor(1.0), VALUE, wanted)
    add(S, vector, "strides", lambda length=length: every_other(ones(length)), VALUE, "must be contiguous")
    add(
        S,
        vector,
        "device",
        lambda length=length: ones(length, device="meta"),
        VALUE,
        "device is meta, must be",
    )
    add(S, vector, "grad", lambda length=length: grad(ones(length)), NOT, "requires grad")
add(S, "alpha", "tensor", lambda: ones(1), TYPE, "must be a Python number")
add(S, "alpha", "type", lambda: "1", TYPE, "got '1' (str), must be a Python number")
add(S, "alpha", "bool", lambda: True, TYPE, "got True (bool), must be a Python number")
add(S, "alpha", "none", lambda: None, TYPE, "got None (NoneType), must be a Python number")
add(S, "alpha", "nan", lambda: float("nan"), VALUE, "got nan, must be finite in float32")
add(S, "alpha", "large", lambda: 1e39, VALUE, "got 1e+39, must be finite in float32")
CASES += [
    Case(
        function,
        f"{argument}-{kind}",
        lambda data=data, argument=argument: {argument: data.codes, f"scale_{argument}": data.scales},
        VALUE,
        says,
        name,
    )
    for function in S.split()
    for argument, kind, data, says, name in (
        ("a", "k", quantized(M, 48), "k is 48, must be a positive multiple of 32", "a"),
        ("a", "k-differs", quantized(M, 96), "k is 64, must be 96, the k of a", "b"),
        ("b", "k-differs", quantized(N, 96), "k is 96, must be 64, the k of a", "b"),
        ("b", "n", quantized(12), "n is 12, must be a multiple of 8 for torch.bfloat16 output", "b"),
        ("b", "device", quantized(N, device="meta"), "device is meta, must be cpu, the device of a", "b"),
    )
]

# Arguments that mm and scaled_mm share.
G = "mm scaled_mm reference.gemm"
add(G, "bias", "type", lambda: [0.0] * N, TYPE, "must be a torch.Tensor")
add(G, "bias", "dtype", lambda: ones(N, dtype=torch.float64), TYPE, "dtype is torch.float64, must be")
add(G, "bias", "shape", lambda: ones(M), VALUE, "shape is (33,), must be (24,)")
add(G, "bias", "one", lambda: ones(1), VALUE, "shape is (1,), must be (24,)")
add(G, "bias", "rank", lambda: ones(1, N), VALUE, "shape is (1, 24), must be (24,)")
add(G, "bias", "device", lambda: ones(N, device="meta"), VALUE, "device is meta, must be cpu")
add(G, "bias", "strides", lambda: every_other(ones(N)), VALUE, "must be contiguous")
add(G, "bias", "grad", lambda: grad(ones(N)), NOT, "requires grad")
add(G, "out_dtype", "type", lambda: "bfloat16", TYPE, "got 'bfloat16' (str), must be torch.bfloat16")
add(G, "out_dtype", "float64", lambda: torch.float64, TYPE, "dtype is torch.float64, must be torch.bfloat16")
O = "mm scaled_mm"  # noqa: E741
add(O, "out", "type", lambda: 0, TYPE, "got 0 (int), must be a torch.Tensor")
add(O, "out", "dtype", lambda: ones(M, N, dtype=torch.float64), TYPE, "dtype is torch.float64, must be")
add(O, "out", "shape", lambda: ones(N, M), VALUE, "shape is (24, 33), must be (33, 24)")
add(O, "out", "rank", lambda: ones(M * N), VALUE, "shape is (792,), must be (33, 24)")
add(O, "out", "device", lambda: ones(M, N, device="meta"), VALUE, "device is meta, must be cpu")
add(O, "out", "transposed", lambda: ones(N, M).t(), VALUE, "stride along a row is 33, must be 1")
add(O, "out", "broadcast", lambda: ones(1, N).expand(M, N), VALUE, "row stride is 0, must be at least 24")
add(O, "out", "row-stride", lambda: ones(M, N + 1)[:, :N], VALUE, "row stride is 25 elements (100 bytes)")
add(O, "out", "aligned", lambda: misaligned(ones(M, N)), VALUE, "must be 16-byte aligned")
add(O, "out", "grad", lambda: grad(ones(M, N)), NOT, "requires grad")
add(O, "kernel", "type", lambda: 3, TYPE, "got 3 (int), must be a name from fp4gemm.kernels() or None")
add(O, "kernel", "unknown", lambda: "fast", VALUE, "got 'fast', must be None or 'cpu_reference' on the CPU")
for function in O.split():
    for good, conflict in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        both = {"out": ones(M, N, dtype=good), "out_dtype": conflict}
        text = f"got {conflict}, must be {good}, the dtype of out"
        CASES.append(Case(function, f"out_dtype-{good}", lambda both=both: both, VALUE, text, "out_dtype"))
    both = {"out": ones(M, N), "out_dtype": "float32"}
    CASES.append(
        Case(function, "out_dtype-str-and-out", lambda both=both: both, TYPE, "got 'float32'", "out_dtype")
    )

# layout
add("swizzle_scales", "compact", "type", lambda: [1], TYPE, "must be a torch.Tensor")
add("swizzle_scales", "compact", "dtype", lambda: ones(4, 4), TYPE, "dtype is torch.float32, must be")
add("swizzle_scales", "compact", "rank", lambda: A.scales.view(-1), VALUE, "must have rank 2, (m, k/16)")
add(
    "swizzle_scales",
    "compact",
    "columns",
    lambda: ones(4, 0, dtype=torch.uint8),
    VALUE,
    "number of columns is 0, must be at least 1",
)
U = "unswizzle_scales"
add(U, "swizzled", "type", lambda: 7, TYPE, "got 7 (int), must be a torch.Tensor")
add(U, "swizzled", "dtype", lambda: ones(128, 4), TYPE, "dtype is torch.float32, must be")
add(
    U,
    "swizzled",
    "shape",
    lambda: ones(256, 4, dtype=torch.uint8),
    VALUE,
    "shape is (256, 4), must be (128, 4)",
)
add(U, "swizzled", "strides", lambda: every_other(A.scales), VALUE, "must be contiguous")
add(U, "r", "type", lambda: 33.0, TYPE, "got 33.0 (float), must be an int")
add(U, "r", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(U, "r", "beyond", lambda: 129, VALUE, "shape is (128, 4), must be (256, 4) for r = 129", "swizzled")
add(U, "c", "type", lambda: "4", TYPE, "got '4' (str), must be an int")
add(U, "c", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
add("scale_offset", "r", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be an int")
add("scale_offset", "r", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add("scale_offset", "c", "type", lambda: True, TYPE, "got True (bool), must be an int")
add("scale_offset", "c", "negative", lambda: -2, VALUE, "got -2, must be at least 0")
add("scale_offset", "c", "beyond", lambda: 4, VALUE, "got 4, must be below num_columns, 4")
add("scale_offset", "num_columns", "type", lambda: None, TYPE, "got None (NoneType), must be an int")
add("scale_offset", "num_columns", "zero", lambda: 0, VALUE, "got 0, must be at least 1")

# The codecs of the reference.
E = "reference.encode_e2m1 reference.encode_e4m3 reference.encode_e8m0"
add(E, "x", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add(
    E,
    "x",
    "dtype",
    lambda: ones(4, dtype=torch.float64),
    TYPE,
    "dtype is torch.float64, must be torch.float32",
)
add("reference.decode_e2m1", "codes", "type", lambda: 1, TYPE, "got 1 (int), must be a torch.Tensor")
add("reference.decode_e2m1", "codes", "dtype", lambda: ones(4, 4), TYPE, "dtype is torch.float32, must be")
add("reference.decode_e2m1", "codes", "rank", lambda: A.codes.view(-1), VALUE, "must have rank 2, (m, k/2)")

# reference.gemm_out refuses what reference.gemm refuses.
CASES += [
    case._replace(function="reference.gemm_out")
    for case in CASES
    if case.function == "reference.gemm" and not case.kind.startswith("out_dtype")
]
