"""LayerFormat: how a mixed checkpoint stores single layers that are not NVFP4. Group: layers of one format.

A checkpoint of ModelOpt or compressed-tensors may store some layers in NVFP4 and others in FP8 or MXFP8. Each
format of such other layers is one file that makes its :class:`LayerFormat`, an entry of :data:`LAYERS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ... import _checks
from ...containers.mxfp8 import MXFP8Tensor
from ...recipe import LayerActivations, StoredActivations

if TYPE_CHECKING:
    from .base import FormatName
    from .sources import Described

__all__ = ["LAYERS", "Group", "LayerFormat", "LayerName", "StoredLayer"]

LayerName = Literal["fp8-tensor", "fp8-channel", "fp8-block", "mxfp8"]
WEIGHT, BIAS, INPUT = "weight", "bias", "input_scale"  # suffixes
E4M3 = "F8_E4M3"
FLOATS = ("F32", "BF16", "F16")
FLOAT_PACKING = "float-quantized"  # what compressed-tensors calls FP8
# The dtypes of scales.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
}
E4M3_MAX = 448.0


# What is stored: NVFP4 with these activations, or a format of LAYERS.
Stored = StoredActivations | LayerName


class Group(NamedTuple):
    """Layers of a mixed checkpoint that have one format.

    Attributes:
        targets: their names, or patterns as those of :class:`.Scheme`.
        stored: NVFP4 with these activations, or the name of a format of :data:`LAYERS`.
    """

    targets: tuple[str, ...]
    stored: Stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """Everything about a format of single layers that are not NVFP4: w[n, k] = code * scale.

    A layer has the tensors ``weight``, codes in e4m3 (n, k); a scale, which multiplies; and perhaps
    ``input_scale``, the scale of its static activations.

    Args:
        name: the name of the format.
        title: its name in reports.
        algorithms: what ModelOpt calls it in ``quant_algo``, in upper case; the first is written.
        scales: the suffixes that the scale may have; the first is written.
        has_input_scale: whether the activations of a layer that is written are static, so that it must have
            ``input_scale``.
        scale_shape: called with the format of the checkpoint, n and k; returns the shape of the scale.
        expand: called with a float32 scale, n and k; returns the scale of each element, for broadcasting
            against (n, k).
        weights, inputs: the arguments of compressed-tensors that are written, and compared with those read.
        quantize: called with a weight (n, k); returns codes and float32 scale. None: it is only read.
        packing: what compressed-tensors calls the ``format`` of a group.
        scale_dtypes: the dtypes of the scale, as safetensors names them.
        numbers: called with a scale of one of these dtypes; returns its numbers in float32.
        activations: those of layers of this library that hold such a weight. None: such layers stay in float.
        operand: called with codes and scale; returns the weight of such a layer.
    """

    name: LayerName
    title: str
    algorithms: tuple[str, ...]
    scales: tuple[str, ...]
    has_input_scale: bool
    scale_shape: Callable[[FormatName, int, int], tuple[int, ...]]
    expand: Callable[[Tensor, int, int], Tensor]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    packing: str
    scale_dtypes: tuple[str, ...]
    numbers: Callable[[Tensor], Tensor]
    activations: LayerActivations | None
    operand: Callable[[Tensor, Tensor], MXFP8Tensor] | None

    def fits(self, weights: Mapping[str, Any]) -> bool:
        """Whether the arguments of weights in compressed-tensors are those of this format."""
        return all(weights.get(key) == value for key, value in self.weights.items())

    def scale_of(self, members: Mapping[str, object]) -> str | None:
        """The suffix of the scale among the suffixes of the tensors of a layer."""
        return next((suffix for suffix in self.scales if suffix in members), None)

    def problems(self, owner: str, members: Mapping[str, Described]) -> list[str]:
        """What is wrong with the tensors of a layer, by suffix; names are those of the checkpoint."""
        scale = self.scale_of(members)
        if WEIGHT not in members:
            return [f"{owner}.{WEIGHT} is missing, which config.json calls {self.title}"]
        weight = members[WEIGHT]
        if weight.dtype != E4M3:
            return [
                f"{owner}.{WEIGHT} has the dtype {weight.dtype}, must be {E4M3}, since config.json calls it "
                f"{self.title}"
            ]
        if scale is None:
            return [f"{owner}.{self.scales[0]} is missing beside {WEIGHT}, which is {self.title}"]
        if len(weight.shape) != 2:
            return [f"{owner}.{WEIGHT} has the shape {weight.shape}, must be (n, k)"]
        known = {WEIGHT, scale, BIAS, INPUT, "k_scale", "v_scale"}
        found = [
            f"{owner}.{name} is not known, must be one of {', '.join(sorted(known))}"
            for name in sorted(set(members) - known)
        ]
        shapes = self.shapes(*weight.shape)
        if members[scale].dtype not in self.scale_dtypes:
            wanted = " or ".join(self.scale_dtypes)
            found.append(f"{owner}.{scale} has the dtype {members[scale].dtype}, must be {wanted}")
        elif members[scale].shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            found.append(f"{owner}.{scale} has the shape {members[scale].shape}, must be {wanted}")
        return found

    def shapes(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scale of a weight (n, k) may have: those of both producers."""
        producers: tuple[FormatName, ...] = ("modelopt", "compressed-tensors")
        return tuple(dict.fromkeys(self.scale_shape(each, n, k) for each in producers))


LAYERS: dict[LayerName, LayerFormat] = {}  # the package enters every format


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLayer:
    """A weight (n, k) in a format of :data:`LAYERS`, as a checkpoint holds it.

    Args:
        codes: float8_e4m3fn (n, k).
        scale: of a shape and a dtype of the format.
        layer: the format.

    Raises:
        ValueError: a shape is another one, a code is NaN, or a scale is negative, infinite or NaN.
            Synchronises on a GPU.
    """

    codes: Tensor
    scale: Tensor
    layer: LayerName

    def __post_init__(self) -> None:
        about = LAYERS[self.layer]
        _checks.has_dtype("codes", self.codes, (torch.float8_e4m3fn,))
        _checks.has_rank("codes", self.codes, 2, "(n, k)")
        _checks.has_dtype("scale", self.scale, tuple(map(DTYPES.__getitem__, about.scale_dtypes)))
        shapes = about.shapes(*self.codes.shape)
        if tuple(self.scale.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"scale: shape is {tuple(self.scale.shape)}, must be {wanted}")
        numbers = about.numbers(self.scale)
        wrong = numbers.signbit() | ~numbers.isfinite()
        if bool(wrong.any()):
            raise ValueError(f"scale: holds {numbers[wrong][0].item()}, must be finite and not negative")
        if bool(((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise ValueError("codes: holds NaN, must be numbers")

    @classmethod
    def of(cls, weight: Tensor, layer: LayerName) -> StoredLayer:
        """A float weight (n, k) in this format, on its device.

        Raises:
            ValueError: the format is only read, or the weight has NaN or infinity.
        """
        quantize = LAYERS[layer].quantize
        if quantize is None:
            raise ValueError(f"layer: got {layer!r}, which is only read; must be a format that is written")
        if not bool(weight.isfinite().all()):
            raise ValueError("weight: holds NaN or infinity, must be finite")
        return cls(*quantize(weight), layer)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str, layer: LayerName) -> StoredLayer:
        """The weight of the module ``prefix`` among the tensors of a checkpoint, by their full names.

        Raises:
            KeyError: a tensor is missing. TypeError, ValueError: as for the class; the text names the module.
        """
        about = LAYERS[layer]
        mine = {
            name.removeprefix(f"{prefix}."): x for name, x in tensors.items() if name.startswith(f"{prefix}.")
        }
        scale = about.scale_of(mine)
        if WEIGHT not in mine or scale is None:
            missing = about.scales[0] if WEIGHT in mine else WEIGHT
            raise KeyError(f"{prefix}.{missing}: is missing beside {prefix}, a weight in {about.title}")
        try:
            return cls(mine[WEIGHT], mine[scale], layer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{prefix}: {error}") from error

    def tensors(self, prefix: str, format: FormatName) -> dict[str, Tensor]:
        """Codes and scale by their full names, those of the module ``prefix`` in this format."""
        about = LAYERS[self.layer]
        shape = about.scale_shape(format, *self.codes.shape)
        return {
            f"{prefix}.{WEIGHT}": self.codes,
            f"{prefix}.{about.scales[0]}": self.scale.reshape(shape),
        }

    def scale_of_elements(self) -> Tensor:
        """The scale of each element, float32, to broadcast against (n, k)."""
        about, (n, k) = LAYERS[self.layer], self.codes.shape
        return about.expand(about.numbers(self.scale), n, k)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """cast(fl(code * scale)), (n, k): one rounding to float32, and one to dtype."""
        return (self.codes.float() * self.scale_of_elements()).to(dtype)

    def operand(self) -> MXFP8Tensor:
        """The weight of a layer of this library; raises ValueError in a format without such layers."""
        about = LAYERS[self.layer]
        if about.operand is None:
            raise ValueError(f"layer: got {self.layer!r}, which no layer of this library holds")
        return about.operand(self.codes, self.scale)
