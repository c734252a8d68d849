"""fp4gemm_gemm with quantize_a: it quantizes A itself. Refusals need no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import pytest
import torch
from capi import (
    FORMAT_BF16,
    FORMAT_FP16,
    FORMAT_FP32,
    FORMAT_NVFP4,
    FORMAT_PREPACKED,
    QUANTIZE_A_ROW,
    QUANTIZE_A_TENSOR,
    RAGGED_K,
    GemmArgs,
    Operand,
    Vector,
)
from helpers import FLOATS, assert_bits, poisoned, short

FORMATS = {torch.bfloat16: FORMAT_BF16, torch.float16: FORMAT_FP16, torch.float32: FORMAT_FP32}
SCALINGS = {"row": QUANTIZE_A_ROW, "tensor": QUANTIZE_A_TENSOR}
ALPHA = 1 / (36 * 448 * 448)
ADDRESS = 4096  # aligned, and not to be read: the checks come before any use of a device


def arguments(**changed: Any) -> GemmArgs:
    fields: dict[str, Any] = {
        "m": 4,
        "n": 8,
        "k": 64,
        "a": Operand(ADDRESS, None, FORMAT_BF16),
        "b": Operand(ADDRESS, ADDRESS, FORMAT_NVFP4),
        "d": ADDRESS + 65536,
        "d_row_stride": 8,
        "quantize_a": QUANTIZE_A_ROW,
    }
    return GemmArgs(**{**fields, **changed})


GROUPED = {"num_groups": 2, "offs": ADDRESS}
# What the query of the workspace refuses too, as it does not depend on pointers.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"quantize_a": 4}, "quantize_a: is 4, must be a fp4gemm_quantize_a_t"),
    "negative": ({"quantize_a": -1}, "quantize_a: is -1"),
    "codes": (
        {"a": Operand(ADDRESS, ADDRESS, FORMAT_NVFP4)},
        "a: format is 0, must be FP4GEMM_FORMAT_BF16, FP4GEMM_FORMAT_FP16 or FP4GEMM_FORMAT_FP32 with "
        "quantize_a",
    ),
    "prepacked": ({"a": Operand(ADDRESS, None, FORMAT_PREPACKED)}, "a: format is 3"),
    "fp32 without": (
        {"a": Operand(ADDRESS, None, FORMAT_FP32), "quantize_a": 0},
        "a: format is 4, must be FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_BF16 or ",
    ),
    "fp32 b": ({"b": Operand(ADDRESS, None, FORMAT_FP32)}, "b: format is 4"),
    "ragged k": (
        {**GROUPED, "ragged": RAGGED_K, "a": Operand(ADDRESS, None, FORMAT_FP16)},
        "quantize_a: is 1, must be FP4GEMM_QUANTIZE_A_NONE for groups that are ragged in k",
    ),
    "short stride": ({"a_row_stride": 56}, "a_row_stride: is 56, must be at least the 64 columns"),
    "odd stride": ({"a_row_stride": 68}, "a_row_stride: is 68 elements of 2 bytes, must be a multiple of 16"),
    "negative stride": ({"a_row_stride": -64}, "a_row_stride: is -64"),
    "stride without": (
        {"a_row_stride": 64, "quantize_a": 0},
        "a_row_stride: is 64, must be 0 without quantize_a",
    ),
    "rows without": (
        {"a_rows": ADDRESS, "quantize_a": 0},
        "a_rows: is 0x1000, must be null unless quantize_a is FP4GEMM_QUANTIZE_A_ROW",
    ),
    "rows of a tensor": (
        {"a_rows": ADDRESS, "quantize_a": QUANTIZE_A_TENSOR},
        "a_rows: is 0x1000, must be null unless quantize_a is FP4GEMM_QUANTIZE_A_ROW",
    ),
    "number of rows without": ({"a_num_rows": 3}, "a_num_rows: is 3, must be 0 without a_rows"),
    "number of rows": ({"a_rows": ADDRESS, "a_num_rows": -1}, "a_num_rows: is -1, must be between 0 and "),
}
# What only the call itself refuses.
BAD_POINTERS: dict[str, tuple[dict[str, Any], str]] = {
    "a": ({"a": Operand(None, None, FORMAT_BF16)}, "a: is null, must point at 256 elements"),
    "a alignment": ({"a": Operand(ADDRESS + 8, None, FORMAT_BF16)}, "a: is 0x1008, must be 16-byte aligned"),
    "scales": (
        {"a": Operand(ADDRESS, ADDRESS, FORMAT_BF16)},
        "scale_a: is 0x1000, must be null for an operand that is not nvfp4",
    ),
    "alpha_row": (
        {"alpha_row": Vector(ADDRESS, 4)},
        "alpha_row: data is 0x1000, must be null with quantize_a, which measures the amax of A",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_POINTERS])
def test_refusals(name: str) -> None:
    library = capi.core()
    changed, message = {**BAD, **BAD_POINTERS}[name]
    args, num_bytes = arguments(**changed), ctypes.c_size_t()
    if name in BAD:
        status = library.fp4gemm_gemm_workspace_bytes(ctypes.byref(args), 0, ctypes.byref(num_bytes))
        assert status == capi.INVALID_ARGUMENT
        assert message in library.fp4gemm_last_error().decode()
    assert library.fp4gemm_gemm(ctypes.byref(args), None, 0, 0, None) == capi.INVALID_ARGUMENT
    assert message in library.fp4gemm_last_error().decode()


BAD_CASTS: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, str]] = {
    "null": ({}, None, "cast: is null, must point at the options"),
    "encode": ({}, (2, 0, 0, 448), "cast.encode: is 2, must be a fp4gemm_encode_t"),
    "four over six": ({}, (0, -1, 0, 448), "cast.four_over_six: is -1, must be a fp4gemm_four_over_six_t"),
    "bound": ({}, (0, 0, 0, 256), "cast.e4m3_max: is 256, must be 448, or 256 with four_over_six"),
    "other bound": ({}, (0, 1, 0, 240), "cast.e4m3_max: is 240, must be 448, or 256 with four_over_six"),
    "error": ({}, (0, 0, 1, 448), "cast.fast_error: is 1, must be 0, or 1 with four_over_six"),
    "both": ({}, (1, 1, 0, 448), "cast.encode: is 1, must be FP4GEMM_ENCODE_TE with four_over_six"),
    "none": (
        {"quantize_a": 0},
        (0, 1, 0, 448),
        "quantize_a: is 0, must be FP4GEMM_QUANTIZE_A_ROW or ",
    ),
    "fp8": (
        {"quantize_a": 3},
        (1, 0, 0, 448),
        "quantize_a: is 3, must be FP4GEMM_QUANTIZE_A_ROW or ",
    ),
    "rows": (
        {"a_rows": ADDRESS, "a_num_rows": 4},
        (0, 1, 0, 448),
        "a_rows: is given, must be null with cast.encode, cast.four_over_six or cast.residual_channels",
    ),
    "step of channels": (
        {},
        (0, 0, 0, 448, ADDRESS, 16),
        "cast.num_residual_channels: is 16, must be a multiple of 32 and at most half of k, 64",
    ),
    "number of channels": (
        {},
        (0, 0, 0, 448, ADDRESS, 64),
        "cast.num_residual_channels: is 64, must be a multiple of 32 and at most half of k, 64",
    ),
    "channels without a cast": (
        {"quantize_a": 0, "a": Operand(ADDRESS, ADDRESS, FORMAT_NVFP4)},
        (0, 0, 0, 448, ADDRESS, 32),
        "quantize_a: is 0, must be FP4GEMM_QUANTIZE_A_ROW or ",
    ),
    "channels of groups": (
        {"num_groups": 2, "offs": ADDRESS},
        (0, 0, 0, 448, ADDRESS, 32),
        "cast.num_residual_channels: is 32, must be 0 in a grouped GEMM",
    ),
}


@pytest.mark.parametrize("name", BAD_CASTS)
def test_casts_that_are_refused(name: str) -> None:
    library, num_bytes = capi.core(), ctypes.c_size_t()
    changed, cast, message = BAD_CASTS[name]
    args, options = arguments(**changed), None if cast is None else ctypes.byref(capi.Cast(*cast))
    for status in (
        library.fp4gemm_gemm_with_cast_workspace_bytes(
            ctypes.byref(args), options, 0, ctypes.byref(num_bytes)
        ),
        library.fp4gemm_gemm_with_cast(ctypes.byref(args), options, None, 0, 0, None),
    ):
        assert status == capi.INVALID_ARGUMENT
        assert message in library.fp4gemm_last_error().decode()


def run(args: GemmArgs, device: torch.device, cast: capi.Cast | None = None) -> None:
    """The call in a workspace of exactly the bytes that it needs, full of 0xFF."""
    library = capi.core()
    num_bytes = ctypes.c_size_t()
    more = () if cast is None else (ctypes.byref(cast),)
    name = "fp4gemm_gemm" if cast is None else "fp4gemm_gemm_with_cast"
    query = getattr(library, f"{name}_workspace_bytes")
    status = query(ctypes.byref(args), *more, 0, ctypes.byref(num_bytes))
    assert status == capi.SUCCESS, library.fp4gemm_last_error()
    workspace = torch.full((num_bytes.value,), 0xFF, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    call = getattr(library, name)
    status = call(ctypes.byref(args), *more, workspace.data_ptr(), num_bytes, 0, stream)
    assert status == capi.SUCCESS, library.fp4gemm_last_error()


def operand(w: fp4gemm.NVFP4Tensor, form: str) -> tuple[Operand, object]:
    if form == "codes":
        return Operand(w.codes.data_ptr(), w.scales.data_ptr(), FORMAT_NVFP4), w
    data = fp4gemm.prepack(w).data
    torch.cuda.synchronize()
    return Operand(data.data_ptr(), None, FORMAT_PREPACKED), data


@pytest.fixture
def gpu() -> torch.device:
    support = fp4gemm.is_supported("cuda")
    if not support:
        pytest.skip(support.reason)
    return torch.device("cuda:0")


CASTS: dict[str, tuple[capi.Cast | None, dict[str, Any]]] = {
    "default": (None, {}),
    "te_per_token": (capi.Cast(1, 0, 0, 448), {"encode": "te_per_token"}),
    "mae": (capi.Cast(0, 1, 0, 256), {"four_over_six": "mae"}),
    "mse": (
        capi.Cast(0, 2, 1, 448),
        {"four_over_six": "mse", "four_over_six_error": "fast", "e4m3_max": 448},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["codes", "prepacked"])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_the_bits_of_both_calls(
    dtype: torch.dtype, scaling: Any, cast: str, form: str, gpu: torch.device
) -> None:
    """Dense; rows of A may be apart, and the bits are those of the reference."""
    if form == "prepacked" and not fp4gemm.support.streams_prepacked(gpu):
        pytest.skip("this device does not read prepacked weights")
    gen = torch.Generator().manual_seed(1)
    options, keywords = CASTS[cast]
    alpha = ALPHA if options is None else 1 / (36 * options.e4m3_max * 448)
    for m, n, k in ((1, 64, 64), (5, 40, 96), (8, 512, 1024), (130, 264, 320), (300, 2048, 512)):
        wide = torch.randn(m, 2 * k, generator=gen).to(dtype).to(gpu)
        w = fp4gemm.quantize(torch.randn(n, k, generator=gen).bfloat16().to(gpu))
        b, kept = operand(w, form)
        bias = torch.randn(n, generator=gen).to(gpu)
        for x in (wide[:, :k].contiguous(), wide[:, :k]):
            quantized = fp4gemm.quantize(x.cpu(), scaling=scaling, **keywords)
            want = fp4gemm.mm(quantized, w.to("cpu"), bias=bias.cpu())
            d, _ = poisoned(m, n, torch.bfloat16, gpu)
            args = GemmArgs(
                m=m,
                n=n,
                k=k,
                a=Operand(x.data_ptr(), None, FORMATS[dtype]),
                b=b,
                b_is_constant=int(form == "prepacked"),
                alpha_col=Vector(w.amax.data_ptr(), n),
                alpha=alpha,
                bias=Vector(bias.data_ptr(), n),
                d=d.data_ptr(),
                d_row_stride=n,
                quantize_a=SCALINGS[scaling],
                a_row_stride=0 if x.is_contiguous() else x.stride(0),
            )
            run(args, gpu, options)
            assert_bits(d, want, f"{m} {n} {k} {x.stride()}")
        del kept


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["codes", "prepacked"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_groups(scaling: Any, form: str, gpu: torch.device) -> None:
    """Ragged m: with "tensor", each group has an amax of its own."""
    if form == "prepacked" and not fp4gemm.support.streams_prepacked(gpu):
        pytest.skip("this device does not read prepacked weights")
    gen = torch.Generator().manual_seed(2)
    groups, m, n, k = 4, 150, 192, 256
    offs = torch.tensor([7, 7, 140, 150], dtype=torch.int32)
    x = torch.randn(m, k, generator=gen).bfloat16()
    w = fp4gemm.quantize(torch.randn(groups, n, k, generator=gen).bfloat16())
    want = fp4gemm.grouped_mm(fp4gemm.quantize(x, scaling=scaling, offs=offs), w, offs)
    w, rows, ends = w.to(gpu), x.to(gpu), offs.to(gpu)
    b, kept = operand(w, form)
    d, _ = poisoned(m, n, torch.bfloat16, gpu)
    args = GemmArgs(
        m=m,
        n=n,
        k=k,
        num_groups=groups,
        offs=ends.data_ptr(),
        a=Operand(rows.data_ptr(), None, FORMAT_BF16),
        b=b,
        alpha_col=Vector(w.amax.data_ptr(), n, n),
        alpha=ALPHA,
        d=d.data_ptr(),
        d_row_stride=n,
        quantize_a=SCALINGS[scaling],
    )
    run(args, gpu)
    assert_bits(d, want, "D")
    del kept
