"""The C interface of experts, and of the functions that it is made of: refusals without a device, and the
workspace of a routing."""

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


def weights(n: int, **changed: Any) -> capi.ExpertWeights:
    fields = {"n": n, "operand": capi.Operand(P, P), "e4m3_max": 448, "scaling": capi.SCALING_ROW, "amax": P}
    return capi.ExpertWeights(**{**fields, **changed})


def changed_weights(name: str, **changed: Any) -> dict[str, Any]:
    return {name: weights(EXPERTS[name].n, **changed)}


PACKED, PACKED_FP8 = (
    capi.Operand(P, None, form) for form in (capi.FORMAT_PREPACKED, capi.FORMAT_PREPACKED_FP8)
)
EXPERTS: dict[str, Any] = {
    "num_tokens": 4,
    "top_k": 2,
    "num_experts": 8,
    "d": 64,
    "x": P,
    "topk_ids": P,
    "topk_weights": P,
    "w13": weights(128),
    "w2": weights(64),
    "out": P,
}
FP8 = {"quantize_a": capi.QUANTIZE_A_FP8}
NONE = {"quantize_a": capi.QUANTIZE_A_NONE}
# What the query of the workspace refuses too, as it does not depend on pointers.
BAD_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"struct_size": 8}, "args: struct_size is 8, must be"),
    ({"num_tokens": -1}, "num_tokens: is -1, must be between 0 and"),
    ({"num_tokens": 2**30}, "num_tokens: is 1073741824, with top_k 2 must be at most 2147483647 slots"),
    ({"top_k": 0}, "top_k: is 0, must be between 1 and"),
    ({"num_experts": 0}, "num_experts: is 0, must be between 1 and 2048"),
    ({"num_experts": 2049}, "num_experts: is 2049, must be between 1 and 2048"),
    ({"d": 48}, "d: is 48, must be a multiple of 32"),
    ({"d": 96, **FP8}, "d: is 96, must be a multiple of 64"),
    ({"x_dtype": 3}, "x_dtype: is 3, must be FP4GEMM_BF16"),
    ({"x_dtype": capi.FP32, **NONE}, "x_dtype: is FP4GEMM_FP32, must be FP4GEMM_BF16 or FP4GEMM_FP16 with"),
    ({"weights_dtype": -1}, "weights_dtype: is -1, must be FP4GEMM_BF16"),
    ({"quantize_a": 4}, "quantize_a: is 4, must be a fp4gemm_quantize_a_t"),
    ({"cast": capi.Cast(encode=2, e4m3_max=448)}, "cast.encode: is 2, must be a fp4gemm_encode_t"),
    ({"cast": capi.Cast(four_over_six=3, e4m3_max=448)}, "cast.four_over_six: is 3, must be a fp4gemm_four"),
    ({"cast": capi.Cast(e4m3_max=256)}, "cast.e4m3_max: is 256, must be 448, or 256 with four_over_six"),
    ({"cast": capi.Cast()}, "cast.e4m3_max: is 0, must be 448, or 256 with four_over_six"),
    ({"cast": capi.Cast(fast_error=1, e4m3_max=448)}, "cast.fast_error: is 1, must be 0, or 1 with four"),
    (
        {"cast": capi.Cast(0, 0, 0, 448, 1 << 20, 32)},
        "cast.num_residual_channels: is 32, must be 0 for experts",
    ),
    ({"cast": capi.Cast(1, 2, 0, 256)}, "cast.encode: is 1, must be FP4GEMM_ENCODE_TE with four_over_six"),
    (
        {"cast": capi.Cast(1, 0, 0, 448), **FP8},
        "quantize_a: is 3, must be FP4GEMM_QUANTIZE_A_ROW or FP4GEMM_",
    ),
    (
        {"cast": capi.Cast(0, 1, 0, 256), **NONE},
        "quantize_a: is 0, must be FP4GEMM_QUANTIZE_A_ROW or FP4GEMM_",
    ),
    ({"activation": 99}, "activation: is 99, must be one of 0 (none), "),
    ({"activation": 99, "w13": weights(96)}, "activation: is 99, must be one of 0 (none), "),
    ({"batch_invariant": 2}, "batch_invariant: is 2, must be 0 or 1"),
    ({"use_fast_accum": 1}, "use_fast_accum: is 1, must be 0 unless quantize_a is FP4GEMM_QUANTIZE_A_FP8"),
    ({"use_fast_accum": 2, **FP8}, "use_fast_accum: is 2, must be 0 or 1"),
    ({"w13": weights(96)}, "w13.n: is 96, must be a multiple of 64"),
    ({"w13": weights(192), **FP8}, "w13.n: is 192, must be a multiple of 128"),
    ({"w13": weights(0)}, "w13.n: is 0, must be between 64 and"),
    ({"w2": weights(96)}, "w2.n: is 96, must be 64, the d of x"),
    (
        {"num_tokens": 2**29, "w13": weights(2**30)},
        "rows of 1073741824 elements must have at most 2882303761",
    ),
    ({"num_experts": 2048, "d": 2**20, "w2": weights(2**20), "w13": weights(2**28)}, "w13: 2048 matrices of"),
    *(
        case
        for name in ("w13", "w2")
        for case in (
            (
                changed_weights(name, operand=capi.Operand(P, None, capi.FORMAT_FP16)),
                f"{name}: format is 1, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_PREPACKED with",
            ),
            (changed_weights(name, operand=PACKED_FP8), f"{name}: format is 6, must be FP4GEMM_FORMAT_NVFP4"),
            (
                {**changed_weights(name, operand=PACKED), **FP8},
                f"{name}: format is 3, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_PREPACKED_FP8 with",
            ),
            (changed_weights(name, e4m3_max=240), f"{name}.e4m3_max: is 240, must be 448 or 256"),
            (changed_weights(name, is_constant=2), f"{name}.is_constant: is 2, must be 0 or 1"),
            (changed_weights(name, scaling=2), f"{name}.scaling: is 2, must be FP4GEMM_SCALING_TENSOR or"),
        )
    ),
]
# What the call alone refuses.
BAD_POINTERS: list[tuple[dict[str, Any], str]] = [
    ({"x": 0}, "x: is null, must point at 256 elements"),
    ({"x": P + 8}, "x: is 0x1008, must be 16-byte aligned"),
    ({"topk_ids": 0}, "topk_ids: is null, must point at 8 elements"),
    ({"topk_ids": P + 4, "ids_are_64_bits": 1}, "topk_ids: is 0x1004, must be 8-byte aligned"),
    ({"ids_are_64_bits": 8}, "ids_are_64_bits: is 8, must be 0 or 1"),
    ({"topk_weights": P + 2}, "topk_weights: is 0x1002, must be 4-byte aligned"),
    ({"out": 0}, "out: is null, must point at 256 elements"),
    *(
        case
        for name, rows in (("w13", 1024), ("w2", 512))
        for case in (
            (
                changed_weights(name, operand=capi.Operand(None, P)),
                f"{name}: is null, must point at {rows * 64} elements",
            ),
            (changed_weights(name, operand=capi.Operand(P + 8, P)), f"{name}: is 0x1008, must be 16-byte"),
            (
                changed_weights(name, operand=capi.Operand(P)),
                f"{name}.scales: is null, must point at {rows * 4} elements",
            ),
            (
                changed_weights(name, operand=capi.Operand(P, P, capi.FORMAT_PREPACKED)),
                f"{name}.scales: is 0x1000, must be null for prepacked weights",
            ),
            (changed_weights(name, amax=0), f"{name}.amax: is null, must point at {rows} elements"),
            (
                changed_weights(name, amax=0, scaling=capi.SCALING_TENSOR),
                f"{name}.amax: is null, must point at 8 elements",
            ),
            (changed_weights(name, bias=P + 2), f"{name}.bias: is 0x1002, must be 4-byte aligned"),
        )
    ),
]


def texts(value: object) -> str:
    return value.split(", must")[0] if isinstance(value, str) else ""


@pytest.mark.parametrize(("changed", "message"), BAD_EXPERTS, ids=texts)
def test_experts_refuses_a_problem(changed: dict[str, Any], message: str) -> None:
    library, size = capi.core(), ctypes.c_size_t(99)
    args = capi.ExpertsArgs(**{**EXPERTS, **changed})
    assert library.fp4gemm_experts_workspace_bytes(args, 0, size) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()
    assert size.value == 99
    assert library.fp4gemm_experts(args, None, 0, 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


@pytest.mark.parametrize(("changed", "message"), BAD_POINTERS, ids=texts)
def test_experts_refuses_pointers(changed: dict[str, Any], message: str) -> None:
    library = capi.core()
    args = capi.ExpertsArgs(**{**EXPERTS, **changed})
    assert library.fp4gemm_experts(args, None, 0, 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


SIX = {"cast": capi.Cast(0, 2, 1, 256)}
PER_TOKEN = {"cast": capi.Cast(1, 0, 0, 448), "quantize_a": capi.QUANTIZE_A_TENSOR}


@pytest.mark.parametrize(
    "more", [{}, FP8, NONE, SIX, PER_TOKEN], ids=["nvfp4", "fp8", "none", "four_over_six", "te_per_token"]
)
def test_good_experts_reach_the_device(more: dict[str, Any]) -> None:
    """No check refuses them. The query uses no pointer, and asks for a device that does not exist."""
    library, size = capi.core(), ctypes.c_size_t()
    assert library.fp4gemm_experts_workspace_bytes(None, 0, size) == capi.INVALID_ARGUMENT
    no_pointers = {"x": 0, "topk_ids": 0, "topk_weights": 0, "out": 0}
    for weight in ("w13", "w2"):
        no_pointers[weight] = weights(EXPERTS[weight].n, operand=capi.Operand(), amax=0)
    for args in (
        capi.ExpertsArgs(**{**EXPERTS, **more, **no_pointers}),
        capi.ExpertsArgs(**{**EXPERTS, **more, "topk_weights": 0, "num_tokens": 0, "x": 0, "topk_ids": 0}),
    ):
        status = library.fp4gemm_experts_workspace_bytes(args, 999, size)
        assert status in (capi.NOT_SUPPORTED, capi.CUDA), library.fp4gemm_last_error()
    assert library.fp4gemm_experts(args, None, 0, 999, None) == status
    assert library.fp4gemm_experts_workspace_bytes(args, 0, None) == capi.INVALID_ARGUMENT
    assert b"bytes: is null" in library.fp4gemm_last_error()
