"""mma.sync against numpy. The fragments have the layouts of the PTX ISA, "Matrix fragments for mma"."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from fused_sum import fused_sum, number, product
from ptxemu.emulator import EmulatorError

_RNG = np.random.default_rng(8)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"
_MXFP4 = "kind::{kind}.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
_FP8 = "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
_FP8_FP4 = _FP8.replace("e4m3.e4m3", "e4m3.e2m1")


def _e2m1(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1, 1) * _E2M1[codes & 7]


def _e4m3(codes: np.ndarray) -> np.ndarray:
    """Normal numbers only, without their signs."""
    return (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3 & 15) - 7.0)


def _ue4m3(code: int) -> float:
    return float((code & 7) / 512 if code < 8 else _e4m3(np.array(code)))


def _fragment_a(codes: np.ndarray, bits: int) -> np.ndarray:
    """The four registers of each lane. Element i of a lane: its row and column are the ISA's formulas."""
    registers = np.zeros((32, 4), np.uint32)
    each = 32 // bits  # elements of a register
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(4 * each):
            row = group if i < each or 2 * each <= i < 3 * each else group + 8
            column = thread * each + (i & (each - 1)) + (4 * each if i >= 2 * each else 0)
            registers[lane, i // each] |= np.uint32(int(codes[row, column]) << bits * (i % each))
    return registers


def _fragment_b(codes: np.ndarray, bits: int) -> np.ndarray:
    """The two registers of each lane; `codes` is (8, k)."""
    registers = np.zeros((32, 2), np.uint32)
    each = 32 // bits
    for lane in range(32):
        for i in range(2 * each):
            k = lane % 4 * each + (i & (each - 1)) + (4 * each if i >= each else 0)
            registers[lane, i // each] |= np.uint32(int(codes[lane >> 2, k]) << bits * (i % each))
    return registers


def _fragment_c(values: np.ndarray) -> np.ndarray:
    lane = np.arange(32)[:, None]
    i = np.arange(4)[None]
    return values[(lane >> 2) + 8 * (i >= 2), lane % 4 * 2 + (i & 1)].astype(np.float32)


def _scale_registers(scales: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """One register for each lane. Lanes that hold no scales have NaN, which shows if it is read."""
    words = np.full(32, 0x7F7F7F7F, np.uint32)
    words[lanes] = np.ascontiguousarray(scales.astype(np.uint8)).view(np.uint32)[:, 0]
    return words[:, None]


def _multiply(bench, opcode: str, *registers: np.ndarray, tail: str = "") -> np.ndarray:
    """D in the lanes' registers. `registers`: a, b, c, and with block scales those of a and of b."""
    words = np.concatenate([r if r.dtype == np.uint32 else r.view(np.uint32) for r in registers], axis=1)
    loads = "".join(f"ld.global.u32 %r{i}, [%d2+{4 * i}];\n" for i in range(words.shape[1]))
    bench.kernel(
        f"""mov.u32 %r60, %tid.x; mad.wide.u32 %d2, %r60, {4 * words.shape[1]}, %x;
        mad.wide.u32 %d3, %r60, 16, %y;
        {loads}
        mma.sync.aligned.{opcode} {{%r6, %r7, %r8, %r9}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}},
            {{%r6, %r7, %r8, %r9}}{tail};
        st.global.v4.u32 [%d3], {{%r6, %r7, %r8, %r9}};""",
        "x",
        "y",
    )
    y = bench.emulator.empty((32, 4), np.float32)
    bench.launch(bench.emulator.upload(words), y)
    return bench.emulator.download(y)


def _fp4_problem() -> dict[str, np.ndarray]:
    return {
        "a": _RNG.integers(0, 16, (16, 64)),
        "b": _RNG.integers(0, 16, (8, 64)),
        "scale_a": _RNG.integers(48, 64, (16, 4)),  # 0.5 to 1.875
        "scale_b": _RNG.integers(48, 64, (8, 4)),
        "c": _RNG.integers(-99, 99, (16, 8)),
    }


def _fp4(
    bench,
    problem: dict[str, np.ndarray],
    thread_a: int = 0,
    thread_b: int = 0,
    lanes_a=None,
    arithmetic: str = "rounded",
):
    rows, columns = np.arange(16), np.arange(8)
    lanes_a = 4 * (rows % 8) + rows // 8 + 2 * thread_a if lanes_a is None else lanes_a
    bench.target = "sm_120a"
    bench.emulator.configure(compute_capability=120, arithmetic=arithmetic)
    return _multiply(
        bench,
        _FP4,
        _fragment_a(problem["a"], 4),
        _fragment_b(problem["b"], 4),
        _fragment_c(problem["c"]),
        _scale_registers(problem["scale_a"], lanes_a),
        _scale_registers(problem["scale_b"], 4 * columns + thread_b),
        tail=f", {{%r10}}, {{0, {thread_a}}}, {{%r11}}, {{0, {thread_b}}}",
    )


def _fp4_expected(problem: dict[str, np.ndarray]) -> np.ndarray:
    a = _e2m1(problem["a"]) * _e4m3(problem["scale_a"]).repeat(16, axis=1)
    b = _e2m1(problem["b"]) * _e4m3(problem["scale_b"]).repeat(16, axis=1)
    return _fragment_c(a @ b.T + problem["c"])


@pytest.mark.parametrize(("thread_a", "thread_b"), [(0, 0), (1, 3), (0, 2)])
def test_nvfp4(bench, thread_a, thread_b):
    problem = _fp4_problem()
    np.testing.assert_array_equal(_fp4(bench, problem, thread_a, thread_b), _fp4_expected(problem))


def test_the_sign_bit_of_a_scale_factor_is_ignored(bench):
    """ue4m3 has 7 bits: a scale factor with bit 7 is the same number, and 0xFF is NaN, as 0x7F is."""
    problem = _fp4_problem()
    signed = problem | {
        name: problem[name] | _RNG.integers(0, 2, problem[name].shape) * 0x80
        for name in ("scale_a", "scale_b")
    }
    assert (signed["scale_a"] & 0x80).any()
    assert (signed["scale_b"] & 0x80).any()
    np.testing.assert_array_equal(_fp4(bench, signed), _fp4_expected(problem))
    signed["scale_b"] = problem["scale_b"].copy()
    signed["scale_b"][3, 1] = 0xFF
    is_nan = np.isnan(_fp4(bench, signed))
    np.testing.assert_array_equal(is_nan, _fragment_c(np.broadcast_to(np.arange(8) == 3, (16, 8))) == 1)


def test_a_wrong_scale_mapping_is_noticed(bench):
    """Scales of rows 1 and 8 in each other's lanes change both rows, and no other."""
    problem = _fp4_problem()
    rows = np.arange(16)
    swapped = rows.copy()
    swapped[[1, 8]] = swapped[[8, 1]]
    wrong = _fp4(bench, problem, lanes_a=4 * (swapped % 8) + swapped // 8)
    changed = (wrong != _fp4_expected(problem)).any(axis=1)
    assert changed[4:8].any()  # lanes 4 to 7 hold row 1 and row 9
    assert changed[:4].any()  # row 0 and row 8
    assert not changed[8:].any()
    # Each lane's half of the fragment that belongs to rows 0 and 9 is right.
    np.testing.assert_array_equal(wrong[:4, :2], _fp4_expected(problem)[:4, :2])
    np.testing.assert_array_equal(wrong[4:8, 2:], _fp4_expected(problem)[4:8, 2:])


def test_nvfp4_rounds_once(bench):
    """The sum of 64 products and C is rounded to fp32 once: 2^24 + 0.5 + 0.75 is 2^24 + 2."""
    problem = {name: np.zeros_like(value) for name, value in _fp4_problem().items()}
    problem["scale_a"] += 56  # 1.0
    problem["scale_b"] += 56
    problem["c"] += 1 << 24
    problem["a"][:, 0], problem["b"][:, 0] = 1, 2  # 0.5 * 1
    problem["a"][:, 63], problem["b"][:, 63] = 1, 3  # 0.5 * 1.5
    assert (_fp4(bench, problem) == (1 << 24) + 2).all()


def _fp8(
    bench,
    problem: dict[str, np.ndarray],
    bytes_: tuple[int, int],
    threads: tuple[int, int],
    instruction: str = _FP8,
):
    """bytes_ and threads: the scale selectors of A and of B. All other bytes of the scales are NaN."""
    rows, columns = np.arange(16), np.arange(8)
    registers = []
    for scales, lanes, byte in (
        (problem["scale_a"], 4 * (rows % 8) + rows // 8 + 2 * threads[0], bytes_[0]),
        (problem["scale_b"], 4 * columns + threads[1], bytes_[1]),
    ):
        words = np.full((32, 4), 0xFF, np.uint8)
        words[lanes, byte] = scales
        registers.append(words.view(np.uint32))
    bench.target = "sm_120a"
    bench.emulator.configure(compute_capability=120)
    return _multiply(
        bench,
        instruction,
        _fragment_a(problem["a"], 8),
        _fragment_b(problem["b"], 8),
        _fragment_c(problem["c"]),
        *registers,
        tail=f", {{%r10}}, {{{bytes_[0]}, {threads[0]}}}, {{%r11}}, {{{bytes_[1]}, {threads[1]}}}",
    )


@pytest.mark.parametrize(("bytes_", "threads"), [((0, 0), (0, 0)), ((3, 1), (1, 3)), ((2, 3), (0, 2))])
def test_mxfp8(bench, bytes_, threads):
    """One scale factor for the 32 values of a row, in the byte and the lane that the selectors say."""
    problem = {
        "a": _RNG.integers(40, 72, (16, 32)) | _RNG.integers(0, 2, (16, 32)) << 7,
        "b": _RNG.integers(40, 72, (8, 32)) | _RNG.integers(0, 2, (8, 32)) << 7,
        "scale_a": _RNG.integers(120, 134, 16),
        "scale_b": _RNG.integers(120, 134, 8),
        "c": _RNG.integers(-99, 99, (16, 8)),
    }
    a, b = (np.where(problem[x] & 0x80, -1, 1) * _e4m3(problem[x]) for x in "ab")
    scale_a, scale_b = (2.0 ** (problem[f"scale_{x}"] - 127.0) for x in "ab")
    want = _fragment_c(a @ b.T * np.outer(scale_a, scale_b) + problem["c"])
    np.testing.assert_array_equal(_fp8(bench, problem, bytes_, threads), want)
    problem["scale_a"][9] = 255  # NaN
    is_nan = np.isnan(_fp8(bench, problem, bytes_, threads))
    np.testing.assert_array_equal(is_nan, _fragment_c(np.repeat(np.arange(16)[:, None] == 9, 8, 1)) == 1)


@pytest.mark.parametrize(("bytes_", "threads"), [((0, 0), (0, 0)), ((2, 3), (0, 2))])
def test_mxfp8_beside_mxfp4(bench, bytes_, threads):
    """A value of B in e2m1 lies in bits 2 to 5 of its byte."""
    problem = {
        "a": _RNG.integers(40, 72, (16, 32)) | _RNG.integers(0, 2, (16, 32)) << 7,
        "b": _RNG.integers(0, 16, (8, 32)) << 2,
        "scale_a": _RNG.integers(120, 134, 16),
        "scale_b": _RNG.integers(120, 134, 8),
        "c": _RNG.integers(-99, 99, (16, 8)),
    }
    a, b = np.where(problem["a"] & 0x80, -1, 1) * _e4m3(problem["a"]), _e2m1(problem["b"] >> 2)
    scale_a, scale_b = (2.0 ** (problem[f"scale_{x}"] - 127.0) for x in "ab")
    want = _fragment_c(a @ b.T * np.outer(scale_a, scale_b) + problem["c"])
    np.testing.assert_array_equal(_fp8(bench, problem, bytes_, threads, _FP8_FP4), want)
    problem["b"][3, 5] |= 1
    with pytest.raises(EmulatorError, match="only bits 2 to 5 are modelled"):
        _fp8(bench, problem, bytes_, threads, _FP8_FP4)


def test_nvfp4_truncated(bench):
    """Against MMA-Sim's model: groups of 16 exact products, 35 fraction bits, truncation to fp32."""
    problem = _fp4_problem()
    for name in ("scale_a", "scale_b"):  # all magnitudes, subnormal ones and 0 included
        problem[name] = _RNG.integers(0, 127, problem[name].shape)
    problem["c"] = _RNG.normal(0, 1, (16, 8)) * 2.0 ** _RNG.integers(-30, 40, (16, 8))
    problem["c"] = problem["c"].astype(np.float32).astype(np.float64)
    problem["c"][3] = 0
    want = np.zeros((16, 8))
    a, b = _e2m1(problem["a"]), _e2m1(problem["b"])
    for m in range(16):
        for n in range(8):
            terms = [number(problem["c"][m, n], -126)]
            for i in range(4):
                dot = Fraction(float(a[m, 16 * i : 16 * i + 16] @ b[n, 16 * i : 16 * i + 16]))
                scales = [_ue4m3(problem["scale_a"][m, i]), _ue4m3(problem["scale_b"][n, i])]
                terms.append(product((dot, 0), *(number(scale, -6) for scale in scales)))
            want[m, n] = fused_sum(terms, 35)
    got = _fp4(bench, problem, arithmetic="truncated")
    np.testing.assert_array_equal(got, _fragment_c(want))
    assert (got != _fp4(bench, problem)).any()  # the two arithmetics differ


@pytest.mark.parametrize("arithmetic", ["rounded", "truncated"])
def test_sums_that_fit_in_fp32_do_not_depend_on_the_arithmetic(bench, arithmetic):
    problem = _fp4_problem()
    np.testing.assert_array_equal(_fp4(bench, problem, arithmetic=arithmetic), _fp4_expected(problem))
    problem["scale_b"][3, 1] = 0xFF  # NaN
    is_nan = np.isnan(_fp4(bench, problem, arithmetic=arithmetic))
    np.testing.assert_array_equal(is_nan, _fragment_c(np.broadcast_to(np.arange(8) == 3, (16, 8))) == 1)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit_truncated(bench, name):
    """MMA-Sim: 16 products and C are summands with 25 fraction bits, and the sum is truncated to fp32."""
    bits, least = (13, -14) if name == "f16" else (16, -126)
    values = [_RNG.normal(0, 1, n) * 2.0 ** _RNG.integers(-12, 8, n) for n in ((16, 16), (8, 16))]
    values = [(x.astype(np.float32).view(np.uint32) >> bits << bits).view(np.float32) for x in values]
    codes = [
        x.astype(np.float16).view(np.uint16) if name == "f16" else x.view(np.uint32) >> 16 for x in values
    ]
    if name == "f16":
        values = [x.astype(np.float16) for x in values]
    c = (_RNG.normal(0, 1, (16, 8)) * 2.0 ** _RNG.integers(-20, 20, (16, 8))).astype(np.float32)
    bench.emulator.configure(arithmetic="truncated")
    a, b = _fragment_a(codes[0], 16), _fragment_b(codes[1], 16)
    got = _multiply(bench, f"m16n8k16.row.col.f32.{name}.{name}.f32", a, b, _fragment_c(c))
    want = np.zeros((16, 8))
    for m in range(16):
        for n in range(8):
            pairs = zip(values[0][m], values[1][n], strict=True)
            terms = [product(number(float(x), least), number(float(y), least)) for x, y in pairs]
            want[m, n] = fused_sum([number(float(c[m, n]), -126), *terms], 25)
    np.testing.assert_array_equal(got, _fragment_c(want))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit(bench, name):
    values = [_RNG.integers(-40, 40, shape) / 8 for shape in ((16, 16), (8, 16))]
    codes = [
        x.astype(np.float16).view(np.uint16) if name == "f16" else x.astype(np.float32).view(np.uint32) >> 16
        for x in values
    ]
    c = _RNG.normal(0, 1, (16, 8)).astype(np.float32)
    a, b = _fragment_a(codes[0], 16), _fragment_b(codes[1], 16)
    got = _multiply(bench, f"m16n8k16.row.col.f32.{name}.{name}.f32", a, b, _fragment_c(c))
    np.testing.assert_array_equal(got, _fragment_c(values[0] @ values[1].T + c.astype(np.float64)))


def _failure(bench, statement: str) -> str:
    bench.kernel(statement, "x")
    with pytest.raises(EmulatorError) as failure:
        bench.launch(bench.emulator.upload(np.zeros(4, np.uint32)))
    return str(failure.value)


_REGISTERS = "{%r6, %r7, %r8, %r9}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9}"


def test_what_is_not_modelled_is_refused(bench):
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    assert f"not modelled: {opcode}" in _failure(bench, f"{opcode} {_REGISTERS};")
    opcode = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    bits = "mov.u32 %r60, %tid.x; setp.lt.u32 %p1, %r60, 7; @%p1"
    assert "in lanes 0x0000007f, must be" in _failure(bench, f"{bits} {opcode} {_REGISTERS};")
    bench.target = "sm_120f"
    bench.emulator.configure(compute_capability=120)
    scales = "{%r10}, {%h1, %h2}, {%r11}, {0, 0}"
    for byte, thread in ((1, 0), (0, 2)):
        wrong = f"mov.u16 %h1, {byte}; mov.u16 %h2, {thread}; mma.sync.aligned.{_FP4} {_REGISTERS}, {scales};"
        assert f"scale selector {{{byte}, {thread}}}, must be {{0, 0 to 1}}" in _failure(bench, wrong)
    wrong = f"mov.u16 %h1, 4; mov.u16 %h2, 0; mma.sync.aligned.{_FP8} {_REGISTERS}, {scales};"
    assert "scale selector {4, 0}, must be {0 to 3, 0 to 1}" in _failure(bench, wrong)


@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
@pytest.mark.parametrize(("bytes_", "threads"), [((0, 0), (0, 0)), ((2, 0), (1, 3)), ((0, 2), (0, 2))])
def test_mxfp4(bench, kind, bytes_, threads):
    """Two scale factors of a row, each for 32 values, from the byte on that the selector says."""
    rows, columns = np.arange(16), np.arange(8)
    a, b, c = _RNG.integers(0, 16, (16, 64)), _RNG.integers(0, 16, (8, 64)), _RNG.integers(-99, 99, (16, 8))
    scales = [_RNG.integers(124, 131, (n, 2)) for n in (16, 8)]
    registers = []
    for values, lanes, byte in (
        (scales[0], 4 * (rows % 8) + rows // 8 + 2 * threads[0], bytes_[0]),
        (scales[1], 4 * columns + threads[1], bytes_[1]),
    ):
        words = np.full((32, 4), 0xFF, np.uint8)
        words[lanes, byte : byte + 2] = values
        registers.append(words.view(np.uint32))
    bench.target = "sm_120a"
    bench.emulator.configure(compute_capability=120)
    got = _multiply(
        bench,
        _MXFP4.format(kind=kind),
        _fragment_a(a, 4),
        _fragment_b(b, 4),
        _fragment_c(c),
        *registers,
        tail=f", {{%r10}}, {{{bytes_[0]}, {threads[0]}}}, {{%r11}}, {{{bytes_[1]}, {threads[1]}}}",
    )
    left, right = (
        _e2m1(x) * (2.0 ** (power - 127.0)).repeat(32, axis=1)
        for x, power in zip((a, b), scales, strict=True)
    )
    np.testing.assert_array_equal(got, _fragment_c(left @ right.T + c))


def test_mxfp4_selects_pairs_of_scale_factors(bench):
    zeros = [np.zeros((32, count), np.uint32) for count in (4, 2, 4, 1, 1)]
    bench.target = "sm_120a"
    bench.emulator.configure(compute_capability=120)
    with pytest.raises(EmulatorError, match=r"scale selector \{1, 0\}, must be \{0 or 2, 0 to 1\}"):
        _multiply(bench, _MXFP4.format(kind="mxf4"), *zeros, tail=", {%r10}, {1, 0}, {%r11}, {0, 0}")
