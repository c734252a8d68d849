"""tune: comparison with the reference, spans of m, the file of results, and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, selection
from fp4gemm.commands import main
from fp4gemm.commands import tune as command
from fp4gemm.device import products, timing, tune
from fp4gemm.device.tune import Journal
from fp4gemm.kernel_table import KernelInfo
from fp4gemm.support import Support

CPU = torch.device("cpu")
POINT = tune.Point(0, 48, 64, 5, "fp16", "nvfp4", "bf16")


def product(m: int = 5, n: int = 48, k: int = 64, a: str = "fp16", b: str = "nvfp4", groups: int = 0) -> Any:
    gen = torch.Generator().manual_seed(m)
    w = products.gaussian_weights(n, k, CPU, gen, groups)
    offs = products.random_ends(m, groups, CPU, gen) if groups else None
    return products.Product(products.activations(a, m, k, CPU, gen, offs), products.weights_in(b, w), w, offs)


class Faulty:
    """A product whose kernels are right, wrong in one bit of the last row, without effect, or missing."""

    def __init__(self, right: Any) -> None:
        self.right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def run(self, kernel: str, out: torch.Tensor) -> torch.Tensor:
        if kernel == "missing":
            raise NotImplementedError("no such kernel\nat all")
        if kernel == "silent":
            return out
        self.right.run(None, out)
        if kernel == "wrong":
            out.view(torch.int16)[-1, 3] ^= 1
        return out


def timed(us: Mapping[str, float]) -> tune.Timer:
    def timer(
        contenders: Mapping[str, Sequence[timing.Call]], rounds: int, min_calls: int
    ) -> dict[str, timing.Timing]:
        assert (rounds, min_calls) == (7, timing.MIN_CALLS)
        for calls in contenders.values():
            for call in calls:
                call()
        return {name: timing.Timing(us[name], us[name], us[name]) for name in contenders}

    return timer


# ---- the comparison with the reference --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("nvfp4", "nvfp4"),
        ("fp16", "fp16"),
        ("fp16", "prepacked"),
        ("nvfp4", "prepacked"),
        ("bf16", "prepacked"),
        ("bf16", "nvfp4"),
    ],
)
@pytest.mark.parametrize("groups", [0, 3], ids=["dense", "grouped"])
def test_every_form_of_operands_has_the_bits_of_the_reference(a: str, b: str, groups: int) -> None:
    """On the CPU the library is the reference, so both must get the same alphas, rows and columns."""
    one = product(m=37, n=200, k=96, a=a, b=b, groups=groups)
    got = one.run(out=one.poisoned())
    assert products.difference(one, got) is None
    wrong = got.clone()
    wrong.view(torch.int16)[-1, -1] ^= 1
    text = products.difference(one, wrong)
    assert text is not None
    assert "1 of " in text
    assert "column 199, is " in text
    assert "nan" in str(products.difference(one, one.poisoned()))


def test_columns_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "COLUMNS", 128)
    one = product(m=3, n=264, k=64)
    got = one.run(out=one.poisoned())
    assert products.difference(one, got) is None
    got.view(torch.int16)[1, 256] ^= 1
    assert "1 of 24 elements differ, the first, at row 1, column 256" in str(products.difference(one, got))


def test_rows_are_spread_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", 4)
    one = product(m=10)
    got = one.run(out=one.poisoned())
    for row, seen in ((0, True), (3, True), (6, True), (9, True), (1, False)):
        wrong = got.clone()
        wrong.view(torch.int16)[row, 0] ^= 1
        assert (products.difference(one, wrong) is not None) is seen


def test_wrong_kernels_are_reported_and_never_timed() -> None:
    """A wrong bit, rows that were not written, and a kernel that raises."""
    right = product()
    us = {"slow": 3.0, "fast": 2.0}
    names = ["wrong", "slow", "silent", "fast", "missing"]
    one = tune.measure(POINT, names, [Faulty(right)] * 2, 7, timed(us))
    assert one.us == us
    assert set(one.refused) == {"wrong", "silent", "missing"}
    assert one.refused["missing"] == "NotImplementedError: no such kernel"
    assert one.refused["wrong"].startswith("1 of 240 elements differ, the first, at row 4, column 3, is ")
    assert "240 of 240 elements differ" in one.refused["silent"]
    none = tune.measure(POINT, ["wrong"], [Faulty(right)], 7, timed({}))
    assert (none.us, len(none.refused)) == ({}, 1)
    assert tune.rules([none]) == []


def test_candidates_take_the_operands() -> None:
    def kernel(name: str, **other: Any) -> KernelInfo:
        fields: dict[str, Any] = {
            "mode": "dense",
            "epilogue": "rowcol",
            "arch": 90,
            "tile": (1, 1, 1),
            "cluster": (1, 1),
            "out_dtype": torch.bfloat16,
            "operand": "prepacked",
            "is_swapped": True,
        }
        return KernelInfo(name=name, **(fields | other))

    table = [
        kernel("fits"),
        kernel("other arch", arch=100),
        kernel("grouped", mode="grouped"),
        kernel("gated", epilogue="gated"),
        kernel("other type", out_dtype=torch.float32),
        kernel("other a", operand="prepacked_bf16"),
        kernel("decoded b", operand="fp16"),
    ]
    point = POINT._replace(b="prepacked")
    assert tune.candidates(table, 90, point) == ["fits"]
    assert tune.candidates(table, 90, point._replace(groups=2)) == ["grouped"]
    assert tune.candidates(table, 90, point._replace(b="fp16")) == ["decoded b"]
    assert tune.candidates(table, 90, point._replace(a="bf16")) == ["other a"]


# ---- rules ------------------------------------------------------------------------------------------------


def measured(m: int, us: Mapping[str, float], **other: Any) -> tune.Measured:
    return tune.Measured(POINT._replace(m=m, **other), dict(us), {})


def test_spans_end_at_geometric_means_and_join() -> None:
    a, b = {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}
    ones = [measured(256, b), measured(1, a), measured(16, a), measured(64, b), measured(4096, a)]
    assert list(tune.spans(ones)) == [("a", 1, 32), ("b", 33, 1024), ("a", 1025, 4096)]
    assert list(tune.spans([measured(1, a), measured(2, b)])) == [("a", 1, 1), ("b", 2, 2)]
    assert list(tune.spans([measured(8, b)])) == [("b", 8, 8)]


def test_noise_does_not_split_a_span() -> None:
    """The kernel of the smaller m is kept unless the best is more than 1 % faster."""
    near, far = {"a": 1.005, "b": 1.0}, {"a": 1.02, "b": 1.0}
    start = measured(1, {"a": 1.0, "b": 2.0})
    assert list(tune.spans([start, measured(4, near)])) == [("a", 1, 4)]
    assert list(tune.spans([start, measured(4, far)])) == [("a", 1, 2), ("b", 3, 4)]
    assert list(tune.spans([measured(1, near)])) == [("b", 1, 1)]


def test_rules_name_shape_rows_and_operands() -> None:
    us = {"a": 1.0}
    ones = [
        measured(8, us),
        measured(4, us),
        measured(4, us, n=96),
        measured(4, us, a="nvfp4"),
        tune.Measured(POINT._replace(m=16), {}, {"a": "wrong"}),
    ]
    found = tune.rules(ones)
    assert {json.dumps(rule) for rule in found} == {
        json.dumps({"kernel": "a", "n": n, "k": 64, "m": m, "operands": [a, "nvfp4"]})
        for n, m, a in ((48, [4, 8], "fp16"), (96, [4, 4], "fp16"), (48, [4, 4], "nvfp4"))
    }


def test_selection_reads_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelInfo("a", "dense", "rowcol", 90, (1, 1, 1), (1, 1), torch.bfloat16, "prepacked", True)
    monkeypatch.setattr(kernel_table, "kernel_by_name", {"a": kernel}.get)
    monkeypatch.setattr(kernel_table, "kernel_arch", lambda index: 90)
    journal = Journal(tmp_path / "rules.json", "H200")
    journal.add(measured(4, {"a": 1.0}, b="prepacked"))

    class A:
        is_cuda, shape = True, (4, 64)

        def get_device(self) -> int:
            return 0

    def find(formats: tuple[str, str]) -> str | None:
        return selection.find(A(), 48, 64, torch.bfloat16, "dense", False, formats)  # type: ignore[arg-type]

    try:
        assert selection.load(tmp_path / "rules.json") == 1
        assert find(("fp16", "prepacked")) == "a"
        assert find(("nvfp4", "nvfp4")) is None
    finally:
        selection.clear()


# ---- the file of results -------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run_goes_on_where_one_stopped(tmp_path: Path) -> None:
    out = tmp_path / "rules.json"
    mine = {"kernel": "of mine", "n": 3}
    out.write_text(json.dumps([mine]))
    first = Journal(out, "H200")
    first.add(measured(1, {"a": 1.0, "b": 2.0}))
    first.add(measured(16, {"a": 3.0, "b": 2.0}))
    assert read(out)[0] == mine
    with first.path.open("a") as file:
        file.write('{"device": "H2')  # the file ends in the middle
    second = Journal(out, "H200")
    assert second.kept == [mine]
    assert second.measured == first.measured
    second.add(measured(64, {"b": 2.0}))
    third = Journal(out, "H200")
    assert set(third.measured) == {POINT._replace(m=m) for m in (1, 16, 64)}
    assert [(rule["kernel"], rule.get("m")) for rule in read(out)] == [
        ("of mine", None),
        ("a", [1, 4]),
        ("b", [5, 64]),
    ]


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "rules.json"
    Journal(out, "H200").add(measured(1, {"a": 1.0}))
    with pytest.raises(ValueError, match="is of 'H200', must be of 'H100'"):
        Journal(out, "H100")
    path = Journal(out, "H200").path
    path.write_text('{"device": "H200"}\n')
    with pytest.raises(ValueError, match="line 1 is not a measurement"):
        Journal(out, "H200")
    path.unlink()
    out.write_text("{}")
    with pytest.raises(ValueError, match="holds a dict, must hold a list of rules"):
        Journal(out, "H200")


def test_numbers_of_groups_do_not_share_a_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rules.json", "H200")
    journal.add(measured(8, {"a": 1.0}, groups=4))
    assert journal.conflict(POINT._replace(m=99, groups=4)) is None
    assert journal.conflict(POINT) is None
    assert journal.conflict(POINT._replace(groups=5, n=56)) is None
    assert journal.conflict(POINT._replace(groups=5)) == POINT._replace(m=8, groups=4)


# ---- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tune --m 1", "the following arguments are required: --shapes, --out"),
        ("tune --shapes 8x --m 1 --out x", "got '8x', must be two sizes like 8192x4096"),
        ("tune --shapes 8x32 --m 1,0 --out x", "got '1,0', must be a list of sizes"),
        (
            "tune --shapes 8x32 --m 1 --out x --operands fp16,bf16",
            "got 'fp16,bf16', must be two forms of operands",
        ),
        ("tune --shapes 8x32 --m 1 --out x --groups 0", "--groups: got '0', must be 1 or more"),
        ("tune --shapes 12x32 --m 1 --out x", "got '12x32', must have n a multiple of 8 and k of 32"),
        ("kernels --m 1", "unrecognized arguments: --m 1"),
    ],
)
def test_bad_lines(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert message in capsys.readouterr().err


def test_without_a_device_there_is_nothing_to_tune(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "is_supported", lambda device: Support(False, "no such thing"))
    assert main(["tune", "--shapes", "64x64", "--m", "1", "--out", str(tmp_path / "rules.json")]) == 1
    assert "nothing to tune: no such thing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_small_shape_is_tuned(cuda: torch.device, tmp_path: Path) -> None:
    """Every kernel for the operands has the right bits, and a call under the rules has them too."""
    out = tmp_path / "rules.json"
    line = ["tune", "--shapes", "256x512", "--m", "1,40", "--rounds", "2", "--out", str(out)]
    family = kernel_table.kernel_arch(cuda.index)
    assert main(line) == 0
    before = Journal(out, f"{torch.cuda.get_device_name()}, fp4gemm {fp4gemm.__version__}").measured
    assert {point.m for point in before} == {1, 40}
    assert all(one.us and not one.refused for one in before.values())
    assert set(before[next(iter(before))].us) == set(
        tune.candidates(fp4gemm.kernels(), family, next(iter(before)))
    )
    text = out.read_text()
    assert main(line) == 0  # nothing left to measure
    assert out.read_text() == text
    try:
        assert selection.load(out) >= 1
    finally:
        selection.clear()
