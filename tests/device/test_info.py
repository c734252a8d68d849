"""What the package says about itself: kernels, support, the report and the folders of the C++ package."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import _native, kernel_table, support
from fp4gemm.commands import COMMANDS, main
from fp4gemm.device import report
from fp4gemm.kernel_table import KernelInfo
from fp4gemm.support import Support

PAIRS = list(itertools.product(kernel_table.FORMATS, repeat=2))


def run_module(*options: str) -> str:
    command = [sys.executable, "-m", "fp4gemm", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_version_is_that_of_the_library() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", fp4gemm.__version__)
    major, minor, patch = (int(part) for part in fp4gemm.__version__.split("."))
    assert _native.core().fp4gemm_version() == 10000 * major + 100 * minor + patch


def test_everything_public_is_there() -> None:
    for name in fp4gemm.__all__:
        assert getattr(fp4gemm, name) is not None, name
    with pytest.raises(AttributeError, match="module 'fp4gemm' has no attribute 'nothing'"):
        fp4gemm.nothing  # noqa: B018


def test_kernels_describe_themselves() -> None:
    """Names are mechanical, so each must agree with the fields beside it."""
    rows = fp4gemm.kernels()
    assert len(rows) == _native.core().fp4gemm_kernel_count()
    assert len({row.name for row in rows}) == len(rows)
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for row in rows:
        tile, cluster = "x".join(map(str, row.tile)), "x".join(map(str, row.cluster))
        swapped = "_swapped" if row.is_swapped else ""
        if "prepacked" in row.operand:
            swapped = f"_{row.operand}"
        want = f"sm{row.arch}_{row.mode}_{tile}_c{cluster}{swapped}_{row.epilogue}_{short[row.out_dtype]}"
        assert row.name == want
        assert row.operand in ("nvfp4", "fp16", "prepacked", "prepacked_bf16")
        assert row.mode in ("dense", "grouped")
        assert row.epilogue in ("rowcol", "swiglu")


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
    assert _native.core().fp4gemm_architecture_info(len(rows), _native.CArchitectureInfo()) != 0


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
            assert gated is None or gated.epilogue == "swiglu"
    with pytest.raises(ValueError, match=r"^ragged: got 'rows', must be 'm' or 'k'"):
        kernel_table.select_kernel(90, 132, 64, 64, 64, 2, "rows")
    with pytest.raises(TypeError, match=r"^out_dtype: dtype is torch.int8"):
        kernel_table.select_kernel(90, 132, 64, 64, 64, out_dtype=torch.int8)
    for name in ("format_a", "format_b"):
        with pytest.raises(ValueError, match=rf"^{name}: got 'fp4', must be 'nvfp4', 'fp16', 'bf16' or"):
            kernel_table.select_kernel(90, 132, 64, 64, 64, **{name: "fp4"})


def test_selected_kernels_support_the_formats() -> None:
    """Devices without FP4 tensor cores support every format of mm; the others codes and scales only."""
    archs = {row.arch for row in fp4gemm.kernels()}
    has_fp4 = {
        arch: all(row.operand == "nvfp4" for row in fp4gemm.kernels() if row.arch == arch) for arch in archs
    }
    supported = [
        ("nvfp4", "nvfp4"),
        ("fp16", "fp16"),
        ("fp16", "nvfp4"),
        ("nvfp4", "fp16"),
        ("nvfp4", "prepacked"),
    ]
    supported += [("fp16", "prepacked"), ("bf16", "nvfp4"), ("bf16", "prepacked")]
    for arch in archs:
        for formats in supported:
            for groups in (0, 4):
                options = {"format_a": formats[0], "format_b": formats[1]}
                row = kernel_table.select_kernel(arch, 132, 64, 512, 1024, groups, **options)
                assert (row is not None) == (not has_fp4[arch] or formats == supported[0]), (arch, formats)
                assert row is None or row.supports(*formats), (row, formats)
    assert all(kernel_table.select_kernel(arch, 132, 64, 64, 64, format_b="bf16") is None for arch in archs)


@pytest.mark.parametrize(
    ("operand", "supported"),
    [
        ("nvfp4", {"nvfp4 nvfp4"}),
        ("fp16", {"nvfp4 nvfp4", "nvfp4 fp16", "fp16 nvfp4", "fp16 fp16"}),
        ("prepacked", {"nvfp4 nvfp4", "nvfp4 prepacked", "fp16 nvfp4", "fp16 prepacked"}),
        ("prepacked_bf16", {"bf16 nvfp4", "bf16 prepacked"}),
    ],
)
def test_what_a_kernel_supports(operand: str, supported: set[str]) -> None:
    row = KernelInfo("x", "dense", "rowcol", 90, (64, 64, 64), (1, 1), torch.bfloat16, operand, False)
    pairs = {f"{a} {b}" for a, b in PAIRS if row.supports(a, b)}
    assert pairs == supported
    columns = {f"{a} {b}" for a, b in PAIRS if row.supports(a, b, "k")}
    assert columns == (set() if operand.startswith("prepacked") else supported)


def test_kernel_index_out_of_range() -> None:
    row = _native.CKernelInfo()
    assert _native.core().fp4gemm_kernel_info(-1, row) != 0
    assert _native.core().fp4gemm_kernel_info(_native.core().fp4gemm_kernel_count(), row) != 0


def test_kernels_returns_a_fresh_list() -> None:
    fp4gemm.kernels().append(None)  # type: ignore[arg-type]
    assert None not in fp4gemm.kernels()


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


def test_report_as_json() -> None:
    data = json.loads(run_module("report", "--json"))
    assert data["fp4gemm"] == fp4gemm.__version__
    assert data["torch"] == torch.__version__
    assert data["devices"][0] == {
        "device": "cpu",
        "supported": True,
        "reason": fp4gemm.is_supported("cpu").reason,
    }
    assert any(entry["device"].startswith("cuda") for entry in data["devices"])
    want = [
        {**dataclasses.asdict(row), "out_dtype": str(row.out_dtype).split(".")[1]}
        for row in fp4gemm.kernels()
    ]
    assert data["kernels"] == json.loads(json.dumps(want))


def test_report_as_text() -> None:
    text = run_module()
    assert text.startswith(f"fp4gemm {fp4gemm.__version__}\n")
    assert torch.__version__ in text
    assert f"kernels ({len(fp4gemm.kernels())})" in text
    for row in fp4gemm.kernels():
        assert row.name in text
    if not torch.cuda.is_available():
        assert "no   cuda: torch sees no CUDA device" in text


def test_table_of_kernels_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["kernels", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [
        row.name for row in fp4gemm.kernels()
    ]
    monkeypatch.setattr(kernel_table, "kernels", list)
    assert main(["kernels", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_table_of_kernels() -> None:
    text = run_module("kernels")
    rows = fp4gemm.kernels()
    assert len(text.splitlines()) == max(1, len(rows))
    for row, line in zip(rows, text.splitlines(), strict=False):
        assert line.split()[:2] == [row.name, row.mode]
    if not rows:
        assert text == "none: this build has no CUDA kernels, so every call runs the CPU reference\n"


def test_report_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "kernels", list)
    assert "kernels (0)\n  none: this build has no CUDA kernels" in report.report_text()


def test_folders_of_the_cpp_package(capsys: pytest.CaptureFixture[str]) -> None:
    package = Path(fp4gemm.__file__).resolve().parent
    assert run_module("include-dir") == f"{package / 'include'}\n"
    assert main(["cmake-dir"]) == 0
    assert capsys.readouterr().out == f"{package / 'lib' / 'cmake' / 'fp4gemm'}\n"
    assert main(["include-dir"]) == 0
    assert capsys.readouterr().out == f"{package / 'include'}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernels --force", "unrecognized arguments: --force"),
        ("--json", "unrecognized arguments: --json"),
        ("nothing", "invalid choice: 'nothing'"),
        ("selftest --device meta", "device: got 'meta', must be the CPU or a CUDA device"),
    ],
)
def test_bad_command_lines(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_command_is_in_the_help() -> None:
    text = run_module("--help")
    for name, command in COMMANDS.items():
        assert re.search(rf"^    {name}\b", text, re.MULTILINE)
        assert command.SUMMARY.split()[0] in text


def test_missing_library_says_what_to_do(tmp_path: Path) -> None:
    code = "import fp4gemm"
    import os

    environment = {**os.environ, "FP4GEMM_LIBRARY_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert (
        f"ImportError: fp4gemm: libfp4gemm_torch.so is not in {tmp_path}; install the package" in done.stderr
    )
    (tmp_path / "libfp4gemm_torch.so").write_bytes(b"not a library")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert f"ImportError: fp4gemm: cannot load {tmp_path / 'libfp4gemm_torch.so'} under torch" in done.stderr
