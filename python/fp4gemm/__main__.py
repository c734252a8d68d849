"""``python -m fp4gemm``: versions, devices and kernels; where the C++ package lies."""

from __future__ import annotations

import argparse
import json
import sys

from . import _native, info


def main(argv: list[str] | None = None) -> int:
    """Print what the options ask for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4gemm",
        description="Report versions, devices and kernels, or where the C++ package lies.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cmake-dir", action="store_true", help="print the folder for -Dfp4gemm_DIR= (find_package)"
    )
    which.add_argument(
        "--include-dir", action="store_true", help="print the folder of fp4gemm/fp4gemm.h and cutlass_evt/"
    )
    which.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    if options.cmake_dir:
        print(_native.package_dir() / "lib" / "cmake" / "fp4gemm")
    elif options.include_dir:
        print(_native.package_dir() / "include")
    elif options.json:
        print(json.dumps(info.report(), indent=2))
    else:
        print(info.report_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
