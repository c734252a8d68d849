"""mm and scaled_mm: D = A @ B.T with every scale in the epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, info, ops
from .tensor import DecodedTensor, NVFP4Tensor

__all__ = ["mm", "scaled_mm"]

# fl32(1 / (36 * B_a * B_b)): what turns two amaxes into decode multipliers. Exact bits of float32.
_ALPHA = {
    (448, 448): float.fromhex("0x1.293726p-23"),
    (448, 256): float.fromhex("0x1.041042p-22"),
    (256, 448): float.fromhex("0x1.041042p-22"),
    (256, 256): float.fromhex("0x1.c71c72p-22"),
}
# The operator below its Python wrapper, which costs a third of a microsecond a call; not for a tracer.
_SCALED_MM = getattr(ops.scaled_mm, "_op", ops.scaled_mm)
_OUT_DTYPES = (None, *_checks.FLOAT_DTYPES)
_is_compiling = torch.compiler.is_compiling


def mm(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """D[m, n] = cast(alpha * (amax_b[n] * (amax_a[m] * acc[m, n])) + bias[n]), alpha = 1 / (36 * B_a * B_b).

    acc = sum over k of (q_a s_a)(q_b s_b) in float32; each multiply and the add round once to float32, in
    this order, then once to the output type. That is ``a.dequantize() @ b.dequantize().T + bias`` up to
    rounding.

    Args:
        a: (m, k), any m >= 0; k a multiple of 32.
        b: (n, k), usually the weight; n a multiple of 8 (of 4 for float32 output). If blocks of k were
            rotated (hadamard), then those of both operands by the same signs: D is the product of the
            unrotated.
        bias: (n,) bfloat16, float16 or float32, contiguous; widened to float32.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is the type of out, else bfloat16.
        out: (m, n) to write, of one of these types; unit stride along n, each row starting on 16 bytes.
        kernel: a name from :func:`fp4gemm.kernels` to force; None selects by shape.

    Returns:
        out, or a new (m, n) tensor on the device of a, written on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: k or n off their steps, k unequal; another shape, device, stride or alignment; an operand
            with groups (offs), operands with different hadamard_signs; an unknown kernel.
        NotImplementedError: an operand, bias or out requires grad while grad mode is on, or the device has no
            kernel for the operands or the one that is forced.
    """
    # The common call. Containers were checked when they were made and the operator checks how they fit, so
    # nothing is looked at here. What it refuses, the checks below explain.
    plain = bias is None and out is None and kernel is None and not _is_compiling()
    if (
        plain
        and type(a) is NVFP4Tensor
        and type(b) is NVFP4Tensor
        and a.offs is None is b.offs
        and a.hadamard_signs == b.hadamard_signs
        and out_dtype in _OUT_DTYPES
    ):
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
        alpha = _ALPHA[a.e4m3_max, b.e4m3_max]
        amax_a, amax_b = a.amax, b.amax
        if amax_a.requires_grad or amax_b.requires_grad:
            return _checked_mm(a, b, bias, out_dtype, out, kernel)
        try:
            result: Tensor = _SCALED_MM(
                a.codes, b.codes, a.scales, b.scales, alpha, amax_a, amax_b, None, dtype, None
            )
            return result
        except (RuntimeError, TypeError, ValueError):
            pass
    return _checked_mm(a, b, bias, out_dtype, out, kernel)


def _checked_mm(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    kernel: str | None,
) -> Tensor:
    data_a, scale_a, k_a = _operand("a", a)
    data_b, scale_b, k_b = _operand("b", b)
    if a.hadamard_signs != b.hadamard_signs:
        signs = [
            "None (not rotated)" if t.hadamard_signs is None else f"{t.hadamard_signs:#06x}" for t in (a, b)
        ]
        raise ValueError(
            f"b: hadamard_signs is {signs[1]}, must be {signs[0]} as of a (rotate both operands alike)"
        )
    dtype = _resolved(out_dtype, out)
    # Looked at in place first: a layer with a bias comes here in every call.
    if k_a != k_b or k_a % 32 or data_b.shape[0] % 8:
        _checks.gemm_sizes(k_a, k_b, data_b.shape[0], dtype)
    if data_a.device != data_b.device:
        _checks.same_device("b", data_b, data_a.device, "a")
    _checks.no_grad("a", a.amax, "fp4gemm.mm")
    _checks.no_grad("b", b.amax, "fp4gemm.mm")
    alpha = _ALPHA[a.e4m3_max, b.e4m3_max]
    return _run(
        "fp4gemm.mm",
        data_a,
        data_b,
        scale_a,
        scale_b,
        alpha,
        a.amax,
        b.amax,
        bias,
        dtype,
        out_dtype,
        out,
        kernel,
    )


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    *,
    alpha: float = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """D[m, n] = cast(alpha * (alpha_col[n] * (alpha_row[m] * acc[m, n])) + bias[n]), on raw tensors.

    acc = sum over k of (q_a s_a)(q_b s_b) in float32; each multiply and the add round once to float32, in
    this order, then once to the output type. What is not given is not multiplied or added. The alphas are
    decode multipliers: for an amax A made with the bound 448 the multiplier is A / 2688 (:func:`mm` does that
    for you); for checkpoints in the ModelOpt format it is weight_scale_2, for compressed-tensors
    1 / weight_global_scale.

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or decoded float16 (m, k).
            Contiguous, 16-byte aligned; m >= 0, k a multiple of 32.
        b: likewise, (n, k/2) or (n, k); n a multiple of 8 (of 4 for float32 output).
        scale_a: float8_e4m3fn (or uint8) (ceil128(m), ceil4(k/16)), swizzled; None if a is float16, and
            only then.
        scale_b: likewise for b.
        alpha: a finite Python number, rounded to float32.
        alpha_row: float32 (m,), one a row, or (1,).
        alpha_col: float32 (n,), one a column, or (1,).
        bias, out_dtype, out, kernel: as for :func:`mm`.

    Returns:
        out, or a new (m, n) tensor on the device of a, written on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, stride, alignment or value; an unknown kernel.
        NotImplementedError: a tensor requires grad while grad mode is on, or the device has no kernel.
    """
    a, scale_a = _checks.gemm_operand("a", a, scale_a)
    b, scale_b = _checks.gemm_operand("b", b, scale_b)
    dtype = _resolved(out_dtype, out)
    _checks.gemm_arguments(a, b, alpha_row, alpha_col, dtype)
    alpha = _checks.alpha(alpha)
    return _run(
        "fp4gemm.scaled_mm",
        a,
        b,
        scale_a,
        scale_b,
        alpha,
        alpha_row,
        alpha_col,
        bias,
        dtype,
        out_dtype,
        out,
        kernel,
    )


def _run(
    function: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    alpha_row: Tensor | None,
    alpha_col: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    kernel: str | None,
) -> Tensor:
    """The operator on operands that were checked; checks of all that mm and scaled_mm share besides them."""
    decoded = scale_a is None or scale_b is None
    info.ready(a, "mm")
    if decoded:
        info.ready(a, "mm of decoded operands")
    if bias is not None:
        bias = _checks.bias(bias, b.shape[0], a.device, function)
    if kernel is not None:
        _kernel(kernel, a, decoded, dtype)
    if out is not None:
        _checks.out(out, a.shape[0], b.shape[0], out_dtype, a.device, function)
        ops.scaled_mm_out(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, kernel, out=out)
        return out
    result: Tensor = ops.scaled_mm(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, dtype, kernel)
    return result


def _operand(name: str, value: object) -> tuple[Tensor, Tensor | None, int]:
    """(data, scales or None, k) of a container of either kind, subclasses included."""
    if isinstance(value, NVFP4Tensor):
        if value.offs is not None:
            raise ValueError(f"{name}: has {value.offs.shape[0]} groups (offs), must have none")
        return value.codes, value.scales, 2 * value.codes.shape[1]
    if isinstance(value, DecodedTensor):
        return value.data, None, value.data.shape[1]
    raise TypeError(
        f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor or fp4gemm.DecodedTensor "
        "(see fp4gemm.quantize; fp4gemm.scaled_mm takes raw tensors)"
    )


def _resolved(out_dtype: object, out: object) -> torch.dtype:
    """The output type that out_dtype and out ask for; bfloat16 when neither does."""
    if out_dtype is not None:
        _checks.is_float_dtype("out_dtype", out_dtype)
    if isinstance(out, Tensor):
        return out.dtype
    return out_dtype if isinstance(out_dtype, torch.dtype) else torch.bfloat16


def _kernel(kernel: object, a: Tensor, decoded: bool, out_dtype: torch.dtype) -> None:
    """Raise unless ``kernel`` can do the call: a built kernel on CUDA, the reference on the CPU."""
    if not isinstance(kernel, str):
        raise TypeError(
            f"kernel: got {_checks.describe(kernel)}, must be a name from fp4gemm.kernels() or None"
        )
    if not a.is_cuda:
        if kernel != _checks.CPU_KERNEL:
            raise ValueError(f"kernel: got {kernel!r}, must be None or {_checks.CPU_KERNEL!r} on the CPU")
        return
    if torch.compiler.is_compiling():
        return  # the operator checks when the graph runs
    found = info.kernel_by_name(kernel)
    if found is None:
        raise ValueError(f"kernel: got {kernel!r}, must be a name from fp4gemm.kernels() or None")
    if found.out_dtype is not out_dtype:
        raise ValueError(
            f"kernel: {kernel!r} writes {found.out_dtype}, must write {out_dtype}, the output type"
        )
    if decoded and found.operand == "nvfp4":
        raise ValueError(f"kernel: {kernel!r} reads packed operands, must read f16 for a DecodedTensor")
    if found.arch != info.kernel_family(a.get_device()):
        major, minor = torch.cuda.get_device_capability(a.device)
        raise NotImplementedError(
            f"kernel: {kernel!r} does not run on {a.device}, whose compute capability is {major}.{minor}"
        )
