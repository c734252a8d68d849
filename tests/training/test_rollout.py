"""examples/rollout.py: two processes, the log-probabilities of a trainer and of a rollout engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the example needs transformers 5", allow_module_level=True)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

import rollout  # noqa: E402
import rollout_engine  # noqa: E402
import rollout_models  # noqa: E402
import rollout_parts  # noqa: E402
from fp4gemm import training  # noqa: E402

CPU = torch.device("cpu")
SIZES = ["--steps", "2", "--batch", "3", "--prompt", "5", "--length", "16", "--device", "cpu"]


def results_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    found = rollout.run(rollout.parsed([*SIZES, *arguments]))
    return found, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "send", "recipes"),
    [
        ("tiny-llama", "16-bit", "per_token"),
        ("tiny-moe", "nvfp4", "per_token,row_scaled_four_over_six,nvidia"),
    ],
)
def test_the_difference_is_zero_with_the_measures(
    model: str, send: str, recipes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also behind a step of the optimizer, whose weights the engine has got; without a measure it is not."""
    columns = ["as the trainer", "KV cache in fixed shapes", "default casts"]
    given = ("--model", model, "--send", send, "--recipe", recipes, "--columns", ",".join(columns))
    found, text = results_of(capsys, *given)
    for recipe in recipes.split(","):
        cells = found[recipe]
        assert cells["as the trainer"].tokens == 2 * 3 * (16 - 5)
        assert cells["default casts"].largest > 0
        for heading in columns[:2]:
            # One amax of all tokens has those of padding in it, which the trainer does not see.
            assert (cells[heading].largest == 0) is (recipe != "nvidia"), (recipe, heading)
        shown = " | ".join(f"{cells[heading].largest:.3g}" for heading in columns)
        assert f"| `{recipe}` | {shown} |" in text


def test_a_step_changes_the_weights_that_are_sent() -> None:
    args = rollout.parsed([*SIZES])
    config = rollout_models.config_of("tiny-llama", Path())
    recipe = training.PRESETS["per_token"]
    trainer = rollout.Trainer(args, config, recipe)
    measures = rollout.Measures()
    trainer.begin(measures)
    own = rollout_engine.OwnLayers(rollout_engine.Setup(config, recipe, measures, "cpu", 16))
    before = trainer.weights(measures, "nvfp4")
    own.update(before)
    prompts = torch.randint(1, config.vocab_size, (3, 5))
    samples = own.sample(prompts, 16, 0)
    assert torch.equal(samples.ids[:, :5], prompts)
    assert trainer.step(samples, 5) == (0.0, 0.0)
    after = trainer.weights(measures, "nvfp4")
    assert before.keys() == after.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert trainer.step(own.sample(prompts, 16, 1), 5)[0] > 0  # the engine has the old weights
    del after["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight: did not come with the weights"):
        own.update(after)


@pytest.mark.slow
def test_an_error_of_the_engine_reaches_the_trainer() -> None:
    with (
        rollout.engine() as process,
        pytest.raises(RuntimeError, match=r"(?s)engine failed in sample:.*None"),
    ):
        process.call("sample", None, 16, 0)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_blocks_do_not_change_a_model_on_a_cpu(model: str) -> None:
    made = rollout_models.built(rollout_models.config_of(model, Path()), CPU)
    ids = torch.randint(1, 512, (2, 7))
    with torch.no_grad():
        want = made(ids).logits
        rollout_engine.compute_in_blocks(made, True)
        torch.testing.assert_close(made(ids).logits, want, rtol=0.05, atol=0.05)
        rollout_engine.compute_in_blocks(made, False)
        assert torch.equal(made(ids).logits, want)


def test_parts(capsys: pytest.CaptureFixture[str]) -> None:
    args = rollout.parsed([*SIZES, "--model", "tiny-moe"])
    args.folder = Path()
    text = rollout_parts.report(args, "per_token")
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert list(rows) == ["part", *rollout_parts.PARTS]
    for part, calls in (("linear layers", 8), ("experts", 2)):
        assert rows[part] == f"| {part} | 0 of {calls} | 0 of {calls} | 0 of {calls} |"
    assert rows["attention"].count(" of 2 ") == 3
    assert rollout_parts.report(args, "bf16") == ""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--recipe", "per_tokens"], r"--recipe: got 'per_tokens', must be of .*per_token"),
        (["--columns", "all of it"], r"--columns: got 'all of it', must be of as the trainer, "),
        (
            ["--prompt", "16", "--length", "16"],
            r"--prompt: got 16, must be at least 1 and less than --length",
        ),
        (["--batch", "0"], r"--batch: got 0, must be at least 1"),
    ],
    ids=["recipe", "columns", "prompt", "batch"],
)
def test_wrong_arguments(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollout.parsed(given)
    assert re.search(says, capsys.readouterr().err.replace("\n", " "))
