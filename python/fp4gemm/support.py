"""The operations that run on a device, and the reasons for those that do not: is_supported, ready."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from . import _checks, _native, kernel_table
from .kernel_table import Format

__all__ = ["Support", "TokenForm", "is_supported", "ready", "ready_for", "streams_prepacked"]

# What the tokens of a product are, or become in it: NVFP4, 16-bit numbers that are not quantized, FP8, or
# MXFP8.
TokenForm = Literal["nvfp4", "16-bit", "fp8", "mxfp8"]


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether every operation runs on a device. It is false as a condition if one does not."""

    supported: bool
    reason: str  # what runs there, or why something does not

    def __bool__(self) -> bool:
        return self.supported


# ---- what a device lacks

# The operations that some kernels do not offer: name, formats of a and b, what to pass instead.
_FORMS: tuple[tuple[str, tuple[Format, Format], str], ...] = (
    ("decoded operands", ("fp16", "fp16"), "pass the NVFP4Tensor, not what decode made"),
    ("prepacked weights", ("nvfp4", "prepacked"), "pass fp4gemm.unprepack of the PrepackedTensor"),
    ("unquantized activations", ("bf16", "nvfp4"), "pass fp4gemm.quantize of the activations"),
    (
        "FP8 tokens",
        ("e4m3", "nvfp4"),
        "pass fp4gemm.quantize of the tokens, or use layers with activations='per-token'",
    ),
    (
        "MXFP8 operands",
        ("mxfp8", "mxfp8"),
        "pass fp4gemm.quantize of both, or use layers with activations='per-token'",
    ),
    ("MXFP4 operands", ("mxfp4", "mxfp4"), "pass fp4gemm.quantize of both"),
    (
        "MXFP8 tokens beside MXFP4 weights",
        ("mxfp8", "mxfp4"),
        "pass fp4gemm.NVFP4Tensor.from_mxfp4 of the weight and fp4gemm.quantize of the tokens",
    ),
)
_DECODED, _PREPACKED, _UNQUANTIZED, FP8, MXFP8, MXFP4, MXFP8_MXFP4 = (name for name, _, _ in _FORMS)
_OF_MX = {formats: name for name, formats, _ in _FORMS if formats[0] in ("mxfp8", "mxfp4")}
_MODES = ("mm", "grouped_mm")
_PRODUCTS = (*_MODES, *(f"{mode} of {operands}" for mode in _MODES for operands, _, _ in _FORMS))
_OPERATIONS = ("quantize", *_PRODUCTS)


def _has_kernel(
    arch: int, num_sms: int, num_groups: int = 0, format_a: Format = "nvfp4", format_b: Format = "nvfp4"
) -> bool:
    """Whether a CUDA device of this compute capability has a kernel for a small GEMM of such operands."""
    sizes = (num_sms, 256, 256, 256, num_groups)
    return kernel_table.select_kernel(arch, *sizes, format_a=format_a, format_b=format_b) is not None


@functools.cache
def _cuda_gaps(index: int) -> dict[str, str]:
    """The operations (of _OPERATIONS) that do not run on a CUDA device, each with the reason."""
    properties = torch.cuda.get_device_properties(index)
    where = f"cuda:{index}, {properties.name} of compute capability {properties.major}.{properties.minor}"
    return gaps_of(kernel_table.device_arch(index), where, properties.multi_processor_count)


def gaps_of(arch: int, where: str, num_sms: int = 100) -> dict[str, str]:
    """The operations that do not run on a kind of device, each with the reason; needs no device.

    Args:
        arch: 10 * major + minor of the compute capability.
        where: the device, for the reasons.
        num_sms: SMs of the device; kernels exist for any number.

    Returns:
        The reasons by operation: "quantize", "mm", "grouped_mm", and the last two followed by " of decoded
        operands", " of prepacked weights", " of unquantized activations", " of FP8 tokens", " of MXFP8
        operands", " of MXFP4 operands" or " of MXFP8 tokens beside MXFP4 weights".
    """
    todo = (
        f"this fp4gemm is {kernel_table.built_text()}; build it from a checkout on this machine (make), "
        "or move the tensors to the CPU for the slow reference"
    )
    gaps = {}
    if _native.core().fp4gemm_quantize_supported(arch) != 1:
        gaps["quantize"] = f"no quantize, dequantize or decode kernel for {where}; {todo}"
    for mode, num_groups, kind in (("mm", 0, "GEMM"), ("grouped_mm", 2, "grouped GEMM")):
        if not _has_kernel(arch, num_sms, num_groups):
            gaps[mode] = f"no {kind} kernel for {where}; {todo}"
            continue
        for operands, formats, instead in _FORMS:
            if not _has_kernel(arch, num_sms, num_groups, *formats):
                reads = (
                    f"do not read {operands}"
                    if operands in (FP8, *_OF_MX.values())
                    else "read codes and scales"
                )
                gaps[f"{mode} of {operands}"] = f"the {kind} kernels for {where} {reads}; {instead}"
    return gaps


def is_supported(device: torch.device | str | int | None = None) -> Support:
    """Whether every operation runs on a device, with the reason::

        if support := fp4gemm.is_supported("cuda"):
            ...
        else:
            print(support.reason)

    Args:
        device: a torch.device, its name or a CUDA index; None is the current CUDA device, else the CPU.

    Returns:
        A :class:`Support`, which is false where an operation does not run.

    Raises:
        TypeError, ValueError: device does not name a torch device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _checks.as_device("device", device)
    if target.type == "cpu":
        return Support(True, "cpu: the reference in plain torch, exact and slow")
    if target.type != "cuda":
        return Support(False, f"{target}: fp4gemm runs on cuda and cpu devices only")
    if not torch.cuda.is_available():
        return Support(False, f"{target}: torch {torch.__version__} sees no CUDA device")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        return Support(False, f"{target}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    gaps = _cuda_gaps(index)
    missing = [gaps[operation] for operation in ("quantize", *_MODES) if operation in gaps]
    if missing:
        return Support(False, "; ".join(missing))
    name = torch.cuda.get_device_name(index)
    return Support(True, f"cuda:{index}: {name}, {kernel_table.built_text()}")


def streams_prepacked(device: torch.device, tokens: TokenForm = "nvfp4") -> bool:
    """Whether layers on a CUDA device should store prepacked weights; False for any other device.

    For 16-bit and for FP8 tokens they should if the kernels read weights that are prepacked for them. For
    NVFP4 tokens they should only if the tensor cores do not read NVFP4 too: those that do are faster for many
    tokens. MXFP8 weights are never prepacked.
    """
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _streams_prepacked(index, tokens)


@functools.cache
def _streams_prepacked(index: int, tokens: TokenForm) -> bool:
    properties, many = torch.cuda.get_device_properties(index), (4096, 4096, 4096)
    device = kernel_table.device_arch(index), properties.multi_processor_count
    if tokens == "mxfp8":
        return False
    if tokens == "fp8":
        return _has_kernel(*device, 0, "e4m3", "prepacked_fp8")
    if not _has_kernel(*device, 0, "nvfp4", "prepacked"):
        return False
    kernel = kernel_table.select_kernel(*device, *many, format_a="nvfp4", format_b="nvfp4")
    return not (tokens == "nvfp4" and kernel is not None and kernel.operand == "nvfp4")


# ---- the check before each call

# The CUDA indices on which each operation may run, and -1, which is Tensor.get_device() of a CPU tensor.
READY: dict[str, set[int]] = {operation: {-1} for operation in _OPERATIONS}

# The self-test multiplies, so it lies above this module, which every product calls. It registers two
# functions. The first tests a CUDA device if that is due and returns whether to enter the device in READY;
# the second warns that a product runs untested.
_before_first_product: Callable[[int], bool]
_warn_untested: Callable[[int], None]


def register_self_test(
    before_first_product: Callable[[int], bool], warn_untested: Callable[[int], None]
) -> None:
    """Set the functions that :func:`ready` and :func:`warn_untested` call with a CUDA index."""
    global _before_first_product, _warn_untested
    _before_first_product, _warn_untested = before_first_product, warn_untested


def ready(x: Tensor, operation: str) -> None:
    """Raise NotImplementedError when an operation (a key of READY) has no kernel for the device of x.

    After the first call on a device this is a set look-up. Before the first product on a kind of device on
    which the project has not executed its kernels, the self-test runs (:mod:`fp4gemm.device.selftest`), and
    RuntimeError is raised if a kernel is wrong. Under torch.compile the check happens when the graph runs.
    """
    index = x.get_device()
    if index in READY[operation] or torch.compiler.is_compiling():
        return
    if not x.is_cuda:
        raise NotImplementedError(f"{x.device}: fp4gemm runs on cuda and cpu devices only")
    gap = _cuda_gaps(index).get(operation)
    if gap is not None:
        raise NotImplementedError(gap)
    if operation in _PRODUCTS and not _before_first_product(index):
        return
    READY[operation].add(index)


def ready_for(a: Tensor, mode: str, formats: tuple[str, str]) -> None:
    """:func:`ready` for a product ("mm" or "grouped_mm") of operands in these formats."""
    ready(a, mode)
    if "fp16" in formats:
        ready(a, f"{mode} of {_DECODED}")
    if formats[0] == "bf16":
        ready(a, f"{mode} of {_UNQUANTIZED}")
    if formats[0] == "e4m3":
        ready(a, f"{mode} of {FP8}")
    if formats in _OF_MX:
        ready(a, f"{mode} of {_OF_MX[formats]}")
    if formats[1] == "prepacked":
        ready(a, f"{mode} of {_PREPACKED}")


def warn_untested(a: Tensor) -> None:
    """Warn once for each CUDA device whose products are traced or captured before its self-test has run."""
    if a.device.type == "cuda" and a.device.index is not None:
        _warn_untested(a.device.index)
