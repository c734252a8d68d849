"""The C interface of records and ranks: what it refuses before it touches a device, and the workspace."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import capi_ranks
import pytest

P = 4096  # an address that no check reads
TWO = capi_ranks.buffers(P, P)
QUANTIZE = {"m": 4, "k": 64, "x": P, "x_row_stride": 64, "records": P}
MAKE = {"m": 4, "k": 64, "codes": P, "scales": P, "amax": P, "records": P}
GATHER = {
    "m": 4,
    "k": 64,
    "records": TWO,
    "num_buffers": 2,
    "num_records": 9,
    "rows": P,
    "offs": P,
    "num_groups": 2,
    "codes": P,
    "scales": P,
    "amax": P,
}
ROUTE = {
    "num_tokens": 4,
    "top_k": 2,
    "num_experts": 8,
    "num_ranks": 2,
    "capacity": 8,
    "topk_ids": P,
    "offs": P,
    "token_of_row": P,
    "slot_of_row": P,
    "row_of_pair": P,
    "status": P,
}
SLOTS = {"num_tokens": 4, "top_k": 2, "d": 16, "num_rows": 8, "row_of_pair": P}
COMBINE = {**SLOTS, "y": TWO, "num_buffers": 2, "out": P}
PART = {**SLOTS, "y": P, "num_experts": 8, "num_ranks": 2, "topk_ids": P, "part": P}
TREE = {"num_tokens": 4, "top_k": 2, "num_experts": 8, "d": 16, "parts": TWO, "num_ranks": 2, "topk_ids": P,
        "out": P}  # fmt: skip


def refusal(name: str, args: Any) -> str:
    library = capi_ranks.ranks()
    function = getattr(library, f"fp4gemm_{name}")
    workspace = (None, 0) if name == "route_ranks" else ()
    status = function(args, *workspace, 0, None)
    assert status in (capi.INVALID_ARGUMENT, capi.NOT_SUPPORTED, capi.WORKSPACE)
    return str(library.fp4gemm_last_error().decode())


@pytest.mark.parametrize(
    ("name", "args", "base", "changed", "message"),
    [
        ("quantize_records", capi_ranks.QuantizeRecordsArgs, QUANTIZE, changed, message)
        for changed, message in (
            ({"m": -1}, "m: is -1, must be between 0 and"),
            ({"k": 40}, "k: is 40, must be a multiple of 16"),
            ({"x_dtype": 3}, "x_dtype: is 3, must be FP4GEMM_BF16"),
            ({"x_row_stride": 60}, "x_row_stride: is 60, must be at least the 64 columns"),
            ({"x": 0}, "x: is null, must point at 256 elements"),
            ({"four_over_six": 3}, "four_over_six: is 3, must be a fp4gemm_four_over_six_t"),
            ({"e4m3_max": 256}, "e4m3_max: is 256, must be 448, or 256 with four_over_six"),
            ({"four_over_six": 1, "rng_state": P}, "four_over_six: requires that rng_state is null"),
            ({"first_row": -1}, "first_row: is -1, must be between 0 and"),
            ({"records": P + 8}, "records: is 0x1008, must be 16-byte aligned"),
            ({"struct_size": 8}, "args: struct_size is 8, must be"),
        )
    ]
    + [
        ("make_records", capi_ranks.MakeRecordsArgs, MAKE, changed, message)
        for changed, message in (
            ({"m": -1}, "m: is -1, must be between 0 and"),
            ({"codes": 0}, "codes: is null, must point at 128 elements"),
            ({"scales": P + 4}, "scales: is 0x1004, must be 16-byte aligned"),
            ({"amax": 0}, "amax: is null, must point at 4 elements"),
            ({"records": 0}, "records: is null, must point at 4 elements"),
        )
    ]
    + [
        ("gather_records", capi_ranks.GatherRecordsArgs, GATHER, changed, message)
        for changed, message in (
            ({"num_buffers": 0}, "num_buffers: is 0, must be between 1 and 128"),
            ({"num_buffers": 129}, "num_buffers: is 129, must be between 1 and 128"),
            ({"records": None}, "records: is null, must point at 2 addresses"),
            ({"records": capi_ranks.buffers(P, 0)}, "records[1]: is null, must point at 9 elements"),
            ({"records": capi_ranks.buffers(P, P + 8)}, "records[1]: is 0x1008, must be 16-byte aligned"),
            ({"num_records": 2**30}, "num_records: is 1073741824, with num_buffers 2 must be at most"),
            ({"rows": 0}, "rows: is null, must point at 4 elements"),
            ({"num_groups": 0}, "num_groups: is 0, must be between 1 and"),
            ({"offs": 0}, "offs: is null, must point at 2 elements"),
            ({"codes": 0}, "codes: is null, must point at 128 elements"),
        )
    ]
    + [
        ("route_ranks", capi_ranks.RouteRanksArgs, ROUTE, changed, message)
        for changed, message in (
            ({"num_tokens": 2**30}, "num_tokens: is 1073741824, with top_k 2 must be at most 2147483647"),
            ({"num_experts": 9}, "num_experts: is 9, must be a multiple of num_ranks, which is 2"),
            ({"num_ranks": 0}, "num_ranks: is 0, must be between 1 and 128"),
            ({"rank": 2}, "rank: is 2, must be between 0 and 1"),
            ({"capacity": 0}, "capacity: is 0, must be between 1 and"),
            ({"capacity": 2**30}, "capacity: is 1073741824, must be between 1 and 1073741823"),
            ({"topk_ids": P + 4, "ids_are_64_bits": 1}, "topk_ids: is 0x1004, must be 8-byte aligned"),
            ({"slot_of_row": 0}, "slot_of_row: is null, must point at 8 elements"),
            ({"status": 0}, "status: is null, must point at 2 elements"),
        )
    ]
    + [
        ("combine_ranks", capi_ranks.CombineRanksArgs, COMBINE, changed, message)
        for changed, message in (
            ({"d": 12}, "d: is 12, must be a multiple of 8"),
            ({"y": capi_ranks.buffers(0, P)}, "y[0]: is null, must point at 128 elements"),
            ({"num_rows": 2**30}, "num_rows: is 1073741824, with num_buffers 2 must be at most"),
            ({"y_dtype": 3}, "y_dtype: is 3, must be FP4GEMM_BF16"),
            ({"weights_dtype": 3}, "weights_dtype: is 3, must be FP4GEMM_BF16"),
            ({"out_dtype": 3}, "out_dtype: is 3, must be FP4GEMM_BF16"),
            ({"row_of_pair": 0}, "row_of_pair: is null, must point at 8 elements"),
            ({"out": 0}, "out: is null, must point at 64 elements"),
        )
    ]
    + [
        ("combine_part", capi_ranks.CombinePartArgs, PART, changed, message)
        for changed, message in (
            ({"num_experts": 12}, "num_experts: is 12, must be a multiple of 8"),
            ({"num_experts": 24, "num_ranks": 3}, "num_ranks: is 3, must be 1, 2, 4 or 8 for a tree"),
            ({"part_dtype": 3}, "part_dtype: is 3, must be FP4GEMM_BF16"),
            ({"part": P + 8}, "part: is 0x1008, must be 16-byte aligned"),
            ({"topk_ids": 0}, "topk_ids: is null, must point at 8 elements"),
            ({"y": 0}, "y: is null, must point at 128 elements"),
        )
    ]
    + [
        ("combine_tree", capi_ranks.CombineTreeArgs, TREE, changed, message)
        for changed, message in (
            ({"num_ranks": 5}, "num_ranks: is 5, must be 1, 2, 4 or 8 for a tree"),
            ({"part_dtype": 3}, "part_dtype: is 3, must be FP4GEMM_BF16"),
            ({"parts": capi_ranks.buffers(P, 0)}, "parts[1]: is null, must point at 64 elements"),
            ({"out": 0}, "out: is null, must point at 64 elements"),
        )
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else None,
)
def test_refuses(name: str, args: Any, base: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    assert message in refusal(name, args(**{**base, **changed}))


def test_the_workspace_of_a_routing() -> None:
    """That of fp4gemm_route for as many slots and experts; a smaller one is refused."""
    library, size, other = capi_ranks.ranks(), ctypes.c_size_t(99), ctypes.c_size_t(99)
    for tokens in (0, 1, 64, 1 << 16, 1 << 24):
        args = capi_ranks.RouteRanksArgs(**{**ROUTE, "num_tokens": tokens})
        plain = capi.RouteArgs(num_tokens=tokens, top_k=2, num_experts=8)
        assert library.fp4gemm_route_ranks_workspace_bytes(args, size) == capi.SUCCESS
        assert library.fp4gemm_route_workspace_bytes(plain, other) == capi.SUCCESS
        assert size.value == other.value
    assert f"must have {size.value}, 16-byte aligned" in refusal("route_ranks", args)
