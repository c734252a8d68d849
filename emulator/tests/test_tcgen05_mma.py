"""tcgen05.mma of NVFP4, MXFP8 and MXFP4 with scale factors that a kernel stores, against numpy.

A lies in shared memory as threads store it, without a swizzle, or as TMA writes it, with one.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from fused_sum import fused_sum
from ptxemu.emulator import EmulatorError

_ROWS, _COLUMNS, _BLOCKS = 128, 8, 4  # of D; the scale factors of a row
_ONES = 0x22  # two codes of 1.0

# Matrices without a swizzle: 16 bytes of 8 rows are consecutive, the next 16 bytes of a row follow after 128
# bytes and the next 8 rows after 256 bytes. All codes are 1.0, except in an A that TMA has written: D is
# 16 times the sum over the blocks of the products of scale factors.
_DESCRIPTOR = 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46
_INSTRUCTION = _ROWS // 16 << 24 | _COLUMNS // 8 << 17 | 1 << 7 | 1 << 10  # e2m1, ue4m3
_SHARED = """.shared .align 1024 .b8 a[20480];
.shared .align 8 .b64 loaded;
.shared .align 128 .b8 b[256];
.shared .align 8 .b64 done;
.shared .align 4 .b32 tmem;"""
_HEAD = f"""
mov.u32 %r60, %tid.x;
and.b32 %r61, %r60, 31;
shr.u32 %r62, %r60, 5;
setp.eq.u32 %p3, %r60, 0;
mov.u32 %r0, {_ONES * 0x01010101};
"""
# The codes of A at %r1, of which %d3 is the descriptor.
_STORE_A = f"""
mov.u32 %r1, a;
mad.lo.u32 %r2, %r60, 32, %r1;
st.shared.v4.u32 [%r2], {{%r0, %r0, %r0, %r0}};
st.shared.v4.u32 [%r2+16], {{%r0, %r0, %r0, %r0}};
mov.u64 %d3, {_DESCRIPTOR};
"""
_BODY = f"""
mov.u32 %r3, b;
setp.lt.u32 %p1, %r60, 16;
mad.lo.u32 %r2, %r60, 16, %r3;
@%p1 st.shared.v4.u32 [%r2], {{%r0, %r0, %r0, %r0}};
fence.proxy.async.shared::cta;

// one warp allocates 32 columns: D has 8 of them, the scale factors of A 4 and those of B 1
setp.eq.u32 %p2, %r62, 0;
mov.u32 %r4, tmem;
mov.u32 %r5, done;
@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;
@%p3 mbarrier.init.shared.b64 [%r5], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
ld.shared.u32 %r6, [tmem];

// column c of lane l holds the scale factors of row 32 c + l % 32, in each of the four warps
mad.wide.u32 %d1, %r61, 4, %scale_a;
mad.wide.u32 %d2, %r61, 4, %scale_b;
ld.global.u32 %r10, [%d1];
ld.global.u32 %r11, [%d1+128];
ld.global.u32 %r12, [%d1+256];
ld.global.u32 %r13, [%d1+384];
ld.global.u32 %r14, [%d2];
shl.b32 %r15, %r62, 21;
add.u32 %r16, %r6, %r15;
add.u32 %r17, %r16, 8;
add.u32 %r18, %r16, 12;
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r17], {{%r10, %r11, %r12, %r13}};
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r18], {{%r14}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;

shr.u32 %r20, %r1, 4;
cvt.u64.u32 %d4, %r20;
add.u64 %d3, %d3, %d4;
shr.u32 %r20, %r3, 4;
cvt.u64.u32 %d4, %r20;
add.u64 %d4, %d4, {_DESCRIPTOR};
mov.u32 %r21, {_INSTRUCTION};
add.u32 %r22, %r6, 8;
add.u32 %r23, %r6, 12;
setp.ne.u32 %p4, %r6, %r6;
@!%p3 bra WAIT;
tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r6], %d3, %d4, %r21, [%r22], [%r23], %p4;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p5, [%r5], 0;
@!%p5 bra WAIT;
tcgen05.fence::after_thread_sync;

tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}}, [%r16];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %d5, %r60, 32, %y;
st.global.v4.u32 [%d5], {{%r30, %r31, %r32, %r33}};
st.global.v4.u32 [%d5+16], {{%r34, %r35, %r36, %r37}};
bar.sync 0;
@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
"""


def _multiply(bench, scale_a: np.ndarray, scale_b: np.ndarray) -> np.ndarray:
    padded = np.zeros((32, _BLOCKS), np.uint8)  # of B, a lane each
    padded[:_COLUMNS] = scale_b
    bench.kernel(_HEAD + _STORE_A + _BODY, "scale_a", "scale_b", "y", declarations=_SHARED)
    y = bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    bench.launch(bench.emulator.upload(scale_a), bench.emulator.upload(padded), y, block=(128, 1, 1))
    assert not bench.emulator.hazards()
    return bench.emulator.download(y)


def _expected(scale_a: np.ndarray, scale_b: np.ndarray) -> np.ndarray:
    a, b = ((1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - 7.0) for codes in (scale_a, scale_b))
    return (16 * a @ b.T).astype(np.float32)


def test_the_sign_bit_of_a_scale_factor_is_ignored(bench):
    """ue4m3 has 7 bits: a scale factor with bit 7 is the same number, and 0xFF is NaN, as 0x7F is."""
    rng = np.random.default_rng(9)
    scale_a, scale_b = (rng.integers(48, 64, (n, _BLOCKS)).astype(np.uint8) for n in (_ROWS, _COLUMNS))
    want = _expected(scale_a, scale_b)
    np.testing.assert_array_equal(_multiply(bench, scale_a, scale_b), want)
    signed_a, signed_b = (x | rng.integers(0, 2, x.shape).astype(np.uint8) * 0x80 for x in (scale_a, scale_b))
    np.testing.assert_array_equal(_multiply(bench, signed_a, signed_b), want)
    signed_a[70, 2] = 0xFF
    is_nan = np.isnan(_multiply(bench, signed_a, signed_b))
    assert is_nan[70].all()
    assert not np.delete(is_nan, 70, axis=0).any()


@pytest.mark.parametrize(
    ("instruction", "report"),
    [
        ("fence.proxy.async.shared::cta;", "written by threads without a fence.proxy.async"),
        ("fence.mbarrier_init.release.cluster;", "its init was not fenced"),
        ("tcgen05.wait::st.sync.aligned;", "while a tcgen05.st that writes"),
    ],
)
def test_a_missing_instruction_is_a_hazard(bench, instruction, report):
    bench.emulator.configure("lazy")
    body = (_HEAD + _STORE_A + _BODY).replace(instruction, "")
    bench.kernel(body, "scale_a", "scale_b", "y", declarations=_SHARED)
    ones = bench.emulator.upload(np.full((_ROWS, _BLOCKS), 0x38, np.uint8))
    bench.launch(ones, ones, bench.emulator.empty((_ROWS, _COLUMNS), np.float32), block=(128, 1, 1))
    assert report in bench.emulator.hazards()


def test_truncated(bench):
    """Against MMA-Sim's model: a summand is 16 products, all 1 here, with the exponent of their scales."""
    rng = np.random.default_rng(4)
    scale_a, scale_b = (rng.integers(8, 127, (n, _BLOCKS)).astype(np.uint8) for n in (_ROWS, _COLUMNS))
    a, b = (((codes >> 3) - 7, 1 + (codes & 7) / 8) for codes in (scale_a.astype(int), scale_b.astype(int)))
    want = np.zeros((_ROWS, _COLUMNS), np.float32)
    for m in range(_ROWS):
        for n in range(_COLUMNS):
            terms = [
                (Fraction(16 * a[1][m, i] * b[1][n, i]), int(a[0][m, i] + b[0][n, i])) for i in range(_BLOCKS)
            ]
            want[m, n] = fused_sum([*terms, (Fraction(0), -126)], 35)
    bench.emulator.configure(arithmetic="truncated")
    got = _multiply(bench, scale_a, scale_b)
    np.testing.assert_array_equal(got, want)
    bench.emulator.configure()
    assert (got != _multiply(bench, scale_a, scale_b)).any()  # the two arithmetics differ


def _load_a(start: int, row_bytes: int, k_byte: int, layout: int) -> str:
    """PTX: TMA writes 128 rows at the byte `start` of a; the product begins at `k_byte` of each row."""
    descriptor = 1 << 16 | 8 * row_bytes >> 4 << 32 | 1 << 46 | layout << 61
    return f"""
mov.u32 %r1, a;
add.u32 %r1, %r1, {start};
mov.u32 %r40, loaded;
mov.u64 %d6, k_map;
mov.u32 %r41, 0;
@%p3 mbarrier.init.shared.b64 [%r40], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r40], {_ROWS * row_bytes};
@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r1], [%d6, {{%r41, %r41}}], [%r40];
LOADED:
mbarrier.try_wait.parity.shared.b64 %p6, [%r40], 0;
@!%p6 bra LOADED;
add.u32 %r1, %r1, {k_byte};
mov.u64 %d3, 0x{descriptor:x};
"""


@pytest.mark.parametrize(
    ("swizzle", "layout", "k_byte"), [("32B", 6, 0), ("64B", 4, 32), ("128B", 2, 0), ("128B", 2, 96)]
)
@pytest.mark.parametrize("start", [0, 128, 512, 896, 1024])
def test_a_swizzled_matrix_may_start_at_any_row_of_the_pattern(bench, swizzle, layout, k_byte, start):
    """The swizzle of TMA and that of the product are the same function of the address."""
    row_bytes = int(swizzle[:-1])
    a = np.random.default_rng(3).integers(0, 256, (_ROWS, row_bytes)).astype(np.uint8)
    body = _HEAD + _load_a(start, row_bytes, k_byte, layout) + _BODY
    bench.kernel(body, "scale_a", "scale_b", "y", declarations=_SHARED, tensor_map=True)
    array, y = bench.emulator.upload(a), bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    box = (_ROWS, row_bytes // 2)
    ones = bench.emulator.upload(np.full((_ROWS, _BLOCKS), 0x38, np.uint8))
    bench.launch(ones, ones, y, tensor_map=bench.tensor_map(array, *box, box, swizzle), block=(128, 1, 1))
    assert not bench.emulator.hazards()
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    read = a[:, k_byte : k_byte + 32]
    sums = values[read & 15].sum(1) + values[read >> 4].sum(1)
    np.testing.assert_array_equal(bench.emulator.download(y), np.repeat(sums[:, None], _COLUMNS, 1))


def test_a_pattern_that_starts_elsewhere_is_not_modelled(bench):
    """The base offset says where. TMA writes no such pattern."""
    store = _STORE_A.replace(str(_DESCRIPTOR), str(_DESCRIPTOR | 4 << 49))
    bench.kernel(_HEAD + store + _BODY, "scale_a", "scale_b", "y", declarations=_SHARED)
    ones = bench.emulator.upload(np.full((_ROWS, _BLOCKS), 0x38, np.uint8))
    y = bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    with pytest.raises(EmulatorError, match="base offset 4, leading mode 0 are not modelled"):
        bench.launch(ones, ones, y, block=(128, 1, 1))


# Products of MXFP8: 32 values in e4m3 and one scale factor for each row.
_MXFP8_INSTRUCTION = _ROWS // 16 << 24 | _COLUMNS // 8 << 17 | 1 << 23  # e4m3, ue8m0
_MXFP8_HEAD = _HEAD.replace(str(_ONES * 0x01010101), str(0x38404840))  # 2, 4, 2 and 1 as values of A and B
_KIND = "kind::mxf4nvf4.block_scale.block16"


def _mxfp8_body(id_a: int, id_b: int) -> str:
    instruction = _MXFP8_INSTRUCTION | id_a << 29 | id_b << 4
    return _BODY.replace(str(_INSTRUCTION), str(instruction)).replace(_KIND, "kind::mxf8f6f4.block_scale")


@pytest.mark.parametrize(("id_a", "id_b"), [(0, 0), (1, 1), (3, 2)])
def test_mxfp8(bench, id_a, id_b):
    """The ids say which byte of a word of scale factors belongs to the 32 values of a row."""
    rng = np.random.default_rng(9)
    scale_a, scale_b = (rng.integers(120, 134, (n, 4)).astype(np.uint8) for n in (_ROWS, _COLUMNS))
    padded = np.zeros((32, 4), np.uint8)
    padded[:_COLUMNS] = scale_b
    body = _MXFP8_HEAD + _STORE_A + _mxfp8_body(id_a, id_b)
    bench.kernel(body, "scale_a", "scale_b", "y", declarations=_SHARED)
    y = bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    bench.launch(bench.emulator.upload(scale_a), bench.emulator.upload(padded), y, block=(128, 1, 1))
    assert not bench.emulator.hazards()
    a, b = 2.0 ** (scale_a[:, id_a] - 127.0), 2.0 ** (scale_b[:, id_b] - 127.0)
    total = 8 * (2.0**2 + 4.0**2 + 2.0**2 + 1.0**2)
    np.testing.assert_array_equal(bench.emulator.download(y), total * np.outer(a, b).astype(np.float32))


@pytest.mark.parametrize(("id_a", "id_b"), [(0, 0), (3, 2)])
def test_mxfp8_beside_mxfp4(bench, id_a, id_b):
    """B is e2m1: 16 values in the first 8 of 16 bytes, of which the others, all ones here, are not read."""
    rng = np.random.default_rng(9)
    scale_a, scale_b = (rng.integers(120, 134, (n, 4)).astype(np.uint8) for n in (_ROWS, _COLUMNS))
    padded = np.zeros((32, 4), np.uint8)
    padded[:_COLUMNS] = scale_b
    instruction = _MXFP8_INSTRUCTION | 5 << 10
    body = _mxfp8_body(id_a, id_b).replace(
        str(_MXFP8_INSTRUCTION | id_a << 29 | id_b << 4), str(instruction | id_a << 29 | id_b << 4)
    )
    store = "@%p1 st.shared.v4.u32 [%r2], {%r0, %r0, "
    assert store + "%r0, %r0};" in body
    body = body.replace(store + "%r0, %r0};", "mov.u32 %r50, 0xFFFFFFFF;\n" + store + "%r50, %r50};")
    bench.kernel(_MXFP8_HEAD + _STORE_A + body, "scale_a", "scale_b", "y", declarations=_SHARED)
    y = bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    bench.launch(bench.emulator.upload(scale_a), bench.emulator.upload(padded), y, block=(128, 1, 1))
    assert not bench.emulator.hazards()
    a, b = 2.0 ** (scale_a[:, id_a] - 127.0), 2.0 ** (scale_b[:, id_b] - 127.0)
    # The word 0x38404840 is 2, 4, 2, 1 in e4m3, and 0, 2, -0, 2, 0, 2, -0, 1.5 in e2m1.
    total = 4 * (4 * 2 + 1 * 2 + 4 * 2 + 1 * 1.5)
    np.testing.assert_array_equal(bench.emulator.download(y), total * np.outer(a, b).astype(np.float32))


def test_mxfp8_needs_ue8m0_scale_factors(bench):
    body = _mxfp8_body(0, 0).replace(str(_MXFP8_INSTRUCTION), str(_MXFP8_INSTRUCTION & ~(1 << 23)))
    bench.kernel(_MXFP8_HEAD + _STORE_A + body, "scale_a", "scale_b", "y", declarations=_SHARED)
    ones = bench.emulator.upload(np.full((_ROWS, _BLOCKS), 0x7F, np.uint8))
    with pytest.raises(EmulatorError, match="formats 0 and 0, ue4m3 scales"):
        bench.launch(ones, ones, bench.emulator.empty((_ROWS, _COLUMNS), np.float32), block=(128, 1, 1))


# Products of MXFP4: 64 values in e2m1 and two scale factors for each row.
_MXFP4_INSTRUCTION = _MXFP8_INSTRUCTION | 1 << 7 | 1 << 10  # e2m1, ue8m0


def _mxfp4_body(kind: str, id_a: int, id_b: int) -> str:
    instruction = _MXFP4_INSTRUCTION | id_a << 29 | id_b << 4
    return _BODY.replace(str(_INSTRUCTION), str(instruction)).replace(_KIND, kind)


@pytest.mark.parametrize(
    "kind",
    [
        "kind::mxf4.block_scale.block32",
        "kind::mxf4.block_scale.scale_vec::2X",
        "kind::mxf4nvf4.block_scale.scale_vec::2X",
    ],
)
@pytest.mark.parametrize(("id_a", "id_b"), [(0, 0), (2, 0), (0, 2)])
def test_mxfp4(bench, kind, id_a, id_b):
    """The ids say where the two bytes of a word of scale factors begin, one for each 32 values of a row."""
    rng = np.random.default_rng(9)
    scale_a, scale_b = (rng.integers(120, 134, (n, 4)).astype(np.uint8) for n in (_ROWS, _COLUMNS))
    padded = np.zeros((32, 4), np.uint8)
    padded[:_COLUMNS] = scale_b
    head = _HEAD.replace(str(_ONES * 0x01010101), str(0x42424242))  # 1 and 2 as values of A and B
    bench.kernel(
        head + _STORE_A + _mxfp4_body(kind, id_a, id_b), "scale_a", "scale_b", "y", declarations=_SHARED
    )
    y = bench.emulator.empty((_ROWS, _COLUMNS), np.float32)
    bench.launch(bench.emulator.upload(scale_a), bench.emulator.upload(padded), y, block=(128, 1, 1))
    assert not bench.emulator.hazards()
    a, b = 2.0 ** (scale_a[:, id_a : id_a + 2] - 127.0), 2.0 ** (scale_b[:, id_b : id_b + 2] - 127.0)
    total = 16 * (1.0**2 + 2.0**2)  # of a block
    np.testing.assert_array_equal(bench.emulator.download(y), (total * a @ b.T).astype(np.float32))


@pytest.mark.parametrize(
    ("instruction", "message"),
    [(_MXFP4_INSTRUCTION & ~(1 << 23), "ue4m3 scales"), (_MXFP4_INSTRUCTION | 1 << 29, "scale ids 1 and 0")],
    ids=["ue4m3", "id-1"],
)
def test_mxfp4_refusals(bench, instruction, message):
    body = _BODY.replace(str(_INSTRUCTION), str(instruction)).replace(_KIND, "kind::mxf4.block_scale.block32")
    bench.kernel(_HEAD + _STORE_A + body, "scale_a", "scale_b", "y", declarations=_SHARED)
    ones = bench.emulator.upload(np.full((_ROWS, _BLOCKS), 0x7F, np.uint8))
    with pytest.raises(EmulatorError, match=message):
        bench.launch(ones, ones, bench.emulator.empty((_ROWS, _COLUMNS), np.float32), block=(128, 1, 1))
