"""bench gradients: the errors of a training step by recipe, on a tiny text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
from bench.__main__ import main
from bench.measure import gradients

WORDS = b"the quick brown fox jumps over the lazy dog and runs through seven open doors "


@pytest.fixture
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    import train_moe_corpus as corpora
    import train_moe_model as models

    monkeypatch.setitem(models.SIZES, "tiny", models.Size(32, 1, 2, 4, 2, 32, 32, 4, 12, 2e-2, 1 << 20))
    tokens = torch.frombuffer(bytearray(WORDS * 80), dtype=torch.uint8).int()
    corpus = corpora.Corpus(tokens, tokens[:2000], 256, "bytes", 1, len(tokens), 1.0, "words")
    monkeypatch.setattr(corpora, "load", lambda *_: corpus)


@pytest.mark.usefixtures("_words")
def test_errors_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    arms = "bf16,nvidia,nvidia+no_sr,nvidia+w_rows,nvidia+w_rows+w_t_rowwise,bf16_backward"
    line = ["gradients", "--size", "tiny", "--steps", "2", "--device", "cpu", "--arms", arms]
    assert main([*line, "--json"]) == 0
    rows: dict[str, Any] = {}
    for text in capsys.readouterr().out.splitlines():
        row = json.loads(text)
        rows[row.pop("arm")] = row
    assert list(rows) == arms.split(",")
    assert all(rows["bf16"][name] == 0 for name in gradients.ERRORS)
    assert rows["bf16"]["cosine"] == pytest.approx(1, abs=1e-5)
    nvidia, nearest, original, rowwise = (rows[name] for name in arms.split(",")[1:5])
    assert all(0.02 < nvidia[name] < 0.2 for name in ("y", "dx", "dx_own", "dW"))
    # Each change moves the errors of its own operands alone.
    assert nearest["y"] == nvidia["y"]
    assert nearest["dx"] < nvidia["dx"]
    assert nearest["dW"] < nvidia["dW"]
    assert original["dW"] == rowwise["dW"] == nvidia["dW"]
    assert original["y"] == rowwise["y"] < nvidia["y"]
    assert original["dx"] < rowwise["dx"]
    assert original["dx_own"] > rowwise["dx_own"] > nvidia["dx_own"]
    assert rows["bf16_backward"]["dx"] == rows["bf16_backward"]["dW"] == 0
    assert 0.5 < nvidia["least"] <= nvidia["cosine"] < 1


@pytest.mark.usefixtures("_words")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["gradients", "--size", "tiny", "--steps", "0", "--device", "cpu", "--arms", "te_per_token"])
        == 0
    )
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["arm", *gradients.ERRORS, "cosine", "least"]
    assert row.split()[0] == "te_per_token"
    assert len(row.split()) == len(head.split())


@pytest.mark.usefixtures("_words")
def test_errors_by_kinds_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    arms = (
        "bf16,per_token,per_token+balanced,per_token+balanced_rowwise,te_per_token,per_token_wgrad_bf16,"
        "per_token+outliers_bf16_64,per_token+outliers_bf16_32"
    )
    line = ["gradients", "--table", "tokens", "--size", "tiny", "--steps", "2", "--device", "cpu"]
    assert main([*line, "--arms", arms, "--json"]) == 0
    rows: dict[str, Any] = {}
    for text in capsys.readouterr().out.splitlines():
        row = json.loads(text)
        rows[row.pop("arm")] = row
    assert list(rows) == arms.split(",")
    names = [*gradients.KINDS, *(f"{kind}_cosine" for kind in gradients.KINDS)]
    assert all(sorted(row) == sorted(names) for row in rows.values())
    bf16, plain, balanced, rowwise, nearest, wgrad_bf16, too_few, enough = rows.values()
    assert all(row[kind] == 0 for row in (bf16, wgrad_bf16) for kind in gradients.KINDS)
    assert plain["outliers"] > 2 * nearest["outliers"] > 5 * balanced["outliers"]
    assert balanced["outliers"] == pytest.approx(balanced["ordinary"], rel=1e-3)
    assert balanced["model_outliers"] == balanced["model"]
    assert plain["massive"] > 3 * balanced["massive"]
    # An outlier in 32 tokens: all of them are in bf16, or half.
    assert enough["outliers"] == pytest.approx(enough["ordinary"], rel=0.02)
    assert enough["outliers"] < 1.02 * plain["ordinary"] < 0.2 * too_few["outliers"]
    assert enough["lognormal"] < too_few["lognormal"] < balanced["lognormal"]
    assert balanced["ordinary"] < rowwise["ordinary"] < 0.2
    assert balanced["lognormal"] < 0.5 * plain["lognormal"]
    assert plain["outliers_cosine"] < 0.6 < 0.98 < balanced["outliers_cosine"] < 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "-1"], "--steps: got -1, must be at least 0"),
        (["--arms", "fp8"], "begins with 'fp8', must"),
        (["--arms", "nvidia+outliers"], "'nvidia+outliers' changes the model, must change the recipe alone"),
        (["--table", "loss"], "invalid choice: 'loss'"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["gradients", "--device", "cpu", *arguments])
    assert error.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("_words")
def test_every_arm_is_known() -> None:
    import train_moe_arms

    for arms in (gradients.ARMS, gradients.TOKEN_ARMS):
        parts = [gradients.without_outliers(name) for name in arms]
        changes = [(train_moe_arms.arm(name).recipe, part) for name, part in parts]
        assert len(set(changes)) == len(changes)
