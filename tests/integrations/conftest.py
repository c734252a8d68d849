"""Every test of an integration runs with fp4gemm registered, and leaves the other library as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from fp4gemm.integrations import transformers

    transformers.register()
    yield
    transformers.unregister()
