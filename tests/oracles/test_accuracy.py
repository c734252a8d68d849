"""How much ModelOpt's and llm-compressor's best methods lose on SmolLM2, beside ours: make test-oracles.

``python -m bench accuracy --producers`` measures; docs/accuracy.md says which of them ran.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import modelopt_parts, without_unused_imports

from bench import __main__ as command_line
from bench.baselines import modelopt
from bench.report import accuracy as report

for package in ("modelopt", "llmcompressor"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-oracles", allow_module_level=True)

OURS = "smooth + GPTQ"


@pytest.mark.skipif(torch.cuda.is_available(), reason="ModelOpt's own kernels run on a GPU")
def test_what_replaces_modelopts_kernels() -> None:
    """Bit for bit its NVFP4QTensor, whose numerics are in torch, and its GPTQ in torch."""
    without_unused_imports()
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    gen = torch.Generator().manual_seed(3)
    w = torch.randn(64, 128, generator=gen) * torch.exp(torch.randn(64, 128, generator=gen))
    codes, scales, outer = modelopt_parts(w)
    want = NVFP4QTensor(w.shape, torch.float32, codes).dequantize(
        torch.float32, scale=scales, double_scale=outer, block_sizes={-1: 16}
    )
    assert torch.equal(modelopt.dynamic(w, 16, w.abs().max()), want)
    blocks = w.view(-1, 16)
    amax = blocks.abs().amax(1)
    assert torch.equal(modelopt.static(blocks, amax, w.abs().max()).view_as(w), want)

    helpers: Any = importlib.import_module("modelopt.torch.quantization.utils.calib_utils")
    x = torch.randn(512, 128, generator=gen) @ torch.randn(128, 128, generator=gen)
    hessian = x.T @ x / 512 + 0.1 * torch.eye(128)
    h_inv = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    first, second = w.clone(), w.clone()

    def quantized(weight: torch.Tensor) -> torch.Tensor:
        return modelopt.static(weight.view(-1, 16), amax, w.abs().max()).view_as(weight)

    helpers.gptq_blockwise_update(first, h_inv, 32, quantized)
    modelopt.gptq_columns(second, amax.view(64, 8), float(outer), h_inv, 32, 16)
    assert torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def test_no_method_of_theirs_loses_less(tmp_path: Path) -> None:
    out = tmp_path / "smollm2-135m.jsonl"
    methods = f"^({re.escape(OURS)}|ModelOpt GPTQ|llm-compressor GPTQ)$"
    arguments = ["accuracy", "--model", "smollm2-135m", "--producers", "--methods", methods]
    arguments += ["--calibration", "2", "--evaluation", "4", "--out", str(out)]
    assert command_line.main(arguments) == 0
    rows = [row for row in report.load(out) if row["contender"] != "float"]
    gaps = {(row["contender"], row["activations"]): row["gap"] for row in rows}
    names = {name for name, _ in gaps}
    assert names == {OURS, "ModelOpt GPTQ", "llm-compressor GPTQ"}
    for kind in ("W4A16", "W4A4"):
        assert all(gaps[OURS, kind] <= gaps[name, kind] for name in names), (kind, gaps)
