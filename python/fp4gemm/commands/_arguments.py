"""Types of arguments that several subcommands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """The file that a command writes at its end, refused before its work if it cannot be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a file that can be written")
    return path


def default_output(option: str, name: str) -> Path:
    """The file in the current folder that a command writes without the option, refused in the same way.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        return output_file(name)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} (default): {error}") from error
