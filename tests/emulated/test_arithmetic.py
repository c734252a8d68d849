"""The tensor cores' arithmetic as MMA-Sim models it: what keeps its bits, and the error of what does not."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.device import selftest
from fp4gemm.device.problems import problems as exercised_problems
from problems import PLAIN, Problem, dense, grouped_ragged_m
from session import KERNELS, Session, Sessions, describe, same_bits

DENSE = [kernel for kernel in KERNELS if (kernel.mode, kernel.operand) == ("dense", "nvfp4")]
FP32 = {kernel.arch: kernel.name for kernel in DENSE if kernel.out_dtype == torch.float32}


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "grouped"])
def test_sums_that_fit_in_fp32_keep_their_bits(session: Session, is_grouped: bool) -> None:
    if is_grouped:
        problem = grouped_ragged_m((5, 0, 130), 136, 544, torch.bfloat16)
    else:
        problem = dense(130, 136, 1088, torch.float32)
    got = session.run(problem, mode="lazy", arithmetic="truncated")
    assert same_bits(got, problem.want), describe(got, problem.want)


def product(m: int, n: int, k: int, spread: float) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """A product of normal numbers, its exact value, and the sum of its summands' magnitudes.

    spread: of the exponents of blocks' magnitudes.
    """
    gen = torch.Generator().manual_seed(1)
    operands = []
    for rows in (m, n):
        magnitudes = 2.0 ** (spread * torch.randn(rows, k // 16, 1, generator=gen))
        numbers = torch.randn(rows, k // 16, 16, generator=gen) * magnitudes
        operands.append(fp4gemm.quantize(numbers.flatten(1)))
    problem = dense(m, n, k, torch.float32, PLAIN)
    problem.a, problem.b = (operand.codes for operand in operands)
    problem.scale_a, problem.scale_b = (operand.scales for operand in operands)
    a, b = (reference.decode(x.codes, x.scales)[:r].double() for x, r in zip(operands, (m, n), strict=True))
    return problem, a @ b.T, a.abs() @ b.abs().T


@pytest.mark.parametrize("arithmetic", ["rounded", "truncated"])
def test_products_of_normal_numbers_are_exact(session: Session, arithmetic: str) -> None:
    """The block scales of a normal tensor are so close that no sum of its blocks leaves the bits of fp32."""
    problem, exact, _ = product(64, 136, 2048, spread=0)
    got = session.run(problem, FP32[session.arch], mode="lazy", arithmetic=arithmetic)
    assert torch.equal(got[:64, :136].double(), exact)


@pytest.mark.parametrize("arithmetic", ["rounded", "truncated"])
def test_the_error_of_other_sums(session: Session, arithmetic: str) -> None:
    """Each of the k / 64 steps rounds once, by at most half a unit of fp32, or truncates, by at most one."""
    m, n, k = 64, 136, 2048
    problem, exact, magnitude = product(m, n, k, spread=3)
    got = session.run(problem, FP32[session.arch], mode="lazy", arithmetic=arithmetic)[:m, :n].double()
    unit = 2.0**-24 if arithmetic == "rounded" else 2.0**-23
    assert ((got - exact).abs() <= k // 64 * unit * magnitude).all()
    assert not torch.equal(got, exact)


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in DENSE if not kernel.is_gated], ids=lambda kernel: kernel.name
)
def test_the_sign_of_a_block_scale_is_ignored(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    """The tensor cores read ue4m3, which has no sign: the self-test's problem, on the emulator."""
    tested = [problem for problem in exercised_problems() if problem.name == "negative block scales"]

    def run(row: fp4gemm.KernelInfo, problem: selftest.Problem) -> torch.Tensor:
        a, b, scale_a, scale_b, *_ = problem.operands
        (m, n), k = problem.shape, 2 * a.shape[1]
        want = torch.empty((m, n), dtype=row.out_dtype)
        return sessions.of(row).run(Problem(problem.name, m, n, k, a, scale_a, b, scale_b, want), row.name)

    result = selftest.Wanted(tested).compare(kernel, run)
    assert result.passed, result.reason
    assert result.ignores_scale_signs
