"""bench epilogues on the CPU: the contenders, their checks, and the table of the documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_helpers import CPU, MORE, named, result, run

from bench.__main__ import main
from bench.commands import epilogues
from bench.measure.contest import Contest
from bench.measure.harness import Harness
from bench.report import epilogues as report
from bench.report import readme
from examples.epilogues import EXAMPLES


def test_every_format() -> None:
    rows = run("epilogues", "--m", "5", "--epilogues", "row_gate|rotation|gelu", "--rounds", "1")
    assert len({row["case"] for row in rows}) == len(epilogues.FORMATS) * len(epilogues.MODES)
    assert not any("refused" in row or "absent" in row for row in rows)
    for case in {row["case"] for row in rows}:
        own = named([row for row in rows if row["case"] == case])
        assert own.keys() == {*epilogues.BUILT_IN, "row_gate", "rotation", "gelu_and_mul"}
        assert {own[name]["checked"] for name in ("row_gate", "rotation", "gelu_and_mul")} == {"bit for bit"}
        row = own["rotation"]
        assert row["beside"] == "built in: c"
        assert row["of_built_in"] == pytest.approx(row["us"] / own["built in: c"]["us"], abs=1e-3, rel=1e-2)
        assert "of_built_in" not in own["built in: c"]
    decoded = named([row for row in rows if row["case"] == "epilogues decoded dense 5 tokens 64x128"])
    assert decoded["built in: c"]["checked"] == "bit for bit"


def test_every_epilogue_has_a_built_in_one() -> None:
    assert set(epilogues.BESIDE) == {epilogue.name for epilogue in EXAMPLES}
    assert set(epilogues.BESIDE.values()) == set(epilogues.BUILT_IN)
    assert set(epilogues.QUICK) < set(epilogues.BESIDE)


def test_quick_has_fewer_epilogues() -> None:
    rows = run("epilogues", "--quick", "--m", "3", "--formats", "W4A4", "--modes", "dense", "--rounds", "1")
    assert {row["contender"] for row in rows} == {*epilogues.BUILT_IN, *epilogues.QUICK}


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    results = epilogues._results

    def off(offs: Any, a: Any, b: Any, terms: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        found = results(offs, a, b, terms)
        if "epilogue" in terms:
            found[-1][0, 0] += 1
        return found

    monkeypatch.setattr(epilogues, "_results", off)
    product = epilogues._product(Harness(CPU), epilogues.Case("W4A4", "dense", 4, 64, 128))
    made = Contest({})
    for epilogue in EXAMPLES:
        made.attempt(epilogue.name, lambda e=epilogue: product.contender(e))
    assert not made.contenders
    assert len(made.refused) == len(EXAMPLES)
    assert made.refused["gelu_and_mul"].startswith("output 2 differs from the reference by ")


def test_an_unknown_epilogue_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["epilogues", "--device", "cpu", "--epilogues", "softmax"])
    assert (
        "--epilogues: got 'softmax', must match one of scaled_residual, row_gate" in capsys.readouterr().err
    )


def test_the_table() -> None:
    facts = {**MORE, "bench": "epilogues", "format": "W4A4", "mode": "dense"}
    rows = [
        result(**facts, contender=name, tokens=tokens, of_built_in=ratio, checked=checked)
        for name, tokens, ratio, checked in (
            ("row_gate", 1, 0.98, "bit for bit"),
            ("soft_cap", 1, 1.031, "bit for bit"),
            ("row_gate", 64, 1.03, "but for rounding"),
        )
    ]
    assert report.lines(rows) == [
        "| operands | mode | tokens | row gate | soft cap |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| W4A4 | dense | 1 | 0.98 | 1.03 |",
        "| W4A4 | dense | 64 | 1.03 |  |",
    ]
    text = readme.epilogues_table(rows)
    assert "2 of 3 are at most 1.03, and the largest is 1.03. Before they were timed, 2 had the bits" in text
    assert readme.epilogues_table([]) == report.NO_RUN
