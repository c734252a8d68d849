"""from_transformer_engine and to_transformer_engine with stand-ins; tests/oracles has the class itself."""

from __future__ import annotations

import types
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import make
from modes import assert_same

QUANTIZER = types.SimpleNamespace(with_rht=False, rht_matrix_random_sign_mask_t=0xD7E8)
ROTATES = types.SimpleNamespace(with_rht=True, rht_matrix_random_sign_mask_t=0x1234)


def metadata(t: NVFP4Tensor, columns: NVFP4Tensor | None = None, **changed: Any) -> Any:
    """A tensor whose metadata are those of TransformerEngine."""
    held = t.to_transformer_engine(columns)
    held |= {"fake_dtype": held.pop("dtype"), "quantizer": QUANTIZER}
    held["fp4_dtype"] = types.SimpleNamespace(name="kFloat4E2M1")
    for name in ("shape", "device"):
        del held[name]
    held |= changed
    return types.SimpleNamespace(get_metadata=lambda: held)


@pytest.fixture
def x(device: torch.device, gen: torch.Generator) -> torch.Tensor:
    return make("row_ranges", 48, 64, torch.bfloat16, gen).to(device)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_there_and_back(scaling: Any, x: torch.Tensor) -> None:
    t = fp4gemm.quantize(x, scaling=scaling, four_over_six="mse").to(torch.float16)
    columns = fp4gemm.quantize(x, scaling=scaling, axis=0, four_over_six="mse")
    their = metadata(t, columns)
    again = NVFP4Tensor.from_transformer_engine(their)
    assert_same(again, t)
    assert again.dtype is torch.float16
    assert_same(NVFP4Tensor.from_transformer_engine(their, columnwise=True), columns)
    assert_same(NVFP4Tensor.from_transformer_engine(metadata(t)), t)
    in_three = metadata(t, rowwise_data=t.codes.view(2, 24, 32), per_token=scaling == "row")
    assert_same(NVFP4Tensor.from_transformer_engine(in_three), t)


def test_mixed_scaling_has_an_amax_for_each_row(x: torch.Tensor) -> None:
    """There one flag is for both directions."""
    t, columns = fp4gemm.quantize(x, scaling="tensor"), fp4gemm.quantize(x, axis=0)
    held = t.to_transformer_engine(columns)
    assert held["row_scaled_nvfp4"]
    assert held["amax_rowwise"].shape == (48,)
    assert held["amax_columnwise"].shape == (64,)
    assert_same(NVFP4Tensor.from_transformer_engine(metadata(t, columns)), t.with_row_amax())


def test_rotated_columns(x: torch.Tensor) -> None:
    t = fp4gemm.quantize(x)
    columns = fp4gemm.quantize(x, axis=0, hadamard="fp32", hadamard_signs=0x1234)
    their = metadata(t, columns, quantizer=ROTATES)
    assert_same(NVFP4Tensor.from_transformer_engine(their, columnwise=True), columns)
    assert NVFP4Tensor.from_transformer_engine(their).hadamard_signs is None


def test_tensors_that_are_refused(x: torch.Tensor) -> None:
    t = fp4gemm.quantize(x)
    nan = t.to_transformer_engine()["rowwise_scale_inv"].clone()
    nan[3, 2] = 0x7F
    negative = t.amax.clone()
    negative[5] = -1
    both = fp4gemm.quantize(x, axis=0)
    cases: list[tuple[Any, type[Exception], str]] = [
        (metadata(t, new_flag=True), ValueError, "^new_flag: is no entry of the metadata that fp4gemm knows"),
        (
            metadata(t, rowwise_data=None),
            ValueError,
            "^rowwise_data: is None, must be a tensor; columnwise=True",
        ),
        (metadata(t, amax_rowwise=None), ValueError, "^amax_rowwise: is None, must be a tensor"),
        (metadata(t, nvfp4_e4m3_max=288), ValueError, "^nvfp4_e4m3_max: got 288, must be 448 or 256"),
        (metadata(t, with_gemm_swizzled_scales=1), TypeError, "^with_gemm_swizzled_scales: got 1 "),
        (metadata(t, fake_dtype=torch.int8), TypeError, r"^fake_dtype: dtype is torch\.int8"),
        (
            metadata(t, fp4_dtype=types.SimpleNamespace(name="kByte")),
            ValueError,
            "^fp4_dtype: got kByte, must",
        ),
        (
            metadata(t, rowwise_scale_inv=nan[:48]),
            ValueError,
            r"^rowwise_scale_inv: shape is \(48, 4\), must be",
        ),
        (metadata(t, rowwise_scale_inv=nan), ValueError, "^rowwise_scale_inv: "),
        (metadata(t, amax_rowwise=negative), ValueError, "^amax_rowwise: 1 of 48 values are NaN or negative"),
        (
            metadata(t, amax_rowwise=t.amax[:7]),
            ValueError,
            r"^amax_rowwise: shape is \(7,\), must be \(48,\)",
        ),
        (types.SimpleNamespace(), TypeError, "^tensor: got .*, must be an NVFP4Tensor of TransformerEngine"),
        (t, TypeError, "^tensor: got NVFP4Tensor"),
    ]
    for their, error, says in cases:
        with pytest.raises(error, match=says):
            NVFP4Tensor.from_transformer_engine(their)
    with pytest.raises(ValueError, match=r"^columnwise_data: is None, must be a tensor; columnwise=False"):
        NVFP4Tensor.from_transformer_engine(metadata(t), columnwise=True)
    with pytest.raises(ValueError, match=r"^quantizer: is None, must be the NVFP4Quantizer"):
        NVFP4Tensor.from_transformer_engine(metadata(t, both, quantizer=None), columnwise=True)
    with pytest.raises(TypeError, match=r"^columnwise: got 1 \(int\), must be True or False"):
        NVFP4Tensor.from_transformer_engine(metadata(t), columnwise=1)  # type: ignore[arg-type]


def test_operands_that_are_refused(x: torch.Tensor) -> None:
    t = fp4gemm.quantize(x)
    offs = torch.tensor([48], dtype=torch.int32, device=x.device)
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: fp4gemm.quantize(x, offs=offs).to_transformer_engine(),
            ValueError,
            r"^offs: got .* must be None",
        ),
        (
            lambda: t.reshape(2, 24, 64).to_transformer_engine(),
            ValueError,
            r"^codes: shape is \(2, 24, 32\), must",
        ),
        (
            lambda: fp4gemm.quantize(x, hadamard="fp32").to_transformer_engine(),
            ValueError,
            "^hadamard_signs: got 0xd7e8, must be None for TransformerEngine's rowwise data",
        ),
        (
            lambda: t.to_transformer_engine(t),
            ValueError,
            r"^columnwise: shape is \(48, 64\), must be \(64, 48\)",
        ),
        (lambda: t.to_transformer_engine(t.codes), TypeError, "^columnwise: got a torch.uint8 tensor"),
        (
            lambda: t.to_transformer_engine(fp4gemm.quantize(x, axis=0, four_over_six="mae")),
            ValueError,
            "^columnwise: e4m3_max is 256, must be 448, as of the rowwise data",
        ),
    ]
    for call, error, says in cases:
        with pytest.raises(error, match=says):
            call()
