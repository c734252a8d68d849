"""The epilogue of a GEMM: D = cast(act(alpha * (alpha_col * (alpha_row * acc)) + bias) + beta * C)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..activations import ACTIVATIONS, Activation

# The exact bits of fl(1 / (36 * B_a * B_b)), where B is the e4m3 bound of an operand: multiplied by amax_a
# and amax_b, it scales the accumulator.
ALPHA = {
    (448, 448): float.fromhex("0x1.293726p-23"),
    (448, 256): float.fromhex("0x1.041042p-22"),
    (256, 448): float.fromhex("0x1.041042p-22"),
    (256, 256): float.fromhex("0x1.c71c72p-22"),
}
# The exact bits of fl(1 / (448 * 6 * B_b)), the factor if a has FP8 tokens.
ALPHA_FP8 = {448: float.fromhex("0x1.bdd2b8p-21"), 256: float.fromhex("0x1.861862p-20")}
# The exact bits of fl(1 / (6 * B_b)), the factor if a was not quantized.
ALPHA_UNQUANTIZED = {448: float.fromhex("0x1.861862p-12"), 256: float.fromhex("0x1.555556p-11")}


class Terms(Protocol):
    """What a product calls with its accumulator: :class:`Epilogue`, or one in Python (:mod:`.generated`)."""

    def group(self, g: int) -> Terms:
        """The terms of group g of those that divide m, with matrices unchanged."""

    def matrix(self, g: int) -> Terms:
        """The terms of group g of those that divide k, with its matrices."""

    def rows(self, i: int, j: int) -> Terms:
        """The terms of rows i .. j-1."""

    def write(self, out: Tensor, acc: Tensor) -> None:
        """Write the result for an accumulator float32 (m, n) to out."""

    def write_empty(self, out: Tensor, n: int) -> None:
        """Write the result for an empty sum to out; the product has n columns."""


class Epilogue(NamedTuple):
    """The terms of the epilogue of one product (m, n). A term that is None is not computed.

    In a grouped product, a term that differs between the groups has a leading dimension g.
    """

    alpha: Tensor  # () or (g,) float32
    row: Tensor | None = None  # (m,) or (1,) float32
    col: Tensor | None = None  # (n,) or (1,) float32
    bias: Tensor | None = None  # (n,) float32
    activation: Activation = ACTIVATIONS[0]
    c: Tensor | None = None  # (m, n) of the output type
    beta: Tensor | None = None  # () float32, with c

    def group(self, g: int) -> Epilogue:
        """Return the terms of group g, with c unchanged."""
        row, col, bias = (x if x is None or x.dim() == 1 else x[g] for x in (self.row, self.col, self.bias))
        alpha = self.alpha if self.alpha.dim() == 0 else self.alpha[g]
        return self._replace(alpha=alpha, row=row, col=col, bias=bias)

    def rows(self, i: int, j: int) -> Epilogue:
        """Return the terms of rows i .. j-1."""
        row = self.row
        if row is not None and row.shape[0] != 1:
            row = row[i:j]
        return self._replace(row=row, c=None if self.c is None else self.c[i:j])

    def matrix(self, g: int) -> Epilogue:
        """Return the terms of group g with its matrix of c, for groups that divide k."""
        own = self.group(g)
        return own if own.c is None else own._replace(c=own.c[g])

    def write(self, out: Tensor, acc: Tensor) -> None:
        """Write the result for an accumulator (m, n) to out; c may be out itself."""
        out[...] = self.finished(self.scaled(acc))

    def write_empty(self, out: Tensor, n: int) -> None:
        """Write the result for an empty sum to out; the product has n columns."""
        out[...] = self.finished(torch.zeros((out.shape[0], n), dtype=torch.float32, device=out.device))

    def scaled(self, acc: Tensor) -> Tensor:
        """Return alpha * (col * (row * acc)), float32 (m, n)."""
        z = acc
        if self.row is not None:
            z = z * self.row.view(-1, 1)
        if self.col is not None:
            z = z * self.col
        return z * self.alpha

    def finished(self, z: Tensor) -> Tensor:
        """Return act(z + bias) + beta * c, float32 (m, n), or (m, n/2) with a gated activation.

        Each addition and multiplication here rounds once.
        """
        if self.bias is not None:
            z = z + self.bias
        y = self.activation(z)
        if self.c is not None and self.beta is not None:
            y = y + self.c.to(torch.float32) * self.beta
        return y
