"""The self-test: it passes what is right, names what is wrong, runs when it should and keeps what passed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, reference, support
from fp4gemm.commands import main
from fp4gemm.device import problems, quantizers, report, selftest
from fp4gemm.device.problems import Problem
from fp4gemm.kernel_table import Architecture, KernelInfo
from fp4gemm.ops import gemm as gemm_ops
from fp4gemm.ops import operators
from fp4gemm.ops.quantize import QuantizeCall
from helpers import FLOATS, short

CPU = torch.device("cpu")


def kernel(
    name: str, mode: str = "dense", out_dtype: torch.dtype = torch.bfloat16, epilogue: str = "rowcol"
) -> KernelInfo:
    return KernelInfo(name, mode, epilogue, 100, (128, 64, 256), (1, 1), out_dtype, "nvfp4", False)


TABLE = [
    kernel(f"sm100_{mode}_{short(dtype)}", mode, dtype) for mode in ("dense", "grouped") for dtype in FLOATS
] + [kernel(f"sm100_{mode}_gated", mode, epilogue="gated") for mode in ("dense", "grouped")]


def right(tested: KernelInfo, problem: Problem) -> torch.Tensor:
    return problem.run(CPU, tested.out_dtype, None)


def test_the_reference_passes_its_own_test() -> None:
    results = selftest.compare(TABLE, right)
    assert [result.name for result in results] == [row.name for row in TABLE]
    assert all(result.passed and result.reason == "" for result in results)


def test_problems_are_exact_in_float32() -> None:
    """The sum of the magnitudes, in the steps of a product, fits the 24 bits of float32."""
    for problem in problems.problems():
        a, b, scale_a, scale_b, *_ = problem.operands
        k = gemm_ops.k_of(a)
        assert gemm_ops.k_of(b) == k
        if "MXFP8 and MXFP4" in problem.name:
            assert k % 128 == 0
            assert (2 * 15 / 8) * (2 * 6) * k * 2**7 < 2**24  # products are multiples of 1/32 * 1/4
            continue
        if "MXFP8" in problem.name:
            scales = [s.view(torch.uint8)[s.view(torch.uint8) > 0] for s in (scale_a, scale_b)]
            assert all(s.min() >= 126 and s.max() <= 128 for s in scales)
            for values in (a.float(), b.float()):
                assert torch.equal(values * 16, (values * 16).round())
                assert values.abs().max() <= 15 / 8
            depth = (
                max(-(-size // 128) * 128 for size in problems.SIZES) if problem.name[:8] == "ragged k" else k
            )
            assert (2 * 15 / 8) ** 2 * depth * 2**10 < 2**24
            continue
        if "MXFP4" in problem.name:
            scales = [s.view(torch.uint8)[s.view(torch.uint8) > 0] for s in (scale_a, scale_b)]
            assert all(s.min() >= 126 and s.max() <= 128 for s in scales)
            depth = (
                max(-(-size // 128) * 128 for size in problems.SIZES) if problem.name[:8] == "ragged k" else k
            )
            assert (2 * 6) ** 2 * depth * 2**4 < 2**24  # products are multiples of (1/2 * 1/2)^2
            continue
        if "one-hot" in problem.name:
            assert torch.equal(a.count_nonzero(1), torch.ones(len(a)))
            continue
        assert 24 * 24 * k / (1 / 16) < 2**24
        if scale_a is None:
            assert torch.equal(a.float() * 4, (a.float() * 4).round())
            assert a.float().abs().max() <= 24
        if a.dtype is torch.float8_e4m3fn:  # nine bits suffice for the sums of FP8 tensor cores
            assert a.float().abs().max() == 1
            assert a.float().count_nonzero(1).max() == problems.NONZERO
            values = reference.decode(b[0] if b.dim() == 3 else b, scale_b[0] if b.dim() == 3 else scale_b)
            assert torch.equal(values / 8 * 32, (values / 8 * 32).round())
            assert problems.NONZERO * values.abs().max() / 8 * 32 < 2**9


def test_loose_rows_stay_as_they_are() -> None:
    """The reference leaves poison behind the last group, so a kernel that writes there is found."""
    problem = next(p for p in problems.problems() if p.name == "ragged m")
    d = problem.run(CPU, torch.float32, None)
    assert d[-problems.LOOSE_ROWS :].isnan().all()
    assert d[: -problems.LOOSE_ROWS].isfinite().all()


def one_bit(d: torch.Tensor) -> torch.Tensor:
    d.view(torch.uint8).view(-1)[-1] ^= 1
    return d


def without(term: str) -> Callable[[KernelInfo, Problem], torch.Tensor]:
    def run(tested: KernelInfo, problem: Problem) -> torch.Tensor:
        terms = {name: value for name, value in problem.terms.items() if name != term}
        if term == "c":
            terms.pop("beta", None)
        return right(tested, dataclasses.replace(problem, terms=terms))

    return run


@pytest.mark.parametrize("mode", ["dense", "grouped"])
@pytest.mark.parametrize("term", ["alpha_row", "alpha_col", "bias", "activation", "c"])
def test_a_term_that_is_dropped_is_found(term: str, mode: str) -> None:
    (result,) = selftest.compare([kernel("sm100_wrong", mode)], without(term))
    assert not result.passed
    assert "with every term: " in result.reason
    assert "elements differ, the first, at " in result.reason


@pytest.mark.parametrize("mode", ["dense", "grouped"])
@pytest.mark.parametrize("term", ["alpha_row", "alpha_col", "bias"])
def test_a_term_that_a_gated_kernel_drops_is_found(term: str, mode: str) -> None:
    (result,) = selftest.compare([kernel("sm100_wrong", mode, epilogue="gated")], without(term))
    assert not result.passed
    assert ", swiglu, with every term: " in result.reason


@pytest.mark.parametrize("epilogue", ["rowcol", "gated"])
@pytest.mark.parametrize("mode", ["dense", "grouped"])
def test_one_wrong_bit_is_found(mode: str, epilogue: str) -> None:
    wrong = kernel("sm100_wrong", mode, epilogue=epilogue)
    (result,) = selftest.compare([wrong], lambda row, p: one_bit(right(row, p)))
    assert not result.passed
    assert ": 1 of " in result.reason


def test_negative_block_scales() -> None:
    """Either reading is right where the tensor cores read the scales; kernels that decode must negate."""
    (problem,) = [p for p in problems.problems() if p.name == "negative block scales"]
    signs = [scales.view(torch.uint8) >> 7 for scales in problem.operands[2:4]]
    assert all(0 < sign.sum() < sign.numel() for sign in signs)
    wanted = selftest.Wanted([problem])

    def cleared(row: KernelInfo, p: Problem) -> torch.Tensor:
        unsigned = p.unsigned(TABLE[0])
        assert unsigned is not None
        return right(row, unsigned)

    tensor_cores = kernel("sm100_any")
    decodes = dataclasses.replace(tensor_cores, name="sm90_any", arch=90)
    assert not torch.equal(right(tensor_cores, problem), cleared(tensor_cores, problem))
    a, b, scale_a, scale_b, *_ = problem.operands
    values = [reference.decode(codes, scales).float() for codes, scales in ((a, scale_a), (b, scale_b))]
    assert torch.equal(problem.run(CPU, torch.float32, None), values[0] @ values[1].T)
    assert wanted.compare(tensor_cores, right).ignores_scale_signs is False
    assert wanted.compare(tensor_cores, cleared).ignores_scale_signs is True
    assert wanted.compare(tensor_cores, cleared).passed
    result = wanted.compare(tensor_cores, lambda row, p: one_bit(cleared(row, p)))
    assert not result.passed
    assert result.reason.startswith("negative block scales, ignored: 1 of ")
    assert wanted.compare(decodes, right) == selftest.KernelResult("sm90_any", True)
    assert not wanted.compare(decodes, cleared).passed


def test_the_report_says_what_the_tensor_cores_do_with_signs() -> None:
    results = (
        selftest.KernelResult("a", True, ignores_scale_signs=True),
        selftest.KernelResult("b", True, ignores_scale_signs=False),
        selftest.KernelResult("c", True),
    )
    text = str(selftest.SelfTestReport("cuda:0", results))
    assert "sign bit set: 1 of 2 kernels ignore the bit" in text
    assert "sign bit" not in str(selftest.SelfTestReport("cuda:0", results[2:]))


def test_an_error_is_a_result() -> None:
    def broken(row: KernelInfo, problem: Problem) -> torch.Tensor:
        raise RuntimeError("an illegal instruction")

    (result,) = selftest.compare([kernel("sm100_broken")], broken)
    assert not result.passed
    assert result.reason.endswith("RuntimeError: an illegal instruction")


def test_on_the_cpu_there_is_nothing_to_test(capsys: pytest.CaptureFixture[str]) -> None:
    tested = fp4gemm.self_test("cpu")
    assert tested.passed
    assert tested.results == ()
    assert str(tested) == "self-test on cpu: no kernels to test, the reference itself runs"
    assert main(["selftest", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{tested}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_devices_that_are_not_there() -> None:
    for device in ("cuda", "cuda:0", "meta"):
        with pytest.raises(ValueError, match=rf"^device: got '{device}', must be the CPU or a CUDA device"):
            fp4gemm.self_test(device)


COUNT = len(TABLE) + len(quantizers.names())
ARCHITECTURE = Architecture(100, ("10.0", "10.3"), is_executed=False)


class Fake:
    """A machine with one device that the kernels were never executed on; the functions compute for it."""

    def __init__(self) -> None:
        self.quantize: Callable[[str], tuple[torch.Tensor, ...]] = lambda name: QUANTIZE(name, CPU)
        self.run: Callable[[Problem, torch.dtype], torch.Tensor] = lambda p, dtype: RUN(p, CPU, dtype, None)
        self.runs = 0
        self.is_capturing = False


RUN = Problem.run
QUANTIZE = quantizers.run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    machine = Fake()

    def run(problem: Problem, device: torch.device, dtype: torch.dtype, forced: str | None) -> torch.Tensor:
        if device.type == "cpu":
            return RUN(problem, device, dtype, forced)
        machine.runs += 1
        assert forced in {row.name for row in TABLE}
        return machine.run(problem, dtype)

    def quantize(name: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        return QUANTIZE(name, device) if device.type == "cpu" else machine.quantize(name)

    monkeypatch.setattr(Problem, "run", run)
    monkeypatch.setattr(quantizers, "run", quantize)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Fake 100")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.is_capturing)
    monkeypatch.setattr(kernel_table, "kernel_arch", lambda index: 100)
    monkeypatch.setattr(kernel_table, "architectures", lambda: (ARCHITECTURE,))
    monkeypatch.setattr(kernel_table, "kernels", lambda: TABLE)
    monkeypatch.setattr(support, "_cuda_gaps", lambda index: {})
    monkeypatch.setattr(selftest, "driver_version", lambda: "1.2.3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(selftest.SWITCH, raising=False)
    forget()
    yield machine
    forget()


def forget() -> None:
    """As a new process."""
    selftest._PASSED.clear()
    selftest._FAILED.clear()
    selftest._WARNED.clear()
    for ready in support.READY.values():
        ready.discard(0)


class OnCuda:
    is_cuda = True
    device = torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0


def use(what: str = "mm") -> None:
    """What the first product does."""
    support.ready(OnCuda(), what)  # type: ignore[arg-type]


def test_first_product_runs_it_once(fake: Fake) -> None:
    use()
    ran = fake.runs
    assert ran == sum(problem.suits(row) for row in TABLE for problem in problems.problems())
    use("grouped_mm")
    use()
    assert fake.runs == ran
    assert 0 in support.READY["mm"]


def test_quantize_does_not_run_it(fake: Fake) -> None:
    use("quantize")
    assert fake.runs == 0


def test_what_passed_is_kept(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fp4gemm.self_test("cuda:0").cached
    ran = fake.runs
    assert ran > 0
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "fp4gemm"]
    forget()
    use()
    report = fp4gemm.self_test()
    assert fake.runs == ran
    assert report.cached
    first, versions, request = str(report).split("\n")
    assert first == (
        f"self-test on cuda:0: NVIDIA Fake 100, compute capability 10.0: all {COUNT} kernels and quantizers "
        "equal the reference (an earlier run)"
    )
    assert re.fullmatch(
        rf"  fp4gemm {fp4gemm.__version__} of CUDA \d+\.\d+ and CUTLASS .*, torch .*, driver 1\.2\.3",
        versions,
    )
    assert request.startswith("  The project has not executed its kernels on such a device: please report")
    assert not fp4gemm.self_test(force=True).cached
    assert fake.runs == 2 * ran
    # Another driver, library or device is another result.
    monkeypatch.setattr(selftest, "driver_version", lambda: "1.2.4")
    assert not fp4gemm.self_test().cached
    monkeypatch.setattr(selftest, "_libraries_hash", lambda: "0123")
    assert not fp4gemm.self_test().cached
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Fake 101")
    assert not fp4gemm.self_test().cached
    assert fp4gemm.self_test().cached


@pytest.mark.parametrize("content", ["", "null", "[1]", "{}"])
def test_a_spoilt_file_is_ignored(content: str, fake: Fake, tmp_path: Path) -> None:
    fp4gemm.self_test()
    for path in tmp_path.rglob("*.json"):
        path.write_text(content)
    assert not fp4gemm.self_test().cached
    assert fp4gemm.self_test().cached


def test_without_a_place_to_write(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fp4gemm.self_test().passed
    assert not fp4gemm.self_test().cached
    ran = fake.runs
    use()
    assert fake.runs == ran, "the process knows that it passed"


def test_a_wrong_kernel_stops_every_product(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RuntimeError names the kernels, again and again without a second run; nothing is kept."""
    plain = fake.run
    fake.run = lambda p, dtype: one_bit(plain(p, dtype)) if dtype is torch.float16 else plain(p, dtype)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=rf"2 of {COUNT} kernels and quantizers are wrong\n  sm100_dense_fp16: .*\n  sm100_gr",
        ):
            use()
    ran = fake.runs
    with pytest.raises(RuntimeError, match="sm100_grouped_fp16"):
        use("grouped_mm")
    assert fake.runs == ran
    assert 0 not in support.READY["mm"]
    forget()
    with pytest.raises(RuntimeError, match="FP4GEMM_SELF_TEST=0 in the environment"):
        use()
    assert fake.runs > ran
    assert main(["selftest"]) == 1
    assert "sm100_dense_fp16: 300x400x288: 1 of 120000 elements differ" in capsys.readouterr().out
    monkeypatch.setenv(selftest.SWITCH, "0")
    use()


def test_a_wrong_quantizer_is_found(fake: Fake) -> None:
    """One bit of the last result, and an exception."""
    right_ones = {name: QUANTIZE(name, CPU) for name in quantizers.names()}
    for wrong in quantizers.names():
        *others, last = right_ones[wrong]
        changed = {**right_ones, wrong: (*others, one_bit(last.clone()))}
        fake.quantize = changed.__getitem__
        results = selftest.compare_quantizers(torch.device("cuda", 0))
        assert [result.name for result in results if not result.passed] == [wrong]
        (reason,) = (result.reason for result in results if result.reason)
        assert reason.startswith(f"result {len(others)}: 1 of {last.numel()} elements differ, the first, at ")

    def broken(called: str) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("an illegal instruction")

    fake.quantize = broken
    with pytest.raises(RuntimeError, match=rf"{len(right_ones)} of {COUNT} .*\n.*: an illegal instruction"):
        use()


def test_every_option_of_the_quantizer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a value other than its default; but rows, which is route's, a given amax, and the fast error."""
    seen: set[str] = set()

    def quantize(*args: Any, **options: Any) -> Any:
        call = QuantizeCall(*args, **options)
        defaults = QuantizeCall._field_defaults | {"per_row": True, "amax": None}
        seen.update(name for name, default in defaults.items() if getattr(call, name) is not default)
        return reference.quantize(*args, **options)

    monkeypatch.setattr(operators, "quantize", quantize)
    for name in quantizers.names():
        quantizers.run(name, CPU)
    assert seen == {*QuantizeCall._fields} - {"x", "rows", "amax", "fast_error"}


def test_quantizers_have_every_bit_written() -> None:
    """Each result has elements, and some of them are not zero; none is NaN, which compares by bits alone."""
    for name in quantizers.names():
        for part in quantizers.run(name, CPU):
            assert part.numel()
            assert part.view(torch.uint8).any(), name


def test_a_kernel_that_is_mended_passes(fake: Fake) -> None:
    plain = fake.run
    fake.run = lambda p, dtype: one_bit(plain(p, dtype))
    with pytest.raises(RuntimeError, match=f"8 of {COUNT} kernels"):
        use()
    fake.run = plain
    assert fp4gemm.self_test(force=True).passed
    use()


def test_the_switch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selftest.SWITCH, "0")
    use()
    assert fake.runs == 0
    assert fp4gemm.self_test().passed, "it runs when it is called"
    assert fake.runs > 0


def test_devices_with_executed_kernels_are_not_tested(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = dataclasses.replace(ARCHITECTURE, is_executed=True)
    monkeypatch.setattr(kernel_table, "architectures", lambda: (executed,))
    use()
    assert fake.runs == 0
    assert "please report" not in str(fp4gemm.self_test())


def test_the_report_of_the_machine_asks_for_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "is_supported", lambda name: support.Support(True, f"{name}: a device"))
    text = report.report_text()
    assert "  yes  cpu: a device\n  yes  cuda:0: a device\n       the project has not executed" in text
    assert "python -m fp4gemm selftest --device cuda:0 says" in text
    executed = dataclasses.replace(ARCHITECTURE, is_executed=True)
    monkeypatch.setattr(kernel_table, "architectures", lambda: (executed,))
    assert "has not executed" not in report.report_text()


def test_under_capture_it_warns_and_comes_later(fake: Fake, recwarn: pytest.WarningsRecorder) -> None:
    fake.is_capturing = True
    use()
    use()
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == 1
    assert "run fp4gemm.self_test('cuda:0') first, or python -m fp4gemm selftest" in messages[0]
    assert fake.runs == 0
    fake.is_capturing = False
    use()
    assert fake.runs > 0


def test_tracing_warns(fake: Fake, recwarn: pytest.WarningsRecorder) -> None:
    """The fake implementation of the operators is what a tracer runs."""
    from torch._subclasses import FakeTensorMode

    t = fp4gemm.quantize(torch.ones(8, 32))
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [x.view(torch.uint8).new_empty(x.shape, device="cuda") for x in (t.codes, t.scales)]
        d = torch.ops.fp4gemm.gemm(parts[0], parts[0], parts[1], parts[1])
    assert d.shape == (8, 8)
    assert [str(w.message) for w in recwarn if "while a graph is traced" in str(w.message)]
    assert fake.runs == 0


@pytest.mark.gpu
def test_every_kernel_of_this_device_passes(
    cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = fp4gemm.self_test(cuda)
    assert report.passed, str(report)
    assert len(report.results) > 0
    assert fp4gemm.self_test(cuda).cached


@pytest.mark.gpu
def test_a_wrong_library_fails_on_this_device(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernels of this device, asked for other products than the reference computes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = [row for row in fp4gemm.kernels() if row.arch == kernel_table.kernel_arch(cuda.index)]

    def shifted(row: KernelInfo, problem: Problem) -> torch.Tensor:
        terms = problem.terms | {"bias": torch.full((problem.operands[1].shape[-2],), 7.0)}
        return dataclasses.replace(problem, terms=terms).run(cuda, row.out_dtype, row.name)

    results = selftest.compare(kernels, shifted)
    assert results
    assert not any(result.passed for result in results)


def test_libraries_are_hashed() -> None:
    digest = selftest._libraries_hash()
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")


def test_results_are_kept_in_the_home_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert selftest._file({"a": "b"}).parent == tmp_path / ".cache" / "fp4gemm"
