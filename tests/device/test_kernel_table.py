"""The table of kernels: its rows, its architectures, and the kernel that a call would get."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import _native, _structs, kernel_table
from fp4gemm.kernel_table import KernelInfo

PAIRS = list(itertools.product(kernel_table.FORMATS, repeat=2))


def test_kernels_describe_themselves() -> None:
    """Names are mechanical, so each must agree with the fields beside it."""
    rows = fp4gemm.kernels()
    assert len(rows) == _native.core().fp4gemm_kernel_count()
    assert len({row.name for row in rows}) == len(rows)
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for row in rows:
        tile, cluster = "x".join(map(str, row.tile)), "x".join(map(str, row.cluster))
        swapped = "_swapped" if row.is_swapped else ""
        if "prepacked" in row.operand or row.operand in ("mxfp8", "mxfp4", "mxfp8_mxfp4"):
            swapped = f"_{row.operand}" + "_fast" * row.fast_accum
        want = f"sm{row.arch}_{row.mode}_{tile}_c{cluster}{swapped}_{row.epilogue}_{short[row.out_dtype]}"
        assert row.name == want
        assert row.operand in (
            "nvfp4",
            "mxfp8",
            "mxfp4",
            "mxfp8_mxfp4",
            "fp16",
            "prepacked",
            "prepacked_bf16",
            "prepacked_fp8",
        )
        assert row.operand == "prepacked_fp8" or not row.fast_accum
        assert row.mode in ("dense", "grouped")
        assert row.epilogue in ("rowcol", "gated")


def test_architectures_are_those_of_the_kernels() -> None:
    """Each says which devices its kernels serve, as the C interface does."""
    rows = kernel_table.architectures()
    assert [row.arch for row in rows] == sorted({kernel.arch for kernel in fp4gemm.kernels()})
    for row in rows:
        assert row.devices
        for device in row.devices:
            major, minor = map(int, device.split("."))
            assert _native.core().fp4gemm_kernel_arch(10 * major + minor) == row.arch
    assert _native.core().fp4gemm_kernel_arch(75) == -1
    assert _native.core().fp4gemm_architecture_info(len(rows), _structs.ArchitectureInfo()) != 0


def test_select_kernel_chooses_from_the_table() -> None:
    """Modes and types are those asked for; a batch-invariant choice looks at n and k alone."""
    archs = {row.arch for row in fp4gemm.kernels()}
    assert kernel_table.select_kernel(75, 40, 256, 256, 256) is None
    for arch in archs:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for groups, mode in ((0, "dense"), (8, "grouped")):
                for ragged in ("m", "k"):
                    row = kernel_table.select_kernel(arch, 132, 64, 512, 1024, groups, ragged, dtype)
                    assert row is not None
                    assert (row.arch, row.mode, row.out_dtype) == (arch, mode, dtype)
            chosen = {
                kernel_table.select_kernel(arch, 132, m, 512, 1024, 0, out_dtype=dtype, batch_invariant=True)
                for m in (1, 17, 300, 5000)
            }
            assert len(chosen) == 1
            gated = kernel_table.select_kernel(arch, 132, 64, 512, 1024, out_dtype=dtype, activation="swiglu")
            assert (gated is None) == (dtype is torch.float32)
            assert gated is None or gated.epilogue == "gated"
    with pytest.raises(ValueError, match=r"^ragged: got 'rows', must be 'm' or 'k'"):
        kernel_table.select_kernel(90, 132, 64, 64, 64, 2, "rows")
    with pytest.raises(TypeError, match=r"^out_dtype: dtype is torch.int8"):
        kernel_table.select_kernel(90, 132, 64, 64, 64, out_dtype=torch.int8)
    for name in ("format_a", "format_b"):
        with pytest.raises(ValueError, match=rf"^{name}: got 'fp4', must be 'nvfp4', 'fp16', 'bf16', "):
            kernel_table.select_kernel(90, 132, 64, 64, 64, **{name: "fp4"})


def test_the_selection_does_not_depend_on_earlier_ones() -> None:
    """The library remembers some selections; more problems than that get the same kernels in any order."""
    problems: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((arch, sms, m, n, k, groups), {"format_a": form, "format_b": "prepacked" if arch == 90 else "nvfp4"})
        for arch, form in ((90, "fp16"), (90, "nvfp4"), (100, "nvfp4"), (121, "nvfp4"), (80, "nvfp4"))
        for sms in (132, 78)
        for m in (1, 65, 2049)
        for n in (64, 4096)
        for k in (128, 8192)
        for groups in (0, 3)
    ]

    def ask(call: tuple[tuple[int, ...], dict[str, Any]]) -> KernelInfo | None:
        return kernel_table.select_kernel(*call[0], **call[1])

    forwards = [ask(call) for call in problems]
    assert [ask(call) for call in reversed(problems)][::-1] == forwards
    assert [ask(call) for call in problems for _ in range(2)][::2] == forwards
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, problems)) == forwards


def test_selected_kernels_support_the_formats() -> None:
    """Every device supports NVFP4, MXFP8, MXFP4, and MXFP8 beside MXFP4.

    Others of Hopper's formats need kernels for them.
    """
    archs = {row.arch for row in fp4gemm.kernels()}
    formats_of_hopper = [
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4"),
        ("mxfp8", "mxfp4"),
        ("fp16", "fp16"),
        ("fp16", "nvfp4"),
        ("nvfp4", "fp16"),
        ("nvfp4", "prepacked"),
        ("fp16", "prepacked"),
        ("bf16", "nvfp4"),
        ("bf16", "prepacked"),
    ]
    of_sm120 = [formats for formats in formats_of_hopper if formats[1] != "fp16"]
    supported = {90: formats_of_hopper, 120: of_sm120}
    for arch in archs:
        for formats in formats_of_hopper:
            for groups in (0, 4):
                options = {"format_a": formats[0], "format_b": formats[1]}
                row = kernel_table.select_kernel(arch, 132, 64, 512, 1024, groups, **options)
                wanted = formats in supported.get(arch, formats_of_hopper[:4])
                assert (row is not None) == wanted, (arch, formats)
                assert row is None or row.supports(*formats), (row, formats)
    assert all(kernel_table.select_kernel(arch, 132, 64, 64, 64, format_b="bf16") is None for arch in archs)


@pytest.mark.skipif(all(row.arch != 120 for row in fp4gemm.kernels()), reason="built without SM120 kernels")
def test_sm120_selects_prepacked_kernels_for_few_tokens() -> None:
    """Tiles grow with the tokens. FP4 tensor cores multiply many quantized tokens by codes and scales."""

    def selected(m: int, a: Any, b: Any) -> KernelInfo:
        row = kernel_table.select_kernel(120, 170, m, 4096, 4096, format_a=a, format_b=b)
        assert row is not None
        return row

    for a, operand in (("fp16", "prepacked"), ("nvfp4", "prepacked"), ("bf16", "prepacked_bf16")):
        rows = [selected(m, a, "prepacked") for m in (1, 8, 128, 4096)]
        assert [row.tile[0] <= 16 for row in rows] == [True, True, False, False]
        assert {row.operand for row in rows} == {operand}
    assert selected(4096, "nvfp4", "nvfp4").operand == "nvfp4"
    assert selected(8, "nvfp4", "nvfp4").operand == "nvfp4"


@pytest.mark.skipif(
    all(row.operand != "mxfp8_mxfp4" for row in fp4gemm.kernels()), reason="built without such kernels"
)
@pytest.mark.parametrize(("k", "operand"), [(2816, "mxfp8_mxfp4"), (2880, "mxfp8")])
def test_codes_that_tma_does_not_unpack_are_expanded(k: int, operand: str) -> None:
    """Kernels of MXFP8 beside MXFP4 need a k that is a multiple of 128; else those of MXFP8 are chosen."""
    for arch in {row.arch for row in fp4gemm.kernels() if row.operand == operand}:
        for groups in (0, 4):
            formats: dict[str, Any] = {"format_a": "mxfp8", "format_b": "mxfp4"}
            row = kernel_table.select_kernel(arch, 132, 64, 512, k, groups, **formats)
            assert row is not None
            assert row.operand == operand


@pytest.mark.skipif(all(row.arch != 90 for row in fp4gemm.kernels()), reason="built without SM90 kernels")
def test_sm90_selects_tiles_for_experts_with_fp8_tokens() -> None:
    """The tiles for 128 experts (2048, 768) with 4 to 64 tokens on average are those that were fastest."""
    tiles = []
    for tokens in (4, 16, 64):
        row = kernel_table.select_kernel(
            90, 132, 128 * tokens, 2048, 768, 128, format_a="e4m3", format_b="prepacked_fp8"
        )
        assert row is not None
        assert row.operand == "prepacked_fp8"
        tiles.append(row.tile)
    assert tiles == [(32, 64, 128), (32, 64, 128), (96, 128, 128)]


@pytest.mark.parametrize(
    ("operand", "supported"),
    [
        ("nvfp4", {"nvfp4 nvfp4"}),
        ("mxfp8", {"mxfp8 mxfp8", "mxfp8 mxfp4"}),
        ("mxfp4", {"mxfp4 mxfp4"}),
        ("mxfp8_mxfp4", {"mxfp8 mxfp4"}),
        (
            "fp16",
            {
                *("nvfp4 nvfp4", "nvfp4 fp16", "fp16 nvfp4", "fp16 fp16"),
                *("mxfp8 mxfp8", "mxfp4 mxfp4", "mxfp8 mxfp4"),
            },
        ),
        ("prepacked", {"nvfp4 nvfp4", "nvfp4 prepacked", "fp16 nvfp4", "fp16 prepacked"}),
        ("prepacked_bf16", {"bf16 nvfp4", "bf16 prepacked"}),
        ("prepacked_fp8", {"e4m3 nvfp4", "e4m3 prepacked_fp8"}),
    ],
)
def test_what_a_kernel_supports(operand: str, supported: set[str]) -> None:
    row = KernelInfo("x", "dense", "rowcol", 90, (64, 64, 64), (1, 1), torch.bfloat16, operand, False)
    pairs = {f"{a} {b}" for a, b in PAIRS if row.supports(a, b)}
    assert pairs == supported
    columns = {f"{a} {b}" for a, b in PAIRS if row.supports(a, b, "k")}
    assert columns == (set() if operand.startswith("prepacked") else supported)


def test_kernel_index_out_of_range() -> None:
    row = _structs.KernelInfo()
    assert _native.core().fp4gemm_kernel_info(-1, row) != 0
    assert _native.core().fp4gemm_kernel_info(_native.core().fp4gemm_kernel_count(), row) != 0


def test_kernels_returns_a_fresh_list() -> None:
    fp4gemm.kernels().append(None)  # type: ignore[arg-type]
    assert None not in fp4gemm.kernels()
