"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fp4gemm.training import cache


@pytest.fixture(autouse=True)
def nothing_is_marked() -> Iterator[None]:
    """Each test begins as a new process does: weights are cast in every pass until a step is marked."""
    cache._STEPS.are_marked = False
    yield
    cache._STEPS.are_marked = False
