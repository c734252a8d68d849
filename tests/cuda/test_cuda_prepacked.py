"""Prepacked weights on a GPU of compute capability 9.0: every kernel, both kinds of activations, layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, PrepackedTensor, reference
from fp4gemm.activations import ACTIVATIONS
from fp4gemm.kernel_table import KernelInfo
from helpers import FLOATS, assert_bits, assert_poison_intact, captured, make, poisoned, short
from moe import ends_of, rows_of
from torch import Tensor

pytestmark = pytest.mark.gpu

# m around the heights of tiles; n and k that are no multiples of the chunks of 64, one chunk, many chunks.
SHAPES = [
    (1, 8, 32),
    (7, 96, 96),
    (16, 64, 64),
    (33, 72, 2880),
    (64, 2880, 96),
    (128, 256, 512),
    (129, 264, 160),
    (300, 528, 1056),
]
SIZES = [(513, 0, 300, 1, 7, 128), (3, 1, 0, 0, 16, 2, 5), (0, 300, 0), (0, 0)]
PLAIN = (torch.bfloat16, torch.float16)
# The operands of kernels, by dtype.
A_DTYPES = {"prepacked": torch.float16, "prepacked_bf16": torch.bfloat16}


def kernels(mode: str, operand: str | None = None) -> list[KernelInfo]:
    rows = [k for k in fp4gemm.kernels() if k.arch == 90 and k.mode == mode]
    found = [k for k in rows if k.operand in A_DTYPES]  # tests/cuda/test_cuda_fp8.py has those of FP8 tokens
    return [k for k in found if operand in (None, k.operand)]


def exact(x: Tensor, w: NVFP4Tensor, out_dtype: torch.dtype, amax: Tensor | None, **terms: Any) -> Tensor:
    """The float64 product of x and the weight, rounded once, and the epilogue."""
    alpha = 1 / (6 * w.e4m3_max) if amax is None else 1 / (36 * w.e4m3_max * 448)
    factors = {"alpha": alpha, "alpha_row": amax, "alpha_col": w.amax}
    return reference.gemm(x, w.codes, scale_b=w.scales, **factors, out_dtype=out_dtype, **terms)


def operands(
    m: int, n: int, k: int, device: torch.device, gen: torch.Generator, scaling: str = "row"
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    x, w = (make("normal", rows, k, torch.bfloat16, gen).to(device) for rows in (m, n))
    return fp4gemm.quantize(x, scaling=scaling), fp4gemm.quantize(w, scaling=scaling)


def every_product(device: torch.device) -> NVFP4Tensor:
    """A weight (32, 128) with each of the 127 scales twice, and all 16 codes."""
    codes = torch.stack([(torch.arange(16) + 3 * block) % 16 for block in range(256)]).view(32, 128)
    finite = torch.cat((torch.arange(0x7F), torch.tensor([0x38])))
    scales = torch.cat((finite, finite)).view(32, 8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    t = NVFP4Tensor.from_compact(packed, scales.to(torch.uint8), torch.ones(1))
    return t.to(device)


# ---- values


@pytest.mark.parametrize("operand", A_DTYPES)
def test_one_hot_rows_give_back_every_code_and_scale(operand: str, hopper: torch.device) -> None:
    """D is the transposed decoded weight, bit for bit: 16 codes times 127 scales; the sum turns -0 into 0."""
    w = every_product(hopper)
    data = fp4gemm.prepack(w).data
    values = reference.decode(w.codes, w.scales).float().T.contiguous() + 0.0
    one = torch.eye(128, dtype=A_DTYPES[operand], device=hopper)
    offs = ends_of((5, 0, 123), hopper)
    for kernel in kernels("dense", operand) + kernels("grouped", operand):
        if kernel.epilogue != "rowcol":
            continue
        forced = {"b_rows": 32, "kernel_name": kernel.name, "out_dtype": kernel.out_dtype}
        if kernel.mode == "dense":
            got = torch.ops.fp4gemm.gemm(one, data, **forced)
        else:
            got = torch.ops.fp4gemm.gemm(one, data.expand(3, -1).contiguous(), offs=offs, **forced)
        assert_bits(got + 0.0, values.to(kernel.out_dtype), kernel.name)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_every_dense_kernel(m: int, n: int, k: int, hopper: torch.device, gen: torch.Generator) -> None:
    """Sums of Gaussian data are exact in float32, so D is the rounded float64 product for any a and b."""
    a, w = operands(m, n, k, hopper, gen)
    p, decoded = fp4gemm.prepack(w), fp4gemm.decode(a)
    bias = torch.randn(n, generator=gen).to(hopper)
    ran = 0
    for kernel in kernels("dense", "prepacked"):
        gated = kernel.is_gated
        if gated and n % 16:
            continue
        dtype, width = kernel.out_dtype, n // 2 if gated else n
        options: dict[str, Any] = {"bias": bias, "activation": 4 if gated else 0}
        want = exact(decoded.data, w, dtype, a.amax, **options)
        for left, right in ((decoded, p), (a, p), (a, w)):
            view, buffer = poisoned(m, width, dtype, hopper, pad=8)
            activation = "swiglu" if gated else None
            fp4gemm.mm(left, right, bias=bias, activation=activation, out=view, kernel=kernel.name)
            assert_bits(view, want, f"{kernel.name}, {type(left).__name__}, {type(right).__name__}")
            assert_poison_intact(buffer, m, width)
        ran += 1
    assert ran > 0


@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PLAIN, ids=short)
def test_activations_that_are_not_quantized(
    dtype: torch.dtype, m: int, n: int, k: int, hopper: torch.device, gen: torch.Generator
) -> None:
    """Small integers, of which sums fit float32, by every kernel; Gaussian ones within 1e-4 of magnitudes."""
    _, w = operands(1, n, k, hopper, gen)
    p = fp4gemm.prepack(w)
    x = make("integers", m, k, dtype, gen).to(hopper)
    operand = next(name for name, read in A_DTYPES.items() if read is dtype)
    for kernel in kernels("dense", operand):
        gated = kernel.is_gated
        if gated and n % 16:
            continue
        want = exact(x, w, kernel.out_dtype, None, activation=4 if gated else 0)
        view, buffer = poisoned(m, want.shape[1], kernel.out_dtype, hopper, pad=8)
        for right in (p, w):
            view.fill_(torch.nan)
            fp4gemm.mm(x, right, activation="swiglu" if gated else None, out=view, kernel=kernel.name)
            assert_bits(view, want, f"{kernel.name}, {type(right).__name__}")
        assert_poison_intact(buffer, m, want.shape[1])
    x = make("normal", m, k, dtype, gen).to(hopper)
    left, right = x.double(), w.dequantize().double()
    for weight in (p, w):  # w is prepacked, or decoded in the call
        got = fp4gemm.mm(x, weight, out_dtype=torch.float32)
        assert ((got.double() - left @ right.T).abs() <= 1e-4 * (left.abs() @ right.abs().T)).all()


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("m", [3, 200])
def test_every_term(
    m: int, out_dtype: torch.dtype, scaling: str, hopper: torch.device, gen: torch.Generator
) -> None:
    n, k = 144, 544
    a, w = operands(m, n, k, hopper, gen, scaling)
    decoded, p = fp4gemm.decode(a), fp4gemm.prepack(w)
    x = make("integers", m, k, torch.bfloat16, gen).to(hopper)
    bias, c = (
        torch.randn(n, generator=gen).to(hopper),
        torch.randn(m, n, generator=gen).to(hopper).to(out_dtype),
    )
    for left, values, amax in ((a, decoded.data, a.amax), (decoded, decoded.data, a.amax), (x, x, None)):
        for activation in ACTIVATIONS:
            if activation.is_gated and out_dtype is torch.float32:
                continue
            terms = {"bias": bias} if activation.is_gated else {"bias": bias, "c": c, "beta": -0.5}
            got = fp4gemm.mm(left, p, activation=activation.name, out_dtype=out_dtype, **terms)
            want = exact(values, w, out_dtype, amax, activation=activation.number, **terms)
            assert_bits(got, want, f"{activation.name}")
        out = c.clone()
        fp4gemm.mm(left, p, c=out, beta=2.0, out=out)
        assert_bits(out, exact(values, w, out_dtype, amax, c=c, beta=2.0), "in place")
        for some in (None, bias):  # the usual epilogue
            want = exact(values, w, out_dtype, amax, bias=some)
            assert_bits(fp4gemm.mm(left, p, bias=some, out_dtype=out_dtype), want, "neither")


@pytest.mark.parametrize(("n", "k"), [(192, 4160), (640, 2048), (4224, 8192)], ids=str)
def test_tiles_divided_along_k(n: int, k: int, hopper: torch.device, gen: torch.Generator) -> None:
    """Every kernel, whole and partial tiles, with C and gated; 300 launches in a row leave no mark behind."""
    most = max(kernel.tile[0] for kernel in kernels("dense", "prepacked"))
    a, w = operands(most + 9, n, k, hopper, gen)
    p, decoded = fp4gemm.prepack(w), fp4gemm.decode(a)
    c = torch.randn(most + 9, n, generator=gen).to(hopper).bfloat16()
    everything = exact(decoded.data, w, torch.bfloat16, a.amax)
    with_c = exact(decoded.data, w, torch.bfloat16, a.amax, c=c, beta=0.5)
    gated = exact(decoded.data, w, torch.bfloat16, a.amax, activation=4)
    for kernel in kernels("dense", "prepacked"):
        if kernel.out_dtype is not torch.bfloat16:
            continue
        for m in (kernel.tile[0], kernel.tile[0] + 9):
            rows = fp4gemm.DecodedTensor(decoded.data[:m].contiguous(), decoded.amax[:m])
            if kernel.is_gated:
                got = fp4gemm.mm(rows, p, activation="swiglu", kernel=kernel.name)
                assert_bits(got, gated[:m], kernel.name)
                continue
            got = fp4gemm.mm(rows, p, c=c[:m].contiguous(), beta=0.5, kernel=kernel.name)
            assert_bits(got, with_c[:m], f"{kernel.name}, c")
            graph, results = captured(partial(ten_times, rows, p, kernel.name), hopper)
            for _ in range(30):
                graph.replay()
            for result in results:
                assert_bits(result, everything[:m], kernel.name)


def ten_times(rows: fp4gemm.DecodedTensor, p: PrepackedTensor, kernel: str) -> list[Tensor]:
    return [fp4gemm.mm(rows, p, kernel=kernel) for _ in range(10)]


def test_rows_do_not_depend_on_those_beside_them(hopper: torch.device, gen: torch.Generator) -> None:
    """batch_invariant: bits of any row, of sums that do not fit float32, whatever m is; runs repeat them."""
    _, w = operands(1, 520, 2048, hopper, gen)
    p = fp4gemm.prepack(w)
    for dtype in PLAIN:
        x = make("normal", 300, 2048, dtype, gen).to(hopper)
        operand = next(name for name, read in A_DTYPES.items() if read is dtype)
        each = [k.name for k in kernels("dense", operand) if k.name.endswith("rowcol_fp32")]
        for kernel in [None, *each]:
            options: dict[str, Any] = {"batch_invariant": True, "out_dtype": torch.float32, "kernel": kernel}
            want = fp4gemm.mm(x, p, **options)
            for m in (1, 17, 64, 100, 129):  # a tile of 256 has three widths
                assert_bits(fp4gemm.mm(x[:m].contiguous(), p, **options), want[:m], f"{kernel}, {m} rows")
        first = fp4gemm.mm(x, p, out_dtype=torch.float32)
        for _ in range(5):
            assert_bits(fp4gemm.mm(x, p, out_dtype=torch.float32), first, "again")


# ---- groups


@pytest.mark.parametrize(("n", "k"), [(8, 32), (144, 2880), (528, 96)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=["large", "small", "hot", "none"])
def test_every_grouped_kernel(
    sizes: tuple[int, ...], n: int, k: int, hopper: torch.device, gen: torch.Generator
) -> None:
    """Groups equal the dense products of their rows; rows that are in no group stay as they are."""
    case = rows_of(sizes, n, k, hopper, gen, loose=13)
    rows, p = sum(sizes), fp4gemm.prepack(case.b)
    decoded = fp4gemm.decode(case.a)
    whole = make("integers", rows + 13, k, torch.bfloat16, gen).to(hopper)
    bias = torch.randn(len(sizes), n, generator=gen).to(hopper)
    wanted: dict[tuple[object, ...], Tensor] = {}
    ran = 0
    for kernel in kernels("grouped"):
        gated, dtype = kernel.is_gated, kernel.out_dtype
        if gated and n % 16:
            continue
        is_plain = kernel.operand == "prepacked_bf16"
        values, amax = (whole, None) if is_plain else (decoded.data, case.a.amax)
        key = (is_plain, gated, dtype)
        if key not in wanted:
            wanted[key] = torch.empty(rows, n // 2 if gated else n, dtype=dtype, device=hopper)
            begin = 0
            for e, end in enumerate(case.ends):
                part = slice(begin, end)
                of_rows = None if amax is None else amax[part].contiguous()
                options = {"bias": bias[e], "activation": 4 if gated else 0}
                wanted[key][part] = exact(values[part].contiguous(), case.b[e], dtype, of_rows, **options)
                begin = end
        lefts = (whole,) if is_plain else (case.a, decoded)
        for left, right in [(left, p) for left in lefts] + [(lefts[0], case.b)]:
            view, buffer = poisoned(rows + 13, wanted[key].shape[1], dtype, hopper, pad=8)
            activation = "swiglu" if gated else None
            options = {"bias": bias, "activation": activation, "out": view, "kernel": kernel.name}
            fp4gemm.grouped_mm(left, right, case.offs, **options)
            assert_bits(view[:rows], wanted[key], f"{kernel.name}, {type(left).__name__}")
            assert_poison_intact(buffer, rows, wanted[key].shape[1])
        ran += 1
    assert ran > 0


@pytest.mark.parametrize(
    ("sizes", "k"),
    [(tuple(e % 4 for e in range(100)), 32), (tuple(e * 11 % 41 for e in range(30)), 544)],
    ids=["one-step", "several"],
)
def test_many_tiles_of_one_worker(
    sizes: tuple[int, ...], k: int, hopper: torch.device, gen: torch.Generator
) -> None:
    """A worker's tiles follow each other through the ring, at once where each is one step long.

    So do launches on the stream; each of them opens and closes the counter that tiles are drawn from.
    """
    case = rows_of(sizes, 2056, k, hopper, gen, loose=3)
    p, decoded, rows = fp4gemm.prepack(case.b), fp4gemm.decode(case.a), case.ends[-1]
    plain = decoded.data.to(torch.bfloat16)  # exact
    for kernel in kernels("grouped"):
        if kernel.epilogue != "rowcol":
            continue
        is_plain = kernel.operand == "prepacked_bf16"
        options = {"kernel": kernel.name, "out_dtype": kernel.out_dtype}
        left = plain if is_plain else decoded
        results = [fp4gemm.grouped_mm(left, p, case.offs, **options) for _ in range(8)]
        amax = None if is_plain else case.a.amax
        alpha = 1 / (6 * case.b.e4m3_max) if is_plain else 1 / (36 * case.b.e4m3_max * 448)
        want = torch.zeros_like(results[0])
        reference.gemm_out(
            decoded.data,
            case.b.codes,
            scale_b=case.b.scales,
            offs=case.offs,
            alpha=alpha,
            alpha_row=amax,
            alpha_col=case.b.amax,
            out=want,
        )
        for i, got in enumerate(results):
            assert_bits(got[:rows], want[:rows], f"{kernel.name}, launch {i}")


def test_ends_out_of_order_write_nothing_outside_of_d(hopper: torch.device) -> None:
    """Ends m, 0, m, 0, .. claim 2^32 + 2^17 tiles of 8 tokens, a count that wraps to a small one in 32 bits.

    No check reads the ends, so that what D holds then is undefined; the memory around it is not.
    """
    m, n, k = 1 << 20, 8, 32
    groups = 2 * ((1 << 15) + 1)
    one = fp4gemm.prepack(fp4gemm.quantize(torch.ones(n, k, device=hopper)))
    experts = PrepackedTensor(
        one.data.expand(groups, -1).contiguous(), one.amax.expand(groups, -1).contiguous(), (groups, n, k)
    )
    offs = torch.tensor([m, 0], dtype=torch.int32, device=hopper).repeat(groups // 2)
    x = torch.ones(m, k, dtype=torch.bfloat16, device=hopper)
    ran = 0
    for kernel in kernels("grouped", "prepacked_bf16"):
        if kernel.tile[0] != 8 or kernel.epilogue != "rowcol":
            continue
        view, buffer = poisoned(m, n, kernel.out_dtype, hopper, pad=8)
        fp4gemm.grouped_mm(x, experts, offs, out=view, kernel=kernel.name)
        assert_poison_intact(buffer, m, n)
        ran += 1
    assert ran > 0


def test_groups_equal_dense_products(hopper: torch.device, gen: torch.Generator) -> None:
    case = rows_of((33, 0, 64, 3), 144, 544, hopper, gen)
    p, x = fp4gemm.prepack(case.b), make("integers", 100, 544, torch.bfloat16, gen).to(hopper)
    got = fp4gemm.grouped_mm(x, p, case.offs)
    begin = 0
    for e, end in enumerate(case.ends):
        assert_bits(got[begin:end], fp4gemm.mm(x[begin:end].contiguous(), p[e]), f"group {e}")
        begin = end


# ---- graphs, refusals


def test_graph_replay(hopper: torch.device, gen: torch.Generator) -> None:
    """Captures once; replays read new x, new ends of groups and new prepacked bytes."""
    n, k, m = 136, 544, 96
    x = torch.ones(m, k, dtype=torch.bfloat16, device=hopper)
    _, w = operands(1, n, k, hopper, gen)
    stack = fp4gemm.quantize(make("normal", 3 * n, k, torch.bfloat16, gen).view(3, n, k).to(hopper))
    p, p3 = fp4gemm.prepack(w), fp4gemm.prepack(stack)
    offs = ends_of((m, 0, 0), hopper)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=hopper)

    def step() -> tuple[Tensor, ...]:
        a = fp4gemm.quantize(x, decoded=True)
        fp4gemm.grouped_mm(x, p3, offs, out=out)
        return fp4gemm.mm(a, p), fp4gemm.mm(x, p), fp4gemm.mm(x, w)

    graph, results = captured(step, hopper)
    for sizes in ((96, 0, 0), (1, 33, 62), (0, 0, 5)):
        x.copy_(make("integers", m, k, torch.bfloat16, gen))
        offs.copy_(ends_of(sizes))
        w = fp4gemm.quantize(make("normal", n, k, torch.bfloat16, gen).to(hopper))
        p.data.copy_(fp4gemm.prepack(w).data)
        p.amax.copy_(w.amax)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(hopper)
        a = fp4gemm.quantize(x)
        assert_bits(results[0], exact(fp4gemm.decode(a).data, w, torch.bfloat16, a.amax), "quantized")
        assert_bits(results[1], exact(x, w, torch.bfloat16, None), "plain")
        begin = 0
        for e, end in enumerate(offs.tolist()):
            part = exact(x[begin:end].contiguous(), stack[e], torch.bfloat16, None)
            assert_bits(out[begin:end], part, f"group {e}")
            begin = end
        assert out[begin:].isnan().all()


def test_kernels_that_do_not_take_the_operands(hopper: torch.device, gen: torch.Generator) -> None:
    a, w = operands(8, 16, 32, hopper, gen)
    x, p = torch.ones(8, 32, dtype=torch.bfloat16, device=hopper), fp4gemm.prepack(w)
    for left, right, reads in ((a, p, "prepacked_bf16"), (x, p, "prepacked"), (x, w, "fp16"), (a, p, "fp16")):
        kernel = next(
            (
                k
                for k in fp4gemm.kernels()
                if (k.arch, k.mode, k.operand, k.epilogue) == (90, "dense", reads, "rowcol")
            ),
            None,
        )
        if kernel is None:
            continue
        with pytest.raises(
            ValueError, match=rf"^kernel: '{kernel.name}' reads {reads} operands, must multiply"
        ):
            fp4gemm.mm(left, right, out_dtype=kernel.out_dtype, kernel=kernel.name)
    with pytest.raises(ValueError, match=r"^b: k is 32, must be 64, the k of a"):
        fp4gemm.mm(fp4gemm.quantize(torch.ones(8, 64, device=hopper)), p)
    with pytest.raises(ValueError, match=r"^b: device is cpu, must be cuda:"):
        fp4gemm.mm(a, p.to("cpu"))
