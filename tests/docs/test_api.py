"""docs/api.md: every name of it is an attribute of the package, without an import of its module."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
# The names of each module are looked up in a process of their own: the import of another module may set it as
# an attribute.
LOOK_UP = """
import functools, itertools, os, sys
import fp4gemm, torch
for first, names in itertools.groupby(sorted(sys.argv[1:]), lambda name: name.split(".")[0]):
    if os.fork():
        os.wait()
        continue
    for name in names:
        owner, parts = fp4gemm, name.split(".")
        if first == "torch":
            owner, parts = torch, parts[1:]
        try:
            functools.reduce(getattr, parts, owner)
        except AttributeError as error:
            print(name, error, flush=True)
    os._exit(0)
"""


def documented() -> list[list[str]]:
    """The names in the first column of each row of functions, without their arguments."""
    table = PAGE.read_text().split("## Functions and classes", 1)[1]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [[re.split(r"[(\s]", name)[0] for name in re.findall(r"`([^`]+)`", row)] for row in rows]


def full_names() -> list[str]:
    """The names from the package on: a short one follows another of the same row, `.name` is of its class."""
    found = []
    for row in documented():
        before = ""
        for name in row:
            if (name == "x" and before) or name.endswith("*"):  # an argument; all operators
                continue
            if name.startswith("."):
                before = f"{before.rpartition('.')[0] if before.count('.') > 1 else before}{name}"
            elif "." not in name and "." in before:
                before = f"{before.rpartition('.')[0]}.{name}"
            else:
                before = name
            found.append(before)
    return found


def test_every_name_exists() -> None:
    names = full_names()
    assert {"mm", "records.make_records", "ranks.combine_tree", "checkpoint.formats.Scheme"} <= set(names)
    modules = [name for name in names if name.startswith("integrations.")]
    assert all(importlib.util.find_spec(f"fp4gemm.{name}") for name in modules)
    others = [name for name in names if name not in modules]
    done = subprocess.run([sys.executable, "-c", LOOK_UP, *others], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
