"""Statistics of the inputs of layers: what they are, their file, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4gemm.calibration import InputStatistics, Statistics

pytest.importorskip("safetensors", reason="safetensors is not installed")
COUNT, SQUARE, MOMENT = torch.tensor(7), torch.arange(32.0), torch.eye(32)


def two() -> Statistics:
    experts = InputStatistics(torch.tensor([3, 0]), torch.rand(2, 16), torch.rand(2, 16, 16))
    layer = InputStatistics(COUNT, SQUARE, MOMENT, SQUARE / 100)
    return Statistics({"model.fc": layer, "experts.w13": experts})


def test_a_file_holds_all_bits(tmp_path: Path) -> None:
    made = two()
    made.save(tmp_path / "a.safetensors")
    back = Statistics.load(tmp_path / "a.safetensors")
    assert set(back) == set(made)
    for name, layer in made.items():
        for part in ("num_tokens", "mean_square", "second_moment", "quantization_error"):
            a, b = getattr(back[name], part), getattr(layer, part)
            assert a is b is None or torch.equal(a, b)
    assert back["experts.w13"].quantization_error is None
    back.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_second_moments_are_optional(tmp_path: Path) -> None:
    made = Statistics({"fc": InputStatistics(COUNT, SQUARE)})
    assert (made.has_moments, two().has_moments, len(made)) == (False, True, 1)
    assert repr(made) == "Statistics of 1 layers, without second moments"
    made.save(tmp_path / "a")
    assert Statistics.load(tmp_path / "a")["fc"].second_moment is None
    assert made["fc"].to("cpu").k == 32


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "count": (lambda: InputStatistics(7, SQUARE), TypeError, "num_tokens: got 7 (int), must be"),
    "count-dtype": (lambda: InputStatistics(COUNT.int(), SQUARE), TypeError, "num_tokens: dtype is torch.i"),
    "count-shape": (
        lambda: InputStatistics(COUNT, SQUARE.view(2, 16)), ValueError, "num_tokens: shape is (), must be",
    ),
    "square-dtype": (lambda: InputStatistics(COUNT, SQUARE.double()), TypeError, "mean_square: dtype is"),
    "square-rank": (lambda: InputStatistics(COUNT, COUNT.float()), ValueError, "must be (k,) or (g, k)"),
    "moment": (
        lambda: InputStatistics(COUNT, SQUARE, MOMENT[:1]), ValueError,
        "second_moment: shape is (1, 32), must be (32, 32) as of mean_square",
    ),
    "error-dtype": (
        lambda: InputStatistics(COUNT, SQUARE, None, SQUARE.double()), TypeError,
        "quantization_error: dtype is torch.float64, must be torch.float32",
    ),
    "error-shape": (
        lambda: InputStatistics(COUNT, SQUARE, None, SQUARE[:16]), ValueError,
        "quantization_error: shape is (16,), must be (32,)",
    ),
    "error-experts": (
        lambda: InputStatistics(COUNT.view(1), SQUARE.view(1, 32), None, SQUARE), ValueError,
        "quantization_error: is given for experts, must be None",
    ),
    "layers": (lambda: Statistics([1]), TypeError, "layers: got [1] (list), must be a mapping"),
    "key": (lambda: Statistics({1: two()["model.fc"]}), TypeError, "layers: a key is 1 (int), must be a str"),
    "value": (lambda: Statistics({"a": SQUARE}), TypeError, "layers: 'a' is a torch.float32 tensor of shape"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), BAD.values(), ids=BAD)
def test_bad_parts(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_bad_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        Statistics.load(path)
    two().save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"a: is not a whole safetensors file: "):
        Statistics.load(path)
    save_file({"fc.mean_square": SQUARE}, path)
    with pytest.raises(ValueError, match=r"a: is not a file of fp4gemm\.calibration\.Statistics\.save$"):
        Statistics.load(path)
    for tensors, text in (
        ({"fc.mean_square": SQUARE}, "'fc' has no num_tokens"),
        (
            {"fc.amax": SQUARE},
            "holds 'fc.amax', must end in num_tokens, mean_square, second_moment or quantization_error",
        ),
        ({"fc.mean_square": SQUARE, "fc.num_tokens": 2 * SQUARE}, "'fc': num_tokens: dtype is torch.float32"),
    ):
        save_file(tensors, path, metadata={"format": "fp4gemm calibration 1"})
        with pytest.raises(ValueError, match=re.escape(text)):
            Statistics.load(path)
