"""Figures of the documents against what they come from: the rows of bench/results, and formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.report import accuracy, engine, qad, training
from bench.report.readme import epilogues_table, marks, upstream_tables
from bench.report.results import load_all

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "bench" / "results"
STEPS = RESULTS / "training" / "h200-steps.jsonl"
LOSSES = RESULTS / "training" / "h200.jsonl"
EPILOGUES = RESULTS / "epilogues" / "h200.jsonl"
ENGINE = RESULTS / "engine" / "h200.jsonl"
SERVING = sorted((RESULTS / "serving").glob("*.jsonl"))
OURS = ("fp4gemm W4A4", "fp4gemm W4A16", "fp4gemm W4A8")


def words(name: str) -> str:
    """A document with single spaces in the place of line ends."""
    return " ".join((REPO / name).read_text(encoding="utf-8").split())


def block(name: str, of: str) -> str:
    """The lines between the marks of a document."""
    begin, end = marks(of)
    text = (REPO / name).read_text(encoding="utf-8")
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def steps(**facts: Any) -> dict[str, dict[str, Any]]:
    """The kept rows of `python -m bench train` with these facts, by contender."""
    rows = [json.loads(line) for line in STEPS.read_text(encoding="utf-8").splitlines()]
    return {row["contender"]: row for row in rows if facts.items() <= row.items()}


@pytest.mark.parametrize("path", sorted((RESULTS / "accuracy").glob("*.jsonl")), ids=lambda path: path.stem)
def test_tables_of_accuracy(path: Path) -> None:
    found = block("docs/accuracy.md", f"bench accuracy {path.stem}")
    assert found == accuracy.table(accuracy.load(path)), f"bench accuracy --out {path} --readme accuracy.md"


@pytest.mark.parametrize("path", sorted((RESULTS / "qad").glob("*.jsonl")), ids=lambda path: path.stem)
def test_tables_of_distillation(path: Path) -> None:
    found = block("docs/qat.md", f"bench qad {path.stem}")
    assert found == qad.table(qad.load(path)), f"bench qad --out {path} --readme docs/qat.md"


def test_the_table_of_losses() -> None:
    assert block("docs/training_losses.md", training.BLOCK) == training.table(training.Results(LOSSES))


def test_the_ranking_of_recipes() -> None:
    found = block("docs/training_losses.md", training.RANKING_BLOCK)
    assert found == training.ranking(training.Results(RESULTS / "training" / "h200-ranking.jsonl"))


def test_the_table_of_epilogues() -> None:
    assert block("docs/epilogue.md", "bench epilogues") == epilogues_table(load_all([EPILOGUES]))


def test_what_the_losses_are_said_to_be() -> None:
    rows = training.Results(LOSSES).rows
    minutes = [row["seconds"] / 60 for row in rows]
    assert f"took {min(minutes):.1f} to {max(minutes):.1f} minutes" in words("docs/training_losses.md")
    arms = {row["arm"] for row in rows} - {"bf16", "bf16_forward"}
    gaps = [gap for arm in arms if "outliers" not in arm for gap in training.gaps(rows, arm)]
    (forward,) = training.gaps(rows, "bf16_forward")
    for name in ("README.md", "docs/training.md", "docs/training_losses.md"):
        text = words(name)
        assert f"{min(gaps):.1f} to {max(gaps):.0f} %" in text, name
        assert f"{-forward:.2f} % below" in text, name


def test_the_table_of_steps() -> None:
    text = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = text[text.index("### Speed of a step") : text.index("## What is guaranteed")]
    columns = (
        "torch bf16",
        *(f"fp4gemm {p}{kept}" for p in ("nvidia", "per_token") for kept in ("", ", W kept")),
    )
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) == 6
    for line in lines:
        name, *found = cells(line)
        if dense := re.fullmatch(r"(\d+) x (\d+) x (\d+)", name):
            m, n, k = map(int, dense.groups())
            rows = steps(m=m, n=n, k=k)
        else:
            tokens = re.search(r"(\d+) tokens each", name)
            assert tokens is not None, name
            rows = steps(per_expert=int(tokens[1]))
        us, base = [rows[column]["us"] for column in columns], rows["torch bf16"]["us"]
        assert found == [f"{us[0]:.0f}", *(f"{one:.0f} ({base / one:.2f})" for one in us[1:])], name


def test_the_steps_of_experts_in_the_readme() -> None:
    few, many = steps(per_expert=8), steps(per_expert=64)

    def ratio(rows: dict[str, dict[str, Any]], contender: str) -> str:
        return f"{rows[contender]['ratio']['torch bf16']:.2f}"

    cast, kept = "fp4gemm nvidia", "fp4gemm nvidia, W kept"
    text = words("README.md")
    assert f"{ratio(many, cast)} times the speed of bf16 with 64 tokens" in text
    assert f"{ratio(few, cast)} times with 8" in text
    assert f"{ratio(many, kept)} times with 64 tokens and {ratio(few, kept)} times with 8" in text


def test_the_weight_gradients_of_experts() -> None:
    text = (REPO / "docs" / "hopper.md").read_text(encoding="utf-8")
    lines = text[text.index("| tokens of each expert") :].splitlines()[2:6]
    for line, tokens in zip(lines, (8, 16, 32, 64), strict=True):
        parts = dict(steps(per_expert=tokens)["fp4gemm per_token"]["parts"])
        assert cells(line) == [str(tokens), f"{parts['wgrad']:.0f}"]


@pytest.mark.parametrize("name", ["docs/serving.md", "docs/results.md"])
def test_the_tables_of_the_engine(name: str, tmp_path: Path) -> None:
    text = (REPO / name).read_text(encoding="utf-8")
    copy = tmp_path / "copy.md"
    copy.write_text(text, encoding="utf-8")
    engine.into([copy], load_all([ENGINE]))
    assert copy.read_text(encoding="utf-8") == text, f"bench engine {ENGINE} --readme {name}"


def test_what_is_said_of_the_layers_of_an_engine() -> None:
    rows = [row for row in load_all(SERVING) if "us" in row and row["contender"] in OURS]
    linear = [row for row in rows if "m" in row]

    def span(found: list[dict[str, Any]], baseline: str, digits: int = 2) -> str:
        ratios = [row["ratio"][baseline] for row in found if baseline in row["ratio"]]
        return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"

    text = (REPO / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = text[text.index("| tokens | W4A4 | W4A16 | W4A8 |") :].splitlines()[2:6]
    for line in lines:
        tokens, *found = cells(line)
        of_size = [row for row in linear if row["m"] == int(tokens)]
        want = [span([row for row in of_size if row["contender"] == name], "torch bf16") for name in OURS]
        assert found == want, tokens
    said = words("docs/serving.md")
    few = [row for row in rows if row.get("tokens", 4096) < 4096]
    assert f"Experts are {span(few, 'torch bf16', 1)} times as fast as bf16" in said
    assert f"and {span(few, 'torch fp8', 1)} times as fast as FP8" in said
    many = [row for row in linear if row["m"] == 4096]
    assert f"linear layers have {span(many, 'torch bf16')} times the speed of bf16" in said


def engine_us(model: str, arm: str, step: str) -> dict[int, float]:
    """Microseconds of the kept steps of an engine, by requests or prompts."""
    rows = [row for row in load_all([ENGINE]) if row["bench"] == "engine"]
    facts = {"model": model, "contender": arm, "step": step}
    return {row.get("batch") or row["prompts"]: row["us"] for row in rows if facts.items() <= row.items()}


def test_what_is_said_of_the_engine() -> None:
    llama, qwen = "llama-3.1-8b", "qwen3-30b-a3b"
    w4a8, w4a4, fp8 = "fp4gemm W4A8", "fp4gemm W4A4", "vLLM FP8"

    def ratios(model: str, arm: str, other: str, step: str) -> dict[int, str]:
        mine, theirs = engine_us(model, arm, step), engine_us(model, other, step)
        return {size: f"{theirs[size] / us:.2f}" for size, us in mine.items()}

    formats, serving = words("docs/which_format.md"), words("docs/serving.md")
    few = [ratios(model, w4a4, w4a8, "decode")[batch] for model in (llama, qwen) for batch in (1, 16, 64)]
    assert f"have {min(few)} to {max(few)} times the speed of W4A8's" in formats
    decode, prefill = (ratios(llama, w4a8, fp8, step) for step in ("decode", "prefill"))
    few = [decode[batch] for batch in (1, 16, 64)]
    assert f"with up to 64 requests ({min(few)} to {max(few)} times) and slower with 256" in formats
    slow = f"{min(prefill.values())} to {max(prefill.values())}"
    assert f"slower with 256 ({decode[256]}) and in prefill ({slow})" in formats
    assert f"In prefill W4A8 has {slow} of the speed of FP8" in serving
    decode, prefill = (ratios(qwen, w4a8, fp8, step) for step in ("decode", "prefill"))
    assert f"is {min(decode.values())} to {max(decode.values())} times as fast in every step" in formats
    assert f"has {prefill[8]} of the speed in a prefill of eight prompts" in formats
    theirs = [engine_us(qwen, arm, "decode") for arm in ("vLLM bf16", fp8, "vLLM Marlin W4A16")]
    said = {w4a8: "W4A8 is {} times as fast", w4a4: "W4A4 {} times", "fp4gemm W4A16": "W4A16 {} times"}
    for arm, text in said.items():
        us = engine_us(qwen, arm, "decode")
        ahead = [f"{min(each[batch] for each in theirs) / us[batch]:.2f}" for batch in us]
        assert text.format(f"{min(ahead)} to {max(ahead)}") in serving


def test_bytes_of_expert_parallelism() -> None:
    """The table "A model on paper" of docs/distributed.md, by the formulas of the table "What travels"."""
    text = (REPO / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = text[text.index("## A model on paper") : text.index("## What ran where")]
    tokens, sizes, checked = 1024, (0, 0, 0), 0
    for line in [line for line in section.splitlines() if line.startswith("|")][2:]:
        name, ranks, *found = cells(line)
        if name:
            match = re.search(r"d (\d+), K (\d+), E (\d+)", name)
            assert match is not None, name
            sizes = tuple(map(int, match.groups()))
        d, k, e = sizes
        r = int(ranks)
        row_bytes = -(-(d // 2 + d // 16 + 4) // 16) * 16
        baseline = (r - 1) / r * tokens * k * 2 * d
        dispatch = (r - 1) * tokens * (row_bytes + 4 * k)
        slots = (r - 1) * 2 * tokens * d * min(k, e // r)
        tree = (r - 1) * (4 * tokens * k + 2 * tokens * d)
        want = [f"{x / 1e6:.1f}" for x in (baseline, dispatch)]
        want += [f"{baseline / dispatch:.1f}", f"{slots / 1e6:.1f}", f"{tree / 1e6:.1f}" if r <= 8 else ""]
        assert found == want, line
        checked += 1
    assert checked == 8


# ---- upstream's tables

UPSTREAM = sorted((RESULTS / "upstream").glob("*.jsonl"))
PUBLISHED = "docs/upstream.md"


def times(bench: str) -> dict[str, dict[str, float]]:
    """The microseconds of a table of `python -m bench upstream`, by case and contender."""
    found: dict[str, dict[str, float]] = {}
    for row in load_all(UPSTREAM):
        if row["bench"] == f"upstream {bench}" and "us" in row:
            found.setdefault(row["case"], {})[row["contender"]] = row["us"]
    return found


def span(bench: str, of: str, over: str) -> str:
    """The least and the largest ratio of two contenders' times."""
    ratios = [one[of] / one[over] for one in times(bench).values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_upstream_tables() -> None:
    assert block(PUBLISHED, "bench upstream") == upstream_tables(load_all(UPSTREAM)).strip()


@pytest.mark.parametrize(
    ("bench", "of", "over"),
    [
        ("quantize", "per token", "per tensor, RHT and SR"),
        ("swizzle", "swizzled in the cast", "swizzled by a kernel"),
        ("gemm", "fp4gemm", "torch bf16"),
        ("gemm", "fp4gemm", "torch fp8, quantized tokens"),
        ("gemm", "unfused: post-scale", "fp4gemm"),
        ("gemm", "fp4gemm, C interface by cuda-python", "fp4gemm"),
        ("forward", "per token", "torch bf16"),
        ("backward", "per token", "torch bf16"),
        ("mxfp8", "fp4gemm W4A4", "torch bf16"),
        ("mxfp8", "fp4gemm W4A4", "torch fp8"),
        ("mxfp8", "fp4gemm W4A8 fast", "torch bf16"),
        ("mxfp8", "fp4gemm W4A8 fast", "torch fp8"),
        ("mxfp8", "fp4gemm W4A8", "torch fp8"),
        ("gemm", "fp4gemm W4A8 fast, quantized tokens", "torch bf16"),
        ("gemm", "fp4gemm W4A8 fast, quantized tokens", "torch fp8, quantized tokens"),
        ("gemm", "fp4gemm W4A8, quantized tokens", "torch fp8, quantized tokens"),
        ("forward", "fp4gemm W4A8 fast, both cast", "torch bf16"),
        ("forward", "fp4gemm W4A8 fast, both cast", "torch fp8, both cast"),
        ("forward", "fp4gemm W4A8, both cast", "torch fp8, both cast"),
    ],
)
def test_what_the_figures_of_upstreams_tables_say(bench: str, of: str, over: str) -> None:
    text = words(PUBLISHED)
    assert span(bench, of, over) in text[text.index("## How it was measured") : text.index("## The tables")]


def test_the_bandwidth_of_upstreams_casts() -> None:
    found = {
        row["contender"]: row["of_roofline"]
        for row in load_all(UPSTREAM)
        if row["case"] == "upstream quantize 32768x8192" and "us" in row
    }
    per_token, per_tensor = (f"{found[name]:.2f}" for name in ("per token", "per tensor, RHT and SR"))
    text = words(PUBLISHED)
    assert f"the per-token cast has {per_token} of the measured bandwidth" in text
    assert f"and the per-tensor one {per_tensor}." in text


def test_the_launches_of_upstreams_passes() -> None:
    """The table adds up to the launches of the rows, and agrees with the kernels of a profiled step."""
    rows = load_all(UPSTREAM)
    text = (REPO / PUBLISHED).read_text(encoding="utf-8")
    lines = text[text.index("| launches | forward, per token") :].splitlines()[2:8]
    table = [[int(cell) for cell in cells(line)[1:]] for line in lines]
    recipes = ("per token", "per tensor, RHT and SR")
    columns = [(f"upstream {table}", name) for table in ("forward", "backward") for name in recipes]
    for i, (bench, name) in enumerate(columns):
        assert sum(line[i] for line in table[:-1]) == table[-1][i]
        assert {row["launches"] for row in rows if (row["bench"], row["contender"]) == (bench, name)} == {
            table[-1][i]
        }
    # A step per tensor that keeps no copy of W casts W again for dgrad: a fill, a search, a cast, a decode.
    step = next(
        row
        for row in map(json.loads, (RESULTS / "training" / "h200-steps-profile.jsonl").open())
        if row["contender"] == "fp4gemm nvidia" and "kernels" in row
    )
    kinds = (("Memset",), ("amax<",), ("quantize_",), ("decode<",), ("gemm_kernel", "nvfp4_gemm"))
    again = (1, 1, 1, 1, 0)
    for line, names, more in zip(table, kinds, again, strict=False):
        counts = [count for kernel, count, _ in step["kernels"] if any(name in kernel for name in names)]
        assert line[1] + line[3] + more == sum(counts), names
