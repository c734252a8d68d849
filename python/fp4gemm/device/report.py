"""The report of ``python -m fp4gemm``: versions, libraries, devices and kernels."""

from __future__ import annotations

import collections
import dataclasses
import platform
from typing import Any

import torch

from .. import _native, kernel_table
from ..support import is_supported
from .selftest import is_executed

__all__ = ["kernel_rows", "kernels_text", "report", "report_text"]

_UNEXECUTED = (
    "the project has not executed its kernels on such a device: please report what "
    "python -m fp4gemm selftest --device {} says"
)
_NO_KERNELS = "none: this build has no CUDA kernels, so every call runs the CPU reference"


def kernel_rows() -> list[dict[str, Any]]:
    """The table of kernels as plain data."""
    return [
        {**dataclasses.asdict(kernel), "out_dtype": str(kernel.out_dtype).removeprefix("torch.")}
        for kernel in kernel_table.kernels()
    ]


def report() -> dict[str, Any]:
    """Versions, libraries, devices and kernels as plain data, with the reason where something is missing."""
    lib = _native.core()
    cuda = lib.fp4gemm_cuda_version()
    return {
        "fp4gemm": _native.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "library_dir": str(_native.library_dir()),
        "library": {
            "version": _native.version(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "cutlass": _native.text(lib.fp4gemm_cutlass_version()) or None,
            "archs": _native.text(lib.fp4gemm_built_archs()) or None,
        },
        "devices": _devices(),
        "kernels": kernel_rows(),
    }


def _devices() -> list[dict[str, Any]]:
    names = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices = [
        {
            "device": name,
            **dataclasses.asdict(is_supported(name)),
            "executed": name == "cpu" or is_executed(int(name.removeprefix("cuda:"))),
        }
        for name in names
    ]
    if len(names) == 1:
        why = "a CPU-only build of torch" if torch.version.cuda is None else "no GPU, or no driver"
        reason = f"cuda: torch sees no CUDA device ({why})"
        devices.append({"device": "cuda", "supported": False, "reason": reason, "executed": False})
    return devices


def report_text() -> str:
    """The report as text for a terminal."""
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
        if entry["supported"] and not entry["executed"]:
            lines.append(f"       {_UNEXECUTED.format(entry['device'])}")
    rows = data["kernels"]
    lines.append(f"kernels ({len(rows)})")
    lines += [f"  {line}" for line in _counts(rows)]
    return "\n".join(lines)


def _counts(rows: list[dict[str, Any]]) -> list[str]:
    """How many kernels each architecture has; the whole table would push the rest out of sight."""
    if not rows:
        return [_NO_KERNELS]
    lines = []
    for arch in sorted({row["arch"] for row in rows}):
        modes = collections.Counter(row["mode"] for row in rows if row["arch"] == arch)
        counts = ", ".join(f"{number} {mode}" for mode, number in sorted(modes.items()))
        lines.append(f"sm_{arch:<4} {counts}")
    return [*lines, "python -m fp4gemm kernels prints the table"]


def kernels_text() -> str:
    """The table of kernels as text for a terminal."""
    return "\n".join([_kernel_line(row) for row in kernel_rows()] or [_NO_KERNELS])


def _kernel_line(row: dict[str, Any]) -> str:
    tile, cluster = ("x".join(map(str, row[name])) for name in ("tile", "cluster"))
    return (
        f"{row['name']:<53} {row['mode']:<7} sm_{row['arch']:<4} tile {tile:<12} cluster {cluster:<4} "
        f"{row['epilogue']:<7} {row['operand']:<14} -> {row['out_dtype']}"
    )
