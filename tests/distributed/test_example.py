"""examples/moe_ep.py in one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "moe_ep.py"


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("moe_ep", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = [
        "--experts",
        "8",
        "--hidden",
        "64",
        "--intermediate",
        "32",
        "--tokens",
        "1",
        "5",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *sizes])
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    assert module.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("engine 'gather': engine 'symm' must be asked for")
    assert lines[2] == "0 elements differ from those of one process"
    assert [line.split()[0] for line in lines[-2:]] == ["1", "5"]
