"""The tables of docs/results.md, benchmarks.md and serving.md, made from results, between their marks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from . import epilogues, formats, upstream
from .page import conditions, refusals
from .results import Row, refuse_fakes, weight_name
from .tables import table_lines

# The beginnings of the baselines that the tables show, the first as the one of the short table; the page has
# all of them.
BASELINES = ("torch bf16", "torch fp8", "torch fp32", "cuBLASLt nvfp4 + post-scale", "humming", "unfused")
FP8 = "torch fp8"
PRODUCTS = (
    ("dense", "`mm`", "weight n x k; m =", "m"),
    ("layer", "`quantize` and `mm`", "weight n x k; m =", "m"),
    ("grouped", "`grouped_mm`", "experts x n x k; tokens =", "tokens"),
)
# The models and the one that they are compared with, as `python -m bench model` names them.
MERGED, FP8_MERGED, COMPILED = "bf16 merged", "fp8 merged", ", compiled"
PICTURES = "pictures"  # beside the files, in docs
WIDTH = 110  # columns of a Markdown line that is no table


def short_table(rows: Sequence[Row]) -> str:
    """One table of products: microseconds and, in parentheses, the speed-up over one baseline."""
    mine = {
        bench: [
            row for row in rows if row["bench"] == bench and row["contender"] == "fp4gemm" and "us" in row
        ]
        for bench, *_ in PRODUCTS
    }
    every = [row for found in mine.values() for row in found]
    baselines = _shown(every)
    sizes = sorted({row[across] for bench, _, _, across in PRODUCTS for row in mine[bench]})
    body = []
    for bench, title, _, across in PRODUCTS:
        for weight in dict.fromkeys(map(weight_name, mine[bench])):
            cells = {row[across]: _cell(row, baselines) for row in mine[bench] if weight_name(row) == weight}
            body.append((title, weight, *(cells.get(size, "") for size in sizes)))
    headings = ("product", "weight n x k; tokens =", *map(str, sizes))
    what = "Microseconds" + _parenthesis(baselines)
    lines = [_wrapped(_where(_products(rows) or rows))]
    if body:
        lines += ["", f"{what}:", "", *table_lines(headings, body)]
    modes = [row for row in rows if row["bench"] == "quantize" and row.get("target") and "us" in row]
    if modes:
        of_copy = "; ".join(f"{row['contender']} {row['of_copy']:.2f}" for row in modes)
        lines += ["", _wrapped(f"Quantizers, as a fraction of the bandwidth of a device copy: {of_copy}.")]
    lines += _models(rows, is_short=True)
    return "\n".join([*lines, "", _refused(rows)])


def _products(rows: Sequence[Row]) -> list[Row]:
    """The rows that are not of whole models."""
    return [row for row in rows if row["bench"] != "model"]


def _models(rows: Sequence[Row], is_short: bool) -> list[str]:
    """Lines for whole models, by batch; none without results. ``is_short``: a line for each of our models."""
    mine = [row for row in rows if row["bench"] == "model" and "us" in row]
    if not mine:
        return []
    batches = sorted({row["batch"] for row in mine})
    body = []
    for step in dict.fromkeys(row["step"] for row in mine):
        found = [row for row in mine if row["step"] == step]
        if is_short:
            found = [row for row in found if row.get("role") == "ours" or row["contender"] == FP8_MERGED]
            found = [row for row in found if COMPILED not in row["contender"]]
        for name in dict.fromkeys(row["contender"] for row in found):
            cells = {row["batch"]: row for row in found if row["contender"] == name}
            lines = (
                [(name, _both)] if is_short else [(f"{name}, CUDA graph", _graph), (f"{name}, eager", _eager)]
            )
            for title, cell in lines:
                texts = [cell(cells[batch]) if batch in cells else "" for batch in batches]
                if any(texts):
                    body.append((step, title, *texts))
    others = _products(rows)
    is_same = not others or others[0]["command"] == mine[0]["command"]
    where = [] if is_same else ["", _wrapped(_where(mine))]
    what = f"in a CUDA graph (and times as fast as {MERGED}: in a CUDA graph, eager)"
    if not is_short:
        what = f"(and times as fast as {MERGED} in the same mode)"
    headings = ("model and step", "batch =", *map(str, batches))
    return [*where, "", f"Whole models, milliseconds a step {what}:", "", *table_lines(headings, body)]


def _rival(row: Row) -> float | None:
    """How many times as fast as the merged model in bf16 a row is in a CUDA graph, compiled as that is."""
    name = MERGED + (COMPILED if row["contender"].endswith(COMPILED) else "")
    ratio: float | None = row.get("ratio", {}).get(name)
    return ratio


def _both(row: Row) -> str:
    return _milliseconds(row["us"], _rival(row), row.get("eager_ratio"))


def _graph(row: Row) -> str:
    return _milliseconds(row["us"], _rival(row))


def _eager(row: Row) -> str:
    return _milliseconds(row["eager_us"], row.get("eager_ratio")) if "eager_us" in row else ""


def _milliseconds(us: float, *ratios: float | None) -> str:
    known = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
    return f"{us / 1e3:.2f}" + (f" ({known})" if known else "")


def _shown(rows: Sequence[Row]) -> list[str]:
    """The baselines of a cell: the first of BASELINES that there is, and FP8 if it was measured."""
    first = [name for name in BASELINES if any(name in row.get("ratio", {}) for row in rows)][:1]
    has_fp8 = any(_ratio(row, FP8) is not None for row in rows)
    return [*first, *([FP8] if has_fp8 and first != [FP8] else [])]


def _ratio(row: Row, baseline: str) -> float | None:
    """How many times as fast as a baseline; a row without its quantizer has ratios to FP8 without one."""
    ratios = row.get("ratio", {})
    found = next((name for name in ratios if name == baseline or name.startswith(f"{baseline}, ")), None)
    return None if found is None else float(ratios[found])


def _parenthesis(baselines: Sequence[str]) -> str:
    return f" (and times as fast as {', '.join(baselines)})" if baselines else ""


def _cell(row: Row, baselines: Sequence[str]) -> str:
    ratios = [_ratio(row, name) for name in baselines]
    if all(ratio is None for ratio in ratios):
        return f"{row['us']:.1f}"
    return f"{row['us']:.1f} ({', '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)})"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _refused(rows: Sequence[Row]) -> str:
    wrong = refusals(rows)
    return _wrapped(f"Refused: {'; '.join(wrong)}.") if wrong else "Nothing was refused."


def _where(rows: Sequence[Row]) -> str:
    """The machine and the command, as a sentence without a verb."""
    first = rows[0]
    spans = ", ".join(
        f"{name.partition(' while')[0]} {value}"
        for name, value in conditions(rows)
        if name.startswith(("sm ", "power "))
    )
    where = f"{first['device']}{f' ({spans})' if spans else ''}, {first['date']}"
    return f"{where}, torch {first['torch']}, revision {first['revision']}, by `{first['command']}`."


def tables(rows: Sequence[Row]) -> str:
    """Every table: speed-ups over the baselines by weight and number of tokens, quantizers, whole models."""
    lines = [_wrapped(_where(_products(rows) or rows))]
    for bench, title, sizes, across in PRODUCTS:
        lines += _matrix([row for row in rows if row["bench"] == bench], f"{title}, {sizes}", across)
    modes = [row for row in rows if row["bench"] == "quantize" and row.get("target")]
    if modes:
        body = [
            (row["contender"], row["case"].partition(" ")[2], f"{row['us']:.1f}", f"{row['of_copy']:.2f}")
            for row in modes
            if "us" in row
        ]
        lines += ["", *table_lines(("quantizer", "x", "us", "of copy bandwidth"), body)]
    lines += _models(rows, is_short=False)
    return "\n".join([*lines, "", _refused(rows)])


def _matrix(rows: Sequence[Row], title: str, across: str) -> list[str]:
    """Lines for each weight, by the number of tokens: its time, and the speed-up over each baseline."""
    ours = [row for row in rows if row["contender"] == "fp4gemm" and "us" in row]
    if not ours:
        return []
    sizes = sorted({row[across] for row in ours})
    baselines = dict.fromkeys(
        name for row in ours for name in row.get("ratio", {}) if name.startswith(BASELINES)
    )
    body: list[tuple[str, ...]] = []
    for weight in dict.fromkeys(map(weight_name, ours)):
        mine = {row[across]: row for row in ours if weight_name(row) == weight}
        cells = [f"{mine[size]['us']:.1f}" if size in mine else "" for size in sizes]
        body.append((weight, "us", *cells))
        for baseline in baselines:
            found = [mine[size].get("ratio", {}).get(baseline) if size in mine else None for size in sizes]
            if any(x is not None for x in found):
                body.append(("", f"x {baseline}", *("" if x is None else f"{x:.2f}" for x in found)))
    return ["", *table_lines((title, "", *map(str, sizes)), body)]


def serving_table(rows: Sequence[Row]) -> str:
    """The layers as a serving engine calls them: a line for each weight and contender, by tokens."""
    timed = [row for row in rows if row["bench"] == "serving" and "us" in row]
    mine = [row for row in timed if row.get("role") == "ours"]
    if not mine:
        raise ValueError("--readme: the results have no row of python -m bench serving")
    baselines = _shown(mine)
    by_layer: dict[tuple[str, str], dict[int, str]] = {}
    for row in mine:
        cells = by_layer.setdefault((f"{row['model']} {row['layer']}", row["contender"]), {})
        cells[_tokens(row)] = _cell(row, baselines)
    sizes = sorted({size for cells in by_layer.values() for size in cells})
    body = [(*names, *(cells.get(size, "") for size in sizes)) for names, cells in by_layer.items()]
    runs = _runs(mine)
    where = []
    for run in runs:
        of = f"Tokens {', '.join(map(str, sorted(set(map(_tokens, run)))))}: " if len(runs) > 1 else ""
        where += [_wrapped(of + _where(run)), ""]
    return "\n".join(
        [
            *where,
            f"Microseconds in a CUDA graph{_parenthesis(baselines)}, by tokens:",
            "",
            *table_lines(("layer", "contender", *map(str, sizes)), body),
            "",
            _refused(rows),
        ]
    )


def _tokens(row: Row) -> int:
    """The number of tokens of a row of a layer or of a mixture."""
    return int(row["tokens"] if "tokens" in row else row["m"])


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run: of one command, revision and date."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[fact] for fact in ("command", "revision", "date")), []).append(row)
    return list(runs.values())


def formats_table(rows: Sequence[Row]) -> str:
    """The formats of weights and tokens side by side, with the picture that `bench plot --formats` draws."""
    if not formats.is_complete(rows):
        return formats.NO_RUN
    device = rows[0]["device"]
    picture = f"![Times as fast as bf16, by tokens and format]({PICTURES}/{formats.picture_name(device)})"
    text = [picture]
    for name in formats.BENCHES:
        table = formats.lines(rows, name)
        if table:
            text += ["", _wrapped(_where([row for row in rows if row["bench"] == name])), "", *table]
    return "\n".join([*text, "", _refused(rows)])


def upstream_tables(rows: Sequence[Row]) -> str:
    """Upstream's published figures beside ours, and our figures by size."""
    text = upstream.of_docs(rows)
    mine = [row for row in rows if str(row["bench"]).startswith(upstream.BENCH)]
    where = [line for run in _runs(mine) for line in (_wrapped(_where(run)), "")]
    return "\n".join([*where, text, "", _refused(mine)])


def epilogues_table(rows: Sequence[Row]) -> str:
    """Epilogues in Python over built-in ones."""
    mine = [row for row in rows if row["bench"] == epilogues.BENCH]
    if not mine:
        return "\n".join(epilogues.lines(rows))
    words = [_wrapped(_where(mine)), "", *epilogues.lines(rows), "", _wrapped(epilogues.summary(rows))]
    return "\n".join([*words, "", _refused(mine)])


# The blocks of a file, by the name in their marks.
BLOCKS = {
    "bench": short_table,
    "bench tables": tables,
    "bench serving": serving_table,
    "bench formats": formats_table,
    "bench upstream": upstream_tables,
    "bench epilogues": epilogues_table,
}


def marks(name: str) -> tuple[str, str]:
    """The marks around a block."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def blocks_in(text: str, path: str) -> list[str]:
    """The names of the blocks in a text.

    Raises:
        ValueError: there is none, or its marks are not one begin and after it one end; ``path`` is the file
        in
            the message.
    """
    found = []
    for name in BLOCKS:
        begin, end = marks(name)
        counts = text.count(begin), text.count(end)
        if counts != (0, 0):
            if counts != (1, 1) or text.index(begin) > text.index(end):
                raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
            found.append(name)
    if not found:
        raise ValueError(
            f"--readme: {path} must hold one {marks('bench')[0]} and after it one {marks('bench')[1]}"
        )
    return found


def with_blocks(text: str, rows: Sequence[Row], path: str) -> str:
    """``text`` with the tables of ``rows`` between its marks.

    Raises:
        ValueError: as :func:`blocks_in`; or a row is of a test that had no device.
    """
    refuse_fakes(rows)
    for name in blocks_in(text, path):
        begin, end = marks(name)
        before, after = text[: text.index(begin)], text[text.index(end) :]
        text = f"{before}{begin}\n{BLOCKS[name](rows)}\n{after}"
    return text
