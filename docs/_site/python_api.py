"""The line ``.. python-api:: NAME...``: functions and classes with their docstrings, read from the sources.

griffe reads signatures and docstrings without an import, napoleon turns the sections of the docstrings into
fields, and the Python domain of Sphinx links the roles that the docstrings contain.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import griffe
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.ext.napoleon import GoogleDocstring

PACKAGE = "fp4gemm"
# Imported on first use, which the sources do not show.
WHERE = {"fp4gemm.calibrate": "fp4gemm.models.calibrate"}
MARK = re.compile(r"^\.\. python-api::((?: \S+|\n {3}\S+)+)$", re.MULTILINE)


@functools.cache
def package(folder: Path) -> griffe.Module:
    """The package in ``folder``, by its sources."""
    loaded = griffe.load(PACKAGE, search_paths=[folder], allow_inspection=False, resolve_aliases=True)
    if not isinstance(loaded, griffe.Module):
        raise TypeError(f"{folder}: {PACKAGE} is {type(loaded).__name__}, must be a module")
    return loaded


def target(folder: Path, name: str) -> griffe.Object:
    """The object of a public name such as "fp4gemm.nn.Linear".

    Raises:
        KeyError: there is none.
    """
    found = package(folder)[WHERE.get(name, name).removeprefix(f"{PACKAGE}.")]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    last = name.rpartition(".")[2]
    if isinstance(found, griffe.Module) and last in found.members:  # a function in a module of the same name
        return target(folder, f"{found.path}.{last}")
    return found


def parameters(folder: Path, function: griffe.Class | griffe.Function) -> str:
    """The parameters as they are written; those of a TypedDict behind ``**`` one by one."""
    kinds = griffe.ParameterKind
    parts: list[str] = []
    has_star = False
    for at, each in enumerate(function.parameters):
        if at == 0 and each.name in ("self", "cls"):
            continue
        annotation = "" if each.annotation is None else str(each.annotation)
        if each.kind is kinds.var_keyword and (terms := re.fullmatch(r"Unpack\[(\w+)\]", annotation)):
            typed = target(folder, griffe_path(function, terms[1]))
            keywords = {**typed.inherited_members, **typed.members}
            parts += [] if has_star else ["*"]
            parts += [keyword(name, str(value.annotation)) for name, value in keywords.items()]
            continue
        if each.kind is kinds.keyword_only and not has_star:
            parts.append("*")
        has_star = has_star or each.kind in (kinds.keyword_only, kinds.var_positional)
        prefix = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "")
        default = "" if each.default is None or prefix else f" = {each.default}"
        parts.append(f"{prefix}{each.name}" + (f": {annotation}" if annotation else "") + default)
    return ", ".join(parts)


def keyword(name: str, annotation: str) -> str:
    """A keyword of a TypedDict; ``Annotated[T, Option(default, ...)]`` says the default."""
    tree = ast.parse(annotation, mode="eval").body
    if isinstance(tree, ast.Subscript) and ast.unparse(tree.value) == "Annotated":
        kind, option, *_ = tree.slice.elts  # type: ignore[attr-defined]
        return f"{name}: {ast.unparse(kind)} = {ast.unparse(option.args[0])}"
    return f"{name}: {annotation} = ..."


def griffe_path(function: griffe.Object, name: str) -> str:
    """The full path of a name in the module of ``function``."""
    member = function.module.members[name]
    return member.target_path if isinstance(member, griffe.Alias) else member.path


def escaped(docstring: str) -> str:
    """Absolute values such as |x| are no substitutions, and docs/NAME.md is a link to that page."""
    parts = re.split(r"(``.*?``|:\w+:`.*?`)", docstring, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\|(?=\S[^|\n]*\|)", r"\\|", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`docs/\1.md </docs/\1>`", part) for part in parts[::2]]
    return "".join(parts)


def body(config: Config, item: griffe.Object, what: str) -> list[str]:
    text = escaped(item.docstring.value if item.docstring else "")
    return [
        "",
        *(
            f"   {line}" if line else ""
            for line in str(GoogleDocstring(text, config, what=what)).splitlines()
        ),
        "",
    ]


def rst(config: Config, folder: Path, name: str) -> list[str]:
    """The reference of one name, as lines of reStructuredText."""
    item = target(folder, name)
    module, _, short = name.rpartition(".")
    lines = ["", f".. py:currentmodule:: {module}", ""]
    if isinstance(item, griffe.Function):
        returns = f" -> {item.returns}" if item.returns is not None else ""
        return [
            *lines,
            f".. py:function:: {short}({parameters(folder, item)}){returns}",
            *body(config, item, "function"),
        ]
    if not isinstance(item, griffe.Class):
        raise TypeError(f"{name} is a {item.kind.value}, must be a function or a class")
    lines += [f".. py:class:: {short}({parameters(folder, item)})", *body(config, item, "class")]
    for member in item.members.values():
        if isinstance(member, griffe.Alias) or member.name.startswith("_") or member.docstring is None:
            continue
        if isinstance(member, griffe.Function):
            returns = f" -> {member.returns}" if member.returns is not None else ""
            options = [
                f"      :{label}:" for label in ("classmethod", "staticmethod") if label in member.labels
            ]
            head = [f"   .. py:method:: {member.name}({parameters(folder, member)}){returns}", *options]
        else:
            kind = "property" if "property" in member.labels else "attribute"
            head = [f"   .. py:{kind}:: {member.name}", f"      :type: {member.annotation}"]
        lines += [*head, *(f"   {line}" if line else "" for line in body(config, member, "method"))]
    return lines


def source_read(app: Sphinx, page: str, source: list[str]) -> None:
    def replaced(match: re.Match[str]) -> str:
        folder = Path(app.srcdir, "python")
        lines: list[str] = []
        for name in match[1].split():
            app.env.note_dependency(str(target(folder, name).filepath))
            lines += rst(app.config, folder, name)
        return "\n".join(lines)

    source[0] = MARK.sub(replaced, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", source_read)
    return {"parallel_read_safe": True}
