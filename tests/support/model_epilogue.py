"""A second model of the epilogue in numpy: activations, the addend c, and products of groups row by row.

It shares no code with fp4gemm.reference. Every line of arithmetic is one float32 operation of numpy, which
rounds to nearest even.
"""

from __future__ import annotations

import model
import numpy as np
import torch

F = np.float32
# The coefficients of the polynomial for 2^f, float32 of the decimal numbers in the definition.
COEFFICIENTS = [
    np.float32(text)
    for text in ("0.69314718", "0.24022651", "0.055504109", "0.0096181291", "0.0013333558", "0.00015403530")
]
GELU = (
    "1.59577537",
    "0.0726476759",
    "-4.65867997e-05",
    "-0.000118352342",
    "9.45786996e-06",
    "-4.16529645e-07",
    "1.10171632e-08",
    "-1.63144137e-10",
    "1.03947591e-12",
)
GATES = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}  # gated: the activation of the gate, times up
NAMES = (None, "silu", "gelu_tanh", "relu2", "gelu")


def e(u: np.ndarray) -> np.ndarray:
    """An approximation of exp(-u): clamped, converted to base 2, polynomial times power of two."""
    with np.errstate(all="ignore"):
        t = np.minimum(np.maximum(-u, F(-87)), F(87)) * F(1.44269502)
        n = np.rint(t)
        f = t - n
        p = np.full_like(f, COEFFICIENTS[5])
        for i in (4, 3, 2, 1, 0):
            product = f * p
            p = product + COEFFICIENTS[i]
        product = f * p
        p = product + F(1)
        return np.ldexp(p, np.where(np.isnan(n), 0, n).astype(np.int32)).astype(np.float32)


def activate(z: np.ndarray, name: str | None) -> np.ndarray:
    """The activation of float32 values, in float32."""
    with np.errstate(all="ignore"):
        if name is None:
            return z
        if name in GATES:
            gate = activate(np.ascontiguousarray(z[..., 0::2]), GATES[name])
            return gate * z[..., 1::2]
        if name == "swiglu_oai":
            gate = np.minimum(np.ascontiguousarray(z[..., 0::2]), F(7))
            gate = gate / (F(1) + e(F(1.702) * gate))
            up = np.maximum(np.minimum(z[..., 1::2], F(7)), F(-7))
            up = up + F(1)
            return gate * up
        if name == "swiglu_limit10":
            gate = np.minimum(np.ascontiguousarray(z[..., 0::2]), F(10))
            gate = gate / (F(1) + e(gate))
            return gate * np.maximum(np.minimum(z[..., 1::2], F(10)), F(-10))
        if name == "relu2":
            r = np.where(z > 0, z, np.where(np.isnan(z), z, F(0))).astype(np.float32)
            return r * r
        u = z
        if name == "gelu_tanh":
            square = z * z
            inner = F(0.071354814) * square
            inner = inner + F(1.5957691)
            u = z * inner
        if name == "gelu":
            square = np.where(z * z < F(30.25), z * z, F(30.25))
            p = np.full_like(z, F(GELU[8]))
            for i in range(7, -1, -1):
                product = square * p
                p = product + F(GELU[i])
            u = z * p
        return z / (F(1) + e(u))


def finish(
    z: np.ndarray,
    activation: str | None = None,
    c: torch.Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """cast(act(z) + fl(beta * c)) of z = alpha * (...) + bias, which model.epilogue gives in float32."""
    y = activate(z, activation)
    with np.errstate(all="ignore"):
        if c is not None:
            addend = F(beta) * c.cpu().float().numpy()
            y = y + addend
    return torch.from_numpy(np.ascontiguousarray(y)).to(out_dtype)


def grouped_scales(scales: np.ndarray, ends: list[int], columns: int) -> np.ndarray:
    """Compact scale bytes (ends[-1], columns) of groups of rows, each starting at a multiple of 128."""
    flat, width = scales.reshape(-1), scales.shape[1]
    rows, tile_row, begin = [], 0, 0
    for end in ends:
        for r in range(end - begin):
            rows.append([flat[model.offset(128 * tile_row + r, c, width)] for c in range(columns)])
        tile_row += -(-(end - begin) // 128)
        begin = end
    return np.array(rows, dtype=np.uint8).reshape(-1, columns)


def grouped_row_values(codes: torch.Tensor, scales: torch.Tensor, ends: list[int]) -> np.ndarray:
    """float64 values of the rows of all groups."""
    q = model.decode_codes(codes.cpu().numpy())[: ends[-1]]
    compact = grouped_scales(scales.cpu().view(torch.uint8).numpy(), ends, q.shape[1] // 16)
    return q * np.repeat(model.e4m3_values()[compact], 16, axis=1)


def column_spans(ends: list[int]) -> list[tuple[int, int]]:
    """The first column and the number of columns of the blocks that hold tokens, for each group of columns.

    A rotation spreads the tokens of a block that is not full over all columns of the block.
    """
    spans, place, begin = [], 0, 0
    for end in ends:
        spans.append((place, -(-(end - begin) // 16) * 16))
        place += -(-(end - begin) // 64) * 64
        begin = end
    return spans
