"""torch.export with a dynamic number of tokens, in both of its modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from helpers import assert_bits
from torch import Tensor

K, N = 64, 24
W = fp4gemm.quantize(torch.ones(N, K).bfloat16() * 0.3)
P = fp4gemm.prepack(W)
STACK = fp4gemm.quantize(torch.ones(3, N, K).bfloat16() * 0.3)
LAYER = fp4gemm.nn.Linear.from_float(torch.nn.Linear(K, N))


def transposed(x: Tensor, offs: Tensor) -> Tensor:
    t = fp4gemm.quantize(x, axis=0, offs=offs)
    return fp4gemm.wgrad(t, t, offs=offs)


# Functions of tokens (m, 64) and, by a second parameter, of offs; the first rows of results are compared.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantize": lambda x: fp4gemm.quantize(x).dequantize(),
    "quantize tensor": lambda x: fp4gemm.quantize(x, scaling="tensor", decoded=True).data,
    "mm": lambda x: fp4gemm.mm(fp4gemm.quantize(x), W),
    "mm with terms": lambda x: fp4gemm.mm(fp4gemm.quantize(x), W, c=x[:, :N].contiguous(), activation="silu"),
    "mm of plain tokens": lambda x: fp4gemm.mm(x, P),
    "producers": lambda x: fp4gemm.rms_norm_quantize(x).dequantize(),
    "Linear": LAYER,
    "Linear of rank 3": lambda x: LAYER(x[None]),
    "grouped_mm": lambda x, offs: fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs), STACK, offs),
    "grouped_mm of plain tokens": lambda x, offs: fp4gemm.grouped_mm(x, STACK, offs),
    "grouped producers": lambda x, offs: fp4gemm.silu_and_mul_quantize(x, offs=offs).dequantize(),
    "wgrad": transposed,
}


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        result: Tensor = self.function(x) if offs is None else self.function(x, offs)
        return result


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_number_of_tokens(name: str, strict: bool, gen: torch.Generator) -> None:
    """One program serves one token and many."""
    torch._dynamo.reset()
    model, x = Model(FUNCTIONS[name]), torch.randn(17, K, generator=gen).bfloat16()
    offs = torch.tensor([5, 5, 17], dtype=torch.int32)
    arguments: tuple[Tensor, ...] = (x, offs) if "group" in name or name == "wgrad" else (x,)
    shapes = ({0: torch.export.Dim("m")}, None)[: len(arguments)]
    program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=strict)
    run = program.module()
    for m in (1, 2, 40):
        x = torch.randn(m, K, generator=gen).bfloat16()
        other = (x, torch.tensor([0, m, m], dtype=torch.int32))[: len(arguments)]
        assert_bits(run(*other), model(*other), f"m = {m}")
