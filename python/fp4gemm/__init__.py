"""NVFP4 matrix products with all scales in the epilogue: D = cast(act(alpha (amax_b (amax_a A B^T)) + bias)).

    w = fp4gemm.quantize(weight, scaling="tensor")     # (n, k) once
    y = fp4gemm.mm(fp4gemm.quantize(x), w)             # (m, k) per token -> (m, n) bfloat16
    y = fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs), experts)     # tokens of experts, weights (g, n, k)

On CUDA the products run in the kernels that :func:`fp4gemm.kernels` lists; on the CPU in
:mod:`fp4gemm.reference`, which defines the bits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _native, epilogues, reference, selection
from .containers import interop
from .containers.decoded import DecodedTensor
from .containers.fp8 import FP8Tensor
from .containers.mxfp4 import MXFP4Tensor, MXFP4Weight, quantize_mxfp4
from .containers.mxfp8 import MXFP8Tensor, quantize_mxfp8
from .containers.nvfp4 import NVFP4Tensor
from .containers.prepacked import PrepackedTensor, prepack, unprepack
from .device.epilogues import check_epilogue
from .device.selftest import self_test
from .epilogues import epilogue
from .experts import combine, route
from .gemm import mm, scaled_mm
from .grouped import grouped_mm, scaled_grouped_mm
from .integrations import transformers as _transformers  # noqa: F401  # it registers with _changed
from .kernel_table import kernels
from .layout import swizzle_scales, unswizzle_scales
from .producers import (
    rms_norm_quantize,
    rms_norm_quantize_fp8,
    silu_and_mul_quantize,
    silu_and_mul_quantize_fp8,
)
from .products import dgrad, fprop, wgrad
from .quantize import (
    decode,
    dequantize,
    dequantize_parts,
    quantize,
    quantize_both,
    quantize_fp8,
    repeat_columns,
)
from .stacks import concat, stack
from .support import is_supported

if TYPE_CHECKING:
    from . import (
        calibration,
        checkpoint,
        compiler,
        distributed,
        models,
        nn,
        patterns,
        ranks,
        recipe,
        records,
        training,
    )
    from .models import calibrate

    __version__: str

__all__ = [
    "DecodedTensor",
    "FP8Tensor",
    "MXFP4Tensor",
    "MXFP4Weight",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "PrepackedTensor",
    "__version__",
    "calibrate",
    "calibration",
    "check_epilogue",
    "checkpoint",
    "combine",
    "compiler",
    "concat",
    "decode",
    "dequantize",
    "dequantize_parts",
    "dgrad",
    "distributed",
    "epilogue",
    "epilogues",
    "fprop",
    "grouped_mm",
    "interop",
    "is_supported",
    "kernels",
    "mm",
    "models",
    "nn",
    "patterns",
    "prepack",
    "quantize",
    "quantize_both",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "ranks",
    "recipe",
    "records",
    "reference",
    "repeat_columns",
    "rms_norm_quantize",
    "rms_norm_quantize_fp8",
    "route",
    "scaled_grouped_mm",
    "scaled_mm",
    "selection",
    "self_test",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_fp8",
    "stack",
    "swizzle_scales",
    "training",
    "unprepack",
    "unswizzle_scales",
    "wgrad",
]


_ON_FIRST_USE = (
    *("calibration", "checkpoint", "compiler", "distributed", "models"),
    *("nn", "patterns", "ranks", "recipe", "records", "training"),
)


def __getattr__(name: str) -> Any:
    # These modules are imported on first use, which makes the import of fp4gemm faster.
    if name in _ON_FIRST_USE:
        return importlib.import_module(f".{name}", __name__)
    if name == "calibrate":
        return importlib.import_module(".models", __name__).calibrate
    # The version is in the library, which an import of fp4gemm alone does not open.
    if name == "__version__":
        return _native.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are imported on first use."""
    return sorted({*globals(), *__all__})
