"""Which layers fp4gemm serves: by the checkpoint, the options, and the device of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ... import _names, kernel_table, support
from ...checkpoint.formats import Scheme
from ...checkpoint.formats.base import read_own
from ...recipe import INPUTS, StoredActivations, activations_with, automatic
from ...support import TokenForm
from .options import Options

__all__ = [
    "SERVED",
    "Device",
    "OwnConfig",
    "activations_of",
    "has_input_scale",
    "of_algorithm",
    "per_token",
    "said_by",
    "stored",
    "stored_experts",
]

# What stored and of_algorithm return for a layer with NVFP4 weights.
SERVED: tuple[StoredActivations, ...] = tuple(
    cast(StoredActivations, name) for name, kind in INPUTS.items() if kind.kind in ("per-token", "a16", "fp8")
)
_ALGORITHMS: dict[str | None, StoredActivations] = {"NVFP4": "per-token", "W4A16_NVFP4": "a16"}
# What a device needs beside a product, by what the inputs become; support.gaps_of has these names.
_NEEDS: dict[TokenForm, str] = {"16-bit": "unquantized activations", "fp8": "FP8 tokens"}


class Device:
    """The device of an engine, as its platform names it: torch.cuda is not initialised for the answer.

    Args:
        kind: "cpu", "cuda", or another name, where fp4gemm has nothing.
        capability: (major, minor) of a CUDA device; None where the platform does not know it.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None) -> None:
        self._gaps: dict[str, str] = {}
        self._is_cuda = kind == "cuda"
        if kind == "cpu":
            return
        where = (
            kind if capability is None else f"{kind} of compute capability {capability[0]}.{capability[1]}"
        )
        if kind != "cuda" or capability is None:
            self._gaps["mm"] = f"fp4gemm runs on cuda and cpu devices only, and this is {where}"
        else:
            self._gaps = support.gaps_of(10 * capability[0] + capability[1], where)

    def reason(self) -> str | None:
        """Why fp4gemm serves nothing on the device: kernels are missing; None if it serves layers."""
        return next((self._gaps[name] for name in ("quantize", "mm") if name in self._gaps), None)

    def reason_against(self, activations: StoredActivations, is_experts: bool) -> str | None:
        """Why fp4gemm does not serve layers with these activations on the device; None if it does."""
        mode = "grouped_mm" if is_experts else "mm"
        needs = _NEEDS.get(INPUTS[activations].tokens)
        names = [mode] if needs is None else [mode, f"{mode} of {needs}"]
        return next((self._gaps[name] for name in names if name in self._gaps), None)

    def check(self, name: str, activations: StoredActivations, is_experts: bool) -> None:
        """Raise ValueError for FP8 tokens, which a user or a checkpoint asks for, on a device without them.

        The engine would compute with other numbers than were asked for, so that the layer is not left to it.
        """
        if INPUTS[activations].tokens != "fp8":
            return
        reason = self.reason_against(activations, is_experts)
        if reason is not None and self.reason_against("per-token", is_experts) is None:
            raise ValueError(
                f"{name}: activations is {activations!r}, must be 'per-token', 'a16' or 'auto' on this "
                f"device (FP4GEMM_SERVING_ACTIVATIONS), or name the layer in the option ignore: {reason}"
            )

    def automatic(self, is_experts: bool) -> StoredActivations:
        """What the option "auto" becomes: :func:`fp4gemm.recipe.automatic`, by the kernels of the device."""
        return automatic(self._is_cuda and self.reason_against("fp8", is_experts) is None)

    def built(self) -> str:
        """The text for the log that says which kernels this build of fp4gemm has."""
        return kernel_table.built_text()


def stored(scheme: Scheme | None, name: str, shards: Sequence[str]) -> StoredActivations | str:
    """ "per-token", "a16" or "fp8" for a layer with NVFP4 weights; else the reason why it has none.

    Args:
        scheme: that of the checkpoint; None: it is in 16 bits, and every layer is quantized but routers and
            those whose weight is read directly.
        name: the name of the layer.
        shards: the names in the checkpoint of the layers that the engine fuses into it.

    Raises:
        ValueError: the checkpoint quantizes some of the shards.
    """
    if scheme is None:
        if _names.is_router(name):
            return "it is a router"
        is_read = name.rpartition(".")[2] in _names.READ_DIRECTLY
        return "it is read directly" if is_read else "per-token"
    quantized = {scheme.quantizes(shard) for shard in shards}
    if len(quantized) > 1:
        raise ValueError(
            f"{name}: the checkpoint quantizes some of {', '.join(shards)}, must quantize all or none, since "
            "the engine fuses them"
        )
    if not quantized.pop():
        return "the checkpoint excludes it"
    return per_token(scheme.activations)


def per_token(activations: StoredActivations) -> StoredActivations:
    """What an engine makes of the activations of a checkpoint: an amax for each token if they are NVFP4.

    Rows that pad a batch, in a captured graph for example, would take part in an amax of all tokens, and have
    arbitrary values. Options of the cast remain.
    """
    return activations_with(activations, "per-token") if INPUTS[activations].is_nvfp4 else activations


def stored_experts(scheme: Scheme | None, name: str) -> StoredActivations | str:
    """The same for experts, where the engine does not say what the checkpoint calls the layers of an expert.

    The names of every family are looked up, as a checkpoint has those of one.
    """
    found = [stored(scheme, name, [f"{name}.0.{names.down}"]) for names in _names.EXPERTS]
    return next((each for each in found if each not in SERVED), found[0])


def has_input_scale(scheme: Scheme | None) -> bool:
    """Whether the checkpoint has outer scales of activations."""
    return scheme is not None and scheme.activations == "static"


def of_algorithm(algorithm: str | None) -> StoredActivations | str:
    """What :func:`stored` says, of a layer that has this algorithm in a config of ModelOpt."""
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]
    return "it is in 16 bits" if algorithm is None else f"its weights are {algorithm}"


def said_by(config: Mapping[str, Any], stored: str) -> str:
    """What :func:`stored` says, with what the config of a checkpoint of this library says beyond it.

    Args:
        config: ``quantization_config`` of a checkpoint in a format of others, whose engines do not read
            the key.

    Raises:
        ValueError: the key has another value than this library writes.
    """
    known = next((each for each in SERVED if each == stored), None)
    return stored if known is None else per_token(read_own(config, known, "quantization_config"))


def activations_of(
    options: Options, stored: StoredActivations, name: str, is_experts: bool, device: Device
) -> StoredActivations:
    """The way in which the inputs of a layer are quantized.

    Args:
        stored: what the checkpoint says: "a16", "fp8", or for W4A4 "per-token", perhaps with options of the
            cast, or "static".
        name: the name of the layer, for messages.
        is_experts: whether the layer is a mixture of experts.

    Raises:
        ValueError: the option is "static" where there is no static scale, or for experts; or the inputs would
            become FP8 tokens, which the device does not multiply.
    """
    wanted, is_nvfp4 = options.activations, INPUTS[stored].is_nvfp4
    if wanted == "auto":
        chosen = device.automatic(is_experts)
        return per_token(stored) if is_nvfp4 and INPUTS[chosen].is_nvfp4 else chosen
    if wanted == "checkpoint":
        found = per_token(stored)
        device.check(name, found, is_experts)
        return found
    if wanted == "static" and not is_nvfp4:
        raise ValueError(
            f"{name}: activations is 'static', must be another for a checkpoint of W4A16, which holds no "
            "scales of activations"
        )
    if wanted == "static" and is_experts:
        raise ValueError(
            f"{name}: activations is 'static', must be another for experts, whose inputs have an amax for "
            "each token; or name the layer in the option ignore"
        )
    device.check(name, wanted, is_experts)
    return wanted


class OwnConfig:
    """``quant_method: fp4gemm`` of a checkpoint, or ``--quantization fp4gemm`` for one in 16 bits.

    In the second case every linear layer is quantized with an amax for each row of its weight, but routers
    and the output embedding, and so are experts. ``method`` of :class:`.Options` says how; with
    ``activations="a16"`` inputs stay in 16 bits, and with "fp8" they become FP8 tokens. Each rank quantizes
    its own shard.

    It comes before the class of configs of an engine, and has what engines ask of a config.
    """

    @classmethod
    def get_name(cls) -> str:
        return "fp4gemm"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
