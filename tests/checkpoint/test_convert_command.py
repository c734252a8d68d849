"""python -m fp4gemm convert: options, exit status, progress and reports."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import MOE, contents, llama, load, moe, save
from fp4gemm.calibration import InputStatistics, Statistics
from fp4gemm.checkpoint import Options, Translation, convert
from fp4gemm.commands import convert as command
from fp4gemm.commands import main
from fp4gemm.training import PRESETS

STATE = "fp4gemm_convert.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "src", llama(1), shards=2)


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def test_dry_run_then_conversion(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, tmp_path / "dst", "--dry-run") == 0
    planned = capsys.readouterr().out
    assert not (tmp_path / "dst").exists()
    assert "lm_head.weight" in planned
    assert "output embedding" in planned

    assert run(source, tmp_path / "dst", "--verify", "--report", tmp_path / "r.json", "--device", "cpu") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(planned)
    assert "relative error: 0.08" in shown.out
    assert shown.out.endswith("dst: verified\n")
    assert "GB/s, 0 s left" in shown.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["layers"]) == 7
    assert report["is_verified"] is True
    convert(source, tmp_path / "api")
    assert contents(tmp_path / "dst") == contents(tmp_path / "api")

    assert run(source, tmp_path / "dst", "--resume") == 0
    assert "dst: is finished already; nothing was written" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    assert run(source, tmp_path / "dst") == 0
    shown = capsys.readouterr().err
    assert "━" in shown
    assert "B/s" in shown
    assert "0:00:0" in shown


def test_every_option_reaches_the_conversion(tmp_path: Path) -> None:
    source = save(tmp_path / "src", moe(), config=MOE)
    (tmp_path / "fuse.json").write_text('[["gate_proj", "up_proj"]]')
    (tmp_path / "kv.json").write_text('{"model.layers.0.self_attn": [0.5, 2]}')
    options = [
        "--format", "compressed-tensors", "--numerics", "te", "--four-over-six", "mae",
        "--activations", "per-token", "--exclude", "*.o_proj", "--exclude", "re:shared", "--fuse",
        tmp_path / "fuse.json", "--kv-cache", tmp_path / "kv.json", "--keep-experts", "--jobs", "1",
        "--max-memory", "1M", "--weight-scaling", "tensor",
    ]  # fmt: skip
    assert run(source, tmp_path / "dst", *options) == 0
    same = Options(
        format="compressed-tensors", four_over_six="mae", activations="per-token", split_experts=False,
        exclude=["*.o_proj", "re:shared"], fuse=[["gate_proj", "up_proj"]],
        kv_scales={"model.layers.0.self_attn": (0.5, 2.0)},
    )  # fmt: skip
    convert(source, tmp_path / "api", same)
    old, new = contents(tmp_path / "dst"), contents(tmp_path / "api")
    del old[STATE], new[STATE]
    assert old == new

    assert run(source, tmp_path / "experts", "--experts-only", "--bf16-first", "1", "--fuse", "none") == 0
    names = [name for name in load(tmp_path / "experts") if name.endswith("weight_scale")]
    assert names
    assert all("experts" in name for name in names)


def test_static_activations_and_translation(source: Path, tmp_path: Path) -> None:
    modules = [name.removesuffix(".weight") for name in llama(1) if "_proj" in name]
    (tmp_path / "amax.json").write_text(json.dumps(dict.fromkeys(modules, 4.0)))
    assert run(source, tmp_path / "a", "--activations", f"static:{tmp_path / 'amax.json'}") == 0
    assert run(tmp_path / "a", tmp_path / "b", "--from", "modelopt", "--to", "compressed-tensors") == 0
    assert float(load(tmp_path / "b")[f"{modules[0]}.input_global_scale"]) == 2688 / 4
    convert(tmp_path / "b", tmp_path / "c", Translation("compressed-tensors", "modelopt"))
    old, new = contents(tmp_path / "a"), contents(tmp_path / "c")
    del old[STATE], new[STATE]
    assert old == new


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "modelopt"], "--from, --to: got one of them, must be given together"),
        (["--from", "modelopt", "--to", "fp4gemm", "--exclude", "a"], "--exclude: got with --from and --to"),
        (
            ["--activations", "static"],
            "--activations: got 'static', must be a16, per-token, per-tensor, fp8 or ",
        ),
        (
            ["--activations", "w4"],
            "activations: got 'w4', must be 'a16', 'per-token', 'per-tensor', 'static' or 'fp8'",
        ),
        (["--activations", "static:no.json"], "activations: no.json cannot be read as JSON"),
        (["--fuse", "no.json"], "fuse: no.json cannot be read as JSON"),
        (["--kv-cache", "no.json"], "kv_cache: no.json cannot be read as JSON"),
        (["--max-memory", "many"], "got 'many', must be bytes such as 8000000000 or 8G"),
        (["--jobs", "0"], "jobs: got 0, must be at least 1"),
        (["--device", "tpu"], "device: got 'tpu', must be auto, cpu, cuda or cuda:0,1"),
        (["--device", "cuda:99"], "device: got 'cuda:99', must be one of the"),
        (["--dry-run", "--verify"], "--verify: got with --dry-run, must be absent"),
        (["--dry-run", "--resume"], "--resume: got with --dry-run, must be absent"),
        (["--dry-run", "--jobs", "2"], "--jobs: got with --dry-run, must be absent"),
        (["--dry-run", "--max-memory", "1M"], "--max-memory: got with --dry-run, must be absent"),
        (["--dry-run", "--device", "cpu"], "--device: got with --dry-run, must be absent"),
        (["--numerics", "other"], "invalid choice: 'other'"),
        (["--split-experts", "--keep-experts"], "not allowed with argument"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "_".join(value).lstrip("-"),
)
def test_bad_usage(
    source: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(source, tmp_path / "dst", *options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()


def test_a_bad_checkpoint_has_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none", tmp_path / "dst") == 1
    assert capsys.readouterr().err == (
        f"fp4gemm convert: {tmp_path / 'none'}: no such folder, must be the folder of a checkpoint\n"
    )
    (tmp_path / "config.json").write_text("{}")
    assert run(tmp_path / "config.json", tmp_path / "dst") == 1
    assert "config.json: is a file, must be the folder of a checkpoint" in capsys.readouterr().err


def test_without_safetensors(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert run(source, tmp_path / "dst") == 1
    assert "safetensors is not installed, which checkpoints need: pip install 'fp4gemm[convert]'" in (
        capsys.readouterr().err
    )


def test_an_interrupt_says_how_to_continue(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "convert", interrupted)
    assert run(source, tmp_path / "dst") == 130
    assert "stopped; the same command with --resume continues it" in capsys.readouterr().err


def documented() -> list[str]:
    """The command lines of docs/checkpoints.md."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    return [
        line.partition("#")[0].strip() for line in text.splitlines() if line.startswith("fp4gemm convert ")
    ]


def test_documented_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, on small checkpoints of the names that they read."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "Qwen3-8B", llama(2), shards=2)
    save(tmp_path / "Qwen3-30B-A3B", moe(), config=MOE)
    modules = {name.removesuffix(".weight"): w.shape[1] for name, w in llama(2).items() if "_proj" in name}
    known = {m: InputStatistics(torch.tensor(200), torch.ones(k), torch.eye(k)) for m, k in modules.items()}
    Statistics(known).save("statistics.safetensors")
    lines = [line for line in documented() if "text.txt" not in line]  # tests of texts have a tokenizer
    assert len(lines) > 5
    for line in lines:
        _, _, source, *arguments = shlex.split(line)
        if Path(source).exists():  # other sections may name checkpoints that are downloaded
            assert run(source, *arguments) == 0, line
    assert {
        "Qwen3-8B-NVFP4",
        "Qwen3-8B-W4A4",
        "Qwen3-8B-GPTQ",
        "Qwen3-8B-CT",
        "Qwen3-8B-CT2",
        "Qwen3-30B-NVFP4",
    } <= {path.name for path in tmp_path.iterdir()}


def test_every_option_is_documented() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # an old name
            continue
        for option in action.option_strings:
            assert f"`{option}" in text, option


def test_a_recipe_of_training(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--recipe stands for the options of the recipe, and excludes them."""
    how = ("--format", "fp4gemm", "--fuse", "none", "--recipe", "four_over_six", "--verify")
    assert run(source, tmp_path / "dst", *how, "--device", "cpu") == 0
    recipe = PRESETS["four_over_six"].for_inference()
    convert(source, tmp_path / "api", Options(format="fp4gemm", fuse=(), **recipe.options()))
    assert contents(tmp_path / "dst") == contents(tmp_path / "api")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert config["producer"]["activation_scaling"] == "per-tensor,four_over_six=mae"
    assert (config["e4m3_max"], config["scaling"]) == (256, "tensor")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(source, tmp_path / "no", *how, "--method", "round")
    assert stopped.value.code == 2
    text = "--method: got 'round', must be absent with --recipe, which has it"
    assert text in capsys.readouterr().err
