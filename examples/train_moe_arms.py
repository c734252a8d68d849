"""The arms of train_moe.py: presets of fp4gemm.training and changes of them, such as ``per_token+2d``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fp4gemm.training import PRESETS, Cast, Recipe

MODEL_CHANGES = ("last_bf16", "outliers", "fp8", "jittered")
OPERANDS = ("x", "w", "dy", "w_t", "dy_t", "x_t")
BACKWARD = OPERANDS[2:]
WGRAD = OPERANDS[4:]
BF16 = "bf16"


def _each(change: Callable[[Cast], Cast], operands: tuple[str, ...] = OPERANDS) -> Callable[[Recipe], Recipe]:
    """Change the casts of some operands; those that are in bf16 or dequantized stay so."""

    def changed(recipe: Recipe) -> Recipe:
        casts = {name: getattr(recipe, name) for name in operands}
        return replace(
            recipe, **{name: change(cast) for name, cast in casts.items() if isinstance(cast, Cast)}
        )

    return changed


def _rows(operands: tuple[str, ...]) -> Callable[[Recipe], Recipe]:
    """An amax for each row of these operands, and blocks of 1x16."""
    return _each(lambda cast: replace(cast, scaling="row", block=(1, 16)), operands)


def _without(operands: tuple[str, ...]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, **dict.fromkeys(operands))


def _backward_only(recipe: Recipe) -> Recipe:
    # No forward copy is left that a backward operand could be made of.
    return _without(("x", "w"))(_each(lambda cast: replace(cast, source="original"), BACKWARD)(recipe))


# What each changes in a recipe; the last four change the model in place of the recipe. Some changes of nvidia
# are presets: no_rht and no_sr, forward_only (bf16_backward) and backward_only (bf16_forward); and
# per_token+wgrad_bf16 is per_token_wgrad_bf16.
CHANGES: dict[str, Callable[[Recipe], Recipe]] = {
    "rht": _each(lambda cast: replace(cast, hadamard="fp32"), WGRAD),
    "no_rht": _each(lambda cast: replace(cast, hadamard=None)),
    "no_sr": _each(lambda cast: replace(cast, stochastic=False)),
    "sr": _each(lambda cast: replace(cast, encode="te", stochastic=True), BACKWARD),  # codes, not scales
    "x_rows": _rows(("x",)),
    "w_rows": _rows(("w", "w_t")),
    "dy_rows": _rows(("dy",)),
    "wgrad_rows": _rows(WGRAD),
    "w_t_rowwise": _each(lambda cast: replace(cast, source="rowwise"), ("w_t",)),
    "w_t_original": _each(lambda cast: replace(cast, source="original"), ("w_t",)),
    "2d": _each(
        lambda cast: replace(cast, scaling="tensor", block=(16, 16), source="original"), ("w", "w_t")
    ),
    "forward_only": _without(BACKWARD),
    "backward_only": _backward_only,
    "wgrad_bf16": _without(WGRAD),
    "balanced": lambda recipe: replace(recipe, balance_tokens=True, save_input="original"),
    "balanced_rowwise": lambda recipe: replace(
        _each(lambda cast: replace(cast, source="rowwise"), ("x_t",))(recipe), balance_tokens=True
    ),
    **dict.fromkeys(MODEL_CHANGES, lambda recipe: recipe),
}
VARIANTS = (
    *(f"nvidia+{change}" for change in ("last_bf16", "outliers")),
    *(f"per_token+{change}" for change in ("no_rht", "no_sr", "2d", "last_bf16", "outliers")),
    *(f"per_token+{change}" for change in ("w_t_original", "forward_only", "backward_only", "balanced")),
    "per_token+balanced+outliers",
    "per_token_wgrad_bf16+outliers",
)
GROUPS = {
    "main": (BF16, "nvidia", "per_token"),
    "presets": (BF16, *(name for name in PRESETS if name != BF16)),
    "variants": VARIANTS,
    # What a run with --branch can rank, and two nulls beside it: arms whose weights are moved by as much as
    # their rounding to bf16 moves them.
    "ranking": (
        *(BF16, f"{BF16}+jittered", f"{BF16}+fp8", "mxfp8", "nvidia", "per_token", "per_token+jittered"),
        *("per_token+balanced", "per_token_wgrad_bf16"),
    ),
    "all": (BF16, *(name for name in PRESETS if name != BF16), *VARIANTS),
}


@dataclass(frozen=True)
class Arm:
    """A recipe by its name, and what is changed of the model: some of MODEL_CHANGES."""

    name: str
    recipe: Recipe
    model_changes: frozenset[str]

    def recipes(self, layers: int) -> list[Recipe]:
        """The recipe of each block; ``last_bf16`` keeps the last 15 % of them, one at least, in bf16."""
        kept = max(1, round(0.15 * layers)) if "last_bf16" in self.model_changes else 0
        return [self.recipe] * (layers - kept) + [PRESETS[BF16]] * kept


def arm(name: str, seed: int = 0) -> Arm:
    """The arm of a name; its stochastic rounding draws by ``seed``. ValueError for an unknown part of it."""
    preset, *changes = name.split("+")
    if preset not in PRESETS:
        raise ValueError(f"--arms: {name!r} begins with {preset!r}, must begin with one of {_list(PRESETS)}")
    recipe = replace(PRESETS[preset], seed=seed)
    for change in changes:
        if change not in CHANGES:
            raise ValueError(f"--arms: {name!r} has the change {change!r}, must be one of {_list(CHANGES)}")
        try:
            recipe = CHANGES[change](recipe)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"--arms: {name!r} is refused: {error}") from None
    model_changes = frozenset(changes) & frozenset(MODEL_CHANGES)
    if "fp8" in model_changes and not recipe.is_plain:
        raise ValueError(f"--arms: {name!r} has fp8 beside {preset!r}, must have it beside {BF16!r}")
    return Arm(name, recipe, model_changes)


def arm_names(text: str) -> list[str]:
    """The arms of a list with commas, in which a name of GROUPS stands for its arms; each arm once."""
    names = [name for part in text.split(",") for name in GROUPS.get(part.strip(), (part.strip(),))]
    for name in names:
        arm(name)
    return list(dict.fromkeys(names))


def _list(names: object) -> str:
    return ", ".join(map(str, names))  # type: ignore[call-overload]
