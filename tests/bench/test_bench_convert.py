"""bench convert: it makes a checkpoint of the sizes asked for, converts it, verifies it, and prints rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fp4gemm.checkpoint.source import Source

from bench.__main__ import main


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_bench_convert(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["convert", "--model", model, "--device", "cpu", "--shard-gb", "0.0005", "--rounds", "1", "--json"]
    assert main([*line, "--folder", str(tmp_path), "--vocab", "64"]) == 0
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    source = Source(tmp_path / "SRC")
    assert rows[0]["bytes"] == sum((tmp_path / "SRC" / name).stat().st_size for name in source.shards)
    assert rows[0]["files"] == len(source.shards) > 1
    assert source.tensors["lm_head.weight"].shape == (64, 128)
    names = [f"{what}, from the {place}" for what in ("read", "convert, te") for place in ("disk", "cache")]
    assert [row["case"] for row in rows[1:5]] == names
    assert all(row["gb_per_s"] >= 0 and len(row["s"]) == 1 for row in rows[1:5])
    assert rows[5] == {"verified": "te"}
    assert not (tmp_path / "DST-te").exists()
