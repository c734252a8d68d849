"""The targets of the Hopper bench: how much faster than a rival our products must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .contest import READ_FLOOR as FLOOR
from .traffic import Target

BF16, HUMMING = "torch bf16", "humming"
DECODE_M = 16
LARGE_BYTES = 150_000_000  # of packed weights: what many SMs need to stream at full speed


def dense(m: int, n: int, k: int) -> tuple[Target, ...]:
    """Of mm with m rows and a prepacked weight (n, k)."""
    peer = Target(1.4 if m <= DECODE_M else 1.0, HUMMING)
    if n * k * 9 // 16 >= LARGE_BYTES:
        return (Target(3.0, BF16), peer) if m <= DECODE_M else (peer,)
    if (n, k) == (4096, 4096):
        return (Target(1.8, BF16), peer) if m <= DECODE_M else (peer,)
    if (n, k) != (8192, 8192):
        return (peer,)
    steps = ((DECODE_M, 2.6), (32, 2.1), (64, 2.0), (128, 1.4), (256, 1.0))
    return Target(next((value for most, value in steps if m <= most), 0.97), BF16), peer


END_TO_END = (Target(0.88, BF16),)


def grouped(rows_an_expert: int) -> tuple[Target, ...]:
    """Of grouped_mm with prepacked weights and so many rows an expert on average."""
    if rows_an_expert <= DECODE_M:
        return Target(0.65, FLOOR), Target(2.5, BF16)
    return (Target(0.95, BF16),) if rows_an_expert >= 128 else ()


def judged(row: Mapping[str, Any], targets: Sequence[Target]) -> dict[str, object]:
    """bar: what must hold, with what was found; met: whether all does, None where there is nothing to say."""
    if not targets:
        return {}
    if "refused" in row:
        return {"bar": "; ".join(map(str, targets)), "met": False}
    texts, verdicts = [], []
    for bar in targets:
        ratio = row.get("ratio", {}).get(bar.of)
        if ratio is None:
            texts.append(f"{bar} (not measured)")
            continue
        met = ratio >= bar.value
        verdicts.append(met)
        texts.append(f"{bar} ({ratio:.2f}{'' if met else ' MISSED'})")
    return {"bar": "; ".join(texts), "met": all(verdicts) if verdicts else None}
