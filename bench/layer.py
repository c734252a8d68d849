"""``python -m bench layer``: a linear layer's forward end to end, the quantization of its input included."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm._products import Product
from torch import Tensor

from . import cublaslt, post_scale
from .contest import BASELINE, ROUNDING, Contender, Contest, Job, Row
from .dense import DEFAULT_SHAPES, SMALL_M, SMALL_SHAPES, TORCH, key, start, wanted
from .models import Layer
from .operands import Tokens, Weights, calls, chosen_kernel, unit
from .rig import Rig
from .roofline import Work
from .verify import far, some_rows

OURS, UNFUSED = "fp4gemm", "unfused: post-scale"
M = (1, 16, 256, 4096)


def jobs(args: argparse.Namespace, rig: Rig) -> list[Job]:
    """A job for each weight and number of rows that was asked for."""
    layers: Sequence[Layer] = DEFAULT_SHAPES if rig.is_cuda else SMALL_SHAPES
    return of_layers(wanted(args, layers, M if rig.is_cuda else SMALL_M), rig)


def of_layers(wanted: Sequence[tuple[Layer, int]], rig: Rig, bench: str = "layer") -> list[Job]:
    return [Job(key(bench, layer, m), partial(_rows, rig, layer, m, bench)) for layer, m in wanted]


def _rows(rig: Rig, layer: Layer, m: int, bench: str) -> Iterator[Row]:
    weights = rig.keep("weights", (layer.n, layer.k), lambda: Weights(rig, layer.n, layer.k))
    yield from contest(rig, weights, m, start(bench, layer, m)).rows(rig)


def contest(rig: Rig, weights: Weights, m: int, start: Row) -> Contest:
    """Everyone who multiplies plain (m, k) by this weight."""
    made = Contest(start)
    tokens = Tokens(weights, m)
    n, k = weights.n, weights.k
    x = tokens.plain[0]
    elem_bytes = x.element_size()
    rows = some_rows(m, rig.device)

    def work(weight_bytes: int, unit_name: str) -> Work:
        # x once, the weight once, D once; what passes between quantizer and GEMM is not counted.
        return Work(2.0 * m * n * k, elem_bytes * m * k + weight_bytes + 2 * m * n, unit_name)

    def enter_ours(
        name: str, forward: Callable[[Tensor, Any], Tensor], stacks: Sequence[Any], forms: tuple[str, str]
    ) -> None:
        """``forward`` is checked by the bits of the product that it contains."""
        a = tokens.decoded[0] if forms[0] == "f16" else tokens.packed[0]
        kernel = chosen_kernel(rig, (m, n, k), *forms)
        contender = Contender(
            calls(forward, tokens.plain, stacks), work(weights.packed[0].nbytes, rig.our_unit), kernel=kernel
        )
        reason = _same(forward(x, stacks[0]), lambda: fp4gemm.mm(a, stacks[0]))
        if reason is not None:
            made.refused[name] = reason
            return
        made.enter_product(name, contender, Product(a, stacks[0], weights.packed[0]))

    try:
        if rig.major == 9:
            enter_ours(OURS, _decoded, weights.prepacked, ("f16", "prepacked"))
            enter_ours("fp4gemm, packed tokens", _packed, weights.prepacked, ("nvfp4", "prepacked"))
        else:
            enter_ours(OURS, _packed, weights.packed, ("nvfp4", "nvfp4"))
        _unfused(made, rig, weights, tokens, work)
    except NotImplementedError as error:
        made.absent[OURS] = f"NotImplementedError: {error}"
    torch_calls = calls(torch.nn.functional.linear, tokens.plain[: len(weights.plain)], weights.plain)
    contender = Contender(torch_calls, work(weights.plain[0].nbytes, rig.unit), BASELINE, None, ROUNDING)
    made.enter(TORCH[x.dtype], contender, far(torch_calls[0], rows, x[rows], weights.plain[0]))
    return made


def _decoded(x: Tensor, w: Any) -> Tensor:
    return fp4gemm.mm(fp4gemm.quantize(x, decoded=True), w)


def _packed(x: Tensor, w: Any) -> Tensor:
    return fp4gemm.mm(fp4gemm.quantize(x), w)


def _same(got: Tensor, want: Callable[[], Tensor]) -> str | None:
    same = torch.equal(got.view(torch.int16), want().view(torch.int16))
    return None if same else "differs from mm of the quantized input"


def _unfused(
    made: Contest, rig: Rig, weights: Weights, tokens: Tokens, work: Callable[[int, str], Work]
) -> None:
    """Quantize, a GEMM with a scalar, and a pass for the vectors; on Blackwell with cuBLASLt's GEMM."""
    name = UNFUSED
    if rig.major == 9:
        quantize: Any = partial(fp4gemm.quantize, decoded=True)
        stacks: Sequence[Any] = weights.prepacked
    else:
        quantize, stacks = fp4gemm.quantize, weights.packed
    gemm: Any = fp4gemm.mm
    if cublaslt.absent(rig.device) is None:
        name, gemm = "cuBLASLt nvfp4 + post-scale", cublaslt.dense
    scale = post_scale.compiled() if rig.is_cuda else post_scale.post_scale
    ones = [(unit(b), b.amax) for b in stacks]

    def forward(x: Tensor, weight: tuple[Any, Tensor]) -> Tensor:
        a = quantize(x)
        return scale(gemm(_with_one(a), weight[0]), a.amax, weight[1])

    one = torch.ones(1, device=rig.device)

    def _with_one(a: Any) -> Any:
        if isinstance(a, fp4gemm.DecodedTensor):
            return fp4gemm.DecodedTensor(a.data, one, a.e4m3_max)
        return fp4gemm.NVFP4Tensor(a.codes, a.scales, one, a.e4m3_max)

    rival = calls(forward, tokens.plain, ones)
    rows = some_rows(tokens.plain[0].shape[0], rig.device)
    values = tokens.packed[0].dequantize()[rows]
    contender = Contender(rival, work(weights.packed[0].nbytes, rig.our_unit), BASELINE, None, ROUNDING)
    made.enter(name, contender, far(rival[0], rows, values, weights.values))
