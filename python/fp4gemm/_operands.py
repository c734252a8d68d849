"""Containers as operands of products: what they hold, whether they fit, which kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _gemm_checks, kernel_table, selection
from .containers.nvfp4 import DecodedTensor, NVFP4Tensor
from .containers.prepacked import PrepackedTensor

Left = NVFP4Tensor | DecodedTensor | Tensor
Right = NVFP4Tensor | DecodedTensor | PrepackedTensor
OR_PLAIN, OR_PREPACKED = "or a bfloat16 or float16 tensor", "or an fp4gemm.PrepackedTensor"
# fl32(1 / (36 * B_a * B_b)): what turns two amaxes into decode multipliers. Exact bits of float32.
ALPHA = {
    (448, 448): float.fromhex("0x1.293726p-23"),
    (448, 256): float.fromhex("0x1.041042p-22"),
    (256, 448): float.fromhex("0x1.041042p-22"),
    (256, 256): float.fromhex("0x1.c71c72p-22"),
}
# fl32(1 / (6 * B_b)), beside activations that never were quantized.
ALPHA_UNQUANTIZED = {448: float.fromhex("0x1.861862p-12"), 256: float.fromhex("0x1.555556p-11")}


def container(name: str, value: object, others: str) -> NVFP4Tensor | DecodedTensor:
    """The value itself, of either kind; ``others`` says in the error what else the argument may be."""
    if isinstance(value, (NVFP4Tensor, DecodedTensor)):
        return value
    raise TypeError(
        f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor or fp4gemm.DecodedTensor, "
        f"{others} (see fp4gemm.quantize; fp4gemm.scaled_mm takes raw tensors)"
    )


def parts(value: NVFP4Tensor | DecodedTensor) -> tuple[Tensor, Tensor | None]:
    """(data, scales or None) of any rank."""
    return (value.codes, value.scales) if isinstance(value, NVFP4Tensor) else (value.data, None)


def same_rotation(names: tuple[str, str], of_a: int | None, b: Right) -> None:
    """Raise ValueError unless the blocks of both operands were rotated by the same signs, or neither's."""
    if of_a != b.hadamard_signs:
        signs = ["None (not rotated)" if s is None else f"{s:#06x}" for s in (of_a, b.hadamard_signs)]
        raise ValueError(
            f"{names[1]}: hadamard_signs is {signs[1]}, must be {signs[0]} as of {names[0]} "
            "(rotate both operands alike)"
        )


def chosen_kernel(
    kernel: str | None,
    a: Tensor,
    n: int,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    mode: str,
    activation: int,
    batch_invariant: bool,
    ragged: str = "m",
) -> str | None:
    """The kernel that the call forces, checked, or that the rules name; None leaves it to the library."""
    if kernel is not None:
        _check_kernel(kernel, a, formats, out_dtype, mode, activation, ragged)
        return kernel
    if batch_invariant or not selection.RULES:
        return None
    gated = activation == _gemm_checks.SWIGLU
    return selection.find(a, n, _gemm_checks.depth(a), out_dtype, mode, gated, formats, ragged)


def _check_kernel(
    kernel: object,
    a: Tensor,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    mode: str,
    activation: int,
    ragged: str,
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
    found = kernel_table.kernel_by_name(kernel)
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
    if found.arch != kernel_table.kernel_arch(a.get_device()):
        major, minor = torch.cuda.get_device_capability(a.device)
        raise NotImplementedError(
            f"kernel: {kernel!r} does not run on {a.device}, whose compute capability is {major}.{minor}"
        )
    if not found.supports(*formats, ragged):
        groups = " with ragged k" if ragged == "k" else ""
        raise ValueError(
            f"kernel: {kernel!r} reads {found.operand} operands, must multiply {formats[0]} (a) and "
            f"{formats[1]} (b){groups}"
        )
