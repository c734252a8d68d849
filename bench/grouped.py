"""``python -m bench grouped``: the products of a layer of experts against the post-scale route and torch."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm._products import Product, difference
from torch import Tensor

from . import machine, post_scale
from .timing import Call, rotations, time_interleaved

Row = dict[str, object]

# Experts, columns and depth of the first product: Qwen3-30B-A3B, gpt-oss-120b.
SHAPES = ((128, 1536, 2048), (128, 5760, 2880))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 16384], help="routed tokens")
    parser.add_argument("--experts", type=int, default=None, help="experts, in place of the models' numbers")


def run(args: argparse.Namespace) -> list[Row]:
    """grouped_mm with weights packed and decoded once, its post-scale rival, torch's grouped_mm in bf16."""
    rows: list[Row] = []
    for groups, n, k in SHAPES:
        groups = args.experts or groups
        for m in args.tokens:
            rows += _shape(m, groups, n, k, args.rounds)
            torch.cuda.empty_cache()
    return rows


def _shape(m: int, groups: int, n: int, k: int, rounds: int) -> list[Row]:
    generator = torch.Generator(device="cuda").manual_seed(m)
    # As uneven as a router is: experts' shares by Zipf's law.
    shares = 1 / torch.arange(1, groups + 1, device="cuda")
    chosen = torch.multinomial(shares, m, replacement=True, generator=generator)
    offs = torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, generator=generator)
    count = min(4, rotations(groups * n * k * 9 // 16, machine.l2_bytes()))
    ws = [torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    a, bs = fp4gemm.quantize(x, offs=offs), [fp4gemm.quantize(w) for w in ws]
    _require_product(a, bs[0], offs)
    decoded = [fp4gemm.decode(b) for b in bs]
    ends = offs.tolist()
    contenders: dict[str, list[Call]] = {
        "grouped_mm": [partial(fp4gemm.grouped_mm, a, b, offs) for b in bs],
        "grouped_mm, weights decoded once": [partial(fp4gemm.grouped_mm, a, b, offs) for b in decoded],
        "GEMM then post-scale, expert by expert": [partial(post_scale.grouped, a, b, ends) for b in bs],
    }
    if hasattr(torch.nn.functional, "grouped_mm"):
        transposed = [w.transpose(1, 2) for w in ws]
        contenders["torch grouped_mm bf16"] = [
            partial(torch.nn.functional.grouped_mm, x, w, offs=offs) for w in transposed
        ]
    timings = time_interleaved(contenders, rounds)
    baseline = timings.get("torch grouped_mm bf16", timings["grouped_mm"]).median_us
    return [
        {"bench": "grouped", "experts": groups, "tokens": m, "n": n, "k": k, "contender": name}
        | timing.row()
        | {
            "tflop_s": round(2 * m * n * k / timing.median_us / 1e6, 1),
            "of_torch_bf16": round(baseline / timing.median_us, 3),
        }
        for name, timing in timings.items()
    ]


def _require_product(a: NVFP4Tensor, b: NVFP4Tensor, offs: Tensor) -> None:
    """grouped_mm on some rows of some experts against the reference, bit for bit."""
    product = Product(a, b, b, offs)
    reason = difference(product, product.run(out=product.poisoned()))
    if reason is not None:
        sys.exit(f"grouped_mm differs from the reference: {reason}: no time is worth printing")
