"""examples/train_moe.py: its corpus, arms and model, tiny runs, resuming, and its report."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import assert_bits

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("rich", reason="the example needs rich")
for folder in (ROOT, ROOT / "examples"):
    sys.path.insert(0, str(folder))

import train_moe  # noqa: E402
import train_moe_arms as arms  # noqa: E402
import train_moe_corpus as corpora  # noqa: E402
import train_moe_loop  # noqa: E402
from fp4gemm import training  # noqa: E402
from train_moe_loop import Run  # noqa: E402
from train_moe_model import (  # noqa: E402
    FP8Linear,
    LanguageModel,
    Size,
    add_outliers,
    in_bf16,
    initialize,
    quantized_layers,
)

from bench.baselines import fp8  # noqa: E402
from bench.report import training as report  # noqa: E402

CPU = torch.device("cpu")
TINY = Size(32, 1, 2, 4, 2, 32, 32, 4, 12, 2e-2, 1 << 20)
DENSE = replace(TINY, experts=0, top_k=0, expert_dim=64)
WORDS = b"the quick brown fox jumps over the lazy dog and runs through seven open doors "


@pytest.fixture(autouse=True)
def _few_held_out_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_moe_loop, "HELD_OUT_BATCHES", 2)


@pytest.fixture
def corpus() -> corpora.Corpus:
    tokens = torch.frombuffer(bytearray(WORDS * 80), dtype=torch.uint8).int()
    return corpora.Corpus(tokens, tokens[:2000], 256, "bytes", 1, len(tokens), 1.0, "words")


def run_of(name: str, corpus: corpora.Corpus, size: Size = TINY, seed: int = 0) -> Run:
    return Run(size, corpus, arms.arm(name, seed), seed, CPU, torch.float32)


def trained(run: Run, until: int | None = None) -> Run:
    run.train(lambda: until is not None and run.step_number >= until, lambda _: None)
    return run


# ---- the text


def written(folder: Path, count: int = 200) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"file{i}.py").write_bytes(WORDS * 2 + str(i).encode())
    (folder / "copy.txt").write_bytes(WORDS * 2 + b"0")
    (folder / "data.json").write_bytes(b"left out")
    (folder / "latin.txt").write_bytes(b"\xe4 is not UTF-8")
    (folder / "fp4gemm").mkdir()
    (folder / "fp4gemm" / "own.py").write_bytes(b"left out")
    return folder


def test_texts(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    train, held_out = corpora.texts([folder, folder], 1 << 20)
    assert sorted(train + held_out) == sorted(WORDS * 2 + str(i).encode() for i in range(200))
    assert 1 <= len(held_out) <= 40
    some, some_held_out = corpora.texts([folder], 10_000)
    assert sum(map(len, some + some_held_out)) <= 10_000
    assert train[: len(some)] == some


def test_the_corpus_does_not_depend_on_the_place_of_files(tmp_path: Path) -> None:
    a = corpora.load("bytes", 1 << 20, folders=[written(tmp_path / "a", 600)])
    b = corpora.load("bytes", 1 << 20, folders=[written(tmp_path / "b" / "c", 600)])
    assert a.checksum == b.checksum
    assert (a.num_files, a.vocab, a.bytes_per_token) == (600, 256, pytest.approx(1, abs=0.01))
    assert bytes(a.train[: len(WORDS)].tolist()) == WORDS
    limited = corpora.load("bytes", 85_000, folders=[tmp_path / "a"])
    assert limited.checksum != a.checksum


def test_the_corpus_is_kept(tmp_path: Path) -> None:
    folder, cache = written(tmp_path / "a", 600), tmp_path / "kept" / "corpus.pt"
    first = corpora.load("bytes", 1 << 20, cache, [folder])
    again = corpora.load("bytes", 1 << 20, cache, [tmp_path / "nothing"])
    assert_bits(first.train, again.train)
    assert first.checksum == again.checksum
    with pytest.raises(ValueError, match="holds another corpus"):
        corpora.load("bytes", 1 << 19, cache, [folder])
    with pytest.raises(ValueError, match="0 bytes were found and 0 tokens held out, must be 4096"):
        corpora.load("bytes", 1 << 20, folders=[tmp_path / "nothing"])


def test_bpe(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    found = corpora.load("bpe", 1 << 20, folders=[written(tmp_path / "a", 4000)])
    assert found.vocab == 8192
    assert found.bytes_per_token > 4
    assert found.train.dtype is torch.int32
    assert int(found.train.max()) < 8192
    again = corpora.load("bpe", 1 << 20, folders=[tmp_path / "a"])
    assert found.checksum == again.checksum


def test_batches() -> None:
    batches = corpora.Batches(torch.arange(100, dtype=torch.int32), 10, 6, CPU)
    ids, targets = batches.at(0, 3)
    assert ids.shape == targets.shape == (6, 10)
    assert_bits(targets, ids + 1)
    assert_bits(ids, ids[:, :1] + torch.arange(10))
    assert_bits(ids, batches.at(0, 3)[0])
    assert not torch.equal(ids, batches.at(0, 4)[0])
    assert not torch.equal(ids, batches.at(1, 3)[0])
    with pytest.raises(ValueError, match="there are 10, must be more than a window of 10"):
        corpora.Batches(torch.arange(10), 10, 1, CPU)


# ---- arms and model


def test_every_arm_is_a_recipe() -> None:
    names = arms.arm_names("all")
    assert names[0] == "bf16"
    assert len(names) == len(set(names)) == len(training.PRESETS) + len(arms.VARIANTS)
    for name in arms.VARIANTS:
        preset = training.PRESETS[name.split("+")[0]]
        changes_model_only = set(name.split("+")[1:]) <= set(arms.MODEL_CHANGES)
        assert (arms.arm(name).recipe == preset) == changes_model_only, name
    assert arms.arm("nvidia", 5).recipe.seed == 5


def test_changes() -> None:
    def recipe(name: str) -> training.Recipe:
        return arms.arm(name).recipe

    nvidia = training.PRESETS["nvidia"]
    assert recipe("nvidia+no_rht+no_sr").x_t == replace(nvidia.x_t, hadamard=None)
    assert recipe("nvidia+no_rht") == training.PRESETS["nvidia_no_rht"]
    assert recipe("nvidia+no_sr") == training.PRESETS["nvidia_no_sr"]
    assert recipe("nvidia+forward_only") == training.PRESETS["bf16_backward"]
    per_token = training.PRESETS["per_token"]
    assert recipe("per_token+wgrad_bf16") == replace(per_token, dy_t=None, x_t=None)
    assert recipe("nvidia+backward_only") == training.PRESETS["bf16_forward"]
    assert recipe("per_token+backward_only").w_t.source == "original"
    assert recipe("per_token+w_t_original").w_t == training.Cast()
    assert recipe("per_token+2d").w == recipe("per_token+2d").w_t == nvidia.w
    rows = "nvidia+x_rows+w_rows+w_t_rowwise+dy_rows+wgrad_rows+rht"
    assert recipe(rows) == per_token
    blocks = arms.arm("nvidia+last_bf16").recipes(6)
    assert blocks == [nvidia] * 5 + [training.PRESETS["bf16"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fp8", "'fp8' begins with 'fp8', must begin with one of bf16, nvidia"),
        ("nvidia+fast", "has the change 'fast', must be one of rht, no_rht"),
        ("te_per_token+2d", "is refused: block: got (16, 16)"),
        ("nvidia+fp8", "'nvidia+fp8' has fp8 beside 'nvidia', must have it beside 'bf16'"),
    ],
)
def test_wrong_arms(name: str, says: str) -> None:
    with pytest.raises(ValueError, match="--arms") as error:
        arms.arm_names(f"bf16,{name}")
    assert says in str(error.value)


def test_arms_begin_equal_and_routers_stay_float(corpus: corpora.Corpus) -> None:
    a, b, c = run_of("bf16", corpus), run_of("nvidia", corpus), run_of("nvidia", corpus, seed=1)
    for (name, p), q, r in zip(a.model.named_parameters(), b.model.parameters(), c.model.parameters(),
                               strict=True):  # fmt: skip
        assert_bits(p.detach(), q.detach())
        assert p.dim() == 1 or not torch.equal(p, r), name
    assert_bits(a.batches.at(0, 7)[0], b.batches.at(0, 7)[0])
    names = {name.rsplit(".", 1)[-1] for name, _ in quantized_layers(b.model)}
    assert names == {"qkv", "out", "w1", "w2", "w3"}


def test_outliers_do_not_change_bf16(corpus: corpora.Corpus) -> None:
    """A power of two is exact; with one amax for a tensor it costs the other rows precision."""
    ids, targets = corpora.Batches(corpus.train, 32, 4, CPU).at(0, 0)
    losses = {}
    for recipe in ("bf16", "te_per_token", "nvidia"):
        model = LanguageModel(TINY, 256, [training.PRESETS[recipe]])
        initialize(model, 0)
        model.eval()
        with torch.no_grad():
            plain = model(ids, targets)
            add_outliers(model)
            losses[recipe] = (float(plain), float(model(ids, targets)))
    assert losses["bf16"][0] == losses["bf16"][1]
    assert losses["te_per_token"][0] == losses["te_per_token"][1]
    assert losses["nvidia"][0] != losses["nvidia"][1]


# ---- training


@pytest.mark.parametrize("name", arms.GROUPS["main"])
def test_the_loss_falls(name: str, corpus: corpora.Corpus) -> None:
    run = trained(run_of(name, corpus))
    result = run.result()
    assert result["losses"][0] > 5
    assert result["loss"] < result["losses"][0] - 1.5
    assert [step for step, _ in result["held_out"]] == [2, 4, 6, 8, 10, 12]
    cosines = [value for part in result["cosines"].values() for value in part]
    assert len(cosines) == 5
    low, high = (1, 1) if name == "bf16" else (0.7, 1)
    assert low <= min(cosines) <= max(cosines) <= high, cosines
    assert all(block.mlp.expert_bias.any() for block in run.model.blocks)


@pytest.mark.parametrize("name", ["bf16", "nvidia"])
def test_resumed_equals_uninterrupted(name: str, corpus: corpora.Corpus, tmp_path: Path) -> None:
    whole = trained(run_of(name, corpus))
    trained(run_of(name, corpus), until=5).save(tmp_path / "run.pt")
    torch.manual_seed(99)  # whatever happened in between
    resumed = run_of(name, corpus)
    resumed.load(tmp_path / "run.pt")
    assert resumed.step_number == 5
    trained(resumed)
    assert_bits(resumed.losses, whole.losses)
    assert resumed.evaluations == whole.evaluations
    for key, value in whole.model.state_dict().items():
        assert_bits(resumed.model.state_dict()[key], value)
    with pytest.raises(ValueError, match="holds the run"):
        run_of(name, corpus, seed=1).load(tmp_path / "run.pt")


# ---- FP8


def test_the_products_of_fp8(device: torch.device) -> None:
    """y, dx and dW are products of e4m3 numbers with a scale for each row of each of the six operands."""
    gen = torch.Generator().manual_seed(0)
    layer = FP8Linear(96, 64, bias=False, recipe="bf16", device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 64, 96, generator=gen).to(device, torch.bfloat16).requires_grad_()
    dy = torch.randn(2, 64, 64, generator=gen).to(device, torch.bfloat16)
    y = layer(x)
    y.backward(dy)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a_q, b_q = (fp8.formula(t.flatten(0, -2)).dequantize().double() for t in (a, b))
        return a_q @ b_q.t()

    rows, dy_rows, weight = x.detach().flatten(0, 1), dy.flatten(0, 1), layer.weight.detach()
    for name, got, a, b in (
        ("y", y, rows, weight),
        ("dx", x.grad, dy_rows, weight.t()),
        ("dW", layer.weight.grad, dy_rows.t(), rows.t()),
    ):
        want = product(a, b)
        assert (got.double().view_as(want) - want).norm() < 4e-3 * want.norm(), name  # roundings to bf16
        plain = a.double() @ b.double().t()
        assert (want - plain).norm() > 1e-2 * plain.norm(), name


def test_arms_of_fp8(corpus: corpora.Corpus) -> None:
    run = run_of("bf16+fp8", corpus, DENSE)
    assert all(isinstance(layer, FP8Linear) for _, layer in quantized_layers(run.model))
    own = run.gradients()
    with in_bf16(run.model):
        exact = run.gradients()
    plain = run_of("bf16", corpus, DENSE).gradients()
    for name, gradient in own.items():
        assert_bits(exact[name], plain[name])
        assert not torch.equal(gradient, exact[name]), name
    cosines = [value for part in trained(run).cosines().values() for value in part]
    assert 0.9 < min(cosines) < max(cosines) < 1
    with pytest.raises(ValueError, match=r"fp8 needs a size without experts, as dense, but blocks\.0\.mlp"):
        run_of("bf16+fp8", corpus)


# ---- branches


def test_a_branch_of_bf16_is_the_run_in_one_piece(corpus: corpora.Corpus, tmp_path: Path) -> None:
    whole, trunk = trained(run_of("bf16", corpus, DENSE)), run_of("bf16", corpus, DENSE)
    trunk.train(lambda: False, lambda _: None, 5)
    trunk.save(tmp_path / "trunk.pt")
    branch, other = (run_of(name, corpus, DENSE) for name in ("bf16", "per_token"))
    for run in (branch, other):
        run.branch(tmp_path / "trunk.pt")
        assert (run.step_number, run.first_step, run.seconds) == (5, 5, 0)
        trained(run)
    assert_bits(branch.losses, whole.losses)
    assert_bits(other.losses[:5], whole.losses[:5])
    assert not torch.equal(other.losses[5:], whole.losses[5:])
    assert branch.evaluations == whole.evaluations
    with pytest.raises(ValueError, match="holds the run"):
        run_of("bf16", corpus, DENSE, seed=1).branch(tmp_path / "trunk.pt")


def test_jitter(corpus: corpora.Corpus, tmp_path: Path) -> None:
    """Every weight moves by half a step of bf16 at most, from the branch too, and by another one per seed."""
    trunk = run_of("bf16", corpus, DENSE)
    trunk.train(lambda: False, lambda _: None, 2)
    trunk.save(tmp_path / "trunk.pt")
    for begins_at_trunk in (False, True):
        plain, moved = (run_of(name, corpus, DENSE) for name in ("bf16", "bf16+jittered"))
        if begins_at_trunk:
            for run in (plain, moved):
                run.branch(tmp_path / "trunk.pt")
        pairs = zip(plain.model.parameters(), moved.model.parameters(), moved.optimizer.masters, strict=True)
        for a, b, master in pairs:
            change = (b.detach() / a.detach() - 1).abs()
            assert 0.9 * 2**-9 < change.max() < 1.01 * 2**-9
            assert change.mean() == pytest.approx(2**-10, rel=0.3)
            assert_bits(b.detach(), master)


def rows_of(arm: str, losses: list[float], first: float = 9.0) -> list[dict[str, Any]]:
    """A row for each seed whose last 50 steps have this loss."""
    facts = {"held_out": [], "cosines": {"qkv": [1.0]}, "seconds": 1.0}
    return [
        {"arm": arm, "seed": seed, "loss": loss, "losses": [first] * 10 + [loss] * 50, **facts}
        for seed, loss in enumerate(losses)
    ]


def test_a_ranking_of_two_runs(tmp_path: Path) -> None:
    """Seeds on another corpus, behind a header of their own, are compared among themselves."""
    facts = dict.fromkeys((*report.SAME, "date", "revision"), "?")
    header = facts | {"parameters": 0, "steps": 2, "tokens_per_step": 1, "corpus_bytes": 0, "branch": 1}
    other = header | {"corpus": "another", "revision": "later"}

    def write(path: Path, *parts: tuple[dict[str, object], list[dict[str, object]]]) -> Path:
        lines = [line for found, rows in parts for line in ({"bench": "training", "header": found}, *rows)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def rows(seed: int, scale: float) -> list[dict[str, object]]:
        made = [*rows_of("bf16", [scale]), *rows_of("mxfp8", [scale * 1.01])]
        return [{"bench": "training", **row, "seed": seed} for row in made]

    both = write(tmp_path / "both.jsonl", (header, rows(0, 2.0)), (other, [*rows(1, 4.0), *rows(2, 8.0)]))
    results = report.Results(both)
    assert report.paired(results.rows, "mxfp8", "bf16").seeds == 3
    text = " ".join(report.ranking(results).split())
    assert "Of another run, on the corpus another (0 MB) at revision later: seeds 1, 2." in text
    with pytest.raises(ValueError, match="line 4 is a second header, must be in a ranking"):
        report.Results(both, header)
    with pytest.raises(ValueError, match="line 4 is a second header, must be in a ranking"):
        report.Results(
            write(tmp_path / "a", (header | {"branch": None}, rows(0, 2.0)), (other, rows(1, 4.0)))
        )
    with pytest.raises(ValueError, match="line 4 has steps 3, must be 2 as in the first line"):
        report.Results(write(tmp_path / "b", (header, rows(0, 2.0)), (other | {"steps": 3}, rows(1, 4.0))))


def test_ranking(tmp_path: Path) -> None:
    header = {
        **dict.fromkeys(("size", "corpus", "date", "torch", "revision", "device", "tokenizer", "dtype"), "?"),
        "parameters": 0,
        "steps": 60,
        "tokens_per_step": 1,
        "corpus_bytes": 0,
        "branch": 10,
    }
    results = report.Results(tmp_path / "r.jsonl", header)
    base = [2.0, 4.0, 8.0]
    results.rows = [
        *rows_of("bf16", base),
        *rows_of("bf16+jittered", [x * (1 + d) for x, d in zip(base, (0.002, -0.001, 0.0), strict=True)]),
        *rows_of("nvidia", [x * 1.01 for x in base], first=1.0),
        *rows_of("mxfp8", [x * (1 + d) for x, d in zip(base, (0.001, 0.002, 0.003), strict=True)]),
        *rows_of("per_token", [2.03]),
    ]
    interval = report.paired(results.rows, "mxfp8", "bf16")
    assert interval == (pytest.approx(0.2), pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-4), 3)
    assert report.paired(results.rows, "nvidia", "mxfp8").seeds == 3
    assert report.paired(results.rows, "te_per_token", "bf16") is None
    text = report.ranking(results)
    assert "| nvidia | 3 | 4.7133 | +1.000 ± 0.000 | yes |" in text
    assert "| mxfp8 | 3 | 4.6780 | +0.200 ± 0.248 | no |" in text
    assert "| per_token | 1 | 2.0300 | +1.500 | no |" in text  # one seed has no interval
    assert "| bf16+jittered | 3 | 4.6667 | +0.033 ± 0.379 |  |" in text
    told = " ".join(text.split())
    assert "The nulls, in percent: bf16+jittered minus bf16 +0.033 ± 0.379." in told
    assert "can be told apart, in percent: mxfp8 minus nvidia -0.792 ± 0.246." in told
    assert "cannot be told apart, in percent: per_token minus nvidia +0.495; per_token minus mxfp8" in told


def test_an_effect_within_the_null_is_not_told() -> None:
    null = report.Interval(0.1, 0.2, 3)
    assert report.is_told(report.Interval(0.5, 0.1, 3), [null])
    assert report.is_told(report.Interval(-0.5, 0.1, 3), [null])
    assert not report.is_told(report.Interval(0.35, 0.1, 3), [null])
    assert not report.is_told(report.Interval(0.5, 0.1, 3), [null, report.Interval(0.0, 0.4, 3)])
    assert not report.is_told(report.Interval(0.5, 0.1, 3), [])


# ---- the command


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch, corpus: corpora.Corpus) -> None:
    monkeypatch.setitem(train_moe.SIZES, "tiny", TINY)
    monkeypatch.setattr(corpora, "load", lambda *_: corpus)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def time_is_up_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock stops every run."""
    with monkeypatch.context() as patch:
        step = Run.step

        def slow(run: Run) -> None:
            step(run)
            if run.step_number == 2:
                patch.setattr(train_moe.time, "monotonic", lambda: float("inf"))

        patch.setattr(Run, "step", slow)
        yield


def command(out: Path, *more: str) -> int:
    return train_moe.main(["--size", "tiny", "--device", "cpu", "--out", str(out), *more])


@pytest.mark.usefixtures("small_world")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, readme, picture = tmp_path / "runs" / "tiny.jsonl", tmp_path / "R.md", tmp_path / "p.png"
    readme.write_text("a\n<!-- bench training: begin -->\n<!-- bench training: end -->\nb\n")
    runs = ("--arms", "bf16,te_per_token", "--seeds", "0,1", "--steps", "3")
    assert command(out, *runs, "--time-limit", "1e-9") == train_moe.INCOMPLETE
    assert not out.exists()
    more = ("--resume", "--picture", str(picture), "--readme", str(readme))
    assert command(out, *runs, "--checkpoint-every", "1", *more) == 0
    assert list(out.parent.rglob("*.pt")) == []
    printed = capsys.readouterr().out
    assert "corpus   1 files" in printed
    assert "4 runs, 4 to do" in printed
    assert "stopped before bf16, seed 0" in printed
    for arm in ("bf16", "te_per_token"):
        assert re.search(
            rf"{arm}, seed 1: step 3 of 3, training loss \d\.\d+, held out \d\.\d+, \d+ s,", printed
        )
    results = report.Results(out)
    assert [(row["arm"], row["seed"]) for row in results.rows] == [
        ("bf16", 0), ("te_per_token", 0), ("bf16", 1), ("te_per_token", 1)
    ]  # fmt: skip
    assert results.header["corpus"] == "words"
    assert results.header["dtype"] == "float32"
    losses = {(row["arm"], row["seed"]): row["loss"] for row in results.rows}
    want = [100 * (losses["te_per_token", seed] / losses["bf16", seed] - 1) for seed in (0, 1)]
    assert report.gaps(results.rows, "te_per_token") == pytest.approx(want)
    text = readme.read_text()
    assert text.startswith("a\n<!-- bench training: begin -->\nSize tiny: 0.0M parameters, 3 steps of 128")
    assert f"| te_per_token | 2 | {(losses['te_per_token', 0] + losses['te_per_token', 1]) / 2:.4f} |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = out.read_text()
    assert command(out, "--report") == 0
    assert command(out, *runs, "--resume") == 0
    assert out.read_text() == before


@pytest.mark.usefixtures("small_world")
def test_a_ranking_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock stops the first run ahead of the branch; the rest has the losses of a run in one piece."""
    monkeypatch.setitem(train_moe.SIZES, "tiny", DENSE)
    whole, parts, readme = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", tmp_path / "R.md"
    readme.write_text("<!-- bench training ranking: begin -->\n<!-- bench training ranking: end -->\n")
    arguments = ("--arms", "bf16,bf16+jittered,bf16+fp8", "--steps", "4", "--branch", "3", "--seeds", "0,1")
    assert command(whole, *arguments, "--readme", str(readme)) == 0
    assert "All arms begin with the state of bf16 at step 3." in " ".join(readme.read_text().split())
    printed = capsys.readouterr().out
    assert "branch   every arm goes on from the state of bf16 at step 3" in printed
    assert "Recipes that cannot be told apart, in percent: none." in printed
    with time_is_up_after_two_steps(monkeypatch):
        assert command(parts, *arguments, "--time-limit", "1000") == train_moe.INCOMPLETE
    assert [path.name for path in tmp_path.rglob("parts/*.pt")] == ["branch-3-0.pt"]
    assert command(parts, *arguments, "--resume") == 0
    printed = capsys.readouterr().out
    assert "bf16, seed 0: goes on at step 2 of" in printed
    for a, b in zip(report.Results(whole).rows, report.Results(parts).rows, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert command(parts, *arguments[:-4], "--seeds", "0", "--resume") == 1
    assert "holds results with branch 3, must be None" in capsys.readouterr().err


@pytest.mark.usefixtures("small_world")
def test_a_time_limit_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock stops the run after two steps; the rest has the losses of a run in one piece."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    arguments = ("--arms", "nvidia", "--steps", "4")
    assert command(whole, *arguments) == 0
    with time_is_up_after_two_steps(monkeypatch):
        assert command(parts, *arguments, "--time-limit", "1000") == train_moe.INCOMPLETE
    saved = list(tmp_path.rglob("nvidia-0.pt"))
    assert len(saved) == 1
    assert torch.load(saved[0], weights_only=True)["step_number"] == 2
    assert command(parts, *arguments, "--resume") == 0
    printed = capsys.readouterr().out
    assert f"nvidia, seed 0: stopped at step 2, saved in {saved[0]}" in printed
    assert f"nvidia, seed 0: goes on at step 2 of {saved[0]}" in printed
    a, b = (report.Results(path).rows[0] for path in (whole, parts))
    assert {**a, "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.usefixtures("small_world")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arms", "fp8"], "--arms: 'fp8' begins with"),
        (["--seeds", "1,x"], "--seeds: got '1,x', must be different numbers"),
        (["--seeds", "1,1"], "--seeds: got '1,1', must be different numbers"),
        (["--steps", "0"], "--steps: got 0, must be at least 1"),
        (["--steps", "9", "--branch", "9"], "--branch: got 9, must be from 1 to 8, below the steps"),
        (["--branch", "0"], "--branch: got 0, must be from 1 to 11"),
        (["--arms", "bf16,bf16+fp8"], "--arms: fp8 needs a size without experts"),
        (["--time-limit", "0"], "--time-limit: got 0.0, must be positive"),
        (["--checkpoint-every", "-1"], "--checkpoint-every: got -1, must be at least 0"),
        (["--device", "tpu"], "tpu"),
        (["--report"], "is missing, must be a results file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    assert command(tmp_path / "out.jsonl", *arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("small_world")
def test_arms_are_checked_before_the_corpus_is_read(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> NoReturn:
        pytest.fail("the corpus was read")

    def multiply(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("torch._scaled_mm is only supported on some devices\nand so on")

    monkeypatch.setattr(corpora, "load", load)
    assert command(tmp_path / "out.jsonl", "--arms", "bf16+fp8") == 1
    assert "--arms: fp8 needs a size without experts" in capsys.readouterr().err
    monkeypatch.setattr(fp8, "multiply", multiply)
    assert command(tmp_path / "out.jsonl", "--size", "dense", "--arms", "bf16+fp8") == 1
    assert capsys.readouterr().err == (
        "train_moe: --arms: fp8 needs a device with products in FP8, but on cpu: torch._scaled_mm is only "
        "supported on some devices\n"
    )


@pytest.mark.usefixtures("small_world")
def test_results_of_another_run_are_kept(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"bench": "training", "header": {"size": "small"}}) + "\n")
    assert command(out) == 1
    assert "exists, must be another file, or give --resume" in capsys.readouterr().err
    assert command(out, "--resume") == 1
    assert "holds results with size 'small', must be 'tiny'" in capsys.readouterr().err
    out.write_text("{}\n")
    assert command(out, "--resume") == 1
    assert "line 1 is not a result of train_moe.py" in capsys.readouterr().err
    assert out.read_text() == "{}\n"


def test_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(train_moe, "NEEDED", (*train_moe.NEEDED, "no_such_package"))
    assert train_moe.main([]) == 2
    assert "pip install no_such_package" in capsys.readouterr().out
