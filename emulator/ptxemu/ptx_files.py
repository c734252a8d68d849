"""Extraction of PTX from libraries and objects. It needs the standard library only, since the build runs it.

python ptx_files.py LIBRARY FOLDER [CUOBJDUMP]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def find_cuobjdump() -> str | None:
    """cuobjdump of the nvidia-cuda-cuobjdump wheel in this environment, else that on the PATH, else None."""
    beside = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/cuobjdump"))
    return str(beside[-1]) if beside else shutil.which("cuobjdump")


def extract_ptx(library: Path | str, folder: Path | str, cuobjdump: Path | str | None = None) -> list[Path]:
    """Writes the PTX for sm_10* and sm_12* that a library or object has to a folder, and returns the files.

    .ptx files that the folder has already are removed.
    """
    tool = cuobjdump or find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump: neither in the nvidia-cuda-cuobjdump wheel nor on the PATH")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.ptx"):
        path.unlink()
    kept = []
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [str(tool), "-xptx", "all", str(Path(library).resolve())],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for path in sorted(Path(scratch).glob("*.ptx")):
            if re.search(r"^\.target sm_1[02]\d", path.read_text(errors="replace")[:4096], re.MULTILINE):
                kept.append(folder / path.name)
                shutil.move(path, kept[-1])
    return kept


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    if not extract_ptx(*sys.argv[1:]):
        sys.exit(
            f"{sys.argv[1]} holds no PTX for sm_10* or sm_12*: compile with code=compute_100f or"
            " compute_120f as well"
        )
