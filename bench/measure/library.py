"""All that the benchmarks use of fp4gemm beyond its public interface, in one place.

``kernels_of`` and ``operands_read`` say what the kernels of a device are. The benchmarks decide by them, not
by compute capabilities, in which forms operands are multiplied and which baselines are of interest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NoReturn, cast
from unittest import mock

import fp4gemm
import torch
from fp4gemm import _jit, _native, kernel_table, selection, support
from fp4gemm import activations as _activations
from fp4gemm.activations import ActivationName
from fp4gemm.device.products import Product, error_line, gaussian_weights, occupied_groups
from fp4gemm.device.products import difference as product_difference
from fp4gemm.device.timing import (
    MIN_CALLS,
    Call,
    Timing,
    calls_for,
    capture,
    rotations,
    sets,
    time_interleaved,
)
from fp4gemm.integrations.serving import products
from fp4gemm.integrations.serving import weights as serving_weights
from fp4gemm.kernel_table import KernelInfo, kernel_by_name
from fp4gemm.ops import options as _options
from fp4gemm.ops.options import SIGNS
from fp4gemm.ops.parts import OperandParts
from fp4gemm.recipe import INPUTS, StoredActivations
from fp4gemm.training import _copies as training_copies
from fp4gemm.training import _step as training_step
from torch import Tensor

__all__ = [
    "INPUTS",
    "MIN_CALLS",
    "SIGNS",
    "ActivationName",
    "Call",
    "KernelInfo",
    "OperandParts",
    "Product",
    "StoredActivations",
    "Timing",
    "activation_number",
    "calls_for",
    "capture",
    "chosen_kernel",
    "compile_ahead",
    "error_line",
    "gaussian_weights",
    "gemm_operator",
    "has_nvfp4_cores",
    "kernel_by_name",
    "kernels_of",
    "library_file",
    "needs_cores",
    "occupied_groups",
    "operands_read",
    "operator_arguments",
    "product_difference",
    "products",
    "rotations",
    "serving_weights",
    "sets",
    "stream_of",
    "streams_prepacked",
    "swizzle_scales",
    "time_interleaved",
    "training_copies",
    "training_step",
]


@functools.cache
def kernels_of(device: torch.device) -> tuple[KernelInfo, ...]:
    """The GEMM kernels of this build that serve a device; none for the CPU."""
    if device.type != "cuda":
        return ()
    arch = kernel_table.kernel_arch(device.index)
    return tuple(kernel for kernel in fp4gemm.kernels() if kernel.arch == arch)


def operands_read(device: torch.device) -> frozenset[str]:
    """The forms of operands that the kernels of a device read: every ``KernelInfo.operand`` among them."""
    return frozenset(kernel.operand for kernel in kernels_of(device))


def has_nvfp4_cores(operands: Collection[str]) -> bool:
    """Whether a device with kernels that read these forms multiplies NVFP4 in its tensor cores.

    Where it does not, as on Hopper, there are kernels that multiply decoded operands.
    """
    return "nvfp4" in operands and "fp16" not in operands


def needs_cores(what: str, form: str = "NVFP4") -> str:
    """Why ``what`` does not run on a device without tensor cores that multiply operands in this form."""
    return f"{what} needs tensor cores that multiply {form} (compute capability 10.0 or newer)"


def streams_prepacked(device: torch.device) -> bool:
    """Whether the layers on a device hold prepacked weights for quantized tokens."""
    return support.streams_prepacked(device)


class _Wanted(Exception):
    """A kernel is not loaded yet."""


def compile_ahead(calls: Iterable[Call]) -> None:
    """Compiles the kernels that calls with epilogues in Python need, by a process for each CPU.

    Calls whose kernels are loaded are made. A kernel that the cache on disk has is not compiled again.
    """
    wanted: dict[tuple[str, str], None] = {}

    def note(source: str, header: str) -> NoReturn:
        wanted[source, header] = None
        raise _Wanted

    with mock.patch.object(_jit, "compiled", note):
        for call in calls:
            with contextlib.suppress(_Wanted, NotImplementedError):
                call()
    # The processes use NVRTC alone, so that they may be forked from one that uses the GPU.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(_compile, wanted))


def _compile(wanted: tuple[str, str]) -> None:
    _jit.compiled(*wanted)


def chosen_kernel(
    device: torch.device,
    shape: tuple[int, int, int],
    formats: tuple[str, str],
    groups: int = 0,
) -> str | None:
    """The name of the kernel that mm (with ``groups``: grouped_mm) runs for (m, n, k) on a CUDA device."""
    m, n, k = shape
    format_a, format_b = cast("tuple[Any, Any]", formats)  # of kernel_table.Format
    if selection.RULES:
        rows = torch.empty(0, m, device=device).t()
        mode = "grouped" if groups else "dense"
        named = selection.find(rows, n, k, torch.bfloat16, mode, False, (format_a, format_b))
        if named is not None:
            return named
    found = kernel_table.select_kernel(
        kernel_table.device_arch(device.index),
        torch.cuda.get_device_properties(device).multi_processor_count,
        m,
        n,
        k,
        groups,
        format_a=format_a,
        format_b=format_b,
    )
    return None if found is None else found.name


def activation_number(name: ActivationName) -> int:
    """The number of an activation, which the operators take."""
    return _activations.by_name[name].number


def gemm_operator(a: fp4gemm.NVFP4Tensor, b: fp4gemm.NVFP4Tensor) -> Call:
    """A call of the operator that mm calls, without the Python of mm; alpha is 1."""
    operators = torch.ops.fp4gemm
    return lambda: operators.gemm(a.codes, b.codes, a.scales, b.scales, alpha_row=a.amax, alpha_col=b.amax)


def operator_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of reference.quantize and quantize_both, but axis, for options of fp4gemm.quantize."""
    defaults = _options.defaults_of(_options.QuantizeOptions)
    return _options.operator_arguments({**defaults, **options})


def stream_of(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device; 0 for the CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def swizzle_scales(compact: Tensor) -> Tensor:
    """Scales (rows, columns) in the swizzled layout: one launch of the C interface, on a CPU by torch."""
    device, (rows, columns) = compact.device, compact.shape
    if device.type != "cuda":
        return fp4gemm.swizzle_scales(compact)
    shape = fp4gemm.layout.padded_scale_shape(rows, 16 * columns)
    swizzled = torch.empty(shape, dtype=compact.dtype, device=device)
    library = _native.core()
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (compact, swizzled))
    source, target = pointers
    sizes = map(ctypes.c_int64, (rows, columns))
    distance, stream = ctypes.c_int64(compact.stride(0)), ctypes.c_void_p(stream_of(device))
    status = library.fp4gemm_swizzle_scales(1, *sizes, source, distance, target, device.index, stream)
    if status != 0:
        raise RuntimeError(library.fp4gemm_last_error().decode())
    return swizzled


def library_file() -> bytes:
    """The contents of libfp4gemm, by which builds are told apart."""
    return _native.library_path(_native.CORE_LIBRARY).read_bytes()
