"""Norm: LayerNorm or RMSNorm as a config of Megatron-Core has it, also with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Norm", "check_norm", "new_parameters", "normalized"]

NORMS = ("LayerNorm", "RMSNorm")


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm by torch's functions, as ``config.normalization`` says.

    It takes the place of Megatron-Core's WrappedTorchNorm, which refuses sequence parallelism and
    ``layernorm_zero_centered_gamma``. The parameters are ``weight`` and, of LayerNorm, ``bias``. With
    sequence parallelism Megatron-Core adds up their gradients over the ranks, since they have the attribute
    ``sequence_parallel``.

    Args:
        config: a TransformerConfig. hidden_size: of the last dimension. eps: as for torch.nn.RMSNorm.
        persist_layer_norm, zero_centered_gamma, normalization: accepted and not read, as by Megatron-Core's
            class; the config has them.

    Raises:
        NotImplementedError: naming the option of the config that is not supported.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        check_norm(config)
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = new_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) with each row normalized, of the dtype of x."""
        return normalized(self.config, x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.config.normalization}, {self.weight.numel()}, eps={self.eps}"


def check_norm(config: Any) -> None:
    """Raise NotImplementedError for a norm that is not supported."""
    if config.normalization not in NORMS:
        raise NotImplementedError(
            f"config.normalization: got {config.normalization!r}, must be {' or '.join(map(repr, NORMS))}"
        )
    if config.memory_efficient_layer_norm:
        raise NotImplementedError(
            "config.memory_efficient_layer_norm: got True, must be False; the norm is torch's"
        )


def new_parameters(config: Any, size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """The weight of a norm, and its bias if it has one."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    options: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
    start = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    made = [torch.nn.Parameter(start(size, **options))]
    if config.normalization == "LayerNorm":
        made.append(torch.nn.Parameter(torch.zeros(size, **options)))
    for parameter in made:
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made[0], made[1] if len(made) > 1 else None


def normalized(config: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The norm of the config of each row of x; a weight around zero is added to 1 in float32."""
    values = x
    if config.layernorm_zero_centered_gamma:
        values, weight, bias = x.float(), weight.float() + 1, None if bias is None else bias.float()
    if bias is None:
        y = functional.rms_norm(values, weight.shape, weight, eps)
    else:
        y = functional.layer_norm(values, weight.shape, weight, bias, eps)
    return y.to(x.dtype)
