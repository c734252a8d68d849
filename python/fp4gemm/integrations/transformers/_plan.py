"""The plan by which the NVFP4 weights of a checkpoint fill the modules of a model.

Names of a checkpoint become names of a model by transformers' own renamings, which also differ from version
to version. They are applied here to each name as the loader of transformers will apply them, and what comes
out is looked up in a table: no name is matched by a pattern that might also match another one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

from ... import _names, nn
from ...checkpoint.formats import (
    LAYERS,
    FormatName,
    LayerName,
    SourceFormat,
    Stack,
    StoredLayer,
    StoredWeight,
)
from ...checkpoint.formats.base import RESIDUAL
from ...checkpoint.stacked import rounding
from ...containers.interop import MXFP4Report
from ...containers.nvfp4 import NVFP4Tensor
from ...models import moe
from ...nn import _formats as weights
from ...nn._formats import BOUND, CODES
from ...nn._inputs import OUT_STEP
from ...nn._weight import RESIDUAL as CHANNELS
from ...nn.experts import StackedWeight
from ...quantize import repeat_columns
from ...recipe import INPUTS, RESIDUAL_KINDS, LayerActivations, StoredActivations
from ._stored import StoredModule, refuse

__all__ = [
    "ANCHOR",
    "Fill",
    "FillFloat",
    "FillStack",
    "Plan",
    "about_dequantized",
    "make_plan",
    "make_plan_of_stacks",
    "swap",
]

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
ANCHOR = CODES  # the tensor of a module to whose name all of its stored tensors are collected


class Fill(NamedTuple):
    """The tensors of a checkpoint that fill one quantized weight of the model.

    Attributes:
        module: the name of the module that holds it: a Linear, or w13 or w2 of Experts.
        shards: the names in the checkpoint; one tuple for the rows, or two for gate and up, whose rows
            alternate. A tuple has one name for a matrix, and one for each expert for a stack.
        is_stack: whether it is a stack.
        is_per_row: whether the module has an amax for each row: gate and up may have different ones.
        has_bias: whether each shard has a bias.
        layer: the format of LAYERS that the matrices have; None: NVFP4.
    """

    module: str
    shards: tuple[tuple[str, ...], ...]
    is_stack: bool
    is_per_row: bool
    has_bias: bool
    layer: LayerName | None = None


class FillStack(NamedTuple):
    """The tensors of a format of SOURCES that fill one weight of the model.

    Attributes:
        module: w13 or w2 of Experts. The rows of both have the order of its rows.
        stack: the names of the tensors.
        source: their format.
        is_kept: whether the weight stays in that format; else it becomes NVFP4.
    """

    module: str
    stack: Stack
    source: SourceFormat
    is_kept: bool

    @property
    def is_per_row(self) -> bool:
        return True

    @property
    def has_bias(self) -> bool:
        return bool(self.stack.bias)


class FillFloat(NamedTuple):
    """The tensors of a layer in a format of LAYERS, whose values fill a linear layer that stays in float.

    Attributes:
        module: the name of the linear layer in the model.
        stored: the module in the checkpoint.
        dtype: that of the float weight.
    """

    module: str
    stored: StoredModule
    dtype: torch.dtype

    @property
    def is_per_row(self) -> bool:
        return False


@dataclass
class Plan:
    """The tensors of a checkpoint, and the modules of the model that they fill.

    Attributes:
        format, e4m3_max: of the checkpoint.
        fills: by the name of the module's :data:`ANCHOR`.
        targets: that name, by the name of each stored tensor after transformers' renamings.
        linears: the module in the checkpoint, by the name of the linear layer in the model.
        experts: how a module of experts is made, by its name in the model.
        activations: what the checkpoint says of the experts of that name.
        left: modules of the checkpoint that the model does not have.
        notes: what was rounded in the weights of a format of SOURCES, in words.
        residual: the linear layers of the model that multiply the errors of residual channels.
    """

    format: FormatName
    e4m3_max: int
    fills: dict[str, Fill | FillStack | FillFloat] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    linears: dict[str, StoredModule] = field(default_factory=dict)
    experts: dict[str, moe.ExpertsPlan] = field(default_factory=dict)
    activations: dict[str, StoredActivations] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    residual: set[str] = field(default_factory=set)

    def buffers(self, anchor: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of the module of this anchor, by their full names, of the stored tensors.

        Raises:
            KeyError, TypeError, ValueError: naming the tensor that cannot be used.
        """
        fill = self.fills[anchor]
        if isinstance(fill, FillFloat):
            layer = read_layer(tensors, fill.stored.name, cast(LayerName, fill.stored.stored))
            return {anchor: layer.dequantize(fill.dtype)}
        weight: weights.Weight
        if isinstance(fill, FillStack):
            weight, bias = self._of_stack(fill, tensors)
        else:
            weight, bias = self._of_shards(fill, tensors)
        channels = None
        if fill.module in self.residual:
            weight, channels = self._repeated(cast(Fill, fill), cast(NVFP4Tensor, weight), tensors)
        form = weights.format_of(weight)
        made = form.parts(weight)
        if channels is not None:
            made[CHANNELS] = channels
        if isinstance(weight, NVFP4Tensor):
            made[BOUND] = weight.amax.new_full((1,), weight.e4m3_max, dtype=torch.int32)
        if bias is not None:
            made["bias"] = bias
        return {f"{fill.module}.{name}": tensor for name, tensor in made.items()}

    def _matrix(self, fill: Fill, tensors: Mapping[str, Tensor], name: str) -> weights.Weight:
        if fill.layer is None:
            return StoredWeight.read(tensors, name, self.format, self.e4m3_max).to_nvfp4()
        return read_layer(tensors, name, fill.layer).operand()

    def _of_shards(self, fill: Fill, tensors: Mapping[str, Tensor]) -> tuple[weights.Weight, Tensor | None]:
        shards: list[Any] = []
        for names in fill.shards:
            matrices = [self._matrix(fill, tensors, name) for name in names]
            form = weights.format_of(matrices[0])
            shards.append(form.stack(matrices) if fill.is_stack else matrices[0])
        weight = shards[0] if len(shards) == 1 else form.joined(shards, is_interleaved=True)
        weight = weight.with_row_amax() if fill.is_per_row else weight
        if not fill.has_bias:
            return weight, None
        # A copy, since one that is not aligned would be replaced later, without the loader's mark.
        parts = [
            [tensors[f"{name}.bias"].to(torch.float32, copy=True) for name in names] for names in fill.shards
        ]
        stacks = [torch.stack(each) if fill.is_stack else each[0] for each in parts]
        return weight, stacks[0] if len(stacks) == 1 else torch.stack(stacks, -1).flatten(-2)

    def _repeated(
        self, fill: Fill, weight: NVFP4Tensor, tensors: Mapping[str, Tensor]
    ) -> tuple[NVFP4Tensor, Tensor]:
        """The weight with the columns of its residual channels again, and these."""
        name = f"{fill.shards[0][0]}.{RESIDUAL}"
        channels = tensors[name].contiguous()
        try:
            return repeat_columns(weight, channels), channels
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error

    def _of_stack(
        self, fill: FillStack, tensors: Mapping[str, Tensor]
    ) -> tuple[weights.Weight, Tensor | None]:
        one, reports = fill.stack, list[MXFP4Report]()
        missing = [name for name in one.tensors if name not in tensors]
        if missing:
            raise KeyError(f"{missing[0]}: is missing beside {one.name}")
        codes, scales = tensors[one.codes], tensors[one.scales]
        weight: weights.Weight
        try:
            if fill.is_kept:
                weight = fill.source.as_is(codes, scales)
            else:
                weight = fill.source.operand(codes, scales, "row", reports.append)
        except ValueError as error:
            raise ValueError(f"{one.name}: {error}") from error
        elements = one.experts * one.n * one.k
        self.notes += [rounding(one.name, each, elements) for each in reports if not each.is_exact]
        return weight, tensors[one.bias].to(torch.float32, copy=True) if one.bias else None


def read_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerName) -> StoredLayer:
    """The weight of a module in a format of LAYERS.

    transformers casts a tensor that keeps its name; bf16, fp16 and fp32 have every value of e4m3.
    """
    codes = {f"{name}.weight": tensors[f"{name}.weight"].to(torch.float8_e4m3fn)}
    return StoredLayer.read({**tensors, **codes}, name, layer)


def about_dequantized(plan: Plan) -> list[str]:
    """A line for each format of LAYERS whose layers stay in float; names are counted without numbers."""
    found: dict[str, list[str]] = {}
    for fill in plan.fills.values():
        if isinstance(fill, FillFloat):
            dtype = str(fill.dtype).removeprefix("torch.").replace("bfloat16", "bf16")
            what = f"{LAYERS[cast(LayerName, fill.stored.stored)].title} -> {dtype}"
            found.setdefault(what, []).append(fill.module)
    return [f"{what}: {_counted(names)}" for what, names in found.items()]


def _counted(names: Sequence[str]) -> str:
    """These names, those that differ in numbers alone counted together."""
    counts = Counter(NUMBER.sub("*", name) for name in names)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def make_plan(
    model: Any, modules: Sequence[StoredModule], unused: Sequence[str], format: FormatName, e4m3_max: int
) -> Plan:
    """Find the module of the model for each module of the checkpoint; the model is still in float.

    Unused tensors are collected with those of a module too, of whichever, since the loader of transformers
    would report them as unexpected.

    Raises:
        ValueError: naming each weight that does not fit its module.
    """
    plan = Plan(format, e4m3_max)
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = dict(model.named_modules(remove_duplicate=False))
    experts: dict[str, dict[tuple[int, str], StoredModule]] = {}
    problems: list[str] = []
    fp8: dict[LayerName, list[str]] = {}  # experts, by their names in the checkpoint
    for stored in sorted(modules, key=lambda each: dot_natural_key(each.name)):
        weight = rename_source_key(f"{stored.name}.weight", renamings, [], prefix, state)[0]
        name = weight.removesuffix(".weight")
        if name in found:
            add = _add_linear if _is_held(stored) else _add_float
            problems += add(plan, name, found[name], stored)
            continue
        one = _names.expert_of(name)
        role = None if one is None else _names.role_of(one[2])
        if one is not None and role is not None:
            down = rename_source_key(f"{one[0]}.{_names.STACKED.down}", [], [], prefix, state)[0]
            owner = down.rpartition(".")[0]
            if owner in found and _is_held(stored):
                experts.setdefault(owner, {})[one[1], role] = stored
                continue
            if owner in found:
                fp8.setdefault(cast(LayerName, stored.stored), []).append(stored.name)
                continue
        plan.left.append(stored.name)
    for owner, members in experts.items():
        problems += _add_experts(plan, owner, found[owner], members)
    number = len(problems) + sum(map(len, fp8.values()))
    problems += [
        f"{_counted(names)}: {LAYERS[layer].title}, which experts of transformers cannot be loaded from; "
        f"convert --from {format} --to fp4gemm makes them bf16"
        for layer, names in fp8.items()
    ]
    refuse(f"checkpoint: {number} weights do not fit the model", problems)
    fit: dict[str, str] = {}
    for anchor, fill in plan.fills.items():
        if isinstance(fill, Fill):
            fit |= {name: anchor for names in fill.shards for name in names}
        elif isinstance(fill, FillFloat):
            fit[fill.stored.name] = anchor
    if not any(isinstance(fill, Fill) for fill in plan.fills.values()):
        raise ValueError(
            f"checkpoint: its quantized weights, such as {modules[0].name}, are none of the model's"
        )
    wanted = {
        f"{each.name}.{suffix}": fit[each.name]
        for each in modules
        if each.name in fit
        for suffix in each.suffixes
    }
    wanted |= dict.fromkeys(unused, next(iter(plan.fills)))
    for name, anchor in wanted.items():
        plan.targets[rename_source_key(name, renamings, [])[0]] = anchor
    return plan


def make_plan_of_stacks(model: Any, stacks: Sequence[Stack], source: SourceFormat, is_kept: bool) -> Plan:
    """Find the experts of the model for the stacks of a checkpoint; the model is still in float.

    ``is_kept``: the weights stay in the format of the checkpoint; else they become NVFP4.

    Raises:
        ValueError: naming the experts that do not fit, and why.
    """
    plan = Plan("fp4gemm", source.e4m3_max)
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = dict(model.named_modules(remove_duplicate=False))
    owners: dict[str, list[Stack]] = {}
    for each in stacks:
        down = rename_source_key(f"{each.owner}.{_names.STACKED.down}", renamings, [], prefix, state)[0]
        owners.setdefault(down.rpartition(".")[0], []).append(each)
    problems = []
    for owner, members in owners.items():
        if owner not in found:
            problems.append(f"{members[0].name} is no weight of the model")
            continue
        problems += _add_stacks(plan, owner, found[owner], members, source, is_kept)
    refuse(f"checkpoint: {len(problems)} experts do not fit the model", problems)
    for anchor, fill in plan.fills.items():
        if isinstance(fill, FillStack):
            for name in fill.stack.tensors:
                plan.targets[rename_source_key(name, renamings, [])[0]] = anchor
    return plan


def _add_stacks(
    plan: Plan,
    name: str,
    module: torch.nn.Module,
    members: Sequence[Stack],
    source: SourceFormat,
    is_kept: bool,
) -> list[str]:
    read = _readable_experts(module)
    if isinstance(read, str):
        return [f"{name}: the experts are {source.name}, and {read}"]
    if not module.has_gate or read.layout != "interleaved":
        return [f"{name}: gate and up alternate in the {source.name} format, must do so in the model"]
    for each in members:
        n, k = (2 * read.intermediate, read.hidden) if each.is_first else (read.hidden, read.intermediate)
        got, wanted = (each.experts, each.n, each.k), (read.num_experts, n, k)
        if got != wanted:
            return [f"{each.name} is a weight {got}, must be {wanted}"]
        if bool(each.bias) != bool(module.has_bias):
            return [f"{each.name}{source.bias} is {'not wanted' if each.bias else 'missing'} for {name}"]
    plan.experts[name] = read
    for each in members:
        fill = FillStack(f"{name}.{'w13' if each.is_first else 'w2'}", each, source, is_kept)
        plan.fills[f"{fill.module}.{ANCHOR}"] = fill
    return []


def _readable_experts(module: torch.nn.Module) -> moe.ExpertsPlan | str:
    """How the module becomes Experts, or why it cannot."""
    try:
        if not moe.is_experts(module):
            raise ValueError(f"{type(module).__name__} is no module of experts that transformers dispatches")
        with torch.device("cpu"):  # the activation is evaluated on the CPU
            return moe.read(module)
    except (TypeError, ValueError) as error:
        return str(error)


def _is_held(stored: StoredModule) -> bool:
    """Whether a layer of this library holds the weight as it is stored; others stay in float.

    These are formats without such a layer, and layers whose n no kernel writes.
    """
    kind = stored.stored
    return kind not in LAYERS or (LAYERS[kind].activations is not None and stored.n % OUT_STEP == 0)


def _layer_of(stored: StoredModule) -> LayerName | None:
    """The format of LAYERS of a weight that a layer holds; None: NVFP4."""
    return stored.stored if stored.stored in LAYERS else None


def _title(stored: StoredModule) -> str:
    layer = _layer_of(stored)
    return "NVFP4" if layer is None else LAYERS[layer].title


def _add_linear(plan: Plan, name: str, module: torch.nn.Module, stored: StoredModule) -> list[str]:
    if type(module) is not torch.nn.Linear:
        what = f"{stored.name} is {_title(stored)}"
        return [f"{what}, and {name} is a {type(module).__name__}, must be a torch.nn.Linear"]
    shape = module.out_features, module.in_features
    if (stored.n, stored.k) != shape:
        return [f"{stored.name} is a weight {(stored.n, stored.k)}, must be {shape} for {name}"]
    if stored.has_bias != (module.bias is not None):
        return [f"{stored.name}.bias is {'not wanted' if stored.has_bias else 'missing'} for {name}"]
    plan.linears[name] = stored
    fill = Fill(name, ((stored.name,),), False, stored.is_per_row, stored.has_bias, _layer_of(stored))
    plan.fills[f"{name}.{ANCHOR}"] = fill
    return []


def _add_float(plan: Plan, name: str, module: torch.nn.Module, stored: StoredModule) -> list[str]:
    """Enter a linear layer that stays in float, with the values of a format of LAYERS."""
    title = LAYERS[cast(LayerName, stored.stored)].title
    if not isinstance(module, torch.nn.Linear):
        return [
            f"{stored.name} is {title}, and {name} is a {type(module).__name__}, must be a torch.nn.Linear"
        ]
    shape = module.out_features, module.in_features
    if (stored.n, stored.k) != shape:
        return [f"{stored.name} is a weight {(stored.n, stored.k)}, must be {shape} for {name}"]
    plan.fills[f"{name}.weight"] = FillFloat(name, stored, module.weight.dtype)
    return []


def _add_experts(
    plan: Plan, name: str, module: torch.nn.Module, members: Mapping[tuple[int, str], StoredModule]
) -> list[str]:
    read = _readable_experts(module)
    if isinstance(read, str):
        return [f"{name}: the experts are NVFP4, and {read}"]
    roles = ("gate", "up", "down") if module.has_gate else ("up", "down")
    wanted = {(e, role) for e in range(read.num_experts) for role in roles}
    problems = [f"{name}.{e}: its {role} is missing" for e, role in sorted(wanted - set(members))]
    problems += [f"{members[key].name} is not wanted" for key in sorted(set(members) - wanted)]
    for (_, role), stored in members.items():
        shape = (read.hidden, read.intermediate) if role == "down" else (read.intermediate, read.hidden)
        if (stored.n, stored.k) != shape:
            problems.append(f"{stored.name} is a weight {(stored.n, stored.k)}, must be {shape}")
        if stored.has_bias != bool(module.has_bias):
            problems.append(f"{stored.name}.bias is {'not wanted' if stored.has_bias else 'missing'}")
    kinds = {members[key].stored: members[key].name for key in sorted(wanted & set(members))}
    if len(kinds) > 1:
        listed = ", ".join(f"{kind!r} of {one}" for kind, one in kinds.items())
        problems.append(f"{name}: its experts have the activations {listed}, must have one kind")
    if problems:
        return problems
    plan.experts[name], plan.activations[name] = read, cast(StoredActivations, next(iter(kinds)))
    for child, shards in (("w13", roles[:-1]), ("w2", roles[-1:])):
        names = tuple(tuple(members[e, role].name for e in range(read.num_experts)) for role in shards)
        own = [members[key] for key in wanted if key[1] in shards]
        layer = _layer_of(own[0])
        is_per_row = layer is None and (len(shards) > 1 or any(each.is_per_row for each in own))
        fill = Fill(f"{name}.{child}", names, True, is_per_row, bool(module.has_bias), layer)
        plan.fills[f"{fill.module}.{ANCHOR}"] = fill
    return []


def swap(
    model: Any,
    plan: Plan,
    activations: Callable[[StoredActivations], LayerActivations],
    use_fast_accum: bool,
    rounded_gate: bool,
    dtype: torch.dtype | None,
) -> None:
    """Put empty NVFP4 modules on the meta device in the place of the float ones.

    ``activations`` is called with what the checkpoint says of a layer; use_fast_accum is for those that are
    "fp8". A layer with a stored weight or bias of its own is not tied, as lm_head may be to the embeddings.

    Raises:
        ValueError: naming activations, if experts do not have it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[str, torch.nn.Module] = {}
    for anchor, fill in plan.fills.items():
        if isinstance(fill, FillFloat):
            model.all_tied_weights_keys.pop(anchor, None)
    for name, stored in plan.linears.items():
        for own in ("weight", *(("bias",) if stored.has_bias else ())):
            model.all_tied_weights_keys.pop(f"{name}.{own}", None)
        mine = activations(cast(StoredActivations, stored.stored))
        residual = stored.residual_channels if INPUTS[mine].kind in RESIDUAL_KINDS else 0
        if residual:
            plan.residual.add(name)
        made[name] = nn.Linear(
            stored.k,
            stored.n,
            stored.has_bias,
            device="meta",
            dtype=dtype,
            activations=mine,
            weight_scaling="row" if stored.is_per_row or INPUTS[mine].weights != "nvfp4" else "tensor",
            use_fast_accum=use_fast_accum and INPUTS[mine].tokens == "fp8",
            residual_channels=residual,
        )
    for name, read in plan.experts.items():
        mine = activations(plan.activations.get(name, "a16"))
        experts = made[name] = nn.Experts(
            read.num_experts,
            read.hidden,
            read.intermediate,
            activation=read.activation,
            bias=bool(modules[name].has_bias),
            device="meta",
            dtype=dtype,
            activations=mine,
            use_fast_accum=use_fast_accum and INPUTS[mine].tokens == "fp8",
            rounded_gate=rounded_gate,
        )
        experts.float_layout = read.layout
        for child in ("w13", "w2"):
            fill = plan.fills[f"{name}.{child}.{ANCHOR}"]
            if not fill.is_per_row and INPUTS[mine].weights == "nvfp4":
                setattr(experts, child, _of_one_amax(getattr(experts, child), dtype))
    for name, module in made.items():
        owner, _, child = name.rpartition(".")
        setattr(modules[owner], child, module.train(modules[name].training))


def _of_one_amax(weight: StackedWeight, dtype: torch.dtype | None) -> StackedWeight:
    """An empty copy of the stack with one amax for each matrix."""
    g, n, k = weight._shape
    return StackedWeight(g, n, k, weight.bias is not None, "meta", dtype, weight_scaling="tensor")
