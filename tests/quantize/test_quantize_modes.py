"""quantize and quantize_both in every mode: equal to the reference on every device, and exact identities."""

from __future__ import annotations

import re
from pathlib import Path

import fp4gemm
import modes
import pytest
import torch
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.ops import options as option_checks
from fp4gemm.ops.options import OPTIONS
from helpers import FLOATS, KINDS, assert_bits, assert_parts, dirty, make, short
from modes import FEW, MODES, TILES, Mode, assert_same, by_name, expected, parts, quantize

ROWS = [(0, 32), (1, 16), (7, 48), (33, 80), (129, 144)]
BOTH = [(16, 16), (48, 80), (144, 272)]


def poison(device: torch.device, m: int, k: int) -> None:
    """Leaves 0xFF in the memory from which the results of an (m, k) or (k, m) will be allocated."""
    for rows, columns in ((m, k), (k, m)):
        dirty(
            device, rows * columns // 2, (rows + 127) // 128 * 128 * ((columns // 16 + 3) // 4 * 4), 4 * rows
        )


def test_every_option_is_in_a_mode_and_documented() -> None:
    """An option without a mode would not be compared with the reference on any device."""
    used = {name for mode in MODES for name, value in mode.options.items() if value != OPTIONS[name].default}
    assert used | {"generator", "rng_state"} == set(OPTIONS)  # the state: test_stochastic.py
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    for name in OPTIONS:
        assert re.search(rf"`[^`\n]*\b{name}\b", text), f"docs/quantization.md does not mention {name}"


@pytest.mark.parametrize("mode", MODES, ids=by_name)
def test_equals_reference(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """The bits of the reference on the CPU with the options' arguments, padding and metadata included."""
    for i, (m, k) in enumerate([*ROWS, *BOTH]):
        x = make("row_ranges" if i % 2 else "wide_blocks", m, k, FLOATS[i % 3], gen)
        for axis in (-1, 0) if (m, k) in BOTH else (-1,):
            poison(device, m, k)
            t = quantize(x, mode, device, axis=axis)
            assert_parts(parts(t), expected(x, mode, axis), f"{m}x{k} axis {axis}")
            assert t.shape == ((m, k) if axis == -1 else (k, m))
            assert t.e4m3_max == mode.arguments["e4m3_max"]
            assert t.hadamard_signs == mode.options.get("hadamard_signs")
            assert t.offs is None


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    x = make(kind, 96, 160, dtype, gen)
    # Not with rotations, for which NaN, infinity and values that overflow are unspecified.
    special = x.clone()
    special[7, 3], special[8, :40], special[9, ::3] = torch.nan, torch.nan, -0.0
    for mode in FEW:
        if mode.rotated and kind in ("inf", "huge"):
            continue
        values = x if mode.rotated else special
        for axis in (-1, 0):
            poison(device, 96, 160)
            t = quantize(values, mode, device, axis=axis)
            assert_parts(parts(t), expected(values, mode, axis), f"{mode.name} axis {axis}")


@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_row_stride_above_k(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """The columns next to x and the rows around it are NaN, which would show if a kernel read them."""
    for dtype in FLOATS:
        wide = torch.full((50, 160), torch.nan, dtype=dtype)
        wide[1:49, 16:112] = make("normal", 48, 96, dtype, gen)
        inside = wide[1:49, 16:112]
        view = wide.to(device)[1:49, 16:112]
        for axis in (-1, 0):
            t = fp4gemm.quantize(view, axis=axis, **mode.on(device))
            assert_parts(parts(t), expected(inside.contiguous(), mode, axis), f"{short(dtype)} axis {axis}")
        for t, axis in zip(fp4gemm.quantize_both(view, **mode.on(device)), (-1, 0), strict=True):
            other = mode if axis == 0 else without_rotation(mode)
            assert_parts(parts(t), expected(inside.contiguous(), other, axis), f"both, axis {axis}")


def without_rotation(mode: Mode) -> Mode:
    options = {key: value for key, value in mode.options.items() if not key.startswith("hadamard")}
    return mode._replace(options=options, arguments={**mode.arguments, "hadamard": 0, "signs": 0})


@pytest.mark.parametrize("mode", MODES, ids=by_name)
def test_both_equals_two_calls(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    for m, k in BOTH:
        x = make("heavy", m, k, torch.bfloat16, gen)
        poison(device, m, k)
        rows, columns = fp4gemm.quantize_both(x.to(device), **mode.on(device))
        assert_same(rows, quantize(x, without_rotation(mode), device), "rows")
        assert_same(columns, quantize(x, mode, device, axis=0), "columns")
        assert_parts(parts(rows), expected(x, without_rotation(mode)), "rows, reference")
        assert_parts(parts(columns), expected(x, mode, 0), "columns, reference")
        given = parts(rows)[2], parts(columns)[2]
        again = fp4gemm.quantize_both(x.to(device), amax=given[0], amax_t=given[1], **mode.on(device))
        for t, want, amax in zip(again, (rows, columns), given, strict=True):
            assert_same(t, want, "given amax")
            assert t.amax is amax


@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_both_with_two_given_amaxes(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Each result has the amax that was given for it, also where blocks of 16x16 share their scales."""
    x = make("heavy", 48, 96, torch.bfloat16, gen).to(device)
    rows, columns = fp4gemm.quantize_both(x, **mode.on(device))
    given = rows.amax * 1.5, columns.amax * 2.5
    again = fp4gemm.quantize_both(x, amax=given[0], amax_t=given[1], **mode.on(device))
    for t, other, axis, amax in zip(again, (without_rotation(mode), mode), (-1, 0), given, strict=True):
        want = fp4gemm.quantize(x, axis=axis, amax=amax, **other.on(device))
        assert_same(t, want, f"axis {axis}")


@pytest.mark.parametrize("mode", [m for m in MODES if not m.stochastic], ids=by_name)
def test_axis_0_is_the_transpose_quantized(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    for m, k in BOTH:
        x = make("outliers", m, k, torch.float16, gen).to(device)
        got = fp4gemm.quantize(x, axis=0, **mode.options)
        if mode.tiles and mode.adaptive:  # decided in the orientation of x, so the results are transposes
            assert_transposed(got, fp4gemm.quantize(x, **mode.options))
        else:
            assert_same(got, fp4gemm.quantize(x.t().contiguous(), **mode.options))


def nibbles(t: NVFP4Tensor) -> torch.Tensor:
    return torch.stack((t.codes & 15, t.codes >> 4), dim=-1).flatten(1)


def assert_transposed(a: NVFP4Tensor, b: NVFP4Tensor) -> None:
    """Requires that codes and tiles of one are those of the other, transposed."""
    assert_bits(nibbles(a), nibbles(b).t().contiguous(), "codes")
    tiles_a, tiles_b = (t.compact_scales().view(torch.uint8)[::16] for t in (a, b))
    assert_bits(tiles_a, tiles_b.t().contiguous(), "tiles")
    for t, tiles in ((a, tiles_a), (b, tiles_b)):
        assert_bits(
            t.compact_scales().view(torch.uint8), tiles.repeat_interleave(16, dim=0), "rows of a tile"
        )


def test_tiles_do_not_depend_on_the_orientation(device: torch.device, gen: torch.Generator) -> None:
    for kind in ("normal", "heavy", "zero_rows", "wide_blocks"):
        x = make(kind, 144, 80, torch.bfloat16, gen).to(device)
        turned = fp4gemm.quantize(x.t().contiguous(), **TILES.options)
        assert_transposed(turned, fp4gemm.quantize(x, **TILES.options))


@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_given_amax(
    mode: Mode, device: torch.device, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured amax changes nothing; others act as in the reference, NaN included where unchecked."""
    monkeypatch.setattr(option_checks, "amax_values", lambda name, amax: None)
    x = make("normal", 48, 64, torch.float32, gen)
    for axis, rows in ((-1, 48), (0, 64)):
        measured = quantize(x, mode, device, axis=axis)
        again = quantize(x, mode, device, axis=axis, amax=measured.amax)
        assert_same(again, measured)
        if mode.arguments["per_row"]:
            amax = torch.exp2(torch.randint(-30, 30, (rows,), generator=gen).float())
            amax[:6] = torch.tensor([0.0, torch.inf, 1e-40, torch.finfo(torch.float32).max, 1e-30, torch.nan])
            candidates = [amax]
        else:
            candidates = [torch.tensor([v]) for v in (0.0, torch.inf, 1e-40, 7.0, 1.0, torch.nan)]
        for amax in candidates:
            moved = amax.to(device)
            t = quantize(x, mode, device, axis=axis, amax=moved)
            assert t.amax is moved
            assert_parts(parts(t), expected(x, mode, axis, amax), f"axis {axis} amax {amax[0]}")


def test_rotation_preserves_the_product(device: torch.device, gen: torch.Generator) -> None:
    """The rotation is orthonormal: rotating both operands does not change their product."""
    x, w = (make("normal", rows, 256, torch.float32, gen).to(device) for rows in (64, 32))
    exact = x.double() @ w.double().T
    error = {}
    for name, options in (("plain", {}), ("bf16", {"hadamard": "bf16"}), ("fp32", {"hadamard": "fp32"})):
        a, b = fp4gemm.quantize(x, **options), fp4gemm.quantize(w, **options)
        d = fp4gemm.mm(a, b, out_dtype=torch.float32)
        error[name] = float((d.double() - exact).norm() / exact.norm())
    assert max(error.values()) < 0.2
    assert max(error.values()) < 1.2 * min(error.values())


def test_rotated_values_come_back_rotated(device: torch.device, gen: torch.Generator) -> None:
    """dequantize does not rotate back; a product with H diag(signs) / 4 does, since that is orthonormal."""
    x = make("normal", 32, 64, torch.float32, gen)
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    sign = torch.tensor([-1.0 if modes.SIGNS >> r & 1 else 1.0 for r in range(16)])
    t = quantize(x, mode_named("row-te-bf16-d7e8"), device)
    rotated = ((x.view(32, 4, 16) * sign) @ h / 4).view(32, 64)
    values = t.dequantize().cpu()
    assert float((values - rotated).norm() / rotated.norm()) < 0.15
    assert float((values - x).norm() / x.norm()) > 0.5
    back = ((values.view(32, 4, 16) / 4) @ h * sign).view(32, 64)
    assert float((back - x).norm() / x.norm()) < 0.15


def mode_named(name: str) -> Mode:
    return next(mode for mode in MODES if mode.name == name)


def test_four_over_six_is_closer(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 128, 512, torch.float32, gen).to(device)

    def error(**options: str) -> float:
        return float((fp4gemm.quantize(x, **options).dequantize() - x).square().mean())

    standard, mae, mse = error(), error(four_over_six="mae"), error(four_over_six="mse")
    assert mse < mae < 0.9 * standard


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_products_of_every_bound(out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """mm multiplies by the constant fl(1 / (36 B_a B_b)) of each pair of bounds."""
    x, w = (make("normal", rows, 128, torch.bfloat16, gen).to(device) for rows in (33, 24))
    for bound_a in (448, 256):
        for bound_b in (448, 256):
            a = fp4gemm.quantize(x, four_over_six="mae", e4m3_max=bound_a)
            b = fp4gemm.quantize(w, four_over_six="mse", e4m3_max=bound_b, scaling="tensor")
            assert (a.e4m3_max, b.e4m3_max) == (bound_a, bound_b)
            alpha = torch.tensor(1 / (36 * bound_a * bound_b), dtype=torch.float32).item()
            tensors = (a.codes, b.codes, a.scales, b.scales)
            want = reference.gemm(
                *(t.cpu() for t in tensors),
                alpha=alpha,
                alpha_row=a.amax.cpu(),
                alpha_col=b.amax.cpu(),
                out_dtype=out_dtype,
            )
            assert_bits(fp4gemm.mm(a, b, out_dtype=out_dtype), want, f"{bound_a}, {bound_b}")
            values = a.dequantize().double() @ b.dequantize().double().T
            got = fp4gemm.mm(a, b, out_dtype=torch.float32).double()
            assert torch.allclose(got, values, rtol=1e-4, atol=1e-4)


def test_with_row_amax(device: torch.device, gen: torch.Generator) -> None:
    """With a scalar amax as a vector, the product keeps its bits."""
    x, w = (make("normal", rows, 96, torch.bfloat16, gen).to(device) for rows in (33, 40))
    a = fp4gemm.quantize(x)
    for options in (TILES.options, {"scaling": "tensor"}, {"scaling": "tensor", "four_over_six": "mae"}):
        b = fp4gemm.quantize(w, **options)
        dressed = b.with_row_amax()
        assert_bits(dressed.amax, b.amax.repeat(40), "amax")
        assert dressed.amax.is_contiguous()
        assert dressed.codes is b.codes
        assert dressed.scales is b.scales
        assert dressed.e4m3_max == b.e4m3_max
        assert dressed.with_row_amax() is dressed
        assert_bits(fp4gemm.mm(a, dressed), fp4gemm.mm(a, b), "D")
        assert_bits(dressed.dequantize(), b.dequantize(), "values")
    rotated = fp4gemm.quantize(w, scaling="tensor", hadamard="fp32", hadamard_signs=5).with_row_amax()
    assert rotated.hadamard_signs == 5


def test_mm_refuses_operands_rotated_differently(device: torch.device) -> None:
    x = torch.ones(8, 32, device=device)
    plain, signs, other = (
        fp4gemm.quantize(x),
        fp4gemm.quantize(x, hadamard="bf16"),
        fp4gemm.quantize(x, hadamard="fp32", hadamard_signs=0),
    )
    for a, b in ((plain, signs), (signs, plain), (signs, other), (plain, other)):
        with pytest.raises(ValueError, match=r"^b: hadamard_signs is .*, must be .* as of a"):
            fp4gemm.mm(a, b)
        if a.device.type == "cpu":
            with pytest.raises(ValueError, match=r"^b: hadamard_signs is .*, must be .* as of a"):
                fp4gemm.mm(fp4gemm.decode(a), fp4gemm.decode(b))
    assert fp4gemm.decode(signs).hadamard_signs == signs.hadamard_signs
    assert_bits(fp4gemm.mm(signs, signs), fp4gemm.mm(signs, fp4gemm.quantize(x, hadamard="fp32")), "D")


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_dequantize_parts(
    dtype: torch.dtype, swizzled: bool, device: torch.device, gen: torch.Generator
) -> None:
    """Raw tensors in either layout; padding is not read."""
    for m, k in ((0, 32), (1, 16), (33, 80), (129, 272)):
        for mode in (mode_named("row-te-plain"), mode_named("tensor-1x16-mae-exact-256")):
            t = quantize(make("wide_blocks", m, k, torch.float32, gen) * 1e3, mode, device)
            want = reference.dequantize(t.codes.cpu(), t.scales.cpu(), t.amax.cpu(), t.e4m3_max, dtype)
            compact = t.compact_scales()
            scales = compact
            if swizzled:
                padded = torch.full(t.scales.shape, 0xFF, dtype=torch.uint8, device=device)
                padded[:m, : k // 16] = compact.view(torch.uint8)
                scales = fp4gemm.swizzle_scales(padded).view(torch.float8_e4m3fn)
            dirty(device, m * k * dtype.itemsize)
            options = {"e4m3_max": t.e4m3_max, "dtype": dtype, "swizzled": swizzled}
            assert_bits(fp4gemm.dequantize_parts(t.codes, scales, t.amax, **options), want, "values")
            as_bytes = t.codes.view(torch.float4_e2m1fn_x2), scales.view(torch.uint8)
            assert_bits(fp4gemm.dequantize_parts(*as_bytes, t.amax, **options), want, "from bytes")
