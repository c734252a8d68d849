"""choose: a format for each layer of a float checkpoint, by its measured sensitivity, for an average of bits.

Sensitivity is the loss in nats a token that a format of one layer costs, as :mod:`fp4gemm.models.sensitivity`
estimates it on a calibration text. The choice minimizes the sum of these losses under a budget of bits: a
knapsack from which each layer takes one format. It is solved by Lagrange multipliers (Everett 1963; Shoham
and Gersho 1988): each layer walks along the lower convex hull of (bits, loss), and the steps of all layers
are taken in the order of their gain per bit. A step that does not fit is left out, and smaller ones behind it
are taken. Until the first step that is left out, the result is the optimum for the bits that it uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from .. import _checks, _names
from ..models import moe
from ..models.sensitivity import Variant, sensitivity
from ..quantize import quantize
from ..recipe import INPUTS, USES_DATA, LayerActivations, StoredActivations
from .calibration import Text, causal_model, read_calibration, renaming, tokens_of
from .engine import convert_set
from .formats import FORMATS, StoredLayer
from .options import LayerChoice, Options, checked_options
from .output import slots_of_set
from .plan import FusedSet, Plan
from .runner import Progress, resolve_devices
from .source import CheckpointError, Source

__all__ = ["CHOICES", "AutoReport", "Choice", "choose"]

ChoiceName = Literal["nvfp4", "fp8-channel", "bf16"]
CHOICES = get_args(ChoiceName)
NUM_TOKENS = 2**13  # of the text that the model reads by default
METHOD = "diagonal empirical Fisher (ModelOpt's auto_quantize), knapsack by Lagrange multipliers"


@dataclass(frozen=True)
class Choice:
    """The format of a fused set of layers, or of the experts of a module.

    Attributes:
        name: the name of the module, the first of a set.
        modules: the names of all its modules; of experts that of the module that holds them.
        elements: of all weights.
        format: what was chosen.
        bits: what an element then needs, scales included.
        losses: the estimated loss of each format in nats a token; 0 for bf16.
        bits_of: the bits of each format.
        gain: nats a token for each Mbit that the last step which was taken gained; None: none was.
        next_gain: the same of the next step, which was not taken; None: there is none.
    """

    name: str
    modules: tuple[str, ...]
    elements: int
    format: ChoiceName
    bits: float
    losses: Mapping[ChoiceName, float]
    bits_of: Mapping[ChoiceName, float]
    gain: float | None
    next_gain: float | None

    @property
    def why(self) -> str:
        """The reason for the format, in words; nats a token for each Mbit."""
        taken = "" if self.gain is None else f"gained {self.gain:.3g} a Mbit; "
        if self.next_gain is None:
            return f"{taken}no format of the list loses less"
        return f"{taken}the next step would gain {self.next_gain:.3g} a Mbit"


@dataclass(frozen=True)
class AutoReport:
    """The formats that :func:`choose` chose. ``str()`` is a table.

    Attributes:
        choices: of every fused set and every module of experts, in the order of the checkpoint.
        wanted_bits: the average that was asked for.
        options: those of the conversion, with the formats in ``layers``.
        calibration: what the model read, in words.
        rounding: how NVFP4 weights were rounded for the measurement.
    """

    choices: tuple[Choice, ...]
    wanted_bits: float
    options: Options
    calibration: str
    rounding: str

    @property
    def bits(self) -> float:
        """The average bits of an element of all these layers, scales included."""
        elements = sum(each.elements for each in self.choices)
        return sum(each.elements * each.bits for each in self.choices) / elements

    @property
    def loss(self) -> float:
        """The estimated loss of the choice, in nats a token: the sum over its layers."""
        return math.fsum(each.losses[each.format] for each in self.choices)

    def loss_of(self, format: ChoiceName) -> float:
        """The estimated loss of all layers in one format."""
        return math.fsum(each.losses[format] for each in self.choices if format in each.losses)

    def for_bits(self, bits: float) -> AutoReport:
        """The choice for another average of bits by the same measurement.

        Raises:
            TypeError, ValueError: as for :func:`choose`.
        """
        return _report([_Unit.of(each) for each in self.choices], self, bits)

    def as_json(self) -> dict[str, Any]:
        """The report as an object of JSON."""
        made = asdict(self) | {"bits": self.bits, "loss": self.loss, "method": METHOD}
        made["choices"] = [asdict(each) | {"why": each.why} for each in self.choices]
        made["options"] = self.options.as_json()
        return made

    def __str__(self) -> str:
        formats = [name for name in CHOICES if any(name in each.losses for each in self.choices)]
        head = ("layer", "elements", "format", "bits", *(f"loss {name}" for name in formats), "why")
        rows = [
            (
                each.name + (f" and {len(each.modules) - 1} more" if len(each.modules) > 1 else ""),
                str(each.elements),
                each.format,
                f"{each.bits:.2f}",
                *(f"{each.losses[name]:.2e}" if name in each.losses else "" for name in formats),
                each.why,
            )
            for each in self.choices
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        lines.append(
            f"{self.bits:.3f} bits on average (asked for: at most {self.wanted_bits:g}), estimated loss "
            f"{self.loss:.3e} nats a token; all nvfp4: {self.loss_of('nvfp4'):.3e}"
        )
        lines.append(f"measured on {self.calibration}, weights rounded by {self.rounding}; {METHOD}")
        return "\n".join(lines)


def choose(
    src: str | os.PathLike[str],
    options: Options | None = None,
    *,
    bits: float,
    calibration: Text | str | os.PathLike[str],
    formats: Sequence[ChoiceName] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> AutoReport:
    """Choose a format for each layer that ``options`` would make NVFP4.

    The bits of an element count its scales: NVFP4 has 4.5, FP8 per channel 8 + 32 / k. Layers that a fused
    set joins get one format, and so do the experts of a module, which are NVFP4 or stay. Activations are
    those of the options, and those of FP8 have a scale for each token; both are quantized for the
    measurement. Weights are those that :func:`convert` writes, but rounded by "four-over-six" for the methods
    that need statistics, and without residual channels.

    Args:
        src: the folder of a float checkpoint of a causal language model, with its tokenizer.
        options: those of the conversion, without ``layers``.
        bits: the largest average of bits of the weights of all these layers.
        calibration: a text, or the path of one. The model reads its first 8192 tokens, or as many as a
            :class:`Text` says, forward and backward.
        formats: those to choose from, "nvfp4" among them. None: all that the format of the checkpoint holds.
        device: as for :func:`convert`; one device.
        progress: called as ``progress(done, total, name)`` while the model reads the text.

    Returns:
        An AutoReport; ``convert(src, dst, report.options)`` writes the checkpoint. The same text on the same
        kind of device, with the same number of torch's threads, gives the same choice.

    Raises:
        CheckpointError: as for :func:`plan_conversion`, or the text cannot be read by the model.
        TypeError, ValueError: an argument; no choice has so few bits.
    """
    _checks.is_path("src", src)
    options = checked_options(options)
    if options.layers:
        raise ValueError("layers: got some in the options, must be empty where formats are chosen")
    _check_number(bits)
    wanted = _formats(formats, options)
    text = calibration if isinstance(calibration, Text) else _text(calibration)
    _checks.is_callback("progress", progress)
    place = resolve_devices(device)[0]
    with contextlib.closing(Source(src)) as source:
        plan = Plan.of_checkpoint(source, options)
        units = _units(plan, wanted)
        _check_bits(units, bits)
        losses, about = _measured(source, plan, units, text, place, progress)
    rounding = str(_rounding(options).method)
    found = AutoReport(_solved(units, losses, bits), float(bits), options, about, rounding)
    return _report(units, found, bits)


def _report(units: Sequence[_Unit], known: AutoReport, bits: float) -> AutoReport:
    """The report of the choice for these bits, with the losses of a report."""
    _check_bits(units, bits)
    choices = _solved(units, {each.name: each.losses for each in known.choices}, bits)
    layers: dict[str, LayerChoice] = {}
    for each in choices:
        if each.format != "nvfp4":
            layers |= dict.fromkeys(each.modules, each.format)
    if all(each.format != "nvfp4" for each in choices):
        raise ValueError(f"bits: got {bits}, must be less, since no layer would be NVFP4")
    options = dataclasses.replace(known.options, layers=layers)
    return dataclasses.replace(known, choices=choices, wanted_bits=float(bits), options=options)


@dataclass(frozen=True)
class _Unit:
    """What gets one format: a fused set, or the experts of a module."""

    name: str
    modules: tuple[str, ...]
    sets: tuple[FusedSet, ...]
    elements: int
    sizes: Mapping[ChoiceName, int]  # bits of all weights by format

    @classmethod
    def of(cls, choice: Choice) -> _Unit:
        """The unit of a choice, for another one by the same measurement."""
        sizes = {name: round(bits * choice.elements) for name, bits in choice.bits_of.items()}
        return cls(choice.name, choice.modules, (), choice.elements, sizes)

    @property
    def is_experts(self) -> bool:
        return self.sets[0].is_stack or _names.expert_of(self.sets[0].name) is not None


def _formats(formats: Sequence[ChoiceName] | None, options: Options) -> tuple[ChoiceName, ...]:
    able = [name for name in CHOICES if name != "fp8-channel" or FORMATS[options.format].has_mixes]
    if formats is None:
        return tuple(able)
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise TypeError(
            f"formats: got {_checks.describe(formats)}, must be a sequence of {_checks.listing(able)}"
        )
    for name in formats:
        _checks.is_one_of("formats", name, tuple(able))
    if "nvfp4" not in formats or len(set(formats)) < 2:
        raise ValueError(f"formats: got {_checks.listing(formats)}, must be 'nvfp4' and at least one more")
    return tuple(name for name in CHOICES if name in formats)


def _text(calibration: object) -> Text:
    made = read_calibration(calibration, NUM_TOKENS)
    if not isinstance(made, Text):
        raise ValueError(
            f"calibration: got {_checks.describe(calibration)}, must be a text: statistics have no gradients"
        )
    return made


def _units(plan: Plan, wanted: Sequence[ChoiceName]) -> list[_Unit]:
    found: dict[str, list[FusedSet]] = {}
    for one in plan.sets:
        part = _names.expert_of(one.name) or _names.stack_of(one.name)
        found.setdefault(one.name if part is None else part[0], []).append(one)
    units, scheme = [], plan.scheme()
    for name, sets in found.items():
        matrices = [matrix for one in sets for matrix in one.matrices]
        is_experts = name != sets[0].name
        modules = (name,) if is_experts else tuple(matrix.module for matrix in matrices)
        elements = sum(math.prod(matrix.shape) for matrix in matrices)
        sizes: dict[ChoiceName, int] = {}
        for choice in wanted:
            if choice == "bf16":
                width = {"F32": 32}.get(plan.tensors[matrices[0].source].dtype, 16)
                sizes[choice] = width * elements
            elif choice == "nvfp4" or not is_experts:
                layer = None if choice == "nvfp4" else choice
                slots = [
                    s for one in sets for s in slots_of_set(dataclasses.replace(one, layer=layer), scheme)
                ]
                sizes[choice] = 8 * sum(slot.nbytes for _, made in slots for slot in made)
        units.append(_Unit(name, modules, tuple(sets), elements, sizes))
    return units


def _check_number(bits: object) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not bits > 0:
        raise ValueError(f"bits: got {_checks.describe(bits)}, must be a positive number")


def _check_bits(units: Sequence[_Unit], bits: float) -> None:
    _check_number(bits)
    elements = sum(unit.elements for unit in units)
    least = sum(min(unit.sizes.values()) for unit in units) / elements
    if bits < least:
        raise ValueError(
            f"bits: got {bits}, must be at least {least:.3f}, where every layer has the fewest bits"
        )


# ---- the measurement


def _rounding(options: Options) -> Options:
    """The options by which weights are rounded for the measurement."""
    uses_data = options.method in USES_DATA
    if not uses_data and not options.residual_channels:
        return options
    rounding: dict[str, Any] = {"method": "four-over-six", "four_over_six": None} if uses_data else {}
    return dataclasses.replace(options, calibration=None, residual_channels=0, **rounding)


def _measured(
    source: Source,
    plan: Plan,
    units: Sequence[_Unit],
    text: Text,
    device: torch.device,
    progress: Progress | None,
) -> tuple[dict[str, dict[ChoiceName, float]], str]:
    batches, about = tokens_of(source, text)
    model = causal_model(source, torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    rename, modules = renaming(model), dict(model.named_modules(remove_duplicate=False))
    variants: dict[str, dict[str, Variant]] = {}
    owners: dict[str, str] = {}
    options = _rounding(plan.options)
    for unit in units:
        for own, made in _variants(unit, source, options, rename, modules):
            variants[own], owners[own] = made, unit.name
    try:
        found = sensitivity(model, [batch.to(device) for batch in batches], variants, progress)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"calibration: {error}") from error
    losses: dict[str, dict[ChoiceName, float]] = {}
    for own, mine in found.items():
        total = losses.setdefault(owners[own], {})
        for name, loss in mine.items():
            choice = cast(ChoiceName, name)
            total[choice] = total.get(choice, 0.0) + loss
    for unit in units:
        if "bf16" in unit.sizes:
            losses[unit.name]["bf16"] = 0.0
    return losses, about


def _variants(
    unit: _Unit,
    source: Source,
    options: Options,
    rename: Callable[[str], str],
    modules: Mapping[str, torch.nn.Module],
) -> Iterator[tuple[str, dict[str, Variant]]]:
    """The variants of each module of a unit, by its name in the model."""
    if unit.is_experts:
        own = rename(f"{unit.name}.{_names.STACKED.down}").rpartition(".")[0]
        if own in modules and moe.is_experts(modules[own]):
            yield own, {"nvfp4": _experts(modules[own], options)}
            return
    kinds = [choice for choice in unit.sizes if choice != "bf16"]
    for one in unit.sets:
        parts = {(name, e): source.read(source.tensors[name], e) for name, e in one.parts}
        weights = {
            kind: convert_set(
                dataclasses.replace(one, layer=None if kind == "nvfp4" else kind), parts, options
            ).stored
            for kind in kinds
        }
        for index, matrix in enumerate(one.matrices):
            own = rename(matrix.module)
            if own not in modules or not isinstance(modules[own], torch.nn.Linear):
                raise CheckpointError(
                    f"{source.folder}: {matrix.module} is no linear layer of the model that transformers "
                    "loads, so that its sensitivity cannot be measured; exclude it"
                )
            mine: dict[str, Variant] = {}
            for kind in kinds:
                stored = weights[kind][index]
                if isinstance(stored, StoredLayer):
                    mine[kind] = _linear(modules[own], stored.dequantize(torch.float32), _fp8_rows)
                else:
                    values = stored.to_nvfp4().dequantize(torch.float32)
                    mine[kind] = _linear(modules[own], values, _cast_of(options))
            yield own, mine


def _linear(module: torch.nn.Module, values: Tensor, cast_of: Callable[[Tensor], Tensor]) -> Variant:
    weight = cast(Tensor, module.weight)
    values = values.to(weight.device, weight.dtype)

    def variant(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(cast_of(x), values, cast("Tensor | None", module.bias))

    return variant


def _experts(module: torch.nn.Module, options: Options) -> Variant:
    """NVFP4 experts in the place of a module of transformers, with an amax for each matrix."""
    made = moe.convert(
        module,
        moe.read(module, _layer_activations(options)),
        activations=_layer_activations(options),
        weight_scaling="tensor",
        method=cast(Any, _rounding(options).method),
    )

    def variant(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = made(hidden_states, top_k_index, top_k_weights)
        return y

    return variant


def _layer_activations(options: Options) -> LayerActivations:
    """The activations with which layers are measured; static ones count as one amax for each token."""
    given = cast(StoredActivations, options.activations)
    return "per-token" if INPUTS[given].kind == "static" else cast(LayerActivations, given)


def _cast_of(options: Options) -> Callable[[Tensor], Tensor]:
    """A function from the input of a layer to the values that NVFP4 activations have."""
    kind = INPUTS[_layer_activations(options)]
    if kind.tokens == "fp8":
        return _fp8_rows
    if not kind.is_nvfp4:
        return lambda x: x
    scaling: Any = "row" if kind.kind == "per-token" else "tensor"

    def cast_of(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        made: Any = quantize(rows, scaling=scaling, **dict(kind.options))
        values: Tensor = made.dequantize(torch.float32)
        return values.to(x.dtype).view(x.shape)

    return cast_of


def _fp8_rows(x: Tensor) -> Tensor:
    """The values of e4m3 tokens with one scale for each, which is the format of weights for rows of x."""
    rows = StoredLayer.of(x.reshape(-1, x.shape[-1]), "fp8-channel")
    return rows.dequantize(torch.float32).to(x.dtype).view(x.shape)


# ---- the choice


def _hull(unit: _Unit, losses: Mapping[ChoiceName, float]) -> list[ChoiceName]:
    """The formats on the lower convex hull of (bits, loss), from the fewest bits on."""
    order = sorted(unit.sizes, key=lambda name: (unit.sizes[name], losses[name]))
    hull: list[ChoiceName] = []
    for name in order:
        if hull and losses[name] >= losses[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(unit, losses, hull[-2], hull[-1]) <= _gain(
            unit, losses, hull[-1], name
        ):
            hull.pop()
        hull.append(name)
    return hull


def _gain(unit: _Unit, losses: Mapping[ChoiceName, float], a: ChoiceName, b: ChoiceName) -> float:
    """The loss that a step from format a to b gains, for each bit that it costs."""
    return (losses[a] - losses[b]) / (unit.sizes[b] - unit.sizes[a])


def _solved(
    units: Sequence[_Unit], losses: Mapping[str, Mapping[ChoiceName, float]], bits: float
) -> tuple[Choice, ...]:
    hulls = [_hull(unit, losses[unit.name]) for unit in units]
    steps = [
        (-_gain(unit, losses[unit.name], hull[i], hull[i + 1]), number, i)
        for number, (unit, hull) in enumerate(zip(units, hulls, strict=True))
        for i in range(len(hull) - 1)
    ]
    left = bits * sum(unit.elements for unit in units) - sum(
        unit.sizes[hull[0]] for unit, hull in zip(units, hulls, strict=True)
    )
    at = [0] * len(units)
    for _, number, i in sorted(steps):  # the gains of one layer fall, so that its steps come in their order
        unit, hull = units[number], hulls[number]
        cost = unit.sizes[hull[i + 1]] - unit.sizes[hull[i]]
        if at[number] == i and cost <= left:
            left -= cost
            at[number] = i + 1
    made = []
    for unit, hull, i in zip(units, hulls, at, strict=True):
        mine = losses[unit.name]
        per = {name: size / unit.elements for name, size in unit.sizes.items()}
        taken = None if i == 0 else 1e6 * _gain(unit, mine, hull[i - 1], hull[i])
        following = None if i + 1 == len(hull) else 1e6 * _gain(unit, mine, hull[i], hull[i + 1])
        made.append(
            Choice(
                unit.name,
                unit.modules,
                unit.elements,
                hull[i],
                per[hull[i]],
                {name: mine[name] for name in CHOICES if name in mine},
                per,
                taken,
                following,
            )
        )
    return tuple(made)
