"""The documentation site: it builds without a warning, and its reference is complete and up to date."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import reference_pages
from fp4gemm.integrations.serving.options import PREFIX, Options

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
MISSING = [
    name for name in ("sphinx", "myst_parser", "furo", "griffe") if importlib.util.find_spec(name) is None
]
needs_sphinx = pytest.mark.skipif(
    bool(MISSING), reason=f"requirements/docs.txt: {', '.join(MISSING)} not installed"
)
MODULES = (
    *("", "calibration", "checkpoint", "compiler", "distributed", "epilogues", "models", "nn", "patterns"),
    "ranks",
    *("recipe", "records", "training"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` builds them."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(DOCS), "-d", str(folder / "trees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(REPO), str(folder / "html")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@needs_sphinx
def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    for page in DOCS.glob("*.md"):
        assert (site / "docs" / f"{page.stem}.html").is_file()


@needs_sphinx
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not loaded, f"{page.relative_to(site)} loads {loaded}"
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?https?:[^)]*\)|@import", style.read_text()), style.name


@needs_sphinx
def test_signatures_and_declarations_are_shown(site: Path) -> None:
    products = (site / "docs/reference/python/products.html").read_text()
    for part in ('id="fp4gemm.mm"', "batch_invariant", 'id="fp4gemm.combine"'):
        assert part in products
    c = (site / "docs/reference/c.html").read_text()
    headers = "".join(path.read_text() for path in (REPO / "cpp/include/fp4gemm").glob("*.h"))
    for name in re.findall(r"^FP4GEMM_API [\w\s*]*?\b(fp4gemm_\w+)\(", headers, re.MULTILINE):
        assert f'id="c.{name}"' in c, name


def module(name: str) -> ModuleType:
    """A file of docs/_site."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@needs_sphinx
def test_links_to_files_that_are_no_pages(tmp_path: Path) -> None:
    links = module("links")
    for name in ("page.md", "other.md", "code.py"):
        (tmp_path / name).touch()
    page, pages = tmp_path / "page.md", {tmp_path / "page.md", tmp_path / "other.md"}
    text = "[a](other.md#x) [b](code.py) [c](https://x.org)\n```text\n[d](none.py)\n```\n"
    assert links.rewritten(text, page, tmp_path, pages, "") == text.replace("[b](code.py)", "b (`code.py`)")
    online = links.rewritten(text, page, tmp_path, pages, "https://x.org/r")
    assert "[b](https://x.org/r/blob/main/code.py)" in online
    with pytest.raises(ValueError, match=r"the link to none\.py leads to no file"):
        links.rewritten("[d](none.py)", page, tmp_path, pages, "")


@needs_sphinx
def test_the_reference_of_c_is_complete() -> None:
    c_header = module("c_header")
    text = 'extern "C" {\n\n/* ---- one ---- */\n\n/* Says `x`. */\nFP4GEMM_API int fp4gemm_f(int* x);\n'
    section, function = c_header.items(text)
    assert (section.text, function.comment) == ("one", "Says `x`.")
    assert "   Says ``x``." in c_header.rst(text)
    with pytest.raises(ValueError, match="declares \\['fp4gemm_g'\\], which the reference lacks"):
        list(c_header.items(text.replace("{", "{\n#if 0 /*\nFP4GEMM_API int fp4gemm_g(\n*/", 1)))


@needs_sphinx
def test_a_name_that_is_no_function_or_class_is_refused() -> None:
    python_api = module("python_api")
    with pytest.raises(TypeError, match=r"fp4gemm\.nn is a module, must be a function or a class"):
        python_api.rst(None, REPO / "python", "fp4gemm.nn")
    with pytest.raises(KeyError):
        python_api.target(REPO / "python", "fp4gemm.absent")


def public_names() -> set[str]:
    """The functions and classes that fp4gemm and its public modules export."""
    names = set()
    for module in MODULES:
        path = f"fp4gemm.{module}".rstrip(".")
        owner = importlib.import_module(path)
        for name in owner.__all__:
            value = getattr(owner, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(
                "fp4gemm"
            ):
                names.add(f"{path}.{name}")
    return names


def test_every_public_name_is_in_the_reference() -> None:
    """By the name that users import first: fp4gemm.training.fprop is fp4gemm.fprop."""
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "python").glob("*.rst"))
    listed = {resolved(name) for name in re.findall(r"^   (fp4gemm\.\S+)$", pages, re.MULTILINE)}
    missing = {name for name in public_names() if resolved(name) not in listed}
    assert not missing


def resolved(name: str) -> object:
    """The object of a dotted name; modules on the way are imported. Of an integration whose library is not
    installed here it is the name itself."""
    found: object = importlib.import_module("fp4gemm")
    parts = name.split(".")
    for at, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:at]))
            except ModuleNotFoundError as error:
                if error.name and error.name.startswith("fp4gemm"):
                    raise
                return name
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", list(reference_pages.PAGES))
def test_generated_parts_are_up_to_date(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    found = reference_pages.with_block(text, name, reference_pages.PAGES[name]())
    assert found == text, "run python tests/support/reference_pages.py"


def test_the_commands_have_no_arguments_that_help_hides() -> None:
    parser = argparse.ArgumentParser()
    hidden = parser.add_argument("--old", help=argparse.SUPPRESS)
    shown = parser.add_argument("--new", help="a value")
    assert reference_pages.argument(hidden) is None
    assert reference_pages.argument(shown) == "| `--new NEW` | a value |"


def test_the_picture_of_speed_shows_the_kept_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = module("draw")
    monkeypatch.setattr(draw, "PICTURES", tmp_path)
    draw.speed()
    made, kept = ((folder / "speed.svg").read_text() for folder in (tmp_path, DOCS / "pictures"))
    assert made == kept, "run python docs/_site/draw.py"


def test_every_environment_variable_is_described() -> None:
    text = (DOCS / "environment.md").read_text()
    sources = "".join(path.read_text() for path in (REPO / "python" / "fp4gemm").rglob("*.py"))
    named = set(re.findall(r'"(FP4GEMM_[A-Z_]+[A-Z])"', sources))
    named |= {PREFIX + field.name.upper() for field in dataclasses.fields(Options)}
    named |= set(re.findall(r'env = "(\w+)"', (REPO / "pyproject.toml").read_text()))
    assert {name for name in named if f"`{name}`" not in text} == set()


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold <!-- x: begin -->"):
        reference_pages.with_block("no marks", "x", "block")
