"""The operators of expert parallelism: records of tokens, and the routing and the sums of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..layout import record_bytes, unswizzle_scales
from ..reference import nvfp4
from ..reference import ranks as formulas
from ..reference.ranks import TREE_BLOCKS
from . import moe as moe_ops
from ._call import Operator, accepts, narrowed
from .moe import combine
from .quantize import QuantizeCall, empty_parts, quantize_compiled

__all__ = [
    "MAX_RANKS",
    "OPERATORS",
    "TREE_BLOCKS",
    "CombinePartCall",
    "CombineRanksCall",
    "CombineTreeCall",
    "GatherRecordsCall",
    "MakeRecordsCall",
    "QuantizeRecordsCall",
    "RouteRanksCall",
    "combine_part",
    "combine_ranks",
    "combine_tree",
    "gather_records",
    "make_records",
    "quantize_records",
    "route_ranks",
]

MAX_RANKS = 128  # kMaxRanks of cpp/src/moe/ranks.hpp
_INT32_MAX = torch.iinfo(torch.int32).max
_QUANTIZE = "fp4gemm.records.quantize_records"


# ---- records


def _out(value: object, shape: tuple[int, int], dtypes: Sequence[torch.dtype], like: Tensor, of: str) -> None:
    out = _checks.is_tensor("out", value)
    _checks.has_dtype("out", out, dtypes)
    _checks.has_shape("out", out, shape)
    _checks.same_device("out", out, like.device, of)
    _checks.is_contiguous("out", out)
    _checks.is_aligned("out", out)


class QuantizeRecordsCall(NamedTuple):
    """``quantize_records``, which writes out and returns nothing."""

    x: Tensor
    out: Tensor
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    rng_state: Tensor | None = None
    first_row: int = 0


def check_quantize_records(call: QuantizeRecordsCall) -> None:
    """Raise unless the arguments of quantize_records go together."""
    x = _checks.quantize_input(call.x, _QUANTIZE)
    _out(call.out, (x.shape[0], record_bytes(x.shape[1])), (torch.uint8,), x, "x")
    _checks.is_one_of("four_over_six", call.four_over_six, (0, 1, 2))
    _checks.is_bool("fast_error", call.fast_error)
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_int("first_row", call.first_row, 0)
    if call.rng_state is not None:
        _checks.exact_vector("rng_state", call.rng_state, 2, torch.int64, x.device, "x", _QUANTIZE)
    if call.e4m3_max == 256 and not call.four_over_six:
        raise ValueError("e4m3_max: got 256, must be 448 without four_over_six")
    if call.four_over_six and call.rng_state is not None:
        state = _checks.describe(call.rng_state)
        raise NotImplementedError(
            f"four_over_six: got {call.four_over_six} with rng_state {state}, must be None with it; "
            "four_over_six needs rng_state None"
        )


@accepts(QuantizeRecordsCall)
def quantize_records(call: QuantizeRecordsCall) -> None:
    """Write the records of x, quantized with one amax for each row, to out.

    Args:
        x: (t, k) bfloat16, float16 or float32, unit stride along k.
        out: uint8 (t, record_bytes(k)), contiguous.
        four_over_six, fast_error, e4m3_max, rng_state: as for :func:`.quantize`.
        first_row: added to the numbers of the rows, which select the random numbers.
    """
    check_quantize_records(call)
    of_rows = narrowed(nvfp4.Quantization, call, amax=None, per_row=True)
    formulas.write_records(call.out, *nvfp4.cast(of_rows, first_row=call.first_row))


@accepts(QuantizeRecordsCall)
def quantize_records_compiled(call: QuantizeRecordsCall) -> None:
    """:func:`quantize_records`, compiled where it applies; the bits are the same."""
    if call.rng_state is not None:  # the quantizer has no first_row
        quantize_records(*call)
        return
    check_quantize_records(call)
    of_rows = narrowed(QuantizeCall, call, amax=None, per_row=True)
    make_records(*quantize_compiled(*of_rows), call.out)


@accepts(QuantizeRecordsCall)
def quantize_records_fake(call: QuantizeRecordsCall) -> None:
    check_quantize_records(call)


class MakeRecordsCall(NamedTuple):
    """``make_records``, which writes out and returns nothing."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    out: Tensor


def check_make_records(call: MakeRecordsCall) -> None:
    """Raise unless the arguments of make_records go together."""
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    _checks.scales("scales", call.scales, m, k, codes.device, "codes")
    function = "fp4gemm.records.make_records"
    _checks.exact_vector("amax", call.amax, m, torch.float32, codes.device, "codes", function)
    _out(call.out, (m, record_bytes(k)), (torch.uint8,), codes, "codes")


@accepts(MakeRecordsCall)
def make_records(call: MakeRecordsCall) -> None:
    """Write the records of a quantized tensor to out.

    Args:
        codes: uint8 (t, k/2). scales: swizzled float8_e4m3fn (ceil128(t), ceil4(k/16)).
        amax: float32 (t,).
        out: uint8 (t, record_bytes(k)), contiguous.
    """
    check_make_records(call)
    m, half_k = call.codes.shape
    formulas.write_records(
        call.out, call.codes, unswizzle_scales(call.scales, m, 2 * half_k // _checks.BLOCK), call.amax
    )


@accepts(MakeRecordsCall)
def make_records_fake(call: MakeRecordsCall) -> None:
    check_make_records(call)


class GatherRecordsCall(NamedTuple):
    """``gather_records``."""

    records: list[Tensor]
    rows: Tensor
    offs: Tensor
    k: int


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


def check_gather_records(call: GatherRecordsCall) -> list[Tensor]:
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
    _checks.group_ends(call.offs, device, "records")
    return records


@accepts(GatherRecordsCall)
def gather_records(call: GatherRecordsCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of the rows that are gathered, in groups as of :func:`.quantize`.

    Args:
        records: one or more uint8 (t, record_bytes(k)); record r of tensor p has the number p * t + r.
        rows: int32 (m,), the number of the record of each row; one outside of them gives zeros.
        offs: int32 (g,), the ends of the groups of rows.
        k: elements of a row.

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (grouped_scale_rows(m, g), ceil4(k/16)), swizzled with zero
        padding; amax float32 (m,). Rows from offs[-1] on have codes and amax 0.
    """
    parts = check_gather_records(call)
    return formulas.gather_records(parts, call.rows, call.offs, call.k)


@accepts(GatherRecordsCall)
def gather_records_fake(call: GatherRecordsCall) -> tuple[Tensor, Tensor, Tensor]:
    records = check_gather_records(call)
    m = call.rows.shape[0]
    return empty_parts(records[0], m, call.k, m, call.offs)


# ---- ranks


class RouteRanksCall(NamedTuple):
    """``route_ranks``."""

    topk_ids: Tensor
    num_experts: int
    num_ranks: int
    rank: int
    capacity: int


def topk_ids(value: object) -> Tensor:
    """Check and return topk_ids as :func:`.moe.topk_ids` does; strides are free."""
    return moe_ops.topk_ids(_checks.contiguous(value))


def rank_experts(num_experts: object, num_ranks: object, rank: object) -> int:
    """Check the experts and ranks, and return the experts of a rank."""
    experts = moe_ops.num_experts(num_experts)
    _checks.is_int("num_ranks", num_ranks, 1)
    _checks.is_int("rank", rank, 0)
    if num_ranks > MAX_RANKS:  # type: ignore[operator]
        raise ValueError(f"num_ranks: got {num_ranks}, must be at most {MAX_RANKS}")
    if experts % num_ranks:  # type: ignore[operator]
        raise ValueError(f"num_experts: got {experts}, must be a multiple of num_ranks, which is {num_ranks}")
    if rank >= num_ranks:  # type: ignore[operator]
        raise ValueError(f"rank: got {rank}, must be below num_ranks, which is {num_ranks}")
    return experts // num_ranks  # type: ignore[operator]


def check_route_ranks(call: RouteRanksCall) -> int:
    """Check the arguments of route_ranks and return the experts of a rank."""
    moe_ops.topk_ids(call.topk_ids)
    experts = rank_experts(call.num_experts, call.num_ranks, call.rank)
    _checks.is_int("capacity", call.capacity, 1)
    if call.capacity * call.num_ranks > _INT32_MAX:
        raise ValueError(
            f"capacity: got {call.capacity}, with num_ranks {call.num_ranks} must be at most "
            f"{_INT32_MAX // call.num_ranks}"
        )
    return experts


@accepts(RouteRanksCall)
def route_ranks(call: RouteRanksCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (offs, token_of_row, slot_of_row, row_of_pair, status) of a rank.

    Args:
        topk_ids: int32 or int64 (tokens, top_k), contiguous, of all ranks.
        num_experts, num_ranks, rank, capacity: as for :func:`fp4gemm.ranks.route_ranks`.

    Returns:
        offs int32 (num_experts / num_ranks,), at most capacity; token_of_row and slot_of_row int32
        (capacity,), -1 from offs[-1] on; row_of_pair int32 (tokens, top_k); status int32 (2,), the most rows
        that a rank needs, and whether an id is outside of -1..num_experts-1.

    Raises:
        ValueError: a token names an expert twice.
    """
    check_route_ranks(call)
    moe_ops.refuse_duplicates(call.topk_ids, call.num_experts)
    return formulas.route_ranks(*call)


@accepts(RouteRanksCall)
def route_ranks_fake(call: RouteRanksCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids, capacity = call.topk_ids, call.capacity
    shapes = ((check_route_ranks(call),), (capacity,), (capacity,), tuple(ids.shape), (2,))
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)  # type: ignore[return-value]


class CombineRanksCall(NamedTuple):
    """``combine_ranks``."""

    y: list[Tensor]
    row_of_pair: Tensor
    topk_weights: Tensor
    out_dtype: torch.dtype | None = None  # None: that of y


def check_combine_ranks(call: CombineRanksCall) -> torch.dtype:
    """Check the arguments of combine_ranks and return the dtype of the result."""
    y = _tensors("y", call.y)
    return moe_ops.check_combine(
        y[0], call.row_of_pair, call.topk_weights, call.out_dtype, "fp4gemm.ranks.combine_ranks"
    )


@accepts(CombineRanksCall)
def combine_ranks(call: CombineRanksCall) -> Tensor:
    """Return :func:`.combine` of the tensors of y, one after the other.

    Args:
        y: one or more (capacity, d). row_of_pair, topk_weights, out_dtype: as for :func:`.combine`.
    """
    dtype = check_combine_ranks(call)
    y = call.y[0] if len(call.y) == 1 else torch.cat(list(call.y))
    return combine(y, call.row_of_pair, call.topk_weights, dtype)


@accepts(CombineRanksCall)
def combine_ranks_fake(call: CombineRanksCall) -> Tensor:
    dtype = check_combine_ranks(call)
    return call.row_of_pair.new_empty((call.row_of_pair.shape[0], call.y[0].shape[1]), dtype=dtype)


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


def _tree(num_experts: object, num_ranks: int) -> int:
    """Check the experts and the number of ranks of a tree, and return the experts of a block."""
    experts = moe_ops.num_experts(num_experts)
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


def check_combine_part(call: CombinePartCall) -> int:
    """Check the arguments of combine_part and return the experts of a block."""
    rank_experts(call.num_experts, call.num_ranks, call.rank)
    block = _tree(call.num_experts, call.num_ranks)
    ids = moe_ops.topk_ids(call.topk_ids)
    moe_ops.check_combine(call.y, call.row_of_pair, call.topk_weights, None, "fp4gemm.ranks.combine_part")
    _checks.has_shape("row_of_pair", call.row_of_pair, tuple(ids.shape), ", that of topk_ids")
    _checks.same_device("topk_ids", ids, call.y.device, "y")
    _out(call.out, (ids.shape[0], call.y.shape[1]), _checks.FLOAT_DTYPES, call.y, "y")
    return block


@accepts(CombinePartCall)
def combine_part(call: CombinePartCall) -> None:
    """Write the part of one rank to out, as :mod:`fp4gemm.reference.ranks` defines it.

    Args:
        y: (capacity, d), what the experts of the rank computed.
        topk_ids, row_of_pair, topk_weights: (tokens, top_k), of all ranks' tokens.
        out: (tokens, d) of the dtype of the parts.
        num_experts, num_ranks, rank: as for :func:`route_ranks`.
    """
    experts = check_combine_part(call)
    formulas.combine_part(*call[:5], experts, call.num_ranks, call.rank)


@accepts(CombinePartCall)
def combine_part_fake(call: CombinePartCall) -> None:
    check_combine_part(call)


class CombineTreeCall(NamedTuple):
    """``combine_tree``."""

    parts: list[Tensor]
    topk_ids: Tensor
    num_experts: int
    first_token: int
    out_dtype: torch.dtype = torch.bfloat16


def check_combine_tree(call: CombineTreeCall) -> list[Tensor]:
    """Check the arguments of combine_tree and return the parts."""
    parts = _tensors("parts", call.parts, TREE_BLOCKS)
    _tree(call.num_experts, len(parts))
    _checks.has_dtype("parts", parts[0], _checks.FLOAT_DTYPES)
    _checks.is_multiple("parts", "d", parts[0].shape[1], 8)
    _checks.no_grad("parts", parts[0], "fp4gemm.ranks.combine_tree")
    ids = moe_ops.topk_ids(call.topk_ids)
    _checks.same_device("topk_ids", ids, parts[0].device, "parts")
    _checks.is_int("first_token", call.first_token, 0)
    if call.first_token + ids.shape[0] > parts[0].shape[0]:
        raise ValueError(
            f"first_token: got {call.first_token}, with the {ids.shape[0]} tokens of topk_ids must be at "
            f"most {parts[0].shape[0]}, the tokens of parts"
        )
    _checks.is_float_dtype("out_dtype", call.out_dtype)
    return parts


@accepts(CombineTreeCall)
def combine_tree(call: CombineTreeCall) -> Tensor:
    """Return the sum of the parts of all ranks, as :mod:`fp4gemm.reference.ranks` defines it.

    Args:
        parts: 1, 2, 4 or 8 of (tokens, d).
        topk_ids: (t, top_k); a part counts as zero for a token that names no expert of its rank.
        num_experts, first_token, out_dtype: as for :func:`fp4gemm.ranks.combine_tree`.
    """
    check_combine_tree(call)
    return formulas.combine_tree(*call)


@accepts(CombineTreeCall)
def combine_tree_fake(call: CombineTreeCall) -> Tensor:
    parts = check_combine_tree(call)
    return parts[0].new_empty((call.topk_ids.shape[0], parts[0].shape[1]), dtype=call.out_dtype)


OPERATORS = {
    "quantize_records": Operator(
        QuantizeRecordsCall, quantize_records, quantize_records_fake, quantize_records_compiled
    ),
    "make_records": Operator(MakeRecordsCall, make_records, make_records_fake),
    "gather_records": Operator(GatherRecordsCall, gather_records, gather_records_fake),
    "route_ranks": Operator(RouteRanksCall, route_ranks, route_ranks_fake),
    "combine_ranks": Operator(CombineRanksCall, combine_ranks, combine_ranks_fake),
    "combine_part": Operator(CombinePartCall, combine_part, combine_part_fake),
    "combine_tree": Operator(CombineTreeCall, combine_tree, combine_tree_fake),
}
