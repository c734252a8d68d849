"""Table 7: the forward pass of a grouped linear layer, of #2865, whose weights were quantized before.

Upstream measures MXFP8. This library's own rows are NVFP4 weights with tokens in NVFP4 and in FP8, beside
torch's products in bf16 and FP8, and torch's and TransformerEngine's in MXFP8 where they run. The MXFP8
product of this library, which Hopper computes as one of fp16, has no row yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from torch import Tensor

from ..baselines import cublaslt, transformer_engine
from ..commands import grouped
from ..measure.contest import BASELINE, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import needs_cores
from ..measure.operands import Weights, calls, fastest_forms
from ..measure.roofline import Work
from .arms import Grouped
from .casts import even_ends

BENCH = "upstream mxfp8"
OURS, OURS_REASON = "fp4gemm MXFP8", "its MXFP8 product, which Hopper computes as one of fp16, has no row yet"
FP8 = "torch fp8"
TORCH, TE = "torch MXFP8", f"{transformer_engine.NAME}, MXFP8 GroupedLinear"


def jobs(sizes: Sequence[Grouped], harness: Harness) -> list[Job]:
    """A job for each size."""
    made = []
    for size in sizes:
        key = f"{BENCH} {size.m}x{size.n}x{size.k} by {size.gemms}"
        made.append(Job(key, BENCH, partial(_rows, harness, key, size)))
    return made


def _rows(harness: Harness, key: str, size: Grouped) -> Iterator[Row]:
    m, n, k, g = size
    start: Row = {"bench": BENCH, "case": key, "m": m, "n": n, "k": k, "experts": g}
    weights = harness.keep("weights", (g, n, k, g), lambda: Weights(harness, n, k, g, g))
    made = Contest(start, is_long=harness.is_cuda, only=harness.only)
    add = grouped.Contenders(made, harness, weights, even_ends(m, g))
    add.whole(fastest_forms(harness))
    add.w4a8()
    add.torch()
    add.fp8({FP8: True}, alone=False)
    made.miss(OURS, OURS_REASON)
    if not harness.has_nvfp4_cores:
        made.miss(TORCH, needs_cores("torch's MXFP8 product", "MXFP8"))
    elif cublaslt.absent("scaled_grouped_mm") is not None:
        made.miss(TORCH, str(cublaslt.absent("scaled_grouped_mm")))
    else:
        made.attempt(TORCH, partial(_torch, add), ours=False)
    reason = transformer_engine.absent(harness, "MXFP8")
    if reason is not None:
        made.miss(TE, reason)
    else:
        made.attempt(TE, partial(_te, add), ours=False)
    yield from made.rows(harness)


def _work(add: grouped.Contenders) -> Work:
    m, n, k = add.m, add.weights.n, add.weights.k
    weights = add.weights.groups * n * k * 33 // 32
    return Work(2.0 * m * n * k, add.tokens.plain[0].nbytes + weights + 2 * m * n, add.harness.fp8_unit)


def _plain_stacks(add: grouped.Contenders) -> list[Tensor]:
    return [stack.bfloat16() for stack in add.weights.plain]


def _torch(add: grouped.Contenders) -> tuple[Contender, Check]:
    (x,), stacks = [one.bfloat16() for one in add.tokens.plain], _plain_stacks(add)
    operands = [[fp4gemm.quantize_mxfp8(w) for w in stack] for stack in stacks]
    weights = [cublaslt.mxfp8_stack(stack) for stack in operands]
    made = calls(lambda w: cublaslt.grouped_mxfp8(fp4gemm.quantize_mxfp8(x), w, add.offs), weights)
    contender = Contender(made, _work(add), BASELINE, None, ROUNDING, quantizes=True)
    values = fp4gemm.quantize_mxfp8(x).dequantize()
    expert = lambda e: operands[0][e].dequantize()  # noqa: E731
    return contender, add.near(made[0], values, expert, torch.bfloat16)


def _te(add: grouped.Contenders) -> tuple[Contender, Check]:
    (x,), stacks = [one.bfloat16() for one in add.tokens.plain], _plain_stacks(add)
    splits = [end - begin for _, begin, end in add.occupied]
    made: list[Any] = [transformer_engine.grouped_mxfp8(x, stack, splits) for stack in stacks]
    contender = Contender(
        made, _work(add), BASELINE, None, ROUNDING, quantizes=True, facts=transformer_engine.facts
    )
    values = fp4gemm.quantize_mxfp8(x).dequantize()
    expert = lambda e: fp4gemm.quantize_mxfp8(stacks[0][e]).dequantize()  # noqa: E731
    return contender, add.near(made[0], values, expert, torch.bfloat16)
