"""The C interface through cuda-python: the product of the library without torch's operators.

``pip install 'fp4gemm[cuda-python]'`` installs cuda-python, which allocates D and the workspace; ctypes calls
``fp4gemm_gemm`` on the stream that torch captures, by the structs of examples/c_interface.py. Its kernels are
those of ``fp4gemm.mm``: what may differ is the time that the host needs for a call.
"""

from __future__ import annotations

from typing import Any

import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor
from torch import Tensor

from examples import c_interface

from ..measure.contest import Row
from ..measure.harness import Harness
from ..measure.library import Call, stream_of
from . import installed

NAME = "fp4gemm, C interface by cuda-python"
PACKAGES = ("cuda-bindings", "cuda-python")


def absent(harness: Harness) -> str | None:
    """Why the contender cannot run, or None."""
    if harness.device.type != "cuda":
        return "the C interface of the library needs a CUDA device"
    return c_interface.unusable()


def facts() -> Row:
    """The version of cuda-python, for a row."""
    return {"version": installed.version(PACKAGES)}


class Result:
    """D as an array that torch reads: bf16 numbers as 16-bit integers."""

    def __init__(self, pointer: int, m: int, n: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (m, n),
            "typestr": "<i2",
            "data": (pointer, False),
            "version": 3,
        }


class Calls:
    """Calls of fp4gemm_gemm on operands of torch; their memory is freed with this object."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library = c_interface.opened()
        self._gpu = c_interface.Gpu(device.index)

    def __del__(self) -> None:
        self._gpu.close()

    def call(self, a: NVFP4Tensor | DecodedTensor, b: NVFP4Tensor | PrepackedTensor) -> Call:
        """The call that computes bfloat16 a @ b.T."""
        shape = (a.shape[0], b.shape[0], a.shape[1])
        product = c_interface.Product(
            self._library,
            shape,
            (_operand(a), a.amax.data_ptr()),
            (_operand(b), b.amax.data_ptr()),
            self._gpu.empty,
            self.device.index,
        )
        # The operator gemm makes the same promise. The weight was complete before anything is timed.
        product.args.b_is_constant = int(isinstance(b, PrepackedTensor))
        array = Result(product.d, *shape[:2])
        d: Tensor = torch.as_tensor(array, device=self.device).view(torch.bfloat16).fill_(torch.nan)

        # The operands, and this object with its memory, live as long as the call.
        def run(keep: Any = (self, a, b)) -> Tensor:
            product.launch(stream_of(self.device))
            return d

        return run


def _operand(t: NVFP4Tensor | DecodedTensor | PrepackedTensor) -> c_interface.Operand:
    if isinstance(t, NVFP4Tensor):
        return c_interface.Operand(t.codes.data_ptr(), t.scales.data_ptr(), c_interface.NVFP4)
    kind = c_interface.PREPACKED if isinstance(t, PrepackedTensor) else c_interface.FP16
    return c_interface.Operand(t.data.data_ptr(), None, kind)
