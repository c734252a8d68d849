"""Conversions by statistics: the bits of each method, which statistics a matrix gets, files, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from checkpoints import HIDDEN, INTERMEDIATE, LLAMA, MOE, contents, llama, load, moe, save
from fp4gemm.__main__ import main
from fp4gemm.calibration import InputStatistics, Statistics, StatisticsFile, gptq
from fp4gemm.checkpoint import CheckpointError, Options, Plan, Text, convert, plan_conversion, quantize_named
from torch import Tensor

SETS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts"


def statistics(gen: torch.Generator, k: int, num_experts: int = 0, *, tokens: int = 200) -> InputStatistics:
    """Those of random inputs with unequal channels."""
    lead = (num_experts,) if num_experts else ()
    x = torch.randn(*lead, 2 * k, k, generator=gen) * torch.linspace(0.1, 3, k)
    moment = x.mT @ x / (2 * k)
    moment = (moment + moment.mT) / 2
    count = torch.full(lead, tokens)
    return InputStatistics(count, moment.diagonal(dim1=-2, dim2=-1).contiguous(), moment)


def of_llama(layers: int = 1) -> dict[str, InputStatistics]:
    """The statistics of the checkpoint that llama() makes; q, k and v share theirs, and so do gate and up."""
    gen, made = torch.Generator().manual_seed(3), {}
    for layer in range(layers):
        for names in SETS:
            known = statistics(gen, INTERMEDIATE if "down" in names[0] else HIDDEN)
            made |= {f"model.layers.{layer}.{name}": known for name in names}
    return made


def of_moe() -> dict[str, InputStatistics]:
    gen, shared = torch.Generator().manual_seed(4), "model.layers.1.mlp.shared_experts"
    made = {f"{EXPERTS}.w13": statistics(gen, HIDDEN, 4), f"{EXPERTS}.w2": statistics(gen, INTERMEDIATE, 4)}
    up, down = statistics(gen, HIDDEN), statistics(gen, INTERMEDIATE)
    return {
        **of_llama(),
        **made,
        f"{shared}.gate_proj": up,
        f"{shared}.up_proj": up,
        f"{shared}.down_proj": down,
    }


def parts(new: Mapping[str, Tensor], module: str) -> list[Tensor]:
    return [new[f"{module}.{end}"].view(-1) for end in ("weight", "weight_scale", "weight_scale_2")]


def same(made: list[Tensor], want: fp4gemm.NVFP4Tensor) -> bool:
    wanted = want.to_modelopt()
    return all(
        torch.equal(x.view(torch.uint8), wanted[end].reshape(-1).view(torch.uint8))
        for x, end in zip(made, ("weight", "weight_scale", "weight_scale_2"), strict=True)
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "src", llama(1), shards=2)


@pytest.mark.parametrize("method", ["search", "gptq"])
def test_each_method_is_the_function_of_its_name(method: Any, source: Path, tmp_path: Path) -> None:
    """With the amax of the fused set; also from a file, and tensor by tensor."""
    known = Statistics(of_llama())
    options = Options(method=method, calibration=known)
    report = convert(source, tmp_path / "dst", options, measured=True, verify=True)
    old, new = load(source), load(tmp_path / "dst")
    for names in SETS:
        modules = [f"model.layers.0.{name}" for name in names]
        amax = torch.stack([old[f"{m}.weight"].float().abs().max() for m in modules]).max().view(1)
        for module in modules:
            w, k = old[f"{module}.weight"], known[module]
            if method == "search":
                want = fp4gemm.quantize(
                    w, scaling="tensor", amax=amax, scale_search="mse", importance=k.mean_square
                )
            else:
                want = gptq(w, k.second_moment, scaling="tensor", amax=amax)
            assert same(parts(new, module), want), module
    assert report.method == f"{method}, calibrated by {known!r}"
    assert all(0 < layer.output_error < 0.3 for layer in report.layers)  # type: ignore[operator]

    known.save(tmp_path / "statistics")
    plan = Plan.of_shapes({n: (t.shape, t.dtype) for n, t in old.items()}, LLAMA, options)
    streamed = dict(quantize_named(old.items(), plan))
    assert all(torch.equal(streamed[name], value) for name, value in new.items())
    convert(source, tmp_path / "file", Options(method=method, calibration=tmp_path / "statistics"), jobs=1)
    before, after = contents(tmp_path / "dst"), contents(tmp_path / "file")
    assert {name for name in before if before[name] != after[name]} == {"fp4gemm_convert.json"}


def test_gptq_is_better_than_search_and_that_than_four_over_six(source: Path, tmp_path: Path) -> None:
    known, errors = of_llama(), []
    for method in ("gptq", "search"):
        options = Options(method=method, calibration=Statistics(known))  # type: ignore[arg-type]
        report = convert(source, tmp_path / method, options, measured=True)
        errors.append(sum(layer.output_error or 0 for layer in report.layers))
    convert(source, tmp_path / "plain")
    old, new, total = load(source), load(tmp_path / "plain"), 0.0
    for module, k in known.items():
        values = fp4gemm.NVFP4Tensor.from_modelopt(
            *(new[f"{module}.{end}"] for end in ("weight", "weight_scale", "weight_scale_2")), e4m3_max=256
        ).dequantize(torch.float32)
        w = old[f"{module}.weight"].float()
        energy = [float(((x @ k.second_moment) * x).sum()) for x in (w - values, w)]  # type: ignore[operator]
        total += (energy[0] / energy[1]) ** 0.5
    assert errors[0] < errors[1] < total


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
def test_every_format_holds_the_same_values(format: Any, source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibration": Statistics(of_llama())}
    tensor = Options(format=format, weight_scaling="tensor", **options)
    convert(source, tmp_path / "a", tensor, verify=True)
    convert(source, tmp_path / "b", Options(**options))
    codes = "weight_packed" if format == "compressed-tensors" else "weight"
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    for module in of_llama():
        assert torch.equal(a[f"{module}.{codes}"], b[f"{module}.weight"])
        assert torch.equal(a[f"{module}.weight_scale"].view(torch.uint8),
                           b[f"{module}.weight_scale"].view(torch.uint8))  # fmt: skip
    if format == "fp4gemm":
        convert(
            source, tmp_path / "rows", Options(format=format, weight_scaling="row", **options), verify=True
        )


def test_the_default_is_the_best_that_the_calibration_allows() -> None:
    known = of_llama()
    plain = {n: InputStatistics(s.num_tokens, s.mean_square) for n, s in known.items()}
    assert Options().method == "four-over-six"
    assert Options(four_over_six="mae").method == "four-over-six"
    assert Options(numerics="modelopt").method == Options(numerics="llmcompressor").method == "round"
    assert Options(calibration=Statistics(known)).method == "gptq"
    assert Options(calibration=Statistics(plain)).method == "search"
    assert Options(calibration="some words of text").method == "gptq"


# ---- experts


@pytest.mark.parametrize("stacked", [False, True], ids=["one-by-one", "stacked"])
def test_each_expert_has_its_own_statistics(stacked: bool, tmp_path: Path) -> None:
    known = of_moe()
    save(tmp_path / "src", moe(stacked=stacked), config=MOE)
    Statistics(known).save(tmp_path / "statistics")
    convert(tmp_path / "src", tmp_path / "dst", Options(calibration=tmp_path / "statistics"), verify=True)
    old, new = moe(), load(tmp_path / "dst")
    for e in range(4):
        w = old[f"{EXPERTS}.{e}.down_proj.weight"]
        want = gptq(w, known[f"{EXPERTS}.w2"].second_moment[e], scaling="tensor")  # type: ignore[index]
        assert same(parts(new, f"{EXPERTS}.{e}.down_proj"), want)
    if stacked:
        kept = Options(calibration=Statistics(known), split_experts=False)
        convert(tmp_path / "src", tmp_path / "kept", kept, verify=True)
        whole = load(tmp_path / "kept")[f"{EXPERTS}.down_proj.weight"]
        assert torch.equal(whole[3], new[f"{EXPERTS}.3.down_proj.weight"])


def test_experts_with_few_tokens_are_named(tmp_path: Path) -> None:
    known, source = of_moe(), save(tmp_path / "src", moe(), config=MOE)
    s = known[f"{EXPERTS}.w2"]
    count = torch.tensor([200, 24, 0, 200])
    moment, square = s.second_moment.clone(), s.mean_square.clone()  # type: ignore[union-attr]
    moment[2], square[2] = 0, 0
    known[f"{EXPERTS}.w2"] = InputStatistics(count, square, moment)
    Statistics(known).save(tmp_path / "statistics")
    for name, calibration in (("memory", Statistics(known)), ("file", tmp_path / "statistics")):
        options = Options(calibration=calibration)  # type: ignore[arg-type]
        report = convert(source, tmp_path / name, options, measured=True)
        unknown = [layer.module for layer in report.layers if layer.output_error is None]
        assert unknown == [f"{EXPERTS}.2.down_proj"]
        assert report.notes == (
            f"{EXPERTS}.1.down_proj.weight: 24 tokens, fewer than 96: those of all experts added",
            f"{EXPERTS}.2.down_proj.weight: no token reached it: scales searched without statistics",
        )
        assert report.notes[0] in str(report)
    of_all = (moment * (count / count.sum()).view(4, 1, 1)).sum(0)
    w, part = moe()[f"{EXPERTS}.1.down_proj.weight"], 24 / 96
    want = gptq(w, part * moment[1] + (1 - part) * of_all, scaling="tensor")
    made, wanted = parts(load(tmp_path / "memory"), f"{EXPERTS}.1.down_proj")[0], want.codes.view(-1)
    assert (made == wanted).float().mean() > 0.99
    assert torch.equal(made, parts(load(tmp_path / "file"), f"{EXPERTS}.1.down_proj")[0])


# ---- resume


def test_resume_needs_the_same_calibration(source: Path, tmp_path: Path) -> None:
    known, path = Statistics(of_llama()), tmp_path / "statistics"
    known.save(path)
    options = Options(method="gptq", calibration=path)
    convert(source, tmp_path / "whole", options, jobs=2)
    convert(source, tmp_path / "dst", options)
    shard = sorted((tmp_path / "dst").glob("*.safetensors"))[1]
    shard.unlink()
    convert(source, tmp_path / "dst", options, resume=True, verify=True)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")
    for other, text in (
        (Options(method="search", calibration=path), "dst: was begun with method 'gptq', got 'search'"),
        (Options(calibration=known), "dst: was begun with calibration {'file': "),
        (Options(), "dst: was begun with method 'gptq', got 'four-over-six'"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            convert(source, tmp_path / "dst", other, resume=True)
    state = tmp_path / "dst" / "fp4gemm_convert.json"
    state.write_text(state.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    with pytest.raises(CheckpointError, match="was begun with device 'NVIDIA H200', got 'cpu'"):
        convert(source, tmp_path / "dst", options, resume=True)


# ---- refusals

PLAIN = InputStatistics(torch.tensor(5), torch.ones(HIDDEN))
Change = Callable[[dict[str, InputStatistics]], object]
Q = "model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[Change, str]] = {
    "missing": (lambda s: s.pop(Q), f"calibration: has no statistics of {Q}, must have those of every"),
    "k": (
        lambda s: s.update({Q: statistics(torch.Generator(), 96)}),
        f"calibration: mean_square of {Q} has shape (96,), must be (64,) for {Q}",
    ),
    "stack": (
        lambda s: s.update({Q: statistics(torch.Generator(), HIDDEN, 2)}),
        f"calibration: mean_square of {Q} has shape (2, 64), must be (64,)",
    ),
    "moment": (lambda s: s.update({Q: PLAIN}), f"calibration: {Q} has no second moment"),
    "stray": (
        lambda s: s.update({"model.layers.7.mlp": s[Q]}),
        "calibration: has statistics of 'model.layers.7.mlp', which is no module of the checkpoint, such as",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("is_file", [False, True], ids=["memory", "file"])
def test_statistics_that_do_not_fit(
    change: Change, text: str, is_file: bool, source: Path, tmp_path: Path
) -> None:
    known = of_llama()
    change(known)
    calibration: Any = Statistics(known)
    if is_file:
        calibration.save(tmp_path / "file")
        calibration = tmp_path / "file"
    with pytest.raises((CheckpointError, ValueError), match=re.escape(text)):
        plan_conversion(source, Options(method="gptq", calibration=calibration))


def test_statistics_of_other_experts(tmp_path: Path) -> None:
    source, known = save(tmp_path / "src", moe(), config=MOE), of_moe()
    known[f"{EXPERTS}.w2"] = statistics(torch.Generator(), INTERMEDIATE, 5)
    with pytest.raises(CheckpointError, match=rf"calibration: {EXPERTS}.w2 is of 5 experts, must be of 4"):
        plan_conversion(source, Options(calibration=Statistics(known)))
    del known[f"{EXPERTS}.w2"]
    text = rf"no statistics of {EXPERTS}.0.down_proj \(or {EXPERTS}.w2\)"
    with pytest.raises(CheckpointError, match=text):
        plan_conversion(source, Options(calibration=Statistics(known)))


S = Statistics({"0": InputStatistics(torch.tensor(1), torch.ones(32))})
BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "method": ({"method": "awq"}, ValueError, "method: got 'awq', must be 'round', 'four-over-six', 'sea"),
    "gptq": ({"method": "gptq"}, ValueError, "method: got 'gptq' without calibration, must be another"),
    "search": ({"method": "search"}, ValueError, "searched scales lose more than four over six"),
    "moments": (
        {"method": "gptq", "calibration": S}, ValueError,
        "calibration: 0 has no second moment (calibrate(..., second_moment=True) makes them), must have it",
    ),
    "round": (
        {"method": "round", "calibration": S}, ValueError, "with the method 'round', must be absent: only 's",
    ),
    "numerics": (
        {"numerics": "modelopt", "calibration": S}, ValueError, "with the numerics 'modelopt', must be absen",
    ),
    "numerics-method": (
        {"numerics": "llmcompressor", "method": "four-over-six"}, ValueError,
        "must be 'round' with numerics 'llmcompressor'",
    ),
    "mae": (
        {"method": "round", "four_over_six": "mae"}, ValueError,
        "four_over_six: got 'mae', must be absent with the method 'round'",
    ),
    "mse": (
        {"method": "gptq", "four_over_six": "mse", "calibration": "a text"}, ValueError,
        "four_over_six: got 'mse', must be absent with the method 'gptq'",
    ),
    "producer": ({"numerics": "nvidia", "calibration": S}, ValueError, "numerics: got 'nvidia', must be"),
    "none": (
        {"method": "four-over-six", "four_over_six": "none"}, ValueError, "must be 'mae' or 'mse' with the m",
    ),
    "type": ({"calibration": 3}, TypeError, "calibration: got 3 (int), must be statistics, a path or a text"),
    "no-file": ({"calibration": "statistics.safetensors"}, ValueError, "'statistics.safetensors' is no file"),
    "no-path": ({"calibration": Path("gone")}, ValueError, "calibration: gone cannot be read: No such file"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Options(**options)


def test_bad_files(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "statistics"
    for content, text in (
        (b"", "calibration: .*statistics is empty, must be a text"),
        (b"\xff\xfe\x00", "is neither statistics nor a text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            Options(calibration=path)
    path.write_text("int f() { return 0; }")  # { is where it is in a file of statistics
    assert isinstance(Options(calibration=path).calibration, Text)
    Statistics(of_llama()).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"^calibration: .*is not a whole safetensors file"):
        Options(calibration=path)
    with pytest.raises(ValueError, match=r"^calibration: .*is not a file of fp4gemm"):
        Options(calibration=source / "model-00001-of-00002.safetensors")


# ---- the command


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "statistics"
    Statistics(of_llama()).save(path)
    arguments = [str(source), str(tmp_path / "dst"), "--method", "gptq", "--calibration", str(path)]
    assert main(["convert", *arguments, "--dry-run"]) == 0
    assert f"method: gptq, calibrated by {path}" in capsys.readouterr().out
    assert main(["convert", *arguments, "--verify", "--report", str(tmp_path / "r.json")]) == 0
    assert "output error on the calibration: 0." in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["layers"][0]["output_error"] > 0
    convert(source, tmp_path / "api", Options(method="gptq", calibration=path))
    assert contents(tmp_path / "dst") == contents(tmp_path / "api")

    dst = str(tmp_path / "new")
    for wrong, text in (
        (["--method", "gptq"], "method: got 'gptq' without calibration"),
        (["--calibration", "gone.safetensors"], "calibration: 'gone.safetensors' is no file"),
        (["--calibration", str(path), "--calibration-tokens", "9"], "--calibration-tokens: got 9, must be"),
        (["--calibration", "a text", "--calibration-tokens", "0"], "--calibration-tokens: got 0, must be"),
        (["--calibration", "a text", "--calibration-tokens", "-1"], "--calibration-tokens: got -1, must be"),
        (["--calibration-tokens", "9"], "--calibration-tokens: got 9, must be 1 or more, with a text"),
        (
            ["--calibration", str(path), "--from", "modelopt", "--to", "fp4gemm"],
            "--calibration: got with --from",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", str(source), dst, *wrong])
        assert stopped.value.code == 2
        assert text in capsys.readouterr().err
    Statistics({Q: of_llama()[Q]}).save(path)
    assert main(["convert", str(source), dst, "--calibration", str(path)]) == 1
    assert "calibration: has no statistics of model.layers.0.self_attn.o_proj" in capsys.readouterr().err


def test_a_file_is_read_layer_by_layer(tmp_path: Path) -> None:
    known = of_moe()
    Statistics(known).save(tmp_path / "file")
    file = StatisticsFile(tmp_path / "file")
    assert set(file) == set(known)
    assert len(file) == len(known)
    assert file.has_moments
    name = f"{EXPERTS}.w13"
    assert file.about(name).second_moment.shape == (4, HIDDEN, HIDDEN)  # type: ignore[union-attr]
    one = file.read(name, 2)
    assert torch.equal(one.second_moment, known[name].second_moment[2])  # type: ignore[index]
    assert file.read(name, has_moment=False).second_moment is None
    linear = torch.nn.Linear(HIDDEN, 32)
    known = {"": statistics(torch.Generator(), HIDDEN)}
    Statistics({"0": known[""]}).save(tmp_path / "one")
    made = fp4gemm.models.quantize_model(
        torch.nn.Sequential(linear), calibration=StatisticsFile(tmp_path / "one"), report=lambda report: None
    )
    want = gptq(linear.weight.detach(), known[""].second_moment)
    assert torch.equal(made[0].weight_codes, want.codes)
