"""Epilogues in Python on a GPU, whose kernels are compiled at run time, against the reference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import capi
import fp4gemm
import pytest
import torch
from fp4gemm import _jit, kernel_table
from fp4gemm import epilogues as ep
from fp4gemm.epilogues import cpp
from helpers import assert_bits

from examples import epilogues as examples

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own for this file, on a device of compute capability 9.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("FP4GEMM_CACHE", str(folder))
        patch.setattr(_jit, "_FORMULAS", {})
        yield folder / "kernels"


@fp4gemm.epilogue
def everything(acc, row, col, alpha, bias, c, gate: ep.Row, gamma: ep.Column, mask: ep.Matrix, *, scale):
    z = alpha * (col * (row * acc)) + bias
    return ep.silu(z * gate) * gamma + mask * scale + c, {"pre": z, "gated": z * gate}


@fp4gemm.epilogue(pairs=True)
def pair_to_one(gate, up, bias, c, g: ep.Row, gamma: ep.Column, mask: ep.Matrix):
    return ep.silu(gate + bias[0]) * (up + bias[1]) * g * gamma + mask + c, {"gate": gate, "up": up}


@fp4gemm.epilogue(pairs=True)
def pair_to_two(x, y, bias, g: ep.Row, gamma: ep.Column, cos: ep.Matrix, sin: ep.Matrix):
    return (x * cos - y * sin) * g, (x * sin + y * cos) * gamma + bias[1], {"raw": (x, y)}


@fp4gemm.epilogue
def by_group(acc, factor: ep.Group):
    return acc * factor


@pytest.mark.slow
@pytest.mark.parametrize(
    "epilogue", [*examples.EXAMPLES, everything, pair_to_one, pair_to_two, by_group], ids=lambda e: e.name
)
def test_bits_of_every_format(epilogue: ep.Epilogue) -> None:
    """Every operand format, dense and grouped, and every output type."""
    scalars = {n: examples.SCALARS[n] for n in epilogue.names("scalars") if n in examples.SCALARS}
    report = fp4gemm.check_epilogue(epilogue, "cuda", scalars=scalars)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("epilogue", [pair_to_one, pair_to_two], ids=lambda e: e.name)
def test_bits_of_every_tile(epilogue: ep.Epilogue, dtype: torch.dtype, gen: torch.Generator) -> None:
    """With matrices of 16 bits, which the direct epilogue reads, and with others."""
    x, w = torch.randn(300, 320, generator=gen), torch.randn(400, 320, generator=gen)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    given = {
        "bias": torch.randn(400, generator=gen),
        "c": torch.randn(300, 200, generator=gen).bfloat16() if epilogue is pair_to_one else None,
    }
    inputs = {"g": (300,), "gamma": (200,), "mask": (300, 200), "cos": (300, 200), "sin": (300, 200)}
    tensors = {
        name: torch.randn(inputs[name], generator=gen).to(dtype)
        for kind in ("rows", "columns", "matrices")
        for name in epilogue.names(kind)
    }
    want, aux = fp4gemm.mm(a, b, epilogue=epilogue(**tensors), **given)
    on = {name: x.cuda() for name, x in tensors.items()}
    terms = {name: None if x is None else x.cuda() for name, x in given.items()}
    packed = fp4gemm.prepack(b.to("cuda"))
    count = 0
    for kernel in kernel_table.kernels():
        if (
            kernel.arch != 90
            or kernel.is_gated
            or kernel.mode != "dense"
            or kernel.out_dtype != torch.bfloat16
        ):
            continue
        if kernel.operand not in ("fp16", "prepacked") or kernel.tile[:2] == (80, 192):
            continue
        right = packed if kernel.operand == "prepacked" else b.to("cuda")
        got, found = fp4gemm.mm(a.to("cuda"), right, epilogue=epilogue(**on), kernel=kernel.name, **terms)
        assert_bits(got.cpu(), want)
        for name, expected in aux.items():
            assert_bits(found[name].cpu(), expected)
        count += 1
    assert count > 10


def test_a_graph_is_replayed_with_other_inputs(gen: torch.Generator) -> None:
    x, w = torch.randn(32, 256, generator=gen), torch.randn(128, 256, generator=gen)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    gate = torch.randn(32, generator=gen).cuda()
    on = a.to("cuda"), b.to("cuda")
    bound = examples.row_gate(gate=gate)
    fp4gemm.mm(*on, epilogue=bound)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp4gemm.mm(*on, epilogue=bound)
    gate.copy_(torch.randn(32, generator=gen))
    graph.replay()
    assert_bits(y.cpu(), fp4gemm.mm(a, b, epilogue=examples.row_gate(gate=gate.cpu())))


def test_a_dense_and_a_grouped_product_share_a_kernel(hopper: Path, gen: torch.Generator) -> None:
    """The kernel of the first product is that of the second one, by which it is launched."""
    x, w = torch.randn(128, 256, generator=gen), torch.randn(2, 256, 256, generator=gen)
    offs = torch.tensor([48, 128], dtype=torch.int32)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    groups = fp4gemm.quantize(x, offs=offs)
    tile = "128x256x64_c2x1_rowcol_bf16"
    cap = examples.soft_cap(cap=5.0)
    got = fp4gemm.mm(a.to("cuda"), b[0].to("cuda"), epilogue=cap, kernel=f"sm90_dense_{tile}")
    assert_bits(got.cpu(), fp4gemm.mm(a, b[0], epilogue=cap))
    before = len(list(hopper.glob("*.cubin")))
    name = f"sm90_grouped_{tile}"
    got = fp4gemm.grouped_mm(groups.to("cuda"), b.to("cuda"), epilogue=cap, kernel=name)
    assert len(list(hopper.glob("*.cubin"))) == before
    assert_bits(got.cpu(), fp4gemm.grouped_mm(groups, b, epilogue=cap))


@fp4gemm.epilogue
def quotients(acc, a: ep.Matrix, b: ep.Matrix, *, divisor):
    functions = {"sigmoid": ep.sigmoid(a), "gelu": ep.gelu(a), "tanh": ep.tanh(a)}
    return a / b + 0.0 * acc, {"by_scalar": a / divisor, **functions}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepacked", [False, True], ids=["decoded", "prepacked"])
def test_divisions(prepacked: bool, dtype: torch.dtype, gen: torch.Generator) -> None:
    """The numbers have every exponent; some rows have only numbers that the fast division takes."""
    m, n, k = 256, 512, 64
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3e38])
    every = torch.randint(-(2**31), 2**31, (2, m, n), generator=gen).int().view(torch.float32)
    every[:, : m // 4] = torch.randn(2, m // 4, n, generator=gen)
    every[0, 8:16, ::2] *= 0
    places = torch.rand(2, m, n, generator=gen) < 0.1
    places[:, : m // 2] = False
    every[places] = special[torch.randint(len(special), (int(places.sum()),), generator=gen)]
    a, b = every.to(dtype)
    x = fp4gemm.quantize(torch.zeros(m, k)).to("cuda")
    w = fp4gemm.quantize(torch.zeros(n, k)).to("cuda")
    for divisor in (30.0, -0.9, 3e-40):
        bound = quotients(a=a.cuda(), b=b.cuda(), divisor=divisor)
        got, aux = fp4gemm.mm(
            x, fp4gemm.prepack(w) if prepacked else w, epilogue=bound, out_dtype=torch.float32
        )
        want, wanted = quotients(a=a, b=b, divisor=divisor).forward(torch.zeros(m, n))
        for name, y, expected in (
            ("a / b", got, want),
            *((name, aux[name], wanted[name]) for name in wanted),
        ):
            same = (y.cpu() == expected) & (y.cpu().signbit() == expected.signbit())
            assert bool((same | (y.cpu().isnan() & expected.isnan())).all()), f"{name}, divisor {divisor}"


@pytest.mark.parametrize("epilogue", [pair_to_one, pair_to_two], ids=lambda e: e.name)
@pytest.mark.parametrize("n", [64, 400])
def test_pairs_of_ragged_k(n: int, epilogue: ep.Epilogue, gen: torch.Generator) -> None:
    """With an empty group, and aux outputs of another dtype than D."""
    offs, m, half = torch.tensor([100, 100, 256], dtype=torch.int32), 304, n // 2
    tokens = torch.randn(256, m, generator=gen), torch.randn(256, n, generator=gen)
    left, right = (fp4gemm.quantize(t, axis=0, offs=offs) for t in tokens)
    shapes = {"g": (3, m), "gamma": (3, half), **dict.fromkeys(("mask", "cos", "sin"), (3, m, half))}
    given = {name: torch.randn(shapes[name], generator=gen) for name in epilogue.inputs}
    given["bias"] = torch.randn(3, n, generator=gen)
    if epilogue is pair_to_one:
        given["c"] = torch.randn(3, m, half, generator=gen).bfloat16()
    dtypes = {epilogue.aux[-1]: torch.float32}
    on = {name: x.cuda() for name, x in given.items()}
    want, aux = fp4gemm.grouped_mm(left, right, epilogue=epilogue(aux_dtypes=dtypes, **given))
    ends = offs.cuda()
    left, right = (fp4gemm.quantize(t.cuda(), axis=0, offs=ends) for t in tokens)
    got, found = fp4gemm.grouped_mm(left, right, epilogue=epilogue(aux_dtypes=dtypes, **on))
    assert_bits(got.cpu(), want)
    for name, expected in aux.items():
        assert_bits(found[name].cpu(), expected)


@pytest.mark.parametrize("prepacked", [False, True], ids=["decoded", "prepacked"])
def test_given_outputs(prepacked: bool, gen: torch.Generator) -> None:
    """Into columns of a wider buffer, and with c as D."""
    x, w = torch.randn(40, 256, generator=gen), torch.randn(128, 256, generator=gen)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    c, bias = torch.randn(40, 128, generator=gen).bfloat16(), torch.randn(128, generator=gen)
    on = a.to("cuda"), fp4gemm.prepack(b.to("cuda")) if prepacked else b.to("cuda")
    want, aux = fp4gemm.mm(a, b, bias=bias, epilogue=examples.squared_relu())
    wide, pre = torch.full((40, 136), -7.0).bfloat16().cuda(), torch.empty(40, 128).bfloat16().cuda()
    bound = examples.squared_relu(aux_out={"pre": pre})
    y, found = fp4gemm.mm(*on, bias=bias.cuda(), epilogue=bound, out=wide[:, :128])
    assert found["pre"] is pre
    assert y.data_ptr() == wide.data_ptr()
    assert_bits(y.cpu(), want)
    assert_bits(pre.cpu(), aux["pre"])
    assert bool((wide[:, 128:] == -7).all())
    residual = c.cuda()
    fp4gemm.mm(*on, epilogue=examples.scaled_residual(c=residual, scale=0.5), out=residual)
    assert_bits(residual.cpu(), fp4gemm.mm(a, b, epilogue=examples.scaled_residual(c=c, scale=0.5)))


def test_the_operator_and_the_direct_call_agree(gen: torch.Generator) -> None:
    """A dispatch mode sees the operator, which has the bits of the call without one."""
    from torch.utils.flop_counter import FlopCounterMode

    a, b = (fp4gemm.quantize(torch.randn(64, 256, generator=gen)).to("cuda") for _ in range(2))
    want, aux = fp4gemm.mm(a, b, epilogue=examples.gelu_and_mul())
    out = torch.empty_like(want)
    with FlopCounterMode(display=False) as counter:
        got, found = fp4gemm.mm(a, b, epilogue=examples.gelu_and_mul())
        fp4gemm.mm(a, b, epilogue=examples.gelu_and_mul(), out=out)
    assert counter.get_total_flops() == 2 * 2 * 64 * 64 * 256
    assert_bits(got.cpu(), want.cpu())
    assert_bits(out.cpu(), want.cpu())
    assert_bits(found["up"].cpu(), aux["up"].cpu())


@pytest.mark.parametrize("prepacked", [False, True], ids=["nvfp4", "prepacked"])
def test_tokens_that_the_call_quantizes(prepacked: bool, gen: torch.Generator) -> None:
    """quantize_a of the C interface, which casts A before the product."""
    m, n, k = 40, 128, 256
    x = torch.randn(m, k, generator=gen).bfloat16().cuda()
    w = fp4gemm.quantize(torch.randn(n, k, generator=gen).cuda())
    p = fp4gemm.prepack(w)
    want = fp4gemm.mm(fp4gemm.quantize(x), w, epilogue=examples.soft_cap(cap=3.0), out_dtype=torch.float32)
    torch.cuda.synchronize()
    out, library = torch.empty(m, n, device="cuda"), capi.core()
    packed = capi.Operand(p.data.data_ptr(), None, capi.FORMAT_PREPACKED)
    codes = capi.Operand(w.codes.data_ptr(), w.scales.data_ptr(), capi.FORMAT_NVFP4)
    args = capi.GemmArgs(
        m=m,
        n=n,
        k=k,
        a=capi.Operand(x.data_ptr(), None, capi.FORMAT_BF16),
        b=packed if prepacked else codes,
        b_is_constant=int(prepacked),
        alpha_col=capi.Vector(w.amax.data_ptr(), n),
        alpha=1 / (36 * 448 * 448),
        out_dtype=capi.FP32,
        d=out.data_ptr(),
        d_row_stride=n,
        quantize_a=capi.QUANTIZE_A_ROW,
        a_row_stride=k,
    )
    generated = capi.Generated(num_scalars=1, formula=_jit._new_formula())
    generated.scalars[0] = 3.0
    cast, size = capi.Cast(e4m3_max=448), ctypes.c_size_t()
    status = library.fp4gemm_gemm_generated_workspace_bytes(args, cast, generated, 0, size)
    assert status == capi.SUCCESS, library.fp4gemm_last_error()
    workspace = torch.full((size.value,), 0xFF, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    launch = (args, cast, generated, workspace.data_ptr(), size.value, 0, stream)
    assert library.fp4gemm_gemm_generated(*launch) == capi.NOT_LOADED
    source = ctypes.create_string_buffer(4096)
    assert library.fp4gemm_generated_source(args, generated, 0, source, 4096) == capi.SUCCESS
    cubin = _jit.compiled(source.value.decode(), cpp.header(examples.soft_cap.program))
    assert library.fp4gemm_generated_load(args, generated, 0, cubin) == capi.SUCCESS
    assert library.fp4gemm_gemm_generated(*launch) == capi.SUCCESS, library.fp4gemm_last_error()
    assert_bits(out.cpu(), want.cpu())


def test_a_product_without_rows(gen: torch.Generator) -> None:
    a, b = fp4gemm.quantize(torch.randn(0, 256)), fp4gemm.quantize(torch.randn(128, 256, generator=gen))
    y, aux = fp4gemm.mm(a.to("cuda"), b.to("cuda"), epilogue=examples.gelu_and_mul())
    assert y.shape == aux["gate"].shape == (0, 64)


def test_scalars_need_no_further_kernel(hopper: Path, gen: torch.Generator) -> None:
    x, w = torch.randn(32, 256, generator=gen), torch.randn(128, 256, generator=gen)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    fp4gemm.mm(a.to("cuda"), b.to("cuda"), epilogue=examples.soft_cap(cap=30.0))
    before = len(list(hopper.glob("*.cubin")))
    got = fp4gemm.mm(a.to("cuda"), b.to("cuda"), epilogue=examples.soft_cap(cap=2.0))
    assert len(list(hopper.glob("*.cubin"))) == before
    assert_bits(got.cpu(), fp4gemm.mm(a, b, epilogue=examples.soft_cap(cap=2.0)))


def test_torch_compile(gen: torch.Generator) -> None:
    x, w = torch.randn(32, 256, generator=gen), torch.randn(128, 256, generator=gen)
    a, b = fp4gemm.quantize(x).to("cuda"), fp4gemm.quantize(w).to("cuda")
    torch._dynamo.reset()
    function = torch.compile(lambda: fp4gemm.mm(a, b, epilogue=examples.soft_cap()), fullgraph=True)
    assert_bits(function(), fp4gemm.mm(a, b, epilogue=examples.soft_cap()))


def test_a_formula_has_one_kernel_for_each_form(gen: torch.Generator) -> None:
    """Without the kernel the operator writes nothing and returns False."""
    a, b = (torch.randn(64, 256, generator=gen).half().cuda() for _ in range(2))
    ops, form = torch.ops.fp4gemm, [0, 1, 0, 0, 0, 0, 0, 0]
    header = cpp.header(fp4gemm.epilogue(lambda acc: acc).program)
    out = torch.full((64, 64), -7.0).bfloat16().cuda()
    call = (_jit._new_formula(), form, [], [], out, [], a, b)
    assert not ops.gemm_generated(*call)
    assert bool((out == -7).all())
    cubin = _jit.compiled(ops.gemm_generated_source(*call), header)
    ops.gemm_generated_load(torch.frombuffer(bytearray(cubin), dtype=torch.uint8), *call)
    assert ops.gemm_generated(*call)
    assert_bits(out.cpu(), fp4gemm.scaled_mm(a, b, None, None).cpu())
    assert not ops.gemm_generated(*call[:4], out.half(), [], a, b)
