"""Converters that pass stored NVFP4 weights and float weights from the loader of transformers to fp4gemm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from ._plan import ANCHOR, Plan

__all__ = ["FillStored", "QuantizeFloat", "StoredConverter"]

NOTHING = r"^(?!)"  # a pattern that matches no name


class StoredConverter(WeightConverter):
    """Collects the stored tensors of a module, by the table of a plan instead of by patterns.

    The loader copies the converter for each tensor. Collected tensors keep the names that they have in the
    checkpoint.
    """

    def __init__(self, plan: Plan, operation: FillStored) -> None:
        super().__init__(NOTHING, ANCHOR, [operation])
        self.plan = plan

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredConverter:
        return StoredConverter(self.plan, self.operations[0])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        target = self.plan.targets.get(source_key)
        return (source_key, None) if target is None else (target, self.source_patterns[0])

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        self.collected_tensors[source_key].append(future)
        self.layer_targets[target_key].add(source_key)

    def was_used(self) -> bool:
        """Return False: on saving, the loader would undo a used converter, which _save.py does instead."""
        return False


class _Operation(ConversionOps):
    """An operation of a quantizer, which the loader must not copy with its converter."""

    def __init__(self, quantizer: Any) -> None:
        self.hf_quantizer = quantizer  # transformers 5.23 casts no tensor of an operation with this attribute

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class FillStored(_Operation):
    """The stored tensors of a module -> its buffers."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {name: _one(value) for name, value in input_dict.items()}
        input_dict.clear()
        made: dict[str, Tensor] = self.hf_quantizer.fill(full_layer_name, tensors)
        return made


class QuantizeFloat(_Operation):
    """A float weight of a layer that is to be quantized -> the quantized layer in the model."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        rest = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            if self.hf_quantizer.take(model, name, _one(value)):
                missing_keys.discard(name)
            else:
                rest[name] = value
        return rest


def _one(value: Any) -> Tensor:
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor
