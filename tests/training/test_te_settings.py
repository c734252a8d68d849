"""Recipe.from_te and Recipe.from_env: recipes of TransformerEngine and of its environment variables."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from fp4gemm import training
from fp4gemm.training import Cast, Recipe, _te

DOCS = Path(__file__).parents[2] / "docs"
TENSOR = Cast(scaling="tensor")
SQUARES = Cast(scaling="tensor", block=(16, 16))
Format = enum.Enum("Format", ["E2M1", "E4M3", "HYBRID"])


@dataclasses.dataclass
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
    _cached_repr: str = ""


@dataclasses.dataclass
class NVFP4BlockScaling:
    """The attributes of TransformerEngine's class; tests/oracles takes the class itself."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Any = Format.E2M1
    fp8_format: Any = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._cached_repr = None
        rht = not self.disable_rht
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=rht, stochastic_rounding=not self.disable_stochastic_rounding
        )


@dataclasses.dataclass
class NVFP4PerTokenBlockScaling(NVFP4BlockScaling):
    """The recipe of pull request 3045, which replaces some of its own arguments."""

    per_token_rht: bool = False
    per_token_sr: bool = False
    per_token_weight_2d: bool = False

    def nvfp4_per_token(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self.disable_rht, self.disable_stochastic_rounding = not self.per_token_rht, not self.per_token_sr
        self.disable_2d_quantization = True
        super().__post_init__()


def te(**arguments: Any) -> Recipe:
    return Recipe.from_te(NVFP4BlockScaling(**arguments))


# ---- what the attributes mean


def test_presets() -> None:
    assert te() == training.PRESETS["nvidia"]
    assert te(backward_override="high_precision") == training.PRESETS["bf16_backward"]
    assert te(disable_rht=True, row_scaled_activation=True) == training.PRESETS["row_scaled"]
    assert te(disable_rht=True, nvfp4_4over6="all") == training.PRESETS["four_over_six_all"]
    assert Recipe.from_te(NVFP4PerTokenBlockScaling()) == training.PRESETS["te_per_token"]
    both = NVFP4PerTokenBlockScaling(per_token_rht=True, per_token_sr=True)
    assert Recipe.from_te(both) == training.PRESETS["te_per_token_rht_sr"]
    dequantized = te(
        disable_rht=True,
        disable_2d_quantization=True,
        row_scaled_activation=True,
        backward_override="dequantized",
    )
    assert dequantized == training.PRESETS["row_scaled_dequantized"]


def test_each_switch_changes_its_casts_alone() -> None:
    nvidia = training.PRESETS["nvidia"]
    rotated, stochastic = Cast(scaling="tensor", hadamard="bf16"), Cast(scaling="tensor", stochastic=True)
    assert nvidia.x_t == rotated
    assert te(disable_rht=True) == nvidia.replace(x_t=TENSOR, dy_t=stochastic)
    assert te(disable_stochastic_rounding=True) == nvidia.replace(dy=TENSOR, dy_t=rotated)
    assert te(disable_2d_quantization=True) == nvidia.replace(w=TENSOR, w_t=TENSOR)
    assert te(backward_override="dequantized") == Recipe(
        x=TENSOR, w=SQUARES, w_t="dequantized", x_t="dequantized"
    )


@pytest.mark.parametrize("scope", ["weights", "activations", "all"])
@pytest.mark.parametrize("bounded", ["none", "weights", "activations", "all"])
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_the_scopes_of_four_over_six(scope: str, bounded: str, mode: str) -> None:
    made = te(
        disable_rht=True,
        nvfp4_4over6=scope,
        nvfp4_4over6_e4m3_use_256=bounded,
        nvfp4_4over6_err_mode=mode,
    )
    for role, names, other in (("weights", ("w", "w_t"), SQUARES), ("activations", ("x", "x_t"), TENSOR)):
        for name in names:
            cast = getattr(made, name)
            if scope not in (role, "all"):
                assert cast == other
                continue
            assert (cast.four_over_six, cast.four_over_six_error) == (mode.lower(), "exact")
            assert (cast.block, cast.scaling) == (other.block, "tensor")
            assert cast.bound == (256 if bounded in (role, "all") else 448)
    assert made.dy == made.dy_t == Cast(scaling="tensor", stochastic=True)


def test_four_over_six_of_weights_goes_with_the_rotation() -> None:
    made, nvidia = te(nvfp4_4over6="weights"), training.PRESETS["nvidia"]
    six = Cast(scaling="tensor", block=(16, 16), four_over_six="mae")
    assert made == nvidia.replace(w=six, w_t=six)


def test_rows_with_four_over_six() -> None:
    made = te(
        disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all", backward_override="dequantized"
    )
    assert made.x == Cast(four_over_six="mae")
    assert made.w == Cast(scaling="tensor", block=(16, 16), four_over_six="mae")
    assert (made.w_t, made.x_t, made.dy, made.dy_t) == ("dequantized", "dequantized", None, None)


def test_options_of_the_per_token_recipe() -> None:
    plain = training.PRESETS["te_per_token"]
    token = Cast(encode="te_per_token")
    rotated = dataclasses.replace(token, hadamard="fp32")
    made = {
        name: Recipe.from_te(NVFP4PerTokenBlockScaling(**{f"per_token_{name}": True}))
        for name in ("rht", "sr", "weight_2d")
    }
    assert made["rht"] == plain.replace(dy_t=rotated, x_t=rotated)
    stochastic = dataclasses.replace(token, stochastic=True)
    assert made["sr"] == plain.replace(dy=stochastic, dy_t=stochastic)
    assert made["weight_2d"] == plain.replace(w=SQUARES, w_t=SQUARES)


def test_the_error_of_four_over_six() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations")
    made = Recipe.from_te(recipe, four_over_six_error="fast")
    assert made.x == made.x_t == Cast(scaling="tensor", four_over_six="mae", four_over_six_error="fast")
    assert made.w == SQUARES
    assert Recipe.from_te(NVFP4BlockScaling(), four_over_six_error="fast") == te()
    with pytest.raises(ValueError, match="four_over_six_error: got 'quick', must be 'exact' or 'fast'"):
        Recipe.from_te(recipe, four_over_six_error="quick")  # type: ignore[arg-type]


def test_attributes_of_older_releases() -> None:
    """A release without an attribute has the feature switched off."""
    recipe = NVFP4BlockScaling(disable_rht=True)
    for name in ("row_scaled_activation", "nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "backward_override"):
        del vars(recipe)[name]
    assert Recipe.from_te(recipe) == te(disable_rht=True)


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa: got True, must be False, since attention is not"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha: got True, must be False"),
        ({"fp8_format": Format.HYBRID}, NotImplementedError, "must be E4M3, since the block scales"),
        ({"fp4_format": Format.E4M3}, NotImplementedError, "fp4_format: got <Format.E4M3: 2>, must be E2M1"),
        ({"disable_rht": "yes"}, TypeError, "disable_rht: got 'yes' (str), must be"),
        ({"nvfp4_4over6": "some"}, ValueError, "nvfp4_4over6: got 'some', must be 'none', 'weights', 'act"),
        ({"nvfp4_4over6_err_mode": "mae"}, ValueError, "nvfp4_4over6_err_mode: got 'mae', must be 'MAE' or"),
        ({"backward_override": "bf16"}, ValueError, "backward_override: got 'bf16', must be None, 'high_pr"),
        (
            {"row_scaled_activation": True},
            ValueError,
            "disable_rht: got False, must be True with row_scaled_activation True",
        ),
        ({"nvfp4_4over6": "all"}, ValueError, "disable_rht: got False, must be True with nvfp4_4over6 'all'"),
        (
            {"disable_rht": True, "row_scaled_activation": True, "nvfp4_4over6": "activations"},
            ValueError,
            "backward_override: got None, must be 'dequantized' with row_scaled_activation True",
        ),
    ],
)
def test_attributes_that_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        te(**arguments)
    assert says in str(raised.value)


@dataclasses.dataclass
class MXFP8BlockScaling:
    """The attributes of TransformerEngine's class."""

    margin: int = 0
    fp8_format: Any = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._cached_repr = None


def test_mxfp8() -> None:
    cast = Cast(format="mxfp8")
    assert Recipe.from_te(MXFP8BlockScaling()) == training.PRESETS["mxfp8"]
    assert training.PRESETS["mxfp8"] == Recipe(x=cast, w=cast, dy=cast, w_t=cast, dy_t=cast, x_t=cast)
    assert Recipe.from_te(MXFP8BlockScaling(backward_override="high_precision")) == Recipe(x=cast, w=cast)
    dequantized = Recipe(x=cast, w=cast, w_t="dequantized", x_t="dequantized")
    assert Recipe.from_te(MXFP8BlockScaling(backward_override="dequantized")) == dequantized


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"margin": 1}, NotImplementedError, "margin: got 1, must be 0, since no scale has a margin"),
        (
            {"fp8_format": Format.HYBRID},
            NotImplementedError,
            "must be E4M3, since products multiply e4m3 alone",
        ),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa: got True, must be False, since attention is not"),
        (
            {"enable_2d_quantization": True},
            NotImplementedError,
            "enable_2d_quantization: got True, must be False, since blocks are 1x32",
        ),
        (
            {"backward_override": "bf16"},
            ValueError,
            "backward_override: got 'bf16', must be None, 'high_precision' or 'dequantized'",
        ),
    ],
)
def test_attributes_of_mxfp8_that_are_refused(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as raised:
        Recipe.from_te(MXFP8BlockScaling(**arguments))
    assert says in str(raised.value)


def test_objects_that_are_refused() -> None:
    class Float8BlockScaling:
        margin = 0

    with pytest.raises(TypeError, match=r"^recipe: got .*Float8BlockScaling.*, must be an NVFP4BlockScaling"):
        Recipe.from_te(Float8BlockScaling())
    other = MXFP8BlockScaling()
    other.scale_inv = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^scale_inv: is no attribute of MXFP8BlockScaling that fp4gemm"):
        Recipe.from_te(other)
    with pytest.raises(TypeError, match=r"^recipe: got None"):
        Recipe.from_te(None)
    recipe = NVFP4BlockScaling()
    recipe.use_mxfp4_gradients = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^use_mxfp4_gradients: is no attribute of NVFP4BlockScaling that"):
        Recipe.from_te(recipe)
    recipe = NVFP4PerTokenBlockScaling()
    recipe.row_scaled_activation = True
    with pytest.raises(ValueError, match=r"^row_scaled_activation: got True, must be False with per_token"):
        Recipe.from_te(recipe)


@pytest.mark.parametrize("name", ["fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"])
@pytest.mark.parametrize("field", ["random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"])
def test_parameters_that_contradict_the_arguments(name: str, field: str) -> None:
    """TransformerEngine's quantizers follow these parameters, which are made of the arguments."""
    recipe = NVFP4BlockScaling()
    before = getattr(getattr(recipe, name), field)
    setattr(getattr(recipe, name), field, not before)
    says = f"^{name}.{field}: got {not before}, must be {before}, which follows"
    with pytest.raises(ValueError, match=says):
        Recipe.from_te(recipe)


def test_parameters_that_are_not_known() -> None:
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp.amax_epsilon = 1e-6
    with pytest.raises(ValueError, match=r"^fp4_quant_fwd_inp.amax_epsilon: got 1e-06, must be 0.0"):
        Recipe.from_te(recipe)
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp.clip = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^fp4_quant_fwd_inp\.clip: is no attribute of QParams that"):
        Recipe.from_te(recipe)


# ---- environment variables


def test_an_empty_environment() -> None:
    assert Recipe.from_env({}) == Recipe.from_env({"PATH": "/bin"}) == training.PRESETS["nvidia"]


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _te.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert Recipe.from_env() == te(disable_rht=True)


FLAGS = [
    ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "disable_stochastic_rounding"),
    ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "disable_2d_quantization"),
    ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "row_scaled_activation"),
]


def test_variables_are_the_attributes() -> None:
    for values in itertools.product([False, True], repeat=len(FLAGS)):
        environ = {name: str(int(value)) for (name, _), value in zip(FLAGS, values, strict=True)}
        arguments = {field: value for (_, field), value in zip(FLAGS, values, strict=True)}
        made = Recipe.from_env({**environ, "NVTE_NVFP4_DISABLE_RHT": "1"})
        assert made == te(**arguments, disable_rht=True)
        override = {"NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_BACKWARD_OVERRIDE": "dequantized"}
        assert Recipe.from_env({**environ, **override}) == te(
            **arguments, disable_rht=True, backward_override="dequantized"
        )


def test_variables_of_four_over_six() -> None:
    environ = {
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_NVFP4_4OVER6": "all",
        "NVTE_NVFP4_4OVER6_E4M3_USE_256": "weights",
        "NVTE_NVFP4_4OVER6_ERR_MODE": "mse",  # TransformerEngine accepts both cases in the variable
        "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "1",
    }
    arguments = NVFP4BlockScaling(
        disable_rht=True,
        nvfp4_4over6="all",
        nvfp4_4over6_e4m3_use_256="weights",
        nvfp4_4over6_err_mode="MSE",
    )
    assert Recipe.from_env(environ) == Recipe.from_te(arguments, four_over_six_error="fast")
    del environ["NVTE_NVFP4_4OVER6"]  # the switch of the others
    assert Recipe.from_env(environ) == te(disable_rht=True)


def test_variables_of_the_per_token_recipe() -> None:
    names = ("rht", "sr", "weight_2d")
    for values in itertools.product([False, True], repeat=3):
        environ = {
            f"NVTE_NVFP4_PER_TOKEN_{n.upper()}": str(int(v)) for n, v in zip(names, values, strict=True)
        }
        arguments = {f"per_token_{name}": value for name, value in zip(names, values, strict=True)}
        made = Recipe.from_env({"NVTE_NVFP4_PER_TOKEN": "1", "NVTE_NVFP4_DISABLE_RHT": "0", **environ})
        assert made == Recipe.from_te(NVFP4PerTokenBlockScaling(**arguments))
        assert Recipe.from_env(environ) == training.PRESETS["nvidia"]


def test_variables_of_launches_have_no_effect() -> None:
    assert Recipe.from_env(dict.fromkeys(_te.LAUNCHES, "1")) == training.PRESETS["nvidia"]


@pytest.mark.parametrize(
    ("environ", "error", "says"),
    [
        (
            {"NVTE_NVFP4_DISABLE_RHT": "true"},
            ValueError,
            "NVTE_NVFP4_DISABLE_RHT: got 'true', must be '0' or '1', or unset",
        ),
        (
            {"NVTE_NVFP4_4OVER6": "1"},
            ValueError,
            "NVTE_NVFP4_4OVER6: got '1', must be 'none', 'weights', 'activations' or 'all', or unset",
        ),
        ({"NVTE_BACKWARD_OVERRIDE": ""}, ValueError, "NVTE_BACKWARD_OVERRIDE: got '', must be 'high_prec"),
        (
            {"NVTE_NVFP4_PER_TOKEN_ACTIVATION": "1"},
            ValueError,
            "NVTE_NVFP4_PER_TOKEN_ACTIVATION: is no variable that fp4gemm knows; it knows NVTE_NVFP4_DISABLE",
        ),
        (
            {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1"},
            ValueError,
            "NVTE_NVFP4_DISABLE_RHT: got '0', must be '1' with NVTE_NVFP4_ROW_SCALED_ACTIVATION '1'",
        ),
        (
            {"NVTE_NVFP4_PER_TOKEN": "1", "NVTE_NVFP4_4OVER6": "weights"},
            ValueError,
            "NVTE_NVFP4_4OVER6: got 'weights', must be 'none' with NVTE_NVFP4_PER_TOKEN '1'",
        ),
        (
            {"NVTE_USE_FAST_MATH": "1"},
            NotImplementedError,
            "NVTE_USE_FAST_MATH: got '1', must be '0' or unset",
        ),
    ],
)
def test_variables_that_are_refused(environ: dict[str, str], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        Recipe.from_env(environ)
    assert says in str(raised.value)
    assert Recipe.from_env({"NVTE_USE_FAST_MATH": "0"}) == training.PRESETS["nvidia"]


def test_the_table_of_the_documentation() -> None:
    """It has each variable, and no other one with NVFP4 in its name."""
    rows = re.findall(r"^\| `(NVTE_\w+)` \|", (DOCS / "interop.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(
        {*_te.VARIABLES, *_te.LAUNCHES, *_te.REFUSED, "NVTE_BUILD_NUM_PHILOX_ROUNDS"}
    )


def test_every_preset_has_a_row_in_the_documentation() -> None:
    text = (DOCS / "training.md").read_text()
    table = text[text.index("| preset |") :].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(training.PRESETS)


def test_the_tests_that_the_documentation_names_exist() -> None:
    """In its list of TransformerEngine's tests and their counterparts."""
    named = set(re.findall(r"`(tests/\w[\w/]*\.py)`", (DOCS / "interop.md").read_text()))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (DOCS.parent / name).is_file()] == []
