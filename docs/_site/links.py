"""Links of the Markdown pages to files that are no pages: source code, folders, licences.

On GitHub and in a checkout they lead to the file. On the site they lead to it in the repository whose address
is in FP4GEMM_REPOSITORY_URL; without an address the path is shown as text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

VARIABLE = "FP4GEMM_REPOSITORY_URL"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^\s*```.*?^\s*```$", re.DOTALL | re.MULTILINE)


def rewritten(text: str, page: Path, repo: Path, pages: set[Path], repository: str) -> str:
    """``text`` of the file ``page`` with the links to files outside of ``pages`` replaced.

    Raises:
        ValueError: a link leads to a file that is not there.
    """

    def replaced(match: re.Match[str]) -> str:
        label, target, _ = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        path = (page.parent / target).resolve()
        if not path.exists():
            raise ValueError(f"{page}: the link to {target} leads to no file")
        if path in pages or path.suffix in (".png", ".svg"):
            return match[0]
        place = path.relative_to(repo).as_posix()
        return f"[{label}]({repository}/blob/main/{place})" if repository else f"{label} (`{place}`)"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replaced, text[end:])])


def source_read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md":
        pages = {Path(app.env.doc2path(found)).resolve() for found in app.env.found_docs}
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        source[0] = rewritten(source[0], page, Path(app.srcdir).resolve(), pages, repository)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", source_read)
    return {"parallel_read_safe": True}
