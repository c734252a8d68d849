"""Helpers of the tests of the torch operators: opcheck, compilation as one graph, meta tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
BACKENDS = ("aot_eager", "inductor")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def ready(backend: str) -> str:
    """Returns the backend after emptying dynamo's caches; skips inductor without a C++ compiler."""
    if backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor: no C++ compiler")
    torch._dynamo.reset()
    return backend


def compiled(function: Callable[..., Any], backend: str, dynamic: bool | None = None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def opcheck(name: str, *args: Any, **kwargs: Any) -> None:
    overload = getattr(torch.ops.fp4gemm, name).default
    allclose = torch.allclose

    def comparable(lhs: torch.Tensor, rhs: torch.Tensor, **options: Any) -> bool:
        # test_schema compares the inputs before and after with allclose, which torch lacks for float8.
        if lhs.dtype in FLOAT8:
            return torch.equal(lhs.view(torch.uint8), rhs.view(torch.uint8))
        return allclose(lhs, rhs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "allclose", comparable)
        result = torch.library.opcheck(overload, args, kwargs, test_utils=CHECKS)
    assert result == dict.fromkeys(CHECKS, "SUCCESS")


def assert_fake_is_real(name: str, *args: Any, **kwargs: Any) -> None:
    """Requires that results on meta tensors have the shapes, dtypes and strides of the real results."""

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    operator = getattr(torch.ops.fp4gemm, name)
    real = operator(*args, **kwargs)
    fake = operator(*map(to_meta, args), **{key: to_meta(value) for key, value in kwargs.items()})
    if isinstance(real, torch.Tensor):
        real, fake = (real,), (fake,)
    for i, (got, want) in enumerate(zip(fake, real, strict=True)):
        about = [(t.shape, t.dtype, t.stride()) for t in (got, want)]
        assert about[0] == about[1], f"{name}, result {i}"
