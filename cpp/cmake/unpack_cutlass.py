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
MADE_OF = "made-of.txt"  # in FOLDER: the REQUIREMENTS of what is there
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
    made_of = FOLDER / MADE_OF
    if made_of.is_file() and made_of.read_text() == REQUIREMENTS.read_text():
        return
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "--dest", downloads, "-r", REQUIREMENTS], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        # A folder that is not whole never has the name that cutlass.cmake looks for.
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
            unpack(wheel, Path(made) / "cutlass")
            (Path(made) / "cutlass" / MADE_OF).write_text(REQUIREMENTS.read_text())
            shutil.rmtree(FOLDER, ignore_errors=True)
            (Path(made) / "cutlass").rename(FOLDER)


if __name__ == "__main__":
    main()
