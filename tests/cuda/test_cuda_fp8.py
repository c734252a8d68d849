"""FP8 tokens (W4A8) on compute capability 9.0: products within the bound, layers, graphs, batch invariance.

tests/ops/test_fp8_tokens.py and tests/gemm/test_fp8_mm.py have the products, on this device too.
"""

from __future__ import annotations

import copy
from typing import Any

import fp4gemm
import pytest
import torch
from experts_cases import random_ids
from fp4gemm import nn, support
from fp4gemm.kernel_table import KernelInfo
from fp4gemm.nn.merged import one_weight
from fp4gemm.nn.norm import RMSNormQuantize, Tokens
from helpers import assert_bits, captured, make
from torch import Tensor

pytestmark = pytest.mark.gpu

# The error before the output is rounded, relative to the norm of the output, is less than BOUND if the kernel
# adds the accumulators of the tensor cores to float32 sums, and less than FAST_BOUND if it does not.
BOUND, FAST_BOUND = 5e-4, 5e-3


@pytest.fixture
def hopper(cuda: torch.device) -> torch.device:
    if not support.streams_prepacked(cuda, "fp8"):
        pytest.skip("the device has no kernel that multiplies FP8 tokens")
    return cuda


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def error(got: Tensor, want: Tensor) -> float:
    want = want.double()
    return float((got.cpu().double() - want).norm() / want.norm())


def within(got: Tensor, want: Tensor, fast: bool = False) -> bool:
    return error(got, want) < (FAST_BOUND if fast else BOUND) + torch.finfo(got.dtype).eps / 2


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
@pytest.mark.parametrize("m", [1, 7, 16, 33, 64, 128, 257, 1030])
def test_bound(m: int, prepacked: bool, fast: bool, hopper: torch.device, gen: torch.Generator) -> None:
    x, w = make("normal", m, 2112, torch.bfloat16, gen), make("normal", 264, 2112, torch.float32, gen)
    t, q = fp4gemm.quantize_fp8(x), fp4gemm.quantize(w, four_over_six="mse")
    want = fp4gemm.mm(t, q, out_dtype=torch.float32)
    q = q.to(hopper)
    b = fp4gemm.prepack(q, fp8=True) if prepacked else q
    got = fp4gemm.mm(t.to(hopper), b, out_dtype=torch.float32, use_fast_accum=fast)
    assert error(got, want) < (FAST_BOUND if fast else BOUND)


def kernels(mode: str) -> list[KernelInfo]:
    return [k for k in fp4gemm.kernels() if k.operand == "prepacked_fp8" and k.mode == mode]


@pytest.mark.parametrize("kernel", kernels("dense"), ids=lambda k: k.name)
def test_dense_kernels(kernel: KernelInfo, hopper: torch.device, gen: torch.Generator) -> None:
    """Each by its name, with every term; sizes that are no multiples of its tile."""
    for m, n, k in ((3, 16, 64), (77, 272, 448), (300, 528, 1088)):
        x, w = make("normal", m, k, torch.bfloat16, gen), make("normal", n, k, torch.float32, gen)
        t, q = fp4gemm.quantize_fp8(x), fp4gemm.quantize(w)
        terms = {"bias": torch.randn(n, generator=gen), "out_dtype": kernel.out_dtype}
        if kernel.is_gated:
            terms |= {"activation": "swiglu"}
        else:
            c = torch.randn(m, n, generator=gen).to(kernel.out_dtype)
            terms |= {"activation": "silu", "c": c, "beta": 0.5}
        want = fp4gemm.mm(t, q, **terms)
        on_gpu = {name: v.to(hopper) if isinstance(v, Tensor) else v for name, v in terms.items()}
        p, fast = fp4gemm.prepack(q.to(hopper), fp8=True), kernel.fast_accum
        got = fp4gemm.mm(t.to(hopper), p, **on_gpu, use_fast_accum=fast, kernel=kernel.name)
        # An activation magnifies the error where it is steep, and both sides are rounded.
        assert error(got, want) < 3 * (FAST_BOUND if fast else BOUND) + torch.finfo(kernel.out_dtype).eps
        if fast:
            with pytest.raises(
                ValueError, match="is for use_fast_accum=True, must be another one without it"
            ):
                fp4gemm.mm(t.to(hopper), p, **on_gpu, kernel=kernel.name)


@pytest.mark.parametrize("kernel", kernels("grouped"), ids=lambda k: k.name)
def test_grouped_kernels(kernel: KernelInfo, hopper: torch.device, gen: torch.Generator) -> None:
    sizes = (130, 0, 1, 37, 300)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = make("normal", sum(sizes) + 5, 448, torch.bfloat16, gen)
    q = fp4gemm.quantize(torch.randn(len(sizes), 272, 448, generator=gen))
    terms = {"activation": "swiglu" if kernel.is_gated else None, "out_dtype": kernel.out_dtype}
    t = fp4gemm.quantize_fp8(x, offs=ends)
    want = fp4gemm.grouped_mm(t, q, **terms)[: sum(sizes)]
    p, fast = fp4gemm.prepack(q.to(hopper), fp8=True), kernel.fast_accum
    more = {"use_fast_accum": fast, "kernel": kernel.name}
    got = fp4gemm.grouped_mm(t.to(hopper), p, **terms, **more)[: sum(sizes)]
    assert error(got, want) < 3 * (FAST_BOUND if fast else BOUND) + torch.finfo(kernel.out_dtype).eps


def test_sums_of_one_sign(hopper: torch.device) -> None:
    """Positive numbers: without float32 sums much of the magnitude is lost; with them little is."""
    t = fp4gemm.quantize_fp8(torch.rand(128, 8192, generator=torch.Generator().manual_seed(0)) + 0.5)
    q = fp4gemm.quantize(torch.rand(256, 8192, generator=torch.Generator().manual_seed(1)) + 0.5)
    want = fp4gemm.mm(t, q, out_dtype=torch.float32)
    p = fp4gemm.prepack(q.to(hopper), fp8=True)
    got = fp4gemm.mm(t.to(hopper), p, out_dtype=torch.float32)
    assert error(got, want) < 2e-3


def test_batch_invariant(hopper: torch.device, gen: torch.Generator) -> None:
    x, w = make("normal", 700, 1024, torch.bfloat16, gen), make("normal", 512, 1024, torch.float32, gen)
    p = fp4gemm.prepack(fp4gemm.quantize(w.to(hopper)), fp8=True)
    whole = fp4gemm.mm(fp4gemm.quantize_fp8(x.to(hopper)), p, batch_invariant=True)
    for m in (1, 17, 64, 300):
        part = fp4gemm.mm(fp4gemm.quantize_fp8(x[:m].to(hopper)), p, batch_invariant=True)
        assert_bits(part, whole[:m], f"{m} rows")


def linear(n: int, k: int, **options: Any) -> nn.Linear:
    torch.manual_seed(n + k)
    return nn.Linear.from_float(torch.nn.Linear(k, n, dtype=torch.bfloat16), activations="fp8", **options)


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
def test_linear(fast: bool, hopper: torch.device, gen: torch.Generator) -> None:
    """The first forward prepacks; the state, moves and an update are those of every layer."""
    layer = linear(320, 1152, use_fast_accum=fast)
    own = copy.deepcopy(layer).to(hopper)
    for m in (1, 40, 300):
        x, c = make("normal", m, 1152, torch.bfloat16, gen), make("normal", m, 320, torch.bfloat16, gen)
        assert within(own(x.to(hopper)), layer(x), fast)
        assert within(own(x.to(hopper), c.to(hopper)), layer(x, c), fast)
        assert_bits(own(fp4gemm.quantize_fp8(x.to(hopper))), own(x.to(hopper)), "quantized before")
    place = own.weight_prepacked
    assert place is not None
    assert place.dtype is torch.int8
    for name, value in own.state_dict().items():
        assert_bits(value, layer.state_dict()[name], name)
    new = torch.randn(320, 1152, generator=gen)
    own.update_(new.to(hopper))
    layer.update_(new)
    assert own.weight_prepacked is place
    assert within(own(x.to(hopper)), layer(x), fast)
    assert_bits(own.to("cpu")(x), layer(x), "back on the CPU")


def test_other_activations_get_their_own_order(hopper: torch.device, gen: torch.Generator) -> None:
    layer, x = linear(320, 1152).to(hopper), make("normal", 40, 1152, torch.bfloat16, gen).to(hopper)
    first = layer(x)
    layer.activations = "per-token"
    assert_bits(layer(x), nn.Linear.from_quantized(layer.weight, layer.bias)(x), "NVFP4 tokens")
    layer.activations = "fp8"
    assert_bits(layer(x), first, "FP8 tokens again")


def test_graph(hopper: torch.device, gen: torch.Generator) -> None:
    layer, x = linear(320, 1152).to(hopper), make("normal", 24, 1152, torch.bfloat16, gen).to(hopper)
    layer(x)
    graph, y = captured(lambda: layer(x), hopper)
    x.copy_(make("heavy", 24, 1152, torch.bfloat16, gen))
    graph.replay()
    assert_bits(y, layer(x), "a replay with other tokens")


def test_fused_norm_and_mlp(hopper: torch.device, gen: torch.Generator) -> None:
    merged = one_weight([linear(320, 1152), linear(64, 1152)])
    norm = RMSNormQuantize(torch.nn.Parameter(torch.rand(1152).bfloat16()), 1e-6, merged)
    x, r = (make("normal", 40, 1152, torch.bfloat16, gen) for _ in range(2))
    want, h = norm(x, r)
    on_gpu = copy.deepcopy(torch.nn.ModuleList([norm, merged])).to(hopper)
    on_gpu[0]._reader = (on_gpu[1],)
    tokens, total = on_gpu[0](x.to(hopper), r.to(hopper))
    assert isinstance(tokens, Tokens)
    assert isinstance(tokens.quantized, fp4gemm.FP8Tensor)
    assert_bits(total, h, "the residual")
    assert within(on_gpu[1](tokens), merged(want))
    mlp = nn.GatedMLP(linear(512, 1152), linear(512, 1152), linear(1152, 512))
    got = copy.deepcopy(mlp).to(hopper)(x.to(hopper))
    assert error(got, mlp(x)) < 0.02  # h is rounded again: to bfloat16, and to e4m3


@pytest.mark.parametrize("t", [1, 16, 200])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_experts(activation: Any, t: int, hopper: torch.device, gen: torch.Generator) -> None:
    gated = activation == "swiglu"
    w13, w2 = (
        torch.randn(8, 512 if gated else 256, 384, generator=gen),
        torch.randn(8, 384, 256, generator=gen),
    )
    layer = nn.Experts.from_float(w13 / 20, w2 / 16, activation=activation, activations="fp8")
    x, ids = make("normal", t, 384, torch.bfloat16, gen), random_ids(t, 2, 8, gen)
    weights = torch.rand(t, 2, generator=gen)
    want = layer(x, ids, weights)
    own = copy.deepcopy(layer).to(hopper)
    given = x.to(hopper), ids.to(hopper), weights.to(hopper)
    first = own(*given)
    assert error(first, want) < 0.02
    assert_bits(own(*given), first, "the second call")
    assert own.w13.weight_prepacked is not None
    assert own.w13.weight_prepacked.dtype is torch.int8
    graph, y = captured(lambda: own(*given), hopper)
    graph.replay()
    assert_bits(y, first, "a graph")


def test_small_models_run(hopper: torch.device) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval().bfloat16()
    quantized = fp4gemm.models.quantize_model(model, activations="fp8", fuse="auto", report=lambda _: None)
    ids = torch.arange(40).view(2, 20)
    want = quantized(ids).logits
    assert error(quantized.to(hopper)(ids.to(hopper)).logits, want) < 0.05
