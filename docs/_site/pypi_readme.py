"""The description of the package on PyPI: README.md with absolute links, as pyproject.toml asks for it.

PyPI shows no file of the repository, so that a relative link leads nowhere there and a picture is missing.
Links become absolute where FP4GEMM_REPOSITORY_URL has the address of the repository, as
`.github/workflows/ci.yml` sets it; a build without it has README.md as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "FP4GEMM_REPOSITORY_URL"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def absolute(text: str, repository: str, revision: str) -> str:
    """``text`` with relative links that lead to a revision in the repository."""

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{revision}/{target})"

    parts = _FENCE.split(text)  # code is at odd places
    return "".join(part if place % 2 else _LINK.sub(replaced, part) for place, part in enumerate(parts))


class Provider:
    """What scikit-build-core asks for the field ``readme``."""

    @staticmethod
    def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        text = Path("README.md").read_text()
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        if repository:
            text = absolute(text, repository, f"v{project['version']}")
        return {"readme": {"content-type": "text/markdown", "text": text}}
