"""The format of each layer by its sensitivity: the measurement, the choice for a budget, and the command."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from fp4gemm.checkpoint import CheckpointError, Options, Plan, Text, choose, convert
from fp4gemm.checkpoint import auto as module
from fp4gemm.checkpoint.formats import StoredLayer, StoredWeight, read_scheme
from fp4gemm.checkpoint.source import Source
from fp4gemm.commands import main
from fp4gemm.models.sensitivity import sensitivity
from nvfp4_models import float_model, read, save_float, transformers
from tokenizers_of_words import TEXT, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("nvfp4", "fp8-channel")
IDS = [torch.arange(40)[None] * 7 % 128, torch.arange(23)[None] * 11 % 128]


def checkpoint(folder: Path, name: str = "llama") -> Path:
    save_tokenizer(save_float(float_model(name), folder))
    return folder


# ---- the measurement


def test_the_sensitivity_is_its_definition() -> None:
    """The gradient of the sum of losses at the output, by autograd through a model cut at the layer."""
    model = float_model("llama", torch.float32)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    changes = {name: torch.randn(model.get_submodule(name).weight.shape) * 0.01 for name in names}

    def variant(name: str, factor: float) -> Any:
        linear = model.get_submodule(name)
        return lambda x: linear.forward(x) + factor * torch.nn.functional.linear(x, changes[name])

    seen: list[tuple[int, int, str]] = []
    found = sensitivity(
        model,
        IDS,
        {name: {"one": variant(name, 1.0), "two": variant(name, 2.0)} for name in names},
        lambda *step: seen.append(step),
    )
    assert seen == [(1, 2, "batch 1"), (2, 2, "batch 2")]
    assert not any(p.grad is not None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    for name in names:
        total = 0.0
        for ids in IDS:
            kept: list[Any] = []

            def keep(linear: Any, args: Any, y: torch.Tensor, kept: list[Any] = kept) -> torch.Tensor:
                kept[:] = [args[0].detach(), torch.zeros_like(y, requires_grad=True)]
                return y + kept[1]

            handle = model.get_submodule(name).register_forward_hook(keep)
            logits = model(ids).logits
            handle.remove()
            loss = -logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum()
            (gradient,) = torch.autograd.grad(loss, kept[1])
            delta = torch.nn.functional.linear(kept[0], changes[name])
            total += 0.5 * float((gradient * delta).double().square().sum())
        expected = total / sum(ids.shape[1] - 1 for ids in IDS)
        assert found[name]["one"] == pytest.approx(expected, rel=1e-4)
        assert found[name]["two"] == pytest.approx(4 * expected, rel=1e-4)


def test_what_cannot_be_measured() -> None:
    model = float_model("llama", torch.float32)
    with pytest.raises(ValueError, match=r"^batches: batch 1 has 1 tokens, must have 2 or more"):
        sensitivity(model, [IDS[0], IDS[0][:, :1]], {"lm_head": {}})
    model.extra = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"^batches: no token reached 'extra', must reach every module"):
        sensitivity(model, IDS, {"lm_head": {}, "extra": {"a": lambda x: x}})


@pytest.mark.parametrize(
    ("activations", "method"), [("a16", None), ("per-token", "round"), ("fp8", None), ("a16", "gptq")]
)
def test_the_weights_that_are_measured_are_those_that_are_written(
    tmp_path: Path, activations: Any, method: Any
) -> None:
    """The loss of a layer whose output changes by X (V - W)^T, with V of the converted checkpoint."""
    source = checkpoint(tmp_path / "src")
    options = Options(activations=activations, method="four-over-six" if method == "gptq" else method)
    given = Options(activations=activations, method=method, calibration=TEXT if method == "gptq" else None)
    report = choose(source, given, bits=8.5, calibration=TEXT, device="cpu")
    assert report.rounding == options.method
    names = [f"model.layers.1.self_attn.{child}_proj" for child in "qkv"]
    for layers in ({}, dict.fromkeys(names, "fp8-channel")):
        folder = tmp_path / ("b" if layers else "a")
        convert(source, folder, dataclasses.replace(options, layers=layers), device="cpu")
        tensors, _ = read(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

        def variant(name: str, layers: Any = layers, tensors: Any = tensors, model: Any = model) -> Any:
            if layers:
                weight = StoredLayer.read(tensors, name, "fp8-channel").dequantize(torch.float32)
            else:
                stored = StoredWeight.read(tensors, name, "modelopt", options.recipe.e4m3_max)  # type: ignore[arg-type]
                weight = stored.to_nvfp4().dequantize(torch.float32)
            cast = module._fp8_rows if layers else module._cast_of(options)
            bias = model.get_submodule(name).bias
            return lambda x: torch.nn.functional.linear(cast(x), weight, bias)

        ids = torch.tensor([int(word) for word in TEXT.split()])[None]
        found = sensitivity(model, [ids], {name: {"v": variant(name)} for name in names})
        choice = next(each for each in report.choices if each.name == names[0])
        assert choice.modules == tuple(names)
        expected = sum(found[name]["v"] for name in names)
        assert choice.losses["fp8-channel" if layers else "nvfp4"] == pytest.approx(expected, rel=1e-5)


# ---- the choice


def units_and_losses(seed: int, count: int = 5) -> tuple[list[Any], dict[str, dict[Any, float]]]:
    generator = torch.Generator().manual_seed(seed)
    units, losses = [], {}
    for i in range(count):
        elements = 64 * int(torch.randint(1, 9, (), generator=generator))
        sizes = {"nvfp4": 9 * elements // 2, "fp8-channel": 8 * elements + 32, "bf16": 16 * elements}
        low, high = torch.rand(2, generator=generator).tolist()
        units.append(module._Unit(f"u{i}", (f"u{i}",), (), elements, sizes))  # type: ignore[arg-type]
        losses[f"u{i}"] = {"nvfp4": low, "fp8-channel": low * high, "bf16": 0.0}
    return units, losses


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_for_the_bits_that_it_uses(seed: int) -> None:
    """Compared with all 3^5 choices, at the budget of every step; one more bit of budget never costs loss."""
    units, losses = units_and_losses(seed)
    elements = sum(unit.elements for unit in units)
    every = []
    for formats in itertools.product(("nvfp4", "fp8-channel", "bf16"), repeat=len(units)):
        size = sum(unit.sizes[name] for unit, name in zip(units, formats, strict=True))
        every.append((size, math.fsum(losses[u.name][f] for u, f in zip(units, formats, strict=True))))
    budgets = sorted({size for size, _ in every})
    last = math.inf
    best = 0
    for budget in budgets:
        made = module._solved(units, losses, budget / elements)
        size = sum(unit.sizes[choice.format] for unit, choice in zip(units, made, strict=True))
        loss = math.fsum(choice.losses[choice.format] for choice in made)
        assert size <= budget + 1e-6
        wanted = min(loss for other, loss in every if other <= budget)
        assert loss >= wanted - 1e-12
        steps = [choice.next_gain for choice in made if choice.next_gain is not None]
        taken = [choice.gain for choice in made if choice.gain is not None]
        if not steps or not taken or min(taken) >= max(steps):  # no step was left out
            assert loss == pytest.approx(min(loss for other, loss in every if other <= size), abs=1e-12)
            best += 1
        last = min(last, loss)
    assert best > 4
    assert last == 0


def test_a_format_above_the_hull_is_not_taken() -> None:
    unit = module._Unit("u", ("u",), (), 64, {"nvfp4": 288, "fp8-channel": 512, "bf16": 1024})
    for loss, hull in (
        (0.9, ["nvfp4", "bf16"]),
        (0.5, ["nvfp4", "fp8-channel", "bf16"]),
        (1.5, ["nvfp4", "bf16"]),
    ):
        assert module._hull(unit, {"nvfp4": 1.0, "fp8-channel": loss, "bf16": 0.0}) == hull
    assert module._hull(unit, {"nvfp4": 0.0, "fp8-channel": 0.0, "bf16": 0.0}) == ["nvfp4"]


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
def test_a_checkpoint_of_chosen_formats(tmp_path: Path, format: Any) -> None:
    source = checkpoint(tmp_path / "src")
    options = Options(format=format, activations="a16")
    steps: list[Any] = []
    report = choose(
        source, options, bits=7.0, calibration=TEXT, device="cpu", progress=lambda *s: steps.append(s)
    )
    assert steps == [(1, 1, "batch 1")]
    assert 6.0 < report.bits <= 7.0
    assert len(report.choices) == 2 * 4
    formats = {choice.format for choice in report.choices}
    assert (
        formats == ({"nvfp4", "bf16"} if format == "fp4gemm" else {"nvfp4", "fp8-channel"})
        or len(formats) == 3
    )
    assert report.loss < report.loss_of("nvfp4")
    assert report.loss_of("bf16") == 0
    for choice in report.choices:
        assert ("gained" in choice.why) == (choice.format != "nvfp4")
        assert ("would gain" in choice.why) == (choice.next_gain is not None)
    text = str(report)
    assert text.splitlines()[0].split()[:4] == ["layer", "elements", "format", "bits"]
    assert "diagonal empirical Fisher" in text
    assert "the 300 tokens of a text" in text
    assert "weights rounded by four-over-six" in text
    assert json.dumps(report.for_bits(5.0).for_bits(7.0).as_json()) == json.dumps(report.as_json())
    assert report.for_bits(5.0).bits <= 5.0 < report.bits
    again = choose(source, options, bits=7.0, calibration=TEXT, device="cpu")
    assert json.dumps(again.as_json()) == json.dumps(report.as_json())
    convert(source, tmp_path / "a", report.options, device="cpu", verify=True)
    tensors, config = read(tmp_path / "a")
    find = read_scheme(config, tmp_path / "a").lookup()  # type: ignore[union-attr]
    size = elements = 0
    for choice in report.choices:
        for name in choice.modules:
            assert find(name) == {"nvfp4": "a16", "bf16": None}.get(choice.format, choice.format)
            mine = {
                key: t
                for key, t in tensors.items()
                if key.startswith(f"{name}.") and not key.endswith("bias")
            }
            size += 8 * sum(tensor.nbytes for tensor in mine.values())
        elements += choice.elements
    assert size / elements == pytest.approx(report.bits)


def test_experts_get_one_format(tmp_path: Path) -> None:
    """In both layouts of a checkpoint; they are NVFP4 or stay."""
    source = checkpoint(tmp_path / "src", "qwen3-moe")
    report = choose(source, bits=8.0, calibration=TEXT, device="cpu")
    experts = [choice for choice in report.choices if choice.name.endswith(".experts")]
    assert len(experts) == 2
    for choice in experts:
        assert set(choice.losses) == {"nvfp4", "bf16"}
        assert choice.losses["nvfp4"] > 0
        assert choice.elements == 4 * 3 * 32 * 64
    convert(source, tmp_path / "a", report.options, device="cpu", verify=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "src")
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["convert", str(source), "--calibration", str(tmp_path / "text.txt"), "--auto", "--bits", "5.5"]
    assert main([*command, str(tmp_path / "dry"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "bits on average (asked for: at most 5.5)" in shown
    assert "FP8 per channel" in shown
    assert not (tmp_path / "dry").exists()
    assert main([*command, str(tmp_path / "a"), "--verify", "--auto-formats", "nvfp4,fp8-channel"]) == 0
    report = choose(source, bits=5.5, calibration=TEXT, device="cpu", formats=("nvfp4", "fp8-channel"))
    convert(source, tmp_path / "b", report.options, device="cpu")
    old, new = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {file for file in old if old[file] != new[file]} <= {"fp4gemm_convert.json"}
    assert main([*command, str(tmp_path / "a"), "--auto-formats", "nvfp4,fp8-channel"]) == 0
    assert "is finished already" in capsys.readouterr().err


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "few bits": ({"bits": 4.0}, r"^bits: got 4\.0, must be at least 4\.5"),
    "many bits": ({"bits": 17}, r"^bits: got 17, must be less, since no layer would be NVFP4"),
    "no number": ({"bits": "5"}, r"^bits: got '5' \(str\), must be a positive number"),
    "no text": ({"calibration": "statistics"}, r"^calibration: 'statistics' is no file"),
    "one format": ({"formats": ("nvfp4",)}, r"^formats: got nvfp4, must be 'nvfp4' and at least one more"),
    "no nvfp4": ({"formats": ("fp8-channel", "bf16")}, r"^formats: got .*, must be 'nvfp4' and at least one"),
    "a format": ({"formats": ("nvfp4", "int8")}, r"^formats: got 'int8', must be 'nvfp4', 'fp8-channel' or"),
    "own format": (
        {"options": Options(format="fp4gemm"), "formats": ("nvfp4", "fp8-channel")},
        r"^formats: got 'fp8-channel', must be 'nvfp4' or 'bf16'",
    ),
    "layers": (
        {"options": Options(layers={"a": "bf16"})},
        r"^layers: got some in the options, must be empty",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(tmp_path: Path, case: str) -> None:
    source = checkpoint(tmp_path / "src")
    given, message = WRONG[case]
    arguments = {"options": None, "bits": 6.0, "calibration": TEXT, "device": "cpu", **given}
    with pytest.raises(ValueError, match=message):
        choose(source, arguments.pop("options"), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "5"], "--bits: got without --auto, must be absent"),
        (["--auto", "--calibration", TEXT], "--bits: is missing, must be given with --auto"),
        (["--auto", "--bits", "5"], "--calibration: is missing, must be a text with --auto"),
        (
            ["--auto", "--bits", "5", "--from", "modelopt", "--to", "fp4gemm"],
            "--auto: got with --from and --to",
        ),
        (["--auto", "--bits", "5", "--format", "mxfp4"], "--auto: got with --format mxfp4, must be absent"),
    ],
)
def test_wrong_commands(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "a", "b", *options])
    assert message in capsys.readouterr().err


def test_a_module_that_the_model_calls_otherwise(tmp_path: Path) -> None:
    """A weight of the checkpoint that is no linear layer of the model has no sensitivity."""
    source = checkpoint(tmp_path / "src")
    plan = Plan.of_checkpoint(Source(source), Options())
    unit = module._units(plan, ("nvfp4", "bf16"))[0]
    with pytest.raises(CheckpointError, match=r"is no linear layer of the model that transformers loads"):
        list(module._variants(unit, Source(source), Options(), lambda name: f"{name}.other", {}))


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """examples/auto_formats.py: the losses that it prints are those of the checkpoints that it converts."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("auto_formats")
    monkeypatch.setattr(example, "texts", lambda: (TEXT, TEXT))
    source = checkpoint(tmp_path / "src")
    command = ["auto_formats.py", "--model", str(source), "--bits", "5.5", "--tokens", "200"]
    monkeypatch.setattr(sys, "argv", command)
    example.main()
    shown = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("-")]
    titles = ["chosen", "first layers", "last layers", "all nvfp4", "all fp8 but the first set"]
    assert [row[1] for row in rows] == titles
    report = choose(source, bits=5.5, calibration=Text(TEXT, 200), device="cpu", formats=FORMATS)
    assert rows[0][0] == f"{report.bits:.3f}"
    for title, row in zip(titles[1:3], rows[1:3], strict=True):
        names = [choice.name for choice in report.choices]
        layers = example.in_order(report, names if title == "first layers" else names[::-1])
        elements = sum(choice.elements for choice in report.choices)
        used = sum(
            c.elements * c.bits_of["fp8-channel" if c.name in layers else "nvfp4"] for c in report.choices
        )
        assert used / elements <= report.bits
        assert row[3] == ""
    convert(source, tmp_path / "a", report.options, device="cpu")
    ids = torch.tensor([int(word) for word in TEXT.split()])[None, :200]
    base = example.loss_of(example.float_model(source), [ids])
    made = example.loss_of(example.with_values_of(tmp_path / "a", source), [ids])
    assert rows[0][2] == f"{made - base:.4f}"
