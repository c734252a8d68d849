"""`python -m bench accuracy` and `gptq`: the text, the emulation, the figures, the table, and bad input."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import Language
from torch import Tensor

from bench import __main__ as command_line
from bench.accuracy import text
from bench.accuracy.contenders import ACTIVATIONS, CONTENDERS
from bench.accuracy.emulation import emulated, residual_channels, with_inputs
from bench.accuracy.maker import difference
from bench.accuracy.measure import Reference, layer_error, watched
from bench.report import accuracy as report


def test_the_texts_are_apart_and_always_the_same() -> None:
    first, second = (
        text.document(text.CALIBRATION[:3]),
        text.document(text.EVALUATION[:3], text.CALIBRATION[:3]),
    )
    text.document.cache_clear()
    assert first == text.document(text.CALIBRATION[:3])
    assert not set(first.split("\n\n")) & {part for part in second.split("\n\n") if len(part) > 80}
    assert not set(text.CALIBRATION) & set(text.EVALUATION)

    def tokenizer(document: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 48 for c in document]}

    made = text.chunks(tokenizer, "abcdef", 2, 3)
    assert made.tolist() == [[ord(c) % 48 for c in "abc"], [ord(c) % 48 for c in "def"]]
    with pytest.raises(ValueError, match="the text has 6 tokens, must have 3 x 3"):
        text.chunks(tokenizer, "abcdef", 3, 3)


def test_the_emulation_has_the_numbers_of_the_layers() -> None:
    torch.manual_seed(0)
    model = Language().eval()
    quantized = fp4gemm.models.quantize_model(model, include="fc", inplace=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want, found = quantized(ids).logits, emulated(quantized, ACTIVATIONS["W4A4"])(ids).logits
        other = emulated(quantized, ACTIVATIONS["W4A16"])(ids).logits
    assert torch.allclose(found, want, rtol=1e-5, atol=1e-5)
    assert 0 <= difference(quantized, ids, ACTIVATIONS["W4A4"]) < 1e-5
    assert not torch.allclose(other, want, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        h = model.embed(ids)
        w = quantized.fc.dequantize_weight()
        error = (h @ (w - model.fc.weight).T).norm() / (model.fc(h)).norm()
    run_by = emulated(quantized, ACTIVATIONS["W4A16"])
    assert layer_error(model, run_by, ids) == pytest.approx(float(error), rel=1e-4)


def nearest_e4m3(x: Tensor) -> Tensor:
    """The nearest of all e4m3 values, in float64; of two the one with the even code."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    gaps = (x.double().abs()[..., None] - values).abs() + 1e-12 * (codes % 2)
    return values[gaps.argmin(-1)] * x.double().sign()


def test_w4a8_multiplies_e4m3_values() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(32, 64), torch.randn(5, 64) * torch.tensor([1.0, 1e3, 1e-3, 7.0, 0.0])[:, None]
    layer = fp4gemm.nn.Linear.from_float(_linear(w), activations="a16")
    own = layer.weight
    unit = own.amax.double()[:, None] / (6 * own.e4m3_max)
    values = (own.dequantize(torch.float32).double() / unit * 1024).round() / 1024  # q * s, exact
    wide = 8 * nearest_e4m3(values / 8) * unit
    amax = x.double().abs().amax(1, keepdim=True)
    tokens = nearest_e4m3(x.double() * (448 / amax.clamp(min=1e-30))) * amax / 448
    assert not torch.allclose(wide, own.dequantize(torch.float32).double(), rtol=1e-3)
    want = tokens @ wide.T
    with torch.no_grad():
        found = emulated(layer, ACTIVATIONS["W4A8"])(x)
        fp8 = with_inputs(_linear(w), [""], ACTIVATIONS["W4A8"], is_fp8=True)(x)
    assert torch.allclose(found.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))
    scale = w.double().abs().amax(1, keepdim=True)
    want = tokens @ (nearest_e4m3(w.double() * 448 / scale) * scale / 448).T
    assert torch.allclose(fp8.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


class Attention(torch.nn.Module):
    """Two layers that read one tensor, a third, and one with too few channels for 64."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(96, 64, bias=False), torch.nn.Linear(96, 64)
        self.o, self.small = torch.nn.Linear(64, 32), torch.nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.small(self.o(torch.tanh(self.q(x)) * self.k(x)))
        return y


@pytest.mark.parametrize("kind", ["W4A4, residual", "W4A4, residual 64"])
def test_residual_channels_have_the_numbers_of_the_layers(kind: str) -> None:
    """The emulated model, the layers of quantize_model, and floats with the inputs of these."""
    torch.manual_seed(0)
    model, operands = Attention().eval(), ACTIVATIONS[kind]
    x = torch.randn(48, 96)
    x[:, 3::4] *= 20
    count = operands.residual
    quantized = fp4gemm.models.quantize_model(
        model, residual_channels=count, calibration=[x], inplace=False, method="round"
    )
    channels = residual_channels(model, fp4gemm.calibrate(model, [x], quantization_error=True), count)
    assert list(channels) == (["q", "k", "o", "small"] if count == 32 else ["q", "k", "o"])
    for name, each in channels.items():
        assert torch.equal(quantized.get_submodule(name).residual_channels, each)
    plain = fp4gemm.models.quantize_model(model, inplace=False, method="round")
    with torch.no_grad():
        want = quantized(x)
        found, of_layers = emulated(plain, operands, channels)(x), emulated(quantized, operands)(x)
        exact, in_plain = model(x), plain(x)
        floats = with_inputs(model, ["q", "k", "o", "small"], operands, channels=channels)(x)
    assert torch.equal(found, of_layers)
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert 0 <= difference(quantized, x, operands) < 1e-5
    assert (want - exact).norm() < 0.95 * (in_plain - exact).norm()
    assert (floats - exact).norm() < (want - exact).norm()


def _linear(w: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False).eval()
    linear.weight.data = w.clone()
    return linear


def test_figures() -> None:
    torch.manual_seed(0)
    model, other = Language().eval(), Language().eval()
    chunks = torch.randint(0, 48, (3, 20))
    reference = Reference(model, chunks)
    own = reference.row(model)
    assert (own["gap"], own["spread"], own["top1"]) == (0, 0, 1)
    assert abs(own["kl"]) < 1e-4
    row = reference.row(other)
    with torch.no_grad():
        p, q = (m(chunks).logits.log_softmax(-1) for m in (model, other))
    assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)
    losses = -q[:, :-1].gather(2, chunks[:, 1:, None]).mean((1, 2))
    assert row["nll"] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_the_memory_is_that_of_what_runs() -> None:
    """Also if memory that was freed before suffices, in pieces of any size."""
    for sizes in ([1 << 24], [1 << 24], [1 << 14] * 1024, [1 << 14] * 1024):  # 67 MB each
        with watched(torch.device("cpu")) as found:
            kept = [torch.ones(size) for size in sizes]
            time.sleep(0.12)  # it looks every 50 ms
            del kept
        assert found["seconds"] > 0.1
        assert 0.8 * 2**26 < found["peak_bytes"] < 1.5 * 2**26


def row(contender: str, activations: str, gap: float = 0.0, **more: Any) -> dict[str, Any]:
    facts = {"tokens": [8192, 4096], "python": "3.11.7", "torch": "2.13", "revision": "abc", "threads": 1}
    figures = {"nll": 2 + gap, "gap": gap, "spread": 0.01, "kl": gap, "top1": 0.9}
    return {"bench": "accuracy", "model": "m", "contender": contender, "activations": activations, **facts,
            **figures, **more}  # fmt: skip


def test_table_readme_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("float", "float", 0.0),
        row("round", "W4A16", 0.25, seconds=3.2, peak_bytes=10**9, output_error=0.1),
        row("round", "W4A4", 0.5),
    ]
    results, readme = tmp_path / "a.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(r) + "\n" for r in rows))
    readme.write_text("a\n<!-- bench accuracy a: begin -->\nold\n<!-- bench accuracy a: end -->\nb\n")
    picture = tmp_path / "p.png"
    arguments = ["accuracy", "--out", str(results), "--readme", str(readme), "--picture", str(picture)]
    assert command_line.main(arguments) == 0
    written = readme.read_text()
    assert written.startswith("a\n<!-- bench accuracy a: begin -->\nm: 4096 tokens of evaluation")
    assert "Before quantization the model loses 2.000 nats a token." in written.replace("\n", " ")
    line = "| round | 0.250 | 0.500 | 0.250 ± 0.010 | 0.500 ± 0.010 | 90.0 | 0.100 | 3 | 1.00 |"
    assert line in re.sub(" +", " ", written)
    assert written.endswith("<!-- bench accuracy a: end -->\nb\n")
    assert report.table(rows) in capsys.readouterr().out
    assert picture.stat().st_size > 1000


def test_a_text_has_a_table_of_its_own() -> None:
    """Rows without a text, as older revisions wrote them, are of docstrings."""
    rows = [row("float", "float"), row("round", "W4A16", 0.25), row("round", "W4A16", 0.5, text="source")]
    found = report.table(rows)
    assert re.findall(r"^m: 4096 tokens of (.*evaluation),", found, re.MULTILINE) == [
        "evaluation",
        "source code for evaluation",
    ]
    assert re.findall(r"\| 0\.(\d+) ±", found) == ["250", "500"]


def test_source_code_has_neither_docstrings_nor_comments() -> None:
    found = text.source(("textwrap",))
    assert found.startswith("import re")
    assert "def dedent(text):" in found
    assert "Remove any common leading whitespace" not in found, "the docstring of dedent"
    assert "Copyright (C)" not in found, "a comment"
    assert text.evaluation("source") == text.source(text.EVALUATION)
    assert text.evaluation("docstrings") == text.document(text.EVALUATION, text.CALIBRATION)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"bench": "dense"}\n')
    for arguments, says in (
        (["accuracy"], "--model: is missing, must be given unless --out names a file with results"),
        (["accuracy", "--readme", "a.md"], "--readme: needs --out, whose name is in the marks"),
        (
            ["accuracy", "--model", "gpt5"],
            "--model: got gpt5, must be one of smollm2-135m, minilm, or a folder with a config.json",
        ),
        (
            ["accuracy", "--out", str(wrong)],
            "wrong.jsonl: line 1 is not a result of `python -m bench acc",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            command_line.main(arguments)
        assert stopped.value.code == 2
        assert says in capsys.readouterr().err
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(row("float", "float", 0.0)) + "\n")
    wrong.write_text("no marks")
    with pytest.raises(SystemExit):
        command_line.main(["accuracy", "--out", str(good), "--readme", str(wrong)])
    assert "must hold one <!-- bench accuracy good: begin -->" in capsys.readouterr().err


def test_contenders_have_names_of_their_own() -> None:
    names = [c.name for c in CONTENDERS]
    assert len(names) == len(set(names))
    assert {a for c in CONTENDERS for a in c.activations} <= set(ACTIVATIONS)


def test_gptq_times_the_layers_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gptq", "--device", "cpu", "--divide", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"down_proj +64 x 224 ", lines[6])
    assert re.match(r"one decoder layer .* s; 32 of them, extrapolated, .* min$", lines[7])
