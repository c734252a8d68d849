"""What follows the accumulator: D = cast(act(alpha * (alpha_col * (alpha_row * acc)) + bias) + beta * C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import ACTIVATIONS, Activation


class Epilogue(NamedTuple):
    """The terms of one product (m, n); None: absent, neither multiplied nor added.

    Those of groups have a dimension more, (g, .), unless all groups share them.
    """

    alpha: Tensor  # () or (g,) fp32
    row: Tensor | None = None  # (m,) or (1,) fp32
    col: Tensor | None = None  # (n,) or (1,) fp32
    bias: Tensor | None = None  # (n,) fp32
    activation: Activation = ACTIVATIONS[0]
    c: Tensor | None = None  # (m, n) of the output type
    beta: Tensor | None = None  # () fp32, with c

    def group(self, g: int) -> Epilogue:
        """The terms of group g, but for c."""
        row, col, bias = (x if x is None or x.dim() == 1 else x[g] for x in (self.row, self.col, self.bias))
        alpha = self.alpha if self.alpha.dim() == 0 else self.alpha[g]
        return self._replace(alpha=alpha, row=row, col=col, bias=bias)

    def rows(self, i: int, j: int) -> Epilogue:
        """The terms of rows i .. j-1."""
        row = self.row
        if row is not None and row.shape[0] != 1:
            row = row[i:j]
        return self._replace(row=row, c=None if self.c is None else self.c[i:j])

    def scaled(self, acc: Tensor) -> Tensor:
        """alpha * (col * (row * acc)), (m, n) fp32."""
        z = acc
        if self.row is not None:
            z = z * self.row.view(-1, 1)
        if self.col is not None:
            z = z * self.col
        return z * self.alpha

    def finished(self, z: Tensor) -> Tensor:
        """act(z + bias) + beta * c, (m, n) or (m, n/2) fp32. Each operation of these lines rounds once."""
        if self.bias is not None:
            z = z + self.bias
        y = self.activation(z)
        if self.c is not None and self.beta is not None:
            y = y + self.c.to(torch.float32) * self.beta
        return y
