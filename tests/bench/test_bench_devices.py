"""The contenders on Hopper and Blackwell, run on the CPU with stand-ins for torch's NVFP4 products."""

from __future__ import annotations

import sys
from typing import Any

import bench_fakes
import fp4gemm
import pytest
import torch
from bench_helpers import BLACKWELL, FP8, FP8_PRODUCT, GEFORCE, HOPPER, W4A8, named, run

from bench.baselines import cublaslt


def test_dense_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    found = named(run("dense", "--shapes", "5x64x128", operands=HOPPER))
    timed = {name for name, row in found.items() if "us" in row}
    assert timed == {
        "fp4gemm",
        "fp4gemm, packed tokens",
        "fp4gemm, both packed",
        "fp4gemm, both decoded",
        "fp4gemm W4A16",
        "scalar alpha",
        "unfused: post-scale",
        "torch bf16",
        "fp4gemm W4A4",
        *FP8,
        FP8_PRODUCT,
        *W4A8,
    }
    assert "humming" in found["humming"]["absent"]
    assert found["fp4gemm W4A16"]["checked"] == "but for rounding"
    assert not any("refused" in row for row in found.values())


@pytest.mark.parametrize("command", ["dense", "layer"])
def test_decoded_tokens_are_compared_too(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    right = fp4gemm.quantize

    def wrong(x: torch.Tensor, **options: Any) -> Any:
        made = right(x, **options)
        if options.get("decoded"):
            made.data[0, 0] += 1
        return made

    monkeypatch.setattr(fp4gemm, "quantize", wrong)
    found = named(run(command, "--shapes", "5x64x128", operands=HOPPER))
    assert found["fp4gemm"]["refused"].startswith("its tokens: data: ")
    assert "us" in found["fp4gemm, packed tokens"]


def test_grouped_and_layer_on_hopper() -> None:
    found = named(run("grouped", "--shapes", "4x64x128", "--m", "9", operands=HOPPER))
    assert {"fp4gemm", "fp4gemm, packed tokens", "fp4gemm W4A16"} <= set(found)
    assert not any("refused" in row for row in found.values())
    found = named(run("layer", "--shapes", "5x64x128", operands=HOPPER))
    assert {"fp4gemm", "fp4gemm, packed tokens", "unfused: post-scale"} <= set(found)
    assert not any("refused" in row for row in found.values())


def test_geforce_multiplies_quantized_tokens_as_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels read prepacked weights too, but its layers hold them for unquantized tokens alone."""
    monkeypatch.setitem(sys.modules, "humming", None)
    monkeypatch.setattr(cublaslt, "absent", lambda name="": "no cuBLASLt")
    found = named(run("dense", "--shapes", "5x64x128", operands=GEFORCE))
    assert {name for name in found if name.startswith("fp4gemm")} == {
        "fp4gemm",
        "fp4gemm, prepacked",
        "fp4gemm, packed tokens",
        "fp4gemm W4A16",
        "fp4gemm W4A4",
        *W4A8,
    }
    assert not any("refused" in row for row in found.values())
    assert {"fp4gemm", "fp4gemm, packed tokens"} <= set(
        named(run("layer", "--shapes", "5x64x128", operands=GEFORCE))
    )
    assert "fp4gemm W4A16" not in named(run("grouped", "--shapes", "4x64x128", "--m", "9", operands=GEFORCE))


@pytest.fixture
def with_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions for Blackwell with their own signatures, made of the reference."""
    bench_fakes.install(monkeypatch)


@pytest.mark.usefixtures("with_cublaslt")
def test_dense_on_blackwell() -> None:
    found = named(run("dense", "--shapes", "5x64x128", operands=BLACKWELL))
    assert not any("refused" in row for row in found.values())
    assert not any("absent" in row for row in found.values())
    assert {"cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"} <= set(found["fp4gemm"]["ratio"])


@pytest.mark.usefixtures("with_cublaslt")
def test_grouped_and_layer_on_blackwell() -> None:
    found = named(run("grouped", "--shapes", "4x64x128", "--m", "9", operands=BLACKWELL))
    assert "us" in found["torch nvfp4 scaled_grouped_mm, scalar alpha"], found
    found = named(run("layer", "--shapes", "5x64x128", operands=BLACKWELL))
    assert "cuBLASLt nvfp4 + post-scale" in found["fp4gemm"]["ratio"]


@pytest.mark.usefixtures("with_cublaslt")
def test_a_cublaslt_that_drops_the_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt of CUDA 13.2 Update 1 can ignore the scale; no ratio to its times may be printed."""
    right = torch.nn.functional.scaled_mm

    def wrong(a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, *rest: Any, **options: Any) -> Any:
        ones = [torch.ones_like(scale_a[1]), torch.ones_like(scale_b[1])]
        return right(a, b, [scale_a[0], ones[0]], recipe_a, [scale_b[0], ones[1]], *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", wrong)
    found = named(run("dense", "--shapes", "5x64x128", operands=BLACKWELL))
    for name in ("cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"):
        assert "refused" in found[name]
        assert name not in found["fp4gemm"]["ratio"]


def test_a_torch_without_a_product_is_named() -> None:
    assert cublaslt.absent("nosuch") == f"torch {torch.__version__} has no torch.nn.functional.nosuch"
