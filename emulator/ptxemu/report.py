"""Comparison of what a kernel executes on the emulator with what NVIDIA's kernels execute there.

NVIDIA's kernels pass their own verification on the emulator (calibration/), which is evidence that the
emulator models what they execute. A kernel that executes nothing else is covered by that evidence.

    python report.py merge CALIBRATED.json STATS_FOLDER     merges the statistics of the calibration runs
    python report.py compare EXECUTED.json CALIBRATED.json  prints what is not calibrated; status 1 if any

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


def load(path: Path | str) -> list[dict[str, Any]]:
    """The statistics in a file, or in the *.json files of a folder."""
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


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


def contained(executed: dict[str, Any], calibrated: dict[str, Any], elementary: bool = False) -> list[str]:
    """The features that are executed and not calibrated, as "category: name".

    elementary: also compare elementary opcodes, which the emulator's own tests cover (is_elementary).
    """
    missing = []
    for category in CATEGORIES:
        known = calibrated.get(category, {})
        for name in sorted(executed.get(category, {})):
            if name not in known and (elementary or category != "opcode" or not is_elementary(name)):
                missing.append(f"{category}: {name}")
    return missing


def main(arguments: list[str]) -> int:
    if len(arguments) == 3 and arguments[0] == "merge":
        statistics = load(arguments[2])
        Path(arguments[1]).write_text(json.dumps(merge(statistics), indent=1, sort_keys=True) + "\n")
        print(f"{len(statistics)} runs merged into {arguments[1]}")
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        missing = contained(merge(load(arguments[1])), json.loads(Path(arguments[2]).read_text()))
        print("\n".join(missing) if missing else "everything that was executed is calibrated")
        return 1 if missing else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
