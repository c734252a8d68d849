"""Runs of vllm_engine.py for the tests of vLLM's whole engine on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp4gemm.commands import main

PROGRAM = Path(__file__).with_name("vllm_engine.py")
STEPS = 4  # of the engine, each of which calls every layer once: one prefill, three decodes


def converted(source: Path, *options: str) -> Path:
    """The NVFP4 checkpoint beside a float checkpoint, made by ``fp4gemm convert`` with these options."""
    folder = source.with_name(source.name + "-nvfp4")
    assert main(["convert", *options, str(source), str(folder)]) == 0
    return folder


def engine(tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    """What the program finds in a process of its own, and the line of its log."""
    out = tmp_path / "found.json"
    given = json.dumps({"out": str(out), **arguments})
    done = subprocess.run([sys.executable, str(PROGRAM), given], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    log = [line for line in (done.stdout + done.stderr).splitlines() if "fp4gemm: " in line]
    assert len(log) == 1, log
    return {**json.loads(out.read_text()), "log": log[0]}
