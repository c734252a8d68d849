"""bench serving on the CPU: the contenders of linear layers and mixtures, their rows, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import FP8, HOPPER, W4A8, named, run

from bench.__main__ import main
from bench.commands import serving
from bench.measure import roofline
from bench.measure.contest import Contest
from bench.measure.library import products
from bench.measure.models import Experts, Model

OURS = {"fp4gemm W4A4", "fp4gemm W4A16"}
SMALL = Model("small", (("qkv", 48, 64),), Experts(4, 2, 64, 32))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TINY", SMALL)


@pytest.mark.usefixtures("small")
def test_every_layer_at_every_size() -> None:
    rows = run("serving", "--m", "1,5,1")
    assert list(dict.fromkeys(row["case"] for row in rows)) == [
        "serving small qkv 1x48x64",
        "serving small qkv 5x48x64",
        "serving small experts 1 tokens 4x64x32",
        "serving small experts 5 tokens 4x64x32",
    ]
    assert not any("refused" in row for row in rows)
    absent = {(row["layer"], row["contender"]) for row in rows if "absent" in row}
    # The second product of the experts has a k of 32, and FP8 tokens need a multiple of 64.
    assert absent == {("experts", name) for name in W4A8}
    linear = named([row for row in rows if row.get("m") == 5])
    assert set(linear) == {*OURS, *W4A8, "torch bf16", *FP8}
    assert {name for name, row in linear.items() if row.get("checked") == "bit for bit"} == {"fp4gemm W4A4"}
    assert all("us" in linear[name] for name in (*OURS, *W4A8, *FP8))
    ours = linear["fp4gemm W4A4"]
    num_bytes = 2 * 5 * 64 + (48 * 32 + 128 * 4 + 4 * 48) + 2 * 5 * 48
    assert ours["gb_s"] * ours["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)
    assert ours["tflop_s"] * ours["us"] * 1e6 == pytest.approx(2 * 5 * 48 * 64, rel=0.01)
    mixture = named([row for row in rows if row.get("tokens") == 1])
    assert set(mixture) == {*OURS, *W4A8, "torch bf16", *FP8}
    baseline = mixture["torch bf16"]  # one token reads two experts of four
    num_bytes = 2 * (2 * (64 * 64 + 64 * 32) + 64 + 64)
    assert baseline["gb_s"] * baseline["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)
    assert mixture["fp4gemm W4A16"]["ratio"].keys() == {"torch bf16", *FP8}


@pytest.mark.usefixtures("small")
def test_a_kernel_is_ahead_of_linear_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    rows = Contest.rows

    def noted(self: Contest, harness: Any) -> Any:
        found[str(self.start["layer"])] = len(self.ahead)
        return rows(self, harness)

    monkeypatch.setattr(Contest, "rows", noted)
    assert not any("refused" in row for row in run("serving", "--m", "5"))
    assert found["qkv"] > 1
    assert found["experts"] == 0


@pytest.mark.usefixtures("small")
def test_humming_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    rows = run("serving", "--m", "2", operands=HOPPER)
    absent = [(row["layer"], row["absent"]) for row in rows if row["contender"] == "humming"]
    assert [layer for layer, _ in absent] == ["qkv", "experts"]
    assert absent[0][1].startswith("humming: ModuleNotFoundError")
    assert absent[1][1] == "this command calls humming's linear layers alone"
    assert {row["contender"] for row in rows if "us" in row} == {*OURS, *W4A8, "torch bf16", *FP8}


def test_experts_without_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TINY", Model("up", experts=Experts(4, 2, 64, 32, gated=False)))
    rows = run("serving", "--m", "9")
    assert {row["contender"] for row in rows if "us" in row} == {*OURS, "torch bf16", *FP8}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt-oss-20b", "this command has no experts with biases, which the plug-ins serve"),
        (
            "llama-4-scout",
            "the plug-ins leave it to the engine: the router's weights multiply the input",
        ),
    ],
)
def test_mixtures_that_are_not_timed(monkeypatch: pytest.MonkeyPatch, model: str, reason: str) -> None:
    monkeypatch.setattr(serving, "TINY", Model(model, experts=Experts(4, 2, 64, 32)))
    rows = run("serving", "--m", "1")
    assert {row["contender"]: row["absent"] for row in rows} == dict.fromkeys(OURS | W4A8, reason)


def test_a_wrong_result_is_refused(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, experts = products.linear, products.experts

    def wrong_linear(*args: Any) -> torch.Tensor:
        y = linear(*args)
        y[1, 3] += 100
        return y

    def wrong_experts(x: torch.Tensor, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        ids = ids.clone()
        ids[2, 0] = next(i for i in range(4) if i not in ids[2])  # another expert for one slot of 64
        return experts(x, ids, *args)

    monkeypatch.setattr(products, "linear", wrong_linear)
    monkeypatch.setattr(products, "experts", wrong_experts)
    rows = run("serving", "--m", "32")
    refused = {(row["layer"], row["contender"]): row["refused"] for row in rows if "refused" in row}
    assert set(refused) == {(layer, name) for layer in ("qkv", "experts") for name in OURS}
    assert all("off by" in text or "differ" in text for text in refused.values()), refused
    assert not any("us" in row for row in rows if row["contender"] in OURS)
    assert not any(OURS & row.get("ratio", {}).keys() for row in rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: y[:1], "must return a bfloat16 tensor of shape"),
        (lambda y: y.float(), "must return a bfloat16 tensor of shape"),
        (lambda y: y / 0, "not finite"),
        (lambda y: y * 1.05, "of its norm from its emulation"),
        (lambda y: torch.cat((y[:-1], y[-1:] * 1.2)), "token 999 is off by 2.0e-01"),
    ],
)
def test_off_by(change: Any, text: str, gen: torch.Generator) -> None:
    want = torch.randn(1000, 64, generator=gen)
    assert serving.off_by(want.bfloat16, lambda: want, serving.TOLERANCE) is None
    reason = serving.off_by(lambda: change(want.bfloat16()), lambda: want, serving.TOLERANCE_OF_TOKEN)
    assert reason is not None
    assert text in reason


def test_command_line_continues_a_file(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "MATMUL", {"cpu": 128})
    out = tmp_path / "serving.jsonl"
    line = ["serving", "--quick", "--rounds", "1", "--device", "cpu", "--out", str(out)]
    assert main(line) == 0
    count = 4 * (len(OURS) + 1 + len(FP8)) + 2 * len(W4A8)
    assert f"{count} results, 0 refused" in capsys.readouterr().out
    before = out.read_text()
    assert main([*line, "--json"]) == 0
    assert out.read_text() == before
    printed = [json.loads(text) for text in capsys.readouterr().out.splitlines() if text.startswith("{")]
    assert len([row for row in printed if "us" in row]) == count


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for line, text in (
        (["--model", "gpt-5"], "'gpt-5' is not one of square, "),
        (["--m", "0"], "must be at least 1"),
        (["--shapes", "64x64"], "unrecognized arguments: --shapes"),
    ):
        with pytest.raises(SystemExit):
            main(["serving", *line])
        assert text in capsys.readouterr().err
