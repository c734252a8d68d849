"""Attributes that every container shares with torch.Tensor, pickling, and refused uses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import fp4gemm
import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import assert_bits

MAKERS: dict[str, Callable[[], Any]] = {
    "nvfp4": lambda: fp4gemm.quantize(torch.randn(24, 96)),
    "nvfp4-stack": lambda: fp4gemm.quantize(torch.randn(2, 24, 96), scaling="tensor"),
    "nvfp4-groups": lambda: fp4gemm.quantize(
        torch.randn(24, 96), offs=torch.tensor([5, 24], dtype=torch.int32)
    ),
    "decoded": lambda: fp4gemm.quantize(torch.randn(24, 96), decoded=True),
    "prepacked": lambda: fp4gemm.prepack(fp4gemm.quantize(torch.randn(24, 96))),
    "fp8": lambda: fp4gemm.quantize_fp8(torch.randn(24, 128)),
    "fp8-groups": lambda: fp4gemm.quantize_fp8(
        torch.randn(24, 128), offs=torch.tensor([5, 24], dtype=torch.int32)
    ),
    "mxfp8": lambda: fp4gemm.quantize_mxfp8(torch.randn(24, 96), dtype=torch.float8_e5m2),
}


@pytest.fixture(params=MAKERS)
def t(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MAKERS[request.param]()


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    for field in dataclasses.fields(expected):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(want, torch.Tensor):
            assert_bits(got, want, field.name)
        else:
            assert type(got) is type(want)
            assert got == want


def test_answers_like_a_tensor(t: Any) -> None:
    """The attributes of module.weight that transformers, accelerate and torch.nn.utils read."""
    like = torch.empty(tuple(t.shape))
    assert type(t.shape) is torch.Size
    for ask in (
        lambda x: x.shape,
        lambda x: x.size(),
        lambda x: x.size(0),
        lambda x: x.size(-1),
        lambda x: x.ndim,
        lambda x: x.dim(),
        lambda x: x.numel(),
        lambda x: x.dtype,
        lambda x: x.device,
        lambda x: x.requires_grad,
        lambda x: x.is_meta,
        lambda x: x.is_cuda,
        lambda x: x.is_floating_point(),
    ):
        assert ask(t) == ask(like)
    assert t.to("meta").is_meta
    for same in (t.cpu(), t.detach(), t.to("cpu"), t.to(like), t.to(t), t.to(None), t.requires_grad_(False)):
        assert same is t
    if not isinstance(
        t, (fp4gemm.DecodedTensor, fp4gemm.PrepackedTensor, fp4gemm.FP8Tensor)
    ):  # there data is the values
        assert t.data is t
    with pytest.raises(IndexError, match=rf"^dim: got {t.ndim}, must be at least -{t.ndim} and below"):
        t.size(t.ndim)


def test_dtype_changes_no_byte(t: Any) -> None:
    half = t.to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert t.dtype is torch.float32
    if not isinstance(t, fp4gemm.DecodedTensor):
        assert half.dequantize().dtype is torch.bfloat16
        assert t.dequantize().dtype is torch.float32
        assert_bits(half.dequantize(torch.float32), t.dequantize(), "values")
    assert_equal(half.to(torch.float32), t)
    assert t.to("cpu", torch.float16).dtype is torch.float16
    assert t.to(torch.empty(0, dtype=torch.float16)).dtype is torch.float16
    assert "dtype=torch.bfloat16" in repr(half)
    # Every copy of a container is a container with the same bits.
    leaves, spec = pytree.tree_flatten(half)
    spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
    for other in (
        half.clone(),
        copy.deepcopy(half),
        pickle.loads(pickle.dumps(half)),
        pytree.tree_unflatten(leaves, spec),
        dataclasses.replace(half),
    ):
        assert_equal(other, half)
    for part in (half[0],) if hasattr(half, "__getitem__") and half.ndim == 3 else ():
        assert part.dtype is torch.bfloat16


def test_fields_are_in_the_order_of_the_constructor(t: Any) -> None:
    """torch.compile of torch 2.11 binds positional arguments in the order of dataclasses.fields."""
    assert [field.name for field in dataclasses.fields(t)] == list(inspect.signature(type(t)).parameters)


def test_two_dtypes_are_refused(t: Any) -> None:
    like = torch.empty(0, dtype=torch.float16)
    for first, second in ((torch.bfloat16, torch.float16), (torch.bfloat16, True), (like, t), (t, t.dtype)):
        with pytest.raises(TypeError, match=r"^dtype: got .*, must be None after a dtype or a tensor"):
            t.to(first, second)


def test_dtype_survives_prepacking() -> None:
    weight = fp4gemm.quantize(torch.randn(24, 96)).to(torch.float16)
    assert fp4gemm.prepack(weight).dtype is torch.float16
    assert fp4gemm.unprepack(fp4gemm.prepack(weight)).dtype is torch.float16


def test_copy_is_forced(t: Any) -> None:
    other = t.to("cpu", copy=True)
    assert_equal(other, t)
    assert other is not t
    parts = [field.name for field in dataclasses.fields(t) if torch.is_tensor(getattr(t, field.name))]
    assert parts
    for name in parts:
        assert getattr(other, name).data_ptr() != getattr(t, name).data_ptr()


def test_torch_functions_are_refused_with_a_way_out(t: Any) -> None:
    x = torch.randn(96, 96)
    for call in (
        lambda: torch.mean(t),
        lambda: torch.nn.functional.linear(x, t),
        lambda: t @ x,
        lambda: x @ t,
        lambda: torch.cat([t, t]),
        lambda: np.asarray(t),
    ):
        with pytest.raises(TypeError, match=r"does not accept an fp4gemm\.\w+, must get a torch\.Tensor; "):
            call()


# ---- files


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_loads_with_weights_only(t: Any) -> None:
    assert_equal(torch.load(saved({"w": [t]}), weights_only=True)["w"][0], t)
    assert_equal(torch.load(saved(t.to(torch.bfloat16)), weights_only=True), t.to(torch.bfloat16))


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_corrupt_file_is_refused_by_name(t: Any, weights_only: bool) -> None:
    """A tensor of another shape is refused; prepacked containers are saved as codes and scales."""
    t = fp4gemm.unprepack(t) if isinstance(t, fp4gemm.PrepackedTensor) else t
    name = "values" if isinstance(t, fp4gemm.MXFP8Tensor) else "amax"
    bad = copy.deepcopy(t)
    part = getattr(t, name)
    object.__setattr__(bad, name, part[..., :3, :0] if t.ndim == 3 else part[..., :3])
    with pytest.raises(
        (ValueError, pickle.UnpicklingError), match=rf"fp4gemm\.{type(t).__name__}: is corrupt in this file: "
    ):
        torch.load(saved(bad), weights_only=weights_only)


def test_corrupt_numbers_are_refused() -> None:
    bad = copy.deepcopy(fp4gemm.quantize(torch.randn(24, 96)))
    object.__setattr__(bad, "e4m3_max", 300)
    with pytest.raises(ValueError, match=r"is corrupt in this file: e4m3_max: got 300, must be 448 or 256"):
        pickle.loads(pickle.dumps(bad))
