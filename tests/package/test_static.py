"""What can be proven of the compiled kernels without running them: images, instructions, no spills."""

from __future__ import annotations

import functools
import re
import subprocess

import fp4gemm
import pytest
from fp4gemm import _native
from ptxemu.ptx_files import find_cuobjdump

PREPACKED = "sm90_nvfp4_gemm"
GEMM = re.compile(rf"gemm_kernel|packed_gemm|{PREPACKED}")
# One row in registers, TransformerEngine's cast: PlainLoader, TeCast, grouped or not, not looped.
COMMON_CAST = re.compile(r"quantize_rows.*PlainLoader.*TeCast.*ELb[01]ELb0ELi")


@functools.cache
def cuobjdump() -> str:
    path = find_cuobjdump()
    if path is None:
        pytest.skip("cuobjdump is not installed (requirements/test.txt)")
    return path


def dump(*options: str) -> str:
    library = _native.library_path(_native.CORE_LIBRARY)
    if not fp4gemm.kernels():
        pytest.skip("built without CUDA kernels")
    command = [cuobjdump(), *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def resources() -> list[tuple[str, str, dict[str, int]]]:
    """(architecture, mangled name, figures) of every kernel in the library."""
    found = []
    arch = name = ""
    for line in dump("--dump-resource-usage").splitlines():
        if match := re.search(r"^arch = (\S+)", line):
            arch = match[1]
        elif match := re.search(r"^\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            figures = {key: int(value) for key, value in re.findall(r"(\w+(?:\[0\])?):(\d+)", line)}
            found.append((arch, name, figures))
    return found


def test_every_kernel_of_the_table_is_in_the_library() -> None:
    """As many GEMM kernels stand in the images of an architecture as the table lists for it."""
    for table_arch, image in ((90, "sm_90a"), (100, "sm_100")):
        # One kernel on prepacked weights serves every mode, epilogue and output type.
        listed = {
            (kernel.tile, kernel.cluster, kernel.operand) if "prepacked" in kernel.operand else kernel.name
            for kernel in fp4gemm.kernels()
            if kernel.arch == table_arch
        }
        compiled = [name for arch, name, _ in resources() if arch.startswith(image) and GEMM.search(name)]
        assert len(compiled) == len(listed), image


def test_no_kernel_spills() -> None:
    """No local memory, no more registers than a thread has; no stack frame in GEMMs and common casts, a few
    bytes, outside of the mainloop, in GEMMs on prepacked weights with 16 warps.

    The other quantize kernels may have one: for blocks that are handed to the rare call for NaN and extreme
    amaxes, and in the widest norm, whose row takes all registers there are. Before 9.0, which emulates some
    conversions, common casts may spill a few bytes.
    """
    assert resources()
    for arch, name, figures in resources():
        assert figures["LOCAL"] == 0, (arch, name, figures)
        assert figures["REG"] <= 255, (arch, name, figures)
        assert figures["SHARED"] <= 48 * 1024, (arch, name, figures)  # what a kernel has without asking
        common = COMMON_CAST.search(name)
        strict = GEMM.search(name) or "prepare_groups" in name or (common and not arch.startswith("sm_8"))
        bound = 32 if PREPACKED in name else 0 if strict else 64 if common else 320
        assert figures["STACK"] <= bound, (arch, name, figures)


def test_images_are_those_promised() -> None:
    """Machine code for each family that was built and, for Blackwell's, portable code for newer members."""
    images = {arch for arch, name, _ in resources() if GEMM.search(name)}
    built = {kernel.arch for kernel in fp4gemm.kernels()}
    assert images == {{90: "sm_90a", 100: "sm_100f"}[arch] for arch in built}
    if 100 in built:
        assert "sm_100f" in dump("--list-ptx")


def test_every_kernel_waits_for_its_predecessor_first() -> None:
    """Overlapping launches are safe because nothing is read before the wait for the grid before.

    The kernels on prepacked weights are the exception: weights are read ahead of it, by bulk copies, and
    nothing else is.
    """
    for image in {arch for arch, name, _ in resources() if GEMM.search(name)}:
        sections = re.split(r"Function : ", dump("--dump-sass", "--gpu-architecture", image))
        for section in sections[1:]:
            name = section.split(None, 1)[0]
            if not re.search(f"gemm_kernel|prepare_groups|{PREPACKED}", name):
                continue
            before = section.split("ACQBULK", 1)
            assert len(before) == 2, f"{name} does not wait"
            assert not re.search(r"\b(LDG|UTMALDG|LD\.E|STG|ATOM)", before[0]), name


@pytest.mark.parametrize(
    ("arch", "function", "instruction"),
    [
        ("sm_90a", "gemm_kernel", r"HGMMA\.64x\d+x16\.F32"),
        ("sm_90a", "packed_gemm", r"HMMA\.16816\.F32"),
        ("sm_90a", PREPACKED, r"HMMA\.16816\.F32|HGMMA\.64x\d+x16\.F32"),
        ("sm_100", "gemm_kernel", r"UTCOMMA(\.2CTA)?\.4X"),
    ],
    ids=["sm90-wgmma", "sm90-packed-mma", "sm90-prepacked", "sm100-block-scaled"],
)
def test_kernels_use_the_tensor_cores_meant(arch: str, function: str, instruction: str) -> None:
    """Each GEMM kernel holds the matrix instruction of its operand type."""
    names = [name for image, name, _ in resources() if image.startswith(arch) and function in name]
    if not names:
        pytest.skip(f"no {arch} kernels in this build")
    images = {image for image, name, _ in resources() if name in names}
    for image in images:
        sections = re.split(r"Function : ", dump("--dump-sass", "--gpu-architecture", image))
        bodies = {section.split(None, 1)[0]: section for section in sections[1:]}
        for name in names:
            assert re.search(instruction, bodies[name]), (image, name)
