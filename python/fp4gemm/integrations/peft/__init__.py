"""LoRA of peft on NVFP4 layers: adapters of linear layers and of experts, and their merge into NVFP4 weights.

:func:`get_peft_model` and :func:`from_pretrained` are those of peft, with a LoraConfig that fits the float
model: ``target_modules`` for its linear layers, and ``target_parameters`` for the stacks of its experts,
``"mlp.experts.gate_up_proj"`` and ``"mlp.experts.down_proj"``, which :class:`fp4gemm.nn.Experts` holds as w13
and w2. Names, shapes and values of the adapters are those that peft gives them for the float model, so that
either model loads what the other one saved. docs/lora.md has an example.

peft 0.21 or newer is needed; it is imported by the functions, not with this module.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ... import _checks
from ...calibration.statistics import InputStatistics, Statistics, StatisticsFile
from ...nn.experts import Experts
from ...nn.linear import Linear
from ...recipe import Method, data_of

if TYPE_CHECKING:
    import peft

__all__ = ["from_pretrained", "get_peft_model", "merge_and_unload", "targets"]

MergeMethod = Literal[Method, "stochastic"]
PREFIX = "base_model.model."  # of the names in a PeftModel


def get_peft_model(model: torch.nn.Module, config: peft.LoraConfig, **options: Any) -> Any:
    """``peft.get_peft_model`` for a model that ``quantize_model`` or ``from_pretrained`` made.

    Args:
        model: with :class:`fp4gemm.nn.Linear` and :class:`fp4gemm.nn.Experts`; it is changed in place, as by
            peft. Convert with ``fuse="none"``.
        config: a LoraConfig as for the float model. Of what it may ask of experts, all that peft refuses for
            parameters is refused here: lora_dropout, lora_bias, DoRA and the like, and initializations that
            read the float weight.
        options: those of peft.

    Returns:
        A PeftModel, whose only trainable parameters are the adapters.

    Raises:
        TypeError, ValueError: naming the argument; also what peft raises.
    """
    import peft

    with targets(model, config):
        return peft.get_peft_model(model, config, **options)


def from_pretrained(model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> Any:
    """``peft.PeftModel.from_pretrained``: the model with saved adapters, of itself or of its float model.

    Args:
        model: as for :func:`get_peft_model`.
        folder: what ``save_pretrained`` of a PeftModel wrote.
        options: those of peft; ``config`` is a LoraConfig in place of that in the folder.
    """
    import peft

    config = options.pop("config", None)
    config = peft.PeftConfig.from_pretrained(folder) if config is None else config
    with targets(model, config):
        return peft.PeftModel.from_pretrained(model, folder, config=config, **options)


@contextlib.contextmanager
def targets(model: torch.nn.Module, config: peft.LoraConfig) -> Iterator[None]:
    """While the context lasts, peft finds the layers of ``model`` that ``config`` asks for.

    For other functions of peft that add adapters, as ``PeftModel.add_adapter`` does. peft looks for
    parameters by name; a module of experts, which has buffers, shows its stacks under the names that the
    float model has. The layers of peft for both are registered in the config.

    Raises:
        TypeError: the config is not a LoraConfig.
    """
    import peft

    from . import _layers

    if not isinstance(config, peft.LoraConfig):
        raise TypeError(f"config: got {_checks.describe(config)}, must be a peft.LoraConfig")
    config._register_custom_module({Linear: _layers.Linear, Experts: _layers.ParamWrapper})
    shown = [module for module in model.modules() if isinstance(module, Experts)]
    for module in shown:
        vars(module)["named_parameters"] = _layers.Names(module)
    try:
        yield
    finally:
        for module in shown:
            vars(module).pop("named_parameters", None)


def merge_and_unload(
    model: Any,
    *,
    method: MergeMethod | None = None,
    calibration: Statistics | StatisticsFile | None = None,
    generator: torch.Generator | None = None,
    adapter_names: list[str] | None = None,
) -> torch.nn.Module:
    """The base model with W = Q(W + scale * B A) in each adapted layer, by a method of rounding.

    The steps between NVFP4 values are about as large as what an adapter adds, so that every method changes
    the model: docs/lora.md compares them. ``model.merge_and_unload()`` is the same with the defaults.

    Args:
        model: a PeftModel of :func:`get_peft_model` or :func:`from_pretrained`.
        method: "round", "four-over-six", "search" or "gptq", as :class:`fp4gemm.recipe.Recipe` defines them;
            or "stochastic", which keeps the scales of the base weight and rounds up or down at random such
            that the mean is the sum. None is the best method for the calibration, and without one what
            ``update_`` of each layer does.
        calibration: statistics of the inputs of the layers, by the names of the base model, such as
            :func:`fp4gemm.calibrate` returns of the float model, for "search" and "gptq".
        generator: of the random numbers, only with "stochastic"; None is torch's default generator.
        adapter_names: the adapters to merge; None: the active ones.

    Returns:
        The base model, whose layers have the new weights.

    Raises:
        TypeError, ValueError: naming the argument; also where the calibration lacks a layer. Nothing has
            changed then.
    """
    import peft

    from ._layers import Linear, ParamWrapper, Rounding

    if not isinstance(model, peft.PeftModel):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a PeftModel")
    if method is not None:
        _checks.is_one_of("method", method, get_args(MergeMethod))
    if generator is not None and method != "stochastic":
        raise ValueError(f"generator: got one with method {method!r}, must be None unless it is 'stochastic'")
    if calibration is not None and method not in (None, "search", "gptq"):
        raise ValueError(f"calibration: got one with method {method!r}, must be None unless that reads it")
    data = data_of(calibration)
    if method == "gptq" and data != "second moment":
        raise ValueError("calibration: must have second moments for the method 'gptq'")
    roundings: list[tuple[Linear | ParamWrapper, Rounding]] = []
    for name, module in model.named_modules():
        if isinstance(module, (Linear, ParamWrapper)):
            known: dict[str, InputStatistics] = {}
            role = "" if isinstance(module, Linear) else module.role
            if calibration is not None:
                parts = (name.removeprefix(PREFIX).replace(".base_layer", ""), role)
                key = ".".join(filter(None, parts))
                if key not in calibration:
                    raise ValueError(
                        f"calibration: has no statistics of {key!r}, must have those of every layer"
                    )
                known = {role: calibration[key]}
            roundings.append((module, Rounding(method, known, generator)))
    for module, rounding in roundings:
        module.rounding = rounding
    merged: torch.nn.Module = model.merge_and_unload(adapter_names=adapter_names)
    return merged
