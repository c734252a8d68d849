"""Starts SGLang's engine on a checkpoint, on a CPU, and compares its log-probabilities with transformers'.

A program with a JSON of arguments, since SGLang starts its scheduler in a process of its own. What it finds
goes to the file ``out``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_engine import PROMPT, WORDS, float_quantized, loaded

TOKENS = 4


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    import sglang

    folder, options = arguments["model"], arguments.get("engine", {})
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        log_level="info",
        max_total_tokens=1024,
        **options,
    )

    def generated() -> tuple[list[int], torch.Tensor]:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        out = engine.generate(
            input_ids=[PROMPT], sampling_params=sampling, return_logprob=True, top_logprobs_num=WORDS
        )[0]
        of_word = {word: value for value, word, *_ in out["meta_info"]["output_top_logprobs"][0]}
        return out["output_ids"], torch.tensor([of_word[i] for i in range(WORDS)])

    found: dict[str, Any] = {}
    steps = [("first", folder)] + ([("updated", arguments["update"])] if "update" in arguments else [])
    for step, source in steps:
        if step == "updated":
            done = engine.update_weights_from_disk(source)
            assert done[0], done
        tokens, logprobs = generated()
        reference = (float_quantized if "quantization" in options else loaded)(source)
        with torch.no_grad():
            wanted = reference(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
        found[step] = {"tokens": tokens, "mean_difference": float((logprobs - wanted).abs().mean())}
    engine.shutdown()
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(main(given)), encoding="utf-8")
