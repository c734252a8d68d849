"""Configs of checkpoints: every spelling that is read, what is written, what is refused, what is ignored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from fp4gemm.checkpoint.formats import (
    Group,
    Producer,
    Scheme,
    hf_quant_config,
    is_ignored,
    quantization_config,
    read_quantization_config,
    read_scheme,
)

FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
TENSOR_GROUP = {**FP4, "strategy": "tensor_group", "symmetric": True}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": TENSOR_GROUP, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.20.0",
}
MO: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4, "input_activations": FP4}},
    "ignore": ["lm_head", "*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
HF = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one entry set, named by the keys on the way to it."""
    made = copy.deepcopy(config)
    *owners, last = path.split("/")
    entry = made
    for key in owners:
        entry = entry[key]
    entry[last] = value
    return made


MIX = (Group(("a.e",), "a16"), Group(("a.d", "a.f"), "fp8-channel"), Group(("a.g",), "fp8-tensor"))
SCHEMES = [
    Scheme("modelopt", "a16", ("lm_head",)),
    Scheme("modelopt", "static", ("lm_head", "*.gate"), "fp8"),
    Scheme("modelopt", "per-token", (), "nvfp4", 256),
    Scheme("compressed-tensors", "a16", ("lm_head",), None, 256),
    Scheme("compressed-tensors", "static", ("re:.*gate$",), "fp8", targets=("Linear", "re:.*experts.*")),
    Scheme("compressed-tensors", "per-token"),
    Scheme("modelopt", "per-token", ("lm_head",), "fp8", 256, targets=("a.b",), groups=MIX),
    Scheme("modelopt", "a16", targets=("a.b", "a.c")),
    Scheme("compressed-tensors", "static", ("lm_head",), targets=("Linear",), groups=MIX),
    Scheme("fp4gemm", "a16", ("lm_head",), None, 256, "row"),
    Scheme("fp4gemm", "static", ("lm_head",), "fp8"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.format}-{s.activations}-{s.e4m3_max}")
def test_what_is_written_is_read(scheme: Scheme, tmp_path: Path) -> None:
    config = json.loads(json.dumps({"quantization_config": quantization_config(scheme)}))
    assert config["quantization_config"]["quant_method"] == scheme.format
    if scheme.format == "modelopt":
        written = hf_quant_config(scheme)
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
        assert written["quantization"].keys() >= {"group_size", "kv_cache_quant_algo", "exclude_modules"}
    for folder in (None, tmp_path):
        read = read_scheme(config, folder)
        assert read is not None
        assert read.producer is not None
        assert read.producer.name == "fp4gemm"
        assert Scheme(**{**vars(read), "producer": None}) == scheme
    if scheme.format == "modelopt":  # the older form, without an entry in config.json
        read = read_scheme({}, tmp_path)
        assert read is not None
        assert Scheme(**{**vars(read), "producer": None}) == scheme


def test_of_no_quantization() -> None:
    assert read_scheme({"model_type": "llama"}) is None


def test_modelopt_spellings() -> None:
    producer = Producer("modelopt", "0.47.0")
    want = Scheme("modelopt", "static", ("lm_head", "*.mlp.gate"), producer=producer)
    assert read_quantization_config(MO) == want
    assert read_scheme({"text_config": {"quantization_config": MO}}) == want
    nested = {**HF, "quant_method": "modelopt_fp4"}
    older = Producer("modelopt", "0.29.0")
    assert read_quantization_config(nested) == Scheme(
        "modelopt", "static", ("lm_head",), "fp8", producer=older
    )
    mixed = {
        **MO,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "a.b": {"quant_algo": "w4a16_nvfp4", "group_size": 16},
            "a.c": {"quant_algo": "W4A16_NVFP4"},
        },
    }
    read = read_quantization_config(mixed)
    assert (read.activations, read.targets) == ("a16", ("a.b", "a.c"))
    assert read.quantizes("a.b")
    assert not read.quantizes("a.d")


def test_compressed_tensors_spellings() -> None:
    assert read_quantization_config(CT) == Scheme("compressed-tensors", "a16", ("lm_head",))
    path = "config_groups/group_0/input_activations"
    for dynamic, want in (("local", "static"), (False, "static"), (True, "per-token")):
        config = changed(CT, path, {**TENSOR_GROUP, "dynamic": dynamic})
        assert read_quantization_config(config).activations == want
    config = changed(CT, "kv_cache_scheme", {"num_bits": 8, "type": "float"})
    assert read_quantization_config(config).kv_cache == "fp8"
    group = CT["config_groups"]["group_0"]
    two = {"group_0": group, "group_1": {**group, "targets": ["re:.*experts.*"], "format": CT["format"]}}
    config = changed(changed(CT, "config_groups", two), "format", "mixed-precision")
    config["config_groups"]["group_0"]["format"] = CT["format"]
    assert read_quantization_config(config).targets == ("Linear", "re:.*experts.*")


def mixed_modelopt(**layers: str) -> dict[str, Any]:
    """A mix of ModelOpt with these algorithms; config_groups is what ModelOpt derives, and is absent here."""
    named = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    made = {**MO, "quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    del made["config_groups"]
    return copy.deepcopy(made)


FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def ct_mix(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """W4A4 of all linear layers but down_proj, whose weights have these arguments."""
    group = {"format": "float-quantized", "targets": ["re:.*down_proj$"], "weights": weights, **more}
    first = {"format": CT["format"], "targets": ["Linear"], "weights": TENSOR_GROUP}
    first["input_activations"] = {**TENSOR_GROUP, "dynamic": "local"}
    return {**CT, "format": "mixed-precision", "config_groups": {"group_0": first, "group_1": group}}


def test_a_mix_of_modelopt() -> None:
    """As ModelOpt writes it for Nemotron 3; a16 beside W4A4 is a group of its own."""
    config = mixed_modelopt(
        **{"m.0.mixer.in_proj": "FP8", "m.1.mixer.experts.0.up_proj": "NVFP4", "m.2.a": "W4A16_NVFP4"}
    )
    config["quantized_layers"] |= {"m.3.experts": {"quant_algo": "nvfp4"}, "m.4": {"quant_algo": "fp8_pb_wo"}}
    scheme = read_quantization_config(config)
    assert scheme.activations == "static"
    assert scheme.targets == ("m.1.mixer.experts.0.up_proj", "m.3.experts")
    assert scheme.groups == (
        Group(("m.0.mixer.in_proj",), "fp8-tensor"),
        Group(("m.2.a",), "a16"),
        Group(("m.4",), "fp8-block"),
    )
    find = scheme.lookup()
    assert find("m.0.mixer.in_proj") == "fp8-tensor"
    assert find("m.1.mixer.experts.0.up_proj") == "static"
    assert find("m.2.a") == "a16"
    assert find("m.3.experts.7.down_proj") == "static"
    assert find("m.4.x") == "fp8-block"
    assert find("m.0.mixer.out_proj") is None
    assert find("lm_head") is None
    assert scheme.quantizes("m.2.a")
    assert not scheme.quantizes("m.0.mixer.in_proj")


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ({**FP8, "strategy": "tensor"}, "fp8-tensor"),
        ({**FP8, "strategy": "channel"}, "fp8-channel"),
        ({**FP8, "strategy": "block", "block_structure": [128, 128]}, "fp8-block"),
        ({**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, "mxfp8"),
    ],
)
def test_a_mix_of_compressed_tensors(weights: dict[str, Any], kind: str) -> None:
    config = ct_mix(weights)
    if kind == "mxfp8":
        config["config_groups"]["group_1"]["format"] = "mxfp8-quantized"
    scheme = read_quantization_config(config)
    find = scheme.lookup()
    assert (scheme.activations, scheme.targets) == ("static", ("Linear",))
    assert find("model.layers.0.mlp.down_proj") == kind
    assert find("model.layers.0.mlp.up_proj") == "static"
    assert find("lm_head") is None
    assert find("model.layers.0.mlp.act", "SiLU") is None


WEIGHTS = "config_groups/group_0/weights"
INPUTS = "config_groups/group_0/input_activations"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mxfp4": ({"quant_method": "mxfp4"}, r"quant_method is 'mxfp4', must be 'modelopt', 'compressed"),
    "fp8": ({"quant_method": "fp8"}, r"quant_method is 'fp8'"),
    "none": ({}, r"quant_method is None"),
    "modelopt_fp8": (changed(MO, "quant_algo", "FP8"), r"quant_algo is 'FP8', must be NVFP4, W4A16_NVFP4"),
    "modelopt_awq": (changed(MO, "quant_algo", "NVFP4_AWQ"), r"quant_algo is 'NVFP4_AWQ'"),
    "modelopt_int4": (changed(MO, f"{WEIGHTS}/type", "int"), r"weights of group_0: type is 'int'"),
    "modelopt_group": (changed(MO, f"{WEIGHTS}/group_size", 32), r"group_size is 32, must be 16"),
    "modelopt_mix": (
        mixed_modelopt(a="INT4_AWQ", b="NVFP4"),
        r"quant_algo of a is 'INT4_AWQ', must be NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN, ",
    ),
    "modelopt_mix_without_nvfp4": (
        mixed_modelopt(a="FP8", b="FP8_PB_WO"),
        r"its layers are FP8 per tensor or FP8 in blocks of 128 x 128, must have some in NVFP4",
    ),
    "modelopt_mix_group": (
        {
            **mixed_modelopt(a="FP8", b="NVFP4"),
            "config_groups": {"group_0": {"targets": ["a"], "weights": FP4}},
        },
        r"weights of group_0: num_bits is 4, must be 8 for FP8",
    ),
    "modelopt_mix_groups": (
        {
            **mixed_modelopt(a="FP8", b="NVFP4"),
            "config_groups": {"group_0": {"targets": ["a", "b"], "weights": FP4}},
        },
        r"group_0 of config_groups has targets in NVFP4 and in FP8 by quantized_layers",
    ),
    "modelopt_mix_size": (
        changed(mixed_modelopt(a="FP8", b="NVFP4"), "quantized_layers/b/group_size", 32),
        r"b: group_size is 32, must be 16",
    ),
    "modelopt_empty_mix": (changed(MO, "quant_algo", "MIXED_PRECISION"), r"quantized_layers is empty"),
    "modelopt_cache": ({**MO, "kv_cache_scheme": "INT8"}, r"the KV cache is 'INT8' \(str\), must be null"),
    "modelopt_ignore": (changed(MO, "ignore", "lm_head"), r"the ignored modules is 'lm_head'"),
    "ct_int4": (changed(CT, "format", "pack-quantized"), r"format of group_0 is 'pack-quantized', must be"),
    "ct_mxfp4": (changed(CT, "format", "mxfp4-pack-quantized"), r"'mxfp4-pack-quantized'"),
    "ct_actorder": (changed(CT, f"{WEIGHTS}/actorder", "static"), r"actorder is 'static', must be None"),
    "ct_asymmetric": (changed(CT, f"{WEIGHTS}/symmetric", False), r"symmetric is False, must be True"),
    "ct_strategy": (changed(CT, f"{WEIGHTS}/strategy", "group"), r"strategy is 'group'"),
    "ct_scales": (changed(CT, f"{WEIGHTS}/scale_dtype", "torch.uint8"), r"scale_dtype is 'torch.uint8'"),
    "ct_w4a8": (
        changed(CT, INPUTS, {**TENSOR_GROUP, "num_bits": 8}),
        r"input_activations of group_0: num_bits is 8, must be 4 for NVFP4",
    ),
    "ct_rotation": (changed(CT, "transform_config", {"u": {}}), r"transform_config is .*, must be empty"),
    "ct_sparse": (
        changed(CT, "sparsity_config", {"format": "sparse-24-bitmask"}),
        r"sparsity_config is .*, must be empty",
    ),
    "ct_status": (changed(CT, "quantization_status", "frozen"), r"quantization_status is 'frozen'"),
    "ct_mix_int8": (ct_mix({"num_bits": 8, "type": "int"}), r"weights of group_1: type is 'int', must be"),
    "ct_mix_block": (
        ct_mix({**FP8, "strategy": "block", "block_structure": [64, 64]}),
        r"weights of group_1 have the strategy 'block', block_structure \[64, 64\], must be FP8 per tensor, ",
    ),
    "ct_mix_group": (ct_mix({**FP8, "strategy": "group"}), r"weights of group_1 have the strategy 'group'"),
    "ct_mix_zeros": (ct_mix({**FP8, "symmetric": False}), r"weights of group_1: symmetric is False"),
    "ct_mix_activations": (
        ct_mix(
            TENSOR_GROUP, format="nvfp4-pack-quantized", input_activations={**TENSOR_GROUP, "dynamic": True}
        ),
        r"layers have \['static', 'per-token'\] activations, must have one kind beside 'a16'",
    ),
    "ct_groups": (changed(CT, "config_groups", {}), r"config_groups is empty or missing"),
    "fp4gemm_version": ({"quant_method": "fp4gemm", "format_version": 2}, r"format_version is 2, must be 1"),
    "fp4gemm_scaling": (
        {**quantization_config(Scheme("fp4gemm")), "scaling": "block"},
        r"scaling: got 'block'",
    ),
    "producer": (
        {**MO, "producer": {"name": "fp4gemm", "activations": "a16"}},
        r"activations of producer is 'a16', must agree with 'static'",
    ),
    "producer_fp8": (
        {**MO, "producer": {"name": "fp4gemm", "activation_scaling": "fp8"}},
        r"activation_scaling of producer is 'fp8', must be absent with activations 'static'",
    ),
    "producer_unknown": (
        {**CT, "producer": {"name": "fp4gemm", "activation_scaling": "int8"}},
        r"activation_scaling of producer: got 'int8', must be 'per-token', 'per-tensor' or 'fp8'",
    ),
    "producer_own": (
        {
            **quantization_config(Scheme("fp4gemm", "per-token")),
            "producer": {"name": "fp4gemm", "activation_scaling": "fp8"},
        },
        r"activation_scaling of producer is 'fp8', must be absent with activations 'per-token'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_ours_is_named(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(
        ValueError, match=rf"^quantization_config: .*{message}|^quantization_config: {message}"
    ):
        read_scheme({"quantization_config": config})


def test_two_files_that_disagree(tmp_path: Path) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(changed(HF, "quantization/quant_algo", "W4A16_NVFP4")))
    with pytest.raises(ValueError, match=r"^hf_quant_config\.json: .* a16 activations, must be static"):
        read_scheme({"quantization_config": MO}, tmp_path)
    both = (mixed_modelopt(a=algorithm, b="NVFP4") for algorithm in ("FP8", "FP8_PB_WO"))
    config, other = both
    path.write_text(json.dumps({"quantization": other}))
    with pytest.raises(ValueError, match=r"^hf_quant_config\.json: a is fp8-block, must be fp8-tensor as in"):
        read_scheme({"quantization_config": config}, tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: is no JSON"):
        read_scheme({}, tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: holds \[\]"):
        read_scheme({}, tmp_path)


def test_schemes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^producer: got 'modelopt', must be None or fp4gemm where .* fp8"):
        quantization_config(Scheme("modelopt", "fp8", producer=Producer("modelopt")))
    with pytest.raises(ValueError, match=r"^scaling: got 'row', must be 'tensor' for the modelopt format$"):
        Scheme("modelopt", scaling="row")
    with pytest.raises(ValueError, match=r"^activations: got 'fp6'"):
        Scheme("modelopt", "fp6")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^ignore: got \['lm_head'\]"):
        Scheme("modelopt", ignore=["lm_head"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kv_cache: got 'nvfp4', must be None or 'fp8' for compressed"):
        quantization_config(Scheme("compressed-tensors", kv_cache="nvfp4"))
    with pytest.raises(ValueError, match=r"^producer: got 'modelopt', must be None or fp4gemm where"):
        quantization_config(Scheme("modelopt", e4m3_max=256, producer=Producer("modelopt")))
    for targets in (("re:.*up_proj",), ("Linear", "a")):
        with pytest.raises(ValueError, match=r"^targets: got '.*', must be names of modules in a mix"):
            quantization_config(Scheme("modelopt", targets=targets))
    with pytest.raises(ValueError, match=r"^targets: got 'Linear', must be names of modules in a mix"):
        quantization_config(Scheme("modelopt", groups=(Group(("a",), "fp8-channel"),)))
    with pytest.raises(ValueError, match=r"^groups: got fp8-channel, must be none for the fp4gemm format"):
        Scheme("fp4gemm", groups=(Group(("a",), "fp8-channel"),))
    for given in ("fp8", "per-token,four_over_six=mae"):
        with pytest.raises(ValueError, match=r"^groups: got 'a16' beside activations '.*', must be beside "):
            Scheme("modelopt", given, targets=("b",), groups=(Group(("a",), "a16"),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^groups: got 'fp8', must be 'a16', 'fp8-tensor', "):
        Scheme("modelopt", groups=(Group(("a",), "fp8"),))
    with pytest.raises(ValueError, match=r"^format: got 'fp4gemm', must be 'modelopt' for hf_quant"):
        hf_quant_config(Scheme("fp4gemm"))


@pytest.mark.parametrize(
    ("name", "pattern", "modelopt", "compressed_tensors"),
    [
        ("lm_head", "lm_head", True, True),
        ("model.lm_head", "lm_head", False, False),
        ("model.layers.0.mlp.gate", "*.mlp.gate", True, False),
        ("model.layers.0.mlp.gate", "model.layers.0*", True, False),
        ("model.layers.1.mlp.gate", "model.layers.0*", False, False),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp", True, False),
        ("model.layers.0.mlp.gate_proj", "*.mlp.gate", False, False),
        ("model.layers.0.mlp.gate", "re:.*mlp.gate$", False, True),
        ("model.layers.0.mlp.gate", "re:mlp.gate$", False, False),
        ("model.layers.0.mlp.gate", "Linear", False, True),
        ("a.B", "a.b", False, False),
    ],
)
def test_ignored(name: str, pattern: str, modelopt: bool, compressed_tensors: bool) -> None:
    assert is_ignored(name, [pattern], "modelopt") is modelopt
    assert is_ignored(name, [pattern], "fp4gemm") is modelopt
    assert is_ignored(name, ["other", pattern], "compressed-tensors") is compressed_tensors


def test_bad_patterns() -> None:
    with pytest.raises(ValueError, match=r"^ignore: 're:\(' is no regular expression"):
        is_ignored("a", ["re:("], "compressed-tensors")
    with pytest.raises(ValueError, match=r"^format: got 'gguf'"):
        is_ignored("a", [], "gguf")  # type: ignore[arg-type]
