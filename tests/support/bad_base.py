"""The base of the cases of bad_cases.py: calls that are right, ways to spoil a tensor, and the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import torch
from fp4gemm import DecodedTensor, MXFP4Tensor, MXFP8Tensor, NVFP4Tensor, layout, reference
from fp4gemm.ops.options import OPTIONS
from fp4gemm.ops.quantize import QuantizeCall

M, N, K = 33, 24, 64
TYPE, VALUE, NOT = TypeError, ValueError, NotImplementedError


class Case(NamedTuple):
    """A call of ``function`` with the arguments of ``base()``, changed by ``change``, raises ``error``."""

    function: str
    kind: str
    change: Callable[[], dict[str, Any]]
    error: type[Exception]
    says: str  # a part of the message, after the name
    name: str  # the argument that the message names


class Cases(list[Case]):
    """A list of cases, with methods that append to it."""

    def add(
        self,
        functions: str,
        argument: str,
        kind: str,
        make: Callable[[], Any],
        error: type[Exception],
        says: str,
        name: str = "",
    ) -> None:
        """Adds one wrong argument for each of the functions, whose names are separated by spaces."""
        for function in functions.split():
            self.append(
                Case(
                    function, f"{argument}-{kind}", lambda: {argument: make()}, error, says, name or argument
                )
            )

    def add_together(
        self,
        functions: str,
        kind: str,
        make: Callable[[], dict[str, Any]],
        error: type[Exception],
        says: str,
        name: str,
    ) -> None:
        """Adds arguments that do not go together; ``kind`` starts with the one that the message names."""
        for function in functions.split():
            self.append(Case(function, kind, make, error, says, name))


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def half(*shape: int) -> torch.Tensor:
    return ones(*shape, dtype=torch.float16)


def quantized(rows: int = M, k: int = K, device: str = "cpu", rotated: bool = False) -> NVFP4Tensor:
    return fp4gemm.quantize(ones(rows, k), hadamard="bf16" if rotated else None).to(device)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that starts 8 bytes past a multiple of 16."""
    buffer = torch.empty(x.nbytes + 16, dtype=torch.uint8)
    start = 8 if buffer.data_ptr() % 16 == 0 else 16
    view = buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
    view.view(torch.uint8).copy_(x.view(torch.uint8))
    return view


def with_byte(scales: torch.Tensor, byte: int) -> torch.Tensor:
    """Block scales with this byte in row 1, column 2."""
    changed = scales.view(torch.uint8).clone()
    changed[1, 2] = byte
    return changed


def every_other(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype with every stride doubled."""
    wide = torch.zeros([2 * size for size in x.shape], dtype=x.dtype)
    return wide[tuple(slice(None, None, 2) for _ in x.shape)]


def grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def ends(*values: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


A, B = quantized(), quantized(N)
SCALAR = fp4gemm.quantize(ones(M, K), scaling="tensor")
GROUPED = fp4gemm.quantize(ones(M, K), offs=ends(5, M))
ROTATED = fp4gemm.quantize(ones(M, K), scaling="tensor", hadamard="bf16")
E, E4 = fp4gemm.quantize_mxfp8(ones(M, K)), fp4gemm.quantize_mxfp4(ones(M, K))
SPARSE = ones(M, K).to_sparse()
STATE = torch.tensor([1, 2])
OPERATOR_OPTIONS: dict[str, Any] = {
    "per_row": True,
    **{
        name: value
        for name, value in QuantizeCall._field_defaults.items()
        if name not in ("axis", "offs", "rows", "residual_channels")
    },
}
QUANTIZER_OPTIONS: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
TERMS: dict[str, Any] = {
    "bias": None,
    "activation": None,
    "c": None,
    "beta": 1.0,
    "out_dtype": None,
    "out": None,
    "batch_invariant": False,
    "use_fast_accum": False,
    "kernel": None,
    "epilogue": None,
}

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "quantize": (
        fp4gemm.quantize,
        lambda: {
            "x": ones(M, K),
            "axis": -1,
            "amax": None,
            "offs": None,
            "rows": None,
            "residual_channels": None,
            "scale_search": None,
            "importance": None,
            "decoded": False,
            **QUANTIZER_OPTIONS,
        },
    ),
    "quantize_both": (
        fp4gemm.quantize_both,
        lambda: {"x": ones(48, K), "amax": None, "amax_t": None, "offs": None, **QUANTIZER_OPTIONS},
    ),
    "silu_and_mul_quantize": (
        fp4gemm.silu_and_mul_quantize,
        lambda: {"x": ones(M, K, dtype=torch.float16), "offs": None, "decoded": False},
    ),
    "rms_norm_quantize": (
        fp4gemm.rms_norm_quantize,
        lambda: {
            "x": ones(M, K, dtype=torch.float16),
            "weight": None,
            "eps": 1e-6,
            "residual": None,
            "decoded": False,
        },
    ),
    "quantize_mxfp4": (
        fp4gemm.quantize_mxfp4,
        lambda: {"x": ones(M, K), "axis": -1, "scale": "floor", "swizzled": True, "offs": None},
    ),
    "quantize_mxfp8": (
        fp4gemm.quantize_mxfp8,
        lambda: {"x": ones(M, K), "axis": -1, "dtype": torch.float8_e4m3fn, "swizzled": True, "offs": None},
    ),
    "dequantize_parts": (
        fp4gemm.dequantize_parts,
        lambda: {
            "codes": A.codes,
            "scales": A.scales,
            "amax": A.amax,
            "e4m3_max": 448,
            "dtype": torch.float32,
            "swizzled": True,
        },
    ),
    "dequantize": (fp4gemm.dequantize, lambda: {"t": A, "dtype": torch.float32}),
    "decode": (fp4gemm.decode, lambda: {"t": A}),
    "mm": (
        fp4gemm.mm,
        lambda: {"a": A, "b": B, **TERMS},
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
            **TERMS,
        },
    ),
    "NVFP4Tensor": (
        NVFP4Tensor,
        lambda: {
            "codes": A.codes,
            "scales": A.scales,
            "amax": A.amax,
            "e4m3_max": 448,
            "offs": None,
            "hadamard_signs": None,
            "offs_dim": 0,
        },
    ),
    "NVFP4Tensor.from_modelopt": (
        NVFP4Tensor.from_modelopt,
        lambda: {**SCALAR.to_modelopt(), "e4m3_max": 448},
    ),
    "NVFP4Tensor.from_compressed_tensors": (
        NVFP4Tensor.from_compressed_tensors,
        lambda: {**SCALAR.to_compressed_tensors(), "e4m3_max": 448},
    ),
    "NVFP4Tensor.from_flashinfer": (
        NVFP4Tensor.from_flashinfer,
        lambda: {
            "codes": SCALAR.codes,
            "scales": SCALAR.scales,
            "global_scale": SCALAR.encode_scale(),
            "e4m3_max": 448,
        },
    ),
    "NVFP4Tensor.from_mxfp4": (
        NVFP4Tensor.from_mxfp4,
        lambda: {
            "codes": A.codes.view(M, K // 32, 16),
            "scales": torch.full((M, K // 32), 120, dtype=torch.uint8),
            "scaling": "row",
            "inexact": "error",
            "report": None,
        },
    ),
    "NVFP4Tensor.from_torchao": (
        NVFP4Tensor.from_torchao,
        lambda: {
            "qdata": SCALAR.codes,
            "scale": SCALAR.compact_scales(),
            "per_tensor_scale": SCALAR.decode_multiplier(),
            "is_swizzled_scales": False,
            "e4m3_max": 448,
        },
    ),
    "MXFP8Tensor": (
        MXFP8Tensor,
        lambda: {"values": E.values, "scales": E.scales, "swizzled": True, "offs": None, "offs_dim": 0},
    ),
    "MXFP4Tensor": (
        MXFP4Tensor,
        lambda: {"codes": E4.codes, "scales": E4.scales, "swizzled": True, "offs": None, "offs_dim": 0},
    ),
    "MXFP4Tensor.from_weight": (MXFP4Tensor.from_weight, lambda: E4.to_weight()._asdict()),
    "MXFP4Tensor.dequantize": (E4.dequantize, lambda: {"dtype": torch.float32}),
    "MXFP4Tensor.to": (E4.to, lambda: {"device": "cpu"}),
    "MXFP8Tensor.dequantize": (E.dequantize, lambda: {"dtype": torch.float32}),
    "MXFP8Tensor.to": (E.to, lambda: {"device": "cpu"}),
    "NVFP4Tensor.from_compact": (
        NVFP4Tensor.from_compact,
        lambda: {"codes": A.codes, "compact_scales": A.compact_scales(), "amax": A.amax, "e4m3_max": 448},
    ),
    "NVFP4Tensor.dequantize": (A.dequantize, lambda: {"dtype": torch.float32}),
    "NVFP4Tensor.to": (A.to, lambda: {"device": "cpu"}),
    "DecodedTensor": (
        DecodedTensor,
        lambda: {
            "data": fp4gemm.decode(A).data,
            "amax": A.amax,
            "e4m3_max": 448,
            "hadamard_signs": None,
            "offs": None,
            "offs_dim": 0,
        },
    ),
    "stack": (fp4gemm.stack, lambda: {"tensors": [A, A]}),
    "concat": (fp4gemm.concat, lambda: {"tensors": [A, B]}),
    "DecodedTensor.to": (fp4gemm.decode(A).to, lambda: {"device": "cpu"}),
    "swizzle_scales": (fp4gemm.swizzle_scales, lambda: {"compact": A.compact_scales()}),
    "unswizzle_scales": (fp4gemm.unswizzle_scales, lambda: {"swizzled": A.scales, "r": M, "c": K // 16}),
    "scale_offset": (layout.scale_offset, lambda: {"r": 0, "c": 0, "num_columns": 4}),
    "is_supported": (fp4gemm.is_supported, lambda: {"device": None}),
    "reference.quantize": (
        reference.quantize,
        lambda: {"x": ones(M, K), "amax": None, "axis": -1, "offs": None, "rows": None, **OPERATOR_OPTIONS},
    ),
    "reference.quantize_both": (
        reference.quantize_both,
        lambda: {"x": ones(48, K), "amax": None, "amax_t": None, **OPERATOR_OPTIONS},
    ),
    "reference.quantize_searched": (
        reference.quantize_searched,
        lambda: {
            "x": ones(M, K),
            "amax": None,
            "importance": None,
            "per_row": True,
            "block_rows": 1,
            "e4m3_max": 448,
        },
    ),
    "reference.quantize_stack": (
        reference.quantize_stack,
        lambda: {
            "x": ones(2, 48, K),
            "amax": None,
            "rows": True,
            "columns": True,
            **OPERATOR_OPTIONS,
            "per_row": False,
            "block_rows": 16,
        },
    ),
    "reference.silu_and_mul": (
        reference.silu_and_mul,
        lambda: {"x": ones(M, K, dtype=torch.float16)},
    ),
    "reference.silu_and_mul_quantize": (
        reference.silu_and_mul_quantize,
        lambda: {"x": ones(M, K, dtype=torch.float16), "offs": None},
    ),
    "reference.rms_norm": (
        reference.rms_norm,
        lambda: {"x": ones(M, K, dtype=torch.float16), "weight": None, "residual": None, "eps": 1e-6},
    ),
    "reference.rms_norm_quantize": (
        reference.rms_norm_quantize,
        lambda: {"x": ones(M, K, dtype=torch.float16), "weight": None, "residual": None, "eps": 1e-6},
    ),
    "reference.mxfp8_quantize": (
        reference.mxfp8_quantize,
        lambda: {"x": ones(M, K), "axis": -1, "dtype": torch.float8_e4m3fn, "swizzled": True, "offs": None},
    ),
    "reference.mxfp4_quantize": (
        reference.mxfp4_quantize,
        lambda: {"x": ones(M, K), "axis": -1, "ceil": False, "swizzled": True, "offs": None},
    ),
    "reference.mxfp4_dequantize": (
        reference.mxfp4_dequantize,
        lambda: {
            "codes": E4.codes,
            "scales": E4.scales,
            "dtype": torch.float32,
            "swizzled": True,
            "offs": None,
        },
    ),
    "reference.mxfp8_dequantize": (
        reference.mxfp8_dequantize,
        lambda: {
            "values": E.values,
            "scales": E.scales,
            "dtype": torch.float32,
            "swizzled": True,
            "offs": None,
        },
    ),
    "reference.dequantize": (
        reference.dequantize,
        lambda: {
            "codes": A.codes,
            "scales": A.scales,
            "amax": A.amax,
            "e4m3_max": 448,
            "dtype": torch.float32,
            "swizzled": True,
            "offs": None,
        },
    ),
    "reference.decode": (reference.decode, lambda: {"codes": A.codes, "scales": A.scales}),
    "reference.gemm": (
        reference.gemm,
        lambda: {
            "a": A.codes,
            "b": B.codes,
            "scale_a": A.scales,
            "scale_b": B.scales,
            "alpha_row": A.amax,
            "alpha_col": B.amax,
        },
    ),
    "reference.encode_e2m1": (reference.encode_e2m1, lambda: {"x": ones(4)}),
    "reference.encode_e4m3": (reference.encode_e4m3, lambda: {"x": ones(4)}),
    "reference.encode_e8m0": (reference.encode_e8m0, lambda: {"x": ones(4)}),
    "reference.decode_e2m1": (reference.decode_e2m1, lambda: {"codes": A.codes}),
}


def complaint(case: Case) -> str | None:
    """Describes how the failure of a case differs from what it should be; None if it does not."""
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
