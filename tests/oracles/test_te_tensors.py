"""Operands from and for NVFP4Tensor of TransformerEngine: its own class, executed from its wheel on a CPU."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import fp4gemm
import pytest
import te_oracle
import torch
from fp4gemm import NVFP4Tensor
from helpers import make
from modes import assert_same
from te_recipes import positive_zeros

OPTIONS: dict[str, dict[str, Any]] = {
    "tensor": {"scaling": "tensor"},
    "row": {"scaling": "row"},
    "four over six": {"scaling": "tensor", "four_over_six": "mae"},
    "rows, four over six": {"scaling": "row", "four_over_six": "mse"},
    "squares": {"scaling": "tensor", "block": (16, 16)},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("pydantic", reason="TransformerEngine's recipes are pydantic dataclasses")
    try:
        return te_oracle.wheel(tmp_path_factory.mktemp("wheel"))
    except te_oracle.Unavailable as reason:
        pytest.skip(f"TransformerEngine's tensors: {reason}")


@pytest.fixture
def te(wheel: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with te_oracle.tensor_module(wheel) as module:
        yield module


def theirs(te: Any, keywords: dict[str, Any], **quantizer: Any) -> Any:
    """Their tensor of these keywords."""
    made = te.NVFP4Quantizer(**quantizer)
    return te.NVFP4Tensor(**keywords, fp4_dtype=te.DType.kFloat4E2M1, quantizer=made)


@pytest.mark.parametrize("name", OPTIONS)
def test_there_and_back(name: str, te: Any, gen: torch.Generator) -> None:
    x = make("row_ranges", 48, 80, torch.bfloat16, gen)
    t, columns = (fp4gemm.quantize(x, axis=axis, **OPTIONS[name]).to(torch.bfloat16) for axis in (-1, 0))
    their = theirs(te, t.to_transformer_engine(columns))
    assert (tuple(their.shape), their.dtype) == ((48, 80), torch.bfloat16)
    assert their._row_scaled_nvfp4 == (t.amax.shape[0] > 1)
    assert (their._nvfp4_use_4over6, their._nvfp4_e4m3_max) == (t.e4m3_max == 256, t.e4m3_max)
    for scale, want in ((their._rowwise_scale_inv, (128, 8)), (their._columnwise_scale_inv, (128, 4))):
        assert tuple(scale.shape) == want
        assert scale.dtype is torch.uint8
    again = NVFP4Tensor.from_transformer_engine(their)
    assert_same(again, t)
    assert again.dtype is torch.bfloat16
    assert again.codes.data_ptr() == t.codes.data_ptr()
    assert_same(NVFP4Tensor.from_transformer_engine(their, columnwise=True), columns)
    assert_same(NVFP4Tensor.from_transformer_engine(their.view(4, 12, 80)), t)
    assert NVFP4Tensor.from_transformer_engine(theirs(te, t.to_transformer_engine())).shape == (48, 80)


@pytest.mark.parametrize("signs", [False, True], ids=["no signs", "signs"])
def test_rotated_columns(signs: bool, te: Any, gen: torch.Generator) -> None:
    x = make("normal", 48, 80, torch.bfloat16, gen)
    t = fp4gemm.quantize(x, scaling="tensor")
    mask = 0xD7E8 if signs else 0
    columns = fp4gemm.quantize(x, axis=0, scaling="tensor", hadamard="bf16", hadamard_signs=mask)
    their = theirs(te, t.to_transformer_engine(columns), with_rht=True, with_random_sign_mask=signs)
    again = NVFP4Tensor.from_transformer_engine(their, columnwise=True)
    assert_same(again, columns)
    assert again.hadamard_signs == mask
    assert NVFP4Tensor.from_transformer_engine(their).hadamard_signs is None


@pytest.mark.parametrize("name", OPTIONS)
def test_what_its_reference_quantizes(name: str, wheel: Any, te: Any, gen: torch.Generator) -> None:
    """Codes, scales and amax of its Python reference in its tensor class, with padding of any value."""
    x = make("heavy", 48, 80, torch.bfloat16, gen)
    options = {"four_over_six": None, "block": (1, 16), **OPTIONS[name]}
    codes, scales, amax = te_oracle.Oracle(wheel).quantize(x, **options)
    padded = torch.full((128, 8), 0xFF, dtype=torch.uint8)
    padded[:48, :5] = scales
    want = fp4gemm.quantize(x, **OPTIONS[name])
    keywords = want.to_transformer_engine()
    keywords |= {"rowwise_data": codes, "rowwise_scale_inv": padded, "amax_rowwise": amax}
    got = NVFP4Tensor.from_transformer_engine(theirs(te, keywords))
    assert torch.equal(positive_zeros(got.codes), positive_zeros(want.codes))
    assert torch.equal(got.scales.view(torch.uint8), want.scales.view(torch.uint8))
    assert torch.equal(got.amax, want.amax)
    assert got.e4m3_max == want.e4m3_max


def test_swizzled_scales(te: Any, gen: torch.Generator) -> None:
    t = fp4gemm.quantize(make("normal", 200, 64, torch.bfloat16, gen))
    keywords = t.to_transformer_engine() | {"with_gemm_swizzled_scales": True}
    keywords["rowwise_scale_inv"] = t.scales.view(torch.uint8)
    assert_same(NVFP4Tensor.from_transformer_engine(theirs(te, keywords)), t)
