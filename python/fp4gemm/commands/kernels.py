"""``python -m fp4gemm kernels``: the table of GEMM kernels in the installed library."""

from __future__ import annotations

import argparse
import json

from ..device import report

SUMMARY = "the table of GEMM kernels, whose names mm(..., kernel=NAME) accepts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the table as JSON, [] without kernels")


def run(options: argparse.Namespace) -> int:
    print(json.dumps(report.kernel_rows(), indent=2) if options.json else report.kernels_text())
    return 0
