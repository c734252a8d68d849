"""convert_model and set_recipe: layers and experts of a model train by a recipe, with the same parameters."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch.nn.parameter import is_lazy

from .. import _checks, patterns
from ..models import moe, select
from ..models.report import FloatWeight, Row, table
from ..models.select import float_weights, kept_by_default
from ..nn._classes import become
from ..patterns import Filter, Pattern
from . import stacked_experts
from .cache import WeightCache
from .functional import STEP
from .linear import GroupedLinear, Linear, RecipeLayer, check_layer
from .recipe import PRESETS, Recipe, resolve

__all__ = ["ConversionReport", "ConvertedLayer", "convert_model", "set_recipe"]

_A_RECIPE = "an fp4gemm.training.Recipe, a name of PRESETS"
MAX_NAMES = 4  # how many layers a warning names
Action = Literal["converted", "shared", "excluded", "skipped"]
RecipeLike = Recipe | str | Callable[[str], Recipe | str | None]


@dataclass(frozen=True)
class ConvertedLayer:
    """The result of a conversion for one linear layer, or one module of experts of transformers.

    Attributes:
        name: qualified name in the model.
        shape: (out_features, in_features); for experts the shape of their first stack, as it is stored.
        action: "converted"; "shared": the same module as one listed before; "excluded": by filter, by the
            recipe function, by keep_last or by default; "skipped": it could not be converted.
        reason: why, in words; "" for an ordinary "converted".
        recipe: what the layer trains by; None unless it was converted.
        num_bytes: the bytes of its parameters; 0 for a name whose module was listed before.
    """

    name: str
    shape: tuple[int, ...]
    action: Action
    reason: str
    recipe: Recipe | None
    num_bytes: int


@dataclass(frozen=True)
class ConversionReport:
    """Every layer, module of experts and other parameter of a converted model. ``str()`` is a table.

    Attributes:
        layers: one ConvertedLayer for each name of a torch.nn.Linear or module of experts, in model order.
        weights: every other parameter, which stays as it is.
    """

    layers: tuple[ConvertedLayer, ...]
    weights: tuple[FloatWeight, ...]

    def names(self, action: Action) -> list[str]:
        """The names of the layers with this action."""
        return [layer.name for layer in self.layers if layer.action == action]

    @property
    def percent_converted(self) -> float:
        """The share of the bytes of all parameters that is in converted layers, 0 to 100."""
        converted = sum(layer.num_bytes for layer in self.layers if layer.action == "converted")
        others = sum(weight.num_bytes for weight in self.weights)
        return 100 * converted / max(sum(layer.num_bytes for layer in self.layers) + others, 1)

    def __str__(self) -> str:
        rows: list[Row] = []
        for x in self.layers:
            size, how = " x ".join(map(str, x.shape)), x.reason or _named(x.recipe)
            rows.append((x.name, size, x.action, how, x.num_bytes, x.num_bytes))
        rows += [(w.name, w.size, "float", w.reason, w.num_bytes, w.num_bytes) for w in self.weights]
        lines = table(rows)
        for what, is_experts in (("linear layers", False), ("modules of experts", True)):
            actions = Counter(x.action for x in self.layers if (len(x.shape) != 2) == is_experts)
            if actions or not is_experts:
                shown = ", ".join(f"{actions[action]} {action}" for action in sorted(actions)) or "none"
                lines.append(f"{actions.total()} {what} ({shown})")
        lines.append(f"{self.percent_converted:.1f} % of the parameters' bytes are in converted layers")
        return "\n".join(lines)


def convert_model(
    model: torch.nn.Module, recipe: RecipeLike, *, filter: Filter | None = None, keep_last: float = 0.0
) -> ConversionReport:
    """Let a model train by a recipe: linear layers become :class:`Linear`, experts :class:`StackedExperts`.

    Experts are the modules of transformers 5 whose weights are 3-D parameters, ``gate_up_proj`` and
    ``down_proj``, transposed or not (Qwen3-MoE, Mixtral, GPT-OSS and about fifty other classes). The modules
    change their class in place. Modules, parameters, names, hooks and the state_dict stay the same, so that
    an optimizer that was made before stays valid and checkpoints interchange. Convert before torch.compile;
    DistributedDataParallel and FSDP2 may wrap the model before or after.

    By default two kinds of layers stay as they are, as in :func:`fp4gemm.models.quantize_model`: output
    embeddings (``get_output_embeddings()``, lm_head, embed_out or a top-level output, a layer that shares the
    weight of a torch.nn.Embedding) and the routers of experts. A layer that is converted already gets the new
    recipe.

    Args:
        model: any module with such layers, or one of them; float32, bfloat16 or float16.
        recipe: a :class:`Recipe`, the name of one of PRESETS, or a function of a layer's qualified name that
            returns one of these, or None for a layer that is left.
        filter: convert only what it matches, output embeddings and routers too; None is all but these. A
            pattern of names (:mod:`fp4gemm.patterns`), a compiled regular expression, a callable ``(name,
            module) -> bool``, or a sequence of these, any of which may match.
        keep_last: the fraction of the model's blocks, the last ones, that stays as it is, 0 to 1; 0.15 is
            what NVIDIA's recipe for pretraining does. It is rounded up to whole blocks. The blocks are those
            of the torch.nn.ModuleList that holds the most layers. A filter does not overrule it.

    Returns:
        ConversionReport, which accounts for every layer and parameter. Layers that do not fit are skipped
        and named in a warning: features that are no multiple of 32, another dtype, a subclass of
        torch.nn.Linear, a forward that was replaced, an owner that reads the weight by itself, experts that
        end in a norm.

    Raises:
        TypeError, ValueError: naming the argument; filter matches no layer, or the model has none. The model
            is then unchanged. Does not synchronise.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    chosen = chooser(recipe)
    given = patterns.checked("filter", filter)
    found = _layers(model)
    if not found:
        raise ValueError("model: has no torch.nn.Linear and no experts of transformers, must have one")
    last = {id(module): "in the last blocks (keep_last)" for module in _last_modules(model, keep_last)}
    if given is None:
        why = "left unless filter matches it"
        kept = {number: f"{reason}, {why}" for number, reason in kept_by_default(model).items()}
    else:
        kept = {id(m): "not matched by filter" for m, names in found if not _is_matched(given, m, names)}
        if len(kept) == len(found):
            where = f"none of the {len(found)} layers, such as {found[0][1][0]!r}"
            raise ValueError(f"filter: {patterns.shown(given)} matches {where}")
    plans = [_plan(model, module, names, kept | last, chosen) for module, names in found]
    others = float_weights(model, (), [module for module, _ in found])
    layers: list[ConvertedLayer] = []
    for (module, names), (action, reason, wanted) in zip(found, plans, strict=True):
        if wanted is not None:
            _convert(module, wanted)
        num_bytes = sum(p.nbytes for p in module.parameters(recurse=False) if not is_lazy(p))
        shape = _shape(module)
        layers.append(ConvertedLayer(names[0], shape, action, reason, wanted, num_bytes))
        for name in names[1:]:
            shared: Action = "shared" if action == "converted" else action
            layers.append(ConvertedLayer(name, shape, shared, f"same module as {names[0]}", wanted, 0))
    skipped = [f"{x.name!r} ({x.reason})" for x in layers if x.action == "skipped"]
    if skipped:
        more = "" if len(skipped) <= MAX_NAMES else f" and {len(skipped) - MAX_NAMES} more"
        shown = "; ".join(skipped[:MAX_NAMES])
        warnings.warn(f"convert_model: skipped {shown}{more}; filter leaves them out", stacklevel=2)
    return ConversionReport(tuple(layers), others)


def set_recipe(model: torch.nn.Module, recipe: RecipeLike) -> list[str]:
    """Let the layers of a converted model train by another recipe from now on, in the middle of a run too.

    Args:
        model: has :class:`Linear`, :class:`GroupedLinear` or :class:`StackedExperts` modules, in an
            :class:`fp4gemm.training.MoE` too.
        recipe: as for :func:`convert_model`; a function that returns None leaves a layer's recipe. "bf16"
            makes the layers torch's.

    Returns:
        The names of the layers whose recipe was assigned.

    Raises:
        TypeError, ValueError: naming the argument; the model has no such layer. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    chosen = chooser(recipe)
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, RecipeLayer))
    wanted = [(name, layer, chosen(name)) for name, layer in layers]
    if not wanted:
        raise ValueError("model: has no fp4gemm.training layer, must have one; use convert_model first")
    for name, layer, new in wanted:
        if new is None:
            continue
        try:
            check_layer(layer.in_features, layer.out_features, True, None, None, new)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    for _, layer, new in wanted:
        if new is not None:
            layer.recipe = new
    return [name for name, _, new in wanted if new is not None]


def layers_of(model: torch.nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """The layers of this package with a ``weight`` in a model, each once, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, (Linear, GroupedLinear)):
            yield name, module


def chooser(recipe: RecipeLike) -> Callable[[str], Recipe | None]:
    """A function from a layer's name to its recipe; a recipe that is not a function is checked at once."""
    if isinstance(recipe, (Recipe, str)):
        same = resolve(recipe)
        return lambda name: same
    if not callable(recipe):
        raise TypeError(
            f"recipe: got {_checks.describe(recipe)}, must be {_A_RECIPE} or a function of the layer's name"
        )

    def chosen(name: str) -> Recipe | None:
        got = recipe(name)
        if got is not None and not isinstance(got, (Recipe, str)):
            raise TypeError(
                f"recipe({name!r}): returned {_checks.describe(got)}, must be {_A_RECIPE} or None"
            )
        return None if got is None else resolve(got)

    return chosen


def _is_layer(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or moe.is_experts(module)


def _layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str]]]:
    """Every torch.nn.Linear and module of experts once, with all of its names, in model order."""
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_layer(module):
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def _last_modules(model: torch.nn.Module, keep_last: object) -> list[torch.nn.Module]:
    """The modules in the last blocks, of which there are the fraction ``keep_last``."""
    if isinstance(keep_last, bool) or not isinstance(keep_last, (int, float)):
        raise TypeError(f"keep_last: got {_checks.describe(keep_last)}, must be a number from 0 to 1")
    if not 0 <= keep_last <= 1:
        raise ValueError(f"keep_last: got {keep_last}, must be from 0 to 1")
    if keep_last == 0:
        return []
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and _num_layers(m)]
    if not lists:
        raise ValueError(
            f"keep_last: got {keep_last}, must be 0 for a model without a torch.nn.ModuleList of blocks"
        )
    largest = max(range(len(lists)), key=lambda i: _num_layers(lists[i]))  # the outermost comes first
    blocks = list(lists[largest])
    num_kept = math.ceil(keep_last * len(blocks) - 1e-9)  # 0.15 * 20 is above 3 in binary
    return [m for block in blocks[len(blocks) - num_kept :] for m in block.modules()]


def _num_layers(module: torch.nn.Module) -> int:
    return sum(map(_is_layer, module.modules()))


def _is_matched(given: list[Pattern], module: torch.nn.Module, names: list[str]) -> bool:
    return any(patterns.matches(pattern, name, module) for pattern in given for name in names)


def _plan(
    model: torch.nn.Module,
    module: torch.nn.Module,
    names: list[str],
    kept: dict[int, str],
    chosen: Callable[[str], Recipe | None],
) -> tuple[Action, str, Recipe | None]:
    """The action for a layer, the reason, and the recipe of the layer if it is converted."""
    if id(module) in kept:
        return "excluded", kept[id(module)], None
    recipe = chosen(names[0])
    if recipe is None:
        return "excluded", "recipe returned None", None
    places = [name.rpartition(".") for name in names if name]
    if not isinstance(module, torch.nn.Linear):
        reason = stacked_experts.why_not(module)
        return ("skipped", reason, None) if reason else ("converted", "", recipe)
    reason = _why_not(module, [(model.get_submodule(owner), child) for owner, _, child in places])
    return ("skipped", reason, None) if reason else ("converted", "", recipe)


def _why_not(linear: torch.nn.Linear, places: list[tuple[torch.nn.Module, str]]) -> str:
    """Why the layer, a child of these owners under these names, cannot be converted; "" if it can."""
    if type(linear) not in (torch.nn.Linear, Linear):
        return f"its type is {type(linear).__name__}, must be torch.nn.Linear itself"
    for owner, child in places:
        if select.reads_weight(owner, child):
            return f"its owner {type(owner).__name__} reads the weight directly"
    if "forward" in vars(linear):
        return "its forward was replaced on the module, by a hook of accelerate for example"
    for size in ("in_features", "out_features"):
        if getattr(linear, size) % STEP:
            return f"{size} is {getattr(linear, size)}, must be a multiple of {STEP}"
    if linear.weight.dtype not in _checks.FLOAT_DTYPES:
        return f"dtype is {linear.weight.dtype}, must be {_checks.listing(_checks.FLOAT_DTYPES)}"
    return ""


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """ConvertedLayer.shape of a linear layer or of experts."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    stacks = (p for p in module.parameters(recurse=False) if p.dim() == 3)
    return next((tuple(stack.shape) for stack in stacks), ())


def _convert(module: torch.nn.Module, recipe: Recipe) -> None:
    """Let the module itself train by a recipe."""
    if not isinstance(module, torch.nn.Linear):
        stacked_experts.convert(module, recipe)
        return
    if not isinstance(module, Linear):
        become(module, Linear, _recipe=recipe, cache=WeightCache())
    cast(Linear, module).recipe = recipe


def _named(recipe: Recipe | None) -> str:
    """The name of a preset, or what a reader of the report can tell a recipe by."""
    if recipe is None:
        return ""
    return next((name for name, preset in PRESETS.items() if preset == recipe), "a recipe of its own")
