"""``python -m fp4gemm cmake-dir``: where find_package(fp4gemm) finds the CMake package."""

from __future__ import annotations

import argparse

from .. import _native

SUMMARY = "the folder for -Dfp4gemm_DIR=, with which CMake's find_package(fp4gemm) finds this package"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    print(_native.package_dir() / "lib" / "cmake" / "fp4gemm")
    return 0
