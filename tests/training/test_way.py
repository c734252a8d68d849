"""The way of a call of training.Linear through the package: how many files a reader has to open."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType

import fp4gemm
import pytest
import torch
from fp4gemm import training
from training_cases import RECIPES

PACKAGE = Path(fp4gemm.__file__).parent
OPERATORS = PACKAGE / "ops"
MAX_FILES, MAX_STAYS = 10, 25


def files_of(call: Callable[[], object]) -> list[str]:
    """The file of each function of the package that a call enters, without those that operators call."""
    seen: list[str] = []

    def entered(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        outer: FrameType | None = frame
        while outer is not None:
            if Path(outer.f_code.co_filename).is_relative_to(OPERATORS):
                return
            outer = outer.f_back
        seen.append(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("m", [64, 33], ids=["operator", "one by one"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_forward_pass_is_read_in_few_files(name: str, m: int) -> None:
    """A stay is a number of functions of one file that are entered one after the other."""
    layer = training.Linear(64, 96, recipe=RECIPES[name], dtype=torch.bfloat16)
    x = torch.randn(m, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x)
    files = files_of(lambda: layer(x))
    assert files[0] == "training/linear.py"
    assert len(set(files)) <= MAX_FILES, sorted(set(files))
    stays = [file for file, _ in groupby(files)]
    assert len(stays) <= MAX_STAYS, stays
