"""Options of the plug-ins, and where their values come from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ... import _checks, patterns
from ...recipe import DATA_FREE, DataFree, TokenCast, checked_activations

__all__ = ["PREFIX", "Options"]

PREFIX = "FP4GEMM_SERVING_"  # the prefix of the environment variables
ActivationsKind = Literal["checkpoint", "auto", "per-token", "static", "fp8", "a16"]
ActivationsOption = ActivationsKind | TokenCast
_FALSE, _TRUE = ("0", "false", "off", "no"), ("1", "true", "on", "yes")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of serving that a user may set.

    Every field is an environment variable, ``FP4GEMM_SERVING_`` and the name in capitals, which the processes
    of an engine inherit: ``FP4GEMM_SERVING_ACTIVATIONS=a16``. vLLM also has
    ``--additional-config '{"fp4gemm": {"activations": "a16"}}'``, which wins.

    Args:
        enabled: False: the plug-in does nothing.
        activations: "checkpoint": a checkpoint of W4A4 gets one amax for each token, whatever its
            ``input_scale`` is, one of W4A16 keeps its activations in 16 bits, and one that
            ``convert --activations fp8`` wrote gets FP8 tokens. Options of the cast that a checkpoint of this
            library names are kept. "per-token", with options or without, "fp8" and "a16" say so for every
            checkpoint; "auto" chooses one of them by the device (:func:`fp4gemm.recipe.automatic`), and the
            log says which. "static": W4A4 checkpoints keep the scale that they hold; the experts of
            mixtures, and checkpoints of W4A16, which hold none, are refused then. FP8 tokens on a device
            that does not multiply them, or with a k that is no multiple of 64, are refused.
        ignore: patterns (:mod:`fp4gemm.patterns`) of layers that the engine keeps for itself, by their names
            in the engine; in the environment they are separated by commas.
        method: how bf16 weights are rounded by ``--quantization fp4gemm``, as of
            :meth:`fp4gemm.nn.Linear.from_float`.
        batch_invariant: the bits of a token do not depend on the other tokens of the batch, as
            :func:`fp4gemm.mm` defines it. vLLM's ``VLLM_BATCH_INVARIANT=1`` sets it too.
        use_fast_accum: as of :func:`fp4gemm.mm`, for the layers whose inputs become FP8 tokens; all others
            sum in float32. It is refused with activations that never are FP8 tokens.
        rounded_gate: experts with SwiGLU round gate and up first, as training does and as
            :class:`fp4gemm.nn.Experts` with this option; other experts have no such choice. It takes longer.

    Raises:
        TypeError, ValueError: a field has another type or value; the text names it.
    """

    enabled: bool = True
    activations: ActivationsOption = "checkpoint"
    ignore: str | Sequence[str] = ()
    method: DataFree = "four-over-six"
    batch_invariant: bool = False
    use_fast_accum: bool = False
    rounded_gate: bool = False

    def __post_init__(self) -> None:
        _checks.is_bool("enabled", self.enabled)
        _checks.is_bool("batch_invariant", self.batch_invariant)
        _checks.is_bool("use_fast_accum", self.use_fast_accum)
        _checks.is_bool("rounded_gate", self.rounded_gate)
        known = checked_activations(self.activations, get_args(ActivationsKind))
        object.__setattr__(self, "activations", known)
        _checks.is_one_of("method", self.method, DATA_FREE)
        if self.use_fast_accum and self.activations not in ("checkpoint", "auto", "fp8"):
            raise ValueError(
                f"use_fast_accum: got True with activations {self.activations!r}, must be False unless they "
                "are 'fp8', 'auto' or 'checkpoint'"
            )
        object.__setattr__(self, "ignore", patterns.texts("ignore", self.ignore))

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None = None) -> Options:
        """The options of the environment, with ``overrides`` in place of some of them.

        Raises:
            TypeError, ValueError: naming the variable or the field, its value, and what it must be.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, field in fields.items():
            text = os.environ.get(PREFIX + name.upper())
            if text is None:
                continue
            if isinstance(field.default, bool):
                values[name] = _boolean(PREFIX + name.upper(), text)
            elif isinstance(field.default, tuple):
                values[name] = tuple(part.strip() for part in text.split(",") if part.strip())
            else:
                values[name] = text
        if overrides is not None:
            if not isinstance(overrides, Mapping):
                raise TypeError(f"fp4gemm: got {_checks.describe(overrides)}, must be a mapping of options")
            for name in overrides:
                if name not in fields:
                    raise ValueError(
                        f"fp4gemm: got the option {name!r}, must be {_checks.listing(list(fields))}"
                    )
            values |= overrides
        return cls(**values)

    def ignores(self, name: str) -> bool:
        """Whether the engine keeps the layer of this name."""
        return any(patterns.matches(pattern, name) for pattern in self.ignore)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in _FALSE + _TRUE:
        raise ValueError(f"{name}: is {text!r}, must be 1 or 0")
    return text.lower() in _TRUE
