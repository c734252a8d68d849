"""The plan of a conversion: what is quantized, which tensors share an amax, and what stays and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .. import _checks, _names, patterns
from .._names import Orientation, orientation
from ..calibration.residual import why_none
from ..recipe import StoredActivations, WeightScaling
from . import rules
from .formats import FORMATS, LAYERS, FormatName, Group, LayerName, Scheme
from .options import Options, checked_options
from .rules import partners
from .source import DTYPES, CheckpointError, Source, TensorInfo

__all__ = ["FusedSet", "Matrix", "Plan", "ignored_modules"]

BY_LAYERS = "bf16 by layers"  # why a module stays that the option names
Half = Literal["all", "first", "second"]
Part = tuple[str, "int | None"]  # name of a tensor, and which expert of it
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Matrix:
    """One matrix (n, k) that is quantized.

    Attributes:
        module: the name of the module that holds it in the new checkpoint.
        source: the tensor of the old checkpoint that it is a part of.
        shape: (n, k).
        expert: which matrix of a tensor (g, .., ..) it is; None for a tensor of rank 2.
        half: "first" or "second" half of the rows, as gate and up are of gate_up_proj; "all" of them.
        transposed: whether the tensor holds (k, n).
    """

    module: str
    source: str
    shape: tuple[int, int]
    expert: int | None = None
    half: Half = "all"
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """This matrix, (n, k), as a view of its source tensor; for experts, of the part of one expert."""
        rows = tensor.T if self.transposed else tensor
        n = rows.shape[0] // 2
        return rows if self.half == "all" else rows[:n] if self.half == "first" else rows[n:]


@dataclass(frozen=True)
class FusedSet:
    """The matrices that are quantized together, since they share an amax; one alone in most sets.

    Attributes:
        matrices: of one k.
        is_stack: the matrices are the experts of one tensor, each with an amax of its own, and are stored as
            one tensor of codes (g, n, k/2).
        layer: the format of LAYERS that they get, each by itself; None: NVFP4.
    """

    matrices: tuple[Matrix, ...]
    is_stack: bool = False
    layer: LayerName | None = None

    @property
    def name(self) -> str:
        """The name of the set in errors and reports: the module of its first matrix."""
        return self.matrices[0].module

    @property
    def parts(self) -> tuple[Part, ...]:
        """(tensor, expert) of every tensor or matrix that has to be read for the set, each once."""
        return tuple(dict.fromkeys((matrix.source, matrix.expert) for matrix in self.matrices))

    def why_no_residual(self, count: int) -> str:
        """Why its layers have no residual channels where others have ``count``; "" of those that have."""
        if self.layer is not None:
            return f"no residual channels: {LAYERS[self.layer].title} has none"
        is_expert = self.is_stack or _names.expert_of(self.name) is not None
        return why_none(self.matrices[0].shape[1], count, is_expert)

    def residual_channels(self, count: int) -> int:
        """How many residual channels its layers have where others have ``count``: as many, or 0."""
        return 0 if not count or self.why_no_residual(count) else count

    @property
    def numel(self) -> int:
        """The number of elements of all matrices of the set."""
        return sum(math.prod(matrix.shape) for matrix in self.matrices)


@dataclass(frozen=True)
class Plan:
    """The plan of a conversion: for every tensor, whether and how it is quantized.

    Attributes:
        options: what it was made with.
        tensors: dtype and shape of every tensor, by name, in the order of the checkpoint.
        sets: what is quantized, in that order too.
        kept: the tensors that stay, with the reason.
        config: config.json of the model.
    """

    options: Options
    tensors: Mapping[str, TensorInfo]
    sets: tuple[FusedSet, ...]
    kept: Mapping[str, str]
    config: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of_checkpoint(cls, source: Source, options: Options) -> Plan:
        """The plan for a checkpoint on disk; raises as :meth:`of_shapes`."""
        return cls._made(source.tensors, source.config, checked_options(options))

    @classmethod
    def of_shapes(
        cls,
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        config: Mapping[str, Any],
        options: Options | None = None,
    ) -> Plan:
        """The plan for tensors of these shapes and dtypes.

        Args:
            tensors: (shape, dtype) of every tensor of the model, by the names of its checkpoint.
            config: what its config.json holds; the rules read model_type, vocab_size and num_hidden_layers.
            options: None is ``Options()``.

        Raises:
            CheckpointError: a partner of a fused set is missing, or a pattern matches nothing; the text names
                it. TypeError: a dtype that safetensors does not have; options of another type.
        """
        for argument, value, wanted in (
            ("tensors", tensors, "names to (shape, dtype)"),
            ("config", config, "keys to values, as config.json holds"),
        ):
            if not isinstance(value, Mapping):
                raise TypeError(f"{argument}: got {_checks.describe(value)}, must be a mapping of {wanted}")
        infos = {}
        for name, (shape, dtype) in tensors.items():
            if dtype not in _NAMES:
                raise TypeError(f"tensors: dtype of {name!r} is {dtype}, must be one that safetensors has")
            nbytes = math.prod(shape) * dtype.itemsize
            infos[name] = TensorInfo(name, _NAMES[dtype], tuple(shape), nbytes=nbytes)
        return cls._made(infos, config, checked_options(options))

    @classmethod
    def of_model(cls, model: torch.nn.Module, options: Options | None = None) -> Plan:
        """The plan for the tensors in ``model.state_dict()``, with ``model.config`` if it has one."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
        config: Any = getattr(model, "config", None) or {}
        plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
        return cls.of_shapes(shapes, plain, options)

    @classmethod
    def _made(cls, infos: Mapping[str, TensorInfo], config: Mapping[str, Any], options: Options) -> Plan:
        facts = rules.Facts.of(config, infos)
        kept, by_user = _selected(infos, options, facts)
        sets: list[FusedSet] = []
        containers = _stacks(infos, kept)
        for prefix, (gate_up, down) in containers.items():
            _refuse_fp8_experts(prefix, options)
            made = _stack_sets(prefix, gate_up, down, infos, options)
            if isinstance(made, str):
                kept[gate_up] = kept[down] = made
            else:
                sets += made
        plain = [name for name in infos if name not in kept and not _stack_of(name)]
        for names in partners(plain, infos, kept, by_user, options.fuse):
            matrices = tuple(_matrix(infos[name]) for name in names)
            sets.append(FusedSet(matrices, layer=_layer(matrices, options)))
        order = {name: index for index, name in enumerate(infos)}
        sets.sort(key=lambda one: (order[one.matrices[0].source], one.matrices[0].expert or 0))
        kept = {name: kept[name] for name in infos if name in kept}
        if all(one.layer for one in sets):
            raise CheckpointError(f"no weight would be NVFP4, of {len(infos)} tensors; must have some")
        modules = {matrix.module for one in sets for matrix in one.matrices}
        _refuse_unused(
            options, modules, {name.removesuffix(".weight"): reason for name, reason in kept.items()}
        )
        wanted = set(options.activation_amax)
        if wanted and wanted != modules:
            name = min(wanted ^ modules)
            what = "is not quantized, but has an amax" if name in wanted else "has no amax"
            raise CheckpointError(
                f"activations: {name} {what}; must be given for each quantized module alone"
            )
        return cls(options, dict(infos), tuple(sets), kept, config)

    @property
    def sources(self) -> dict[str, list[FusedSet]]:
        """The sets that need a tensor, by its name."""
        found: dict[str, list[FusedSet]] = {}
        for one in self.sets:
            for name in dict.fromkeys(matrix.source for matrix in one.matrices):
                found.setdefault(name, []).append(one)
        return found

    def kv_scales(self) -> dict[str, float]:
        """The scales of the KV cache by the names of their tensors."""
        suffixes = FORMATS[self.options.format].kv_scales
        return {
            f"{module}.{suffix}": number
            for module, numbers in self.options.kv_scales.items()
            for suffix, number in zip(suffixes, numbers, strict=True)
        }

    def file_of_kv_scale(self, name: str) -> str:
        """The shard of the scale of a KV cache: that of the first tensor of its attention module."""
        module = next(module for module in self.options.kv_scales if name.startswith(f"{module}."))
        for info in self.tensors.values():
            if info.name.startswith(f"{module}."):
                return info.file
        raise CheckpointError(f"kv_cache: {module} is no module of the checkpoint")

    def scheme(self) -> Scheme:
        """The scheme that the config of the new checkpoint describes."""
        o = self.options
        kinds: dict[LayerName | None, list[str]] = {}
        for one in self.sets:
            modules = kinds.setdefault(one.layer, [])
            modules += dict.fromkeys(matrix.module for matrix in one.matrices)
        first = kinds.pop(None)
        groups = tuple(Group(tuple(sorted(names)), layer) for layer, names in kinds.items() if layer)
        return Scheme(
            o.format,
            cast(StoredActivations, o.recipe.activations),
            tuple(self.ignored()),
            "fp8" if o.kv_scales else None,
            cast(int, o.recipe.e4m3_max),
            cast(WeightScaling, o.recipe.weight_scaling),
            targets=tuple(sorted(first)) if groups else ("Linear",),
            groups=groups,
            residual_channels=o.residual_channels,
        )

    def ignored(self) -> list[str]:
        """The modules that stay in float although a loader would expect NVFP4 ones, sorted."""
        quantized = {matrix.module for one in self.sets for matrix in one.matrices}
        return ignored_modules(self.tensors, self.kept, quantized, self.options.format)


def ignored_modules(
    tensors: Mapping[str, TensorInfo], kept: Mapping[str, str], quantized: Collection[str], format: FormatName
) -> list[str]:
    """The list, for a config, of modules that stay in float although a loader would expect NVFP4 ones.

    The output embedding is always one of them, since a tied one has no tensor. Experts that stay altogether
    are named by the module that holds them, for compressed-tensors by an expression.
    """
    holders = {module.partition(".experts.")[0] for module in quantized if ".experts." in module}
    names = {_names.LM_HEAD}
    for name, reason in kept.items():
        module = name.removesuffix(".weight")
        is_module = name.endswith(".weight") or _stack_of(name) is not None
        if not is_module or len(tensors[name].shape) < 2 or reason in ("norm", "embedding"):
            continue
        holder, _, rest = module.partition(".experts.")
        if not rest or holder in holders:
            names.add(module)
        else:
            names.add(FORMATS[format].below(f"{holder}.experts"))
    return sorted(names)


def _selected(
    infos: Mapping[str, TensorInfo], options: Options, facts: rules.Facts
) -> tuple[dict[str, str], set[str]]:
    """The tensors that the rules and options keep, with the reason, and those that a pattern keeps."""
    kept: dict[str, str] = {}
    by_user: set[str] = set()
    used: set[str] = set()
    transposed = rules.stored_transposed({name: info.shape for name, info in infos.items()})
    first, last = options.bf16_first, options.bf16_last
    activations = cast(StoredActivations, options.activations)
    if first + last > facts.num_layers:
        raise CheckpointError(
            f"bf16_first, bf16_last: got {first} and {last}, must be at most {facts.num_layers}, the layers "
            "of the model"
        )
    modules = [name.removesuffix(".weight") for name in infos]
    for (name, info), module in zip(infos.items(), modules, strict=True):
        included = [p for p in options.include if patterns.matches(p, module)]
        excluded = [p for p in options.exclude if patterns.matches(p, module)]
        used.update(included, excluded)
        reason = rules.why_kept(name, info.shape, facts)
        layer = rules.layer_number(name, facts)
        if not reason and name in transposed:
            reason = rules.TRANSPOSED
        if included and reason in rules.SELECTABLE and len(info.shape) == 2 and name.endswith(".weight"):
            reason = ""
        if not reason:
            if options.include and not included:
                reason = "not matched by include"
            elif excluded:
                reason = f"matched by exclude {excluded[0]!r}"
            elif options.experts_only and not rules.is_expert_weight(name):
                reason = "no weight of an expert"
            elif layer is not None and layer < first:
                reason = f"one of the first {first} layers"
            elif layer is not None and facts.num_layers - last <= layer < facts.num_layers:
                reason = f"one of the last {last} layers"
            elif len(info.shape) == 2:
                reason = rules.why_shape(info.dtype, *info.shape, activations)
            if not reason and options.choice_of(module) == "bf16":
                reason = BY_LAYERS
            if reason and (included or excluded or options.include or reason == BY_LAYERS):
                by_user.add(name)
        if reason:
            kept[name] = reason
    for option in ("include", "exclude"):
        unused = [pattern for pattern in getattr(options, option) if pattern not in used]
        if unused:
            some = next(iter(infos), "none")
            raise CheckpointError(
                f"{option}: {unused[0]!r} matches none of the {len(infos)} tensors, such as {some!r}"
            )
    return kept, by_user


def _stack_of(name: str) -> tuple[str, str] | None:
    """(module "experts", child) of a tensor that holds all experts; None for other tensors."""
    return _names.stack_of(name.removesuffix(".weight"))


def _matrix(info: TensorInfo) -> Matrix:
    return Matrix(info.name.removesuffix(".weight"), info.name, (info.shape[0], info.shape[1]))


def _layer(matrices: Sequence[Matrix], options: Options) -> LayerName | None:
    """The format of LAYERS that a fused set gets.

    Raises:
        CheckpointError: the modules of the set have several, or it is of experts.
    """
    choices = {options.choice_of(matrix.module): matrix.module for matrix in matrices}
    if len(choices) > 1:
        listed = ", ".join(f"{module} {choice or 'nvfp4'}" for choice, module in choices.items())
        raise CheckpointError(
            f"layers: {listed} share an amax, must have one format (--fuse none: none shares)"
        )
    choice = next(iter(choices))
    if choice is None or choice == "bf16":
        return None
    if _names.expert_of(matrices[0].module) is not None:
        _refuse_fp8_experts(matrices[0].module, options)
    return choice


def _refuse_fp8_experts(module: str, options: Options) -> None:
    if options.choice_of(module) not in (None, "bf16"):
        raise CheckpointError(
            f"layers: got {options.choice_of(module)!r} for {module}, must be 'bf16' or absent: experts in "
            "FP8 are not written"
        )


def _refuse_unused(options: Options, quantized: Collection[str], kept: Mapping[str, str]) -> None:
    """Raise CheckpointError for a name of the option layers that has no effect on a module."""
    for choice, modules in (("bf16", {*quantized, *kept}), ("fp8-channel", set(quantized))):
        there: set[str] = set()
        for module in modules:
            parts = module.split(".")
            there |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        for name, wanted in options.layers.items():
            if wanted == choice and name not in there:
                if name in kept:
                    raise CheckpointError(
                        f"layers: got {choice!r} for {name}, which stays in float: {kept[name]}"
                    )
                raise CheckpointError(
                    f"layers: got {choice!r} for {name}, which is no module of the checkpoint, such as "
                    f"{next(iter(quantized))}"
                )


def _stacks(infos: Mapping[str, TensorInfo], kept: dict[str, str]) -> dict[str, tuple[str, str]]:
    """gate_up_proj and down_proj of each module of stacked experts that is not kept, by its name."""
    found: dict[str, dict[str, str]] = {}
    for name in infos:
        stack = _stack_of(name)
        if stack is not None:
            found.setdefault(stack[0], {})[stack[1]] = name
    wanted = _names.STACKED.gate_up, _names.STACKED.down
    result = {}
    for prefix, names in found.items():
        missing = [child for child in wanted if child not in names]
        if missing:
            raise CheckpointError(
                f"{prefix}.{missing[0]}: is missing beside {', '.join(names.values())}; the experts need both"
            )
        gate_up, down = (names[child] for child in wanted)
        if gate_up in kept or down in kept:
            kept.setdefault(gate_up, f"{down} stays: {kept.get(down)}")
            kept.setdefault(down, f"{gate_up} stays: {kept.get(gate_up)}")
        else:
            result[prefix] = (gate_up, down)
    return result


def _stack_sets(
    prefix: str, gate_up: str, down: str, infos: Mapping[str, TensorInfo], options: Options
) -> list[FusedSet] | str:
    """The sets of stacked experts, or why they stay."""
    first, second = infos[gate_up], infos[down]
    found = orientation(first.shape, second.shape)
    if isinstance(found, str):
        return found
    n, k, activations = found.hidden, found.intermediate, cast(StoredActivations, options.activations)
    for info, shape in ((first, (2 * k, n)), (second, (n, k))):
        reason = rules.why_shape(info.dtype, *shape, activations)
        if reason:
            return f"{info.name}: {reason}"
    if not options.split_experts:
        return [_stack(first, (2 * k, n), found), _stack(second, (n, k), found)]
    reason = rules.why_shape(first.dtype, k, n, activations)
    if reason:
        return f"{gate_up}: a half of it cannot be NVFP4: {reason}"
    biases = [name for name in (f"{gate_up}_bias", f"{down}_bias") if name in infos]
    if biases:
        return f"experts with biases ({biases[0]}) cannot be split; they can be kept as one tensor"
    sets, names = [], _names.EXPERTS[0]
    for expert in range(found.experts):
        one = f"{prefix}.{expert}"
        gate = Matrix(f"{one}.{names.gate}", gate_up, (k, n), expert, "first", found.transposed)
        up = Matrix(f"{one}.{names.up}", gate_up, (k, n), expert, "second", found.transposed)
        sets.append(FusedSet((gate, up)))
        sets.append(FusedSet((Matrix(f"{one}.{names.down}", down, (n, k), expert, "all", found.transposed),)))
    return sets


def _stack(info: TensorInfo, shape: tuple[int, int], found: Orientation) -> FusedSet:
    module = info.name.removesuffix(".weight")
    return FusedSet(
        tuple(Matrix(module, info.name, shape, e, "all", found.transposed) for e in range(found.experts)),
        is_stack=True,
    )
