"""The checks of the arguments of a GEMM, dense or grouped: operands, sizes, fused terms, outputs.

The facade and the reference share these checks. They follow the rules of :mod:`fp4gemm._checks`: an error
names the argument, the value it has and the value it must have, and no check reads device memory.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from .. import _checks, activations, layout
from .._checks import FLOAT_DTYPES, describe, has_dtype, has_shape, is_contiguous, listing, same_device
from ..activations import Activation
from ..containers import _fields
from ..ops.schema import GemmCall
from .options import group_ends

_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
_OPERAND_DTYPES = (*_CODES, torch.float16)
PLAIN = (torch.float16, torch.bfloat16)  # operands that are not packed codes; only a can be bfloat16


# ---- operands and sizes


def operand(name: str, x: object, scale: object) -> tuple[Tensor, Tensor | None]:
    """Check an operand of a dense GEMM and return (data, scales).

    The data are codes with scales, or float16 values, or bfloat16 values for a; values have no scales.
    """
    data = _checks.is_tensor(name, x)
    has_dtype(name, data, (*_CODES, *PLAIN) if name == "a" else _OPERAND_DTYPES)
    if data.dim() == 2 and not data.is_contiguous() and data.t().is_contiguous():
        rows = "m" if name == "a" else "n"
        raise ValueError(
            f"{name}: strides are {data.stride()} for shape {tuple(data.shape)}, must be contiguous with k "
            f"along the last dimension, ({rows}, k) or codes ({rows}, k/2): pass {name} without .T"
        )
    if data.dtype not in PLAIN:
        return _checks.packed_operand(name, data, f"scale_{name}", scale)
    _scale_is_none(name, data, scale)
    return _checks.decoded(name, data, PLAIN), None


def is_plain(a: object) -> TypeGuard[Tensor]:
    """Return whether a is a bfloat16 or float16 tensor and not a container."""
    return isinstance(a, Tensor) and a.dtype in PLAIN


def beside(a: Tensor, b: Tensor, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise TypeError if a is bfloat16 and b is decoded: no kernel multiplies bfloat16 by float16."""
    if a.dtype is torch.bfloat16 and b.dtype is torch.float16:
        raise TypeError(
            f"{names[1]}: dtype is torch.float16 (decoded), must be quantized or prepacked for bfloat16 "
            f"{names[0]}"
        )


def _scale_is_none(name: str, x: Tensor, scale: object) -> None:
    if scale is not None:
        why = "float16, already decoded" if x.dtype is torch.float16 else "bfloat16, not quantized"
        raise ValueError(f"scale_{name}: got {describe(scale)}, must be None because {name} is {why}")


def k_of(x: Tensor) -> int:
    """Return k of codes (.., k/2) or of values (.., k)."""
    return x.shape[-1] * (1 if x.dtype in PLAIN else 2)


def formats(a: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, b_rows: int) -> tuple[str, str]:
    """Return the formats (kernel_table.FORMATS) of checked operands a and b."""
    format_a = "nvfp4" if scale_a is not None else "bf16" if a.dtype is torch.bfloat16 else "fp16"
    return format_a, "prepacked" if b_rows else "fp16" if scale_b is None else "nvfp4"


def prepacked(call: GemmCall, k: int) -> None:
    """Raise unless b has the bytes of prepacked (b_rows, k) weights: (bytes,), or (g, bytes) with offs."""
    b, n = call.b, call.b_rows
    if call.scale_b is not None:
        raise ValueError(f"scale_b: got {describe(call.scale_b)}, must be None because b is prepacked")
    has_dtype("b", b, (torch.uint8,))
    _checks.has_rank("b", b, *((1, "(bytes,)") if call.offs is None else (2, "(g, bytes)")))
    if b.shape[-1] != _checks.prepacked_bytes(n, k):
        raise ValueError(
            f"b: shape is {tuple(b.shape)}, must have {_checks.prepacked_bytes(n, k)} bytes a matrix, "
            f"prepacked (n, k) = ({n}, {k})"
        )
    is_contiguous("b", b)
    _checks.is_aligned("b", b)


def is_ragged_k(call: GemmCall) -> bool:
    """Return whether the groups divide k. They divide m if b has a matrix for each group."""
    return call.offs is not None and not call.b_rows and call.b.dim() == 2


def checked_operands(call: GemmCall) -> GemmCall:
    """Check the operands and offs of a call of raw tensors, except whether the sizes of a and b match.

    The result is the call with codes viewed as uint8 and scales viewed as float8_e4m3fn.
    """
    if call.offs is None:
        a, scale_a = operand("a", call.a, call.scale_a)
        b, scale_b = operand("b", call.b, call.scale_b)
        same_device("b", b, a.device, "a")
        beside(a, b)
        if a is call.a and b is call.b and scale_a is call.scale_a and scale_b is call.scale_b:
            return call
        return call._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    a, b, scale_a, scale_b, offs = grouped_operands(call)
    return call._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)


def checked_shape(call: GemmCall, out_dtype: torch.dtype) -> tuple[int, ...]:
    """Check the sizes, alpha_row and alpha_col of a call that :func:`checked_operands` returned.

    The result is the shape of the accumulator, (m, n) or (g, m, n).
    """
    a, b = call.a, call.b
    m, n = a.shape[0], b.shape[-2]
    groups = None if call.offs is None else call.offs.shape[0]
    groups_of_k = groups if is_ragged_k(call) else None
    shape = product_shape(m, k_of(a), n, k_of(b), groups_of_k, out_dtype)
    if call.alpha_row is not None:
        vector("alpha_row", call.alpha_row, m, groups_of_k, a.device)
    if call.alpha_col is not None:
        vector("alpha_col", call.alpha_col, n, groups, a.device)
    return shape


def product_shape(
    m: int,
    k_a: int,
    n: int,
    k_b: int,
    groups_of_k: int | None,
    out_dtype: torch.dtype,
    names: tuple[str, str] = ("a", "b"),
) -> tuple[int, ...]:
    """Check the sizes and return (m, n), or (g, m, n) if g = ``groups_of_k`` groups divide k."""
    if groups_of_k is None:
        sizes(k_a, k_b, n, out_dtype, names)
        return m, n
    _same_k(k_a, k_b, names)
    _columns(n, out_dtype, names)
    return groups_of_k, m, n


def sizes(k_a: int, k_b: int, n: int, out_dtype: torch.dtype, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise unless k_a and k_b are equal and multiples of 32 and a row of D is a multiple of 16 bytes."""
    _checks.is_multiple(names[0], "k", k_a, _checks.K_STEP_MM)
    _same_k(k_a, k_b, names)
    _columns(n, out_dtype, names)


def _same_k(k_a: int, k_b: int, names: tuple[str, str]) -> None:
    if k_a != k_b:
        raise ValueError(f"{names[1]}: k is {k_b}, must be {k_a}, the k of {names[0]}")


def _columns(n: int, out_dtype: torch.dtype, names: tuple[str, str]) -> None:
    """Raise ValueError unless a row of n outputs is a multiple of 16 bytes."""
    step = 4 if out_dtype is torch.float32 else 8
    if n % step:
        raise ValueError(f"{names[1]}: n is {n}, must be a multiple of {step} for {out_dtype} output")


# ---- terms of the epilogue


def number(name: str, value: object, elsewhere: str = "") -> float:
    """Check and return a number that is finite in float32; reading a tensor would synchronise."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, must be a Python number{elsewhere}")
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: got {describe(value)}, must be a Python number")
    if not -_checks.FLOAT32_MAX <= value <= _checks.FLOAT32_MAX:
        raise ValueError(f"{name}: got {value}, must be finite in float32")
    return float(value)


def activation_of_name(name: object) -> Activation:
    """Return the activation with this name."""
    found = activations.by_name.get(name) if name is None or isinstance(name, str) else None
    if found is None:
        wanted = listing([repr(known) for known in activations.by_name])
        if isinstance(name, str):
            raise ValueError(f"activation: got {name!r}, must be {wanted}")
        raise TypeError(f"activation: got {describe(name)}, must be {wanted}")
    return found


def activation_of_number(number: object) -> Activation:
    """Return the activation with this number. The operators identify activations by number."""
    wanted = listing(list(activations.by_number))
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"activation: got {describe(number)}, must be {wanted}")
    if number not in activations.by_number:
        raise ValueError(f"activation: got {number}, must be {wanted}")
    return activations.by_number[number]


def gated(activation: Activation, n: int, out_dtype: torch.dtype, c: object, is_ragged_k: bool) -> None:
    """Raise unless a gated activation can be combined with the other arguments.

    n must be a multiple of 16, because 16 bytes of D are 8 outputs, which need 16 columns of z.
    """
    name = activation.name
    if is_ragged_k:
        raise NotImplementedError(f"activation: got {name}, must be another one with ragged k")
    if out_dtype is torch.float32:
        raise NotImplementedError(
            f"activation: got {name} with torch.float32 output, must be another one, or the output "
            "torch.bfloat16 or torch.float16"
        )
    if c is not None:
        raise NotImplementedError(f"activation: got {name} with c, must be another one, or c None")
    if n % 16:
        raise ValueError(f"activation: got {name} with n = {n}, must be another one, or n a multiple of 16")


def beta(value: object, c: object) -> float:
    """Check and return the factor of c; it must be 1 without c."""
    result = number("beta", value)
    if c is None and result != 1.0:
        raise ValueError(f"beta: got {value}, must be omitted without c")
    return result


def bias(value: object, n: int, device: torch.device, function: str, groups: int | None = None) -> Tensor:
    """Check a contiguous bias, (n,) or for groups (g, n), and convert it to float32, which is exact."""
    x = _checks.is_tensor("bias", value)
    has_dtype("bias", x, FLOAT_DTYPES)
    if groups is None:
        has_shape("bias", x, (n,))
    elif tuple(x.shape) not in ((n,), (groups, n)):
        raise ValueError(f"bias: shape is {tuple(x.shape)}, must be ({n},) or ({groups}, {n})")
    same_device("bias", x, device, "the operands")
    is_contiguous("bias", x)
    _checks.no_grad("bias", x, function)
    return x if x.dtype is torch.float32 else x.to(torch.float32)


def out(
    value: object,
    shape: tuple[int, ...],
    out_dtype: torch.dtype | None,
    device: torch.device,
    function: str,
) -> Tensor:
    """Check and return an output (m, n) or (g, m, n): rows have unit stride and start 16-byte aligned."""
    x = _checks.is_tensor("out", value)
    has_dtype("out", x, FLOAT_DTYPES)
    if out_dtype is not None:
        _checks.is_float_dtype("out_dtype", out_dtype)
    if out_dtype is not None and out_dtype is not x.dtype:
        raise ValueError(f"out_dtype: got {out_dtype}, must be {x.dtype}, the dtype of out (or omitted)")
    _matrix("out", x, shape, device, function)
    return x


def c(value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, function: str) -> None:
    """Raise unless c has the shape and the dtype of the output and strides that an output may have."""
    x = _checks.is_tensor("c", value)
    if x.dtype is not dtype:
        has_dtype("c", x, FLOAT_DTYPES)
        raise TypeError(f"c: dtype is {x.dtype}, must be {dtype}, the output type")
    _matrix("c", x, shape, device, function)


def _matrix(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device, function: str) -> None:
    has_shape(name, x, shape)
    same_device(name, x, device, "the operands")
    _checks.rows_are_aligned(name, x)
    groups, rows = (1, shape[0]) if len(shape) == 2 else shape[:2]
    if groups > 1 and rows > 0 and x.stride(0) != rows * x.stride(1):
        raise ValueError(
            f"{name}: stride between groups is {x.stride(0)}, must be {rows * x.stride(1)}, "
            f"{rows} rows of stride {x.stride(1)} (use .contiguous())"
        )
    _checks.no_grad(name, x, function)


def resolved_dtype(out_dtype: object, out: object) -> torch.dtype:
    """Return the dtype of out, else out_dtype, else bfloat16."""
    if out_dtype is not None:
        _checks.is_float_dtype("out_dtype", out_dtype)
    if isinstance(out, Tensor):
        return out.dtype
    return out_dtype if isinstance(out_dtype, torch.dtype) else torch.bfloat16


# ---- groups


def grouped_operands(call: GemmCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Check the operands of a grouped call one by one and return (a, b, scale_a, scale_b, offs)."""
    data_b = _checks.is_tensor("b", call.b)
    if data_b.dim() not in (2, 3):
        raise ValueError(
            f"b: shape is {tuple(data_b.shape)}, must have rank 3, (g, n, k/2), for ragged m, "
            "or 2, (n, k/2), for ragged k"
        )
    data_a = _checks.is_tensor("a", call.a)
    ends = group_ends(call.offs, data_a.device, "a")
    if data_b.dim() == 3:
        checked_a, scales_a = _rows_operand(data_a, call.scale_a, ends.shape[0])
        checked_b, scales_b = _batched_operand(data_b, call.scale_b, ends.shape[0])
    else:
        checked_a, scales_a = _columns_operand("a", data_a, call.scale_a)
        checked_b, scales_b = _columns_operand("b", data_b, call.scale_b)
    same_device("b", checked_b, checked_a.device, "a")
    beside(checked_a, checked_b)
    return checked_a, checked_b, scales_a, scales_b, ends


def _rows_operand(a: Tensor, scale: object, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Check a (m, k) for ragged m; the scales of each group begin at a multiple of 128 rows."""
    has_dtype("a", a, (*_CODES, *PLAIN))
    if a.dtype in PLAIN:
        _scale_is_none("a", a, scale)
        return _checks.decoded("a", a, PLAIN), None
    packed = _checks.codes("a", a)
    m, k = packed.shape[0], k_of(packed)
    rows = layout.grouped_scale_rows(m, num_groups)
    return packed, _checks.scales("scale_a", scale, m, k, packed.device, "a", rows)


def _batched_operand(b: Tensor, scale: object, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Check b for ragged m: a matrix (n, k) for each group, with its own scales."""
    has_dtype("b", b, _OPERAND_DTYPES)
    if b.shape[0] != num_groups:
        raise ValueError(
            f"b: shape is {tuple(b.shape)}, must be ({num_groups}, n, k), a matrix for each end of offs"
        )
    _, n, _ = b.shape
    k = k_of(b)
    _checks.is_multiple("b", "k", k, _checks.BLOCK)
    is_contiguous("b", b)
    _checks.is_aligned("b", b)
    _checks.no_grad("b", b, "fp4gemm.scaled_grouped_mm")
    if b.dtype is torch.float16:
        _scale_is_none("b", b, scale)
        return b, None
    scales = _fields.stack_scales("scale_b", scale, num_groups, n, k, b.device, "b")
    return _checks.as_codes(b), scales


def _columns_operand(name: str, x: Tensor, scale: object) -> tuple[Tensor, Tensor | None]:
    """Check an operand (rows, k) of ragged k, whose groups start at multiples of 64; k may be 0."""
    has_dtype(name, x, _OPERAND_DTYPES)
    decoded = x.dtype is torch.float16
    _fields.columns(name, x, 1 if decoded else 2)
    if decoded:
        _scale_is_none(name, x, scale)
        return x, None
    scales = _checks.scales(f"scale_{name}", scale, x.shape[0], k_of(x), x.device, name)
    return _checks.as_codes(x), scales


def vector(name: str, value: object, length: int, groups: int | None, device: torch.device) -> Tensor:
    """Check and return float32 (length,) or (1,); for groups also (groups, length) or (groups, 1)."""
    if groups is None:
        return _checks.vector(name, value, length, device, "a")
    x = _checks.is_tensor(name, value)
    has_dtype(name, x, (torch.float32,))
    shapes = ((length,), (1,), (groups, length), (groups, 1))
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {listing(shapes)}")
    same_device(name, x, device, "a")
    is_contiguous(name, x)
    _checks.no_grad(name, x, "fp4gemm.scaled_grouped_mm")
    return x


def alpha(call: GemmCall, function: str, name: str = "alpha_groups") -> float:
    """Check alpha and alpha_groups, float32 (g,), and return alpha, which must be 1 with alpha_groups.

    ``name`` is the name of the caller's parameter for alpha_groups.
    """
    elsewhere = " (a float32 tensor goes into alpha_row or alpha_col)" if call.offs is None else ""
    result = number("alpha", call.alpha, elsewhere)
    if call.alpha_groups is not None:
        if call.offs is None:
            raise ValueError(f"alpha_groups: got {describe(call.alpha_groups)}, must be None without offs")
        groups = call.offs.shape[0]
        _checks.exact_vector(name, call.alpha_groups, groups, torch.float32, call.a.device, "a", function)
        if result != 1.0:
            raise ValueError(f"alpha: got {call.alpha}, must be 1 with alpha_groups")
    return result
