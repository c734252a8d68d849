"""Routings, operands of experts, and products by the second model, for the tests of grouped products."""

from __future__ import annotations

from typing import NamedTuple

import fp4gemm
import model
import model_epilogue
import numpy as np
import torch
from fp4gemm import NVFP4Tensor
from helpers import make
from torch import Tensor

ALPHA = 1 / (36 * 448 * 448)
ROUTINGS = {
    "even": (40, 40, 40, 40),
    "ragged": (130, 0, 1, 37, 0, 128),
    "one": (75,),
    "one_hot": (0, 0, 200, 0),
    "all_empty": (0, 0, 0),
    "first_empty": (0, 5),
    "last_empty": (16, 33, 0),
}


class Rows(NamedTuple):
    """Tokens of experts, and the weights of each expert."""

    x: Tensor  # (m, k) bf16
    w: Tensor  # (g, n, k) bf16
    offs: Tensor  # (g,) int32
    a: NVFP4Tensor
    b: NVFP4Tensor

    @property
    def ends(self) -> list[int]:
        return list(self.offs.tolist())

    @property
    def raw(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.a.codes, self.b.codes, self.a.scales, self.b.scales, self.offs


class Columns(NamedTuple):
    """Gradients and inputs of experts, with tokens along k."""

    dy: Tensor  # (tokens, m) bf16
    x: Tensor  # (tokens, n) bf16
    offs: Tensor  # (g,) int32
    a: NVFP4Tensor  # (m, cols)
    b: NVFP4Tensor  # (n, cols)

    @property
    def ends(self) -> list[int]:
        return list(self.offs.tolist())

    @property
    def raw(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.a.codes, self.b.codes, self.a.scales, self.b.scales, self.offs


def ends_of(sizes: tuple[int, ...] | list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32).to(device)


def rows_of(
    sizes: tuple[int, ...],
    n: int,
    k: int,
    device: torch.device,
    gen: torch.Generator,
    loose: int = 0,
    scaling: str = "row",
) -> Rows:
    """``loose`` is the number of rows behind the last group."""
    x = make("normal", sum(sizes) + loose, k, torch.bfloat16, gen).to(device)
    w = make("normal", len(sizes) * n, k, torch.bfloat16, gen).view(len(sizes), n, k).to(device)
    offs = ends_of(sizes, device)
    return Rows(x, w, offs, fp4gemm.quantize(x, offs=offs), fp4gemm.quantize(w, scaling=scaling))


def columns_of(
    sizes: tuple[int, ...],
    m: int,
    n: int,
    device: torch.device,
    gen: torch.Generator,
    loose: int = 0,
    scaling: str = "row",
) -> Columns:
    """Small integers: with Gaussian data a block that holds one token could have any scale."""
    tokens = sum(sizes) + loose
    dy = make("integers", tokens, m, torch.bfloat16, gen).to(device)
    x = make("integers", tokens, n, torch.bfloat16, gen).to(device)
    offs = ends_of(sizes, device)
    options = {"axis": 0, "offs": offs, "scaling": scaling}
    return Columns(dy, x, offs, fp4gemm.quantize(dy, **options), fp4gemm.quantize(x, **options))


def row_products(case: Rows) -> list[np.ndarray]:
    """The float64 accumulator of each group."""
    values = model_epilogue.grouped_row_values(case.a.codes, case.a.scales, case.ends)
    result, begin = [], 0
    for e, end in enumerate(case.ends):
        weight = model.values(case.b.codes[e], case.b.scales[e])
        result.append(values[begin:end] @ weight.T)
        begin = end
    return result


def column_products(case: Columns) -> list[np.ndarray]:
    """The float64 accumulator of each group, from the blocks of columns that hold tokens."""
    left, right = (model.values(t.codes, t.scales) for t in (case.a, case.b))
    return [
        left[:, first : first + count] @ right[:, first : first + count].T
        for first, count in model_epilogue.column_spans(case.ends)
    ]


def expected_rows(
    case: Rows,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """D of grouped_mm: the rows of all groups."""
    parts, begin = [], 0
    for e, (end, acc) in enumerate(zip(case.ends, row_products(case), strict=True)):
        z = model.epilogue(
            acc,
            ALPHA,
            case.a.amax[begin:end],
            case.b.amax[e],
            bias if bias is None or bias.dim() == 1 else bias[e],
        )
        part = None if c is None else c[begin:end]
        parts.append(model_epilogue.finish(z.numpy(), activation, part, beta, out_dtype))
        begin = end
    return torch.cat(parts)


def expected_columns(
    case: Columns,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """D of grouped_mm with ragged k, (g, m, n)."""
    parts = []
    for e, acc in enumerate(column_products(case)):
        z = model.epilogue(
            acc, ALPHA, case.a.amax[e], case.b.amax[e], bias if bias is None or bias.dim() == 1 else bias[e]
        )
        part = None if c is None else c[e]
        parts.append(model_epilogue.finish(z.numpy(), activation, part, beta, out_dtype))
    return torch.stack(parts)


def routing(kind: str, g: int, m: int, gen: torch.Generator) -> list[int]:
    """The sizes of g groups that have at most m rows together."""
    if kind == "all_empty":
        return [0] * g
    if kind == "one_hot":
        sizes = [0] * g
        sizes[int(torch.randint(0, g, (1,), generator=gen))] = int(
            torch.randint(0, m + 1, (1,), generator=gen)
        )
        return sizes
    odds = 1 / torch.arange(1, g + 1) if kind == "zipf" else torch.ones(g)
    odds = odds[torch.randperm(g, generator=gen)]
    tokens = int(torch.randint(1, m + 1, (1,), generator=gen))
    drawn = torch.multinomial(odds, tokens, replacement=True, generator=gen)
    return torch.bincount(drawn, minlength=g).tolist()
