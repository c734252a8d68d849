"""Checks of arguments, and their messages: each names the argument, the value given and what it must be.

Wrong Python types and wrong dtypes raise TypeError; rank, shape, device, layout in memory and range raise
ValueError; what this version cannot do at all (gradients) raises NotImplementedError. Nothing here is an
``assert``, so ``python -O`` changes nothing, and nothing here reads device memory, so no check synchronises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # elements of k that share one e4m3 scale
MXFP8_BLOCK = 32  # elements of k that share one e8m0 scale
K_STEP_MM = 32  # a row of packed codes is then a multiple of 16 bytes, as the tensor memory accelerator wants
ALIGN_BYTES = 16
E4M3_BOUNDS = (448, 256)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_DTYPES = (torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT32_MAX = 3.4028234663852886e38
CPU_KERNEL = "cpu_reference"
_WITH_MEMORY = (Tensor, torch.nn.Parameter)


def is_tensor(name: str, value: object) -> Tensor:
    """``value`` itself; raises TypeError unless it is a dense torch.Tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, must be a torch.Tensor")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: layout is {value.layout}, must be torch.strided")
    return value


def describe(value: object) -> str:
    """The value for an error text: short, with its type where the type is wrong."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def listing(values: Sequence[object]) -> str:
    """``a, b or c``."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def has_dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name}: dtype is {x.dtype}, must be {listing(allowed)}")


def has_rank(name: str, x: Tensor, rank: int, form: str) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must have rank {rank}, {form}")


def has_shape(name: str, x: Tensor, wanted: tuple[int, ...], why: str = "") -> None:
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {wanted}{why}")


def is_multiple(name: str, what: str, value: int, step: int) -> None:
    if value <= 0 or value % step:
        raise ValueError(f"{name}: {what} is {value}, must be a positive multiple of {step}")


def is_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(
            f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must be contiguous "
            "(use .contiguous())"
        )


def has_memory(x: Any) -> bool:
    """Whether x has an address: not while a graph is traced, not on meta, and never in a tensor subclass."""
    return not torch.compiler.is_compiling() and type(x) in _WITH_MEMORY and not x.is_meta


def is_misaligned(x: Any, step: int = ALIGN_BYTES) -> bool:
    """Whether x is a tensor with an address that is no multiple of ``step``."""
    return has_memory(x) and x.data_ptr() % step != 0


def is_aligned(name: str, x: Tensor, step: int = ALIGN_BYTES) -> None:
    if is_misaligned(x, step):
        raise ValueError(
            f"{name}: base address is {x.data_ptr() % step} bytes past a multiple of {step}, "
            f"must be {step}-byte aligned (use .clone())"
        )


def _is_symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def rows_are_aligned(name: str, x: Tensor) -> None:
    """Rows of x (.., m, n): unit stride along a row; rows start on ALIGN_BYTES and do not overlap."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    if columns > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: stride along a row is {x.stride(-1)}, must be 1 (use .contiguous())")
    # A single row has no next row, so torch may report any stride for it. A symbolic number of rows is not
    # compared with 1: that would make torch.export demand two rows or more.
    if (_is_symbolic(rows) or rows > 1) and columns > 0:
        stride = x.stride(-2)
        if stride < columns:
            raise ValueError(
                f"{name}: row stride is {stride}, must be at least {columns} (rows may not overlap)"
            )
        if stride * x.element_size() % ALIGN_BYTES:
            raise ValueError(
                f"{name}: row stride is {stride} elements ({stride * x.element_size()} bytes), "
                f"must be a multiple of {ALIGN_BYTES} bytes"
            )
    is_aligned(name, x)


def readable_rows(x: Any) -> Any:
    """x (.., m, n) itself, or a contiguous copy where a kernel cannot read its rows in place.

    A kernel reads rows of unit stride that start on ALIGN_BYTES and do not overlap. A tracer sees no
    addresses, so a graph copies every tensor that is not contiguous. What is no tensor of rank 2 or more is
    left to the checks.
    """
    if not isinstance(x, Tensor) or x.dim() < 2 or x.layout is not torch.strided:
        return x
    if torch.compiler.is_compiling():
        return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    try:
        rows_are_aligned("x", x)
    except ValueError:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def readable(x: Tensor) -> Tensor:
    """x itself, or a contiguous copy where a kernel that needs it contiguous cannot read it in place."""
    rows = readable_rows(x)
    return rows.contiguous() if isinstance(rows, Tensor) and rows.layout is torch.strided else rows


def no_overlap(c: Tensor, out: Tensor) -> None:
    """Raise ValueError where c and out, checked and of one shape, share memory without being one view.

    Rows of both that lie beside each other in one buffer, as its left and right columns do, share none.
    """
    if c is out or not has_memory(c) or not has_memory(out) or c.numel() == 0:
        return
    rows, n, size = c.shape[:-1].numel(), c.shape[-1], c.element_size()
    strides = [x.stride(-2) if rows > 1 else n for x in (c, out)]
    spans = [((rows - 1) * stride + n) * size for stride in strides]
    distance = c.data_ptr() - out.data_ptr()
    if distance >= spans[1] or -distance >= spans[0]:
        return
    if strides[0] == strides[1]:
        apart = distance // size % strides[0]
        if distance == 0 or n <= apart <= strides[0] - n:
            return
    raise ValueError(
        "c: overlaps out, must be out itself (the same memory, shape and strides) or apart from it"
    )


def same_device(name: str, x: Tensor, device: torch.device, other: str) -> None:
    if x.device != device:
        raise ValueError(f"{name}: device is {x.device}, must be {device}, the device of {other}")


def is_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise TypeError for a value of another type than the allowed ones, ValueError for another value."""
    if type(value) is not type(allowed[0]):
        raise TypeError(f"{name}: got {describe(value)}, must be {listing([repr(item) for item in allowed])}")
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, must be {listing([repr(item) for item in allowed])}")


def is_float_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: got {describe(dtype)}, must be {listing(FLOAT_DTYPES)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: dtype is {dtype}, must be {listing(FLOAT_DTYPES)}")


def is_int(name: str, value: object, low: int) -> None:
    """Raise TypeError unless ``value`` is an int (bool is not), ValueError unless it is at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {describe(value)}, must be an int")
    if value < low:
        raise ValueError(f"{name}: got {value}, must be at least {low}")


def is_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {describe(value)}, must be True or False")


def as_device(name: str, device: object) -> torch.device:
    """The torch.device that a str, an index or a device means."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise TypeError(f"{name}: got {describe(device)}, must be a torch.device, a string or an index")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name}: got {device!r}, must name a torch device: {str(error).splitlines()[0]}"
        ) from error


def moved(name: str, x: Tensor, device: torch.device) -> Tensor:
    """x on the device; ValueError where torch has no such device."""
    try:
        return x.to(device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name}: got {str(device)!r}, must be a device this torch can use: {text}"
        ) from error


def no_grad(name: str, x: Tensor, function: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: requires grad, but {function} is forward only; use torch.no_grad() or detach {name}"
        )


def as_codes(x: Tensor) -> Tensor:
    """Packed codes as uint8: a view of float4_e2m1fn_x2, which holds the same bytes."""
    return x.view(torch.uint8) if x.dtype is torch.float4_e2m1fn_x2 else x


def as_scales(x: Tensor) -> Tensor:
    """Block scales as float8_e4m3fn: a view of uint8, which holds the same bytes."""
    return x.view(torch.float8_e4m3fn) if x.dtype is torch.uint8 else x


def codes(name: str, value: object) -> Tensor:
    """Packed codes (m, k/2): uint8 or float4_e2m1fn_x2, contiguous, 16-byte aligned, k a multiple of 16."""
    x = is_tensor(name, value)
    has_dtype(name, x, (torch.uint8, torch.float4_e2m1fn_x2))
    has_rank(name, x, 2, "(m, k/2)")
    is_multiple(name, "k", 2 * x.shape[1], BLOCK)
    is_contiguous(name, x)
    is_aligned(name, x)
    return as_codes(x)


def decoded(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype] = (torch.float16,),
    function: str = "fp4gemm.mm",
) -> Tensor:
    """Values (m, k), decoded or never quantized: contiguous, 16-byte aligned, k a multiple of 16."""
    x = is_tensor(name, value)
    has_dtype(name, x, dtypes)
    has_rank(name, x, 2, "(m, k)")
    is_multiple(name, "k", x.shape[1], BLOCK)
    is_contiguous(name, x)
    is_aligned(name, x)
    no_grad(name, x, function)
    return x


def scales(
    name: str, value: object, m: int, k: int, device: torch.device, other: str, group_rows: int | None = None
) -> Tensor:
    """Swizzled block scales of an (m, k) operand: (ceil128(m), ceil4(k/16)), contiguous, 16-byte aligned.

    With groups of rows they have ``group_rows`` rows.
    """
    x = is_tensor(name, value)
    has_dtype(name, x, (torch.float8_e4m3fn, torch.uint8))
    rows, columns = padded_scale_shape(m, k)
    shape, kind = ((rows, columns), "") if group_rows is None else ((group_rows, columns), "grouped ")
    has_shape(name, x, shape, f", the {kind}swizzled shape for {other} of (m, k) = ({m}, {k})")
    same_device(name, x, device, other)
    is_contiguous(name, x)
    is_aligned(name, x)
    return as_scales(x)


def vector(name: str, value: object, length: int, device: torch.device, other: str) -> Tensor:
    """A float32 vector of ``length`` entries or of a single one, contiguous."""
    x = is_tensor(name, value)
    has_dtype(name, x, (torch.float32,))
    if x.dim() != 1 or (x.shape[0] != length and x.shape[0] != 1):
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be ({length},) or (1,)")
    same_device(name, x, device, other)
    is_contiguous(name, x)
    no_grad(name, x, "fp4gemm.mm")
    return x


def exact_vector(
    name: str,
    value: object,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    other: str,
    function: str = "fp4gemm.quantize",
) -> Tensor:
    """A contiguous vector of ``length`` entries (None: of any number)."""
    x = is_tensor(name, value)
    has_dtype(name, x, (dtype,))
    if length is None:
        has_rank(name, x, 1, "(g,)")
    else:
        has_shape(name, x, (length,))
    same_device(name, x, device, other)
    is_contiguous(name, x)
    no_grad(name, x, function)
    return x


def quantize_input(
    value: object,
    function: str = "fp4gemm.quantize",
    name: str = "x",
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    step: int = BLOCK,
    what: str = "k",
) -> Tensor:
    """x (m, k) of a float type, k a multiple of ``step``; rows have unit stride and start 16-byte aligned."""
    x = is_tensor(name, value)
    has_dtype(name, x, dtypes)
    has_rank(name, x, 2, f"(m, {what})")
    is_multiple(name, what, x.shape[1], step)
    rows_are_aligned(name, x)
    no_grad(name, x, function)
    return x


def packed_operand(codes_name: str, x: object, scales_name: str, scale: object) -> tuple[Tensor, Tensor]:
    """Codes (m, k/2) and their swizzled scales."""
    packed = codes(codes_name, x)
    m, half_k = packed.shape
    return packed, scales(scales_name, scale, m, 2 * half_k, packed.device, codes_name)


def padded_scale_shape(m: int, k: int) -> tuple[int, int]:
    """(ceil128(m), ceil4(k/16)): the shape of the swizzled scales of an (m, k) operand."""
    return (m + 127) // 128 * 128, (k // BLOCK + 3) // 4 * 4


def prepacked_bytes(n: int, k: int) -> int:
    """Bytes of a prepacked (n, k) weight: 2304 for each chunk of 64 x 64 elements, the last ones padded."""
    return ((n + 63) // 64) * ((k + 63) // 64) * 2304


def mxfp8_scale_shape(m: int, k: int, swizzled: bool) -> tuple[int, int]:
    """(ceil128(m), ceil4(k/32)) swizzled, else (m, k/32): the shape of the scales of an MXFP8 (m, k)."""
    columns = k // MXFP8_BLOCK
    return padded_scale_shape(m, columns * BLOCK) if swizzled else (m, columns)
