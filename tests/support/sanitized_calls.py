"""Small calls of the kernels that overlap with others, for NVIDIA's compute-sanitizer on a Hopper GPU.

    PYTHONPATH=tests/support compute-sanitizer --tool racecheck python tests/support/sanitized_calls.py

runs every mode of the quantizers along both axes with and without groups, dequantize, the fused producers,
the FP8 casts, SwiGLU, the prepacked products whose CTAs form clusters, and the products of decoded operands.
With --decoded it runs the products of decoded operands alone. It prints how many calls it made. It compares
no result: the tests do that.
"""

from __future__ import annotations

import argparse

import fp4gemm
import torch
from fp4gemm import training
from modes import EDEN, MODES

M, N, K = 300, 512, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CLUSTERS = ("128x128x128_c1x2", "256x128x64_c1x2")


def quantizers(device: torch.device) -> int:
    """Quantize, with groups that are empty and rows behind the last group; the number of calls."""
    calls = 0
    offs = torch.tensor([0, 50, 50, 130], device=device, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(144, 160, device=device, dtype=dtype)
        for mode in [*MODES, *EDEN]:
            for axis in (-1, 0):
                for groups in (None, offs):
                    try:
                        t = fp4gemm.quantize(x, axis=axis, offs=groups, **mode.on(device))
                    except NotImplementedError:
                        continue  # a combination that no kernel has
                    calls += 1
                    if groups is None:
                        t.dequantize(dtype)
        fp4gemm.quantize_both(x)
        fp4gemm.quantize(x, rows=torch.arange(100, device=device, dtype=torch.int32))
        fp4gemm.silu_and_mul_quantize(x.repeat(1, 2))
        fp4gemm.rms_norm_quantize(x, weight=x[0].clone(), residual=x.clone())
        for m, k in ((144, 192), (3, 8256), (1100, 2112)):
            y = torch.randn(m, 2 * k, device=device, dtype=dtype)
            y[1, 5] = torch.nan
            for groups in (None, offs):
                fp4gemm.quantize_fp8(y[:, :k], offs=groups)
                fp4gemm.silu_and_mul_quantize_fp8(y, offs=groups)
            fp4gemm.rms_norm_quantize_fp8(y[:, :k], weight=y[0, :k].clone(), residual=y[:, k:])
        gate, up = (torch.randn(70, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        training.functional.swiglu(gate, up).sum().backward()
    return calls


def products(device: torch.device) -> int:
    """Every kernel of the prepacked tiles whose CTAs form clusters; the number of calls."""
    calls = 0
    weights = torch.randn(4, N, K, device=device, dtype=torch.bfloat16)
    dense = fp4gemm.prepack(fp4gemm.quantize(weights[0]))
    grouped = fp4gemm.prepack(fp4gemm.quantize(weights))
    dense_fp8 = fp4gemm.prepack(fp4gemm.quantize(weights[0]), fp8=True)
    grouped_fp8 = fp4gemm.prepack(fp4gemm.quantize(weights), fp8=True)
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    offs = torch.tensor([40, 40, 200, M], device=device, dtype=torch.int32)
    for kernel in fp4gemm.kernels():
        name = kernel.name
        if not name.startswith("sm90") or not any(f"{tile}_prepacked" in name for tile in CLUSTERS):
            continue
        activation = "swiglu" if "gated" in name else None
        terms = {"kernel": name, "out_dtype": DTYPES[name[-4:]], "activation": activation}
        if kernel.operand == "prepacked_fp8":
            terms["use_fast_accum"] = kernel.fast_accum
            if "dense" in name:
                fp4gemm.mm(fp4gemm.quantize_fp8(x), dense_fp8, **terms)
            else:
                fp4gemm.grouped_mm(fp4gemm.quantize_fp8(x, offs=offs), grouped_fp8, **terms)
            calls += 1
            continue
        is_quantized = "prepacked_bf16" not in name
        if "dense" in name:
            fp4gemm.mm(fp4gemm.quantize(x, decoded=True) if is_quantized else x, dense, **terms)
        elif is_quantized:
            fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs, decoded=True), grouped, **terms)
        else:
            fp4gemm.grouped_mm(x, grouped, offs=offs, **terms)
        calls += 1
    return calls


def decoded_products(device: torch.device) -> int:
    """Every kernel of two decoded operands: dense, ragged in m and ragged in k; the number of calls."""
    calls = 0
    weights = torch.randn(4, N, K, device=device, dtype=torch.bfloat16)
    experts = fp4gemm.decode(fp4gemm.quantize(weights))
    x, y = torch.randn(2, M, K, device=device, dtype=torch.bfloat16)
    offs = torch.tensor([40, 40, 203, 290], device=device, dtype=torch.int32)
    dense, tokens = fp4gemm.quantize(x, decoded=True), fp4gemm.quantize(x, offs=offs, decoded=True)
    weight = fp4gemm.quantize(weights[0], decoded=True)
    dy, x_t = (fp4gemm.quantize(each, axis=0, offs=offs, decoded=True) for each in (x, y))
    for kernel in fp4gemm.kernels():
        if kernel.arch != 90 or kernel.operand != "fp16":
            continue
        terms = {"kernel": kernel.name, "out_dtype": kernel.out_dtype}
        gated = {"activation": "swiglu"} if kernel.is_gated else {}
        if kernel.mode == "dense":
            fp4gemm.mm(dense, weight, **terms, **gated)
            calls += 1
            continue
        fp4gemm.grouped_mm(tokens, experts, **terms, **gated)
        calls += 1
        if not kernel.is_gated:
            fp4gemm.grouped_mm(dy, x_t, **terms)
            calls += 1
    return calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decoded", action="store_true", help="the products of decoded operands alone")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    if not args.decoded:
        print(f"{quantizers(device)} calls of the quantizers, {products(device)} prepacked products")
    print(f"{decoded_products(device)} products of decoded operands")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
