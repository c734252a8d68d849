"""The types of the public functions, as mypy sees them in a user's code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import fp4gemm
import pytest

# Lines that mypy must refuse, and the word that its complaint has.
WRONG = {
    'fp4gemm.quantize(x, scaling="rows")': "scaling",
    'fp4gemm.quantize(x, encode="per_token")': "encode",
    "fp4gemm.quantize(x, axis=1)": "axis",
    'fp4gemm.quantize(x, four_over_six="mean")': "four_over_six",
    'fp4gemm.quantize(x, four_over_six_error="slow")': "four_over_six_error",
    'fp4gemm.quantize(x, hadamard="fp16")': "hadamard",
    "fp4gemm.quantize(x, e4m3_max=240)": "e4m3_max",
    "fp4gemm.quantize(x, scale=1)": "scale",
    'fp4gemm.quantize_both(x, scaling="rows")': "scaling",
    'fp4gemm.mm(t, t, activation="tanh")': "activation",
    'fp4gemm.grouped_mm(t, t, activation="tanh")': "activation",
    'fp4gemm.scaled_mm(x, x, x, x, activation="tanh")': "activation",
    'fp4gemm.wgrad(t, t, activation="tanh")': "activation",
    "fp4gemm.mm(t, t, biass=x)": "biass",
    "fp4gemm.mm(t, t, epilogue=1)": "epilogue",
    'fp4gemm.nn.Linear(32, 8, weight_scaling="rows")': "weight_scaling",
}
RIGHT = """
a: fp4gemm.NVFP4Tensor = fp4gemm.quantize(x, scaling="tensor", hadamard="bf16", offs=x)
b: fp4gemm.DecodedTensor = fp4gemm.quantize(x, decoded=True)
c: tuple[fp4gemm.NVFP4Tensor, fp4gemm.NVFP4Tensor] = fp4gemm.quantize_both(x, block=(16, 16))
d: torch.Tensor = fp4gemm.mm(t, t, activation="silu", bias=x, out_dtype=torch.float16)
e: torch.Tensor = fp4gemm.grouped_mm(t, t, x, beta=2, c=x)
f: torch.Tensor = fp4gemm.wgrad(t, t, c=x, out=x, batch_invariant=True)
g: torch.Size = t.size()
h: int = t.size(0)
i: fp4gemm.FP8Tensor = fp4gemm.quantize_fp8(x, offs=x)
j: fp4gemm.FP8Tensor = fp4gemm.rms_norm_quantize_fp8(x, x)
k: tuple[fp4gemm.FP8Tensor, torch.Tensor] = fp4gemm.rms_norm_quantize_fp8(x, residual=x)
@fp4gemm.epilogue
def scaled(acc: fp4gemm.epilogues.Value, x: fp4gemm.epilogues.Row, *, s: float) -> fp4gemm.epilogues.Value:
    return fp4gemm.epilogues.where(acc > 0, 2.0 * acc * x + s, -acc)
m: torch.Tensor = fp4gemm.mm(t, t, epilogue=scaled(x=x, s=1.0))
"""


def test_keywords_of_strings_are_literals(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    head = "import fp4gemm\nimport torch\n\nx = torch.ones(32, 32)\nt = fp4gemm.quantize(x)\n"
    (tmp_path / "code.py").write_text(head + RIGHT.strip() + "\n" + "\n".join(WRONG) + "\n")
    root = Path(fp4gemm.__file__).parents[1]
    environment = dict(os.environ)
    if root.name != "site-packages":  # mypy finds an installed package itself, and refuses to be told
        environment["MYPYPATH"] = str(root)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path),
        "code.py",
    ]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    refused = {}
    for line in run.stdout.splitlines():
        if line.startswith("code.py:"):
            place, text = line.removeprefix("code.py:").split(":", 1)
            refused[int(place)] = refused.get(int(place), "") + text
    first = len((head + RIGHT.strip()).splitlines()) + 1
    assert min(refused) >= first, refused[min(refused)]
    for number, (code, word) in enumerate(WRONG.items(), first):
        assert number in refused, f"accepted: {code}"
        assert word in refused[number], refused[number]
