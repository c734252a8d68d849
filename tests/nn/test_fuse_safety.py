"""quantize_model(fuse="auto") drops nothing that other code has put into a model, and keeps nothing alive."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import fp4gemm
import fuse_models
import pytest
import torch
from fp4gemm import nn
from fp4gemm.models import quantize as conversion
from fp4gemm.nn.merged import MergedLinear
from fp4gemm.nn.norm import RMSNormQuantize
from nn_helpers import convert, same_bits
from torch import Tensor


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def reasons(report: fp4gemm.models.QuantizeReport) -> list[str]:
    return [block.reason for block in report.blocks if block.action == "left"]


def test_hooks_of_quantized_layers_stay() -> None:
    seen: list[str] = []
    model, _ = convert(torch.nn.Sequential(fuse_models.Together(), fuse_models.MLP()))
    model[0].a.register_forward_hook(lambda *_: seen.append("a"))
    model[1].w2.register_forward_pre_hook(lambda *_: seen.append("w2"))
    report = convert(model, fuse="auto", inplace=True)[1]
    assert "one of them has hooks that a merged one would drop" in reasons(report)
    assert "it has hooks that a fused one would drop" in reasons(report)
    model[0](torch.randn(3, 64))
    model[1](torch.randn(3, 64))
    assert seen == ["a", "w2"]


def test_hooks_of_the_layer_that_reads_a_norm_stay() -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = fuse_models.Layer().norm1, Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(x))

    seen: list[torch.Size] = []
    model, _ = convert(torch.nn.Sequential(Outer().bfloat16()))
    model[0].inner.fc.register_forward_hook(lambda _, args, y: seen.append(y.shape))
    report = convert(model, fuse="auto", inplace=True)[1]
    assert not isinstance(model[0].norm, RMSNormQuantize), report
    model[0](torch.randn(3, 64, dtype=torch.bfloat16))
    assert seen == [torch.Size([3, 64])]


class Clamped(torch.nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=0.25)


class SiLUActivation(torch.nn.Module):
    """Has the name of a class of transformers, and is another one."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def hooked() -> torch.nn.Module:
    act = torch.nn.SiLU()
    act.register_forward_hook(lambda _, args, y: y.clamp(max=0.25))
    return act


@pytest.mark.parametrize("make", [Clamped, SiLUActivation, hooked])
def test_an_activation_that_only_looks_like_silu_is_left_alone(make: Callable[[], torch.nn.Module]) -> None:
    model = fuse_models.Halves()
    model.act = make()
    fused, report = convert(torch.nn.Sequential(model), fuse="auto")
    assert any("its activation" in reason for reason in reasons(report))
    x = torch.randn(3, 64)
    assert same_bits(fused(x), convert(model)[0](x))


def test_a_forward_that_was_wrapped_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old = fuse_models.Halves.forward

    @functools.wraps(old)
    def doubled(self: torch.nn.Module, x: Tensor) -> Tensor:
        return 2 * old(self, x)

    monkeypatch.setattr(fuse_models.Halves, "forward", doubled)
    fused, _ = convert(torch.nn.Sequential(fuse_models.Halves()), fuse="auto")
    assert type(fused[0]) is fuse_models.Halves


def test_parts_are_in_the_mode_of_the_model() -> None:
    for is_training in (False, True):
        fused, _ = convert(fuse_models.Together().train(is_training), fuse="auto")
        assert {module.training for module in fused.modules()} == {is_training}


def test_a_product_that_was_not_read_keeps_no_layer() -> None:
    fused, _ = convert(fuse_models.Together(), fuse="auto")
    x = torch.randn(3, 64)
    fused.a(x)  # as if an exception came before fused.b(x)
    merged = weakref.ref(fused.ab)
    assert isinstance(merged(), MergedLinear)
    del fused
    gc.collect()
    assert merged() is None


def test_float_and_unfused_layers_are_freed_before_more_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([fuse_models.Together(), fuse_models.MLP(), fuse_models.Together()])
    floats = [weakref.ref(module) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    alive: list[int] = []
    fuse, merge = conversion.fuse_blocks, fp4gemm.models.fuse.blocks.one_weight
    quantized: list[weakref.ref[nn.Linear]] = []

    def counted_fuse(model: torch.nn.Module) -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in floats))
        quantized.extend(weakref.ref(m) for m in model.modules() if type(m) is nn.Linear)
        return fuse(model)

    def counted_merge(layers: list[nn.Linear]) -> MergedLinear:
        gc.collect()
        alive.append(sum(ref() is not None for ref in quantized))
        return merge(layers)

    monkeypatch.setattr(conversion, "fuse_blocks", counted_fuse)
    monkeypatch.setattr(fp4gemm.models.fuse.blocks, "one_weight", counted_merge)
    fp4gemm.models.quantize_model(model, fuse="auto", report=lambda report: None)
    assert alive == [0, 7, 3], "no float layer; all; then the last pair and down"


def test_a_residual_may_be_a_number_and_down_another_module() -> None:
    fused, _ = convert(torch.nn.Sequential(fuse_models.MLP().bfloat16()), fuse="auto")
    mlp: Any = fused[0]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert same_bits(mlp(x, 1.5), 1.5 + mlp(x))

    class Wrapped(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base(x)

    y = mlp(x)
    mlp.down = Wrapped(mlp.down)
    assert same_bits(mlp(x, x), x + 2 * y)


def test_private_names_of_a_decoder_layer() -> None:
    class Layer(fuse_models.Layer):
        def __scaled(self, x: Tensor) -> Tensor:
            return 2 * x

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.__scaled(x))

    fused, report = convert(torch.nn.Sequential(Layer().bfloat16()), fuse="auto")
    assert report.blocks[-1].names == ("0.mlp",)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert same_bits(fused(x), fused[0].mlp(2 * x, x))


def test_a_norm_that_another_method_reads_is_left_alone() -> None:
    class Layer(fuse_models.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm2(x))

        def probe(self, x: Tensor) -> Tensor:
            return self.norm2(x) + 1

    fused, report = convert(torch.nn.Sequential(Layer().bfloat16()), fuse="auto")
    assert "Layer.probe reads it too" in reasons(report)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert fused[0].probe(x).isfinite().all()


def casts(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapped(self: torch.nn.Module, x: Tensor) -> Tensor:
        return forward(self, x.to(torch.bfloat16))

    return wrapped


class Decorated(fuse_models.Pair):
    @casts
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_a_decorator_may_read_the_result_of_a_norm() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.pair = fuse_models.RMSNorm(), Decorated()

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(self.norm(x))

    fused, report = convert(torch.nn.Sequential(Layer().bfloat16()), fuse="auto")
    reason = "Decorated, which reads its result, does more with it than call quantized layers"
    assert reason in reasons(report)
    assert fused(torch.randn(3, 64, dtype=torch.bfloat16)).isfinite().all()
