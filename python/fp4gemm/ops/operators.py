"""The torch operators themselves: loads the native library and registers the implementations of the families.

Schemas and CUDA kernels come from libfp4gemm_torch.so, built once against torch's stable ABI; an operator may
have its CUDA implementation in Python instead. The CPU
implementation is the reference, or compiled code with the same bits; the fake ones give shapes and dtypes to
torch.compile and torch.export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import _native, reference
from . import convert, epilogue, fp8, moe, mx, producers, ranks, train
from . import gemm as gemm_ops
from . import linear as linear_ops
from . import quantize as quantize_ops
from ._call import Operator

OPERATORS: dict[str, Operator] = {
    name: operator
    for family in (
        gemm_ops,
        epilogue,
        linear_ops,
        quantize_ops,
        fp8,
        producers,
        convert,
        mx,
        moe,
        ranks,
        train,
    )
    for name, operator in family.OPERATORS.items()
}


def _load() -> None:
    path = _native.library_path(_native.TORCH_LIBRARY)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"fp4gemm: cannot load {path} under torch {torch.__version__} (2.11 or newer is needed): {error}"
        ) from error


def _tag_compiled_graphs() -> None:
    """Put a digest of the operators into the keys of torch's caches of compiled graphs.

    The key of a graph names its operators, but neither their schemas nor their fake implementations. Without
    the digest, a process would take graphs from the cache that another version of this library compiled, and
    call the operators with the arguments of that version. A tag that the user has set stays in the key. In
    torch 2.13 a tag belongs to the thread that sets it.
    """
    digest = hashlib.sha256()
    for name in sorted(OPERATORS):
        digest.update(str(getattr(torch.ops.fp4gemm, name).default._schema).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    config = torch.compiler.config
    config.cache_key_tag = f"{config.cache_key_tag}fp4gemm {digest.hexdigest()[:16]};"


def below_wrapper(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The callable below the Python wrapper of an operator; a tracer must be given the wrapper."""
    return getattr(operator, "_op", operator)


_load()
_tag_compiled_graphs()

# Kept alive: deleting it would remove the registrations.
_CPU = torch.library.Library("fp4gemm", "IMPL", "CPU")
_CUDA = torch.library.Library("fp4gemm", "IMPL", "CUDA")
for _name, _operator in OPERATORS.items():
    _CPU.impl(_name, _operator.cpu)
    if _operator.cuda is not None:
        _CUDA.impl(_name, _operator.cuda)
    torch.library.register_fake(f"fp4gemm::{_name}", _operator.fake)
    if _operator.flops is not None:
        register_flop_formula(getattr(torch.ops.fp4gemm, _name), get_raw=True)(_operator.flops)

reference.register(
    {name: operator.reference for name, operator in OPERATORS.items()}
    | {"activate": gemm_ops.activate, "rms_norm": producers.rms_norm, "silu_and_mul": producers.silu_and_mul}
)

# The overloads, bound once: an attribute walk through torch.ops costs about a microsecond a call.
combine = torch.ops.fp4gemm.combine.default
combine_part = torch.ops.fp4gemm.combine_part.default
combine_ranks = torch.ops.fp4gemm.combine_ranks.default
combine_tree = torch.ops.fp4gemm.combine_tree.default
decode = torch.ops.fp4gemm.decode.default
dequantize = torch.ops.fp4gemm.dequantize.default
experts = torch.ops.fp4gemm.experts.default
gather_records = torch.ops.fp4gemm.gather_records.default
gemm = torch.ops.fp4gemm.gemm.default
gemm_epilogue = torch.ops.fp4gemm.gemm_epilogue.default
gemm_epilogue_out = torch.ops.fp4gemm.gemm_epilogue_out.default
gemm_out = torch.ops.fp4gemm.gemm_out.default
linear = torch.ops.fp4gemm.linear.default
make_records = torch.ops.fp4gemm.make_records.default
mxfp4_dequantize = torch.ops.fp4gemm.mxfp4_dequantize.default
mxfp4_quantize = torch.ops.fp4gemm.mxfp4_quantize.default
mxfp8_dequantize = torch.ops.fp4gemm.mxfp8_dequantize.default
mxfp8_quantize = torch.ops.fp4gemm.mxfp8_quantize.default
prepack = torch.ops.fp4gemm.prepack.default
quantize = torch.ops.fp4gemm.quantize.default
quantize_both = torch.ops.fp4gemm.quantize_both.default
quantize_decoded = torch.ops.fp4gemm.quantize_decoded.default
quantize_fp8 = torch.ops.fp4gemm.quantize_fp8.default
quantize_records = torch.ops.fp4gemm.quantize_records.default
quantize_searched = torch.ops.fp4gemm.quantize_searched.default
quantize_stack = torch.ops.fp4gemm.quantize_stack.default
rms_norm_quantize = torch.ops.fp4gemm.rms_norm_quantize.default
rms_norm_quantize_decoded = torch.ops.fp4gemm.rms_norm_quantize_decoded.default
rms_norm_quantize_fp8 = torch.ops.fp4gemm.rms_norm_quantize_fp8.default
route = torch.ops.fp4gemm.route.default
route_ranks = torch.ops.fp4gemm.route_ranks.default
silu_and_mul_quantize = torch.ops.fp4gemm.silu_and_mul_quantize.default
silu_and_mul_quantize_decoded = torch.ops.fp4gemm.silu_and_mul_quantize_decoded.default
silu_and_mul_quantize_fp8 = torch.ops.fp4gemm.silu_and_mul_quantize_fp8.default
swiglu = torch.ops.fp4gemm.swiglu.default
swiglu_backward = torch.ops.fp4gemm.swiglu_backward.default
train_backward = torch.ops.fp4gemm.train_backward.default
train_forward = torch.ops.fp4gemm.train_forward.default
unprepack = torch.ops.fp4gemm.unprepack.default
zero_outside_groups = torch.ops.fp4gemm.zero_outside_groups.default
