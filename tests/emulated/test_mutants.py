"""Tests on the emulator notice faults in arguments and PTX. mutants.py prints the complete score."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from session import Session

DENSE = "sm100_dense_256x128x256_c2x1_rowcol_bf16"
GROUPED = "sm100_grouped_128x128x256_c1x1_rowcol_bf16"


@pytest.mark.parametrize("kernel", [DENSE, GROUPED])
def test_every_fault_in_the_arguments_is_noticed(session: Session, kernel: str) -> None:
    total, survivors = mutants.argument_survivors(session, kernel)
    assert total >= 15
    assert not survivors


@pytest.mark.parametrize("kind", ["sync", "alu"])
@pytest.mark.parametrize("kernel", [DENSE, GROUPED])
def test_faults_in_the_ptx_are_noticed(session: Session, tmp_path: Path, kernel: str, kind: str) -> None:
    """A small sample with a low threshold; docs/blackwell.md has the score and explains survivors."""
    table = mutants.ptx_score(session, kernel, kind, 16, tmp_path)
    assert table.total == 16
    assert sum(table.killed.values()) >= 6, table.summary()


def test_a_launch_waits_for_the_one_before(session: Session, tmp_path: Path) -> None:
    """The emulator starts a kernel before its predecessor, so without the wait the result is wrong."""
    assert mutants.accumulate_twice(session, DENSE)
    hasty = tmp_path / "hasty"
    hasty.mkdir()
    session.emulator.unload()
    try:
        for path in session.ptx_files:
            (hasty / path.name).write_text(path.read_text().replace("griddepcontrol.wait;", ""))
        session.emulator.load(hasty)
        assert not mutants.accumulate_twice(session, DENSE)
    finally:
        session.emulator.unload()
        for path in session.ptx_files:
            session.emulator.load(path)
