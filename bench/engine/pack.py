"""``python -m bench.engine.pack``: vLLM's engine for one Hopper GPU, in an archive that can be carried.

The machine that unpacks it needs torch 2.11 for CUDA 13, Python 3.12 and transformers, and no network.
vLLM's wheel pins a newer torch, but its compiled parts use torch's stable ABI and load with that one. The
wheel has 336 MB, most of it CUDA code for other GPUs. The archive keeps, of the compiled parts, what compute
capability 9.0 runs: FlashAttention 3 with heads of 128 in bf16 and FP8 and with heads of 64 in bf16, and
Marlin with weights in NVFP4 and MXFP4. It lacks FlashInfer, FlashAttention 2, DeepGEMM, FlashMLA, and the
front end in Rust.

``requirements/engine.txt`` pins each package with the hash of its wheel, and the archive has no times and no
owners, so that the same requirements give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from .fatbin import reduced, smallest_cubin

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements" / "engine.txt"
PYTHON, GLIBC = "3.12", 39  # of the machine that runs the engine
ARCH = 90
# Compiled parts whose code is reduced; the others that the wheel has are left out.
REDUCED = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs|_flashmla\w*|_flashkda\w*|_deepselect\w*|_qutlass\w*)(\.abi3\.so)?$"
    r"|vllm/vllm_flash_attn/_vllm_fa2_C\.abi3\.so$"
    r"|vllm/third_party/(deep_gemm|fmha_sm100)/"
    r"|.*\.dist-info/RECORD$"
    r"|.*\.data/(scripts|headers)/"
    r"|.*\.(pyi|c|h|hpp|cu|cuh|cpp)$"
)
# vLLM's numbers for bfloat16 and e2m1 in the names of Marlin's kernels.
_MARLIN = re.compile(r"marlin6Marlin|marlin_moe_wna166Marlin")
_MARLIN_FP4 = re.compile(r"MarlinILl1125899906909960ELl562949953487106E")
_ATTENTION = re.compile(r"FlashAttnFwdSm90")
_ATTENTION_WANTED = re.compile(  # NS_, NS0_ and so on: the namespace of the type of the elements
    r"CollectiveMainloopFwdSm90.{0,140}?ELi(128ENS\w?_(10bfloat16_t|12float_e4m3_t)|64ENS\w?_10bfloat16_t)"
)
_OTHER = re.compile(r"enable_sm89_to_sm90|7machete|selective_scan|gptq33|muse_spark|deepseek_v4")


def is_wanted(kernel: str) -> bool:
    """Whether a kernel of this mangled name is one that the benchmark can reach."""
    if _MARLIN.search(kernel):
        return bool(_MARLIN_FP4.search(kernel))
    if _ATTENTION.search(kernel):
        return bool(_ATTENTION_WANTED.search(kernel))
    return not _OTHER.search(kernel)


def download(folder: Path) -> list[Path]:
    """The wheels of requirements/engine.txt; those that the folder has are not downloaded again."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux2010_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command += ["--find-links", str(folder), "--dest", str(folder), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unpacked(wheels: list[Path]) -> dict[str, bytes]:
    """The files of all wheels that the archive has, by their path, reduced."""
    files: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                if name.endswith("/") or LEFT_OUT.match(name):
                    continue
                files[re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)] = opened.read(name)
    missing = [name for name in REDUCED if name not in files]
    if missing:
        raise ValueError(f"vLLM's wheel has no {', '.join(missing)}")
    nothing = smallest_cubin(files[REDUCED[0]], ARCH)
    for name in REDUCED:
        files[name] = reduced(files[name], ARCH, is_wanted, nothing)
    return files


def write(files: dict[str, bytes], path: Path) -> int:
    """Writes the archive and returns its size: files in the order of their names, of one time and owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    options = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 64 << 20}]
    with (
        lzma.open(temporary, "wb", filters=options) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            member.mode = 0o755 if name.endswith(".so") else 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    temporary.replace(path)
    return path.stat().st_size


def main() -> int:
    """Downloads, reduces and packs; prints the path of the archive and its size."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.pack", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "engine" / "engine.tar.xz")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "engine" / "wheels")
    parser.add_argument("--site", type=Path, help="also write the files into this folder")
    args = parser.parse_args()
    files = unpacked(download(args.wheels))
    if args.site is not None:
        shutil.rmtree(args.site, ignore_errors=True)
        for name, data in files.items():
            (args.site / name).parent.mkdir(parents=True, exist_ok=True)
            (args.site / name).write_bytes(data)
    size = write(files, args.out)
    print(f"{args.out}: {size / 1e6:.1f} MB, {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
