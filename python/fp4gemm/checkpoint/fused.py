"""Fused sets: the layers that share an amax because serving engines join them along n."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .errors import CheckpointError
from .source import TensorInfo

__all__ = ["partners"]

# A layer of a fused set that stands without its partners in some architectures: alone in the whole checkpoint
# (MLPs without a gate), or beside another layer that takes the place of the partners (attention with
# latents).
UNGATED = {"up_proj": "gate_proj", "w1": "w3"}
BESIDE = {"q_proj": ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa": ("q_proj",), "wkv_a_with_mqa": ("wq",)}


def partners(
    quantized: Iterable[str],
    infos: Mapping[str, TensorInfo],
    kept: dict[str, str],
    by_user: Collection[str],
    fuse: Sequence[Sequence[str]],
) -> list[tuple[str, ...]]:
    """The names of weights in sets that share an amax, most of them alone.

    A set of which a layer stays because of its size stays altogether, and is added to ``kept``.

    Args:
        quantized: the weights, names that end in ".weight".
        infos: every tensor of the checkpoint.
        kept: the tensors that stay, with the reason.
        by_user: those of them that a pattern keeps.
        fuse: the sets of names of children.

    Raises:
        CheckpointError: a partner is missing in the checkpoint, a pattern keeps it, or its dtype or k is
            another one.
    """
    set_of = {child: names for names in fuse for child in names}
    children = {name.removesuffix(".weight").rpartition(".")[2] for name in infos if name.endswith(".weight")}
    made: list[tuple[str, ...]] = []
    done: set[str] = set()
    for name in quantized:
        if name in done:
            continue
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        names = [name]
        if child in set_of and not _stands_alone(child, parent, infos, children):
            names = [f"{parent}.{other}.weight".lstrip(".") for other in set_of[child]]
            _check(names, infos, kept, by_user)
        done.update(names)
        stays = [other for other in names if other in kept]
        if stays:
            for other in names:
                kept.setdefault(other, f"its partner {stays[0]} stays: {kept[stays[0]]}")
        else:
            made.append(tuple(names))
    return made


def _stands_alone(child: str, parent: str, infos: Mapping[str, TensorInfo], children: set[str]) -> bool:
    if child in UNGATED:
        return UNGATED[child] not in children
    return any(f"{parent}.{other}.weight" in infos for other in BESIDE.get(child, ()))


def _check(
    names: list[str],
    infos: Mapping[str, TensorInfo],
    kept: Mapping[str, str],
    by_user: Collection[str],
) -> None:
    missing = [name for name in names if name not in infos]
    here = ", ".join(name for name in names if name in infos and name not in by_user)
    if missing:
        raise CheckpointError(
            f"{missing[0]}: is missing, the partner of {here}, with which it shares an amax; "
            "fuse names the sets (--fuse none: no layer shares one)"
        )
    excluded = [name for name in names if name in by_user]
    if excluded:
        raise CheckpointError(
            f"{excluded[0]}: stays ({kept[excluded[0]]}), but its partner {here} is quantized; a fused layer "
            "has one dtype, so select all of the set or none (--fuse none: no layer is fused)"
        )
    if len({infos[name].dtype for name in names if name not in kept}) > 1:
        dtypes = ", ".join(f"{name} {infos[name].dtype}" for name in names)
        raise CheckpointError(f"{dtypes}: have unequal dtypes, must have one dtype to share an amax")
    if len({infos[name].shape[-1] for name in names if name not in kept}) > 1:
        shapes = ", ".join(f"{name} {infos[name].shape}" for name in names)
        raise CheckpointError(f"{shapes}: have unequal k, must have one k to share an amax")
