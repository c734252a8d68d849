"""The C interface on a GPU: cuda-python allocates, ctypes calls, the CPU reference judges."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import fp4gemm
import pytest
import torch
from capi import (
    FORMAT_NVFP4,
    FP32,
    SUCCESS,
    WORKSPACE,
    GemmArgs,
    Operand,
    QuantizeArgs,
    Quantized,
    Vector,
    core,
)
from experts_cases import block_of, c_arguments, random_ids
from fp4gemm import kernel_table, layout, reference
from helpers import assert_bits

try:
    from cuda.bindings import runtime
except ImportError:
    runtime = None


class Device:
    """Memory of device 0, every allocation filled with 0xFF before use and freed at the end."""

    def __init__(self) -> None:
        self.pointers: list[int] = []

    def check(self, result: tuple[object, ...]) -> object:
        assert result[0] == runtime.cudaError_t.cudaSuccess, result[0]
        return result[1] if len(result) > 1 else None

    def empty(self, num_bytes: int) -> int:
        pointer = int(self.check(runtime.cudaMalloc(max(1, num_bytes))))  # type: ignore[call-overload]
        self.pointers.append(pointer)
        self.check(runtime.cudaMemset(pointer, 0xFF, num_bytes))
        return pointer

    def put(self, tensor: torch.Tensor) -> int:
        pointer = self.empty(tensor.nbytes)
        self.set(pointer, tensor)
        return pointer

    def set(self, pointer: int, tensor: torch.Tensor) -> None:
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.check(runtime.cudaMemcpy(pointer, tensor.data_ptr(), tensor.nbytes, kind))

    def get(self, pointer: int, like: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(like)
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.check(runtime.cudaDeviceSynchronize())
        self.check(runtime.cudaMemcpy(result.data_ptr(), pointer, result.nbytes, kind))
        return result


@pytest.fixture
def gpu() -> Device:
    if runtime is None:
        pytest.skip("cuda-python is not installed (requirements/test.txt)")
    support = fp4gemm.is_supported("cuda")
    if not support:
        pytest.skip(support.reason)
    device = Device()
    yield device
    for pointer in device.pointers:
        runtime.cudaFree(pointer)


def succeed(status: int) -> None:
    assert status == SUCCESS, core().fp4gemm_last_error()


def test_quantize_and_multiply(gpu: Device) -> None:
    """Quantize both operands and multiply; the workspace is poisoned and exactly as large as asked for."""
    library = core()
    torch.manual_seed(0)
    for m, n, k in ((5, 40, 96), (130, 264, 320), (2050, 2056, 1024)):
        x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
        want_x, want_w = fp4gemm.quantize(x), fp4gemm.quantize(w)
        operands = []
        for source, want in ((x, want_x), (w, want_w)):
            codes, scales, amax = (gpu.empty(part.nbytes) for part in (want.codes, want.scales, want.amax))
            rows = source.shape[0]
            args = QuantizeArgs(
                m=rows, k=k, x=gpu.put(source), x_row_stride=k, row=Quantized(codes, scales, amax)
            )
            succeed(library.fp4gemm_quantize(ctypes.byref(args), 0, None))
            assert torch.equal(gpu.get(codes, want.codes), want.codes)
            assert torch.equal(gpu.get(scales, want.scales).view(torch.uint8), want.scales.view(torch.uint8))
            assert torch.equal(gpu.get(amax, want.amax), want.amax)
            operands.append((codes, scales, amax))

        bias = torch.randn(n)
        want = reference.gemm(
            want_x.codes,
            want_w.codes,
            want_x.scales,
            want_w.scales,
            alpha=1 / 7225344,
            alpha_row=want_x.amax,
            alpha_col=want_w.amax,
            bias=bias,
            out_dtype=torch.float32,
        )
        (a, scale_a, amax_a), (b, scale_b, amax_b) = operands
        d = gpu.empty(want.nbytes)
        dense = GemmArgs(
            m=m,
            n=n,
            k=k,
            a=Operand(a, scale_a, FORMAT_NVFP4),
            b=Operand(b, scale_b, FORMAT_NVFP4),
            alpha_row=Vector(amax_a, m),
            alpha_col=Vector(amax_b, n),
            alpha=1 / 7225344,
            bias=Vector(gpu.put(bias), n),
            d=d,
            d_row_stride=n,
            out_dtype=FP32,
        )
        num_bytes = ctypes.c_size_t(0)
        succeed(library.fp4gemm_gemm_workspace_bytes(ctypes.byref(dense), 0, ctypes.byref(num_bytes)))
        workspace = gpu.empty(num_bytes.value)
        succeed(library.fp4gemm_gemm(ctypes.byref(dense), ctypes.c_void_p(workspace), num_bytes, 0, None))
        assert torch.equal(gpu.get(d, want), want), (m, n, k)


@pytest.mark.parametrize(("columns", "stride"), [(64, 64), (48, 64), (180, 180), (36, 52), (33, 40)])
@pytest.mark.parametrize(("matrices", "rows"), [(1, 1), (1, 4097), (3, 130)])
def test_swizzle_scales(gpu: Device, matrices: int, rows: int, columns: int, stride: int) -> None:
    """The definition of layout.swizzle_scales for each matrix, with loads of every size."""
    gen = torch.Generator().manual_seed(columns)
    compact = torch.randint(0, 256, (matrices, rows, stride), dtype=torch.uint8, generator=gen)
    want = torch.stack([layout.swizzle_scales(one[:, :columns]) for one in compact])
    swizzled = gpu.empty(want.nbytes)
    arguments = matrices, rows, columns, gpu.put(compact), stride, swizzled
    succeed(core().fp4gemm_swizzle_scales(*arguments, 0, None))
    assert torch.equal(gpu.get(swizzled, want), want)


def test_experts(gpu: Device) -> None:
    """A block of experts in a workspace that is poisoned and exactly as large as asked for; then the graph of
    the call, replayed with other tokens and other experts."""
    library = core()
    gen = torch.Generator().manual_seed(0)
    hopper = kernel_table.kernel_arch(0) == 90
    for activation, dtype in ((4, torch.bfloat16), (5, torch.float16), (4, torch.float32)):
        block = block_of(37, 3, 6, 128, 96, torch.device("cpu"), gen, activation, dtype=dtype, bias=True)
        other = block._replace(x=block.x.flip(0).contiguous(), ids=random_ids(37, 3, 6, gen))
        for prepacked in (False, True) if hopper else (False,):
            args = c_arguments(
                block, lambda part: None if part is None else gpu.put(part), prepacked=prepacked
            )
            num_bytes, out = ctypes.c_size_t(0), torch.empty_like(block.x)
            args.out = gpu.empty(out.nbytes)
            succeed(library.fp4gemm_experts_workspace_bytes(args, 0, num_bytes))
            workspace = gpu.empty(num_bytes.value)
            size = num_bytes.value - 1
            assert library.fp4gemm_experts(args, workspace, size, 0, None) == WORKSPACE
            assert b"workspace: has" in library.fp4gemm_last_error()
            succeed(library.fp4gemm_experts(args, workspace, num_bytes, 0, None))
            assert_bits(
                gpu.get(args.out, out), reference.experts(**block.arguments()), f"{dtype} {prepacked}"
            )

            stream = gpu.check(runtime.cudaStreamCreate())
            mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            gpu.check(runtime.cudaStreamBeginCapture(stream, mode))
            succeed(library.fp4gemm_experts(args, workspace, num_bytes, 0, ctypes.c_void_p(int(stream))))
            graph = gpu.check(runtime.cudaStreamEndCapture(stream))
            executable = gpu.check(runtime.cudaGraphInstantiate(graph, 0))
            gpu.set(args.x, other.x)
            gpu.set(args.topk_ids, other.ids)
            gpu.check(runtime.cudaGraphLaunch(executable, stream))
            gpu.check(runtime.cudaStreamSynchronize(stream))
            assert_bits(gpu.get(args.out, out), reference.experts(**other.arguments()), f"graph {dtype}")


# Values that earlier versions of the library used for a raised flag and for an open counter, and zero.
STALE = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0)


@pytest.mark.parametrize("mode", ["dense", "grouped"])
def test_the_workspace_may_hold_anything(gpu: Device, mode: str) -> None:
    """Prepacked kernels keep flags and a counter in the workspace, and no constant passes for one of them."""
    library = core()
    arch = kernel_table.kernel_arch(0)
    kernels = [
        kernel.name
        for kernel in fp4gemm.kernels()
        if (kernel.arch, kernel.mode, kernel.operand) == (arch, mode, "prepacked")
        and not kernel.is_gated
        and kernel.out_dtype is torch.float32
    ]
    if not kernels:
        pytest.skip("this device has no kernels on prepacked weights")
    torch.manual_seed(0)
    groups, m, n, k = (6, 96, 256, 512) if mode == "grouped" else (0, 24, 512, 4096)
    offs = torch.tensor([10, 10, 50, 51, 90, 96], dtype=torch.int32) if groups else None
    x = fp4gemm.quantize(torch.randn(m, k), offs=offs)
    w = fp4gemm.quantize(torch.randn(*([groups] if groups else []), n, k))
    want = reference.gemm(x.codes, w.codes, x.scales, w.scales, offs=offs, out_dtype=torch.float32)
    a, scale_a, b, scale_b = (gpu.put(part) for part in (x.codes, x.scales, w.codes, w.scales))
    for kernel in kernels:
        d = gpu.empty(want.nbytes)
        args = GemmArgs(
            m=m,
            n=n,
            k=k,
            num_groups=groups,
            offs=None if offs is None else gpu.put(offs),
            a=Operand(a, scale_a, FORMAT_NVFP4),
            b=Operand(b, scale_b, FORMAT_NVFP4),
            d=d,
            d_row_stride=n,
            out_dtype=FP32,
            kernel=kernel.encode(),
        )
        num_bytes = ctypes.c_size_t(0)
        succeed(library.fp4gemm_gemm_workspace_bytes(ctypes.byref(args), 0, ctypes.byref(num_bytes)))
        for value in STALE:
            stale = torch.tensor([value - (value >> 63 << 64)], dtype=torch.int64)
            workspace = gpu.put(stale.expand(-(-num_bytes.value // 8)).contiguous())
            succeed(library.fp4gemm_gemm(ctypes.byref(args), ctypes.c_void_p(workspace), num_bytes, 0, None))
            assert torch.equal(gpu.get(d, want), want), (kernel, hex(value))


def test_workspace_errors(gpu: Device) -> None:
    """A workspace that is missing, short or misaligned is refused by name and nothing is written."""
    library = core()
    m, n, k = 2048, 2048, 1024
    a, scale_a = (
        gpu.put(torch.zeros(m, k // 2, dtype=torch.uint8)),
        gpu.put(torch.zeros(m, k // 16, dtype=torch.uint8)),
    )
    b, scale_b = (
        gpu.put(torch.zeros(n, k // 2, dtype=torch.uint8)),
        gpu.put(torch.zeros(n, k // 16, dtype=torch.uint8)),
    )
    d = gpu.empty(4 * m * n)
    dense = GemmArgs(
        m=m,
        n=n,
        k=k,
        a=Operand(a, scale_a, FORMAT_NVFP4),
        b=Operand(b, scale_b, FORMAT_NVFP4),
        d=d,
        d_row_stride=n,
        out_dtype=FP32,
    )
    num_bytes = ctypes.c_size_t(0)
    succeed(library.fp4gemm_gemm_workspace_bytes(ctypes.byref(dense), 0, ctypes.byref(num_bytes)))
    if num_bytes.value == 0:
        pytest.skip("this device's kernel needs no workspace")
    workspace = gpu.empty(num_bytes.value + 256)
    for pointer, size in (
        (None, num_bytes.value),
        (workspace, num_bytes.value - 1),
        (workspace + 8, num_bytes.value),
    ):
        status = library.fp4gemm_gemm(
            ctypes.byref(dense), ctypes.c_void_p(pointer), ctypes.c_size_t(size), 0, None
        )
        assert status == WORKSPACE
        assert b"workspace" in library.fp4gemm_last_error()
    untouched = gpu.get(d, torch.empty(m, n, dtype=torch.int32))
    assert bool((untouched == -1).all())


def test_a_failed_call_leaves_no_error_behind(gpu: Device) -> None:
    """After a device that does not exist, the next call works and reports nothing stale."""
    library = core()
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    codes, scales, amax = gpu.empty(64), gpu.empty(512), gpu.empty(16)
    args = QuantizeArgs(m=4, k=32, x=gpu.put(x), x_row_stride=32, row=Quantized(codes, scales, amax))
    assert library.fp4gemm_quantize(ctypes.byref(args), 99, None) != SUCCESS
    succeed(library.fp4gemm_quantize(ctypes.byref(args), 0, None))
    assert bool((gpu.get(amax, torch.empty(4)) == 1).all())


OTHER_DEVICE = """
import ctypes, torch
driver = ctypes.CDLL("libcuda.so.1")
def has_context(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return active.value
x, w = (torch.randn(64, 256, device="cuda:1", dtype=torch.bfloat16) for _ in range(2))
before = has_context(0)
import fp4gemm
fp4gemm.mm(fp4gemm.quantize(x), fp4gemm.quantize(w))
torch.cuda.synchronize(1)
print(before, has_context(0), torch.cuda.current_device())
"""


@pytest.mark.gpu
def test_a_call_for_another_device_creates_no_context_on_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    run = subprocess.run([sys.executable, "-c", OTHER_DEVICE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after, current = run.stdout.split()
    assert (before, current) == ("0", "0")
    assert after == "0", "cuda:0 has a context, although only cuda:1 was used"
