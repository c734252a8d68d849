"""What the cases of bad_cases.py start from: calls that are right, ways to spoil a tensor, the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, layout, reference

M, N, K = 33, 24, 64


class Case(NamedTuple):
    """``function``, called with ``base()`` changed by ``change``, raises ``error``."""

    function: str
    kind: str
    change: Callable[[], dict[str, Any]]
    error: type[Exception]
    says: str  # a part of the text, after the name
    name: str  # the argument that the text names


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def quantized(rows: int = M, k: int = K, device: str = "cpu") -> NVFP4Tensor:
    return fp4gemm.quantize(ones(rows, k)).to(device)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, 8 bytes past a multiple of 16."""
    buffer = torch.empty(x.nbytes + 16, dtype=torch.uint8)
    start = 8 if buffer.data_ptr() % 16 == 0 else 16
    view = buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
    view.view(torch.uint8).copy_(x.view(torch.uint8))
    return view


def every_other(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype with every stride doubled."""
    wide = torch.zeros([2 * size for size in x.shape], dtype=x.dtype)
    return wide[tuple(slice(None, None, 2) for _ in x.shape)]


def grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


A, B = quantized(), quantized(N)
SPARSE = ones(M, K).to_sparse()

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "quantize": (fp4gemm.quantize, lambda: {"x": ones(M, K), "scaling": "row"}),
    "dequantize": (fp4gemm.dequantize, lambda: {"t": A, "dtype": torch.float32}),
    "decode": (fp4gemm.decode, lambda: {"t": A}),
    "mm": (
        fp4gemm.mm,
        lambda: {"a": A, "b": B, "bias": None, "out_dtype": None, "out": None, "kernel": None},
    ),
    "scaled_mm": (
        fp4gemm.scaled_mm,
        lambda: {
            "a": A.codes,
            "b": B.codes,
            "scale_a": A.scales,
            "scale_b": B.scales,
            "alpha": 1.0,
            "alpha_row": A.amax,
            "alpha_col": B.amax,
            "bias": None,
            "out_dtype": None,
            "out": None,
            "kernel": None,
        },
    ),
    "NVFP4Tensor": (
        NVFP4Tensor,
        lambda: {"codes": A.codes, "scales": A.scales, "amax": A.amax, "e4m3_max": 448},
    ),
    "NVFP4Tensor.from_compact": (
        NVFP4Tensor.from_compact,
        lambda: {"codes": A.codes, "compact_scales": A.compact_scales(), "amax": A.amax, "e4m3_max": 448},
    ),
    "NVFP4Tensor.dequantize": (A.dequantize, lambda: {"dtype": torch.float32}),
    "NVFP4Tensor.to": (A.to, lambda: {"device": "cpu"}),
    "DecodedTensor": (
        DecodedTensor,
        lambda: {"data": fp4gemm.decode(A).data, "amax": A.amax, "e4m3_max": 448},
    ),
    "DecodedTensor.to": (fp4gemm.decode(A).to, lambda: {"device": "cpu"}),
    "swizzle_scales": (fp4gemm.swizzle_scales, lambda: {"compact": A.compact_scales()}),
    "unswizzle_scales": (fp4gemm.unswizzle_scales, lambda: {"swizzled": A.scales, "r": M, "c": K // 16}),
    "scale_offset": (layout.scale_offset, lambda: {"r": 0, "c": 0, "num_columns": 4}),
    "is_supported": (fp4gemm.is_supported, lambda: {"device": None}),
    "reference.quantize": (reference.quantize, lambda: {"x": ones(M, K), "per_row": True}),
    "reference.dequantize": (
        reference.dequantize,
        lambda: {
            "codes": A.codes,
            "scales": A.scales,
            "amax": A.amax,
            "e4m3_max": 448,
            "dtype": torch.float32,
        },
    ),
    "reference.decode": (reference.decode, lambda: {"codes": A.codes, "scales": A.scales}),
    "reference.scaled_mm": (
        reference.scaled_mm,
        lambda: {
            "a": A.codes,
            "b": B.codes,
            "scale_a": A.scales,
            "scale_b": B.scales,
            "alpha": 1.0,
            "alpha_row": A.amax,
            "alpha_col": B.amax,
            "bias": None,
            "out_dtype": torch.bfloat16,
        },
    ),
    "reference.encode_e2m1": (reference.encode_e2m1, lambda: {"x": ones(4)}),
    "reference.encode_e4m3": (reference.encode_e4m3, lambda: {"x": ones(4)}),
    "reference.decode_e2m1": (reference.decode_e2m1, lambda: {"codes": A.codes}),
}


def complaint(case: Case) -> str | None:
    """What is wrong with the way a case fails; None when it fails as it should."""
    function, base = FUNCTIONS[case.function]
    try:
        function(**{**base(), **case.change()})
    except case.error as error:
        text = str(error)
        if type(error) is not case.error:
            return f"raised {type(error).__name__}, a subclass of {case.error.__name__}"
        if not text.startswith(f"{case.name}: "):
            return f"the text does not start with '{case.name}: ': {text}"
        return None if case.says in text else f"the text lacks {case.says!r}: {text}"
    except Exception as error:
        return f"raised {type(error).__name__} instead of {case.error.__name__}: {error}"
    return "raised nothing"
