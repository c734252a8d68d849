"""torch's own emulation of block-scaled products, of its test utilities, as torch.nn.functional.scaled_mm.

torch decodes e2m1 codes and swizzled scales there by code that shares nothing with this library. The module
imports expecttest, of which the functions used here need nothing; where it is missing, an empty module takes
its place during the import.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from bench.baselines.cublaslt import Operand

E2M1 = (2, 1)  # bits of the exponent and of the mantissa
BLOCK = 16


@functools.cache
def quantized() -> Any:
    """torch.testing._internal.common_quantized."""
    is_missing = importlib.util.find_spec("expecttest") is None
    if is_missing:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = object
        sys.modules["expecttest"] = stand_in
    try:
        from torch.testing._internal import common_quantized
    finally:
        if is_missing:
            del sys.modules["expecttest"]
    return common_quantized


def decoded(x: Operand) -> Tensor:
    """float32 (m, k): codes times block scales, as torch decodes them."""
    codes = x.codes.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    values = quantized()._floatx_unpacked_to_f32(nibbles, *E2M1)
    scales = quantized().from_blocked(values, x.scales.flatten(), BLOCK)
    made: Tensor = quantized().from_blocked_format(values, scales, BLOCK).float()  # bf16 holds them exactly
    return made


def scaled_mm(a: Operand, b: Operand) -> Tensor:
    """bfloat16 a @ b.T, with the decode factors of both as one scalar, as cuBLASLt has it."""
    return (decoded(a) @ decoded(b).T * (a.decode * b.decode)).to(torch.bfloat16)
