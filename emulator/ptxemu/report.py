"""Comparison of what a kernel executes on the emulator with what NVIDIA's kernels execute there.

NVIDIA's kernels pass their own verification on the emulator (calibration/), which is evidence that the
emulator models what they execute. A kernel that executes nothing else is covered by that evidence.

    python report.py merge CALIBRATED.json STATS_FOLDER    merges the statistics of the calibration runs

Statistics are the JSON of ptxemu_statistics(), one object in each line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The categories of statistics that name features which the emulator models.
CATEGORIES = ("opcode", "idesc", "descriptor", "tma", "tcgen05.cp")
# Opcodes that the emulator's own tests cover.
# fmt: off
_ELEMENTARY = frozenset([
    "abs", "activemask", "add", "and", "atom", "bfe", "bfi", "bfind", "bra", "brev", "brx", "clz",
    "copysign", "cvt", "cvta", "div", "ex2", "exit", "fma", "ld", "lop3", "mad", "max", "min", "mov",
    "mul", "neg", "not", "or", "popc", "prmt", "rcp", "red", "redux", "rem", "ret", "selp", "setp",
    "shf", "shfl", "shl", "shr", "sqrt", "st", "sub", "tanh", "vote", "xor",
])
# fmt: on


def load(folder: Path | str) -> list[dict[str, Any]]:
    """The statistics in the *.json files of a folder."""
    lines = (line for path in sorted(Path(folder).glob("*.json")) for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.strip()]


def merge(statistics: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The union of statistics: {category: {name: count}}."""
    merged: dict[str, dict[str, int]] = {category: {} for category in CATEGORIES}
    for one in statistics:
        for category in CATEGORIES:
            for name, count in one.get(category, {}).items():
                merged[category][name] = merged[category].get(name, 0) + count
    return merged


def is_elementary(opcode: str) -> bool:
    """Whether an opcode computes on registers or copies between them and memory, and is not asynchronous."""
    return opcode.split(".")[0] in _ELEMENTARY and "async" not in opcode and "bulk" not in opcode


def uncalibrated(executed: dict[str, Any], calibrated: dict[str, Any]) -> list[str]:
    """The features that are executed and not calibrated, as "category: name", without elementary opcodes."""
    missing = []
    for category in CATEGORIES:
        known = calibrated.get(category, {})
        for name in sorted(executed.get(category, {})):
            if name not in known and (category != "opcode" or not is_elementary(name)):
                missing.append(f"{category}: {name}")
    return missing


def main(arguments: list[str]) -> int:
    if len(arguments) == 3 and arguments[0] == "merge":
        statistics = load(arguments[2])
        Path(arguments[1]).write_text(json.dumps(merge(statistics), indent=1, sort_keys=True) + "\n")
        print(f"{len(statistics)} runs merged into {arguments[1]}")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
