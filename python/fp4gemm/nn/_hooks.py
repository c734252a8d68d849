"""The hooks of accelerate, which a quantized layer gets from the float layer that it replaces.

Nothing here imports accelerate unless a layer has a hook of it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: torch.nn.Module) -> list[str]:
    """The kinds of hooks, except accelerate's, that are lost when another module replaces this one."""
    found = [name.lstrip("_") for name in HOOKS if getattr(module, name, None)]
    return [*found, "forward"] if "forward" in vars(module) and accelerate_hook(module) is None else found


def accelerate_hook(module: torch.nn.Module) -> Any:
    """The accelerate hook of a module whose forward nothing else replaces; None if there is none."""
    hook = vars(module).get("_hf_hook")
    old = vars(module).get("_old_forward")
    return hook if getattr(old, "__func__", None) is type(module).forward else None


@contextlib.contextmanager
def materialized(module: torch.nn.Module) -> Iterator[None]:
    """Bring offloaded weights to the device where the module runs, as its hook does for a forward."""
    hook = accelerate_hook(module)
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if hook is None or not any(t.is_meta for t in tensors):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def carry_over(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give ``new`` the accelerate hook that ``old`` has, if any; an offloaded layer stays offloaded."""
    hook = accelerate_hook(old)
    if hook is None:
        return
    add_hook_to_module = importlib.import_module("accelerate.hooks").add_hook_to_module
    for module in new.modules():  # the weights of experts lie in two modules
        add_hook_to_module(module, _hook_for(hook))


def _hook_for(hook: Any) -> Any:
    """A copy of the hook without its records of the tensors of the float layer."""
    made = copy.copy(hook)
    if hasattr(made, "hooks"):  # a SequentialHook
        made.hooks = tuple(map(_hook_for, made.hooks))
    if getattr(made, "offload", False):
        made.weights_map = None  # init_hook makes a new one
        made.offload_buffers = True  # the weight is buffers now
    if hasattr(made, "tied_params_map"):
        made.tied_params_map = None  # addresses of float weights
    return made
