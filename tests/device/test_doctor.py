"""python -m fp4gemm doctor: children that crash, hang or fail are named; the file has no private data."""

from __future__ import annotations

import getpass
import io
import json
import platform
import sys
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm.commands import _arguments, main
from fp4gemm.commands.doctor import text
from fp4gemm.device import doctor, isolated, speed
from fp4gemm.device.isolated import Outcome
from fp4gemm.kernel_table import KernelInfo

# A child whose tests do what their names say. It loads the module alone, since torch's import takes seconds.
CHILD = f"""
import importlib.util, json, os, sys, time
spec = importlib.util.spec_from_file_location("isolated", {isolated.__file__!r})
isolated = sys.modules["isolated"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(isolated)

def test(name):
    if name.startswith("exit"):
        print("a word of a library", file=sys.stderr)
        os._exit(3)
    if name.startswith("signal"):
        os.abort()
    if name.startswith("hang"):
        time.sleep(600)
    if name.startswith("raise"):
        raise RuntimeError("an illegal instruction")
    wrong = name.startswith("wrong")
    return isolated.Outcome(name, not wrong, "7 of 9 differ" * wrong, 0.0, dict(pid=os.getpid()))

isolated.serve(json.load(sys.stdin), test, sys.stdout)
"""
COMMAND = (sys.executable, "-c", CHILD)


def run(*names: str, timeout_s: float = 60.0) -> list[Outcome]:
    found = isolated.run(COMMAND, names, timeout_s=timeout_s)
    assert [outcome.name for outcome in found] == list(names)
    return found


def test_tests_that_pass_or_are_wrong_share_a_child() -> None:
    found = run("a", "wrong b", "c")
    assert [outcome.passed for outcome in found] == [True, False, True]
    assert found[1].reason == "7 of 9 differ"
    assert len({outcome.values["pid"] for outcome in found}) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exit", "its process ended with status 3: a word of a library"),
        ("signal", "its process ended with status -6"),
        ("raise", "RuntimeError: an illegal instruction"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_test_that_ends_its_child_is_named_and_the_others_run(name: str, reason: str, place: int) -> None:
    names = ["a", "b"]
    names.insert(place, name)
    found = run(*names)
    assert [outcome.passed for outcome in found] == [other != name for other in names]
    assert found[place].reason.startswith(reason)


def test_a_test_that_hangs_is_named_and_the_others_run() -> None:
    found = run("a", "hang", "b", timeout_s=10.0)
    assert [outcome.passed for outcome in found] == [True, False, True]
    assert found[1].reason.startswith("it did not end within 10 s")


def test_a_child_that_cannot_begin_fails_every_test() -> None:
    command = (sys.executable, "-c", "raise SystemExit('no library')")
    found = isolated.run(command, ["a", "b"], timeout_s=60.0)
    assert [outcome.name for outcome in found] == ["a", "b"]
    assert all(o.reason == "no test could begin: its process ended with status 1: no library" for o in found)


def test_progress_is_told_of_each_outcome() -> None:
    seen: list[str] = []
    isolated.run(
        COMMAND, ["a", "exit", "b"], timeout_s=60.0, progress=lambda outcome: seen.append(outcome.name)
    )
    assert seen == ["a", "exit", "b"]


# ---- the examination


def kernel(name: str, arch: int = 100, dtype: torch.dtype = torch.bfloat16) -> KernelInfo:
    return KernelInfo(name, "dense", "rowcol", arch, (128, 64, 256), (1, 1), dtype, "nvfp4", False)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [kernel("wrong_a"), kernel("good_a"), kernel("wrong_fp32", dtype=torch.float32)]
    monkeypatch.setattr(doctor.kernel_table, "kernels", lambda: rows)


def examine(*names: str) -> doctor.Examination:
    return doctor.examine(torch.device("cpu"), tested=names, command=COMMAND, timeout_s=60.0)


def test_advice_names_a_kernel_that_passed(table: None) -> None:
    found = examine("wrong_a", "good_a")
    assert not found.passed
    assert found.speed == []  # nothing is timed where a kernel is wrong
    shown = "\n".join(text(found))
    assert "1 of 2 kernels and quantizers equal the reference" in shown
    assert "wrong_a: 7 of 9 differ" in shown
    assert '[{"kernel": "good_a"}] in FP4GEMM_SELECTION' in shown
    assert "another CUTLASS" in shown


def test_advice_where_no_kernel_can_replace_one(table: None) -> None:
    said = doctor.advice(["wrong_fp32"])
    assert said[0].startswith("wrong_fp32: every kernel of its kind is wrong")
    assert not any("FP4GEMM_SELECTION" in line for line in said)


def test_advice_for_a_quantizer(table: None) -> None:
    assert doctor.advice(["rows bf16"])[0].startswith("rows bf16: quantize with other options")
    assert doctor.advice([]) == []


def test_times_follow_kernels_that_passed(table: None) -> None:
    found = examine("good_a")
    assert found.passed
    assert [entry.name for entry in found.speed] == list(speed.CASES)


def test_the_worker_runs_kernels_quantizers_and_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = doctor.selftest.Wanted()
    name = doctor.quantizers.names()[0]
    assert doctor.test(torch.device("cpu"), wanted, name) == Outcome(name, True)
    with pytest.raises(
        ValueError, match="name: got 'nothing', must be a kernel, a quantizer or a measurement"
    ):
        doctor.test(torch.device("cpu"), wanted, "nothing")
    row = kernel("sm100_right")
    monkeypatch.setattr(doctor.kernel_table, "kernel_by_name", lambda name: row)
    monkeypatch.setattr(
        doctor.selftest.Problem, "run", lambda self, device, dtype, name: torch.zeros(self.shape, dtype=dtype)
    )
    assert doctor.test(torch.device("cpu"), wanted, row.name).passed  # the reference is replaced as well


# ---- the file


def test_private_data_is_removed() -> None:
    node, user = platform.node(), getpass.getuser()
    value = {
        "a": [f"/home/{user}/secret/lib.so: no such file on {node}"],
        "b": 1.5,
        "c": "~/x/y.json",
        "d": None,
    }
    assert doctor.without_private_data(value) == {
        "a": [".../lib.so: no such file on ..."]
        if node not in ("", "localhost")
        else [".../lib.so: no such file on"],
        "b": 1.5,
        "c": ".../y.json",
        "d": None,
    }
    assert doctor.without_private_data("1/2 of 3 / 4") == "1/2 of 3 / 4"


def test_the_file_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4GEMM_SELECTION_TEST", str(tmp_path / "rules.json"))
    monkeypatch.setenv("ANOTHER_SECRET", "hidden")
    out = tmp_path / "found.json"
    for wrong in (
        tmp_path,
        tmp_path / "missing" / "found.json",
    ):  # before the examination, which takes minutes
        with pytest.raises(SystemExit, match="2"):
            main(["doctor", "--device", "cpu", "--out", str(wrong)])
        assert f"--out: got '{wrong}', must be a file in a folder that exists" in capsys.readouterr().err
    assert main(["doctor", "--device", "cpu", "--out", str(out)]) == 0
    written = out.read_text()
    data = json.loads(written)
    assert data["passed"]
    assert data["about"]["fp4gemm"] == fp4gemm.__version__
    assert data["about"]["variables"]["FP4GEMM_SELECTION_TEST"] == ".../rules.json"
    for private in (str(tmp_path), str(Path.home()) + "/", "hidden"):
        assert private not in written
    assert str(out) in capsys.readouterr().out


def test_a_current_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default file is refused before the examination; another file, and the children, do not need it."""
    monkeypatch.setattr(_arguments.os, "access", lambda path, mode: Path(path).is_absolute())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("[]"))
    assert main(["doctor", "--device", "cpu", "--worker"]) == 0
    assert main(["doctor", "--device", "cpu", "--out", str(tmp_path / "found.json")]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--device", "cpu"])
    wanted = "--out (default): got 'fp4gemm-doctor.json', must be a file that can be written"
    assert wanted in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--device", "cuda:99"])
    assert "device: got 'cuda:99'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_the_examination_of_this_device() -> None:
    device = torch.device("cuda", 0)
    found = doctor.examine(device, tested=doctor.names(device)[-4:])
    assert found.passed, text(found)
    assert set(found.speed[0].values) >= {"fp4gemm", "torch bf16"}
