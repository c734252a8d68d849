"""check_epilogue: an epilogue in Python on a device against the reference, bit for bit, on small problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .. import _checks, _epilogue_library, _jit
from .._epilogue_library import EpilogueLibrary
from ..epilogues import BoundEpilogue, Epilogue
from ..epilogues.program import VECTORS, Program
from ..ops import epilogue as epilogue_ops
from ..ops import gemm as gemm_ops
from ..ops import operators
from ..ops.epilogue import DTYPES, EpilogueCall
from . import selftest
from .problems import SEED, Problem, problems
from .selftest import KernelResult, SelfTestReport

__all__ = ["check_epilogue"]

MOST_PROCESSES = 16  # that compile kernels at a time, with about 1 GB each


def check_epilogue(
    epilogue: Epilogue,
    device: torch.device | str | int | None = None,
    *,
    scalars: Mapping[str, float] | None = None,
) -> SelfTestReport:
    """Compare an epilogue on a device with the reference, bit for bit, on small problems.

    The problems are those of :func:`fp4gemm.self_test`, dense and grouped, with operands of every format that
    the device multiplies and every output type. On Blackwell they are those that the library of the epilogue
    was built for. The tensors of the epilogue hold random numbers. On Hopper the check compiles
    some thirty kernels first, in as many processes as the machine has cores (16 at most). It synchronises.

    Args:
        epilogue: a function that :func:`fp4gemm.epilogue` has decorated.
        device: a torch.device, its name or a CUDA index; None is the current CUDA device, else the CPU.
        scalars: the numbers of the epilogue by name; those that are omitted have their defaults.

    Returns:
        A report with a result for each problem; its ``passed`` says whether all of them agree.

    Raises:
        TypeError: epilogue or scalars has another type; a scalar without a default is missing.
        ValueError, NotImplementedError: as for :func:`fp4gemm.self_test`; on Blackwell no library of the
            epilogue is loaded.
    """
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue: got {_checks.describe(epilogue)}, must be a function decorated by fp4gemm.epilogue"
        )
    if scalars is not None and not isinstance(scalars, Mapping):
        raise TypeError(f"scalars: got {_checks.describe(scalars)}, must be a mapping of names to numbers")
    values: dict[str, Any] = dict(scalars or {})
    names = epilogue.names("scalars")
    for name in values:
        if name not in names:
            raise TypeError(f"scalars: got {name!r}, must be {_checks.listing([*names, 'None'])}")
    tensors: dict[str, Any] = {name: torch.empty(0) for kind in VECTORS for name in epilogue.names(kind)}
    bound = epilogue(**values, **tensors)
    place = selftest.device_to_test(device)
    gen = torch.Generator().manual_seed(SEED)
    calls = [
        (problem, call)
        for problem in problems()
        for out_dtype in DTYPES
        if (call := _call(bound, problem, out_dtype, gen)) is not None
    ]
    library = _library(epilogue.program, place)
    chosen = [pair for pair in calls if library is None or not epilogue_ops.refusal(library, pair[1])]

    def compared(of: tuple[Problem, EpilogueCall]) -> KernelResult:
        return _compared(*of, place)

    if place.type == "cpu" or library is not None:
        results = list(map(compared, chosen))
    else:
        threads = min(os.cpu_count() or 1, MOST_PROCESSES)
        with ThreadPoolExecutor(threads, initializer=_jit.compile_in_processes) as pool:
            results = list(pool.map(compared, chosen))
    about = ("cpu", "", True) if place.type == "cpu" else _about(place.index)
    return SelfTestReport(about[0], tuple(results), False, *about[1:], f"products with {epilogue.name}")


def _library(program: Program, device: torch.device) -> EpilogueLibrary | None:
    """The library with which a device of Blackwell computes the epilogue; None for other devices."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] < epilogue_ops.WITH_LIBRARIES:
        return None
    return _epilogue_library.find(program.hash, torch.cuda.get_device_capability(device))


def _about(index: int) -> tuple[str, str, bool]:
    return selftest.described(index), selftest.versions(), selftest.is_executed(index)


def _call(
    bound: BoundEpilogue, problem: Problem, out_dtype: torch.dtype, gen: torch.Generator
) -> EpilogueCall | None:
    """The call of a problem with the epilogue, with a codes operand b; None if it has no such product."""
    program, x = bound.program, problem.operands
    *lead, m, n = problem.shape
    if problem.terms.keys() - {"use_fast_accum"}:
        return None
    if n % (16 if program.halves else 8) or (x.offs is None and program.count("groups")):
        return None
    tensors = _tensors(program, problem, gen)
    product = x._replace(
        alpha=0.37,
        alpha_row=torch.rand(m, generator=gen) * 2e-3,
        alpha_col=torch.rand(n, generator=gen) + 0.5,
        bias=torch.randn(n, generator=gen) if program.takes("bias") else None,
        use_fast_accum=problem.terms.get("use_fast_accum", False),
        out_dtype=out_dtype,
    )
    if program.takes("c"):
        c = torch.randn((*lead, m, program.width(n)), generator=gen)
        product = product._replace(c=c.to(out_dtype))
    aux = [DTYPES.index(out_dtype)] * len(program.aux)
    return EpilogueCall.of(product, bound.epilogue.text, tensors, bound.scalars, aux)


def _tensors(program: Program, problem: Problem, gen: torch.Generator) -> list[Tensor]:
    """Random inputs of the program; vectors by column have one for each group."""
    *lead, m, n = problem.shape
    width, offs = n // 2 if program.pairs else n, problem.operands.offs
    groups = () if offs is None else (offs.shape[0],)
    shapes = {"rows": (m,), "columns": (*groups, width), "groups": groups, "matrices": (*lead, m, width)}
    return [torch.randn(shapes[kind], generator=gen) for kind in VECTORS for _ in range(program.count(kind))]


def _compared(problem: Problem, call: EpilogueCall, device: torch.device) -> KernelResult:
    name = f"{problem.name}, {str(call.out_dtype).removeprefix('torch.')}"
    want = operators.OPERATORS["gemm_epilogue"].reference(*call)
    try:
        got = operators.gemm_epilogue(*_moved(call, problem.prepacks, device))
    except Exception as error:  # anything that a broken kernel or driver raises is a failed check
        return KernelResult(name, False, f"{type(error).__name__}: {error}")
    rows = slice(None)
    if call.offs is not None and not gemm_ops.is_ragged_k(call.product()):
        rows = slice(int(call.offs[-1]))  # those of groups
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        what = "D" if i == 0 else f"auxiliary output {i - 1}"
        if reason := selftest.difference(what, x.cpu()[..., rows, :], y[..., rows, :]):
            return KernelResult(name, False, reason)
    return KernelResult(name, True)


def _moved(call: EpilogueCall, prepacks: bool, device: torch.device) -> EpilogueCall:
    tensors = {name: x.to(device) for name, x in call._asdict().items() if isinstance(x, Tensor)}
    moved: dict[str, Any] = {**tensors, "inputs": [x.to(device) for x in call.inputs]}
    call = call._replace(**moved)
    if prepacks:
        packed = operators.prepack(call.b, call.scale_b, call.a.dtype is gemm_ops.FP8)
        call = call._replace(b=packed, scale_b=None, b_rows=call.b.shape[-2])
    return call
