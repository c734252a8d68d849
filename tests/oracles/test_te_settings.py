"""Recipe.from_te and from_env against TransformerEngine's own recipe class, executed from its wheel."""

from __future__ import annotations

import itertools
import re
import types
import zipfile
from pathlib import Path

import pytest
import te_oracle
from fp4gemm import training
from fp4gemm.training import Recipe, _te

MODULE = "transformer_engine/common/recipe/__init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pydantic", reason="TransformerEngine's recipes are pydantic dataclasses")
    try:
        return te_oracle.wheel(tmp_path_factory.mktemp("wheel"))
    except te_oracle.Unavailable as reason:
        pytest.skip(f"TransformerEngine's recipes: {reason}")


def recipes(wheel: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> types.ModuleType:
    """The module of the recipes, which reads the environment when it is executed."""
    for name in (*_te.VARIABLES, *_te.REFUSED):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with zipfile.ZipFile(wheel) as archive:
        return te_oracle.run(archive.read(MODULE).decode(), "_te_recipes_of_the_wheel")


def test_every_combination_of_variables(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe made under an environment is the recipe of this environment."""
    flags = [
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    ]
    accepted = 0  # 44 of 48 without the rotation, and 16 of 48 with it
    for values in itertools.product("01", repeat=4):
        for scope, override in itertools.product(("none", "weights", "all"), (None, "dequantized")):
            environ = dict(zip(flags, values, strict=True))
            environ |= {"NVTE_NVFP4_4OVER6": scope, "NVTE_NVFP4_4OVER6_ERR_MODE": "mse"}
            environ |= {} if override is None else {"NVTE_BACKWARD_OVERRIDE": override}
            recipe = recipes(wheel, monkeypatch, environ).NVFP4BlockScaling()
            try:
                want = Recipe.from_env(environ)
            except ValueError:
                with pytest.raises(ValueError, match="must be"):
                    Recipe.from_te(recipe)
                continue
            assert Recipe.from_te(recipe) == want
            accepted += 1
    assert accepted == 44 + 16


def test_defaults(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = recipes(wheel, monkeypatch, {})
    assert Recipe.from_te(module.NVFP4BlockScaling()) == training.PRESETS["nvidia"]
    assert str(module.NVFP4BlockScaling())  # which writes a private attribute
    for name in ("MXFP8BlockScaling", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        with pytest.raises(TypeError, match="must be an NVFP4BlockScaling"):
            Recipe.from_te(getattr(module, name)())
    recipe = module.NVFP4BlockScaling()
    recipe.fp4_quant_fwd_weight = module.QParams(fp4_2d_quantization=False)
    with pytest.raises(ValueError, match=r"^fp4_quant_fwd_weight\.fp4_2d_quantization: got False"):
        Recipe.from_te(recipe)


def test_no_variable_is_forgotten(wheel: Path) -> None:
    """All sources in the wheel, which has no C++."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                found |= set(re.findall(r"NVTE_NVFP4\w*[A-Z0-9]", archive.read(name).decode()))
    assert found
    assert found <= set(_te.VARIABLES)
