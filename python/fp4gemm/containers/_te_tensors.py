"""What NVFP4Tensor of TransformerEngine holds, by the names of its get_metadata(), and what it accepts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..layout import padded_scale_shape

__all__ = ["Parts", "checked_columns", "read", "with_padding", "without_padding"]

_TENSORS = ("data", "scale_inv")
_KNOWN = {
    *(f"{side}_{part}" for side in ("rowwise", "columnwise") for part in _TENSORS),
    *("amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "fake_dtype"),
    *("with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"),
    "per_token",  # of pull request 3045
}


class Parts(NamedTuple):
    """One direction of such a tensor: its tensors, which are not checked, with their names."""

    names: tuple[str, str, str]  # of the codes, the scales and the amax
    codes: object
    scales: object
    amax: object
    is_swizzled: bool
    e4m3_max: int
    hadamard_signs: int | None
    dtype: torch.dtype


def read(tensor: object, columnwise: bool) -> Parts:
    """The rowwise or the columnwise parts of a tensor; all else that it says is checked."""
    get = getattr(tensor, "get_metadata", None)
    held = get() if callable(get) else None
    if not isinstance(held, dict) or "rowwise_data" not in held:
        raise TypeError(
            f"tensor: got {_checks.describe(tensor)}, must be an NVFP4Tensor of TransformerEngine, whose "
            "get_metadata() has 'rowwise_data'"
        )
    for name in held:
        if name not in _KNOWN:
            raise ValueError(f"{name}: is no entry of the metadata that fp4gemm knows")
    side = "columnwise" if columnwise else "rowwise"
    names = (f"{side}_data", f"{side}_scale_inv", f"amax_{side}")
    values = [held.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is None:
            other = "rowwise" if columnwise else "columnwise"
            raise ValueError(
                f"{name}: is None, must be a tensor; columnwise={not columnwise} reads {other}_data"
            )
    data = _checks.is_tensor(names[0], values[0])
    if data.dim() > 2:
        values[0] = data.reshape(-1, data.shape[-1])
    flags = {}
    for name in ("with_gemm_swizzled_scales", "nvfp4_use_4over6", "row_scaled_nvfp4", "per_token"):
        flags[name] = held.get(name, False)
        _checks.is_bool(name, flags[name])
    code_dtype = getattr(held.get("fp4_dtype"), "name", "kFloat4E2M1")
    if code_dtype != "kFloat4E2M1":
        raise ValueError(f"fp4_dtype: got {code_dtype}, must be kFloat4E2M1")
    bound = held.get("nvfp4_e4m3_max", 448)
    _checks.is_one_of("nvfp4_e4m3_max", bound, _checks.E4M3_BOUNDS)
    dtype = held.get("fake_dtype", torch.float32)
    _checks.is_float_dtype("fake_dtype", dtype)
    signs = _signs(held.get("quantizer")) if columnwise else None
    codes, scales, amax = values
    return Parts(names, codes, scales, amax, flags["with_gemm_swizzled_scales"], bound, signs, dtype)


def _signs(quantizer: Any) -> int | None:
    """The signs by which columnwise data are rotated, or None."""
    if quantizer is None:
        raise ValueError(
            "quantizer: is None, must be the NVFP4Quantizer of the tensor, which says whether columnwise "
            "data are rotated"
        )
    if not quantizer.with_rht:
        return None
    signs: int = quantizer.rht_matrix_random_sign_mask_t
    return signs


def without_padding(name: str, value: object, codes: Tensor) -> Tensor:
    """Block scales (n, k/16) of (ceil128(n), ceil4(k/16)), whose padding TransformerEngine does not write."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, _checks.SCALE_DTYPES)
    n, columns = codes.shape[0], codes.shape[1] // 8
    _checks.has_shape(
        name, x, padded_scale_shape(n, 2 * codes.shape[1]), f", those of {n} rows of {columns} blocks"
    )
    _checks.same_device(name, x, codes.device, "the codes")
    return x.view(torch.uint8)[:n, :columns].contiguous().view(torch.float8_e4m3fn)


def with_padding(compact: Tensor) -> Tensor:
    """uint8 (ceil128(n), ceil4(k/16)) of block scales (n, k/16), with zeros beside and below them."""
    n, columns = compact.shape
    rows, width = padded_scale_shape(n, columns * _checks.BLOCK)
    return torch.nn.functional.pad(compact.view(torch.uint8), (0, width - columns, 0, rows - n))


def checked_columns(t: Any, columns: Any) -> Any:
    """Return the operand of the transposed tensor, or raise unless it goes with t."""
    if type(columns) is not type(t):
        raise TypeError(
            f"columnwise: got {_checks.describe(columns)}, must be an fp4gemm.NVFP4Tensor or None"
        )
    m, k = t.shape[-2:]
    if tuple(columns.shape) != (k, m):
        raise ValueError(
            f"columnwise: shape is {tuple(columns.shape)}, must be {(k, m)}, of the transposed tensor"
        )
    for name in ("device", "e4m3_max"):
        got, wanted = getattr(columns, name), getattr(t, name)
        if got != wanted:
            raise ValueError(f"columnwise: {name} is {got}, must be {wanted}, as of the rowwise data")
    return columns
