"""What ModelOpt and llm-compressor share as contenders of ``python -m bench accuracy --producers``.

They run as their documentation says, on the calibration's tokens, and what they leave is the model with their
own fake quantization: weights, and in W4A4 inputs with one static amax for each layer. Modules that they
import at their top and do not use here are replaced, so that their packages alone are needed
(requirements/oracles.txt).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

UNUSED = {"antlr4", "auto_round", "datasets", "evaluate", "omegaconf", "pulp", "pynvml", "requests", "scipy"}


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of UNUSED: objects that have every attribute."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__version__ = [], "4.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_unused_imports() -> None:
    """Let the producers be imported without the packages that nothing here needs."""
    if not any(isinstance(finder, _Unused) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Unused())


class Text(NamedTuple):
    """What a producer calibrates with."""

    folder: Path  # of the model's checkpoint, with its tokenizer
    batches: Sequence[Tensor]  # int64 (1, length) each


Make = Callable[[torch.nn.Module, Text, bool], torch.nn.Module]


class Producer(NamedTuple):
    """A method of another package: ``make(model, text, has_activations)`` may change the model in place."""

    name: str
    package: str  # on PyPI
    make: Make

    @property
    def version(self) -> str:
        """The version of the installed package; importlib.metadata.PackageNotFoundError if there is none."""
        return importlib.metadata.version(self.package)
