"""Results files: runs continue where they stopped; compare prints what changed between two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import FACTS, MORE, cpu_harness, ignore, jobs, result, write

from bench.__main__ import main
from bench.commands.runner import run
from bench.report import changes
from bench.report.results import SCHEMA, Journal, load, load_all


def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
    path, made = tmp_path / "new" / "results.jsonl", []
    first = run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert [row["us"] for row in first] == [1.0, 2.0] * 2
    assert all(row["device"] == "a GPU" and row["schema"] == SCHEMA for row in first)
    again = run(jobs(made, "a", "b", "c"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert made == ["a", "b", "c"]
    assert again[:4] == first
    assert load(path) == again


@pytest.mark.parametrize("cut", [1, 40, 250])
def test_an_interrupted_case_is_measured_again(cut: int, tmp_path: Path) -> None:
    path, made = tmp_path / "results.jsonl", []
    run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    text = path.read_text()
    assert cut < len(text) // 2
    path.write_text(text[:-cut])
    run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert made == ["a", "b", "b"]
    assert path.read_text() == text


@pytest.mark.parametrize("fact", list(FACTS))
def test_results_of_other_facts_are_not_continued(fact: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run(jobs([], "a"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    before = path.read_text()
    with pytest.raises(ValueError, match=f"is of {fact} .*, must be 'other'; name another file"):
        Journal(path, FACTS | MORE | {fact: "other"})
    assert path.read_text() == before


@pytest.mark.parametrize("line", ["{", "[]", '{"bench": "dense"}', json.dumps(result(device=None))])
def test_a_line_that_is_not_a_result_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(result()) + "\n" + line + "\n")
    for read in (load, lambda path: Journal(path, FACTS | MORE)):
        with pytest.raises(ValueError, match="line 2 is "):
            read(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match="line 1 is of schema 7, must be 2"):
        load(write(path, [result(schema=7)]))
    with pytest.raises(ValueError, match="holds no results"):
        load(write(path, []))


def timed(us: float, spread: float = 0.01, **changed: Any) -> dict[str, Any]:
    return result(us=us, p10_us=us * (1 - spread), p90_us=us * (1 + spread), **changed)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (timed(10.0), timed(9.0), "faster"),
        (timed(10.0), timed(11.0), "slower"),
        (timed(10.0), timed(10.25), "same"),  # below the threshold
        (timed(10.0, 0.2), timed(11.0, 0.2), "same"),  # their spans overlap
    ],
)
def test_changes(old: dict[str, Any], new: dict[str, Any], verdict: str) -> None:
    (change,) = changes.changed([old], [new], 0.03)
    assert (change.verdict, change.ratio) == (verdict, pytest.approx(old["us"] / new["us"]))


def test_refusals_have_no_ratio() -> None:
    refused = {"bench": "dense", "case": "dense 16x64x128", "contender": "fp4gemm", "refused": "wrong"}
    (change,) = changes.changed([timed(10.0)], [refused], 0.03)
    assert (change.verdict, change.ratio) == ("refused", None)
    (change,) = changes.changed([refused], [timed(10.0)], 0.03)
    assert (change.verdict, change.ratio) == ("same", None)
    gone = {k: v for k, v in refused.items() if k != "refused"} | {"absent": "no kernel"}
    (change,) = changes.changed([gone], [timed(10.0)], 0.03)
    assert (change.verdict, change.ratio) == ("same", None)
    (change,) = changes.changed([timed(10.0)], [gone], 0.03)
    assert (change.verdict, change.ratio, change.role) == ("gone", None, "ours")
    assert changes.changed([gone], [refused], 0.03) == []


def test_compare_prints_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = {"contender": "torch bf16", "role": "baseline"}
    old = [timed(10.0), timed(20.0, **baseline), timed(5.0, case="only old")]
    new = [timed(8.0, driver="2"), timed(40.0, **baseline), timed(5.0, case="only new")]
    files = [str(write(tmp_path / name, rows)) for name, rows in (("old", old), ("new", new))]
    assert main(["compare", *files]) == 0  # only a baseline became slower
    text = capsys.readouterr().out
    assert "driver differs: None and 2" in text
    assert "faster    1.250  10.00 -> 8.00 us  dense 16x64x128: fp4gemm" in text
    assert "slower    0.500  20.00 -> 40.00 us  dense 16x64x128: torch bf16" in text
    assert "ours: 1 in common, geometric mean 1.250" in text
    assert "not compared: 1 results of the old file alone, 1 of the new" in text
    assert main(["compare", *files[::-1], "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[0])["verdict"] == "slower"


def test_compare_refuses_files_without_a_common_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = str(write(tmp_path / "old", [result()]))
    new = str(write(tmp_path / "new", [result(case="another")]))
    for line, text in (
        (["compare", old, new], "have no case in common"),
        (["compare", old, old, "--threshold", "2"], "--threshold: is 2.0"),
        (["compare", old, str(tmp_path / "gone")], "gone"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(line)
        assert stopped.value.code == 2
        assert text in capsys.readouterr().err
    assert changes.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_fresh_discards_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [result(revision="another")])
    assert Journal(path, FACTS | MORE, fresh=True).dates == {}
    assert path.read_text() == ""


def test_a_result_in_two_files_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [result()])
    with pytest.raises(ValueError, match="dense 16x64x128: fp4gemm is in them twice"):
        load_all([path, path])


def test_results_of_the_first_schema_are_read(tmp_path: Path) -> None:
    """Schema 1 called a target a bar."""
    path = write(tmp_path / "results.jsonl", [result(schema=1, bar=">= 2.00 of copy")])
    (row,) = load(path)
    assert row["target"] == ">= 2.00 of copy"
    assert "bar" not in row
    with pytest.raises(ValueError, match="is of schema 1, must be 2"):
        Journal(tmp_path / "results.jsonl", FACTS | MORE)
