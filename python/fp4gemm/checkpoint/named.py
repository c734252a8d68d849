"""quantize_named: the conversion of tensors that come one by one, as in the weight updates of RL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .. import _checks
from .engine import convert_set, tensors_of
from .errors import CheckpointError
from .inputs import inputs_of
from .plan import FusedSet, Plan
from .runner import Part
from .source import DTYPES

__all__ = ["quantize_named"]


def quantize_named(tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the NVFP4 checkpoint from those of the float model, one by one, in the order of arrival.

    The bytes are those of :func:`convert` with the same options; of the method "gptq" only with one thread of
    torch, which convert uses. A tensor that stays is passed on as it is. A fused set is passed on as soon as
    its last tensor has come, and until then its tensors are kept, so that memory holds the incomplete sets.
    Tensors may come in any order, and an update may leave sets out altogether.

    Args:
        tensors: (name, tensor) pairs, with the names, shapes and dtypes of the plan, on any device; a set is
            quantized on the device of its first tensor.
        plan: :meth:`Plan.of_model`, :meth:`Plan.of_shapes` or :meth:`Plan.of_checkpoint`.

    Yields:
        (name, tensor): names, dtypes and shapes of the format of the plan, on the device of the set. The
        scales of a KV cache come last, on the CPU.

    Raises:
        CheckpointError: a name is not in the plan or comes twice, a tensor has another shape or dtype or has
            NaN or inf, or the pairs end within a set: the text names the partners that are missing.
        TypeError: plan is no Plan, or a value is no tensor. ValueError: the calibration of the plan is a
            text.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {_checks.describe(plan)}, must be a fp4gemm.checkpoint.Plan")
    return _quantized(tensors, plan)


def _quantized(tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    scheme, inputs = plan.scheme(), inputs_of(plan)
    sets_of = plan.sources
    waiting: dict[str, Tensor] = {}
    left = {name: len(sets) for name, sets in sets_of.items()}
    seen: set[str] = set()
    for name, tensor in tensors:
        _check(name, tensor, plan, seen)
        seen.add(name)
        if name in plan.kept:
            yield name, tensor
            continue
        waiting[name] = tensor.detach()
        for one in sets_of[name]:
            sources = {matrix.source for matrix in one.matrices}
            if not sources <= waiting.keys():
                continue
            with torch.inference_mode():
                made = convert_set(one, _parts(one, waiting), plan.options, inputs)
                found = tensors_of(one, made.stored, scheme, plan.options)
            yield from found.items()
            for source in sources:
                left[source] -= 1
                if left[source] == 0:
                    del waiting[source]
    if waiting:
        name = next(iter(waiting))
        missing = [m.source for one in sets_of[name] for m in one.matrices if m.source not in seen]
        raise CheckpointError(
            f"{name}: came without {', '.join(dict.fromkeys(missing))}, with which it shares an amax; "
            "must come together"
        )
    for name, number in plan.kv_scales().items():
        yield name, torch.tensor(number, dtype=torch.float32)


def _check(name: str, tensor: object, plan: Plan, seen: set[str]) -> None:
    if name not in plan.tensors:
        raise CheckpointError(f"{name}: is not in the plan, must be one of its {len(plan.tensors)} tensors")
    if name in seen:
        raise CheckpointError(f"{name}: comes twice, must come once")
    info, x = plan.tensors[name], _checks.is_tensor(name, tensor)
    if tuple(x.shape) != info.shape or x.dtype != DTYPES[info.dtype]:
        raise CheckpointError(
            f"{name}: is {x.dtype} of shape {tuple(x.shape)}, must be {DTYPES[info.dtype]} of shape "
            f"{info.shape}"
        )


def _parts(one: FusedSet, waiting: dict[str, Tensor]) -> dict[Part, Tensor]:
    device = waiting[one.matrices[0].source].device
    return {
        (name, expert): (waiting[name] if expert is None else waiting[name][expert]).to(device)
        for name, expert in one.parts
    }
