"""``python -m bench dense``: mm against cuBLAS, cuBLASLt, a post-scale pass and humming, on any device.

Every product of ours is compared with the reference first, bit for bit on up to 512 rows; those whose sums
round (unquantized activations), and the rivals, with float64 (humming's weights are random: see peers.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm._products import Product
from torch import Tensor

from . import cublaslt, post_scale
from .contest import BASELINE, ROUNDING, UNCHECKED, Contender, Contest, Job, Row
from .models import Layer, dense_layers
from .operands import FP16_SCALE, Tokens, Weights, calls, chosen_kernel, forced, in_forms, nbytes, unit
from .peers import Humming
from .rig import Rig
from .roofline import Work
from .verify import far, some_rows

OURS = "fp4gemm"
TORCH = {torch.bfloat16: "torch bf16", torch.float16: "torch fp16", torch.float32: "torch fp32"}
HUMMING = "humming"
SCALAR, UNFUSED = "scalar alpha", "unfused: post-scale"
CUBLASLT, CUBLASLT_POST = "cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"
DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b")
DEFAULT_SHAPES = (Layer("", "", 8192, 8192),)
M = (1, 16, 64, 256, 1024, 4096)
# On a CPU the reference multiplies in float64.
SMALL_SHAPES, SMALL_M = (Layer("", "", 256, 512), Layer("", "", 512, 256)), (1, 16, 64)


def jobs(args: argparse.Namespace, rig: Rig) -> list[Job]:
    """A job for each weight and number of rows that was asked for."""
    if rig.is_cuda:
        layers, ms = [*DEFAULT_SHAPES, *dense_layers(DEFAULT_MODELS)], M
    else:
        layers, ms = list(SMALL_SHAPES), SMALL_M
    return of_layers(wanted(args, layers, ms), rig, args.kernels)


def wanted(args: argparse.Namespace, layers: Sequence[Layer], ms: Sequence[int]) -> list[tuple[Layer, int]]:
    """(layer, m) by --shapes, --model and --m, or the defaults given; those of one weight are neighbours."""
    ms = args.m or ms
    made: list[tuple[Layer, int]] = []
    if args.shapes:
        for shape in args.shapes:
            layer = Layer("", "", *shape[-2:])
            made += [(layer, m) for m in (shape[:1] if len(shape) == 3 else ms)]
    else:
        made = [(layer, m) for layer in (dense_layers(args.model) if args.model else layers) for m in ms]
    first: dict[tuple[int, int], int] = {}
    for layer, _ in made:
        first.setdefault((layer.n, layer.k), len(first))
    return sorted(dict.fromkeys(made), key=lambda one: first[one[0].n, one[0].k])


def of_layers(
    wanted: Sequence[tuple[Layer, int]],
    rig: Rig,
    kernels: re.Pattern[str] | None = None,
    bench: str = "dense",
) -> list[Job]:
    """A job for each (layer, m), those with one weight next to each other."""
    humming = Humming([(layer.n, layer.k, m) for layer, m in wanted]) if rig.major == 9 else None
    return [
        Job(key(bench, layer, m), partial(_rows, rig, layer, m, kernels, humming, bench))
        for layer, m in wanted
    ]


def key(bench: str, layer: Layer, m: int) -> str:
    whose = f" {layer.model} {layer.layer}" if layer.model else ""
    return f"{bench}{whose} {m}x{layer.n}x{layer.k}"


def start(bench: str, layer: Layer, m: int) -> Row:
    """What the rows of a case begin with."""
    whose: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    return {"bench": bench, "case": key(bench, layer, m)} | whose | {"m": m, "n": layer.n, "k": layer.k}


def _rows(
    rig: Rig, layer: Layer, m: int, kernels: re.Pattern[str] | None, humming: Humming | None, bench: str
) -> Iterator[Row]:
    weights = rig.keep("weights", (layer.n, layer.k), lambda: Weights(rig, layer.n, layer.k))
    yield from contest(rig, weights, m, start(bench, layer, m), kernels, humming).rows(rig)


def contest(
    rig: Rig,
    weights: Weights,
    m: int,
    start: Row,
    kernels: re.Pattern[str] | None = None,
    humming: Humming | None = None,
) -> Contest:
    """Everyone who multiplies (m, k) by this weight."""
    made = Contest(start)
    tokens = Tokens(weights, m)
    if rig.major == 9:
        _hopper(made, rig, weights, tokens, m)
    else:
        _ours(made, rig, weights, tokens, OURS, ("nvfp4", "nvfp4"), m)
    forms = ("f16", "prepacked") if rig.major == 9 else ("nvfp4", "nvfp4")
    _unfused(made, rig, weights, tokens, forms, m)
    for name, read in forced(rig, "dense", kernels):
        _ours(made, rig, weights, tokens, name, read, m, name)
    _torch(made, rig, weights, tokens, m)
    if rig.major is not None and rig.major >= 10:
        _cublaslt(made, rig, weights, tokens, m)
    if humming is not None:
        rival, reason = humming.calls(weights.n, weights.k, tokens.halves)
        work = _work(weights.packed[0], tokens.halves[0], m, weights.n, rig.our_unit)
        if reason is None:
            note = "random weights, result not checked"
            made.enter(HUMMING, Contender(rival, work, BASELINE, None, UNCHECKED, note))
        else:
            made.absent[HUMMING] = reason
    if rig.is_cuda:
        made.enter_floor(rig, weights.buffers, weights.buffers[0].nbytes)
    return made


def _work(b: Any, a: Any, m: int, n: int, unit_name: str) -> Work:
    """Of D = a @ b.T in 16 bits."""
    k = a.shape[1]
    return Work(2.0 * m * n * k, nbytes(a, b) + 2 * m * n, unit_name)


def _ours(
    made: Contest,
    rig: Rig,
    weights: Weights,
    tokens: Tokens,
    name: str,
    forms: tuple[str, str],
    m: int,
    kernel: str | None = None,
) -> None:
    """Enters mm of operands in these forms, by the library's choice of kernel or by that one."""
    try:
        first, second = in_forms(weights, tokens, forms)
    except NotImplementedError as error:
        made.absent[name] = f"NotImplementedError: {error}"
        return
    a, b = first[0], second[0]
    work = _work(b, a, m, weights.n, rig.our_unit)
    chosen = kernel or chosen_kernel(rig, (m, weights.n, weights.k), *forms)
    call = fp4gemm.mm if kernel is None else partial(fp4gemm.mm, kernel=kernel)
    contender = Contender(calls(call, first, second), work, kernel=chosen)
    if forms[0] == "bf16":  # sums of what was not quantized round
        contender.checked = ROUNDING
        rows = some_rows(m, rig.device)
        made.enter(name, contender, far(contender.calls[0], rows, tokens.plain[0][rows], weights.values))
        return
    made.enter_product(name, contender, Product(a, b, weights.packed[0]), kernel)


def _hopper(made: Contest, rig: Rig, weights: Weights, tokens: Tokens, m: int) -> None:
    reason = tokens.decoded_reason()
    if reason is not None:
        made.refused[OURS] = reason
        return
    _ours(made, rig, weights, tokens, OURS, ("f16", "prepacked"), m)
    _ours(made, rig, weights, tokens, "fp4gemm, packed tokens", ("nvfp4", "prepacked"), m)
    _ours(made, rig, weights, tokens, "fp4gemm, both packed", ("nvfp4", "nvfp4"), m)
    _ours(made, rig, weights, tokens, "fp4gemm, both decoded", ("f16", "f16"), m)
    _ours(made, rig, weights, tokens, "fp4gemm W4A16", ("bf16", "prepacked"), m)


def _unfused(
    made: Contest, rig: Rig, weights: Weights, tokens: Tokens, forms: tuple[str, str], m: int
) -> None:
    """Our GEMM without vectors, and with a pass for them behind it: what the fused epilogue saves."""
    try:
        first, second = in_forms(weights, tokens, forms)
        scale = post_scale.compiled() if rig.is_cuda else post_scale.post_scale
        scalar = calls(fp4gemm.mm, [unit(a) for a in first], [unit(b) for b in second])
        behind = [post_scale.dense(a, b, scale) for a, b in zip(first, second, strict=True)]
        a, b = tokens.packed[0], weights.packed[0]
        rows = some_rows(m, rig.device)
        ones = (unit(a).dequantize()[rows], unit(b).dequantize())
        work = _work(second[0], first[0], m, weights.n, rig.our_unit)
        kernel = chosen_kernel(rig, (m, weights.n, weights.k), *forms)
        contender = Contender(scalar, work, kernel=kernel, checked=ROUNDING)
        made.enter(SCALAR, contender, far(scalar[0], rows, *ones))
        contender = Contender(behind, work, BASELINE, kernel, ROUNDING)
        made.enter(UNFUSED, contender, far(behind[0], rows, a.dequantize()[rows], weights.values))
    except NotImplementedError as error:
        made.absent[UNFUSED] = f"NotImplementedError: {error}"


def _torch(made: Contest, rig: Rig, weights: Weights, tokens: Tokens, m: int) -> None:
    """torch's product in the types that the device has."""

    def enter(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        count = min(len(first), len(second))
        rival = calls(torch.mm, first[:count], [w.T for w in second[:count]])
        rows = some_rows(m, rig.device)
        work = _work(second[0], first[0], m, weights.n, rig.unit)
        contender = Contender(rival, work, BASELINE, None, ROUNDING)
        name = TORCH[first[0].dtype]
        made.enter(name, contender, far(rival[0], rows, first[0][rows], second[0]))

    enter(tokens.plain, weights.plain)
    if rig.is_cuda and rig.major == 9:
        enter([a.data * FP16_SCALE for a in tokens.decoded[: len(weights.fp16)]], weights.fp16)


def _cublaslt(made: Contest, rig: Rig, weights: Weights, tokens: Tokens, m: int) -> None:
    reason = cublaslt.absent(rig.device)
    if reason is not None:
        made.absent[CUBLASLT] = reason
        return
    first, second = [unit(a) for a in tokens.packed], [unit(b) for b in weights.packed]
    scalar = calls(cublaslt.dense, first, second)
    rows = some_rows(m, rig.device)
    work = _work(second[0], first[0], m, weights.n, "nvfp4")
    reason = far(scalar[0], rows, first[0].dequantize()[rows], second[0].dequantize())
    made.enter(CUBLASLT, Contender(scalar, work, BASELINE, None, ROUNDING), reason)
    behind = [
        post_scale.dense(a, b, post_scale.compiled(), cublaslt.dense)
        for a, b in zip(tokens.packed, weights.packed, strict=True)
    ]
    reason = far(behind[0], rows, tokens.packed[0].dequantize()[rows], weights.values)
    made.enter(CUBLASLT_POST, Contender(behind, work, BASELINE, None, ROUNDING), reason)
