"""fp4gemm.checkpoint.convert: the bits of every tensor, the files around them, and quantize_named."""

from __future__ import annotations

import json
from pathlib import Path

import fp4gemm
import pytest
import torch
from checkpoints import LLAMA, MOE, contents, llama, load, moe, save
from fp4gemm.checkpoint import (
    CheckpointError,
    ConvertReport,
    Options,
    Plan,
    Translation,
    convert,
    plan_conversion,
    quantize_named,
)
from fp4gemm.checkpoint.formats import is_ignored, read_scheme
from torch import Tensor

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
STATE = "fp4gemm_convert.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "src", llama(), shards=3)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert torch.equal(bits(a[name]), bits(b[name])), name


def want(sets: list[list[str]], tensors: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """ModelOpt's tensors of fused sets, from fp4gemm.quantize with the largest amax of each set."""
    found: dict[str, Tensor] = {}
    for modules in sets:
        weights = {module: tensors[f"{module}.weight"] for module in modules}
        amax = torch.stack([w.float().abs().max() for w in weights.values()]).max().view(1)
        for module, weight in weights.items():
            t = fp4gemm.quantize(weight, scaling="tensor", amax=amax, **options)
            found |= {f"{module}.{suffix}": part for suffix, part in t.to_modelopt().items()}
    return found


def llama_sets(layers: int) -> list[list[str]]:
    sets = []
    for layer in range(layers):
        for names in (QKV, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]):
            sets.append([f"model.layers.{layer}.{name}" for name in names])
    return sets


def test_every_tensor_and_file(source: Path, tmp_path: Path) -> None:
    """The defaults: ModelOpt's format, four over six, fused sets that span shards."""
    report = convert(source, tmp_path / "dst", measured=True)
    old, new = load(source), load(tmp_path / "dst")
    kept = {name: tensor for name, tensor in old.items() if f"{name}_scale" not in new}
    assert len(kept) == 5
    assert_same(new, want(llama_sets(2), old, four_over_six="mse") | kept)

    files, before = contents(tmp_path / "dst"), contents(source)
    for name in ("tokenizer.json", "generation_config.json", "modeling_own.py"):
        assert files[name] == before[name]
    assert set(files) == {*before, "hf_quant_config.json", STATE}
    index = json.loads(files["model.safetensors.index.json"])
    assert (
        index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in new.values()) == report.bytes_after
    )
    assert set(index["weight_map"]) == set(new)
    config = json.loads(files["config.json"])
    assert {key: config[key] for key in LLAMA} == LLAMA
    scheme = read_scheme(config, tmp_path / "dst")
    assert scheme is not None
    assert (scheme.format, scheme.activations, scheme.ignore) == ("modelopt", "a16", ("lm_head",))
    assert scheme.quantizes("model.layers.0.mlp.up_proj")

    assert report.bytes_before == sum(tensor.nbytes for tensor in old.values())
    assert len(report.layers) == 14
    for layer in report.layers:
        weight = old[f"{layer.module}.weight"].double()
        parts = [new[f"{layer.module}.{end}"] for end in ("weight", "weight_scale", "weight_scale_2")]
        values = fp4gemm.NVFP4Tensor.from_modelopt(*parts).dequantize(torch.float32).double()
        assert layer.relative_error == pytest.approx(
            float((values - weight).norm() / weight.norm()), rel=1e-6
        )
        cosine = float((values * weight).sum() / (values.norm() * weight.norm()))
        assert layer.cosine == pytest.approx(cosine, rel=1e-6)
        assert layer.worst_element <= 1
    ratio = {layer.module: layer.amax_ratio for layer in report.layers}
    q, k, v = (float(old[f"model.layers.0.{name}.weight"].abs().max()) for name in QKV)
    assert ratio["model.layers.0.self_attn.k_proj"] == pytest.approx(max(q, k, v) / k)


def test_tensors_are_aligned_in_the_file(source: Path, tmp_path: Path) -> None:
    """Codes and block scales of a mapped file can be read in place."""
    convert(source, tmp_path / "dst")
    from fp4gemm.checkpoint.source import Source

    for info in Source(tmp_path / "dst").tensors.values():
        assert info.begin % (16 if info.dtype in ("U8", "F8_E4M3") else 2) == 0, info


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
@pytest.mark.parametrize("numerics", ["te", "modelopt", "llmcompressor"])
def test_formats_and_numerics(source: Path, tmp_path: Path, format: str, numerics: str) -> None:
    """Every numerics in every format is verified, and equals quantize_named of the same options."""
    options = Options(format=format, numerics=numerics)  # type: ignore[arg-type]
    report = convert(source, tmp_path / "dst", options, verify=True)
    assert report.is_verified
    plan = Plan.of_shapes({n: (t.shape, t.dtype) for n, t in load(source).items()}, LLAMA, options)
    assert_same(dict(quantize_named(load(source).items(), plan)), load(tmp_path / "dst"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(method="round"), "448"),
        (Options(four_over_six="mse"), "e4m3_max"),
        (Options(format="fp4gemm", weight_scaling="row"), "row"),
        (Options(activations="per-token"), "input_scale"),
    ],
    ids=["round", "four-over-six", "row", "per-token"],
)
def test_other_ways_to_quantize(source: Path, tmp_path: Path, options: Options, expected: str) -> None:
    convert(source, tmp_path / "dst", options, verify=True)
    new, old = load(tmp_path / "dst"), load(source)
    scheme = read_scheme(json.loads((tmp_path / "dst" / "config.json").read_text()))
    assert scheme is not None
    name = "model.layers.0.mlp.down_proj"
    if expected == "row":
        assert scheme.scaling == "row"
        assert torch.equal(new[f"{name}.weight_amax"], old[f"{name}.weight"].float().abs().amax(1))
    elif expected == "input_scale":
        assert scheme.activations == "per-token"
        assert new[f"{name}.input_scale"] == 1
    else:
        assert scheme.e4m3_max == (448 if expected == "448" else 256)
        made = want([[name]], old, four_over_six=None if expected == "448" else "mse")
        assert all(torch.equal(bits(new[key]), bits(value)) for key, value in made.items())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        Options(method="round"),
        Options(numerics="modelopt"),
        Options(numerics="llmcompressor"),
        Options(four_over_six="mse"),
    ],
    ids=["te", "modelopt", "llmcompressor", "four-over-six"],
)
def test_a_gpu_gives_the_bytes_of_the_cpu(cuda: torch.device, tmp_path: Path, options: Options) -> None:
    """With several sets at a time on streams of their own, float32 and bfloat16."""
    for dtype in (torch.bfloat16, torch.float32):
        source = save(tmp_path / f"{dtype}", llama(dtype=dtype), shards=2)
        convert(source, tmp_path / f"{dtype}_cpu", options, device="cpu")
        convert(source, tmp_path / f"{dtype}_cuda", options, device="cuda", jobs=3, verify=True)
        assert contents(tmp_path / f"{dtype}_cpu") == contents(tmp_path / f"{dtype}_cuda")
        tensors = {name: tensor.to(cuda) for name, tensor in load(source).items()}
        plan = Plan.of_shapes({name: (t.shape, t.dtype) for name, t in tensors.items()}, LLAMA, options)
        streamed = dict(quantize_named(tensors.items(), plan))
        assert all(tensor.device == cuda for tensor in streamed.values())
        assert_same({n: t.cpu() for n, t in streamed.items()}, load(tmp_path / f"{dtype}_cpu"))


def test_static_activations_and_kv_scales(tmp_path: Path) -> None:
    source = save(tmp_path / "src", llama(1))
    modules = [module for names in llama_sets(1) for module in names]
    options = Options(
        activations="static",
        activation_amax={module: 2688.0 * (i + 1) for i, module in enumerate(modules)},
        kv_scales={"model.layers.0.self_attn": (0.5, 0.25)},
    )
    convert(source, tmp_path / "dst", options, verify=True)
    new = load(tmp_path / "dst")
    assert [float(new[f"{module}.input_scale"]) for module in modules] == [float(i + 1) for i in range(7)]
    assert float(new["model.layers.0.self_attn.k_proj.k_scale"]) == 0.5
    assert float(new["model.layers.0.self_attn.v_proj.v_scale"]) == 0.25
    scheme = read_scheme(json.loads((tmp_path / "dst" / "config.json").read_text()))
    assert scheme is not None
    assert scheme.kv_cache == "fp8"
    without = {module: 1.0 for module in modules if "up_proj" not in module}
    with pytest.raises(CheckpointError, match=r"activations: model.layers.0.mlp.up_proj has no amax"):
        plan_conversion(source, Options(activations="static", activation_amax=without))


# ---- experts


@pytest.mark.parametrize("transposed", [False, True], ids=["n-k", "k-n"])
def test_stacked_experts_are_split(tmp_path: Path, transposed: bool) -> None:
    """Experts that are one tensor become what experts one by one become, gate and up with one amax."""
    convert(save(tmp_path / "one", moe(), config=MOE), tmp_path / "one_q")
    stacked = moe(stacked=True, transposed=transposed)
    convert(save(tmp_path / "stack", stacked, config=MOE), tmp_path / "stack_q", verify=True)
    assert_same(load(tmp_path / "one_q"), load(tmp_path / "stack_q"))
    new = load(tmp_path / "one_q")
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(new[f"{name}.gate_proj.weight_scale_2"], new[f"{name}.up_proj.weight_scale_2"])


@pytest.mark.parametrize("transposed", [False, True], ids=["n-k", "k-n"])
def test_stacked_experts_are_kept(tmp_path: Path, transposed: bool) -> None:
    """As one tensor of codes (g, n, k/2), with an outer scale for each expert."""
    source = save(tmp_path / "src", moe(stacked=True, transposed=transposed), config=MOE)
    convert(source, tmp_path / "dst", Options(split_experts=False), verify=True)
    new, old = load(tmp_path / "dst"), moe(stacked=True)
    for child in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{child}"
        parts = [new[f"{name}.{end}"] for end in ("weight", "weight_scale", "weight_scale_2")]
        made = fp4gemm.NVFP4Tensor.from_modelopt(*parts, e4m3_max=256)
        wanted = fp4gemm.quantize(old[name], scaling="tensor", four_over_six="mse")
        assert torch.equal(made.codes, wanted.codes)
        assert torch.equal(made.dequantize(), wanted.dequantize())


def test_experts_only(tmp_path: Path) -> None:
    """Attention, dense MLPs and routers stay; routed and shared experts are quantized."""
    source = save(tmp_path / "src", moe(), config=MOE)
    convert(source, tmp_path / "dst", Options(experts_only=True))
    quantized = {name for name in load(tmp_path / "dst") if name.endswith("weight_scale")}
    assert len(quantized) == 15
    assert all("experts." in name for name in quantized)


def test_layers_of_experts_that_stay_are_ignored_as_a_module(tmp_path: Path) -> None:
    source = save(tmp_path / "src", moe(), config=MOE)
    for format in ("modelopt", "compressed-tensors"):
        plan = plan_of(source, Options(format=format, bf16_last=1))  # type: ignore[arg-type]
        name = "model.layers.1.mlp.experts.3.up_proj"
        assert is_ignored(name, plan.ignored(), format)  # type: ignore[arg-type]
        assert len(plan.ignored()) < 8
        assert not is_ignored("model.layers.0.mlp.up_proj", plan.ignored(), format)  # type: ignore[arg-type]


# ---- formats


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp4gemm"])
def test_fp8_tokens_have_the_tensors_of_a16(source: Path, tmp_path: Path, format: str) -> None:
    """One key of the producer alone tells the two checkpoints apart, so that other loaders read W4A16."""
    made = {}
    for activations in ("a16", "fp8"):
        options = Options(format=format, activations=activations, exclude="down_proj")  # type: ignore[arg-type]
        convert(source, tmp_path / activations, options)
        made[activations] = json.loads((tmp_path / activations / "config.json").read_text())
    assert made["fp8"]["quantization_config"]["producer"].pop("activation_scaling") == "fp8"
    assert made["fp8"] == made["a16"]
    old, new = load(tmp_path / "a16"), load(tmp_path / "fp8")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), new[name].view(-1).view(torch.uint8)), name


def test_a_k_that_fp8_tokens_cannot_have_stays_in_float(tmp_path: Path) -> None:
    """The plan says why."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(96, 64).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 96).bfloat16(),
    }
    folder = save(tmp_path / "src", tensors)
    for activations, is_kept in (("a16", False), ("fp8", True)):
        text = str(plan_conversion(folder, Options(activations=activations)))  # type: ignore[arg-type]
        assert ("k is 96, must be a positive multiple of 64" in text) is is_kept


@pytest.mark.parametrize("target", ["compressed-tensors", "fp4gemm"])
@pytest.mark.parametrize("activations", ["a16", "per-token", "fp8"])
def test_translation_there_and_back(source: Path, tmp_path: Path, target: str, activations: str) -> None:
    """Codes and block scales keep their bytes; the whole checkpoint comes back."""
    first = tmp_path / "modelopt"
    scales = {"model.layers.0.self_attn": (0.5, 0.25)}
    convert(source, first, Options(activations=activations, kv_scales=scales))  # type: ignore[arg-type]
    convert(first, tmp_path / "there", Translation("modelopt", target), verify=True)  # type: ignore[arg-type]
    report = convert(tmp_path / "there", tmp_path / "back", Translation(target, "modelopt"), verify=True)  # type: ignore[arg-type]
    assert report.bytes_before == sum(tensor.nbytes for tensor in load(tmp_path / "there").values())
    assert report.bytes_after == sum(tensor.nbytes for tensor in load(first).values())
    direct = tmp_path / "direct"
    convert(
        source,
        direct,
        Options(format=target, weight_scaling="tensor", activations=activations, kv_scales=scales),
    )  # type: ignore[arg-type]
    for a, b in ((first, tmp_path / "back"), (direct, tmp_path / "there")):
        old, new = contents(a), contents(b)
        del old[STATE], new[STATE]
        assert old == new


# ---- streams


def test_sets_are_emitted_as_soon_as_they_are_complete() -> None:
    tensors = llama(1)
    plan = Plan.of_shapes({name: (t.shape, t.dtype) for name, t in tensors.items()}, LLAMA)
    seen: list[str] = []

    def pairs() -> object:
        for name in reversed(tensors):
            seen.append(name)
            yield name, tensors[name]

    for name, _ in quantize_named(pairs(), plan):  # type: ignore[arg-type]
        if "q_proj.weight" in name:
            assert seen[-1] == "model.layers.0.self_attn.q_proj.weight", "k and v wait for q"
        if "down_proj" in name:
            assert seen[-1] == "model.layers.0.mlp.down_proj.weight"
    assert len(seen) == len(tensors)


def test_a_stream_of_stacked_experts_gives_the_bytes_of_the_file(tmp_path: Path) -> None:
    tensors = moe(stacked=True)
    convert(save(tmp_path / "src", tensors, config=MOE), tmp_path / "dst")
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        owner = model
        *parents, last = name.split(".")
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    model.config = MOE  # type: ignore[assignment]
    plan = Plan.of_model(model)
    assert_same(dict(quantize_named(model.state_dict().items(), plan)), load(tmp_path / "dst"))


def test_bad_streams() -> None:
    tensors = llama(1)
    plan = Plan.of_shapes({name: (t.shape, t.dtype) for name, t in tensors.items()}, LLAMA)
    q, k = (f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj"))

    def run(*pairs: tuple[str, Tensor]) -> None:
        list(quantize_named(pairs, plan))

    with pytest.raises(
        CheckpointError, match=r"q_proj.weight: came without model\S+v_proj.weight, with which"
    ):
        run((q, tensors[q]), (k, tensors[k]))
    with pytest.raises(
        CheckpointError, match=r"other.weight: is not in the plan, must be one of its 11 tensors"
    ):
        run(("other.weight", tensors[q]))
    with pytest.raises(CheckpointError, match=r"q_proj.weight: comes twice"):
        run((q, tensors[q]), (q, tensors[q]))
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight: is torch.float32 of shape \(64, 64\), must be"
    ):
        run((q, tensors[q].float()))
    with pytest.raises(TypeError, match="plan: got None"):
        quantize_named([], None)  # type: ignore[arg-type]


def plan_of(source: Path, options: Options) -> Plan:
    shapes = {name: (t.shape, t.dtype) for name, t in load(source).items()}
    return Plan.of_shapes(shapes, json.loads((source / "config.json").read_text()), options)


def test_the_report_is_a_table(source: Path) -> None:
    report = plan_conversion(source)
    assert isinstance(report, ConvertReport)
    text = str(report)
    assert "model.layers.0-1.mlp.up_proj.weight       2 times  96 x 64   quantized" in text
    assert "shares its amax with gate_proj" in text
    assert text.endswith("19 tensors (5 float, 14 quantized): 164 kB -> 76 kB\nmethod: four-over-six")
    assert json.loads(json.dumps(report.as_json()))["bytes_after"] == report.bytes_after
