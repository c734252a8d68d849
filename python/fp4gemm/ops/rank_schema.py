"""The parameters of the operators of expert parallelism, in the order of their schemas in ops.cpp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "RANK_SCHEMAS",
    "CombinePartCall",
    "CombineRanksCall",
    "CombineTreeCall",
    "GatherRecordsCall",
    "MakeRecordsCall",
    "QuantizeRecordsCall",
    "RouteRanksCall",
]


class QuantizeRecordsCall(NamedTuple):
    """``quantize_records``, which writes out and returns nothing."""

    x: Tensor
    out: Tensor
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    rng_state: Tensor | None = None
    headroom: float = 1.0
    first_row: int = 0


class MakeRecordsCall(NamedTuple):
    """``make_records``, which writes out and returns nothing."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    out: Tensor


class GatherRecordsCall(NamedTuple):
    """``gather_records``."""

    records: list[Tensor]
    rows: Tensor
    offs: Tensor
    k: int


class RouteRanksCall(NamedTuple):
    """``route_ranks``."""

    topk_ids: Tensor
    num_experts: int
    num_ranks: int
    rank: int
    capacity: int


class CombineRanksCall(NamedTuple):
    """``combine_ranks``."""

    y: list[Tensor]
    row_of_pair: Tensor
    topk_weights: Tensor
    out_dtype: torch.dtype | None = None  # None: that of y


class CombinePartCall(NamedTuple):
    """``combine_part``, which writes out and returns nothing."""

    y: Tensor
    topk_ids: Tensor
    row_of_pair: Tensor
    topk_weights: Tensor
    out: Tensor
    num_experts: int
    num_ranks: int
    rank: int


class CombineTreeCall(NamedTuple):
    """``combine_tree``."""

    parts: list[Tensor]
    topk_ids: Tensor
    num_experts: int
    first_token: int
    out_dtype: torch.dtype = torch.bfloat16


RANK_SCHEMAS: dict[str, Any] = {
    "quantize_records": QuantizeRecordsCall,
    "make_records": MakeRecordsCall,
    "gather_records": GatherRecordsCall,
    "route_ranks": RouteRanksCall,
    "combine_ranks": CombineRanksCall,
    "combine_part": CombinePartCall,
    "combine_tree": CombineTreeCall,
}
