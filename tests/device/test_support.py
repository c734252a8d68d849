"""is_supported, and the check before each call."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, support
from fp4gemm.support import Support


def test_is_supported_on_the_cpu() -> None:
    for device in ("cpu", torch.device("cpu")):
        support = fp4gemm.is_supported(device)
        assert support
        assert support.supported is True
        assert support.reason == "cpu: the reference in plain torch, exact and slow"


def test_is_supported_elsewhere() -> None:
    support = fp4gemm.is_supported("meta")
    assert not support, "it is false in a condition"
    assert support == Support(False, "meta: fp4gemm runs on cuda and cpu devices only")
    support = fp4gemm.is_supported("cuda:63")
    assert not support
    assert support.reason.startswith("cuda:63: torch ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_is_supported_without_cuda() -> None:
    assert fp4gemm.is_supported() == fp4gemm.is_supported("cpu")
    assert fp4gemm.is_supported("cuda") == Support(
        False, f"cuda: torch {torch.__version__} sees no CUDA device"
    )


class FakeProperties:
    name, major, minor, multi_processor_count = "NVIDIA Fake 2000", 7, 5, 30


def test_unsupported_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability no build serves: the text has device, capability, what was built and what to do."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 99)
    support._cuda_gaps.cache_clear()
    try:
        found = fp4gemm.is_supported("cuda:9")
        gaps = support._cuda_gaps(9)
    finally:
        support._cuda_gaps.cache_clear()
    assert not found
    assert set(gaps) == {"quantize", "mm", "grouped_mm"}
    for text in (found.reason, *gaps.values()):
        assert "cuda:9, NVIDIA Fake 2000 of compute capability 7.5" in text
        assert f"this fp4gemm is {kernel_table.built_text()}" in text
        assert "build it from a checkout" in text


def test_ready_raises_for_an_unsupported_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_cuda_gaps", lambda index: {"mm": "no GEMM kernel for cuda:9, Fake"})

    class OnCuda:
        is_cuda = True

        def get_device(self) -> int:
            return 9

    support.ready(OnCuda(), "quantize")  # type: ignore[arg-type]
    try:
        assert 9 in support.READY["quantize"]
        with pytest.raises(NotImplementedError, match="no GEMM kernel for cuda:9, Fake"):
            support.ready(OnCuda(), "mm")  # type: ignore[arg-type]
        assert 9 not in support.READY["mm"]
    finally:
        support.READY["quantize"].discard(9)


def test_every_operation_asks_whether_the_device_is_ready() -> None:
    """With the CPU taken off the list each operation says why it refuses the call."""
    x = torch.ones(8, 32)
    t = fp4gemm.quantize(x)

    calls = {
        "quantize": (lambda: fp4gemm.quantize(x), t.dequantize, lambda: fp4gemm.decode(t)),
        "mm": (
            lambda: fp4gemm.mm(t, t),
            lambda: fp4gemm.mm(t, fp4gemm.decode(t)),
            lambda: fp4gemm.scaled_mm(t.codes, t.codes, t.scales, t.scales),
        ),
        "grouped_mm": (
            lambda: fp4gemm.scaled_grouped_mm(
                t.codes, t.codes[None], t.scales, t.scales[None], torch.tensor([8], dtype=torch.int32)
            ),
        ),
    }
    for what, functions in calls.items():
        support.READY[what].discard(-1)
        try:
            for function in functions:
                with pytest.raises(NotImplementedError, match=r"^cpu: fp4gemm runs on"):
                    function()
        finally:
            support.READY[what].add(-1)
