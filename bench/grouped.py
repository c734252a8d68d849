"""``python -m bench grouped``: the products of a layer of experts, in one launch, against torch and a loop.

Each is compared first: ours with the reference, bit for bit, on some rows of some experts; unquantized tokens
and the rivals with float64 on the first and the last expert that has a row.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm._products import Product, occupied_groups
from torch import Tensor

from . import cublaslt, post_scale
from .contest import BASELINE, ROUNDING, Contender, Contest, Job, Row
from .models import Routed, expert_layers
from .operands import Tokens, Weights, calls, chosen_kernel, forced, in_forms, nbytes, unit
from .rig import Rig
from .roofline import Work
from .routing import routed_ends
from .timing import Call
from .verify import ERRORS, FEW, off_by

OURS = "fp4gemm"
TORCH = {torch.bfloat16: "torch bf16", torch.float32: "torch fp32"}
LOOP = "unfused: expert by expert"
CUBLASLT = "cuBLASLt nvfp4 grouped, scalar alpha"
DEFAULT_MODELS = ("qwen3-30b", "gpt-oss-120b")
TOKENS = (16, 256, 4096)
SMALL_LAYERS = (Routed("", "", 8, 2, 128, 256),)
SMALL_TOKENS = (1, 32)


def jobs(args: argparse.Namespace, rig: Rig) -> list[Job]:
    """A job for each layer of experts, number of tokens and routing that was asked for."""
    if args.shapes:
        layers = [_layer_of(shape, args.top_k) for shape in args.shapes]
    elif args.model or rig.is_cuda:
        layers = expert_layers(args.model or DEFAULT_MODELS, args.ep)
    else:
        layers = list(SMALL_LAYERS)
    made = []
    for layer in layers:
        if args.per_expert:
            tokens = [tokens_for(layer, load, args.ep) for load in args.per_expert]
        else:
            tokens = args.m or (TOKENS if rig.is_cuda else SMALL_TOKENS)
        made += [(layer, m, routing) for m in tokens for routing in args.routing or ["uniform"]]
    return of_layers(made, rig, args.kernels, args.ep)


def _layer_of(shape: Sequence[int], top_k: int) -> Routed:
    if len(shape) != 3:
        raise ValueError(f"--shapes: {'x'.join(map(str, shape))} must be experts x n x k")
    if top_k > shape[0]:
        raise ValueError(f"--top-k: is {top_k}, must be at most {shape[0]}, the number of experts")
    return Routed("", "", shape[0], top_k, shape[1], shape[2])


def tokens_for(layer: Routed, load: int, ways: int = 1) -> int:
    """The tokens that give an expert ``load`` rows on average."""
    return max(1, load * layer.count * ways // layer.top_k)


def of_layers(
    wanted: Sequence[tuple[Routed, int, str]],
    rig: Rig,
    kernels: re.Pattern[str] | None = None,
    ways: int = 1,
    bench: str = "grouped",
) -> list[Job]:
    """A job for each (layer, tokens, routing)."""
    made = []
    for layer in dict.fromkeys(layer for layer, _, _ in wanted):
        cases = [(tokens, routing) for other, tokens, routing in wanted if other == layer]
        # One set of weights serves all of them: enough of it for the case that reads least.
        ends = {
            one: routed_ends(one[0], layer.count, layer.top_k, one[1], ways) for one in dict.fromkeys(cases)
        }
        least = min((len(occupied_groups(offs)) for offs in ends.values()), default=1)
        for one, offs in ends.items():
            start = _start(bench, layer, one[0], one[1], offs, ways)
            make = partial(_rows, rig, layer, start, offs, max(1, least), kernels)
            made.append(Job(str(start["case"]), make))
    return made


def _start(bench: str, layer: Routed, tokens: int, routing: str, offs: Tensor, ways: int) -> Row:
    """What the rows of a case begin with."""
    whose: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    name = " ".join(filter(None, (bench, layer.model, layer.layer)))
    where = f" of {ways} devices" if ways > 1 else ""
    sizes = f"{layer.count}x{layer.n}x{layer.k}"
    facts: Row = {"bench": bench, "case": f"{name} {tokens} tokens {routing} {sizes}{where}"}
    rows = int(offs[-1])
    return (
        facts
        | whose
        | {
            "tokens": tokens,
            "routing": routing,
            "experts": layer.count,
            "active": len(occupied_groups(offs)),
            "top_k": layer.top_k,
            "m": rows,
            "n": layer.n,
            "k": layer.k,
        }
    )


def _rows(
    rig: Rig, layer: Routed, start: Row, offs: Tensor, least: int, kernels: re.Pattern[str] | None
) -> Iterator[Row]:
    if int(offs[-1]) == 0:
        yield start | {"contender": OURS, "absent": "no token came to these experts: nothing to measure"}
        return
    weights = rig.keep(
        "weights",
        (layer.count, layer.n, layer.k, least),
        lambda: Weights(rig, layer.n, layer.k, layer.count, least),
    )
    yield from contest(rig, weights, offs, start, kernels).rows(rig)


def contest(
    rig: Rig, weights: Weights, on_host: Tensor, start: Row, kernels: re.Pattern[str] | None = None
) -> Contest:
    """Everyone who multiplies these groups of rows by a stack of weights."""
    made = Contest(start)
    offs = on_host.to(rig.device)
    tokens = Tokens(weights, int(on_host[-1]), offs)
    if rig.major == 9:
        reason = tokens.decoded_reason()
        if reason is not None:
            made.refused[OURS] = reason
            return made
        _ours(made, rig, weights, tokens, OURS, ("f16", "prepacked"))
        _ours(made, rig, weights, tokens, "fp4gemm, packed tokens", ("nvfp4", "prepacked"))
        _ours(made, rig, weights, tokens, "fp4gemm W4A16", ("bf16", "prepacked"))
    else:
        _ours(made, rig, weights, tokens, OURS, ("nvfp4", "nvfp4"))
    for name, read in forced(rig, "grouped", kernels):
        _ours(made, rig, weights, tokens, name, read, name)
    _loop(made, rig, weights, tokens, on_host)
    _torch(made, rig, weights, tokens)
    if rig.major is not None and rig.major >= 10:
        _cublaslt(made, rig, weights, tokens)
    if rig.is_cuda:
        one = weights.buffers[0].nbytes // weights.groups
        made.enter_floor(rig, weights.buffers, one * len(occupied_groups(on_host)))
    return made


def _work(
    weights: Weights, tokens: Tokens, one_bytes: int, a: Any, unit_name: str, out_bytes: int = 2
) -> Work:
    """Of the products of the experts that have a row: each weight read once, one_bytes of it."""
    active = len(occupied_groups(tokens.offs))
    m = a.shape[0]
    num_bytes = active * one_bytes + nbytes(a) + out_bytes * m * weights.n
    return Work(2.0 * m * weights.n * weights.k, num_bytes, unit_name)


def _ours(
    made: Contest,
    rig: Rig,
    weights: Weights,
    tokens: Tokens,
    name: str,
    forms: tuple[str, str],
    kernel: str | None = None,
) -> None:
    try:
        (a, *_), stacks = in_forms(weights, tokens, forms)
    except NotImplementedError as error:
        made.absent[name] = f"NotImplementedError: {error}"
        return
    m, groups = a.shape[0], weights.groups
    chosen = kernel or chosen_kernel(rig, (m, weights.n, weights.k), *forms, groups)
    work = _work(weights, tokens, stacks[0].nbytes // groups, a, rig.our_unit)
    run = fp4gemm.grouped_mm if kernel is None else partial(fp4gemm.grouped_mm, kernel=kernel)
    ours: list[Call] = [partial(run, a, b, tokens.offs) for b in stacks]
    contender = Contender(ours, work, kernel=chosen)
    if forms[0] == "bf16":
        contender.checked = ROUNDING
        made.enter(name, contender, _far(ours[0], tokens, a, lambda e: weights.packed[0][e].dequantize()))
        return
    made.enter_product(name, contender, Product(a, stacks[0], weights.packed[0], tokens.offs), kernel)


def _far(
    call: Callable[[], object], tokens: Tokens, values: Tensor, expert: Callable[[int], Tensor]
) -> str | None:
    """None where the first rows of the first and the last expert are right but for roundings."""
    try:
        got = call()
        occupied = occupied_groups(tokens.offs)
        for e, begin, end in (occupied[0], occupied[-1]):
            rows = slice(begin, min(end, begin + FEW))
            reason = off_by(got[rows], values[rows], expert(e))  # type: ignore[index]
            if reason is not None:
                return f"expert {e}: {reason}"
    except NotImplementedError:
        raise
    except ERRORS as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _loop(made: Contest, rig: Rig, weights: Weights, tokens: Tokens, on_host: Tensor) -> None:
    """A GEMM with a scalar and a pass for the vectors for each expert: what one had to do without us."""
    forms = ("f16", "prepacked") if rig.major == 9 else ("nvfp4", "nvfp4")
    scale = post_scale.compiled() if rig.is_cuda else post_scale.post_scale
    try:
        (a, *_), stacks = in_forms(weights, tokens, forms)
        rival = [post_scale.grouped(a, b, on_host.tolist(), scale) for b in stacks]
        values = tokens.packed[0].dequantize()
        reason = _far(rival[0], tokens, values, lambda e: weights.packed[0][e].dequantize())
    except NotImplementedError as error:
        made.absent[LOOP] = f"NotImplementedError: {error}"
        return
    work = _work(weights, tokens, stacks[0].nbytes // weights.groups, a, rig.our_unit)
    note = "a GEMM and a post-scale pass for each expert; the host has to know the group ends"
    made.enter(LOOP, Contender(rival, work, BASELINE, None, ROUNDING, note), reason)


def _torch(made: Contest, rig: Rig, weights: Weights, tokens: Tokens) -> None:
    """torch's grouped_mm in bf16; on the CPU, which has none, a loop in fp32."""
    x, stacks = tokens.plain[0], weights.plain
    if rig.is_cuda:
        function: Any = getattr(torch.nn.functional, "grouped_mm", None)
        if function is None:
            made.absent[TORCH[x.dtype]] = f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
            return
        rival: list[Call] = [partial(function, x, w.transpose(1, 2), offs=tokens.offs) for w in stacks]
    else:
        occupied = occupied_groups(tokens.offs)

        def loop(w: Tensor) -> Tensor:
            return torch.cat([x[begin:end] @ w[e].T for e, begin, end in occupied])

        rival = calls(loop, stacks)
    elem_bytes = x.element_size()
    work = _work(weights, tokens, elem_bytes * weights.n * weights.k, x, rig.unit, elem_bytes)
    contender = Contender(rival, work, BASELINE, None, ROUNDING)
    made.enter(TORCH[x.dtype], contender, _far(rival[0], tokens, x, lambda e: stacks[0][e]))


def _cublaslt(made: Contest, rig: Rig, weights: Weights, tokens: Tokens) -> None:
    reason = cublaslt.absent(rig.device)
    if reason is not None:
        made.absent[CUBLASLT] = reason
        return
    ones = [unit(b) for b in weights.packed]
    # Tokens with one amax of 1, and their scales padded by groups as everyone has them.
    x = tokens.packed[0]
    a = fp4gemm.NVFP4Tensor(x.codes, x.scales, torch.ones_like(x.amax), x.e4m3_max, x.offs)
    rival: list[Call] = [partial(cublaslt.grouped, a, b, tokens.offs) for b in ones]
    reason = _far(rival[0], tokens, a.dequantize(), lambda e: ones[0][e].dequantize())
    work = _work(weights, tokens, ones[0].nbytes // weights.groups, a, "nvfp4")
    made.enter(CUBLASLT, Contender(rival, work, BASELINE, None, ROUNDING), reason)
