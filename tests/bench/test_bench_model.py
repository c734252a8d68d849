"""Whole models: the decoder against transformers, every contender on the CPU, refusals, sizes, tables."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import CPU, cpu_harness, named, result, run
from torch import nn
from torch._dynamo.testing import CompileCounter

from bench.__main__ import main, parser
from bench.commands import model as command
from bench.commands.options import options_used
from bench.models import build as building
from bench.models import emulation
from bench.models.build import MERGED, QUANTIZED, VARIANTS, build, layer_weights, make_step
from bench.models.decoder import CausalLM, DecoderLayer
from bench.models.experts import Experts
from bench.models.shapes import NVFP4_BYTES, SHAPES, Shape
from bench.report import readme, tables

FLOAT32 = torch.float32


# ---- the decoder ------------------------------------------------------------------------------------------


def in_fp32(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in weights.items()}


def of_transformers(shape: Shape) -> Any:
    """A model of transformers with these sizes."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
    }
    if not shape.num_experts:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    sizes |= {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


@pytest.mark.parametrize("is_merged", [False, True], ids=["separate", "merged"])
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_the_decoder_is_that_of_transformers(
    name: str, is_merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    theirs = of_transformers(shape).eval()
    weights = [in_fp32(layer_weights(shape, i, CPU)) for i in range(shape.num_layers)]
    ends = in_fp32(building.end_weights(shape, CPU))
    plain = CausalLM(shape, ends, [DecoderLayer(shape, one) for one in weights])
    # The usual names: the separate model's parameters are those of transformers.
    missing, unexpected = theirs.load_state_dict(
        {n if n.startswith("lm_head") else f"model.{n}": p for n, p in plain.state_dict().items()},
        strict=False,
    )
    assert (missing, unexpected) == ([], [])
    ours = CausalLM(shape, ends, [DecoderLayer(shape, one, is_merged) for one in weights])
    monkeypatch.setattr(building, "DTYPE", FLOAT32)
    step = make_step(shape, shape.num_layers, 2, 12, 12, CPU)
    with torch.no_grad():
        want = theirs(step.input_ids).logits[:, -1]
    torch.testing.assert_close(ours(step.input_ids, step.cache), want, atol=2e-4, rtol=2e-4)


def test_a_decode_step_continues_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "DTYPE", FLOAT32)
    shape = SHAPES["tiny-oss"]
    model = build(shape, 2, (MERGED,), CPU).models[MERGED]
    whole = make_step(shape, 2, 2, 9, 9, CPU)
    want = model(whole.input_ids, whole.cache)
    before, last = make_step(shape, 2, 2, 9, 8, CPU), make_step(shape, 2, 2, 9, 1, CPU)
    for prefill, decode, full in zip(before.cache, last.cache, whole.cache, strict=True):
        prefill.positions = torch.arange(8)
        decode.keys, decode.values = full.keys, full.values
        for part in (full.keys, full.values):
            part[:, :, 8:] = 0
    torch.testing.assert_close(model(whole.input_ids[:, -1:], last.cache), want, atol=1e-4, rtol=1e-4)


def test_variants_share_their_values() -> None:
    made = build(SHAPES["tiny"], 2, VARIANTS, CPU)
    assert set(made.models) == set(VARIANTS)
    assert not made.absent
    merged, plain = made.models[MERGED].layers[1], made.models["bf16"].layers[1]
    qkv = torch.cat([getattr(plain.self_attn, f"{x}_proj").weight for x in "qkv"])
    assert torch.equal(merged.self_attn.qkv_proj.weight, qkv)
    q = plain.self_attn.q_proj.weight
    assert q.data_ptr() == merged.self_attn.qkv_proj.weight.data_ptr()  # not another copy
    again = build(SHAPES["tiny"], 2, VARIANTS, CPU).models["bf16"].layers[1]
    assert torch.equal(again.self_attn.q_proj.weight, q)
    assert not torch.equal(made.models["bf16"].layers[0].self_attn.q_proj.weight, q)
    assert not any(
        isinstance(m, Experts)
        for m in build(SHAPES["tiny-moe"], 1, VARIANTS, CPU).models["fp4gemm W4A16"].modules()
    )
    for name in made.emulated:
        linears = [m for m in made.models[name].layers.modules() if isinstance(m, nn.Linear)]
        assert linears == []
        assert type(made.models[name].lm_head) is nn.Linear


# ---- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-oss"])
def test_every_contender_on_the_cpu(name: str) -> None:
    rows = run("model", "--model", name, "--batch", "3", "--context", "16", "--prompt", "8")
    assert not any("refused" in row for row in rows)
    decode, prefill = (
        [row for row in rows if row["case"] == f"model {name}: {step}"]
        for step in ("decode, context 16, batch 3", "prefill of 8")
    )
    assert [row["contender"] for row in decode] == [row["contender"] for row in prefill] == list(VARIANTS)
    assert len(rows) == 2 * len(VARIANTS)
    for row in rows:
        assert row["tokens_s"] == pytest.approx((3 if row["mode"] == "decode" else 8) / row["us"] * 1e6, 1e-3)
        assert row["cosine"] > 0.9
    found = named(decode)
    assert found["fp4gemm W4A4"]["weight_gb"] < found["fp8 merged"]["weight_gb"] < found["bf16"]["weight_gb"]
    assert found["fp8 merged"]["role"] == "baseline"
    assert found["fp4gemm W4A4"]["max_diff"] > 0
    assert "merged into qkv_proj" in found["fp4gemm W4A16"]["note"]
    assert "input_layernorm: quantizes its result" in found["fp4gemm W4A4"]["note"]
    assert ("fused into one gated MLP" in found["fp4gemm W4A4"]["note"]) == (name == "tiny")
    assert found["fp4gemm W4A4"]["ratio"]["bf16 merged"] > 0
    assert found[MERGED]["cosine"] == pytest.approx(1)
    if name == "tiny":
        shape = SHAPES[name]
        layers = 2 * (2 * shape.layer_elems + 2 * 2 * shape.hidden)
        rest = shape.head_bytes + 2 * shape.hidden + 4 * shape.head_dim // 2
        num_bytes = layers + rest + 2 * shape.cache_bytes(3 * 16)
        assert found["bf16"]["gb_s"] * found["bf16"]["us"] * 1e3 == pytest.approx(num_bytes, rel=0.01)


def test_a_layer_of_a_deep_model_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer adds is small in a deep model; roundings of the sum do not hide it."""
    shape = dataclasses.replace(SHAPES["tiny-moe"], num_layers=80)
    made = build(shape, 1, VARIANTS, CPU)
    steps = command.Steps(cpu_harness(), command.Case(shape, 1, "decode", 1, 256), made)
    inputs = list(steps._layer_inputs())
    assert len(inputs) == command.CHECKED
    monkeypatch.setattr(emulation, "MOST", 0.3)
    assert set(made.emulated) == {"fp8 merged", *QUANTIZED}
    for name in made.emulated:
        layer, plain = made.models[name].layers[0], made.plain
        assert emulation.off_by(layer, plain, made.emulated[name], inputs) is None
        assert "by 1.00 of the error" in str(emulation.off_by(plain, plain, made.emulated[name], inputs))


def test_a_wrong_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        made = build(*args)
        made.models["fp4gemm W4A4"].layers[0].self_attn.o_proj.bias = torch.ones(128)
        made.plain.self_attn.o_proj.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.bfloat16))
        return made

    monkeypatch.setattr(command, "build", broken)
    found = named(run("model", "--model", "tiny", "--batch", "2", "--mode", "decode"))
    assert "differs from its emulation by" in found["fp4gemm W4A4"]["refused"]
    assert "the first layer differs from the unmerged one" in found[MERGED]["refused"]
    assert "us" in found["fp4gemm W4A16"]


def test_wrong_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        made = build(*args)
        made.models["fp4gemm W4A4"].norm.weight = nn.Parameter(
            torch.full((128,), torch.nan, dtype=torch.bfloat16)
        )
        made.models["fp4gemm W4A16"].lm_head.weight = nn.Parameter(
            -made.models["fp4gemm W4A16"].lm_head.weight, requires_grad=False
        )
        return made

    monkeypatch.setattr(command, "build", broken)
    found = named(run("model", "--model", "tiny", "--batch", "2", "--mode", "decode"))
    assert "must be finite and of shape (2, 256)" in found["fp4gemm W4A4"]["refused"]
    assert "the cosine of its logits to those of bf16 merged is -" in found["fp4gemm W4A16"]["refused"]


def compile_by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces inductor, which compiles for half a minute."""
    made = functools.partial(torch.compile, backend=backend)
    for place in (torch, fp4gemm.compiler):
        monkeypatch.setattr(place, "compile", made)


@pytest.mark.parametrize("how", ["layer", "model"])
def test_compiled_models(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    line = ["--model", "tiny", "--batch", "2", "--mode", "decode", "--variants", "fp4gemm W4A4"]
    found = named(run("model", *line, "--compile", how))
    names = [MERGED, "fp4gemm W4A4"]
    assert list(found) == [*names, *(f"{name}, compiled" for name in names)]
    assert all("us" in row for row in found.values())
    assert set(found["fp4gemm W4A4, compiled"]["ratio"]) == {MERGED, f"{MERGED}, compiled"}


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_are_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a model share the graph of the first, without a break."""
    shape = dataclasses.replace(SHAPES["tiny"], num_layers=10)  # more than torch compiles again
    made = build(shape, 10, (name,), CPU)
    counter = CompileCounter()
    compile_by(counter, monkeypatch)
    step = made.step(2, 8, 1)
    got = made.compiled(name, whole=False)(step.input_ids, step.cache)
    assert counter.frame_count == 1
    assert torch.equal(got, made.models[name](step.input_ids, step.cache))


def test_profile() -> None:
    line = ["--model", "tiny", "--batch", "2", "--mode", "decode", "--variants", MERGED]
    (row,) = run("model", *line, "--profile")
    names = {name: count for name, count, _ in row["kernels"]}
    assert names["aten::mm"] >= 2 * 4 + 1
    assert any("x aten::mm" in text for text in tables.remarks([row]))


def gpu(memory: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    harness = cpu_harness()
    harness.is_cuda = True
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory)
    )
    return harness


def test_as_many_layers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = gpu(141 * 2**30, monkeypatch)
    line = ["model", "--model", "llama-3.1-8b,qwen3-30b-a3b,mixtral-8x7b"]
    args = parser().parse_args([*line, "--variants", "bf16,fp4gemm W4A4,fp4gemm W4A16"])
    layers = {case.shape.name: case.num_layers for case in command.cases(args, harness)}
    assert (layers["llama-3.1-8b"], layers["qwen3-30b-a3b"]) == (32, 48)
    most, mixtral = layers["mixtral-8x7b"], SHAPES["mixtral-8x7b"]
    assert 16 < most < 32
    total = command.USABLE * 141 * 2**30 - command.SPARE_BYTES
    assert mixtral.bytes_needed(most, 256 * 1024, True, 2 * NVFP4_BYTES) <= total
    assert mixtral.bytes_needed(most + 1, 256 * 1024, True, 2 * NVFP4_BYTES) > total
    every = {case.shape.name: case.num_layers for case in command.cases(parser().parse_args(line), harness)}
    assert every["llama-3.1-8b"] == 32
    fewer = every["mixtral-8x7b"]
    assert mixtral.bytes_needed(fewer, 256 * 1024, True, 4 * NVFP4_BYTES + 1) <= total
    assert mixtral.bytes_needed(fewer + 1, 256 * 1024, True, 4 * NVFP4_BYTES + 1) > total
    few = parser().parse_args(
        ["model", "--model", "mixtral-8x7b", "--batch", "1", "--variants", "fp4gemm W4A4"]
    )
    assert command.cases(few, harness)[0].num_layers > most
    with pytest.raises(ValueError, match=r"one layer of llama-3\.1-8b with a cache of 262144 tokens needs"):
        command.cases(parser().parse_args(["model"]), gpu(8 * 2**30, monkeypatch))


def test_the_quick_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = command.cases(parser().parse_args(["model", "--quick"]), gpu(141 * 2**30, monkeypatch))
    assert [case.key for case in cases[:5]] == [
        *(f"model llama-3.1-8b, 16 layers: decode, context 1024, batch {b}" for b in (1, 16, 64, 256)),
        "model llama-3.1-8b, 16 layers: prefill of 4096",
    ]
    assert [case.compile for case in cases] == ["none", "layer", *["none"] * 8]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["--model", "gpt-5"], "'gpt-5' is not one of llama-3.1-8b, "),
        (["--mode", "train"], "'train' is not one of decode, prefill"),
        (["--variants", "W4A4"], "'W4A4' is not one of bf16, bf16 merged, fp8 merged, fp4gemm W4A4"),
        (["--layers", "3"], "--layers: got 3, must be 1 to 2 for tiny"),
        (["--batch", "0"], "must be at least 1"),
    ],
)
def test_bad_arguments_are_named(line: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["model", "--device", "cpu", *line])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_options_of_a_results_file() -> None:
    """Results of other contenders are not taken for those of a run."""
    line = ["model", "--variants", "bf16,fp4gemm W4A4", "--compile", "layer", "--profile"]
    args = parser().parse_args(line)
    assert options_used(args) == "settle=60ms eager variants=bf16,fp4gemm W4A4 compile=layer profile"
    assert options_used(parser().parse_args(["model"])) == "settle=60ms eager"


def test_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["model", "--list"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "qwen3-30b-a3b: 48 layers, 128 experts of which 8; bf16 6" in out


def test_published_sizes() -> None:
    found = {}
    for name, shape in SHAPES.items():
        ends = 2 * shape.vocab * shape.hidden
        found[name] = round((shape.num_layers * shape.layer_elems + ends) / 1e9, 1)
    assert found == {
        "llama-3.1-8b": 8.0,
        "llama-3.1-70b-shape": 70.6,
        "qwen3-8b": 8.2,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-shape": 235.0,
        "mixtral-8x7b": 46.7,
        "gpt-oss-20b-shape": 20.9,
        "tiny": 0.0,
        "tiny-moe": 0.0,
        "tiny-oss": 0.0,
    }


# ---- the tables -------------------------------------------------------------------------------------------


def models() -> list[dict[str, Any]]:
    step = "llama-3.1-8b: decode, context 1024"
    rows = []
    for batch, us, merged in ((1, 2000.0, 5000.0), (16, 2500.0, 5000.0)):
        start = {"bench": "model", "case": f"model {step}, batch {batch}", "step": step, "batch": batch}
        start |= {"command": "python -m bench model"}
        rows.append(result(**start, contender=MERGED, role="baseline", us=merged, eager_us=6000.0, ratio={}))
        mine = {"ratio": {MERGED: merged / us, "bf16": 9.0}, "eager_us": 4000.0, "eager_ratio": 1.5}
        rows.append(result(**start, contender="fp4gemm W4A4", us=us, cosine=0.98, tokens_s=500.0, **mine))
    return rows


def test_tables_of_whole_models() -> None:
    headings, lines = tables.table(models()[:2])
    assert headings[:4] == ["contender", "ms", "eager ms", "eager x bf16 merged"]
    assert lines[1][:5] == ["fp4gemm W4A4", "2.000", "4.000", "1.50", "500"]
    text = readme.short_table([result(), *models()])
    assert "| model and step | batch = | 1 | 16 |" in text
    step = "llama-3.1-8b: decode, context 1024"
    assert f"| {step} | fp4gemm W4A4 | 2.00 (2.50, 1.50) | 2.50 (2.00, 1.50) |" in text
    assert f"{step} | bf16 merged" not in text
    assert text.count("by `python -m bench") == 2
    full = readme.tables([result(), *models()])
    assert f"| {step} | bf16 merged, CUDA graph | 5.00 | 5.00 |" in full
    assert f"| {step} | fp4gemm W4A4, CUDA graph | 2.00 (2.50) | 2.50 (2.00) |" in full
    assert f"| {step} | fp4gemm W4A4, eager | 4.00 (1.50) | 4.00 (1.50) |" in full
    alone = readme.short_table(models())
    assert "| product |" not in alone
    assert alone.count("by `python -m bench model`") == 1
    for made in (readme.short_table, readme.tables):
        assert "Whole models" not in made([result()])
