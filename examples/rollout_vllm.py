"""vLLM as the rollout engine of examples/rollout.py: the plug-in of fp4gemm serves the trainer's weights.

Its layers have the bits of those of fp4gemm.nn. Attention, norms, rotary embeddings and the output layer are
vLLM's own, so that the difference is not 0. The weights go through a folder, which ``reload_weights`` reads;
a trainer of your own sends them by one of vLLM's backends of weight transfer (docs/serving.md).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fp4gemm.checkpoint import Options, convert
from rollout_engine import FORMAT, Samples, Setup
from rollout_models import built
from safetensors.torch import save_file
from torch import Tensor


class VLLM:
    """vLLM's engine on an NVFP4 checkpoint, in the process of the caller."""

    def __init__(self, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM

        self._temporary = tempfile.TemporaryDirectory()
        folder = Path(self._temporary.name)
        self._folder = folder / "nvfp4"
        # Its weights are those of the trainer from the first update on.
        built(setup.config, torch.device("cpu")).save_pretrained(folder / "float")
        options = Options(format=FORMAT, fuse=(), **setup.recipe.for_inference().options())
        convert(folder / "float", self._folder, options)
        serving = {"batch_invariant": setup.measures.batch_invariant, "rounded_gate": True}
        self._llm = LLM(
            str(self._folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=setup.length,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.3,
            additional_config={"fp4gemm": serving},
        )

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights that the trainer sends in NVFP4 into the memory of those that the engine has."""
        for shard in self._folder.glob("*.safetensors*"):
            shard.unlink()
        save_file(dict(tensors), self._folder / "model.safetensors", {"format": "pt"})
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})

    def sample(self, prompts: Tensor, length: int, seed: int) -> Samples:
        """Continue the prompts (b, p) to the length, with the log-probabilities that vLLM returns."""
        from vllm import SamplingParams

        how = SamplingParams(
            max_tokens=length - prompts.shape[1], seed=seed, logprobs=0, ignore_eos=True, detokenize=False
        )
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        outputs = [each.outputs[0] for each in self._llm.generate(given, how, use_tqdm=False)]
        tokens = torch.tensor([list(each.token_ids) for each in outputs])
        found = [
            [of[token].logprob for of, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in outputs
        ]
        return Samples(torch.cat([prompts, tokens], 1), torch.tensor(found))
