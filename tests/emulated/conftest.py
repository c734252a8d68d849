"""The emulator of the process, with the kernels of the library that the build of the tests made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ptxemu.ptx_files import find_cuobjdump
from session import Session, build_folder, library_path


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    if library_path() is None:
        pytest.skip(f"no libfp4gemm_emulated.so in {build_folder()}: build with FP4GEMM_BUILD_TESTS and 100f")
    if find_cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (requirements/test.txt)")
    return Session(tmp_path_factory.mktemp("ptx"))
