"""The emulator of the process, with the kernels of the library that the build of the tests made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ptxemu.ptx_files import find_cuobjdump
from session import ARCHS, Session, Sessions, build_folder, library_path


@pytest.fixture(scope="session")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """Sessions by compute capability."""
    if library_path() is None:
        pytest.skip(
            f"no libfp4gemm_emulated.so in {build_folder()}: build with FP4GEMM_BUILD_TESTS and 100f or 120f"
        )
    if find_cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (requirements/test.txt)")
    return Sessions(tmp_path_factory.mktemp("ptx"))


@pytest.fixture(params=ARCHS or [None], ids=lambda arch: f"sm{arch}")
def session(request: pytest.FixtureRequest, sessions: Sessions) -> Session:
    """The session of each architecture in turn."""
    if request.param is None:
        pytest.skip("built without kernels that the emulator runs (100f, 120f)")
    return sessions[request.param]
