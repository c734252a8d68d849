"""NVIDIA's NVFP4 GEMMs in the CUTLASS DSL (Python), compiled without a GPU and run on the emulator.

python tests/emulated/dsl_gemm.py [KERNEL] [--tile 256x128] [--cluster 2x1] [--epilogue 64x32] [--config NAME]

KERNEL is dense (the default) or grouped, for SM100, or cooperative or pingpong, for SM120: examples of
CUTLASS's repository, in the checkout that CUTLASS_DIR names. frost-sm100 and frost-sm120 are kernels that
cuDNN's FROST engine generates (the package nvidia-cudnn-frontend), with a row and a column vector in the
epilogue. All need the package nvidia-cutlass-dsl. The host code that the DSL compiles calls the emulator in
place of the DSL's runtime library. D is compared with this project's reference, bit for bit, under every
schedule.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (Path(__file__).parent, _ROOT / "tests" / "support", _ROOT / "emulator"):
    sys.path.insert(0, str(_folder))


@dataclass(frozen=True)
class Example:
    """A file of CUTLASS's repository, and the compute capability that it is for."""

    capability: int
    name: str
    folders: tuple[str, ...]  # below examples/python/CuTeDSL, from the newest version of CUTLASS on

    def path(self) -> Path | None:
        """The file in the checkout that CUTLASS_DIR names, or None."""
        root = os.environ.get("CUTLASS_DIR")
        paths = [Path(root, "examples/python/CuTeDSL", folder, self.name) for folder in self.folders if root]
        return next((path for path in paths if path.is_file()), None)


_SM100 = "cute/blackwell/kernel"
_SM120 = ("cute/blackwell_geforce/kernel/blockscaled_gemm",)
EXAMPLES = {
    "dense": Example(
        100, "dense_blockscaled_gemm_persistent.py", (f"{_SM100}/blockscaled_gemm", "blackwell")
    ),
    "grouped": Example(
        100, "grouped_blockscaled_gemm.py", (f"{_SM100}/blockscaled_grouped_gemm", "blackwell")
    ),
    "cooperative": Example(120, "dense_blockscaled_gemm_persistent_cooperative.py", _SM120),
    "pingpong": Example(120, "dense_blockscaled_gemm_persistent_pingpong.py", _SM120),
}
# FROST's families of kernels, with their compute capability.
FROST = {"frost-sm100": 100, "frost-sm120": 120}
# Findings of the emulator in a kernel of others, which the PTX ISA's text confirms (docs/blackwell.md).
KNOWN = {
    "frost-sm100": (
        "which no synchronization and tcgen05.fence order after another warp's",
        "read by threads that no synchronization orders before it",
    )
}
# The kernels require numbers of columns and of k that are multiples of 32.
SIZES = {"grouped": [(130, 160, 544), (320, 96, 256), (32, 384, 96), (256, 128, 1088)]}
DENSE = [(320, 160, 544)]


def missing(kernel: str) -> str:
    """What is missing to run a kernel of EXAMPLES or FROST, or ""."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        return "the package nvidia-cutlass-dsl is not installed"
    if kernel in FROST:
        has_frost = importlib.util.find_spec("cudnn") and importlib.util.find_spec("cudnn.gemm")
        return "" if has_frost else "the package nvidia-cudnn-frontend (1.32 or newer) is not installed"
    if EXAMPLES[kernel].path() is None:
        return f"CUTLASS_DIR names no checkout of CUTLASS with the DSL's {EXAMPLES[kernel].name}"
    return ""


def _load(path: Path) -> ModuleType:
    """The module of an example, which may import others of its folder."""
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _unknown(kernel: str, hazards: str) -> tuple[str, int]:
    """The findings that KNOWN lacks, and the number of the others."""
    reports = [report for report in hazards.split("\n") if report and not report.startswith("  ")]
    unknown = [report for report in reports if not any(part in report for part in KNOWN.get(kernel, ()))]
    return (hazards if unknown else ""), len(reports) - len(unknown)


def run(
    kernel: str,
    tile: tuple[int, ...],
    cluster: tuple[int, int],
    epilogue: tuple[int, int],
    config: str | None,
    folder: Path,
) -> bool:
    """Compiles and runs the kernel, and prints for each schedule whether D has the reference's bits."""
    import torch
    from problems import PLAIN, computed, dense, numbers
    from ptxemu.emulator import Emulator, EmulatorError
    from session import NUM_SMS, SCHEDULES, build_folder, describe, same_bits

    library = next(build_folder().glob("**/libptxemu.so"))
    capability = FROST[kernel] if kernel in FROST else EXAMPLES[kernel].capability
    # The DSL reads these when it is imported.
    os.environ |= {
        "CUTE_DSL_ARCH": f"sm_{capability}a",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_LIBS": str(library),
        "CUDNN_FRONTEND_GEMM_ARCH_FAMILY": f"sm{capability}",
        "CUDNN_FRONTEND_GEMM_KERNEL_CACHE": str(folder / "frost"),
    }
    emulator = Emulator(library)
    device = {"num_sms": NUM_SMS, "compute_capability": capability, "report_unwritten_global": 1}
    emulator.configure(**device)

    import dsl_kernels

    problems = [dense(*sizes, torch.bfloat16, PLAIN) for sizes in SIZES.get(kernel, DENSE)]
    vectors: list[torch.Tensor] = []
    if kernel in FROST:
        gen, (plain,) = torch.Generator().manual_seed(1), problems
        vectors = [numbers((plain.m,), gen), numbers((plain.n,), gen)]
        scaled = replace(plain, vectors=dict(zip(("alpha_row", "alpha_col"), vectors, strict=True)))
        problems = [replace(scaled, want=computed(scaled, torch.bfloat16))]
        launch = dsl_kernels.frost(f"sm{capability}", config, NUM_SMS, plain)
    else:
        path = EXAMPLES[kernel].path()
        if path is None:
            raise FileNotFoundError(missing(kernel))
        module = _load(path)
        if kernel == "dense":
            launch = dsl_kernels.dense_100(module, tile, cluster, NUM_SMS)
        elif kernel == "grouped":
            launch = dsl_kernels.grouped_100(module, tile, cluster, NUM_SMS, len(problems), emulator)
        else:
            launch = dsl_kernels.dense_120(module, tile, epilogue, NUM_SMS)
    emulator.load(folder)

    results = [emulator.empty((problem.m, problem.n), torch.bfloat16) for problem in problems]
    arrays = [
        [
            *(emulator.upload(x.view(torch.uint8)) for x in (p.a, p.b, p.scale_a, p.scale_b)),
            d,
            *map(emulator.upload, vectors),
        ]
        for p, d in zip(problems, results, strict=True)
    ]
    right = True
    for schedule in SCHEDULES:
        emulator.configure(**device, **schedule)
        emulator.clear()
        for d in results:
            d.poison()
        try:
            launch(arrays, problems)
            got = [(emulator.download(d), p.want) for d, p in zip(results, problems, strict=True)]
            found = "; ".join(describe(*pair) for pair in got if not same_bits(*pair)) or "equal"
        except EmulatorError as error:
            found = str(error)
        unknown, num_known = _unknown(kernel, emulator.hazards())
        found += unknown
        right = right and found == "equal"
        known = f", {num_known} known findings" if num_known else ""
        print(f"{kernel}, {schedule}: {found}{known}", flush=True)
    return right


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be two or three numbers, such as 128x64")
    return tuple(map(int, parts))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", nargs="?", choices=[*EXAMPLES, *FROST], default="dense")
    parser.add_argument("--tile", type=_numbers, help="rows x columns of an MMA; for SM120 of a tile, x k")
    parser.add_argument(
        "--cluster", type=_numbers, default=(1, 1), help="CTAs of a cluster; 2x1 for 256 rows"
    )
    parser.add_argument("--epilogue", type=_numbers, default=(128, 128), help="rows x columns, for SM120")
    parser.add_argument("--config", help="a tile of FROST's catalog; default: its own choice")
    options = parser.parse_args()
    if reason := missing(options.kernel):
        parser.error(reason)
    tile = options.tile or ((128, 128) if options.kernel in ("dense", "grouped") else (128, 128, 128))
    given = (options.kernel, tile, options.cluster, options.epilogue, options.config)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(*given, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
