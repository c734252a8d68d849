"""The products of a training step by fp4gemm.training, and by TransformerEngine's reference.

The reference has no stochastic rounding, one amax vector for each product, and no te_per_token; it does not
define the order of the sums of a rotation, so that the data here make them exact.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fp4gemm import NVFP4Tensor, training
from fp4gemm.training import Cast
from helpers import make
from te_oracle import Oracle
from torch import Tensor
from training_operands import catch, codes_as_numbers, step_of

HASHES = Path(__file__).parents[1] / "training" / "te_recipes.json"
M, N, K = 64, 32, 96
KINDS = ("normal", "heavy", "row_ranges", "outliers")


def pairs(recipe: training.Recipe) -> dict[str, tuple[Any, Any]]:
    """The operands of each product."""
    return {
        "FPROP": (recipe.x, recipe.w),
        "DGRAD": (recipe.dy, recipe.w_t),
        "WGRAD": (recipe.dy_t, recipe.x_t),
    }


def products(recipe: training.Recipe) -> tuple[str, ...]:
    """The products that multiply two quantized operands."""
    return tuple(
        name for name, (a, b) in pairs(recipe).items() if isinstance(a, Cast) and isinstance(b, Cast)
    )


# Presets that the reference lacks: it has no amax vector in both operands, no te_per_token, no MXFP8, and no
# corrected scales.
WITHOUT_REFERENCE = ("bf16", "mxfp8", "quartet2", *(name for name in training.PRESETS if "per_token" in name))
# The preset, and the products of it that TransformerEngine's reference has.
PRESETS = {
    name: products(recipe) for name, recipe in training.PRESETS.items() if name not in WITHOUT_REFERENCE
}


class Product(NamedTuple):
    """One product: its operands as codes, compact scales and amax, and its result."""

    a: tuple[Tensor, Tensor, Tensor]
    b: tuple[Tensor, Tensor, Tensor]
    d: Tensor


def data(kind: str) -> dict[str, Tensor]:
    """x, w and dy, bfloat16 on a grid: sums of 16 numbers are exact in float32, in any order."""
    made = {}
    for seed, (name, shape) in enumerate({"x": (M, K), "w": (N, K), "dy": (M, N)}.items()):
        values = make(kind, *shape, torch.bfloat16, torch.Generator().manual_seed(seed))
        made[name] = ((values.float() * 64).round() / 64).clamp(-2000, 2000).to(torch.bfloat16)
    return made


def without_stochastic_rounding(preset: str) -> training.Recipe:
    """The preset, rounded to nearest."""
    recipe = training.PRESETS[preset]
    casts = {
        field.name: dataclasses.replace(getattr(recipe, field.name), stochastic=False)
        for field in dataclasses.fields(recipe)
        if isinstance(getattr(recipe, field.name), Cast)
    }
    return recipe.replace(**casts)


def ours(
    preset: str, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> dict[str, Product]:
    """The NVFP4 products of one forward and backward pass of training.linear, as they were called."""
    caught = catch(monkeypatch)
    x, w, dy = (tensors[name].to(device, copy=True) for name in ("x", "w", "dy"))
    x.requires_grad_()
    w.requires_grad_()
    y = training.functional.linear(x, w, None, without_stochastic_rounding(preset))
    y.backward(dy)
    for name, result in (("fprop", y), ("dgrad", x.grad), ("wgrad", w.grad)):
        assert result is not None
        assert name not in caught or torch.equal(caught[name].d, result.detach())
    return {name.upper(): Product(_parts(a), _parts(b), d.cpu()) for name, (a, b, d) in caught.items()}


def _parts(t: NVFP4Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return t.codes.cpu(), t.compact_scales().view(torch.uint8).cpu(), t.amax.cpu()


def theirs(preset: str, tensors: dict[str, Tensor], oracle: Oracle) -> dict[str, Product]:
    """The same products by TransformerEngine's reference."""
    recipe = without_stochastic_rounding(preset)

    def both(name: str, cast: Any) -> Any:
        options = {"scaling": cast.scaling, "block": cast.block, "four_over_six": cast.four_over_six}
        return oracle.both(tensors[name], rotate=cast.hadamard is not None, **options)

    made = {}
    for name in PRESETS[preset]:
        left, right = pairs(recipe)[name]
        a = both("x" if name == "FPROP" else "dy", left)
        b = both("x" if name == "WGRAD" else "w", right)
        if name == "DGRAD" and right.four_over_six and right.block == (16, 16):
            # Tiles are decided along the rows of w; there the copy for dgrad decides along those of w.T.
            b.data_t, b.scale_t = _transposed(b.data), b.scale.repeat_interleave(16, 1).t()[:, ::16]
        d = oracle.multiply(name, a, b, torch.bfloat16)
        made[name] = Product(_of(a, name == "WGRAD"), _of(b, name != "FPROP"), d)
    return made


def _of(t: Any, is_column: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, amax = (
        (t.data_t, t.scale_t, t.global_amax_col) if is_column else (t.data, t.scale, t.global_amax_row)
    )
    return codes, scale.contiguous().view(torch.uint8), amax.reshape(-1)


def _transposed(packed: Tensor) -> Tensor:
    """Codes (n, k/2) of w as codes (k, n/2) of w.T."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).t()
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


def positive_zeros(codes: Tensor) -> Tensor:
    """Packed codes with 8 (-0) replaced by 0: the reference drops the sign of a zero."""
    low, high = codes & 15, codes >> 4
    return low.where(low != 8, 0) | high.where(high != 8, 0) << 4


def digest(operand: tuple[Tensor, Tensor, Tensor]) -> str:
    """SHA-256 of codes, without the sign of zeros, scales and amax."""
    codes, scales, amax = operand
    made = hashlib.sha256()
    for part in (positive_zeros(codes), scales, amax):
        made.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def values(operand: tuple[Tensor, Tensor, Tensor], bound: int) -> Tensor:
    """q * s * A / (6 * bound) in float64."""
    codes, scales, amax = operand
    t = NVFP4Tensor.from_compact(codes, scales.view(torch.float8_e4m3fn), amax, bound)
    return codes_as_numbers(t) * step_of(t)


def allowed(product: Product, bounds: tuple[int, int]) -> Tensor:
    """How far two bfloat16 results may differ: by 20 roundings of sums to float32, and a last one."""
    a, b = values(product.a, bounds[0]), values(product.b, bounds[1])
    return (a @ b.t()).abs() * 2.0**-7 + a.abs() @ b.abs().t() * 20 * 2.0**-24


def bounds(preset: str, name: str) -> tuple[int, int]:
    """The bounds of the scales of both operands."""
    a, b = pairs(training.PRESETS[preset])[name]
    return a.bound, b.bound


def record(oracle: Oracle) -> dict[str, Any]:
    """What te_recipes.json holds: digests of their operands, and 16 elements of their results."""
    made: dict[str, Any] = {}
    for preset in PRESETS:
        for kind in KINDS:
            for name, product in theirs(preset, data(kind), oracle).items():
                row = product.d[0, :16].tolist()
                made[f"{preset} {kind} {name}"] = [digest(product.a), digest(product.b), row]
    return made
