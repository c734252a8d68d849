"""What quantization costs a language model: its loss, its distance from the float model, and the errors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..report.results import Row


class Measured(Protocol):
    """A float model on text, with which other models are compared."""

    sample: Tensor  # int64 (count, length): ids for one call of the model

    def row(self, model: torch.nn.Module) -> Row:
        """The figures of another model."""
        ...


class Reference:
    """A float model on the evaluation text: its losses and its logits, kept in float16.

    Args:
        model: the float model.
        chunks: int64 (count, length), texts that are evaluated one by one.
    """

    def __init__(self, model: torch.nn.Module, chunks: Tensor) -> None:
        self.chunks, self.sample = chunks, chunks[:1]
        self.losses: list[float] = []
        self._logits: list[Tensor] = []
        for ids in chunks:
            logits = _logits(model, ids)
            self.losses.append(_loss(logits, ids))
            self._logits.append(logits.half())

    def row(self, model: torch.nn.Module) -> Row:
        """The figures of another model on the same text.

        nll is the mean loss of a token in nats, gap its distance from the float model's, spread the standard
        error of the gap over the chunks, kl the mean of KL(float || model), top1 how often the most probable
        token is the same.
        """
        losses, divergences, same = [], [], []
        for ids, kept in zip(self.chunks, self._logits, strict=True):
            logits, want = _logits(model, ids), kept.float()
            losses.append(_loss(logits, ids))
            p, q = want.log_softmax(-1), logits.log_softmax(-1)
            divergences.append(float((p.exp() * (p - q)).sum(-1).mean()))
            same.append(float((want.argmax(-1) == logits.argmax(-1)).float().mean()))
        gaps = [a - b for a, b in zip(losses, self.losses, strict=True)]
        return {
            "nll": statistics.fmean(losses),
            "gap": statistics.fmean(gaps),
            "spread": statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0,
            "kl": statistics.fmean(divergences),
            "top1": statistics.fmean(same),
        }


def _logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(ids[None]).logits[0].float()
    return result


def _loss(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))


def layer_error(model: torch.nn.Module, other: torch.nn.Module, sample: Tensor) -> float:
    """The mean over the layers that differ of |y' - y| / |y|, on the inputs that they get in the first model.

    Args:
        model: a float model.
        other: the same model with layers of other types, by the same names, in the places of some.
        sample: ids for one call.
    """
    errors: list[float] = []
    layers = dict(other.named_modules())

    def compare(name: str, args: tuple[Tensor, ...], y: Tensor) -> None:
        errors.append(float((layers[name](args[0]) - y).norm() / y.norm()))

    handles = [
        layer.register_forward_hook(lambda _, args, y, name=name: compare(name, args, y))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not isinstance(layers[name], type(layer))
    ]
    try:
        with torch.inference_mode():
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return statistics.fmean(errors)


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Seconds of what runs here, and by how many bytes the memory of the device grew: a GPU, or the process.

    Memory that was freed before is given back to the operating system first; else what runs here could use
    it again without any growth.
    """
    found: dict[str, Any] = {}
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    start, begin = _resident(), time.perf_counter()
    most, stop = [start], threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            most[0] = max(most[0], _resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        if is_cuda:
            torch.cuda.synchronize()
        found["seconds"] = time.perf_counter() - begin
        found["peak_bytes"] = max(most[0], _resident()) - start
        if is_cuda:
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - allocated


def _resident() -> int:
    """The bytes of the process in memory, without those of files such as libraries."""
    resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
