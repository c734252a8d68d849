"""The library under test, linked with the emulator in place of the CUDA runtime, and calls of it.

A session is a device of one compute capability. Each has a copy of the library of its own, because the
library reads the properties of the device once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path

import capi
import fp4gemm
import torch
from fp4gemm._formats import format_of
from problems import FORMATS, Problem
from ptxemu.emulator import DeviceArray, Emulator, extract_ptx
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
# The emulated device has few SMs, so that each gets several tiles. The library reads their number once.
NUM_SMS = 6

# The kernels whose operands have block scales on the architectures that the emulator models. The number of an
# architecture is the least compute capability of its family, which the emulated device has.
KERNELS = [k for k in fp4gemm.kernels() if k.arch in (100, 120) and k.operand in FORMATS]
ARCHS = sorted({kernel.arch for kernel in KERNELS})

# Eight schedules of warps and asynchronous operations, with different numbers of resident clusters.
SCHEDULES = (
    {"mode": "eager", "seed": 1},
    {"mode": "lazy", "seed": 1, "resident_clusters": 1},
    {"mode": "random", "seed": 1, "resident_clusters": 2},
    {"mode": "random", "seed": 2, "resident_clusters": 3},
    {"mode": "random", "seed": 3},
    {"mode": "pct", "seed": 4, "resident_clusters": 2},
    {"mode": "pct", "seed": 5, "resident_clusters": 1},
    {"mode": "pct", "seed": 6},
)


def build_folder() -> Path:
    """The folder of the test build: FP4GEMM_TEST_BUILD, or build/test, where `make test` builds."""
    return Path(os.environ.get("FP4GEMM_TEST_BUILD", ROOT / "build" / "test"))


def library_path() -> Path | None:
    found = sorted(build_folder().glob("libfp4gemm_emulated.so"))
    return found[0] if found else None


class Finding(AssertionError):
    """The emulator ended a launch or reported a hazard."""


@functools.cache
def load_emulator(folder: Path) -> tuple[Emulator, list[Path]]:
    """The emulator of the process, and the library's PTX, which it writes to the folder and loads."""
    library = library_path()
    if library is None:
        raise FileNotFoundError(f"libfp4gemm_emulated.so in {build_folder()}")
    files = extract_ptx(library, folder)
    return Emulator(next(build_folder().glob("**/libptxemu.so")), [folder]), files


class Session:
    """The emulator as a device of one compute capability, with the library's kernels for it."""

    def __init__(self, folder: Path, capability: int) -> None:
        self.capability = capability
        self.device = {"num_sms": NUM_SMS, "compute_capability": capability}
        self.arch = capability // 10 * 10
        self.emulator, self.ptx_files = load_emulator(folder)
        self.configure()
        copy = shutil.copy(str(library_path()), folder / f"libfp4gemm_emulated_{capability}.so")
        self.library = capi.declare(self.emulator.load_library(copy))
        kernels = capi.kernels(self.library)
        self.kernels = {info.name.decode(): info for info in kernels if info.arch == self.arch}

    def configure(self, **options: object) -> None:
        """Sets the emulator's options, of which the device is one; see Emulator.configure."""
        self.emulator.configure(**{**self.device, **options})  # type: ignore[arg-type]

    def run(self, problem: Problem, kernel: str | None = None, **schedule: object) -> Tensor:
        """D with the pads behind its rows, after one call under one schedule; raises Finding."""
        self.configure(**{"hazards_are_fatal": 1, "report_unwritten_global": 1, **schedule})
        self.emulator.clear()
        call = Call(self, problem, kernel)
        self.check(call.launch())
        return call.result()

    def check(self, status: int) -> None:
        """Raises Finding unless the call succeeded and ended without reports of the emulator."""
        from ptxemu.emulator import EmulatorError

        message = "" if status == capi.SUCCESS else self.library.fp4gemm_last_error().decode()
        try:
            self.emulator.synchronize()
        except EmulatorError as error:
            raise Finding(f"{message} {error}") from None
        if status != capi.SUCCESS:
            raise Finding(f"{message} {self.emulator.last_error()}")
        if self.emulator.num_hazards():
            raise Finding(self.emulator.hazards())


class Sessions:
    """A session for each compute capability, made when it is used first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions: dict[int, Session] = {}

    def __getitem__(self, capability: int) -> Session:
        if capability not in self._sessions:
            self._sessions[capability] = Session(self._folder, capability)
        return self._sessions[capability]

    def of(self, kernel: fp4gemm.KernelInfo) -> Session:
        return self[kernel.arch]


class Call:
    """The C arguments of a problem, with its tensors on the emulated device."""

    def __init__(self, session: Session, problem: Problem, kernel: str | None) -> None:
        self.session = session
        self.problem = problem
        self.arrays: list[DeviceArray] = []  # keeps the device memory allocated
        self.d = session.emulator.empty(tuple(problem.want.shape), problem.dtype)
        self.args = self._arguments()
        self.args.kernel = None if kernel is None else kernel.encode()
        self.workspace: DeviceArray | None = None

    def _put(self, tensor: Tensor) -> int:
        self.arrays.append(self.session.emulator.upload(tensor.contiguous()))
        return self.arrays[-1].pointer

    def _operand(self, data: Tensor, scales: Tensor | None) -> capi.Operand:
        """Codes and scales, fp16 or bf16 values, or the bytes of prepacked weights."""
        if scales is not None:
            form = capi.FORMATS[format_of(data, scales).name]
            return capi.Operand(self._put(data), self._put(scales), form)
        formats = {
            torch.float16: capi.FORMAT_FP16,
            torch.bfloat16: capi.FORMAT_BF16,
            torch.uint8: capi.FORMAT_PREPACKED,
        }
        return capi.Operand(self._put(data), None, formats[data.dtype])

    def _arguments(self) -> capi.GemmArgs:
        p = self.problem
        args = capi.GemmArgs(
            m=p.m,
            n=p.n,
            k=p.k,
            a=self._operand(p.a, p.scale_a),
            b=self._operand(p.b, p.scale_b),
            alpha=p.alpha,
            activation=p.activation,
            beta=p.beta,
            d=self.d.pointer,
            d_row_stride=p.want.shape[-1],
            out_dtype=capi.DTYPES[p.dtype],
        )
        if p.offs is not None:
            args.ragged = capi.RAGGED_K if p.is_ragged_k else capi.RAGGED_M
            args.num_groups = p.offs.numel()
            args.offs = self._put(p.offs)
        for name in ("alpha_row", "alpha_col", "bias"):
            if name in p.vectors:
                vector = p.vectors[name]
                numel = vector.shape[-1]
                stride = numel if vector.dim() == 2 else 0
                setattr(args, name, capi.Vector(self._put(vector), numel, stride))
        if "alpha_groups" in p.vectors:
            args.alpha_groups = self._put(p.vectors["alpha_groups"])
        if "c" in p.vectors:
            args.c, args.c_row_stride = self._put_c(p.vectors["c"])
        return args

    def _put_c(self, c: Tensor) -> tuple[int, int]:
        """The address and row stride of a C whose pads, and rows of no group, were never written."""
        p = self.problem
        stride = c.shape[-1] + 16
        array = self.session.emulator.empty((*c.shape[:-1], stride), c.dtype)
        self.arrays.append(array)
        array.torch()[..., : c.shape[-1]] = c
        rows = c.shape[:-1].numel() if p.offs is None or p.is_ragged_k else int(p.offs[-1])
        for row in range(rows):
            array.mark_written(row * stride, c.shape[-1])
        return array.pointer, stride

    def launch(self) -> int:
        """Launches and returns the status. The first call allocates a workspace of the required size."""
        library = self.session.library
        num_bytes = ctypes.c_size_t()
        status = library.fp4gemm_gemm_workspace_bytes(self.args, 0, num_bytes)
        if status != capi.SUCCESS:
            return status
        if self.workspace is None:  # an allocation would wait for the launch before
            self.workspace = self.session.emulator.empty(num_bytes.value + 256)
            if self.args.b.format == capi.FORMAT_PREPACKED:
                # These kernels recognise what they have not written yet, so they read it: 0xFF.
                self.workspace.mark_written()
        aligned = (self.workspace.pointer + 255) // 256 * 256
        return library.fp4gemm_gemm(self.args, aligned, num_bytes.value, 0, None)

    def result(self) -> Tensor:
        return self.session.emulator.download(self.d)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def describe(got: Tensor, want: Tensor) -> str:
    """Describes where two results differ."""
    integers = torch.int32 if want.dtype == torch.float32 else torch.int16
    wrong = (got.view(integers) != want.view(integers)).nonzero()
    first = tuple(wrong[0].tolist())
    count = f"{len(wrong)} of {want.numel()} elements differ"
    return f"{count}, the first at {first}: {got[first]}, must be {want[first]}"
