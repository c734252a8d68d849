"""The kernels use only features that NVIDIA's kernels, which pass on the emulator, use too."""

from __future__ import annotations

import json

import fp4gemm
import pytest
import torch
from problems import FULL, Problem, dense, grouped_ragged_k, grouped_ragged_m
from ptxemu.report import merge, uncalibrated
from session import KERNELS, Session, build_folder

# Features that no kernel of the calibration executes, with the reason why that is no gap.
_FP16 = "fp16 in place of bf16, whose stores of the same box are calibrated: TMA copies 2-byte elements"
_WORD = (
    "16-bit words in place of bf16, whose stores of the same box are calibrated: TMA copies 2-byte elements"
)
_GATED = "the gated kernels' D, stored as bytes: a narrower row and swizzle of the stores that are calibrated"
_BOX = "another box of a load or store whose type and swizzle are calibrated"
_RANK = "a third dimension of 1, which loads of other types have; rank 2 of this type is calibrated"
EXPLAINED: dict[int, dict[str, str]] = {
    100: {
        "tma: load dtype 14 rank 3 swizzle 128B box 128x128x1 cta_group::1": _RANK,
        "tma: store dtype 0 rank 2 swizzle 32B box 32x128": _GATED,
        "tma: store dtype 0 rank 3 swizzle 32B box 32x128x1": _GATED,
        "tma: store dtype 0 rank 3 swizzle 64B box 64x128x1": _GATED,
        "tma: store dtype 1 rank 2 swizzle 64B box 32x128": _WORD,
        "tma: store dtype 1 rank 3 swizzle 64B box 32x128x1": _WORD,
        "tma: store dtype 6 rank 3 swizzle 128B box 64x32x1": _FP16,
    },
    120: {
        "tma: load dtype 14 rank 3 swizzle 128B box 128x128x1 cta_group::1": _RANK,
        "tma: store dtype 0 rank 2 swizzle 32B box 32x64": _GATED,
        "tma: store dtype 0 rank 3 swizzle 32B box 32x64x1": _GATED,
        "tma: store dtype 1 rank 2 swizzle 64B box 32x64": _WORD,
        "tma: store dtype 1 rank 3 swizzle 64B box 32x64x1": _WORD,
        "tma: store dtype 7 rank 2 swizzle 128B box 32x64": _BOX,
        "tma: store dtype 7 rank 3 swizzle 128B box 32x64x1": _BOX,
    },
}

# Of SM120's kernels for few tokens, which are built with CUTLASS 4.5 or newer.
EXPLAINED_SWAPPED: dict[str, str] = {
    "opcode: stmatrix.sync.aligned.x2.trans.m8n8.shared.b16": "x4.trans and x2 are calibrated",
    "tma: load dtype 13 rank 2 swizzle 64B box 128x32 cta_group::1": _BOX,
    "tma: load dtype 13 rank 3 swizzle 128B box 256x32x1 cta_group::1": _BOX,
    "tma: load dtype 13 rank 3 swizzle 64B box 128x64x1 cta_group::1": _BOX,
}


def explained_of(arch: int) -> dict[str, str]:
    """The explanations of what the kernels of this build for an architecture execute."""
    has_swapped = arch == 120 and any(kernel.is_swapped for kernel in KERNELS if kernel.arch == arch)
    return EXPLAINED[arch] | (EXPLAINED_SWAPPED if has_swapped else {})


def problems_of(kernel: fp4gemm.KernelInfo) -> list[Problem]:
    activation = "swiglu" if kernel.epilogue == "gated" else "silu"
    if kernel.mode == "dense":
        return [dense(130, 272, 544, kernel.out_dtype, FULL, activation, kernel.operand)]
    problems = [grouped_ragged_m((5, 0, 130), 144, 96, kernel.out_dtype, FULL, activation, kernel.operand)]
    if kernel.epilogue == "rowcol":
        problems.append(grouped_ragged_k((5, 0, 130), 72, 136, kernel.out_dtype, operand=kernel.operand))
    return problems


@pytest.fixture
def calibrated(session: Session) -> dict[str, dict[str, object]]:
    """What the calibration programs have executed, by category.

    What SM120's kernels execute beyond the programs for SM120, such as edits of tensor maps, those for SM100
    have executed on the same emulator.
    """
    known: dict[str, dict[str, object]] = {}
    for arch in {session.arch, 100}:
        found = sorted(build_folder().glob(f"**/calibrated_sm{arch}.json"))
        if not found:
            pytest.skip(f"no calibrated_sm{arch}.json: the calibration was not run (make test does)")
        for category, names in json.loads(found[0].read_text()).items():
            known.setdefault(category, {}).update(names)
    return known


def test_executed_features_are_calibrated(session: Session, calibrated: dict[str, dict[str, object]]) -> None:
    """Compares opcodes, instruction descriptors, TMA modes, and copies to TMEM of every kernel."""
    session.emulator.reset_statistics()
    for kernel in KERNELS:
        if kernel.arch != session.arch:
            continue
        for problem in problems_of(kernel):
            session.run(problem, kernel.name, mode="lazy")
    executed = merge([session.emulator.statistics()])
    missing = uncalibrated(executed, calibrated)
    explained = explained_of(session.arch)
    unexplained = [name for name in missing if name not in explained]
    assert not unexplained, "\n".join(unexplained)
    unused = set(explained) - set(uncalibrated(executed, {}))
    assert not unused, f"explained, but never executed: {unused}"


def test_the_claim_can_fail(session: Session, calibrated: dict[str, dict[str, object]]) -> None:
    """The comparison reports a kernel's MMA if the calibrated set has none."""
    session.emulator.reset_statistics()
    session.run(dense(3, 8, 32, torch.bfloat16), mode="lazy")
    executed = merge([session.emulator.statistics()])
    known = {category: dict(names) for category, names in calibrated.items()}  # type: ignore[call-overload]
    mma = {100: "tcgen05.mma", 120: "mma.sync"}[session.arch]
    known["opcode"] = {name: 1 for name in known["opcode"] if not name.startswith(mma)}
    assert any(mma in name for name in uncalibrated(executed, known))
