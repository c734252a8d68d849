"""Random weights, and their NVFP4 and MXFP4 in plain torch.

This library makes none of them, so that its layers in an engine are compared with weights that it did not
make.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD, AMAX = 0.02, 0.1  # weights are normal and limited to five standard deviations
OUTER = AMAX / (6 * 448)  # one outer scale for all, as after a calibration of fused layers
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of e2m1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def normal(gen: torch.Generator, *size: int) -> Tensor:
    """float32 weights on the device of the generator."""
    made = torch.empty(size, device=gen.device, dtype=torch.float32)
    return made.normal_(std=STD, generator=gen).clamp_(-AMAX, AMAX)


def nvfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 (..., k / 2), and block scales, e4m3 (..., k / 16), of weights (..., k)."""
    blocks = w.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / OUTER).clamp(max=448).to(torch.float8_e4m3fn)
    x = blocks / (scales.float() * OUTER).clamp(min=1e-12).unsqueeze(-1)
    return _packed(x).flatten(-2), scales


def decoded(codes: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    """float32 (..., k): the weights that NVFP4 tensors of a checkpoint stand for."""
    return _unpacked(codes) * scales.float().repeat_interleave(16, -1) * outer.float()


def mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of codes, uint8 (..., k / 32, 16), and scales, e8m0 as uint8 (..., k / 32), of weights (..., k).

    The scale of a block is the power of two at or below its largest magnitude, divided by 4; codes saturate.
    """
    blocks = w.float().unflatten(-1, (-1, 32))
    _, exponents = torch.frexp(blocks.abs().amax(-1))
    exponents = (exponents - 3).clamp(min=-127)
    return _packed(torch.ldexp(blocks, -exponents.unsqueeze(-1))), (exponents + 127).to(torch.uint8)


def decoded_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 (..., k): the weights that MXFP4 tensors of a checkpoint stand for."""
    return torch.ldexp(_unpacked(blocks), scales.int().unsqueeze(-1) - 127).flatten(-2)


def _packed(x: Tensor) -> Tensor:
    """The codes of the nearest e2m1 values, two in a byte."""
    codes = torch.bucketize(x.abs(), torch.tensor(BOUNDS, device=x.device), out_int32=True).to(torch.uint8)
    codes |= (x < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpacked(codes: Tensor) -> Tensor:
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
