"""From the tensors of a checkpoint, checked while an engine loads them, to those that the operators read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ... import _checks, _values, support
from ...checkpoint.formats import FORMATS, FormatName
from ...containers.nvfp4 import NVFP4Tensor
from ...containers.prepacked import prepack
from ...nn._inputs import OUT_STEP, check_float_weight, k_step
from ...ops.parts import OperandParts
from ...recipe import Activations, DataFree, StoredActivations, as_quantizer
from ...support import TokenForm

__all__ = [
    "NOT_LOADED",
    "NO_SCALE",
    "assembled",
    "check_sizes",
    "checked_loader",
    "experts_text",
    "hold",
    "input_amax",
    "quantized",
]

# What codes hold before they are loaded: pairs of -0. No quantizer writes them for all of a weight whose amax
# is positive: the code of its largest element is not zero.
NOT_LOADED = 0x88
# What scales of a power of two, e8m0, hold before they are loaded: NaN.
NO_SCALE = 0xFF
_MX = "; scales of uint8, one for 32 elements, are mxfp4's, and the checkpoint says that it is NVFP4"
_MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)


def check_sizes(name: str, n: int, k: int, activations: StoredActivations) -> None:
    """Raise ValueError unless the kernels read a weight (n, k) of one rank beside such inputs."""
    for what, size, step in (("k", k, k_step(activations)), ("n", n, OUT_STEP)):
        if size % step:
            is_fp8 = what == "k" and size % _checks.K_STEP_MM == 0
            raise ValueError(
                f"{name}: {what} is {size} on this rank, must be a multiple of {step}"
                + (f" with activations {activations!r}" if is_fp8 else "")
                + "; use another tensor parallel size, "
                + ("activations 'a16', 'per-token' or 'auto', " if is_fp8 else "")
                + "or name the layer in the option ignore (FP4GEMM_SERVING_IGNORE)"
            )


def checked_loader(
    loader: Callable[..., Any], name: str, dtypes: Sequence[torch.dtype], columns: Sequence[int] | None
) -> Callable[..., Any]:
    """The engine's loader of a parameter, after a check of the tensor of the checkpoint.

    Args:
        loader: called with (parameter, tensor, ...), as every loader of vLLM and SGLang is.
        name: the name of the parameter, for messages.
        dtypes: those that the tensor may have. A copy between others would convert, silently.
        columns: the sizes that its last dimension may have; None: the tensor holds one number.

    Returns:
        A function with the signature and the attributes of ``loader``. It raises TypeError or ValueError,
        which name the tensor, its dtype or shape, and what it must be.
    """

    @functools.wraps(loader)
    def load(param: Any, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if loaded_weight.dtype not in dtypes:
            hint = _MX if torch.float8_e4m3fn in dtypes and loaded_weight.dtype in _MX_SCALES else ""
            raise TypeError(f"{name}: dtype is {loaded_weight.dtype}, must be {_listing(dtypes)}{hint}")
        shape = tuple(loaded_weight.shape)
        if columns is not None and (not shape or shape[-1] not in columns):
            wanted = " or ".join(map(str, dict.fromkeys(columns)))
            raise ValueError(f"{name}: shape is {shape}, must have {wanted} columns")
        try:
            return loader(param, loaded_weight, *args, **kwargs)
        except (AssertionError, IndexError, RuntimeError) as error:
            about = f": {error}" if str(error) else ""
            raise ValueError(
                f"{name}: shape is {shape}, must fit the parameter {tuple(param.shape)} of this rank{about}"
            ) from error

    return load


def _listing(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(str, dtypes))


def assembled(
    name: str,
    format: FormatName,
    codes: Tensor,
    block_scales: Tensor,
    outer: Tensor,
    partition_rows: Sequence[int],
    e4m3_max: int = 448,
) -> NVFP4Tensor:
    """The weight of a layer, exact whatever the outer scales of its partitions are.

    Args:
        name: the name of the layer, for messages.
        format: the format of the checkpoint; :mod:`fp4gemm.checkpoint.formats` says what its numbers mean.
        codes: uint8 (n, k/2), or (g, n, k/2) of experts, :data:`NOT_LOADED` where none were loaded. The
            result shares its memory.
        block_scales: float8_e4m3fn (.., n, k/16), NaN where none was loaded.
        outer: float32 (p,) or (g, p), one for each partition, or (n,) in the fp4gemm format; NaN where none
            was loaded.
        partition_rows: the rows of each of the p partitions.
        e4m3_max: the bound of the block scales.

    Raises:
        ValueError: codes or a scale are missing, an outer scale is no number that one can be, or a block
            scale has its sign bit set. The text names it.

    Synchronises, to look at them.
    """
    names = FORMATS[format]
    missing = outer.isnan()
    if bool(missing.any()):
        where = _where(missing, partition_rows)
        raise ValueError(f"{name}.{names.outer_scale}: is missing in the checkpoint{where}")
    # The checkpoint may say that a weight is all zero; ModelOpt then writes block scales that are NaN.
    amax = names.amax_of(outer, e4m3_max)
    wrong = outer.signbit() | ~amax.isfinite()
    if bool(wrong.any()):
        number = outer[wrong][0].item()
        where = _where(wrong, partition_rows)
        raise ValueError(f"{name}.{names.outer_scale}: holds {number}, must be finite and positive{where}")
    if amax.shape[-1] > 1 and amax.shape[-1] != codes.shape[-2]:
        parts = [amax[..., i : i + 1].expand(*amax.shape[:-1], rows) for i, rows in enumerate(partition_rows)]
        amax = torch.cat(parts, -1)
    is_zero = amax == 0
    bits = block_scales.view(torch.uint8)
    bits = torch.where(is_zero.unsqueeze(-1), torch.zeros_like(bits), bits) if bool(is_zero.any()) else bits
    not_loaded = ((bits & 0x7F) == 0x7F).flatten(-2).any(-1)
    if bool(not_loaded.any()):
        which = experts_text(not_loaded) if not_loaded.dim() else ""
        raise ValueError(
            f"{name}.{names.block_scales}: holds NaN{which}, must be numbers; the checkpoint has no block "
            "scales for all of these rows, or lists the layer as quantized and stores it in 16 bits"
        )
    _values.check_block_scales(f"{name}.{names.block_scales}", bits)
    least, most = torch.aminmax(codes, dim=-1)
    empty = (least == NOT_LOADED) & (most == NOT_LOADED) & ~is_zero
    unloaded = torch.stack([part.all(-1) for part in empty.split(list(partition_rows), -1)], -1)
    if bool(unloaded.any()):
        where = _where(unloaded, partition_rows)
        raise ValueError(f"{name}.{names.codes}: is missing in the checkpoint{where}, which has its scales")
    return NVFP4Tensor._of_compact(codes, bits.view(torch.float8_e4m3fn), amax.contiguous(), e4m3_max)


def quantized(name: str, weight: Tensor, method: DataFree, activations: Activations) -> NVFP4Tensor:
    """The weight (n, k) or (g, n, k) with an amax for each row; raises for NaN and infinity, by name."""
    check_float_weight(name, weight, tuple(weight.shape))
    return cast(NVFP4Tensor, as_quantizer(method, "row", activations)(weight))


def hold(weight: NVFP4Tensor, tokens: TokenForm) -> OperandParts:
    """The tensors of a weight as the kernels of its device read them.

    The weight is prepacked on compute capability 9.0, for FP8 tokens in their own order (int8 bytes), and on
    12.0 and 12.1 for 16-bit tokens.

    Prepacked bytes are a copy, as large as codes and scales together; the caller frees those.
    """
    if support.streams_prepacked(weight.device, tokens):
        held = prepack(weight, fp8=tokens == "fp8")._operand_parts()
        torch.cuda.synchronize(held.data.device)  # kernels may read it before the one that wrote it has ended
        return held
    return weight._operand_parts()


def input_amax(name: str, format: FormatName, scales: Tensor | None) -> Tensor:
    """The amax, float32 (1,), of static activations: the largest of those of the fused layers.

    Args:
        scales: float32 (p,), the outer scales of the activations of each partition; NaN where none was
            loaded. None: the checkpoint has none.

    Raises:
        ValueError: one is missing, or is not positive and finite. Synchronises.
    """
    names = FORMATS[format]
    if scales is None or bool(scales.isnan().any()):
        raise ValueError(
            f"{name}.{names.input_scale}: is missing in the checkpoint, must be there with activations "
            "'static'; 'per-token' needs none"
        )
    wrong = ~((scales > 0) & scales.isfinite())
    if bool(wrong.any()):
        number = scales[wrong][0].item()
        raise ValueError(f"{name}.{names.input_scale}: holds {number}, must be positive and finite")
    return names.amax_of(scales, 448).max().reshape(1)


def _where(wrong: Tensor, partition_rows: Sequence[int]) -> str:
    """Name the experts and partitions of outer scales, (p,) or (g, p), that are wrong, for a message."""
    parts = []
    if wrong.dim() > 1:
        parts.append(experts_text(wrong.any(-1)).strip())
        wrong = wrong.any(0)
    if len(partition_rows) > 1 and wrong.numel() == len(partition_rows):
        listed = ", ".join(str(i) for i in wrong.nonzero().flatten().tolist())
        parts.append(f"for the fused layers {listed} of {len(partition_rows)}")
    return "".join(f" {part}" for part in parts)


def experts_text(wrong: Tensor) -> str:
    """Name the experts of this rank for which (g,) is true, for a message; the text begins with a blank."""
    listed = wrong.nonzero().flatten().tolist()
    shown = ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
    return f" for the experts {shown} of this rank"
