"""The torch operators: loads the native library, registers the CPU and the fake implementations.

Schemas and CUDA kernels come from libfp4gemm_torch.so, built once against torch's stable ABI. The CPU
implementation is the reference; the fake ones give shapes and dtypes to torch.compile and torch.export.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _gemm_checks, _native, _quantize_fakes, reference, support

__all__ = [
    "decode",
    "dequantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "prepack",
    "quantize",
    "quantize_both",
    "quantize_decoded",
    "rms_norm_quantize",
    "rms_norm_quantize_decoded",
    "scaled_grouped_mm",
    "scaled_grouped_mm_out",
    "scaled_mm",
    "scaled_mm_out",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_decoded",
    "unpack",
]


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


def _unpacked(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, b_rows: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a prepacked b."""
    k = _depth(a, scale_a)
    _gemm_checks.prepacked(b, scale_b, b_rows, k, rank)
    codes, scales = unpack(b, b_rows, k)
    return codes, scales


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
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
) -> Tensor:
    _cpu_kernel(kernel)
    if b_rows:
        b, scale_b = _unpacked(a, b, scale_a, scale_b, b_rows, 1)
    return reference.scaled_mm(
        a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, out_dtype, activation, c, beta
    )


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
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
    *,
    out: Tensor,
) -> None:
    columns = _gemm_checks.width(b_rows or b.shape[0], activation)
    _gemm_checks.out(out, (a.shape[0], columns), None, a.device, "fp4gemm.scaled_mm")
    product = (a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias)
    terms = (kernel, activation, c, beta, batch_invariant, b_rows)
    out.copy_(_scaled_mm_cpu(*product, out.dtype, *terms))


def _scaled_grouped_mm_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    alpha: float,
    alpha_groups: Tensor | None,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    kernel: str | None,
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
) -> Tensor:
    _cpu_kernel(kernel)
    if b_rows:
        b, scale_b = _unpacked(a, b, scale_a, scale_b, b_rows, 2)
    product = (a, b, scale_a, scale_b, offs, alpha, alpha_groups, alpha_row, alpha_col, bias)
    return reference.scaled_grouped_mm(*product, out_dtype, activation, c, beta)


def _scaled_grouped_mm_out_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    alpha: float,
    alpha_groups: Tensor | None,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    kernel: str | None,
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
    *,
    out: Tensor,
) -> None:
    _cpu_kernel(kernel)
    if b_rows:
        b, scale_b = _unpacked(a, b, scale_a, scale_b, b_rows, 2)
    product = (a, b, scale_a, scale_b, offs, alpha, alpha_groups, alpha_row, alpha_col, bias)
    reference.scaled_grouped_mm(*product, out.dtype, activation, c, beta, out)


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
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
) -> Tensor:
    # What the call would be refused for with memory behind the tensors; one on meta brings the others here.
    _checks.same_device("b", b, a.device, "a")
    _checks.is_float_dtype("out_dtype", out_dtype)
    k = _depth(a, scale_a)
    if b_rows:
        _gemm_checks.prepacked(b, scale_b, b_rows, k, 1)
    n = b_rows or b.shape[0]
    _gemm_checks.sizes(k, k if b_rows else _depth(b, scale_b), n, out_dtype)
    support.warn_untested(a)
    return a.new_empty((a.shape[0], _gemm_checks.width(n, activation)), dtype=out_dtype)


def _scaled_grouped_mm_fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    alpha: float,
    alpha_groups: Tensor | None,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    kernel: str | None,
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
    b_rows: int = 0,
) -> Tensor:
    _checks.same_device("b", b, a.device, "a")
    _checks.is_float_dtype("out_dtype", out_dtype)
    k = _depth(a, scale_a)
    size_b = (b_rows, k, 3)
    if b_rows:
        _gemm_checks.prepacked(b, scale_b, b_rows, k, 2)
    else:
        size_b = (b.shape[-2], _depth(b, scale_b), b.dim())
    shape = _gemm_checks.grouped_sizes(a.shape[0], k, *size_b, offs.shape[0], out_dtype)
    support.warn_untested(a)
    return a.new_empty((*shape[:-1], _gemm_checks.width(shape[-1], activation)), dtype=out_dtype)


def _depth(data: Tensor, scale: Tensor | None) -> int:
    return data.shape[-1] * (1 if scale is None else 2)


def _out_fake(a: Tensor, *args: object, out: Tensor, **kwargs: object) -> None:
    support.warn_untested(a)


_load()

# Kept alive: deleting it would remove the registrations.
_CPU = torch.library.Library("fp4gemm", "IMPL", "CPU")
for _name, _cpu, _fake in (
    ("quantize", reference.quantize, _quantize_fakes.quantize),
    ("quantize_both", reference.quantize_both, _quantize_fakes.quantize_both),
    ("quantize_decoded", reference.quantize_decoded, _quantize_fakes.quantize_decoded),
    ("silu_and_mul_quantize", reference.silu_and_mul_quantize, _quantize_fakes.silu_and_mul_quantize),
    (
        "silu_and_mul_quantize_decoded",
        reference.silu_and_mul_quantize_decoded,
        _quantize_fakes.silu_and_mul_quantize_decoded,
    ),
    ("rms_norm_quantize", reference.rms_norm_quantize, _quantize_fakes.rms_norm_quantize),
    (
        "rms_norm_quantize_decoded",
        reference.rms_norm_quantize_decoded,
        _quantize_fakes.rms_norm_quantize_decoded,
    ),
    ("dequantize", reference.dequantize, _quantize_fakes.dequantize),
    ("decode", reference.decode, _quantize_fakes.decode),
    ("prepack", reference.prepack, _quantize_fakes.prepack),
    ("unpack", reference.unpack, _quantize_fakes.unpack),
    ("mxfp8_quantize", reference.mxfp8_quantize, _quantize_fakes.mxfp8_quantize),
    ("mxfp8_dequantize", reference.mxfp8_dequantize, _quantize_fakes.mxfp8_dequantize),
    ("scaled_mm", _scaled_mm_cpu, _scaled_mm_fake),
    ("scaled_mm_out", _scaled_mm_out_cpu, _out_fake),
    ("scaled_grouped_mm", _scaled_grouped_mm_cpu, _scaled_grouped_mm_fake),
    ("scaled_grouped_mm_out", _scaled_grouped_mm_out_cpu, _out_fake),
):
    _CPU.impl(_name, _cpu)
    torch.library.register_fake(f"fp4gemm::{_name}", _fake)

# The overloads, bound once: an attribute walk through torch.ops costs about a microsecond a call.
quantize = torch.ops.fp4gemm.quantize.default
quantize_both = torch.ops.fp4gemm.quantize_both.default
quantize_decoded = torch.ops.fp4gemm.quantize_decoded.default
silu_and_mul_quantize = torch.ops.fp4gemm.silu_and_mul_quantize.default
silu_and_mul_quantize_decoded = torch.ops.fp4gemm.silu_and_mul_quantize_decoded.default
rms_norm_quantize = torch.ops.fp4gemm.rms_norm_quantize.default
rms_norm_quantize_decoded = torch.ops.fp4gemm.rms_norm_quantize_decoded.default
dequantize = torch.ops.fp4gemm.dequantize.default
decode = torch.ops.fp4gemm.decode.default
prepack = torch.ops.fp4gemm.prepack.default
unpack = torch.ops.fp4gemm.unpack.default
mxfp8_quantize = torch.ops.fp4gemm.mxfp8_quantize.default
mxfp8_dequantize = torch.ops.fp4gemm.mxfp8_dequantize.default
scaled_mm = torch.ops.fp4gemm.scaled_mm.default
scaled_mm_out = torch.ops.fp4gemm.scaled_mm_out.default
scaled_grouped_mm = torch.ops.fp4gemm.scaled_grouped_mm.default
scaled_grouped_mm_out = torch.ops.fp4gemm.scaled_grouped_mm_out.default
