"""`python -m bench accuracy`: sentences and their cosines, costs of conversions, and the other packages."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import fp4gemm
import pytest
import torch
from torch import Tensor

from bench import __main__ as command_line
from bench.accuracy import producers, subjects, text
from bench.accuracy.contenders import CONTENDERS
from bench.accuracy.maker import Maker
from bench.accuracy.sentences import Sentences, batches_of
from bench.accuracy.subjects import Subject
from bench.baselines import modelopt
from bench.report import accuracy as report


class Output(dict[str, Tensor]):
    """As of transformers: a mapping whose values are attributes too."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self["last_hidden_state"]


class Embedder(torch.nn.Module):
    """A hidden state for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = torch.nn.Embedding(48, 64), torch.nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Output:
        h = self.embed(ids)
        return Output(last_hidden_state=h + self.fc(h))


def tokenizer(sentences: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
    assert truncation
    return {"input_ids": [[ord(c) % 48 for c in s][:max_length] for s in sentences]}


def test_sentences_are_plain_and_apart() -> None:
    document = (
        "A first sentence of six words. This one is too short. See the figure of the year 1999!\n\n"
        "of no capital letter, but\nlong enough to be one. It goes on over\nthe end of a line."
    )
    found = text.sentences(document, 3)
    assert found == [
        "A first sentence of six words.",
        "See the figure of the year 1999!",
        "It goes on over the end of a line.",
    ]
    assert text.sentences(document, 2, without=found[:1]) == found[1:]
    with pytest.raises(ValueError, match="the text has 2 sentences, must have 3"):
        text.sentences(document, 3, without=found[:1])
    known, held_out = text.document(text.CALIBRATION[:4]), text.document(text.EVALUATION[:4])
    evaluation = text.sentences(held_out, 50)
    assert not set(evaluation) & set(text.sentences(known, 50, without=evaluation))


def test_batches_hold_sentences_of_one_length() -> None:
    made = batches_of(tokenizer, ["abc", "de", "fgh", "i" * 100] + ["xyz"] * 64)
    assert [tuple(ids.shape) for ids in made] == [(1, 2), (64, 3), (2, 3), (1, 64)]
    assert made[1][:2].tolist() == [[ord(c) % 48 for c in s] for s in ("abc", "fgh")]


def test_cosines() -> None:
    torch.manual_seed(0)
    model, other = Embedder().eval(), Embedder().eval()
    batches = [torch.randint(0, 48, shape) for shape in ((3, 5), (4, 9))]
    reference = Sentences(model, batches)
    assert tuple(reference.sample.shape) == (4, 9)
    own = reference.row(model)
    assert (own["cosine"], own["worst"]) == (pytest.approx(1, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert own["nearest"] == 1
    row = reference.row(other)
    with torch.no_grad():
        a, b = ([m(ids).last_hidden_state.mean(1) for ids in batches] for m in (model, other))
    cosines = torch.cat([(x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)) for x, y in zip(a, b, strict=True)])
    assert row["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert row["worst"] == pytest.approx(float(cosines.min()), abs=1e-5)
    assert row["spread"] == pytest.approx(float(cosines.std() / 7**0.5), abs=1e-5)


def subject() -> Subject:
    torch.manual_seed(0)
    model = Embedder().eval()
    batches = [torch.randint(0, 48, (8, 16)) for _ in range(3)]
    facts = {"tokens": [384, 384], "sentences": [24, 24]}
    return Subject("toy", Path(), model, batches[:2], {"docstrings": Sentences(model, batches[2:])}, facts)


def test_a_cost_has_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = subject()
    maker = Maker(toy)
    by_name = {c.name: c for c in CONTENDERS}
    model, quantized, round_cost = maker.make(by_name["round"])
    assert model is toy.model
    assert isinstance(quantized.fc, fp4gemm.nn.Linear)
    assert isinstance(toy.model.fc, torch.nn.Linear), "the float model stays"
    _, cost = maker.statistics()
    _, _, weighted = maker.make(by_name["search, weighted"])
    assert weighted["seconds"] > cost["seconds"] > 0
    assert weighted["peak_bytes"] >= 64 * 4, "statistics included"
    assert maker.make(by_name["GPTQ"])[2]["peak_bytes"] >= 64 * 65 * 4
    assert round_cost["peak_bytes"] >= 0
    assert not maker.is_smoothed, "it has no norm"
    assert maker.statistics()[1] is cost, "made once"


def test_the_command_measures_a_model_of_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(subjects.KNOWN, "toy", ("toy", Path, lambda name, folder, amount, device: subject()))
    out, readme = tmp_path / "toy.jsonl", tmp_path / "a.md"
    readme.write_text("<!-- bench accuracy toy: begin -->\n<!-- bench accuracy toy: end -->\n")
    arguments = ["accuracy", "--model", "toy", "--device", "cpu", "--methods", "round|^float|^FP8|smooth"]
    arguments += ["--out", str(out), "--readme", str(readme)]
    assert command_line.main(arguments) == 0
    assert "smooth + GPTQ: omitted, smoothing changes nothing in toy" in capsys.readouterr().err
    rows = report.load(out)
    assert [(r["contender"], r["activations"]) for r in rows] == [
        ("float", "float"),
        ("float weights", "W4A8"),
        ("float weights", "W4A4"),
        ("float weights", "W4A4, 4/6"),
        ("float weights", "W4A4, residual"),
        ("float weights", "W4A4, residual 64"),
        ("FP8 weights", "W4A8"),
        ("round", "W4A16"),
        ("round", "W4A4"),
    ]
    a16, a4 = rows[-2:]
    assert rows[1]["cosine"] > rows[2]["cosine"], "e4m3 tokens are closer than e2m1 ones"
    assert rows[5]["layer_error"] < rows[4]["layer_error"] < rows[2]["layer_error"], "fewer errors are left"
    assert rows[6]["layer_error"] > rows[1]["layer_error"], "FP8 weights are rounded too"
    assert 0.9 < a4["cosine"] < a16["cosine"] < 1
    assert a16["layer_error"] < a4["layer_error"] < 0.3
    assert a4["difference"] < 1e-5
    written = readme.read_text()
    assert "toy: 24 sentences of evaluation, 24 of calibration" in written
    line = next(line for line in written.splitlines() if line.startswith("| round"))
    assert f"| {a16['cosine']:.4f} ± {a16['spread']:.4f} | {a16['worst']:.4f} |" in line
    assert command_line.main(arguments) == 0
    assert report.load(out) == rows, "nothing is measured twice"


def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"bench": "accuracy", "model": "m", "contender": "round", "activations": "W4A16", "cosine": 0.9}
    out = tmp_path / "a.jsonl"
    out.write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit):
        command_line.main(["accuracy", "--out", str(out)])
    assert "line 1 is not a result" in capsys.readouterr().err
    facts = {
        "tokens": [1, 1],
        "sentences": [1, 1],
        "python": "3",
        "torch": "2",
        "revision": "a",
        "threads": 1,
    }
    out.write_text(json.dumps(row | facts | {"spread": 0, "worst": 0.8, "nearest": 1}) + "\n")
    with pytest.raises(SystemExit):
        command_line.main(["accuracy", "--out", str(out), "--picture", str(tmp_path / "p.png")])
    assert "--picture: the results are of no language model, must be of one" in capsys.readouterr().err

    def missing(package: str) -> str:
        raise producers.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(producers.importlib.metadata, "version", missing)
    with pytest.raises(
        ModuleNotFoundError, match=re.escape("pip install --no-deps -r requirements/oracles.txt")
    ):
        producers.producers()


def test_modelopts_kernels_on_the_cpu() -> None:
    """Against fp4gemm's quantizer with one amax for the tensor, which differs in the last bit of scales."""
    torch.manual_seed(0)
    x = torch.randn(32, 64) * torch.exp(torch.randn(32, 64))
    want = fp4gemm.quantize(x, scaling="tensor").dequantize(torch.float32)
    found = modelopt.dynamic(x, 16, x.abs().max())
    assert (found - want).norm() < 0.01 * want.norm()
    blocks = x.view(-1, 16)
    static = modelopt.static(blocks, blocks.abs().amax(1), x.abs().max()).view_as(x)
    assert torch.equal(static, found)
    scale = torch.tensor([0.0, 2.0])
    assert modelopt.rounded(torch.tensor([3.0, -5.0]), scale).tolist() == [0.0, -4.0]  # a tie at 2.5
    weight, h_inv = x.clone(), torch.eye(64)
    amax = blocks.abs().amax(1).view(32, 4)
    modelopt.gptq_columns(weight, amax, float(x.abs().max() / 2688), h_inv, 32, 16)
    assert torch.equal(weight, found), "without correlations GPTQ is rounding"


def test_each_text_has_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that has one text gets the other, and the model is made once for both."""
    made: list[subjects.Amount] = []

    def load(name: str, folder: Path, amount: subjects.Amount, device: torch.device) -> Subject:
        made.append(amount)
        one = subject()
        return dataclasses.replace(one, references=dict.fromkeys(amount.texts, *one.references.values()))

    monkeypatch.setitem(subjects.KNOWN, "toy", ("toy", Path, load))
    out = tmp_path / "toy.jsonl"
    arguments = ["accuracy", "--model", "toy", "--device", "cpu", "--methods", "^round", "--out", str(out)]
    assert command_line.main(arguments) == 0
    assert command_line.main([*arguments, "--text", "docstrings", "source"]) == 0
    rows = [(row["contender"], row["activations"], row["text"]) for row in report.load(out)]
    kinds = [("float", "float"), ("round", "W4A16"), ("round", "W4A4")]
    assert rows == [(*kind, text) for text in ("docstrings", "source") for kind in kinds]
    assert [amount.texts for amount in made] == [("docstrings",), ("docstrings", "source")]
    with pytest.raises(ValueError, match="--text: got source, must be docstrings for all-MiniLM-L6-v2"):
        subjects.embedder("all-MiniLM-L6-v2", Path(), subjects.Amount(1, 1, ("source",)), torch.device("cpu"))


def test_producers_have_no_layers_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command_line.main(["accuracy", "--model", "toy", "--producers", "--fp8-sums"])
    assert raised.value.code == 2
    assert "--producers and --fp8-sums exclude each other" in capsys.readouterr().err


def test_sums_of_the_layers_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU both are the emulation but for roundings; a layer gets use_fast_accum of its kind."""
    monkeypatch.setitem(subjects.KNOWN, "toy", ("toy", Path, lambda name, folder, amount, device: subject()))
    seen: list[tuple[str, bool]] = []
    forward = fp4gemm.nn.Linear.forward

    def seeing(layer: fp4gemm.nn.Linear, x: Tensor) -> Tensor:
        seen.append((layer.activations, layer.use_fast_accum))
        return forward(layer, x)

    monkeypatch.setattr(fp4gemm.nn.Linear, "forward", seeing)
    arguments = ["accuracy", "--model", "toy", "--device", "cpu", "--methods", "^search, weighted$|^float"]
    assert command_line.main([*arguments, "--out", str(tmp_path / "emulated.jsonl")]) == 0
    seen.clear()
    assert command_line.main([*arguments, "--fp8-sums", "--out", str(tmp_path / "sums.jsonl")]) == 0
    assert set(seen) == {("fp8", False), ("fp8", True)}
    rows = {row["activations"]: row for row in report.load(tmp_path / "sums.jsonl")}
    assert list(rows) == ["float", "W4A8, promoted", "W4A8, fast sums"]
    by_emulation = report.load(tmp_path / "emulated.jsonl")
    wanted = next(row for row in by_emulation if row["activations"] == "W4A8" and "seconds" in row)
    for kind in ("W4A8, promoted", "W4A8, fast sums"):
        assert rows[kind]["cosine"] == pytest.approx(wanted["cosine"], abs=1e-5)
        assert rows[kind]["cosine"] < 1 - 1e-5
    assert "| W4A8, promoted: cosine | W4A8, fast sums: cosine |" in capsys.readouterr().out
