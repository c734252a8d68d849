"""Draws the pictures of the documents: ``python docs/_site/draw.py`` writes docs/pictures/*.svg.

Each picture has a background of its own and colours for light and dark, so that it is readable on any page.
The figures of the picture of outliers are computed by fp4gemm, and those of speed come from bench/results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
STYLE = """
  text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 14px; }
  .small { font-size: 11px; }
  .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
  .back { fill: #ffffff; } .ink { fill: #1f2328; } .dim { fill: #59636e; }
  .line { stroke: #59636e; fill: none; } .grid { stroke: #d1d9e0; fill: none; }
  .a { fill: #0969da; } .b { fill: #bc4c00; } .c { fill: #1a7f37; }
  .la, .lb { fill: none; stroke-width: 2.5; } .la { stroke: #0969da; } .lb { stroke: #bc4c00; }
  .pa { fill: #ddf4ff; stroke: #0969da; } .pb { fill: #fff1e5; stroke: #bc4c00; }
  .pc { fill: #dafbe1; stroke: #1a7f37; } .pd { fill: #eaeef2; stroke: #59636e; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #161b22; } .ink { fill: #e6edf3; } .dim { fill: #9198a1; }
    .line { stroke: #9198a1; } .grid { stroke: #3d444d; }
    .a { fill: #58a6ff; } .b { fill: #f0883e; } .c { fill: #3fb950; }
    .la { stroke: #58a6ff; } .lb { stroke: #f0883e; }
    .pa { fill: #0c2d6b; stroke: #58a6ff; } .pb { fill: #4d2d00; stroke: #f0883e; }
    .pc { fill: #0f3a1d; stroke: #3fb950; } .pd { fill: #30363d; stroke: #9198a1; }
  }"""


def svg(name: str, title: str, width: int, height: int, parts: Iterable[str]) -> None:
    """Write one picture."""
    body = "\n".join(f"  {part}" for part in parts)
    (PICTURES / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{title}">\n  <style>{STYLE}\n  </style>\n'
        f'  <rect class="back" width="{width}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, content: str, look: str = "ink", anchor: str = "start") -> str:
    content = content.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}" text-anchor="{anchor}">{content}</text>'


def line(x1: float, y1: float, x2: float, y2: float, look: str = "line") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{look}"/>'


def box(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" class="{look}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    """A line with a head at (x2, y2)."""
    angle = math.atan2(y2 - y1, x2 - x1)
    head = [(x2 - 8 * math.cos(angle + side), y2 - 8 * math.sin(angle + side)) for side in (-0.4, 0.4)]
    return [line(x1, y1, x2, y2), *(line(x2, y2, x, y) for x, y in head)]


def e2m1() -> None:
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    at = [50 + 100 * value for value in values]
    parts = [line(30, 60, 670, 60)]
    for code, (x, value) in enumerate(zip(at, values, strict=True)):
        parts += [f'<circle cx="{x}" cy="60" r="6" class="a"/>', text(x, 40, f"{value:g}", "ink", "middle")]
        parts.append(text(x, 88, f"{code:03b}", "dim code", "middle"))
    parts.append(
        text(
            50,
            118,
            "codes without the sign; the middle between two neighbours rounds to the even code",
            "dim",
        )
    )
    svg("e2m1", "The magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6", 700, 135, parts)


def levels() -> None:
    parts = [text(20, 32, "A: fp32, one for the row", "b"), box(20, 42, 660, 26, "pb")]
    parts.append(text(350, 60, "amax of the row", "ink", "middle"))
    parts.append(text(20, 98, "s: e4m3, one for every 16 elements", "c"))
    for block in range(4):
        parts += [
            box(20 + 166 * block, 108, 162, 26, "pc"),
            text(101 + 166 * block, 126, f"scale {block}", "ink", "middle"),
        ]
        parts += [box(20 + 166 * block + 10.15 * i, 174, 9.0, 26, "pa") for i in range(16)]
    parts.append(text(20, 164, "q: e2m1, 4 bits for each element", "a"))
    parts.append(text(20, 226, "4 + 8/16 = 4.5 bits an element, and 32 bits for each row", "dim"))
    svg(
        "levels",
        "One fp32 amax for a row, one e4m3 scale for 16 elements, one 4-bit code for each",
        700,
        242,
        parts,
    )


def outlier_errors() -> tuple[list[int], dict[str, list[float]]]:
    """Exponents of two, and the relative error of the tokens beside one that is 2^e times as large."""
    import fp4gemm
    import torch

    torch.manual_seed(0)
    tokens = torch.randn(65, 512)
    exponents = list(range(0, 21, 2))
    errors: dict[str, list[float]] = {"tensor": [], "row": []}
    for exponent in exponents:
        x = tokens.clone()
        x[0] *= 2.0**exponent
        for scaling in ("tensor", "row"):
            found = fp4gemm.quantize(x, scaling=scaling).dequantize()[1:] - x[1:]
            errors[scaling].append(float(found.norm() / x[1:].norm()))
    return exponents, errors


def outliers() -> None:
    exponents, errors = outlier_errors()
    left, top, width, height = 70, 30, 590, 190

    def place(exponent: float, error: float) -> tuple[float, float]:
        return left + width * exponent / exponents[-1], top + height * (1 - min(error, 1.0))

    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(0, tick)
        parts += [line(left, y, left + width, y, "grid"), text(left - 8, y + 5, f"{tick:.0%}", "dim", "end")]
    for exponent in exponents[::2]:
        x, _ = place(exponent, 0)
        parts.append(text(x, top + height + 22, f"{2**exponent:,}", "dim", "middle"))
    for look, scaling in (("lb", "tensor"), ("la", "row")):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, exponents, errors[scaling]))
        parts.append(f'<polyline points="{points}" class="{look}"/>')
    parts.append(text(left + 10, top + 22, "one amax for the tensor", "b"))
    parts.append(text(left + 10, place(0, errors["row"][0])[1] - 10, "one amax for each token", "a"))
    parts.append(
        text(
            left + width / 2,
            top + height + 44,
            "one token is this many times as large as the others",
            "dim",
            "middle",
        )
    )
    svg("outliers", "The relative error of ordinary tokens beside an outlier token", 700, 280, parts)


def epilogue() -> None:
    parts = []
    for y, look, lines in (
        (20, "pa", ("A: tokens", "codes and scales")),
        (90, "pa", ("B: weight", "codes and scales")),
    ):
        parts += [
            box(20, y, 150, 56, look),
            text(95, y + 24, lines[0], "ink", "middle"),
            text(95, y + 44, lines[1], "dim", "middle"),
        ]
        parts += arrow(172, y + 28, 218, 83)
    parts += [
        box(220, 50, 130, 66, "pa"),
        text(285, 78, "tensor cores", "ink", "middle"),
        text(285, 98, "sums in fp32", "dim", "middle"),
    ]
    parts += arrow(352, 83, 388, 83)
    parts += [box(390, 20, 210, 126, "pb"), text(495, 44, "epilogue, same kernel", "ink", "middle")]
    for i, step in enumerate(
        ("x amax of the token", "x amax of the channel", "+ bias", "activation, + beta C")
    ):
        parts.append(text(410, 68 + 21 * i, step, "ink code"))
    parts += [*arrow(602, 83, 628, 83), text(634, 88, "D", "ink")]
    svg(
        "epilogue",
        "Codes and scales enter the tensor cores; the epilogue multiplies by both amax vectors",
        700,
        166,
        parts,
    )


SPEED = {  # the contenders of the picture of speed: name, colour
    "fp8 merged": ("FP8", "pd"),
    "fp4gemm W4A16": ("W4A16", "pb"),
    "fp4gemm W4A8": ("W4A8", "pc"),
    "fp4gemm W4A4": ("W4A4", "pa"),
}


def speed() -> None:
    """Decode steps of whole models in a CUDA graph, from the kept results."""
    lines = (RESULTS / "h200-models.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("mode") == "decode"]
    found = {
        (row["model"], row["contender"], row["batch"]): row["ratio"]["bf16 merged"]
        for row in rows
        if row["contender"] in SPEED
    }
    models = list(dict.fromkeys(model for model, _, _ in found))
    top, height, width, bar = 62, 170, 310, 18
    steps = math.ceil(2 * max(found.values()))  # of the axis, 0.5 each
    upper = steps / 2
    parts = []
    for at, model in enumerate(models[:2]):
        left = 50 + 370 * at
        batches = sorted({batch for name, _, batch in found if name == model})
        parts.append(text(left, 30, f"{model}, a decode step", "ink"))
        for tick in (step / 2 for step in range(steps + 1)):
            y = top + height * (1 - tick / upper)
            parts += [line(left, y, left + width, y, "line" if tick == 1 else "grid")]
            parts.append(text(left - 8, y + 5, f"{tick:g}", "dim", "end"))
        group = width / len(batches)
        for place, batch in enumerate(batches):
            x = left + group * place + (group - bar * len(SPEED)) / 2
            parts.append(text(left + group * (place + 0.5), top + height + 20, str(batch), "dim", "middle"))
            for side, (contender, (_, look)) in enumerate(SPEED.items()):
                value = found[model, contender, batch]
                tall = height * value / upper
                parts.append(box(x + bar * side, top + height - tall, bar - 2, tall, look))
                middle = x + bar * side + bar / 2 - 1
                parts.append(text(middle, top + height - tall - 5, f"{value:.1f}", "dim small", "middle"))
        parts.append(text(left + width / 2, top + height + 42, "batch", "dim", "middle"))
    device = rows[0]["device"].removeprefix("NVIDIA ")
    for place, (name, look) in enumerate(SPEED.values()):
        x = 50 + 88 * place
        parts += [box(x, 300, 14, 14, look), text(x + 20, 312, name, "ink")]
    parts.append(text(390, 312, f"times as fast as bf16 (1), on one {device}, {rows[0]['date']}", "dim"))
    svg("speed", "Decode steps of two models: times as fast as bf16, by batch", 760, 330, parts)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for draw in (e2m1, levels, outliers, epilogue, speed):
        draw()


if __name__ == "__main__":
    main()
