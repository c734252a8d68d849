"""Checks of arguments. Each error names the argument, the value it has and the value it must have.

A wrong Python type or dtype raises TypeError. A wrong rank, shape, device, memory layout or range raises
ValueError. What this version does not implement, such as gradients, raises NotImplementedError. No check is
an ``assert``, so ``python -O`` changes nothing. No check reads device memory, and so none synchronises, but
:func:`ends_of_rows` and :func:`ascending`, which only the CPU implementations call; those that read values
are in :mod:`fp4gemm._values`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._formats import MX_BLOCK, MXFP8, NVFP4, BlockFormat

BLOCK = NVFP4.block  # elements along k that share one e4m3 scale
GROUP_COLUMNS = NVFP4.group_columns  # groups along k of NVFP4 begin at multiples of it
FP8_STEP = 64  # elements along k within which FP8 tokens are reordered
K_STEP_MM = 32  # TMA needs rows that are a multiple of 16 bytes, and a row has k/2 bytes of packed codes
ALIGN_BYTES = 16
E4M3_BOUNDS = (448, 256)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_DTYPES = (torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT32_MAX = 3.4028234663852886e38
CPU_KERNEL = "cpu_reference"
CODE_DTYPES = NVFP4.data_dtypes
SCALE_DTYPES = NVFP4.scale_dtypes
PREPACKED_DTYPES = (torch.uint8, torch.int8)  # of prepacked bytes; is_for_fp8 says which is which
_WITH_MEMORY = (Tensor, torch.nn.Parameter)
_INT32 = torch.iinfo(torch.int32)
_interpreter = torch._C._functorch.peek_interpreter_stack


def is_tensor(name: str, value: object) -> Tensor:
    """Return ``value`` itself. Raise TypeError unless it is a torch.Tensor with the layout torch.strided."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, must be a torch.Tensor")
    if not is_strided(value):
        got = "is a nested tensor" if value.is_nested else f"layout is {value.layout}"
        raise TypeError(f"{name}: {got}, must be torch.strided")
    refuse_tangent(name, value)
    return value


def is_strided(x: Tensor) -> bool:
    """Return whether x is strided and no nested tensor; True while torch.compile traces.

    It reads no layout in a backward pass, and its tensors are strided unless the graph makes others.
    """
    return torch.compiler.is_compiling() or (x.layout is torch.strided and not x.is_nested)


def describe(value: object) -> str:
    """Return a short description of a value and its type for an error text."""
    if isinstance(value, Tensor):
        if value.is_nested:  # torch tells no shape
            return f"a nested {value.dtype} tensor"
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def listing(values: Sequence[object]) -> str:
    """Return the values as the text ``a, b or c``."""
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
    """Return whether x has an address that can be read.

    It has none while a graph is traced, on the meta device, and if it is a tensor subclass except Parameter.
    """
    return not torch.compiler.is_compiling() and type(x) in _WITH_MEMORY and not x.is_meta


def is_misaligned(x: Any, step: int = ALIGN_BYTES) -> bool:
    """Return whether x has an address that is not a multiple of ``step``."""
    return has_memory(x) and is_strided(x) and x.data_ptr() % step != 0


def is_aligned(name: str, x: Tensor, step: int = ALIGN_BYTES) -> None:
    refuse_transform(name, x)  # a tensor of a transform has no address
    if is_misaligned(x, step):
        raise ValueError(
            f"{name}: base address is {x.data_ptr() % step} bytes past a multiple of {step}, "
            f"must be {step}-byte aligned (use .clone())"
        )


def _is_symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def rows_are_aligned(name: str, x: Tensor) -> None:
    """Raise ValueError unless the rows of x (.., m, n) have unit stride, are aligned and do not overlap.

    A row must start at a multiple of ALIGN_BYTES.
    """
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    # Without rows, contiguous() leaves the strides of an expanded tensor as they are.
    if columns > 1 and (_is_symbolic(rows) or rows > 0) and x.stride(-1) != 1:
        raise ValueError(f"{name}: stride along a row is {x.stride(-1)}, must be 1 (use .contiguous())")
    # A single row has no next row, so torch may report any stride for it. A symbolic number of rows is not
    # compared with 1, because torch.export would then require two rows or more.
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
    """Return x (.., m, n) itself, or a contiguous copy if a kernel cannot read its rows in place.

    A kernel reads rows that have unit stride, start at a multiple of ALIGN_BYTES and do not overlap.
    Addresses are not known while a graph is traced, so a graph copies every tensor that is not contiguous.
    Any value but a strided tensor of rank 2 or more is returned unchanged, for the checks to report.
    """
    if not isinstance(x, Tensor) or x.dim() < 2 or not is_strided(x):
        return x
    return x if has_readable_rows(x) else x.clone(memory_format=torch.contiguous_format)


def has_readable_rows(x: Tensor) -> bool:
    """Return whether a kernel can read the rows of a strided x (.., m, n) in place; see readable_rows."""
    if torch.compiler.is_compiling():
        return x.is_contiguous()
    try:
        rows_are_aligned("x", x)
    except ValueError:
        return False
    return True


def is_readable(x: object) -> bool:
    """Return whether x is a strided tensor that is contiguous and aligned, with rows of unit stride.

    An expanded tensor without elements is contiguous to torch, whatever its strides are.
    """
    if not isinstance(x, Tensor) or not is_strided(x) or not x.is_contiguous() or is_misaligned(x):
        return False
    return x.dim() < 2 or has_readable_rows(x)


def contiguous(x: Any) -> Any:
    """Return a strided tensor as a contiguous one, and any other value unchanged, for the checks."""
    return x.contiguous() if isinstance(x, Tensor) and is_strided(x) else x


def readable(x: Tensor) -> Tensor:
    """Return x itself, or a contiguous copy if it is not contiguous and aligned."""
    rows = readable_rows(x)
    return rows.contiguous() if isinstance(rows, Tensor) and is_strided(rows) else rows


def no_overlap(c: Tensor, out: Tensor) -> None:
    """Raise ValueError if c and out overlap in memory without being the same view.

    Both have been checked and have the same shape and dtype.
    """
    if c is not out and overlap(c, out) and _extent(c) != _extent(out):
        raise ValueError(
            "c: overlaps out, must be out itself (the same memory, shape and strides) or apart from it"
        )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two vectors, matrices, or stacks of matrices overlap in memory.

    Two column ranges of one buffer that have no column in common do not overlap, although their rows
    alternate in memory. ``cpp/src/extent.hpp`` has the same rule for calls on a GPU.
    """
    if not has_memory(x) or not has_memory(y) or x.numel() == 0 or y.numel() == 0:
        return False
    # Tells most tensors apart in half of the time that the extents of both take.
    first, second = (x, y) if x.data_ptr() <= y.data_ptr() else (y, x)
    if first.is_contiguous() and first.data_ptr() + first.nbytes <= second.data_ptr():
        return False
    (at_x, width_x, stride_x, span_x), (at_y, width_y, stride_y, span_y) = _extent(x), _extent(y)
    distance = at_x - at_y
    if distance >= span_y or -distance >= span_x:
        return False
    if span_x == width_x:  # a single row has no stride of its own
        stride_x = stride_y
    elif span_y == width_y:
        stride_y = stride_x
    return stride_x != stride_y or not width_y <= distance % stride_x <= stride_x - width_x


def _extent(x: Tensor) -> tuple[int, int, int, int]:
    """The address of a matrix, and in bytes: the width of a row, the stride of rows, and all of it."""
    rows, width = x.shape[:-1].numel(), x.shape[-1] * x.element_size()
    stride = x.stride(-2) * x.element_size() if rows > 1 else width
    return x.data_ptr(), width, stride, (rows - 1) * stride + width


def same_device(name: str, x: Tensor, device: torch.device, other: str) -> None:
    if x.device != device:
        raise ValueError(f"{name}: device is {x.device}, must be {device}, the device of {other}")


def is_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise TypeError unless the value has the type of the allowed ones, ValueError unless it is allowed."""
    if type(value) is not type(allowed[0]):
        raise TypeError(f"{name}: got {describe(value)}, must be {listing([repr(item) for item in allowed])}")
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, must be {listing([repr(item) for item in allowed])}")


def is_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check as :func:`is_one_of` does; the first allowed value may be None."""
    if allowed[0] is not None:
        is_one_of(name, value, allowed)
    elif value is not None and (type(value) is not type(allowed[1]) or value not in allowed):
        error = ValueError if type(value) is type(allowed[1]) else TypeError
        got = repr(value) if error is ValueError else describe(value)
        raise error(f"{name}: got {got}, must be {listing([repr(item) for item in allowed])}")


def is_cpu_kernel(name: str, value: object) -> None:
    if value is not None and (type(value) is not str or value != CPU_KERNEL):
        raise ValueError(f"{name}: got {value!r}, must be None or {CPU_KERNEL!r} on the CPU")


def is_float_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: got {describe(dtype)}, must be {listing(FLOAT_DTYPES)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: dtype is {dtype}, must be {listing(FLOAT_DTYPES)}")


def is_int(name: str, value: object, low: int) -> None:
    """Raise TypeError unless ``value`` is an int and not a bool, ValueError unless it is at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {describe(value)}, must be an int")
    if value < low:
        raise ValueError(f"{name}: got {value}, must be at least {low}")


def is_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {describe(value)}, must be True or False")


def is_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: got {describe(value)}, must be the path of a folder")


def is_callback(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name}: got {describe(value)}, must be callable")


def as_device(name: str, device: object) -> torch.device:
    """Return the torch.device for a string, an index or a torch.device."""
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
    """Return x on the device. Raise ValueError if this torch cannot use the device."""
    try:
        return x.to(device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name}: got {str(device)!r}, must be a device this torch can use: {text}"
        ) from error


def refuse(name: str, value: object, wanted: str, because: str) -> None:
    """Raise NotImplementedError for a value that ``because`` excludes."""
    raise NotImplementedError(f"{name}: got {value!r}, must be {wanted} with {because}")


def no_grad(name: str, x: Tensor, function: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: requires grad, but {function} is forward only; use torch.no_grad() or detach {name}"
        )


def as_codes(x: Tensor) -> Tensor:
    """Return packed codes as uint8; float4_e2m1fn_x2, which holds the same bytes, is viewed."""
    return x.view(torch.uint8) if x.dtype is torch.float4_e2m1fn_x2 else x


def as_scales(x: Tensor, form: BlockFormat = NVFP4) -> Tensor:
    """Return block scales in the dtype of their format; uint8, which holds the same bytes, is viewed."""
    return x.view(form.scale_dtypes[0]) if x.dtype is torch.uint8 else x


def codes(name: str, value: object, form: BlockFormat = NVFP4) -> Tensor:
    """Check packed codes (m, k/2) and return them as uint8, or check the data of another format.

    They must be uint8 or float4_e2m1fn_x2, contiguous and 16-byte aligned, and k a multiple of 16, a block.
    """
    x = is_tensor(name, value)
    has_dtype(name, x, form.data_dtypes)
    has_rank(name, x, 2, form.data_text)
    is_multiple(name, "k", form.k_of(x), form.block)
    is_contiguous(name, x)
    is_aligned(name, x)
    return as_codes(x)


def decoded(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype] = (torch.float16,),
    function: str = "fp4gemm.mm",
) -> Tensor:
    """Check and return values (m, k) that were decoded or never quantized.

    They must be contiguous and 16-byte aligned, and k a multiple of 16.
    """
    x = is_tensor(name, value)
    has_dtype(name, x, dtypes)
    has_rank(name, x, 2, "(m, k)")
    is_multiple(name, "k", x.shape[1], BLOCK)
    is_contiguous(name, x)
    is_aligned(name, x)
    no_grad(name, x, function)
    return x


def fp8_tokens(name: str, value: object, function: str = "fp4gemm.mm") -> Tensor:
    """Check and return FP8 tokens (m, k), float8_e4m3fn in the order of the kernels; k a multiple of 64."""
    x = is_tensor(name, value)
    has_dtype(name, x, (torch.float8_e4m3fn,))
    has_rank(name, x, 2, "(m, k)")
    is_multiple(name, "k", x.shape[1], FP8_STEP)
    is_contiguous(name, x)
    is_aligned(name, x)
    no_grad(name, x, function)
    return x


def is_for_fp8(packed: Tensor) -> bool:
    """Return whether prepacked bytes are in the order for FP8 tokens, by their dtype."""
    return packed.dtype is torch.int8


def prepacked_dtype(fp8: bool) -> torch.dtype:
    """Return the dtype of prepacked bytes in the order for FP8 tokens, or in that for all others."""
    return torch.int8 if fp8 else torch.uint8


def prepacked_order(name: str, x: Tensor, fp8: bool) -> None:
    """Raise TypeError unless the dtype of prepacked bytes is that of the order for the tokens.

    fp8: the tokens are FP8.
    """
    wanted = prepacked_dtype(fp8)
    if x.dtype is not wanted:
        tokens, how = ("FP8 tokens", "w, fp8=True") if fp8 else ("tokens that are not FP8", "w")
        raise TypeError(
            f"{name}: dtype is {x.dtype}, must be {wanted}, that of weights prepacked for {tokens} "
            f"(fp4gemm.prepack({how}))"
        )


def fast_accum(value: object, fp8: bool) -> None:
    """Check use_fast_accum: a bool, which must be False unless the tokens are FP8."""
    is_bool("use_fast_accum", value)
    if value and not fp8:
        raise ValueError("use_fast_accum: got True, must be False unless the tokens are FP8")


def scales(
    name: str,
    value: object,
    m: int,
    k: int,
    device: torch.device,
    other: str,
    group_rows: int | None = None,
    form: BlockFormat = NVFP4,
) -> Tensor:
    """Check the swizzled block scales of an (m, k) operand and return them in the dtype of the format.

    They must be (ceil128(m), ceil4(k/block)), or have ``group_rows`` rows if the rows of the operand are in
    groups, and be contiguous and 16-byte aligned.
    """
    x = is_tensor(name, value)
    has_dtype(name, x, form.scale_dtypes)
    rows, columns = form.scale_shape(m, k)
    shape, kind = ((rows, columns), "") if group_rows is None else ((group_rows, columns), "grouped ")
    has_shape(name, x, shape, f", the {kind}swizzled shape for {other} of (m, k) = ({m}, {k})")
    same_device(name, x, device, other)
    is_contiguous(name, x)
    is_aligned(name, x)
    return as_scales(x, form)


def vector(name: str, value: object, length: int, device: torch.device, other: str) -> Tensor:
    """Check and return a contiguous float32 vector that has ``length`` entries or one."""
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
    """Check and return a contiguous vector that has ``length`` entries, or any number of them for None."""
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
    """Check and return x (m, k) of a float type.

    k must be a positive multiple of ``step``. Rows must have unit stride and start 16-byte aligned.
    """
    x = is_tensor(name, value)
    has_dtype(name, x, dtypes)
    has_rank(name, x, 2, f"(m, {what})")
    is_multiple(name, what, x.shape[1], step)
    rows_are_aligned(name, x)
    no_grad(name, x, function)
    return x


def packed_operand(
    codes_name: str, x: object, scales_name: str, scale: object, form: BlockFormat = NVFP4
) -> tuple[Tensor, Tensor]:
    """Check and return packed codes (m, k/2), or the data of another format, and their swizzled scales."""
    packed = codes(codes_name, x, form)
    m, k = packed.shape[0], form.k_of(packed)
    return packed, scales(scales_name, scale, m, k, packed.device, codes_name, form=form)


def stack_scales(
    name: str,
    value: object,
    g: int,
    n: int,
    k: int,
    device: torch.device,
    other: str,
    form: BlockFormat = NVFP4,
) -> Tensor:
    """Swizzled scales (g, ceil128(n), ceil4(k/block)) of a stack, in the dtype of the format."""
    x = is_tensor(name, value)
    has_dtype(name, x, form.scale_dtypes)
    rows, columns = form.scale_shape(n, k)
    why = f", the swizzled shape of each of {g} matrices (n, k) = ({n}, {k})"
    has_shape(name, x, (g, rows, columns), why)
    same_device(name, x, device, other)
    is_contiguous(name, x)
    is_aligned(name, x)
    return as_scales(x, form)


def ragged_columns(name: str, x: Tensor, per_entry: int, step: int = GROUP_COLUMNS) -> Tensor:
    """The tensor (m, k / per_entry) of ragged k, a multiple of step; k is 0 where there is no token."""
    has_rank(name, x, 2, "(m, k/2)" if per_entry == 2 else "(m, k)")
    k = per_entry * x.shape[1]
    if k % step:
        raise ValueError(f"{name}: k is {k}, must be a multiple of {step} for ragged k")
    operand_memory(name, x)
    return x


def operand_memory(name: str, x: Tensor) -> None:
    """Raise unless x can be an operand of a product: contiguous, 16-byte aligned and without a gradient."""
    is_contiguous(name, x)
    is_aligned(name, x)
    no_grad(name, x, "fp4gemm.mm")


# ---- what no operator defines: transforms of torch.func, and derivatives in forward mode


def is_eager() -> bool:
    """Whether no graph is traced, no transform of torch.func is active, and no tensor has a tangent."""
    return not torch.compiler.is_compiling() and forward_ad._current_level < 0 and _interpreter() is None


def is_direct(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but the device decides which implementation the dispatcher calls for these tensors.

    Otherwise a graph is traced, or a mode or a subclass of Tensor handles the call.
    """
    return (
        is_eager()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(x is None or type(x) in _WITH_MEMORY for x in tensors)
    )


def refuse_tangent(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x has a tangent, which an operator would drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"{name}: has a tangent of forward mode (torch.func.jvp), must have none; call backward() or "
            "torch.autograd.grad for derivatives"
        )


def refuse_transform(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x is a tensor of a transform of torch.func."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotImplementedError(
            f"{name}: is inside of a transform of torch.func (vmap, grad, vjp, ...), must not be; call "
            "backward() or torch.autograd.grad for derivatives, and pass a batch dimension in place of vmap"
        )


# ---- ends of groups


def group_ends(value: object, device: torch.device, other: str) -> Tensor:
    """Check and return offs, int32 (g,) with g >= 1, the ends of groups of rows. The values are not read."""
    x = exact_vector("offs", value, None, torch.int32, device, other)
    if x.shape[0] < 1:
        raise ValueError("offs: shape is (0,), must have at least one entry")
    return x


def as_int32(offs: Any) -> Any:
    """Convert int64 offs, as cumsum returns them, to int32; return any other value unchanged.

    Entries outside of int32 are refused on the CPU. On other devices they are clamped, because reading them
    would synchronise.
    """
    if not isinstance(offs, Tensor) or offs.dtype is not torch.int64:
        return offs
    clamped = offs.clamp(_INT32.min, _INT32.max)
    if offs.device.type == "cpu" and has_memory(offs):
        outside = (clamped != offs).flatten()
        if outside.any():
            i = int(outside.nonzero()[0])
            raise ValueError(f"offs: entry {i} is {offs.flatten()[i].item()}, must be within int32")
    return clamped.to(torch.int32)


def ends_of_rows(offs: object, m: int, device: torch.device) -> Tensor:
    """Check offs, int32 (g,), g >= 1: its entries must be within 0..m and must not decrease.

    The check reads the entries, so it synchronises on a GPU.
    """
    x = group_ends(offs, device, "x")
    ascending(x, m, "the rows of x")
    return x


def ascending(offs: Tensor, limit: int, what: str) -> list[int]:
    """Return the entries of offs. Raise ValueError unless they are within 0..limit and do not decrease.

    Reading the entries synchronises on a GPU.
    """
    before = 0
    ends: list[int] = offs.tolist()
    for i, end in enumerate(ends):
        if end < before:
            raise ValueError(f"offs: entry {i} is {end}, must be at least {before} (ends do not decrease)")
        before = end
    if before > limit:
        raise ValueError(f"offs: the last entry is {before}, must be at most {limit}, {what}")
    return ends


# ---- sizes of what is stored


def padded_scale_shape(m: int, k: int) -> tuple[int, int]:
    """Return (ceil128(m), ceil4(k/16)), the shape of the swizzled scales of an (m, k) NVFP4 operand."""
    return NVFP4.scale_shape(m, k)


def prepacked_bytes(n: int, k: int, fp8: bool = False) -> int:
    """Return the bytes of a prepacked (n, k) weight: 2304 for each chunk of 64 x 64, with padding.

    fp8: for FP8 tokens, 4608 for each chunk of 64 rows x 128.
    """
    return ((n + 63) // 64) * ((k + 127) // 128 * 4608 if fp8 else (k + 63) // 64 * 2304)


def mx_scale_shape(m: int, k: int, swizzled: bool) -> tuple[int, int]:
    """Return the shape of MX scales: (ceil128(m), ceil4(k/32)) if swizzled, else (m, k/32)."""
    return MXFP8.scale_shape(m, k) if swizzled else (m, k // MX_BLOCK)  # every MX format has these
