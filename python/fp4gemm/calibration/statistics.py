"""Statistics of the inputs of linear layers and experts, by layer, and their file."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _checks

__all__ = ["InputStatistics", "Statistics", "StatisticsFile"]

FORMAT = "fp4gemm calibration 1"  # in the metadata of the file
PARTS = ("num_tokens", "mean_square", "second_moment", "quantization_error")
_DTYPES = {  # the dtypes of safetensors
    "I64": torch.int64, "I32": torch.int32, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
    "BF16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """The statistics of the input of a layer on calibration data: moments of its rows x.

    Attributes:
        num_tokens: int64 (), the rows that were seen; (g,) for g experts.
        mean_square: float32 (k,), the mean of x[j]^2 over the rows; (g, k) for experts. 0 without rows.
        second_moment: float32 (k, k), the mean of x[i] x[j]; (g, k, k) for experts. None if it was not asked
            for.
        quantization_error: float32 (k,), the mean of (x[j] - Q(x)[j])^2, with Q the cast of activations
            "per-token": NVFP4 with an amax for each row. None for experts, and if it was not asked for.

    Raises:
        TypeError, ValueError: a field is not a tensor of this dtype and shape; the text names it.
    """

    num_tokens: Tensor
    mean_square: Tensor
    second_moment: Tensor | None = None
    quantization_error: Tensor | None = None

    def __post_init__(self) -> None:
        count = _checks.is_tensor("num_tokens", self.num_tokens)
        _checks.has_dtype("num_tokens", count, (torch.int64,))
        square = _checks.is_tensor("mean_square", self.mean_square)
        _checks.has_dtype("mean_square", square, (torch.float32,))
        if square.dim() not in (1, 2):
            raise ValueError(f"mean_square: shape is {tuple(square.shape)}, must be (k,) or (g, k)")
        _checks.has_shape("num_tokens", count, tuple(square.shape[:-1]), " as of mean_square")
        if self.second_moment is not None:
            moment = _checks.is_tensor("second_moment", self.second_moment)
            _checks.has_dtype("second_moment", moment, (torch.float32,))
            wanted = (*square.shape, square.shape[-1])
            _checks.has_shape("second_moment", moment, wanted, " as of mean_square")
        if self.quantization_error is not None:
            error = _checks.is_tensor("quantization_error", self.quantization_error)
            _checks.has_dtype("quantization_error", error, (torch.float32,))
            _checks.has_shape("quantization_error", error, (self.k,))
            if square.dim() == 2:
                raise ValueError("quantization_error: is given for experts, must be None")

    @property
    def k(self) -> int:
        """Elements of an input row."""
        return self.mean_square.shape[-1]

    def to(self, device: torch.device | str) -> InputStatistics:
        """The statistics on a device."""
        more = (None if x is None else x.to(device) for x in (self.second_moment, self.quantization_error))
        return InputStatistics(self.num_tokens.to(device), self.mean_square.to(device), *more)


class Statistics(Mapping[str, InputStatistics]):
    """The statistics of the inputs of a model's layers, by the layers' qualified names.

    :func:`fp4gemm.calibrate` makes them. The two products of experts with 3-D weights have the names
    ``NAME.w13`` and ``NAME.w2``. A file holds them as safetensors, NAME.num_tokens and so on.

    Raises:
        TypeError: a key is not a str, or a value is not an InputStatistics.
    """

    def __init__(self, layers: Mapping[str, InputStatistics]) -> None:
        if not isinstance(layers, Mapping):
            raise TypeError(f"layers: got {_checks.describe(layers)}, must be a mapping")
        for name, value in layers.items():
            if not isinstance(name, str):
                raise TypeError(f"layers: a key is {_checks.describe(name)}, must be a str")
            if not isinstance(value, InputStatistics):
                raise TypeError(f"layers: {name!r} is {_checks.describe(value)}, must be InputStatistics")
        self._layers = dict(layers)

    def __getitem__(self, name: str) -> InputStatistics:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Statistics of {len(self)} layers, {'with' if self.has_moments else 'without'} second moments"

    @property
    def has_moments(self) -> bool:
        """Whether every layer has its second moment."""
        return bool(self._layers) and all(s.second_moment is not None for s in self._layers.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. The same statistics give the same bytes, and no incomplete file is left.

        Raises:
            ImportError: safetensors is not installed. OSError: the file cannot be written.
        """
        tensors = {}
        for name, layer in self._layers.items():
            for part in PARTS:
                value = getattr(layer, part)
                if value is not None:
                    tensors[f"{name}.{part}"] = value.detach().cpu().contiguous().clone()
        path = Path(path)
        temporary = path.with_name(path.name + ".part")
        _safetensors("save_file", "safetensors.torch")(tensors, temporary, metadata={"format": FORMAT})
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what :meth:`save` wrote, into CPU memory.

        Raises:
            ImportError: safetensors is not installed. OSError: the file cannot be read. ValueError: it is not
                such a file, or a tensor of a layer is missing or has another dtype or shape.
        """
        return cls(dict(StatisticsFile(path)))


class StatisticsFile(Mapping[str, InputStatistics]):
    """The statistics in a file of :meth:`Statistics.save`, each read when it is asked for, into CPU memory.

    Opening it checks the names, dtypes and shapes of all tensors.

    Raises:
        ImportError: safetensors is not installed. OSError: the file cannot be read. ValueError: it is not
            such a file, or a tensor of a layer is missing or has another dtype or shape.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._parts: dict[str, dict[str, Tensor]] = {}  # tensors on the meta device
        with self._open() as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise ValueError(f"{path}: is not a file of fp4gemm.calibration.Statistics.save")
            for key in sorted(file.keys()):
                name, _, part = key.rpartition(".")
                if part not in PARTS:
                    raise ValueError(f"{path}: holds {key!r}, must end in {_checks.listing(PARTS)}")
                about = file.get_slice(key)
                dtype = _DTYPES.get(about.get_dtype(), torch.bool)
                shape = tuple(about.get_shape())
                self._parts.setdefault(name, {})[part] = torch.empty(shape, dtype=dtype, device="meta")
        for name, parts in self._parts.items():
            for part in PARTS[:2]:
                if part not in parts:
                    raise ValueError(f"{path}: {name!r} has no {part}")
            try:
                InputStatistics(**parts)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {name!r}: {error}") from error

    def __getitem__(self, name: str) -> InputStatistics:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"StatisticsFile({str(self.path)!r}) of {len(self)} layers"

    @property
    def has_moments(self) -> bool:
        """Whether every layer has its second moment."""
        return bool(self._parts) and all("second_moment" in parts for parts in self._parts.values())

    def about(self, name: str) -> InputStatistics:
        """The statistics of a layer without their numbers: tensors on the meta device."""
        return InputStatistics(**self._parts[name])

    def read(self, name: str, expert: int | None = None, *, has_moment: bool = True) -> InputStatistics:
        """The statistics of a layer, or of one expert of a stack alone; without has_moment no second moment.

        Raises:
            KeyError: no such layer. OSError, ValueError: the file cannot be read any more.
        """
        found = {}
        with self._open() as file:
            for part in self._parts[name]:
                if has_moment or part != "second_moment":
                    key = f"{name}.{part}"
                    found[part] = file.get_tensor(key) if expert is None else file.get_slice(key)[expert]
        return InputStatistics(**found)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        broken = _safetensors("SafetensorError")
        try:
            with _safetensors("safe_open")(self.path, "pt") as file:
                yield file
        except broken as error:
            raise ValueError(f"{self.path}: is not a whole safetensors file: {error}") from error


def _safetensors(name: str, module: str = "safetensors") -> Any:
    """An attribute of safetensors, which fp4gemm does not depend on otherwise."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(
            "statistics are files of safetensors, which is not installed (pip install safetensors)"
        ) from error
