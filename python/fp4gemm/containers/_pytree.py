"""How a container becomes a pytree node: its tensors are the leaves, its plain numbers the context."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree


def register(
    cls: Any, tensors: tuple[str, ...], constants: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Register ``cls``, of which ``_trusted`` takes all these fields by name.

    An ``optional`` tensor that is None is no leaf; the context is (constants, names of the leaves).
    """

    def names(t: Any) -> tuple[str, ...]:
        return (*tensors, *(name for name in optional if getattr(t, name) is not None))

    def context(t: Any) -> tuple[Any, ...]:
        return tuple(getattr(t, name) for name in constants), names(t)

    def tuples(value: Any) -> Any:  # json makes lists of them
        return tuple(map(tuples, value)) if isinstance(value, (list, tuple)) else value

    def flatten(t: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(t, name) for name in names(t)], context(t)

    def flatten_with_keys(t: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(pytree.GetAttrKey(name), getattr(t, name)) for name in names(t)], context(t)

    def unflatten(leaves: Any, about: tuple[Any, ...]) -> Any:
        values, present = about
        parts = dict(zip(present, leaves, strict=True))
        return cls._trusted(**parts, **dict(zip(constants, values, strict=True)))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"fp4gemm.{cls.__name__}",
        to_dumpable_context=lambda about: [list(part) for part in about],
        from_dumpable_context=tuples,
        flatten_with_keys_fn=flatten_with_keys,
    )
