"""GPTQ for NVFP4 by the definition of fp4gemm.calibration.gptq, in numpy float64, column by column."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STEPS = (0, 1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6)
BOUND = 256
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(code: int) -> float:
    return float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


def standard_code(a: float, amax: float) -> int:
    """The code of the scale that fp4gemm.quantize gives a block with the amax a."""
    encode = np.float32(6 * BOUND) / np.float32(amax)
    scale = min(np.float32(a) * (encode * np.float32(1 / 6)), np.float32(448))
    return int(torch.tensor(scale).to(torch.float8_e4m3fn).view(torch.uint8))


def e2m1(x: float) -> float:
    """The nearest magnitude, ties to the even code, with the sign of x."""
    a, best = abs(x), 0
    for code, value in enumerate(MAGNITUDES):
        gap, least = abs(a - value), abs(a - MAGNITUDES[best])
        if gap < least or (gap == least and code % 2 == 0):
            best = code
    return float(np.copysign(MAGNITUDES[best], x))


def fp8_value(value: float) -> float:
    """What FP8 tokens are multiplied by in place of a value q * s: 8 * e4m3(value / 8), of all e4m3 codes."""
    magnitude = abs(value) / 8
    gaps = [(abs(e4m3(code) - magnitude), code % 2, code) for code in range(127)]
    return float(np.copysign(8 * e4m3(min(gaps)[2]), value))


def gptq(w: Tensor, h: Tensor, damping: float, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(what the weight (n, k) becomes, the codes of its block scales (n, k/16)); one amax for each row."""
    rows, moment = w.double().numpy().copy(), h.double().numpy().copy()
    n, k = rows.shape
    moment += damping * np.diag(moment).mean() * np.eye(k)
    columns = [16 * block + i for block in order for i in range(16)]
    upper = np.linalg.cholesky(np.linalg.inv(moment[np.ix_(columns, columns)])).T  # U^T U is the inverse
    made, codes = np.zeros((n, k)), np.zeros((n, k // 16), dtype=np.int64)
    for r in range(n):
        amax, left = float(np.abs(rows[r]).max()), rows[r, columns]
        out = np.zeros(k)
        for place in range(k // 16):
            part = slice(16 * place, 16 * place + 16)
            a = float(np.abs(left[part]).max())
            first = max(standard_code(a, amax), 1)
            best = None
            for step in STEPS:
                code = min(max(first + step, 1), 126) if a else 0
                t = e4m3(code) * amax / (6 * BOUND)
                v, q, loss = left.copy(), np.zeros(16), 0.0
                for i in range(16):
                    j = 16 * place + i
                    q[i] = e2m1(v[j] / t) * t if t else 0.0
                    d = v[j] - q[i]
                    v[j + 1 :] -= d * upper[j, j + 1 :] / upper[j, j]
                    loss += (d / upper[j, j]) ** 2
                if best is None or loss < best[0]:
                    best = (loss, code, q, v)
            _, codes[r, order[place]], out[part], left = best
        made[r, columns] = out
    return made, codes


def block(
    w: np.ndarray, rows: np.ndarray, cost: np.ndarray, amax: float, fp8_operand: bool = False
) -> tuple[list[int], int, np.ndarray]:
    """(codes, code of the scale, d) of 16 values by fp4gemm.reference.gptq, in numpy float32."""
    one, bound = np.float32(1), np.float32(6 * BOUND)
    encode = bound / np.float32(amax)
    first = max(standard_code(float(np.abs(w).max()), amax), 1)
    best: tuple[np.float32, list[int], int, np.ndarray] | None = None
    for step in STEPS:
        code = min(max(first + step, 1), 126) if w.any() else 0
        s = np.float32(e4m3(code))
        e = one / (s * (one / encode)) if code else np.float32(np.finfo(np.float32).max)
        t = (s * np.float32(amax)) * (one / bound)
        v, d, apart, codes = w.copy(), np.zeros(16, np.float32), np.zeros(16, np.float32), []
        for j in range(16):
            product = v[j] * e
            q = np.float32(e2m1(float(np.clip(product, -6, 6))))
            codes.append(MAGNITUDES.index(abs(float(q))) + 8 * bool(np.signbit(product)))
            d[j] = v[j] - q * t
            if fp8_operand:
                value, unit = q * s, np.float32(amax) * (one / bound)
                other = np.float32(fp8_value(float(value)))
                d[j] = v[j] - (value + other) / np.float32(2) * unit
                apart[j] = (other - value) / np.float32(2) * unit
            v[j + 1 :] = v[j + 1 :] - d[j] * rows[j, j + 1 :]
        terms = (d * d + apart * apart) * cost if fp8_operand else (d * d) * cost
        while len(terms) > 1:
            terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
        if best is None or terms[0] < best[0]:
            best = terms[0], codes, code, d
    assert best is not None
    return best[1:]
