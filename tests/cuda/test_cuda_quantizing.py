"""Few tokens that are quantized inside the GEMM on prepacked weights: the bits of quantize and mm."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import pytest
import torch
from capi import FORMAT_BF16, FORMAT_FP16, FORMAT_PREPACKED, QUANTIZE_A_NONE, QUANTIZE_A_ROW
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor
from fp4gemm.kernel_table import KernelInfo
from helpers import assert_bits, assert_poison_intact, captured, make, poisoned, short
from torch import Tensor

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = {torch.bfloat16: FORMAT_BF16, torch.float16: FORMAT_FP16}
ALPHA = 1 / (36 * 448 * 448)
# k below a chunk of 64, no multiple of it, and large; n of one tile, of several, and of tiles that are split.
SHAPES = [
    (1, 64, 32),
    (2, 8, 96),
    (3, 72, 544),
    (8, 136, 1056),
    (8, 4096, 2048),
    (7, 4096, 4096),
    (5, 320, 5120),
    (1, 8192, 8192),
    (2, 10240, 8192),
    (3, 8192, 8192),
    (1, 4096, 14336),
    (2, 4096, 14336),
]


def kernels(**wanted: object) -> list[KernelInfo]:
    """The dense kernels for eight fp16 tokens."""
    found = [
        k
        for k in fp4gemm.kernels()
        if k.arch == 90 and k.mode == "dense" and k.operand == "prepacked" and k.tile[0] == 8
    ]
    return [k for k in found if all(getattr(k, name) == value for name, value in wanted.items())]


def weight(n: int, k: int, device: torch.device, gen: torch.Generator) -> tuple[NVFP4Tensor, PrepackedTensor]:
    w = fp4gemm.quantize(make("normal", n, k, torch.bfloat16, gen).to(device))
    p = fp4gemm.prepack(w)
    torch.cuda.synchronize()
    return w, p


def arguments(x: Tensor, p: PrepackedTensor, out: Tensor, kernel: str | None, **terms: Any) -> capi.GemmArgs:
    n, k = p.shape
    bias, c = terms.get("bias"), terms.get("c")
    return capi.GemmArgs(
        m=x.shape[0],
        n=n,
        k=k,
        a=capi.Operand(x.data_ptr(), None, FORMATS[x.dtype]),
        b=capi.Operand(p.data.data_ptr(), None, FORMAT_PREPACKED),
        b_is_constant=1,
        alpha_col=capi.Vector(p.amax.data_ptr(), n),
        alpha=ALPHA,
        bias=capi.Vector(bias.data_ptr(), n) if bias is not None else capi.Vector(),
        activation=capi.ACTIVATIONS[terms.get("activation")],
        c=c.data_ptr() if c is not None else None,
        c_row_stride=c.stride(0) if c is not None else 0,
        beta=terms.get("beta", 1.0),
        out_dtype=capi.DTYPES[out.dtype],
        d=out.data_ptr(),
        d_row_stride=out.stride(0),
        quantize_a=QUANTIZE_A_ROW,
        a_row_stride=x.stride(0),
        kernel=None if kernel is None else kernel.encode(),
    )


def workspace_bytes(args: capi.GemmArgs) -> int:
    library = capi.core()
    num_bytes = ctypes.c_size_t()
    status = library.fp4gemm_gemm_workspace_bytes(ctypes.byref(args), 0, ctypes.byref(num_bytes))
    assert status == capi.SUCCESS, library.fp4gemm_last_error()
    return num_bytes.value


def quantizes_itself(args: capi.GemmArgs) -> bool:
    """Whether the call needs no room for the values and amaxes of A."""
    decoded = capi.GemmArgs.from_buffer_copy(args)
    decoded.quantize_a, decoded.a_row_stride = QUANTIZE_A_NONE, 0
    decoded.a.format = FORMAT_FP16
    return workspace_bytes(args) == workspace_bytes(decoded)


def call(args: capi.GemmArgs, device: torch.device) -> None:
    library = capi.core()
    workspace = torch.full((workspace_bytes(args),), 0xFF, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    status = library.fp4gemm_gemm(
        ctypes.byref(args), workspace.data_ptr(), workspace.numel(), 0, ctypes.c_void_p(stream)
    )
    assert status == capi.SUCCESS, library.fp4gemm_last_error()


def in_one_launch(x: Tensor, p: PrepackedTensor, kernel: KernelInfo, **terms: Any) -> Tensor:
    width = p.shape[0] // 2 if kernel.is_gated else p.shape[0]
    out, buffer = poisoned(x.shape[0], width, kernel.out_dtype, x.device, pad=8)
    call(arguments(x, p, out, kernel.name, **terms), x.device)
    assert_poison_intact(buffer, x.shape[0], width)
    return out


def in_two(x: Tensor, p: PrepackedTensor, kernel: KernelInfo, **terms: Any) -> Tensor:
    a = fp4gemm.quantize(x, decoded=True)
    assert isinstance(a, DecodedTensor)
    return fp4gemm.mm(a, p, kernel=kernel.name, out_dtype=kernel.out_dtype, **terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_every_kernel(
    m: int, n: int, k: int, dtype: torch.dtype, hopper: torch.device, gen: torch.Generator
) -> None:
    """Rows may lie apart. Where sums are exact, D is that of the reference as well."""
    w, p = weight(n, k, hopper, gen)
    bias = torch.randn(n, generator=gen).to(hopper)
    wide = make("normal", m, k + 64, dtype, gen).to(hopper)
    for kernel in kernels():
        gated = kernel.is_gated
        if gated and n % 16:
            continue
        terms = {"bias": bias, "activation": "swiglu" if gated else None}
        for x in (wide[:, :k], wide[:, :k].contiguous()):
            want = in_two(x, p, kernel, **terms)
            assert_bits(in_one_launch(x, p, kernel, **terms), want, f"{kernel.name} {x.stride()}")
    if n * k < 1 << 22:
        x = wide[:, :k].cpu()
        exact = fp4gemm.mm(fp4gemm.quantize(x), w.to("cpu"), bias=bias.cpu(), out_dtype=torch.float32)
        for kernel in kernels(epilogue="rowcol", out_dtype=torch.float32):
            assert_bits(in_one_launch(wide[:, :k], p, kernel, bias=bias), exact, kernel.name)


@pytest.mark.parametrize("m", range(1, 9))
def test_which_calls_quantize_inside_the_gemm(m: int, hopper: torch.device, gen: torch.Generator) -> None:
    """Up to 28672 elements; fewer for tiles that share an SM. Beyond, the bits are the same."""
    for k in (1024, 4096, 8192, 28672):
        _, p = weight(64, k, hopper, gen)
        x = make("normal", m, k, torch.bfloat16, gen).to(hopper)
        for kernel in kernels(epilogue="rowcol", out_dtype=torch.bfloat16):
            out = torch.empty(m, 64, dtype=torch.bfloat16, device=hopper)
            inside = quantizes_itself(arguments(x, p, out, kernel.name))
            if kernel.tile[2] == 1024:
                assert inside == (m * k <= 28672), f"{kernel.name} {m} {k}"
            else:
                assert not inside or m * k <= 12288, f"{kernel.name} {m} {k}"
                assert inside or m * k > 8192, f"{kernel.name} {m} {k}"
            assert_bits(in_one_launch(x, p, kernel), in_two(x, p, kernel), f"{kernel.name} {m} {k}")


KINDS = ["heavy", "row_ranges", "denormal", "huge", "inf", "zero_rows", "ties", "outliers", "wide_blocks"]


@pytest.mark.parametrize("kind", [*KINDS, "nan", "nan and inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_values(kind: str, dtype: torch.dtype, hopper: torch.device, gen: torch.Generator) -> None:
    """Rows whose amax is extreme, zero or infinite, and rows with NaN."""
    _, p = weight(136, 1056, hopper, gen)
    x = make("normal" if "nan" in kind else kind, 8, 1056, dtype, gen)
    if "nan" in kind:
        for row in (0, 2, 3, 7):
            x[row, row * 100 :: 97] = torch.nan
            if kind == "nan and inf":
                x[row, row * 50 : row * 50 + 3] = -torch.inf
        x[4] = torch.nan
    x = x.to(hopper)
    for m in (1, 5, 8):
        for kernel in kernels(epilogue="rowcol", out_dtype=torch.float32):
            assert_bits(in_one_launch(x[:m], p, kernel), in_two(x[:m], p, kernel), f"{kernel.name} {m}")


@pytest.mark.parametrize("activation", [a for a in fp4gemm.activations.ACTIVATIONS if not a.is_gated])
def test_terms(activation: Any, hopper: torch.device, gen: torch.Generator) -> None:
    _, p = weight(264, 2048, hopper, gen)
    x = make("normal", 4, 2048, torch.bfloat16, gen).to(hopper)
    for kernel in kernels(epilogue="rowcol"):
        c = torch.randn(4, 264, generator=gen).to(kernel.out_dtype).to(hopper)
        terms = {"c": c, "beta": 0.5, "activation": activation.name}
        assert_bits(in_one_launch(x, p, kernel, **terms), in_two(x, p, kernel, **terms), kernel.name)


def test_x_of_the_previous_kernel_in_a_graph(hopper: torch.device, gen: torch.Generator) -> None:
    """Launches overlap: each product of a chain reads what the kernel before it wrote, in every replay."""
    _, p = weight(4096, 4096, hopper, gen)
    start = make("normal", 2, 4096, torch.bfloat16, gen).to(hopper)
    kernel = kernels(epilogue="rowcol", out_dtype=torch.bfloat16, tile=(8, 64, 1024))[0]
    x = start.clone()
    results = [torch.empty_like(x) for _ in range(6)]
    calls = [
        arguments(left, p, out, kernel.name) for left, out in zip([x, *results[:-1]], results, strict=True)
    ]
    assert all(quantizes_itself(args) for args in calls)

    def chain() -> None:
        for args in calls:
            call(args, hopper)

    graph, _ = captured(chain, hopper)
    for factor in (1.0, -3.0, 0.125):
        x.copy_(start * factor)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        want = x
        for i, result in enumerate(results):
            want = in_two(want, p, kernel)
            assert_bits(result, want, f"product {i}, factor {factor}")
