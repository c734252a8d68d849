"""A second run on a folder that is finished, damaged or in use, and what --verify reads."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from checkpoints import contents, llama, save
from fp4gemm.checkpoint import CheckpointError, convert
from fp4gemm.commands import main

SHARD = "model-00002-of-00002.safetensors"
STATE = "fp4gemm_convert.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "src", llama(1), shards=2)


@pytest.mark.parametrize("missing", [SHARD, "config.json", "tokenizer.json", "hf_quant_config.json"])
def test_a_finished_folder_without_a_file_is_not_done(source: Path, tmp_path: Path, missing: str) -> None:
    convert(source, tmp_path / "dst")
    before = contents(tmp_path / "dst")
    (tmp_path / "dst" / missing).unlink()
    with pytest.raises(CheckpointError, match="dst: has an interrupted conversion"):
        convert(source, tmp_path / "dst")
    assert not convert(source, tmp_path / "dst", resume=True).already_done
    assert contents(tmp_path / "dst") == before


def test_a_finished_folder_with_a_short_shard_is_not_done(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst")
    before = contents(tmp_path / "dst")
    (tmp_path / "dst" / SHARD).write_bytes(b"")
    assert not convert(source, tmp_path / "dst", resume=True).already_done
    assert contents(tmp_path / "dst") == before


def test_errors_are_measured_when_all_is_done(source: Path, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "dst", measured=True)
    again = convert(source, tmp_path / "dst", measured=True)
    assert again.already_done
    assert again.layers == first.layers
    assert len(again.layers) == 7


def test_verify_compares_files_that_were_copied(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", verify=True)
    (tmp_path / "dst" / "tokenizer.json").write_text("content of tokenizer.jsoN")
    with pytest.raises(CheckpointError, match=r"dst/tokenizer.json: differs from \S+src/tokenizer.json"):
        convert(source, tmp_path / "dst", verify=True)


@pytest.mark.parametrize("content", ['{"key": [1], "finished": {}}', '{"key": {}}'])
def test_a_damaged_state_is_named(source: Path, tmp_path: Path, content: str) -> None:
    convert(source, tmp_path / "dst")
    (tmp_path / "dst" / STATE).write_text(content)
    with pytest.raises(CheckpointError, match=f"{STATE}: is damaged: key and finished must be objects"):
        convert(source, tmp_path / "dst", resume=True)


def test_two_conversions_do_not_write_one_folder(source: Path, tmp_path: Path) -> None:
    begun, refused = threading.Event(), threading.Event()

    def progress(done: int, total: int, name: str) -> None:
        begun.set()
        assert refused.wait(60)

    first = threading.Thread(target=convert, args=(source, tmp_path / "dst"), kwargs={"progress": progress})
    first.start()
    try:
        assert begun.wait(60)
        with pytest.raises(CheckpointError, match="dst: another conversion is writing it, must end first"):
            convert(source, tmp_path / "dst", resume=True)
    finally:
        refused.set()
        first.join()
    assert convert(source, tmp_path / "dst", verify=True).already_done


def test_a_link_to_a_missing_file_is_named(source: Path, tmp_path: Path) -> None:
    (source / "vocab.txt").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"vocab.txt: is no file, or a link to a missing one"):
        convert(source, tmp_path / "dst")


def test_a_report_that_cannot_be_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--report"]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, str(tmp_path / "missing" / "r.json")])
    assert re.search(
        r"argument --report: got \S+, must be a file in a folder that exists", capsys.readouterr().err
    )
    assert not (tmp_path / "dst").exists()


def test_a_dry_run_writes_its_report_and_refuses_verify(source: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--dry-run"]
    assert main([*arguments, "--report", str(tmp_path / "r.json")]) == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["tensors"]) == len(llama(1))
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--verify"])
