"""The torch operators: loads the native library, registers the CPU and the fake implementations.

Schemas and CUDA kernels come from libfp4gemm_torch.so, built once against torch's stable ABI. The CPU
implementation is the reference; the fake ones give shapes and dtypes to torch.compile and torch.export.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _gemm_checks, _native, layout, reference

__all__ = [
    "decode",
    "dequantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "quantize",
    "quantize_both",
    "rms_norm_quantize",
    "scaled_grouped_mm",
    "scaled_grouped_mm_out",
    "scaled_mm",
    "scaled_mm_out",
    "silu_and_mul_quantize",
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
) -> Tensor:
    _cpu_kernel(kernel)
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
    *,
    out: Tensor,
) -> None:
    columns = _gemm_checks.width(b.shape[0], activation)
    _gemm_checks.out(out, (a.shape[0], columns), None, a.device, "fp4gemm.scaled_mm")
    out.copy_(
        _scaled_mm_cpu(
            a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, out.dtype, kernel, activation, c, beta
        )
    )


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
) -> Tensor:
    _cpu_kernel(kernel)
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
    *,
    out: Tensor,
) -> None:
    _cpu_kernel(kernel)
    product = (a, b, scale_a, scale_b, offs, alpha, alpha_groups, alpha_row, alpha_col, bias)
    reference.scaled_grouped_mm(*product, out.dtype, activation, c, beta, out)


def _parts(
    x: Tensor, rows: int, columns: int, amax: int, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and amax of a quantized (rows, columns) tensor on the device of x."""
    scale_rows, scale_columns = _checks.padded_scale_shape(rows, columns)
    if offs is not None:
        scale_rows = layout.grouped_scale_rows(rows, offs.shape[0])
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty((scale_rows, scale_columns), dtype=torch.float8_e4m3fn),
        x.new_empty((amax,), dtype=torch.float32),
    )


def _quantize_fake(
    x: Tensor,
    amax: Tensor | None,
    per_row: bool,
    axis: int = -1,
    block_rows: int = 1,
    encode: int = 0,
    four_over_six: int = 0,
    fast_error: bool = False,
    e4m3_max: int = 448,
    hadamard: int = 0,
    signs: int = 0,
    rng_state: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape if axis == -1 else (x.shape[1], x.shape[0])
    if axis == 0 and offs is not None:
        columns, offs = layout.grouped_columns(columns, offs.shape[0]), None
    expanded = offs is not None and not per_row  # one amax a group, repeated for its rows
    made = rows if per_row or expanded else 1
    return _parts(x, rows, columns, made if amax is None or expanded else 0, offs)


def _quantize_both_fake(
    x: Tensor,
    amax: Tensor | None,
    amax_t: Tensor | None,
    per_row: bool,
    block_rows: int = 1,
    encode: int = 0,
    four_over_six: int = 0,
    fast_error: bool = False,
    e4m3_max: int = 448,
    hadamard: int = 0,
    signs: int = 0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        *_quantize_fake(x, amax, per_row),
        *_quantize_fake(x, amax_t, per_row, axis=0),
    )


def _silu_and_mul_quantize_fake(x: Tensor, offs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    m, two_k = x.shape
    return _parts(x, m, two_k // 2, m, offs)


def _rms_norm_quantize_fake(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    return *_parts(x, m, k, m, None), x.new_empty((0,) if residual is None else (m, k))


def _dequantize_fake(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    e4m3_max: int,
    dtype: torch.dtype,
    swizzled: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype)


def _mxfp8_quantize_fake(x: Tensor, axis: int, dtype: torch.dtype, swizzled: bool) -> tuple[Tensor, Tensor]:
    m, k = x.shape if axis == -1 else (x.shape[1], x.shape[0])
    shape = _checks.mxfp8_scale_shape(m, k, swizzled)
    return x.new_empty((m, k), dtype=dtype), x.new_empty(shape, dtype=torch.float8_e8m0fnu)


def _mxfp8_dequantize_fake(values: Tensor, scales: Tensor, dtype: torch.dtype, swizzled: bool) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


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
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    batch_invariant: bool = False,
) -> Tensor:
    # What the call would be refused for with memory behind the tensors; one on meta brings the others here.
    _checks.same_device("b", b, a.device, "a")
    _checks.is_float_dtype("out_dtype", out_dtype)
    _gemm_checks.sizes(_depth(a, scale_a), _depth(b, scale_b), b.shape[0], out_dtype)
    _warn_untested(a)
    return a.new_empty((a.shape[0], _gemm_checks.width(b.shape[0], activation)), dtype=out_dtype)


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
) -> Tensor:
    _checks.same_device("b", b, a.device, "a")
    _checks.is_float_dtype("out_dtype", out_dtype)
    shape = _gemm_checks.grouped_sizes(
        a.shape[0], b.shape[-2], _depth(a, scale_a), _depth(b, scale_b), b.dim(), offs.shape[0], out_dtype
    )
    _warn_untested(a)
    return a.new_empty((*shape[:-1], _gemm_checks.width(shape[-1], activation)), dtype=out_dtype)


def _depth(data: Tensor, scale: Tensor | None) -> int:
    return data.shape[-1] * (1 if scale is None else 2)


def _warn_untested(a: Tensor) -> None:
    from . import selftest  # which imports this module

    if a.device.type == "cuda" and a.device.index is not None:
        selftest.warn_untested(a.device.index)


def _out_fake(a: Tensor, *args: object, out: Tensor, **kwargs: object) -> None:
    _warn_untested(a)


_load()

# Kept alive: deleting it would remove the registrations.
_CPU = torch.library.Library("fp4gemm", "IMPL", "CPU")
for _name, _cpu, _fake in (
    ("quantize", reference.quantize, _quantize_fake),
    ("quantize_both", reference.quantize_both, _quantize_both_fake),
    ("silu_and_mul_quantize", reference.silu_and_mul_quantize, _silu_and_mul_quantize_fake),
    ("rms_norm_quantize", reference.rms_norm_quantize, _rms_norm_quantize_fake),
    ("dequantize", reference.dequantize, _dequantize_fake),
    ("decode", reference.decode, _decode_fake),
    ("mxfp8_quantize", reference.mxfp8_quantize, _mxfp8_quantize_fake),
    ("mxfp8_dequantize", reference.mxfp8_dequantize, _mxfp8_dequantize_fake),
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
silu_and_mul_quantize = torch.ops.fp4gemm.silu_and_mul_quantize.default
rms_norm_quantize = torch.ops.fp4gemm.rms_norm_quantize.default
dequantize = torch.ops.fp4gemm.dequantize.default
decode = torch.ops.fp4gemm.decode.default
mxfp8_quantize = torch.ops.fp4gemm.mxfp8_quantize.default
mxfp8_dequantize = torch.ops.fp4gemm.mxfp8_dequantize.default
scaled_mm = torch.ops.fp4gemm.scaled_mm.default
scaled_mm_out = torch.ops.fp4gemm.scaled_mm_out.default
scaled_grouped_mm = torch.ops.fp4gemm.scaled_grouped_mm.default
scaled_grouped_mm_out = torch.ops.fp4gemm.scaled_grouped_mm_out.default
