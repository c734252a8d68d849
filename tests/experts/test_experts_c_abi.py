"""The C interface of route, combine and zero_outside_groups: refusals without a device, and the workspace."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import pytest

P = 4096  # an address that no check reads
ROUTE = {
    "num_tokens": 4,
    "top_k": 2,
    "num_experts": 8,
    "topk_ids": P,
    "offs": P,
    "token_of_row": P,
    "row_of_pair": P,
}
COMBINE = {"num_tokens": 4, "top_k": 2, "num_rows": 8, "d": 16, "y": P, "row_of_pair": P, "out": P}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_tokens": -1}, "num_tokens: is -1, must be between 0 and"),
        ({"top_k": 0}, "top_k: is 0, must be between 1 and"),
        ({"num_tokens": 2**30}, "num_tokens: is 1073741824, with top_k 2 must be at most 2147483647 slots"),
        ({"num_experts": 0}, "num_experts: is 0, must be between 1 and 2048"),
        ({"num_experts": 2049}, "num_experts: is 2049, must be between 1 and 2048"),
        ({"topk_ids": 0}, "topk_ids: is null, must point at 8 elements"),
        ({"topk_ids": P + 4, "ids_are_64_bits": 1}, "topk_ids: is 0x1004, must be 8-byte aligned"),
        ({"offs": 0}, "offs: is null, must point at 8 elements"),
        ({"token_of_row": P + 2}, "token_of_row: is 0x1002, must be 4-byte aligned"),
        ({"row_of_pair": 0}, "row_of_pair: is null, must point at 8 elements"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_route_refuses(changed: dict[str, Any], message: str) -> None:
    library = capi.core()
    args = capi.RouteArgs(**{**ROUTE, **changed})
    assert library.fp4gemm_route(ctypes.byref(args), None, 0, 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_tokens": -1}, "num_tokens: is -1, must be between 0 and"),
        ({"top_k": 0}, "top_k: is 0, must be between 1 and"),
        ({"num_rows": -1}, "num_rows: is -1, must be between 0 and"),
        ({"d": 12}, "d: is 12, must be a multiple of 8"),
        ({"d": 0}, "d: is 0, must be between 8 and"),
        ({"y_dtype": 3}, "y_dtype: is 3, must be FP4GEMM_BF16"),
        ({"weights_dtype": 3}, "weights_dtype: is 3, must be FP4GEMM_BF16"),
        ({"out_dtype": -1}, "out_dtype: is -1, must be FP4GEMM_BF16"),
        ({"y": 0}, "y: is null, must point at 128 elements"),
        ({"y": P + 8}, "y: is 0x1008, must be 16-byte aligned"),
        ({"row_of_pair": 0}, "row_of_pair: is null, must point at 8 elements"),
        ({"topk_weights": P + 2}, "topk_weights: is 0x1002, must be 4-byte aligned"),
        ({"out": 0}, "out: is null, must point at 64 elements"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_combine_refuses(changed: dict[str, Any], message: str) -> None:
    library = capi.core()
    args = capi.CombineArgs(**{**COMBINE, **changed})
    assert library.fp4gemm_combine(ctypes.byref(args), 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


ZERO = {"m": 4, "row_bytes": 24, "x": P, "offs": P, "num_groups": 2}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m": -1}, "m: is -1, must be between 0 and 2147483647"),
        ({"m": 2**31}, "m: is 2147483648, must be between 0 and 2147483647"),
        ({"row_bytes": -1}, "row_bytes: is -1, must be between 0 and 134217728"),
        ({"row_bytes": 2**27 + 1}, "row_bytes: is 134217729, must be between 0 and 134217728"),
        ({"x": 0}, "x: is null, must point at 96 elements"),
        ({"x": P + 8}, "x: is 0x1008, must be 16-byte aligned"),
        ({"offs": 0}, "offs: is null, must point at 2 elements"),
        ({"offs": P + 2}, "offs: is 0x1002, must be 4-byte aligned"),
        ({"num_groups": 0}, "num_groups: is 0, must be between 1 and"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_zero_outside_groups_refuses(changed: dict[str, Any], message: str) -> None:
    library = capi.core()
    arguments = {**ZERO, **changed}.values()
    assert library.fp4gemm_zero_outside_groups(*arguments, 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


def test_the_workspace_of_a_routing() -> None:
    """None for a single CTA; else four bytes for each expert and CTA, and a smaller one is refused."""
    library = capi.core()
    size = ctypes.c_size_t(99)
    for experts in (1, 128, 2048):
        before = 0
        for tokens in (0, 1, 64, 1 << 12, 1 << 16, 1 << 24, (1 << 30) - 1):
            args = capi.RouteArgs(**{**ROUTE, "num_tokens": tokens, "num_experts": experts})
            assert (
                library.fp4gemm_route_workspace_bytes(ctypes.byref(args), ctypes.byref(size)) == capi.SUCCESS
            )
            assert size.value >= before
            assert size.value % (4 * experts) == 0
            assert tokens > 64 or size.value == 0
            before = size.value
        assert before > 0
        memory = ctypes.create_string_buffer(16)
        for given, length in ((None, before), (memory, before - 1)):
            status = library.fp4gemm_route(ctypes.byref(args), given, length, 0, None)
            assert status == capi.WORKSPACE
            assert f"must have {before}" in library.fp4gemm_last_error().decode()
