"""The rules that tell weights of linear layers by names, shapes and config.json alone.

A tensor is the weight of a linear layer if its name ends in ".weight", it has two dimensions (n, k), it is
bf16, fp16 or fp32, and none of the rules of :func:`why_kept` says that it is something else. Experts that are
stored as one tensor (g, n, k) are weights too, by their names :data:`STACKED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _checks

__all__ = [
    "SELECTABLE",
    "STACKED",
    "Facts",
    "is_expert_weight",
    "layer_number",
    "stored_transposed",
    "why_kept",
    "why_shape",
]

FLOATS = ("BF16", "F16", "F32")
N_STEP = 8  # what a product needs (docs/api.md)
OUTPUTS = {"lm_head", "embed_out"}
EMBEDDING = re.compile(r"emb|^wte$|^wpe$|_bias$|_table$")  # T5's relative_attention_bias is one too
NORM = re.compile(r"norm|^ln_|_ln$|^ln$")
ROUTER = re.compile(r"router|^gate$|^wg$|_gate$|gating")
# Mamba's kernels read the weight of this layer and add its bias themselves.
READ_DIRECTLY = {"dt_proj"}
# torch.nn.MultiheadAttention stacks q, k and v in this parameter, and reads the weight of out_proj itself.
IN_PROJ = ".in_proj_weight"
# Models whose layers of these names store (k, n), as the Conv1D of transformers does.
CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"}
CONV1D = {"c_attn", "c_fc", "c_proj", "q_attn"}
TRANSPOSED = "it is stored (k, n), as Conv1D does"
# Experts as one tensor for each layer: (g, n, k), or (g, k, n) in some models.
STACKED = re.compile(r"(?:^|\.)experts\.(gate_up_proj|down_proj)(\.weight)?$")
EXPERT_MARKS = (".experts.", ".shared_experts.")
EXPERT_ENDS = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}
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
    parts = module.split(".")
    last = parts[-1]
    if STACKED.search(name):
        return "" if len(shape) == 3 else f"it has {len(shape)} dimensions, must be 3 for stacked experts"
    if last in OUTPUTS or module == "output":
        return "output embedding"
    if EMBEDDING.search(last):
        return "embedding"
    if NORM.search(last):
        return "norm"
    if len(shape) < 2:
        return "vector"
    if ROUTER.search(last) or any("router" in part for part in parts):
        return "router"
    if shape[0] in facts.vocab_sizes and ".layers." not in name:
        return "embedding, by its rows"
    if not is_weight:
        return "its use is not known, since its name does not end in .weight"
    if len(shape) != 2:
        return f"it has {len(shape)} dimensions, as the weight of no linear layer"
    if last in READ_DIRECTLY or (last == "out_proj" and module.rpartition(".")[0] in facts.attentions):
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


def why_shape(dtype: str, n: int, k: int) -> str:
    """Why a weight (n, k) cannot be NVFP4, in words; "" if it can."""
    if dtype not in FLOATS:
        return f"its dtype is {dtype}, must be {_checks.listing(FLOATS)}"
    if k == 0 or k % _checks.K_STEP_MM:
        return f"k is {k}, must be a positive multiple of {_checks.K_STEP_MM}"
    if n == 0 or n % N_STEP:
        return f"n is {n}, must be a positive multiple of {N_STEP}"
    return ""


def is_expert_weight(name: str) -> bool:
    """Whether ``experts_only`` converts the tensor: a projection of routed or shared experts, by its name."""
    module = name.removesuffix(".weight")
    return any(mark in name for mark in EXPERT_MARKS) and module.rpartition(".")[2] in EXPERT_ENDS


def layer_number(name: str, facts: Facts) -> int | None:
    """The number of the layer that a tensor belongs to; None outside of the numbered layers."""
    if not facts.layers or not name.startswith(facts.layers):
        return None
    match = NUMBERED.match(name)
    return int(match[2]) if match and match[1] == facts.layers else None
