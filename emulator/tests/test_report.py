"""The comparison of executed features with the calibrated set."""

from __future__ import annotations

import json
from pathlib import Path

from ptxemu.report import load, main, merge, uncalibrated


def test_merge_and_compare(tmp_path: Path) -> None:
    """Two runs are merged from their files; a feature that neither executed is reported."""
    runs = [
        {"opcode": {"tcgen05.mma.x": 2, "add.u32": 1}, "tma": {"load A": 1}, "seconds": 1.5},
        {"opcode": {"tcgen05.mma.x": 3}, "idesc": {"0x1": 4}},
    ]
    stats = tmp_path / "stats"
    stats.mkdir()
    (stats / "a.json").write_text(json.dumps(runs[0]) + "\n" + json.dumps(runs[1]) + "\n")
    assert load(stats) == runs
    assert main(["merge", str(tmp_path / "calibrated.json"), str(stats)]) == 0
    calibrated = json.loads((tmp_path / "calibrated.json").read_text())
    assert calibrated["opcode"] == {"tcgen05.mma.x": 5, "add.u32": 1}
    assert calibrated["idesc"] == {"0x1": 4}
    assert uncalibrated(merge(runs), calibrated) == []
    executed = {"opcode": {"tcgen05.mma.y": 1, "sub.u32": 1, "cp.async.bulk.z": 1}, "tma": {"load B": 1}}
    assert uncalibrated(executed, calibrated) == [
        "opcode: cp.async.bulk.z",
        "opcode: tcgen05.mma.y",
        "tma: load B",
    ]


def test_usage(capsys) -> None:
    assert main(["compare"]) == 2
    assert "report.py merge" in capsys.readouterr().err
