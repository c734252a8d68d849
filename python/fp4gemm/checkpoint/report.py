"""The report of a conversion: every tensor with its bytes, and the errors of the layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..models.report import readable_bytes, table
from .calibration import described
from .formats import LAYERS, StoredLayer, StoredWeight
from .output import slots_of_set
from .plan import Plan
from .source import TensorInfo

__all__ = ["ConvertReport", "LayerError", "TensorReport", "amax_ratios", "layer_error", "plan_report"]

Action = Literal["quantized", "float", "translated", "kept", "dequantized"]

WORST = 3  # layers that the text names
ROWS = 2**22  # elements that are dequantized at a time
ALLOWED = 0.18  # share of the amax of a block: half of the largest step, 1/6, and the rounding of the scale
ROUNDED = 17 / 16  # an e4m3 scale may be smaller by this factor than the number before rounding


@dataclass(frozen=True)
class TensorReport:
    """The result of a conversion for one tensor.

    Attributes:
        name: in the old checkpoint.
        shape, dtype: those in the old checkpoint.
        action: "quantized", "float" (it stays) or "translated" (its outer scale alone may change). A layer in
            FP8 is "kept" with its bytes, or "dequantized" to bfloat16.
        reason: why it stays, with which layers it shares an amax, or its format beside NVFP4; "" for others.
        bytes_before, bytes_after: of the tensor, and of all that it becomes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, info: TensorInfo, action: Action, reason: str, bytes_after: int) -> TensorReport:
        return cls(info.name, info.shape, info.dtype, action, reason, info.nbytes, bytes_after)


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
            if one.layer is not None:
                shares[source] = LAYERS[one.layer].title
            if scheme.residual_channels:
                why = one.why_no_residual(scheme.residual_channels)
                shares[source] = "; ".join(filter(None, (shares[source], why)))
    entries = []
    for name, info in plan.tensors.items():
        if name in plan.kept:
            entries.append(TensorReport.of(info, "float", plan.kept[name], info.nbytes))
        else:
            entries.append(TensorReport.of(info, "quantized", shares[name], after[name]))
    known, method = plan.options.calibrated_by, str(plan.options.method)
    if known is not None:
        method += f", calibrated by {described(known)}"
    if scheme.residual_channels:
        method += f", {scheme.residual_channels} residual channels"
    return ConvertReport(tuple(entries), method=method, left_out=tuple(sorted(left_out.items())))


@dataclass(frozen=True)
class LayerError:
    """The error of one quantized weight w, whose values are v.

    Attributes:
        module: its name.
        shape: (n, k).
        relative_error: ||v - w|| / ||w||, of Frobenius norms; 0 for a weight of zeros.
        cosine: <v, w> / (||v|| ||w||); 1 for a weight of zeros.
        blocks: how many blocks of 16 it has.
        saturated_blocks: blocks with an element beyond the largest value that the block can hold, by more
            than the rounding of its scale explains (a factor of 17/16).
        zero_blocks: blocks all of whose values are 0.
        amax_ratio: the largest amax in its fused set over its own; 1 where it shares with no layer.
        worst_element: the largest |v - w| of an element over what rounding explains: 0.18 of the amax of its
            block, plus 2^-10 A / B, which is what a block scale of 0 loses. At most 1, but for the methods
            "search" and "gptq", which move elements further where that helps the output.
        output_error: |X (V - W)^T| / |X W^T| on the inputs X of the calibration; None without, or where no
            token reached it.
    """

    module: str
    shape: tuple[int, int]
    relative_error: float
    cosine: float
    blocks: int
    saturated_blocks: int
    zero_blocks: int
    amax_ratio: float
    worst_element: float
    output_error: float | None = None


def layer_error(
    module: str, weight: Tensor, stored: StoredWeight, amax_ratio: float, block_rows: int = 1
) -> LayerError:
    """The error of a weight (n, k), a stretch of rows at a time, with sums in float64.

    block_rows: 1, or 16 where 16 rows share each scale, so that their amax bounds the errors of all.
    """
    n, k = weight.shape
    operand = stored.to_nvfp4()
    scales = operand.compact_scales()
    errors = squares = values_squared = products = 0.0
    saturated = zero = 0
    worst = 0.0
    step = max(16, ROWS // k // 16 * 16)
    for begin in range(0, n, step):
        end = min(n, begin + step)
        rows = stored.rows(slice(begin, end))
        x, v = weight[begin:end].float(), rows.to_nvfp4().dequantize(torch.float32)
        errors += float((v - x).double().square().sum())
        squares += float(x.double().square().sum())
        values_squared += float(v.double().square().sum())
        products += float((v.double() * x).sum())
        amax = rows.amax.view(-1, 1)
        largest = scales[begin:end].float() * amax * (ROUNDED / stored.e4m3_max)
        block_amax = x.abs().view(end - begin, k // 16, 16).amax(-1)
        allowed = ALLOWED * _of_tiles(block_amax, block_rows) + amax * (2.0**-10 * ROUNDED / stored.e4m3_max)
        excess = (v - x).abs().view(end - begin, k // 16, 16).amax(-1) / allowed
        worst = max(worst, float(excess.nan_to_num(0.0).max()))  # 0 / 0 in a weight of zeros
        is_zero = (v.view(end - begin, k // 16, 16) == 0).all(-1)
        saturated += int(((block_amax > largest) & ~is_zero).sum())
        zero += int(is_zero.sum())
    norm = math.sqrt(squares * values_squared)
    return LayerError(
        module,
        (n, k),
        math.sqrt(errors / squares) if squares else 0.0,
        products / norm if norm else 1.0,
        n * k // 16,
        saturated,
        zero,
        amax_ratio,
        worst,
    )


def error_of_layer(module: str, weight: Tensor, stored: StoredLayer) -> LayerError:
    """The error of a weight (n, k) in a format of LAYERS; it has no blocks of 16, and shares no amax.

    The worst element is |v - w| over what rounding to e4m3 explains: |w| / 16, plus 2^-10 of the scale.
    """
    n, k = weight.shape
    x, v = weight.double(), stored.dequantize(torch.float32).double()
    squares, values = float(x.square().sum()), float(v.square().sum())
    explained = x.abs() / 16 + stored.scale_of_elements().double() * 2.0**-10
    norm = math.sqrt(squares * values)
    return LayerError(
        module,
        (n, k),
        math.sqrt(float((v - x).square().sum()) / squares) if squares else 0.0,
        float((v * x).sum()) / norm if norm else 1.0,
        0,
        0,
        0,
        1.0,
        float(((v - x).abs() / explained).nan_to_num(0.0).max()),  # 0 / 0 where the scale is 0
    )


def _of_tiles(amax: Tensor, block_rows: int) -> Tensor:
    """The largest amax of each block_rows rows, in all of them; the last rows may be fewer."""
    if block_rows == 1:
        return amax
    tiles = [part.amax(0, keepdim=True).expand_as(part) for part in amax.split(block_rows)]
    return torch.cat(tiles)


def amax_ratios(amaxes: list[float]) -> list[float]:
    """The largest of the amaxes over each of them; 1 where it is 0."""
    largest = max(amaxes)
    return [largest / amax if amax else 1.0 for amax in amaxes]
