"""``python -m fp4gemm report``: what is installed, and what runs on each device."""

from __future__ import annotations

import argparse
import json

from ..device import report

SUMMARY = "versions, libraries, devices and kernels, with the reason where something does not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    print(json.dumps(report.report(), indent=2) if options.json else report.report_text())
    return 0
