"""bench: results files that a run goes on from, compare, plot, report, README's tables, the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import cpu_harness, result

from bench.__main__ import main, parser
from bench.commands import compare, listing, plot, report
from bench.commands.runner import run
from bench.measure import roofline
from bench.measure.contest import Job
from bench.report import tables
from bench.report.results import Journal, load

README = Path(__file__).resolve().parents[2] / "README.md"
RESULTS = README.parent / "bench" / "results" / "h200.jsonl"
FACTS = {
    "device": "a GPU",
    "fp4gemm": "0.1",
    "revision": "abc",
    "library": "12345678",
    "torch": "2.13",
    "rounds": 20,
    "options": "eager",
}
MORE = {"date": "2026-01-02", "command": "python -m bench", "roofline": {}}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ignore(rows: object, console: object) -> None:
    """Shows nothing."""


# ---- results files ----------------------------------------------------------------------------------------


def jobs(made: list[str], *names: str) -> list[Job]:
    def rows(name: str) -> Any:
        made.append(name)
        yield {"bench": "dense", "case": name, "contender": "fp4gemm", "us": 1.0}
        yield {"bench": "dense", "case": name, "contender": "torch fp32", "us": 2.0}

    return [Job(name, "dense", lambda name=name: rows(name)) for name in names]  # type: ignore[misc]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, made = tmp_path / "new" / "results.jsonl", []
    first = run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert [row["us"] for row in first] == [1.0, 2.0] * 2
    assert all(row["device"] == "a GPU" and row["schema"] == 1 for row in first)
    again = run(jobs(made, "a", "b", "c"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert made == ["a", "b", "c"]
    assert again[:4] == first
    assert load(path) == again


@pytest.mark.parametrize("cut", [1, 40, 250])
def test_a_case_that_was_broken_off_is_measured_again(cut: int, tmp_path: Path) -> None:
    path, made = tmp_path / "results.jsonl", []
    run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    text = path.read_text()
    assert cut < len(text) // 2
    path.write_text(text[:-cut])
    run(jobs(made, "a", "b"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    assert made == ["a", "b", "b"]
    assert path.read_text() == text


@pytest.mark.parametrize("fact", list(FACTS))
def test_results_of_something_else_are_not_gone_on_from(fact: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run(jobs([], "a"), cpu_harness(), Journal(path, FACTS | MORE), ignore)
    before = path.read_text()
    with pytest.raises(ValueError, match=f"is of {fact} .*, must be 'other'; name another file"):
        Journal(path, FACTS | MORE | {fact: "other"})
    assert path.read_text() == before


@pytest.mark.parametrize("line", ["{", "[]", '{"bench": "dense"}', json.dumps(result(device=None))])
def test_lines_that_are_no_results_are_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(result()) + "\n" + line + "\n")
    for read in (load, lambda path: Journal(path, FACTS | MORE)):
        with pytest.raises(ValueError, match="line 2 is "):
            read(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match="line 1 is of schema 7, must be 1"):
        load(write(path, [result(schema=7)]))
    with pytest.raises(ValueError, match="holds no results"):
        load(write(path, []))


# ---- compare ----------------------------------------------------------------------------------------------


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
    (change,) = compare.changed([old], [new], 0.03)
    assert (change.verdict, change.ratio) == (verdict, pytest.approx(old["us"] / new["us"]))


def test_refusals_have_no_ratio() -> None:
    refused = {"bench": "dense", "case": "dense 16x64x128", "contender": "fp4gemm", "refused": "wrong"}
    (change,) = compare.changed([timed(10.0)], [refused], 0.03)
    assert (change.verdict, change.ratio) == ("refused", None)
    (change,) = compare.changed([refused], [timed(10.0)], 0.03)
    assert (change.verdict, change.ratio) == ("same", None)
    gone = {k: v for k, v in refused.items() if k != "refused"} | {"absent": "no kernel"}
    (change,) = compare.changed([gone], [timed(10.0)], 0.03)
    assert (change.verdict, change.ratio) == ("same", None)
    (change,) = compare.changed([timed(10.0)], [gone], 0.03)
    assert (change.verdict, change.ratio, change.role) == ("gone", None, "ours")
    assert compare.changed([gone], [refused], 0.03) == []


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


def test_compare_refuses_what_has_nothing_in_common(
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
    assert compare.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


# ---- tables -----------------------------------------------------------------------------------------------


def test_tables_leave_out_what_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        result(kernel="sm90_x", bar=">= 2.00 of torch bf16 (2.00)", met=True),
        result(contender="torch bf16", role="baseline", ratio={}, note="a note"),
        {
            "bench": "dense",
            "case": "dense 16x64x128",
            "contender": "bad",
            "refused": "1 of 8 differ",
        },
        {"bench": "dense", "case": "dense 16x64x128", "contender": "humming", "absent": "not installed"},
    ]
    headings, lines = tables.table(rows)
    assert headings == [
        *("contender", "us", "p10", "p90", "TFLOP/s", "GB/s", "of roofline"),
        *("x torch bf16", "bar", "kernel"),
    ]
    assert lines[0] == [
        *("fp4gemm", "10.0", "9.0", "11.0", "2", "100", "50 %"),
        *("2.00", ">= 2.00 of torch bf16 (2.00), met", "sm90_x"),
    ]
    assert lines[1][7:] == ["", "", ""]
    assert len(lines) == 2
    tables.show(rows)
    text = capsys.readouterr().out
    assert "REFUSED bad: 1 of 8 differ" in text
    assert "not here: humming: not installed" in text
    assert "torch bf16: a note" in text
    assert tables.verdict(rows) == "2 results, 1 refused; 1 of 1 targets met"


def test_tables_do_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    tables.show([result()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "dense 16x64x128"
    assert lines[3].split()[:2] == ["fp4gemm", "10.0"]


# ---- plots and reports ------------------------------------------------------------------------------------


def products() -> list[dict[str, Any]]:
    rows = []
    for m, us in ((1, 10.0), (16, 12.0)):
        case = f"dense {m}x64x128"
        size: dict[str, Any] = {"case": case, "job": case, "m": m, "tflop_s": m / us}
        rows.append(result(us=us, ratio={"torch bf16": 30 / us, "humming": 15 / us}, **size))
        rows.append(result(us=30.0, contender="torch bf16", role="baseline", ratio={}, **size))
    moe = {"bench": "grouped", "case": "grouped q", "model": "qwen3-30b", "layer": "down", "experts": 128}
    rows.append(result(**moe, tokens=256, routing="zipf", ratio={"torch bf16": 3.0}))
    rows.append(result(**moe | {"case": "grouped r"}, tokens=4096, routing="zipf", ratio={"torch bf16": 1.5}))
    rows.append(
        result(
            bench="quantize",
            case="quantize bf16 64x96",
            contender="row",
            of_copy=0.9,
            bar="x",
            us=2.0,
            tflop_s=None,
        )
    )
    return rows


def test_speed_ups() -> None:
    assert plot.speed_ups(products()) == {
        "64x128": [(1, 3.0), (16, 2.5)],
        "qwen3-30b down 128x64x128 zipf": [(256, 3.0), (4096, 1.5)],
    }
    assert plot.intensity(result(tflop_s=2.0, gb_s=100.0)) == 20.0


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results = write(tmp_path / "results.jsonl", products())
    assert main(["plot", str(results), "--out", str(tmp_path / "pictures")]) == 0
    names = {"roofline-dense", "speed-up-dense", "roofline-grouped", "speed-up-grouped"}
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == names
    drawn = (tmp_path / "pictures" / "roofline-dense.svg").read_text()
    for text in ("4200 GB/s", "700 TFLOP/s, 16 bit", "fp4gemm", "torch bf16", "a GPU"):
        assert text in drawn
    with pytest.raises(SystemExit):
        main(["plot", str(write(results, [result(bench="overhead", tflop_s=None)]))])
    assert "nothing to draw" in capsys.readouterr().err


def test_a_page_is_of_one_device() -> None:
    with pytest.raises(ValueError, match="results are of a GPU and another"):
        plot.one_device([result(), result(device="another")])


def test_report_of_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [*products(), result(contender="bad <kernel>", refused="3 of 8 & more differ")]
    del rows[-1]["us"]
    results = write(tmp_path / "results.jsonl", rows)
    assert main(["report", str(results), "--to", str(tmp_path / "page")]) == 1  # something was refused
    page = (tmp_path / "page" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "bad &lt;kernel&gt;: 3 of 8 &amp; more differ" in page
    assert "<code>python -m bench dense</code>" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    text = (tmp_path / "page" / "report.md").read_text()
    assert "**1 refused.**" in text
    assert "| fp4gemm | 10.0 | 9.0 | 11.0 |" in text
    assert "| largest matmul | 700 TFLOP/s (16 bit) |" in text


def test_readme_tables() -> None:
    rows = [*products(), result(contender="other", refused="wrong")]
    rows[0] |= {"sm_mhz": 1700.0, "power_w": 400.0}
    text = report.readme_tables(rows)
    head = "a GPU (sm 1700 to 1700 MHz, power 400 to 400 W), 2026-01-02, torch 2.13, revision abc, by `python"
    assert text.startswith(head)
    assert "| `mm`, weight n x k; m = |  | 1 | 16 |" in text
    assert "| 64x128 | us | 10.0 | 12.0 |" in text
    assert "|  | x torch bf16 | 3.00 | 2.50 |" in text
    assert "|  | x humming | 1.50 | 1.25 |" in text
    assert "| qwen3-30b down 128x64x128 zipf | us | 10.0 | 10.0 |" in text
    assert "| row | bf16 64x96 | 2.0 | 0.90 |" in text
    assert text.endswith("Refused: dense 16x64x128, other: wrong.")


def test_readme_shows_the_results_that_are_kept() -> None:
    """Nothing in README's tables is typed by hand."""
    text = README.read_text(encoding="utf-8")
    begin, end = text.index(report.BEGIN), text.index(report.END)
    assert text[begin + len(report.BEGIN) : end].strip() == report.readme_tables(load(RESULTS))


def test_readme_block() -> None:
    text = f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n"
    assert report.with_block(text, r"new \1", "f") == f"above\n{report.BEGIN}\nnew \\1\n{report.END}\nbelow\n"
    for bad in ("", text + text, f"{report.END} {report.BEGIN}"):
        with pytest.raises(ValueError, match="--readme: f must hold one"):
            report.with_block(bad, "new", "f")


# ---- the command line -------------------------------------------------------------------------------------


def test_report_on_a_cpu_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "MATMUL", {"cpu": 128})
    line = ["report", "--quick", "--rounds", "1", "--device", "cpu", "--to", str(tmp_path)]
    assert main(line) == 0
    assert "0 refused" in capsys.readouterr().out
    rows = load(tmp_path / "results.jsonl")
    assert {row["bench"] for row in rows} == {"dense", "grouped", "layer", "quantize", "overhead"}
    assert all(row["roofline"]["tflop_s"]["fp32"] > 0 for row in rows)
    assert {row["command"] for row in rows} == {
        "python -m bench report --quick --rounds 1 --device cpu"  # where the results go does not count
    }
    before = (tmp_path / "results.jsonl").read_text()
    assert main([*line, "--json"]) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
    printed = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert printed == rows


def test_common_options_stand_on_either_side() -> None:
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
        (["dense", "--kernels", "("], "'(' is not a regular expression"),
        (["dense", "--m", "1,x"], "'1,x' is not numbers like 1,16,256"),
        (["dense", "--m", "0"], "must be at least 1"),
        (["dense", "--shapes", "64"], "'64' is not sizes like 8192x8192"),
        (["dense", "--model", "gpt-5"], "'gpt-5' is none of square, "),
        (["grouped", "--routing", "even"], "'even' is none of uniform, zipf, onehot, empty"),
        (["grouped", "--model", "square"], "has no experts"),
        (["quantize", "--shapes", "7x32"], "7x32 must be m x k"),
        (["dense", "--device", "tpu"], "tpu"),
        (["sweep", "all"], "invalid choice"),
        (["list", "--kernels", "("], "is not a regular expression"),
        (["dense", "--kernels", "nosuch"], "'nosuch' is found in no name"),
        (["quantize", "--kernels", "nosuch"], "'nosuch' is found in no name"),
        (["dense", "--shapes", "64x100"], "k of 64x100 is 100, must be a multiple of 32"),
        (["dense", "--shapes", "7x64"], "n of 7x64 is 7, must be a multiple of 8"),
        (["dense", "--shapes", "1x2x3x4"], "must be n x k or m x n x k"),
        (["dense", "--shapes", "64x64", "--model", "square"], "--shapes and --model exclude each other"),
        (["grouped", "--m", "1", "--per-expert", "1"], "--m and --per-expert exclude each other"),
        (["grouped", "--shapes", "8x64x64", "--ep", "3"], "3 does not divide the 8 experts"),
        (["report", "--readme", "nosuch"], "nosuch"),
        (["dense", "--out", "/proc/nosuch/x"], "/proc/nosuch"),
        (["errors", "--device", "foo"], "must be cpu or cuda"),
        (["list", "shapes"], "got 'shapes', must be some of kernels, models, routings, presets"),
        (["hopper", "--device", "cpu"], "for compute capability 9.0"),
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


def test_progress_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run(jobs([], "a", "b"), cpu_harness(), Journal(None, FACTS | MORE), ignore)
    assert capsys.readouterr().err.splitlines() == ["[1/2] a", "[2/2] b"]


@pytest.mark.parametrize("width", [70, 400])
def test_a_narrow_terminal_goes_without_columns(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(tables, "WIDTH", width)
    tables.show([result(kernel="sm90_kernel_with_a_long_name")])
    text = capsys.readouterr().out
    assert ("sm90_kernel_with_a_long_name" in text) == (width == 400)
    assert "fp4gemm" in text
    assert "2.00" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_stopped_run_says_how_to_go_on(
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
    assert f"the same command goes on with {out}" in capsys.readouterr().err


def test_fresh_drops_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [result(revision="another")])
    assert Journal(path, FACTS | MORE, fresh=True).dates == {}
    assert path.read_text() == ""


def test_results_that_are_there_twice_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [result()])
    with pytest.raises(ValueError, match="dense 16x64x128: fp4gemm is there twice"):
        plot.of_files([path, path])


def test_tables_of_one_contender_have_no_rivals() -> None:
    alone = {k: v for k, v in result().items() if k != "ratio"}
    assert "| 64x128 | us | 10.0 |" in report.readme_tables([alone])


def test_listed_kernels_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "kernels", "--kernels", "grouped", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert all("grouped" in kernel["name"] for kernel in kernels)
