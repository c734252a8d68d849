"""Train a small language model, with experts or dense, in bf16 and in NVFP4, and compare the losses.

    python examples/train_moe.py                                   # minutes on a CPU: bf16, nvidia, per_token
    python examples/train_moe.py --size full --device cuda --seeds 0,1,2 --time-limit 540
    python examples/train_moe.py --size full --device cuda --seeds 0,1,2 --resume   # where it stopped
    python examples/train_moe.py --size dense --device cuda --seeds 0,1,2,3 --arms ranking --branch 500

The text is the documentation and the sources of the Python packages on this machine; nothing is downloaded.
An arm is a preset of ``fp4gemm.training``, or a change of one such as ``per_token+2d``. Every arm has the
same initial weights and the same order of data. With ``--branch`` a run in bf16 takes the first steps of each
seed, every arm goes on from its state, and a table says which arms can be told apart. Results are JSON lines;
``--picture`` and ``--readme`` draw and tabulate them, also without training (``--report``).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# The files beside this one and bench/ must be found when another program loads it, too.
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

DESCRIPTIONS = {
    "small": "1.5M parameters",
    "full": "86M",
    "small-dense": "0.7M, without experts",
    "dense": "25M, without experts",
    "tiny": "for tests",
}
BPE_SIZES = ("full", "dense")
NEEDED = ("torch", "fp4gemm", "numpy", "rich")
INCOMPLETE = 3  # exit status: the time was up; --resume goes on


def missing_packages(*more: str) -> list[str]:
    """The packages that are needed and not installed."""
    return [name for name in (*NEEDED, *more) if importlib.util.find_spec(name) is None]


if not missing_packages():
    import torch
    import train_moe_corpus as corpora
    from device_option import pick_device
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from train_moe_arms import BF16, GROUPS, arm, arm_names
    from train_moe_loop import Run, arm_order, check_arms, checkpoint_path, model_of
    from train_moe_model import SIZES, Size

    from bench.measure import machine
    from bench.report import training as report


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    main_arms = ", ".join(GROUPS["main"])
    dtypes = "of what is not quantized; auto: bfloat16 on CUDA, float32 on a CPU, where bf16 is slow"
    add(
        "--size",
        choices=tuple(DESCRIPTIONS),
        default="small",
        help="; ".join(f"{name}: {what}" for name, what in DESCRIPTIONS.items()),
    )
    add("--arms", default="main", help=f"with commas between, or {', '.join(GROUPS)}; main: {main_arms}")
    add("--seeds", default="0", help="numbers with commas between")
    add("--steps", type=int, help="of training; otherwise those of the size")
    add("--branch", type=int, help="the step to which bf16 is trained, and at which all arms begin")
    add("--device", default="auto", help="cpu, cuda, or auto: cuda if fp4gemm runs there")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help=dtypes)
    add(
        "--tokenizer",
        choices=("auto", "bytes", "bpe"),
        default="auto",
        help=f"auto: bpe for {' and '.join(BPE_SIZES)}, else bytes",
    )
    add("--out", type=Path, help="the results file; otherwise build/train_moe/SIZE.jsonl")
    add("--checkpoints", type=Path, help="their folder; otherwise beside the results file")
    add("--checkpoint-every", type=int, default=0, help="steps; 0 saves only when the time is up")
    add("--resume", action="store_true", help="add to a results file, and go on from a checkpoint")
    add("--time-limit", type=float, help="seconds; then a checkpoint is saved and the exit status is 3")
    add("--report", action="store_true", help="do not train: tabulate and draw the results file")
    add("--picture", type=Path, help="draw the curves into this file (needs matplotlib)")
    add("--readme", type=Path, nargs="+", default=[], help="put the table between its marks in these files")
    return made


def seeds_of(text: str) -> list[int]:
    seeds = [int(part) if part.strip().isdigit() else -1 for part in text.split(",")]
    if not all(0 <= seed < 1_000_000 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds: got {text!r}, must be different numbers from 0 to 999999, as 0,1,2")
    return seeds


def size_of(args: argparse.Namespace) -> Size:
    size = SIZES[args.size]
    if args.steps is None:
        return size
    if args.steps < 1:
        raise ValueError(f"--steps: got {args.steps}, must be at least 1")
    return dataclasses.replace(size, steps=args.steps)


def header_of(
    args: argparse.Namespace, size: Size, corpus: corpora.Corpus, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The facts of the results file's first line."""
    with torch.device("meta"):
        model = model_of(size, corpus.vocab, arm(BF16))
    return {
        **machine.describe(device),
        "size": args.size,
        "steps": size.steps,
        "branch": args.branch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": size.batch * size.length,
        "model": dataclasses.asdict(size),
        "dtype": str(dtype).removeprefix("torch."),
        "tokenizer": corpus.tokenizer if corpus.tokenizer == "bytes" else f"tokens ({corpus.tokenizer})",
        "vocab": corpus.vocab,
        "corpus": corpus.checksum,
        "corpus_bytes": corpus.num_bytes,
        "corpus_files": corpus.num_files,
        "bytes_per_token": round(corpus.bytes_per_token, 4),
    }


def train(args: argparse.Namespace, out: Path, console: Console) -> tuple[report.Results, bool]:
    """Run the arms that have no result yet; also return whether all of them have one now."""
    began = time.monotonic()
    device, size, names = pick_device(args.device), size_of(args), arm_names(args.arms)
    runs = arm_order(names, seeds_of(args.seeds))
    check_arms(names, size, device)
    if args.branch is not None and not 1 <= args.branch < size.steps:
        raise ValueError(f"--branch: got {args.branch}, must be from 1 to {size.steps - 1}, below the steps")
    if args.checkpoint_every < 0:
        raise ValueError(f"--checkpoint-every: got {args.checkpoint_every}, must be at least 0")
    if args.time_limit is not None and args.time_limit <= 0:
        raise ValueError(f"--time-limit: got {args.time_limit}, must be positive")
    if out.exists() and not args.resume:
        raise ValueError(f"--out: {out} exists, must be another file, or give --resume to add to it")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(
        args.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    tokenizer = args.tokenizer
    if tokenizer == "auto":
        tokenizer = "bpe" if args.size in BPE_SIZES else "bytes"
    if tokenizer == "bpe" and importlib.util.find_spec("tokenizers") is None:
        raise ValueError("--tokenizer: bpe needs pip install tokenizers, or give --tokenizer bytes")
    folder = args.checkpoints or out.with_suffix("")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with console.status("reading the corpus"):
        corpus = corpora.load(tokenizer, size.corpus_bytes, folder / f"corpus-{tokenizer}.pt")
    header = header_of(args, size, corpus, device, dtype)
    results = report.Results(out, header)
    describe(console, runs, results)

    def is_time_up() -> bool:
        return args.time_limit is not None and time.monotonic() - began > args.time_limit

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[loss]}"))  # fmt: skip
    # A log that is no terminal gets a line for each evaluation in place of the bar.
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    trunks: set[Path] = set()  # the states of bf16 that this process has made or found complete

    def trained(run: Run, path: Path, last: int | None = None) -> bool:
        """Train to the step ``last`` or to the end; False if the time was up before it.

        With --resume a state in ``path`` is gone on from. It is written there where the time was up.
        """
        what = f"{run.arm.name}, seed {run.seed}"
        task = progress.add_task(what, total=last or size.steps, loss="")
        if args.resume and path.exists():
            run.load(path)
            say(f"{what}: goes on at step {run.step_number} of {path}")

        def on_step(run: Run) -> None:
            done = run.step_number
            text = f"held out {run.evaluations[-1][1]:.4f}" if run.evaluations else ""
            progress.update(task, completed=done, loss=text)
            if run.evaluations and run.evaluations[-1][0] == done:
                say(line_of(run))
            if args.checkpoint_every and done % args.checkpoint_every == 0 and done < size.steps:
                run.save(path)

        is_done = run.train(is_time_up, on_step, last)
        if not is_done:
            run.save(path)
            say(f"{what}: stopped at step {run.step_number}, saved in {path}")
        return is_done

    with progress:
        for name, seed in runs:
            if results.has(name, seed):
                continue
            if is_time_up():
                say(f"stopped before {name}, seed {seed}")
                return results, False
            trunk = None
            if args.branch is not None:
                trunk = checkpoint_path(folder, f"branch-{args.branch}", seed)
                if trunk not in trunks:
                    run = Run(size, corpus, arm(BF16, seed), seed, device, dtype)
                    if not trained(run, trunk, args.branch):
                        return results, False
                    run.save(trunk)
                    trunks.add(trunk)
            run = Run(size, corpus, arm(name, seed), seed, device, dtype)
            path = checkpoint_path(folder, name, seed)
            if trunk is not None:
                run.branch(trunk)
            if not trained(run, path):
                return results, False
            results.add(run.result())
            path.unlink(missing_ok=True)
    return results, True


def line_of(run: Run) -> str:
    """Where a run is, after an evaluation: losses in nats a token, and the time that its steps took."""
    done = run.step_number
    before = run.evaluations[-2][0] if len(run.evaluations) > 1 else 0
    return (
        f"{run.arm.name}, seed {run.seed}: step {done} of {run.size.steps}, training loss "
        f"{float(run.losses[before:done].mean()):.4f}, held out {run.evaluations[-1][1]:.4f}, "
        f"{run.seconds:.0f} s, {run.seconds / (done - run.first_step):.3f} s a step"
    )


def describe(console: Console, runs: Sequence[tuple[str, int]], results: report.Results) -> None:
    """Print what is used."""
    header = results.header
    left = sum(not results.has(*run) for run in runs)
    lines = {
        "device": f"{header['device']}, torch {header['torch']}, fp4gemm {header['fp4gemm']} "
        f"({header['revision']})",
        "corpus": f"{header['corpus_files']} files, {header['corpus_bytes'] / 1e6:.1f} MB, checksum "
        f"{header['corpus']}, {header['tokenizer']}, {header['bytes_per_token']:.2f} bytes a token",
        "model": f"{header['size']}: {header['parameters'] / 1e6:.2f}M parameters, {header['steps']} steps "
        f"of {header['tokens_per_step']} tokens, {header['dtype']}",
        "arms": f"{', '.join(dict.fromkeys(name for name, _ in runs))}; {len(runs)} runs, {left} to do",
        "results": str(results.path),
    }
    if header["branch"]:
        lines["branch"] = f"every arm goes on from the state of bf16 at step {header['branch']}"
    for name, text in lines.items():
        console.print(f"[bold]{name:8}[/bold] {text}", highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a wrong argument, 2 without a package, 3 if the time was up."""
    missing = missing_packages()
    if missing:
        print(f"train_moe needs packages that are not installed: pip install {' '.join(missing)}")
        return 2
    args = parser().parse_args(argv)
    if args.picture is not None and missing_packages("matplotlib"):
        print("train_moe: --picture needs a package: pip install matplotlib")
        return 2
    console = Console()
    out = args.out or HERE.parent / "build" / "train_moe" / f"{args.size}.jsonl"
    try:
        results, is_complete = (report.Results(out), True) if args.report else train(args, out, console)
        if results.rows:
            report.into(args.readme, results)
            if args.picture is not None:
                report.draw(results, args.picture)
    except (ValueError, OSError) as error:
        print(f"train_moe: {error}", file=sys.stderr)
        return 1
    if results.rows:
        tables = [report.table(results), report.cosine_table(results)]
        if results.header.get("branch"):
            tables.append(report.ranking(results))
        print("\n" + "\n\n".join(tables))
    if not is_complete:
        print("train_moe: the time was up; the same command with --resume goes on")
        return INCOMPLETE
    return 0


if __name__ == "__main__":
    sys.exit(main())
