"""What was built and what runs here: is_supported, kernels, and the report of ``python -m fp4gemm``."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform
from typing import Any

import torch
from torch import Tensor

from . import _checks, _gemm_checks, _native

__all__ = ["KernelInfo", "is_supported", "kernels", "ready", "report", "report_text", "select_kernel"]

# Indices: fp4gemm_dtype_t, fp4gemm_ragged_t and fp4gemm_format_t of fp4gemm.h.
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RAGGED = ("rows", "columns")
FORMATS = ("nvfp4", "f16", "bf16", "prepacked")
# What a kernel takes for a and for b, by its operand; what is in another form than it reads is converted.
_TAKES = {
    "nvfp4": (("nvfp4",), ("nvfp4",)),
    "f16": (("nvfp4", "f16"), ("nvfp4", "f16")),
    "prepacked": (("nvfp4", "f16"), ("nvfp4", "prepacked")),
    "prepacked_bf16": (("bf16",), ("nvfp4", "prepacked")),
}


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One row of the table of built GEMM kernels."""

    name: str  # what mm(..., kernel=name) takes
    mode: str  # "dense": for mm and scaled_mm; "grouped": for grouped_mm and scaled_grouped_mm
    epilogue: str  # "rowcol": row and column vectors, scalar, bias, activation, addend; "swiglu": gated
    arch: int  # 10 * major + minor of the compute capability it was built for
    tile: tuple[int, int, int]  # (m, n, k)
    cluster: tuple[int, int]  # (m, n)
    out_dtype: torch.dtype
    # "nvfp4": tensor cores read codes and scales; "f16": codes are decoded first; "prepacked": b is prepacked
    # and a in float16 or, with "prepacked_bf16", in bfloat16
    operand: str
    is_swapped: bool  # it multiplies B by A and writes D transposed: cheap for few rows of A

    def takes(self, format_a: str, format_b: str, by_columns: bool = False) -> bool:
        """Whether it multiplies operands in these formats, groups being of columns or not."""
        of_a, of_b = _TAKES[self.operand]
        if by_columns and self.operand.startswith("prepacked"):
            return False
        return format_a in of_a and format_b in of_b


@functools.cache
def _table() -> tuple[KernelInfo, ...]:
    lib = _native.core()
    row = _native.CKernelInfo()
    rows = []
    for index in range(lib.fp4gemm_kernel_count()):
        status = lib.fp4gemm_kernel_info(index, ctypes.byref(row))
        if status != 0:
            raise RuntimeError(f"fp4gemm_kernel_info({index}): {_native.text(lib.fp4gemm_last_error())}")
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


def select_kernel(
    arch: int,
    num_sms: int,
    m: int,
    n: int,
    k: int,
    num_groups: int = 0,
    ragged: str = "rows",
    out_dtype: torch.dtype = torch.bfloat16,
    format_a: str = "nvfp4",
    format_b: str = "nvfp4",
    batch_invariant: bool = False,
    activation: str | None = None,
) -> KernelInfo | None:
    """The kernel that a call of these sizes would get, None where none serves it; no device is needed.

    Args:
        arch: 10 * major + minor of the compute capability.
        num_sms: multiprocessors of the device.
        m, n, k: as for mm or grouped_mm; of grouped columns k is the padded number.
        num_groups: 0 for mm, else the number of groups.
        ragged: which size differs from group to group: "rows" (of a) or "columns" (k).
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        format_a, format_b: what the operands are: "nvfp4"; "f16", decoded or, of a, never quantized; "bf16",
            of a that never was quantized; "prepacked", of b.
        batch_invariant, activation: as for mm.

    Raises:
        TypeError, ValueError: ragged, out_dtype, a format or activation is another one.
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
        FORMATS.index(format_a),
        FORMATS.index(format_b),
        int(batch_invariant),
        _gemm_checks.activation(activation),
    )
    return None if index < 0 else _table()[index]


def _selected(
    index: int, num_groups: int, format_a: str = "nvfp4", format_b: str = "nvfp4"
) -> KernelInfo | None:
    """The kernel that a small GEMM of such operands would get on a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    sizes = (properties.multi_processor_count, 256, 256, 256, num_groups)
    arch = 10 * properties.major + properties.minor
    return select_kernel(arch, *sizes, format_a=format_a, format_b=format_b)


def kernel_family(index: int) -> int | None:
    """The ``arch`` of the kernels that serve a CUDA device, None where none do."""
    selected = _selected(index, 0)
    return None if selected is None else selected.arch


@functools.cache
def _streams_prepacked(index: int) -> bool:
    return _selected(index, 0, "nvfp4", "prepacked") is not None


def streams_prepacked(device: torch.device) -> bool:
    """Whether kernels of a CUDA device read prepacked weights; False on others, where nothing is gained."""
    if device.type != "cuda":
        return False
    return _streams_prepacked(torch.cuda.current_device() if device.index is None else device.index)


# Operands that some devices do not take: what they are, an example, what to pass instead.
DECODED, PREPACKED, UNQUANTIZED = "decoded operands", "prepacked weights", "unquantized activations"
_FORMS = (
    (DECODED, ("f16", "f16"), "pass the NVFP4Tensor, not what decode made"),
    (PREPACKED, ("nvfp4", "prepacked"), "pass fp4gemm.unpack of the PrepackedTensor"),
    (UNQUANTIZED, ("bf16", "nvfp4"), "pass fp4gemm.quantize of the activations"),
)


@functools.cache
def _cuda_gaps(index: int) -> dict[str, str]:
    """What does not run on a CUDA device (a key of READY), and why; nothing when all does."""
    properties = torch.cuda.get_device_properties(index)
    arch = 10 * properties.major + properties.minor
    where = f"cuda:{index}, {properties.name} of compute capability {properties.major}.{properties.minor}"
    lib = _native.core()
    todo = (
        f"this fp4gemm is {built_text()}; build it from a checkout on this machine (make), "
        "or move the tensors to the CPU for the slow reference"
    )
    gaps = {}
    if lib.fp4gemm_quantize_supported(arch) != 1:
        gaps["quantize"] = f"no quantize, dequantize or decode kernel for {where}; {todo}"
    for what, num_groups, kind in (("mm", 0, "GEMM"), ("grouped_mm", 2, "grouped GEMM")):
        if _selected(index, num_groups) is None:
            gaps[what] = f"no {kind} kernel for {where}; {todo}"
            continue
        for operands, formats, instead in _FORMS:
            if _selected(index, num_groups, *formats) is None:
                gaps[f"{what} of {operands}"] = (
                    f"the {kind} kernels for {where} read packed operands; {instead}"
                )
    return gaps


def is_supported(device: torch.device | str | int | None = None) -> tuple[bool, str]:
    """(True, what runs there) or (False, why not): whether every operation runs on a device.

    Args:
        device: a torch.device, its name or a CUDA index; None is the current CUDA device, else the CPU.

    Raises:
        TypeError, ValueError: device names no torch device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _checks.as_device("device", device)
    if target.type == "cpu":
        return True, "cpu: the reference in plain torch, exact and slow"
    if target.type != "cuda":
        return False, f"{target}: fp4gemm runs on cuda and cpu devices only"
    if not torch.cuda.is_available():
        return False, f"{target}: torch {torch.__version__} sees no CUDA device"
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        return False, f"{target}: torch sees {torch.cuda.device_count()} CUDA device(s)"
    gaps = _cuda_gaps(index)
    missing = [gaps[what] for what in ("quantize", "mm", "grouped_mm") if what in gaps]
    if missing:
        return False, "; ".join(missing)
    return True, f"cuda:{index}: {torch.cuda.get_device_name(index)}, {built_text()}"


_MODES = ("mm", "grouped_mm")
_PRODUCTS = (*_MODES, *(f"{what} of {operands}" for what in _MODES for operands, _, _ in _FORMS))

# CUDA indices that passed; -1: no CUDA.
READY: dict[str, set[int]] = {what: {-1} for what in ("quantize", *_PRODUCTS)}


def ready(x: Tensor, what: str) -> None:
    """Raise NotImplementedError when ``what`` (a key of READY) has no kernel for the device of x.

    A set look-up once a device has passed. Before the first product on a device of a kind that was never
    measured its kernels are tested (:mod:`fp4gemm.device.selftest`); RuntimeError is raised if one is wrong.
    Under torch.compile the question is left to the run of the graph.
    """
    index = x.get_device()
    if index in READY[what] or torch.compiler.is_compiling():
        return
    if not x.is_cuda:
        raise NotImplementedError(f"{x.device}: fp4gemm runs on cuda and cpu devices only")
    gap = _cuda_gaps(index).get(what)
    if gap is not None:
        raise NotImplementedError(gap)
    if what in _PRODUCTS:
        from .device import selftest  # which imports this module

        if not selftest.before_first_product(index):
            return
    READY[what].add(index)


def ready_for(a: Tensor, mode: str, formats: tuple[str, str]) -> None:
    """:func:`ready` for a product ("mm", "grouped_mm") of operands in these formats."""
    ready(a, mode)
    if "f16" in formats:
        ready(a, f"{mode} of {DECODED}")
    if formats[0] == "bf16":
        ready(a, f"{mode} of {UNQUANTIZED}")
    if formats[1] == "prepacked":
        ready(a, f"{mode} of {PREPACKED}")


def report() -> dict[str, Any]:
    """Versions, libraries, devices and kernels as plain data, with the reason where something is missing."""
    from . import __version__

    result: dict[str, Any] = {
        "fp4gemm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "library_dir": str(_native.library_dir()),
    }
    lib = _native.core()
    cuda = lib.fp4gemm_cuda_version()
    result["library"] = {
        "version": _native.text(lib.fp4gemm_version_string()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "cutlass": _native.text(lib.fp4gemm_cutlass_version()) or None,
        "archs": _native.text(lib.fp4gemm_built_archs()) or None,
    }
    names = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    result["devices"] = []
    for name in names:
        supported, reason = is_supported(name)
        result["devices"].append({"device": name, "supported": supported, "reason": reason})
    if len(names) == 1:
        result["devices"].append(
            {
                "device": "cuda",
                "supported": False,
                "reason": "cuda: torch sees no CUDA device " + _no_cuda_reason(),
            }
        )
    result["kernels"] = [
        {**dataclasses.asdict(kernel), "out_dtype": str(kernel.out_dtype).removeprefix("torch.")}
        for kernel in kernels()
    ]
    return result


def _no_cuda_reason() -> str:
    return "(a CPU-only build of torch)" if torch.version.cuda is None else "(no GPU, or no driver)"


def report_text() -> str:
    """The report as a page for people."""
    data = report()
    library = data["library"]
    lines = [
        f"fp4gemm {data['fp4gemm']}",
        f"  python     {data['python']} on {data['platform']}",
        f"  torch      {data['torch']} (CUDA {data['torch_cuda'] or 'none'})",
        f"  libraries  {data['library_dir']}",
        f"             version {library['version']}, CUDA {library['cuda'] or 'none'}, "
        f"CUTLASS {library['cutlass'] or 'none'}, archs {library['archs'] or 'none'}",
        "devices",
    ]
    for entry in data["devices"]:
        lines.append(f"  {'yes' if entry['supported'] else 'no ':3}  {entry['reason']}")
    lines.append(f"kernels ({len(data['kernels'])})")
    for entry in data["kernels"]:
        lines.append(f"  {_kernel_line(entry)}")
    if not data["kernels"]:
        lines.append("  none: this build has no CUDA kernels, so every call runs the CPU reference")
    return "\n".join(lines)


def _kernel_line(entry: dict[str, Any]) -> str:
    tile, cluster = ("x".join(map(str, entry[what])) for what in ("tile", "cluster"))
    return (
        f"{entry['name']:<53} {entry['mode']:<7} sm_{entry['arch']:<4} tile {tile:<12} cluster {cluster:<4} "
        f"{entry['epilogue']:<7} {entry['operand']:<14} -> {entry['out_dtype']}"
    )


def kernels_text() -> str:
    """The table of kernels for people."""
    lines = [_kernel_line(entry) for entry in report()["kernels"]]
    return "\n".join(lines or ["none: this build has no CUDA kernels, so every call runs the CPU reference"])
