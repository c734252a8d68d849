"""How weights and activations are quantized: the options, their values and defaults, and the quantizer.

Layers (:mod:`fp4gemm.nn`), models (:func:`fp4gemm.models.quantize_model`), transformers (``Fp4GemmConfig``),
checkpoints (:class:`fp4gemm.checkpoint.Options`) and engines (the plug-ins of vLLM and SGLang) take these
options under these names. Each of them checks its values by a :class:`Recipe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from . import _checks
from .calibration.gptq import DAMPING, Factorization, rounded
from .calibration.residual import check_count
from .calibration.statistics import InputStatistics, Statistics, StatisticsFile
from .containers.mxfp4 import MXFP4Tensor, quantize_mxfp4
from .containers.mxfp8 import MXFP8Tensor, quantize_mxfp8
from .containers.nvfp4 import NVFP4Tensor
from .ops import options as option_checks
from .ops.inputs import FP8_ROW, MXFP8, NOT_QUANTIZED, ROW, TENSOR, InputCast
from .quantize import quantize
from .support import TokenForm

__all__ = [
    "Activations",
    "Data",
    "DataFree",
    "FourOverSix",
    "LayerActivations",
    "Method",
    "Numerics",
    "Quantizer",
    "Recipe",
    "StoredActivations",
    "WeightFormatName",
    "WeightScaling",
    "automatic",
]

ActivationKind = Literal["per-token", "per-tensor", "static", "fp8", "a16", "mxfp8", "mxfp8-mxfp4"]
LayerKind = Literal["per-token", "per-tensor", "fp8", "a16", "mxfp8", "mxfp8-mxfp4"]
WeightFormatName = Literal["nvfp4", "mxfp8", "mxfp4"]
StoredKind = Literal["a16", "per-token", "per-tensor", "static", "fp8"]
# "per-token" and "per-tensor" with each set of options of the cast: see Recipe. A test compares with INPUTS.
TokenCast = Literal[
    "per-token,encode=te_per_token",
    "per-token,four_over_six=mae",
    "per-token,four_over_six=mae,e4m3_max=448",
    "per-token,four_over_six=mae,four_over_six_error=fast",
    "per-token,four_over_six=mae,four_over_six_error=fast,e4m3_max=448",
    "per-token,four_over_six=mse",
    "per-token,four_over_six=mse,e4m3_max=448",
    "per-token,four_over_six=mse,four_over_six_error=fast",
    "per-token,four_over_six=mse,four_over_six_error=fast,e4m3_max=448",
]
TensorCast = Literal[
    "per-tensor,encode=te_per_token",
    "per-tensor,four_over_six=mae",
    "per-tensor,four_over_six=mae,e4m3_max=448",
    "per-tensor,four_over_six=mae,four_over_six_error=fast",
    "per-tensor,four_over_six=mae,four_over_six_error=fast,e4m3_max=448",
    "per-tensor,four_over_six=mse",
    "per-tensor,four_over_six=mse,e4m3_max=448",
    "per-tensor,four_over_six=mse,four_over_six_error=fast",
    "per-tensor,four_over_six=mse,four_over_six_error=fast,e4m3_max=448",
]
Activations = ActivationKind | TokenCast | TensorCast
LayerActivations = LayerKind | TokenCast | TensorCast  # those that a linear layer and experts can have
StoredActivations = StoredKind | TokenCast | TensorCast  # those that a checkpoint can say
WeightScaling = Literal["row", "tensor"]
DataFree = Literal["round", "four-over-six", "search"]
Method = Literal["round", "four-over-six", "search", "gptq"]
FourOverSix = Literal["none", "mae", "mse"]
Numerics = Literal["te", "modelopt", "llmcompressor"]
Data = Literal["none", "mean square", "second moment"]
DATA_FREE, METHODS = get_args(DataFree), get_args(Method)
ACTIVATION_KINDS, LAYER_ACTIVATIONS = get_args(ActivationKind), get_args(LayerKind)
STORED_ACTIVATIONS, WEIGHT_SCALINGS = get_args(StoredKind), get_args(WeightScaling)


class InputKind(NamedTuple):
    """What the input of a product becomes under a value of ``activations``.

    Attributes:
        tokens: whether it becomes "nvfp4", "fp8" or "mxfp8", or stays in "16-bit" numbers.
        scaling: the argument ``scaling`` of the operators ``linear`` and ``experts``, which quantize their
            input; None: it is quantized ahead of them, with an amax that is known.
        kind: the value of ``activations`` without options of the cast.
        options: these options, keywords of :func:`fp4gemm.quantize` and their values.
    """

    tokens: TokenForm
    scaling: int | None
    kind: ActivationKind
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_nvfp4(self) -> bool:
        """Whether it becomes NVFP4."""
        return self.tokens == "nvfp4"

    @property
    def weights(self) -> WeightFormatName:
        """The format of the weight that it is multiplied by."""
        return _MX_WEIGHTS.get(self.kind, "nvfp4")


_KINDS: Mapping[ActivationKind, tuple[TokenForm, int | None]] = {
    "a16": ("16-bit", NOT_QUANTIZED),
    "per-token": ("nvfp4", ROW),
    "per-tensor": ("nvfp4", TENSOR),
    "static": ("nvfp4", None),
    "fp8": ("fp8", FP8_ROW),
    "mxfp8": ("mxfp8", MXFP8),
    "mxfp8-mxfp4": ("mxfp8", MXFP8),
}
# The formats of weights by kind of activations; those of the other kinds are NVFP4.
_MX_WEIGHTS: Mapping[ActivationKind, WeightFormatName] = {"mxfp8": "mxfp8", "mxfp8-mxfp4": "mxfp4"}
_MX_CASTS: Mapping[WeightFormatName, Callable[[Tensor], MXFP8Tensor | MXFP4Tensor]] = {
    "mxfp8": quantize_mxfp8,
    "mxfp4": quantize_mxfp4,
}
# The options of fp4gemm.quantize that "per-token" and "per-tensor" may have.
CAST_OPTIONS = ("encode", "four_over_six", "four_over_six_error", "e4m3_max")
_DEFAULTS = {name: option.default for name, option in option_checks.OPTIONS.items()}


def _name_of(kind: ActivationKind, options: Mapping[str, Any]) -> str:
    """The name of activations: the kind, and the options that differ from their defaults, in their order."""
    return ",".join((kind, *(f"{name}={options[name]}" for name in CAST_OPTIONS if name in options)))


def _given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that differ from their defaults.

    Raises:
        TypeError, ValueError, NotImplementedError: a value is none of its option, or excludes another one.
    """
    values = _DEFAULTS | options
    option_checks.check(values)
    defaults = _DEFAULTS | {"e4m3_max": option_checks.default_bound(values)}
    return {name: values[name] for name in CAST_OPTIONS if values[name] not in (None, defaults[name])}


def _inputs() -> dict[str, InputKind]:
    """What the input becomes under each kind, and under each kind with each set of options."""
    found = {}
    for kind, (tokens, scaling) in _KINDS.items():
        found[str(kind)] = InputKind(tokens, scaling, kind)
        if scaling not in (ROW, TENSOR):
            continue
        sets: list[dict[str, Any]] = [{"encode": "te_per_token"}]
        for error in get_args(Literal["mae", "mse"]):
            for how in ("exact", "fast"):
                for bound in _checks.E4M3_BOUNDS:
                    sets.append({"four_over_six": error, "four_over_six_error": how, "e4m3_max": bound})
        for options in sets:
            given = _given_options(options)
            cast_of = InputCast.of_options(scaling, option_checks.operator_arguments(_DEFAULTS | options))
            name = _name_of(kind, given)
            found[name] = InputKind(tokens, cast_of.number, kind, tuple(given.items()))
    return found


# Nothing compares with the names of activations to tell what an input becomes, so that a value which lacks
# here is a KeyError rather than one of the others. It is a plain dict, which torch.compile reads.
INPUTS: Mapping[str, InputKind] = _inputs()


def checked_activations(
    value: object, kinds: Iterable[str] = ACTIVATION_KINDS, name: str = "activations"
) -> Any:
    """The name by which INPUTS has the activations, with their options in the order of CAST_OPTIONS.

    Args:
        value: a kind, or "per-token" or "per-tensor" with options, ``"per-token,four_over_six=mae"``.
        kinds: those that are allowed. name: that of the argument, for messages.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    kinds = tuple(kinds)
    if not isinstance(value, str) or "," not in value:
        _checks.is_one_of(name, value, kinds)
        return value
    kind, *texts = (text.strip() for text in value.split(","))
    if kind not in kinds or kind not in INPUTS:
        raise ValueError(f"{name}: got {value!r}, must begin with {_checks.listing(kinds)}")
    if INPUTS[kind].scaling not in (ROW, TENSOR):
        able = [each for each in kinds if each in _KINDS and INPUTS[each].scaling in (ROW, TENSOR)]
        raise ValueError(
            f"{name}: got {value!r}, must be {kind!r}; only {_checks.listing(able)} has options of the cast"
        )
    options: dict[str, Any] = {}
    for text in texts:
        option, _, given = text.partition("=")
        if option not in CAST_OPTIONS or not given:
            wanted = _checks.listing([f"{each}=VALUE" for each in CAST_OPTIONS])
            raise ValueError(f"{name}: got {value!r}, {text!r} of it must be {wanted}")
        if option in options:
            raise ValueError(f"{name}: got {value!r}, must have {option} once")
        options[option] = int(given) if option == "e4m3_max" and given.isdecimal() else given
    try:
        return _name_of(INPUTS[kind].kind, _given_options(options))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{name}: got {value!r}: {error}") from None


def activations_with(activations: str, kind: ActivationKind) -> Any:
    """The same options of the cast beside another kind, "per-token" or "per-tensor"."""
    return _name_of(kind, dict(INPUTS[activations].options))


RESIDUAL_KINDS = ("per-token", "per-tensor")  # the activations beside which layers have residual channels
AUTO = "auto"  # the value of entry points for which :func:`automatic` chooses one of the others
USES_DATA = ("search", "gptq")  # the methods that read statistics


def automatic(multiplies_fp8: bool, *k: int) -> Literal["per-token", "fp8", "a16"]:
    """What ``activations="auto"`` of an entry point becomes for a layer.

    * On compute capability 9.0 "fp8": its tensor cores multiply FP8 and not FP4, and e4m3 rounds tokens less
      than NVFP4 does.
    * There, with a k that is no multiple of 64, which FP8 tokens must have, "a16": W4A4 is computed in fp16
      on 9.0, so that NVFP4 tokens would cost accuracy and gain nothing from the tensor cores.
    * On all other devices "per-token": on those that multiply FP4, such as 10.0 and 12.0, for their speed,
      and on the CPU, as the default.

    Entry points keep "per-token" (engines: "checkpoint") as their default: another one would change the bits
    of every user on compute capability 9.0. What was chosen is in the report of the model, or in the log of
    the engine.

    ``quantize_model`` and ``Fp4GemmConfig`` make the weights as for "per-token", whatever is chosen: without
    ``fp8_operand`` of :func:`fp4gemm.quantize`, which "search" and "gptq" have with "fp8" alone. Engines make
    the weights of a 16-bit checkpoint for the activations that were chosen.

    Args:
        multiplies_fp8: whether the layer is on a CUDA device with kernels for FP8 tokens.
        k: of each weight of the layer.
    """
    if not multiplies_fp8:
        return "per-token"
    return "a16" if any(size % _checks.FP8_STEP for size in k) else "fp8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options by which weights become NVFP4, and activations NVFP4 or FP8; or both an MX format.

    Attributes:
        activations: how the input of a product is quantized when the model runs. "per-token": each row has
            an amax of its own. "per-tensor": all rows share one, which is measured in every call. "static":
            all rows share one, which the checkpoint holds. "fp8": the input becomes e4m3, with one scale for
            each row (W4A8; :func:`fp4gemm.quantize_fp8`); the methods "search" and "gptq" then take into
            account that products round the values of weights to e4m3 (``fp8_operand`` of
            :func:`fp4gemm.quantize`).
            "a16": the input stays in bfloat16 or float16.
            "mxfp8": the input and the weight become MXFP8 (:func:`fp4gemm.quantize_mxfp8`), which has no
            other option: the method is "round", and weight_scaling stays "row" without a meaning.
            "mxfp8-mxfp4": the input becomes MXFP8, and the weight MXFP4 (:func:`fp4gemm.quantize_mxfp4` with
            its scale "floor"), or it is in MXFP4 already and keeps its codes; as "mxfp8" otherwise.
            "per-token" and "per-tensor" may be followed by options of :func:`fp4gemm.quantize`, which defines
            each to the bit: "per-token,four_over_six=mae", "per-tensor,encode=te_per_token". They are
            ``encode``, ``four_over_six``, ``four_over_six_error`` and ``e4m3_max``; those that are omitted
            have their defaults.
        weight_scaling: "row": one amax for each output channel. "tensor": one for the weight, or for the
            weights that an engine joins; the formats of ModelOpt and compressed-tensors hold no other. None
            becomes "row", or "tensor" with the numerics of others.
        method: how weights are rounded. "round": the standard block scales, as ``quantize(w)``.
            "four-over-six": of two scales of a block the one with the smaller error. "search": of thirteen
            scales the one with the smallest squared error, weighted by the mean square of each input channel
            where that is known. "gptq": :func:`fp4gemm.calibration.gptq`, which needs second moments. None
            becomes "gptq" with second moments, "search" with mean squares, and "four-over-six" without data;
            with the numerics of others it becomes "round".
        four_over_six: "mse" or "mae", the error by which "four-over-six" chooses (:func:`fp4gemm.quantize`);
            "none" with the other methods. None becomes "mse" with "four-over-six".
        block: (1, 16), or (16, 16) with weight_scaling "tensor". This option, encode, four_over_six_error and
            e4m3_max are those of :func:`fp4gemm.quantize` for weights, with the methods "round" and
            "four-over-six".
        encode: "te", or "te_per_token" with the method "round".
        four_over_six_error: "exact", or "fast" with "four-over-six".
        e4m3_max: the bound of the block scales of weights, 448 or 256. None becomes 448 with the method
            "round" and 256 with the others; "four-over-six" may have 448 too.
        numerics: whose roundings: "te" (TransformerEngine, the bits of :func:`fp4gemm.quantize`), "modelopt"
            or "llmcompressor" (:mod:`fp4gemm.checkpoint.numerics`).
        data: what is known of the inputs: "none", their "mean square" or also their "second moment".

    Raises:
        TypeError, ValueError: an option has another value, or excludes another one; the text names it.
    """

    activations: Activations = "per-token"
    weight_scaling: WeightScaling | None = None
    method: Method | None = None
    four_over_six: FourOverSix | None = None
    block: tuple[int, int] = (1, 16)
    encode: Literal["te", "te_per_token"] = "te"
    four_over_six_error: Literal["exact", "fast"] = "exact"
    e4m3_max: Literal[448, 256] | None = None
    numerics: Numerics = "te"
    data: Data = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "activations", checked_activations(self.activations))
        _checks.is_one_of("numerics", self.numerics, get_args(Numerics))
        if INPUTS[self.activations].weights != "nvfp4":
            self._check_mx()
            return
        if self.weight_scaling is None:
            object.__setattr__(self, "weight_scaling", "row" if self.numerics == "te" else "tensor")
        _checks.is_one_of("weight_scaling", self.weight_scaling, WEIGHT_SCALINGS)
        if self.four_over_six is not None:
            _checks.is_one_of("four_over_six", self.four_over_six, get_args(FourOverSix))
        if self.method is not None:
            _checks.is_one_of("method", self.method, METHODS)
        is_adaptive = self.four_over_six in ("mae", "mse")
        method = self.method or self._best(is_adaptive)
        if is_adaptive and method != "four-over-six":
            raise ValueError(
                f"four_over_six: got {self.four_over_six!r}, must be absent with the method {method!r}"
            )
        if self.four_over_six == "none" and method == "four-over-six":
            raise ValueError(
                "four_over_six: got 'none', must be 'mae' or 'mse' with the method 'four-over-six'"
            )
        if method == "gptq" and self.data != "second moment":
            if self.data == "none":
                raise ValueError(
                    "method: got 'gptq' without calibration, must be another, or have calibration"
                )
            raise ValueError(
                "method: got 'gptq', must be another for statistics without second moments (calibrate(..., "
                "second_moment=True) makes them)"
            )
        if self.numerics != "te":
            for name, value, wanted in (
                ("weight_scaling", self.weight_scaling, "tensor"),
                ("four_over_six", self.four_over_six or "none", "none"),
                ("method", method, "round"),
            ):
                if value != wanted:
                    raise ValueError(
                        f"{name}: got {value!r}, must be {wanted!r} with numerics {self.numerics!r}, which "
                        "has the bits of that producer"
                    )
        adaptive = (self.four_over_six or "mse") if method == "four-over-six" else "none"
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "four_over_six", adaptive)
        self._check_cast()

    def _check_mx(self) -> None:
        """Check that there are no options of NVFP4, and complete the others."""
        implied: dict[str, Any] = {
            "weight_scaling": "row", "method": "round", "four_over_six": "none", "e4m3_max": 448,
        }  # fmt: skip
        for each in dataclasses.fields(self):
            if each.name in ("activations", "data"):
                continue
            value, wanted = getattr(self, each.name), implied.get(each.name, each.default)
            if value not in (None, wanted):
                raise ValueError(
                    f"{each.name}: got {value!r}, must be {wanted!r} with activations {self.activations!r}"
                )
            object.__setattr__(self, each.name, wanted)

    def _check_cast(self) -> None:
        """Check the options of the cast of weights, and complete e4m3_max."""
        is_data_free = self.method in ("round", "four-over-six") and self.numerics == "te"
        bound = 448 if self.method == "round" else 256
        if is_data_free:
            made = option_checks.operator_arguments(self._all_keywords())
            bound = made["e4m3_max"]
        else:
            for name, default in (
                ("block", (1, 16)), ("encode", "te"), ("four_over_six_error", "exact"), ("e4m3_max", bound),
            ):  # fmt: skip
                value = getattr(self, name)
                if value not in (None, default):
                    having = f"the method {self.method!r}"
                    if self.numerics != "te":
                        having = f"numerics {self.numerics!r}"
                    raise ValueError(f"{name}: got {value!r}, must be {default!r} with {having}")
        object.__setattr__(self, "e4m3_max", bound)

    def _all_keywords(self) -> dict[str, Any]:
        """A value of every option of fp4gemm.quantize that has a default, with those of the recipe."""
        adaptive = None if self.four_over_six == "none" else self.four_over_six
        own = {"scaling": self.weight_scaling, "four_over_six": adaptive}
        names = ("block", "encode", "four_over_six_error", "e4m3_max")
        return _DEFAULTS | own | {name: getattr(self, name) for name in names}

    @property
    def weight_keywords(self) -> dict[str, Any]:
        """The keywords of :func:`fp4gemm.quantize` for a weight with "round" or "four-over-six"."""
        values = self._all_keywords()
        if self.four_over_six == "none":
            del values["e4m3_max"]  # 448, the only one
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults, by the names that entry points give them.

        ``data`` is none of them, and weight_scaling and method are always there.
        """
        plain = {each.name: each.default for each in dataclasses.fields(self) if each.name != "data"}
        bound = option_checks.default_bound({"four_over_six": None if self.four_over_six == "none" else 1})
        implied = plain | {"e4m3_max": bound if self.method in ("round", "four-over-six") else self.e4m3_max}
        if self.method != "four-over-six":
            implied["four_over_six"] = "none"
        return {name: value for name in plain if (value := getattr(self, name)) != implied[name]}

    def check_absent(self, **others: tuple[object, object]) -> None:
        """Raise ValueError for an option that is given beside the recipe of an entry point.

        Args:
            others: (value, default) of each option that the recipe has.
        """
        for name, (value, default) in others.items():
            if value != default:
                raise ValueError(
                    f"{name}: got {value!r} beside a recipe, must be absent, since the recipe has it"
                )

    def _best(self, is_adaptive: bool) -> Method:
        """The method for None."""
        if self.numerics != "te" or self.four_over_six == "none":
            return "four-over-six" if is_adaptive else "round"
        if is_adaptive or self.data == "none":
            return "four-over-six"
        return "gptq" if self.data == "second moment" else "search"

    @property
    def fp8_operand(self) -> bool:
        """Whether weights are multiplied by FP8 tokens, for which "search" and "gptq" choose otherwise."""
        return INPUTS[self.activations].tokens == "fp8"

    def check_uses_data(self, calibration: str) -> None:
        """Raise ValueError for "search" without data, or for data that the method does not read.

        What writes a checkpoint is strict: scales that are searched without data lose more than "four-over-
        six", and a calibration that changes nothing is a mistake.

        Args:
            calibration: the name of the calibration, for the message.
        """
        if self.data == "none":
            if self.method == "search":
                raise ValueError(
                    "method: got 'search' without calibration, must be another, or have calibration: without "
                    "it, searched scales lose more than four over six"
                )
        elif self.method not in USES_DATA:
            given = f"numerics {self.numerics!r}" if self.numerics != "te" else f"method {self.method!r}"
            raise ValueError(
                f"calibration: got {calibration} with the {given}, must be absent: only 'search' and 'gptq' "
                "use it"
            )


class Quantizer:
    """Makes the quantized weight of a layer, or the two of experts, by one method.

    Args:
        recipe: the scaling and the method. "four-over-six" is ``quantize(w, four_over_six=...)``, "search"
            ``quantize(w, scale_search="mse", importance=mean_square)``, importance None without statistics,
            and "gptq" :func:`fp4gemm.calibration.gptq`, or "search" where that fails; the last two get the
            recipe's fp8_operand. The numerics are "te". With activations "mxfp8" the weight is
            ``quantize_mxfp8(w)``, and with "mxfp8-mxfp4" it is ``quantize_mxfp4(w)``.
        statistics: those of the layer's input under "", or those of experts under "w13" and "w2"; may be
            empty, except for "gptq".
        factorization: of "gptq", shared by the quantizers of a model.

    Attributes:
        notes: what was done otherwise than asked for, in words.
        errors: |X (W - Q)^T| / |X W^T| of each weight, where its statistics are known, with Q its NVFP4
            values; with mean squares alone as if the elements of x were independent.
    """

    def __init__(
        self,
        recipe: Recipe,
        statistics: Mapping[str, InputStatistics] | None = None,
        factorization: Factorization | None = None,
    ) -> None:
        self.recipe = recipe
        self._statistics = statistics or {}
        self._factorization = factorization
        self.notes: list[str] = []
        self.errors: list[float] = []

    def __call__(self, w: Tensor, name: str = "") -> NVFP4Tensor | MXFP8Tensor | MXFP4Tensor:
        """Quantize w (n, k) or (g, n, k)."""
        known = self._statistics.get(name)
        if known is not None:
            known = self._complete(known.to(w.device))
        mx = _MX_CASTS.get(INPUTS[self.recipe.activations].weights)
        made = self.made(w, known) if mx is None else mx(w)
        if known is not None and bool(known.num_tokens.any()):
            self.errors.append(output_error(w, made, known))
        return made.to(w.dtype)

    def made(self, w: Tensor, known: InputStatistics | None, amax: Tensor | None = None) -> NVFP4Tensor:
        """Make w NVFP4 by the method, with the statistics ``known``; amax is given, or measured from w."""
        method, scaling = self.recipe.method, cast(WeightScaling, self.recipe.weight_scaling)
        if method in ("round", "four-over-six"):
            made: NVFP4Tensor = quantize(w, amax=amax, **self.recipe.weight_keywords)
            return made
        if known is not None and not bool(known.num_tokens.any()):
            self.notes.append("no token reached it: scales searched without statistics")
            known = None
        if method == "gptq" and known is not None and known.second_moment is not None:
            try:
                found = rounded(
                    w,
                    known.second_moment,
                    scaling=scaling,
                    amax=amax,
                    fp8_operand=self.recipe.fp8_operand,
                    factorization=self._factorization,
                )
            except ValueError as error:
                self.notes.append(f"scales searched instead: {error}")
            else:
                most = max(found.damping)
                if most > DAMPING:
                    self.notes.append(f"not positive definite: damping {most:g}")
                return found.weight
        importance = None if known is None else known.mean_square.contiguous()
        return quantize(
            w,
            scaling=scaling,
            amax=amax,
            scale_search="mse",
            importance=importance,
            fp8_operand=self.recipe.fp8_operand,
        )

    def _complete(self, known: InputStatistics) -> InputStatistics:
        """Complete the statistics of experts with fewer than k tokens by the means over all experts.

        With N_e tokens, H_e becomes ``(N_e H_e + (k - N_e) H) / k``, H the mean over all tokens of the layer.
        """
        count = known.num_tokens
        if count.dim() == 0 or bool((count >= known.k).all()) or not bool(count.any()):
            return known
        few = int((count < known.k).sum())
        self.notes.append(f"{few} of {len(count)} experts saw fewer than {known.k} tokens: all added")
        share = count.float() / count.sum()
        square = torch.tensordot(share, known.mean_square, 1)
        moment = None if known.second_moment is None else torch.tensordot(share, known.second_moment, 1)
        return completed(known, InputStatistics(count.sum(), square, moment))


def completed(own: InputStatistics, of_all: InputStatistics) -> InputStatistics:
    """Statistics of an expert, or of each expert of a stack, completed to k tokens.

    The means ``of_all`` over the tokens of all experts take the place of the missing tokens.
    """
    part = (own.num_tokens / own.k).clamp(max=1).float()

    def mixed(x: Tensor, others: Tensor) -> Tensor:
        share = part.view(*part.shape, *(1,) * (x.dim() - part.dim()))
        return x * share + others * (1 - share)

    moment = None
    if own.second_moment is not None and of_all.second_moment is not None:
        moment = mixed(own.second_moment, of_all.second_moment)
    return InputStatistics(own.num_tokens, mixed(own.mean_square, of_all.mean_square), moment)


def output_error(w: Tensor, made: NVFP4Tensor | MXFP8Tensor | MXFP4Tensor, known: InputStatistics) -> float:
    """|X (W - Q)^T| / |X W^T| over the inputs of the statistics. Synchronises."""
    total, wrong = 0.0, 0.0
    num_experts = w.shape[0] if w.dim() == 3 else 0
    for e in range(max(num_experts, 1)):
        values, q = (w[e], made[e]) if num_experts else (w, made)
        weight = float(known.num_tokens[e] if num_experts else 1)
        square = known.mean_square[e] if num_experts else known.mean_square
        moment = known.second_moment
        moment = None if moment is None else moment[e] if num_experts else moment
        wide = values.float()
        for x, is_error in ((wide, False), (wide - q.dequantize(torch.float32), True)):
            product = x * square if moment is None else x @ moment
            energy = weight * max(float((product.double() * x).sum()), 0.0)
            total, wrong = (total, wrong + energy) if is_error else (total + energy, wrong)
    return float((wrong / total) ** 0.5) if total else 0.0


def checked_recipe(value: object) -> Recipe:
    """The recipe itself; TypeError for something else."""
    if not isinstance(value, Recipe):
        raise TypeError(
            f"recipe: got {_checks.describe(value)}, must be an fp4gemm.recipe.Recipe; for_inference() of an "
            "fp4gemm.training.Recipe makes one"
        )
    if value.numerics != "te":
        raise ValueError(f"recipe: its numerics are {value.numerics!r}, must be 'te' for a layer")
    return value


def data_of(calibration: object, sequential: object = False) -> Data:
    """What a calibration in memory holds: Statistics, a StatisticsFile, or batches, which give moments.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """
    _checks.is_bool("sequential", sequential)
    if calibration is None:
        if sequential:
            raise ValueError("sequential: got True, must be False without batches as calibration")
        return "none"
    if isinstance(calibration, (Statistics, StatisticsFile)):
        if sequential:
            raise ValueError("sequential: got True, must be False with Statistics (pass the batches instead)")
        return "second moment" if calibration.has_moments else "mean square"
    if isinstance(calibration, (str, bytes, Mapping, Tensor)) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"calibration: got {_checks.describe(calibration)}, must be Statistics or a list of batches"
        )
    return "second moment"


def check_residual_channels(count: object, activations: str, data: Data) -> None:
    """Check the option ``residual_channels`` of an entry point: 0, or channels that a calibration can choose.

    Raises:
        TypeError, ValueError: naming the option, its value and what it must be.
    """
    name = "residual_channels"
    _checks.is_int(name, count, 0)
    if count == 0:
        return
    check_count(name, count)
    if activations == AUTO or INPUTS[activations].kind not in RESIDUAL_KINDS:
        raise ValueError(
            f"{name}: got {count} with activations {activations!r}, must be 0, or have activations "
            f"{_checks.listing([repr(each) for each in RESIDUAL_KINDS])}, whose errors it corrects"
        )
    if data == "none":
        raise ValueError(
            f"{name}: got {count} without calibration, must be 0, or have the calibration that chooses them"
        )


def as_quantizer(
    method: DataFree | Quantizer | None,
    weight_scaling: WeightScaling,
    activations: Activations = "per-token",
) -> Quantizer:
    """The Quantizer of a method that needs no data; TypeError or ValueError for another name."""
    if isinstance(method, Quantizer):
        return method
    if method is not None:
        _checks.is_one_of("method", method, DATA_FREE)
    return Quantizer(Recipe(activations=activations, weight_scaling=weight_scaling, method=method))
