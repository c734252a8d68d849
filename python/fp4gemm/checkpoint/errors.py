"""The error of a checkpoint that cannot be read, planned or written."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A file or tensor of a checkpoint is not what it must be; the text names it.

    The command line prints the text and exits with status 1. A wrong argument is a plain ValueError, for
    which it exits with status 2.
    """
