"""The report: one HTML page with tables and pictures, and the same tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import upstream
from .pictures import pictures
from .results import Row, by_case, one_device, refuse_fakes
from .tables import remarks, table, table_lines

TEMPLATE = Path(__file__).with_name("report.html.j2")
PAGE, MARKDOWN = "report.html", "report.md"
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


class Section(NamedTuple):
    """The part of a page about one bench."""

    title: str
    text: str
    cases: list[tuple[str, list[Row]]]


TEXTS = {
    "dense": "D = A @ B.T of quantized operands, weights prepared once.",
    "grouped": "The products of a layer of experts, in one launch.",
    "layer": "A linear layer's forward, the quantization of its input included.",
    "quantize": "Quantizers; of copy: bytes that must move / time, over the bandwidth of a copy.",
    "model": (
        "Steps of whole models with random weights, from token ids to logits. ms: a replay of a CUDA graph; "
        "eager ms: the same called from Python; us a layer: without embedding, last norm and lm_head; "
        "cosine, max diff: of the logits to those of bf16 merged."
    ),
    "serving": "The layers of a model as vLLM and SGLang call them, quantization of the inputs included.",
    "epilogues": "Epilogues in Python, and the built-in ones that move the same bytes.",
    "overhead": "Host microseconds of a call, from Python to its return, while the device keeps up.",
    "upstream quantize": "Upstream's table 1: x and x.T, cast in one call as a gradient is.",
    "upstream grouped": "Upstream's table 2: the same of eight tensors, which share the m rows.",
    "upstream swizzle": "Upstream's table 3: block scales swizzled in the cast, and by another kernel.",
    "upstream gemm": "Upstream's table 4: the GEMM of quantized operands alone.",
    "upstream forward": "Upstream's table 5: a layer's forward pass, with the casts of x, both ways, and W.",
    "upstream backward": "Upstream's table 6: the casts of dY, dgrad and wgrad as one unit.",
    "upstream mxfp8": "Upstream's table 7: a grouped linear layer's forward pass; weights were cast before.",
}


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the page and the Markdown into a folder, and returns their paths.

    Raises:
        ValueError: the rows are of several devices, or of a test that had no device.
    """
    refuse_fakes(rows)
    one_device(rows)
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / PAGE, folder / MARKDOWN]
    command = " and ".join(dict.fromkeys(row["command"] for row in rows))
    made[0].write_text(html(rows, command), encoding="utf-8")
    made[1].write_text(markdown(rows, command), encoding="utf-8")
    return made


# ---- what both forms share --------------------------------------------------------------------------------


def facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(fact, value) of the machine, and its measured roofline."""
    first = rows[0]
    made = [(name.replace("_", " "), str(first[name])) for name in FACTS if first.get(name) is not None]
    bounds = first["roofline"]
    peaks = ", ".join(f"{rate:g} TFLOP/s ({unit})" for unit, rate in bounds["tflop_s"].items())
    made.append(("copy", f"{bounds['copy_gb_s']:g} GB/s (read plus write)"))
    made.append(("read", f"{bounds['read_gb_s']:g} GB/s"))
    made.append(("largest matmul", peaks))
    return [*made, *conditions(rows)]


def conditions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The spans of clocks, power and temperature over all measurements."""
    made = []
    for key, unit in (("sm_mhz", "MHz"), ("mem_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "°C")):
        values = [row[key] for row in rows if key in row]
        if values:
            made.append(
                (f"{key.rpartition('_')[0]} while measured", f"{min(values):g} to {max(values):g} {unit}")
            )
    return made


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each bench, in the order of the rows."""
    made = []
    for bench in dict.fromkeys(row["bench"] for row in rows):
        mine = [row for row in rows if row["bench"] == bench]
        made.append(Section(bench, TEXTS.get(bench, ""), list(by_case(mine))))
    return made


def refusals(rows: Sequence[Row]) -> list[str]:
    """A line for each contender that was refused."""
    return [f"{row['case']}, {row['contender']}: {row['refused']}" for row in rows if "refused" in row]


# ---- HTML -------------------------------------------------------------------------------------------------


def html(rows: Sequence[Row], command: str) -> str:
    """One page that needs no other file."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    drawn = pictures(rows)
    return template.render(
        facts=facts(rows),
        command=command,
        refusals=refusals(rows),
        published=upstream.tables(rows),
        sources=upstream.sources(rows),
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
    """The <svg> element without the XML header."""
    import markupsafe

    text = svg.decode()
    return markupsafe.Markup(text[text.index("<svg") :])


# ---- Markdown ---------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], command: str) -> str:
    """The tables of the page as Markdown."""
    lines = ["# fp4gemm: measured", "", f"By `{command}`.", ""]
    lines += table_lines(("", ""), facts(rows))
    wrong = refusals(rows)
    lines += ["", f"**{len(wrong)} refused.**" if wrong else "Nothing was refused.", ""]
    lines += [f"* {text}" for text in wrong]
    published = upstream.text(rows)
    if published:
        lines += ["", "## Upstream's figures and ours", "", published]
    for section in sections(rows):
        lines += ["", f"## {section.title}", "", section.text]
        for case, mine in section.cases:
            headings, body = table(mine)
            lines += ["", f"### {case}", "", *(table_lines(headings, body) if body else [])]
            lines += [f"* {text}" for text in remarks(mine)]
    return "\n".join(lines) + "\n"
