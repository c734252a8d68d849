"""MXFP8 weights, e4m3 values with a power of two for 32 elements: as miles writes them, and in a mix.

In a whole checkpoint every weight of at least two dimensions whose k is a multiple of 32 is packed, unless
its name has one of :data:`KEPT`. ``X.weight`` becomes e4m3 values of the same shape, and
``X.weight_scale_inv`` has the e8m0 bytes, uint8 (..., k/32), in plain order; in spite of its name it
multiplies.

Source: radixark/miles (``tools/convert_hf_to_mxfp8.py``, ``miles/utils/mxfp8.py``), which quantizes by the
MXFP8Quantizer of TransformerEngine, whose bits :func:`fp4gemm.quantize_mxfp8` has.

In a mix a layer has the same values, and its scale is ``weight_scale``. Sources: vLLM
(``layers/quantization/modelopt.py``: ``quant_algo`` "MXFP8", uint8 ``weight_scale`` (n, k/32), or
``weight_scale_inv`` in some checkpoints), compressed-tensors ("mxfp8-quantized": groups of 32 with
``scale_dtype`` torch.uint8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..._checks import describe, listing
from ..._formats import MXFP8 as OPERAND
from ...containers.mxfp8 import MXFP8Tensor, quantize_mxfp8
from ...reference.formats import decode_e8m0
from .base import FormatName, Json
from .layers import LayerFormat
from .packed import FLOATS, PackedFormat, Stored
from .sources import Described

__all__ = ["KEPT", "MXFP8", "MXFP8_LAYER"]

WEIGHT, SCALES = ".weight", ".weight_scale_inv"  # the ends of names
BLOCK = OPERAND.block
# A tensor whose name has one of these stays, as in miles.
KEPT = (
    *("layernorm", "embed", "router", "mlp.gate.", "norm", "lm_head", "eh_proj", "weights_proj", "head."),
    *("wo_a", "ffn.gate.", "compressor."),
)
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "mxfp8",
    "weight_block_size": [1, BLOCK],
    "scale_fmt": "ue8m0",
}


def _why_kept(name: str, info: Described) -> str:
    if not name.endswith(WEIGHT):
        return f"its name does not end in {WEIGHT}"
    part = next((part for part in KEPT if part in name), None)
    if part is not None:
        return f"its name has {part!r}"
    if info.dtype not in FLOATS:
        return f"its dtype is {info.dtype}, must be {', '.join(FLOATS)}"
    if len(info.shape) < 2:
        return "vector"
    if info.shape[-1] % BLOCK:
        return f"k is {info.shape[-1]}, must be a multiple of {BLOCK}"
    return ""


def _choose(config: Json, tensors: Mapping[str, Described]) -> set[str]:
    found = {name for name, info in tensors.items() if not _why_kept(name, info)}
    if not found:
        raise ValueError(f"has no weight (n, k) with k a multiple of {BLOCK}, must have one to be mxfp8")
    return found


def _stored(name: str, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    scales = f"{name.removesuffix(WEIGHT)}{SCALES}"
    return (name, "F8_E4M3", shape), (scales, "U8", (*shape[:-1], shape[-1] // BLOCK))


def _pack(weight: Tensor, scale: str) -> tuple[Tensor, ...]:
    made = quantize_mxfp8(weight.reshape(-1, weight.shape[-1]), swizzled=False)
    scales = made.scales.view(*weight.shape[:-1], weight.shape[-1] // BLOCK)
    return made.values.view(weight.shape), scales


def _config(kept: Iterable[str], layers: Sequence[str]) -> Json:
    """The config; experts that stay are not named one by one, as in miles."""
    modules = {
        name.removesuffix(WEIGHT) for name in kept if name.endswith(WEIGHT) and ".experts." not in name
    }
    ordered = sorted({*modules, *layers}, key=_natural)
    return {**CONFIG, **({"modules_to_not_convert": ordered} if ordered else {})}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A key by which numbers in names are ordered as numbers."""
    return [(not t.isdigit(), int(t) if t.isdigit() else 0, t) for t in re.findall(r"\d+|\D+", name)]


def _read(config: Json, where: str) -> None:
    """Raise ValueError unless this is the config of such a checkpoint.

    The tensors say which modules stay in float, whatever the key that other producers list them under.
    """
    known = {*CONFIG, "modules_to_not_convert", "ignored_layers"}
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: {key} is not known, must be {listing(sorted(known))}")
    for key, wanted in CONFIG.items():
        if config.get(key) != wanted:
            raise ValueError(f"{where}: {key} is {describe(config.get(key))}, must be {wanted!r} of mxfp8")


def _shape(format: FormatName, n: int, k: int) -> tuple[int, ...]:
    return (n, k // BLOCK)


def _expand(scale: Tensor, n: int, k: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, 1)


def _numbers(scale: Tensor) -> Tensor:
    return decode_e8m0(scale.view(torch.uint8))


def _operand(codes: Tensor, scale: Tensor) -> MXFP8Tensor:
    return MXFP8Tensor._of_compact(codes.contiguous(), scale.contiguous().view(torch.uint8))


_GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK}
MXFP8_LAYER = LayerFormat(
    name="mxfp8",
    title="MXFP8",
    algorithms=("MXFP8",),
    scales=("weight_scale", "weight_scale_inv"),
    has_input_scale=False,
    scale_shape=_shape,
    expand=_expand,
    weights=_GROUPS,
    inputs={**_GROUPS, "dynamic": True, "symmetric": True, "scale_dtype": "torch.uint8"},
    quantize=None,
    packing="mxfp8-quantized",
    scale_dtypes=("U8", "F8_E8M0"),
    numbers=_numbers,
    activations="mxfp8",
    operand=_operand,
)

MXFP8 = PackedFormat(
    name="mxfp8",
    scales_by=("ceil",),
    choose=_choose,
    why_kept=_why_kept,
    stored=_stored,
    pack=_pack,
    has_layers=True,
    config=_config,
    read=_read,
    layer="mxfp8",
)
