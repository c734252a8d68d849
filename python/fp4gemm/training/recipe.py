"""Recipe: how the operands of the three products of a layer are quantized, each by a Cast; PRESETS."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from .. import _checks
from ..ops import options as option_checks
from ..ops.quantize import QuantizeCall
from ..recipe import CAST_OPTIONS, Activations, checked_activations
from ..recipe import Recipe as InferenceRecipe
from . import _te

__all__ = ["DEQUANTIZED", "OPERANDS", "PRESETS", "Cast", "Operand", "Recipe", "resolve"]

DEQUANTIZED: Literal["dequantized"] = "dequantized"
_FORMATS = ("nvfp4", "mxfp8")
_SOURCES = ("original", "rowwise")
_SAVED = ("quantized", "original")
OPERANDS = ("x", "w", "dy", "w_t", "dy_t", "x_t")
_PAIRS = (OPERANDS[:2], OPERANDS[2:4], OPERANDS[4:])  # of fprop, dgrad and wgrad
_NUMBERS = ("per_row", "encode", "four_over_six", "e4m3_max", "hadamard")
_CALL = QuantizeCall._fields
_BEFORE = _CALL[_CALL.index("block_rows") + 1 : _CALL.index("hadamard")]
_AFTER = _CALL[_CALL.index("rng_state") + 1 : _CALL.index("offs")]
_FORWARD = {"w_t": "w", "x_t": "x"}  # the forward copy of the same tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """The quantization of one operand: options of :func:`fp4gemm.quantize`, which defines each to the bit.

    Args:
        format: "nvfp4", or "mxfp8": e4m3 values with a power of two for 32 elements
            (:func:`fp4gemm.quantize_mxfp8`), as TransformerEngine's MXFP8BlockScaling. Such a cast has no
            option, so that every other field has its default.
        scaling: "row": an amax for each row of the operand, as TransformerEngine's row-scaled and per-token
            recipes (#2931, #3045). "tensor": one amax, as its NVFP4BlockScaling; of experts one for each.
        block: (1, 16), or (16, 16) for weights: then the copies for fprop and dgrad have the same codes.
        hadamard: None, "bf16" or "fp32": the 16x16 Hadamard transform along the blocks, for both operands of
            dgrad or of wgrad.
        stochastic: codes are rounded stochastically, for gradients; with encode "eden" the block scales are.
        four_over_six: None, "mae" or "mse": each block chooses between two scales.
        four_over_six_error: "exact", or "fast" as NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH of TransformerEngine.
        e4m3_max: None, 448 or 256: the bound of the block scales; None is 256 with four_over_six, else 448.
        encode: "te", or "te_per_token" as TransformerEngine's #3045; or "eden", as the backward pass of
            Quartet II, for both operands of dgrad or of wgrad, with hadamard "fp32" and stochastic.
        source: "original": the tensor itself is cast. "rowwise": the forward copy, dequantized, is cast, so
            that the backward pass sees the numbers of the forward pass; for w_t and x_t alone.

    Raises:
        TypeError, ValueError: naming the field that has another type or value; "fast" without four_over_six;
            an option beside format "mxfp8"; encode "eden" without hadamard "fp32" or stochastic.
        NotImplementedError: naming the field that excludes another: block (16, 16) with scaling "row",
            encode "te_per_token", hadamard or stochastic; four_over_six with encode "te_per_token", hadamard
            or stochastic.
    """

    format: Literal["nvfp4", "mxfp8"] = "nvfp4"
    scaling: Literal["row", "tensor"] = "row"
    block: tuple[int, int] = (1, 16)
    hadamard: Literal["bf16", "fp32"] | None = None
    stochastic: bool = False
    four_over_six: Literal["mae", "mse"] | None = None
    four_over_six_error: Literal["exact", "fast"] = "exact"
    e4m3_max: Literal[448, 256] | None = None
    encode: Literal["te", "te_per_token", "eden"] = "te"
    source: Literal["original", "rowwise"] = "original"
    # No fields, but derived, hence their types in comments.
    numbers = ()  # type: tuple[int, ...]  # the options by their numbers in the operators; without the signs
    bound = 448  # type: int  # e4m3_max, or what None means
    # The quantizers' arguments in their order: per_row, block_rows, those before hadamard, hadamard itself,
    # and those between rng_state and offs.
    arguments = (True, 1, (), 0, ())  # type: tuple[bool, int, tuple[Any, ...], int, tuple[Any, ...]]

    def __post_init__(self) -> None:
        _checks.is_one_of("format", self.format, _FORMATS)
        if self.format != "nvfp4":
            for field in dataclasses.fields(self):
                got = getattr(self, field.name)
                if field.name != "format" and got != field.default:
                    wanted = f"{field.default!r}, the default, with format {self.format!r}"
                    raise ValueError(f"{field.name}: got {got!r}, must be {wanted}")
        defaults = {name: option.default for name, option in option_checks.OPTIONS.items()}
        own = {name: getattr(self, name) for name in defaults if hasattr(self, name)}
        made = option_checks.operator_arguments(defaults | own)
        _checks.is_one_of("source", self.source, _SOURCES)
        object.__setattr__(self, "numbers", tuple(int(made[name]) for name in _NUMBERS))
        object.__setattr__(self, "bound", made["e4m3_max"])
        before, after = (tuple(made[name] for name in names) for names in (_BEFORE, _AFTER))
        arguments = (made["per_row"], made["block_rows"], before, made["hadamard"], after)
        object.__setattr__(self, "arguments", arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle or a copy; that of an older version may have headroom and lack derived values."""
        if state.get("headroom", 1.0) != 1.0:
            got = state["headroom"]
            raise ValueError(f"headroom: got {got} in a pickled Cast, must be 1.0; the option was removed")
        removed = ("headroom", "has_headroom")
        self.__dict__.update({name: value for name, value in state.items() if name not in removed})
        self.__post_init__()

    def __hash__(self) -> int:
        return hash(self.numbers)  # equal casts have equal numbers; each call of a layer looks casts up

    def is_one_pass_with(self, other: Cast) -> bool:
        """Whether fp4gemm.quantize_both makes this copy and the other, which alone may be rotated."""
        same = all(getattr(self, name) == getattr(other, name) for name in _OF_ONE_PASS)
        return same and self.format == "nvfp4" and self.hadamard is None


# The fields that two casts of one pass have in common: all but hadamard.
_OF_ONE_PASS = tuple(each.name for each in dataclasses.fields(Cast) if each.name != "hadamard")
Operand = Cast | Literal["dequantized"] | None
Casts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The casts of the six operands of a linear layer's training step; frozen and hashable.

    ====== =========== =========================== =====================
    field  product     operand                     quantized along
    ====== =========== =========================== =====================
    x      fprop       x (m, k)                    k
    w      fprop       W (n, k)                    k
    dy     dgrad       dy (m, n)                   n
    w_t    dgrad       W.T (k, n)                  n
    dy_t   wgrad       dy.T (n, m)                 m
    x_t    wgrad       x.T (k, m)                  m
    ====== =========== =========================== =====================

    y = fprop(x, w), dx = dgrad(dy, w_t) and dW = wgrad(dy_t, x_t), of :mod:`fp4gemm.training`. A product
    whose two operands are None is torch's, of tensors that were not quantized. ``x=None`` beside a cast of w
    is W4A16. ``w_t`` or ``x_t`` may be "dequantized" beside None: torch's product of the values of the
    forward copy, as TransformerEngine's row-scaled recipe has it for reinforcement learning (#3206).

    Args:
        x, w, dy, w_t, dy_t, x_t: a :class:`Cast`, or None for an operand that is not quantized; w_t and x_t
            also "dequantized".
        hadamard_signs: of both operands of wgrad: bit r set negates element r of 16. Omitted where they are
            not rotated.
        seed: mixed into the random numbers of stochastic rounding. They are drawn from torch's default
            generator of the device, as those of dropout are; see :mod:`fp4gemm.training._copies`. A run may
            give it to each of its recipes, also to one that draws no random numbers.
        save_input: what a layer saves of x for wgrad: "quantized", the copy for wgrad, 0.5625 bytes an
            element, or "original", x itself, which suits an x that something else saves anyway.
        balance_tokens: whether wgrad multiplies balanced tokens: before dy_t and x_t are cast, the row of dy
            of each token is multiplied by c = 2 ** round(log2(max |x| / max |dy|) / 2) of its two rows, and
            the row of x by 1 / c. dW is the same sum, and a token with a large x and a small dy no longer
            takes precision from the tokens in its blocks. y and dx do not change. x.T is then cast in the
            backward pass: from x (save_input "original"), or, if x_t has source "rowwise", from the copy for
            fprop, which is saved in place of that for wgrad. :mod:`fp4gemm.training._balance` defines c for
            rows of zeros and infinities.
        cache_weight: whether a layer keeps the copies of its weight from one call to the next while the
            weight is unchanged. A recipe whose w_t has encode "eden" keeps none: each call draws signs.
        batch_invariant: whether the kernel of fprop is selected without regard to the number of tokens, as
            by :func:`fp4gemm.mm`, so that the bits of y for a token do not depend on the other tokens. dx and
            dW, which nothing but training computes, do not have it.

    Raises:
        TypeError, ValueError: naming the field that has another type or value; one operand of a product is
            None beside a cast (other than x), hadamard or encode "eden" in one operand of a product alone,
            hadamard in x or w,
            blocks of (16, 16) in an operand other than w and w_t, source "rowwise" or "dequantized" without
            a forward copy that is quantized, hadamard_signs without hadamard, batch_invariant where w is
            None, balance_tokens where dy_t is None, where x_t is cast in the forward pass, or where x_t has
            source "rowwise" and x has scaling "tensor".
    """

    x: Cast | None = None
    w: Cast | None = None
    dy: Cast | None = None
    w_t: Operand = None
    dy_t: Cast | None = None
    x_t: Operand = None
    hadamard_signs: int = option_checks.SIGNS
    seed: int = 0
    save_input: Literal["quantized", "original"] = "quantized"
    cache_weight: bool = True
    batch_invariant: bool = False
    balance_tokens: bool = False
    # No fields, but derived, since each call of a layer reads them.
    is_plain = False  # whether no operand is quantized, so that a layer is torch's
    draws = False  # whether any cast is stochastic
    forward_casts = None  # type: Casts | None  # of x and x_t, where train_forward makes both
    backward_casts = None  # type: Casts | None  # of dy and dy_t, where train_backward does
    # What a layer saves of x for wgrad: the copy for fprop, the copy for wgrad, or x itself.
    saved_input = "x_t"  # type: Literal["x", "x_t", "original"]

    def __post_init__(self) -> None:
        for pair in _PAIRS:
            for name in pair:
                _check_operand(self, name)
            _check_pair(self, *pair)
        option_checks.check_signs(self.hadamard_signs)
        casts = [getattr(self, name) for pair in _PAIRS for name in pair]
        is_rotated = any(isinstance(cast, Cast) and cast.hadamard is not None for cast in casts)
        if self.hadamard_signs != option_checks.SIGNS and not is_rotated:
            raise ValueError(
                f"hadamard_signs: got {self.hadamard_signs:#x}, must be omitted without a Cast with hadamard"
            )
        _checks.is_int("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed: got {self.seed}, must be below 2**63")
        _checks.is_one_of("save_input", self.save_input, _SAVED)
        _checks.is_bool("cache_weight", self.cache_weight)
        _checks.is_bool("batch_invariant", self.batch_invariant)
        if self.batch_invariant and self.w is None:
            raise ValueError(
                "batch_invariant: got True, must be False where w is None: the product is torch's then"
            )
        if self.save_input == "original" and (self.x_t == DEQUANTIZED or _source(self.x_t) == "rowwise"):
            raise ValueError(
                f"save_input: got 'original', must be 'quantized' with x_t {_shown(self.x_t)}, which needs "
                "the forward copy alone"
            )
        _checks.is_bool("balance_tokens", self.balance_tokens)
        saved = "x_t" if isinstance(self.x_t, Cast) and self.save_input == "quantized" else "original"
        if self.x_t == DEQUANTIZED or (self.balance_tokens and _source(self.x_t) == "rowwise"):
            saved = "x"
        object.__setattr__(self, "saved_input", saved)
        if self.balance_tokens and self.dy_t is None:
            raise ValueError(
                "balance_tokens: got True, must be False where dy_t is None: the product is torch's then"
            )
        if self.balance_tokens and self.saved_input == "x_t":
            raise ValueError(
                "balance_tokens: got True, needs save_input 'original' or source 'rowwise' of x_t, since x.T "
                "is cast in the backward pass, where dy is known"
            )
        if self.balance_tokens and self.saved_input == "x" and self.x is not None and self.x.scaling != "row":
            raise ValueError(
                f"balance_tokens: got True, needs scaling 'row' of x, got {self.x.scaling!r}, where x_t has "
                "source 'rowwise': the copy that is saved must have the amax of each token"
            )
        object.__setattr__(self, "is_plain", all(cast is None for cast in casts))
        object.__setattr__(self, "draws", any(isinstance(cast, Cast) and cast.stochastic for cast in casts))
        object.__setattr__(self, "forward_casts", _pair(self.x, self.x_t, self.hadamard_signs))
        if not self.balance_tokens:
            object.__setattr__(self, "backward_casts", _pair(self.dy, self.dy_t, self.hadamard_signs))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle or a copy; that of an older version may lack fields and derived values."""
        self.__dict__.update(state)
        self.__post_init__()

    def for_inference(self) -> InferenceRecipe:
        """The recipe by which a layer for inference computes the bits of the forward pass of this one::

            recipe = fp4gemm.training.PRESETS["row_scaled"]
            layer = fp4gemm.training.Linear(256, 128, recipe=recipe, dtype=torch.bfloat16)
            served = fp4gemm.nn.Linear.from_float(layer, recipe=recipe.for_inference())
            x = torch.randn(8, 256, dtype=torch.bfloat16)
            assert torch.equal(served(x), layer(x))

        :func:`fp4gemm.models.quantize_model` takes it for a whole model. It has the cast of x as
        ``activations``, and that of w as weight_scaling, method and the options of the cast. x=None becomes
        "a16". With an amax of the whole x, the bits of a token depend on the batch, as in training. MXFP8 of
        both x and w is "mxfp8".

        Raises:
            ValueError: w is None, so that the forward pass multiplies weights that are not quantized; or x or
                w is rounded stochastically, which has no bits to repeat.
        """
        x, w = self.x, self.w
        if w is None:
            raise ValueError("w: is None, must be a Cast: layers for inference have quantized weights")
        if w.format == "mxfp8":  # and so has x, whose product with w has one format
            return InferenceRecipe(activations="mxfp8")
        for name, cast in (("x", x), ("w", w)):
            if cast is not None and cast.stochastic:
                raise ValueError(f"{name}: stochastic is True, must be False for inference")
        if w.encode == "eden":
            raise ValueError("w: encode is 'eden', must be 'te' or 'te_per_token' for inference")
        activations: Activations = "a16"
        if x is not None:
            kind = "per-token" if x.scaling == "row" else "per-tensor"
            given = {name: getattr(x, name) for name in CAST_OPTIONS}
            options = [f"{name}={value}" for name, value in given.items() if value is not None]
            activations = checked_activations(",".join((kind, *options)))
        return InferenceRecipe(
            activations=activations,
            weight_scaling=w.scaling,
            method="round" if w.four_over_six is None else "four-over-six",
            four_over_six=w.four_over_six,
            block=w.block,
            encode=w.encode,
            four_over_six_error=w.four_over_six_error,
            e4m3_max=w.e4m3_max,
        )

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with other fields, checked again; as dataclasses.replace."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_te(cls, recipe: object, *, four_over_six_error: Literal["exact", "fast"] = "exact") -> Recipe:
        """The recipe of an NVFP4BlockScaling or an MXFP8BlockScaling of TransformerEngine, by its attributes.

        The casts have the bits of its quantizers (docs/interop.md, which also has the table of its variables
        and says what has no counterpart). TransformerEngine itself is not imported.

        Args:
            recipe: an NVFP4BlockScaling of release 2.20.2 or older, or the NVFP4PerTokenBlockScaling of its
                pull request 3045; or an MXFP8BlockScaling with e4m3 in both directions.
            four_over_six_error: "fast" where NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1 is set beside the recipe,
                which has no attribute for it. Without four over six it has no effect.

        Raises:
            TypeError: recipe is neither of them, or an attribute has another type.
            ValueError: naming the attribute: it is not known, it has another value, it contradicts another
                one, or TransformerEngine does not combine the two.
            NotImplementedError: naming the attribute: FP8 attention, or another format.
        """
        _checks.is_one_of("four_over_six_error", four_over_six_error, ("exact", "fast"))
        if _te.is_mxfp8(recipe):
            return _mxfp8(_te.of_mxfp8(recipe))
        settings = _te.of_recipe(recipe)
        is_fast = four_over_six_error == "fast"
        return _of_te(dataclasses.replace(settings, four_over_six_error_is_fast=is_fast))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Recipe:
        """The recipe that the environment variables of TransformerEngine make of an NVFP4BlockScaling().

        docs/interop.md has the table of these variables. Those that are not set have TransformerEngine's
        defaults, so that an environment without any gives ``PRESETS["nvidia"]``.

        Args:
            environ: the variables; None: os.environ.

        Raises:
            ValueError: naming the variable: it begins with NVTE_NVFP4 and is not known, it has another value,
                or TransformerEngine does not combine it with another one.
            NotImplementedError: NVTE_USE_FAST_MATH=1.
        """
        return _of_te(_te.of_environment(os.environ if environ is None else environ))


def _pair(rows: Operand, columns: Operand, signs: int) -> Casts | None:
    """The casts of a tensor in both directions as the operators of a step have them, or None."""
    if not isinstance(rows, Cast) or not isinstance(columns, Cast) or columns.source != "original":
        return None
    if rows.hadamard is not None or "eden" in (rows.encode, columns.encode):
        return None  # the operators of a step rotate columns alone, and have no such encode
    if "fast" in (rows.four_over_six_error, columns.four_over_six_error):
        return None  # the operators of a step have no such number
    if rows.format != "nvfp4" or columns.format != "nvfp4":
        return None  # nor another format
    of_columns = (*columns.numbers, 0 if columns.hadamard is None else signs, int(columns.stochastic))
    return (*rows.numbers, 0, int(rows.stochastic)), of_columns


def _source(cast: Operand) -> str:
    return cast.source if isinstance(cast, Cast) else ""


def _shown(cast: Operand) -> str:
    return "a Cast" if isinstance(cast, Cast) else repr(cast)


def _check_operand(recipe: Recipe, name: str) -> None:
    """Check one field by itself and beside the forward copy of its tensor."""
    cast = getattr(recipe, name)
    forward = _FORWARD.get(name)
    or_dequantized = f", {DEQUANTIZED!r}" if forward else ""
    if isinstance(cast, str):
        if not forward or cast != DEQUANTIZED:
            raise ValueError(f"{name}: got {cast!r}, must be a Cast{or_dequantized} or None")
    elif cast is not None and not isinstance(cast, Cast):
        raise TypeError(f"{name}: got {_checks.describe(cast)}, must be a Cast{or_dequantized} or None")
    if _source(cast) == "rowwise" and not forward:
        raise ValueError(f"{name}: source is 'rowwise', must be 'original', since {name} has no forward copy")
    if forward and (cast == DEQUANTIZED or _source(cast) == "rowwise"):
        got = repr(cast) if cast == DEQUANTIZED else "source is 'rowwise'"
        if getattr(recipe, forward) is None:
            raise ValueError(f"{name}: got {got}, needs a Cast as {forward}, the forward copy; it is None")
    if not isinstance(cast, Cast):
        return
    if cast.block == (16, 16) and name not in ("w", "w_t"):
        raise ValueError(f"{name}: block is (16, 16), must be (1, 16); it is for w and w_t")
    if cast.hadamard is not None and name in _PAIRS[0]:
        wanted = "must be None; it is for dy, w_t, dy_t and x_t"
        raise ValueError(f"{name}: hadamard is {cast.hadamard!r}, {wanted}")


def _check_pair(recipe: Recipe, left: str, right: str) -> None:
    """Check that a product has both of its operands quantized, or neither, and both rotated, or neither."""
    a, b = getattr(recipe, left), getattr(recipe, right)
    if isinstance(a, Cast) and not isinstance(b, Cast):
        raise ValueError(f"{right}: got {_shown(b)}, must be a Cast, as {left} is")
    if isinstance(a, Cast) and isinstance(b, Cast) and a.format != b.format:
        raise ValueError(
            f"{right}: format is {b.format!r}, must be {a.format!r}, that of {left}, its other operand"
        )
    if a is None and isinstance(b, Cast) and left == "x" and b.format != "nvfp4":
        raise ValueError(f"x: got None, must be a Cast with format {b.format!r}, as w is")
    if a is None and isinstance(b, Cast) and left != "x":
        wanted = f"None or {DEQUANTIZED!r}, since {left} is None" if right in _FORWARD else "None"
        raise ValueError(f"{right}: got a Cast, must be {wanted}")
    if isinstance(a, Cast) and isinstance(b, Cast) and (a.hadamard is None) != (b.hadamard is None):
        raise ValueError(
            f"{right}: hadamard is {b.hadamard!r}, must {'not ' if a.hadamard else ''}be None, since that of "
            f"{left} is {a.hadamard!r} (both operands of a product are rotated, or neither)"
        )
    if isinstance(a, Cast) and isinstance(b, Cast) and (a.encode == "eden") != (b.encode == "eden"):
        wanted = "must be 'eden'" if a.encode == "eden" else "must not be 'eden'"
        raise ValueError(
            f"{right}: encode is {b.encode!r}, {wanted}, since that of {left} is {a.encode!r} (the signs of "
            "the rotation of both are drawn, or of neither)"
        )


def _of_te(te: _te.Settings) -> Recipe:
    """The recipe of the settings of TransformerEngine, which were checked."""

    def six(role: str) -> dict[str, Any]:
        if not te.has_four_over_six(role):
            return {}
        bound = {} if te.has_256(role) else {"e4m3_max": 448}
        error = {"four_over_six_error": "fast"} if te.four_over_six_error_is_fast else {}
        return {"four_over_six": te.nvfp4_4over6_err_mode.lower(), **bound, **error}

    plain: dict[str, Any] = {"encode": "te_per_token"} if te.per_token else {"scaling": "tensor"}
    x = Cast(**(plain if te.per_token or not te.row_scaled_activation else {}), **six("activations"))
    w = Cast(**({"scaling": "tensor", "block": (16, 16)} if te.is_2d else plain), **six("weights"))
    if te.backward_override is not None:
        backward: Operand = DEQUANTIZED if te.backward_override == "dequantized" else None
        return Recipe(x=x, w=w, w_t=backward, x_t=backward)
    dy = Cast(**plain, stochastic=te.is_stochastic)
    of_wgrad: dict[str, Any] = {}
    if te.rotates:
        of_wgrad["hadamard"] = "fp32" if te.per_token else "bf16"
    return Recipe(
        x=x,
        w=w,
        dy=dy,
        w_t=w,
        dy_t=dataclasses.replace(dy, **of_wgrad),
        x_t=dataclasses.replace(x, **of_wgrad),
    )


def _mxfp8(backward_override: str | None = None) -> Recipe:
    """MXFP8 in every product, or in fprop alone beside a backward pass in the dtype of x."""
    cast = Cast(format="mxfp8")
    if backward_override is not None:
        backward: Operand = DEQUANTIZED if backward_override == "dequantized" else None
        return Recipe(x=cast, w=cast, w_t=backward, x_t=backward)
    return Recipe(x=cast, w=cast, dy=cast, w_t=cast, dy_t=cast, x_t=cast)


def _te_preset(**settings: Any) -> Recipe:
    return _of_te(_te.Settings(**settings))


_ROWS_DEQUANTIZED: dict[str, Any] = {
    "disable_rht": True,
    "disable_2d_quantization": True,
    "row_scaled_activation": True,
    "backward_override": "dequantized",
}
_NVIDIA = _te_preset()
_SIX = _te_preset(disable_rht=True, nvfp4_4over6="all")
_ROW = Cast()
_PER_TOKEN = Recipe(
    x=_ROW,
    w=_ROW,
    dy=Cast(stochastic=True),
    w_t=Cast(source="rowwise"),
    dy_t=Cast(hadamard="fp32", stochastic=True),
    x_t=Cast(hadamard="fp32"),
)

_EDEN = Cast(scaling="tensor", encode="eden", hadamard="fp32", stochastic=True)
_SIX_MSE = Cast(scaling="tensor", four_over_six="mse")

PRESETS: dict[str, Recipe] = {
    "bf16": Recipe(),
    "nvidia": _NVIDIA,
    "nvidia_no_rht": _te_preset(disable_rht=True),
    "nvidia_no_sr": _te_preset(disable_stochastic_rounding=True),
    "nvidia_1d": _te_preset(disable_2d_quantization=True),
    "te_per_token": _te_preset(per_token=True),
    "te_per_token_rht": _te_preset(per_token=True, per_token_rht=True),
    "te_per_token_sr": _te_preset(per_token=True, per_token_sr=True),
    "te_per_token_rht_sr": _te_preset(per_token=True, per_token_rht=True, per_token_sr=True),
    "te_per_token_2d": _te_preset(per_token=True, per_token_weight_2d=True),
    "row_scaled": _te_preset(disable_rht=True, row_scaled_activation=True),
    "row_scaled_dequantized": _te_preset(**_ROWS_DEQUANTIZED),
    "row_scaled_four_over_six": _te_preset(**_ROWS_DEQUANTIZED, nvfp4_4over6="all"),
    "four_over_six": _NVIDIA.replace(x=_SIX.x, w=_SIX.w, w_t=_SIX.w_t),
    "four_over_six_weights": _te_preset(nvfp4_4over6="weights"),
    "four_over_six_activations": _te_preset(disable_rht=True, nvfp4_4over6="activations"),
    "four_over_six_all": _SIX,
    "bf16_backward": _te_preset(backward_override="high_precision"),
    "bf16_forward": _NVIDIA.replace(x=None, w=None),
    "mxfp8": _mxfp8(),
    "per_token": _PER_TOKEN,
    "per_token_wgrad_bf16": _PER_TOKEN.replace(dy_t=None, x_t=None),
    "quartet2": Recipe(
        x=_SIX_MSE,
        w=_SIX_MSE,
        dy=_EDEN,
        w_t=dataclasses.replace(_EDEN, source="rowwise"),
        dy_t=_EDEN,
        x_t=dataclasses.replace(_EDEN, source="rowwise"),
    ),
}
"""The recipes by name.

* "nvidia": TransformerEngine's NVFP4BlockScaling. Each tensor has one amax, weights have blocks of 16x16,
  gradients are rounded stochastically, and the operands of wgrad are rotated. "nvidia_no_rht",
  "nvidia_no_sr" and "nvidia_1d" are the same without rotation, without stochastic rounding, and with blocks
  of 1x16.
* "te_per_token": TransformerEngine's per-token recipe (#3045): an amax for each row of every operand. With
  "_rht", "_sr" or "_rht_sr" the operands of wgrad are rotated and gradients are rounded stochastically; with
  "_2d" weights have one amax and blocks of 16x16.
* "row_scaled": TransformerEngine's row-scaled activations (#2931, #3206): each token of x has an amax, along
  either direction; no rotation.
* "row_scaled_dequantized": that forward pass (with 1x16 blocks of W), and a backward pass in bf16 of the
  dequantized x and W, for reinforcement learning. "row_scaled_four_over_six": the same with four over six.
* "four_over_six_weights", "four_over_six_activations", "four_over_six_all": "nvidia" with TransformerEngine's
  4over6 (#2972) in both copies of W, of x, or of both. The last two rotate nothing, since one cast is not
  rotated and chosen between two scales. "four_over_six": "nvidia" with 4over6 in the forward pass, whose
  wgrad has rotated copies without it, which TransformerEngine does not combine.
* "bf16_backward", "bf16_forward": "nvidia" in one of the passes.
* "mxfp8": TransformerEngine's MXFP8BlockScaling, e4m3 in both directions.
* "per_token": ours. Each row of every operand has an amax, dgrad multiplies the numbers of the forward
  weight, gradients are rounded stochastically, and the operands of wgrad are rotated.
  "per_token_wgrad_bf16" computes dW in bf16, for models with tokens whose x is tens of times as large as that
  of others.
* "quartet2": the scheme of Quartet II (arXiv 2601.22813). The forward pass has one amax for each tensor and
  four over six by squared errors. In the backward pass all four operands are rotated with random signs, and
  their codes are rounded to nearest and their corrected block scales stochastically (encode "eden"); W and x
  are cast from the dequantized forward copies. Quartet II rotates groups of 128, and this preset blocks of 16
  (docs/quantization.md).
* "bf16": nothing is quantized.
"""


def resolve(recipe: Recipe | str) -> Recipe:
    """The recipe itself, or the one of PRESETS with this name.

    Raises:
        TypeError: it is neither. ValueError: PRESETS has no such name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe: got {_checks.describe(recipe)}, must be an fp4gemm.training.Recipe or a name of PRESETS"
        )
    if recipe not in PRESETS:
        raise ValueError(f"recipe: got {recipe!r}, must be {_checks.listing(list(PRESETS))}")
    return PRESETS[recipe]
