"""Every wrong argument of every public function raises an error that names the argument."""

from __future__ import annotations

import inspect
import re
from typing import Any

import bad_cases
import fp4gemm
import numpy as np
import pytest
import torch
from bad_cases import CASES, FUNCTIONS, Case
from fp4gemm import layout, ranks, records, reference


def case_id(case: Case) -> str:
    return f"{case.function}-{case.kind}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_names_the_argument(case: Case) -> None:
    complaint = bad_cases.complaint(case)
    assert complaint is None, f"{case_id(case)}: {complaint}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unchanged_calls_are_right(name: str) -> None:
    """The calls that the cases change are right, so that each case fails because of its change."""
    function, base = FUNCTIONS[name]
    assert function(**base()) is not None


CONTAINERS = ("NVFP4Tensor", "DecodedTensor", "PrepackedTensor", "MXFP8Tensor", "MXFP4Tensor", "FP8Tensor")
NO_TENSORS: dict[str, Any] = {
    "array": np.ones(3),
    "nested": torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(2, 64)]),
    "list": [1, 2],
}
# torch's Tensor.to accepts a tensor in place of a device. The others are lists or are unpacked, and torch
# refuses the length of a nested tensor.
UNCHECKED = {
    *((f"{name}.to", "device") for name in CONTAINERS),
    *(
        (f"reference.{name}", argument)
        for name in ("gemm_epilogue", "gemm_epilogue_out")
        for argument in ("inputs", "scalars", "aux_dtypes")
    ),
    ("training.convert_model", "filter"),
    ("NVFP4Tensor.reshape", "shape"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_lists_and_nested_tensors_are_refused_by_name(name: str) -> None:
    """In the place of any argument; an argument that needs another one may name that."""
    function, base = FUNCTIONS[name]
    for argument in base():
        for kind, value in NO_TENSORS.items():
            if kind == "nested" and (name, argument) in UNCHECKED:
                continue
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
                function(**{**base(), argument: value})
            assert re.match(r"[a-z][\w.\[\]]*: ", str(error.value)), (argument, kind, str(error.value))


def test_case_count_and_ids() -> None:
    ids = [case_id(case) for case in CASES]
    assert len(ids) == len(set(ids))
    assert len(ids) >= 500


def test_every_argument_has_a_case() -> None:
    """Compares the cases with the signatures, so that a new function or argument without cases fails."""
    covered = {(case.function, case.kind.split("-")[0]) for case in CASES}
    wanted = {
        (name, argument)
        for name, (function, _) in FUNCTIONS.items()
        if name != "reference.gemm_out of rows"  # has cases of out alone
        for argument in inspect.signature(function).parameters
    }
    assert wanted - covered == set()


def test_every_public_function_has_cases() -> None:
    public = {name for name in fp4gemm.__all__ if callable(getattr(fp4gemm, name))}
    # A MXFP4Weight is a tuple, which from_mxfp4 and from_weight check.
    assert public - set(FUNCTIONS) == {"kernels", "MXFP4Weight"}
    of_records = {f"records.{name}" for name in records.__all__} - {"records.record_bytes"}
    of_ranks = {f"ranks.{name}" for name in ranks.__all__} - {"ranks.RankRouting"}
    assert (of_records | of_ranks) - set(FUNCTIONS) == set()
    assert {f"reference.{name}" for name in reference.__all__} - set(FUNCTIONS) == set()
    # Arithmetic on two ints, which are symbolic while a graph is traced.
    assert set(layout.__all__) - set(FUNCTIONS) == {
        "grouped_columns",
        "grouped_scale_rows",
        "padded_scale_shape",
        "record_bytes",
    }
    methods = {
        f"{owner.__name__}.{name}"
        for owner in (
            fp4gemm.NVFP4Tensor,
            fp4gemm.DecodedTensor,
            fp4gemm.PrepackedTensor,
            fp4gemm.MXFP8Tensor,
            fp4gemm.FP8Tensor,
        )
        for name, method in inspect.getmembers(owner, callable)
        if not name.startswith("_")
        and len(inspect.signature(method).parameters) > (inspect.isfunction(method))
    }
    assert methods - set(FUNCTIONS) == set()
