"""``python -m bench dense`` and ``overhead``: mm against torch's matmul, and the host time of a call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm._products import Product, difference

from . import machine
from .timing import Call, rotations, time_host, time_interleaved
from .verify import off_by

Row = dict[str, object]


def bench_dense(args: argparse.Namespace) -> list[Row]:
    """mm against torch's fp16 and bf16 matmul of the same size, interleaved."""
    rows: list[Row] = []
    for m, n, k in args.shapes:
        count = rotations(2 * n * k, machine.l2_bytes())
        xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        qx = [fp4gemm.quantize(x) for x in xs]
        qw = [fp4gemm.quantize(w) for w in ws]
        dw = [fp4gemm.decode(w) for w in qw]
        dx = [fp4gemm.decode(x) for x in qx]
        # For torch the same numbers by powers of two smaller: its fp16 output would overflow.
        hx, hw = [x.data * 2**-8 for x in dx], [w.data * 2**-8 for w in dw]
        _require_product(qx[0], qw[0])
        _require_baseline(hx[0], hw[0])
        _require_baseline(xs[0], ws[0])
        contenders: dict[str, Sequence[Call]] = {
            "mm": _calls(fp4gemm.mm, qx, qw),
            "mm, weights decoded once": _calls(fp4gemm.mm, qx, dw),
            "mm, both decoded": _calls(fp4gemm.mm, dx, dw),
            "torch fp16": _calls(torch.mm, hx, [w.T for w in hw]),
            "torch bf16": _calls(torch.mm, xs, [w.T for w in ws]),
        }
        if args.kernels:
            major, minor = torch.cuda.get_device_capability()
            for info in fp4gemm.kernels():
                fits = info.mode == "dense" and info.out_dtype == torch.bfloat16
                if fits and info.arch == 10 * major + minor:
                    operands = (qx, qw) if info.operand == "nvfp4" else (dx, dw)
                    contenders[info.name] = _calls(partial(fp4gemm.mm, kernel=info.name), *operands)
        timings = time_interleaved(contenders, args.rounds)
        baseline = timings["torch fp16"].median_us
        for name, timing in timings.items():
            rows.append(
                {"bench": "dense", "m": m, "n": n, "k": k, "contender": name}
                | timing.row()
                | {
                    "tflop_s": round(2 * m * n * k / timing.median_us / 1e6, 1),
                    "of_torch_fp16": round(baseline / timing.median_us, 3),
                }
            )
        del xs, ws, qx, qw, dx, dw, hx, hw, contenders
        torch.cuda.empty_cache()
    return rows


def _calls(function: Callable[..., object], first: Sequence[object], second: Sequence[object]) -> list[Call]:
    return [partial(function, a, b) for a, b in zip(first, second, strict=True)]


def _require_product(a: NVFP4Tensor, b: NVFP4Tensor) -> None:
    """mm on some rows against the reference; Gaussian data sum exactly in fp32, so no bit may differ."""
    product = Product(a, b, b)
    reason = difference(product, product.run(out=product.poisoned()))
    if reason is not None:
        sys.exit(f"mm differs from the reference: {reason}: no time is worth printing")


def _require_baseline(a: torch.Tensor, b: torch.Tensor) -> None:
    """torch's product on a few rows: a wrong rival is no rival."""
    reason = off_by(torch.mm(a, b.T)[:4], a[:4], b)
    if reason is not None:
        sys.exit(f"torch's {a.dtype} matmul is {reason}: no ratio is worth printing")


def bench_overhead(args: argparse.Namespace) -> list[Row]:
    """Host microseconds of a call on operands so small that the device keeps up."""
    a = fp4gemm.quantize(torch.randn(16, 512, device="cuda", dtype=torch.bfloat16))
    b = fp4gemm.quantize(torch.randn(512, 512, device="cuda", dtype=torch.bfloat16))
    decoded = fp4gemm.decode(b)
    out = torch.empty(16, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Call] = {
        "mm": lambda: fp4gemm.mm(a, b),
        "mm, out given": lambda: fp4gemm.mm(a, b, out=out),
        "mm, weights decoded once": lambda: fp4gemm.mm(a, decoded),
        "op alone": lambda: torch.ops.fp4gemm.scaled_mm(
            a.codes, b.codes, a.scales, b.scales, 1.0, a.amax, b.amax, None, torch.bfloat16, None
        ),
        "quantize": lambda: fp4gemm.quantize(x),
        "torch.mm": lambda: torch.mm(x, x.T),
    }
    return [{"bench": "overhead", "call": name} | time_host(call).row() for name, call in calls.items()]
