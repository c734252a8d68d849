"""The options of a conversion: what is quantized, how, and into which format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from .. import _checks, _names, patterns
from ..recipe import (
    STORED_ACTIVATIONS,
    FourOverSix,
    Method,
    Numerics,
    Recipe,
    StoredActivations,
    WeightScaling,
    check_residual_channels,
    checked_activations,
)
from .calibration import Calibration, data_of, described, key_of, read_calibration
from .formats import FORMATS, FormatName

__all__ = [
    "LAYER_CHOICES",
    "LayerChoice",
    "Options",
    "read_amaxes",
    "read_fused",
    "read_kv_scales",
    "read_layers",
]

# What a layer may become beside NVFP4: it stays, or a format of LAYERS that is written.
LayerChoice = Literal["bf16", "fp8-channel"]
LAYER_CHOICES = get_args(LayerChoice)

TINY, HUGE = float(torch.finfo(torch.float32).tiny), float(torch.finfo(torch.float32).max)


def checked_options(options: object) -> Options:
    """The options themselves, or the defaults for None."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise TypeError(f"options: got {_checks.describe(options)}, must be fp4gemm.checkpoint.Options")
    return options


@dataclass(frozen=True)
class Options:
    """The options of a conversion: which weights are quantized, how, and how they are stored.

    Attributes:
        format: "modelopt", "compressed-tensors" or "fp4gemm" (:mod:`fp4gemm.checkpoint.formats`).
        numerics, weight_scaling, method, four_over_six: as in :class:`fp4gemm.recipe.Recipe`. weight_scaling
            None is "row" in the format "fp4gemm", and "tensor" in the others, which hold no other.
        calibration: what "search", "gptq" and residual_channels need: Statistics or a StatisticsFile
            (:mod:`fp4gemm.calibration`), or a :class:`fp4gemm.checkpoint.Text`, of which :func:`convert`
            makes them. Or a path or a str: a file of statistics or of text, or a text itself.
        activations: "a16", "per-token" or "per-tensor", perhaps with options of the cast, "fp8" or "static"
            (with the amaxes of ``activation_amax``), as in :class:`fp4gemm.recipe.Recipe`. None is
            "per-token" in the format "fp4gemm", and "a16" in the others, since other loaders take "per-token"
            for a static amax of 1. "fp8" (W4A8) has the tensors of "a16", and other loaders read it as that;
            the loaders of this library find it in ``producer``. A weight whose k is no multiple of 64 stays
            in 16 bits then.
        activation_amax: the amax of the input of each quantized layer, by the name of the module.
        residual_channels: of how many input channels of each linear layer the errors of activations are
            multiplied too (docs/accuracy.md), a multiple of 32; 0: of none. The calibration chooses them,
            for the layers of a fused set together. Experts, layers in another format and those with fewer
            channels have none. Only the loaders of this library read them.
        include: patterns of modules (:mod:`fp4gemm.patterns`), one or a sequence. None of them: every linear
            weight but output embeddings, embeddings, norms and routers; otherwise what one of them matches,
            output embeddings and routers too.
        exclude: patterns of modules that stay; it wins over include.
        experts_only: only the projections of routed and shared experts are quantized.
        bf16_first, bf16_last: how many layers at the start and at the end stay.
        fuse: the fused sets, as names of children of one module.
        split_experts: a tensor (g, n, k) of experts is stored as one module for each expert, gate and up
            apart. False: it stays one tensor of codes (g, n, k/2).
        kv_scales: (k, v) decode multipliers of an FP8 cache, by the name of the attention module.
        layers: the format of modules that would be NVFP4 otherwise, by their names: "bf16" stays as it is,
            and "fp8-channel" is FP8 with a scale for each output channel, and for each token when the model
            runs. The name of a module counts for those in it too, as that of the experts of a layer does.
        block, encode, four_over_six_error, e4m3_max: the cast of weights, as in
            :class:`fp4gemm.recipe.Recipe`. ``Options(**recipe.for_inference().options(), format="fp4gemm")``
            has all options that a model needs which trained by a recipe.

        recipe: numerics, weight_scaling, four_over_six, method, activations and the cast of weights together.

    Raises:
        TypeError, ValueError: an option has another type or value, or excludes another one; the text names
            it.
    """

    format: FormatName = "modelopt"
    numerics: Numerics = "te"
    weight_scaling: WeightScaling | None = None
    method: Method | None = None
    four_over_six: FourOverSix | None = None
    calibration: Calibration | str | os.PathLike[str] | None = None
    activations: StoredActivations | None = None
    activation_amax: Mapping[str, float] = field(default_factory=dict)
    residual_channels: int = 0
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    experts_only: bool = False
    bf16_first: int = 0
    bf16_last: int = 0
    fuse: Sequence[Sequence[str]] = field(default_factory=_names.fused_sets)
    split_experts: bool = True
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    layers: Mapping[str, LayerChoice] = field(default_factory=dict)
    block: tuple[int, int] = (1, 16)
    encode: Literal["te", "te_per_token"] = "te"
    four_over_six_error: Literal["exact", "fast"] = "exact"
    e4m3_max: Literal[448, 256] | None = None
    recipe: Recipe = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _checks.is_one_of("format", self.format, tuple(FORMATS))
        has_rows = FORMATS[self.format].has_row_scales
        if self.activations is None:
            object.__setattr__(self, "activations", "per-token" if has_rows else "a16")
        known = checked_activations(self.activations, STORED_ACTIVATIONS)
        object.__setattr__(self, "activations", known)
        calibration = read_calibration(self.calibration)
        recipe = Recipe(
            activations=known,
            weight_scaling="tensor" if self.weight_scaling is None and not has_rows else self.weight_scaling,
            method=self.method,
            four_over_six=self.four_over_six,
            block=self.block,
            encode=self.encode,
            four_over_six_error=self.four_over_six_error,
            e4m3_max=self.e4m3_max,
            numerics=self.numerics,
            data=data_of(calibration, self.method),
        )
        check_residual_channels(self.residual_channels, known, recipe.data)
        if not self.residual_channels:
            recipe.check_uses_data("" if calibration is None else described(calibration))
        for name, value in (
            ("recipe", recipe),
            ("calibration", calibration),
            ("weight_scaling", recipe.weight_scaling),
            ("method", recipe.method),
            ("four_over_six", recipe.four_over_six),
        ):
            object.__setattr__(self, name, value)
        for name in ("experts_only", "split_experts"):
            _checks.is_bool(name, getattr(self, name))
        for name in ("bf16_first", "bf16_last"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}: got {_checks.describe(value)}, must be 0 or more layers")
        for name in ("include", "exclude"):
            object.__setattr__(self, name, patterns.texts(name, getattr(self, name)))
        object.__setattr__(self, "fuse", _sets(self.fuse))
        if self.weight_scaling == "row" and not has_rows:
            raise ValueError(
                f"weight_scaling: got 'row' with the format {self.format!r}, which holds one outer scale for "
                "a weight; must be 'tensor', or the format 'fp4gemm'"
            )
        if (self.activations == "static") != bool(self.activation_amax):
            raise ValueError(
                f"activation_amax: got {len(self.activation_amax)} amaxes with activations "
                f"{self.activations!r}; must be given for 'static', and only there"
            )
        for name, choice in self.layers.items():
            _checks.is_one_of(f"layers: {name}", choice, LAYER_CHOICES)
        if "fp8-channel" in self.layers.values() and not FORMATS[self.format].has_mixes:
            raise ValueError(
                f"layers: got 'fp8-channel' with the format {self.format!r}, which has no mixes; must be "
                "'bf16', or another format"
            )
        _positive("activation_amax", self.activation_amax, 1)
        _positive("kv_scales", self.kv_scales, 2)

    def choice_of(self, module: str) -> LayerChoice | None:
        """What ``layers`` says of a module, by its name or that of one that contains it."""
        parts = module.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.layers[name] for name in names if name in self.layers), None)

    @property
    def calibrated_by(self) -> Calibration | None:
        """The calibration that was read from the option ``calibration``."""
        return cast("Calibration | None", self.calibration)

    def as_json(self) -> dict[str, Any]:
        """The options as an object of JSON, which identifies them when a conversion is resumed."""
        about = None if self.calibrated_by is None else key_of(self.calibrated_by)
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "calibration"}
        kept |= {"recipe": asdict(self.recipe), "calibration": about}
        plain: dict[str, Any] = json.loads(json.dumps(kept))
        return plain


def read_fused(path: Path) -> tuple[tuple[str, ...], ...]:
    """The fused sets of a JSON file: ``[["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]``."""
    return _sets(_json(path, "fuse"))


def read_layers(path: Path) -> dict[str, LayerChoice]:
    """The formats of a JSON file: ``{"model.layers.0.mlp.down_proj": "fp8-channel"}``."""
    value = _json(path, "layers")
    if not isinstance(value, dict) or not value:
        raise ValueError(f"layers: {path} is no JSON object, must map names of modules to a format")
    return value


def read_amaxes(path: Path) -> dict[str, float]:
    """The amaxes of a JSON file: ``{"model.layers.0.self_attn.q_proj": 12.5}``."""
    value = _json(path, "activations")
    if not isinstance(value, dict) or not value:
        raise ValueError(f"activations: {path} is no JSON object, must map names of modules to an amax")
    return value


def read_kv_scales(path: Path) -> dict[str, tuple[float, float]]:
    """The scales of a JSON file: ``{"model.layers.0.self_attn": [0.5, 0.25]}``, k and then v."""
    value = _json(path, "kv_cache")
    if not isinstance(value, dict) or not value:
        raise ValueError(f"kv_cache: {path} is no JSON object, must map attention modules to [k, v]")
    _positive("kv_cache", value, 2)
    return {name: (float(k), float(v)) for name, (k, v) in value.items()}


def _json(path: Path, option: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {path} cannot be read as JSON: {error}") from error


def _sets(value: object) -> tuple[tuple[str, ...], ...]:
    wanted = "a sequence of sets, each two or more names of layers, such as ['gate_proj', 'up_proj']"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"fuse: got {_checks.describe(value)}, must be {wanted}")
    seen: set[str] = set()
    for names in value:
        is_set = not isinstance(names, str) and isinstance(names, Sequence) and len(names) > 1
        if not is_set or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"fuse: got {_checks.describe(names)}, must be {wanted}")
        for name in names:
            if name in seen:
                raise ValueError(f"fuse: names {name!r} twice, must name each layer once")
            seen.add(name)
    return tuple(tuple(names) for names in value)


def _positive(option: str, values: Mapping[str, Any], length: int) -> None:
    for name, value in values.items():
        numbers = value if length > 1 else [value]
        good = isinstance(numbers, list | tuple) and len(numbers) == length
        if not good or not all(_is_positive(number) for number in numbers):
            wanted = "a positive float32 number" if length == 1 else f"{length} positive float32 numbers"
            raise ValueError(f"{option}: got {_checks.describe(value)} for {name}, must be {wanted}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and TINY <= value <= HUGE
