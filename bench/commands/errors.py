"""``python -m bench errors``: the quantization error of each mode, synthetic and real data, on any device.

    error = |x^ - x| / |x|    SQNR = -20 log10(error) dB    x^ = dequantize(quantize(x)), |.| of all elements

With the Hadamard transform x^ is compared with the exactly rotated x (in float64): rotations keep lengths, so
that is the error behind the inverse rotation. Of the activations each layer's error is taken, then the mean
of the layers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from torch import Tensor

from ..measure import machine

Row = dict[str, object]
ROOT = Path(__file__).resolve().parents[2]
SIGNS = 0xD7E8
SEED = 20260


@dataclass(frozen=True)
class Mode:
    """A line of the table: options of fp4gemm.quantize, or MXFP8 where ``mxfp8``."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    mxfp8: bool = False


def modes() -> tuple[Mode, ...]:
    """All that is compared, in the order of the table."""
    four = tuple(
        Mode(
            f"{scaling}, 4over6 {error} {bound}",
            {"scaling": scaling, "four_over_six": error, "e4m3_max": bound},
        )
        for scaling in ("tensor", "row")
        for error in ("mae", "mse")
        for bound in (448, 256)
    )
    return (
        Mode("tensor", {"scaling": "tensor"}),
        Mode("row", {"scaling": "row"}),
        Mode("16x16", {"scaling": "tensor", "block": (16, 16)}),
        *four,
        Mode(
            "16x16, 4over6 mae 256",
            {"scaling": "tensor", "block": (16, 16), "four_over_six": "mae", "e4m3_max": 256},
        ),
        Mode("row, Hadamard bf16", {"hadamard": "bf16"}),
        Mode("row, Hadamard fp32", {"hadamard": "fp32"}),
        Mode("row, stochastic", {"stochastic": True}),
        Mode("MXFP8 e4m3", mxfp8=True),
    )


def rotated(x: Tensor, signs: int = SIGNS) -> Tensor:
    """out[:, 16 j + c] = 1/4 sum over r of sigma_r (-1)^popcount(r & c) x[:, 16 j + r], in float64."""
    sigma = [-1.0 if signs >> r & 1 else 1.0 for r in range(16)]
    matrix = [[sigma[r] * (-1.0) ** (r & c).bit_count() / 4 for c in range(16)] for r in range(16)]
    h = torch.tensor(matrix, dtype=torch.float64, device=x.device)
    return (x.double().view(-1, x.shape[1] // 16, 16) @ h).view(x.shape)


def relative_error(mode: Mode, x: Tensor) -> float:
    """|x^ - x| / |x| of one tensor (m, k)."""
    if mode.mxfp8:
        found = fp4gemm.dequantize(fp4gemm.quantize_mxfp8(x))
    else:
        options = dict(mode.options)
        if options.get("stochastic"):
            options["rng_state"] = torch.tensor([SEED, 0], dtype=torch.int64, device=x.device)
        found = fp4gemm.dequantize(fp4gemm.quantize(x, **options))
    exact = rotated(x) if "hadamard" in mode.options else x.double()
    return float((found.double() - exact).norm() / exact.norm())


def decibels(error: float) -> float:
    """SQNR of a relative error."""
    return -20 * math.log10(error)


def synthetic(m: int, k: int, device: torch.device) -> dict[str, list[Tensor]]:
    """bf16 data: independent Gaussian, and Student t with 3 degrees of freedom."""
    gen = torch.Generator().manual_seed(SEED)
    gaussian = torch.randn(m, k, generator=gen)
    chi_squared = torch.randn(3, m, k, generator=gen).square().sum(dim=0)
    heavy = torch.randn(m, k, generator=gen) / (chi_squared / 3).sqrt()
    data = {"Gaussian": gaussian, "Student t, 3 dof": heavy}
    return {name: [x.to(device, torch.bfloat16)] for name, x in data.items()}


def activations(device: torch.device) -> list[Tensor]:
    """What the linear layers of the demo's model read on the demo's sentences: float32 (tokens, k) each.

    Query, key and value read the same tensor; it counts once.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    import demo
    import demo_measure

    lines = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    model, page = demo.load([line.strip() for line in lines if line.strip()], device)
    inputs = demo_measure.exact_pass(model, page).inputs
    same = ("attention.self.key", "attention.self.value")
    return [x.float().contiguous() for name, x in inputs.items() if not name.endswith(same)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench alone."""
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where it is")
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--size", type=int, default=2048, help="synthetic data are SIZE x SIZE (2048)")
    parser.add_argument(
        "--picture", type=Path, help="draw the table into this file, e.g. docs/quantization_error.png"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the table, or its rows."""
    rows = []
    for row in run(args):
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        show(rows)
    return 0


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each mode, with the error on each kind of data."""
    device = machine.device(args.device)
    data = synthetic(args.size, args.size, device)
    try:
        data["MiniLM activations"] = activations(device)
    except ImportError as error:
        print(f"without real activations (requirements/demo*.txt): {error}", file=sys.stderr)
    rows = []
    for mode in modes():
        errors = {
            name: statistics.fmean(relative_error(mode, x) for x in tensors) for name, tensors in data.items()
        }
        row: Row = {"bench": "errors", "mode": mode.name, "device": device.type, **errors}
        rows.append(row)
        yield row
    if args.picture is not None:
        from ..report.sqnr_picture import draw

        draw(rows, args.picture)


def kinds(rows: Sequence[Row]) -> list[str]:
    """The kinds of data in rows of the table."""
    return [name for name in rows[0] if name not in ("bench", "mode", "device")]


def show(rows: Sequence[Row]) -> None:
    """Prints the table: SQNR, and the relative error behind it."""
    print(f"{'SQNR in dB (relative error)':<30}" + "".join(f"{name:>22}" for name in kinds(rows)))
    for row in rows:
        cells = ((decibels(float(str(row[name]))), float(str(row[name]))) for name in kinds(rows))
        print(f"{row['mode']:<30}" + "".join(f"{db:>13.2f} ({error:.4f})" for db, error in cells))
