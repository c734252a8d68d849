"""The command line: options, errors, lists, progress, a whole report on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_helpers import FACTS, MORE, cpu_harness, ignore, jobs

from bench.__main__ import main, parser
from bench.commands import listing, upstream
from bench.commands.runner import run
from bench.measure import roofline
from bench.report.results import Journal, load


def test_report_on_a_cpu_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "MATMUL", {"cpu": 128})
    line = ["report", "--quick", "--rounds", "1", "--device", "cpu", "--to", str(tmp_path)]
    assert main(line) == 0
    assert "0 refused" in capsys.readouterr().out
    rows = load(tmp_path / "results.jsonl")
    benches = {"dense", "grouped", "layer", "quantize", "overhead"}
    assert {row["bench"] for row in rows} == benches | {f"upstream {name}" for name in upstream.TABLES}
    assert all(row["roofline"]["tflop_s"]["fp32"] > 0 for row in rows)
    assert {row["command"] for row in rows} == {
        "python -m bench report --quick --rounds 1 --device cpu"  # where the results go does not count
    }
    before = (tmp_path / "results.jsonl").read_text()
    assert main([*line, "--json"]) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
    printed = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert printed == rows


def test_common_options_before_and_after_the_command() -> None:
    for line in (["--json", "--rounds", "3", "quantize"], ["quantize", "--json", "--rounds", "3"]):
        args = parser().parse_args(line)
        assert (args.json, args.rounds) == (True, 3)
    args = parser().parse_args(["quantize", "--kernels", "zipf$"])
    assert (args.json, args.rounds, args.kernels.pattern) == (False, None, "zipf$")


def test_lists_are_joined() -> None:
    line = ["grouped", "--m", "1,16", "--m", "64", "--routing", "zipf,empty", "--model", "glm-4.6"]
    args = parser().parse_args(line)
    assert (args.m, args.routing, args.model) == ([1, 16, 64], ["zipf", "empty"], ["glm-4.6"])
    assert parser().parse_args(["dense", "--shapes", "1x2x3,4x5"]).shapes == [(1, 2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["dense", "--kernels", "("], "'(' must be a regular expression"),
        (["dense", "--m", "1,x"], "'1,x' must be numbers like 1,16,256"),
        (["dense", "--m", "0"], "must be at least 1"),
        (["dense", "--shapes", "64"], "'64' must be sizes like 8192x8192"),
        (["dense", "--model", "gpt-5"], "'gpt-5' is not one of square, "),
        (["grouped", "--routing", "even"], "'even' is not one of uniform, zipf, onehot, empty"),
        (["grouped", "--model", "square"], "has no experts"),
        (["quantize", "--shapes", "7x32"], "7x32 must be m x k"),
        (["dense", "--device", "tpu"], "tpu"),
        (["list", "--kernels", "("], "must be a regular expression"),
        (["dense", "--kernels", "nosuch"], "no name matches 'nosuch'"),
        (["quantize", "--kernels", "nosuch"], "no name matches 'nosuch'"),
        (["dense", "--shapes", "64x100"], "k of 64x100 is 100, must be a multiple of 32"),
        (["dense", "--shapes", "7x64"], "n of 7x64 is 7, must be a multiple of 8"),
        (["dense", "--shapes", "1x2x3x4"], "must be n x k or m x n x k"),
        (["dense", "--shapes", "64x64", "--model", "square"], "--shapes and --model exclude each other"),
        (["grouped", "--m", "1", "--per-expert", "1"], "--m and --per-expert exclude each other"),
        (["grouped", "--shapes", "8x64x64", "--ep", "3"], "3 does not divide the 8 experts"),
        (["report", "--readme", "nosuch"], "nosuch"),
        (["dense", "--out", "/proc/nosuch/x"], "/proc/nosuch"),
        (["errors", "--device", "foo"], "must be cpu or cuda"),
        (["list", "shapes"], "got 'shapes', must be one of kernels, models, routings, tables"),
        (["hopper", "--device", "cpu"], "the layers on cpu hold no prepacked weights"),
    ],
)
def test_bad_arguments_are_named(line: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found) == listing.WHAT
    assert {"name": "qwen3-30b", "layers": found["models"][6]["layers"]} == found["models"][6]
    assert "128 experts (top 8): gate_up 1536x2048, down 2048x768" in found["models"][6]["layers"]
    assert main(["list", "models"]) == 0
    assert "llama-3.1-8b  qkv 6144x4096" in capsys.readouterr().out


def test_progress_is_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run(jobs([], "a", "b"), cpu_harness(), Journal(None, FACTS | MORE), ignore)
    assert capsys.readouterr().err.splitlines() == ["[1/2] a", "[2/2] b"]


def test_a_stopped_run_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.__main__.run_jobs", stop)
    monkeypatch.setattr(
        roofline, "measure", lambda device, rounds: roofline.Roofline(1.0, 1.0, {"fp32": 1.0})
    )
    out = tmp_path / "results.jsonl"
    assert main(["overhead", "--device", "cpu", "--out", str(out)]) == 130
    assert f"the same command continues {out}" in capsys.readouterr().err


def test_listed_kernels_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "kernels", "--kernels", "grouped", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert all("grouped" in kernel["name"] for kernel in kernels)
