"""The tests of this folder with the oldest transformers that is supported, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPO / "requirements" / "transformers-oldest.txt"
FOLDER = REPO / "build" / "transformers-oldest"  # the Makefile installs REQUIREMENTS there


def test_the_requirements_name_the_oldest_version() -> None:
    from fp4gemm.integrations.transformers import _registry

    (version,) = re.findall(r"^transformers==(\d+)\.(\d+)\.0$", REQUIREMENTS.read_text(), re.MULTILINE)
    assert tuple(map(int, version)) == _registry.MINIMUM


def test_with_the_oldest_transformers() -> None:
    if not (FOLDER / "installed").exists():
        pytest.skip(f"{FOLDER} does not exist; `make test` installs it")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["-q", "-p", "no:cacheprovider", "tests/integrations"]
    arguments += ["--ignore=tests/integrations/test_transformers_mxfp8.py"]  # a newer one loads these
    command = [sys.executable, "-m", "pytest", *arguments, "-k", "not oldest", "-m", "not gpu"]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.search(r"\d+ passed", summary), summary
    assert "skipped" not in summary, done.stdout[-4000:]
