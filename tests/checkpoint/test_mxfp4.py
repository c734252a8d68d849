"""Checkpoints with MXFP4 experts, as GPT-OSS has them, become NVFP4 checkpoints of each format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, llama, load, random, save
from fp4gemm.__main__ import main
from fp4gemm.checkpoint import CheckpointError, ConvertReport, Options, Translation, convert, plan_conversion
from fp4gemm.checkpoint.formats import FORMATS, SOURCES, FormatName, StoredWeight, read_scheme
from helpers import assert_bits
from torch import Tensor

G, HIDDEN, INTERMEDIATE = 3, 64, 32
EXPERTS = "model.layers.0.mlp.experts"
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "vocab_size": 160,
    "swiglu_limit": 7.0,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))
FORMAT_NAMES: tuple[FormatName, ...] = tuple(FORMATS)


def tensors_of(low: int = 106, high: int = 123) -> dict[str, Tensor]:
    """A layer with experts, and the other tensors of a small model."""
    gen = torch.Generator().manual_seed(5)
    tensors = {name: t for name, t in llama(1).items() if ".mlp." not in name}
    tensors["model.layers.0.mlp.router.weight"] = random(gen, G, HIDDEN)
    tensors["model.layers.0.mlp.router.bias"] = random(gen, G)
    tensors["model.layers.0.self_attn.sinks"] = random(gen, 4)
    for child, n, k in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        shape = (G, n, k // 32)
        tensors[f"{EXPERTS}.{child}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=gen).byte()
        tensors[f"{EXPERTS}.{child}_scales"] = torch.randint(low, high + 1, shape, generator=gen).byte()
        tensors[f"{EXPERTS}.{child}_bias"] = random(gen, G, n)
    return tensors


def values(tensors: dict[str, Tensor], child: str) -> Tensor:
    """(g, n, k) in float32, by the specification."""
    blocks, scales = tensors[f"{EXPERTS}.{child}_blocks"], tensors[f"{EXPERTS}.{child}_scales"]
    q = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    return torch.ldexp(q, scales.int().unsqueeze(-1) - 127).flatten(-2)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_every_expert_has_its_values_and_its_bias(format: FormatName, shards: int, tmp_path: Path) -> None:
    """Gate and up are every other row, each from 17 exponents; all else keeps its bytes."""
    tensors = tensors_of()
    source = save(tmp_path / "a", tensors, shards=shards, config=CONFIG)
    report = convert(source, tmp_path / "b", Translation("mxfp4", format), verify=True, device="cpu")
    made, config = load(tmp_path / "b"), json.loads((tmp_path / "b" / "config.json").read_text())
    scheme = read_scheme(config, tmp_path / "b")
    assert scheme is not None
    assert (scheme.format, scheme.activations, scheme.e4m3_max) == (format, "a16", 256)
    assert scheme.scaling == ("row" if format == "fp4gemm" else "tensor")
    first, down = values(tensors, "gate_up_proj"), values(tensors, "down_proj")
    biases = {child: tensors[f"{EXPERTS}.{child}_bias"] for child in ("gate_up_proj", "down_proj")}
    for e in range(G):
        for name, want, bias in (
            ("gate_proj", first[e, 0::2], biases["gate_up_proj"][e, 0::2]),
            ("up_proj", first[e, 1::2], biases["gate_up_proj"][e, 1::2]),
            ("down_proj", down[e], biases["down_proj"][e]),
        ):
            module = f"{EXPERTS}.{e}.{name}"
            stored = StoredWeight.read(made, module, format, 256)
            assert stored.amax.shape == (want.shape[0] if format == "fp4gemm" else 1,)
            assert_bits(stored.to_nvfp4().dequantize(), want, module)
            assert_bits(made.pop(f"{module}.bias"), bias, module)
            assert scheme.quantizes(module)
            for suffix in FORMATS[format].weight_suffixes:
                del made[f"{module}.{suffix}"]
    kept = {name for name in tensors if not name.startswith(EXPERTS)}
    assert set(made) == kept
    for name in kept:
        assert_bits(made[name], tensors[name], name)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router", "lm_head"):
        assert not scheme.quantizes(name)
    assert not report.notes
    actions = {entry.name: entry.action for entry in report.tensors}
    assert actions == {name: "float" if name in kept else "translated" for name in tensors}
    assert report.bytes_after == sum(t.nbytes for t in load(tmp_path / "b").values())


def test_gate_and_up_share_an_amax_where_a_matrix_has_one(tmp_path: Path) -> None:
    source = save(tmp_path / "a", tensors_of(), config=CONFIG)
    convert(source, tmp_path / "b", Translation("mxfp4", "modelopt"), device="cpu")
    made = load(tmp_path / "b")
    for e in range(G):
        outers = [made[f"{EXPERTS}.{e}.{name}.weight_scale_2"] for name in ("gate_proj", "up_proj")]
        assert torch.equal(*outers)
        assert torch.frexp(outers[0])[0].item() == 0.5  # a power of two: other loaders are exact, too


@pytest.mark.parametrize(("format", "rounded"), [("fp4gemm", 0), ("modelopt", 4 * 32)])
def test_the_report_counts_what_is_not_exact(format: FormatName, rounded: int, tmp_path: Path) -> None:
    """Values that lie more than 17 exponents below the largest of their matrix; each row has one exponent."""
    tensors = tensors_of(110, 120)
    name = f"{EXPERTS}.down_proj"
    tensors[f"{name}_blocks"] |= 0x11  # no block is zero, and the low nibbles are odd codes
    tensors[f"{name}_blocks"][1, :8] = 0x11  # 0.5 in each low and high nibble
    tensors[f"{name}_scales"][1, :4], tensors[f"{name}_scales"][1, 4:] = 100, 120
    tensors[f"{name}_scales"][1, 3] = 60
    source = save(tmp_path / "a", tensors, config=CONFIG)
    report = convert(source, tmp_path / "b", Translation("mxfp4", format), verify=True, device="cpu")
    note = (
        f"{name} (expert 1): {rounded} of 2048 values were rounded, since their scales are more than 17 "
        "powers of two below the largest one with the same amax"
    )
    assert report.notes == ((note,) if rounded else ())
    assert (note in str(report)) is bool(rounded)
    stored = StoredWeight.read(load(tmp_path / "b"), f"{EXPERTS}.1.down_proj", format, 256)
    want = values(tensors, "down_proj")[1]
    if rounded:
        want[:4] = 0  # 0.5 at 20 and 60 exponents below 120
    assert_bits(stored.to_nvfp4().dequantize(), want, "values")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "a", tensors_of(), shards=2, config=CONFIG)
    arguments = ["convert", str(source), str(tmp_path / "b"), "--from", "mxfp4", "--to", "fp4gemm"]
    assert main([*arguments, "--dry-run"]) == 0
    assert f"{EXPERTS}.gate_up_proj_blocks" in capsys.readouterr().out
    assert not (tmp_path / "b").exists()
    assert main([*arguments, "--verify", "--device", "cpu"]) == 0
    convert(source, tmp_path / "c", Translation("mxfp4", "fp4gemm"), jobs=2, device="cpu")
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    with pytest.raises(SystemExit):
        main(["convert", str(source), str(tmp_path / "d"), "--from", "modelopt", "--to", "mxfp4"])
    assert main(["convert", str(source), str(tmp_path / "d"), "--format", "fp4gemm"]) == 1
    assert "quant_method is 'mxfp4', must be 'modelopt'" in (text := capsys.readouterr().err)
    assert "(--from mxfp4 --to FORMAT makes it one of them)" in text


def test_weights_without_biases(tmp_path: Path) -> None:
    tensors = {name: t for name, t in tensors_of().items() if not name.endswith("_bias")}
    source = save(tmp_path / "a", tensors, config=CONFIG)
    convert(source, tmp_path / "b", Translation("mxfp4", "fp4gemm"), verify=True, device="cpu")
    assert not [name for name in load(tmp_path / "b") if ".experts." in name and name.endswith(".bias")]


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "float": (
        lambda t, c: c.pop("quantization_config"),
        r"is a float checkpoint, must be in the mxfp4 format",
    ),
    "method": (
        lambda t, c: c["quantization_config"].update(quant_method="fp8"),
        r"is quantized with the quant_method 'fp8', must be in the mxfp4 format",
    ),
    "patterns": (
        lambda t, c: c["quantization_config"].update(modules_to_not_convert="lm_head"),
        r"modules_to_not_convert is 'lm_head' \(str\), must be a list of strings",
    ),
    "model": (lambda t, c: c.update(model_type="llama"), r"model_type is 'llama', must be 'gpt_oss'"),
    "limit": (lambda t, c: c.update(swiglu_limit=10.0), r"swiglu_limit is 10\.0, must be 7\.0"),
    "no stack": (
        lambda t, c: [t.pop(name) for name in list(t) if name.endswith(("_blocks", "_scales"))],
        r"has no tensor that ends in _blocks, must have one in the mxfp4 format",
    ),
    "codes": (
        lambda t, c: t.pop(f"{EXPERTS}.gate_up_proj_blocks"),
        r"gate_up_proj_blocks is missing beside model\.layers\.0\.mlp\.experts\.gate_up_proj_scales",
    ),
    "another": (
        lambda t, c: t.update(
            {"model.layers.0.self_attn.q_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"] + 0}
        ),
        r"self_attn\.q_proj_blocks is not known, its weight must be experts\.gate_up_proj or experts\.down_p",
    ),
    "sizes": (
        lambda t, c: t.update(
            {name: t[name][:, :32].clone() for name in list(t) if name.startswith(f"{EXPERTS}.gate_up")}
        ),
        r"are not the shapes of gated experts, \(g, 2i, h\) and \(g, h, i\)",
    ),
    "scales": (
        lambda t, c: t.update({f"{EXPERTS}.down_proj_scales": torch.zeros(G, HIDDEN, 2).byte()}),
        r"down_proj_scales has the shape \(3, 64, 2\), must be \(3, 64, 1\)",
    ),
    "bias": (
        lambda t, c: t.update({f"{EXPERTS}.down_proj_bias": torch.zeros(G, HIDDEN - 1)}),
        r"down_proj_bias has the shape \(3, 63\), must be \(3, 64\)",
    ),
    "one bias": (
        lambda t, c: t.pop(f"{EXPERTS}.down_proj_bias"),
        r"experts\.down_proj has no bias, and model\.layers\.0\.mlp\.experts\.gate_up_proj has one",
    ),
    "nan": (
        lambda t, c: t[f"{EXPERTS}.down_proj_scales"][1, 3].fill_(255),
        r"experts\.down_proj \(expert 1\): scales: 1 of 64 are 255, the NaN of e8m0, the first at \[3, 0\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    change, text = WRONG[case]
    tensors, config = tensors_of(), json.loads(json.dumps(CONFIG))
    change(tensors, config)
    source = save(tmp_path / "a", tensors, config=config)
    with pytest.raises(CheckpointError, match=text):
        convert(source, tmp_path / "b", Translation("mxfp4", "fp4gemm"), device="cpu")


def test_a_quantization_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    source = save(tmp_path / "a", tensors_of(), config=CONFIG)
    with pytest.raises(CheckpointError, match=r"is quantized already.*--from mxfp4 --to FORMAT makes it"):
        plan_conversion(source, Options())
    report: ConvertReport = plan_conversion(source, Translation("mxfp4", "modelopt"))
    assert report.bytes_after > report.bytes_before  # a byte of scale for 16 elements in place of 32


def test_nothing_becomes_a_format_that_is_only_read() -> None:
    for name in SOURCES:
        with pytest.raises(ValueError, match=rf"^target: got '{name}', must be 'modelopt'"):
            Translation("modelopt", name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"^format: got '{name}', must be 'modelopt'"):
            Options(format=name)  # type: ignore[arg-type]
