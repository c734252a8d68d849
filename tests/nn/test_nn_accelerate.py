"""fp4gemm.nn with accelerate: its loaders, its hooks, offloaded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nn_helpers import float_linear, same_bits
from torch import Tensor

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def float_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(float_linear(64, 96), torch.nn.ReLU(), float_linear(96, 24, bias=False))


def num_quantized(model: torch.nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


@pytest.fixture
def wanted() -> tuple[Tensor, Tensor]:
    """x, and the y of the model without accelerate."""
    model, x = fp4gemm.models.quantize_model(float_model()), torch.randn(5, 64)
    return x, model(x).detach()


def saved(path: Path, safetensors: bool) -> None:
    state = fp4gemm.models.quantize_model(float_model()).state_dict()
    if safetensors:
        pytest.importorskip("safetensors.torch").save_file(
            state, path / "model.safetensors", {"format": "pt"}
        )
    else:
        torch.save(state, path / "pytorch_model.bin")


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("empty", [True, False], ids=["meta", "cpu"])
def test_load_checkpoint_in_model(
    empty: bool, safetensors: bool, tmp_path: Path, wanted: tuple[Tensor, Tensor]
) -> None:
    saved(tmp_path, safetensors)
    x, y = wanted
    if empty:
        with accelerate.init_empty_weights():
            model = fp4gemm.models.quantize_model(float_model())
    else:
        model = torch.nn.Sequential(nn.Linear(64, 96), torch.nn.ReLU(), nn.Linear(96, 24, bias=False))
    accelerate.load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"}, strict=True)
    assert same_bits(model(x), y)
    if not empty:
        accelerate.load_checkpoint_in_model(model, str(tmp_path), strict=True)
        assert same_bits(model(x), y)


def test_load_checkpoint_and_dispatch(tmp_path: Path, wanted: tuple[Tensor, Tensor]) -> None:
    saved(tmp_path, True)
    x, y = wanted
    with accelerate.init_empty_weights():
        model = fp4gemm.models.quantize_model(float_model())
    loaded = accelerate.load_checkpoint_and_dispatch(
        copy.deepcopy(model), str(tmp_path), device_map={"": "cpu"}, force_hooks=True
    )
    assert same_bits(loaded(x), y)
    # accelerate casts float8 and float32 to dtype, which would lose bits of amax.
    with pytest.raises(
        ValueError, match=r"^weight_scales: dtype is torch\.bfloat16, must be .* without dtype="
    ):
        accelerate.load_checkpoint_and_dispatch(
            model, str(tmp_path), device_map={"": "cpu"}, dtype=torch.bfloat16
        )


HOOKED: dict[str, Callable[[torch.nn.Module, Path], torch.nn.Module]] = {
    "dispatch": lambda m, path: accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True),
    "cpu-offload": lambda m, path: accelerate.cpu_offload(m, execution_device="cpu"),
    "cpu-offload-buffers": lambda m, path: accelerate.cpu_offload(
        m, execution_device="cpu", offload_buffers=True
    ),
    "disk-offload": lambda m, path: accelerate.disk_offload(m, str(path), execution_device="cpu"),
}


@pytest.mark.parametrize("hook", HOOKED.values(), ids=HOOKED)
def test_hooks_are_carried_over(
    hook: Callable[[torch.nn.Module, Path], torch.nn.Module], tmp_path: Path, wanted: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = hook(float_model(), tmp_path), wanted
    is_offloaded = model[0].weight.is_meta
    with torch.no_grad():
        fp4gemm.models.quantize_model(model, on_unsupported="raise")
        assert num_quantized(model) == 2
        for layer in (model[0], model[2]):
            assert (
                layer._hf_hook.execution_device == torch.device("cpu")
                or layer._hf_hook.execution_device == "cpu"
            )
            assert layer.weight_codes.is_meta == is_offloaded
        for _ in range(2):
            assert same_bits(model(x), y)
        assert model[0].weight_codes.is_meta == is_offloaded


def test_a_quantized_model_is_offloaded(wanted: tuple[Tensor, Tensor]) -> None:
    x, y = wanted
    model = accelerate.cpu_offload(
        fp4gemm.models.quantize_model(float_model()), execution_device="cpu", offload_buffers=True
    )
    assert model[0].weight_codes.is_meta
    assert same_bits(model(x), y)


def test_an_offloaded_layer_is_not_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate copies codes and scales to the device for each forward; prepacked bytes would stay there."""
    from fp4gemm.nn import _weight

    model = accelerate.cpu_offload(float_model(), execution_device="cpu")
    with torch.no_grad():
        fp4gemm.models.quantize_model(model)
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)
    model(torch.randn(2, 64))
    assert model[0].weight_prepacked is None
    assert model[0].weight_codes.is_meta


def test_other_patches_of_forward_are_still_refused() -> None:
    model = float_model()
    plain = model[0].forward
    model[0].forward = lambda x: plain(x)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.warns(UserWarning, match=r"'0' \(it has hooks that a swap would drop \(forward\)\)"):
        fp4gemm.models.quantize_model(model)
    assert num_quantized(model) == 1
