"""activations="auto": what each layer gets by its device and its k, and what the report says."""

from __future__ import annotations

import types
import warnings
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn, support
from fp4gemm.models import automatic as of_models
from fp4gemm.recipe import automatic


class Model(torch.nn.Module):
    """Two layers whose k FP8 tokens may have, and one whose k they may not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.up(x)))  # type: ignore[no-any-return]


@pytest.fixture
def multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made as on compute capability 9.0; the layers run on the CPU."""
    monkeypatch.setattr(
        of_models, "support", types.SimpleNamespace(streams_prepacked=lambda device, tokens: True)
    )


def _kinds(model: torch.nn.Module) -> dict[str, str]:
    return {name: m.activations for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize(
    ("multiplies", "k", "wanted"),
    [
        (True, (64,), "fp8"),
        (True, (64, 128), "fp8"),
        (True, (96,), "a16"),
        (True, (64, 96), "a16"),
        (False, (64,), "per-token"),
        (False, (96,), "per-token"),
    ],
)
def test_the_rule(multiplies: bool, k: tuple[int, ...], wanted: str) -> None:
    assert automatic(multiplies, *k) == wanted


def test_on_the_cpu_it_is_the_default(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 64).bfloat16()
    reports: list[Any] = []
    made = fp4gemm.models.quantize_model(model, activations="auto", inplace=False, report=reports.append)
    plain = fp4gemm.models.quantize_model(model, inplace=False)
    assert _kinds(made) == _kinds(plain) == dict.fromkeys(("up", "down", "out"), "per-token")
    assert torch.equal(made(x), plain(x))
    assert {entry.activations for entry in reports[0].layers} == {"per-token"}
    assert not recwarn.list


def test_on_hopper_each_layer_gets_what_its_k_allows(multiplies_fp8: None) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 64).bfloat16()
    reports: list[Any] = []
    made = fp4gemm.models.quantize_model(
        model, activations="auto", use_fast_accum=True, inplace=False, report=reports.append
    )
    assert _kinds(made) == {"up": "fp8", "down": "a16", "out": "fp8"}
    assert [layer.use_fast_accum for layer in (made.up, made.down, made.out)] == [True, False, True]
    h = fp4gemm.nn.Linear.from_float(model.up, activations="fp8")(x)
    h = fp4gemm.nn.Linear.from_float(model.down, activations="a16")(h)
    assert torch.equal(made(x), fp4gemm.nn.Linear.from_float(model.out, activations="fp8")(h))
    found = {entry.name: (entry.activations, entry.reason) for entry in reports[0].layers}
    reason = "activations 'a16' by 'auto', since k is no multiple of 64"
    assert found == {"up": ("fp8", ""), "down": ("a16", reason), "out": ("fp8", "")}
    assert "activations: fp8 of 2, a16 of 1" in str(reports[0]).splitlines()
    assert reason in str(reports[0])
    with pytest.warns(UserWarning, match=rf"^quantize_model: 'down': {reason}$"):
        fp4gemm.models.quantize_model(model, activations="auto")


def test_weights_are_those_of_the_default(multiplies_fp8: None) -> None:
    """The device of a layer is looked at once its weight is there."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(128, 64, dtype=torch.bfloat16)), torch.randn(32, 128)
    codes = {}
    for kind in ("auto", "per-token", "fp8"):
        made = fp4gemm.models.quantize_model(
            model,
            activations=kind,  # type: ignore[arg-type]
            method="search",
            calibration=[x.bfloat16()],
            inplace=False,
        )
        codes[kind] = made[0].weight.codes
        assert made[0].activations == ("per-token" if kind == "per-token" else "fp8")
    assert torch.equal(codes["auto"], codes["per-token"])
    assert not torch.equal(codes["auto"], codes["fp8"])


@pytest.mark.parametrize(("intermediate", "kind"), [(128, "fp8"), (96, "a16")])
def test_experts_compute_what_they_say(multiplies_fp8: None, intermediate: int, kind: Any) -> None:
    """Also after a call with the activations that they were made with."""
    torch.manual_seed(0)
    weights = torch.randn(2, 2 * intermediate, 64), torch.randn(2, 64, intermediate)
    x, scores = torch.randn(5, 64).bfloat16(), torch.rand(5, 2)
    ids = torch.rand(5, 2).argsort(dim=1)
    layer = nn.Experts.from_float(*weights)
    before = layer(x, ids, scores)
    of_models.settle(layer)
    assert layer.activations == kind
    wanted = nn.Experts.from_float(*weights, activations=kind)(x, ids, scores)
    assert torch.equal(layer(x, ids, scores), wanted)
    assert not torch.equal(wanted, before)


def test_layers_that_fit_are_no_warning(multiplies_fp8: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = fp4gemm.models.quantize_model(Model(), activations="auto", exclude="down")
    assert _kinds(made) == {"up": "fp8", "out": "fp8"}


def test_an_offloaded_layer_is_judged_by_the_device_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    seen = []

    def streams_prepacked(device: torch.device, tokens: str) -> bool:
        seen.append((device, tokens))
        return False

    monkeypatch.setattr(of_models, "support", types.SimpleNamespace(streams_prepacked=streams_prepacked))
    layer = nn.Linear(64, 64)
    hook = accelerate.hooks.AlignDevicesHook("cpu")
    accelerate.hooks.add_hook_to_module(layer, hook)
    hook.execution_device = 1  # as on a machine with two GPUs
    assert of_models.settle(layer) == ""
    assert seen == [(torch.device("cuda", 1), "fp8")]


def test_fast_sums_reach_the_layers_of_fp8_alone() -> None:
    made = fp4gemm.models.quantize_model(
        Model(), activations="fp8", use_fast_accum=True, exclude="down", fuse="auto"
    )
    assert made.up.use_fast_accum
    assert made.out.use_fast_accum
    with pytest.raises(ValueError, match=r"^use_fast_accum: got True with activations 'per-token', must be"):
        fp4gemm.models.quantize_model(Model(), use_fast_accum=True)
    with pytest.raises(TypeError, match=r"^use_fast_accum: got "):
        fp4gemm.models.quantize_model(Model(), activations="auto", use_fast_accum=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^activations: got 'best', must be .* or 'auto'"):
        fp4gemm.models.quantize_model(Model(), activations="best")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu_that_is_present() -> None:
    """Its kernels decide; the layers are those of the same activations by name."""
    if not fp4gemm.is_supported("cuda"):
        pytest.skip(fp4gemm.is_supported("cuda").reason)
    torch.manual_seed(0)
    model, x = Model().cuda(), torch.randn(5, 64, device="cuda").bfloat16()
    multiplies = support.streams_prepacked(x.device, "fp8")
    assert multiplies == (torch.cuda.get_device_capability() == (9, 0))
    made = fp4gemm.models.quantize_model(model, activations="auto", inplace=False, report=lambda report: None)
    kinds = (
        {"up": "fp8", "down": "a16", "out": "fp8"} if multiplies else dict.fromkeys(_kinds(made), "per-token")
    )
    assert _kinds(made) == kinds
    wanted = x
    for name, kind in kinds.items():
        layer = fp4gemm.nn.Linear.from_float(getattr(model, name), activations=kind)  # type: ignore[arg-type]
        wanted = layer(wanted)
    assert torch.equal(made(x), wanted)
