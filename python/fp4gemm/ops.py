"""The torch operators: loads the native library, registers the CPU and the fake implementations.

Schemas and CUDA kernels come from libfp4gemm_torch.so, built once against torch's stable ABI. The CPU
implementation is the reference; the fake ones give shapes and dtypes to torch.compile and torch.export.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _native, reference

__all__ = ["decode", "dequantize", "quantize", "scaled_mm", "scaled_mm_out"]


def _load() -> None:
    path = _native.library_path(_native.TORCH_LIBRARY)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"fp4gemm: cannot load {path} under torch {torch.__version__} (2.11 or newer is needed): {error}"
        ) from error


def _cpu_kernel(kernel: str | None) -> None:
    if kernel is not None and kernel != _checks.CPU_KERNEL:
        raise ValueError(f"kernel: got {kernel!r}, must be None or {_checks.CPU_KERNEL!r} on the CPU")


def _scaled_mm_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    kernel: str | None,
) -> Tensor:
    _cpu_kernel(kernel)
    return reference.scaled_mm(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, out_dtype)


def _scaled_mm_out_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    kernel: str | None,
    *,
    out: Tensor,
) -> None:
    _checks.out(out, a.shape[0], b.shape[0], None, a.device, "fp4gemm.scaled_mm")
    out.copy_(_scaled_mm_cpu(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, out.dtype, kernel))


def _quantize_fake(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    return (
        x.new_empty((m, k // 2), dtype=torch.uint8),
        x.new_empty(_checks.padded_scale_shape(m, k), dtype=torch.float8_e4m3fn),
        x.new_empty((m if per_row else 1,), dtype=torch.float32),
    )


def _dequantize_fake(
    codes: Tensor, scales: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype)


def _decode_fake(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16)


def _scaled_mm_fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    kernel: str | None,
) -> Tensor:
    # What the call would be refused for with memory behind the tensors; one on meta brings the others here.
    _checks.same_device("b", b, a.device, "a")
    _checks.is_float_dtype("out_dtype", out_dtype)
    k_a, k_b = (x.shape[1] * (1 if scale is None else 2) for x, scale in ((a, scale_a), (b, scale_b)))
    _checks.gemm_sizes(k_a, k_b, b.shape[0], out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _scaled_mm_out_fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    kernel: str | None,
    *,
    out: Tensor,
) -> None:
    return None


_load()

# Kept alive: deleting it would remove the registrations.
_CPU = torch.library.Library("fp4gemm", "IMPL", "CPU")
_CPU.impl("quantize", reference.quantize)
_CPU.impl("dequantize", reference.dequantize)
_CPU.impl("decode", reference.decode)
_CPU.impl("scaled_mm", _scaled_mm_cpu)
_CPU.impl("scaled_mm_out", _scaled_mm_out_cpu)

torch.library.register_fake("fp4gemm::quantize", _quantize_fake)
torch.library.register_fake("fp4gemm::dequantize", _dequantize_fake)
torch.library.register_fake("fp4gemm::decode", _decode_fake)
torch.library.register_fake("fp4gemm::scaled_mm", _scaled_mm_fake)
torch.library.register_fake("fp4gemm::scaled_mm_out", _scaled_mm_out_fake)

# The overloads, bound once: an attribute walk through torch.ops costs about a microsecond a call.
quantize = torch.ops.fp4gemm.quantize.default
dequantize = torch.ops.fp4gemm.dequantize.default
decode = torch.ops.fp4gemm.decode.default
scaled_mm = torch.ops.fp4gemm.scaled_mm.default
scaled_mm_out = torch.ops.fp4gemm.scaled_mm_out.default
