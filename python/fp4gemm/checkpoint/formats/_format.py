"""The three formats: names of their tensors, and the direction of their outer scales."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ... import _checks
from ...containers import _outer

__all__ = ["FORMATS", "Direction", "Format", "FormatName", "format_of", "outer_number"]

FormatName = Literal["modelopt", "compressed-tensors", "fp4gemm"]
Direction = Literal["decodes", "encodes", "amax"]


@dataclasses.dataclass(frozen=True)
class Format:
    """A checkpoint format: what follows the name of a module in the names of its tensors.

    Args:
        name: the name of the format, which is also ``quant_method`` in config.json.
        codes: the suffix of the codes, uint8 (n, k/2).
        block_scales: the suffix of the block scales, float8_e4m3fn (n, k/16), plain order.
        outer_scale: the suffix of the outer scale, float32.
        input_scale: the suffix of the outer scale of static activations, float32, of the same direction.
        kv_scales: the suffixes of the scales of K and V behind the name of the attention module, float32 (),
            decode multipliers.
        direction: "decodes": the outer scale is fl(A / 6B), and the loader multiplies by it; "encodes": it is
            fl(6B / A), and the loader divides by it; "amax": it is A.
        outer_shape: the shape of an outer scale of one number.
        has_row_scales: whether the outer scale of a weight may be (n,), one for each row.
        has_targets: whether patterns of modules in a config are those of compressed-tensors (whole names,
            classes, and ``re:`` with a regular expression) and not those of fnmatch (:func:`is_ignored`).
    """

    name: FormatName
    codes: str
    block_scales: str
    outer_scale: str
    input_scale: str
    kv_scales: tuple[str, str]
    direction: Direction
    outer_shape: tuple[int, ...]
    has_row_scales: bool
    has_targets: bool

    @property
    def weight_suffixes(self) -> tuple[str, str, str]:
        """Codes, block scales, outer scale."""
        return self.codes, self.block_scales, self.outer_scale

    def input_tensors(self, prefix: str, amax: Tensor | None) -> dict[str, Tensor]:
        """The tensors of the activations of the module ``prefix``, by name.

        Args:
            prefix: the name of the module.
            amax: float32 of one element, the amax of static activations. None: activations that are scaled
                per token when the model runs. ModelOpt and compressed-tensors then hold 1.0, an amax of 2688,
                for loaders that know no scale per token: vLLM reads uninitialised memory if the tensor is
                missing. The fp4gemm format then holds nothing.

        Raises:
            TypeError, ValueError: amax is no such tensor, or is not positive and finite.
        """
        if amax is None:
            if self.direction == "amax":
                return {}
            return {f"{prefix}.{self.input_scale}": torch.ones(self.outer_shape, dtype=torch.float32)}
        number = outer_number(f"{prefix}.{self.input_scale}", amax, 1)
        if not number.item() > 0:
            raise ValueError(f"amax: of the activations of {prefix} is {number.item()}, must be positive")
        return {f"{prefix}.{self.input_scale}": outer_from_amax(number, self, 448).view(self.outer_shape)}

    def input_amax(self, value: Tensor) -> Tensor:
        """The amax, float32 (1,), of static activations with this outer scale.

        Raises:
            TypeError, ValueError: the value is not one float32 number, or not positive and finite.
        """
        number = outer_number(self.input_scale, value, 1)
        if not number.item() > 0:
            raise ValueError(f"{self.input_scale}: holds {number.item()}, must be positive")
        return outer_to_amax(number, self, 448)


FORMATS: dict[FormatName, Format] = {
    "modelopt": Format(
        "modelopt",
        "weight",
        "weight_scale",
        "weight_scale_2",
        "input_scale",
        ("k_proj.k_scale", "v_proj.v_scale"),
        "decodes",
        (),
        has_row_scales=False,
        has_targets=False,
    ),
    "compressed-tensors": Format(
        "compressed-tensors",
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
        ("k_scale", "v_scale"),
        "encodes",
        (1,),
        has_row_scales=False,
        has_targets=True,
    ),
    "fp4gemm": Format(
        "fp4gemm",
        "weight",
        "weight_scale",
        "weight_amax",
        "input_amax",
        ("k_proj.k_scale", "v_proj.v_scale"),
        "amax",
        (1,),
        has_row_scales=True,
        has_targets=False,
    ),
}


def format_of(name: object) -> Format:
    """The format of this name, or ValueError."""
    _checks.is_one_of("format", name, tuple(FORMATS))
    return FORMATS[name]  # type: ignore[index]


def outer_number(name: str, value: object, rows: int) -> Tensor:
    """Outer scales as float32 (1,) or (rows,), checked: finite and not negative.

    Raises:
        TypeError: no float32 tensor. ValueError: another shape, or a value that is no outer scale.
    """
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    if x.numel() not in (1, rows) or x.dim() > 1:
        wanted = "() or (1,)" if rows == 1 else f"(), (1,) or ({rows},)"
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {wanted}")
    x = x.reshape(-1)
    wrong = x.signbit() | ~x.isfinite()
    if x.device.type != "meta" and bool(wrong.any()):
        raise ValueError(f"{name}: holds {x[wrong][0].item()}, must be finite and not negative")
    return x


def outer_to_amax(outer: Tensor, format: Format, e4m3_max: int) -> Tensor:
    """A of outer scales of this format."""
    if format.direction == "amax":
        return outer
    zero = outer == (_checks.FLOAT32_MAX if format.direction == "encodes" else 0.0)
    return torch.where(zero, 0.0, _outer.amax_of(outer, e4m3_max, format.direction))


def outer_from_amax(amax: Tensor, format: Format, e4m3_max: int) -> Tensor:
    """The outer scales of this format for A."""
    if format.direction == "decodes":
        return torch.div(amax, _outer.six_times(e4m3_max, amax))
    return amax if format.direction == "amax" else _outer.encode_scale(amax, e4m3_max)
