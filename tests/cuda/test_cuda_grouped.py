"""Grouped products on a GPU: every kernel, graphs replayed with other routings, threads, wrong ends."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, kernel_table, reference
from helpers import (
    FLOATS,
    assert_bits,
    assert_poison_intact,
    captured,
    fill_and_free,
    make,
    poisoned,
    short,
)
from moe import ALPHA, ROUTINGS, Columns, Rows, columns_of, ends_of, routing, rows_of
from torch import Tensor

pytestmark = pytest.mark.gpu

# Some hundred rows for each expert, a few rows, all rows for one expert, and no rows.
SIZES = [(513, 0, 300, 1000, 7, 128), (3, 1, 0, 0, 16, 2, 5), (0, 2048, 0), (0, 0)]


def exact(
    case: Rows | Columns,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The reference on the same device; rows that are in no group are 0."""
    a, b = case.a, case.b
    m, n, g = a.shape[0], b.shape[-2] // (2 if activation == 4 else 1), case.offs.shape[0]
    out = torch.zeros((m, n) if len(b.shape) == 3 else (g, m, n), dtype=out_dtype, device=a.device)
    reference.gemm_out(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        case.offs,
        alpha=ALPHA,
        alpha_row=a.amax,
        alpha_col=b.amax,
        bias=bias,
        activation=activation,
        c=c,
        beta=beta,
        out=out,
    )
    return out


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("n", "k"), [(8, 32), (144, 544), (1040, 1024)], ids=lambda size: str(size))
@pytest.mark.parametrize("sizes", SIZES, ids=["large", "small", "hot", "none"])
def test_rows(
    sizes: tuple[int, ...],
    n: int,
    k: int,
    out_dtype: torch.dtype,
    cuda: torch.device,
    gen: torch.Generator,
) -> None:
    """Sums of Gaussian data are exact in float32, so D has the bits of the rounded float64 product."""
    case = rows_of(sizes, n, k, cuda, gen, loose=13)
    rows, m = sum(sizes), sum(sizes) + 13
    bias = torch.randn(len(sizes), n, generator=gen).to(cuda)
    c = torch.randn(m, n, generator=gen).to(out_dtype).to(cuda)
    fill_and_free(cuda)
    got = fp4gemm.grouped_mm(case.a, case.b, out_dtype=out_dtype)
    assert_bits(got[:rows], exact(case, out_dtype)[:rows], "D")
    view, buffer = poisoned(m, n, out_dtype, cuda, pad=8)
    fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation="gelu_tanh", c=c, beta=-0.5, out=view)
    assert_bits(view[:rows], exact(case, out_dtype, bias, 2, c, -0.5)[:rows], "every term")
    assert_poison_intact(buffer, rows, n)
    if out_dtype is torch.float32 or n % 16:
        return
    view, buffer = poisoned(m, n // 2, out_dtype, cuda, pad=8)
    fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation="swiglu", out=view)
    assert_bits(view[:rows], exact(case, out_dtype, bias, 4)[:rows], "gated")
    assert_poison_intact(buffer, rows, n // 2)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "n"), [(16, 16), (144, 528), (1024, 1040)], ids=lambda size: str(size))
@pytest.mark.parametrize("sizes", SIZES, ids=["large", "small", "hot", "none"])
def test_columns(
    sizes: tuple[int, ...],
    m: int,
    n: int,
    out_dtype: torch.dtype,
    cuda: torch.device,
    gen: torch.Generator,
) -> None:
    case = columns_of(sizes, m, n, cuda, gen, loose=13)
    g = len(sizes)
    bias = torch.randn(g, n, generator=gen).to(cuda)
    c = torch.randn(g, m, n, generator=gen).to(out_dtype).to(cuda)
    fill_and_free(cuda)
    assert_bits(fp4gemm.grouped_mm(case.a, case.b, out_dtype=out_dtype), exact(case, out_dtype), "D")
    out = c.clone()
    fp4gemm.wgrad(case.a, case.b, bias=bias, activation="silu", c=out, beta=-0.5, out=out)
    assert_bits(out, exact(case, out_dtype, bias, 1, c, -0.5), "every term, in place")


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_many_groups_of_rows(out_dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    """More groups than a warp has lanes, several tiles of a group for each CTA, more rows in a group than a
    band of tiles has, and groups that end within the 16 rows that a warp stores, for every kernel by name.
    """
    sizes = (*itertools.islice(itertools.cycle((17, 0, 1, 130, 64, 0, 33)), 69), 2900)
    case = rows_of(sizes, 528, 96, cuda, gen, loose=13)
    rows = sum(sizes)
    bias = torch.randn(len(sizes), 528, generator=gen).to(cuda)
    plain, gated = exact(case, out_dtype), None
    if out_dtype is not torch.float32:
        gated = exact(case, out_dtype, bias, 4)
    family, ran = kernel_table.kernel_arch(cuda.index), 0
    for kernel in fp4gemm.kernels():
        of_mode = (kernel.arch, kernel.mode, kernel.out_dtype) == (family, "grouped", out_dtype)
        if not of_mode or not kernel.supports("nvfp4", "nvfp4", "m"):
            continue
        n = 528 // (2 if kernel.is_gated else 1)
        view, buffer = poisoned(rows + 13, n, out_dtype, cuda, pad=8)
        terms: dict[str, Any] = {"bias": bias, "activation": "swiglu"} if kernel.is_gated else {}
        fill_and_free(cuda)
        fp4gemm.grouped_mm(case.a, case.b, out=view, kernel=kernel.name, **terms)
        want = gated if kernel.is_gated else plain
        assert want is not None
        assert_bits(view[:rows], want[:rows], kernel.name)
        assert_poison_intact(buffer, rows, n)
        ran += 1
    assert ran > 0


@pytest.mark.parametrize("kernel", ["64x128", "128x256"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_many_groups_of_columns(
    out_dtype: torch.dtype, kernel: str, cuda: torch.device, gen: torch.Generator
) -> None:
    """More groups than a warp has lanes, and several tiles of a group for each CTA; some groups are empty."""
    sizes = tuple(itertools.islice(itertools.cycle((64, 0, 1, 200, 128, 0, 33)), 100))
    case = columns_of(sizes, 400, 528, cuda, gen)
    options: dict[str, Any] = {"out_dtype": out_dtype}
    if kernel_table.kernel_arch(cuda.index) == 90:
        names = (row.name for row in fp4gemm.kernels() if row.arch == 90 and row.operand == "fp16")
        end = f"rowcol_{short(out_dtype)}"
        options["kernel"] = next(name for name in names if f"grouped_{kernel}" in name and name.endswith(end))
    fill_and_free(cuda)
    assert_bits(fp4gemm.grouped_mm(case.a, case.b, **options), exact(case, out_dtype), "D")


def test_the_reference_gives_the_same_bits_on_the_gpu(cuda: torch.device, gen: torch.Generator) -> None:
    for here in (rows_of(ROUTINGS["ragged"], 40, 96, torch.device("cpu"), gen),):
        there = here._replace(a=here.a.to(cuda), b=here.b.to(cuda), offs=here.offs.to(cuda))
        for act in range(4):
            assert_bits(exact(there, activation=act), exact(here, activation=act), f"activation {act}")
    here = columns_of(ROUTINGS["ragged"], 32, 48, torch.device("cpu"), gen)
    there = here._replace(a=here.a.to(cuda), b=here.b.to(cuda), offs=here.offs.to(cuda))
    assert_bits(exact(there), exact(here), "columns")


def test_every_kernel_of_this_device(cuda: torch.device, gen: torch.Generator) -> None:
    """Each grouped kernel by name, with ragged m and k; kernels of other devices or modes are refused."""
    family = kernel_table.kernel_arch(cuda.index)
    ran = 0
    for sizes, n, k in (((3, 0, 1), 16, 32), ((300, 0, 33, 129), 400, 288)):
        cases: list[Rows | Columns] = [
            rows_of(sizes, n, k, cuda, gen),
            columns_of(sizes, n, k - 16, cuda, gen),
        ]
        for kernel, case in itertools.product(fp4gemm.kernels(), cases):
            options = {"out_dtype": kernel.out_dtype, "kernel": kernel.name}
            if kernel.is_gated and (kernel.arch != family or kernel.mode != "grouped"):
                continue
            if kernel.mode != "grouped":
                with pytest.raises(
                    ValueError, match=rf"^kernel: '{kernel.name}' is of mode dense, must be of"
                ):
                    fp4gemm.grouped_mm(case.a, case.b, **options)
                continue
            if kernel.arch != family:
                with pytest.raises(NotImplementedError, match=kernel.name):
                    fp4gemm.grouped_mm(case.a, case.b, **options)
                continue
            ragged = "k" if isinstance(case, Columns) else "m"
            if not kernel.supports("nvfp4", "nvfp4", ragged):  # test_cuda_prepacked.py
                continue
            fill_and_free(cuda)
            name, number = ("swiglu", 4) if kernel.is_gated else ("silu", 1)
            if number == 4 and isinstance(case, Columns):
                continue
            got = fp4gemm.grouped_mm(case.a, case.b, activation=name, **options)
            assert_bits(got, exact(case, kernel.out_dtype, activation=number), kernel.name)
            ran += 1
    assert ran > 0
    dense = fp4gemm.quantize(torch.ones(32, 32, device=cuda))
    grouped = next(row for row in fp4gemm.kernels() if (row.mode, row.epilogue) == ("grouped", "rowcol"))
    with pytest.raises(
        ValueError, match=rf"^kernel: '{grouped.name}' is of mode grouped, must be of mode dense"
    ):
        fp4gemm.mm(dense, dense, out_dtype=grouped.out_dtype, kernel=grouped.name)


@pytest.mark.slow
def test_replay_with_a_thousand_routings(cuda: torch.device, gen: torch.Generator) -> None:
    """One graph of quantizations and products; each replay reads new tokens and new ends."""
    g, m, n, k = 8, 512, 96, 128
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=cuda)
    dy = torch.zeros(m, n, dtype=torch.bfloat16, device=cuda)
    offs = torch.zeros(g, dtype=torch.int32, device=cuda)
    w = fp4gemm.quantize(make("normal", g * n, k, torch.bfloat16, gen).view(g, n, k).to(cuda))
    y = torch.zeros(m, n, dtype=torch.bfloat16, device=cuda)
    dw = torch.zeros(g, n, k, device=cuda)

    def step() -> tuple[NVFP4Tensor, NVFP4Tensor, NVFP4Tensor]:
        a = fp4gemm.quantize(x, offs=offs)
        fp4gemm.grouped_mm(a, w, activation="silu", out=y)
        dy_t = fp4gemm.quantize(dy, axis=0, offs=offs)
        x_t = fp4gemm.quantize(x, axis=0, offs=offs)
        fp4gemm.wgrad(dy_t, x_t, out=dw)
        return a, dy_t, x_t

    graph, (a, dy_t, x_t) = captured(step, cuda)
    pool = [make("integers", m, k, torch.bfloat16, gen).to(cuda) for _ in range(4)]
    for i, kind in zip(range(1000), itertools.cycle(("zipf", "one_hot", "even", "all_empty")), strict=False):
        sizes = routing(kind, g, m, gen)
        x.copy_(pool[i % 4])
        dy.copy_(pool[(i + 1) % 4][:, :n])
        offs.copy_(ends_of(sizes))
        y.fill_(torch.nan)
        dw.fill_(torch.nan)
        graph.replay()
        rows = sum(sizes)
        want = exact(Rows(x, w, offs, a, w), activation=1)
        assert_bits(y[:rows], want[:rows], f"replay {i}, {kind} {sizes}: y")
        assert bool(y[rows:].isnan().all()), f"replay {i}: rows of nobody were written"
        want = exact(Columns(dy, x, offs, dy_t, x_t), torch.float32)
        assert_bits(dw, want, f"replay {i}, {kind} {sizes}: dw")
        if i % 100 == 0:  # the operands of the graph have these ends
            fresh = fp4gemm.quantize(x, offs=offs)
            assert_bits(a.codes[:rows], fresh.codes[:rows], "codes")


def test_eight_threads_on_four_streams(cuda: torch.device, gen: torch.Generator) -> None:
    """Concurrent calls share nothing: every result has the bits of a call without others."""
    cases = [
        rows_of(sizes, 136, 256, cuda, gen) for sizes in ((300, 0, 77), (1, 2, 3), (0, 512, 0), (64,) * 16)
    ]
    columns = columns_of((70, 0, 300), 144, 272, cuda, gen)
    wanted = [fp4gemm.grouped_mm(case.a, case.b, activation="gelu_tanh") for case in cases]
    wanted_columns = fp4gemm.grouped_mm(columns.a, columns.b)
    torch.cuda.synchronize(cuda)
    streams = [torch.cuda.Stream(cuda) for _ in range(4)]
    problems: list[str] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.device(cuda), torch.cuda.stream(streams[index % 4]):
                for turn in range(25):
                    which = (index + turn) % 4
                    got = fp4gemm.grouped_mm(cases[which].a, cases[which].b, activation="gelu_tanh")
                    got_columns = fp4gemm.grouped_mm(columns.a, columns.b)
                    streams[index % 4].synchronize()
                    if not torch.equal(got, wanted[which]) or not torch.equal(got_columns, wanted_columns):
                        problems.append(f"thread {index}, turn {turn}, case {which}: other bits")
        except Exception as error:  # pytest does not see exceptions of other threads
            problems.append(f"thread {index}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_nothing_synchronises(cuda: torch.device, gen: torch.Generator) -> None:
    case, columns = rows_of((30, 0, 34), 64, 128, cuda, gen), columns_of((30, 34), 64, 64, cuda, gen)
    bias = torch.ones(3, 64, dtype=torch.bfloat16, device=cuda)

    def calls() -> None:
        fp4gemm.grouped_mm(case.a, case.b, bias=bias, activation="silu")
        fp4gemm.grouped_mm(case.a, case.b, case.offs, batch_invariant=True)
        fp4gemm.grouped_mm(fp4gemm.quantize(case.x, offs=case.offs.long()), case.b)
        fp4gemm.wgrad(columns.a, columns.b)
        fp4gemm.scaled_grouped_mm(*case.raw, alpha=torch.ones(3, device=cuda))

    calls()
    torch.cuda.synchronize(cuda)
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    calls()
    done.record()
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize(cuda)


@pytest.mark.parametrize(
    "ends",
    [
        (5, 3, 64),
        (-7, 20, 64),
        (10, 20, 10_000_000),
        (2**31 - 1, 2**31 - 1, 2**31 - 1),
        (-(2**31), 0, 64),
        (64, 0, 64),
        (0, 2**31 - 1, -5),
    ],
    ids=str,
)
def test_wrong_ends_stay_inside(ends: tuple[int, ...], cuda: torch.device, gen: torch.Generator) -> None:
    """The ends are not checked on a GPU: D may hold anything, but no byte around it changes."""
    case = rows_of((10, 20, 34), 24, 64, cuda, gen)
    offs = torch.tensor(ends, dtype=torch.int32, device=cuda)
    case.offs.copy_(offs)  # those of case.a
    view, buffer = poisoned(64, 24, torch.bfloat16, cuda, pad=8)
    fp4gemm.grouped_mm(case.a, case.b, out=view)
    torch.cuda.synchronize(cuda)
    assert_poison_intact(buffer, 64, 24)
    columns = columns_of((10, 20, 34), 16, 32, cuda, gen)
    columns.offs.copy_(offs)
    view, buffer = poisoned(3 * 16, 32, torch.bfloat16, cuda)
    fp4gemm.grouped_mm(columns.a, columns.b, out=view.view(3, 16, 32))
    torch.cuda.synchronize(cuda)
    assert_poison_intact(buffer, 3 * 16, 32)


@pytest.mark.slow
def test_experts_of_a_real_layer(cuda: torch.device, gen: torch.Generator) -> None:
    """128 experts with 4,096 tokens in a Zipf distribution."""
    sizes = tuple(routing("zipf", 128, 4096, gen))
    case = rows_of(sizes, 768, 2048, cuda, gen)
    assert_bits(fp4gemm.grouped_mm(case.a, case.b), exact(case), "D")
    assert_bits(fp4gemm.grouped_mm(case.a, case.b, batch_invariant=True), exact(case), "batch invariant")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(cuda: torch.device, gen: torch.Generator) -> None:
    other = torch.device("cuda", 1)
    case = rows_of((30, 0, 34), 64, 128, other, gen)
    with torch.cuda.device(0):
        got = fp4gemm.grouped_mm(case.a, case.b)
        assert got.device == other
        assert_bits(got, exact(case), "D")
        with pytest.raises(ValueError, match=r"^offs: device is cuda:0, must be cuda:1"):
            fp4gemm.grouped_mm(case.a, case.b, case.offs.to("cuda:0"))


def test_mixed_devices_are_named(cuda: torch.device, gen: torch.Generator) -> None:
    case = rows_of((30, 0, 34), 64, 128, cuda, gen)
    with pytest.raises(ValueError, match=r"^b: device is cpu, must be cuda:"):
        fp4gemm.grouped_mm(case.a, case.b.to("cpu"))
    with pytest.raises(ValueError, match=r"^offs: device is cpu, must be cuda:"):
        fp4gemm.grouped_mm(case.a, case.b, case.offs.cpu())
    with pytest.raises(ValueError, match=r"^c: device is cpu, must be cuda:"):
        fp4gemm.grouped_mm(case.a, case.b, c=torch.zeros(64, 64, dtype=torch.bfloat16))
