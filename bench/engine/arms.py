"""What is compared in the engine: vLLM's own layers in bf16, FP8 and FP4, and those of this library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..models.shapes import Shape
from .checkpoints import Format, format_of

WITHOUT = {"VLLM_PLUGINS": "none"}  # no plug-in has this name


def _with(activations: str) -> dict[str, str]:
    return {"VLLM_PLUGINS": "fp4gemm", "FP4GEMM_SERVING_ACTIVATIONS": activations}


@dataclasses.dataclass(frozen=True)
class Arm:
    """An engine.

    Args:
        name: the contender in the rows.
        is_quantized: whether it loads the quantized checkpoint. The others make random weights in 16 bits.
        engine: arguments of vLLM.
        environment: of its process.
        off_by: the largest difference between a layer and the float32 product with decoded weights and
            unquantized inputs, as a fraction of its norm; None: the checkpoint does not say the weights.
        needs_gpu: whether vLLM's CPU engine lacks it.
        is_ours: whether this library multiplies.
        formats: of the quantized checkpoints of the models that it runs.
    """

    name: str
    is_quantized: bool
    environment: Mapping[str, str]
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    off_by: float | None = None
    needs_gpu: bool = False
    is_ours: bool = False
    formats: tuple[Format, ...] = ("nvfp4",)


_DUMMY = {"load_format": "dummy"}
# FP8: e4m3 weights with a scale for each output channel, and a scale for each token, made while it runs.
_FP8 = {**_DUMMY, "quantization": "fp8_per_channel"}
_BOTH: tuple[Format, ...] = ("nvfp4", "mxfp4")
# Unquantized inputs leave bf16's roundings, of which those of a mixture add up. An e4m3 value is off by 2.6 %
# and an e2m1 value by 9.5 % of the norm of Gaussian inputs, twice in a mixture.
ARMS = {
    "bf16": Arm("vLLM bf16", False, WITHOUT, _DUMMY),
    "fp8": Arm("vLLM FP8", False, WITHOUT, _FP8, needs_gpu=True),
    "marlin": Arm(
        "vLLM Marlin W4A16",
        True,
        WITHOUT,
        {"moe_backend": "marlin"},
        off_by=0.02,
        needs_gpu=True,
        formats=_BOTH,
    ),
    # OpenAI's kernels in Triton, which vLLM chooses for GPT-OSS on Hopper.
    "triton": Arm(
        "vLLM Triton W4A16",
        True,
        WITHOUT,
        {"moe_backend": "triton"},
        off_by=0.02,
        needs_gpu=True,
        formats=("mxfp4",),
    ),
    "w4a16": Arm("fp4gemm W4A16", True, _with("a16"), off_by=0.02, is_ours=True, formats=_BOTH),
    "w4a8": Arm("fp4gemm W4A8", True, _with("fp8"), off_by=0.1, is_ours=True, formats=_BOTH),
    "w4a4": Arm("fp4gemm W4A4", True, _with("per-token"), off_by=0.3, is_ours=True, formats=_BOTH),
}


def arms_of(shape: Shape, has_gpu: bool) -> list[str]:
    """The arms that run a model on a GPU, or on a CPU."""
    return [
        name
        for name, arm in ARMS.items()
        if format_of(shape) in arm.formats and (has_gpu or not arm.needs_gpu)
    ]
