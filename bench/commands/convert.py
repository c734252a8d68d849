"""``python -m bench convert``: the rate of fp4gemm convert on random weights, and that of the disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp4gemm import checkpoint
from fp4gemm.checkpoint.runner import JOBS_PER_GPU

from ..measure import machine
from ..models.checkpoint import make
from ..models.shapes import SHAPES

CHUNK = 16 * 2**20  # bytes of a read
PART = 8 * CHUNK  # bytes of a file that one thread reads
Row = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="qwen3-8b", help="whose sizes (qwen3-8b: 16.4 GB)")
    add("--layers", type=int, help="layers of it (all)")
    add("--vocab", type=int, help="rows of its embeddings, which stay (all)")
    add("--shard-gb", type=float, default=2.0, help="size of a shard (2)")
    add("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    add("--jobs", type=int, help="sets that are converted at a time")
    add("--numerics", nargs="+", default=["te"], help="te, modelopt, llmcompressor (te)")
    add("--four-over-six", default="none", help="none, mae or mse")
    add("--folder", type=Path, help="where checkpoints are made; its SRC is used again (a temporary one)")
    add("--rounds", type=int, default=3, help="repetitions of each row (3)")
    add("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoint, and prints the rates of reading and converting it; results are verified."""
    device = machine.device(args.device)
    shape = SHAPES[args.model]
    shape = dataclasses.replace(shape, vocab=args.vocab or shape.vocab)
    with _folder(args.folder) as folder:
        source = folder / "SRC"
        if not (source / "config.json").exists():
            make(source, shape, args.layers or shape.num_layers, int(args.shard_gb * 1e9), device)
        files = sorted(source.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        made = {"checkpoint": args.model, "bytes": size, "files": len(files), "device": str(device)}
        _show(made, args.json)
        jobs = args.jobs or (torch.get_num_threads() if device.type == "cpu" else JOBS_PER_GPU)
        _rates("read", args, files, partial(_read, files, jobs))
        for numerics in args.numerics:
            adaptive: Any = args.four_over_six if numerics == "te" else "none"
            options = checkpoint.Options(numerics=numerics, four_over_six=adaptive)
            new = folder / f"DST-{numerics}"
            convert = partial(checkpoint.convert, source, new, options, device=device.type, jobs=args.jobs)
            _rates(f"convert, {numerics}", args, files, convert, partial(shutil.rmtree, new, True))
            convert(verify=True)
            _show({"verified": numerics}, args.json)
            shutil.rmtree(new)
    return 0


def _rates(
    name: str,
    args: argparse.Namespace,
    files: list[Path],
    call: Callable[[], object],
    before: Callable[[], object] = lambda: None,
) -> None:
    """Two rows, from the disk and from the cache: the best of the rounds in GB/s of the source."""
    size = sum(path.stat().st_size for path in files)
    for place in ("disk", "cache"):
        seconds, cpu_seconds = [], []
        for _ in range(args.rounds):
            before()
            for path in files if place == "disk" else []:
                _forget(path)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            call()
            seconds.append(time.perf_counter() - begin)
            cpu_seconds.append(time.process_time() - begin_cpu)
        row: Row = {
            "case": f"{name}, from the {place}",
            "gb_per_s": round(size / min(seconds) / 1e9, 3),
            "mb_per_cpu_s": round(size / min(cpu_seconds) / 1e6, 1),
            "s": [round(each, 3) for each in seconds],
        }
        _show(row, args.json)


def _read(files: list[Path], jobs: int) -> None:
    """Read every byte with as many threads as the conversion has."""
    parts = [(path, begin) for path in files for begin in range(0, path.stat().st_size, PART)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(_read_part, parts))


def _read_part(part: tuple[Path, int]) -> None:
    path, begin = part
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        for position in range(begin, begin + PART, CHUNK):
            if os.preadv(file.fileno(), [buffer], position) < CHUNK:
                return


def _forget(path: Path) -> None:
    """Drop a file from the cache of the operating system."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fp4gemm-convert-") as made:
        yield Path(made)


def _show(row: Row, as_json: bool) -> None:
    text = json.dumps(row) if as_json else "  ".join(f"{key}: {value}" for key, value in row.items())
    print(text, flush=True)
