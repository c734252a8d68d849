"""A child of the examination (fp4gemm.device.isolated) that tests Blackwell kernels on the emulator.

    python tests/emulated/doctor_worker.py [KERNEL FAULT]

The PTX of KERNEL has a fault: "arithmetic", a product that became a sum; or "barrier", arrivals that are
missing, so that its threads wait for ever.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (Path(__file__).parent, _ROOT / "tests" / "support", _ROOT / "emulator"):
    sys.path.insert(0, str(_folder))

import mutants  # noqa: E402
from fp4gemm.device import isolated  # noqa: E402
from fp4gemm.device.isolated import Outcome  # noqa: E402
from session import KERNELS, SCHEDULES, Finding, Session, Sessions, describe, same_bits  # noqa: E402

FAULTS = {
    "arithmetic": (re.compile(r"\bmul\.rn\.f32\b"), "add.rn.f32"),
    "barrier": (re.compile(r"\bmbarrier\.arrive\.expect_tx\.[^;]*;"), ";"),
}


def spoil(session: Session, kernel: str, fault: str, folder: Path) -> None:
    """Load the library's PTX with a fault in the lines that the kernel executes."""
    text, executed = mutants.text_of(session, kernel, mutants.problem_of(session.kernels[kernel]))
    lines = text.splitlines()
    pattern, replacement = FAULTS[fault]
    found = [number for number in executed if pattern.search(lines[number - 1])]
    for number in found[:1] if fault == "arithmetic" else found:
        lines[number - 1] = pattern.sub(replacement, lines[number - 1])
    session.emulator.unload()
    for path in session.ptx_files:
        whole = path.read_text()
        (folder / path.name).write_text("\n".join(lines) if whole == text else whole)
    session.emulator.load(folder)


def test(sessions: Sessions, name: str) -> Outcome:
    """One kernel, by the problem with which mutants are executed."""
    (kernel,) = [row for row in KERNELS if row.name == name]
    session = sessions.of(kernel)
    problem = mutants.problem_of(session.kernels[name])
    try:
        got = session.run(problem, name, **SCHEDULES[0])
    except Finding as finding:
        return Outcome(name, False, f"{problem.name}: {' '.join(str(finding).split())[:300]}")
    if same_bits(got, problem.want):
        return Outcome(name, True)
    return Outcome(name, False, f"{problem.name}: {describe(got, problem.want)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as spoilt:
        sessions = Sessions(Path(folder))
        if len(sys.argv) > 1:
            kernel, fault = sys.argv[1:]
            (row,) = [row for row in KERNELS if row.name == kernel]
            spoil(sessions.of(row), kernel, fault, Path(spoilt))
        isolated.serve(json.load(sys.stdin), lambda name: test(sessions, name), sys.stdout)


if __name__ == "__main__":
    main()
