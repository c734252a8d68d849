"""Selection rules of a file: which calls they fit, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fp4gemm
import pytest
import torch
from fp4gemm import _products, kernel_table, selection
from fp4gemm.kernel_table import KernelInfo

KERNEL = "sm90_dense_128x128x64_c2x1_rowcol_bf16"
GATED = "sm90_dense_64x128x64_c1x1_gated_bf16"
FAST = "sm90_dense_256x128x128_c2x1_prepacked_fp8_fast_rowcol_bf16"


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    yield
    selection.clear()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels, whatever was built."""
    row = KernelInfo(KERNEL, "dense", "rowcol", 90, (128, 128, 64), (2, 1), torch.bfloat16, "fp16", False)
    gated = KernelInfo(GATED, "dense", "gated", 90, (64, 128, 64), (1, 1), torch.bfloat16, "fp16", False)
    fast = KernelInfo(
        FAST, "dense", "rowcol", 90, (256, 128, 128), (2, 1), torch.bfloat16, "prepacked_fp8", False, True
    )
    found = {KERNEL: row, GATED: gated, FAST: fast}
    monkeypatch.setattr(kernel_table, "kernel_by_name", found.get)
    monkeypatch.setattr(kernel_table, "kernel_arch", lambda index: 90)


def write(path: Path, rules: object) -> Path:
    path.write_text(json.dumps(rules))
    return path


def find(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, **kwargs: object) -> str | None:
    a = SimpleNamespace(is_cuda=True, shape=(m, k), get_device=lambda: 0)
    options = {"gated": False, "formats": ("nvfp4", "nvfp4"), **kwargs}
    return selection.find(a, n, k, dtype, "dense", **options)  # type: ignore[arg-type]


def test_the_first_rule_that_fits_names_the_kernel(table: None, tmp_path: Path) -> None:
    rules = [
        {"kernel": KERNEL, "n": 64, "k": 128, "m": [5, 10]},
        {"kernel": "of another build"},
        {"kernel": GATED},
    ]
    assert selection.load(write(tmp_path / "rules.json", rules)) == 2
    assert [find(m, 64, 128) for m in (4, 5, 10, 11)] == [None, KERNEL, KERNEL, None]
    assert find(5, 72, 128) is None
    assert find(5, 64, 256) is None
    assert find(5, 64, 128, torch.float32) is None
    assert find(5, 64, 128, gated=True) == GATED
    assert find(5, 64, 128, formats=("fp16", "fp16")) == KERNEL
    for formats in (("nvfp4", "prepacked"), ("bf16", "nvfp4")):
        assert find(5, 64, 128, formats=formats) is None
    selection.clear()
    assert find(5, 64, 128) is None


def test_kernels_that_do_not_promote_serve_use_fast_accum_alone(table: None, tmp_path: Path) -> None:
    selection.load(write(tmp_path / "rules.json", [{"kernel": FAST}]))
    formats = ("e4m3", "prepacked_fp8")
    assert find(5, 64, 128, formats=formats) is None
    assert find(5, 64, 128, formats=formats, use_fast_accum=True) == FAST


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "holds a dict, must hold a list"),
        ([3], "rule 0: is 3, must be an object"),
        ([{"n": 3}], "rule 0: is .*, must be an object that names a kernel"),
        ([{"kernel": "x", "tile": 3}], "has 'tile', must have"),
        ([{"kernel": "x", "n": -1}], "n is -1, must be a size"),
        ([{"kernel": "x", "m": [5, 2]}], r"m is \[5, 2\], must be a list of the least and the most rows"),
        ([{"kernel": "x", "m": 5}], "m is 5, must be a list"),
        ([{"kernel": "x", "operands": ["fp16"]}], r"operands is \['fp16'\], must be a list of two"),
        (
            [{"kernel": "x", "operands": ["fp16", "f8"]}],
            r"operands is \['fp16', 'f8'\], must be a list of two",
        ),
    ],
)
def test_bad_files_are_refused_and_change_nothing(
    table: None, tmp_path: Path, rules: object, message: str
) -> None:
    selection.load(write(tmp_path / "good.json", [{"kernel": KERNEL}]))
    with pytest.raises(ValueError, match=message):
        selection.load(write(tmp_path / "bad.json", rules))
    assert len(selection.RULES) == 1
    (tmp_path / "text.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        selection.load(tmp_path / "text.json")


def test_the_environment_names_a_file(tmp_path: Path) -> None:
    """The variable is read at import; an error names the variable, the file and what to do."""
    good, bad = write(tmp_path / "good.json", []), write(tmp_path / "bad.json", {})
    missing = tmp_path / "missing.json"
    for path, reason in (
        (good, None),
        (bad, "holds a dict, must hold a list of rules"),
        (missing, "No such file"),
    ):
        environment = {**os.environ, selection.VARIABLE: str(path)}
        run = subprocess.run(
            [sys.executable, "-c", "import fp4gemm"], env=environment, capture_output=True, text=True
        )
        if reason is None:
            assert run.returncode == 0, run.stderr
            continue
        last = run.stderr.splitlines()[-1]
        assert last.startswith(f"ValueError: FP4GEMM_SELECTION: got {str(path)!r}, must name a file of")
        assert "or be unset" in last
        assert reason in last


@pytest.mark.gpu
def test_a_rule_decides_a_call(cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets the kernel of the rule, of which the result is the same."""
    x, w = (torch.randn(rows, 256, device=cuda, dtype=torch.bfloat16) for rows in (40, 64))
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(w)
    family = kernel_table.kernel_arch(cuda.index)
    chosen = kernel_table.select_kernel(family, 132, 40, 64, 256)
    kernel = next(
        k.name
        for k in fp4gemm.kernels()
        if (k.arch, k.mode, k.epilogue, k.out_dtype) == (family, "dense", "rowcol", torch.bfloat16)
        and k != chosen
    )
    want = fp4gemm.mm(a, b)
    seen = []
    plain = _products._GEMM
    monkeypatch.setattr(_products, "_GEMM", lambda *args: seen.append(args) or plain(*args))
    selection.load(write(tmp_path / "rules.json", [{"kernel": kernel, "n": 64, "k": 256}]))
    assert torch.equal(fp4gemm.mm(a, b), want)
    assert [kernel in args for args in seen] == [True]
