"""Fixtures of all tests: the devices on which a test runs, and a seeded generator."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator

import fp4gemm
import pytest
import torch
from fp4gemm import _refusals


def pytest_configure() -> None:
    """Divide the cores among the workers of pytest-xdist, and among the processes that tests start.

    Otherwise each worker has a thread for every core, and most of the time goes into threads that wait for a
    core. Results must not depend on the number of threads, so the tests of that set it themselves.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        number = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep what torch.compile makes in a folder of this run, so that no test runs code of an earlier one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
        folder = tempfile.TemporaryDirectory(prefix="fp4gemm_inductor_")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        session.config.add_cleanup(folder.cleanup)


def pytest_report_header() -> str:
    return "fp4gemm: " + "; ".join(fp4gemm.is_supported(name).reason for name in ("cpu", "cuda"))


def _cuda_or_skip() -> None:
    support = fp4gemm.is_supported("cuda")
    if not support:
        pytest.skip(support.reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that has all operations; CUDA is skipped, with the reason, if it is not supported."""
    if request.param == "cuda":
        _cuda_or_skip()
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _no_hidden_refusal() -> Iterator[None]:
    """Fail a test in which an operator refused a call that the checks then accepted."""
    before = _refusals.UNEXPLAINED.copy()
    yield
    hidden = _refusals.UNEXPLAINED - before
    assert not hidden, f"operators refused calls that the checks accept: {dict(hidden)}"


@pytest.fixture
def unexplained() -> Iterator[Counter[str]]:
    """The calls that were refused without an explanation in a test that wants such calls, by place."""
    before = _refusals.UNEXPLAINED.copy()
    _refusals.UNEXPLAINED.clear()
    yield _refusals.UNEXPLAINED
    _refusals.UNEXPLAINED.clear()
    _refusals.UNEXPLAINED.update(before)


@pytest.fixture
def cuda() -> torch.device:
    """The current CUDA device; the test is skipped, with the reason, if it is not supported."""
    _cuda_or_skip()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gen() -> torch.Generator:
    """A CPU generator with a fixed seed, so that every device sees the same data."""
    return torch.Generator().manual_seed(20260)
