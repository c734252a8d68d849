"""Conversions from and to other libraries' scale conventions, and which of them keep every bit."""

from __future__ import annotations

from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import assert_bits, make, make_codes, make_scales
from torch import Tensor

FMAX = torch.finfo(torch.float32).max
BOUNDS = [448, 256]


@pytest.fixture(params=BOUNDS)
def t(request: pytest.FixtureRequest, device: torch.device, gen: torch.Generator) -> NVFP4Tensor:
    x = make("normal", 130, 96, torch.bfloat16, gen).to(device) * 3
    return fp4gemm.quantize(x, scaling="tensor", four_over_six="mse", e4m3_max=request.param)


def with_amax(amax: Tensor, e4m3_max: int) -> NVFP4Tensor:
    """A tensor with one row for each amax."""
    rows = amax.shape[0]
    codes = torch.zeros(rows, 8, dtype=torch.uint8, device=amax.device)
    scales = torch.zeros((rows + 127) // 128 * 128, 4, dtype=torch.uint8, device=amax.device)
    return NVFP4Tensor(codes, scales, amax, e4m3_max)


def every_mantissa(exponent: int) -> Tensor:
    return ((torch.arange(1 << 23, dtype=torch.int32)) + ((127 + exponent) << 23)).view(torch.float32)


def exponents_and_mantissas() -> Tensor:
    """float32 from 3.2e-35 up, a few thousand in each binade."""
    mantissas = torch.arange(0, 1 << 23, 4099, dtype=torch.int32)
    binades = torch.arange(13, 255, dtype=torch.int32).unsqueeze(1) << 23
    x = (mantissas + binades).view(torch.float32).flatten()
    return x[x >= 3.2e-35]


def views(t: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    return t.decode_multiplier(), t.encode_scale()


@pytest.mark.parametrize("e4m3_max", BOUNDS)
def test_the_numbers(e4m3_max: int, device: torch.device) -> None:
    """The numbers equal float32 arithmetic on the CPU, also for extreme amaxes."""
    amax = torch.cat(
        (
            exponents_and_mantissas()[::37],
            torch.tensor([0.0, 1e-45, 7.8e-36, 8e-36, 1.0, 6.0 * e4m3_max, FMAX, torch.inf]),
        )
    )
    bound = torch.full_like(amax, 6.0 * e4m3_max)
    decode, encode = views(with_amax(amax.to(device), e4m3_max))
    assert_bits(decode, amax / bound, "decode multiplier")
    want = (bound.double() / amax.double()).clamp(max=FMAX).float()
    want[amax == torch.inf] = 1.0
    assert_bits(encode, want, "encode scale")
    assert encode[-8].item() == FMAX


@pytest.mark.parametrize("e4m3_max", BOUNDS)
def test_numbers_are_what_the_quantizer_used(
    e4m3_max: int, device: torch.device, gen: torch.Generator
) -> None:
    """q * s times the decode multiplier, and q * s / encode scale, are x up to NVFP4's own error."""
    x = make("normal", 64, 128, torch.float32, gen).to(device)
    t = fp4gemm.quantize(x, scaling="tensor", four_over_six="mae", e4m3_max=e4m3_max)
    raw = fp4gemm.decode(t).data.double()
    values = t.dequantize().double()
    for product in (raw * t.decode_multiplier(), raw / t.encode_scale()):
        assert torch.allclose(product, values, rtol=1e-6, atol=0)
    assert float((values - x).norm() / x.norm()) < 0.15


def test_scaled_mm_takes_decode_multipliers(device: torch.device, gen: torch.Generator) -> None:
    a = fp4gemm.quantize(make("normal", 33, 128, torch.bfloat16, gen).to(device))
    b = fp4gemm.quantize(make("normal", 24, 128, torch.bfloat16, gen).to(device), scaling="tensor")
    got = fp4gemm.scaled_mm(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        alpha_row=a.decode_multiplier(),
        alpha_col=b.decode_multiplier(),
        out_dtype=torch.float32,
    )
    assert torch.allclose(got, fp4gemm.mm(a, b, out_dtype=torch.float32), rtol=1e-6)


@pytest.mark.parametrize("e4m3_max", BOUNDS)
def test_round_trip_of_every_mantissa(e4m3_max: int) -> None:
    """All amaxes of a binade: both numbers keep every bit, and amax changes by at most 1 ulp."""
    bound = torch.tensor(6.0 * e4m3_max)
    for amax in (every_mantissa(0), exponents_and_mantissas()):
        decode, encode = views(with_amax(amax, e4m3_max))
        for name, number, back in (
            ("decodes", decode, decode * bound),
            ("encodes", encode, bound / encode),
        ):
            again = views(with_amax(back, e4m3_max))[name == "encodes"]
            finite = back.isfinite()  # 6B / (6B / FMAX) may round up to infinity
            assert int((~finite).sum()) <= (name == "encodes")
            assert_bits(again[finite], number[finite], name)
            ulps = (back[finite].view(torch.int32) - amax[finite].view(torch.int32)).abs()
            assert int(ulps.max()) == 1, name


@pytest.mark.parametrize("e4m3_max", BOUNDS)
def test_numbers_that_no_amax_gives_come_back_within_one_ulp(e4m3_max: int) -> None:
    """Numbers that were rounded otherwise, such as to bfloat16 by llm-compressor."""
    number, bound = every_mantissa(0), torch.tensor(6.0 * e4m3_max)
    for encodes, amax in ((False, number * bound), (True, bound / number)):
        again = views(with_amax(amax, e4m3_max))[encodes]
        ulps = (again.view(torch.int32) - number.view(torch.int32)).abs()
        assert int(ulps.max()) == 1


def assert_same_parts(got: NVFP4Tensor, want: NVFP4Tensor) -> None:
    assert_bits(got.codes, want.codes, "codes")
    assert_bits(got.scales, want.scales, "scales")
    assert got.e4m3_max == want.e4m3_max
    assert got.amax.shape == (1,)
    ulps = (got.amax.cpu().view(torch.int32) - want.amax.cpu().view(torch.int32)).abs()
    assert int(ulps) <= 1
    assert (got.offs, got.hadamard_signs) == (None, None)


def test_modelopt(t: NVFP4Tensor) -> None:
    files = t.to_modelopt()
    assert list(files) == ["weight", "weight_scale", "weight_scale_2"]
    assert (files["weight"].dtype, files["weight"].shape) == (torch.uint8, (130, 48))
    assert (files["weight_scale"].dtype, files["weight_scale"].shape) == (torch.float8_e4m3fn, (130, 6))
    assert (files["weight_scale_2"].dtype, files["weight_scale_2"].shape) == (torch.float32, ())
    back = NVFP4Tensor.from_modelopt(**files, e4m3_max=t.e4m3_max)
    assert_same_parts(back, t)
    for name, part in back.to_modelopt().items():
        assert_bits(part, files[name], name)
    quotient = t.amax.cpu() / torch.tensor(6.0 * t.e4m3_max)
    assert_bits(files["weight_scale_2"], quotient.view(()), "fl(A / 6B)")
    values = fp4gemm.decode(t).data.double() * files["weight_scale_2"].double()
    assert torch.allclose(back.dequantize().double(), values, rtol=1e-6)


def test_compressed_tensors(t: NVFP4Tensor) -> None:
    files = t.to_compressed_tensors()
    assert list(files) == ["weight_packed", "weight_scale", "weight_global_scale"]
    assert (files["weight_global_scale"].dtype, files["weight_global_scale"].shape) == (torch.float32, (1,))
    back = NVFP4Tensor.from_compressed_tensors(**files, e4m3_max=t.e4m3_max)
    assert_same_parts(back, t)
    for name, part in back.to_compressed_tensors().items():
        assert_bits(part, files[name], name)
    values = fp4gemm.decode(t).data.double() / files["weight_global_scale"].double()
    assert torch.allclose(back.dequantize().double(), values, rtol=1e-6)


def test_flashinfer(t: NVFP4Tensor) -> None:
    """Swizzled scales in the shapes that FlashInfer returns, with arbitrary padding."""
    scales = t.scales.view(torch.uint8)
    noisy = torch.full(scales.shape, 0xFF, dtype=torch.uint8, device=t.device)
    noisy[:130, :6] = t.compact_scales().view(torch.uint8)
    noisy = fp4gemm.swizzle_scales(noisy)
    for form in (
        scales,
        scales.view(torch.float8_e4m3fn),
        scales.view(-1),
        scales.view(2, 2, 32, 4, 4),
        noisy,
    ):
        back = NVFP4Tensor.from_flashinfer(t.codes, form, t.encode_scale(), t.e4m3_max)
        assert_same_parts(back, t)
        assert_bits(back.encode_scale(), t.encode_scale(), "global scale")
    values = fp4gemm.decode(t).data.double() / t.encode_scale().double()
    assert torch.allclose(back.dequantize().double(), values, rtol=1e-6)


def test_torchao(t: NVFP4Tensor) -> None:
    for number in (t.decode_multiplier(), t.decode_multiplier().view(()), t.decode_multiplier().view(1, 1)):
        plain = NVFP4Tensor.from_torchao(t.codes, t.compact_scales(), number, e4m3_max=t.e4m3_max)
        swizzled = NVFP4Tensor.from_torchao(
            t.codes.view(torch.float4_e2m1fn_x2),
            t.scales.view(-1),
            number,
            is_swizzled_scales=True,
            e4m3_max=t.e4m3_max,
        )
        for back in (plain, swizzled):
            assert_same_parts(back, t)
            assert_bits(back.decode_multiplier(), t.decode_multiplier(), "per_tensor_scale")
    alone = NVFP4Tensor.from_torchao(t.codes, t.compact_scales(), None, e4m3_max=t.e4m3_max)
    assert_bits(alone.decode_multiplier(), torch.ones(1), "no second scale")
    assert_bits(alone.dequantize(), fp4gemm.decode(t).data.float(), "values")


def test_checkpoints_of_others(device: torch.device, gen: torch.Generator) -> None:
    """Any number with random scales: codes and scales are kept, and values differ by rounding alone."""
    codes, scales = make_codes(40, 64, gen).to(device), make_scales(40, 64, gen).to(device)
    raw = fp4gemm.decode(NVFP4Tensor.from_compact(codes, scales, torch.ones(1, device=device))).data.double()
    for value in (1.0, 0.1, 3.7e-4, 2.0**-30, 1e6):
        number = torch.tensor(value, device=device)
        for t, want in (
            (NVFP4Tensor.from_modelopt(codes, scales, number), raw * value),
            (NVFP4Tensor.from_torchao(codes, scales, number), raw * value),
            (NVFP4Tensor.from_compressed_tensors(codes, scales, number), raw / value),
            (NVFP4Tensor.from_flashinfer(codes, fp4gemm.swizzle_scales(scales), number), raw / value),
        ):
            assert_bits(t.codes, codes, "codes")
            assert_bits(t.compact_scales(), scales, "scales")
            assert torch.allclose(t.dequantize().double(), want, rtol=1e-6, atol=0)


def mapped(x: Tensor) -> Tensor:
    """A copy at 8 bytes past a multiple of 16, as in a memory-mapped file of safetensors."""
    buffer = torch.empty(x.nbytes + 8, dtype=torch.uint8, device=x.device)
    moved = buffer[8:].view(x.dtype).view(x.shape)
    moved.view(torch.uint8).copy_(x.view(torch.uint8)) if x.dim() else moved.copy_(x)
    assert moved.data_ptr() % 16 == 8
    return moved


def test_tensors_of_a_mapped_file(t: NVFP4Tensor) -> None:
    """safetensors aligns tensors to 8 bytes: codes, block scales and outer scales."""
    codes, plain, swizzled = mapped(t.codes), mapped(t.compact_scales()), mapped(t.scales)
    decode, encode = mapped(t.decode_multiplier().view(())), mapped(t.encode_scale())
    for back in (
        NVFP4Tensor.from_modelopt(codes, plain, decode, t.e4m3_max),
        NVFP4Tensor.from_compressed_tensors(codes, plain, encode, t.e4m3_max),
        NVFP4Tensor.from_flashinfer(codes, swizzled, encode, t.e4m3_max),
        NVFP4Tensor.from_torchao(codes, plain, decode, e4m3_max=t.e4m3_max),
        NVFP4Tensor.from_torchao(codes, swizzled, decode, is_swizzled_scales=True, e4m3_max=t.e4m3_max),
    ):
        assert_same_parts(back, t)
        assert all(part.data_ptr() % 16 == 0 for part in (back.codes, back.scales, back.amax))
    stack = fp4gemm.stack([t, t])
    experts = mapped(stack.codes), mapped(stack.compact_scales()), mapped(t.encode_scale().expand(2).clone())
    back = NVFP4Tensor.from_compressed_tensors(*experts, t.e4m3_max)
    assert all(part.data_ptr() % 16 == 0 for part in (back.codes, back.scales, back.amax))
    for e in range(2):
        assert_same_parts(back[e], t)


def test_a_file_of_safetensors(t: NVFP4Tensor, tmp_path: Path) -> None:
    """Memory-mapped files, in which the tensors begin at some multiple of 8."""
    files = pytest.importorskip("safetensors.torch", reason="reads checkpoints with safetensors")
    for padding in range(1, 17, 5):
        path = str(tmp_path / f"{padding}.safetensors")
        first = {"a": torch.zeros(8 * padding, dtype=torch.uint8)}
        files.save_file({**first, **{f"b.{k}": v.cpu() for k, v in t.to_modelopt().items()}}, path)
        read = {k[2:]: v.to(t.device) for k, v in files.load_file(path).items() if k[:2] == "b."}
        assert_same_parts(NVFP4Tensor.from_modelopt(**read, e4m3_max=t.e4m3_max), t)


def modelopt_quantize(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and outer scale of NVFP4QTensor.quantize of ModelOpt 0.47, in its arithmetic."""
    device, w = w.device, w.cpu()
    blocks = w.float().view(w.shape[0], -1, 16)
    outer = w.float().abs().amax() / (6.0 * 448.0)
    scale = blocks.abs().amax(-1) / (6.0 * outer)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    x = (blocks / (scale.float() * outer).unsqueeze(-1)).view(w.shape)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    index = torch.searchsorted(bounds, x.abs())
    tie = torch.isin(x.abs(), bounds[1::2])
    codes = (index + tie + 8 * (w < 0)).to(torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.to(device), scale.to(device), outer.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_checkpoints_of_modelopt(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """What ModelOpt writes comes back with every bit, and its outer scale is that of quantize."""
    for exponent in (-20, -3, 0, 5):
        w = (make("normal", 130, 96, torch.float32, gen) * 2.0**exponent).to(device, dtype)
        codes, scale, outer = modelopt_quantize(w)
        t = NVFP4Tensor.from_modelopt(codes, scale, outer)
        for got, want in zip(t.to_modelopt().values(), (codes, scale, outer), strict=True):
            assert_bits(got, want, f"2^{exponent}")
        own = fp4gemm.quantize(w, scaling="tensor").to_modelopt()["weight_scale_2"]
        assert_bits(own, outer, "weight_scale_2")


def test_zero_weight(device: torch.device) -> None:
    t = fp4gemm.quantize(torch.zeros(16, 32, device=device), scaling="tensor")
    assert t.to_modelopt()["weight_scale_2"].item() == 0
    assert t.to_compressed_tensors()["weight_global_scale"].item() == FMAX
    for back in (
        NVFP4Tensor.from_modelopt(**t.to_modelopt()),
        NVFP4Tensor.from_compressed_tensors(**t.to_compressed_tensors()),
        NVFP4Tensor.from_compressed_tensors(
            t.codes, t.compact_scales(), torch.full((1,), torch.inf, device=device)
        ),
    ):
        assert not back.dequantize().any()


def test_zero_weight_of_modelopt(device: torch.device) -> None:
    """ModelOpt divides by its outer scale, 0: block scales are NaN and all codes 7. We read zeros."""
    codes, scale, outer = modelopt_quantize(torch.zeros(16, 32, device=device))
    assert outer == 0
    assert scale.float().isnan().all()
    assert (codes == 0x77).all()
    t = NVFP4Tensor.from_modelopt(codes, scale, outer)
    assert_bits(t.codes, codes, "codes")
    assert_bits(t.dequantize(), torch.zeros(16, 32), "values")
    x = fp4gemm.quantize(torch.ones(3, 32, device=device))
    assert_bits(fp4gemm.mm(x, t, out_dtype=torch.float32), torch.zeros(3, 16), "product")


def test_formats_without_a_place_refuse(device: torch.device) -> None:
    x = torch.ones(48, 32, device=device)
    offs = torch.tensor([16, 48], dtype=torch.int32, device=device)
    for t, text in (
        (fp4gemm.quantize(x), r"^amax: shape is \(48,\), must be \(1,\)"),
        (fp4gemm.quantize(x, offs=offs), r"^offs: got a torch.int32 tensor of shape \(2,\), must be None"),
        (fp4gemm.quantize(x, scaling="tensor", hadamard="fp32"), "^hadamard_signs: got 0xd7e8, must be None"),
    ):
        for write in (t.to_modelopt, t.to_compressed_tensors):
            with pytest.raises(ValueError, match=text):
                write()


def test_from_te_amax_is_the_container_itself(device: torch.device, gen: torch.Generator) -> None:
    """TransformerEngine stores the same tensors: compact scales and the measured amax."""
    t = fp4gemm.quantize(make("normal", 33, 64, torch.bfloat16, gen).to(device))
    same = NVFP4Tensor.from_compact(t.codes, t.compact_scales(), t.amax)
    assert_bits(same.dequantize(), t.dequantize(), "values")


def test_no_rows() -> None:
    """An expert without tokens, in the 128x4 layout of FlashInfer and torchao."""
    codes, scales = torch.zeros(0, 32, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
    number = torch.ones(1)
    for t in (
        NVFP4Tensor.from_flashinfer(codes, scales, number),
        NVFP4Tensor.from_torchao(codes, scales, number, is_swizzled_scales=True),
        NVFP4Tensor.from_modelopt(codes, torch.zeros(0, 4, dtype=torch.uint8), number),
    ):
        assert tuple(t.shape) == (0, 64)
        assert t.dequantize().shape == (0, 64)
        assert fp4gemm.mm(t, fp4gemm.quantize(torch.ones(8, 64))).shape == (0, 8)
