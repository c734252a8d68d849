"""TransformerEngine's own NVFP4 reference, read from its wheel at run time and executed against stub modules.

Nothing of TransformerEngine is kept here: the pure-Python wheel comes from PyPI (1.2 MB, no dependencies),
one file of it is executed, and its imports of the rest are answered by stubs. No CUDA is needed.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import hashlib
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VERSION = "2.20.2"
SHA256 = "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094"
FOLDER = "transformer_engine/pytorch/custom_recipes/"
REFERENCE = "reference_nvfp4.py"
UTILITIES = "reference_utils"
ENVIRONMENT = "FP4GEMM_TE_WHEEL"


class Unavailable(Exception):
    """The wheel cannot be had; the text says why."""


def wheel(cache: Path) -> Path:
    """The wheel that FP4GEMM_TE_WHEEL names, else one downloaded into ``cache`` once; its hash is checked."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        if not Path(named).is_file():
            raise Unavailable(f"{ENVIRONMENT}: {named} is not a file")
        return Path(named)
    path = cache / f"transformer_engine-{VERSION}-py3-none-any.whl"
    if not path.is_file():
        requirement = f"transformer-engine=={VERSION}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(cache),
        ]
        try:
            done = subprocess.run(
                [*command, requirement], capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"pip download {requirement}: no answer in 300 s") from None
        if done.returncode != 0 or not path.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unavailable(f"pip download {requirement} failed: {last}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise Unavailable(f"{path.name}: sha256 is {digest}, must be {SHA256}")
    return path


class _Quantizer:
    """Stands in for the base class: only what the reference reads."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True, **_: Any) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False


def _stub(name: str) -> Any:
    if name == "Quantizer":
        return _Quantizer
    if name == "gemm":
        module = types.ModuleType(name)
        module.GEMMType = enum.Enum("GEMMType", ["FPROP", "DGRAD", "WGRAD"])  # type: ignore[attr-defined]
        module.MMParams = type("MMParams", (), {})  # type: ignore[attr-defined]
        return module
    return type(name, (), {})


@contextlib.contextmanager
def _installed(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _run(source: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up by name
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


class Oracle:
    """The executed reference; ``quantize`` is all that the tests need of it."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            source = archive.read(FOLDER + REFERENCE).decode()
            utilities = archive.read(f"{FOLDER}{UTILITIES}.py").decode()
        self._utilities = _run(utilities, "_te_reference_utils")
        modules: dict[str, types.ModuleType] = {}
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "transformer_engine"
            ):
                continue
            parts = str(node.module).split(".")
            for i in range(1, len(parts) + 1):
                package = modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
                package.__path__ = []  # marks a package
            for alias in node.names:
                stub = self._utilities if alias.name == UTILITIES else _stub(alias.name)
                setattr(modules[str(node.module)], alias.name, stub)
        with _installed(modules):
            self._module = _run(source, "_te_reference_nvfp4")

    def quantize(self, x: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(packed codes (m, k/2), scale bytes (m, k/16), amax (1,) or (m,)) of a CPU tensor (m, k)."""
        quantizer = self._module.NVFP4QuantizerRef(
            dtype=self._utilities.Fp4Formats.E2M1,
            rowwise=True,
            columnwise=False,
            pow_2_scales=False,
            eps=0.0,
            quant_tile_shape=(1, 16),
            with_rht=False,
            row_scaled_nvfp4=per_row,
        )
        result = quantizer.quantize(x)
        m, k = x.shape
        scales = result.scale[:m, : k // 16].contiguous().view(torch.uint8)
        return result.data, scales, result.global_amax_row.to(torch.float32).reshape(-1)
