"""Runs vLLM's engine on a checkpoint and compares its layers with those of this library, on the same device.

``make test-serving`` calls it as a program, with a JSON of arguments, since an engine cannot be started twice
in a process. What it finds goes to the file ``out``. With ``graphs`` the engine captures CUDA graphs: no call
is watched then, and the log-probabilities alone are compared.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from torch import Tensor, nn

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PROMPT = [3, 17, 100, 45, 9, 120, 77]
WORDS = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def watched(model: nn.Module) -> dict[str, list[tuple[Tensor, ...]]]:
    """What every layer of fp4gemm gets and returns from now on, by the name of the layer."""
    seen: dict[str, list[tuple[Tensor, ...]]] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not type(method).__module__.startswith("fp4gemm."):
            continue

        def apply(
            layer: nn.Module, *args: Any, name: str = name, original: Any = method.apply, **kwargs: Any
        ) -> Tensor:
            y: Tensor = original(layer, *args, **kwargs)
            given = [*args, *kwargs.values()]
            tensors = [each.clone() for each in given if isinstance(each, Tensor)]
            seen.setdefault(name, []).append((*tensors, y.clone()))
            return y

        method.apply = apply
    return seen


def addresses(model: nn.Module) -> dict[str, int]:
    """Where the parameters of fp4gemm's layers lie."""
    return {
        f"{name}.{of}": parameter.data_ptr()
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__module__.startswith("fp4gemm.")
        for of, parameter in module.named_parameters(recurse=False)
    }


def compared(reference: nn.Module, seen: dict[str, list[tuple[Tensor, ...]]]) -> dict[str, int]:
    """How many calls have the bits of the modules that transformers loaded, and how many have not."""
    counts = {"equal": 0, "different": 0}
    modules = dict(reference.named_modules())
    for name, calls in seen.items():
        parent, _, last = name.removesuffix(".routed_experts").rpartition(".")
        for x, *rest, y in calls:
            if last == "experts":
                scores, ids = rest[:2]
                found = modules.get(f"{parent.replace('block_sparse_moe', 'mlp')}.experts")
                wanted = found(x, ids, scores)
            else:
                parts = FUSED.get(last, (last,))
                wanted = torch.cat([modules[f"{parent}.{each}"](x) for each in parts], -1)
            counts["equal" if torch.equal(wanted, y) else "different"] += 1
    return counts


def loaded(folder: str, activations: str | None) -> nn.Module:
    """The checkpoint in transformers, with this library's layers; None: with its own activations."""
    import transformers
    from fp4gemm.integrations.transformers import Fp4GemmConfig, register

    register()
    options = {} if activations is None else {"quantization_config": Fp4GemmConfig(activations=activations)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return model.to(DEVICE)  # type: ignore[no-any-return]


def float_quantized(folder: str) -> nn.Module:
    """The 16-bit checkpoint in transformers, its weights quantized as --quantization fp4gemm does."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    return fp4gemm.models.quantize_model(model, method="four-over-six")  # type: ignore[no-any-return]


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    folder = arguments["model"]
    engine, graphs = arguments.get("engine", {}), bool(arguments.get("graphs"))
    given = {"max_model_len": 64, "enforce_eager": not graphs, "max_logprobs": WORDS} | engine
    llm = LLM(folder, dtype="bfloat16", **given)
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=WORDS, ignore_eos=True)

    def generated() -> tuple[list[int], Tensor]:
        out = llm.generate([{"prompt_token_ids": PROMPT}], sampling)[0].outputs[0]
        return list(out.token_ids), torch.tensor([out.logprobs[0][i].logprob for i in range(WORDS)])

    seen = {} if graphs else llm.apply_model(watched)[0]
    before = llm.apply_model(addresses)[0]
    found: dict[str, Any] = {}
    steps = [("first", folder)] + ([("updated", arguments["update"])] if "update" in arguments else [])
    with torch.no_grad():
        for step, source in steps:
            if step == "updated":
                llm.collective_rpc("reload_weights", kwargs={"weights_path": source})
                found["addresses_kept"] = llm.apply_model(addresses)[0] == before
                found["num_addresses"] = len(before)
            seen.clear()
            tokens, logprobs = generated()
            if "quantization" in engine:
                reference = float_quantized(source)
            else:
                reference = loaded(source, os.environ.get("FP4GEMM_SERVING_ACTIVATIONS"))
            wanted = (
                reference(torch.tensor([PROMPT], device=DEVICE)).logits[0, -1].float().log_softmax(-1).cpu()
            )
            found[step] = {
                "tokens": tokens,
                "layers": len(seen),
                **compared(reference, seen),
                "mean_difference": float((logprobs - wanted).abs().mean()),
                "max_difference": float((logprobs - wanted).abs().max()),
            }
    return found


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(main(given)), encoding="utf-8")
