"""convert_spec: a layer spec of Megatron-Core whose linear layers are those of fp4gemm."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from ... import _checks
from ...training.conversion import RecipeLike, chooser
from ...training.recipe import Recipe
from ._grouped import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from ._linear import ColumnParallelLinear, LayerNormColumnParallelLinear, RowParallelLinear
from ._norm import Norm

__all__ = ["convert_spec"]

# Where Megatron-Core accepts its own classes alone: the down projections of latent attention.
_FIXED = ("linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")


def convert_spec(
    spec: Any,
    recipe: RecipeLike = "per_token",
    *,
    grouped_experts: bool = False,
    fuse_main_grad: bool | None = None,
) -> Any:
    """A copy of a layer spec that builds layers that train by a recipe; the given one is unchanged::

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        model = GPTModel(config, convert_spec(spec, "per_token"), vocab_size, sequence_length)

    ============================================================= =====================================
    the spec has, of Megatron-Core or TransformerEngine           the copy has
    ============================================================= =====================================
    ColumnParallelLinear, TEColumnParallelLinear                  :class:`ColumnParallelLinear`
    RowParallelLinear, TERowParallelLinear                        :class:`RowParallelLinear`
    TELayerNormColumnParallelLinear                               :class:`LayerNormColumnParallelLinear`
    TEColumnParallelGroupedLinear, TERowParallelGroupedLinear     :class:`ColumnParallelGroupedLinear`,
                                                                  :class:`RowParallelGroupedLinear`
    WrappedTorchNorm                                              :class:`Norm`, the same with sequence
                                                                  parallelism
    ============================================================= =====================================

    Embeddings, the router and the output layer are no part of a spec and stay as they are. So do the layers
    of latent attention for which Megatron-Core accepts its own classes alone, linear_q_down_proj and
    linear_kv_down_proj, and TELinear, whose weight each rank has: a warning names them.

    Args:
        spec: a ModuleSpec, a TransformerBlockSubmodules, or any other dataclass of these, as Megatron-Core's
            functions for specs return.
        recipe: an :class:`fp4gemm.training.Recipe`, a name of PRESETS, or a function that returns one of
            these for the path of a layer in the spec, such as "layer_specs.3.self_attention.linear_qkv", or
            None for a layer that stays.
        grouped_experts: whether the experts of SequentialMLP, which multiplies one expert after the other,
            become a TEGroupedMLP with this library's grouped layers. Its parameters have other names, those
            that TEGroupedMLP has with TransformerEngine; the keys of a sharded_state_dict are the same. The
            class does not need TransformerEngine.
        fuse_main_grad: whether the layers add dW to ``weight.main_grad`` in float32. None is
            ``config.gradient_accumulation_fusion``; True needs no APEX, without which Megatron-Core's own
            output layer refuses that option.

    Returns:
        A spec of the type of ``spec``.

    Raises:
        TypeError, ValueError: naming the argument; the spec has no layer that can be replaced.
        NotImplementedError: the spec has a module that cannot hold other layers, such as TEFusedMLP.
    """
    _checks.is_bool("grouped_experts", grouped_experts)
    if fuse_main_grad is not None:
        _checks.is_bool("fuse_main_grad", fuse_main_grad)
    found = _Conversion(chooser(recipe), grouped_experts, {"fuse_main_grad": fuse_main_grad})
    converted = found.of(spec, "")
    if not found.num_converted:
        raise ValueError(
            "spec: has no linear layer of Megatron-Core or TransformerEngine that can be replaced, must have "
            "one"
        )
    if found.left:
        warnings.warn(f"convert_spec: left {'; '.join(found.left)}", stacklevel=2)
    return converted


def _replacements() -> list[tuple[Any, type]]:
    """Pairs of the class that a spec has and the class that takes its place.

    Without TransformerEngine its classes are stand-ins of Megatron-Core, or None.
    """
    pairs = [
        (layers.ColumnParallelLinear, ColumnParallelLinear),
        (layers.RowParallelLinear, RowParallelLinear),
        (te.TEColumnParallelLinear, ColumnParallelLinear),
        (te.TERowParallelLinear, RowParallelLinear),
        (te.TELayerNormColumnParallelLinear, LayerNormColumnParallelLinear),
        (te.TEColumnParallelGroupedLinear, ColumnParallelGroupedLinear),
        (te.TERowParallelGroupedLinear, RowParallelGroupedLinear),
    ]
    return [(theirs, ours) for theirs, ours in pairs if theirs is not None]


class _Conversion:
    """One call of convert_spec: what is chosen, and what was found."""

    def __init__(
        self, chosen: Callable[[str], Recipe | None], grouped_experts: bool, options: dict[str, Any]
    ) -> None:
        self.chosen, self.grouped_experts, self.options = chosen, grouped_experts, options
        self.num_converted = 0
        self.left: list[str] = []

    def of(self, part: Any, path: str) -> Any:
        """The part of a spec with every layer in it replaced."""
        if isinstance(part, ModuleSpec):
            return self._of_spec(part, path)
        if isinstance(part, functools.partial):
            made = self._of_class(part.func, path, dict(part.keywords))
            if made is not None:
                return made
            changed = {k: self.of(v, path) if k == "submodules" else v for k, v in part.keywords.items()}
            return functools.partial(self._checked(part.func, path), *part.args, **changed)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = [f.name for f in dataclasses.fields(part) if f.init]
            return dataclasses.replace(
                part, **{n: self.of(getattr(part, n), _joined(path, n)) for n in names}
            )
        if isinstance(part, (list, tuple)):
            return type(part)(self.of(each, _joined(path, str(i))) for i, each in enumerate(part))
        made = self._of_class(part, path, {})
        return part if made is None else made

    def _of_spec(self, spec: ModuleSpec, path: str) -> ModuleSpec:
        module = get_module(spec) if isinstance(spec.module, tuple) else spec.module
        made = self._of_class(module, path, {**spec.params, "submodules": spec.submodules})
        if made is not None:
            return made
        return dataclasses.replace(
            spec, module=self._checked(module, path), submodules=self.of(spec.submodules, path)
        )

    def _checked(self, module: Any, path: str) -> Any:
        """A module that holds other layers, unless it builds operations of its own from them."""
        for name in ("TEFusedMLP", "TEFusedResidualRMSNorm"):
            if module is not None and module is getattr(te, name, None):
                raise NotImplementedError(
                    f"spec: {path or 'it'} is a {name}, must be a module that calls its layers; make the "
                    "spec without use_te_op_fuser"
                )
        return module

    def _of_class(self, module: Any, path: str, params: dict[str, Any]) -> ModuleSpec | None:
        """The spec that takes the place of a class with these parameters, or None if the class stays."""
        if module is WrappedTorchNorm:
            params.pop("submodules", None)
            return ModuleSpec(module=Norm, params=params)
        if module is experts.SequentialMLP and self.grouped_experts:
            return self._grouped(path, params)
        if module is getattr(experts, "GroupedMLP", None) and module is not None:
            return self._grouped(path, params)
        if module is te.TELinear:
            if self.chosen(path) is not None:
                self.left.append(f"{path!r} (each rank has the whole weight of a TELinear)")
            return None
        for theirs, ours in _replacements():
            if module is theirs:
                recipe = self.chosen(path)
                if recipe is None:
                    return None
                if path.rpartition(".")[2] in _FIXED:
                    self.left.append(f"{path!r} (Megatron-Core accepts its own classes alone there)")
                    return None
                params.pop("submodules", None)
                self.num_converted += 1
                return ModuleSpec(module=ours, params={**params, **self.options, "recipe": recipe})
        return None

    def _grouped(self, path: str, params: dict[str, Any]) -> ModuleSpec | None:
        """Experts with grouped layers in place of SequentialMLP, or of the legacy GroupedMLP."""
        given, made = params.pop("submodules", None), {}
        for name, kind in (
            ("linear_fc1", ColumnParallelGroupedLinear),
            ("linear_fc2", RowParallelGroupedLinear),
        ):
            recipe = self.chosen(_joined(path, name))
            if recipe is None:
                raise ValueError(
                    f"recipe({_joined(path, name)!r}): returned None, must be a recipe, since both layers of "
                    'grouped experts are replaced; "bf16" quantizes nothing'
                )
            made[name] = ModuleSpec(module=kind, params={**self.options, "recipe": recipe})
            self.num_converted += 1
        kind = getattr(experts, "GroupedMLPSubmodules", experts.MLPSubmodules)
        activation = getattr(given, "activation_func", None)
        submodules = kind(**made, activation_func=activation)
        return ModuleSpec(module=experts.TEGroupedMLP, params=params, submodules=submodules)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
