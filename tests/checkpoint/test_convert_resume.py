"""Interruptions, the number of jobs, and memory: none of them changes a byte of the new checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, contents, llama, load, save
from fp4gemm.checkpoint import CheckpointError, Options, convert

SUPPORT = Path(__file__).resolve().parents[1] / "support"
STATE = "fp4gemm_convert.json"
MIB = 2**20


def python(*arguments: str) -> str:
    path = os.pathsep.join([str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_at_every_step(tmp_path: Path) -> None:
    """SIGKILL ahead of each write, flush and rename; a resumed conversion has the bytes of a whole one."""
    result = json.loads(python(str(SUPPORT / "kill_convert.py"), str(tmp_path)))
    assert result["problems"] == []
    assert result["steps"] > 40


def test_jobs_do_not_change_bytes(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(), shards=3)
    for jobs in (1, 2, 5):
        convert(source, tmp_path / f"dst{jobs}", jobs=jobs, max_memory=10**6 if jobs == 5 else None)
    assert contents(tmp_path / "dst1") == contents(tmp_path / "dst2") == contents(tmp_path / "dst5")


def test_finished_shards_are_not_written_again(tmp_path: Path) -> None:
    """An error in the last shard; after it is mended, resume writes that shard alone."""
    tensors = llama(1)
    source = save(tmp_path / "src", tensors, shards=2)
    new = tmp_path / "dst"
    convert(source, tmp_path / "whole")
    convert(source, new)
    state = json.loads((new / STATE).read_text())
    del state["finished"]["model-00002-of-00002.safetensors"]
    (new / STATE).write_text(json.dumps({**state, "is_done": False}))
    (new / "model-00002-of-00002.safetensors").unlink()
    before = (new / "model-00001-of-00002.safetensors").stat()
    with pytest.raises(
        CheckpointError, match="has an interrupted conversion, 1 shards of which are finished"
    ):
        convert(source, new)
    report = convert(source, new, resume=True, measured=True)
    after = (new / "model-00001-of-00002.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert contents(new) == contents(tmp_path / "whole")
    assert len(report.layers) == 7, "errors of layers in finished shards are measured too"


def test_a_finished_folder_says_so(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    assert not convert(source, tmp_path / "dst").already_done
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}
    assert convert(source, tmp_path / "dst").already_done
    assert convert(source, tmp_path / "dst", resume=True, verify=True).is_verified
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}


def test_other_options_or_another_source(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    convert(source, tmp_path / "dst")
    with pytest.raises(CheckpointError, match=r"dst: was begun with numerics 'te', got 'modelopt'; must be"):
        convert(source, tmp_path / "dst", Options(numerics="modelopt"), resume=True)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(
        CheckpointError, match=r"dst: was begun with another model.safetensors \(size and time"
    ):
        convert(source, tmp_path / "dst", resume=True)


# VmHWM is the peak of this process alone. ru_maxrss is not used: a child inherits its parent's peak.
MEASURE = """
import re, sys
from pathlib import Path
from fp4gemm.checkpoint import convert
def peak():
    return re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
convert(sys.argv[1], sys.argv[1] + "_warm", jobs=1)
warm = peak()
convert(sys.argv[2], sys.argv[2] + "_q", jobs=2)
print(warm, peak())
"""


def test_memory_does_not_grow_with_shards(tmp_path: Path) -> None:
    """Peak memory of one shard of 64 MB and of one of 256 MB, with sets of 4 MB at most."""
    matrix = (torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    small = save(tmp_path / "small", {"model.layers.0.self_attn.o_proj.weight": matrix})
    peaks = {}
    for megabytes in (64, 256):
        tensors = {
            f"model.layers.{i}.self_attn.o_proj.weight": matrix.clone()
            for i in range(megabytes * MIB // matrix.nbytes)
        }
        source = save(
            tmp_path / f"src{megabytes}", tensors, config={**LLAMA, "num_hidden_layers": len(tensors)}
        )
        del tensors
        warm, peak = (
            int(kilobytes) * 1024 for kilobytes in python("-c", MEASURE, str(small), str(source)).split()
        )
        assert peak < megabytes * MIB + matrix.nbytes + 2**30, "the promise"
        peaks[megabytes] = peak - warm
        shutil.rmtree(source)
        shutil.rmtree(f"{source}_q")
    # 256 MB need 25 to 36 MB and 768 MB 35: what the allocator keeps for the threads, but no shard.
    assert peaks[64] < 32 * MIB, peaks
    assert peaks[256] < 64 * MIB, peaks


def test_a_set_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    with pytest.raises(
        CheckpointError, match=r"max_memory: got 1000 bytes, must be at least \d+ for \S+ alone"
    ):
        convert(source, tmp_path / "dst", max_memory=1000)
    assert load(tmp_path / "dst") == {}
    convert(source, tmp_path / "dst", max_memory=10**6, resume=True)
