"""Arithmetic, logic and conversions against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

_RNG = np.random.default_rng(5)
_EDGES32 = [0, 1, 2, 31, 32, 33, 255, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE]


def _u32() -> np.ndarray:
    return np.concatenate([_EDGES32, _RNG.integers(0, 1 << 32, 32 - len(_EDGES32))]).astype(np.uint32)


def _shuffled(x: np.ndarray) -> np.ndarray:
    return _RNG.permutation(x)


def _f32() -> np.ndarray:
    edges = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-42, 3.0e38, 1e-30]
    return np.concatenate([edges, _RNG.normal(0, 100, 32 - len(edges))]).astype(np.float32)


def _wrap(bits: int):
    return lambda value: value & ((1 << bits) - 1)


def _signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _bfe(a: int, b: int, c: int) -> int:
    return (a >> (b & 255)) & ((1 << (c & 255)) - 1)


def _prmt(a: int, b: int, c: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    picked = []
    for i in range(4):
        selector = c >> 4 * i & 15
        byte = source[selector & 7]
        picked.append((255 if byte & 128 else 0) if selector & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def _divide(a: int, b: int) -> int:
    return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b)) if a else 0


_INTEGER = {
    "add.u32 %out, %a0, %a1;": lambda a, b, c: a + b,
    "sub.s32 %out, %a0, %a1;": lambda a, b, c: a - b,
    "mul.lo.s32 %out, %a0, %a1;": lambda a, b, c: a * b,
    "mul.hi.u32 %out, %a0, %a1;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %out, %a0, %a1;": lambda a, b, c: _signed(a) * _signed(b) >> 32,
    "mad.lo.u32 %out, %a0, %a1, %a2;": lambda a, b, c: a * b + c,
    "min.s32 %out, %a0, %a1;": lambda a, b, c: min(_signed(a), _signed(b)),
    "max.u32 %out, %a0, %a1;": lambda a, b, c: max(a, b),
    "div.u32 %out, %a0, %a3;": lambda a, b, c: a // ((b & 1023) + 1),
    "rem.s32 %out, %a0, %a3;": lambda a, b, c: (
        _signed(a) - _divide(_signed(a), (b & 1023) + 1) * ((b & 1023) + 1)
    ),
    "shl.b32 %out, %a0, %a4;": lambda a, b, c: a << (b & 63) if (b & 63) < 32 else 0,
    "shr.u32 %out, %a0, %a4;": lambda a, b, c: a >> (b & 63),
    "shr.s32 %out, %a0, %a4;": lambda a, b, c: _signed(a) >> (b & 63),
    "shf.l.wrap.b32 %out, %a0, %a1, %a4;": lambda a, b, c: ((b << 32 | a) << (b & 63 & 31)) >> 32,
    "shf.r.clamp.b32 %out, %a0, %a1, %a4;": lambda a, b, c: (b << 32 | a) >> min(b & 63, 32),
    "bfe.u32 %out, %a0, %a5, 7;": lambda a, b, c: _bfe(a, b & 31, 7),
    "bfi.b32 %out, %a0, %a1, 9, 5;": lambda a, b, c: (b & ~(31 << 9)) | (a & 31) << 9,
    "prmt.b32 %out, %a0, %a1, %a2;": _prmt,
    "lop3.b32 %out, %a0, %a1, %a2, 0xE8;": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "popc.b32 %out, %a0;": lambda a, b, c: bin(a).count("1"),
    "clz.b32 %out, %a0;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %out, %a0;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %out, %a0;": lambda a, b, c: a.bit_length() - 1 if a else 0xFFFFFFFF,
    "bfind.shiftamt.u32 %out, %a0;": lambda a, b, c: 32 - a.bit_length() if a else 0xFFFFFFFF,
    "not.b32 %out, %a0;": lambda a, b, c: ~a,
    "neg.s32 %out, %a0;": lambda a, b, c: -a,
    "setp.lt.s32 %p1, %a0, %a1; selp.b32 %out, %a1, %a2, %p1;": lambda a, b, c: (
        b if _signed(a) < _signed(b) else c
    ),
    "setp.hs.u32 %p1|%p2, %a0, %a1; selp.b32 %out, %a1, %a2, %p2;": lambda a, b, c: b if a < b else c,
    "max.u16x2 %out, %a0, %a1;": lambda a, b, c: max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF),
    "mul.wide.u32 %d9, %a0, %a1; mov.b64 {%r1, %out}, %d9;": lambda a, b, c: a * b >> 32,
    "mul.wide.s32 %d9, %a0, %a1; mov.b64 {%r1, %out}, %d9;": lambda a, b, c: _signed(a) * _signed(b) >> 32,
    "cvt.s32.s8 %out, %a0;": lambda a, b, c: _signed(a & 255, 8),
}


@pytest.mark.parametrize("code", _INTEGER)
def test_integer(bench, code):
    a, b, c = _u32(), _shuffled(_u32()), _shuffled(_u32())
    small = ((b & 1023) + 1).astype(np.uint32)
    inputs = [a, b, c, small, (b & 63).astype(np.uint32), (b & 31).astype(np.uint32)]
    expected = [_wrap(32)(_INTEGER[code](int(x), int(y), int(z))) for x, y, z in zip(a, b, c, strict=False)]
    np.testing.assert_array_equal(bench.lanes(code, inputs, np.uint32), np.array(expected, np.uint32))


_WIDE = {
    "add.s64 %out, %a0, %a1;": lambda a, b: a + b,
    "mul.lo.s64 %out, %a0, %a1;": lambda a, b: a * b,
    "mul.hi.u64 %out, %a0, %a1;": lambda a, b: a * b >> 64,
    "mul.hi.s64 %out, %a0, %a1;": lambda a, b: _signed(a, 64) * _signed(b, 64) >> 64,
    "div.s64 %out, %a0, 12345;": lambda a, b: _divide(_signed(a, 64), 12345),
    "shr.s64 %out, %a0, 13;": lambda a, b: _signed(a, 64) >> 13,
    "max.s64 %out, %a0, %a1;": lambda a, b: max(_signed(a, 64), _signed(b, 64)),
    "cvt.u32.u64 %r1, %a0; cvt.s64.s32 %out, %r1;": lambda a, b: _signed(a & 0xFFFFFFFF),
}


@pytest.mark.parametrize("code", _WIDE)
def test_wide_integer(bench, code):
    a, b = (_RNG.integers(0, 1 << 64, 32, dtype=np.uint64) for _ in range(2))
    expected = [_wrap(64)(_WIDE[code](int(x), int(y))) for x, y in zip(a, b, strict=False)]
    np.testing.assert_array_equal(bench.lanes(code, [a, b], np.uint64), np.array(expected, np.uint64))


def _fma(a, b, c):
    with np.errstate(all="ignore"):
        return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(
            np.float32
        )


def _saturated(x):
    return np.where(np.isnan(x), np.float32(0), np.clip(x, np.float32(0), np.float32(1)))


def _towards(x: np.ndarray, direction: float) -> np.ndarray:
    """Rounds long doubles to float32 downwards, upwards (direction -inf, inf) or to zero (0)."""
    nearest = x.astype(np.float32)
    wide = nearest.astype(np.longdouble)
    if direction == 0:
        wrong, target = np.abs(wide) > np.abs(x), np.float32(0)
    else:
        wrong = wide > x if direction < 0 else wide < x
        target = np.float32(direction)
    return np.where(wrong, np.nextafter(nearest, target), nearest)


_FLOAT = {
    "add.f32 %out, %a0, %a1;": lambda a, b, c: a + b,
    "sub.rn.f32 %out, %a0, %a1;": lambda a, b, c: a - b,
    "mul.f32 %out, %a0, %a1;": lambda a, b, c: a * b,
    "fma.rn.f32 %out, %a0, %a1, %a2;": _fma,
    "div.rn.f32 %out, %a0, %a1;": lambda a, b, c: a / b,
    "rcp.rn.f32 %out, %a0;": lambda a, b, c: np.float32(1) / a,
    "sqrt.rn.f32 %out, %a0;": lambda a, b, c: np.sqrt(a),
    "abs.f32 %out, %a0;": lambda a, b, c: np.abs(a),
    "neg.f32 %out, %a0;": lambda a, b, c: -a,
    "max.f32 %out, %a0, %a1;": lambda a, b, c: np.fmax(a, b),
    "min.f32 %out, %a0, %a1;": lambda a, b, c: np.fmin(a, b),
    "max.NaN.f32 %out, %a0, %a1;": lambda a, b, c: np.maximum(a, b),
    "max.f32 %out, %a0, %a1, %a2;": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "fma.rn.sat.f32 %out, %a0, %a1, %a2;": lambda a, b, c: _saturated(_fma(a, b, c)),
    "cvt.sat.f32.f32 %out, %a0;": lambda a, b, c: _saturated(a),
    "cvt.rni.f32.f32 %out, %a0;": lambda a, b, c: np.rint(a),
    "cvt.rzi.f32.f32 %out, %a0;": lambda a, b, c: np.trunc(a),
    "setp.gtu.f32 %p1, %a0, %a1; selp.f32 %out, %a0, %a2, %p1;": lambda a, b, c: np.where(~(a <= b), a, c),
    "setp.nan.f32 %p1, %a0, %a1; selp.f32 %out, %a0, %a2, %p1;": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b), a, c
    ),
    "copysign.f32 %out, %a0, %a1;": lambda a, b, c: np.copysign(b, a),
    "ex2.approx.f32 %out, %a3;": lambda a, b, c: np.exp2(np.float64(1) * (b % 20)).astype(np.float32),
    "tanh.approx.f32 %out, %a3;": lambda a, b, c: np.tanh(np.float64(1) * (b % 20)).astype(np.float32),
}


@pytest.mark.parametrize("code", _FLOAT)
def test_float(bench, code):
    with np.errstate(all="ignore"):
        a, b, c = _f32(), _shuffled(_f32()), _shuffled(_f32())
        expected = _FLOAT[code](a, b, c).astype(np.float32)
        actual = bench.lanes(code, [a, b, c, (b % 20).astype(np.float32)], np.float32)
        finite = np.where(expected == 0, np.float32(0), expected)  # the sign of zero is not compared
        np.testing.assert_array_equal(np.where(actual == 0, np.float32(0), actual), finite)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("add.rn.f32x2 %x2, %x0, %x1", lambda a, b: a + b),
        ("sub.f32x2 %x2, %x0, %x1", lambda a, b: a - b),
        ("mul.f32x2 %x2, %x0, %x1", lambda a, b: a * b),
        ("fma.rn.f32x2 %x2, %x0, %x1, %x1", lambda a, b: _fma(a, b, b)),
    ],
)
def test_pairs_of_f32(bench, code, function, half):
    a, b, c = (_RNG.normal(0, 100, 32).astype(np.float32) for _ in range(3))
    moves = ".reg .b64 %x<3>; .reg .f32 %y<2>; mov.b64 %x0, {%a0, %a1}; mov.b64 %x1, {%a1, %a2};"
    actual = bench.lanes(
        f"{moves} {code}; mov.b64 {{%y0, %y1}}, %x2; mov.f32 %out, %y{half};", [a, b, c], np.float32
    )
    np.testing.assert_array_equal(actual, function(*((b, c) if half else (a, b))).astype(np.float32))


@pytest.mark.parametrize(("mode", "direction"), [("rm", -np.inf), ("rp", np.inf), ("rz", 0)])
def test_directed_rounding(bench, mode, direction):
    a, b, c = (_RNG.normal(0, 100, 32).astype(np.float32) for _ in range(3))
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    actual = bench.lanes(f"fma.{mode}.f32 %out, %a0, %a1, %a2;", [a, b, c], np.float32)
    np.testing.assert_array_equal(actual, _towards(exact, direction))


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_float_to_integer(bench, mode, function):
    a = np.array([0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.7, -2.7, 3e9, -3e9, 5e9, np.nan] + [7.25] * 20, np.float32)
    expected = np.clip(np.nan_to_num(function(a.astype(np.float64))), -(2**31), 2**31 - 1).astype(np.int32)
    np.testing.assert_array_equal(bench.lanes(f"cvt.{mode}.s32.f32 %out, %a0;", [a], np.int32), expected)
    expected = np.clip(np.nan_to_num(function(a.astype(np.float64))), 0, 2**32 - 1).astype(np.uint32)
    np.testing.assert_array_equal(bench.lanes(f"cvt.{mode}.u32.f32 %out, %a0;", [a], np.uint32), expected)


def _as_torch(a: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(a)


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_conversions(bench, name, dtype):
    a = _f32()
    a[np.isnan(a)] = 1.0  # NaN payloads differ
    b = _shuffled(a)
    low, high = (_as_torch(x).to(dtype).view(torch.int16).numpy().view(np.uint16) for x in (b, a))
    packed = bench.lanes(f"cvt.rn.{name}x2.f32 %out, %a0, %a1;", [a, b], np.uint32)
    np.testing.assert_array_equal(packed, high.astype(np.uint32) << 16 | low)
    widened = bench.lanes(f"cvt.f32.{name} %out, %a0;", [high], np.float32)
    np.testing.assert_array_equal(widened, _as_torch(a).to(dtype).float().numpy())


def _nearest_code(values: np.ndarray, x: float) -> int:
    """Index of the nearest of increasing values; ties go to the even index."""
    distance = np.abs(values - abs(x))
    candidates = np.flatnonzero(distance == distance.min())
    return int(candidates[0] if len(candidates) == 1 or candidates[0] % 2 == 0 else candidates[1])


def test_e2m1_conversion(bench):
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    a = np.array(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 100, -0.2, -0.26, -7, 0.1, 1, 2, 3] * 2, np.float32
    )
    b = _shuffled(a)
    code = [[_nearest_code(values, x) | (8 if np.signbit(x) else 0) for x in v] for v in (a, b)]
    actual = bench.lanes(
        ".reg .b8 %t; cvt.rn.satfinite.e2m1x2.f32 %t, %a0, %a1; cvt.u32.u8 %out, %t;", [a, b], np.uint32
    )
    np.testing.assert_array_equal(actual, np.array(code[0]) << 4 | np.array(code[1]))


def test_e4m3_conversion(bench):
    a = np.concatenate([_RNG.normal(0, 200, 24), [448, 464, 465, 1e9, 2**-9, 2**-10, 1.5 * 2**-10, -0.0]])
    a = a.astype(np.float32)
    clamped = _as_torch(np.clip(a, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    actual = bench.lanes("cvt.rn.satfinite.e4m3x2.f32 %h1, %a0, %a0; cvt.u32.u16 %out, %h1;", [a], np.uint32)
    np.testing.assert_array_equal(actual, clamped.astype(np.uint32) * 0x101)


def test_f16x2_toward_zero_and_clamped(bench):
    """cvt.rz to pairs of f16, subnormal ones too, and the lesser magnitude with the product of the signs."""
    a = np.array([1 + 2**-11 + 2**-12, -1.9999, 65519.0, 1e9, -3e-6, 6e-8, -0.0, 0.0] * 4, np.float32)
    want = np.array([1.0, -1.999, 65504.0, 65504.0, -50 * 2.0**-24, 2.0**-24, -0.0, 0.0] * 4, np.float16)
    bits = want.view(np.uint16).astype(np.uint32)
    packed = bench.lanes("cvt.rz.f16x2.f32 %out, %a0, %a1;", [a, _shuffled(a)], np.uint32)
    np.testing.assert_array_equal(packed >> 16, bits)
    limit = np.full(32, 0x0E000E00, np.uint32)  # 6 * 2^-14
    actual = bench.lanes("min.xorsign.abs.f16x2 %out, %a0, %a1;", [bits << 16 | bits, limit], np.uint32)
    least = np.minimum(bits & 0x7FFF, 0x0E00) | (bits & 0x8000)
    np.testing.assert_array_equal(actual, least << 16 | least)


def test_bf16x2_arithmetic(bench):
    def pack(x):
        bits = _as_torch(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return bits | bits << 16

    a, b, c = (_RNG.normal(0, 3, 32).astype(np.float32) for _ in range(3))
    exact = [_as_torch(x).to(torch.bfloat16).double() for x in (a, b, c)]
    expected = (exact[0] * exact[1] + exact[2]).to(torch.bfloat16).float().numpy()
    actual = bench.lanes("fma.rn.bf16x2 %out, %a0, %a1, %a2;", [pack(a), pack(b), pack(c)], np.uint32)
    np.testing.assert_array_equal(actual, pack(expected))
