"""bench upstream: the tables on a CPU, the code for Hopper and Blackwell, and the published figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_fakes
import fp4gemm
import pytest
import torch
from bench_helpers import BLACKWELL, HOPPER, MORE, cpu_harness, named, result, run, write

from bench.__main__ import main
from bench.baselines import cuda_python, installed
from bench.commands import report, upstream
from bench.measure import launches, roofline, w4a8
from bench.report import page, readme
from bench.report import upstream as sides
from bench.report.results import Journal, load
from bench.upstream import arms

TABLES = list(upstream.TABLES)
# By table, the contenders that no CPU and no fake runs.
NEVER = {"gemm": {cuda_python.NAME}, "mxfp8": {"fp4gemm MXFP8"}}


def test_quick_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every table, every result right, and every contender that cannot run with its reason."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "MATMUL", {"cpu": 128})
    out = tmp_path / "upstream.jsonl"
    assert main(["upstream", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = load(out)
    assert [f"upstream {name}" for name in TABLES] == list(dict.fromkeys(row["bench"] for row in rows))
    assert not any("refused" in row for row in rows)
    for row in rows:
        assert "us" in row or row["absent"], row
    assert "| time of per token / per tensor | 0.49 to 0.77 |" in printed
    assert "https://github.com/NVIDIA/TransformerEngine/pull/3045" in printed
    # The report of these rows has them too, and what the owners of a GPU send is this report.
    assert main(["report", str(out), "--to", str(tmp_path)]) == 0
    for name in (page.PAGE, page.MARKDOWN):
        text = (tmp_path / name).read_text()
        assert "Upstream's figures and ours" in text or "Upstream&#39;s figures and ours" in text
        assert "0.49 to 0.77" in text
        assert "needs tensor cores that multiply MXFP8" in text


@pytest.mark.parametrize("table", TABLES)
def test_each_table_alone_as_on_hopper(table: str) -> None:
    """What Blackwell alone can run is absent with a reason, and all else is timed."""
    rows = run("upstream", table, "--quick", operands=HOPPER)
    assert {row["bench"] for row in rows} == {f"upstream {table}"}
    assert not any("refused" in row for row in rows)
    missing = {row["contender"]: row["absent"] for row in rows if "absent" in row}
    assert all("compute capability 10.0" in missing[name] for name in set(missing) - NEVER.get(table, set()))
    wanted = {
        "gemm": {"cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale", "cuDNN FROST"},
        "forward": {"cuBLASLt nvfp4, per tensor, RHT and SR"},
        "backward": {"cuBLASLt nvfp4, per tensor, RHT and SR"},
        "mxfp8": {"torch MXFP8", "fp4gemm MXFP8"},
    }
    assert wanted.get(table, set()) <= set(missing)
    assert all(row["fake"] for row in rows)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with bench_fakes.installed_fakes(monkeypatch):
        yield


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("table", TABLES)
def test_each_table_as_on_blackwell(table: str) -> None:
    """Every contender runs, on stand-ins, and every row says that it is not real."""
    rows = run("upstream", table, "--quick", operands=BLACKWELL)
    assert not any("refused" in row for row in rows), [row for row in rows if "refused" in row]
    assert {row["contender"] for row in rows if "absent" in row} == NEVER.get(table, set())
    assert all("stands in" in row["fake"] for row in rows)
    for row in rows:
        if row["contender"].startswith(("TransformerEngine", "FlashInfer", "cuDNN")):
            assert row["version"].endswith("of an unknown version")


@pytest.mark.usefixtures("fakes")
def test_fakes_are_refused(tmp_path: Path) -> None:
    """No file of results, report or document accepts a row that no device measured."""
    rows = [row | MORE | {"roofline": {}} for row in run("upstream", "gemm", "--quick", operands=BLACKWELL)]
    text = "upstream gemm 128x128x128, fp4gemm: is not measured, but a CPU"
    with pytest.raises(ValueError, match=text):
        page.write(rows, tmp_path)
    with pytest.raises(ValueError, match=text):
        readme.with_blocks("<!-- bench upstream: begin -->\n<!-- bench upstream: end -->", rows, "x")
    with pytest.raises(ValueError, match=text):
        Journal(tmp_path / "new.jsonl", MORE).add("a job", rows)
    assert (tmp_path / "new.jsonl").read_text() == ""
    path = write(tmp_path / "made.jsonl", [result() | {"fake": "a CPU"}])
    with pytest.raises(ValueError, match="dense 16x64x128, fp4gemm: is not measured, but a CPU"):
        load(path)


@pytest.mark.usefixtures("fakes")
def test_contenders_are_verified_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that drops its scales, and a quantizer of other data, have no time."""
    right = bench_fakes.mm_fp4

    def wrong(a: Any, b: Any, scale_a: Any, scale_b: Any, alpha: torch.Tensor, dtype: Any) -> Any:
        return right(a, b, scale_a, scale_b, torch.ones_like(alpha), dtype)

    monkeypatch.setattr(installed.module("flashinfer"), "mm_fp4", wrong)
    monkeypatch.setattr(
        bench_fakes.Graph, "execute", lambda self, pack, workspace, handle: list(pack.values())[-1].zero_()
    )
    found = named(run("upstream", "gemm", "--quick", operands=BLACKWELL))
    for name in ("FlashInfer, per token", "cuDNN FROST"):
        assert "us" not in found[name]
        assert found[name]["refused"]
        assert name not in found["fp4gemm"]["ratio"]
    monkeypatch.setattr(
        bench_fakes.NVFP4Quantizer,
        "__call__",
        lambda self, x: bench_fakes.FakeTensor(bench_fakes.fp4gemm.quantize(x.flip(0).contiguous()), None),
    )
    found = named(run("upstream", "swizzle", "--quick", "--contenders", "row-scaled", operands=BLACKWELL))
    assert "of the norm of x" in found["TransformerEngine, row-scaled"]["refused"]


W4A8_OF = {"gemm": ", quantized tokens", "forward": ", both cast", "mxfp8": ""}


@pytest.mark.parametrize("table", list(W4A8_OF))
def test_w4a8_is_timed_where_hopper_runs_it(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside bf16 and FP8, with each kind of sums; results that are wrong have no time."""
    promoted, fast = (f"{name}{W4A8_OF[table]}" for name in ("fp4gemm W4A8", "fp4gemm W4A8 fast"))
    line = ("upstream", table, "--quick", "--contenders", "W4A8|torch")
    found = named(run(*line, operands=HOPPER))
    for name in (promoted, fast):
        assert found[name]["us"] > 0
        assert found[name]["checked"] == "but for rounding"
        assert {other[:9] for other in found[name]["ratio"]} == {"torch bf1", "torch fp8"}
    asked: list[bool] = []

    def wrong(right: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> torch.Tensor:
            is_fast = keywords.get("use_fast_accum", args[-1] is True)
            asked.append(is_fast)
            result: torch.Tensor = right(*args, **keywords)
            return result * 1.5 if is_fast else result

        return call

    of, name = {"gemm": (fp4gemm, "mm"), "forward": (w4a8, "linear"), "mxfp8": (w4a8, "grouped")}[table]
    monkeypatch.setattr(of, name, wrong(getattr(of, name)))
    found = named(run(*line, operands=HOPPER))
    assert set(asked) == {False, True}
    assert "is off by" in found[fast]["refused"]
    assert "us" in found[promoted]


def arguments(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"tables": [], "quick": False, "pair": False, "m": None, "k": None} | changed)


def test_the_published_sizes() -> None:
    harness = cpu_harness()
    harness.is_cuda = True
    jobs = upstream.jobs(arguments(), harness)
    counts = {name: sum(job.bench == f"upstream {name}" for job in jobs) for name in TABLES}
    assert counts == dict.fromkeys(TABLES, 18) | {"swizzle": 36, "mxfp8": 8}
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)
    assert "upstream gemm 32768x8192x8192" in keys
    assert "upstream mxfp8 98304x2048x7168 by 8" in keys
    pairs = upstream.jobs(arguments(tables=["swizzle"], pair=True), harness)
    assert [job.key for job in pairs] == [key for key in keys if key.startswith("upstream swizzle pair")]
    some = upstream.jobs(arguments(tables=["gemm", "mxfp8"], m=[16384], k=[4096]), harness)
    assert [job.key for job in some] == [
        "upstream gemm 16384x4096x4096",
        "upstream mxfp8 16384x2048x7168 by 4",
        "upstream mxfp8 16384x2048x7168 by 8",
    ]


def test_the_report_for_owners_has_every_table() -> None:
    """docs/blackwell.md asks for ``report --quick``."""
    harness = cpu_harness(BLACKWELL)
    harness.is_cuda = True
    line = argparse.Namespace(quick=True, m=None, shapes=None, model=None, kernels=None)
    benches = {job.bench for job in report.jobs(line, harness)}
    assert {f"upstream {name}" for name in TABLES} <= benches


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["upstream", "all"], "TABLE: got 'all', must be one of quantize, grouped"),
        (["upstream", "gemm", "--m", "33"], "--m: is 33, must be a multiple of 32"),
        (["upstream", "gemm", "--k", "40"], "--k: is 40, must be a multiple of 32"),
    ],
)
def test_bad_arguments_are_named(line: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*line, "--device", "cpu"])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


# ---- the published figures


def row(table: str, contender: str, us: float, **fields: Any) -> dict[str, Any]:
    fields = {"m": 1024, "k": 4096} | fields
    case = f"upstream {table} {fields['m']}x{fields['k']}"
    return result(bench=f"upstream {table}", case=case, contender=contender, us=us, **fields)


def test_every_figure_has_a_source_and_a_contender() -> None:
    data = sides.figures()
    assert data == json.loads(sides.FIGURES.read_text())
    for entry in [*data["ratios"], *data["launches"], data["times"]]:
        assert set(data["sources"][entry["source"]]) == {"url", "date", "device", "conditions"}
        assert entry["table"] in TABLES
    known = {*arms.RECIPES, "swizzled in the cast", "swizzled by a kernel", "per tensor"}
    for entry in [*data["ratios"], *data["launches"]]:
        assert {entry["of"], entry.get("over", entry["of"])} <= known
    sizes = {(one["m"], one["gemms"]) for one in data["times"]["milliseconds"]}
    assert sizes == {(one.m, one.gemms) for one in arms.GROUPED}


def test_ratios_stand_beside_the_published_ones() -> None:
    rows = [
        row("quantize", "per token", 10.0),
        row("quantize", "per tensor, RHT and SR", 20.0),
        row("quantize", "per token", 30.0, m=2048),
        row("quantize", "per tensor, RHT and SR", 40.0, m=2048),
        row("quantize", "per token", 99.0, m=4096),  # without its counterpart it counts for nothing
        row("swizzle", "swizzled in the cast", 10.0),
        row("swizzle", "per tensor", 25.0),
        row("swizzle", "swizzled in the cast", 10.0, k=2048),  # published for K 4096 alone
        row("swizzle", "per tensor", 5.0, k=2048),
        row("forward", "per token", 10.0, launches=4),
        row("forward", "per token", 10.0, launches=6, m=2048),
    ]
    text = sides.text(rows)
    assert "| time of per token / per tensor | 0.49 to 0.77 | 0.50 to 0.75 | 1024x4096, 2048x4096 |" in text
    assert "| time of per token with RHT / per tensor | 0.59 to 0.88 | not measured |  |" in text
    assert "up to 2.6 times as fast, at small M | 0.40 | 1024x4096 |" in text
    assert "| forward, per token | about 5 | 4 to 6 |" in text
    assert "8 tensors" not in text, "table 2 was not measured"
    assert sides.text([result()]) == ""


def test_times_stand_beside_the_published_ones() -> None:
    rows = [row("mxfp8", "torch bf16", 1234.0, m=16384, n=2048, k=7168, experts=8)]
    text = sides.text(rows)
    assert "| tokens, GEMMs | MXFP8 with the change, B200, published |" in text
    assert "torch bf16, a GPU |" in text
    assert "| 16384, 8 | 0.303 | 0.314 | 1.234 |" in text
    assert "| 16384, 4 | 0.273 | 0.283 |  |" in text


def test_the_page_of_the_documents(tmp_path: Path) -> None:
    rows = [
        row("gemm", "fp4gemm", 10.0, n=4096, launches=1),
        row("gemm", "torch bf16", 20.0, n=4096, launches=1),
        row("forward", "per token", 30.0, n=4096, launches=5, rel_l2={"y": 0.134}),
        {**row("gemm", "cuDNN FROST", 0.0), "absent": "needs other tensor cores"},
    ]
    del rows[-1]["us"]
    text = readme.with_blocks("<!-- bench upstream: begin -->\n<!-- bench upstream: end -->", rows, "x")
    assert "| 1024x4096 | 10.0 | 20.0 |" in text
    assert "per token: 5 launches, error of y 0.134 to 0.134." in text
    assert "* cuDNN FROST: needs other tensor cores." in text
    told = " ".join(text.split())
    assert "`forward`: fp4gemm W4A8 fast, both cast" in told[told.index("No row in these results") :]
    assert "`backward`" not in told, "table 6 was not measured"
    assert "`gemm`: fp4gemm;" not in told
    later = [one | {"command": "python -m bench upstream gemm", "revision": "later"} for one in rows[:1]]
    text = readme.upstream_tables([*rows, later[0] | {"contender": "fp4gemm W4A8, quantized tokens"}])
    assert text.count("by `python -m bench") == 2
    with pytest.raises(ValueError, match="no row of python -m bench upstream"):
        readme.with_blocks("<!-- bench upstream: begin -->\n<!-- bench upstream: end -->", [result()], "x")


@pytest.mark.gpu
def test_launches_are_counted(cuda: torch.device) -> None:
    x = torch.randn(256, 256, device=cuda)
    assert launches.count(lambda: x + 1) == 1
    assert launches.count(lambda: (x + 1).mul_(2).zero_()) == 3
    assert launches.count(lambda: None) == 0
