"""``python -m fp4gemm``: one module for each subcommand, with SUMMARY, add_arguments and run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

from . import cmake_dir, convert, doctor, epilogue, include_dir, kernels, report, selftest, tune

__all__ = ["COMMANDS", "main"]


class Command(Protocol):
    """A module of this package."""

    SUMMARY: str  # one line for --help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the subcommand."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the subcommand and return the exit status; ValueError is reported as a usage error."""


COMMANDS: dict[str, Command] = {
    "report": report,
    "kernels": kernels,
    "selftest": selftest,
    "doctor": doctor,
    "tune": tune,
    "convert": convert,
    "epilogue": epilogue,
    "cmake-dir": cmake_dir,
    "include-dir": include_dir,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name, "report" without any; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4gemm",
        description="Report on, test, examine and tune this installation of fp4gemm; convert checkpoints.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", help="report is the default")
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(parsers[name])
    options = parser.parse_args(argv)
    if options.command is None:
        options = parser.parse_args(["report"])
    try:
        return COMMANDS[options.command].run(options)
    except ValueError as error:
        parsers[options.command].error(str(error))
    except KeyboardInterrupt:
        print(f"fp4gemm {options.command}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
