"""Runs vLLM's engine step by step, and compares each call of each layer with the layer outside of the engine.

``tests/engines/test_vllm_gpu.py`` calls it as a program, with a JSON of arguments, since an engine cannot be
started twice in a process. What it finds goes to the file ``out``.

Where a CUDA graph is replayed no Python of a layer runs. Copies of what the layer gets and returns are
therefore part of the graph; before each step they are filled with NaN, so that values show that it ran.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from safetensors import safe_open
from torch import Tensor, nn

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Call = tuple[Tensor, ...]  # what a layer got, and behind that what it returned


class Recorder:
    """What the layers of fp4gemm get and return, in graphs by the number of rows, and else call by call."""

    def __init__(self) -> None:
        from fp4gemm.integrations.vllm import _methods

        self.captured: dict[tuple[int, int], Call] = {}
        self.eager: list[tuple[int, Call]] = []
        self.is_on = False
        for cls in (_methods.Fp4GemmLinearMethod, _methods.Fp4GemmMoEMethod):
            self._watch(cls)

    def _watch(self, cls: Any) -> None:
        original = cls.apply

        def apply(method: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            y: Tensor = original(method, layer, *args, **kwargs)
            is_captured = DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_captured or self.is_on:
                tensors = [each.clone() for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
                call = (*tensors, y.clone())
                if is_captured:
                    self.captured[id(layer), y.shape[0]] = call
                else:
                    self.eager.append((id(layer), call))
            return y

        cls.apply = apply

    def begin(self) -> None:
        """A step begins."""
        self.eager.clear()
        with torch.inference_mode():
            for call in self.captured.values():
                for tensor in call:
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.is_on = True

    def calls(self, batch: int) -> tuple[str, list[tuple[int, Call]]]:
        """("graph" or "eager", the calls of the step that ended, by layer)."""
        self.is_on = False
        if self.eager:
            return "eager", self.eager
        rows = min(rows for _, rows in self.captured if rows >= batch)
        return "graph", [(layer, call) for (layer, of), call in self.captured.items() if of == rows]


class Outside:
    """The layers of a ModelOpt checkpoint, or the experts of GPT-OSS, as modules of this library."""

    def __init__(self, folder: Path, activations: str) -> None:
        self.folder, self.activations = folder, activations
        self.files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.made: dict[str, nn.Module] = {}

    def __call__(self, name: str, inputs: Call) -> Tensor:
        """What the layer of this name returns."""
        name = name.removesuffix(".routed_experts")
        if name not in self.made:
            is_experts = name.endswith(".experts")
            self.made[name] = (self._experts if is_experts else self._linear)(name).to(DEVICE)
        if not name.endswith(".experts"):
            return self.made[name](inputs[0])  # type: ignore[no-any-return]
        x, scores, ids = inputs[:3]  # behind them, what shared experts get
        return self.made[name](x, ids, scores)  # type: ignore[no-any-return]

    def _linear(self, name: str) -> Any:
        parent, _, last = name.rpartition(".")
        weight = fp4gemm.concat([self._weight(f"{parent}.{part}") for part in FUSED.get(last, (last,))])
        return fp4gemm.nn.Linear.from_quantized(weight, activations=self.activations)  # type: ignore[arg-type]

    def _experts(self, name: str) -> Any:
        if f"{name}.gate_up_proj_blocks" in self.files:
            return self._gpt_oss(name)
        count = sum(each.startswith(f"{name}.") and each.endswith("down_proj.weight") for each in self.files)
        owners = [f"{name}.{e}" for e in range(count)]
        w13 = [
            fp4gemm.concat([self._weight(f"{owner}.gate_proj"), self._weight(f"{owner}.up_proj")])
            for owner in owners
        ]
        w2 = [self._weight(f"{owner}.down_proj") for owner in owners]
        return fp4gemm.nn.Experts.from_quantized(
            fp4gemm.stack(w13),
            fp4gemm.stack(w2),
            activations=self.activations,  # type: ignore[arg-type]
        )

    def _gpt_oss(self, name: str) -> Any:
        owners = [f"{name}.gate_up_proj", f"{name}.down_proj"]
        first, second = (
            fp4gemm.NVFP4Tensor.from_mxfp4(self._tensor(f"{owner}_blocks"), self._tensor(f"{owner}_scales"))
            for owner in owners
        )
        return fp4gemm.nn.Experts.from_quantized(
            first,
            second,
            *(self._tensor(f"{owner}_bias").float() for owner in owners),
            layout="interleaved",
            activation="swiglu_oai",
            activations=self.activations,  # type: ignore[arg-type]
        )

    def _weight(self, owner: str) -> fp4gemm.NVFP4Tensor:
        names = ("weight", "weight_scale", "weight_scale_2")
        return fp4gemm.NVFP4Tensor.from_modelopt(*(self._tensor(f"{owner}.{of}") for of in names))

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self.folder / self.files[name], "pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    recorder = Recorder()
    from vllm import LLM, SamplingParams

    folder, batches = Path(arguments["model"]), arguments["batches"]
    llm = LLM(str(folder), dtype="bfloat16", max_model_len=256, **arguments["engine"])
    engine = llm.llm_engine
    names = llm.apply_model(_names)[0]
    outside = Outside(folder, arguments["activations"])
    found: dict[str, Any] = {"eager": 0, "graph": 0, "different": [], "steps": 0, "tokens": 0}
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        for i in range(batch):
            ids = torch.randint(10, 1000, (7 + i,), generator=generator).tolist()
            engine.add_request(f"{batch} {i}", {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            recorder.begin()
            done = engine.step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            found["tokens"] += sum(len(each.outputs[0].token_ids) for each in done if each.finished)
            kind, calls = recorder.calls(batch)
            if not calls:
                continue
            found["steps"] += 1
            with torch.inference_mode():
                for layer, (*inputs, y) in calls:
                    rows = slice(batch if kind == "graph" else None)  # the others pad the batch
                    wanted = outside(names[layer], tuple(inputs))[rows]
                    if torch.equal(wanted, y[rows]):
                        found[kind] += 1
                    else:
                        off = float((wanted.float() - y[rows].float()).abs().max())
                        found["different"].append([names[layer], kind, list(y.shape), off])
    found["layers"] = len(names)
    return found


def _names(model: nn.Module) -> dict[int, str]:
    """The names of fp4gemm's layers; the engine runs in this process, so that the ids are valid here."""
    return {
        id(module): name
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__module__.startswith("fp4gemm.")
    }


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(main(given)), encoding="utf-8")
