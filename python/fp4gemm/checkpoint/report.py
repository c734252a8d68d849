"""The report of a conversion: every tensor with its bytes, and the errors of the layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..models.report import readable_bytes, table
from .calibrated import described
from .layout import slots_of_set
from .measure import LayerError
from .plan import Plan

__all__ = ["Action", "ConvertReport", "TensorReport", "plan_report"]

Action = Literal["quantized", "float", "translated"]

WORST = 3  # layers that the text names


@dataclass(frozen=True)
class TensorReport:
    """The result of a conversion for one tensor.

    Attributes:
        name: in the old checkpoint.
        shape, dtype: those in the old checkpoint.
        action: "quantized", "float" (it stays) or "translated" (its outer scale alone may change).
        reason: why it stays, or with which layers it shares an amax; "" for others.
        bytes_before, bytes_after: of the tensor, and of all that it becomes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ConvertReport:
    """Every tensor of a checkpoint, and what a conversion does about it. ``str()`` is a table.

    Attributes:
        tensors: one entry for each, in the order of the checkpoint.
        layers: the errors of the quantized weights, where they were measured.
        method: how the weights are rounded, and by what it was calibrated; "" for a translation.
        notes: what was done about single weights otherwise than asked for, of those that this run made.
        left_out: files that are not in the new checkpoint, with the reason.
        already_done: whether the new checkpoint was complete before, so that nothing was written.
        is_verified: whether the new checkpoint was read again and compared.
    """

    tensors: tuple[TensorReport, ...]
    layers: tuple[LayerError, ...] = ()
    method: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    already_done: bool = False
    is_verified: bool = False

    @property
    def bytes_before(self) -> int:
        """All tensors of the old checkpoint."""
        return sum(entry.bytes_before for entry in self.tensors)

    @property
    def bytes_after(self) -> int:
        """All tensors of the new checkpoint."""
        return sum(entry.bytes_after for entry in self.tensors)

    def as_json(self) -> dict[str, Any]:
        """The report as an object of JSON."""
        return asdict(self) | {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}

    def __str__(self) -> str:
        lines = table(
            [
                (e.name, " x ".join(map(str, e.shape)), e.action, e.reason, e.bytes_before, e.bytes_after)
                for e in self.tensors
            ]
        )
        counts = Counter(entry.action for entry in self.tensors)
        shown = ", ".join(f"{number} {action}" for action, number in sorted(counts.items()))
        lines.append(
            f"{len(self.tensors)} tensors ({shown}): {readable_bytes(self.bytes_before)} -> "
            f"{readable_bytes(self.bytes_after)}"
        )
        if self.method:
            lines.append(f"method: {self.method}")
        lines += notes_of(self.notes)
        lines += [f"{name}: left out, since it {reason}" for name, reason in self.left_out]
        if self.layers:
            lines += self._errors()
        return "\n".join(lines)

    def _errors(self) -> list[str]:
        mean = math.fsum(layer.relative_error for layer in self.layers) / len(self.layers)
        worst = sorted(self.layers, key=lambda layer: -layer.relative_error)[:WORST]
        named = ", ".join(f"{layer.module} {layer.relative_error:.4f}" for layer in worst)
        saturated = sum(layer.saturated_blocks for layer in self.layers)
        zero = sum(layer.zero_blocks for layer in self.layers)
        blocks = sum(layer.blocks for layer in self.layers)
        ratio = max(self.layers, key=lambda layer: layer.amax_ratio)
        lines = [
            f"relative error: {mean:.4f} on average over {len(self.layers)} weights; largest: {named}",
            f"blocks: {blocks}, saturated {saturated}, zero {zero}",
        ]
        errors = [layer.output_error for layer in self.layers if layer.output_error is not None]
        if errors:
            lines.append(
                f"output error on the calibration: {math.fsum(errors) / len(errors):.4f} on average, at most "
                f"{max(errors):.4f}"
            )
        if ratio.amax_ratio > 1:
            lines.append(
                f"amaxes within a fused set differ by up to {ratio.amax_ratio:.2f} times ({ratio.module})"
            )
        return lines


def notes_of(notes: Sequence[str]) -> list[str]:
    """A line for the notes that differ in numbers alone: the first, and how many there are."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(re.sub(r"\d+", "#", note), []).append(note)
    return [
        group[0] if len(group) == 1 else f"{group[0]} (and {len(group) - 1} like it)"
        for group in groups.values()
    ]


def plan_report(plan: Plan, left_out: dict[str, str]) -> ConvertReport:
    """The report before anything is written."""
    scheme = plan.scheme()
    after: Counter[str] = Counter()
    shares: dict[str, str] = {}
    for one in plan.sets:
        for matrix, slots in slots_of_set(one, scheme):
            after[matrix.source] += sum(slot.nbytes for slot in slots)
        sources = list(dict.fromkeys(matrix.source for matrix in one.matrices))
        children = [source.removesuffix(".weight").rpartition(".")[2] for source in sources]
        for source in sources:
            others = [child for other, child in zip(sources, children, strict=True) if other != source]
            shares[source] = f"shares its amax with {', '.join(others)}" if others else ""
    entries = []
    for name, info in plan.tensors.items():
        is_kept = name in plan.kept
        entries.append(
            TensorReport(
                name,
                info.shape,
                info.dtype,
                "float" if is_kept else "quantized",
                plan.kept.get(name, shares.get(name, "")),
                info.nbytes,
                info.nbytes if is_kept else after[name],
            )
        )
    known, method = plan.options.calibrated_by, str(plan.options.method)
    if known is not None:
        method += f", calibrated by {described(known)}"
    return ConvertReport(tuple(entries), method=method, left_out=tuple(sorted(left_out.items())))
