"""``python -m fp4gemm selftest``: every kernel and quantizer of a device against the CPU reference."""

from __future__ import annotations

import argparse
import sys

from ..device.selftest import self_test

SUMMARY = "compare kernels and quantizers of a device with the CPU reference, bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help='for example "cuda:1" (default: the current CUDA device, else the CPU)'
    )
    parser.add_argument("--force", action="store_true", help="run although an earlier run on disk passed")


def run(options: argparse.Namespace) -> int:
    try:
        report = self_test(options.device, force=options.force)
    except NotImplementedError as error:
        print(f"nothing to test: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.passed else 1
