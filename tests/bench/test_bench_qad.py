"""`python -m bench qad`: the loop, its trials, the check of the export, the table, and bad input."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import Language
from fp4gemm.models import prepare_qat
from torch import Tensor

from bench import __main__ as command_line
from bench.accuracy import distill, subjects, text
from bench.accuracy.distill import Course
from bench.accuracy.measure import Reference
from bench.commands import qad


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Language().eval()


def tokens(count: int, length: int = 24) -> Tensor:
    return torch.randint(0, 48, (count, length))


def test_the_text_of_training_is_apart_from_the_evaluation() -> None:
    for name in text.TEXTS:
        trained, evaluated = text.training(name), text.evaluation(name)
        assert len(trained) > 5 * len(evaluated)
        parts = {part for part in trained.split("\n\n") if len(part) > 80}
        assert len(parts) > 1000
        assert not parts & set(evaluated.split("\n\n"))
    first = {ast.get_docstring(tree) for tree in text._trees()}
    for module in text.EVALUATION:  # no file of the evaluation is read
        assert (inspect.getdoc(importlib.import_module(module)) or "none") not in first


@pytest.mark.parametrize("kind", ["a16", "per-token"])
def test_distillation_takes_divergence_back_and_exports_it(model: torch.nn.Module, kind: Any) -> None:
    start = prepare_qat(model, method="round")
    student, held_out = distill.student_of(start, kind), tokens(4)
    assert student.fc.layer.activations == kind
    assert start.fc.layer.activations == "per-token"
    before = distill.validated(student, model, held_out)
    seen: list[int] = []
    course = Course(steps=30, batch=2, lr=3e-3)
    seconds = distill.distil(student, model, tokens(9), course, lambda step, loss: seen.append(step))
    assert seen == list(range(1, 31))
    assert seconds > 0
    assert torch.equal(student.embed.weight, model.embed.weight)
    assert distill.validated(student, model, held_out) < 0.8 * before
    export = distill.exported(student, tokens(1))
    assert export.difference == 0
    assert type(export.model.fc) is fp4gemm.nn.Linear


def test_courses_are_reproducible(model: torch.nn.Module) -> None:
    start, chunks = prepare_qat(model), tokens(9)
    found = []
    for seed in (0, 0, 1):
        student = distill.student_of(start, "a16")
        distill.distil(student, model, chunks, Course(4, 2, 1e-3, seed))
        found.append(student.fc.weight)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_other_masters_have_the_same_codes(model: torch.nn.Module) -> None:
    layer, other = (prepare_qat(model, master=master).fc for master in ("quantized", "float"))
    distill.restart(layer, model.fc, "float")
    assert torch.equal(layer.weight, other.weight)


def test_an_export_with_other_codes_is_refused(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(student: torch.nn.Module) -> torch.nn.Module:
        made = fp4gemm.models.qat.convert_qat(student)
        made.fc.weight_codes[0, 0] ^= 1
        return made

    monkeypatch.setattr(fp4gemm.models, "convert_qat", spoilt)
    with pytest.raises(RuntimeError, match=r"^fc: the export has other codes or scales than the trained"):
        distill.exported(prepare_qat(model), tokens(1))


def arguments(tmp_path: Path, *more: str) -> list[str]:
    sizes = ["--steps", "4", "--trial-steps", "2", "--batch", "2", "--no-smoothing", "--device", "cpu"]
    return ["qad", "--model", "toy", "--out", str(tmp_path / "toy.jsonl"), *sizes, *more]


@pytest.fixture
def toy(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(given: str, amount: subjects.Amount, device: torch.device) -> subjects.Subject:
        references = {name: Reference(model, tokens(3)) for name in amount.texts}
        return subjects.Subject("toy", Path(), model, list(tokens(4)[:, None]), references, {})

    monkeypatch.setattr(qad, "load", load)
    monkeypatch.setattr(qad, "_training_chunks", lambda subject, *counts: (tokens(6), tokens(2)))


def test_the_command(toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masters = ("--master", "quantized", "float", "--lr", "1e-3", "1e-2", "--seconds", "100")
    assert command_line.main(arguments(tmp_path, "--kinds", "W4A4", "W4A16", *masters)) == 0
    shown = capsys.readouterr()
    trials = re.findall(r"trial (\S+), master (\w+), lr (\S+), 2 steps .* KL (\S+) on held", shown.err)
    assert [trial[:3] for trial in trials] == [
        (kind, master, lr)
        for kind in ("per-token", "a16")
        for master in ("quantized", "float")
        for lr in ("0.001", "0.01")
    ]
    best = {
        kind: min((trial for trial in trials if trial[0] == kind), key=lambda trial: float(trial[3]))
        for kind in ("per-token", "a16")
    }
    rows = [json.loads(line) for line in (tmp_path / "toy.jsonl").read_text().splitlines()]
    wanted = [
        (kind, contender, name)
        for kind in ("W4A4", "W4A16")
        for contender in ("GPTQ", "distilled")
        for name in text.TEXTS
    ]
    assert [(row["activations"], row["contender"], row["text"]) for row in rows] == wanted
    for row in rows:
        assert row["logits"] == 0
        assert row["difference"] < (1e-2 if row["activations"] == "W4A16" else 1e-5)
        if row["contender"] == "distilled":
            kind = {"W4A4": "per-token", "W4A16": "a16"}[row["activations"]]
            assert (row["master"], f"{row['lr']:g}", row["steps"]) == (*best[kind][1:3], 4)
    lines = [line for line in shown.out.splitlines() if line.startswith("| W4A")]
    assert len(lines) == 4
    assert f"{rows[0]['gap']:.3f} ± {1.96 * rows[0]['spread']:.3f}" in lines[0]

    readme = tmp_path / "page.md"
    readme.write_text("a\n<!-- bench qad toy: begin -->\nold\n<!-- bench qad toy: end -->\nb\n")
    assert command_line.main(["qad", "--out", str(tmp_path / "toy.jsonl"), "--readme", str(readme)]) == 0
    assert readme.read_text().startswith("a\n<!-- bench qad toy: begin -->\ntoy: ")
    assert lines[0] in readme.read_text()
    assert "old" not in readme.read_text()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--steps", "0"], "--steps: got 0, must be at least 1"),
        (["--readme", "page.md"], "page.md"),
        (["--kinds", "W8A8"], "invalid choice"),
    ],
    ids=["steps", "readme", "kinds"],
)
def test_bad_input(
    toy: None, more: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.main(arguments(tmp_path, *more))
    assert error in capsys.readouterr().err


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"bench": "accuracy"}\n')
    with pytest.raises(SystemExit):
        command_line.main(["qad", "--out", str(file)])
    assert "line 1 is not a result of `python -m bench qad`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["qad"])
    assert "--model: is missing" in capsys.readouterr().err
