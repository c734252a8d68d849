"""The results file of examples/train_moe.py, and the table and the picture that are made of it."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .readme import WIDTH, marks
from .tables import table_lines

BLOCK, RANKING_BLOCK = "bench training", "bench training ranking"  # of runs without and with --branch
NEEDED = ("arm", "seed", "loss", "losses", "held_out", "cosines", "seconds")
# What runs must share to be compared, and so to be in one file.
SAME = ("size", "steps", "branch", "tokenizer", "corpus", "dtype", "device", "fp4gemm", "torch")
BASELINE, JITTERED = "bf16", "+jittered"
LAST = 50  # steps whose training loss is compared in a ranking
# The 97.5 % points of Student's t with 1, 2, ... degrees of freedom.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
SMOOTHED = 0.02  # part of the steps over which the picture averages

Row = dict[str, Any]


class Results:
    """A results file: a line of facts, the header, and a line for each arm and seed.

    A file of a ranking that is only read may have further headers, each followed by results of other seeds,
    on another corpus: a ranking compares arms with the same seed alone.

    Args:
        path: a file, which may not exist yet.
        header: the facts of this run, or None to read alone.

    Raises:
        ValueError: the file is missing with header None, a line is no result, the header differs from that of
            the file in a fact of SAME, or a further header from the first in one but the corpus.
    """

    def __init__(self, path: Path, header: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.header: Row = dict(header or {})
        self.further: list[tuple[Row, list[int]]] = []  # other headers, and the seeds of their results
        if not path.exists():
            if header is None:
                raise ValueError(f"{path}: is missing, must be a results file of train_moe.py")
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                wanted = ("header",) if number == 1 or "header" in row else NEEDED
                if row["bench"] != "training" or any(name not in row for name in wanted):
                    raise KeyError
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: line {number} is not a result of train_moe.py") from None
            if number > 1 and "header" in row:
                self._begin_part(number, row["header"], header is None)
                continue
            if number > 1:
                self.rows.append(row)
                if self.further and row["seed"] not in self.further[-1][1]:
                    self.further[-1][1].append(row["seed"])
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

    def _begin_part(self, number: int, found: Row, is_read_alone: bool) -> None:
        if not is_read_alone or not self.header.get("branch"):
            raise ValueError(
                f"{self.path}: line {number} is a second header, must be in a ranking (--branch) that is "
                "only read (--report)"
            )
        for name in SAME:
            if name != "corpus" and found.get(name) != self.header.get(name):
                raise ValueError(
                    f"{self.path}: line {number} has {name} {found.get(name)!r}, must be "
                    f"{self.header.get(name)!r} as in the first line"
                )
        self.further.append((found, []))

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


class Interval(NamedTuple):
    """A mean of paired differences over seeds with the half of its 95 % confidence interval."""

    mean: float
    half: float  # infinite with one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.half:.3f}" if self.seeds > 1 else "")


def last_loss(row: Row) -> float:
    """The mean training loss of the last steps."""
    loss: float = statistics.mean(row["losses"][-LAST:])
    return loss


def paired(rows: Sequence[Row], arm: str, base: str) -> Interval | None:
    """By how many percent the last training loss of an arm is above that of another one; None without seeds.

    Both arms had the same state at the branch, and then the same batches. The interval is Student's over the
    seeds: what the seeds change, the data and the trajectory, is what another run would change too. The
    differences of single steps of a run are no independent draws of it.
    """
    found = {
        name: {row["seed"]: last_loss(row) for row in rows if row["arm"] == name} for name in (arm, base)
    }
    seeds = [seed for seed in found[arm] if seed in found[base]]
    differences = [100 * (found[arm][seed] / found[base][seed] - 1) for seed in seeds]
    if not seeds:
        return None
    if len(seeds) == 1:
        return Interval(differences[0], math.inf, 1)
    quantile = T[min(len(seeds) - 1, len(T)) - 1]
    half = quantile * statistics.stdev(differences) / math.sqrt(len(seeds))
    return Interval(statistics.mean(differences), half, len(seeds))


def nulls(rows: Sequence[Row]) -> dict[str, Interval]:
    """What an arm with jittered weights, the key, differs from the same arm without: the noise of a run."""
    arms = dict.fromkeys(row["arm"] for row in rows if row["arm"].endswith(JITTERED))
    found = {arm: paired(rows, arm, arm.removesuffix(JITTERED)) for arm in arms}
    return {arm: interval for arm, interval in found.items() if interval is not None}


def is_told(difference: Interval, of_nulls: Sequence[Interval]) -> bool:
    """Whether an interval lies beyond 0 and beyond both ends of each null's interval."""
    bound = max((abs(null.mean) + null.half for null in of_nulls), default=math.inf)
    return abs(difference.mean) - difference.half > bound


def ranking(results: Results) -> str:
    """The last training loss of each arm beside that of bf16, and which pairs of recipes can be told apart.

    Two arms are told apart if the interval of their difference excludes 0 and lies outside of the intervals
    of all nulls.
    """
    rows, header = results.rows, results.header
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    of_nulls = nulls(rows)
    intervals = list(of_nulls.values())
    body = []
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        difference = None if arm == BASELINE else paired(rows, arm, BASELINE)
        verdict = ""
        if difference is not None and arm not in of_nulls:
            verdict = "yes" if is_told(difference, intervals) else "no"
        body.append(
            (
                arm,
                str(len(own)),
                f"{statistics.mean(map(last_loss, own)):.4f}",
                "" if difference is None else str(difference),
                verdict,
                f"{statistics.mean(row['loss'] for row in own):.4f}",
                "" if arm == BASELINE else _gap(gaps(rows, arm)),
                f"{statistics.mean(row['seconds'] for row in own):.0f}",
            )
        )
    headings = (
        *("arm", "seeds", f"loss, last {LAST}", "minus bf16, %", "told from bf16"),
        *("held out", "held-out gap, %", "s"),
    )
    recipes = [arm for arm in arms if arm != BASELINE and arm not in of_nulls]
    pairs = [(a, b, paired(rows, a, b)) for i, b in enumerate(recipes) for a in recipes[i + 1 :]]
    told: list[str] = []
    untold: list[str] = []
    for a, b, of_pair in pairs:
        if of_pair is not None:
            (told if is_told(of_pair, intervals) else untold).append(f"{a} minus {b} {of_pair}")
    of_jitter = [f"{arm} minus {arm.removesuffix(JITTERED)} {null}" for arm, null in of_nulls.items()]
    where = f"{_where(header)} All arms begin with the state of bf16 at step {header['branch']}."
    for other, seeds in results.further:
        where += (
            f" Of another run, on the corpus {other['corpus']} ({other['corpus_bytes'] / 1e6:.0f} MB) at "
            f"revision {other['revision']}: {'seed' if len(seeds) == 1 else 'seeds'} "
            f"{', '.join(map(str, seeds))}."
        )
    found = [textwrap.fill(where, WIDTH, break_on_hyphens=False), "", *table_lines(headings, body), ""]
    for what, some in (
        ("The nulls", of_jitter),
        ("Recipes that can be told apart", told),
        ("Recipes that cannot be told apart", untold),
    ):
        listed = f"{what}, in percent: {'; '.join(some) or 'none'}."
        found += [textwrap.fill(listed, WIDTH, break_on_hyphens=False, break_long_words=False), ""]
    return "\n".join(found[:-1])


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
    """Put the table, or the ranking, between its marks in these files; ValueError for a file without them."""
    is_ranking = bool(results.header.get("branch"))
    begin, end = marks(RANKING_BLOCK if is_ranking else BLOCK)
    made = ranking(results) if is_ranking else table(results)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        before, after = text[: text.index(begin)], text[text.index(end) :]
        path.write_text(f"{before}{begin}\n{made}\n{after}", encoding="utf-8")


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
