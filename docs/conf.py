"""The documentation site: Sphinx reads the Markdown of the whole repository; `make docs` builds it, offline.

The sources are the repository itself, so that README.md, CONTRIBUTING.md, docs/ and bench/notes are pages as
they stand, with the links that also work on GitHub. The Python reference is read from the sources
by griffe, so neither torch nor a compiled library is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REPO = DOCS.parent
sys.path.insert(0, str(DOCS / "_site"))

import c_header  # noqa: E402

project = "fp4gemm"
author = project_copyright = "the fp4gemm authors"
version = release = c_header.version(REPO / "cpp" / "include" / "fp4gemm" / "fp4gemm.h")
html_title = f"fp4gemm {release}"
language = "en"

extensions = ["myst_parser", "sphinx.ext.napoleon", "c_header", "python_api", "links", "navigation"]

root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**",
    "bench/NOTES.md",
    "bench/notes/**",
    "emulator/README.md",
]
exclude_patterns = [".*", "build", "dist", "cpp", "python", "tests", "examples", "requirements", "docs/_site"]

# ---- Markdown

source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"
smartquotes = False  # quotes in the text are those of code

# ---- the Python reference

napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
suppress_warnings = ["ref.python"]  # the same attribute of several classes
toc_object_entries_show_parents = "hide"

# ---- the pages: nothing is loaded from another server

html_theme = "furo"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
templates_path: list[str] = []
