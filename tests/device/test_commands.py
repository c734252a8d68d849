"""The version, the public names, and the subcommands of python -m fp4gemm."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import _native, kernel_table
from fp4gemm.commands import COMMANDS, main
from fp4gemm.commands import selftest as selftest_command
from fp4gemm.device import report


def run_module(*options: str) -> str:
    """What a process prints. It imports torch for seconds, so most tests call main."""
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


def test_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fp4gemm"] == fp4gemm.__version__
    assert data["torch"] == torch.__version__
    assert data["devices"][0] == {
        "device": "cpu",
        "supported": True,
        "reason": fp4gemm.is_supported("cpu").reason,
        "executed": True,
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
    rows = fp4gemm.kernels()
    assert f"kernels ({len(rows)})" in text
    for arch in {row.arch for row in rows}:
        line = next(line for line in text.splitlines() if line.startswith(f"  sm_{arch} "))
        for mode in ("dense", "grouped"):
            assert f"{sum((row.arch, row.mode) == (arch, mode) for row in rows)} {mode}" in line
    assert len(text.splitlines()) < 40, "the report fits on a screen"
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


def test_table_of_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    text = capsys.readouterr().out
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


def test_a_command_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["doctor"], "run", stop)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "fp4gemm doctor: stopped\n"


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
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


def test_a_device_without_kernels_has_nothing_to_test(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: object, *, force: bool) -> None:
        raise NotImplementedError("no GEMM kernel for cuda:0")

    monkeypatch.setattr(selftest_command, "self_test", refuse)
    assert main(["selftest"]) == 1
    assert capsys.readouterr().err == "nothing to test: no GEMM kernel for cuda:0\n"
