"""The report of quantize_model for each linear layer, each stack of experts and each other weight."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["quantized", "shared", "excluded", "skipped"]
BlockAction = Literal["merged", "gated", "norm", "residual", "left"]
FloatKind = Literal["embedding", "norm", "router", "convolution", "vector", "other"]
MAX_NAMES = 4  # how many layers with one reason a warning names


@dataclass(frozen=True)
class LayerReport:
    """The result of quantize_model for one linear layer.

    Attributes:
        name: qualified name in the model ("" is the model itself).
        shape: (out_features, in_features).
        action: "quantized"; "shared": the same module as one listed before, swapped with it; "excluded": by
            include, by exclude or by default; "skipped": it could not be swapped.
        reason: why, in words; "" for an ordinary "quantized".
        bytes_before, bytes_after: weight and bias of this layer. 0 for a name whose module was listed before.
        method: of quantize_model, with which the weight was made; "" if it stays in float.
        output_error: |X (W - Q)^T| / |X W^T| on the calibration's inputs X; None without calibration.
        activations: how the layer quantizes its input, which ``activations="auto"`` has chosen by its device
            and k; "" if it stays in float.
        residual_channels: of how many input channels the errors are multiplied too.
    """

    name: str
    shape: tuple[int, int]
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int
    method: str = ""
    output_error: float | None = None
    activations: str = ""
    residual_channels: int = 0

    @property
    def size(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}"


@dataclass(frozen=True)
class ExpertsReport:
    """The result of quantize_model for the experts of one block, 3-D parameters of a module of transformers.

    Attributes:
        name, action, reason, bytes_before, bytes_after, method, activations: as of :class:`LayerReport`.
        output_error: that of both products, the root of the mean of the squares.
        size: how many experts there are, the sizes of their weights and the activation, in words.
        activation: as :class:`fp4gemm.nn.Experts` has it; "" if the experts could not be read.
    """

    name: str
    size: str
    activation: str
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int
    method: str = ""
    output_error: float | None = None
    activations: str = ""


@dataclass(frozen=True)
class FloatWeight:
    """A parameter outside of linear layers and experts, which stays as it is.

    Attributes:
        name: qualified name in the model.
        shape: its shape; () if it is not initialised yet.
        kind: "embedding", "norm", "router", "convolution", "vector" (biases and other vectors) or "other".
        reason: why it stays, in words.
        num_bytes: what it needs.
    """

    name: str
    shape: tuple[int, ...]
    kind: FloatKind
    reason: str
    num_bytes: int

    @property
    def size(self) -> str:
        return " x ".join(map(str, self.shape))


@dataclass(frozen=True)
class BlockReport:
    """The result of ``fuse="auto"`` for layers that belong together.

    Attributes:
        action: "merged": the layers are one product; "gated": an MLP became an fp4gemm.nn.GatedMLP; "norm": a
            norm quantizes its result; "residual": norm and MLP add the residuals of a layer; "left": nothing
            was done.
        names: qualified names of the layers before.
        into: qualified name of the module that took their place; "" if nothing was done.
        reason: why nothing was done; "" otherwise.
    """

    action: BlockAction
    names: tuple[str, ...]
    into: str
    reason: str = ""

    def __str__(self) -> str:
        what = {
            "merged": f"merged into {self.into.rpartition('.')[2]}",
            "gated": "fused into one gated MLP",
            "norm": "quantizes its result",
            "residual": "add the residual" if len(self.names) > 1 else "adds the residual",
            "left": f"not fused: {self.reason}",
        }[self.action]
        if len(self.names) == 1:
            return f"{self.names[0]}: {what}"
        owners, children = zip(*(name.rpartition(".")[::2] for name in self.names), strict=True)
        return f"{owners[0]}: ".removeprefix(": ") + f"{', '.join(children)} {what}"


@dataclass(frozen=True)
class QuantizeReport:
    """Every weight of the model: what became of it, and the totals. ``str()`` is a table.

    Attributes:
        layers: one LayerReport per name of a torch.nn.Linear, subclasses too, in model order.
        experts: one ExpertsReport per name of a module of experts with 3-D parameters.
        weights: every other parameter.
        model_bytes_before, model_bytes_after: all parameters and buffers of the model.
        parameters_before, parameters_after: elements of all weights and biases; after is more if a tied
            weight was quantized, since the float one stays.
        parameters_quantized: how many of the latter are in quantized weights.
        blocks: with ``fuse="auto"`` what was fused, and what was left alone and why.
    """

    layers: tuple[LayerReport, ...] = ()
    experts: tuple[ExpertsReport, ...] = ()
    weights: tuple[FloatWeight, ...] = ()
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    parameters_before: int = 0
    parameters_after: int = 0
    parameters_quantized: int = 0
    blocks: tuple[BlockReport, ...] = ()

    @property
    def percent_quantized(self) -> float:
        """The share of the parameters that is quantized, 0 to 100."""
        return 100 * self.parameters_quantized / max(self.parameters_after, 1)

    @property
    def swapped(self) -> tuple[LayerReport | ExpertsReport, ...]:
        """layers and experts: everything that quantize_model could swap."""
        return (*self.layers, *self.experts)

    def names(self, action: Action) -> list[str]:
        """The names of the layers, and then of the experts, with this action."""
        return [entry.name for entry in self.swapped if entry.action == action]

    @property
    def bytes_before(self) -> int:
        """The bytes of the linear layers and experts before quantization."""
        return sum(entry.bytes_before for entry in self.swapped)

    @property
    def bytes_after(self) -> int:
        """The bytes of the linear layers and experts after quantization."""
        return sum(entry.bytes_after for entry in self.swapped)

    @property
    def others(self) -> tuple[FloatWeight, ...]:
        """The matrices of kind "other": weights that this library does not know."""
        return tuple(weight for weight in self.weights if weight.kind == "other")

    @property
    def bytes_of_others(self) -> int:
        return sum(weight.num_bytes for weight in self.others)

    def __str__(self) -> str:
        rows: list[Row] = [
            (e.name, e.size, e.action, e.reason, e.bytes_before, e.bytes_after) for e in self.swapped
        ]
        methods = [(e.method, e.output_error) for e in self.swapped]
        rows += [(w.name, w.size, "float", w.reason, w.num_bytes, w.num_bytes) for w in self.weights]
        lines = table(rows, methods)
        lines.append(_counted("linear layer", self.layers))
        if self.experts:
            lines.append(_counted("module of experts", self.experts, "modules of experts"))
        chosen = Counter(e.activations for e in self.swapped if e.activations)
        if chosen:
            lines.append(
                "activations: " + ", ".join(f"{kind} of {number}" for kind, number in chosen.items())
            )
        residual = Counter(layer.residual_channels for layer in self.layers if layer.residual_channels)
        lines += [f"residual channels: {count} of {number}" for count, number in residual.items()]
        if self.weights:
            sizes: Counter[str] = Counter()
            for weight in self.weights:
                sizes[weight.kind] += weight.num_bytes
            shown = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in sizes.most_common())
            lines.append(f"{len(self.weights)} other weights in float: {shown}")
        if self.others:
            lines.append(self.about_others())
        blocks = Counter(re.sub(r"(^|(?<=\.))\d+(?=[.:])", "*", str(block)) for block in self.blocks)
        lines += [text if times == 1 else f"{text} ({times} times)" for text, times in blocks.items()]
        lines.append(
            f"parameters: {self.parameters_before} -> {self.parameters_after}, "
            f"{self.percent_quantized:.1f} % of them quantized"
        )
        lines.append(
            f"bytes: {readable_bytes(self.model_bytes_before)} -> {readable_bytes(self.model_bytes_after)}"
        )
        return "\n".join(lines)

    def about_others(self) -> str:
        """One sentence on the weights that this library does not know."""
        return (
            f"{_stay(len(self.others), 'weight')} outside of linear layers, such as {self.others[0].name!r}"
            f" ({self.others[0].reason}): {self.bytes_of_others} of the {self.model_bytes_before} bytes of "
            "the model"
        )

    def about_skipped(self) -> str:
        """The layers and experts that could not be swapped, grouped by reason, and what to do about them."""
        by_reason: dict[str, list[str]] = {}
        for entry in self.swapped:
            if entry.action == "skipped":
                by_reason.setdefault(entry.reason, []).append(repr(entry.name))
        groups = []
        for reason, names in by_reason.items():
            more = "" if len(names) <= MAX_NAMES else f" and {len(names) - MAX_NAMES} more"
            groups.append(f"{', '.join(names[:MAX_NAMES])}{more} ({reason})")
        number = len(self.names("skipped"))
        what = "module" if any(e.action == "skipped" for e in self.experts) else "linear layer"
        return (
            f"{_stay(number, what)}: {'; '.join(groups)}. "
            "report=print lists all layers, exclude=... leaves these out without a warning"
        )


Row = tuple[str, str, str, str, int, int]  # name, size, action, reason, bytes before and after
Method = tuple[str, float | None]  # and the output error


def table(rows: list[Row], methods: Sequence[Method] = ()) -> list[str]:
    """One line for the layers whose names differ in numbers alone and which are otherwise equal.

    methods are those of the first rows; the others have none.
    """
    groups: dict[tuple[str, ...], list[tuple[Row, Method]]] = {}
    none: Method = ("", None)
    for row, method in zip(rows, itertools.chain(methods, itertools.repeat(none)), strict=False):
        groups.setdefault((re.sub(r"\d+", "#", row[0]), *row[1:4], method[0]), []).append((row, method))
    cells = []
    for pairs in groups.values():
        group = [row for row, _ in pairs]
        _, size, action, reason, _, _ = group[0]
        before, after = sum(row[4] for row in group), sum(row[5] for row in group)
        name = _merged([row[0] for row in group])
        change = (
            readable_bytes(before)
            if before == after
            else f"{readable_bytes(before)} -> {readable_bytes(after)}"
        )
        reason = "; ".join(filter(None, (_how([method for _, method in pairs]), reason)))
        cells.append((name, "" if len(group) == 1 else f"{len(group)} times", size, action, change, reason))
    widths = [max((len(line[i]) for line in cells), default=0) for i in range(6)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _how(methods: list[Method]) -> str:
    """The method of a group of layers, and the range of their output errors."""
    method, errors = methods[0][0], [error for _, error in methods if error is not None]
    if not errors:
        return method
    low, high = f"{min(errors):.3f}", f"{max(errors):.3f}"
    return f"{method}, output error {low}" + ("" if low == high else f" to {high}")


def _merged(names: list[str]) -> str:
    """Names that differ in numbers as one: layers.0-3.fc of four; "*" where the numbers have gaps."""
    if len(names) == 1:
        return names[0]
    numbers = [
        sorted({int(n) for n in column})
        for column in zip(*(re.findall(r"\d+", n) for n in names), strict=True)
    ]
    is_full = math.prod(map(len, numbers)) == len(names)
    shown = []
    for found in numbers:
        low, high = found[0], found[-1]
        if low == high:
            shown.append(str(low))
        else:
            shown.append(f"{low}-{high}" if is_full and high - low + 1 == len(found) else "*")
    parts = re.split(r"\d+", names[0])
    return "".join(part + number for part, number in itertools.zip_longest(parts, shown, fillvalue=""))


def _counted(what: str, entries: Iterable[LayerReport | ExpertsReport], plural: str = "") -> str:
    entries = list(entries)
    actions = [entry.action for entry in entries]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in sorted(set(actions)))
    before, after = sum(e.bytes_before for e in entries), sum(e.bytes_after for e in entries)
    named = what if len(entries) == 1 else plural or f"{what}s"
    return f"{len(entries)} {named} ({counts or 'none'}): {readable_bytes(before)} -> {readable_bytes(after)}"


def readable_bytes(number: int) -> str:
    """A number of bytes for a reader: three digits and a decimal unit."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}" if number < 1000 * unit else f"{number / unit:.0f} {name}"
    return f"{number} B"


def _stay(number: int, what: str) -> str:
    return f"1 {what} stays as it is" if number == 1 else f"{number} {what}s stay as they are"
