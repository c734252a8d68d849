"""The fenced blocks of Markdown documents, and the call that runs those in Python.

It imports the standard library alone, so that it also runs where only a wheel is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Snippet(NamedTuple):
    document: Path
    line: int  # of the first line of the text, counted from 1
    language: str
    text: str
    not_run: str  # the reason, or ""

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def fenced(document: Path, text: str) -> Iterator[Snippet]:
    """The fenced blocks of a Markdown text."""
    lines = text.splitlines()
    begin, indent, language, not_run = 0, "", "", ""
    for number, line in enumerate(lines, 1):
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence is None:
            continue
        if begin == 0:
            begin, (indent, language) = number, fence.groups()
            mark = re.fullmatch(r"\s*<!-- not run: (.+) -->", lines[number - 2] if number > 1 else "")
            not_run = mark[1] if mark else ""
        else:
            body = [line.removeprefix(indent) for line in lines[begin : number - 1]]
            yield Snippet(document, begin + 1, language, "\n".join(body) + "\n", not_run)
            begin = 0
    if begin:
        raise ValueError(f"{document}:{begin}: the block has no end")


def run_python(snippets: Iterable[Snippet], preamble: Path | None = None) -> None:
    """Run the snippets in order in one namespace; a traceback shows the line of the document.

    Args:
        snippets: those to run.
        preamble: a file that prepares the namespace, if it exists.
    """
    namespace = {"__name__": "snippet"}
    if preamble is not None and preamble.exists():
        exec(compile(preamble.read_text(), str(preamble), "exec"), namespace)
    for snippet in snippets:
        source = "\n" * (snippet.line - 1) + snippet.text
        exec(compile(source, str(snippet.document), "exec"), namespace)
