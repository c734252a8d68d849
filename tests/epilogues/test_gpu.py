"""Epilogues in Python on a GPU, whose kernels are compiled at run time, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import _jit, kernel_table
from fp4gemm import epilogues as ep
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
        patch.setattr(_jit, "_KERNELS", {})
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


@pytest.mark.parametrize("epilogue", [pair_to_one, pair_to_two], ids=lambda e: e.name)
@pytest.mark.parametrize("n", [64, 400])
def test_pairs_of_ragged_k(n: int, epilogue: ep.Epilogue, gen: torch.Generator) -> None:
    """With an empty group, and aux outputs of another dtype than D."""
    offs, m, half = torch.tensor([100, 100, 256], dtype=torch.int32), 300, n // 2
    tokens = torch.randn(256, m, generator=gen), torch.randn(256, n, generator=gen)
    left, right = (fp4gemm.quantize(t, axis=0, offs=offs) for t in tokens)
    shapes = {"g": (3, m), "gamma": (3, half), **dict.fromkeys(("mask", "cos", "sin"), (3, m, half))}
    names = [name for kind in ("rows", "columns", "matrices") for name in epilogue.names(kind)]
    given = {name: torch.randn(shapes[name], generator=gen) for name in names}
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


def test_a_handle_of_another_kernel_is_refused(gen: torch.Generator) -> None:
    a, b = (torch.randn(64, 256, generator=gen).half().cuda() for _ in range(2))
    ops = torch.ops.fp4gemm
    header = _header()
    form = [0, 1, 0, 0, 0, 0, 0, 0]
    source = ops.gemm_generated_source(form, [], [], [], a, b)
    cubin = torch.frombuffer(bytearray(_jit.compiled(source, header)), dtype=torch.uint8)
    handle = ops.gemm_generated_load(cubin, form, [], [], [], a, b)
    assert ops.gemm_generated(handle, form, [], [], [], a, b)[0].shape == (64, 64)
    with pytest.raises(RuntimeError, match="is the handle of another kernel"):
        ops.gemm_generated(handle, form, [], [], [], a, b, out_dtype=torch.float16)


def _header() -> str:
    from fp4gemm.epilogues import cpp

    return cpp.header(fp4gemm.epilogue(lambda acc: acc).program)
