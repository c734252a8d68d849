"""The examination of ``python -m fp4gemm doctor``: installation, driver, kernels and speed of one device.

Every kernel and quantizer runs in a process of its own (:mod:`.isolated`), so that one which crashes or never
ends is named. What is found becomes one JSON file without private data: it has no names of hosts and users,
and no folders.
"""

from __future__ import annotations

import ctypes
import dataclasses
import getpass
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import _native, kernel_table, support
from . import isolated, quantizers, selftest, speed
from .isolated import Outcome

__all__ = ["Check", "Examination", "advice", "examine", "without_private_data", "worker"]

TIMEOUT_S = 180.0  # within which a child begins its first test, torch's import included, or finishes one
_VARIABLES = ("FP4GEMM_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")


@dataclasses.dataclass(frozen=True)
class Check:
    """One statement about the machine, and what to do where something is wrong."""

    name: str
    passed: bool
    found: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Examination:
    """What was found of a device."""

    about: dict[str, Any]
    checks: list[Check]
    kernels: list[Outcome]
    speed: list[Outcome]

    @property
    def passed(self) -> bool:
        """Whether all checks and kernels passed. Times are no reason to fail, errors in timing are."""
        outcomes = [*self.kernels, *self.speed]
        return all(check.passed for check in self.checks) and all(outcome.passed for outcome in outcomes)

    def as_json(self) -> dict[str, Any]:
        """The examination without private data."""
        failed = [entry.name for entry in self.kernels if not entry.passed]
        data = dataclasses.asdict(self) | {"passed": self.passed, "advice": advice(failed)}
        return {key: without_private_data(value) for key, value in data.items()}


# ---- the machine


def about(device: torch.device) -> dict[str, Any]:
    """The versions on which the rest depends."""
    core = _native.core()
    cuda = core.fp4gemm_cuda_version()
    found: dict[str, Any] = {
        "fp4gemm": _native.version(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "none",
        "cutlass": _native.text(core.fp4gemm_cutlass_version()) or "none",
        "families": _native.text(core.fp4gemm_built_archs()) or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }
        found["driver"] = selftest.driver_version() or "unknown"
    return found


def checks(device: torch.device) -> list[Check]:
    """What must hold before a kernel can run."""
    made = [_driver()] if _native.core().fp4gemm_cuda_version() else []
    if device.type != "cuda":
        sees = torch.cuda.is_available()
        made.append(
            Check("device", True, "the CPU runs the reference" + (", as --device says" if sees else ""))
        )
        return made
    supported = support.is_supported(device)
    families = _native.text(_native.core().fp4gemm_built_archs()) or "no GPU"
    rebuild = (
        f"this build has kernels for {families}: build with -C cmake.define.FP4GEMM_CUDA_ARCHS=native "
        "(docs/install.md)"
    )
    made.append(_check("kernels", supported.supported, supported.reason, rebuild))
    free, total = torch.cuda.mem_get_info(device)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    least = f"end other processes on the GPU: the tests need {speed.MOST_BYTES / 2**30:g} GiB"
    made.append(_check("memory", free >= speed.MOST_BYTES, memory, least))
    return made


def _check(name: str, passed: bool, found: str, otherwise: str) -> Check:
    return Check(name, passed, found, "" if passed else otherwise)


def _driver() -> Check:
    """Whether the driver runs code of the CUDA that the library was built with."""
    built = _native.core().fp4gemm_cuda_version() // 1000
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        status = -1
    if status != 0:
        return Check("driver", not torch.cuda.is_available(), "there is none, or it does not answer")
    major, minor = version.value // 1000, version.value % 1000 // 10
    found = f"it supports CUDA {major}.{minor}, the library needs {built}.0"
    return _check("driver", major >= built, found, f"install a driver for CUDA {built} or newer")


# ---- kernels


def names(device: torch.device) -> list[str]:
    """The quantizers and kernels of a device; none for the CPU, whose code is the reference."""
    if device.type != "cuda" or not support.is_supported(device):
        return []
    arch = kernel_table.kernel_arch(device.index)
    return quantizers.names() + [kernel.name for kernel in kernel_table.kernels() if kernel.arch == arch]


def test(device: torch.device, wanted: selftest.Wanted, name: str) -> Outcome:
    """One quantizer, kernel or measurement on a device."""
    if name in speed.CASES:
        return Outcome(name, True, values=speed.measure(name, device))
    if name in quantizers.names():
        (result,) = selftest.compare_quantizers(device, [name])
    else:
        kernel = kernel_table.kernel_by_name(name)
        if kernel is None:
            raise ValueError(f"name: got {name!r}, must be a kernel, a quantizer or a measurement")
        result = wanted.compare(kernel, lambda row, problem: problem.run(device, row.out_dtype, row.name))
    signs = result.ignores_scale_signs
    return Outcome(
        name,
        result.passed,
        result.reason,
        values={} if signs is None else {"ignores_scale_signs": float(signs)},
    )


def worker(device: torch.device, given: Sequence[str]) -> None:
    """What a child does: the tests of these names, with its outcomes on the standard output."""
    # What libraries print must not come between the outcomes.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ[selftest.SWITCH] = "0"  # the tests are those of the self-test, one by one
    isolated.serve(given, partial(test, device, selftest.Wanted()), output)


def advice(failed: Sequence[str]) -> list[str]:
    """What can be tried where kernels and quantizers are wrong, one sentence each."""
    table = {kernel.name: kernel for kernel in kernel_table.kernels()}
    wrong = [table[name] for name in failed if name in table]
    said = []
    for name in failed:
        if name not in table:
            said.append(f"{name}: quantize with other options, or on the CPU")
    rules: dict[str, None] = {}  # names, each once, in order
    for kernel in wrong:
        others = [other for other in table.values() if _kind(other) == _kind(kernel) and other not in wrong]
        if others:
            rules[others[0].name] = None
        else:
            said.append(f"{kernel.name}: every kernel of its kind is wrong, so that none can replace it")
    if rules:
        text = ", ".join(f'{{"kernel": "{name}"}}' for name in rules)
        said.append(
            f"name a file with [{text}] in FP4GEMM_SELECTION, so that kernels which passed compute all calls "
            f"of their kinds, and set {selftest.SWITCH}=0, so that products run (docs/environment.md)"
        )
    if any(kernel.arch >= 100 and kernel.operand == "nvfp4" for kernel in wrong):
        built = _native.text(_native.core().fp4gemm_cutlass_version())
        said.append(
            f"build with another CUTLASS than {built}, whose kernels these are: set CUTLASS_DIR, or run make "
            "test-oldest-cutlass (docs/blackwell.md)"
        )
    return [*said, "send the file in an issue"] if failed else []


def _kind(kernel: kernel_table.KernelInfo) -> tuple[Any, ...]:
    """What kernels must have in common to compute the same calls."""
    return kernel.arch, kernel.mode, kernel.epilogue, kernel.operand, kernel.out_dtype, kernel.fast_accum


# ---- the whole


def examine(
    device: torch.device,
    *,
    measure: bool = True,
    tested: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[Outcome], None] | None = None,
) -> Examination:
    """Examine a device: the CPU, or a CUDA device with an index.

    Args:
        device: the device.
        measure: whether times are measured too; they are not where a kernel is wrong.
        tested: the names of kernels and quantizers; by default all those of the device.
        command: what starts a child (:func:`.isolated.run`); by default it runs :func:`worker`.
        timeout_s: see :func:`.isolated.run`.
        progress: is called with each outcome.
    """
    if command is None:
        command = (sys.executable, "-m", "fp4gemm", "doctor", "--device", str(device), "--worker")
    found = checks(device)
    if tested is None:
        tested = names(device) if all(check.passed for check in found) else []
    kernels = isolated.run(command, tested, timeout_s=timeout_s, progress=progress)
    timed = list(speed.CASES) if measure and kernels and all(entry.passed for entry in kernels) else []
    times = isolated.run(command, timed, timeout_s=timeout_s, progress=progress)
    return Examination(about(device), found, kernels, times)


_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:'\"]+/)+")


def without_private_data(value: Any) -> Any:
    """The value with its texts without folders, and without the names of the user and of the host."""
    if isinstance(value, dict):
        return {key: without_private_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_private_data(entry) for entry in value]
    if not isinstance(value, str):
        return value
    text = _FOLDERS.sub(".../", value)
    private = {platform.node(), _user()} - {"", "root", "localhost"}
    for name in private:
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
