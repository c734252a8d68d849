"""Fp4GemmConfig: what transformers holds as ``quantization_config`` of a model with fp4gemm's layers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from transformers.utils.quantization_config import QuantizationConfigMixin

from ... import _checks, patterns
from ...calibration.statistics import StatisticsFile
from ...checkpoint.formats import (
    FORMATS,
    PACKED,
    SOURCES,
    FormatName,
    PackedFormat,
    Scheme,
    SourceFormat,
    quantization_config,
    read_quantization_config,
)
from ...checkpoint.formats.base import OWN_ACTIVATIONS, own_value
from ...checkpoint.formats.compressed_tensors import is_nvfp4
from ...nn._inputs import check_fast_accum
from ...recipe import (
    AUTO,
    INPUTS,
    LAYER_ACTIVATIONS,
    WEIGHT_SCALINGS,
    LayerActivations,
    Method,
    Recipe,
    WeightScaling,
    checked_activations,
    checked_recipe,
    data_of,
)

__all__ = ["Fp4GemmConfig", "compressed_tensors", "readable"]

Fuse = Literal["auto", "none"]
FAST = "use_fast_accum"  # the key of the producer for this option
ROUNDED = "rounded_gate"  # the key of the producer for this option of the experts
OPTIONS = (
    *("weight_scaling", "activations", "method", "calibration"),
    *("include", "exclude", "fuse", "use_fast_accum", "format", "recipe"),
)
OF_LOADING = ("activations", "fuse", "use_fast_accum")  # the options that a quantized checkpoint leaves open


class Fp4GemmConfig(QuantizationConfigMixin):
    """``quantization_config=`` of ``from_pretrained``: NVFP4 layers of fp4gemm.

    With a float checkpoint, each layer is quantized as soon as it has been read, so that no more than one
    layer is held in float at a time. :func:`fp4gemm.models.quantize_model` says which layers stay in float.

    With an NVFP4 checkpoint the options that concern the weights must be absent, since the checkpoint has
    settled them; ``activations``, ``fuse`` and ``use_fast_accum`` are still open. With a checkpoint of
    GPT-OSS ``activations="mxfp8-mxfp4"`` keeps the codes and scales of its MXFP4 experts, and all other
    values make them NVFP4.

    Args:
        weight_scaling: "row" or "tensor", as for ``quantize_model``. None is "row" for the format "fp4gemm",
            and "tensor" for the others, which can hold no other.
        activations: as for :class:`fp4gemm.nn.Linear`, with options of the cast too. "auto":
            each layer gets those of the device that it is loaded onto (:func:`fp4gemm.recipe.automatic`), and
            the log says which; float weights are quantized as for "per-token". None: what an NVFP4 checkpoint
            says, and "per-token" where that is static; with a float checkpoint "per-token".
        method: how weights are rounded, as for ``quantize_model``; None is the best that calibration allows,
            "four-over-six" without. "search" needs calibration here, and only it and "gptq" accept one.
        calibration: the path of a file of :meth:`fp4gemm.calibration.Statistics.save`, whose statistics are
            read layer by layer; or a list of batches for :func:`fp4gemm.calibrate`, or of texts, which the
            tokenizer beside the model turns into batches. With a list the whole model is loaded in float,
            onto one device, and quantized then. config.json of a quantized model does not name it.
        include, exclude: patterns of names (:mod:`fp4gemm.patterns`), as for ``quantize_model``.
        fuse: as for ``quantize_model``.
        use_fast_accum: as for ``quantize_model``, with activations that are "fp8" or become so. None: what
            an NVFP4 checkpoint says that this library saved, unless ``activations`` are given, else False.
        format: what ``save_pretrained`` writes: "modelopt", "compressed-tensors" or "fp4gemm". None: as the
            model was loaded, else "modelopt".
        recipe: activations, weight_scaling and method together, as for ``quantize_model``, or a mapping of
            the options of one, as config.json holds it.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    scheme: Scheme | None = None  # the scheme of a checkpoint that was loaded or is being saved
    # The format of a checkpoint whose weights become NVFP4 ones or, for some activations, stay as they are.
    source: SourceFormat | None = None
    written: SourceFormat | None = None  # the format of SOURCES in which the model is being saved
    packed: PackedFormat | None = None  # the format of a checkpoint without NVFP4 that is loaded as it is
    rounded_gate: bool = False  # of the experts of a checkpoint
    fused: Mapping[str, int] | None = None  # how many blocks of each kind the model had fused that was saved

    def __init__(
        self,
        *,
        weight_scaling: WeightScaling | None = None,
        activations: LayerActivations | Literal["auto"] | None = None,
        method: Method | None = None,
        calibration: str | os.PathLike[str] | Sequence[object] | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        fuse: Fuse | None = None,
        use_fast_accum: bool | None = None,
        format: FormatName | None = None,
        recipe: Recipe | Mapping[str, Any] | None = None,
    ) -> None:
        self.quant_method = "fp4gemm"
        for name, value, allowed in (
            ("weight_scaling", weight_scaling, WEIGHT_SCALINGS),
            ("method", method, get_args(Method)),
            ("fuse", fuse, get_args(Fuse)),
            ("format", format, tuple(FORMATS)),
        ):
            if value is not None:
                _checks.is_one_of(name, value, allowed)
        made = None if recipe is None else _recipe(recipe)
        if made is not None:
            absent = {"activations": activations, "weight_scaling": weight_scaling, "method": method}
            made.check_absent(**{name: (value, None) for name, value in absent.items()})
            activations, weight_scaling = cast(Any, made.activations), made.weight_scaling
        if activations is not None:
            activations = checked_activations(activations, (*LAYER_ACTIVATIONS, AUTO))
        stated = None if activations == AUTO else cast("LayerActivations | None", activations)
        if use_fast_accum is not None:
            check_fast_accum(use_fast_accum, stated or "fp8")  # what the others become is known later
        known = _calibration(calibration)
        self._given = {
            name: value
            for name, value in (
                ("weight_scaling", weight_scaling if made is None else None),
                ("activations", activations if made is None else None),
                ("method", method),
                ("recipe", None if made is None else _as_json(made)),
                ("calibration", str(calibration) if isinstance(known, StatisticsFile) else known),
                ("include", _patterns("include", include)),
                ("exclude", _patterns("exclude", exclude)),
                ("fuse", fuse),
                ("use_fast_accum", use_fast_accum),
                ("format", format),
            )
            if value is not None
        }
        self.given_recipe = made
        self.activations = activations
        kind = INPUTS[stated or "per-token"]
        default: WeightScaling = _scaling_of(format) if kind.weights == "nvfp4" else "row"
        self.weight_scaling: WeightScaling = weight_scaling or default
        if made is not None:
            self.recipe = dataclasses.replace(made, data=data_of(known))
        else:
            self.recipe = Recipe(
                activations=stated or "per-token",
                weight_scaling=self.weight_scaling,
                method=method,
                data=data_of(known),
            )
        self.recipe.check_uses_data(f"a {type(calibration).__name__}")
        self.method = self.recipe.method
        self.calibration = known
        self.include = _patterns("include", include)
        self.exclude = _patterns("exclude", exclude)
        self.fuse: Fuse = fuse or "none"
        self.use_fast_accum = bool(use_fast_accum)
        self.format = format

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The config of a checkpoint from the ``quantization_config`` of its config.json.

        It is also read from the options that :meth:`to_dict` writes where there is no checkpoint yet:
        ``{"quant_method": "fp4gemm", "activations": "a16"}``.

        Raises:
            TypeError, ValueError: it is neither NVFP4 in one of the three formats nor MXFP4 or MXFP8; the
                text names what it is. An option is not known, or its value is wrong.
        """
        options = dict(config_dict)
        method = options.pop("quant_method", None)
        if method == "fp4gemm" and set(options) <= set(OPTIONS):
            made = cls(**options)
        elif method in SOURCES:
            source = SOURCES[method]
            made = cls.of(source.scheme(config_dict))
            made.source = source
        elif method in readable():
            packed = readable()[method]
            packed.read(config_dict, "quantization_config")  # type: ignore[misc]
            made = cls.of(Scheme("fp4gemm", "a16"))
            made.packed = packed
        else:
            made = cls.of(read_quantization_config(config_dict))
            made._read_own(config_dict.get("producer"))
        return (made, kwargs) if return_unused_kwargs else made

    @classmethod
    def of(cls, scheme: Scheme) -> Fp4GemmConfig:
        """The config of a checkpoint of this scheme."""
        made = cls(format=scheme.format)
        made.scheme = scheme
        return made

    def describe(
        self,
        activations: LayerActivations,
        fused: Mapping[str, int],
        use_fast_accum: bool,
        rounded_gate: bool,
    ) -> None:
        """Take over the options of loading from the model that is being saved."""
        self.activations, self.use_fast_accum = activations, use_fast_accum
        self.rounded_gate = rounded_gate
        self.fused = fused or None
        self.fuse = "auto" if fused else "none"

    def _read_own(self, producer: object) -> None:
        """The options that :meth:`describe` took over, from the producer of a checkpoint of this library."""
        if not isinstance(producer, Mapping) or producer.get("name") != "fp4gemm":
            return
        fused = producer.get("fused")
        if OWN_ACTIVATIONS in producer and self.scheme is not None:  # which has read it
            self.activations = self.scheme.activations
        fast = producer.get(FAST, False)
        _checks.is_bool(f"quantization_config: {FAST} of producer", fast)
        self.use_fast_accum = fast
        self.rounded_gate = producer.get(ROUNDED, False)
        _checks.is_bool(f"quantization_config: {ROUNDED} of producer", self.rounded_gate)
        if fused is not None:
            if not isinstance(fused, Mapping) or not all(type(number) is int for number in fused.values()):
                raise ValueError(
                    f"quantization_config: fused of producer is {_checks.describe(fused)}, must be an object "
                    "of numbers"
                )
            self.fused, self.fuse = dict(fused), "auto"

    def get_loading_attributes(self) -> dict[str, Any]:
        """The options that are kept where a checkpoint has a config of its own.

        Raises:
            ValueError: another option was given, which the checkpoint has settled.
        """
        settled = [name for name in self._given if name not in OF_LOADING]
        if settled:
            raise ValueError(
                f"{settled[0]}: got {self._given[settled[0]]!r}, must be absent for a checkpoint that is "
                f"quantized already; {' and '.join(OF_LOADING)} are still open"
            )
        given = dict(self._given)
        return {"use_fast_accum": False, **given} if "activations" in given else given

    def to_dict(self) -> dict[str, Any]:
        """The content for config.json: that of the checkpoint, once there is one."""
        if self.written is not None:
            return dict(self.written.config())
        if self.scheme is not None:
            made = quantization_config(self.scheme)
            if self.activations is not None:
                own = (
                    None if self.activations == AUTO else own_value(cast(LayerActivations, self.activations))
                )
                made["producer"].pop(OWN_ACTIVATIONS, None)
                if own is not None:
                    made["producer"][OWN_ACTIVATIONS] = own
            if self.use_fast_accum:
                made["producer"][FAST] = True
            if self.rounded_gate:
                made["producer"][ROUNDED] = True
            if self.fused is not None:
                made["producer"]["fused"] = dict(self.fused)
            return made
        given = dict(self._given)
        if not isinstance(given.get("calibration"), str):
            given.pop("calibration", None)  # batches are no JSON
        return {"quant_method": self.quant_method, **given}


def readable() -> dict[str, PackedFormat]:
    """The formats of PACKED that are loaded as they are, by ``quant_method``."""
    return {name: each for name, each in PACKED.items() if each.read is not None}


def _recipe(value: object) -> Recipe:
    """The recipe itself, or the one with the options of a mapping."""
    if not isinstance(value, Mapping):
        return checked_recipe(value)
    known = {each.name for each in dataclasses.fields(Recipe) if each.name != "data"}
    for name in value:
        if name not in known:
            raise ValueError(f"recipe: got the option {name!r}, must be {_checks.listing(sorted(known))}")
    given = dict(value)
    if isinstance(given.get("block"), list):
        given["block"] = tuple(given["block"])
    try:
        return checked_recipe(Recipe(**given))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"recipe: {error}") from error


def _as_json(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe as config.json holds them."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in recipe.options().items()}


def _scaling_of(format: FormatName | None) -> WeightScaling:
    """The default of weight_scaling: "row" where the format can hold it."""
    return "row" if format is not None and FORMATS[format].has_row_scales else "tensor"


def compressed_tensors(old: Any) -> Any:
    """The class of the method "compressed-tensors": Fp4GemmConfig for NVFP4, the class ``old`` for others."""

    class CompressedTensorsOrFp4GemmConfig(old):
        @classmethod
        def from_dict(
            cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
        ) -> Any:
            made = cast(Any, Fp4GemmConfig if is_nvfp4(config_dict) else old)
            return made.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)

    return CompressedTensorsOrFp4GemmConfig


def _calibration(value: object) -> StatisticsFile | list[object] | None:
    """The statistics of a path, or a list of batches or texts."""
    if value is None:
        return None
    if isinstance(value, str | os.PathLike):
        if not Path(value).is_file():
            raise ValueError(
                f"calibration: {os.fspath(value)!r} is no file, must be the path of statistics, or a list of "
                "batches or texts"
            )
        try:
            return StatisticsFile(value)
        except ValueError as error:
            raise ValueError(f"calibration: {error}") from error
    if not isinstance(value, Sequence):
        wanted = "the path of statistics, or a list of batches or texts"
        raise TypeError(f"calibration: got {_checks.describe(value)}, must be {wanted}")
    items = list(value)
    if not items:
        raise ValueError("calibration: is empty, must have at least one batch or text")
    texts = [isinstance(item, str) for item in items]
    if any(texts) and not all(texts):
        raise TypeError("calibration: has texts beside batches, must have either")
    return items


def _patterns(name: str, value: object) -> list[str] | None:
    """A list of texts; no callables, since a config is written as JSON."""
    if value is None:
        return None
    many = patterns.texts(name, value)
    if not many:
        raise ValueError(f"{name}: got {_checks.describe(value)}, must have at least one pattern, or be None")
    return list(many)
