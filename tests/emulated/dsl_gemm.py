"""NVIDIA's dense NVFP4 GEMM in the CUTLASS DSL (Python), compiled without a GPU and run on the emulator.

python tests/emulated/dsl_gemm.py [--example FILE] [--tile 256x128] [--cluster 2x1]

needs the package nvidia-cutlass-dsl, and an example of CUTLASS's repository that is not in the package: FILE,
or the one in the checkout that CUTLASS_DIR names. The host code that the DSL compiles calls the emulator in
place of the DSL's runtime library. D is compared with this project's reference, bit for bit, under every
schedule.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (Path(__file__).parent, _ROOT / "tests" / "support", _ROOT / "emulator"):
    sys.path.insert(0, str(_folder))

_NAME = "dense_blockscaled_gemm_persistent.py"
_FOLDERS = ("cute/blackwell/kernel/blockscaled_gemm", "blackwell")  # from 4.6 on; before
M, N, K = 320, 160, 544  # the kernel requires multiples of 32


def example() -> Path | None:
    """The example in the checkout that CUTLASS_DIR names, or None."""
    root = os.environ.get("CUTLASS_DIR")
    paths = [Path(root, "examples/python/CuTeDSL", folder, _NAME) for folder in _FOLDERS] if root else []
    return next((path for path in paths if path.is_file()), None)


def missing() -> str:
    """What is missing to run the kernel, or ""."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        return "the package nvidia-cutlass-dsl is not installed"
    if example() is None:
        return f"CUTLASS_DIR names no checkout of CUTLASS with the DSL's {_NAME}"
    return ""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("dsl_example", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--example: got {path}, must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(path: Path, tile: tuple[int, int], cluster: tuple[int, int], folder: Path) -> bool:
    """Compiles and runs the kernel, and prints for each schedule whether D has the reference's bits."""
    import torch
    from problems import PLAIN, dense
    from ptxemu.emulator import Emulator, EmulatorError
    from session import NUM_SMS, SCHEDULES, build_folder, describe, same_bits

    library = next(build_folder().glob("**/libptxemu.so"))
    # The DSL reads these when it is imported.
    os.environ |= {
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_LIBS": str(library),
    }
    emulator = Emulator(library)
    device = {"num_sms": NUM_SMS, "compute_capability": 100, "report_unwritten_global": 1}
    emulator.configure(**device)

    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    module = _load(path)
    codes, scales, numbers = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.BFloat16
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(16, tile, cluster)
    clusters = NUM_SMS // (cluster[0] * cluster[1])
    stream = CUstream(0)
    compiled = module.scaled_mm(kernel, codes, codes, numbers, scales, "k", "k", "n", clusters, stream)
    compiled.__dict__["num_devices"] = 1  # it would ask the driver
    emulator.load(folder)

    problem = dense(M, N, K, torch.bfloat16, PLAIN)
    d = emulator.empty((M, N), torch.bfloat16)
    operands = [
        emulator.upload(tensor.view(torch.uint8))
        for tensor in (problem.a, problem.b, problem.scale_a, problem.scale_b)
    ]
    types = [codes, codes, scales, scales, numbers]
    pointers: list[Any] = [
        make_ptr(kind, array.pointer, cute.AddressSpace.gmem, assumed_align=32 if kind is scales else 16)
        for kind, array in zip(types, [*operands, d], strict=True)
    ]
    right = True
    for schedule in SCHEDULES:
        emulator.configure(**device, **schedule)
        emulator.clear()
        d.poison()
        try:
            compiled(*pointers, (M, N, K, 1), stream)
            got = emulator.download(d)
            found = "equal" if same_bits(got, problem.want) else describe(got, problem.want)
        except EmulatorError as error:
            found = str(error)
        found += emulator.hazards()
        right = right and found == "equal"
        print(f"{'x'.join(map(str, tile))}, {schedule}: {found}", flush=True)
    return right


def _pair(text: str) -> tuple[int, int]:
    first, times, second = text.partition("x")
    if not (times and first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be two numbers, such as 128x64")
    return int(first), int(second)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--example", type=Path, help="the Python file of the example")
    parser.add_argument("--tile", type=_pair, default=(128, 128), help="rows x columns of an MMA")
    parser.add_argument("--cluster", type=_pair, default=(1, 1), help="CTAs of a cluster; 2x1 for 256 rows")
    options = parser.parse_args()
    path = options.example or example()
    if path is None:
        parser.error(f"--example: must be given, since {missing()}")
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(path, options.tile, options.cluster, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
