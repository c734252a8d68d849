"""Copies the headers that a kernel needs which is compiled at run time into one folder.

    python kernel_headers.py OUT INCLUDE_DIR...

The folders are searched in their order: cpp/nvrtc, cpp, and then those of CUTLASS and of the CUDA toolkit,
of which only headers in subfolders are copied. NVRTC finds CUDA's own headers, such as cuda_fp16.h, in the
folder of the CUDA headers. A header is copied whatever the conditions around its #include, except for those
that match EXCLUDED.
"""

from __future__ import annotations

import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOTS = (  # and the files of the first folder
    "cutlass_evt/epilogue/generated.hpp",
    "cutlass_evt/epilogue/operations.hpp",
    "cutlass_evt/kernel/mixed_input_generated.hpp",
    "cutlass_evt/kernel/sm90_nvfp4.hpp",
    "cutlass_evt/kernel/sm90_gemm.hpp",
    "cutlass_evt/kernel/sm90_gemm_generated.hpp",
)
EXCLUDED = ("*_ext.hpp",)  # the wgmma shapes that CuTe has on demand, 6 MB
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_STD_INCLUDE = re.compile(r"^\s*#\s*include\s*CUDA_STD_HEADER\((\w+)\)", re.MULTILINE)  # of CUTLASS


def closure(folders: list[Path]) -> dict[str, Path]:
    """The headers, by the names under which they are included."""
    found: dict[str, Path] = {}

    def add(name: str, beside: Path) -> None:
        for candidate in (beside / name, Path(name)):
            normal = _without_dots(candidate)
            if str(normal) in found:
                return
            for i, folder in enumerate(folders):
                path = folder / normal
                is_excluded = any(fnmatch(path.name, pattern) for pattern in EXCLUDED)
                if path.is_file() and not is_excluded and (i < 2 or len(normal.parts) > 1):
                    found[str(normal)] = path
                    text = path.read_text(encoding="utf-8", errors="replace")
                    for match in _INCLUDE.finditer(text):
                        add(match[1], normal.parent)
                    for match in _STD_INCLUDE.finditer(text):
                        add(f"cuda/std/{match[1]}", Path())
                    return

    for root in (*ROOTS, *sorted(path.name for path in folders[0].iterdir())):
        add(root, Path())
    return found


def _without_dots(path: Path) -> Path:
    kept: list[str] = []
    for part in path.parts:
        if part == "..":
            kept.pop()
        else:
            kept.append(part)
    return Path(*kept)


def main() -> None:
    out, *folders = (Path(argument) for argument in sys.argv[1:])
    shutil.rmtree(out, ignore_errors=True)
    for name, path in closure(folders).items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


if __name__ == "__main__":
    main()
