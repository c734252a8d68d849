"""Bad checkpoints, folders and options: errors name file and tensor, and nothing half-written is done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, llama, save
from fp4gemm.checkpoint import CheckpointError, Options, Translation, conversion, convert, plan_conversion
from torch import Tensor

FP8 = {"quant_method": "fp8"}
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q, K, V, UP = (
    f"model.layers.0.{name}.weight"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rewrite(source: Path, change: Callable[[dict[str, Tensor]], object], **options: Any) -> None:
    shutil.rmtree(source)
    tensors = llama(1)
    change(tensors)
    save(source, tensors, shards=2, **options)


def set_value(tensors: dict[str, Tensor], name: str, value: float) -> None:
    tensors[name][3, 5] = value


BAD_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda s: os.truncate(s / SHARD, 20_000),
        rf"{SHARD}: is damaged: '\S+' ends at byte \d+, and the file",
    ),
    "header-cut": (
        lambda s: os.truncate(s / SHARD, 100),
        rf"{SHARD}: is damaged: its header has \d+ bytes, and the file only",
    ),
    "empty": (lambda s: (s / SHARD).write_bytes(b""), rf"{SHARD}: is damaged: .*header too small"),
    "not-json": (
        lambda s: (s / SHARD).write_bytes(struct.pack("<Q", 9) + b"{" * 99),
        rf"{SHARD}: is damaged: .*JSON",
    ),
    "dtype": (
        lambda s: edit_header(s / SHARD, lambda h: h[K].update(dtype="F32")),
        rf"{SHARD}: is damaged: '{K}' is F32 of shape \(32, 64\), 8192 bytes, but has 4096",
    ),
    "shape": (
        lambda s: edit_header(s / SHARD, lambda h: h[K].update(shape=[32, 65])),
        rf"{SHARD}: is damaged: '{K}' is BF16 of shape \(32, 65\), 4160 bytes, but has 4096",
    ),
    "unknown-dtype": (
        lambda s: edit_header(s / SHARD, lambda h: h[K].update(dtype="XX")),
        rf"{SHARD}: is damaged: the dtype of '{K}' is XX, must be one of",
    ),
    "missing-shard": (
        lambda s: (s / SHARD).unlink(),
        rf"{INDEX}: names the file {SHARD} for '\S+', which is missing",
    ),
    "index-misses": (
        lambda s: edit_json(s / INDEX, lambda i: i["weight_map"].pop(K)),
        rf"{INDEX}: misses the tensor '{K}' of {SHARD}",
    ),
    "index-has-more": (
        lambda s: edit_json(s / INDEX, lambda i: i["weight_map"].update(other=SHARD)),
        rf"{INDEX}: says that {SHARD} has the tensor 'other', which is not in its header",
    ),
    "index-other-file": (
        lambda s: edit_json(s / INDEX, lambda i: i["weight_map"].update({K: SHARD.replace("1-", "2-")})),
        rf"{INDEX}: says that '{K}' is in \S+, but {SHARD} has it",
    ),
    "index-outside": (
        lambda s: edit_json(s / INDEX, lambda i: i["weight_map"].update({K: "../x.safetensors"})),
        rf"{INDEX}: '{K}' is in '../x.safetensors', must be the name of a shard",
    ),
    "no-map": (lambda s: (s / INDEX).write_text("{}"), f"{INDEX}: has no weight_map"),
    "two-indices": (lambda s: (s / f"b{INDEX}").write_text("{}"), "has the indices .*, must have one"),
    "no-index": (
        lambda s: (s / INDEX).unlink(),
        "must have one safetensors file or an index of several",
    ),
    "no-config": (lambda s: (s / "config.json").unlink(), "config.json: is missing"),
    "bad-config": (lambda s: (s / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
    "list-config": (
        lambda s: (s / "config.json").write_text("[]"),
        "config.json: is a JSON list, must be an object",
    ),
    "unknown-config": (
        lambda s: (s / "config.json").write_text("{}"),
        "config.json: has none of model_type",
    ),
    "pickled": (
        lambda s: (s / "pytorch_model.bin").write_bytes(b"x"),
        r"pytorch_model.bin: is a pickled file, must be safetensors \(load the model with torch",
    ),
    "quantized": (
        lambda s: edit_json(s / "config.json", lambda c: c.update(quantization_config=FP8)),
        "src: is quantized already, must be a float checkpoint: quantization_config: quant_method is 'fp8'",
    ),
    "nan": (
        lambda s: rewrite(s, lambda t: set_value(t, UP, float("nan"))),
        rf"{UP}: element \(3, 5\) is nan",
    ),
    "inf": (
        lambda s: rewrite(s, lambda t: set_value(t, K, float("-inf"))),
        rf"{K}: element \(3, 5\) is -inf",
    ),
    "no-partner": (
        lambda s: rewrite(s, lambda t: t.pop(K)),
        rf"{K}: is missing, the partner of {Q}, {V}, with which it",
    ),
    "no-gate": (
        lambda s: rewrite(s, lambda t: t.pop(UP)),
        rf"{UP}: is missing, the partner of {UP.replace('up', 'gate')}",
    ),
    "set-of-dtypes": (
        lambda s: rewrite(s, lambda t: t.update({K: t[K].float()})),
        rf"{Q} BF16, {K} F32, {V} BF16: have unequal dtypes, must have one dtype to share an amax",
    ),
    "set-of-k": (
        lambda s: rewrite(s, lambda t: t.update({K: t[K][:, :32].clone()})),
        rf"{Q} \(64, 64\), {K} \(32, 32\), .*: have unequal k",
    ),
    "name-taken": (
        lambda s: rewrite(s, lambda t: t.update({f"{K}_scale": torch.ones(3)})),
        f"{K}_scale: would be in {SHARD} and again in",
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(case: str, tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1), shards=2)
    change, message = BAD_SOURCES[case]
    change(source)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "dst")
    assert not (tmp_path / "dst" / "config.json").exists()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "src", llama(1))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: ends inside of the tensor '\S+'; it was cut"
    ):
        convert(source, tmp_path / "dst")


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "exclude-nothing": (
        {"exclude": ["mlp.other"]},
        CheckpointError,
        "exclude: 'mlp.other' matches none of the 11",
    ),
    "include-nothing": (
        {"include": ["re:^x$"]},
        CheckpointError,
        r"include: 're:\^x\$' matches none of the 11",
    ),
    "part-of-a-set": (
        {"exclude": ["*.v_proj"]},
        CheckpointError,
        rf"{V}: stays \(matched by exclude '\*.v_proj'\), but its partner {Q}, {K} is quantized",
    ),
    "nothing-left": (
        {"exclude": ["model"]},
        CheckpointError,
        "no weight would be NVFP4, of 11 tensors",
    ),
    "many-layers": (
        {"bf16_first": 1, "bf16_last": 1},
        CheckpointError,
        "got 1 and 1, must be at most 1, the layers",
    ),
    "format": ({"format": "gguf"}, ValueError, "format: got 'gguf', must be 'modelopt'"),
    "row": (
        {"weight_scaling": "row"},
        ValueError,
        "weight_scaling: got 'row' with the format 'modelopt', which holds",
    ),
    "row-of-others": (
        {"weight_scaling": "row", "format": "fp4gemm", "numerics": "modelopt"},
        ValueError,
        "scaling: got 'row', must be 'tensor' with numerics 'modelopt'",
    ),
    "expression": ({"exclude": ["re:("]}, ValueError, r"exclude: got 're:\(', must be a name, "),
    "no-pattern": ({"exclude": [3]}, TypeError, r"exclude: got \[3\] .*, must be a str or a sequence of str"),
    "negative": ({"bf16_first": -1}, ValueError, "bf16_first: got -1 .*, must be 0 or more layers"),
    "fuse-one": ({"fuse": [["q_proj"]]}, ValueError, "fuse: got .*, must be a sequence of sets"),
    "fuse-twice": ({"fuse": [["a", "b"], ["b", "c"]]}, ValueError, "fuse: names 'b' twice"),
    "static": ({"activations": "static"}, ValueError, "activation_amax: got 0 amaxes with activations"),
    "kv": ({"kv_scales": {"model.x": (1.0, 2.0)}}, CheckpointError, "kv_cache: model.x is no module of"),
    "kv-huge": (
        {"kv_scales": {"a": (1.0, 1e300)}},
        ValueError,
        "kv_scales: got .* for a, must be 2 positive",
    ),
    "kv-zero": ({"kv_scales": {"a": (1.0, 0.0)}}, ValueError, "kv_scales: got .* for a, must be 2 positive"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case: str, tmp_path: Path) -> None:
    options, error, message = BAD_OPTIONS[case]
    source = save(tmp_path / "src", llama(1))
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "dst", Options(**options))


@pytest.mark.parametrize("place", ["src", "src/inside", "."])
def test_dst_apart_from_src(place: str, tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    with pytest.raises(ValueError, match=r"dst: got .*, must be apart from the source"):
        convert(source, tmp_path / place)


def test_dst_that_is_not_ours(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "a.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"dst: has files, such as a.txt, and no fp4gemm_convert.json"):
        convert(source, tmp_path / "dst", resume=True)
    assert list(contents(tmp_path / "dst")) == ["a.txt"]
    with pytest.raises(CheckpointError, match=r"a.txt: cannot be made: File exists; must be a folder"):
        convert(source, tmp_path / "dst" / "a.txt")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at a write: the error names the file, and resume continues to the same bytes."""
    source = save(tmp_path / "src", llama(1), shards=2)
    convert(source, tmp_path / "whole")
    pwrite, left = os.pwrite, [12]

    def full(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(
            CheckpointError, match=r"safetensors.part: cannot be written: No space left on device"
        ):
            convert(source, tmp_path / "dst", jobs=1)
    assert not (tmp_path / "dst" / "config.json").exists()
    convert(source, tmp_path / "dst", resume=True)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError, match=r"small: the disk has 1 bytes free, must have \d+ for the checkpoint"
    ):
        convert(source, tmp_path / "small")


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    convert(source, tmp_path / "dst")
    path = tmp_path / "dst" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"dst/model.safetensors: '\S+' differs from what the source gives"
    ):
        convert(source, tmp_path / "dst", verify=True)
    data[-100] ^= 1
    path.write_bytes(data)
    edit_json(tmp_path / "dst" / "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"dst: has other shards, or another config.json"):
        convert(source, tmp_path / "dst", verify=True)


def test_verify_checks_the_bound_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong numbers that are reproducible are found as well."""
    source = save(tmp_path / "src", llama(1))
    convert(source, tmp_path / "dst")
    run = conversion.run

    def wrong(*arguments: Any, **options: Any) -> Any:
        done = run(*arguments, **options)
        object.__setattr__(done.layers[0], "worst_element", 1.5)
        return done

    monkeypatch.setattr(conversion, "run", wrong)
    with pytest.raises(
        CheckpointError, match=r"a value of \S+ is 1.500 times as far from the float one as NVFP4"
    ):
        convert(source, tmp_path / "dst", verify=True)


def test_translations_that_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    with pytest.raises(ValueError, match="target: got 'modelopt', must be another format"):
        Translation("modelopt", "modelopt")
    with pytest.raises(CheckpointError, match="src: is a float checkpoint, must be in the modelopt format"):
        plan_conversion(source, Translation("modelopt", "fp4gemm"))
    convert(source, tmp_path / "rows", Options(format="fp4gemm", weight_scaling="row"))
    with pytest.raises(
        CheckpointError, match="rows: has an amax for each row, which only the fp4gemm format holds"
    ):
        plan_conversion(tmp_path / "rows", Translation("fp4gemm", "modelopt"))
    convert(source, tmp_path / "q")
    with pytest.raises(
        CheckpointError, match=r"q: is quantized already, in the modelopt format; .*--from modelopt"
    ):
        plan_conversion(tmp_path / "q")
    with pytest.raises(CheckpointError, match="q: is in the modelopt format, must be in the fp4gemm format"):
        plan_conversion(tmp_path / "q", Translation("fp4gemm", "modelopt"))
