"""Quantization-aware distillation of a language model: the loop, a trial of its options, and the export.

A student of :func:`fp4gemm.models.prepare_qat` learns the probabilities that the float model gives the tokens
of a text. Nothing reads which token follows in the text.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import fp4gemm
import torch
from fp4gemm.models import QATLinear, qat
from fp4gemm.recipe import LayerActivations
from torch import Tensor

WARM_UP = 0.05  # the part of the steps in which the learning rate rises
CHECKED = 64  # tokens on which the student and its export are compared


class Course(NamedTuple):
    """How a student is trained."""

    steps: int
    batch: int  # chunks of a step
    lr: float  # the highest learning rate of AdamW
    seed: int = 0


def student_of(start: torch.nn.Module, activations: LayerActivations) -> torch.nn.Module:
    """A copy of a student whose layers have these activations."""
    made = copy.deepcopy(start)
    for _, layer in trained_layers(made):
        layer.layer.activations = activations
    return made


def trained_layers(student: torch.nn.Module) -> list[tuple[str, QATLinear]]:
    """The layers with master weights, and their names."""
    return [(name, m) for name, m in student.named_modules() if isinstance(m, QATLinear)]


def restart(layer: QATLinear, given: torch.nn.Linear, master: qat.Master) -> None:
    """Give a layer the other kind of master weights, those of a float layer; its codes do not change."""
    made = qat.first_master(given.weight.detach(), layer.layer._nvfp4_weight, master)
    with torch.no_grad():
        layer.weight.copy_(made)


def divergence(student: torch.nn.Module, teacher: torch.nn.Module, ids: Tensor) -> Tensor:
    """The mean over the tokens ids (count, length) of KL(teacher || student)."""
    with torch.no_grad():
        want = teacher(ids).logits.float().log_softmax(-1).flatten(0, 1)
    found = student(ids).logits.float().log_softmax(-1).flatten(0, 1)
    return torch.nn.functional.kl_div(found, want, log_target=True, reduction="batchmean")


def distil(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    chunks: Tensor,
    course: Course,
    report: Callable[[int, Tensor], object] | None = None,
) -> float:
    """Train a student in place: all parameters but the embeddings. Return the seconds of a step.

    Args:
        chunks: int64 (count, length), the text; each pass over it is in another order.
        report: called with the number of each step, from 1 on, and its loss.
    """
    for module in student.modules():
        if isinstance(module, torch.nn.Embedding):
            module.requires_grad_(False)
    student.train()
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=course.lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(int(WARM_UP * course.steps), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm_up, (course.steps - i) / max(course.steps - warm_up, 1))
    )
    begin = time.perf_counter()
    with tensor_float():
        for step, ids in zip(range(1, course.steps + 1), _batches(chunks, course), strict=False):
            loss = divergence(student, teacher, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if report is not None:
                report(step, loss.detach())
    if chunks.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / course.steps


def _batches(chunks: Tensor, course: Course) -> Iterator[Tensor]:
    """Chunks (batch, length) without end."""
    generator = torch.Generator().manual_seed(course.seed)
    while True:
        order = torch.randperm(len(chunks), generator=generator)
        for part in order.split(course.batch):
            if len(part) == course.batch or len(chunks) < course.batch:
                yield chunks[part.to(chunks.device)]


@contextlib.contextmanager
def tensor_float() -> Iterator[None]:
    """Let torch multiply float32 in TF32 on a GPU until the context ends: the float layers and gradients."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def validated(student: torch.nn.Module, teacher: torch.nn.Module, chunks: Tensor) -> float:
    """The mean divergence on chunks, one by one."""
    student.eval()
    with torch.no_grad():
        found = [float(divergence(student, teacher, ids[None])) for ids in chunks]
    return sum(found) / len(found)


class Export(NamedTuple):
    """The model that a student became."""

    model: torch.nn.Module
    difference: float  # the largest difference of a logit to that of the student


def exported(student: torch.nn.Module, ids: Tensor) -> Export:
    """Convert a student in place, and compare what it becomes with what it multiplied by.

    Raises:
        RuntimeError: codes, block scales or outer scales of a layer differ, or a logit does on a CPU.
    """
    used = operands(student, ids)
    with torch.no_grad():
        want = student.eval()(ids).logits
    made = fp4gemm.models.convert_qat(student)
    layers = dict(made.named_modules())
    for name, weight in used.items():
        found = layers[name].weight
        parts = zip(weight[:3], (found.codes, found.scales, found.amax), strict=True)
        is_same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in parts)
        if not is_same or weight[3] != found.e4m3_max:
            raise RuntimeError(f"{name}: the export has other codes or scales than the trained forward pass")
    with torch.no_grad():
        difference = float((made(ids).logits - want).abs().max())
    if difference and not ids.is_cuda:
        raise RuntimeError(f"the logits of the export differ by {difference} on a CPU, must be the same")
    return Export(made, difference)


def operands(student: torch.nn.Module, ids: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor, int]]:
    """Codes, block scales, amax and e4m3_max by which each layer multiplies in a forward pass of training.

    They are what autograd holds for the backward pass of the layer's product.
    """
    found: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {}

    def note(name: str, y: Tensor) -> None:
        node = y.grad_fn
        found[name] = (*node.saved_tensors[2:], node.e4m3_max)  # type: ignore[union-attr]

    handles = [
        layer.register_forward_hook(lambda _, args, y, name=name: note(name, y))
        for name, layer in trained_layers(student)
    ]
    try:
        with torch.enable_grad():
            student.train()(ids)
    finally:
        for handle in handles:
            handle.remove()
    return found
