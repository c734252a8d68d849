"""No import circle in the package or in the benchmarks; imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Graph = dict[str, set[str]]


def module_files(package: Path) -> dict[str, Path]:
    """The file of each module of a package by its dotted name; a folder is named by its __init__.py."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import in a module, in functions too, but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []))
        else:
            yield from imports(node)


def targets(node: ast.Import | ast.ImportFrom, module: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules that an import executes: for a name that is no module, the module that defines it."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            is_folder = files[module].name == "__init__.py"
            parts = module.split(".")
            kept = parts[: len(parts) - node.level + is_folder]
            base = ".".join([*kept, node.module] if node.module else kept)
        names = [f"{base}.{alias.name}" for alias in node.names]
        names = [name if name in files else base for name in names]
    for name in names:
        if name not in files:
            continue
        yield name
        # The packages around it are executed first; those around the importing module are under way already.
        parts = name.split(".")
        for i in range(1, len(parts)):
            folder = ".".join(parts[:i])
            if not f"{module}.".startswith(f"{folder}."):
                yield folder


def graph_of(package: Path) -> Graph:
    files = module_files(package)
    return {
        module: {
            name
            for node in imports(ast.parse(path.read_text(encoding="utf-8")))
            for name in targets(node, module, files)
        }
        for module, path in files.items()
    }


def circle(graph: Graph) -> list[str]:
    """Modules of which each imports the next and the last the first; none if there is no such circle."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module not in done:
            for other in sorted(graph[module]):
                found = visit(other, [*way, module])
                if found:
                    return found
            done.add(module)
        return []

    return next((found for found in (visit(module, []) for module in sorted(graph)) if found), [])


@pytest.mark.parametrize("folder", ["python/fp4gemm", "bench"])
def test_no_import_circle(folder: str) -> None:
    graph = graph_of(ROOT / folder)
    assert sum(map(len, graph.values())) > len(graph), "the walk finds imports"
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"a": "from . import b", "b": "def f():\n    from .a import x"}, ["p.a", "p.b"]),
        ({"a": "from .q import c", "q/__init__": "from . import c", "q/c": "import p.a"},
         ["p.a", "p.q", "p.q.c"]),
        ({"a": "from .q.d import x", "q/__init__": "from .c import y", "q/c": "from .. import a", "q/d": ""},
         ["p.a", "p.q", "p.q.c"]),
        ({"a": "from . import NAME", "__init__": "from .a import x\nNAME = 1"}, ["p", "p.a"]),
        ({"a": "from . import b", "b": "if TYPE_CHECKING:\n    from .a import x"}, []),
        ({"__init__": "from . import a", "a": "from . import b", "b": ""}, []),
    ],
    ids=["function", "up", "folder", "name", "typing", "none"],
)  # fmt: skip
def test_a_circle_is_found(files: dict[str, str], found: list[str], tmp_path: Path) -> None:
    for name, text in ({"__init__": ""} | files).items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert circle(graph_of(tmp_path / "p")) == found
