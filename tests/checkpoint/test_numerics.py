"""Weights quantized as three producers do it: against a second implementation, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm.checkpoint.formats import FORMATS, FormatName, StoredWeight
from fp4gemm.checkpoint.numerics import packed_codes, quantize_set
from fp4gemm.recipe import Recipe
from fp4gemm.reference.formats import encode_e2m1, pack
from helpers import FLOATS, TIES, assert_bits, short
from model_checkpoint import KINDS, llmcompressor, modelopt, weight
from oracles import HASHES, cases, digest
from torch import Tensor

PRODUCERS = {"modelopt": (modelopt, "modelopt"), "llmcompressor": (llmcompressor, "compressed-tensors")}


def stored(w: Tensor, recipe: Recipe, format: FormatName) -> StoredWeight:
    return quantize_set({"w": w}, recipe, format=format)["w"]


def rounded(numerics: Any) -> Recipe:
    return Recipe(numerics=numerics, method="round", weight_scaling="tensor")


def scale_bytes(s: StoredWeight) -> np.ndarray:
    return s.block_scales.cpu().view(torch.uint8).numpy()


@pytest.mark.parametrize("numerics", PRODUCERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_implementation_gives_the_same_bits(
    kind: str, dtype: torch.dtype, numerics: str, device: torch.device
) -> None:
    model, format = PRODUCERS[numerics]
    w = weight(kind, dtype, seed=1)
    got = stored(w.to(device), rounded(numerics), format)
    codes, scales, outer = model(w, w.float().abs().max().item())
    assert np.array_equal(got.outer.cpu().numpy(), outer)
    assert np.array_equal(scale_bytes(got), scales)
    assert np.array_equal(got.codes.cpu().numpy(), codes)


@pytest.mark.parametrize("numerics", PRODUCERS)
def test_the_producers_themselves_gave_the_same_bits(numerics: str) -> None:
    """Hashes of what ModelOpt 0.47.0 and llm-compressor 0.14.0.1 made of these weights: make test-oracles."""
    want = json.loads(HASHES.read_text())[numerics]
    format = PRODUCERS[numerics][1]
    got = {}
    for name, w in cases().items():
        s = stored(w, rounded(numerics), format)
        got[name] = digest(s.codes, s.block_scales, s.outer)
    assert got == want


@pytest.mark.parametrize("numerics", ["te", *PRODUCERS])
def test_a_set_shares_one_amax(numerics: str, device: torch.device) -> None:
    """The bits of the second weight are those with the amax of the first, which is larger."""
    first, second = weight("normal", torch.bfloat16, 1), weight("small", torch.bfloat16, 2, (16, 160))
    names = {"q": first.to(device), "k": second.to(device)}
    got = quantize_set(names, rounded(numerics), format="modelopt")
    assert_bits(got["q"].outer, got["k"].outer, "outer")
    amax = first.float().abs().max()
    if numerics == "te":
        t = fp4gemm.quantize(second, scaling="tensor", amax=amax.view(1))
        codes, scales = t.codes.numpy(), t.compact_scales().view(torch.uint8).numpy()
    else:
        codes, scales, _ = PRODUCERS[numerics][0](second, amax.item())
    assert np.array_equal(got["k"].codes.cpu().numpy(), codes)
    assert np.array_equal(scale_bytes(got["k"]), scales)
    alone = quantize_set(names, rounded(numerics), format="modelopt", shared_amax=False)
    assert_bits(alone["q"].codes, got["q"].codes, "codes of q")
    assert float(alone["k"].outer) < float(got["k"].outer) / 1000


@pytest.mark.parametrize("four_over_six", ["none", "mae", "mse"])
@pytest.mark.parametrize("format", FORMATS)
def test_te_gives_the_operand_of_quantize(
    format: FormatName, four_over_six: str, device: torch.device
) -> None:
    """Bit for bit also after it was stored, in every format; a loader that multiplies gets its values."""
    w = weight("normal", torch.bfloat16, 3).to(device)
    recipe = Recipe(four_over_six=four_over_six, weight_scaling="tensor")
    adaptive = None if four_over_six == "none" else four_over_six
    want = fp4gemm.quantize(w, scaling="tensor", four_over_six=adaptive)
    kept = stored(w, recipe, format)
    got = kept.to_nvfp4()
    assert got.e4m3_max == want.e4m3_max == recipe.e4m3_max
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(got, part), getattr(want, part), part)
    outer = kept.outer.double() if format != "compressed-tensors" else 1 / kept.outer.double()
    if format == "fp4gemm":
        outer = outer / (6 * recipe.e4m3_max)
    product = fp4gemm.decode(want).data.double() * outer
    assert torch.allclose(product, want.dequantize(torch.float32).double(), rtol=2.0**-22, atol=0)
    loaded = StoredWeight(kept.codes, kept.block_scales, kept.outer, format)  # as a loader that knows no 256
    if format != "fp4gemm":
        assert torch.allclose(loaded.to_nvfp4().dequantize().double(), product, rtol=2.0**-22, atol=0)


def test_te_rows(device: torch.device) -> None:
    w = weight("normal", torch.float16, 4).to(device)
    got = stored(w, Recipe(method="round"), "fp4gemm").to_nvfp4()
    want = fp4gemm.quantize(w)
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(got, part), getattr(want, part), part)


@pytest.mark.parametrize("numerics", ["te", *PRODUCERS])
@pytest.mark.parametrize("format", FORMATS)
def test_an_all_zero_weight_is_zero(format: FormatName, numerics: str) -> None:
    w = torch.zeros(16, 32, dtype=torch.bfloat16)
    got = stored(w, rounded(numerics), format)
    assert not bool(got.codes.any())
    assert bool(got.block_scales.float().isfinite().all())
    assert bool(got.outer.isfinite().all())
    assert not bool(got.to_nvfp4().dequantize().any())


def test_the_bits_do_not_depend_on_chunks_or_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight("heavy", torch.bfloat16, 5)
    for numerics, (_, format) in PRODUCERS.items():
        want = stored(w, rounded(numerics), format)
        monkeypatch.setattr("fp4gemm.checkpoint.numerics._CHUNK_ELEMS", 160 * 7)
        got = stored(w.t().contiguous().t(), rounded(numerics), format)
        for part in ("codes", "block_scales", "outer"):
            assert_bits(getattr(got, part), getattr(want, part), part)


def test_codes_of_every_boundary() -> None:
    """packed_codes and the definition of e2m1, at and beside all ties and at random."""
    special = torch.tensor([*TIES, 0.5, 1, 1.5, 2, 3, 4, 6, 1e-30, 1e30, 2688.0, torch.inf])
    beside = [torch.nextafter(special, torch.tensor(to)) for to in (0.0, torch.inf)]
    gen = torch.Generator().manual_seed(6)
    values = torch.cat([special, *beside, torch.rand(50_000, generator=gen) * 8])
    values = torch.cat([values, -values])
    values = values[: values.numel() // 2 * 2].view(1, -1)
    assert_bits(packed_codes(values), pack(encode_e2m1(values)), "codes")
    zeros = torch.tensor([[-0.0, 0.0, torch.nan, -torch.nan]])
    assert packed_codes(zeros).tolist() == [[0x00, 0x77]]


BAD = torch.ones(16, 32)
BAD_WEIGHTS = {
    "no_tensor": ([1.0], TypeError, r"^q: got \[1\.0\] \(list\), must be a torch\.Tensor$"),
    "dtype": (BAD.double(), TypeError, r"^q: dtype is torch\.float64, must be .*float32$"),
    "rank": (BAD[0], ValueError, r"^q: .*\(32,\).*\(n, k\)"),
    "k": (BAD[:, :24], ValueError, r"^q: k is 24, must be a positive multiple of 16$"),
    "empty": (BAD[:0], ValueError, r"^q: shape is \(0, 32\), must have elements$"),
    "nan": (
        BAD.index_fill(1, torch.tensor([3]), torch.nan),
        ValueError,
        r"^q: element \(0, 3\) is nan, and 16 of 512 are NaN or infinite; must be finite$",
    ),
    "inf": (BAD.index_fill(0, torch.tensor([2]), -torch.inf), ValueError, r"^q: element \(2, 0\) is -inf"),
    "set_dtype": (BAD.half(), ValueError, r"^q: dtype is torch\.float16, must be torch\.bfloat16 as of k$"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
@pytest.mark.parametrize("numerics", ["te", *PRODUCERS])
def test_a_bad_weight_is_named(numerics: str, case: str) -> None:
    w, error, message = BAD_WEIGHTS[case]
    with pytest.raises(error, match=message):
        quantize_set({"k": BAD.bfloat16(), "q": w}, rounded(numerics), format="modelopt")


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^four_over_six: got 'mse', must be 'none' with numerics"):
        Recipe(numerics="modelopt", four_over_six="mse")
    with pytest.raises(
        ValueError, match=r"^weight_scaling: got 'row', must be 'tensor' with numerics 'llmcomp"
    ):
        Recipe(numerics="llmcompressor", weight_scaling="row")
    with pytest.raises(ValueError, match=r"^numerics: got 'quark'"):
        Recipe(numerics="quark")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^weight_scaling: got 'row', must be 'tensor' for the modelopt format$"
    ):
        quantize_set({"w": BAD}, Recipe(weight_scaling="row"), format="modelopt")
    with pytest.raises(ValueError, match=r"^format: got 'awq'"):
        quantize_set({"w": BAD}, format="awq")  # type: ignore[arg-type]
