"""Devices that support prepacked weights and 16-bit activations, and the self-test of their kernels."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, reference, support
from fp4gemm.device import problems, selftest
from fp4gemm.kernel_table import KernelInfo
from torch import Tensor

CPU = torch.device("cpu")


def test_layers_prepack_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """SM120 reads prepacked weights too, but its FP4 tensor cores are faster for many quantized tokens."""

    class Fake:
        name, major, minor, multi_processor_count = "NVIDIA Fake 120", 12, 0, 170

    rows = [
        KernelInfo("x", "dense", "rowcol", 120, (1, 1, 1), (1, 1), torch.bfloat16, operand, False)
        for operand in ("nvfp4", "prepacked", "prepacked_fp8")
    ]

    def select(*sizes: int, format_a: str, format_b: str) -> KernelInfo | None:
        return next((row for row in rows if row.supports(format_a, format_b)), None)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Fake)
    monkeypatch.setattr(kernel_table, "select_kernel", select)
    support._streams_prepacked.cache_clear()
    try:
        device = torch.device("cuda", 9)
        assert not support.streams_prepacked(device)
        assert support.streams_prepacked(device, tokens="16-bit")
        assert support.streams_prepacked(device, tokens="fp8")
        del rows[0], rows[-1]
        support._streams_prepacked.cache_clear()
        assert support.streams_prepacked(device)
        assert not support.streams_prepacked(device, tokens="fp8")
    finally:
        support._streams_prepacked.cache_clear()


@pytest.mark.parametrize("num_groups", [0, 2])
def test_devices_with_fp4_tensor_cores_say_what_to_do(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blackwell has kernels of NVFP4 operands alone: the error names the device and an alternative."""

    class Fake:
        name, major, minor, multi_processor_count = "NVIDIA Fake 100", 10, 0, 148

    row = KernelInfo("x", "dense", "rowcol", 100, (1, 1, 1), (1, 1), torch.bfloat16, "nvfp4", False)

    def select(*sizes: int, format_a: str, format_b: str) -> KernelInfo | None:
        return row if row.supports(format_a, format_b) else None

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Fake)
    monkeypatch.setattr(kernel_table, "select_kernel", select)
    support._cuda_gaps.cache_clear()
    support._streams_prepacked.cache_clear()
    try:
        gaps = support._cuda_gaps(9)
        assert not support.streams_prepacked(torch.device("cuda", 9))
    finally:
        support._cuda_gaps.cache_clear()
        support._streams_prepacked.cache_clear()
    mode = "grouped_mm" if num_groups else "mm"
    ways = {
        "decoded operands": "pass the NVFP4Tensor, not what decode made",
        "prepacked weights": "pass fp4gemm.unprepack of the PrepackedTensor",
        "unquantized activations": "pass fp4gemm.quantize of the activations",
        "FP8 tokens": "pass fp4gemm.quantize of the tokens, or use layers with activations='per-token'",
    }
    for what, way in ways.items():
        text = gaps[f"{mode} of {what}"]
        assert "cuda:9, NVIDIA Fake 100 of compute capability 10.0" in text
        assert text.endswith(way)
    assert "do not read FP8 tokens; pass" in gaps[f"{mode} of FP8 tokens"]
    assert mode not in gaps

    class OnCuda:
        is_cuda = True

        def get_device(self) -> int:
            return 9

    monkeypatch.setattr(support, "_cuda_gaps", lambda index: gaps)
    monkeypatch.setattr(support, "_before_first_product", lambda index: True)
    try:
        support.ready_for(OnCuda(), mode, ("nvfp4", "nvfp4"))  # type: ignore[arg-type]
        for formats, what in (
            (("nvfp4", "prepacked"), "prepacked weights"),
            (("bf16", "nvfp4"), "unquantized activations"),
            (("nvfp4", "fp16"), "decoded operands"),
            (("e4m3", "nvfp4"), "FP8 tokens"),
            (("e4m3", "prepacked_fp8"), "FP8 tokens"),
        ):
            with pytest.raises(NotImplementedError, match=ways[what]):
                support.ready_for(OnCuda(), mode, formats)  # type: ignore[arg-type]
    finally:
        for seen in support.READY.values():
            seen.discard(9)


def test_the_cpu_streams_nothing() -> None:
    assert not support.streams_prepacked(CPU)


@pytest.mark.parametrize("mode", ["dense", "grouped"])
@pytest.mark.parametrize("operand", ["prepacked", "prepacked_bf16", "prepacked_fp8"])
def test_the_self_test_has_problems_for_these_kernels(operand: str, mode: str) -> None:
    """Plain and gated problems with every term; one-hot rows return every code and scale bit for bit."""

    def run(row: KernelInfo, problem: problems.Problem) -> Tensor:
        return problem.run(CPU, row.out_dtype, None)

    def one_bit(row: KernelInfo, problem: problems.Problem) -> Tensor:
        d = run(row, problem)
        d.view(torch.uint8).view(-1)[-1] ^= 1
        return d

    for epilogue in ("rowcol", "gated"):
        tile = (128, 64, 64), (1, 1)
        tested = KernelInfo("sm90_streams", mode, epilogue, 90, *tile, torch.bfloat16, operand, False)
        names = [p.name for p in problems.problems() if p.suits(tested)]
        assert any("prepacked" in name and "every term" in name for name in names)
        assert not any("ragged k" in name for name in names)
        assert [result.passed for result in selftest.compare([tested], run)] == [True]
        assert [result.passed for result in selftest.compare([tested], one_bit)] == [False]
    fp8 = operand == "prepacked_fp8"
    tokens = {"prepacked": "float16", "prepacked_bf16": "bfloat16", "prepacked_fp8": "FP8"}[operand]
    problem = next(p for p in problems.problems() if p.mode == mode and f"one-hot {tokens}" in p.name)
    a, b, _, scale_b, *_ = problem.operands
    codes, scales = (b[0], scale_b[0]) if mode == "grouped" else (b, scale_b)
    got = problem.run(CPU, torch.float32, None)
    values = reference.decode(codes, scales).float()
    if fp8:
        values = 8 * (values / 8).to(torch.float8_e4m3fn).float()
    assert torch.equal(got[: a.shape[1]].T, values)
    n, k = problems.RAGGED_M_FP8 if fp8 else problems.RAGGED_M
    plain = fp4gemm.unswizzle_scales(scales, n, k // 16).view(torch.uint8)
    assert (codes & 15).unique().tolist() == list(range(16))
    finite = [scale for scale in range(256) if scale & 0x7F != 0x7F]
    assert plain.unique().tolist() == finite, "negative ones too"
