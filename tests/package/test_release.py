"""The steps of `make release` that need no build: versions, the contents of the sdist, and which Pythons."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import fp4gemm
import pytest

REPO = Path(__file__).resolve().parents[2]
RELEASED = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-31\n\n- A change.\n\n## [0.1.0] - 2026-12-01\n"
)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", REPO / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_of_the_header_is_that_of_the_library(release: ModuleType) -> None:
    assert release.header_version(release.HEADER.read_text()) == fp4gemm.__version__


def test_this_commit_may_be_released(release: ModuleType) -> None:
    """Without a tag: the changelog has the changes since the last version, and the version is a new one."""
    changelog = (REPO / "CHANGELOG.md").read_text()
    assert release.check_versions(fp4gemm.__version__, changelog, "").startswith(fp4gemm.__version__)


def test_version_changelog_and_tag_agree(release: ModuleType) -> None:
    assert release.check_versions("0.2.0", RELEASED, "v0.2.0") == "0.2.0, tagged v0.2.0"
    assert "trial" in release.check_versions("0.3.0", RELEASED, "")


@pytest.mark.parametrize(
    ("version", "changelog", "tag", "text"),
    [
        ("0.2.0", RELEASED, "v0.2.1", "the tag is v0.2.1, must be v0.2.0"),
        ("0.3.0", RELEASED, "v0.3.0", "the newest release is 0.2.0, must be 0.3.0"),
        ("0.2.0", RELEASED.replace("ed]\n", "ed]\n\n- More.\n", 1), "v0.2.0", "[Unreleased] must be empty"),
        (
            "0.2.0",
            RELEASED.replace("ed]\n", "ed]\n\n- More.\n", 1),
            "",
            "0.2.0 is released, and CHANGELOG.md",
        ),
        ("0.2.0", RELEASED.replace("[Unreleased]", "Next"), "", "must be [Unreleased]"),
        ("0.2.0", RELEASED.replace(" - 2027-01-31", ""), "", "must be named like [0.1.0] - 2026-11-23"),
        ("0.1.0", "# Changelog\n\n## [Unreleased]\n", "v0.1.0", "the newest release is None, must be 0.1.0"),
    ],
    ids=["tag", "changelog", "pending", "not-raised", "no-unreleased", "no-date", "no-section"],
)
def test_what_does_not_agree_is_named(
    release: ModuleType, version: str, changelog: str, tag: str, text: str
) -> None:
    with pytest.raises(release.Wrong, match=re.escape(text)):
        release.check_versions(version, changelog, tag)


def test_an_incomplete_sdist_is_refused(release: ModuleType) -> None:
    tracked = {"README.md", "cpp/a.cu", "bench/x.py", ".ci/run"}
    release.check_sdist({"README.md", "cpp/a.cu", "PKG-INFO"}, tracked)
    with pytest.raises(release.Wrong, match=r"lacks 1 tracked files: cpp/a\.cu"):
        release.check_sdist({"README.md"}, tracked)


def test_a_wheel_that_pypi_refuses(release: ModuleType) -> None:
    release.check_size("a.whl", 100 * 2**20)
    with pytest.raises(release.Wrong, match=r"a\.whl has 104857601 bytes, must have at most 104857600,"):
        release.check_size("a.whl", 100 * 2**20 + 1)


WHEEL = ["fp4gemm/__init__.py", "fp4gemm-1.dist-info/licenses/LICENSE", "fp4gemm-1.dist-info/licenses/NOTICE"]
HEADERS = [f"fp4gemm/share/kernel_headers/{name}" for name in ("cute/a.hpp", "cutlass_evt/b.hpp", "cmath")]
METADATA = "Name: fp4gemm\nLicense-File: LICENSE\nLicense-File: NOTICE\n"


def test_licences_of_a_wheel(release: ModuleType) -> None:
    notice = (REPO / "NOTICE").read_text()
    assert release.check_licences([*WHEEL, *HEADERS], METADATA, notice) == ["LICENSE", "NOTICE"]
    with pytest.raises(
        release.Wrong, match=r"METADATA names the licence files \['NOTICE'\], must name LICENSE"
    ):
        release.check_licences(WHEEL, METADATA.replace("License-File: LICENSE\n", ""), notice)
    with pytest.raises(release.Wrong, match="lacks the licence files NOTICE, which METADATA names"):
        release.check_licences(WHEEL[:-1], METADATA, notice)
    with pytest.raises(release.Wrong, match="headers in share/kernel_headers/boost, which NOTICE does not"):
        release.check_licences([*WHEEL, *HEADERS, HEADERS[0].replace("cute", "boost")], METADATA, notice)


def test_links_are_followed_in_folders_that_are_shown(release: ModuleType, tmp_path: Path) -> None:
    """The Python of an environment is a link to python3, which may be a link to /usr/bin/python3."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "python3.11").write_text("")
    (tmp_path / "usr" / "python3").symlink_to("python3.11")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(tmp_path / "usr" / "python3")
    (tmp_path / "bin" / "python").symlink_to("python3")
    lines = release.visible(Path("/r"), [tmp_path / "bin", tmp_path / "bin" / "python"])
    assert [line.split()[0] for line in lines] == [
        "mkdir",
        "mkdir",
        "mount",
        "mkdir",
        "ln",
        "mkdir",
        "touch",
        "mount",
    ]
    assert lines[4] == f"ln -s python3.11 /r{tmp_path}/usr/python3"
    assert lines[7] == f"mount --rbind {tmp_path}/usr/python3.11 /r{tmp_path}/usr/python3.11"


def test_the_root_has_nothing_else(release: ModuleType, tmp_path: Path) -> None:
    """This Python starts in it, and finds no home, no shell, no compiler, no network and no checkout."""
    try:
        release.check_namespaces()
    except release.Wrong as error:
        pytest.skip(str(error))
    (tmp_path / "root").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note").write_text("seen")
    root = release.Root(tmp_path / "root", Path(sys.prefix), [tmp_path / "work"])
    absent = [REPO / "README.md", Path.home() / ".cache", "/bin/sh", "/usr/bin/cc", "/etc/passwd"]
    code = "import os, sys, socket; print(*map(os.path.exists, sys.argv[2:]), open(sys.argv[1]).read())"
    shown = root.run(Path(sys.prefix) / "bin" / "python", "-c", code, tmp_path / "work" / "note", *absent)
    assert shown.split() == ["False"] * len(absent) + ["seen"]
    network = "import socket; print([name for _, name in socket.if_nameindex() if name != 'lo'])"
    shown = root.run(Path(sys.prefix) / "bin" / "python", "-c", network)
    assert "eth" not in shown
    assert list((tmp_path / "root").iterdir()) == []
    with pytest.raises(release.Wrong, match=r"import absent_module[\s\S]*ModuleNotFoundError"):
        root.run(Path(sys.prefix) / "bin" / "python", "-c", "import absent_module")


def test_pythons_are_found(release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of each version; a program that is no Python, or that fails, is passed over."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, body in (
        ("python3", f'exec {sys.executable} "$@"'),
        ("python3.11", f'exec {sys.executable} "$@"'),
        ("python3.99", "exit 1"),
        ("python3-config", "echo 3 12"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert release.pythons([]) == [tmp_path / "python3"]
    assert release.pythons([sys.executable]) == [Path(sys.executable)]
    with pytest.raises(release.Wrong, match=r"--python: python3\.98 is no program that is found"):
        release.pythons([sys.executable, "python3.98"])


def test_steps_of_the_workflow() -> None:
    """GitHub Actions runs what exists here, and the Pythons of a release are those that are supported."""
    import yaml

    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    makefile = (REPO / "Makefile").read_text()
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step and not step["run"].startswith("sudo ")]
    assert len(commands) == len(workflow["jobs"])
    for command in commands:
        target = command.removeprefix("make ")
        found = (REPO / command).is_file() if target == command else f"\n{target}:" in makefile
        assert found, f"the workflow runs {command!r}"
    (versions,) = (
        step["with"]["python-version"].split()
        for step in workflow["jobs"]["release"]["steps"]
        if step.get("uses", "").startswith("actions/setup-python")
    )
    oldest = re.search(r'requires-python = ">=(.+)"', (REPO / "pyproject.toml").read_text())
    assert oldest is not None
    assert versions[0] == oldest[1]


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_actions_are_pinned_by_hash() -> None:
    for line in (REPO / ".github" / "workflows" / "ci.yml").read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"uses: actions/[\w-]+@[0-9a-f]{40} # v\d", line), line


def test_links_of_the_description_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = module_of(REPO / "docs" / "_site" / "pypi_readme.py")
    text = "[a](docs/a.md#b) ![p](docs/p.svg) [w](https://x.y) [h](#here)\n```sh\n[a](b)\n```\n[c](../d)"
    assert readme.absolute(text, "https://host/me/it", "v1.2.3") == (
        "[a](https://host/me/it/blob/v1.2.3/docs/a.md#b) ![p](https://host/me/it/raw/v1.2.3/docs/p.svg) "
        "[w](https://x.y) [h](#here)\n```sh\n[a](b)\n```\n[c](https://host/me/it/blob/v1.2.3/../d)"
    )
    monkeypatch.chdir(REPO)
    monkeypatch.setenv(readme.VARIABLE, "https://host/me/it/")
    made = readme.Provider.dynamic_metadata({}, {"version": "1.2.3"})["readme"]["text"]
    relative = re.findall(r"\]\((?!https://|#)", re.sub(r"^```.*?^```$", "", made, flags=re.S | re.M))
    assert relative == []
    assert "https://host/me/it/raw/v1.2.3/docs/pictures/speed.svg" in made
    monkeypatch.delenv(readme.VARIABLE)
    made = readme.Provider.dynamic_metadata({}, {"version": "1.2.3"})["readme"]["text"]
    assert made == (REPO / "README.md").read_text()


def test_contents_of_a_wheel_for_aarch64(release: ModuleType) -> None:
    arm, intel = (b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") for machine in (183, 62))
    release.check_machine("libfp4gemm.so", arm)
    for header in (intel, b"#!/bin/sh", b""):
        with pytest.raises(release.Wrong, match=r"libfp4gemm\.so must be an ELF file for 64-bit Arm"):
            release.check_machine("libfp4gemm.so", header)
    listed = "ELF file    1: libfp4gemm.1.sm_90a.cubin\nELF file    2: libfp4gemm.2.sm_120.cubin\n"
    release.check_images(["90a", "120f"], listed)
    with pytest.raises(release.Wrong, match=r"lacks machine code for 80, 100f, has \['sm_120', 'sm_90a'\]"):
        release.check_images(["80", "90a", "100f"], listed)
    table = (REPO / "cpp" / "cmake" / "archs.cmake").read_text()
    assert release.families("all", table) == ["80", "90a", "100f", "120f"]
    assert release.families("90a;120f", table) == release.families("90a 120f", table) == ["90a", "120f"]
    assert release.families("none", table) == []
    with pytest.raises(release.Wrong, match="--archs: 121 is no family of 80, 90a, 100f, 120f, all and none"):
        release.families("121", table)


def test_wheels_for_aarch64_are_linked_to_the_pinned_torch_and_cuda() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (REPO / "requirements" / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    wanted = pins("build.txt") | pins("cuda.txt")
    for name, version in pins("aarch64.txt").items():
        assert wanted[name] == version
