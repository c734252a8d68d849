"""A block of 16 columns of a weight, rounded within GPTQ: the scale is chosen by the error that remains.

fl(.) is one float32 operation, rounded to nearest even. Let A be the amax of the row or of the weight, B =
256, and S the encode scale of A (reference/nvfp4.py). The candidates for the scale of a row of the block are
those of reference/scale_search.py, in its order: with a = max |w_j| and c the code of the standard scale of
a, c_0 = max(c, 1), they are c_0, c_0 + 1, ..., c_0 + 6, c_0 - 1, ..., c_0 - 6, each clamped to 1..126. With s
the value of a candidate::

    e   = min(fl(1 / fl(s * fl(1 / S))), FMAX)        t = fl(fl(s * A) * fl(1 / 6B))
    for each column j of the block, from left to right:
        c_j = e2m1(fl(w_j * e)), of value q_j
        d_j = fl(w_j - fl(q_j * t))
        w_i = fl(w_i - fl(d_j * fl(U_ji / U_jj)))     for the columns i behind j in the block
    t_j = fl(fl(d_j * d_j) * fl(1 / U_jj^2))
    E   = the sum of the t_j, folded by halves: t_j += t_(j + 8), then t_(j + 4), t_(j + 2) and t_(j + 1)

With ``fp8_operand`` the weight is multiplied by FP8 tokens as well as by others, with v_j = 8 * e4m3(q_j * s
/ 8) in place of q_j * s, and what is kept small is the mean of the squared errors of both. d_j is then the
distance from the mean of both values, as in reference/scale_search.py::

    z_j = (v_j - q_j * s) / 2,  m_j = q_j * s + z_j               exact
    d_j = fl(w_j - fl(m_j * p)),  g_j = fl(z_j * p)               p = fl(A * fl(1 / 6B))
    t_j = fl(fl(fl(d_j * d_j) + fl(g_j * g_j)) * fl(1 / U_jj^2))

The candidate with the smallest E is used, and of equal ones the first; a NaN counts as infinity. A block of
zeros (a = 0) has the scale 0, and one with a NaN has a = FMAX. A result is the code c_j, and d_j is what is
carried to the columns behind the block.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32
from .formats import E2M1_MAX, E2M1_VALUES, encode_e2m1
from .nvfp4 import element_factor, encode_scale, standard_scale
from .scale_search import LARGEST_CODE, STEPS, fp8_mean

__all__ = ["E4M3_BOUND", "GptqBlocks"]

BLOCK = _checks.BLOCK
E4M3_BOUND = 256  # B
# The e2m1 values in ascending order; zero has one sign, which no difference depends on.
_VALUES = sorted({float(v) for v in E2M1_VALUES})


class GptqBlocks:
    """Rounds blocks of a stack of weights, (g, n, k), as the module docstring defines it.

    Args:
        amax: A, float32 (g, n), or (g, 1) for one of each matrix.
        fp8_operand: whether the weight is multiplied as FP8 values too.
    """

    def __init__(self, amax: Tensor, fp8_operand: bool = False) -> None:
        device = amax.device
        self._fp8_operand = fp8_operand
        self._amax, self._encode = amax, encode_scale(amax, E4M3_BOUND)
        self._inverse = torch.div(fp32(1.0, device), fp32(E2M1_MAX * E4M3_BOUND, device))
        self._steps = torch.tensor(STEPS, dtype=torch.int16, device=device)[:, None, None]
        self._values = torch.tensor(_VALUES, dtype=torch.float32, device=device)
        self._bounds = torch.tensor(_bounds(), dtype=torch.float32, device=device)

    def __call__(self, w: Tensor, rows: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Round a block of each weight.

        Args:
            w: float32 (g, 16, n), the columns of the block.
            rows: float32 (g, 16, 16), U_ji / U_jj at [j, i].
            cost: float32 (g, 16), 1 / U_jj^2.

        Returns:
            Codes 0..15, uint8 (g, 16, n); codes of the scales, uint8 (g, n); d, float32 (g, 16, n).
        """
        a = w.abs().amax(1)
        first = standard_scale(a, self._encode).view(torch.uint8).to(torch.int16).clamp(min=1)
        code = (first[None] + self._steps).clamp(1, LARGEST_CODE).masked_fill(a == 0, 0).to(torch.uint8)
        scale = code.view(torch.float8_e4m3fn).float()
        e = element_factor(scale, self._encode)
        t = scale * self._amax * self._inverse
        unit = self._amax * self._inverse
        v = w.expand(len(STEPS), *w.shape).clone()
        d, apart = torch.empty_like(v), torch.empty_like(v) if self._fp8_operand else None
        for j in range(BLOCK):
            q = self._values[torch.bucketize(v[:, :, j] * e, self._bounds, out_int32=True)]
            if apart is None:
                torch.sub(v[:, :, j], q * t, out=d[:, :, j])
            else:
                mean, distance = fp8_mean(q * scale)
                torch.sub(v[:, :, j], mean * unit, out=d[:, :, j])
                torch.mul(distance, unit, out=apart[:, :, j])
            if j + 1 < BLOCK:
                v[:, :, j + 1 :] -= d[:, :, j, None] * rows[:, j, j + 1 :, None]
        squares = d.square() if apart is None else d.square() + apart.square()
        terms = squares * cost[:, :, None]
        for half in (8, 4, 2, 1):
            terms = terms[:, :, :half] + terms[:, :, half:]
        loss = terms[:, :, 0].nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = loss.argmin(0, keepdim=True)  # the first of equal ones
        each = best[:, :, None].expand(1, *w.shape)
        codes = encode_e2m1(v.gather(0, each)[0] * e.gather(0, best)[0, :, None])
        return codes, code.gather(0, best)[0], d.gather(0, each)[0]


def _bounds() -> list[float]:
    """The largest float32 that rounds to each e2m1 value but the last, ties to the even code."""
    ends = []
    for low, high in itertools.pairwise(_VALUES):
        middle = (low + high) / 2
        # A tie belongs to the value with the even code; those of 0, 1, 2 and 4 are even.
        is_lower_even = abs(low) in (0.0, 1.0, 2.0, 4.0)
        tie, least = (torch.tensor(x, dtype=torch.float32, device="cpu") for x in (middle, -torch.inf))
        ends.append(float(tie if is_lower_even else torch.nextafter(tie, least)))
    return ends
