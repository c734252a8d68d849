"""The experts of several ranks: the rows of each rank, records, and the weighted sums of what ranks computed.

With L = num_experts / num_ranks, rank r has the experts r * L .. (r + 1) * L - 1, and C is the capacity. Let
offs, token_of_row and row_of_pair be those of :func:`.moe.route` of all tokens, and first(r) = offs[r L - 1],
0 for r = 0. The rows of rank r are first(r) .. first(r + 1) - 1, and row i of rank r is row first(r) + i. The
rows with i >= C are dropped::

    row_of_pair'[p] = r * C + i     of the pair p in row i of rank r, if i < C; else -1

The sum of combine_ranks is that of :func:`.moe.combine`. combine_part and combine_tree add in another order,
which is the same for 1, 2, 4 and 8 ranks. Block b of eight has the experts b * E/8 .. (b + 1) * E/8 - 1, and
with rnd the rounding to the dtype of the parts and fl(.) one float32 operation::

    P(b, b + 1) = rnd(s),  s_0 = 0,  s_{j+1} = fl(s_j + fl(w[i, j] * y[row(i, j)])) for slots j of block b
    P(b, b + 2n) = rnd(fl(P(b, b + n) + P(b + n, b + 2n)))

The part of rank r of R is P(8 r / R, 8 (r + 1) / R), and the result is cast(P(0, 8)). Records are those that
:mod:`fp4gemm.records` defines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import BLOCK
from .chunks import row_chunks
from .grouped import Groups
from .moe import route

__all__ = [
    "TREE_BLOCKS",
    "combine_part",
    "combine_tree",
    "gather_records",
    "route_ranks",
    "write_records",
]

TREE_BLOCKS = 8  # kTreeBlocks of cpp/src/moe/ranks.hpp


def route_ranks(
    ids: Tensor, num_experts: int, num_ranks: int, rank: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (offs, token_of_row, slot_of_row, row_of_pair, status) of a rank, for ids (tokens, top_k)."""
    local = num_experts // num_ranks
    offs, _, row_of_pair = route(ids, num_experts)
    ends = offs.to(torch.int64)
    last = ends[local - 1 :: local].contiguous()  # (num_ranks,), the end of the rows of each rank
    first = torch.cat((last.new_zeros(1), last[:-1]))
    rows = row_of_pair.to(torch.int64)
    owner = torch.searchsorted(last, rows.clamp(min=0), right=True).clamp(max=num_ranks - 1)
    place = rows - first[owner]
    has = (rows >= 0) & (place < capacity)
    placed = torch.where(has, owner * capacity + place, -1)
    token_of_row = torch.full((capacity,), -1, dtype=torch.int64, device=ids.device)
    slot_of_row = token_of_row.clone()
    pairs = (has & (owner == rank)).nonzero()
    mine = place[pairs[:, 0], pairs[:, 1]]
    token_of_row[mine], slot_of_row[mine] = pairs[:, 0], pairs[:, 1]
    own = ends[rank * local : (rank + 1) * local] - first[rank]
    wide = ids.to(torch.int64)
    is_invalid = ((wide < -1) | (wide >= num_experts)).any()
    status = torch.stack(((last - first).max(), is_invalid.to(torch.int64)))
    found = (own.clamp(max=capacity), token_of_row, slot_of_row, placed, status)
    return tuple(t.to(torch.int32) for t in found)  # type: ignore[return-value]


def write_records(out: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
    """Write records of codes (t, k/2), scales (t, k/16) in plain order, and amax (t,)."""
    half_k, blocks = codes.shape[1], scales.shape[1]
    at = half_k + (blocks + 3) // 4 * 4
    out.zero_()
    out[:, :half_k] = codes
    out[:, half_k : half_k + blocks] = scales.view(torch.uint8)
    out[:, at : at + 4] = amax.contiguous().view(-1, 1).view(torch.uint8)


def gather_records(
    records: Sequence[Tensor], rows: Tensor, offs: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of the rows that are gathered, in groups as of :func:`.nvfp4.quantize`.

    Record r of tensor p of the records (t, record_bytes(k)) has the number p * t + r.
    """
    t = records[0].shape[0]
    m, half_k, blocks = rows.shape[0], k // 2, k // BLOCK
    groups = Groups(offs, m, rows.device)
    found = records[0].new_zeros((m, records[0].shape[1]))
    numbers = rows.to(torch.int64)
    numbers[groups.num_rows :] = -1
    for p, part in enumerate(records):
        has = (numbers >= p * t) & (numbers < (p + 1) * t)
        found[has] = part[numbers[has] - p * t]
    at = half_k + (blocks + 3) // 4 * 4
    scales = groups.swizzle(found[:, half_k : half_k + blocks].contiguous().view(torch.float8_e4m3fn))
    amax = found[:, at : at + 4].contiguous().view(torch.float32).view(m)
    return found[:, :half_k].contiguous(), scales, amax


def combine_part(
    y: Tensor,
    ids: Tensor,
    row_of_pair: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    experts: int,
    num_ranks: int,
    rank: int,
) -> None:
    """Write the part of one rank to out, as the module docstring defines it; ``experts`` are in a block."""
    num_blocks = TREE_BLOCKS // num_ranks
    capacity, d = y.shape
    wide = ids.to(torch.int64)
    rows = row_of_pair.to(torch.int64) - rank * capacity
    block_of_pair = wide.div(experts, rounding_mode="floor")
    weights = topk_weights.to(torch.float32)
    for i, j in row_chunks(ids.shape[0], d * num_blocks):
        sums = []
        for block in range(rank * num_blocks, (rank + 1) * num_blocks):
            total = torch.zeros((j - i, d), dtype=torch.float32, device=y.device)
            for slot in range(ids.shape[1]):
                row = rows[i:j, slot]
                has = (block_of_pair[i:j, slot] == block) & (row >= 0) & (row < capacity)
                terms = y[row[has]].to(torch.float32) * weights[i:j, slot][has].unsqueeze(1)
                total[has] = total[has] + terms
            sums.append(total.to(out.dtype).to(torch.float32))
        out[i:j] = _folded(sums, out.dtype)


def combine_tree(
    parts: list[Tensor], topk_ids: Tensor, num_experts: int, first_token: int, out_dtype: torch.dtype
) -> Tensor:
    """Return the sum of the parts of all ranks, as the module docstring defines it."""
    ids = topk_ids.to(torch.int64)
    t, local = ids.shape[0], num_experts // len(parts)
    found = []
    for rank, part in enumerate(parts):
        has = ((ids >= rank * local) & (ids < (rank + 1) * local)).any(1, keepdim=True)
        found.append(torch.where(has, part[first_token : first_token + t].to(torch.float32), 0.0))
    return _folded(found, parts[0].dtype).to(out_dtype)


def _folded(sums: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Add float32 tensors as a binary tree of neighbours whose sums are rounded to dtype."""
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [(left + right).to(dtype).to(torch.float32) for left, right in pairs]
    return sums[0]
