"""OperandParts: containers and layers give what they hold, and calls pass it on in their own order."""

from __future__ import annotations

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import nn
from fp4gemm.ops.gemm import GemmCall
from fp4gemm.ops.linear import LinearCall
from fp4gemm.ops.moe import ExpertsCall
from fp4gemm.ops.parts import OperandParts
from fp4gemm.ops.train import TrainBackwardCall, TrainForwardCall
from fp4gemm.reference.epilogue import ALPHA, ALPHA_UNQUANTIZED
from torch import Tensor


def parts(first: int, e4m3_max: int, rows: int) -> OperandParts:
    """Parts whose tensors are all different, so that one in the place of another is found."""
    data, scales, amax, bias = (torch.tensor(float(first + i)) for i in range(4))
    return OperandParts(data, scales, amax, e4m3_max, rows, bias)


def same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    """Whether all tensors are the same objects, and all numbers are equal."""
    pairs = zip(a, b, strict=True)
    return all(x is y if isinstance(x, Tensor) else x == y for x, y in pairs)


X = torch.zeros(())


def test_calls_return_the_parts_that_they_were_made_of() -> None:
    first, second = parts(0, 256, 8), parts(10, 448, 16)
    linear = LinearCall.of(X, first, scaling=2)
    assert linear.x is X
    assert linear.scaling == 2
    assert same(linear.weight_parts, first)
    experts = ExpertsCall(*ExpertsCall.arguments(X, X, X, first, second, 0, 3, True, False))
    assert same(experts.w13_parts, first)
    assert same(experts.w2_parts, second)
    assert experts[-4:] == (0, 3, True, False)


def test_an_input_that_was_quantized_before() -> None:
    x, w = parts(0, 256, 0), parts(10, 448, 16)
    call = LinearCall.of(x, w)
    assert same((call.x, call.x_scales, call.x_amax, call.x_e4m3_max), x[:4])
    assert same(call.weight_parts, w)


def test_the_calls_of_training_name_their_operands() -> None:
    forward = TrainForwardCall(*TrainForwardCall._fields)  # each value is the name of its field
    assert forward.w_parts == ("w", "w_scales", "w_amax", "w_e4m3_max", "w_rows", "bias")
    backward = TrainBackwardCall(*TrainBackwardCall._fields)
    assert backward.w_t_parts == ("w_t", "w_t_scales", "w_t_amax", "w_t_e4m3_max", "w_t_rows", None)
    assert backward.x_t_parts == ("x_t", "x_t_scales", "x_t_amax", "x_t_e4m3_max", 0, None)


@pytest.mark.parametrize("bounds", ALPHA)
def test_a_product_has_the_factors_of_both_operands(bounds: tuple[int, int]) -> None:
    a, b, ends = parts(0, bounds[0], 0), parts(10, bounds[1], 16), torch.zeros(1)
    call = GemmCall.of(a, b, ends, activation=2)
    assert same((call.a, call.scale_a, call.alpha_row), a[:3])
    got = OperandParts(call.b, call.scale_b, call.alpha_col, b.e4m3_max, call.b_rows, call.bias)  # type: ignore[arg-type]
    assert same(got, b)
    assert (call.alpha, call.activation) == (ALPHA[bounds], 2)
    assert call.offs is ends
    plain = GemmCall.of(X, b)
    assert (plain.alpha, plain.scale_a, plain.alpha_row) == (ALPHA_UNQUANTIZED[bounds[1]], None, None)


@pytest.mark.parametrize("bound", [448, 256])
def test_a_product_of_fp8_tokens_has_a_factor_of_its_own(bound: int) -> None:
    """fl(1 / (448 * 6 * bound)); the bound of the tokens does not count."""
    x = fp4gemm.quantize_fp8(torch.ones(3, 64))
    weight = parts(10, bound, 16)
    call = GemmCall.of(x._operand_parts(), weight)
    assert call.alpha == float(np.float32(1) / np.float32(448 * 6 * bound))
    assert same((call.a, call.scale_a, call.alpha_row), (x.data, None, x.amax))


@pytest.mark.parametrize("shape", [(16, 32), (3, 16, 32)], ids=["matrix", "stack"])
def test_containers_give_what_they_hold(shape: tuple[int, ...]) -> None:
    t = fp4gemm.quantize(torch.randn(shape), four_over_six="mse")
    assert t.e4m3_max == 256
    packed, decoded = fp4gemm.prepack(t), fp4gemm.decode(t)
    assert same(t._operand_parts(), (t.codes, t.scales, t.amax, 256, 0, None))
    assert same(packed._operand_parts(), (packed.data, None, t.amax, 256, 16, None))
    assert same(decoded._operand_parts(), (decoded.data, None, t.amax, 256, 0, None))


def test_layers_give_their_buffers() -> None:
    layer = nn.Linear.from_float(torch.nn.Linear(32, 16), method="four-over-six")
    held = layer._operand_parts()
    assert same(held, (layer.weight_codes, layer.weight_scales, layer.weight_amax, 256, 0, layer.bias))
    layer.prepack()
    held = layer._operand_parts()
    assert same(held, (layer.weight_prepacked, None, layer.weight_amax, 256, 16, layer.bias))
