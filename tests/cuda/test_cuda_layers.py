"""fp4gemm.nn.Linear on a GPU of compute capability 9.0, whose kernels read prepacked weights."""

from __future__ import annotations

import copy

import pytest
import torch
from fp4gemm import nn
from helpers import make
from nn_helpers import float_linear, same_bits, same_state

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activations", ["per-token", "per-tensor", "a16"])
def test_the_first_forward_prepacks(activations: str, hopper: torch.device, gen: torch.Generator) -> None:
    linear = float_linear(192, 136)
    here = nn.Linear.from_float(linear, activations=activations)
    layer = copy.deepcopy(here).to(hopper)
    x = make("integers", 33, 192, torch.bfloat16, gen)
    want = here(x)
    assert layer.weight_prepacked is None
    for _ in range(2):
        assert same_bits(layer(x.to(hopper)).cpu(), want)
        names = {name for name, _ in layer.named_buffers()}
        assert names == {"weight_amax", "weight_prepacked", "weight_e4m3_max", "bias"}
    assert same_state(copy.deepcopy(layer).cpu(), here)
    back = copy.deepcopy(layer).to("cpu")
    assert back.weight_prepacked is None
    assert same_bits(back(x), want)
    assert same_bits(torch.compile(layer, backend="aot_eager", fullgraph=True)(x.to(hopper)).cpu(), want)
    layer.cpu()
    assert layer.weight_prepacked is None
    assert same_state(layer, here)


def test_a_float32_input_that_is_not_quantized(hopper: torch.device, gen: torch.Generator) -> None:
    """The layer rounds it to bfloat16, as on the CPU, and returns float32."""
    here = nn.Linear.from_float(float_linear(192, 136), activations="a16")
    layer, x = copy.deepcopy(here).to(hopper), make("integers", 33, 192, torch.float32, gen)
    for _ in range(2):
        y = layer(x.to(hopper)).cpu()
        assert y.dtype is torch.float32
        torch.testing.assert_close(y, here(x), rtol=1e-5, atol=1e-5)  # the order of the sums is another one
        assert same_bits(layer(x.to(hopper).bfloat16()).cpu(), here(x.bfloat16()))


def test_memory_of_a_layer(hopper: torch.device) -> None:
    """After the forward the layer occupies 0.5625 bytes for each element, as before."""
    layer = nn.Linear.from_float(torch.nn.Linear(4096, 4096, bias=False, device=hopper))
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device=hopper)
    torch.cuda.synchronize(hopper)
    before = torch.cuda.memory_allocated(hopper)
    layer(x)
    assert torch.cuda.memory_allocated(hopper) - before < 1 << 16


def test_graphs_of_a_layer(hopper: torch.device, gen: torch.Generator) -> None:
    """A captured first forward keeps codes and scales; both kinds of graphs see load_state_dict."""
    x = make("integers", 16, 192, torch.bfloat16, gen).to(hopper)
    for is_warm in (True, False):
        layer = nn.Linear.from_float(float_linear(192, 136)).to(hopper)
        other = nn.Linear.from_float(float_linear(192, 136)).to(hopper)
        torch.nn.init.normal_(x)
        other(x)
        if is_warm:
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.cuda.synchronize(hopper)
        assert (layer.weight_prepacked is not None) is is_warm
        assert same_bits(y, layer(x))
        assert (layer.weight_prepacked is not None) is is_warm
        layer.load_state_dict(other.state_dict())
        graph.replay()
        torch.cuda.synchronize(hopper)
        assert same_bits(y, other(x))
