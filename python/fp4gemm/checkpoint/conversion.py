"""convert: from a checkpoint on disk to an NVFP4 checkpoint on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import _checks, _native
from ..recipe import USES_DATA
from .calibration import Text, fingerprint, statistics_of
from .options import Options, checked_options
from .output import PART, State, locked, write_file
from .packing import Packing
from .plan import Plan
from .report import ConvertReport
from .runner import CompareSink, Made, Progress, WriteSink, resolve_devices, run
from .source import CONFIG, CheckpointError, Source
from .work import Translation, Work, copied_files, packing, quantization, translation

__all__ = ["convert", "plan_conversion"]

SPARE = 2**20  # bytes on the disk for everything but the shards


def plan_conversion(
    src: str | os.PathLike[str], options: Options | Translation | Packing | None = None
) -> ConvertReport:
    """Report what :func:`convert` would do, from headers and config.json alone; nothing is written.

    Raises:
        CheckpointError, ModuleNotFoundError, TypeError: as for :func:`convert`.
    """
    _checks.is_path("src", src)
    return _work(Source(src), _checked(options)).report


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: Options | Translation | Packing | None = None,
    *,
    device: str = "auto",
    jobs: int | None = None,
    max_memory: int | None = None,
    resume: bool = False,
    measured: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
    calibrating: Progress | None = None,
) -> ConvertReport:
    """Write the NVFP4 checkpoint of a float checkpoint, or that of an NVFP4 checkpoint in another format.

    The bytes depend on src and options alone: not on device, jobs, max_memory or interruptions. Those of the
    method "gptq" do depend on the device, which an interrupted conversion has to keep, and statistics of a
    text on the device and on the number of torch's threads.

    Every file is written under another name, flushed and renamed; config.json comes last, so that an
    incomplete folder cannot be loaded. Everything of src but its weights is copied. Memory holds the running
    tasks, each a fused set: no shard is read as a whole.

    Args:
        src: the folder of a checkpoint: config.json, safetensors files, and an index if they are several.
        dst: a folder that is new or empty, or with ``resume`` that of an interrupted conversion.
        options: what is quantized, and how; None is ``Options()``. A :class:`Translation` instead changes the
            format of an NVFP4 checkpoint; codes and block scales keep their bytes. A :class:`Packing` writes
            the experts of GPT-OSS in MXFP4, or linear layers in MXFP8.
        device: "auto" (a GPU if torch sees one), "cpu", "cuda" or "cuda:0,1".
        jobs: sets that are converted at a time; None: as many as torch has threads, or four for each GPU.
        max_memory: bytes that the sets which are converted at a time may need; None: no limit beyond jobs.
        resume: continue an interrupted conversion: shards that are finished stay as they are.
        measured: measure the error of each layer, for the report.
        verify: read dst again, and compare it with what src gives.
        progress: called as ``progress(bytes_done, bytes_in_all, name)``.
        calibrating: called as ``calibrating(done, total, name)`` while the model reads a text of
            ``options.calibration``: transformers loads it from src (:mod:`fp4gemm.checkpoint.calibration`).

    Returns:
        A :class:`ConvertReport`; ``already_done`` says that dst was complete before.

    Raises:
        CheckpointError: src is damaged, quantized or pickled, has NaN or inf in a weight that is quantized,
            or misses a partner of a fused set; dst is not ours, was begun otherwise, or cannot be written.
            The text names the file and the tensor. dst is then incomplete, and can be continued.
        TypeError, ValueError: an argument. ModuleNotFoundError: safetensors is not installed, or
            transformers, where a text is the calibration.
    """
    _checks.is_path("src", src)
    _checks.is_path("dst", dst)
    options = _checked(options)
    devices = resolve_devices(device)
    for name, value in (("jobs", jobs), ("max_memory", max_memory)):
        if value is not None:
            _checks.is_int(name, value, 1)
    for name, flag in (("resume", resume), ("measured", measured), ("verify", verify)):
        _checks.is_bool(name, flag)
    for name, callback in (("progress", progress), ("calibrating", calibrating)):
        _checks.is_callback(name, callback)
    source, folder = Source(src), Path(dst)
    inside, outside = folder.resolve(), source.folder.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise ValueError(f"dst: got {folder}, must be apart from the source {source.folder}")
    work = _work(source, options)
    common: dict[str, Any] = {
        "devices": devices, "jobs": jobs, "max_memory": max_memory, "progress": progress,
    }  # fmt: skip
    with contextlib.closing(source), locked(folder):
        return _converted(source, folder, work, common, resume, measured, verify, calibrating)


def _converted(
    source: Source,
    folder: Path,
    work: Work,
    common: dict[str, Any],
    resume: bool,
    measured: bool,
    verify: bool,
    calibrating: Progress | None,
) -> ConvertReport:
    stamps = source.stamps()
    key: dict[str, Any] = {"version": _native.version(), "options": work.options, "source": stamps}
    if work.has_device_bits:
        names = {"cpu" if d.type == "cpu" else torch.cuda.get_device_name(d) for d in common["devices"]}
        key["options"] = {**work.options, "device": ", ".join(sorted(names))}
        common["has_device_bits"] = True
    state = State.open(folder, key, _other_names(source, work), resume=resume)
    already_done = state.is_done
    if work.plan is not None and (not already_done or measured or verify):
        work = _calibrated(source, work, work.plan, state, common["devices"], calibrating)
    done = Made({})
    if not already_done:
        state.clean({name: file.nbytes for name, file in work.files.items()})
        _has_space(folder, work, state)
    if not already_done or (measured and not verify):
        with contextlib.closing(WriteSink(folder, work.files, state)) as sink:
            done = run(work.tasks, source, sink, measured=measured, **common)
    if not already_done:
        _write_others(source, folder, work)
        if source.stamps() != stamps:
            raise CheckpointError(f"{source.folder}: was changed while it was converted; begin again")
        state.is_done = True
        state.save()
    if verify:
        done = _verified(source, folder, work, state, common)
    return dataclasses.replace(
        work.report, layers=done.layers, notes=done.notes, already_done=already_done, is_verified=verify
    )


def _calibrated(
    source: Source,
    work: Work,
    plan: Plan,
    state: State,
    devices: list[torch.device],
    calibrating: Progress | None,
) -> Work:
    """The work with statistics in the place of a text.

    Raises:
        CheckpointError: the text gives other statistics than those of the shards that are finished.
    """
    text = plan.options.calibrated_by
    if not isinstance(text, Text):
        return work
    made, about = statistics_of(source, plan, text, devices[0], calibrating)
    found = fingerprint(made)
    if state.calibration and state.calibration != found:
        raise CheckpointError(
            f"{state.folder}: was begun with other statistics of {text.name} than the model gives now; they "
            "depend on the machine and on the number of torch's threads, so begin again in a new folder"
        )
    state.calibration = found
    state.save()
    again = quantization(source, dataclasses.replace(plan.options, calibration=made))
    report = dataclasses.replace(again.report, method=f"{plan.options.method}, calibrated by {about}")
    return dataclasses.replace(again, options=work.options, report=report)


def _other_names(source: Source, work: Work) -> list[str]:
    """The files of the new checkpoint beside its shards."""
    index = [source.index_name] if source.index_name else []
    return [*copied_files(source), *index, *work.extra, CONFIG]


def _checked(options: object) -> Options | Translation | Packing:
    return options if isinstance(options, (Translation, Packing)) else checked_options(options)


def _work(source: Source, options: Options | Translation | Packing) -> Work:
    if isinstance(options, Packing):
        return packing(source, options)
    return translation(source, options) if isinstance(options, Translation) else quantization(source, options)


def _has_space(folder: Path, work: Work, state: State) -> None:
    need = SPARE + sum(file.nbytes for name, file in work.files.items() if name not in state.finished)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CheckpointError(
            f"{folder}: the disk has {free} bytes free, must have {need} for the checkpoint"
        )


def _write_others(source: Source, folder: Path, work: Work) -> None:
    """Copy what is no weight, write the index, and config.json last."""
    for name in copied_files(source):
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + PART)
            shutil.copyfile(source.folder / name, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    if source.index_name:
        write_file(folder / source.index_name, _index(source, work))
    for name, content in {**work.extra, CONFIG: work.config}.items():
        write_file(folder / name, _json(content))


def _index(source: Source, work: Work) -> bytes:
    """The index of the new shards, with their total size."""
    total = sum(slot.nbytes for file in work.files.values() for slot in file.slots.values())
    metadata = {**source.index_metadata, "total_size": total}
    names = sorted((name, file.name) for file in work.files.values() for name in file.slots)
    return _json({"metadata": metadata, "weight_map": dict(names)})


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _verified(source: Source, folder: Path, work: Work, state: State, common: dict[str, Any]) -> Made:
    """Compare a finished checkpoint with its source. Returns the errors of the layers, and the notes.

    The index and the headers are checked as those of any source, and compared with what they must be, and so
    are the files that were copied. Every tensor is made again and compared byte by byte, the hash of each
    shard with the one that was noted when it was written, and the values of every quantized weight with the
    bound of the format, unless the method moves them further for the sake of the output.

    Raises:
        CheckpointError: something differs; the text names the file and the tensor.
    """
    with contextlib.closing(Source(folder)) as new:
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
    is_free = work.plan is not None and work.plan.options.method in USES_DATA
    for layer in () if is_free else done.layers:
        if layer.worst_element > 1:
            raise CheckpointError(
                f"{folder}: a value of {layer.module} is {layer.worst_element:.3f} times as far from the "
                "float one as NVFP4 allows"
            )
    return done
