"""The activations of the epilogue, made of single fp32 operations, so that every backend has the same bits.

With fl(.) one fp32 operation rounded to nearest even, each of these steps being one::

    exp2(t)   = 2^n * (1 + f (c1 + f (c2 + ... + f c6))),  n = rint(t), f = t - n
    e(u)      = exp2(min(max(-u, -87), 87) * log2(e))
    silu      = z / (1 + e(z))
    gelu_tanh = z / (1 + e(u)),  u = z * (1.5957691 + 0.071354814 * (z * z))
    relu2     = max(z, 0) * max(z, 0)
    swiglu     = silu(z[2j]) * z[2j + 1]
    geglu_tanh = gelu_tanh(z[2j]) * z[2j + 1]
    swiglu_oai = g / (1 + e(1.702 g)) * (1 + min(max(z[2j + 1], -7), 7)),  g = min(z[2j], 7)
    swiglu_limit10 = silu(min(z[2j], 10)) * min(max(z[2j + 1], -10), 10)
    gelu      = z / (1 + e(u)),  u = z * (g0 + s (g1 + ... + s g8)),  s = min(z * z, 30.25)

gelu is 0.5 z (1 + erf(z / sqrt(2))) within 3e-7 max(1, |z|): u approximates log(Phi(z) / (1 - Phi(z))), with
the normal distribution function Phi, up to |z| = 5.5, and grows linearly beyond.

1.5957691 is 2 sqrt(2/pi) and 0.071354814 is 0.044715 times that: z / (1 + e^-u) = z/2 (1 + tanh(u/2)).
swiglu_oai is the activation of GPT-OSS, with its alpha 1.702 and its limit 7. swiglu_limit10 is that of the
experts of DeepSeek-V4, with its limit 10 (``DeepseekV4Experts._apply_gate`` of transformers 5.19, and
``SiluAndMulWithClamp`` of vLLM 0.32). An alpha or a limit with another value is another activation, and
integrations refuse it by name. The clamp of e keeps n within -126..126. A NaN stays a NaN.

An activation is one entry of :data:`ACTIVATIONS` and one function. Checks, error texts and the self-test read
the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import _checks

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ActivationName",
    "by_name",
    "by_number",
    "names",
    "of_name",
    "of_number",
]

LOG2_E = 1.44269502
POWERS = (0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)  # c1 .. c6
GELU_TANH = (1.5957691, 0.071354814)
GELU = (  # g0 .. g8
    1.59577537,
    0.0726476759,
    -4.65867997e-05,
    -0.000118352342,
    9.45786996e-06,
    -4.16529645e-07,
    1.10171632e-08,
    -1.63144137e-10,
    1.03947591e-12,
)

# The names of the table, for type checkers, which cannot read it. A test compares the two.
ActivationName = Literal[
    "silu", "gelu_tanh", "relu2", "swiglu", "gelu", "swiglu_oai", "geglu_tanh", "swiglu_limit10"
]


class Activation(NamedTuple):
    """An activation: ``function`` maps float32 z to act(z), element by element.

    A gated one halves the columns: column j of the result is function(z[2j]) * factor(z[2j + 1]).
    """

    number: int  # fp4gemm_activation_t of fp4gemm.h
    name: str | None  # the argument of fp4gemm.mm
    function: Callable[[Tensor], Tensor]
    is_gated: bool = False
    factor: Callable[[Tensor], Tensor] = lambda z: z  # the factor of a gated activation

    def width(self, n: int) -> int:
        """Columns of D for n rows of b."""
        return n // 2 if self.is_gated else n

    def __call__(self, z: Tensor) -> Tensor:
        """act(z) of float32 (.., n), (.., n) or (.., n/2); n is even if it is gated."""
        return self.function(z[..., 0::2]) * self.factor(z[..., 1::2]) if self.is_gated else self.function(z)


def exp_of_minus(u: Tensor) -> Tensor:
    """e(u): exp(-u), with u clamped to -87..87."""
    # A Python number times a float32 tensor is rounded to float32 first, by torch on every device.
    t = u.neg().clamp(-87, 87) * LOG2_E
    n = t.round()
    f = t - n
    p = torch.full_like(f, POWERS[-1])
    for c in reversed(POWERS[:-1]):
        p = f * p + c
    p = f * p + 1
    # 2^n from its bits; n is NaN where p is, and then any factor will do.
    scale = ((n.nan_to_num(0.0).to(torch.int32) + 127) << 23).view(torch.float32)
    return p * scale


def identity(z: Tensor) -> Tensor:
    return z


def silu(z: Tensor) -> Tensor:
    return z / (exp_of_minus(z) + 1)


def gelu_tanh(z: Tensor) -> Tensor:
    return z / (exp_of_minus(z * (z * z * GELU_TANH[1] + GELU_TANH[0])) + 1)


def gelu(z: Tensor) -> Tensor:
    s = (z * z).clamp(max=30.25)
    p = torch.full_like(s, GELU[-1])
    for g in reversed(GELU[:-1]):
        p = s * p + g
    return z / (exp_of_minus(z * p) + 1)


def relu2(z: Tensor) -> Tensor:
    positive = z.clamp(min=0)
    return positive * positive


def swiglu_oai_gate(z: Tensor) -> Tensor:
    g = z.clamp(max=7)
    return g / (exp_of_minus(g * 1.702) + 1)


def swiglu_oai_factor(z: Tensor) -> Tensor:
    return z.clamp(-7, 7) + 1


def swiglu_limit10_gate(z: Tensor) -> Tensor:
    return silu(z.clamp(max=10))


def swiglu_limit10_factor(z: Tensor) -> Tensor:
    return z.clamp(-10, 10)


ACTIVATIONS = (
    Activation(0, None, identity),
    Activation(1, "silu", silu),
    Activation(2, "gelu_tanh", gelu_tanh),
    Activation(3, "relu2", relu2),
    Activation(4, "swiglu", silu, is_gated=True),
    Activation(5, "gelu", gelu),
    Activation(6, "swiglu_oai", swiglu_oai_gate, is_gated=True, factor=swiglu_oai_factor),
    Activation(7, "geglu_tanh", gelu_tanh, is_gated=True),
    Activation(8, "swiglu_limit10", swiglu_limit10_gate, is_gated=True, factor=swiglu_limit10_factor),
)
by_name = {activation.name: activation for activation in ACTIVATIONS}
by_number = {activation.number: activation for activation in ACTIVATIONS}


def names(is_gated: bool) -> list[str]:
    """The names of the gated activations or of the others."""
    return [a.name for a in ACTIVATIONS if a.name is not None and a.is_gated == is_gated]


def of_name(name: object) -> Activation:
    """Return the activation with this name."""
    found = by_name.get(name) if name is None or isinstance(name, str) else None
    if found is None:
        wanted = _checks.listing([repr(known) for known in by_name])
        if isinstance(name, str):
            raise ValueError(f"activation: got {name!r}, must be {wanted}")
        raise TypeError(f"activation: got {_checks.describe(name)}, must be {wanted}")
    return found


def of_number(number: object) -> Activation:
    """Return the activation with this number. The operators identify activations by number."""
    wanted = _checks.listing(list(by_number))
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"activation: got {_checks.describe(number)}, must be {wanted}")
    if number not in by_number:
        raise ValueError(f"activation: got {number}, must be {wanted}")
    return by_number[number]
