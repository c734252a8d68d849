"""Containers as pytree nodes: the tensors are the leaves, the plain numbers are the context."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from ._base import Container


def register(cls: type[Container]) -> None:
    """Register a subclass of Container.

    An optional tensor that is None is not a leaf. The context is (constants, names of the leaves).
    """

    def flatten(t: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, context = flatten_with_keys(t)
        return [leaf for _, leaf in leaves], context

    def flatten_with_keys(t: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        names = (*cls._tensors, *(name for name in cls._optional if getattr(t, name) is not None))
        leaves = [(pytree.GetAttrKey(name), getattr(t, name)) for name in names]
        return leaves, (tuple(getattr(t, name) for name in cls._constants), names)

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        constants, names = context
        fields: dict[str, Any] = dict.fromkeys(cls._optional)
        fields |= zip(cls._constants, constants, strict=True)
        return cls._assembled(fields | dict(zip(names, leaves, strict=True)))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"fp4gemm.{cls.__name__}",
        to_dumpable_context=lambda context: [[_dumpable(value) for value in part] for part in context],
        from_dumpable_context=lambda context: tuple(tuple(map(_loaded, part)) for part in context),
        flatten_with_keys_fn=flatten_with_keys,
    )


def _dumpable(value: Any) -> Any:
    """A value that json accepts: the name of a dtype, a list for a tuple."""
    return str(value) if isinstance(value, torch.dtype) else value


def _loaded(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return torch.Size(value) if isinstance(value, list) else value
