"""The quantizers of the self-test: calls whose results have the bits of the reference on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..layout import swizzle_scales
from ..ops import operators
from ..ops.options import SIGNS
from ..reference.eden import EDEN
from .problems import SEED

__all__ = ["names", "run"]

Call = Callable[[torch.device], Any]  # a tuple of tensors

M, K = 48, 144  # nine blocks: the last word of scales has padding
FP8_K = 192  # FP8 tokens have multiples of 64
ENDS = (5, 5, 40)  # the ends of groups of rows; the rows after the last group belong to none


def names() -> list[str]:
    """The names of the calls."""
    return list(_CALLS)


def run(name: str, device: torch.device) -> tuple[Tensor, ...]:
    """The results of a call on a device, copied to the CPU."""
    return tuple(part.cpu() for part in _CALLS[name](device))


def _input(dtype: torch.dtype, device: torch.device, columns: int = K) -> Tensor:
    """Rows of magnitudes from 2^-20 to 2^13, with outliers, a row of zeros and a NaN."""
    gen = torch.Generator().manual_seed(SEED)
    x = torch.randn(M, columns, generator=gen)
    x *= torch.exp2(torch.randint(-20, 14, (M, 1), generator=gen).float())
    x[:, 7] *= 4
    x[5], x[6, 20] = 0.0, torch.nan
    return x.clamp(-60000, 60000).to(dtype).to(device)


def _ends(device: torch.device) -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def _cast(dtype: torch.dtype, per_row: bool, **options: int | float | bool) -> Call:
    """A call of the operator ``quantize``, whose options these are."""
    return lambda device: operators.quantize(_input(dtype, device), None, per_row, **options)


def _residual(dtype: torch.dtype, per_row: bool, **options: int | float | bool) -> Call:
    """A call of the operator ``quantize`` with residual channels."""
    channels = torch.arange(3, 3 + 2 * 64, 2, dtype=torch.int32)
    return lambda device: operators.quantize(
        _input(dtype, device), None, per_row, residual_channels=channels.to(device), **options
    )


def _stochastic(device: torch.device) -> Any:
    state = torch.tensor([SEED, 7], device=device)
    return operators.quantize(_input(torch.bfloat16, device), None, True, rng_state=state)


def _eden(device: torch.device, axis: int) -> Any:
    options = {"encode": EDEN, "e4m3_max": 256, "hadamard": 2, "signs": SIGNS}
    state = torch.tensor([SEED, 7], device=device)
    return operators.quantize(
        _input(torch.bfloat16, device), None, False, axis=axis, rng_state=state, **options
    )


def _groups(device: torch.device, axis: int) -> Any:
    return operators.quantize(_input(torch.bfloat16, device), None, True, axis=axis, offs=_ends(device))


def _norm(device: torch.device) -> Any:
    x, weight = _input(torch.bfloat16, device), _input(torch.bfloat16, device)[0].contiguous()
    *quantized, total = operators.rms_norm_quantize(x, weight, x.flip(0), 1e-6)
    return *quantized, total.nan_to_num()  # the bits of a NaN that an addition made differ between devices


def _norm_fp8(device: torch.device) -> Any:
    x = _input(torch.bfloat16, device, FP8_K)
    *quantized, total = operators.rms_norm_quantize_fp8(x, None, x.flip(0), 1e-6)
    return *quantized, total.nan_to_num()


def _packed(device: torch.device) -> Any:
    """Prepacked weights, the same decoded, and dequantized."""
    gen = torch.Generator().manual_seed(SEED)
    codes = torch.randint(0, 256, (M, K // 2), generator=gen, dtype=torch.uint8).to(device)
    finite = torch.randint(0, 0x7F, (M, K // 16), generator=gen, dtype=torch.uint8)
    scales = swizzle_scales(finite.view(torch.float8_e4m3fn)).to(device)
    amax = torch.rand(M, generator=gen).to(device)
    y = operators.dequantize(codes, scales, amax, 448, torch.bfloat16)
    return operators.prepack(codes, scales), operators.decode(codes, scales), y


def _mxfp8(device: torch.device) -> Any:
    x = _input(torch.bfloat16, device, 160)
    values, scales = operators.mxfp8_quantize(x, -1, torch.float8_e4m3fn, True)
    return values, scales, operators.mxfp8_dequantize(values, scales, torch.float32, True).nan_to_num()


def _mxfp8_groups(device: torch.device) -> Any:
    x, ends = _input(torch.bfloat16, device, 160), _ends(device)
    values, scales = operators.mxfp8_quantize(x, -1, torch.float8_e4m3fn, True, ends)
    y = operators.mxfp8_dequantize(values, scales, torch.float32, True, ends).nan_to_num()
    return values, scales, y, *operators.mxfp8_quantize(x, 0, torch.float8_e4m3fn, True, ends)


def _mxfp4(device: torch.device) -> Any:
    x, ends = _input(torch.bfloat16, device, 160), _ends(device)
    made: list[Tensor] = []
    for ceil, groups in ((False, None), (True, None), (True, ends)):
        codes, scales = operators.mxfp4_quantize(x, -1, ceil, True, groups)
        y = operators.mxfp4_dequantize(codes, scales, torch.float32, True, groups).nan_to_num()
        made += [codes, scales, y]
    return *made, *operators.mxfp4_quantize(x, 0, False, True, ends)


_BF16 = torch.bfloat16
_CALLS: dict[str, Call] = {
    "quantize, rows, bfloat16": _cast(_BF16, True),
    "quantize, rows, float16": _cast(torch.float16, True),
    "quantize, rows, float32": _cast(torch.float32, True),
    "quantize, columns": _cast(_BF16, True, axis=0),
    "quantize, one amax": _cast(_BF16, False),
    "quantize, blocks of 16x16": _cast(_BF16, False, block_rows=16),
    "quantize, te_per_token": _cast(_BF16, True, encode=1),
    "quantize, four over six": _cast(_BF16, True, four_over_six=1, e4m3_max=256),
    "quantize, residual channels": _residual(_BF16, True),
    "quantize, residual channels, four over six": _residual(_BF16, False, four_over_six=1, e4m3_max=256),
    "quantize, Hadamard": _cast(_BF16, True, hadamard=1, signs=SIGNS),
    "quantize, stochastic": _stochastic,
    "quantize, eden": lambda device: _eden(device, -1),
    "quantize, eden, columns": lambda device: _eden(device, 0),
    "quantize, groups of rows": lambda device: _groups(device, -1),
    "quantize, groups of columns": lambda device: _groups(device, 0),
    "quantize_searched": lambda device: operators.quantize_searched(_input(_BF16, device), None, None, True),
    "quantize_searched, FP8 operand": lambda device: operators.quantize_searched(
        _input(_BF16, device), None, None, True, fp8_operand=True
    ),
    "silu_and_mul_quantize": lambda device: operators.silu_and_mul_quantize(_input(_BF16, device, 2 * K)),
    "rms_norm_quantize": _norm,
    "quantize_fp8, bfloat16": lambda device: operators.quantize_fp8(_input(_BF16, device, FP8_K)),
    "quantize_fp8, float16": lambda device: operators.quantize_fp8(_input(torch.float16, device, FP8_K)),
    "quantize_fp8, float32": lambda device: operators.quantize_fp8(_input(torch.float32, device, FP8_K)),
    "quantize_fp8, groups of rows": lambda device: operators.quantize_fp8(
        _input(_BF16, device, FP8_K), _ends(device)
    ),
    "silu_and_mul_quantize_fp8": lambda device: operators.silu_and_mul_quantize_fp8(
        _input(_BF16, device, 2 * FP8_K)
    ),
    "rms_norm_quantize_fp8": _norm_fp8,
    "prepack, decode, dequantize": _packed,
    "mxfp8": _mxfp8,
    "mxfp8, groups": _mxfp8_groups,
    "mxfp4": _mxfp4,
}
