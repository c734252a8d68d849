"""A second model of products with FP8 tokens, in numpy and from the definitions.

Tokens are quantized by model_fp8.py and multiplied by weights that are rounded to e4m3; and the order of the
bytes of a weight that is prepacked for them.
"""

from __future__ import annotations

import numpy as np
import torch
from model import E2M1, e4m3_values, encode_e4m3
from model_fp8 import ELEMENT, quantize
from torch import Tensor

__all__ = ["chunks_of", "product", "quantized", "weight_values"]

F32 = np.float32


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes in the order of the kernels, amax, values in the order of k) of float32 x (m, k)."""
    data, amax = quantize(torch.from_numpy(np.ascontiguousarray(x, F32)))
    stored = data.view(torch.uint8).numpy()
    m, k = stored.shape
    values = np.empty((m, k // 64, 64))
    values[:, :, ELEMENT] = e4m3_values()[stored].reshape(m, k // 64, 64)
    return stored, amax.numpy(), values.reshape(m, k)


def weight_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e4m3(q * s / 8) of codes (n, k/2) and compact scale bytes (n, k/16), as float64 (n, k)."""
    n, half_k = codes.shape
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(n, 2 * half_k)
    magnitude = E2M1[nibbles & 7] * np.repeat(e4m3_values()[scales], 16, axis=1) / 8
    negative = (nibbles >= 8) ^ (magnitude < 0)
    rounded = e4m3_values()[encode_e4m3(np.abs(magnitude))]
    return np.where(negative, -rounded, rounded)


def product(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, amax: np.ndarray, e4m3_max: int) -> Tensor:
    """alpha * (amax_w * (amax_x * acc)), float32 (m, n), of float32 x; each operation rounds once."""
    _, amax_x, tokens = quantized(x)
    acc = (8 * tokens @ weight_values(codes, scales).T).astype(F32)
    alpha = F32(1) / F32(448 * 6 * e4m3_max)
    return torch.from_numpy((acc * amax_x[:, None]) * np.broadcast_to(amax, (codes.shape[0],)) * alpha)


def chunks_of(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The prepacked bytes of codes (n, k/2) and compact scale bytes (n, k/16), int8."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    rows, columns = -(-n // 64), -(-k // 128)
    nibbles = np.zeros((64 * rows, 128 * columns), np.int64)
    nibbles[:n, :k:2], nibbles[:n, 1:k:2] = codes & 15, codes >> 4
    blocks = np.zeros((64 * rows, 8 * columns), np.int64)
    blocks[:n, : k // 16] = scales
    nibbles ^= np.repeat(blocks >> 7, 16, axis=1) << 3  # the sign of a scale moves to its codes
    out = np.zeros((rows, columns, 4608), np.uint8)
    for row in range(64 * rows):
        for at in range(0, 128 * columns, 8):
            r, c = row % 64, at % 128
            thread = r // 16 * 32 + r % 8 * 4 + c % 64 // 16
            word = 0
            for i, nibble in enumerate(nibbles[row, at : at + 8]):
                word |= int(nibble & 7) << 4 * i
                word |= int(nibble >> 3) << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)
            first = c // 64 * 2048 + 16 * thread + 8 * (r // 8 % 2) + c % 16 // 8 * 4
            chunk = out[row // 64, at // 128]
            chunk[first : first + 4] = np.frombuffer(word.to_bytes(4, "little"), np.uint8)
            if at % 16 == 0:
                scale = int(blocks[row, at // 16] & 127) << 3 + 7 * (2 * (c // 64) + r // 8 % 2)
                words = chunk[4096 + 4 * thread : 4100 + 4 * thread].view(np.uint32)
                words |= np.uint32(scale)
    return out.reshape(-1).view(np.int8)
