"""The operators gemm and gemm_out: products with a fused epilogue, dense or of groups.

The checks are those of the public functions too. They follow the rules of :mod:`fp4gemm._checks`: an error
names the argument, the value it has and the value it must have, and none but those of the CPU reads device
memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .. import _checks, activations, layout, support
from .._checks import FLOAT_DTYPES, describe, has_dtype, has_shape, is_contiguous, listing, same_device
from .._formats import (
    MXFP8,
    NVFP4,
    BlockFormat,
    are_multiplied,
    format_of,
    formats_beside,
    has_block_scales,
)
from ..activations import Activation
from ..reference.chunks import fp32, row_chunks
from ..reference.epilogue import ALPHA, ALPHA_FP8, ALPHA_UNQUANTIZED, Epilogue, Terms
from ..reference.fp8 import transposed
from ..reference.gemm import Operand, Product, is_fp8, multiply, ragged_k, ragged_m
from ..reference.nvfp4 import folded
from ._call import Operator, accepts, has_parameters, parameters_of
from .convert import decode_rows, unprepack
from .parts import OperandParts

__all__ = ["OPERATORS", "GemmCall", "activate", "gemm", "gemm_compiled", "gemm_fake", "gemm_out"]

# Elements of a right operand that are decoded at a time: 2 MB as float64, which stay in the cache until they
# are multiplied.
_DECODED_ELEMS = 1 << 18

_OPERAND_DTYPES = (*_checks.CODE_DTYPES, torch.float16)
PLAIN = (torch.float16, torch.bfloat16)  # operands that are not packed codes; only a can be bfloat16
FP8 = torch.float8_e4m3fn  # tokens with one scale for each row, only a; or MXFP8, which has block scales
_VALUES = (*PLAIN, FP8)


class GemmCall(NamedTuple):
    """``gemm``, dense (offs is None) or grouped. ``gemm_out`` has ``out`` in place of out_dtype."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    offs: Tensor | None = None
    alpha: float = 1.0
    alpha_groups: Tensor | None = None
    alpha_row: Tensor | None = None
    alpha_col: Tensor | None = None
    bias: Tensor | None = None
    activation: int = 0
    c: Tensor | None = None
    beta: float = 1.0
    batch_invariant: bool = False
    use_fast_accum: bool = False
    b_rows: int = 0  # n of a prepacked b; 0: b is not prepacked
    kernel_name: str | None = None  # not "kernel", which collides with a parameter inside torch's inductor
    out_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(
        cls, a: Tensor | OperandParts, b: OperandParts, offs: Tensor | None = None, **more: Any
    ) -> GemmCall:
        """The product of operands with all their factors and the bias of b; a Tensor is not quantized."""
        if isinstance(a, OperandParts):
            data, scales, amax = a.data, a.scales, a.amax
            if data.dtype is not FP8:
                alpha = ALPHA[a.e4m3_max, b.e4m3_max]
            else:  # 1 with block scales, which MXFP8 has
                alpha = ALPHA_FP8[b.e4m3_max] if scales is None else 1.0
        else:
            data, scales, amax, alpha = a, None, None, ALPHA_UNQUANTIZED[b.e4m3_max]
        data_b, scales_b, amax_b, _, rows, bias = b
        return cls(data, data_b, scales, scales_b, offs, alpha, None, amax, amax_b, bias, b_rows=rows, **more)


def _accepts_out(function: Callable[[GemmCall, Tensor], None]) -> Callable[..., None]:
    """Turn a function of a call and its out into one with the parameters of ``gemm_out``.

    The dtype of out takes the place of out_dtype.
    """

    @functools.wraps(function)
    def with_parameters(*args: Any, out: Tensor, **kwargs: Any) -> None:
        # out_dtype is the last parameter, so that the others have the same places as in gemm.
        call = GemmCall(*args, **kwargs)
        function(call._replace(out_dtype=getattr(out, "dtype", call.out_dtype)), out)

    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation="Tensor")
    has_parameters(with_parameters, [*parameters_of(GemmCall)[:-1], out], function)
    return with_parameters


# ---- operands and sizes


def operand(name: str, x: object, scale: object) -> tuple[Tensor, Tensor | None]:
    """Check an operand of a dense GEMM and return (data, scales).

    The data are codes or MXFP8 values with scales, or float16 values, or bfloat16 values or FP8 tokens for a;
    these have no scales.
    """
    data = _checks.is_tensor(name, x)
    has_dtype(name, data, _dtypes(name, scale))
    if data.dim() == 2 and not data.is_contiguous() and data.t().is_contiguous():
        rows = "m" if name == "a" else "n"
        raise ValueError(
            f"{name}: strides are {data.stride()} for shape {tuple(data.shape)}, must be contiguous with k "
            f"along the last dimension, ({rows}, k) or codes ({rows}, k/2): pass {name} without .T"
        )
    if _has_scales(data, scale):
        return _checks.packed_operand(name, data, f"scale_{name}", scale, format_of(data, scale))
    return _values_operand(name, data, scale), None


def _dtypes(name: str, scale: object) -> tuple[torch.dtype, ...]:
    """The dtypes that an operand may have, beside scales or without."""
    if name == "a":
        return (*_checks.CODE_DTYPES, *_VALUES)
    return _OPERAND_DTYPES if scale is None else (*_OPERAND_DTYPES, *MXFP8.data_dtypes)


def _has_scales(data: Tensor, scale: object) -> bool:
    """Whether data of an allowed dtype are codes or MXFP8 values; a scale beside other values is refused."""
    return has_block_scales(data, scale) and data.dtype not in PLAIN


def _values_operand(name: str, data: Tensor, scale: object) -> Tensor:
    """Check an operand of values, FP8 tokens or values that are decoded or were never quantized."""
    _scale_is_none(name, data, scale)
    return _checks.fp8_tokens(name, data) if data.dtype is FP8 else _checks.decoded(name, data, PLAIN)


def is_plain(a: object) -> TypeGuard[Tensor]:
    """Return whether a is a bfloat16 or float16 tensor and not a container."""
    return isinstance(a, Tensor) and a.dtype in PLAIN


def beside(a: Tensor, b: Tensor, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise TypeError if a is bfloat16 or FP8 and b is decoded: no kernel multiplies it by float16."""
    if a.dtype in (torch.bfloat16, FP8) and b.dtype is torch.float16:
        kind = "FP8 tokens" if a.dtype is FP8 else "bfloat16"
        raise TypeError(
            f"{names[1]}: dtype is torch.float16 (decoded), must be quantized or prepacked for {kind} "
            f"{names[0]}"
        )


def _scale_is_none(name: str, x: Tensor, scale: object) -> None:
    if scale is not None:
        kinds = {torch.float16: "float16, already decoded", torch.bfloat16: "bfloat16, not quantized"}
        why = kinds.get(x.dtype, "FP8 tokens, whose amax is alpha_row")
        raise ValueError(f"scale_{name}: got {describe(scale)}, must be None because {name} is {why}")


def k_of(x: Tensor) -> int:
    """Return k of codes (.., k/2) or of values (.., k)."""
    return x.shape[-1] * (1 if x.dtype in _VALUES else 2)


_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "e4m3"}


def formats(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, b_rows: int
) -> tuple[str, str]:
    """Return the formats (kernel_table.FORMATS) of checked operands a and b."""
    format_a = _FORMATS[a.dtype] if scale_a is None else format_of(a, scale_a).name
    if b_rows:
        return format_a, "prepacked_fp8" if a.dtype is FP8 else "prepacked"
    if scale_b is None:
        return format_a, "fp16"
    return format_a, format_of(b, scale_b).name


def prepacked(call: GemmCall, k: int) -> None:
    """Raise unless b has the bytes of prepacked (b_rows, k) weights: (bytes,), or (g, bytes) with offs."""
    b, n, fp8 = call.b, call.b_rows, is_tokens(call)
    if (mx := _mx_format(call.a, call.scale_a)) is not None:
        raise TypeError(f"b_rows: b is prepacked, must be {in_words(formats_beside(mx, 'b'))} beside a")
    if call.scale_b is not None:
        raise ValueError(f"scale_b: got {describe(call.scale_b)}, must be None because b is prepacked")
    _checks.prepacked_order("b", b, fp8)
    _checks.has_rank("b", b, *((1, "(bytes,)") if call.offs is None else (2, "(g, bytes)")))
    wanted = _checks.prepacked_bytes(n, k, fp8)
    if b.shape[-1] != wanted:
        raise ValueError(
            f"b: shape is {tuple(b.shape)}, must have {wanted} bytes a matrix, prepacked (n, k) = ({n}, {k})"
        )
    is_contiguous("b", b)
    _checks.is_aligned("b", b)


def is_tokens(call: GemmCall) -> bool:
    """Return whether a has FP8 tokens; MXFP8, which has the same dtype, has scales."""
    return call.a.dtype is FP8 and call.scale_a is None


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
        _match(a, scale_a, b, scale_b)
        if a is call.a and b is call.b and scale_a is call.scale_a and scale_b is call.scale_b:
            return call
        return call._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    a, b, scale_a, scale_b, offs = grouped_operands(call)
    return call._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)


def _mx_format(data: Tensor, scale: object) -> BlockFormat | None:
    """The format of an operand if that is an MX format."""
    if scale is None:
        return None
    form = format_of(data, scale)
    return form if form.is_mx else None


def in_words(formats: tuple[BlockFormat, ...]) -> str:
    """The data of these formats, for messages."""
    return ", or ".join(f"{form.data_is} ({form.title})" for form in formats)


def _match(a: Tensor, scale_a: Tensor | None, b: Tensor, scale_b: Tensor | None) -> None:
    """Raise TypeError unless a kernel multiplies the formats of a and b."""
    left, right = _mx_format(a, scale_a), _mx_format(b, scale_b)
    if left is not None and right is not None and are_multiplied(left, right):
        return
    form = left or right
    if form is None:
        beside(a, b)
        return
    wrong, other = ("a", "b") if left is None else ("b", "a")
    data, scale = (b, scale_b) if wrong == "b" else (a, scale_a)
    wanted = formats_beside(form, wrong)
    if scale is None:
        titles = " or ".join(choice.title for choice in wanted)
        raise TypeError(
            f"scale_{wrong}: got None, must be float8_e8m0fnu scales: {wrong} must be {titles} beside "
            f"{form.title} {other}"
        )
    raise TypeError(
        f"{wrong}: dtype is {data.dtype} ({format_of(data, scale).title}), must be {in_words(wanted)} beside "
        f"{form.title} {other}"
    )


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
        _vector("alpha_row", call.alpha_row, m, groups_of_k, a.device)
    if call.alpha_col is not None:
        _vector("alpha_col", call.alpha_col, n, groups, a.device)
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


def check_gated(activation: Activation, n: int, out_dtype: torch.dtype, c: object, is_ragged_k: bool) -> None:
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


def check_beta(value: object, c: object) -> float:
    """Check and return the factor of c; it must be 1 without c."""
    result = number("beta", value)
    if c is None and result != 1.0:
        raise ValueError(f"beta: got {value}, must be omitted without c")
    return result


def check_bias(
    value: object, n: int, device: torch.device, function: str, groups: int | None = None
) -> Tensor:
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


def check_out(
    value: object,
    shape: tuple[int, ...],
    out_dtype: torch.dtype | None,
    device: torch.device,
    function: str,
    name: str = "out",
) -> Tensor:
    """Check and return an output (m, n) or (g, m, n): rows have unit stride and start 16-byte aligned."""
    x = _checks.is_tensor(name, value)
    has_dtype(name, x, FLOAT_DTYPES)
    if out_dtype is not None:
        _checks.is_float_dtype("out_dtype", out_dtype)
    if out_dtype is not None and out_dtype is not x.dtype:
        raise ValueError(f"out_dtype: got {out_dtype}, must be {x.dtype}, the dtype of out (or omitted)")
    _matrix(name, x, shape, device, function)
    return x


def check_c(
    value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, function: str
) -> None:
    """Raise unless c has the shape and the dtype of the output and strides that an output may have."""
    x = _checks.is_tensor("c", value)
    if x.dtype is not dtype:
        has_dtype("c", x, FLOAT_DTYPES)
        raise TypeError(f"c: dtype is {x.dtype}, must be {dtype}, the output type")
    _matrix("c", x, shape, device, function)


def _matrix(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device, function: str) -> None:
    has_shape(name, x, shape)
    same_device(name, x, device, "the operands")
    check_rows(name, x)
    _checks.no_grad(name, x, function)


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless the rows of (m, n) or (g, m, n) have unit stride, are aligned and equally far apart."""
    _checks.rows_are_aligned(name, x)
    groups, rows = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
    if groups > 1 and rows > 0 and x.stride(0) != rows * x.stride(1):
        raise ValueError(
            f"{name}: stride between groups is {x.stride(0)}, must be {rows * x.stride(1)}, "
            f"{rows} rows of stride {x.stride(1)} (use .contiguous())"
        )


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
    ends = _checks.group_ends(call.offs, data_a.device, "a")
    if data_b.dim() == 3:
        checked_a, scales_a = _rows_operand(data_a, call.scale_a, ends.shape[0])
        checked_b, scales_b = _batched_operand(data_b, call.scale_b, ends.shape[0])
    else:
        checked_a, scales_a = _columns_operand("a", data_a, call.scale_a)
        checked_b, scales_b = _columns_operand("b", data_b, call.scale_b)
    same_device("b", checked_b, checked_a.device, "a")
    _match(checked_a, scales_a, checked_b, scales_b)
    return checked_a, checked_b, scales_a, scales_b, ends


def _rows_operand(a: Tensor, scale: object, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Check a (m, k) for ragged m; the scales of each group begin at a multiple of 128 rows."""
    has_dtype("a", a, (*_checks.CODE_DTYPES, *_VALUES))
    if not _has_scales(a, scale):
        return _values_operand("a", a, scale), None
    form = format_of(a, scale)
    packed = _checks.codes("a", a, form)
    m, k = packed.shape[0], k_of(packed)
    rows = layout.grouped_scale_rows(m, num_groups)
    return packed, _checks.scales("scale_a", scale, m, k, packed.device, "a", rows, form)


def _batched_operand(b: Tensor, scale: object, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Check b for ragged m: a matrix (n, k) for each group, with its own scales."""
    has_dtype("b", b, _dtypes("b", scale))
    if b.shape[0] != num_groups:
        raise ValueError(
            f"b: shape is {tuple(b.shape)}, must be ({num_groups}, n, k), a matrix for each end of offs"
        )
    _, n, _ = b.shape
    k = k_of(b)
    form = format_of(b, scale)
    _checks.is_multiple("b", "k", k, form.block)
    is_contiguous("b", b)
    _checks.is_aligned("b", b)
    _checks.no_grad("b", b, "fp4gemm.scaled_grouped_mm")
    if b.dtype is torch.float16:
        _scale_is_none("b", b, scale)
        return b, None
    scales = _checks.stack_scales("scale_b", scale, num_groups, n, k, b.device, "b", form)
    return _checks.as_codes(b), scales


def _columns_operand(name: str, x: Tensor, scale: object) -> tuple[Tensor, Tensor | None]:
    """Check an operand (rows, k) of ragged k, whose groups start at tiles of scales; k may be 0."""
    has_dtype(name, x, _dtypes("b", scale))
    if x.dtype is torch.float16:
        _checks.ragged_columns(name, x, 1)
        _scale_is_none(name, x, scale)
        return x, None
    form = format_of(x, scale)
    _checks.ragged_columns(name, x, form.per_entry, form.group_columns)
    scales = _checks.scales(f"scale_{name}", scale, x.shape[0], k_of(x), x.device, name, form=form)
    return _checks.as_codes(x), scales


def _vector(name: str, value: object, length: int, groups: int | None, device: torch.device) -> Tensor:
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


def check_alpha(call: GemmCall, function: str, name: str = "alpha_groups") -> float:
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


# ---- the reference


@accepts(GemmCall)
def gemm(call: GemmCall) -> Tensor:
    """D = cast(fl(act(fl(fl(alpha * fl(alpha_col[n] * fl(alpha_row[m] * acc))) + bias[n])) + fl(beta * C))).

    acc = fl(sum_k a b): the accumulator is the float64 sum, rounded once to float32. Products of decoded
    NVFP4 values are multiples of 2^-20, so the float64 sum is exact in any order while the partial sums stay
    below 2^33. For k <= 1024 they always do. Beside FP8 tokens the values of b are rounded to e4m3
    (:mod:`fp4gemm.reference.gemm`); there a GPU's sum is within a bound of this one, not equal to it.

    With offs, D of each group is the product of its part of the operands. The rank of b decides whether the
    groups divide m or k:

    - Ragged m (b of rank 3): group g multiplies rows offs[g-1] .. offs[g]-1 of a by b[g] and writes these
      rows of D (m, n). The rows from offs[-1] on are not written.
    - Ragged k (b of rank 2): D is (g, m, n), and D[g] is the product over the columns of group g. The columns
      of each group begin at a multiple of 64. For an empty group D[g] is cast(act(bias) + beta * C), which is
      exactly 0 without bias and c.

    Args:
        a: codes uint8 (m, k/2) with scale_a; or MXFP8 values float8_e4m3fn (m, k) with scale_a; or float16,
            bfloat16 or, FP8 tokens, float8_e4m3fn (m, k) with scale_a None. k of FP8 tokens is a multiple
            of 64. If a is MXFP8, b is MXFP8 or MXFP4; the scales are float8_e8m0fnu with k/32 in place of
            k/16, and the groups of ragged k start at multiples of 128. If a is MXFP4, so is b; its codes are
            told from those of NVFP4 by the dtype of their scales.
        b: codes uint8 (n, k/2), or (g, n, k/2) for ragged m, with scale_b; or float16 (n, k) or (g, n, k)
            with scale_b None; or the bytes of prepacked weights, (bytes,) or (g, bytes), with scale_b None
            and b_rows = n: int8 for FP8 tokens, uint8 for all others. Not float16 with FP8 tokens.
        scale_a: the swizzled float8_e4m3fn scales of a, (ceil128(m), ceil4(k/16)), or for ragged m
            (grouped_scale_rows(m, g), ceil4(k/16)).
        scale_b: the swizzled float8_e4m3fn scales of b, (ceil128(n), ceil4(k/16)), or for ragged m
            (g, ceil128(n), ceil4(k/16)).
        offs: int32 (g,), the cumulative ends of the groups, read on the host; None for a dense product.
        alpha: one number, rounded to float32; it must be 1 with alpha_groups.
        alpha_groups: float32 (g,), in place of alpha.
        alpha_row: float32 (m,) or (1,), with ragged k also (g, m) or (g, 1); None means 1.
        alpha_col: float32 (n,) or (1,), with groups also (g, n) or (g, 1); None means 1.
        bias: (n,), with groups also (g, n), of any float type, converted to float32; or None.
        activation: a number as in :func:`activate`.
        c: a tensor of the shape and the dtype of D, or None; with gemm_out it may be out itself.
        beta: one number, rounded to float32; it must be 1 without c.
        batch_invariant: a bool, which does not change the bits of the reference.
        use_fast_accum: a bool, which does not change them either; it must be False unless a has FP8 tokens.
        b_rows: n if b is prepacked, else 0.
        kernel_name: None or "cpu_reference".
        out_dtype: bfloat16, float16 or float32.

    Returns:
        D, (m, n) or (g, m, n) of out_dtype, contiguous; with a gated activation (m, n/2).
    """
    return _gemm_by(call, None, multiply)


@_accepts_out
def gemm_out(call: GemmCall, out: Tensor) -> None:
    """Write the result of :func:`gemm` to out, whose dtype is the output type.

    Rows that belong to no group are not written.
    """
    _gemm_by(call, out, multiply)


# What a product reads besides c: the fields of GemmCall, and their names in errors of outputs.
_READ = {
    "a": "the first operand",
    "b": "the second operand",
    "scale_a": "the scales of the first operand",
    "scale_b": "the scales of the second operand",
    "offs": "offs",
    "alpha_groups": "the factors of the groups",
    "alpha_row": "the factors of the rows",
    "alpha_col": "the factors of the columns",
    "bias": "bias",
}


def tensors_read(call: Any) -> list[tuple[str, Tensor]]:
    """The tensors but c that a product reads, with their names in errors; call has the fields of GemmCall."""
    found = ((name, getattr(call, field, None)) for field, name in _READ.items())
    return [(name, x) for name, x in found if x is not None]


def check_apart(name: str, x: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if x, which is to be written, overlaps another tensor that is read or written.

    A kernel writes a part of D while it still reads what it needs for other parts.
    """
    for other, y in others:
        if _checks.overlap(x, y):
            raise ValueError(f"{name}: overlaps {other}, must be apart from it")


def check_out_is_apart(out: Tensor, call: GemmCall) -> None:
    """Raise ValueError if out overlaps a tensor that the call reads, unless that is c and out itself."""
    check_apart("out", out, tensors_read(call))
    if call.c is not None:
        _checks.no_overlap(call.c, out)


def _gemm_by(call: GemmCall, out: Tensor | None, product: Product) -> Tensor:
    """Return :func:`gemm`, or write it to out, with another implementation of :func:`multiply`."""
    if out is not None:
        _checks.has_dtype("out", _checks.is_tensor("out", out), _checks.FLOAT_DTYPES)
    call, shape, terms = checked(call)
    name, dtype, device, c = function_of(call), call.out_dtype, call.a.device, call.c
    activation = activations.of_number(call.activation)
    if activation.is_gated:
        check_gated(activation, shape[-1], dtype, c, is_ragged_k(call))
        shape = (*shape[:-1], activation.width(shape[-1]))
    beta = check_beta(call.beta, c)
    if c is not None:
        check_c(c, shape, dtype, device, name)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        check_out(out, shape, None, device, name)
        check_out_is_apart(out, call)
    compute(out, call, terms._replace(activation=activation, c=c, beta=fp32(beta, device)), product)
    return out


def function_of(call: GemmCall) -> str:
    """The public function that a call of raw tensors is named by in errors."""
    return "fp4gemm.scaled_mm" if call.offs is None else "fp4gemm.scaled_grouped_mm"


def checked(call: GemmCall) -> tuple[GemmCall, tuple[int, ...], Epilogue]:
    """Check a call on the CPU, but for out, the activation and c.

    Returns:
        The call with codes and scales in place of a prepacked b, the shape of the accumulator, and the
        factors and the bias.
    """
    name, dtype = function_of(call), call.out_dtype
    _checks.is_tensor("a", call.a)
    _checks.is_float_dtype("out_dtype", dtype)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    _checks.fast_accum(call.use_fast_accum, is_tokens(call))
    _checks.is_cpu_kernel("kernel_name", call.kernel_name)
    call = checked_operands(_unprepacked(call))
    shape = checked_shape(call, dtype)
    device, offs, bias = call.a.device, call.offs, call.bias
    alpha = check_alpha(call, name)
    if bias is not None:
        bias = check_bias(bias, shape[-1], device, name, None if offs is None else offs.shape[0])
    scalar = fp32(alpha, device) if call.alpha_groups is None else call.alpha_groups
    return call, shape, Epilogue(scalar, call.alpha_row, call.alpha_col, bias)


def compute(out: Tensor, call: GemmCall, terms: Terms, product: Product) -> None:
    """Write the product of a call that was checked, dense or of groups, to out."""
    left, right = (call.a, call.scale_a), (call.b, call.scale_b)
    if call.offs is None:
        product(out, left, right, terms)
    elif is_ragged_k(call):
        ragged_k(out, left, right, call.offs, terms, product)
    else:
        ragged_m(out, left, right, call.offs, terms, product)


def _unprepacked(call: GemmCall) -> GemmCall:
    """Return the call with the codes and scales of b in place of a prepacked b."""
    _checks.is_int("b_rows", call.b_rows, 0)
    if not call.b_rows:
        return call
    k = k_of(call.a)
    prepacked(call, k)
    codes, scales = unprepack(call.b, call.b_rows, k)
    return call._replace(b=codes, scale_b=scales, b_rows=0)


def activate(z: Tensor, activation: int) -> Tensor:
    """Return act(z), as :mod:`fp4gemm.activations` defines it.

    Args:
        z: float32 (.., n); n must be even for a gated activation.
        activation: the number of the activation; 0 is the identity.

    Returns:
        float32 (.., n), or (.., n/2) for a gated activation.
    """
    x = _checks.is_tensor("z", z)
    _checks.has_dtype("z", x, (torch.float32,))
    found = activations.of_number(activation)
    if found.is_gated and (x.dim() < 1 or x.shape[-1] % 2):
        raise ValueError(
            f"z: shape is {tuple(x.shape)}, must have an even number of columns for {found.name}"
        )
    return found(x)


# ---- compiled code on the CPU


@accepts(GemmCall)
def gemm_compiled(call: GemmCall) -> Tensor:
    """:func:`gemm`, whose right operand is decoded a part at a time."""
    return _gemm_by(call, None, multiply_compiled)


@_accepts_out
def gemm_out_compiled(call: GemmCall, out: Tensor) -> None:
    """:func:`gemm_out`, whose right operand is decoded a part at a time."""
    _gemm_by(call, out, multiply_compiled)


def multiply_compiled(out: Tensor, a: Operand, b: Operand, terms: Terms) -> None:
    """:func:`fp4gemm.reference.gemm.multiply`, the same sums of the same products in float64."""
    m, n = a[0].shape[0], b[0].shape[0]
    k = k_of(a[0])
    if a[1] is not None and format_of(*a) is not NVFP4:
        multiply(out, a, b, terms)
        return
    step = max(1, _DECODED_ELEMS // k)
    fp8 = is_fp8(a)
    if fp8:
        a = transposed(a[0]), None
    for i, j in row_chunks(m, max(n, k)):
        left = _wide(a, i, j)
        acc = torch.empty((j - i, n), dtype=torch.float32, device="cpu")
        for first in range(0, n, step):
            last = min(first + step, n)
            acc[:, first:last] = torch.mm(left, _wide(b, first, last, fp8).t())
        terms.rows(i, j).write(out[i:j], acc)


def _wide(operand: Operand, begin: int, end: int, fp8: bool = False) -> Tensor:
    """Return the values of rows begin .. end-1 of an operand, float64 (end - begin, k).

    fp8: those of a weight beside FP8 tokens.
    """
    data, scales = operand
    rows = data[begin:end]
    if scales is None:
        return rows.to(torch.float64)
    result = torch.empty((end - begin, 2 * rows.shape[1]), dtype=torch.float64, device="cpu")
    decode_rows(rows, scales, begin, result)
    return folded(result) if fp8 else result


# ---- fake, and the floating-point operations


@accepts(GemmCall)
def gemm_fake(call: GemmCall) -> Tensor:
    shape = fake_shape(call)
    activation = activations.of_number(call.activation)
    return call.a.new_empty((*shape[:-1], activation.width(shape[-1])), dtype=call.out_dtype)


def fake_shape(call: GemmCall) -> tuple[int, ...]:
    """The shape of the accumulator of a call of tensors without memory."""
    shape = shape_of(call)
    support.warn_untested(call.a)
    return shape


def shape_of(call: GemmCall) -> tuple[int, ...]:
    """The shape of the accumulator, after those checks that do not need the memory of the tensors."""
    # What the call would be refused for with memory behind the tensors; one on meta brings the others here.
    _checks.same_device("b", call.b, call.a.device, "a")
    _checks.is_float_dtype("out_dtype", call.out_dtype)
    k = k_of(call.a)
    n, k_b = call.b_rows, k
    _checks.is_int("b_rows", call.b_rows, 0)
    if call.b_rows:
        prepacked(call, k)
    else:
        n, k_b = call.b.shape[-2], k_of(call.b)
    groups = call.offs.shape[0] if call.offs is not None and is_ragged_k(call) else None
    return product_shape(call.a.shape[0], k, n, k_b, groups, call.out_dtype)


@_accepts_out
def gemm_out_fake(call: GemmCall, out: Tensor) -> None:
    support.warn_untested(call.a)


def gemm_flops(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
    """2 m n k of gemm and gemm_out: a multiplication and an addition for each pair of elements.

    Groups divide m or k, so the groups together have as many as one product of these sizes. Rows of no group
    count too: how many there are is known on the device alone. The epilogue is not counted, as in torch's
    formulas.
    """
    call = GemmCall(*args, **kwargs)
    k: int = k_of(call.a)
    n: int = call.b_rows or call.b.shape[-2]
    return 2 * call.a.shape[0] * n * k


OPERATORS = {
    "gemm": Operator(GemmCall, gemm, gemm_fake, gemm_compiled, gemm_flops),
    "gemm_out": Operator(GemmCall, gemm_out, gemm_out_fake, gemm_out_compiled, gemm_flops),
}
