"""The language model of the demo: SmolLM2-135M-Instruct as NVFP4 checkpoints, its perplexity, and a text.

The text whose perplexity is measured ships with Python: the essay on heaps by François Pinard that is
``heapq.__about__``. The perplexity is exp of the mean negative log-likelihood of its first tokens, each given
those before it.
"""

from __future__ import annotations

import heapq
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp4gemm
import smollm2
import torch
from fp4gemm.checkpoint import Options
from rich.table import Table
from torch import Tensor

NUM_TOKENS, QUICK_TOKENS = 384, 48
NUM_NEW_TOKENS, QUICK_NEW_TOKENS = 24, 4
QUESTION = "What is a heap in computer science?"
# The checkpoints that are made, by the name of a line of the table.
CHECKPOINTS = {
    "W4A16, rounded": Options(method="round"),
    "W4A16, four over six": Options(),
    "W4A4, rounded": Options(method="round", activations="per-token"),
    "W4A4, four over six": Options(activations="per-token"),
}
MIB = 1024.0 * 1024.0


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    nll: float  # nats per token
    weight_bytes: int  # of the linear layers of all blocks
    seconds: float  # of one pass over the text


@dataclass(frozen=True)
class Language:
    """What was measured."""

    device: str
    num_tokens: int
    lines: list[Line]  # bf16, then those of checkpoints_of
    answer: str  # to QUESTION, by the model of the last line


def measure(
    folder: Path, device: torch.device, *, quick: bool = False, step: Callable[[str], None] = lambda _: None
) -> Language:
    """Make the checkpoints below ``folder``, unless they are there, load each, and measure it."""
    import transformers
    from fp4gemm.integrations.transformers import register

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    register()
    step("SmolLM2: dequantize its GGUF file")
    source = smollm2.checkpoint(folder / "bf16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = tokenizer(heapq.__about__, return_tensors="pt").input_ids
    ids = ids[:, : QUICK_TOKENS if quick else NUM_TOKENS].to(device)
    lines, answer = [], ""
    for name, options in {"bf16": None, **checkpoints_of(device)}.items():
        step(f"SmolLM2: {name}")
        path = source if options is None else converted(source, folder / file_name(name), options)
        model = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to(device)
        )
        start = time.perf_counter()
        nll = mean_nll(model, ids)
        lines.append(Line(name, nll, weight_bytes(model), time.perf_counter() - start))
    step("SmolLM2: generate")
    answer = generated(model, tokenizer, QUICK_NEW_TOKENS if quick else NUM_NEW_TOKENS)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Language(kind, ids.shape[1], lines, answer)


def checkpoints_of(device: torch.device) -> dict[str, Options]:
    """The checkpoints that a device can run: W4A16 needs a CPU or a Hopper GPU."""
    has_w4a16 = device.type == "cpu" or fp4gemm.support.streams_prepacked(device)
    return {
        name: options
        for name, options in CHECKPOINTS.items()
        if has_w4a16 or options.activations == "per-token"
    }


def num_steps(device: torch.device) -> int:
    """How often ``measure`` calls ``step``."""
    return len(checkpoints_of(device)) + 3


def file_name(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-")


def converted(source: Path, folder: Path, options: Options) -> Path:
    """The NVFP4 checkpoint of ``source`` in ``folder``, as ``fp4gemm convert`` writes it."""
    try:
        fp4gemm.checkpoint.convert(source, folder, options, resume=True)
    except fp4gemm.checkpoint.CheckpointError:  # made from another source or by another version
        shutil.rmtree(folder)
        fp4gemm.checkpoint.convert(source, folder, options)
    return folder


@torch.inference_mode()
def mean_nll(model: torch.nn.Module, ids: Tensor) -> float:
    """The mean negative log-likelihood of ids[:, 1:], each given those before it; logits in float32."""
    inner: Any = model.get_submodule("model")
    head = model.get_submodule("lm_head").weight
    hidden = inner(ids).last_hidden_state[0, :-1]
    logits = torch.nn.functional.linear(hidden.float(), head.float())  # bf16 is slow on many CPUs
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def weight_bytes(model: torch.nn.Module) -> int:
    """The bytes of everything that the linear layers of the blocks hold."""
    layers = model.get_submodule("model.layers").modules()
    linear = [each for each in layers if isinstance(each, (torch.nn.Linear, fp4gemm.nn.Linear))]
    return sum(x.numel() * x.element_size() for each in linear for x in each.state_dict().values())


@torch.inference_mode()
def generated(model: Any, tokenizer: Any, num_tokens: int) -> str:
    """The model's answer to QUESTION, always choosing the likeliest token."""
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    answer: str = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return answer.strip()


def language_table(result: Language) -> Table:
    table = Table(
        title=f"SmolLM2-135M-Instruct with weights of a 4-bit GGUF file, on {result.num_tokens} tokens of "
        f"heapq.__about__, on {result.device}"
    )
    table.add_column("linear layers")
    for heading in ("perplexity\n", "nats above\nbf16", "weights\nMiB", "time\ns"):
        table.add_column(heading, justify="right")
    for line in result.lines:
        table.add_row(
            line.name,
            f"{math.exp(line.nll):.2f}",
            "" if line is result.lines[0] else f"{line.nll - result.lines[0].nll:+.3f}",
            f"{line.weight_bytes / MIB:.1f}",
            f"{line.seconds:.2f}",
        )
    return table


def answer_lines(result: Language) -> list[str]:
    return [f"{result.lines[-1].name}, asked {QUESTION!r}:", f"  {result.answer} ..."]
