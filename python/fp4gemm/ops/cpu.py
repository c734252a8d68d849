"""The CPU implementations of ``quantize`` and ``quantize_decoded``: compiled code where it applies.

cpp/torch/quantize_cpu.cpp has the loops. It quantizes rows with encode te and blocks of one row, with or
without four over six; the reference, whose bits are the same, does everything else. The threads are those of
torch (``torch.set_num_threads``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks, _native, reference
from ..layout import padded_scale_shape
from ..reference import checks
from ..reference.chunks import gathered
from ..reference.grouped import Groups
from ..reference.nvfp4 import check_amax, outer_amax
from .schema import QuantizeCall, QuantizeDecodedCall, accepts, narrowed

__all__ = ["quantize", "quantize_decoded"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # at the numbers of the C functions
_COMPILED: dict[str, object] = {  # the only values with compiled code
    "axis": -1,
    "block_rows": 1,
    "encode": 0,
    "hadamard": 0,
    "signs": 0,
    "rng_state": None,
}


@accepts(QuantizeCall)
def quantize(call: QuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4gemm.reference.quantize`, compiled where it applies; the bits are the same."""
    if not _applies(call):
        return reference.quantize(*call)
    x, amax, stored, groups = _prepared(call)
    m, k = x.shape
    codes = torch.empty((m, k // 2), dtype=torch.uint8)
    shape = padded_scale_shape(m, k) if groups is None else groups.scale_shape(k // _checks.BLOCK)
    scales = torch.zeros(shape, dtype=torch.uint8)
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
    data = torch.empty(x.shape, dtype=torch.float16)
    num_rows = x.shape[0] if groups is None else groups.num_rows
    _run(with_codes, x, num_rows, amax, None, None, None, data.data_ptr())
    data[num_rows:] = 0
    return data, stored


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
    result = torch.empty(x.shape[0], dtype=torch.float32)
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
        raise RuntimeError("fp4gemm: torch could not run the CPU quantizer on its threads")
