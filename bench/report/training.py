"""The results file of examples/train_moe.py, and the table and the picture that are made of it."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .readme import WIDTH, marks
from .tables import table_lines

BLOCK = "bench training"
NEEDED = ("arm", "seed", "loss", "losses", "held_out", "cosines", "seconds")
# What runs must share to be compared, and so to be in one file.
SAME = ("size", "steps", "tokenizer", "corpus", "dtype", "device", "fp4gemm", "torch")
BASELINE = "bf16"
SMOOTHED = 0.02  # part of the steps over which the picture averages

Row = dict[str, Any]


class Results:
    """A results file: a line of facts, the header, and a line for each arm and seed.

    Args:
        path: a file, which may not exist yet.
        header: the facts of this run, or None to read alone.

    Raises:
        ValueError: the file is missing with header None, a line is no result, or the header differs from that
            of the file in a fact of SAME.
    """

    def __init__(self, path: Path, header: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.header: Row = dict(header or {})
        if not path.exists():
            if header is None:
                raise ValueError(f"{path}: is missing, must be a results file of train_moe.py")
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                wanted = ("header",) if number == 1 else NEEDED
                if row["bench"] != "training" or any(name not in row for name in wanted):
                    raise KeyError
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: line {number} is not a result of train_moe.py") from None
            if number > 1:
                self.rows.append(row)
                continue
            found = row["header"]
            for name in SAME if header is not None else ():
                if found.get(name) != self.header.get(name):
                    raise ValueError(
                        f"{path}: holds results with {name} {found.get(name)!r}, must be "
                        f"{self.header.get(name)!r} as of this run, or another file"
                    )
            self.header = found
        if not self.header:
            raise ValueError(f"{path}: is empty, must be a results file of train_moe.py")

    def has(self, arm: str, seed: int) -> bool:
        return any((row["arm"], row["seed"]) == (arm, seed) for row in self.rows)

    def add(self, result: Mapping[str, Any]) -> None:
        """Add a line. The file is replaced as a whole, so that it never holds half a line."""
        self.rows.append({"bench": "training", **result})
        lines = [{"bench": "training", "header": self.header}, *self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        partial.replace(self.path)


def gaps(rows: Sequence[Row], arm: str) -> list[float]:
    """For each seed that both have: by how many percent the held-out loss is above that of bf16."""
    base = {row["seed"]: row["loss"] for row in rows if row["arm"] == BASELINE}
    return [
        100 * (row["loss"] / base[row["seed"]] - 1)
        for row in rows
        if row["arm"] == arm and row["seed"] in base
    ]


def _gap(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.2f}{spread}"


def _where(header: Row) -> str:
    on_gpu = header.get("cuda") is not None
    threads = header.get("threads", 1)
    cores = f"{threads} {'thread' if threads == 1 else 'threads'} of a CPU"
    machine = f"an {header['device']}" if on_gpu else f"{cores} ({header['device']})"
    return (
        f"Size {header['size']}: {header['parameters'] / 1e6:.1f}M parameters, {header['steps']} steps of "
        f"{header['tokens_per_step']} {header['tokenizer']} of the corpus {header['corpus']} "
        f"({header['corpus_bytes'] / 1e6:.0f} MB). {header['date']}, torch {header['torch']}, revision "
        f"{header['revision']}, on {machine}. Tensors that are not quantized are {header['dtype']}."
    )


def table(results: Results) -> str:
    """For each arm: the loss, the gap in percent with its standard deviation over seeds, and the cosines."""
    rows = results.rows
    body = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        loss = statistics.mean(row["loss"] for row in own)
        cosines = [value for row in own for part in row["cosines"].values() for value in part]
        least = min(cosines)
        seconds = statistics.mean(row["seconds"] for row in own)
        is_base = arm == BASELINE
        body.append(
            (
                arm,
                str(len(own)),
                f"{loss:.4f}",
                "" if is_base else _gap(gaps(rows, arm)),
                "" if is_base else f"{statistics.mean(cosines):.4f}",
                "" if is_base else f"{least:.4f}",
                f"{seconds:.0f}",
            )
        )
    headings = ("arm", "seeds", "loss", "gap to bf16, %", "gradient cosine", "least", "s")
    where = textwrap.fill(_where(results.header), WIDTH, break_on_hyphens=False)
    return "\n".join([where, "", *table_lines(headings, body)])


def cosine_table(results: Results) -> str:
    """For each arm and each block: the cosine of the gradients to those of bf16, the mean over its layers."""
    body = []
    for arm in dict.fromkeys(row["arm"] for row in results.rows if row["arm"] != BASELINE):
        own = [row["cosines"] for row in results.rows if row["arm"] == arm]
        for part in own[0]:
            blocks = zip(*(cosines[part] for cosines in own), strict=True)
            body.append((arm, part, *(f"{statistics.mean(block):.4f}" for block in blocks)))
    headings = [f"block {i}" for i in range(max((len(line) - 2 for line in body), default=0))]
    return "\n".join(table_lines(("arm", "layer", *headings), body))


def into(paths: Sequence[Path], results: Results) -> None:
    """Put the table between its marks in these files; ValueError for a file without them."""
    begin, end = marks(BLOCK)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        before, after = text[: text.index(begin)], text[text.index(end) :]
        path.write_text(f"{before}{begin}\n{table(results)}\n{after}", encoding="utf-8")


def draw(results: Results, path: Path) -> None:
    """Draw the loss curves and the gaps over the steps; the suffix of the path is the format.

    Beside presets, their changes (``nvidia+no_rht``) are left to the table.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files; needs no display
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", dpi=110)
    rows = [row for row in results.rows if "+" not in row["arm"]] or results.rows
    base = {row["seed"]: dict(row["held_out"]) for row in rows if row["arm"] == BASELINE}
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    seeds = set.intersection(*({row["seed"] for row in rows if row["arm"] == arm} for arm in arms))
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        color = "black" if arm == BASELINE else plt.get_cmap("tab20")(number % 20)
        # The data of a step depend on the seed, so that curves of other seeds do not compare.
        shared = [row["losses"] for row in own if row["seed"] in seeds] or [row["losses"] for row in own]
        curve = [statistics.mean(losses) for losses in zip(*shared, strict=True)]
        width = max(1, round(SMOOTHED * len(curve)))
        smooth = [statistics.mean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]
        left.plot(range(1, len(curve) + 1), smooth, color=color, label=arm, linewidth=1.2)
        if arm == BASELINE:
            continue
        points: dict[int, list[float]] = {}
        for row in own:
            for step, loss in row["held_out"]:
                if row["seed"] in base:
                    points.setdefault(step, []).append(100 * (loss / base[row["seed"]][step] - 1))
        means = [statistics.mean(values) for values in points.values()]
        right.plot(list(points), means, color=color, label=arm, marker="o", markersize=3, linewidth=1.2)
        if any(len(values) > 1 for values in points.values()):
            low, high = ([edge(values) for values in points.values()] for edge in (min, max))
            right.fill_between(list(points), low, high, color=color, alpha=0.15, linewidth=0)
    left.set(xlabel="step", ylabel="training loss, nats a token")
    right.set(xlabel="step", ylabel="held-out loss above bf16, %")
    right.axhline(0, color="black", linewidth=0.8)
    left.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
