"""What holds for every checkpoint format, and the failures of a format that is added half.

Every test that takes ``format`` runs for each entry of FORMATS and for a format that is made here, so that
one which is added is covered by its entry alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import fp4gemm
import pytest
import torch
from checkpoints import llama, load, moe, save
from fp4gemm.checkpoint import Options, Translation, convert
from fp4gemm.checkpoint import formats as package
from fp4gemm.checkpoint.formats import (
    FORMATS,
    LAYERS,
    PACKED,
    SOURCES,
    Format,
    FormatName,
    Group,
    PackedFormat,
    PackedName,
    Scheme,
    SourceFormat,
    SourceName,
    StoredWeight,
    configs_beside,
    is_ignored,
    quantization_config,
    read_quantization_config,
    read_scheme,
)
from fp4gemm.recipe import INPUTS, STORED_ACTIVATIONS
from helpers import assert_bits

NEW = cast(FormatName, "new")


def read_new(config: Any, where: str) -> Scheme:
    said = config["scheme"]
    return Scheme(**{**said, "ignore": tuple(said["ignore"]), "targets": ("Linear",), "groups": ()})


def write_new(scheme: Scheme) -> dict[str, Any]:
    if scheme.targets != ("Linear",):
        raise ValueError(f"targets: got {scheme.targets}, must be ('Linear',) for the new format")
    fields = {
        **vars(scheme),
        "ignore": list(scheme.ignore),
        "producer": None,
        "targets": None,
        "groups": None,
    }
    return {"scheme": fields}


# A format of another library, whole: its outer scales have the direction of ModelOpt's.
WHOLE = Format(
    name=NEW,
    aliases=("old-new",),
    codes="w",
    block_scales="w_blocks",
    outer_scale="w_outer",
    input_scale="x_outer",
    kv_scales=("k", "v"),
    direction="decodes",
    outer_shape=(1,),
    has_row_scales=False,
    has_unit_scales=True,
    read=read_new,
    write=write_new,
    beside=("new.json", write_new),
    ignores=FORMATS["modelopt"].ignores,
    below=FORMATS["modelopt"].below,
    has_mixes=False,
)


@pytest.fixture(params=[*FORMATS, NEW])
def format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Format:
    """Each format in turn. The new one is among FORMATS in all tests."""
    monkeypatch.setitem(FORMATS, NEW, WHOLE)
    return FORMATS[request.param]


def plain(scheme: Scheme) -> Scheme:
    return dataclasses.replace(scheme, producer=None)


def schemes(name: FormatName) -> Iterator[Scheme]:
    """Schemes with every value of each field; a format that has no rows has none with them."""
    scalings = ("tensor", "row") if FORMATS[name].has_row_scales else ("tensor",)
    stored = (*STORED_ACTIVATIONS, *(activations for activations in INPUTS if "," in activations))
    for activations, bound, scaling in itertools.product(stored, (448, 256), scalings):
        yield Scheme(name, activations, (), None, bound, scaling)  # type: ignore[arg-type]
    for kv_cache, targets in itertools.product((None, "fp8", "nvfp4"), (("Linear",), ("re:a.*", "b"))):
        yield Scheme(name, "a16", ("lm_head", "a.b"), kv_cache, targets=targets)  # type: ignore[arg-type]


def mixes(format: Format) -> Iterator[Scheme]:
    """Schemes with one layer in each format of LAYERS, and with W4A16 beside W4A4."""
    for stored in ("a16", *LAYERS):
        groups = (Group(("a.x", "a.y"), stored),)
        yield Scheme(format.name, "static", ("b",), targets=("a.z",), groups=groups)


def check_configs(format: Format) -> None:
    """What is written has the name of the format and is read again; nothing is lost without an error."""
    refused = []
    if not format.has_mixes:
        with pytest.raises(ValueError, match=r"^groups: got a16, must be none for the "):
            list(mixes(format))
    for scheme in [*schemes(format.name), *(mixes(format) if format.has_mixes else ())]:
        try:
            config = json.loads(json.dumps(quantization_config(scheme)))
        except ValueError as error:
            refused.append(str(error))
            continue
        assert config["quant_method"] == format.name
        assert plain(read_quantization_config(config)) == scheme
    assert all(text.startswith(("kv_cache: got", "targets: got")) for text in refused), refused


def check_patterns(format: Format) -> None:
    """The pattern of the modules below one, in a config, matches these and no others."""
    for experts in ("model.layers.1.mlp.experts", "a+b.experts"):
        scheme = Scheme(format.name, ignore=("lm_head", format.below(experts)))
        read = read_quantization_config(quantization_config(scheme))
        for name, want in (
            ("lm_head", True),
            (f"{experts}.0.up_proj", True),
            (f"{experts}2.0.up_proj", False),
            (f"x.{experts}.0.up_proj", False),
            (experts.rpartition(".")[0], False),
            ("aab.experts.0", False),
        ):
            assert is_ignored(name, read.ignore, format.name) is want, name
            assert read.quantizes(name) is not want, name


def check_tensors(format: Format) -> None:
    """A weight and the scale of its inputs come back from the tensors, with every bit."""
    gen = torch.Generator().manual_seed(0)
    t = fp4gemm.quantize((torch.randn(24, 96, generator=gen) * 0.03).bfloat16(), scaling="tensor")
    tensors = StoredWeight.of(t, format.name).tensors("a.b")
    assert len(tensors) == 3
    tensors |= format.input_tensors("a.b", torch.tensor([3.0]))
    assert set(tensors) == {f"a.b.{suffix}" for suffix in (*format.weight_suffixes, format.input_scale)}
    back = StoredWeight.read(tensors, "a.b", format.name)
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(back.to_nvfp4(), part), getattr(t, part), part)
    assert_bits(format.input_amax(tensors[f"a.b.{format.input_scale}"]), torch.tensor([3.0]), "input")
    for other in FORMATS:
        there = back.as_format(other)
        assert_bits(there.outer, StoredWeight.of(t, other).outer, other)
        assert_bits(there.as_format(format.name).outer, back.outer, "outer")


CHECKS = {"configs": check_configs, "patterns": check_patterns, "tensors": check_tensors}


@pytest.mark.parametrize("check", CHECKS)
def test_every_format(format: Format, check: str) -> None:
    CHECKS[check](format)


MODELS = {
    "experts": (moe(), {"exclude": ["model.layers.1.mlp.experts"]}),
    "per-token": (llama(1), {"activations": "per-token"}),
    "cache": (llama(1), {"kv_scales": {"model.layers.0.self_attn": (0.5, 0.25)}}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_conversion_and_translations_of_every_format(format: Format, case: str, tmp_path: Path) -> None:
    """Checkpoints that are converted, and translated to every other format and back with the same bytes."""
    model, more = MODELS[case]
    options = Options(format=format.name, weight_scaling="tensor", **more)  # type: ignore[arg-type]
    folder = tmp_path / "dst"
    convert(save(tmp_path / "src", model), folder, options, device="cpu", verify=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == format.name
    scheme = read_scheme(config, folder)
    assert scheme is not None
    assert (scheme.format, scheme.activations) == (format.name, options.activations)
    first = load(folder)
    assert {f"model.layers.0.self_attn.q_proj.{suffix}" for suffix in format.weight_suffixes} <= set(first)
    for name in first:
        module, _, suffix = name.rpartition(".")
        if suffix == format.codes and f"{module}.{format.outer_scale}" in first:
            assert scheme.quantizes(module)
        elif suffix == "weight" and "norm" not in name and "embed" not in name:
            assert not scheme.quantizes(module)
    for module, scales in options.kv_scales.items():
        assert [float(first[f"{module}.{suffix}"]) for suffix in format.kv_scales] == list(scales)
    for file in configs_beside(scheme):
        assert plain(format.read(json.loads((folder / file).read_text()), file)) == plain(scheme)
    for other in FORMATS:
        if other != format.name:
            there, back = tmp_path / f"to-{other}", tmp_path / f"from-{other}"
            convert(folder, there, Translation(format.name, other), device="cpu", verify=True)
            made = json.loads((there / "config.json").read_text())["quantization_config"]
            assert made["quant_method"] == other
            convert(there, back, Translation(other, format.name), device="cpu")
            again = load(back)
            assert set(again) == set(first)
            for name in first:
                assert_bits(again[name], first[name], name)


def test_other_spellings_are_read(format: Format) -> None:
    for alias in format.aliases:
        config = {**quantization_config(Scheme(format.name)), "quant_method": alias.upper()}
        assert read_quantization_config(config).format == format.name


# ---- a format that is added half


def test_every_format_is_entered() -> None:
    """Each file with a format is among FORMATS, under its own name, and the type has no other names."""
    assert set(get_args(FormatName)) == set(FORMATS)
    assert all(format.name == name for name, format in FORMATS.items())
    modules = [
        importlib.import_module(f"{package.__name__}.{m.name}")
        for m in pkgutil.iter_modules(package.__path__)
    ]
    found = {each.name for module in modules for each in vars(module).values() if isinstance(each, Format)}
    assert found == set(FORMATS)
    assert set(get_args(SourceName)) == set(SOURCES)
    assert all(source.name == name for name, source in SOURCES.items())
    only_read = [
        each for module in modules for each in vars(module).values() if isinstance(each, SourceFormat)
    ]
    assert {each.name for each in only_read} == set(SOURCES)
    assert not set(SOURCES) & set(FORMATS)
    assert set(get_args(PackedName)) == set(PACKED)
    assert all(packed.name == name for name, packed in PACKED.items())
    written = [each for module in modules for each in vars(module).values() if isinstance(each, PackedFormat)]
    assert {each.name for each in written} == set(PACKED)
    assert not set(PACKED) & set(FORMATS)


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(Format)])
def test_no_part_has_a_default(part: str) -> None:
    parts = {field.name: getattr(WHOLE, field.name) for field in dataclasses.fields(Format)}
    del parts[part]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        Format(**parts)


def test_parts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^direction: got 'divides'"):
        dataclasses.replace(WHOLE, direction="divides")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^suffixes: got w, w, w_outer, x_outer, must be unequal"):
        dataclasses.replace(WHOLE, block_scales="w")


def test_a_format_that_is_not_entered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^format: got 'new', must be 'modelopt', "):
        Scheme(NEW)
    with pytest.raises(ValueError, match=r"quant_method is 'new', must be 'modelopt', "):
        read_quantization_config({"quant_method": "new"})


def test_no_function_can_write_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fp4gemm", None):
        write = lambda scheme, name=name: {"quant_method": name, **write_new(scheme)}  # noqa: E731
        monkeypatch.setitem(FORMATS, NEW, dataclasses.replace(WHOLE, write=write))
        assert quantization_config(Scheme(NEW))["quant_method"] == "new"


def lost_cache(scheme: Scheme) -> dict[str, Any]:
    return write_new(dataclasses.replace(scheme, kv_cache=None))


HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "write of another": ("configs", {"write": FORMATS["fp4gemm"].write}),
    "read of another": ("configs", {"read": FORMATS["fp4gemm"].read}),
    "a field that is not written": ("configs", {"write": lost_cache}),
    "a field that is not read": (
        "configs",
        {"read": lambda c, w: dataclasses.replace(read_new(c, w), ignore=())},
    ),
    "patterns of another language": ("patterns", {"ignores": FORMATS["compressed-tensors"].ignores}),
    "pattern of another language": ("patterns", {"below": FORMATS["compressed-tensors"].below}),
}


@pytest.mark.parametrize("case", HALVES)
def test_a_format_with_a_part_of_another_fails(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above find it."""
    check, parts = HALVES[case]
    monkeypatch.setitem(FORMATS, NEW, dataclasses.replace(WHOLE, **parts))
    with pytest.raises((AssertionError, KeyError, ValueError)):
        CHECKS[check](FORMATS[NEW])
