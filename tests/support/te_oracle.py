"""TransformerEngine's own NVFP4 reference, read from its wheel at run time and executed against stub modules.

The repository holds nothing of TransformerEngine: the pure-Python wheel comes from PyPI (1.2 MB, without
dependencies), one file of it is executed, and stubs replace the modules that it imports. CUDA is not needed.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import hashlib
import importlib
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
    """The wheel is not available; the text says why."""


def wheel(cache: Path) -> Path:
    """The wheel that FP4GEMM_TE_WHEEL names, else one downloaded to ``cache``; its hash is checked."""
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
    """Replaces the base class, with the attributes that the reference reads."""

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


def run(source: str, name: str) -> types.ModuleType:
    """The module of a source."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look up their module by name
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


class Oracle:
    """The executed reference: quantization in each of its modes, its products, and its rotation alone."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            source = archive.read(FOLDER + REFERENCE).decode()
            utilities = archive.read(f"{FOLDER}{UTILITIES}.py").decode()
        self._utilities = run(utilities, "_te_reference_utils")
        modules: dict[str, types.ModuleType] = {}
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "transformer_engine"
            ):
                continue
            parts = str(node.module).split(".")
            for i in range(1, len(parts) + 1):
                package = modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
                package.__path__ = []  # makes the module a package
            for alias in node.names:
                stub = self._utilities if alias.name == UTILITIES else _stub(alias.name)
                setattr(modules[str(node.module)], alias.name, stub)
        with _installed(modules):
            self._module = run(source, "_te_reference_nvfp4")

    def _quantizer(self, *, columnwise: bool, rotate: bool, signs: bool, **options: Any) -> Any:
        return self._module.NVFP4QuantizerRef(
            dtype=self._utilities.Fp4Formats.E2M1,
            rowwise=True,  # row scaling needs it even if only the columns are quantized
            columnwise=columnwise,
            pow_2_scales=False,
            eps=0.0,
            with_rht=rotate,
            with_random_sign_mask=signs,
            **options,
        )

    def quantize(
        self,
        x: torch.Tensor,
        *,
        scaling: str = "row",
        axis: int = -1,
        block: tuple[int, int] = (1, 16),
        four_over_six: str | None = None,
        four_over_six_error: str = "exact",
        e4m3_max: int | None = None,
        hadamard: str | None = None,
        hadamard_signs: int = 0xD7E8,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (m, k/2), scale bytes (m, k/16) and amax, (1,) or (m,), of a CPU tensor or its transpose.

        The options are those of fp4gemm.quantize. A rotation requires axis 0; its result has the dtype of x.
        """
        if hadamard_signs not in (0, 0xD7E8) or (hadamard is not None and axis != 0):
            raise ValueError("TransformerEngine has no such rotation")
        result = self._quantizer(
            columnwise=axis == 0,
            rotate=hadamard is not None,
            signs=hadamard_signs != 0,
            quant_tile_shape=block,
            row_scaled_nvfp4=scaling == "row",
            nvfp4_use_4over6=four_over_six is not None,
            nvfp4_e4m3_max=e4m3_max or (256 if four_over_six else 448),
            nvfp4_4over6_err_mode=(four_over_six or "mae").upper(),
            nvfp4_4over6_err_use_fast_math=four_over_six_error == "fast",
        ).quantize(x)
        if axis == 0:
            rows, k = x.shape[1], x.shape[0]
            data, scale, amax = result.data_t, result.scale_t, result.global_amax_col
        else:
            rows, k = x.shape
            data, scale, amax = result.data, result.scale, result.global_amax_row
        scales = scale[:rows, : k // 16].contiguous().view(torch.uint8)
        return data, scales, amax.to(torch.float32).reshape(-1)

    def both(self, x: torch.Tensor, *, rotate: bool = False, **options: Any) -> Any:
        """Its result for the rows of x and for the rows of x.T, which ``rotate`` rotates before the cast.

        The options are scaling, block and four_over_six of :meth:`quantize`.
        """
        return self._quantizer(
            columnwise=True,
            rotate=rotate,
            signs=True,
            quant_tile_shape=options.get("block", (1, 16)),
            row_scaled_nvfp4=options["scaling"] == "row",
            nvfp4_use_4over6=options.get("four_over_six") is not None,
            nvfp4_e4m3_max=256 if options.get("four_over_six") else 448,
            nvfp4_4over6_err_mode=(options.get("four_over_six") or "mae").upper(),
        ).quantize(x)

    def multiply(self, product: str, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        """D of two results of :meth:`both`, by qgemm: product is "FPROP", "DGRAD" or "WGRAD"."""
        quantizer = self._quantizer(columnwise=True, rotate=False, signs=True, quant_tile_shape=(1, 16))
        left = (a.data_t, a.scale_t) if product == "WGRAD" else (a.data, a.scale)
        right = (b.data, b.scale) if product == "FPROP" else (b.data_t, b.scale_t)
        made: torch.Tensor = quantizer.qgemm(
            left[0],
            right[0],
            None,
            dtype,
            left[1],
            right[1],
            gemm_type=self._module.gemm.GEMMType[product],
            qresult_x=a,
            qresult_w=b,
        )
        return made

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x with each 16 values of a row rotated with the default signs, in the dtype of x."""
        quantizer = self._quantizer(columnwise=False, rotate=True, signs=True, quant_tile_shape=(1, 16))
        return quantizer._apply_rht(x)


# ---- its tensor class

_COMPILED = "transformer_engine_torch"
_PACKAGES = ("common", "pytorch", "pytorch.tensor", "pytorch.tensor.storage")


class _Numbers(type):
    """Classes of the compiled module whose members are read as numbers."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


@contextlib.contextmanager
def tensor_module(path: Path) -> Iterator[types.ModuleType]:
    """``transformer_engine.pytorch.tensor.nvfp4_tensor`` of the wheel, with all Python that it imports.

    The compiled module is replaced, and the packages' own ``__init__`` are not executed: they look for it.
    Nothing that calls a kernel works.
    """
    compiled = types.ModuleType(_COMPILED)
    names = ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16"]
    names += ["kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"]
    compiled.DType = enum.IntEnum("DType", names)  # type: ignore[attr-defined]

    def member(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Numbers(name, (), {})

    compiled.__getattr__ = member  # type: ignore[method-assign]
    modules = {_COMPILED: compiled}
    for name in ("", *(f".{package}" for package in _PACKAGES)):
        package = types.ModuleType(f"transformer_engine{name}")
        package.__path__ = [f"{path}/transformer_engine{name.replace('.', '/')}"]
        modules[package.__name__] = package
    modules["transformer_engine.common"].decode_cudnn_version = (  # type: ignore[attr-defined]
        lambda version: (version, 0, 0)
    )
    before = set(sys.modules)
    with _installed(modules):
        try:
            yield importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
        finally:
            for name in set(sys.modules) - before - set(modules):
                if name.startswith("transformer_engine"):
                    del sys.modules[name]
