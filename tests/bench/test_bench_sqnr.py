"""bench errors: the quantization error of each mode, its table and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from bench_helpers import CPU

from bench.__main__ import main
from bench.measure import sqnr


def test_rotation_is_orthonormal_and_has_the_documented_signs() -> None:
    x = torch.randn(5, 48)
    rotated = sqnr.rotated(x)
    torch.testing.assert_close(rotated.norm(dim=1), x.double().norm(dim=1))
    one = torch.zeros(1, 16)
    one[0, 3] = 1.0  # bit 3 of 0xD7E8 is set: negated
    assert sqnr.rotated(one)[0].tolist() == [-0.25 * (-1) ** (3 & c).bit_count() for c in range(16)]


@pytest.mark.parametrize(
    ("name", "decibels"),
    [
        ("tensor", 20.44),
        ("row", 20.44),
        ("16x16", 19.05),
        ("tensor, 4over6 mae 256", 21.07),
        ("tensor, 4over6 mse 256", 21.20),
        ("row, scale search", 21.77),
        ("16x16, scale search", 19.45),
        ("row, Hadamard bf16", 20.44),
        ("MXFP8 e4m3", 31.5),
    ],
)
def test_gaussian_errors_are_the_known_ones(name: str, decibels: float) -> None:
    mode = next(mode for mode in sqnr.modes() if mode.name == name)
    found = sqnr.decibels(sqnr.relative_error(mode, sqnr.synthetic(256, 512, CPU)["Gaussian"][0]))
    assert found == pytest.approx(decibels, abs=0.12)


def test_errors_table_has_every_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sqnr, "activations", lambda device: [torch.randn(7, 32), torch.randn(9, 64)])
    line = ["errors", "--device", "cpu", "--size", "32"]
    assert main([*line, "--json"]) == 0
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert sqnr.kinds(rows) == ["Gaussian", "Student t, 3 dof", "MiniLM activations"]
    assert [row["mode"] for row in rows] == [mode.name for mode in sqnr.modes()]
    assert all(0 < row[kind] < 1 for row in rows for kind in sqnr.kinds(rows))
    assert main(line) == 0
    assert f"{-20 * math.log10(rows[0]['Gaussian']):.2f}" in capsys.readouterr().out


def test_errors_draws_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def missing(device: torch.device) -> list[torch.Tensor]:
        raise ImportError("no transformers")

    monkeypatch.setattr(sqnr, "activations", missing)
    picture = tmp_path / "pictures" / "errors.svg"
    assert main(["errors", "--device", "cpu", "--size", "32", "--picture", str(picture)]) == 0
    assert "which need requirements/demo*.txt: no transformers" in capsys.readouterr().err
    assert "</svg>" in picture.read_text()
