"""``python -m bench overhead``: the host time of a call, from Python to its return, in microseconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm.ops import operators

from ..measure.contest import Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, error_line, gemm_operator
from ..measure.timing import time_host

# Sizes so small that the device keeps up: m tokens, a weight (n, k), experts.
M, N, K, EXPERTS = 16, 512, 512, 8
CPU_SIZES = (2, 32, 32, 2)
_LINEAR = operators.below_wrapper(operators.linear)
TOP_K = 2  # experts of a token


@fp4gemm.epilogue
def _gated_silu(acc: Any, bias: Any, gate: fp4gemm.epilogues.Row, *, limit: float = 7.0) -> Any:
    return gate * fp4gemm.epilogues.minimum(fp4gemm.epilogues.silu(acc + bias), limit)


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """One job, which times every call."""
    return [Job("overhead", "overhead", partial(_rows, harness))]


def _rows(harness: Harness) -> Iterator[Row]:
    batches = {"calls_per_batch": 100, "batches": max(5, 51 * harness.rounds // 20)}
    if not harness.is_cuda:
        batches = {"calls_per_batch": 5, "batches": 5, "warm_up": 2}
    for name, call in _calls(harness).items():
        start: Row = {"bench": "overhead", "case": "overhead", "contender": name}
        start["role"] = "baseline" if name.startswith("torch") else "ours"
        try:
            call()
        except NotImplementedError as error:
            yield start | {"absent": error_line(error)}
            continue
        yield start | {"checked": "not checked"} | time_host(call, harness.device, **batches).row()


def _calls(harness: Harness) -> dict[str, Call]:
    m, n, k, experts = (M, N, K, EXPERTS) if harness.is_cuda else CPU_SIZES
    gen = harness.generator(0)
    x, weight = harness.gaussian(gen, m, k), harness.gaussian(gen, n, k)
    layer = torch.nn.Linear(k, n, bias=False, device=harness.device, dtype=harness.dtype)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(weight)
    stack = fp4gemm.quantize(harness.gaussian(gen, experts, n, k))
    offs = torch.arange(1, experts + 1, device=harness.device, dtype=torch.int32) * (m // experts)
    rows = fp4gemm.quantize(x, offs=offs)
    out = torch.empty(m, n, device=harness.device, dtype=torch.bfloat16)
    ours = fp4gemm.nn.Linear.from_float(layer)
    plain = fp4gemm.nn.Linear.from_float(layer, activations="a16")
    bias, gate = torch.zeros(n, device=harness.device), torch.ones(m, device=harness.device)
    bound = _gated_silu(gate=gate)
    made: dict[str, Call] = {
        "mm": lambda: fp4gemm.mm(a, b),
        "mm, bias and silu": lambda: fp4gemm.mm(a, b, bias=bias, activation="silu"),
        "mm, epilogue in Python": lambda: fp4gemm.mm(a, b, bias=bias, epilogue=bound),
        "mm, out given": lambda: fp4gemm.mm(a, b, out=out),
        "mm's operator": gemm_operator(a, b),
        "grouped_mm": lambda: fp4gemm.grouped_mm(rows, stack, offs),
        "quantize": lambda: fp4gemm.quantize(x),
    }
    if "prepacked" in harness.operands:
        made |= _prepacked(x, b)
    made["linear's operator"] = partial(_operator, x, fp4gemm.prepack(b) if harness.streams_prepacked else b)
    made["experts' operator"] = _experts(harness, gen, x, n)
    made["nn.Linear"] = lambda: ours(x)
    if "prepacked" in harness.operands:
        made["nn.Linear, W4A16"] = lambda: plain(x)
    made["torch.mm"] = lambda: torch.mm(x, weight.T)
    made["torch nn.Linear"] = lambda: layer(x)
    return {name: _no_grad(call) for name, call in made.items()}


def _operator(x: torch.Tensor, w: fp4gemm.NVFP4Tensor | fp4gemm.PrepackedTensor) -> torch.Tensor:
    """The operator linear, called below the layer."""
    if isinstance(w, fp4gemm.NVFP4Tensor):
        return _LINEAR(x, w.codes, w.scales, w.amax)  # type: ignore[no-any-return]
    return _LINEAR(x, w.data, None, w.amax, None, w.shape[0])  # type: ignore[no-any-return]


def _experts(harness: Harness, gen: torch.Generator, x: torch.Tensor, n: int) -> Call:
    """The operator experts: x is (m, k), and each expert has n columns between its products."""
    m, k = x.shape
    experts = EXPERTS if harness.is_cuda else CPU_SIZES[-1]
    ids = torch.rand(m, experts, generator=gen, device=harness.device).argsort(1)[:, :TOP_K].contiguous()
    parts: dict[str, Any] = {
        "x": x,
        "topk_ids": ids,
        "topk_weights": torch.ones(m, TOP_K, device=harness.device),
    }
    for name, w in (
        ("w13", fp4gemm.quantize(harness.gaussian(gen, experts, 2 * n, k))),
        ("w2", fp4gemm.quantize(harness.gaussian(gen, experts, k, n))),
    ):
        packed = fp4gemm.prepack(w) if harness.streams_prepacked else None
        parts[name] = w.codes if packed is None else packed.data
        parts[f"{name}_scales"] = w.scales if packed is None else None
        parts[f"{name}_amax"], parts[f"{name}_bias"] = w.amax, None
        parts[f"{name}_rows"] = 0 if packed is None else w.shape[1]
    return partial(torch.ops.fp4gemm.experts, **parts)


def _prepacked(x: Any, b: fp4gemm.NVFP4Tensor) -> dict[str, Call]:
    a, w = fp4gemm.quantize(x, decoded=True), fp4gemm.prepack(b)
    return {
        "mm, prepacked": lambda: fp4gemm.mm(a, w),
        "quantize(decoded=True)": lambda: fp4gemm.quantize(x, decoded=True),
    }


def _no_grad(call: Call) -> Call:
    return torch.inference_mode()(call)
