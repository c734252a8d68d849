"""``python -m bench report``: everything in one run: an HTML page, Markdown, README's tables."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..measure.cases import Sizes, families
from ..measure.contest import Job
from ..measure.harness import Harness
from ..measure.models import Layer, expert_layers
from ..report.results import Row, by_case, weight_name
from ..report.tables import remarks, table
from . import dense, grouped, layer, overhead, plot, quantize

TEMPLATE = Path(__file__).parents[1] / "report" / "report.html.j2"
RESULTS, PAGE, MARKDOWN = "results.jsonl", "report.html", "report.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
FACTS = (
    "device",
    "compute_capability",
    "sms",
    "l2_bytes",
    "threads",
    "driver",
    "cuda",
    "torch",
    "cublas",
    "humming",
    "fp4gemm",
    "revision",
    "library",
    "date",
    "max_sm_mhz",
    "max_mem_mhz",
    "power_limit_w",
)
QUICK_DENSE = (
    (Layer("", "", 8192, 8192), (1, 16, 64, 256, 1024, 4096)),
    (Layer("llama-3.1-8b", "gate_up", 28672, 4096), (1, 16, 64, 256)),
    (Layer("gpt-oss-120b", "qkv", 5120, 2880), (1, 16, 64, 256)),
)
QUICK_MODELS, QUICK_TOKENS = ("qwen3-30b", "gpt-oss-120b"), (16, 256, 4096)
QUICK_LAYER = (16, 256, 4096)
# What README shows of the rivals; the page has all of them.
README_BASELINES = ("torch bf16", "torch fp32", "cuBLASLt nvfp4 + post-scale", "humming", "unfused")


class Section(NamedTuple):
    """What a page has of one bench."""

    title: str
    text: str
    cases: list[tuple[str, list[Row]]]


TEXTS = {
    "dense": "D = A @ B.T of quantized operands, weights prepared once.",
    "grouped": "The products of a layer of experts, in one launch.",
    "layer": "A linear layer's forward, the quantization of its input included.",
    "quantize": "Quantizers; of copy: bytes that must move over the time, by the bandwidth of a copy.",
    "overhead": "Host microseconds of a call, from Python to its return, while the device keeps up.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command alone."""
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        help="files of --out: nothing is measured, the page is of them",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes: less than 4 minutes on a GPU")
    parser.add_argument("--to", type=Path, default=Path("fp4gemm-report"), help="folder (fp4gemm-report)")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="also replaces what stands between the marks in that file"
    )


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """The jobs of a whole report."""
    if not (args.quick and harness.is_cuda):
        made = [job for bench in (dense, grouped, layer, quantize) for job in bench.jobs(args, harness)]
        return [*made, *overhead.jobs(args, harness)]
    wanted = [(one, m) for one, ms in QUICK_DENSE for m in ms]
    routed = [(one, tokens, "uniform") for one in expert_layers(QUICK_MODELS) for tokens in QUICK_TOKENS]
    first = Sizes().square
    square = [family for family in families(Sizes()) if family.title == f"bf16 {first[0]}x{first[1]}"]
    return [
        *dense.of_layers(wanted, harness),
        *layer.of_layers([(QUICK_DENSE[0][0], m) for m in QUICK_LAYER], harness),
        *grouped.of_layers(routed, harness),
        *quantize.of_families(square, harness),
        *overhead.jobs(args, harness),
    ]


def require(readme: Path | None) -> None:
    """Raises ValueError or OSError now where the page could not be written later."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"report: needs {package} (pip install rich matplotlib jinja2)")
    if readme is not None:
        with_block(readme.read_text(encoding="utf-8"), "", str(readme))


def write(rows: Sequence[Row], folder: Path, readme: Path | None) -> list[Path]:
    """Writes the page and the Markdown, and README's tables where that file is named."""
    plot.one_device(rows)
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / PAGE, folder / MARKDOWN]
    command = " and ".join(dict.fromkeys(row["command"] for row in rows))
    made[0].write_text(html(rows, command), encoding="utf-8")
    made[1].write_text(markdown(rows, command), encoding="utf-8")
    if readme is not None:
        text = with_block(readme.read_text(encoding="utf-8"), readme_tables(rows), str(readme))
        readme.write_text(text, encoding="utf-8")
        made.append(readme)
    return made


# ---- what all forms share ---------------------------------------------------------------------------------


def facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(fact, value) of the machine, and the roofline that was found on it."""
    first = rows[0]
    made = [(name.replace("_", " "), str(first[name])) for name in FACTS if first.get(name) is not None]
    bounds = first["roofline"]
    peaks = ", ".join(f"{rate:g} TFLOP/s ({unit})" for unit, rate in bounds["tflop_s"].items())
    made.append(("copy", f"{bounds['copy_gb_s']:g} GB/s (read plus write)"))
    made.append(("read", f"{bounds['read_gb_s']:g} GB/s"))
    made.append(("largest matmul", peaks))
    return [*made, *conditions(rows)]


def conditions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The spans of clocks, power and temperature while everything was measured."""
    made = []
    for key, unit in (("sm_mhz", "MHz"), ("mem_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "°C")):
        values = [row[key] for row in rows if key in row]
        if values:
            made.append(
                (f"{key.rpartition('_')[0]} while measured", f"{min(values):g} to {max(values):g} {unit}")
            )
    return made


def sections(rows: Sequence[Row]) -> list[Section]:
    """The benches in the order of their first rows."""
    made = []
    for bench in dict.fromkeys(row["bench"] for row in rows):
        mine = [row for row in rows if row["bench"] == bench]
        made.append(Section(bench, TEXTS.get(bench, ""), list(by_case(mine))))
    return made


def refusals(rows: Sequence[Row]) -> list[str]:
    return [f"{row['case']}, {row['contender']}: {row['refused']}" for row in rows if "refused" in row]


# ---- HTML -------------------------------------------------------------------------------------------------


def html(rows: Sequence[Row], command: str) -> str:
    """One page that needs no other file."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    drawn = plot.pictures(rows)
    return template.render(
        facts=facts(rows),
        command=command,
        refusals=refusals(rows),
        sections=[
            {
                "title": section.title,
                "text": section.text,
                "pictures": [_inline(data) for (_, bench), data in drawn.items() if bench == section.title],
                "cases": [
                    {"title": case, "table": table(mine), "remarks": remarks(mine)}
                    for case, mine in section.cases
                ],
            }
            for section in sections(rows)
        ],
    )


def _inline(svg: bytes) -> Any:
    """The <svg> element alone."""
    import markupsafe

    text = svg.decode()
    return markupsafe.Markup(text[text.index("<svg") :])


# ---- Markdown ---------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], command: str) -> str:
    """The same tables as Markdown."""
    lines = ["# fp4gemm: measured", "", f"By `{command}`.", ""]
    lines += _table(("", ""), facts(rows))
    wrong = refusals(rows)
    lines += ["", f"**{len(wrong)} refused.**" if wrong else "Nothing was refused.", ""]
    lines += [f"* {text}" for text in wrong]
    for section in sections(rows):
        lines += ["", f"## {section.title}", "", section.text]
        for case, mine in section.cases:
            headings, body = table(mine)
            lines += ["", f"### {case}", "", *(_table(headings, body) if body else [])]
            lines += [f"* {text}" for text in remarks(mine)]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    def one(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    align = ["---", *("---:" for _ in headings[1:])]
    return [one(headings), one(align), *(one(line) for line in lines)]


# ---- README -----------------------------------------------------------------------------------------------


def readme_tables(rows: Sequence[Row]) -> str:
    """How many times as fast as its rivals fp4gemm was, by weight and number of tokens; the quantizers."""
    first = rows[0]
    spans = ", ".join(
        f"{name.partition(' while')[0]} {value}"
        for name, value in conditions(rows)
        if name.startswith(("sm ", "power "))
    )
    where = f"{first['device']}{f' ({spans})' if spans else ''}, {first['date']}"
    lines = [f"{where}, torch {first['torch']}, revision {first['revision']}, by `{first['command']}`."]
    for bench, title, across in (
        ("dense", "`mm`, weight n x k; m =", "m"),
        ("layer", "`quantize` and `mm`, weight n x k; m =", "m"),
        ("grouped", "`grouped_mm`, experts x n x k; tokens =", "tokens"),
    ):
        lines += _matrix([row for row in rows if row["bench"] == bench], title, across)
    modes = [row for row in rows if row["bench"] == "quantize" and row.get("bar")]
    if modes:
        body = [
            (row["contender"], row["case"].partition(" ")[2], f"{row['us']:.1f}", f"{row['of_copy']:.2f}")
            for row in modes
            if "us" in row
        ]
        lines += ["", *_table(("quantizer", "x", "us", "of copy bandwidth"), body)]
    wrong = refusals(rows)
    return "\n".join([*lines, "", f"Refused: {'; '.join(wrong)}." if wrong else "Nothing was refused."])


def _matrix(rows: Sequence[Row], title: str, across: str) -> list[str]:
    """Lines for each weight: its time, and how many times as fast as each rival, by the number of tokens."""
    ours = [row for row in rows if row["contender"] == "fp4gemm" and "us" in row]
    if not ours:
        return []
    sizes = sorted({row[across] for row in ours})
    rivals = dict.fromkeys(
        name for row in ours for name in row.get("ratio", {}) if name.startswith(README_BASELINES)
    )
    body: list[tuple[str, ...]] = []
    for weight in dict.fromkeys(map(weight_name, ours)):
        mine = {row[across]: row for row in ours if weight_name(row) == weight}
        cells = [f"{mine[size]['us']:.1f}" if size in mine else "" for size in sizes]
        body.append((weight, "us", *cells))
        for rival in rivals:
            found = [mine[size].get("ratio", {}).get(rival) if size in mine else None for size in sizes]
            if any(x is not None for x in found):
                body.append(("", f"x {rival}", *("" if x is None else f"{x:.2f}" for x in found)))
    return ["", *_table((title, "", *map(str, sizes)), body)]


def with_block(text: str, block: str, name: str) -> str:
    """``text`` with the block between its marks.

    Raises:
        ValueError: it has no such marks, or several.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"--readme: {name} must hold one {BEGIN} and behind it one {END}")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{block}\n{END}", text)


def command_line(arguments: Sequence[str]) -> str:
    """The command that measures the same: without what only says where the results go."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--to", "--out", "--readme"):
        parser.add_argument(option)
    parser.add_argument("--fresh", action="store_true")
    _, arguments = parser.parse_known_args(arguments)
    return shlex.join(["python", "-m", "bench", *arguments])
