"""``python -m fp4gemm include-dir``: where the C and C++ headers are."""

from __future__ import annotations

import argparse

from .. import _native

SUMMARY = "the folder that holds fp4gemm/fp4gemm.h and cutlass_evt/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    print(_native.package_dir() / "include")
    return 0
