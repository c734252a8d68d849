"""The CPU implementations of the operators that quantize or multiply: compiled code where it applies.

cpp/torch/quantize_cpu.cpp quantizes rows with encode te and blocks of one row, with or without four over six,
decode_cpu.cpp decodes, quantize_search_cpu.cpp searches for scales, and gptq_cpu.cpp rounds a block of GPTQ.
The reference, whose bits are the same, does everything else, and it composes the operators that do both. The
threads are those of torch (``torch.set_num_threads``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks, _native, reference
from .._checks import ranks as rank_checks
from ..layout import padded_scale_shape
from ..reference import checks
from ..reference.chunks import fp32, gathered, row_chunks
from ..reference.epilogue import Epilogue
from ..reference.gemm import Operand, gemm_by
from ..reference.gptq import E4M3_BOUND
from ..reference.grouped import Groups
from ..reference.linear import linear_by
from ..reference.moe import experts_by
from ..reference.nvfp4 import check_amax, outer_amax
from ..reference.training import Operators, backward_by, forward_by
from .rank_schema import QuantizeRecordsCall
from .schema import (
    DequantizeCall,
    ExpertsCall,
    GemmCall,
    LinearCall,
    QuantizeCall,
    QuantizeDecodedCall,
    QuantizeSearchedCall,
    RmsNormQuantizeCall,
    SiluAndMulQuantizeCall,
    accepts,
    accepts_out,
    narrowed,
)
from .train_schema import TrainBackwardCall, TrainForwardCall

__all__ = [
    "GptqBlocks",
    "dequantize",
    "experts",
    "gemm",
    "gemm_out",
    "linear",
    "quantize",
    "quantize_decoded",
    "quantize_records",
    "quantize_searched",
    "rms_norm_quantize",
    "rms_norm_quantize_decoded",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_decoded",
    "train_backward",
    "train_forward",
]

# Elements of a right operand that are decoded at a time: 2 MB as float64, which stay in the cache until they
# are multiplied.
_DECODED_ELEMS = 1 << 18

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # at the numbers of the C functions
_COMPILED: dict[str, object] = {  # the only values with compiled code
    "axis": -1,
    "block_rows": 1,
    "encode": 0,
    "hadamard": 0,
    "signs": 0,
    "rng_state": None,
    "headroom": 1.0,
}


@accepts(QuantizeCall)
def quantize(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.quantize`, compiled where it applies; the bits are the same."""
    if not _applies(call):
        return reference.quantize(*call)
    x, amax, stored, groups = _prepared(call)
    m, k = x.shape
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device="cpu")
    shape = padded_scale_shape(m, k) if groups is None else groups.scale_shape(k // _checks.BLOCK)
    scales = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    num_rows = m if groups is None else groups.num_rows
    place = None if groups is None else groups.place.data_ptr()
    _run(call, x, num_rows, amax, codes.data_ptr(), scales.data_ptr(), place, None)
    codes[num_rows:] = 0
    return codes, scales.view(torch.float8_e4m3fn), stored


@accepts(QuantizeDecodedCall)
def quantize_decoded(call: Any) -> tuple[Tensor, Tensor]:
    """:func:`fp4gemm.reference.quantize_decoded`, compiled where it applies; the bits are the same."""
    with_codes = narrowed(QuantizeCall, call)
    if not _applies(with_codes):
        return reference.quantize_decoded(*call)
    x, amax, stored, groups = _prepared(with_codes)
    data = torch.empty(x.shape, dtype=torch.float16, device="cpu")
    num_rows = x.shape[0] if groups is None else groups.num_rows
    _run(with_codes, x, num_rows, amax, None, None, None, data.data_ptr())
    data[num_rows:] = 0
    return data, stored


@accepts(QuantizeRecordsCall)
def quantize_records(call: QuantizeRecordsCall) -> None:
    """:func:`fp4gemm.reference.quantize_records`, compiled where it applies; the bits are the same."""
    if call.rng_state is not None or call.headroom != 1.0:
        reference.quantize_records(*call)
        return
    rank_checks.quantize_records(call)
    options = {name: getattr(call, name) for name in ("four_over_six", "fast_error", "e4m3_max")}
    reference.make_records(*quantize(call.x, None, True, **options), call.out)


@accepts(QuantizeSearchedCall)
def quantize_searched(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.quantize_searched`, compiled; the bits are the same."""
    checks.searched(call)
    x, amax, h = call.x, call.amax, call.importance
    stored = x.new_empty(0, dtype=torch.float32)
    if amax is None:
        amax = stored = outer_amax(_row_amax(x), call.per_row, None)
    m, k = x.shape
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device="cpu")
    scales = torch.zeros(padded_scale_shape(m, k), dtype=torch.uint8, device="cpu")
    _succeeded(
        _native.torch_library().fp4gemm_torch_quantize_searched(
            x.data_ptr(), _DTYPES.index(x.dtype), m, k, x.stride(0),
            amax.data_ptr(), int(call.per_row), None if h is None else h.data_ptr(),
            call.block_rows, call.e4m3_max, codes.data_ptr(), scales.data_ptr(),
        )
    )  # fmt: skip
    return codes, scales.view(torch.float8_e4m3fn), stored


class GptqBlocks:
    """:class:`fp4gemm.reference.gptq.GptqBlocks`, compiled; the bits are the same.

    Args:
        amax: as there.
    """

    def __init__(self, amax: Tensor) -> None:
        self._amax = amax.contiguous()

    def __call__(self, w: Tensor, rows: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Round a block of each weight; arguments and results as there."""
        g, _, n = w.shape
        w, rows, cost = w.contiguous(), rows.contiguous(), cost.contiguous()
        codes, differences = torch.empty_like(w, dtype=torch.uint8), torch.empty_like(w)
        scales = w.new_empty((g, n), dtype=torch.uint8)
        round_block = _native.torch_library().fp4gemm_torch_gptq_block
        for e in range(g):
            _succeeded(
                round_block(
                    w[e].data_ptr(), n, rows[e].data_ptr(), cost[e].data_ptr(),
                    self._amax[e].data_ptr(), int(self._amax.shape[1] != 1), E4M3_BOUND,
                    codes[e].data_ptr(), scales[e].data_ptr(), differences[e].data_ptr(),
                )
            )  # fmt: skip
        return codes, scales, differences


@accepts(DequantizeCall)
def dequantize(call: DequantizeCall) -> Tensor:
    """:func:`fp4gemm.reference.dequantize`, compiled for swizzled scales without groups."""
    given = (call.codes, call.scales, call.amax)
    if call.offs is not None or call.swizzled is not True or not all(map(_on_cpu, given)):
        return reference.dequantize(*call)
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    scales = _checks.scales("scales", call.scales, m, k, codes.device, "codes")
    amax = _checks.vector("amax", call.amax, m, codes.device, "codes")
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_float_dtype("dtype", call.dtype)
    inverse = float(torch.div(fp32(1.0, codes.device), fp32(6.0 * call.e4m3_max, codes.device)))
    out = torch.empty((m, k), dtype=call.dtype, device="cpu")
    for i, j in row_chunks(m, k):
        is_wide = call.dtype is torch.float32
        values = out[i:j] if is_wide else amax.new_empty((j - i, k))
        rows = amax if amax.shape[0] == 1 else amax[i:j]
        _decode(codes[i:j], scales, i, values, rows, inverse)
        if not is_wide:
            out[i:j] = values
    return out


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.silu_and_mul_quantize`."""
    return quantize(reference.silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_decoded(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    """:func:`fp4gemm.reference.silu_and_mul_quantize_decoded`."""
    return quantize_decoded(reference.silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.rms_norm_quantize`."""
    y, summed = reference.rms_norm(*call)
    return *quantize(y, None, True), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_decoded(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.rms_norm_quantize_decoded`."""
    y, summed = reference.rms_norm(*call)
    return *quantize_decoded(y, None, True), summed


@accepts(GemmCall)
def gemm(call: GemmCall) -> Tensor:
    """:func:`fp4gemm.reference.gemm`, whose right operand is decoded a part at a time."""
    return gemm_by(call, None, _multiply)


@accepts_out
def gemm_out(call: GemmCall, out: Tensor) -> None:
    """:func:`fp4gemm.reference.gemm_out`, in the same way."""
    gemm_by(call, out, _multiply)


@accepts(LinearCall)
def linear(call: LinearCall) -> Tensor:
    """:func:`fp4gemm.reference.linear` of the functions above."""
    return linear_by(call, quantize, gemm)


@accepts(ExpertsCall)
def experts(call: ExpertsCall) -> Tensor:
    """:func:`fp4gemm.reference.experts` of the functions above."""
    return experts_by(call, quantize_decoded, gemm)


@accepts(TrainForwardCall)
def train_forward(call: TrainForwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.train_forward` of the functions above."""
    return forward_by(call, Operators(quantize, quantize_decoded, gemm))


@accepts(TrainBackwardCall)
def train_backward(call: TrainBackwardCall) -> tuple[Tensor, Tensor]:
    """:func:`fp4gemm.reference.train_backward` of the functions above."""
    return backward_by(call, Operators(quantize, quantize_decoded, gemm))


def _multiply(out: Tensor, a: Operand, b: Operand, terms: Epilogue) -> None:
    """:func:`fp4gemm.reference.gemm.multiply`, the same sums of the same products in float64."""
    m, n = a[0].shape[0], b[0].shape[0]
    k = a[0].shape[1] * (1 if a[1] is None else 2)
    step = max(1, _DECODED_ELEMS // k)
    for i, j in row_chunks(m, max(n, k)):
        left = _wide(a, i, j)
        acc = torch.empty((j - i, n), dtype=torch.float32, device="cpu")
        for first in range(0, n, step):
            last = min(first + step, n)
            acc[:, first:last] = torch.mm(left, _wide(b, first, last).t())
        part = terms.rows(i, j)
        out[i:j] = part.finished(part.scaled(acc))


def _wide(operand: Operand, begin: int, end: int) -> Tensor:
    """Return the values of rows begin .. end-1 of an operand, float64 (end - begin, k)."""
    data, scales = operand
    rows = data[begin:end]
    if scales is None:
        return rows.to(torch.float64)
    result = torch.empty((end - begin, 2 * rows.shape[1]), dtype=torch.float64, device="cpu")
    _decode(rows, scales, begin, result)
    return result


def _decode(
    codes: Tensor,
    scales: Tensor,
    first_row: int,
    out: Tensor,
    amax: Tensor | None = None,
    inverse: float = 0.0,
) -> None:
    """Write q * s to out, float64; or with the amax of each row or of all, q * (s * A * inverse), float32.

    codes are rows from first_row on, and scales those of the whole matrix.
    """
    codes = codes.contiguous()
    is_wide = amax is None
    _succeeded(
        _native.torch_library().fp4gemm_torch_decode_matrix(
            codes.data_ptr(), codes.stride(0), scales.data_ptr(), first_row, *out.shape,
            None if amax is None else amax.data_ptr(), int(amax is not None and amax.shape[0] != 1), inverse,
            out.data_ptr() if is_wide else None, None if is_wide else out.data_ptr(),
        )
    )  # fmt: skip


def _applies(call: QuantizeCall) -> bool:
    """Return whether there is compiled code for the options and for memory like that of x."""
    x = call.x
    return (
        all(type(getattr(call, name)) is type(value) for name, value in _COMPILED.items())
        and all(getattr(call, name) == value for name, value in _COMPILED.items())
        and all(each is None or _on_cpu(each) for each in (call.amax, call.offs, call.rows))
        and _on_cpu(x)
        and x.dim() == 2
    )


def _on_cpu(x: object) -> bool:
    return _checks.has_memory(x) and isinstance(x, Tensor) and x.device.type == "cpu"


def _prepared(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor, Groups | None]:
    """Check a call as the reference does; return x with its rows gathered, A, the result amax, the groups."""
    _checks.quantize_input(call.x)
    checks.options(call)
    if call.rows is not None:
        call = call._replace(x=gathered(call.x, call.rows), rows=None)
    x, amax = call.x, call.amax
    groups = None if call.offs is None else Groups(call.offs, x.shape[0], x.device)
    check_amax("amax", call, groups)
    if amax is None:
        amax = outer_amax(_row_amax(x), call.per_row, groups)
    elif groups is not None and not call.per_row:
        amax = groups.expand(amax)
    else:
        return x, amax.contiguous(), amax.new_empty(0), groups
    return x, amax, amax, groups


def _row_amax(x: Tensor) -> Tensor:
    result = torch.empty(x.shape[0], dtype=torch.float32, device="cpu")
    _succeeded(
        _native.torch_library().fp4gemm_torch_row_amax(
            x.data_ptr(), _DTYPES.index(x.dtype), *x.shape, x.stride(0), result.data_ptr()
        )
    )
    return result


def _run(
    call: QuantizeCall,
    x: Tensor,
    num_rows: int,
    amax: Tensor,
    codes: int | None,
    scales: int | None,
    scale_rows: int | None,
    decoded: int | None,
) -> None:
    """Quantize the first rows of x with the options of a call. The results are addresses."""
    stride = 0 if amax.shape[0] == 1 else 1
    _succeeded(
        _native.torch_library().fp4gemm_torch_quantize_matrix(
            x.data_ptr(), _DTYPES.index(x.dtype), num_rows, x.shape[1], x.stride(0),
            amax.data_ptr(), stride, codes, scales, scale_rows, decoded,
            call.four_over_six, call.fast_error, call.e4m3_max,
        )
    )  # fmt: skip


def _succeeded(status: int) -> None:
    if status != 0:
        raise RuntimeError("fp4gemm: torch could not run a loop on its threads")
