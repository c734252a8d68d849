"""The rules that tell weights of linear layers by names, shapes and config.json alone.

A tensor is the weight of a linear layer if its name ends in ".weight", it has two dimensions (n, k), it is
bf16, fp16 or fp32, and none of the rules of :func:`why_kept` says that it is something else. Experts that are
stored as one tensor (g, n, k) are weights too. Layers that serving engines join along n are a fused set,
whose weights share an amax (:func:`partners`). What names mean is in ``fp4gemm/_names.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _checks, _names
from ..recipe import INPUTS, StoredActivations
from .source import CheckpointError, TensorInfo

__all__ = ["Facts", "partners", "stored_transposed", "why_kept", "why_shape"]

FLOATS = ("BF16", "F16", "F32")
N_STEP = 8  # what a product needs (docs/api.md)
EMBEDDING = re.compile(r"emb|^wte$|^wpe$|_bias$|_table$")  # T5's relative_attention_bias is one too
NORM = re.compile(r"norm|^ln_|_ln$|^ln$")
# torch.nn.MultiheadAttention stacks q, k and v in this parameter, and reads the weight of out_proj itself.
IN_PROJ = ".in_proj_weight"
# Models whose layers of these names store (k, n), as the Conv1D of transformers does.
CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"}
CONV1D = {"c_attn", "c_fc", "c_proj", "q_attn"}
TRANSPOSED = "it is stored (k, n), as Conv1D does"
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # the language model of a config
# What ``include`` selects too: linear layers that stay unless they are named.
SELECTABLE = {"output embedding", "router", "embedding, by its rows"}
NUMBERED = re.compile(r"^(.*?\.|)(\d+)\.")


@dataclass(frozen=True)
class Facts:
    """The facts that the rules read in config.json and in all names.

    Attributes:
        model_type: as transformers names it, or "".
        vocab_sizes: rows of embeddings and of output embeddings.
        num_layers: how many layers the model has; 0 if that is not known.
        layers: the prefix of these layers, such as "model.layers.".
        attentions: the modules that are a torch.nn.MultiheadAttention, told by their ``in_proj_weight``.
    """

    model_type: str
    vocab_sizes: frozenset[int]
    num_layers: int
    layers: str
    attentions: frozenset[str]

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str]) -> Facts:
        """The facts of a model; parts of its configuration, such as text_config, count too."""
        inner = {key: value for key, value in config.items() if isinstance(value, Mapping)}
        parts = [config, *(inner[key] for key in sorted(inner, key=lambda key: (key not in TEXT, key)))]

        def numbers(key: str) -> list[int]:
            return [part[key] for part in parts if isinstance(part.get(key), int)]

        counts: dict[str, set[int]] = {}
        attentions = set()
        for name in names:
            if name.endswith(IN_PROJ):
                attentions.add(name.removesuffix(IN_PROJ))
            match = NUMBERED.match(name)
            if match:
                counts.setdefault(match[1], set()).add(int(match[2]))
        stated = numbers("num_hidden_layers") or numbers("n_layer") or numbers("num_layers")
        language = stated[0] if stated else 0  # a vision tower may have more layers

        def rank(prefix: str) -> tuple[bool, bool, int, str]:
            number = len(counts[prefix])
            return number == language, prefix.endswith("layers."), number, prefix

        layers = max(counts, key=rank, default="")
        found = max(counts[layers], default=-1) + 1 if counts else 0
        return cls(
            str(config.get("model_type", "")),
            frozenset(numbers("vocab_size")) - {0},
            stated[0] if stated and stated[0] <= found else found,
            layers,
            frozenset(attentions),
        )


def why_kept(name: str, shape: Sequence[int], facts: Facts) -> str:
    """Why a tensor is not the weight of a linear layer, in words; "" if it is one.

    "vector": one dimension. "embedding" and "output embedding": by the name, or as many rows as the
    vocabulary has entries. "norm" and "router" (or the gate of shared experts): by the name. The others stay
    because they are not known to be the weight of a linear layer.
    """
    module, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
    last = module.rpartition(".")[2]
    if _names.stack_of(module):
        return "" if len(shape) == 3 else f"it has {len(shape)} dimensions, must be 3 for stacked experts"
    if _names.is_output(module):
        return "output embedding"
    if EMBEDDING.search(last):
        return "embedding"
    if NORM.search(last):
        return "norm"
    if len(shape) < 2:
        return "vector"
    if _names.is_router(module):
        return "router"
    if shape[0] in facts.vocab_sizes and ".layers." not in name:
        return "embedding, by its rows"
    if not is_weight:
        return "its use is not known, since its name does not end in .weight"
    if len(shape) != 2:
        return f"it has {len(shape)} dimensions, as the weight of no linear layer"
    if last in _names.READ_DIRECTLY or (last == "out_proj" and module.rpartition(".")[0] in facts.attentions):
        return "its model reads the float weight directly"
    if facts.model_type in CONV1D_MODELS and last in CONV1D:
        return TRANSPOSED
    return ""


def stored_transposed(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """The weights that are stored (k, n) as their biases show, which have n elements.

    A square weight does not show it, so every layer with a name of Conv1D is one if another such layer is.
    """
    linear = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    found = set()
    for name, (rows, columns) in linear.items():
        if rows != columns and tuple(shapes.get(f"{name.removesuffix('.weight')}.bias", ())) == (columns,):
            found.add(name)
    if any(_child(name) in CONV1D for name in found):
        found |= {name for name in linear if _child(name) in CONV1D}
    return found


def _child(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def why_shape(dtype: str, n: int, k: int, activations: StoredActivations) -> str:
    """Why a weight (n, k) cannot be NVFP4 beside such inputs, in words; "" if it can."""
    if dtype not in FLOATS:
        return f"its dtype is {dtype}, must be {_checks.listing(FLOATS)}"
    step = _checks.FP8_STEP if INPUTS[activations].tokens == "fp8" else _checks.K_STEP_MM
    if k == 0 or k % step:
        return f"k is {k}, must be a positive multiple of {step}"
    if n == 0 or n % N_STEP:
        return f"n is {n}, must be a positive multiple of {N_STEP}"
    return ""


def is_expert_weight(name: str) -> bool:
    """Whether ``experts_only`` converts the tensor: a projection of routed or shared experts, by its name."""
    return _names.is_expert_layer(name.removesuffix(".weight"))


def layer_number(name: str, facts: Facts) -> int | None:
    """The number of the layer that a tensor belongs to; None outside of the numbered layers."""
    if not facts.layers or not name.startswith(facts.layers):
        return None
    match = NUMBERED.match(name)
    return int(match[2]) if match and match[1] == facts.layers else None


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
    """Whether a layer has no partners: in an MLP without a gate, or beside a layer that takes their place."""
    without_gate = _names.missing_partners()
    if child in without_gate:
        return without_gate[child] not in children
    return any(f"{parent}.{other}.weight" in infos for other in _names.BESIDE.get(child, ()))


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
