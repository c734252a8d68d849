"""Every Blackwell kernel of the table gives the bits of the reference on the emulator."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from problems import FULL, PLAIN, Problem, dense, grouped_ragged_k, grouped_ragged_m
from session import ARCHS, KERNELS, SCHEDULES, Session, Sessions, describe, same_bits


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
    "one-row": lambda dtype: dense(1, 8, 32, dtype, PLAIN),
    "tiny": lambda dtype: dense(3, 136, 96, dtype, FULL, "relu2"),
    "ragged": lambda dtype: dense(130, 264, 544, dtype, FULL, "silu"),
    "tiles": lambda dtype: dense(260, 520, 320, dtype, PLAIN),
}


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("kernel", of_mode("dense"))
def test_dense(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    check(sessions.of(kernel), DENSE[case](kernel.out_dtype), kernel.name)


GROUPED = {
    "ragged-m": lambda dtype: grouped_ragged_m((5, 0, 130, 17), 136, 96, dtype, FULL, "relu2"),
    "one-hot": lambda dtype: grouped_ragged_m((0, 300, 0), 264, 320, dtype, PLAIN),
    "all-empty": lambda dtype: grouped_ragged_m((0, 0, 0), 64, 64, dtype),
    "ragged-k": lambda dtype: grouped_ragged_k((5, 0, 130, 64), 72, 136, dtype),
    "ragged-k-plain": lambda dtype: grouped_ragged_k((0, 200), 136, 264, dtype, PLAIN),
    "no-token": lambda dtype: grouped_ragged_k((0, 0), 72, 136, dtype),
}


@pytest.mark.parametrize("case", GROUPED)
@pytest.mark.parametrize("kernel", of_mode("grouped"))
def test_grouped(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    check(sessions.of(kernel), GROUPED[case](kernel.out_dtype), kernel.name)


GATED = {
    "dense": lambda dtype: dense(130, 272, 544, dtype, FULL, "swiglu"),
    "dense-plain": lambda dtype: dense(1, 16, 32, dtype, PLAIN, "geglu_tanh"),
    "grouped": lambda dtype: grouped_ragged_m((5, 0, 130, 17), 144, 96, dtype, FULL, "swiglu_oai"),
    "grouped-limit": lambda dtype: grouped_ragged_m((3, 0, 9), 144, 96, dtype, FULL, "swiglu_limit10"),
}


@pytest.mark.parametrize("case", GATED)
@pytest.mark.parametrize("kernel", of_mode("dense", "gated") + of_mode("grouped", "gated"))
def test_gated(sessions: Sessions, kernel: fp4gemm.KernelInfo, case: str) -> None:
    if case.startswith("dense") == (kernel.mode == "dense"):
        check(sessions.of(kernel), GATED[case](kernel.out_dtype), kernel.name)


@pytest.mark.parametrize("kernel", of_mode("grouped"))
def test_one_group_is_dense(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    """One group gives the bits of a dense kernel with the same operands."""
    session = sessions.of(kernel)
    grouped = grouped_ragged_m((133,), 136, 96, kernel.out_dtype, PLAIN)
    plain = Problem(
        "one group",
        133,
        136,
        96,
        grouped.a[:133],
        grouped.scale_a[:256],
        grouped.b[0],
        grouped.scale_b[0],
        grouped.want[:133],
    )
    assert same_bits(session.run(grouped, kernel.name)[:133], session.run(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_selected_kernels(session: Session, dtype: torch.dtype) -> None:
    """Calls without the name of a kernel, so that the library selects one."""
    for problem in (
        dense(1, 520, 96, dtype, FULL, "gelu_tanh"),
        dense(200, 136, 64, dtype, FULL),
        grouped_ragged_m((3, 0, 1, 64), 136, 64, dtype),
        grouped_ragged_k((64, 1, 0), 136, 72, dtype),
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
