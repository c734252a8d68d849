"""The fake implementations of the operators: shapes, dtypes and strides of their results, without memory.

Each accepts the parameters of its operator (:mod:`fp4gemm.ops.schema`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks, layout, support
from .._checks import gemm as gemm_checks
from .._checks import linear as linear_checks
from .._checks import moe as moe_checks
from .._checks import ranks as rank_checks
from .._checks import step as step_checks
from ..reference.training import Operators, backward_by, forward_by
from .rank_schema import (
    CombinePartCall,
    CombineRanksCall,
    CombineTreeCall,
    GatherRecordsCall,
    MakeRecordsCall,
    QuantizeRecordsCall,
    RouteRanksCall,
)
from .schema import (
    CombineCall,
    DequantizeCall,
    ExpertsCall,
    GemmCall,
    LinearCall,
    MXFP8DequantizeCall,
    MXFP8QuantizeCall,
    PackedCall,
    QuantizeBothCall,
    QuantizeCall,
    QuantizeDecodedCall,
    QuantizeSearchedCall,
    QuantizeStackCall,
    RmsNormQuantizeCall,
    RouteCall,
    SiluAndMulQuantizeCall,
    UnprepackCall,
    ZeroOutsideGroupsCall,
    accepts,
    accepts_out,
    narrowed,
)
from .train_schema import SwigluBackwardCall, SwigluCall, TrainBackwardCall, TrainForwardCall


@accepts(GemmCall)
def gemm(call: GemmCall) -> Tensor:
    # What the call would be refused for with memory behind the tensors; one on meta brings the others here.
    _checks.same_device("b", call.b, call.a.device, "a")
    _checks.is_float_dtype("out_dtype", call.out_dtype)
    k = _k_of(call.a, call.scale_a)
    n, k_b = call.b_rows, k
    _checks.is_int("b_rows", call.b_rows, 0)
    if call.b_rows:
        gemm_checks.prepacked(call, k)
    else:
        n, k_b = call.b.shape[-2], _k_of(call.b, call.scale_b)
    groups = call.offs.shape[0] if call.offs is not None and gemm_checks.is_ragged_k(call) else None
    shape = gemm_checks.product_shape(call.a.shape[0], k, n, k_b, groups, call.out_dtype)
    support.warn_untested(call.a)
    activation = gemm_checks.activation_of_number(call.activation)
    return call.a.new_empty((*shape[:-1], activation.width(shape[-1])), dtype=call.out_dtype)


@accepts_out
def gemm_out(call: GemmCall, out: Tensor) -> None:
    support.warn_untested(call.a)


@accepts(LinearCall)
def linear(call: LinearCall) -> Tensor:
    shape = linear_checks.checked(call)
    support.warn_untested(call.x)
    return call.x.new_empty(shape.out, dtype=shape.dtype)


def _k_of(data: Tensor, scale: Tensor | None) -> int:
    return data.shape[-1] * (1 if scale is None else 2)


def _parts(
    x: Tensor, rows: int, columns: int, amax: int | tuple[int, int], offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and amax of a quantized (rows, columns) tensor on the device of x."""
    scale_rows, scale_columns = _checks.padded_scale_shape(rows, columns)
    if offs is not None:
        scale_rows = layout.grouped_scale_rows(rows, offs.shape[0])
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty((scale_rows, scale_columns), dtype=torch.float8_e4m3fn),
        x.new_empty((amax,) if isinstance(amax, int) else amax, dtype=torch.float32),
    )


@accepts(QuantizeCall)
def quantize(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    x, offs = call.x, call.offs
    m = x.shape[0] if call.rows is None else call.rows.shape[0]
    rows, columns = (m, x.shape[1]) if call.axis == -1 else (x.shape[1], m)
    made: int | tuple[int, int] = rows if call.per_row else 1
    if call.axis == 0 and offs is not None:
        groups = offs.shape[0]
        columns, offs = layout.grouped_columns(columns, groups), None
        made = (groups, rows) if call.per_row else groups
    expanded = offs is not None and not call.per_row  # one amax a group, repeated for its rows
    made = rows if expanded else made
    return _parts(x, rows, columns, made if call.amax is None or expanded else 0, offs)


@accepts(QuantizeBothCall)
def quantize_both(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        *quantize(call.x, call.amax, call.per_row, offs=call.offs),
        *quantize(call.x, call.amax_t, call.per_row, axis=0, offs=call.offs),
    )


@accepts(QuantizeDecodedCall)
def quantize_decoded(call: Any) -> tuple[Tensor, Tensor]:
    codes, _, made = quantize(*narrowed(QuantizeCall, call))
    return call.x.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16), made


@accepts(QuantizeSearchedCall)
def quantize_searched(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    return quantize(call.x, call.amax, call.per_row)


@accepts(QuantizeStackCall)
def quantize_stack(call: QuantizeStackCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = call.x
    g, n, k = x.shape

    def side(is_wanted: bool, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        count = g if is_wanted else 0
        scales = (count, *_checks.padded_scale_shape(rows, columns))
        return (
            x.new_empty((count, rows, columns // 2), dtype=torch.uint8),
            x.new_empty(scales, dtype=torch.float8_e4m3fn),
        )

    amaxes = 0 if call.amax is not None else g
    made = x.new_empty((amaxes, k) if call.per_row else (amaxes,), dtype=torch.float32)
    return *side(call.rows, n, k), *side(call.columns, k, n), made


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    m, two_k = call.x.shape
    return _parts(call.x, m, two_k // 2, m, call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_decoded(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    x = call.x
    m, two_k = x.shape
    return x.new_empty((m, two_k // 2), dtype=torch.float16), x.new_empty((m,), dtype=torch.float32)


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = call.x.shape
    return *_parts(call.x, m, k, m, None), call.x.new_empty((0,) if call.residual is None else (m, k))


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_decoded(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    *_, amax, summed = rms_norm_quantize(*call)
    return call.x.new_empty(call.x.shape, dtype=torch.float16), amax, summed


@accepts(DequantizeCall)
def dequantize(call: DequantizeCall) -> Tensor:
    codes = call.codes
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=call.dtype)


@accepts(MXFP8QuantizeCall)
def mxfp8_quantize(call: MXFP8QuantizeCall) -> tuple[Tensor, Tensor]:
    x = call.x
    m, k = x.shape if call.axis == -1 else (x.shape[1], x.shape[0])
    shape = _checks.mxfp8_scale_shape(m, k, call.swizzled)
    return x.new_empty((m, k), dtype=call.dtype), x.new_empty(shape, dtype=torch.float8_e8m0fnu)


@accepts(MXFP8DequantizeCall)
def mxfp8_dequantize(call: MXFP8DequantizeCall) -> Tensor:
    return call.values.new_empty(call.values.shape, dtype=call.dtype)


@accepts(PackedCall)
def decode(call: PackedCall) -> Tensor:
    codes = call.codes
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16)


@accepts(PackedCall)
def prepack(call: PackedCall) -> Tensor:
    *stack, n, half_k = call.codes.shape
    return call.codes.new_empty((*stack, _checks.prepacked_bytes(n, 2 * half_k)))


@accepts(UnprepackCall)
def unprepack(call: UnprepackCall) -> tuple[Tensor, Tensor]:
    packed, n, k = call
    stack = packed.shape[:-1]
    scales = packed.new_empty((*stack, *_checks.padded_scale_shape(n, k)), dtype=torch.float8_e4m3fn)
    return packed.new_empty((*stack, n, k // 2)), scales


@accepts(RouteCall)
def route(call: RouteCall) -> tuple[Tensor, Tensor, Tensor]:
    ids = moe_checks.topk_ids(call.topk_ids)
    experts = moe_checks.num_experts(call.num_experts)
    t, top_k = ids.shape
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in ((experts,), (t * top_k,), (t, top_k)))  # type: ignore[return-value]


@accepts(CombineCall)
def combine(call: CombineCall) -> Tensor:
    y, rows = call.y, call.row_of_pair
    dtype = moe_checks.combine(y, rows, call.topk_weights, call.out_dtype, "fp4gemm.combine")
    return y.new_empty((rows.shape[0], y.shape[1]), dtype=dtype)


@accepts(ZeroOutsideGroupsCall)
def zero_outside_groups(call: ZeroOutsideGroupsCall) -> None:
    moe_checks.zero_outside_groups(call)


@accepts(ExpertsCall)
def experts(call: ExpertsCall) -> Tensor:
    moe_checks.experts(call)
    support.warn_untested(call.x)
    return call.x.new_empty(call.x.shape)


@accepts(TrainForwardCall)
def train_forward(call: TrainForwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_by(call, Operators(quantize, quantize_decoded, gemm))


@accepts(TrainBackwardCall)
def train_backward(call: TrainBackwardCall) -> tuple[Tensor, Tensor]:
    return backward_by(call, Operators(quantize, quantize_decoded, gemm))


@accepts(SwigluCall)
def swiglu(call: SwigluCall) -> Tensor:
    gate, _, _ = step_checks.swiglu(call)
    return gate.new_empty(gate.shape)


@accepts(SwigluBackwardCall)
def swiglu_backward(call: SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    gate, _, weights = step_checks.swiglu_backward(call)
    sums = 0 if weights is None else gate.shape[0]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(sums, dtype=torch.float32)


@accepts(QuantizeRecordsCall)
def quantize_records(call: QuantizeRecordsCall) -> None:
    rank_checks.quantize_records(call)


@accepts(MakeRecordsCall)
def make_records(call: MakeRecordsCall) -> None:
    rank_checks.make_records(call)


@accepts(GatherRecordsCall)
def gather_records(call: GatherRecordsCall) -> tuple[Tensor, Tensor, Tensor]:
    records = rank_checks.gather_records(call)
    m = call.rows.shape[0]
    return _parts(records[0], m, call.k, m, call.offs)


@accepts(RouteRanksCall)
def route_ranks(call: RouteRanksCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids, capacity = call.topk_ids, call.capacity
    shapes = ((rank_checks.route_ranks(call),), (capacity,), (capacity,), tuple(ids.shape), (2,))
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)  # type: ignore[return-value]


@accepts(CombineRanksCall)
def combine_ranks(call: CombineRanksCall) -> Tensor:
    dtype = rank_checks.combine_ranks(call)
    return call.row_of_pair.new_empty((call.row_of_pair.shape[0], call.y[0].shape[1]), dtype=dtype)


@accepts(CombinePartCall)
def combine_part(call: CombinePartCall) -> None:
    rank_checks.combine_part(call)


@accepts(CombineTreeCall)
def combine_tree(call: CombineTreeCall) -> Tensor:
    parts = rank_checks.combine_tree(call)
    return parts[0].new_empty((call.topk_ids.shape[0], parts[0].shape[1]), dtype=call.out_dtype)
