"""self_test: kernels and quantizers of a device against the CPU reference, bit for bit, on small problems.

On a kind of device on which the project has not executed its kernels, the first product runs the test, once:
a passed test is recorded on disk. FP4GEMM_SELF_TEST=0 in the environment turns that off.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import _checks, _native, kernel_table, support
from ..kernel_table import KernelInfo
from . import quantizers
from .problems import Problem, problems

__all__ = [
    "KernelResult",
    "SelfTestReport",
    "Wanted",
    "described",
    "device_to_test",
    "difference",
    "driver_version",
    "self_test",
    "tested_device",
    "versions",
]

SWITCH = "FP4GEMM_SELF_TEST"

_PLEASE = (
    "The project has not executed its kernels on such a device: please report this text, good or bad, "
    "in an issue (docs/blackwell.md)."
)

Runner = Callable[[KernelInfo, Problem], Tensor]


@dataclasses.dataclass(frozen=True)
class KernelResult:
    """What the test found for one kernel of products, or one quantizer."""

    name: str
    passed: bool
    reason: str = ""  # if it failed: which product or result, and how it differs
    ignores_scale_signs: bool | None = (
        None  # what it does with the sign bit of a block scale, if both are right
    )


@dataclasses.dataclass(frozen=True)
class SelfTestReport:
    """The results of every kernel and quantizer of a device; str() makes a text for people."""

    device: str  # "cuda:0: NVIDIA H200, compute capability 9.0"
    results: tuple[KernelResult, ...]
    cached: bool = False  # from an earlier run with the same library, device and driver
    versions: str = ""  # "fp4gemm 0.1.0 of CUDA 13.0 and CUTLASS 4.5.0, torch 2.11.0, driver 580.65.06"
    is_executed: bool = True  # whether the project has executed its kernels on such hardware
    tested: str = "kernels and quantizers"

    @property
    def failures(self) -> tuple[KernelResult, ...]:
        return tuple(result for result in self.results if not result.passed)

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if not self.results:
            return f"self-test on {self.device}: no kernels to test, the reference itself runs"
        count = len(self.results)
        if self.passed:
            when = " (an earlier run)" if self.cached else ""
            found = f"all {count} {self.tested} equal the reference{when}"
        else:
            found = f"{len(self.failures)} of {count} {self.tested} are wrong"
        lines = [f"self-test on {self.device}: {found}"]
        lines += [f"  {result.name}: {result.reason}" for result in self.failures]
        seen = [
            result.ignores_scale_signs for result in self.results if result.ignores_scale_signs is not None
        ]
        if seen:
            lines.append(
                f"  a block scale with its sign bit set: {sum(seen)} of {len(seen)} kernels ignore the bit, "
                "the others take a negative number (docs/quantization.md)"
            )
        lines += [f"  {self.versions}"] if self.versions else []
        return "\n".join(lines if self.is_executed else [*lines, f"  {_PLEASE}"])


def self_test(device: torch.device | str | int | None = None, *, force: bool = False) -> SelfTestReport:
    """Compare the kernels and quantizers of a device with the CPU reference, bit for bit, on small problems.

    The products have sizes that no tile divides; some have groups, one of them empty; each is computed
    without and with every term of the epilogue. Each kind of quantizer is called once. The test runs for
    seconds and synchronises. That it passed is recorded in $XDG_CACHE_HOME/fp4gemm, for this library, device
    and driver.

    Args:
        device: a torch.device, its name or a CUDA index; None is the current CUDA device, else the CPU, where
            there is nothing to test.
        force: run the test even if an earlier run is recorded as passed.

    Raises:
        TypeError, ValueError: device does not name a device that torch sees; force is not a bool.
        NotImplementedError: no kernel serves the device; the text says why.
    """
    _checks.is_bool("force", force)
    place = device_to_test(device)
    if place.type == "cpu":
        return SelfTestReport("cpu", ())
    index = place.index
    arch = kernel_table.kernel_arch(index)
    kernels = [kernel for kernel in kernel_table.kernels() if kernel.arch == arch]
    key = _key(index)
    about = versions(), is_executed(index)
    if not force and _is_recorded(key):
        tested = [kernel.name for kernel in kernels] + quantizers.names()
        results = tuple(KernelResult(name, True) for name in tested)
        _PASSED.add(index)
        return SelfTestReport(described(index), results, True, *about)

    def run(kernel: KernelInfo, problem: Problem) -> Tensor:
        return problem.run(place, kernel.out_dtype, kernel.name)

    results = compare_quantizers(place) + compare(kernels, run)
    report = SelfTestReport(described(index), results, False, *about)
    if report.passed:
        _record(key)
        _PASSED.add(index)
        _FAILED.pop(index, None)
    return report


def tested_device(device: torch.device | str | int | None) -> torch.device:
    """The CPU or a CUDA device with its index, for a device as :func:`self_test` accepts it.

    Raises:
        TypeError, ValueError: device does not name a device that torch sees.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _checks.as_device("device", device)
    if target.type == "cpu":
        return target
    index = target.index
    if target.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if index is None else index
    if target.type != "cuda" or index is None or index >= torch.cuda.device_count():
        raise ValueError(f"device: got {str(target)!r}, must be the CPU or a CUDA device that torch sees")
    return torch.device("cuda", index)


def device_to_test(device: torch.device | str | int | None) -> torch.device:
    """:func:`tested_device`, if kernels serve it; NotImplementedError says why none do."""
    found = tested_device(device)
    if found.type == "cuda" and kernel_table.kernel_arch(found.index) is None:
        raise NotImplementedError(support.is_supported(found).reason)
    return found


_PASSED: set[int] = set()  # CUDA indices
_FAILED: dict[int, str] = {}
_WARNED: set[int] = set()


def compare(kernels: Iterable[KernelInfo], run: Runner) -> tuple[KernelResult, ...]:
    """Compare what ``run`` computes for every problem and kernel with the reference."""
    wanted = Wanted()
    return tuple(wanted.compare(kernel, run) for kernel in kernels)


class Wanted:
    """The problems, and what the reference computes for them when it is asked for first.

    Args:
        tested: the problems; by default all of the self-test.
    """

    def __init__(self, tested: Sequence[Problem] | None = None) -> None:
        self._problems = problems() if tested is None else tested
        self._results: dict[tuple[str, torch.dtype], Tensor] = {}

    def compare(self, kernel: KernelInfo, run: Runner) -> KernelResult:
        """Compare what ``run`` computes for every problem that a kernel supports with the reference."""
        ignores: bool | None = None
        for problem in self._problems:
            if not problem.suits(kernel):
                continue
            try:
                got = run(kernel, problem)
            except Exception as error:  # anything that a broken kernel or driver raises is a failed test
                return KernelResult(kernel.name, False, f"{problem.name}: {type(error).__name__}: {error}")
            reason = difference(problem.name, got, self._of(problem, kernel.out_dtype))
            if (unsigned := problem.unsigned(kernel)) is not None:
                ignores = bool(reason)
                if reason:
                    reason = difference(unsigned.name, got, self._of(unsigned, kernel.out_dtype))
            if reason:
                return KernelResult(kernel.name, False, reason)
        return KernelResult(kernel.name, True, ignores_scale_signs=ignores)

    def _of(self, problem: Problem, dtype: torch.dtype) -> Tensor:
        key = problem.name, dtype
        if key not in self._results:
            self._results[key] = problem.run(torch.device("cpu"), dtype, None)
        return self._results[key]


def compare_quantizers(device: torch.device, names: Iterable[str] | None = None) -> tuple[KernelResult, ...]:
    """Compare the results of calls of :mod:`.quantizers`, all of them by default, with those of the CPU."""
    results = []
    for name in quantizers.names() if names is None else names:
        wanted = quantizers.run(name, torch.device("cpu"))
        try:
            found = quantizers.run(name, device)
        except Exception as error:
            results.append(KernelResult(name, False, f"{type(error).__name__}: {error}"))
            continue
        differences = (
            difference(f"result {i}", got, want)
            for i, (got, want) in enumerate(zip(found, wanted, strict=True))
        )
        reason = next((text for text in differences if text), "")
        results.append(KernelResult(name, not reason, reason))
    return tuple(results)


def difference(what: str, got: Tensor, want: Tensor) -> str:
    """Where two tensors differ in their bits, or "" if they do not."""
    as_bytes = [x.contiguous().view(torch.uint8).view(-1, x.element_size()) for x in (got, want)]
    differ = (as_bytes[0] != as_bytes[1]).any(1)
    if not differ.any():
        return ""
    count, first = int(differ.sum()), int(differ.nonzero()[0])
    values = [x.reshape(-1)[first].item() for x in (got, want)]
    return (
        f"{what}: {count} of {differ.numel()} elements differ, the first, at {first}, is "
        f"{values[0]}, must be {values[1]}"
    )


# ---- the run before the first product on a kind of device that the kernels were not executed on

_LOCK = threading.Lock()


def is_due(index: int) -> bool:
    """Whether a CUDA device has to be tested before its next product."""
    if index in _PASSED or os.environ.get(SWITCH) == "0":
        return False
    return not is_executed(index)


def is_executed(index: int) -> bool:
    """Whether the project has executed its kernels on such a CUDA device; True if it has none for it."""
    architecture = kernel_table.architecture(index)
    return architecture is None or architecture.is_executed


def before_first_product(index: int) -> bool:
    """Test the device if that is due; False if the test cannot run now. RuntimeError if it fails."""
    if not is_due(index):
        return True
    if torch.cuda.is_current_stream_capturing():
        warn_untested(index)
        return False
    with _LOCK:
        if index in _PASSED:
            return True
        if index not in _FAILED:
            report = self_test(torch.device("cuda", index))
            if report.passed:
                return True
            _FAILED[index] = f"{report}\n  {SWITCH}=0 in the environment turns the test off."
        raise RuntimeError(_FAILED[index])


def warn_untested(index: int) -> None:
    """Warn once that a product is about to run untested, because it is traced or captured."""
    # Tracing also works on fake CUDA tensors, without any device.
    if index in _WARNED or not torch.cuda.is_available() or not is_due(index):
        return
    _WARNED.add(index)
    warnings.warn(
        f"{described(index)}: fp4gemm has not been executed on such a device, and its self-test cannot run "
        f"while a graph is traced or captured; run fp4gemm.self_test('cuda:{index}') first, "
        f"or python -m fp4gemm selftest --device cuda:{index}",
        stacklevel=2,
    )


# ---- the record on disk


def described(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{index}: {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"


def versions() -> str:
    """What a report about this machine needs besides the device."""
    core = _native.core()
    cuda, cutlass = core.fp4gemm_cuda_version(), _native.text(core.fp4gemm_cutlass_version())
    return (
        f"fp4gemm {_native.version()} of CUDA {cuda // 1000}.{cuda % 1000 // 10} and CUTLASS {cutlass}, "
        f"torch {torch.__version__}, driver {driver_version() or 'unknown'}"
    )


def _key(index: int) -> dict[str, str]:
    """What the result of the test depends on."""
    return {
        "version": _native.version(),
        "libraries": _libraries_hash(),
        "device": torch.cuda.get_device_name(index),
        "driver": driver_version(),
    }


@functools.cache
def _libraries_hash() -> str:
    digest = hashlib.sha256()
    for name in (_native.CORE_LIBRARY, _native.TORCH_LIBRARY):
        digest.update(_native.library_path(name).read_bytes())
    return digest.hexdigest()


@functools.cache
def driver_version() -> str:
    """The version of NVIDIA's driver, for example "575.57.08", or "" if it is unknown."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    return ""


def _file(key: dict[str, str]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(base) / "fp4gemm" / f"selftest-{digest[:24]}.json"


def _is_recorded(key: dict[str, str]) -> bool:
    """Whether these libraries, device and driver are recorded as passed."""
    try:
        kept: object = json.loads(_file(key).read_text())
    except (OSError, RuntimeError, ValueError):
        return False
    return kept == key


def _record(key: dict[str, str]) -> None:
    """Record that they passed; if the file cannot be written, the test runs again next time."""
    try:
        path = _file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a reader sees the whole file or none.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(key, file)
        Path(file.name).replace(path)
    except (OSError, RuntimeError):
        pass


support.register_self_test(before_first_product, warn_untested)
