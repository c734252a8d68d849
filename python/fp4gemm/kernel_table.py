"""The architectures and GEMM kernels in the installed library, and the kernel that a call gets."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Literal

import torch

from . import _checks, _native, _structs, activations

__all__ = [
    "Architecture",
    "KernelInfo",
    "architecture",
    "architectures",
    "built_text",
    "device_arch",
    "kernel_arch",
    "kernel_by_name",
    "kernels",
    "select_kernel",
]

# Indices, or numbers: fp4gemm_dtype_t, fp4gemm_ragged_t and fp4gemm_format_t of fp4gemm.h.
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RAGGED = ("m", "k")
_FORMAT_NUMBERS = {
    "nvfp4": 0,
    "fp16": 1,
    "bf16": 2,
    "prepacked": 3,
    "e4m3": 5,
    "prepacked_fp8": 6,
    "mxfp8": 7,
    "mxfp4": 8,
}
FORMATS = tuple(_FORMAT_NUMBERS)
Ragged = Literal["m", "k"]
Format = Literal["nvfp4", "fp16", "bf16", "prepacked", "e4m3", "prepacked_fp8", "mxfp8", "mxfp4"]
# The pairs of formats, of a and of b, that a kernel supports, by KernelInfo.operand: any of the first formats
# beside any of the second. The library converts an operand first where the kernel reads another format.
_SUPPORTED: dict[str, tuple[tuple[tuple[Format, ...], tuple[Format, ...]], ...]] = {
    "nvfp4": ((("nvfp4",), ("nvfp4",)),),
    "mxfp8": ((("mxfp8",), ("mxfp8", "mxfp4")),),
    "mxfp4": ((("mxfp4",), ("mxfp4",)),),
    "mxfp8_mxfp4": ((("mxfp8",), ("mxfp4",)),),
    "fp16": (
        (("nvfp4", "fp16"), ("nvfp4", "fp16")),
        (("mxfp8",), ("mxfp8", "mxfp4")),
        (("mxfp4",), ("mxfp4",)),
    ),
    "prepacked": ((("nvfp4", "fp16"), ("nvfp4", "prepacked")),),
    "prepacked_bf16": ((("bf16",), ("nvfp4", "prepacked")),),
    "prepacked_fp8": ((("e4m3",), ("nvfp4", "prepacked_fp8")),),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A GPU architecture that the installed library has GEMM kernels for."""

    arch: int  # KernelInfo.arch of its kernels
    devices: tuple[str, ...]  # the compute capabilities that they serve, for example ("10.0", "10.3")
    is_executed: bool  # whether the project has executed its kernels on such hardware


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One row of the table of built GEMM kernels."""

    name: str  # the value for mm(..., kernel=name)
    mode: str  # "dense": for mm and scaled_mm; "grouped": for grouped_mm and scaled_grouped_mm
    epilogue: str  # "rowcol": row and column vectors, scalar, bias, activation, addend; "gated": a gated one
    arch: int  # 10 * major + minor of the compute capability that it was built for
    tile: tuple[int, int, int]  # (m, n, k)
    cluster: tuple[int, int]  # (m, n)
    out_dtype: torch.dtype
    # "nvfp4": tensor cores read codes and scales; "fp16": codes are decoded first; "prepacked": b is
    # prepacked and a is float16; "prepacked_bf16": b is prepacked and a is bfloat16; "prepacked_fp8": b is
    # prepacked for FP8 tokens, which are a
    operand: str
    is_swapped: bool  # it multiplies B by A and writes D transposed, which is cheap for few rows of A
    fast_accum: bool = False  # it keeps sums over k in the accumulators of FP8 tensor cores: use_fast_accum

    @property
    def is_gated(self) -> bool:
        """Whether the epilogue makes one column of D from two columns of the product."""
        return self.epilogue == "gated"

    def supports(self, format_a: str, format_b: str, ragged: str = "m") -> bool:
        """Whether the kernel multiplies operands in these formats; ``ragged`` as in :func:`select_kernel`."""
        if ragged == "k" and self.operand.startswith("prepacked"):
            return False
        return any(format_a in of_a and format_b in of_b for of_a, of_b in _SUPPORTED[self.operand])


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call}: {_native.text(_native.core().fp4gemm_last_error())}")


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """Every architecture that the installed library has GEMM kernels for; none for a build without CUDA."""
    lib = _native.core()
    row = _structs.ArchitectureInfo()
    rows = []
    for index in range(lib.fp4gemm_architecture_count()):
        _check(lib.fp4gemm_architecture_info(index, ctypes.byref(row)), f"fp4gemm_architecture_info({index})")
        rows.append(Architecture(row.arch, tuple(_native.text(row.devices).split()), bool(row.is_executed)))
    return tuple(rows)


@functools.cache
def _table() -> tuple[KernelInfo, ...]:
    lib = _native.core()
    row = _structs.KernelInfo()
    rows = []
    for index in range(lib.fp4gemm_kernel_count()):
        _check(lib.fp4gemm_kernel_info(index, ctypes.byref(row)), f"fp4gemm_kernel_info({index})")
        rows.append(
            KernelInfo(
                name=_native.text(row.name),
                mode=_native.text(row.mode),
                epilogue=_native.text(row.epilogue),
                arch=row.arch,
                tile=(row.tile_m, row.tile_n, row.tile_k),
                cluster=(row.cluster_m, row.cluster_n),
                out_dtype=_OUT_DTYPES[row.out_dtype],
                operand=_native.text(row.operand),
                is_swapped=row.is_swapped != 0,
                fast_accum=row.fast_accum != 0,
            )
        )
    return tuple(rows)


def kernels() -> list[KernelInfo]:
    """Every GEMM kernel in the installed library, whatever GPU is present; empty for a build without CUDA."""
    return list(_table())


def kernel_by_name(name: str) -> KernelInfo | None:
    """The kernel of that name, or None."""
    return next((kernel for kernel in _table() if kernel.name == name), None)


def built_text() -> str:
    """What the library was built for, for error texts."""
    lib = _native.core()
    archs = _native.text(lib.fp4gemm_built_archs())
    return f"built for {archs}" if archs else "built without CUDA kernels"


def device_arch(index: int) -> int:
    """10 * major + minor of the compute capability of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return 10 * properties.major + properties.minor


def kernel_arch(index: int) -> int | None:
    """The ``arch`` of the kernels that serve a CUDA device, or None where none do."""
    arch: int = _native.core().fp4gemm_kernel_arch(device_arch(index))
    return None if arch < 0 else arch


def architecture(index: int) -> Architecture | None:
    """The architecture whose kernels serve a CUDA device, or None where none do."""
    arch = kernel_arch(index)
    return next((found for found in architectures() if found.arch == arch), None)


def select_kernel(
    arch: int,
    num_sms: int,
    m: int,
    n: int,
    k: int,
    num_groups: int = 0,
    ragged: Ragged = "m",
    out_dtype: torch.dtype = torch.bfloat16,
    format_a: Format = "nvfp4",
    format_b: Format = "nvfp4",
    batch_invariant: bool = False,
    activation: str | None = None,
    use_fast_accum: bool = False,
) -> KernelInfo | None:
    """The kernel that a call of these sizes would get, or None where no kernel serves it; needs no device.

    Args:
        arch: 10 * major + minor of the compute capability.
        num_sms: SMs of the device.
        m, n, k: as for mm or grouped_mm; for ragged k the padded total.
        num_groups: 0 for mm, else the number of groups.
        ragged: the size that differs from group to group: "m" (rows of a) or "k".
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        format_a, format_b: how the operands are stored: "nvfp4"; "fp16" (decoded or, for a, never quantized);
            "bf16" (a only: never quantized); "e4m3" (a only: FP8 tokens); "prepacked" (b only);
            "prepacked_fp8" (b only, beside "e4m3"); "mxfp8" and "mxfp4" (both
            operands have the same of the two, or a is "mxfp8" and b "mxfp4").
        batch_invariant, activation, use_fast_accum: as for mm.

    Raises:
        TypeError, ValueError: ragged, out_dtype, a format or activation has another value.
    """
    _checks.is_one_of("ragged", ragged, _RAGGED)
    _checks.is_float_dtype("out_dtype", out_dtype)
    _checks.is_one_of("format_a", format_a, FORMATS)
    _checks.is_one_of("format_b", format_b, FORMATS)
    index: int = _native.core().fp4gemm_select_kernel(
        arch,
        num_sms,
        m,
        n,
        k,
        num_groups,
        _RAGGED.index(ragged),
        _OUT_DTYPES.index(out_dtype),
        _FORMAT_NUMBERS[format_a],
        _FORMAT_NUMBERS[format_b],
        int(batch_invariant),
        int(use_fast_accum),
        activations.of_name(activation).number,
    )
    return None if index < 0 else _table()[index]
