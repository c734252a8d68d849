"""Settings: what a recipe of TransformerEngine, or its environment variables, say of NVFP4; also of MXFP8.

Nothing of TransformerEngine is imported: a recipe is read by its attributes. They are those of its release
2.20.2, and those of its pull request 3045, whose per-token recipe no release has. docs/interop.md has the
table of the variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import _checks

__all__ = [
    "LAUNCHES",
    "REFUSED",
    "VARIABLES",
    "Settings",
    "is_mxfp8",
    "of_environment",
    "of_mxfp8",
    "of_recipe",
]

_SCOPES = ("none", "weights", "activations", "all")
_FLAG = (False, True)
# Variables of TransformerEngine that choose how its kernels are launched, and change no number.
LAUNCHES = ("NVTE_NVFP4_PER_TOKEN_GROUPED_FALLBACK", "NVTE_NVFP4_GROUPED_BATCHED_H2D")
REFUSED = {"NVTE_USE_FAST_MATH": "fp4gemm computes no approximate reciprocals"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of NVFP4BlockScaling by the names that TransformerEngine gives them, and two more.

    per_token is the method nvfp4_per_token() of a recipe. four_over_six_error_is_fast is no attribute of a
    recipe: kernels of TransformerEngine read its variable in each call.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    backward_override: str | None = None
    per_token: bool = False
    per_token_rht: bool = False
    per_token_sr: bool = False
    per_token_weight_2d: bool = False
    four_over_six_error_is_fast: bool = False

    @property
    def rotates(self) -> bool:
        """Whether the operands of wgrad are rotated."""
        return self.per_token_rht if self.per_token else not self.disable_rht

    @property
    def is_stochastic(self) -> bool:
        """Whether gradients are rounded stochastically."""
        return self.per_token_sr if self.per_token else not self.disable_stochastic_rounding

    @property
    def is_2d(self) -> bool:
        """Whether weights have blocks of 16x16."""
        return self.per_token_weight_2d if self.per_token else not self.disable_2d_quantization

    def has_four_over_six(self, role: str) -> bool:
        """Whether the "weights" or the "activations" have four over six."""
        return self.nvfp4_4over6 in (role, "all")

    def has_256(self, role: str) -> bool:
        """Whether the bound of the "weights" or the "activations" is 256 where they have four over six."""
        return self.nvfp4_4over6_e4m3_use_256 in (role, "all")


class _Variable(NamedTuple):
    """The field of Settings that an environment variable sets, and the values that it may have."""

    field: str
    values: tuple[Any, ...] = _FLAG


VARIABLES = {
    "NVTE_NVFP4_DISABLE_RHT": _Variable("disable_rht"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": _Variable("disable_stochastic_rounding"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": _Variable("disable_2d_quantization"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _Variable("row_scaled_activation"),
    "NVTE_NVFP4_4OVER6": _Variable("nvfp4_4over6", _SCOPES),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": _Variable("nvfp4_4over6_e4m3_use_256", _SCOPES),
    "NVTE_NVFP4_4OVER6_ERR_MODE": _Variable("nvfp4_4over6_err_mode", ("MAE", "MSE")),
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": _Variable("four_over_six_error_is_fast"),
    "NVTE_BACKWARD_OVERRIDE": _Variable("backward_override", ("high_precision", "dequantized")),
    "NVTE_NVFP4_PER_TOKEN": _Variable("per_token"),
    "NVTE_NVFP4_PER_TOKEN_RHT": _Variable("per_token_rht"),
    "NVTE_NVFP4_PER_TOKEN_SR": _Variable("per_token_sr"),
    "NVTE_NVFP4_PER_TOKEN_WEIGHT_2D": _Variable("per_token_weight_2d"),
}
_OF_FIELD = {variable.field: (name, variable.values) for name, variable in VARIABLES.items()}
_NO_ATTRIBUTES = ("per_token", "four_over_six_error_is_fast")
# Attributes that must have one value, and why.
_FIXED = {
    "fp4_format": ("E2M1", "the codes are e2m1"),
    "fp8_format": ("E4M3", "the block scales are e4m3"),
    "fp8_dpa": (False, "attention is not quantized"),
    "fp8_mha": (False, "attention is not quantized"),
}
_QPARAMS = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
_NO_QPARAMS = {
    "power_2_scale": False,
    "amax_epsilon": 0.0,
    "random_hadamard_transform": False,
    "stochastic_rounding": False,
    "fp4_2d_quantization": False,
}


def of_environment(environ: Mapping[str, str]) -> Settings:
    """The settings of environment variables, each checked."""
    for name, why in REFUSED.items():
        if environ.get(name, "0") != "0":
            raise NotImplementedError(f"{name}: got {environ[name]!r}, must be '0' or unset, since {why}")
    known = {*VARIABLES, *LAUNCHES}
    for name in sorted(environ):
        if name.startswith("NVTE_NVFP4") and name not in known:
            raise ValueError(f"{name}: is no variable that fp4gemm knows; it knows {', '.join(VARIABLES)}")
    made: dict[str, Any] = {}
    for name, (field, values) in VARIABLES.items():
        if name not in environ:
            continue
        text = environ[name]
        texts = ("0", "1") if values is _FLAG else values
        text = text.upper() if field == "nvfp4_4over6_err_mode" else text  # as TransformerEngine does
        if text not in texts:
            shown = _checks.listing([repr(value) for value in texts])
            raise ValueError(f"{name}: got {environ[name]!r}, must be {shown}, or unset")
        made[field] = text == "1" if values is _FLAG else text
    return _consistent(Settings(**made), lambda field: _OF_FIELD[field][0], _text)


def _text(value: object) -> str:
    """A setting as the text of a variable."""
    return "no value" if value is None else repr(str(int(value)) if isinstance(value, bool) else value)


def of_recipe(recipe: object) -> Settings:
    """The settings of an NVFP4BlockScaling, or of a subclass of it, each attribute checked."""
    if "NVFP4BlockScaling" not in (each.__name__ for each in type(recipe).__mro__):
        raise TypeError(
            f"recipe: got {_checks.describe(recipe)}, must be an NVFP4BlockScaling or an MXFP8BlockScaling "
            "of TransformerEngine"
        )
    given = {name: value for name, value in vars(recipe).items() if not name.startswith("_")}
    fields = [each.name for each in dataclasses.fields(Settings) if each.name not in _NO_ATTRIBUTES]
    for name in given:
        if name not in (*fields, *_FIXED, *_QPARAMS):
            raise ValueError(
                f"{name}: is no attribute of NVFP4BlockScaling that fp4gemm knows; it knows "
                f"{', '.join((*fields, *_FIXED, *_QPARAMS))}"
            )
    for name, (wanted, why) in _FIXED.items():
        got = given.get(name, wanted)
        if getattr(got, "name", got) != wanted:
            raise NotImplementedError(f"{name}: got {got!r}, must be {wanted}, since {why}")
    made: dict[str, Any] = {name: given[name] for name in fields if name in given}
    for name, value in made.items():
        values = _OF_FIELD[name][1]
        if values is _FLAG:
            _checks.is_bool(name, value)
        else:
            _checks.is_choice(name, value, (None, *values) if name == "backward_override" else values)
    is_per_token = getattr(recipe, "nvfp4_per_token", None)
    settings = Settings(**made, per_token=bool(is_per_token()) if callable(is_per_token) else False)
    _check_qparams(given, settings)
    return _consistent(settings, str, repr)


# The attributes of an MXFP8BlockScaling but backward_override, and why each must have one value.
_MXFP8_FIXED = {
    "margin": (0, "no scale has a margin"),
    "fp8_format": ("E4M3", "products multiply e4m3 alone"),
    "fp8_dpa": (False, "attention is not quantized"),
    "fp8_mha": (False, "attention is not quantized"),
    "enable_2d_quantization": (False, "blocks are 1x32"),
}


def is_mxfp8(recipe: object) -> bool:
    """Whether it is an MXFP8BlockScaling, or of a subclass of it."""
    return "MXFP8BlockScaling" in (each.__name__ for each in type(recipe).__mro__)


def of_mxfp8(recipe: object) -> str | None:
    """The backward_override of an MXFP8BlockScaling, after each attribute was checked."""
    given = {name: value for name, value in vars(recipe).items() if not name.startswith("_")}
    known = (*_MXFP8_FIXED, "backward_override")
    for name, got in given.items():
        if name not in known:
            raise ValueError(
                f"{name}: is no attribute of MXFP8BlockScaling that fp4gemm knows; it knows "
                f"{', '.join(known)}"
            )
        wanted, why = _MXFP8_FIXED.get(name, (got, ""))
        if getattr(got, "name", got) != wanted:
            raise NotImplementedError(f"{name}: got {got!r}, must be {wanted}, since {why}")
    override: str | None = given.get("backward_override")
    _checks.is_choice("backward_override", override, (None, *_OF_FIELD["backward_override"][1]))
    return override


def _check_qparams(given: Mapping[str, Any], settings: Settings) -> None:
    """Check that the parameters of the quantizers are those that follow from the other attributes."""
    wanted: dict[str, dict[str, Any]] = {
        "fp4_quant_fwd_inp": {"random_hadamard_transform": settings.rotates},
        "fp4_quant_fwd_weight": {"fp4_2d_quantization": settings.is_2d and not settings.per_token},
        "fp4_quant_bwd_grad": {
            "random_hadamard_transform": settings.rotates,
            "stochastic_rounding": settings.is_stochastic,
        },
    }
    for name, own in wanted.items():
        for field, value in vars(given.get(name)).items() if name in given else ():
            if field.startswith("_"):
                continue
            if field not in _NO_QPARAMS:
                raise ValueError(f"{name}.{field}: is no attribute of QParams that fp4gemm knows")
            must = own.get(field, _NO_QPARAMS[field])
            if value != must:
                raise ValueError(
                    f"{name}.{field}: got {value!r}, must be {must!r}, which follows from the arguments of "
                    "the recipe; change those"
                )


def _consistent(settings: Settings, named: Callable[[str], str], shown: Callable[[object], str]) -> Settings:
    """Return the settings, or raise for those that TransformerEngine refuses or does not combine.

    ``named`` gives the name of a field and ``shown`` a value, as of an attribute or of a variable.
    """

    def refuse(field: str, wanted: object, other: str, why: str) -> None:
        raise ValueError(
            f"{named(field)}: got {shown(getattr(settings, field))}, must be {shown(wanted)} with "
            f"{named(other)} {shown(getattr(settings, other))}: {why}"
        )

    has_six = settings.has_four_over_six("activations")
    if settings.per_token:
        why = "the per-token recipe of TransformerEngine has neither row scaling nor four over six"
        if settings.row_scaled_activation:
            refuse("row_scaled_activation", False, "per_token", why)
        if settings.nvfp4_4over6 != "none":
            refuse("nvfp4_4over6", "none", "per_token", why)
    elif settings.rotates:
        why = "TransformerEngine rotates no tensor that has it (PRESETS['four_over_six'] has both)"
        if settings.row_scaled_activation:
            refuse(
                "disable_rht", True, "row_scaled_activation", "TransformerEngine refuses to rotate its rows"
            )
        if has_six:
            refuse("disable_rht", True, "nvfp4_4over6", why)
    if settings.row_scaled_activation and has_six and settings.backward_override is None:
        why = "TransformerEngine has no transposed copy of rows with four over six"
        refuse("backward_override", "dequantized", "row_scaled_activation", why)
    return settings
