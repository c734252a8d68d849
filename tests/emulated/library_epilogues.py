"""The epilogues that test_epilogue_libraries.py builds into libraries for Blackwell."""

from __future__ import annotations

import fp4gemm
from fp4gemm import epilogues as ep


@fp4gemm.epilogue
def scaled_residual(acc, row, col, c, scale: ep.Column, *, beta):
    return scale * (row * (col * acc)) + beta * c


@fp4gemm.epilogue
def gated_silu(acc, bias, gate: ep.Row, *, limit=7.0):
    return gate * ep.silu(ep.clamp(acc + bias, -limit, limit))


@fp4gemm.epilogue
def squared_relu(acc, alpha, bias, *, shift):
    return ep.relu2(alpha * acc + bias + shift)


@fp4gemm.epilogue(pairs=True)
def pair_to_one(gate, up, bias, c, g: ep.Row, gamma: ep.Column, mask: ep.Matrix):
    return ep.silu(gate + bias[0]) * (up + bias[1]) * g * gamma + mask + c, {"gate": gate, "up": up}


@fp4gemm.epilogue(pairs=True)
def pair_to_two(x, y, c, cos: ep.Matrix, sin: ep.Matrix):
    c0, c1 = c
    return x * cos - y * sin + c0, x * sin + y * cos + c1, {"raw": (x, y)}


@fp4gemm.epilogue
def by_group(acc, factor: ep.Group, bias):
    return acc * factor + bias, {"acc": acc}
