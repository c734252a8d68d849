"""Libraries of `python -m fp4gemm epilogue build`, executed by the emulator, against the reference in bits.

nvcc takes about a minute of one core for each kernel, and there are two for each epilogue and architecture.
So by default one epilogue is built for each architecture, with its dense kernel alone. FP4GEMM_TEST_EPILOGUES
names architectures for which all epilogues and kernels are built: "120f", "100f" or "100f,120f".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import library_epilogues as examples
import pytest
import torch
from fp4gemm import _epilogue_build, _epilogue_library
from fp4gemm._epilogue_library import EpilogueLibrary
from fp4gemm.device import epilogues as checks
from fp4gemm.device import problems
from fp4gemm.ops import epilogue as epilogue_ops
from fp4gemm.ops import gemm as gemm_ops
from fp4gemm.ops import operators
from fp4gemm.ops.epilogue import EpilogueCall
from ptxemu.emulator import DeviceArray, Emulator, extract_ptx
from ptxemu.ptx_files import find_cuobjdump
from session import ARCHS, NUM_SMS, build_folder, describe, same_bits
from torch import Tensor

FILE = Path(examples.__file__)
WANTED = [arch for arch in os.environ.get("FP4GEMM_TEST_EPILOGUES", "").split(",") if arch]
OF_BUILD = [name for name, number in _epilogue_library.ARCHS.items() if number in ARCHS]
EPILOGUES = {e.name: e for e in vars(examples).values() if isinstance(e, fp4gemm.epilogues.Epilogue)}
BY_DEFAULT = "pair_to_one"  # has a bias, c, a Row, a Column, a Matrix and auxiliary outputs
SCALARS = {"beta": 0.75, "shift": 0.25}
SCHEDULES = ({"mode": "eager", "seed": 1}, {"mode": "random", "seed": 2}, {"mode": "pct", "seed": 3})

Built = tuple[EpilogueLibrary, Emulator]


def found_emulator() -> Path:
    found = sorted(build_folder().glob("**/libptxemu.so"))
    if not found or find_cuobjdump() is None:
        pytest.skip("needs libptxemu.so in the build of the tests, and cuobjdump")
    return found[0]


@pytest.fixture(scope="module", params=WANTED or OF_BUILD or [None], ids=str)
def arch(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        pytest.skip("built without kernels that the emulator runs (100f, 120f)")
    assert request.param in _epilogue_library.ARCHS
    return str(request.param)


@pytest.fixture(scope="module", params=list(EPILOGUES) if WANTED else [BY_DEFAULT])
def built(request: pytest.FixtureRequest, arch: str, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A library that the command built, linked with the emulator in place of the CUDA runtime."""
    ptxemu = found_emulator()
    try:
        _epilogue_build.find_tools()
    except RuntimeError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("library")
    out = folder / f"{request.param}.so"
    flags = f"-cudart none -L{ptxemu.parent} -lptxemu -Xlinker -rpath={ptxemu.parent}"
    command = [sys.executable, "-m", "fp4gemm", "epilogue", "build", f"{FILE}:{request.param}"]
    options = ["--dtype", "bf16", *(["fp32"] if WANTED and request.param == "gated_silu" else [])]
    if not WANTED:
        options += ["--mode", "dense"]
    elif EPILOGUES[request.param].program.count("groups"):
        options += ["--mode", "grouped"]
    done = subprocess.run(
        [*command, "--arch", arch, "--out", str(out), *options],
        env={**os.environ, "NVCC_APPEND_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: {request.param} for {arch}, built in ")
    extract_ptx(out, folder / "ptx")
    emulator = Emulator(ptxemu, [folder / "ptx"])
    return _epilogue_library.opened(out, emulator.load_library(out)), emulator


def calls(epilogue: fp4gemm.epilogues.Epilogue, dtype: torch.dtype) -> Iterator[EpilogueCall]:
    """Products of NVFP4 operands, dense and with groups that are ragged in m, one of them empty."""
    gen = torch.Generator().manual_seed(5)
    kinds = ("rows", "columns", "groups", "matrices")
    tensors: dict[str, Any] = {name: torch.empty(0) for kind in kinds for name in epilogue.names(kind)}
    numbers = {name: SCALARS[name] for name in epilogue.names("scalars") if name in SCALARS}
    bound = epilogue(**numbers, **tensors)
    for problem in problems.problems():
        x = problem.operands
        is_nvfp4 = x.scale_a is not None and x.scale_a.dtype is torch.float8_e4m3fn
        if problem.terms or problem.prepacks or not is_nvfp4 or gemm_ops.is_ragged_k(x):
            continue
        call = checks._call(bound, problem, dtype, gen)
        if call is not None:
            yield call


def compute(library: EpilogueLibrary, emulator: Emulator, call: EpilogueCall) -> list[Tensor]:
    """D and the auxiliary outputs from the emulated device, after they were compared with the reference."""
    kept: list[DeviceArray] = []

    def on_device(x: Tensor) -> Tensor:
        kept.append(emulator.upload(x.contiguous()))
        return kept[-1].torch()

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        kept.append(emulator.empty(shape, dtype))
        return kept[-1].torch()

    moved: dict[str, Any] = {
        name: on_device(x) for name, x in call._asdict().items() if isinstance(x, Tensor)
    }
    x = call._replace(**moved, inputs=[on_device(tensor) for tensor in call.inputs])
    wanted = operators.OPERATORS["gemm_epilogue"].reference(*call)
    outputs = [empty(tuple(want.shape), want.dtype) for want in wanted]
    assert x.scale_a is not None
    assert x.scale_b is not None
    operands = _epilogue_library.Operands(
        *(x.a, x.b, x.scale_a, x.scale_b, x.offs, x.alpha, x.alpha_groups),
        *(x.alpha_row, x.alpha_col, x.bias, x.c),
    )
    form = epilogue_ops._generated(call.program).form
    args = _epilogue_library.structs(operands, form, x.inputs, x.scalars, outputs)
    size = _epilogue_library.workspace_bytes(library, *args, 0)
    workspace = empty((size + 256,), torch.uint8)
    skipped = -workspace.data_ptr() % 256
    _epilogue_library.launch(library, *args, workspace[skipped:], 0, None)
    emulator.synchronize()
    assert emulator.num_hazards() == 0, emulator.hazards()
    owned = slice(None) if call.offs is None else slice(int(call.offs[-1]))  # rows of groups
    for got, want in zip(outputs, wanted, strict=True):
        assert same_bits(got[owned], want[owned]), describe(got[owned], want[owned])
        if call.offs is not None:  # rows of no group are as they were
            rest = got[int(call.offs[-1]) :].contiguous().view(torch.uint8)
            assert bool((rest == 0xFF).all())
    return outputs


def test_bits(built: Built, arch: str) -> None:
    library, emulator = built
    assert library.arch == _epilogue_library.ARCHS[arch]
    assert library.program == EPILOGUES[library.epilogue].program.hash
    count = 0
    for dtype in library.dtypes:
        for call in calls(EPILOGUES[library.epilogue], dtype):
            if epilogue_ops.refusal(library, call):
                continue
            for schedule in SCHEDULES:
                options = {**schedule, "num_sms": NUM_SMS, "compute_capability": library.arch}
                emulator.configure(**options, report_unwritten_global=1, hazards_are_fatal=1)
                emulator.clear()
                compute(library, emulator, call)
                count += 1
    assert count >= len(SCHEDULES) * len(library.dtypes)
