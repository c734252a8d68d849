"""examples/demo.py: its maths on small inputs, and its quick run on the real model (needs the demo extra)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fp4gemm
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import demo_measure  # noqa: E402
import smollm2  # noqa: E402

MISSING = demo.missing_packages()
needs_extra = pytest.mark.skipif(bool(MISSING), reason=f"demo extra not installed: {', '.join(MISSING)}")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- the maths --------------------------------------------------------------------------------------------


def test_mean_pool_ignores_padding() -> None:
    hidden = torch.tensor([[[3.0, 0.0], [5.0, 8.0], [99.0, -99.0]], [[0.0, 2.0], [7.0, 7.0], [7.0, 7.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.tensor([[2**-0.5, 2**-0.5], [0.0, 1.0]])  # means (4, 4) and (0, 2)
    torch.testing.assert_close(demo_measure.mean_pool(hidden, mask), expected)


def test_cosines_and_nearest() -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    b = torch.tensor([[5.0, 0.0], [0.0, -1.0], [0.0, 1.0]])
    torch.testing.assert_close(demo_measure.cosines(a, b), torch.tensor([1.0, -1.0, 2**-0.5]))
    rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0]]))
    assert demo_measure.nearest(rows).tolist() == [1, 0, 3, 2]


def test_token_errors_leave_the_bias_out() -> None:
    exact, bias = torch.tensor([[103.0, 104.0], [100.0, 101.0]]), torch.tensor([100.0, 100.0])
    y = exact + torch.tensor([[0.5, 0.0], [0.0, -0.5]])
    torch.testing.assert_close(demo_measure.token_errors(y, exact, bias), torch.tensor([0.1, 0.5]))


def small_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64)).eval()


def test_outliers_do_not_change_what_fp32_computes() -> None:
    model, x, positions = small_model(), torch.randn(3, 5, 64), torch.tensor([[0, 0], [2, 4]])
    with torch.no_grad():
        expected, seen = model(x), []
        with demo_measure.outliers(model, positions, 1024.0):
            model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[0][positions[:, 0], positions[:, 1]], 1024 * x[[0, 2], [0, 4]])
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in (model[0], model[2])]
    assert hooks == [1, 0]  # only this test's own is left


@torch.no_grad()
def test_outliers_move_other_tokens_per_tensor_only() -> None:
    model, x, positions = small_model(), torch.randn(3, 5, 64), torch.tensor([[1, 2]])
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 2] = False
    changes = {}
    for scaling in ("per-token", "per-tensor"):
        quantized = fp4gemm.models.quantize_model(model, activations=scaling, inplace=False)
        tame = quantized(x)[others]
        with demo_measure.outliers(quantized, positions, 2.0**20):
            changes[scaling] = float((quantized(x)[others] - tame).norm() / tame.norm())
    assert changes["per-token"] == 0.0
    assert changes["per-tensor"] > 0.3


def test_first_tokens_are_spread_over_the_page() -> None:
    page = demo_measure.Page(torch.zeros(40, 7, dtype=torch.int64), torch.ones(40, 7, dtype=torch.int64))
    assert demo_measure.first_tokens(page, 4).tolist() == [[0, 0], [10, 0], [20, 0], [30, 0]]


def test_rows_of_q_and_k_are_in_the_order_of_transformers() -> None:
    """GGUF's converter stores row j of the first half of a head at 2 j, and that of the second at 2 j + 1."""
    heads, half, k = 3, 4, 5
    weight = torch.randn(heads, 2, half, k)
    stored = torch.empty(heads, 2 * half, k)
    stored[:, 0::2], stored[:, 1::2] = weight[:, 0], weight[:, 1]
    assert torch.equal(smollm2.unpermuted(stored.view(-1, k), heads), weight.reshape(-1, k))


def test_names_of_transformers() -> None:
    names = {
        "blk.3.ffn_up.weight": "model.layers.3.mlp.up_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    assert {name: smollm2.transformers_name(name) for name in names} == names


@needs_extra
def test_mean_nll_is_the_loss_of_transformers() -> None:
    import demo_language
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(64, (1, 20))
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss)
    assert demo_language.mean_nll(model, ids) == pytest.approx(expected, rel=1e-5)
    assert demo_language.weight_bytes(model) == 4 * (4 * 32 * 32 + 3 * 32 * 64)


# ---- the run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return (EXAMPLES / "sentences.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def results(sentences: list[str]) -> Iterator[demo.Results]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices; more threads only wait for each other on a busy machine
    try:
        yield demo.measure(sentences[: demo.QUICK_SENTENCES], torch.device("cpu"), quick=True)
    finally:
        torch.set_num_threads(threads)


def test_the_page_holds_forty_different_sentences(sentences: list[str]) -> None:
    assert len(set(sentences)) == len(sentences) == 40
    assert all(4 <= len(sentence.split()) <= 25 for sentence in sentences)


@needs_extra
def test_fp32_embedding_is_the_published_one() -> None:
    model, page = demo.load(
        ["This is an example sentence", "Each sentence is converted"], torch.device("cpu")
    )
    first = demo_measure.embed(model, page)[0, :5]  # as the model's users print it
    torch.testing.assert_close(
        first, torch.tensor([0.0677, 0.0635, 0.0487, 0.0793, 0.0374]), rtol=0, atol=1e-4
    )


@needs_extra
def test_similarity_figures(results: demo.Results) -> None:
    exact, tensor, row = results.variants
    assert (results.num_sentences, results.num_layers) == (demo.QUICK_SENTENCES, 36)
    assert exact.cosines.min() > 0.99999
    assert exact.same_nearest == results.num_sentences
    for line in (tensor, row):
        # Two 4-bit casts in each of 36 layers in a row: far from fp32 bits, close in direction.
        assert 0.95 < line.cosines.mean() < 0.9999
        assert line.cosines.min() > 0.9
        assert line.seconds > 0
        assert 6 < exact.weight_bytes / line.weight_bytes < 8  # 32 bits against 4 + 8/16, amax and fp32 bias
    assert abs(float(row.cosines.mean() - tensor.cosines.mean())) < 0.01  # tame activations


@needs_extra
def test_outlier_figures(results: demo.Results) -> None:
    first, last = demo.QUICK_FACTORS[0], demo.QUICK_FACTORS[-1]
    tensor, row = (
        [demo.by(results, scaling, factor) for factor in (first, last)]
        for scaling in ("per-tensor", "per-token")
    )
    assert row[0].layer_errors == row[1].layer_errors
    assert torch.equal(row[0].cosines, row[1].cosines)
    assert len(row[0].cosines) == results.num_sentences - demo.NUM_OUTLIERS
    assert 0.05 < row[0].error < 0.2
    assert tensor[1].error > 1.2 * tensor[0].error
    assert tensor[1].lost > 2 * row[1].lost
    assert tensor[1].cosines.mean() < row[1].cosines.mean() - 0.03


@needs_extra
def test_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real weights, converted and loaded; the perplexity says that they are in the right places."""
    import demo_language

    names = ("W4A16, four over six", "W4A4, rounded")
    chosen = {name: demo_language.CHECKPOINTS[name] for name in names}
    monkeypatch.setattr(demo_language, "CHECKPOINTS", chosen)
    steps: list[str] = []
    cpu = torch.device("cpu")
    result = demo_language.measure(tmp_path, cpu, quick=True, step=steps.append)
    assert len(steps) == demo_language.num_steps(cpu)
    assert [line.name for line in result.lines] == ["bf16", *names]
    exact, weights, both = result.lines
    assert 1.0 < exact.nll < 4.5  # a wrong tensor gives 8 and more
    assert exact.nll < weights.nll < both.nll < exact.nll + 1.5
    for line in (weights, both):
        assert exact.weight_bytes / line.weight_bytes == pytest.approx(16 / 4.5, rel=0.01)
    assert len(result.answer) > 3
    assert not list(tmp_path.glob("*.part"))
    assert smollm2.checkpoint(tmp_path / "bf16") == tmp_path / "bf16"  # it is there, and is not made again


@needs_extra
def test_main_prints_the_figures_and_writes_the_picture(
    results: demo.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo_language

    lines = [demo_language.Line("bf16", 2.0, 3 << 20, 0.5), demo_language.Line("W4A4", 2.25, 1 << 20, 0.25)]
    language = demo_language.Language("CPU", 512, lines, "A heap is a tree")
    monkeypatch.setattr(demo_language, "measure", lambda *_, **__: language)
    monkeypatch.setattr(demo, "measure", lambda *_, **__: results)
    picture = tmp_path / "new" / "error.png"
    assert demo.main(["--quick", "--device", "cpu", "--out", str(picture)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "W4A4 │ 9.49 │ +0.250 │ 1.0 │ 0.25" in text
    assert "A heap is a tree ..." in text
    _, tensor, row = results.variants
    for line in (tensor, row):
        assert f"{line.name} │ {line.cosines.mean():.5f} │ {line.cosines.min():.5f}" in text
    for sentence in (*demo.verdict(results), *demo.next_steps(Path("build/smollm2"), torch.device("cpu"))):
        assert " ".join(sentence.split()) in text
    lost = demo.by(results, "per-tensor", demo.QUICK_FACTORS[-1]).lost
    assert f"per tensor: lost tokens {demo.by(results, 'per-tensor', 1.0).lost:.1%} -> {lost:.1%}" in text
    data = picture.read_bytes()
    assert data.startswith(PNG_SIGNATURE)
    assert len(data) > 20_000
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [1960, 784]  # width, height


def test_the_next_steps_are_commands_of_this_checkout() -> None:
    for device, last in (("cpu", "make docs"), ("cuda", "-m bench report --quick")):
        convert, train, third = demo.next_steps(Path("build/smollm2"), torch.device(device))
        assert convert.endswith("-m fp4gemm convert build/smollm2/bf16 build/smollm2/mine")
        assert train.endswith(" examples/train_moe.py")
        assert third.endswith(last)
    assert (EXAMPLES / "train_moe.py").is_file()


@needs_extra
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "nowhere"], "demo: device: got 'nowhere'"),
        (["--device", "meta"], "demo: --device: got meta, must be a device that fp4gemm runs on"),
        (["--device", "cpu", "--sentences", "absent.txt"], "absent.txt"),
    ],
    ids=["no-device", "wrong-device", "no-file"],
)
def test_bad_options_are_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(arguments) == 1
    assert text in capsys.readouterr().err


@needs_extra
def test_one_sentence_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.txt"
    page.write_text("\nAll alone.\n\n", encoding="utf-8")
    assert demo.main(["--device", "cpu", "--sentences", str(page)]) == 1
    assert "has 1, must have at least 2" in capsys.readouterr().err


def test_missing_extra_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NEEDED", ("torch", "a_package_that_is_not_there"))
    assert demo.main([]) == 1
    error = capsys.readouterr().err
    assert "a_package_that_is_not_there not installed" in error
    assert "make demo" in error
