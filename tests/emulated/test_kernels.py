"""Every Blackwell kernel of the table gives the bits of the reference on the emulator."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from problems import (
    EXPANDED,
    FORMATS,
    FULL,
    PLAIN,
    Problem,
    dense,
    ends_of_tiles,
    grouped_ragged_k,
    grouped_ragged_m,
)
from session import ARCHS, KERNELS, SCHEDULES, Finding, Session, Sessions, describe, same_bits


def of_mode(mode: str, epilogue: str = "rowcol") -> list[object]:
    found = [kernel for kernel in KERNELS if (kernel.mode, kernel.epilogue) == (mode, epilogue)]
    return [pytest.param(kernel, id=kernel.name) for kernel in found] or [
        pytest.param(None, marks=pytest.mark.skip(reason="built without such kernels"))
    ]


def check(session: Session, problem: Problem, kernel: str | None) -> None:
    for schedule in SCHEDULES:
        got = session.run(problem, kernel, **schedule)
        assert same_bits(got, problem.want), f"{problem.name} {schedule}: {describe(got, problem.want)}"


DENSE = {
    "one-row": lambda k: dense(1, 8, 32, k.out_dtype, PLAIN, operand=k.operand),
    "tiny": lambda k: dense(3, 136, 96, k.out_dtype, FULL, "relu2", operand=k.operand),
    "ragged": lambda k: dense(130, 264, 544, k.out_dtype, FULL, "silu", operand=k.operand),
    "tiles": lambda k: dense(260, 520, 320, k.out_dtype, PLAIN, operand=k.operand),
}


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("kernel", of_mode("dense"))
def test_dense(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    check(sessions.of(kernel), DENSE[case](kernel), kernel.name)


@pytest.mark.parametrize("kernel", of_mode("dense"))
def test_every_end_of_a_tile(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    for problem in ends_of_tiles(kernel.out_dtype, kernel.operand):
        got = sessions.of(kernel).run(problem, kernel.name, **SCHEDULES[1])
        assert same_bits(got, problem.want), f"{problem.name}: {describe(got, problem.want)}"


GROUPED = {
    "ragged-m": lambda k: grouped_ragged_m(
        (5, 0, 130, 17), 136, 96, k.out_dtype, FULL, "relu2", operand=k.operand
    ),
    "one-hot": lambda k: grouped_ragged_m((0, 300, 0), 264, 320, k.out_dtype, PLAIN, operand=k.operand),
    "all-empty": lambda k: grouped_ragged_m((0, 0, 0), 64, 64, k.out_dtype, operand=k.operand),
    "ragged-k": lambda k: grouped_ragged_k((5, 0, 130, 64), 72, 136, k.out_dtype, operand=k.operand),
    "ragged-k-plain": lambda k: grouped_ragged_k((0, 200), 136, 264, k.out_dtype, PLAIN, operand=k.operand),
    "no-token": lambda k: grouped_ragged_k((0, 0), 72, 136, k.out_dtype, operand=k.operand),
}


@pytest.mark.parametrize("case", GROUPED)
@pytest.mark.parametrize("kernel", of_mode("grouped"))
def test_grouped(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    check(sessions.of(kernel), GROUPED[case](kernel), kernel.name)


GATED = {
    "dense": lambda k: dense(130, 272, 544, k.out_dtype, FULL, "swiglu", operand=k.operand),
    "dense-plain": lambda k: dense(1, 16, 32, k.out_dtype, PLAIN, "geglu_tanh", operand=k.operand),
    "grouped": lambda k: grouped_ragged_m(
        (5, 0, 130, 17), 144, 96, k.out_dtype, FULL, "swiglu_oai", operand=k.operand
    ),
    "grouped-limit": lambda k: grouped_ragged_m(
        (3, 0, 9), 144, 96, k.out_dtype, FULL, "swiglu_limit10", operand=k.operand
    ),
}


@pytest.mark.parametrize("case", GATED)
@pytest.mark.parametrize("kernel", of_mode("dense", "gated") + of_mode("grouped", "gated"))
def test_gated(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    if case.startswith("dense") == (kernel.mode == "dense"):
        check(sessions.of(kernel), GATED[case](kernel), kernel.name)


@pytest.mark.parametrize("kernel", of_mode("grouped"))
def test_one_group_is_dense(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    """One group gives the bits of a dense kernel with the same operands."""
    session = sessions.of(kernel)
    grouped = grouped_ragged_m((133,), 136, 96, kernel.out_dtype, PLAIN, operand=kernel.operand)
    plain = Problem(
        "one group",
        133,
        136,
        grouped.k,
        grouped.a[:133],
        grouped.scale_a[:256],
        grouped.b[0],
        grouped.scale_b[0],
        grouped.want[:133],
    )
    assert same_bits(session.run(grouped, kernel.name)[:133], session.run(plain))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.operand == "mxfp8"], ids=lambda k: k.name)
def test_codes_are_expanded(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    """Kernels of MXFP8 operands multiply by an MXFP4 b, which the call makes MXFP8, for any k."""
    activation = "swiglu" if kernel.epilogue == "gated" else "silu"
    terms = (96, kernel.out_dtype, FULL, activation, EXPANDED)
    problem = dense(33, 144, *terms) if kernel.mode == "dense" else grouped_ragged_m((5, 0, 30), 144, *terms)
    check(sessions.of(kernel), problem, kernel.name)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.operand == "mxfp8_mxfp4"], ids=lambda k: k.name)
def test_kernels_that_unpack_codes_refuse_another_k(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    terms = (96, kernel.out_dtype, PLAIN, "swiglu" if kernel.epilogue == "gated" else None, EXPANDED)
    problem = dense(33, 144, *terms) if kernel.mode == "dense" else grouped_ragged_m((5, 0, 30), 144, *terms)
    with pytest.raises(Finding, match="k: is 96, must be a multiple of 128 for"):
        sessions.of(kernel).run(problem, kernel.name)


@pytest.mark.parametrize("operand", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_selected_kernels(session: Session, dtype: torch.dtype, operand: str) -> None:
    """Calls without the name of a kernel, so that the library selects one."""
    for problem in (
        dense(1, 520, 96, dtype, FULL, "gelu_tanh", operand),
        dense(200, 136, 64, dtype, FULL, operand=operand),
        grouped_ragged_m((3, 0, 1, 64), 136, 64, dtype, operand=operand),
        grouped_ragged_k((64, 1, 0), 136, 72, dtype, operand=operand),
    ):
        check(session, problem, None)


@pytest.mark.parametrize("capability", [103, 121])
def test_the_family_shares_its_kernels(sessions: Sessions, capability: int) -> None:
    """A device of the family whose compute capability is not that of the kernels' code."""
    if capability // 10 * 10 not in ARCHS:
        pytest.skip("built without kernels of the family")
    for problem in (
        dense(3, 136, 96, torch.bfloat16, FULL, "silu"),
        grouped_ragged_m((3, 0, 130), 136, 64, torch.bfloat16),
    ):
        got = sessions[capability].run(problem, mode="random")
        assert same_bits(got, problem.want), describe(got, problem.want)


def test_many_groups(session: Session) -> None:
    """There are more groups than threads in the preparation kernel."""
    sizes = tuple((i * 7919) % 5 % 3 for i in range(1100))
    problem = grouped_ragged_m(sizes, 8, 32, torch.bfloat16, PLAIN)
    got = session.run(problem, mode="lazy")
    assert same_bits(got, problem.want), describe(got, problem.want)
