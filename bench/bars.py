"""The bars of the Hopper bench, how much faster than rivals a contender must be, and the rows with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .timing import Timing
from .traffic import Bar

Row = dict[str, object]

BF16, FP16, HUMMING, FLOOR = "torch bf16", "torch fp16", "humming", "read floor"
DECODE_M = 16
LARGE_BYTES = 150_000_000  # of packed weights: what many SMs need to stream at full speed


def dense(m: int, n: int, k: int) -> tuple[Bar, ...]:
    """Of mm with m rows and a prepacked weight (n, k)."""
    peer = Bar(1.4 if m <= DECODE_M else 1.0, HUMMING)
    if n * k * 9 // 16 >= LARGE_BYTES:
        return (Bar(3.0, BF16), peer) if m <= DECODE_M else (peer,)
    if (n, k) == (4096, 4096):
        return (Bar(1.8, BF16), peer) if m <= DECODE_M else (peer,)
    if (n, k) != (8192, 8192):
        return (peer,)
    steps = ((DECODE_M, 2.6), (32, 2.1), (64, 2.0), (128, 1.4), (256, 1.0))
    return Bar(next((value for most, value in steps if m <= most), 0.97), BF16), peer


END_TO_END = (Bar(0.88, BF16),)


def grouped(rows_an_expert: int) -> tuple[Bar, ...]:
    """Of grouped_mm with prepacked weights and so many rows an expert on average."""
    if rows_an_expert <= DECODE_M:
        return Bar(0.65, FLOOR), Bar(2.5, BF16)
    return (Bar(0.95, BF16),) if rows_an_expert >= 128 else ()


def judged(name: str, bars: Sequence[Bar], timings: Mapping[str, Timing]) -> dict[str, object]:
    """bar: what must hold, with what was found; met: whether all does, None where there is nothing to say."""
    texts, verdicts = [], []
    for bar in bars:
        if bar.of not in timings or name not in timings:
            texts.append(f"{bar} (not measured)")
            continue
        ratio = timings[bar.of].median_us / timings[name].median_us
        met = ratio >= bar.value
        verdicts.append(met)
        texts.append(f"{bar} ({ratio:.2f}{'' if met else ' MISSED'})")
    return {"bar": "; ".join(texts) or None, "met": all(verdicts) if verdicts else None}


def table(
    start: Row,
    timings: Mapping[str, Timing],
    refused: Mapping[str, str],
    bar: Sequence[Bar],
    ours: str,
    work: Mapping[str, float],
) -> Iterator[Row]:
    """A row for each contender; ``work``: flop of a call, bytes of the packed weights that it reads."""
    for name, timing in timings.items():
        us = timing.median_us
        row = start | {"contender": name} | timing.row()
        if name != FLOOR:
            row["tflop_s"] = round(work["flop"] / us / 1e6, 1)
        # torch's weights are 16 bits an element, those of everyone else 4 and a half.
        row["weight_gb_s"] = round(work["bytes"] * (32 / 9 if name.startswith("torch") else 1) / us / 1e3)
        for rival, key in (
            (FLOOR, "of_floor"),
            (BF16, "of_torch_bf16"),
            (FP16, "of_torch_fp16"),
            (HUMMING, "of_humming"),
        ):
            if rival in timings and rival != name and name != FLOOR:
                row[key] = round(timings[rival].median_us / us, 3)
        if name == HUMMING:
            row["note"] = "random weights, result not checked"
        yield row | (judged(name, bar, timings) if name == ours else {})
    for name, reason in refused.items():
        # A rival that is not installed is no failure of ours.
        key = "absent" if name in (HUMMING, FLOOR) else "refused"
        yield start | {"contender": name, key: reason} | ({"met": False} if name == ours else {})
