"""The line ``.. c-header:: PATH``: the reference of a C header, from its declarations and their comments.

Every declaration belongs to the comment that precedes it. ``/* ---- name ---- */`` begins a section. Structs
and enums are shown as they are written, since the comments beside their members are their documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sphinx.application import Sphinx

COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
VERSION = re.compile(r"#define FP4GEMM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)")


class Item(NamedTuple):
    kind: str  # "section", "type", "function" or "macro"
    comment: str
    text: str  # of the section; of the declarations, without the final semicolon


def version(header: Path) -> str:
    """The version "x.y.z" that the header defines."""
    return ".".join(VERSION.findall(header.read_text()))


def comment_text(comment: str) -> str:
    """The text of a block comment, without the asterisks at the beginning of its lines."""
    lines = [re.sub(r"^ ?\* ?", "", line.rstrip()) for line in comment.strip().splitlines()]
    return "\n".join(lines).strip()


def overview(text: str) -> str:
    """The comment at the beginning of a header."""
    match = COMMENT.match(text)
    return comment_text(match[1]) if match else ""


def items(text: str) -> Iterator[Item]:
    """The sections and declarations of a header, in order.

    Raises:
        ValueError: a function is declared that none of the items holds.
    """
    body = text[text.index('extern "C" {') :]
    pattern = re.compile(
        r"/\* ---- (?P<section>.+?) ---- \*/"
        r"|(?P<comment>/\*.*?\*/)"
        r"|(?P<type>typedef (?:struct|enum) \w+ \{.*?\n?\} \w+;|typedef [^{};]+;)"
        r"|static inline \w+ \w+_init\(void\) \{(?P<defaults>.*?)\n\}\n#define (?P<macro>FP4GEMM_\w+_INIT)\b"
        r"|(?P<function>FP4GEMM_API [^;]+;)"
        r"|(?P<blank>\n\n)",
        re.DOTALL,
    )
    comment, found = "", []
    for match in pattern.finditer(body):
        kind, whole = match.lastgroup or "", match[0]
        if kind == "section":
            found.append(Item("section", "", match["section"]))
            comment = ""
        elif kind == "comment":
            comment = comment_text(whole[2:-2])
        elif kind == "blank":
            comment = ""
        elif kind == "function":
            declaration = " ".join(whole.removeprefix("FP4GEMM_API ").rstrip(";").split())
            if found and found[-1].kind == "function" and not comment:
                found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{declaration}")
            else:
                found.append(Item("function", comment, declaration))
            comment = ""
        elif kind == "macro":
            found.append(Item("macro", match["defaults"], match["macro"]))
            comment = ""
        else:
            found.append(Item(kind, comment, whole.rstrip(";")))
            comment = ""
    declared = set(re.findall(r"^FP4GEMM_API [\w\s*]*?\b(fp4gemm_\w+)\(", text, re.MULTILINE))
    held = {name for item in found for name in re.findall(r"(fp4gemm_\w+)\(", item.text)}
    if declared - held:
        raise ValueError(f"the header declares {sorted(declared - held)}, which the reference lacks")
    yield from found


def prose(comment: str) -> list[str]:
    """Lines of reStructuredText: lines indented by four become literal blocks, those that begin with a
    hyphen are items of a list, and everything else is text."""
    lines: list[str] = []
    literal = in_list = False
    for line in comment.splitlines():
        is_code = line.startswith("    ")
        in_list = line.startswith("- ") or (in_list and (not line or line.startswith("  ")))
        margin = "  " if in_list and not line.startswith("- ") else ""
        if line and is_code != literal:
            lines += ["", f"{margin}::", ""] if is_code else [""]
            literal = is_code
        if line.startswith("- "):
            lines.append("")
        lines.append(margin + (line if is_code else escaped(line.strip())) if line else "")
    return lines


def escaped(text: str) -> str:
    """Text in which reStructuredText finds no markup except for the literals between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return re.sub(r"([*_|`\\])", r"\\\1", text)
    parts[::2] = [re.sub(r"([*_|\\])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def rst(text: str) -> list[str]:
    """The reference of a header, as lines of reStructuredText."""
    lines = [*prose(overview(text)), ""]
    for item in items(text):
        if item.kind == "section":
            title = item.text[0].upper() + item.text[1:]
            lines += ["", title, "~" * len(title), ""]
        elif item.kind == "function":
            first, *others = item.text.splitlines()
            lines += [f".. c:function:: {first}", *(f"                 {other}" for other in others), ""]
            lines += [f"   {line}" if line else "" for line in prose(item.comment)]
        elif item.kind == "macro":
            lines += [f".. c:macro:: {item.text}", "", f"   {defaults(item.comment)}", ""]
        else:
            name = re.findall(r"\w+", item.text)[-1]
            kind = re.match(r"typedef (struct|enum) \w+ \{", item.text)
            lines += [f".. c:{kind[1]}:: {name}" if kind else f".. c:type:: {name}", ""]
            lines += [f"   {line}" if line else "" for line in prose(item.comment)]
            lines += ["", "   .. code-block:: c", "", *(f"      {line}" for line in item.text.splitlines())]
        lines.append("")
    return lines


def defaults(body: str) -> str:
    """A sentence with the defaults that the body of a function ..._init sets; struct_size is none of them."""
    named = re.findall(r"\.(\w+) = ([^;]+);", body)
    texts = [f"``{field} = {value}``" for field, value in named if field != "struct_size"]
    return "Every field is 0" + (f", but {', '.join(texts)}." if texts else ".")


def source_read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace each line ``.. c-header:: PATH`` of a page."""

    def replaced(match: re.Match[str]) -> str:
        path = Path(app.srcdir, match[1])
        app.env.note_dependency(str(path))
        return "\n".join(rst(path.read_text()))

    source[0] = re.sub(r"^\.\. c-header:: (\S+)$", replaced, source[0], flags=re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", source_read)
    return {"parallel_read_safe": True}
