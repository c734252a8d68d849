"""Tables on the terminal, pictures, the report and the tables of the documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_helpers import DOCS, RESULTS, result, write

from bench.__main__ import main
from bench.report import formats, pictures, readme, tables
from bench.report.results import load_all, one_device


def test_tables_omit_empty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        result(kernel="sm90_x", target=">= 2.00 of torch bf16 (2.00)", met=True),
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
        *("x torch bf16", "target", "kernel"),
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
    assert "absent: humming: not installed" in text
    assert "torch bf16: a note" in text
    assert tables.verdict(rows) == "2 results, 1 refused; 1 of 1 targets met"


def test_tables_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    tables.show([result()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "dense 16x64x128"
    assert lines[3].split()[:2] == ["fp4gemm", "10.0"]


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
            target="x",
            us=2.0,
            tflop_s=None,
        )
    )
    return rows


def test_speed_ups() -> None:
    assert pictures.speed_ups(products()) == {
        "64x128": [(1, 3.0), (16, 2.5)],
        "qwen3-30b down 128x64x128 zipf": [(256, 3.0), (4096, 1.5)],
    }
    assert pictures.intensity(result(tflop_s=2.0, gb_s=100.0)) == 20.0


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
        one_device([result(), result(device="another")])


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
    text = readme.tables(rows)
    head = "a GPU (sm 1700 to 1700 MHz, power 400 to 400 W), 2026-01-02, torch 2.13, revision abc, by `python"
    assert text.startswith(head)
    assert "| `mm`, weight n x k; m = |  | 1 | 16 |" in text
    assert "| 64x128 | us | 10.0 | 12.0 |" in text
    assert "|  | x torch bf16 | 3.00 | 2.50 |" in text
    assert "|  | x humming | 1.50 | 1.25 |" in text
    assert "| qwen3-30b down 128x64x128 zipf | us | 10.0 | 10.0 |" in text
    assert "| row | bf16 64x96 | 2.0 | 0.90 |" in text
    assert text.endswith("Refused: dense 16x64x128, other: wrong.")


def test_the_short_table() -> None:
    rows = [*products(), result(contender="other", refused="wrong")]
    text = readme.short_table(rows)
    assert "Microseconds (and times as fast as torch bf16):" in text
    assert "| product | weight n x k; tokens = | 1 | 16 |" in text
    assert "| `mm` | 64x128 | 10.0 (3.00) | 12.0 (2.50) |" in text
    assert "Quantizers, as a fraction of the bandwidth of a device copy: row 0.90." in text
    assert text.endswith("Refused: dense 16x64x128, other: wrong.")
    assert "(" not in readme.short_table([result(ratio={})]).partition("|")[2]


def test_the_table_of_serving() -> None:
    layer = {"bench": "serving", "model": "llama", "contender": "fp4gemm W4A4"}
    rows = [
        result(**layer, layer="qkv", m=1, ratio={"torch bf16": 2.0}),
        result(**layer, layer="qkv", m=64, ratio={"torch bf16": 1.5}),
        result(**layer, layer="experts", tokens=64, ratio={}),
        result(**layer | {"contender": "torch bf16"}, layer="qkv", m=1, role="baseline"),
        {"bench": "serving", "case": "c", "contender": "humming", "absent": "not installed"},
    ]
    lines = readme.serving_table(rows).splitlines()
    assert "| layer | contender | 1 | 64 |" in lines
    assert "| llama qkv | fp4gemm W4A4 | 10.0 (2.00) | 10.0 (1.50) |" in lines
    assert "| llama experts | fp4gemm W4A4 |  | 10.0 |" in lines
    assert not any(line.startswith("| llama") and "torch bf16" in line for line in lines)
    assert not any(line.startswith("Tokens") for line in lines)
    older = [row | {"revision": "0ld"} for row in rows[1:2]]
    text = readme.serving_table([rows[0], *older, *rows[2:]])
    now, then = (text.index(f"revision {row['revision']}") for row in (rows[0], older[0]))
    assert text.startswith("Tokens 1, 64: ")
    assert now < text.index("Tokens 64: ") < then  # the sizes of each run, in front of its revision
    assert "| llama qkv | fp4gemm W4A4 | 10.0 (2.00) | 10.0 (1.50) |" in text
    with pytest.raises(ValueError, match=r"--readme: the results have no row of python -m bench serving"):
        readme.serving_table([result()])


def with_formats() -> list[dict[str, Any]]:
    """Rows of every format, with a contender that the tables omit."""
    us = {"torch bf16": 30.0, "torch fp8": 20.0, "fp4gemm W4A16": 15.0, "fp4gemm W4A8": 12.0, "humming": 1.0}
    rows = []
    for m, factor in ((1, 1.0), (256, 2.0)):
        case: dict[str, Any] = {"case": f"dense {m}x64x128", "m": m}
        for name, time in us.items():
            ratio = {"torch bf16": 30.0 / time, "torch fp8": 20.0 / time}
            rows.append(result(**case, contender=name, us=factor * time, ratio=ratio))
        rows.append(result(**case, contender="fp4gemm W4A4", us=10.0 if m == 1 else 70.0))
    model: dict[str, Any] = {"bench": "model", "step": "llama: decode, context 8", "case": "model llama"}
    model |= {"batch": 4, "role": "baseline"}
    rows.append(result(**model, contender="bf16 merged", us=3000.0, us_layer=90.0, ratio={}))
    ratio = {"bf16 merged": 1.5}
    rows.append(result(**model, contender="fp8 merged", us=2000.0, us_layer=60.0, ratio=ratio))
    return rows


def test_the_table_of_formats() -> None:
    lines = readme.formats_table(with_formats()).splitlines()
    assert lines[0] == "![Times as fast as bf16, by tokens and format](pictures/formats-a-gpu.svg)"
    at = lines.index("| weight n x k; tokens = |  | 1 | 256 |")
    assert lines[at + 2 : at + 8] == [
        "| 64x128 | bf16 | 30.0 | 60.0 |",
        "|  | FP8 | 20.0 | 40.0 |",
        "|  | W4A16 | 15.0 | 30.0 |",
        "|  | W4A8 | 12.0 | **24.0** |",
        "|  | W4A4 | **10.0** | 70.0 |",
        "",
    ]
    assert "| llama: decode, context 8 | bf16 | 90.0 |" in lines
    assert "|  | FP8 | **60.0** |" in lines
    assert readme.formats_table(products()) == readme.formats_table([]) == formats.NO_RUN


def test_the_picture_of_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results, picture = write(tmp_path / "r.jsonl", with_formats()), tmp_path / "new" / "formats.svg"
    assert main(["plot", str(results), "--formats", str(picture)]) == 0
    drawn = picture.read_text()
    for text in ("dense: 64x128", "FP8", "W4A16", "W4A8", "W4A4", "times as fast as bf16, a GPU"):
        assert text in drawn
    assert "W4A8 fast" not in drawn
    for line, text in (
        ([str(results), "--formats", "p.gif"], "the suffix of p.gif must be one of svg, png, pdf"),
        ([str(write(results, products())), "--formats", str(picture)], "no product was measured in bf16 and"),
    ):
        with pytest.raises(SystemExit):
            main(["plot", *line])
        assert text in capsys.readouterr().err


def test_tables_show_fp8_where_it_was_measured() -> None:
    both = {"torch bf16": 2.0, "torch fp8, quantized tokens": 1.25, "torch fp8 promoted": 9.0}
    whole = {"torch bf16": 1.9, "torch fp8": 1.2, "torch fp8 promoted": 1.3}
    rows = [
        result(ratio=both),
        result(bench="layer", case="layer 16x64x128", ratio=whole),
        result(bench="grouped", case="grouped", experts=4, tokens=16, ratio={"torch bf16": 1.5}),
    ]
    short = readme.short_table(rows)
    assert "Microseconds (and times as fast as torch bf16, torch fp8):" in short
    assert "| `mm` | 64x128 | 10.0 (2.00, 1.25) |" in short
    assert "| `quantize` and `mm` | 64x128 | 10.0 (1.90, 1.20) |" in short
    assert "| `grouped_mm` | 4x64x128 | 10.0 (1.50, -) |" in short
    tables = readme.tables(rows)
    assert "|  | x torch fp8, quantized tokens | 1.25 |" in tables
    assert "|  | x torch fp8 | 1.20 |" in tables
    serving = [result(bench="serving", model="llama", layer="qkv", ratio=whole)]
    assert "| llama qkv | fp4gemm | 10.0 (1.90, 1.20) |" in readme.serving_table(serving)
    assert "(and times as fast as torch bf16, torch fp8), by tokens:" in readme.serving_table(serving)
    model = [row for row in with_formats() if row["bench"] == "model"]
    assert "| llama: decode, context 8 | fp8 merged | 2.00 (1.50) |" in readme.short_table(model)


def test_the_bounds_of_which_format_follow_from_the_kept_roofline() -> None:
    bounds = load_all([RESULTS])[0]["roofline"]
    rate, read = bounds["tflop_s"]["16 bit"], bounds["read_gb_s"]
    text = " ".join((DOCS / "which_format.md").read_text(encoding="utf-8").split())
    assert f"reads {read:.0f} GB/s, and its large matmul in bf16 has {rate:.0f} TFLOP/s" in text
    a16, a8 = (f"{4.5 / 16 * factor * 1e3 * rate / read:.0f}" for factor in (1, 2))
    assert f"tensor cores from {1e3 * rate / read:.0f} tokens on, and W4A16 from {a16} on" in text
    assert f"With twice that rate, W4A8 would be from {a8} on" in text


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("results.md", "*.jsonl"),
        ("benchmarks.md", "*.jsonl"),
        ("serving.md", "serving/*.jsonl"),
        ("which_format.md", "formats/h200.jsonl"),
    ],
)
def test_documents_show_the_kept_results(name: str, results: str) -> None:
    """Nothing in these tables is typed by hand."""
    text = (DOCS / name).read_text(encoding="utf-8")
    files = sorted(RESULTS.parent.glob(results))
    assert files
    assert readme.with_blocks(text, load_all(files), name) == text


def test_marked_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(readme.BLOCKS, "bench", lambda rows: r"new \1")
    begin, end = readme.marks("bench")
    text = f"above\n{begin}\nold\n{end}\nbelow\n"
    assert readme.with_blocks(text, [], "f") == f"above\n{begin}\nnew \\1\n{end}\nbelow\n"
    for bad in ("", text + text, f"{end} {begin}"):
        with pytest.raises(ValueError, match="--readme: f must hold one"):
            readme.with_blocks(bad, [], "f")


@pytest.mark.parametrize("width", [70, 400])
def test_a_narrow_terminal_drops_columns(
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


def test_readme_tables_of_one_contender_have_no_baselines() -> None:
    alone = {k: v for k, v in result().items() if k != "ratio"}
    assert "| 64x128 | us | 10.0 |" in readme.tables([alone])
