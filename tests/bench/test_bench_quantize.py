"""bench quantize: bytes, targets, verification, and every case of the table on small CPU inputs."""

from __future__ import annotations

import re

import fp4gemm
import pytest
import torch
from bench_helpers import cpu_harness
from fp4gemm import reference

from bench.commands import quantize
from bench.measure import cases, traffic, verify
from bench.measure.harness import Measured
from bench.measure.library import Timing, rotations
from bench.measure.targets import Target

CPU = torch.device("cpu")
SMALL = cases.Sizes(square=(64, 96), tall=(80, 32), gated=((32, 48),), experts=3, few_rows=(1, 4))
SMALL_CASES = [(family, case) for family in cases.families(SMALL) for case in family.cases]


def ids(pairs: list[tuple[cases.Family, cases.Case]]) -> list[str]:
    return [re.sub(r"[ ,]+", "-", family.name(case)) for family, case in pairs]


# ---- bytes and targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "block"), [(1, 16, 16), (128, 64, 16), (129, 80, 16), (130, 160, 32)])
def test_scale_bytes_are_those_of_the_library(m: int, k: int, block: int) -> None:
    t = fp4gemm.quantize(torch.ones(m, k)) if block == 16 else fp4gemm.quantize_mxfp8(torch.ones(m, k))
    assert traffic.scale_bytes(m, k, block) == t.scales.nbytes


def test_packed_bytes_are_those_of_the_container() -> None:
    x = torch.ones(130, 48)
    assert traffic.packed_bytes(130, 48, 130) == fp4gemm.quantize(x).nbytes
    assert traffic.packed_bytes(130, 48, 1) == fp4gemm.quantize(x, scaling="tensor").nbytes


@pytest.mark.parametrize(("m", "g"), [(1, 1), (128, 1), (5, 3), (300, 128)])
def test_grouped_bytes_are_those_of_the_container(m: int, g: int) -> None:
    offs = torch.full((g,), m, dtype=torch.int32)
    t = fp4gemm.quantize(torch.ones(m, 32), offs=offs)
    assert t.scales.shape[0] == traffic.grouped_rows(m, g)
    assert traffic.grouped_bytes(m, 32, g) == t.codes.nbytes + t.scales.nbytes + t.amax.nbytes + offs.nbytes


def test_the_bytes_of_the_large_rows() -> None:
    by_name = {family.name(case): case for family in cases.families(cases.Sizes()) for case in family.cases}
    elems, packed = 8192 * 8192, 8192 * 8192 // 2 + 8192 * 512 + 4 * 8192
    row = by_name["row, bf16 8192x8192"].traffic
    assert (row.num_bytes, str(row)) == (2 * elems + packed, "x + q")
    both = by_name["both row, bf16 8192x8192"].traffic
    assert (both.num_bytes, str(both)) == (4 * elems + 2 * packed, "2 x + q + q_t")
    assert by_name["row, fp32 8192x8192"].traffic.num_bytes == 4 * elems + packed
    assert by_name["silu_and_mul row, bf16 8192x16384"].traffic.num_bytes == 4 * elems + packed
    assert by_name["mxfp8, bf16 8192x8192"].traffic.num_bytes == 2 * elems + elems + elems // 32
    assert by_name["dequantize to fp32, 8192x8192"].traffic.num_bytes == packed + 4 * elems
    residual = by_name["rms_norm row, residual, bf16 8192x8192"].traffic
    assert residual.num_bytes == 6 * elems + packed + 2 * 8192


def test_names_are_unique_but_for_the_shared_row() -> None:
    names = [family.name(case) for family in cases.families(cases.Sizes()) for case in family.cases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("size", "l2", "count"), [(100, 50, 2), (100, 1000, 30), (7, 10, 5)])
def test_rotations_cover_three_times_the_cache(size: int, l2: int, count: int) -> None:
    assert rotations(size, l2) == count
    assert count * size >= 3 * l2


def case_with(target: Target | None, name: str = "mine") -> cases.Case:
    nothing = lambda inputs: ()  # noqa: E731
    return cases.Case(name, nothing, nothing, traffic.Traffic({"x": 3_000_000, "q": 1_000_000}), target)


@pytest.mark.parametrize(
    ("target", "us", "met", "text"),
    [
        (Target(0.8), 1.25, True, ">= 0.80 of copy"),
        (Target(0.8), 1.26, False, ">= 0.80 of copy"),
        (Target(4, "us"), 4.0, True, "<= 4 us"),
        (Target(4, "us"), 4.1, False, "<= 4 us"),
        (Target(0.9, "dense"), 2.2, True, ">= 0.90 of dense"),
        (Target(0.9, "dense"), 2.3, False, ">= 0.90 of dense"),
        (Target(0.9, "gone"), 1.0, False, ">= 0.90 of gone"),
        (None, 1.0, None, ""),
    ],
)
def test_bars(target: Target | None, us: float, met: bool | None, text: str) -> None:
    measured = {"mine": Measured(Timing(us, us, us)), "dense": Measured(Timing(2.0, 2.0, 2.0))}
    harness = cpu_harness(copy_gb_s=4000.0, read_gb_s=2000.0)
    harness.is_cuda = True  # targets are for GPUs
    row = quantize.result(case_with(target), measured, harness)
    assert row.get("met") is met
    assert row["of_copy"] == row["of_roofline"] == round(1000 / us / 1e3, 3)
    assert row["formula"] == "x + q"
    assert str(row.get("target", "")) == text
    assert "target" not in quantize.result(case_with(target), measured, cpu_harness())


# ---- verification --------------------------------------------------------------------------------------


def test_one_wrong_bit_is_seen() -> None:
    x = torch.randn(33, 64)
    t, want = fp4gemm.quantize(x), reference.quantize(x, None, True)
    assert verify.difference(t, want) is None
    for part in ("codes", "scales", "amax"):
        wrong = t.clone()
        getattr(wrong, part).view(torch.uint8).view(-1)[-1] ^= 1  # of the scales, a byte of the padding
        text = f"{part}: 1 of {getattr(t, part).nbytes} bytes differ from the reference"
        assert verify.difference(wrong, want) == text


def test_wrong_shapes_dtypes_and_counts_are_seen() -> None:
    x = torch.randn(4, 16)
    assert verify.difference(x, (x, x)) == "1 tensors, the reference gives 2"
    assert "torch.float64" in str(verify.difference(x, (x.double(),)))
    assert "(4, 8)" in str(verify.difference(x[:, :8], (x,)))
    with pytest.raises(TypeError, match="got a int"):
        verify.parts(1)


def test_nan_equals_itself_and_zero_its_sign_only() -> None:
    nan = torch.full((2,), float("nan"))
    assert verify.difference(nan, (nan.clone(),)) is None
    assert verify.difference(torch.zeros(1), (-torch.zeros(1),)) is not None


def test_the_given_amax_stands_in_for_the_empty_one() -> None:
    empty, codes, amax = torch.empty(0), torch.ones(2), torch.ones(1)
    assert verify.filled((codes, empty), [amax])[1] is amax
    assert verify.filled((codes, codes), [amax])[1] is codes


@pytest.mark.parametrize(("family", "case"), SMALL_CASES, ids=ids(SMALL_CASES))
def test_every_case_agrees_with_its_reference(family: cases.Family, case: cases.Case) -> None:
    """The options mean the same in both calls: on the CPU the library runs the reference itself."""
    torch.manual_seed(0)
    assert quantize.refusal(case, family.inputs(CPU)) is None


@pytest.mark.parametrize("name", ["row", "tensor, amax given", "row 4over6 mae", "row stochastic", "mxfp8"])
def test_a_wrong_kernel_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library quantizes other numbers: each case must be refused."""
    family = cases.families(SMALL)[0]
    case = next(case for case in family.cases if case.name == name)
    for function in ("quantize", "quantize_mxfp8"):
        right = getattr(fp4gemm, function)
        monkeypatch.setattr(fp4gemm, function, lambda x, right=right, **options: right(3 * x, **options))
    assert "differ from the reference" in str(quantize.refusal(case, family.inputs(CPU)))


def test_a_missing_kernel_is_absent() -> None:
    def absent(inputs: cases.Inputs) -> object:
        raise NotImplementedError("x: no kernel\nfor it")

    case = cases.Case("mine", absent, lambda inputs: (), traffic.Traffic({"x": 8}))
    family = cases.Family("none", lambda device: {}, (case,))
    assert list(quantize.measure(cpu_harness(), family, family.cases)) == [
        {
            "bench": "quantize",
            "case": "quantize none",
            "contender": "mine",
            "absent": "NotImplementedError: x: no kernel",
        }
    ]


def test_a_family_is_measured_and_the_wrong_case_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp4gemm.quantize
    monkeypatch.setattr(
        fp4gemm, "quantize", lambda x, **options: right(3 * x if "stochastic" in options else x, **options)
    )
    family = cases.families(SMALL)[0]
    rows = list(quantize.measure(cpu_harness(), family, family.cases))
    assert [row["contender"] for row in rows] == [case.name for case in family.cases]
    assert {row["case"] for row in rows} == {"quantize bf16 64x96"}
    refused = [row for row in rows if "refused" in row]
    drawing = ("row stochastic", "row hadamard fp32, stochastic", "row eden")
    assert [row["contender"] for row in refused] == list(drawing)
    assert [row["met"] for row in refused if "met" in row] == [False], "of the case with a target"
    assert all(row["us"] > 0 and row["checked"] == "bit for bit" for row in rows if "refused" not in row)


def test_inputs_that_cannot_be_made_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError("x: no kernel")

    monkeypatch.setattr(fp4gemm, "quantize_mxfp8", absent)
    family = next(f for f in cases.families(SMALL) if any(c.name == "decode" for c in f.cases))
    rows = list(quantize.measure(cpu_harness(), family, family.cases))
    assert {row["absent"] for row in rows} == {"its input: NotImplementedError: x: no kernel"}


def test_cases_of_targets_are_timed_too() -> None:
    family = next(family for family in cases.families(SMALL) if any("zipf" in c.name for c in family.cases))
    zipf = [case for case in family.cases if "zipf" in case.name]
    assert [case.name for case in quantize.with_baselines(family, zipf)] == ["row", zipf[0].name]


@pytest.mark.parametrize("zipf", [False, True], ids=["uniform", "zipf"])
def test_group_ends(zipf: bool) -> None:
    ends = cases.group_ends(16384, 128, zipf)
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert (ends.dtype, int(ends[-1]), int(sizes.min()) >= 0) == (torch.int32, 16384, True)
    assert (int(sizes.max()) > 2000) == zipf
    assert torch.equal(ends, cases.group_ends(16384, 128, zipf))
