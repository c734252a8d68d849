"""Ten epilogues in Python (docs/epilogue.md), each compared with the reference, bit for bit.

python examples/epilogues.py [--device cpu] [--show]
"""

from __future__ import annotations

import argparse

import fp4gemm
import torch
from fp4gemm import epilogues as ep


@fp4gemm.epilogue
def scaled_residual(acc, c, *, scale):
    """A residual stream: D = c + scale * acc."""
    return c + scale * acc


@fp4gemm.epilogue
def row_gate(acc, gate: ep.Row):
    """A gate for each token, for example the weight of its expert."""
    return gate * acc


@fp4gemm.epilogue
def soft_cap(acc, *, cap=30.0):
    """Logits within -cap..cap."""
    return cap * ep.tanh(acc / cap)


@fp4gemm.epilogue(pairs=True)
def clamped_swiglu(gate, up, bias, *, slope=1.702, limit=7.0):
    """The activation of GPT-OSS, gate and up interleaved."""
    g = ep.minimum(gate + bias[0], limit)
    u = ep.clamp(up + bias[1], -limit, limit)
    return g * ep.sigmoid(slope * g) * (u + 1.0)


@fp4gemm.epilogue
def dropout(acc, mask: ep.Matrix, *, keep):
    """Dropout by a mask of zeros and ones; keep is the probability of a one."""
    return acc * mask / keep


@fp4gemm.epilogue(pairs=True)
def rotation(x, y, cos: ep.Matrix, sin: ep.Matrix):
    """Rotary embedding of neighbouring columns; cos and sin are (m, n/2)."""
    return x * cos - y * sin, x * sin + y * cos


@fp4gemm.epilogue
def fake_quantize(acc, *, scale):
    """The values that an FP8 cast with this scale keeps."""
    return scale * ep.cast(acc / scale, torch.float8_e4m3fn)


@fp4gemm.epilogue(pairs=True)
def gelu_and_mul(gate, up):
    """GeGLU, with gate and up as auxiliary outputs for a backward pass."""
    return ep.gelu_tanh(gate) * up, {"gate": gate, "up": up}


@fp4gemm.epilogue
def squared_relu(acc, bias):
    """max(z, 0)^2 of z = acc + bias, and z itself."""
    z = acc + bias
    return ep.relu2(z), {"pre": z}


@fp4gemm.epilogue
def layer_scale(acc, bias, c, gamma: ep.Column):
    """A residual stream with LayerScale, a factor for each channel."""
    return c + gamma * (acc + bias)


EXAMPLES = (
    *(scaled_residual, row_gate, soft_cap, clamped_swiglu, dropout),
    *(rotation, fake_quantize, gelu_and_mul, squared_relu, layer_scale),
)
SCALARS = {"scale": 0.25, "keep": 0.9}  # those without a default


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ten epilogues in Python with the reference.")
    parser.add_argument("--device", help="for example cuda:1 (default: the CUDA device, else the CPU)")
    parser.add_argument("--show", action="store_true", help="print the program of each epilogue")
    options = parser.parse_args()
    for epilogue in EXAMPLES:
        scalars = {name: value for name, value in SCALARS.items() if name in epilogue.names("scalars")}
        if options.show:
            print(f"{epilogue}\n{epilogue.program}")
        print(fp4gemm.check_epilogue(epilogue, options.device, scalars=scalars))


if __name__ == "__main__":
    main()
