"""CUDA graphs of the quantizer family: replays read inputs, groups and random states anew."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, reference
from helpers import assert_bits, assert_parts, captured, make
from modes import FEW, Mode, assert_same, by_name, expected, parts
from torch import Tensor

pytestmark = pytest.mark.gpu

GROUPED = [mode for mode in FEW if not mode.tiles]


@pytest.mark.parametrize("mode", GROUPED, ids=by_name)
def test_replay_with_other_groups_of_columns(mode: Mode, cuda: torch.device, gen: torch.Generator) -> None:
    x = torch.ones(300, 96, dtype=torch.bfloat16, device=cuda)
    offs = torch.zeros(5, dtype=torch.int32, device=cuda)
    options = mode.on(cuda)
    graph, t = captured(lambda: fp4gemm.quantize(x, axis=0, offs=offs, **options), cuda)
    for ends in ([0, 0, 0, 0, 0], [300] * 5, [1, 65, 65, 130, 300], [10, 20, 30, 40, 50]):
        there = torch.tensor(ends, dtype=torch.int32)
        x.copy_(make("heavy", 300, 96, torch.bfloat16, gen))
        offs.copy_(there)
        t.codes.fill_(0xFF)
        t.scales.view(torch.uint8).fill_(0xFF)
        t.amax.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(cuda)
        assert_parts(parts(t), expected(x.cpu(), mode, axis=0, offs=there), str(ends))


@pytest.mark.parametrize("mode", GROUPED, ids=by_name)
def test_replay_with_other_groups(mode: Mode, cuda: torch.device, gen: torch.Generator) -> None:
    """Captures once; replays read new ends of the groups and new x in the same memory."""
    x = torch.ones(300, 96, dtype=torch.bfloat16, device=cuda)
    offs = torch.zeros(5, dtype=torch.int32, device=cuda)
    options = mode.on(cuda)

    def step() -> tuple[NVFP4Tensor, Tensor, NVFP4Tensor]:
        t = fp4gemm.quantize(x, offs=offs, **options)
        return t, t.dequantize(), fp4gemm.silu_and_mul_quantize(x, offs=offs)

    graph, (t, values, acted) = captured(step, cuda)
    for ends in (
        [0, 0, 0, 0, 0],
        [300] * 5,
        [1, 129, 129, 258, 300],
        [10, 20, 30, 40, 50],
        [0, 0, 300, 300, 300],
    ):
        there = torch.tensor(ends, dtype=torch.int32)
        x.copy_(make("heavy", 300, 96, torch.bfloat16, gen))
        offs.copy_(there)
        for part in (t.codes, t.scales.view(torch.uint8), acted.codes, acted.scales.view(torch.uint8)):
            part.fill_(0xFF)
        for part in (t.amax, acted.amax, values):
            part.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(cuda)
        want = expected(x.cpu(), mode, offs=there)
        assert_parts(parts(t), want, str(ends))
        bound = mode.arguments["e4m3_max"]
        assert_bits(values, reference.dequantize(*want, bound, torch.float32, True, there), "values")
        assert_parts(parts(acted), reference.silu_and_mul_quantize(x.cpu(), there), f"silu {ends}")


def test_replay_of_empty_tensors(cuda: torch.device) -> None:
    """Calls without rows are captured beside calls with rows, which the replay computes."""
    none = torch.ones(0, 64, dtype=torch.bfloat16, device=cuda)
    x = torch.ones(32, 64, dtype=torch.bfloat16, device=cuda)
    w = fp4gemm.quantize(torch.ones(96, 64, dtype=torch.bfloat16, device=cuda))
    offs = torch.zeros(3, dtype=torch.int32, device=cuda)

    def step() -> list[Any]:
        empty = [fp4gemm.quantize(none, scaling=scaling) for scaling in ("row", "tensor")]
        columns = fp4gemm.quantize(none, axis=0, offs=offs)
        products = [fp4gemm.mm(t, w) for t in empty]
        return [*products, empty[0].dequantize(), columns.amax, fp4gemm.mm(fp4gemm.quantize(x), w)]

    graph, results = captured(step, cuda)
    *empty, values, amax, product = results
    assert [tuple(t.shape) for t in (*empty, values)] == [(0, 96), (0, 96), (0, 64)]
    for t in (amax, product):
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize(cuda)
    assert_bits(amax, torch.zeros_like(amax))
    assert_bits(product, torch.full_like(product, 64))


def test_replay_with_other_states(cuda: torch.device, gen: torch.Generator) -> None:
    """The kernels read rng_state in each replay."""
    x = make("normal", 96, 64, torch.bfloat16, gen).to(cuda)
    state = torch.zeros(2, dtype=torch.int64, device=cuda)

    def step() -> tuple[NVFP4Tensor, ...]:
        options = {"stochastic": True, "rng_state": state}
        turned = fp4gemm.quantize(x, axis=0, hadamard="bf16", **options)
        return fp4gemm.quantize(x, **options), turned, *fp4gemm.quantize_both(x, **options)

    graph, made = captured(step, cuda)
    seen = []
    for seed, offset in ((1, 2), (-1, -1), (1, 2), (2**62, 7)):
        state.copy_(torch.tensor([seed, offset]))
        graph.replay()
        options = {"stochastic": True, "rng_state": state.clone()}
        assert_same(made[0], fp4gemm.quantize(x, **options))
        assert_same(made[1], fp4gemm.quantize(x, axis=0, hadamard="bf16", **options))
        assert_same(made[2], made[0])
        assert_same(made[3], fp4gemm.quantize(x, axis=0, **options))
        seen.append(made[0].codes.clone())
    assert_bits(seen[2], seen[0], "the same state again")
    assert not torch.equal(seen[1], seen[0])
    assert not torch.equal(seen[3], seen[0])


def test_replays_draw_anew(cuda: torch.device, gen: torch.Generator) -> None:
    """Without a state, each replay draws other numbers of torch's generator; manual_seed repeats them."""
    x = make("normal", 96, 64, torch.bfloat16, gen).to(cuda)
    graph, (t, both) = captured(
        lambda: (fp4gemm.quantize(x, stochastic=True), fp4gemm.quantize_both(x, stochastic=True)), cuda
    )

    def replays(seed: int) -> list[Tensor]:
        torch.cuda.manual_seed(seed)
        result = []
        for _ in range(3):
            graph.replay()
            result += [t.codes.clone(), both[0].codes.clone(), both[1].codes.clone()]
        return result

    first, again = replays(5), replays(5)
    for got, want in zip(again, first, strict=True):
        assert_bits(got, want, "after manual_seed")
    same_shape = [codes for codes in first if codes.shape == t.codes.shape]
    for i, codes in enumerate(same_shape):
        assert not any(torch.equal(codes, other) for other in same_shape[:i])


@pytest.mark.parametrize("mode", FEW, ids=by_name)
def test_replay_with_other_inputs(mode: Mode, cuda: torch.device, gen: torch.Generator) -> None:
    x = torch.ones(96, 160, dtype=torch.bfloat16, device=cuda)
    amax, amax_t = (torch.ones(size if mode.arguments["per_row"] else 1, device=cuda) for size in (96, 160))
    options = mode.on(cuda)
    graph, made = captured(
        lambda: (
            fp4gemm.quantize(x, **options),
            fp4gemm.quantize(x, axis=0, **options),
            fp4gemm.quantize(x, amax=amax, **options),
            *fp4gemm.quantize_both(x, **options),
            *fp4gemm.quantize_both(x, amax=amax, amax_t=amax_t, **options),
            fp4gemm.quantize_mxfp8(x),
            fp4gemm.rms_norm_quantize(x),
        ),
        cuda,
    )
    for kind in ("normal", "zero_rows", "heavy"):
        x.copy_(make(kind, 96, 160, torch.bfloat16, gen))
        amax.copy_(torch.rand(amax.shape, generator=gen) + 1)
        amax_t.copy_(torch.rand(amax_t.shape, generator=gen) + 1)
        graph.replay()
        wanted = (
            fp4gemm.quantize(x, **options),
            fp4gemm.quantize(x, axis=0, **options),
            fp4gemm.quantize(x, amax=amax, **options),
            *fp4gemm.quantize_both(x, **options),
            *fp4gemm.quantize_both(x, amax=amax, amax_t=amax_t, **options),
        )
        for i, (got, want) in enumerate(zip(made, wanted, strict=False)):
            assert_same(got, want, f"{kind}, result {i}")
        values = fp4gemm.quantize_mxfp8(x)
        assert_bits(made[-2].values, values.values, "mxfp8 values")
        assert_bits(made[-2].scales, values.scales, "mxfp8 scales")
        normed = fp4gemm.rms_norm_quantize(x)
        assert isinstance(normed, NVFP4Tensor)
        assert_same(made[-1], normed, "norm")


@pytest.mark.parametrize("decoded", [False, True], ids=["packed", "decoded"])
@pytest.mark.parametrize("shape", [(64 * 132, 128), (1000, 4096)], ids=str)
def test_x_that_the_previous_kernel_updates(
    shape: tuple[int, int], decoded: bool, hopper: torch.device, gen: torch.Generator
) -> None:
    """Launches overlap: quantize reads the x of this step, not that of the step before.

    Each step is the product x = a b^T - x in place, and quantize(x). The product reads x by loads that leave
    it in the L1 of the SM, and writes it by TMA, past that L1. The sums are exact, and x alternates between
    two matrices.
    """
    m, n = shape
    ones_at = torch.arange(m) % 64
    a = torch.nn.functional.one_hot(ones_at, 64).half().to(hopper)
    b = torch.randint(-60, 61, (n, 64), generator=gen)
    start = torch.randint(-60, 61, shape, generator=gen)
    two = torch.stack([start, b.T[ones_at] - start]).to(hopper)

    def steps(x: Tensor, kernel: str) -> list[Any]:
        results = []
        for _ in range(20):
            fp4gemm.scaled_mm(a, b_on_device, None, None, c=x, beta=-1.0, out=x, kernel=kernel)
            results.append(fp4gemm.quantize(x, decoded=decoded))
        return results

    b_on_device = b.half().to(hopper)
    fields = ("data", "amax") if decoded else ("codes", "scales", "amax")
    table = [k for k in fp4gemm.kernels() if k.arch == 90 and k.mode == "dense" and k.operand == "fp16"]
    for kernel in [k for k in table if k.epilogue == "rowcol"]:
        states = two.to(kernel.out_dtype)
        wanted = [fp4gemm.quantize(state, decoded=decoded) for state in states]
        x = states[0].clone()
        graph, results = captured(functools.partial(steps, x, kernel.name), hopper)
        assert_bits(x, states[0], f"{kernel.name}: x after an even number of steps")
        for _ in range(10):
            graph.replay()
            torch.cuda.synchronize(hopper)
            for i, got in enumerate(results):
                for name in fields:
                    want = getattr(wanted[(i + 1) % 2], name)
                    assert_bits(getattr(got, name), want, f"{kernel.name}, step {i}: {name}")


def nodes(step: Callable[[], Any], device: torch.device) -> int:
    """The number of kernels, copies and fills in a graph of ``step``."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    step()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        kept = step()
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    del kept
    assert status == 0
    return count.value


def test_groups_are_one_launch(cuda: torch.device, gen: torch.Generator) -> None:
    """With a scale per row, one kernel quantizes all groups; per group, the number of kernels is constant.

    Along columns one kernel quantizes groups of up to 128 rows on average. Others need a memset and two.
    """
    x = make("normal", 4096, 256, torch.bfloat16, gen).to(cuda)
    offs = {g: torch.arange(1, g + 1, dtype=torch.int32, device=cuda) for g in (1, 8, 1500)}
    rows = {g: nodes(lambda ends=ends: fp4gemm.quantize(x, offs=ends), cuda) for g, ends in offs.items()}
    assert set(rows.values()) == {1}, rows
    tensor = {
        g: nodes(lambda ends=ends: fp4gemm.quantize(x, scaling="tensor", offs=ends), cuda)
        for g, ends in offs.items()
    }
    assert len(set(tensor.values())) == 1, tensor
    columns = {
        g: nodes(lambda ends=ends: fp4gemm.quantize(x, axis=0, offs=ends), cuda) for g, ends in offs.items()
    }
    assert columns == {1: 3, 8: 3, 1500: 1}
    silu = {
        g: nodes(lambda ends=ends: fp4gemm.silu_and_mul_quantize(x, offs=ends), cuda)
        for g, ends in offs.items()
    }
    assert set(silu.values()) == {1}, silu
