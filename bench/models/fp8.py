"""Layers and experts in torch's FP8, with one scale for each token and one for each channel."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from ..baselines import fp8
from .experts import Experts

Module = TypeVar("Module", bound=nn.Module)


class Linear(nn.Module):
    """``x @ W.T + bias`` in FP8; x is quantized in the call."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, use_fast_accum: bool = True) -> None:
        super().__init__()
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)
        self.codes, self.scales = fp8.formula(weight)
        self.bias = bias
        self.use_fast_accum = use_fast_accum

    def forward(self, x: Tensor) -> Tensor:
        w = fp8.Operand(self.codes, self.scales)
        y = fp8.linear(x.reshape(-1, x.shape[-1]), w, self.use_fast_accum, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class _Fp8:
    """What experts in FP8 have in place of the product in bf16."""

    use_fast_accum = True

    def _product(self: Any, x: Tensor, name: str, offs: Tensor, expert_ids: Tensor) -> Tensor:
        w = fp8.Operand(getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales"))
        out = fp8.grouped(x, w, offs, self.use_fast_accum)
        return out + getattr(self, f"{name}_proj_bias")[expert_ids] if self.has_bias else out


def in_fp8(module: Module, use_fast_accum: bool = True) -> Module:
    """The module with its linear layers and experts in FP8; it is changed in place. Routers stay in float."""
    if isinstance(module, Experts):
        kind = type(module)
        for name in ("gate_up", "down"):
            weight = getattr(module, f"{name}_proj").detach()
            codes, scales = fp8.formula_of_stack(weight.mT if module.is_transposed else weight)
            delattr(module, f"{name}_proj")
            module.register_buffer(f"{name}_codes", codes)
            module.register_buffer(f"{name}_scales", scales)
        module.__class__ = type(f"Fp8{kind.__name__}", (_Fp8, kind), {"use_fast_accum": use_fast_accum})
        return module
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            setattr(module, name, Linear(child.weight.detach(), bias, use_fast_accum))
        else:
            in_fp8(child, use_fast_accum)
    return module
