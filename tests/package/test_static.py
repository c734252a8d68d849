"""What can be proven of the compiled kernels without running them: images, instructions, no spills."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fp4gemm
import pytest
import sass
from fp4gemm import _native
from fp4gemm.kernel_table import KernelInfo
from ptxemu.ptx_files import find_cuobjdump

PREPACKED = "nvfp4_gemm"  # of SM90 and SM120
QUANTIZING = "MixedInputQuantizingConfig"
# e4m3, two row groups, one depth group, 256 tokens.
WIDEST_PROMOTED = "float_e4m3_tELi2ELi1ELi256ELi1ELi1ELi1ENS_16Sm90Nvfp4MachineELi64E"
DECODED = "sm90_gemm"  # of two fp16 operands
GEMM = re.compile(rf"gemm_kernel|packed_gemm|{DECODED}|{PREPACKED}")
# The families of kernels that are launched before the kernel ahead of them has ended.
WAITING = re.compile(
    rf"quantize_rows|quantize_to_records|make_row_records|gather_rows|route_slots|combine_rows|"
    rf"combine_rank_rows|combine_blocks|combine_parts|zero_outside_groups|swizzle_scales|swiglu_forward|swiglu_backward|"
    rf"gemm_kernel|prepare_groups|quantize_tiles|quantize_group_columns|quantize_squares|"
    rf"(?<!mx_)dequantize|{DECODED}|{PREPACKED}"
)
# One row in registers, not looped, of x itself: TransformerEngine's cast, grouped or not, and the FP8 cast.
COMMON_CAST = re.compile(r"quantize_rows(_fp8I.*PlainLoader|.*PlainLoader.*TeCast).*ELb[01]ELb0ELi")


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
def dumped_image(image: str) -> dict[str, list[str]]:
    return sass.function_lines(dump("--dump-sass", "--gpu-architecture", image).splitlines())


def machine_code(image: str) -> dict[str, list[str]]:
    """The lines of SASS of every kernel of an image, by mangled name. cuobjdump dumps sm_90a with sm_90."""
    family = image.removesuffix("a")
    return dumped_image(family if any(arch == family for arch, _, _ in resources()) else image)


def built_archs() -> set[int]:
    return {kernel.arch for kernel in fp4gemm.kernels()}


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


def compiled_as(kernel: KernelInfo) -> object:
    """What the rows of one compiled kernel have in common.

    One kernel on prepacked weights serves every mode, epilogue and output type, and one kernel of SM100 and
    SM120 both 16-bit output types.
    """
    if "prepacked" in kernel.operand:
        return kernel.tile, kernel.cluster, kernel.operand, kernel.fast_accum
    shared = kernel.arch >= 100 and kernel.out_dtype.itemsize == 2
    return kernel.name.removesuffix("_bf16").removesuffix("_fp16") if shared else kernel.name


def test_every_kernel_of_the_table_is_in_the_library() -> None:
    """As many GEMM kernels stand in the images of an architecture as the table lists for it."""
    for table_arch in built_archs():
        listed = {
            compiled_as(kernel)
            for kernel in fp4gemm.kernels()
            if kernel.arch == table_arch and kernel.operand != "fp16"
        }
        image = re.compile(rf"sm_{table_arch}[af]?$")
        compiled = [
            name
            for arch, name, _ in resources()
            if image.match(arch) and GEMM.search(name) and DECODED not in name
        ]
        # Hopper's dense kernels for eight fp16 tokens have a second one, which quantizes the tokens.
        quantizing = [name for name in compiled if QUANTIZING in name]
        tiles = {
            kernel.tile
            for kernel in fp4gemm.kernels()
            if kernel.arch == table_arch == 90 and kernel.operand == "prepacked" and kernel.tile[0] == 8
        }
        assert len(quantizing) == len(tiles), table_arch
        assert len(compiled) - len(quantizing) == len(listed), table_arch


def test_every_tile_of_decoded_operands_is_in_the_library() -> None:
    """The kernels of two fp16 operands serve every epilogue and output type. The tiles of those with the
    schedule of dense products and groups that are ragged in m are the tiles of the table; those with the
    schedule of groups that are ragged in k are the tiles of its grouped rows.
    """
    rows = [kernel for kernel in fp4gemm.kernels() if kernel.operand == "fp16"]
    if not rows:
        pytest.skip("no sm_90a kernels in this build")
    compiled: dict[str, set[str]] = {"RaggedM": set(), "RaggedK": set()}
    for _, name, _ in resources():
        if DECODED in name:
            tile = re.search(r"Tile(\d+x\d+)", name)
            schedule = re.search(r"Sm90(RaggedM|RaggedK)Schedule", name)
            assert tile is not None, name
            assert schedule is not None, name
            compiled[schedule[1]].add(tile[1])
    grouped = {f"{kernel.tile[0]}x{kernel.tile[1]}" for kernel in rows if kernel.mode == "grouped"}
    assert compiled["RaggedM"] == {f"{kernel.tile[0]}x{kernel.tile[1]}" for kernel in rows}
    assert compiled["RaggedK"] == grouped


def test_no_kernel_spills() -> None:
    """No kernel has local memory. GEMMs and common casts have no stack frame, and GEMMs on prepacked weights
    with 16 warps have one of a few bytes, which is used outside of the mainloop, as have SM120's
    (test_sm120_kernels_spill_outside_of_the_mainloop). The widest tile of FP8 tokens with promoted sums has
    one of 64 bytes (test_the_widest_promoted_tile_spills_little).

    The other quantize kernels may have a stack frame, as the widest norm has, whose row fills all registers.
    Before 9.0, where some conversions are emulated, common casts may spill a few bytes.
    """
    assert resources()
    for arch, name, figures in resources():
        assert figures["LOCAL"] == 0, (arch, name, figures)
        assert figures["REG"] <= 255, (arch, name, figures)
        assert figures["SHARED"] <= 48 * 1024, (arch, name, figures)  # what a kernel has without asking
        common = COMMON_CAST.search(name)
        strict = GEMM.search(name) or "prepare_groups" in name or (common and not arch.startswith("sm_8"))
        few = PREPACKED in name or ("gemm_kernel" in name and arch.startswith("sm_120"))
        bound = 64 if WIDEST_PROMOTED in name else 48 if few else 0 if strict else 64 if common else 320
        assert figures["STACK"] <= bound, (arch, name, figures)


def test_sm120_kernels_spill_outside_of_the_mainloop() -> None:
    """Some spill two words, the coordinates of a tile. The innermost loop of MMAs does not access them.

    The loop holds a third of the MMAs or more; the others belong to the first and the last k tile.
    """
    kernels = [name for arch, name, _ in resources() if arch.startswith("sm_120") and "gemm_kernel" in name]
    if not kernels:
        pytest.skip("no sm_120 kernels in this build")
    (image,) = {arch for arch, name, _ in resources() if name in kernels}
    for name in kernels:
        code = sass.parse(machine_code(image)[name])
        mmas = [found.address for found in code if found.base in ("OMMA", "QMMA")]
        spills = [found.address for found in code if found.base in ("LDL", "STL")]
        branches = [(found.target, found.address) for found in code if found.base == "BRA"]
        loops = [range(first, last) for first, last in branches if first is not None and first < last]
        mainloop = min((loop for loop in loops if any(at in loop for at in mmas)), key=len)
        assert sum(at in mainloop for at in mmas) * 3 >= len(mmas) > 0, name
        assert not any(at in mainloop for at in spills), name


def test_the_widest_promoted_tile_spills_little() -> None:
    """Its mainloop, over pairs of chunks, has at most 8 accesses to local memory for 32 wgmmas."""
    names = [name for _, name, _ in resources() if WIDEST_PROMOTED in name]
    if not names:
        pytest.skip("no sm_90a kernels in this build")
    (name,) = names
    code = sass.parse(machine_code("sm_90a")[name])
    mmas = [found.address for found in code if found.base == "QGMMA"]
    spills = [found.address for found in code if found.base in ("LDL", "STL")]
    branches = [(found.target, found.address) for found in code if found.base == "BRA"]
    loops = [range(first, last) for first, last in branches if first is not None and first < last]
    mainloop = min((loop for loop in loops if sum(at in loop for at in mmas) >= 32), key=len)
    assert sum(at in mainloop for at in mmas) == 32
    assert sum(at in mainloop for at in spills) <= 8


def test_images_are_those_promised() -> None:
    """Machine code for each family with GEMM kernels, and portable code for newer members of families."""
    images = {arch for arch, name, _ in resources() if GEMM.search(name)}
    families = _native.text(_native.core().fp4gemm_built_archs()).split()
    with_kernels = [name for name in families if int(name.rstrip("af")) in built_archs()]
    assert images == {f"sm_{name}" for name in with_kernels}
    portable = dump("--list-ptx")
    for name in with_kernels:
        assert (f"sm_{name}" in portable) == name.endswith("f")


# Accesses to global memory that may run ahead of the wait, by kernel: at most so many instructions of a name.
AHEAD_OF_WAIT: dict[str, dict[str, int]] = {
    PREPACKED: {
        # The first weights of a dense product, one copy for each 64 rows of a tile. The caller promises that
        # they are complete (docs/hopper.md).
        "UBLKCP.S.G": 3,
        # The dynamic tile scheduler opens its counter and draws from it. It has a counter only where there
        # are groups, and with groups every thread has waited before. These are two parameters, of which the
        # walk knows one.
        "ATOMG.E.ADD.64.STRONG.GPU": 2,
        "STG.E.64.STRONG.GPU": 2,
    },
    # The same, without groups. The tokens, which the consumers quantize, are not read ahead of the wait.
    QUANTIZING: {"UBLKCP.S.G": 1},
}
# Kernels that are launched after the end of the kernel before them, and therefore do not wait.
NOT_OVERLAPPED = re.compile(
    r"columns_amax|tensor_amax|group_amax|mx_quantize|mx_dequantize|mx_decode|expand_codes|prepack|nothing"
    r"|packed_gemm|search_scales|row_amaxes"
)


def family_of(name: str) -> str | None:
    """The family of a kernel that waits for the kernel before it."""
    family = WAITING.search(name)
    return QUANTIZING if QUANTIZING in name else family and family[0]


def overlapping_images() -> list[str]:
    """An image of each architecture that has griddepcontrol.wait; sm_90 stands for sm_90a too."""
    images = {arch for arch, _, _ in resources() if int(re.findall(r"\d+", arch)[0]) >= 90}
    return sorted(images - {f"{arch}a" for arch in images})


def test_nothing_is_read_or_written_ahead_of_the_wait() -> None:
    """Overlapping launches are safe because no thread touches memory before it waits for the kernel before,
    and because no load behind the wait may return what memory held ahead of it (the tests below).

    The walk follows every branch of every kernel from its entry. What it finds ahead of a wait must be in the
    table above. A kernel without a wait must be one that is launched without overlap.
    """
    waiting: Counter[str] = Counter()
    for image in overlapping_images():
        for name, lines in machine_code(image).items():
            if not any(sass.WAIT in line for line in lines):
                assert NOT_OVERLAPPED.search(name), f"{name} of {image} does not wait"
                continue
            family = family_of(name)
            assert family is not None, f"{name} of {image} waits, and is in no family of kernels that do"
            waiting[family] += 1
            ahead = Counter(found.name for found in sass.accesses_before_wait(sass.parse(lines)))
            allowed = AHEAD_OF_WAIT.get(family, {})
            assert not ahead - Counter(allowed), f"{name} of {image}: {ahead}"
    families = {"quantize_rows"}
    if 90 in built_archs():
        families |= {DECODED, PREPACKED}
    if built_archs() & {100, 120}:
        families |= {"gemm_kernel", "prepare_groups"}
    assert families <= set(waiting), waiting


def test_the_walk_finds_a_missing_wait() -> None:
    """Without any one of its waits, a kernel of each family has accesses ahead of the others."""
    for image in overlapping_images():
        seen = set()
        for name, lines in machine_code(image).items():
            family = family_of(name)
            if family is None or family in seen:
                continue
            seen.add(family)
            code = sass.parse(lines)
            allowed = Counter(AHEAD_OF_WAIT.get(family, {}))
            for i, instruction in enumerate(code):
                if instruction.base == sass.WAIT:
                    mutated = [*code[:i], instruction._replace(name="NOP"), *code[i + 1 :]]
                    ahead = Counter(found.name for found in sass.accesses_before_wait(mutated))
                    assert ahead - allowed, f"{name} of {image} without the wait at {instruction.address:#x}"


def test_overlapping_kernels_have_no_noncoherent_loads() -> None:
    """The kernel before may write an operand while a kernel that overlaps with it runs: ld.global.nc, which
    __ldg is, need not see that. The loads are those of load_after_wait.hpp.

    Kernels that do not overlap have __ldg. The test finds them, so that it knows these loads in every image.
    """
    for image in overlapping_images():
        kernels = {name: sass.parse(lines) for name, lines in machine_code(image).items()}
        found = {
            name: Counter(x.name for x in sass.noncoherent_loads(code)) for name, code in kernels.items()
        }
        overlapping = {name for name, code in kernels.items() if any(x.base == sass.WAIT for x in code)}
        for name in overlapping:
            assert not found[name], f"{name} of {image}: {found[name]}"
        assert any(loads for name, loads in found.items() if name not in overlapping), image


def test_a_noncoherent_load_is_found_in_every_family() -> None:
    """Any one load of a kernel of each family, with the modifier that ld.global.nc has."""
    for image in overlapping_images():
        seen = set()
        for name, lines in machine_code(image).items():
            family = family_of(name)
            if family is None or family in seen:
                continue
            code = sass.parse(lines)
            loads = [i for i, instruction in enumerate(code) if instruction.base == "LDG"]
            seen.update([family] if loads else [])
            for i in loads:
                mutant = code[i]._replace(name=f"{code[i].name}.CONSTANT")
                assert sass.noncoherent_loads([*code[:i], mutant, *code[i + 1 :]]) == [mutant], name
        assert "quantize_rows" in seen, image


def test_a_cluster_releases_its_arrivals_before_a_cta_exits() -> None:
    """The consumers of a Hopper kernel of this library arrive on mbarriers of the other CTA of their cluster.

    Its last arrive on the barrier of the cluster is a release, which ptxas makes a fence and the arrive. So
    the other CTA does not exit before these arrivals.
    """
    if 90 not in built_archs():
        pytest.skip("no sm_90 kernels in this build")
    seen = Counter()
    for name, lines in machine_code("sm_90a").items():
        code = sass.parse(lines)
        arrives = [i for i, instruction in enumerate(code) if instruction.base == "UCGABAR_ARV"]
        own = re.search(rf"{PREPACKED}|{DECODED}", name)
        if own and arrives:
            before = [instruction.name for instruction in code[arrives[-1] - 4 : arrives[-1]]]
            assert "MEMBAR.ALL.GPU" in before, f"{name}: {before}"
            assert len(arrives) == 2, name
            seen[own[0]] += 1
    assert len(seen) == 2, seen


@pytest.mark.parametrize(
    ("arch", "function", "instruction"),
    [
        ("sm_90a", DECODED, r"HGMMA\.64x\d+x16\.F32"),
        ("sm_90a", "packed_gemm", r"HMMA\.16816\.F32"),
        ("sm_90a", PREPACKED, r"HMMA\.16816\.F32|HGMMA\.64x\d+x16\.F32|QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
        ("sm_120", PREPACKED, r"HMMA\.16816\.F32"),
        ("sm_100", r"gemm_kernel.*5Nvfp4", r"UTCOMMA(\.2CTA)?\.4X"),
        ("sm_100", r"gemm_kernel.*5Mxfp8", r"UTCQMMA"),
        ("sm_100", r"gemm_kernel.*5Mxfp4", r"UTCOMMA(?!\S*\.4X)"),
        ("sm_100", r"gemm_kernel.*10Mxfp8Mxfp4", r"UTCQMMA"),
        ("sm_120", r"gemm_kernel.*5Nvfp4", r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X"),
        ("sm_120", r"gemm_kernel.*5Mxfp8", r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8"),
        ("sm_120", r"gemm_kernel.*5Mxfp4", r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.E8"),
        ("sm_120", r"gemm_kernel.*10Mxfp8Mxfp4", r"QMMA\.SF\.16832\.F32\.E4M3\.E2M1\.E8"),
    ],
    ids=[
        "sm90-decoded",
        "sm90-packed-mma",
        "sm90-prepacked",
        "sm120-prepacked",
        "sm100-nvfp4",
        "sm100-mxfp8",
        "sm100-mxfp4",
        "sm100-mxfp8-mxfp4",
        "sm120-nvfp4",
        "sm120-mxfp8",
        "sm120-mxfp4",
        "sm120-mxfp8-mxfp4",
    ],
)
def test_kernels_use_the_tensor_cores_meant(arch: str, function: str, instruction: str) -> None:
    """Each GEMM kernel holds the matrix instruction of its operand type."""
    names = [name for image, name, _ in resources() if image.startswith(arch) and re.search(function, name)]
    if not names:
        pytest.skip(f"no {arch} kernels in this build")
    for image in {image for image, name, _ in resources() if name in names}:
        for name in names:
            assert any(re.search(instruction, line) for line in machine_code(image)[name]), (image, name)


def moved_registers(lines: list[str]) -> tuple[set[int], set[int]]:
    """The numbers of registers that setmaxnreg gives to warpgroups of a kernel: fewer, and more."""
    found: dict[str, set[int]] = {"DEALLOC": set(), "TRY_ALLOC": set()}
    for instruction in sass.parse(line for line in lines if "USETMAXREG" in line):
        found[instruction.name.split(".")[1]].add(int(instruction.operands[-1], 16))
    return found["DEALLOC"], found["TRY_ALLOC"]


def test_setmaxnreg_takes_no_more_registers_than_the_kernel_has() -> None:
    """A warpgroup waits for ever for registers that no other gives back.

    A CTA starts with the registers that ptxas reports for each of its threads, and fills the register file.
    In the grouped kernels of SM100 one warpgroup, the epilogue's, asks for more; elsewhere all but one do.
    """
    registers = {(arch.removesuffix("a"), name): figures["REG"] for arch, name, figures in resources()}
    moving: Counter[str] = Counter()
    for image in overlapping_images():
        for name, lines in machine_code(image).items():
            fewer, more = moved_registers(lines)
            if not fewer and not more:
                continue
            launched = registers[image.removesuffix("a"), name]
            warpgroups = 65536 // (128 * launched)
            growing = 1 if image.startswith("sm_10") else warpgroups - 1
            taken = growing * max(more) + (warpgroups - growing) * max(fewer)
            assert taken <= warpgroups * launched, f"{name}: {taken} of {warpgroups * launched}"
            assert max(fewer) < launched < min(more), name
            assert all(24 <= number <= 256 and number % 8 == 0 for number in fewer | more), name
            moving[image[:5]] += 1
    assert set(moving) == {f"sm_{arch}"[:5] for arch in built_archs() if arch >= 90}


def find_nvcc() -> str | None:
    """nvcc on the PATH, else that of the wheels in this environment, else None."""
    beside = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/nvcc"))
    return shutil.which("nvcc") or (str(beside[-1]) if beside else None)


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a", "sm_121f"])
def test_ptxas_accepts_sm120_kernels_for_each_of_its_devices(arch: str, tmp_path: Path) -> None:
    """The PTX of a unit of the family 120f is legal for 12.0 and for 12.1 (DGX Spark)."""
    if 120 not in built_archs():
        pytest.skip("no sm_120 kernels in this build")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    library = _native.library_path(_native.CORE_LIBRARY)
    command = [cuobjdump(), "--extract-ptx", "sm_120", str(Path(library).resolve())]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    units = [path for path in tmp_path.glob("*.ptx") if "gemm_kernel" in path.read_text()]
    unit = min(units, key=lambda path: path.stat().st_size)
    command = [nvcc, f"-arch={arch}", "-cubin", "-o", str(tmp_path / "unit.cubin"), str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
