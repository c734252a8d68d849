"""The sections of the site, in order, and the front page, README.md, to which they are added.

A page that no section names fails the build: Sphinx warns about it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("docs/start", "docs/install", "docs/upgrading"),
    "Guides": (
        "docs/which_format",
        "docs/moe",
        "docs/models",
        "docs/checkpoints",
        "docs/accuracy",
        "docs/qat",
        "docs/training",
        "docs/training_losses",
        "docs/lora",
        "docs/distributed",
        "docs/training_parallel",
        "docs/megatron",
        "docs/rollout",
        "docs/serving",
        "docs/compile",
        "docs/cpp",
        "docs/epilogue",
        "docs/benchmarks",
    ),
    "Concepts": (
        "docs/formats",
        "docs/quantization",
        "docs/grouped",
        "docs/reciprocal",
        "docs/interop",
        "docs/hopper",
        "docs/blackwell",
    ),
    "Reference": (
        "docs/api",
        "docs/reference/python",
        "docs/reference/c",
        "docs/operators",
        "docs/commands",
        "docs/environment",
        "docs/kernels",
    ),
    "Results": (
        "docs/results",
        "docs/upstream",
        "docs/status",
        "bench/NOTES",
        "bench/notes/hopper",
        "bench/notes/hopper_tried",
        "bench/notes/engine",
        "bench/notes/models",
        "bench/notes/sm120_decode",
        "bench/notes/cpu",
        "bench/notes/checkpoints",
        "bench/notes/accuracy",
        "bench/notes/training",
    ),
    "For contributors": ("CONTRIBUTING", "emulator/README", "CHANGELOG"),
}


def toctrees(names: dict[str, tuple[str, ...]]) -> str:
    """The sections as hidden tables of contents, in MyST."""
    return "".join(
        f"\n:::{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "".join(f"/{name}\n" for name in pages)
        + ":::\n"
        for caption, pages in names.items()
    )


def source_read(app: Sphinx, name: str, source: list[str]) -> None:
    if name == app.config.root_doc:
        source[0] += toctrees(SECTIONS)


def build_finished(app: Sphinx, error: Exception | None) -> None:
    """The front page is README.html, as the file is named; browsers and servers look for index.html."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", source_read, priority=600)
    app.connect("build-finished", build_finished)
    return {"parallel_read_safe": True}
