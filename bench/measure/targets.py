"""The project's targets: a table for each benchmark, and the comparison of a row with its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .contest import READ_FLOOR

BF16, HUMMING = "torch bf16", "humming"


@dataclass(frozen=True)
class Target:
    """A value that a measurement must reach.

    ``of`` says which: "copy", the fraction of a copy's bandwidth; "us", microseconds, of which there may be
    at most ``value``; else the name of a contender, whose time over ours must be at least ``value``.
    """

    value: float
    of: str = "copy"

    def __str__(self) -> str:
        if self.of == "us":
            return f"<= {self.value:g} us"
        return f">= {self.value:.2f} of {self.of}"


# ---- quantizers, by the name of their case (cases.py) -----------------------------------------------------

FEW_ROWS = "few rows"  # inputs of up to 64 rows, which are bound by the launch
QUANTIZE = {
    "row": Target(0.92),
    "tensor, amax given": Target(0.92),
    "row 4over6 mae": Target(0.80),
    "row 4over6 mse": Target(0.80),
    "row stochastic": Target(0.80),
    "row hadamard bf16": Target(0.80),
    "axis 0 tensor hadamard bf16, amax given": Target(0.80),
    "both row": Target(0.85),
    "both tensor, amax given": Target(0.85),
    "both tensor hadamard bf16, amax given": Target(0.80),
    "silu_and_mul row": Target(0.90),
    "grouped row": Target(0.90, "row"),
    "dequantize to bf16": Target(0.92),
    "dequantize to fp32": Target(0.92),
    FEW_ROWS: Target(4.0, "us"),
}

# ---- products of prepacked weights (python -m bench hopper) -----------------------------------------------


class Span(NamedTuple):
    """A target for products of ``least`` to ``most`` rows; for experts, of rows an expert on average."""

    least: int
    most: int
    target: Target


UNLIMITED = 1 << 62
LARGE_BYTES = 150_000_000  # of quantized weights: so many keep every SM streaming at the full rate
ANY, LARGE = "any weight", "large weights"
DENSE: dict[str | tuple[int, int], tuple[Span, ...]] = {
    LARGE: (Span(1, 16, Target(3.0, BF16)),),
    (4096, 4096): (Span(1, 16, Target(1.8, BF16)),),
    (8192, 8192): (
        Span(1, 16, Target(2.6, BF16)),
        Span(17, 32, Target(2.1, BF16)),
        Span(33, 64, Target(2.0, BF16)),
        Span(65, 128, Target(1.4, BF16)),
        Span(129, 256, Target(1.0, BF16)),
        Span(257, UNLIMITED, Target(0.97, BF16)),
    ),
    ANY: (Span(1, 16, Target(1.4, HUMMING)), Span(17, UNLIMITED, Target(1.0, HUMMING))),
}
GROUPED = (
    Span(1, 16, Target(0.65, READ_FLOOR)),
    Span(1, 16, Target(2.5, BF16)),
    Span(128, UNLIMITED, Target(0.95, BF16)),
)
END_TO_END = (Target(0.88, BF16),)


def dense(m: int, n: int, k: int) -> tuple[Target, ...]:
    """The targets of mm with m rows and a prepacked weight (n, k)."""
    weight = LARGE if n * k * 9 // 16 >= LARGE_BYTES else (n, k)
    return _of(m, (*DENSE.get(weight, ()), *DENSE[ANY]))


def grouped(rows_an_expert: int) -> tuple[Target, ...]:
    """The targets of grouped_mm with prepacked weights and so many rows an expert on average."""
    return _of(rows_an_expert, GROUPED)


def _of(rows: int, spans: Sequence[Span]) -> tuple[Target, ...]:
    return tuple(span.target for span in spans if span.least <= rows <= span.most)


def judged(row: Mapping[str, Any], targets: Sequence[Target]) -> dict[str, object]:
    """What a row gets of its targets.

    ``target``: each target with the value found; ``met``: whether all that were measured are met, None where
    none was measured. A refused row meets no target. Without targets the row gets nothing.
    """
    if not targets:
        return {}
    if "refused" in row:
        return {"target": "; ".join(map(str, targets)), "met": False}
    texts, verdicts = [], []
    for target in targets:
        ratio = row.get("ratio", {}).get(target.of)
        if ratio is None:
            texts.append(f"{target} (not measured)")
            continue
        met = ratio >= target.value
        verdicts.append(met)
        texts.append(f"{target} ({ratio:.2f}{'' if met else ' MISSED'})")
    return {"target": "; ".join(texts), "met": all(verdicts) if verdicts else None}
