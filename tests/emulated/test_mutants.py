"""The net is tested: faults in arguments and PTX are noticed. mutants.py prints the whole score."""

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


@pytest.mark.parametrize(("kind", "least"), [("sync", 0.5), ("alu", 0.6)])
@pytest.mark.parametrize("kernel", [DENSE, GROUPED])
def test_most_faults_in_the_ptx_are_noticed(
    session: Session, tmp_path: Path, kernel: str, kind: str, least: float
) -> None:
    """A small sample; the survivors of the large one are explained in docs/blackwell.md."""
    table = mutants.ptx_score(session, kernel, kind, 10, tmp_path)
    assert table.total == 10
    assert sum(table.killed.values()) >= least * table.total, table.summary()
