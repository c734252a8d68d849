"""torch's own products of a linear layer, dense and in groups, for operands that are not quantized."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["bias_gradient", "dgrad", "fprop", "wgrad"]


def _in_groups(rows: Tensor, offs: Tensor) -> Tensor:
    """rows (m, n) with zeros for those from offs[-1] on, which torch leaves undefined."""
    is_inside = torch.arange(rows.shape[0], device=rows.device) < offs[-1]
    return torch.where(is_inside.unsqueeze(1), rows, 0)


def _group_of_row(m: int, offs: Tensor) -> Tensor:
    """int64 (m,): the group of each row; g for the rows from offs[-1] on."""
    return torch.searchsorted(offs, torch.arange(m, device=offs.device), right=True)


def fprop(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor | None) -> Tensor:
    """x W^T + bias, (m, n); bias (n,), or (g, n) with groups."""
    if offs is None:
        return functional.linear(x, weight, bias)
    y = functional.grouped_mm(x, weight.transpose(1, 2), offs=offs)
    if bias is not None:
        of_row = _group_of_row(x.shape[0], offs).clamp(max=bias.shape[0] - 1)
        y = y + bias[of_row]
    return _in_groups(y, offs)


def dgrad(dy: Tensor, weight: Tensor, offs: Tensor | None) -> Tensor:
    """dy W, (m, k)."""
    return dy @ weight if offs is None else _in_groups(functional.grouped_mm(dy, weight, offs=offs), offs)


def wgrad(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """dy^T x, (n, k) or (g, n, k)."""
    return dy.t() @ x if offs is None else functional.grouped_mm(dy.t(), x, offs=offs)


def bias_gradient(dy: Tensor, offs: Tensor | None) -> Tensor:
    """float32 (n,): the sum of the rows of dy, in an order that the shape alone determines; or (g, n)."""
    if offs is None:
        return dy.sum(0, dtype=torch.float32)
    # Rows beyond offs[-1] are in no segment. Each sum reads its own rows alone, so that a NaN stays in its
    # group, and in their order, without atomic additions.
    ends = torch.cat((offs.new_zeros(1), offs))
    sums: Tensor = torch.segment_reduce(dy.float(), "sum", offsets=ends, axis=0, unsafe=True, initial=0)
    return sums
