"""The scale search of every device has the bits of the reference, and refuses what it cannot compute."""

from __future__ import annotations

import ctypes

import capi
import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.ops import operators
from helpers import FLOATS, KINDS, assert_bits, assert_parts, captured, dirty, make, short
from torch import Tensor

NAN = float("nan")
LAYOUTS = {"row": (True, 1), "tensor": (False, 1), "tiles": (False, 16)}
SHAPES = [(0, 32), (1, 16), (2, 48), (3, 1024), (5, 1040), (16, 64), (33, 2064), (129, 80), (257, 272)]


def make_importance(k: int, gen: torch.Generator) -> Tensor:
    """Mean squares over many orders of magnitude, with zeros."""
    h = torch.exp2(torch.randn(k, generator=gen) * 6)
    h[::7] = 0.0
    return h


def poison(device: torch.device, m: int, k: int) -> None:
    """Leaves 0xFF in the memory from which the results of an (m, k) will be allocated."""
    dirty(device, m * k // 2, (m + 127) // 128 * 128 * ((k // 16 + 3) // 4 * 4), 4 * m)


def compare(
    device: torch.device,
    x: Tensor,
    importance: Tensor | None,
    layout: str,
    bound: int,
    amax: Tensor | None = None,
) -> None:
    per_row, block_rows = LAYOUTS[layout]
    moved, a, h = (each if each is None else each.to(device) for each in (x, amax, importance))
    for fp8_operand in (False, True):
        options = per_row, block_rows, bound, fp8_operand
        want = reference.quantize_searched(x, amax, importance, *options)
        poison(device, *x.shape)
        got = operators.quantize_searched(moved, a, h, *options)
        assert_parts(tuple(each.cpu() for each in got), want, f"{layout}, bound {bound}, fp8 {fp8_operand}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_shapes(dtype: torch.dtype, layout: str, device: torch.device, gen: torch.Generator) -> None:
    for m, k in SHAPES:
        x, h = make("row_ranges", m, k, dtype, gen), make_importance(k, gen)
        compare(device, x, h, layout, 256)
        if m > 0:
            given = x.abs().float().amax(1) * 2 if layout == "row" else x.abs().float().amax().view(1) / 2
            compare(device, x, None, layout, 448, given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_kinds_of_numbers(
    dtype: torch.dtype, layout: str, device: torch.device, gen: torch.Generator
) -> None:
    for kind in KINDS:
        x = make(kind, 37, 160, dtype, gen)
        x[3, ::5] = -0.0
        x[4, 7] = NAN
        x[5] = NAN
        compare(device, x, make_importance(160, gen), layout, 448)
        compare(device, x, None, layout, 256)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extreme_amaxes(layout: str, device: torch.device, gen: torch.Generator) -> None:
    x = make("heavy", 42, 64, torch.float32, gen)
    x[:, 16:32] *= 1e-37
    values = torch.tensor([1e3, 1e-3, 1.0, 0.0, torch.inf, 1e-38, 1e38])
    for amax in [values.repeat(6)] if layout == "row" else values.split(1):
        compare(device, x, make_importance(64, gen), layout, 256, amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_16_bit_number(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(256, 256)
    for layout in LAYOUTS:
        compare(device, x, None, layout, 256)
        compare(device, x.t().contiguous(), None, layout, 448)


def test_random_bits(device: torch.device, gen: torch.Generator) -> None:
    """float32 of every exponent, with an importance of every exponent."""
    x = torch.randint(-(2**31), 2**31, (128, 512), generator=gen).to(torch.int32).view(torch.float32)
    h = torch.randint(0, 0x7F800000, (512,), generator=gen).to(torch.int32).view(torch.float32)
    for layout in LAYOUTS:
        compare(device, x, h, layout, 256)


def test_strided_rows(device: torch.device, gen: torch.Generator) -> None:
    x, h = make("heavy", 50, 96, torch.bfloat16, gen), make_importance(64, gen)
    for layout, (per_row, block_rows) in LAYOUTS.items():
        got = operators.quantize_searched(
            x.to(device)[:, 16:80], None, h.to(device), per_row, block_rows, 256
        )
        want = reference.quantize_searched(x[:, 16:80].contiguous(), None, h, per_row, block_rows, 256)
        assert_parts(tuple(each.cpu() for each in got), want, layout)


def test_threads_do_not_matter(gen: torch.Generator) -> None:
    x, h = make("heavy", 700, 256, torch.bfloat16, gen), make_importance(256, gen)
    threads = torch.get_num_threads()
    try:
        for layout, (per_row, block_rows) in LAYOUTS.items():
            results = []
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(operators.quantize_searched(x, None, h, per_row, block_rows, 256))
            assert_parts(results[0], results[1], layout)
    finally:
        torch.set_num_threads(threads)


def test_facade(device: torch.device, gen: torch.Generator) -> None:
    """quantize passes every option on, of matrices and of stacks, and its result can be multiplied."""
    w, h = torch.randn(2, 48, 64, generator=gen).bfloat16(), torch.rand(2, 64, generator=gen)
    for options, (per_row, block_rows) in (
        ({"scaling": "row"}, LAYOUTS["row"]),
        ({"scaling": "tensor", "e4m3_max": 448}, LAYOUTS["tensor"]),
        ({"scaling": "tensor", "block": (16, 16)}, LAYOUTS["tiles"]),
        ({"scaling": "row", "fp8_operand": True}, LAYOUTS["row"]),
    ):
        bound, fp8_operand = options.get("e4m3_max", 256), options.get("fp8_operand", False)
        stack = fp4gemm.quantize(w.to(device), scale_search="mse", importance=h.to(device), **options)
        for e in range(2):
            one = fp4gemm.quantize(w[e].to(device), scale_search="mse", importance=h[e].to(device), **options)
            want = reference.quantize_searched(w[e], None, h[e], per_row, block_rows, bound, fp8_operand)
            assert one.e4m3_max == stack.e4m3_max == bound
            assert_parts((one.codes.cpu(), one.scales.cpu(), one.amax.cpu()), want, f"matrix {e}")
            assert_parts((stack[e].codes.cpu(), stack[e].scales.cpu(), stack[e].amax.cpu()), want, f"of {e}")
    x = fp4gemm.quantize(torch.randn(32, 64, generator=gen).to(device))
    product = fp4gemm.mm(x, one, out_dtype=torch.float32)
    exact = x.dequantize(torch.float32).double() @ one.dequantize(torch.float32).double().t()
    assert torch.allclose(product.double(), exact, rtol=1e-4, atol=1e-4)


def test_traced(device: torch.device, gen: torch.Generator) -> None:
    """The fake implementation describes the results, so that a graph of the call has no breaks."""
    torch.library.opcheck(
        operators.quantize_searched,
        (torch.randn(33, 64, generator=gen).to(device), None, torch.ones(64, device=device), True),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large(layout: str, dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    """Against the reference on the GPU, whose bits are those on the CPU."""
    per_row, block_rows = LAYOUTS[layout]
    for m, k in ((16, 65552), (40000, 16), (2050, 4112), (4096, 4096)):
        x, h = make("heavy", m, k, dtype, gen).to(cuda), make_importance(k, gen).to(cuda)
        for fp8_operand in (False, True):
            options = per_row, block_rows, 256, fp8_operand
            want = reference.quantize_searched(x, None, h, *options)
            poison(cuda, m, k)
            got = operators.quantize_searched(x, None, h, *options)
            assert_parts(got, want, f"{m}x{k}, fp8 {fp8_operand}")


@pytest.mark.gpu
def test_the_reference_gives_the_same_bits_on_the_gpu(cuda: torch.device, gen: torch.Generator) -> None:
    for layout, (per_row, block_rows) in LAYOUTS.items():
        for kind in ("heavy", "row_ranges", "denormal", "wide_blocks"):
            x, h = make(kind, 80, 112, torch.float32, gen), make_importance(112, gen)
            for fp8_operand in (False, True):
                options = per_row, block_rows, 256, fp8_operand
                want = reference.quantize_searched(x, None, h, *options)
                got = reference.quantize_searched(x.to(cuda), None, h.to(cuda), *options)
                assert_parts(tuple(each.cpu() for each in got), want, f"{layout} {kind}, fp8 {fp8_operand}")


@pytest.mark.gpu
def test_captured(cuda: torch.device, gen: torch.Generator) -> None:
    """The call does not synchronise, and a replay reads x again."""
    x, h = (make("heavy", 64, 128, torch.bfloat16, gen).to(cuda) for _ in range(2))
    importance = make_importance(128, gen).to(cuda)
    for options in ({"scaling": "row"}, {"scaling": "tensor"}, {"scaling": "tensor", "block": (16, 16)}):
        given = x.clone()
        graph, made = captured(
            lambda options=options, given=given: fp4gemm.quantize(  # type: ignore[misc]
                given, scale_search="mse", importance=importance, **options
            ),
            cuda,
        )
        given.copy_(h)
        graph.replay()
        want = fp4gemm.quantize(h, scale_search="mse", importance=importance, **options)
        for name in ("codes", "scales", "amax"):
            assert_bits(getattr(made, name), getattr(want, name), name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": -1}, "m: is -1, must be between 0"),
        ({"k": 40}, "k: is 40, must be a multiple of 16"),
        ({"x_dtype": 7}, "x_dtype: is 7, must be FP4GEMM_BF16"),
        ({"x_row_stride": 32}, "x_row_stride: is 32, must be at least the 64 columns"),
        ({"x": 1024 + 8}, "must be 16-byte aligned"),
        ({"x": None}, "x: is null, must point at 2048 elements"),
        ({"scaling": 5}, "scaling: is 5, must be FP4GEMM_SCALING_TENSOR"),
        ({"block_rows": 8}, "block_rows: is 8, must be 1 or 16"),
        ({"block_rows": 16}, "block_rows: is 16, which requires FP4GEMM_SCALING_TENSOR"),
        ({"e4m3_max": 240}, "e4m3_max: is 240, must be 448 or 256"),
        ({"fp8_operand": 2}, "fp8_operand: is 2, must be 0 or 1"),
        ({"importance": 1026}, "importance: is 0x402, must be 4-byte aligned"),
        ({"codes": None}, "codes: is null, must point at 1024 elements"),
        ({"scales": None}, "scales: is null, must point at 128 elements"),
        ({"amax": None}, "amax: is null, must point at 32 elements"),
        ({"amax": None, "amax_given": 1025}, "amax_given: is 0x401, must be 4-byte aligned"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_c_interface_refuses(changes: dict[str, int], message: str) -> None:
    """The arguments are checked before the device is asked for, so that this runs without one."""
    good = {"m": 32, "k": 64, "x": 1024, "x_row_stride": 64, "codes": 1024, "scales": 1024, "amax": 1024}
    library = capi.core()
    args = capi.QuantizeSearchedArgs(**{**good, **changes})
    assert library.fp4gemm_quantize_searched(ctypes.byref(args), 0, None) != capi.SUCCESS
    assert message in library.fp4gemm_last_error().decode()
