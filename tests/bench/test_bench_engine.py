"""bench engine without an engine: the archive, checkpoints, plans, loads and tables."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
from bench.__main__ import main, parser
from bench.commands import engine as command
from bench.engine import child, fatbin, host, inside, kernels, pack, requests, run
from bench.engine.arms import ARMS, arms_of
from bench.engine.checkpoints import make
from bench.engine.run import NO_TIME, Gpu, Plan, Sizes, Started, last_lines, silence
from bench.engine.weights import OUTER, decoded, decoded_mxfp4, mxfp4, nvfp4
from bench.models.shapes import Shape
from bench.report import engine as report
from bench.report.results import Journal

GPU = Gpu("GPU-one", "0")
TINY = Shape("tiny-qwen", 2, 64, 2, 1, 32, 32, 64, 4, 2, qk_norm=True)


def _entry(kind: int, arch: int, code: bytes) -> bytes:
    padded = code + bytes(-len(code) % 8)
    fields = (kind, 0x101, 64, len(padded), 0, 0, 0, 0, arch, 0, 0, 0, 0, 0)
    return fatbin.ENTRY.pack(*fields) + bytes(64 - fatbin.ENTRY.size) + padded


def _fatbin(*entries: bytes) -> bytes:
    data = b"".join(entries)
    return fatbin.MAGIC + struct.pack("<Q", len(data)) + data


def _cubin(arch: int, name: str) -> bytes:
    return _entry(fatbin.CUBIN, arch, b"\x7fELF.text._Z" + name.encode() + b"\0")


def _ptx(arch: int, name: str) -> bytes:
    return _entry(fatbin.PTX, arch, b".entry _Z" + name.encode() + b"(")


def test_a_library_keeps_what_the_gpu_runs_at_its_offsets() -> None:
    """Cubins of 9.0; the nearest older PTX where there is none; nothing where the kernels are not wanted."""
    small = _cubin(120, "a")
    bins = [
        _fatbin(_cubin(80, "one"), _cubin(90, "one"), _ptx(80, "one")),
        _fatbin(_ptx(75, "twotwotwotwo"), _ptx(80, "twotwotwotwo"), _cubin(120, "twotwotwotwo")),
        _fatbin(_cubin(90, "three"), small),
        _fatbin(_cubin(120, "fourfourfourfour"), _cubin(80, "four")),
    ]
    library = b"head" + b"between".join(bins) + b"tail"
    nothing = fatbin.smallest_cubin(library, 90)
    assert nothing == small
    made = fatbin.reduced(library, 90, lambda name: "three" not in name, nothing)
    assert len(made) == len(library)
    wanted = [_cubin(90, "one"), _ptx(80, "twotwotwotwo"), small, small]
    begin = 4
    for old, kept in zip(bins, wanted, strict=True):
        new = made[begin : begin + len(old)]
        assert new[:16] == fatbin.MAGIC + struct.pack("<Q", len(kept))
        assert new[16:] == kept + bytes(len(old) - 16 - len(kept))
        begin += len(old)
        assert made[begin : begin + 4] in (b"betw", b"tail")
        begin += 7


def test_a_library_that_is_no_fatbin_is_refused() -> None:
    broken = fatbin.MAGIC + struct.pack("<Q", 80) + bytes(80)
    with pytest.raises(ValueError, match="byte 16 of the library is no entry of a fatbin"):
        fatbin.reduced(broken, 90, lambda name: True, b"")
    with pytest.raises(ValueError, match="the library has no cubin for an architecture newer than 90"):
        fatbin.smallest_cubin(_fatbin(_cubin(90, "one")), 90)


@pytest.mark.parametrize(
    ("kernel", "is_wanted"),
    [
        ("_ZN6marlin6MarlinILl1125899906909960ELl562949953487106ELl1125899906909960E", True),
        ("_ZN6marlin6MarlinILl1125899906910725ELl562949953487106ELl1125899906910725E", False),
        ("_ZN16marlin_moe_wna166MarlinILl1125899906909960ELl1125899906843648E", False),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi128ENS_10bfloat16_t", True),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi128ENS_12float_e4m3_t", True),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi192ENS_10bfloat16_t", False),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi64ENS_10bfloat16_t", True),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi64ENS_12float_e4m3_t", False),
        ("FlashAttnFwdSm90CollectiveMainloopFwdSm90ILi2ELi64ENS_6half_tEfNS_4archE10bfloat16_t", False),
        ("_ZN4vllm14rms_norm_kernelIN3c108BFloat16ELi8EEEv", True),
    ],
)
def test_the_kernels_that_are_wanted(kernel: str, is_wanted: bool) -> None:
    assert pack.is_wanted(kernel) == is_wanted


def test_the_archive_is_the_same_each_time(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0-py3-none-any.whl"
    library = _fatbin(_cubin(90, "one"), _cubin(120, "a"))
    with zipfile.ZipFile(wheel, "w") as made:
        for name in pack.REDUCED:
            made.writestr(name, library)
        made.writestr("vllm/vllm-rs", b"left out")
        made.writestr("vllm/third_party/deep_gemm/a.py", b"left out")
        made.writestr("vllm/a.py", b"kept")
        made.writestr("vllm-0.dist-info/METADATA", b"kept")
    paths = [tmp_path / f"{i}.tar.xz" for i in range(2)]
    for path in paths:
        assert pack.write(pack.unpacked([wheel]), path) == path.stat().st_size
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with tarfile.open(paths[0]) as archive:
        assert archive.getnames() == sorted([*pack.REDUCED, "vllm/a.py", "vllm-0.dist-info/METADATA"])
        assert {member.mtime for member in archive} == {0}


def test_every_package_of_the_archive_has_a_hash() -> None:
    lines = [line for line in pack.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert any(line.startswith("vllm==") for line in lines)
    for line in lines:
        name, _, rest = line.partition("==")
        assert name
        assert len(rest.split(" --hash=sha256:")[1]) == 64, line


@pytest.mark.parametrize("is_quantized", [True, False])
def test_a_checkpoint_has_the_sizes_of_its_model(tmp_path: Path, is_quantized: bool) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "made"
    size = make(folder, TINY, 2, is_quantized, torch.device("cpu"))
    config = json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == is_quantized
    if not is_quantized:
        assert size == 0
        assert not list(folder.glob("*.safetensors"))
        return
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Any] = {}
    for name in set(files.values()):
        tensors |= safetensors.load_file(folder / name)
    assert set(tensors) == set(files)
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert tensors["model.layers.1.mlp.experts.3.down_proj.weight_scale"].shape == (64, 2)


def test_the_weights_of_a_checkpoint_are_near_what_was_drawn() -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    codes, scales = nvfp4(w)
    off = (decoded(codes, scales, torch.tensor(OUTER)) - w).norm() / w.norm()
    assert 0.05 < float(off) < 0.12


def test_gpt_oss_has_the_tensors_of_its_checkpoints(tmp_path: Path) -> None:
    """Those of openai/gpt-oss-20b: experts in MXFP4 with biases, sinks, and everything else in bfloat16."""
    safetensors = pytest.importorskip("safetensors.torch")
    shape = command.MODELS["tiny-gpt-oss"]
    make(tmp_path, shape, 2, True, torch.device("cpu"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    tensors = safetensors.load_file(tmp_path / "model-1.safetensors")
    owner = "model.layers.1"
    parts = {f"{owner}.self_attn.{name}_proj.{of}" for name in "qkvo" for of in ("weight", "bias")}
    parts |= {f"{owner}.mlp.router.{of}" for of in ("weight", "bias")} | {f"{owner}.self_attn.sinks"}
    parts |= {f"{owner}.{name}_layernorm.weight" for name in ("input", "post_attention")}
    sizes = {"gate_up_proj": (8, 2 * 128, 256), "down_proj": (8, 256, 128)}
    for name, (g, n, k) in sizes.items():
        experts = f"{owner}.mlp.experts.{name}"
        parts |= {f"{experts}_{of}" for of in ("blocks", "scales", "bias")}
        assert tensors[f"{experts}_blocks"].shape == (g, n, k // 32, 16)
        assert tensors[f"{experts}_scales"].shape == (g, n, k // 32)
        assert tensors[f"{experts}_bias"].shape == (g, n)
    assert set(tensors) == parts


def test_mxfp4_weights_are_those_of_the_library_and_near_what_was_drawn() -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    w[3, 32:] = 0
    blocks, scales = mxfp4(w)
    ours = fp4gemm.quantize_mxfp4(w).to_weight()
    assert torch.equal(blocks, ours.codes)
    assert torch.equal(scales[:, :1], ours.scales[:, :1])  # that of zeros says nothing
    got = decoded_mxfp4(blocks, scales)
    assert torch.equal(got, fp4gemm.NVFP4Tensor.from_mxfp4(blocks, scales).dequantize(torch.float32))
    assert 0.05 < float((got - w).norm() / w.norm()) < 0.15


@pytest.mark.parametrize(
    ("model", "has_gpu", "arms"),
    [
        ("qwen3-30b-a3b", True, ["bf16", "fp8", "marlin", "w4a16", "w4a8", "w4a4"]),
        ("gpt-oss-20b", True, ["marlin", "triton", "w4a16", "w4a8", "w4a4"]),
        ("tiny-gpt-oss", False, ["w4a16", "w4a8", "w4a4"]),
    ],
)
def test_the_arms_of_a_model(model: str, has_gpu: bool, arms: list[str]) -> None:
    assert arms_of(command.MODELS[model], has_gpu) == arms


def _plan(tmp_path: Path, **more: Any) -> Plan:
    given: dict[str, Any] = {
        "shape": TINY, "num_layers": 2, "sizes": Sizes((1, 16), (1, 2)), "profiled": (), "input": 128,
        "output": 64, "prefill": 512, "repeats": 2, "folder": tmp_path, "gpu": GPU, "is_compiled": True,
        "start_s": 1.0, "measure_s": 1.0,
    }  # fmt: skip
    return Plan(**given | more)


def test_a_plan_has_graphs_and_a_cache_for_its_batches(tmp_path: Path) -> None:
    made = _plan(tmp_path).engine(ARMS["w4a8"])
    assert made["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16]
    tokens = 16 * (128 + 64 + 32) + 2048
    assert made["kv_cache_memory_bytes"] == tokens * 2 * TINY.cache_bytes(1)
    assert _plan(tmp_path, is_compiled=False).engine(ARMS["w4a8"])["compilation_config"]["mode"] == 0
    assert _plan(tmp_path, gpu=None).engine(ARMS["w4a8"])["enforce_eager"]
    assert _plan(tmp_path).engine(ARMS["fp8"])["quantization"] == "fp8_per_channel"
    chosen = _plan(tmp_path, attention="TRITON_ATTN").engine(ARMS["w4a8"])
    assert chosen["attention_config"] == {"backend": "TRITON_ATTN"}
    assert "attention_config" not in made


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--no-steps"], "--no-steps: nothing is measured without --requests"),
        (
            ["--no-steps", "--requests", "w4a8", "--profile", "1"],
            "--profile: no step is measured with --no-steps",
        ),
        (["--profiles", "kernels.gz"], "--profiles: no kernels are listed without --profile"),
        (["--profile", "1"], "--profile: the device is cpu, must be a GPU"),
        (
            ["--arms", "w4a8,fp8"],
            "--arms: fp8 needs a GPU, the device is cpu; it has bf16, w4a16, w4a8, w4a4",
        ),
        (
            ["--model", "tiny-gpt-oss", "--arms", "bf16"],
            "--arms: bf16 does not run tiny-gpt-oss; it has w4a16",
        ),
        (["--requests", "marlin"], "--requests: marlin needs a GPU, the device is cpu; it has bf16, w4a16"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["engine", "--device", "cpu", *options])
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err


def test_only_a_batch_that_is_measured_is_profiled() -> None:
    args = parser().parse_args(["engine", "--profile", "1,8"])
    wanted = "--profile: got 8, must be one of the batches of tiny-llama: 1, 4"
    with pytest.raises(ValueError, match=wanted):
        command._plan(args, command.MODELS["tiny-llama"], GPU, 1.0)
    args = parser().parse_args(["engine", "--profile", "1,8", "--batches", "1,8,16"])
    assert command._plan(args, command.MODELS["tiny-llama"], GPU, 1.0).profiled == [1, 8]


@pytest.mark.parametrize(
    ("seen", "index", "visible"),
    [(None, 1, "1"), ("", 0, "0"), ("2, GPU-aa,7", 1, "GPU-aa"), ("3", 0, "3")],
)
def test_an_engine_sees_the_gpu_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str | None, index: int, visible: str
) -> None:
    """CUDA_VISIBLE_DEVICES of its process is the entry of this process that has the index of the device."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(run, "smi_id", lambda device: f"GPU-{device.index}")
    gpu = Gpu.of(torch.device("cuda", index))
    assert gpu == Gpu(f"GPU-{index}", visible)
    assert run.environment(ARMS["w4a8"], tmp_path, gpu)["CUDA_VISIBLE_DEVICES"] == visible
    assert Gpu.of(torch.device("cpu")) is None
    assert run.environment(ARMS["w4a8"], tmp_path).get("CUDA_VISIBLE_DEVICES") == seen


ENGINE = """
import json, sys, time
from pathlib import Path
spec = json.loads(Path(sys.argv[1]).read_text())
Path(spec["ready"]).touch()
while not Path(spec["go"]).exists():
    time.sleep(0.01)
found = [{"kind": "decode", "batch": b, "input": 16, "output": 8, "ms": b} for b in spec["batches"]]
found += [{"kind": "prefill", "prompts": p, "input": 64, "ms": p} for p in spec["prompts"]]
found.append({"kind": "done"})
Path(spec["found"]).write_text("".join(json.dumps(each) + "\\n" for each in found))
time.sleep(60)
"""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sizes]]:
    """The arms that bench starts, with what they are to measure; in place of vLLM a program answers."""
    started: list[tuple[str, Sizes]] = []

    def start(plan: Plan, name: str, sizes: Sizes) -> Started:
        started.append((name, sizes))
        folder = plan.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for each in ("ready", "go", "found"):
            (folder / each).unlink(missing_ok=True)
        (folder / "log").touch()
        (folder / "spec.json").write_text(json.dumps(run.spec_of(plan, ARMS[name], sizes, folder)))
        return Started(name, _python(ENGINE, str(folder / "spec.json")), folder)

    monkeypatch.setattr(command, "start", start)
    monkeypatch.setattr(command, "_version", lambda: "0")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(Plan, "prepare", lambda plan, arms, device: None)
    return started


def _main(tmp_path: Path, *options: str) -> int:
    shared = ["--device", "cpu", "--model", "tiny-llama", "--work", str(tmp_path / "work")]
    return main(["engine", *shared, "--out", str(tmp_path / "rows"), *options])


def _rows(tmp_path: Path) -> list[tuple[str, str, int]]:
    rows = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    return [(row["contender"], row["step"], row.get("batch") or row["prompts"]) for row in rows]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_only_the_steps_that_the_file_lacks_are_measured(
    tmp_path: Path, engines: list[tuple[str, Sizes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(tmp_path, "--arms", "w4a8", "--batches", "1", "--prompts", "2") == 0
    assert engines == [("w4a8", Sizes([1], [2]))]
    assert _rows(tmp_path) == [("fp4gemm W4A8", "decode", 1), ("fp4gemm W4A8", "prefill", 2)]
    engines.clear()
    capsys.readouterr()
    assert _main(tmp_path, "--arms", "w4a8,bf16", "--batches", "1,4", "--prompts", "2") == 0
    assert engines == [("w4a8", Sizes([4], [])), ("bf16", Sizes([1, 4], [2]))]
    table = capsys.readouterr().out
    assert "| fp4gemm W4A8 | 1.00 (1.00) | 4.00 (1.00) | 2.00 (1.00) |" in table
    assert sorted(_rows(tmp_path)) == sorted(
        (name, *step)
        for name in ("vLLM bf16", "fp4gemm W4A8")
        for step in (("decode", 1), ("decode", 4), ("prefill", 2))
    )
    engines.clear()
    assert _main(tmp_path, "--arms", "w4a8", "--batches", "4", "--prompts", "2") == 0
    assert engines == []
    table = capsys.readouterr().out
    assert "| arm | decode 4 | prefill 2 |" in table


def test_a_step_of_the_file_that_has_no_profile_is_not_taken_for_one_that_has(tmp_path: Path) -> None:
    plan = _plan(tmp_path, profiled=(16,), sizes=Sizes((1, 16), (1,)))
    journal = Journal(tmp_path / "rows", {"device": "x"})
    args = parser().parse_args(["engine", "--arms", "w4a8"])
    steps = [{"kind": "decode", "batch": b, "input": 8, "ms": 1.0} for b in (1, 16)]
    rows = command._rows(plan, "w4a8", [*steps, {"kind": "profile", "batch": 16, "kernels": []}], None)
    for row in rows:
        journal.add(command._job(plan, "engine", "w4a8", "decode", row["batch"]), [row])
    found, todo = command._in_journal(args, plan, journal)
    assert [row["batch"] for row in found] == [1, 16]
    assert todo == [("w4a8", Sizes([], [1]))]
    other = _plan(tmp_path, profiled=(1,), sizes=plan.sizes)
    wanted = "--profile: .*rows has decode 1 of w4a8 without its kernels; name another file"
    with pytest.raises(ValueError, match=wanted):
        command._in_journal(args, other, journal)


def test_arms_for_which_no_time_is_left_are_named(
    tmp_path: Path, engines: list[tuple[str, Sizes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and nothing is written for them, so that the next run measures them."""
    assert command.SHORTEST > 30
    options = ["--arms", "w4a8", "--requests", "bf16", "--limit", "30"]
    assert _main(tmp_path, *options) == 1
    assert engines == []
    assert _rows(tmp_path) == []
    printed = capsys.readouterr().out
    assert f"engine tiny-llama 2, fp4gemm W4A8: {NO_TIME}" in printed
    assert f"requests tiny-llama 2, vLLM bf16: {NO_TIME}" in printed


def test_an_arm_is_not_begun_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    one = Started("one", _python("import time; time.sleep(60)"), tmp_path)
    try:
        assert run.measured(_plan(tmp_path, gpu=None, deadline=0.0), one, [one]) == ([], NO_TIME)
        assert not (tmp_path / "go").exists()
    finally:
        run.end_all([one])
    assert one.process.poll() is not None


def test_a_step_without_times_makes_an_arm_incomplete(tmp_path: Path) -> None:
    """Otherwise the row would be missing, and the exit code 0."""
    lines = [{"kind": "decode", "batch": 4, "error": "in no step had all requests a token"}, {"kind": "done"}]
    code = (
        f"import time; from pathlib import Path; here = Path({str(tmp_path)!r})\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
        f"(here / 'found').write_text({''.join(json.dumps(each) + chr(10) for each in lines)!r})\n"
        "time.sleep(60)"
    )
    (tmp_path / "ready").touch()
    one = Started("one", _python(code), tmp_path)
    try:
        found, problem = run.measured(_plan(tmp_path, gpu=None, measure_s=30.0), one, [one])
    finally:
        run.end_all([one])
    assert [each["kind"] for each in found] == ["busy", "decode", "done"]
    assert problem == "decode 4: in no step had all requests a token"


def test_loads_are_equal_and_arrive_at_their_rate() -> None:
    load = requests.Load(count=200, rate=50.0, input=32, output=8, vocabulary=64)
    made = load.requests()
    assert made == load.requests()
    assert 200 / 50 * 0.7 < made[-1][0] < 200 / 50 * 1.4
    assert {len(body["prompt"]) for _, body in made} == set(range(16, 49))
    assert {at for at, _ in requests.Load(4, 0.0, 32, 8, 64).requests()} == {0.0}


def test_the_table_of_requests_has_a_line_for_each_load_and_server(tmp_path: Path) -> None:
    shared = {"bench": "requests", "model": "m", "layers": 2, "case": "c", "role": "ours"}
    rows = []
    for contender in ("vLLM FP8", "fp4gemm W4A8"):
        for load in command._loads(_plan(tmp_path, shape=command.MODELS["llama-3.1-8b"])):
            figures = {"tokens_per_s": 1, "ttft_ms": 2, "ttft_p99_ms": 3, "tpot_ms": 4, "tpot_p99_ms": 5}
            sizes = {"requests": load.count, "rate": load.rate, "input": load.input, "output": load.output}
            rows.append({**shared, "contender": contender, "us": 4000.0, **sizes, **figures})
    table = [line for line in report.text(rows).splitlines() if line.startswith(("| vLLM", "| fp4gemm"))]
    assert [line.split("|")[1:4] for line in table] == [
        [f" {contender} ", f" {load} ", " 1 "]
        for load in ("144, 24 a second", "384, 64 a second", "128 at once")
        for contender in ("vLLM FP8", "fp4gemm W4A8")
    ]


def test_no_load_has_a_prompt_of_another_one_or_of_the_first_calls(tmp_path: Path) -> None:
    """vLLM would have computed it before."""
    loads = command._loads(_plan(tmp_path, shape=command.MODELS["llama-3.1-8b"]))
    made = [load.requests() for load in (*loads, command._first_calls(loads))]
    assert [len(each) for each in made] == [144, 384, 128, 32]
    prompts = {tuple(body["prompt"]) for each in made for _, body in each}
    assert len(prompts) == 144 + 384 + 128 + 32


def test_the_tables_compare_ours_with_the_best_of_theirs() -> None:
    shared = {"bench": "engine", "model": "m", "layers": 2, "step": "decode", "batch": 1, "input": 16}
    rows = [
        {**shared, "case": "c", "contender": "vLLM bf16", "role": "baseline", "us": 3000.0},
        {**shared, "case": "c", "contender": "vLLM FP8", "role": "baseline", "us": 2000.0},
        {
            **shared,
            "case": "c",
            "contender": "fp4gemm W4A16",
            "role": "ours",
            "us": 1600.0,
            "gpu_us": 1250.0,
            "weights_gib": 1.5,
        },
        {
            "bench": "engine",
            "case": "c",
            "model": "m",
            "layers": 2,
            "contender": "x",
            "refused": "it is wrong",
        },
    ]
    text = report.text(rows)
    assert "| vLLM bf16 | 3.00 |" in text
    assert "| fp4gemm W4A16 | 1.60 (1.25) | 1.50 |" in text
    assert "| fp4gemm W4A16 | 1.25 |" in text  # of the GPU, where nothing else says it
    assert "c, x: it is wrong" in text


def _profile(steps: int) -> list[kernels.Kernel]:
    """Steps of 100 us with four kernels; the third starts while the second runs, and waits for it."""
    made = []
    for step in range(steps):
        at = 100.0 * step
        made += [("void first(int)", at, 5.0), ("gemm", at + 6, 10.0), ("gemm", at + 7, 19.0)]
        made.append((f"last of {step}", at + 40, 2.0))
    return made


def test_the_steps_of_a_profile() -> None:
    """The longest idle time is before the first kernel of a step; the first two and the last are left out."""
    found = kernels.steps_of(_profile(6), 6)
    assert [step[3][0] for step in found] == ["last of 2", "last of 3", "last of 4"]
    assert found[0][:3] == [("first(int)", 0.0, 5.0), ("gemm", 6.0, 10.0), ("gemm", 7.0, 19.0)]


def test_a_kernel_that_is_not_of_every_step_separates_none() -> None:
    """It is called as often as there are steps, behind a longer idle time, but all at the end."""
    late = [("update", 1000.0 + 500 * i, 3.0) for i in range(6)]
    found = kernels.steps_of([*_profile(6), *late], 6)
    assert [step[0][0] for step in found] == ["first(int)"] * 3
    assert kernels.steps_of(late, 60) == []


def test_every_moment_belongs_to_one_kernel() -> None:
    """A kernel that waits for the one before it counts from its end."""
    step = kernels.steps_of(_profile(6), 6)[0]
    assert kernels.own_us(step) == [5.0, 10.0, 10.0, 2.0]
    assert kernels.own_us([("one", 0.0, 9.0), ("inside", 2.0, 3.0)]) == [9.0, 0.0]
    text = report.kernels_text(step, "one", 2)
    assert "4 kernels, 27 us busy of 42 us" in text
    assert "  1.00    10.00    14.50  gemm" in text


class _Profiled(child.Child):
    """An engine whose profile is given."""

    def __init__(self, found: Path, profile: list[kernels.Kernel]) -> None:
        self.spec = {"found": str(found), "input": 16, "prefill": 32, "vocabulary": 64, "profiled": [4]}
        self.llm = self
        self.profile = profile

    def collective_rpc(self, method: Any) -> list[Any]:
        return [self.profile if method is inside.stop_profile else None]

    def generated(self, prompts: Any, tokens: int, **options: Any) -> list[Any]:
        return []


def test_an_arm_says_how_long_the_gpu_is_busy(tmp_path: Path) -> None:
    made = _Profiled(tmp_path / "found", _profile(child.NUM_PROFILED))
    made.profile_decode(1)
    made.profile_decode(4)
    made.profile_prefill(1)
    made.profile = []
    made.profile_decode(16)
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [each["kind"] for each in found] == ["gpu", "gpu", "profile", "gpu", "gpu"]
    shared = {"kind": "gpu", "step": "decode"}
    busy = [27.0] * (child.NUM_PROFILED - 3)
    assert found[0] == {**shared, "size": 1, "gpu_us": 27.0, "every_gpu_us": busy}
    assert [name for name, _, _ in found[2]["kernels"]][:3] == ["first(int)", "gemm", "gemm"]
    assert found[3] == {"kind": "gpu", "step": "prefill", "size": 1, "gpu_us": 27.0 * child.NUM_PROFILED}
    assert found[4] == {**shared, "size": 16, "error": "the profile has no whole steps"}
    plan = _plan(tmp_path)
    steps = [{"kind": "decode", "batch": 1, "input": 16, "ms": 0.5}, {"kind": "busy", "others_cores": 1.0}]
    row = command._rows(plan, "w4a8", [*steps, *found], None)[0]
    assert (row["us"], row["gpu_us"], row["others_cores"]) == (500.0, 27.0, 1.0)


class _Core:
    """A core of an engine whose calls take known times, and which calls its worker as vLLM's does."""

    def __init__(self, now: list[float]) -> None:
        self.now = now
        self.scheduler = self.model_executor = self
        self.step_fn = self.step

    def _take(self, seconds: float) -> None:
        self.now[0] += seconds

    def schedule(self) -> None:
        self._take(1.0)

    def execute_model(self) -> str:
        self._take(2.0)
        return "launched"

    def sample_tokens(self) -> None:
        self._take(3.0)

    def update_from_output(self) -> None:
        self._take(5.0)

    def step(self) -> None:
        self.scheduler.schedule()
        assert self.model_executor.execute_model() == "launched"
        self.model_executor.sample_tokens()
        self._take(30.0)  # the wait
        self.scheduler.update_from_output()

    def collective_rpc(self, method: Any) -> Any:
        return method("worker")


def test_the_parts_of_a_step_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the core are timed while the clock runs, and not afterwards."""
    now = [0.0]
    monkeypatch.setattr(inside.time, "perf_counter", lambda: now[0])
    core = _Core(now)
    before = dict(vars(core))
    assert inside.start_clock("worker") == "no caller of the worker is vLLM's EngineCore"
    assert core.collective_rpc(inside.start_clock) is None
    for step in range(10):
        core.step_fn()
        now[0] += 0.5 if step != 4 else 100.0  # the median does not see it
    spans = core.collective_rpc(inside.stop_clock)
    assert vars(core) == before
    core.step_fn()
    assert [len(each) for each in spans.values()] == [10] * 5
    us = {name: value / 1e6 for name, value in host.parts_us(spans).items()}
    calls = {"schedule": 1.0, "execute": 2.0, "sample": 3.0, "update": 5.0}
    assert us == {**calls, "wait": 30.0, "between": 0.5, "host": 11.5, "whole": 41.5}
    assert host.parts_us({name: each[:6] for name, each in spans.items()}) == {}


def test_the_time_of_the_client() -> None:
    calls = [(10.0 * i, 10.0 * i + 3.0) for i in range(9)]
    assert host.client_us(calls) == {"client": 7e6, "client_wait": 3e6}
    assert host.client_us(calls[:6]) == {}


def test_a_row_has_the_time_of_the_host(tmp_path: Path) -> None:
    us = {"host": 900.0, "wait": 50.0}
    found = [
        {"kind": "decode", "batch": 1, "input": 16, "ms": 1.0},
        {"kind": "decode", "batch": 4, "input": 16, "ms": 1.0},
        {"kind": "host", "batch": 1, "us": us},
        {"kind": "host", "batch": 4, "error": "there were too few steps"},
    ]
    rows = command._rows(_plan(tmp_path), "w4a8", found, None)
    assert (rows[0]["host_us"], rows[0]["host_parts_us"]) == (900.0, us)
    assert "host_us" not in rows[1]
    text = report.text(rows)
    assert "for which the process of vLLM's engine works on the host" in text
    assert "| arm | decode 1 |" in text
    assert "| fp4gemm W4A8 | 0.90 |" in text


def _python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_one_process_runs_while_the_others_are_stopped(tmp_path: Path) -> None:
    """Children too, in whatever session they are; the one that is measured continues."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open(r'{tmp_path}/' + sys.argv[1], 'w').write(f'{{child.pid}}\\n')\n"
        "child.wait()"
    )
    started = []
    try:
        for name in ("one", "two"):
            process = subprocess.Popen([sys.executable, "-c", code, name], start_new_session=True)
            started.append(Started(name, process, tmp_path))
        deadline = time.monotonic() + 30
        while not all((tmp_path / n).exists() and (tmp_path / n).read_text()[-1:] for n in ("one", "two")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = {name: int((tmp_path / name).read_text()) for name in ("one", "two")}
        for running, held in (("one", "two"), ("two", "one")):
            one = next(each for each in started if each.name == running)
            busy, problem = silence(one, started, None)
            assert problem is None
            assert busy["others_cores"] >= 0
            time.sleep(0.1)
            assert _state(children[held]) == "T"
            assert _state(children[running]) == "S"
    finally:
        for each in started:
            each.end()
            with contextlib.suppress(OSError):
                os.kill(children[each.name], signal.SIGKILL)
    assert all(each.process.poll() is not None for each in started)


@pytest.mark.parametrize(
    ("said", "percent", "problem"),
    [("0", 0, None), ("17", 17, "the GPU is 17 % busy with something else"), ("[N/A]", None, None)],
)
def test_no_arm_is_measured_beside_other_work_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, percent: int | None, problem: str | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncase \"$*\" in *--id={GPU.smi_id}*) echo '{said}' ;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(run, "SECONDS_TO_IDLE", 0.3)
    one = Started("one", _python("import time; time.sleep(60)"), tmp_path)
    try:
        busy, found = silence(one, [one], GPU)
        assert found == problem
        assert busy.get("others_gpu_percent") == percent
    finally:
        one.end()


def test_an_unfinished_line_is_not_read(tmp_path: Path) -> None:
    process = _python("pass")
    (tmp_path / "found").write_text('{"kind": "memory"}\n{"kind": "pro')
    assert Started("one", process, tmp_path).found() == [{"kind": "memory"}]
    process.wait()


def test_the_reason_of_an_engine_that_ended() -> None:
    log = "starting\nTraceback\n  line\nValueError: k is 5\nmore\n"
    assert last_lines(log) == "ValueError: k is 5"
    assert last_lines("one\ntwo\n") == "one | two"
