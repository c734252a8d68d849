"""The quantization error of each mode, on synthetic data and on activations of a real model.

    error = |x^ - x| / |x|    SQNR = -20 log10(error) dB    x^ = dequantize(quantize(x))

|.| is the norm over all elements. With the Hadamard transform x^ is compared with x as rotated exactly, in
float64: rotations keep lengths, so that this is the error after the inverse rotation. Of the activations, the
mean of the errors of the layers is taken.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from fp4gemm.reference.eden import drawn_signs
from torch import Tensor

from .library import SIGNS

Row = dict[str, object]
ROOT = Path(__file__).resolve().parents[2]
SEED = 20260


@dataclass(frozen=True)
class Mode:
    """A line of the table: options of fp4gemm.quantize; ``mxfp8``: quantize_mxfp8 instead."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    mxfp8: bool = False


def modes() -> tuple[Mode, ...]:
    """The modes, in the order of the table."""
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
        Mode("tensor, scale search", {"scaling": "tensor", "scale_search": "mse"}),
        Mode("row, scale search", {"scale_search": "mse"}),
        Mode("row, scale search, FP8 operand", {"scale_search": "mse", "fp8_operand": True}),
        Mode("16x16, scale search", {"scaling": "tensor", "block": (16, 16), "scale_search": "mse"}),
        Mode("row, Hadamard bf16", {"hadamard": "bf16"}),
        Mode("row, Hadamard fp32", {"hadamard": "fp32"}),
        Mode("row, stochastic", {"stochastic": True}),
        Mode("row, eden", {"encode": "eden", "hadamard": "fp32", "stochastic": True}),
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
    signs = SIGNS
    if mode.mxfp8:
        found = fp4gemm.dequantize(fp4gemm.quantize_mxfp8(x))
    else:
        options = dict(mode.options)
        if options.get("stochastic"):
            options["rng_state"] = torch.tensor([SEED, 0], dtype=torch.int64, device=x.device)
        if options.get("encode") == "eden":
            signs ^= int(drawn_signs(options["rng_state"]))
        found = fp4gemm.dequantize(fp4gemm.quantize(x, **options))
    exact = rotated(x, signs) if "hadamard" in mode.options else x.double()
    return float((found.double() - exact).norm() / exact.norm())


def decibels(error: float) -> float:
    """SQNR of a relative error."""
    return -20 * math.log10(error)


def synthetic(m: int, k: int, device: torch.device) -> dict[str, list[Tensor]]:
    """bf16 data by name: independent Gaussian, and Student t with 3 degrees of freedom."""
    gen = torch.Generator().manual_seed(SEED)
    gaussian = torch.randn(m, k, generator=gen)
    chi_squared = torch.randn(3, m, k, generator=gen).square().sum(dim=0)
    heavy = torch.randn(m, k, generator=gen) / (chi_squared / 3).sqrt()
    data = {"Gaussian": gaussian, "Student t, 3 dof": heavy}
    return {name: [x.to(device, torch.bfloat16)] for name, x in data.items()}


def activations(device: torch.device) -> list[Tensor]:
    """The inputs of the linear layers of the demo's model on the demo's sentences: float32 (tokens, k) each.

    Query, key and value read the same tensor, which counts once.

    Raises:
        ImportError: the packages of the demo are missing.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    import demo
    import demo_measure

    lines = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    model, page = demo.load([line.strip() for line in lines if line.strip()], device)
    inputs = demo_measure.exact_pass(model, page).inputs
    same = ("attention.self.key", "attention.self.value")
    return [x.float().contiguous() for name, x in inputs.items() if not name.endswith(same)]


def rows(data: Mapping[str, Sequence[Tensor]], device: torch.device) -> Iterator[Row]:
    """A row for each mode, with the error on each kind of data."""
    for mode in modes():
        errors = {
            name: statistics.fmean(relative_error(mode, x) for x in tensors) for name, tensors in data.items()
        }
        yield {"bench": "errors", "mode": mode.name, "device": device.type, **errors}


def kinds(rows: Sequence[Row]) -> list[str]:
    """The kinds of data in rows of the table."""
    return [name for name in rows[0] if name not in ("bench", "mode", "device")]
