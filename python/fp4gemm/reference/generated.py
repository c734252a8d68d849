"""The terms of a product whose epilogue is a program (:mod:`fp4gemm.epilogues`), in place of the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..epilogues.evaluate import evaluate, reader, write
from ..epilogues.program import Program
from .epilogue import Epilogue

__all__ = ["GeneratedEpilogue"]

_BY_ROW, _BY_ELEMENT = ("rows",), ("matrices", "aux")


class GeneratedEpilogue(NamedTuple):
    """A program and what it reads. What differs between the groups has a leading dimension g."""

    program: Program
    terms: Epilogue  # alpha, row, col and bias, and c if the program takes it
    # rows (m,), columns (n,), groups (), matrices (m, n) and scalars () by their places, and the auxiliary
    # outputs "aux" (m, n), to be written; with pairs n/2 in place of n.
    tensors: dict[str, list[Tensor]]

    def group(self, g: int) -> GeneratedEpilogue:
        def own(kind: str, x: Tensor) -> Tensor:
            return x[g] if kind == "groups" or (kind in ("rows", "columns") and x.dim() == 2) else x

        return self._mapped(self.terms.group(g), own)

    def matrix(self, g: int) -> GeneratedEpilogue:
        part = self.group(g)
        return part._mapped(self.terms.matrix(g), lambda kind, x: x[g] if kind in _BY_ELEMENT else x)

    def rows(self, i: int, j: int) -> GeneratedEpilogue:
        by_row = (*_BY_ROW, *_BY_ELEMENT)
        return self._mapped(self.terms.rows(i, j), lambda kind, x: x[i:j] if kind in by_row else x)

    def _mapped(self, terms: Epilogue, function: Callable[[str, Tensor], Tensor]) -> GeneratedEpilogue:
        tensors = {kind: [function(kind, x) for x in every] for kind, every in self.tensors.items()}
        return self._replace(terms=terms, tensors=tensors)

    def write(self, out: Tensor, acc: Tensor) -> None:
        """Write D to out and the auxiliary outputs."""
        factors = {"row": self.terms.row, "col": self.terms.col, "alpha": self.terms.alpha}
        product = acc
        for name in self.program.applied:
            factor = factors[name]
            if factor is not None:
                product = product * (factor.view(-1, 1) if name == "row" else factor)
        others = {"acc": product, "bias": self.terms.bias, "c": self.terms.c, **factors}

        def get(kind: str, place: int) -> Tensor:
            x = others[kind] if kind in others else self.tensors[kind][place]
            return torch.ones(1, device=acc.device) if x is None else x.to(torch.float32)

        write(self.program, evaluate(self.program, reader(self.program, get)), [out, *self.tensors["aux"]])

    def write_empty(self, out: Tensor, n: int) -> None:
        self.write(out, torch.zeros((out.shape[0], n), dtype=torch.float32, device=out.device))
