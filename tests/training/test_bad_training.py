"""Every wrong recipe and argument of fp4gemm.training raises an error that names the field or argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bad_training
import pytest
from bad_training import CASES, Case

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import bad_training
if __debug__:
    sys.exit("assertions are on: this is not python -O")
texts = {case.id: bad_training.complaint(case) for case in bad_training.CASES}
print(len(bad_training.CASES))
sys.exit("\\n".join(f"{name}: {text}" for name, text in texts.items() if text) or 0)
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_names_the_argument(case: Case) -> None:
    complaint = bad_training.complaint(case)
    assert complaint is None, f"{case.id}: {complaint}"


def test_case_count() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 100


def test_under_python_O() -> None:
    command = [sys.executable, "-O", "-c", SCRIPT, str(Path(bad_training.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(CASES)
