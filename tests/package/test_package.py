"""The installed package for C and C++ users: it is found, links, and exports the C ABI alone."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import fp4gemm
import pytest
from toolchain import cutlass_headers, nvcc_path

REPO = Path(__file__).resolve().parents[2]
CONSUMER = REPO / "cpp" / "tests" / "consumer"
ON_A_GPU = ("use_gpu_c", "use_gpu_cpp", "use_experts_c")  # programs of the consumer
SYSTEM_LIBRARIES = {
    "libstdc++",
    "libgcc_s",
    "libc",
    "libm",
    "libdl",
    "librt",
    "libpthread",
    "ld-linux-x86-64",
}
FATBIN_MAGIC, PTX, ELF = 0xBA55ED50, 1, 2


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Returns the output of a command, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=os.environ | (env or {})
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def tool(name: str) -> str:
    """The path of a program in this Python's environment, else on the PATH."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def build(
    source: Path, into: Path, *defines: str, env: dict[str, str] | None = None, target: str = "all"
) -> Path:
    """Configures a CMake project and builds a target of it; returns its build folder."""
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    run(
        tool("cmake"),
        "-G",
        "Ninja",
        "-S",
        source,
        "-B",
        into,
        ninja,
        "-DCMAKE_BUILD_TYPE=Release",
        *defines,
        env=env,
    )
    run(tool("cmake"), "--build", into, "--target", target, env=env)
    return into


def without_cuda() -> list[str]:
    return [
        "-DFP4GEMM_CUDA_ARCHS=none",
        "-DFP4GEMM_BUILD_TORCH=OFF",
        f"-DPython3_EXECUTABLE={sys.executable}",
    ]


def check_consumer(folder: Path) -> None:
    """Runs the C and the C++ program, which exit with 1 if their results are wrong."""
    report = run(folder / "use_c")
    assert report.startswith(f"fp4gemm {importlib.metadata.version('fp4gemm')}, CUDA ")
    assert "invalid argument: k: is 4090, must be a" in report
    assert "9.0: " in run(folder / "use_cpp")
    for program in ON_A_GPU:
        assert (folder / program).is_file()


@pytest.fixture(scope="module")
def cmake_dir() -> Path:
    return Path(run(sys.executable, "-m", "fp4gemm", "cmake-dir").strip())


@pytest.fixture(scope="module")
def package(cmake_dir: Path) -> Path:
    """The folder of the installed package, which is the CMake prefix."""
    return cmake_dir.parent.parent.parent


# ---- found and linked ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def consumer(cmake_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of a project that found the installed package."""
    return build(CONSUMER, tmp_path_factory.mktemp("consumer"), f"-Dfp4gemm_DIR={cmake_dir}")


def test_consumer_of_installed_package(consumer: Path) -> None:
    check_consumer(consumer)


@pytest.mark.parametrize("program", ON_A_GPU)
def test_consumer_on_a_gpu(consumer: Path, program: str) -> None:
    """The C and C++ programs compute on the GPU and compare with the host; without one they say why not."""
    report = run(consumer / program).strip()
    if report.startswith("skipped: "):
        assert not fp4gemm.is_supported("cuda")
        pytest.skip(report.removeprefix("skipped: "))
    assert report
    assert all(": 0 of " in line for line in report.splitlines()), report


def test_consumer_of_moved_package(package: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(package, tmp_path / "elsewhere")
    check_consumer(build(CONSUMER, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={moved}"))


def test_consumer_of_moved_cmake_install(tmp_path: Path) -> None:
    tests_off = "-DFP4GEMM_BUILD_TESTS=OFF"
    built = build(REPO, tmp_path / "library", tests_off, *without_cuda())
    run(tool("cmake"), "--install", built, "--prefix", tmp_path / "prefix")
    moved = (tmp_path / "prefix").rename(tmp_path / "elsewhere")
    shutil.rmtree(built)
    assert sorted(path.suffix for path in (moved / "lib").glob("libfp4gemm.so*"))[-1] == ".so"
    check_consumer(build(CONSUMER, tmp_path / "consumer", f"-DCMAKE_PREFIX_PATH={moved}"))


def test_consumer_by_add_subdirectory(tmp_path: Path) -> None:
    check_consumer(build(CONSUMER, tmp_path, f"-DFP4GEMM_SOURCE_DIR={REPO}", *without_cuda()))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["90a", "100f", "120f"])
def test_consumer_kernel_with_our_epilogue(cmake_dir: Path, tmp_path: Path, arch: str) -> None:
    """A user's own CUTLASS kernel compiles with the epilogue, and is run on a GPU that it serves."""
    nvcc = nvcc_path(arch)
    cutlass_headers()
    # The folder of libcudart_static.a in nvcc's wheels.
    env = {"LIBRARY_PATH": str(nvcc.parent.parent / "lib")}
    if ccache := shutil.which("ccache"):
        # CMakeLists.txt has the same settings.
        env |= {"CCACHE_DEPEND": "1", "CCACHE_NAMESPACE": "fp4gemm", "CCACHE_COMPILERCHECK": "content"}
        env |= {"CCACHE_NOHASHDIR": "1", "CMAKE_CUDA_COMPILER_LAUNCHER": ccache}
    defines = [f"-Dfp4gemm_DIR={cmake_dir}", "-DWITH_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    defines += [f"-DEPILOGUE_ARCHS={arch}", f"-DPython3_EXECUTABLE={sys.executable}"]
    program = f"use_epilogue_{arch}"
    report = run(build(CONSUMER, tmp_path, *defines, env=env, target=program) / program).strip()
    absent = f"no GPU of architecture {arch[:-1]}; the kernel accepts the problem"
    assert report in {absent, "0 of 27200 elements are wrong"}


def test_missing_cutlass_is_explained(cmake_dir: Path, tmp_path: Path) -> None:
    command = [
        tool("cmake"),
        "-G",
        "Ninja",
        "-S",
        CONSUMER,
        "-B",
        tmp_path,
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
    ]
    command += [f"-Dfp4gemm_DIR={cmake_dir}", "-DWITH_CUDA=ON", f"-DCUTLASS_DIR={tmp_path}"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode != 0
    assert "has no include/cutlass/version.h" in re.sub(r"\s+", " ", done.stderr)


# ---- what is in the libraries --------------------------------------------------------------------


def dynamic(library: Path, tag: str) -> list[str]:
    """The values of a tag in a library's dynamic section."""
    text = run(tool("readelf"), "--dynamic", "--wide", library)
    return re.findall(rf"\({tag}\).*?\[(.*?)\]", text)


def stem(soname: str) -> str:
    return soname.split(".so")[0]


def test_c_library_exports_the_headers_and_nothing_else(package: Path) -> None:
    headers = "\n".join(path.read_text() for path in (package / "include" / "fp4gemm").glob("*.h"))
    declared = set(re.findall(r"^FP4GEMM_API [\w\s*]*?\b(fp4gemm_\w+)\(", headers, re.MULTILINE))
    listing = run(tool("nm"), "--dynamic", "--defined-only", package / "lib" / "libfp4gemm.so")
    assert {line.split()[-1] for line in listing.splitlines()} == declared


def test_c_library_needs_only_the_system(package: Path) -> None:
    library = package / "lib" / "libfp4gemm.so"
    assert {stem(name) for name in dynamic(library, "NEEDED")} <= SYSTEM_LIBRARIES
    assert dynamic(library, "RPATH") + dynamic(library, "RUNPATH") == []


def test_torch_library_finds_ours_beside_itself(package: Path) -> None:
    library = package / "lib" / "libfp4gemm_torch.so"
    assert dynamic(library, "RPATH") + dynamic(library, "RUNPATH") == ["$ORIGIN"]
    needed = {stem(name) for name in dynamic(library, "NEEDED")}
    assert needed - SYSTEM_LIBRARIES == {"libfp4gemm", "libtorch", "libtorch_cpu"}


def test_torch_library_uses_the_stable_abi_only(package: Path) -> None:
    undefined = run(tool("nm"), "--dynamic", "--undefined-only", package / "lib" / "libfp4gemm_torch.so")
    names = [line.split()[-1] for line in undefined.splitlines()]
    assert [name for name in names if re.match(r"_Z\w*(2at|3c10|5torch)", name)] == []


@pytest.mark.parametrize("name", ["libfp4gemm.so", "libfp4gemm_torch.so"])
def test_no_path_of_the_build_machine(package: Path, name: str) -> None:
    assert bytes(REPO) not in (package / "lib" / name).read_bytes()


def images(library: Path) -> set[tuple[int, int]]:
    """The kind (PTX or ELF) and architecture of every device image in a library's .nv_fatbin section."""
    data = library.read_bytes()
    found = set()
    start = -1
    magic = struct.pack("<I", FATBIN_MAGIC)
    while (start := data.find(magic, start + 1)) >= 0:
        _, _, header_bytes, total_bytes = struct.unpack_from("<IHHQ", data, start)
        at, end = start + header_bytes, start + header_bytes + total_bytes
        while at < end:
            kind, _, entry_header_bytes, payload_bytes = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            found.add((kind, arch))
            at += entry_header_bytes + payload_bytes
    return found


def test_device_images_are_those_promised(package: Path) -> None:
    """The library has the images that the table in cpp/cmake/archs.cmake lists."""
    promised = {
        "80": {(ELF, 80)},
        "90a": {(ELF, 90), (PTX, 90)},
        "100f": {(ELF, 100), (PTX, 100)},
        "120f": {(ELF, 120), (PTX, 120)},
    }
    library = package / "lib" / "libfp4gemm.so"
    built_archs = ctypes.CDLL(str(library)).fp4gemm_built_archs
    built_archs.restype = ctypes.c_char_p
    families = built_archs().decode().split()
    expected = set().union(*(promised[family] for family in families))
    assert images(library) == expected


def test_one_wheel_serves_every_python() -> None:
    wheel = importlib.metadata.distribution("fp4gemm").read_text("WHEEL")
    assert wheel is not None
    assert re.findall(r"^Tag: (.*)$", wheel, re.MULTILINE) == [f"py3-none-linux_{os.uname().machine}"]
