"""bench sums: the errors of the sums over FP8 tokens, on a CPU and with sums that are made wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
import fp4gemm

from bench.__main__ import main
from bench.measure import sums

LINE = ["sums", "--device", "cpu", "--m", "8", "--n", "16", "--k", "64,256"]


def _rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*LINE, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., torch.Tensor]], None]:
    """Replaces the product by a function of its result and of use_fast_accum."""
    product = fp4gemm.mm

    def set_to(of: Callable[..., torch.Tensor]) -> None:
        def changed(a: Any, b: Any, *, out_dtype: torch.dtype, use_fast_accum: bool) -> torch.Tensor:
            return of(product(a, b, out_dtype=out_dtype), use_fast_accum)

        monkeypatch.setattr(fp4gemm, "mm", changed)

    return set_to


def test_the_sums_of_a_cpu_round_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(capsys)
    assert [(row["data"], row["k"]) for row in rows] == [(name, k) for name in sums.DATA for k in (64, 256)]
    for row in rows:
        assert 0 < row["promoted"] == row["fast"] < 2e-7
        assert 1e-3 < row["bf16"] < 3e-3


def test_errors_are_those_of_the_product(capsys: pytest.CaptureFixture[str], change: Any) -> None:
    change(lambda d, fast: d * (1 - 2**-6 if fast else 1 - 2**-9))
    for row in _rows(capsys):
        assert row["promoted"] == pytest.approx(2**-9, rel=1e-3)
        assert row["fast"] == pytest.approx(2**-6, rel=1e-3)
        assert row["fast_small"] == row["promoted_small"] == 1


def test_the_table(capsys: pytest.CaptureFixture[str], change: Any) -> None:
    change(lambda d, fast: d * (1 - 2**-6) if fast else d)
    assert main(LINE) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| data | k | promoted (default) | `use_fast_accum` |")
    assert len(lines) == 2 + 2 * len(sums.DATA)
    assert all(" | 1.6e-02, all too small | " in line for line in lines[2:])


def test_what_a_device_does_not_multiply_is_an_error(capsys: pytest.CaptureFixture[str], change: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*LINE[:-1], "64,96"])
    assert raised.value.code == 2
    assert "--k: got 96, must be a multiple of 64 for FP8 tokens" in capsys.readouterr().err

    def refused(d: torch.Tensor, fast: bool) -> torch.Tensor:
        raise NotImplementedError("a: is an FP8Tensor on a device of compute capability 10.0")

    change(refused)
    with pytest.raises(SystemExit) as raised:
        main(LINE)
    assert raised.value.code == 2
    assert "compute capability 10.0" in capsys.readouterr().err
