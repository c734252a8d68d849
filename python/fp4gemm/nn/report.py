"""What quantize_model did: a report for each linear layer, and one for the model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Action = Literal["quantized", "shared", "excluded", "skipped"]
BlockAction = Literal["merged", "gated", "norm", "left"]
MAX_NAMES = 4  # of layers with the same reason in a warning


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear layer.

    Attributes:
        name: qualified name in the model ("" is the model itself).
        shape: (out_features, in_features).
        action: "quantized"; "shared": the same module as one listed before, swapped with it; "excluded": by
            include or exclude; "skipped": it could not be swapped.
        reason: why, in words; "" for an ordinary "quantized".
        bytes_before, bytes_after: weight and bias of this layer. 0 for a name whose module was listed before.
    """

    name: str
    shape: tuple[int, int]
    action: Action
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class BlockReport:
    """What ``fuse="auto"`` did about layers that belong together.

    Attributes:
        action: "merged": the layers are one product; "gated": an MLP became an fp4gemm.nn.GatedMLP; "norm": a
            norm quantizes its result; "left": nothing was done.
        names: qualified names of the layers before.
        into: qualified name of the module that took their place; "" if nothing was done.
        reason: why nothing was done; "" otherwise.
    """

    action: BlockAction
    names: tuple[str, ...]
    into: str
    reason: str = ""

    def __str__(self) -> str:
        owners, children = zip(*(name.rpartition(".")[::2] for name in self.names), strict=True)
        what = {
            "merged": f"merged into {self.into.rpartition('.')[2]}",
            "gated": "fused into one gated MLP",
            "norm": "quantizes its result",
            "left": f"not fused: {self.reason}",
        }[self.action]
        return f"{owners[0]}: ".removeprefix(": ") + f"{', '.join(children)} {what}"


@dataclass(frozen=True)
class QuantizeReport:
    """One LayerReport per name of a torch.nn.Linear, subclasses too, in model order. ``str()`` is a table.

    Attributes:
        layers: the reports.
        others: names of weights that NVFP4 could hold and that are not in a linear layer, so that they stay
            as they are: stacks of experts, the Conv1D of GPT-2.
        bytes_of_others: what they need.
        model_bytes: all parameters of the model, before.
        blocks: with ``fuse="auto"`` what was fused, and what was left alone and why.
    """

    layers: tuple[LayerReport, ...]
    others: tuple[str, ...] = ()
    bytes_of_others: int = 0
    model_bytes: int = 0
    blocks: tuple[BlockReport, ...] = ()

    def names(self, action: Action) -> list[str]:
        """The names of the layers with this action."""
        return [layer.name for layer in self.layers if layer.action == action]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.shape[0]:>6} x {layer.shape[1]:<6} {layer.action:<9}"
            f" {layer.bytes_before:>11} -> {layer.bytes_after:>11} bytes  {layer.reason}".rstrip()
            for layer in self.layers
        ]
        actions = [layer.action for layer in self.layers]
        counts = ", ".join(f"{actions.count(action)} {action}" for action in sorted(set(actions)))
        lines.append(
            f"{len(actions)} linear layers ({counts}): {self.bytes_before} -> {self.bytes_after} bytes"
        )
        if self.others:
            lines.append(self.about_others())
        blocks = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", str(block)) for block in self.blocks)
        lines += [text if times == 1 else f"{text} ({times} times)" for text, times in blocks.items()]
        return "\n".join(lines)

    def about_others(self) -> str:
        """One sentence on the weights that are not in linear layers."""
        return (
            f"{_stay(len(self.others), 'weight')} outside of linear layers, such as {self.others[0]!r}: "
            f"{self.bytes_of_others} of the {self.model_bytes} bytes of the model"
        )

    def about_skipped(self) -> str:
        """The layers that could not be swapped, grouped by reason, and what to do about them."""
        by_reason: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.action == "skipped":
                by_reason.setdefault(layer.reason, []).append(repr(layer.name))
        groups = []
        for reason, names in by_reason.items():
            more = "" if len(names) <= MAX_NAMES else f" and {len(names) - MAX_NAMES} more"
            groups.append(f"{', '.join(names[:MAX_NAMES])}{more} ({reason})")
        return (
            f"{_stay(len(self.names('skipped')), 'linear layer')}: {'; '.join(groups)}. "
            "report=print lists all layers, exclude=... leaves these out without a warning"
        )


def _stay(number: int, what: str) -> str:
    return f"1 {what} stays as it is" if number == 1 else f"{number} {what}s stay as they are"
