"""``python -m fp4gemm epilogue``: kernels for Blackwell of an epilogue in Python, compiled ahead of time."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from .. import _epilogue_build
from .._epilogue_library import ARCHS
from ..epilogues import Epilogue
from ._arguments import default_output, output_file

SUMMARY = "build a library of kernels with an epilogue in Python, for Blackwell, by nvcc and CUTLASS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("build",), metavar="build", help="compile the epilogue, a minute or more a kernel")
    add("epilogue", metavar="FILE.py[:NAME]", help="the file, and the epilogue if the file has several")
    add("--arch", choices=tuple(ARCHS), required=True, help="compute capability 10.x or 12.x")
    add("--out", type=output_file, metavar="FILE.so", help="the library (default: NAME_ARCH.so)")
    add(
        "--dtype",
        nargs="+",
        choices=_epilogue_build.DTYPES,
        default=["bf16"],
        help="of D (default: bf16); bf16 and fp16 share a kernel",
    )
    add(
        "--mode",
        nargs="+",
        choices=_epilogue_build.MODES,
        default=list(_epilogue_build.MODES),
        help="of products (default: both)",
    )
    add("--jobs", type=int, default=1, help="kernels to compile at a time, several GB each (default: 1)")


def run(options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise ValueError(f"--jobs: got {options.jobs}, must be 1 or more")
    epilogue = find_epilogue(options.epilogue)
    out = options.out or default_output("--out", f"{epilogue.name}_{options.arch}.so")
    begin = time.perf_counter()
    try:
        _epilogue_build.build(
            epilogue, options.arch, out, modes=options.mode, dtypes=options.dtype, jobs=options.jobs
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out}: {epilogue.name} for {options.arch}, built in {time.perf_counter() - begin:.0f} s")
    return 0


def find_epilogue(text: str) -> Epilogue:
    """The epilogue that FILE.py or FILE.py:NAME names; the file is executed."""
    name = ""
    path = Path(text)
    if not path.is_file() and ":" in text:
        file, _, name = text.rpartition(":")
        path = Path(file)
    if not path.is_file():
        raise ValueError(f"FILE.py: got {str(path)!r}, must be a file of Python")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"FILE.py: got {str(path)!r}, must be a file of Python, named .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Epilogue)}
    if name in found:
        return found[name]
    names = ", ".join(found) or "none"
    if name:
        raise ValueError(f"NAME: got {name!r}, must be an epilogue of {path}, which has {names}")
    if len(found) != 1:
        raise ValueError(
            f"FILE.py: {path} has these epilogues: {names}; must have one, or name it, FILE.py:NAME"
        )
    return next(iter(found.values()))
