"""peft's LoRA layers on top of a quantized model: make test-oracles."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from nn_helpers import same_bits
from torch import Tensor

peft = pytest.importorskip("peft", reason="needs requirements/oracles.txt: make test-oracles")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
def test_adapters_of_peft_train(scaling: str) -> None:
    """The loss falls, with gradient checkpointing too; no weight of the model changes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model = fp4gemm.models.quantize_model(model, activations=scaling)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    lora._register_custom_module({nn.Linear: peft.tuners.lora.Linear})
    adapted = peft.get_peft_model(model, lora)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 3
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.randint(128, (2, 16))
    losses = []
    for step in range(8):
        if step == 4:
            adapted.gradient_checkpointing_enable()
            adapted.enable_input_require_grads()
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[3] < losses[0] - 0.1
    assert losses[7] < losses[3] - 0.05
    after = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items()}
    for name, t in before.items():
        assert torch.equal(after[name].view(torch.uint8), t.view(torch.uint8)), name


# ---- experts, through fp4gemm.integrations.peft


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(48).view(2, 24) * 7 % 128


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


def gpt_oss() -> Any:
    """Its stacks are (g, k, n), and rows of gate and up alternate."""
    config = transformers.GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(config).bfloat16()


def lora(**changes: Any) -> Any:
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    options |= {"target_parameters": STACKS, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**options | changes)


def adapted(make: Callable[[], Any] = qwen3_moe, config: Any = None, **options: Any) -> Any:
    from fp4gemm.integrations.peft import get_peft_model

    model = fp4gemm.models.quantize_model(make(), **options)
    return get_peft_model(model, lora() if config is None else config)


def fill(model: Any, scale: float = 0.1) -> None:
    """Random adapters."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=scale)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


def stacks(model: Any) -> list[nn.Experts]:
    return [m for m in model.modules() if isinstance(m, nn.Experts)]


def with_stored_weights(float_model: Any, quantized: Any) -> Any:
    """The float model with the values of the NVFP4 weights."""
    modules = dict(quantized.named_modules())
    for name, module in float_model.named_modules():
        found = modules.get(name)
        if isinstance(found, nn.Linear):
            module.weight.data = found.dequantize_weight(torch.bfloat16)
        if isinstance(found, nn.Experts):
            first, second = (w.dequantize_weight(torch.bfloat16) for w in (found.w13, found.w2))
            if found.float_layout == "halves":
                first = torch.cat((first[:, 0::2], first[:, 1::2]), 1)
            is_transposed = module.is_transposed
            module.gate_up_proj.data = first.transpose(1, 2).contiguous() if is_transposed else first
            module.down_proj.data = second.transpose(1, 2).contiguous() if is_transposed else second
    return float_model


@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss])
def test_adapters_of_experts_are_those_of_the_float_model(make: Callable[[], Any], tmp_path: Path) -> None:
    """Names, shapes and values: what the NVFP4 model saves, the float model loads, and computes the same."""
    from fp4gemm.integrations.peft import from_pretrained

    model = adapted(make, activations="a16")
    base = logits(fp4gemm.models.quantize_model(make(), activations="a16"))
    assert same_bits(logits(model), base)  # B is 0
    fill(model)
    mine = peft.get_peft_model_state_dict(model)
    of_float = peft.get_peft_model_state_dict(peft.get_peft_model(make(), lora()))
    assert {name: t.shape for name, t in mine.items()} == {name: t.shape for name, t in of_float.items()}
    model.save_pretrained(tmp_path)
    wanted = with_stored_weights(make(), fp4gemm.models.quantize_model(make(), activations="a16"))
    wanted = logits(peft.PeftModel.from_pretrained(wanted, tmp_path))
    got = logits(model)
    assert (wanted - base).norm() > 0.3 * base.norm()
    # peft adds B A to the bfloat16 weight and rounds the sum; here the terms are rounded apart.
    assert (got - wanted).norm() < 0.05 * wanted.norm()
    again = from_pretrained(fp4gemm.models.quantize_model(make(), activations="a16"), tmp_path)
    assert same_bits(logits(again), got)


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
def test_adapters_of_experts_train(scaling: str) -> None:
    """Behind gradient checkpointing too; the weights keep their bits and their size."""
    model = adapted(activations=scaling)
    before = [{name: t.clone() for name, t in m.state_dict().items()} for m in stacks(model)]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * (2 + 2)  # A and B of q, v, gate_up and down in two layers
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(10):
        if step == 5:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[4] < losses[0] - 0.2
    assert losses[9] < losses[4] - 0.2
    for m, was in zip(stacks(model), before, strict=True):
        assert not list(m.parameters())
        for name, t in m.state_dict().items():
            assert torch.equal(t.view(torch.uint8), was[name].view(torch.uint8)), name
        w = m.w13
        assert w.weight_codes.nbytes + w.weight_scales.nbytes == 4 * (
            192 * 32 + 256 * 4
        )  # padded to 256 rows


def test_one_stack_alone_and_disabled_adapters() -> None:
    base = logits(fp4gemm.models.quantize_model(qwen3_moe()))
    results = []
    for targets in ([STACKS[0]], [STACKS[1]], STACKS):
        model = adapted(config=lora(target_parameters=targets, target_modules=[]))
        fill(model)
        results.append(logits(model))
        with model.disable_adapter():
            assert same_bits(logits(model), base)
    assert not any(torch.equal(a, b) for a, b in zip(results, [base, *results], strict=False))


def test_a_second_adapter() -> None:
    from fp4gemm.integrations.peft import targets

    model = adapted()
    fill(model)
    first = logits(model)
    config = lora()
    with targets(model, config):
        model.add_adapter("other", config)
    assert "named_parameters" not in vars(stacks(model)[0])
    assert same_bits(logits(model), first)
    model.set_adapter("other")
    assert same_bits(logits(model), logits(fp4gemm.models.quantize_model(qwen3_moe())))
    model.base_model.set_adapter(["default", "other"])
    assert same_bits(logits(model), first)


# ---- merging


def sums(model: Any) -> list[Tensor]:
    """W + scale B A of every adapted weight by the definition, in float32, as the layers hold them."""
    found = []
    for name, m in model.named_modules():
        if name.endswith("experts"):
            base = m.get_base_layer()
            for layer, weight in ((m.base_layer, base.w13), (m, base.w2)):
                a = layer.lora_A["default"].weight.view(4, 4, -1)
                b = layer.lora_B["default"].weight.view(-1, 4, 4)
                delta = 2.0 * torch.einsum("ore,eri->eoi", b, a)
                if weight is base.w13:
                    delta = torch.stack(delta.chunk(2, 1), 2).flatten(1, 2)
                found.append(weight.dequantize_weight() + delta.detach())
    return found


@pytest.mark.parametrize("method", [None, "round", "four-over-six", "search", "stochastic", "gptq"])
def test_merging(method: Any) -> None:
    """The merged model has the rounded sums, and is nearer to the adapted one than the base model is."""
    from fp4gemm.integrations.peft import merge_and_unload

    model = adapted(weight_scaling="tensor" if method == "round" else "row")
    fill(model, 0.06)
    want, exact, base = logits(model), sums(model), logits(fp4gemm.models.quantize_model(qwen3_moe()))
    options: dict[str, Any] = {}
    if method == "gptq":
        options["calibration"] = fp4gemm.calibrate(qwen3_moe(), [IDS], second_moment=True)
    if method == "stochastic":
        options["generator"] = torch.Generator().manual_seed(3)
    merged = merge_and_unload(model, method=method, **options)
    assert type(merged) is transformers.Qwen3MoeForCausalLM
    weights = [w for m in stacks(merged) for w in (m.w13, m.w2)]
    for w, total in zip(weights, exact, strict=True):
        error = (w.dequantize_weight() - total).norm() / total.norm()
        assert 0.02 < error < 0.3
        if method in ("round", "four-over-six"):
            same = fp4gemm.quantize(
                total, scaling=w.weight_scaling, four_over_six=None if method == "round" else "mse"
            )
            assert same_bits(w.dequantize_weight(), same.dequantize(torch.float32))
    assert (logits(merged) - want).norm() < 0.6 * (base - want).norm()
    assert all("lora" not in name for name, _ in merged.named_modules())


def test_merge_by_peft_itself() -> None:
    from fp4gemm.integrations.peft import merge_and_unload

    models = [adapted(), adapted()]
    for model in models:
        fill(model)
    first = logits(models[0].merge_and_unload())
    assert same_bits(first, logits(merge_and_unload(models[1])))


def test_a_merge_is_not_undone() -> None:
    model = adapted()
    fill(model)
    model.merge_adapter()
    merged = logits(model)
    with pytest.raises(RuntimeError, match=r"^unmerge: the merged weight was rounded to NVFP4"):
        model.unmerge_adapter()
    with pytest.raises(RuntimeError, match=r"^unmerge: "), model.disable_adapter():
        logits(model)
    assert same_bits(logits(model), merged)


def test_loaded_experts_know_the_layout_of_adapters(tmp_path: Path) -> None:
    """Rows of gate and up alternate in GPT-OSS; a checkpoint does not say it, and the model's class does."""
    from fp4gemm.integrations import transformers as of_transformers
    from fp4gemm.integrations.peft import from_pretrained

    of_transformers.register()
    try:
        model = fp4gemm.models.quantize_model(gpt_oss(), activations="a16")
        of_transformers.save_pretrained(model, tmp_path / "base", format="fp4gemm")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    finally:
        of_transformers.unregister()
    assert [m.float_layout for m in stacks(again)] == ["interleaved"]
    model = adapted(gpt_oss, activations="a16")
    fill(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = from_pretrained(again, tmp_path / "adapter")
    for name, p in peft.get_peft_model_state_dict(model).items():
        assert same_bits(peft.get_peft_model_state_dict(loaded)[name], p), name
    assert same_bits(
        stacks(loaded)[0].w13.weight_codes, stacks(model)[0].w13.weight_codes
    )  # so that the same adapter means the same


def test_a_checkpoint_is_adapted_by_trainer_and_saved_again(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from fp4gemm.integrations import transformers as of_transformers
    from fp4gemm.integrations.peft import get_peft_model, merge_and_unload

    of_transformers.register()
    try:
        model = fp4gemm.models.quantize_model(qwen3_moe())
        of_transformers.save_pretrained(model, tmp_path / "base", format="fp4gemm")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = get_peft_model(model, lora())
        options = transformers.TrainingArguments(
            output_dir=tmp_path / "run", max_steps=3, learning_rate=1e-2, report_to=[], use_cpu=True
        )
        data = [{"input_ids": row, "labels": row} for row in IDS]
        before = model(input_ids=IDS, labels=IDS).loss.item()
        transformers.Trainer(model=model, args=options, train_dataset=data).train()
        assert model.eval()(input_ids=IDS, labels=IDS).loss.item() < before - 0.05
        merged = merge_and_unload(model)
        of_transformers.save_pretrained(merged, tmp_path / "merged", format="fp4gemm")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert same_bits(logits(again), logits(merged))
    finally:
        of_transformers.unregister()


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"target_modules": ["experts"], "target_parameters": None}, "^target_modules: matches '.*experts'"),
        ({"init_lora_weights": "pissa", "target_modules": []}, "^init_lora_weights: got 'pissa'"),
        ({"lora_dropout": 0.1, "target_modules": []}, "lora_dropout"),
        ({"use_dora": True, "target_modules": []}, "use_dora"),
    ],
    ids=["modules", "init", "dropout", "dora"],
)
def test_configs_that_experts_refuse(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        adapted(config=lora(**config))


def test_another_config() -> None:
    from fp4gemm.integrations.peft import get_peft_model

    with pytest.raises(TypeError, match=r"^config: got .*, must be a peft.LoraConfig"):
        get_peft_model(qwen3_moe(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


def test_bad_merges() -> None:
    from fp4gemm.integrations.peft import merge_and_unload

    model = adapted()
    fill(model)
    statistics = fp4gemm.calibrate(qwen3_moe(), [IDS])
    lacking = fp4gemm.calibration.Statistics({n: s for n, s in statistics.items() if not n.endswith("w2")})
    for options, error, text in (
        ({"method": "best"}, ValueError, "^method: got 'best'"),
        ({"generator": torch.Generator()}, ValueError, "^generator: got one with method None"),
        (
            {"method": "round", "calibration": statistics},
            ValueError,
            "^calibration: got one with method 'round'",
        ),
        ({"method": "gptq"}, ValueError, "^calibration: must have second moments"),
        (
            {"calibration": lacking},
            ValueError,
            r"^calibration: has no statistics of 'model.layers.0.mlp.expe",
        ),
    ):
        with pytest.raises(error, match=text):
            merge_and_unload(model, **options)
    with pytest.raises(TypeError, match=r"(?s)^model: got .*, must be a PeftModel"):
        merge_and_unload(qwen3_moe())
    with torch.no_grad():
        stacks_of_model = [p for n, p in model.named_parameters() if "experts.lora_B" in n]
        stacks_of_model[0][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^ParamWrapper.merge: \d+ values are NaN or infinite"):
        model.merge_and_unload()


def test_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its smallest size runs to the end; every loss is near that of 256 bytes at random."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    importlib.import_module("lora_moe").main(["--size", "smoke", "--device", "cpu"])
    lines = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [line[0] for line in lines] == ["four-over-six", "search", "gptq", "stochastic"]
    for _, *losses in lines:
        assert all(5.3 < float(loss) < 5.7 for loss in losses)
