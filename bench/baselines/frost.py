"""cuDNN frontend's FROST engine: a block-scaled GEMM with both scale vectors in its epilogue.

``pip install nvidia-cudnn-frontend nvidia-cutlass-dsl`` installs it; FROST compiles its kernel for each
shape. The graph multiplies the result of the matmul by a row vector and by a column vector. It is the engine
with the number ENGINE that must serve it, since another would compute the same by several kernels. The calls
are those of version 1.32; the project has not run them on hardware. As for every contender, each result is
verified before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fp4gemm import NVFP4Tensor
from torch import Tensor

from ..measure.contest import Row
from ..measure.library import needs_cores, stream_of
from . import installed

NAME = "cuDNN FROST"
MODULE = "cudnn"
PACKAGES = ("nvidia-cudnn-frontend",)
ENGINE = 20400  # frost_gemm, cudnn/engines/engine_ids.py
BLOCK = 16


def absent(harness: Any) -> str | None:
    """Why the contender cannot run, or None."""
    if not harness.has_nvfp4_cores:
        return needs_cores(NAME)
    return installed.absent(MODULE)


def facts() -> Row:
    """The version, for a row."""
    return {"version": installed.version(PACKAGES)}


class Product:
    """D = alpha_col * (alpha_row * (A @ B.T)), bfloat16, of operands of these sizes."""

    def __init__(self, m: int, n: int, k: int, device: torch.device) -> None:
        """Builds the graph and compiles the kernel.

        Raises:
            ImportError: the package is missing.
            Exception: an error of cuDNN, if the engine does not serve the sizes or the device.
        """
        cudnn = installed.module(MODULE)
        self._cudnn, self._handle = cudnn, cudnn.create_handle()
        self._out = (m, n)
        kinds = cudnn.data_type
        graph = cudnn.pygraph(handle=self._handle, io_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)
        rows_a, rows_b, words = -(-m // 128) * 128, -(-n // 128) * 128, -(-k // (4 * BLOCK)) * 4
        a = graph.tensor(name="a", dim=[1, m, k], stride=[m * k, k, 1], data_type=kinds.FP4_E2M1)
        b = graph.tensor(name="b", dim=[1, k, n], stride=[n * k, 1, k], data_type=kinds.FP4_E2M1)
        layout = {"data_type": kinds.FP8_E4M3, "reordering_type": cudnn.tensor_reordering.F8_128x4}
        scale_a = graph.tensor(
            name="scale_a", dim=[1, rows_a, words], stride=[rows_a * words, words, 1], **layout
        )
        scale_b = graph.tensor(
            name="scale_b", dim=[1, words, rows_b], stride=[rows_b * words, 1, words], **layout
        )
        row = graph.tensor(name="alpha_row", dim=[1, m, 1], stride=[m, 1, 1], data_type=kinds.FLOAT)
        col = graph.tensor(name="alpha_col", dim=[1, 1, n], stride=[n, n, 1], data_type=kinds.FLOAT)
        values_a = graph.block_scale_dequantize(a, scale_a, block_size=[1, BLOCK], name="values_a")
        values_b = graph.block_scale_dequantize(b, scale_b, block_size=[BLOCK, 1], name="values_b")
        for one in (values_a, values_b):
            one.set_data_type(kinds.FLOAT)
        acc = graph.matmul(values_a, values_b, compute_data_type=kinds.FLOAT, name="acc")
        acc.set_data_type(kinds.FLOAT)
        by_row = graph.mul(name="by_row", a=acc, b=row, compute_data_type=kinds.FLOAT)
        by_row.set_data_type(kinds.FLOAT)
        d = graph.mul(name="d", a=by_row, b=col, compute_data_type=kinds.FLOAT)
        d.set_output(True).set_data_type(kinds.BFLOAT16)
        graph.validate()
        graph.create_execution_plan(ENGINE)
        graph.build_plans()
        self._graph, self._tensors = graph, (a, b, scale_a, scale_b, row, col, d)
        self._workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def call(self, a: NVFP4Tensor, b: NVFP4Tensor) -> Callable[[], Tensor]:
        """The call on two operands of one amax a row; alpha_row holds both decode factors."""
        decode = a.amax * (1 / (36 * a.e4m3_max * b.e4m3_max))
        parts = [
            a.codes.view(torch.float4_e2m1fn_x2),
            b.codes.view(torch.float4_e2m1fn_x2),
            a.scales.view(torch.uint8),
            b.scales.view(torch.uint8),
            decode,
            b.amax,
        ]

        def run() -> Tensor:
            out = torch.empty(self._out, dtype=torch.bfloat16, device=a.device)
            self._cudnn.set_stream(self._handle, stream_of(a.device))
            pack = dict(zip(self._tensors, [*parts, out], strict=True))
            self._graph.execute(pack, self._workspace, handle=self._handle)
            return out

        return run
