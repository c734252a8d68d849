"""The operator `experts`: the bits of the functions that it is made of, tracing, and what it refuses."""

from __future__ import annotations

from typing import Any

import bad_experts
import pytest
import torch
from bad_base import FUNCTIONS
from experts_cases import Block, block_of, by_public_functions, random_ids
from fp4gemm import reference, support
from fp4gemm._operands import ALPHA, ALPHA_UNQUANTIZED
from fp4gemm.activations import ACTIVATIONS
from helpers import FLOATS, assert_bits, captured, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

SIZES = {
    "one_token": (1, 2, 4, 64, 32),
    "top1": (37, 1, 3, 64, 64),
    "top8": (20, 8, 16, 96, 32),
    "few": (5, 2, 32, 64, 96),
}


def weights_of(device: torch.device) -> list[bool]:
    """Whether the weights are prepacked, in the forms that the device multiplies."""
    return [False, True] if device.type == "cpu" or support.streams_prepacked(device) else [False]


def assert_is_reference(block: Block, **more: Any) -> None:
    """The operator on the device of the block gives the bits of the reference."""
    for prepacked in weights_of(block.x.device):
        arguments = block.arguments(prepacked, **more)
        there = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        got = torch.ops.fp4gemm.experts(**arguments)
        assert_bits(got, reference.experts(**there).to(got.device), f"prepacked {prepacked}")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("size", SIZES)
def test_is_made_of_the_functions(
    size: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    block = block_of(*SIZES[size], device, gen, dtype=dtype, bias=size != "few")
    assert_bits(block.run(), by_public_functions(block))
    assert_is_reference(block, batch_invariant=True)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: str(a.name))
def test_activations(activation: Any, device: torch.device, gen: torch.Generator) -> None:
    block = block_of(20, 3, 5, 64, 32, device, gen, activation.number, bias=True)
    assert_bits(block.run(), by_public_functions(block))
    assert_is_reference(block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_tokens_that_are_not_quantized(
    dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    if device.type == "cuda" and not support.streams_prepacked(device):
        pytest.skip("the kernels of the device read quantized tokens alone")
    block = block_of(20, 4, 6, 64, 64, device, gen, dtype=dtype, bias=True)
    got = block.run(scaling=0)
    assert not torch.equal(got, block.run())
    # Sums of products with tokens that were not quantized are not exact in fp32, so that their order shows.
    there = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in block.arguments().items()}
    for want in (by_public_functions(block, quantizes=False), reference.experts(**there, scaling=0)):
        torch.testing.assert_close(got, want.to(device), rtol=4e-3, atol=4e-3)
        if device.type == "cpu":
            assert_bits(got, want)


def test_weights_of_other_quantizations(device: torch.device, gen: torch.Generator) -> None:
    for options in (
        {"scaling": "tensor"},
        {"four_over_six": "mae"},
        {"four_over_six": "mse", "e4m3_max": 448},
    ):
        block = block_of(9, 2, 4, 64, 32, device, gen, **options)
        assert_bits(block.run(), by_public_functions(block), str(options))
        assert_is_reference(block)


@pytest.mark.parametrize("quantizes", [True, False], ids=["w4a4", "w4a16"])
def test_the_scale_of_the_accumulator(quantizes: bool, gen: torch.Generator) -> None:
    """1 / (36 * 448 * B) in double rounds to the float32 that mm and grouped_mm use."""
    for bound in (448, 256):
        exact = 1.0 / (6 * bound) / (6 * 448 if quantizes else 1)
        constant = ALPHA[448, bound] if quantizes else ALPHA_UNQUANTIZED[bound]
        assert torch.tensor(exact, dtype=torch.float32).item() == constant


def test_routings(device: torch.device, gen: torch.Generator) -> None:
    """One hot expert, tokens without an expert, and no token at all."""
    hot = torch.full((40, 1), 2)
    sparse = random_ids(40, 4, 8, gen)
    sparse[torch.rand(40, 4, generator=gen) < 0.5] = -1
    sparse[3] = -1
    sparse[5, 1] = 8
    for ids in (hot, sparse, torch.full((7, 2), -1), sparse[:0], sparse.int()):
        block = block_of(*ids.shape, 8, 64, 32, device, gen, ids=ids)
        got = block.run()
        assert_bits(got, by_public_functions(block))
        lost = (ids < 0).all(dim=1).to(device)
        assert_bits(got[lost], torch.zeros_like(got[lost]))
        assert_is_reference(block)


def test_close_to_the_float_block(device: torch.device, gen: torch.Generator) -> None:
    block = block_of(64, 2, 4, 256, 128, device, gen)
    w13, w2 = (w.dequantize(torch.float32) for w in (block.w13, block.w2))
    want = torch.zeros(64, 256, device=device)
    for i in range(64):
        for j in range(2):
            e = int(block.ids[i, j])
            z = w13[e] @ block.x[i].float()
            h = torch.nn.functional.silu(z[0::2]) * z[1::2]
            want[i] += block.weights[i, j] * (w2[e] @ h)
    got = block.run().float()
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine > 0.98, cosine  # the tokens are quantized, and h once more


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    for dtype, bias, prepacked in ((torch.bfloat16, True, False), (torch.float16, False, True)):
        if prepacked not in weights_of(device):
            continue
        block = block_of(20, 4, 6, 64, 32, device, gen, dtype=dtype, bias=bias)
        opcheck("experts", **block.arguments(prepacked))
        assert_fake_is_real("experts", **block.arguments(prepacked))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_and_export(backend: str, device: torch.device, gen: torch.Generator) -> None:
    ready(backend)
    block = block_of(20, 4, 6, 64, 32, device, gen)
    more = {k: v for k, v in block.arguments().items() if k not in ("x", "topk_ids", "topk_weights")}

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return torch.ops.fp4gemm.experts(x * 2, ids, weights, **more) + x

    layer = Layer()
    run = compiled(layer, backend, dynamic=True)
    for t in (20, 7):
        given = block.x[:t].contiguous(), block.ids[:t].contiguous(), block.weights[:t].contiguous()
        assert_bits(run(*given), layer(*given))
    program = torch.export.export(layer, given)
    assert_bits(program.module()(*given), layer(*given))


def test_flops(gen: torch.Generator) -> None:
    block = block_of(20, 4, 6, 64, 32, torch.device("cpu"), gen)
    with FlopCounterMode(display=False) as counter:
        block.run()
    assert counter.get_total_flops() == 2 * 20 * 4 * 64 * (64 + 32)


@pytest.mark.parametrize("case", ["x-d", "w13-k", "w2-experts", "w2_amax-shape", "scaling-value"])
def test_meta_tensors_are_checked_too(case: str) -> None:
    (found,) = (c for c in bad_experts.CASES if (c.function, c.kind) == ("reference.experts", case))
    arguments = {**FUNCTIONS["reference.experts"][1](), **found.change()}
    away = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(found.error, match=f"^{found.name}: "):
        torch.ops.fp4gemm.experts(**away)


WEIGHT_CASES = [
    case
    for case in bad_experts.CASES
    if case.function == "reference.experts"
    and case.kind.startswith("w")
    and case.kind.endswith(("dtype", "shape"))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WEIGHT_CASES, ids=lambda case: case.kind)
def test_errors_on_cuda_name_the_argument(case: Any, cuda: torch.device) -> None:
    arguments = {**FUNCTIONS["reference.experts"][1](), **case.change()}
    there = {k: v.to(cuda) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{case.name}\b"):
        torch.ops.fp4gemm.experts(**there)


@pytest.mark.gpu
def test_a_graph_follows_other_routings(cuda: torch.device, gen: torch.Generator) -> None:
    """A thousand replays, each with a routing of its own; some tokens have no expert."""
    block = block_of(24, 4, 16, 128, 64, cuda, gen, bias=True)
    arguments = block.arguments(support.streams_prepacked(cuda))
    graph, got = captured(lambda: torch.ops.fp4gemm.experts(**arguments), cuda)
    for i in range(1000):
        ids = random_ids(24, 4, 16, gen)
        ids[torch.rand(24, 4, generator=gen) < 0.1 * (i % 11)] = -1
        block.ids.copy_(ids)
        graph.replay()
        want = torch.ops.fp4gemm.experts(**arguments)
        assert torch.equal(got, want), i
        if i % 100 == 0:
            assert_is_reference(block)
