"""Kernels chosen by rules from a file, which have priority over the library's cost model.

The file is named by the environment variable FP4GEMM_SELECTION when fp4gemm is imported, or given to
:func:`load`. It is a JSON list of rules, and the first rule that matches a call names its kernel::

    [{"kernel": "sm100_dense_256x192x256_c2x1_rowcol_bf16", "n": 7168, "k": 2048, "m": [1025, 4096]}, ...]

kernel: a name from :func:`fp4gemm.kernels`, whose architecture, mode, epilogue, operands and output type
must be those of the call. n, k: sizes of the call; m: the least and the most rows, of all groups together;
operands: how a and b are stored, for example ["fp16", "prepacked"] (kernel_table.FORMATS). A key that is
omitted matches any call. The rules do not apply to calls that name a kernel or ask for a batch-invariant one,
nor to calls that torch.compile traces. A kernel that keeps FP8 sums in the tensor cores is chosen for calls
with use_fast_accum=True alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernel_table
from .kernel_table import FORMATS

__all__ = ["clear", "find", "load"]

VARIABLE = "FP4GEMM_SELECTION"


class Rule(NamedTuple):
    """One entry of the file; None matches any value."""

    kernel: kernel_table.KernelInfo
    n: int | None
    k: int | None
    least_m: int
    most_m: int
    formats: tuple[str, str] | None = None


RULES: list[Rule] = []


def load(path: str | os.PathLike[str]) -> int:
    """Replace the current rules by those of a file.

    Returns:
        The number of rules that are used. A rule for a kernel that this build lacks is ignored, so that one
        file serves several builds.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON list of rules as the head of this module defines them.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: holds a {type(entries).__name__}, must hold a list of rules")
    rules = [_rule(f"{path}: rule {index}", entry) for index, entry in enumerate(entries)]
    RULES[:] = [rule for rule in rules if rule is not None]
    return len(RULES)


def clear() -> None:
    """Remove every rule, so that the cost model selects the kernels."""
    RULES.clear()


def find(
    a: Tensor,
    n: int,
    k: int,
    dtype: torch.dtype,
    mode: str,
    gated: bool,
    formats: tuple[str, str],
    ragged: str = "m",
    use_fast_accum: bool = False,
) -> str | None:
    """The kernel that the rules name for a call on CUDA, or None; formats of FORMATS."""
    if not a.is_cuda or torch.compiler.is_compiling():
        return None
    arch, m = kernel_table.kernel_arch(a.get_device()), a.shape[0]
    for rule in RULES:
        kernel = rule.kernel
        if (
            rule.least_m <= m <= rule.most_m
            and rule.n in (None, n)
            and rule.k in (None, k)
            and rule.formats in (None, formats)
            and kernel.arch == arch
            and kernel.mode == mode
            and kernel.out_dtype is dtype
            and kernel.is_gated is gated
            and kernel.supports(*formats, ragged)
            and (use_fast_accum or not kernel.fast_accum)
        ):
            return kernel.name
    return None


def _rule(where: str, entry: object) -> Rule | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("kernel"), str):
        raise ValueError(f"{where}: is {entry!r}, must be an object that names a kernel")
    if unknown := sorted(set(entry) - {"kernel", "n", "k", "m", "operands"}):
        raise ValueError(f"{where}: has {unknown[0]!r}, must have only kernel, n, k, m and operands")
    span = entry.get("m", [0, 2**31 - 1])
    if (
        not isinstance(span, list)
        or len(span) != 2
        or not all(_is_size(m) for m in span)
        or span[0] > span[1]
    ):
        raise ValueError(f"{where}: m is {span!r}, must be a list of the least and the most rows")
    for name in ("n", "k"):
        if name in entry and not _is_size(entry[name]):
            raise ValueError(f"{where}: {name} is {entry[name]!r}, must be a size")
    formats = entry.get("operands")
    if formats is not None and (
        not isinstance(formats, list) or len(formats) != 2 or not all(x in FORMATS for x in formats)
    ):
        raise ValueError(f"{where}: operands is {formats!r}, must be a list of two of {FORMATS}")
    kernel = kernel_table.kernel_by_name(entry["kernel"])
    both = None if formats is None else (formats[0], formats[1])
    return None if kernel is None else Rule(kernel, entry.get("n"), entry.get("k"), span[0], span[1], both)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def load_from_environment() -> None:
    """Load the file that FP4GEMM_SELECTION names, if it is set; raises ValueError that names the variable."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        load(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}: got {path!r}, must name a file of selection rules (python -m fp4gemm tune writes "
            f"one), or be unset: {error}"
        ) from error


load_from_environment()
