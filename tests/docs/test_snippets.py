"""The code in README.md, CONTRIBUTING.md, docs/ and the docstrings: every snippet is run or compiled.

A snippet is a fenced block. Python blocks of one document run in order in one namespace, which the file
preambles/NAME.py prepares if it exists; those of docs/distributed.md are one program, which torchrun starts.
C and C++ blocks are compiled against the header, and run if they have a main. CUDA blocks are compiled with
nvcc and CUTLASS, and CMake blocks configure a project. The line ahead of a block that cannot be run says so,
with the reason: ``<!-- not run: it needs two GPUs -->``.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import _native, selection
from fp4gemm.activations import ACTIVATIONS
from snippets import Snippet, fenced, run_python
from toolchain import cutlass_headers, nvcc_path

REPO = Path(__file__).resolve().parents[2]
PREAMBLES = Path(__file__).resolve().parent / "preambles"
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
PROSE = {"text", "sh", "json", "diff"}  # languages of blocks that are not run
C_COMPILERS = {"c": ["cc", "-std=c99"], "cpp": ["c++", "-std=c++17"]}
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
RUN = {"python", "cuda", "cmake", *C_COMPILERS}


SNIPPETS = [snippet for document in DOCUMENTS for snippet in fenced(document, document.read_text())]


def to_run(*languages: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language in languages and not snippet.not_run]


# ---- the documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_names_its_language(document: Path) -> None:
    """Otherwise a snippet could escape these tests."""
    for snippet in SNIPPETS:
        if snippet.document == document:
            assert snippet.language in RUN | PROSE, f"{snippet}: the language is {snippet.language!r}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_are_fenced(document: Path) -> None:
    """A block that is only indented names no language."""
    text = re.sub(r"^(\s*)```\w*$.*?^\s*```$", "fence", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    in_list = False
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            in_list = bool(re.match(r"([*-]|\d+\.) ", line))
        is_block = line.startswith("    ") and number > 0 and not lines[number - 1].strip()
        assert in_list or not is_block, f"{document.name}: fence the block that begins with {line.strip()!r}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Links to files and to headings of this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, heading = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        to = document.parent / path if path else document
        assert to.exists(), f"{document.name}: {target} is missing"
        if heading:
            headings = re.findall(r"^#+ (.+)$", to.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in slugs, f"{document.name}: {target} is no heading, {slugs} are"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_wrapped(document: Path) -> None:
    """At 110 columns; tables, links and what a tool generates excepted."""
    generated = re.compile(r"<!-- bench[\w ]*: begin -->.*?<!-- bench[\w ]*: end -->", re.DOTALL)
    for line in generated.sub("", document.read_text()).splitlines():
        assert len(line) <= 110 or line.startswith("|") or "](" in line, f"{document.name}: {line}"


def test_the_table_of_activations_is_complete() -> None:
    text = (REPO / "docs" / "grouped.md").read_text()
    table = text[text.index("| activation | act(z) |") :].split("\n\n")[0]
    named = set(re.findall(r'^\| `"(\w+)"` \|', table, re.MULTILINE))
    assert named == {activation.name for activation in ACTIVATIONS if activation.name is not None}


# ---- Python


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to write to, a fixed seed, and no rules left behind."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    selection.clear()


PROGRAM = REPO / "docs" / "distributed.md"


@pytest.mark.parametrize(
    "document",
    sorted({snippet.document for snippet in to_run("python")} - {PROGRAM}),
    ids=lambda path: path.name,
)
def test_python(document: Path) -> None:
    run_python(
        [snippet for snippet in to_run("python") if snippet.document == document],
        PREAMBLES / f"{document.stem}.py",
    )


def test_program_of_many_processes(tmp_path: Path) -> None:
    """Two processes, or as many as there are GPUs, if it is one.

    A rank that aborts prints where Python was, and each rank that it reached the end.
    """
    source = "\n".join(snippet.text for snippet in to_run("python") if snippet.document == PROGRAM)
    end = '\nprint("end of rank", os.environ["RANK"], flush=True)\n'
    (tmp_path / "layer.py").write_text(source + end)
    processes = min(2, torch.cuda.device_count() or 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", processes, tmp_path / "layer.py"]
    shown = run(*torchrun, *options, env={"PYTHONFAULTHANDLER": "1"})
    assert shown.count("end of rank") == processes


def examples() -> Iterator[Snippet]:
    """The literal blocks of docstrings that call the package."""
    for path in sorted((REPO / "python" / "fp4gemm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for block in re.findall(r"(?:^|\n)\n((?: {4}.*\n|\n)+)", f"{ast.get_docstring(node) or ''}\n"):
                if "fp4gemm." in block:
                    body = node.body[0].lineno if node.body else 1
                    text = "\n".join(line.removeprefix("    ") for line in block.splitlines())
                    yield Snippet(path, body, "python", text + "\n", "")


@pytest.mark.parametrize("example", list(examples()), ids=str)
def test_docstring(example: Snippet) -> None:
    run_python([example._replace(line=1)], PREAMBLES / "docstrings.py")


# ---- C, C++, CUDA, CMake


def include_dir() -> Path:
    """The headers of the installed package, or of the checkout if only libraries were built."""
    installed = _native.package_dir() / "include"
    return installed if installed.is_dir() else REPO / "cpp" / "include"


def run(*command: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def is_program(snippet: Snippet) -> bool:
    return re.search(r"^int main\(", snippet.text, re.MULTILINE) is not None


@pytest.mark.parametrize("snippet", to_run("c", "cpp"), ids=str)
def test_c_and_cpp(snippet: Snippet, tmp_path: Path) -> None:
    source = tmp_path / f"snippet.{snippet.language}"
    source.write_text(f'#line {snippet.line} "{snippet.document}"\n{snippet.text}')
    compiler, standard = C_COMPILERS[snippet.language]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    command = [compiler, standard, *WARNINGS, f"-I{include_dir()}", source]
    if not is_program(snippet):
        run(*command, "-c", "-o", tmp_path / "snippet.o")
        return
    library = _native.library_path(_native.CORE_LIBRARY)
    run(*command, library, f"-Wl,-rpath,{library.parent}", "-o", tmp_path / "snippet")
    run(tmp_path / "snippet")


def tool(name: str) -> str:
    """A program beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("snippet", to_run("cuda"), ids=str)
def test_cuda(snippet: Snippet, tmp_path: Path) -> None:
    nvcc, headers = nvcc_path(), cutlass_headers()
    source = tmp_path / "snippet.cu"
    source.write_text(f'#line {snippet.line} "{snippet.document}"\n{snippet.text}')
    command = [nvcc, "-std=c++17", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command += [f"-I{include_dir()}", f"-I{REPO / 'cpp'}", f"-I{headers}"]
    run(*command, "-c", source, "-o", tmp_path / "snippet.o")


@pytest.mark.parametrize("snippet", to_run("cmake"), ids=str)
def test_cmake(snippet: Snippet, tmp_path: Path) -> None:
    package = _native.package_dir() / "lib" / "cmake" / "fp4gemm"
    if not package.is_dir():
        pytest.skip("fp4gemm is not installed as a package, so that find_package has nothing to find")
    if "cutlass_evt" in snippet.text:
        cutlass_headers()
    (tmp_path / "main.cpp").write_text("int main() { return 0; }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(snippet LANGUAGES CXX)\n"
        f"add_executable(app main.cpp)\nadd_library(mine main.cpp)\n{snippet.text}"
    )
    defines = [f"-Dfp4gemm_DIR={package}", f"-DPython3_EXECUTABLE={sys.executable}"]
    defines.append(f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}")
    run(tool("cmake"), "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", *defines)


# ---- these tests themselves


def test_wrong_snippets_fail(tmp_path: Path) -> None:
    """A wrong block of each language is found, and a reason must be given to pass one over."""
    document = tmp_path / "wrong.md"
    text = (
        "a\n```python\nx = 1\n```\n<!-- not run: no reason -->\n```python\nx +\n```\n```cpp\nint x = ;\n```\n"
    )
    first, second, third = fenced(document, text)
    assert (first.line, first.text, first.not_run) == (3, "x = 1\n", "")
    assert second.not_run == "no reason"
    with pytest.raises(SyntaxError) as error:
        run_python([second])
    assert (error.value.filename, error.value.lineno) == (str(document), 7)
    if shutil.which("c++"):
        with pytest.raises(AssertionError, match=r"wrong\.md:10"):
            test_c_and_cpp(third, tmp_path)
    with pytest.raises(ValueError, match="has no end"):
        list(fenced(document, "```python\n"))
    assert fp4gemm.__doc__ is not None
    assert any(example.document.name == "__init__.py" for example in examples())
