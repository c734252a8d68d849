"""What `release.py root` runs in its root: the snippets of a document, and where their modules come from.

    python in_root.py DOCUMENT ENVIRONMENT

The folder of this file has snippets.py. It is written for any Python from 3.10 on, and needs the wheel alone.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

from snippets import fenced, run_python


def main(document: Path, environment: Path) -> None:
    """Run the document, and exit with a sentence if a module or a library came from anywhere else."""
    python = [snippet for snippet in fenced(document, document.read_text()) if snippet.language == "python"]
    to_run = [snippet for snippet in python if not snippet.not_run]
    if not to_run:
        sys.exit(f"{document} has no Python that can be run")
    run_python(to_run)
    here = Path(__file__).resolve().parent
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    allowed = {here, environment, *standard, Path(sysconfig.get_config_var("DESTSHARED") or here)}
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {path for name in names if isinstance(name, str) and (path := Path(name)).is_absolute()}
    wrong = sorted(str(file) for file in files if not any(folder in file.parents for folder in allowed))
    if wrong:
        sys.exit(f"modules are not of the environment: {', '.join(wrong[:5])}")
    paths = [Path(entry) for entry in sys.path if not entry.endswith(".zip")]
    wrong = [str(path) for path in paths if not any(f in (path, *path.parents) for f in allowed)]
    if wrong:
        sys.exit(f"sys.path has {', '.join(wrong)}, must have the environment and the standard library")
    libraries = set(
        re.findall(r"(/\S*(?:fp4gemm|torch)\S*\.so\S*)$", Path("/proc/self/maps").read_text(), re.M)
    )
    wrong = sorted(path for path in libraries if environment not in Path(path).parents)
    if wrong:
        sys.exit(f"libraries are not of the environment: {', '.join(wrong[:5])}")
    of_environment = sum(environment in file.parents for file in files)
    print(
        f"{document.name}: {len(to_run)} snippets ran, {len(python) - len(to_run)} cannot be run here;",
        end=" ",
    )
    print(f"{of_environment} of {len(files)} modules are of the environment, the others of Python itself")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
