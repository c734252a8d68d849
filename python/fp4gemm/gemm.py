"""mm and scaled_mm: D = A @ B.T with every scale, an activation and an addend in the epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _checks, _gemm_checks, info, ops, selection, selftest
from .tensor import DecodedTensor, NVFP4Tensor

__all__ = ["mm", "scaled_mm"]

# fl32(1 / (36 * B_a * B_b)): what turns two amaxes into decode multipliers. Exact bits of float32.
ALPHA = {
    (448, 448): float.fromhex("0x1.293726p-23"),
    (448, 256): float.fromhex("0x1.041042p-22"),
    (256, 448): float.fromhex("0x1.041042p-22"),
    (256, 256): float.fromhex("0x1.c71c72p-22"),
}
# The operator below its Python wrapper, which costs a third of a microsecond a call; not for a tracer.
_OPERATOR = getattr(ops.scaled_mm, "_op", ops.scaled_mm)
_OUT_DTYPES = (None, *_checks.FLOAT_DTYPES)
_BETA = 1.0
_RULES = selection.RULES
_is_compiling = torch.compiler.is_compiling


def _first_scaled_mm(a: Tensor, *rest: Any) -> Tensor:
    """The operator on a device that is ready; stands in its place until no device may need a self-test."""
    global _SCALED_MM
    info.ready(a, "mm")
    if a.is_cuda and not any(map(selftest.is_due, range(torch.cuda.device_count()))):
        _SCALED_MM = _OPERATOR
    result: Tensor = _OPERATOR(a, *rest)
    return result


_SCALED_MM: Callable[..., Tensor] = _first_scaled_mm


def mm(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = _BETA,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (amax_b[n] * (amax_a[m] * acc[m, n])) + bias[n].

    acc = sum over k of (q_a s_a)(q_b s_b) in float32 and alpha = 1 / (36 * B_a * B_b); each operation rounds
    once to float32, in this order, then once to the output type; what is not given is not multiplied or
    added. That is ``act(a.dequantize() @ b.dequantize().T + bias) + beta * c`` up to rounding.

    Args:
        a: (m, k), any m >= 0; k a multiple of 32.
        b: (n, k), usually the weight; n a multiple of 8 (of 4 for float32 output). If blocks of k were
            rotated (hadamard), then those of both operands by the same signs: D is the product of the
            unrotated.
        bias: (n,) bfloat16, float16 or float32, contiguous; widened to float32.
        activation: None, "silu", "gelu_tanh" or "relu2" (max(z, 0)^2): act, made of float32 operations that
            round once each (:mod:`fp4gemm.reference.activations`), so that every device gives the same bits.
            "swiglu": D[m, j] = cast(silu(z[m, 2j]) * z[m, 2j + 1]), (m, n/2), gate and up being interleaved
            rows of b; n a multiple of 16, bfloat16 or float16 output, no c.
        c: (m, n) of the output type, laid out as out; it may be out itself, which then accumulates, but must
            not overlap it otherwise.
        beta: a finite Python number, the factor of c.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is the type of out, else bfloat16.
        out: (m, n), of swiglu (m, n/2), to write, of one of these types; unit stride along n, each row
            starting on 16 bytes.
        batch_invariant: True selects the kernel by n and k alone, so that the bits of a row of D do not
            depend on how many rows are beside it.
        kernel: a name from :func:`fp4gemm.kernels` to force; None selects by shape.

    Returns:
        out, or a new tensor of its shape on the device of a, written on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: k or n off their steps, k unequal; another shape, device, stride or alignment; an operand
            with groups (offs, see :func:`fp4gemm.grouped_mm`), operands with different hadamard_signs; an
            unknown activation or kernel; a beta without c.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; swiglu with c or
            float32 output; the device has no kernel for the operands or the one that is forced.
        RuntimeError: the self-test of a device of a new kind failed (:func:`fp4gemm.self_test`).
    """
    # The common call. Containers were checked when they were made and the operator checks how they fit, so
    # nothing is looked at here. What it refuses, the checks below explain.
    if (
        bias is None
        and out is None
        and activation is None
        and c is None
        and beta is _BETA
        and batch_invariant is False
        and kernel is None
        and not _RULES
        and not _is_compiling()
        and type(a) is NVFP4Tensor
        and type(b) is NVFP4Tensor
        and a.offs is None is b.offs
        and a.hadamard_signs == b.hadamard_signs
        and out_dtype in _OUT_DTYPES
    ):
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
        alpha = ALPHA[a.e4m3_max, b.e4m3_max]
        amax_a, amax_b = a.amax, b.amax
        if not amax_a.requires_grad and not amax_b.requires_grad:
            try:
                return _SCALED_MM(
                    a.codes, b.codes, a.scales, b.scales, alpha, amax_a, amax_b, None, dtype, None
                )
            except (RuntimeError, TypeError, ValueError):
                pass
    return checked_mm(
        "fp4gemm.mm",
        ("a", "b"),
        a,
        b,
        (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel),
    )


# bias, activation, c, beta, out_dtype, out, batch_invariant and kernel as mm takes them.
Terms = tuple[
    Tensor | None, str | None, Tensor | None, float, torch.dtype | None, Tensor | None, bool, str | None
]


def checked_mm(
    function: str,
    names: tuple[str, str],
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor,
    terms: Terms,
) -> Tensor:
    """mm with every check, of a function whose operands have these names."""
    data_a, scale_a, k_a = _operand(names[0], a)
    data_b, scale_b, k_b = _operand(names[1], b)
    dtype = _gemm_checks.resolved_dtype(terms[4], terms[5])
    # Looked at in place first: a layer with a bias comes here in every call.
    if a.hadamard_signs != b.hadamard_signs:
        same_rotation(names, a, b)
    if k_a != k_b or k_a % 32 or data_b.shape[0] % 8:
        _gemm_checks.sizes(k_a, k_b, data_b.shape[0], dtype, names)
    if data_a.device != data_b.device:
        _checks.same_device(names[1], data_b, data_a.device, names[0])
    _checks.no_grad(names[0], a.amax, function)
    _checks.no_grad(names[1], b.amax, function)
    alpha = ALPHA[a.e4m3_max, b.e4m3_max]
    return _run(function, (data_a, data_b, scale_a, scale_b, alpha, a.amax, b.amax), dtype, terms)


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
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = _BETA,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n].

    On raw tensors. acc = sum over k of (q_a s_a)(q_b s_b) in float32; each operation rounds once to float32,
    in this order, then once to the output type. What is not given is not multiplied or added. The alphas are
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
        bias, activation, c, beta, out_dtype, out, batch_invariant, kernel: as for :func:`mm`.

    Returns:
        out, or a new tensor of its shape on the device of a, written on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, stride, alignment or value; an unknown activation or kernel.
        NotImplementedError: as for :func:`mm`. RuntimeError: likewise.
    """
    a, scale_a = _gemm_checks.operand("a", a, scale_a)
    b, scale_b = _gemm_checks.operand("b", b, scale_b)
    dtype = _gemm_checks.resolved_dtype(out_dtype, out)
    _gemm_checks.arguments(a, b, alpha_row, alpha_col, dtype)
    terms = (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel)
    product = (a, b, scale_a, scale_b, _gemm_checks.alpha(alpha), alpha_row, alpha_col)
    return _run("fp4gemm.scaled_mm", product, dtype, terms)


_Product = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]


def _run(function: str, product: _Product, dtype: torch.dtype, terms: Terms) -> Tensor:
    """The operator on operands that were checked; checks of all that mm and scaled_mm share besides them."""
    bias, activation, c, beta, out_dtype, out, batch_invariant, kernel = terms
    a, b, scale_a, scale_b = product[:4]
    decoded = scale_a is None or scale_b is None
    info.ready(a, "mm")
    if decoded:
        info.ready(a, "mm of decoded operands")
    shape = (a.shape[0], b.shape[0])
    if bias is not None:
        bias = _gemm_checks.bias(bias, shape[1], a.device, function)
    act = 0 if activation is None else _gemm_checks.activation(activation)
    if act == _gemm_checks.SWIGLU:
        _gemm_checks.gated(shape[1], dtype, c)
        shape = (shape[0], _gemm_checks.width(shape[1], act))
    if beta is not _BETA:
        beta = _gemm_checks.beta(beta, c)
    if batch_invariant is not False:
        _checks.is_bool("batch_invariant", batch_invariant)
    if kernel is not None or _RULES:
        kernel = chosen_kernel(kernel, a, b.shape[0], decoded, dtype, "dense", act, batch_invariant)
    if out is not None:
        _gemm_checks.out(out, shape, out_dtype, a.device, function)
    if c is not None:
        _gemm_checks.c(c, shape, dtype, a.device, function)
    if out is not None:
        ops.scaled_mm_out(*product, bias, kernel, act, c, beta, batch_invariant, out=out)
        return out
    result: Tensor = ops.scaled_mm(*product, bias, dtype, kernel, act, c, beta, batch_invariant)
    return result


def _operand(name: str, value: NVFP4Tensor | DecodedTensor) -> tuple[Tensor, Tensor | None, int]:
    """(data, scales or None, k) of a matrix in a container of either kind, subclasses included."""
    data, scales = parts(name, value)
    if value.offs is not None:
        raise ValueError(
            f"{name}: has {value.offs.shape[0]} groups (offs), must have none; see fp4gemm.grouped_mm"
        )
    shape = data.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: shape is {tuple(value.shape)}, must have rank 2; see fp4gemm.grouped_mm")
    return data, scales, shape[1] if scales is None else 2 * shape[1]


def parts(name: str, value: object) -> tuple[Tensor, Tensor | None]:
    """(data, scales or None) of a container of either kind and any rank."""
    if isinstance(value, NVFP4Tensor):
        return value.codes, value.scales
    if isinstance(value, DecodedTensor):
        return value.data, None
    raise TypeError(
        f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor or fp4gemm.DecodedTensor "
        "(see fp4gemm.quantize; fp4gemm.scaled_mm takes raw tensors)"
    )


def same_rotation(
    names: tuple[str, str], a: NVFP4Tensor | DecodedTensor, b: NVFP4Tensor | DecodedTensor
) -> None:
    """Raise ValueError unless the blocks of both operands were rotated by the same signs, or neither's."""
    if a.hadamard_signs != b.hadamard_signs:
        signs = [
            "None (not rotated)" if t.hadamard_signs is None else f"{t.hadamard_signs:#06x}" for t in (a, b)
        ]
        raise ValueError(
            f"{names[1]}: hadamard_signs is {signs[1]}, must be {signs[0]} as of {names[0]} "
            "(rotate both operands alike)"
        )


def chosen_kernel(
    kernel: str | None,
    a: Tensor,
    n: int,
    decoded: bool,
    out_dtype: torch.dtype,
    mode: str,
    activation: int,
    batch_invariant: bool,
) -> str | None:
    """The kernel that the call forces, checked, or that the rules name; None leaves it to the library."""
    if kernel is not None:
        _check_kernel(kernel, a, decoded, out_dtype, mode, activation)
        return kernel
    if batch_invariant or not _RULES:
        return None
    gated = activation == _gemm_checks.SWIGLU
    return selection.find(a, n, _gemm_checks.depth(a), out_dtype, mode, gated, decoded)


def _check_kernel(
    kernel: object, a: Tensor, decoded: bool, out_dtype: torch.dtype, mode: str, activation: int
) -> None:
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
    if found.mode != mode:
        raise ValueError(f"kernel: {kernel!r} is of mode {found.mode}, must be of mode {mode}")
    epilogue = "swiglu" if activation == _gemm_checks.SWIGLU else "rowcol"
    if found.epilogue != epilogue:
        raise ValueError(
            f"kernel: {kernel!r} has the epilogue {found.epilogue}, must have {epilogue} for the activation"
        )
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
