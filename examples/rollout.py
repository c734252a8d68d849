"""A trainer and a rollout engine, two processes: how far their log-probabilities of sampled tokens are apart.

    python examples/rollout.py                                  # a tiny Llama, on a CPU in half a minute
    python examples/rollout.py --model tiny-moe --recipe all    # experts; a table of recipes
    python examples/rollout.py --model smollm2 --device cuda --recipe all --parts
    python examples/rollout.py --engine vllm                    # vLLM samples, where it is installed

One recipe says how both sides cast. The trainer's layers are those of fp4gemm.training, and the layers of the
engine follow from ``recipe.for_inference()``. In each step the trainer sends its weights, the engine samples
with them, and the trainer computes the log-probabilities of these tokens anew, in the forward pass from which
it then takes a step of REINFORCE. The reward is made up: the share of tokens with an even id.

A cell of the table is the largest difference of all tokens and steps. The first column is the engine that
does everything as the trainer does; in each of the others it does something else (docs/rollout.md).
``--parts`` shows which parts of the model have other bits when one token of a sequence is computed alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # the files beside this one, when another program loads it
    sys.path.insert(0, str(HERE))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it

import torch  # noqa: E402
from device_option import pick_device  # noqa: E402
from fp4gemm import checkpoint, training  # noqa: E402
from rollout_engine import (  # noqa: E402
    FORMAT,
    Measures,
    Samples,
    Setup,
    allow_one_attention,
    compute_in_blocks,
    log_probabilities,
    packed,
    serve,
    unpacked,
)
from rollout_models import MODELS, config_of, loaded  # noqa: E402
from torch import Tensor  # noqa: E402

# What the engine does otherwise than the trainer, by the heading of its column.
COLUMNS = {
    "as the trainer": Measures(),
    "default casts": Measures(casts=False),
    "last logits": Measures(all_logits=False),
    "one sequence": Measures(whole_batch=False),
    "KV cache": Measures(full_length=False, all_logits=False),
    "KV cache in fixed shapes": Measures(full_length=False, all_logits=False, fixed_shapes=True),
    "that without batch_invariant": Measures(True, False, False, True, False, True),
    "by default": Measures(False, False, False, True, False),
}
ALL_RECIPES = ("per_token", "te_per_token", "row_scaled", "row_scaled_four_over_six", "nvidia", "bf16")


class Trainer:
    """A model that trains by a recipe; its forward pass has whole sequences, without a cache of keys."""

    def __init__(self, args: argparse.Namespace, config: Any, recipe: training.Recipe) -> None:
        allow_one_attention()
        self.recipe, self.device = recipe, torch.device(args.device)
        self.model = loaded(args.model, config, args.folder, self.device)
        if not recipe.is_plain:
            training.convert_model(self.model, recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        training.attach(self.optimizer)  # the copies of weights are kept, as in the engine

    def begin(self, measures: Measures) -> None:
        """Take the options that both sides need."""
        if self.recipe.w is not None:
            recipe = self.recipe.replace(batch_invariant=measures.batch_invariant)
            training.set_recipe(self.model, recipe)
        compute_in_blocks(self.model, measures.fixed_shapes)

    def weights(self, measures: Measures, send: str) -> dict[str, Tensor]:
        """The weights for the engine on the CPU: those of its layers in NVFP4, or all in 16 bits."""
        float_weights = {name: p.detach() for name, p in self.model.named_parameters()}
        if send == "16-bit" or (measures.casts and self.recipe.w is None):
            return {name: w.cpu() for name, w in float_weights.items()}
        casts: dict[str, Any] = {"activations": "per-token", "weight_scaling": "row"}
        if measures.casts:
            casts = self.recipe.for_inference().options()
        options = checkpoint.Options(format=FORMAT, fuse=(), **casts)
        plan = checkpoint.Plan.of_model(self.model, options)
        return {name: w.cpu() for name, w in checkpoint.quantize_named(float_weights.items(), plan)}

    def step(self, samples: Samples, prompt: int) -> tuple[float, float]:
        """The largest and the mean difference of log-probabilities; then a step of REINFORCE."""
        ids = samples.ids.to(self.device)
        logits = self.model(ids, use_cache=False).logits
        own = log_probabilities(logits[:, prompt - 1 : -1], ids[:, prompt:])
        difference = (own.detach() - samples.log_probabilities.to(self.device)).abs()
        reward = (ids[:, prompt:] % 2 == 0).float().mean(-1)
        (-(reward - reward.mean()).unsqueeze(-1) * own).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(difference.max()), float(difference.mean())


class Engine:
    """The engine in the other process; a call returns what the method returned there."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def call(self, method: str, *arguments: object) -> Any:
        self._connection.send_bytes(packed((method, *arguments)))
        status, answer = unpacked(self._connection.recv_bytes())
        if status == "error":
            raise RuntimeError(f"the rollout engine failed in {method}:\n{answer}")
        return answer


@contextmanager
def engine() -> Iterator[Engine]:
    """A process that serves, until the end of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, torch.get_num_threads()), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Engine(ours)
        ours.send_bytes(packed(None))
        process.join(60)
    finally:
        process.kill()


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of the log-probabilities of all sampled tokens of a cell."""

    largest: float
    mean: float
    tokens: int


def compared(
    args: argparse.Namespace, trainer: Trainer, rollout: Engine, measures: Measures, config: Any
) -> Difference:
    """Train for some steps with an engine of these measures."""
    trainer.begin(measures)
    rollout.call("start", args.engine, Setup(config, trainer.recipe, measures, args.device, args.length))
    gen, found = torch.Generator().manual_seed(1), []
    for step in range(args.steps):
        prompts = torch.randint(1, config.vocab_size, (args.batch, args.prompt), generator=gen)
        rollout.call("update", trainer.weights(measures, args.send))
        samples = rollout.call("sample", prompts, args.length, step)
        found.append(trainer.step(samples, args.prompt))
    largest, means = zip(*found, strict=True)
    tokens = args.steps * args.batch * (args.length - args.prompt)
    return Difference(max(largest), sum(means) / len(means), tokens)


def table(results: Mapping[str, Mapping[str, Difference | None]], headings: Sequence[str]) -> str:
    """A table of Markdown: a row for each recipe, a column for each engine."""
    lines = [
        f"| recipe of the trainer | {' | '.join(headings)} |",
        f"|---|{'---:|' * len(headings)}",
    ]
    for recipe, cells in results.items():
        shown = ["-" if d is None else f"{d.largest:.3g}" for d in (cells[name] for name in headings)]
        lines.append(f"| `{recipe}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny-llama", choices=MODELS)
    add("--recipe", default="per_token", help="presets of fp4gemm.training, separated by commas, or all")
    add("--engine", default="own", choices=("own", "vllm"), help="what samples: our own layers, or vLLM")
    add("--columns", default="all", help=f"some of: {', '.join(COLUMNS)}; separated by commas")
    add("--send", default="nvfp4", choices=("nvfp4", "16-bit"), help="where weights are quantized: before or")
    add("--device", default="cpu")
    add("--batch", type=int, default=4, help="sequences of a step")
    add("--prompt", type=int, default=8, help="tokens of a prompt, which are random")
    add("--length", type=int, default=32, help="tokens of a sequence with its prompt")
    add("--steps", type=int, default=2, help="of the optimizer, for each cell")
    add("--lr", type=float, default=1e-3)
    add("--parts", action="store_true", help="also compare the parts of the model, one token at a time")
    add("--folder", type=Path, help="for the checkpoint of SmolLM2; a temporary one by default")
    args = parser.parse_args(arguments)
    args.recipe = list(ALL_RECIPES) if args.recipe == "all" else args.recipe.split(",")
    args.columns = list(COLUMNS) if args.columns == "all" else args.columns.split(",")
    for name, values, known in (
        ("recipe", args.recipe, training.PRESETS),
        ("columns", args.columns, COLUMNS),
    ):
        for value in values:
            if value not in known:
                parser.error(f"--{name}: got {value!r}, must be of {', '.join(known)}")
    if not 0 < args.prompt < args.length:
        parser.error(f"--prompt: got {args.prompt}, must be at least 1 and less than --length")
    if args.engine == "vllm":
        args.columns = ["vLLM"]
        if len(args.recipe) > 1 or training.PRESETS[args.recipe[0]].w is None or args.send != "nvfp4":
            parser.error("--engine: got 'vllm', must be 'own' unless one recipe with NVFP4 weights is sent")
    for name in ("batch", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, must be at least 1")
    args.device = str(pick_device(args.device))
    return args


def run(args: argparse.Namespace) -> dict[str, dict[str, Difference | None]]:
    """Fill the table and print it."""
    config = config_of(args.model, args.folder)
    results: dict[str, dict[str, Difference | None]] = {}
    with engine() as rollout:
        for name in args.recipe:
            recipe = training.PRESETS[name]
            trainer = Trainer(args, config, recipe)
            results[name] = {}
            for heading in args.columns:
                measures = COLUMNS.get(heading, Measures())
                # Products of torch have no such option.
                is_apart = measures.batch_invariant or not measures.casts or recipe.w is not None
                found = compared(args, trainer, rollout, measures, config) if is_apart else None
                results[name][heading] = found
                if found is not None:
                    print(
                        f"{name}, {heading}: at most {found.largest:.6g}, on average {found.mean:.3g}, "
                        f"of {found.tokens} tokens",
                        flush=True,
                    )
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(
        f"\n{args.model} on {where}, torch {torch.__version__}, {args.batch} sequences of {args.length} "
        f"tokens, steps: {args.steps}; largest difference of log-probabilities, by what the engine does:\n"
    )
    print(table(results, args.columns), flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    args = parsed(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary)
        run(args)
        if args.parts:
            import rollout_parts

            for name in args.recipe:
                print(rollout_parts.report(args, name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
