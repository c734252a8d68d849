"""``python -m fp4gemm``: versions, devices, kernels; self-test and tuning; where the C++ package lies."""

from __future__ import annotations

import argparse
import json
import sys

from . import _native
from .device import report, selftest, tune


def main(argv: list[str] | None = None) -> int:
    """Print what the options ask for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4gemm",
        description="Versions, devices and kernels; where the C++ package lies; test or tune a device.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("report", "kernels", "selftest", "tune"),
        default="report",
        help="report (default); the table of kernels; every kernel of a device against the reference; "
        "the best kernels for your shapes, as rules",
    )
    parser.add_argument("--device", help="of selftest: cuda:1, say; the current CUDA device if left away")
    parser.add_argument("--force", action="store_true", help="selftest: even where it passed before")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cmake-dir", action="store_true", help="print the folder for -Dfp4gemm_DIR= (find_package)"
    )
    which.add_argument(
        "--include-dir", action="store_true", help="print the folder of fp4gemm/fp4gemm.h and cutlass_evt/"
    )
    which.add_argument("--json", action="store_true", help="print the report as JSON")
    tune.add_arguments(parser.add_argument_group("tune"))
    options = parser.parse_args(argv)
    if options.command != "selftest" and (options.device is not None or options.force):
        parser.error("--device and --force go with selftest")
    if options.command == "tune":
        return tune.run(options, parser.error)
    if given := [name for name in tune.OPTIONS if getattr(options, name) is not None]:
        parser.error(f"--{given[0].replace('_', '-')} goes with tune")
    if options.command == "selftest":
        result = selftest.self_test(options.device, force=options.force)
        print(result)
        return 0 if result.passed else 1
    if options.command == "kernels":
        print(report.kernels_text())
    elif options.cmake_dir:
        print(_native.package_dir() / "lib" / "cmake" / "fp4gemm")
    elif options.include_dir:
        print(_native.package_dir() / "include")
    elif options.json:
        print(json.dumps(report.report(), indent=2))
    else:
        print(report.report_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
