"""Quantization-aware training: the first forward, the gradients, and the exactness of the export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.models import QATExperts, QATLinear, convert_qat, prepare_qat, qat
from fp4gemm.models.qat import first_master, nearest_codes, random_codes
from fp4gemm.reference.formats import E2M1_VALUES, pack, unpack
from nn_helpers import same_bits
from torch import Tensor

K, HIDDEN, N = 64, 128, 32
KINDS = ("a16", "fp8", "per-token", "per-tensor", "per-token,four_over_six=mse")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    first, second = torch.nn.Linear(K, HIDDEN), torch.nn.Linear(HIDDEN, N, bias=False)
    return torch.nn.Sequential(first, torch.nn.LayerNorm(HIDDEN), torch.nn.SiLU(), second).to(dtype).eval()


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(40, K, dtype=dtype) for _ in range(5)]


def options_of(method: str, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keywords of quantize_model for a method, with the statistics that it needs."""
    if method != "gptq":
        return {"method": method}
    return {"method": method, "calibration": fp4gemm.calibrate(model, batches(dtype), second_moment=True)}


def same_weight(a: fp4gemm.NVFP4Tensor, b: fp4gemm.NVFP4Tensor) -> bool:
    parts = zip((a.codes, a.scales, a.amax), (b.codes, b.scales, b.amax), strict=True)
    return a.e4m3_max == b.e4m3_max and all(same_bits(x, y) for x, y in parts)


def trained(student: torch.nn.Module, teacher: torch.nn.Module, x: Tensor, steps: int = 15) -> list[float]:
    """The losses of steps that move master weights by several codes."""
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=1e-3), []
    for _ in range(steps):
        loss = (student(x).float() - teacher(x).detach().float()).pow(2).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---- the first forward


@pytest.mark.parametrize("master", ["float", "quantized"])
@pytest.mark.parametrize("method", ["round", "four-over-six", "search", "gptq"])
def test_the_first_forward_is_that_of_the_method(method: str, master: Any) -> None:
    model, x = network(torch.bfloat16), batches(torch.bfloat16)[0]
    options = options_of(method, model, torch.bfloat16)
    quantized = fp4gemm.models.quantize_model(model, inplace=False, **options)
    student = prepare_qat(model, master=master, **options)
    assert student.training
    assert type(student[0]) is QATLinear
    assert student[0].weight.dtype is torch.float32
    assert [name for name, _ in student.named_parameters()] == [name for name, _ in model.named_parameters()]
    for place in (0, 3):
        assert same_weight(student[place].quantized_weight(), quantized[place].weight)
    assert torch.equal(student(x), quantized(x))
    if master == "float":  # as near to the float weights as the codes allow
        gap = (student[0].weight - model[0].weight.float()).abs().mean()
        assert gap < (student[0].quantized_weight().dequantize() - model[0].weight.float()).abs().mean() / 4


def every_block() -> fp4gemm.NVFP4Tensor:
    """A weight with each e2m1 code beside each block scale and outer scales of many sizes."""
    amax = torch.tensor([3e-30, 1e-3, 0.7, 1.0, 448.0, 1e30])
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(amax), 126)
    scales = torch.arange(1, 127, dtype=torch.uint8).expand(len(amax), 126)
    return fp4gemm.NVFP4Tensor.from_compact(pack(codes), scales.view(torch.float8_e4m3fn), amax, 256)


def test_dequantized_values_have_their_codes_again() -> None:
    made = every_block()
    assert torch.equal(nearest_codes(made.dequantize(torch.float32), made), made.codes)


def test_master_weights_near_the_float_ones_have_the_codes() -> None:
    made = every_block()
    for scale in (0.0, 0.3, 1.0, 10.0):  # also far away from the codes, on both sides
        w = made.dequantize(torch.float32) * (1 + scale * torch.randn(made.shape))
        assert torch.equal(nearest_codes(first_master(w, made, "float"), made), made.codes)


def test_codes_are_the_nearest_ones_with_ties_to_even() -> None:
    step = 0.25  # amax / (6 * 448) * scale
    amax, scale = torch.full((1,), step * 6 * 448), torch.ones(1, 1).to(torch.float8_e4m3fn)
    like = fp4gemm.NVFP4Tensor.from_compact(torch.zeros(1, 8, dtype=torch.uint8), scale, amax)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5]])
    w = torch.cat((ties, -ties), 1) * step
    wanted = torch.tensor([[0, 2, 2, 4, 4, 6, 6, 7]])
    assert torch.equal(unpack(nearest_codes(w, like)).long(), torch.cat((wanted, wanted + 8), 1))
    random = torch.randn(200, 16, dtype=torch.float64) * 3
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    for row in random:
        found = values[unpack(nearest_codes((row * step).float()[None], like))[0].long()]
        least = (row[:, None] - values).abs().amin(1)
        assert torch.allclose((found - row).abs(), least, atol=1e-6)


def test_a_block_without_a_scale_has_zeros() -> None:
    model = torch.nn.Linear(K, N, bias=False)
    with torch.no_grad():
        model.weight[:, :16] = 0
        model.weight[3] = 0
    student = prepare_qat(model, method="round", master="float")
    codes = unpack(student.quantized_weight().codes)
    assert not (codes[:, :16] % 8).any()
    assert not (codes[3] % 8).any()
    student(torch.randn(4, K)).sum().backward()
    assert torch.isfinite(student.weight.grad).all()
    assert torch.isfinite(student.weight).all()


# ---- the export


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_trained_forward(kind: Any, dtype: torch.dtype) -> None:
    model, x = network(dtype), batches(dtype)[0]
    student = prepare_qat(model, activations=kind, **options_of("gptq", model, dtype))
    first = student[0].quantized_weight()
    losses = trained(student, model, x)
    assert losses[-1] < losses[0]
    used = {}
    for place in (0, 3):  # what the product of a training step saved for its backward pass
        handle = student[place].register_forward_hook(
            lambda m, a, y, p=place: used.update({p: (*y.grad_fn.saved_tensors[2:], y.grad_fn.e4m3_max)})
        )
        student(x)
        handle.remove()
    want = student.eval()(x)
    assert torch.equal(want, student.train()(x))
    made = convert_qat(student)
    assert made is student
    assert not made.training
    for place, (codes, scales, amax, bound) in used.items():
        layer = made[place]
        assert type(layer) is nn.Linear
        assert layer.activations == kind
        assert torch.equal(layer.weight_codes, codes)
        assert same_bits(layer.weight_scales, scales)
        assert torch.equal(layer.weight_amax, amax)
        assert layer.e4m3_max == bound == 256
    assert not torch.equal(made[0].weight_codes, first.codes)  # training did change some
    assert torch.equal(made[0].weight_amax, first.amax)
    assert made[0].weight.dtype is dtype
    assert torch.equal(made(x), want)
    again = nn.Linear(K, HIDDEN, activations=kind, dtype=dtype)
    again.load_state_dict(made[0].state_dict())
    assert torch.equal(again(x), made[0](x))


def test_modules_with_two_names_stay_one() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(K, K)
            self.again = self.up

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.relu(self.up(x)))

    student = prepare_qat(Twice())
    assert student.up is student.again
    x = torch.randn(5, K)
    trained(student, Twice(), x)
    want = student(x)
    made = convert_qat(student)
    assert made.up is made.again
    assert torch.equal(made(x), want)


def test_copies_and_states_of_students() -> None:
    model, x = network(), batches()[0]
    student = prepare_qat(model, method="four-over-six", master="float")
    fresh = prepare_qat(model, method="round", master="float")
    trained(student, model, x)
    want = student(x)
    assert torch.equal(copy.deepcopy(student)(x), want)
    fresh.load_state_dict(student.state_dict())  # scales and their bound come with the master weights
    assert torch.equal(fresh(x), want)
    assert torch.equal(convert_qat(fresh)(x), want)
    half = prepare_qat(model).bfloat16()  # codes of a rounded master weight; scales keep their dtypes
    assert half[0].layer.weight_amax.dtype is torch.float32
    assert half(x.bfloat16()).dtype is torch.bfloat16
    want = half(x.bfloat16())
    assert torch.equal(convert_qat(half)(x.bfloat16()), want)


def test_a_layer_alone() -> None:
    model, x = torch.nn.Linear(K, N), torch.randn(2, 3, K)
    student = prepare_qat(model)
    want = student(x)
    assert want.shape == (2, 3, N)
    made = convert_qat(student)
    assert type(made) is nn.Linear
    assert torch.equal(made(x), want)


# ---- gradients


def straight_through(values: Tensor, w: Tensor) -> Tensor:
    return w + (values - w).detach()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_dequantized_operands(kind: Any) -> None:
    student = prepare_qat(torch.nn.Linear(K, N), activations=kind, method="search")
    x = torch.randn(2, 9, K, requires_grad=True)
    dy = torch.randn(2, 9, N)
    student(x).backward(dy)
    other = x.detach().requires_grad_()
    w, bias = (p.detach().clone().requires_grad_() for p in (student.weight, student.bias))
    rows = other.detach().view(18, K)
    if kind == "a16":
        read = rows.bfloat16().float()
    elif kind == "fp8":
        read = fp4gemm.quantize_fp8(rows).dequantize(torch.float32)
    else:
        how: dict[str, Any] = {"scaling": "tensor"} if kind == "per-tensor" else {}
        how |= {"four_over_six": "mse"} if "mse" in kind else {}
        read = fp4gemm.quantize(rows, **how).dequantize(torch.float32)
    values = student.quantized_weight().dequantize(torch.float32)
    if kind == "fp8":
        made = student.quantized_weight()
        unit = (made.amax / (6 * made.e4m3_max))[:, None]
        exact = (values.double() / unit * 2**10).round() / 2**10  # q * s
        values = (exact.float() / 8).to(torch.float8_e4m3fn).float() * 8 * unit
    y = torch.nn.functional.linear(
        straight_through(read.view(2, 9, K), other), straight_through(values, w), bias
    )
    y.backward(dy)
    for found, want in ((x.grad, other.grad), (student.weight.grad, w.grad), (student.bias.grad, bias.grad)):
        assert torch.allclose(found, want, rtol=1e-4, atol=1e-4)


def test_saturated_weights_do_not_move_outward() -> None:
    student = prepare_qat(torch.nn.Linear(K, N, bias=False), method="round", activations="a16")
    with torch.no_grad():
        made = student.quantized_weight()
        step = made.compact_scales().float() * made.amax[:, None] / (6 * made.e4m3_max)
        student.weight[0] = (step[0] * 7).repeat_interleave(16)  # beyond 6 steps
        student.weight[1] = -(step[1] * 7).repeat_interleave(16)
        student.weight[2] = (step[2] * 5.9).repeat_interleave(16)
    for sign in (1.0, -1.0):
        student.weight.grad = None
        student(torch.ones(1, K)).backward(torch.full((1, N), sign))
        # A step goes against the gradient: outward where the two signs differ.
        assert bool((student.weight.grad[0] == 0).all()) is (sign < 0)
        assert bool((student.weight.grad[1] == 0).all()) is (sign > 0)
        assert not (student.weight.grad[2:] == 0).any()


def test_frozen_parts_get_no_gradient() -> None:
    student = prepare_qat(network())
    student[0].weight.requires_grad_(False)
    student(batches()[0]).sum().backward()
    assert student[0].weight.grad is None
    assert student[0].bias.grad is not None
    assert student[3].weight.grad is not None


def test_checkpointing_computes_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = network(), batches()[0]
    student = prepare_qat(model)
    student(x).square().mean().backward()
    want = student[0].weight.grad.clone()
    student.zero_grad()
    checkpoint(student, x, use_reentrant=False).square().mean().backward()
    assert torch.equal(student[0].weight.grad, want)


# ---- experts


def experts_model(
    model: str = "qwen3_moe", name: str = "Qwen3MoeExperts", intermediate: int = 96
) -> torch.nn.ModuleDict:
    pytest.importorskip("transformers.integrations.moe", reason="transformers is older than 5")
    import importlib

    class Config:
        hidden_size, intermediate_size, moe_intermediate_size = K, intermediate, intermediate
        num_local_experts = num_experts = n_routed_experts = 4
        hidden_act, mlp_hidden_act, moe_latent_size = "silu", "relu2", None
        num_experts_per_tok = 2
        swiglu_alpha, swiglu_limit = 1.702, 7.0
        _experts_implementation = "eager"

    made = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(Config())
    for p in made.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return torch.nn.ModuleDict({"experts": made.eval()})


def routing(num_tokens: int = 30) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, 4).argsort(1)[:, :2]
    return ids, torch.rand(num_tokens, 2)


EXPERTS = {
    "swiglu": ("qwen3_moe", "Qwen3MoeExperts"),
    "gpt-oss": ("gpt_oss", "GptOssExperts"),
    "relu2": ("nemotron_h", "NemotronHExperts"),
}


@pytest.mark.parametrize("master", ["float", "quantized"])
@pytest.mark.parametrize("which", EXPERTS.values(), ids=EXPERTS)
def test_the_first_forward_of_experts(which: tuple[str, str], master: Any) -> None:
    model = experts_model(*which)
    quantized = fp4gemm.models.quantize_model(model, inplace=False)
    student = prepare_qat(model, master=master)
    assert type(student["experts"]) is QATExperts
    for found, want in zip(
        student["experts"].quantized_weights(),
        (quantized["experts"].w13.weight, quantized["experts"].w2.weight),
        strict=True,
    ):
        assert same_weight(found, want)
    x, (ids, scores) = torch.randn(30, K), routing()
    assert torch.equal(student["experts"](x, ids, scores), quantized["experts"](x, ids, scores))


@pytest.mark.parametrize("kind", ["a16", "fp8", "per-token"])
def test_the_export_of_experts_is_the_trained_forward(kind: Any) -> None:
    model = experts_model(intermediate=128)
    student = prepare_qat(model, activations=kind, method="search")
    x, (ids, scores) = torch.randn(30, K), routing()
    first = student["experts"].quantized_weights()[0].codes
    with torch.no_grad():
        target = model["experts"](x, ids, scores)
    layer = student["experts"]
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=1e-3), []
    for _ in range(6):
        loss = (layer(x, ids, scores) - target).pow(2).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    used, want = layer.quantized_weights(), layer(x, ids, scores)
    made = convert_qat(student)["experts"]
    assert type(made) is nn.Experts
    assert made.activations == kind
    assert same_weight(made.w13.weight, used[0])
    assert same_weight(made.w2.weight, used[1])
    assert not torch.equal(made.w13.weight_codes, first)
    assert torch.equal(made(x, ids, scores), want)


@pytest.mark.parametrize("which", EXPERTS.values(), ids=EXPERTS)
def test_gradients_of_experts(which: tuple[str, str]) -> None:
    """With activations that are not quantized they are those of transformers' block of the stored values."""
    from transformers.integrations import moe

    model = experts_model(*which)
    student = prepare_qat(model, activations="a16", method="search")["experts"]
    x = torch.randn(30, K).bfloat16().float().requires_grad_()
    ids, scores = routing()
    scores.requires_grad_()
    dy = torch.randn(30, K)
    y = student(x, ids, scores)
    y.backward(dy)
    original = model["experts"]
    w13, w2 = (w.dequantize(torch.float32) for w in student.quantized_weights())
    halves = original.has_gate and original.is_concatenated
    if halves:
        w13 = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1)
    name = "gate_up_proj" if original.has_gate else "up_proj"
    with torch.no_grad():
        for p, values in ((getattr(original, name), w13), (original.down_proj, w2)):
            p.copy_(values.transpose(1, 2) if original.is_transposed else values)
    other, others = x.detach().requires_grad_(), scores.detach().requires_grad_()
    want = moe.batched_mm_experts_forward(original, other, ids, others)
    want.backward(dy)
    assert torch.allclose(
        y, want, rtol=0.05, atol=0.05 * float(want.detach().abs().max())
    )  # h is rounded to bf16
    found13, wanted13 = student.w13.grad, getattr(original, name).grad
    wanted13 = wanted13.transpose(1, 2) if original.is_transposed else wanted13
    if halves:
        wanted13 = wanted13.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    wanted2 = original.down_proj.grad
    wanted2 = wanted2.transpose(1, 2) if original.is_transposed else wanted2
    pairs = [
        (x.grad, other.grad),
        (scores.grad, others.grad),
        (found13, wanted13),
        (student.w2.grad, wanted2),
    ]
    if original.has_bias:
        pairs.append((student.bias2.grad, original.down_proj_bias.grad))
    for found, wanted in pairs:
        assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_experts_without_tokens_and_pairs_without_an_expert() -> None:
    student = prepare_qat(experts_model())["experts"]
    x, (ids, scores) = torch.randn(30, K, requires_grad=True), routing()
    ids[:10, 1] = -1
    ids[ids == 2] = -1
    student(x, ids, scores).sum().backward()
    assert not student.w13.grad[2].any()
    assert student.w13.grad[[0, 1, 3]].flatten(1).any(1).all()
    assert not x.grad[(ids == -1).all(1)].any()


# ---- refusals


def _nan(student: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        student[3].weight[0, :2] = torch.nan
    return student


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "model": (
        lambda: prepare_qat("model"),
        TypeError,
        r"model: got 'model' \(str\), must be a torch.nn.Module",
    ),
    "master": (lambda: prepare_qat(network(), master="gptq"), ValueError, "master: got 'gptq', must be"),
    "inplace": (
        lambda: prepare_qat(network(), inplace=True),
        ValueError,
        "inplace: got True, must be absent",
    ),
    "fuse": (lambda: prepare_qat(network(), fuse="auto"), ValueError, "fuse: got 'auto', must be absent"),
    "method": (lambda: prepare_qat(network(), method="gptq"), ValueError, "method: got 'gptq' without"),
    "nothing": (
        lambda: prepare_qat(network(), exclude="*"),
        ValueError,
        "model: no layer was quantized, must be at least one",
    ),
    "unknown": (lambda: prepare_qat(network(), scales="learned"), TypeError, "scales"),
    "student": (lambda: convert_qat(3), TypeError, r"student: got 3 \(int\), must be a torch.nn.Module"),
    "no-student": (lambda: convert_qat(network()), ValueError, "student: has no layer of prepare_qat"),
    "nan": (
        lambda: convert_qat(_nan(prepare_qat(network()))),
        ValueError,
        "student: 2 values of 3.weight are NaN or infinite, must all be finite",
    ),
    "x": (
        lambda: prepare_qat(network())(torch.randn(2, 32)),
        ValueError,
        r"x: shape is \(2, 32\), must be \(..., 64\), 64 = in_features",
    ),
    "dtype": (lambda: prepare_qat(network())(torch.ones(2, K, dtype=torch.int32)), TypeError, "x: dtype is"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_nothing_changes_where_the_export_is_refused() -> None:
    student = _nan(prepare_qat(network()))
    with pytest.raises(ValueError, match=r"3\.weight"):
        convert_qat(student)
    assert [type(m) for m in (student[0], student[3])] == [QATLinear] * 2


# ---- a GPU


@pytest.mark.parametrize("shape", [(32, K), (3, 32, K)], ids=["matrix", "stack"])
def test_codes_that_are_drawn(shape: tuple[int, ...]) -> None:
    """Their mean is the weight; values stay; what is beyond the largest value becomes it."""
    made = fp4gemm.quantize(torch.randn(shape), four_over_six="mse")
    values = made.dequantize(torch.float32)
    generator = torch.Generator().manual_seed(0)

    def drawn(w: Tensor) -> Tensor:
        codes = random_codes(w, made, generator)
        return made._with(codes, made.scales, made.amax, None).dequantize(torch.float32)

    assert torch.equal(random_codes(values, made, generator), made.codes)
    assert torch.equal(drawn(values * 100).sign(), values.sign())
    assert same_bits(drawn(values * 100), drawn(values * 1000))
    # Between 0 and the largest value of each block, so that nothing saturates.
    block = values.unflatten(-1, (-1, 16)).abs().amax(-1, True).expand(*shape[:-1], -1, 16).flatten(-2)
    target = block * (torch.rand(shape) * 1.6 - 0.8)
    num_draws = 400
    draws = torch.stack([drawn(target) for _ in range(num_draws)])
    steps = qat._steps(made).repeat_interleave(16, 1).view(shape)
    grid = torch.tensor(E2M1_VALUES[:8])
    above = torch.bucketize(target.abs() / steps, grid).clamp(min=1)
    low, high = grid[above - 1] * steps, grid[above] * steps
    assert bool(((draws.abs() - low).abs().minimum((draws.abs() - high).abs()) < 1e-6 * high).all())
    deviation = ((target.abs() - low) * (high - target.abs()) / num_draws).sqrt()
    z = (draws.mean(0) - target) / (deviation + 1e-4 * steps)
    assert z.abs().max() < 5.5
    assert 0.9 < z.std() < 1.1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["a16", "fp8", "per-token"])
def test_a_gpu_trains_and_exports_the_same_codes(kind: Any, cuda: torch.device) -> None:
    if kind != "per-token" and torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("the device has no kernels for these tokens")
    model = network(torch.bfloat16)
    options = {"activations": kind, **options_of("gptq", model, torch.bfloat16)}
    student = prepare_qat(model, **options)
    on_gpu = copy.deepcopy(student).to(cuda)
    x = torch.randn(96, K, dtype=torch.bfloat16)
    assert torch.equal(on_gpu[0].quantized_weight().codes.cpu(), student[0].quantized_weight().codes)
    for one, place in ((student, torch.device("cpu")), (on_gpu, cuda)):
        one(x.to(place)).float().square().mean().backward()
    for a, b in zip(student.parameters(), on_gpu.parameters(), strict=True):
        assert (a.grad - b.grad.cpu()).norm() < 0.05 * a.grad.norm()
    on_gpu.zero_grad()
    losses = trained(on_gpu, copy.deepcopy(model).to(cuda), x.to(cuda))
    assert losses[-1] < losses[0]
    used, want = on_gpu[0].quantized_weight(), on_gpu(x.to(cuda)).float()
    on_cpu = copy.deepcopy(on_gpu).cpu()
    assert torch.equal(on_cpu[0].quantized_weight().codes, used.codes.cpu())
    made = convert_qat(on_gpu)
    assert same_weight(made[0].weight, used)
    assert torch.allclose(made(x.to(cuda)).float(), want, rtol=5e-2, atol=5e-2 * float(want.abs().max()))


@pytest.mark.gpu
def test_experts_train_on_a_gpu(cuda: torch.device) -> None:
    student = prepare_qat(experts_model().bfloat16())["experts"]
    on_gpu = copy.deepcopy(student).to(cuda)
    x, (ids, scores) = torch.randn(30, K, dtype=torch.bfloat16), routing()
    for one, place in ((student, torch.device("cpu")), (on_gpu, cuda)):
        one(x.to(place), ids.to(place), scores.to(place)).float().square().mean().backward()
    for a, b in zip(student.parameters(), on_gpu.parameters(), strict=True):
        assert (a.grad - b.grad.cpu()).norm() < 0.05 * a.grad.norm()
