"""humming, a package that multiplies fp16 activations by an NVFP4 weight on Hopper.

``pip install humming-kernels==0.1.19`` installs it; if it is missing, its rows say so. Its weights are
random, as in humming's own benchmark, so that its results are not checked. Its launcher in Python needs more
time than a small product, so that only CUDA graphs compare fairly. humming compiles its kernels for each
shape at run time; the first call here compiles those of all shapes together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..measure.library import Call, error_line

WEIGHT = {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"}
INPUT = {"dtype": "float16"}


class Humming:
    """humming's product of fp16 (m, k) with a random NVFP4 weight (n, k), in fp16."""

    def __init__(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """``wanted``: every (n, k, m) that ``calls`` will be asked for."""
        self.absent: str | None = None  # the reason why humming cannot be timed
        self._wanted: dict[tuple[int, int], list[int]] = {}
        for n, k, m in wanted:
            self._wanted.setdefault((n, k), []).append(m)
        self._layers: dict[tuple[int, int], list[Any]] = {}
        self._tuning: dict[tuple[int, int, int], dict[str, Any]] = {}
        try:
            from humming.layer import HummingLayer
        except Exception as error:  # a package that does not fit the machine may raise anything
            self.absent = f"humming: {_line(error)}"
        else:
            self._layer = HummingLayer

    def _prepare(self) -> None:
        """Compiles the kernels of all wanted shapes at the first call, on all cores."""
        wanted, self._wanted = self._wanted, {}
        if self.absent is not None or not wanted:
            return
        device = torch.cuda.current_device()
        try:
            from humming.kernel.humming import HummingKernel
            from humming.tune import get_heuristics_config

            jobs: set[tuple[str, str]] = set()
            for (n, k), ms in wanted.items():
                config = self._layers_of(n, k, 1)[0].humming_config
                for m in ms:
                    tuning = get_heuristics_config(config, shape_m=m, gemm_type="dense", device=device)
                    self._tuning[n, k, m] = tuning
                    # The same text as humming's forward makes, which then finds the kernel compiled here.
                    jobs.add((config.to_str(), json.dumps(tuning)))

            def compile_one(job: tuple[str, str]) -> None:
                with torch.cuda.device(device):
                    HummingKernel.prepare_kernels(job[0], None, job[1], device)

            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                list(pool.map(compile_one, sorted(jobs)))
        except Exception as error:
            self.absent = f"humming: {_line(error)}"

    def calls(self, n: int, k: int, xs: Sequence[Tensor]) -> tuple[list[Call], str | None]:
        """(a call for each x, with a weight of its own, and None), or ([], the reason why there are none)."""
        self._prepare()
        if self.absent is not None:
            return [], self.absent
        try:
            layers = self._layers_of(n, k, len(xs))
            tuning = self._tuning.get((n, k, xs[0].shape[0]))
            made: list[Call] = [
                partial(layer, x, tuning_config=tuning) for layer, x in zip(layers, xs, strict=False)
            ]
            made[0]()
            torch.cuda.synchronize()
        except Exception as error:
            return [], f"humming: {_line(error)}"
        return made, None

    def _layers_of(self, n: int, k: int, count: int) -> list[Any]:
        """``count`` layers of one shape; layers of another shape are freed first."""
        if (n, k) not in self._layers:
            self._layers.clear()
        layers = self._layers.setdefault((n, k), [])
        while len(layers) < count:
            layer = self._layer(
                n, k, weight_config=dict(WEIGHT), input_config=dict(INPUT), torch_dtype=torch.float16
            ).cuda()
            for parameter in layer.parameters():
                _fill(parameter.data)
            layer.transform()
            layers.append(layer)
        return layers


def _fill(x: Tensor) -> None:
    """Random bits for integers, small random positive numbers for floats, so that products stay finite."""
    if x.dtype.is_floating_point:
        x.copy_((torch.rand(x.shape, device=x.device) * 0.1 + 0.01).to(x.dtype))
    else:
        # A byte may be an e4m3 scale, and 127 is a NaN.
        least, most = (-(2**31), 2**31) if x.dtype is torch.int32 else (0, 127)
        x.copy_(torch.randint(least, most, x.shape, device=x.device, dtype=torch.int64).to(x.dtype))


def _line(error: Exception) -> str:
    return error_line(error)[:200]
