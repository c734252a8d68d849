"""Imports point downward in the order of CONTRIBUTING.md, and form no circle.

Those inside functions count too. Imports for type checkers alone, under ``if TYPE_CHECKING``, do not count:
they execute nothing.
"""

from __future__ import annotations

import ast
import re
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
        elif found := imported_by_name(node):
            yield found
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []))
        else:
            yield from imports(node)


def imported_by_name(node: ast.AST) -> ast.ImportFrom | None:
    """``importlib.import_module("..x", __name__)`` in an __init__.py, as ``from .. import x``."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return None
    name = node.args[0]
    if len(node.args) != 2 or not isinstance(name, ast.Constant):
        return None
    relative = name.value.lstrip(".")
    parent, _, last = relative.rpartition(".")
    return ast.ImportFrom(parent or None, [ast.alias(last)], len(name.value) - len(relative))


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


# A public name of a lower package that a higher one defines, looked up when it is used: nn.MoE.
EXCEPT = {("fp4gemm.nn", "fp4gemm.training")}


def rows(text: str) -> list[list[str]]:
    """The names in each row of the table of layers, such as ``quantize.py`` and ``nn/``."""
    table = text.split("Inside `python/fp4gemm`, from the top down", 1)[1].split("| --- | --- |", 1)[1]
    lines = table.strip().split("\n\n", 1)[0].splitlines()
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in lines]


def upward(graph: Graph, rows: list[list[str]]) -> list[str]:
    """The imports that do not point to the same row or to one below, and the modules without a row."""
    order = {name.removesuffix("/").removesuffix(".py"): i for i, row in enumerate(rows) for name in row}
    order[""] = order["__init__"]

    def place(module: str) -> str:
        return module.partition(".")[2].partition(".")[0]

    names = {place(module) for module in graph}
    wrong = [f"{name} has no row" for name in sorted(names - set(order))]
    wrong += [f"{name} does not exist" for name in sorted(set(order) - names - {"__init__"})]
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            edge = place(module), place(other)
            is_upward = set(edge) <= set(order) and order[edge[0]] > order[edge[1]]
            if is_upward and (module, other) not in EXCEPT:
                wrong.append(f"{module} imports {other}")
    return wrong


def test_imports_point_downward() -> None:
    graph = graph_of(ROOT / "python/fp4gemm")
    table = rows((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(table) > 15
    assert upward(graph, table) == []


def test_exceptions_exist() -> None:
    graph = graph_of(ROOT / "python/fp4gemm")
    for lower, higher in EXCEPT:
        assert higher in graph[lower]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"low": "", "high": "from . import low"}, []),
        ({"low": "def f():\n    from .high import x", "high": "x = 1"}, ["p.low imports p.high"]),
        ({"low/__init__": "import importlib\nimportlib.import_module('..high', __name__)", "high": ""},
         ["p.low imports p.high"]),
        ({"low": "if TYPE_CHECKING:\n    from . import high", "high": ""}, []),
        ({"low": "", "high": "", "new": ""}, ["new has no row"]),
        ({"low": ""}, ["high does not exist"]),
    ],
    ids=["down", "function", "by-name", "typing", "row", "stale"],
)  # fmt: skip
def test_an_import_upward_is_found(files: dict[str, str], found: list[str], tmp_path: Path) -> None:
    for name, text in ({"__init__": ""} | files).items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert upward(graph_of(tmp_path / "p"), [["__init__.py"], ["high.py"], ["low/"]]) == found


@pytest.mark.parametrize("folder", ["python/fp4gemm", "bench"])
def test_no_import_circle(folder: str) -> None:
    graph = {
        module: {other for other in others if (module, other) not in EXCEPT}
        for module, others in graph_of(ROOT / folder).items()
    }
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
