"""The forms of the operands of a training step: which the kernels of a device read without a conversion.

Where tensor cores read no NVFP4 (Hopper), a product of two NVFP4Tensors converts both in every call. There
the left operand is quantized to decoded values, in the pass that quantizes it anyway, and the copies of a
weight that a cache keeps are prepacked once. The values of the operands are the same in every form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import support

__all__ = ["are_converted"]


def are_converted(x: Tensor) -> bool:
    """Whether products on the device of x decode their left operand, and prepack or decode the right one.

    False while a graph is traced: which kernels a device has is no part of a graph.
    """
    return x.is_cuda and not torch.compiler.is_compiling() and support.streams_prepacked(x.device)
