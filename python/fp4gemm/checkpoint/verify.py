"""The new checkpoint read again: its index and headers, and every tensor against what the source gives."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .numerics import CALIBRATED
from .runner import Done, run
from .sinks import CompareSink
from .source import Source
from .state import State
from .work import Work, copied_files

__all__ = ["verify_folder"]


def verify_folder(source: Source, folder: Path, work: Work, state: State, common: dict[str, Any]) -> Done:
    """Compare a finished checkpoint with its source.

    The index and the headers are checked as those of any source, and compared with what they must be, and so
    are the files that were copied. Every
    tensor is made again and compared byte by byte, the hash of each shard with the one that was noted when it
    was written, and the values of every quantized weight with the bound of the format,
    unless the method moves them further for the sake of the output.

    Args:
        source, folder: the old checkpoint, and the new one.
        work: what was written.
        state: the state of the conversion.
        common: devices, jobs, max_memory, progress and has_device_bits of
            :func:`fp4gemm.checkpoint.runner.run`.

    Returns:
        The errors of the layers, and the notes.

    Raises:
        CheckpointError: something differs; the text names the file and the tensor.
    """
    new = Source(folder)
    try:
        if new.shards != sorted(work.files) or new.config != work.config:
            raise CheckpointError(f"{folder}: has other shards, or another config.json, than were written")
        for name, file in work.files.items():
            with (folder / name).open("rb") as opened:
                if opened.read(len(file.header)) != file.header:
                    raise CheckpointError(f"{folder / name}: has another header than was written")
        for name in copied_files(source):
            if not filecmp.cmp(source.folder / name, folder / name, shallow=False):
                raise CheckpointError(f"{folder / name}: differs from {source.folder / name}")
        sink = CompareSink(new, work.files)
        done = run(work.tasks, source, sink, measured=True, **common)
        sink.compare_hashes(state.finished)
    finally:
        new.close()
    is_free = work.plan is not None and work.plan.options.method in CALIBRATED
    for layer in () if is_free else done.layers:
        if layer.worst_element > 1:
            raise CheckpointError(
                f"{folder}: a value of {layer.module} is {layer.worst_element:.3f} times as far from the "
                "float "
                "one as NVFP4 allows"
            )
    return done
