"""The checks of the arguments of fp4gemm.records and fp4gemm.ranks, which the reference shares.

They follow the rules of :mod:`fp4gemm._checks`. No check reads device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _checks
from ..layout import record_bytes
from ..ops.rank_schema import (
    CombinePartCall,
    CombineRanksCall,
    CombineTreeCall,
    GatherRecordsCall,
    MakeRecordsCall,
    QuantizeRecordsCall,
    RouteRanksCall,
)
from . import moe as moe_checks
from . import options as option_checks

if TYPE_CHECKING:
    from ..containers.nvfp4 import NVFP4Tensor

MAX_RANKS = 128  # kMaxRanks of cpp/src/moe/ranks.hpp
TREE_BLOCKS = 8  # kTreeBlocks there
_INT32_MAX = torch.iinfo(torch.int32).max
_QUANTIZE = "fp4gemm.records.quantize_records"


def contiguous(x: Any) -> Any:
    """Return a strided tensor as a contiguous one, and any other value unchanged, for the checks."""
    return x.contiguous() if isinstance(x, Tensor) and _checks.is_strided(x) else x


# ---- records


def _out(value: object, shape: tuple[int, int], dtypes: Sequence[torch.dtype], like: Tensor, of: str) -> None:
    out = _checks.is_tensor("out", value)
    _checks.has_dtype("out", out, dtypes)
    _checks.has_shape("out", out, shape)
    _checks.same_device("out", out, like.device, of)
    _checks.is_contiguous("out", out)
    _checks.is_aligned("out", out)


def quantize_records(call: QuantizeRecordsCall) -> None:
    """Raise unless the arguments of quantize_records go together."""
    x = _checks.quantize_input(call.x, _QUANTIZE)
    _out(call.out, (x.shape[0], record_bytes(x.shape[1])), (torch.uint8,), x, "x")
    _checks.is_one_of("four_over_six", call.four_over_six, (0, 1, 2))
    _checks.is_bool("fast_error", call.fast_error)
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_one_of("headroom", call.headroom, _checks.HEADROOMS)
    _checks.is_int("first_row", call.first_row, 0)
    if call.rng_state is not None:
        _checks.exact_vector("rng_state", call.rng_state, 2, torch.int64, x.device, "x", _QUANTIZE)
    if call.e4m3_max == 256 and not call.four_over_six:
        raise ValueError("e4m3_max: got 256, must be 448 without four_over_six")
    if call.four_over_six:
        for name, value, is_present in (
            ("rng_state", call.rng_state, call.rng_state is not None),
            ("headroom", call.headroom, call.headroom != 1.0),
        ):
            if is_present:
                raise NotImplementedError(
                    f"four_over_six: got {call.four_over_six} with {name} {_checks.describe(value)}, must be "
                    "None with it; four_over_six needs headroom 1.0 and no stochastic rounding"
                )


def record_source(t: NVFP4Tensor) -> None:
    """Raise ValueError unless the rows of t stand alone."""
    if len(t.shape) != 2:
        raise ValueError(f"t: shape is {tuple(t.shape)}, must be of rank 2, (t, k)")
    if t.offs is not None:
        raise ValueError("t: has groups of rows, must have none")
    if t.hadamard_signs is not None:
        raise ValueError("t: was quantized with hadamard, must not be rotated")
    if t.amax.shape[0] != t.shape[0]:
        raise ValueError(
            f"t: amax has shape {tuple(t.amax.shape)}, must be ({t.shape[0]},), one for each row (quantize "
            "with scaling='row')"
        )


def make_records(call: MakeRecordsCall) -> None:
    """Raise unless the arguments of make_records go together."""
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    _checks.scales("scales", call.scales, m, k, codes.device, "codes")
    function = "fp4gemm.records.make_records"
    _checks.exact_vector("amax", call.amax, m, torch.float32, codes.device, "codes", function)
    _out(call.out, (m, record_bytes(k)), (torch.uint8,), codes, "codes")


def _tensors(name: str, value: object, most: int = MAX_RANKS) -> list[Tensor]:
    """Check and return tensors of one shape, dtype and device, contiguous and aligned."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name}: got {_checks.describe(value)}, must be a torch.Tensor or a list of them")
    if not 1 <= len(value) <= most:
        raise ValueError(f"{name}: has {len(value)} tensors, must have between 1 and {most}")
    tensors: list[Tensor] = []
    for i, each in enumerate(value):
        one = f"{name}[{i}]" if len(value) > 1 else name
        x = _checks.is_tensor(one, each)
        _checks.has_rank(one, x, 2, "(rows, columns)")
        if tensors:
            _checks.has_shape(one, x, tuple(tensors[0].shape))
            _checks.has_dtype(one, x, (tensors[0].dtype,))
            _checks.same_device(one, x, tensors[0].device, f"{name}[0]")
        _checks.is_contiguous(one, x)
        _checks.is_aligned(one, x)
        tensors.append(x)
    rows = tensors[0].shape[0]
    if len(tensors) * rows > _INT32_MAX:
        raise ValueError(
            f"{name}: {len(tensors)} tensors of {rows} rows, must have at most {_INT32_MAX} rows altogether"
        )
    return tensors


def gather_records(call: GatherRecordsCall) -> list[Tensor]:
    """Check the arguments of gather_records and return the records."""
    records = _tensors("records", call.records)
    device = records[0].device
    _checks.is_int("k", call.k, 1)
    _checks.is_multiple("records", "k", call.k, _checks.BLOCK)
    _checks.has_dtype("records", records[0], (torch.uint8,))
    wanted = (records[0].shape[0], record_bytes(call.k))
    _checks.has_shape("records", records[0], wanted, f", that of records of k = {call.k}")
    function = "fp4gemm.records.gather_records"
    _checks.exact_vector("rows", call.rows, None, torch.int32, device, "records", function)
    option_checks.group_ends(call.offs, device, "records")
    return records


# ---- ranks


def topk_ids(value: object) -> Tensor:
    """Check and return topk_ids as :func:`fp4gemm._checks.moe.topk_ids`; strides are free."""
    return moe_checks.topk_ids(contiguous(value))


def rank_experts(num_experts: object, num_ranks: object, rank: object) -> int:
    """Check the experts and ranks, and return the experts of a rank."""
    experts = moe_checks.num_experts(num_experts)
    _checks.is_int("num_ranks", num_ranks, 1)
    _checks.is_int("rank", rank, 0)
    if num_ranks > MAX_RANKS:  # type: ignore[operator]
        raise ValueError(f"num_ranks: got {num_ranks}, must be at most {MAX_RANKS}")
    if experts % num_ranks:  # type: ignore[operator]
        raise ValueError(f"num_experts: got {experts}, must be a multiple of num_ranks, which is {num_ranks}")
    if rank >= num_ranks:  # type: ignore[operator]
        raise ValueError(f"rank: got {rank}, must be below num_ranks, which is {num_ranks}")
    return experts // num_ranks  # type: ignore[operator]


def route_ranks(call: RouteRanksCall) -> int:
    """Check the arguments of route_ranks and return the experts of a rank."""
    moe_checks.topk_ids(call.topk_ids)
    experts = rank_experts(call.num_experts, call.num_ranks, call.rank)
    _checks.is_int("capacity", call.capacity, 1)
    if call.capacity * call.num_ranks > _INT32_MAX:
        raise ValueError(
            f"capacity: got {call.capacity}, with num_ranks {call.num_ranks} must be at most "
            f"{_INT32_MAX // call.num_ranks}"
        )
    return experts


def combine_ranks(call: CombineRanksCall) -> torch.dtype:
    """Check the arguments of combine_ranks and return the dtype of the result."""
    y = _tensors("y", call.y)
    return moe_checks.combine(
        y[0], call.row_of_pair, call.topk_weights, call.out_dtype, "fp4gemm.ranks.combine_ranks"
    )


def _tree(num_experts: object, num_ranks: int) -> int:
    """Check the experts and the number of ranks of a tree, and return the experts of a block."""
    experts = moe_checks.num_experts(num_experts)
    if experts % TREE_BLOCKS:
        raise ValueError(f"num_experts: got {experts}, must be a multiple of {TREE_BLOCKS} for a tree")
    if num_ranks not in (1, 2, 4, 8):
        raise ValueError(f"num_ranks: got {num_ranks}, must be 1, 2, 4 or 8 for a tree")
    return experts // TREE_BLOCKS


def new_part(y: object, ids: Tensor, dtype: object) -> Tensor:
    """Return an out for combine_part."""
    values = _checks.is_tensor("y", y)
    _checks.has_rank("y", values, 2, "(rows, d)")
    _checks.is_float_dtype("dtype", dtype)
    return values.new_empty((ids.shape[0], values.shape[1]), dtype=dtype)  # type: ignore[no-any-return, call-overload]


def combine_part(call: CombinePartCall) -> int:
    """Check the arguments of combine_part and return the experts of a block."""
    rank_experts(call.num_experts, call.num_ranks, call.rank)
    block = _tree(call.num_experts, call.num_ranks)
    ids = moe_checks.topk_ids(call.topk_ids)
    moe_checks.combine(call.y, call.row_of_pair, call.topk_weights, None, "fp4gemm.ranks.combine_part")
    _checks.has_shape("row_of_pair", call.row_of_pair, tuple(ids.shape), ", that of topk_ids")
    _checks.same_device("topk_ids", ids, call.y.device, "y")
    _out(call.out, (ids.shape[0], call.y.shape[1]), _checks.FLOAT_DTYPES, call.y, "y")
    return block


def combine_tree(call: CombineTreeCall) -> list[Tensor]:
    """Check the arguments of combine_tree and return the parts."""
    parts = _tensors("parts", call.parts, TREE_BLOCKS)
    _tree(call.num_experts, len(parts))
    _checks.has_dtype("parts", parts[0], _checks.FLOAT_DTYPES)
    _checks.is_multiple("parts", "d", parts[0].shape[1], 8)
    _checks.no_grad("parts", parts[0], "fp4gemm.ranks.combine_tree")
    ids = moe_checks.topk_ids(call.topk_ids)
    _checks.same_device("topk_ids", ids, parts[0].device, "parts")
    _checks.is_int("first_token", call.first_token, 0)
    if call.first_token + ids.shape[0] > parts[0].shape[0]:
        raise ValueError(
            f"first_token: got {call.first_token}, with the {ids.shape[0]} tokens of topk_ids must be at "
            f"most {parts[0].shape[0]}, the tokens of parts"
        )
    _checks.is_float_dtype("out_dtype", call.out_dtype)
    return parts
