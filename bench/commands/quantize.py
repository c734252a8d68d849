"""``python -m bench quantize``: every quantizer, verified bit for bit, then timed against a copy's bandwidth.

``of_copy`` is (bytes that must move) / (time x bandwidth of a copy, read plus write). ``formula`` names the
bytes that are counted: x is the input; q the codes, padded scales and amax of the result; q_t the same of
x.T; y the output of dequantize. A computed amax of the tensor or of a column needs a second read of x, which
is not counted; quantize_both counts two reads, also with a given amax.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from ..measure.cases import (
    Case,
    Family,
    Inputs,
    Sizes,
    dequantize_family,
    families,
    mode_cases,
    plain_family,
)
from ..measure.contest import BITS, OURS, Job, Row, times
from ..measure.harness import Harness, Measured
from ..measure.library import Call, error_line
from ..measure.roofline import Work, digits
from ..measure.verify import difference

SMALL = Sizes(square=(64, 96), tall=(80, 32), gated=((32, 48),), experts=3, few_rows=(1, 4))


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each family with a case that --kernels matches.

    Raises:
        ValueError: a shape is not one that every mode supports.
    """
    if args.shapes:
        for shape in args.shapes:
            if len(shape) != 2 or shape[0] % 16 or shape[1] % 32:
                text = "x".join(map(str, shape))
                raise ValueError(f"--shapes: {text} must be m x k, m a multiple of 16 and k of 32")
        chosen = tuple(
            family
            for shape in args.shapes
            for family in (
                plain_family(shape, torch.bfloat16, mode_cases(shape)),
                dequantize_family(*shape),
            )
        )
    else:
        chosen = families(Sizes() if harness.is_cuda else SMALL)
    return of_families(chosen, harness, args.kernels)


def of_families(
    chosen: Sequence[Family],
    harness: Harness,
    pattern: re.Pattern[str] | None = None,
    bench: str = "quantize",
) -> list[Job]:
    made: dict[str, Job] = {}
    for family in chosen:
        cases = [case for case in family.cases if pattern is None or pattern.search(family.name(case))]
        if cases:
            key = f"{bench} {family.title}"
            if key in made:  # another family has inputs of the same size
                key += f", {cases[0].name}"
            made[key] = Job(key, bench, partial(measure, harness, family, cases, bench))
    return list(made.values())


def with_baselines(family: Family, chosen: Sequence[Case]) -> list[Case]:
    """The chosen cases, and the cases that their targets compare them with."""
    names = {case.name for case in chosen} | {case.target.of for case in chosen if case.target is not None}
    return [case for case in family.cases if case.name in names]


def measure(
    harness: Harness, family: Family, chosen: Sequence[Case], bench: str = "quantize"
) -> Iterator[Row]:
    """The rows of the chosen cases of a family; one with a wrong result is refused, the others are timed."""
    cases = with_baselines(family, chosen)
    count = harness.rotations(min(case.traffic.num_bytes for case in cases))
    wrong: dict[str, str] = {}
    absent: dict[str, str] = {}
    inputs: list[Inputs] = []
    torch.manual_seed(0)
    try:
        inputs = [family.inputs(harness.device) for _ in range(count)]
    except NotImplementedError as error:
        absent = {case.name: f"its input: {error_line(error)}" for case in cases}
    except RuntimeError as error:
        wrong = {case.name: f"its input: {error_line(error)}" for case in cases}
    else:
        for case in cases:
            try:
                reason = refusal(case, inputs[0])
            except NotImplementedError as error:
                absent[case.name] = error_line(error)
                continue
            if reason is not None:
                wrong[case.name] = reason
    contenders: dict[str, Sequence[Call]] = {
        case.name: [partial(case.call, one) for one in inputs]
        for case in cases
        if case.name not in wrong and case.name not in absent
    }
    began = harness.now()
    measured, failed = harness.measure(contenders, 0.0, contenders)
    wrong |= failed
    conditions = harness.conditions(began)
    start: Row = {"bench": bench, "case": f"{bench} {family.title}"}
    for case in chosen:
        if case.name in absent:
            yield start | {"contender": case.name, "absent": absent[case.name]}
        elif case.name in wrong:
            row = start | {"contender": case.name, "refused": wrong[case.name]}
            yield row if case.target is None else row | {"met": False}
        else:
            yield start | result(case, measured, harness) | conditions


def refusal(case: Case, inputs: Inputs) -> str | None:
    """None if a case returns the bits of the reference, else the difference, or the error that it raised.

    Raises:
        NotImplementedError: the device has no kernel for the case.
    """
    try:
        return difference(case.call(inputs), case.want(inputs))
    except NotImplementedError:
        raise
    except RuntimeError as error:
        return error_line(error)


def result(case: Case, measured: Mapping[str, Measured], harness: Harness) -> Row:
    """The fields of one case; ``measured`` holds the times of the cases that it is compared with as well."""
    found = measured[case.name]
    us = found.timing.median_us
    gb_s = case.traffic.num_bytes / us / 1e3
    of_copy = gb_s / harness.roofline.copy_gb_s
    row: Row = {"contender": case.name, "role": OURS, "checked": BITS} | times(found)
    row |= {
        "bytes": case.traffic.num_bytes,
        "formula": str(case.traffic),
        "gb_s": digits(gb_s),
        "of_copy": round(of_copy, 3),
        "of_roofline": round(harness.roofline.least_us(Work(0.0, case.traffic.num_bytes)) / us, 3),
        "bound": "memory",
    }
    target = case.target if harness.is_cuda else None  # targets are for GPUs
    if target is None:
        return row
    row["target"] = str(target)
    if target.of == "us":
        return row | {"met": us <= target.value}
    if target.of == "copy":
        return row | {"met": of_copy >= target.value}
    if target.of not in measured:
        return row | {"met": False, "note": f"{target.of} was refused: no ratio"}
    ratio = measured[target.of].timing.median_us / us
    return row | {"ratio": {target.of: digits(ratio)}, "met": ratio >= target.value}
