"""Containers as operands of a GEMM: their tensors, the checks that they match, and the choice of a kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks, kernel_table, selection, support
from .containers._base import with_version
from .containers._mx import MXTensor
from .containers.decoded import DecodedTensor
from .containers.fp8 import FP8Tensor
from .containers.mxfp4 import MXFP4Tensor
from .containers.mxfp8 import MXFP8Tensor
from .containers.nvfp4 import NVFP4Tensor
from .containers.prepacked import PrepackedTensor
from .ops import gemm as gemm_ops
from .reference.epilogue import ALPHA, ALPHA_FP8, ALPHA_UNQUANTIZED

Quantized = NVFP4Tensor | DecodedTensor | FP8Tensor
Weight = NVFP4Tensor | DecodedTensor | PrepackedTensor
MX = MXFP8Tensor | MXFP4Tensor
Left = Quantized | MX | Tensor
Right = Weight | MX
Given = tuple[Tensor, int | None] | None
OR_PLAIN = "fp4gemm.FP8Tensor, or a bfloat16 or float16 tensor"
OR_PREPACKED = "or an fp4gemm.PrepackedTensor"


_NO_GROUPS = (
    "must have groups: quantize(x, offs=offs), quantize_fp8, quantize_mxfp8 or quantize_mxfp4(x, offs=offs) "
    "for the rows of experts, quantize(x, axis=0, offs=offs) for the gradients of weights"
)
_LEFT = (NVFP4Tensor, DecodedTensor, FP8Tensor)
_RAGGED = {0: "m", 1: "k"}  # the key is offs_dim


class Operands(NamedTuple):
    """Checked operands: the arguments of the operator up to alpha_col, and sizes derived from them."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    offs: Tensor | None
    alpha: float
    alpha_groups: Tensor | None
    alpha_row: Tensor | None
    alpha_col: Tensor | None
    b_rows: int  # n of a prepacked b, else 0
    shape: tuple[int, ...]  # (m, n) or (g, m, n), the shape of the accumulator

    def leading(self) -> tuple[Any, ...]:
        """Return the arguments of the operator from a to alpha_col, in its order."""
        return self[:9]

    @property
    def is_ragged_k(self) -> bool:
        return len(self.shape) == 3


def container(
    name: str, value: object, others: str, types: tuple[type, ...] = (NVFP4Tensor, DecodedTensor)
) -> Any:
    """Return the value itself if it has one of the types, else raise; ``others`` are types for the error."""
    if isinstance(value, types):
        return value
    raise TypeError(
        f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor, fp4gemm.DecodedTensor, "
        f"{others} (see fp4gemm.quantize; fp4gemm.scaled_mm multiplies raw tensors)"
    )


def parts(value: NVFP4Tensor | DecodedTensor | FP8Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (data, scales) of a container; one that is not an NVFP4Tensor has no scales, that is, None.

    Not OperandParts: two of them would take 0.6 of the 4 microseconds of a call of mm before the operator.
    """
    return (value.codes, value.scales) if isinstance(value, NVFP4Tensor) else (value.data, None)


def same_rotation(names: tuple[str, str], of_a: int | None, b: Weight) -> None:
    """Raise ValueError unless both operands were rotated with the same signs, or neither was rotated."""
    if of_a != b.hadamard_signs:
        signs = [_signs(s) for s in (of_a, b.hadamard_signs)]
        raise ValueError(
            f"{names[1]}: hadamard_signs is {signs[1]}, must be {signs[0]} as of {names[0]} "
            "(rotate both operands alike)"
        )


def _signs(signs: int | None) -> str:
    if signs is None:
        return "None (not rotated)"
    return f"{signs:#06x}" if signs <= 0xFFFF else f"{signs:#06x} (with signs drawn by encode 'eden')"


def of_containers(
    function: str,
    names: tuple[str, str],
    a: Quantized | Tensor,
    b: Weight,
    offs: Tensor | None,
    is_grouped: bool,
    dtype: torch.dtype,
) -> Operands:
    """Check two containers and return their operands; a may also be a plain tensor."""
    # The conditions are evaluated inline, and a function that raises the error is called only if one fails,
    # because every call of a layer executes this function.
    signs = amax_a = scale_a = scale_b = ends = packed = offs_b = groups_of_k = None
    b_rows = 0
    if gemm_ops.is_plain(a):
        data_a = _checks.decoded(names[0], _checks.readable(a), gemm_ops.PLAIN, function)
    else:
        packed = container(names[0], a, OR_PLAIN, _LEFT)
        data_a, scale_a = parts(packed)
        amax_a = packed.amax
        if type(packed) is not FP8Tensor:
            signs = packed.hadamard_signs
        if amax_a.requires_grad:
            _checks.no_grad(names[0], amax_a, function)
    if isinstance(b, PrepackedTensor):
        data_b, (*stack, b_rows, k_b) = b.data, b.shape
        n, rank_b = b_rows, 2 + len(stack)
        _checks.prepacked_order(names[1], data_b, data_a.dtype is gemm_ops.FP8)
    else:
        data_b, scale_b = parts(container(names[1], b, OR_PREPACKED))
        *stack, n, k_b = data_b.shape
        rank_b, offs_b = 2 + len(stack), b.offs
        if scale_b is not None:
            k_b *= 2
    m, k_a = data_a.shape[-2:]
    if scale_a is not None:
        k_a *= 2
    if is_grouped:
        ends = ends_of(names, data_a, packed, b, offs)
        if rank_b == 2:
            groups_of_k = ends.shape[0]
    elif (
        rank_b != 2
        or offs_b is not None
        or data_a.dim() != 2
        or (packed is not None and packed.offs is not None)
    ):
        are_matrices(names, packed, b)
    if packed is None:
        gemm_ops.beside(data_a, data_b, names)
        alpha = ALPHA_UNQUANTIZED[b.e4m3_max]
        support.ready_for(data_a, "grouped_mm" if is_grouped else "mm", ("bf16", "nvfp4"))
    elif type(packed) is FP8Tensor:
        gemm_ops.beside(data_a, data_b, names)
        alpha = ALPHA_FP8[b.e4m3_max]
        support.ready_for(data_a, "grouped_mm" if is_grouped else "mm", ("e4m3", "nvfp4"))
    else:
        alpha = ALPHA[packed.e4m3_max, b.e4m3_max]
    if signs != b.hadamard_signs:
        same_rotation(names, signs, b)
    if data_a.device != data_b.device:
        _checks.same_device(names[1], data_b, data_a.device, names[0])
    amax_b = b.amax
    if groups_of_k is not None and amax_a is not None:
        # (g,), one of each group, becomes (g, 1): a vector without groups would be one of each row
        amax_a = amax_a if amax_a.dim() == 2 else amax_a.unsqueeze(1)
        amax_b = amax_b if amax_b.dim() == 2 else amax_b.unsqueeze(1)
    shape: tuple[int, ...] = (m, n)
    if groups_of_k is not None or k_a != k_b or k_a % 32 or n % 8:
        shape = gemm_ops.product_shape(m, k_a, n, k_b, groups_of_k, dtype, names)
    if b.amax.requires_grad:
        _checks.no_grad(names[1], b.amax, function)
    return Operands(data_a, data_b, scale_a, scale_b, ends, alpha, None, amax_a, amax_b, b_rows, shape)


def are_matrices(names: tuple[str, str], a: Quantized | MXTensor | None, b: Right | MXTensor) -> None:
    """Raise ValueError unless the operands of a dense product are matrices without groups."""
    for name, value in zip(names, (a, b), strict=True):
        offs = getattr(value, "offs", None)
        if offs is not None:
            raise ValueError(
                f"{name}: has {offs.shape[0]} groups (offs), must have none; see fp4gemm.grouped_mm"
            )
        if value is not None and len(value.shape) != 2:
            raise ValueError(
                f"{name}: shape is {tuple(value.shape)}, must have rank 2; see fp4gemm.grouped_mm"
            )


def ends_of(
    names: tuple[str, str],
    data_a: Tensor,
    a: Quantized | MXTensor | None,
    b: Right | MXTensor,
    offs: Tensor | None,
) -> Tensor:
    """Check that a and b have the same groups, which both divide m or both divide k, and return the ends."""
    if a is None:
        if offs is None:
            raise ValueError(f"offs: got None, must be an int32 tensor (g,) beside a plain tensor {names[0]}")
        ends = _checks.group_ends(_checks.as_int32(offs), data_a.device, names[0])
        _is_stack(names, b, ends.shape[0])
        return ends
    own = a.offs
    if own is None:
        raise ValueError(f"{names[0]}: has no groups (offs), {_NO_GROUPS}")
    num_groups = own.shape[0]
    if isinstance(a, FP8Tensor) or a.offs_dim == 0:
        _is_stack(names, b, num_groups)
    elif isinstance(b, PrepackedTensor) or b.offs is None or b.offs_dim != 1 or b.offs.shape != own.shape:
        if isinstance(b, PrepackedTensor):
            got = "no groups (prepacked)"
        else:
            got = (
                "no groups"
                if b.offs is None
                else f"{b.offs.shape[0]} groups with ragged {_RAGGED[b.offs_dim]}"
            )
        raise ValueError(f"{names[1]}: has {got}, must have {num_groups} groups with ragged k as {names[0]}")
    elif b.device == own.device and not _are_same_ends(own, a._given_offs, b.offs, b._given_offs):
        raise ValueError(
            f"{names[1]}: has other groups (offs) than {names[0]}, must have the same: quantize both with "
            "the same tensor offs on their device (values are compared on the CPU alone)"
        )
    if offs is not None:
        given = _checks.group_ends(_checks.as_int32(offs), own.device, "the operands")
        _checks.has_shape("offs", given, (num_groups,), ", an end for each group")
        if not _are_same_ends(own, a._given_offs, given, with_version(offs)):
            raise ValueError(
                f"offs: is another tensor than {names[0]}.offs, must be that or omitted: the groups are "
                f"those that {names[0]} was quantized with (values are compared on the CPU alone)"
            )
    return own


def _are_same_ends(x: Tensor, x_given: Given, y: Tensor, y_given: Given) -> bool:
    """Return whether two offs are the same tensor, copies of one unchanged tensor, or equal on the CPU.

    Values on a GPU are not compared, since that would synchronise. While a graph is traced, there are no
    values to compare.
    """
    if _is_same_tensor(x, y):
        return True
    if x_given is None or y_given is None:
        return _are_equal_on_cpu(x, y)
    did_not_change = x_given[1] == y_given[1]
    return (did_not_change and _is_same_tensor(x_given[0], y_given[0])) or _are_equal_on_cpu(x, y)


def _is_same_tensor(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y are one object or the same view of the same memory."""
    return x is y or (
        _checks.has_memory(x)
        and _checks.has_memory(y)
        and x.data_ptr() == y.data_ptr()
        and (x.dtype, x.device, x.shape, x.stride()) == (y.dtype, y.device, y.shape, y.stride())
    )


def _are_equal_on_cpu(x: Tensor, y: Tensor) -> bool:
    has_memory = _checks.has_memory(x) and _checks.has_memory(y)
    return has_memory and not x.is_cuda and not y.is_cuda and torch.equal(x, y)


def _is_stack(names: tuple[str, str], b: Right | MXTensor, num_groups: int) -> None:
    """Raise ValueError unless b is (num_groups, n, k)."""
    has_groups = not isinstance(b, PrepackedTensor) and b.offs is not None
    if has_groups or len(b.shape) != 3 or b.shape[0] != num_groups:
        got, wanted = (" with groups (offs)", " without groups") if has_groups else ("", "")
        raise ValueError(
            f"{names[1]}: shape is {tuple(b.shape)}{got}, must be ({num_groups}, n, k){wanted}, "
            f"a matrix for each group of {names[0]}"
        )


def chosen_kernel(
    x: Operands,
    n: int,
    kernel: str | None,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    is_gated: bool,
    batch_invariant: bool,
    use_fast_accum: bool,
) -> str | None:
    """Return the kernel that the call names, after checking it, else the one that the selection rules name.

    If the result is None, the library selects the kernel.
    """
    mode = "dense" if x.offs is None else "grouped"
    if kernel is not None:
        _check_kernel(kernel, x, formats, out_dtype, mode, is_gated, use_fast_accum)
        return kernel
    if batch_invariant or not selection.RULES:
        return None
    k = gemm_ops.k_of(x.a)
    ragged = "k" if x.is_ragged_k else "m"
    return selection.find(
        x.a, n, k, out_dtype, mode, is_gated, formats, ragged, use_fast_accum=use_fast_accum
    )


def _check_kernel(
    kernel: object,
    x: Operands,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    mode: str,
    is_gated: bool,
    use_fast_accum: bool,
) -> None:
    """Raise unless ``kernel`` can compute the product: a built kernel on CUDA, the reference on the CPU."""
    a = x.a
    if not isinstance(kernel, str):
        raise TypeError(
            f"kernel: got {_checks.describe(kernel)}, must be a name from fp4gemm.kernels() or None"
        )
    if not a.is_cuda:
        if kernel != _checks.CPU_KERNEL:
            raise ValueError(f"kernel: got {kernel!r}, must be None or {_checks.CPU_KERNEL!r} on the CPU")
        return
    if torch.compiler.is_compiling():
        return  # the operator checks the name when the graph runs
    found = kernel_table.kernel_by_name(kernel)
    if found is None:
        raise ValueError(f"kernel: got {kernel!r}, must be a name from fp4gemm.kernels() or None")
    if found.mode != mode:
        raise ValueError(f"kernel: {kernel!r} is of mode {found.mode}, must be of mode {mode}")
    epilogue = "gated" if is_gated else "rowcol"
    if found.epilogue != epilogue:
        raise ValueError(
            f"kernel: {kernel!r} has the epilogue {found.epilogue}, must have {epilogue} for the activation"
        )
    if found.out_dtype is not out_dtype:
        raise ValueError(
            f"kernel: {kernel!r} writes {found.out_dtype}, must write {out_dtype}, the output type"
        )
    if found.arch != kernel_table.kernel_arch(a.get_device()):
        major, minor = torch.cuda.get_device_capability(a.device)
        raise NotImplementedError(
            f"kernel: {kernel!r} does not run on {a.device}, whose compute capability is {major}.{minor}"
        )
    if found.fast_accum and not use_fast_accum:
        raise ValueError(f"kernel: {kernel!r} is for use_fast_accum=True, must be another one without it")
    if not found.supports(*formats, "k" if x.is_ragged_k else "m"):
        groups = " with ragged k" if x.is_ragged_k else ""
        raise ValueError(
            f"kernel: {kernel!r} reads {found.operand} operands, must multiply {formats[0]} (a) and "
            f"{formats[1]} (b){groups}"
        )
