"""Quantizing the weights of a checkpoint with the numerics of one of three producers, bit for bit.

In all of them w ~ q * s * A / 6B, and they differ in how s and q are rounded. fl(.) is one rounding to
float32, T(.) one to the dtype of the weight, A the amax of the set of weights that share it, and a_b that of
a block of 16::

    te             S = min(fl(2688 / A), FMAX)            s = e4m3(min(fl(a_b fl(S fl(1/6))), FMAX))
                   q = e2m1(fl(w min(fl(1 / fl(s fl(1 / S))), FMAX)))                       outer: A
    modelopt       d = fl(A / 2688)                       s = e4m3(min(max(fl(a_b / fl(6 d)), 2^-9), 448))
                   q = e2m1(fl(w / fl(s d)))              s of a block of zeros: 1          outer: d
    llmcompressor  G = T(T(1 / A) * 2688)                 s = e4m3(min(fl(G T(a_b / 6)), 448))
                   q = e2m1(fl(w / fl(s / G)))            s where that is 0: 0.125          outer: G
                   A is at least the smallest normal number of T, and G is 1 where it would be infinite

``te`` is :func:`fp4gemm.quantize`, the bits of TransformerEngine >= 2.14; it alone has other methods than
rounding and an amax for each row. ``modelopt`` is NVFP4QTensor.quantize of ModelOpt 0.47 on a CPU, which
divides (on a GPU torch multiplies by fl(1 / 2688), so that d differs by 1 ulp for some A).
``llmcompressor`` is model_free_ptq of llm-compressor 0.14 with the scheme NVFP4A16; for float16
weights with an amax below 0.041 its G is infinite in float16 and becomes 1. Codes are rounded to nearest,
ties to even, in all three; -0 keeps its sign (code 8) in te and has code 0 in the others.

An all-zero weight: te gives codes and block scales 0. ModelOpt gives it NaN block scales, which make NaN
weights in some loaders; here it gets what te gives. llm-compressor gives it G = 1 and block scales 0.125.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .. import _checks
from ..calibration.statistics import InputStatistics
from ..quantize import quantize
from ..recipe import USES_DATA, Numerics, Quantizer, Recipe
from ..reference.chunks import fp32
from ..reference.formats import encode_e4m3
from .formats import FORMATS, FormatName, StoredWeight

__all__ = ["Calibrated", "quantize_calibrated", "quantize_set"]

_CHUNK_ELEMS = 1 << 17  # elements that are quantized at a time, so that temporaries stay in a cache
_HALVES = 1.5 * 2**22  # float32 numbers near this are 0.5 apart


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A stored weight, and what its method did otherwise than asked for, in words."""

    weight: StoredWeight
    notes: tuple[str, ...] = ()


def quantize_set(
    weights: Mapping[str, Tensor],
    recipe: Recipe | None = None,
    *,
    format: FormatName,
    shared_amax: bool = True,
) -> dict[str, StoredWeight]:
    """Quantize weights that share an amax, such as those of q, k and v, or gate and up.

    Args:
        weights: bfloat16, float16 or float32 (n, k) each, by the names that errors use; k is a multiple of
            16, the same in all if they share an amax, and so are dtype and device. Strides are free.
        recipe: the numerics, the scaling and a method that needs no data; None is
            ``Recipe(weight_scaling="tensor")``.
        format: of the result. Every numerics goes with every format: where it is not the producer's own, the
            outer scale is converted (:meth:`StoredWeight.as_format`).
        shared_amax: one A for all weights; False: each has its own. With weight_scaling "row" each row has
            its own.

    Returns:
        The stored weights, by the same names, on the device of each. The bits do not depend on the device.
        Peak memory beside the results: some tens of megabytes. Synchronises on a GPU.

    Raises:
        TypeError, ValueError: a weight of another type, dtype or shape, or one that holds NaN or infinity;
            the weights of a set differ in dtype or device; weight_scaling "row" in a format that cannot hold
            it; a method that needs statistics. The text begins with the name of the weight or argument.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise TypeError(f"weights: got {_checks.describe(weights)}, must be a mapping of names to tensors")
    recipe = Recipe(weight_scaling="tensor") if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: got {_checks.describe(recipe)}, must be a fp4gemm.recipe.Recipe")
    if recipe.method in USES_DATA:
        raise ValueError(f"method: got {recipe.method!r}, must be one that needs no statistics")
    made = quantize_calibrated(weights, {}, recipe, format=format, shared_amax=shared_amax)
    return {name: each.weight for name, each in made.items()}


def quantize_calibrated(
    weights: Mapping[str, Tensor],
    statistics: Mapping[str, InputStatistics],
    recipe: Recipe,
    *,
    format: FormatName,
    shared_amax: bool = True,
) -> dict[str, Calibrated]:
    """:func:`quantize_set` with the methods "search" and "gptq" too.

    Args:
        statistics: those of the input of each weight, by the same names, on its device; of experts with few
            tokens completed already. Methods without data need none.
        weights, recipe, format, shared_amax: as for quantize_set.

    Returns:
        The stored weights with notes. The bits of "gptq" depend on the device and on the number of its
        threads, but not on the weights beside it.
    """
    _checks.is_one_of("format", format, tuple(FORMATS))
    _checks.is_bool("shared_amax", shared_amax)
    if recipe.weight_scaling == "row" and not FORMATS[format].has_row_scales:
        raise ValueError(f"weight_scaling: got 'row', must be 'tensor' for the {format} format")
    amaxes = {name: _checked_amax(name, w) for name, w in weights.items()}
    if shared_amax and amaxes:
        first = next(iter(weights))
        for name, w in weights.items():
            for what, mine, theirs in (
                ("dtype", w.dtype, weights[first].dtype),
                ("device", w.device, weights[first].device),
            ):
                if mine != theirs:
                    raise ValueError(f"{name}: {what} is {mine}, must be {theirs} as of {first}")
        shared = torch.stack(list(amaxes.values())).amax(0)
        amaxes = dict.fromkeys(weights, shared)
    if recipe.method in USES_DATA:
        found = _by_statistics(weights, statistics, amaxes, recipe)
    else:
        found = {name: Calibrated(_quantized(w, amaxes[name], recipe)) for name, w in weights.items()}
    return {
        name: dataclasses.replace(made, weight=made.weight.as_format(format)) for name, made in found.items()
    }


def _by_statistics(
    weights: Mapping[str, Tensor],
    statistics: Mapping[str, InputStatistics],
    amaxes: Mapping[str, Tensor],
    recipe: Recipe,
) -> dict[str, Calibrated]:
    """Quantize by "search" or "gptq". Weights that read one input, as q, k and v do, are rounded as one."""
    groups: list[list[str]] = []
    for name in weights:
        if groups and amaxes[name] is amaxes[groups[-1][0]] and _equal(statistics, name, groups[-1][0]):
            groups[-1].append(name)
        else:
            groups.append([name])
    found: dict[str, Calibrated] = {}
    for names in groups:
        w = torch.cat([weights[name].detach() for name in names])
        quantizer = Quantizer(recipe)
        amax = None if recipe.weight_scaling == "row" else amaxes[names[0]]
        made = StoredWeight.of(quantizer.made(w, statistics[names[0]], amax), "fp4gemm")
        begin = 0
        for name in names:
            rows = slice(begin, begin + weights[name].shape[0])
            found[name] = Calibrated(made.rows(rows), tuple(quantizer.notes))
            begin = rows.stop
    return found


def _equal(statistics: Mapping[str, InputStatistics], a: str, b: str) -> bool:
    x, y = statistics[a], statistics[b]
    pairs = ((x.mean_square, y.mean_square), (x.second_moment, y.second_moment))
    return all(
        u is v or (u is not None and v is not None and u.shape == v.shape and torch.equal(u, v))
        for u, v in pairs
    )


def _checked_amax(name: str, w: object) -> Tensor:
    """The amax A of a weight, float32 (1,), after all checks of the weight."""
    x = _checks.is_tensor(name, w)
    _checks.has_dtype(name, x, _checks.FLOAT_DTYPES)
    _checks.has_rank(name, x, 2, "(n, k)")
    _checks.is_multiple(name, "k", x.shape[1], _checks.BLOCK)
    if x.numel() == 0:
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must have elements")
    low, high = x.detach().aminmax()
    amax = torch.maximum(low.abs(), high.abs()).to(torch.float32).view(1)
    if not bool(amax.isfinite()):
        bad = ~x.detach().isfinite()
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name}: element ({row}, {column}) is {x[row, column].item()}, and {int(bad.sum())} of "
            f"{x.numel()} are NaN or infinite; must be finite"
        )
    return amax


def _quantized(w: Tensor, amax: Tensor, recipe: Recipe) -> StoredWeight:
    """The stored weight in the format of the producer itself."""
    w = w.detach()
    if recipe.numerics == "llmcompressor":
        scale = _global_scale(amax, w.dtype)
        return StoredWeight(*_blocks(w, scale, recipe.numerics), scale, "compressed-tensors")
    if recipe.numerics == "modelopt" and bool(amax != 0):
        scale = torch.div(amax, fp32(2688.0, w.device))
        return StoredWeight(*_blocks(w, scale, recipe.numerics), scale, "modelopt")
    per_row = recipe.weight_scaling == "row"
    keywords = recipe.weight_keywords if recipe.numerics == "te" else {"scaling": recipe.weight_scaling}
    t = quantize(w, amax=None if per_row else amax, **keywords)
    return StoredWeight.of(t, "fp4gemm")


def _global_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """G of llm-compressor, which computes it in the dtype of the weight; float32 (1,)."""
    least = amax.clamp(min=torch.finfo(dtype).tiny)
    reciprocal = torch.div(torch.ones_like(least), least).to(dtype).to(torch.float32)
    scale = (reciprocal * 2688.0).to(dtype).to(torch.float32)
    return torch.where(scale.isfinite(), scale, torch.ones_like(scale))


def _blocks(w: Tensor, outer: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Codes and block scales of ModelOpt with outer scale d, or of llm-compressor with G."""
    n, k = w.shape
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
    scales = torch.empty((n, k // _checks.BLOCK), dtype=torch.float8_e4m3fn, device=w.device)
    for rows in _chunks(n, k):
        x = w[rows].to(torch.float32).contiguous().view(-1, k // _checks.BLOCK, _checks.BLOCK)
        # Magnitudes order as their bits do, of which torch finds the largest in 0.4 of the time.
        amax = (x.view(torch.int32) & 0x7FFFFFFF).amax(2).view(torch.float32)
        scale = _modelopt(amax, outer) if numerics == "modelopt" else _llmcompressor(amax, outer, w.dtype)
        scales[rows] = scale
        wide = scale.to(torch.float32)
        step = wide * outer if numerics == "modelopt" else torch.div(wide, outer)
        codes[rows] = packed_codes(torch.div(x, step.unsqueeze(2)).view(-1, k))
    return codes, scales


def packed_codes(y: Tensor) -> Tensor:
    """e2m1 codes uint8 (m, k/2) of float32 (m, k), nearest, ties to even, saturating; -0 has code 0, NaN 7.

    The codes are those of :func:`fp4gemm.reference.formats.encode_e2m1` but for -0, in operations that torch
    vectorises: below 2, where values are 0.5 apart, an addition rounds; above, code 4 + i has the bits of its
    float32 without the lower 22, which integers round.
    """
    a = y.abs()
    bits = a.view(torch.int32)
    odd = (bits >> 22).bitwise_and_(1)
    upper = odd.add_(bits).add_(0x1FFFFF).bitwise_right_shift_(22).sub_(252)
    origin = torch.tensor(_HALVES, dtype=torch.float32).view(torch.int32).item()
    lower = a.add_(_HALVES).view(torch.int32).sub_(int(origin)).clamp_(max=4)
    code = torch.maximum(lower, upper, out=upper).clamp_(max=7).to(torch.uint8)
    code += (y < 0).view(torch.uint8) << 3
    pairs = code.view(torch.int16)  # the code of the even k is the lower byte
    return ((pairs >> 4) | pairs).to(torch.uint8)


def _modelopt(amax: Tensor, outer: Tensor) -> Tensor:
    scale = torch.div(amax, outer * 6.0)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return encode_e4m3(scale.clamp(min=2.0**-9))


def _llmcompressor(amax: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    local = torch.div(amax, fp32(6.0, amax.device)).to(dtype).to(torch.float32)
    scale = encode_e4m3(outer * local)
    eighth = torch.full_like(local, 0.125).to(torch.float8_e4m3fn)
    return torch.where(scale.to(torch.float32) == 0, eighth.view(torch.uint8), scale.view(torch.uint8)).view(
        torch.float8_e4m3fn
    )


def _chunks(n: int, k: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMS // k)
    for begin in range(0, n, step):
        yield slice(begin, min(begin + step, n))
