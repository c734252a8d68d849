"""llm-compressor's NVFP4: its observers of weights, its GPTQ, and its SmoothQuant before it, by ``oneshot``.

W4A4 is its scheme NVFP4 and W4A16 its scheme NVFP4A16. The sequential pipeline, its default, runs the blocks
in order and calibrates each behind those that are quantized already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .producers import Producer, Text, without_unused_imports


def make(kind: str, observer: str | None, model: torch.nn.Module, text: Text, has_activations: bool) -> Any:
    """Quantize every linear layer but lm_head, with an observer of weights.

    Args:
        kind: "plain", "gptq", or "smooth gptq", which has SmoothQuant of strength 0.5 before GPTQ.
    """
    without_unused_imports()
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from loguru import logger
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    logger.remove()  # it prints two lines a layer
    scheme = QuantizationScheme(**(NVFP4 if has_activations else NVFP4A16), targets=["Linear"])
    assert scheme.weights is not None
    if observer is not None:
        scheme.weights = scheme.weights.model_copy(update={"observer": observer})
    modifier: Callable[..., Any] = QuantizationModifier if kind == "plain" else GPTQModifier
    recipe: list[Any] = [modifier(config_groups={"group_0": scheme}, ignore=["lm_head"])]
    if kind == "smooth gptq":
        recipe.insert(0, SmoothQuantModifier(smoothing_strength=0.5))
    rows = [{"input_ids": x[0], "attention_mask": torch.ones_like(x[0])} for x in text.batches]
    return oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(text.folder),
        dataset=DataLoader(rows, batch_size=1),  # type: ignore[arg-type]
        recipe=recipe,
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]["input_ids"]),
    )


METHODS = tuple(
    Producer(f"llm-compressor {name}", "llmcompressor", partial(make, kind, observer))
    for name, kind, observer in (
        ("GPTQ", "gptq", None),
        ("mse", "plain", "memoryless_mse"),
        ("imatrix mse", "plain", "imatrix_mse"),
        ("expanded mse", "plain", "nvfp4_expanded_mse"),
        ("GPTQ, mse", "gptq", "memoryless_mse"),
        ("GPTQ, expanded mse", "gptq", "nvfp4_expanded_mse"),
        ("SmoothQuant + GPTQ, expanded mse", "smooth gptq", "nvfp4_expanded_mse"),
    )
)
