"""Products to measure: Gaussian operands in every form, the calls, and the comparison with the reference.

Sums of products of Gaussian NVFP4 data are exact in float32 in any order of additions, so a correct kernel
gives the bits of the reference. Kernels write to memory that was filled with NaN before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gemm, grouped, reference, stacks
from ..containers import prepacked
from ..containers.decoded import DecodedTensor
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor
from ..quantize import decode, quantize

__all__ = [
    "A_FORMS",
    "B_FORMS",
    "Product",
    "activations",
    "difference",
    "error_line",
    "gaussian_weights",
    "occupied_groups",
    "random_ends",
    "weights_in",
]

Activations = NVFP4Tensor | DecodedTensor | Tensor
Weights = NVFP4Tensor | DecodedTensor | PrepackedTensor

A_FORMS = ("nvfp4", "fp16", "bf16")  # quantized; decoded; bfloat16 that was never quantized
B_FORMS = ("nvfp4", "fp16", "prepacked")
POISON = 0xFF  # a byte of a NaN in every output type
ROWS = 512  # rows of D that are compared, at most
GROUPS = 8  # groups that are compared, at most
COLUMNS = 4096  # columns of D that are compared at a time; a multiple of 128, so that scales can be sliced


# ---- operands


def gaussian_weights(
    n: int, k: int, device: torch.device, gen: torch.Generator, num_groups: int = 0
) -> NVFP4Tensor:
    """A quantized Gaussian (n, k), or num_groups of them, made one by one to keep peak memory low."""

    def one() -> NVFP4Tensor:
        return quantize(torch.randn((n, k), device=device, dtype=torch.bfloat16, generator=gen))

    return one() if num_groups == 0 else stacks.stack([one() for _ in range(num_groups)])


def weights_in(form: str, w: NVFP4Tensor) -> Weights:
    """w in one of B_FORMS."""
    if form == "fp16":
        return decode(w)
    return prepacked.prepack(w) if form == "prepacked" else w


def activations(
    form: str, m: int, k: int, device: torch.device, gen: torch.Generator, offs: Tensor | None = None
) -> Activations:
    """A Gaussian (m, k), quantized, in one of A_FORMS; bfloat16 holds the quantized values exactly."""
    a = quantize(torch.randn((m, k), device=device, dtype=torch.bfloat16, generator=gen), offs=offs)
    if form == "nvfp4":
        return a
    values = decode(a)
    # An e2m1 number times an e4m3 number has 6 significant bits.
    return values if form == "fp16" else values.data.to(torch.bfloat16)


def random_ends(m: int, num_groups: int, device: torch.device, gen: torch.Generator) -> Tensor:
    """int32 (num_groups,): cumulative group ends of m rows, each row in a random group."""
    chosen = torch.randint(num_groups, (m,), device=device, generator=gen)
    return torch.bincount(chosen, minlength=num_groups).cumsum(0).to(torch.int32)


def occupied_groups(offs: Tensor) -> list[tuple[int, int, int]]:
    """(index, begin, end) of each group that has a row. Reads offs, so it synchronises on a GPU."""
    ends = offs.tolist()
    begins = [0, *ends[:-1]]
    every = zip(range(len(ends)), begins, ends, strict=True)
    return [(e, begin, end) for e, begin, end in every if end > begin]


# ---- results


class Product(NamedTuple):
    """D = mm(a, b), or grouped_mm(a, b, offs) if offs is given; ``weights`` is b before any conversion."""

    a: Activations
    b: Weights
    weights: NVFP4Tensor
    offs: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), the shape of D."""
        return self.a.shape[0], self.weights.shape[-2]

    def run(self, kernel: str | None = None, out: Tensor | None = None) -> Tensor:
        """D, from the kernel of that name or from the kernel that the library selects."""
        if self.offs is None:
            return gemm.mm(self.a, self.b, out=out, kernel=kernel)
        return grouped.grouped_mm(self.a, self.b, self.offs, out=out, kernel=kernel)

    def poisoned(self, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """An ``out`` for run, filled with NaN."""
        out = torch.empty(self.shape, dtype=out_dtype, device=self.weights.device)
        out.view(torch.uint8).fill_(POISON)
        return out


def difference(product: Product, got: Tensor) -> str | None:
    """None if ``got`` has the bits of the reference, else one sentence that says where they differ.

    Compares up to ROWS rows, from the first to the last, in up to GROUPS groups. If ``a`` is a plain tensor,
    it must come from :func:`activations`. Synchronises.
    """
    if product.offs is None:
        rows = _spread(product.shape[0], ROWS)
        return _difference(product.a, product.weights, rows, got, "")
    occupied = occupied_groups(product.offs)
    for i in _spread(len(occupied), GROUPS):
        e, begin, end = occupied[i]
        rows = [begin + row for row in _spread(end - begin, ROWS // GROUPS)]
        reason = _difference(product.a, product.weights[e], rows, got, f"group {e}, ")
        if reason is not None:
            return reason
    return None


def error_line(error: Exception) -> str:
    """The type of an error and the first line of its text: why something is not timed."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of the indices 0 to count - 1, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _difference(a: Activations, w: NVFP4Tensor, rows: Sequence[int], got: Tensor, where: str) -> str | None:
    index = torch.tensor(rows, dtype=torch.int64, device=got.device)
    values, alpha_row = _values(a, index)
    # The decode multiplier of a quantized operand is its amax / (6 * e4m3_max).
    alpha = 1 / (6 * w.e4m3_max)
    if not isinstance(a, Tensor):
        alpha = 1 / (36 * a.e4m3_max * w.e4m3_max)  # rounds once
    for begin in range(0, w.shape[0], COLUMNS):
        columns = slice(begin, begin + COLUMNS)
        want = reference.gemm(
            values,
            w.codes[columns],
            scale_b=w.scales[columns],
            alpha=alpha,
            alpha_row=alpha_row,
            alpha_col=w.amax if w.amax.numel() == 1 else w.amax[columns],
            out_dtype=got.dtype,
        )
        part = got[index, columns].contiguous()
        differ = (part.view(torch.uint8) != want.view(torch.uint8)).view(*want.shape, -1).any(2)
        if differ.any():
            i, j = (int(x) for x in differ.nonzero()[0])
            return (
                f"{where}{int(differ.sum())} of {differ.numel()} elements differ, the first, at row "
                f"{rows[i]}, column {begin + j}, is {part[i, j].item()}, must be {want[i, j].item()}"
            )
    return None


def _values(a: Activations, index: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of a as float16, and their amax or, if a was never quantized, None."""
    if isinstance(a, Tensor):
        return a[index].to(torch.float16), None
    data = decode(a).data if isinstance(a, NVFP4Tensor) else a.data
    return data[index], a.amax if a.amax.numel() == 1 else a.amax[index]
