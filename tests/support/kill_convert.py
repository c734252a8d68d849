"""A program: kills a conversion at every step at which it writes, resumes it, and compares the bytes.

``python kill_convert.py FOLDER`` prints a JSON object: the number of steps, and what went wrong. Each run is
a child that sends itself SIGKILL ahead of step i, where a step is a call that changes the disk. The calls are
replaced in the child alone, so that the package needs no hook.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from checkpoints import contents, llama, save
from fp4gemm.checkpoint import CheckpointError, convert
from fp4gemm.checkpoint.source import Source


def main(folder: Path) -> dict[str, object]:
    source = save(folder / "src", llama(1), shards=2)
    convert(source, folder / "whole", jobs=1)
    whole = contents(folder / "whole")
    problems: list[str] = []
    step = 0
    while True:
        step += 1
        new = folder / f"killed{step}"
        if child(source, new, kill_at=step) == 0:
            break
        if (new / "config.json").exists() and contents(new)["config.json"] != whole["config.json"]:
            problems.append(f"step {step}: config.json is half-written")
        for path in new.glob("*.safetensors"):
            if path.read_bytes() != whole[path.name]:
                problems.append(f"step {step}: {path.name} is not complete")
        if not (new / "config.json").exists() and new.exists():
            try:
                Source(new)
                problems.append(f"step {step}: an incomplete folder can be read")
            except CheckpointError:
                pass
        if child(source, new, kill_at=0, jobs=1 + step % 2) != 0:
            problems.append(f"step {step}: resume failed")
        elif contents(new) != whole:
            problems.append(f"step {step}: other bytes after resume")
    return {"steps": step - 1, "problems": problems}


def child(source: Path, new: Path, *, kill_at: int, jobs: int = 1) -> int:
    """The status of a conversion in a child, which is killed ahead of that step (0: of none)."""
    pid = os.fork()
    if pid == 0:
        try:
            count_down(kill_at)
            convert(source, new, jobs=jobs, resume=True)
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_down(kill_at: int) -> None:
    """Replace every call that changes the disk by one that counts, and kills this process at a number."""
    left = [kill_at]

    def counted(call):  # type: ignore[no-untyped-def]
        def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in ("pwrite", "fsync", "rename", "ftruncate", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
