"""Small models for the tests of fuse="auto": blocks structured as in transformers, and odd ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear


class Attention(torch.nn.Module):
    """q, k and v of one tensor, with heads of 16."""

    def __init__(self, d: int = 64, kv: int = 32, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.o_proj = Linear(d, d, bias), Linear(d, d, False)
        self.k_proj, self.v_proj = Linear(d, kv, bias), Linear(d, kv, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, 16)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class RMSNorm(torch.nn.Module):
    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(d)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        v = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(v + self.eps)
        return self.weight * x.to(kind)


class MLP(torch.nn.Module):
    def __init__(self, d: int = 64, f: int = 96, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = Linear(d, f, bias), Linear(d, f, bias), Linear(f, d, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Halves(torch.nn.Module):
    """Gate and up in one layer, as Phi-3 has them."""

    def __init__(self, d: int = 64, f: int = 96) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act = Linear(d, 2 * f), Linear(f, d), torch.nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate, both = both.chunk(2, dim=-1)
        both = both * self.act(gate)
        return self.down_proj(both)


class Layer(torch.nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = RMSNorm(), RMSNorm(), Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(hidden_states=h)
        h = self.norm2(x)
        return x + self.mlp(h)


class LlamaLayer(Layer):
    """The same with the statements of LlamaDecoderLayer."""

    def forward(self, hidden_states: Tensor, scale: float = 1.0, *, flag: bool = False) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states = self.attention(hidden_states=hidden_states)
        hidden_states = residual + hidden_states * scale

        residual = hidden_states
        hidden_states = self.norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states  # noqa: RET504


class NestedCalls(Layer):
    """The statements of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x  # noqa: RET504


class SumReturned(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        h = self.mlp(h)
        return h + x


class Pair(torch.nn.Module):
    """Two layers a and b of the same sizes; the subclasses call them in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Linear(64, 32), Linear(64, 32)


class Rebound(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        x = x * 2
        return y + self.b(x)


class Written(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.a(x)
        x.mul_(2)
        return y + self.b(x)


class Indexed(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.a(x)
        x[..., 0] = 3.0
        return y + self.b(x)


class Branches(Pair):
    def forward(self, x: Tensor, cond: bool = True) -> Tensor:
        y = self.a(x)
        if cond:
            y = y + self.b(x)
        return y


class Conditional(Pair):
    def forward(self, x: Tensor, cond: bool = True) -> Tensor:
        return self.a(x) + (self.b(x) if cond else 0)


class TwoInputs(Pair):
    def forward(self, x: Tensor) -> Tensor:
        z = x + 1
        return self.a(x) + self.b(z)


class Loop(Pair):
    """Calls that are merged, in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.a(x) + self.b(x) for _ in range(2))


class Late(Pair):
    """Calls that are merged, ahead of what cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        return y * float(len(x))


def _doubled(x: Tensor) -> Tensor:
    """2 * x, in operations that do not run with proxies."""
    torch._check(x.ndim == 2, lambda: "x must have two dimensions")
    num_rows, num_columns = x.shape
    doubled = torch.zeros(num_rows, num_columns, dtype=x.dtype)
    doubled[:] = x + x
    return doubled


class Helper(Pair):
    """Calls that are merged, around a function that does not run with proxies."""

    def forward(self, x: Tensor) -> Tensor:
        y = _doubled(self.a(x))
        return y + self.b(x)


def _wrapper(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Tensor:
        return function(*args)

    return wrapped


class WrappedHelper(Pair):
    """The same calls inside a decorator."""

    @_wrapper
    def forward(self, x: Tensor) -> Tensor:
        y = _doubled(self.a(x))
        return y + self.b(x)


class WritesOther(Pair):
    """Calls that are merged; what is written between them has memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 0] = 0
        (y + 1)[:, 1] = 0
        return y + self.b(x)


class AskedTwice(Pair):
    """Calls that are merged; one value decides twice."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        is_negative = x.sum() < 0
        if is_negative:
            factor = 2.0
        y = self.a(x)
        if is_negative:
            y = y * factor
        return y + self.b(x)


class WithoutScale(Pair):
    """Calls that are merged; with another argument the forward does not run with proxies."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None:
            x = x * torch.finfo(x.dtype).eps
        return self.a(x) + self.b(x)


class Together(Pair):
    """Calls that are merged; a second group in another branch is the same."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        if twice:
            z = x * 2
            return torch.cat([self.a(z), self.b(z)], -1)
        y = self.a(x)
        return torch.cat([y, self.b(x)], -1)


class Broken(Pair):
    """Is compiled in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        return y + self.b(x)


class Hidden(Pair):
    """Writes x in place in another method."""

    def change(self) -> None:
        self.x.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        self.x = x
        y = self.a(x)
        self.change()
        return y + self.b(x)


class Passed(Pair):
    """Passes x to a function, which writes it in place."""

    @staticmethod
    def change(x: Tensor) -> None:
        x.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.a(x)
        self.change(x)
        return y + self.b(x)


class Inplace(Pair):
    """Passes x to a module, which writes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.a(x)
        z = self.act(x)
        return y + self.b(x) + z.sum()


class Alias(Pair):
    """Writes memory of x under another name."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        z = x.view(-1)
        y = self.a(x)
        z.mul_(2)
        return y + self.b(x)


class OtherArgument(Pair):
    """Writes another argument, which may have memory of x."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.a(x)
        if other is not None:
            other.zero_()
        return y + self.b(x)


def _zero(x: Tensor) -> None:
    torch._check(x.ndim == 2, lambda: "x must have two dimensions")
    x.zero_()


class PassedOn(Pair):
    """Passes x to a function that writes it in place and does not run with proxies."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.a(x)
        _zero(x)
        return y + self.b(x)


LEFT_ALONE = (
    Rebound,
    Written,
    Indexed,
    Branches,
    Conditional,
    TwoInputs,
    Hidden,
    Passed,
    Inplace,
    Alias,
    OtherArgument,
    PassedOn,
)
